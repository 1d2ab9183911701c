package records

import (
	"errors"
	"hash/crc32"
	"io"
	"os"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"golang.org/x/sys/unix"
)

const (
	// sparseBytesMax is the size of a chunk's records up to which they are read in any case: some seconds of flushing.
	sparseBytesMax = 64 << 20
	// Of a larger chunk, the file must have at least one byte of bytesPerData: a copy may have made long runs of zeros
	// into holes. Otherwise a file of a few blocks would make its reader allocate 16 GiB.
	bytesPerData = 64
)

// Reader reads a file chunk by chunk. It checks each chunk before it returns any of its records.
type Reader struct {
	scanner *scanner
	size    func() (int64, error)
	close   func() error
	// Where the next chunk begins.
	at      int64
	records []byte
	// What the compressed chunk at frameAt contains, and where in it the next chunk begins.
	content   []byte
	contentAt int
	frameAt   int64
	decoder   *zstd.Decoder
}

// FileChunk is a chunk in a file, whose records were checked.
type FileChunk struct {
	Chunk
	Written time.Time
	Offset  int64
}

// OpenReader opens a file. Others may write to it meanwhile.
func OpenReader(path string) (*Reader, error) {
	// Without waiting for the writer of a FIFO, which is refused below.
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, fail.System("opening a record file", err)
	}
	found, err := file.Stat()
	if err == nil && !found.Mode().IsRegular() {
		err = notARecordFile(path, "it is not a regular file")
	}
	var r *Reader
	if err == nil {
		r, err = newReader(file, path, func() (int64, error) { return sizeOf(file) }, file.Close)
	}
	if err != nil {
		file.Close()
		return nil, err
	}
	return r, nil
}

func newReader(file io.ReaderAt, path string, size func() (int64, error), close func() error) (*Reader, error) {
	s, err := newScanner(file, path)
	if err != nil {
		return nil, err
	}
	return &Reader{scanner: s, size: size, close: close, at: headerBytes}, nil
}

// NextChunk returns the next chunk, whose records are valid until the next call; nil at the end of the file, to which
// a writer may append more.
//
// Errors: [fail.ErrTorn], and the next call checks the same place again; a [Damaged], and the next call continues
// behind it; [fail.ErrLaterVersion]; [fail.ErrSystem].
func (r *Reader) NextChunk() (*FileChunk, error) {
	for {
		if r.contentAt < len(r.content) {
			return r.nextInside()
		}
		end, err := r.size()
		if err != nil {
			return nil, err
		}
		if end <= r.at {
			r.scanner.forget()
			return nil, nil
		}
		header, wrong, err := r.scanner.chunk(r.at, end, func(h *chunkHeader) bool { return !h.hasRecords() })
		if err == nil && wrong == nil && header.hasRecords() {
			wrong, err = r.readRecords(&header)
		}
		if err != nil {
			return nil, err
		}
		if wrong != nil {
			next, err := r.scanner.damage(r.at, end, wrong)
			r.scanner.forget()
			if next >= 0 {
				r.at = next
			}
			return nil, err
		}
		at := r.at
		r.at += header.allBytes()
		switch header.kind {
		case kindRecords:
			return r.checked(&header, r.records, at)
		case kindCompressed:
			r.frameAt = at
			if wrong := r.decompress(&header); wrong != nil {
				return nil, r.scanner.damaged(at, wrong, r.at)
			}
		}
	}
}

// checked returns a chunk whose records match their checksum.
func (r *Reader) checked(header *chunkHeader, records []byte, at int64) (*FileChunk, error) {
	if wrong := header.checkRecords(records); wrong != nil {
		// The writer wrote it so. The chunks behind it are independent of it.
		return nil, r.scanner.damaged(at, wrong, r.at)
	}
	return &FileChunk{
		Chunk: Chunk{Lane: header.lane, FirstSeq: header.first, Messages: header.messages, Peer: header.peer,
			Bytes: records},
		Written: time.Unix(0, int64(header.written)), Offset: at,
	}, nil
}

// readRecords reads the records of the next chunk, and compares their checksum.
func (r *Reader) readRecords(header *chunkHeader) (*broken, error) {
	if wrong := r.mostlyHole(header); wrong != nil {
		return wrong, nil
	}
	if uint64(cap(r.records)) < header.bytes {
		r.records = make([]byte, header.bytes)
	}
	r.records = r.records[:header.bytes]
	read, err := readAt(r.scanner.file, r.records, r.at+headerBytes)
	if err != nil {
		return nil, fail.System("reading "+r.scanner.path, err)
	}
	// If the file was truncated meanwhile, the missing bytes do not count.
	return header.checkChecksum(crc32.ChecksumIEEE(r.records[:read])), nil
}

// mostlyHole returns what is wrong with a large chunk of which the file has almost nothing.
func (r *Reader) mostlyHole(header *chunkHeader) *broken {
	file, isFile := r.scanner.file.(*os.File)
	if !isFile || header.bytes <= sparseBytesMax {
		return nil
	}
	begin, wanted := r.at+headerBytes, int64(header.bytes)/bytesPerData
	found := dataBetween(file, begin, begin+int64(header.bytes), wanted)
	if found >= wanted {
		return nil
	}
	return brokenAt("%d bytes of data in a chunk of %d bytes, the rest is a hole", found, header.bytes).
		want("at least %d", wanted)
}

// dataBetween returns how many bytes between two places are data, and no holes; it stops counting at enough. A file
// system that knows no holes has only data.
func dataBetween(file *os.File, at, end, enough int64) (found int64) {
	for at < end && found < enough {
		data, err := file.Seek(at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) { // no data follows
			break
		}
		if err != nil {
			return enough
		}
		data = min(data, end)
		hole, err := file.Seek(data, unix.SEEK_HOLE)
		if err != nil {
			hole = end
		}
		hole = min(hole, end)
		found += max(hole-data, 0)
		// Forward in any case, also if another program changes the file meanwhile.
		at = max(hole, at+1)
	}
	return found
}

// Close closes the file.
func (r *Reader) Close() error {
	if r.decoder != nil {
		r.decoder.Close()
	}
	return r.close()
}
