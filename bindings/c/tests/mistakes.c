/* Every mistake that can be recognised, and the code that it gets. Run with and without
 * PELTON_CHECK_THREADS. */
#include "check.h"

static pelton_sender *sender;
static pelton_receiver *receiver;
static pelton_message message;

static void begin(void) {
    pelton_options options = PELTON_OPTIONS_INIT;
    options.capacity = 64 << 10;
    OK(pelton_threads(&options, &sender, &receiver));
}

static void end(void) {
    OK(pelton_close(sender));
    OK(pelton_close(receiver));
}

static void null_is_refused_everywhere(void) {
    char text[16];
    struct iovec batch[2] = {{text, 1}, {NULL, 1}};
    size_t size;
    int fd = 0;
    pelton_held *held;
    pelton_listener *listener;
    begin();
    REFUSES(pelton_sender_open(NULL, NULL, &sender), PELTON_NULL, "name is NULL");
    REFUSES(pelton_sender_open("x", NULL, NULL), PELTON_NULL, "out is NULL");
    REFUSES(pelton_receiver_open(NULL, NULL, &receiver), PELTON_NULL, "name");
    REFUSES(pelton_receiver_open("x", NULL, NULL), PELTON_NULL, "out");
    REFUSES(pelton_threads(NULL, NULL, &receiver), PELTON_NULL, "out_sender");
    REFUSES(pelton_threads(NULL, &sender, NULL), PELTON_NULL, "out_receiver");
    REFUSES(pelton_listen(NULL, NULL, &listener), PELTON_NULL, "name");
    REFUSES(pelton_listen("x", NULL, NULL), PELTON_NULL, "out");
    REFUSES(pelton_accept_sender(NULL, PELTON_NO_WAIT, &sender), PELTON_NULL, "listener is NULL");
    REFUSES(pelton_accept_receiver(NULL, PELTON_NO_WAIT, &receiver), PELTON_NULL, "listener");
    REFUSES(pelton_send(NULL, "x", 1, PELTON_NO_WAIT), PELTON_NULL, "sender is NULL");
    REFUSES(pelton_send(sender, NULL, 1, PELTON_NO_WAIT), PELTON_NULL, "data is NULL");
    REFUSES(pelton_reserve(sender, 1, PELTON_NO_WAIT, NULL), PELTON_NULL, "out");
    REFUSES(pelton_send_batch(NULL, batch, 2, PELTON_NO_WAIT), PELTON_NULL, "sender");
    REFUSES(pelton_send_batch(sender, NULL, 2, PELTON_NO_WAIT), PELTON_NULL, "messages");
    REFUSES(pelton_send_batch(sender, batch, 2, PELTON_NO_WAIT), PELTON_NULL, "data");
    REFUSES(pelton_send_descriptors(NULL, "x", 1, &fd, 1, PELTON_NO_WAIT), PELTON_NULL, "sender");
    REFUSES(pelton_send_descriptors(sender, NULL, 1, &fd, 1, PELTON_NO_WAIT), PELTON_NULL, "data");
    REFUSES(pelton_send_descriptors(sender, "x", 1, NULL, 1, PELTON_NO_WAIT), PELTON_NULL, "fds");
    REFUSES(pelton_trim(NULL), PELTON_NULL, "sender");
    REFUSES(pelton_receive(NULL, PELTON_NO_WAIT, &message), PELTON_NULL, "receiver is NULL");
    REFUSES(pelton_receive(receiver, PELTON_NO_WAIT, NULL), PELTON_NULL, "out");
    REFUSES(pelton_receive_batch(NULL, PELTON_NO_WAIT, &message, 1, &size), PELTON_NULL, "receiver");
    REFUSES(pelton_receive_batch(receiver, PELTON_NO_WAIT, NULL, 1, &size), PELTON_NULL, "out");
    REFUSES(pelton_receive_batch(receiver, PELTON_NO_WAIT, &message, 1, NULL), PELTON_NULL, "out_count");
    REFUSES(pelton_receive_copy(NULL, text, sizeof text, PELTON_NO_WAIT, &size), PELTON_NULL, "receiver");
    REFUSES(pelton_receive_copy(receiver, NULL, 1, PELTON_NO_WAIT, &size), PELTON_NULL, "buffer");
    REFUSES(pelton_receive_copy(receiver, text, sizeof text, PELTON_NO_WAIT, NULL), PELTON_NULL, "out_size");
    REFUSES(pelton_hold(NULL, &held), PELTON_NULL, "receiver");
    REFUSES(pelton_hold(receiver, NULL), PELTON_NULL, "out");
    REFUSES(pelton_take_descriptors(NULL, &fd, 1, &size), PELTON_NULL, "receiver");
    REFUSES(pelton_take_descriptors(receiver, NULL, 1, &size), PELTON_NULL, "out");
    REFUSES(pelton_take_descriptors(receiver, &fd, 1, NULL), PELTON_NULL, "out_count");
    REFUSES(pelton_arm_send(NULL, 1), PELTON_NULL, "sender");
    REFUSES(pelton_get_info(sender, NULL), PELTON_NULL, "out");
    ANSWERS(pelton_receive(receiver, PELTON_NO_WAIT, &message), PELTON_AGAIN);
    end();
}

