package kernel

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
)

// Users as the kernel names them to this process. One that the own user namespace does not map has the overflow uid, as any other such one: that uid
// stands for nobody, whoever this process is and whatever its options allow.

// overflowUID is that uid; -1 in a namespace that maps all users, such as the initial one, where the number is a user's. It is read once: a process
// that has no descriptor left for reading takes the usual number, and reads it another time.
func overflowUID() int {
	if known := knownOverflowUID.Load(); known != nil {
		return *known
	}
	const usual = 65534
	ids, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return usual
	}
	uid := -1
	if !slices.Equal(strings.Fields(string(ids)), []string{"0", "0", "4294967295"}) {
		text, err := os.ReadFile("/proc/sys/kernel/overflowuid")
		if err != nil {
			return usual
		}
		if uid, err = strconv.Atoi(strings.TrimSpace(string(text))); err != nil {
			return usual
		}
	}
	knownOverflowUID.Store(&uid)
	return uid
}

var knownOverflowUID atomic.Pointer[int]

// IsAllowed says whether it is this process's user, or one of those allowed.
func IsAllowed(uid int, allowed []int) bool {
	return (uid == os.Geteuid() || slices.Contains(allowed, uid)) && uid != overflowUID()
}

// Unmapped is for a refusal: what that uid stands for and what to do about it, if it is the overflow uid; else "".
func Unmapped(uid int) string {
	if uid != overflowUID() {
		return ""
	}
	return fmt.Sprintf("uid %d, which stands for every user that the user namespace of process %d does not map: map the user there, or run both sides in one user namespace",
		uid, os.Getpid())
}
