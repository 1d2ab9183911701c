// Bench measures how many messages of 256 bytes a second go from one Go process to another: by pelton, copied in and
// read in place; and by a Unix stream socket, one write for each message, whose reader may take as many as it likes at
// a time. With -calls it measures how many calls, one after the other, each answered with its own bytes: by pelton, and
// by net/rpc over a Unix socket. With -subscribers a broadcast to so many processes takes the socket's place. The two
// take turns; the medians are printed, with the machine's load while they ran.
//
//	go run ./bench [-calls | -subscribers 8] [-bytes 256] [-count 2000000] [-runs 9]
//
// It is also what `./run bench` starts for pelton-go, go-sock-stream and net-rpc: see side.go.
package main

import (
	"bufio"
	same "bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/rpc"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	pelton "github.com/pelton-ipc/pelton/bindings/go"
)

var (
	bytes = flag.Int("bytes", 256, "of a message")
	count = flag.Int("count", 2_000_000,
		"messages of a run by pelton, or ten times the calls; a tenth of it by the socket")
	calls = flag.Bool("calls", false, "calls, not messages")
	runs  = flag.Int("runs", 9, "of each, by turns")
	// Of a broadcast.
	subscribers = flag.Int("subscribers", 0, "processes that subscribe to a broadcast; 0: no broadcast")
	// The other process of a run: the system, and where it connects to.
	sink = flag.String("sink", "", "for its own use")
)

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	// As pelton-bench starts its sides: the system, and then as all.
	if len(os.Args) == 4 && os.Args[2] == "side" {
		side(os.Args[1], os.Args[3])
		return
	}
	flag.Parse()
	if *sink != "" {
		system, place, _ := strings.Cut(*sink, " ")
		receive(system, place)
		return
	}
	directory, err := os.MkdirTemp("", "pelton-bench")
	check(err)
	defer os.RemoveAll(directory)
	rates := map[string][]float64{}
	systems := []string{"pelton", "socket"}
	if *calls {
		systems = []string{"pelton-calls", "net/rpc"}
	}
	if *subscribers > 0 {
		systems = []string{"broadcast", "pelton"}
	}
	for run := range *runs {
		for i := range systems {
			system := systems[(run+i)%len(systems)]
			rates[system] = append(rates[system], measure(system,
				filepath.Join(directory, fmt.Sprint(strings.ReplaceAll(system, "/", "-"), run))))
		}
	}
	load, _ := os.ReadFile("/proc/loadavg")
	for _, system := range systems {
		slices.Sort(rates[system])
		fmt.Printf("%-12s median %.3g M/s, %.3g to %.3g\n", system, median(rates[system])/1e6,
			rates[system][0]/1e6, rates[system][len(rates[system])-1]/1e6)
	}
	fmt.Printf("ratio        %.1f; %d bytes, %d runs, load %s\n", median(rates[systems[0]])/median(rates[systems[1]]),
		*bytes, *runs,
		strings.Join(strings.Fields(string(load))[:3], " "))
}

func median(sorted []float64) float64 { return sorted[len(sorted)/2] }

// measure is how many messages a second come through, from the first that is sent until the other process says that
// it has the last.
func measure(system, place string) float64 {
	messages := *count
	if system != "pelton" && system != "broadcast" {
		messages /= 10
	}
	if system == "net/rpc" {
		messages /= 10
	}
	if system == "broadcast" {
		return publish(place, messages)
	}
	self, err := os.Executable()
	check(err)
	other := exec.Command(self, "-bytes", fmt.Sprint(*bytes), "-count", fmt.Sprint(messages), "-sink", system+" "+place)
	other.Stderr = os.Stderr
	output, err := other.StdoutPipe()
	check(err)
	var send func(message []byte) error
	var close func() error
	switch system {
	case "pelton-calls", "net/rpc":
		check(other.Start())
		return ask(system, place, messages, bufio.NewReader(output), other)
	case "pelton":
		listener, err := pelton.Listen("unix:"+place, nil)
		check(err)
		check(other.Start())
		ctx := context.Background()
		sender, err := listener.AcceptSender(ctx)
		check(err)
		check(listener.Close())
		send, close = func(message []byte) error { return sender.Send(ctx, message) }, sender.Close
	default:
		listener, err := net.Listen("unix", place)
		check(err)
		check(other.Start())
		socket, err := listener.Accept()
		check(err)
		check(listener.Close())
		send, close = func(message []byte) error { _, err := socket.Write(message); return err }, socket.Close
	}
	message := make([]byte, *bytes)
	begin := time.Now()
	for n := range messages {
		message[0] = byte(n)
		check(send(message))
	}
	said, err := bufio.NewReader(output).ReadString('\n')
	took := time.Since(begin)
	if err != nil || said != "done\n" {
		log.Fatalf("the other process said %q: %v", said, err)
	}
	check(close())
	check(other.Wait())
	return float64(messages) / took.Seconds()
}

