// Package records has record files, spec/record-file.md: their bytes, a writer and a reader.
//
// Of the writer:
//   - A file at its path is complete. The writer creates it as FILE.pelton-next, locks it, writes its header, and then
//     renames it. So the file at FILE has a header, and a lock as long as it has a writer.
//   - A write goes to the end that the writer counts. It cuts off what a failed write left. Behind that end the file
//     has bytes only during a write.
//   - Each write is checked before and after. Before it, the writer checks that the file is at its path and has its
//     size; after it, that the size is right and the file is not deleted. Otherwise another program has truncated,
//     moved or deleted it, and the writer continues in the file at the path, or in a new one.
package records

import (
	"crypto/rand"
	"errors"
	"hash/crc32"
	"io"
	"os"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"golang.org/x/sys/unix"
)

const (
	// verifiedBytes: a writer that opens a file verifies checksums this close to its end. A failed machine may lose
	// more; `pelton cat --verify` checks everything.
	verifiedBytes = 4 << 20
	// The most buffers of one writev.
	iovMax = 1024
)

// EachWrite is the value of [Options.SyncBytes] for a sync of each write.
const EachWrite = -1

// Options are the options of a file.
type Options struct {
	// A write beyond this size begins a new file; 0: never.
	RotateBytes int64
	// A sync starts after each such number of bytes; [EachWrite]; 0: not by size.
	SyncBytes int64
	// A sync starts by the first write this long after another; 0: not by time.
	SyncInterval time.Duration
}

func (o *Options) syncs() bool { return o.SyncBytes != 0 || o.SyncInterval != 0 }

// File is a record file that this process writes. One goroutine at a time uses it.
type File struct {
	// CutBytes is the size of the torn tail that opening cut off.
	CutBytes int64

	// Absolute, for rotations.
	path     string
	options  Options
	file     *os.File
	identity identity
	header   fileHeader
	// Where the next chunk goes, and where the first chunk with records begins or will begin.
	end, begin int64
	// The file may have bytes behind the end.
	isTorn bool
	lanes  lanes
	// The result of the sync under way; nil: there is none.
	syncing chan error
	// The end when the last sync was started, and when the first write after it returned.
	synced   int64
	unsynced time.Time
}

// survey is what a writer knows after it has read a file.
type survey struct {
	header     fileHeader
	begin, end int64
	lanes      lanes
}

// Open opens or creates a file to write to. While another writer has it, it waits up to a second.
//
// Errors: [fail.ErrRoleTaken], a [Damaged], [fail.ErrNotARecordFile], [fail.ErrLaterVersion], [fail.ErrNoSpace],
// [fail.ErrSystem].
func Open(path string, options Options) (*File, error) {
	path, err := absolute(path)
	if err != nil {
		return nil, err
	}
	file, err := openOrBegin(path, options.syncs(), nil)
	if err != nil {
		return nil, err
	}
	f := &File{path: path, options: options}
	size, err := f.use(file)
	if err == nil {
		f.CutBytes = size - f.end
		err = f.cut()
	}
	if err != nil {
		_ = closeLocked(file)
		return nil, err
	}
	if options.syncs() && f.end > f.begin {
		// What an earlier writer wrote may not be on the disk.
		f.unsynced = time.Now()
	}
	return f, nil
}

// use takes an opened file as this writer's. It returns the file's size. After an error it has changed nothing.
func (f *File) use(file *os.File) (int64, error) {
	found, err := stat(file, f.path)
	if err != nil {
		return 0, err
	}
	s, err := surveyOf(file, f.path, found.Size)
	if err != nil {
		return 0, err
	}
	s.lanes.noteAll(&f.lanes)
	f.file, f.identity, f.lanes = file, identityOf(&found), s.lanes
	f.header, f.begin, f.end = s.header, s.begin, s.end
	f.synced, f.unsynced = 0, time.Time{}
	return found.Size, nil
}

