/* Channels of each kind, and what can be sent and received by them. */
#include "check.h"

/* A message whose bytes tell its number. */
static size_t compose(unsigned char *buffer, uint32_t number) {
    size_t size = 4 + number * 37 % 300;
    memset(buffer, (int)(number & 0xff), size);
    memcpy(buffer, &number, sizeof number);
    return size;
}

static void send_numbered(pelton_sender *sender, uint32_t count) {
    unsigned char buffer[400];
    for (uint32_t number = 0; number < count; number++) {
        size_t size = compose(buffer, number);
        OK(pelton_sender_send(sender, buffer, size, SOON));
    }
}

static void expect(const void *data, size_t size, uint32_t number) {
    unsigned char wanted[400];
    CHECK(size == compose(wanted, number));
    CHECK(memcmp(data, wanted, size) == 0);
}

static void receive_numbered(pelton_receiver *receiver, uint32_t count) {
    pelton_message message;
    for (uint32_t number = 0; number < count; number++) {
        OK(pelton_receiver_receive(receiver, SOON, &message));
        CHECK(message.data && (uintptr_t)message.data % 8 == 0);
        CHECK(message.seq != 0 && message.lane == 0 && message.descriptor_count == 0);
        expect(message.data, message.size, number);
        OK(pelton_receiver_release(receiver));
    }
}

enum { MANY = 20000 };

static void send_many(const char *name) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_sender *sender;
    options.deadline_ns = SOON;
    options.capacity = 1 << 20;
    OK(pelton_sender_open(name, &options, &sender));
    send_numbered(sender, MANY);
    OK(pelton_sender_wait_released(sender, SOON));
    OK(pelton_close(sender));
}

static void two_processes_connect_under_a_name(void) {
    char name[128];
    pelton_listener *listener;
    pelton_receiver *receiver;
    pelton_message message;
    pelton_receiver_info info;
    OK(pelton_listener_open(place(name, "unix:%s/socket"), NULL, &listener));
    RETURNS(pelton_listener_accept_receiver(listener, PELTON_NO_WAIT, &receiver), PELTON_AGAIN);
    pid_t child = start(send_many, name);
    receiver = accepted_at_once(listener, PELTON_NO_WAIT);
    OK(pelton_close(listener));
    receive_numbered(receiver, MANY);
    RETURNS(pelton_receiver_receive(receiver, SOON, &message), PELTON_CLOSED);
    info.struct_bytes = sizeof info;
    OK(pelton_receiver_get_info(receiver, &info));
    CHECK(info.has_peer == 1 && info.peer_pid == (uint32_t)child && info.peer_uid == geteuid());
    CHECK(info.messages == MANY && info.capacity == 1 << 20 && info.generation == 1);
    CHECK(info.message_bytes_max == (1 << 19) - 32);
    OK(pelton_close(receiver));
    finish(child);
}

static void a_peer_that_waits_is_accepted_after_the_deadline(void) {
    char name[128];
    pelton_listener *listener;
    pelton_receiver *receiver;
    OK(pelton_listener_open(place(name, "unix:%s/socket"), NULL, &listener));
    RETURNS(pelton_listener_accept_receiver(listener, pelton_deadline(-1), &receiver), PELTON_AGAIN);
    pid_t child = start(send_many, name);
    receiver = accepted_at_once(listener, pelton_deadline(-1));
    receive_numbered(receiver, MANY);
    OK(pelton_close(receiver));
    OK(pelton_close(listener));
    finish(child);
}

static void answer_with_figures(const char *name) {
    pelton_listener *listener;
    pelton_sender *sender;
    OK(pelton_listener_open(name, NULL, &listener));
    OK(pelton_listener_accept_sender(listener, SOON, &sender));
    send_numbered(sender, 3);
    OK(pelton_sender_wait_released(sender, SOON));
    OK(pelton_close(sender));
    OK(pelton_close(listener));
}

