package records

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"golang.org/x/sys/unix"
)

// A record file at its path: opening, locking, creating under a temporary name, renaming, and checking that it is
// still the file at that path.
//
//   - A temporary file is created, never reused (O_EXCL, O_NOFOLLOW): no symbolic link is followed, and no other
//     process has it open. A leftover is removed.
//   - A file is the one at its path if device and inode agree. The writer's descriptor keeps the inode from being
//     reused.

const (
	// The usual mode of logs.
	newMode = 0o640
	// lockTimeout: a killed process keeps its lock until the kernel has freed its memory. Far longer than any observed
	// delay; a guess.
	lockTimeout = time.Second
	// tries is how often the writer retries while other programs create, rotate or truncate the file.
	tries = 100
)

// identity is the device and the inode of a file.
type identity struct{ device, inode uint64 }

func stat(file *os.File, path string) (found unix.Stat_t, err error) {
	err = unix.Fstat(int(file.Fd()), &found)
	return found, failed("reading", path, err)
}

func identityOf(found *unix.Stat_t) identity { return identity{uint64(found.Dev), found.Ino} }

// failed returns an error of the system as this module's.
func failed(doing, path string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return fail.With(err, fail.ErrNoSpace, "no space for %s: free some", path)
	case errors.Is(err, unix.EFBIG):
		return fail.System(doing+" "+path+": raise this process's RLIMIT_FSIZE", err)
	}
	return fail.System(doing+" "+path, err)
}

// untilDone repeats a system call that a signal interrupts.
func untilDone(call func() error) error {
	for {
		if err := call(); err != unix.EINTR {
			return err
		}
	}
}

// location is where a file is.
type location int

const (
	atPath location = iota
	moved
	deleted
)

// locate returns where the file that was at the path is, and its size there. One system call while it is at the path.
func locate(file *os.File, is identity, path string) (location, int64, error) {
	var there unix.Stat_t
	err := unix.Lstat(path, &there)
	if err == nil && identityOf(&there) == is {
		return atPath, there.Size, nil
	}
	own, failedStat := stat(file, path)
	switch {
	case failedStat != nil:
		return atPath, 0, failedStat
	case own.Nlink == 0:
		return deleted, 0, nil
	case err == nil:
		return moved, 0, nil
	}
	// Perhaps the process has lost the right to search the directory, or the directory was renamed: no file can be
	// created at the path then.
	directory, statErr := os.Stat(filepath.Dir(path))
	if (err == unix.ENOENT || err == unix.ENOTDIR) && statErr == nil && directory.IsDir() {
		return moved, 0, nil
	}
	return atPath, own.Size, nil
}

// absolute returns the path without symbolic links, so that a rotation renames the file and not a link, and absolute,
// so that it holds in any working directory.
func absolute(path string) (string, error) {
	found, err := filepath.EvalSymlinks(path)
	if errors.Is(err, os.ErrNotExist) {
		found, err = path, nil
	}
	if err == nil {
		found, err = filepath.Abs(found)
	}
	return found, fail.System("finding "+path, err)
}

func temporaryPath(path string) string { return path + ".pelton-next" }

func numbered(path string, number uint64) string { return fmt.Sprintf("%s.%06d", path, number) }

// highestNumber returns the highest number of a rotated file; 0 if there is none.
func highestNumber(path string) (highest uint64, err error) {
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		return 0, fail.System("reading the directory of "+path, err)
	}
	for _, entry := range entries {
		digits, isOurs := strings.CutPrefix(entry.Name(), filepath.Base(path)+".")
		if !isOurs || len(digits) < 6 {
			continue
		}
		// No rotation reaches 2^32.
		if number, err := strconv.ParseUint(digits, 10, 32); err == nil {
			highest = max(highest, number)
		}
	}
	return highest, nil
}

// rename renames, and never replaces a file.
func rename(from, to string) error {
	err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
	if err == unix.EINVAL || err == unix.ENOSYS {
		// The file system lacks that flag. No other program uses such names.
		if _, there := os.Lstat(to); there != nil {
			return unix.Rename(from, to)
		}
	}
	return err
}

