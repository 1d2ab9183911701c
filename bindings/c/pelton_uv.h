/* pelton_uv.h: channels, broadcasts, calls and files in a libuv loop. Compile pelton_uv.c with the program. It uses
 * uv_poll: it starts no thread and no timer, and queues nothing.
 *
 *     static void on_message(pelton_uv_receiver_t *handle, const pelton_message *message) {
 *         use(message->data, message->size);
 *     }
 *     static void on_end(pelton_uv_receiver_t *handle, int code) { pelton_uv_receiver_close(handle, NULL); }
 *     ...
 *     pelton_uv_receiver_init(loop, &handle, receiver);
 *     pelton_uv_receiver_start(&handle, on_message, on_end);
 *
 * HANDLES are the caller's memory, as libuv's, until the close callback. init takes over the pelton_sender, _receiver,
 * _publisher, _subscriber, _client, _service or _engine, which close closes; use it with functions that do not wait.
 * `data` is the caller's, NULL after init. A started handle is active and keeps uv_run running; for uv_ref, uv_unref
 * and uv_is_active use (uv_handle_t *)&handle.poll.
 *
 * REQUESTS (opening, calls, operations) are the caller's memory until their last callback.
 *
 * CALLBACKS are called in uv_run, never from a function of this header. They may call every function, for any handle.
 *
 * RESULTS are pelton's codes. If libuv refuses something: PELTON_SYSTEM, with the error in errno. start returns also
 * the end of the channel or client, for which the end callback is then not called.
 *
 * THREADS. Only the loop's thread calls these. pelton_listener_accept_* and pelton_*_resume can wait for a slow peer:
 * call them in uv_queue_work. pelton_receiver_gather and services accept their peers without waiting.
 *
 * FORK. Stop every handle before the fork. The child calls uv_loop_fork and closes its handles; the parent starts them
 * again. */
#ifndef PELTON_UV_H
#define PELTON_UV_H

#include <pelton.h>
#include <uv.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Opening ----------------------------------------------------------------------------------------------------- */

typedef struct pelton_uv_open_s pelton_uv_open_t;

/* The open has ended. PELTON_OK: the request has what was opened, which belongs to the callback. Other
 * codes: as pelton_sender_open; PELTON_SYSTEM with ECANCELED in errno: it was cancelled. */
typedef void (*pelton_uv_open_cb)(pelton_uv_open_t *request, int code);

struct pelton_uv_open_s {
    void *data;                /* the caller's */
    pelton_sender *sender;     /* one of these is opened, */
    pelton_receiver *receiver;
    pelton_subscriber *subscriber;
    pelton_client *client;
    char detail[256];          /* or this is pelton_error_detail() */
    /* Private. */
    uv_poll_t poll;
    void *opening;
    int (*finish)(pelton_uv_open_t *);
    pelton_uv_open_cb cb;
    int code;
    int error;
};

/* Open as pelton_sender_open, pelton_receiver_open and so on do, without waiting. The deadline in the
 * options applies. Errors: as pelton_sender_open_start. */
PELTON_MUST_USE int pelton_uv_sender_open(uv_loop_t *loop, pelton_uv_open_t *request, const char *name,
                                          const pelton_channel_options *options, pelton_uv_open_cb cb);
PELTON_MUST_USE int pelton_uv_receiver_open(uv_loop_t *loop, pelton_uv_open_t *request, const char *name,
                                            const pelton_channel_options *options, pelton_uv_open_cb cb);
PELTON_MUST_USE int pelton_uv_subscriber_open(uv_loop_t *loop, pelton_uv_open_t *request, const char *name,
                                              const pelton_subscriber_options *options, pelton_uv_open_cb cb);
PELTON_MUST_USE int pelton_uv_client_open(uv_loop_t *loop, pelton_uv_open_t *request, const char *name,
                                          const pelton_client_options *options, pelton_uv_open_cb cb);

/* Cancels an open. Its callback is still called. Errors: PELTON_AGAIN: it has ended already, and its callback is
 * due. */