static void a_receiver_may_be_the_one_that_connects(void) {
    char name[128];
    pelton_receiver *receiver;
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    options.deadline_ns = SOON;
    options.wait = PELTON_SPIN;
    pid_t child = start(answer_with_figures, place(name, "unix:%s/socket"));
    OK(pelton_receiver_open(name, &options, &receiver));
    receive_numbered(receiver, 3);
    OK(pelton_close(receiver));
    finish(child);
}

static void remove_channel(const char *path) {
    char command[300];
    CHECK(snprintf(command, sizeof command, "rm -r '%s'", path + strlen("path:")) > 0);
    CHECK(system(command) == 0);
}

static void send_many_by_path(const char *name) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_sender *sender;
    options.create = 1;
    options.capacity = 16 << 20;
    OK(pelton_sender_open(name, &options, &sender));
    send_numbered(sender, MANY);
    OK(pelton_sender_sync(sender));
    OK(pelton_close(sender));
}

static void a_path_keeps_what_was_sent_until_it_is_received(void) {
    char name[128];
    pelton_receiver *receiver;
    pelton_message message;
    pelton_receiver_info info;
    place(name, "path:%s/channel");
    RETURNS(pelton_receiver_open(name, NULL, &receiver), PELTON_NO_CHANNEL);
    CHECK(strstr(pelton_error_detail(), "there is no channel"));
    finish(start(send_many_by_path, name));
    OK(pelton_receiver_open(name, NULL, &receiver));
    pelton_receiver *second;
    RETURNS(pelton_receiver_open(name, NULL, &second), PELTON_ROLE_TAKEN);
    OK(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message));
    CHECK(message.seq == 1 && message.flags == 0);
    OK(pelton_close(receiver));
    /* It was not released. */
    OK(pelton_receiver_open(name, NULL, &receiver));
    OK(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message));
    CHECK(message.seq == 1 && message.flags == PELTON_REDELIVERED);
    expect(message.data, message.size, 0);
    OK(pelton_receiver_release(receiver));
    for (uint32_t number = 1; number < MANY; number++) {
        OK(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message));
        expect(message.data, message.size, number);
        OK(pelton_receiver_release(receiver));
    }
    /* The sender's end is reported once; then the next one may come. */
    RETURNS(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message), PELTON_CLOSED);
    RETURNS(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message), PELTON_AGAIN);
    OK(pelton_receiver_sync(receiver));
    info.struct_bytes = sizeof info;
    OK(pelton_receiver_get_info(receiver, &info));
    CHECK(info.has_peer == 0 && info.messages == MANY);
    /* Nobody is there by the deadline, nor has been. */
    RETURNS(pelton_receiver_resume(receiver, pelton_deadline(1000000)), PELTON_AGAIN);
    OK(pelton_close(receiver));
    remove_channel(name);
}

static void each_sender_of_a_path_has_a_lane(void) {
    char name[128];
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_sender *one, *two, *three;
    pelton_receiver *receiver;
    pelton_message message;
    options.create = 1;
    options.lanes = 2;
    options.capacity = 1 << 20;
    OK(pelton_sender_open(place(name, "path:%s/lanes"), &options, &one));
    OK(pelton_sender_open(name, &options, &two));
    RETURNS(pelton_sender_open(name, &options, &three), PELTON_ROLE_TAKEN);
    OK(pelton_receiver_open(name, &options, &receiver));
    OK(pelton_sender_send(one, "one", 3, PELTON_NO_WAIT));
    OK(pelton_sender_send(two, "two", 3, PELTON_NO_WAIT));
    int seen[2] = {0, 0};
    for (int i = 0; i < 2; i++) {
        OK(pelton_receiver_receive(receiver, SOON, &message));
        CHECK(message.lane < 2);
        CHECK(memcmp(message.data, message.lane == 0 ? "one" : "two", 3) == 0);
        seen[message.lane]++;
        OK(pelton_receiver_release(receiver));
    }
    CHECK(seen[0] == 1 && seen[1] == 1);
    OK(pelton_close(one));
    OK(pelton_close(two));
    OK(pelton_close(receiver));
    remove_channel(name);
}

static void *send_many_from_a_thread(void *sender) {
    send_numbered((pelton_sender *)sender, MANY);
    OK(pelton_close((pelton_sender *)sender));
    return NULL;
}

