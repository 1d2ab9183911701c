/* Calls: every mistake has its code and says what is wrong, and nothing is lost by it. */
#include "calls.h"

static pelton_request request;
static pelton_completion answer;
static pelton_responder *responder; /* of a call in flight */
static uint64_t call;
static void *room;

static void begin_call(void) {
    begin();
    call = submitted("x", 1);
    responder = taken();
}

static void end_call(void) {
    OK(pelton_responder_reply(responder, "y", 1));
    COMPLETES(call, PELTON_REPLY, 0, "y");
    end();
}

static void ignore(void *context, const pelton_request *one) {
    (void)context;
    pelton_close(one->responder);
}

static void null_is_refused_everywhere(void) {
    char name[128], text[PELTON_TRACEPARENT_SIZE];
    FAILS(pelton_client_open(NULL, NULL, &client), PELTON_NULL, "name is NULL");
    FAILS(pelton_client_open("x", NULL, NULL), PELTON_NULL, "out is NULL");
    FAILS(pelton_service_open(NULL, NULL, &service), PELTON_NULL, "name is NULL");
    FAILS(pelton_service_open(place(name, "unix:%s/none"), NULL, NULL), PELTON_NULL, "out is NULL");
    FAILS(pelton_client_call(NULL, "x", 1, SOON, &answer), PELTON_NULL, "client is NULL");
    FAILS(pelton_client_submit(NULL, "x", 1, 0, SOON, &call), PELTON_NULL, "client is NULL");
    FAILS(pelton_client_notify(NULL, "x", 1, SOON), PELTON_NULL, "client is NULL");
    FAILS(pelton_client_cancel(NULL, 1), PELTON_NULL, "client is NULL");
    FAILS(pelton_client_await(NULL, SOON, &answer), PELTON_NULL, "client is NULL");
    FAILS(pelton_service_receive(NULL, SOON, &request), PELTON_NULL, "service is NULL");
    FAILS(pelton_service_run(NULL, 1, ignore, NULL), PELTON_NULL, "service is NULL");
    FAILS(pelton_service_stop(NULL), PELTON_NULL, "service is NULL");
    FAILS(pelton_service_drain(NULL), PELTON_NULL, "service is NULL");
    FAILS(pelton_responder_reply(NULL, "x", 1), PELTON_NULL, "responder is NULL");
    FAILS(pelton_responder_fail(NULL, 1, "x", 1), PELTON_NULL, "responder is NULL");
    FAILS(pelton_responder_end(NULL), PELTON_NULL, "responder is NULL");
    FAILS(pelton_responder_part(NULL, "x", 1, SOON), PELTON_NULL, "responder is NULL");
    FAILS(pelton_responder_is_cancelled(NULL), PELTON_NULL, "responder is NULL");
    FAILS(pelton_responder_traceparent(NULL, text), PELTON_NULL, "responder is NULL");
    FAILS(pelton_client_submit_traced(NULL, NULL, 0, NULL, 0, PELTON_NO_WAIT, &call), PELTON_NULL, "client is NULL");

    begin_call();
    FAILS(pelton_client_call(client, NULL, 1, SOON, &answer), PELTON_NULL, "data is NULL");
    FAILS(pelton_client_call(client, "x", 1, SOON, NULL), PELTON_NULL, "out is NULL");
    FAILS(pelton_client_submit(client, NULL, 1, 0, SOON, &call), PELTON_NULL, "data is NULL");
    FAILS(pelton_client_submit(client, "x", 1, 0, SOON, NULL), PELTON_NULL, "out_call is NULL");
    FAILS(pelton_client_reserve(client, 1, SOON, NULL), PELTON_NULL, "out is NULL");
    FAILS(pelton_client_notify(client, NULL, 1, SOON), PELTON_NULL, "data is NULL");
    FAILS(pelton_client_await(client, SOON, NULL), PELTON_NULL, "out is NULL");
    FAILS(pelton_client_get_info(client, NULL), PELTON_NULL, "out is NULL");
    FAILS(pelton_service_receive(service, SOON, NULL), PELTON_NULL, "out is NULL");
    FAILS(pelton_service_run(service, 1, NULL, NULL), PELTON_NULL, "handler is NULL");
    FAILS(pelton_service_get_info(service, NULL), PELTON_NULL, "out is NULL");
    FAILS(pelton_responder_reply(responder, NULL, 1), PELTON_NULL, "data is NULL");
    FAILS(pelton_responder_fail(responder, 1, NULL, 1), PELTON_NULL, "data is NULL");
    FAILS(pelton_responder_part(responder, NULL, 1, SOON), PELTON_NULL, "data is NULL");
    FAILS(pelton_responder_reserve(responder, 1, NULL), PELTON_NULL, "out is NULL");
    FAILS(pelton_responder_traceparent(responder, NULL), PELTON_NULL, "out is NULL");
    FAILS(pelton_client_submit_traced(client, NULL, 1, NULL, 0, SOON, &call), PELTON_NULL, "data is NULL");
    end_call();
}

