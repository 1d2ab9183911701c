/* Flushing and appending: what the C interface adds to it: sinks that are functions, their numbers, files, handles and their mistakes. */
#include "check.h"

/* A message says whose it is, and which one. */
typedef struct note {
    uint32_t who;
    uint32_t number;
} note;

enum { WHO_MAX = 16 };

/* What has come to a sink. */
typedef struct seen {
    uint32_t next[WHO_MAX]; /* each one's next number */
    uint32_t messages;
    uint32_t calls;
    uint32_t first_seq; /* of the first run */
    uint64_t lane_id[2];
    uint32_t pid;
    uint32_t uid;
    int refuses; /* what it answers instead of taking anything, below 0 */
    uint32_t refused;
} seen;

/* Checks every record, each sender's order, and what the run says of them. */
static int take(void *context, const pelton_run *runs, size_t count) {
    seen *all = (seen *)context;
    CHECK(count > 0);
    if (all->refuses < 0) {
        all->refused++;
        return all->refuses;
    }
    if (all->calls++ == 0) {
        all->first_seq = runs->first_seq;
        memcpy(all->lane_id, runs->lane_id, sizeof all->lane_id);
        all->pid = runs->pid;
        all->uid = runs->uid;
    }
    for (size_t i = 0; i < count; i++) {
        const pelton_run *run = &runs[i];
        size_t at = 0, found = 0;
        pelton_record record;
        note message;
        CHECK((uintptr_t)run->bytes % 8 == 0 && run->messages > 0);
        while (pelton_run_next(run, &at, &record)) {
            CHECK((uintptr_t)record.data % 8 == 0 && record.size >= sizeof message);
            memcpy(&message, record.data, sizeof message);
            CHECK(message.who < WHO_MAX && message.number == all->next[message.who]);
            for (size_t byte = sizeof message; byte < record.size; byte++) {
                CHECK(((const unsigned char *)record.data)[byte] == (unsigned char)message.number);
            }
            CHECK(record.seq == run->first_seq + found && record.pid == run->pid && record.uid == run->uid);
            CHECK(memcmp(record.lane_id, run->lane_id, sizeof record.lane_id) == 0);
            all->next[message.who]++;
            found++;
        }
        CHECK(found == run->messages && at == run->size);
        all->messages += run->messages;
    }
    return 7;
}

static pelton_sink sink_of(seen *all) {
    pelton_sink sink = PELTON_SINK_INIT;
    memset(all, 0, sizeof *all);
    sink.write = take;
    sink.context = all;
    return sink;
}

/* A message of so many bytes, at least as many as a note has. */
static const void *numbered(unsigned char *room, uint32_t who, uint32_t number, size_t size) {
    note message = {who, number};
    memset(room, (int)(number & 0xff), size);
    memcpy(room, &message, sizeof message);
    return room;
}

static pelton_receiver *small_channel(pelton_sender **sender) {
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_receiver *receiver;
    options.capacity = 64 << 10;
    OK(pelton_threads(&options, sender, &receiver));
    return receiver;
}

/* ---- Flushing ---------------------------------------------------------------------------------------------------------- */

enum { SENT = 20000 };

static void *sends(void *given) {
    pelton_sender *sender = (pelton_sender *)given;
    unsigned char room[300];
    for (uint32_t number = 0; number < SENT; number++) {
        size_t size = 8 + number % 290;
        OK(pelton_send(sender, numbered(room, 1, number, size), size, SOON));
    }
    OK(pelton_close(sender));
    return NULL;
}

static void everything_sent_comes_to_the_sink_up_to_the_end(void) {
    static const int64_t intervals[] = {0, 1000000, PELTON_FOREVER};
    for (size_t i = 0; i < sizeof intervals / sizeof *intervals; i++) {
        pelton_options options = PELTON_OPTIONS_INIT;
        pelton_sender *sender;
        pelton_receiver *receiver = small_channel(&sender);
        pelton_flush *flush;
        pthread_t thread;
        seen all;
        pelton_sink sink = sink_of(&all);
        options.flush_interval_ns = intervals[i];
        OK(pelton_flush_open(receiver, &options, &sink, &flush));
        /* It is the flush's now. */
        REFUSES(pelton_close(receiver), PELTON_CLOSED_HANDLE, "receiver is closed");
        CHECK(pthread_create(&thread, NULL, sends, sender) == 0);
        OK(pelton_flush_run(flush, PELTON_FOREVER));
        CHECK(pthread_join(thread, NULL) == 0);
        CHECK(all.next[1] == SENT && all.messages == SENT && all.first_seq == 1);
        CHECK(all.pid == (uint32_t)getpid() && all.uid == getuid());
        OK(pelton_close(flush));
    }
}

