package pelton

import (
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"pelton/internal/fail"
	"pelton/internal/lane"
)

// Adaptive window: how many bytes of its lane a sender uses before it wraps to the front, while the receiver keeps up. The algorithm and
// its constants are those of the Rust implementation (docs/decisions/0031-window-sizes.md).

const (
	windowProcessMax = 64 << 20
	// A measurement is the median of this many samples, each of this many bytes sent.
	windowSamples = 8
	windowSample  = lane.Window
	// After a change, the sender completes two laps of the new window (the first one causes page faults) and this many samples before it
	// measures.
	windowSettle = 16
	// A sample that took longer means that the stream is not saturated. After this many in a row, or one pause, the window shrinks.
	windowSaturated   = time.Millisecond
	windowUnsaturated = 4
	windowPause       = 100 * time.Millisecond
	// Samples before the first trial, and after a pause.
	windowFirstRest = 4
	// Samples until the memory outside the window is released, after a failed trial and after a pause.
	windowExcess        = 8192
	windowExcessOfPause = 8
)

// windowLevels are the window sizes, far apart.
var windowLevels = [...]uint64{lane.Window, 4 << 20, 16 << 20}

// windowRests are the samples between two trials, by the number of failed trials in a row.
var windowRests = [...]int{128, 512, 2048, 8192, 32768}

// Samples count their time from here: the first one is long, which a shrunk window ignores.
var processStart = time.Now()

// windowsInUse is the sum of what the windows of this process's senders exceed their minimum by.
var windowsInUse atomic.Int64

type windowPhase uint8

const (
	windowResting windowPhase = iota
	// Measures the current window.
	windowMeasures
	// Uses another window than from, which took before nanoseconds per MiB, and does not measure yet.
	windowSettles
	windowTries
)

type receiverKeeps uint8

const (
	// The lane is empty.
	keepsWaiting receiverKeeps = iota
	// The lane holds messages, all within the window.
	keepsUp
	// The lane holds messages outside the window.
	keepsBehind
)

// window is that of one sender, and the state of its trials.
type window struct {
	// Its limits, equal for a fixed window, and its size.
	bytesMin, bytesMax, bytes uint64
	// This sender's part of the process's limit, held until the memory is released.
	taken uint64
	phase windowPhase
	// Samples left in this phase, and failed trials in a row.
	left, patience int
	// The window before the trial, and its nanoseconds per MiB.
	from, before uint64
	triesLarger  bool
	unsaturated  int
	// Samples until the memory outside the window is released, plus one; 0: nothing to release.
	excess int
	// Bytes sent and the time at the last sample.
	sent    uint64
	ns      time.Duration
	samples [windowSamples]uint64
}

// newWindow returns the window of a lane, limited to residentMax bytes; 0 means the default.
func newWindow(producer *lane.Producer, residentMax int) window {
	most := uint64(residentMax)
	if most == 0 {
		most = windowLevels[len(windowLevels)-1]
	}
	most = min(most, producer.Capacity())
	least := min(lane.Window, most)
	producer.SetWindow(least)
	// A predecessor of a path channel may have left some memory.
	return window{bytesMin: least, bytesMax: most, bytes: least, left: windowFirstRest, excess: windowExcessOfPause, sent: producer.SentBytes()}
}

// follow adapts the window to the throughput. Call it before reserving room: it may release memory behind the tail. place is nil except for
// path channels.
func (w *window) follow(producer *lane.Producer, m *memory, place *pathRole) {
	if sent := producer.SentBytes(); sent-w.sent >= windowSample {
		w.followAt(sent, producer, m, place)
	}
}

// followPause shrinks the window after a pause. Call it after sending, where a system call was necessary anyway.
func (w *window) followPause(producer *lane.Producer, m *memory, place *pathRole) {
	if w.taken > 0 && time.Since(processStart)-w.ns > windowPause {
		w.followAt(producer.SentBytes(), producer, m, place)
	}
}

func (w *window) followAt(sent uint64, producer *lane.Producer, m *memory, place *pathRole) {
	// An invalid head is reported by the reservation that follows.
	unreleased, err := producer.PollHead()
	receiver := keepsWaiting
	if err == nil && unreleased > 0 {
		receiver = keepsUp
		if producer.BacklogBytes() > producer.Window() {
			receiver = keepsBehind
		}
	}
	w.sample(sent, receiver, time.Since(processStart))
	backed := producer.Backed()
	// Path channels allocate the whole window now, so that a full file system ends the trial and does not fail a send.
	if current := producer.Window(); w.bytes > current && w.bytes > backed && place.back(producer, m, w.bytes) != nil {
		// A disk's file system keeps what it had allocated before it was full.
		from, to := roundUp(backed, uint64(len(zeros))), min(roundUp(w.bytes, backedStep), producer.Capacity())
		if from < to {
			_ = m.data.release(from, to)
		}
		w.refuse(current)
	} else if w.bytes != current {
		producer.SetWindow(w.bytes)
	}
	if receiver != keepsBehind && w.excess == 1 {
		// A failure only leaves the memory allocated.
		kept := roundUp(w.bytes, uint64(len(zeros)))
		if place != nil {
			// A path channel's first step stays allocated, so that few sends can fail.
			kept = max(kept, backedStep)
		}
		_ = giveBack(producer, m, kept, place != nil)
		w.excess = 0
		w.setTaken(min(w.taken, w.bytes-w.bytesMin))
	}
}