static void threads_of_one_process_have_a_channel(void) {
    pelton_sender *sender;
    pelton_receiver *receiver;
    pelton_message message;
    pthread_t thread;
    OK(pelton_threads(NULL, &sender, &receiver));
    CHECK(pthread_create(&thread, NULL, send_many_from_a_thread, sender) == 0);
    receive_numbered(receiver, MANY);
    RETURNS(pelton_receiver_receive(receiver, SOON, &message), PELTON_CLOSED);
    CHECK(pthread_join(thread, NULL) == 0);
    OK(pelton_close(receiver));
}

static void small_channel(pelton_sender **sender, pelton_receiver **receiver) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    options.capacity = 64 << 10;
    OK(pelton_threads(&options, sender, receiver));
}

static void what_is_reserved_is_seen_when_committed(void) {
    pelton_sender *sender;
    pelton_receiver *receiver;
    pelton_message message;
    void *room;
    small_channel(&sender, &receiver);
    OK(pelton_sender_reserve(sender, 100, PELTON_NO_WAIT, &room));
    memcpy(room, "never", 5);
    OK(pelton_sender_abort(sender));
    OK(pelton_sender_reserve(sender, 1000, PELTON_NO_WAIT, &room));
    memcpy(room, "lost", 4);
    OK(pelton_sender_reserve(sender, 100, SOON, &room));
    CHECK((uintptr_t)room % 8 == 0);
    memcpy(room, "hello", 5);
    RETURNS(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message), PELTON_AGAIN);
    OK(pelton_sender_commit(sender, 5));
    OK(pelton_sender_reserve(sender, 0, PELTON_FOREVER, &room));
    OK(pelton_sender_commit(sender, 0));
    OK(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message));
    CHECK(message.size == 5 && memcmp(message.data, "hello", 5) == 0);
    OK(pelton_receiver_release(receiver));
    OK(pelton_receiver_receive(receiver, PELTON_FOREVER, &message));
    CHECK(message.size == 0 && message.data);
    OK(pelton_receiver_release(receiver));
    OK(pelton_sender_trim(sender));
    OK(pelton_close(sender));
    OK(pelton_close(receiver));
}

static void expect_traceparent(pelton_receiver *receiver, const char *wanted) {
    char found[PELTON_TRACEPARENT_SIZE] = "unchanged";
    CHECK(pelton_receiver_traceparent(receiver, found) == (wanted != NULL));
    CHECK(strcmp(found, wanted ? wanted : "unchanged") == 0);
}