static void a_closed_handle_is_recognised(void) {
    pelton_held *held;
    pelton_listener *listener;
    pelton_info info;
    char name[128];
    begin();
    OK(pelton_send(sender, "x", 1, PELTON_NO_WAIT));
    OK(pelton_receive(receiver, PELTON_NO_WAIT, &message));
    OK(pelton_hold(receiver, &held));
    OK(pelton_listen(place(name, "unix:%s/socket"), NULL, &listener));
    OK(pelton_close(held));
    OK(pelton_close(listener));
    end();
    info.struct_bytes = sizeof info;
    REFUSES(pelton_close(held), PELTON_CLOSED_HANDLE, "held is closed");
    REFUSES(pelton_close(listener), PELTON_CLOSED_HANDLE, "listener is closed");
    ANSWERS(pelton_accept_sender(listener, PELTON_NO_WAIT, &sender), PELTON_CLOSED_HANDLE);
    REFUSES(pelton_send(sender, "x", 1, PELTON_NO_WAIT), PELTON_CLOSED_HANDLE, "sender is closed");
    REFUSES(pelton_receive(receiver, PELTON_NO_WAIT, &message), PELTON_CLOSED_HANDLE, "receiver is closed");
    ANSWERS(pelton_release(receiver), PELTON_CLOSED_HANDLE);
    ANSWERS(pelton_get_info(sender, &info), PELTON_CLOSED_HANDLE);
    ANSWERS(pelton_fd(sender), PELTON_CLOSED_HANDLE);
    ANSWERS(pelton_close(sender), PELTON_CLOSED_HANDLE);
    ANSWERS(pelton_close(receiver), PELTON_CLOSED_HANDLE);
}

static void another_kind_of_handle_is_recognised(void) {
    begin();
    REFUSES(pelton_send((pelton_sender *)(void *)receiver, "x", 1, PELTON_NO_WAIT), PELTON_CLOSED_HANDLE,
            "the handle is a pelton_receiver, wanted a pelton_sender");
    REFUSES(pelton_receive((pelton_receiver *)(void *)sender, PELTON_NO_WAIT, &message), PELTON_CLOSED_HANDLE,
            "the handle is a pelton_sender, wanted a pelton_receiver");
    ANSWERS(pelton_senders_send((pelton_senders *)(void *)sender, "x", 1, PELTON_NO_WAIT), PELTON_CLOSED_HANDLE);
    OK(pelton_send(sender, "x", 1, PELTON_NO_WAIT));
    end();
}

