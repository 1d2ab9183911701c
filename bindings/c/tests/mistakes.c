/* Every mistake that can be recognised, and the code that it gets. Run with and without
 * PELTON_CHECK_THREADS. */
#include "check.h"

static pelton_sender *sender;
static pelton_receiver *receiver;
static pelton_message message;

static void begin(void) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
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
    FAILS(pelton_sender_open(NULL, NULL, &sender), PELTON_NULL, "name is NULL");
    FAILS(pelton_sender_open("x", NULL, NULL), PELTON_NULL, "out is NULL");
    FAILS(pelton_receiver_open(NULL, NULL, &receiver), PELTON_NULL, "name");
    FAILS(pelton_receiver_open("x", NULL, NULL), PELTON_NULL, "out");
    FAILS(pelton_threads(NULL, NULL, &receiver), PELTON_NULL, "out_sender");
    FAILS(pelton_threads(NULL, &sender, NULL), PELTON_NULL, "out_receiver");
    FAILS(pelton_listener_open(NULL, NULL, &listener), PELTON_NULL, "name");
    FAILS(pelton_listener_open("x", NULL, NULL), PELTON_NULL, "out");
    FAILS(pelton_listener_accept_sender(NULL, PELTON_NO_WAIT, &sender), PELTON_NULL, "listener is NULL");
    FAILS(pelton_listener_accept_receiver(NULL, PELTON_NO_WAIT, &receiver), PELTON_NULL, "listener");
    FAILS(pelton_sender_send(NULL, "x", 1, PELTON_NO_WAIT), PELTON_NULL, "sender is NULL");
    FAILS(pelton_sender_send(sender, NULL, 1, PELTON_NO_WAIT), PELTON_NULL, "data is NULL");
    FAILS(pelton_sender_reserve(sender, 1, PELTON_NO_WAIT, NULL), PELTON_NULL, "out");
    FAILS(pelton_sender_send_batch(NULL, batch, 2, PELTON_NO_WAIT), PELTON_NULL, "sender");
    FAILS(pelton_sender_send_batch(sender, NULL, 2, PELTON_NO_WAIT), PELTON_NULL, "messages");
    FAILS(pelton_sender_send_batch(sender, batch, 2, PELTON_NO_WAIT), PELTON_NULL, "the address of a message");
    FAILS(pelton_sender_send_descriptors(NULL, "x", 1, &fd, 1, PELTON_NO_WAIT), PELTON_NULL, "sender");
    FAILS(pelton_sender_send_descriptors(sender, NULL, 1, &fd, 1, PELTON_NO_WAIT), PELTON_NULL, "data");
    FAILS(pelton_sender_send_descriptors(sender, "x", 1, NULL, 1, PELTON_NO_WAIT), PELTON_NULL, "fds");
    FAILS(pelton_sender_trim(NULL), PELTON_NULL, "sender");
    FAILS(pelton_receiver_receive(NULL, PELTON_NO_WAIT, &message), PELTON_NULL, "receiver is NULL");
    FAILS(pelton_receiver_receive(receiver, PELTON_NO_WAIT, NULL), PELTON_NULL, "out");
    FAILS(pelton_receiver_receive_batch(NULL, PELTON_NO_WAIT, &message, 1, &size), PELTON_NULL, "receiver");
    FAILS(pelton_receiver_receive_batch(receiver, PELTON_NO_WAIT, NULL, 1, &size), PELTON_NULL, "out");
    FAILS(pelton_receiver_receive_batch(receiver, PELTON_NO_WAIT, &message, 1, NULL), PELTON_NULL, "out_count");
    FAILS(pelton_receiver_receive_copy(NULL, text, sizeof text, PELTON_NO_WAIT, &size), PELTON_NULL, "receiver");
    FAILS(pelton_receiver_receive_copy(receiver, NULL, 1, PELTON_NO_WAIT, &size), PELTON_NULL, "buffer");
    FAILS(pelton_receiver_receive_copy(receiver, text, sizeof text, PELTON_NO_WAIT, NULL), PELTON_NULL, "out_size");
    FAILS(pelton_receiver_hold(NULL, &held), PELTON_NULL, "receiver");
    FAILS(pelton_receiver_hold(receiver, NULL), PELTON_NULL, "out");
    FAILS(pelton_receiver_take_descriptors(NULL, &fd, 1, &size), PELTON_NULL, "receiver");
    FAILS(pelton_receiver_take_descriptors(receiver, NULL, 1, &size), PELTON_NULL, "out");
    FAILS(pelton_receiver_take_descriptors(receiver, &fd, 1, NULL), PELTON_NULL, "out_count");
    FAILS(pelton_sender_arm(NULL, 1), PELTON_NULL, "sender");
    FAILS(pelton_sender_get_info(sender, NULL), PELTON_NULL, "out");
    RETURNS(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message), PELTON_AGAIN);
    end();
}

