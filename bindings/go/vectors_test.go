package pelton

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"strconv"
	"strings"
	"testing"

	"github.com/pelton-ipc/pelton/bindings/go/internal/calls"
	"github.com/pelton-ipc/pelton/bindings/go/internal/vectors"
)

// spec/vectors/calls.json, on a real link one side of which breaks the rules.

type callRecord struct {
	By, Hex, Kind, ID, Deadline, Rule, Meaning string
	Traceparent                                string
	More, Continued, Traced                    bool
	Code                                       uint32
	PayloadBytes                               int `json:"payload_bytes"`
	Bytes                                      int
}

type callVectors struct {
	Headers, Refused []callRecord
	Sequences        []struct {
		Meaning, By, Then string
		Records, Messages []callRecord
	}
}

func readCallVectors(t *testing.T) (all callVectors) {
	t.Helper()
	vectors.Read(t, "calls.json", &all)
	if len(all.Headers) == 0 || len(all.Refused) == 0 || len(all.Sequences) == 0 {
		t.Fatal("there are none")
	}
	return all
}

func numberOf(text string) uint64 { return must(strconv.ParseUint(text, 0, 64)) }

var kindNames = map[calls.Kind]string{
	calls.KindRequest: "REQUEST", calls.KindNotify: "NOTIFY", calls.KindCancel: "CANCEL", calls.KindReply: "REPLY", calls.KindPart: "PART", calls.KindEnd: "END",
	calls.KindFailed: "FAILED", calls.KindAbandoned: "ABANDONED", calls.KindDraining: "DRAINING", calls.KindReturned: "RETURNED", calls.KindDrained: "DRAINED",
}

func (v *callRecord) read() (calls.Header, string, []byte) {
	found := must(hex.DecodeString(v.Hex))
	word := func(at int) uint64 { return binary.LittleEndian.Uint64(found[at:]) }
	h, rule := calls.ReadHeader(word(0), word(8), word(16), uint64(v.PayloadBytes), v.By == "client")
	return h, rule, found
}

func TestHeadersAreReadAndWrittenAsTheVectorsSay(t *testing.T) {
	all := readCallVectors(t)
	for _, v := range all.Headers {
		h, rule, found := v.read()
		wanted := calls.Header{ID: numberOf(v.ID), Kind: h.Kind, More: v.More, Continued: v.Continued, Code: v.Code,
			Deadline: numberOf(v.Deadline), Traced: v.Traced}
		written := make([]byte, calls.HeaderSize)
		h.Write(written)
		if rule != "" || h != wanted || kindNames[h.Kind] != v.Kind ||
			hex.EncodeToString(written) != hex.EncodeToString(found) {
			t.Errorf("%s: %+v %q", v.Meaning, h, rule)
		}
	}
	for _, v := range all.Refused {
		if _, rule, _ := v.read(); rule != v.Rule {
			t.Errorf("%s: %q, wanted %q", v.Meaning, rule, v.Rule)
		}
	}
}

// writeRaw writes a record as it is.
func writeRaw(t *testing.T, o *calls.Outbox, bytes []byte) {
	t.Helper()
	room, ok, err := o.Lane.TryReserve(uint64(len(bytes)), 0)
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	copy(room, bytes)
	o.Lane.Commit(uint64(len(bytes)))
	o.Doorbell.Ring()
}

func (v *callRecord) write(t *testing.T, to *calls.Outbox) {
	t.Helper()
	bytes := must(hex.DecodeString(v.Hex))
	for range v.PayloadBytes {
		bytes = append(bytes, 7)
	}
	writeRaw(t, to, bytes)
}

func areSevens(bytes []byte) bool {
	for _, b := range bytes {
		if b != 7 {
			return false
		}
	}
	return true
}