static void a_closed_handle_is_recognised(void) {
    char text[PELTON_TRACEPARENT_SIZE];
    pelton_client *own;
    pelton_service *of;
    begin_call();
    OK(pelton_responder_reply(responder, "y", 1));
    FAILS(pelton_responder_reply(responder, "y", 1), PELTON_CLOSED_HANDLE, "the handle is a closed pelton_responder");
    RETURNS(pelton_responder_fail(responder, 1, "y", 1), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_responder_end(responder), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_responder_part(responder, "y", 1, SOON), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_responder_reserve(responder, 1, &room), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_responder_abort(responder), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_responder_is_cancelled(responder), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_responder_traceparent(responder, text), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_close(responder), PELTON_CLOSED_HANDLE);
    COMPLETES(call, PELTON_REPLY, 0, "y");
    own = client;
    of = service;
    end();
    FAILS(pelton_client_submit(own, "x", 1, 0, SOON, &call), PELTON_CLOSED_HANDLE, "the handle is a closed pelton_client");
    RETURNS(pelton_client_await(own, SOON, &answer), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_client_fd(own), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_close(own), PELTON_CLOSED_HANDLE);
    FAILS(pelton_service_receive(of, SOON, &request), PELTON_CLOSED_HANDLE, "the handle is a closed pelton_service");
    RETURNS(pelton_service_stop(of), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_service_drain(of), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_close(of), PELTON_CLOSED_HANDLE);
}

static void another_kind_of_handle_is_recognised(void) {
    begin_call();
    FAILS(pelton_client_submit((pelton_client *)(void *)service, "x", 1, 0, SOON, &call), PELTON_CLOSED_HANDLE,
            "the handle is a pelton_service, wanted an open pelton_client");
    FAILS(pelton_service_stop((pelton_service *)(void *)client), PELTON_CLOSED_HANDLE,
            "the handle is a pelton_client, wanted an open pelton_service");
    RETURNS(pelton_responder_reply((pelton_responder *)(void *)client, "x", 1), PELTON_CLOSED_HANDLE);
    end_call();
}