static void a_closed_handle_is_recognised(void) {
    pelton_held *held;
    pelton_listener *listener;
    pelton_sender_info info;
    char name[128];
    begin();
    OK(pelton_sender_send(sender, "x", 1, PELTON_NO_WAIT));
    OK(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message));
    OK(pelton_receiver_hold(receiver, &held));
    OK(pelton_listener_open(place(name, "unix:%s/socket"), NULL, &listener));
    OK(pelton_close(held));
    OK(pelton_close(listener));
    end();
    info.struct_bytes = sizeof info;
    FAILS(pelton_close(held), PELTON_CLOSED_HANDLE, "the handle is a closed pelton_held");
    FAILS(pelton_close(listener), PELTON_CLOSED_HANDLE, "the handle is a closed pelton_listener");
    RETURNS(pelton_listener_accept_sender(listener, PELTON_NO_WAIT, &sender), PELTON_CLOSED_HANDLE);
    FAILS(pelton_sender_send(sender, "x", 1, PELTON_NO_WAIT), PELTON_CLOSED_HANDLE, "the handle is a closed pelton_sender");
    FAILS(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message), PELTON_CLOSED_HANDLE, "the handle is a closed pelton_receiver");
    RETURNS(pelton_receiver_release(receiver), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_sender_get_info(sender, &info), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_sender_fd(sender), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_close(sender), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_close(receiver), PELTON_CLOSED_HANDLE);
}

static void another_kind_of_handle_is_recognised(void) {
    begin();
    FAILS(pelton_sender_send((pelton_sender *)(void *)receiver, "x", 1, PELTON_NO_WAIT), PELTON_CLOSED_HANDLE,
            "the handle is a pelton_receiver, wanted an open pelton_sender");
    FAILS(pelton_receiver_receive((pelton_receiver *)(void *)sender, PELTON_NO_WAIT, &message), PELTON_CLOSED_HANDLE,
            "the handle is a pelton_sender, wanted an open pelton_receiver");
    RETURNS(pelton_senders_send((pelton_senders *)(void *)sender, "x", 1, PELTON_NO_WAIT), PELTON_CLOSED_HANDLE);
    OK(pelton_sender_send(sender, "x", 1, PELTON_NO_WAIT));
    end();
}

static void committing_requires_a_reservation(void) {
    void *room;
    begin();
    FAILS(pelton_sender_commit(sender, 0), PELTON_NOT_RESERVED, "nothing is reserved");
    RETURNS(pelton_sender_abort(sender), PELTON_NOT_RESERVED);
    OK(pelton_sender_reserve(sender, 8, PELTON_NO_WAIT, &room));
    FAILS(pelton_sender_commit(sender, 9), PELTON_TOO_LARGE, "9 bytes used of 8 reserved");
    OK(pelton_sender_commit(sender, 8));
    RETURNS(pelton_sender_commit(sender, 8), PELTON_NOT_RESERVED);
    /* A reservation that failed leaves none, whatever was there before. */
    OK(pelton_sender_reserve(sender, 8, PELTON_NO_WAIT, &room));
    RETURNS(pelton_sender_reserve(sender, 1 << 20, PELTON_NO_WAIT, &room), PELTON_TOO_LARGE);
    RETURNS(pelton_sender_commit(sender, 8), PELTON_NOT_RESERVED);
    end();
}

