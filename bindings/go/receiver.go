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

	"github.com/pelton-ipc/pelton/bindings/go/internal/calls"
	"github.com/pelton-ipc/pelton/bindings/go/internal/directory"
	"github.com/pelton-ipc/pelton/bindings/go/internal/doorbell"
	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/handshake"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/link"
	"github.com/pelton-ipc/pelton/bindings/go/internal/memory"
	"github.com/pelton-ipc/pelton/bindings/go/internal/wait"
)

// Receiver is the receiving endpoint of a channel. One goroutine at a time uses it; any may call Close and
// [Message.Release] at any time.
type Receiver struct {
	guard     wait.Guard
	lanes     []*inLane
	sleeper   lane.Sleeper
	page      *memory.Segment
	doorbell  *doorbell.Own
	spin      wait.Spin
	options   Options
	reconnect reconnect
	// Set for a receiver of many senders.
	registry *registry
	// Set for a path channel. Then the end of the senders is reported once, and receiving continues.
	role *directory.Role
	// FlushTo has taken messages that it has not written, and some lane has ended since.
	isUnwritten, isEndDeferred bool

	// What lanes that are gone have counted.
	parted Counters

	// The lane that is served, and how many messages it gave in this quantum.
	current, inQuantum int
	// Found by a poll, for the call to take.
	found  lane.Record
	broken error
	// That of the message which ReceiveInto copied last.
	trace    calls.Traceparent
	isTraced bool

	// Handles for later messages.
	free []*messageHandle
	// Messages that were released during another goroutine's call, or leaked.
	returns  atomic.Int32
	mutex    sync.Mutex
	returned []returned
}

// inLane is a lane of a receiver, a service or a client.
type inLane struct {
	link.Incoming
	// Its number in the receiver: 0 for the only one, else from 1.
	number uint32
	// Set for a lane of requests.
	session  *session
	isClosed bool
	flushed  flushedLane
	// On a path channel: how its sender ended, until that is reported.
	end error
	// The descriptors of the message at the cursor, or the error for them.
	filesFor  uint32
	files     []int
	filesLost error
}

// quantum is the number of messages of one sender before the next sender's.
const quantum = 64

func newReceiver(canBarrier bool, page *memory.Segment, ownDoorbell *doorbell.Own, options Options) *Receiver {
	return &Receiver{
		sleeper: lane.NewReceiverSleeper(page.Bytes,
			canBarrier), page: page, doorbell: ownDoorbell, spin: wait.New(options.Wait == Spin), options: options,
	}
}

func (r *Receiver) leave() { r.leaveFrom(wait.InUse) }

func (r *Receiver) leaveFrom(state uint32) {
	for {
		if r.guard.Leave(state) {
			r.tearDown()
			return
		}
		// A goroutine that released a message during this call has counted it before, and relies on this check.
		if r.returns.Load() == 0 || !r.guard.TryEnter() {
			return
		}
		state = wait.InBrief
		r.releaseReturned()
	}
}

// Message is a received message. It lies in the lane until it is released. Space becomes free in the order of
// sending, so a message that is kept also keeps what came after it. Any goroutine may use and release it; its copies
// are the same message. A message that is dropped without release is reported: see [Options.OnLeak].
//
// A sender that breaks the rules can change the bytes while they are read. If you do not trust it, copy them first,
// or use [Receiver.ReceiveInto].
type Message struct {
	bytes  []byte
	handle *messageHandle
	peer   kernel.Peer
	// A number for each use of the handle.
	use                   uint32
	seq, generation, lane uint32
	again                 bool
}

// loan is a message that is in use. The cleanup of a leaked one must not refer to its handle.
type loan struct {
	receiver *Receiver
	in       *inLane
	ticket   uint64
	seq      uint32
	// Odd while it is in use; one more at each begin and end.
	uses  atomic.Uint32
	files []int
	// The message's position in a trace.
	trace    calls.Traceparent
	isTraced bool
	// The user of the descriptors.
	uid int
}

// messageHandle is referenced by messages, and by the receiver only while no message uses it: so a leaked one is
// unreachable.
type messageHandle struct{ loan *loan }

