/* pelton/channel.h: streams of messages.
 *
 * A channel connects senders to one receiver. Each sender writes into a lane, a single-producer single-consumer ring of
 * variable-size messages in shared memory. Messages of one sender arrive in order. A channel is created
 *   - by name: one process listens ("events", or "unix:PATH"), the other opens that name. Either side may listen. When
 *     both are gone, so are the messages;
 *   - in a directory, "path:DIR", which keeps unreleased messages when both sides are gone;
 *   - between threads of one process: pelton_threads;
 *   - with many senders, which join and leave: pelton_receiver_gather.
 * A short name has 1 to 64 letters, digits, '.', '_' or '-', and does not begin with '.'. Its sockets are in
 * $XDG_RUNTIME_DIR/pelton/NAME/; without that variable in $TMPDIR/pelton-UID/NAME/, or in /tmp/pelton-UID/NAME/. So
 * both processes need the same value. A socket's path has at most 107 bytes.
 *
 * THE PEER'S END. Once the sender has noticed that the receiver has gone, sending returns PELTON_CLOSED if it closed,
 * PELTON_PEER_DIED if it died; sends before that succeed. pelton_sender_info.unreleased counts the messages that were
 * not released. After the sender has gone and its last message was received, receiving returns the same codes. After
 * either code, resume waits for a successor of the peer and passes everything unreleased on to it. A path channel
 * reports each end once, and continues with the next peer.
 */
#ifndef PELTON_CHANNEL_H
#define PELTON_CHANNEL_H

#include <pelton/result.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Closing the sender: the receiver gets every message, then PELTON_CLOSED. To wait for that:
 * pelton_sender_wait_released. A process that exits without closing is reported to the receiver as PELTON_PEER_DIED. */
typedef struct pelton_sender pelton_sender;
/* Closing the receiver: the sender gets PELTON_CLOSED, and the number of messages that were not released. */
typedef struct pelton_receiver pelton_receiver;
/* Closing the listener: it stops listening. Endpoints that it accepted remain, and use the name to find successors. */
typedef struct pelton_listener pelton_listener;
/* Creates senders for threads of this process. Closing it leaves its senders open, except threads' own ones if it is
 * the last of its receiver. */
typedef struct pelton_senders pelton_senders;
/* A message kept after its receiver has continued. Its data is valid and unchanged until it is closed, which releases
 * the message: in any order, on any thread, also while another thread uses the receiver, and after the receiver is
 * closed. What a closed receiver holds counts as unreleased: its successor receives it again. By path, a successor gets
 * PELTON_ROLE_TAKEN until the last one is closed. */
typedef struct pelton_held pelton_held;
/* An open in progress. Closing it cancels the open. */
typedef struct pelton_sender_opening pelton_sender_opening;
typedef struct pelton_receiver_opening pelton_receiver_opening;

/* ---- Opening ----------------------------------------------------------------------------------------------------- */

enum pelton_wait {
    PELTON_BLOCK = 0, /* busy-polls for some microseconds, less if that was useless lately; then sleeps */
    PELTON_SPIN = 1   /* never sleeps: the lowest latency, for a whole processor. With one processor use PELTON_BLOCK */
};

/* Options of endpoints. Each side limits capacity and message size; the lower limits apply. The creator of a path
 * channel decides both. */
