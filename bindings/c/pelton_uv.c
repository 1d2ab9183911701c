/* pelton_uv.c: see pelton_uv.h.
 *
 * Each handle has a uv_poll for its descriptor. A tick is one callback of that. It delivers everything, or offers all
 * space, by one callback of the program for each message; then it arms. A tick that ends before it has armed leaves the
 * descriptor readable, so the loop comes back after its other handles. A callback that stops and starts its own handle
 * changes only fields: the tick's end does the rest. So a message costs no system call: libuv itself makes at least one
 * in each iteration of the loop, and one in each uv_poll_stop and after each uv_poll_start. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "pelton_uv.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* A tick ends after this time, so that the loop's other handles have theirs. */
#define TICK_NS 1000000

/* What a step of a tick returns, besides pelton's codes: the tick ends here. */
#define TICK_ENDS 2

static int from_uv(int error) {
    if (error == 0) return PELTON_OK;
    errno = -error;
    return PELTON_SYSTEM;
}

static int init_poll(uv_loop_t *loop, uv_poll_t *poll, void *handle, int fd) {
    if (fd < 0) return fd;
    poll->data = handle;
    return from_uv(uv_poll_init(loop, poll, fd));
}

/* Repeats a step while it returns PELTON_OK. It reads the clock after 1, 2, 4 and so on up to 64 steps, so a tick takes
 * at most about twice TICK_NS if steps take similar times. */
static inline int repeat(int (*step)(void *), void *handle, int status) {
    uint64_t began = uv_hrtime();
    int code = from_uv(status);
    for (uint64_t share = 1; code == PELTON_OK; share += share < 64 ? share : 0) {
        for (uint64_t i = 0; i < share && code == PELTON_OK; i++) code = step(handle);
        if (code == PELTON_OK && uv_hrtime() - began >= TICK_NS) return TICK_ENDS;
    }
    return code;
}

/* ---- Opening ----------------------------------------------------------------------------------------------------- */

static int finish_sender(pelton_uv_open_t *request) {
    return pelton_sender_opening_finish((pelton_sender_opening *)request->opening, &request->sender);
}

static int finish_receiver(pelton_uv_open_t *request) {
    return pelton_receiver_opening_finish((pelton_receiver_opening *)request->opening, &request->receiver);
}

static int finish_subscriber(pelton_uv_open_t *request) {
    return pelton_subscriber_opening_finish((pelton_subscriber_opening *)request->opening, &request->subscriber);
}

static int finish_client(pelton_uv_open_t *request) {
    return pelton_client_opening_finish((pelton_client_opening *)request->opening, &request->client);
}

static void on_open_closed(uv_handle_t *poll) {
    pelton_uv_open_t *request = (pelton_uv_open_t *)poll->data;
    pelton_close(request->opening);
    errno = request->error;
    request->cb(request, request->code);
}

static void end_open(pelton_uv_open_t *request, int code, const char *detail) {
    request->code = code;
    request->error = errno;
    if (code != PELTON_OK) snprintf(request->detail, sizeof request->detail, "%s", detail);
    uv_close((uv_handle_t *)&request->poll, on_open_closed);
}

static void on_open_readable(uv_poll_t *poll, int status, int events) {
    pelton_uv_open_t *request = (pelton_uv_open_t *)poll->data;
    int code = from_uv(status);
    (void)events;
    if (code == PELTON_OK) code = request->finish(request);
    if (code != PELTON_AGAIN) end_open(request, code, pelton_error_detail());
}

/* Polls an opening, which this closes if it fails. */
static int start_open(uv_loop_t *loop, pelton_uv_open_t *request, int fd) {
    int code = init_poll(loop, &request->poll, request, fd);
    if (code == PELTON_OK) code = from_uv(uv_poll_start(&request->poll, UV_READABLE, on_open_readable));
    if (code != PELTON_OK) pelton_close(request->opening);
    return code;
}

int pelton_uv_sender_open(uv_loop_t *loop, pelton_uv_open_t *request, const char *name,
                          const pelton_channel_options *options, pelton_uv_open_cb cb) {
    pelton_sender_opening *opening;
    int code = pelton_sender_open_start(name, options, &opening);
    if (code != PELTON_OK) return code;
    *request = (pelton_uv_open_t){.data = request->data, .opening = opening, .finish = finish_sender, .cb = cb};
    return start_open(loop, request, pelton_sender_opening_fd(opening));
}

