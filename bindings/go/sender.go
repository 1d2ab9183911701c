package pelton

import (
	"context"
	"errors"
	"io"
	"sync/atomic"

	"github.com/pelton-ipc/pelton/bindings/go/internal/calls"
	"github.com/pelton-ipc/pelton/bindings/go/internal/directory"
	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/handshake"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/link"
	"github.com/pelton-ipc/pelton/bindings/go/internal/wait"
	"github.com/pelton-ipc/pelton/bindings/go/internal/window"
)

// Sender is the sending endpoint of a channel. One goroutine at a time uses it; any may call Close at any time.
type Sender struct {
	out       link.Outgoing
	guard     wait.Guard
	spin      wait.Spin
	reconnect reconnect
	// Set for a path channel. Then the receiver's end is reported once, and sending continues.
	role *directory.Role
	// ErrClosed or ErrPeerDied once the receiver is gone, or an ErrCorrupt with details.
	broken error
	// Bytes reserved and not committed; -1 when there is no reservation.
	reserved int
	window   window.Window
	// Duplicates of the descriptors of unreleased messages, and how many of the last ones a successor of the receiver
	// has not got yet.
	sent   []sentFiles
	unsent int
	// Set while descriptors are sent.
	sending atomic.Pointer[link.Link]
	// The condition of a wait.
	wantedBytes   uint64
	wantedFiles   uint32
	wantedTrace   *[lane.TraceBytes]byte
	untilReleased bool
}

func newSender(out *link.Outgoing, options Options) *Sender {
	out.Memory.Retain()
	if options.Traced {
		out.Lane.PermitTraced()
	}
	return &Sender{out: *out, spin: wait.New(options.Wait == Spin), reserved: -1,
		window: window.New(out.Lane, options.ResidentMax)}
}

func (s *Sender) enter() error {
	if err := s.guard.Enter(); err != nil {
		return err
	}
	if s.reserved >= 0 {
		s.leave()
		return fail.New(fail.ErrReserved, "space for a message of %d bytes is reserved: commit or abort it first",
			s.reserved)
	}
	return nil
}

func (s *Sender) leave() {
	if s.guard.Leave(wait.InUse) {
		s.tearDown()
	}
}

// Send copies a message into the lane. It waits for free space until the context ends; if it need not wait, it
// ignores the context. It allocates nothing unless it waits.
//
// Errors: the context's; an [EndError] with [ErrClosed] or [ErrPeerDied] once the receiver is gone (some earlier
// sends may have succeeded after its end; they count as unreleased); [ErrTooLarge]; [ErrCorrupt]: close the channel.
// After any error, nothing was sent.
//
// On a path channel the end of a receiver is reported once: send the message again, it goes to the next receiver.
// Also [ErrNoSpace] if the file system is full: nothing is damaged, try again.
func (s *Sender) Send(ctx context.Context, message []byte) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	return s.send(ctx, message, nil)
}

// SendTraced is as Send, for a receiver that reads [Message.Traceparent]: the text of the header traceparent of W3C
// Trace Context, which OpenTelemetry's propagator writes. A text that is not valid is as none, and without
// [Options.Traced] the message goes without it: the lack of a trace fails no message. It takes 40 bytes more of the
// lane.
func (s *Sender) SendTraced(ctx context.Context, message []byte, traceparent string) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	return s.send(ctx, message, s.traceOf(traceparent))
}

func (s *Sender) send(ctx context.Context, message []byte, trace *[lane.TraceBytes]byte) error {
	space, err := s.space(ctx, len(message), trace)
	if err != nil {
		return err
	}
	copy(space, message)
	s.commit(len(message))
	return nil
}

// traceOf returns the bytes of a traceparent that goes with a message; nil: none.
func (s *Sender) traceOf(traceparent string) *[lane.TraceBytes]byte {
	parsed, ok := calls.ParseTraceparent(traceparent)
	if !ok || !s.out.Lane.IsTraced() {
		return nil
	}
	return (*[lane.TraceBytes]byte)(&parsed)
}

