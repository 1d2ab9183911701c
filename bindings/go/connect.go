package pelton

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/doorbell"
	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/handshake"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/limits"
	"github.com/pelton-ipc/pelton/bindings/go/internal/memory"
	"github.com/pelton-ipc/pelton/bindings/go/internal/names"
	"github.com/pelton-ipc/pelton/bindings/go/internal/packet"
	"github.com/pelton-ipc/pelton/bindings/go/internal/wait"
	"golang.org/x/sys/unix"
)

const (
	// The limit of a whole handshake, unless the context ends before.
	handshakeTimeout = 5 * time.Second
	// The limit for a peer's first packet after it connected, and the number of peers that may take that time
	// concurrently.
	firstPacketTimeout = 500 * time.Millisecond
	unresponsiveMax    = 64
	// While no descriptor is free for a connection: between two attempts to accept it, and until it is refused.
	shortageRetry = 20 * time.Millisecond
	shortageMax   = time.Second
	// Between two attempts to connect.
	retryInterval = 10 * time.Millisecond
)

// Peer identifies the process at the other end of a channel.
type Peer struct {
	// PID is its process when it connected; 0 if it is in another pid namespace.
	PID int
	// UID is its user, as the kernel reports it.
	UID int
}

// Listener accepts connections under a name. Either side of a channel may listen. One listener may accept many peers,
// one after another, as senders or receivers. One goroutine at a time accepts; any may call Close.
type Listener struct {
	bound    *names.Listening
	options  Options
	settings limits.Settings
	closed   context.Context
	close    context.CancelFunc
	// Since when waiting peers lack a descriptor; zero while there is one.
	shortSince time.Time
	// Whether one more peer leaves the program its own descriptors; nil: the program accepts each peer itself.
	hasRoom func() bool

	// For a listener that accepts one peer at a time: the number of those that connected and sent nothing yet, and
	// those that did.
	mutex        sync.Mutex
	unresponsive int
	ready        []*handshake.Handshake
	done         sync.WaitGroup
}

// Listen listens under a short name, or unix:PATH. It does not wait. Each accepted peer gets a lane with these
// options.
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

// listen listens; with isShared, others may listen under a short name too.
func listen(name string, o Options, settings limits.Settings, isShared bool) (*Listener, error) {
	parsed, err := names.Parse(name)
	if err != nil {
		return nil, err
	}
	bound, err := parsed.Listen(isShared, len(o.UIDs) > 0)
	if err != nil {
		return nil, err
	}
	settings.Name = name
	l := &Listener{bound: bound, options: o, settings: settings}
	l.closed, l.close = context.WithCancel(context.Background())
	return l, nil
}

// AcceptReceiver waits until a sender connects, and returns the receiver for it. Peers that are refused (another uid,
// another version, the same role) get the reason, and do not end the wait. Neither does a lack of descriptors: peers
// wait for a second and are then refused.
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

// AcceptSender waits until a receiver connects, and returns the sender for it. Otherwise as AcceptReceiver.
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

// Close ends another goroutine's wait with [ErrClosedHandle], and removes the socket. Accepted endpoints stay, but
// find no successor any more. Closing twice does nothing.
func (l *Listener) Close() error {
	if l.closed.Err() == nil {
		l.close()
		l.bound.Close()
		// After this no further peer is awaited.
		l.mutex.Lock()
		l.mutex.Unlock()
		l.done.Wait()
		for s := l.nextReady(); s != nil; s = l.nextReady() {
			s.Close()
		}
	}
	return nil
}

// next waits for a connection. It returns -1 without one once isOver returns true. While isFull returns true it
// accepts none. wake makes it call both again.
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

// retryLater makes next try again soon. If peers have waited too long, it refuses the first. If none wait, the next
// connection wakes next.
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
		// One at a time: for the next one a descriptor may be free by now.
		l.bound.Reserve.Lend(func() { isRefused = socket.RefuseOne(packet.NewRefused(kernel.ShortageText())) })
	}
	if isRefused {
		l.wake()
		return
	}
	// This replaces at most a wake, which is delayed by this time.
	_ = socket.File.SetReadDeadline(time.Now().Add(shortageRetry))
}