static void committing_needs_a_reservation(void) {
    void *room;
    begin();
    REFUSES(pelton_commit(sender, 0), PELTON_NOT_RESERVED, "nothing is reserved");
    ANSWERS(pelton_abort(sender), PELTON_NOT_RESERVED);
    OK(pelton_reserve(sender, 8, PELTON_NO_WAIT, &room));
    REFUSES(pelton_commit(sender, 9), PELTON_TOO_LARGE, "9 bytes committed of 8");
    OK(pelton_commit(sender, 8));
    ANSWERS(pelton_commit(sender, 8), PELTON_NOT_RESERVED);
    /* A reservation that failed leaves none, whatever was there before. */
    OK(pelton_reserve(sender, 8, PELTON_NO_WAIT, &room));
    ANSWERS(pelton_reserve(sender, 1 << 20, PELTON_NO_WAIT, &room), PELTON_TOO_LARGE);
    ANSWERS(pelton_commit(sender, 8), PELTON_NOT_RESERVED);
    end();
}

static void what_is_reserved_comes_first(void) {
    void *room;
    pelton_info info;
    struct iovec batch = {&info, sizeof info};
    int fd = 0;
    info.struct_bytes = sizeof info;
    begin();
    OK(pelton_reserve(sender, 8, PELTON_NO_WAIT, &room));
    REFUSES(pelton_send(sender, "x", 1, PELTON_NO_WAIT), PELTON_RESERVED, "commit or abort");
    ANSWERS(pelton_send_batch(sender, &batch, 1, PELTON_NO_WAIT), PELTON_RESERVED);
    ANSWERS(pelton_send_descriptors(sender, "x", 1, &fd, 1, PELTON_NO_WAIT), PELTON_RESERVED);
    ANSWERS(pelton_drain(sender, PELTON_NO_WAIT), PELTON_RESERVED);
    ANSWERS(pelton_trim(sender), PELTON_RESERVED);
    ANSWERS(pelton_arm_send(sender, 1), PELTON_RESERVED);
    OK(pelton_disarm(sender));
    ANSWERS(pelton_arm(sender), PELTON_RESERVED);
    ANSWERS(pelton_resume(sender, PELTON_NO_WAIT), PELTON_RESERVED);
    ANSWERS(pelton_sync(sender), PELTON_RESERVED);
    OK(pelton_get_info(sender, &info));
    CHECK(pelton_fd(sender) >= 0);
    OK(pelton_abort(sender));
    OK(pelton_send(sender, "x", 1, PELTON_NO_WAIT));
    OK(pelton_reserve(sender, 8, PELTON_NO_WAIT, &room));
    end();
}

static void releasing_needs_a_message(void) {
    pelton_held *held;
    size_t count;
    int fd;
    pelton_message messages[2];
    begin();
    REFUSES(pelton_release(receiver), PELTON_NOT_RECEIVED, "no message is received");
    ANSWERS(pelton_hold(receiver, &held), PELTON_NOT_RECEIVED);
    count = 7;
    ANSWERS(pelton_take_descriptors(receiver, &fd, 1, &count), PELTON_NOT_RECEIVED);
    CHECK(count == 7);
    for (int i = 0; i < 4; i++) {
        OK(pelton_send(sender, "x", 1, PELTON_NO_WAIT));
    }
    OK(pelton_receive(receiver, PELTON_NO_WAIT, &message));
    OK(pelton_release(receiver));
    REFUSES(pelton_release(receiver), PELTON_NOT_RECEIVED, "released already");
    OK(pelton_receive(receiver, PELTON_NO_WAIT, &message));
    OK(pelton_hold(receiver, &held));
    ANSWERS(pelton_release(receiver), PELTON_NOT_RECEIVED);
    ANSWERS(pelton_hold(receiver, &held), PELTON_NOT_RECEIVED);
    OK(pelton_receive_batch(receiver, PELTON_NO_WAIT, messages, 2, &count));
    CHECK(count == 2);
    pelton_held *none;
    REFUSES(pelton_hold(receiver, &none), PELTON_NOT_RECEIVED, "a batch");
    OK(pelton_take_descriptors(receiver, &fd, 1, &count));
    OK(pelton_release(receiver));
    ANSWERS(pelton_release(receiver), PELTON_NOT_RECEIVED);
    OK(pelton_close(held));
    ANSWERS(pelton_close(held), PELTON_CLOSED_HANDLE);
    ANSWERS(pelton_receive_batch(receiver, PELTON_NO_WAIT, messages, 0, &count), PELTON_TOO_SMALL);
    end();
}