// TrySend copies a message into the lane if there is space now, else it returns false. It never waits. Errors as
// Send.
func (s *Sender) TrySend(message []byte) (bool, error) {
	if err := s.enter(); err != nil {
		return false, err
	}
	defer s.leave()
	space, ok, err := s.trySpace(len(message), nil)
	if err != nil || !ok {
		return false, err
	}
	copy(space, message)
	s.commit(len(message))
	return true, nil
}

// SendBatch copies messages into the lane that become visible together. The sum of their sizes, each plus 8 and
// rounded up to a multiple of 8, is at most that of the largest message. Otherwise as Send.
func (s *Sender) SendBatch(ctx context.Context, messages ...[]byte) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	records := uint64(0)
	for _, message := range messages {
		records += lane.RecordBytes(uint64(len(message)))
	}
	for {
		if err := s.usable(); err != nil {
			return err
		}
		s.window.Follow(s.out.Lane, s.out.Memory, s.role)
		ok, err := s.out.Lane.TryBeginBatch(records)
		var unbacked *lane.Unbacked
		if errors.As(err, &unbacked) {
			if err := s.role.Back(s.out.Lane, s.out.Memory.Data, unbacked.Bytes); err != nil {
				return err
			}
			continue
		}
		if err != nil {
			return s.failed(err)
		}
		if ok {
			break
		}
		// Space for one message of this size is enough for the batch.
		if _, err := s.space(ctx, int(max(records, 8)-8), nil); err != nil {
			return err
		}
	}
	for _, message := range messages {
		space, _ := s.out.Lane.BatchMessage(uint64(len(message)))
		copy(space, message)
	}
	if s.out.Lane.CommitBatch() == lane.Ring {
		s.out.WakePeer()
	}
	return nil
}

// Reserve returns space for a message of up to this number of bytes, to be written in place and then committed or
// aborted. The receiver sees nothing before the commit. It waits as Send does, with the same errors. Until Commit or
// Abort only Close may be called, and the slice stays valid.
func (s *Sender) Reserve(ctx context.Context, bytes int) ([]byte, error) {
	if err := s.enter(); err != nil {
		return nil, err
	}
	defer s.leave()
	return s.reserve(ctx, bytes, nil)
}

// ReserveTraced is as Reserve, for a message with a traceparent: see SendTraced.
func (s *Sender) ReserveTraced(ctx context.Context, bytes int, traceparent string) ([]byte, error) {
	if err := s.enter(); err != nil {
		return nil, err
	}
	defer s.leave()
	return s.reserve(ctx, bytes, s.traceOf(traceparent))
}

func (s *Sender) reserve(ctx context.Context, bytes int, trace *[lane.TraceBytes]byte) ([]byte, error) {
	space, err := s.space(ctx, bytes, trace)
	if err != nil {
		return nil, err
	}
	s.out.Memory.Retain()
	s.reserved = bytes
	return space, nil
}

// Commit sends the first bytes of the reserved space as a message. It does not wait.
//
// Errors: [ErrNotReserved]; [ErrTooLarge] for more than was reserved, which stays reserved; [ErrClosedHandle], and
// nothing was sent.
func (s *Sender) Commit(bytes int) error {
	return s.finish(func() error {
		if bytes < 0 || bytes > s.reserved {
			return fail.New(fail.ErrTooLarge, "%d bytes are to be committed, %d are reserved", bytes, s.reserved)
		}
		s.commit(bytes)
		return nil
	})
}

// Abort drops the reservation. It does not wait. Errors: [ErrNotReserved], [ErrClosedHandle].
func (s *Sender) Abort() error { return s.finish(func() error { return nil }) }

