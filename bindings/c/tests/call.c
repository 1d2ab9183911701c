/* Calls between processes and threads: every function, and what the peer's end does. */
#include "calls.h"

enum { LARGEST = 1 << 20, MANY = 1000, CALLS_MAX = 1024 };

static unsigned char large[LARGEST];

/* ---- Between processes ------------------------------------------------------------------------------------------- */

static void every_size_comes_back_by(void (*serve)(const char *), uint64_t capacity) {
    char name[128];
    pelton_client_options options = soon(capacity);
    pelton_completion answer;
    pid_t child = start(serve, place(name, "unix:%s/service"));
    OK(pelton_client_open(name, &options, &client));
    CHECK(client_info().has_peer && client_info().peer_pid == (uint32_t)child);
    for (size_t size = 0;; size = size * 3 / 2 + 1) {
        if (size > LARGEST) size = LARGEST;
        fill(large, size, size);
        OK(pelton_client_call(client, large, size, SOON, &answer));
        CHECK(answer.outcome == PELTON_REPLY && answer.code == 0 && answer.data && answer.size == size);
        CHECK(is_filled(answer.data, size, size));
        OK(pelton_client_release(client));
        uint64_t call = submitted(large, size);
        OK(pelton_client_await_call(client, call, SOON, &answer));
        CHECK(answer.call == call && answer.size == size && is_filled(answer.data, size, size));
        OK(pelton_client_release(client));
        if (size == LARGEST) break;
    }
    OK(pelton_client_notify(client, NULL, 0, SOON));
    finish(child);
    OK(pelton_close(client));
}

static void every_size_comes_back_from_another_process(void) {
    every_size_comes_back_by(echo_large, 0);
}

static void every_size_comes_back_through_smaller_lanes(void) {
    every_size_comes_back_by(echo_small, 64 << 10);
}

/* Takes CALLS_MAX requests and answers them in another order: by copy, in place, as an end, or not at all. */
static void answer_in_any_order(const char *name) {
    pelton_service *of;
    static pelton_responder *kept[CALLS_MAX];
    static uint64_t numbers[CALLS_MAX];
    void *room;
    OK(pelton_service_open(name, NULL, &of));
    for (int i = 0; i < CALLS_MAX; i++) {
        pelton_request request;
        OK(pelton_service_receive(of, SOON, &request));
        CHECK(request.size == 8 && request.pid == (uint32_t)getppid() && request.uid == getuid());
        memcpy(&numbers[i], request.data, 8);
        kept[i] = request.responder;
        OK(pelton_service_release(of));
    }
    for (uint64_t i = 0, at = 0; i < CALLS_MAX; i++, at = (at + 389) % CALLS_MAX) {
        uint64_t number = numbers[at];
        switch (number % 4) {
        case 0: OK(pelton_responder_reply(kept[at], &number, 8)); break;
        case 1:
            OK(pelton_responder_reserve(kept[at], 16, &room));
            memcpy(room, &number, 8);
            OK(pelton_responder_reply_reserved(kept[at], 8));
            break;
        case 2: OK(pelton_responder_fail(kept[at], (uint32_t)number, &number, 8)); break;
        default: OK(pelton_close(kept[at]));
        }
    }
    pelton_request request;
    OK(pelton_service_receive(of, SOON, &request));
    CHECK(!request.responder);
    OK(pelton_close(of));
}

static void the_largest_number_of_calls_completes_in_any_order(void) {
    char name[128];
    pelton_client_options options = soon(0);
    static uint64_t calls[CALLS_MAX];
    pelton_completion none;
    static int answered[CALLS_MAX];
    uint64_t call;
    pid_t child = start(answer_in_any_order, place(name, "unix:%s/service"));
    OK(pelton_client_open(name, &options, &client));
    memset(answered, 0, sizeof answered);
    for (uint64_t i = 0; i < CALLS_MAX - 1; i++) calls[i] = submitted(&i, 8);
    CHECK(client_info().in_flight == CALLS_MAX - 1);
    uint64_t last = CALLS_MAX - 1;
    calls[last] = submitted(&last, 8);
    int full = 0;
    for (int i = 0; i < CALLS_MAX; i++) {
        pelton_completion answer;
        OK(pelton_client_await(client, SOON, &answer));
        uint64_t number = 0;
        while (number < CALLS_MAX && calls[number] != answer.call) number++;
        CHECK(number < CALLS_MAX && !answered[number]);
        answered[number] = 1;
        static const uint32_t outcomes[] = {PELTON_REPLY, PELTON_REPLY, PELTON_FAILED, PELTON_ABANDONED};
        CHECK(answer.outcome == outcomes[number % 4]);
        CHECK(answer.code == (number % 4 == 2 ? number : 0));
        CHECK(answer.size == (number % 4 == 3 ? 0 : 8) && memcmp(answer.data, &number, answer.size) == 0);
        OK(pelton_client_release(client));
        full += client_info().in_flight > 0;
    }
    CHECK(full == CALLS_MAX - 1 && client_info().in_flight == 0);
    RETURNS(pelton_client_await(client, PELTON_NO_WAIT, &none), PELTON_AGAIN);
    FAILS(pelton_client_await(client, SOON, &none), PELTON_REFUSED, "in flight");
    FAILS(pelton_client_await_call(client, calls[0], SOON, &none), PELTON_REFUSED, "in flight");
    OK(pelton_client_notify(client, NULL, 0, SOON));
    finish(child);
    RETURNS(pelton_client_call(client, "x", 1, PELTON_FOREVER, &none), PELTON_CLOSED);
    RETURNS(pelton_client_submit(client, "x", 1, 0, PELTON_NO_WAIT, &call), PELTON_CLOSED);
    OK(pelton_close(client));
}

