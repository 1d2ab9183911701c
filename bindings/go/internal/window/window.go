// Package window has the adaptive window: how many bytes of its lane a sender uses before it wraps to the front,
// while the receiver keeps up. The algorithm and its constants are those of the Rust library
// (docs/decisions/0031-window-sizes.md).
package window

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/directory"
	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/limits"
	"github.com/pelton-ipc/pelton/bindings/go/internal/memory"
	"golang.org/x/sys/unix"
)

const (
	processMax = 64 << 20
	// A measurement is the median of this many samples, each of this many bytes sent.
	samples     = 8
	sampleBytes = lane.Window
	// After a change, the sender completes two laps of the new window (the first one causes page faults) and this
	// many samples before it measures.
	settleSamples = 16
	// A sample that took longer means that the stream is not saturated. After this many in a row, or one pause, the
	// window shrinks.
	saturatedMax = time.Millisecond
	// The same, with the small window, if the receiver has emptied the lane, as in a serial call: a gigabyte a second.
	waitingMax     = 250 * time.Microsecond
	unsaturatedMax = 4
	pauseMin       = 100 * time.Millisecond
	// Samples before the first trial, and after a pause.
	firstRest = 4
	// Failed trials in a row before a window above levels[1] is tried: its page faults take 12 to 17 ms.
	failedBeforeLargest = 3
	// Samples until the memory outside the window is released, after a failed trial and after a pause.
	excessSamples    = 8192
	ExcessAfterPause = 8
)

// levels are the window sizes, far apart.
var levels = [...]uint64{lane.Window, 4 << 20, 16 << 20}

// rests are the samples between two trials, by the number of failed trials in a row.
var rests = [...]int{128, 512, 2048, 8192, 32768}

// Samples count their time from here: the first one is long, which a shrunk window ignores.
var processStart = time.Now()

// inUse is the sum of what the windows of this process's senders exceed their minimum by.
var inUse atomic.Int64

type phase uint8

const (
	resting phase = iota
	// Measures the current window.
	measuring
	// Uses another window than from, which took before nanoseconds per MiB, and does not measure yet.
	settling
	trying
)

type backlog uint8

const (
	// The lane is empty.
	empty backlog = iota
	// The lane holds messages, all within the window.
	within
	// The lane holds messages outside the window.
	beyond
)

// Window is that of one sender, and the state of its trials.
type Window struct {
	// Its limits, equal for a fixed window, and its size.
	BytesMin, BytesMax, Bytes uint64
	// This sender's part of the process's limit, held until the memory is released.
	Taken uint64
	phase phase
	// Samples left in this phase, and failed trials in a row.
	left, failedTrials int
	// The window before the trial, and its nanoseconds per MiB.
	from, before uint64
	triesLarger  bool
	unsaturated  int
	// Samples until the memory outside the window is released, plus one; 0: nothing to release.
	Excess int
	// Bytes sent and the time at the last sample.
	sent    uint64
	ns      time.Duration
	samples [samples]uint64
}

// New returns the window of a lane, limited to residentMax bytes; 0 means the default.
func New(producer *lane.Producer, residentMax int) Window {
	most := uint64(residentMax)
	if most == 0 {
		most = levels[len(levels)-1]
	}
	most = min(most, producer.Capacity())
	least := min(lane.Window, most)
	producer.SetWindow(least)
	// A predecessor of a path channel may have left some memory.
	return Window{BytesMin: least, BytesMax: most, Bytes: least, left: firstRest, Excess: ExcessAfterPause,
		sent: producer.SentBytes()}
}

// Follow adapts the window to the throughput. Call it before a reservation: it may release memory after the tail.
// role is nil except for path channels.
func (w *Window) Follow(producer *lane.Producer, m *memory.Lane, role *directory.Role) {
	if sent := producer.SentBytes(); sent-w.sent >= sampleBytes {
		w.followAt(sent, producer, m, role)
	}
}

// FollowPause shrinks the window after a pause. Call it after sending, where a system call was necessary anyway.
func (w *Window) FollowPause(producer *lane.Producer, m *memory.Lane, role *directory.Role) {
	if w.Taken > 0 && time.Since(processStart)-w.ns > pauseMin {
		w.followAt(producer.SentBytes(), producer, m, role)
	}
}

func (w *Window) followAt(sent uint64, producer *lane.Producer, m *memory.Lane, role *directory.Role) {
	// An invalid head is reported by the reservation that follows.
	unreleased, err := producer.PollHead()
	receiver := empty
	if err == nil && unreleased > 0 {
		receiver = within
		// A receiver that lacks only the last batch keeps up, however large that is.
		if producer.BacklogBytes() > max(producer.Window(), sent-w.sent) {
			receiver = beyond
		}
	}
	w.sample(sent, receiver, time.Since(processStart))
	backed := producer.Backed()
	// Path channels allocate the whole window now, so that a full file system ends the trial and does not fail a send.
	if current := producer.Window(); w.Bytes > current && w.Bytes > backed && role.Back(producer, m.Data, w.Bytes) != nil {
		// A disk's file system keeps what it had allocated before it was full.
		from, to := limits.RoundUp(backed, directory.BackedStepMin), min(limits.RoundUp(w.Bytes, directory.BackedStep),
			producer.Capacity())
		if from < to {
			_ = m.Data.Discard(from, to)
		}
		w.refuse(current)
	} else if w.Bytes != current {
		producer.SetWindow(w.Bytes)
	}
	if receiver != beyond && w.Excess == 1 {
		// A failure only leaves the memory allocated.
		kept := limits.RoundUp(w.Bytes, directory.BackedStepMin)
		if role != nil {
			// A path channel's first step stays allocated, so that few sends can fail.
			kept = max(kept, directory.BackedStep)
		}
		_ = ReleaseIdle(producer, m, kept, role != nil)
		w.Excess = 0
		w.setTaken(min(w.Taken, w.Bytes-w.BytesMin))
	}
}

