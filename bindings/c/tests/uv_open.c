/* pelton_uv.h: opening in a libuv loop: both sides in one loop, without a listener, with one that never answers,
 * cancelled. */
#include "calls.h"
#include "pelton_uv.h"

#include <sys/socket.h>
#include <sys/un.h>

static uv_loop_t loop;
static int opened, closed;
static int last_code;

static void run_to_the_end(void) {
    CHECK(uv_run(&loop, UV_RUN_DEFAULT) == 0);
    CHECK(uv_loop_close(&loop) == 0);
}

/* Heap memory, so that a use after the callback is found. */
static pelton_uv_open_t *new_request(void) {
    pelton_uv_open_t *request = (pelton_uv_open_t *)calloc(1, sizeof *request);
    CHECK(request);
    request->data = &opened;
    return request;
}

static void note_failure(pelton_uv_open_t *request, int code) {
    last_code = code;
    CHECK(code != PELTON_OK && request->data == &opened && !request->sender && !request->receiver && !request->client);
    CHECK(request->detail[0]);
    free(request);
    opened++;
}

/* ---- A client and a service of one loop ---- */

static pelton_uv_client_t client_handle;
static pelton_uv_service_t service_handle;
static pelton_uv_call_t call;

static void count_close_of_client(pelton_uv_client_t *handle) {
    (void)handle;
    closed++;
}

static void count_close_of_service(pelton_uv_service_t *handle) {
    (void)handle;
    closed++;
}

static void no_client_end(pelton_uv_client_t *handle, int code) {
    (void)handle;
    fail(__FILE__, __LINE__, "a client ended", pelton_code_text(code));
}

static void no_service_end(pelton_uv_service_t *handle, int code) {
    (void)handle;
    fail(__FILE__, __LINE__, "a service ended", pelton_code_text(code));
}

static void close_both(pelton_uv_call_t *done, int code, const pelton_completion *completion) {
    OK(code);
    CHECK(done == &call && completion->size == 5);
    pelton_uv_client_close(&client_handle, count_close_of_client);
    pelton_uv_service_close(&service_handle, count_close_of_service);
}

static void call_once(pelton_uv_open_t *request, int code) {
    OK(code);
    OK(pelton_uv_client_init(&loop, &client_handle, request->client));
    free(request);
    OK(pelton_uv_client_start(&client_handle, NULL, no_client_end));
    OK(pelton_uv_call_start(&call, &client_handle, "hello", 5, 0, close_both));
}

static void reply_the_same(pelton_uv_service_t *handle, const pelton_request *request) {
    (void)handle;
    OK(pelton_responder_reply(request->responder, request->data, request->size));
}

static void a_client_opens_in_the_loop_of_its_service(void) {
    char name[128];
    closed = 0;
    CHECK(uv_loop_init(&loop) == 0);
    OK(pelton_service_open(place(name, "unix:%s/service"), NULL, &service));
    OK(pelton_uv_service_init(&loop, &service_handle, service));
    OK(pelton_uv_service_start(&service_handle, reply_the_same, no_service_end));
    OK(pelton_uv_client_open(&loop, new_request(), name, NULL, call_once));
    run_to_the_end();
    CHECK(closed == 2);
}

/* ---- A sender and a receiver of many, of one loop ---- */

static pelton_uv_receiver_t receiver_handle;

static void send_once(pelton_uv_open_t *request, int code) {
    OK(code);
    OK(pelton_sender_send(request->sender, "hello", 5, PELTON_NO_WAIT));
    OK(pelton_close(request->sender));
    free(request);
    opened++;
}

static void close_after_one(pelton_uv_receiver_t *handle, const pelton_message *message) {
    CHECK(message->size == 5);
    pelton_uv_receiver_close(handle, NULL);
}

static void no_receiver_end(pelton_uv_receiver_t *handle, int code) {
    (void)handle;
    fail(__FILE__, __LINE__, "a receiver ended", pelton_code_text(code));
}