static void a_reservation_is_used_once(void) {
    uint64_t other;
    void *reply;
    begin_call();
    RETURNS(pelton_client_submit_reserved(client, 8, 0, &other), PELTON_NOT_RESERVED);
    RETURNS(pelton_responder_reply_reserved(responder, 8), PELTON_NOT_RESERVED);
    RETURNS(pelton_responder_part_reserved(responder, 8), PELTON_NOT_RESERVED);
    FAILS(pelton_client_abort(client), PELTON_NOT_RESERVED, "nothing is reserved");
    OK(pelton_client_reserve(client, 8, SOON, &room));
    FAILS(pelton_client_submit_reserved(client, 9, 0, &other), PELTON_TOO_LARGE, "9 bytes used of 8 reserved");
    /* Its own pointer is nothing special. */
    RETURNS(pelton_client_submit(client, room, 8, 0, SOON, &other), PELTON_RESERVED);
    RETURNS(pelton_client_submit(client, NULL, 0, 0, SOON, &other), PELTON_RESERVED);
    RETURNS(pelton_client_notify(client, room, 8, SOON), PELTON_RESERVED);
    FAILS(pelton_client_submit_reserved(client, 8, 3, &other), PELTON_OPTION, "flags is 3");
    FAILS(pelton_client_submit_reserved(client, 8, 0, NULL), PELTON_NULL, "out_call is NULL");
    OK(pelton_client_abort(client));
    RETURNS(pelton_client_abort(client), PELTON_NOT_RESERVED);
    FAILS(pelton_client_submit(client, "x", 1, 3, SOON, &other), PELTON_OPTION, "flags is 3");
    FAILS(pelton_responder_abort(responder), PELTON_NOT_RESERVED, "nothing is reserved");
    OK(pelton_responder_reserve(responder, 8, &reply));
    FAILS(pelton_responder_reply_reserved(responder, 9), PELTON_TOO_LARGE, "9 bytes used of 8 reserved");
    FAILS(pelton_responder_part_reserved(responder, 9), PELTON_TOO_LARGE, "9 bytes used of 8 reserved");
    RETURNS(pelton_responder_reply(responder, reply, 8), PELTON_RESERVED);
    RETURNS(pelton_responder_part(responder, reply, 8, PELTON_NO_WAIT), PELTON_RESERVED);
    RETURNS(pelton_responder_fail(responder, 1, reply, 1), PELTON_RESERVED);
    RETURNS(pelton_responder_end(responder), PELTON_RESERVED);
    OK(pelton_responder_abort(responder));
    RETURNS(pelton_responder_abort(responder), PELTON_NOT_RESERVED);
    end_call();
}

/* Room of nothing, and less than was reserved. */
static void less_than_a_reservation_can_be_used(void) {
    uint64_t other;
    begin_call();
    OK(pelton_client_reserve(client, 0, SOON, &room));
    OK(pelton_client_submit_reserved(client, 0, 0, &other));
    pelton_responder *second = taken();
    OK(pelton_responder_reserve(second, 0, &room));
    OK(pelton_responder_reply_reserved(second, 0));
    COMPLETES(other, PELTON_REPLY, 0, "");
    OK(pelton_client_reserve(client, 16, SOON, &room));
    memcpy(room, "question", 8);
    OK(pelton_client_submit_reserved(client, 8, 0, &other));
    OK(pelton_service_receive(service, SOON, &request));
    CHECK(request.size == 8 && memcmp(request.data, "question", 8) == 0);
    OK(pelton_service_release(service));
    OK(pelton_responder_reserve(request.responder, 16, &room));
    memcpy(room, "answer", 6);
    OK(pelton_responder_part_reserved(request.responder, 6));
    OK(pelton_responder_reserve(request.responder, 16, &room));
    memcpy(room, "ended", 5);
    OK(pelton_responder_reply_reserved(request.responder, 5));
    RETURNS(pelton_responder_reply_reserved(request.responder, 5), PELTON_CLOSED_HANDLE);
    COMPLETES(other, PELTON_PART, 0, "answer");
    COMPLETES(other, PELTON_REPLY, 0, "ended");
    end_call();
}

static void a_reservation_excludes_other_calls(void) {
    uint64_t other;
    pelton_responder *second;
    begin_call();
    OK(pelton_client_reserve(client, 8, SOON, &room));
    FAILS(pelton_client_submit(client, "x", 1, 0, PELTON_NO_WAIT, &other), PELTON_RESERVED, "commit or abort");
    RETURNS(pelton_client_call(client, "x", 1, SOON, &answer), PELTON_RESERVED);
    RETURNS(pelton_client_notify(client, "x", 1, PELTON_NO_WAIT), PELTON_RESERVED);
    RETURNS(pelton_client_cancel(client, call), PELTON_RESERVED);
    RETURNS(pelton_client_await_call(client, call, SOON, &answer), PELTON_RESERVED);
    RETURNS(pelton_client_arm(client), PELTON_RESERVED);
    CHECK(pelton_client_fd(client) >= 0 && client_info().in_flight == 1);
    OK(pelton_client_disarm(client));
    memcpy(room, "second", 6);
    OK(pelton_client_submit_reserved(client, 6, PELTON_IDEMPOTENT, &other));
    second = taken();
    OK(pelton_responder_reserve(responder, 8, &room));
    FAILS(pelton_responder_reply(responder, "y", 1), PELTON_RESERVED, "commit or abort");
    RETURNS(pelton_responder_fail(responder, 1, "y", 1), PELTON_RESERVED);
    RETURNS(pelton_responder_end(responder), PELTON_RESERVED);
    RETURNS(pelton_responder_part(responder, "y", 1, PELTON_NO_WAIT), PELTON_RESERVED);
    CHECK(pelton_responder_is_cancelled(responder) == 0);
    /* The client's lane is this thread's until then. */
    FAILS(pelton_responder_reserve(second, 8, &room), PELTON_REFUSED, "room reserved for another");
    FAILS(pelton_responder_part(second, "y", 1, PELTON_NO_WAIT), PELTON_REFUSED, "room reserved for another");
    OK(pelton_responder_reply(second, "of the second", 13));
    OK(pelton_responder_abort(responder));
    RETURNS(pelton_service_receive(service, PELTON_NO_WAIT, &request), PELTON_AGAIN);
    COMPLETES(other, PELTON_REPLY, 0, "of the second");
    end_call();
}