static void a_reservation_excludes_other_calls(void) {
    void *room;
    pelton_sender_info info;
    struct iovec batch = {&info, sizeof info};
    int fd = 0;
    info.struct_bytes = sizeof info;
    begin();
    OK(pelton_sender_reserve(sender, 8, PELTON_NO_WAIT, &room));
    FAILS(pelton_sender_send(sender, "x", 1, PELTON_NO_WAIT), PELTON_RESERVED, "commit or abort");
    RETURNS(pelton_sender_send_batch(sender, &batch, 1, PELTON_NO_WAIT), PELTON_RESERVED);
    RETURNS(pelton_sender_send_descriptors(sender, "x", 1, &fd, 1, PELTON_NO_WAIT), PELTON_RESERVED);
    RETURNS(pelton_sender_wait_released(sender, PELTON_NO_WAIT), PELTON_RESERVED);
    RETURNS(pelton_sender_trim(sender), PELTON_RESERVED);
    RETURNS(pelton_sender_arm(sender, 1), PELTON_RESERVED);
    OK(pelton_sender_disarm(sender));
    RETURNS(pelton_sender_arm_for_end(sender), PELTON_RESERVED);
    RETURNS(pelton_sender_resume(sender, PELTON_NO_WAIT), PELTON_RESERVED);
    RETURNS(pelton_sender_sync(sender), PELTON_RESERVED);
    OK(pelton_sender_get_info(sender, &info));
    CHECK(pelton_sender_fd(sender) >= 0);
    OK(pelton_sender_abort(sender));
    OK(pelton_sender_send(sender, "x", 1, PELTON_NO_WAIT));
    OK(pelton_sender_reserve(sender, 8, PELTON_NO_WAIT, &room));
    end();
}

static void releasing_requires_a_message(void) {
    pelton_held *held;
    size_t count;
    int fd;
    pelton_message messages[2];
    begin();
    FAILS(pelton_receiver_release(receiver), PELTON_NOT_RECEIVED, "no message is received");
    RETURNS(pelton_receiver_hold(receiver, &held), PELTON_NOT_RECEIVED);
    count = 7;
    RETURNS(pelton_receiver_take_descriptors(receiver, &fd, 1, &count), PELTON_NOT_RECEIVED);
    CHECK(count == 7);
    for (int i = 0; i < 4; i++) {
        OK(pelton_sender_send(sender, "x", 1, PELTON_NO_WAIT));
    }
    OK(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message));
    OK(pelton_receiver_release(receiver));
    FAILS(pelton_receiver_release(receiver), PELTON_NOT_RECEIVED, "released already");
    OK(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message));
    OK(pelton_receiver_hold(receiver, &held));
    RETURNS(pelton_receiver_release(receiver), PELTON_NOT_RECEIVED);
    RETURNS(pelton_receiver_hold(receiver, &held), PELTON_NOT_RECEIVED);
    OK(pelton_receiver_receive_batch(receiver, PELTON_NO_WAIT, messages, 2, &count));
    CHECK(count == 2);
    pelton_held *none;
    FAILS(pelton_receiver_hold(receiver, &none), PELTON_NOT_RECEIVED, "a batch");
    OK(pelton_receiver_take_descriptors(receiver, &fd, 1, &count));
    OK(pelton_receiver_release(receiver));
    RETURNS(pelton_receiver_release(receiver), PELTON_NOT_RECEIVED);
    OK(pelton_close(held));
    RETURNS(pelton_close(held), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_receiver_receive_batch(receiver, PELTON_NO_WAIT, messages, 0, &count), PELTON_TOO_SMALL);
    end();
}

