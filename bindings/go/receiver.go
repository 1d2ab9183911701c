package pelton

import (
	"context"
	"errors"
	"io"
	"iter"
	"os"
	"runtime"
	"sync"
	"sync/atomic"

	"pelton/internal/directory"
	"pelton/internal/doorbell"
	"pelton/internal/fail"
	"pelton/internal/handshake"
	"pelton/internal/kernel"
	"pelton/internal/lane"
	"pelton/internal/link"
	"pelton/internal/memory"
	"pelton/internal/wait"
)

// Receiver is the receiving end of a channel. One goroutine at a time uses it; Close may be called by any, also during a call, and
// so may [Message.Release].
type Receiver struct {
	guard     wait.Guard
	lanes     []*inLane
	sleeper   lane.Sleeper
	page      *memory.Segment
	bell      *doorbell.Own
	spin      wait.Spin
	options   Options
	reconnect reconnect
	// Of a receiver of many senders.
	registry *registry
	// Of a path channel: the role. Then the senders' end is told once, and receiving goes on.
	role *directory.Role

	// Whose turn it is, and how many messages it has had of it.
	current, inQuantum int
	// Found by a look, for the call to take.
	found  lane.Record
	broken error

	// Loans for messages to come.
	free []*messageHandle
	// What was released while another goroutine was in a call, or leaked.
	returns  atomic.Int32
	mutex    sync.Mutex
	returned []returned
}

// inLane is a consumer with its memory and the link to its producer.
type inLane struct {
	link.Incoming
	// Which of the receiver's: 0 of one sender, else from 1 on.
	number uint32
	// Of a service: the client, as those have it who answer.
	session  *session
	isClosed bool
	// Of a path channel: how its sender went, until that is told.
	end error
	// Descriptors of the message at the cursor, once it has been found, and why there are none.
	filesFor  uint32
	files     []int
	filesLost error
}

// quantum is after how many messages of one sender it is the next one's turn.
const quantum = 64

func newReceiver(canBarrier bool, page *memory.Segment, bell *doorbell.Own, options Options) *Receiver {
	return &Receiver{
		sleeper: lane.NewReceiverSleeper(page.Bytes, canBarrier), page: page, bell: bell, spin: wait.Spin{IsBusy: options.Wait == Spin}, options: options,
	}
}

func (r *Receiver) leave() { r.leaveFrom(wait.InUse) }

func (r *Receiver) leaveFrom(state uint32) {
	for {
		if r.guard.Leave(state) {
			r.tearDown()
			return
		}
		// Who gave something back and found this goroutine in has counted it before, and relies on this look.
		if r.returns.Load() == 0 || !r.guard.TryEnter() {
			return
		}
		state = wait.InBrief
		r.releaseReturned()
	}
}

// Message is one that was received. It lies in the lane, where it stays until it is released: the sender's space comes back in the
// order of sending, so one that is kept keeps what came after it, too. Any goroutine may use and release it; copies of it are the same
// message. One that is dropped without being released is reported: see [Options.OnLeak].
//
// A sender that breaks the rules can change the bytes while they are read; who does not trust it copies them first, or uses
// [Receiver.ReceiveInto].
type Message struct {
	bytes  []byte
	handle *messageHandle
	peer   kernel.Peer
	// Which use of what is lent: the next message has another.
	use                   uint32
	seq, generation, lane uint32
	again                 bool
}

// loan is a message that is lent out. What frees it if it leaks must not lead to the lent that is waited for.
type loan struct {
	receiver *Receiver
	in       *inLane
	ticket   uint64
	seq      uint32
	// Odd while it is lent; one more at each end of its use.
	uses  atomic.Uint32
	files []int
	// Whose they are.
	uid int
}

// messageHandle is what messages point to, and the receiver only while nobody has it: so that one that leaks is unreachable.
type messageHandle struct{ loan *loan }

type returned struct {
	loan *loan
	// nil of a leak.
	lent *messageHandle
}

// Bytes is the message, in place: valid until Release.
func (m Message) Bytes() []byte { return m.bytes }

// Seq is the message's number: 1 for a lane's first, one more for each, modulo 2^32, never 0.
func (m Message) Seq() uint32 { return m.seq }

// Redelivered says that a receiver that died may have had this message before.
func (m Message) Redelivered() bool { return m.again }

// Generation is which of the lane's senders sent it: 1 for the first, one more for each successor.
func (m Message) Generation() uint32 { return m.generation }

// Lane is which sender of a receiver of many sent it: from 1 on, never the same for two that are there; 0 of a receiver of one.
func (m Message) Lane() uint32 { return m.lane }

