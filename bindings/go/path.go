package pelton

import (
	"context"
	"errors"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"pelton/internal/fail"
	"pelton/internal/lane"
)

// The ends of a path channel: they claim a role in a directory, take its lane over in place, and meet the other side, whose end is told
// once. What the directory holds, and every check of it, is in directory.go.

// pathRole is a role, as long as it is kept.
type pathRole struct {
	directory *directory
	lock      int
	life      int
	isSynced  bool
}

// close gives the role up: the life first, then the lock, so that who hears of the end finds the role free.
func (p *pathRole) close() {
	unix.Close(p.life)
	unlock(p.lock)
	p.directory.close()
}

func word32(b []byte) *uint32 { return (*uint32)(unsafe.Pointer(&b[0])) }

func word64(b []byte) *uint64 { return (*uint64)(unsafe.Pointer(&b[0])) }

// pathPeer is whoever has, or will have, the other end of a lane. It is heard of by its life, a FIFO that it holds, and by the generation in
// its page, which tells also who has come and gone meanwhile.
type pathPeer struct {
	// Opens its life: -1 if nobody holds that.
	watch func() (int, error)
	uid   int
	says  func() (generation uint64, pid uint32)
	kick  func()
	life  *life
	// The generation of who is there, and the one of which it is known that it has gone.
	met, gone uint64
}

type life struct {
	*polled
	isGone atomic.Bool
}

type found int

const (
	// Nobody new: it is there already, or none has come.
	foundNothing found = iota
	foundPeer
	// One has come and gone since the last look.
	foundPassed
)

// passedMax is how many that have come and gone one look passes over: a page whose generation never stands still is not to keep anybody
// looking.
const passedMax = 8

// find looks for the peer, and watches it from then on. Life comes before generation: who sees a new one and finds nobody alive knows that
// it has gone.
func (l *link) find() (found, error) {
	p := l.path
	generation, _ := p.says()
	if p.life != nil && generation != p.met {
		// Its successor holds the life by now, which so tells nothing: the next look finds that one.
		p.lose()
		return foundPassed, nil
	}
	if p.life != nil || generation == p.gone {
		return foundNothing, nil
	}
	fd, err := p.watch()
	if err != nil {
		return foundNothing, err
	}
	if fd < 0 {
		p.gone = generation
		return foundPassed, nil
	}
	polled, err := newPolled(fd, "pelton life")
	if err != nil {
		return foundNothing, err
	}
	watched := &life{polled: polled}
	go func() {
		_ = polled.raw.Read(func(fd uintptr) bool { return isReady(int(fd), 0) })
		watched.isGone.Store(true)
		p.kick()
	}()
	p.life = watched
	// Another may have taken its place meanwhile.
	generation, pid := p.says()
	p.met = generation
	l.peer = Peer{PID: int(pid), UID: p.uid}
	return foundPeer, nil
}

// lose is of a peer that has gone: another may come.
func (p *pathPeer) lose() {
	if p.life != nil {
		_ = p.life.file.Close()
		p.life, p.gone = nil, p.met
	}
}

// openChannel opens the directory, or makes it, or waits until it is there.
func openChannel(ctx context.Context, path string, o *Options, make bool) (*directory, error) {
	if make {
		makes, err := o.pathMakes()
		if err != nil {
			return nil, err
		}
		return createDirectory(path, o.access(), makes, o.Lanes)
	}
	for {
		d, err := openDirectory(path, o.access())
		if d != nil || err != nil {
			return d, err
		}
		if !o.Await {
			return nil, (&directory{path: path}).noChannel()
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(retry):
		}
	}
}

// held collects what a role needs, and gives it back unless all of it can be had.
type held struct {
	parts
	directory *directory
	lock      int
}

func (h *held) fifo(name string, flags int) (int, error) {
	fd, err := h.directory.open(name, unix.S_IFIFO, flags)
	if err == unix.ENXIO {
		err = h.directory.failed("opening", name, err)
	}
	if err == nil {
		h.owns([]int{fd})
	}
	return fd, err
}