int pelton_uv_open_cancel(pelton_uv_open_t *request);

/* ---- Receiving --------------------------------------------------------------------------------------------------- */

typedef struct pelton_uv_receiver_s pelton_uv_receiver_t;

/* A message, released when the callback returns. In the callback, pelton_receiver_hold(handle->receiver, ...) keeps it
 * longer. */
typedef void (*pelton_uv_message_cb)(pelton_uv_receiver_t *handle, const pelton_message *message);
/* What pelton_receiver_receive returns instead of a message: PELTON_CLOSED, PELTON_PEER_DIED or an error. The handle
 * is stopped. */
typedef void (*pelton_uv_receiver_end_cb)(pelton_uv_receiver_t *handle, int code);
typedef void (*pelton_uv_receiver_close_cb)(pelton_uv_receiver_t *handle);

struct pelton_uv_receiver_s {
    void *data;
    pelton_receiver *receiver;
    uv_poll_t poll;
    /* Private. message_cb is NULL while stopped. */
    pelton_uv_message_cb message_cb;
    pelton_uv_receiver_end_cb end_cb;
    pelton_uv_receiver_close_cb close_cb;
    int in_callback;
};

/* Prepares the handle, stopped. Errors: PELTON_SYSTEM; as pelton_receiver_fd. */
int pelton_uv_receiver_init(uv_loop_t *loop, pelton_uv_receiver_t *handle, pelton_receiver *receiver);

/* Starts to deliver messages, or changes the callbacks. */
PELTON_MUST_USE int pelton_uv_receiver_start(pelton_uv_receiver_t *handle, pelton_uv_message_cb message_cb,
                                             pelton_uv_receiver_end_cb end_cb);

/* Delivers nothing until it is started again, also if called in a callback. The lane fills, and the sender waits: this
 * is backpressure. The sender's end is not noticed meanwhile. */
void pelton_uv_receiver_stop(pelton_uv_receiver_t *handle);

/* Closes the handle and the receiver. No other callback is called afterwards. close_cb may be NULL. The message in the
 * callback is valid until that returns. */
void pelton_uv_receiver_close(pelton_uv_receiver_t *handle, pelton_uv_receiver_close_cb close_cb);

/* ---- Sending ------------------------------------------------------------------------------------------------------ *
 * Send with pelton_sender_send(handle.sender, ..., PELTON_NO_WAIT) at any time. On PELTON_AGAIN keep the message, stop
 * producing, and start the handle: space_cb says when to continue. */

typedef struct pelton_uv_sender_s pelton_uv_sender_t;

/* There is space for a message of the size given to start. */
typedef void (*pelton_uv_space_cb)(pelton_uv_sender_t *handle);
/* PELTON_CLOSED, PELTON_PEER_DIED or an error, as from pelton_sender_send. The handle is stopped. */
typedef void (*pelton_uv_sender_end_cb)(pelton_uv_sender_t *handle, int code);
typedef void (*pelton_uv_sender_close_cb)(pelton_uv_sender_t *handle);

struct pelton_uv_sender_s {
    void *data;
    pelton_sender *sender;
    uv_poll_t poll;
    /* Private. end_cb is NULL while stopped. */
    pelton_uv_space_cb space_cb;
    pelton_uv_sender_end_cb end_cb;
    pelton_uv_sender_close_cb close_cb;
    size_t size;
    const void *offered; /* the space that the last callback of this tick was called for */
    const void *tail;    /* the address of the next small message, as of the last check */
    unsigned ticks;      /* with space */
    int in_tick;
    int is_armed;        /* by start, in this tick */
};

/* As pelton_uv_receiver_init. */
int pelton_uv_sender_init(uv_loop_t *loop, pelton_uv_sender_t *handle, pelton_sender *sender);