// Peer is who sent it.
func (m Message) Peer() kernel.Peer { return m.peer }

// Files are the descriptors that came with the message. Who asks has them, and closes them; those that nobody asked for are closed
// with the message's release, by another goroutine. They may be of any kind: to use or close one may wait for whatever is behind it, as long as the
// sender wants. Ask once.
func (m Message) Files() []*os.File {
	if m.handle == nil || m.handle.loan.uses.Load() != m.use {
		return nil
	}
	fds := m.handle.loan.files
	m.handle.loan.files = nil
	// Not before somebody wants them: the poller asks some kinds of files, which may not answer.
	var files []*os.File
	for _, fd := range fds {
		files = append(files, os.NewFile(uintptr(fd), "received"))
	}
	return files
}

// Release gives the message's space back to the sender. Any goroutine may do it, at any time, also after the receiver was closed.
// It does not wait.
//
// Errors: [ErrNotReceived] of a message that was released before.
func (m Message) Release() error {
	if m.handle == nil || !m.handle.loan.uses.CompareAndSwap(m.use, m.use+1) {
		return fail.New(fail.ErrNotReceived, "the message was released already, or never received")
	}
	loan := m.handle.loan
	loan.closeFiles()
	r := loan.receiver
	if r.guard.TryEnter() {
		r.release(loan, m.handle)
		r.leaveFrom(wait.InBrief)
		return nil
	}
	r.releaseLater(returned{loan, m.handle})
	return nil
}

func (l *loan) closeFiles() {
	kernel.Deferred.CloseAll(l.uid, l.files)
	l.files = nil
}

// leaked is called when nobody can reach the lent any more.
func leaked(l *loan) {
	if l.uses.Load()%2 == 0 {
		return
	}
	l.uses.Add(1)
	l.receiver.options.leaked(l.seq)
	l.closeFiles()
	l.receiver.releaseLater(returned{l, nil})
}

// releaseLater leaves it to who is in a call, or does it if nobody is by now. Of a closed handle only the memory is given back.
func (r *Receiver) releaseLater(what returned) {
	r.mutex.Lock()
	r.returned = append(r.returned, what)
	r.mutex.Unlock()
	r.returns.Add(1)
	if r.guard.TryEnter() {
		r.releaseReturned()
		r.leaveFrom(wait.InBrief)
		return
	}
	if r.guard.IsClosing() {
		r.releaseReturnedMemory()
		return
	}
	// It may sleep, and so may the sender, for want of this room.
	r.bell.Wake()
}

func (r *Receiver) takeReturned() []returned {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	all := r.returned
	r.returned = nil
	r.returns.Add(-int32(len(all)))
	return all
}

func (r *Receiver) releaseReturned() {
	for _, returned := range r.takeReturned() {
		r.release(returned.loan, returned.lent)
	}
}

// releaseReturnedMemory is for what comes back after the end.
func (r *Receiver) releaseReturnedMemory() {
	for _, returned := range r.takeReturned() {
		returned.loan.in.Memory.Release()
	}
}

func (r *Receiver) release(l *loan, lent *messageHandle) {
	in := l.in
	if !in.isClosed && in.Consumer.ReleaseHeld(l.ticket) == lane.Ring {
		in.Link.Ring()
	}
	in.Memory.Release()
	if lent != nil {
		r.free = append(r.free, lent)
	}
}

// lend makes a message of what was found, behind which the cursor goes.
func (r *Receiver) lend() (Message, error) {
	in, record := r.lanes[r.current], r.found
	files, err := in.takeFiles()
	if err != nil {
		return Message{}, err
	}
	var out *messageHandle
	if n := len(r.free); n > 0 {
		out = r.free[n-1]
		r.free[n-1] = nil
		r.free = r.free[:n-1]
	} else {
		out = &messageHandle{&loan{receiver: r}}
		runtime.AddCleanup(out, leaked, out.loan)
	}
	l := out.loan
	message := Message{
		bytes: in.Consumer.Payload(record), handle: out, peer: in.Link.Peer, use: l.uses.Add(1),
		seq: record.Seq, generation: in.Consumer.Generation(), lane: in.number, again: in.Redelivered > 0,
	}
	l.in, l.seq, l.files, l.uid = in, record.Seq, files, in.Link.Peer.UID
	l.ticket = in.Consumer.Hold(record)
	in.Memory.Retain()
	r.count(in)
	return message, nil
}

