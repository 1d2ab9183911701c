/* Calls: every mistake has its code and says what is wrong, and nothing is lost by it. */
#include "calls.h"

static pelton_request request;
static pelton_completion answer;
static pelton_responder *responder; /* of a call in flight */
static uint64_t call;
static void *room;
static pelton_info info;

static void begin_call(void) {
    begin();
    call = submitted("x", 1);
    responder = taken();
}

static void end_call(void) {
    OK(pelton_reply(responder, "y", 1));
    ANSWERED(call, PELTON_REPLY, 0, "y");
    end();
}

static void ignore(void *context, const pelton_request *one) {
    (void)context;
    pelton_responder_close(one->responder);
}

static void null_is_refused_everywhere(void) {
    char name[128];
    REFUSES(pelton_client_open(NULL, NULL, &client), PELTON_NULL, "name is NULL");
    REFUSES(pelton_client_open("x", NULL, NULL), PELTON_NULL, "out is NULL");
    REFUSES(pelton_service_listen(NULL, NULL, &service), PELTON_NULL, "name is NULL");
    REFUSES(pelton_service_listen(place(name, "unix:%s/none"), NULL, NULL), PELTON_NULL, "out is NULL");
    REFUSES(pelton_call(NULL, "x", 1, SOON, &answer), PELTON_NULL, "client is NULL");
    REFUSES(pelton_submit(NULL, "x", 1, SOON, &call), PELTON_NULL, "client is NULL");
    REFUSES(pelton_submit_reserve(NULL, 1, SOON, &room), PELTON_NULL, "client is NULL");
    REFUSES(pelton_submit_commit(NULL, 1, &call), PELTON_NULL, "client is NULL");
    REFUSES(pelton_submit_abort(NULL), PELTON_NULL, "client is NULL");
    REFUSES(pelton_notify(NULL, "x", 1, SOON), PELTON_NULL, "client is NULL");
    REFUSES(pelton_cancel(NULL, 1), PELTON_NULL, "client is NULL");
    REFUSES(pelton_mark_idempotent(NULL, 1), PELTON_NULL, "client is NULL");
    REFUSES(pelton_await(NULL, PELTON_ANY_CALL, SOON, &answer), PELTON_NULL, "client is NULL");
    REFUSES(pelton_await_copy(NULL, PELTON_ANY_CALL, NULL, 0, SOON, &answer), PELTON_NULL, "client is NULL");
    REFUSES(pelton_client_release(NULL), PELTON_NULL, "client is NULL");
    REFUSES(pelton_client_fd(NULL), PELTON_NULL, "client is NULL");
    REFUSES(pelton_client_arm(NULL), PELTON_NULL, "client is NULL");
    REFUSES(pelton_client_disarm(NULL), PELTON_NULL, "client is NULL");
    REFUSES(pelton_client_info(NULL, &info), PELTON_NULL, "client is NULL");
    REFUSES(pelton_service_receive(NULL, SOON, &request), PELTON_NULL, "service is NULL");
    REFUSES(pelton_service_release(NULL), PELTON_NULL, "service is NULL");
    REFUSES(pelton_service_run(NULL, 1, ignore, NULL), PELTON_NULL, "service is NULL");
    REFUSES(pelton_service_stop(NULL), PELTON_NULL, "service is NULL");
    REFUSES(pelton_service_drain(NULL), PELTON_NULL, "service is NULL");
    REFUSES(pelton_service_fd(NULL), PELTON_NULL, "service is NULL");
    REFUSES(pelton_service_arm(NULL), PELTON_NULL, "service is NULL");
    REFUSES(pelton_service_disarm(NULL), PELTON_NULL, "service is NULL");
    REFUSES(pelton_service_info(NULL, &info), PELTON_NULL, "service is NULL");
    REFUSES(pelton_reply(NULL, "x", 1), PELTON_NULL, "responder is NULL");
    REFUSES(pelton_reply_fail(NULL, 1, "x", 1), PELTON_NULL, "responder is NULL");
    REFUSES(pelton_reply_end(NULL), PELTON_NULL, "responder is NULL");
    REFUSES(pelton_reply_part(NULL, "x", 1, SOON), PELTON_NULL, "responder is NULL");
    REFUSES(pelton_reply_reserve(NULL, 1, &room), PELTON_NULL, "responder is NULL");
    REFUSES(pelton_reply_commit(NULL, PELTON_REPLY, 1), PELTON_NULL, "responder is NULL");
    REFUSES(pelton_reply_commit(NULL, PELTON_PART, 1), PELTON_NULL, "responder is NULL");
    REFUSES(pelton_reply_abort(NULL), PELTON_NULL, "responder is NULL");
    REFUSES(pelton_responder_is_cancelled(NULL), PELTON_NULL, "responder is NULL");
    OK(pelton_client_close(NULL));
    OK(pelton_service_close(NULL));
    OK(pelton_responder_close(NULL));

    begin_call();
    REFUSES(pelton_call(client, NULL, 1, SOON, &answer), PELTON_NULL, "data is NULL");
    REFUSES(pelton_call(client, "x", 1, SOON, NULL), PELTON_NULL, "out is NULL");
    REFUSES(pelton_submit(client, NULL, 1, SOON, &call), PELTON_NULL, "data is NULL");
    REFUSES(pelton_submit(client, "x", 1, SOON, NULL), PELTON_NULL, "out_call is NULL");
    REFUSES(pelton_submit_reserve(client, 1, SOON, NULL), PELTON_NULL, "out is NULL");
    REFUSES(pelton_submit_commit(client, 1, NULL), PELTON_NULL, "out_call is NULL");
    REFUSES(pelton_notify(client, NULL, 1, SOON), PELTON_NULL, "data is NULL");
    REFUSES(pelton_await(client, PELTON_ANY_CALL, SOON, NULL), PELTON_NULL, "out is NULL");
    REFUSES(pelton_await_copy(client, PELTON_ANY_CALL, NULL, 1, SOON, &answer), PELTON_NULL, "buffer");
    REFUSES(pelton_await_copy(client, PELTON_ANY_CALL, NULL, 0, SOON, NULL), PELTON_NULL, "out is NULL");
    REFUSES(pelton_client_info(client, NULL), PELTON_NULL, "out is NULL");
    REFUSES(pelton_service_receive(service, SOON, NULL), PELTON_NULL, "out is NULL");
    REFUSES(pelton_service_run(service, 1, NULL, NULL), PELTON_NULL, "handler is NULL");
    REFUSES(pelton_service_info(service, NULL), PELTON_NULL, "out is NULL");
    REFUSES(pelton_reply(responder, NULL, 1), PELTON_NULL, "data is NULL");
    REFUSES(pelton_reply_fail(responder, 1, NULL, 1), PELTON_NULL, "data is NULL");
    REFUSES(pelton_reply_part(responder, NULL, 1, SOON), PELTON_NULL, "data is NULL");
    REFUSES(pelton_reply_reserve(responder, 1, NULL), PELTON_NULL, "out is NULL");
    end_call();
}