func TestRecordsComeToWhatTheVectorsSay(t *testing.T) {
	for _, v := range readCallVectors(t).Sequences {
		t.Run(v.Meaning, func(t *testing.T) {
			name := place(t)
			options := &Options{Capacity: 1 << 16, CallBytesMax: 4096}
			service, client := listening(t, name, options), connected(t, name, options)
			if v.By == "client" {
				replayClient(t, service, client, connected(t, name, options), v.Records, v.Messages, v.Then)
			} else {
				replayService(t, service, client, v.Records, v.Messages, v.Then)
			}
		})
	}
}

func replayClient(t *testing.T, service *Service, client, other *Client, records, messages []callRecord, then string) {
	ctx := soon(t)
	for _, record := range records {
		record.write(t, &client.links[0].out)
	}
	for _, wanted := range messages {
		request := must(service.Receive(ctx))
		if !areSevens(request.Bytes()) || len(request.Bytes()) != wanted.Bytes ||
			request.IsNotification() != (wanted.Kind == "NOTIFY") ||
			request.id != numberOf(wanted.ID) || request.Traceparent() != wanted.Traceparent {
			t.Fatalf("%+v, wanted %+v", request, wanted)
		}
	}
	for {
		if _, ok, err := tryRequest(service); ok || err != nil || ctx.Err() != nil {
			t.Fatal(ok, err, "and the client was not sent away")
		}
		if then == "well" || service.CorruptClients() == 1 {
			break
		}
	}
	// No other client is affected. Nor is this one, by valid records.
	call := must(other.Submit(ctx, []byte("other")))
	_ = must(service.Receive(ctx)).Reply([]byte("answer"))
	if reply, err := call.Await(ctx); err != nil || string(reply) != "answer" {
		t.Fatal(err)
	}
	if corrupt := service.CorruptClients() != 0; corrupt != (then != "well") {
		t.Fatal("corrupt:", corrupt)
	}
	if then != "well" {
		if _, err := client.Call(ctx, nil); !errors.Is(err, ErrClosed) {
			t.Fatal(err)
		}
	}
}

func replayService(t *testing.T, service *Service, client *Client, records, messages []callRecord, then string) {
	ctx := soon(t)
	calls := map[uint64]*Call{}
	for n := range uint64(3) {
		call := must(client.Submit(ctx, []byte("call")))
		if call.id != 1<<32|n {
			t.Fatal(call.id)
		}
		calls[call.id] = call
		must(service.Receive(ctx))
	}
	for _, record := range records {
		record.write(t, &service.receiver.lanes[0].session.out)
	}
	client.mutex.Lock()
	client.poll(nil)
	for _, wanted := range messages {
		call := calls[numberOf(wanted.ID)]
		if len(call.answers) == 0 {
			t.Fatalf("nothing came, wanted %+v", wanted)
		}
		found := call.answers[0]
		call.answers = call.answers[1:]
		if (wanted.Kind == "RETURNED") != errors.Is(found.lost, ErrRefused) || wanted.Kind != "RETURNED" &&
			kindNames[found.kind] != wanted.Kind ||
			found.code != wanted.Code || len(found.bytes) != wanted.Bytes || !areSevens(found.bytes) {
			t.Fatalf("%+v, wanted %+v", found, wanted)
		}
	}
	for _, call := range calls {
		for _, found := range call.answers {
			// But that the link broke.
			if then == "well" || then == "closed" || !errors.Is(found.lost, ErrCorrupt) {
				t.Fatalf("%+v came as well", found)
			}
		}
	}
	client.mutex.Unlock()
	_, err := client.Submit(ctx, []byte("x"))
	switch then {
	case "well":
		// A draining service gets no more calls.
		if client.links[0].isDraining != errors.Is(err, ErrRefused) {
			t.Fatal(err)
		}
	case "closed":
		if !errors.Is(err, ErrClosed) {
			t.Fatal(err)
		}
	default:
		if !errors.Is(err, ErrCorrupt) {
			t.Fatal(err)
		}
		if wanted := "the rule " + strconv.Quote(then); !strings.Contains(err.Error(), wanted) {
			t.Fatal(err, wanted)
		}
	}
}
