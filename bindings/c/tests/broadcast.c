/* One publisher, many subscribers: each policy, in processes, threads and event loops; in a directory, with durable
 * subscriptions; ends; the caller's mistakes. */
#include "check.h"

enum { MESSAGES = 20000, CAPACITY = 64 << 10 };

static pelton_publisher *published(const char *name) {
    pelton_publisher_options options = PELTON_PUBLISHER_OPTIONS_INIT;
    pelton_publisher *publisher;
    options.capacity = CAPACITY;
    OK(pelton_publisher_open(name, &options, &publisher));
    return publisher;
}

static pelton_subscriber *joined(pelton_publisher *publisher, uint32_t policy) {
    pelton_subscriber_options options = PELTON_SUBSCRIBER_OPTIONS_INIT;
    pelton_subscriber *subscriber;
    options.policy = policy;
    OK(pelton_publisher_subscriber(publisher, &options, &subscriber));
    return subscriber;
}

/* Receives what has this text, and was not preceded by others. */
static void receives(pelton_subscriber *subscriber, const char *text, uint64_t number, uint64_t missed) {
    pelton_delivery delivery;
    OK(pelton_subscriber_receive(subscriber, SOON, &delivery));
    CHECK(delivery.size == strlen(text) && memcmp(delivery.data, text, delivery.size) == 0);
    CHECK(delivery.number == number && delivery.missed == missed);
    OK(pelton_subscriber_release(subscriber));
}

static void sends(pelton_publisher *publisher, const char *text) {
    OK(pelton_publisher_send(publisher, text, strlen(text), SOON));
}

static pelton_subscriber_state only_state(pelton_publisher *publisher) {
    pelton_subscriber_state state;
    size_t count = 0;
    OK(pelton_publisher_subscribers(publisher, &state, 1, &count));
    CHECK(count == 1);
    return state;
}

/* Receives until the publisher has closed: each message is received or counted as missed, in order. Its first four
 * bytes are its number. */
static uint64_t receives_all(const char *name, uint32_t policy) {
    pelton_subscriber_options options = PELTON_SUBSCRIBER_OPTIONS_INIT;
    pelton_subscriber_info info;
    pelton_subscriber *subscriber;
    pelton_delivery delivery;
    uint64_t received = 0, missed = 0;
    int code;
    options.policy = policy;
    options.deadline_ns = SOON;
    OK(pelton_subscriber_open(name, &options, &subscriber));
    while ((code = pelton_subscriber_receive(subscriber, SOON, &delivery)) == PELTON_OK) {
        uint32_t number;
        CHECK(delivery.size == 100);
        memcpy(&number, delivery.data, sizeof number);
        received++;
        missed += delivery.missed;
        CHECK(delivery.number == received + missed && number == delivery.number);
        OK(pelton_subscriber_release(subscriber));
    }
    RETURNS(code, PELTON_CLOSED);
    info.struct_bytes = sizeof info;
    OK(pelton_subscriber_get_info(subscriber, &info));
    CHECK(info.messages == received && info.bytes == received * 100 && info.peer_pid == (uint32_t)getppid());
    CHECK(info.capacity == CAPACITY && info.message_bytes_max == CAPACITY / 2 - 32 && received + info.missed == MESSAGES);
    OK(pelton_close(subscriber));
    return received;
}

static void gates(const char *name) { CHECK(receives_all(name, PELTON_GATE) == MESSAGES); }
static void lags(const char *name) { CHECK(receives_all(name, PELTON_LAG) > 0); }
static void wants_the_latest(const char *name) { CHECK(receives_all(name, PELTON_LATEST) > 0); }

static void each_process_receives_by_its_policy(void) {
    pelton_publisher_info info;
    pelton_publisher *publisher;
    char name[128], message[100] = {0};
    place(name, "unix:%s/prices");
    pid_t pids[] = {start(gates, name), start(gates, name), start(lags, name), start(wants_the_latest, name)};
    publisher = published(name);
    OK(pelton_publisher_wait_subscribers(publisher, 4, SOON));
    for (uint32_t number = 1; number <= MESSAGES; number++) {
        memcpy(message, &number, sizeof number);
        OK(pelton_publisher_send(publisher, message, sizeof message, SOON));
    }
    OK(pelton_publisher_wait_released(publisher, SOON));
    info.struct_bytes = sizeof info;
    OK(pelton_publisher_get_info(publisher, &info));
    CHECK(info.messages == MESSAGES && info.bytes == 100 * MESSAGES && info.next_number == MESSAGES + 1 && info.subscribers == 4);
    CHECK(info.capacity == CAPACITY && info.message_bytes_max == CAPACITY / 2 - 32 && info.corrupt == 0);
    OK(pelton_close(publisher));
    for (int i = 0; i < 4; i++) finish(pids[i]);
}

