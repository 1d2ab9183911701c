/* pelton/call.h: calls: requests to a service in another process, and its replies.
 *
 * A client has up to 1,024 calls in flight. Replies come in any order, whole or in parts. A message larger than the
 * lane's largest one travels in pieces, which the other side assembles in its own memory.
 *
 *     pelton_client *client;
 *     pelton_completion reply;
 *     pelton_client_open("echo", NULL, &client);
 *     if (pelton_client_call(client, "hello", 5, PELTON_FOREVER, &reply) == 0) {
 *         if (reply.outcome == PELTON_REPLY) use(reply.data, reply.size);
 *         pelton_client_release(client);
 *     }
 *     pelton_close(client);
 *
 * and in the service
 *
 *     pelton_service *service;
 *     pelton_request request;
 *     pelton_service_open("echo", NULL, &service);
 *     while (pelton_service_receive(service, PELTON_FOREVER, &request) == 0) {
 *         if (request.responder) pelton_responder_reply(request.responder, request.data, request.size);
 *         pelton_service_release(service);
 *     }
 *     pelton_close(service);
 *
 * THE SERVICE'S END. With "unix:PATH" a client has one service. When it ends, all calls in flight fail; replies that
 * arrived before can still be taken; then every function returns PELTON_PEER_DIED or PELTON_CLOSED. Close the client
 * and open another one. With a short name, a client spreads its calls over all processes that listen under it, the
 * least busy first. When one ends, its calls complete with PELTON_LOST, and the client continues with the others. A
 * call moves to another process if its service had not begun it (pelton_service_drain), or if the call is
 * PELTON_IDEMPOTENT. Without any process, functions return PELTON_NO_LISTENER until there is one again.
 */
#ifndef PELTON_CALL_H
#define PELTON_CALL_H

#include <pelton/result.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Closing the client: its calls in flight are cancelled, and what it returned is no longer valid. */
typedef struct pelton_client pelton_client;
/* Closing the service: calls in flight fail at their clients with PELTON_CLOSED. Responders remain handles, to be used
 * or closed. */
typedef struct pelton_service pelton_service;
/* Replies to one call. Its final reply closes it. Closing it without one: the client's call completes with
 * PELTON_ABANDONED. Different threads may use different responders at the same time. */
typedef struct pelton_responder pelton_responder;
/* An open in progress. Closing it cancels the open. */
typedef struct pelton_client_opening pelton_client_opening;

/* ---- Client ------------------------------------------------------------------------------------------------------ */

/* Options of a client. Fields without a comment as in pelton_channel_options. */
typedef struct pelton_client_options {
    uint32_t struct_bytes;       /* sizeof(pelton_client_options): PELTON_CLIENT_OPTIONS_INIT sets it */
    uint32_t wait;               /* enum pelton_wait */
    uint64_t capacity;           /* bytes of each lane: 4 MiB */
    uint64_t message_bytes_max;  /* largest message in one piece, at least 1024 */
    uint64_t resident_bytes_max;
    uint64_t memory_bytes_max;
    uint64_t call_bytes_max;     /* largest reply, or part of one, that this side accepts: 64 MiB */
    int64_t deadline_ns;         /* opening waits until then for a service. 0: it does not wait for one to listen */
    int64_t poll_ns;             /* longest busy-poll of pelton_client_poll: 50 us. PELTON_NO_POLL: it does not
                                    busy-poll */
    const uint32_t *uids;
    uint32_t uid_count;
    uint32_t reserved;           /* 0 */
} pelton_client_options;

#define PELTON_CLIENT_OPTIONS_INIT {(uint32_t)sizeof(pelton_client_options), 0, 0, 0, 0, 0, 0, 0, 0, NULL, 0, 0}
#define PELTON_NO_POLL INT64_C(-1)

/* How a call has completed, or continues. */
enum pelton_outcome {
    PELTON_REPLY = 1,     /* the reply, or the last part of one */
    PELTON_PART = 2,      /* a part; more follows. After any other outcome, nothing more comes for the call */
    PELTON_END = 3,       /* the end of a reply in parts; 0 bytes */
    PELTON_FAILED = 4,    /* the service failed the call, with a code and bytes that it chose */
    PELTON_ABANDONED = 5, /* the service closed the responder without a reply; 0 bytes */
    PELTON_LOST = 6       /* the service has ended, or drains, and the client continues without it; 0 bytes */
};

/* A completion of a call. data is never NULL, and valid until pelton_client_release. A client that reads it in place
 * trusts the service not to write after the reply; one that copies it once and uses only the copy trusts nobody. */
