package wait

import (
	"os"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"golang.org/x/sys/unix"
)

// The constants of wait.rs, where each has its reason. A test compares them.
const (
	loadsPerClock = 32

	busyPollTime  = 50 * time.Microsecond
	bytesPerNS    = 4
	busyPollLarge = 100 * time.Microsecond

	scoreGood  = 4
	scoreFirst = 10
	scoreMax   = 16
	probeFirst = 8
	probeLast  = 64

	yieldMax          = 500 * time.Microsecond
	yieldRest         = 1024
	yieldDoublingsMax = 6
)

// A busy-poll that lasts longer lets other goroutines run, once; that of a service not each time, see
// doorbell.Own.Yield. That wakes a thread for them, which takes longer than most waits.
const yieldAfter = 5 * time.Microsecond

// Spin decides whether a side busy-polls before it sleeps: not where that was useless lately, nor if its peer shares
// its processor. docs/decisions/0037-busy-machine.md.
type Spin struct {
	// IsBusy makes waits poll without ever sleeping.
	IsBusy bool
	// Bytes are those of the last request of a service: large ones take the client longer, since it copies them.
	Bytes int
	// The peer's process that was checked for isOneProcessor, and whether one was.
	peer    int
	hasPeer bool
	// The peer is in this process.
	isOwnProcess bool
	// This process and the peer have only one processor.
	isOneProcessor bool
	// At the last wait, the peer's last ring came from this processor: the peer cannot run while this side polls.
	isPollUseless bool
	// The time of the ring that showed it. Each ring counts for one wait: an old one says nothing about now.
	sharedAtNS uint64
	// How useful busy-polls were lately.
	score uint8
	// Waits without a busy-poll since the last probe, and from one probe to the next.
	skipped, interval uint16
	// The waits left that do not yield, and the doublings of their number.
	rest, doublings uint
}

// New returns the policy of a new side.
func New(isBusy bool) Spin {
	return Spin{IsBusy: isBusy, score: scoreFirst, interval: probeFirst}
}

// setPeer counts the processors that this process and the peer may use, unless it has done so for this peer.
func (s *Spin) setPeer(pid int) {
	if s.hasPeer && s.peer == pid {
		return
	}
	s.peer, s.hasPeer, s.isOwnProcess = pid, true, pid == os.Getpid()
	var own, peers unix.CPUSet
	if unix.SchedGetaffinity(0, &own) != nil {
		return
	}
	// On a path channel the peer's page states the process: it may be anything.
	if pid > 0 && unix.SchedGetaffinity(pid, &peers) == nil {
		for i := range own {
			own[i] |= peers[i]
		}
	}
	s.isOneProcessor = own.Count() == 1
}

// nextTime returns the time of the next busy-poll: zero for none. ring is the peer's last one. Call it once per wait.
func (s *Spin) nextTime(ring lane.LastRing, processor func() uint32) time.Duration {
	// In one process, the peer's goroutine may run on another thread, or on this one after the poll's runtime.Gosched.
	// Without this exception both goroutines parked for each call, which took 4.8 µs; by the policy before, 1.9.
	// A side that only polls is never rung, so what it reads is of an earlier peer.
	isCounted := !s.isOwnProcess && !s.IsBusy && ring.Processor != 0 && ring.AtNS != s.sharedAtNS
	isShared := isCounted && ring.Processor == processor()
	if isShared {
		s.sharedAtNS = ring.AtNS
	}
	s.isPollUseless = s.isOneProcessor || isShared
	if s.isPollUseless {
		return 0
	}
	if s.score < scoreGood {
		s.skipped++
		if s.skipped < s.interval {
			return 0
		}
		s.skipped = 0
	}
	return min(busyPollTime+time.Duration(s.Bytes/bytesPerNS), busyPollLarge)
}

func (s *Spin) hasPaid() {
	if s.score < scoreGood {
		s.score, s.interval = scoreFirst, probeFirst
	} else {
		s.score = min(s.score+1, scoreMax)
	}
}

func (s *Spin) hasFailed() {
	if s.score >= scoreGood {
		s.score -= 2
	} else {
		s.interval = min(s.interval*2, probeLast)
	}
}

func (s *Spin) mayYield() bool {
	if s.rest > 0 {
		s.rest--
		return false
	}
	return true
}

func (s *Spin) hasYielded(took time.Duration) {
	if took > yieldMax {
		s.rest = yieldRest << s.doublings
		s.doublings = min(s.doublings+1, yieldDoublingsMax)
	} else {
		s.doublings = max(s.doublings, 1) - 1
	}
}
