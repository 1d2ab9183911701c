/* pelton_uv.h: pelton in a libuv loop. Header-only, on uv_poll: no thread, no timer, and nothing runs while nothing happens.
 *
 *     static void on_message(pelton_uv_receiver *handle, const pelton_message *message) { use(message->data, message->size); }
 *     static void on_end(pelton_uv_receiver *handle, int code) { pelton_uv_receiver_close(handle, NULL); }
 *     ...
 *     pelton_uv_receiver handle;
 *     pelton_uv_receiver_init(uv_default_loop(), &handle, receiver);
 *     pelton_uv_receiver_start(&handle, on_message, on_end);
 *
 * HANDLES are the caller's memory, as libuv's are, until the callback of close. init takes the pelton_sender or pelton_receiver
 * over, and close closes it; in between it is the field of that name, for whatever does not wait. The field data is the caller's,
 * NULL after init. A handle is active, and keeps uv_run going, while it is started; uv_unref((uv_handle_t *)&handle.poll) is for
 * one that shall not.
 *
 * CALLBACKS run in uv_run only, never from within a function of this header. In each of them every function may be called, for
 * the same handle or another: start, stop, close. After uv_stop the turn goes to its end, with what messages it has.
 *
 * RESULTS are pelton's codes; PELTON_SYSTEM, with libuv's error as errno, where libuv refuses something.
 *
 * THREADS. Only the loop's thread calls these. OPENING, ACCEPTING and RESUMING shake hands within the call, for seconds if the peer
 * is slow. A loop that cannot afford that has uv_queue_work do it. The work calls pelton_sender_open, pelton_accept_receiver or,
 * with a stopped handle's receiver, pelton_receiver_resume, and keeps the answer and what pelton_error_detail() says; the after-work
 * callback calls init, or start. Nothing else uses the pelton handle meanwhile. A listener needs nothing of this header: a uv_poll
 * for UV_READABLE on pelton_listener_fd, which calls pelton_accept_receiver with PELTON_NO_WAIT, or stops until the work is done.
 *
 * FORK. A child has none of pelton's descriptors, so uv_loop_fork wants every handle stopped before the fork. The child closes its
 * handles before it makes others; the parent starts them again. */
#ifndef PELTON_UV_H
#define PELTON_UV_H

#include <errno.h>
#include <pelton.h>
#include <string.h>
#include <uv.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Nanoseconds after which a receiver with more messages ends its turn, so that the loop's other handles have theirs. It looks at the
 * clock after as many messages again as before: a turn takes twice this at most, if messages take alike. A program may define its own. */
#ifndef PELTON_UV_TURN_NS
#define PELTON_UV_TURN_NS 1000000
#endif

/* Nanoseconds for which an empty receiver looks on for the next message before the loop sleeps: fewer, down to a sixteenth, when
 * that has not paid lately. A sleep and a wake cost more: 25 to 40 us of processor time on a virtual machine. */
#ifndef PELTON_UV_LOOK_NS
#define PELTON_UV_LOOK_NS 10000
#endif

typedef struct pelton_uv_receiver pelton_uv_receiver;
typedef struct pelton_uv_sender pelton_uv_sender;

/* A message, good until the callback returns, which releases it. In the callback pelton_hold(handle->receiver, ...) keeps it longer,
 * pelton_take_descriptors(handle->receiver, ...) has what came along. */
typedef void (*pelton_uv_message_cb)(pelton_uv_receiver *handle, const pelton_message *message);
/* What pelton_receive answered other than a message: PELTON_CLOSED, PELTON_PEER_DIED, or an error. The handle is stopped. */
typedef void (*pelton_uv_receiver_end_cb)(pelton_uv_receiver *handle, int code);
/* The handle is closed, its memory the caller's again. */
typedef void (*pelton_uv_receiver_close_cb)(pelton_uv_receiver *handle);

