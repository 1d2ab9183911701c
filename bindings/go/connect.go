package pelton

import (
	"context"
	"errors"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"pelton/internal/fail"
)

const (
	// How long a whole hand-shake may take, unless the context ends it before.
	patience = 5 * time.Second
	// How long a peer that has connected may take to say the first word, and how many may take it at the same time.
	greeting     = 500 * time.Millisecond
	greetingsMax = 64
	// While there is no descriptor for a connection: between two tries to accept it, and until it is refused.
	shortageRetry  = 20 * time.Millisecond
	shortageLasted = time.Second
	// Between two looks whether somebody listens by now.
	retry = 10 * time.Millisecond
)

// Listener waits for connections under a name. Either end may listen; one listener may accept many peers, one after another, as
// senders or receivers. One goroutine at a time accepts; Close may be called by any.
type Listener struct {
	bound    *bound
	options  Options
	settings settings
	closed   context.Context
	close    context.CancelFunc
	// Since when there is no descriptor for those who wait; zero while there is.
	short time.Time
	// Whether one more peer leaves the program its own descriptors; nil: the program asks for each peer itself.
	hasRoom func() bool

	// Of a listener that takes one peer at a time: those who have connected, until their first word, and after it.
	mutex  sync.Mutex
	silent int
	spoken []*shake
	done   sync.WaitGroup
}

// Listen listens under a short name, or unix:PATH. It does not wait. Each accepted peer gets a lane made with these options.
//
// Errors: [ErrInUse] while another process listens there; [ErrName], [ErrOption], [ErrSystem].
func Listen(name string, options *Options) (*Listener, error) {
	o := options.orDefault()
	settings, err := o.forBoth(0)
	if err != nil {
		return nil, err
	}
	return listen(name, o, settings, false)
}

// listen listens, if it isShared beside others under a short name.
func listen(name string, o Options, settings settings, isShared bool) (*Listener, error) {
	parsed, err := parseName(name)
	if err != nil {
		return nil, err
	}
	bound, err := parsed.listen(isShared)
	if err != nil {
		return nil, err
	}
	l := &Listener{bound: bound, options: o, settings: settings}
	l.closed, l.close = context.WithCancel(context.Background())
	return l, nil
}

// AcceptReceiver waits until a sender connects, and is its receiver. Peers that are refused (another uid, another version, the wrong end)
// are told why and do not end the wait. Neither does a lack of descriptors: peers wait for a second and are then refused.
//
// Errors: the context's; [ErrClosedHandle]; [ErrSystem].
func (l *Listener) AcceptReceiver(ctx context.Context) (receiver *Receiver, err error) {
	err = l.accept(ctx, func(s *shake, listens bool) (err error) {
		receiver, err = receiverOfOne(s, l.options, listens)
		return err
	})
	if err != nil {
		return nil, err
	}
	receiver.origin = origin{listener: l}
	return receiver, nil
}

// AcceptSender waits until a receiver connects, and is its sender. Otherwise as AcceptReceiver.
func (l *Listener) AcceptSender(ctx context.Context) (sender *Sender, err error) {
	err = l.accept(ctx, func(s *shake, listens bool) (err error) {
		sender, err = senderOf(s, l.options, listens)
		return err
	})
	if err != nil {
		return nil, err
	}
	sender.origin = origin{listener: l}
	return sender, nil
}

// Close ends a wait of another goroutine with [ErrClosedHandle], and removes the socket. Ends that were accepted stay, but find no
// successor any more.
func (l *Listener) Close() error {
	if l.closed.Err() == nil {
		l.close()
		l.bound.close()
		// Behind this nobody else is heard.
		l.mutex.Lock()
		l.mutex.Unlock()
		l.done.Wait()
		for s := l.nextSpoken(); s != nil; s = l.nextSpoken() {
			s.close()
		}
	}
	return nil
}