static void a_closed_handle_is_recognised(void) {
    pelton_client *own;
    pelton_service *of;
    begin_call();
    OK(pelton_reply(responder, "y", 1));
    REFUSES(pelton_reply(responder, "y", 1), PELTON_CLOSED_HANDLE, "responder is closed");
    ANSWERS(pelton_reply_fail(responder, 1, "y", 1), PELTON_CLOSED_HANDLE);
    ANSWERS(pelton_reply_end(responder), PELTON_CLOSED_HANDLE);
    ANSWERS(pelton_reply_part(responder, "y", 1, SOON), PELTON_CLOSED_HANDLE);
    ANSWERS(pelton_reply_reserve(responder, 1, &room), PELTON_CLOSED_HANDLE);
    ANSWERS(pelton_reply_commit(responder, PELTON_REPLY, 1), PELTON_CLOSED_HANDLE);
    ANSWERS(pelton_reply_abort(responder), PELTON_CLOSED_HANDLE);
    ANSWERS(pelton_responder_is_cancelled(responder), PELTON_CLOSED_HANDLE);
    ANSWERS(pelton_responder_close(responder), PELTON_CLOSED_HANDLE);
    ANSWERED(call, PELTON_REPLY, 0, "y");
    own = client;
    of = service;
    end();
    REFUSES(pelton_submit(own, "x", 1, SOON, &call), PELTON_CLOSED_HANDLE, "client is closed");
    ANSWERS(pelton_await(own, PELTON_ANY_CALL, SOON, &answer), PELTON_CLOSED_HANDLE);
    ANSWERS(pelton_client_fd(own), PELTON_CLOSED_HANDLE);
    ANSWERS(pelton_client_close(own), PELTON_CLOSED_HANDLE);
    REFUSES(pelton_service_receive(of, SOON, &request), PELTON_CLOSED_HANDLE, "service is closed");
    ANSWERS(pelton_service_stop(of), PELTON_CLOSED_HANDLE);
    ANSWERS(pelton_service_drain(of), PELTON_CLOSED_HANDLE);
    ANSWERS(pelton_service_close(of), PELTON_CLOSED_HANDLE);
}