static void a_received_message_excludes_other_calls(void) {
    char text[8];
    size_t size;
    pelton_receiver_info info;
    info.struct_bytes = sizeof info;
    begin();
    for (int batch = 0; batch < 2; batch++) {
        pelton_message messages[3];
        for (int i = 0; i < 3; i++) {
            OK(pelton_sender_send(sender, "x", 1, PELTON_NO_WAIT));
        }
        OK(pelton_receiver_receive_batch(receiver, PELTON_NO_WAIT, messages, batch ? 2 : 1, &size));
        FAILS(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message), PELTON_NOT_RELEASED, "release or hold");
        RETURNS(pelton_receiver_receive_batch(receiver, PELTON_NO_WAIT, &message, 1, &size), PELTON_NOT_RELEASED);
        RETURNS(pelton_receiver_receive_copy(receiver, text, sizeof text, PELTON_NO_WAIT, &size), PELTON_NOT_RELEASED);
        RETURNS(pelton_receiver_arm(receiver), PELTON_NOT_RELEASED);
        RETURNS(pelton_receiver_resume(receiver, PELTON_NO_WAIT), PELTON_NOT_RELEASED);
        RETURNS(pelton_receiver_sync(receiver), PELTON_NOT_RELEASED);
        OK(pelton_receiver_get_info(receiver, &info));
        OK(pelton_receiver_disarm(receiver));
        CHECK(pelton_receiver_fd(receiver) >= 0);
        OK(pelton_receiver_release(receiver));
        while (pelton_receiver_receive_copy(receiver, text, sizeof text, PELTON_NO_WAIT, &size) == PELTON_OK) {
        }
    }
    OK(pelton_sender_send(sender, "x", 1, PELTON_NO_WAIT));
    OK(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message));
    OK(pelton_close(receiver));
    RETURNS(pelton_sender_wait_released(sender, PELTON_NO_WAIT), PELTON_CLOSED);
    CHECK(strstr(pelton_error_detail(), "1 messages were not released"));
    OK(pelton_close(sender));
}

static void options_are_checked(void) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_sender_info info;
    pelton_listener *listener;
    options.wait = 2;
    FAILS(pelton_threads(&options, &sender, &receiver), PELTON_OPTION, "wait is 2");
    options.wait = PELTON_SPIN;
    options.capacity = 1;
    FAILS(pelton_threads(&options, &sender, &receiver), PELTON_OPTION, "capacity is 1");
    options.capacity = 1 << 20;
    options.message_bytes_max = 1 << 20;
    FAILS(pelton_threads(&options, &sender, &receiver), PELTON_OPTION, "message_bytes_max");
    options.message_bytes_max = 0;
    options.uid_count = 1;
    FAILS(pelton_listener_open("events", &options, &listener), PELTON_NULL, "options.uids");
    FAILS(pelton_threads(&options, &sender, &receiver), PELTON_OPTION, "uids is set");
    options.uid_count = 0;
    /* Options of a path, for a name and for threads. */
    options.create = 1;
    FAILS(pelton_sender_open("events", &options, &sender), PELTON_OPTION, "create is set");
    FAILS(pelton_threads(&options, &sender, &receiver), PELTON_OPTION, "create is set");
    FAILS(pelton_listener_open("events", &options, &listener), PELTON_OPTION, "create is set");
    options.create = 2;
    FAILS(pelton_sender_open("path:/nowhere", &options, &sender), PELTON_OPTION, "create is 2");
    options.create = 0;
    options.mode = 0600;
    FAILS(pelton_receiver_open("events", &options, &receiver), PELTON_OPTION, "mode is set");
    options.mode = 0;
    options.lanes = 2;
    FAILS(pelton_threads(&options, &sender, &receiver), PELTON_OPTION, "lanes is set");
    options.lanes = 0;
    /* A deadline, for functions that do not wait. */
    options.deadline_ns = SOON;
    FAILS(pelton_threads(&options, &sender, &receiver), PELTON_OPTION, "deadline_ns is set");
    FAILS(pelton_listener_open("events", &options, &listener), PELTON_OPTION, "deadline_ns is set");
    options.deadline_ns = 0;
    options.struct_bytes = 0;
    FAILS(pelton_threads(&options, &sender, &receiver), PELTON_OPTION, "_INIT macro");
    struct {
        pelton_channel_options options;
        uint64_t later;
    } newer = {PELTON_CHANNEL_OPTIONS_INIT, 0};
    newer.options.struct_bytes = sizeof newer;
    OK(pelton_threads(&newer.options, &sender, &receiver));
    static const uint32_t unset[] = {0, 7, sizeof info + 4, 4104, UINT32_MAX - 7};
    for (size_t i = 0; i < sizeof unset / sizeof *unset; i++) {
        info.struct_bytes = unset[i];
        FAILS(pelton_sender_get_info(sender, &info), PELTON_OPTION, "sizeof(pelton_sender_info)");
    }
    end();
    newer.later = 1;
    FAILS(pelton_threads(&newer.options, &sender, &receiver), PELTON_OPTION, "does not know");
    FAILS(pelton_sender_open("path:", NULL, &sender), PELTON_NAME, "names no directory");
    FAILS(pelton_sender_open("no good", NULL, &sender), PELTON_NAME, "short name");
    RETURNS(pelton_listener_open("path:/tmp", NULL, &listener), PELTON_NAME);
    RETURNS(pelton_listener_open("unix:\xff", NULL, &listener), PELTON_NAME);
}

