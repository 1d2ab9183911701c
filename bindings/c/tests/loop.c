/* Endpoints in an event loop: armed, readable, taken from, armed again, without a lost wake-up; and busy-polled. */
#include "check.h"

enum { MESSAGES = 50000 };

static void watch(int epoll, int fd, int which) {
    struct epoll_event event;
    memset(&event, 0, sizeof event);
    event.events = EPOLLIN;
    event.data.fd = which;
    CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0);
}

/* Waits for a descriptor; which one. */
static int wait_for_any(int epoll) {
    struct epoll_event event;
    int ready = epoll_wait(epoll, &event, 1, 60000);
    CHECK(ready == 1);
    return event.data.fd;
}

/* Sends by an event loop of its own. */
static void send_by_loop(const char *name) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_sender *sender;
    char payload[500];
    int epoll = epoll_create1(0), answer;
    uint32_t number = 0;
    options.deadline_ns = SOON;
    options.capacity = 64 << 10;
    memset(payload, 0, sizeof payload);
    OK(pelton_sender_open(name, &options, &sender));
    watch(epoll, pelton_sender_fd(sender), 1);
    for (;;) {
        while (number < MESSAGES) {
            memcpy(payload, &number, sizeof number);
            answer = pelton_sender_send(sender, payload, 4 + number % 496, PELTON_NO_WAIT);
            if (answer == PELTON_AGAIN) break;
            OK(answer);
            number++;
        }
        if (number == MESSAGES) break;
        answer = pelton_sender_arm(sender, sizeof payload);
        if (answer == PELTON_OK) {
            CHECK(wait_for_any(epoll) == 1);
        } else {
            RETURNS(answer, PELTON_READY);
        }
    }
    OK(pelton_sender_disarm(sender));
    OK(pelton_sender_wait_released(sender, SOON));
    OK(pelton_close(sender));
    close(epoll);
}

static void both_ends_run_in_event_loops(void) {
    char name[128];
    pelton_listener *listener;
    pelton_receiver *receiver;
    pelton_message message;
    uint32_t number = 0;
    int epoll = epoll_create1(0), answer = PELTON_OK;
    OK(pelton_listener_open(place(name, "unix:%s/socket"), NULL, &listener));
    pid_t child = start(send_by_loop, name);
    watch(epoll, pelton_listener_fd(listener), 1);
    CHECK(wait_for_any(epoll) == 1);
    receiver = accepted_at_once(listener, PELTON_NO_WAIT);
    OK(pelton_close(listener));
    watch(epoll, pelton_receiver_fd(receiver), 2);
    for (;;) {
        while ((answer = pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message)) == PELTON_OK) {
            uint32_t found;
            memcpy(&found, message.data, sizeof found);
            CHECK(found == number && message.size == 4 + number % 496);
            number++;
            OK(pelton_receiver_release(receiver));
        }
        if (answer != PELTON_AGAIN) break;
        answer = pelton_receiver_arm(receiver);
        if (answer == PELTON_OK) {
            CHECK(wait_for_any(epoll) == 2);
        } else if (answer != PELTON_READY) {
            break;
        }
    }
    RETURNS(answer, PELTON_CLOSED);
    CHECK(number == MESSAGES);
    OK(pelton_close(receiver));
    finish(child);
    close(epoll);
}

static int is_readable(int fd) {
    struct pollfd poll_for = {fd, POLLIN, 0};
    int ready = poll(&poll_for, 1, 0);
    CHECK(ready >= 0);
    return ready;
}

static void the_descriptor_is_readable_while_there_is_something(void) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_sender *sender;
    pelton_receiver *receiver;
    pelton_message message;
    static char large[30000];
    options.capacity = 64 << 10;
    OK(pelton_threads(&options, &sender, &receiver));
    int fd = pelton_receiver_fd(receiver);
    OK(pelton_receiver_arm(receiver));
    CHECK(!is_readable(fd));
    OK(pelton_sender_send(sender, large, sizeof large, PELTON_NO_WAIT));
    CHECK(is_readable(fd));
    RETURNS(pelton_receiver_arm(receiver), PELTON_READY);
    CHECK(is_readable(fd));
    OK(pelton_sender_send(sender, large, sizeof large, PELTON_NO_WAIT));
    int sender_fd = pelton_sender_fd(sender);
    OK(pelton_sender_arm(sender, sizeof large));
    CHECK(!is_readable(sender_fd));
    for (int i = 0; i < 2; i++) {
        OK(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message));
        CHECK(is_readable(fd));
        OK(pelton_receiver_release(receiver));
    }
    CHECK(is_readable(sender_fd));
    RETURNS(pelton_sender_arm(sender, sizeof large), PELTON_READY);
    OK(pelton_receiver_arm(receiver));
    CHECK(!is_readable(fd));
    OK(pelton_receiver_disarm(receiver));
    OK(pelton_receiver_arm(receiver));
    OK(pelton_close(sender));
    CHECK(is_readable(fd));
    RETURNS(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message), PELTON_CLOSED);
    CHECK(pelton_receiver_fd(receiver) == fd);
    OK(pelton_close(receiver));
}

