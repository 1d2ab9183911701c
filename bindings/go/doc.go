// Package pelton sends messages between the processes of one Linux machine at memory speed. Each sender has a lane of
// shared memory, in which a message is written once and read in place. The other side may be in Rust, C or another
// language.
//
// It is pure Go, without cgo. No thread waits in the kernel, except one for each service, for a disk or a file's lock
// when a path channel is opened or synced, and for record files. It implements spec/layout.md, spec/protocol.md,
// spec/broadcast.md, spec/call.md and spec/record-file.md.
//
//	// One process:
//	listener, err := pelton.Listen("events", nil)
//	receiver, err := listener.AcceptReceiver(ctx)
//	for message, err := range receiver.Messages(ctx) {
//		if err != nil { return err }              // ErrPeerDied: Resume waits for a successor
//		fmt.Println(len(message.Bytes()))         // in place; the loop releases it
//	}                                             // the sender has closed
//
//	// Another process:
//	sender, err := pelton.ConnectSender(ctx, "events", nil)
//	err = sender.Send(ctx, []byte("hello"))       // waits while the lane is full
//
// A name is short, such as "events": a directory of sockets below $XDG_RUNTIME_DIR/pelton/, or /tmp/pelton-UID/. Or it
// is a socket's path, such as "unix:/run/app/events". Either side may listen. [Gather] returns a receiver of many
// senders.
//
// A path channel is a directory, on tmpfs or disk, and outlives both sides: [CreateSender] and [CreateReceiver] create
// or open it. Either side may come first, die, and start again; what was committed and not released stays. The end of
// the other side is reported once, and then the handle continues: the next one may come at any time.
//
// # Broadcasts
//
// A [Publisher] sends each message to up to 64 [Subscriber]s, which join and leave at any time. The message is in
// memory once, however many read it:
//
//	publisher, err := pelton.Publish("prices", nil)
//	err = publisher.Send(ctx, []byte("price 1"))
//
//	subscriber, err := pelton.ConnectSubscriber(ctx, "prices", &pelton.Options{Policy: pelton.Lag})
//	for delivery, err := range subscriber.Messages(ctx) {
//		fmt.Println(len(delivery.Bytes), delivery.Missed)
//	}
//
// Each subscriber chooses what happens when it falls behind: see [Policy]. The publisher may refuse those that could
// hold it up for too long: see [Options.HoldMax].
//
// A directory keeps the lane: [CreatePublisher] and [OpenSubscriber] come and go in any order, and each continues where
// its predecessor was. A subscriber with [Options.Durable] keeps its place under a name.
//
// # Calls
//
// A [Client] calls a [Service]:
//
//	service, err := pelton.ListenService("echo", nil)
//	err = service.Serve(ctx, func(request pelton.Request) {      // a goroutine for each
//		request.Reply(request.Bytes())
//	})
//
//	client, err := pelton.ConnectClient(ctx, "echo", nil)
//	reply, err := client.Call(ctx, []byte("hello"))              // from any number of goroutines
//	call, err := client.Submit(ctx, []byte("many"))              // the reply later: Await, or
//	for part, err := range call.Parts(ctx) { ... }               // part by part
//
// When the context of a call ends, the call is cancelled, and so is [Request.Context] at the service. Several
// processes may serve a short name. A client uses the least busy one, and continues with others when one dies or
// drains for a successor ([Service.Drain]). What is certain when a side dies is in spec/call.md.
//
// # Record files
//
// A [RecordFile] stores messages: those that [RecordFile.Append] appends, or, by [Receiver.FlushTo], all that a
// receiver receives. A [RecordReader] reads them, also while a writer continues:
//
//	file, err := pelton.OpenRecordFile("events.records", nil)
//	err = receiver.FlushTo(ctx, file)          // each message once, also after a kill; until the sender closes
//
//	reader, err := pelton.OpenRecordReader("events.records")
//	for record, err := range reader.Records() { ... }
//
// # Waiting
//
// Methods whose names begin with Try never wait, nor do Commit, Abort, Release, TakeFiles, Trim and Close. The others
// take a context, and return its error when it ends; if they need not wait, they ignore it. A waiting goroutine first
// polls its peer's memory, for 50 µs. Other goroutines may run once meanwhile. It does not poll if the peer last woke
// it from the processor on which it runs itself, where the peer could not run meanwhile, and rarely if polling was
// useless lately. If both processes may use only one and the same processor, it yields once instead. Then it is parked
// in the runtime's poller until the other side rings: see [Options.Wait]. The goroutine that takes a service's requests
// blocks in the kernel instead, on a thread of its own meanwhile, which needs fewer system calls for each request.
//
// # Errors
//
// errors.Is finds the sentinels below, and the system's error. [ErrClosed] is the ordinary end of a channel.
// [ErrPeerDied] is a process that ended without closing: the kernel proves that, no timeout guesses it, so a stopped
// process is not dead. Messages that it committed arrive first; then Resume continues with its successor. errors.As
// finds an [*EndError] with the number of unreleased messages, and a [*CallError] with what a service replied. After
// [ErrCorrupt] close the handle.
//
// # Goroutines
//
// One goroutine at a time uses a [Sender], a [Receiver], a [Publisher] or a [Subscriber]. Another gets
// [ErrConcurrentUse] meanwhile, without an effect. Any may call Close and [Message.Release] at any time. To send from
// many goroutines, give each a sender, and receive by [Gather]. Any number of goroutines use a [Client] and a
// [Request]; one at a time awaits a [Call], and one at a time takes requests from a [Service].
//
// # Units
//
// Sizes are in bytes. Message numbers count from 1, modulo 2^32, without 0.
//
// # Memory
//
// A received message lies in shared memory until it is released, even after the receiver was closed. A sender that
// breaks the rules can change it while it is read; [Receiver.ReceiveInto] copies. Each word of the other side is
// checked before use: it can cause [ErrCorrupt] and no more.
//
// [Options] limit the memory that peers can make a receiver or a service use: Capacity and MessageBytesMax for a lane
// and a message, Memory for all peers together.
//
// The race detector does not see accesses to mapped memory. So it detects neither a use of message bytes after
// Release, nor two goroutines that write to one reservation.
//
// # Not included
//
// File operations, flushing to a function, and inspecting, repairing and removing a path channel: the command pelton
// has info, recover and rm.
package pelton