static void what_is_received_comes_first(void) {
    char text[8];
    size_t size;
    pelton_info info;
    info.struct_bytes = sizeof info;
    begin();
    for (int batch = 0; batch < 2; batch++) {
        pelton_message messages[3];
        for (int i = 0; i < 3; i++) {
            OK(pelton_send(sender, "x", 1, PELTON_NO_WAIT));
        }
        OK(pelton_receive_batch(receiver, PELTON_NO_WAIT, messages, batch ? 2 : 1, &size));
        REFUSES(pelton_receive(receiver, PELTON_NO_WAIT, &message), PELTON_NOT_RELEASED, "release or hold");
        ANSWERS(pelton_receive_batch(receiver, PELTON_NO_WAIT, &message, 1, &size), PELTON_NOT_RELEASED);
        ANSWERS(pelton_receive_copy(receiver, text, sizeof text, PELTON_NO_WAIT, &size), PELTON_NOT_RELEASED);
        ANSWERS(pelton_arm(receiver), PELTON_NOT_RELEASED);
        ANSWERS(pelton_resume(receiver, PELTON_NO_WAIT), PELTON_NOT_RELEASED);
        ANSWERS(pelton_sync(receiver), PELTON_NOT_RELEASED);
        OK(pelton_get_info(receiver, &info));
        OK(pelton_disarm(receiver));
        CHECK(pelton_fd(receiver) >= 0);
        OK(pelton_release(receiver));
        while (pelton_receive_copy(receiver, text, sizeof text, PELTON_NO_WAIT, &size) == PELTON_OK) {
        }
    }
    OK(pelton_send(sender, "x", 1, PELTON_NO_WAIT));
    OK(pelton_receive(receiver, PELTON_NO_WAIT, &message));
    OK(pelton_close(receiver));
    ANSWERS(pelton_drain(sender, PELTON_NO_WAIT), PELTON_CLOSED);
    CHECK(strstr(pelton_error_detail(), "1 messages were not released"));
    OK(pelton_close(sender));
}

static void options_are_checked(void) {
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_info info;
    options.wait = 2;
    REFUSES(pelton_threads(&options, &sender, &receiver), PELTON_OPTION, "wait is 2");
    options.wait = PELTON_SPIN;
    options.capacity = 1;
    REFUSES(pelton_threads(&options, &sender, &receiver), PELTON_OPTION, "capacity is 1");
    options.capacity = 1 << 20;
    options.message_bytes_max = 1 << 20;
    REFUSES(pelton_threads(&options, &sender, &receiver), PELTON_OPTION, "message_bytes_max");
    options.message_bytes_max = 0;
    options.uids_count = 1;
    REFUSES(pelton_threads(&options, &sender, &receiver), PELTON_NULL, "options.uids");
    options.uids_count = 0;
    options.create = 1;
    REFUSES(pelton_sender_open("events", &options, &sender), PELTON_OPTION, "create is 1");
    options.create = 2;
    REFUSES(pelton_sender_open("path:/nowhere", &options, &sender), PELTON_OPTION, "create is 2");
    options.create = 0;
    options.struct_bytes = 0;
    REFUSES(pelton_threads(&options, &sender, &receiver), PELTON_OPTION, "PELTON_OPTIONS_INIT");
    struct {
        pelton_options options;
        uint64_t later;
    } newer = {PELTON_OPTIONS_INIT, 0};
    newer.options.struct_bytes = sizeof newer;
    OK(pelton_threads(&newer.options, &sender, &receiver));
    static const uint32_t unset[] = {0, 7, sizeof info + 4, 4104, UINT32_MAX - 7};
    for (size_t i = 0; i < sizeof unset / sizeof *unset; i++) {
        info.struct_bytes = unset[i];
        REFUSES(pelton_get_info(sender, &info), PELTON_OPTION, "sizeof(pelton_info)");
    }
    end();
    newer.later = 1;
    REFUSES(pelton_threads(&newer.options, &sender, &receiver), PELTON_OPTION, "does not know");
    REFUSES(pelton_sender_open("path:", NULL, &sender), PELTON_NAME, "names no directory");
    REFUSES(pelton_sender_open("no good", NULL, &sender), PELTON_NAME, "short name");
    pelton_listener *listener;
    ANSWERS(pelton_listen("path:/tmp", NULL, &listener), PELTON_NAME);
    ANSWERS(pelton_listen("unix:\xff", NULL, &listener), PELTON_NAME);
}