static void a_sink_that_answers_a_number_below_0_has_taken_nothing(void) {
    pelton_sender *sender;
    pelton_receiver *receiver = small_channel(&sender);
    pelton_flush *flush;
    pelton_info info;
    note message = {0, 0};
    seen all;
    pelton_sink sink = sink_of(&all);
    all.refuses = -ENOSPC;
    OK(pelton_flush_open(receiver, NULL, &sink, &flush));
    for (; message.number < 3; message.number++) OK(pelton_send(sender, &message, sizeof message, PELTON_NO_WAIT));
    errno = 0;
    REFUSES(pelton_flush_now(flush), PELTON_SINK, "answered -28");
    CHECK(errno == ENOSPC && all.refused == 1 && all.calls == 0);
    info.struct_bytes = sizeof info;
    OK(pelton_get_info(sender, &info));
    CHECK(info.unreleased == 3);
    all.refuses = INT32_MIN;
    REFUSES(pelton_sync(flush), PELTON_SINK, "took nothing");
    CHECK(errno == INT32_MAX);
    /* Just the same comes again, and then what has come since. */
    all.refuses = 0;
    OK(pelton_send(sender, &message, sizeof message, PELTON_NO_WAIT));
    OK(pelton_flush_now(flush));
    CHECK(all.calls == 2 && all.messages == 4 && all.refused == 2);
    OK(pelton_get_info(sender, &info));
    CHECK(info.unreleased == 0);
    OK(pelton_flush_now(flush));
    CHECK(all.calls == 2);
    OK(pelton_close(sender));
    ANSWERS(pelton_flush_now(flush), PELTON_CLOSED);
    ANSWERS(pelton_sync(flush), PELTON_CLOSED);
    OK(pelton_close(flush));
}

static void a_deadline_ends_a_flush_and_it_goes_on(void) {
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_sender *sender;
    pelton_receiver *receiver = small_channel(&sender);
    pelton_flush *flush;
    note message = {0, 0};
    seen all;
    pelton_sink sink = sink_of(&all);
    /* Not by time, as far as this test goes. */
    options.flush_interval_ns = INT64_C(3600) * SECONDS;
    OK(pelton_flush_open(receiver, &options, &sink, &flush));
    ANSWERS(pelton_flush_run(flush, PELTON_NO_WAIT), PELTON_AGAIN);
    ANSWERS(pelton_flush_run(flush, pelton_deadline(1000)), PELTON_AGAIN);
    OK(pelton_send(sender, &message, sizeof message, PELTON_NO_WAIT));
    ANSWERS(pelton_flush_run(flush, PELTON_NO_WAIT), PELTON_AGAIN);
    CHECK(all.calls == 0);
    OK(pelton_flush_now(flush));
    CHECK(all.messages == 1);
    /* What is not flushed by then counts as unreleased. */
    OK(pelton_send(sender, &message, sizeof message, PELTON_NO_WAIT));
    OK(pelton_close(flush));
    REFUSES(pelton_drain(sender, SOON), PELTON_CLOSED, "1 messages were not released");
    OK(pelton_close(sender));
    CHECK(all.messages == 1);
    /* Not by time at all: at once. */
    options.flush_interval_ns = PELTON_FOREVER;
    sink = sink_of(&all);
    OK(pelton_flush_open(small_channel(&sender), &options, &sink, &flush));
    OK(pelton_send(sender, &message, sizeof message, PELTON_NO_WAIT));
    ANSWERS(pelton_flush_run(flush, PELTON_NO_WAIT), PELTON_AGAIN);
    CHECK(all.messages == 1);
    OK(pelton_close(flush));
    OK(pelton_close(sender));
}

static void sends_and_dies(const char *name) {
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_sender *sender;
    note message = {2, 0};
    options.deadline_ns = SOON;
    OK(pelton_sender_open(name, &options, &sender));
    for (; message.number < 100; message.number++) OK(pelton_send(sender, &message, sizeof message, SOON));
    kill(getpid(), SIGKILL);
}

static void what_a_dead_sender_committed_is_in_the_sink_when_its_death_is_told(void) {
    char name[128];
    int status;
    pelton_listener *listener;
    pelton_receiver *receiver;
    pelton_flush *flush;
    seen all;
    pelton_sink sink = sink_of(&all);
    OK(pelton_listen(place(name, "unix:%s/socket"), NULL, &listener));
    pid_t child = start(sends_and_dies, name);
    OK(pelton_accept_receiver(listener, SOON, &receiver));
    OK(pelton_flush_open(receiver, NULL, &sink, &flush));
    ANSWERS(pelton_flush_run(flush, SOON), PELTON_PEER_DIED);
    CHECK(all.next[2] == 100 && all.messages == 100 && all.pid == (uint32_t)child && all.uid == getuid());
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
    OK(pelton_close(flush));
    OK(pelton_close(listener));
}