static void a_message_carries_its_traceparent_if_the_channel_permits_it(void) {
    static const char valid[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    static const char *const texts[] = {valid, NULL, "00-4BF92F3577B34DA6A3CE929D0E0E4736-00F067AA0BA902B7-01", ""};
    for (int permitted = 0; permitted < 2; permitted++) {
        pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
        const char *wanted = permitted ? valid : NULL;
        pelton_sender *sender;
        pelton_receiver *receiver;
        pelton_message message, batch[8];
        pelton_held *held;
        char copy[8];
        size_t size, count;
        void *room;
        options.capacity = 64 << 10;
        options.traced = (uint32_t)permitted;
        OK(pelton_threads(&options, &sender, &receiver));
        for (int i = 0; i < 4; i++) OK(pelton_sender_send_traced(sender, "one", 3, texts[i], SOON));
        for (int i = 0; i < 4; i++) {
            OK(pelton_receiver_receive(receiver, SOON, &message));
            CHECK(message.size == 3 && memcmp(message.data, "one", 3) == 0);
            expect_traceparent(receiver, i == 0 ? wanted : NULL);
            OK(pelton_receiver_release(receiver));
        }
        OK(pelton_sender_reserve_traced(sender, 100, valid, SOON, &room));
        memcpy(room, "two", 3);
        OK(pelton_sender_commit(sender, 3));
        OK(pelton_receiver_receive_copy(receiver, copy, sizeof copy, SOON, &size));
        CHECK(size == 3 && memcmp(copy, "two", 3) == 0);
        expect_traceparent(receiver, wanted);
        OK(pelton_sender_send_traced(sender, "held", 4, valid, SOON));
        OK(pelton_receiver_receive(receiver, SOON, &message));
        expect_traceparent(receiver, wanted);
        OK(pelton_receiver_hold(receiver, &held));
        OK(pelton_close(held));
        /* A batch ends with the first message that has one. */
        OK(pelton_sender_send(sender, "1", 1, SOON));
        OK(pelton_sender_send_traced(sender, "2", 1, valid, SOON));
        OK(pelton_sender_send(sender, "3", 1, SOON));
        OK(pelton_receiver_receive_batch(receiver, SOON, batch, 8, &count));
        CHECK(count == (permitted ? 2 : 3));
        expect_traceparent(receiver, wanted);
        OK(pelton_receiver_release(receiver));
        if (permitted) {
            OK(pelton_receiver_receive_batch(receiver, SOON, batch, 8, &count));
            CHECK(count == 1);
            expect_traceparent(receiver, NULL);
            OK(pelton_receiver_release(receiver));
        }
        OK(pelton_close(sender));
        OK(pelton_close(receiver));
    }
}

static void a_batch_appears_at_once_and_is_released_at_once(void) {
    pelton_sender *sender;
    pelton_receiver *receiver;
    pelton_message messages[8];
    pelton_sender_info info;
    pelton_receiver_info receivers;
    size_t count;
    info.struct_bytes = sizeof info;
    receivers.struct_bytes = sizeof receivers;
    small_channel(&sender, &receiver);
    /* Also around the end of the lane, many times over. */
    for (int round = 0; round < 500; round++) {
        char texts[5][101];
        struct iovec batch[5];
        for (int i = 0; i < 5; i++) {
            memset(texts[i], 'a' + i, sizeof texts[i]);
            batch[i].iov_base = texts[i];
            batch[i].iov_len = sizeof texts[i];
        }
        OK(pelton_receiver_get_info(receiver, &receivers));
        RETURNS(pelton_receiver_receive_batch(receiver, PELTON_NO_WAIT, messages, 8, &count), PELTON_AGAIN);
        OK(pelton_sender_send_batch(sender, batch, 5, SOON));
        OK(pelton_receiver_receive_batch(receiver, PELTON_NO_WAIT, messages, 3, &count));
        CHECK(count == 3);
        for (int i = 0; i < 3; i++) {
            CHECK(messages[i].size == 101 && *(const char *)messages[i].data == 'a' + i);
            CHECK(messages[i].seq == messages[0].seq + (uint32_t)i);
        }
        OK(pelton_sender_get_info(sender, &info));
        CHECK(info.unreleased == 5);
        OK(pelton_receiver_release(receiver));
        OK(pelton_sender_get_info(sender, &info));
        CHECK(info.unreleased == 2);
        OK(pelton_receiver_receive_batch(receiver, SOON, messages, 8, &count));
        CHECK(count == 2 && *(const char *)messages[1].data == 'e');
        OK(pelton_receiver_release(receiver));
    }
    /* Empty ones too, and none at all. */
    struct iovec empty[3] = {{NULL, 0}, {NULL, 0}, {messages, 0}};
    OK(pelton_sender_send_batch(sender, empty, 3, PELTON_NO_WAIT));
    OK(pelton_sender_send_batch(sender, NULL, 0, PELTON_NO_WAIT));
    OK(pelton_receiver_receive_batch(receiver, SOON, messages, 8, &count));
    CHECK(count == 3 && messages[0].size == 0 && messages[2].size == 0);
    OK(pelton_receiver_release(receiver));
    OK(pelton_sender_send(sender, "z", 1, PELTON_NO_WAIT));
    OK(pelton_receiver_receive_batch(receiver, SOON, messages, 1, &count));
    CHECK(count == 1 && *(const char *)messages[0].data == 'z');
    OK(pelton_receiver_release(receiver));
    OK(pelton_close(sender));
    OK(pelton_close(receiver));
}

static void *release_later(void *receiver) {
    pelton_message message;
    OK(pelton_receiver_receive((pelton_receiver *)receiver, SOON, &message));
    OK(pelton_receiver_release((pelton_receiver *)receiver));
    return NULL;
}

static void a_batch_waits_for_its_room(void) {
    pelton_sender *sender;
    pelton_receiver *receiver;
    pelton_sender_info info;
    pthread_t thread;
    static char large[30000];
    struct iovec batch[2] = {{large, 15000}, {large, 14000}};
    info.struct_bytes = sizeof info;
    small_channel(&sender, &receiver);
    while (pelton_sender_send(sender, large, sizeof large, PELTON_NO_WAIT) == PELTON_OK) {
    }
    OK(pelton_sender_get_info(sender, &info));
    RETURNS(pelton_sender_send_batch(sender, batch, 2, PELTON_NO_WAIT), PELTON_AGAIN);
    RETURNS(pelton_sender_send_batch(sender, batch, 2, pelton_deadline(1000000)), PELTON_AGAIN);
    uint64_t before = info.messages;
    OK(pelton_sender_get_info(sender, &info));
    CHECK(info.messages == before);
    CHECK(pthread_create(&thread, NULL, release_later, receiver) == 0);
    OK(pelton_sender_send_batch(sender, batch, 2, SOON));
    CHECK(pthread_join(thread, NULL) == 0);
    OK(pelton_sender_get_info(sender, &info));
    CHECK(info.messages == before + 2);
    OK(pelton_close(sender));
    OK(pelton_close(receiver));
}

/* Whatever is in the lane, so what is too large never depends on that. */
static void a_batch_as_large_as_the_largest_message_has_its_room_and_none_larger(void) {
    pelton_sender *sender;
    pelton_receiver *receiver;
    pelton_message message;
    pelton_sender_info info;
    static char bytes[4096];
    info.struct_bytes = sizeof info;
    for (uint64_t largest = 1001; largest <= 1008; largest++) {
        pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
        options.capacity = 64 << 10;
        options.message_bytes_max = largest;
        OK(pelton_threads(&options, &sender, &receiver));
        OK(pelton_sender_get_info(sender, &info));
        CHECK(info.message_bytes_max == largest);
        for (int full = 0; full < 2; full++) {
            /* As much as a record of the largest message takes, with its header. */
            size_t room = (size_t)(largest + 8 + 7) / 8 * 8;
            struct iovec batch[2] = {{bytes, 392}, {bytes, room - 400 - 8}};
            OK(pelton_sender_send_batch(sender, batch, 2, SOON));
            batch[1].iov_len++;
            FAILS(pelton_sender_send_batch(sender, batch, 2, full ? SOON : PELTON_NO_WAIT), PELTON_TOO_LARGE, "");
            batch[1].iov_len = (size_t)largest + 1;
            FAILS(pelton_sender_send_batch(sender, batch + 1, 1, PELTON_FOREVER), PELTON_TOO_LARGE, "");
            batch[1].iov_len = room - 400 - 8;
            while (pelton_sender_send_batch(sender, batch, 2, PELTON_NO_WAIT) == PELTON_OK) {
            }
            RETURNS(pelton_sender_send_batch(sender, batch, 2, pelton_deadline(1000)), PELTON_AGAIN);
            for (int i = 0; i < 40; i++) {
                OK(pelton_receiver_receive(receiver, SOON, &message));
                OK(pelton_receiver_release(receiver));
            }
        }
        OK(pelton_close(sender));
        OK(pelton_close(receiver));
    }
}

static void a_copy_needs_room_and_takes_the_message(void) {
    pelton_sender *sender;
    pelton_receiver *receiver;
    char buffer[16];
    size_t size = 0;
    small_channel(&sender, &receiver);
    OK(pelton_sender_send(sender, "twelve bytes", 12, PELTON_NO_WAIT));
    OK(pelton_sender_send(sender, "next", 4, PELTON_NO_WAIT));
    OK(pelton_sender_send(sender, NULL, 0, PELTON_NO_WAIT));
    RETURNS(pelton_receiver_receive_copy(receiver, NULL, 0, PELTON_NO_WAIT, &size), PELTON_TOO_SMALL);
    CHECK(size == 12);
    FAILS(pelton_receiver_receive_copy(receiver, buffer, 11, SOON, &size), PELTON_TOO_SMALL, "12 bytes");
    OK(pelton_receiver_receive_copy(receiver, buffer, sizeof buffer, SOON, &size));
    CHECK(size == 12 && memcmp(buffer, "twelve bytes", 12) == 0);
    OK(pelton_receiver_receive_copy(receiver, buffer, 4, PELTON_FOREVER, &size));
    CHECK(size == 4 && memcmp(buffer, "next", 4) == 0);
    OK(pelton_receiver_receive_copy(receiver, NULL, 0, PELTON_NO_WAIT, &size));
    CHECK(size == 0);
    RETURNS(pelton_receiver_receive_copy(receiver, buffer, 4, PELTON_NO_WAIT, &size), PELTON_AGAIN);
    OK(pelton_sender_wait_released(sender, PELTON_NO_WAIT));
    OK(pelton_close(sender));
    OK(pelton_close(receiver));
}

static void what_waits_ends_at_its_deadline(void) {
    pelton_sender *sender;
    pelton_receiver *receiver;
    pelton_listener *listener;
    pelton_message message;
    static char large[30000];
    char name[128];
    void *room;
    size_t size;
    const int64_t begun = pelton_deadline(0), wait = 20000000;
    small_channel(&sender, &receiver);
    RETURNS(pelton_receiver_receive(receiver, pelton_deadline(wait), &message), PELTON_AGAIN);
    CHECK(pelton_deadline(0) - begun >= wait);
    RETURNS(pelton_receiver_receive(receiver, begun, &message), PELTON_AGAIN);
    RETURNS(pelton_receiver_receive(receiver, -1, &message), PELTON_AGAIN);
    RETURNS(pelton_receiver_receive_copy(receiver, large, sizeof large, pelton_deadline(1000), &size), PELTON_AGAIN);
    RETURNS(pelton_receiver_receive_batch(receiver, pelton_deadline(1000), &message, 1, &size), PELTON_AGAIN);
    OK(pelton_sender_send(sender, large, sizeof large, begun));
    while (pelton_sender_send(sender, large, sizeof large, PELTON_NO_WAIT) == PELTON_OK) {
    }
    RETURNS(pelton_sender_send(sender, large, sizeof large, pelton_deadline(wait)), PELTON_AGAIN);
    RETURNS(pelton_sender_reserve(sender, sizeof large, pelton_deadline(wait), &room), PELTON_AGAIN);
    RETURNS(pelton_sender_reserve(sender, sizeof large, PELTON_NO_WAIT, &room), PELTON_AGAIN);
    int standard_input = 0;
    RETURNS(pelton_sender_send_descriptors(sender, large, sizeof large, &standard_input, 1, pelton_deadline(wait)), PELTON_AGAIN);
    RETURNS(pelton_sender_send_descriptors(sender, large, sizeof large, &standard_input, 1, PELTON_NO_WAIT), PELTON_AGAIN);
    RETURNS(pelton_sender_wait_released(sender, pelton_deadline(wait)), PELTON_AGAIN);
    OK(pelton_listener_open(place(name, "unix:%s/socket"), NULL, &listener));
    pelton_receiver *accepted;
    RETURNS(pelton_listener_accept_receiver(listener, pelton_deadline(wait), &accepted), PELTON_AGAIN);
    OK(pelton_close(listener));
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_sender *opened;
    options.deadline_ns = pelton_deadline(wait);
    RETURNS(pelton_sender_open(name, &options, &opened), PELTON_TIMED_OUT);
    RETURNS(pelton_sender_open(name, NULL, &opened), PELTON_NO_LISTENER);
    CHECK(pelton_deadline(0) - begun < (int64_t)100 * SECONDS);
    CHECK(pelton_deadline(INT64_MAX) == PELTON_FOREVER && pelton_deadline(-INT64_MAX) == 1);
    OK(pelton_close(sender));
    OK(pelton_close(receiver));
}

static void send_descriptors(const char *name) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_sender *sender;
    int ends[2];
    options.deadline_ns = SOON;
    OK(pelton_sender_open(name, &options, &sender));
    CHECK(pipe(ends) == 0);
    OK(pelton_sender_send(sender, "none", 4, SOON));
    OK(pelton_sender_send_descriptors(sender, "some", 4, ends, 2, SOON));
    CHECK(write(ends[1], "through a pipe", 14) == 14);
    OK(pelton_sender_send_descriptors(sender, "dropped", 7, ends, 1, SOON));
    OK(pelton_sender_send_descriptors(sender, "no descriptors", 14, NULL, 0, SOON));
    OK(pelton_sender_wait_released(sender, SOON));
    OK(pelton_close(sender));
}