static void calls_in_flight_are_limited(void) {
    uint64_t call;
    void *room;
    begin();
    for (int i = 0; i < CALLS_MAX; i++) submitted("x", 1);
    RETURNS(pelton_client_submit(client, "x", 1, 0, PELTON_NO_WAIT, &call), PELTON_AGAIN);
    RETURNS(pelton_client_submit(client, "x", 1, 0, pelton_deadline(1000000), &call), PELTON_AGAIN);
    RETURNS(pelton_client_reserve(client, 1, PELTON_NO_WAIT, &room), PELTON_AGAIN);
    RETURNS(pelton_client_reserve(client, 1, pelton_deadline(1000000), &room), PELTON_AGAIN);
    CHECK(client_info().in_flight == CALLS_MAX);
    OK(pelton_responder_reply(taken(), "", 0));
    OK(pelton_client_reserve(client, 1, SOON, &room));
    OK(pelton_client_abort(client));
    OK(pelton_client_submit(client, "x", 1, 0, SOON, &call));
    end();
}

static void full_lanes_never_wait_for_each_other(void) {
    char name[128];
    pelton_client_options options = soon(64 << 10);
    static uint64_t calls[MANY];
    pelton_completion answer;
    pid_t child = start(echo_small, place(name, "unix:%s/service"));
    OK(pelton_client_open(name, &options, &client));
    for (int i = 0; i < MANY; i++) {
        size_t size = 5000 + (size_t)i * 7 % 20000;
        fill(large, (uint64_t)i, size);
        calls[i] = submitted(large, size);
    }
    for (int i = MANY - 1; i >= 0; i--) {
        OK(pelton_client_await_call(client, calls[i], SOON, &answer));
        CHECK(answer.size == 5000 + (size_t)i * 7 % 20000 && is_filled(answer.data, (uint64_t)i, answer.size));
        OK(pelton_client_release(client));
    }
    OK(pelton_client_notify(client, NULL, 0, SOON));
    finish(child);
    OK(pelton_close(client));
}

/* ---- By loops ---------------------------------------------------------------------------------------------------- */

enum { BY_LOOP = 20000, AT_A_TIME = 100 };

static void watch(int epoll, int fd) {
    struct epoll_event event;
    memset(&event, 0, sizeof event);
    event.events = EPOLLIN;
    CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0);
}

static void wait_for(int epoll) {
    struct epoll_event event;
    CHECK(epoll_wait(epoll, &event, 1, 60000) == 1);
}

/* Answers by an event loop of its own, each other request in the next turn. */
static void serve_by_loop(const char *name) {
    pelton_service *of;
    pelton_request request;
    pelton_responder *later = NULL;
    int epoll = epoll_create1(0), answer, is_over = 0;
    OK(pelton_service_open(name, NULL, &of));
    watch(epoll, pelton_service_fd(of));
    while (!is_over) {
        while ((answer = pelton_service_receive(of, PELTON_NO_WAIT, &request)) == PELTON_OK) {
            if (!request.responder) {
                is_over = 1;
            } else if (later) {
                OK(pelton_responder_reply(request.responder, request.data, request.size));
                OK(pelton_responder_reply(later, "later", 5));
                later = NULL;
            } else {
                later = request.responder;
            }
            OK(pelton_service_release(of));
        }
        RETURNS(answer, PELTON_AGAIN);
        if (later) OK(pelton_responder_reply(later, "later", 5));
        later = NULL;
        answer = pelton_service_arm(of);
        if (answer == PELTON_OK) {
            if (!is_over) wait_for(epoll);
        } else {
            RETURNS(answer, PELTON_READY);
        }
    }
    OK(pelton_service_disarm(of));
    OK(pelton_close(of));
    close(epoll);
}

static void both_sides_run_in_event_loops(void) {
    char name[128];
    pelton_client_options options = soon(0);
    pelton_completion found;
    int epoll = epoll_create1(0), answer;
    uint32_t asked = 0, answered = 0, later = 0;
    pid_t child = start(serve_by_loop, place(name, "unix:%s/service"));
    options.poll_ns = PELTON_NO_POLL;
    OK(pelton_client_open(name, &options, &client));
    watch(epoll, pelton_client_fd(client));
    while (answered < BY_LOOP) {
        uint64_t call;
        while (asked < BY_LOOP && asked - answered < AT_A_TIME) {
            OK(pelton_client_submit(client, &asked, sizeof asked, 0, PELTON_NO_WAIT, &call));
            asked++;
        }
        while ((answer = pelton_client_await(client, PELTON_NO_WAIT, &found)) == PELTON_OK) {
            CHECK(found.size == 4 || found.size == 5);
            later += found.size == 5;
            answered++;
            OK(pelton_client_release(client));
        }
        RETURNS(answer, PELTON_AGAIN);
        answer = pelton_client_arm(client);
        if (answer != PELTON_OK) {
            RETURNS(answer, PELTON_READY);
        } else if (answered < asked) {
            wait_for(epoll);
        }
    }
    CHECK(later >= BY_LOOP / 2);
    OK(pelton_client_disarm(client));
    OK(pelton_client_notify(client, NULL, 0, SOON));
    finish(child);
    OK(pelton_close(client));
    close(epoll);
}

static int is_readable(int fd) {
    struct pollfd poll_for = {fd, POLLIN, 0};
    int ready = poll(&poll_for, 1, 0);
    CHECK(ready >= 0);
    return ready;
}

