/* Both ends in one epoll: armed, readable, taken from, armed again; no spinning, no wake-up lost. */
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
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_sender *sender;
    char payload[500];
    int epoll = epoll_create1(0), answer;
    uint32_t number = 0;
    options.deadline_ns = SOON;
    options.capacity = 64 << 10;
    memset(payload, 0, sizeof payload);
    OK(pelton_sender_open(name, &options, &sender));
    watch(epoll, pelton_fd(sender), 1);
    for (;;) {
        while (number < MESSAGES) {
            memcpy(payload, &number, sizeof number);
            answer = pelton_send(sender, payload, 4 + number % 496, PELTON_NO_WAIT);
            if (answer == PELTON_AGAIN) break;
            OK(answer);
            number++;
        }
        if (number == MESSAGES) break;
        answer = pelton_arm_send(sender, sizeof payload);
        if (answer == PELTON_AGAIN) {
            CHECK(wait_for_any(epoll) == 1);
        } else {
            OK(answer);
        }
    }
    OK(pelton_disarm(sender));
    OK(pelton_drain(sender, SOON));
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
    OK(pelton_listen(place(name, "unix:%s/socket"), NULL, &listener));
    pid_t child = start(send_by_loop, name);
    watch(epoll, pelton_fd(listener), 1);
    CHECK(wait_for_any(epoll) == 1);
    receiver = accepted_at_once(listener, PELTON_NO_WAIT);
    OK(pelton_close(listener));
    watch(epoll, pelton_fd(receiver), 2);
    for (;;) {
        while ((answer = pelton_receive(receiver, PELTON_NO_WAIT, &message)) == PELTON_OK) {
            uint32_t found;
            memcpy(&found, message.data, sizeof found);
            CHECK(found == number && message.size == 4 + number % 496);
            number++;
            OK(pelton_release(receiver));
        }
        if (answer == PELTON_AGAIN) answer = pelton_arm(receiver);
        if (answer == PELTON_AGAIN) {
            CHECK(wait_for_any(epoll) == 2);
        } else if (answer != PELTON_OK) {
            break;
        }
    }
    ANSWERS(answer, PELTON_CLOSED);
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
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_sender *sender;
    pelton_receiver *receiver;
    pelton_message message;
    static char large[30000];
    options.capacity = 64 << 10;
    OK(pelton_threads(&options, &sender, &receiver));
    int fd = pelton_fd(receiver);
    ANSWERS(pelton_arm(receiver), PELTON_AGAIN);
    CHECK(!is_readable(fd));
    OK(pelton_send(sender, large, sizeof large, PELTON_NO_WAIT));
    CHECK(is_readable(fd));
    OK(pelton_arm(receiver));
    CHECK(is_readable(fd));
    OK(pelton_send(sender, large, sizeof large, PELTON_NO_WAIT));
    int sender_fd = pelton_fd(sender);
    ANSWERS(pelton_arm_send(sender, sizeof large), PELTON_AGAIN);
    CHECK(!is_readable(sender_fd));
    for (int i = 0; i < 2; i++) {
        OK(pelton_receive(receiver, PELTON_NO_WAIT, &message));
        CHECK(is_readable(fd));
        OK(pelton_release(receiver));
    }
    CHECK(is_readable(sender_fd));
    OK(pelton_arm_send(sender, sizeof large));
    ANSWERS(pelton_arm(receiver), PELTON_AGAIN);
    CHECK(!is_readable(fd));
    OK(pelton_disarm(receiver));
    ANSWERS(pelton_arm(receiver), PELTON_AGAIN);
    OK(pelton_close(sender));
    CHECK(is_readable(fd));
    ANSWERS(pelton_receive(receiver, PELTON_NO_WAIT, &message), PELTON_CLOSED);
    CHECK(pelton_fd(receiver) == fd);
    OK(pelton_close(receiver));
}

static void who_sends_nothing_is_told_the_end_only(void) {
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_message message;
    for (int ways = 0; ways < 2; ways++) {
        pelton_sender *sender;
        pelton_receiver *receiver;
        static char large[30000];
        options.capacity = 64 << 10;
        OK(pelton_threads(&options, &sender, &receiver));
        int fd = pelton_fd(sender);
        if (ways == 1) {
            /* Full to the last byte, and armed for room: that is taken back. */
            for (size_t size = sizeof large; size > 0; size /= 2) {
                while (pelton_send(sender, large, size - 1, PELTON_NO_WAIT) == PELTON_OK) {
                }
            }
            ANSWERS(pelton_arm_send(sender, 0), PELTON_AGAIN);
        } else {
            OK(pelton_arm_send(sender, sizeof large));
            CHECK(is_readable(fd));
        }
        ANSWERS(pelton_arm(sender), PELTON_AGAIN);
        CHECK(!is_readable(fd));
        while (pelton_receive(receiver, PELTON_NO_WAIT, &message) == PELTON_OK) {
            OK(pelton_release(receiver));
        }
        CHECK(!is_readable(fd));
        OK(pelton_close(receiver));
        CHECK(is_readable(fd));
        ANSWERS(pelton_arm(sender), PELTON_CLOSED);
        OK(pelton_close(sender));
    }
}

int main(void) {
    static const test tests[] = {
        TEST(the_descriptor_is_readable_while_there_is_something),
        TEST(who_sends_nothing_is_told_the_end_only),
        TEST(both_ends_run_in_event_loops),
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