static void a_sender_opens_in_the_loop_of_its_receiver(void) {
    char name[128];
    pelton_receiver *receiver;
    opened = 0;
    CHECK(uv_loop_init(&loop) == 0);
    OK(pelton_receiver_gather(place(name, "unix:%s/socket"), NULL, &receiver));
    OK(pelton_uv_receiver_init(&loop, &receiver_handle, receiver));
    OK(pelton_uv_receiver_start(&receiver_handle, close_after_one, no_receiver_end));
    OK(pelton_uv_sender_open(&loop, new_request(), name, NULL, send_once));
    run_to_the_end();
    CHECK(opened == 1);
}

/* ---- Failures ---- */

static void without_a_listener_the_callback_has_the_reason(void) {
    char name[128];
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_client_options client_options = soon(0);
    opened = 0;
    CHECK(uv_loop_init(&loop) == 0);
    place(name, "unix:%s/socket");
    OK(pelton_uv_receiver_open(&loop, new_request(), name, NULL, note_failure));
    CHECK(opened == 0);
    run_to_the_end();
    CHECK(opened == 1 && last_code == PELTON_NO_LISTENER);
    CHECK(uv_loop_init(&loop) == 0);
    options.deadline_ns = client_options.deadline_ns = pelton_deadline(20000000);
    OK(pelton_uv_sender_open(&loop, new_request(), name, &options, note_failure));
    OK(pelton_uv_client_open(&loop, new_request(), name, &client_options, note_failure));
    run_to_the_end();
    CHECK(opened == 3 && last_code == PELTON_TIMED_OUT);
    /* What is refused at the start has no callback. */
    CHECK(uv_loop_init(&loop) == 0);
    pelton_uv_open_t *request = new_request();
    options.lanes = 2;
    RETURNS(pelton_uv_sender_open(&loop, request, "unix:/nowhere", &options, note_failure), PELTON_OPTION);
    free(request);
    run_to_the_end();
    CHECK(opened == 3);
}

static int ticks;

static void count_tick(uv_timer_t *timer) {
    if (++ticks == 20) uv_close((uv_handle_t *)timer, NULL);
}

static pelton_uv_open_t *cancelled;

static void note_cancellation(pelton_uv_open_t *request, int code) {
    CHECK(request == cancelled && code == PELTON_SYSTEM && errno == ECANCELED && strstr(request->detail, "cancelled"));
    free(request);
    opened++;
}

static void cancel(uv_timer_t *timer) {
    uv_close((uv_handle_t *)timer, NULL);
    OK(pelton_uv_open_cancel(cancelled));
    RETURNS(pelton_uv_open_cancel(cancelled), PELTON_AGAIN);
}

static void a_listener_that_never_answers_keeps_the_loop_running_until_the_open_is_cancelled(void) {
    char name[128], path[128];
    struct sockaddr_un address;
    pelton_client_options options = soon(0);
    uv_timer_t timer, cancelling;
    memset(&address, 0, sizeof address);
    address.sun_family = AF_UNIX;
    CHECK(strlen(place(path, "%s/silent")) < sizeof address.sun_path);
    strcpy(address.sun_path, path);
    int silent = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK(silent >= 0 && bind(silent, (struct sockaddr *)&address, sizeof address) == 0 && listen(silent, 8) == 0);
    opened = ticks = 0;
    CHECK(uv_loop_init(&loop) == 0 && uv_timer_init(&loop, &timer) == 0 && uv_timer_init(&loop, &cancelling) == 0);
    OK(pelton_uv_client_open(&loop, cancelled = new_request(), place(name, "unix:%s/silent"), &options, note_cancellation));
    options.deadline_ns = pelton_deadline(20000000);
    OK(pelton_uv_client_open(&loop, new_request(), name, &options, note_failure));
    CHECK(uv_timer_start(&timer, count_tick, 1, 1) == 0 && uv_timer_start(&cancelling, cancel, 100, 0) == 0);
    run_to_the_end();
    CHECK(opened == 2 && ticks == 20 && last_code == PELTON_TIMED_OUT);
    CHECK(close(silent) == 0 && unlink(path) == 0);
}

/* ---- A publisher and a subscriber of one loop ---- */

enum { PUBLISHED = 5000 };
static pelton_uv_publisher_t publisher_handle;
static pelton_uv_subscriber_t subscriber_handle;
static uint32_t sent, delivered, spaces;

static void count_close_of_publisher(pelton_uv_publisher_t *handle) {
    (void)handle;
    closed++;
}