// next waits for a connection. It returns -1 without one once isOver says so; while isFull says so, it accepts none. kick has it ask both
// again.
func (l *Listener) next(ctx context.Context, isOver, isFull func() bool) (int, error) {
	fd, socket := -1, l.bound.socket
	var failed error
	err := socket.until(ctx, func() bool {
		if failed = ctx.Err(); failed != nil || l.closed.Err() != nil || isOver() {
			return true
		}
		if isFull() {
			return false
		}
		if l.hasRoom != nil && !l.hasRoom() {
			l.sitOut()
			return false
		}
		fd, _, failed = unix.Accept4(socket.fd, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		if isShortage(failed) {
			l.sitOut()
			return false
		}
		l.short = time.Time{}
		if failed == unix.EAGAIN || failed == unix.EINTR || failed == unix.ECONNABORTED {
			return false
		}
		failed = fail.System("accepting a connection", failed)
		return true
	})
	if l.closed.Err() != nil && fd >= 0 {
		hangUp(fd, userOf(fd))
	}
	switch {
	case l.closed.Err() != nil:
		return -1, fail.New(fail.ErrClosedHandle, "the listener is closed: make a new one")
	case err != nil:
		return -1, err
	}
	return fd, failed
}

func (l *Listener) kick() { _ = l.bound.socket.file.SetReadDeadline(longAgo) }

// sitOut has next try again soon. If some have waited too long, it refuses the first. If nobody waits, the next connection wakes next.
func (l *Listener) sitOut() {
	socket := l.bound.socket
	if !isReady(socket.fd, unix.POLLIN) {
		l.short = time.Time{}
		return
	}
	isRefused := false
	if l.short.IsZero() {
		l.short = time.Now()
	} else if time.Since(l.short) >= shortageLasted {
		// One at a time: for the next one there may be a descriptor by now.
		l.bound.reserve.give(func() { isRefused = socket.refuseOne(refusedPacket(shortageText())) })
	}
	if isRefused {
		l.kick()
		return
	}
	// What it replaces is a kick at most, which is so late by this time.
	_ = socket.file.SetReadDeadline(time.Now().Add(shortageRetry))
}

// firstWord waits for a peer that has said something. Those that have not are waited for at the same time, also by later calls.
func (l *Listener) firstWord(ctx context.Context) (*shake, error) {
	for {
		var s *shake
		isOver := func() bool { s = l.nextSpoken(); return s != nil }
		isFull := func() bool {
			l.mutex.Lock()
			defer l.mutex.Unlock()
			return l.silent >= greetingsMax
		}
		fd, err := l.next(ctx, isOver, isFull)
		if err != nil && s != nil {
			s.close()
		}
		if err != nil || s != nil {
			return s, err
		}
		if s, err = newShake(l.closed, fd, l.settings); err == nil {
			l.hear(s)
		} else if isSystem(err) {
			return nil, err
		}
	}
}

func (l *Listener) nextSpoken() *shake {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if len(l.spoken) == 0 {
		return nil
	}
	s := l.spoken[0]
	l.spoken = l.spoken[1:]
	return s
}

// hear waits for the first word of a peer, in a goroutine. Of a closed listener it hangs up.
func (l *Listener) hear(s *shake) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if l.closed.Err() != nil {
		s.close()
		return
	}
	l.silent++
	l.done.Go(func() {
		soon, cancel := context.WithTimeout(l.closed, greeting)
		err := s.socket.until(soon, func() bool { return isReady(s.socket.fd, unix.POLLIN) })
		cancel()
		l.mutex.Lock()
		l.silent--
		if err == nil {
			l.spoken = append(l.spoken, s)
		}
		l.mutex.Unlock()
		if err != nil {
			s.close()
		}
		l.kick()
	})
}

// isSystem says whether it is the system's trouble, which is this side's; anything else is the peer's, who has been told. Of a lack of descriptors the
// peer has been told, too.
func isSystem(err error) bool {
	return errors.Is(err, ErrSystem) && !isOutOfDescriptors(err)
}

// accept goes on until a hand-shake succeeds.
func (l *Listener) accept(ctx context.Context, do func(s *shake, listens bool) error) error {
	for {
		s, err := l.firstWord(ctx)
		if err != nil {
			return err
		}
		err = l.shake(ctx, s, do)
		switch {
		case err == nil:
			return nil
		case l.closed.Err() != nil:
			return fail.New(fail.ErrClosedHandle, "the listener is closed: make a new one")
		case ctx.Err() != nil:
			return ctx.Err()
		case isSystem(err):
			return err
		}
	}
}

// shake shakes hands with who has connected.
func (l *Listener) shake(ctx context.Context, s *shake, do func(s *shake, listens bool) error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	defer context.AfterFunc(l.closed, cancel)()
	s.ctx = ctx
	err := do(s, true)
	if err != nil {
		s.close()
	}
	return err
}