static void a_handle_closes_with_what_is_reserved_or_not_released(void) {
    begin_call();
    OK(pelton_responder_reserve(responder, 8, &room));
    OK(pelton_close(responder));
    OK(pelton_client_await_call(client, call, SOON, &answer));
    CHECK(answer.outcome == PELTON_ABANDONED);
    OK(pelton_close(client));

    char name[128];
    pelton_client_options options = soon(0);
    client = client_of(service, place(name, "unix:%s/service"), &options);
    submitted("x", 1);
    OK(pelton_client_reserve(client, 8, SOON, &room));
    OK(pelton_service_receive(service, SOON, &request));
    end();
    /* And a responder by itself, of a service and a client that are gone. */
    OK(pelton_close(request.responder));
}

static void releasing_requires_a_taken_completion(void) {
    begin_call();
    FAILS(pelton_client_release(client), PELTON_NOT_RECEIVED, "released already");
    FAILS(pelton_service_release(service), PELTON_NOT_RECEIVED, "released already");
    end_call();
}

static void a_taken_completion_excludes_other_calls(void) {
    uint64_t other;
    begin_call();
    submitted("z", 1);
    OK(pelton_service_receive(service, SOON, &request));
    FAILS(pelton_service_receive(service, PELTON_NO_WAIT, &request), PELTON_NOT_RELEASED, "release");
    RETURNS(pelton_service_run(service, 1, ignore, NULL), PELTON_NOT_RELEASED);
    RETURNS(pelton_service_arm(service), PELTON_NOT_RELEASED);
    CHECK(pelton_service_fd(service) >= 0 && service_info().dropped == 0);
    OK(pelton_service_disarm(service));
    OK(pelton_responder_reply(request.responder, "z", 1));
    OK(pelton_service_release(service));
    OK(pelton_client_await(client, SOON, &answer));
    FAILS(pelton_client_await(client, PELTON_NO_WAIT, &answer), PELTON_NOT_RELEASED, "release");
    RETURNS(pelton_client_call(client, "x", 1, SOON, &answer), PELTON_NOT_RELEASED);
    RETURNS(pelton_client_arm(client), PELTON_NOT_RELEASED);
    RETURNS(pelton_client_submit(client, "x", 1, 0, PELTON_NO_WAIT, &other), PELTON_NOT_RELEASED);
    RETURNS(pelton_client_reserve(client, 1, PELTON_NO_WAIT, &room), PELTON_NOT_RELEASED);
    RETURNS(pelton_client_notify(client, "x", 1, PELTON_NO_WAIT), PELTON_NOT_RELEASED);
    RETURNS(pelton_client_cancel(client, call), PELTON_NOT_RELEASED);
    CHECK(pelton_client_fd(client) >= 0);
    OK(pelton_client_disarm(client));
    OK(pelton_client_release(client));
    end_call();
}