static void a_subscriber_begins_where_it_chose(void) {
    static const struct {
        uint64_t start_from, first;
    } cases[] = {{0, 21}, {5, 16}, {PELTON_OLDEST, 1}, {1000, 1}};
    pelton_publisher_options options = PELTON_PUBLISHER_OPTIONS_INIT;
    pelton_publisher *publisher;
    options.history = 30;
    OK(pelton_publisher_open(NULL, &options, &publisher));
    for (int i = 0; i < 20; i++) sends(publisher, "earlier");
    for (int i = 0; i < 4; i++) {
        pelton_subscriber_options from = PELTON_SUBSCRIBER_OPTIONS_INIT;
        pelton_subscriber_info info;
        pelton_subscriber *subscriber;
        from.start_from = cases[i].start_from;
        from.policy = i % 2 ? PELTON_LAG : PELTON_GATE;
        OK(pelton_publisher_subscriber(publisher, &from, &subscriber));
        info.struct_bytes = sizeof info;
        OK(pelton_subscriber_get_info(subscriber, &info));
        CHECK(info.next_number == cases[i].first);
        if (cases[i].first <= 20) receives(subscriber, "earlier", cases[i].first, 0);
        OK(pelton_close(subscriber));
    }
    OK(pelton_close(publisher));
}

static void a_slow_gate_is_shown_and_wakes_the_publisher(void) {
    pelton_publisher *publisher = published(NULL);
    pelton_subscriber *subscriber = joined(publisher, PELTON_GATE), *newest = joined(publisher, PELTON_LATEST);
    pelton_subscriber_state states[2];
    pelton_delivery delivery;
    struct pollfd waiting = {pelton_publisher_fd(publisher), POLLIN, 0};
    char message[1000] = {0};
    uint64_t sent = 0;
    size_t count = 0;
    int code;
    while ((code = pelton_publisher_send(publisher, message, sizeof message, PELTON_NO_WAIT)) == PELTON_OK) sent++;
    RETURNS(code, PELTON_AGAIN);
    RETURNS(pelton_publisher_send(publisher, message, sizeof message, pelton_deadline(1)), PELTON_AGAIN);
    FAILS(pelton_publisher_subscribers(publisher, states, 1, &count), PELTON_TOO_SMALL, "2 subscribers");
    CHECK(count == 2);
    OK(pelton_publisher_subscribers(publisher, states, 2, &count));
    const pelton_subscriber_state *gate = &states[states[0].policy != PELTON_GATE], *latest = &states[states[0].policy == PELTON_GATE];
    CHECK(gate->policy == PELTON_GATE && gate->behind == sent && gate->holds_ns > 0 && !gate->lags && gate->lag_after_ns == 0);
    CHECK(gate->pid == (uint32_t)getpid() && gate->uid == geteuid());
    CHECK(latest->policy == PELTON_LATEST && latest->holds_ns == 0 && latest->lags);
    RETURNS(pelton_publisher_wait_released(publisher, PELTON_NO_WAIT), PELTON_AGAIN);
    RETURNS(pelton_publisher_poll(publisher, sizeof message), PELTON_AGAIN);
    OK(pelton_publisher_arm(publisher, sizeof message));
    CHECK(poll(&waiting, 1, 0) == 0);
    for (uint64_t number = 1; number <= sent; number++) {
        OK(pelton_subscriber_receive(subscriber, PELTON_NO_WAIT, &delivery));
        CHECK(delivery.number == number && delivery.missed == 0 && (uintptr_t)delivery.data % 8 == 0);
        OK(pelton_subscriber_release(subscriber));
    }
    CHECK(poll(&waiting, 1, 60000) == 1);
    RETURNS(pelton_publisher_arm(publisher, sizeof message), PELTON_READY);
    OK(pelton_publisher_disarm(publisher));
    OK(pelton_publisher_poll(publisher, sizeof message));
    OK(pelton_publisher_wait_released(publisher, PELTON_NO_WAIT));
    sends(publisher, "more");
    receives(subscriber, "more", sent + 1, 0);
    receives(newest, "more", sent + 1, sent);
    RETURNS(pelton_subscriber_receive(newest, PELTON_NO_WAIT, &delivery), PELTON_AGAIN);
    OK(pelton_close(newest));
    /* Nobody but the gate, which has nothing to release. */
    OK(pelton_publisher_wait_subscribers(publisher, 1, PELTON_NO_WAIT));
    CHECK(only_state(publisher).behind == 0 && only_state(publisher).holds_ns == 0);
    OK(pelton_close(publisher));
    RETURNS(pelton_subscriber_receive(subscriber, SOON, &delivery), PELTON_CLOSED);
    FAILS(pelton_subscriber_resume(subscriber, SOON), PELTON_REFUSED, "threads");
    OK(pelton_close(subscriber));
}

