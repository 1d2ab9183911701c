package directory

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/doorbell"
	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/link"
	"github.com/pelton-ipc/pelton/bindings/go/internal/memory"
	"golang.org/x/sys/unix"
)

// lock locks byte 0 of a file. Unless it waits, it returns -1 while another process has the lock.
func (d *Directory) lock(name string, waits bool) (int, error) { return d.lockByte(name, 0, waits) }

// lockByte locks a byte of a file, by a description of its own.
func (d *Directory) lockByte(name string, at int64, waits bool) (int, error) {
	fd, err := d.open(name, unix.S_IFREG, unix.O_RDWR)
	if err != nil {
		return -1, err
	}
	command := unix.F_OFD_SETLK
	if waits {
		command = unix.F_OFD_SETLKW
	}
	for {
		err = unix.FcntlFlock(uintptr(fd), command, &unix.Flock_t{Type: unix.F_WRLCK, Start: at, Len: 1})
		if err != unix.EINTR {
			break
		}
	}
	if err == nil {
		var stat unix.Stat_t
		// A process that removes the channel has all locks. A file that is locked after that has no name.
		if err = unix.Fstat(fd, &stat); err == nil && stat.Nlink == 0 {
			unix.Close(fd)
			return -1, d.NoChannel()
		}
	}
	if err == nil {
		return fd, nil
	}
	unix.Close(fd)
	// Linux reports another's lock by EAGAIN alone; EACCES comes from a security module that permits no locks.
	if err == unix.EAGAIN {
		return -1, nil
	}
	return -1, d.failed("locking", name, err)
}

// isByteLocked reports whether another description has the lock of a byte of an open file.
func (d *Directory) isByteLocked(fd int, name string, at int64) (bool, error) {
	lock := unix.Flock_t{Type: unix.F_WRLCK, Start: at, Len: 1}
	err := unix.FcntlFlock(uintptr(fd), unix.F_OFD_GETLK, &lock)
	return lock.Type != unix.F_UNLCK, d.failed("checking a lock of", name, err)
}

// unlock releases a description's lock explicitly: a child on its way to exec may have the description for a moment
// longer.
func unlock(fd int) {
	_ = unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_UNLCK})
	unix.Close(fd)
}

// watch opens a liveness file, which reports the end of the process that holds it. It returns -1 if none does.
func (d *Directory) watch(name string) (int, error) {
	fd, err := d.open(name, unix.S_IFIFO, unix.O_WRONLY)
	if err == unix.ENXIO {
		return -1, nil
	}
	return fd, err
}

const (
	// ClaimKilled: a killed process keeps its locks until the kernel has ended it, and its successor may start before
	// that. A guess.
	ClaimKilled = 200 * time.Millisecond
	// Between two attempts to claim a role, in that time and after it.
	claimRetry, claimRetryLater = time.Millisecond, 10 * time.Millisecond
)

// claim claims a role. While another process has it, and canWait returns that waiting may help, it waits: until the
// context ends if isPatient, else for ClaimKilled. It returns -1 if the role is still taken then.
func (d *Directory) claim(ctx context.Context, isPatient bool, try func() (int, error),
	canWait func() (bool, error)) (int, error) {
	pause := claimRetry
	for deadline := time.Now().Add(ClaimKilled); ; {
		lock, err := try()
		if err != nil || lock >= 0 {
			return lock, err
		}
		if can, err := canWait(); err != nil || !can {
			return -1, err
		}
		if time.Now().After(deadline) {
			if !isPatient {
				return -1, nil
			}
			pause = claimRetryLater
		}
		select {
		case <-ctx.Done():
			return -1, nil
		case <-time.After(pause):
		}
	}
}

// claimReceiver returns the lock.
func (d *Directory) claimReceiver(ctx context.Context, isPatient bool) (int, error) {
	lock, err := d.claim(ctx, isPatient, func() (int, error) { return d.lock("receiver", false) },
		func() (bool, error) { return true, nil })
	if err == nil && lock < 0 {
		// The receiver's own page has no field for it, but the receiver also writes the first lane's consumer page.
		err = d.taken(ctx, "receiver", d.pid(ofLane(0, "consumer"), 260))
	}
	return lock, err
}

func (d *Directory) pid(name string, at int64) uint32 {
	b := make([]byte, 4)
	fd, err := d.open(name, unix.S_IFREG, unix.O_RDONLY)
	if err != nil {
		return 0
	}
	defer unix.Close(fd)
	if n, err := unix.Pread(fd, b, at); n != 4 || err != nil {
		return 0
	}
	return binary.LittleEndian.Uint32(b)
}