/* Calls space_cb while there is space for a message of size bytes, until it is stopped; or changes size and callbacks.
 * A callback that sends is called again immediately, for 1 to 2 ms in each iteration of the loop: one message a
 * callback is enough. A callback that sends nothing ends that: stop the handle when there is nothing to send, or the
 * loop never sleeps. Send with PELTON_NO_WAIT alone in the callback: a wait would take the events that the loop waits
 * for. After the lane was full, there is space when the receiver has released half of what waits. Without space_cb
 * (NULL) it only waits for the receiver's end. Nothing may be reserved when the callback returns. A stop in the
 * callback takes effect when it returns. Errors: as pelton_sender_arm. */
PELTON_MUST_USE int pelton_uv_sender_start(pelton_uv_sender_t *handle, size_t size, pelton_uv_space_cb space_cb,
                                           pelton_uv_sender_end_cb end_cb);
void pelton_uv_sender_stop(pelton_uv_sender_t *handle);

/* As pelton_uv_receiver_close. What was sent is still received. */
void pelton_uv_sender_close(pelton_uv_sender_t *handle, pelton_uv_sender_close_cb close_cb);

/* ---- Publishing and subscribing ----------------------------------------------------------------------------------- *
 * A started publisher admits subscribers, also while it sends nothing. Send with
 * pelton_publisher_send(handle.publisher, ..., PELTON_NO_WAIT) at any time. On PELTON_AGAIN keep the message, and start
 * the handle with a space_cb. */

typedef struct pelton_uv_publisher_s pelton_uv_publisher_t;
typedef struct pelton_uv_subscriber_s pelton_uv_subscriber_t;

/* There is space for a message of the size given to start: called once. For the next time, start again. */
typedef void (*pelton_uv_publisher_space_cb)(pelton_uv_publisher_t *handle);
/* An error of pelton_publisher_arm. The handle is stopped. */
typedef void (*pelton_uv_publisher_end_cb)(pelton_uv_publisher_t *handle, int code);
typedef void (*pelton_uv_publisher_close_cb)(pelton_uv_publisher_t *handle);

struct pelton_uv_publisher_s {
    void *data;
    pelton_publisher *publisher;
    uv_poll_t poll;
    /* Private. end_cb is NULL while stopped. */
    pelton_uv_publisher_space_cb space_cb;
    pelton_uv_publisher_end_cb end_cb;
    pelton_uv_publisher_close_cb close_cb;
    size_t size;
};

/* As pelton_uv_receiver_init. To open one of "path:DIR" without a wait, give it the deadline_ns pelton_deadline(0). */
int pelton_uv_publisher_init(uv_loop_t *loop, pelton_uv_publisher_t *handle, pelton_publisher *publisher);

/* Starts to admit subscribers. space_cb may be NULL; otherwise it is called once there is space for a message of size
 * bytes. Also while started: it replaces size and callbacks. Errors: as pelton_publisher_arm. */
PELTON_MUST_USE int pelton_uv_publisher_start(pelton_uv_publisher_t *handle, size_t size,
                                              pelton_uv_publisher_space_cb space_cb,
                                              pelton_uv_publisher_end_cb end_cb);
void pelton_uv_publisher_stop(pelton_uv_publisher_t *handle);

/* As pelton_uv_receiver_close. What was sent is still received. */
void pelton_uv_publisher_close(pelton_uv_publisher_t *handle, pelton_uv_publisher_close_cb close_cb);

/* A message, released when the callback returns. */
typedef void (*pelton_uv_delivery_cb)(pelton_uv_subscriber_t *handle, const pelton_delivery *delivery);
/* What pelton_subscriber_receive returns instead of a message. The handle is stopped. After pelton_subscriber_resume
 * has joined a successor of the publisher, start it again. */
typedef void (*pelton_uv_subscriber_end_cb)(pelton_uv_subscriber_t *handle, int code);
typedef void (*pelton_uv_subscriber_close_cb)(pelton_uv_subscriber_t *handle);

struct pelton_uv_subscriber_s {
    void *data;
    pelton_subscriber *subscriber;
    uv_poll_t poll;
    /* Private. delivery_cb is NULL while stopped. */
    pelton_uv_delivery_cb delivery_cb;
    pelton_uv_subscriber_end_cb end_cb;
    pelton_uv_subscriber_close_cb close_cb;
    int in_callback;
};

