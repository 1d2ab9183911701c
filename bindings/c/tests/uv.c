/* pelton_uv.h: both ends in libuv loops, whatever is done in their callbacks, and what they are told of each other. */
#include "check.h"
#include "pelton_uv.h"

enum { MESSAGES = 50000 };

/* What a test keeps: the field data of its handles. */
typedef struct notes {
    uint32_t messages, rooms, ends, closings, turns;
    int code;                     /* of the last end */
    pelton_uv_receiver *receiver; /* whom to stop or close */
    pelton_uv_sender *sender;
} notes;

static size_t size_of(uint32_t number) {
    return 4 + number % 496;
}

/* Heap memory for each handle, freed when libuv lets go of it, so that a use after that is found. */
static void free_receiver(pelton_uv_receiver *handle) {
    ((notes *)handle->data)->closings++;
    free(handle);
}

static void free_sender(pelton_uv_sender *handle) {
    ((notes *)handle->data)->closings++;
    free(handle);
}

static pelton_uv_receiver *new_receiver(uv_loop_t *loop, pelton_receiver *receiver, notes *own) {
    pelton_uv_receiver *handle = (pelton_uv_receiver *)malloc(sizeof *handle);
    CHECK(handle);
    OK(pelton_uv_receiver_init(loop, handle, receiver));
    handle->data = own;
    own->receiver = handle;
    return handle;
}

static pelton_uv_sender *new_sender(uv_loop_t *loop, pelton_sender *sender, notes *own) {
    pelton_uv_sender *handle = (pelton_uv_sender *)malloc(sizeof *handle);
    CHECK(handle);
    OK(pelton_uv_sender_init(loop, handle, sender));
    handle->data = own;
    own->sender = handle;
    return handle;
}

/* Both ends in one loop, with a small lane. */
static void both_ends(uv_loop_t *loop, notes *own) {
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_sender *sender;
    pelton_receiver *receiver;
    options.capacity = 64 << 10;
    CHECK(uv_loop_init(loop) == 0);
    memset(own, 0, sizeof *own);
    OK(pelton_threads(&options, &sender, &receiver));
    new_sender(loop, sender, own);
    new_receiver(loop, receiver, own);
}

/* Nothing is left that keeps the loop. */
static void end_loop(uv_loop_t *loop) {
    CHECK(uv_run(loop, UV_RUN_DEFAULT) == 0);
    CHECK(uv_loop_close(loop) == 0);
}

/* ---- Callbacks of several tests ---- */

static void count_in_order(pelton_uv_receiver *handle, const pelton_message *message) {
    notes *own = (notes *)handle->data;
    uint32_t found;
    memcpy(&found, message->data, sizeof found);
    CHECK(found == own->messages && message->size == size_of(found));
    own->messages++;
}

static void note_end_and_close(pelton_uv_receiver *handle, int code) {
    notes *own = (notes *)handle->data;
    own->ends++;
    own->code = code;
    pelton_uv_receiver_close(handle, free_receiver);
}

static void note_senders_end_and_close(pelton_uv_sender *handle, int code) {
    notes *own = (notes *)handle->data;
    own->ends++;
    own->code = code;
    pelton_uv_sender_close(handle, free_sender);
}

static int send_next(pelton_uv_sender *handle) {
    notes *own = (notes *)handle->data;
    char payload[500];
    memset(payload, 'x', sizeof payload);
    memcpy(payload, &own->rooms, sizeof own->rooms);
    int code = pelton_send(handle->sender, payload, size_of(own->rooms), PELTON_NO_WAIT);
    if (code == PELTON_OK) own->rooms++;
    return code;
}

static void fill(pelton_uv_sender *handle) {
    int code;
    do {
        code = send_next(handle);
    } while (code == PELTON_OK);
    ANSWERS(code, PELTON_AGAIN);
}

static void send_all_and_close(pelton_uv_sender *handle) {
    notes *own = (notes *)handle->data;
    int code = PELTON_OK;
    while (own->rooms < MESSAGES && code == PELTON_OK) {
        code = send_next(handle);
    }
    if (own->rooms == MESSAGES) {
        pelton_uv_sender_close(handle, free_sender);
    } else {
        ANSWERS(code, PELTON_AGAIN);
    }
}

static void no_message(pelton_uv_receiver *handle, const pelton_message *message) {
    (void)handle, (void)message;
    CHECK(!"a message that must not come");
}

static void no_room(pelton_uv_sender *handle) {
    (void)handle;
    CHECK(!"room that must not be told");
}

static void no_end(pelton_uv_receiver *handle, int code) {
    (void)handle;
    ANSWERS(code, PELTON_OK);
    CHECK(!"an end that must not be told");
}

static void no_senders_end(pelton_uv_sender *handle, int code) {
    (void)handle;
    ANSWERS(code, PELTON_OK);
    CHECK(!"an end that must not be told");
}

/* ---- Tests ---- */

/* A process whose loop sends everything. */
static void send_by_loop(const char *name) {
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_sender *sender;
    uv_loop_t loop;
    notes own;
    options.deadline_ns = SOON;
    options.capacity = 64 << 10;
    memset(&own, 0, sizeof own);
    CHECK(uv_loop_init(&loop) == 0);
    OK(pelton_sender_open(name, &options, &sender));
    OK(pelton_uv_sender_start(new_sender(&loop, sender, &own), 500, send_all_and_close, no_senders_end));
    end_loop(&loop);
    CHECK(own.rooms == MESSAGES && own.closings == 1);
}

/* Accepting in a loop: a uv_poll on the listener's descriptor. */
static pelton_listener *listener;

static void accept_and_receive(uv_poll_t *listening, int status, int events) {
    pelton_receiver *receiver;
    CHECK(status == 0 && events == UV_READABLE);
    int code = pelton_accept_receiver(listener, PELTON_NO_WAIT, &receiver);
    if (code == PELTON_AGAIN) return;
    OK(code);
    uv_close((uv_handle_t *)listening, NULL);
    OK(pelton_listener_close(listener));
    OK(pelton_uv_receiver_start(new_receiver(listening->loop, receiver, (notes *)listening->data), count_in_order, note_end_and_close));
}

static void messages_come_as_callbacks_in_order_between_two_processes(void) {
    char name[128];
    uv_loop_t loop;
    uv_poll_t listening;
    notes own;
    memset(&own, 0, sizeof own);
    OK(pelton_listen(place(name, "unix:%s/socket"), NULL, &listener));
    pid_t child = start(send_by_loop, name);
    CHECK(uv_loop_init(&loop) == 0);
    CHECK(uv_poll_init(&loop, &listening, pelton_listener_fd(listener)) == 0);
    listening.data = &own;
    CHECK(uv_poll_start(&listening, UV_READABLE, accept_and_receive) == 0);
    end_loop(&loop);
    ANSWERS(own.code, PELTON_CLOSED);
    CHECK(own.messages == MESSAGES && own.ends == 1 && own.closings == 1);
    finish(child);
}

int main(void) {
    static const test tests[] = {
        TEST(messages_come_as_callbacks_in_order_between_two_processes),
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