static void descriptors_come_with_their_message(void) {
    char name[128], text[14];
    pelton_listener *listener;
    pelton_receiver *receiver;
    pelton_message messages[4];
    int fds[2];
    size_t count;
    OK(pelton_listener_open(place(name, "unix:%s/socket"), NULL, &listener));
    pid_t child = start(send_descriptors, name);
    OK(pelton_listener_accept_receiver(listener, SOON, &receiver));
    OK(pelton_receiver_receive_batch(receiver, SOON, messages, 4, &count));
    CHECK(count == 1 && messages[0].descriptor_count == 0);
    OK(pelton_receiver_take_descriptors(receiver, fds, 2, &count));
    CHECK(count == 0);
    OK(pelton_receiver_release(receiver));
    OK(pelton_receiver_receive_batch(receiver, SOON, messages, 4, &count));
    CHECK(count == 1 && messages[0].descriptor_count == 2);
    RETURNS(pelton_receiver_take_descriptors(receiver, fds, 1, &count), PELTON_TOO_SMALL);
    CHECK(count == 2);
    OK(pelton_receiver_take_descriptors(receiver, fds, 2, &count));
    CHECK(count == 2);
    OK(pelton_receiver_take_descriptors(receiver, fds, 2, &count));
    CHECK(count == 0 && fds[0] >= 0);
    CHECK(fcntl(fds[0], F_GETFD) & FD_CLOEXEC);
    OK(pelton_receiver_release(receiver));
    CHECK(read(fds[0], text, sizeof text) == 14 && memcmp(text, "through a pipe", 14) == 0);
    close(fds[0]);
    close(fds[1]);
    OK(pelton_receiver_receive(receiver, SOON, messages));
    CHECK(messages[0].descriptor_count == 1);
    OK(pelton_receiver_release(receiver));
    OK(pelton_receiver_receive(receiver, SOON, messages));
    CHECK(messages[0].size == 14 && messages[0].descriptor_count == 0);
    OK(pelton_receiver_release(receiver));
    finish(child);
    OK(pelton_close(receiver));
    OK(pelton_close(listener));
}