/* As of a receiver. While stopped, it is behind, and the publisher does what its policy says. */
int pelton_uv_subscriber_init(uv_loop_t *loop, pelton_uv_subscriber_t *handle, pelton_subscriber *subscriber);
PELTON_MUST_USE int pelton_uv_subscriber_start(pelton_uv_subscriber_t *handle, pelton_uv_delivery_cb delivery_cb,
                                               pelton_uv_subscriber_end_cb end_cb);
void pelton_uv_subscriber_stop(pelton_uv_subscriber_t *handle);
void pelton_uv_subscriber_close(pelton_uv_subscriber_t *handle, pelton_uv_subscriber_close_cb close_cb);

/* ---- Calling ----------------------------------------------------------------------------------------------------- */

typedef struct pelton_uv_client_s pelton_uv_client_t;
typedef struct pelton_uv_call_s pelton_uv_call_t;

/* PELTON_OK: a completion, released when the callback returns; to start or cancel a call in it, first release the
 * completion by pelton_client_release(call->handle->client). After PELTON_PART more callbacks follow. Other codes: the
 * client has ended, completion is NULL. */
typedef void (*pelton_uv_call_cb)(pelton_uv_call_t *call, int code, const pelton_completion *completion);
/* There is space for a request again, after pelton_uv_call_start has returned PELTON_AGAIN. */
typedef void (*pelton_uv_client_space_cb)(pelton_uv_client_t *handle);
/* The client has ended, after all its calls: close it. */
typedef void (*pelton_uv_client_end_cb)(pelton_uv_client_t *handle, int code);
typedef void (*pelton_uv_client_close_cb)(pelton_uv_client_t *handle);

struct pelton_uv_call_s {
    void *data;                 /* the caller's */
    pelton_uv_client_t *handle; /* set by start */
    uint64_t call;              /* its number */
    /* Private. */
    pelton_uv_call_cb cb;
    pelton_uv_call_t *next;
};

struct pelton_uv_client_s {
    void *data;
    pelton_client *client;
    uv_poll_t poll;
    /* Private. end_cb is NULL while stopped. */
    pelton_uv_client_space_cb space_cb;
    pelton_uv_client_end_cb end_cb;
    pelton_uv_client_close_cb close_cb;
    uv_prepare_t prepare;         /* arms again, before the loop sleeps */
    pelton_uv_call_t *calls[256]; /* in flight, by their numbers */
    int wants_space;
    int in_tick;
    int closings;                 /* of libuv's handles, still to come */
};

/* As pelton_uv_receiver_init. */
int pelton_uv_client_init(uv_loop_t *loop, pelton_uv_client_t *handle, pelton_client *client);

/* Starts to deliver completions, or changes the callbacks. space_cb may be NULL. Errors: PELTON_NOT_RELEASED. */
PELTON_MUST_USE int pelton_uv_client_start(pelton_uv_client_t *handle, pelton_uv_client_space_cb space_cb,
                                           pelton_uv_client_end_cb end_cb);
void pelton_uv_client_stop(pelton_uv_client_t *handle);

/* Submits a request, as pelton_client_submit with PELTON_NO_WAIT. cb is called while the handle is started. Not in a
 * uv_prepare callback. Errors: as pelton_client_submit: there is no call. PELTON_AGAIN: no space, or 1,024 calls: wait
 * for space_cb. */
PELTON_MUST_USE int pelton_uv_call_start(pelton_uv_call_t *call, pelton_uv_client_t *handle, const void *data,
                                         size_t size, uint32_t flags, pelton_uv_call_cb cb);

/* Cancels a call: cb is not called any more. Errors: PELTON_AGAIN: it is not in flight. PELTON_NOT_RELEASED: it
 * continues. */
int pelton_uv_call_cancel(pelton_uv_call_t *call);

