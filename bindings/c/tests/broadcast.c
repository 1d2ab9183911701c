/* One publisher, many subscribers: each policy, in processes, threads and event loops; in a directory, with durable
 * subscriptions; many publishers; ends; the caller's mistakes. */
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

/* ---- Many publishers ---- */

static pelton_subscriber_set *set_of(pelton_subscriber *const *subscribers, int count, uint32_t wait) {
    pelton_subscriber_set *set;
    OK(pelton_subscriber_set_open(wait, &set));
    for (int i = 0; i < count; i++) OK(pelton_subscriber_set_add(set, subscribers[i]));
    return set;
}

/* Receives what has this text, of the subscriber that is wanted. */
static void set_receives(pelton_subscriber_set *set, pelton_subscriber *wanted, const char *text, uint64_t number) {
    pelton_subscriber *from = NULL;
    pelton_delivery delivery;
    OK(pelton_subscriber_set_receive(set, SOON, &from, &delivery));
    CHECK(from == wanted && delivery.number == number && delivery.missed == 0);
    CHECK(delivery.size == strlen(text) && memcmp(delivery.data, text, delivery.size) == 0);
    OK(pelton_subscriber_set_release(set));
}

/* That the publisher of the subscriber that is wanted has left, and the subscriber the set. */
static void leaves(pelton_subscriber_set *set, pelton_subscriber *wanted, int code) {
    pelton_subscriber *from = NULL;
    pelton_delivery delivery;
    RETURNS(pelton_subscriber_set_receive(set, SOON, &from, &delivery), code);
    CHECK(from == wanted);
    FAILS(pelton_subscriber_set_remove(set, wanted), PELTON_REFUSED, "not in this set");
}

static void *publishes_all(void *publisher) {
    char message[100] = {0};
    for (uint32_t number = 1; number <= MESSAGES; number++) {
        memcpy(message, &number, sizeof number);
        OK(pelton_publisher_send((pelton_publisher *)publisher, message, sizeof message, SOON));
        /* So that the set sleeps, too. */
        if (number % 5000 == 0) OK(pelton_publisher_wait_released((pelton_publisher *)publisher, SOON));
    }
    OK(pelton_close(publisher));
    return NULL;
}