int pelton_uv_receiver_open(uv_loop_t *loop, pelton_uv_open_t *request, const char *name,
                            const pelton_channel_options *options, pelton_uv_open_cb cb) {
    pelton_receiver_opening *opening;
    int code = pelton_receiver_open_start(name, options, &opening);
    if (code != PELTON_OK) return code;
    *request = (pelton_uv_open_t){.data = request->data, .opening = opening, .finish = finish_receiver, .cb = cb};
    return start_open(loop, request, pelton_receiver_opening_fd(opening));
}

int pelton_uv_subscriber_open(uv_loop_t *loop, pelton_uv_open_t *request, const char *name,
                              const pelton_subscriber_options *options, pelton_uv_open_cb cb) {
    pelton_subscriber_opening *opening;
    int code = pelton_subscriber_open_start(name, options, &opening);
    if (code != PELTON_OK) return code;
    *request = (pelton_uv_open_t){.data = request->data, .opening = opening, .finish = finish_subscriber, .cb = cb};
    return start_open(loop, request, pelton_subscriber_opening_fd(opening));
}

int pelton_uv_client_open(uv_loop_t *loop, pelton_uv_open_t *request, const char *name,
                          const pelton_client_options *options, pelton_uv_open_cb cb) {
    pelton_client_opening *opening;
    int code = pelton_client_open_start(name, options, &opening);
    if (code != PELTON_OK) return code;
    *request = (pelton_uv_open_t){.data = request->data, .opening = opening, .finish = finish_client, .cb = cb};
    return start_open(loop, request, pelton_client_opening_fd(opening));
}

int pelton_uv_open_cancel(pelton_uv_open_t *request) {
    if (uv_is_closing((uv_handle_t *)&request->poll)) return PELTON_AGAIN;
    errno = ECANCELED;
    end_open(request, PELTON_SYSTEM, "the open was cancelled");
    return PELTON_OK;
}

/* ---- Receiving --------------------------------------------------------------------------------------------------- */

int pelton_uv_receiver_init(uv_loop_t *loop, pelton_uv_receiver_t *handle, pelton_receiver *receiver) {
    memset(handle, 0, sizeof *handle);
    handle->receiver = receiver;
    return init_poll(loop, &handle->poll, handle, pelton_receiver_fd(receiver));
}

static void rest_receiver(pelton_uv_receiver_t *handle) {
    uv_poll_stop(&handle->poll);
    pelton_receiver_disarm(handle->receiver);
}

/* Receives a message if none was there. TICK_ENDS: armed, or nothing has come after all. */
static int wait_for_message(pelton_receiver *receiver, pelton_message *message) {
    int code = pelton_receiver_poll(receiver);
    if (code == PELTON_AGAIN) {
        code = pelton_receiver_arm(receiver);
        if (code == PELTON_OK) return TICK_ENDS;
    }
    if (code == PELTON_OK || code == PELTON_READY) code = pelton_receiver_receive(receiver, PELTON_NO_WAIT, message);
    return code == PELTON_AGAIN ? TICK_ENDS : code;
}

static int deliver_message(void *of) {
    pelton_uv_receiver_t *handle = (pelton_uv_receiver_t *)of;
    pelton_message message;
    int code = pelton_receiver_receive(handle->receiver, PELTON_NO_WAIT, &message);
    if (code == PELTON_AGAIN) code = wait_for_message(handle->receiver, &message);
    if (code != PELTON_OK) return code;
    handle->in_callback = 1;
    handle->message_cb(handle, &message);
    handle->in_callback = 0;
    /* PELTON_NOT_RECEIVED if the callback has held or released it. */
    pelton_receiver_release(handle->receiver);
    if (uv_is_closing((uv_handle_t *)&handle->poll)) return TICK_ENDS;
    if (handle->message_cb) return PELTON_OK;
    rest_receiver(handle);
    return TICK_ENDS;
}

static void on_receiver_readable(uv_poll_t *poll, int status, int events) {
    pelton_uv_receiver_t *handle = (pelton_uv_receiver_t *)poll->data;
    int code = repeat(deliver_message, handle, status);
    (void)events;
    if (code == TICK_ENDS) return;
    handle->message_cb = NULL;
    rest_receiver(handle);
    handle->end_cb(handle, code);
}

