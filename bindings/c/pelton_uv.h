/* pelton_uv.h: pelton in a libuv loop: channels, calls and files. Header-only, on uv_poll: no thread, no timer, and nothing runs while
 * nothing happens.
 *
 *     static void on_message(pelton_uv_receiver *handle, const pelton_message *message) { use(message->data, message->size); }
 *     static void on_end(pelton_uv_receiver *handle, int code) { pelton_uv_receiver_close(handle, NULL); }
 *     ...
 *     pelton_uv_receiver handle;
 *     pelton_uv_receiver_init(uv_default_loop(), &handle, receiver);
 *     pelton_uv_receiver_start(&handle, on_message, on_end);
 *
 * HANDLES are the caller's memory, as libuv's are, until the callback of close. init takes the pelton_sender, _receiver, _client,
 * _service or _engine over, and close closes it; in between it is the field of that name, for whatever does not wait. The field data is
 * the caller's, NULL after init. A handle is active, and keeps uv_run going, while it is started; uv_unref((uv_handle_t *)&handle.poll) is for
 * one that shall not.
 *
 * CALLBACKS run in uv_run only, never from within a function of this header. In each of them every function may be called, for
 * the same handle or another: start, stop, close. After uv_stop the turn goes to its end, with what messages it has.
 *
 * RESULTS are pelton's codes; PELTON_SYSTEM, with libuv's error as errno, where libuv refuses something.
 *
 * THREADS. Only the loop's thread calls these. OPENING, ACCEPTING and RESUMING shake hands within the call, for seconds if the peer
 * is slow. A loop that cannot afford that has uv_queue_work do it. The work calls pelton_sender_open, pelton_client_open,
 * pelton_accept_receiver or, with a stopped handle's receiver, pelton_resume, and keeps the answer and what pelton_error_detail()
 * says; the after-work callback calls init, or start. Nothing else uses the pelton handle meanwhile. A listener needs nothing of this
 * header: a uv_poll for UV_READABLE on its pelton_fd, which calls pelton_accept_receiver with PELTON_NO_WAIT, or stops until the work is
 * done.
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
    int fd = pelton_fd(receiver);
    if (fd < 0) return fd;
    memset(handle, 0, sizeof *handle);
    handle->receiver = receiver;
    handle->poll.data = handle;
    return pelton_uv_refused_(uv_poll_init(loop, &handle->poll, fd));
}

/* Lets the loop be without the descriptor: it stays readable while there are messages. */
static inline void pelton_uv_receiver_rest_(pelton_uv_receiver *handle) {
    uv_poll_stop(&handle->poll);
    pelton_disarm(handle->receiver);
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

/* PELTON_AGAIN: armed, and there is none. Else what came meanwhile: the turn goes on with it, which saves the loop one. */
static inline int pelton_uv_receiver_arm_(pelton_uv_receiver *handle, pelton_message *message) {
    int code = pelton_arm(handle->receiver);
    /* The descriptor is readable until it is armed anew, should there be none after all. */
    return code == PELTON_OK ? pelton_receive(handle->receiver, PELTON_NO_WAIT, message) : code;
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
            if (code == PELTON_AGAIN) code = pelton_uv_receiver_arm_(handle, &message);
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
    if (code != PELTON_AGAIN) pelton_uv_receiver_ended_(handle, code);
}

/* Has messages delivered from now on. Started already: changes the callbacks. Errors: whatever would be told to on_end, which then
 * is not called: the end of the channel too. */
PELTON_MUST_USE static inline int pelton_uv_receiver_start(pelton_uv_receiver *handle, pelton_uv_message_cb on_message,
                                                           pelton_uv_receiver_end_cb on_end) {
    /* Within on_message the turn goes on by itself. */
    if (!handle->on_message && !handle->in_message) {
        int code = pelton_arm(handle->receiver);
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
    pelton_close(handle->receiver);
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
    int fd = pelton_fd(sender);
    if (fd < 0) return fd;
    memset(handle, 0, sizeof *handle);
    handle->sender = sender;
    handle->poll.data = handle;
    return pelton_uv_refused_(uv_poll_init(loop, &handle->poll, fd));
}

static inline void pelton_uv_sender_rest_(pelton_uv_sender *handle) {
    uv_poll_stop(&handle->poll);
    pelton_disarm(handle->sender);
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
    if (code == PELTON_OK) code = handle->on_room ? pelton_uv_has_room_(handle) : pelton_arm(handle->sender);
    if (code == PELTON_OK && handle->on_room) {
        handle->on_room(handle);
        if (uv_is_closing((uv_handle_t *)poll) || !handle->on_end || !handle->on_room) return;
        code = pelton_uv_has_room_(handle);
        /* Now and then whether the receiver is there, for who has room and sends nothing. */
        if (code == PELTON_OK && ++handle->turns % 64 == 0) code = PELTON_AGAIN;
    }
    /* Not armed anew, the descriptor is readable still, for the next turn. */
    if (code == PELTON_AGAIN && handle->on_room) code = pelton_arm_send(handle->sender, handle->size);
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
    int code = on_room ? pelton_arm_send(handle->sender, size) : pelton_arm(handle->sender);
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
    pelton_close(handle->sender);
    if (handle->on_close) handle->on_close(handle);
}

/* Closes the handle, and the sender with it: as pelton_uv_receiver_close. What was sent is received still. */
static inline void pelton_uv_sender_close(pelton_uv_sender *handle, pelton_uv_sender_close_cb on_close) {
    handle->on_close = on_close;
    uv_close((uv_handle_t *)&handle->poll, pelton_uv_sender_closed_);
}

/* ---- Asking ------------------------------------------------------------------------------------------------------------- *
 *     static void on_answer(pelton_uv_call *call, int code, const pelton_completion *answer) {
 *         if (code == PELTON_OK) use(call, answer->data, answer->size);
 *     }
 *     ...
 *     code = pelton_uv_call_start(&handle, &call, "hello", 5, 0, on_answer);
 */

typedef struct pelton_uv_client pelton_uv_client;
typedef struct pelton_uv_call pelton_uv_call;

/* An answer, good until the callback returns, which releases it; who asks or gives up anything in the callback releases it first, by
 * pelton_release(call->handle->client). With PELTON_PART more comes, else the call's memory is the caller's again. Or, with answer
 * NULL, the client's end: PELTON_CLOSED, PELTON_PEER_DIED or an error, to every call that is under way. */
typedef void (*pelton_uv_answer_cb)(pelton_uv_call *call, int code, const pelton_completion *answer);
/* There is room for a request again, after pelton_uv_call_start answered PELTON_AGAIN. */
typedef void (*pelton_uv_client_room_cb)(pelton_uv_client *handle);
/* The client has ended, after all its calls were told: close it. */
typedef void (*pelton_uv_client_end_cb)(pelton_uv_client *handle, int code);
typedef void (*pelton_uv_client_close_cb)(pelton_uv_client *handle);

/* A call under way: the caller's memory, until its last answer. */
struct pelton_uv_call {
    void *data;               /* the caller's */
    pelton_uv_client *handle; /* set by start */
    uint64_t call;            /* its number */
    /* Private from here on. */
    pelton_uv_answer_cb on_answer;
    pelton_uv_call *next;
};

struct pelton_uv_client {
    void *data;            /* the caller's */
    pelton_client *client; /* to be used, not to be closed */
    uv_poll_t poll;        /* as above */
    /* Private from here on. on_end is NULL while stopped. */
    pelton_uv_client_room_cb on_room;
    pelton_uv_client_end_cb on_end;
    pelton_uv_client_close_cb on_close;
    uv_prepare_t before;        /* has the loop hear of room, before it sleeps */
    pelton_uv_call *calls[256]; /* under way, by their numbers */
    int wants_room;
    int in_turn;
    int closings; /* that are to come */
};

/* Prepares the handle, stopped. As pelton_uv_receiver_init. */
static inline int pelton_uv_client_init(uv_loop_t *loop, pelton_uv_client *handle, pelton_client *client) {
    int fd = pelton_fd(client);
    if (fd < 0) return fd;
    memset(handle, 0, sizeof *handle);
    handle->client = client;
    handle->poll.data = handle->before.data = handle;
    int code = pelton_uv_refused_(uv_poll_init(loop, &handle->poll, fd));
    /* Which cannot fail. */
    if (code == PELTON_OK) uv_prepare_init(loop, &handle->before);
    return code;
}

static inline pelton_uv_call **pelton_uv_place_(pelton_uv_client *handle, uint64_t call) {
    pelton_uv_call **place = &handle->calls[(call ^ call >> 8) % 256];
    while (*place && (*place)->call != call) place = &(*place)->next;
    return place;
}

/* Takes a call out of those under way. */
static inline pelton_uv_call *pelton_uv_take_(pelton_uv_call **place) {
    pelton_uv_call *call = *place;
    *place = call->next;
    call->next = NULL;
    return call;
}

static inline void pelton_uv_client_rest_(pelton_uv_client *handle) {
    uv_prepare_stop(&handle->before);
    uv_poll_stop(&handle->poll);
    pelton_disarm(handle->client);
}

static inline void pelton_uv_client_ended_(pelton_uv_client *handle, int code) {
    pelton_uv_client_end_cb on_end = handle->on_end;
    handle->on_end = NULL;
    pelton_uv_client_rest_(handle);
    for (int i = 0; i < 256; i++) {
        while (handle->calls[i]) {
            pelton_uv_call *call = pelton_uv_take_(&handle->calls[i]);
            call->on_answer(call, code, NULL);
            if (uv_is_closing((uv_handle_t *)&handle->poll)) return;
        }
    }
    on_end(handle, code);
}

/* One answer, and its callback. */
static inline int pelton_uv_client_step_(pelton_uv_client *handle) {
    pelton_completion answer;
    int code = pelton_await(handle->client, PELTON_ANY_CALL, PELTON_NO_WAIT, &answer);
    if (code != PELTON_OK) return code;
    pelton_uv_call **place = pelton_uv_place_(handle, answer.call);
    /* None where it was asked without this header. */
    if (*place) {
        pelton_uv_call *call = answer.outcome == PELTON_PART ? *place : pelton_uv_take_(place);
        call->on_answer(call, PELTON_OK, &answer);
    }
    /* Answers PELTON_NOT_RECEIVED where the callback has released it. */
    pelton_release(handle->client);
    return PELTON_OK;
}

static inline void pelton_uv_client_turn_(uv_poll_t *poll, int status, int events) {
    pelton_uv_client *handle = (pelton_uv_client *)poll->data;
    uint64_t began = uv_hrtime();
    int code = pelton_uv_refused_(status);
    (void)events;
    handle->in_turn = 1;
    /* As many again as before while there is time. */
    for (uint64_t share = 1, is_over = 0; code == PELTON_OK && !is_over; share *= 2) {
        for (uint64_t i = 0; i < share && code == PELTON_OK; i++) {
            code = pelton_uv_client_step_(handle);
            if (uv_is_closing((uv_handle_t *)poll)) return;
            if (!handle->on_end) {
                handle->in_turn = 0;
                pelton_uv_client_rest_(handle);
                return;
            }
        }
        is_over = uv_hrtime() - began >= PELTON_UV_TURN_NS;
    }
    if (handle->wants_room && (code == PELTON_OK || code == PELTON_AGAIN)) {
        handle->wants_room = 0;
        handle->on_room(handle);
        if (uv_is_closing((uv_handle_t *)poll)) return;
        if (!handle->on_end) {
            handle->in_turn = 0;
            pelton_uv_client_rest_(handle);
            return;
        }
    }
    handle->in_turn = 0;
    /* Not armed anew, the descriptor is readable still: the next turn goes on. PELTON_OK: one has come meanwhile. */
    if (code == PELTON_AGAIN) code = pelton_arm(handle->client);
    if (code != PELTON_AGAIN && code != PELTON_OK) pelton_uv_client_ended_(handle, code);
}

static inline void pelton_uv_client_before_(uv_prepare_t *before) {
    pelton_uv_client *handle = (pelton_uv_client *)before->data;
    uv_prepare_stop(before);
    int code = pelton_arm(handle->client);
    if (code != PELTON_AGAIN && code != PELTON_OK) pelton_uv_client_ended_(handle, code);
}

/* Has answers delivered from now on. on_room may be NULL, for who asks no more than there is room for, or tries again by itself. Started
 * already: changes the callbacks. Errors: PELTON_NOT_RELEASED; whatever would be told to on_end, which then is not called. */
PELTON_MUST_USE static inline int pelton_uv_client_start(pelton_uv_client *handle, pelton_uv_client_room_cb on_room,
                                                         pelton_uv_client_end_cb on_end) {
    /* Within a turn that goes on by itself. */
    if (!handle->on_end && !handle->in_turn) {
        int code = pelton_arm(handle->client);
        if (code != PELTON_OK && code != PELTON_AGAIN) return code;
        code = pelton_uv_refused_(uv_poll_start(&handle->poll, UV_READABLE, pelton_uv_client_turn_));
        if (code != PELTON_OK) return code;
    }
    handle->on_room = on_room;
    handle->on_end = on_end;
    return PELTON_OK;
}

/* Has none delivered until started again, also if called in a callback. */
static inline void pelton_uv_client_stop(pelton_uv_client *handle) {
    handle->on_end = NULL;
    if (!handle->in_turn) pelton_uv_client_rest_(handle);
}

/* Asks, as pelton_submit does with PELTON_NO_WAIT; flags are 0 or PELTON_IDEMPOTENT. on_answer is called in uv_run, while the handle is
 * started. Does not wait. Not from within a uv_prepare callback: libuv would not let this go on before the loop sleeps. Errors: as
 * pelton_submit: the call is not under way then; PELTON_AGAIN: no room, or 1,024 calls: on_room tells when to try again. */
PELTON_MUST_USE static inline int pelton_uv_call_start(pelton_uv_client *handle, pelton_uv_call *call, const void *data, size_t size,
                                                       uint32_t flags, pelton_uv_answer_cb on_answer) {
    call->handle = handle;
    call->call = 0;
    int code = pelton_submit(handle->client, data, size, flags, PELTON_NO_WAIT, &call->call);
    if (code == PELTON_AGAIN && handle->on_room) handle->wants_room = 1;
    if (code == PELTON_OK) {
        pelton_uv_call **place = pelton_uv_place_(handle, call->call);
        call->on_answer = on_answer;
        call->next = NULL;
        *place = call;
    }
    /* Armed before that, the loop hears of the answer, but not of room for what is in pieces, which nothing so small is. */
    if (handle->on_end && !handle->in_turn && (code == PELTON_AGAIN || (code == PELTON_OK && size > 1000))) {
        uv_prepare_start(&handle->before, pelton_uv_client_before_);
    }
    return code;
}

/* Gives a call up: on_answer is not called any more, and the call's memory is the caller's again. Errors: PELTON_AGAIN: it is not under
 * way. PELTON_NOT_RELEASED: an answer is: it goes on. */
static inline int pelton_uv_call_cancel(pelton_uv_call *call) {
    pelton_uv_call **place = pelton_uv_place_(call->handle, call->call);
    if (*place != call) return PELTON_AGAIN;
    int code = pelton_cancel(call->handle->client, call->call);
    if (code == PELTON_NOT_RELEASED || code == PELTON_RESERVED) return code;
    pelton_uv_take_(place);
    if (call->handle->on_end && !call->handle->in_turn) uv_prepare_start(&call->handle->before, pelton_uv_client_before_);
    return PELTON_OK;
}

static inline void pelton_uv_client_closed_(uv_handle_t *either) {
    pelton_uv_client *handle = (pelton_uv_client *)either->data;
    if (--handle->closings > 0) return;
    pelton_close(handle->client);
    if (handle->on_close) handle->on_close(handle);
}

/* Closes the handle, and the client with it: as pelton_uv_receiver_close. No call's callback comes any more: their memory is the
 * caller's again when on_close comes. */
static inline void pelton_uv_client_close(pelton_uv_client *handle, pelton_uv_client_close_cb on_close) {
    handle->on_close = on_close;
    handle->closings = 2;
    uv_close((uv_handle_t *)&handle->before, pelton_uv_client_closed_);
    uv_close((uv_handle_t *)&handle->poll, pelton_uv_client_closed_);
}

/* ---- Serving ------------------------------------------------------------------------------------------------------------ */

typedef struct pelton_uv_service pelton_uv_service;

/* A request, whose bytes are good until the callback returns, which releases them. request->responder is the callback's: to be answered
 * there, or later, by pelton.h's functions: in the loop with pelton_reply, and with PELTON_NO_WAIT; or on another thread. */
typedef void (*pelton_uv_request_cb)(pelton_uv_service *handle, const pelton_request *request);
/* PELTON_CLOSED: pelton_service_stop was called, and if it was to drain, all is answered; or an error. The handle is stopped. */
typedef void (*pelton_uv_service_end_cb)(pelton_uv_service *handle, int code);
typedef void (*pelton_uv_service_close_cb)(pelton_uv_service *handle);

struct pelton_uv_service {
    void *data;              /* the caller's */
    pelton_service *service; /* to be used, not to be closed */
    uv_poll_t poll;          /* as above */
    /* Private from here on. on_request is NULL while stopped. */
    pelton_uv_request_cb on_request;
    pelton_uv_service_end_cb on_end;
    pelton_uv_service_close_cb on_close;
    int in_request;
};

/* Prepares the handle, stopped. As pelton_uv_receiver_init. */
static inline int pelton_uv_service_init(uv_loop_t *loop, pelton_uv_service *handle, pelton_service *service) {
    int fd = pelton_fd(service);
    if (fd < 0) return fd;
    memset(handle, 0, sizeof *handle);
    handle->service = service;
    handle->poll.data = handle;
    return pelton_uv_refused_(uv_poll_init(loop, &handle->poll, fd));
}

static inline void pelton_uv_service_rest_(pelton_uv_service *handle) {
    uv_poll_stop(&handle->poll);
    pelton_disarm(handle->service);
}

static inline void pelton_uv_service_turn_(uv_poll_t *poll, int status, int events) {
    pelton_uv_service *handle = (pelton_uv_service *)poll->data;
    uint64_t began = uv_hrtime();
    int code = pelton_uv_refused_(status);
    (void)events;
    /* As many again as before while there is time. */
    for (uint64_t share = 1; code == PELTON_OK; share *= 2) {
        for (uint64_t i = 0; i < share; i++) {
            pelton_request request;
            code = pelton_service_receive(handle->service, PELTON_NO_WAIT, &request);
            if (code != PELTON_OK) break;
            handle->in_request = 1;
            handle->on_request(handle, &request);
            handle->in_request = 0;
            /* Answers PELTON_NOT_RECEIVED where the callback has released it. */
            pelton_release(handle->service);
            if (uv_is_closing((uv_handle_t *)poll)) return;
            if (!handle->on_request) {
                pelton_uv_service_rest_(handle);
                return;
            }
        }
        /* Not armed anew, the descriptor is readable still: the next turn goes on. */
        if (code == PELTON_OK && uv_hrtime() - began >= PELTON_UV_TURN_NS) return;
    }
    /* PELTON_OK: one has come meanwhile, and the descriptor is readable. */
    if (code == PELTON_AGAIN) code = pelton_arm(handle->service);
    if (code != PELTON_AGAIN && code != PELTON_OK) {
        pelton_uv_service_end_cb on_end = handle->on_end;
        handle->on_request = NULL;
        pelton_uv_service_rest_(handle);
        on_end(handle, code);
    }
}

/* Has requests delivered from now on. Started already: changes the callbacks. Errors: whatever would be told to on_end, which then is
 * not called. */
PELTON_MUST_USE static inline int pelton_uv_service_start(pelton_uv_service *handle, pelton_uv_request_cb on_request,
                                                          pelton_uv_service_end_cb on_end) {
    /* Within on_request the turn goes on by itself. */
    if (!handle->on_request && !handle->in_request) {
        int code = pelton_arm(handle->service);
        if (code != PELTON_OK && code != PELTON_AGAIN) return code;
        code = pelton_uv_refused_(uv_poll_start(&handle->poll, UV_READABLE, pelton_uv_service_turn_));
        if (code != PELTON_OK) return code;
    }
    handle->on_request = on_request;
    handle->on_end = on_end;
    return PELTON_OK;
}

/* Has none delivered until started again, also if called in on_request. Clients are not let in meanwhile, nor are answers written that
 * had no room. */
static inline void pelton_uv_service_stop(pelton_uv_service *handle) {
    handle->on_request = NULL;
    if (!handle->in_request) pelton_uv_service_rest_(handle);
}

static inline void pelton_uv_service_closed_(uv_handle_t *poll) {
    pelton_uv_service *handle = (pelton_uv_service *)poll->data;
    pelton_close(handle->service);
    if (handle->on_close) handle->on_close(handle);
}

/* Closes the handle, and the service with it: as pelton_uv_receiver_close. */
static inline void pelton_uv_service_close(pelton_uv_service *handle, pelton_uv_service_close_cb on_close) {
    handle->on_close = on_close;
    uv_close((uv_handle_t *)&handle->poll, pelton_uv_service_closed_);
}

/* ---- Files -------------------------------------------------------------------------------------------------------------- */

typedef struct pelton_uv_engine pelton_uv_engine;
typedef struct pelton_uv_operation pelton_uv_operation;

/* What came of it. What done points to is good until the callback returns; done->file is the callback's to close. The operation's memory, and
 * that which it read or wrote, is the caller's again. */
typedef void (*pelton_uv_done_cb)(pelton_uv_operation *operation, const pelton_file_completion *done);
typedef void (*pelton_uv_engine_close_cb)(pelton_uv_engine *handle);

/* An operation in flight: the caller's memory, until its callback. */
struct pelton_uv_operation {
    void *data;               /* the caller's */
    pelton_uv_engine *handle; /* set by start */
    /* Private from here on. */
    pelton_uv_done_cb on_done;
};

/* It is active while operations are in flight. */
struct pelton_uv_engine {
    void *data;            /* the caller's */
    pelton_engine *engine; /* to be used, not to be closed, nor for pelton_file_submit and pelton_file_completions */
    uv_poll_t poll;        /* as above */
    /* Private from here on. */
    pelton_uv_engine_close_cb on_close;
    size_t in_flight;
    int in_turn;
};

/* Prepares the handle. As pelton_uv_receiver_init. */
static inline int pelton_uv_engine_init(uv_loop_t *loop, pelton_uv_engine *handle, pelton_engine *engine) {
    int fd = pelton_fd(engine);
    if (fd < 0) return fd;
    memset(handle, 0, sizeof *handle);
    handle->engine = engine;
    handle->poll.data = handle;
    return pelton_uv_refused_(uv_poll_init(loop, &handle->poll, fd));
}

static inline void pelton_uv_engine_turn_(uv_poll_t *poll, int status, int events) {
    pelton_uv_engine *handle = (pelton_uv_engine *)poll->data;
    uint64_t began = uv_hrtime();
    pelton_file_completion done;
    size_t taken;
    (void)status;
    (void)events;
    handle->in_turn = 1;
    while (handle->in_flight > 0) {
        if (pelton_file_completions(handle->engine, PELTON_NO_WAIT, &done, 1, &taken) != PELTON_OK) break;
        pelton_uv_operation *operation = (pelton_uv_operation *)(uintptr_t)done.token;
        handle->in_flight--;
        operation->on_done(operation, &done);
        if (uv_is_closing((uv_handle_t *)poll)) return;
        /* Not armed anew, the descriptor is readable still: the next turn goes on. */
        if (handle->in_flight > 0 && uv_hrtime() - began >= PELTON_UV_TURN_NS) {
            handle->in_turn = 0;
            return;
        }
    }
    handle->in_turn = 0;
    if (handle->in_flight == 0) {
        uv_poll_stop(poll);
        pelton_disarm(handle->engine);
        return;
    }
    /* Where that fails for want of memory or threads, the descriptor is readable, and the next turn tries again. */
    (void)!pelton_arm(handle->engine);
}

/* Submits count operations, as pelton_file_submit does: what[i], whose token this sets, comes back to on_done with operations[i], in uv_run.
 * *taken is how many, whatever is answered; chains are taken whole. Does not wait. Errors: as pelton_file_submit. */
PELTON_MUST_USE static inline int pelton_uv_file_start(pelton_uv_engine *handle, pelton_uv_operation *operations, pelton_operation *what,
                                                       size_t count, size_t *taken, pelton_uv_done_cb on_done) {
    *taken = 0;
    for (size_t i = 0; i < count; i++) {
        operations[i].handle = handle;
        operations[i].on_done = on_done;
        what[i].token = (uint64_t)(uintptr_t)&operations[i];
    }
    /* Within a turn that is done at its end. */
    if (handle->in_flight == 0 && !handle->in_turn) {
        int code = pelton_uv_refused_(uv_poll_start(&handle->poll, UV_READABLE, pelton_uv_engine_turn_));
        if (code != PELTON_OK) return code;
        (void)!pelton_arm(handle->engine);
    }
    int code = pelton_file_submit(handle->engine, what, count, taken);
    handle->in_flight += *taken;
    if (handle->in_flight == 0 && !handle->in_turn) {
        uv_poll_stop(&handle->poll);
        pelton_disarm(handle->engine);
    }
    return code;
}

/* Gives an operation up, as pelton_file_cancel does: on_done is called all the same. */
static inline int pelton_uv_file_cancel(pelton_uv_operation *operation) {
    return pelton_file_cancel(operation->handle->engine, (uint64_t)(uintptr_t)operation);
}

static inline void pelton_uv_engine_closed_(uv_handle_t *poll) {
    pelton_uv_engine *handle = (pelton_uv_engine *)poll->data;
    pelton_close(handle->engine);
    if (handle->on_close) handle->on_close(handle);
}

/* Closes the handle, and the engine with it: as pelton_uv_receiver_close. What is in flight is cancelled, and no callback of it comes any
 * more; memory and channels are given back as pelton_close says of an engine, which may wait for what has no release. */
static inline void pelton_uv_engine_close(pelton_uv_engine *handle, pelton_uv_engine_close_cb on_close) {
    handle->on_close = on_close;
    uv_close((uv_handle_t *)&handle->poll, pelton_uv_engine_closed_);
}

#ifdef __cplusplus
}
#endif

#endif