// sample takes a sample; w.bytes is the window to use from now on.
func (w *Window) sample(sent uint64, receiver backlog, now time.Duration) {
	bytes, ns := sent-w.sent, now-w.ns
	w.sent, w.ns = sent, now
	if w.Excess > 1 {
		w.Excess--
	}
	if w.BytesMin == w.BytesMax {
		return
	}
	// The first sample too, as its interval begins when the process started.
	most := saturatedMax
	if receiver == empty && w.Bytes == w.BytesMin {
		most = waitingMax
	}
	if ns > most {
		w.unsaturated++
		if ns > pauseMin || w.unsaturated >= unsaturatedMax {
			w.Shrink()
			if ns > pauseMin {
				w.Excess = min(w.Excess, 1)
			}
		}
		return
	}
	w.unsaturated = 0
	if receiver == beyond && (w.phase == resting || w.phase == measuring) {
		// The lane already extends beyond its window, so another window would change nothing.
		w.phase, w.left = resting, max(w.left, firstRest)
		return
	}
	if receiver == beyond && w.phase == trying && w.Bytes < w.from {
		// The smaller window is not in effect, so its throughput cannot be measured.
		w.failTrial()
		return
	}
	w.left--
	if w.phase == measuring || w.phase == trying {
		// ns is below a millisecond, so this does not overflow.
		w.samples[w.left] = uint64(ns) << 20 / bytes
	}
	if w.left == 0 {
		w.turn()
	}
}

// Shrink reduces the window to its minimum and starts over.
func (w *Window) Shrink() {
	w.Use(w.BytesMin)
	w.Excess = min(w.Excess, ExcessAfterPause)
	if w.failedTrials == 0 {
		w.rest(firstRest)
	} else {
		w.rest(rests[w.failedTrials])
	}
}

// refuse keeps the window at this size for good, as the system has no memory for a larger one.
func (w *Window) refuse(bytes uint64) {
	w.BytesMax = bytes
	w.BytesMin = min(w.BytesMin, bytes)
	w.Use(bytes)
	w.rest(rests[len(rests)-1])
}

func (w *Window) turn() {
	switch w.phase {
	case resting:
		w.phase, w.left = measuring, samples
	case measuring:
		w.from, w.before = w.Bytes, w.median()
		if w.useAnother() {
			w.phase, w.left = settling, int(2*w.Bytes/sampleBytes)+settleSamples
		} else {
			w.rest(rests[2])
		}
	case settling:
		w.phase, w.left = trying, samples
	case trying:
		// A larger window has to be faster by a sixteenth; a smaller one must not be slower by more than that.
		after, pays := w.median(), false
		if w.from < w.Bytes {
			pays = after*17 < w.before*16
		} else {
			pays = after*16 < w.before*17
		}
		if !pays {
			w.failTrial()
			return
		}
		w.failedTrials = 0
		w.rest(rests[0])
	}
}

func (w *Window) failTrial() {
	// If the limit of the process does not permit it any more, the window stays smaller.
	w.Use(w.from)
	w.failedTrials = min(w.failedTrials+1, len(rests)-1)
	w.rest(rests[w.failedTrials])
}

func (w *Window) rest(samples int) { w.unsaturated, w.phase, w.left = 0, resting, samples }

func (w *Window) median() uint64 {
	slices.Sort(w.samples[:])
	return w.samples[samples/2]
}

// useAnother switches to the next larger or the next smaller window, alternating; it returns false if neither is
// possible, or if the larger one's trial has to wait.
func (w *Window) useAnother() bool {
	for range 2 {
		w.triesLarger = !w.triesLarger
		other := w.Bytes
		for _, level := range levels {
			level = min(max(level, w.BytesMin), w.BytesMax)
			if w.triesLarger && level > w.Bytes && other == w.Bytes || !w.triesLarger && level < w.Bytes {
				other = level
			}
		}
		if w.failedTrials < failedBeforeLargest && other > max(levels[1], w.Bytes) {
			return false
		}
		if other != w.Bytes && w.Use(other) {
			return true
		}
	}
	return false
}

// Use returns false if the process's limit does not permit it.
func (w *Window) Use(bytes uint64) bool {
	if bytes < w.Bytes {
		w.Excess = excessSamples
	} else if taken := bytes - w.BytesMin; taken > w.Taken && !w.setTaken(taken) {
		// Memory that was not released since counts already.
		return false
	}
	w.Bytes = bytes
	return true
}

// setTaken returns false if the process's limit does not permit more.
func (w *Window) setTaken(taken uint64) bool {
	more := int64(taken) - int64(w.Taken)
	if inUse.Add(more) > processMax && more > 0 {
		inUse.Add(-more)
		return false
	}
	w.Taken = taken
	return true
}

// Close ends the window with its sender.
func (w *Window) Close() {
	w.Bytes, w.BytesMax = w.BytesMin, w.BytesMin
	w.setTaken(0)
}

// wholePages returns the first byte of the first page that lies wholly in the range, and the byte after the last one.
// The range has no such page if the second is not greater.
func wholePages(from, to, page uint64) (uint64, uint64) {
	return (from + page - 1) / page * page, to / page * page
}

// ReleaseIdle releases memory that holds no message, except the first kept bytes of the lane.
func ReleaseIdle(producer *lane.Producer, m *memory.Lane, kept uint64, isPath bool) error {
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
		from, to := wholePages(offset, end, page)
		if from >= to {
			continue
		}
		if err := m.Data.Discard(from, to); err != nil {
			return fail.System("giving memory back", err)
		}
	}
	return nil
}
