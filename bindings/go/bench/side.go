package main

import (
	"bufio"
	same "bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/rpc"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	_ "unsafe" // for the clock

	pelton "github.com/pelton-ipc/pelton/bindings/go"
)

// A side of `./run bench`: stream and call, by pelton, by a Unix stream socket, by net/rpc. The contract is that of
// bench/src/side.rs and bench/src/payload.rs: each message has its number, and number and size of every one are
// compared, every byte of the first ones and of a stream's last.
type job struct {
	Workload string `json:"workload"`
	Role     string `json:"role"`
	Wait     string `json:"wait"`
	Sizes    struct {
		Min, Max uint32
	} `json:"sizes"`
	Capacity  int     `json:"capacity"`
	DelayUs   int     `json:"delay_us"`
	Directory string  `json:"directory"`
	Senders   int     `json:"senders"`
	Idle      int     `json:"idle"`
	Index     int     `json:"index"`
	Passes    []pass  `json:"passes"`
	Calls     inCalls `json:"calls"`
}

type inCalls struct {
	InFlight int     `json:"in_flight"`
	Rate     *uint32 `json:"rate"`
}

type pass struct {
	Count    uint64 `json:"count"`
	TimeEach bool   `json:"time_each"`
}

const warmUp = 16

// report is what a side says of a pass.
type report struct {
	StartNs     int64        `json:"start_ns"`
	EndNs       int64        `json:"end_ns"`
	Bytes       uint64       `json:"bytes"`
	Usage       usage        `json:"usage"`
	Percentiles *percentiles `json:"percentiles"`
}

type usage struct {
	CPUSeconds  float64 `json:"cpu_seconds"`
	Voluntary   int64   `json:"voluntary_switches"`
	Involuntary int64   `json:"involuntary_switches"`
}

type percentiles struct {
	MeanNs  float64      `json:"mean_ns"`
	P50Ns   *int64       `json:"p50_ns"`
	P90Ns   *int64       `json:"p90_ns"`
	P99Ns   *int64       `json:"p99_ns"`
	P999Ns  *int64       `json:"p999_ns"`
	P9999Ns *int64       `json:"p9999_ns"`
	Ladder  [][2]float64 `json:"ladder"`
}

// now reads CLOCK_MONOTONIC, as the other systems' sides do.
//
//go:linkname now runtime.nanotime
func now() int64

func used() usage {
	var found syscall.Rusage
	check(syscall.Getrusage(syscall.RUSAGE_SELF, &found))
	seconds := func(t syscall.Timeval) float64 { return float64(t.Sec) + float64(t.Usec)*1e-6 }
	return usage{seconds(found.Utime) + seconds(found.Stime), found.Nvcsw, found.Nivcsw}
}

func say(value any) {
	text, err := json.Marshal(value)
	check(err)
	fmt.Println(string(text))
}

// passes makes each pass when its input says go, and stays until that ends.
func (j *job) passes(once func(p pass) (uint64, []int64)) {
	orders := bufio.NewReader(os.Stdin)
	for _, p := range j.Passes {
		say("ready")
		if order, err := orders.ReadString('\n'); order != "go\n" {
			fail(fmt.Errorf("found the order %q, wanted to go: %w", order, err))
		}
		if j.Role == "receiver" || j.Role == "service" {
			say("started")
		}
		before, start := used(), now()
		bytes, took := once(p)
		end, after := now(), used()
		r := report{StartNs: start, EndNs: end, Bytes: bytes}
		r.Usage = usage{after.CPUSeconds - before.CPUSeconds, after.Voluntary - before.Voluntary,
			after.Involuntary - before.Involuntary}
		if len(took) > 0 {
			r.Percentiles = percentilesOf(took)
		}
		say(r)
	}
	_, _ = orders.ReadString('\n')
}

var quantiles = []float64{0, 0.1, 0.25, 0.5, 0.625, 0.75, 0.82, 0.9, 0.94, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999,
	0.9995, 0.9998, 0.9999, 0.99995, 0.99999}