static void a_receiver_that_cannot_be_flushed_stays_as_it_is(void) {
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_sink none = PELTON_SINK_INIT, older = PELTON_SINK_INIT;
    pelton_sender *sender;
    pelton_receiver *receiver = small_channel(&sender);
    pelton_flush *flush;
    pelton_message message;
    seen all;
    pelton_sink sink = sink_of(&all);
    ANSWERS(pelton_flush_open(NULL, NULL, &sink, &flush), PELTON_NULL);
    ANSWERS(pelton_flush_open(receiver, NULL, NULL, &flush), PELTON_NULL);
    ANSWERS(pelton_flush_open(receiver, NULL, &sink, NULL), PELTON_NULL);
    ANSWERS(pelton_flush_open((pelton_receiver *)(void *)sender, NULL, &sink, &flush), PELTON_CLOSED_HANDLE);
    REFUSES(pelton_flush_open(receiver, NULL, &none, &flush), PELTON_OPTION, "write or path");
    none.path = "/nowhere/at/all";
    none.write = take;
    REFUSES(pelton_flush_open(receiver, NULL, &none, &flush), PELTON_OPTION, "write or path");
    none.write = NULL;
    ANSWERS(pelton_flush_open(receiver, NULL, &none, &flush), PELTON_SYSTEM);
    CHECK(errno == ENOENT);
    none.sync_interval_ns = -1;
    REFUSES(pelton_flush_open(receiver, NULL, &none, &flush), PELTON_OPTION, "sync_interval_ns is -1");
    none.reserved = 1;
    REFUSES(pelton_flush_open(receiver, NULL, &none, &flush), PELTON_OPTION, "reserved is 1");
    older.struct_bytes = 8;
    REFUSES(pelton_flush_open(receiver, NULL, &older, &flush), PELTON_OPTION, "PELTON_SINK_INIT");
    options.flush_bytes = (1 << 30) + 1;
    REFUSES(pelton_flush_open(receiver, &options, &sink, &flush), PELTON_OPTION, "flush_bytes");
    options.flush_bytes = 0;
    options.flush_interval_ns = -1;
    REFUSES(pelton_flush_open(receiver, &options, &sink, &flush), PELTON_OPTION, "flush_interval_ns is -1");
    /* It is as if nothing had been tried. */
    OK(pelton_send(sender, "kept", 4, PELTON_NO_WAIT));
    OK(pelton_receive(receiver, SOON, &message));
    CHECK(message.size == 4);
    ANSWERS(pelton_flush_open(receiver, NULL, &sink, &flush), PELTON_NOT_RELEASED);
    OK(pelton_release(receiver));
    OK(pelton_flush_open(receiver, NULL, &sink, &flush));
    ANSWERS(pelton_flush_now((pelton_flush *)(void *)sender), PELTON_CLOSED_HANDLE);
    ANSWERS(pelton_flush_run(NULL, SOON), PELTON_NULL);
    OK(pelton_close(flush));
    OK(pelton_close(NULL));
    ANSWERS(pelton_close(flush), PELTON_CLOSED_HANDLE);
    ANSWERS(pelton_flush_run(flush, SOON), PELTON_CLOSED_HANDLE);
    OK(pelton_close(sender));
}

static void a_program_of_an_older_header_is_understood(void) {
    pelton_options options;
    pelton_sender *sender;
    pelton_receiver *receiver;
    /* Before the options for flushing: what is behind its end must not be looked at. */
    memset(&options, 0xff, sizeof options);
    memset(&options, 0, offsetof(pelton_options, flush_bytes));
    options.struct_bytes = offsetof(pelton_options, flush_bytes);
    OK(pelton_threads(&options, &sender, &receiver));
    OK(pelton_close(sender));
    OK(pelton_close(receiver));
    options.struct_bytes -= 4;
    REFUSES(pelton_threads(&options, &sender, &receiver), PELTON_OPTION, "PELTON_OPTIONS_INIT");
}

