package memory

import (
	"fmt"

	"golang.org/x/sys/unix"
	"pelton/internal/fail"
	"pelton/internal/lane"
)

// Shared memory: memfds, mapped and sealed, or the peer's, checked and mapped.

const (
	SizeSeals    = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	ControlSeals = SizeSeals | unix.F_SEAL_FUTURE_WRITE
	TmpfsMagic   = 0x01021994
)

// Segment is a mapped memfd.
type Segment struct {
	Bytes []byte
	FD    int
}

// Create makes a segment of zeros, writes to it, and seals it: its size cannot change under a mapping, and a control
// segment has no writer but the mapping made before. Its memory is taken as it is touched.
func Create(name string, seals int, bytes uint64, write func([]byte)) (*Segment, error) {
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	// Hardened systems insist on the last flag; before Linux 6.3 it is unknown.
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if err != nil {
		fd, err = unix.MemfdCreate(name, flags)
	}
	if err != nil {
		return nil, fail.System("making a memfd", err)
	}
	// The kernel would answer a file that is too large with a signal that ends the process.
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &limit); err == nil && limit.Cur < bytes {
		unix.Close(fd)
		return nil, fail.System(fmt.Sprintf("making a memfd of %d bytes: raise RLIMIT_FSIZE", bytes), unix.EFBIG)
	}
	if err := unix.Ftruncate(fd, int64(bytes)); err != nil {
		unix.Close(fd)
		return nil, fail.System("sizing a memfd", err)
	}
	s, err := Map(fd, bytes, true)
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	write(s.Bytes)
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		s.Close()
		return nil, fail.System("sealing a memfd", err)
	}
	return s, nil
}

// Open maps a segment that came from the peer, after checking that it is what it must be. It takes the descriptor if it
// succeeds. Until the seals show that it is a memfd, no file system is asked: its server might not answer.
func Open(fd int, what string, seals int, bytes uint64, writable bool) (*Segment, error) {
	refuse := func(format string, args ...any) (*Segment, error) {
		return nil, fail.New(fail.ErrCorrupt, "the peer's "+what+" segment "+format, args...)
	}
	// Only a memfd has seals: anything else, a file, a pipe, a device, fails here.
	found, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return refuse("is not a memfd")
	}
	if found&seals != seals {
		return refuse("has seals %#x, wanted %#x", found, seals)
	}
	if writable && found&(unix.F_SEAL_WRITE|unix.F_SEAL_FUTURE_WRITE) != 0 {
		return refuse("has seals %#x and cannot be written", found)
	}
	// Not hugetlbfs, whose pages a peer can take away again for good.
	var system unix.Statfs_t
	if err := unix.Fstatfs(fd, &system); err != nil || system.Type != TmpfsMagic {
		return refuse("is of file system %#x, wanted tmpfs", system.Type)
	}
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil || uint64(stat.Size) != bytes {
		return refuse("has %d bytes, wanted %d", stat.Size, bytes)
	}
	return Map(fd, bytes, writable)
}

// Map takes the descriptor if it succeeds.
func Map(fd int, bytes uint64, writable bool) (*Segment, error) {
	protection := unix.PROT_READ
	if writable {
		protection |= unix.PROT_WRITE
	}
	mapped, err := unix.Mmap(fd, 0, int(bytes), protection, unix.MAP_SHARED)
	if err != nil {
		return nil, fail.System(fmt.Sprintf("mapping %d bytes", bytes), err)
	}
	// A core dump would allocate the memory of the whole lane, write it, and delay the report of this process's death until then.
	if bytes > lane.SegmentBytes {
		_ = unix.Madvise(mapped, unix.MADV_DONTDUMP)
	}
	return &Segment{mapped, fd}, nil
}

func (s *Segment) ForgetDescriptor() {
	if s.FD >= 0 {
		unix.Close(s.FD)
		s.FD = -1
	}
}

// Discard gives pages back to the system; they read as zeros afterwards.
func (s *Segment) Discard(from, to uint64) error {
	if s.FD < 0 {
		return unix.Madvise(s.Bytes[from:to], unix.MADV_REMOVE)
	}
	return unix.Fallocate(s.FD, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(from), int64(to-from))
}

// Close is asked once, when nobody uses the memory any more.
func (s *Segment) Close() {
	s.ForgetDescriptor()
	_ = unix.Munmap(s.Bytes)
	s.Bytes = nil
}
