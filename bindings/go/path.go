package pelton

import (
	"context"
	"errors"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/directory"
	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/link"
	"github.com/pelton-ipc/pelton/bindings/go/internal/wait"
	"golang.org/x/sys/unix"
)

// openChannel opens the directory, or creates it, or waits until it exists.
func openChannel(ctx context.Context, path string, o *Options, create bool) (*directory.Directory, error) {
	if create {
		makes, err := o.pathMakes()
		if err != nil {
			return nil, err
		}
		return directory.Create(path, o.access(), makes, o.Lanes, o.Traced)
	}
	return awaitDirectory(ctx, path, o, directory.Open)
}

// awaitDirectory opens the directory, or waits until it exists.
func awaitDirectory(ctx context.Context, path string, o *Options,
	open func(string, directory.Access) (*directory.Directory, error)) (*directory.Directory, error) {
	for {
		d, err := open(path, o.access())
		if d != nil || err != nil {
			return d, err
		}
		if !o.Await {
			return nil, (&directory.Directory{Path: path}).NoChannel()
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(retryInterval):
		}
	}
}

// CreateSender creates the path channel at a directory, or opens an existing one with the sizes that it was created
// with, as a sender. It continues after the last message that its predecessor committed. It needs no receiver.
//
// It waits while as many senders as the channel has lanes are alive: for 200 ms, because a killed process keeps its
// role until the kernel has ended it, and with [Options.Await] until the context ends.
//
// Errors: [ErrRoleTaken] after that wait, together with the context's if that ended; [ErrNotAChannel] if something
// else is there, or a check fails; [ErrNoSpace], [ErrRebooted]; [ErrCorrupt]: `pelton recover`; [ErrOption],
// [ErrSystem]; the context's.
func CreateSender(ctx context.Context, directory string, options *Options) (*Sender, error) {
	return pathSender(ctx, directory, options, true)
}

// OpenSender does not create a channel. Otherwise as CreateSender. Errors: also [ErrNoChannel].
func OpenSender(ctx context.Context, directory string, options *Options) (*Sender, error) {
	return pathSender(ctx, directory, options, false)
}