// sample takes a sample; w.bytes is the window to use from now on.
func (w *window) sample(sent uint64, receiver receiverKeeps, now time.Duration) {
	bytes, ns := sent-w.sent, now-w.ns
	w.sent, w.ns = sent, now
	if w.excess > 1 {
		w.excess--
	}
	if w.bytesMin == w.bytesMax {
		return
	}
	// The first sample too, as its interval begins when the process started.
	if ns > windowSaturated || receiver == keepsWaiting {
		w.unsaturated++
		if ns > windowPause || w.unsaturated >= windowUnsaturated {
			w.shrink()
			if ns > windowPause {
				w.excess = min(w.excess, 1)
			}
		}
		return
	}
	w.unsaturated = 0
	if receiver == keepsBehind && (w.phase == windowResting || w.phase == windowMeasures) {
		// The lane already extends beyond its window, so another window would change nothing.
		w.phase, w.left = windowResting, max(w.left, windowFirstRest)
		return
	}
	if receiver == keepsBehind && w.phase == windowTries && w.bytes < w.from {
		// The smaller window is not in effect, so its throughput cannot be measured.
		w.failTrial()
		return
	}
	w.left--
	if w.phase == windowMeasures || w.phase == windowTries {
		// ns is below a millisecond, so this does not overflow.
		w.samples[w.left] = uint64(ns) << 20 / bytes
	}
	if w.left == 0 {
		w.turn()
	}
}

// shrink reduces the window to its minimum and starts over.
func (w *window) shrink() {
	w.use(w.bytesMin)
	w.excess = min(w.excess, windowExcessOfPause)
	if w.patience == 0 {
		w.rest(windowFirstRest)
	} else {
		w.rest(windowRests[w.patience])
	}
}

// refuse keeps the window at this size for good, as the system has no memory for a larger one.
func (w *window) refuse(bytes uint64) {
	w.bytesMax = bytes
	w.use(bytes)
	w.rest(windowRests[len(windowRests)-1])
}

func (w *window) turn() {
	switch w.phase {
	case windowResting:
		w.phase, w.left = windowMeasures, windowSamples
	case windowMeasures:
		w.from, w.before = w.bytes, w.median()
		if w.useAnother() {
			w.phase, w.left = windowSettles, int(2*w.bytes/windowSample)+windowSettle
		} else {
			w.rest(windowRests[2])
		}
	case windowSettles:
		w.phase, w.left = windowTries, windowSamples
	case windowTries:
		// A larger window has to be faster by a sixteenth; a smaller one must not be slower by more than that.
		after, pays := w.median(), false
		if w.from < w.bytes {
			pays = after*17 < w.before*16
		} else {
			pays = after*16 < w.before*17
		}
		if !pays {
			w.failTrial()
			return
		}
		w.patience = 0
		w.rest(windowRests[0])
	}
}

func (w *window) failTrial() {
	// If the limit of the process does not permit it any more, the window stays smaller.
	w.use(w.from)
	w.patience = min(w.patience+1, len(windowRests)-1)
	w.rest(windowRests[w.patience])
}

func (w *window) rest(samples int) { w.unsaturated, w.phase, w.left = 0, windowResting, samples }

func (w *window) median() uint64 {
	slices.Sort(w.samples[:])
	return w.samples[windowSamples/2]
}

// useAnother switches to the next larger or the next smaller window, alternating; it returns false if neither is possible.
func (w *window) useAnother() bool {
	for range 2 {
		w.triesLarger = !w.triesLarger
		other := w.bytes
		for _, level := range windowLevels {
			level = min(max(level, w.bytesMin), w.bytesMax)
			if w.triesLarger && level > w.bytes && other == w.bytes || !w.triesLarger && level < w.bytes {
				other = level
			}
		}
		if other != w.bytes && w.use(other) {
			return true
		}
	}
	return false
}

// use returns false if the process's limit does not permit it.
func (w *window) use(bytes uint64) bool {
	if bytes < w.bytes {
		w.excess = windowExcess
	} else if taken := bytes - w.bytesMin; taken > w.taken && !w.setTaken(taken) {
		// Memory that was not released since counts already.
		return false
	}
	w.bytes = bytes
	return true
}

// setTaken returns false if the process's limit does not permit more.
func (w *window) setTaken(taken uint64) bool {
	more := int64(taken) - int64(w.taken)
	if windowsInUse.Add(more) > windowProcessMax && more > 0 {
		windowsInUse.Add(-more)
		return false
	}
	w.taken = taken
	return true
}

// drop ends the window with its sender.
func (w *window) drop() {
	w.bytes, w.bytesMax = w.bytesMin, w.bytesMin
	w.setTaken(0)
}

// giveBack releases memory that holds no message, except the first kept bytes of the lane.
func giveBack(producer *lane.Producer, m *memory, kept uint64, isPath bool) error {
	page := uint64(unix.Getpagesize())
	for _, idle := range producer.Idle() {
		end := idle[0] + idle[1]
		offset := max(idle[0], kept)
		if offset >= end {
			continue
		}
		if isPath {
			producer.SetBacked(min(producer.Backed(), offset))
		}
		from, to := (offset+page-1)/page*page, end/page*page
		if from >= to {
			continue
		}
		if err := m.data.release(from, to); err != nil {
			return fail.System("giving memory back", err)
		}
	}
	return nil
}

func roundUp(bytes, unit uint64) uint64 { return (bytes + unit - 1) / unit * unit }