// surveyOf reads a file of that many bytes. Its end is before a torn tail.
func surveyOf(file io.ReaderAt, path string, bytes int64) (*survey, error) {
	s, err := newScanner(file, path)
	if err != nil {
		return nil, err
	}
	found := &survey{header: s.header, begin: headerBytes, end: headerBytes}
	for found.end < bytes {
		at := found.end
		header, wrong, err := s.chunk(at, bytes, func(h *chunkHeader) bool {
			return h.kind == kindLast || at+h.allBytes()+verifiedBytes > bytes
		})
		if err != nil {
			return nil, err
		}
		if wrong != nil {
			next, err := s.damage(at, bytes, wrong)
			if next >= 0 || !isTorn(err) {
				return nil, err
			}
			break
		}
		if err := found.lanes.noteChunk(s, at, &header); err != nil {
			return nil, err
		}
		found.end += header.allBytes()
		if header.kind == kindLast {
			found.begin = found.end
		}
	}
	return found, nil
}

func newFileHeader(number uint64) fileHeader {
	var id [8]byte
	_, _ = rand.Read(id[:])
	return fileHeader{now(), number, le.Uint64(id[:])}
}

// beginFile writes the beginning of a file, with the last numbers of lanes if there are any. It returns the file's end.
func beginFile(file *os.File, path string, header *fileHeader, lanes []byte) (int64, error) {
	b := header.encode()
	if len(lanes) > 0 {
		last := chunkHeader{kind: kindLast, bytes: uint64(len(lanes)), written: header.created,
			checksum: crc32.ChecksumIEEE(lanes)}
		b = append(append(b, last.encode(header)...), lanes...)
	}
	end := int64(len(b))
	size, err := sizeOf(file)
	if err != nil {
		return 0, err
	}
	// An empty file is not truncated: after that, ext4 writes out later data at close, which then waits for the disk.
	if size > 0 {
		err = truncate(file, 0)
	}
	if err == nil {
		err = checkFileSize(end)
	}
	if err == nil {
		if err = appendAll(file, [][]byte{b}); err != nil {
			// Otherwise a part of it would pass as a beginning, without the last numbers.
			_ = truncate(file, 0)
		}
	}
	return end, failed("writing to", path, err)
}

func truncate(file *os.File, bytes int64) error {
	return untilDone(func() error { return unix.Ftruncate(int(file.Fd()), bytes) })
}

// checkFileSize checks the limit of file sizes, beyond which the kernel sends a signal that ends the process.
func checkFileSize(bytes int64) error {
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_FSIZE, &limit) == nil && limit.Cur < uint64(bytes) {
		return unix.EFBIG
	}
	return nil
}

// appendAll writes everything at the end of the file, with as few calls as the system allows.
func appendAll(file *os.File, pieces [][]byte) error {
	for len(pieces) > 0 {
		if len(pieces[0]) == 0 {
			pieces = pieces[1:]
			continue
		}
		written := 0
		err := untilDone(func() (err error) {
			written, err = unix.Writev(int(file.Fd()), pieces[:min(len(pieces), iovMax)])
			return err
		})
		if err != nil {
			return err
		}
		if written == 0 { // no system returns 0 for a file
			return unix.EIO
		}
		for written > 0 {
			part := min(written, len(pieces[0]))
			written -= part
			if pieces[0] = pieces[0][part:]; len(pieces[0]) == 0 {
				pieces = pieces[1:]
			}
		}
	}
	return nil
}

// Write writes all of the chunks, or nothing that counts.
//
// Errors: [fail.ErrNoSpace], [fail.ErrSystem]: the file is as it was. [fail.ErrSystem] also reports, once, an earlier
// sync that failed; nothing is written then. [fail.ErrNotARecordFile], a [Damaged], [fail.ErrRoleTaken]: the path has
// another file, or another writer's.
func (f *File) Write(chunks []Chunk) error {
	if err := f.reportSync(); err != nil {
		return err
	}
	if len(chunks) > 0 {
		if err := f.append(chunks); err != nil {
			return err
		}
	}
	if f.syncing == nil && !f.unsynced.IsZero() && (f.options.SyncBytes > 0 && f.end-f.synced >= f.options.SyncBytes ||
		f.options.SyncInterval > 0 && time.Since(f.unsynced) >= f.options.SyncInterval) {
		f.synced, f.unsynced = f.end, time.Time{}
		file, done := f.file, make(chan error, 1)
		go func() { done <- sync(file) }()
		f.syncing = done
	}
	return nil
}