/* There is room for a message of the size given to start. */
typedef void (*pelton_uv_room_cb)(pelton_uv_sender *handle);
/* What pelton_send would answer other than that: PELTON_CLOSED, PELTON_PEER_DIED, or an error. The handle is stopped. */
typedef void (*pelton_uv_sender_end_cb)(pelton_uv_sender *handle, int code);
typedef void (*pelton_uv_sender_close_cb)(pelton_uv_sender *handle);

struct pelton_uv_receiver {
    void *data;                /* the caller's */
    pelton_receiver *receiver; /* to be used, not to be closed */
    uv_poll_t poll;            /* for uv_ref, uv_unref, uv_is_active, uv_is_closing */
    /* Private from here on. on_message is NULL while stopped. */
    pelton_uv_message_cb on_message;
    pelton_uv_receiver_end_cb on_end;
    pelton_uv_receiver_close_cb on_close;
    int in_message; /* a message is with on_message */
    int halvings;   /* how often the time of looking on is halved: once more when it did not pay */
};

struct pelton_uv_sender {
    void *data;            /* the caller's */
    pelton_sender *sender; /* to be used, not to be closed */
    uv_poll_t poll;        /* as above */
    /* Private from here on. on_end is NULL while stopped. */
    pelton_uv_room_cb on_room;
    pelton_uv_sender_end_cb on_end;
    pelton_uv_sender_close_cb on_close;
    size_t size;
    unsigned turns; /* with room */
};

/* libuv's error as pelton's code. */
static inline int pelton_uv_refused_(int error) {
    if (error == 0) return PELTON_OK;
    errno = -error;
    return PELTON_SYSTEM;
}

/* ---- Receiving --------------------------------------------------------------------------------------------------------- */

/* Prepares the handle, stopped. After PELTON_OK the receiver is the handle's. Errors: PELTON_SYSTEM, and the code with which the
 * receiver refuses its descriptor. */
static inline int pelton_uv_receiver_init(uv_loop_t *loop, pelton_uv_receiver *handle, pelton_receiver *receiver) {
    int fd = pelton_receiver_fd(receiver);
    if (fd < 0) return fd;
    memset(handle, 0, sizeof *handle);
    handle->receiver = receiver;
    handle->poll.data = handle;
    return pelton_uv_refused_(uv_poll_init(loop, &handle->poll, fd));
}

/* Lets the loop be without the descriptor: it stays readable while there are messages. */
static inline void pelton_uv_receiver_rest_(pelton_uv_receiver *handle) {
    uv_poll_stop(&handle->poll);
    pelton_receiver_disarm(handle->receiver);
}

static inline void pelton_uv_receiver_ended_(pelton_uv_receiver *handle, int code) {
    handle->on_message = NULL;
    pelton_uv_receiver_rest_(handle);
    handle->on_end(handle, code);
}

/* The next message when none was there at once: looks on for a while. */
static inline int pelton_uv_look_on_(pelton_uv_receiver *handle, pelton_message *message) {
    uint64_t until = 0;
    for (;;) {
        /* Some looks for each at the clock, which costs as much. */
        for (int i = 0; i < 16; i++) {
            int code = pelton_receive(handle->receiver, PELTON_NO_WAIT, message);
            if (code != PELTON_AGAIN) {
                if (handle->halvings > 0) handle->halvings--;
                return code;
            }
        }
        uint64_t now = uv_hrtime();
        if (until == 0) until = now + (PELTON_UV_LOOK_NS >> handle->halvings);
        if (now >= until) break;
    }
    if (handle->halvings < 4) handle->halvings++;
    return PELTON_AGAIN;
}

