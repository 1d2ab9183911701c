package records

import (
	"bytes"
	"errors"
	"hash/crc32"
	"testing"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/vectors"
)

// seal gives the headers of a file, and the records behind them, the checksums that a hostile writer would give them.
func seal(file []byte) {
	if len(file) < headerBytes {
		return
	}
	le.PutUint32(file[60:], crc32.ChecksumIEEE(file[:60]))
	header := fileHeader{id: le.Uint64(file[32:])}
	for rest := file[headerBytes:]; len(rest) >= headerBytes; {
		records := rest[headerBytes:]
		records = records[:min(le.Uint64(rest[8:]), uint64(len(records)))]
		le.PutUint32(rest[56:], crc32.ChecksumIEEE(records))
		le.PutUint32(rest[60:], headerChecksum(&header, rest))
		rest = rest[headerBytes+len(records):]
	}
}

// Whatever a file contains, a reader returns valid records or errors, and comes to an end. What a writer would keep of
// it has no torn end.
func FuzzAReaderOfAHostileFile(f *testing.F) {
	var all struct{ Files []vector }
	vectors.Read(f, "record-file.json", &all)
	for _, v := range all.Files {
		f.Add(false, []byte(v.Hex))
		f.Add(true, []byte(v.Hex))
	}
	f.Fuzz(func(t *testing.T, isSealed bool, file []byte) {
		if isSealed {
			file = bytes.Clone(file)
			seal(file)
		}
		isTornAt := readAll(t, file)
		survey, err := surveyOf(bytes.NewReader(file), "file", int64(len(file)))
		if err != nil {
			return
		}
		if survey.end > int64(len(file)) || survey.begin > survey.end {
			t.Fatalf("a writer finds the end at %d of %d bytes, the beginning at %d", survey.end, len(file), survey.begin)
		}
		if isTornAt >= 0 && isTornAt != survey.end {
			t.Fatalf("a reader finds the torn end at %d, a writer at %d", isTornAt, survey.end)
		}
		if at := readAll(t, file[:survey.end]); at >= 0 {
			t.Fatalf("the file is torn at %d after a writer has cut it at %d", at, survey.end)
		}
	})
}

// readAll reads a file, and returns where its torn end begins; -1 if it is not torn.
func readAll(t *testing.T, file []byte) int64 {
	t.Helper()
	reader, err := newReader(bytes.NewReader(file), "file", func() (int64, error) { return int64(len(file)), nil }, nil)
	if err != nil {
		if !errors.Is(err, fail.ErrNotARecordFile) {
			t.Fatal(err)
		}
		return -1
	}
	for {
		before, inside := reader.at, reader.contentAt
		chunk, err := reader.NextChunk()
		switch {
		case errors.Is(err, fail.ErrTorn):
			return reader.at
		case errors.Is(err, fail.ErrLaterVersion), err == nil && chunk == nil:
			return -1
		case err != nil && !errors.Is(err, fail.ErrDamaged):
			t.Fatal(err)
		}
		isInside := reader.at == before && (reader.contentAt > inside || len(reader.content) == 0)
		if reader.at <= before && !isInside || reader.at > int64(len(file)) {
			t.Fatalf("from byte %d to %d of %d, in a frame from %d to %d", before, reader.at, len(file), inside,
				reader.contentAt)
		}
		if err != nil {
			continue
		}
		rest, messages := chunk.Bytes, uint32(0)
		for ; len(rest) > 0; messages++ {
			_, rest = NextRecord(rest)
		}
		if messages != chunk.Messages {
			t.Fatalf("a chunk of %d messages has %d", chunk.Messages, messages)
		}
	}
}