func (h *held) release() {
	if h.directory == nil {
		return
	}
	h.giveBack()
	if h.lock >= 0 {
		unlock(h.lock)
	}
	h.directory.close()
}

// CreateSender makes the path channel at a directory, or opens the one that is there (with the sizes that it was made with), as a sender. It
// goes on behind the last message that its predecessor committed. A receiver need not be there: see [Options.Await].
//
// Errors: [ErrRoleTaken] while as many senders as the channel has lanes are alive; [ErrNotAChannel] for whatever is wrong with what stands
// there; [ErrNoSpace], [ErrRebooted]; [ErrCorrupt]: `pelton recover`; [ErrOption], [ErrSystem]; the context's.
func CreateSender(ctx context.Context, directory string, options *Options) (*Sender, error) {
	return pathSender(ctx, directory, options, true)
}

// OpenSender does not make a channel. Otherwise as CreateSender. Errors: also [ErrNoChannel].
func OpenSender(ctx context.Context, directory string, options *Options) (*Sender, error) {
	return pathSender(ctx, directory, options, false)
}

func pathSender(ctx context.Context, path string, options *Options, make bool) (*Sender, error) {
	o := options.orDefault()
	for {
		d, err := openChannel(ctx, path, &o, make)
		if err != nil {
			return nil, err
		}
		out, role, err := d.openSender(ctx, o.Await)
		// Removed meanwhile: there may be another by now.
		if errors.Is(err, ErrNoChannel) && (make || o.Await) {
			continue
		}
		if err != nil {
			return nil, err
		}
		s := newSender(out, o)
		s.place = role
		// Who went before is no news.
		_, err = s.findReceiver()
		s.link.ring()
		if err != nil {
			_ = s.Close()
			return nil, err
		}
		if o.Await {
			if err := s.Resume(ctx); err != nil {
				_ = s.Close()
				return nil, err
			}
		}
		return s, nil
	}
}

// openSender claims the role of a sender, for which it waits as claim does, and takes over that one's lane. It takes the directory.
func (d *directory) openSender(ctx context.Context, isPatient bool) (*outgoing, *pathRole, error) {
	h := &held{directory: d, lock: -1}
	defer h.release()
	canBarrier := membarrier()
	number, lock, err := d.claimSender(ctx, isPatient)
	if err != nil {
		return nil, nil, err
	}
	h.lock = lock
	m := &memory{}
	if m.producer, err = h.segment(d.producer(number, true)); err != nil {
		return nil, nil, err
	}
	if m.data, err = h.segment(d.segment(ofLane(number, "data"), d.header.capacity, true)); err != nil {
		return nil, nil, err
	}
	if m.consumer, err = h.segment(d.control(ofLane(number, "consumer"), lane.MagicConsumer, false)); err != nil {
		return nil, nil, err
	}
	if m.receiver, err = h.segment(d.control("receiver", lane.MagicReceiver, false)); err != nil {
		return nil, nil, err
	}
	own, err := h.fifo(ofLane(number, "bell"), unix.O_RDWR)
	if err != nil {
		return nil, nil, err
	}
	peers, err := h.fifo("receiver.bell", unix.O_RDWR)
	if err != nil {
		return nil, nil, err
	}
	life, err := h.fifo(ofLane(number, "life"), unix.O_RDONLY)
	if err != nil {
		return nil, nil, err
	}
	bell, err := newFIFOBell(h.claim(own))
	if err != nil {
		return nil, nil, err
	}
	producer, err := lane.TakeOverProducer(m.lane(), d.header.bytesMax, canBarrier, uint32(os.Getpid()))
	if err != nil {
		bell.close()
		return nil, nil, fail.Lane(err)
	}
	h.keep()
	h.directory = nil
	l := d.newLink("receiver.life", producer.Consumer, peers, bell)
	return &outgoing{producer, m, bell, l}, &pathRole{directory: d, lock: lock, life: life}, nil
}