static void another_kind_of_handle_is_recognised(void) {
    begin_call();
    REFUSES(pelton_submit((pelton_client *)(void *)service, "x", 1, SOON, &call), PELTON_CLOSED_HANDLE, "another kind's");
    REFUSES(pelton_service_stop((pelton_service *)(void *)client), PELTON_CLOSED_HANDLE, "another kind's");
    REFUSES(pelton_reply((pelton_responder *)(void *)client, "x", 1), PELTON_CLOSED_HANDLE, "another kind's");
    REFUSES(pelton_receiver_close((pelton_receiver *)(void *)service), PELTON_CLOSED_HANDLE, "another kind's");
    end_call();
}

static void committing_needs_a_reservation(void) {
    uint64_t other;
    begin_call();
    REFUSES(pelton_submit_commit(client, 1, &other), PELTON_NOT_RESERVED, "nothing is reserved");
    REFUSES(pelton_submit_abort(client), PELTON_NOT_RESERVED, "nothing is reserved");
    OK(pelton_submit_reserve(client, 8, SOON, &room));
    REFUSES(pelton_submit_commit(client, 9, &other), PELTON_TOO_LARGE, "9 bytes committed of 8");
    OK(pelton_submit_abort(client));
    ANSWERS(pelton_submit_commit(client, 1, &other), PELTON_NOT_RESERVED);
    REFUSES(pelton_reply_commit(responder, PELTON_REPLY, 1), PELTON_NOT_RESERVED, "nothing is reserved");
    REFUSES(pelton_reply_commit(responder, PELTON_PART, 1), PELTON_NOT_RESERVED, "nothing is reserved");
    REFUSES(pelton_reply_abort(responder), PELTON_NOT_RESERVED, "nothing is reserved");
    OK(pelton_reply_reserve(responder, 8, &room));
    REFUSES(pelton_reply_commit(responder, PELTON_REPLY, 9), PELTON_TOO_LARGE, "9 bytes committed of 8");
    REFUSES(pelton_reply_commit(responder, PELTON_PART, 9), PELTON_TOO_LARGE, "9 bytes committed of 8");
    REFUSES(pelton_reply_commit(responder, PELTON_END, 1), PELTON_OPTION, "outcome is 3");
    OK(pelton_reply_abort(responder));
    ANSWERS(pelton_reply_commit(responder, PELTON_REPLY, 1), PELTON_NOT_RESERVED);
    end_call();
}

