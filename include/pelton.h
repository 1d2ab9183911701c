/* pelton.h: messages at memory speed between the threads and processes of one machine.
 *
 * This header is the reference of the C interface, and what every other language's binding covers. It needs Linux 5.10 or
 * later, 64-bit and little-endian. C11 and C++17.
 *
 * A channel is a sender and a receiver over a lane: a ring of messages of any size in shared memory. It is made
 *   - by connect: one side listens under a name (pelton_listen), the other opens it (pelton_sender_open, pelton_receiver_open);
 *   - by path: both sides open a directory, "path:DIR", which keeps the messages when both are gone;
 *   - between threads of one process: pelton_threads.
 * A receiver of many senders, that come and go, is made by pelton_gather. What a receiver takes in is handed to a file, or a function, a
 * bufferful at a time by pelton_flush_open, and what threads of one process write by pelton_appenders_open. A client asks a service, and
 * awaits its answers: pelton_client_open, pelton_service_listen, and "Calls". Files are read and written without keeping a loop waiting by
 * pelton_engine_open: "Files".
 *
 *     pelton_sender *s;                                             pelton_receiver *r;
 *     pelton_sender_open("events", NULL, &s);                       ... pelton_listen, pelton_accept_receiver
 *     pelton_send(s, "hello", 5, PELTON_FOREVER);                   pelton_message m;
 *     pelton_close(s);                                              while (pelton_receive(r, PELTON_FOREVER, &m) == 0) {
 *                                                                       use(m.data, m.size);
 *                                                                       pelton_release(r);
 *                                                                   }
 *                                                                   pelton_close(r);
 *
 * HANDLES. What a function makes is a handle: a pointer to one of the kinds below. What means the same for several kinds is one function,
 * which takes any of them as a `void *`: see "Any handle". pelton_close ends each.
 *
 * RESULTS. Functions that return int answer 0 (PELTON_OK) or a negative code; each function's comment lists those of its own.
 * PELTON_AGAIN is an answer, not an error: full, empty, or the deadline has passed. Any function may answer, besides:
 *   PELTON_NULL           a pointer is NULL that must not be. Only pelton_close takes a NULL handle, and does nothing.
 *   PELTON_CLOSED_HANDLE  the handle is closed, or of a kind that the function is not for: the detail says what it is, and what is
 *                         wanted. Closed handles are recognised for a while (at least the next 64 closings in the process), not for
 *                         ever: do not rely on it.
 *   PELTON_WRONG_THREAD   another thread is in a call with this handle. Found only where PELTON_CHECK_THREADS is set in the
 *                         environment when the first handle is made, or the library was built for debugging. And always: an operation on
 *                         a file has the sender or receiver (PELTON_FILE_SEND).
 *   PELTON_FORKED         the handle was made by a process of which this one is a fork. The child closes it, which touches
 *                         nothing of the parent's, and makes its own.
 *   PELTON_INTERNAL       a bug in pelton was caught: the handle can only be closed. Please report what pelton_error_detail says.
 * After any other code than PELTON_AGAIN, pelton_error_detail() tells what was found, what was wanted, and what to do.
 * An out-parameter is written only together with PELTON_OK, unless its function says otherwise.
 *
 * WAITING. A function with a deadline_ns may wait until then: nanoseconds of CLOCK_MONOTONIC, PELTON_NO_WAIT or PELTON_FOREVER;
 * pelton_deadline(n) is n nanoseconds from now. The deadline is looked at only when there is something to wait for. How it
 * waits, spinning or asleep, is an option. Signals do not end a wait: who is to hear them, or to be woken by another thread, arms and
 * polls ("In an event loop"). Functions without a deadline_ns do not wait, unless their comment says so.
 *
 * THREADS. A handle is used by one thread at a time; which one does not matter, and need not stay the same, as long as one
 * thread's call has returned, and the other knows, before the other begins. Different handles are independent. Only using a pelton_file,
 * closing a pelton_held, pelton_service_stop, and what takes a pelton_senders or a pelton_appenders, but not their close, may be called at
 * any time from any thread.
 *
 * UNITS. Sizes are in bytes, times in nanoseconds.
 */
#ifndef PELTON_H
#define PELTON_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this header. The library's is pelton_version(). A program needs a library of the same major number that is
 * not older; while the major number is 0, of the same major and minor number. */
#define PELTON_VERSION_MAJOR 0
#define PELTON_VERSION_MINOR 1
#define PELTON_VERSION_PATCH 0
#define PELTON_VERSION (PELTON_VERSION_MAJOR * 1000000 + PELTON_VERSION_MINOR * 1000 + PELTON_VERSION_PATCH)

/* A result that must not be ignored: a message that was not sent is still the caller's. */
#if defined(__GNUC__)
#define PELTON_MUST_USE __attribute__((warn_unused_result))
#else
#define PELTON_MUST_USE
#endif

/* Every code: name, number, text. For programs in any language to read: one X(...) a line, nothing else in between. Numbers
 * stay; new ones come at the end. */
#define PELTON_CODES(X) \
    X(PELTON_AGAIN, -1, "not now: full, empty, or the deadline has passed") \
    X(PELTON_CLOSED, -2, "the other side has closed") \
    X(PELTON_PEER_DIED, -3, "the other side died without closing: resume waits for a successor") \
    X(PELTON_TOO_LARGE, -4, "larger than what was reserved, or than this channel takes") \
    X(PELTON_TOO_SMALL, -5, "what was given to be filled is too small: the size wanted was written") \
    X(PELTON_TOO_MANY_DESCRIPTORS, -6, "more descriptors than can go with one message") \
    X(PELTON_DESCRIPTORS_LOST, -7, "this process had no room for all descriptors: raise RLIMIT_NOFILE") \
    X(PELTON_CORRUPT, -8, "the peer broke a rule of the layout or the protocol: close the channel") \
    X(PELTON_REFUSED, -9, "refused by the other side, or not possible with this kind of channel") \
    X(PELTON_HUNG_UP, -10, "the peer hung up during the handshake: see what it says") \
    X(PELTON_NO_LISTENER, -11, "nobody listens under the name: start the other side, or give a deadline") \
    X(PELTON_IN_USE, -12, "somebody listens under the name already") \
    X(PELTON_NAME, -13, "a name that cannot be") \
    X(PELTON_OPTION, -14, "an option has a value that cannot be") \
    X(PELTON_NO_CHANNEL, -15, "there is no channel at the path: create it, or give a deadline") \
    X(PELTON_NOT_A_CHANNEL, -16, "what is at the path cannot be used as a channel") \
    X(PELTON_ROLE_TAKEN, -17, "the path's channel has its receiver, or all its senders, already") \
    X(PELTON_NO_SPACE, -18, "the file system is full: nothing is damaged, try again when there is space") \
    X(PELTON_REBOOTED, -19, "the path's channel is from before a reboot: pelton recover keeps what is whole") \
    X(PELTON_SYSTEM, -20, "the operating system refused something: errno says what") \
    X(PELTON_FORKED, -21, "the handle belongs to the process that forked this one: make a new one here") \
    X(PELTON_INTERNAL, -22, "a bug in pelton was caught: close the handle, and report it") \
    X(PELTON_NULL, -23, "mistake of the caller: NULL where it must not be") \
    X(PELTON_CLOSED_HANDLE, -24, "mistake of the caller: the handle is closed, or of another kind") \
    X(PELTON_WRONG_THREAD, -25, "mistake of the caller: another thread is in a call with this handle") \
    X(PELTON_NOT_RESERVED, -26, "mistake of the caller: nothing is reserved, or no batch begun") \
    X(PELTON_RESERVED, -27, "mistake of the caller: commit or abort what is reserved first") \
    X(PELTON_NOT_RECEIVED, -28, "mistake of the caller: no message is received, or it was released already") \
    X(PELTON_NOT_RELEASED, -29, "mistake of the caller: release or hold what was received first") \
    X(PELTON_SINK, -30, "the sink took nothing: nothing of it is released, and it comes again") \
    X(PELTON_NOT_A_RECORD_FILE, -31, "what is at the path cannot be used as a record file") \
    X(PELTON_DAMAGED, -32, "a record file is damaged somewhere, and goes on after that") \
    X(PELTON_TORN, -33, "a record file's end is torn, as a killed writer leaves it: all before it is whole")

enum pelton_code {
#define PELTON_CODE_(name, number, text) name = number,
    PELTON_CODES(PELTON_CODE_)
#undef PELTON_CODE_
    PELTON_OK = 0
};

/* Deadlines that are none. */
#define PELTON_NO_WAIT INT64_C(0)
#define PELTON_FOREVER INT64_MAX

/* The kinds of handles. */
typedef struct pelton_sender pelton_sender;
typedef struct pelton_receiver pelton_receiver;
typedef struct pelton_listener pelton_listener;
typedef struct pelton_senders pelton_senders;     /* makes senders for threads, and is for all of them */
typedef struct pelton_held pelton_held;           /* a message kept after the receiver has gone on */
typedef struct pelton_flush pelton_flush;         /* takes what a receiver receives to a sink */
typedef struct pelton_appenders pelton_appenders; /* makes appenders for threads, and is for all of them */
typedef struct pelton_appender pelton_appender;   /* what one thread appends by */
typedef struct pelton_records pelton_records;     /* reads a record file */
typedef struct pelton_client pelton_client;       /* asks a service */
typedef struct pelton_service pelton_service;     /* takes the requests of its clients */
typedef struct pelton_responder pelton_responder; /* answers one request */
typedef struct pelton_engine pelton_engine;       /* does operations on files */
typedef struct pelton_file pelton_file;           /* an open file */

