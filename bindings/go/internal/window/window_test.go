package window

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
)

// simulated is a sender with a simulated clock.
type simulated struct {
	Window
	random *rand.Rand
	now    time.Duration
	bytes  uint64
}

func newSimulated(residentMax uint64) *simulated {
	s := &simulated{random: rand.New(rand.NewPCG(residentMax, 1)), now: time.Hour}
	s.Window = Window{BytesMin: lane.Window, BytesMax: residentMax, Bytes: lane.Window, left: firstRest}
	return s
}

// run takes samples of the mean duration that cost returns for the window, with a random deviation of a third, and
// one in ten three times as long. It returns bytes per nanosecond.
func (s *simulated) run(samples int, cost func(window uint64) time.Duration) float64 {
	bytes, begun := s.bytes, s.now
	for range samples {
		mean := cost(s.Window.Bytes)
		took := mean*2/3 + time.Duration(s.random.Int64N(int64(mean*2/3)+1))
		if s.random.IntN(10) == 0 {
			took *= 3
		}
		s.now += took
		s.bytes += sampleBytes + s.random.Uint64N(1000)
		s.sample(s.bytes, within, s.now)
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
		for _, fixed := range levels {
			best = max(best, newSimulated(lane.Window).run(10_000, func(uint64) time.Duration { return cost(fixed) }))
		}
		s := newSimulated(16 << 20)
		s.run(40_000, cost)
		if found := s.run(20_000, cost); found < 0.9*best {
			t.Errorf("%v: %f of %f, at %d bytes", costs, found, best, s.Window.Bytes)
		}
		s.Close()
	}
}

func TestASenderThatIsNotSaturatedKeepsToTheSmallWindow(t *testing.T) {
	s := newSimulated(16 << 20)
	for range 10_000 {
		s.bytes += sampleBytes
		s.now += 1500 * time.Microsecond
		s.sample(s.bytes, within, s.now)
		s.bytes += sampleBytes
		s.now += waitingMax + 1
		s.sample(s.bytes, empty, s.now)
		if s.Window.Bytes != lane.Window {
			t.Fatal(s.Window.Bytes)
		}
	}
	// And comes back to it.
	for _, pause := range []time.Duration{pauseMin + 1, 5 * time.Millisecond} {
		for range 100_000 {
			if s.Window.Bytes == lane.Window {
				s.run(1, func(window uint64) time.Duration { return 20 * time.Second / time.Duration(window) })
			}
		}
		if s.Window.Bytes == lane.Window {
			t.Fatal("the larger window was not found")
		}
		for range unsaturatedMax {
			s.bytes += sampleBytes
			s.now += pause
			s.sample(s.bytes, within, s.now)
		}
		if s.Window.Bytes != lane.Window || s.Excess > ExcessAfterPause {
			t.Fatal(s.Window.Bytes, s.Excess)
		}
	}
}

func TestSerialCallsUseTheWindowThatMakesThemFaster(t *testing.T) {
	for _, larger := range []time.Duration{waitingMax / 3, waitingMax} {
		s := newSimulated(4 << 20)
		fresh, atLarger := 16, 0
		for range 4_000 {
			took := waitingMax / 2
			if s.Window.Bytes == lane.Window {
				fresh = 16
			} else if took = larger; fresh > 0 {
				// The pages of the larger window are new at first.
				fresh--
				took = 3 * waitingMax
			}
			s.bytes += sampleBytes
			s.now += took
			s.sample(s.bytes, empty, s.now)
			if s.Window.Bytes > lane.Window {
				atLarger++
			}
		}
		if isFaster := larger < waitingMax/2; atLarger == 0 || (atLarger > 2_000) != isFaster {
			t.Errorf("%v: %d of 4,000 samples with the larger window", larger, atLarger)
		}
		s.Close()
	}
}

func TestAllSendersOfAProcessTogetherAreBounded(t *testing.T) {
	before := inUse.Load()
	var all []*simulated
	for range 40 {
		s := newSimulated(16 << 20)
		s.run(2_000, func(window uint64) time.Duration { return 20 * time.Second / time.Duration(window) })
		all = append(all, s)
	}
	if used := inUse.Load(); used > processMax || used < processMax/2 {
		t.Fatal(used)
	}
	for _, s := range all {
		s.Close()
	}
	if after := inUse.Load(); after != before {
		t.Fatal(before, after)
	}
}

func TestOnlyWholePagesAreReleasedWhateverTheirSize(t *testing.T) {
	for _, page := range []uint64{4 << 10, 16 << 10, 64 << 10} {
		for _, idle := range [][2]uint64{{0, 4096}, {64, 3 * page}, {page - 64, 2*page + 64}, {4096, 1 << 20}} {
			from, to := wholePages(idle[0], idle[1], page)
			if from%page != 0 || to%page != 0 || from < idle[0] || to > idle[1] || from-idle[0] >= page || idle[1]-to >= page {
				t.Errorf("pages of %d bytes in %v: %d to %d", page, idle, from, to)
			}
		}
	}
}