// newLink returns the link to whichever process holds a life, now or later.
func (d *directory) newLink(life string, says func() (uint64, uint32), fifo int, own *bell) *link {
	watch := func() (int, error) { return d.watch(life) }
	return &link{doorbell: doorbell{fifo, doorbellFIFO}, kick: own.kick, path: &pathPeer{watch: watch, uid: d.owners[1], says: says, kick: own.kick}}
}

// openReceiver claims the role of the receiver, for which it waits as claim does. It takes the directory.
func (d *directory) openReceiver(ctx context.Context, isPatient bool) (page *segment, bell *bell, role *pathRole, err error) {
	h := &held{directory: d, lock: -1}
	defer h.release()
	if h.lock, err = d.claimReceiver(ctx, isPatient); err != nil {
		return nil, nil, nil, err
	}
	if page, err = h.segment(d.control("receiver", lane.MagicReceiver, true)); err != nil {
		return nil, nil, nil, err
	}
	own, err := h.fifo("receiver.bell", unix.O_RDWR)
	if err != nil {
		return nil, nil, nil, err
	}
	life, err := h.fifo("receiver.life", unix.O_RDONLY)
	if err != nil {
		return nil, nil, nil, err
	}
	if bell, err = newFIFOBell(h.claim(own)); err != nil {
		return nil, nil, nil, err
	}
	h.keep()
	h.directory = nil
	return page, bell, &pathRole{directory: d, lock: h.lock, life: life}, nil
}

// openLane takes over a lane for the receiver that has this page and bell.
func (d *directory) openLane(number int, page *segment, own *bell) (*incoming, error) {
	h := &held{directory: d, lock: -1}
	defer h.giveBack()
	var err error
	m := &memory{receiver: page, keepsReceiver: true}
	if m.producer, err = h.segment(d.producer(number, false)); err != nil {
		return nil, err
	}
	if m.data, err = h.segment(d.segment(ofLane(number, "data"), d.header.capacity, false)); err != nil {
		return nil, err
	}
	if m.consumer, err = h.segment(d.control(ofLane(number, "consumer"), lane.MagicConsumer, true)); err != nil {
		return nil, err
	}
	fifo, err := h.fifo(ofLane(number, "bell"), unix.O_RDWR)
	if err != nil {
		return nil, err
	}
	consumer, seen, err := lane.TakeOverConsumer(m.lane(), d.header.bytesMax, uint32(os.Getpid()))
	if err != nil {
		return nil, fail.Lane(err)
	}
	h.keep()
	m.use()
	m.producer.forgetDescriptor()
	m.data.forgetDescriptor()
	return &incoming{consumer: consumer, memory: m, again: seen, link: d.newLink(ofLane(number, "life"), consumer.Producer, fifo, own)}, nil
}

// findReceiver looks for the receiver of a path channel that has none. True: one has come and gone meanwhile.
func (s *Sender) findReceiver() (bool, error) {
	what, err := s.link.find()
	if what == foundPeer {
		if s.lane.ConsumerClosed() {
			// Its life outlives it for a moment, in a child on its way to exec for instance.
			s.link.path.lose()
			return true, nil
		}
		// Its close, from now on, is news.
		s.lane.ContinueAlone()
	}
	return what == foundPassed, err
}

// goOnAlone: the end of the receiver has been told. The lane is there for the next one, who may have come already.
func (s *Sender) goOnAlone() {
	s.link.path.lose()
	s.lane.ContinueAlone()
	s.broken = nil
	for range passedMax {
		if passed, err := s.findReceiver(); err != nil || !passed {
			break
		}
	}
}

func (s *Sender) waitForReceiver(ctx context.Context) error {
	return meet(ctx, s.bell, &s.guard, func() (bool, error) {
		if isCorrupt(s.broken) {
			return false, s.broken
		}
		hasGone, err := s.hasGone()
		if hasGone || s.broken != nil {
			s.goOnAlone()
		}
		return s.link.path.life != nil, err
	})
}