static void a_gate_may_be_limited(void) {
    pelton_publisher_options options = PELTON_PUBLISHER_OPTIONS_INIT;
    pelton_subscriber_options limited = PELTON_SUBSCRIBER_OPTIONS_INIT;
    pelton_publisher *publisher;
    pelton_subscriber *subscriber;
    pelton_delivery delivery;
    char message[1000] = {0};
    uint64_t missed = 0, received = 0;
    options.capacity = CAPACITY;
    options.hold_max_ns = PELTON_NO_HOLD;
    OK(pelton_publisher_open(NULL, &options, &publisher));
    FAILS(pelton_publisher_subscriber(publisher, NULL, &subscriber), PELTON_REFUSED, "hold_max");
    OK(pelton_close(joined(publisher, PELTON_LAG)));
    OK(pelton_close(publisher));
    options.hold_max_ns = limited.lag_after_ns = SECONDS / 100;
    limited.slack = 8 << 10;
    OK(pelton_publisher_open(NULL, &options, &publisher));
    FAILS(pelton_publisher_subscriber(publisher, NULL, &subscriber), PELTON_REFUSED, "hold_max");
    OK(pelton_publisher_subscriber(publisher, &limited, &subscriber));
    CHECK(only_state(publisher).lag_after_ns == SECONDS / 100 && !only_state(publisher).lags);
    for (int i = 0; i < 200; i++) OK(pelton_publisher_send(publisher, message, sizeof message, SOON));
    CHECK(only_state(publisher).lags);
    while (pelton_subscriber_receive(subscriber, PELTON_NO_WAIT, &delivery) == PELTON_OK) {
        received++;
        missed += delivery.missed;
        CHECK(delivery.number == received + missed);
        OK(pelton_subscriber_release(subscriber));
    }
    CHECK(missed > 0 && received > 0 && received + missed == 200 && only_state(publisher).missed == missed);
    OK(pelton_close(subscriber));
    OK(pelton_close(publisher));
}

/* Without a wait in any call but the loop's own. */
static void a_loop_opens_admits_and_receives(void) {
    pelton_subscriber_options options = PELTON_SUBSCRIBER_OPTIONS_INIT;
    pelton_publisher *publisher;
    pelton_subscriber *subscriber = NULL;
    pelton_subscriber_opening *opening;
    pelton_delivery delivery;
    char name[128];
    int code;
    publisher = published(place(name, "unix:%s/loop"));
    options.deadline_ns = SOON;
    OK(pelton_subscriber_open_start(name, &options, &opening));
    struct pollfd descriptors[2] = {{pelton_publisher_fd(publisher), POLLIN, 0}, {pelton_subscriber_opening_fd(opening), POLLIN, 0}};
    while (!subscriber) {
        CHECK(poll(descriptors, 2, 60000) > 0);
        if (descriptors[0].revents) OK(pelton_publisher_wait_subscribers(publisher, 0, PELTON_NO_WAIT));
        if (descriptors[1].revents && (code = pelton_subscriber_opening_finish(opening, &subscriber)) != PELTON_AGAIN) OK(code);
    }
    OK(pelton_close(opening));
    OK(pelton_publisher_wait_subscribers(publisher, 1, PELTON_NO_WAIT));
    CHECK(only_state(publisher).pid == (uint32_t)getpid());
    struct pollfd waiting = {pelton_subscriber_fd(subscriber), POLLIN, 0};
    RETURNS(pelton_subscriber_poll(subscriber), PELTON_AGAIN);
    OK(pelton_subscriber_arm(subscriber));
    CHECK(poll(&waiting, 1, 0) == 0);
    sends(publisher, "in a loop");
    CHECK(poll(&waiting, 1, 60000) == 1);
    RETURNS(pelton_subscriber_arm(subscriber), PELTON_READY);
    OK(pelton_subscriber_poll(subscriber));
    OK(pelton_subscriber_disarm(subscriber));
    receives(subscriber, "in a loop", 1, 0);
    OK(pelton_subscriber_arm(subscriber));
    OK(pelton_close(publisher));
    CHECK(poll(&waiting, 1, 60000) == 1);
    RETURNS(pelton_subscriber_receive(subscriber, PELTON_NO_WAIT, &delivery), PELTON_CLOSED);
    OK(pelton_close(subscriber));
}