/* ---- The library ------------------------------------------------------------------------------------------------------- */

/* The library's version, as PELTON_VERSION has the header's. Any thread. */
uint32_t pelton_version(void);

/* The text of a code from the table above, "ok" for 0, "an unknown code" for others. Never NULL, never freed. Any thread. */
const char *pelton_code_text(int code);

/* One line about the last call of this thread that failed: what it found, what it wanted, and what to do; "" if none failed.
 * PELTON_AGAIN sets it only where a function that opens a channel or a client reached its deadline. Valid until this thread's
 * next pelton call; not to be freed. After PELTON_SYSTEM, errno is the system's own. */
const char *pelton_error_detail(void);

/* The deadline that lies timeout_ns from now. A negative timeout has passed; a sum beyond what fits is PELTON_FOREVER. */
int64_t pelton_deadline(int64_t timeout_ns);

/* ---- Making a channel -------------------------------------------------------------------------------------------------- */

/* How a side waits (pelton_options.wait). */
enum pelton_wait {
    PELTON_BLOCK = 0, /* spin for some microseconds, fewer when that has not paid lately and none with one processor, where it yields
                       * once; then sleep */
    PELTON_SPIN = 1   /* never sleep: the least latency, for a whole processor; with one processor only, PELTON_BLOCK is faster. A receiver
                       * that keeps up with its sender's stream looks up to some 15 us later for as long as more messages come by that,
                       * with PELTON_BLOCK too */
};

/* How a channel is made. Wherever one is taken, NULL means PELTON_OPTIONS_INIT; 0 in a field its default. It is copied. */
typedef struct pelton_options {
    uint32_t struct_bytes;      /* sizeof(pelton_options), set by PELTON_OPTIONS_INIT; later versions add at the end */
    uint32_t wait;              /* enum pelton_wait */
    uint64_t capacity;          /* bytes of the lane, 64 MiB, of calls 4 MiB, 4 KiB to 16 GiB, rounded up to a multiple of 64 KiB. Of a
                                   receiver, a client and a service also the largest lane that they take, else 16 GiB, of another user
                                   64 MiB; the lesser of both sides' applies. On a path its maker decides */
    uint64_t message_bytes_max; /* the largest message, if less than half the capacity less 32 bytes; likewise, of another user 1 MiB */
    int64_t deadline_ns;        /* opening waits until then: for somebody to listen; on a path, for it to be made and joined */
    const uint32_t *uids;       /* users that may be at the other end besides this process's own, */
    uint32_t uids_count;        /* and how many */
    uint32_t create;            /* path: 1 makes the channel if it is not there */
    uint32_t mode;              /* path: who may open it, 0700 */
    uint32_t lanes;             /* the most senders, or clients, at a time, at most 1024: path: 1, decided by its maker; else 1024 */
    uint32_t announce;          /* pelton_gather: 1 has the receiver told of its senders' coming and going */
    uint32_t reserved;          /* 0 */
    uint64_t flush_bytes;       /* flushing: the sink is called when so much has come, 1 MiB, at most 1 GiB; a header of 8 bytes for each
                                   message counts too, and filling up to a multiple of 8. Appending: also the size of each buffer, at
                                   least 64 KiB */
    int64_t flush_interval_ns;  /* flushing: or so long after it came, 100 ms. PELTON_FOREVER: not by time; then pelton_flush_run calls the
                                   sink when nothing more is there */
    uint64_t call_bytes_max;    /* calls: the largest request, answer or part of one that this side takes, 64 MiB */
    int64_t hold_ns;            /* calls: so long arming a client may hold the loop while answers have lately come so soon, 20 us;
                                   PELTON_NO_HOLD: not at all */
    uint32_t in_flight;         /* files: the most operations submitted whose completions are not taken, 1024, at most 16384 */
    uint32_t threads;           /* files: the most threads, for what io_uring does not do, 8, at most 1024; what waits for somebody else, as
                                   at a FIFO, has one besides */
    const char *root;           /* files: a directory that no path leads out of; NULL: all paths as they are */
    uint64_t resident_max;      /* senders, also of calls: limit of the part of the lane that is used while the receiver keeps up, 16 MiB.
                                   in bytes. A sender starts with 256 KiB, tries more while it is saturated, and keeps more only if that
                                   is faster; all of a process together at most 64 MiB more. If the receiver falls behind, the lane still
                                   extends up to its capacity */
    uint64_t memory;            /* receivers and services: limit of the memory that peers can make this side use, none for lanes. A new
                                   peer is offered lanes of a sixteenth of what is left, and refused below 64 KiB. A service counts its
                                   replies that wait, and requests of which a part has come; without the option these have 256 MiB, or
                                   four times call_bytes_max if that is more. Of one client it keeps only as much as is then left for
                                   the others: alone it has half. A call that does not fit fails with code 0xffff0001. On a path, and
                                   of one sender, it limits the lanes */
} pelton_options;

#define PELTON_OPTIONS_INIT \
    {(uint32_t)sizeof(pelton_options), PELTON_BLOCK, 0, 0, PELTON_NO_WAIT, NULL, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL, 0, 0}

/* pelton_options.hold_ns: arming a client does not wait. */
#define PELTON_NO_HOLD INT64_C(-1)

/* Opens the sending end of a channel.
 *   "events"    connects to a receiver that listens under this short name (of $XDG_RUNTIME_DIR/pelton/, else /tmp/pelton-UID/)
 *   "unix:PATH" connects to one that listens at this socket
 *   "path:DIR"  opens the channel in this directory, and goes on behind the last message that its sender before committed; no
 *               receiver need be there, unless there is a deadline in the options
 * Waits until the options' deadline, hands shaken by then too. Without one it waits for nobody to come, and 5 seconds at most for a
 * side that listens but is slow to accept. An event loop that cannot afford that opens in a thread of its own and hands the handle
 * over.
 * Errors: PELTON_AGAIN: the deadline, or those seconds, have passed. PELTON_NAME, PELTON_OPTION. By connect:
 * PELTON_NO_LISTENER, PELTON_REFUSED (another user, version, or end: the detail has the other side's words), PELTON_HUNG_UP.
 * By path: PELTON_NO_CHANNEL (none by the deadline either), PELTON_NOT_A_CHANNEL, PELTON_ROLE_TAKEN, PELTON_NO_SPACE,
 * PELTON_REBOOTED. PELTON_CORRUPT, PELTON_SYSTEM. Nothing is left behind, but a channel that was made; it can be tried again. */
PELTON_MUST_USE int pelton_sender_open(const char *name, const pelton_options *options, pelton_sender **out);

/* Opens the receiving end of a channel. As pelton_sender_open; a path's begins with the oldest message not released, and by a deadline
 * there must be a message or a sender. */
PELTON_MUST_USE int pelton_receiver_open(const char *name, const pelton_options *options, pelton_receiver **out);

/* Makes both ends of a channel between threads of this process. Does not wait. Errors: PELTON_OPTION, PELTON_SYSTEM. */
PELTON_MUST_USE int pelton_threads(const pelton_options *options, pelton_sender **out_sender, pelton_receiver **out_receiver);

/* Makes a receiver of many senders, each with a lane of its own: of all that connect under the name, a short one or "unix:PATH", and of
 * threads of this process (pelton_receiver_senders); name may be NULL for these alone. Does not wait: who comes is let in while
 * receiving, or arming, and cannot keep it waiting. Its lanes are served by turns, at most 64 messages of one at a time. A sender's end
 * touches no other, and receiving goes on: without a name until all senders and pelton_senders are closed, which is PELTON_CLOSED.
 * pelton_message.lane is a number for each sender that comes, from 1 on. Without a name make pelton_senders before receiving.
 * Errors: as pelton_listen. */
PELTON_MUST_USE int pelton_gather(const char *name, const pelton_options *options, pelton_receiver **out);

/* Makes what threads of this process make their senders by. Also while a message is not released.
 * Errors: PELTON_REFUSED: the receiver is not of pelton_gather; PELTON_CLOSED: it has been told so. */
PELTON_MUST_USE int pelton_receiver_senders(pelton_receiver *receiver, pelton_senders **out);

/* Makes a sender with a lane of its own, which one thread at a time uses. Does not wait. Any thread, at any time.
 * Errors: PELTON_CLOSED: the receiver is closed; PELTON_REFUSED: it has as many senders as options.lanes says; PELTON_SYSTEM. */
PELTON_MUST_USE int pelton_senders_open(pelton_senders *senders, pelton_sender **out);

/* Sends by the calling thread's own lane, which is made when it has none yet, and given up when the thread ends. Any thread, at any time:
 * none waits for another. Errors: as pelton_send and pelton_senders_open; PELTON_REFUSED also from the destructor of a thread's own data,
 * when the thread's lane has been given up. */
PELTON_MUST_USE int pelton_senders_send(pelton_senders *senders, const void *data, size_t size, int64_t deadline_ns);

/* Listens under a short name or "unix:PATH". Does not wait. Each peer accepted gets a channel of its own, made with these
 * options. The name stands as long as the listener or an end that it accepted is open; one left behind by a dead process is
 * replaced. Errors: PELTON_IN_USE, PELTON_NAME, PELTON_OPTION, PELTON_SYSTEM. */
PELTON_MUST_USE int pelton_listen(const char *name, const pelton_options *options, pelton_listener **out);

/* Waits until a receiver connects, and is its sender. Peers that are refused are told why and do not end the wait. Once one has
 * connected, also with PELTON_NO_WAIT or a deadline that has passed, it may take half a second if that one is slow, or refused.
 * Errors: PELTON_AGAIN; PELTON_SYSTEM, for instance when descriptors run out. */