func sync(file *os.File) error {
	return untilDone(func() error { return unix.Fdatasync(int(file.Fd())) })
}

// Due returns when Write must be called, even without chunks, for a sync; zero: no sync is due.
func (f *File) Due() time.Time {
	if f.unsynced.IsZero() || f.options.SyncInterval == 0 {
		return time.Time{}
	}
	return f.unsynced.Add(f.options.SyncInterval)
}

// LastSeq returns the number of the last message of a lane in the files; 0 if there is none.
func (f *File) LastSeq(of Lane) uint32 { return f.lanes.last[of].seq }

// Sync waits until everything written is on the disk.
//
// Errors: [fail.ErrSystem]: some of it may be lost, by this sync or an earlier one.
func (f *File) Sync() error {
	err := f.waitSync()
	if err == nil {
		err = f.unsyncedError(sync(f.file))
	}
	if err == nil {
		f.synced, f.unsynced = f.end, time.Time{}
	}
	return err
}

func (f *File) unsyncedError(err error) error {
	return failed("what was written before may not be on the disk: syncing", f.path, err)
}

// waitSync waits for the sync under way, and returns its error.
func (f *File) waitSync() error {
	if f.syncing == nil {
		return nil
	}
	err := <-f.syncing
	f.syncing = nil
	return f.unsyncedError(err)
}

// reportSync returns, once, the error of the last sync if that has ended.
func (f *File) reportSync() error {
	if len(f.syncing) == 0 {
		return nil
	}
	return f.waitSync()
}

// Close closes the file without a sync, and waits only for a sync that is under way.
func (f *File) Close() error {
	err := f.waitSync()
	if closed := closeLocked(f.file); err == nil {
		err = failed("closing", f.path, closed)
	}
	return err
}

func (f *File) append(chunks []Chunk) error {
	bytes := int64(0)
	for i := range chunks {
		bytes += headerBytes + int64(len(chunks[i].Bytes))
	}
	for range tries {
		counts, err := f.tryAppend(chunks, bytes)
		if err != nil {
			return err
		}
		if !counts {
			continue
		}
		f.isTorn = false
		f.end += bytes
		for i := range chunks {
			f.lanes.note(chunks[i].Lane, lastSeq(chunks[i].FirstSeq, chunks[i].Messages))
		}
		switch {
		case f.options.SyncBytes == EachWrite:
			f.synced = f.end
		case f.options.syncs() && f.unsynced.IsZero():
			f.unsynced = time.Now()
		}
		return nil
	}
	return unstableAt(f.path)
}

// tryAppend returns false if the file was truncated or deleted just before or after the write, which then does not
// count.
func (f *File) tryAppend(chunks []Chunk, bytes int64) (bool, error) {
	where, size, err := locate(f.file, f.identity, f.path)
	switch {
	case err == nil && where != atPath:
		err = f.continueAtPath()
	case err == nil && size != f.end:
		err = f.repair(size)
	}
	if err == nil && f.end > f.begin && f.options.RotateBytes > 0 && f.end+bytes > f.options.RotateBytes {
		err = f.rotate()
	}
	if err != nil {
		return false, err
	}
	f.isTorn = true
	err = checkFileSize(f.end + bytes)
	if err == nil {
		err = f.writeChunks(chunks)
	}
	found, statErr := stat(f.file, f.path)
	if statErr != nil {
		return false, statErr
	}
	if err == nil && (found.Nlink == 0 || found.Size != f.end+bytes) {
		// Cuts this write's bytes off, as far as they are still there. The next attempt's check handles the rest.
		return false, failed("cutting a partial write off", f.path, truncate(f.file, max(found.Size-bytes, 0)))
	}
	if err == nil && f.options.SyncBytes == EachWrite {
		err = sync(f.file)
	}
	if err != nil {
		// If that fails now, the next write does it first.
		_ = f.cut()
		return false, failed("writing to", f.path, err)
	}
	return true, nil
}

