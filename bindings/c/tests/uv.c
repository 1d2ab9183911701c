/* pelton_uv.h: both endpoints in libuv loops, whatever their callbacks do, and what is reported of the peer. */
#include "check.h"
#include "pelton_uv.h"

enum { MESSAGES = 50000 };

/* What a test keeps: the field data of its handles. */
typedef struct notes {
    uint32_t messages, rooms, ends, closings, turns;
    int code;                     /* of the last end */
    pelton_uv_receiver_t *receiver; /* whom to stop or close */
    pelton_uv_sender_t *sender;
} notes;

static size_t size_of(uint32_t number) {
    return 4 + number % 496;
}

/* Heap memory for each handle, freed when libuv lets go of it, so that a use after that is found. */
static void free_receiver(pelton_uv_receiver_t *handle) {
    ((notes *)handle->data)->closings++;
    free(handle);
}

static void free_sender(pelton_uv_sender_t *handle) {
    ((notes *)handle->data)->closings++;
    free(handle);
}

static pelton_uv_receiver_t *new_receiver(uv_loop_t *loop, pelton_receiver *receiver, notes *own) {
    pelton_uv_receiver_t *handle = (pelton_uv_receiver_t *)malloc(sizeof *handle);
    CHECK(handle);
    OK(pelton_uv_receiver_init(loop, handle, receiver));
    handle->data = own;
    own->receiver = handle;
    return handle;
}

static pelton_uv_sender_t *new_sender(uv_loop_t *loop, pelton_sender *sender, notes *own) {
    pelton_uv_sender_t *handle = (pelton_uv_sender_t *)malloc(sizeof *handle);
    CHECK(handle);
    OK(pelton_uv_sender_init(loop, handle, sender));
    handle->data = own;
    own->sender = handle;
    return handle;
}

/* Both ends in one loop, with a small lane. */
static void both_ends(uv_loop_t *loop, notes *own) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
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

static void count_in_order(pelton_uv_receiver_t *handle, const pelton_message *message) {
    notes *own = (notes *)handle->data;
    uint32_t found;
    memcpy(&found, message->data, sizeof found);
    CHECK(found == own->messages && message->size == size_of(found));
    own->messages++;
}

static void note_end_and_close(pelton_uv_receiver_t *handle, int code) {
    notes *own = (notes *)handle->data;
    own->ends++;
    own->code = code;
    CHECK(!uv_is_active((uv_handle_t *)&handle->poll));
    pelton_uv_receiver_close(handle, free_receiver);
}

static void note_senders_end_and_close(pelton_uv_sender_t *handle, int code) {
    notes *own = (notes *)handle->data;
    own->ends++;
    own->code = code;
    CHECK(!uv_is_active((uv_handle_t *)&handle->poll));
    pelton_uv_sender_close(handle, free_sender);
}

static int send_next(pelton_uv_sender_t *handle) {
    notes *own = (notes *)handle->data;
    char payload[500];
    memset(payload, 'x', sizeof payload);
    memcpy(payload, &own->rooms, sizeof own->rooms);
    int code = pelton_sender_send(handle->sender, payload, size_of(own->rooms), PELTON_NO_WAIT);
    if (code == PELTON_OK) own->rooms++;
    return code;
}

static void fill(pelton_uv_sender_t *handle) {
    int code;
    do {
        code = send_next(handle);
    } while (code == PELTON_OK);
    RETURNS(code, PELTON_AGAIN);
}

static void send_all_and_close(pelton_uv_sender_t *handle) {
    notes *own = (notes *)handle->data;
    int code = PELTON_OK;
    while (own->rooms < MESSAGES && code == PELTON_OK) {
        code = send_next(handle);
    }
    if (own->rooms == MESSAGES) {
        pelton_uv_sender_close(handle, free_sender);
    } else {
        RETURNS(code, PELTON_AGAIN);
    }
}

/* An ordinary program's: one message for each callback. */
static void send_one(pelton_uv_sender_t *handle) {
    notes *own = (notes *)handle->data;
    if (own->rooms < MESSAGES) OK(send_next(handle));
    else pelton_uv_sender_close(handle, free_sender);
}

static void no_senders_end(pelton_uv_sender_t *handle, int code);

