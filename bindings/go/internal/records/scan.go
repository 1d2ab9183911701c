package records

import (
	"fmt"
	"hash/crc32"
	"io"
	"os"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
)

const (
	// windowBytes is the size of one read: a chunk's header, and several of them if chunks are small. A guess.
	windowBytes = 16 << 10
	// pieceBytes is how much one step of a verification or of a search reads.
	pieceBytes = 1 << 20
)

// scanner reads the chunk headers of an open file, through a window of its bytes.
type scanner struct {
	file     io.ReaderAt
	path     string
	header   fileHeader
	window   []byte
	windowAt int64
}

// newScanner reads and checks the file's header.
func newScanner(file io.ReaderAt, path string) (*scanner, error) {
	s := &scanner{file: file, path: path}
	begin, err := s.bytes(0, headerBytes)
	if err != nil {
		return nil, err
	}
	header, problem := decodeFile(begin)
	if problem != "" {
		return nil, notARecordFile(path, "%s", problem)
	}
	s.header = header
	return s, nil
}

func notARecordFile(path, format string, args ...any) error {
	return fail.New(fail.ErrNotARecordFile, "%s is no record file that this program can use: %s", path,
		fmt.Sprintf(format, args...))
}

// bytes returns up to that many bytes: fewer only at the end of the file. They are valid until the next call.
func (s *scanner) bytes(at, wanted int64) ([]byte, error) {
	if s.loaded(at) < wanted {
		size := int(max(wanted, windowBytes))
		if cap(s.window) < size {
			s.window = make([]byte, size)
		}
		s.windowAt = at
		read, err := readAt(s.file, s.window[:size], at)
		s.window = s.window[:read]
		if err != nil {
			return nil, fail.System("reading "+s.path, err)
		}
	}
	from := at - s.windowAt
	return s.window[from:min(from+wanted, int64(len(s.window)))], nil
}

// loaded returns how many bytes the window has from a place on.
func (s *scanner) loaded(at int64) int64 {
	if at < s.windowAt {
		return 0
	}
	return max(s.windowAt+int64(len(s.window))-at, 0)
}

// readAt fills b, and returns how many bytes the file had.
func readAt(file io.ReaderAt, b []byte, at int64) (int, error) {
	read, err := file.ReadAt(b, at)
	if err == io.EOF {
		err = nil
	}
	return read, err
}

// forget empties the window: a writer may have changed those bytes.
func (s *scanner) forget() { s.window = s.window[:0] }

// chunk returns the header of the chunk at a place before the end. It verifies the records' checksum if isVerified
// returns true.
func (s *scanner) chunk(at, end int64, isVerified func(*chunkHeader) bool) (chunkHeader, *broken, error) {
	b, err := s.bytes(at, min(headerBytes, end-at))
	if err != nil {
		return chunkHeader{}, nil, err
	}
	header, wrong := decodeChunk(b, end-at-headerBytes, &s.header)
	if wrong != nil {
		return header, wrong, nil
	}
	if header.kind > kindCompressed && header.kind < kindOptional {
		return header, nil, fail.New(fail.ErrLaterVersion,
			"the chunk at byte %d of %s is of kind %d, this program knows up to %d: use a pelton as new as its writer",
			at, s.path, header.kind, kindCompressed)
	}
	if !isVerified(&header) {
		return header, nil, nil
	}
	checksum := uint32(0)
	for done := int64(0); done < int64(header.bytes); {
		piece, err := s.bytes(at+headerBytes+done, min(pieceBytes, int64(header.bytes)-done))
		if err != nil {
			return header, nil, err
		}
		if len(piece) == 0 {
			return header, brokenAt("%d bytes of a chunk's records", done).want("%d", header.bytes), nil
		}
		checksum = crc32.Update(checksum, crc32.IEEETable, piece)
		done += int64(len(piece))
	}
	return header, header.checkChecksum(checksum), nil
}

func always(*chunkHeader) bool { return true }

func never(*chunkHeader) bool { return false }

// wholeFrom returns where the first whole chunk begins, at any multiple of 8 from that place on; -1 if there is none.
// It checks each byte once, as the records of a chunk with a valid header contain no other chunk.
func (s *scanner) wholeFrom(at, end int64) (int64, error) {
	for at = (at + 7) &^ 7; at+headerBytes <= end; {
		// A payload may look like the beginning of a header every 8 bytes: what is in the window is not read again.
		piece := s.loaded(at)
		if piece < headerBytes {
			piece = pieceBytes
		}
		b, err := s.bytes(at, min(piece, end-at))
		if err != nil {
			return -1, err
		}
		checked := int64(len(b) &^ 7)
		if checked == 0 { // another program has truncated the file
			return -1, nil
		}
		found := indexOfChunk(b[:checked])
		if found < 0 {
			at += checked
			continue
		}
		at += int64(found)
		header, wrong, err := s.chunk(at, end, never)
		if err != nil {
			return -1, err
		}
		if wrong != nil {
			at += 8
			continue
		}
		_, wrong, err = s.chunk(at, end, always)
		if err != nil || wrong == nil {
			return at, err
		}
		at += header.allBytes()
	}
	return -1, nil
}

// damage returns the error for what is wrong at a place, and where the next whole chunk begins; -1 if there is none.
// It does not search the records of a chunk whose header is valid.
func (s *scanner) damage(at, end int64, wrong *broken) (next int64, err error) {
	header, headerWrong, err := s.chunk(at, end, never)
	if err != nil {
		return -1, err
	}
	from := at + 8
	if headerWrong == nil {
		from = at + header.allBytes()
	}
	next, err = s.wholeFrom(from, end)
	if err != nil {
		return -1, err
	}
	if next < 0 {
		return next, fail.New(fail.ErrTorn, "%s ends with a part of a write, from byte %d on: found %s, wanted %s",
			s.path, at, wrong.found, wrong.wanted)
	}
	return next, s.damaged(at, wrong, next)
}

func (s *scanner) damaged(at int64, wrong *broken, next int64) error {
	return &Damaged{Path: s.path, Offset: at, Next: next, found: wrong.found, wanted: wrong.wanted}
}

// Damaged is the error of damage in a file, with the place of the next valid chunk.
type Damaged struct {
	Path          string
	Offset, Next  int64
	found, wanted string
}

func (d *Damaged) Error() string {
	return fmt.Sprintf("pelton: %s is damaged at byte %d: found %s, wanted %s; valid records follow at byte %d. "+
		"To write, move the file away", d.Path, d.Offset, d.found, d.wanted, d.Next)
}

// Unwrap returns the sentinel.
func (d *Damaged) Unwrap() error { return fail.ErrDamaged }

// sizeOf returns the size of an open file.
func sizeOf(file *os.File) (int64, error) {
	found, err := file.Stat()
	if err != nil {
		return 0, fail.System("reading "+file.Name(), err)
	}
	return found.Size(), nil
}
