package kernel

// cpuNodeLimit returns the limit of Linux's segment for the vDSO's getcpu; false if there is no such segment.
func cpuNodeLimit() (limit uint32, ok bool)
