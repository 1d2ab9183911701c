package records

import (
	"bytes"
	"strings"
	"testing"
)

// counting counts the bytes that are read.
type counting struct {
	*bytes.Reader
	read int
}

func (c *counting) ReadAt(b []byte, at int64) (int, error) {
	read, err := c.Reader.ReadAt(b, at)
	c.read += read
	return read, err
}

// A sender may fill its messages with what begins a header.
func TestASearchForAChunkReadsEachByteOnce(t *testing.T) {
	header := fileHeader{number: 1, id: 7}
	text := append(header.encode(), strings.Repeat(chunkMagic+strings.Repeat("!", 60), 5*pieceBytes/64)...)
	file := &counting{Reader: bytes.NewReader(text)}
	s, err := newScanner(file, "file")
	if err != nil {
		t.Fatal(err)
	}
	if found, err := s.wholeFrom(headerBytes, int64(len(text))); err != nil || found >= 0 {
		t.Fatal(found, err)
	}
	// And the windows at the ends of pieces.
	if file.read > 2*len(text) {
		t.Fatalf("read %d bytes of a file of %d", file.read, len(text))
	}
	chunk := Chunk{FirstSeq: 1, Messages: 1, Bytes: AppendRecord(nil, 1, nil)}
	last := headerOf(&chunk, 0)
	text = append(append(text, last.encode(&header)...), chunk.Bytes...)
	s.file = bytes.NewReader(text)
	s.forget()
	wanted := int64(len(text) - headerBytes - len(chunk.Bytes))
	if found, err := s.wholeFrom(headerBytes, int64(len(text))); err != nil || found != wanted {
		t.Fatal(found, wanted, err)
	}
}
