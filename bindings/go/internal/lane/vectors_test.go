package lane

// Replays spec/vectors/images.json and steps.json, all of them. One thing is compared otherwise, as this side always
// fences (see the package's documentation): `fenced` is 1 from attach on, so no sleeper needs a timed wait.
// TestASleeperThatLosesMembarrierWaitsBrieflyUntilItsWakerFences covers a waker that does not fence yet.

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/pelton-ipc/pelton/bindings/go/internal/vectors"
)

type number = vectors.Number

func whatIsCorrupt(err error) string {
	var corrupt *Corrupt
	if errors.As(err, &corrupt) {
		return corrupt.What
	}
	return fmt.Sprint(err)
}

func TestEveryImageOfMemoryIsReadAsTheVectorsSay(t *testing.T) {
	var file struct {
		Images []struct {
			Name            string
			Capacity        uint64
			MessageBytesMax uint64 `json:"message_bytes_max"`
			Head, End       number
			Words           [][2]number
			Bytes           [][2]json.RawMessage
			Messages        []struct {
				Seq, Length uint64
				Payload     *string
				Descriptors uint32
				Generation  uint32
				Trace       *string
			}
			Then json.RawMessage
		}
	}
	vectors.Read(t, "images.json", &file)
	if len(file.Images) < 20 {
		t.Fatal("too few images")
	}
	for _, image := range file.Images {
		t.Run(image.Name, func(t *testing.T) {
			memory := fresh(image.Capacity, image.MessageBytesMax, Unpack(uint64(image.Head)))
			for _, word := range image.Words {
				store64(memory.Data, uint64(word[0]), uint64(word[1]))
			}
			for _, run := range image.Bytes {
				var offset uint64
				var text string
				if err := errors.Join(json.Unmarshal(run[0], &offset), json.Unmarshal(run[1], &text)); err != nil {
					t.Fatal(err)
				}
				bytes, err := hex.DecodeString(text)
				if err != nil {
					t.Fatal(err)
				}
				copy(memory.Data[offset:], bytes)
			}
			var then struct{ Corrupt string }
			_ = json.Unmarshal(image.Then, &then)
			consumer, err := NewConsumer(memory, image.MessageBytesMax)
			if err != nil {
				if whatIsCorrupt(err) != then.Corrupt {
					t.Fatalf("attaching: %v, wanted %s", err, image.Then)
				}
				return
			}
			end, found, err := consumer.EndOfCommitted()
			if err != nil && whatIsCorrupt(err) != then.Corrupt ||
				err == nil && (then.Corrupt != "" || end.Pack() != uint64(image.End) ||
					found != uint64(len(image.Messages))) {
				t.Fatalf("a walk ends at %+v after %d with %v", end, found, err)
			}
			for _, message := range image.Messages {
				record, ok, err := consumer.Peek()
				if err != nil || !ok {
					t.Fatalf("no message %d: %v", message.Seq, err)
				}
				if uint64(record.Seq) != message.Seq || record.Bytes != message.Length ||
					record.Descriptors != message.Descriptors ||
					consumer.Generation() != message.Generation {
					t.Fatalf("found %+v of generation %d, wanted %+v", record, consumer.Generation(), message)
				}
				if message.Payload != nil && hex.EncodeToString(consumer.Payload(record)) != *message.Payload {
					t.Fatalf("message %d has payload %x", message.Seq, consumer.Payload(record))
				}
				trace, isTraced := consumer.CopyTrace(record)
				if isTraced != (message.Trace != nil) ||
					isTraced && hex.EncodeToString(trace[:]) != *message.Trace {
					t.Fatalf("message %d has trace position %v %x", message.Seq, isTraced, trace)
				}
				consumer.Take(record)
				consumer.ReleaseTaken()
			}
			_, ok, err := consumer.Peek()
			if ok || err != nil && whatIsCorrupt(err) != then.Corrupt || err == nil && string(image.Then) != `"empty"` {
				t.Fatalf("then %v %v, wanted %s", ok, err, image.Then)
			}
		})
	}
}

