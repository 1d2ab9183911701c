package pelton

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"pelton/internal/doorbell"
	"pelton/internal/handshake"
	"pelton/internal/kernel"
	"pelton/internal/limits"
	"pelton/internal/link"
	"pelton/internal/memory"
)

// registry is how senders come in to a receiver of many: a goroutine accepts, each hand-shake goes on in one of its own, and the receiver
// takes in what has come of them, in its calls.
type registry struct {
	listener *Listener
	most     int
	// Of a service: who comes is a client.
	service *Service
	// Of all lanes together; nil: no limit.
	budget *limits.Budget
	// Whether something has arrived.
	hasArrived atomic.Bool
	mutex      sync.Mutex
	arrived    []*inLane
	// Senders that are there, or about to be.
	present int
	number  uint32
	// Handshakes that open descriptors.
	opening    int
	handshakes []context.CancelFunc
	isClosed   bool
	done       sync.WaitGroup
}

// handshakesMax is how many hand-shakes go on at a time. For one more the oldest is given up: who is in earnest has finished before.
const handshakesMax = 64

// Gather makes a receiver of many senders, which connect under a short name, or unix:PATH. It does not wait. Each sender has a lane of its
// own; they are served by turns of at most 64 messages, so a sender's message waits for at most 64 of each of the others. A sender's
// end touches no other; what it had committed is received, then its lane is given up, and so is that of one that breaks the rules.
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
	bell, err := doorbell.New()
	if err != nil {
		_ = listener.Close()
		return nil, err
	}
	page, err := memory.NewReceiverPage()
	if err != nil {
		_ = listener.Close()
		bell.Close()
		return nil, err
	}
	r := newReceiver(kernel.Membarrier(), page, bell, o)
	r.registry = &registry{listener: listener, most: most, service: service, budget: limits.NewBudget(o.Memory)}
	if service != nil && o.Memory > 0 {
		// One for the lanes and for what it keeps.
		r.registry.budget = service.memory
	}
	if service != nil {
		service.receiver = r
	}
	listener.hasRoom = r.registry.hasDescriptors
	r.registry.done.Add(1)
	go r.registry.run(r)
	return r, nil
}

func (g *registry) run(r *Receiver) {
	defer g.done.Done()
	never := func() bool { return false }
	for g.listener.closed.Err() == nil {
		fd, err := g.listener.next(context.Background(), never, never)
		if err != nil {
			// The system's trouble; who waits to come in waits where it is.
			select {
			case <-g.listener.closed.Done():
			case <-time.After(shortageRetry):
			}
			continue
		}
		// Who is refused takes no other's place among those who are shaken hands with.
		if s, err := handshake.New(context.Background(), fd, g.listener.settings); err == nil {
			// Here, so that the oldest of them is the one that came first.
			ctx, cancel := context.WithCancel(context.Background())
			g.addHandshake(cancel)
			g.done.Add(1)
			go g.handshake(ctx, cancel, r, s)
		}
	}
}

// addHandshake notes one more visitor, and gives the oldest up if they are too many.
func (g *registry) addHandshake(cancel context.CancelFunc) {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	if len(g.handshakes) == handshakesMax {
		g.handshakes[0]()
		g.handshakes = g.handshakes[1:]
	}
	g.handshakes = append(g.handshakes, cancel)
}

func (g *registry) handshake(ctx context.Context, cancel context.CancelFunc, r *Receiver, s *handshake.Handshake) {
	defer g.done.Done()
	defer cancel()
	var in *inLane
	err := g.listener.shake(ctx, s, func(s *handshake.Handshake, listens bool) (err error) {
		// Before anything is made for it.
		if err := s.Socket.Until(s.Ctx, func() bool { return kernel.IsReady(s.Socket.FD, unix.POLLIN) }); err != nil {
			return err
		}
		if !g.addSender() {
			return s.Refuse("the receiver has %d senders, as many as its options take: close one, or raise SendersMax there", g.most)
		}
		err = g.beginOpening(s)
		if err == nil {
			in, err = g.accept(r, s)
			g.endOpening()
		}
		if err != nil {
			g.removeSender()
		}
		return err
	})
	if err != nil {
		return
	}
	g.mutex.Lock()
	g.number++
	in.number = max(g.number, 1)
	g.arrived = append(g.arrived, in)
	g.hasArrived.Store(true)
	g.mutex.Unlock()
	r.bell.Wake()
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
func (g *registry) hasDescriptors() bool {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	return g.listener.bound.Reserve.LeavesEnough(g.opening + 1)
}

// beginOpening counts a handshake that is about to open descriptors. If that might leave the program too few, it waits for shortageLasted at most; then it
// refuses the peer.
func (g *registry) beginOpening(s *handshake.Handshake) error {
	for until := time.Now().Add(shortageMax); ; {
		g.mutex.Lock()
		hasRoom := g.listener.bound.Reserve.LeavesEnough(g.opening + 1)
		if hasRoom {
			g.opening++
		}
		g.mutex.Unlock()
		if hasRoom {
			return nil
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
}

func (g *registry) endOpening() {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	g.opening--
}

func (g *registry) removeSender() {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	g.present--
}

func (g *registry) accept(r *Receiver, s *handshake.Handshake) (*inLane, error) {
	to := &handshake.ReceivingSide{Page: r.page, Bell: r.bell, IsShared: true, Budget: g.budget}
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
	// No successor will ask for them, and a thousand lanes are many descriptors.
	in.Memory.Producer.ForgetDescriptor()
	in.Memory.Consumer.ForgetDescriptor()
	in.Memory.Data.ForgetDescriptor()
	return in, nil
}

// takeArrived takes in who has arrived. Does not wait.
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

// close ends it: nobody comes any more. Whose hand-shake is over, also if it is so only while this gives it up, is taken in, to be told: it
// may have asked already.
func (g *registry) close(r *Receiver) {
	_ = g.listener.Close()
	g.mutex.Lock()
	g.isClosed = true
	g.mutex.Unlock()
	g.done.Wait()
	g.takeArrived(r)
}
