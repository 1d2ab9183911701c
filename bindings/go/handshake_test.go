package pelton

import (
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/doorbell"
	"github.com/pelton-ipc/pelton/bindings/go/internal/handshake"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/limits"
	"github.com/pelton-ipc/pelton/bindings/go/internal/link"
	"github.com/pelton-ipc/pelton/bindings/go/internal/memory"
	"github.com/pelton-ipc/pelton/bindings/go/internal/packet"
	"github.com/pelton-ipc/pelton/bindings/go/internal/vectors"
	"golang.org/x/sys/unix"
)

// Replays spec/vectors/packets.json, and the pages of broadcast.json.

type number = vectors.Number

type packetVectors struct {
	Packets []struct {
		Meaning, Hex, Text string
		Fields             map[string]number
	}
	Refused   []struct{ Why, Expected, Hex string }
	Greetings []struct {
		Meaning, Hex string
		Role         packet.Role
		Is           json.RawMessage
	}
}

func readPackets(t testing.TB) (file packetVectors) {
	vectors.Read(t, "packets.json", &file)
	if len(file.Packets) < 8 || len(file.Refused) < 10 || len(file.Greetings) < 20 {
		t.Fatal("too few vectors")
	}
	return file
}

func TestPacketsAreReadAndWrittenAsTheVectorsSay(t *testing.T) {
	for _, vector := range readPackets(t).Packets {
		f := func(name string) uint64 { return uint64(vector.Fields[name]) }
		wanted := packet.Packet{
			Kind: uint32(f("kind")), WireVersion: uint32(f("wire_version")), LayoutSignature: f("layout_signature"),
			Role: packet.Role(f("role")), Holds: uint32(f("holds")), Capacity: f("capacity"), BytesMax: f("message_bytes_max"),
			Generation: f("generation"), Head: f("head"), Tail: f("tail"), Floor: f("floor"), Seq: uint32(f("seq")), Rest: vector.Text,
		}
		bytes := must(hex.DecodeString(vector.Hex))
		if found, ok := packet.Decode(bytes); !ok || found != wanted {
			t.Errorf("%s: %+v", vector.Meaning, found)
		}
		if found := wanted.Encode(); string(found) != string(bytes) {
			t.Errorf("%s: %x", vector.Meaning, found)
		}
	}
}

// socketPair returns a handshake of this side, and the peer's bare socket.
func socketPair(t testing.TB, ctx context.Context) (*handshake.Handshake, int) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	s, err := handshake.New(ctx, fds[0], must((&Options{}).forBoth(0)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close(); unix.Close(fds[1]) })
	return s, fds[1]
}

func hello(of packet.Role, holds uint32) []byte {
	p := packet.New(packet.KindHello)
	p.Role, p.Holds = of, holds
	if of != packet.RoleSender {
		p.Capacity, p.BytesMax = limits.OfFormat.LaneBytes, limits.OfFormat.MessageBytes
	}
	return p.Encode()
}

