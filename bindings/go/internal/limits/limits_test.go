package limits

import (
	"testing"
)

func TestAShareGrowsAsLongAsTheBudgetHasAsMuchLeft(t *testing.T) {
	b := NewBudget(120)
	var shares [3]Client
	var parts [3]Share
	// Each gets half of what the earlier ones left.
	for n, bytes := range []uint64{60, 30, 15} {
		c, p := &shares[n], &parts[n]
		c.Budget = b
		if c.left() != bytes || c.Grow(p, bytes+1) || c.Grow(p, 1<<64-1) || !c.Grow(p, bytes-1) || c.Grow(p, 2) ||
			!c.Grow(p, 1) || c.Grow(p, 1) {
			t.Fatal(n, c.left(), *p)
		}
	}
	if b.Left() != 15 {
		t.Fatal(b.Left())
	}
	for n := range shares {
		if shares[n].left() != 0 || !shares[n].Grow(&parts[n], 0) {
			t.Fatal(n, shares[n].left())
		}
	}
	for n := range parts {
		parts[n].ShrinkTo(0)
	}
	for n := range shares {
		if b.Left() != 120 || shares[n].left() != 60 {
			t.Fatal(n, b.Left(), shares[n].left())
		}
	}
}