func percentilesOf(took []int64) *percentiles {
	slices.Sort(took)
	sum, count := 0.0, float64(len(took))
	for _, ns := range took {
		sum += float64(ns)
	}
	at := func(quantile float64) int64 { return took[min(int(quantile*count), len(took)-1)] }
	// Null unless ten are beyond it.
	named := func(quantile float64) *int64 {
		if (1-quantile)*count < 9.5 {
			return nil
		}
		ns := at(quantile)
		return &ns
	}
	p := &percentiles{sum / count, named(0.5), named(0.9), named(0.99), named(0.999), named(0.9999), nil}
	for _, quantile := range quantiles {
		if (1-quantile)*count >= 1 {
			p.Ladder = append(p.Ladder, [2]float64{quantile, float64(at(quantile))})
		}
	}
	p.Ladder = append(p.Ladder, [2]float64{1, float64(took[len(took)-1])})
	return p
}

// pattern is what is behind a message's number.
func (j *job) pattern() []byte {
	bytes := make([]byte, j.Sizes.Max)
	for at := range bytes {
		bytes[at] = byte(at)*31 + byte(at>>8) + 7
	}
	return bytes
}

func (j *job) place() string { return filepath.Join(j.Directory, "there") }

func (j *job) options() *pelton.Options { return &pelton.Options{Capacity: j.Capacity} }

// side does the part of that job.
func side(system, text string) {
	var j job
	check(json.Unmarshal([]byte(text), &j))
	// The starting process removes it.
	_, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, syscall.PR_SET_PDEATHSIG, uintptr(syscall.SIGKILL), 0)
	if errno != 0 {
		fail(errno)
	}
	switch {
	case j.Wait != "block":
		fail(fmt.Errorf("a goroutine that waits is parked, and cannot wait by %s: write block", j.Wait))
	case j.Sizes.Min != j.Sizes.Max || j.Sizes.Min < 8:
		fail(fmt.Errorf("its sides in Go have messages of one size from 8 bytes, found %d..%d", j.Sizes.Min,
			j.Sizes.Max))
	case j.Senders != 1 || j.Idle != 0 || j.Calls.Rate != nil || j.DelayUs != 0:
		fail(errors.New("its sides in Go have one client, which never rests"))
	}
	switch j.Role {
	case "sender":
		j.send(system)
	case "receiver":
		j.receive(system)
	case "client":
		j.ask(system)
	case "service":
		j.answer(system)
	default:
		fail(fmt.Errorf("a side in Go is no %s", j.Role))
	}
}

// fail says why, as all sides do.
func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// untilThere tries until the other side has made what is opened.
func untilThere[T any](open func() (T, error)) T {
	until := time.Now().Add(20 * time.Second)
	for {
		value, err := open()
		if err == nil {
			return value
		}
		if time.Now().After(until) {
			fail(err)
		}
		time.Sleep(time.Millisecond)
	}
}

func (j *job) send(system string) {
	ctx, message := context.Background(), j.pattern()
	var send func(message []byte) error
	if system == "pelton-go" {
		sender := untilThere(func() (*pelton.Sender, error) {
			return pelton.ConnectSender(ctx, "unix:"+j.place(),
				j.options())
		})
		defer sender.Close()
		send = func(message []byte) error { return sender.Send(ctx, message) }
	} else {
		socket := untilThere(func() (net.Conn, error) { return net.Dial("unix", j.place()) })
		defer socket.Close()
		send = func(message []byte) error { _, err := socket.Write(message); return err }
	}
	stream := func(count uint64) uint64 {
		for n := range count {
			binary.LittleEndian.PutUint64(message, n)
			check(send(message))
		}
		return count * uint64(len(message))
	}
	stream(warmUp)
	j.passes(func(p pass) (uint64, []int64) { return stream(p.Count), nil })
}

// receive copies each message out, as all systems' sides do with messages of one size.
func (j *job) receive(system string) {
	ctx, wanted, buffer := context.Background(), j.pattern(), make([]byte, j.Sizes.Max)
	var receive func() (int, error)
	if system == "pelton-go" {
		listener, err := pelton.Listen("unix:"+j.place(), j.options())
		check(err)
		receiver, err := listener.AcceptReceiver(ctx)
		check(err)
		check(listener.Close())
		defer receiver.Close()
		receive = func() (int, error) { return receiver.ReceiveInto(ctx, buffer) }
	} else {
		listener, err := net.Listen("unix", j.place())
		check(err)
		socket, err := listener.Accept()
		check(err)
		defer socket.Close()
		reader := bufio.NewReaderSize(socket, 64<<10)
		receive = func() (int, error) { return io.ReadFull(reader, buffer) }
	}
	stream := func(count uint64, whole bool) uint64 {
		for n := range count {
			size, err := receive()
			check(err)
			if size != len(wanted) || binary.LittleEndian.Uint64(buffer) != n {
				fail(fmt.Errorf("message %d is not the one that was sent: lost, doubled or out of order", n))
			}
			if (whole || n+1 == count) && !same.Equal(buffer[8:], wanted[8:]) {
				fail(fmt.Errorf("message %d has other bytes than were sent", n))
			}
		}
		return count * uint64(len(wanted))
	}
	stream(warmUp, true)
	j.passes(func(p pass) (uint64, []int64) { return stream(p.Count, false), nil })
}

