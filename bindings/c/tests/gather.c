/* Many senders, one receiver: threads by a shared handle and by senders of their own, processes that come, close and die. */
#include "check.h"

enum { EACH = 5000 };

/* A message says whose it is, and which one. */
typedef struct note {
    uint32_t who;
    uint32_t number;
} note;

typedef struct thread {
    pelton_senders *senders;
    uint32_t who;
} thread;

static void *sends_by_the_shared_handle(void *given) {
    thread *self = (thread *)given;
    for (uint32_t number = 0; number < EACH; number++) {
        note message = {self->who, number};
        OK(pelton_senders_send(self->senders, &message, sizeof message, SOON));
    }
    return NULL;
}

static void *sends_by_its_own(void *given) {
    thread *self = (thread *)given;
    pelton_sender *sender;
    OK(pelton_senders_open(self->senders, &sender));
    for (uint32_t number = 0; number < EACH; number++) {
        note message = {self->who, number};
        OK(pelton_send(sender, &message, sizeof message, SOON));
    }
    OK(pelton_close(sender));
    return NULL;
}

static void each_threads_messages_come_in_order(void) {
    enum { THREADS = 4 };
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_receiver *receiver;
    pelton_senders *senders;
    pthread_t threads[THREADS];
    thread given[THREADS];
    uint32_t next[THREADS] = {0};
    size_t size;
    int answer;
    note found;
    options.capacity = 64 << 10;
    options.announce = 1;
    OK(pelton_gather(NULL, &options, &receiver));
    OK(pelton_receiver_senders(receiver, &senders));
    for (uint32_t i = 0; i < THREADS; i++) {
        given[i].senders = senders;
        given[i].who = i;
        CHECK(pthread_create(&threads[i], NULL, i % 2 ? sends_by_its_own : sends_by_the_shared_handle, &given[i]) == 0);
    }
    for (uint32_t count = 0; count < THREADS * EACH; count++) {
        /* Copying passes over what is told. */
        OK(pelton_receive_copy(receiver, &found, sizeof found, SOON, &size));
        CHECK(size == sizeof found && found.who < THREADS && found.number == next[found.who]);
        next[found.who]++;
    }
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    ANSWERS(pelton_receive_copy(receiver, &found, sizeof found, PELTON_NO_WAIT, &size), PELTON_AGAIN);
    OK(pelton_close(senders));
    while ((answer = pelton_receive_copy(receiver, &found, sizeof found, SOON, &size)) == PELTON_AGAIN) {
    }
    ANSWERS(answer, PELTON_CLOSED);
    OK(pelton_close(receiver));
}

/* Sends some messages; one whose number is odd waits to be killed. */
static void send_some(const char *name, uint32_t who) {
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_sender *sender;
    options.deadline_ns = SOON;
    options.capacity = 64 << 10;
    OK(pelton_sender_open(name, &options, &sender));
    for (uint32_t number = 0; number < EACH; number++) {
        note message = {who, number};
        OK(pelton_send(sender, &message, sizeof message, SOON));
    }
    if (who % 2) {
        OK(pelton_drain(sender, SOON));
        pause();
    }
    OK(pelton_close(sender));
}

static void send_as_0(const char *name) { send_some(name, 0); }
static void send_as_1(const char *name) { send_some(name, 1); }
static void send_as_2(const char *name) { send_some(name, 2); }

static void processes_come_and_go_and_each_end_is_told(void) {
    void (*const run[])(const char *) = {send_as_0, send_as_1, send_as_2};
    char name[128];
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_receiver *receiver;
    pelton_message message;
    pelton_info info;
    pid_t children[3];
    uint32_t next[3] = {0}, lane_of[3] = {0};
    int joined = 0, left = 0, died = 0, killed = 0;
    options.announce = 1;
    OK(pelton_gather(place(name, "unix:%s/socket"), &options, &receiver));
    for (int i = 0; i < 3; i++) children[i] = start(run[i], name);
    while (left + died < 3) {
        OK(pelton_receive(receiver, SOON, &message));
        info.struct_bytes = sizeof info;
        OK(pelton_get_info(receiver, &info));
        CHECK(info.has_peer && message.lane > 0);
        switch (message.flags & PELTON_TELLS) {
        case 0: {
            note found;
            CHECK(message.size == sizeof found && message.seq != 0);
            memcpy(&found, message.data, sizeof found);
            CHECK(found.who < 3 && found.number == next[found.who] && info.peer_pid == (uint32_t)children[found.who]);
            CHECK(lane_of[found.who] == 0 || lane_of[found.who] == message.lane);
            lane_of[found.who] = message.lane;
            next[found.who]++;
            break;
        }
        case PELTON_JOINED: joined++; break;
        case PELTON_LEFT: left++; break;
        case PELTON_DIED:
            CHECK(message.lane == lane_of[1] && next[1] == EACH);
            died++;
            break;
        default: CHECK(!"told what cannot be");
        }
        CHECK(!(message.flags & PELTON_TELLS) || (message.size == 0 && message.seq == 0 && message.data));
        OK(pelton_release(receiver));
        if (next[1] == EACH && !killed) {
            kill_now(children[1]);
            killed = 1;
        }
    }
    CHECK(joined == 3 && left == 2 && died == 1 && next[0] == EACH && next[2] == EACH);
    finish(children[0]);
    finish(children[2]);
    OK(pelton_close(receiver));
}