typedef struct pelton_channel_options {
    uint32_t struct_bytes;       /* sizeof(pelton_channel_options): PELTON_CHANNEL_OPTIONS_INIT sets it */
    uint32_t wait;               /* enum pelton_wait */
    uint64_t capacity;           /* bytes of the lane: 64 MiB, from 4 KiB to 16 GiB, rounded up to 64 KiB. Memory is
                                    used only as needed. For a receiver also the largest lane that it accepts: of the
                                    same user 16 GiB, else 64 MiB */
    uint64_t message_bytes_max;  /* largest message: half the capacity less 32 bytes. Of another user's sender 1 MiB */
    uint64_t resident_bytes_max; /* sender: limit of the part of the lane in use while the receiver keeps up, 16 MiB */
    uint64_t memory_bytes_max;   /* receiver: limit of the memory that its peer can make it use. 0: none */
    int64_t deadline_ns;         /* opening waits until then for a listener; on a path for the channel, for its role,
                                    and for its peer. 0: it waits for none of these */
    const uint32_t *uids;        /* users that may be the peer, besides this process's own, */
    uint32_t uid_count;          /* and their number */
    uint32_t create;             /* path: 1 creates the channel if there is none */
    uint32_t mode;               /* path: permission bits of a created channel, 0700. A channel that exists, and has
                                    more bits, is refused: PELTON_NOT_A_CHANNEL */
    uint32_t lanes;              /* path: largest number of senders of a created channel, 1, at most 1024 */
    uint32_t traced;             /* sender, or path with create: 1 permits messages with a traceparent, which are 40
                                    bytes larger in the lane; the largest message is 40 bytes smaller. A receiver needs
                                    no option; one of an earlier version is refused */
    uint32_t reserved;           /* 0 */
} pelton_channel_options;

#define PELTON_CHANNEL_OPTIONS_INIT {(uint32_t)sizeof(pelton_channel_options), 0, 0, 0, 0, 0, 0, NULL, 0, 0, 0, 0, 0, 0}

/* Opens the sender of a channel: "events" or "unix:PATH" connects to a receiver that listens; "path:DIR" opens the
 * channel in that directory and continues after its predecessor's last message. Waits until options.deadline_ns.
 * Without a deadline it fails immediately if no process listens, and a listener has 5 seconds to accept. Errors:
 * PELTON_TIMED_OUT: the deadline, or those 5 seconds, have passed. PELTON_NAME, PELTON_OPTION. By name:
 * PELTON_NO_LISTENER; PELTON_REFUSED: the detail has the peer's reason; PELTON_HUNG_UP. By path: PELTON_NO_CHANNEL and
 * PELTON_ROLE_TAKEN, also at the deadline; PELTON_NOT_A_CHANNEL, PELTON_NO_SPACE, PELTON_REBOOTED. PELTON_CORRUPT.
 * After any error it can be tried again. */
PELTON_MUST_USE int pelton_sender_open(const char *name, const pelton_channel_options *options, pelton_sender **out);

/* Opens the receiver of a channel. As pelton_sender_open. A path's receiver begins with the oldest unreleased message;
 * with a deadline it also waits for a sender, unless there is a message. */
PELTON_MUST_USE int pelton_receiver_open(const char *name, const pelton_channel_options *options,
                                         pelton_receiver **out);

/* Starts to open, for event loops: as pelton_sender_open, but does not wait. Poll the opening's descriptor for reading,
 * and call pelton_sender_opening_finish each time it is readable, until that does not return PELTON_AGAIN. Then close
 * the opening. The descriptor is readable at first: the first call begins to connect. It is readable again whenever
 * there is something to do, also at options.deadline_ns. The endpoint has another descriptor.
 * Errors: PELTON_NAME, PELTON_OPTION. */
PELTON_MUST_USE int pelton_sender_open_start(const char *name, const pelton_channel_options *options,
                                             pelton_sender_opening **out);
PELTON_MUST_USE int pelton_receiver_open_start(const char *name, const pelton_channel_options *options,
                                               pelton_receiver_opening **out);

/* The descriptor to poll for reading, until the opening is closed. It is the opening's: do not read or close it. */
int pelton_sender_opening_fd(const pelton_sender_opening *opening);
int pelton_receiver_opening_fd(const pelton_receiver_opening *opening);

/* Continues, and returns the endpoint once it is open. Does not wait. Errors: PELTON_AGAIN: not yet. Others as
 * pelton_sender_open: the open has failed. Once the open has succeeded or failed, further calls return
 * PELTON_REFUSED. */
PELTON_MUST_USE int pelton_sender_opening_finish(pelton_sender_opening *opening, pelton_sender **out);
PELTON_MUST_USE int pelton_receiver_opening_finish(pelton_receiver_opening *opening, pelton_receiver **out);