typedef struct pelton_completion {
    uint64_t call;    /* the call's number, as pelton_client_submit returns it */
    const void *data;
    size_t size;
    uint32_t outcome; /* enum pelton_outcome */
    uint32_t code;    /* of PELTON_FAILED: the service's code; 0xffff0001: the reply exceeded the service's memory. Of
                         PELTON_LOST, as an int: PELTON_PEER_DIED, PELTON_CLOSED or PELTON_CORRUPT: it is unknown
                         whether the call was carried out; PELTON_AGAIN: it was not begun, and may be submitted again.
                         Else 0 */
} pelton_completion;

/* A flag of a call: it may be carried out twice. If its service ends before any of its reply has come, another process
 * of the name gets the call, which keeps its number. No effect with "unix:PATH". */
#define PELTON_IDEMPOTENT 1

/* Connects to the service that listens under a short name or "unix:PATH". Waits until options.deadline_ns; without a
 * deadline it fails immediately if no process listens, and a service has 5 seconds to accept. Errors: as
 * pelton_sender_open by name. */
PELTON_MUST_USE int pelton_client_open(const char *name, const pelton_client_options *options, pelton_client **out);

/* Starts to open, for event loops: as pelton_sender_open_start, pelton_sender_opening_fd,
 * pelton_sender_opening_finish. */
PELTON_MUST_USE int pelton_client_open_start(const char *name, const pelton_client_options *options,
                                             pelton_client_opening **out);
int pelton_client_opening_fd(const pelton_client_opening *opening);
PELTON_MUST_USE int pelton_client_opening_finish(pelton_client_opening *opening, pelton_client **out);

/* Submits a request and waits for its first completion: a reply, a failure, or a part (pelton_client_await_call returns
 * the others). PELTON_OK says that there is a completion: check out->outcome, which can be PELTON_FAILED or
 * PELTON_ABANDONED, and release it with pelton_client_release. Completions of other calls are stored meanwhile. The
 * service gets the deadline. Errors: PELTON_AGAIN: the deadline has passed; the call is cancelled, or was not
 * submitted. As pelton_client_submit and pelton_client_await_call. After any error the call is no longer awaited. */
PELTON_MUST_USE int pelton_client_call(pelton_client *client, const void *data, size_t size, int64_t deadline_ns,
                                       pelton_completion *out);

/* Submits a request, which is copied. *out_call is the call's number, never 0. Waits for free space, and while 1,024
 * calls are in flight. The service gets the deadline, unless it is PELTON_NO_WAIT or PELTON_FOREVER. flags:
 * PELTON_IDEMPOTENT, or 0. data may be NULL if size is 0. If it fails, nothing was submitted. The completion can be
 * taken by pelton_client_await or pelton_client_await_call. Errors: PELTON_AGAIN: no space, or too many calls.
 * PELTON_TOO_LARGE: for this service (pelton_client_info.request_bytes_max). PELTON_REFUSED: more than
 * options.call_bytes_max of parts wait to be taken. PELTON_RESERVED, PELTON_NOT_RELEASED. PELTON_CLOSED,
 * PELTON_PEER_DIED, PELTON_NO_LISTENER: "The service's end". PELTON_CORRUPT. */
PELTON_MUST_USE int pelton_client_submit(pelton_client *client, const void *data, size_t size, uint32_t flags,
                                         int64_t deadline_ns, uint64_t *out_call);

/* As pelton_client_submit, with the span of which the call is a part, for pelton_responder_traceparent. A text that is
 * not valid by W3C's rules, or NULL, is as none. A service of an earlier version gets the request without it. The
 * request is copied once more. */
PELTON_MUST_USE int pelton_client_submit_traced(pelton_client *client, const void *data, size_t size,
                                                const char *traceparent, uint32_t flags, int64_t deadline_ns,
                                                uint64_t *out_call);

/* Sends a message that the service does not reply to. No call is counted. Waits for free space.
 * Errors: as pelton_client_submit. */
PELTON_MUST_USE int pelton_client_notify(pelton_client *client, const void *data, size_t size, int64_t deadline_ns);

/* Reserves size bytes in the lane, aligned to 8, for the caller to write a request in place. Waits as
 * pelton_client_submit. An earlier reservation is aborted, also if this fails. Until it is submitted or aborted,
 * functions that submit, notify, await, cancel, poll or arm return PELTON_RESERVED. Errors: as pelton_client_submit.
 * PELTON_TOO_LARGE: also if it does not fit in one message of the lane: pelton_client_submit splits such a request. */
PELTON_MUST_USE int pelton_client_reserve(pelton_client *client, size_t size, int64_t deadline_ns, void **out);

