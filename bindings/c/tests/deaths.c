/* A death is reported to the peer, which keeps everything and continues with a successor. */
#include "check.h"

/* Sends two messages, begins a third, and waits for its end. */
static void send_and_stand(const char *name) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_sender *sender;
    void *room;
    options.deadline_ns = SOON;
    OK(pelton_sender_open(name, &options, &sender));
    OK(pelton_sender_send(sender, "one", 3, SOON));
    OK(pelton_sender_send(sender, "two", 3, SOON));
    OK(pelton_sender_reserve(sender, 100, SOON, &room));
    memset(room, 'x', 100);
    pause();
}

static void send_a_third_and_close(const char *name) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_sender *sender;
    pelton_sender_info info;
    options.deadline_ns = SOON;
    OK(pelton_sender_open(name, &options, &sender));
    info.struct_bytes = sizeof info;
    OK(pelton_sender_get_info(sender, &info));
    CHECK(info.next_seq == 3);
    OK(pelton_sender_send(sender, "three", 5, SOON));
    OK(pelton_sender_wait_released(sender, SOON));
    OK(pelton_close(sender));
}

static void a_senders_successor_goes_on_behind_it(void) {
    char name[128];
    pelton_listener *listener;
    pelton_receiver *receiver;
    pelton_message message;
    pelton_receiver_info info;
    OK(pelton_listener_open(place(name, "unix:%s/socket"), NULL, &listener));
    pid_t first = start(send_and_stand, name);
    OK(pelton_listener_accept_receiver(listener, SOON, &receiver));
    OK(pelton_receiver_receive(receiver, SOON, &message));
    CHECK(message.size == 3 && memcmp(message.data, "one", 3) == 0);
    OK(pelton_receiver_release(receiver));
    RETURNS(pelton_receiver_resume(receiver, SOON), PELTON_REFUSED);
    OK(pelton_receiver_receive(receiver, SOON, &message));
    kill_now(first);
    CHECK(memcmp(message.data, "two", 3) == 0);
    OK(pelton_receiver_release(receiver));
    FAILS(pelton_receiver_receive(receiver, SOON, &message), PELTON_PEER_DIED, "died without closing");
    RETURNS(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message), PELTON_PEER_DIED);
    RETURNS(pelton_receiver_resume(receiver, pelton_deadline(1000000)), PELTON_AGAIN);
    pid_t second = start(send_a_third_and_close, name);
    OK(pelton_receiver_resume(receiver, SOON));
    OK(pelton_receiver_receive(receiver, SOON, &message));
    CHECK(message.size == 5 && message.seq == 3 && memcmp(message.data, "three", 5) == 0);
    info.struct_bytes = sizeof info;
    OK(pelton_receiver_get_info(receiver, &info));
    CHECK(info.generation == 2 && info.peer_pid == (uint32_t)second);
    OK(pelton_receiver_release(receiver));
    RETURNS(pelton_receiver_receive(receiver, SOON, &message), PELTON_CLOSED);
    finish(second);
    OK(pelton_close(receiver));
    OK(pelton_close(listener));
}

/* Receives three messages, releases the first, and waits for its end. */
static void receive_and_stand(const char *name) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_receiver *receiver;
    pelton_message message;
    pelton_held *held;
    options.deadline_ns = SOON;
    OK(pelton_receiver_open(name, &options, &receiver));
    OK(pelton_receiver_receive(receiver, SOON, &message));
    OK(pelton_receiver_release(receiver));
    OK(pelton_receiver_receive(receiver, SOON, &message));
    OK(pelton_receiver_hold(receiver, &held));
    OK(pelton_receiver_receive(receiver, SOON, &message));
    OK(pelton_receiver_release(receiver));
    kill(getpid(), SIGKILL);
}