static void publishes_one_and_waits(const char *name) {
    pelton_publisher *publisher = published(name);
    OK(pelton_publisher_wait_subscribers(publisher, 1, SOON));
    sends(publisher, "one");
    for (;;) OK(pelton_publisher_wait_subscribers(publisher, 2, pelton_deadline(INT64_C(100) * SECONDS)));
}

static void a_killed_publisher_has_a_successor(void) {
    pelton_subscriber_options options = PELTON_SUBSCRIBER_OPTIONS_INIT;
    pelton_subscriber *subscriber;
    pelton_delivery delivery;
    char name[128];
    pid_t publisher = start(publishes_one_and_waits, place(name, "unix:%s/killed"));
    options.deadline_ns = SOON;
    OK(pelton_subscriber_open(name, &options, &subscriber));
    FAILS(pelton_subscriber_resume(subscriber, PELTON_NO_WAIT), PELTON_REFUSED, "alive");
    OK(pelton_subscriber_receive(subscriber, SOON, &delivery));
    kill_now(publisher);
    /* It is valid until the release. */
    CHECK(memcmp(delivery.data, "one", 3) == 0);
    OK(pelton_subscriber_release(subscriber));
    RETURNS(pelton_subscriber_receive(subscriber, SOON, &delivery), PELTON_PEER_DIED);
    RETURNS(pelton_subscriber_resume(subscriber, pelton_deadline(1)), PELTON_AGAIN);
    publisher = start(publishes_one_and_waits, name);
    OK(pelton_subscriber_resume(subscriber, SOON));
    receives(subscriber, "one", 1, 0);
    kill_now(publisher);
    RETURNS(pelton_subscriber_receive(subscriber, SOON, &delivery), PELTON_PEER_DIED);
    OK(pelton_close(subscriber));
    CHECK(unlink(name + strlen("unix:")) == 0);
}

/* In steps that do not wait: none sees both answers of the publisher. */
static void a_resume_in_steps_joins_a_publisher_that_seldom_calls(void) {
    pelton_publisher *publisher;
    pelton_subscriber *subscriber = NULL;
    pelton_subscriber_opening *opening;
    pelton_delivery delivery;
    char name[128];
    int fd, code;
    OK(pelton_publisher_open(place(name, "unix:%s/seldom"), NULL, &publisher));
    OK(pelton_subscriber_open_start(name, NULL, &opening));
    while ((code = pelton_subscriber_opening_finish(opening, &subscriber)) == PELTON_AGAIN)
        RETURNS(pelton_publisher_wait_subscribers(publisher, 0, PELTON_NO_WAIT), PELTON_OK);
    OK(code);
    OK(pelton_close(opening));
    fd = pelton_subscriber_fd(subscriber);
    for (int round = 0; round < 3; round++) {
        int steps = 0;
        OK(pelton_close(publisher));
        RETURNS(pelton_subscriber_receive(subscriber, SOON, &delivery), PELTON_CLOSED);
        OK(pelton_publisher_open(name, NULL, &publisher));
        while ((code = pelton_subscriber_resume(subscriber, PELTON_NO_WAIT)) == PELTON_AGAIN) {
            CHECK(++steps < 10);
            OK(pelton_publisher_wait_subscribers(publisher, 0, PELTON_NO_WAIT));
        }
        OK(code);
        CHECK(pelton_subscriber_fd(subscriber) == fd);
        for (uint64_t number = 1; number < 3; number++) {
            struct pollfd ready = {fd, POLLIN, 0};
            OK(pelton_subscriber_arm(subscriber));
            sends(publisher, "waited for");
            CHECK(poll(&ready, 1, 60000) == 1);
            receives(subscriber, "waited for", number, 0);
        }
    }
    OK(pelton_close(subscriber));
    OK(pelton_close(publisher));
}