static void a_run_that_is_not_what_it_says_ends_early(void) {
    uint64_t records[4] = {UINT64_C(0xffffffff00000003), 0x434241, UINT64_C(0x0000000100000008), 7};
    pelton_run run = {{1, 2}, records, sizeof records, UINT32_MAX, 2, 0, UINT32_MAX};
    pelton_record record;
    size_t at = 0;
    /* Numbers leave out 0. */
    CHECK(pelton_run_next(&run, &at, &record) && record.size == 3 && record.seq == UINT32_MAX);
    CHECK(memcmp(record.data, "ABC", 3) == 0 && record.lane_id[1] == 2 && record.uid == UINT32_MAX);
    CHECK(pelton_run_next(&run, &at, &record) && record.size == 8 && record.seq == 1 && record.data == &records[3]);
    CHECK(!pelton_run_next(&run, &at, &record) && at == sizeof records);
    /* Another number than it must be; more bytes than there are; a header that is cut off. */
    run.first_seq = 5;
    CHECK(!pelton_run_next(&run, (at = 0, &at), &record));
    run.first_seq = UINT32_MAX;
    records[0] = UINT64_C(0xffffffff00000019);
    CHECK(!pelton_run_next(&run, &at, &record));
    records[0] = UINT64_C(0xffffffffffffffff);
    CHECK(!pelton_run_next(&run, &at, &record));
    run.size = 7;
    CHECK(!pelton_run_next(&run, &at, &record) && at == 0);
}

/* ---- Appending --------------------------------------------------------------------------------------------------------- */

enum { THREADS = 8, EACH = 20000 };

typedef struct thread {
    pelton_appenders *appenders;
    uint32_t who;
} thread;

static void *appends(void *given) {
    thread *self = (thread *)given;
    pelton_appender *appender;
    unsigned char room[200];
    OK(pelton_appender_open(self->appenders, &appender));
    for (uint32_t number = 0; number < EACH; number++) {
        size_t size = 8 + number % 190;
        if (number % 3 == 0) {
            void *place;
            OK(pelton_reserve(appender, size + 5, PELTON_NO_WAIT, &place));
            numbered((unsigned char *)place, self->who, number, size);
            OK(pelton_commit(appender, size));
        } else {
            OK(pelton_append(appender, numbered(room, self->who, number, size), size));
        }
    }
    OK(pelton_close(appender));
    return NULL;
}

static void *appends_by_the_shared_handle(void *given) {
    thread *self = (thread *)given;
    unsigned char room[200];
    for (uint32_t number = 0; number < EACH; number++) {
        size_t size = 8 + number % 190;
        OK(pelton_appenders_append(self->appenders, numbered(room, self->who, number, size), size));
        if (number == EACH / 2) OK(pelton_flush_now(self->appenders));
    }
    return NULL;
}

static void what_many_threads_append_comes_to_the_sink_once_and_in_their_order(void) {
    static const int64_t intervals[] = {1000000, PELTON_FOREVER};
    for (size_t i = 0; i < sizeof intervals / sizeof *intervals; i++) {
        pelton_options options = PELTON_OPTIONS_INIT;
        pelton_appenders *appenders;
        pthread_t threads[THREADS];
        thread given[THREADS];
        seen all;
        pelton_sink sink = sink_of(&all);
        options.flush_bytes = 64 << 10;
        options.flush_interval_ns = intervals[i];
        OK(pelton_appenders_open(&options, &sink, &appenders));
        for (uint32_t who = 0; who < THREADS; who++) {
            given[who].appenders = appenders;
            given[who].who = who;
            CHECK(pthread_create(&threads[who], NULL, who % 2 ? appends_by_the_shared_handle : appends, &given[who]) == 0);
        }
        for (int who = 0; who < THREADS; who++) CHECK(pthread_join(threads[who], NULL) == 0);
        /* In one of two ways: asked for, or by closing. */
        if (i == 0) OK(pelton_sync(appenders));
        if (i == 0) CHECK(__atomic_load_n(&all.messages, __ATOMIC_RELAXED) == THREADS * EACH);
        OK(pelton_close(appenders));
        for (int who = 0; who < THREADS; who++) CHECK(all.next[who] == EACH);
        CHECK(all.messages == THREADS * EACH && all.pid == (uint32_t)getpid());
    }
}

static void one_thread_flushes_while_others_append(void) {
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_appenders *appenders;
    pthread_t threads[THREADS];
    thread given[THREADS];
    seen all;
    pelton_sink sink = sink_of(&all);
    /* All of a thread's messages fit into its buffer: it never flushes itself. */
    options.flush_bytes = 8 << 20;
    options.flush_interval_ns = PELTON_FOREVER;
    OK(pelton_appenders_open(&options, &sink, &appenders));
    for (uint32_t who = 0; who < THREADS; who++) {
        given[who].appenders = appenders;
        given[who].who = who;
        CHECK(pthread_create(&threads[who], NULL, appends, &given[who]) == 0);
    }
    while (all.messages < THREADS * EACH) {
        OK(pelton_flush_now(appenders));
        sched_yield();
    }
    for (int who = 0; who < THREADS; who++) CHECK(pthread_join(threads[who], NULL) == 0 && all.next[who] == EACH);
    OK(pelton_close(appenders));
    CHECK(all.messages == THREADS * EACH);
}