static void the_descriptors_are_readable_while_something_is_there(void) {
    pelton_completion answer;
    pelton_request request;
    begin();
    int asking = pelton_client_fd(client), serving = pelton_service_fd(service);
    CHECK(asking >= 0 && serving >= 0);
    OK(pelton_service_arm(service));
    CHECK(!is_readable(serving));
    uint64_t call = submitted("x", 1);
    CHECK(is_readable(serving));
    RETURNS(pelton_service_arm(service), PELTON_READY);
    OK(pelton_client_arm(client));
    CHECK(!is_readable(asking));
    OK(pelton_service_receive(service, PELTON_NO_WAIT, &request));
    OK(pelton_responder_reply(request.responder, "y", 1));
    CHECK(is_readable(asking));
    OK(pelton_service_release(service));
    RETURNS(pelton_client_arm(client), PELTON_READY);
    CHECK(is_readable(asking));
    OK(pelton_client_await_call(client, call, PELTON_NO_WAIT, &answer));
    OK(pelton_client_release(client));
    OK(pelton_client_arm(client));
    CHECK(!is_readable(asking));
    OK(pelton_close(service));
    CHECK(is_readable(asking));
    RETURNS(pelton_client_arm(client), PELTON_CLOSED);
    OK(pelton_close(client));
}

static void polling_finds_requests_and_replies_without_a_wake_up(void) {
    pelton_completion answer;
    pelton_request request;
    begin();
    RETURNS(pelton_service_poll(service), PELTON_AGAIN);
    RETURNS(pelton_client_poll(client), PELTON_AGAIN);
    uint64_t wakes = client_info().wakes_sent, call = submitted("x", 1);
    OK(pelton_service_poll(service));
    CHECK(client_info().wakes_sent == wakes);
    OK(pelton_service_receive(service, PELTON_NO_WAIT, &request));
    RETURNS(pelton_service_poll(service), PELTON_NOT_RELEASED);
    RETURNS(pelton_client_poll(client), PELTON_AGAIN);
    OK(pelton_responder_reply(request.responder, "y", 1));
    OK(pelton_service_release(service));
    OK(pelton_client_poll(client));
    OK(pelton_client_await_call(client, call, PELTON_NO_WAIT, &answer));
    RETURNS(pelton_client_poll(client), PELTON_NOT_RELEASED);
    OK(pelton_client_release(client));
    RETURNS(pelton_client_poll(client), PELTON_AGAIN);
    OK(pelton_close(service));
    RETURNS(pelton_client_poll(client), PELTON_CLOSED);
    OK(pelton_close(client));
}

/* ---- Answers of every kind --------------------------------------------------------------------------------------- */

static void replies_to_other_calls_are_stored(void) {
    begin();
    uint64_t one = submitted("1", 1), two = submitted("2", 1);
    pelton_responder *of_one = taken(), *of_two = taken();
    OK(pelton_responder_reply(of_one, "one", 3));
    OK(pelton_responder_reply(of_two, "two", 3));
    COMPLETES(two, PELTON_REPLY, 0, "two");
    COMPLETES(ANY_CALL, PELTON_REPLY, 0, "one");
    CHECK(one != two);
    end();
}

/* Also when one was looked at by arming, and another call was asked after it. */
static void stored_parts_stay_in_order(void) {
    pelton_completion answer;
    begin();
    for (int arms = 0; arms < 2; arms++) {
        uint64_t streamed = submitted("a", 1);
        pelton_responder *streaming = taken();
        uint64_t other = submitted("b", 1);
        pelton_responder *answering = taken();
        OK(pelton_responder_part(streaming, "part one", 8, SOON));
        OK(pelton_responder_part(streaming, "part two", 8, SOON));
        OK(pelton_responder_reply(answering, "b", 1));
        OK(pelton_client_await_call(client, other, SOON, &answer));
        OK(pelton_client_release(client));
        if (arms) RETURNS(pelton_client_arm(client), PELTON_READY);
        uint64_t third = submitted("c", 1);
        OK(pelton_responder_reply(taken(), "c", 1));
        OK(pelton_client_await_call(client, third, SOON, &answer));
        OK(pelton_client_release(client));
        for (int part = 0; part < 2; part++) {
            OK(pelton_client_await_call(client, streamed, SOON, &answer));
            CHECK(answer.outcome == PELTON_PART && answer.size == 8 && memcmp(answer.data, part ? "part two" : "part one", 8) == 0);
            OK(pelton_client_release(client));
        }
        OK(pelton_responder_end(streaming));
        OK(pelton_client_await_call(client, streamed, SOON, &answer));
        CHECK(answer.outcome == PELTON_END);
        OK(pelton_client_release(client));
    }
    end();
}

static void an_idle_loop_is_notified_once_of_space(void) {
    static const char message[1000] = {0};
    pelton_client_options options = soon(64 << 10);
    pelton_completion answer;
    pelton_request request;
    begin_with(&options);
    while (pelton_client_notify(client, message, sizeof message, PELTON_NO_WAIT) == PELTON_OK) continue;
    OK(pelton_client_arm(client));
    while (pelton_service_receive(service, PELTON_NO_WAIT, &request) == PELTON_OK) OK(pelton_service_release(service));
    int times = 0;
    while (pelton_client_arm(client) == PELTON_READY) {
        CHECK(++times < 10);
        RETURNS(pelton_client_await(client, PELTON_NO_WAIT, &answer), PELTON_AGAIN);
    }
    CHECK(times >= 1);
    OK(pelton_client_disarm(client));
    end();
}