int pelton_uv_receiver_start(pelton_uv_receiver_t *handle, pelton_uv_message_cb message_cb,
                             pelton_uv_receiver_end_cb end_cb) {
    /* In a message callback the tick continues by itself. */
    if (!handle->message_cb && !handle->in_callback) {
        int code = pelton_receiver_arm(handle->receiver);
        if (code < 0) return code;
        code = from_uv(uv_poll_start(&handle->poll, UV_READABLE, on_receiver_readable));
        if (code != PELTON_OK) return code;
    }
    handle->message_cb = message_cb;
    handle->end_cb = end_cb;
    return PELTON_OK;
}

void pelton_uv_receiver_stop(pelton_uv_receiver_t *handle) {
    handle->message_cb = NULL;
    if (!handle->in_callback) rest_receiver(handle);
}

static void on_receiver_closed(uv_handle_t *poll) {
    pelton_uv_receiver_t *handle = (pelton_uv_receiver_t *)poll->data;
    pelton_close(handle->receiver);
    if (handle->close_cb) handle->close_cb(handle);
}

void pelton_uv_receiver_close(pelton_uv_receiver_t *handle, pelton_uv_receiver_close_cb close_cb) {
    handle->close_cb = close_cb;
    uv_close((uv_handle_t *)&handle->poll, on_receiver_closed);
}

/* ---- Sending ----------------------------------------------------------------------------------------------------- */

int pelton_uv_sender_init(uv_loop_t *loop, pelton_uv_sender_t *handle, pelton_sender *sender) {
    memset(handle, 0, sizeof *handle);
    handle->sender = sender;
    return init_poll(loop, &handle->poll, handle, pelton_sender_fd(sender));
}

static void rest_sender(pelton_uv_sender_t *handle) {
    uv_poll_stop(&handle->poll);
    pelton_sender_disarm(handle->sender);
}

/* The address of the next small message. */
static const void *tail_of(pelton_uv_sender_t *handle) {
    void *tail;
    if (pelton_sender_reserve(handle->sender, 0, PELTON_NO_WAIT, &tail) != PELTON_OK) return NULL;
    pelton_sender_abort(handle->sender);
    return tail;
}

/* Calls space_cb once, if there is space. The reservation that tests for space, by no system call, is at the address
 * of the next message of that size. If the address is the last one's, the callback may have sent nothing, which ends
 * the tick; or smaller messages elsewhere, while the large one's place is the front of the lane. */
static int offer_space(void *of) {
    pelton_uv_sender_t *handle = (pelton_uv_sender_t *)of;
    void *space;
    int code = pelton_sender_reserve(handle->sender, handle->size, PELTON_NO_WAIT, &space);
    if (code != PELTON_OK) return code;
    pelton_sender_abort(handle->sender);
    if (space == handle->offered) {
        const void *tail = tail_of(handle);
        if (tail == handle->tail) return TICK_ENDS;
        handle->tail = tail;
    }
    handle->offered = space;
    handle->space_cb(handle);
    if (uv_is_closing((uv_handle_t *)&handle->poll) || !handle->end_cb || !handle->space_cb) return TICK_ENDS;
    return PELTON_OK;
}

/* At the end of a tick, which returned `code`. */
static int arm_sender(pelton_uv_sender_t *handle, int code) {
    if (!handle->space_cb) return pelton_sender_arm_for_end(handle->sender);
    /* Arming also checks whether the receiver is there: now and then, for a program that has space and sends nothing.
     * It cannot be omitted if a callback has started the handle, which armed it: with space, the descriptor would not
     * be readable. */
    if (code == PELTON_AGAIN || handle->is_armed || ++handle->ticks % 64 == 0) {
        handle->is_armed = 0;
        return pelton_sender_arm(handle->sender, handle->size);
    }
    /* Not armed, so the descriptor is still readable, for the next tick. */
    return PELTON_OK;
}

static void on_sender_readable(uv_poll_t *poll, int status, int events) {
    pelton_uv_sender_t *handle = (pelton_uv_sender_t *)poll->data;
    int code = from_uv(status);
    (void)events;
    if (code == PELTON_OK && handle->space_cb) {
        handle->in_tick = 1;
        handle->offered = NULL;
        handle->tail = tail_of(handle);
        code = repeat(offer_space, handle, status);
        handle->in_tick = 0;
        if (uv_is_closing((uv_handle_t *)poll)) return;
        if (!handle->end_cb) {
            rest_sender(handle);
            return;
        }
    }
    if (code >= 0 || code == PELTON_AGAIN) code = arm_sender(handle, code);
    if (code < 0) {
        pelton_uv_sender_end_cb end_cb = handle->end_cb;
        handle->end_cb = NULL;
        rest_sender(handle);
        end_cb(handle, code);
    }
}