/* Creates both endpoints of a channel between threads of this process. Does not wait. Errors: PELTON_OPTION. */
PELTON_MUST_USE int pelton_threads(const pelton_channel_options *options, pelton_sender **out_sender,
                                   pelton_receiver **out_receiver);

/* Listens under "events" or "unix:PATH". Does not wait. Each accepted peer gets a channel of its own, with these
 * options. The name exists as long as the listener, or an endpoint that it accepted, is open. The socket of a dead
 * process is replaced. Errors: PELTON_IN_USE. PELTON_NAME: also for "path:DIR". PELTON_OPTION. */
PELTON_MUST_USE int pelton_listener_open(const char *name, const pelton_channel_options *options,
                                         pelton_listener **out);

/* The descriptor to poll for reading: readable while a peer waits to be accepted. It is not armed. Constant; not to be
 * closed, read or written. */
int pelton_listener_fd(const pelton_listener *listener);

/* Waits until a receiver connects, and returns the sender to it. A peer that is refused receives the reason, and the
 * wait continues. After a connection it can take half a second longer than the deadline, also with PELTON_NO_WAIT, if
 * the peer is slow. Errors: PELTON_AGAIN: no peer was accepted. PELTON_SYSTEM: for instance, no descriptor is free. */
PELTON_MUST_USE int pelton_listener_accept_sender(pelton_listener *listener, int64_t deadline_ns, pelton_sender **out);

/* Waits until a sender connects, and returns the receiver from it. As pelton_listener_accept_sender. */
PELTON_MUST_USE int pelton_listener_accept_receiver(pelton_listener *listener, int64_t deadline_ns,
                                                    pelton_receiver **out);

/* ---- Many senders ------------------------------------------------------------------------------------------------ */

/* Options of a receiver of many senders. Fields as in pelton_channel_options, except: */
typedef struct pelton_gather_options {
    uint32_t struct_bytes; /* sizeof(pelton_gather_options): PELTON_GATHER_OPTIONS_INIT sets it */
    uint32_t wait;
    uint64_t capacity;
    uint64_t message_bytes_max;
    uint64_t resident_bytes_max; /* of each sender among this process's threads */
    uint64_t memory_bytes_max;   /* of all peers together, at least 1 MiB: a new one is offered lanes of a sixteenth of
                                    the remaining bytes, and refused below 64 KiB */
    const uint32_t *uids;
    uint32_t uid_count;
    uint32_t senders_max;        /* at a time: 1024, which is also the largest value. Each needs 3 or 4 descriptors */
    uint32_t membership_events;  /* 1: pelton_receiver_receive_event also returns which senders join and leave */
    uint32_t traced;             /* 1: of each sender among this process's threads */
} pelton_gather_options;

#define PELTON_GATHER_OPTIONS_INIT {(uint32_t)sizeof(pelton_gather_options), 0, 0, 0, 0, 0, NULL, 0, 0, 0, 0}

/* Creates a receiver of many senders, with a lane for each: those that connect to the name, and threads of this process
 * (pelton_receiver_senders). name may be NULL: then there are only threads. Does not wait: senders are accepted inside
 * the receiving functions and pelton_receiver_arm, and a slow one delays nothing. Lanes are served round-robin, at most
 * 64 messages each. One sender's end does not affect the others. Without a name, create pelton_senders before
 * receiving: receiving returns PELTON_CLOSED when all senders and pelton_senders are closed. Errors: as
 * pelton_listener_open. */
PELTON_MUST_USE int pelton_receiver_gather(const char *name, const pelton_gather_options *options,
                                           pelton_receiver **out);

/* Creates the object by which threads create senders; each call creates another one. Also while a message is received.
 * Errors: PELTON_REFUSED: the receiver is not from pelton_receiver_gather. PELTON_CLOSED: receiving has already
 * returned PELTON_CLOSED. */
PELTON_MUST_USE int pelton_receiver_senders(pelton_receiver *receiver, pelton_senders **out);

/* Creates a sender with a lane of its own. Does not wait. Any thread.
 * Errors: PELTON_CLOSED: the receiver is closed. PELTON_REFUSED: there are senders_max already. */