static void what_is_reserved_is_seen_by_no_flush_until_it_is_committed(void) {
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_appenders *appenders;
    pelton_appender *appender;
    void *room;
    note message = {0, 0};
    seen all;
    pelton_sink sink = sink_of(&all);
    options.flush_interval_ns = PELTON_FOREVER;
    OK(pelton_appenders_open(&options, &sink, &appenders));
    OK(pelton_appender_open(appenders, &appender));
    OK(pelton_append(appender, &message, sizeof message));
    OK(pelton_reserve(appender, 100, PELTON_NO_WAIT, &room));
    CHECK((uintptr_t)room % 8 == 0);
    numbered((unsigned char *)room, 0, 1, 100);
    REFUSES(pelton_append(appender, &message, sizeof message), PELTON_RESERVED, "commit or abort");
    OK(pelton_flush_now(appenders));
    CHECK(all.messages == 1);
    REFUSES(pelton_commit(appender, 101), PELTON_TOO_LARGE, "101 bytes committed of 100");
    OK(pelton_commit(appender, 50));
    ANSWERS(pelton_commit(appender, 50), PELTON_NOT_RESERVED);
    OK(pelton_flush_now(appenders));
    CHECK(all.messages == 2);
    /* Given back, replaced, and left when it is closed: nothing is seen of them. */
    OK(pelton_reserve(appender, 100, PELTON_NO_WAIT, &room));
    OK(pelton_abort(appender));
    ANSWERS(pelton_abort(appender), PELTON_NOT_RESERVED);
    OK(pelton_reserve(appender, 100, PELTON_NO_WAIT, &room));
    OK(pelton_reserve(appender, 8, PELTON_NO_WAIT, &room));
    numbered((unsigned char *)room, 0, 2, 8);
    OK(pelton_commit(appender, 8));
    OK(pelton_reserve(appender, 100, PELTON_NO_WAIT, &room));
    OK(pelton_close(appender));
    OK(pelton_close(appenders));
    CHECK(all.messages == 3);
}

static void a_full_buffer_is_handed_over_and_a_refusal_of_the_sink_is_told(void) {
    enum { SIZE = 900 };
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_appenders *appenders;
    pelton_appender *appender;
    unsigned char room[SIZE];
    void *place;
    uint32_t number = 0;
    int answer;
    seen all;
    pelton_sink sink = sink_of(&all);
    all.refuses = -EIO;
    options.flush_bytes = 64 << 10;
    options.flush_interval_ns = PELTON_FOREVER;
    OK(pelton_appenders_open(&options, &sink, &appenders));
    OK(pelton_appender_open(appenders, &appender));
    while ((answer = pelton_append(appender, numbered(room, 0, number, SIZE), SIZE)) == PELTON_OK) number++;
    ANSWERS(answer, PELTON_SINK);
    CHECK(errno == EIO && number > 1 && all.calls == 0);
    errno = 0;
    /* A reservation that fails takes back the one before. */
    OK(pelton_reserve(appender, 8, PELTON_NO_WAIT, &place));
    REFUSES(pelton_reserve(appender, SIZE, PELTON_NO_WAIT, &place), PELTON_SINK, "answered -5");
    CHECK(errno == EIO);
    ANSWERS(pelton_commit(appender, SIZE), PELTON_NOT_RESERVED);
    ANSWERS(pelton_flush_now(appenders), PELTON_SINK);
    /* What was refused was not appended: tried again, it comes once. */
    all.refuses = 0;
    OK(pelton_append(appender, numbered(room, 0, number, SIZE), SIZE));
    CHECK(all.messages == number);
    OK(pelton_sync(appenders));
    CHECK(all.messages == number + 1);
    /* The largest that a buffer takes, and one more. */
    size_t largest = (64 << 10) - 16;
    unsigned char *large = (unsigned char *)malloc(largest + 1);
    CHECK(large);
    OK(pelton_append(appender, numbered(large, 0, number + 1, largest), largest));
    REFUSES(pelton_append(appender, large, largest + 1), PELTON_TOO_LARGE, "larger than");
    ANSWERS(pelton_reserve(appender, SIZE_MAX, PELTON_NO_WAIT, &place), PELTON_TOO_LARGE);
    ANSWERS(pelton_appenders_append(appenders, large, largest + 1), PELTON_TOO_LARGE);
    free(large);
    OK(pelton_close(appender));
    OK(pelton_close(appenders));
    CHECK(all.messages == number + 2);
}

/* By the library's own thread, and then by whoever flushes. */
static int refuse_once(void *context, const pelton_run *runs, size_t count) {
    (void)runs, (void)count;
    return __atomic_fetch_add((int *)context, 1, __ATOMIC_ACQ_REL) == 0 ? -ENOSPC : 0;
}