// count notes that a message was taken.
func (r *Receiver) count(in *inLane) {
	r.inQuantum++
	if in.Redelivered > 0 {
		in.Redelivered--
	}
}

// Receive waits for the next message, until the context ends; one that needs no wait does not look at the context. The message lies
// in the lane until it is released.
//
// Errors: the context's. After the last message [ErrClosed] when the sender has closed, [ErrPeerDied] when it died: Resume goes on with a
// successor. A receiver of many senders has neither. [ErrDescriptorsLost]; [ErrCorrupt]: close the channel. It allocates nothing unless
// it waits, or more messages are kept than ever before.
func (r *Receiver) Receive(ctx context.Context) (Message, error) {
	if err := r.guard.Enter(); err != nil {
		return Message{}, err
	}
	defer r.leave()
	if err := r.find(ctx); err != nil {
		return Message{}, err
	}
	return r.lend()
}

// TryReceive is the next message if it is there now. It never waits. Errors as Receive.
func (r *Receiver) TryReceive() (message Message, ok bool, err error) {
	if err := r.guard.Enter(); err != nil {
		return Message{}, false, err
	}
	defer r.leave()
	if ok, err := r.poll(); err != nil || !ok {
		return Message{}, false, err
	}
	message, err = r.lend()
	return message, err == nil, err
}

// ReceiveInto copies the next message into the buffer and releases it; answers how many bytes it has. Descriptors that came with it are
// closed. Otherwise as Receive.
//
// Errors: also [ErrTooSmall], with the number of bytes that are wanted: the message stays the next one.
func (r *Receiver) ReceiveInto(ctx context.Context, buffer []byte) (int, error) {
	if err := r.guard.Enter(); err != nil {
		return 0, err
	}
	defer r.leave()
	if err := r.find(ctx); err != nil {
		return 0, err
	}
	if r.found.Bytes > uint64(len(buffer)) {
		return int(r.found.Bytes), fail.New(fail.ErrTooSmall, "the next message has %d bytes, the buffer %d", r.found.Bytes, len(buffer))
	}
	in := r.lanes[r.current]
	files, err := in.takeFiles()
	if err != nil {
		return 0, err
	}
	in.Link.Discard(files)
	bytes := copy(buffer, in.Consumer.Payload(r.found))
	in.Consumer.Take(r.found)
	r.count(in)
	if in.Consumer.ReleaseTaken() == lane.Ring {
		in.Link.Ring()
	}
	return bytes, nil
}

// Messages are all that come, until the sender closes or the context ends. Each is released when the loop's body is done with it, unless
// the body has done so. The error, if there is one, comes last, with no message: that the sender has closed is none.
func (r *Receiver) Messages(ctx context.Context) iter.Seq2[Message, error] {
	return func(yield func(Message, error) bool) {
		for {
			message, err := r.Receive(ctx)
			if err != nil {
				if !errors.Is(err, ErrClosed) {
					yield(Message{}, err)
				}
				return
			}
			goesOn := yield(message, nil)
			// Unless it has been already.
			_ = message.Release()
			if !goesOn {
				return
			}
		}
	}
}

func (r *Receiver) find(ctx context.Context) error {
	if ok, err := r.poll(); ok || err != nil {
		return err
	}
	if len(r.lanes) > 0 {
		r.lanes[r.current].Consumer.CountWait()
	}
	return wait.For(ctx, (*receiveWait)(r), r.bell, &r.spin, &r.guard)
}

// poll finds the next message: of the sender whose turn it is, or of the next one that has any.
func (r *Receiver) poll() (bool, error) {
	if r.returns.Load() != 0 {
		r.releaseReturned()
	}
	if r.broken != nil {
		if isCorrupt(r.broken) {
			return false, r.broken
		}
		return false, &EndError{r.broken, r.unreleased()}
	}
	if r.registry != nil {
		r.registry.takeArrived(r)
	}
	if r.inQuantum >= quantum {
		r.advance()
		if r.role != nil {
			// A busy receiver is not rung for new lanes.
			if err := r.findSenders(); err != nil {
				return false, err
			}
		}
	}
	if ok, err := r.pollLanes(); ok || err != nil || r.role == nil {
		return ok, err
	}
	return r.pollEnds()
}

func (r *Receiver) pollLanes() (bool, error) {
	for range len(r.lanes) {
		if len(r.lanes) == 0 {
			break
		}
		ok, err := r.pollLane(r.lanes[r.current])
		if ok {
			r.sleeper.Disarm()
		}
		if ok || err != nil {
			return ok, err
		}
		r.advance()
	}
	return false, nil
}