/* The same, and it stops while it has the next message made. */
static void send_one_between_stop_and_start(pelton_uv_sender_t *handle) {
    pelton_uv_sender_stop(handle);
    send_one(handle);
    if (uv_is_closing((uv_handle_t *)&handle->poll)) return;
    OK(pelton_uv_sender_start(handle, 500, send_one_between_stop_and_start, no_senders_end));
}

static void no_message(pelton_uv_receiver_t *handle, const pelton_message *message) {
    (void)handle, (void)message;
    CHECK(!"a message that must not come");
}

static void no_room(pelton_uv_sender_t *handle) {
    (void)handle;
    CHECK(!"space that must not be reported");
}

static void no_end(pelton_uv_receiver_t *handle, int code) {
    (void)handle;
    RETURNS(code, PELTON_OK);
    CHECK(!"an end that must not be reported");
}

static void no_senders_end(pelton_uv_sender_t *handle, int code) {
    (void)handle;
    RETURNS(code, PELTON_OK);
    CHECK(!"an end that must not be reported");
}

/* ---- Tests ---- */

/* How the sender's callback sends. */
static pelton_uv_space_cb way_to_send;

/* A process whose loop sends everything. */
static void send_by_loop(const char *name) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_sender *sender;
    uv_loop_t loop;
    notes own;
    options.deadline_ns = SOON;
    options.capacity = 64 << 10;
    memset(&own, 0, sizeof own);
    CHECK(uv_loop_init(&loop) == 0);
    OK(pelton_sender_open(name, &options, &sender));
    OK(pelton_uv_sender_start(new_sender(&loop, sender, &own), 500, way_to_send, no_senders_end));
    end_loop(&loop);
    CHECK(own.rooms == MESSAGES && own.closings == 1);
}

/* Accepting in a loop: a uv_poll on the listener's descriptor. */
static pelton_listener *listener;

static void accept_and_receive(uv_poll_t *listening, int status, int events) {
    pelton_receiver *receiver;
    CHECK(status == 0 && events == UV_READABLE);
    int code = pelton_listener_accept_receiver(listener, PELTON_NO_WAIT, &receiver);
    if (code == PELTON_AGAIN) return;
    OK(code);
    uv_close((uv_handle_t *)listening, NULL);
    OK(pelton_close(listener));
    OK(pelton_uv_receiver_start(new_receiver(listening->loop, receiver, (notes *)listening->data), count_in_order, note_end_and_close));
}

static void messages_come_as_callbacks_in_order_between_two_processes(void) {
    static const pelton_uv_space_cb ways[] = {send_all_and_close, send_one, send_one_between_stop_and_start};
    for (size_t way = 0; way < sizeof ways / sizeof *ways; way++) {
        char name[128];
        uv_loop_t loop;
        uv_poll_t listening;
        notes own;
        memset(&own, 0, sizeof own);
        way_to_send = ways[way];
        OK(pelton_listener_open(place(name, "unix:%s/socket"), NULL, &listener));
        pid_t child = start(send_by_loop, name);
        CHECK(uv_loop_init(&loop) == 0);
        CHECK(uv_poll_init(&loop, &listening, pelton_listener_fd(listener)) == 0);
        listening.data = &own;
        CHECK(uv_poll_start(&listening, UV_READABLE, accept_and_receive) == 0);
        end_loop(&loop);
        RETURNS(own.code, PELTON_CLOSED);
        CHECK(own.messages == MESSAGES && own.ends == 1 && own.closings == 1);
        finish(child);
    }
}

static int turn(uv_loop_t *loop, int turns) {
    int alive = 0;
    for (int i = 0; i < turns; i++) {
        alive = uv_run(loop, UV_RUN_NOWAIT);
    }
    return alive;
}

static void count_room(pelton_uv_sender_t *handle) {
    ((notes *)handle->data)->turns++;
}

static void close_sender_on_room(pelton_uv_sender_t *handle) {
    pelton_uv_sender_close(handle, free_sender);
}