static void failures_are_values_and_a_closed_responder_abandons_the_call(void) {
    begin();
    uint64_t failed = submitted("", 0), forgotten = submitted("", 0);
    OK(pelton_responder_fail(taken(), UINT32_MAX, "why", 3));
    OK(pelton_close(taken()));
    COMPLETES(failed, PELTON_FAILED, UINT32_MAX, "why");
    COMPLETES(forgotten, PELTON_ABANDONED, 0, "");
    end();
}

static void requests_and_replies_are_written_in_place(void) {
    uint64_t call;
    void *room;
    pelton_request request;
    begin();
    OK(pelton_client_reserve(client, 100, SOON, &room));
    memcpy(room, "given up", 8);
    /* Aborts the one before. */
    OK(pelton_client_reserve(client, 100, PELTON_NO_WAIT, &room));
    CHECK((uintptr_t)room % 8 == 0);
    memcpy(room, "question", 8);
    OK(pelton_client_submit_reserved(client, 8, 0, &call));
    OK(pelton_service_receive(service, SOON, &request));
    CHECK(request.size == 8 && memcmp(request.data, "question", 8) == 0 && (uintptr_t)request.data % 8 == 0);
    OK(pelton_responder_reserve(request.responder, 50, &room));
    memset(room, '!', 50);
    OK(pelton_responder_abort(request.responder));
    OK(pelton_responder_reserve(request.responder, 50, &room));
    /* Aborts the one before. */
    OK(pelton_responder_reserve(request.responder, 60, &room));
    CHECK((uintptr_t)room % 8 == 0);
    memcpy(room, request.data, request.size);
    OK(pelton_responder_part_reserved(request.responder, 8));
    OK(pelton_responder_reserve(request.responder, 6, &room));
    memcpy(room, "answer", 6);
    OK(pelton_responder_reply_reserved(request.responder, 6));
    OK(pelton_service_release(service));
    COMPLETES(call, PELTON_PART, 0, "question");
    COMPLETES(call, PELTON_REPLY, 0, "answer");
    end();
}

static void notifications_come_in_order_and_have_no_responder(void) {
    pelton_request request;
    begin();
    for (uint32_t i = 0; i < 100; i++) OK(pelton_client_notify(client, &i, sizeof i, i % 2 ? SOON : PELTON_NO_WAIT));
    for (uint32_t i = 0; i < 100; i++) {
        OK(pelton_service_receive(service, SOON, &request));
        CHECK(!request.responder && request.deadline_ns == PELTON_FOREVER && memcmp(request.data, &i, sizeof i) == 0);
        OK(pelton_service_release(service));
    }
    CHECK(client_info().in_flight == 0);
    end();
}

enum { PARTS = 2000, PART = 1000 };

/* Gives a stream of parts from another thread. */
static void *give_parts(void *given) {
    pelton_responder *responder = (pelton_responder *)given;
    char part[PART];
    for (int i = 0; i < PARTS; i++) {
        fill(part, (uint64_t)i, PART);
        OK(pelton_responder_part(responder, part, (size_t)(i % PART), i % 2 ? SOON : PELTON_FOREVER));
    }
    OK(pelton_responder_end(responder));
    return NULL;
}

static void a_stream_comes_in_order_to_a_slow_reader_while_others_are_served(void) {
    pelton_client_options options = soon(64 << 10);
    pelton_completion answer;
    pelton_request request;
    pthread_t thread;
    begin_with(&options);
    uint64_t stream = submitted("stream", 6);
    CHECK(pthread_create(&thread, NULL, give_parts, taken()) == 0);
    for (int i = 0; i < PARTS; i++) {
        while (pelton_client_await_call(client, stream, PELTON_NO_WAIT, &answer) == PELTON_AGAIN) {
            /* The service's loop goes on meanwhile. */
            RETURNS(pelton_service_receive(service, PELTON_NO_WAIT, &request), PELTON_AGAIN);
        }
        CHECK(answer.call == stream && answer.outcome == PELTON_PART && answer.size == (size_t)(i % PART));
        CHECK(is_filled(answer.data, (uint64_t)i, answer.size));
        OK(pelton_client_release(client));
    }
    COMPLETES(stream, PELTON_END, 0, "");
    CHECK(pthread_join(thread, NULL) == 0);
    end();
}

static void a_full_lane_takes_no_part_and_stores_the_last_reply(void) {
    pelton_client_options options = soon(64 << 10);
    pelton_request request;
    pelton_completion answer;
    void *room;
    int code, parts = 0;
    begin_with(&options);
    uint64_t call = submitted("x", 1);
    pelton_responder *responder = taken();
    memset(large, 'p', sizeof large);
    while ((code = pelton_responder_part(responder, large, 1000, PELTON_NO_WAIT)) == PELTON_OK) parts++;
    RETURNS(code, PELTON_AGAIN);
    RETURNS(pelton_responder_part(responder, large, 1000, pelton_deadline(1000000)), PELTON_AGAIN);
    RETURNS(pelton_responder_reserve(responder, 1000, &room), PELTON_AGAIN);
    OK(pelton_responder_reply(responder, large, 5000));
    for (int i = 0; i < parts; i++) {
        OK(pelton_client_await_call(client, call, SOON, &answer));
        CHECK(answer.outcome == PELTON_PART && answer.size == 1000);
        OK(pelton_client_release(client));
    }
    /* Which the service writes where it looks for requests. */
    RETURNS(pelton_service_receive(service, PELTON_NO_WAIT, &request), PELTON_AGAIN);
    OK(pelton_client_await_call(client, call, SOON, &answer));
    CHECK(answer.outcome == PELTON_REPLY && answer.size == 5000);
    OK(pelton_client_release(client));
    end();
}

