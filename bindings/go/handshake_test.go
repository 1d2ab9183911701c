package pelton

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pelton/internal/lane"
)

// Replays spec/vectors/packets.json.

type number uint64

func (n *number) UnmarshalJSON(text []byte) error {
	value, err := strconv.ParseUint(strings.Trim(string(text), `"`), 0, 64)
	*n = number(value)
	return err
}

type packetVectors struct {
	Packets []struct {
		Meaning, Hex, Text string
		Fields             map[string]number
	}
	Refused   []struct{ Why, Expected, Hex string }
	Greetings []struct {
		Meaning, Hex string
		Role         role
		Is           json.RawMessage
	}
}

func readPackets(t testing.TB) (file packetVectors) {
	if err := json.Unmarshal(must(os.ReadFile("../../spec/vectors/packets.json")), &file); err != nil {
		t.Fatal(err)
	}
	if len(file.Packets) < 8 || len(file.Refused) < 10 || len(file.Greetings) < 20 {
		t.Fatal("too few vectors")
	}
	return file
}

func TestPacketsAreReadAndWrittenAsTheVectorsSay(t *testing.T) {
	for _, vector := range readPackets(t).Packets {
		f := func(name string) uint64 { return uint64(vector.Fields[name]) }
		wanted := packet{
			kind: uint32(f("kind")), wireVersion: uint32(f("wire_version")), layoutSignature: f("layout_signature"),
			role: role(f("role")), holds: uint32(f("holds")), capacity: f("capacity"), bytesMax: f("message_bytes_max"),
			generation: f("generation"), head: f("head"), tail: f("tail"), floor: f("floor"), seq: uint32(f("seq")), behind: vector.Text,
		}
		bytes := must(hex.DecodeString(vector.Hex))
		if found, ok := decodePacket(bytes); !ok || found != wanted {
			t.Errorf("%s: %+v", vector.Meaning, found)
		}
		if found := wanted.encode(); string(found) != string(bytes) {
			t.Errorf("%s: %x", vector.Meaning, found)
		}
	}
}

// socketPair is a hand-shake of this side's, and the peer's bare socket.
func socketPair(t testing.TB, ctx context.Context) (*shake, int) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	s, err := newShake(ctx, fds[0], must((&Options{}).forBoth(0)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.close(); unix.Close(fds[1]) })
	return s, fds[1]
}

func hello(of role, holds uint32) []byte {
	p := newPacket(kindHello)
	p.role, p.holds = of, holds
	if of != roleSender {
		p.capacity, p.bytesMax = limitsOfTheFormat.laneBytes, limitsOfTheFormat.messageBytes
	}
	return p.encode()
}

func TestGreetingsAreAnsweredAsTheVectorsSay(t *testing.T) {
	for _, vector := range readPackets(t).Greetings {
		t.Run(vector.Meaning, func(t *testing.T) {
			s, peer := socketPair(t, soon(t))
			if err := trySend(peer, must(hex.DecodeString(vector.Hex))); err != nil {
				t.Fatal(err)
			}
			_, err := s.greet(vector.Role.other(), false, true, func() (limits, error) { return limits{1 << 16, 77}, nil })
			b := make([]byte, packetBytesMax)
			n, _, _, failed := tryReceive(peer, b)
			if failed != nil {
				t.Fatal(failed)
			}
			answer, _ := decodePacket(b[:n])
			if string(vector.Is) == `"accepted"` {
				version, problem := readEntries(answer.behind)
				if err != nil || answer.kind != kindHello || answer.takes() != (limits{1 << 16, 77}) || version != versionText || problem != "" {
					t.Fatalf("%v, %+v", err, answer)
				}
				return
			}
			var is struct{ Refused []string }
			if err := json.Unmarshal(vector.Is, &is); err != nil || len(is.Refused) == 0 {
				t.Fatal(err)
			}
			if !errors.Is(err, ErrRefused) || answer.kind != kindRefused {
				t.Fatalf("%v, %+v", err, answer)
			}
			for _, wanted := range is.Refused {
				if !strings.Contains(answer.behind, wanted) {
					t.Errorf("%q has no %q", answer.behind, wanted)
				}
			}
		})
	}
}