int pelton_uv_sender_start(pelton_uv_sender_t *handle, size_t size, pelton_uv_space_cb space_cb,
                           pelton_uv_sender_end_cb end_cb) {
    int code = space_cb ? pelton_sender_arm(handle->sender, size) : pelton_sender_arm_for_end(handle->sender);
    handle->is_armed = handle->in_tick;
    if (code < 0) return code;
    /* In a tick libuv's handle is started. */
    if (!handle->end_cb && !handle->in_tick) {
        code = from_uv(uv_poll_start(&handle->poll, UV_READABLE, on_sender_readable));
        if (code != PELTON_OK) return code;
    }
    handle->size = size;
    handle->space_cb = space_cb;
    handle->end_cb = end_cb;
    return PELTON_OK;
}

void pelton_uv_sender_stop(pelton_uv_sender_t *handle) {
    handle->end_cb = NULL;
    if (!handle->in_tick) rest_sender(handle);
}

static void on_sender_closed(uv_handle_t *poll) {
    pelton_uv_sender_t *handle = (pelton_uv_sender_t *)poll->data;
    pelton_close(handle->sender);
    if (handle->close_cb) handle->close_cb(handle);
}

void pelton_uv_sender_close(pelton_uv_sender_t *handle, pelton_uv_sender_close_cb close_cb) {
    handle->close_cb = close_cb;
    uv_close((uv_handle_t *)&handle->poll, on_sender_closed);
}

/* ---- Publishing and subscribing ---------------------------------------------------------------------------------- */

int pelton_uv_publisher_init(uv_loop_t *loop, pelton_uv_publisher_t *handle, pelton_publisher *publisher) {
    memset(handle, 0, sizeof *handle);
    handle->publisher = publisher;
    return init_poll(loop, &handle->poll, handle, pelton_publisher_fd(publisher));
}

/* Admits subscribers, and arms if the program waits for space: PELTON_OK, or PELTON_READY. */
static int admit(pelton_publisher *publisher, size_t size, pelton_uv_publisher_space_cb space_cb) {
    if (space_cb) return pelton_publisher_arm(publisher, size);
    return pelton_publisher_wait_subscribers(publisher, 0, PELTON_NO_WAIT);
}

static void on_publisher_readable(uv_poll_t *poll, int status, int events) {
    pelton_uv_publisher_t *handle = (pelton_uv_publisher_t *)poll->data;
    pelton_uv_publisher_end_cb end_cb;
    int code = from_uv(status);
    (void)events;
    if (code == PELTON_OK) code = admit(handle->publisher, handle->size, handle->space_cb);
    if (code == PELTON_READY) {
        pelton_uv_publisher_space_cb space_cb = handle->space_cb;
        handle->space_cb = NULL;
        space_cb(handle);
        if (uv_is_closing((uv_handle_t *)&handle->poll) || !handle->end_cb) return;
        /* If it has not started the handle again, this makes the descriptor unreadable. */
        code = admit(handle->publisher, handle->size, handle->space_cb);
    }
    if (code >= PELTON_OK) return;
    end_cb = handle->end_cb;
    pelton_uv_publisher_stop(handle);
    end_cb(handle, code);
}

int pelton_uv_publisher_start(pelton_uv_publisher_t *handle, size_t size, pelton_uv_publisher_space_cb space_cb,
                              pelton_uv_publisher_end_cb end_cb) {
    int code = admit(handle->publisher, size, space_cb);
    if (code < 0) return code;
    handle->size = size;
    handle->space_cb = space_cb;
    handle->end_cb = end_cb;
    return from_uv(uv_poll_start(&handle->poll, UV_READABLE, on_publisher_readable));
}

void pelton_uv_publisher_stop(pelton_uv_publisher_t *handle) {
    handle->end_cb = NULL;
    handle->space_cb = NULL;
    uv_poll_stop(&handle->poll);
    pelton_publisher_disarm(handle->publisher);
}

static void on_publisher_closed(uv_handle_t *poll) {
    pelton_uv_publisher_t *handle = (pelton_uv_publisher_t *)poll->data;
    pelton_close(handle->publisher);
    if (handle->close_cb) handle->close_cb(handle);
}