// open opens for appending: after a truncation just before a write, the file has no gap of zeros.
func open(path string, more int) (*os.File, error) {
	fd := -1
	err := untilDone(func() (err error) {
		fd, err = unix.Open(path, unix.O_RDWR|unix.O_APPEND|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC|
			unix.O_NOCTTY|more, newMode)
		return err
	})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}

func isRegular(file *os.File) bool {
	found, err := file.Stat()
	return err == nil && found.Mode().IsRegular()
}

// lock takes the lock, and retries until the timeout while another process has it.
func lock(file *os.File, path string, timeout time.Duration) error {
	for until := time.Now().Add(timeout); ; time.Sleep(time.Millisecond) {
		err := untilDone(func() error {
			return unix.FcntlFlock(file.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Len: 1})
		})
		switch {
		case err == nil:
			return nil
		// Linux reports another's lock by EAGAIN alone; EACCES comes from a security module that permits no locks.
		case err != unix.EAGAIN:
			return fail.System("locking "+path, err)
		case !time.Now().Before(until):
			return fail.New(fail.ErrRoleTaken, "%s has another writer: stop it, or write to another file", path)
		}
	}
}

// closeLocked releases the lock explicitly: a child on its way to exec may have the description for a moment longer.
func closeLocked(file *os.File) error {
	_ = unix.FcntlFlock(file.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_UNLCK, Len: 1})
	return file.Close()
}

// isAt reports whether the file is what is at the path.
func isAt(file *os.File, path string) bool {
	var own, there unix.Stat_t
	return unix.Fstat(int(file.Fd()), &own) == nil && unix.Lstat(path, &there) == nil &&
		identityOf(&own) == identityOf(&there)
}

// lockAt opens and locks the file at a path; nil if no file is there.
func lockAt(path string, timeout time.Duration) (*os.File, error) {
	for range tries {
		file, err := open(path, 0)
		if err == unix.ENOENT {
			return nil, nil
		}
		if err != nil {
			return nil, failed("opening", path, err)
		}
		if !isRegular(file) {
			err = notARecordFile(path, "it is not a regular file")
		} else {
			err = lock(file, path, timeout)
		}
		if err != nil {
			file.Close()
			return nil, err
		}
		// Its owner may have renamed or removed it before this process got the lock.
		if isAt(file, path) {
			return file, nil
		}
		_ = closeLocked(file)
	}
	return nil, unstableAt(path)
}

// createTemporary creates and locks the temporary file. It removes an existing one first. mode nil: the usual one.
func createTemporary(temporary string, mode *uint32) (*os.File, error) {
	for range tries {
		file, err := open(temporary, unix.O_CREAT|unix.O_EXCL)
		if err == unix.EEXIST {
			if err := removeLeftover(temporary); err != nil {
				return nil, err
			}
			continue
		}
		if err != nil {
			return nil, failed("creating", temporary, err)
		}
		if mode != nil {
			err = failed("setting the mode of", temporary, unix.Fchmod(int(file.Fd()), *mode))
		}
		if err == nil {
			err = lock(file, temporary, lockTimeout)
		}
		if err != nil {
			file.Close()
			return nil, err
		}
		// Another writer may have removed it as a leftover before it was locked.
		if isAt(file, temporary) {
			return file, nil
		}
		_ = closeLocked(file)
	}
	return nil, unstableAt(temporary)
}

func removeLeftover(temporary string) error {
	// A file that cannot be opened belongs to another user, or is a symbolic link: no writer of this user uses it.
	if file, err := open(temporary, 0); err == nil {
		defer closeLocked(file)
		if isRegular(file) {
			if err := lock(file, temporary, lockTimeout); err != nil {
				return err
			}
			// Meanwhile it may have become the record file itself, or been removed.
			if !isAt(file, temporary) {
				return nil
			}
		}
	}
	if err := unix.Unlink(temporary); err != nil && err != unix.ENOENT {
		return failed("removing the leftover", temporary, err)
	}
	return nil
}