static void what_cannot_be_sent_is_refused(void) {
    int fds[65] = {0};
    begin();
    static char large[1 << 16];
    REFUSES(pelton_send(sender, large, sizeof large, PELTON_FOREVER), PELTON_TOO_LARGE, "65536 bytes");
    ANSWERS(pelton_send(sender, large, SIZE_MAX, PELTON_FOREVER), PELTON_TOO_LARGE);
    void *room;
    ANSWERS(pelton_reserve(sender, SIZE_MAX, PELTON_FOREVER, &room), PELTON_TOO_LARGE);
    struct iovec batch[2] = {{large, 30000}, {large, 30000}};
    REFUSES(pelton_send_batch(sender, batch, 2, PELTON_FOREVER), PELTON_TOO_LARGE, "60016 bytes");
    batch[1].iov_len = SIZE_MAX;
    ANSWERS(pelton_send_batch(sender, batch, 2, PELTON_FOREVER), PELTON_TOO_LARGE);
    ANSWERS(pelton_send_batch(sender, batch, SIZE_MAX, PELTON_FOREVER), PELTON_TOO_LARGE);
    ANSWERS(pelton_arm_send(sender, SIZE_MAX), PELTON_TOO_LARGE);
    REFUSES(pelton_arm_send(sender, sizeof large), PELTON_TOO_LARGE, "65536 bytes");
    ANSWERS(pelton_send_descriptors(sender, "x", 1, fds, 65, SOON), PELTON_TOO_MANY_DESCRIPTORS);
    fds[0] = -1;
    REFUSES(pelton_send_descriptors(sender, "x", 1, fds, 1, SOON), PELTON_SYSTEM, "descriptor -1");
    CHECK(errno == EBADF);
    fds[0] = 9999;
    errno = 0;
    ANSWERS(pelton_send_descriptors(sender, "x", 1, fds, 1, SOON), PELTON_SYSTEM);
    CHECK(errno == EBADF);
    ANSWERS(pelton_sync(sender), PELTON_REFUSED);
    ANSWERS(pelton_resume(sender, PELTON_NO_WAIT), PELTON_REFUSED);
    end();
}

static void *receive_from_another_thread(void *unused) {
    int answer;
    (void)unused;
    /* The main thread may be in a call just now. */
    while ((answer = pelton_receive(receiver, SOON, &message)) == PELTON_WRONG_THREAD) {
        sched_yield();
    }
    OK(answer);
    return NULL;
}

static void two_threads_in_one_handle_are_recognised(void) {
    pthread_t thread;
    pelton_message another;
    int answer;
    if (!getenv("PELTON_CHECK_THREADS")) {
        printf("not looked for without PELTON_CHECK_THREADS: ");
        return;
    }
    begin();
    CHECK(pthread_create(&thread, NULL, receive_from_another_thread, NULL) == 0);
    /* Until the other thread is in its call. */
    while ((answer = pelton_receive(receiver, PELTON_NO_WAIT, &another)) == PELTON_AGAIN) {
        sched_yield();
    }
    CHECK(answer == PELTON_WRONG_THREAD && strstr(pelton_error_detail(), "another thread is in a call"));
    ANSWERS(pelton_close(receiver), PELTON_WRONG_THREAD);
    OK(pelton_send(sender, "x", 1, SOON));
    CHECK(pthread_join(thread, NULL) == 0);
    /* One after the other may. */
    OK(pelton_release(receiver));
    end();
}