static void gates_and_receives_nothing(const char *name) {
    pelton_subscriber_options options = PELTON_SUBSCRIBER_OPTIONS_INIT;
    pelton_subscriber *subscriber;
    options.deadline_ns = SOON;
    OK(pelton_subscriber_open(name, &options, &subscriber));
    for (;;) pause();
}

static void a_killed_subscriber_holds_nothing_up(void) {
    pelton_publisher *publisher;
    char name[128], message[1000] = {0};
    pid_t slow = start(gates_and_receives_nothing, place(name, "unix:%s/slow"));
    int code;
    publisher = published(name);
    OK(pelton_publisher_wait_subscribers(publisher, 1, SOON));
    while ((code = pelton_publisher_send(publisher, message, sizeof message, PELTON_NO_WAIT)) == PELTON_OK) {
    }
    RETURNS(code, PELTON_AGAIN);
    CHECK(only_state(publisher).pid == (uint32_t)slow && only_state(publisher).holds_ns > 0);
    kill_now(slow);
    for (int i = 0; i < 1000; i++) OK(pelton_publisher_send(publisher, message, sizeof message, SOON));
    RETURNS(pelton_publisher_wait_subscribers(publisher, 1, PELTON_NO_WAIT), PELTON_AGAIN);
    OK(pelton_close(publisher));
}

static void what_options_contradict_is_refused(void) {
    pelton_publisher_options options = PELTON_PUBLISHER_OPTIONS_INIT;
    pelton_publisher *publisher = published(NULL);
    pelton_subscriber *subscriber;
    const uint32_t user = 1;
    FAILS(pelton_publisher_open("path:", NULL, &publisher), PELTON_NAME, "path:DIR");
    FAILS(pelton_subscriber_open("path:", NULL, &subscriber), PELTON_NAME, "path:DIR");
    FAILS(pelton_subscriber_open("path:/nowhere/at/all", NULL, &subscriber), PELTON_NO_CHANNEL, "/nowhere/at/all");
    FAILS(pelton_subscription_remove("path:/nowhere/at/all", "audit"), PELTON_NO_CHANNEL, "/nowhere/at/all");
    FAILS(pelton_subscription_remove("prices", "audit"), PELTON_NAME, "path:DIR");
    FAILS(pelton_subscription_remove("path:/nowhere/at/all", NULL), PELTON_NULL, "durable");
    FAILS(pelton_subscriber_open("unix:/nowhere/at/all", NULL, &subscriber), PELTON_NO_LISTENER, "/nowhere/at/all");
    options.hold_max_ns = -2;
    FAILS(pelton_publisher_open("x", &options, &publisher), PELTON_OPTION, "hold_max_ns");
    options.hold_max_ns = 0;
    options.uids = &user;
    options.uid_count = 1;
    FAILS(pelton_publisher_open(NULL, &options, &publisher), PELTON_OPTION, "uids is set, but a publisher without a name");
    options.deadline_ns = PELTON_FOREVER;
    FAILS(pelton_publisher_open("x", &options, &publisher), PELTON_OPTION, "deadline_ns is set");
    options.deadline_ns = 0;
    options.mode = 0750;
    FAILS(pelton_publisher_open("x", &options, &publisher), PELTON_OPTION, "mode is set");
#define REFUSED(words, ...)                                                                                            \
    do {                                                                                                               \
        pelton_subscriber_options wrong = PELTON_SUBSCRIBER_OPTIONS_INIT;                                              \
        __VA_ARGS__;                                                                                                   \
        FAILS(pelton_publisher_subscriber(publisher, &wrong, &subscriber), PELTON_OPTION, words);                      \
    } while (0)
    REFUSED("policy is 3", wrong.policy = 3);
    REFUSED("wait is 2", wrong.wait = 2);
    REFUSED("lag_after_ns is 5", wrong.lag_after_ns = 5, wrong.policy = PELTON_LAG);
    REFUSED("lag_after_ns is -5", wrong.lag_after_ns = -5);
    REFUSED("slack is 4096", wrong.slack = 4096);
    REFUSED("slack is 4096", wrong.slack = 4096, wrong.policy = PELTON_LATEST);
    REFUSED("capacity is set", wrong.capacity = CAPACITY);
    REFUSED("message_bytes_max is set", wrong.message_bytes_max = 100);
    REFUSED("deadline_ns is set", wrong.deadline_ns = PELTON_FOREVER);
    REFUSED("uids is set", wrong.uids = &user, wrong.uid_count = 1);
    REFUSED("durable is set", wrong.durable = "audit");
    REFUSED("mode is set", wrong.mode = 0750);
    REFUSED("reserved is 1", wrong.reserved = 1);
    REFUSED("struct_bytes", wrong.struct_bytes = 12);
    OK(pelton_close(publisher));
}

