package pelton

import (
	"math/rand/v2"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pelton/internal/lane"
)

// simulated is a sender with a simulated clock.
type simulated struct {
	window
	random *rand.Rand
	now    time.Duration
	bytes  uint64
}

func newSimulated(residentMax uint64) *simulated {
	s := &simulated{random: rand.New(rand.NewPCG(residentMax, 1)), now: time.Hour}
	s.window = window{bytesMin: lane.Window, bytesMax: residentMax, bytes: lane.Window, left: windowFirstRest}
	return s
}

// run takes samples of the mean duration that cost returns for the window, with a random deviation of a third, and one in ten three times as
// long. It returns bytes per nanosecond.
func (s *simulated) run(samples int, cost func(window uint64) time.Duration) float64 {
	bytes, begun := s.bytes, s.now
	for range samples {
		mean := cost(s.window.bytes)
		took := mean*2/3 + time.Duration(s.random.Int64N(int64(mean*2/3)+1))
		if s.random.IntN(10) == 0 {
			took *= 3
		}
		s.now += took
		s.bytes += windowSample + s.random.Uint64N(1000)
		s.sample(s.bytes, keepsUp, s.now)
	}
	return float64(s.bytes-bytes) / float64(s.now-begun)
}

func TestTheWindowThatBringsMostIsFound(t *testing.T) {
	for _, costs := range [][3]time.Duration{{90, 30, 60}, {40, 60, 90}, {50, 50, 50}, {60, 40, 30}} {
		cost := func(window uint64) time.Duration {
			switch {
			case window > 4<<20:
				return costs[2] * time.Microsecond
			case window > lane.Window:
				return costs[1] * time.Microsecond
			}
			return costs[0] * time.Microsecond
		}
		best := 0.0
		for _, fixed := range windowLevels {
			best = max(best, newSimulated(lane.Window).run(10_000, func(uint64) time.Duration { return cost(fixed) }))
		}
		s := newSimulated(16 << 20)
		s.run(5_000, cost)
		if found := s.run(20_000, cost); found < 0.9*best {
			t.Errorf("%v: %f of %f, at %d bytes", costs, found, best, s.window.bytes)
		}
		s.drop()
	}
}

func TestASenderThatIsNotSaturatedKeepsToTheSmallWindow(t *testing.T) {
	s := newSimulated(16 << 20)
	for range 10_000 {
		s.bytes += windowSample
		s.now += 1500 * time.Microsecond
		s.sample(s.bytes, keepsUp, s.now)
		s.bytes += windowSample
		s.now += 50 * time.Microsecond
		s.sample(s.bytes, keepsWaiting, s.now)
		if s.window.bytes != lane.Window {
			t.Fatal(s.window.bytes)
		}
	}
	// And comes back to it.
	for _, pause := range []time.Duration{windowPause + 1, 5 * time.Millisecond} {
		for range 100_000 {
			if s.window.bytes == lane.Window {
				s.run(1, func(window uint64) time.Duration { return 20 * time.Second / time.Duration(window) })
			}
		}
		if s.window.bytes == lane.Window {
			t.Fatal("the larger window was not found")
		}
		for range windowUnsaturated {
			s.bytes += windowSample
			s.now += pause
			s.sample(s.bytes, keepsUp, s.now)
		}
		if s.window.bytes != lane.Window || s.excess > windowExcessOfPause {
			t.Fatal(s.window.bytes, s.excess)
		}
	}
}

func TestAllSendersOfAProcessTogetherAreBounded(t *testing.T) {
	before := windowsInUse.Load()
	var all []*simulated
	for range 40 {
		s := newSimulated(16 << 20)
		s.run(2_000, func(window uint64) time.Duration { return 20 * time.Second / time.Duration(window) })
		all = append(all, s)
	}
	if used := windowsInUse.Load(); used > windowProcessMax || used < windowProcessMax/2 {
		t.Fatal(used)
	}
	for _, s := range all {
		s.drop()
	}
	if after := windowsInUse.Load(); after != before {
		t.Fatal(before, after)
	}
}

func TestAWindowThatShrinksGivesItsMemoryBack(t *testing.T) {
	sender, receiver := pair(t, &Options{Capacity: 32 << 20, Wait: Spin})
	ctx := soon(t)
	s := &sender.window
	blocks := func() int64 {
		var stat unix.Stat_t
		if err := unix.Fstat(sender.memory.data.fd, &stat); err != nil {
			t.Fatal(err)
		}
		return stat.Blocks * 512
	}
	message := make([]byte, 60_000)
	pass := func(bytes int) {
		for range bytes / len(message) {
			if err := sender.Send(ctx, message); err != nil {
				t.Fatal(err)
			}
			must(receiver.Receive(ctx)).Release()
		}
	}
	// The lane is never empty.
	if err := sender.Send(ctx, message); err != nil {
		t.Fatal(err)
	}
	// As in a trial that does not end.
	if !s.use(16 << 20) {
		t.Fatal("the process's senders use too much")
	}
	s.bytesMin, s.bytesMax = s.bytes, s.bytes
	sender.lane.SetWindow(s.bytes)
	pass(20 << 20)
	if used := blocks(); used < 15<<20 {
		t.Fatal(used)
	}
	s.bytesMin, s.bytesMax = lane.Window, lane.Window
	s.use(lane.Window)
	sender.lane.SetWindow(s.bytes)
	s.excess = windowExcessOfPause
	pass(40 << 20)
	if used := blocks(); used > 1<<20 || s.excess != 0 {
		t.Fatal(used, s.excess)
	}
	if s.taken != 0 {
		t.Fatal(s.taken)
	}
	pass(1 << 20)
}
