/* Opening without waiting: start, poll the descriptor, finish; with a listener, without one, with one that never
 * answers, and closed in the middle. */
#include "calls.h"

#include <sys/socket.h>
#include <sys/un.h>

/* How to open each kind of endpoint, with its functions as of any pointer. */
typedef struct way {
    int (*start)(const char *name, int64_t deadline_ns, void **out);
    int (*fd)(void *opening);
    int (*finish)(void *opening, void **out);
} way;

#define WAY(kind, options_kind, INIT)                                                                                  \
    static int start_##kind(const char *name, int64_t deadline_ns, void **out) {                                       \
        pelton_##options_kind##_options options = INIT;                                                                \
        options.deadline_ns = deadline_ns;                                                                             \
        return pelton_##kind##_open_start(name, &options, (pelton_##kind##_opening **)out);                            \
    }                                                                                                                  \
    static int fd_of_##kind(void *opening) { return pelton_##kind##_opening_fd((pelton_##kind##_opening *)opening); }  \
    static int finish_##kind(void *opening, void **out) {                                                              \
        return pelton_##kind##_opening_finish((pelton_##kind##_opening *)opening, (pelton_##kind **)out);              \
    }

WAY(sender, channel, PELTON_CHANNEL_OPTIONS_INIT)
WAY(receiver, channel, PELTON_CHANNEL_OPTIONS_INIT)
WAY(client, client, PELTON_CLIENT_OPTIONS_INIT)

enum { SENDER, RECEIVER, CLIENT, WAYS };
static const way ways[WAYS] = {
    {start_sender, fd_of_sender, finish_sender},
    {start_receiver, fd_of_receiver, finish_receiver},
    {start_client, fd_of_client, finish_client},
};

static void await_readable(int fd) {
    struct pollfd readable = {fd, POLLIN, 0};
    CHECK(poll(&readable, 1, 60000) == 1);
}

/* Finishes an opening by its descriptor alone; returns the code, and closes it. */
static int finished(const way *of, void *opening, void **out) {
    int code;
    do {
        await_readable(of->fd(opening));
        code = of->finish(opening, out);
    } while (code == PELTON_AGAIN);
    OK(pelton_close(opening));
    return code;
}

static int descriptors(void) {
    DIR *open = opendir("/proc/self/fd");
    int count = 0;
    CHECK(open);
    while (readdir(open)) count++;
    closedir(open);
    return count;
}

static pelton_listener *listener;

static void *accept_a_receiver(void *out) {
    OK(pelton_listener_accept_receiver(listener, SOON, (pelton_receiver **)out));
    return NULL;
}

static void *accept_a_sender(void *out) {
    OK(pelton_listener_accept_sender(listener, SOON, (pelton_sender **)out));
    return NULL;
}

static void a_sender_and_a_receiver_open_while_another_thread_accepts(void) {
    for (int way = SENDER; way <= RECEIVER; way++) {
        char name[128], text[8];
        void *opening, *opened, *accepted;
        pthread_t thread;
        size_t size;
        OK(pelton_listener_open(place(name, "unix:%s/socket"), NULL, &listener));
        OK(ways[way].start(name, SOON, &opening));
        CHECK(pthread_create(&thread, NULL, way == SENDER ? accept_a_receiver : accept_a_sender, &accepted) == 0);
        OK(finished(&ways[way], opening, &opened));
        CHECK(pthread_join(thread, NULL) == 0);
        pelton_sender *sender = (pelton_sender *)(way == SENDER ? opened : accepted);
        pelton_receiver *receiver = (pelton_receiver *)(way == SENDER ? accepted : opened);
        OK(pelton_sender_send(sender, "hello", 5, PELTON_NO_WAIT));
        OK(pelton_receiver_receive_copy(receiver, text, sizeof text, SOON, &size));
        CHECK(size == 5 && memcmp(text, "hello", 5) == 0);
        OK(pelton_close(sender));
        OK(pelton_close(receiver));
        OK(pelton_close(listener));
    }
}