static void a_space_callback_that_sends_nothing_is_called_once_in_each_tick_with_space(void) {
    uv_loop_t loop;
    notes own;
    both_ends(&loop, &own);
    OK(pelton_uv_sender_start(own.sender, 500, count_room, no_senders_end));
    CHECK(own.turns == 0);
    turn(&loop, 5);
    CHECK(own.turns == 5);
    /* Full while it is started already, and when it is started. */
    fill(own.sender);
    turn(&loop, 5);
    CHECK(own.turns == 5);
    pelton_uv_sender_stop(own.sender);
    CHECK(uv_run(&loop, UV_RUN_DEFAULT) == 0);
    OK(pelton_uv_sender_start(own.sender, 500, no_room, no_senders_end));
    CHECK(turn(&loop, 5) != 0);
    RETURNS(pelton_uv_sender_start(own.sender, 1 << 20, no_room, no_senders_end), PELTON_TOO_LARGE);
    /* Room again: the callback is another meanwhile. */
    OK(pelton_uv_sender_start(own.sender, 500, close_sender_on_room, no_senders_end));
    OK(pelton_uv_receiver_start(own.receiver, count_in_order, note_end_and_close));
    end_loop(&loop);
    RETURNS(own.code, PELTON_CLOSED);
    CHECK(own.messages == own.rooms && own.closings == 2);
}

static void a_space_callback_that_sends_is_called_again_in_the_same_tick(void) {
    uv_loop_t loop;
    notes own;
    both_ends(&loop, &own);
    OK(pelton_uv_sender_start(own.sender, 500, send_one, no_senders_end));
    uint32_t ticks = 0, before;
    do {
        before = own.rooms;
        turn(&loop, 1);
        ticks++;
    } while (own.rooms != before);
    /* The lane is full. Each tick but the last sent several messages, even if some were interrupted. */
    CHECK(own.rooms > 100 && ticks < own.rooms);
    RETURNS(pelton_sender_send(own.sender->sender, here, 500, PELTON_NO_WAIT), PELTON_AGAIN);
    /* Nothing is to be done, so the loop would sleep. */
    struct pollfd polled = {pelton_sender_fd(own.sender->sender), POLLIN, 0};
    turn(&loop, 2);
    CHECK(poll(&polled, 1, 0) == 0);
    OK(pelton_uv_sender_start(own.sender, 500, close_sender_on_room, no_senders_end));
    OK(pelton_uv_receiver_start(own.receiver, count_in_order, note_end_and_close));
    end_loop(&loop);
    RETURNS(own.code, PELTON_CLOSED);
    CHECK(own.messages == own.rooms && own.closings == 2);
}

static void release_one(pelton_receiver *receiver) {
    pelton_message message;
    OK(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message));
    OK(pelton_receiver_release(receiver));
}

/* Starts the handle while the lane is full. Then messages are released until there is space: so little that the
 * receiver may not wake the sender for it. */
static void fill_start_and_release_some(pelton_uv_sender_t *handle) {
    notes *own = (notes *)handle->data;
    while (pelton_sender_send(handle->sender, here, 60, PELTON_NO_WAIT) == PELTON_OK) {}
    pelton_uv_sender_stop(handle);
    OK(pelton_uv_sender_start(handle, 60, count_room, no_senders_end));
    void *space;
    int code;
    do {
        release_one(own->receiver->receiver);
        code = pelton_sender_reserve(handle->sender, 60, PELTON_NO_WAIT, &space);
    } while (code == PELTON_AGAIN);
    OK(code);
    OK(pelton_sender_abort(handle->sender));
}

static void a_handle_started_in_its_callback_is_called_while_there_is_space(void) {
    uv_loop_t loop;
    notes own;
    both_ends(&loop, &own);
    OK(pelton_uv_sender_start(own.sender, 60, fill_start_and_release_some, no_senders_end));
    turn(&loop, 5);
    CHECK(own.turns >= 4);
    pelton_uv_sender_close(own.sender, free_sender);
    pelton_uv_receiver_close(own.receiver, free_receiver);
    end_loop(&loop);
    CHECK(own.closings == 2);
}

static void stop_after_ten(pelton_uv_receiver_t *handle, const pelton_message *message) {
    count_in_order(handle, message);
    if (((notes *)handle->data)->messages == 10) pelton_uv_receiver_stop(handle);
}

static void stop_and_start(pelton_uv_receiver_t *handle, const pelton_message *message) {
    count_in_order(handle, message);
    pelton_uv_receiver_stop(handle);
    OK(pelton_uv_receiver_start(handle, stop_and_start, note_end_and_close));
}