// publish is how many messages a second come through to all subscribers.
func publish(place string, messages int) float64 {
	self, err := os.Executable()
	check(err)
	ctx := context.Background()
	publisher, err := pelton.Publish("unix:"+place, nil)
	check(err)
	outputs, others := make([]*bufio.Reader, *subscribers), make([]*exec.Cmd, *subscribers)
	for i := range others {
		others[i] = exec.Command(self, "-bytes", fmt.Sprint(*bytes), "-count", fmt.Sprint(messages), "-sink",
			"broadcast "+place)
		others[i].Stderr = os.Stderr
		output, err := others[i].StdoutPipe()
		check(err)
		outputs[i] = bufio.NewReader(output)
		check(others[i].Start())
	}
	check(publisher.WaitSubscribers(ctx, *subscribers))
	message := make([]byte, *bytes)
	begin := time.Now()
	for n := range messages {
		message[0] = byte(n)
		check(publisher.Send(ctx, message))
	}
	for _, output := range outputs {
		if said, err := output.ReadString('\n'); err != nil || said != "done\n" {
			log.Fatalf("a subscriber said %q: %v", said, err)
		}
	}
	took := time.Since(begin)
	check(publisher.Close())
	for _, other := range others {
		check(other.Wait())
	}
	return float64(messages) / took.Seconds()
}

// receive receives the messages and checks each.
func receive(system, place string) {
	ctx, n := context.Background(), 0
	take := func(message []byte) {
		if message[0] != byte(n) || len(message) != *bytes {
			log.Fatalf("message %d is not what was sent", n)
		}
		n++
	}
	switch system {
	case "pelton-calls", "net/rpc":
		answer(system, place)
	case "pelton":
		receiver, err := pelton.ConnectReceiver(ctx, "unix:"+place, nil)
		check(err)
		for message, err := range receiver.Messages(ctx) {
			check(err)
			take(message.Bytes())
			if n == *count {
				fmt.Println("done")
			}
		}
		check(receiver.Close())
	case "broadcast":
		subscriber, err := pelton.ConnectSubscriber(ctx, "unix:"+place, nil)
		check(err)
		for delivery, err := range subscriber.Messages(ctx) {
			check(err)
			take(delivery.Bytes)
			if n == *count {
				fmt.Println("done")
			}
		}
		check(subscriber.Close())
	default:
		socket, err := net.Dial("unix", place)
		check(err)
		reader, message := bufio.NewReaderSize(socket, 64<<10), make([]byte, *bytes)
		for n < *count {
			_, err := io.ReadFull(reader, message)
			check(err)
			take(message)
		}
		fmt.Println("done")
		_, _ = reader.ReadByte()
	}
}

// ask is how many calls a second are answered.
func ask(system, place string, count int, output *bufio.Reader, other *exec.Cmd) float64 {
	said, err := output.ReadString('\n')
	if err != nil || said != "listening\n" {
		log.Fatalf("the other process said %q: %v", said, err)
	}
	request, reply := make([]byte, *bytes), make([]byte, *bytes)
	var call func() error
	var end func() error
	if system == "pelton-calls" {
		ctx := context.Background()
		client, err := pelton.ConnectClient(ctx, "unix:"+place, nil)
		check(err)
		call, end = func() (err error) { reply, err = client.CallInto(ctx, request, reply); return err }, client.Close
	} else {
		client, err := rpc.Dial("unix", place)
		check(err)
		call, end = func() error { return client.Call("Echo.Echo", &request, &reply) }, client.Close
	}
	once := func(n int) {
		request[n%len(request)]++
		check(call())
		if !same.Equal(request, reply) {
			log.Fatalf("reply %d is not its request", n)
		}
	}
	for n := range count / 20 {
		once(n)
	}
	begin := time.Now()
	for n := range count {
		once(n)
	}
	took := time.Since(begin)
	check(end())
	check(other.Process.Kill())
	_ = other.Wait()
	return float64(count) / took.Seconds()
}

// Echo is what net/rpc calls.
type Echo struct{}

// Echo answers with what is asked.
func (Echo) Echo(request *[]byte, reply *[]byte) error {
	*reply = *request
	return nil
}

// answer serves until it is killed.
func answer(system, place string) {
	if system == "pelton-calls" {
		service, err := pelton.ListenService("unix:"+place, nil)
		check(err)
		fmt.Println("listening")
		check(service.Serve(context.Background(),
			func(request pelton.Request) { check(request.Reply(request.Bytes())) }))
		return
	}
	listener, err := net.Listen("unix", place)
	check(err)
	check(rpc.Register(Echo{}))
	fmt.Println("listening")
	rpc.Accept(listener)
}