static void what_is_reserved_comes_first(void) {
    uint64_t other;
    pelton_responder *second;
    begin_call();
    OK(pelton_submit_reserve(client, 8, SOON, &room));
    REFUSES(pelton_submit(client, "x", 1, PELTON_NO_WAIT, &other), PELTON_RESERVED, "commit or abort");
    ANSWERS(pelton_call(client, "x", 1, SOON, &answer), PELTON_RESERVED);
    ANSWERS(pelton_notify(client, "x", 1, PELTON_NO_WAIT), PELTON_RESERVED);
    ANSWERS(pelton_cancel(client, call), PELTON_RESERVED);
    ANSWERS(pelton_mark_idempotent(client, call), PELTON_RESERVED);
    ANSWERS(pelton_await(client, call, SOON, &answer), PELTON_RESERVED);
    ANSWERS(pelton_await_copy(client, call, NULL, 0, SOON, &answer), PELTON_RESERVED);
    ANSWERS(pelton_client_arm(client), PELTON_RESERVED);
    CHECK(pelton_client_fd(client) >= 0 && client_info().calls == 1);
    OK(pelton_client_disarm(client));
    memcpy(room, "second", 6);
    OK(pelton_submit_commit(client, 6, &other));
    second = taken();
    OK(pelton_reply_reserve(responder, 8, &room));
    REFUSES(pelton_reply(responder, "y", 1), PELTON_RESERVED, "commit or abort");
    ANSWERS(pelton_reply_fail(responder, 1, "y", 1), PELTON_RESERVED);
    ANSWERS(pelton_reply_end(responder), PELTON_RESERVED);
    ANSWERS(pelton_reply_part(responder, "y", 1, PELTON_NO_WAIT), PELTON_RESERVED);
    CHECK(pelton_responder_is_cancelled(responder) == 0);
    /* The client's lane is this thread's until then. */
    REFUSES(pelton_reply_reserve(second, 8, &room), PELTON_REFUSED, "room reserved for another");
    REFUSES(pelton_reply_part(second, "y", 1, PELTON_NO_WAIT), PELTON_REFUSED, "room reserved for another");
    OK(pelton_reply(second, "of the second", 13));
    OK(pelton_reply_abort(responder));
    ANSWERS(pelton_service_receive(service, PELTON_NO_WAIT, &request), PELTON_AGAIN);
    ANSWERED(other, PELTON_REPLY, 0, "of the second");
    end_call();
}

static void a_handle_closes_with_what_is_reserved_or_not_released(void) {
    begin_call();
    OK(pelton_reply_reserve(responder, 8, &room));
    OK(pelton_responder_close(responder));
    OK(pelton_await(client, call, SOON, &answer));
    CHECK(answer.outcome == PELTON_ABANDONED);
    OK(pelton_client_close(client));

    char name[128];
    pelton_options options = soon(0);
    client = client_of(service, place(name, "unix:%s/service"), &options);
    submitted("x", 1);
    OK(pelton_submit_reserve(client, 8, SOON, &room));
    OK(pelton_service_receive(service, SOON, &request));
    end();
    /* And a responder by itself, of a service and a client that are gone. */
    OK(pelton_responder_close(request.responder));
}

static void releasing_needs_what_was_taken(void) {
    begin_call();
    REFUSES(pelton_client_release(client), PELTON_NOT_RECEIVED, "released already");
    REFUSES(pelton_service_release(service), PELTON_NOT_RECEIVED, "released already");
    end_call();
}