PELTON_MUST_USE int pelton_accept_sender(pelton_listener *listener, int64_t deadline_ns, pelton_sender **out);

/* Waits until a sender connects, and is its receiver. As pelton_accept_sender. */
PELTON_MUST_USE int pelton_accept_receiver(pelton_listener *listener, int64_t deadline_ns, pelton_receiver **out);

/* ---- Any handle -------------------------------------------------------------------------------------------------------- *
 * These take any handle of the kinds marked here, and say what they mean for each; of another kind: PELTON_CLOSED_HANDLE. pelton_close
 * takes all kinds.
 *
 *                    sender  receiver  listener  client  service  responder  flush  appenders  appender  engine  file
 *   pelton_fd           x        x         x        x       x                                               x      x
 *   pelton_arm          x        x                  x       x                                               x
 *   pelton_disarm       x        x                  x       x                                               x
 *   pelton_get_info     x        x                  x       x                                               x
 *   pelton_resume       x        x
 *   pelton_sync         x        x                                             x        x
 *   pelton_drain        x                                                                                   x
 *   pelton_release               x                  x       x
 *   pelton_flush_now                                                           x        x                         "Flushing"
 *   pelton_reserve      x                           x                 x                           x               "Reserving"
 *   pelton_abort        x                           x                 x                           x
 *   pelton_commit       x                                                                         x
 *
 * IN AN EVENT LOOP. Sender, receiver, client, service and engine have one descriptor each for poll, epoll, io_uring or libuv: watch it for
 * reading. It is level-triggered in meaning, from one arm to the next. The steps:
 *   1. arm. PELTON_AGAIN: nothing is there, go back to the loop. PELTON_OK: something is there already: go to 2. Anything else is
 *      the end of the channel, or an error.
 *   2. when it is readable: receive (or send, await, or take completions) with PELTON_NO_WAIT until PELTON_AGAIN, or as often as the loop
 *      can afford (the descriptor stays readable), then arm again. A descriptor that is readable with nothing there is possible: arm again.
 *   3. disarm before using the functions that wait, or when the loop loses interest.
 * Watch a sender's descriptor for room, by pelton_arm_send, only while something waits to be sent: most of the time there is room, and
 * it is readable. With nothing to send, pelton_arm has it tell the receiver's end. For libuv all this is done in pelton_uv.h. */

/* The descriptor to watch; a listener's is readable while somebody waits to be accepted, and is not armed. A file's is the file itself. It
 * stays the same for the handle's life, and is the handle's: not to be closed, nor, but for a file's, read or written. Answers the
 * descriptor, or a code. Also while something is reserved, or not released. */
int pelton_fd(const void *handle);

/* Asks that the descriptor become readable:
 *   receiver  when a message comes, or the sender goes. Errors: as pelton_receive.
 *   service   when a request comes; now and then also for clients that come, go, or read their answers. Errors: as
 *             pelton_service_receive.
 *   client    when an answer comes, when what waits to be written can be, or the service goes. Arm again before the loop sleeps, after
 *             pelton_submit and pelton_cancel too: armed before, it hears of answers, but not of room for what these have still to write.
 *             After PELTON_AGAIN for want of room it tells once when there is: ask again then. Holds the caller for up to
 *             options.hold_ns where that has paid lately. Errors: as pelton_await.
 *   engine    when an operation completes; begins what was not begun. Errors: as pelton_file_completions.
 *   sender    when the receiver goes, and not while there is room: for who has nothing to send. Takes pelton_arm_send back. When it is
 *             readable, arm again: it may have been for nothing. Errors: as pelton_send.
 * Does not wait, but for a client's hold. Answers: PELTON_AGAIN: nothing yet, wait for the descriptor. PELTON_OK: something is there; not
 * of a sender, whose receiver's end is an error. */
PELTON_MUST_USE int pelton_arm(void *handle);

/* Takes pelton_arm and pelton_arm_send back. Also while something is reserved, or not released. */
int pelton_disarm(void *handle);

/* Figures of one side. They cost nothing to keep. Those of the peer and of the lane are, at a receiver of several senders, of the one
 * whose message came last. What a kind of handle does not have is 0. */
typedef struct pelton_info {
    uint32_t struct_bytes;      /* sizeof(pelton_info), set by the caller before the call: no more than that is written, and 0 where
                                   the library is older than the header */
    uint32_t has_peer;          /* 1 while the other side is there, as far as is known; a path's may be missing, and pelton_gather's */
    uint32_t peer_pid;          /* its process when it connected; on a path, as it says */
    uint32_t peer_uid;          /* its user, as the kernel vouches for; on a path, the directory's owner */
    uint32_t next_seq;          /* sender: the number that the next message will have */
    uint32_t generation;        /* receiver: which producer of the lane sent the last message, 1 for the first */
    uint64_t capacity;          /* bytes of the lane */
    uint64_t message_bytes_max; /* the largest message; client: the largest request */
    uint64_t unreleased;        /* sender: messages sent and not yet released */
    uint64_t messages;          /* sent, or released */
    uint64_t bytes;             /* their payload */
    uint64_t waits;             /* times that there was no room, or no message */
    uint64_t sleeps;            /* times that this side went to sleep, or armed its descriptor */
    uint64_t wakes_sent;        /* times that this side rang the other */
    uint64_t depth_max;         /* sender: the most unreleased messages that it noticed */
    uint64_t calls;             /* client: in flight, also those given up whose last answer has not come; engine: operations whose
                                   completions were not taken */
    uint64_t dropped;           /* client: answers to calls that had been given up; service: answers to clients that had gone */
    uint64_t corrupt;           /* service: clients that broke the rules, and were sent away */
    uint64_t services;          /* client: processes that it asks at the moment */
} pelton_info;

/* Figures of this side: the fields above say whose they are. out->struct_bytes says how much of it to fill. Does not wait. Also while
 * something is reserved, or not released. Errors: PELTON_OPTION: struct_bytes is not set: 0, no multiple of 8, or above 4096. */
int pelton_get_info(void *handle, pelton_info *out);

/* After PELTON_PEER_DIED:
 *   sender    waits for the receiver's successor and offers it the lane with everything unreleased, which is delivered again; then
 *             sending goes on. On a path it waits until a receiver is there, which sending does not need.
 *   receiver  waits for the sender's successor, who goes on where the dead one committed last.
 * An end that had connected connects under the name again; one that was accepted accepts there, and needs no listener open. Leave it some
 * milliseconds: hands are shaken within the deadline. Errors: PELTON_AGAIN: nobody came. PELTON_REFUSED: the channel has not lost its
 * peer, or is one between threads or of pelton_gather; or the successor's words. PELTON_HUNG_UP, PELTON_CORRUPT, PELTON_SYSTEM; it can be
 * tried again. */
PELTON_MUST_USE int pelton_resume(void *handle, int64_t deadline_ns);

/* Has it written to the disk, which takes what the disk takes, milliseconds and more. A crash of processes loses nothing without this.
 *   sender     everything sent so far under a path, so that it survives the machine's end as long as the receiver had not released it
 *   receiver   what was released so far under a path, so that it is not delivered again after the machine's end
 *   flush      as pelton_flush_now, and then everything that the sink has written, if it is a record file
 *   appenders  likewise. Any thread, at any time
 * Errors: of a sender or a receiver PELTON_REFUSED: not a path; PELTON_SYSTEM. Of a flush or appenders as pelton_flush_now. */
PELTON_MUST_USE int pelton_sync(void *handle);

/* Waits until what was given has been dealt with. Errors: PELTON_AGAIN: not yet.
 *   sender  until the receiver has released every message. Errors: as pelton_send.
 *   engine  until every operation has ended; their completions are still to be taken. Errors: as pelton_file_completions. */
PELTON_MUST_USE int pelton_drain(void *handle, int64_t deadline_ns);

/* Releases what was received last; its data is not to be read any more. Does not wait, but for descriptors that are late.
 *   receiver  what pelton_receive or pelton_receive_batch answered. Descriptors not taken are closed; if it is PELTON_REDELIVERED, once they
 *             have come: see pelton_take_descriptors
 *   client    what pelton_call or pelton_await answered
 *   service   the bytes of what pelton_service_receive answered. Its responder stays
 * Errors: PELTON_NOT_RECEIVED. */
int pelton_release(void *handle);

/* Closes and frees the handle, of any kind, also after an error, and while something is reserved or not released. Does not wait, but for
 * the last of appenders. NULL does nothing. Errors: PELTON_CLOSED_HANDLE; PELTON_FORKED: freed, and nothing of the parent's touched.
 *   sender     The receiver reads everything sent and is then told PELTON_CLOSED: pelton_drain waits for that. A process that exits
 *              without this is told to its peer as PELTON_PEER_DIED.
 *   receiver   The sender is told PELTON_CLOSED, with how many messages were not released.
 *   listener   Stops listening. Ends that it accepted stay open, and find their peers' successors under the name.
 *   senders    Senders made by it stay, but for threads' own when it is the last of its receiver. No other thread may be in a call with it.
 *   held       Releases the message; in any order, from any thread, at any time: also while the receiver is in use by another, and after it
 *              is closed. Data stays good and unchanged until then. What a closed receiver holds is not released: its
 *              successor receives it again. By path, a successor finds PELTON_ROLE_TAKEN until the last is closed.
 *   flush      Its receiver and its sink too. What the sink does not have counts as unreleased: pelton_flush_now before.
 *   appenders  Appenders made by it stay, but for threads' own. When it, or an appender, is the last that is closed, everything is handed
 *              to the sink and synced, and the sink closed: that waits as long as it takes, and an error would not be told: pelton_sync
 *              before. The sink's write is not called afterwards. No other thread may be in a call with it.
 *   appender   What was appended stays to be flushed: see appenders.
 *   records    Nothing else.
 *   client     The calls in flight are given up.
 *   service    All calls in flight fail at their clients, with PELTON_CLOSED. Responders stay handles, to be answered or closed.
 *   responder  Lets go of the call, if it was not answered: its client is told PELTON_ABANDONED. PELTON_WRONG_THREAD: another thread has
 *              reserved, and nothing is closed.
 *   engine     What is in flight is cancelled, its completions are lost, and memory with a release is released when the kernel is done with
 *              it. For memory without one, and for channels, it waits until then. To have all of it done, pelton_drain before.
 *   file       The file is closed with the last handle, or operation, that has it, which may wait, as for a file server, and tells nothing:
 *              PELTON_FILE_CLOSE does. No other thread may be in a call with it; operations in flight keep it by themselves. */