/* Submits the first size bytes of the reservation as a request. Does not wait; it sends no deadline. The next call
 * reports a service that has ended. Errors: PELTON_NOT_RESERVED. PELTON_TOO_LARGE: more than reserved; the reservation
 * remains. */
PELTON_MUST_USE int pelton_client_submit_reserved(pelton_client *client, size_t size, uint32_t flags,
                                                  uint64_t *out_call);

/* Drops the reservation. Errors: PELTON_NOT_RESERVED. */
int pelton_client_abort(pelton_client *client);

/* Takes the next completion of any call, in place. Waits for one. Release it with pelton_client_release: until then,
 * functions that submit, notify, reserve, await, cancel, poll or arm return PELTON_NOT_RELEASED. Errors: PELTON_AGAIN:
 * there is none. PELTON_CLOSED, PELTON_PEER_DIED: every call in flight has failed ("The service's end").
 * PELTON_REFUSED: no call is in flight, so this would wait forever (PELTON_AGAIN with PELTON_NO_WAIT); or more than
 * options.call_bytes_max of parts wait. PELTON_NOT_RELEASED, PELTON_RESERVED, PELTON_CORRUPT. */
PELTON_MUST_USE int pelton_client_await(pelton_client *client, int64_t deadline_ns, pelton_completion *out);

/* As pelton_client_await, for one call; completions of others are stored. Instead of PELTON_LOST it returns the code:
 * PELTON_PEER_DIED, PELTON_CLOSED, PELTON_CORRUPT; for a call that was not begun PELTON_NO_LISTENER, or, with
 * "unix:PATH", PELTON_REFUSED. If no such call is in flight: PELTON_REFUSED, or PELTON_AGAIN with PELTON_NO_WAIT. */
PELTON_MUST_USE int pelton_client_await_call(pelton_client *client, uint64_t call, int64_t deadline_ns,
                                             pelton_completion *out);

/* Releases the completion that was taken last; its data must not be read afterwards. Errors: PELTON_NOT_RECEIVED. */
int pelton_client_release(pelton_client *client);

/* Cancels a call, by its number: its completions are dropped, also those that have arrived, and the service is
 * notified. The call counts as in flight until the service has finished it. Does not wait. Errors: PELTON_AGAIN: it is
 * not in flight, or cancelled already. As pelton_client_submit. */
int pelton_client_cancel(pelton_client *client, uint64_t call);

/* The descriptor to poll for reading. Constant; not to be closed, read or written. */
int pelton_client_fd(const pelton_client *client);

/* Busy-polls for a completion, for at most options.poll_ns, or 100 us after large requests ("Event loops" in pelton.h).
 * Errors: PELTON_AGAIN: none yet. As pelton_client_await. */
PELTON_MUST_USE int pelton_client_poll(pelton_client *client);

/* Makes the descriptor readable once there is a completion, space for a request that found none, or the service has
 * ended. Arm again after pelton_client_submit and pelton_client_cancel, before the loop sleeps: requests that wait for
 * space need it. Returns PELTON_OK, or PELTON_READY: take completions, or submit again. Errors: as
 * pelton_client_await. */
PELTON_MUST_USE int pelton_client_arm(pelton_client *client);

/* Ends what pelton_client_arm began. */
int pelton_client_disarm(pelton_client *client);

/* A client's figures. Set struct_bytes before the call; fields that the library does not have are 0. */
typedef struct pelton_client_info {
    uint32_t struct_bytes;      /* sizeof(pelton_client_info) */
    uint32_t has_peer;          /* 1: a service is connected */
    uint32_t peer_pid;          /* its process, and */
    uint32_t peer_uid;          /* its user, as the kernel reports them. Both 0 if has_peer is 0 */
    uint64_t request_bytes_max; /* largest request that the service accepts */
    uint64_t services;          /* processes that it is connected to */
    uint64_t in_flight;         /* calls, also cancelled ones that the service has not finished */
    uint64_t dropped;           /* completions of cancelled calls */
    uint64_t wakes_sent;        /* times that it woke a service */
} pelton_client_info;

/* Errors: PELTON_OPTION: struct_bytes is 0, no multiple of 8, or above 4096. */
int pelton_client_get_info(pelton_client *client, pelton_client_info *out);

/* ---- Service ----------------------------------------------------------------------------------------------------- */