static void options_are_checked(void) {
    char name[128];
    pelton_client_options options = soon(0);
    pelton_service_options listening = PELTON_SERVICE_OPTIONS_INIT;
    pelton_client_info info;
    pelton_service_info services;
    place(name, "unix:%s/none");
    options.poll_ns = -2;
    FAILS(pelton_client_open(name, &options, &client), PELTON_OPTION, "poll_ns is -2");
    options.poll_ns = 0;
    options.message_bytes_max = 1023;
    FAILS(pelton_client_open(name, &options, &client), PELTON_OPTION, "at least 1024");
    options.message_bytes_max = 0;
    listening.message_bytes_max = 1023;
    FAILS(pelton_service_open(name, &listening, &service), PELTON_OPTION, "at least 1024");
    listening.message_bytes_max = 0;
    listening.clients_max = 1025;
    FAILS(pelton_service_open(name, &listening, &service), PELTON_OPTION, "clients_max is 1025, wanted 1 to 1024");
    listening.clients_max = 0;
    listening.memory_bytes_max = 1000;
    FAILS(pelton_service_open(name, &listening, &service), PELTON_OPTION, "memory_bytes_max is 1000, wanted at least");
    listening.memory_bytes_max = 0;
    options.reserved = 1;
    FAILS(pelton_client_open(name, &options, &client), PELTON_OPTION, "reserved is 1");
    options.reserved = 0;
    options.deadline_ns = 0;
    RETURNS(pelton_client_open(name, &options, &client), PELTON_NO_LISTENER);
    FAILS(pelton_client_open("../x", NULL, &client), PELTON_NAME, "");
    listening.struct_bytes = 7;
    FAILS(pelton_service_open(name, &listening, &service), PELTON_OPTION, "_INIT macro");
    options.struct_bytes = 0;
    FAILS(pelton_client_open(name, &options, &client), PELTON_OPTION, "_INIT macro");
    info.struct_bytes = services.struct_bytes = 12;
    begin();
    FAILS(pelton_client_get_info(client, &info), PELTON_OPTION, "struct_bytes is 12");
    FAILS(pelton_service_get_info(service, &services), PELTON_OPTION, "struct_bytes is 12");
    /* A program of an older header gets no more than it has space for. */
    memset(&info, 0xee, sizeof info);
    info.struct_bytes = offsetof(pelton_client_info, in_flight);
    OK(pelton_client_get_info(client, &info));
    CHECK(info.has_peer == 1 && info.peer_pid == (uint32_t)getpid() && info.peer_uid == getuid());
    CHECK(info.request_bytes_max == 64 << 20 && info.in_flight == UINT64_C(0xeeeeeeeeeeeeeeee));
    CHECK(client_info().services == 1);
    end();
}

static void open_a_sender(const char *name) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_sender *sender;
    options.deadline_ns = SOON;
    FAILS(pelton_sender_open(name, &options, &sender), PELTON_REFUSED, "");
}

static void only_a_client_and_a_service_make_a_link(void) {
    char name[128];
    begin_call();
    pid_t child = start(open_a_sender, place(name, "unix:%s/service"));
    int status = 0;
    while (waitpid(child, &status, WNOHANG) == 0) {
        RETURNS(pelton_service_receive(service, pelton_deadline(1000000), &request), PELTON_AGAIN);
    }
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    end_call();
}

static void what_is_too_large_is_refused_and_can_be_failed(void) {
    static char large[2000];
    pelton_client_options options = soon(64 << 10);
    options.call_bytes_max = 1500;
    uint64_t other;
    begin_with(&options);
    FAILS(pelton_client_submit(client, large, 1501, 0, SOON, &other), PELTON_TOO_LARGE, "1501");
    RETURNS(pelton_client_notify(client, large, 1501, SOON), PELTON_TOO_LARGE);
    RETURNS(pelton_client_reserve(client, 1501, SOON, &room), PELTON_TOO_LARGE);
    RETURNS(pelton_client_reserve(client, SIZE_MAX, SOON, &room), PELTON_TOO_LARGE);
    RETURNS(pelton_client_submit(client, large, SIZE_MAX, 0, SOON, &other), PELTON_TOO_LARGE);
    call = submitted(large, 1500);
    responder = taken();
    FAILS(pelton_responder_reply(responder, large, 1501), PELTON_TOO_LARGE, "1501");
    RETURNS(pelton_responder_fail(responder, 1, large, 1501), PELTON_TOO_LARGE);
    RETURNS(pelton_responder_part(responder, large, 1501, SOON), PELTON_TOO_LARGE);
    RETURNS(pelton_responder_reserve(responder, 1501, &room), PELTON_TOO_LARGE);
    OK(pelton_responder_fail(responder, 7, "too much", 8));
    COMPLETES(call, PELTON_FAILED, 7, "too much");
    end();
}

