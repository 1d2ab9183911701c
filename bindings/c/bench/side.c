/* One side of the benchmark as a C program, through include/pelton.h: the loop of a pass, and a client and a service.
 *
 * It is linked with libpelton.so, so each call of pelton's goes through the PLT, as an installed program's does. With
 * SIDE_UV it also has the sides of a stream in libuv's loop, through bindings/c/pelton_uv.c. */
#include "side.h"

#include <sys/epoll.h>

#include "pelton.h"
#ifdef SIDE_UV
#include "pelton_uv.c"
#endif

static int fail(struct side *side, const char *what, int code) {
    snprintf(side->error, sizeof side->error, "%s: %s: %s", what, pelton_code_text(code), pelton_error_detail());
    return -1;
}

/* ---- Sending and receiving, waiting in the call or in an epoll of our own ---------------------------------------- */

static int watch(int *epoll, int fd) {
    struct epoll_event event = {.events = EPOLLIN};
    *epoll = epoll_create1(EPOLL_CLOEXEC);
    return *epoll < 0 || epoll_ctl(*epoll, EPOLL_CTL_ADD, fd, &event) != 0 ? -1 : 0;
}

static void sleep_in(int epoll) {
    struct epoll_event event;
    (void)epoll_wait(epoll, &event, 1, -1);
}

__attribute__((noinline)) static int send_from_loop(struct side *side, const void *data, size_t size) {
    int code;
    while ((code = pelton_sender_send(side->sender, data, size, PELTON_NO_WAIT)) == PELTON_AGAIN) {
        code = pelton_sender_arm(side->sender, size);
        if (code == PELTON_OK) {
            sleep_in(side->sender_epoll);
            pelton_sender_disarm(side->sender);
        } else if (code != PELTON_READY) {
            break;
        }
    }
    return code;
}

static int send_bytes(struct side *side, const void *data, size_t size) {
    int code = side->how == EPOLL ? send_from_loop(side, data, size) : pelton_sender_send(side->sender, data, size, PELTON_FOREVER);
    return code == PELTON_OK ? 0 : fail(side, "sending", code);
}

/* Sends message n. */
static int send_one(struct side *side, size_t size, uint64_t n) {
    if (send_bytes(side, payload(side, n), size) != 0) return -1;
    sent(side, n);
    return 0;
}

/* Repeats the call until there is a message, and waits in between. */
#define RECEIVE_FROM_LOOP(side, code, call)                          \
    while ((code = (call)) == PELTON_AGAIN) {                        \
        code = pelton_receiver_arm((side)->receiver);                \
        if (code == PELTON_OK) {                                     \
            sleep_in((side)->receiver_epoll);                        \
            pelton_receiver_disarm((side)->receiver);                \
        } else if (code != PELTON_READY) {                           \
            break;                                                   \
        }                                                            \
    }

__attribute__((noinline)) static int copy_from_loop(struct side *side, size_t *size) {
    int code;
    RECEIVE_FROM_LOOP(side, code, pelton_receiver_receive_copy(side->receiver, side->buffer, side->size_max, PELTON_NO_WAIT, size));
    return code;
}

__attribute__((noinline)) static int receive_from_loop(struct side *side, pelton_message *message) {
    int code;
    RECEIVE_FROM_LOOP(side, code, pelton_receiver_receive(side->receiver, PELTON_NO_WAIT, message));
    return code;
}

/* Copies message n to the buffer, and compares it. */
static int copy_one(struct side *side, const struct pass *pass, uint64_t n, size_t *size) {
    int code = side->how == EPOLL
                   ? copy_from_loop(side, size)
                   : pelton_receiver_receive_copy(side->receiver, side->buffer, side->size_max, PELTON_FOREVER, size);
    return code == PELTON_OK ? check(side, pass, n, side->buffer, *size) : fail(side, "receiving", code);
}