/* Options of a service. Fields without a comment as in pelton_channel_options. */
typedef struct pelton_service_options {
    uint32_t struct_bytes;       /* sizeof(pelton_service_options): PELTON_SERVICE_OPTIONS_INIT sets it */
    uint32_t wait;               /* enum pelton_wait */
    uint64_t capacity;           /* bytes of each lane: 4 MiB; also the largest lane accepted */
    uint64_t message_bytes_max;  /* largest message in one piece, at least 1024 */
    uint64_t resident_bytes_max;
    uint64_t memory_bytes_max;   /* of all clients together, at least 2 MiB, with replies that wait and requests that
                                    have arrived in part. Of one client at most as much as is then left for the others.
                                    Without the option only those replies and requests are limited, to 256 MiB or four
                                    times call_bytes_max */
    uint64_t call_bytes_max;     /* largest request that this side accepts: 64 MiB */
    const uint32_t *uids;
    uint32_t uid_count;
    uint32_t clients_max;        /* at a time: 1024, which is also the largest value. Each needs 5 descriptors */
} pelton_service_options;

#define PELTON_SERVICE_OPTIONS_INIT {(uint32_t)sizeof(pelton_service_options), 0, 0, 0, 0, 0, 0, NULL, 0, 0}

/* A request. data is never NULL, and valid until pelton_service_release. The client can change it: see
 * pelton_completion. */
typedef struct pelton_request {
    const void *data;
    size_t size;
    pelton_responder *responder; /* belongs to the caller; NULL for a notification, which gets no reply */
    int64_t deadline_ns;         /* of CLOCK_MONOTONIC: after it the client does not wait for the reply; PELTON_FOREVER
                                    if it set none. The library drops nothing because of it */
    uint32_t pid;                /* the client's process, and */
    uint32_t uid;                /* its user, as the kernel reports them */
} pelton_request;

/* Listens under a short name or "unix:PATH". Does not wait: clients are accepted inside the receiving functions and
 * pelton_service_arm, and a slow one delays nothing. Errors: as pelton_listener_open. */
PELTON_MUST_USE int pelton_service_open(const char *name, const pelton_service_options *options, pelton_service **out);

/* Receives the next request, of all clients round-robin, in place. Waits for one. Its responder belongs to the caller,
 * which replies before or after the release, on any thread. Requests of a client that does not read its replies wait.
 * Errors: PELTON_AGAIN: there is none. PELTON_CLOSED: pelton_service_stop was called, or pelton_service_drain and every
 * request has its reply. PELTON_NOT_RELEASED. */
PELTON_MUST_USE int pelton_service_receive(pelton_service *service, int64_t deadline_ns, pelton_request *out);

/* Releases the request's bytes. Its responder remains. Errors: PELTON_NOT_RECEIVED. */
int pelton_service_release(pelton_service *service);

/* Replies to request->responder, or keeps it to reply later. One that it neither replies to nor closes is a leak, and
 * the client's call stays in flight. The rest of the request is valid until the handler returns. Several threads call
 * it at the same time, with the context of pelton_service_run. It must return; in pelton_responder_part it waits with a
 * deadline. */
typedef void (*pelton_handler)(void *context, const pelton_request *request);

/* Runs handler, with a copy of each request, on `threads` threads, of which the caller is one (0 means 1), until
 * pelton_service_stop or pelton_service_drain ends the service. Waits for the handlers in progress, then returns
 * PELTON_OK. The service remains open: close it. Errors: PELTON_NOT_RELEASED. PELTON_SYSTEM: the handlers have
 * returned; it can be called again. */
PELTON_MUST_USE int pelton_service_run(pelton_service *service, uint32_t threads, pelton_handler handler,
                                       void *context);

/* Ends receiving now: pelton_service_receive returns PELTON_CLOSED, also to a waiting thread, and pelton_service_run
 * ends. Responders remain valid; pelton_close ends the calls. Any thread, before the close, also in a handler. Does not
 * wait. In a forked child it does nothing. */
int pelton_service_stop(const pelton_service *service);

/* Drains: requests that were received get their replies, later ones go back to their clients, which submit them to
 * another process of the name, so no call fails or is carried out twice. Start a successor first: with a short name at
 * any time, with "unix:PATH" after the next receive, which frees the path. Continue to receive, or to run, until that
 * returns PELTON_CLOSED, or returns: then every client knows all its replies. A client that does not read delays this;
 * pelton_service_stop ends it. Any thread, as pelton_service_stop. */
int pelton_service_drain(const pelton_service *service);

/* The descriptor to poll for reading. Constant; not to be closed, read or written. */
int pelton_service_fd(const pelton_service *service);

/* Busy-polls for a request ("Event loops" in pelton.h). Errors: PELTON_AGAIN: none yet. As pelton_service_receive. */
PELTON_MUST_USE int pelton_service_poll(pelton_service *service);

/* Makes the descriptor readable once there is a request, and when clients join, leave, or read replies that wait.
 * Returns PELTON_OK, or PELTON_READY: receive. Errors: as pelton_service_receive. */