static inline void pelton_uv_receiver_turn_(uv_poll_t *poll, int status, int events) {
    pelton_uv_receiver *handle = (pelton_uv_receiver *)poll->data;
    uint64_t began = uv_hrtime();
    int code = pelton_uv_refused_(status);
    (void)events;
    /* As many again as before while there is time. */
    for (uint64_t share = 1; code == PELTON_OK; share *= 2) {
        for (uint64_t i = 0; i < share; i++) {
            pelton_message message;
            code = pelton_receive(handle->receiver, PELTON_NO_WAIT, &message);
            if (code == PELTON_AGAIN) code = pelton_uv_look_on_(handle, &message);
            if (code != PELTON_OK) break;
            handle->in_message = 1;
            handle->on_message(handle, &message);
            handle->in_message = 0;
            /* Answers PELTON_NOT_RECEIVED where the callback has held or released it. */
            pelton_release(handle->receiver);
            if (uv_is_closing((uv_handle_t *)poll)) return;
            if (!handle->on_message) {
                pelton_uv_receiver_rest_(handle);
                return;
            }
        }
        /* Not armed anew, the descriptor is readable still: the next turn goes on. */
        if (code == PELTON_OK && uv_hrtime() - began >= PELTON_UV_TURN_NS) return;
    }
    /* PELTON_OK: one has come meanwhile, and the descriptor is readable. */
    if (code == PELTON_AGAIN) code = pelton_receiver_arm(handle->receiver);
    if (code != PELTON_AGAIN && code != PELTON_OK) pelton_uv_receiver_ended_(handle, code);
}

/* Has messages delivered from now on. Started already: changes the callbacks. Errors: whatever would be told to on_end, which then
 * is not called: the end of the channel too. */
PELTON_MUST_USE static inline int pelton_uv_receiver_start(pelton_uv_receiver *handle, pelton_uv_message_cb on_message,
                                                           pelton_uv_receiver_end_cb on_end) {
    /* Within on_message the turn goes on by itself. */
    if (!handle->on_message && !handle->in_message) {
        int code = pelton_receiver_arm(handle->receiver);
        if (code != PELTON_OK && code != PELTON_AGAIN) return code;
        code = pelton_uv_refused_(uv_poll_start(&handle->poll, UV_READABLE, pelton_uv_receiver_turn_));
        if (code != PELTON_OK) return code;
    }
    handle->on_message = on_message;
    handle->on_end = on_end;
    return PELTON_OK;
}

/* Has none delivered until started again, also if called in on_message. The lane fills, and the sender waits: back-pressure. The
 * sender's end is not told meanwhile. Who would rather have messages late than be woken for each stops in on_message, and starts
 * by a uv_timer. */
static inline void pelton_uv_receiver_stop(pelton_uv_receiver *handle) {
    handle->on_message = NULL;
    if (!handle->in_message) pelton_uv_receiver_rest_(handle);
}

static inline void pelton_uv_receiver_closed_(uv_handle_t *poll) {
    pelton_uv_receiver *handle = (pelton_uv_receiver *)poll->data;
    pelton_receiver_close(handle->receiver);
    if (handle->on_close) handle->on_close(handle);
}

/* Closes the handle, and the receiver with it. No callback comes but on_close, in a later step of the loop; NULL is none. The
 * message that is in on_message stays good until that returns. */
static inline void pelton_uv_receiver_close(pelton_uv_receiver *handle, pelton_uv_receiver_close_cb on_close) {
    handle->on_close = on_close;
    uv_close((uv_handle_t *)&handle->poll, pelton_uv_receiver_closed_);
}

/* ---- Sending ----------------------------------------------------------------------------------------------------------- *
 * Send with pelton_send(handle.sender, ..., PELTON_NO_WAIT) and the like, at any time, in any callback. On PELTON_AGAIN keep
 * what could not be sent, stop producing (uv_read_stop, for instance), and start the handle: on_room says when to go on.
 * Nothing is queued here. */

/* Prepares the handle, stopped. As pelton_uv_receiver_init. */
static inline int pelton_uv_sender_init(uv_loop_t *loop, pelton_uv_sender *handle, pelton_sender *sender) {
    int fd = pelton_sender_fd(sender);
    if (fd < 0) return fd;
    memset(handle, 0, sizeof *handle);
    handle->sender = sender;
    handle->poll.data = handle;
    return pelton_uv_refused_(uv_poll_init(loop, &handle->poll, fd));
}

