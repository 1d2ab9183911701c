package wait

import (
	"slices"
	"testing"
	"time"
)

// The same three tests as of the Rust library's policy.

func TestForASlowPeerOnlyRareLongSpinsRemainUntilOneSucceeds(t *testing.T) {
	var spin Spin
	var spins []time.Duration
	spent := time.Duration(0)
	for range 10_000 {
		spins = append(spins, spin.longest())
		spent += spin.longest()
		spin.hasFailed()
	}
	// Less than a percent of a sleep and a wake-up, which take some 25 µs.
	if spent >= 250*time.Nanosecond*10_000 || !slices.Contains(spins[9_000:], spinLong) {
		t.Fatal(spent)
	}
	for spin.longest() != spinLong {
		spin.hasFailed()
	}
	if spin.hasPaid(); spin.longest() != spinMax {
		t.Fatal(spin.longest())
	}
}

func TestEachSuccessWithoutASpinMakesTheNextSpinsLonger(t *testing.T) {
	var spin Spin
	for range 40 {
		spin.hasFailed()
	}
	if spin.longest() != 0 {
		t.Fatal(spin.longest())
	}
	if spin.hasPaid(); spin.longest() != spinMax/8 {
		t.Fatal(spin.longest())
	}
	for range 3 {
		spin.hasPaid()
	}
	if spin.longest() != spinMax {
		t.Fatal(spin.longest())
	}
}

func TestEachYieldThatCostsATimeSliceMakesYieldsRarer(t *testing.T) {
	var spin Spin
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
