package records

import (
	"cmp"
	"maps"
	"slices"
)

// lanesRemembered is how many lanes a rotation keeps: those written last, four times as many as a receiver has. A
// lane's number matters only until its records are released, which is before the next write of that lane.
const lanesRemembered = lastEntriesMax / 2

// lanes has the last number of each lane written.
type lanes struct {
	last map[Lane]last
	// Counts the writes.
	order uint64
}

type last struct {
	seq   uint32
	order uint64
}

// note sets the last number of a lane.
func (l *lanes) note(of Lane, seq uint32) {
	if l.last == nil {
		l.last = map[Lane]last{}
	}
	l.order++
	l.last[of] = last{seq, l.order}
	if len(l.last) == lastEntriesMax {
		l.forgetOldest()
	}
}

// noteChunk notes the numbers of the chunk at a place.
func (l *lanes) noteChunk(s *scanner, at int64, header *chunkHeader) error {
	switch header.kind {
	case kindRecords:
		l.note(header.lane, lastSeq(header.first, header.messages))
	case kindCompressed:
		entries, err := s.bytes(at+headerBytes, int64(header.entriesBytes()))
		if err != nil {
			return err
		}
		for ; len(entries) >= lastEntry; entries = entries[lastEntry:] {
			l.note(Lane{le.Uint64(entries), le.Uint64(entries[8:])}, le.Uint32(entries[16:]))
		}
	case kindLast:
		entries, err := s.bytes(at+headerBytes, int64(header.bytes))
		if err != nil {
			return err
		}
		for ; len(entries) >= lastEntry; entries = entries[lastEntry:] {
			// Of an earlier file: the numbers of this file's chunks are later, wherever the entry is.
			of := Lane{le.Uint64(entries), le.Uint64(entries[8:])}
			if _, isLater := l.last[of]; !isLater {
				l.note(of, le.Uint32(entries[16:]))
			}
		}
	}
	return nil
}

// noteAll takes over later numbers.
func (l *lanes) noteAll(later *lanes) {
	for _, of := range later.inOrder() {
		l.note(of, later.last[of].seq)
	}
}

// inOrder returns the lanes in the order of their last write.
func (l *lanes) inOrder() []Lane {
	return slices.SortedFunc(maps.Keys(l.last), func(a, b Lane) int {
		return cmp.Compare(l.last[a].order, l.last[b].order)
	})
}

func (l *lanes) forgetOldest() {
	if most := len(l.last) - lanesRemembered; most > 0 {
		for _, of := range l.inOrder()[:most] {
			delete(l.last, of)
		}
	}
}

// encode returns the entries of a chunk of last numbers.
func (l *lanes) encode() (b []byte) {
	l.forgetOldest()
	for _, of := range l.inOrder() {
		b = le.AppendUint64(b, of[0])
		b = le.AppendUint64(b, of[1])
		b = le.AppendUint64(b, uint64(l.last[of].seq))
	}
	return b
}