static void a_batch_is_no_longer_than_a_turn(void) {
    enum { TURN = 64, TURNS = 3 };
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_receiver *receiver;
    pelton_senders *senders;
    pelton_sender *both[2];
    static pelton_message messages[2 * TURNS * TURN];
    size_t count;
    options.capacity = 64 << 10;
    OK(pelton_gather(NULL, &options, &receiver));
    OK(pelton_receiver_senders(receiver, &senders));
    for (int i = 0; i < 2; i++) {
        OK(pelton_senders_open(senders, &both[i]));
        for (int n = 0; n < TURNS * TURN; n++) OK(pelton_send(both[i], "x", 1, PELTON_NO_WAIT));
    }
    uint32_t last = 0;
    for (size_t received = 0; received < 2 * TURNS * TURN; received += count) {
        OK(pelton_receive_batch(receiver, SOON, messages, sizeof messages / sizeof *messages, &count));
        CHECK(count <= TURN && messages[0].lane == messages[count - 1].lane && messages[0].lane != last);
        last = messages[0].lane;
        OK(pelton_release(receiver));
    }
    ANSWERS(pelton_receive_batch(receiver, PELTON_NO_WAIT, messages, 1, &count), PELTON_AGAIN);
    for (int i = 0; i < 2; i++) OK(pelton_close(both[i]));
    OK(pelton_close(senders));
    OK(pelton_close(receiver));
}

static void mistakes_get_codes(void) {
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_receiver *receiver, *of_one;
    pelton_sender *sender, *second;
    pelton_senders *senders;
    pelton_message messages[4];
    size_t count;
    ANSWERS(pelton_gather(NULL, NULL, NULL), PELTON_NULL);
    REFUSES(pelton_gather("a/b", NULL, &receiver), PELTON_NAME, "a/b");
    options.announce = 2;
    REFUSES(pelton_gather(NULL, &options, &receiver), PELTON_OPTION, "announce is 2");
    options.announce = 1;
    options.lanes = 1;
    options.capacity = 64 << 10;
    OK(pelton_gather(NULL, &options, &receiver));
    OK(pelton_receiver_senders(receiver, &senders));
    ANSWERS(pelton_senders_open(NULL, &sender), PELTON_NULL);
    ANSWERS(pelton_senders_open(senders, NULL), PELTON_NULL);
    ANSWERS(pelton_senders_open((pelton_senders *)(void *)receiver, &sender), PELTON_CLOSED_HANDLE);
    ANSWERS(pelton_senders_send(senders, NULL, 3, PELTON_NO_WAIT), PELTON_NULL);
    OK(pelton_senders_open(senders, &sender));
    REFUSES(pelton_senders_open(senders, &second), PELTON_REFUSED, "raise lanes");
    REFUSES(pelton_resume(receiver, PELTON_NO_WAIT), PELTON_REFUSED, "by itself");
    /* What is told is received like a message, alone in its batch, and may be held. */
    OK(pelton_send(sender, "x", 1, PELTON_NO_WAIT));
    OK(pelton_receive_batch(receiver, SOON, messages, 4, &count));
    CHECK(count == 1 && (messages[0].flags & PELTON_TELLS) == PELTON_JOINED);
    pelton_held *held;
    OK(pelton_hold(receiver, &held));
    OK(pelton_close(held));
    OK(pelton_receive_batch(receiver, SOON, messages, 4, &count));
    CHECK(count == 1 && messages[0].size == 1);
    OK(pelton_release(receiver));
    OK(pelton_close(receiver));
    ANSWERS(pelton_send(sender, "x", 1, PELTON_NO_WAIT), PELTON_OK);
    OK(pelton_close(sender));
    ANSWERS(pelton_senders_open(senders, &sender), PELTON_CLOSED);
    ANSWERS(pelton_senders_send(senders, "x", 1, SOON), PELTON_CLOSED);
    OK(pelton_close(senders));
    ANSWERS(pelton_senders_send(senders, "x", 1, SOON), PELTON_CLOSED_HANDLE);
    OK(pelton_close(NULL));
    OK(pelton_threads(NULL, &sender, &of_one));
    REFUSES(pelton_receiver_senders(of_one, &senders), PELTON_REFUSED, "gather");
    OK(pelton_close(sender));
    OK(pelton_close(of_one));
}

int main(void) {
    static const test tests[] = {
        TEST(each_threads_messages_come_in_order),
        TEST(processes_come_and_go_and_each_end_is_told),
        TEST(a_batch_is_no_longer_than_a_turn),
        TEST(mistakes_get_codes),
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
