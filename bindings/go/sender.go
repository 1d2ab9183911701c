package pelton

import (
	"context"
	"errors"
	"io"

	"pelton/internal/directory"
	"pelton/internal/fail"
	"pelton/internal/handshake"
	"pelton/internal/kernel"
	"pelton/internal/lane"
	"pelton/internal/link"
	"pelton/internal/wait"
	"pelton/internal/window"
)

// Sender is the sending end of a channel. One goroutine at a time uses it; Close may be called by any, also during a call.
type Sender struct {
	link.Outgoing
	guard     wait.Guard
	spin      wait.Spin
	reconnect reconnect
	// Of a path channel: the role. Then the receiver's end is told once, and sending goes on.
	role *directory.Role
	// Why the handle cannot be used any more: the receiver has gone, or has broken the rules.
	broken error
	// Bytes reserved, and not committed yet; -1 when nothing is.
	reserved int
	window   window.Window
	// What a wait is for.
	wantedBytes   uint64
	untilReleased bool
}

func newSender(out *link.Outgoing, options Options) *Sender {
	out.Memory.Retain()
	return &Sender{Outgoing: *out, spin: wait.Spin{IsBusy: options.Wait == Spin}, reserved: -1, window: window.New(out.Lane, options.ResidentMax)}
}

func (s *Sender) enter() error {
	if err := s.guard.Enter(); err != nil {
		return err
	}
	if s.reserved >= 0 {
		s.leave()
		return fail.New(fail.ErrReserved, "room for a message of %d bytes is reserved: commit or abort it first", s.reserved)
	}
	return nil
}

func (s *Sender) leave() {
	if s.guard.Leave(wait.InUse) {
		s.tearDown()
	}
}

// Send copies a message into the lane. It waits for room, until the context ends; one that needs no wait does not look at the
// context.
//
// Errors: the context's; [ErrClosed] and [ErrPeerDied] once the receiver has gone, with the number of messages that it has not
// released (some sends may still succeed after that, which count as unreleased); [ErrTooLarge]; [ErrCorrupt]: close the channel.
// With any error nothing was sent. It allocates nothing unless it waits.
//
// On a path channel the end of a receiver is told once: send the message again, it goes to the next one. Also [ErrNoSpace], when its file
// system is full: nothing is damaged, and it can be tried again.
func (s *Sender) Send(ctx context.Context, message []byte) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	room, err := s.room(ctx, len(message))
	if err != nil {
		return err
	}
	copy(room, message)
	s.commit(len(message))
	return nil
}

// TrySend copies a message into the lane if there is room now; false if not. It never waits. Errors as Send.
func (s *Sender) TrySend(message []byte) (bool, error) {
	if err := s.enter(); err != nil {
		return false, err
	}
	defer s.leave()
	room, ok, err := s.tryRoom(len(message))
	if err != nil || !ok {
		return false, err
	}
	copy(room, message)
	s.commit(len(message))
	return true, nil
}

// SendBatch copies messages into the lane that are all seen at once, or not at all: the sum of what they take, 8 bytes each and
// rounded up to multiples of 8, is at most what the largest message takes. Otherwise as Send.
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
		s.window.Follow(s.Lane, s.Memory, s.role)
		ok, err := s.Lane.TryBeginBatch(records)
		var unbacked *lane.Unbacked
		if errors.As(err, &unbacked) {
			if err := s.role.Back(s.Lane, s.Memory, unbacked.Bytes); err != nil {
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
		// Room for one message of this size is room for the batch.
		if _, err := s.room(ctx, int(max(records, 8)-8)); err != nil {
			return err
		}
	}
	for _, message := range messages {
		room, _ := s.Lane.BatchMessage(uint64(len(message)))
		copy(room, message)
	}
	if s.Lane.CommitBatch() == lane.Ring {
		s.Link.Ring()
	}
	return nil
}

// Reserve makes room for a message of up to so many bytes, to be written in place and committed, or aborted. Nothing is seen of it
// before. It waits as Send does, with the same errors. Until Commit or Abort nothing else can be done with the sender but Close, and
// the slice stays valid until then.
func (s *Sender) Reserve(ctx context.Context, bytes int) ([]byte, error) {
	if err := s.enter(); err != nil {
		return nil, err
	}
	defer s.leave()
	room, err := s.room(ctx, bytes)
	if err != nil {
		return nil, err
	}
	s.Memory.Retain()
	s.reserved = bytes
	return room, nil
}