/* ---- In a directory ---- */

static void remove_broadcast(const char *name) {
    CHECK(nftw(name + strlen("path:"), remove_one, 16, FTW_DEPTH | FTW_PHYS) == 0);
}

static pelton_subscriber *durable(const char *name, const char *durable, uint32_t policy) {
    pelton_subscriber_options options = PELTON_SUBSCRIBER_OPTIONS_INIT;
    pelton_subscriber *subscriber;
    options.durable = durable;
    options.policy = policy;
    options.deadline_ns = SOON;
    OK(pelton_subscriber_open(name, &options, &subscriber));
    return subscriber;
}

static int continues(pelton_subscriber *subscriber) {
    pelton_subscriber_info info;
    info.struct_bytes = sizeof info;
    OK(pelton_subscriber_get_info(subscriber, &info));
    return info.continues == 1;
}

/* Releases the first message, and is killed while it has the second. */
static void audits_and_is_killed(const char *name) {
    pelton_delivery delivery;
    pelton_subscriber *subscriber = durable(name, "audit", PELTON_GATE);
    CHECK(!continues(subscriber));
    receives(subscriber, "one", 1, 0);
    OK(pelton_subscriber_receive(subscriber, SOON, &delivery));
    CHECK(delivery.number == 2);
    for (;;) pause();
}

static void a_durable_subscription_keeps_its_place_over_a_kill(void) {
    pelton_subscriber_options options = PELTON_SUBSCRIBER_OPTIONS_INIT;
    pelton_publisher *publisher;
    pelton_subscriber *subscriber;
    pelton_delivery delivery;
    char name[128];
    uint64_t sent = 2;
    int code;
    publisher = published(place(name, "path:%s/trades"));
    pid_t audit = start(audits_and_is_killed, name);
    OK(pelton_publisher_wait_subscribers(publisher, 1, SOON));
    pelton_subscriber_state state = only_state(publisher);
    CHECK(state.pid == (uint32_t)audit && strcmp(state.durable, "audit") == 0 && state.policy == PELTON_GATE);
    sends(publisher, "one");
    sends(publisher, "two");
    while (only_state(publisher).behind != 1) usleep(1000);
    options.durable = "audit";
    options.deadline_ns = pelton_deadline(0);
    FAILS(pelton_subscriber_open(name, &options, &subscriber), PELTON_ROLE_TAKEN, "audit");
    FAILS(pelton_subscription_remove(name, "audit"), PELTON_ROLE_TAKEN, "audit");
    kill_now(audit);
    /* While it is away it gates. */
    while ((code = pelton_publisher_send(publisher, "more", 4, PELTON_NO_WAIT)) == PELTON_OK) sent++;
    RETURNS(code, PELTON_AGAIN);
    state = only_state(publisher);
    CHECK(state.pid == 0 && strcmp(state.durable, "audit") == 0 && state.behind == sent - 1 && state.holds_ns > 0);
    subscriber = durable(name, "audit", PELTON_GATE);
    CHECK(continues(subscriber));
    receives(subscriber, "two", 2, 0);
    for (uint64_t number = 3; number <= sent; number++) receives(subscriber, "more", number, 0);
    OK(pelton_close(subscriber));
    /* One that lags learns how many it has missed while away. */
    OK(pelton_close(durable(name, "log", PELTON_LAG)));
    OK(pelton_close(durable(name, "audit", PELTON_LAG)));
    for (int i = 0; i < 20000; i++) sends(publisher, "more");
    subscriber = durable(name, "log", PELTON_LAG);
    CHECK(continues(subscriber));
    OK(pelton_subscriber_receive(subscriber, SOON, &delivery));
    CHECK(delivery.missed > 0 && delivery.number == sent + 1 + delivery.missed);
    OK(pelton_close(subscriber));
    /* It may have missed messages, so it begins anew to gate. */
    options.durable = "log";
    FAILS(pelton_subscriber_open(name, &options, &subscriber), PELTON_REFUSED, "log");
    OK(pelton_subscription_remove(name, "log"));
    FAILS(pelton_subscription_remove(name, "log"), PELTON_REFUSED, "log");
    subscriber = durable(name, "log", PELTON_GATE);
    CHECK(!continues(subscriber));
    OK(pelton_close(subscriber));
    OK(pelton_close(publisher));
    remove_broadcast(name);
}

