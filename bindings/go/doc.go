// Package pelton sends messages between the processes of one machine at the speed of memory: a lane of shared memory for each sender,
// in which a message is written once and read in place. It speaks to pelton in Rust, C and any other language.
//
// It is pure Go: no cgo, and no thread that waits in the kernel (but for what a disk or a file's lock takes, in opening a path channel
// and in Sync). What it does is written in spec/layout.md and spec/protocol.md, which it
// obeys by itself.
//
//	// One process:
//	listener, err := pelton.Listen("events", nil)
//	receiver, err := listener.AcceptReceiver(ctx)
//	for message, err := range receiver.Messages(ctx) {
//		if err != nil { return err }              // ErrPeerDied: Resume may go on
//		fmt.Println(len(message.Bytes()))         // in place; released by the loop
//	}                                             // the sender has closed
//
//	// Another:
//	sender, err := pelton.ConnectSender(ctx, "events", nil)
//	err = sender.Send(ctx, []byte("hello"))       // waits while the lane is full
//
// A name is short ("events": a directory of sockets under $XDG_RUNTIME_DIR/pelton/, else /tmp/pelton-UID/) or a socket's path
// ("unix:/run/app/events"). Either end may listen. [Gather] makes a receiver of many senders.
//
// A channel that survives both sides is a directory, on tmpfs or disk: [CreateSender] and [CreateReceiver] make or open it. Either side
// may come first, die, and start again; what was committed and not released waits. There the other side's end is told once, and then the
// handle goes on: the next one may come at any time.
//
// # Calls
//
// A [Service] answers the requests of its clients, a [Client] asks:
//
//	service, err := pelton.ListenService("echo", nil)
//	err = service.Serve(ctx, func(request pelton.Request) {      // a goroutine for each
//		request.Reply(request.Bytes())
//	})
//
//	client, err := pelton.ConnectClient(ctx, "echo", nil)
//	reply, err := client.Call(ctx, []byte("hello"))              // any number of goroutines at a time
//	call, err := client.Submit(ctx, []byte("many"))              // and the answer later: Await, or
//	for part, err := range call.Parts(ctx) { ... }               // part by part
//
// When the context of a call ends, the call is cancelled, and the service is told: [Request.Context] ends. Of a short name several
// processes may be services: a client asks the least busy, and goes on when one dies, or drains for a successor ([Service.Drain]). What is in
// the records, and what of it is certain when a side dies, is in spec/call.md.
//
// # Waiting
//
// Calls that begin with Try never wait, nor do Commit, Abort, Release, Trim and Close. Others take a context, and end with its error when
// it ends. One that finds what it wants at once does not look at the context. Who waits looks on for some microseconds while it lets
// other goroutines run, less when that has not paid lately, and then is parked in the runtime's poller until the other side rings:
// see [Options.Wait]. Where this process has one processor it does not look on, but lets other processes run, twice, before it is parked.
//
// # Errors
//
// errors.Is finds the [Code], errors.As an [*Error] with the details. [ErrClosed] is the ordinary end of a channel, [ErrPeerDied] a
// process that ended without closing, proved by the system, never guessed from time, so a stopped process is not dead. What it had
// committed is received first; Resume goes on with its successor. After [ErrCorrupt] a handle cannot be used further. Of a call [*CallError] and
// [ErrAbandoned] are what its service says.
//
// # Goroutines
//
// One goroutine at a time uses a [Sender] or a [Receiver]; another that calls meanwhile is told [ErrConcurrentUse], and nothing has
// happened. Close and [Message.Release] may be called by any goroutine at any time. Handles, and messages, may be passed on. For many
// goroutines that send, give each a sender of its own, to a receiver made by [Gather]. A [Client] and a [Request] may be used by any goroutine at
// any time; one goroutine at a time awaits a [Call], and one takes requests from a [Service].
//
// # Units
//
// Sizes are in bytes. Message numbers count from 1, modulo 2^32, without 0.
//
// # Memory
//
// A message received lies in shared memory until it is released, also when the receiver is closed meanwhile. What a sender that breaks
// the rules can do is to change it while it is read; [Receiver.ReceiveInto] copies. Every word of the other side's is checked before it is
// used: it can make this side answer [ErrCorrupt], and not more.
//
// How much memory peers can make a receiver or a service use is in its options: Capacity and MessageBytesMax say the largest lane and message that it
// takes, Memory what all peers have together. See [Options].
//
// The race detector does not look at mapped memory, so it says nothing about a program's use of message bytes after Release, nor about
// two goroutines that write to one reservation. This package's own tests run the lane over memory of Go's, where it does look.
//
// # Forking
//
// Go programs do not fork without executing another program, which inherits nothing of a channel.
//
// # Not here
//
// Sending descriptors along with messages (receiving them is: [Message.TakeFiles]), flushing and record files are not in this package
// yet; nor is looking at a path channel from outside, repairing and removing it: pelton info, recover and rm do that.
package pelton