// Commit publishes the first bytes of the reserved room as a message. It does not wait.
//
// Errors: [ErrNotReserved]; [ErrTooLarge], of more than was reserved, which stays reserved; [ErrClosedHandle], and nothing was sent.
func (s *Sender) Commit(bytes int) error {
	return s.finish(func() error {
		if bytes < 0 || bytes > s.reserved {
			return fail.New(fail.ErrTooLarge, "%d bytes are to be committed, %d are reserved", bytes, s.reserved)
		}
		s.commit(bytes)
		return nil
	})
}

// Abort gives the reserved room back. Errors: [ErrNotReserved], [ErrClosedHandle].
func (s *Sender) Abort() error { return s.finish(func() error { return nil }) }

// finish ends a reservation, also one of a handle that has been closed.
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
	s.Memory.Release()
	return err
}

// room waits for room.
func (s *Sender) room(ctx context.Context, bytes int) ([]byte, error) {
	for {
		room, ok, err := s.tryRoom(bytes)
		if ok || err != nil {
			return room, err
		}
		s.Lane.CountWait()
		s.wantedBytes, s.untilReleased = uint64(bytes), false
		if err := wait.For(ctx, (*sendWait)(s), s.Bell, &s.spin, &s.guard); err != nil {
			return nil, err
		}
	}
}

func (s *Sender) tryRoom(bytes int) ([]byte, bool, error) {
	if bytes < 0 {
		return nil, false, fail.New(fail.ErrOption, "a message of %d bytes is wanted, at least 0 are possible", bytes)
	}
	if s.broken != nil || s.Link.IsPeerGone() || s.role != nil && s.Lane.Tail().Seq%256 == 0 {
		if uint64(bytes) > s.Lane.BytesMax() {
			return nil, false, fail.Lane(&lane.TooLarge{Bytes: uint64(bytes), BytesMax: s.Lane.BytesMax()})
		}
		if err := s.usable(); err != nil {
			return nil, false, err
		}
	}
	room, ok, err := s.tryReserve(uint64(bytes))
	if err == nil && !ok && s.role != nil {
		err = s.usable()
	}
	return room, ok, err
}

// tryReserve asks the lane for room, and puts memory behind it where that is wanting.
func (s *Sender) tryReserve(bytes uint64) ([]byte, bool, error) {
	s.window.Follow(s.Lane, s.Memory, s.role)
	for {
		room, ok, err := s.Lane.TryReserve(bytes, 0)
		if err == nil {
			return room, ok, nil
		}
		var unbacked *lane.Unbacked
		if !errors.As(err, &unbacked) {
			return nil, false, s.failed(err)
		}
		if err := s.role.Back(s.Lane, s.Memory, unbacked.Bytes); err != nil {
			return nil, false, err
		}
	}
}

func (s *Sender) commit(bytes int) {
	if s.Lane.Commit(uint64(bytes)) == lane.Ring {
		s.Link.Ring()
		s.window.FollowPause(s.Lane, s.Memory, s.role)
	}
}

// usable says why the handle is not.
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
	told := &EndError{s.broken, s.unreleased()}
	if s.role != nil {
		s.forgetReceiver()
	}
	return told
}

// hasGone says whether the receiver has; of a path channel's this looks for one that has come.
func (s *Sender) hasGone() (bool, error) {
	if s.role == nil {
		return s.Link.IsGone.Load(), nil
	}
	passed, err := s.findReceiver()
	return passed || s.Link.IsPeerGone() || s.Link.Path.Liveness != nil && s.Lane.HasNewlyClosed(), err
}