func unstableAt(path string) error {
	return notARecordFile(path, "it was another file at each of %d attempts: let one process at a time write to it", tries)
}

// predecessor is what a new file takes over.
type predecessor struct {
	// The least number of the new file.
	number uint64
	// nil: the usual one.
	mode *uint32
	// The encoded last numbers of lanes.
	lanes []byte
}

// findPredecessor reads, for a new writer, the last rotated file, if this user owns it. A writer was killed between
// the two renames of a rotation, or another program has taken the file away.
func findPredecessor(path string, number uint64) (p predecessor) {
	path = numbered(path, number)
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return p
	}
	file := os.NewFile(uintptr(fd), path)
	defer file.Close()
	found, err := stat(file, path)
	if err != nil || int(found.Uid) != os.Geteuid() {
		return p
	}
	mode := found.Mode & 0o777
	p.mode = &mode
	// Damage there concerns only its readers.
	s, err := newScanner(file, path)
	if err != nil {
		return p
	}
	var lanes lanes
	for at, end := int64(headerBytes), found.Size; at < end; {
		header, wrong, err := s.chunk(at, end, func(*chunkHeader) bool { return end-at <= verifiedBytes })
		if err != nil || wrong != nil || lanes.noteChunk(s, at, &header) != nil {
			break
		}
		at += header.allBytes()
	}
	p.lanes = lanes.encode()
	return p
}

// openOrBegin opens and locks the file at a path, or creates it. before: of a writer that has a file already.
func openOrBegin(path string, syncs bool, before *predecessor) (*os.File, error) {
	temporary, timeout := temporaryPath(path), lockTimeout
	if before != nil {
		// A write does not wait for another writer, as its caller may retry for ever.
		timeout = 0
	}
	for range tries {
		opened, err := lockAt(path, timeout)
		if err != nil {
			return nil, err
		}
		if opened != nil {
			// Only the holder of this lock creates the temporary file, except before a first file exists.
			_ = os.Remove(temporary)
			if size, err := sizeOf(opened); err != nil || size > 0 {
				return opened, err
			}
		}
		file, err := begin(opened, path, temporary, syncs, before)
		if err != nil || file != nil {
			return file, err
		}
	}
	return nil, unstableAt(path)
}

// begin begins the opened empty file, or creates the file. It returns nil if another writer, or a program that
// rotates, was first.
func begin(opened *os.File, path, temporary string, syncs bool, before *predecessor) (*os.File, error) {
	file := opened
	err := func() error {
		highest, err := highestNumber(path)
		if err != nil {
			return err
		}
		if before == nil {
			found := findPredecessor(path, highest)
			before = &found
		}
		header := newFileHeader(max(highest+1, before.number))
		if opened != nil {
			_, err = beginFile(file, path, &header, before.lanes)
			return err
		}
		if file, err = createTemporary(temporary, before.mode); err != nil {
			return err
		}
		if _, err = beginFile(file, temporary, &header, before.lanes); err != nil {
			return err
		}
		if syncs {
			err = failed("syncing", temporary, unix.Fdatasync(int(file.Fd())))
		}
		if err != nil {
			return err
		}
		return rename(temporary, path)
	}()
	switch {
	case opened != nil && err == nil:
		return file, nil
	case err == nil && isAt(file, path):
		if syncs {
			err = syncDirectory(path)
		}
		if err == nil {
			return file, nil
		}
	case err == unix.EEXIST, err == unix.ENOENT:
		_ = os.Remove(temporary)
		err = nil
	default:
		// An error of the renaming has no text yet.
		if _, isBare := err.(unix.Errno); isBare {
			err = failed("renaming", temporary, err)
		}
	}
	if file != nil {
		_ = closeLocked(file)
	}
	return nil, err
}

// syncDirectory brings the names in the file's directory to the disk.
func syncDirectory(path string) error {
	directory, err := os.Open(filepath.Dir(path))
	if err == nil {
		err = directory.Sync()
		directory.Close()
	}
	return fail.System("syncing the directory of "+path, err)
}
