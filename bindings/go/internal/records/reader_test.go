package records

import (
	"bytes"
	"errors"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
)

// sparseFile writes a file of one chunk, whose records are one message: the beginning of data, zeros up to that many
// bytes as a hole.
func sparseFile(t *testing.T, data []byte, size uint64, checksum uint32) *Reader {
	t.Helper()
	header := fileHeader{number: 1, id: 7}
	chunk := chunkHeader{kind: kindRecords, bytes: size, lane: Lane{1, 2}, first: 1, messages: 1, checksum: checksum}
	path := filepath.Join(t.TempDir(), "log")
	if err := os.WriteFile(path, append(append(header.encode(), chunk.encode(&header)...), data...), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 2*headerBytes+int64(size)); err != nil {
		t.Fatal(err)
	}
	r, err := OpenReader(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

func TestALargeChunkThatIsAHoleIsDamageAndNotRead(t *testing.T) {
	r := sparseFile(t, le.AppendUint64(nil, 1<<32|100), 1<<34, 0)
	_, err := r.NextChunk()
	if !errors.Is(err, fail.ErrTorn) || !strings.Contains(err.Error(), "in a chunk of 17179869184 bytes, the rest is a hole") {
		t.Fatal(err)
	}
	if r.records != nil {
		t.Fatal("the reader has allocated memory for the chunk")
	}
}

func TestALargeChunkWhoseZerosBecameAHoleIsRead(t *testing.T) {
	const size = 65 << 20
	data := append(le.AppendUint64(nil, 1<<32|(size-8)), bytes.Repeat([]byte("x"), 2<<20)...)
	r := sparseFile(t, data, size, crc32.ChecksumIEEE(append(bytes.Clone(data), make([]byte, size-len(data))...)))
	chunk, err := r.NextChunk()
	if err != nil {
		t.Fatal(err)
	}
	payload, rest := NextRecord(chunk.Bytes)
	if len(payload) != size-8 || len(rest) != 0 || bytes.Count(payload, []byte("x")) != len(data)-8 {
		t.Fatal(len(payload), len(rest))
	}
}