type step struct {
	Do, Is, What, As, Of, Side string
	Bytes                      json.RawMessage
	Room                       []uint64
	Descriptors                *uint32
	Generation                 *uint32
	Seq                        uint32
	Tail, Head                 number
	Times                      int
	Ring                       *bool
	Are, Words                 [][2]json.RawMessage
}

// UnmarshalJSON reads a step: `is` of a timed wait is a boolean.
func (s *step) UnmarshalJSON(text []byte) error {
	type plain step
	var is struct{ Is json.RawMessage }
	if err := json.Unmarshal(text, &is); err != nil {
		return err
	}
	if string(is.Is) == "true" || string(is.Is) == "false" {
		text = slices.Concat([]byte(strings.Replace(string(text), `"is": `+string(is.Is), `"is": "`+string(is.Is)+`"`,
			1)))
	}
	return json.Unmarshal(text, (*plain)(s))
}

type replay struct {
	t        *testing.T
	memory   Memory
	producer *Producer
	consumer *Consumer
	sleeper  Sleeper
	barrier  map[string]bool
	held     map[string]uint64
	space    []byte
	context  string
}

func TestEveryListOfStepsHasTheResultsThatTheVectorsSay(t *testing.T) {
	var file struct {
		Lists []struct {
			Name       string
			Capacity   uint64
			Start      number
			Window     *uint64
			CanBarrier map[string]bool `json:"can_barrier"`
			Steps      []step
		}
	}
	vectors.Read(t, "steps.json", &file)
	if len(file.Lists) < 40 {
		t.Fatal("too few lists")
	}
	for _, list := range file.Lists {
		t.Run(list.Name, func(t *testing.T) {
			if list.Window != nil && *list.Window != Window {
				t.Fatalf("assumes another window than %d", Window)
			}
			if list.CanBarrier == nil {
				list.CanBarrier = map[string]bool{"producer": true, "receiver": true}
			}
			start := Unpack(uint64(list.Start))
			r := &replay{t: t, barrier: list.CanBarrier, held: map[string]uint64{},
				memory: fresh(list.Capacity, MessageBytesLimit(list.Capacity), start)}
			store64(r.memory.Producer, producerTail, start.Pack())
			r.attachProducer(start, start, 0)
			r.attachConsumer()
			for i, step := range list.Steps {
				for time := range max(step.Times, 1) {
					r.context = fmt.Sprintf("step %d, %q, time %d", i, step.Do, time)
					r.step(step, uint32(time))
				}
			}
		})
	}
}

func (r *replay) must(ok bool, format string, args ...any) {
	r.t.Helper()
	if !ok {
		r.t.Fatalf(r.context+": "+format, args...)
	}
}

func (r *replay) attachProducer(tail, head Position, floor uint64) {
	producer, err := NewProducer(r.memory, tail, head, floor, r.barrier["producer"])
	r.must(err == nil, "%v", err)
	r.producer = producer
}

func (r *replay) attachConsumer() {
	consumer, err := NewConsumer(r.memory, MessageBytesLimit(uint64(len(r.memory.Data))))
	r.must(err == nil, "%v", err)
	r.consumer = consumer
	r.sleeper = NewReceiverSleeper(r.memory.Receiver, r.barrier["receiver"])
}

func (s *step) lengths() (lengths []uint64) {
	var one uint64
	if json.Unmarshal(s.Bytes, &one) == nil {
		return []uint64{one}
	}
	_ = json.Unmarshal(s.Bytes, &lengths)
	return lengths
}

func (s *step) one() uint64 {
	if lengths := s.lengths(); len(lengths) == 1 {
		return lengths[0]
	}
	return 0
}