// finish ends a reservation, even if the handle was closed meanwhile.
func (s *Sender) finish(do func() error) error {
	err := s.guard.Enter()
	if err == nil {
		defer s.leave()
	} else if !errors.Is(err, ErrClosedHandle) {
		return err
	}
	if s.reserved < 0 {
		if err != nil {
			return err
		}
		return fail.New(fail.ErrNotReserved, "nothing is reserved: Reserve comes first")
	}
	if err == nil {
		if err = do(); err != nil {
			return err
		}
	}
	s.reserved = -1
	s.out.Memory.Release()
	return err
}

// space waits for free space, for a message with this position in a trace, or nil.
func (s *Sender) space(ctx context.Context, bytes int, trace *[lane.TraceBytes]byte) ([]byte, error) {
	for {
		space, ok, err := s.trySpace(bytes, trace)
		if ok || err != nil {
			return space, err
		}
		s.out.Lane.CountWait()
		s.wantedBytes, s.wantedFiles, s.wantedTrace, s.untilReleased = uint64(bytes), 0, trace, false
		if err := wait.For(ctx, (*sendWait)(s), s.out.Doorbell, &s.spin, &s.guard); err != nil {
			return nil, err
		}
	}
}

func (s *Sender) trySpace(bytes int, trace *[lane.TraceBytes]byte) ([]byte, bool, error) {
	if bytes < 0 {
		return nil, false, fail.New(fail.ErrOption, "a message of %d bytes is wanted, at least 0 are possible", bytes)
	}
	if s.broken != nil || s.out.Link.IsPeerGone() || s.role != nil && s.out.Lane.Tail().Seq%256 == 0 {
		if uint64(bytes) > s.out.Lane.BytesMax() {
			return nil, false, fail.Lane(&lane.TooLarge{Bytes: uint64(bytes), BytesMax: s.out.Lane.BytesMax()})
		}
		if err := s.usable(); err != nil {
			return nil, false, err
		}
	}
	space, ok, err := s.tryReserve(uint64(bytes), trace)
	if err == nil && !ok && s.role != nil {
		err = s.usable()
	}
	return space, ok, err
}

// tryReserve reserves space, and allocates memory for it where that is needed.
func (s *Sender) tryReserve(bytes uint64, trace *[lane.TraceBytes]byte) (space []byte, ok bool, err error) {
	s.window.Follow(s.out.Lane, s.out.Memory, s.role)
	for {
		if trace == nil {
			space, ok, err = s.out.Lane.TryReserve(bytes, 0)
		} else {
			space, ok, err = s.out.Lane.TryReserveTraced(bytes, trace)
		}
		if err == nil {
			return space, ok, nil
		}
		var unbacked *lane.Unbacked
		if !errors.As(err, &unbacked) {
			return nil, false, s.failed(err)
		}
		if err := s.role.Back(s.out.Lane, s.out.Memory.Data, unbacked.Bytes); err != nil {
			return nil, false, err
		}
	}
}

func (s *Sender) commit(bytes int) {
	if s.out.Lane.Commit(uint64(bytes)) == lane.Ring {
		s.out.WakePeer()
		s.window.FollowPause(s.out.Lane, s.out.Memory, s.role)
	}
}

// usable returns why the handle is not usable.
func (s *Sender) usable() error {
	if s.broken == nil {
		hasGone, err := s.hasGone()
		if err != nil || !hasGone {
			return err
		}
		s.end()
	}
	if isCorrupt(s.broken) {
		return s.broken
	}
	ended := &EndError{s.broken, s.unreleased()}
	if s.role != nil {
		s.forgetReceiver()
	}
	return ended
}

// hasGone reports whether the receiver is gone. On a path channel it also detects a new one.
func (s *Sender) hasGone() (bool, error) {
	if s.role == nil {
		return s.out.Link.IsGone.Load(), nil
	}
	passed, err := s.findReceiver()
	return passed || s.out.Link.IsPeerGone() || s.out.Link.Path.Liveness != nil && s.out.Lane.HasNewlyClosed(), err
}

