// Bench measures how many messages of 256 bytes a second go from one Go process to another: by pelton, copied in and read in place; and
// by a Unix stream socket, one write for each message, whose reader may take as many as it likes at a time. The two take turns; the
// medians are printed, with the machine's load while they ran.
//
//	go run ./bench [-bytes 256] [-count 2000000] [-runs 9]
package main

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"pelton"
)

var (
	bytes = flag.Int("bytes", 256, "of a message")
	count = flag.Int("count", 2_000_000, "messages of a run by pelton; a tenth of it by the socket")
	runs  = flag.Int("runs", 9, "of each, by turns")
	// The other process of a run: the system, and where it connects to.
	sink = flag.String("sink", "", "for its own use")
)

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
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
	for run := range *runs {
		for i := range systems {
			system := systems[(run+i)%len(systems)]
			rates[system] = append(rates[system], measure(system, filepath.Join(directory, fmt.Sprint(system, run))))
		}
	}
	load, _ := os.ReadFile("/proc/loadavg")
	for _, system := range systems {
		slices.Sort(rates[system])
		fmt.Printf("%-8s median %.3f M/s, %.3f to %.3f\n", system, median(rates[system])/1e6,
			rates[system][0]/1e6, rates[system][len(rates[system])-1]/1e6)
	}
	fmt.Printf("ratio    %.1f; %d bytes, %d runs, load %s\n", median(rates["pelton"])/median(rates["socket"]), *bytes, *runs,
		strings.Join(strings.Fields(string(load))[:3], " "))
}

func median(sorted []float64) float64 { return sorted[len(sorted)/2] }

// measure is how many messages a second come through, from the first that is sent until the other process says that it has the last.
func measure(system, place string) float64 {
	messages := *count
	if system == "socket" {
		messages /= 10
	}
	self, err := os.Executable()
	check(err)
	other := exec.Command(self, "-bytes", fmt.Sprint(*bytes), "-count", fmt.Sprint(messages), "-sink", system+" "+place)
	other.Stderr = os.Stderr
	output, err := other.StdoutPipe()
	check(err)
	var send func(message []byte) error
	var close func() error
	if system == "pelton" {
		listener, err := pelton.Listen("unix:"+place, nil)
		check(err)
		check(other.Start())
		ctx := context.Background()
		sender, err := listener.AcceptSender(ctx)
		check(err)
		check(listener.Close())
		send, close = func(message []byte) error { return sender.Send(ctx, message) }, sender.Close
	} else {
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

// receive takes in the messages and looks at each.
func receive(system, place string) {
	ctx, n := context.Background(), 0
	take := func(message []byte) {
		if message[0] != byte(n) || len(message) != *bytes {
			log.Fatalf("message %d is not what was sent", n)
		}
		n++
	}
	if system == "pelton" {
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
	} else {
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
