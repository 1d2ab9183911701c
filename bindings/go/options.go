package pelton

import (
	"fmt"
	"log"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/directory"
	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/handshake"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/limits"
)

// Wait says how a call waits.
type Wait int

const (
	// Block busy-polls for 50 µs, and lets other goroutines run once meanwhile. It does not busy-poll if that was
	// useless lately, or if the peer shares this goroutine's processor. Then the goroutine is parked until the other side
	// rings. No thread waits in the kernel.
	Block Wait = iota
	// Spin polls without sleeping, and lets other goroutines run in between. It has the lowest latency, and occupies
	// a processor.
	Spin
)

// Policy is what a publisher does when a subscriber falls behind. The subscriber chooses it.
type Policy int

const (
	// Gate: the publisher waits for this subscriber once the lane is full. It misses nothing.
	Gate Policy = iota
	// Lag: the publisher never waits for it, and overwrites what is older than its slack. It learns how many messages it
	// missed.
	Lag
	// Latest: it receives the newest message only. Those that it skips count as missed.
	Latest
)

// StartFrom is the first message of a subscriber: FromNow, FromOldest, or, above 0, the last so many messages.
type StartFrom int

const (
	// FromNow: the next message.
	FromNow StartFrom = 0
	// FromOldest: the oldest message that the lane still has.
	FromOldest StartFrom = -1
)