static void what_the_sink_answered_the_librarys_thread_is_told_to_who_flushes_next(void) {
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_sink sink = PELTON_SINK_INIT;
    pelton_appenders *appenders;
    int calls = 0;
    sink.write = refuse_once;
    sink.context = &calls;
    options.flush_interval_ns = 1000000;
    OK(pelton_appenders_open(&options, &sink, &appenders));
    OK(pelton_appenders_append(appenders, "x", 1));
    while (__atomic_load_n(&calls, __ATOMIC_ACQUIRE) == 0) sched_yield();
    errno = 0;
    REFUSES(pelton_flush_now(appenders), PELTON_SINK, "answered -28");
    CHECK(errno == ENOSPC);
    OK(pelton_flush_now(appenders));
    OK(pelton_close(appenders));
}

static void mistakes_get_codes(void) {
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_appenders *appenders;
    pelton_appender *appender, *second;
    pelton_records *records;
    pelton_record record;
    void *room;
    note message = {0, 0};
    seen all;
    pelton_sink sink = sink_of(&all);
    ANSWERS(pelton_appenders_open(NULL, NULL, &appenders), PELTON_NULL);
    ANSWERS(pelton_appenders_open(NULL, &sink, NULL), PELTON_NULL);
    options.lanes = 1;
    OK(pelton_appenders_open(&options, &sink, &appenders));
    ANSWERS(pelton_appender_open(NULL, &appender), PELTON_NULL);
    ANSWERS(pelton_appender_open(appenders, NULL), PELTON_NULL);
    OK(pelton_appender_open(appenders, &appender));
    REFUSES(pelton_appender_open(appenders, &second), PELTON_REFUSED, "lanes");
    ANSWERS(pelton_append(NULL, "x", 1), PELTON_NULL);
    ANSWERS(pelton_append(appender, NULL, 1), PELTON_NULL);
    ANSWERS(pelton_append((pelton_appender *)(void *)appenders, "x", 1), PELTON_CLOSED_HANDLE);
    ANSWERS(pelton_appenders_append((pelton_appenders *)(void *)appender, "x", 1), PELTON_CLOSED_HANDLE);
    ANSWERS(pelton_appenders_append(appenders, NULL, 1), PELTON_NULL);
    ANSWERS(pelton_reserve(appender, 1, PELTON_NO_WAIT, NULL), PELTON_NULL);
    ANSWERS(pelton_reserve(NULL, 1, PELTON_NO_WAIT, &room), PELTON_NULL);
    ANSWERS(pelton_commit(appender, 1), PELTON_NOT_RESERVED);
    ANSWERS(pelton_abort(NULL), PELTON_NULL);
    ANSWERS(pelton_flush_now(NULL), PELTON_NULL);
    ANSWERS(pelton_sync(NULL), PELTON_NULL);
    OK(pelton_close(NULL));
    OK(pelton_close(NULL));
    /* An appender goes on without what made it. */
    OK(pelton_close(appenders));
    ANSWERS(pelton_flush_now(appenders), PELTON_CLOSED_HANDLE);
    ANSWERS(pelton_close(appenders), PELTON_CLOSED_HANDLE);
    OK(pelton_append(appender, &message, sizeof message));
    OK(pelton_close(appender));
    CHECK(all.messages == 1);
    ANSWERS(pelton_append(appender, "x", 1), PELTON_CLOSED_HANDLE);
    ANSWERS(pelton_reserve(appender, 1, PELTON_NO_WAIT, &room), PELTON_CLOSED_HANDLE);
    ANSWERS(pelton_close(appender), PELTON_CLOSED_HANDLE);
    ANSWERS(pelton_records_open(NULL, &records), PELTON_NULL);
    ANSWERS(pelton_records_open("/dev/null", NULL), PELTON_NULL);
    REFUSES(pelton_records_open("/dev/null", &records), PELTON_NOT_A_RECORD_FILE, "/dev/null");
    ANSWERS(pelton_records_open("/nowhere/at/all", &records), PELTON_SYSTEM);
    CHECK(errno == ENOENT);
    ANSWERS(pelton_records_next(NULL, &record), PELTON_NULL);
    OK(pelton_close(NULL));
}

static pelton_appenders *inherited;
static pelton_appender *inherited_appender;
static pelton_flush *inherited_flush;