// end notes that the receiver has gone.
func (s *Sender) end() {
	code := ErrPeerDied
	if s.Lane.ConsumerClosed() {
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
	// A lie there is told by the next send; here the last known figure is the best there is.
	_, _ = s.Lane.PollHead()
	return s.Lane.Unreleased()
}

// Unreleased is how many messages were committed that the receiver has not released. 0 of a closed handle, and during a call of
// another goroutine.
func (s *Sender) Unreleased() uint64 {
	if s.guard.Enter() != nil {
		return 0
	}
	defer s.leave()
	return s.unreleased()
}

// Drain waits until the receiver has released every message; of a path channel that has none, until the next one has. Errors as Send.
func (s *Sender) Drain(ctx context.Context) error {
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
	return wait.For(ctx, (*sendWait)(s), s.Bell, &s.spin, &s.guard)
}

// sendWait is a sender that waits for room, or until all is released.
type sendWait Sender

func (w *sendWait) Poll() (bool, error) {
	s := (*Sender)(w)
	if s.broken == nil {
		hasGone, err := s.hasGone()
		if err != nil {
			return false, err
		}
		if hasGone || s.role == nil && s.Lane.ConsumerClosed() {
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
		waiting, err := s.Lane.PollHead()
		if err != nil {
			return false, s.failed(err)
		}
		return waiting == 0, nil
	}
	_, ok, err := s.tryReserve(s.wantedBytes)
	return ok, err
}

func (w *sendWait) MayBeReady() bool { return w.Lane.MayBeReady() }

func (w *sendWait) Arm() (bool, error) {
	s := (*Sender)(w)
	sleeps, err := s.Lane.Arm(s.wantedBytes, s.untilReleased, kernel.Membarrier)
	if errors.Is(err, lane.ErrConsumerClosed) {
		// Perhaps not before everything was released: the look that follows says.
		return false, nil
	}
	if err != nil {
		return false, s.failed(err)
	}
	if sleeps {
		hasGone, err := s.hasGone()
		if hasGone || err != nil {
			s.Lane.Disarm()
			// Of a receiver that came and went unseen this is the only look that finds it; what follows is said there.
			if hasGone {
				s.end()
			}
			return false, err
		}
	}
	return sleeps, nil
}

func (w *sendWait) Disarm() { w.Lane.Disarm() }

func (w *sendWait) NeedsTimedWait() bool { return w.Lane.NeedsTimedWait() }

// Resume waits, after [ErrPeerDied], for the receiver's successor and offers it the lane with everything unreleased: it is delivered
// again from the oldest such message on. A sender that had connected connects under the name again; one that a [Listener] accepted
// accepts the successor there, so keep that open. Of a path channel it waits until a receiver is there, which sending does not need.
//
// Errors: the context's; [ErrRefused] when the channel has not lost its receiver (not of a path); [ErrCorrupt], [ErrSystem]. After an error it can be
// tried again.
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
	if _, err := s.Lane.PollHead(); err != nil {
		return s.failed(err)
	}
	if err := s.reconnect.resume(ctx, func(shake *handshake.Handshake, listens bool) error {
		return shake.SurvivingSender(&s.Outgoing, listens)
	}); err != nil {
		return err
	}
	s.broken = nil
	return nil
}

// Trim gives memory that holds no message back to the system: after a burst the lane keeps what it grew to until this. The lane
// stays in use.
func (s *Sender) Trim() error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	s.unreleased()
	s.window.Shrink()
	s.Lane.SetWindow(s.window.Bytes)
	return window.ReleaseIdle(s.Lane, s.Memory, 0, s.role != nil)
}

// Capacity is the bytes of the lane.
func (s *Sender) Capacity() int { return int(s.Lane.Capacity()) }

// MessageBytesMax is the largest message, in bytes.
func (s *Sender) MessageBytesMax() int { return int(s.Lane.BytesMax()) }

// Peer is who receives.
func (s *Sender) Peer() kernel.Peer { return s.Link.Peer }

// Close says that no more will come: the receiver reads everything sent, and is then told [ErrClosed]. It does not wait, see Drain. A
// call of another goroutine ends with [ErrClosedHandle]. Closing twice does nothing.
func (s *Sender) Close() error {
	alone, again := s.guard.Close()
	switch {
	case again:
	case alone:
		s.tearDown()
	default:
		s.Bell.Wake()
	}
	return nil
}

func (s *Sender) tearDown() {
	s.window.Close()
	s.Lane.Close()
	// The word first, the ring next, the hang-up last: whoever hears one of the later finds the earlier.
	s.Link.Ring()
	s.Link.Close()
	if s.role != nil {
		s.role.Close()
	}
	s.Bell.Close()
	s.Memory.Release()
}

// NewWriter is an io.Writer that sends what it is given each time as one message, or, if it is more than the largest, as several.
// Waiting ends with the context.
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