func (r *Receiver) advance() {
	r.inQuantum = 0
	if r.current++; r.current >= len(r.lanes) {
		r.current = 0
	}
}

// pollLane looks for the lane's next message, and for its end behind the last one. Of many senders, one that has gone or has broken the
// rules is given up, and touches no other.
func (r *Receiver) pollLane(in *inLane) (bool, error) {
	if in.isPaused() {
		return false, nil
	}
	record, ok, err := in.Consumer.Peek()
	isClosed, isGone := false, false
	if err == nil && !ok && r.role != nil {
		return false, nil
	}
	if err == nil && !ok {
		isGone, isClosed = in.Link.IsGone.Load(), in.Consumer.ProducerClosed()
		if !isGone && !isClosed {
			return false, nil
		}
		// What was committed before the end is visible now. [close]
		record, ok, err = in.Consumer.Peek()
		// Closed, not died, if it was the one before the other.
		isClosed = isClosed || in.Consumer.ProducerClosed()
	}
	if err != nil {
		return false, r.failed(fail.Lane(err))
	}
	if ok && record.Descriptors > 0 && in.filesFor != record.Seq {
		err := in.receiveFiles(record)
		if errors.Is(err, ErrCorrupt) {
			return false, r.failed(err)
		}
	}
	if ok {
		r.found = record
		return true, nil
	}
	if r.registry != nil {
		r.dropLane(in)
		return false, nil
	}
	code := ErrPeerDied
	if isClosed {
		code = ErrClosed
	}
	r.broken = code
	return false, &EndError{code, r.unreleased()}
}

// isPaused says whether nothing is taken of a client now that is there: it does not read its replies, or was told that this is so.
func (in *inLane) isPaused() bool {
	return in.session != nil && (in.session.isBackpressured.Load() || in.session.isDrained) && !in.Link.IsGone.Load()
}

// receiveFiles takes in what came with the message at the cursor. What was lost is said once: see takeFiles.
func (in *inLane) receiveFiles(record lane.Record) error {
	in.files, in.filesLost = in.Link.TakeDescriptors(record.Seq, record.Descriptors, in.Redelivered > 0)
	in.filesFor = record.Seq
	return in.filesLost
}

// takeFiles hands them on.
func (in *inLane) takeFiles() ([]int, error) {
	files, err := in.files, in.filesLost
	in.files, in.filesLost = nil, nil
	return files, err
}

// failed notes that the sender whose turn it is has broken the rules.
func (r *Receiver) failed(err error) error {
	if r.registry != nil {
		r.dropLane(r.lanes[r.current])
		return nil
	}
	r.broken = err
	return err
}

// dropLane parts with the lane whose turn it is.
func (r *Receiver) dropLane(in *inLane) {
	r.lanes = append(r.lanes[:r.current], r.lanes[r.current+1:]...)
	// The caller goes on to the next one, which stands here now.
	r.current--
	in.close()
	r.registry.removeSender()
}

// close tells the sender, of a lane that nothing more is received of.
func (in *inLane) close() {
	in.isClosed = true
	if in.session != nil {
		in.session.close()
		in.session.assembly.Forget()
	}
	in.Consumer.Close()
	in.Link.Ring()
	in.Link.Close()
	in.Link.Discard(in.files)
	in.Memory.Release()
	in.MemoryShare.ShrinkTo(0)
}

func (r *Receiver) unreleased() (held uint64) {
	for _, in := range r.lanes {
		held += in.Consumer.Unreleased()
	}
	return held
}

func (r *Receiver) mayBeReady() bool {
	for _, in := range r.lanes {
		if in.Consumer.MayBeReady() && !in.isPaused() {
			return true
		}
	}
	return false
}

// receiveWait is a receiver that waits for a message.
type receiveWait Receiver

func (w *receiveWait) Poll() (bool, error) { return (*Receiver)(w).poll() }

func (w *receiveWait) MayBeReady() bool { return (*Receiver)(w).mayBeReady() }

func (w *receiveWait) Disarm() { w.sleeper.Disarm() }

func (w *receiveWait) NeedsTimedWait() bool {
	return w.sleeper.NeedsFencedWakers() && !(*Receiver)(w).areSendersFencing()
}

func (w *receiveWait) Arm() (bool, error) {
	r := (*Receiver)(w)
	r.sleeper.Arm(r.areSendersFencing, kernel.Membarrier)
	if ok, err := r.poll(); ok || err != nil {
		r.sleeper.Disarm()
		return false, err
	}
	if len(r.lanes) > 0 {
		r.lanes[r.current].Consumer.CountSleep()
	}
	return true, nil
}