func (r *replay) step(s step, time uint32) {
	var wake Wake
	switch s.Do {
	case "send":
		descriptors := uint32(0)
		if s.Descriptors != nil {
			descriptors = *s.Descriptors
		}
		space, ok, err := r.producer.TryReserve(s.one(), descriptors)
		found := r.answer(ok, err, s)
		r.must(found == s.Is || s.Is == "sent or closed" && (found == "sent" || found == "closed"),
			"%s (%v), wanted %s", found, err, s.Is)
		if found == "sent" {
			wake = r.commit(space, s.one())
		}
	case "reserve":
		space, ok, err := r.producer.TryReserve(s.one(), 0)
		found := strings.Replace(r.answer(ok, err, s), "sent", "reserved", 1)
		r.must(found == s.Is, "%s, wanted %s", found, s.Is)
		r.space = space
	case "commit":
		wake = r.commit(r.space, s.one())
	case "abort":
	case "batch":
		wake = r.batch(s)
	case "receive":
		switch s.Is {
		case "":
			r.consumer.Take(r.expect(s, time))
			wake = r.consumer.ReleaseTaken()
		case "empty", "closed":
			r.expectNothing()
			if s.Is == "closed" {
				r.must(r.consumer.ProducerClosed(), "not closed")
				r.expectNothing()
			}
		default:
			r.must(false, "unknown answer %s", s.Is)
		}
	case "take":
		r.consumer.Take(r.expect(s, time))
	case "release taken":
		wake = r.consumer.ReleaseTaken()
	case "hold":
		r.held[s.As] = r.consumer.Hold(r.expect(s, time))
	case "release":
		ticket, ok := r.held[s.Of]
		r.must(ok, "nothing held")
		wake = r.consumer.ReleaseHeld(ticket)
	case "arm receiver":
		r.sleeper.Arm(r.consumer.IsProducerFencing, yes)
	case "disarm receiver":
		r.sleeper.Disarm()
	case "arm producer":
		sleep, err := r.producer.Arm(s.one(), string(s.Bytes) == "null", yes)
		r.must(err == nil && sleep == (s.Is == "sleep"), "%v %v", sleep, err)
	case "lose barrier":
		if s.Side == "receiver" {
			r.sleeper.LoseBarrier()
		} else {
			r.producer.LoseBarrier()
		}
	case "nap":
		isTimed := r.producer.NeedsTimedWait()
		if s.Side == "receiver" {
			isTimed = r.sleeper.NeedsFencedWakers() && !r.consumer.IsProducerFencing()
		}
		// This side's wakers fence from the first on.
		r.must(!isTimed, "a timed wait")
	case "close producer":
		r.producer.Close()
	case "close consumer":
		r.consumer.Close()
		r.sleeper.Close()
	case "successor":
		tail, _, err := r.consumer.EndOfCommitted()
		r.must(err == nil && tail.Pack() == uint64(s.Tail), "the end is %+v %v", tail, err)
		floor, generation := r.consumer.DeadProducer()
		page := words(512)
		MakeProducerPage(page, r.producer.Capacity(), r.producer.BytesMax(), generation+1, 3)
		r.memory.Producer = page
		r.attachProducer(tail, r.consumer.Head(), floor)
		r.consumer.AttachProducer(page)
	case "consumer successor":
		_, err := r.producer.PollHead()
		r.must(err == nil && r.producer.Head().Pack() == uint64(s.Head), "the head is %+v %v", r.producer.Head(), err)
		r.memory.Consumer, r.memory.Receiver = words(512), words(512)
		MakeConsumerPage(r.memory.Consumer, r.producer.Head(), 4)
		MakeReceiverPage(r.memory.Receiver)
		r.attachConsumer()
		err = r.producer.CheckSuccessor(r.memory.Consumer)
		r.must(err == nil, "%v", err)
		r.producer.AttachConsumer(r.memory.Consumer, r.memory.Receiver)
	case "words":
		for _, word := range s.Are {
			r.compare(s.Of, word)
		}
	case "poke":
		for _, word := range s.Words {
			offset, value, _ := r.parse(word)
			store64(r.segment(s.Of), offset, value)
		}
	default:
		r.must(false, "no such step")
	}
	if s.Ring != nil {
		r.must(bool(wake) == *s.Ring, "rings: %v", wake)
	}
}