func TestPacketsThatBreakTheRulesAreRefused(t *testing.T) {
	for _, vector := range readPackets(t).Refused {
		t.Run(vector.Why, func(t *testing.T) {
			s, peer := socketPair(t, soon(t))
			bytes := must(hex.DecodeString(vector.Hex))
			p, _ := decodePacket(bytes)
			bell := must(newBell())
			defer bell.close()
			capacity := p.capacity
			if !lane.CapacityIsValid(capacity) {
				capacity = 64
			}
			send := func(bytes []byte, fds ...int) {
				if len(bytes) == 0 {
					_ = unix.Shutdown(peer, unix.SHUT_RDWR)
				} else if err := trySend(peer, bytes, fds...); err != nil {
					t.Fatal(err)
				}
			}
			var err error
			switch vector.Expected {
			case "PRODUCER":
				page, data := must(makeProducerPage(p.capacity, p.bytesMax, p.generation)), must(makeData(capacity))
				defer page.close()
				defer data.close()
				send(hello(roleSender, 0))
				send(bytes, page.fd, bell.eventfd, data.fd)
				_, err = receiverOfOne(s, Options{}, false)
			case "CONSUMER":
				consumer, receiver, data := must(makeConsumerPage(lane.Unpack(p.head))), must(makeReceiverPage()), must(makeData(capacity))
				defer consumer.close()
				defer receiver.close()
				defer data.close()
				send(hello(roleReceiver, 1))
				send(bytes, consumer.fd, receiver.fd, bell.eventfd, data.fd)
				_, err = s.newSender(false)
			case "HELLO":
				send(bytes)
				_, _, err = s.receive(kindHello, 0)
			default:
				send(bytes)
				_, _, err = s.receive(kindReady, 0)
			}
			// Not for want of an answer: the packet alone decides.
			if err == nil || errors.Is(err, ErrSystem) || errors.Is(err, context.DeadlineExceeded) {
				t.Fatal(err)
			}
		})
	}
}