int pelton_close(void *handle);

/* ---- Sending ----------------------------------------------------------------------------------------------------------- *
 * All of them answer, once the receiver is gone, PELTON_CLOSED or PELTON_PEER_DIED; the detail and pelton_info.unreleased say how
 * many messages were not released. Some messages may still be sent in between, which then count as unreleased. After
 * PELTON_PEER_DIED: pelton_resume, or close. On a path the end of a receiver is told once, and then sending goes on for the
 * next. With whatever code but PELTON_OK, the call has sent nothing. PELTON_CORRUPT, PELTON_SYSTEM; on a path PELTON_NO_SPACE. While
 * something is reserved, other calls than those that say otherwise answer PELTON_RESERVED. */

/* Copies a message into the lane; waits for room. data may be NULL if size is 0.
 * Errors: PELTON_AGAIN: no room, nothing was sent. PELTON_TOO_LARGE, in whatever state the lane is. */
PELTON_MUST_USE int pelton_send(pelton_sender *sender, const void *data, size_t size, int64_t deadline_ns);

/* Sends count messages, which appear to the receiver at once or not at all: messages[i].iov_base has the iov_len bytes of each, and may be
 * NULL where that is 0. Waits for room for all of them. A count of 0 sends nothing.
 * Errors: as pelton_send; PELTON_TOO_LARGE, but not while the messages, with 16 bytes more each, come to no more than the largest
 * message: send some of them, then the rest. */
PELTON_MUST_USE int pelton_send_batch(pelton_sender *sender, const struct iovec *messages, size_t count, int64_t deadline_ns);

/* Sends a message together with count descriptors, at most 64; waits for room. The caller keeps its own. Not on a path. The sender keeps
 * duplicates, for a successor of the receiver, until it has noticed that the message was released: when this is called again, or
 * pelton_get_info.
 * Errors: as pelton_send; PELTON_TOO_MANY_DESCRIPTORS; PELTON_REFUSED: a path; PELTON_SYSTEM, EBADF: one that is not open. */
PELTON_MUST_USE int pelton_send_descriptors(pelton_sender *sender, const void *data, size_t size, const int *fds, size_t count,
                                            int64_t deadline_ns);

/* Gives memory that holds no message back to the system: after a burst the lane keeps what it grew to until this. A system call
 * or two. Errors: PELTON_SYSTEM. */
int pelton_trim(pelton_sender *sender);

/* Asks that the descriptor become readable when there is room for a message of size bytes, or the receiver goes ("In an event loop").
 * Does not wait. Answers: PELTON_AGAIN: no room yet, wait for the descriptor. PELTON_OK: there is room. Errors: as pelton_send. */
PELTON_MUST_USE int pelton_arm_send(pelton_sender *sender, size_t size);

/* ---- Reserving --------------------------------------------------------------------------------------------------------- *
 * Room to write in place. Nothing is seen of it until it is committed, or given to the function that sends it, and then nothing of it
 * may be written any more, nor once it is aborted; nor may another call be given it as data, which may write just there. Until then the
 * handle answers PELTON_RESERVED to everything but pelton_fd, pelton_disarm, pelton_get_info, pelton_responder_is_cancelled and
 * pelton_close.
 *
 *     void *at;                                                     uint64_t call;
 *     pelton_reserve(sender, most, PELTON_FOREVER, &at);            pelton_reserve(client, most, PELTON_FOREVER, &at);
 *     size_t size = write_to(at);                                   size_t size = write_to(at);
 *     pelton_commit(sender, size);                                  pelton_submit(client, at, size, 0, PELTON_NO_WAIT, &call); */

/* Reserves size bytes, aligned to 8. What was reserved before is aborted, also when this fails.
 *   sender     for a message; waits for room. Errors: as pelton_send.
 *   appender   for a message. deadline_ns is not looked at. Waits, and errors, as pelton_append.
 *   client     for a request; waits as pelton_submit. Errors: as pelton_submit; PELTON_TOO_LARGE: also for more than the lane's largest
 *              message less 24 bytes: that is for pelton_submit, which copies.
 *   responder  for a reply, or a part of one. deadline_ns is not looked at: this does not wait for the client. The same thread uses or
 *              aborts it, at once: meanwhile nothing else is written to this client. Errors: PELTON_AGAIN: no room: pelton_reply copies.
 *              PELTON_TOO_LARGE: as for a client. PELTON_WRONG_THREAD: another thread has reserved. Those of "Answering". */
PELTON_MUST_USE int pelton_reserve(void *handle, size_t size, int64_t deadline_ns, void **out);

/* Publishes the first size bytes of what a sender or an appender has reserved as one message. Does not wait. What a client or a responder
 * has reserved is used by giving its own pointer to pelton_submit, or to pelton_reply or pelton_reply_part.
 * Errors: PELTON_NOT_RESERVED; PELTON_TOO_LARGE: more than was reserved, which stays. A channel that ended is told by the next
 * call. */
PELTON_MUST_USE int pelton_commit(void *handle, size_t size);

/* Gives back what was reserved: nothing is seen of it. Errors: PELTON_NOT_RESERVED; of a responder PELTON_WRONG_THREAD: another thread has
 * reserved. */
int pelton_abort(void *handle);

/* ---- Receiving --------------------------------------------------------------------------------------------------------- *
 * After the last message all of them answer PELTON_CLOSED when the sender has closed, PELTON_PEER_DIED when it died; then
 * pelton_resume, or close. On a path the end is told once, and then receiving goes on for the next. PELTON_CORRUPT,
 * PELTON_SYSTEM. What was received is released, or held, before anything else is done with the receiver, but for what says
 * otherwise, and taking its descriptors: PELTON_NOT_RELEASED. */

/* A message received in place. data stays good until the message is released; it is aligned to 8 bytes, and never NULL. Who
 * reads in place trusts the sender not to write after it has committed; pelton_receive_copy trusts nobody, nor does who copies data
 * once and looks at the copy alone. */
typedef struct pelton_message {
    const void *data;
    size_t size;
    uint32_t seq;         /* its number in its lane: one more for each, modulo 2^32, never 0 */
    uint32_t lane;        /* which of several senders' lanes it came by, else 0; order holds within a lane */
    uint32_t flags;       /* PELTON_REDELIVERED, PELTON_TELLS */
    uint32_t descriptors; /* how many came along: pelton_take_descriptors */
} pelton_message;

/* pelton_message.flags: a receiver before this one may have seen the message: whatever was in the lane when this one came, and was
 * not released, unless it is the first. How far that one had looked nobody knows. Other bits are 0, and not to be relied on. */
#define PELTON_REDELIVERED 1

/* Other flags, one of which is set in what is no message but tells, if options.announce asks for it, what became of the sender of that
 * lane: it has come, before its first message; it has closed, has died, or has broken the rules of the layout, after its last. It has
 * 0 bytes, its seq is 0, and it is released like a message. pelton_receive tells, pelton_receive_batch too, with nothing else beside it;
 * pelton_receive_copy passes over it. */
#define PELTON_JOINED 2
#define PELTON_LEFT 4
#define PELTON_DIED 8
#define PELTON_BROKE_RULES 16
#define PELTON_TELLS (PELTON_JOINED | PELTON_LEFT | PELTON_DIED | PELTON_BROKE_RULES)

/* The next message, in place; waits for one. Release it with pelton_release. Errors: PELTON_AGAIN: none. */
PELTON_MUST_USE int pelton_receive(pelton_receiver *receiver, int64_t deadline_ns, pelton_message *out);

/* Up to count messages in place, those that are there; waits for the first. *out_count is how many, at least 1. One pelton_release
 * releases all of them. All are of one lane; a message with descriptors comes alone.
 * Errors: PELTON_AGAIN: none. PELTON_TOO_SMALL: count is 0. */
PELTON_MUST_USE int pelton_receive_batch(pelton_receiver *receiver, int64_t deadline_ns, pelton_message *out, size_t count,
                                         size_t *out_count);

/* Copies the next message to buffer and releases it; waits for one. *out_size is its size. Safe against any sender. Descriptors that came
 * with it are closed. buffer may be NULL if capacity is 0.
 * Errors: PELTON_AGAIN: none. PELTON_TOO_SMALL: it has more than capacity bytes: *out_size says how many, the message stays. */
PELTON_MUST_USE int pelton_receive_copy(pelton_receiver *receiver, void *buffer, size_t capacity, int64_t deadline_ns,
                                        size_t *out_size);

/* Keeps the message received last, without a copy, and lets the receiver go on: data stays good until *out is closed, on
 * whatever thread. Space comes back in order, so a message held long keeps what comes after it from being released too. Descriptors not
 * taken are closed, as by pelton_release. Does not wait, but for these. Errors: PELTON_NOT_RECEIVED, also for what pelton_receive_batch
 * answered to a count above 1. */