type returned struct {
	loan *loan
	// nil for a leaked message.
	lent *messageHandle
}

// Bytes returns the message in place. It is valid until Release.
func (m Message) Bytes() []byte { return m.bytes }

// Seq returns the message's number in its lane: 1 for the first, modulo 2^32, never 0.
func (m Message) Seq() uint32 { return m.seq }

// Redelivered reports whether a receiver that died may have had this message before.
func (m Message) Redelivered() bool { return m.again }

// Generation returns which of the lane's senders sent it: 1 for the first, one more for each successor.
func (m Message) Generation() uint32 { return m.generation }

// Lane returns which sender of a receiver of many sent it: from 1, never the same for two present ones; 0 for a
// receiver of one.
func (m Message) Lane() uint32 { return m.lane }

// Peer returns the process that sent it.
func (m Message) Peer() Peer { return m.peer }

// Traceparent returns the position of its sender in a distributed trace ([Sender.SendTraced]): the text of the header
// traceparent of W3C Trace Context. It returns "" if the sender gave none, or no valid one, and after Release.
func (m Message) Traceparent() string {
	if m.handle == nil || m.handle.loan.uses.Load() != m.use {
		return ""
	}
	return textOf(m.handle.loan.trace, m.handle.loan.isTraced)
}

// Traceparent is as [Message.Traceparent], of the message that ReceiveInto copied last. Only the goroutine that called
// ReceiveInto may call it.
func (r *Receiver) Traceparent() string { return textOf(r.trace, r.isTraced) }

func textOf(trace calls.Traceparent, isTraced bool) string {
	if isTraced && trace.IsValid() {
		return trace.String()
	}
	return ""
}

// TakeFiles returns the descriptors that came with the message, once; then they belong to the caller, which closes
// them. Release closes those that were not taken, in another goroutine. A descriptor may be of any kind: using or
// closing it may wait as long as the sender wants. It does not wait.
func (m Message) TakeFiles() []*os.File {
	if m.handle == nil || m.handle.loan.uses.Load() != m.use {
		return nil
	}
	fds := m.handle.loan.files
	m.handle.loan.files = nil
	// Only now: for some kinds of files the poller makes calls that may not return.
	var files []*os.File
	for _, fd := range fds {
		files = append(files, os.NewFile(uintptr(fd), "received"))
	}
	return files
}

// Release frees the message's space. Any goroutine may call it at any time, also after the receiver was closed. It
// does not wait.
//
// Errors: [ErrNotReceived] if the message was released before.
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

// leaked is called when no message refers to the handle any more.
func leaked(l *loan) {
	if l.uses.Load()%2 == 0 {
		return
	}
	l.uses.Add(1)
	l.receiver.options.leaked(l.seq)
	l.closeFiles()
	l.receiver.releaseLater(returned{l, nil})
}

// releaseLater leaves the release to the goroutine in a call, or performs it if there is none by now. For a closed
// handle it releases only the memory.
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
	// The receiver may sleep, and its sender too, for lack of this space.
	r.doorbell.Wake()
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

// releaseReturnedMemory is for messages that are released after the end.
func (r *Receiver) releaseReturnedMemory() {
	for _, returned := range r.takeReturned() {
		returned.loan.in.Memory.Release()
	}
}

func (r *Receiver) release(l *loan, lent *messageHandle) {
	in := l.in
	if !in.isClosed && in.Consumer.ReleaseHeld(l.ticket) == lane.Ring {
		in.WakePeer()
	}
	in.Memory.Release()
	if lent != nil {
		r.free = append(r.free, lent)
	}
}

// lend returns the message that was found, and moves the cursor.
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
	l.trace, l.isTraced = in.Consumer.CopyTrace(record)
	l.ticket = in.Consumer.Hold(record)
	in.Memory.Retain()
	r.count(in)
	return message, nil
}

// count counts a taken message.
func (r *Receiver) count(in *inLane) {
	r.inQuantum++
	if in.Redelivered > 0 {
		in.Redelivered--
	}
	if in.flushed.givenBack > 0 {
		in.flushed.givenBack--
	}
}