/* Messages held, released by other threads in another order. */
enum { HELD = 48 };
static struct {
    pelton_held *held;
    const unsigned char *data;
} kept[HELD];

static void *release_every_third(void *from) {
    for (size_t i = *(size_t *)from; i < HELD; i += 3) {
        CHECK(kept[i].data[0] == (unsigned char)i && kept[i].data[999] == (unsigned char)i);
        OK(pelton_close(kept[i].held));
    }
    return NULL;
}

static void held_messages_are_released_in_any_order_from_any_thread(void) {
    pelton_sender *sender;
    pelton_receiver *receiver;
    pelton_message message;
    pthread_t threads[2];
    size_t from[2] = {2, 1};
    static unsigned char payload[30000];
    small_channel(&sender, &receiver);
    for (int round = 0; round < 5; round++) {
        /* So much of the lane that a large message finds no room before the oldest is back. */
        for (size_t i = 0; i < HELD; i++) {
            memset(payload, (int)i, 1000);
            OK(pelton_sender_send(sender, payload, 1000, SOON));
            OK(pelton_receiver_receive(receiver, SOON, &message));
            kept[i].data = (const unsigned char *)message.data;
            OK(pelton_receiver_hold(receiver, &kept[i].held));
        }
        RETURNS(pelton_sender_send(sender, payload, sizeof payload, PELTON_NO_WAIT), PELTON_AGAIN);
        RETURNS(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message), PELTON_AGAIN);
        for (int i = 0; i < 2; i++) {
            CHECK(pthread_create(&threads[i], NULL, release_every_third, &from[i]) == 0);
        }
        for (int i = 0; i < 2; i++) {
            CHECK(pthread_join(threads[i], NULL) == 0);
        }
        RETURNS(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message), PELTON_AGAIN);
        RETURNS(pelton_sender_send(sender, payload, 30000, PELTON_NO_WAIT), PELTON_AGAIN);
        size_t zero = 0;
        release_every_third(&zero);
        /* The receiver gives the space back when it is next used. */
        RETURNS(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message), PELTON_AGAIN);
        OK(pelton_sender_wait_released(sender, PELTON_NO_WAIT));
    }
    /* One outlives its receiver. */
    OK(pelton_sender_send(sender, payload, 5, SOON));
    OK(pelton_receiver_receive(receiver, SOON, &message));
    OK(pelton_receiver_hold(receiver, &kept[0].held));
    OK(pelton_close(receiver));
    CHECK(memcmp(message.data, payload, 5) == 0);
    OK(pelton_close(kept[0].held));
    OK(pelton_close(NULL));
    OK(pelton_close(sender));
}