// Options configure a channel, a link of calls or a broadcast. nil and the zero value have the defaults.
//
// A sender makes its lane. Each side limits the capacity and the messages, and the lesser limit applies. For a path
// channel its creator decides both. Each side decides how it waits.
type Options struct {
	// Capacity is the size in bytes of the lane that this side makes: how far the sender can be ahead of the
	// receiver. From 4096 to 16 GiB, rounded up to a multiple of 64 KiB; 0: 64 MiB. Memory is allocated as it is
	// used: a lane whose receiver keeps up uses 256 KiB.
	//
	// For a receiver, and for either side of calls, it is also the largest lane that this side takes, and the peer
	// makes its lane no larger. 0: 16 GiB for a peer of the same user, 64 MiB for another user. For an existing path
	// channel, opening checks it: if it is set, and, with these defaults, if the directory belongs to another user.
	Capacity int
	// MessageBytesMax is the largest message in bytes. 0: what the capacity permits, which is half of it less 32 and
	// below 2 GiB. A sender that sets more than its receiver takes fails to connect with [ErrOption].
	//
	// For a receiver it is the largest message that it takes. 0: 2^31-16 bytes for a peer of the same user, 1 MiB for
	// another user. For a path channel it is checked like Capacity.
	MessageBytesMax int
	// Memory limits, in bytes, the memory that peers can make this side use. 0: no limit for lanes.
	//
	// A receiver from [Gather] takes from a new peer a lane of at most a sixteenth of the remaining Memory, rounded
	// down to a multiple of 64 KiB. A [Service], whose clients have two lanes each, takes a thirty-second for each.
	// Both refuse peers while that is less than 64 KiB. The least is 1 MiB, for a service 2 MiB. When a peer is gone,
	// its share becomes free.
	//
	// A service also counts replies that wait for space at their client, and requests of which some pieces have come.
	// A call for which nothing is left fails with [ErrServiceMemory]. What the service keeps for one client grows
	// only while as much is left as that client then has: one client alone has at most half. 0: a service may have
	// 256 MiB for these, or four times CallBytesMax if that is more.
	//
	// A receiver of one sender, and a client, take lanes of at most Memory each. A receiver opens a path channel only
	// if all its lanes together are within Memory; the creator of one makes lanes that are. Other senders ignore it,
	// as no peer writes to them.
	Memory int
	// Traced permits messages of this side's sender to carry their position in a distributed trace:
	// [Sender.SendTraced] and [Message.Traceparent]. A message without one costs nothing more; the largest message is
	// 40 bytes smaller. For a path channel its creator decides. The receiver's side needs no option, but a pelton that
	// knows it: an earlier version is refused when it connects, or opens the path. Without it, SendTraced sends the
	// message without its traceparent.
	Traced bool
	// ResidentMax limits, in bytes, the part of the lane that this side's sender uses while its receiver keeps up. 0:
	// 16 MiB. A sender starts with 256 KiB, and uses more only while that is faster. If the receiver falls behind,
	// the lane still extends to its capacity. All senders of a process together use at most 64 MiB more than their
	// 256 KiB each.
	ResidentMax int
	// Wait is how this side waits.
	Wait Wait
	// UIDs are users that may be the peer, besides this process's own user.
	UIDs []int
	// Await makes connecting wait for a listener until the context ends. Opening a path waits for the channel to be
	// created, for its role to be free, and, unless it is a broadcast, for the other side to open it too, or, for a
	// receiver, for messages in it. Without Await, connecting fails immediately with [ErrNoListener], and opening with
	// [ErrNoChannel]. Opening then waits 200 ms for a taken role, because a killed process keeps its role until the
	// kernel has ended it, and does not wait for the other side.
	Await bool
	// Lanes is how many senders a path channel can have at a time, decided by its creator: at most 1024. 0: 1.
	Lanes int
	// Mode is the permission bits of a path channel's directory: of one that this side creates, and the most that an
	// existing one may have. 0: 0o700. Its files have them without the execute bits.
	Mode uint32
	// SendersMax is the largest number of senders, at a time, of a receiver from [Gather], and of clients of a
	// service: at most 1024. 0: 1024.
	SendersMax int
	// CallBytesMax is the largest request, reply or part, in bytes, that this side of calls takes. 0: 64 MiB.
	CallBytesMax int
	// Handlers is the largest number of requests that [Service.Serve] handles at a time, each in a goroutine. 0:
	// 1024. With 1, the goroutine that serves handles them one after the other.
	Handlers int
	// Policy is what a publisher does when this subscriber falls behind.
	Policy Policy
	// LagAfter limits how long a subscriber with Gate may hold the publisher up at one message, also if it receives some
	// meanwhile. Then it lags until it has caught up: it may miss messages, and learns how many. 0: no limit.
	LagAfter time.Duration
	// Slack is how many bytes of messages a subscriber that lags may be behind before the publisher passes it, at most
	// half the publisher's capacity. The newest message, if it has at most half the capacity, counts whatever its size.
	// The publisher keeps them only while no message needs their space. 0: 256 KiB.
	Slack int
	// StartFrom is the first message of a subscriber. See History for earlier ones.
	StartFrom StartFrom
	// Durable is the name under which a subscriber of a directory keeps its place, over restarts of its process and of the
	// publisher: 1 to 64 letters, digits, '.', '_' or '-'. One process at a time uses it. While none does, the
	// subscription still counts by its policy: with Gate it holds the publisher up once the lane is full, with LagAfter or
	// Lag it misses messages, and learns how many. A message counts as received once it is released. Not with Latest.
	// [RemoveSubscription] removes it. "": the place is given up when the subscriber ends.
	Durable string
	// History is how many messages a publisher keeps for subscribers that join later, as far as they fit into half its
	// capacity and no message needs the space. Without it, a subscriber that begins with earlier messages finds those
	// that happen not to be overwritten yet.
	History int
	// HoldMax is how long one subscriber may hold a publisher up at one message. One that could do so for longer is
	// refused: with a limit, Gate needs a LagAfter of at most that. 0: no limit. Below 0: each subscriber must lag. In a
	// directory it stays when the publisher leaves, until the next one stores its own: see [CreatePublisher].
	HoldMax time.Duration
	// OnLeak is called for a message that was neither released nor is referenced any more, some time later, by a
	// goroutine of its own. Its space becomes free. nil: it is logged.
	OnLeak func(seq uint32)
}

func (o *Options) orDefault() Options {
	if o == nil {
		return Options{}
	}
	return *o
}

func (o *Options) access() directory.Access {
	if o.Mode == 0 {
		return directory.Access{UIDs: o.UIDs, Mode: 0o700}
	}
	return directory.Access{UIDs: o.UIDs, Mode: o.Mode}
}