static void close_what_another_thread_of_the_parent_is_in(const char *name) {
    (void)name;
    ANSWERS(pelton_receive(receiver, PELTON_NO_WAIT, &message), PELTON_FORKED);
    ANSWERS(pelton_close(receiver), PELTON_FORKED);
    REFUSES(pelton_close(receiver), PELTON_CLOSED_HANDLE, "receiver is closed");
}

static void a_forked_child_closes_what_another_thread_is_in(void) {
    pthread_t thread;
    pelton_message another;
    int answer;
    if (!getenv("PELTON_CHECK_THREADS")) {
        printf("not looked for without PELTON_CHECK_THREADS: ");
        return;
    }
    begin();
    CHECK(pthread_create(&thread, NULL, receive_from_another_thread, NULL) == 0);
    while ((answer = pelton_receive(receiver, PELTON_NO_WAIT, &another)) == PELTON_AGAIN) {
        sched_yield();
    }
    ANSWERS(answer, PELTON_WRONG_THREAD);
    finish(start(close_what_another_thread_of_the_parent_is_in, NULL));
    OK(pelton_send(sender, "x", 1, SOON));
    CHECK(pthread_join(thread, NULL) == 0);
    OK(pelton_release(receiver));
    end();
}

static pelton_listener *listener_of_parent;
static pelton_held *held_of_parent;

static void use_handles_of_the_parent(const char *name) {
    pelton_info info;
    pelton_held *held;
    void *room;
    size_t size;
    char text[8];
    struct iovec batch = {text, 1};
    int fd = 0;
    (void)name;
    info.struct_bytes = sizeof info;
    REFUSES(pelton_send(sender, "x", 1, PELTON_FOREVER), PELTON_FORKED, "forked");
    ANSWERS(pelton_reserve(sender, 1, PELTON_FOREVER, &room), PELTON_FORKED);
    ANSWERS(pelton_commit(sender, 1), PELTON_FORKED);
    ANSWERS(pelton_abort(sender), PELTON_FORKED);
    ANSWERS(pelton_send_batch(sender, &batch, 1, PELTON_FOREVER), PELTON_FORKED);
    ANSWERS(pelton_send_descriptors(sender, "x", 1, &fd, 1, PELTON_FOREVER), PELTON_FORKED);
    ANSWERS(pelton_drain(sender, PELTON_FOREVER), PELTON_FORKED);
    ANSWERS(pelton_trim(sender), PELTON_FORKED);
    ANSWERS(pelton_fd(sender), PELTON_FORKED);
    ANSWERS(pelton_arm_send(sender, 1), PELTON_FORKED);
    ANSWERS(pelton_disarm(sender), PELTON_FORKED);
    ANSWERS(pelton_arm(sender), PELTON_FORKED);
    ANSWERS(pelton_resume(sender, PELTON_FOREVER), PELTON_FORKED);
    ANSWERS(pelton_sync(sender), PELTON_FORKED);
    ANSWERS(pelton_get_info(sender, &info), PELTON_FORKED);
    ANSWERS(pelton_receive(receiver, PELTON_FOREVER, &message), PELTON_FORKED);
    ANSWERS(pelton_receive_batch(receiver, PELTON_FOREVER, &message, 1, &size), PELTON_FORKED);
    ANSWERS(pelton_receive_copy(receiver, text, sizeof text, PELTON_FOREVER, &size), PELTON_FORKED);
    ANSWERS(pelton_release(receiver), PELTON_FORKED);
    ANSWERS(pelton_hold(receiver, &held), PELTON_FORKED);
    ANSWERS(pelton_take_descriptors(receiver, &fd, 1, &size), PELTON_FORKED);
    ANSWERS(pelton_fd(receiver), PELTON_FORKED);
    ANSWERS(pelton_arm(receiver), PELTON_FORKED);
    ANSWERS(pelton_disarm(receiver), PELTON_FORKED);
    ANSWERS(pelton_resume(receiver, PELTON_FOREVER), PELTON_FORKED);
    ANSWERS(pelton_sync(receiver), PELTON_FORKED);
    ANSWERS(pelton_get_info(receiver, &info), PELTON_FORKED);
    pelton_sender *accepted;
    pelton_receiver *other;
    ANSWERS(pelton_accept_sender(listener_of_parent, PELTON_FOREVER, &accepted), PELTON_FORKED);
    ANSWERS(pelton_accept_receiver(listener_of_parent, PELTON_FOREVER, &other), PELTON_FORKED);
    ANSWERS(pelton_fd(listener_of_parent), PELTON_FORKED);
    ANSWERS(pelton_close(listener_of_parent), PELTON_FORKED);
    ANSWERS(pelton_close(held_of_parent), PELTON_FORKED);
    ANSWERS(pelton_close(receiver), PELTON_FORKED);
    ANSWERS(pelton_close(sender), PELTON_FORKED);
    ANSWERS(pelton_close(sender), PELTON_CLOSED_HANDLE);
    /* What it makes itself it may use. */
    begin();
    OK(pelton_send(sender, "x", 1, PELTON_NO_WAIT));
    end();
}