// end records that the receiver is gone.
func (s *Sender) end() {
	code := ErrPeerDied
	if s.out.Lane.ConsumerClosed() {
		code = ErrClosed
	}
	s.broken = code
}

func (s *Sender) failed(err error) error {
	if errors.Is(err, lane.ErrConsumerClosed) {
		s.end()
		return s.usable()
	}
	found := fail.Lane(err)
	if isCorrupt(found) {
		s.broken = found
	}
	return found
}

func (s *Sender) unreleased() uint64 {
	// The next send reports an invalid head; here the last known number is the best one.
	_, _ = s.out.Lane.PollHead()
	s.forgetSentFiles()
	return s.out.Lane.Unreleased()
}

// Unreleased returns the number of messages that were committed and not released. It returns 0 for a closed handle,
// and during a call of another goroutine.
func (s *Sender) Unreleased() uint64 {
	if s.guard.Enter() != nil {
		return 0
	}
	defer s.leave()
	return s.unreleased()
}

// Counters are the statistics of a [Sender] or a [Receiver] since its channel was created: messages and bytes of
// payload that it sent or released, waits, sleeps and wake-ups of the other side. They only grow.
type Counters = lane.Counters

// Counters returns the statistics of this side. It does not wait. It returns false for a closed handle, and during a
// call of another goroutine: the goroutine that uses the handle can note them for others.
func (s *Sender) Counters() (Counters, bool) {
	if s.guard.Enter() != nil {
		return Counters{}, false
	}
	defer s.leave()
	return s.out.Lane.Counters(), true
}

// WaitReleased waits until the receiver has released every message; on a path channel without a receiver, until the
// next one has. Errors as Send.
func (s *Sender) WaitReleased(ctx context.Context) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	if !isCorrupt(s.broken) && s.unreleased() == 0 {
		return nil
	}
	if err := s.usable(); err != nil {
		return err
	}
	s.untilReleased = true
	return wait.For(ctx, (*sendWait)(s), s.out.Doorbell, &s.spin, &s.guard)
}

// sendWait is a sender that waits for space, or until all is released.
type sendWait Sender

func (w *sendWait) Poll() (bool, error) {
	s := (*Sender)(w)
	if s.broken == nil {
		hasGone, err := s.hasGone()
		if err != nil {
			return false, err
		}
		if hasGone || s.role == nil && s.out.Lane.ConsumerClosed() {
			s.end()
		}
	}
	if s.broken != nil {
		if s.untilReleased && !isCorrupt(s.broken) && s.unreleased() == 0 {
			return true, nil
		}
		return false, s.usable()
	}
	if s.untilReleased {
		waiting, err := s.out.Lane.PollHead()
		if err != nil {
			return false, s.failed(err)
		}
		return waiting == 0, nil
	}
	if s.wantedFiles > 0 {
		_, ok, err := s.tryReserveWithFiles(s.wantedBytes, s.wantedFiles)
		return ok, err
	}
	_, ok, err := s.tryReserve(s.wantedBytes, s.wantedTrace)
	return ok, err
}

func (w *sendWait) MayBeReady() bool { return w.out.Lane.MayBeReady() }

func (w *sendWait) Arm() (bool, error) {
	s := (*Sender)(w)
	sleeps, err := s.out.Lane.Arm(s.wantedBytes, s.untilReleased, kernel.Membarrier)
	if errors.Is(err, lane.ErrConsumerClosed) {
		// Perhaps everything was released before: the next poll finds out.
		return false, nil
	}
	if err != nil {
		return false, s.failed(err)
	}
	if sleeps {
		hasGone, err := s.hasGone()
		if hasGone || err != nil {
			s.out.Lane.Disarm()
			// Only this poll detects a receiver that came and went. The next one reports it.
			if hasGone {
				s.end()
			}
			return false, err
		}
	}
	return sleeps, nil
}

