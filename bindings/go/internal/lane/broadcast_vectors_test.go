package lane

// Replays the lists of spec/vectors/broadcast.json. The tests of package pelton replay its pages and directories. As in
// vectors_test.go, `fenced` is always 1 here.

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/pelton-ipc/pelton/bindings/go/internal/vectors"
)

type broadcastStep struct {
	Do, As, By, Of, Policy string
	Is, From               json.RawMessage
	Slack                  uint64
	LagAfterNS             uint64 `json:"lag_after_ns"`
	Bytes                  *uint64
	Number, Missed         uint64
	Messages               uint64
	Times                  int
	Slot                   uint32
	Continues              bool
	Ring                   *bool
	Rings                  []uint32
	Are, Words             [][2]json.RawMessage
	Joined                 *struct {
		Slot         uint32
		Number, Skip uint64
		Place        number
	}
}

// is returns the wanted result: a text, or digits.
func (s *broadcastStep) is() string { return strings.Trim(string(s.Is), `"`) }

type broadcastReader struct {
	*BroadcastConsumer
	join   uint64
	missed uint64
}

type broadcastReplay struct {
	t *testing.T
	// Its table is unused, unless the list is by path.
	lane     pathLane
	isByPath bool
	producer *BroadcastProducer
	readers  map[string]*broadcastReader
	context  string
}

func TestEveryListOfABroadcastsStepsHasTheResultsThatTheVectorsSay(t *testing.T) {
	var file struct {
		Lists []struct {
			Name            string
			Capacity, First uint64
			ByPath          bool `json:"by_path"`
			Steps           []broadcastStep
		}
	}
	vectors.Read(t, "broadcast.json", &file)
	if len(file.Lists) < 45 {
		t.Fatal("too few lists")
	}
	for _, list := range file.Lists {
		t.Run(list.Name, func(t *testing.T) {
			r := &broadcastReplay{t: t, lane: freshPathLane(list.Capacity), isByPath: list.ByPath,
				readers: map[string]*broadcastReader{}}
			if !list.ByPath {
				r.lane.BroadcastMemory = freshBroadcast(list.Capacity)
				producer, err := newBroadcastProducer(r.lane.BroadcastMemory, max(list.First, 1), true)
				if err != nil {
					t.Fatal(err)
				}
				r.producer = producer
			}
			for i, step := range list.Steps {
				for time := range max(step.Times, 1) {
					r.context = fmt.Sprintf("step %d, %q, time %d", i, step.Do, time)
					r.step(step, uint64(time))
				}
			}
		})
	}
}

func (r *broadcastReplay) must(ok bool, format string, args ...any) {
	r.t.Helper()
	if !ok {
		r.t.Fatalf(r.context+": "+format, args...)
	}
}

func (r *broadcastReplay) step(s broadcastStep, time uint64) {
	reader := r.readers[s.By]
	bytes := uint64(0)
	if s.Bytes != nil {
		bytes = *s.Bytes
	}
	var wake Wake
	switch s.Do {
	case "join":
		r.join(s)
	case "end":
		delete(r.readers, s.By)
	case "successor":
		r.succeed(s)
	case "send":
		r.send(s, bytes)
	case "receive":
		wake = r.receive(reader, s, time)
	case "take":
		r.expect(reader, s, time)
	case "release":
		wake = reader.Release()
	case "arm":
		if reader != nil {
			reader.Arm(yes)
			break
		}
		r.must(r.producer.Arm(bytes, s.Bytes == nil, yes) == (s.is() == "sleep"), "wanted %s", s.is())
	case "disarm":
		if reader != nil {
			reader.Disarm()
		} else {
			r.producer.Disarm()
		}
	case "leave":
		reader.Close()
	case "lost":
		join, why, ok := r.producer.Lost()
		found := "none"
		if ok && errors.Is(why, ErrCursorClosed) {
			found = "closed"
		} else if ok {
			mustBeCorrupt(r.t, why)
			found = "corrupt"
		}
		r.must(found == s.is(), "%s, wanted %s", found, s.is())
		r.producer.Remove(join)
	case "remove":
		r.producer.Remove(reader.join)
	case "let lag":
		r.producer.LetLag(reader.join)
	case "history":
		r.producer.SetHistory(s.Messages)
	case "close":
		r.producer.Close()
	case "words":
		for _, word := range s.Are {
			offset, wanted, isLong := r.parse(word)
			if s.Of != "data" && s.Of != "producer" && s.Of != "table" && offset == cursorFenced {
				wanted = 1
			}
			found := uint64(load32(r.segment(s.Of), offset))
			if isLong {
				found = load64(r.segment(s.Of), offset)
			}
			r.must(found == wanted, "%s at %d: found %#x, wanted %#x", s.Of, offset, found, wanted)
		}
	case "poke":
		for _, word := range s.Words {
			if offset, value, isLong := r.parse(word); isLong {
				store64(r.segment(s.Of), offset, value)
			} else {
				store32(r.segment(s.Of), offset, uint32(value))
			}
		}
	default:
		r.must(false, "no such step")
	}
	if s.Ring != nil {
		r.must(bool(wake) == *s.Ring, "rings: %v", wake)
	}
}