/* As pelton_uv_receiver_close. The calls' memory is the caller's again in close_cb. */
void pelton_uv_client_close(pelton_uv_client_t *handle, pelton_uv_client_close_cb close_cb);

/* ---- Serving ----------------------------------------------------------------------------------------------------- */

typedef struct pelton_uv_service_s pelton_uv_service_t;

/* A request, released when the callback returns. Its responder belongs to the callback, which replies in it, or later:
 * in the loop, or on another thread. */
typedef void (*pelton_uv_request_cb)(pelton_uv_service_t *handle, const pelton_request *request);
/* PELTON_CLOSED, after pelton_service_stop or pelton_service_drain; or an error. The handle is stopped. */
typedef void (*pelton_uv_service_end_cb)(pelton_uv_service_t *handle, int code);
typedef void (*pelton_uv_service_close_cb)(pelton_uv_service_t *handle);

struct pelton_uv_service_s {
    void *data;
    pelton_service *service;
    uv_poll_t poll;
    /* Private. request_cb is NULL while stopped. */
    pelton_uv_request_cb request_cb;
    pelton_uv_service_end_cb end_cb;
    pelton_uv_service_close_cb close_cb;
    int in_callback;
};

/* As of a receiver. While stopped, it accepts no clients and writes no replies that wait. */
int pelton_uv_service_init(uv_loop_t *loop, pelton_uv_service_t *handle, pelton_service *service);
PELTON_MUST_USE int pelton_uv_service_start(pelton_uv_service_t *handle, pelton_uv_request_cb request_cb,
                                            pelton_uv_service_end_cb end_cb);
void pelton_uv_service_stop(pelton_uv_service_t *handle);
void pelton_uv_service_close(pelton_uv_service_t *handle, pelton_uv_service_close_cb close_cb);

/* ---- Files ------------------------------------------------------------------------------------------------------- */

typedef struct pelton_uv_engine_s pelton_uv_engine_t;
typedef struct pelton_uv_operation_s pelton_uv_operation_t;

/* An operation's result, valid until the callback returns. completion->file belongs to the callback. */
typedef void (*pelton_uv_operation_cb)(pelton_uv_operation_t *request, const pelton_file_completion *completion);
typedef void (*pelton_uv_engine_close_cb)(pelton_uv_engine_t *handle);

struct pelton_uv_operation_s {
    void *data;                 /* the caller's */
    pelton_uv_engine_t *handle; /* set by submit */
    /* Private. */
    pelton_uv_operation_cb cb;
};

/* It is active while operations are in flight. */
struct pelton_uv_engine_s {
    void *data;
    pelton_engine *engine; /* not for pelton_engine_submit and pelton_engine_completions */
    uv_poll_t poll;
    size_t in_flight;      /* operations, to be read */
    /* Private. */
    pelton_uv_engine_close_cb close_cb;
    int in_tick;
};

/* As pelton_uv_receiver_init. */
int pelton_uv_engine_init(uv_loop_t *loop, pelton_uv_engine_t *handle, pelton_engine *engine);

/* Submits count operations as pelton_engine_submit does, requests[i] for operations[i], whose token it sets. *taken is
 * the number of accepted ones, whatever is returned. Errors: as pelton_engine_submit. */
PELTON_MUST_USE int pelton_uv_engine_submit(pelton_uv_engine_t *handle, pelton_uv_operation_t *requests,
                                            pelton_operation *operations, size_t count, size_t *taken,
                                            pelton_uv_operation_cb cb);

/* Cancels an operation, as pelton_engine_cancel. Its callback is still called. */
int pelton_uv_operation_cancel(pelton_uv_operation_t *request);

/* As pelton_uv_receiver_close. Operations in flight are cancelled, without a callback. Closing the engine can wait for
 * memory without a release function, and for endpoints: see pelton_engine. */
void pelton_uv_engine_close(pelton_uv_engine_t *handle, pelton_uv_engine_close_cb close_cb);

#ifdef __cplusplus
}
#endif

#endif