void pelton_uv_publisher_close(pelton_uv_publisher_t *handle, pelton_uv_publisher_close_cb close_cb) {
    handle->close_cb = close_cb;
    uv_close((uv_handle_t *)&handle->poll, on_publisher_closed);
}

int pelton_uv_subscriber_init(uv_loop_t *loop, pelton_uv_subscriber_t *handle, pelton_subscriber *subscriber) {
    memset(handle, 0, sizeof *handle);
    handle->subscriber = subscriber;
    return init_poll(loop, &handle->poll, handle, pelton_subscriber_fd(subscriber));
}

static void rest_subscriber(pelton_uv_subscriber_t *handle) {
    uv_poll_stop(&handle->poll);
    pelton_subscriber_disarm(handle->subscriber);
}

/* As wait_for_message. */
static int wait_for_delivery(pelton_subscriber *subscriber, pelton_delivery *delivery) {
    int code = pelton_subscriber_poll(subscriber);
    if (code == PELTON_AGAIN) {
        code = pelton_subscriber_arm(subscriber);
        if (code == PELTON_OK) return TICK_ENDS;
    }
    if (code == PELTON_OK || code == PELTON_READY) code = pelton_subscriber_receive(subscriber, PELTON_NO_WAIT, delivery);
    return code == PELTON_AGAIN ? TICK_ENDS : code;
}

static int deliver_delivery(void *of) {
    pelton_uv_subscriber_t *handle = (pelton_uv_subscriber_t *)of;
    pelton_delivery delivery;
    int code = pelton_subscriber_receive(handle->subscriber, PELTON_NO_WAIT, &delivery);
    if (code == PELTON_AGAIN) code = wait_for_delivery(handle->subscriber, &delivery);
    if (code != PELTON_OK) return code;
    handle->in_callback = 1;
    handle->delivery_cb(handle, &delivery);
    handle->in_callback = 0;
    /* PELTON_NOT_RECEIVED if the callback has released it. */
    pelton_subscriber_release(handle->subscriber);
    if (uv_is_closing((uv_handle_t *)&handle->poll)) return TICK_ENDS;
    if (handle->delivery_cb) return PELTON_OK;
    rest_subscriber(handle);
    return TICK_ENDS;
}

static void on_subscriber_readable(uv_poll_t *poll, int status, int events) {
    pelton_uv_subscriber_t *handle = (pelton_uv_subscriber_t *)poll->data;
    int code = repeat(deliver_delivery, handle, status);
    (void)events;
    if (code == TICK_ENDS) return;
    handle->delivery_cb = NULL;
    rest_subscriber(handle);
    handle->end_cb(handle, code);
}

int pelton_uv_subscriber_start(pelton_uv_subscriber_t *handle, pelton_uv_delivery_cb delivery_cb,
                               pelton_uv_subscriber_end_cb end_cb) {
    /* In a callback the tick continues by itself. */
    if (!handle->delivery_cb && !handle->in_callback) {
        int code = pelton_subscriber_arm(handle->subscriber);
        if (code < 0) return code;
        code = from_uv(uv_poll_start(&handle->poll, UV_READABLE, on_subscriber_readable));
        if (code != PELTON_OK) return code;
    }
    handle->delivery_cb = delivery_cb;
    handle->end_cb = end_cb;
    return PELTON_OK;
}

void pelton_uv_subscriber_stop(pelton_uv_subscriber_t *handle) {
    handle->delivery_cb = NULL;
    if (!handle->in_callback) rest_subscriber(handle);
}

static void on_subscriber_closed(uv_handle_t *poll) {
    pelton_uv_subscriber_t *handle = (pelton_uv_subscriber_t *)poll->data;
    pelton_close(handle->subscriber);
    if (handle->close_cb) handle->close_cb(handle);
}

void pelton_uv_subscriber_close(pelton_uv_subscriber_t *handle, pelton_uv_subscriber_close_cb close_cb) {
    handle->close_cb = close_cb;
    uv_close((uv_handle_t *)&handle->poll, on_subscriber_closed);
}

/* ---- Calling ----------------------------------------------------------------------------------------------------- */