static void what_cannot_be_sent_is_refused(void) {
    int fds[65] = {0};
    begin();
    static char large[1 << 16];
    FAILS(pelton_sender_send(sender, large, sizeof large, PELTON_FOREVER), PELTON_TOO_LARGE, "65536 bytes");
    RETURNS(pelton_sender_send(sender, large, SIZE_MAX, PELTON_FOREVER), PELTON_TOO_LARGE);
    void *room;
    RETURNS(pelton_sender_reserve(sender, SIZE_MAX, PELTON_FOREVER, &room), PELTON_TOO_LARGE);
    struct iovec batch[2] = {{large, 30000}, {large, 30000}};
    FAILS(pelton_sender_send_batch(sender, batch, 2, PELTON_FOREVER), PELTON_TOO_LARGE, "60016 bytes");
    batch[1].iov_len = SIZE_MAX;
    RETURNS(pelton_sender_send_batch(sender, batch, 2, PELTON_FOREVER), PELTON_TOO_LARGE);
    RETURNS(pelton_sender_send_batch(sender, batch, SIZE_MAX, PELTON_FOREVER), PELTON_TOO_LARGE);
    RETURNS(pelton_sender_arm(sender, SIZE_MAX), PELTON_TOO_LARGE);
    FAILS(pelton_sender_arm(sender, sizeof large), PELTON_TOO_LARGE, "65536 bytes");
    RETURNS(pelton_sender_send_descriptors(sender, "x", 1, fds, 65, SOON), PELTON_TOO_MANY_DESCRIPTORS);
    fds[0] = -1;
    FAILS(pelton_sender_send_descriptors(sender, "x", 1, fds, 1, SOON), PELTON_SYSTEM, "descriptor -1");
    CHECK(errno == EBADF);
    fds[0] = 9999;
    errno = 0;
    RETURNS(pelton_sender_send_descriptors(sender, "x", 1, fds, 1, SOON), PELTON_SYSTEM);
    CHECK(errno == EBADF);
    RETURNS(pelton_sender_sync(sender), PELTON_REFUSED);
    RETURNS(pelton_sender_resume(sender, PELTON_NO_WAIT), PELTON_REFUSED);
    end();
}

static void *receive_from_another_thread(void *unused) {
    int answer;
    (void)unused;
    /* The main thread may be in a call just now. */
    while ((answer = pelton_receiver_receive(receiver, SOON, &message)) == PELTON_WRONG_THREAD) {
        sched_yield();
    }
    OK(answer);
    return NULL;
}

static void two_threads_in_one_handle_are_detected(void) {
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
    while ((answer = pelton_receiver_receive(receiver, PELTON_NO_WAIT, &another)) == PELTON_AGAIN) {
        sched_yield();
    }
    CHECK(answer == PELTON_WRONG_THREAD && strstr(pelton_error_detail(), "another thread is in a call"));
    RETURNS(pelton_close(receiver), PELTON_WRONG_THREAD);
    OK(pelton_sender_send(sender, "x", 1, SOON));
    CHECK(pthread_join(thread, NULL) == 0);
    /* One after the other may. */
    OK(pelton_receiver_release(receiver));
    end();
}