// claimSender claims the first lane without a sender, or a new one. It returns the lane's number and the lock.
func (d *Directory) claimSender(ctx context.Context, isPatient bool) (number, lock int, err error) {
	free := func() (int, error) {
		lanes, err := d.Lanes()
		for number = 0; err == nil && number < lanes; number++ {
			if lock, err = d.lock(ofLane(number, "producer"), false); lock >= 0 {
				return lock, nil
			}
		}
		return -1, err
	}
	lock, err = d.claim(ctx, isPatient, free, func() (bool, error) {
		lanes, err := d.Lanes()
		return lanes == int(d.header.lanesMax), err
	})
	if err != nil || lock >= 0 {
		return number, lock, err
	}
	if lanes, err := d.Lanes(); err != nil {
		return 0, -1, err
	} else if lanes == int(d.header.lanesMax) {
		return 0, -1, d.taken(ctx, fmt.Sprintf("sender on all %d lanes", lanes), d.pid(ofLane(0, "producer"), 388))
	}
	growth, err := d.lock("channel", true)
	if err != nil {
		return 0, -1, err
	}
	defer unlock(growth)
	// Other processes may have added lanes during the wait, and left some.
	if lock, err = free(); err != nil || lock >= 0 {
		return number, lock, err
	}
	lanes, err := d.Lanes()
	if err != nil {
		return 0, -1, err
	}
	if lanes == int(d.header.lanesMax) {
		return 0, -1, d.taken(ctx, fmt.Sprintf("sender on all %d lanes", lanes), d.pid(ofLane(0, "producer"), 388))
	}
	if lock, err = d.addLane(growth, lanes); err != nil {
		d.removeLane(lanes)
	}
	return lanes, lock, err
}

// addLane adds a lane for this process. Call it under the growth lock.
func (d *Directory) addLane(growth, number int) (int, error) {
	// A process that died here has left files. No process can be using them: they were never counted.
	d.removeLane(number)
	if err := d.makeLane(number); err != nil {
		return -1, err
	}
	// The role before the count, so that no other process finds the lane free.
	lock, err := d.lock(ofLane(number, "producer"), false)
	if err != nil || lock < 0 {
		return -1, errors.Join(err, d.refuse("somebody has locked its new lane %d: see lsof", number))
	}
	count := binary.LittleEndian.AppendUint32(nil, uint32(number+1))
	if _, err := unix.Pwrite(growth, count, lanesAt); err != nil {
		unlock(lock)
		return -1, d.failed("counting lanes in", "channel", err)
	}
	return lock, nil
}

func (d *Directory) removeLane(number int) {
	for _, kind := range filesOfALane {
		_ = unix.Unlinkat(d.fd, ofLane(number, kind), 0)
	}
}

// Role is a claimed role of a path channel.
type Role struct {
	Directory *Directory
	lock      int
	liveness  int
	IsSynced  bool
	// The lanes of this receiver that are mapped: held messages lie in them.
	mapped atomic.Int32
}

// Keep makes the role outlast the handle while a lane is mapped, so that no successor releases the messages that are
// held there. Call it before any of them is lent.
func (p *Role) Keep(m *memory.Lane) {
	p.mapped.Add(1)
	m.Unmapped = p.release
}

// Close ends the handle's use of the role. It closes the liveness file before it unlocks, so that a process that
// detects the end finds the role free, unless messages are held.
func (p *Role) Close() {
	unix.Close(p.liveness)
	p.Directory.Close()
	p.release()
}

// release is called by the handle and by each lane. The last one gives the role up.
func (p *Role) release() {
	if p.mapped.Add(-1) < 0 {
		unlock(p.lock)
	}
}

// claim owns what a role needs, and releases it unless all of it was obtained.
type claim struct {
	link.Parts
	directory *Directory
	lock      int
	// The first error.
	err error
}

func (h *claim) segment(s *memory.Segment, err error) *memory.Segment {
	if err == nil {
		h.Segments = append(h.Segments, s)
	} else if h.err == nil {
		h.err = err
	}
	return s
}

func (h *claim) fifo(name string, flags int) int {
	fd, err := h.directory.open(name, unix.S_IFIFO, flags)
	if err == unix.ENXIO {
		err = h.directory.failed("opening", name, err)
	}
	if err == nil {
		h.Owns([]int{fd})
	} else if h.err == nil {
		h.err = err
	}
	return fd
}

func (h *claim) release() {
	if h.directory == nil {
		return
	}
	h.GiveBack()
	if h.lock >= 0 {
		unlock(h.lock)
	}
	h.directory.Close()
}