func (r *broadcastReplay) join(s broadcastStep) {
	kinds := map[string]PolicyKind{"gate": Gate, "lag": Lag, "latest": Latest, "gate until": GateUntil}
	policy := Policy{kinds[s.Policy], s.Slack, s.LagAfterNS}
	var from From
	if string(s.From) == `"oldest"` {
		from.Kind = FromOldest
	} else if s.From != nil {
		from.Kind = FromLast
		r.must(json.Unmarshal(s.From, &from.Last) == nil, "from %s", s.From)
	}
	if r.isByPath {
		consumer, err := JoinBroadcast(r.lane.BroadcastMemory, r.lane.table, JoinByPath{Slot: s.Slot, Policy: policy,
			From: from, IsDurable: s.Continues, PID: 1}, r.lane.bytesMax(), true)
		switch s.is() {
		case "corrupt":
			mustBeCorrupt(r.t, err)
			return
		case "refused":
			_, isTooLong := errors.AsType[*HoldsTooLong](err)
			r.must(isTooLong, "%v", err)
			return
		}
		r.must(err == nil, "%v", err)
		r.must(fmt.Sprint(consumer.Number()) == s.is(), "begins at %d, wanted %s", consumer.Number(), s.is())
		r.readers[s.As] = &broadcastReader{BroadcastConsumer: consumer}
		return
	}
	page := words(8192)
	MakeCursorPage(page, policy, 1)
	joined, ok := r.producer.Join(page, policy, from)
	r.must(ok, "no free slot")
	if wanted := s.Joined; wanted != nil {
		r.must(joined.Slot == wanted.Slot && joined.Number == wanted.Number && joined.Skip == wanted.Skip &&
			joined.Place.Pack() == uint64(wanted.Place), "joined %+v, wanted %+v", joined, wanted)
	}
	consumer, err := NewBroadcastConsumer(r.lane.BroadcastMemory, page, policy, joined, r.producer.BytesMax(), true)
	r.must(err == nil, "%v", err)
	r.must(fmt.Sprint(consumer.Number()) == s.is(), "begins at %d, wanted %s", consumer.Number(), s.is())
	r.readers[s.As] = &broadcastReader{BroadcastConsumer: consumer, join: joined.Join}
}

// succeed has another producer take over: the one before has died.
func (r *broadcastReplay) succeed(s broadcastStep) {
	producer, err := TakeOverBroadcastProducer(r.lane.BroadcastMemory, r.lane.table, r.lane.bytesMax(), true, 1)
	if r.producer = producer; s.is() == "corrupt" {
		mustBeCorrupt(r.t, err)
		return
	}
	r.must(err == nil, "%v", err)
	producer.SetBacked(producer.Capacity())
	r.must(fmt.Sprint(producer.Number()) == s.is(), "its next is %d, wanted %s", producer.Number(), s.is())
}

func (r *broadcastReplay) send(s broadcastStep, bytes uint64) {
	number := r.producer.Number()
	space, ok, err := r.producer.TryReserve(bytes)
	var tooLarge *TooLarge
	switch {
	case errors.As(err, &tooLarge):
		r.must(s.is() == "too large", "too large")
	case err != nil:
		r.must(false, "%v", err)
	case !ok:
		r.must(s.is() == "full", "full, wanted %s", s.is())
	default:
		r.must(s.is() == "sent", "sent, wanted %s", s.is())
		fill(space, seqOf(number))
		wanted := uint64(0)
		for _, slot := range s.Rings {
			wanted |= 1 << slot
		}
		rings := r.producer.Commit(bytes)
		r.must(rings == wanted, "rings %b, wanted %b", rings, wanted)
	}
}

// next takes the next message: its number and its payload.
func (r *broadcastReplay) next(reader *broadcastReader) (message []byte, ok bool, err error) {
	if reader.ReadsInPlace() {
		record, ok, err := reader.Peek()
		if ok && err == nil {
			message = reader.Payload(record)
			reader.Take(record)
		}
		return message, ok, err
	}
	found := CopiedOver
	for found == CopiedOver {
		message, found, err = reader.Copy(nil)
	}
	return message, found == CopiedMessage, err
}

func (r *broadcastReplay) receive(reader *broadcastReader, s broadcastStep, time uint64) Wake {
	switch s.is() {
	case "":
		r.expect(reader, s, time)
	case "closed":
		_, ok, err := r.next(reader)
		r.must(!ok && err == nil && reader.ProducerClosed(), "%v %v", ok, err)
		_, ok, err = r.next(reader)
		r.must(!ok && err == nil, "%v %v", ok, err)
		return false
	case "corrupt":
		_, _, err := r.next(reader)
		mustBeCorrupt(r.t, err)
		return false
	default:
		_, ok, err := r.next(reader)
		r.must(!ok && err == nil && s.is() == "empty", "%v %v, wanted %s", ok, err, s.is())
		if !reader.HasPassed() {
			return false
		}
	}
	return reader.Release()
}

func (r *broadcastReplay) expect(reader *broadcastReader, s broadcastStep, time uint64) {
	message, ok, err := r.next(reader)
	r.must(ok && err == nil, "nothing there: %v", err)
	number := reader.Number() - 1
	r.must(number == s.Number+time && uint64(len(message)) == *s.Bytes, "%d of %d bytes", number, len(message))
	r.must(isFilled(message, seqOf(number)), "payload of %d", number)
	r.must(reader.Missed()-reader.missed == s.Missed, "missed %d, wanted %d", reader.Missed()-reader.missed, s.Missed)
	reader.missed = reader.Missed()
}

func (r *broadcastReplay) segment(of string) []byte {
	switch of {
	case "producer":
		return r.lane.Producer
	case "data":
		return r.lane.Data
	case "table":
		return r.lane.table
	}
	return r.readers[of].page
}

func (r *broadcastReplay) parse(word [2]json.RawMessage) (offset, value uint64, isLong bool) {
	var o, v number
	err := errors.Join(json.Unmarshal(word[0], &o), json.Unmarshal(word[1], &v))
	r.must(err == nil, "%v", err)
	return uint64(o), uint64(v), len(word[1]) > 12
}