int pelton_uv_client_init(uv_loop_t *loop, pelton_uv_client_t *handle, pelton_client *client) {
    memset(handle, 0, sizeof *handle);
    handle->client = client;
    handle->prepare.data = handle;
    int code = init_poll(loop, &handle->poll, handle, pelton_client_fd(client));
    /* This cannot fail. */
    if (code == PELTON_OK) uv_prepare_init(loop, &handle->prepare);
    return code;
}

/* Where the call with this number is linked from, or would be. */
static pelton_uv_call_t **link_of(pelton_uv_client_t *handle, uint64_t number) {
    pelton_uv_call_t **link = &handle->calls[(number ^ number >> 8) % 256];
    while (*link && (*link)->call != number) link = &(*link)->next;
    return link;
}

static pelton_uv_call_t *unlink_call(pelton_uv_call_t **link) {
    pelton_uv_call_t *call = *link;
    *link = call->next;
    call->next = NULL;
    return call;
}

static void rest_client(pelton_uv_client_t *handle) {
    uv_prepare_stop(&handle->prepare);
    uv_poll_stop(&handle->poll);
    pelton_client_disarm(handle->client);
}

static void end_client(pelton_uv_client_t *handle, int code) {
    pelton_uv_client_end_cb end_cb = handle->end_cb;
    handle->end_cb = NULL;
    rest_client(handle);
    for (int i = 0; i < 256; i++) {
        while (handle->calls[i]) {
            pelton_uv_call_t *call = unlink_call(&handle->calls[i]);
            call->cb(call, code, NULL);
            if (uv_is_closing((uv_handle_t *)&handle->poll)) return;
        }
    }
    end_cb(handle, code);
}

static int deliver_completion(void *of) {
    pelton_uv_client_t *handle = (pelton_uv_client_t *)of;
    pelton_completion completion;
    int code = pelton_client_await(handle->client, PELTON_NO_WAIT, &completion);
    if (code == PELTON_AGAIN && !handle->wants_space && pelton_client_poll(handle->client) == PELTON_OK) {
        code = pelton_client_await(handle->client, PELTON_NO_WAIT, &completion);
    }
    if (code != PELTON_OK) return code;
    pelton_uv_call_t **link = link_of(handle, completion.call);
    /* A call that was submitted without this adapter has none. */
    if (*link) {
        pelton_uv_call_t *call = completion.outcome == PELTON_PART ? *link : unlink_call(link);
        call->cb(call, PELTON_OK, &completion);
    }
    /* PELTON_NOT_RECEIVED if the callback has released it. */
    pelton_client_release(handle->client);
    if (uv_is_closing((uv_handle_t *)&handle->poll)) return TICK_ENDS;
    if (handle->end_cb) return PELTON_OK;
    handle->in_tick = 0;
    rest_client(handle);
    return TICK_ENDS;
}

static void on_client_readable(uv_poll_t *poll, int status, int events) {
    pelton_uv_client_t *handle = (pelton_uv_client_t *)poll->data;
    (void)events;
    handle->in_tick = 1;
    int code = repeat(deliver_completion, handle, status);
    if (uv_is_closing((uv_handle_t *)poll) || !handle->end_cb) return;
    if (handle->wants_space && (code == TICK_ENDS || code == PELTON_AGAIN)) {
        handle->wants_space = 0;
        handle->space_cb(handle);
        if (uv_is_closing((uv_handle_t *)poll)) return;
        if (!handle->end_cb) {
            handle->in_tick = 0;
            rest_client(handle);
            return;
        }
    }
    handle->in_tick = 0;
    /* TICK_ENDS or PELTON_READY: the descriptor is still readable, for the next tick. */
    if (code == PELTON_AGAIN) code = pelton_client_arm(handle->client);
    if (code < 0) end_client(handle, code);
}

static void on_client_prepare(uv_prepare_t *prepare) {
    pelton_uv_client_t *handle = (pelton_uv_client_t *)prepare->data;
    uv_prepare_stop(prepare);
    int code = pelton_client_arm(handle->client);
    if (code < 0) end_client(handle, code);
}

int pelton_uv_client_start(pelton_uv_client_t *handle, pelton_uv_client_space_cb space_cb,
                           pelton_uv_client_end_cb end_cb) {
    /* In a tick that continues by itself. */
    if (!handle->end_cb && !handle->in_tick) {
        int code = pelton_client_arm(handle->client);
        if (code < 0) return code;
        code = from_uv(uv_poll_start(&handle->poll, UV_READABLE, on_client_readable));
        if (code != PELTON_OK) return code;
    }
    handle->space_cb = space_cb;
    handle->end_cb = end_cb;
    return PELTON_OK;
}