PELTON_MUST_USE int pelton_hold(pelton_receiver *receiver, pelton_held **out);

/* The descriptors that came with the message received last, once: they are the caller's to close, and close on exec. Those of a message
 * that is PELTON_REDELIVERED may be late, as a sender that survived its receiver sends them again: waits a second at most for them, and so
 * does what closes them, pelton_release, pelton_hold and pelton_receive_copy, also with PELTON_NO_WAIT. *out_count is how many, 0 if none
 * came or they were taken; with PELTON_TOO_SMALL (more than capacity) too, and they stay. out may be NULL if capacity is 0.
 * Errors: PELTON_NOT_RECEIVED, PELTON_DESCRIPTORS_LOST, PELTON_CORRUPT, PELTON_SYSTEM: they are gone then, the message stays. */
PELTON_MUST_USE int pelton_take_descriptors(pelton_receiver *receiver, int *out, size_t capacity, size_t *out_count);

/* ---- Flushing ---------------------------------------------------------------------------------------------------------- *
 * What a receiver receives goes to a sink a bufferful at a time, without a copy on the way, and is released when the sink has it. Every
 * message that was committed comes to the sink once, and in the order of its sender, also after that has died. If this process is
 * killed at any point, a record file that is opened again by the next receiver knows what it has; a sink of one's own gets what was
 * not released again, and tells by lane_id and seq what it has had. Descriptors that come with messages are closed.
 *
 *     pelton_sink sink = PELTON_SINK_INIT;
 *     sink.path = "log";
 *     pelton_flush_open(receiver, NULL, &sink, &flush);
 *     while ((code = pelton_flush_run(flush, PELTON_FOREVER)) == PELTON_SINK || code == PELTON_NO_SPACE) ... make room, or wait
 *     pelton_close(flush);
 *
 * Errors of the sink, wherever something is handed to it: PELTON_SINK: write answered so. Of a record file: PELTON_NO_SPACE and
 * PELTON_SYSTEM: the file is as it was. Nothing is released after any of them, and it can be tried again. PELTON_SYSTEM is also told
 * of an earlier sync that has failed since, once: what was written before may not be on the disk. */

/* A run of whole records of one lane, as the bytes they are: for each message a header, a little-endian u64 of seq << 32 | size; its
 * bytes; and up to seven more, of any value, so that the next begins at a multiple of 8. pelton_run_next goes through them. */
typedef struct pelton_run {
    uint64_t lane_id[2]; /* the lane: tells it from any other that ever was */
    const void *bytes;   /* the records, aligned to 8. A sender in another process that breaks the rules can change them at any time */
    size_t size;
    uint32_t first_seq;  /* the first message's number; the others follow, modulo 2^32 and leaving out 0 */
    uint32_t messages;   /* how many, at least 1 */
    uint32_t pid;        /* the process that sent them, 0 if that is not known, as of a path's sender that had gone before */
    uint32_t uid;        /* its user, UINT32_MAX if that is not known */
} pelton_run;

/* A message of a run, or of a record file, with what the run says of it. */
typedef struct pelton_record {
    const void *data;    /* aligned to 8, never NULL */
    size_t size;
    uint64_t lane_id[2];
    uint32_t seq;
    uint32_t pid;
    uint32_t uid;
    uint32_t reserved;   /* 0 */
} pelton_record;

/* Takes all of the runs, in order, and answers 0 or more when it has them safely: then they are released, and must not be looked at any
 * more. Or it takes nothing, and answers less than 0, an errno negated for instance: then nothing is released, just the same comes again
 * with the next flush, before anything else, and whoever flushed is answered PELTON_SINK, with that number negated in errno; if that was
 * the library's own thread, who flushes next. Called by one thread at a time: the one that flushes, appends to a full buffer, closes the
 * last of the appenders, or the library's own for options.flush_interval_ns. It must return, and must neither use the handles that lead to it
 * nor wait for a thread that does. */
typedef int (*pelton_write)(void *context, const pelton_run *runs, size_t count);

/* Where messages are flushed to: a function, or a record file, which pelton_records_open and `pelton cat` read. It is copied. Of these one
 * is given: write or path. */
typedef struct pelton_sink {
    uint32_t struct_bytes;     /* sizeof(pelton_sink), set by PELTON_SINK_INIT; later versions add at the end */
    uint32_t reserved;         /* 0 */
    pelton_write write;
    void *context;             /* for write */
    const char *path;          /* the file, made if it is not there, else gone on with: what a killed writer left torn is cut off. If another
                                  program renames, deletes or truncates it, as logrotate does, the next write notices, and goes on in the
                                  file that is at the path then, or begins it: spec/record-file.md */
    uint64_t rotate_bytes;     /* a write that would make the file larger than this begins a new one: FILE is renamed to FILE.000001,
                                  FILE.000002 and so on. 0: never */
    uint64_t sync_bytes;       /* fdatasync each time that so much more is written; the next writes do not wait for it. 0: not for that */
    int64_t sync_interval_ns;  /* fdatasync so long after something was written; 0: not for that */
} pelton_sink;

#define PELTON_SINK_INIT {(uint32_t)sizeof(pelton_sink), 0, NULL, NULL, NULL, 0, 0, 0}

/* pelton_sink.sync_bytes: before each write counts as done. What is released is on the disk then. */
#define PELTON_EACH_WRITE UINT64_MAX

/* Makes a flush of a receiver, which is closed as a handle, and goes on as part of the flush: pelton_senders and held messages stay good.
 * Does not wait, but for up to a second while a record file has another writer: one that was just killed has it for a moment. If it fails,
 * the receiver is as before.
 * Errors: PELTON_NOT_RELEASED: a message is received. PELTON_OPTION: of the options, or the sink. Of a record file: PELTON_ROLE_TAKEN:
 * another handle writes to it; PELTON_DAMAGED: it is broken in the middle, and was not changed: move it away; PELTON_NOT_A_RECORD_FILE:
 * it is something else, or of a later version; PELTON_NO_SPACE, PELTON_SYSTEM. */
PELTON_MUST_USE int pelton_flush_open(pelton_receiver *receiver, const pelton_options *options, const pelton_sink *sink,
                                      pelton_flush **out);

/* Flushes until the receiver is told that there are no more senders, which a receiver with a name that gathers never is; then it has
 * all of it synced, and answers PELTON_OK. Waits as the receiver's options say. Errors: PELTON_AGAIN: the deadline has passed; something
 * may have come that is not due yet: pelton_flush_now. The sink's. As pelton_receive, but for PELTON_CLOSED; what came before is in the
 * sink then. After any of them it can be called again. */
PELTON_MUST_USE int pelton_flush_run(pelton_flush *flush, int64_t deadline_ns);

/* Hands to the sink what has come:
 *   flush      to its receiver. Waits for no message, but as long as the sink takes. Errors: as pelton_flush_run; PELTON_CLOSED: there are
 *              no more senders, and all of it is in the sink.
 *   appenders  from any thread: everything whose append had returned before is there when this returns. Waits as long as the sink takes, and
 *              for another thread that flushes. Any thread, at any time. Errors: the sink's. */
PELTON_MUST_USE int pelton_flush_now(void *handle);

/* The record at *at of a run, which is 0 at first; *at goes on to the next. Answers 1, or 0 where there is none, or not what it must be,
 * which only a sender's breaking the rules can cause: compare how many there were with run->messages. *out is the one before.
 *
 *     size_t at = 0, found = 0;
 *     pelton_record record;
 *     while (pelton_run_next(&runs[i], &at, &record)) found++, use(record.data, record.size); */
static inline int pelton_run_next(const pelton_run *run, size_t *at, pelton_record *out) {
    const unsigned char *record = (const unsigned char *)run->bytes + *at;
    uint32_t seq = *at == 0 ? run->first_seq : out->seq == UINT32_MAX ? 1 : out->seq + 1;
    if (*at > run->size || run->size - *at < 8) return 0;
    /* Looked at once. */
    uint64_t header = *(const volatile uint64_t *)(const void *)record;
    size_t size = (uint32_t)header, room = run->size - *at - 8;
    if (header >> 32 != seq || size > room) return 0;
    out->data = record + 8;
    out->size = size;
    out->lane_id[0] = run->lane_id[0];
    out->lane_id[1] = run->lane_id[1];
    out->seq = seq;
    out->pid = run->pid;
    out->uid = run->uid;
    out->reserved = 0;
    *at += 8 + ((size + 7) & ~(size_t)7);
    return 1;
}

/* ---- Appending --------------------------------------------------------------------------------------------------------- *
 * Threads of this process write messages each into a buffer of its own, and no thread waits for another but to flush: when its buffer
 * is full, a thread hands that to the sink itself, one thread at a time. In the sink the messages of one appender are in order; those of
 * different ones are in whatever order their buffers were flushed. */

/* Makes what threads append by. Of the options flush_bytes, flush_interval_ns, message_bytes_max and lanes, the most appenders, are looked
 * at. Does not wait; unless flush_interval_ns is PELTON_FOREVER it starts a thread that flushes at intervals and sleeps while there is
 * nothing. Errors: PELTON_OPTION, PELTON_SYSTEM; those of a record file, as pelton_flush_open. */
PELTON_MUST_USE int pelton_appenders_open(const pelton_options *options, const pelton_sink *sink, pelton_appenders **out);

/* Appends a message by the calling thread's own appender, which is made when it has none yet, and given up when the thread ends. Any
 * thread, at any time. data may be NULL if size is 0. Errors: as pelton_append and pelton_appender_open; PELTON_REFUSED also from the
 * destructor of a thread's own data, when the thread's appender has been given up. */
