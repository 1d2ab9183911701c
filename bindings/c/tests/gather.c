/* Many senders, one receiver: threads by a shared handle and by senders of their own, processes that come, close and
 * die. */
#include "check.h"

#include <sys/socket.h>
#include <sys/un.h>

enum { EACH = 5000 };

/* A message has its author and its number. */
typedef struct note {
    uint32_t author;
    uint32_t number;
} note;

/* The last line of the log, and how many there were. */
typedef struct logged {
    int lines;
    int priority;
    char text[256];
} logged;

static void keeps_the_line(void *context, int priority, const char *text) {
    logged *log = (logged *)context;
    log->lines++;
    log->priority = priority;
    snprintf(log->text, sizeof log->text, "%s", text);
}

/* Connects to a socket, and sends what is no packet. */
static int sends_nonsense(const char *path) {
    struct sockaddr_un address;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    memset(&address, 0, sizeof address);
    address.sun_family = AF_UNIX;
    CHECK(strlen(path) < sizeof address.sun_path);
    strcpy(address.sun_path, path);
    CHECK(fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) == 0);
    CHECK(send(fd, "bad", 3, MSG_NOSIGNAL) == 3);
    return fd;
}

static void a_refused_peer_is_logged(void) {
    pelton_receiver *receiver;
    pelton_message message;
    logged log = {0, 0, ""};
    char name[128], wanted[200];
    int fd;
    OK(pelton_receiver_gather(place(name, "unix:%s/refusing"), NULL, &receiver));
    pelton_set_log(keeps_the_line, &log);
    fd = sends_nonsense(name + strlen("unix:"));
    while (log.lines == 0)
        RETURNS(pelton_receiver_receive(receiver, pelton_deadline(SECONDS / 100), &message), PELTON_AGAIN);
    snprintf(wanted, sizeof wanted, "refused the peer, process %d of uid %d: a packet of 3 bytes came, wanted at least 80",
             (int)getpid(), (int)geteuid());
    CHECK(log.lines == 1 && log.priority == 4 && strcmp(log.text, wanted) == 0);
    close(fd);
    pelton_set_log(NULL, NULL);
    fd = sends_nonsense(name + strlen("unix:"));
    /* The refusal is there, and no line. */
    struct pollfd refused = {fd, POLLIN, 0};
    while (poll(&refused, 1, 0) == 0)
        RETURNS(pelton_receiver_receive(receiver, pelton_deadline(SECONDS / 100), &message), PELTON_AGAIN);
    CHECK(log.lines == 1);
    close(fd);
    OK(pelton_close(receiver));
}

typedef struct thread {
    pelton_senders *senders;
    uint32_t author;
} thread;

static void *sends_by_the_shared_handle(void *given) {
    thread *self = (thread *)given;
    for (uint32_t number = 0; number < EACH; number++) {
        note message = {self->author, number};
        OK(pelton_senders_send(self->senders, &message, sizeof message, SOON));
    }
    return NULL;
}

static void *sends_by_its_own(void *given) {
    thread *self = (thread *)given;
    pelton_sender *sender;
    OK(pelton_senders_sender(self->senders, &sender));
    for (uint32_t number = 0; number < EACH; number++) {
        note message = {self->author, number};
        OK(pelton_sender_send(sender, &message, sizeof message, SOON));
    }
    OK(pelton_close(sender));
    return NULL;
}

static void each_threads_messages_come_in_order(void) {
    enum { THREADS = 4 };
    pelton_gather_options options = PELTON_GATHER_OPTIONS_INIT;
    pelton_receiver *receiver;
    pelton_senders *senders;
    pthread_t threads[THREADS];
    thread given[THREADS];
    uint32_t next[THREADS] = {0};
    size_t size;
    int answer;
    note found;
    options.capacity = 64 << 10;
    options.membership_events = 1;
    OK(pelton_receiver_gather(NULL, &options, &receiver));
    OK(pelton_receiver_senders(receiver, &senders));
    for (uint32_t i = 0; i < THREADS; i++) {
        given[i].senders = senders;
        given[i].author = i;
        CHECK(pthread_create(&threads[i], NULL, i % 2 ? sends_by_its_own : sends_by_the_shared_handle, &given[i]) == 0);
    }
    for (uint32_t count = 0; count < THREADS * EACH; count++) {
        /* Copying skips membership events. */
        OK(pelton_receiver_receive_copy(receiver, &found, sizeof found, SOON, &size));
        CHECK(size == sizeof found && found.author < THREADS && found.number == next[found.author]);
        next[found.author]++;
    }
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    RETURNS(pelton_receiver_receive_copy(receiver, &found, sizeof found, PELTON_NO_WAIT, &size), PELTON_AGAIN);
    OK(pelton_close(senders));
    while ((answer = pelton_receiver_receive_copy(receiver, &found, sizeof found, SOON, &size)) == PELTON_AGAIN) {
    }
    RETURNS(answer, PELTON_CLOSED);
    OK(pelton_close(receiver));
}