func senderOf(s *shake, options Options, listens bool) (*Sender, error) {
	out, err := s.newSender(listens)
	if err != nil {
		return nil, err
	}
	return newSender(out, options), nil
}

func receiverOfOne(s *shake, options Options, listens bool) (*Receiver, error) {
	canBarrier := membarrier()
	bell, err := newBell()
	if err != nil {
		return nil, s.told(err)
	}
	page, err := makeReceiverPage()
	if err != nil {
		bell.close()
		return nil, s.told(err)
	}
	// Before the page is shown: a sender that finds U there fences from the first on.
	r := newReceiver(canBarrier, page, bell, options)
	in, err := s.newReceiver(&reception{page: page, bell: bell}, listens)
	if err != nil {
		page.close()
		bell.close()
		return nil, err
	}
	r.lanes = []*inLane{{incoming: *in}}
	return r, nil
}

// origin is how a handle found its peer, and so how it finds the peer's successor.
type origin struct {
	listener *Listener
	name     name
	settings settings
}

func (o *origin) resume(ctx context.Context, do func(s *shake, listens bool) error) error {
	if o.listener != nil {
		return o.listener.accept(ctx, do)
	}
	return reach(ctx, o.name, o.settings, true, do)
}

// ConnectSender connects to a receiver that listens under a short name, or unix:PATH. It waits for the hand-shake, 5 s at most unless
// [Options.Await] says otherwise.
//
// Errors: the context's; [ErrNoListener], [ErrRefused] with the other side's words, [ErrHungUp], [ErrTimedOut] when it does not answer in
// time; [ErrName], [ErrOption]; [ErrCorrupt] when the other side does not keep to the protocol; [ErrSystem].
func ConnectSender(ctx context.Context, name string, options *Options) (sender *Sender, err error) {
	o := options.orDefault()
	settings, err := o.forSender()
	if err != nil {
		return nil, err
	}
	parsed, err := parseName(name)
	if err != nil {
		return nil, err
	}
	err = reach(ctx, parsed, settings, o.Await, func(s *shake, listens bool) (err error) {
		sender, err = senderOf(s, o, listens)
		return err
	})
	if err != nil {
		return nil, err
	}
	sender.origin = origin{name: parsed, settings: settings}
	return sender, nil
}

// ConnectReceiver connects to a sender that listens under a name. Otherwise as ConnectSender.
func ConnectReceiver(ctx context.Context, name string, options *Options) (receiver *Receiver, err error) {
	o := options.orDefault()
	settings, err := o.forReceiver(0)
	if err != nil {
		return nil, err
	}
	parsed, err := parseName(name)
	if err != nil {
		return nil, err
	}
	err = reach(ctx, parsed, settings, o.Await, func(s *shake, listens bool) (err error) {
		receiver, err = receiverOfOne(s, o, listens)
		return err
	})
	if err != nil {
		return nil, err
	}
	receiver.origin = origin{name: parsed, settings: settings}
	return receiver, nil
}

// reach connects to whoever listens under the name.
func reach(ctx context.Context, n name, settings settings, awaits bool, do func(s *shake, listens bool) error) error {
	for {
		fd, err := n.connect()
		if err != nil {
			return err
		}
		if fd >= 0 {
			err := reached(ctx, fd, settings, awaits, do)
			// It went while we greeted it: another may come. If this side has time, slowness does not matter either.
			if !awaits || !errors.Is(err, ErrHungUp) && !errors.Is(err, ErrTimedOut) {
				return err
			}
		} else if !awaits {
			return fail.New(fail.ErrNoListener, "nobody listens at %s: start the other side first, or set Await", n.place())
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(retry):
		}
	}
}

func reached(ctx context.Context, fd int, settings settings, awaits bool, do func(s *shake, listens bool) error) error {
	limited, cancel := ctx, context.CancelFunc(func() {})
	if !awaits {
		limited, cancel = context.WithTimeout(ctx, patience)
	}
	defer cancel()
	s, err := newShake(limited, fd, settings)
	if err != nil {
		return err
	}
	if err = do(s, false); err != nil {
		s.close()
	}
	if ctx.Err() == nil && errors.Is(err, context.DeadlineExceeded) {
		return fail.New(fail.ErrTimedOut, "timed out while waiting for the peer to answer: is it accepting?")
	}
	return err
}
