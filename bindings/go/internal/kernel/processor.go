package kernel

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Processor returns the number, plus 1, of the processor that this goroutine runs on, or 0 if it is unknown. The
// goroutine may move to another at any time.
//
// On x86-64 the number is in a segment's limit, which Linux sets on each processor for its own vDSO: that takes 17 ns,
// and any processor can read it. RDTSCP takes 19 ns and RDPID 2, but old processors lack them. Elsewhere, and under an
// emulator without that segment, this is a system call of some 150 ns.
func Processor() uint32 {
	if limit, ok := cpuNodeLimit(); ok {
		return limit&cpuNodeMask + 1
	}
	var number uint32
	_, _, errno := unix.RawSyscall(unix.SYS_GETCPU, uintptr(unsafe.Pointer(&number)), 0, 0)
	if errno != 0 {
		return 0
	}
	return number + 1
}

// The limit is the processor's number with its NUMA node above these bits.
const cpuNodeMask = 1<<12 - 1

// Preemptions returns how often the kernel took a processor from a thread of this process that wanted to run on, for
// any other thread.
func Preemptions() int64 {
	var usage unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &usage) != nil {
		return 0
	}
	return int64(usage.Nivcsw)
}