static void what_was_taken_comes_first(void) {
    uint64_t other;
    begin_call();
    submitted("z", 1);
    OK(pelton_service_receive(service, SOON, &request));
    REFUSES(pelton_service_receive(service, PELTON_NO_WAIT, &request), PELTON_NOT_RELEASED, "release");
    ANSWERS(pelton_service_run(service, 1, ignore, NULL), PELTON_NOT_RELEASED);
    ANSWERS(pelton_service_arm(service), PELTON_NOT_RELEASED);
    CHECK(pelton_service_fd(service) >= 0 && service_info().dropped == 0);
    OK(pelton_service_disarm(service));
    OK(pelton_reply(request.responder, "z", 1));
    OK(pelton_service_release(service));
    OK(pelton_await(client, PELTON_ANY_CALL, SOON, &answer));
    REFUSES(pelton_await(client, PELTON_ANY_CALL, PELTON_NO_WAIT, &answer), PELTON_NOT_RELEASED, "release");
    ANSWERS(pelton_await_copy(client, PELTON_ANY_CALL, NULL, 0, PELTON_NO_WAIT, &answer), PELTON_NOT_RELEASED);
    ANSWERS(pelton_call(client, "x", 1, SOON, &answer), PELTON_NOT_RELEASED);
    ANSWERS(pelton_client_arm(client), PELTON_NOT_RELEASED);
    ANSWERS(pelton_submit(client, "x", 1, PELTON_NO_WAIT, &other), PELTON_NOT_RELEASED);
    ANSWERS(pelton_submit_reserve(client, 1, PELTON_NO_WAIT, &room), PELTON_NOT_RELEASED);
    ANSWERS(pelton_notify(client, "x", 1, PELTON_NO_WAIT), PELTON_NOT_RELEASED);
    ANSWERS(pelton_cancel(client, call), PELTON_NOT_RELEASED);
    ANSWERS(pelton_mark_idempotent(client, call), PELTON_NOT_RELEASED);
    CHECK(pelton_client_fd(client) >= 0);
    OK(pelton_client_disarm(client));
    OK(pelton_client_release(client));
    end_call();
}

static void options_are_checked(void) {
    char name[128];
    pelton_options options = soon(0);
    place(name, "unix:%s/none");
    options.hold_ns = -2;
    REFUSES(pelton_client_open(name, &options, &client), PELTON_OPTION, "hold_ns is -2");
    options.hold_ns = 0;
    options.message_bytes_max = 1023;
    REFUSES(pelton_service_listen(name, &options, &service), PELTON_OPTION, "at least 1024");
    options.message_bytes_max = 0;
    options.deadline_ns = 0;
    REFUSES(pelton_client_open(name, &options, &client), PELTON_NO_LISTENER, "nobody listens");
    REFUSES(pelton_client_open("../x", NULL, &client), PELTON_NAME, "");
    /* A program of an older header. */
    options.struct_bytes = 80;
    options.call_bytes_max = 1;
    OK(pelton_service_listen(name, &options, &service));
    OK(pelton_service_close(service));
    info.struct_bytes = 12;
    begin();
    REFUSES(pelton_client_info(client, &info), PELTON_OPTION, "struct_bytes is 12");
    REFUSES(pelton_service_info(service, &info), PELTON_OPTION, "struct_bytes is 12");
    memset(&info, 0xee, sizeof info);
    info.struct_bytes = 96;
    OK(pelton_client_info(client, &info));
    CHECK(info.has_peer == 1 && info.peer_pid == (uint32_t)getpid() && info.peer_uid == getuid());
    CHECK(info.message_bytes_max == 64 << 20 && info.calls == UINT64_C(0xeeeeeeeeeeeeeeee));
    CHECK(client_info().services == 1);
    end();
}

static void open_a_sender(const char *name) {
    pelton_options options = soon(0);
    pelton_sender *sender;
    REFUSES(pelton_sender_open(name, &options, &sender), PELTON_REFUSED, "");
}

static void only_a_client_and_a_service_make_a_link(void) {
    char name[128];
    begin_call();
    pid_t child = start(open_a_sender, place(name, "unix:%s/service"));
    int status = 0;
    while (waitpid(child, &status, WNOHANG) == 0) {
        ANSWERS(pelton_service_receive(service, pelton_deadline(1000000), &request), PELTON_AGAIN);
    }
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    end_call();
}