/* One thread, one poll: neither side may wait for the other. */
static void both_sides_open_in_one_loop(void) {
    char name[128], text[8];
    void *opening, *opened;
    pelton_receiver *receiver;
    pelton_message message;
    size_t size;
    int code = PELTON_AGAIN;
    OK(pelton_receiver_gather(place(name, "unix:%s/socket"), NULL, &receiver));
    OK(start_sender(name, SOON, &opening));
    while (code == PELTON_AGAIN) {
        struct pollfd both[] = {{fd_of_sender(opening), POLLIN, 0}, {pelton_receiver_fd(receiver), POLLIN, 0}};
        RETURNS(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message), PELTON_AGAIN);
        int armed = pelton_receiver_arm(receiver);
        if (armed == PELTON_OK) CHECK(poll(both, 2, 60000) >= 1);
        else RETURNS(armed, PELTON_READY);
        code = finish_sender(opening, &opened);
    }
    OK(code);
    OK(pelton_close(opening));
    OK(pelton_receiver_disarm(receiver));
    OK(pelton_sender_send((pelton_sender *)opened, "hello", 5, PELTON_NO_WAIT));
    OK(pelton_receiver_receive_copy(receiver, text, sizeof text, SOON, &size));
    CHECK(size == 5);
    OK(pelton_close(opened));
    OK(pelton_close(receiver));

    pelton_request request;
    OK(pelton_service_open(name, NULL, &service));
    OK(start_client(name, SOON, &opening));
    for (code = PELTON_AGAIN; code == PELTON_AGAIN;) {
        struct pollfd both[] = {{fd_of_client(opening), POLLIN, 0}, {pelton_service_fd(service), POLLIN, 0}};
        RETURNS(pelton_service_receive(service, PELTON_NO_WAIT, &request), PELTON_AGAIN);
        int armed = pelton_service_arm(service);
        if (armed == PELTON_OK) CHECK(poll(both, 2, 60000) >= 1);
        else RETURNS(armed, PELTON_READY);
        code = finish_client(opening, &opened);
    }
    OK(code);
    client = (pelton_client *)opened;
    OK(pelton_close(opening));
    OK(pelton_service_disarm(service));
    uint64_t call = submitted("x", 1);
    OK(pelton_responder_reply(taken(), "y", 1));
    COMPLETES(call, PELTON_REPLY, 0, "y");
    end();
}

static void without_a_listener_it_fails_or_waits_for_one_until_the_deadline(void) {
    char name[128];
    place(name, "unix:%s/socket");
    for (int way = 0; way < WAYS; way++) {
        void *opening, *opened = NULL;
        int before = descriptors();
        int code = ways[way].start(name, PELTON_NO_WAIT, &opening);
        if (code == PELTON_OK) code = finished(&ways[way], opening, &opened);
        RETURNS(code, PELTON_NO_LISTENER);
        int64_t began = pelton_deadline(0);
        OK(ways[way].start(name, pelton_deadline(20000000), &opening));
        FAILS(finished(&ways[way], opening, &opened), PELTON_TIMED_OUT, name + strlen("unix:"));
        CHECK(pelton_deadline(0) - began >= 20000000 && !opened && descriptors() == before);
    }
    /* One that comes later. */
    void *opening, *opened, *accepted;
    pthread_t thread;
    OK(start_sender(name, SOON, &opening));
    RETURNS(finish_sender(opening, &opened), PELTON_AGAIN);
    OK(pelton_listener_open(name, NULL, &listener));
    CHECK(pthread_create(&thread, NULL, accept_a_receiver, &accepted) == 0);
    OK(finished(&ways[SENDER], opening, &opened));
    CHECK(pthread_join(thread, NULL) == 0);
    OK(pelton_close(opened));
    OK(pelton_close(accepted));
    OK(pelton_close(listener));
}

/* A socket at "%s/silent" that listens. */
static int silent_listener(void) {
    char path[128];
    struct sockaddr_un address;
    memset(&address, 0, sizeof address);
    address.sun_family = AF_UNIX;
    CHECK(strlen(place(path, "%s/silent")) < sizeof address.sun_path);
    strcpy(address.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof address) == 0 && listen(fd, 8) == 0);
    return fd;
}

static void a_listener_that_never_answers_delays_nothing_but_its_own_opening(void) {
    char name[128];
    int socket = silent_listener(), before = descriptors();
    place(name, "unix:%s/silent");
    for (int way = 0; way < WAYS; way++) {
        for (int accepts = 0; accepts < 2; accepts++) {
            void *opening, *opened = NULL;
            int64_t began = pelton_deadline(0);
            OK(ways[way].start(name, pelton_deadline((int64_t)100 * SECONDS), &opening));
            /* No call waits; the long deadline would show it. */
            RETURNS(ways[way].finish(opening, &opened), PELTON_AGAIN);
            int accepted = accepts ? accept(socket, NULL, NULL) : -1;
            for (int i = 0; i < 100; i++) RETURNS(ways[way].finish(opening, &opened), PELTON_AGAIN);
            CHECK(pelton_deadline(0) - began < (int64_t)50 * SECONDS);
            /* Closed in the middle: nothing is left. */
            OK(pelton_close(opening));
            if (accepts) CHECK(close(accepted) == 0);
            OK(ways[way].start(name, pelton_deadline(20000000), &opening));
            RETURNS(finished(&ways[way], opening, &opened), PELTON_TIMED_OUT);
            CHECK(!opened && descriptors() == before);
            /* Those that hung up still wait to be accepted. */
            struct pollfd hung_up = {socket, POLLIN, 0};
            while (poll(&hung_up, 1, 0) == 1) CHECK(close(accept(socket, NULL, NULL)) == 0);
        }
    }
    CHECK(close(socket) == 0);
    CHECK(unlink(place(name, "%s/silent")) == 0);
}