static void a_limit_in_a_directory_stays_until_the_next_publisher(void) {
    pelton_publisher_options options = PELTON_PUBLISHER_OPTIONS_INIT;
    pelton_publisher *publisher;
    pelton_subscriber *subscriber;
    char name[128];
    options.hold_max_ns = PELTON_NO_HOLD;
    OK(pelton_publisher_open(place(name, "path:%s/limited"), &options, &publisher));
    FAILS(pelton_subscriber_open(name, NULL, &subscriber), PELTON_REFUSED, "hold_max");
    OK(pelton_close(durable(name, "log", PELTON_LAG)));
    OK(pelton_close(publisher));
    FAILS(pelton_subscriber_open(name, NULL, &subscriber), PELTON_REFUSED, "hold_max");
    OK(pelton_close(published(name)));
    OK(pelton_close(durable(name, "audit", PELTON_GATE)));
    FAILS(pelton_publisher_open(name, &options, &publisher), PELTON_REFUSED, "--durable audit");
    OK(pelton_subscription_remove(name, "audit"));
    OK(pelton_publisher_open(name, &options, &publisher));
    OK(pelton_close(publisher));
    remove_broadcast(name);
}

static void publishes_in_a_directory(const char *name) {
    pelton_publisher *publisher = published(name);
    sends(publisher, "before the kill");
    for (;;) pause();
}

/* Both sides come and go, and a loop waits for none of them. */
static void a_directory_s_publisher_has_a_successor(void) {
    pelton_publisher_options options = PELTON_PUBLISHER_OPTIONS_INIT;
    pelton_subscriber_options oldest = PELTON_SUBSCRIBER_OPTIONS_INIT;
    pelton_publisher *publisher;
    pelton_subscriber *subscriber, *thread;
    pelton_subscriber_opening *opening;
    pelton_delivery delivery;
    char name[128];
    int code;
    place(name, "path:%s/successor");
    oldest.start_from = PELTON_OLDEST;
    OK(pelton_subscriber_open_start(name, &oldest, &opening));
    struct pollfd ready = {pelton_subscriber_opening_fd(opening), POLLIN, 0};
    CHECK(poll(&ready, 1, 60000) == 1);
    FAILS(pelton_subscriber_opening_finish(opening, &subscriber), PELTON_NO_CHANNEL, "successor");
    OK(pelton_close(opening));
    pid_t first = start(publishes_in_a_directory, name);
    oldest.deadline_ns = SOON;
    OK(pelton_subscriber_open_start(name, &oldest, &opening));
    ready.fd = pelton_subscriber_opening_fd(opening);
    do {
        CHECK(poll(&ready, 1, 60000) == 1);
        code = pelton_subscriber_opening_finish(opening, &subscriber);
    } while (code == PELTON_AGAIN);
    OK(code);
    OK(pelton_close(opening));
    CHECK(!continues(subscriber));
    receives(subscriber, "before the kill", 1, 0);
    FAILS(pelton_subscriber_resume(subscriber, PELTON_NO_WAIT), PELTON_REFUSED, "alive");
    options.deadline_ns = pelton_deadline(0);
    FAILS(pelton_publisher_open(name, &options, &publisher), PELTON_ROLE_TAKEN, "publisher");
    kill_now(first);
    RETURNS(pelton_subscriber_receive(subscriber, SOON, &delivery), PELTON_PEER_DIED);
    RETURNS(pelton_subscriber_resume(subscriber, PELTON_NO_WAIT), PELTON_AGAIN);
    options.deadline_ns = SOON;
    OK(pelton_publisher_open(name, &options, &publisher));
    FAILS(pelton_publisher_subscriber(publisher, NULL, &thread), PELTON_REFUSED, "directory");
    OK(pelton_subscriber_resume(subscriber, SOON));
    sends(publisher, "after the kill");
    receives(subscriber, "after the kill", 2, 0);
    OK(pelton_publisher_wait_released(publisher, SOON));
    OK(pelton_close(publisher));
    RETURNS(pelton_subscriber_receive(subscriber, SOON, &delivery), PELTON_CLOSED);
    OK(pelton_close(subscriber));
    remove_broadcast(name);
}

