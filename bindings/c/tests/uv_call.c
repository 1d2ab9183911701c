/* pelton_uv.h: calls in libuv loops, whatever their callbacks do, and what is reported of the peer. */
#include "calls.h"
#include "pelton_uv.h"

enum { CALLS = 20000, AT_A_TIME = 300, KEPT = 100, LONG_ANSWER = 500000 };

/* What a test keeps: the field data of its handles. */
typedef struct notes {
    uint32_t asked, answered, parts, failed, ends, closings, rooms;
    int code;                     /* of the last end */
    pelton_responder *kept[KEPT]; /* by a service that answers later */
    uint32_t numbers[KEPT], count;
    size_t size; /* of each request */
    pelton_uv_client_t *client;
    pelton_uv_service_t *service;
    pelton_uv_call_t *cancelled;
} notes;

/* Heap memory for everything, freed when libuv or the last answer lets go of it, so that a use after that is found. */
static void free_client(pelton_uv_client_t *handle) {
    ((notes *)handle->data)->closings++;
    free(handle);
}

static void free_service(pelton_uv_service_t *handle) {
    ((notes *)handle->data)->closings++;
    free(handle);
}

static void note_end(pelton_uv_client_t *handle, int code) {
    notes *own = (notes *)handle->data;
    own->ends++;
    own->code = code;
    CHECK(!uv_is_active((uv_handle_t *)&handle->poll));
    pelton_uv_client_close(handle, free_client);
}

static void note_services_end(pelton_uv_service_t *handle, int code) {
    notes *own = (notes *)handle->data;
    RETURNS(code, PELTON_CLOSED);
    CHECK(!uv_is_active((uv_handle_t *)&handle->poll));
    pelton_uv_service_close(handle, free_service);
    own->ends++;
}

static void new_client(uv_loop_t *loop, pelton_client *of, notes *own) {
    pelton_uv_client_t *handle = (pelton_uv_client_t *)malloc(sizeof *handle);
    CHECK(handle);
    OK(pelton_uv_client_init(loop, handle, of));
    handle->data = own;
    own->client = handle;
}

static void new_service(uv_loop_t *loop, pelton_service *of, notes *own) {
    pelton_uv_service_t *handle = (pelton_uv_service_t *)malloc(sizeof *handle);
    CHECK(handle);
    OK(pelton_uv_service_init(loop, handle, of));
    handle->data = own;
    own->service = handle;
}

/* Both sides in one loop. */
static void both_sides(uv_loop_t *loop, notes *own, uint64_t capacity) {
    pelton_client_options options = soon(capacity);
    CHECK(uv_loop_init(loop) == 0);
    memset(own, 0, sizeof *own);
    begin_with(&options);
    new_service(loop, service, own);
    new_client(loop, client, own);
}

/* Nothing is left that keeps the loop. */
static void end_loop(uv_loop_t *loop) {
    CHECK(uv_run(loop, UV_RUN_DEFAULT) == 0);
    CHECK(uv_loop_close(loop) == 0);
}

static pelton_uv_call_t *new_call(void) {
    pelton_uv_call_t *call = (pelton_uv_call_t *)calloc(1, sizeof *call);
    CHECK(call);
    return call;
}

static void not_answered(pelton_uv_call_t *call, int code, const pelton_completion *answer) {
    (void)call;
    (void)code;
    CHECK(!answer && !"it was given up");
}

/* ---- Many at once ------------------------------------------------------------------------------------------------ */

static void ask_some(pelton_uv_client_t *handle);

static void count_answer(pelton_uv_call_t *call, int code, const pelton_completion *answer) {
    pelton_uv_client_t *handle = call->handle;
    notes *own = (notes *)handle->data;
    OK(code);
    CHECK(answer->outcome == PELTON_REPLY && answer->call == call->call && answer->size == own->size);
    CHECK(is_filled(answer->data, (uint64_t)(uintptr_t)call->data, answer->size));
    free(call);
    own->answered++;
    if (own->answered == CALLS) {
        pelton_uv_client_close(handle, free_client);
        pelton_uv_service_close(own->service, free_service);
        return;
    }
    /* What is read is released before anything is asked. */
    OK(pelton_client_release(handle->client));
    ask_some(handle);
    if (own->answered % 1000 == 0) {
        pelton_uv_client_stop(handle);
        CHECK(!own->client->end_cb);
        OK(pelton_uv_client_start(handle, own->rooms ? handle->space_cb : NULL, note_end));
    }
}

static void ask_some(pelton_uv_client_t *handle) {
    notes *own = (notes *)handle->data;
    static unsigned char request[30000];
    while (own->asked < CALLS && own->asked - own->answered < AT_A_TIME) {
        pelton_uv_call_t *call = new_call();
        call->data = (void *)(uintptr_t)own->asked;
        fill(request, own->asked, own->size);
        int code = pelton_uv_call_start(call, handle, request, own->size, 0, count_answer);
        if (code != PELTON_OK) {
            RETURNS(code, PELTON_AGAIN);
            free(call);
            break;
        }
        own->asked++;
    }
}