static void an_opening_that_is_closed_in_the_middle_leaves_the_listener_as_it_was(void) {
    char name[128];
    void *opening, *opened, *accepted;
    pthread_t thread;
    OK(pelton_listener_open(place(name, "unix:%s/socket"), NULL, &listener));
    for (int i = 0; i < 3; i++) {
        OK(start_sender(name, SOON, &opening));
        RETURNS(finish_sender(opening, &opened), PELTON_AGAIN);
        OK(pelton_close(opening));
    }
    OK(start_sender(name, SOON, &opening));
    CHECK(pthread_create(&thread, NULL, accept_a_receiver, &accepted) == 0);
    OK(finished(&ways[SENDER], opening, &opened));
    CHECK(pthread_join(thread, NULL) == 0);
    OK(pelton_close(opened));
    OK(pelton_close(accepted));
    OK(pelton_close(listener));
}

static void a_path_is_opened_and_its_peer_is_waited_for(void) {
    char name[128], command[160];
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_sender_opening *of_sender;
    pelton_receiver_opening *of_receiver;
    void *sender, *receiver, *none;
    place(name, "path:%s/channel");
    OK(start_receiver(name, pelton_deadline(20000000), &none));
    FAILS(finished(&ways[RECEIVER], none, &receiver), PELTON_NO_CHANNEL, "/channel");
    OK(start_receiver(name, PELTON_NO_WAIT, &none));
    RETURNS(finished(&ways[RECEIVER], none, &receiver), PELTON_NO_CHANNEL);
    options.create = 1;
    options.deadline_ns = SOON;
    OK(pelton_receiver_open_start(name, &options, &of_receiver));
    /* With a deadline it waits for a sender, too. */
    RETURNS(finish_receiver(of_receiver, &receiver), PELTON_AGAIN);
    options.deadline_ns = PELTON_NO_WAIT;
    OK(pelton_sender_open_start(name, &options, &of_sender));
    OK(finished(&ways[SENDER], of_sender, &sender));
    OK(finished(&ways[RECEIVER], of_receiver, &receiver));
    OK(start_receiver(name, PELTON_NO_WAIT, &none));
    RETURNS(finished(&ways[RECEIVER], none, &none), PELTON_ROLE_TAKEN);
    OK(pelton_close(sender));
    OK(pelton_close(receiver));
    CHECK(snprintf(command, sizeof command, "rm -r '%s'", name + strlen("path:")) > 0 && system(command) == 0);
}

static void names_and_options_are_checked(void) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_sender_opening *of_sender;
    for (int way = 0; way < WAYS; way++) {
        void *opening;
        FAILS(ways[way].start("no good", SOON, &opening), PELTON_NAME, "short name");
    }
    options.wait = 2;
    FAILS(pelton_sender_open_start("events", &options, &of_sender), PELTON_OPTION, "wait is 2");
    options.wait = 0;
    options.lanes = 2;
    FAILS(pelton_sender_open_start("events", &options, &of_sender), PELTON_OPTION, "lanes is set");
    FAILS(pelton_sender_open_start(NULL, NULL, &of_sender), PELTON_NULL, "name is NULL");
    FAILS(pelton_sender_open_start("events", NULL, NULL), PELTON_NULL, "out is NULL");
}

int main(void) {
    static const test tests[] = {
        TEST(a_sender_and_a_receiver_open_while_another_thread_accepts),
        TEST(both_sides_open_in_one_loop),
        TEST(without_a_listener_it_fails_or_waits_for_one_until_the_deadline),
        TEST(a_listener_that_never_answers_delays_nothing_but_its_own_opening),
        TEST(an_opening_that_is_closed_in_the_middle_leaves_the_listener_as_it_was),
        TEST(a_path_is_opened_and_its_peer_is_waited_for),
        TEST(names_and_options_are_checked),
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