PELTON_MUST_USE int pelton_service_arm(pelton_service *service);

/* Ends what pelton_service_arm began. Also while a request is received. */
int pelton_service_disarm(pelton_service *service);

/* A service's figures, as pelton_client_info. */
typedef struct pelton_service_info {
    uint32_t struct_bytes; /* sizeof(pelton_service_info) */
    uint32_t reserved;     /* 0 */
    uint64_t dropped;      /* replies to clients that had gone */
    uint64_t corrupt;      /* clients that violated the protocol and were disconnected */
} pelton_service_info;

/* Errors: as pelton_client_get_info. */
int pelton_service_get_info(pelton_service *service, pelton_service_info *out);

/* ---- Replies ------------------------------------------------------------------------------------------------------ *
 * reply, fail, end and reply_reserved end the call, and close the responder's handle, whatever they return, except
 * PELTON_TOO_LARGE, PELTON_RESERVED, PELTON_NOT_RESERVED, PELTON_NULL, PELTON_WRONG_THREAD, PELTON_FORKED and
 * PELTON_INTERNAL: after these, call again or close it. Errors of all: PELTON_PEER_DIED, PELTON_CLOSED: the client has
 * gone, and the reply is dropped. PELTON_TOO_LARGE: for this client. PELTON_RESERVED: the responder has a reservation.
 * PELTON_REFUSED: the calling thread has a reservation of another responder; or the reply would have to wait and
 * exceeds the service's memory, and the call has failed. PELTON_CORRUPT. */

/* Replies, and ends the call; after parts this is the last one. The reply is copied. Does not wait: it is stored while
 * the client's lane has no space. data may be NULL if size is 0. */
PELTON_MUST_USE int pelton_responder_reply(pelton_responder *responder, const void *data, size_t size);

/* Fails the call with a code and bytes that the service chooses, which are copied. Does not wait. Codes from 0xffff0000
 * are pelton's own: do not use them, which is not checked. data may be NULL if size is 0. */
PELTON_MUST_USE int pelton_responder_fail(pelton_responder *responder, uint32_t code, const void *data, size_t size);

/* Sends a part of the reply, which is copied; data may be NULL if size is 0. Waits for space in the client's lane:
 * therefore not on the thread that receives requests, unless with PELTON_NO_WAIT. Does not end the call. Errors:
 * PELTON_AGAIN: there is no space; no descriptor becomes readable when there is. */
PELTON_MUST_USE int pelton_responder_part(pelton_responder *responder, const void *data, size_t size,
                                          int64_t deadline_ns);

/* Ends a call whose reply came in parts, or has none. Does not wait. */
PELTON_MUST_USE int pelton_responder_end(pelton_responder *responder);

/* Reserves size bytes in the client's lane, aligned to 8, for the caller to write a reply or part in place. Does not
 * wait. The same thread uses or aborts it without delay: until then nothing else can be written to this client. An
 * earlier reservation is aborted, also if this fails. Errors: PELTON_AGAIN: no space: pelton_responder_reply copies.
 * PELTON_TOO_LARGE: also if it does not fit in one message. PELTON_WRONG_THREAD: another thread has the reservation. */
PELTON_MUST_USE int pelton_responder_reserve(pelton_responder *responder, size_t size, void **out);

/* Replies with the first size bytes of the reservation, and ends the call; or sends them as a part, and does not end
 * it. Neither waits. Errors: PELTON_NOT_RESERVED. PELTON_TOO_LARGE: more than reserved; the reservation remains. */
PELTON_MUST_USE int pelton_responder_reply_reserved(pelton_responder *responder, size_t size);
PELTON_MUST_USE int pelton_responder_part_reserved(pelton_responder *responder, size_t size);

/* Drops the reservation. Errors: PELTON_NOT_RESERVED, PELTON_WRONG_THREAD. */
int pelton_responder_abort(pelton_responder *responder);

/* Writes the traceparent of the request, PELTON_TRACEPARENT_SIZE bytes of text with its NUL, and returns 1: its span is
 * the parent of this service's spans. Returns 0, and writes nothing, if the request came without a valid one; or a
 * code. Does not wait. */
int pelton_responder_traceparent(const pelton_responder *responder, char *out);

/* Returns 1 if the client has cancelled the call or has gone, 0 if not, or a code. A service learns that while it
 * receives, on another thread or between two requests; in a handler of pelton_service_run this function checks. A reply
 * is still required: choose the cheapest. Does not wait. */
int pelton_responder_is_cancelled(const pelton_responder *responder);

#ifdef __cplusplus
}
#endif

#endif
