package pelton

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/doorbell"
	"github.com/pelton-ipc/pelton/bindings/go/internal/handshake"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/limits"
	"github.com/pelton-ipc/pelton/bindings/go/internal/link"
	"github.com/pelton-ipc/pelton/bindings/go/internal/memory"
	"golang.org/x/sys/unix"
)

// acceptor accepts peers, in a goroutine. The handshake of each has a goroutine of its own.
type acceptor struct {
	listener *Listener
	mutex    sync.Mutex
	// Handshakes that open descriptors.
	opening    int
	handshakes []context.CancelFunc
	done       sync.WaitGroup
}

// registry has the senders of a receiver of many, or the clients of a service. The receiver takes the new lanes in its
// calls.
type registry struct {
	acceptor
	receiver *Receiver
	most     int
	// Set for a service, whose peers are clients.
	service *Service
	// For all lanes together; nil: no limit.
	budget *limits.Budget
	// Whether a lane has arrived.
	hasArrived atomic.Bool
	arrived    []*inLane
	// Senders that are present, or about to be.
	present  int
	number   uint32
	isClosed bool
}

// handshakesMax limits concurrent handshakes. For one more the oldest is dropped: an honest peer has finished before.
const handshakesMax = 64

// Gather returns a receiver of many senders, which connect under a short name, or unix:PATH. It does not wait. Each
// sender has a lane of its own, served round-robin with a quantum of 64 messages, so no sender delays another. The
// end of a sender affects no other: what it had committed is received, then its lane is dropped, and so is that of a
// sender that breaks the rules.
//
// Capacity and MessageBytesMax are the largest lane and message that it takes; Memory limits all lanes together.
//
// Errors: as [Listen].
func Gather(name string, options *Options) (*Receiver, error) {
	o := options.orDefault()
	settings, err := o.forReceiver(1)
	if err != nil {
		return nil, err
	}
	return gather(name, o, settings, nil)
}

func gather(name string, o Options, settings limits.Settings, service *Service) (*Receiver, error) {
	most, err := o.sendersMax()
	if err != nil {
		return nil, err
	}
	listener, err := listen(name, o, settings, service != nil)
	if err != nil {
		return nil, err
	}
	newDoorbell := doorbell.New
	if service != nil {
		newDoorbell = doorbell.NewBlocking
	}
	ownDoorbell, err := newDoorbell()
	if err != nil {
		_ = listener.Close()
		return nil, err
	}
	kind := "gather "
	if service != nil {
		kind = "service "
	}
	page, err := memory.NewReceiverPage(kind + name)
	if err != nil {
		_ = listener.Close()
		ownDoorbell.Close()
		return nil, err
	}
	r := newReceiver(kernel.Membarrier(), page, ownDoorbell, o)
	r.registry = &registry{receiver: r, most: most, service: service, budget: limits.NewBudget(o.Memory)}
	if service != nil && o.Memory > 0 {
		// One budget for the lanes and for what it keeps.
		r.registry.budget = service.memory
	}
	if service != nil {
		service.receiver = r
	}
	r.registry.run(listener, r.registry.addPeer)
	return r, nil
}

// run begins to accept the listener's peers. accept performs a handshake; the peer has sent its first packet.
func (a *acceptor) run(listener *Listener, accept func(*handshake.Handshake) error) {
	a.listener = listener
	listener.hasRoom = a.hasDescriptors
	a.done.Go(func() {
		never := func() bool { return false }
		for listener.closed.Err() == nil {
			fd, err := listener.next(context.Background(), never, never)
			if err != nil {
				// An error of the system: peers wait where they are.
				select {
				case <-listener.closed.Done():
				case <-time.After(shortageRetry):
				}
				continue
			}
			// A peer that is refused takes no place among the handshakes.
			if s, err := handshake.New(context.Background(), fd, listener.settings); err == nil {
				// In this goroutine, so that the oldest of them is the one that came first.
				ctx, cancel := context.WithCancel(context.Background())
				a.addHandshake(cancel)
				a.done.Go(func() {
					defer cancel()
					_ = listener.shake(ctx, s, func(s *handshake.Handshake, _ bool) error {
						// Before anything is created for it.
						err := s.Socket.Until(s.Ctx, func() bool { return kernel.IsReady(s.Socket.FD, unix.POLLIN) })
						if err != nil {
							return err
						}
						return accept(s)
					})
				})
			}
		}
	})
}