// Receive waits for the next message until the context ends; if it need not wait, it ignores the context. The message
// lies in the lane until it is released. It allocates nothing unless it waits, or more messages are in use than ever
// before.
//
// Errors: the context's. After the last message an [EndError]: [ErrClosed] if the sender closed, [ErrPeerDied] if it
// died, and Resume waits for a successor. A receiver of many senders has neither. [ErrDescriptorsLost]; [ErrCorrupt]:
// close the channel.
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

// TryReceive returns the next message if it is there now. It never waits. Errors as Receive.
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

// ReceiveInto copies the next message into the buffer, releases it, and returns its size. Descriptors that came with
// it are closed. Otherwise as Receive.
//
// Errors: also [ErrTooSmall], with the size of the message, which stays the next one.
func (r *Receiver) ReceiveInto(ctx context.Context, buffer []byte) (int, error) {
	if err := r.guard.Enter(); err != nil {
		return 0, err
	}
	defer r.leave()
	if err := r.find(ctx); err != nil {
		return 0, err
	}
	if r.found.Bytes > uint64(len(buffer)) {
		return int(r.found.Bytes), fail.New(fail.ErrTooSmall, "the next message has %d bytes, the buffer %d",
			r.found.Bytes, len(buffer))
	}
	in := r.lanes[r.current]
	files, err := in.takeFiles()
	if err != nil {
		return 0, err
	}
	in.Link.Discard(files)
	bytes := copy(buffer, in.Consumer.Payload(r.found))
	r.trace, r.isTraced = in.Consumer.CopyTrace(r.found)
	in.Consumer.Take(r.found)
	r.count(in)
	if in.Consumer.ReleaseTaken() == lane.Ring {
		in.WakePeer()
	}
	return bytes, nil
}

// Messages iterates over all messages, until the sender closes or the context ends. It releases each after the loop's
// body, unless the body did. An error comes last, without a message; that the sender closed is none.
func (r *Receiver) Messages(ctx context.Context) iter.Seq2[Message, error] {
	return messages(ctx, r.Receive, Message.Release)
}