static void close_what_another_thread_of_the_parent_is_in(const char *name) {
    (void)name;
    RETURNS(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message), PELTON_FORKED);
    RETURNS(pelton_close(receiver), PELTON_FORKED);
    FAILS(pelton_close(receiver), PELTON_CLOSED_HANDLE, "the handle is a closed pelton_receiver");
}

static void a_forked_child_closes_a_handle_that_another_thread_uses(void) {
    pthread_t thread;
    pelton_message another;
    int answer;
    if (!getenv("PELTON_CHECK_THREADS")) {
        printf("not looked for without PELTON_CHECK_THREADS: ");
        return;
    }
    begin();
    CHECK(pthread_create(&thread, NULL, receive_from_another_thread, NULL) == 0);
    while ((answer = pelton_receiver_receive(receiver, PELTON_NO_WAIT, &another)) == PELTON_AGAIN) {
        sched_yield();
    }
    RETURNS(answer, PELTON_WRONG_THREAD);
    finish(start(close_what_another_thread_of_the_parent_is_in, NULL));
    OK(pelton_sender_send(sender, "x", 1, SOON));
    CHECK(pthread_join(thread, NULL) == 0);
    OK(pelton_receiver_release(receiver));
    end();
}

static pelton_listener *listener_of_parent;
static pelton_held *held_of_parent;

static void use_handles_of_the_parent(const char *name) {
    pelton_sender_info info;
    pelton_receiver_info receivers;
    pelton_held *held;
    void *room;
    size_t size;
    char text[8];
    struct iovec batch = {text, 1};
    int fd = 0;
    (void)name;
    info.struct_bytes = sizeof info;
    receivers.struct_bytes = sizeof receivers;
    FAILS(pelton_sender_send(sender, "x", 1, PELTON_FOREVER), PELTON_FORKED, "forked");
    RETURNS(pelton_sender_reserve(sender, 1, PELTON_FOREVER, &room), PELTON_FORKED);
    RETURNS(pelton_sender_commit(sender, 1), PELTON_FORKED);
    RETURNS(pelton_sender_abort(sender), PELTON_FORKED);
    RETURNS(pelton_sender_send_batch(sender, &batch, 1, PELTON_FOREVER), PELTON_FORKED);
    RETURNS(pelton_sender_send_descriptors(sender, "x", 1, &fd, 1, PELTON_FOREVER), PELTON_FORKED);
    RETURNS(pelton_sender_wait_released(sender, PELTON_FOREVER), PELTON_FORKED);
    RETURNS(pelton_sender_trim(sender), PELTON_FORKED);
    RETURNS(pelton_sender_fd(sender), PELTON_FORKED);
    RETURNS(pelton_sender_arm(sender, 1), PELTON_FORKED);
    RETURNS(pelton_sender_disarm(sender), PELTON_FORKED);
    RETURNS(pelton_sender_arm_for_end(sender), PELTON_FORKED);
    RETURNS(pelton_sender_resume(sender, PELTON_FOREVER), PELTON_FORKED);
    RETURNS(pelton_sender_sync(sender), PELTON_FORKED);
    RETURNS(pelton_sender_get_info(sender, &info), PELTON_FORKED);
    RETURNS(pelton_receiver_receive(receiver, PELTON_FOREVER, &message), PELTON_FORKED);
    RETURNS(pelton_receiver_receive_batch(receiver, PELTON_FOREVER, &message, 1, &size), PELTON_FORKED);
    RETURNS(pelton_receiver_receive_copy(receiver, text, sizeof text, PELTON_FOREVER, &size), PELTON_FORKED);
    RETURNS(pelton_receiver_release(receiver), PELTON_FORKED);
    RETURNS(pelton_receiver_hold(receiver, &held), PELTON_FORKED);
    RETURNS(pelton_receiver_take_descriptors(receiver, &fd, 1, &size), PELTON_FORKED);
    RETURNS(pelton_receiver_fd(receiver), PELTON_FORKED);
    RETURNS(pelton_receiver_arm(receiver), PELTON_FORKED);
    RETURNS(pelton_receiver_disarm(receiver), PELTON_FORKED);
    RETURNS(pelton_receiver_resume(receiver, PELTON_FOREVER), PELTON_FORKED);
    RETURNS(pelton_receiver_sync(receiver), PELTON_FORKED);
    RETURNS(pelton_receiver_get_info(receiver, &receivers), PELTON_FORKED);
    pelton_sender *accepted;
    pelton_receiver *other;
    RETURNS(pelton_listener_accept_sender(listener_of_parent, PELTON_FOREVER, &accepted), PELTON_FORKED);
    RETURNS(pelton_listener_accept_receiver(listener_of_parent, PELTON_FOREVER, &other), PELTON_FORKED);
    RETURNS(pelton_listener_fd(listener_of_parent), PELTON_FORKED);
    RETURNS(pelton_close(listener_of_parent), PELTON_FORKED);
    RETURNS(pelton_close(held_of_parent), PELTON_FORKED);
    RETURNS(pelton_close(receiver), PELTON_FORKED);
    RETURNS(pelton_close(sender), PELTON_FORKED);
    RETURNS(pelton_close(sender), PELTON_CLOSED_HANDLE);
    /* What it makes itself it may use. */
    begin();
    OK(pelton_sender_send(sender, "x", 1, PELTON_NO_WAIT));
    end();
}