static void is_told_that_it_is_a_fork(const char *name) {
    void *room;
    (void)name;
    ANSWERS(pelton_appenders_append(inherited, "x", 1), PELTON_FORKED);
    ANSWERS(pelton_flush_now(inherited), PELTON_FORKED);
    ANSWERS(pelton_sync(inherited), PELTON_FORKED);
    ANSWERS(pelton_append(inherited_appender, "x", 1), PELTON_FORKED);
    ANSWERS(pelton_reserve(inherited_appender, 1, PELTON_NO_WAIT, &room), PELTON_FORKED);
    ANSWERS(pelton_flush_now(inherited_flush), PELTON_FORKED);
    ANSWERS(pelton_flush_run(inherited_flush, SOON), PELTON_FORKED);
    ANSWERS(pelton_close(inherited_appender), PELTON_FORKED);
    ANSWERS(pelton_close(inherited), PELTON_FORKED);
    ANSWERS(pelton_close(inherited_flush), PELTON_FORKED);
}

static void a_forked_child_flushes_nothing_of_its_parents(void) {
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_sender *sender;
    note message = {0, 0};
    seen all, flushed;
    pelton_sink sink = sink_of(&all), other = sink_of(&flushed);
    /* No thread that flushes: a child has not got it, and what was that thread's would look lost there. */
    options.flush_interval_ns = PELTON_FOREVER;
    OK(pelton_appenders_open(&options, &sink, &inherited));
    OK(pelton_appender_open(inherited, &inherited_appender));
    OK(pelton_append(inherited_appender, &message, sizeof message));
    OK(pelton_flush_open(small_channel(&sender), NULL, &other, &inherited_flush));
    OK(pelton_send(sender, &message, sizeof message, PELTON_NO_WAIT));
    finish(start(is_told_that_it_is_a_fork, NULL));
    OK(pelton_flush_now(inherited));
    OK(pelton_flush_now(inherited_flush));
    CHECK(all.messages == 1 && flushed.messages == 1);
    OK(pelton_close(inherited_appender));
    OK(pelton_close(inherited));
    OK(pelton_close(inherited_flush));
    OK(pelton_close(sender));
}

/* ---- Record files ------------------------------------------------------------------------------------------------------ */

static pelton_sink file_of(char *path, const char *format) {
    pelton_sink sink = PELTON_SINK_INIT;
    sink.path = place(path, format);
    return sink;
}

static off_t size_of(const char *path) {
    struct stat found;
    CHECK(stat(path, &found) == 0);
    return found.st_size;
}

/* Reads the numbers that follow on *next; answers what ended it. */
static int read_on(pelton_records *records, uint32_t *next) {
    pelton_record record;
    note message;
    int answer;
    while ((answer = pelton_records_next(records, &record)) == PELTON_OK) {
        CHECK(record.size == sizeof message + *next % 40 && (uintptr_t)record.data % 8 == 0);
        memcpy(&message, record.data, sizeof message);
        CHECK(message.number == *next && record.seq == *next + 1 && record.pid == (uint32_t)getpid() && record.uid == getuid());
        CHECK((record.lane_id[0] || record.lane_id[1]) && record.reserved == 0);
        ++*next;
    }
    return answer;
}

static void append_some(pelton_appender *appender, uint32_t from, uint32_t to) {
    unsigned char room[48];
    for (uint32_t number = from; number < to; number++) {
        OK(pelton_append(appender, numbered(room, 0, number, 8 + number % 40), 8 + number % 40));
    }
}

static void what_is_in_a_record_file_is_read_back_while_it_grows(void) {
    char path[128];
    pelton_sink sink = file_of(path, "%s/log");
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_appenders *appenders, *second;
    pelton_appender *appender;
    pelton_records *records;
    uint32_t next = 0;
    sink.sync_bytes = PELTON_EACH_WRITE;
    sink.sync_interval_ns = SECONDS;
    options.flush_interval_ns = PELTON_FOREVER;
    OK(pelton_appenders_open(&options, &sink, &appenders));
    REFUSES(pelton_appenders_open(&options, &sink, &second), PELTON_ROLE_TAKEN, "writer");
    OK(pelton_appender_open(appenders, &appender));
    OK(pelton_records_open(path, &records));
    ANSWERS(read_on(records, &next), PELTON_AGAIN);
    for (uint32_t round = 1; round <= 5; round++) {
        append_some(appender, 1000 * (round - 1), 1000 * round);
        OK(round % 2 ? pelton_flush_now(appenders) : pelton_sync(appenders));
        ANSWERS(read_on(records, &next), PELTON_AGAIN);
        CHECK(next == 1000 * round);
    }
    OK(pelton_close(appender));
    OK(pelton_close(appenders));
    ANSWERS(read_on(records, &next), PELTON_AGAIN);
    OK(pelton_close(records));
    ANSWERS(pelton_close(records), PELTON_CLOSED_HANDLE);
    CHECK(unlink(path) == 0);
}