static void a_reply_without_memory_fails_the_call_and_closes_the_responder(void) {
    static char large[2 << 20];
    char name[128];
    pelton_client_options options = soon(64 << 10);
    pelton_service_options limited = serving(&options);
    limited.memory_bytes_max = 2 << 20;
    OK(pelton_service_open(place(name, "unix:%s/service"), &limited, &service));
    client = client_of(service, name, &options);
    call = submitted("x", 1);
    responder = taken();
    FAILS(pelton_responder_reply(responder, large, sizeof large), PELTON_REFUSED, "2097152 bytes");
    RETURNS(pelton_responder_reply(responder, "y", 1), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_responder_part(responder, "y", 1, SOON), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_close(responder), PELTON_CLOSED_HANDLE);
    OK(pelton_client_await_call(client, call, SOON, &answer));
    CHECK(answer.outcome == PELTON_FAILED && answer.code == 0xffff0001);
    OK(pelton_client_release(client));
    call = submitted("x", 1);
    OK(pelton_responder_reply(taken(), "y", 1));
    COMPLETES(call, PELTON_REPLY, 0, "y");
    end();
}

/* ---- Threads ----------------------------------------------------------------------------------------------------- */

static void *use_from_another_thread(void *unused) {
    (void)unused;
    void *other;
    FAILS(pelton_responder_reply_reserved(responder, 1), PELTON_WRONG_THREAD, "another thread has reserved");
    RETURNS(pelton_responder_part_reserved(responder, 1), PELTON_WRONG_THREAD);
    RETURNS(pelton_responder_abort(responder), PELTON_WRONG_THREAD);
    RETURNS(pelton_responder_reserve(responder, 1, &other), PELTON_WRONG_THREAD);
    RETURNS(pelton_close(responder), PELTON_WRONG_THREAD);
    return NULL;
}