// makes returns the lane that these options make.
func (o *Options) makes() (limits.Limits, error) {
	made := limits.Limits{LaneBytes: uint64(o.Capacity)}
	if o.Capacity == 0 {
		made.LaneBytes = 64 << 20
	}
	if made.LaneBytes < lane.CapacityMin || made.LaneBytes > lane.CapacityMax {
		return made, fail.New(ErrOption, "Capacity is %d, wanted %d to %d bytes", o.Capacity, lane.CapacityMin,
			uint64(lane.CapacityMax))
	}
	made.LaneBytes = limits.RoundUp(made.LaneBytes, limits.LaneGranule)
	made.MessageBytes = o.messageLimit(made.LaneBytes)
	if o.MessageBytesMax < 0 || uint64(o.MessageBytesMax) > made.MessageBytes {
		return made, fail.New(ErrOption,
			"MessageBytesMax is %d, wanted at most %d bytes with a capacity of %d: raise the capacity",
			o.MessageBytesMax, made.MessageBytes, made.LaneBytes)
	}
	if o.ResidentMax < 0 {
		return made, fail.New(ErrOption, "ResidentMax is %d, wanted 0 or more bytes", o.ResidentMax)
	}
	if o.MessageBytesMax > 0 {
		made.MessageBytes = uint64(o.MessageBytesMax)
	}
	return made, nil
}

// messageLimit returns the largest message of a lane that this side makes with this capacity.
func (o *Options) messageLimit(capacity uint64) uint64 {
	if o.Traced {
		return lane.TracedMessageBytesLimit(capacity)
	}
	return lane.MessageBytesLimit(capacity)
}

// takes returns what a receiver with these options takes from a peer, once they are checked.
func (o *Options) takes(isOwnUser bool) limits.Limits {
	takes := limits.OfOtherUser
	if isOwnUser {
		takes = limits.OfFormat
	}
	if o.Capacity > 0 {
		takes.LaneBytes = limits.RoundUp(uint64(o.Capacity), limits.LaneGranule)
	}
	if o.MessageBytesMax > 0 {
		takes.MessageBytes = uint64(o.MessageBytesMax)
	}
	if o.Memory > 0 {
		takes.LaneBytes = min(takes.LaneBytes, max(limits.LaneWithin(uint64(o.Memory)), lane.CapacityMin))
	}
	return takes
}

// checkMemory checks that Memory, which all peers share, is enough for the first peer's lanes. With 0 lanes, Memory
// is one peer's, whose lane has at least [lane.CapacityMin] bytes.
func (o *Options) checkMemory(lanes int) error {
	least := limits.PeerFraction * limits.LaneGranule * lanes
	if o.Memory < 0 || o.Memory > 0 && o.Memory < least {
		return fail.New(ErrOption, "Memory is %d, wanted 0 (none) or at least %d bytes", o.Memory, max(least, 1))
	}
	return nil
}

// forSender returns the settings of a side that makes its lane.
func (o *Options) forSender() (limits.Settings, error) {
	made, err := o.makes()
	return limits.Settings{UIDs: o.UIDs, Makes: made, MessageBytes: uint64(max(o.MessageBytesMax, 0)), Traced: o.Traced}, err
}

// forReceiver returns the settings of a side that takes lanes; for lanes see checkMemory.
func (o *Options) forReceiver(lanes int) (limits.Settings, error) {
	if o.Capacity != 0 && (o.Capacity < lane.CapacityMin || o.Capacity > lane.CapacityMax) {
		return limits.Settings{}, fail.New(ErrOption, "Capacity is %d, wanted %d to %d bytes", o.Capacity,
			lane.CapacityMin, uint64(lane.CapacityMax))
	}
	if most := limits.OfFormat.MessageBytes; o.MessageBytesMax < 0 || uint64(o.MessageBytesMax) > most {
		return limits.Settings{}, fail.New(ErrOption, "MessageBytesMax is %d, wanted 0 to %d bytes", o.MessageBytesMax,
			most)
	}
	return limits.Settings{UIDs: o.UIDs, TakesOfOwn: o.takes(true), TakesOfOthers: o.takes(false)}, o.checkMemory(lanes)
}

// forBoth returns the settings of a side that may do either.
func (o *Options) forBoth(lanes int) (limits.Settings, error) {
	made, err := o.forSender()
	if err != nil {
		return limits.Settings{}, err
	}
	both, err := o.forReceiver(lanes)
	both.Makes, both.MessageBytes, both.Traced = made.Makes, made.MessageBytes, made.Traced
	return both, err
}

// forPublisher returns the settings of a publisher.
func (o *Options) forPublisher() (limits.Settings, error) {
	if o.History < 0 {
		return limits.Settings{}, fail.New(ErrOption, "History is %d, wanted 0 or more messages", o.History)
	}
	return o.forSender()
}

func (o *Options) holdLimit() lane.HoldLimit {
	switch {
	case o.HoldMax == 0:
		return 0
	case o.HoldMax < 0:
		return 1
	}
	return lane.HoldLimit(o.HoldMax) + 1
}

