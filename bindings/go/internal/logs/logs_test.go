package logs

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestASecondHasOneRecordAndTheNextOneCountsTheOthers(t *testing.T) {
	var l Limited
	for number, step := range []struct {
		now     time.Duration
		leftOut int64
		ok      bool
	}{
		{5, 0, true}, {5, 0, false}, {6, 0, false}, {interval + 4, 0, false}, {interval + 5, 3, true},
		{9 * interval, 0, true},
	} {
		if leftOut, ok := l.admit(step.now); leftOut != step.leftOut || ok != step.ok {
			t.Errorf("step %d: %d, %v, wanted %d, %v", number, leftOut, ok, step.leftOut, step.ok)
		}
	}
}

func TestOfGoroutinesAtTheSameTimeOneHasTheRecordAndEachCountsOnce(t *testing.T) {
	var l Limited
	var records, leftOut atomic.Int64
	var all sync.WaitGroup
	for range 4 {
		all.Add(1)
		go func() {
			defer all.Done()
			for second := range time.Duration(1000) {
				if n, ok := l.admit(second * interval); ok {
					records.Add(1)
					leftOut.Add(n)
				}
			}
		}()
	}
	all.Wait()
	if n := records.Load(); n < 1 || n > 1000 || n+leftOut.Load()+l.leftOut.Load() != 4000 {
		t.Errorf("%d records, %d and %d left out", n, leftOut.Load(), l.leftOut.Load())
	}
}