static void ask_when_there_is_room(pelton_uv_client_t *handle) {
    ((notes *)handle->data)->rooms++;
    ask_some(handle);
}

/* Keeps some, and answers them in another order. */
static void answer_later(pelton_uv_service_t *handle, const pelton_request *request) {
    notes *own = (notes *)handle->data;
    static unsigned char kept[KEPT][30000];
    memcpy(kept[own->count], request->data, request->size);
    own->kept[own->count++] = request->responder;
    if (own->count < KEPT) return;
    while (own->count > 0) {
        own->count--;
        OK(pelton_responder_reply(own->kept[own->count], kept[own->count], request->size));
    }
}

static void replies_to_many_calls_come_in_any_order(void) {
    uv_loop_t loop;
    notes own;
    both_sides(&loop, &own, 0);
    own.size = 40;
    OK(pelton_uv_service_start(own.service, answer_later, note_services_end));
    OK(pelton_uv_client_start(own.client, NULL, note_end));
    ask_some(own.client);
    end_loop(&loop);
    CHECK(own.answered == CALLS && own.closings == 2 && own.ends == 0);
}

static void echo_at_once(pelton_uv_service_t *handle, const pelton_request *request) {
    (void)handle;
    OK(pelton_responder_reply(request->responder, request->data, request->size));
}

static void the_space_callback_follows_a_call_without_space(void) {
    uv_loop_t loop;
    notes own;
    /* Larger than a lane's largest message, and some that fill it. */
    both_sides(&loop, &own, 64 << 10);
    own.size = 4000;
    OK(pelton_uv_service_start(own.service, echo_at_once, note_services_end));
    OK(pelton_uv_client_start(own.client, ask_when_there_is_room, note_end));
    ask_some(own.client);
    CHECK(own.asked < AT_A_TIME);
    end_loop(&loop);
    CHECK(own.answered == CALLS && own.closings == 2 && own.rooms > 0);
}

/* ---- In pieces, in parts, given up ------------------------------------------------------------------------------- */

static void close_both(pelton_uv_call_t *call, int code, const pelton_completion *answer) {
    notes *own = (notes *)call->handle->data;
    OK(code);
    CHECK(answer->size == LONG_ANSWER && is_filled(answer->data, 1, answer->size));
    own->answered++;
    pelton_uv_client_close(call->handle, free_client);
    pelton_uv_service_close(own->service, free_service);
    free(call);
}

static void ask_what_is_large(uv_timer_t *timer) {
    notes *own = (notes *)timer->data;
    static unsigned char large[LONG_ANSWER];
    fill(large, 1, sizeof large);
    OK(pelton_uv_call_start(new_call(), own->client, large, sizeof large, 0, close_both));
    uv_close((uv_handle_t *)timer, NULL);
}

static void a_request_in_pieces_arrives_though_nothing_else_happens(void) {
    uv_loop_t loop;
    uv_timer_t timer;
    notes own;
    both_sides(&loop, &own, 64 << 10);
    OK(pelton_uv_service_start(own.service, echo_at_once, note_services_end));
    OK(pelton_uv_client_start(own.client, NULL, note_end));
    CHECK(uv_timer_init(&loop, &timer) == 0);
    timer.data = &own;
    /* From a callback that is none of the client's, when it is armed and sleeps. */
    CHECK(uv_timer_start(&timer, ask_what_is_large, 1, 0) == 0);
    end_loop(&loop);
    CHECK(own.answered == 1 && own.closings == 2);
}

static void count_parts(pelton_uv_call_t *call, int code, const pelton_completion *answer) {
    notes *own = (notes *)call->handle->data;
    OK(code);
    if (answer->outcome == PELTON_PART) {
        CHECK(answer->size == own->parts++);
        return;
    }
    CHECK(answer->outcome == PELTON_END && own->parts == 100);
    OK(pelton_client_release(call->handle->client));
    RETURNS(pelton_uv_call_cancel(call), PELTON_AGAIN);
    free(call);
    OK(pelton_uv_call_cancel(own->cancelled));
    free(own->cancelled);
    OK(pelton_service_stop(own->service->service));
}

static void answer_in_parts(pelton_uv_service_t *handle, const pelton_request *request) {
    notes *own = (notes *)handle->data;
    char part[100] = "";
    if (request->size > 0) {
        own->kept[own->count++] = request->responder;
        return;
    }
    for (size_t i = 0; i < 100; i++) OK(pelton_responder_part(request->responder, part, i, PELTON_NO_WAIT));
    OK(pelton_responder_end(request->responder));
}