PELTON_MUST_USE int pelton_senders_sender(pelton_senders *senders, pelton_sender **out);

/* Sends through the calling thread's own lane, which is created at the first use and closed when the thread ends. Any
 * thread; threads do not wait for each other. Errors: as pelton_sender_send and pelton_senders_sender. PELTON_REFUSED:
 * also in a destructor of thread-local data, after the thread's lane was closed. */
PELTON_MUST_USE int pelton_senders_send(pelton_senders *senders, const void *data, size_t size, int64_t deadline_ns);

/* ---- Sending ------------------------------------------------------------------------------------------------------ *
 * If one of these functions fails, it has sent nothing. Functions that send, reserve, wait, poll or arm return
 * PELTON_CLOSED or PELTON_PEER_DIED after the receiver has gone, PELTON_CORRUPT after it violated the layout,
 * PELTON_NO_SPACE if a path's file system is full. While space is reserved, all functions return PELTON_RESERVED except
 * reserve, commit, abort, fd, disarm and get_info. */

/* Copies a message into the lane. Waits for free space. data may be NULL if size is 0. Errors: PELTON_AGAIN: there is
 * no space. PELTON_TOO_LARGE: larger than the channel's limit, in any state of the lane. */
PELTON_MUST_USE int pelton_sender_send(pelton_sender *sender, const void *data, size_t size, int64_t deadline_ns);

/* As pelton_sender_send, with the sender's span, for pelton_receiver_traceparent. A text that is not valid by W3C's
 * rules, or NULL, is as none. Without options.traced the message goes without it. */
PELTON_MUST_USE int pelton_sender_send_traced(pelton_sender *sender, const void *data, size_t size,
                                              const char *traceparent, int64_t deadline_ns);

/* Sends count messages, which become visible together: messages[i].iov_len bytes at messages[i].iov_base, which may be
 * NULL if that is 0. Waits for free space for all. With a count of 0 it does nothing. Errors: as pelton_sender_send.
 * PELTON_TOO_LARGE: also if all messages, with 16 bytes more for each, exceed the largest message: send them in several
 * batches. */
PELTON_MUST_USE int pelton_sender_send_batch(pelton_sender *sender, const struct iovec *messages, size_t count,
                                             int64_t deadline_ns);

/* Sends a message with count descriptors, at most 64. Waits for free space. Not on a path. The caller keeps its
 * descriptors; the sender keeps duplicates for a successor of the receiver, until it notices that the message was
 * released. Errors: as pelton_sender_send. PELTON_TOO_MANY_DESCRIPTORS. PELTON_REFUSED: a path. PELTON_SYSTEM: EBADF:
 * one is closed. */
PELTON_MUST_USE int pelton_sender_send_descriptors(pelton_sender *sender, const void *data, size_t size, const int *fds,
                                                   size_t count, int64_t deadline_ns);

/* Reserves size bytes in the lane, aligned to 8, for the caller to write the message in place. Waits for free space.
 * *out is valid until the commit or abort. An earlier reservation is aborted, also if this fails. Errors: as
 * pelton_sender_send. */
PELTON_MUST_USE int pelton_sender_reserve(pelton_sender *sender, size_t size, int64_t deadline_ns, void **out);

/* As pelton_sender_reserve, for a message with a traceparent: see pelton_sender_send_traced. */
PELTON_MUST_USE int pelton_sender_reserve_traced(pelton_sender *sender, size_t size, const char *traceparent,
                                                 int64_t deadline_ns, void **out);

/* Sends the first size bytes of the reservation as one message. They must not be written afterwards. Also after the
 * receiver has gone: the next call reports that. Errors: PELTON_NOT_RESERVED. PELTON_TOO_LARGE: more than reserved; the
 * reservation remains. */
PELTON_MUST_USE int pelton_sender_commit(pelton_sender *sender, size_t size);

/* Drops the reservation: nothing is sent. Errors: PELTON_NOT_RESERVED. */
int pelton_sender_abort(pelton_sender *sender);