/* Compares message n in place. */
static int check_in_place(struct side *side, const struct pass *pass, uint64_t n, size_t *size) {
    pelton_message message;
    int code = side->how == EPOLL ? receive_from_loop(side, &message) : pelton_receiver_receive(side->receiver, PELTON_FOREVER, &message);
    if (code != PELTON_OK) return fail(side, "receiving", code);
    *size = message.size;
    code = check(side, pass, n, message.data, message.size);
    int released = pelton_receiver_release(side->receiver);
    return released == PELTON_OK ? code : fail(side, "releasing", released);
}

static int receive_one(struct side *side, const struct pass *pass, uint64_t n, size_t *size) {
    return side->in_place ? check_in_place(side, pass, n, size) : copy_one(side, pass, n, size);
}

/* ---- A side's part in a pass ------------------------------------------------------------------------------------- */

static int send_all(struct side *side, struct pass *pass) {
    uint64_t bytes = 0;
    for (uint64_t n = 0; n < pass->count; n++) {
        size_t size = pass->warms_up ? side->size_max : next_size(side);
        work(side, pass);
        if (send_one(side, size, n) != 0) return -1;
        bytes += size;
    }
    pass->bytes = bytes;
    return 0;
}

static int receive_all(struct side *side, struct pass *pass) {
    uint64_t bytes = 0;
    for (uint64_t n = 0; n < pass->count; n++) {
        size_t size;
        if (receive_one(side, pass, n, &size) != 0) return -1;
        work(side, pass);
        bytes += size;
    }
    pass->bytes = bytes;
    return 0;
}

static int other_size(struct side *side, uint64_t n, size_t size, size_t received) {
    snprintf(side->error, sizeof side->error, "round %llu was sent with %zu bytes and returned with %zu", (unsigned long long)n,
             size, received);
    return -1;
}

static void report_time(const struct pass *pass, uint64_t start, uint64_t delay_ns) {
    uint64_t took = now_ns() - start;
    pass->timed(pass->of, took > 2 * delay_ns ? took - 2 * delay_ns : 0);
}

static int ask_one(struct side *side, const struct pass *pass, size_t size, uint64_t n, uint64_t delay_ns) {
    size_t received;
    delay(delay_ns);
    if (send_one(side, size, n) != 0 || copy_one(side, pass, n, &received) != 0) return -1;
    return received == size ? 0 : other_size(side, n, size, received);
}

static int ask_all(struct side *side, struct pass *pass) {
    uint64_t delay_ns = pass->warms_up ? 0 : side->delay_ns, bytes = 0;
    for (uint64_t n = 0; n < pass->count; n++) {
        size_t size = pass->warms_up ? side->size_max : next_size(side);
        bytes += size;
        if (pass->timed != NULL) {
            uint64_t start = now_ns();
            if (ask_one(side, pass, size, n, delay_ns) != 0) return -1;
            report_time(pass, start, delay_ns);
        } else if (ask_one(side, pass, size, n, delay_ns) != 0) {
            return -1;
        }
    }
    pass->bytes = bytes;
    return 0;
}

/* Sends the copied bytes back. */
static int answer_all(struct side *side, struct pass *pass) {
    uint64_t delay_ns = pass->warms_up ? 0 : side->delay_ns, bytes = 0;
    for (uint64_t n = 0; n < pass->count; n++) {
        size_t size;
        if (copy_one(side, pass, n, &size) != 0) return -1;
        delay(delay_ns);
        if (send_bytes(side, side->buffer, size) != 0) return -1;
        bytes += size;
    }
    pass->bytes = bytes;
    return 0;
}

#ifdef SIDE_UV
/* ---- A stream in libuv's loop: a pass is a uv_run, which returns when no handle is active ------------------------ */

static struct {
    uv_loop_t loop;
    pelton_uv_sender_t sender;
    pelton_uv_receiver_t receiver;
    struct side *side;
    struct pass *pass;
    uint64_t n; /* the next message */
    uint64_t bytes;
    const void *unsent; /* a message that waits for free space, */
    size_t size;        /* and the size of the last message sent */
    int code;           /* the pass's */
} uv;

