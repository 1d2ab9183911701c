package pelton

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// gate is how senders come in to a receiver of many: a goroutine accepts, each hand-shake goes on in one of its own, and the receiver
// takes in what has come of them, in its calls.
type gate struct {
	listener *Listener
	most     int
	// Of a service: who comes is a client.
	service *Service
	// Of all lanes together; nil: no limit.
	budget *budget
	// Whether something has arrived.
	isStirred atomic.Bool
	mutex     sync.Mutex
	arrived   []*inLane
	// Senders that are there, or about to be.
	present int
	number  uint32
	// Handshakes that open descriptors.
	opening  int
	visitors []context.CancelFunc
	isShut   bool
	done     sync.WaitGroup
}

// visitorsMax is how many hand-shakes go on at a time. For one more the oldest is given up: who is in earnest has finished before.
const visitorsMax = 64

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

func gather(name string, o Options, settings settings, service *Service) (*Receiver, error) {
	most, err := o.sendersMax()
	if err != nil {
		return nil, err
	}
	listener, err := listen(name, o, settings, service != nil)
	if err != nil {
		return nil, err
	}
	bell, err := newBell()
	if err != nil {
		_ = listener.Close()
		return nil, err
	}
	page, err := makeReceiverPage()
	if err != nil {
		_ = listener.Close()
		bell.close()
		return nil, err
	}
	r := newReceiver(membarrier(), page, bell, o)
	r.gate = &gate{listener: listener, most: most, service: service, budget: newBudget(o.Memory)}
	if service != nil && o.Memory > 0 {
		// One for the lanes and for what it keeps.
		r.gate.budget = service.memory
	}
	if service != nil {
		service.receiver = r
	}
	listener.hasRoom = r.gate.hasDescriptors
	r.gate.done.Add(1)
	go r.gate.accept(r)
	return r, nil
}

func (g *gate) accept(r *Receiver) {
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
		if s, err := newShake(context.Background(), fd, g.listener.settings); err == nil {
			// Here, so that the oldest of them is the one that came first.
			ctx, cancel := context.WithCancel(context.Background())
			g.enlist(cancel)
			g.done.Add(1)
			go g.visit(ctx, cancel, r, s)
		}
	}
}

// enlist notes one more visitor, and gives the oldest up if they are too many.
func (g *gate) enlist(cancel context.CancelFunc) {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	if len(g.visitors) == visitorsMax {
		g.visitors[0]()
		g.visitors = g.visitors[1:]
	}
	g.visitors = append(g.visitors, cancel)
}

func (g *gate) visit(ctx context.Context, cancel context.CancelFunc, r *Receiver, s *shake) {
	defer g.done.Done()
	defer cancel()
	var in *inLane
	err := g.listener.shake(ctx, s, func(s *shake, listens bool) (err error) {
		// Before anything is made for it.
		if err := s.socket.until(s.ctx, func() bool { return isReady(s.socket.fd, unix.POLLIN) }); err != nil {
			return err
		}
		if !g.takePlace() {
			return s.refuse("the receiver has %d senders, as many as its options take: close one, or raise SendersMax there", g.most)
		}
		err = g.beginOpening(s)
		if err == nil {
			in, err = g.welcome(r, s)
			g.endOpening()
		}
		if err != nil {
			g.left()
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
	g.isStirred.Store(true)
	g.mutex.Unlock()
	r.bell.kick()
}

func (g *gate) takePlace() bool {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	if g.isShut || g.present >= g.most {
		return false
	}
	g.present++
	return true
}

// hasDescriptors reports whether one more handshake leaves the program its own descriptors.
func (g *gate) hasDescriptors() bool {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	return g.listener.bound.reserve.leavesProgramIts(g.opening + 1)
}

// beginOpening counts a handshake that is about to open descriptors. If that might leave the program too few, it waits for shortageLasted at most; then it
// refuses the peer.
func (g *gate) beginOpening(s *shake) error {
	for until := time.Now().Add(shortageLasted); ; {
		g.mutex.Lock()
		hasRoom := g.listener.bound.reserve.leavesProgramIts(g.opening + 1)
		if hasRoom {
			g.opening++
		}
		g.mutex.Unlock()
		if hasRoom {
			return nil
		}
		if time.Now().After(until) {
			return s.refuse("%s", shortageText())
		}
		select {
		case <-s.ctx.Done():
			return s.ctx.Err()
		case <-time.After(shortageRetry):
		}
	}
}

func (g *gate) endOpening() {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	g.opening--
}

func (g *gate) left() {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	g.present--
}

func (g *gate) welcome(r *Receiver, s *shake) (*inLane, error) {
	to := &reception{page: r.page, bell: r.bell, isShared: true, budget: g.budget}
	var in *inLane
	var err error
	if g.service != nil {
		in, err = g.service.welcome(s, to)
	} else {
		var of *incoming
		if of, err = s.newReceiver(to, true); err == nil {
			in = &inLane{incoming: *of}
		}
	}
	if err != nil {
		return nil, err
	}
	// No successor will ask for them, and a thousand lanes are many descriptors.
	in.memory.producer.forgetDescriptor()
	in.memory.consumer.forgetDescriptor()
	in.memory.data.forgetDescriptor()
	return in, nil
}

// admit takes in who has arrived. Does not wait.
func (g *gate) admit(r *Receiver) {
	if !g.isStirred.Load() {
		return
	}
	g.mutex.Lock()
	defer g.mutex.Unlock()
	g.isStirred.Store(false)
	r.lanes = append(r.lanes, g.arrived...)
	g.arrived = nil
}

// shut ends it: nobody comes any more. Whose hand-shake is over, also if it is so only while this gives it up, is taken in, to be told: it
// may have asked already.
func (g *gate) shut(r *Receiver) {
	_ = g.listener.Close()
	g.mutex.Lock()
	g.isShut = true
	g.mutex.Unlock()
	g.done.Wait()
	g.admit(r)
}