void pelton_uv_client_stop(pelton_uv_client_t *handle) {
    handle->end_cb = NULL;
    if (!handle->in_tick) rest_client(handle);
}

int pelton_uv_call_start(pelton_uv_call_t *call, pelton_uv_client_t *handle, const void *data, size_t size,
                         uint32_t flags, pelton_uv_call_cb cb) {
    call->handle = handle;
    call->call = 0;
    int code = pelton_client_submit(handle->client, data, size, flags, PELTON_NO_WAIT, &call->call);
    if (code == PELTON_AGAIN && handle->space_cb) handle->wants_space = 1;
    if (code == PELTON_OK) {
        pelton_uv_call_t **link = link_of(handle, call->call);
        call->cb = cb;
        call->next = NULL;
        *link = call;
    }
    /* The client was armed before the request: the descriptor shows completions, but no space for a request in pieces.
     * A small request is never in pieces. */
    if (handle->end_cb && !handle->in_tick && (code == PELTON_AGAIN || (code == PELTON_OK && size > 1000))) {
        uv_prepare_start(&handle->prepare, on_client_prepare);
    }
    return code;
}

int pelton_uv_call_cancel(pelton_uv_call_t *call) {
    pelton_uv_client_t *handle = call->handle;
    pelton_uv_call_t **link = link_of(handle, call->call);
    if (*link != call) return PELTON_AGAIN;
    int code = pelton_client_cancel(handle->client, call->call);
    if (code == PELTON_NOT_RELEASED || code == PELTON_RESERVED) return code;
    unlink_call(link);
    if (handle->end_cb && !handle->in_tick) uv_prepare_start(&handle->prepare, on_client_prepare);
    return PELTON_OK;
}

static void on_client_closed(uv_handle_t *either) {
    pelton_uv_client_t *handle = (pelton_uv_client_t *)either->data;
    if (--handle->closings > 0) return;
    pelton_close(handle->client);
    if (handle->close_cb) handle->close_cb(handle);
}

void pelton_uv_client_close(pelton_uv_client_t *handle, pelton_uv_client_close_cb close_cb) {
    handle->close_cb = close_cb;
    handle->closings = 2;
    uv_close((uv_handle_t *)&handle->prepare, on_client_closed);
    uv_close((uv_handle_t *)&handle->poll, on_client_closed);
}

/* ---- Serving ----------------------------------------------------------------------------------------------------- */

int pelton_uv_service_init(uv_loop_t *loop, pelton_uv_service_t *handle, pelton_service *service) {
    memset(handle, 0, sizeof *handle);
    handle->service = service;
    return init_poll(loop, &handle->poll, handle, pelton_service_fd(service));
}

static void rest_service(pelton_uv_service_t *handle) {
    uv_poll_stop(&handle->poll);
    pelton_service_disarm(handle->service);
}

static int deliver_request(void *of) {
    pelton_uv_service_t *handle = (pelton_uv_service_t *)of;
    pelton_request request;
    int code = pelton_service_receive(handle->service, PELTON_NO_WAIT, &request);
    if (code != PELTON_OK) return code;
    handle->in_callback = 1;
    handle->request_cb(handle, &request);
    handle->in_callback = 0;
    /* PELTON_NOT_RECEIVED if the callback has released it. */
    pelton_service_release(handle->service);
    if (uv_is_closing((uv_handle_t *)&handle->poll)) return TICK_ENDS;
    if (handle->request_cb) return PELTON_OK;
    rest_service(handle);
    return TICK_ENDS;
}

static void on_service_readable(uv_poll_t *poll, int status, int events) {
    pelton_uv_service_t *handle = (pelton_uv_service_t *)poll->data;
    int code = repeat(deliver_request, handle, status);
    (void)events;
    /* PELTON_READY: the descriptor is readable, for the next tick. */
    if (code == PELTON_AGAIN) code = pelton_service_arm(handle->service);
    if (code >= 0) return;
    handle->request_cb = NULL;
    rest_service(handle);
    handle->end_cb(handle, code);
}