static void parts_come_one_by_one_and_a_cancelled_call_does_not_complete(void) {
    uv_loop_t loop;
    notes own;
    both_sides(&loop, &own, 0);
    own.cancelled = new_call();
    OK(pelton_uv_service_start(own.service, answer_in_parts, note_services_end));
    OK(pelton_uv_client_start(own.client, NULL, note_end));
    OK(pelton_uv_call_start(own.cancelled, own.client, "x", 1, 0, not_answered));
    OK(pelton_uv_call_start(new_call(), own.client, NULL, 0, 0, count_parts));
    /* The service's end is the client's: it is closed by that. */
    end_loop(&loop);
    CHECK(own.parts == 100 && own.count == 1 && own.ends == 2 && own.closings == 2 && own.code == PELTON_CLOSED);
    int code = pelton_responder_reply(own.kept[0], "x", 1);
    CHECK(code == PELTON_CLOSED || code == PELTON_PEER_DIED);
}

/* ---- Ends -------------------------------------------------------------------------------------------------------- */

static void note_lost(pelton_uv_call_t *call, int code, const pelton_completion *answer) {
    notes *own = (notes *)call->handle->data;
    RETURNS(code, PELTON_PEER_DIED);
    CHECK(!answer && own->ends == 0);
    own->failed++;
    free(call);
}

/* Takes all, and stands. */
static void take_and_stand(const char *name) {
    pelton_service *of;
    OK(pelton_service_open(name, NULL, &of));
    for (;;) {
        pelton_request request;
        OK(pelton_service_receive(of, SOON, &request));
        OK(pelton_service_release(of));
    }
}

static void every_call_completes_when_the_service_is_killed(void) {
    char name[128], path[128];
    uv_loop_t loop;
    notes own;
    pelton_client_options options = soon(0);
    CHECK(uv_loop_init(&loop) == 0);
    memset(&own, 0, sizeof own);
    pid_t child = start(take_and_stand, place(name, "unix:%s/service"));
    OK(pelton_client_open(name, &options, &client));
    new_client(&loop, client, &own);
    OK(pelton_uv_client_start(own.client, NULL, note_end));
    for (int i = 0; i < 1000; i++) OK(pelton_uv_call_start(new_call(), own.client, "x", 1, 0, note_lost));
    kill_now(child);
    end_loop(&loop);
    CHECK(own.failed == 1000 && own.ends == 1 && own.code == PELTON_PEER_DIED && own.closings == 1);
    CHECK(unlink(place(path, "%s/service")) == 0);
}

static void serve_in_a_loop(const char *name) {
    uv_loop_t loop;
    notes own;
    CHECK(uv_loop_init(&loop) == 0);
    memset(&own, 0, sizeof own);
    OK(pelton_service_open(name, NULL, &service));
    new_service(&loop, service, &own);
    OK(pelton_uv_service_start(own.service, echo_at_once, note_services_end));
    uv_run(&loop, UV_RUN_DEFAULT);
}

static void a_service_in_a_loop_answers_another_process(void) {
    char name[128], path[128];
    pelton_client_options options = soon(0);
    pid_t child = start(serve_in_a_loop, place(name, "unix:%s/service"));
    OK(pelton_client_open(name, &options, &client));
    for (uint32_t i = 0; i < 1000; i++) submitted(&i, sizeof i);
    for (uint32_t i = 0; i < 1000; i++) {
        pelton_completion answer;
        OK(pelton_client_await(client, SOON, &answer));
        CHECK(answer.size == sizeof i);
        OK(pelton_client_release(client));
    }
    kill_now(child);
    OK(pelton_close(client));
    CHECK(unlink(place(path, "%s/service")) == 0);
}

static void a_closed_handle_calls_no_callback(void) {
    uv_loop_t loop;
    notes own;
    both_sides(&loop, &own, 0);
    pelton_uv_call_t *call = new_call();
    OK(pelton_uv_client_start(own.client, NULL, note_end));
    OK(pelton_uv_call_start(call, own.client, "x", 1, 0, not_answered));
    OK(pelton_uv_service_start(own.service, echo_at_once, note_services_end));
    pelton_uv_service_stop(own.service);
    pelton_uv_client_close(own.client, free_client);
    pelton_uv_service_close(own.service, free_service);
    end_loop(&loop);
    CHECK(own.closings == 2 && own.ends == 0);
    free(call);
}

int main(void) {
    static const test tests[] = {
        TEST(replies_to_many_calls_come_in_any_order),
        TEST(the_space_callback_follows_a_call_without_space),
        TEST(a_request_in_pieces_arrives_though_nothing_else_happens),
        TEST(parts_come_one_by_one_and_a_cancelled_call_does_not_complete),
        TEST(every_call_completes_when_the_service_is_killed),
        TEST(a_service_in_a_loop_answers_another_process),
        TEST(a_closed_handle_calls_no_callback),
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