PELTON_MUST_USE int pelton_appenders_append(pelton_appenders *appenders, const void *data, size_t size);

/* Makes an appender with a buffer of its own, which one thread at a time uses: what appends fastest. Any thread, at any time. Does not wait
 * while there are fewer than options.lanes says, those closed counting until they are flushed; else as pelton_flush_now, to be rid of these.
 * Errors: PELTON_REFUSED: there are as many as options.lanes says; PELTON_SYSTEM; then also the sink's. */
PELTON_MUST_USE int pelton_appender_open(pelton_appenders *appenders, pelton_appender **out);

/* Copies a message into the buffer. Waits for nothing; but when the buffer is full, it is handed to the sink, which waits as long as that
 * takes, and for another thread that flushes. data may be NULL if size is 0.
 * Errors: PELTON_TOO_LARGE: larger than the buffer less 16 bytes, or than options.message_bytes_max. The sink's: this message was not
 * appended, and those before it are kept. PELTON_RESERVED. */
PELTON_MUST_USE int pelton_append(pelton_appender *appender, const void *data, size_t size);

/* ---- Reading a record file --------------------------------------------------------------------------------------------- */

/* Opens a record file for reading; nobody is kept from writing to it. Does not wait. Errors: PELTON_NOT_A_RECORD_FILE: it is something
 * else, or of a later version; PELTON_SYSTEM. */
PELTON_MUST_USE int pelton_records_open(const char *path, pelton_records **out);

/* The next message of the file, in the order in which they were written; data stays good until the next call with the handle. Nothing is
 * given out that has not been checked, with whatever was written together with it. Does not wait, but for the disk.
 * Errors: PELTON_AGAIN: the file ends here, and a writer may add more: ask again. PELTON_TORN: what comes is not whole, and nothing
 * whole comes after it: a writer was killed, or is writing just now: ask again, or stop. PELTON_DAMAGED: what comes is not whole, and was
 * passed over: the next call goes on behind it. PELTON_NOT_A_RECORD_FILE: it goes on with a later version. PELTON_SYSTEM. */
PELTON_MUST_USE int pelton_records_next(pelton_records *records, pelton_record *out);

/* ---- Calls ------------------------------------------------------------------------------------------------------------- *
 * A client asks and a service answers: up to 1,024 calls of a client at a time, in any order, at once or in parts. What is larger than the
 * lane's largest message travels in pieces and is put together in the memory of who takes it.
 *
 *     pelton_client *c;                                             pelton_service *s;
 *     pelton_completion answer;                                     pelton_request request;
 *     pelton_client_open("echo", NULL, &c);                         pelton_service_listen("echo", NULL, &s);
 *     pelton_call(c, "hello", 5, PELTON_FOREVER, &answer);          while (pelton_service_receive(s, PELTON_FOREVER, &request) == 0) {
 *     use(answer.data, answer.size);                                    pelton_reply(request.responder, request.data, request.size);
 *     pelton_release(c);                                                pelton_release(s);
 *     pelton_close(c);                                              }
 *
 * ENDS. By "unix:PATH" a client has one service. Its end fails all calls in flight, at once, and what is submitted before it is noticed:
 * what it had answered is still taken, and then every function of the client answers PELTON_PEER_DIED, or PELTON_CLOSED if it closed:
 * close then, and open anew. By a short name a client asks all processes that listen under it, the least busy first, and goes on when
 * one ends: its calls come to PELTON_LOST, but for those that are asked of another, since they were given back (PELTON_STOP_DRAIN) or
 * may be carried out twice (PELTON_IDEMPOTENT). With none left it answers PELTON_NO_LISTENER, until there is one.
 * THE CLIENT'S END is told by pelton_responder_is_cancelled, and by what its responders answer.
 * IN AN EVENT LOOP client and service are as a receiver is: see "Any handle", and pelton_uv.h. */

/* What came of a call (pelton_completion.outcome). */
enum pelton_outcome {
    PELTON_REPLY = 1,     /* the reply, or the last part of one */
    PELTON_PART = 2,      /* a part of the reply: more comes. After any other outcome nothing more comes of the call */
    PELTON_END = 3,       /* a reply in parts has ended. It has 0 bytes */
    PELTON_FAILED = 4,    /* the service failed the call, with a code and bytes of its own meaning */
    PELTON_ABANDONED = 5, /* the service let go of the call without an answer. It has 0 bytes */
    PELTON_LOST = 6       /* the service has gone, or drains, and the client goes on without it: its code says more. It has 0 bytes */
};

/* An answer to a call. data is never NULL, and aligned to 8 if it came whole. Who reads in place trusts the service not to write after
 * it has answered; who copies data once and looks at the copy alone trusts nobody. */
typedef struct pelton_completion {
    uint64_t call;     /* which: as pelton_submit has told it */
    const void *data;
    size_t size;
    uint32_t outcome;  /* enum pelton_outcome */
    uint32_t code;     /* of PELTON_FAILED, as the service said; of PELTON_LOST, as an int, PELTON_PEER_DIED, PELTON_CLOSED or
                          PELTON_CORRUPT: whether it was carried out nobody knows; or PELTON_AGAIN: it was not begun, and may be asked
                          again; else 0 */
} pelton_completion;

/* Any call, where one is to be named; no call's own. */
#define PELTON_ANY_CALL UINT64_C(0)

/* pelton_submit's flags: one of these, or 0. */
#define PELTON_NOTIFY 1     /* is not answered: the service is told something. No call is made, and none counted */
#define PELTON_IDEMPOTENT 2 /* may be carried out twice: if its service dies or closes before any of its answer has come, it is asked of
                               another process of the name, and keeps its number. Without effect by "unix:PATH", which has one process */

/* What a client asks, or tells. data is as in pelton_completion, with client and service changing places. */
typedef struct pelton_request {
    const void *data;
    size_t size;
    pelton_responder *responder; /* answers it, and is whoever's that was given this; NULL where nothing is to be answered: PELTON_NOTIFY */
    int64_t deadline_ns;         /* when the client will not await the answer any more, PELTON_FOREVER if it has not said */
    uint32_t pid;                /* its process, and */
    uint32_t uid;                /* its user, as the kernel vouches for them */
} pelton_request;

/* Answers a request, or keeps request->responder to answer it later. The rest of request stays good until this returns. Called by as
 * many threads at once as pelton_service_run was given. It must return; who waits in pelton_reply_part gives a deadline. */
typedef void (*pelton_handler)(void *context, const pelton_request *request);

/* How a service is to end (pelton_service_stop). */
#define PELTON_STOP_NOW 0   /* take no request from now on */
#define PELTON_STOP_DRAIN 1 /* answer what was taken, and give back what is asked from now on */

/* Connects to the service that listens under a short name or "unix:PATH". Waits, and errors, as pelton_sender_open by connect: a
 * service lets clients in while it looks for requests, so one that is at work elsewhere keeps this waiting; who must not wait opens in
 * a thread of its own. Of the options wait, capacity, message_bytes_max (at least 1024), deadline_ns, uids, call_bytes_max and hold_ns are
 * looked at. */
PELTON_MUST_USE int pelton_client_open(const char *name, const pelton_options *options, pelton_client **out);

/* Asks, and waits for the first answer, in place: a reply, a failure, or the first part (pelton_await with out->call has the others).
 * Release it with pelton_release. Answers to other calls that come meanwhile are kept. The service is told the deadline.
 * Errors: PELTON_AGAIN: the deadline has passed, and the call was cancelled, or not asked. As pelton_submit and pelton_await. */
PELTON_MUST_USE int pelton_call(pelton_client *client, const void *data, size_t size, int64_t deadline_ns, pelton_completion *out);

/* Asks, without awaiting: *out_call is for pelton_await and pelton_cancel, and never 0; of a notification, which is not answered, it is
 * not written, and out_call may be NULL. Waits for room, and for fewer than 1,024 calls; answers that come meanwhile are kept. The service
 * is told the deadline, unless it is PELTON_NO_WAIT or PELTON_FOREVER. data may be NULL if size is 0; it is copied.
 * If data is what pelton_reserve has answered of this client, the first size bytes of it are the request, and nothing is copied. Then this
 * does not wait, and the service is told no deadline; a service that has gone is told by the next call.
 * Errors: PELTON_AGAIN: no room, or too many calls: nothing was asked. PELTON_TOO_LARGE: for this service (pelton_info.message_bytes_max),
 * or more than was reserved, which stays. PELTON_OPTION: other flags, or PELTON_NOTIFY of what was reserved, which stays. PELTON_RESERVED:
 * something is, and data is not that. PELTON_NOT_RELEASED. PELTON_REFUSED: more than options.call_bytes_max of parts of answers wait to be
 * taken. PELTON_CLOSED, PELTON_PEER_DIED, PELTON_NO_LISTENER ("Ends"). PELTON_CORRUPT, PELTON_SYSTEM. Nothing was asked, after any of them. */
PELTON_MUST_USE int pelton_submit(pelton_client *client, const void *data, size_t size, uint32_t flags, int64_t deadline_ns,
                                  uint64_t *out_call);

/* Gives a call up: none of its answers is taken any more, also of those that have come, and the service is told. Until that has let go of
 * it the call counts as in flight. Does not wait.
 * Errors: PELTON_AGAIN: it is not in flight, or given up already. As pelton_submit. */
int pelton_cancel(pelton_client *client, uint64_t call);