static void receive_the_rest(const char *name) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_receiver *receiver;
    pelton_message message;
    options.deadline_ns = SOON;
    OK(pelton_receiver_open(name, &options, &receiver));
    for (uint32_t seq = 2; seq <= 4; seq++) {
        OK(pelton_receiver_receive(receiver, SOON, &message));
        CHECK(message.seq == seq && message.size == seq);
        CHECK((message.flags & PELTON_REDELIVERED) || seq == 4);
        OK(pelton_receiver_release(receiver));
    }
    RETURNS(pelton_receiver_receive(receiver, SOON, &message), PELTON_CLOSED);
    OK(pelton_close(receiver));
}

static void a_receivers_successor_gets_what_was_not_released(void) {
    char name[128];
    pelton_listener *listener;
    pelton_sender *sender;
    pelton_sender_info info;
    int answer;
    OK(pelton_listener_open(place(name, "unix:%s/socket"), NULL, &listener));
    pid_t first = start(receive_and_stand, name);
    OK(pelton_listener_accept_sender(listener, SOON, &sender));
    /* The sender itself accepts the successor. */
    OK(pelton_close(listener));
    for (size_t size = 1; size <= 3; size++) {
        OK(pelton_sender_send(sender, "xxxx", size, SOON));
    }
    int status;
    CHECK(waitpid(first, &status, 0) == first && WIFSIGNALED(status));
    while ((answer = pelton_sender_wait_released(sender, SOON)) == PELTON_AGAIN) {
    }
    FAILS(answer, PELTON_PEER_DIED, "2 messages were not released");
    info.struct_bytes = sizeof info;
    OK(pelton_sender_get_info(sender, &info));
    CHECK(info.unreleased == 2);
    pid_t second = start(receive_the_rest, name);
    OK(pelton_sender_resume(sender, SOON));
    OK(pelton_sender_send(sender, "xxxx", 4, SOON));
    OK(pelton_sender_wait_released(sender, SOON));
    OK(pelton_close(sender));
    finish(second);
}

static void receive_one_and_die(const char *name) {
    pelton_receiver *receiver;
    pelton_message message;
    OK(pelton_receiver_open(name, NULL, &receiver));
    OK(pelton_receiver_receive(receiver, SOON, &message));
    OK(pelton_receiver_release(receiver));
    OK(pelton_receiver_receive(receiver, SOON, &message));
    kill(getpid(), SIGKILL);
}

static void a_path_reports_the_end_once(void) {
    char name[128], command[300];
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_sender *sender;
    pelton_receiver *receiver;
    pelton_message message;
    int answer, status;
    options.create = 1;
    options.capacity = 1 << 20;
    OK(pelton_sender_open(place(name, "path:%s/channel"), &options, &sender));
    OK(pelton_sender_send(sender, "one", 3, SOON));
    OK(pelton_sender_send(sender, "two", 3, SOON));
    pid_t child = start(receive_one_and_die, name);
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
    while ((answer = pelton_sender_wait_released(sender, pelton_deadline(1000000))) == PELTON_AGAIN) {
    }
    RETURNS(answer, PELTON_PEER_DIED);
    OK(pelton_sender_send(sender, "three", 5, SOON));
    OK(pelton_receiver_open(name, NULL, &receiver));
    OK(pelton_sender_resume(sender, SOON));
    OK(pelton_receiver_receive(receiver, SOON, &message));
    CHECK(message.seq == 2 && message.flags == PELTON_REDELIVERED);
    OK(pelton_receiver_release(receiver));
    OK(pelton_close(sender));
    OK(pelton_receiver_receive(receiver, SOON, &message));
    CHECK(message.seq == 3);
    OK(pelton_receiver_release(receiver));
    RETURNS(pelton_receiver_receive(receiver, SOON, &message), PELTON_CLOSED);
    RETURNS(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message), PELTON_AGAIN);
    OK(pelton_close(receiver));
    CHECK(snprintf(command, sizeof command, "rm -r '%s'", name + strlen("path:")) > 0);
    CHECK(system(command) == 0);
}

int main(void) {
    static const test tests[] = {
        TEST(a_senders_successor_goes_on_behind_it),
        TEST(a_receivers_successor_gets_what_was_not_released),
        TEST(a_path_reports_the_end_once),
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