// nextPeer waits for a peer that has sent a packet. It waits for all that have not concurrently, and so do later
// calls.
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

// awaitFirstPacket waits for a peer's first packet, in a goroutine. If the listener is closed, it hangs up.
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

// isSystem reports whether the error is this side's. Any other error is the peer's, which got the reason; so is a
// lack of descriptors.
func isSystem(err error) bool {
	return errors.Is(err, ErrSystem) && !kernel.IsOutOfDescriptors(err)
}

// accept repeats until a handshake succeeds.
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

// shake performs the handshake with a peer.
func (l *Listener) shake(ctx context.Context, s *handshake.Handshake,
	do func(s *handshake.Handshake, listens bool) error) error {
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
	ownDoorbell, err := doorbell.New()
	if err != nil {
		return nil, s.Report(err)
	}
	page, err := memory.NewReceiverPage("connect " + s.Settings.Name)
	if err != nil {
		ownDoorbell.Close()
		return nil, s.Report(err)
	}
	// Before the peer gets the page: a sender that finds the flag U there fences from the first message on.
	r := newReceiver(canBarrier, page, ownDoorbell, options)
	in, err := s.NewReceiver(&handshake.ReceivingSide{Page: page, Doorbell: ownDoorbell}, listens)
	if err != nil {
		page.Close()
		ownDoorbell.Close()
		return nil, err
	}
	r.lanes = []*inLane{{Incoming: *in}}
	return r, nil
}

// reconnect is how a handle finds its peer's successor.
type reconnect struct {
	listener *Listener
	name     names.Name
	settings limits.Settings
}

// resume waits for the successor, in a call that the guard has admitted.
func (o *reconnect) resume(ctx context.Context, guard *wait.Guard,
	do func(s *handshake.Handshake, listens bool) error) (err error) {
	limited, end := guard.Context(ctx)
	defer end()
	if o.listener != nil {
		err = o.listener.accept(limited, do)
	} else {
		err = connect(limited, o.name, o.settings, true, do)
	}
	if err != nil && guard.IsClosing() {
		return wait.Interrupted(ctx, guard)
	}
	return err
}

// ConnectSender connects to a receiver that listens under a short name, or unix:PATH. It waits for the handshake, 5 s
// at most unless [Options.Await] is set.
//
// Errors: the context's; [ErrNoListener]; [ErrRefused] with the other side's reason; [ErrHungUp]; [ErrTimedOut];
// [ErrName], [ErrOption]; [ErrCorrupt] if the other side breaks the protocol; [ErrSystem].
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
	settings.Name = name
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
	settings.Name = name
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

// connect connects to the process that listens under the name.
func connect(ctx context.Context, n names.Name, settings limits.Settings, awaits bool,
	do func(s *handshake.Handshake, listens bool) error) error {
	for {
		fd, err := n.Connect()
		if err != nil {
			return err
		}
		if fd >= 0 {
			err := handshakeWith(ctx, fd, settings, awaits, do)
			// The listener closed during the handshake: another may come. With Await a slow one is no error either.
			if !awaits || !errors.Is(err, ErrHungUp) && !errors.Is(err, ErrTimedOut) {
				return err
			}
		} else if !awaits {
			return fail.New(fail.ErrNoListener, "nobody listens at %s: start the other side first, or set Await",
				n.Where())
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(retryInterval):
		}
	}
}

func handshakeWith(ctx context.Context, fd int, settings limits.Settings, awaits bool,
	do func(s *handshake.Handshake, listens bool) error) error {
	limited, cancel := ctx, context.CancelFunc(func() {})
	if !awaits {
		limited, cancel = context.WithTimeout(ctx, handshakeTimeout)
	}
	defer cancel()
	s, err := handshake.Connected(limited, fd, settings)
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