func pathSender(ctx context.Context, path string, options *Options, create bool) (*Sender, error) {
	o := options.orDefault()
	for {
		d, err := openChannel(ctx, path, &o, create)
		if err != nil {
			return nil, err
		}
		out, role, err := d.OpenSender(ctx, o.Await)
		// Removed meanwhile: there may be another by now.
		if errors.Is(err, ErrNoChannel) && (create || o.Await) {
			continue
		}
		if err != nil {
			return nil, err
		}
		// The channel's creator has decided that.
		o.Traced = d.IsTraced()
		s := newSender(out, o)
		s.role = role
		// The end of an earlier receiver is not reported.
		_, err = s.findReceiver()
		s.out.Link.Ring()
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

// findReceiver checks for a receiver. It returns true if one has come and gone meanwhile.
func (s *Sender) findReceiver() (bool, error) {
	what, err := s.out.Link.Find()
	if what == link.FoundPeer {
		if s.out.Lane.ConsumerClosed() {
			// Its liveness file outlives it for a moment, for example in a child on its way to exec.
			s.out.Link.Path.Lose()
			return true, nil
		}
		// From now on its close is reported.
		s.out.Lane.ContinueAlone()
	}
	return what == link.FoundPassed, err
}

// forgetReceiver continues without the receiver, whose end was reported. The next one may have come already.
func (s *Sender) forgetReceiver() {
	s.out.Link.Path.Lose()
	s.out.Lane.ContinueAlone()
	s.broken = nil
	for range link.PassedMax {
		if passed, err := s.findReceiver(); err != nil || !passed {
			break
		}
	}
}

func (s *Sender) waitForReceiver(ctx context.Context) error {
	return wait.Until(ctx, s.out.Doorbell, &s.guard, func() (bool, error) {
		if isCorrupt(s.broken) {
			return false, s.broken
		}
		hasGone, err := s.hasGone()
		if hasGone || s.broken != nil {
			s.forgetReceiver()
		}
		return s.out.Link.Path.Liveness != nil, err
	})
}

// Sync writes everything sent so far to the disk under a path channel, and waits for that. It survives a power
// failure, unless the receiver had released it. A crash of processes needs no Sync.
//
// Errors: [ErrRefused] if it is not a path channel; [ErrSystem].
func (s *Sender) Sync() error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	if s.role == nil {
		return fail.New(fail.ErrRefused, "only a path channel has a disk under it: see CreateSender")
	}
	tail := s.out.Lane.Tail()
	// Once that there is a channel; then the messages; then the positions.
	if !s.role.IsSynced {
		if err := s.role.Directory.Sync(); err != nil {
			return err
		}
		s.role.IsSynced = true
	}
	if err := unix.Fdatasync(s.out.Memory.Data.FD); err != nil {
		return fail.System("syncing the lane", err)
	}
	s.out.Lane.NoteSynced(tail)
	return fail.System("syncing the lane's pages", errors.Join(unix.Fdatasync(s.out.Memory.Producer.FD),
		unix.Fdatasync(s.out.Memory.Consumer.FD)))
}

// CreateReceiver creates the path channel at a directory, or opens an existing one, as its receiver. It begins with
// the oldest message that its predecessor had not released: see [Message.Redelivered]. It needs no sender. Its lanes
// are served round-robin, as those of [Gather]. When the last sender is gone and everything is received, Receive
// reports that once, and then waits for the next sender.
//
// It waits while another receiver is alive, as CreateSender does. Errors: as CreateSender.
func CreateReceiver(ctx context.Context, directory string, options *Options) (*Receiver, error) {
	return pathReceiver(ctx, directory, options, true)
}

// OpenReceiver does not create a channel. Otherwise as CreateReceiver. Errors: also [ErrNoChannel].
func OpenReceiver(ctx context.Context, directory string, options *Options) (*Receiver, error) {
	return pathReceiver(ctx, directory, options, false)
}

func pathReceiver(ctx context.Context, path string, options *Options, create bool) (*Receiver, error) {
	o := options.orDefault()
	if _, err := o.forReceiver(0); err != nil {
		return nil, err
	}
	for {
		d, err := openChannel(ctx, path, &o, create)
		if err != nil {
			return nil, err
		}
		if err := d.CheckSize(o.pathTakes(d.IsOwnUser()), uint64(o.Memory)); err != nil {
			d.Close()
			return nil, err
		}
		canBarrier := kernel.Membarrier()
		page, ownDoorbell, role, err := d.OpenReceiver(ctx, o.Await)
		if errors.Is(err, ErrNoChannel) && (create || o.Await) {
			continue
		}
		if err != nil {
			return nil, err
		}
		// Before any lane is marked open: a predecessor that closed has marked this page too. [close]
		r := newReceiver(canBarrier, page, ownDoorbell, o)
		r.role = role
		if err := r.findSenders(); err != nil {
			_ = r.Close()
			return nil, err
		}
		// With messages in the channel it needs no sender.
		if o.Await {
			if err := r.waitForSender(ctx); err != nil {
				_ = r.Close()
				return nil, err
			}
		}
		return r, nil
	}
}

// openLane takes over the next lane, and finds its sender.
func (r *Receiver) openLane(number int) error {
	of, err := r.role.Directory.OpenLane(number, r.page, r.doorbell)
	if err != nil {
		return err
	}
	r.role.Keep(of.Memory)
	in := &inLane{Incoming: *of, number: uint32(number) + 1}
	// Kept even if its sender cannot be found now: opened again it would appear as another receiver's.
	r.lanes = append(r.lanes, in)
	err = in.findSender()
	// The end of an earlier sender that left no message is not reported.
	if !in.Consumer.MayBeReady() {
		in.end = nil
	}
	in.Link.Ring()
	return err
}

// findSenders checks for new senders of its lanes, and for new lanes.
func (r *Receiver) findSenders() error {
	for _, in := range r.lanes {
		if err := in.findSender(); err != nil {
			return err
		}
	}
	lanes, err := r.role.Directory.Lanes()
	for err == nil && len(r.lanes) < lanes {
		err = r.openLane(len(r.lanes))
	}
	return err
}

func (in *inLane) findSender() error {
	for range link.PassedMax + 1 {
		what, err := in.Link.Find()
		switch {
		case err != nil || what == link.FoundNothing:
			return err
		// Its liveness file outlives it for a moment, for example in a child on its way to exec.
		case what == link.FoundPeer && !in.Consumer.ProducerClosed():
			in.end = nil
			return nil
		}
		// Its successor may have come.
		in.noteEnd()
	}
	// To be polled again, after the other lanes.
	in.Link.Wake()
	return nil
}

func (in *inLane) noteEnd() {
	in.end = ErrPeerDied
	if in.Consumer.ProducerClosed() {
		in.end = ErrClosed
	}
	in.Link.Path.Lose()
}

func (in *inLane) isSenderHere() bool { return in.end == nil && in.Link.Path.Liveness != nil }

// pollEnds is called when no message is there. It detects the end of all senders, which is reported once.
func (r *Receiver) pollEnds() (bool, error) {
	before := len(r.lanes)
	if err := r.findSenders(); err != nil {
		return false, err
	}
	for _, in := range r.lanes {
		if in.isSenderHere() && (in.Link.IsPeerGone() || in.Consumer.ProducerClosed()) {
			in.noteEnd()
		}
	}
	code := r.foundEnd()
	if code == nil && len(r.lanes) == before {
		return false, nil
	}
	// What was committed before the end is visible now. [close]
	if ok, err := r.pollLanes(); ok || err != nil || code == nil || r.defersEnd() {
		return ok, err
	}
	for _, in := range r.lanes {
		in.end = nil
	}
	return false, &EndError{code, r.unreleased()}
}

// foundEnd returns how the senders ended, if none is here and the end of some has not been reported.
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

// waitForSender waits for a sender, or for messages of one that has left again. The caller receives those, then the
// end.
func (r *Receiver) waitForSender(ctx context.Context) error {
	return wait.Until(ctx, r.doorbell, &r.guard, func() (bool, error) {
		if r.broken != nil {
			return false, r.broken
		}
		if err := r.findSenders(); err != nil {
			return false, err
		}
		isReady := false
		for _, in := range r.lanes {
			if in.isSenderHere() {
				if !in.Link.IsPeerGone() && !in.Consumer.ProducerClosed() {
					isReady = true
					continue
				}
				in.noteEnd()
			}
			// What was committed before the end is visible now. [close]
			if in.Consumer.MayBeReady() {
				isReady = true
			} else {
				// A caller that waits for the next sender ignores the end of the last.
				in.end = nil
			}
		}
		return isReady, nil
	})
}

// Sync writes what was released so far to the disk under a path channel, so that it is not redelivered even after a
// power failure. It waits for the disk.
//
// Errors: [ErrRefused] if it is not a path channel; [ErrSystem].
func (r *Receiver) Sync() error {
	if err := r.guard.Enter(); err != nil {
		return err
	}
	defer r.leave()
	if r.role == nil {
		return fail.New(fail.ErrRefused, "only a path channel has a disk under it: see CreateReceiver")
	}
	for _, in := range r.lanes {
		if err := unix.Fdatasync(in.Memory.Consumer.FD); err != nil {
			return fail.System("syncing a consumer's page", err)
		}
	}
	return nil
}