static void a_stopped_handle_gets_nothing_and_continues_where_it_stopped(void) {
    uv_loop_t loop;
    notes own;
    both_ends(&loop, &own);
    fill(own.sender);
    OK(pelton_uv_receiver_start(own.receiver, no_message, no_end));
    pelton_uv_receiver_stop(own.receiver);
    CHECK(uv_run(&loop, UV_RUN_DEFAULT) == 0);
    OK(pelton_uv_receiver_start(own.receiver, stop_after_ten, no_end));
    CHECK(own.messages == 0);
    /* Stopped, it does not keep the loop; and the lane is full. */
    CHECK(uv_run(&loop, UV_RUN_DEFAULT) == 0);
    CHECK(own.messages == 10);
    fill(own.sender);
    OK(pelton_uv_sender_start(own.sender, 500, no_room, no_senders_end));
    turn(&loop, 5);
    CHECK(own.messages == 10);
    OK(pelton_uv_sender_start(own.sender, 500, close_sender_on_room, no_senders_end));
    OK(pelton_uv_receiver_start(own.receiver, stop_and_start, note_end_and_close));
    end_loop(&loop);
    RETURNS(own.code, PELTON_CLOSED);
    CHECK(own.messages == own.rooms && own.closings == 2);
}

static void close_in_message(pelton_uv_receiver_t *handle, const pelton_message *message) {
    pelton_uv_receiver_close(handle, free_receiver);
    /* There still. */
    count_in_order(handle, message);
}

static void close_sender_in_message(pelton_uv_receiver_t *handle, const pelton_message *message) {
    notes *own = (notes *)handle->data;
    count_in_order(handle, message);
    if (own->sender) pelton_uv_sender_close(own->sender, free_sender);
    own->sender = NULL;
}

static void close_both_in_message(pelton_uv_receiver_t *handle, const pelton_message *message) {
    close_sender_in_message(handle, message);
    pelton_uv_receiver_close(handle, free_receiver);
}

static void close_both_on_room(pelton_uv_sender_t *handle) {
    pelton_uv_receiver_close(((notes *)handle->data)->receiver, free_receiver);
    pelton_uv_sender_close(handle, free_sender);
}

static void close_receiver_on_room(pelton_uv_sender_t *handle) {
    pelton_uv_receiver_close(((notes *)handle->data)->receiver, free_receiver);
    pelton_uv_sender_stop(handle);
    OK(pelton_uv_sender_start(handle, 500, count_room, note_senders_end_and_close));
}

static void close_sender_when_closed(pelton_uv_receiver_t *handle) {
    notes *own = (notes *)handle->data;
    pelton_uv_sender_close(own->sender, free_sender);
    free_receiver(handle);
}

static void close_both_nested(pelton_uv_receiver_t *handle, const pelton_message *message) {
    count_in_order(handle, message);
    pelton_uv_receiver_close(handle, close_sender_when_closed);
}

static void a_handle_can_be_closed_in_any_callback(void) {
    static const struct {
        pelton_uv_message_cb on_message;
        pelton_uv_space_cb on_room;
        uint32_t ends; /* that are reported */
        int code;
    } ways[] = {
        {close_in_message, count_room, 1, PELTON_CLOSED},
        {close_sender_in_message, NULL, 1, PELTON_CLOSED},
        {close_both_in_message, NULL, 0, 0},
        {close_both_in_message, count_room, 0, 0},
        {close_both_nested, NULL, 0, 0},
        {close_both_nested, count_room, 0, 0},
        {count_in_order, close_both_on_room, 0, 0},
        {NULL, close_both_on_room, 0, 0},
        {count_in_order, close_sender_on_room, 1, PELTON_CLOSED},
        {count_in_order, close_receiver_on_room, 1, PELTON_CLOSED},
        {NULL, close_receiver_on_room, 1, PELTON_CLOSED},
    };
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        uv_loop_t loop;
        notes own;
        both_ends(&loop, &own);
        for (int sent = 0; sent < 3; sent++) {
            OK(send_next(own.sender));
        }
        if (ways[i].on_message) OK(pelton_uv_receiver_start(own.receiver, ways[i].on_message, note_end_and_close));
        if (ways[i].on_room) OK(pelton_uv_sender_start(own.sender, 500, ways[i].on_room, note_senders_end_and_close));
        end_loop(&loop);
        CHECK(own.closings == 2 && own.ends == ways[i].ends && own.code == ways[i].code);
    }
}