// ask makes the calls, as many at a time as the job says, each by a goroutine.
func (j *job) ask(system string) {
	ctx := context.Background()
	var call func(request, reply []byte) ([]byte, error)
	if system == "pelton-go" {
		client := untilThere(func() (*pelton.Client, error) {
			return pelton.ConnectClient(ctx, "unix:"+j.place(),
				j.options())
		})
		defer client.Close()
		call = func(request, reply []byte) ([]byte, error) { return client.CallInto(ctx, request, reply) }
	} else {
		client := untilThere(func() (*rpc.Client, error) { return rpc.Dial("unix", j.place()) })
		defer client.Close()
		call = func(request, reply []byte) ([]byte, error) {
			err := client.Call("Echo.Echo", &request, &reply)
			return reply, err
		}
	}
	many := max(j.Calls.InFlight, 1)
	round := func(count uint64, each bool) (uint64, []int64) {
		var all sync.WaitGroup
		took := make([][]int64, many)
		for worker := range many {
			all.Add(1)
			go func() {
				defer all.Done()
				request, reply := j.pattern(), make([]byte, j.Sizes.Max)
				for n := uint64(worker); n < count; n += uint64(many) {
					binary.LittleEndian.PutUint64(request, n)
					var start int64
					if each {
						start = now()
					}
					var err error
					reply, err = call(request, reply)
					if each {
						took[worker] = append(took[worker], now()-start)
					}
					check(err)
					if !same.Equal(request, reply) {
						fail(fmt.Errorf("the reply to call %d has other bytes than the request", n))
					}
				}
			}()
		}
		all.Wait()
		return count * uint64(j.Sizes.Max), slices.Concat(took...)
	}
	round(warmUp, false)
	j.passes(func(p pass) (uint64, []int64) { return round(p.Count, p.TimeEach) })
}

// answer serves until all passes are made.
func (j *job) answer(system string) {
	// The sums at which a pass ends are known before the first call comes.
	ends := []uint64{warmUp}
	for _, p := range j.Passes {
		if p.Count > 0 {
			ends = append(ends, ends[len(ends)-1]+p.Count)
		}
	}
	counted := &tally{ends: ends, over: make(chan struct{}, len(ends))}
	if system == "pelton-go" {
		service, err := pelton.ListenService("unix:"+j.place(), j.options())
		check(err)
		go func() {
			_ = service.Serve(context.Background(), func(request pelton.Request) {
				check(request.Reply(request.Bytes()))
				counted.note()
			})
		}()
	} else {
		listener, err := net.Listen("unix", j.place())
		check(err)
		check(rpc.RegisterName("Echo", Counting{counted}))
		go rpc.Accept(listener)
	}
	<-counted.over
	j.passes(func(p pass) (uint64, []int64) {
		if p.Count > 0 {
			<-counted.over
		}
		return p.Count * uint64(j.Sizes.Max), nil
	})
}

// tally counts the replies, and reports the last of each pass.
type tally struct {
	answered atomic.Uint64
	next     atomic.Int32
	ends     []uint64
	over     chan struct{}
}

func (t *tally) note() {
	// The last reply of a pass is alone: the next pass begins after it.
	if t.answered.Add(1) == t.ends[t.next.Load()] {
		if int(t.next.Load())+1 < len(t.ends) {
			t.next.Add(1)
		}
		t.over <- struct{}{}
	}
}

// Counting is net/rpc's Echo, and counts.
type Counting struct{ counted *tally }

// Echo answers with what is asked.
func (c Counting) Echo(request *[]byte, reply *[]byte) error {
	*reply = *request
	c.counted.note()
	return nil
}