static void a_forked_child_can_only_close(void) {
    char name[128];
    begin();
    OK(pelton_listen(place(name, "unix:%s/socket"), NULL, &listener_of_parent));
    OK(pelton_send(sender, "held", 4, PELTON_NO_WAIT));
    OK(pelton_send(sender, "received", 8, PELTON_NO_WAIT));
    OK(pelton_receive(receiver, PELTON_NO_WAIT, &message));
    OK(pelton_hold(receiver, &held_of_parent));
    OK(pelton_receive(receiver, PELTON_NO_WAIT, &message));
    finish(start(use_handles_of_the_parent, NULL));
    CHECK(memcmp(message.data, "received", 8) == 0);
    OK(pelton_release(receiver));
    OK(pelton_close(held_of_parent));
    ANSWERS(pelton_receive(receiver, PELTON_NO_WAIT, &message), PELTON_AGAIN);
    OK(pelton_drain(sender, PELTON_NO_WAIT));
    OK(pelton_close(listener_of_parent));
    end();
}

static void *detail_of_a_thread(void *unused) {
    (void)unused;
    CHECK(strcmp(pelton_error_detail(), "") == 0);
    ANSWERS(pelton_release(NULL), PELTON_NULL);
    CHECK(strcmp(pelton_error_detail(), "handle is NULL") == 0);
    return NULL;
}

static void each_thread_has_its_own_detail(void) {
    pthread_t thread;
    ANSWERS(pelton_trim(NULL), PELTON_NULL);
    CHECK(pthread_create(&thread, NULL, detail_of_a_thread, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(strcmp(pelton_error_detail(), "sender is NULL") == 0);
}

static void a_deadline_of_opening_that_passes_says_what_was_waited_for(void) {
    char name[128];
    pelton_sender *nobody = NULL;
    pelton_options options = PELTON_OPTIONS_INIT;
    options.deadline_ns = pelton_deadline(1000000);
    ANSWERS(pelton_sender_open(place(name, "unix:%s/socket"), &options, &nobody), PELTON_AGAIN);
    CHECK(strstr(pelton_error_detail(), "waiting for somebody to listen at"));
}

int main(void) {
    static const test tests[] = {
        TEST(null_is_refused_everywhere),
        TEST(a_closed_handle_is_recognised),
        TEST(another_kind_of_handle_is_recognised),
        TEST(committing_needs_a_reservation),
        TEST(what_is_reserved_comes_first),
        TEST(releasing_needs_a_message),
        TEST(what_is_received_comes_first),
        TEST(options_are_checked),
        TEST(what_cannot_be_sent_is_refused),
        TEST(two_threads_in_one_handle_are_recognised),
        TEST(a_forked_child_closes_what_another_thread_is_in),
        TEST(a_forked_child_can_only_close),
        TEST(each_thread_has_its_own_detail),
        TEST(a_deadline_of_opening_that_passes_says_what_was_waited_for),
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