static void end_uv_pass(int code) {
    uv.code = code;
    if (uv.sender.sender != NULL) pelton_uv_sender_stop(&uv.sender);
    if (uv.receiver.receiver != NULL) pelton_uv_receiver_stop(&uv.receiver);
}

static void on_sender_end(pelton_uv_sender_t *handle, int code) {
    (void)handle;
    end_uv_pass(fail(uv.side, "sending", code));
}

static void on_receiver_end(pelton_uv_receiver_t *handle, int code) {
    (void)handle;
    end_uv_pass(fail(uv.side, "receiving", code));
}

/* Sends the stream's next message, and ends the pass after the last one. 1: it is sent, and another follows. */
static int uv_send_next(pelton_uv_sender_t *handle) {
    if (uv.unsent == NULL) {
        uv.size = uv.pass->warms_up ? uv.side->size_max : next_size(uv.side);
        work(uv.side, uv.pass);
        uv.unsent = payload(uv.side, uv.n);
    }
    int code = pelton_sender_send(handle->sender, uv.unsent, uv.size, PELTON_NO_WAIT);
    if (code == PELTON_AGAIN) return 0;
    if (code != PELTON_OK) {
        end_uv_pass(fail(uv.side, "sending", code));
        return 0;
    }
    uv.unsent = NULL;
    sent(uv.side, uv.n);
    uv.bytes += uv.size;
    if (++uv.n < uv.pass->count) return 1;
    end_uv_pass(0);
    return 0;
}

static void on_free_space(pelton_uv_sender_t *handle) { (void)uv_send_next(handle); }

static void on_free_space_for_many(pelton_uv_sender_t *handle) {
    /* For as long as a receiver's tick: it reads the clock after 1, 2, 4, ... messages. */
    uint64_t began = now_ns();
    for (uint64_t i = 1, check_at = 1; uv_send_next(handle); i++) {
        if (i < check_at) continue;
        if (now_ns() - began >= TICK_NS) return;
        check_at *= 2;
    }
}

/* Compares the message: in place, or copied out as in all sides with messages of one size. */
static void on_message(pelton_uv_receiver_t *handle, const pelton_message *message) {
    const void *data = message->data;
    (void)handle;
    if (!uv.side->in_place) {
        if (message->size > uv.side->size_max) {
            end_uv_pass(fail(uv.side, "copying", PELTON_TOO_SMALL));
            return;
        }
        data = memcpy(uv.side->buffer, data, message->size);
    }
    if (check(uv.side, uv.pass, uv.n, data, message->size) != 0) {
        end_uv_pass(-1);
        return;
    }
    work(uv.side, uv.pass);
    uv.bytes += message->size;
    if (++uv.n == uv.pass->count) end_uv_pass(0);
}

static int uv_open(struct side *side) {
    uv.side = side;
    int code = uv_loop_init(&uv.loop) == 0 ? PELTON_OK : PELTON_SYSTEM;
    if (code == PELTON_OK && side->sender != NULL) code = pelton_uv_sender_init(&uv.loop, &uv.sender, side->sender);
    if (code == PELTON_OK && side->receiver != NULL) code = pelton_uv_receiver_init(&uv.loop, &uv.receiver, side->receiver);
    return code;
}

static int uv_pass(struct side *side, struct pass *pass) {
    uv.pass = pass;
    uv.n = uv.bytes = 0;
    uv.unsent = NULL;
    uv.code = 0;
    if (pass->count == 0) return 0;
    int code = side->role == SENDER
                   ? pelton_uv_sender_start(&uv.sender, side->size_max,
                                            side->how == UV ? on_free_space : on_free_space_for_many, on_sender_end)
                   : pelton_uv_receiver_start(&uv.receiver, on_message, on_receiver_end);
    if (code != PELTON_OK) return fail(side, "starting", code);
    uv_run(&uv.loop, UV_RUN_DEFAULT);
    pass->bytes = uv.bytes;
    return uv.code;
}