/* The next answer to this call, or to any if it is PELTON_ANY_CALL, in place; waits for one. Release it with pelton_release. Answers to
 * other calls that come meanwhile are kept.
 * Errors: PELTON_AGAIN: none. After the last answer PELTON_CLOSED or PELTON_PEER_DIED: every call in flight has failed ("Ends"). Of a call
 * that is named, instead of PELTON_LOST: PELTON_PEER_DIED, PELTON_CLOSED, PELTON_CORRUPT; PELTON_NO_LISTENER or, by "unix:PATH",
 * PELTON_REFUSED: it was not begun. PELTON_REFUSED: it would wait, and no such call is in flight; or more than options.call_bytes_max of
 * parts of other answers wait. PELTON_NOT_RELEASED, PELTON_RESERVED, PELTON_CORRUPT, PELTON_SYSTEM. */
PELTON_MUST_USE int pelton_await(pelton_client *client, uint64_t call, int64_t deadline_ns, pelton_completion *out);

/* Listens under a short name or "unix:PATH", for up to options.lanes clients, 1,024. Does not wait: clients are let in while requests are
 * received, or armed for, and none keeps that waiting. Of the options wait, capacity, message_bytes_max, uids, lanes and call_bytes_max are
 * looked at. Errors: as pelton_listen. */
PELTON_MUST_USE int pelton_service_listen(const char *name, const pelton_options *options, pelton_service **out);

/* The next request, of all clients by turns; waits for one. Its bytes are in place until pelton_release; its responder is the
 * caller's, and answers before that, or later, on any thread. Requests of a client that does not read its answers wait.
 * Errors: PELTON_AGAIN: none. PELTON_CLOSED: pelton_service_stop was called, and if it was to drain, all is answered.
 * PELTON_NOT_RELEASED; PELTON_SYSTEM: it can be tried again. That descriptors run out is none: who connects then is refused. */
PELTON_MUST_USE int pelton_service_receive(pelton_service *service, int64_t deadline_ns, pelton_request *out);

/* Has requests answered by handler, which gets a copy of each, on as many threads, of which this is one (0 is 1), until it ends by
 * pelton_service_stop; then waits for the handlers at work, and answers PELTON_OK. Errors: PELTON_NOT_RELEASED,
 * PELTON_SYSTEM: the handlers at work have returned, and it can be called again. */
PELTON_MUST_USE int pelton_service_run(pelton_service *service, uint32_t threads, pelton_handler handler, void *context);

/* Ends a service, in one of two ways:
 *   PELTON_STOP_NOW    it takes no request from now on: who waits for one, and who would, is answered PELTON_CLOSED, and
 *                      pelton_service_run ends. Responders stay good; clients are told by pelton_close.
 *   PELTON_STOP_DRAIN  it answers what it has taken, and gives back what is asked from now on, so that clients ask another process of the
 *                      name and no call fails, or is carried out twice. Under a short name a successor is started before; unix:PATH is
 *                      free when this service next looks for requests. Go on receiving, or running: when every client knows that all its
 *                      calls are answered, that answers PELTON_CLOSED, or returns; then close. A client that does not read its answers
 *                      holds this up; PELTON_STOP_NOW ends it all the same.
 * Does not wait. Any thread, at any time before the close, also in pelton_service_run's handler. In a forked child PELTON_OK, and nothing of
 * the parent's is stopped. Errors: PELTON_OPTION: another way. */
int pelton_service_stop(const pelton_service *service, uint32_t how);

/* ---- Answering --------------------------------------------------------------------------------------------------------- *
 * A responder is closed by its last answer, whatever that answers but PELTON_TOO_LARGE, PELTON_RESERVED, PELTON_FORKED, PELTON_INTERNAL
 * and the mistakes PELTON_NULL and PELTON_WRONG_THREAD; or by pelton_close, which lets go of the call. One that is forgotten has
 * its client wait until either side goes. Different responders are answered by different threads at once. Errors of all: PELTON_PEER_DIED,
 * PELTON_CLOSED: the client has gone, and the answer is dropped. PELTON_TOO_LARGE: for this client. PELTON_RESERVED: this responder has
 * room reserved. PELTON_REFUSED: this thread has room reserved by another responder; or the answer would have to wait for room, and does not fit
 * into the service's memory (options.memory): the call has failed with code 0xffff0001. PELTON_CORRUPT, PELTON_SYSTEM. */

/* Answers; after parts this is the last of them. Does not wait: what the client has no room for is kept until it has. data may be NULL if
 * size is 0; it is copied. If it is what pelton_reserve has answered of this responder, the first size bytes of it are the reply, and
 * nothing is copied. Closes the responder.
 * Errors: of what was reserved PELTON_TOO_LARGE: more than that, which stays; PELTON_WRONG_THREAD: another thread has reserved. */
PELTON_MUST_USE int pelton_reply(pelton_responder *responder, const void *data, size_t size);

/* Fails the call with a code and bytes of the service's own meaning, which are copied. As pelton_reply. */
PELTON_MUST_USE int pelton_reply_fail(pelton_responder *responder, uint32_t code, const void *data, size_t size);

/* Ends a reply that was given in parts, or has none. As pelton_reply. */
PELTON_MUST_USE int pelton_reply_end(pelton_responder *responder);

/* Gives a part of the reply; waits for room in the client's lane, so not on the thread that receives requests, but with PELTON_NO_WAIT.
 * What was reserved is used as by pelton_reply, without waiting. Does not close the responder.
 * Errors: PELTON_AGAIN: no room, nothing was given; nothing tells a loop when there is: streams are for threads of their own. */
PELTON_MUST_USE int pelton_reply_part(pelton_responder *responder, const void *data, size_t size, int64_t deadline_ns);

/* Whether nobody awaits the answer any more: the client has given the call up, or has gone. Answers 1, 0, or a code. It is learnt of
 * where requests are received, so on another thread or between two; in a handler of pelton_service_run, whose threads may all be in
 * handlers, this looks itself. Answer all the same, in the cheapest way. Does not wait. */
int pelton_responder_is_cancelled(const pelton_responder *responder);

/* ---- Files ------------------------------------------------------------------------------------------------------------- *
 * An engine does operations on files, and keeps nobody waiting who does not want to. What the page cache has is answered within the call
 * that asks, up to so much that a loop does not notice; everything else goes to io_uring, or to threads where that is refused. Many
 * engines work side by side: one for each thread, or loop. Each operation is done in either way:
 *   - pelton_file_run waits for one;
 *   - pelton_file_submit asks for many, and pelton_file_completions brings the token of each back, with what came of it, in any order. In an
 *     event loop the engine's descriptor tells when there is one, as any other handle's does.
 *
 *     pelton_operation open = {0}, read = {0};                      while (pelton_file_completions(engine, PELTON_NO_WAIT, done, 16, &n) == 0)
 *     open.kind = PELTON_FILE_OPEN;                                     for (size_t i = 0; i < n; i++)
 *     open.path = "notes";                                                  finish(done[i].token, done[i].code, done[i].count);
 *     open.open_flags = O_RDONLY;                                   pelton_arm(engine);
 *     pelton_file_run(engine, &open, PELTON_FOREVER, &opened);
 *     struct iovec memory = {buffer, sizeof buffer};
 *     read.kind = PELTON_FILE_READ;
 *     read.token = 1;
 *     read.file = opened.file;
 *     read.memory = &memory;
 *     read.memory_count = 1;
 *     pelton_file_submit(engine, &read, 1, &taken);
 *
 * Operations are independent, unless they are a chain. A read is filled up to the end of the file, and a write is written whole; where an
 * error or a cancel comes after some bytes, the count says so, and the error. EINTR and EAGAIN are never seen. What fails is
 * PELTON_SYSTEM, with the system's number. */

/* What is done, and which fields of the operation it needs besides. */
enum pelton_file_operation {
    PELTON_FILE_OPEN = 1,             /* path, open_flags, mode, resolve: completion.file. Of a FIFO it waits for the other end */
    PELTON_FILE_CLOSE = 2,            /* file, which is no handle any more when this is taken. EBUSY: something else has the file, and closes
                                         it when it is done */
    PELTON_FILE_READ = 3,             /* file, memory, offset: completion.count */
    PELTON_FILE_WRITE = 4,            /* file, memory, offset: completion.count */
    PELTON_FILE_SYNC = 5,             /* file: all that was written to it, and is known of it, is on the disk (fsync) */
    PELTON_FILE_SYNC_DATA = 6,        /* file: all that was written, and what is needed to read it (fdatasync) */
    PELTON_FILE_TRUNCATE = 7,         /* file, bytes: it is so long */
    PELTON_FILE_ALLOCATE = 8,         /* file, offset, bytes: there is disk for these, and it is as long as that */
    PELTON_FILE_STAT = 9,             /* path, or file: completion.stat */
    PELTON_FILE_STAT_LINK = 10,       /* path: of a symbolic link itself */
    PELTON_FILE_SET_TIMES = 11,       /* path, accessed_ns, modified_ns */
    PELTON_FILE_UNLINK = 12,          /* path: of what is no directory */
    PELTON_FILE_REMOVE_DIRECTORY = 13, /* path */
    PELTON_FILE_RENAME = 14,          /* path, path_to, which is replaced */
    PELTON_FILE_LINK = 15,            /* path, path_to: a second name */
    PELTON_FILE_SYMLINK = 16,         /* path: what it says; path_to: where it is made */
    PELTON_FILE_READ_LINK = 17,       /* path: completion.text */
    PELTON_FILE_MAKE_DIRECTORY = 18,  /* path, mode */
    PELTON_FILE_LIST = 19,            /* file, a directory: completion.text, the next entries, some hundreds: pelton_entry_next. None: that
                                         was all. One at a time of each file */
    PELTON_FILE_COPY = 20,            /* file, offset, to, offset_to, bytes: completion.count. In the kernel, sharing blocks where it can */
    PELTON_FILE_SEND = 21,            /* file, offset, bytes, channel (a pelton_sender), message_bytes: completion.count. Up to so many bytes of
                                         the file, as messages of message_bytes, the last of what is left; read straight into the lane. Less
                                         at the end of the file. Waits for room, in a thread of its own */
    PELTON_FILE_RECEIVE = 22          /* file, offset, bytes, channel (a pelton_receiver): completion.count. Messages are written one behind the
                                         other, straight from the lane, and released; until the next is more than is left of bytes, and
                                         stays to be received, or the sender has closed. What could not be written is not released. Waits
                                         for messages, in a thread of its own */
};