static pelton_subscriber *of_the_parent;
static void cannot_use_what_is_received(const char *name) {
    pelton_delivery delivery;
    (void)name;
    RETURNS(pelton_subscriber_release(of_the_parent), PELTON_FORKED);
    RETURNS(pelton_subscriber_receive(of_the_parent, PELTON_NO_WAIT, &delivery), PELTON_FORKED);
    RETURNS(pelton_close(of_the_parent), PELTON_FORKED);
}

static void a_received_message_is_released_once(void) {
    pelton_publisher *publisher = published(NULL);
    for (uint32_t policy = PELTON_GATE; policy <= PELTON_LATEST; policy++) {
        pelton_subscriber *subscriber = joined(publisher, policy);
        pelton_subscriber_info info;
        pelton_delivery delivery;
        uint64_t number;
        FAILS(pelton_subscriber_release(subscriber), PELTON_NOT_RECEIVED, "");
        FAILS(pelton_subscriber_receive(subscriber, PELTON_NO_WAIT, NULL), PELTON_NULL, "out is NULL");
        OK(pelton_publisher_send(publisher, NULL, 0, PELTON_NO_WAIT));
        sends(publisher, "second");
        FAILS(pelton_subscriber_receive(subscriber, PELTON_NO_WAIT, NULL), PELTON_NULL, "out is NULL");
        OK(pelton_subscriber_receive(subscriber, PELTON_NO_WAIT, &delivery));
        CHECK(delivery.size == (policy == PELTON_LATEST ? 6 : 0) && delivery.data);
        number = delivery.number;
        RETURNS(pelton_subscriber_receive(subscriber, SOON, &delivery), PELTON_NOT_RELEASED);
        RETURNS(pelton_subscriber_poll(subscriber), PELTON_NOT_RELEASED);
        RETURNS(pelton_subscriber_arm(subscriber), PELTON_NOT_RELEASED);
        RETURNS(pelton_subscriber_resume(subscriber, SOON), PELTON_NOT_RELEASED);
        OK(pelton_subscriber_disarm(subscriber));
        CHECK(pelton_subscriber_fd(subscriber) >= 0);
        of_the_parent = subscriber;
        finish(start(cannot_use_what_is_received, ""));
        info.struct_bytes = sizeof info;
        OK(pelton_subscriber_get_info(subscriber, &info));
        OK(pelton_subscriber_release(subscriber));
        RETURNS(pelton_subscriber_release(subscriber), PELTON_NOT_RECEIVED);
        if (policy != PELTON_LATEST) receives(subscriber, "second", number + 1, 0);
        /* Closing releases what is received. */
        sends(publisher, "last");
        OK(pelton_subscriber_receive(subscriber, PELTON_NO_WAIT, &delivery));
        OK(pelton_close(subscriber));
        OK(pelton_publisher_wait_released(publisher, SOON));
    }
    FAILS(pelton_publisher_send(publisher, NULL, 1, SOON), PELTON_NULL, "data is NULL");
    FAILS(pelton_publisher_send(publisher, "x", CAPACITY, SOON), PELTON_TOO_LARGE, "");
    FAILS(pelton_publisher_arm(publisher, CAPACITY), PELTON_TOO_LARGE, "");
    FAILS(pelton_publisher_poll(publisher, CAPACITY), PELTON_TOO_LARGE, "");
    FAILS(pelton_publisher_subscribers(publisher, NULL, 1, NULL), PELTON_NULL, "out is NULL");
    OK(pelton_close(publisher));
}

int main(void) {
    static const test tests[] = {
        TEST(each_process_receives_by_its_policy),
        TEST(a_subscriber_begins_where_it_chose),
        TEST(a_slow_gate_is_shown_and_wakes_the_publisher),
        TEST(a_gate_may_be_limited),
        TEST(a_loop_opens_admits_and_receives),
        TEST(a_killed_publisher_has_a_successor),
        TEST(a_resume_in_steps_joins_a_publisher_that_seldom_calls),
        TEST(a_killed_subscriber_holds_nothing_up),
        TEST(a_durable_subscription_keeps_its_place_over_a_kill),
        TEST(a_limit_in_a_directory_stays_until_the_next_publisher),
        TEST(a_directory_s_publisher_has_a_successor),
        TEST(what_options_contradict_is_refused),
        TEST(a_received_message_is_released_once),
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