func messages[M any](ctx context.Context, receive func(context.Context) (M, error),
	release func(M) error) iter.Seq2[M, error] {
	return func(yield func(M, error) bool) {
		for {
			message, err := receive(ctx)
			if err != nil {
				if !errors.Is(err, ErrClosed) {
					yield(message, err)
				}
				return
			}
			goesOn := yield(message, nil)
			// Unless the body has released it.
			_ = release(message)
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
	return wait.For(ctx, (*receiveWait)(r), r.doorbell, &r.spin, &r.guard)
}

// poll finds the next message: of the current sender, or of the next one that has any.
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

// pollLane finds the lane's next message, or its end. With many senders, it drops one that is gone or breaks the
// rules, without an effect on others.
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
		// If it closed before it died, it closed.
		isClosed = isClosed || in.Consumer.ProducerClosed()
	}
	if err != nil {
		return false, r.failed(fail.Lane(err))
	}
	if ok && record.Descriptors > 0 && in.filesFor != record.Seq && in.flushed.givenBack == 0 {
		err := in.receiveFiles(record)
		if errors.Is(err, ErrCorrupt) {
			return false, r.failed(err)
		}
	}
	if ok {
		r.found = record
		return true, nil
	}
	if r.defersEnd() {
		return false, nil
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

// isPaused reports whether no request is taken now: the client does not read its replies, or was notified that this
// service has drained.
func (in *inLane) isPaused() bool {
	return in.session != nil && (in.session.isBackpressured.Load() || in.session.isDrained) && !in.Link.IsGone.Load()
}

// receiveFiles receives the descriptors of the message at the cursor. takeFiles reports their loss once.
func (in *inLane) receiveFiles(record lane.Record) error {
	in.files, in.filesLost = in.Link.TakeDescriptors(record.Seq, record.Descriptors, in.Redelivered > 0)
	in.filesFor = record.Seq
	return in.filesLost
}

// takeFiles returns them, once.
func (in *inLane) takeFiles() ([]int, error) {
	files, err := in.files, in.filesLost
	in.files, in.filesLost = nil, nil
	return files, err
}

// failed records that the current sender broke the rules.
func (r *Receiver) failed(err error) error {
	if r.defersEnd() {
		return nil
	}
	if r.registry != nil {
		r.dropLane(r.lanes[r.current])
		return nil
	}
	r.broken = err
	return err
}

// dropLane closes the current lane and removes it.
func (r *Receiver) dropLane(in *inLane) {
	r.parted.Add(in.Consumer.Counters())
	r.lanes = append(r.lanes[:r.current], r.lanes[r.current+1:]...)
	// The caller advances to the next one, which has this index now.
	r.current--
	in.close()
	r.registry.removeSender()
}

// close closes the lane, which the sender detects.
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

func (w *receiveWait) PeerPID() int {
	if len(w.lanes) == 0 {
		return 0
	}
	return w.lanes[len(w.lanes)-1].Link.Peer.PID
}

// With several senders, the ring of the one whose turn it is.
func (w *receiveWait) LastRing() lane.LastRing {
	if len(w.lanes) == 0 {
		return lane.LastRing{}
	}
	return w.lanes[w.current].Consumer.LastRing()
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
		// On a path channel, a later sender rings.
		if (r.role == nil || in.isSenderHere()) && !in.Consumer.IsProducerFencing() {
			return false
		}
	}
	return true
}

// Resume waits, after [ErrPeerDied], for the sender's successor, and offers it the lane, to continue after the last
// message that the dead one committed. A receiver that had connected connects again. One from a [Listener] accepts
// the successor there, so keep that open. On a path channel it waits for a sender, or for a message, as a sender may
// have left again; receiving needs neither.
//
// Errors: the context's; [ErrRefused] if the sender is not gone (except on a path channel), and for a receiver of
// many, which accepts successors by itself; [ErrCorrupt], [ErrSystem]. After an error it may be called again.
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
	if err := r.reconnect.resume(ctx, &r.guard, func(shake *handshake.Handshake, listens bool) error {
		return shake.SurvivingReceiver(&r.lanes[0].Incoming, r.doorbell, listens)
	}); err != nil {
		return err
	}
	r.broken = nil
	return nil
}

// Capacity returns the size of the lane in bytes; 0 for a receiver of many, whose senders decide.
func (r *Receiver) Capacity() int {
	if r.registry != nil {
		return 0
	}
	return int(r.lanes[0].Consumer.Capacity())
}

// Counters returns the statistics of this side, of all its lanes together, as [Sender.Counters] does.
func (r *Receiver) Counters() (Counters, bool) {
	if r.guard.Enter() != nil {
		return Counters{}, false
	}
	defer r.leave()
	sum := r.parted
	for _, in := range r.lanes {
		sum.Add(in.Consumer.Counters())
	}
	return sum, true
}

// Peer returns the process that sends. For a receiver of many it is zero: see [Message.Peer].
func (r *Receiver) Peer() Peer {
	if r.registry != nil || r.role != nil {
		return Peer{}
	}
	return r.lanes[0].Link.Peer
}

// Close ends the channel: the sender gets [ErrClosed] with the number of unreleased messages. It does not wait.
// Another goroutine's call ends with [ErrClosedHandle]. Closing twice does nothing.
//
// Received messages stay readable and unchanged until they are released. On a path channel they keep the receiver's
// role, so release them before a successor can start.
func (r *Receiver) Close() error {
	r.guard.CloseHandle(r.tearDown, r.doorbell.Wake)
	return nil
}

func (r *Receiver) tearDown() {
	if r.registry != nil {
		r.registry.close(r)
	}
	r.releaseReturned()
	// The states first, then the rings, last the hang-ups: a sender that detects a later one finds the earlier ones.
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
		// Messages do not lie in it, and no lane uses it any more.
		r.page.Close()
	}
	r.doorbell.Close()
	// Messages that were released meanwhile were left to this.
	r.releaseReturnedMemory()
}

// NewReader returns an io.Reader of the messages' bytes, one message after the other, without their borders. It
// returns io.EOF when the sender has closed; other errors as Receive. It waits until the context ends.
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