static void a_forked_child_can_only_close(void) {
    char name[128];
    begin();
    OK(pelton_listener_open(place(name, "unix:%s/socket"), NULL, &listener_of_parent));
    OK(pelton_sender_send(sender, "held", 4, PELTON_NO_WAIT));
    OK(pelton_sender_send(sender, "received", 8, PELTON_NO_WAIT));
    OK(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message));
    OK(pelton_receiver_hold(receiver, &held_of_parent));
    OK(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message));
    finish(start(use_handles_of_the_parent, NULL));
    CHECK(memcmp(message.data, "received", 8) == 0);
    OK(pelton_receiver_release(receiver));
    OK(pelton_close(held_of_parent));
    RETURNS(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message), PELTON_AGAIN);
    OK(pelton_sender_wait_released(sender, PELTON_NO_WAIT));
    OK(pelton_close(listener_of_parent));
    end();
}

static void *detail_of_a_thread(void *unused) {
    (void)unused;
    CHECK(strcmp(pelton_error_detail(), "") == 0);
    RETURNS(pelton_receiver_release(NULL), PELTON_NULL);
    CHECK(strcmp(pelton_error_detail(), "receiver is NULL") == 0);
    return NULL;
}

static void each_thread_has_its_own_detail(void) {
    pthread_t thread;
    RETURNS(pelton_sender_trim(NULL), PELTON_NULL);
    CHECK(pthread_create(&thread, NULL, detail_of_a_thread, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(strcmp(pelton_error_detail(), "sender is NULL") == 0);
}

static void an_open_that_times_out_says_what_it_waited_for(void) {
    char name[128];
    pelton_sender *nobody = NULL;
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    options.deadline_ns = pelton_deadline(1000000);
    FAILS(pelton_sender_open(place(name, "unix:%s/socket"), &options, &nobody), PELTON_TIMED_OUT, "waiting for");
}

int main(void) {
    static const test tests[] = {
        TEST(null_is_refused_everywhere),
        TEST(a_closed_handle_is_recognised),
        TEST(another_kind_of_handle_is_recognised),
        TEST(committing_requires_a_reservation),
        TEST(a_reservation_excludes_other_calls),
        TEST(releasing_requires_a_message),
        TEST(a_received_message_excludes_other_calls),
        TEST(options_are_checked),
        TEST(what_cannot_be_sent_is_refused),
        TEST(two_threads_in_one_handle_are_detected),
        TEST(a_forked_child_closes_a_handle_that_another_thread_uses),
        TEST(a_forked_child_can_only_close),
        TEST(each_thread_has_its_own_detail),
        TEST(an_open_that_times_out_says_what_it_waited_for),
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
