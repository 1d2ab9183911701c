package wait

import (
	"errors"
	"math"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"golang.org/x/sys/unix"
)

// The main goroutine keeps the first thread, so no test pins that one: it stands for the process.
func init() { runtime.LockOSThread() }

func TestTheConstantsAreThoseOfRust(t *testing.T) {
	text, err := os.ReadFile("../../../../crates/pelton-channel/src/wait.rs")
	if errors.Is(err, os.ErrNotExist) {
		t.Skip("the module in a user's cache is without the Rust library")
	}
	if err != nil {
		t.Fatal(err)
	}
	own := map[string]int64{
		"LOADS_PER_CLOCK": loadsPerClock, "BUSY_POLL": int64(busyPollTime),
		"SCORE_GOOD": scoreGood, "SCORE_FIRST": scoreFirst, "SCORE_MAX": scoreMax, "PROBE_FIRST": probeFirst,
		"PROBE_LAST": probeLast, "YIELD_MAX": int64(yieldMax), "YIELD_REST": yieldRest,
		"YIELD_DOUBLINGS_MAX": yieldDoublingsMax, "BYTES_PER_NS": bytesPerNS, "BUSY_POLL_LARGE": int64(busyPollLarge),
	}
	constant := regexp.MustCompile(`(?m)^(?:pub )?const (\w+): \w+ = (.*);$`)
	for _, found := range constant.FindAllStringSubmatch(string(text), -1) {
		name, value := found[1], found[2]
		unit := int64(1)
		if micros, isTime := strings.CutPrefix(value, "Duration::from_micros("); isTime {
			value, unit = strings.TrimSuffix(micros, ")"), int64(time.Microsecond)
		}
		wanted, err := strconv.ParseInt(strings.ReplaceAll(value, "_", ""), 10, 64)
		if err != nil {
			t.Fatalf("%s is %q in wait.rs, wanted a number or Duration::from_micros: teach this test", name, found[2])
		}
		if value, isOwn := own[name]; !isOwn || value != wanted*unit {
			t.Errorf("%s is %d in wait.rs, and %d here (0: absent): change policy.go", name, wanted*unit, value)
		}
		delete(own, name)
	}
	if len(own) > 0 {
		t.Errorf("wait.rs has no %v", own)
	}
}

func nowhere() uint32 { return 0 }

func TestForASlowPeerOnlyRareProbesRemainUntilOneSucceeds(t *testing.T) {
	spin := New(false)
	var polls []time.Duration
	spent := time.Duration(0)
	next := func() time.Duration { return spin.nextTime(lane.LastRing{}, nowhere) }
	for range 10_000 {
		limit := next()
		polls = append(polls, limit)
		if spent += limit; limit > 0 {
			spin.hasFailed()
		}
	}
	if spent >= 900*time.Nanosecond*10_000 {
		t.Fatal(spent)
	}
	if !slices.ContainsFunc(polls[9_900:], func(limit time.Duration) bool { return limit > 0 }) {
		t.Fatal("the probes cease")
	}
	for next() == 0 {
	}
	spin.hasPaid()
	for range 3 {
		if next() == 0 {
			t.Fatal("after a probe that paid, a wait does not poll")
		}
	}
}

func TestNobodyPollsForAPeerOnTheSameProcessor(t *testing.T) {
	spin := New(false)
	at := uint64(0)
	on := func(number uint32) func() uint32 { return func() uint32 { return number } }
	for _, c := range []struct {
		rings, waits uint32
		wanted       time.Duration
	}{
		{1, 1, 0}, {1, 2, busyPollTime}, {math.MaxUint32, 2, busyPollTime}, {math.MaxUint32, math.MaxUint32, 0},
		// Unknown on either side, or both.
		{0, 1, busyPollTime}, {1, 0, busyPollTime}, {0, 0, busyPollTime},
	} {
		at++
		limit := spin.nextTime(lane.LastRing{Processor: c.rings, AtNS: at}, on(c.waits))
		if limit != c.wanted || spin.isPollUseless != (c.wanted == 0) {
			t.Errorf("%+v: %v", c, limit)
		}
	}
	// Each ring counts for one wait.
	for _, wanted := range []time.Duration{0, busyPollTime} {
		if limit := spin.nextTime(lane.LastRing{Processor: 1, AtNS: at + 1}, on(1)); limit != wanted {
			t.Error(limit)
		}
	}
	polls := New(true)
	spin.setPeer(os.Getpid())
	spin.isOneProcessor = false
	for _, spin := range []*Spin{&spin, &polls} {
		if limit := spin.nextTime(lane.LastRing{Processor: 1, AtNS: at + 2}, on(1)); limit != busyPollTime {
			t.Errorf("for a peer in this process, or by a side that only polls: %v", limit)
		}
	}
	spin.isOneProcessor = true
	if limit := spin.nextTime(lane.LastRing{}, nowhere); limit != 0 || !spin.isPollUseless {
		t.Error(limit)
	}
}

func TestASideCountsItsProcessorsAndItsPeers(t *testing.T) {
	var all, one unix.CPUSet
	// The thread ends with this goroutine, so its pin does too.
	runtime.LockOSThread()
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		t.Fatal(err)
	}
	for cpu := 0; one.Count() == 0; cpu++ {
		if all.IsSet(cpu) {
			one.Set(cpu)
		}
	}
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		t.Fatal(err)
	}
	// The first thread of this process is not pinned. No process has the others, which a peer's page may state.
	for pid, isOne := range map[int]bool{
		0: true, os.Getpid(): all.Count() == 1, -1: true, 1 << 22: true, math.MaxUint32: true, math.MinInt: true,
	} {
		spin := New(false)
		if spin.setPeer(pid); spin.isOneProcessor != isOne {
			t.Errorf("with process %d: %v", pid, spin.isOneProcessor)
		}
	}
}

func TestEachYieldThatCostsATimeSliceMakesYieldsRarer(t *testing.T) {
	spin := New(false)
	var rests []uint
	for range 9 {
		if !spin.mayYield() {
			t.Fatal("it rests")
		}
		spin.hasYielded(8 * yieldMax)
		rests = append(rests, spin.rest)
		spin.rest = 0
	}
	if !slices.Equal(rests, []uint{1024, 2048, 4096, 8192, 16384, 32768, 65536, 65536, 65536}) {
		t.Fatal(rests)
	}
	for range 9 {
		spin.hasYielded(yieldMax / 100)
	}
	if !spin.mayYield() || spin.doublings != 0 {
		t.Fatal(spin)
	}
}