static void start_returns_an_end_that_came_before(void) {
    for (int which = 0; which < 2; which++) {
        uv_loop_t loop;
        notes own;
        both_ends(&loop, &own);
        if (which == 0) {
            pelton_uv_sender_close(own.sender, free_sender);
        } else {
            pelton_uv_receiver_close(own.receiver, free_receiver);
        }
        CHECK(uv_run(&loop, UV_RUN_DEFAULT) == 0);
        if (which == 0) {
            RETURNS(pelton_uv_receiver_start(own.receiver, no_message, no_end), PELTON_CLOSED);
            pelton_uv_receiver_close(own.receiver, free_receiver);
        } else {
            RETURNS(pelton_uv_sender_start(own.sender, 500, no_room, no_senders_end), PELTON_CLOSED);
            pelton_uv_sender_close(own.sender, free_sender);
        }
        end_loop(&loop);
        CHECK(own.closings == 2);
    }
}

static pelton_receiver *unwatched;

static void fill_lose_the_receiver_and_stop(pelton_uv_sender_t *handle) {
    fill(handle);
    OK(pelton_close(unwatched));
    pelton_uv_sender_stop(handle);
}

static void no_callback_follows_a_stop_in_a_callback(void) {
    uv_loop_t loop;
    pelton_sender *sender;
    notes own;
    memset(&own, 0, sizeof own);
    CHECK(uv_loop_init(&loop) == 0);
    OK(pelton_threads(NULL, &sender, &unwatched));
    OK(pelton_uv_sender_start(new_sender(&loop, sender, &own), 500, fill_lose_the_receiver_and_stop, no_senders_end));
    CHECK(uv_run(&loop, UV_RUN_DEFAULT) == 0);
    RETURNS(pelton_uv_sender_start(own.sender, 500, NULL, no_senders_end), PELTON_CLOSED);
    pelton_uv_sender_close(own.sender, free_sender);
    end_loop(&loop);
    CHECK(own.closings == 1);
}

/* ---- What a turn is ---- */

static void close_all_after_three_turns(uv_prepare_t *prepare) {
    notes *own = (notes *)prepare->data;
    if (++own->turns < 3) return;
    uv_close((uv_handle_t *)prepare, NULL);
    pelton_uv_receiver_close(own->receiver, free_receiver);
    pelton_uv_sender_close(own->sender, free_sender);
}

static void send_another(pelton_uv_receiver_t *handle, const pelton_message *message) {
    notes *own = (notes *)handle->data;
    count_in_order(handle, message);
    OK(send_next(own->sender));
}

static void other_handles_have_their_ticks_while_messages_never_end(void) {
    uv_loop_t loop;
    uv_prepare_t prepare;
    notes own;
    both_ends(&loop, &own);
    CHECK(uv_prepare_init(&loop, &prepare) == 0);
    prepare.data = &own;
    CHECK(uv_prepare_start(&prepare, close_all_after_three_turns) == 0);
    OK(send_next(own.sender));
    OK(pelton_uv_receiver_start(own.receiver, send_another, no_end));
    end_loop(&loop);
    CHECK(own.closings == 2 && own.messages > 3);
}

static void send_one_and_release_it(pelton_uv_sender_t *handle) {
    notes *own = (notes *)handle->data;
    OK(send_next(handle));
    release_one(own->receiver->receiver);
}

static void count_timer(uv_timer_t *timer) {
    if (++((notes *)timer->data)->messages == 3) uv_close((uv_handle_t *)timer, NULL);
}

static void other_handles_have_their_ticks_while_space_never_ends(void) {
    uv_loop_t loop;
    uv_prepare_t prepare;
    uv_timer_t timer;
    notes own;
    both_ends(&loop, &own);
    CHECK(uv_timer_init(&loop, &timer) == 0 && uv_prepare_init(&loop, &prepare) == 0);
    timer.data = prepare.data = &own;
    CHECK(uv_timer_start(&timer, count_timer, 1, 1) == 0);
    OK(pelton_uv_sender_start(own.sender, 500, send_one_and_release_it, no_senders_end));
    while (own.messages < 3) {
        CHECK(uv_run(&loop, UV_RUN_ONCE) != 0);
    }
    CHECK(own.rooms > 3);
    CHECK(uv_prepare_start(&prepare, close_all_after_three_turns) == 0);
    end_loop(&loop);
    CHECK(own.closings == 2);
}