func (r *Receiver) areSendersFencing() bool {
	for _, in := range r.lanes {
		// Of a path channel, who comes later rings.
		if (r.role == nil || in.isSenderHere()) && !in.Consumer.IsProducerFencing() {
			return false
		}
	}
	return true
}

// Resume waits, after [ErrPeerDied], for the sender's successor and offers it the lane, to go on where the dead one committed last. A
// receiver that had connected connects under the name again; one that a [Listener] accepted accepts the successor there, so keep that
// open. Of a path channel it waits until a sender is there, which receiving does not need.
//
// Errors: the context's; [ErrRefused] when the channel has not lost its sender (not of a path), and of a receiver of many, which takes successors in by
// itself; [ErrCorrupt], [ErrSystem]. After an error it can be tried again.
func (r *Receiver) Resume(ctx context.Context) error {
	if err := r.guard.Enter(); err != nil {
		return err
	}
	defer r.leave()
	if r.role != nil {
		return r.waitForSender(ctx)
	}
	if r.registry != nil {
		return fail.New(fail.ErrRefused, "a receiver that gathers takes in successors by itself")
	}
	if r.broken == nil && !r.lanes[0].Link.IsGone.Load() {
		return fail.New(fail.ErrRefused, "the sender is alive: there is nobody to succeed it")
	}
	if isCorrupt(r.broken) {
		return r.broken
	}
	if _, _, err := r.lanes[0].Consumer.EndOfCommitted(); err != nil {
		return r.failed(fail.Lane(err))
	}
	if err := r.reconnect.resume(ctx, func(shake *handshake.Handshake, listens bool) error {
		return shake.SurvivingReceiver(&r.lanes[0].Incoming, r.bell, listens)
	}); err != nil {
		return err
	}
	r.broken = nil
	return nil
}

// Capacity is the bytes of the lane; 0 of a receiver of many, whose senders decide.
func (r *Receiver) Capacity() int {
	if r.registry != nil {
		return 0
	}
	return int(r.lanes[0].Consumer.Capacity())
}

// Peer is who sends; nobody of a receiver of many, whose messages say: [Message.Peer].
func (r *Receiver) Peer() kernel.Peer {
	if r.registry != nil || r.role != nil {
		return kernel.Peer{}
	}
	return r.lanes[0].Link.Peer
}

// Close says that nothing more will be received: the sender is told [ErrClosed], with the number of messages not released. It does not
// wait. A call of another goroutine ends with [ErrClosedHandle]; messages received stay readable until they are released. Closing
// twice does nothing.
func (r *Receiver) Close() error {
	alone, again := r.guard.Close()
	switch {
	case again:
	case alone:
		r.tearDown()
	default:
		r.bell.Wake()
	}
	return nil
}

func (r *Receiver) tearDown() {
	if r.registry != nil {
		r.registry.close(r)
	}
	r.releaseReturned()
	// The words first, the ring next, the hang-up last: whoever hears one of the later finds the earlier.
	for _, in := range r.lanes {
		in.Consumer.Close()
	}
	r.sleeper.Close()
	for _, in := range r.lanes {
		in.close()
	}
	if r.role != nil {
		r.role.Close()
	}
	if r.registry != nil || r.role != nil {
		// Messages lie in the data, and no lane looks at this any more.
		r.page.Close()
	}
	r.bell.Close()
	// What came back meanwhile was left to this.
	r.releaseReturnedMemory()
}

// NewReader is an io.Reader of what the messages are made of, one behind the other: it does not tell where one ends. io.EOF when the
// sender has closed; other errors as Receive. Waiting ends with the context.
func (r *Receiver) NewReader(ctx context.Context) io.Reader { return &reader{ctx: ctx, receiver: r} }

type reader struct {
	ctx      context.Context
	receiver *Receiver
	message  Message
	rest     []byte
}

func (r *reader) Read(buffer []byte) (int, error) {
	if len(buffer) == 0 {
		return 0, nil
	}
	for len(r.rest) == 0 {
		message, err := r.receiver.Receive(r.ctx)
		if errors.Is(err, ErrClosed) {
			return 0, io.EOF
		}
		if err != nil {
			return 0, err
		}
		r.message, r.rest = message, message.Bytes()
		if len(r.rest) == 0 {
			_ = message.Release()
		}
	}
	n := copy(buffer, r.rest)
	if r.rest = r.rest[n:]; len(r.rest) == 0 {
		_ = r.message.Release()
	}
	return n, nil
}