func (f *File) writeChunks(chunks []Chunk) error {
	written, pieces := now(), make([][]byte, 0, 2*len(chunks))
	for i := range chunks {
		header := headerOf(&chunks[i], written)
		pieces = append(pieces, header.encode(&f.header), chunks[i].Bytes)
	}
	return appendAll(f.file, pieces)
}

// cut cuts off the bytes behind the end.
func (f *File) cut() error {
	f.isTorn = true
	size, err := sizeOf(f.file)
	if err == nil && size > f.end {
		err = failed("cutting a partial write off", f.path, truncate(f.file, f.end))
	}
	f.isTorn = err != nil
	return err
}

// rotate starts a new file. After a kill at any step, the next opening finds a complete file at the path, or none
// there and a complete one under the temporary name.
func (f *File) rotate() error {
	if f.options.syncs() {
		if err := f.Sync(); err != nil {
			return err
		}
	}
	highest, err := highestNumber(f.path)
	if err != nil {
		return err
	}
	number := max(highest+1, f.header.number)
	rotated, temporary := numbered(f.path, number), temporaryPath(f.path)
	found, err := stat(f.file, f.path)
	if err != nil {
		return err
	}
	mode := found.Mode & 0o777
	next, err := createTemporary(temporary, &mode)
	if err != nil {
		return err
	}
	header := newFileHeader(number + 1)
	end, err := beginFile(next, temporary, &header, f.lanes.encode())
	if err == nil {
		found, err = stat(next, temporary)
	}
	if err == nil && f.options.syncs() {
		err = failed("syncing", temporary, sync(next))
	}
	if err == nil {
		err = failed("renaming", f.path, rename(f.path, rotated))
	}
	if err == nil {
		if err = failed("renaming", temporary, rename(temporary, f.path)); err != nil {
			// Restores the old name. If that fails too, each further write reports it; the renamed file has everything.
			_ = rename(rotated, f.path)
		}
	}
	if err != nil {
		_ = closeLocked(next)
		return err
	}
	_ = closeLocked(f.file)
	f.file, f.identity, f.header, f.end, f.begin = next, identityOf(&found), header, end, end
	f.isTorn, f.synced, f.unsynced = false, 0, time.Time{}
	if f.options.syncs() {
		return syncDirectory(f.path)
	}
	return nil
}

// repair handles a size that is not the counted one.
func (f *File) repair(size int64) error {
	b := make([]byte, headerBytes)
	read, err := readAt(f.file, b, 0)
	if err != nil {
		return failed("reading", f.path, err)
	}
	switch {
	case read == len(b) && string(b) == string(f.header.encode()):
		if size > f.end {
			return f.cut()
		}
		s, err := surveyOf(f.file, f.path, size)
		if err != nil {
			return err
		}
		f.begin, f.end = s.begin, s.end
	case size == 0 || f.isTorn:
		// A failed write may have left bytes in a file that was truncated meanwhile.
		f.header = newFileHeader(f.header.number + 1)
		if f.end, err = beginFile(f.file, f.path, &f.header, f.lanes.encode()); err != nil {
			return err
		}
		f.begin = f.end
	default:
		return notARecordFile(f.path, "another program has overwritten it while it was open: move it away")
	}
	f.synced = min(f.synced, f.end)
	return f.cut()
}

// continueAtPath continues in the file that is at the path now, or in a new one.
func (f *File) continueAtPath() error {
	if f.options.syncs() {
		// The old file's records become durable, as before. The system reports an error of a sync once; any other
		// error repeats with the next write.
		if err := f.Sync(); err != nil {
			return err
		}
	}
	found, err := stat(f.file, f.path)
	if err != nil {
		return err
	}
	mode := found.Mode & 0o777
	before := &predecessor{number: f.header.number + 1, mode: &mode, lanes: f.lanes.encode()}
	file, err := openOrBegin(f.path, f.options.syncs(), before)
	if err != nil {
		return err
	}
	old := f.file
	if _, err := f.use(file); err != nil {
		_ = closeLocked(file)
		return err
	}
	_ = closeLocked(old)
	return f.cut()
}

func isTorn(err error) bool { return errors.Is(err, fail.ErrTorn) }