func (r *replay) answer(ok bool, err error, s step) string {
	var tooLarge *TooLarge
	var corrupt *Corrupt
	switch {
	case errors.As(err, &tooLarge):
		return "too large"
	case errors.Is(err, ErrConsumerClosed):
		return "closed"
	case errors.As(err, &corrupt):
		r.must(corrupt.What == s.What, "corrupt: %v", err)
		return "corrupt"
	case ok:
		return "sent"
	}
	return "full"
}

func (r *replay) commit(space []byte, bytes uint64) Wake {
	fill(space[:bytes], r.producer.Tail().Seq)
	return r.producer.Commit(bytes)
}

func (r *replay) batch(s step) Wake {
	records := uint64(0)
	for _, bytes := range s.Room {
		records += RecordBytes(bytes)
	}
	ok, err := r.producer.TryBeginBatch(records)
	found := r.answer(ok, err, s)
	seq := r.producer.Tail().Seq
	if ok {
		for _, bytes := range s.lengths() {
			space, ok := r.producer.BatchMessage(bytes)
			r.must(ok, "no room for %d", bytes)
			fill(space, seq)
			if record, ok, _ := r.consumer.Peek(); ok {
				r.must(record.Seq != seq, "message %d is seen before the batch is committed", seq)
			}
			seq = SeqAfter(seq)
		}
	}
	if s.Is == "aborted" {
		return false
	}
	r.must(found == s.Is, "%s, wanted %s", found, s.Is)
	return Wake(ok) && r.producer.CommitBatch()
}

func (r *replay) expect(s step, time uint32) Record {
	record, ok, err := r.consumer.Peek()
	r.must(ok && err == nil, "nothing there: %v", err)
	seq := s.Seq
	for range time {
		seq = SeqAfter(seq)
	}
	r.must(record.Seq == seq && record.Bytes == s.one(), "found %+v", record)
	r.must(isFilled(r.consumer.Payload(record), seq), "payload of %d", seq)
	r.must(s.Descriptors == nil || record.Descriptors == *s.Descriptors, "found %+v", record)
	r.must(s.Generation == nil || r.consumer.Generation() == *s.Generation, "generation %d", r.consumer.Generation())
	return record
}

func (r *replay) expectNothing() {
	record, ok, err := r.consumer.Peek()
	r.must(!ok && err == nil, "found %+v %v", record, err)
}

func (r *replay) segment(of string) []byte {
	switch of {
	case "producer":
		return r.memory.Producer
	case "consumer":
		return r.memory.Consumer
	case "receiver":
		return r.memory.Receiver
	}
	return r.memory.Data
}

// parse also returns how many bytes the word has: 8 digits are one of 4.
func (r *replay) parse(word [2]json.RawMessage) (offset, value uint64, bytes int) {
	var o, v number
	err := errors.Join(json.Unmarshal(word[0], &o), json.Unmarshal(word[1], &v))
	r.must(err == nil, "%v", err)
	return uint64(o), uint64(v), (len(word[1]) - 4) / 2
}

func (r *replay) compare(of string, word [2]json.RawMessage) {
	offset, wanted, bytes := r.parse(word)
	isFenced := of == "producer" && offset == producerFenced || of == "consumer" && offset == consumerFenced
	found := uint64(0)
	if bytes == 4 {
		found = uint64(load32(r.segment(of), offset))
	} else {
		found = load64(r.segment(of), offset)
	}
	if isFenced {
		wanted = 1
	}
	r.must(found == wanted, "%s at %d: found %#x, wanted %#x", of, offset, found, wanted)
}