static void count_close_of_subscriber(pelton_uv_subscriber_t *handle) {
    (void)handle;
    closed++;
}

static void no_publisher_end(pelton_uv_publisher_t *handle, int code) {
    (void)handle;
    fail(__FILE__, __LINE__, "a publisher ended", pelton_code_text(code));
}

/* Fills the small lane again and again, so it needs a callback for each time that there is space. */
static void publish(pelton_uv_publisher_t *handle) {
    char message[100] = {0};
    int code = PELTON_OK;
    spaces++;
    while (sent < PUBLISHED && code == PELTON_OK) {
        memcpy(message, &sent, sizeof sent);
        code = pelton_publisher_send(handle->publisher, message, sizeof message, PELTON_NO_WAIT);
        sent += code == PELTON_OK;
    }
    if (sent == PUBLISHED) {
        pelton_uv_publisher_close(handle, count_close_of_publisher);
        return;
    }
    RETURNS(code, PELTON_AGAIN);
    OK(pelton_uv_publisher_start(handle, sizeof message, publish, no_publisher_end));
}

static void count_delivery(pelton_uv_subscriber_t *handle, const pelton_delivery *delivery) {
    uint32_t number;
    CHECK(handle == &subscriber_handle && delivery->size == 100 && delivery->missed == 0);
    memcpy(&number, delivery->data, sizeof number);
    CHECK(number == delivered && delivery->number == ++delivered);
}

static void close_at_the_end(pelton_uv_subscriber_t *handle, int code) {
    last_code = code;
    CHECK(!uv_is_active((uv_handle_t *)&handle->poll));
    pelton_uv_subscriber_close(handle, count_close_of_subscriber);
}

static void deliver_and_publish(pelton_uv_open_t *request, int code) {
    OK(code);
    OK(pelton_uv_subscriber_init(&loop, &subscriber_handle, request->subscriber));
    OK(pelton_uv_subscriber_start(&subscriber_handle, count_delivery, close_at_the_end));
    /* Stopped, it starts again. */
    pelton_uv_subscriber_stop(&subscriber_handle);
    OK(pelton_uv_subscriber_start(&subscriber_handle, count_delivery, close_at_the_end));
    OK(pelton_uv_publisher_start(&publisher_handle, 100, publish, no_publisher_end));
    free(request);
    opened++;
}

static void a_subscriber_opens_in_the_loop_of_its_publisher(void) {
    pelton_publisher_options options = PELTON_PUBLISHER_OPTIONS_INIT;
    pelton_publisher *publisher;
    char name[128];
    opened = closed = 0;
    options.capacity = 64 << 10;
    CHECK(uv_loop_init(&loop) == 0);
    OK(pelton_publisher_open(place(name, "unix:%s/published"), &options, &publisher));
    OK(pelton_uv_publisher_init(&loop, &publisher_handle, publisher));
    /* It admits, and has nothing to send yet. */
    OK(pelton_uv_publisher_start(&publisher_handle, 0, NULL, no_publisher_end));
    OK(pelton_uv_subscriber_open(&loop, new_request(), name, NULL, deliver_and_publish));
    run_to_the_end();
    CHECK(opened == 1 && closed == 2 && sent == PUBLISHED && delivered == PUBLISHED && spaces > 1);
    RETURNS(last_code, PELTON_CLOSED);
}

/* Another process, which is killed while it has a message. */
static void takes_one(const char *name) {
    pelton_subscriber_options options = PELTON_SUBSCRIBER_OPTIONS_INIT;
    pelton_subscriber *subscriber;
    pelton_delivery delivery;
    options.durable = "audit";
    options.deadline_ns = SOON;
    OK(pelton_subscriber_open(name, &options, &subscriber));
    OK(pelton_subscriber_receive(subscriber, SOON, &delivery));
    for (;;) pause();
}