func (w *sendWait) Disarm() { w.out.Lane.Disarm() }

func (w *sendWait) NeedsTimedWait() bool { return w.out.Lane.NeedsTimedWait() }

func (w *sendWait) PeerPID() int { return w.out.Link.Peer.PID }

func (w *sendWait) LastRing() lane.LastRing { return w.out.Lane.LastRing() }

// Resume waits, after [ErrPeerDied], for the receiver's successor, and offers it the lane with everything unreleased:
// redelivery begins with the oldest such message. A sender that had connected connects again. One from a [Listener]
// accepts the successor there, so keep that open. On a path channel it waits for a receiver, which sending does not
// need.
//
// Errors: the context's; [ErrRefused] if the receiver is not gone (except on a path channel); [ErrCorrupt],
// [ErrSystem]. After an error it may be called again.
func (s *Sender) Resume(ctx context.Context) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	if s.role != nil {
		return s.waitForReceiver(ctx)
	}
	if s.usable() == nil {
		return fail.New(fail.ErrRefused, "the receiver is alive: there is nobody to succeed it")
	}
	if isCorrupt(s.broken) {
		return s.broken
	}
	if _, err := s.out.Lane.PollHead(); err != nil {
		return s.failed(err)
	}
	if err := s.reconnect.resume(ctx, &s.guard, func(shake *handshake.Handshake, listens bool) error {
		return shake.SurvivingSender(&s.out, listens)
	}); err != nil {
		return err
	}
	s.broken = nil
	return s.resendFiles(ctx)
}

// Trim releases memory without messages to the system: after a burst the lane keeps what it grew to. It does not
// wait, and the lane stays in use. Errors: [ErrReserved], [ErrSystem].
func (s *Sender) Trim() error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	s.unreleased()
	s.window.Shrink()
	s.out.Lane.SetWindow(s.window.Bytes)
	return window.ReleaseIdle(s.out.Lane, s.out.Memory, 0, s.role != nil)
}

// Capacity returns the size of the lane in bytes.
func (s *Sender) Capacity() int { return int(s.out.Lane.Capacity()) }

// MessageBytesMax returns the largest message in bytes.
func (s *Sender) MessageBytesMax() int { return int(s.out.Lane.BytesMax()) }

// Peer returns the process that receives.
func (s *Sender) Peer() Peer { return s.out.Link.Peer }

// Close ends the channel: the receiver gets everything that was sent, and then [ErrClosed]. It does not wait; see
// WaitReleased. Another goroutine's call ends with [ErrClosedHandle]. Closing twice does nothing.
func (s *Sender) Close() error {
	s.guard.CloseHandle(s.tearDown, func() {
		s.out.Doorbell.Wake()
		if sending := s.sending.Load(); sending != nil {
			sending.InterruptSend()
		}
	})
	return nil
}

func (s *Sender) tearDown() {
	s.window.Close()
	s.out.Lane.Close()
	// The state first, then the ring, last the hang-up: a receiver that detects a later one finds the earlier ones.
	s.out.Link.Ring()
	s.out.Link.Close()
	if s.role != nil {
		s.role.Close()
	}
	s.out.Doorbell.Close()
	s.out.Memory.Release()
	closeSentFiles(s.sent)
}

// NewWriter returns an io.Writer that sends the bytes of each Write as one message, or as several if there are more
// than the largest message has. It waits until the context ends. Errors as Send.
func (s *Sender) NewWriter(ctx context.Context) io.Writer { return &writer{ctx, s} }

type writer struct {
	ctx    context.Context
	sender *Sender
}

func (w *writer) Write(bytes []byte) (written int, err error) {
	most := w.sender.MessageBytesMax()
	for {
		n := min(len(bytes)-written, most)
		if err := w.sender.Send(w.ctx, bytes[written:written+n]); err != nil {
			return written, err
		}
		if written += n; written == len(bytes) {
			return written, nil
		}
	}
}