static void uv_close_all(void) {
    if (uv.sender.sender != NULL) pelton_uv_sender_close(&uv.sender, NULL);
    if (uv.receiver.receiver != NULL) pelton_uv_receiver_close(&uv.receiver, NULL);
    uv_run(&uv.loop, UV_RUN_DEFAULT);
    uv_loop_close(&uv.loop);
}
#endif

/* ---- Calls. The client reads a reply in place, and the service a request ----------------------------------------- */

/* The next completion, from the loop: without one, busy-polls for some microseconds, then arms and sleeps. */
static int await_in_loop(struct side *side, pelton_completion *reply) {
    for (;;) {
        int code = pelton_client_await(side->client, PELTON_NO_WAIT, reply);
        if (code == PELTON_OK) return code;
        if (code == PELTON_AGAIN) code = pelton_client_poll(side->client);
        if (code == PELTON_AGAIN) {
            code = pelton_client_arm(side->client);
            if (code == PELTON_OK) {
                sleep_in(side->receiver_epoll);
                pelton_client_disarm(side->client);
            }
        }
        if (code < 0) return code;
    }
}

/* One call. The reply is valid until side_release_reply. */
int side_call(struct side *side, const void *request, size_t size, const void **reply, size_t *reply_size) {
    pelton_completion completion;
    uint64_t number;
    int code;
    if (side->how == EPOLL) {
        code = pelton_client_submit(side->client, request, size, 0, PELTON_FOREVER, &number);
        if (code == PELTON_OK) code = await_in_loop(side, &completion);
    } else {
        code = pelton_client_call(side->client, request, size, PELTON_FOREVER, &completion);
    }
    if (code != PELTON_OK) return fail(side, "calling", code);
    if (completion.outcome != PELTON_REPLY) {
        snprintf(side->error, sizeof side->error, "a call ended with outcome %u, wanted a reply", completion.outcome);
        return -1;
    }
    *reply = completion.data;
    *reply_size = completion.size;
    return 0;
}

int side_release_reply(struct side *side) {
    int code = pelton_client_release(side->client);
    return code == PELTON_OK ? 0 : fail(side, "releasing a reply", code);
}

/* Notifies the service that a pass is over. */
int side_end_pass(struct side *side) {
    int code = pelton_client_notify(side->client, NULL, 0, PELTON_FOREVER);
    return code == PELTON_OK ? 0 : fail(side, "notifying", code);
}

/* Replies to each request with its own bytes, until the client's pass is over. */
int side_serve(struct side *side, uint64_t *count, uint64_t *bytes) {
    *count = *bytes = 0;
    for (;;) {
        pelton_request request;
        int code = pelton_service_receive(side->service, PELTON_FOREVER, &request);
        if (code != PELTON_OK) return fail(side, "receiving", code);
        int is_call = request.responder != NULL;
        if (is_call) {
            code = pelton_responder_reply(request.responder, request.data, request.size);
            if (code != PELTON_OK) return fail(side, "replying", code);
            *count += 1;
            *bytes += request.size;
        }
        pelton_service_release(side->service);
        if (!is_call) return 0;
    }
}

static int open_client(struct side *side) {
    pelton_client_options options = PELTON_CLIENT_OPTIONS_INIT;
    options.capacity = side->capacity;
    options.wait = side->how == SPIN ? PELTON_SPIN : PELTON_BLOCK;
    options.deadline_ns = pelton_deadline(side->connect_ns);
    return pelton_client_open(side->forward_name, &options, &side->client);
}