// back puts memory behind the first bytes of a lane's data, so that writing there cannot fail.
func (p *pathRole) back(producer *lane.Producer, m *memory, bytes uint64) error {
	var err error
	// Less than a step is better than nothing.
	for _, unit := range []uint64{backedStep, uint64(len(zeros))} {
		to := min((bytes+unit-1)/unit*unit, producer.Capacity())
		if err = allocate(m.data.fd, producer.Backed(), to); err == nil {
			producer.SetBacked(to)
			return nil
		}
	}
	return p.directory.failed("stretching a lane of", "", err)
}

// Sync has everything sent so far written to the disk under a path channel, and waits for that: it survives the machine's end, as long as
// the receiver had not released it. What a crash of processes leaves needs no such thing.
//
// Errors: [ErrRefused] of a channel that is not a path's; [ErrSystem].
func (s *Sender) Sync() error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	if s.place == nil {
		return fail.New(fail.ErrRefused, "only a path channel has a disk under it: see CreateSender")
	}
	tail := s.lane.Tail()
	// That there is a channel, once; then the messages, then that they are there, and what was released.
	if !s.place.isSynced {
		if err := s.place.directory.sync(); err != nil {
			return err
		}
		s.place.isSynced = true
	}
	if err := unix.Fdatasync(s.memory.data.fd); err != nil {
		return fail.System("syncing the lane", err)
	}
	s.lane.NoteSynced(tail)
	return fail.System("syncing the lane's pages", errors.Join(unix.Fdatasync(s.memory.producer.fd), unix.Fdatasync(s.memory.consumer.fd)))
}

// CreateReceiver makes the path channel at a directory, or opens the one that is there, as its receiver. It begins with the oldest message
// that its predecessor had not released: see [Message.Redelivered]. No sender need be there. Its lanes are served by turns, as those of
// [Gather]. When the last sender has gone and everything is received, Receive says so once, and then waits for the next one.
//
// Errors: as CreateSender; [ErrRoleTaken] while another receiver is alive.
func CreateReceiver(ctx context.Context, directory string, options *Options) (*Receiver, error) {
	return pathReceiver(ctx, directory, options, true)
}

// OpenReceiver does not make a channel. Otherwise as CreateReceiver. Errors: also [ErrNoChannel].
func OpenReceiver(ctx context.Context, directory string, options *Options) (*Receiver, error) {
	return pathReceiver(ctx, directory, options, false)
}

func pathReceiver(ctx context.Context, path string, options *Options, make bool) (*Receiver, error) {
	o := options.orDefault()
	if _, err := o.forReceiver(0); err != nil {
		return nil, err
	}
	for {
		d, err := openChannel(ctx, path, &o, make)
		if err != nil {
			return nil, err
		}
		if err := d.checkSize(o.pathTakes(d.isOwnUser()), uint64(o.Memory)); err != nil {
			d.close()
			return nil, err
		}
		canBarrier := membarrier()
		page, bell, role, err := d.openReceiver(ctx, o.Await)
		if errors.Is(err, ErrNoChannel) && (make || o.Await) {
			continue
		}
		if err != nil {
			return nil, err
		}
		// Before any lane says that it is open: a predecessor that closed said so here as well. [close]
		r := newReceiver(canBarrier, page, bell, o)
		r.place = role
		if err := r.findSenders(); err != nil {
			_ = r.Close()
			return nil, err
		}
		// Messages that wait are as good as who sent them.
		if o.Await && !r.stirs() {
			if err := r.Resume(ctx); err != nil {
				_ = r.Close()
				return nil, err
			}
		}
		return r, nil
	}
}

