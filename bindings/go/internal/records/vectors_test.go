package records

import (
	"bytes"
	"encoding/json"
	"errors"
	"hash/crc32"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/vectors"
)

// Replays spec/vectors/record-file.json, all of it.

type number = vectors.Number

type vectorLast struct {
	Lane [2]number
	Seq  number
}

type vectorChunk struct {
	Offset, Written number
	Lane            [2]number
	Peer            *kernel.Peer
	Padding         byte
	Messages        []struct {
		Seq     number
		Payload vectors.Hex
	}
	Last []vectorLast
}

func (v *vectorChunk) lane() Lane { return Lane{uint64(v.Lane[0]), uint64(v.Lane[1])} }

// encode returns the chunk as a writer writes it. The padding is any value: AppendRecord writes zeros.
func (v *vectorChunk) encode(file *fileHeader) []byte {
	var records []byte
	for _, last := range v.Last {
		for _, word := range []number{last.Lane[0], last.Lane[1], last.Seq} {
			records = le.AppendUint64(records, uint64(word))
		}
	}
	for _, message := range v.Messages {
		from := len(records)
		records = AppendRecord(records, uint32(message.Seq), message.Payload)
		for i := from + 8 + len(message.Payload); i < len(records); i++ {
			records[i] = v.Padding
		}
	}
	if v.Last != nil {
		last := chunkHeader{kind: kindLast, bytes: uint64(len(records)), written: uint64(v.Written),
			checksum: crc32.ChecksumIEEE(records)}
		return append(last.encode(file), records...)
	}
	chunk := Chunk{Lane: v.lane(), FirstSeq: uint32(v.Messages[0].Seq), Messages: uint32(len(v.Messages)),
		Peer: v.Peer, Bytes: records}
	header := headerOf(&chunk, uint64(v.Written))
	return append(header.encode(file), records...)
}

type vector struct {
	Name   string
	Header *struct {
		Created, Number, ID number
	}
	IsWritten bool `json:"is_written"`
	Chunks    []vectorChunk
	Hex       vectors.Hex
	Reads     any
	Opens     any
}

// damage is an error of a reader or a writer in the terms of the vectors.
func damage(t *testing.T, err error) any {
	t.Helper()
	var damaged *Damaged
	switch {
	case errors.As(err, &damaged) && errors.Is(err, fail.ErrDamaged):
		return map[string]any{"damaged": float64(damaged.Offset), "next": float64(damaged.Next)}
	case errors.Is(err, fail.ErrLaterVersion):
		return "later version"
	case errors.Is(err, fail.ErrNotARecordFile):
		return "refused"
	}
	t.Fatal(err)
	return nil
}

// reads returns what a reader finds.
func (v *vector) reads(t *testing.T, path string) any {
	t.Helper()
	reader, err := OpenReader(path)
	if err != nil {
		return damage(t, err)
	}
	defer reader.Close()
	wanted := fileHeader{uint64(v.Header.Created), uint64(v.Header.Number), uint64(v.Header.ID)}
	if reader.scanner.header != wanted {
		t.Errorf("header %+v, wanted %+v", reader.scanner.header, wanted)
	}
	found := []any{}
	for {
		chunk, err := reader.NextChunk()
		switch {
		case errors.Is(err, fail.ErrTorn):
			return append(found, map[string]any{"torn": float64(reader.at)})
		case errors.Is(err, fail.ErrLaterVersion):
			return append(found, damage(t, err))
		case err != nil:
			found = append(found, damage(t, err))
		case chunk == nil:
			return append(found, "end")
		default:
			found = append(found, float64(v.indexOf(t, chunk)))
		}
	}
}

// indexOf returns which chunk of the vector this is, and compares it.
func (v *vector) indexOf(t *testing.T, chunk *FileChunk) int {
	t.Helper()
	for i := range v.Chunks {
		wanted := &v.Chunks[i]
		// Chunks of one frame have its offset.
		if int64(wanted.Offset) != chunk.Offset || wanted.lane() != chunk.Lane {
			continue
		}
		if chunk.Lane != wanted.lane() || !reflect.DeepEqual(chunk.Peer, wanted.Peer) ||
			chunk.Written.UnixNano() != int64(wanted.Written) || int(chunk.Messages) != len(wanted.Messages) {
			t.Errorf("chunk %+v, wanted %+v", chunk, wanted)
		}
		rest, seq := chunk.Bytes, uint64(chunk.FirstSeq)
		for _, message := range wanted.Messages {
			var payload []byte
			if payload, rest = NextRecord(rest); seq != uint64(message.Seq) || !bytes.Equal(payload, message.Payload) {
				t.Errorf("message %d %q, wanted %d %q", seq, payload, message.Seq, message.Payload)
			}
			seq = seq%(1<<32-1) + 1
		}
		if len(rest) > 0 {
			t.Errorf("%d bytes are left", len(rest))
		}
		return i
	}
	t.Fatalf("a chunk at %d", chunk.Offset)
	return -1
}

// opens returns what a writer finds when it opens the file.
func (v *vector) opens(t *testing.T, path string) any {
	t.Helper()
	file, err := Open(path, Options{})
	if err != nil {
		return damage(t, err)
	}
	defer file.Close()
	lasts := []any{}
	for _, last := range v.Opens.(map[string]any)["last"].([]any) {
		var of vectorLast
		text, _ := json.Marshal(last)
		if err := json.Unmarshal(text, &of); err != nil {
			t.Fatal(err)
		}
		if found := file.LastSeq(Lane{uint64(of.Lane[0]), uint64(of.Lane[1])}); number(found) == of.Seq {
			lasts = append(lasts, last)
		}
	}
	if len(file.lanes.last) != len(lasts) {
		t.Errorf("numbers of %d lanes, wanted %d", len(file.lanes.last), len(lasts))
	}
	return map[string]any{"cut": float64(file.CutBytes), "last": lasts}
}

func TestFilesAreWrittenReadAndOpenedAsTheVectorsSay(t *testing.T) {
	var all struct{ Files []vector }
	if vectors.Read(t, "record-file.json", &all); len(all.Files) == 0 {
		t.Fatal("there are none")
	}
	for _, v := range all.Files {
		t.Run(v.Name, func(t *testing.T) {
			if v.Header != nil {
				header := fileHeader{uint64(v.Header.Created), uint64(v.Header.Number), uint64(v.Header.ID)}
				written := header.encode()
				if v.IsWritten {
					for i := range v.Chunks {
						written = append(written, v.Chunks[i].encode(&header)...)
					}
					if !bytes.Equal(written, v.Hex) {
						t.Error("the bytes that a writer writes are others")
					}
				} else if !bytes.HasPrefix(v.Hex, written) {
					t.Error("the header that a writer writes is another")
				}
			}
			path := filepath.Join(t.TempDir(), "file")
			if err := os.WriteFile(path, v.Hex, 0o600); err != nil {
				t.Fatal(err)
			}
			if found := v.reads(t, path); !reflect.DeepEqual(found, v.Reads) {
				t.Errorf("a reader finds %v, wanted %v", found, v.Reads)
			}
			if found := v.opens(t, path); !reflect.DeepEqual(found, v.Opens) {
				t.Errorf("a writer finds %v, wanted %v", found, v.Opens)
			}
			cut := 0
			if opened, isOpened := v.Opens.(map[string]any); isOpened && opened["cut"] != nil {
				cut = int(opened["cut"].(float64))
			}
			if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, v.Hex[:len(v.Hex)-cut]) {
				t.Error("the writer changed more than the torn tail", err)
			}
		})
	}
}