// Each check of what the peer shows, broken once.
func TestSegmentsThatAreNotWhatTheyMustBeAreRefused(t *testing.T) {
	const capacity = 1 << 16
	limit := lane.MessageBytesLimit(capacity)
	file := func(seals int, bytes uint64, write func([]byte)) int {
		s := must(createSegment("test", seals, bytes, write))
		fd := must(unix.FcntlInt(uintptr(s.fd), unix.F_DUPFD_CLOEXEC, 0))
		s.close()
		return fd
	}
	producer := func(b []byte) { lane.MakeProducerPage(b, capacity, limit, 1, 1) }
	none := func([]byte) {}
	pipe := make([]int, 2)
	if err := unix.Pipe2(pipe, unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer closeAll(pipe)
	ordinary := must(os.Create(t.TempDir() + "/file"))
	defer ordinary.Close()
	cases := map[string]struct{ page, data, bell func() int }{
		"all is well":               {},
		"page without FUTURE_WRITE": {page: func() int { return file(sizeSeals, lane.SegmentBytes, producer) }},
		"page without SHRINK":       {page: func() int { return file(controlSeals&^unix.F_SEAL_SHRINK, lane.SegmentBytes, producer) }},
		"page that is too large":    {page: func() int { return file(controlSeals, 2*lane.SegmentBytes, producer) }},
		"page that is too small":    {page: func() int { return file(controlSeals, 4096, producer) }},
		"page of zeros":             {page: func() int { return file(controlSeals, lane.SegmentBytes, none) }},
		"page of another role":      {page: func() int { return file(controlSeals, lane.SegmentBytes, lane.MakeReceiverPage) }},
		"page of another capacity": {page: func() int {
			return file(controlSeals, lane.SegmentBytes, func(b []byte) { lane.MakeProducerPage(b, 2*capacity, limit, 1, 1) })
		}},
		"page of another limit": {page: func() int {
			return file(controlSeals, lane.SegmentBytes, func(b []byte) { lane.MakeProducerPage(b, capacity, 1, 1, 1) })
		}},
		"page of two cursors":               {page: func() int { return file(controlSeals, lane.SegmentBytes, func(b []byte) { producer(b); b[80] = 2 }) }},
		"page that is a pipe":               {page: func() int { return must(unix.Dup(pipe[0])) }},
		"page that is a file":               {page: func() int { return must(unix.Dup(int(ordinary.Fd()))) }},
		"data that can grow":                {data: func() int { return file(unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL, capacity, none) }},
		"data that can be sealed further":   {data: func() int { return file(unix.F_SEAL_SHRINK|unix.F_SEAL_GROW, capacity, none) }},
		"data that is shorter than it says": {data: func() int { return file(sizeSeals, capacity/2, none) }},
		"bell that is a pipe":               {bell: func() int { return must(unix.Dup(pipe[1])) }},
		"bell that is a file":               {bell: func() int { return must(unix.Dup(int(ordinary.Fd()))) }},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
			defer cancel()
			s, peer := socketPair(t, ctx)
			fds := []int{}
			for i, make := range []func() int{c.page, c.bell, c.data} {
				usual := []func() int{
					func() int { return file(controlSeals, lane.SegmentBytes, producer) },
					func() int { return must(unix.Eventfd(0, unix.EFD_CLOEXEC)) },
					func() int { return file(sizeSeals, capacity, none) },
				}
				if make == nil {
					make = usual[i]
				}
				fds = append(fds, make())
			}
			defer closeAll(fds)
			offer := lanePacket(kindProducer, capacity, limit, lane.Start, lane.Start)
			offer.generation = 1
			ready := newPacket(kindReady)
			if err := errors.Join(trySend(peer, hello(roleSender, 0)), trySend(peer, offer.encode(), fds...), trySend(peer, ready.encode())); err != nil {
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
			// The peer hears why.
			b := make([]byte, packetBytesMax)
			for {
				n, fds, _, err := tryReceive(peer, b)
				closeAll(fds)
				if err != nil || n == 0 {
					t.Fatal("no reason was given")
				}
				if refusal(b[:n]) != nil {
					break
				}
			}
		})
	}
}

func TestAServiceAndTwoOfOneRoleAreRefusedInWords(t *testing.T) {
	for other, says := range map[role]string{roleReceiver: "both sides are the receiver", 4: "one side is a service", 77: "peer of role 77"} {
		s, peer := socketPair(t, soon(t))
		if err := trySend(peer, hello(other, 0)); err != nil {
			t.Fatal(err)
		}
		if _, err := receiverOfOne(s, Options{}, true); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), says) {
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
		s := must(newShake(ctx, fds[0], must((&Options{}).forBoth(0))))
		roles := []role{roleSender, roleReceiver, role(random.Uint32N(6))}
		_ = trySend(fds[1], hello(roles[random.IntN(3)], random.Uint32N(2)))
		for range random.IntN(4) {
			p := lanePacket(1+random.Uint32N(6), []uint64{1 << 16, random.Uint64()}[random.IntN(2)], 100, lane.Start, lane.Unpack(random.Uint64()))
			var some []int
			for range random.IntN(5) {
				some = append(some, must(unix.Eventfd(0, unix.EFD_CLOEXEC)))
			}
			_ = trySend(fds[1], p.encode()[:80-random.IntN(2)*random.IntN(80)], some...)
			closeAll(some)
		}
		_ = unix.Shutdown(fds[1], unix.SHUT_WR)
		if random.IntN(2) == 0 {
			_, err = s.newSender(random.IntN(2) == 0)
		} else {
			_, err = receiverOfOne(s, Options{}, random.IntN(2) == 0)
		}
		if err == nil {
			t.Error("a peer that says nonsense was taken")
		}
		s.close()
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