/* Waits until the receiver has released every message. Errors: PELTON_AGAIN: not yet. As pelton_sender_send. */
PELTON_MUST_USE int pelton_sender_wait_released(pelton_sender *sender, int64_t deadline_ns);

/* After PELTON_PEER_DIED or PELTON_CLOSED: waits for the receiver's successor, and passes the lane with everything
 * unreleased on to it. On a path: waits until a receiver is there, which sending does not require. A sender that
 * connected connects again; one that was accepted accepts again, and needs no open listener. Leave some milliseconds
 * for the handshake. After a receiver that closed, it can exceed the deadline to copy what is unreleased. Errors:
 * PELTON_AGAIN: no successor came. PELTON_REFUSED: the peer is alive, the channel has no successors (threads,
 * pelton_receiver_gather), or the successor's reason. PELTON_HUNG_UP, PELTON_CORRUPT. It can be tried again. */
PELTON_MUST_USE int pelton_sender_resume(pelton_sender *sender, int64_t deadline_ns);

/* Writes everything sent under a path to the disk, so that unreleased messages survive a power failure. Waits for the
 * disk. A crash of processes loses nothing without it. Errors: PELTON_REFUSED: not a path. PELTON_SYSTEM. */
PELTON_MUST_USE int pelton_sender_sync(pelton_sender *sender);

/* Returns memory without messages to the kernel: after a burst the lane keeps it until then. One or two system
 * calls. */
int pelton_sender_trim(pelton_sender *sender);

/* The descriptor to poll for reading. Constant; not to be closed, read or written. Also while space is reserved. */
int pelton_sender_fd(const pelton_sender *sender);

/* Busy-polls for free space for a message of size bytes ("Event loops" in pelton.h).
 * Errors: PELTON_AGAIN: no space yet. As pelton_sender_send. */
PELTON_MUST_USE int pelton_sender_poll(pelton_sender *sender, size_t size);

/* Makes the descriptor readable once there is space for a message of size bytes, or the receiver has gone. Arm only
 * while a message waits to be sent: usually there is space. Returns PELTON_OK, or PELTON_READY: there is space. Errors:
 * as pelton_sender_send. */
PELTON_MUST_USE int pelton_sender_arm(pelton_sender *sender, size_t size);

/* Makes the descriptor readable once the receiver has gone, for a sender with nothing to send. It replaces
 * pelton_sender_arm. When the descriptor is readable, arm again: it may be for nothing. Errors: as
 * pelton_sender_send. */
PELTON_MUST_USE int pelton_sender_arm_for_end(pelton_sender *sender);

/* Ends what pelton_sender_arm and pelton_sender_arm_for_end began. Also while space is reserved. */
int pelton_sender_disarm(pelton_sender *sender);

/* A sender's figures. Set struct_bytes before the call; a newer program gets 0 in fields that the library does not
 * have. */
typedef struct pelton_sender_info {
    uint32_t struct_bytes;      /* sizeof(pelton_sender_info) */
    uint32_t has_peer;          /* 1: a receiver is connected, as far as known */
    uint32_t peer_pid;          /* its process: by name as the kernel reports it, by path as the peer wrote it. 0 if
                                   has_peer is 0 */
    uint32_t peer_uid;          /* its user: by name as the kernel reports it, by path the directory's owner. 0, not a
                                   user, if has_peer is 0 */
    uint32_t next_seq;          /* number of the next message */
    uint32_t reserved;          /* 0 */
    uint64_t capacity;          /* bytes of the lane */
    uint64_t message_bytes_max; /* largest message */
    uint64_t unreleased;        /* messages sent and not released */
    uint64_t unreleased_max;    /* the largest such number that the sender noticed */
    uint64_t messages;          /* sent */
    uint64_t bytes;             /* of their payload */
    uint64_t waits;             /* times that there was no space */
    uint64_t sleeps;            /* times that it slept, or armed its descriptor */
    uint64_t wakes_sent;        /* times that it woke the receiver */
} pelton_sender_info;

/* Also while space is reserved. Errors: PELTON_OPTION: struct_bytes is 0, no multiple of 8, or above 4096. */
int pelton_sender_get_info(pelton_sender *sender, pelton_sender_info *out);