static void a_torn_end_is_told_and_cut_off_and_damage_is_passed_over(void) {
    char path[128];
    pelton_sink sink = file_of(path, "%s/log");
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_appenders *appenders;
    pelton_appender *appender;
    pelton_records *records;
    pelton_record record;
    uint32_t next = 0;
    unsigned char byte;
    options.flush_interval_ns = PELTON_FOREVER;
    OK(pelton_appenders_open(&options, &sink, &appenders));
    OK(pelton_appender_open(appenders, &appender));
    off_t begin = size_of(path);
    append_some(appender, 0, 100);
    OK(pelton_flush_now(appenders));
    off_t whole = size_of(path);
    append_some(appender, 100, 200);
    OK(pelton_close(appender));
    OK(pelton_close(appenders));
    CHECK(begin < whole && whole < size_of(path) - 1 && truncate(path, size_of(path) - 1) == 0);
    OK(pelton_records_open(path, &records));
    REFUSES(read_on(records, &next), PELTON_TORN, path);
    CHECK(next == 100);
    ANSWERS(pelton_records_next(records, &record), PELTON_TORN);
    OK(pelton_close(records));
    /* Whoever writes to it next goes on with what is whole. */
    OK(pelton_appenders_open(&options, &sink, &appenders));
    CHECK(size_of(path) == whole);
    OK(pelton_appenders_append(appenders, "last", 4));
    OK(pelton_close(appenders));
    /* A bit of the first ones turned over. */
    int file = open(path, O_RDWR | O_CLOEXEC);
    CHECK(file >= 0 && pread(file, &byte, 1, whole - 1) == 1);
    byte ^= 1;
    CHECK(pwrite(file, &byte, 1, whole - 1) == 1 && close(file) == 0);
    OK(pelton_records_open(path, &records));
    REFUSES(pelton_records_next(records, &record), PELTON_DAMAGED, "is whole");
    OK(pelton_records_next(records, &record));
    CHECK(record.size == 4 && memcmp(record.data, "last", 4) == 0);
    ANSWERS(pelton_records_next(records, &record), PELTON_AGAIN);
    OK(pelton_close(records));
    CHECK(unlink(path) == 0);
}

static void a_file_that_would_be_too_large_is_followed_by_another(void) {
    char path[128], first[128];
    pelton_sink sink = file_of(path, "%s/log");
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_sender *sender;
    pelton_flush *flush;
    pelton_records *records;
    pelton_record record;
    place(first, "%s/log.000001");
    sink.rotate_bytes = 4096;
    options.flush_interval_ns = PELTON_FOREVER;
    OK(pelton_flush_open(small_channel(&sender), &options, &sink, &flush));
    static const char large[3000] = {0};
    for (int i = 0; i < 2; i++) {
        OK(pelton_send(sender, large, sizeof large, PELTON_NO_WAIT));
        OK(pelton_sync(flush));
    }
    OK(pelton_close(sender));
    OK(pelton_flush_run(flush, SOON));
    OK(pelton_close(flush));
    for (uint32_t i = 0; i < 2; i++) {
        OK(pelton_records_open(i ? path : first, &records));
        OK(pelton_records_next(records, &record));
        CHECK(record.size == sizeof large && record.seq == i + 1);
        ANSWERS(pelton_records_next(records, &record), PELTON_AGAIN);
        OK(pelton_close(records));
        CHECK(unlink(i ? path : first) == 0);
    }
}

int main(void) {
    static const test tests[] = {
        TEST(everything_sent_comes_to_the_sink_up_to_the_end),
        TEST(a_sink_that_answers_a_number_below_0_has_taken_nothing),
        TEST(a_deadline_ends_a_flush_and_it_goes_on),
        TEST(what_a_dead_sender_committed_is_in_the_sink_when_its_death_is_told),
        TEST(a_receiver_that_cannot_be_flushed_stays_as_it_is),
        TEST(a_program_of_an_older_header_is_understood),
        TEST(a_run_that_is_not_what_it_says_ends_early),
        TEST(what_many_threads_append_comes_to_the_sink_once_and_in_their_order),
        TEST(one_thread_flushes_while_others_append),
        TEST(what_is_reserved_is_seen_by_no_flush_until_it_is_committed),
        TEST(a_full_buffer_is_handed_over_and_a_refusal_of_the_sink_is_told),
        TEST(what_the_sink_answered_the_librarys_thread_is_told_to_who_flushes_next),
        TEST(mistakes_get_codes),
        TEST(a_forked_child_flushes_nothing_of_its_parents),
        TEST(what_is_in_a_record_file_is_read_back_while_it_grows),
        TEST(a_torn_end_is_told_and_cut_off_and_damage_is_passed_over),
        TEST(a_file_that_would_be_too_large_is_followed_by_another),
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