static void what_is_too_large_is_refused_and_can_be_failed(void) {
    static char large[2000];
    pelton_options options = soon(64 << 10);
    options.call_bytes_max = 1500;
    uint64_t other;
    begin_with(&options);
    REFUSES(pelton_submit(client, large, 1501, SOON, &other), PELTON_TOO_LARGE, "1501");
    ANSWERS(pelton_notify(client, large, 1501, SOON), PELTON_TOO_LARGE);
    ANSWERS(pelton_submit_reserve(client, 1501, SOON, &room), PELTON_TOO_LARGE);
    ANSWERS(pelton_submit_reserve(client, SIZE_MAX, SOON, &room), PELTON_TOO_LARGE);
    ANSWERS(pelton_submit(client, large, SIZE_MAX, SOON, &other), PELTON_TOO_LARGE);
    call = submitted(large, 1500);
    responder = taken();
    REFUSES(pelton_reply(responder, large, 1501), PELTON_TOO_LARGE, "1501");
    ANSWERS(pelton_reply_fail(responder, 1, large, 1501), PELTON_TOO_LARGE);
    ANSWERS(pelton_reply_part(responder, large, 1501, SOON), PELTON_TOO_LARGE);
    ANSWERS(pelton_reply_reserve(responder, 1501, &room), PELTON_TOO_LARGE);
    OK(pelton_reply_fail(responder, 7, "too much", 8));
    ANSWERED(call, PELTON_FAILED, 7, "too much");
    end();
}

static void an_answer_too_large_for_a_buffer_stays(void) {
    char buffer[8];
    begin();
    uint64_t one = submitted("1", 1), two = submitted("2", 1);
    OK(pelton_reply(taken(), "one, at length", 14));
    OK(pelton_reply(taken(), "two", 3));
    REFUSES(pelton_await_copy(client, PELTON_ANY_CALL, buffer, sizeof buffer, SOON, &answer), PELTON_TOO_SMALL, "14 bytes");
    CHECK(answer.call == one && answer.size == 14);
    ANSWERS(pelton_client_release(client), PELTON_NOT_RECEIVED);
    /* Another call's is not kept from who asks for it. */
    OK(pelton_await_copy(client, two, buffer, sizeof buffer, SOON, &answer));
    CHECK(answer.size == 3 && memcmp(buffer, "two", 3) == 0);
    ANSWERS(pelton_await_copy(client, one, NULL, 0, SOON, &answer), PELTON_TOO_SMALL);
    ANSWERED(one, PELTON_REPLY, 0, "one, at length");
    end();
}

/* ---- Threads -------------------------------------------------------------------------------------------------------------- */

static void *commit_from_another_thread(void *unused) {
    (void)unused;
    void *other;
    REFUSES(pelton_reply_commit(responder, PELTON_REPLY, 1), PELTON_WRONG_THREAD, "another thread has reserved");
    ANSWERS(pelton_reply_commit(responder, PELTON_PART, 1), PELTON_WRONG_THREAD);
    ANSWERS(pelton_reply_abort(responder), PELTON_WRONG_THREAD);
    ANSWERS(pelton_reply_reserve(responder, 1, &other), PELTON_WRONG_THREAD);
    ANSWERS(pelton_responder_close(responder), PELTON_WRONG_THREAD);
    return NULL;
}