/* ---- Receiving ---------------------------------------------------------------------------------------------------- *
 * A received message stays in the lane until it is released or held. Before that, all functions return
 * PELTON_NOT_RELEASED except release, hold, traceparent, take_descriptors, senders, fd, disarm and get_info. Functions
 * that receive, poll or arm return PELTON_CLOSED or PELTON_PEER_DIED after the last message of a sender that has gone,
 * and PELTON_CORRUPT after it violated the layout. */

/* A message in the lane. A receiver that reads in place trusts the sender not to write after the commit; one that
 * copies the data once and uses only the copy (pelton_receiver_receive_copy) trusts nobody. */
typedef struct pelton_message {
    const void *data;          /* aligned to 8, never NULL; valid until the release, or the close of pelton_held */
    size_t size;
    uint32_t seq;              /* its number in the lane: one more for each, modulo 2^32, never 0 */
    uint32_t lane;             /* number of the sender, in the order of joining, from 1; 0 for a channel of one sender
                                  */
    uint32_t flags;            /* PELTON_REDELIVERED, or 0 */
    uint32_t descriptor_count; /* descriptors that came with it: pelton_receiver_take_descriptors */
} pelton_message;

/* An earlier receiver may have received the message: it was unreleased when this receiver took the lane over. */
#define PELTON_REDELIVERED 1

/* What pelton_receiver_receive_event returns. */
enum pelton_event_kind {
    PELTON_MESSAGE = 0,  /* a message */
    PELTON_JOINED = 1,   /* a sender has joined; its messages follow */
    PELTON_LEFT = 2,     /* a sender has closed; all its messages were received */
    PELTON_DIED = 3,     /* a sender has died; all its messages were received */
    PELTON_VIOLATED = 4  /* a sender violated the layout and was disconnected */
};

typedef struct pelton_event {
    uint32_t kind;          /* enum pelton_event_kind */
    uint32_t lane;          /* the sender's number, as in pelton_message */
    uint32_t peer_pid;      /* the sender's process, 0 if unknown */
    uint32_t peer_uid;      /* its user, UINT32_MAX if unknown */
    pelton_message message; /* of PELTON_MESSAGE: to be released. Of other kinds it has 0 bytes */
} pelton_event;

/* Receives the next message, in place. Waits for one. Errors: PELTON_AGAIN: there is none. */
PELTON_MUST_USE int pelton_receiver_receive(pelton_receiver *receiver, int64_t deadline_ns, pelton_message *out);

/* As pelton_receiver_receive; with options.membership_events also which senders join and leave. Only PELTON_MESSAGE
 * needs a release. The other receiving functions skip these events. */
PELTON_MUST_USE int pelton_receiver_receive_event(pelton_receiver *receiver, int64_t deadline_ns, pelton_event *out);

/* Receives up to count messages of one lane, in place. Waits for the first. *out_count is their number, at least 1. One
 * pelton_receiver_release releases all. A message with descriptors comes alone; one with a traceparent is the last of
 * its batch.
 * Errors: PELTON_AGAIN: there is none. PELTON_TOO_SMALL: count is 0. */
PELTON_MUST_USE int pelton_receiver_receive_batch(pelton_receiver *receiver, int64_t deadline_ns, pelton_message *out,
                                                  size_t count, size_t *out_count);

/* Copies the next message to buffer and releases it. Waits for one. *out_size is its size. Safe with any sender.
 * Descriptors that came with it are closed. buffer may be NULL if capacity is 0. Errors: PELTON_AGAIN: there is none.
 * PELTON_TOO_SMALL: *out_size is the size; the message remains. */
PELTON_MUST_USE int pelton_receiver_receive_copy(pelton_receiver *receiver, void *buffer, size_t capacity,
                                                 int64_t deadline_ns, size_t *out_size);

/* Releases the received message, or batch; its data must not be read afterwards. Descriptors that were not taken are
 * closed. Does not wait, except for late descriptors (pelton_receiver_take_descriptors). Errors:
 * PELTON_NOT_RECEIVED. */