static void the_thread_that_reserves_a_reply_sends_it(void) {
    pthread_t thread;
    begin_call();
    OK(pelton_responder_reserve(responder, 8, &room));
    CHECK(pthread_create(&thread, NULL, use_from_another_thread, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    memcpy(room, "mine", 4);
    OK(pelton_responder_reply_reserved(responder, 4));
    COMPLETES(call, PELTON_REPLY, 0, "mine");
    end();
}

static void *receive_from_another_thread(void *unused) {
    int code;
    (void)unused;
    /* The main thread may be in a call just now. */
    while ((code = pelton_service_receive(service, SOON, &request)) == PELTON_WRONG_THREAD) sched_yield();
    RETURNS(code, PELTON_CLOSED);
    return NULL;
}

static void two_threads_in_one_handle_are_detected(void) {
    pthread_t thread;
    pelton_request none;
    int code;
    if (!getenv("PELTON_CHECK_THREADS")) {
        printf("not looked for without PELTON_CHECK_THREADS: ");
        return;
    }
    begin();
    CHECK(pthread_create(&thread, NULL, receive_from_another_thread, NULL) == 0);
    /* Until the other thread is in its call. */
    while ((code = pelton_service_receive(service, PELTON_NO_WAIT, &none)) == PELTON_AGAIN) sched_yield();
    CHECK(code == PELTON_WRONG_THREAD && strstr(pelton_error_detail(), "another thread is in a call"));
    RETURNS(pelton_close(service), PELTON_WRONG_THREAD);
    OK(pelton_service_stop(service));
    CHECK(pthread_join(thread, NULL) == 0);
    end();
}

/* ---- Forks ------------------------------------------------------------------------------------------------------- */

static void use_handles_of_the_parent(const char *name) {
    pelton_client_info info;
    uint64_t other;
    (void)name;
    info.struct_bytes = sizeof info;
    FAILS(pelton_client_submit(client, "x", 1, 0, PELTON_FOREVER, &other), PELTON_FORKED, "forked");
    RETURNS(pelton_client_await(client, PELTON_FOREVER, &answer), PELTON_FORKED);
    RETURNS(pelton_client_arm(client), PELTON_FORKED);
    RETURNS(pelton_client_cancel(client, call), PELTON_FORKED);
    RETURNS(pelton_client_release(client), PELTON_FORKED);
    RETURNS(pelton_client_get_info(client, &info), PELTON_FORKED);
    RETURNS(pelton_service_receive(service, PELTON_FOREVER, &request), PELTON_FORKED);
    RETURNS(pelton_service_run(service, 1, ignore, NULL), PELTON_FORKED);
    RETURNS(pelton_service_arm(service), PELTON_FORKED);
    RETURNS(pelton_responder_reply(responder, "x", 1), PELTON_FORKED);
    RETURNS(pelton_responder_part(responder, "x", 1, PELTON_FOREVER), PELTON_FORKED);
    RETURNS(pelton_responder_reserve(responder, 1, &room), PELTON_FORKED);
    /* Of the parent's nothing is stopped. */
    OK(pelton_service_stop(service));
    OK(pelton_service_drain(service));
    RETURNS(pelton_close(responder), PELTON_FORKED);
    RETURNS(pelton_close(client), PELTON_FORKED);
    RETURNS(pelton_close(service), PELTON_FORKED);
}

static void a_forked_child_can_only_close(void) {
    begin_call();
    finish(start(use_handles_of_the_parent, ""));
    /* With room reserved, and so its lock. */
    void *own;
    OK(pelton_responder_reserve(responder, 8, &own));
    finish(start(use_handles_of_the_parent, ""));
    memcpy(own, "parent's", 8);
    OK(pelton_responder_reply_reserved(responder, 8));
    COMPLETES(call, PELTON_REPLY, 0, "parent's");
    call = submitted("x", 1);
    responder = taken();
    end_call();
}

/* ---- Draining ---------------------------------------------------------------------------------------------------- */

static void a_draining_service_replies_to_received_requests_and_returns_the_rest(void) {
    begin_call();
    OK(pelton_service_drain(service));
    uint64_t late = submitted("late", 4), later = submitted("later", 5);
    RETURNS(pelton_service_receive(service, PELTON_NO_WAIT, &request), PELTON_AGAIN);
    OK(pelton_responder_reply(responder, "y", 1));
    RETURNS(pelton_service_receive(service, PELTON_FOREVER, &request), PELTON_CLOSED);
    COMPLETES(call, PELTON_REPLY, 0, "y");
    FAILS(pelton_client_await_call(client, later, SOON, &answer), PELTON_REFUSED, "as it drains");
    OK(pelton_client_await(client, SOON, &answer));
    CHECK(answer.call == late && answer.outcome == PELTON_LOST && (int)answer.code == PELTON_AGAIN && answer.size == 0);
    OK(pelton_client_release(client));
    end();
}

int main(void) {
    static const test tests[] = {
        TEST(null_is_refused_everywhere),
        TEST(a_closed_handle_is_recognised),
        TEST(another_kind_of_handle_is_recognised),
        TEST(a_reservation_is_used_once),
        TEST(less_than_a_reservation_can_be_used),
        TEST(a_reservation_excludes_other_calls),
        TEST(a_handle_closes_with_what_is_reserved_or_not_released),
        TEST(releasing_requires_a_taken_completion),
        TEST(a_taken_completion_excludes_other_calls),
        TEST(options_are_checked),
        TEST(only_a_client_and_a_service_make_a_link),
        TEST(what_is_too_large_is_refused_and_can_be_failed),
        TEST(a_reply_without_memory_fails_the_call_and_closes_the_responder),
        TEST(the_thread_that_reserves_a_reply_sends_it),
        TEST(two_threads_in_one_handle_are_detected),
        TEST(a_forked_child_can_only_close),
        TEST(a_draining_service_replies_to_received_requests_and_returns_the_rest),
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
