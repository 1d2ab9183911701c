package kernel

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
)

// A user that the own user namespace does not map has the overflow uid, like every other such user. So that uid
// stands for no particular user: it is refused, whatever uid this process has and whatever its options permit.

// overflowUID returns that uid, or -1 in a namespace that maps all users, where the number is an ordinary user's. It
// is read once. A process without a free descriptor uses the usual number, and reads it another time.
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

// IsAllowed reports whether uid is this process's user or one of those allowed.
func IsAllowed(uid int, allowed []int) bool {
	return (uid == os.Geteuid() || slices.Contains(allowed, uid)) && uid != overflowUID()
}

// Unmapped returns, for a refusal, what the overflow uid stands for and what to do about it; "" for another uid.
func Unmapped(uid int) string {
	if uid != overflowUID() {
		return ""
	}
	return fmt.Sprintf("uid %d, which stands for every user that the user namespace of process %d does not map: map the user there, or run both sides in one user namespace",
		uid, os.Getpid())
}