static void a_sender_with_nothing_to_send_is_notified_of_the_end_only(void) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_message message;
    for (int ways = 0; ways < 2; ways++) {
        pelton_sender *sender;
        pelton_receiver *receiver;
        static char large[30000];
        options.capacity = 64 << 10;
        OK(pelton_threads(&options, &sender, &receiver));
        int fd = pelton_sender_fd(sender);
        if (ways == 1) {
            /* Full to the last byte, and armed for room: that is taken back. */
            for (size_t size = sizeof large; size > 0; size /= 2) {
                while (pelton_sender_send(sender, large, size - 1, PELTON_NO_WAIT) == PELTON_OK) {
                }
            }
            OK(pelton_sender_arm(sender, 0));
        } else {
            RETURNS(pelton_sender_arm(sender, sizeof large), PELTON_READY);
            CHECK(is_readable(fd));
        }
        OK(pelton_sender_arm_for_end(sender));
        CHECK(!is_readable(fd));
        while (pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message) == PELTON_OK) {
            OK(pelton_receiver_release(receiver));
        }
        CHECK(!is_readable(fd));
        OK(pelton_close(receiver));
        CHECK(is_readable(fd));
        RETURNS(pelton_sender_arm_for_end(sender), PELTON_CLOSED);
        OK(pelton_close(sender));
    }
}

/* Busy-polling neither arms nor rings: a thread that polls needs no wake-up. */
static void polling_finds_what_is_there_without_a_wake_up(void) {
    enum { LARGE = 30000 };
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_sender_info info;
    pelton_sender *sender;
    pelton_receiver *receiver;
    pelton_message message;
    static char large[LARGE];
    options.capacity = 64 << 10;
    info.struct_bytes = sizeof info;
    OK(pelton_threads(&options, &sender, &receiver));
    RETURNS(pelton_receiver_poll(receiver), PELTON_AGAIN);
    CHECK(!is_readable(pelton_receiver_fd(receiver)));
    OK(pelton_sender_send(sender, "x", 1, PELTON_NO_WAIT));
    OK(pelton_receiver_poll(receiver));
    OK(pelton_receiver_poll(receiver));
    OK(pelton_sender_get_info(sender, &info));
    CHECK(info.wakes_sent == 0 && !is_readable(pelton_receiver_fd(receiver)));
    OK(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message));
    RETURNS(pelton_receiver_poll(receiver), PELTON_NOT_RELEASED);
    OK(pelton_receiver_release(receiver));
    RETURNS(pelton_receiver_poll(receiver), PELTON_AGAIN);
    OK(pelton_sender_poll(sender, LARGE));
    RETURNS(pelton_sender_poll(sender, 1 << 20), PELTON_TOO_LARGE);
    while (pelton_sender_send(sender, large, LARGE, PELTON_NO_WAIT) == PELTON_OK) continue;
    RETURNS(pelton_sender_poll(sender, LARGE), PELTON_AGAIN);
    while (pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message) == PELTON_OK) OK(pelton_receiver_release(receiver));
    OK(pelton_sender_poll(sender, LARGE));
    OK(pelton_close(receiver));
    RETURNS(pelton_sender_poll(sender, 1), PELTON_CLOSED);
    OK(pelton_close(sender));
    OK(pelton_threads(&options, &sender, &receiver));
    OK(pelton_sender_send(sender, "last", 4, PELTON_NO_WAIT));
    OK(pelton_close(sender));
    OK(pelton_receiver_poll(receiver));
    OK(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message));
    OK(pelton_receiver_release(receiver));
    RETURNS(pelton_receiver_poll(receiver), PELTON_CLOSED);
    OK(pelton_close(receiver));
}

static void *answer_by_polling(void *given) {
    void **both = (void **)given;
    pelton_receiver *receiver = (pelton_receiver *)both[0];
    pelton_sender *sender = (pelton_sender *)both[1];
    for (uint32_t number = 0; number < MESSAGES; number++) {
        uint32_t found;
        size_t size;
        int code;
        while ((code = pelton_receiver_poll(receiver)) == PELTON_AGAIN) sched_yield();
        OK(code);
        OK(pelton_receiver_receive_copy(receiver, &found, sizeof found, PELTON_NO_WAIT, &size));
        CHECK(found == number);
        OK(pelton_sender_send(sender, &found, sizeof found, SOON));
    }
    return NULL;
}

static void two_threads_that_only_poll_lose_nothing(void) {
    pelton_sender *asking, *answering;
    pelton_receiver *asked, *answered;
    pthread_t thread;
    OK(pelton_threads(NULL, &asking, &asked));
    OK(pelton_threads(NULL, &answering, &answered));
    void *both[] = {asked, answering};
    CHECK(pthread_create(&thread, NULL, answer_by_polling, both) == 0);
    for (uint32_t number = 0; number < MESSAGES; number++) {
        uint32_t found;
        size_t size;
        int code;
        OK(pelton_sender_send(asking, &number, sizeof number, SOON));
        while ((code = pelton_receiver_poll(answered)) == PELTON_AGAIN) sched_yield();
        OK(code);
        OK(pelton_receiver_receive_copy(answered, &found, sizeof found, PELTON_NO_WAIT, &size));
        CHECK(found == number);
    }
    CHECK(pthread_join(thread, NULL) == 0);
    OK(pelton_close(asking));
    OK(pelton_close(asked));
    OK(pelton_close(answering));
    OK(pelton_close(answered));
}

int main(void) {
    static const test tests[] = {
        TEST(the_descriptor_is_readable_while_there_is_something),
        TEST(a_sender_with_nothing_to_send_is_notified_of_the_end_only),
        TEST(both_ends_run_in_event_loops),
        TEST(polling_finds_what_is_there_without_a_wake_up),
        TEST(two_threads_that_only_poll_lose_nothing),
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