int pelton_uv_service_start(pelton_uv_service_t *handle, pelton_uv_request_cb request_cb,
                            pelton_uv_service_end_cb end_cb) {
    /* In a request callback the tick continues by itself. */
    if (!handle->request_cb && !handle->in_callback) {
        int code = pelton_service_arm(handle->service);
        if (code < 0) return code;
        code = from_uv(uv_poll_start(&handle->poll, UV_READABLE, on_service_readable));
        if (code != PELTON_OK) return code;
    }
    handle->request_cb = request_cb;
    handle->end_cb = end_cb;
    return PELTON_OK;
}

void pelton_uv_service_stop(pelton_uv_service_t *handle) {
    handle->request_cb = NULL;
    if (!handle->in_callback) rest_service(handle);
}

static void on_service_closed(uv_handle_t *poll) {
    pelton_uv_service_t *handle = (pelton_uv_service_t *)poll->data;
    pelton_close(handle->service);
    if (handle->close_cb) handle->close_cb(handle);
}

void pelton_uv_service_close(pelton_uv_service_t *handle, pelton_uv_service_close_cb close_cb) {
    handle->close_cb = close_cb;
    uv_close((uv_handle_t *)&handle->poll, on_service_closed);
}

/* ---- Files ------------------------------------------------------------------------------------------------------- */

int pelton_uv_engine_init(uv_loop_t *loop, pelton_uv_engine_t *handle, pelton_engine *engine) {
    memset(handle, 0, sizeof *handle);
    handle->engine = engine;
    return init_poll(loop, &handle->poll, handle, pelton_engine_fd(engine));
}

static void rest_engine(pelton_uv_engine_t *handle) {
    uv_poll_stop(&handle->poll);
    pelton_engine_disarm(handle->engine);
}

static void on_engine_readable(uv_poll_t *poll, int status, int events) {
    pelton_uv_engine_t *handle = (pelton_uv_engine_t *)poll->data;
    uint64_t began = uv_hrtime();
    pelton_file_completion completion;
    size_t taken;
    (void)status;
    (void)events;
    handle->in_tick = 1;
    while (handle->in_flight > 0) {
        if (pelton_engine_completions(handle->engine, PELTON_NO_WAIT, &completion, 1, &taken) != PELTON_OK) break;
        pelton_uv_operation_t *request = (pelton_uv_operation_t *)(uintptr_t)completion.token;
        handle->in_flight--;
        request->cb(request, &completion);
        if (uv_is_closing((uv_handle_t *)poll)) return;
        /* Not armed, so the descriptor is still readable, for the next tick. */
        if (handle->in_flight > 0 && uv_hrtime() - began >= TICK_NS) {
            handle->in_tick = 0;
            return;
        }
    }
    handle->in_tick = 0;
    if (handle->in_flight == 0) {
        rest_engine(handle);
        return;
    }
    /* After an error, for want of memory or threads, the descriptor is readable, and the next tick tries again. */
    (void)!pelton_engine_arm(handle->engine);
}

int pelton_uv_engine_submit(pelton_uv_engine_t *handle, pelton_uv_operation_t *requests, pelton_operation *operations,
                            size_t count, size_t *taken, pelton_uv_operation_cb cb) {
    *taken = 0;
    for (size_t i = 0; i < count; i++) {
        requests[i].handle = handle;
        requests[i].cb = cb;
        operations[i].token = (uint64_t)(uintptr_t)&requests[i];
    }
    /* In a tick, its end does this. */
    if (handle->in_flight == 0 && !handle->in_tick) {
        int code = from_uv(uv_poll_start(&handle->poll, UV_READABLE, on_engine_readable));
        if (code != PELTON_OK) return code;
        (void)!pelton_engine_arm(handle->engine);
    }
    int code = pelton_engine_submit(handle->engine, operations, count, taken);
    handle->in_flight += *taken;
    if (handle->in_flight == 0 && !handle->in_tick) rest_engine(handle);
    return code;
}

int pelton_uv_operation_cancel(pelton_uv_operation_t *request) {
    return pelton_engine_cancel(request->handle->engine, (uint64_t)(uintptr_t)request);
}

static void on_engine_closed(uv_handle_t *poll) {
    pelton_uv_engine_t *handle = (pelton_uv_engine_t *)poll->data;
    pelton_close(handle->engine);
    if (handle->close_cb) handle->close_cb(handle);
}

void pelton_uv_engine_close(pelton_uv_engine_t *handle, pelton_uv_engine_close_cb close_cb) {
    handle->close_cb = close_cb;
    uv_close((uv_handle_t *)&handle->poll, on_engine_closed);
}
