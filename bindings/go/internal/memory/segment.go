// Package memory has shared memory: memfds that this side creates and seals, and the peer's, which it checks before
// it maps them.
package memory

import (
	"fmt"
	"io"
	"math/bits"
	"slices"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"golang.org/x/sys/unix"
)

const (
	// The seals of a lane's data, and of a control segment.
	SizeSeals    = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	ControlSeals = SizeSeals | unix.F_SEAL_FUTURE_WRITE
	TmpfsMagic   = 0x01021994
)

// Segment is a mapped memfd, or a mapped file of a path channel.
type Segment struct {
	Bytes []byte
	FD    int
}

// Create creates a segment of zeros, writes to it, and seals it: its size cannot change under a mapping, and a
// control segment can be written only by the mapping made before. Its memory is allocated when it is first written.
func Create(name string, seals int, bytes uint64, write func([]byte)) (*Segment, error) {
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	// Hardened systems require the last flag, which is unknown before Linux 6.3.
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if err != nil {
		fd, err = unix.MemfdCreate(name, flags)
	}
	if err != nil {
		return nil, fail.System("making a memfd", err)
	}
	// The kernel would report a file that is too large by a signal that ends the process.
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

// Open maps a peer's segment after it has checked it. On success it owns fd. Before the seals prove that it is a
// memfd, it calls no file system, whose server might not answer.
func Open(fd int, what string, seals int, bytes uint64, writable bool) (*Segment, error) {
	refuse := func(format string, args ...any) (*Segment, error) {
		return nil, fail.New(fail.ErrCorrupt, "the peer's "+what+" segment "+format, args...)
	}
	// Only a memfd has seals: a file, a pipe or a device fails here.
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
	// A peer can remove pages of hugetlbfs for good.
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

// Map maps fd. On success the segment owns it.
func Map(fd int, bytes uint64, writable bool) (*Segment, error) {
	protection := unix.PROT_READ
	if writable {
		protection |= unix.PROT_WRITE
	}
	mapped, err := unix.Mmap(fd, 0, int(bytes), protection, unix.MAP_SHARED)
	if err != nil {
		return nil, fail.System(fmt.Sprintf("mapping %d bytes", bytes), err)
	}
	// A core dump would allocate the memory of the whole lane, write it, and delay the report of this process's death
	// until then.
	if bytes > lane.SegmentBytes {
		_ = unix.Madvise(mapped, unix.MADV_DONTDUMP)
	}
	return &Segment{mapped, fd}, nil
}

// Inode returns the number of the segment's file; 0 without a descriptor.
func (s *Segment) Inode() uint64 {
	var stat unix.Stat_t
	if s.FD < 0 || unix.Fstat(s.FD, &stat) != nil {
		return 0
	}
	return stat.Ino
}

// Identity returns two words that no other segment has, as the Rust library makes them: record files of both name a
// lane by its data's. Zeros: the file system reports no creation time, without which the next file with this inode
// could be mistaken for this one.
func (s *Segment) Identity() [2]uint64 {
	const wanted = unix.STATX_INO | unix.STATX_BTIME
	var found unix.Statx_t
	if err := unix.Statx(s.FD, "", unix.AT_EMPTY_PATH, wanted, &found); err != nil || found.Mask&wanted != wanted {
		return [2]uint64{}
	}
	device := uint64(found.Dev_major)<<32 | uint64(found.Dev_minor)
	return [2]uint64{found.Ino ^ bits.RotateLeft64(device, 48),
		uint64(found.Btime.Sec)*1_000_000_000 + uint64(found.Btime.Nsec)}
}

// ForgetDescriptor closes the descriptor and keeps the mapping.
func (s *Segment) ForgetDescriptor() {
	if s.FD >= 0 {
		unix.Close(s.FD)
		s.FD = -1
	}
}

// Discard releases pages to the system. They read as zeros afterwards.
func (s *Segment) Discard(from, to uint64) error {
	if s.FD < 0 {
		return unix.Madvise(s.Bytes[from:to], unix.MADV_REMOVE)
	}
	return unix.Fallocate(s.FD, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(from), int64(to-from))
}

// CopyTo copies a range to the same offsets of a new segment of the same size, all zeros. It omits pages of zeros.
//
// It reads by the descriptor: a load from the mapping would allocate a page for each hole. SEEK_DATA would find the
// holes, but waits for a lock of the file, which a peer can hold for ever.
func (s *Segment) CopyTo(other *Segment, from, to uint64) error {
	const page, piece = 4096, 64 << 10
	buffer := make([]byte, piece)
	for from < to {
		// Pieces end at multiples of their size, so that the parts of one are pages.
		read, err := unix.Pread(s.FD, buffer[:min(to-from, piece-from%piece)], int64(from))
		if err == unix.EINTR {
			continue
		}
		if err == nil && read == 0 {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return fail.System("copying a lane", err)
		}
		for rest := buffer[:read]; len(rest) > 0; {
			part := rest[:min(uint64(len(rest)), page-from%page)]
			if slices.ContainsFunc(part, func(b byte) bool { return b != 0 }) {
				copy(other.Bytes[from:], part)
			}
			rest, from = rest[len(part):], from+uint64(len(part))
		}
	}
	return nil
}

// Close unmaps the segment. Call it once, when nothing uses the memory any more.
func (s *Segment) Close() {
	s.ForgetDescriptor()
	_ = unix.Munmap(s.Bytes)
	s.Bytes = nil
}
