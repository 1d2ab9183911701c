package directory

import (
	"github.com/pelton-ipc/pelton/bindings/go/internal/memory"
	"golang.org/x/sys/unix"
)

func checkFileSize(bytes uint64) error {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &limit); err == nil && limit.Cur < bytes {
		return unix.EFBIG
	}
	return nil
}

func writeAt(fd int, bytes []byte, offset int64) error {
	for len(bytes) > 0 {
		n, err := unix.Pwrite(fd, bytes, offset)
		if err != nil && err != unix.EINTR {
			return err
		}
		if err == nil {
			bytes, offset = bytes[n:], offset+int64(n)
		}
	}
	return nil
}

var zeros [BackedStepMin]byte

// allocate allocates memory, or blocks of the disk, for a range of a file, so that no store there can fail.
func allocate(fd int, from, to uint64) error {
	var stat unix.Statfs_t
	if err := unix.Fstatfs(fd, &stat); err != nil {
		return err
	}
	if stat.Type == memory.TmpfsMagic {
		for piece := to - min(from, to); from < to; {
			err := unix.Fallocate(fd, 0, int64(from), int64(min(piece, to-from)))
			if err == nil {
				from += piece
			} else if err != unix.EINTR {
				return err
			} else {
				// A signal makes tmpfs undo the allocation, and Go's runtime sends itself many signals. Smaller
				// pieces succeed.
				piece = max((piece/2+4095)&^4095, 4096)
			}
		}
		return nil
	}
	if err := checkFileSize(to); err != nil {
		return err
	}
	// On a disk the first store after fallocate may need one more block, so this writes zeros to holes.
	for from < to {
		hole, err := unix.Seek(fd, int64(from), unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		end := to
		if data, err := unix.Seek(fd, hole, unix.SEEK_DATA); err == nil {
			end = min(to, uint64(data))
		} else if err != unix.ENXIO {
			return err
		}
		for from = uint64(hole); from < end; {
			next := min(end, (from/BackedStepMin+1)*BackedStepMin)
			if err := writeAt(fd, zeros[:next-from], int64(from)); err != nil {
				return err
			}
			from = next
		}
	}
	return nil
}
