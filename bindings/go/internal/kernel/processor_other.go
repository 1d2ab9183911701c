//go:build !amd64

package kernel

func cpuNodeLimit() (limit uint32, ok bool) { return 0, false }