/* A byte for each turn of the parent's loop, written just before it polls. */
static int turns_begun[2];

static void announce_turn(uv_prepare_t *prepare) {
    /* The messages and the end, or the room, and each perhaps once for nothing. And there is no timer. */
    CHECK(++((notes *)prepare->data)->turns <= 7);
    CHECK(uv_backend_timeout(prepare->loop) <= 0);
    CHECK(write(turns_begun[1], "", 1) == 1);
}

/* Waits until the parent's loop has had a turn since the last time, and sleeps; then leaves it asleep for 20 ms, in
 * which timed waits of a millisecond would be 20 turns. */
static void await_sleeping_loop(void) {
    char bytes[64];
    CHECK(read(turns_begun[0], bytes, sizeof bytes) > 0);
    await_sleep(getppid());
    usleep(20000);
}

/* Sends two messages, each to a loop that sleeps. */
static void send_two_later(const char *name) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_sender *sender;
    options.deadline_ns = SOON;
    OK(pelton_sender_open(name, &options, &sender));
    for (uint32_t number = 0; number < 2; number++) {
        uint32_t payload[2] = {number, 0};
        await_sleeping_loop();
        OK(pelton_sender_send(sender, payload, size_of(number), SOON));
    }
    OK(pelton_close(sender));
}

/* Receives everything, once the sender's loop sleeps. */
static void receive_all_later(const char *name) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_receiver *receiver;
    pelton_message message;
    int code;
    options.deadline_ns = SOON;
    OK(pelton_receiver_open(name, &options, &receiver));
    await_sleeping_loop();
    while ((code = pelton_receiver_receive(receiver, SOON, &message)) == PELTON_OK) {
        OK(pelton_receiver_release(receiver));
    }
    RETURNS(code, PELTON_CLOSED);
    OK(pelton_close(receiver));
}

static void nothing_runs_while_nothing_happens(void) {
    for (int sends = 0; sends < 2; sends++) {
        char name[128];
        uv_loop_t loop;
        uv_prepare_t prepare;
        pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
        pelton_receiver *receiver;
        pelton_sender *sender;
        notes own;
        memset(&own, 0, sizeof own);
        options.capacity = 64 << 10;
        CHECK(pipe2(turns_begun, O_CLOEXEC) == 0);
        OK(pelton_listener_open(place(name, "unix:%s/socket"), &options, &listener));
        pid_t child = start(sends ? receive_all_later : send_two_later, name);
        CHECK(uv_loop_init(&loop) == 0 && uv_prepare_init(&loop, &prepare) == 0);
        prepare.data = &own;
        CHECK(uv_prepare_start(&prepare, announce_turn) == 0);
        uv_unref((uv_handle_t *)&prepare);
        if (sends) {
            OK(pelton_listener_accept_sender(listener, SOON, &sender));
            fill(new_sender(&loop, sender, &own));
            OK(pelton_uv_sender_start(own.sender, 500, close_sender_on_room, no_senders_end));
        } else {
            OK(pelton_listener_accept_receiver(listener, SOON, &receiver));
            OK(pelton_uv_receiver_start(new_receiver(&loop, receiver, &own), count_in_order, note_end_and_close));
        }
        OK(pelton_close(listener));
        CHECK(uv_run(&loop, UV_RUN_DEFAULT) == 0);
        CHECK(own.closings == 1);
        CHECK(sends || own.messages == 2);
        uv_close((uv_handle_t *)&prepare, NULL);
        end_loop(&loop);
        finish(child);
        CHECK(close(turns_begun[0]) == 0 && close(turns_begun[1]) == 0);
    }
}

/* ---- Deaths and forks ---- */

static void send_ten_and_stand(const char *name) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_sender *sender;
    notes own;
    uv_loop_t loop;
    options.deadline_ns = SOON;
    memset(&own, 0, sizeof own);
    CHECK(uv_loop_init(&loop) == 0);
    OK(pelton_sender_open(name, &options, &sender));
    pelton_sender_info info;
    info.struct_bytes = sizeof info;
    OK(pelton_sender_get_info(sender, &info));
    /* The successor goes on where the first stopped. */
    own.rooms = info.next_seq - 1;
    pelton_uv_sender_t *handle = new_sender(&loop, sender, &own);
    for (int i = 0; i < 10; i++) {
        OK(send_next(handle));
    }
    pause();
}