static void the_table_of_codes_is_the_librarys(void) {
#define CODE_(code, number, text) \
    CHECK(code == number && strcmp(pelton_code_text(code), text) == 0);
    PELTON_CODES(CODE_)
#undef CODE_
    CHECK(strcmp(pelton_code_text(0), "ok") == 0);
    CHECK(strcmp(pelton_code_text(1), "an unknown code") == 0);
    CHECK(strcmp(pelton_code_text(-1000), "an unknown code") == 0);
}

static void an_older_caller_gets_what_its_struct_has_room_for(void) {
    pelton_sender *sender;
    pelton_receiver *receiver;
    struct {
        pelton_sender_info info;
        uint64_t beyond[2];
    } later;
    pelton_sender_info info;
    small_channel(&sender, &receiver);
    memset(&later, 0xff, sizeof later);
    later.info.struct_bytes = sizeof later.info + 8;
    OK(pelton_sender_get_info(sender, &later.info));
    CHECK(later.info.capacity == 64 << 10 && later.beyond[0] == 0 && later.beyond[1] == UINT64_MAX);
    memset(&info, 0xff, sizeof info);
    info.struct_bytes = offsetof(pelton_sender_info, unreleased);
    OK(pelton_sender_get_info(sender, &info));
    CHECK(info.next_seq == 1 && info.capacity == 64 << 10 && info.unreleased == UINT64_MAX);
    OK(pelton_close(sender));
    OK(pelton_close(receiver));
}

int main(void) {
    static const test tests[] = {
        TEST(the_table_of_codes_is_the_librarys),
        TEST(two_processes_connect_under_a_name),
        TEST(a_peer_that_waits_is_accepted_after_the_deadline),
        TEST(a_receiver_may_be_the_one_that_connects),
        TEST(a_path_keeps_what_was_sent_until_it_is_received),
        TEST(each_sender_of_a_path_has_a_lane),
        TEST(threads_of_one_process_have_a_channel),
        TEST(what_is_reserved_is_seen_when_committed),
        TEST(a_message_carries_its_traceparent_if_the_channel_permits_it),
        TEST(a_batch_appears_at_once_and_is_released_at_once),
        TEST(a_batch_waits_for_its_room),
        TEST(a_batch_as_large_as_the_largest_message_has_its_room_and_none_larger),
        TEST(a_copy_needs_room_and_takes_the_message),
        TEST(what_waits_ends_at_its_deadline),
        TEST(descriptors_come_with_their_message),
        TEST(held_messages_are_released_in_any_order_from_any_thread),
        TEST(an_older_caller_gets_what_its_struct_has_room_for),
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