static void who_reserves_a_reply_commits_it(void) {
    pthread_t thread;
    begin_call();
    OK(pelton_reply_reserve(responder, 8, &room));
    CHECK(pthread_create(&thread, NULL, commit_from_another_thread, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    memcpy(room, "mine", 4);
    OK(pelton_reply_commit(responder, PELTON_REPLY, 4));
    ANSWERED(call, PELTON_REPLY, 0, "mine");
    end();
}

static void *receive_from_another_thread(void *unused) {
    int code;
    (void)unused;
    /* The main thread may be in a call just now. */
    while ((code = pelton_service_receive(service, SOON, &request)) == PELTON_WRONG_THREAD) sched_yield();
    ANSWERS(code, PELTON_CLOSED);
    return NULL;
}

static void two_threads_in_one_handle_are_recognised(void) {
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
    ANSWERS(pelton_service_close(service), PELTON_WRONG_THREAD);
    OK(pelton_service_stop(service));
    CHECK(pthread_join(thread, NULL) == 0);
    end();
}

/* ---- Forks ---------------------------------------------------------------------------------------------------------------- */

static void use_handles_of_the_parent(const char *name) {
    uint64_t other;
    (void)name;
    REFUSES(pelton_submit(client, "x", 1, PELTON_FOREVER, &other), PELTON_FORKED, "forked");
    ANSWERS(pelton_await(client, PELTON_ANY_CALL, PELTON_FOREVER, &answer), PELTON_FORKED);
    ANSWERS(pelton_client_arm(client), PELTON_FORKED);
    ANSWERS(pelton_cancel(client, call), PELTON_FORKED);
    ANSWERS(pelton_client_release(client), PELTON_FORKED);
    ANSWERS(pelton_client_info(client, &info), PELTON_FORKED);
    ANSWERS(pelton_service_receive(service, PELTON_FOREVER, &request), PELTON_FORKED);
    ANSWERS(pelton_service_run(service, 1, ignore, NULL), PELTON_FORKED);
    ANSWERS(pelton_service_arm(service), PELTON_FORKED);
    ANSWERS(pelton_reply(responder, "x", 1), PELTON_FORKED);
    ANSWERS(pelton_reply_part(responder, "x", 1, PELTON_FOREVER), PELTON_FORKED);
    ANSWERS(pelton_reply_reserve(responder, 1, &room), PELTON_FORKED);
    ANSWERS(pelton_reply_commit(responder, PELTON_REPLY, 1), PELTON_FORKED);
    /* Of the parent's nothing is stopped. */
    OK(pelton_service_stop(service));
    OK(pelton_service_drain(service));
    ANSWERS(pelton_responder_close(responder), PELTON_FORKED);
    ANSWERS(pelton_client_close(client), PELTON_FORKED);
    ANSWERS(pelton_service_close(service), PELTON_FORKED);
}

static void a_forked_child_can_only_close(void) {
    begin_call();
    finish(start(use_handles_of_the_parent, ""));
    /* With room reserved, and so its lock. */
    OK(pelton_reply_reserve(responder, 8, &room));
    finish(start(use_handles_of_the_parent, ""));
    memcpy(room, "parent's", 8);
    OK(pelton_reply_commit(responder, PELTON_REPLY, 8));
    ANSWERED(call, PELTON_REPLY, 0, "parent's");
    call = submitted("x", 1);
    responder = taken();
    end_call();
}

/* ---- Draining --------------------------------------------------------------------------------------------------------------- */

static void a_service_that_drains_answers_what_it_took_and_gives_back_the_rest(void) {
    begin_call();
    OK(pelton_mark_idempotent(client, call));
    ANSWERS(pelton_mark_idempotent(client, call + 1), PELTON_AGAIN);
    OK(pelton_service_drain(service));
    uint64_t late = submitted("late", 4), later = submitted("later", 5);
    ANSWERS(pelton_service_receive(service, PELTON_NO_WAIT, &request), PELTON_AGAIN);
    OK(pelton_reply(responder, "y", 1));
    ANSWERS(pelton_service_receive(service, PELTON_FOREVER, &request), PELTON_CLOSED);
    ANSWERED(call, PELTON_REPLY, 0, "y");
    REFUSES(pelton_await(client, later, SOON, &answer), PELTON_REFUSED, "as it drains");
    OK(pelton_await(client, PELTON_ANY_CALL, SOON, &answer));
    CHECK(answer.call == late && answer.outcome == PELTON_LOST && (int)answer.code == PELTON_AGAIN && answer.size == 0);
    OK(pelton_client_release(client));
    end();
}

int main(void) {
    static const test tests[] = {
        TEST(null_is_refused_everywhere),
        TEST(a_closed_handle_is_recognised),
        TEST(another_kind_of_handle_is_recognised),
        TEST(committing_needs_a_reservation),
        TEST(what_is_reserved_comes_first),
        TEST(a_handle_closes_with_what_is_reserved_or_not_released),
        TEST(releasing_needs_what_was_taken),
        TEST(what_was_taken_comes_first),
        TEST(options_are_checked),
        TEST(only_a_client_and_a_service_make_a_link),
        TEST(what_is_too_large_is_refused_and_can_be_failed),
        TEST(an_answer_too_large_for_a_buffer_stays),
        TEST(who_reserves_a_reply_commits_it),
        TEST(two_threads_in_one_handle_are_recognised),
        TEST(a_forked_child_can_only_close),
        TEST(a_service_that_drains_answers_what_it_took_and_gives_back_the_rest),
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