// openLane takes over the next lane, and meets its sender.
func (r *Receiver) openLane(number int) error {
	of, err := r.place.directory.openLane(number, r.page, r.bell)
	if err != nil {
		return err
	}
	in := &inLane{incoming: *of, number: uint32(number) + 1}
	// Kept even when its sender cannot be looked at now: opened again it would be another receiver's to that one.
	r.lanes = append(r.lanes, in)
	err = in.findSender()
	// Who has gone before and left nothing is no news.
	if !in.consumer.MayBeReady() {
		in.end = nil
	}
	in.link.ring()
	return err
}

// findSenders looks for senders that have come to lanes that had none, and for new lanes.
func (r *Receiver) findSenders() error {
	for _, in := range r.lanes {
		if err := in.findSender(); err != nil {
			return err
		}
	}
	lanes, err := r.place.directory.lanes()
	for err == nil && len(r.lanes) < lanes {
		err = r.openLane(len(r.lanes))
	}
	return err
}

func (in *inLane) findSender() error {
	for range passedMax + 1 {
		what, err := in.link.find()
		switch {
		case err != nil || what == foundNothing:
			return err
		// Its life outlives it for a moment, in a child on its way to exec for instance.
		case what == foundPeer && !in.consumer.ProducerClosed():
			in.end = nil
			return nil
		}
		// And perhaps its successor is here.
		in.noteEnd()
	}
	// To be looked at again, after the other lanes.
	in.link.kick()
	return nil
}

func (in *inLane) noteEnd() {
	in.end = ErrPeerDied
	if in.consumer.ProducerClosed() {
		in.end = ErrClosed
	}
	in.link.path.lose()
}

func (in *inLane) isSenderHere() bool { return in.end == nil && in.link.path.life != nil }

// lookForEnds is asked when nothing is there: perhaps that is the end, of all senders, which is told once.
func (r *Receiver) lookForEnds() (bool, error) {
	before := len(r.lanes)
	if err := r.findSenders(); err != nil {
		return false, err
	}
	for _, in := range r.lanes {
		if in.isSenderHere() && (in.link.hasGone() || in.consumer.ProducerClosed()) {
			in.noteEnd()
		}
	}
	code := r.foundEnd()
	if code == nil && len(r.lanes) == before {
		return false, nil
	}
	// What was committed before the end is visible now. [close]
	if ok, err := r.lookAround(); ok || err != nil || code == nil {
		return ok, err
	}
	for _, in := range r.lanes {
		in.end = nil
	}
	return false, &EndError{code, r.unreleased()}
}

// foundEnd is how the senders ended, if none is here and the end of some has not been told yet.
func (r *Receiver) foundEnd() (code error) {
	for _, in := range r.lanes {
		if in.isSenderHere() {
			return nil
		}
		if in.end == ErrPeerDied || code == nil {
			code = in.end
		}
	}
	return code
}

func (r *Receiver) waitForSender(ctx context.Context) error {
	return meet(ctx, r.bell, &r.guard, func() (bool, error) {
		if r.broken != nil {
			return false, r.broken
		}
		err := r.findSenders()
		for _, in := range r.lanes {
			if in.isSenderHere() && !in.link.hasGone() && !in.consumer.ProducerClosed() {
				return true, err
			}
			if in.link.hasGone() || in.isSenderHere() {
				in.link.path.lose()
			}
			// Who asks for the next one does without the end of the last.
			in.end = nil
		}
		return false, err
	})
}

// Sync has what was released so far written to the disk under a path channel, so that it does not come again even after the machine's end.
//
// Errors: [ErrRefused] of a channel that is not a path's; [ErrSystem].
func (r *Receiver) Sync() error {
	if err := r.guard.enter(); err != nil {
		return err
	}
	defer r.leave()
	if r.place == nil {
		return fail.New(fail.ErrRefused, "only a path channel has a disk under it: see CreateReceiver")
	}
	for _, in := range r.lanes {
		if err := unix.Fdatasync(in.memory.consumer.fd); err != nil {
			return fail.System("syncing a consumer's page", err)
		}
	}
	return nil
}