static void a_request_carries_its_traceparent(void) {
    static const char valid[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    /* The last two are as none: upper case, and no trace. */
    static const char *const given[] = {valid, NULL, "00-4BF92F3577B34DA6A3CE929D0E0E4736-00F067AA0BA902B7-01",
                                        "00-00000000000000000000000000000000-00f067aa0ba902b7-01"};
    static char large[100000];
    begin();
    for (size_t i = 0; i < 8; i++) {
        size_t size = i < 4 ? 5 : sizeof large;
        const char *traceparent = given[i % 4];
        char found[PELTON_TRACEPARENT_SIZE] = "unchanged";
        pelton_request request;
        uint64_t call;
        memset(large, (int)i, sizeof large);
        OK(pelton_client_submit_traced(client, large, size, traceparent, 0, SOON, &call));
        while (pelton_service_receive(service, PELTON_NO_WAIT, &request) == PELTON_AGAIN) {
            /* Writes the next piece. */
            CHECK(pelton_client_arm(client) >= 0);
            OK(pelton_client_disarm(client));
        }
        CHECK(request.size == size && memcmp(request.data, large, size) == 0);
        CHECK(pelton_responder_traceparent(request.responder, found) == (traceparent == valid));
        OK(pelton_service_release(service));
        /* Also after the release. */
        CHECK(pelton_responder_traceparent(request.responder, found) == (traceparent == valid));
        CHECK(strcmp(found, traceparent == valid ? valid : "unchanged") == 0);
        OK(pelton_responder_reply(request.responder, "", 0));
    }
    end();
}

/* ---- Giving up --------------------------------------------------------------------------------------------------- */

static void a_service_detects_a_cancelled_call_and_its_late_reply_is_dropped(void) {
    pelton_request request;
    pelton_completion answer;
    begin();
    uint64_t call = submitted("x", 1);
    pelton_responder *responder = taken();
    CHECK(pelton_responder_is_cancelled(responder) == 0);
    OK(pelton_client_cancel(client, call));
    RETURNS(pelton_client_cancel(client, call), PELTON_AGAIN);
    RETURNS(pelton_client_cancel(client, call + 1), PELTON_AGAIN);
    RETURNS(pelton_service_receive(service, PELTON_NO_WAIT, &request), PELTON_AGAIN);
    CHECK(pelton_responder_is_cancelled(responder) == 1);
    CHECK(client_info().in_flight == 1);
    OK(pelton_responder_reply(responder, "late", 4));
    RETURNS(pelton_client_await(client, PELTON_NO_WAIT, &answer), PELTON_AGAIN);
    CHECK(client_info().in_flight == 0 && client_info().dropped == 1);
    end();
}

static void a_call_is_cancelled_at_its_deadline(void) {
    pelton_request request;
    pelton_completion answer;
    begin();
    int64_t deadline = pelton_deadline(5000000);
    RETURNS(pelton_client_call(client, "x", 1, deadline, &answer), PELTON_AGAIN);
    OK(pelton_service_receive(service, SOON, &request));
    /* As this clock has it. */
    CHECK(request.deadline_ns > deadline - SECONDS && request.deadline_ns < deadline + SECONDS);
    OK(pelton_service_release(service));
    /* What was sent behind the request. */
    pelton_request none;
    RETURNS(pelton_service_receive(service, PELTON_NO_WAIT, &none), PELTON_AGAIN);
    CHECK(pelton_responder_is_cancelled(request.responder) == 1);
    OK(pelton_close(request.responder));
    submitted("y", 1);
    OK(pelton_service_receive(service, SOON, &request));
    CHECK(request.deadline_ns != PELTON_FOREVER);
    OK(pelton_service_release(service));
    OK(pelton_responder_reply(request.responder, "", 0));
    uint64_t call;
    OK(pelton_client_submit(client, "z", 1, 0, PELTON_FOREVER, &call));
    OK(pelton_service_receive(service, SOON, &request));
    CHECK(request.deadline_ns == PELTON_FOREVER);
    OK(pelton_responder_reply(request.responder, "z", 1));
    COMPLETES(call, PELTON_REPLY, 0, "z");
    end();
}

/* ---- Ends -------------------------------------------------------------------------------------------------------- */

static int signalled[2]; /* a pipe */

static void await_signal(void) {
    char byte;
    CHECK(read(signalled[0], &byte, 1) == 1);
}

static void signal_parent(void) {
    CHECK(write(signalled[1], "", 1) == 1);
}

/* Takes three requests, answers one, and stands. */
static void answer_one_and_stand(const char *name) {
    pelton_service *of;
    pelton_request request[3];
    OK(pelton_service_open(name, NULL, &of));
    for (int i = 0; i < 3; i++) {
        OK(pelton_service_receive(of, SOON, &request[i]));
        OK(pelton_service_release(of));
    }
    OK(pelton_responder_reply(request[1].responder, "in time", 7));
    signal_parent();
    pause();
}

static void calls_of_a_killed_service_fail_immediately(void) {
    char name[128], path[128];
    pelton_client_options options = soon(0);
    pelton_completion answer;
    uint64_t calls[3], call;
    void *room;
    CHECK(pipe(signalled) == 0);
    pid_t child = start(answer_one_and_stand, place(name, "unix:%s/service"));
    OK(pelton_client_open(name, &options, &client));
    for (int i = 0; i < 3; i++) calls[i] = submitted("x", 1);
    await_signal();
    kill_now(child);
    COMPLETES(ANY_CALL, PELTON_REPLY, 0, "in time");
    FAILS(pelton_client_await_call(client, calls[0], PELTON_FOREVER, &answer), PELTON_PEER_DIED, "died");
    RETURNS(pelton_client_await(client, PELTON_FOREVER, &answer), PELTON_PEER_DIED);
    RETURNS(pelton_client_await(client, PELTON_NO_WAIT, &answer), PELTON_PEER_DIED);
    RETURNS(pelton_client_call(client, "x", 1, PELTON_FOREVER, &answer), PELTON_PEER_DIED);
    RETURNS(pelton_client_submit(client, "x", 1, 0, PELTON_NO_WAIT, &call), PELTON_PEER_DIED);
    RETURNS(pelton_client_reserve(client, 1, PELTON_FOREVER, &room), PELTON_PEER_DIED);
    RETURNS(pelton_client_notify(client, "x", 1, PELTON_FOREVER), PELTON_PEER_DIED);
    RETURNS(pelton_client_cancel(client, calls[0]), PELTON_PEER_DIED);
    RETURNS(pelton_client_arm(client), PELTON_PEER_DIED);
    OK(pelton_client_disarm(client));
    OK(pelton_close(client));
    CHECK(unlink(place(path, "%s/service")) == 0);
    close(signalled[0]);
    close(signalled[1]);
}

static void a_closed_service_is_reported_after_its_replies(void) {
    pelton_completion answer;
    begin();
    uint64_t one = submitted("1", 1), two = submitted("2", 1);
    OK(pelton_responder_reply(taken(), "one", 3));
    pelton_responder *responder = taken();
    OK(pelton_close(service));
    COMPLETES(one, PELTON_REPLY, 0, "one");
    FAILS(pelton_client_await_call(client, two, SOON, &answer), PELTON_CLOSED, "closed");
    CHECK(pelton_responder_is_cancelled(responder) == 1);
    int code = pelton_responder_reply(responder, "two", 3);
    CHECK(code == PELTON_CLOSED || code == PELTON_PEER_DIED);
    RETURNS(pelton_responder_reply(responder, "two", 3), PELTON_CLOSED_HANDLE);
    OK(pelton_close(client));
}

/* Asks once, and stands. */
static void ask_and_stand(const char *name) {
    pelton_client_options options = soon(0);
    OK(pelton_client_open(name, &options, &client));
    submitted("of the dead", 11);
    pause();
}

static void a_killed_client_does_not_affect_the_others(void) {
    char name[128];
    pelton_request request, none;
    begin();
    pid_t child = start(ask_and_stand, place(name, "unix:%s/service"));
    OK(pelton_service_receive(service, SOON, &request));
    CHECK(request.size == 11 && request.pid == (uint32_t)child);
    OK(pelton_service_release(service));
    CHECK(pelton_responder_is_cancelled(request.responder) == 0);
    kill_now(child);
    while (!pelton_responder_is_cancelled(request.responder)) {
        RETURNS(pelton_service_receive(service, pelton_deadline(1000000), &none), PELTON_AGAIN);
    }
    int code = pelton_responder_reply(request.responder, "x", 1);
    CHECK(code == PELTON_PEER_DIED || code == PELTON_CLOSED);
    CHECK(service_info().dropped == 1 && service_info().corrupt == 0);
    uint64_t call = submitted("of the living", 13);
    OK(pelton_responder_reply(taken(), "served", 6));
    COMPLETES(call, PELTON_REPLY, 0, "served");
    end();
}

/* ---- A pool ------------------------------------------------------------------------------------------------------ */

typedef struct pool {
    pelton_service *service;
    pthread_t threads[64];
    int handled, is_stopping;
} pool;

static void *answer_late(void *given) {
    OK(pelton_responder_reply((pelton_responder *)given, "late", 4));
    return NULL;
}

/* Answers in its own thread, or has another do it. */
static void handle(void *context, const pelton_request *request) {
    pool *own = (pool *)context;
    int number = __atomic_fetch_add(&own->handled, 1, __ATOMIC_RELAXED);
    if (!request->responder) {
        OK(pelton_service_stop(own->service));
    } else if (number < 64) {
        CHECK(pthread_create(&own->threads[number], NULL, answer_late, request->responder) == 0);
    } else {
        OK(pelton_responder_reply(request->responder, request->data, request->size));
    }
}

static void serve_by_pool(const char *name) {
    pool own;
    memset(&own, 0, sizeof own);
    OK(pelton_service_open(name, NULL, &own.service));
    OK(pelton_service_run(own.service, 4, handle, &own));
    CHECK(own.handled == MANY + 1);
    for (int i = 0; i < 64; i++) CHECK(pthread_join(own.threads[i], NULL) == 0);
    /* It stays stopped. */
    pelton_request request;
    RETURNS(pelton_service_receive(own.service, PELTON_FOREVER, &request), PELTON_CLOSED);
    RETURNS(pelton_service_arm(own.service), PELTON_CLOSED);
    OK(pelton_service_run(own.service, 0, handle, &own));
    OK(pelton_close(own.service));
}

static void a_pool_answers_until_it_is_stopped(void) {
    char name[128];
    pelton_client_options options = soon(0);
    pelton_completion answer;
    int late = 0;
    pid_t child = start(serve_by_pool, place(name, "unix:%s/service"));
    OK(pelton_client_open(name, &options, &client));
    for (uint32_t i = 0; i < MANY; i++) submitted(&i, sizeof i);
    for (int i = 0; i < MANY; i++) {
        OK(pelton_client_await(client, SOON, &answer));
        CHECK(answer.outcome == PELTON_REPLY);
        late += memcmp(answer.data, "late", 4) == 0;
        OK(pelton_client_release(client));
    }
    CHECK(late == 64);
    OK(pelton_client_notify(client, NULL, 0, SOON));
    finish(child);
    OK(pelton_close(client));
}

static void *stop_from_another_thread(void *nothing) {
    OK(pelton_service_stop(service));
    return nothing;
}

static void a_wait_for_requests_ends_when_another_thread_stops_it(void) {
    pelton_request request;
    pthread_t thread;
    begin();
    uint64_t call = submitted("x", 1);
    pelton_responder *responder = taken();
    CHECK(pthread_create(&thread, NULL, stop_from_another_thread, NULL) == 0);
    RETURNS(pelton_service_receive(service, PELTON_FOREVER, &request), PELTON_CLOSED);
    CHECK(pthread_join(thread, NULL) == 0);
    /* What was taken is answered. */
    OK(pelton_responder_reply(responder, "y", 1));
    COMPLETES(call, PELTON_REPLY, 0, "y");
    end();
}

/* ---- Many threads ------------------------------------------------------------------------------------------------ */

enum { ANSWERING = 4, ROUNDS = 200 };

static pelton_responder *hand_over[ANSWERING];
/* Written before a request, read by the thread that replies, which adds 1. Atomic, though nothing else is done to
 * order it: ThreadSanitizer does not see what is ordered by one memory at two addresses, as that of a service and its
 * client is. */
static long noted[ANSWERING * ROUNDS];

static void note(long number, long what) {
    __atomic_store_n(&noted[number], what, __ATOMIC_RELAXED);
}

static int is_noted(long number, long what) {
    return __atomic_load_n(&noted[number], __ATOMIC_RELAXED) == what;
}

/* Answers what it is handed, on its own thread: by copy, in place, and in parts. */
static void *answer_on_a_thread(void *given) {
    long self = (long)(intptr_t)given;
    for (long round = 0; round < ROUNDS; round++) {
        pelton_responder *responder;
        void *room;
        while (!(responder = __atomic_exchange_n(&hand_over[self], NULL, __ATOMIC_ACQ_REL))) sched_yield();
        long number = round * ANSWERING + self;
        CHECK(is_noted(number, number));
        note(number, number + 1);
        if (round % 3 == 0) {
            OK(pelton_responder_reply(responder, &number, sizeof number));
            continue;
        }
        if (round % 3 == 1) OK(pelton_responder_part(responder, &number, sizeof number, SOON));
        int code = pelton_responder_reserve(responder, sizeof number, &room);
        if (code == PELTON_OK) {
            memcpy(room, &number, sizeof number);
            OK(pelton_responder_reply_reserved(responder, sizeof number));
        } else {
            RETURNS(code, PELTON_AGAIN);
            OK(pelton_responder_reply(responder, &number, sizeof number));
        }
    }
    return NULL;
}

static void *ask_all(void *nothing) {
    uint64_t calls[ANSWERING];
    pelton_completion answer;
    for (long round = 0; round < ROUNDS; round++) {
        for (long i = 0; i < ANSWERING; i++) {
            long number = round * ANSWERING + i;
            note(number, number);
            calls[i] = submitted(&number, sizeof number);
        }
        for (long i = 0; i < ANSWERING; i++) {
            do {
                OK(pelton_client_await_call(client, calls[i], SOON, &answer));
                CHECK(answer.size == sizeof(long) && *(const long *)answer.data == round * ANSWERING + i);
                OK(pelton_client_release(client));
            } while (answer.outcome == PELTON_PART);
            CHECK(is_noted(round * ANSWERING + i, round * ANSWERING + i + 1));
        }
    }
    OK(pelton_client_notify(client, NULL, 0, SOON));
    return nothing;
}

static void answers_come_from_many_threads_and_order_the_memory_around_them(void) {
    pelton_client_options options = soon(64 << 10);
    pthread_t asking, answering[ANSWERING];
    pelton_request request;
    begin_with(&options);
    for (long i = 0; i < ANSWERING; i++) CHECK(pthread_create(&answering[i], NULL, answer_on_a_thread, (void *)(intptr_t)i) == 0);
    CHECK(pthread_create(&asking, NULL, ask_all, NULL) == 0);
    for (;;) {
        OK(pelton_service_receive(service, SOON, &request));
        if (!request.responder) break;
        long number;
        memcpy(&number, request.data, sizeof number);
        OK(pelton_service_release(service));
        pelton_responder **place = &hand_over[number % ANSWERING];
        while (__atomic_load_n(place, __ATOMIC_ACQUIRE)) sched_yield();
        __atomic_store_n(place, request.responder, __ATOMIC_RELEASE);
    }
    OK(pelton_service_release(service));
    CHECK(pthread_join(asking, NULL) == 0);
    for (int i = 0; i < ANSWERING; i++) CHECK(pthread_join(answering[i], NULL) == 0);
    end();
}

/* ---- Several processes of one name ------------------------------------------------------------------------------- */

static volatile sig_atomic_t drained;
static pelton_service *draining;

static void drain(int signal) {
    (void)signal;
    drained = 1;
    pelton_service_drain(draining);
}

/* Answers with its process's number, until it is drained. */
static void answer_with_pid(const char *name) {
    pelton_request request;
    pelton_responder *standing[4];
    uint32_t pid = (uint32_t)getpid();
    int code, count = 0;
    OK(pelton_service_open(name, NULL, &draining));
    signal(SIGTERM, drain);
    signal_parent();
    while ((code = pelton_service_receive(draining, SOON, &request)) == PELTON_OK) {
        /* Some stand until it is over. */
        if (request.size == 0) OK(pelton_responder_reply(request.responder, &pid, sizeof pid));
        else standing[count++] = request.responder;
        OK(pelton_service_release(draining));
    }
    RETURNS(code, PELTON_CLOSED);
    CHECK(drained);
    while (count > 0) OK(pelton_close(standing[--count]));
    OK(pelton_close(draining));
}

/* Calls until the answer is another process's. */
static void call_until_it_is_not_of(uint32_t pid, uint32_t wanted) {
    uint32_t found = pid;
    pelton_completion answer;
    while (found == pid) {
        OK(pelton_client_call(client, NULL, 0, SOON, &answer));
        CHECK(answer.size == sizeof found);
        memcpy(&found, answer.data, sizeof found);
        OK(pelton_client_release(client));
    }
    CHECK(found == wanted);
}

static void calls_continue_with_another_process_of_the_name(void) {
    pelton_client_options options = soon(0);
    pelton_completion answer;
    const char *before = getenv("XDG_RUNTIME_DIR");
    char *kept = before ? strdup(before) : NULL;
    CHECK(pipe(signalled) == 0 && setenv("XDG_RUNTIME_DIR", here, 1) == 0);
    pid_t first = start(answer_with_pid, "several");
    await_signal();
    pid_t second = start(answer_with_pid, "several");
    await_signal();
    OK(pelton_client_open("several", &options, &client));
    call_until_it_is_not_of((uint32_t)first, (uint32_t)second);
    call_until_it_is_not_of((uint32_t)second, (uint32_t)first);
    CHECK(client_info().services == 2);
    /* Two that stand, one with each: one of them may be carried out twice, and then stands with the other. */
    uint64_t one, two;
    OK(pelton_client_submit(client, "stand", 5, PELTON_IDEMPOTENT, SOON, &one));
    void *room;
    OK(pelton_client_reserve(client, 8, SOON, &room));
    memcpy(room, "stand", 5);
    OK(pelton_client_submit_reserved(client, 5, PELTON_IDEMPOTENT, &two));
    uint64_t lost = submitted("stand", 5), also = submitted("stand", 5);
    kill_now(first);
    OK(pelton_client_await(client, SOON, &answer));
    CHECK(answer.outcome == PELTON_LOST && (int)answer.code == PELTON_PEER_DIED && answer.size == 0);
    CHECK(answer.call == lost || answer.call == also);
    OK(pelton_client_release(client));
    call_until_it_is_not_of((uint32_t)first, (uint32_t)second);
    CHECK(client_info().services == 1 && client_info().in_flight == 3);
    /* Its successor takes over what it has not begun. */
    pid_t third = start(answer_with_pid, "several");
    await_signal();
    OK(pelton_client_cancel(client, one));
    OK(pelton_client_cancel(client, two));
    OK(pelton_client_cancel(client, answer.call == lost ? also : lost));
    call_until_it_is_not_of((uint32_t)second, (uint32_t)third);
    OK(pelton_close(client));
    OK(pelton_client_open("several", &options, &client));
    CHECK(kill(second, SIGTERM) == 0);
    finish(second);
    call_until_it_is_not_of((uint32_t)second, (uint32_t)third);
    CHECK(kill(third, SIGTERM) == 0);
    finish(third);
    RETURNS(pelton_client_call(client, NULL, 0, SOON, &answer), PELTON_NO_LISTENER);
    OK(pelton_close(client));
    if (kept) CHECK(setenv("XDG_RUNTIME_DIR", kept, 1) == 0);
    else CHECK(unsetenv("XDG_RUNTIME_DIR") == 0);
    free(kept);
    close(signalled[0]);
    close(signalled[1]);
}

int main(void) {
    static const test tests[] = {
        TEST(every_size_comes_back_from_another_process),
        TEST(every_size_comes_back_through_smaller_lanes),
        TEST(the_largest_number_of_calls_completes_in_any_order),
        TEST(calls_in_flight_are_limited),
        TEST(full_lanes_never_wait_for_each_other),
        TEST(both_sides_run_in_event_loops),
        TEST(the_descriptors_are_readable_while_something_is_there),
        TEST(polling_finds_requests_and_replies_without_a_wake_up),
        TEST(replies_to_other_calls_are_stored),
        TEST(stored_parts_stay_in_order),
        TEST(an_idle_loop_is_notified_once_of_space),
        TEST(failures_are_values_and_a_closed_responder_abandons_the_call),
        TEST(requests_and_replies_are_written_in_place),
        TEST(notifications_come_in_order_and_have_no_responder),
        TEST(a_stream_comes_in_order_to_a_slow_reader_while_others_are_served),
        TEST(a_full_lane_takes_no_part_and_stores_the_last_reply),
        TEST(a_request_carries_its_traceparent),
        TEST(a_service_detects_a_cancelled_call_and_its_late_reply_is_dropped),
        TEST(a_call_is_cancelled_at_its_deadline),
        TEST(calls_of_a_killed_service_fail_immediately),
        TEST(a_closed_service_is_reported_after_its_replies),
        TEST(a_killed_client_does_not_affect_the_others),
        TEST(a_pool_answers_until_it_is_stopped),
        TEST(a_wait_for_requests_ends_when_another_thread_stops_it),
        TEST(answers_come_from_many_threads_and_order_the_memory_around_them),
        TEST(calls_continue_with_another_process_of_the_name),
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
