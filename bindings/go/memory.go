package pelton

import (
	"fmt"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"
	"pelton/internal/fail"
	"pelton/internal/lane"
)

// Shared memory: memfds, mapped and sealed, or the peer's, checked and mapped.

const (
	sizeSeals    = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	controlSeals = sizeSeals | unix.F_SEAL_FUTURE_WRITE
	tmpfsMagic   = 0x01021994
)

// segment is a mapped memfd.
type segment struct {
	bytes []byte
	fd    int
}

// createSegment makes a segment of zeros, writes to it, and seals it: its size cannot change under a mapping, and a control
// segment has no writer but the mapping made before. Its memory is taken as it is touched.
func createSegment(name string, seals int, bytes uint64, write func([]byte)) (*segment, error) {
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
	s, err := mapSegment(fd, bytes, true)
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	write(s.bytes)
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		s.close()
		return nil, fail.System("sealing a memfd", err)
	}
	return s, nil
}

// openSegment maps a segment that came from the peer, after checking that it is what it must be. It takes the descriptor if it
// succeeds. Until the seals show that it is a memfd, no file system is asked: its server might not answer.
func openSegment(fd int, what string, seals int, bytes uint64, writable bool) (*segment, error) {
	refuse := func(format string, args ...any) (*segment, error) {
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
	if err := unix.Fstatfs(fd, &system); err != nil || system.Type != tmpfsMagic {
		return refuse("is of file system %#x, wanted tmpfs", system.Type)
	}
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil || uint64(stat.Size) != bytes {
		return refuse("has %d bytes, wanted %d", stat.Size, bytes)
	}
	return mapSegment(fd, bytes, writable)
}

// mapSegment takes the descriptor if it succeeds.
func mapSegment(fd int, bytes uint64, writable bool) (*segment, error) {
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
	return &segment{mapped, fd}, nil
}

func (s *segment) forgetDescriptor() {
	if s.fd >= 0 {
		unix.Close(s.fd)
		s.fd = -1
	}
}

// release gives pages back to the system; they read as zeros afterwards.
func (s *segment) release(from, to uint64) error {
	if s.fd < 0 {
		return unix.Madvise(s.bytes[from:to], unix.MADV_REMOVE)
	}
	return unix.Fallocate(s.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(from), int64(to-from))
}

// close is asked once, when nobody uses the memory any more.
func (s *segment) close() {
	s.forgetDescriptor()
	_ = unix.Munmap(s.bytes)
	s.bytes = nil
}

func makeProducerPage(capacity, limit, generation uint64) (*segment, error) {
	return createSegment("pelton-producer", controlSeals, lane.SegmentBytes, func(page []byte) {
		lane.MakeProducerPage(page, capacity, limit, generation, uint32(os.Getpid()))
	})
}

func makeData(capacity uint64) (*segment, error) {
	return createSegment("pelton-data", sizeSeals, capacity, func([]byte) {})
}

func makeConsumerPage(head lane.Position) (*segment, error) {
	return createSegment("pelton-consumer", controlSeals, lane.SegmentBytes, func(page []byte) {
		lane.MakeConsumerPage(page, head, uint32(os.Getpid()))
	})
}

func makeReceiverPage() (*segment, error) {
	return createSegment("pelton-receiver", controlSeals, lane.SegmentBytes, lane.MakeReceiverPage)
}

// memory is the segments that a lane lies in. It is kept while anybody uses it: the handle, a reservation, each message lent.
// So a handle may be closed at any time, and no slice given out ever points to nothing.
type memory struct {
	producer, consumer, receiver, data *segment
	// Of a receiver of many, the receiver page is not this lane's alone.
	keepsReceiver bool
	users         atomic.Int32
}

func (m *memory) lane() lane.Memory {
	return lane.Memory{Producer: m.producer.bytes, Consumer: m.consumer.bytes, Receiver: m.receiver.bytes, Data: m.data.bytes}
}

func (m *memory) use() { m.users.Add(1) }

func (m *memory) leave() {
	if m.users.Add(-1) != 0 {
		return
	}
	for _, segment := range []*segment{m.producer, m.consumer, m.data} {
		segment.close()
	}
	if !m.keepsReceiver {
		m.receiver.close()
	}
}

const membarrierGlobalExpedited = 1 << 1

// membarrier has every running thread of the processes that are registered for it pass a barrier: 0.2 to 20 µs. False where it is
// refused. This process need not be registered: what it publishes is fenced.
func membarrier() bool {
	_, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobalExpedited, 0, 0)
	return errno == 0
}
