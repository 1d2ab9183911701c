package pelton

import (
	"context"
	"errors"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"pelton/internal/doorbell"
	"pelton/internal/fail"
	"pelton/internal/handshake"
	"pelton/internal/kernel"
	"pelton/internal/limits"
	"pelton/internal/memory"
	"pelton/internal/names"
	"pelton/internal/packet"
)

const (
	// How long a whole hand-shake may take, unless the context ends it before.
	handshakeTimeout = 5 * time.Second
	// How long a peer that has connected may take to say the first word, and how many may take it at the same time.
	firstPacketTimeout = 500 * time.Millisecond
	unresponsiveMax    = 64
	// While there is no descriptor for a connection: between two tries to accept it, and until it is refused.
	shortageRetry = 20 * time.Millisecond
	shortageMax   = time.Second
	// Between two looks whether somebody listens by now.
	retryInterval = 10 * time.Millisecond
)

// Listener waits for connections under a name. Either end may listen; one listener may accept many peers, one after another, as
// senders or receivers. One goroutine at a time accepts; Close may be called by any.
type Listener struct {
	bound    *names.Listening
	options  Options
	settings limits.Settings
	closed   context.Context
	close    context.CancelFunc
	// Since when there is no descriptor for those who wait; zero while there is.
	shortSince time.Time
	// Whether one more peer leaves the program its own descriptors; nil: the program asks for each peer itself.
	hasRoom func() bool

	// Of a listener that takes one peer at a time: those who have connected, until their first word, and after it.
	mutex        sync.Mutex
	unresponsive int
	ready        []*handshake.Handshake
	done         sync.WaitGroup
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
func listen(name string, o Options, settings limits.Settings, isShared bool) (*Listener, error) {
	parsed, err := names.Parse(name)
	if err != nil {
		return nil, err
	}
	bound, err := parsed.Listen(isShared)
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
	err = l.accept(ctx, func(s *handshake.Handshake, listens bool) (err error) {
		receiver, err = receiverOfOne(s, l.options, listens)
		return err
	})
	if err != nil {
		return nil, err
	}
	receiver.reconnect = reconnect{listener: l}
	return receiver, nil
}

// AcceptSender waits until a receiver connects, and is its sender. Otherwise as AcceptReceiver.
func (l *Listener) AcceptSender(ctx context.Context) (sender *Sender, err error) {
	err = l.accept(ctx, func(s *handshake.Handshake, listens bool) (err error) {
		sender, err = senderOf(s, l.options, listens)
		return err
	})
	if err != nil {
		return nil, err
	}
	sender.reconnect = reconnect{listener: l}
	return sender, nil
}

// Close ends a wait of another goroutine with [ErrClosedHandle], and removes the socket. Ends that were accepted stay, but find no
// successor any more.
func (l *Listener) Close() error {
	if l.closed.Err() == nil {
		l.close()
		l.bound.Close()
		// Behind this nobody else is heard.
		l.mutex.Lock()
		l.mutex.Unlock()
		l.done.Wait()
		for s := l.nextReady(); s != nil; s = l.nextReady() {
			s.Close()
		}
	}
	return nil
}

// next waits for a connection. It returns -1 without one once isOver says so; while isFull says so, it accepts none. kick has it ask both
// again.
func (l *Listener) next(ctx context.Context, isOver, isFull func() bool) (int, error) {
	fd, socket := -1, l.bound.Socket
	var failed error
	err := socket.Until(ctx, func() bool {
		if failed = ctx.Err(); failed != nil || l.closed.Err() != nil || isOver() {
			return true
		}
		if isFull() {
			return false
		}
		if l.hasRoom != nil && !l.hasRoom() {
			l.retryLater()
			return false
		}
		fd, _, failed = unix.Accept4(socket.FD, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		if kernel.IsShortage(failed) {
			l.retryLater()
			return false
		}
		l.shortSince = time.Time{}
		if failed == unix.EAGAIN || failed == unix.EINTR || failed == unix.ECONNABORTED {
			return false
		}
		failed = fail.System("accepting a connection", failed)
		return true
	})
	if l.closed.Err() != nil && fd >= 0 {
		kernel.HangUp(fd, kernel.UserOf(fd))
	}
	switch {
	case l.closed.Err() != nil:
		return -1, fail.New(fail.ErrClosedHandle, "the listener is closed: make a new one")
	case err != nil:
		return -1, err
	}
	return fd, failed
}

func (l *Listener) wake() { _ = l.bound.Socket.File.SetReadDeadline(kernel.LongAgo) }

// retryLater has next try again soon. If some have waited too long, it refuses the first. If nobody waits, the next connection wakes next.
func (l *Listener) retryLater() {
	socket := l.bound.Socket
	if !kernel.IsReady(socket.FD, unix.POLLIN) {
		l.shortSince = time.Time{}
		return
	}
	isRefused := false
	if l.shortSince.IsZero() {
		l.shortSince = time.Now()
	} else if time.Since(l.shortSince) >= shortageMax {
		// One at a time: for the next one there may be a descriptor by now.
		l.bound.Reserve.Lend(func() { isRefused = socket.RefuseOne(packet.NewRefused(kernel.ShortageText())) })
	}
	if isRefused {
		l.wake()
		return
	}
	// What it replaces is a kick at most, which is so late by this time.
	_ = socket.File.SetReadDeadline(time.Now().Add(shortageRetry))
}

// nextPeer waits for a peer that has said something. Those that have not are waited for at the same time, also by later calls.
func (l *Listener) nextPeer(ctx context.Context) (*handshake.Handshake, error) {
	for {
		var s *handshake.Handshake
		isOver := func() bool { s = l.nextReady(); return s != nil }
		isFull := func() bool {
			l.mutex.Lock()
			defer l.mutex.Unlock()
			return l.unresponsive >= unresponsiveMax
		}
		fd, err := l.next(ctx, isOver, isFull)
		if err != nil && s != nil {
			s.Close()
		}
		if err != nil || s != nil {
			return s, err
		}
		if s, err = handshake.New(l.closed, fd, l.settings); err == nil {
			l.awaitFirstPacket(s)
		} else if isSystem(err) {
			return nil, err
		}
	}
}

func (l *Listener) nextReady() *handshake.Handshake {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if len(l.ready) == 0 {
		return nil
	}
	s := l.ready[0]
	l.ready = l.ready[1:]
	return s
}

// awaitFirstPacket waits for the first word of a peer, in a goroutine. Of a closed listener it hangs up.
func (l *Listener) awaitFirstPacket(s *handshake.Handshake) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if l.closed.Err() != nil {
		s.Close()
		return
	}
	l.unresponsive++
	l.done.Go(func() {
		soon, cancel := context.WithTimeout(l.closed, firstPacketTimeout)
		err := s.Socket.Until(soon, func() bool { return kernel.IsReady(s.Socket.FD, unix.POLLIN) })
		cancel()
		l.mutex.Lock()
		l.unresponsive--
		if err == nil {
			l.ready = append(l.ready, s)
		}
		l.mutex.Unlock()
		if err != nil {
			s.Close()
		}
		l.wake()
	})
}

// isSystem says whether it is the system's trouble, which is this side's; anything else is the peer's, who has been told. Of a lack of descriptors the
// peer has been told, too.
func isSystem(err error) bool {
	return errors.Is(err, ErrSystem) && !kernel.IsOutOfDescriptors(err)
}

// accept goes on until a hand-shake succeeds.
func (l *Listener) accept(ctx context.Context, do func(s *handshake.Handshake, listens bool) error) error {
	for {
		s, err := l.nextPeer(ctx)
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
func (l *Listener) shake(ctx context.Context, s *handshake.Handshake, do func(s *handshake.Handshake, listens bool) error) error {
	ctx, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	defer context.AfterFunc(l.closed, cancel)()
	s.Ctx = ctx
	err := do(s, true)
	if err != nil {
		s.Close()
	}
	return err
}

func senderOf(s *handshake.Handshake, options Options, listens bool) (*Sender, error) {
	out, err := s.NewSender(listens)
	if err != nil {
		return nil, err
	}
	return newSender(out, options), nil
}

func receiverOfOne(s *handshake.Handshake, options Options, listens bool) (*Receiver, error) {
	canBarrier := kernel.Membarrier()
	bell, err := doorbell.New()
	if err != nil {
		return nil, s.Report(err)
	}
	page, err := memory.NewReceiverPage()
	if err != nil {
		bell.Close()
		return nil, s.Report(err)
	}
	// Before the page is shown: a sender that finds U there fences from the first on.
	r := newReceiver(canBarrier, page, bell, options)
	in, err := s.NewReceiver(&handshake.ReceivingSide{Page: page, Bell: bell}, listens)
	if err != nil {
		page.Close()
		bell.Close()
		return nil, err
	}
	r.lanes = []*inLane{{Incoming: *in}}
	return r, nil
}

// reconnect is how a handle found its peer, and so how it finds the peer's successor.
type reconnect struct {
	listener *Listener
	name     names.Name
	settings limits.Settings
}

func (o *reconnect) resume(ctx context.Context, do func(s *handshake.Handshake, listens bool) error) error {
	if o.listener != nil {
		return o.listener.accept(ctx, do)
	}
	return connect(ctx, o.name, o.settings, true, do)
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
	parsed, err := names.Parse(name)
	if err != nil {
		return nil, err
	}
	err = connect(ctx, parsed, settings, o.Await, func(s *handshake.Handshake, listens bool) (err error) {
		sender, err = senderOf(s, o, listens)
		return err
	})
	if err != nil {
		return nil, err
	}
	sender.reconnect = reconnect{name: parsed, settings: settings}
	return sender, nil
}

// ConnectReceiver connects to a sender that listens under a name. Otherwise as ConnectSender.
func ConnectReceiver(ctx context.Context, name string, options *Options) (receiver *Receiver, err error) {
	o := options.orDefault()
	settings, err := o.forReceiver(0)
	if err != nil {
		return nil, err
	}
	parsed, err := names.Parse(name)
	if err != nil {
		return nil, err
	}
	err = connect(ctx, parsed, settings, o.Await, func(s *handshake.Handshake, listens bool) (err error) {
		receiver, err = receiverOfOne(s, o, listens)
		return err
	})
	if err != nil {
		return nil, err
	}
	receiver.reconnect = reconnect{name: parsed, settings: settings}
	return receiver, nil
}

// connect connects to whoever listens under the name.
func connect(ctx context.Context, n names.Name, settings limits.Settings, awaits bool, do func(s *handshake.Handshake, listens bool) error) error {
	for {
		fd, err := n.Connect()
		if err != nil {
			return err
		}
		if fd >= 0 {
			err := handshakeWith(ctx, fd, settings, awaits, do)
			// It went while we greeted it: another may come. If this side has time, slowness does not matter either.
			if !awaits || !errors.Is(err, ErrHungUp) && !errors.Is(err, ErrTimedOut) {
				return err
			}
		} else if !awaits {
			return fail.New(fail.ErrNoListener, "nobody listens at %s: start the other side first, or set Await", n.Where())
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(retryInterval):
		}
	}
}

func handshakeWith(ctx context.Context, fd int, settings limits.Settings, awaits bool, do func(s *handshake.Handshake, listens bool) error) error {
	limited, cancel := ctx, context.CancelFunc(func() {})
	if !awaits {
		limited, cancel = context.WithTimeout(ctx, handshakeTimeout)
	}
	defer cancel()
	s, err := handshake.New(limited, fd, settings)
	if err != nil {
		return err
	}
	if err = do(s, false); err != nil {
		s.Close()
	}
	if ctx.Err() == nil && errors.Is(err, context.DeadlineExceeded) {
		return fail.New(fail.ErrTimedOut, "timed out while waiting for the peer to answer: is it accepting?")
	}
	return err
}