static inline void pelton_uv_sender_rest_(pelton_uv_sender *handle) {
    uv_poll_stop(&handle->poll);
    pelton_sender_disarm(handle->sender);
}

/* Whether there is room now, without a system call. */
static inline int pelton_uv_has_room_(pelton_uv_sender *handle) {
    void *room;
    int code = pelton_reserve(handle->sender, handle->size, PELTON_NO_WAIT, &room);
    if (code == PELTON_OK) pelton_abort(handle->sender);
    return code;
}

static inline void pelton_uv_sender_turn_(uv_poll_t *poll, int status, int events) {
    pelton_uv_sender *handle = (pelton_uv_sender *)poll->data;
    int code = pelton_uv_refused_(status);
    (void)events;
    if (code == PELTON_OK) code = handle->on_room ? pelton_uv_has_room_(handle) : pelton_sender_arm_for_end(handle->sender);
    if (code == PELTON_OK && handle->on_room) {
        handle->on_room(handle);
        if (uv_is_closing((uv_handle_t *)poll) || !handle->on_end || !handle->on_room) return;
        code = pelton_uv_has_room_(handle);
        /* Now and then whether the receiver is there, for who has room and sends nothing. */
        if (code == PELTON_OK && ++handle->turns % 64 == 0) code = PELTON_AGAIN;
    }
    /* Not armed anew, the descriptor is readable still, for the next turn. */
    if (code == PELTON_AGAIN) code = pelton_sender_arm(handle->sender, handle->size);
    if (code != PELTON_AGAIN && code != PELTON_OK) {
        pelton_uv_sender_end_cb on_end = handle->on_end;
        handle->on_end = NULL;
        pelton_uv_sender_rest_(handle);
        on_end(handle, code);
    }
}

/* Has on_room called once in each turn of the loop in which there is room for a message of size bytes, until stopped. Where there
 * was none, it comes when the receiver has released half of what waits. Who produces without end does it there, some at a time.
 * on_room may be NULL, for who has nothing to send: then nothing runs until the receiver goes, which is told to on_end.
 * Nothing may stay reserved while started. Started already: changes size and callbacks. Errors: PELTON_TOO_LARGE, PELTON_RESERVED, and
 * whatever would be told to on_end, which then is not called. */
PELTON_MUST_USE static inline int pelton_uv_sender_start(pelton_uv_sender *handle, size_t size, pelton_uv_room_cb on_room,
                                                         pelton_uv_sender_end_cb on_end) {
    int code = on_room ? pelton_sender_arm(handle->sender, size) : pelton_sender_arm_for_end(handle->sender);
    if (code != PELTON_OK && code != PELTON_AGAIN) return code;
    if (!handle->on_end) {
        code = pelton_uv_refused_(uv_poll_start(&handle->poll, UV_READABLE, pelton_uv_sender_turn_));
        if (code != PELTON_OK) return code;
    }
    handle->size = size;
    handle->on_room = on_room;
    handle->on_end = on_end;
    return PELTON_OK;
}

/* Has neither called until started again. */
static inline void pelton_uv_sender_stop(pelton_uv_sender *handle) {
    handle->on_end = NULL;
    pelton_uv_sender_rest_(handle);
}

static inline void pelton_uv_sender_closed_(uv_handle_t *poll) {
    pelton_uv_sender *handle = (pelton_uv_sender *)poll->data;
    pelton_sender_close(handle->sender);
    if (handle->on_close) handle->on_close(handle);
}

/* Closes the handle, and the sender with it: as pelton_uv_receiver_close. What was sent is received still. */
static inline void pelton_uv_sender_close(pelton_uv_sender *handle, pelton_uv_sender_close_cb on_close) {
    handle->on_close = on_close;
    uv_close((uv_handle_t *)&handle->poll, pelton_uv_sender_closed_);
}

#ifdef __cplusplus
}
#endif

#endif