// addHandshake adds a handshake, and drops the oldest if there are too many.
func (a *acceptor) addHandshake(cancel context.CancelFunc) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	if len(a.handshakes) == handshakesMax {
		a.handshakes[0]()
		a.handshakes = a.handshakes[1:]
	}
	a.handshakes = append(a.handshakes, cancel)
}

// addPeer performs the handshake of one more sender, or client.
func (g *registry) addPeer(s *handshake.Handshake) error {
	if !g.addSender() {
		return s.Refuse("the receiver has %d senders, as many as its options take: close one, or raise SendersMax there",
			g.most)
	}
	var in *inLane
	err := g.opens(s, func() (err error) { in, err = g.newLane(s); return err })
	if err != nil {
		g.removeSender()
		return err
	}
	g.mutex.Lock()
	g.number++
	in.number = max(g.number, 1)
	g.arrived = append(g.arrived, in)
	g.hasArrived.Store(true)
	g.mutex.Unlock()
	g.receiver.doorbell.Wake()
	return nil
}

func (g *registry) addSender() bool {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	if g.isClosed || g.present >= g.most {
		return false
	}
	g.present++
	return true
}

// hasDescriptors reports whether one more handshake leaves the program its own descriptors.
func (a *acceptor) hasDescriptors() bool {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	return a.listener.bound.Reserve.LeavesEnough(a.opening + 1)
}

// opens counts a handshake while it opens descriptors. If that might leave the program too few, it waits for
// shortageMax at most, and then refuses the peer.
func (a *acceptor) opens(s *handshake.Handshake, do func() error) error {
	for until := time.Now().Add(shortageMax); ; {
		a.mutex.Lock()
		hasRoom := a.listener.bound.Reserve.LeavesEnough(a.opening + 1)
		if hasRoom {
			a.opening++
		}
		a.mutex.Unlock()
		if hasRoom {
			break
		}
		if time.Now().After(until) {
			return s.Refuse("%s", kernel.ShortageText())
		}
		select {
		case <-s.Ctx.Done():
			return s.Ctx.Err()
		case <-time.After(shortageRetry):
		}
	}
	defer func() {
		a.mutex.Lock()
		defer a.mutex.Unlock()
		a.opening--
	}()
	return do()
}

func (g *registry) removeSender() {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	g.present--
}

func (g *registry) newLane(s *handshake.Handshake) (*inLane, error) {
	r := g.receiver
	to := &handshake.ReceivingSide{Page: r.page, Doorbell: r.doorbell, IsShared: true, Budget: g.budget}
	var in *inLane
	var err error
	if g.service != nil {
		in, err = g.service.accept(s, to)
	} else {
		var of *link.Incoming
		if of, err = s.NewReceiver(to, true); err == nil {
			in = &inLane{Incoming: *of}
		}
	}
	if err != nil {
		return nil, err
	}
	// No successor asks for them, and a thousand lanes would keep many descriptors.
	in.Memory.Producer.ForgetDescriptor()
	in.Memory.Consumer.ForgetDescriptor()
	in.Memory.Data.ForgetDescriptor()
	return in, nil
}

// takeArrived adds the new lanes. It does not wait.
func (g *registry) takeArrived(r *Receiver) {
	if !g.hasArrived.Load() {
		return
	}
	g.mutex.Lock()
	defer g.mutex.Unlock()
	g.hasArrived.Store(false)
	r.lanes = append(r.lanes, g.arrived...)
	g.arrived = nil
}

// close ends it. A handshake that is complete, even if only during this call, still becomes a lane: its client may
// have sent a request already, and must get the end.
func (g *registry) close(r *Receiver) {
	_ = g.listener.Close()
	g.mutex.Lock()
	g.isClosed = true
	g.mutex.Unlock()
	g.done.Wait()
	g.takeArrived(r)
}