static pid_t dying;
static uv_work_t resuming;

static void kill_after_tens(pelton_uv_receiver_t *handle, const pelton_message *message) {
    count_in_order(handle, message);
    if (((notes *)handle->data)->messages % 10 == 0) kill_now(dying);
}

static void resume(uv_work_t *work) {
    pelton_uv_receiver_t *handle = (pelton_uv_receiver_t *)work->data;
    OK(pelton_receiver_resume(handle->receiver, SOON));
}

static void start_again(uv_work_t *work, int status) {
    CHECK(status == 0);
    OK(pelton_uv_receiver_start((pelton_uv_receiver_t *)work->data, kill_after_tens, note_end_and_close));
}

static const char *successors_name;

static void resume_by_work(pelton_uv_receiver_t *handle, int code) {
    RETURNS(code, PELTON_PEER_DIED);
    CHECK(strstr(pelton_error_detail(), "died without closing"));
    dying = start(send_ten_and_stand, successors_name);
    resuming.data = handle;
    CHECK(uv_queue_work(handle->poll.loop, &resuming, resume, start_again) == 0);
}

static void a_killed_sender_is_reported_and_its_successor_continues(void) {
    char name[128];
    uv_loop_t loop;
    pelton_receiver *receiver;
    notes own;
    memset(&own, 0, sizeof own);
    OK(pelton_listener_open(successors_name = place(name, "unix:%s/socket"), NULL, &listener));
    dying = start(send_ten_and_stand, name);
    OK(pelton_listener_accept_receiver(listener, SOON, &receiver));
    CHECK(uv_loop_init(&loop) == 0);
    OK(pelton_uv_receiver_start(new_receiver(&loop, receiver, &own), kill_after_tens, resume_by_work));
    end_loop(&loop);
    OK(pelton_close(listener));
    RETURNS(own.code, PELTON_PEER_DIED);
    CHECK(own.messages == 20 && own.closings == 1);
}

static void receive_nothing(const char *name) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_receiver *receiver;
    options.deadline_ns = SOON;
    OK(pelton_receiver_open(name, &options, &receiver));
    pause();
}

static void kill_receiver(uv_prepare_t *prepare) {
    /* The next step of the loop is to sleep. */
    kill_now(dying);
    uv_close((uv_handle_t *)prepare, NULL);
}

static void tell_a_killed_receiver(int full) {
    char name[128];
    uv_loop_t loop;
    uv_prepare_t prepare;
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_sender *sender;
    notes own;
    memset(&own, 0, sizeof own);
    options.capacity = 64 << 10;
    OK(pelton_listener_open(place(name, "unix:%s/socket"), &options, &listener));
    dying = start(receive_nothing, name);
    OK(pelton_listener_accept_sender(listener, SOON, &sender));
    OK(pelton_close(listener));
    CHECK(uv_loop_init(&loop) == 0 && uv_prepare_init(&loop, &prepare) == 0);
    CHECK(uv_prepare_start(&prepare, kill_receiver) == 0);
    new_sender(&loop, sender, &own);
    if (full) fill(own.sender);
    OK(pelton_uv_sender_start(own.sender, 500, full ? no_room : NULL, note_senders_end_and_close));
    end_loop(&loop);
    RETURNS(own.code, PELTON_PEER_DIED);
    CHECK(own.ends == 1 && own.closings == 1);
}

static void a_killed_receiver_is_reported_also_to_an_idle_sender(void) {
    for (int full = 0; full < 2; full++) {
        tell_a_killed_receiver(full);
    }
}

static void a_forked_child_closes_its_handles_and_the_parents_go_on(void) {
    uv_loop_t loop;
    notes own;
    both_ends(&loop, &own);
    OK(pelton_uv_receiver_start(own.receiver, count_in_order, note_end_and_close));
    OK(send_next(own.sender));
    pelton_uv_receiver_stop(own.receiver);
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(200);
        CHECK(uv_loop_fork(&loop) == 0);
        RETURNS(pelton_uv_receiver_start(own.receiver, no_message, no_end), PELTON_FORKED);
        RETURNS(pelton_uv_sender_start(own.sender, 500, no_room, no_senders_end), PELTON_FORKED);
        pelton_uv_receiver_close(own.receiver, free_receiver);
        pelton_uv_sender_close(own.sender, free_sender);
        end_loop(&loop);
        CHECK(own.closings == 2);
        _exit(0);
    }
    finish(child);
    OK(pelton_uv_receiver_start(own.receiver, count_in_order, note_end_and_close));
    OK(pelton_uv_sender_start(own.sender, 500, send_all_and_close, note_senders_end_and_close));
    end_loop(&loop);
    RETURNS(own.code, PELTON_CLOSED);
    CHECK(own.messages == MESSAGES && own.ends == 1 && own.closings == 2);
}