/* Sends some messages; one whose number is odd waits to be killed. */
static void send_some(const char *name, uint32_t author) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_sender *sender;
    options.deadline_ns = SOON;
    options.capacity = 64 << 10;
    OK(pelton_sender_open(name, &options, &sender));
    for (uint32_t number = 0; number < EACH; number++) {
        note message = {author, number};
        OK(pelton_sender_send(sender, &message, sizeof message, SOON));
    }
    if (author % 2) {
        OK(pelton_sender_wait_released(sender, SOON));
        pause();
    }
    OK(pelton_close(sender));
}

static void send_as_0(const char *name) { send_some(name, 0); }
static void send_as_1(const char *name) { send_some(name, 1); }
static void send_as_2(const char *name) { send_some(name, 2); }

static void processes_join_and_leave_and_each_is_an_event(void) {
    void (*const run[])(const char *) = {send_as_0, send_as_1, send_as_2};
    char name[128];
    pelton_gather_options options = PELTON_GATHER_OPTIONS_INIT;
    pelton_receiver *receiver;
    pelton_event event;
    pelton_receiver_info info;
    pid_t children[3];
    uint32_t next[3] = {0}, lane_of[3] = {0};
    int joined = 0, left = 0, died = 0, killed = 0;
    options.membership_events = 1;
    OK(pelton_receiver_gather(place(name, "unix:%s/socket"), &options, &receiver));
    for (int i = 0; i < 3; i++) children[i] = start(run[i], name);
    while (left + died < 3) {
        OK(pelton_receiver_receive_event(receiver, SOON, &event));
        CHECK(event.lane > 0 && event.peer_uid == getuid());
        switch (event.kind) {
        case PELTON_MESSAGE: {
            note found;
            CHECK(event.message.size == sizeof found && event.message.seq != 0 && event.message.lane == event.lane);
            memcpy(&found, event.message.data, sizeof found);
            CHECK(found.author < 3 && found.number == next[found.author] && event.peer_pid == (uint32_t)children[found.author]);
            info.struct_bytes = sizeof info;
            OK(pelton_receiver_get_info(receiver, &info));
            CHECK(info.has_peer && info.peer_pid == event.peer_pid);
            CHECK(lane_of[found.author] == 0 || lane_of[found.author] == event.lane);
            lane_of[found.author] = event.lane;
            next[found.author]++;
            /* Only a message is released. */
            OK(pelton_receiver_release(receiver));
            break;
        }
        case PELTON_JOINED: joined++; break;
        case PELTON_LEFT: left++; break;
        case PELTON_DIED:
            CHECK(event.lane == lane_of[1] && next[1] == EACH && event.peer_pid == (uint32_t)children[1]);
            died++;
            break;
        default: CHECK(!"no other event is possible");
        }
        if (event.kind != PELTON_MESSAGE) RETURNS(pelton_receiver_release(receiver), PELTON_NOT_RECEIVED);
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

static void a_batch_is_no_longer_than_a_quantum(void) {
    enum { TURN = 64, TURNS = 3 };
    pelton_gather_options options = PELTON_GATHER_OPTIONS_INIT;
    pelton_receiver *receiver;
    pelton_senders *senders;
    pelton_sender *both[2];
    static pelton_message messages[2 * TURNS * TURN];
    size_t count;
    options.capacity = 64 << 10;
    OK(pelton_receiver_gather(NULL, &options, &receiver));
    OK(pelton_receiver_senders(receiver, &senders));
    for (int i = 0; i < 2; i++) {
        OK(pelton_senders_sender(senders, &both[i]));
        for (int n = 0; n < TURNS * TURN; n++) OK(pelton_sender_send(both[i], "x", 1, PELTON_NO_WAIT));
    }
    uint32_t last = 0;
    for (size_t received = 0; received < 2 * TURNS * TURN; received += count) {
        OK(pelton_receiver_receive_batch(receiver, SOON, messages, sizeof messages / sizeof *messages, &count));
        CHECK(count <= TURN && messages[0].lane == messages[count - 1].lane && messages[0].lane != last);
        last = messages[0].lane;
        OK(pelton_receiver_release(receiver));
    }
    RETURNS(pelton_receiver_receive_batch(receiver, PELTON_NO_WAIT, messages, 1, &count), PELTON_AGAIN);
    for (int i = 0; i < 2; i++) OK(pelton_close(both[i]));
    OK(pelton_close(senders));
    OK(pelton_close(receiver));
}

static void mistakes_get_codes(void) {
    pelton_gather_options options = PELTON_GATHER_OPTIONS_INIT;
    pelton_receiver *receiver, *of_one;
    pelton_sender *sender, *second;
    pelton_senders *senders;
    pelton_message messages[4];
    pelton_event event;
    size_t count;
    RETURNS(pelton_receiver_gather(NULL, NULL, NULL), PELTON_NULL);
    FAILS(pelton_receiver_gather("a/b", NULL, &receiver), PELTON_NAME, "a/b");
    options.membership_events = 2;
    FAILS(pelton_receiver_gather(NULL, &options, &receiver), PELTON_OPTION, "membership_events is 2");
    options.membership_events = 1;
    options.senders_max = 1;
    options.capacity = 64 << 10;
    OK(pelton_receiver_gather(NULL, &options, &receiver));
    OK(pelton_receiver_senders(receiver, &senders));
    RETURNS(pelton_senders_sender(NULL, &sender), PELTON_NULL);
    RETURNS(pelton_senders_sender(senders, NULL), PELTON_NULL);
    RETURNS(pelton_senders_sender((pelton_senders *)(void *)receiver, &sender), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_senders_send(senders, NULL, 3, PELTON_NO_WAIT), PELTON_NULL);
    OK(pelton_senders_sender(senders, &sender));
    FAILS(pelton_senders_sender(senders, &second), PELTON_REFUSED, "raise lanes");
    FAILS(pelton_receiver_resume(receiver, PELTON_NO_WAIT), PELTON_REFUSED, "by itself");
    RETURNS(pelton_receiver_receive_event(NULL, SOON, &event), PELTON_NULL);
    RETURNS(pelton_receiver_receive_event(receiver, SOON, NULL), PELTON_NULL);
    RETURNS(pelton_receiver_receive_event((pelton_receiver *)(void *)sender, SOON, &event), PELTON_CLOSED_HANDLE);
    /* An event is nothing that can be held, or released. */
    OK(pelton_sender_send(sender, "x", 1, PELTON_NO_WAIT));
    OK(pelton_receiver_receive_event(receiver, SOON, &event));
    CHECK(event.kind == PELTON_JOINED && event.peer_pid == (uint32_t)getpid());
    pelton_held *held;
    RETURNS(pelton_receiver_hold(receiver, &held), PELTON_NOT_RECEIVED);
    OK(pelton_receiver_receive_event(receiver, SOON, &event));
    CHECK(event.kind == PELTON_MESSAGE && event.message.size == 1);
    RETURNS(pelton_receiver_receive_event(receiver, PELTON_NO_WAIT, &event), PELTON_NOT_RELEASED);
    OK(pelton_receiver_release(receiver));
    RETURNS(pelton_receiver_receive_event(receiver, PELTON_NO_WAIT, &event), PELTON_AGAIN);
    /* A batch skips events. */
    OK(pelton_sender_send(sender, "y", 1, PELTON_NO_WAIT));
    OK(pelton_receiver_receive_batch(receiver, SOON, messages, 4, &count));
    CHECK(count == 1 && messages[0].size == 1);
    OK(pelton_receiver_release(receiver));
    OK(pelton_close(receiver));
    RETURNS(pelton_sender_send(sender, "x", 1, PELTON_NO_WAIT), PELTON_OK);
    OK(pelton_close(sender));
    RETURNS(pelton_senders_sender(senders, &sender), PELTON_CLOSED);
    RETURNS(pelton_senders_send(senders, "x", 1, SOON), PELTON_CLOSED);
    OK(pelton_close(senders));
    RETURNS(pelton_senders_send(senders, "x", 1, SOON), PELTON_CLOSED_HANDLE);
    OK(pelton_close(NULL));
    OK(pelton_threads(NULL, &sender, &of_one));
    FAILS(pelton_receiver_senders(of_one, &senders), PELTON_REFUSED, "gather");
    OK(pelton_close(sender));
    OK(pelton_close(of_one));
}

int main(void) {
    static const test tests[] = {
        TEST(each_threads_messages_come_in_order),
        TEST(processes_join_and_leave_and_each_is_an_event),
        TEST(a_batch_is_no_longer_than_a_quantum),
        TEST(a_refused_peer_is_logged),
        TEST(mistakes_get_codes),
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
