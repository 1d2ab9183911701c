package pelton

import (
	"context"
	"errors"
	"time"

	"golang.org/x/sys/unix"
	"pelton/internal/directory"
	"pelton/internal/fail"
	"pelton/internal/kernel"
	"pelton/internal/link"
	"pelton/internal/wait"
)

// openChannel opens the directory, or makes it, or waits until it is there.
func openChannel(ctx context.Context, path string, o *Options, make bool) (*directory.Directory, error) {
	if make {
		makes, err := o.pathMakes()
		if err != nil {
			return nil, err
		}
		return directory.Create(path, o.access(), makes, o.Lanes)
	}
	for {
		d, err := directory.Open(path, o.access())
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
		out, role, err := d.OpenSender(ctx, o.Await)
		// Removed meanwhile: there may be another by now.
		if errors.Is(err, ErrNoChannel) && (make || o.Await) {
			continue
		}
		if err != nil {
			return nil, err
		}
		s := newSender(out, o)
		s.role = role
		// Who went before is no news.
		_, err = s.findReceiver()
		s.Link.Ring()
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

// findReceiver looks for the receiver of a path channel that has none. True: one has come and gone meanwhile.
func (s *Sender) findReceiver() (bool, error) {
	what, err := s.Link.Find()
	if what == link.FoundPeer {
		if s.Lane.ConsumerClosed() {
			// Its life outlives it for a moment, in a child on its way to exec for instance.
			s.Link.Path.Lose()
			return true, nil
		}
		// Its close, from now on, is news.
		s.Lane.ContinueAlone()
	}
	return what == link.FoundPassed, err
}

// goOnAlone: the end of the receiver has been told. The lane is there for the next one, who may have come already.
func (s *Sender) forgetReceiver() {
	s.Link.Path.Lose()
	s.Lane.ContinueAlone()
	s.broken = nil
	for range link.PassedMax {
		if passed, err := s.findReceiver(); err != nil || !passed {
			break
		}
	}
}

func (s *Sender) waitForReceiver(ctx context.Context) error {
	return wait.Until(ctx, s.Bell, &s.guard, func() (bool, error) {
		if isCorrupt(s.broken) {
			return false, s.broken
		}
		hasGone, err := s.hasGone()
		if hasGone || s.broken != nil {
			s.forgetReceiver()
		}
		return s.Link.Path.Liveness != nil, err
	})
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
	if s.role == nil {
		return fail.New(fail.ErrRefused, "only a path channel has a disk under it: see CreateSender")
	}
	tail := s.Lane.Tail()
	// That there is a channel, once; then the messages, then that they are there, and what was released.
	if !s.role.IsSynced {
		if err := s.role.Directory.Sync(); err != nil {
			return err
		}
		s.role.IsSynced = true
	}
	if err := unix.Fdatasync(s.Memory.Data.FD); err != nil {
		return fail.System("syncing the lane", err)
	}
	s.Lane.NoteSynced(tail)
	return fail.System("syncing the lane's pages", errors.Join(unix.Fdatasync(s.Memory.Producer.FD), unix.Fdatasync(s.Memory.Consumer.FD)))
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
		if err := d.CheckSize(o.pathTakes(d.IsOwnUser()), uint64(o.Memory)); err != nil {
			d.Close()
			return nil, err
		}
		canBarrier := kernel.Membarrier()
		page, bell, role, err := d.OpenReceiver(ctx, o.Await)
		if errors.Is(err, ErrNoChannel) && (make || o.Await) {
			continue
		}
		if err != nil {
			return nil, err
		}
		// Before any lane says that it is open: a predecessor that closed said so here as well. [close]
		r := newReceiver(canBarrier, page, bell, o)
		r.role = role
		if err := r.findSenders(); err != nil {
			_ = r.Close()
			return nil, err
		}
		// Messages that wait are as good as who sent them.
		if o.Await && !r.mayBeReady() {
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
	of, err := r.role.Directory.OpenLane(number, r.page, r.bell)
	if err != nil {
		return err
	}
	in := &inLane{Incoming: *of, number: uint32(number) + 1}
	// Kept even when its sender cannot be looked at now: opened again it would be another receiver's to that one.
	r.lanes = append(r.lanes, in)
	err = in.findSender()
	// Who has gone before and left nothing is no news.
	if !in.Consumer.MayBeReady() {
		in.end = nil
	}
	in.Link.Ring()
	return err
}

// findSenders looks for senders that have come to lanes that had none, and for new lanes.
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
		// Its life outlives it for a moment, in a child on its way to exec for instance.
		case what == link.FoundPeer && !in.Consumer.ProducerClosed():
			in.end = nil
			return nil
		}
		// And perhaps its successor is here.
		in.noteEnd()
	}
	// To be looked at again, after the other lanes.
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

// pollEnds is asked when nothing is there: perhaps that is the end, of all senders, which is told once.
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
	if ok, err := r.pollLanes(); ok || err != nil || code == nil {
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
	return wait.Until(ctx, r.bell, &r.guard, func() (bool, error) {
		if r.broken != nil {
			return false, r.broken
		}
		err := r.findSenders()
		for _, in := range r.lanes {
			if in.isSenderHere() && !in.Link.IsPeerGone() && !in.Consumer.ProducerClosed() {
				return true, err
			}
			if in.Link.IsPeerGone() || in.isSenderHere() {
				in.Link.Path.Lose()
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