// OpenSender claims the role of a sender, for which it waits as claim does, and takes over its lane. It owns d.
func (d *Directory) OpenSender(ctx context.Context, isPatient bool) (*link.Outgoing, *Role, error) {
	h := &claim{directory: d, lock: -1}
	defer h.release()
	canBarrier := kernel.Membarrier()
	number, lock, err := d.claimSender(ctx, isPatient)
	if err != nil {
		return nil, nil, err
	}
	h.lock = lock
	m := &memory.Lane{}
	m.Producer = h.segment(d.producer(number, true))
	m.Data = h.segment(d.segment(ofLane(number, "data"), d.header.capacity, true))
	m.Consumer = h.segment(d.control(ofLane(number, "consumer"), lane.MagicConsumer, false))
	m.Receiver = h.segment(d.control("receiver", lane.MagicReceiver, false))
	own := h.fifo(ofLane(number, DoorbellFile), unix.O_RDWR)
	peers := h.fifo(receiverDoorbell, unix.O_RDWR)
	life := h.fifo(ofLane(number, LivenessFile), unix.O_RDONLY)
	if h.err != nil {
		return nil, nil, h.err
	}
	ownDoorbell, err := doorbell.NewFIFO(h.Claim(own))
	if err != nil {
		return nil, nil, err
	}
	producer, err := lane.TakeOverProducer(m.Segments(), d.header.bytesMax, canBarrier, uint32(os.Getpid()))
	if err != nil {
		ownDoorbell.Close()
		return nil, nil, fail.Lane(err)
	}
	h.Keep()
	h.directory = nil
	l := d.newLink(receiverLiveness, producer.Consumer, peers, ownDoorbell.Wake)
	role := &Role{Directory: d, lock: lock, liveness: life}
	return &link.Outgoing{Lane: producer, Memory: m, Doorbell: ownDoorbell, Link: l}, role, nil
}

// newLink returns the link to the process that holds a liveness file, now or later.
func (d *Directory) newLink(life string, says func() (uint64, uint32), fifo int, wake func()) *link.Link {
	watch := func() (int, error) { return d.watch(life) }
	return &link.Link{Doorbell: doorbell.Peer{FD: fifo, Kind: doorbell.FIFO}, Wake: wake,
		Path: &link.PathPeer{OpenLiveness: watch, UID: d.owners[1], Generation: says, Wake: wake}}
}

// OpenReceiver claims the role of the receiver, for which it waits as claim does. It owns d.
func (d *Directory) OpenReceiver(ctx context.Context, isPatient bool) (page *memory.Segment, ownDoorbell *doorbell.Own,
	role *Role, err error) {
	h := &claim{directory: d, lock: -1}
	defer h.release()
	if h.lock, err = d.claimReceiver(ctx, isPatient); err != nil {
		return nil, nil, nil, err
	}
	page = h.segment(d.control("receiver", lane.MagicReceiver, true))
	own := h.fifo(receiverDoorbell, unix.O_RDWR)
	life := h.fifo(receiverLiveness, unix.O_RDONLY)
	if h.err != nil {
		return nil, nil, nil, h.err
	}
	if ownDoorbell, err = doorbell.NewFIFO(h.Claim(own)); err != nil {
		return nil, nil, nil, err
	}
	h.Keep()
	h.directory = nil
	return page, ownDoorbell, &Role{Directory: d, lock: h.lock, liveness: life}, nil
}

// OpenLane takes over a lane for the receiver that has this page and doorbell.
func (d *Directory) OpenLane(number int, page *memory.Segment, own *doorbell.Own) (*link.Incoming, error) {
	h := &claim{directory: d, lock: -1}
	defer h.GiveBack()
	m := &memory.Lane{Receiver: page, SharesReceiver: true}
	m.Producer = h.segment(d.producer(number, false))
	m.Data = h.segment(d.segment(ofLane(number, "data"), d.header.capacity, false))
	m.Consumer = h.segment(d.control(ofLane(number, "consumer"), lane.MagicConsumer, true))
	fifo := h.fifo(ofLane(number, DoorbellFile), unix.O_RDWR)
	if h.err != nil {
		return nil, h.err
	}
	consumer, seen, err := lane.TakeOverConsumer(m.Segments(), d.header.bytesMax, uint32(os.Getpid()))
	if err != nil {
		return nil, fail.Lane(err)
	}
	h.Keep()
	m.Retain()
	id := m.Data.Identity()
	if id != [2]uint64{} {
		// After a reboot, the numbers of messages that were not durable are used again.
		id[0] ^= binary.LittleEndian.Uint64(d.header.bootID[:])
		id[1] ^= binary.LittleEndian.Uint64(d.header.bootID[8:])
	}
	m.Producer.ForgetDescriptor()
	m.Data.ForgetDescriptor()
	return &link.Incoming{Consumer: consumer, Memory: m, Redelivered: seen, ID: id,
		Link: d.newLink(ofLane(number, LivenessFile), consumer.Producer, fifo, own.Wake)}, nil
}

// Backed is a producer that knows how many bytes of its data are allocated.
type Backed interface {
	Capacity() uint64
	Backed() uint64
	SetBacked(bytes uint64)
}

// Back allocates memory for the first bytes of a lane, so that writing there cannot fail.
func (p *Role) Back(producer Backed, data *memory.Segment, bytes uint64) error {
	var err error
	// If a whole step is not available, less will do.
	for _, unit := range []uint64{BackedStep, BackedStepMin} {
		to := min((bytes+unit-1)/unit*unit, producer.Capacity())
		if err = allocate(data.FD, producer.Backed(), to); err == nil {
			producer.SetBacked(to)
			return nil
		}
	}
	return p.Directory.failed("stretching a lane of", "", err)
}