func TestASenderOfTracedMessagesRefusesAReceiverThatDoesNotKnowThem(t *testing.T) {
	for _, isTraced := range []bool{true, false} {
		s, peer := socketPair(t, soon(t))
		hello := packet.NewHello(packet.RoleReceiver, false, limits.OfFormat)
		hello.Tail = packet.TracedRequests
		if err := kernel.TrySend(peer, hello.Encode()); err != nil {
			t.Fatal(err)
		}
		_, err := s.ExchangeHello(packet.RoleSender, false, true, isTraced,
			func() (limits.Limits, error) { return limits.Limits{}, nil })
		if isTraced {
			refusedWith(t, err, ErrRefused, "feature 1,", packet.Version, "option Traced", "or leave that option out")
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

func TestHelloIsAnsweredAsTheVectorsSay(t *testing.T) {
	for _, vector := range readPackets(t).Greetings {
		t.Run(vector.Meaning, func(t *testing.T) {
			s, peer := socketPair(t, soon(t))
			if err := kernel.TrySend(peer, must(hex.DecodeString(vector.Hex))); err != nil {
				t.Fatal(err)
			}
			_, err := s.ExchangeHello(vector.Role.Other(), false, true, false,
				func() (limits.Limits, error) { return limits.Limits{LaneBytes: 1 << 16, MessageBytes: 77}, nil })
			b := make([]byte, packet.BytesMax)
			n, _, _, failed := kernel.TryReceive(peer, b)
			if failed != nil {
				t.Fatal(failed)
			}
			answer, _ := packet.Decode(b[:n])
			if string(vector.Is) == `"accepted"` {
				version, problem := packet.ReadEntries(answer.Rest)
				if err != nil || answer.Kind != packet.KindHello ||
					answer.Takes() != (limits.Limits{LaneBytes: 1 << 16, MessageBytes: 77}) ||
					version != packet.Version || problem != "" {
					t.Fatalf("%v, %+v", err, answer)
				}
				return
			}
			var is struct{ Refused []string }
			if err := json.Unmarshal(vector.Is, &is); err != nil || len(is.Refused) == 0 {
				t.Fatal(err)
			}
			if !errors.Is(err, ErrRefused) || answer.Kind != packet.KindRefused {
				t.Fatalf("%v, %+v", err, answer)
			}
			for _, wanted := range is.Refused {
				if !strings.Contains(answer.Rest, wanted) {
					t.Errorf("%q has no %q", answer.Rest, wanted)
				}
			}
		})
	}
}

func TestPacketsThatBreakTheRulesAreRefusedAsTheVectorsSay(t *testing.T) {
	for _, vector := range readPackets(t).Refused {
		t.Run(vector.Why, func(t *testing.T) {
			s, peer := socketPair(t, soon(t))
			bytes := must(hex.DecodeString(vector.Hex))
			p, _ := packet.Decode(bytes)
			ownDoorbell := must(doorbell.New())
			defer ownDoorbell.Close()
			capacity := p.Capacity
			if !lane.CapacityIsValid(capacity) {
				capacity = 64
			}
			send := func(bytes []byte, fds ...int) {
				if len(bytes) == 0 {
					_ = unix.Shutdown(peer, unix.SHUT_RDWR)
				} else if err := kernel.TrySend(peer, bytes, fds...); err != nil {
					t.Fatal(err)
				}
			}
			var err error
			switch vector.Expected {
			case "PRODUCER":
				page, data := must(memory.NewProducerPage(p.Capacity, p.BytesMax,
					p.Generation, "")), must(memory.NewData(capacity, ""))
				defer page.Close()
				defer data.Close()
				send(hello(packet.RoleSender, 0))
				send(bytes, page.FD, ownDoorbell.Eventfd, data.FD)
				_, err = receiverOfOne(s, Options{}, false)
			case "CONSUMER":
				consumer, receiver, data := must(memory.NewConsumerPage(lane.Unpack(p.Head), "")), must(memory.NewReceiverPage("")), must(memory.NewData(capacity, ""))
				defer consumer.Close()
				defer receiver.Close()
				defer data.Close()
				send(hello(packet.RoleReceiver, 1))
				send(bytes, consumer.FD, receiver.FD, ownDoorbell.Eventfd, data.FD)
				_, err = s.NewSender(false)
			case "HELLO":
				send(bytes)
				_, _, err = s.Receive(packet.KindHello, 0)
			default:
				send(bytes)
				_, _, err = s.Receive(packet.KindReady, 0)
			}
			// Not for lack of a reply: the packet alone decides.
			if err == nil || errors.Is(err, ErrSystem) || errors.Is(err, context.DeadlineExceeded) {
				t.Fatal(err)
			}
		})
	}
}

// The pages of broadcast.json, by the other side of a broadcast's handshake.
func TestThePagesOfBroadcastsAreAcceptedOrRefusedAsTheVectorsSay(t *testing.T) {
	const capacity = 1 << 16
	limit := lane.MessageBytesLimit(capacity)
	var all struct {
		Fresh map[string][]pathWord `json:"fresh_pages"`
		Pages []struct {
			Name, Of, Is string
			Bytes        uint64
			Words        []pathWord
		}
	}
	if vectors.Read(t, "broadcast.json", &all); len(all.Pages) < 20 {
		t.Fatal("too few vectors")
	}
	for _, v := range all.Pages {
		t.Run(v.Of+": "+v.Name, func(t *testing.T) {
			s, peer := socketPair(t, soon(t))
			page := must(memory.Create("test", memory.ControlSeals, cmp.Or(v.Bytes, 1<<16), func(page []byte) {
				for _, word := range append(slices.Clone(all.Fresh[v.Of]), v.Words...) {
					if at, bytes := word.decode(); at+8 <= len(page) {
						copy(page[at:], bytes)
					}
				}
			}))
			own, data, err := memory.NewBroadcast(capacity, limit, "test")
			ring, ownDoorbell := must(doorbell.New()), must(doorbell.New())
			defer func() {
				ring.Close()
				ownDoorbell.Close()
				for _, segment := range []*memory.Segment{page, own, data} {
					segment.Close()
				}
			}()
			send := func(bytes []byte, fds ...int) { err = errors.Join(err, kernel.TrySend(peer, bytes, fds...)) }
			var result error
			if v.Of == "broadcast" {
				offer := packet.NewLane(packet.KindProducer, capacity, limit, lane.Start, lane.Start)
				offer.Generation = 1
				ready := packet.New(packet.KindReady)
				ready.Generation, ready.Floor, ready.Head = 1, 1, lane.Start.Pack()
				send(hello(packet.RolePublisher, 0))
				send(offer.Encode(), page.FD, ring.Eventfd, data.FD)
				send(ready.Encode())
				var sub *link.Subscription
				if sub, result = s.NewSubscriber(lane.Policy{Kind: lane.Gate}, lane.From{}, ownDoorbell); result == nil {
					closeSubscription(sub)
					unmapSubscription(sub)
				}
			} else {
				answer := packet.New(packet.KindConsumer)
				send(hello(packet.RoleSubscriber, 0))
				send(answer.Encode(), page.FD, ring.Eventfd)
				var joining *handshake.Joining
				if joining, result = s.NewSubscription(&handshake.PublisherSide{Page: own, Data: data, BytesMax: limit,
					Doorbell: ownDoorbell}); result == nil {
					joining.Drop()
				}
			}
			// The page alone decides, not a missing reply.
			isAsSaid := (result == nil) == (v.Is == "accepted") && !errors.Is(result, context.DeadlineExceeded)
			if err != nil || !isAsSaid {
				t.Fatalf("%v, wanted %s (%v)", result, v.Is, err)
			}
		})
	}
}

// Each check of the peer's segments, broken once.
func TestSegmentsThatAreNotWhatTheyMustBeAreRefused(t *testing.T) {
	const capacity = 1 << 16
	limit := lane.MessageBytesLimit(capacity)
	file := func(seals int, bytes uint64, write func([]byte)) int {
		s := must(memory.Create("test", seals, bytes, write))
		fd := must(unix.FcntlInt(uintptr(s.FD), unix.F_DUPFD_CLOEXEC, 0))
		s.Close()
		return fd
	}
	producer := func(b []byte) { lane.MakeProducerPage(b, capacity, limit, 1, 1) }
	none := func([]byte) {}
	pipe := make([]int, 2)
	if err := unix.Pipe2(pipe, unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer kernel.CloseAll(pipe)
	ordinary := must(os.Create(t.TempDir() + "/file"))
	defer ordinary.Close()
	cases := map[string]struct{ page, data, doorbell func() int }{
		"all is well":               {},
		"page without FUTURE_WRITE": {page: func() int { return file(memory.SizeSeals, lane.SegmentBytes, producer) }},
		"page without SHRINK": {page: func() int {
			return file(memory.ControlSeals&^unix.F_SEAL_SHRINK,
				lane.SegmentBytes, producer)
		}},
		"page that is too large": {page: func() int {
			return file(memory.ControlSeals, 2*lane.SegmentBytes,
				producer)
		}},
		"page that is too small": {page: func() int { return file(memory.ControlSeals, 4096, producer) }},
		"page of zeros":          {page: func() int { return file(memory.ControlSeals, lane.SegmentBytes, none) }},
		"page of another role": {page: func() int {
			return file(memory.ControlSeals, lane.SegmentBytes,
				lane.MakeReceiverPage)
		}},
		"page of another capacity": {page: func() int {
			return file(memory.ControlSeals, lane.SegmentBytes,
				func(b []byte) { lane.MakeProducerPage(b, 2*capacity, limit, 1, 1) })
		}},
		"page of another limit": {page: func() int {
			return file(memory.ControlSeals, lane.SegmentBytes,
				func(b []byte) { lane.MakeProducerPage(b, capacity, 1, 1, 1) })
		}},
		"page of two cursors": {page: func() int {
			return file(memory.ControlSeals, lane.SegmentBytes, func(b []byte) { producer(b); b[80] = 2 })
		}},
		"page that is a pipe": {page: func() int { return must(unix.Dup(pipe[0])) }},
		"page that is a file": {page: func() int { return must(unix.Dup(int(ordinary.Fd()))) }},
		"data that can grow": {data: func() int {
			return file(unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL,
				capacity, none)
		}},
		"data that can be sealed further": {data: func() int {
			return file(unix.F_SEAL_SHRINK|unix.F_SEAL_GROW,
				capacity, none)
		}},
		"data that is shorter than it says": {data: func() int { return file(memory.SizeSeals, capacity/2, none) }},
		"doorbell that is a pipe":           {doorbell: func() int { return must(unix.Dup(pipe[1])) }},
		"doorbell that is a file":           {doorbell: func() int { return must(unix.Dup(int(ordinary.Fd()))) }},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
			defer cancel()
			s, peer := socketPair(t, ctx)
			fds := []int{}
			for i, make := range []func() int{c.page, c.doorbell, c.data} {
				usual := []func() int{
					func() int { return file(memory.ControlSeals, lane.SegmentBytes, producer) },
					func() int { return must(unix.Eventfd(0, unix.EFD_CLOEXEC)) },
					func() int { return file(memory.SizeSeals, capacity, none) },
				}
				if make == nil {
					make = usual[i]
				}
				fds = append(fds, make())
			}
			defer kernel.CloseAll(fds)
			offer := packet.NewLane(packet.KindProducer, capacity, limit, lane.Start, lane.Start)
			offer.Generation = 1
			ready := packet.New(packet.KindReady)
			if err := errors.Join(kernel.TrySend(peer, hello(packet.RoleSender, 0)),
				kernel.TrySend(peer, offer.Encode(), fds...), kernel.TrySend(peer, ready.Encode())); err != nil {
				t.Fatal(err)
			}
			r, err := receiverOfOne(s, Options{}, false)
			if name == "all is well" {
				if err != nil {
					t.Fatal(err)
				}
				r.Close()
				return
			}
			if !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrRefused) {
				t.Fatal(err)
			}
			// The peer gets the reason.
			b := make([]byte, packet.BytesMax)
			for {
				n, fds, _, err := kernel.TryReceive(peer, b)
				kernel.CloseAll(fds)
				if err != nil || n == 0 {
					t.Fatal("no reason was given")
				}
				if packet.Refusal(b[:n]) != nil {
					break
				}
			}
		})
	}
}

func TestAServiceAndTwoOfOneRoleAreRefusedInWords(t *testing.T) {
	for other, says := range map[packet.Role]string{packet.RoleReceiver: "both sides are the receiver",
		4: "one side is a service", 77: "peer of role 77"} {
		s, peer := socketPair(t, soon(t))
		if err := kernel.TrySend(peer, hello(other, 0)); err != nil {
			t.Fatal(err)
		}
		if _, err := receiverOfOne(s, Options{}, true); !errors.Is(err, ErrRefused) ||
			!strings.Contains(err.Error(), says) {
			t.Error(err)
		}
	}
}

// A peer that sends anything at any step: an error, and no descriptor or mapping more than before.
func TestAnyPacketsLeaveNothingBehind(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	count := func() int { return len(must(os.ReadDir("/proc/self/fd"))) }
	shakes := func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			t.Fatal(err)
		}
		s := must(handshake.New(ctx, fds[0], must((&Options{}).forBoth(0))))
		roles := []packet.Role{packet.RoleSender, packet.RoleReceiver, packet.Role(random.Uint32N(6))}
		_ = kernel.TrySend(fds[1], hello(roles[random.IntN(3)], random.Uint32N(2)))
		for range random.IntN(4) {
			p := packet.NewLane(1+random.Uint32N(6), []uint64{1 << 16, random.Uint64()}[random.IntN(2)], 100,
				lane.Start, lane.Unpack(random.Uint64()))
			var some []int
			for range random.IntN(5) {
				some = append(some, must(unix.Eventfd(0, unix.EFD_CLOEXEC)))
			}
			_ = kernel.TrySend(fds[1], p.Encode()[:80-random.IntN(2)*random.IntN(80)], some...)
			kernel.CloseAll(some)
		}
		_ = unix.Shutdown(fds[1], unix.SHUT_WR)
		if random.IntN(2) == 0 {
			_, err = s.NewSender(random.IntN(2) == 0)
		} else {
			_, err = receiverOfOne(s, Options{}, random.IntN(2) == 0)
		}
		if err == nil {
			t.Error("a peer that says nonsense was taken")
		}
		s.Close()
		unix.Close(fds[1])
	}
	shakes()
	before := count()
	for range 300 {
		shakes()
	}
	closesEnd(t)
	if after := count(); after > before {
		t.Fatalf("%d descriptors before, %d after", before, after)
	}
}