static int open_service(struct side *side) {
    pelton_service_options options = PELTON_SERVICE_OPTIONS_INIT;
    options.capacity = side->capacity;
    options.wait = side->how == SPIN ? PELTON_SPIN : PELTON_BLOCK;
    return pelton_service_open(side->forward_name, &options, &side->service);
}

/* ---- For the bench ----------------------------------------------------------------------------------------------- */

static int open_sender(struct side *side, const pelton_channel_options *options, const char *name, int first) {
    if (!first) return pelton_sender_open(name, options, &side->sender);
    pelton_listener *listener;
    pelton_channel_options listening = *options;
    listening.deadline_ns = 0; /* accepting has it */
    int code = pelton_listener_open(name, &listening, &listener);
    if (code != PELTON_OK) return code;
    code = pelton_listener_accept_sender(listener, options->deadline_ns, &side->sender);
    pelton_close(listener);
    return code;
}

static int open_receiver(struct side *side, const pelton_channel_options *options, const char *name, int first) {
    if (!first) return pelton_receiver_open(name, options, &side->receiver);
    pelton_listener *listener;
    pelton_channel_options listening = *options;
    listening.deadline_ns = 0; /* accepting has it */
    int code = pelton_listener_open(name, &listening, &listener);
    if (code != PELTON_OK) return code;
    code = pelton_listener_accept_receiver(listener, options->deadline_ns, &side->receiver);
    pelton_close(listener);
    return code;
}

/* Connects, waiting for the other side. Returns 0, or -1 with the reason in side->error. */
int side_open(struct side *side) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    options.wait = side->how == SPIN ? PELTON_SPIN : PELTON_BLOCK;
    options.capacity = side->capacity;
    options.deadline_ns = pelton_deadline(side->connect_ns);
    int code = PELTON_OK;
    switch (side->role) {
    case SENDER: code = open_sender(side, &options, side->forward_name, 0); break;
    case RECEIVER: code = open_receiver(side, &options, side->forward_name, 1); break;
    case ASKER:
        code = open_sender(side, &options, side->forward_name, 0);
        if (code == PELTON_OK) code = open_receiver(side, &options, side->backward_name, 0);
        break;
    case ANSWERER:
        code = open_receiver(side, &options, side->forward_name, 1);
        if (code == PELTON_OK) code = open_sender(side, &options, side->backward_name, 1);
        break;
    case CLIENT: code = open_client(side); break;
    case SERVICE: code = open_service(side); break;
    }
    if (code != PELTON_OK) return fail(side, "connecting", code);
#ifdef SIDE_UV
    if (side->how >= UV && (code = uv_open(side)) != PELTON_OK) return fail(side, "preparing libuv's loop", code);
#endif
    if (side->how == EPOLL && ((side->sender != NULL && watch(&side->sender_epoll, pelton_sender_fd(side->sender)) != 0) ||
                               (side->receiver != NULL && watch(&side->receiver_epoll, pelton_receiver_fd(side->receiver)) != 0) ||
                               (side->client != NULL && watch(&side->receiver_epoll, pelton_client_fd(side->client)) != 0))) {
        snprintf(side->error, sizeof side->error, "watching with epoll: %s", strerror(errno));
        return -1;
    }
    return 0;
}

/* Makes one pass. Returns 0, or -1 with the reason in side->error. */
int side_pass(struct side *side, struct pass *pass) {
    side->seed = 1;
    begin(side);
#ifdef SIDE_UV
    if (side->how >= UV) return uv_pass(side, pass);
#endif
    switch (side->role) {
    case SENDER: return send_all(side, pass);
    case RECEIVER: return receive_all(side, pass);
    case ASKER: return ask_all(side, pass);
    default: return answer_all(side, pass);
    }
}

void side_close(struct side *side) {
#ifdef SIDE_UV
    if (side->how >= UV) {
        uv_close_all();
        return;
    }
#endif
    pelton_close(side->sender);
    pelton_close(side->receiver);
    pelton_close(side->client);
    pelton_close(side->service);
}