/* pelton_operation.offset of a read or a write: the file's own position, which moves; of a write: its end, wherever that is by then. */
#define PELTON_CURRENT UINT64_MAX
#define PELTON_AT_END (UINT64_MAX - 1)

/* pelton_operation.accessed_ns and modified_ns: as it is. */
#define PELTON_UNCHANGED INT64_MIN

/* pelton_operation.flags: the next operation of the same call begins when this one has succeeded. When one fails, is cancelled or cut
 * short, those behind it complete with ECANCELED, undone. */
#define PELTON_LINKED 1

/* Called once with an operation's context, when neither the kernel nor the engine needs its memory any more: before its completion is
 * answered; where its deadline has passed, in a later call; where its engine was closed, any time after, on any thread. It must return,
 * and neither use the engine nor wait for who does. Not called where the operation is not taken, nor in a child of a fork. */
typedef void (*pelton_released)(void *context);

/* One operation. Begin with zeros, and set what its kind needs. It and all that it points to is the caller's again when the call has
 * returned, but for the memory itself. */
typedef struct pelton_operation {
    uint64_t token;             /* the caller's: comes back with the completion. Two may be the same */
    uint32_t kind;              /* enum pelton_file_operation */
    uint32_t flags;             /* PELTON_LINKED */
    pelton_file *file;
    pelton_file *to;
    const char *path;
    const char *path_to;
    const struct iovec *memory; /* read into, or written from, one piece after the other */
    size_t memory_count;
    uint64_t offset;
    uint64_t offset_to;
    uint64_t bytes;
    uint32_t open_flags;        /* as of open(2). The file is closed on exec, whatever they say */
    uint32_t mode;              /* bits of permission, less the umask, of what is made */
    uint64_t resolve;           /* as of openat2(2): RESOLVE_NO_SYMLINKS and others */
    int64_t accessed_ns;        /* since 1970 */
    int64_t modified_ns;
    pelton_released release;    /* of a read or a write; NULL: the memory has to stay until the completion is answered, or the engine
                                   closed */
    void *context;              /* for release */
    void *channel;              /* the operation's until its completion is answered: what else uses it, or closes it, answers
                                   PELTON_WRONG_THREAD meanwhile. Others of the same engine may have it, too: in a chain one after the
                                   other, else EBUSY. Nothing may be reserved, or received: PELTON_RESERVED, PELTON_NOT_RELEASED */
    uint64_t message_bytes;
} pelton_operation;

/* What is known of a file. */
typedef struct pelton_stat {
    uint32_t kind; /* enum pelton_file_kind */
    uint32_t mode; /* the twelve bits of permission */
    uint64_t bytes;
    uint64_t allocated_bytes;
    uint64_t links;
    uint32_t uid;
    uint32_t gid;
    uint32_t device_major;
    uint32_t device_minor;
    uint64_t inode;
    int64_t accessed_ns; /* since 1970 */
    int64_t modified_ns;
    int64_t changed_ns;
    int64_t created_ns;  /* INT64_MIN where it is not known */
} pelton_stat;

/* What something in a file system is. */
enum pelton_file_kind {
    PELTON_UNKNOWN = 0, /* it does not say, or something else */
    PELTON_REGULAR = 1,
    PELTON_DIRECTORY = 2,
    PELTON_SYMBOLIC_LINK = 3,
    PELTON_FIFO = 4,
    PELTON_SOCKET = 5,
    PELTON_CHARACTER_DEVICE = 6,
    PELTON_BLOCK_DEVICE = 7
};

/* What came of an operation. stat and text are the engine's, and good until completions are taken of it again, or it runs an operation;
 * NULL where there is none. */
typedef struct pelton_file_completion {
    uint64_t token;
    int32_t code;             /* PELTON_OK, or PELTON_SYSTEM; or what the channel says instead, as PELTON_CLOSED */
    int32_t error;            /* the errno, else 0. With PELTON_OK: what cut it short after count bytes; EPIPE: the channel */
    uint64_t count;           /* bytes that were read, written, copied, sent or received. Less than was asked for, without an error: there
                                 the file ends, or the channel */
    pelton_file *file;        /* of PELTON_FILE_OPEN: the caller's to close */
    const pelton_stat *stat;
    const char *text;         /* of a list for pelton_entry_next; of a link what it says, with a 0 behind it */
    size_t text_size;
} pelton_file_completion;

/* Makes an engine. Of the options in_flight, threads and root are looked at. Below a root, paths lead nowhere else, whatever "..", absolute
 * paths and symbolic links say: EXDEV, or ELOOP. The limit of file sizes is looked at here, and passing it is EFBIG and no signal. Does not
 * wait, but for opening the root. Errors: PELTON_OPTION; PELTON_SYSTEM. */
PELTON_MUST_USE int pelton_engine_open(const pelton_options *options, pelton_engine **out);

/* Does an operation, and waits for it; with PELTON_FOREVER the calling thread does it itself, as by the system call. Answers the
 * operation's own code: PELTON_OK; PELTON_SYSTEM, with errno. out has then what came of it, also if it failed; it may be NULL, but of
 * what opens. Not one with PELTON_LINKED.
 * Errors: PELTON_AGAIN: the deadline has passed, and it is cancelled; what it is at may still be done. Where its memory has no release,
 * it is waited for to be free all the same, and so is its channel. PELTON_OPTION: an operation that cannot be. PELTON_CLOSED_HANDLE: of a file of its. */
PELTON_MUST_USE int pelton_file_run(pelton_engine *engine, const pelton_operation *operation, int64_t deadline_ns,
                                    pelton_file_completion *out);

/* Submits count operations, or as many as there is room for, options.in_flight in all: a chain whole or not at all. *taken is how many, the
 * first ones, whatever is answered. Begins them with one system call; of an engine that is armed the first call does, and what is submitted
 * by others before the loop comes back, as it is told to, begins then, together. Does not wait: what needs no waiting is done in the call.
 * Errors: PELTON_AGAIN: there is no room for any: take completions. Of the first that was not taken: PELTON_OPTION, PELTON_CLOSED_HANDLE,
 * as of pelton_file_run; PELTON_REFUSED: a chain of more than options.in_flight. PELTON_SYSTEM: they are taken, and cannot be begun yet:
 * what takes completions tries again. */
PELTON_MUST_USE int pelton_file_submit(pelton_engine *engine, const pelton_operation *operations, size_t count, size_t *taken);

/* Takes completions, up to count of those that are there; waits for the first. *taken is how many, at least 1.
 * Errors: PELTON_AGAIN: none. PELTON_TOO_SMALL: count is 0. PELTON_REFUSED: nothing is in flight, so nothing completes; not with
 * PELTON_NO_WAIT. PELTON_SYSTEM: no memory, or threads, to begin what was submitted. That concerns no operation: each one stays in flight,
 * and its token comes back once, by a later call; so does pelton_arm. Whoever gives up after it cancels, and takes the completion: the memory
 * of an operation is the library's until then. */
PELTON_MUST_USE int pelton_file_completions(pelton_engine *engine, int64_t deadline_ns, pelton_file_completion *out, size_t count,
                                            size_t *taken);

/* Gives up what was submitted with the token, and in chains what comes after it. Each completes all the same: with ECANCELED, or, where
 * it could not be stopped any more, as if nothing had been said. Does not wait. A FIFO that is being opened leaves a thread behind until
 * somebody opens its other end; with 256 of these in the process, opening another is EMFILE. Errors: PELTON_AGAIN: nothing with that token has yet to complete. */
int pelton_file_cancel(pelton_engine *engine, uint64_t token);

/* Takes over an open descriptor, of whatever kind. name is for messages. Asks what it is, which may wait for a file server. Errors:
 * PELTON_SYSTEM: EBADF: it is not open; with another errno it is closed. */
PELTON_MUST_USE int pelton_file_from_fd(int fd, const char *name, pelton_file **out);

/* An entry of a directory. */
typedef struct pelton_entry {
    const char *name; /* with a 0 behind it; good as long as the list. "." and ".." are left out */
    uint64_t inode;
    uint32_t kind;    /* enum pelton_file_kind, as far as the directory says */
    uint32_t reserved; /* 0 */
} pelton_entry;

/* The entry at *at of a list, which is 0 at first; *at goes on to the next. Answers 1, or 0 where there is none. The text has for each
 * its inode, a little-endian u64, its kind, a byte, and its name, with a 0 behind it. */
static inline int pelton_entry_next(const pelton_file_completion *list, size_t *at, pelton_entry *out) {
    if (list->text_size < *at + 10) return 0;
    const char *entry = list->text + *at;
    memcpy(&out->inode, entry, 8);
    out->kind = (unsigned char)entry[8];
    out->name = entry + 9;
    out->reserved = 0;
    *at += 10 + strlen(out->name);
    return 1;
}

#ifdef __cplusplus
}
#endif

#endif