/* ---- What else is natural with it ---- */

static pelton_held *held;
static uv_work_t releasing;

static void release_elsewhere(uv_work_t *work) {
    (void)work;
    OK(pelton_close(held));
}

static void hold_the_first(pelton_uv_receiver_t *handle, const pelton_message *message) {
    notes *own = (notes *)handle->data;
    count_in_order(handle, message);
    if (own->messages == 1) OK(pelton_receiver_hold(handle->receiver, &held));
    /* All of the lane is behind the first, so there is no room before it is released. */
    if (own->messages == own->rooms) {
        OK(pelton_uv_sender_start(own->sender, 500, close_sender_on_room, no_senders_end));
        CHECK(uv_queue_work(handle->poll.loop, &releasing, release_elsewhere, NULL) == 0);
    }
}

static void a_held_message_is_released_on_another_thread(void) {
    uv_loop_t loop;
    notes own;
    both_ends(&loop, &own);
    fill(own.sender);
    OK(pelton_uv_receiver_start(own.receiver, hold_the_first, note_end_and_close));
    end_loop(&loop);
    RETURNS(own.code, PELTON_CLOSED);
    CHECK(own.messages == own.rooms && own.closings == 2);
}

static void take_what_came_along(pelton_uv_receiver_t *handle, const pelton_message *message) {
    int fd;
    size_t count;
    char text[4];
    CHECK(message->descriptor_count == 1);
    OK(pelton_receiver_take_descriptors(handle->receiver, &fd, 1, &count));
    CHECK(count == 1 && read(fd, text, sizeof text) == 4 && memcmp(text, "here", 4) == 0);
    close(fd);
    uv_stop(handle->poll.loop);
}

static void descriptors_come_along_and_the_loop_can_be_stopped(void) {
    uv_loop_t loop;
    notes own;
    int ends[2];
    both_ends(&loop, &own);
    CHECK(pipe(ends) == 0 && write(ends[1], "here", 4) == 4);
    OK(pelton_sender_send_descriptors(own.sender->sender, "x", 1, ends, 1, PELTON_NO_WAIT));
    OK(pelton_uv_receiver_start(own.receiver, take_what_came_along, note_end_and_close));
    /* Stopped, it is alive, and goes on with the next run. */
    CHECK(uv_run(&loop, UV_RUN_DEFAULT) != 0);
    pelton_uv_sender_close(own.sender, free_sender);
    end_loop(&loop);
    RETURNS(own.code, PELTON_CLOSED);
    CHECK(own.closings == 2);
    close(ends[0]);
    close(ends[1]);
}

int main(void) {
    static const test tests[] = {
        TEST(messages_come_as_callbacks_in_order_between_two_processes),
        TEST(a_space_callback_that_sends_nothing_is_called_once_in_each_tick_with_space),
        TEST(a_space_callback_that_sends_is_called_again_in_the_same_tick),
        TEST(a_handle_started_in_its_callback_is_called_while_there_is_space),
        TEST(a_stopped_handle_gets_nothing_and_continues_where_it_stopped),
        TEST(a_handle_can_be_closed_in_any_callback),
        TEST(start_returns_an_end_that_came_before),
        TEST(no_callback_follows_a_stop_in_a_callback),
        TEST(other_handles_have_their_ticks_while_messages_never_end),
        TEST(other_handles_have_their_ticks_while_space_never_ends),
        TEST(nothing_runs_while_nothing_happens),
        TEST(a_killed_sender_is_reported_and_its_successor_continues),
        TEST(a_killed_receiver_is_reported_also_to_an_idle_sender),
        TEST(a_forked_child_closes_its_handles_and_the_parents_go_on),
        TEST(a_held_message_is_released_on_another_thread),
        TEST(descriptors_come_along_and_the_loop_can_be_stopped),
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