static void a_durable_subscription_continues_in_a_loop(void) {
    pelton_publisher_options options = PELTON_PUBLISHER_OPTIONS_INIT;
    pelton_subscriber_options durable = PELTON_SUBSCRIBER_OPTIONS_INIT;
    pelton_publisher *publisher;
    char name[128], message[100] = {0};
    pid_t killed;
    opened = closed = delivered = 0;
    sent = 1;
    options.capacity = 64 << 10;
    CHECK(uv_loop_init(&loop) == 0);
    OK(pelton_publisher_open(place(name, "path:%s/durable"), &options, &publisher));
    killed = start(takes_one, name);
    OK(pelton_publisher_wait_subscribers(publisher, 1, SOON));
    OK(pelton_publisher_send(publisher, message, sizeof message, SOON));
    await_sleep(killed);
    kill_now(killed);
    OK(pelton_uv_publisher_init(&loop, &publisher_handle, publisher));
    durable.durable = "audit";
    OK(pelton_uv_subscriber_open(&loop, new_request(), name, &durable, deliver_and_publish));
    run_to_the_end();
    CHECK(opened == 1 && closed == 2 && sent == PUBLISHED && delivered == PUBLISHED);
    RETURNS(last_code, PELTON_CLOSED);
    CHECK(nftw(name + strlen("path:"), remove_one, 16, FTW_DEPTH | FTW_PHYS) == 0);
}

static void note_space(pelton_uv_publisher_t *handle) {
    spaces++;
    pelton_uv_publisher_close(handle, NULL);
}

static uint64_t receive_some(pelton_subscriber *subscriber, uint64_t most) {
    pelton_delivery delivery;
    uint64_t received = 0;
    while (received < most && pelton_subscriber_receive(subscriber, PELTON_NO_WAIT, &delivery) == PELTON_OK) {
        OK(pelton_subscriber_release(subscriber));
        received++;
    }
    return received;
}

/* What the program does with the publisher while the callback is due. */
static void a_due_callback_is_called_whatever_the_publisher_does_meanwhile(void) {
    for (int what = 0; what < 4; what++) {
        pelton_publisher_options options = PELTON_PUBLISHER_OPTIONS_INIT;
        pelton_publisher *publisher;
        pelton_subscriber *subscriber, *other = NULL;
        char message[30000] = {0};
        int code;
        spaces = 0;
        options.capacity = 64 << 10;
        CHECK(uv_loop_init(&loop) == 0);
        OK(pelton_publisher_open(NULL, &options, &publisher));
        OK(pelton_publisher_subscriber(publisher, NULL, &subscriber));
        OK(pelton_uv_publisher_init(&loop, &publisher_handle, publisher));
        while ((code = pelton_publisher_send(publisher, message, 1000, PELTON_NO_WAIT)) == PELTON_OK) {
        }
        RETURNS(code, PELTON_AGAIN);
        OK(pelton_uv_publisher_start(&publisher_handle, sizeof message, note_space, no_publisher_end));
        /* A failed start changes nothing. */
        RETURNS(pelton_uv_publisher_start(&publisher_handle, 64 << 10, publish, NULL), PELTON_TOO_LARGE);
        /* Too little for a ring. */
        CHECK(receive_some(subscriber, 5) == 5);
        if (what == 0) OK(pelton_publisher_send(publisher, "small", 5, PELTON_NO_WAIT));
        if (what == 1) RETURNS(pelton_publisher_send(publisher, message, sizeof message, PELTON_NO_WAIT), PELTON_AGAIN);
        if (what == 2) OK(pelton_publisher_subscriber(publisher, NULL, &other));
        receive_some(subscriber, UINT64_MAX);
        if (what == 3) OK(pelton_publisher_wait_subscribers(publisher, 1, PELTON_NO_WAIT));
        run_to_the_end();
        CHECK(spaces == 1);
        OK(pelton_close(subscriber));
        if (other) OK(pelton_close(other));
    }
}

int main(void) {
    static const test tests[] = {
        TEST(a_client_opens_in_the_loop_of_its_service),
        TEST(a_sender_opens_in_the_loop_of_its_receiver),
        TEST(a_subscriber_opens_in_the_loop_of_its_publisher),
        TEST(a_durable_subscription_continues_in_a_loop),
        TEST(a_due_callback_is_called_whatever_the_publisher_does_meanwhile),
        TEST(without_a_listener_the_callback_has_the_reason),
        TEST(a_listener_that_never_answers_keeps_the_loop_running_until_the_open_is_cancelled),
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