// forSubscriber returns the settings of a subscriber, its policy and where it begins.
func (o *Options) forSubscriber() (s limits.Settings, policy lane.Policy, from lane.From, err error) {
	policy = lane.Policy{Kind: lane.Gate, Slack: uint64(o.Slack)}
	if o.Slack == 0 {
		policy.Slack = lane.SlackDefault
	}
	switch {
	case o.Policy < Gate || o.Policy > Latest:
		err = fail.New(ErrOption, "Policy is %d, wanted Gate, Lag or Latest", o.Policy)
	case o.Slack < 0 || o.LagAfter < 0:
		err = fail.New(ErrOption, "Slack is %d and LagAfter %v, wanted 0 or more", o.Slack, o.LagAfter)
	case o.StartFrom < FromOldest:
		err = fail.New(ErrOption, "StartFrom is %d, wanted FromNow, FromOldest or a number of messages", o.StartFrom)
	case o.Policy == Lag:
		policy.Kind = lane.Lag
	case o.Policy == Latest:
		policy.Kind = lane.Latest
	case o.LagAfter > 0:
		policy.Kind, policy.LagAfterNS = lane.GateUntil, uint64(o.LagAfter)
	}
	switch {
	case o.StartFrom == FromOldest:
		from.Kind = lane.FromOldest
	case o.StartFrom > 0:
		from = lane.From{Kind: lane.FromLast, Last: uint64(o.StartFrom)}
	}
	if err == nil {
		s, err = o.forReceiver(0)
	}
	return s, policy, from, err
}

// refuseDurable is for subscribers that are not of a directory.
func (o *Options) refuseDurable() error {
	if o.Durable != "" {
		return fail.New(ErrOption, "Durable is %q, wanted none: only a directory keeps a place, see OpenSubscriber",
			o.Durable)
	}
	return nil
}

// forCalls returns the settings of a client or a service.
func (o *Options) forCalls(lanes int) (limits.Settings, error) {
	s, err := o.forBoth(lanes)
	switch {
	case err != nil:
		return s, err
	case s.Makes.MessageBytes < handshake.CallMessageMin:
		return s, fail.New(ErrOption, "MessageBytesMax comes to %d, wanted at least %d for calls", s.Makes.MessageBytes,
			handshake.CallMessageMin)
	case o.CallBytesMax < 0 || o.Handlers < 0:
		return s, fail.New(ErrOption, "CallBytesMax is %d and Handlers %d, wanted 0 or more", o.CallBytesMax,
			o.Handlers)
	}
	if s.CallBytes = uint64(o.CallBytesMax); s.CallBytes == 0 {
		s.CallBytes = 64 << 20
	}
	return s, nil
}

// pathMakes returns the lanes of a path channel that these options make, within Memory.
func (o *Options) pathMakes() (limits.Limits, error) {
	if err := o.checkMemory(0); err != nil {
		return limits.Limits{}, err
	}
	made, err := o.makes()
	if err != nil || o.Memory == 0 {
		return made, err
	}
	made.LaneBytes = min(made.LaneBytes, max(limits.LaneWithin(uint64(o.Memory/max(o.Lanes, 1))), lane.CapacityMin))
	made.MessageBytes = min(made.MessageBytes, o.messageLimit(made.LaneBytes))
	return made, nil
}

// pathTakes returns the largest lane of a path channel that a receiver takes. Its own Capacity is for a channel that
// it makes.
func (o *Options) pathTakes(isOwnUser bool) uint64 {
	switch {
	case o.Memory > 0:
		return uint64(o.Memory)
	case isOwnUser:
		return limits.OfFormat.LaneBytes
	}
	return limits.OfOtherUser.LaneBytes
}

func (o *Options) sendersMax() (int, error) {
	if o.SendersMax < 0 || o.SendersMax > 1024 {
		return 0, fail.New(fail.ErrOption, "SendersMax is %d, wanted 1 to 1024", o.SendersMax)
	}
	if o.SendersMax == 0 {
		return 1024, nil
	}
	return o.SendersMax, nil
}

func (o *Options) leaked(seq uint32) {
	if o.OnLeak != nil {
		o.OnLeak(seq)
		return
	}
	log.Print(fmt.Sprintf("pelton: message %d was dropped without Release; its space is given back only now", seq))
}