int pelton_receiver_release(pelton_receiver *receiver);

/* Writes the traceparent of the received message, or of the last one of a batch, or, if none is received, of the one
 * that pelton_receiver_receive_copy copied last: PELTON_TRACEPARENT_SIZE bytes of text with its NUL. Returns 1; or 0,
 * and writes nothing, if it came without a valid one; or a code. Does not wait. */
int pelton_receiver_traceparent(const pelton_receiver *receiver, char *out);

/* Keeps the received message without a copy, while the receiver continues. Its data is valid until *out is closed.
 * Space becomes free in order: a message that is held long delays the release of later ones. Descriptors that were not
 * taken are closed. Errors: PELTON_NOT_RECEIVED: also after pelton_receiver_receive_batch with space for more than one
 * message, whatever *out_count is. */
PELTON_MUST_USE int pelton_receiver_hold(pelton_receiver *receiver, pelton_held **out);

/* Takes the descriptors of the received message. The caller closes them; they close on exec. *out_count is their
 * number, 0 if there are none or they were taken; also with PELTON_TOO_SMALL, which leaves them. out may be NULL if
 * capacity is 0. Those of a PELTON_REDELIVERED message may be late: this, and functions that close them, wait up to a
 * second for them. Errors: PELTON_NOT_RECEIVED. PELTON_DESCRIPTORS_LOST, PELTON_CORRUPT: they are lost, the message
 * remains. */
PELTON_MUST_USE int pelton_receiver_take_descriptors(pelton_receiver *receiver, int *out, size_t capacity,
                                                     size_t *out_count);

/* After PELTON_PEER_DIED or PELTON_CLOSED: waits for the sender's successor, which continues after the last committed
 * message. On a path, also a message ends the wait: its sender may have left again. Otherwise as pelton_sender_resume.
 */
PELTON_MUST_USE int pelton_receiver_resume(pelton_receiver *receiver, int64_t deadline_ns);

/* Writes what was released under a path to the disk, so that it is not delivered again after a power failure. Waits for
 * the disk. Errors: PELTON_REFUSED: not a path. PELTON_SYSTEM. */
PELTON_MUST_USE int pelton_receiver_sync(pelton_receiver *receiver);

/* The descriptor to poll for reading. As pelton_sender_fd. */
int pelton_receiver_fd(const pelton_receiver *receiver);

/* Busy-polls for a message ("Event loops" in pelton.h). Errors: PELTON_AGAIN: none yet. As pelton_receiver_receive. */
PELTON_MUST_USE int pelton_receiver_poll(pelton_receiver *receiver);

/* Makes the descriptor readable once there is a message, or the sender has gone. Returns PELTON_OK, or PELTON_READY:
 * there is a message. Errors: as pelton_receiver_receive. */
PELTON_MUST_USE int pelton_receiver_arm(pelton_receiver *receiver);

/* Ends what pelton_receiver_arm began. Also while a message is received. */
int pelton_receiver_disarm(pelton_receiver *receiver);

/* A receiver's figures. With several senders, peer_pid, peer_uid, generation, capacity and message_bytes_max are those
 * of the sender of the last message. */
typedef struct pelton_receiver_info {
    uint32_t struct_bytes;      /* sizeof(pelton_receiver_info), as in pelton_sender_info */
    uint32_t has_peer;          /* 1: a sender is connected, as far as known */
    uint32_t peer_pid;
    uint32_t peer_uid;
    uint32_t generation;        /* 1 for the lane's first producer, one more for each successor */
    uint32_t reserved;          /* 0 */
    uint64_t capacity;
    uint64_t message_bytes_max;
    uint64_t messages;          /* released or held; those of a batch already when it is received */
    uint64_t bytes;             /* of their payload */
    uint64_t waits;             /* times that there was no message */
    uint64_t sleeps;
    uint64_t wakes_sent;
} pelton_receiver_info;

/* Also while a message is received. Errors: as pelton_sender_get_info. */
int pelton_receiver_get_info(pelton_receiver *receiver, pelton_receiver_info *out);

#ifdef __cplusplus
}
#endif

#endif