static void each_message_of_many_publishers_arrives_once_and_in_order(void) {
    for (uint32_t wait = PELTON_BLOCK; wait <= PELTON_SPIN; wait++) {
        pelton_publisher *publishers[3];
        pelton_subscriber *subscribers[3], *from;
        pelton_delivery delivery;
        pthread_t threads[3];
        uint32_t received[3] = {0}, number;
        for (int i = 0; i < 3; i++) {
            publishers[i] = published(NULL);
            subscribers[i] = joined(publishers[i], PELTON_GATE);
        }
        pelton_subscriber_set *set = set_of(subscribers, 3, wait);
        for (int i = 0; i < 3; i++) CHECK(pthread_create(&threads[i], NULL, publishes_all, publishers[i]) == 0);
        for (int ended = 0; ended < 3;) {
            int code = pelton_subscriber_set_receive(set, SOON, &from, &delivery);
            int of = from == subscribers[0] ? 0 : from == subscribers[1] ? 1 : 2;
            CHECK(from == subscribers[of]);
            if (code == PELTON_OK) {
                memcpy(&number, delivery.data, sizeof number);
                CHECK(number == ++received[of] && delivery.number == number && delivery.size == 100);
                OK(pelton_subscriber_set_release(set));
                continue;
            }
            RETURNS(code, PELTON_CLOSED);
            CHECK(received[of] == MESSAGES);
            OK(pelton_close(from));
            ended++;
        }
        /* It is empty: nothing can arrive. */
        RETURNS(pelton_subscriber_set_receive(set, PELTON_FOREVER, &from, &delivery), PELTON_AGAIN);
        CHECK(from == NULL);
        OK(pelton_close(set));
        for (int i = 0; i < 3; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    }
}

static void members_take_turns_and_keep_their_places(void) {
    pelton_publisher *publishers[] = {published(NULL), published(NULL)};
    pelton_subscriber *subscribers[] = {joined(publishers[0], PELTON_GATE), joined(publishers[1], PELTON_LAG)}, *from;
    pelton_subscriber_set *set = set_of(subscribers, 2, PELTON_BLOCK);
    pelton_subscriber_info info;
    pelton_delivery delivery;
    for (int i = 0; i < 200; i++) {
        sends(publishers[0], "x");
        sends(publishers[1], "x");
    }
    for (int i = 0; i < 200; i++) set_receives(set, subscribers[i / 64 % 2], "x", (uint64_t)(i / 128 * 64 + i % 64 + 1));
    info.struct_bytes = sizeof info;
    OK(pelton_subscriber_set_get_info(set, subscribers[1], &info));
    CHECK(info.messages == 72 && info.next_number == 73 && info.peer_pid == (uint32_t)getpid() && info.capacity == CAPACITY);
    OK(pelton_subscriber_set_remove(set, subscribers[1]));
    receives(subscribers[1], "x", 73, 0);
    for (uint64_t number = 129; number <= 200; number++) set_receives(set, subscribers[0], "x", number);
    RETURNS(pelton_subscriber_set_receive(set, pelton_deadline(1), &from, &delivery), PELTON_AGAIN);
    CHECK(from == NULL);
    /* The other way round than before. */
    OK(pelton_subscriber_set_remove(set, subscribers[0]));
    OK(pelton_subscriber_set_add(set, subscribers[1]));
    OK(pelton_subscriber_set_add(set, subscribers[0]));
    for (uint64_t number = 74; number <= 200; number++) set_receives(set, subscribers[1], "x", number);
    sends(publishers[0], "again");
    set_receives(set, subscribers[0], "again", 201);
    /* Closing releases what is received, and gives the members back. */
    for (int i = 0; i < 2; i++) sends(publishers[0], "last");
    OK(pelton_subscriber_set_receive(set, SOON, &from, &delivery));
    CHECK(from == subscribers[0] && delivery.number == 202);
    OK(pelton_close(set));
    receives(subscribers[0], "last", 203, 0);
    OK(pelton_publisher_wait_released(publishers[0], SOON));
    for (int i = 0; i < 2; i++) {
        OK(pelton_close(publishers[i]));
        RETURNS(pelton_subscriber_receive(subscribers[i], SOON, &delivery), PELTON_CLOSED);
        OK(pelton_close(subscribers[i]));
    }
}

static void a_killed_publisher_leaves_the_set_and_its_subscriber_is_added_again(void) {
    pelton_subscriber_options options = PELTON_SUBSCRIBER_OPTIONS_INIT;
    pelton_publisher *other = published(NULL);
    pelton_subscriber *subscribers[] = {NULL, joined(other, PELTON_GATE)};
    char name[128];
    pid_t publisher = start(publishes_one_and_waits, place(name, "unix:%s/member"));
    options.deadline_ns = SOON;
    OK(pelton_subscriber_open(name, &options, &subscribers[0]));
    pelton_subscriber_set *set = set_of(subscribers, 2, PELTON_BLOCK);
    for (uint64_t round = 1; round < 3; round++) {
        set_receives(set, subscribers[0], "one", 1);
        kill_now(publisher);
        leaves(set, subscribers[0], PELTON_PEER_DIED);
        sends(other, "still here");
        set_receives(set, subscribers[1], "still here", round);
        publisher = start(publishes_one_and_waits, name);
        OK(pelton_subscriber_resume(subscribers[0], SOON));
        OK(pelton_subscriber_set_add(set, subscribers[0]));
    }
    set_receives(set, subscribers[0], "one", 1);
    kill_now(publisher);
    leaves(set, subscribers[0], PELTON_PEER_DIED);
    /* Not resumed, it leaves again. */
    OK(pelton_subscriber_set_add(set, subscribers[0]));
    leaves(set, subscribers[0], PELTON_PEER_DIED);
    OK(pelton_close(other));
    leaves(set, subscribers[1], PELTON_CLOSED);
    OK(pelton_close(set));
    for (int i = 0; i < 2; i++) OK(pelton_close(subscribers[i]));
    CHECK(unlink(name + strlen("unix:")) == 0);
}

static void a_damaged_broadcast_leaves_the_set(void) {
    char name[128], path[128];
    pelton_publisher *publisher = published(place(name, "path:%s/damaged"));
    pelton_subscriber *subscriber;
    /* The header of message 1: longer than the lane. */
    const uint64_t header = UINT64_C(1) << 32 | UINT64_C(1) << 20;
    OK(pelton_subscriber_open(name, NULL, &subscriber));
    pelton_subscriber_set *set = set_of(&subscriber, 1, PELTON_BLOCK);
    int fd = open(place(path, "%s/damaged/data"), O_WRONLY | O_CLOEXEC);
    CHECK(fd >= 0 && pwrite(fd, &header, sizeof header, 0) == sizeof header && close(fd) == 0);
    leaves(set, subscriber, PELTON_CORRUPT);
    OK(pelton_close(set));
    OK(pelton_close(subscriber));
    OK(pelton_close(publisher));
    remove_broadcast(name);
}

static void arms_the_set(pelton_subscriber_set *set, struct pollfd *waiting) {
    pelton_subscriber *from;
    pelton_delivery delivery;
    int code;
    while ((code = pelton_subscriber_set_arm(set)) == PELTON_READY)
        RETURNS(pelton_subscriber_set_receive(set, PELTON_NO_WAIT, &from, &delivery), PELTON_AGAIN);
    OK(code);
    CHECK(poll(waiting, 1, 0) == 0);
}

static void a_loop_waits_for_a_set(void) {
    pelton_publisher *publishers[] = {published(NULL), published(NULL)};
    pelton_subscriber_set *set = set_of(NULL, 0, PELTON_BLOCK);
    pelton_subscriber *subscribers[2];
    struct pollfd waiting = {pelton_subscriber_set_fd(set), POLLIN, 0};
    arms_the_set(set, &waiting);
    for (int i = 0; i < 2; i++) {
        subscribers[i] = joined(publishers[i], PELTON_GATE);
        OK(pelton_subscriber_set_add(set, subscribers[i]));
        CHECK(poll(&waiting, 1, 60000) == 1);
        arms_the_set(set, &waiting);
        sends(publishers[i], "in a loop");
        CHECK(poll(&waiting, 1, 60000) == 1);
        RETURNS(pelton_subscriber_set_arm(set), PELTON_READY);
        OK(pelton_subscriber_set_disarm(set));
        set_receives(set, subscribers[i], "in a loop", 1);
    }
    arms_the_set(set, &waiting);
    OK(pelton_close(publishers[0]));
    CHECK(poll(&waiting, 1, 60000) == 1);
    leaves(set, subscribers[0], PELTON_CLOSED);
    arms_the_set(set, &waiting);
    OK(pelton_subscriber_set_remove(set, subscribers[1]));
    sends(publishers[1], "not of the set");
    receives(subscribers[1], "not of the set", 2, 0);
    OK(pelton_close(set));
    for (int i = 0; i < 2; i++) OK(pelton_close(subscribers[i]));
    OK(pelton_close(publishers[1]));
}

static pelton_subscriber_set *set_of_the_parent;
static void cannot_use_the_set(const char *name) {
    pelton_subscriber_set *own = set_of(NULL, 0, PELTON_BLOCK);
    pelton_subscriber *from;
    pelton_delivery delivery;
    (void)name;
    RETURNS(pelton_subscriber_set_release(set_of_the_parent), PELTON_FORKED);
    RETURNS(pelton_subscriber_set_receive(set_of_the_parent, PELTON_NO_WAIT, &from, &delivery), PELTON_FORKED);
    RETURNS(pelton_subscriber_set_remove(set_of_the_parent, of_the_parent), PELTON_FORKED);
    RETURNS(pelton_close(of_the_parent), PELTON_WRONG_THREAD);
    RETURNS(pelton_close(set_of_the_parent), PELTON_FORKED);
    /* Neither can a set of its own use it. */
    RETURNS(pelton_subscriber_set_add(own, of_the_parent), PELTON_FORKED);
    OK(pelton_close(own));
    RETURNS(pelton_close(of_the_parent), PELTON_FORKED);
}

static void a_forked_child_has_no_use_of_a_set(void) {
    pelton_publisher *publisher = published(NULL);
    pelton_subscriber *from;
    pelton_delivery delivery;
    of_the_parent = joined(publisher, PELTON_GATE);
    set_of_the_parent = set_of(&of_the_parent, 1, PELTON_BLOCK);
    sends(publisher, "of the parent");
    finish(start(cannot_use_the_set, ""));
    OK(pelton_subscriber_set_receive(set_of_the_parent, SOON, &from, &delivery));
    finish(start(cannot_use_the_set, ""));
    CHECK(from == of_the_parent && memcmp(delivery.data, "of the parent", delivery.size) == 0);
    OK(pelton_subscriber_set_release(set_of_the_parent));
    OK(pelton_publisher_wait_released(publisher, SOON));
    OK(pelton_close(publisher));
    leaves(set_of_the_parent, of_the_parent, PELTON_CLOSED);
    OK(pelton_close(set_of_the_parent));
    OK(pelton_close(of_the_parent));
}

static void a_subscriber_is_used_by_one_set_or_by_none(void) {
    pelton_publisher *publisher = published(NULL);
    pelton_subscriber *subscriber = joined(publisher, PELTON_GATE), *second = joined(publisher, PELTON_LAG), *from = second;
    pelton_subscriber_set *set, *other = set_of(NULL, 0, PELTON_BLOCK);
    pelton_subscriber_info info;
    pelton_delivery delivery;
    FAILS(pelton_subscriber_set_open(2, &set), PELTON_OPTION, "wait is 2");
    FAILS(pelton_subscriber_set_open(PELTON_BLOCK, NULL), PELTON_NULL, "out is NULL");
    sends(publisher, "one");
    OK(pelton_subscriber_receive(subscriber, SOON, &delivery));
    RETURNS(pelton_subscriber_set_add(other, subscriber), PELTON_NOT_RELEASED);
    OK(pelton_subscriber_release(subscriber));
    set = set_of(&subscriber, 1, PELTON_BLOCK);
    /* Whatever would use it. */
#define IN_THE_SET(call) FAILS(call, PELTON_WRONG_THREAD, "a pelton_subscriber_set has the pelton_subscriber")
    info.struct_bytes = sizeof info;
    IN_THE_SET(pelton_subscriber_receive(subscriber, PELTON_NO_WAIT, &delivery));
    IN_THE_SET(pelton_subscriber_release(subscriber));
    IN_THE_SET(pelton_subscriber_resume(subscriber, PELTON_NO_WAIT));
    IN_THE_SET(pelton_subscriber_fd(subscriber));
    IN_THE_SET(pelton_subscriber_poll(subscriber));
    IN_THE_SET(pelton_subscriber_arm(subscriber));
    IN_THE_SET(pelton_subscriber_disarm(subscriber));
    IN_THE_SET(pelton_subscriber_get_info(subscriber, &info));
    IN_THE_SET(pelton_close(subscriber));
    IN_THE_SET(pelton_subscriber_set_add(set, subscriber));
    IN_THE_SET(pelton_subscriber_set_add(other, subscriber));
    IN_THE_SET(pelton_subscriber_set_remove(other, subscriber));
    IN_THE_SET(pelton_subscriber_set_get_info(other, subscriber, &info));
    FAILS(pelton_subscriber_set_remove(set, second), PELTON_REFUSED, "not in this set");
    FAILS(pelton_subscriber_set_get_info(set, second, &info), PELTON_REFUSED, "not in this set");
    FAILS(pelton_subscriber_set_add(set, NULL), PELTON_NULL, "subscriber is NULL");
    FAILS(pelton_subscriber_set_remove(set, NULL), PELTON_NULL, "subscriber is NULL");
    FAILS(pelton_subscriber_set_get_info(set, subscriber, NULL), PELTON_NULL, "out is NULL");
    info.struct_bytes = 12;
    FAILS(pelton_subscriber_set_get_info(set, subscriber, &info), PELTON_OPTION, "struct_bytes");
    FAILS(pelton_subscriber_set_add(set, (pelton_subscriber *)(void *)publisher), PELTON_CLOSED_HANDLE, "pelton_publisher");
    OK(pelton_close(second));
    FAILS(pelton_subscriber_set_add(set, second), PELTON_CLOSED_HANDLE, "closed");
    FAILS(pelton_subscriber_set_remove(set, second), PELTON_CLOSED_HANDLE, "closed");
    /* While a message is received. */
    FAILS(pelton_subscriber_set_release(set), PELTON_NOT_RECEIVED, "");
    sends(publisher, "two");
    sends(publisher, "three");
    FAILS(pelton_subscriber_set_receive(set, SOON, NULL, &delivery), PELTON_NULL, "from is NULL");
    FAILS(pelton_subscriber_set_receive(set, SOON, &from, NULL), PELTON_NULL, "out is NULL");
    CHECK(from == second);
    OK(pelton_subscriber_set_receive(set, SOON, &from, &delivery));
    CHECK(from == subscriber && delivery.number == 2);
    second = joined(publisher, PELTON_GATE);
    RETURNS(pelton_subscriber_set_receive(set, SOON, &from, &delivery), PELTON_NOT_RELEASED);
    CHECK(from == NULL);
    RETURNS(pelton_subscriber_set_add(set, second), PELTON_NOT_RELEASED);
    RETURNS(pelton_subscriber_set_remove(set, subscriber), PELTON_NOT_RELEASED);
    RETURNS(pelton_subscriber_set_arm(set), PELTON_NOT_RELEASED);
    OK(pelton_subscriber_set_disarm(set));
    CHECK(pelton_subscriber_set_fd(set) >= 0);
    info.struct_bytes = sizeof info;
    OK(pelton_subscriber_set_get_info(set, subscriber, &info));
    OK(pelton_subscriber_set_release(set));
    RETURNS(pelton_subscriber_set_release(set), PELTON_NOT_RECEIVED);
    set_receives(set, subscriber, "three", 3);
    OK(pelton_close(set));
    FAILS(pelton_subscriber_set_add(set, subscriber), PELTON_CLOSED_HANDLE, "closed pelton_subscriber_set");
    OK(pelton_subscriber_set_add(other, subscriber));
    OK(pelton_close(other));
    OK(pelton_close(subscriber));
    OK(pelton_close(second));
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
        TEST(each_message_of_many_publishers_arrives_once_and_in_order),
        TEST(members_take_turns_and_keep_their_places),
        TEST(a_killed_publisher_leaves_the_set_and_its_subscriber_is_added_again),
        TEST(a_damaged_broadcast_leaves_the_set),
        TEST(a_loop_waits_for_a_set),
        TEST(a_forked_child_has_no_use_of_a_set),
        TEST(a_subscriber_is_used_by_one_set_or_by_none),
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
