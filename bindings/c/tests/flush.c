/* Flushing and appending: what the C interface adds to it: sinks that are functions, their numbers, files, handles and
 * their mistakes. */
#include "check.h"

/* A message has its author and its number. */
typedef struct note {
    uint32_t author;
    uint32_t number;
} note;

enum { AUTHORS_MAX = 16 };

/* What has come to a sink. */
typedef struct seen {
    uint32_t next[AUTHORS_MAX]; /* each one's next number */
    uint32_t messages;
    uint32_t calls;
    uint32_t first_seq; /* of the first chunk */
    uint64_t lane_id[2];
    uint32_t pid;
    uint32_t uid;
    int refuses; /* what it answers instead of taking anything, below 0 */
    uint32_t refused;
} seen;

/* Checks every record, each sender's order, and what the chunk says of them. */
static int take(void *context, const pelton_chunk *chunks, size_t count) {
    seen *all = (seen *)context;
    CHECK(count > 0);
    if (all->refuses < 0) {
        all->refused++;
        return all->refuses;
    }
    if (all->calls++ == 0) {
        all->first_seq = chunks->first_seq;
        memcpy(all->lane_id, chunks->lane_id, sizeof all->lane_id);
        all->pid = chunks->pid;
        all->uid = chunks->uid;
    }
    for (size_t i = 0; i < count; i++) {
        const pelton_chunk *chunk = &chunks[i];
        size_t at = 0, found = 0;
        pelton_record record;
        note message;
        CHECK((uintptr_t)chunk->bytes % 8 == 0 && chunk->messages > 0);
        while (pelton_chunk_next(chunk, &at, &record)) {
            CHECK((uintptr_t)record.data % 8 == 0 && record.size >= sizeof message);
            memcpy(&message, record.data, sizeof message);
            CHECK(message.author < AUTHORS_MAX && message.number == all->next[message.author]);
            for (size_t byte = sizeof message; byte < record.size; byte++) {
                CHECK(((const unsigned char *)record.data)[byte] == (unsigned char)message.number);
            }
            CHECK(record.seq == chunk->first_seq + found && record.pid == chunk->pid && record.uid == chunk->uid);
            CHECK(memcmp(record.lane_id, chunk->lane_id, sizeof record.lane_id) == 0);
            all->next[message.author]++;
            found++;
        }
        CHECK(found == chunk->messages && at == chunk->size);
        all->messages += chunk->messages;
    }
    return 7;
}

static seen nothing_yet(void) {
    seen all;
    memset(&all, 0, sizeof all);
    return all;
}

/* A message of so many bytes, at least as many as a note has. */
static const void *numbered(unsigned char *room, uint32_t author, uint32_t number, size_t size) {
    note message = {author, number};
    memset(room, (int)(number & 0xff), size);
    memcpy(room, &message, sizeof message);
    return room;
}

static pelton_receiver *small_channel(pelton_sender **sender) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_receiver *receiver;
    options.capacity = 64 << 10;
    OK(pelton_threads(&options, sender, &receiver));
    return receiver;
}

/* ---- Flushing ---------------------------------------------------------------------------------------------------- */

enum { SENT = 20000 };

static void *sends(void *given) {
    pelton_sender *sender = (pelton_sender *)given;
    unsigned char room[300];
    for (uint32_t number = 0; number < SENT; number++) {
        size_t size = 8 + number % 290;
        OK(pelton_sender_send(sender, numbered(room, 1, number, size), size, SOON));
    }
    OK(pelton_close(sender));
    return NULL;
}

static void everything_sent_comes_to_the_sink_up_to_the_end(void) {
    static const int64_t intervals[] = {0, 1000000, PELTON_FOREVER};
    for (size_t i = 0; i < sizeof intervals / sizeof *intervals; i++) {
        pelton_flush_options options = PELTON_FLUSH_OPTIONS_INIT;
        pelton_sender *sender;
        pelton_receiver *receiver = small_channel(&sender);
        pelton_flush *flush;
        pthread_t thread;
        seen all = nothing_yet();
        options.flush_interval_ns = intervals[i];
        OK(pelton_flush_to_function(receiver, take, &all, &options, &flush));
        /* It is the flush's now. */
        FAILS(pelton_close(receiver), PELTON_CLOSED_HANDLE, "the handle is a closed pelton_receiver");
        CHECK(pthread_create(&thread, NULL, sends, sender) == 0);
        OK(pelton_flush_run(flush, PELTON_FOREVER));
        CHECK(pthread_join(thread, NULL) == 0);
        CHECK(all.next[1] == SENT && all.messages == SENT && all.first_seq == 1);
        CHECK(all.pid == (uint32_t)getpid() && all.uid == getuid());
        OK(pelton_close(flush));
    }
}

static void a_sink_that_returns_a_negative_number_has_taken_nothing(void) {
    pelton_sender *sender;
    pelton_receiver *receiver = small_channel(&sender);
    pelton_flush *flush;
    pelton_sender_info info;
    note message = {0, 0};
    seen all = nothing_yet();
    all.refuses = -ENOSPC;
    OK(pelton_flush_to_function(receiver, take, &all, NULL, &flush));
    for (; message.number < 3; message.number++) OK(pelton_sender_send(sender, &message, sizeof message, PELTON_NO_WAIT));
    errno = 0;
    FAILS(pelton_flush_flush(flush), PELTON_SINK, "-28");
    CHECK(errno == ENOSPC && all.refused == 1 && all.calls == 0);
    info.struct_bytes = sizeof info;
    OK(pelton_sender_get_info(sender, &info));
    CHECK(info.unreleased == 3);
    all.refuses = INT32_MIN;
    FAILS(pelton_flush_sync(flush), PELTON_SINK, "took nothing");
    CHECK(errno == INT32_MAX);
    /* Just the same comes again, and then what has come since. */
    all.refuses = 0;
    OK(pelton_sender_send(sender, &message, sizeof message, PELTON_NO_WAIT));
    OK(pelton_flush_flush(flush));
    CHECK(all.calls == 2 && all.messages == 4 && all.refused == 2);
    OK(pelton_sender_get_info(sender, &info));
    CHECK(info.unreleased == 0);
    OK(pelton_flush_flush(flush));
    CHECK(all.calls == 2);
    OK(pelton_close(sender));
    RETURNS(pelton_flush_flush(flush), PELTON_CLOSED);
    RETURNS(pelton_flush_sync(flush), PELTON_CLOSED);
    OK(pelton_close(flush));
}

static void a_deadline_ends_a_flush_which_can_continue(void) {
    pelton_flush_options options = PELTON_FLUSH_OPTIONS_INIT;
    pelton_sender *sender;
    pelton_receiver *receiver = small_channel(&sender);
    pelton_flush *flush;
    note message = {0, 0};
    seen all = nothing_yet();
    /* Not by time, as far as this test goes. */
    options.flush_interval_ns = INT64_C(3600) * SECONDS;
    OK(pelton_flush_to_function(receiver, take, &all, &options, &flush));
    RETURNS(pelton_flush_run(flush, PELTON_NO_WAIT), PELTON_AGAIN);
    RETURNS(pelton_flush_run(flush, pelton_deadline(1000)), PELTON_AGAIN);
    OK(pelton_sender_send(sender, &message, sizeof message, PELTON_NO_WAIT));
    RETURNS(pelton_flush_run(flush, PELTON_NO_WAIT), PELTON_AGAIN);
    CHECK(all.calls == 0);
    OK(pelton_flush_flush(flush));
    CHECK(all.messages == 1);
    /* What is not flushed by then counts as unreleased. */
    OK(pelton_sender_send(sender, &message, sizeof message, PELTON_NO_WAIT));
    OK(pelton_close(flush));
    FAILS(pelton_sender_wait_released(sender, SOON), PELTON_CLOSED, "1 messages were not released");
    OK(pelton_close(sender));
    CHECK(all.messages == 1);
    /* Not by time at all: at once. */
    options.flush_interval_ns = PELTON_FOREVER;
    all = nothing_yet();
    OK(pelton_flush_to_function(small_channel(&sender), take, &all, &options, &flush));
    OK(pelton_sender_send(sender, &message, sizeof message, PELTON_NO_WAIT));
    RETURNS(pelton_flush_run(flush, PELTON_NO_WAIT), PELTON_AGAIN);
    CHECK(all.messages == 1);
    OK(pelton_close(flush));
    OK(pelton_close(sender));
}

static void sends_and_dies(const char *name) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_sender *sender;
    note message = {2, 0};
    options.deadline_ns = SOON;
    OK(pelton_sender_open(name, &options, &sender));
    for (; message.number < 100; message.number++) OK(pelton_sender_send(sender, &message, sizeof message, SOON));
    kill(getpid(), SIGKILL);
}

static void what_a_dead_sender_committed_is_in_the_sink_when_its_death_is_reported(void) {
    char name[128];
    int status;
    pelton_listener *listener;
    pelton_receiver *receiver;
    pelton_flush *flush;
    seen all = nothing_yet();
    OK(pelton_listener_open(place(name, "unix:%s/socket"), NULL, &listener));
    pid_t child = start(sends_and_dies, name);
    OK(pelton_listener_accept_receiver(listener, SOON, &receiver));
    OK(pelton_flush_to_function(receiver, take, &all, NULL, &flush));
    RETURNS(pelton_flush_run(flush, SOON), PELTON_PEER_DIED);
    CHECK(all.next[2] == 100 && all.messages == 100 && all.pid == (uint32_t)child && all.uid == getuid());
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
    OK(pelton_close(flush));
    OK(pelton_close(listener));
}

static void a_receiver_that_cannot_be_flushed_is_unchanged(void) {
    pelton_flush_options options = PELTON_FLUSH_OPTIONS_INIT;
    pelton_record_file_options file = PELTON_RECORD_FILE_OPTIONS_INIT;
    pelton_sender *sender;
    pelton_receiver *receiver = small_channel(&sender);
    pelton_flush *flush;
    pelton_message message;
    seen all = nothing_yet();
    RETURNS(pelton_flush_to_function(NULL, take, &all, NULL, &flush), PELTON_NULL);
    FAILS(pelton_flush_to_function(receiver, NULL, &all, NULL, &flush), PELTON_NULL, "write is NULL");
    RETURNS(pelton_flush_to_record_file(NULL, "/nowhere/at/all", NULL, NULL, &flush), PELTON_NULL);
    FAILS(pelton_flush_to_record_file(receiver, NULL, NULL, NULL, &flush), PELTON_NULL, "path is NULL");
    RETURNS(pelton_flush_to_record_file(receiver, "/nowhere/at/all", NULL, NULL, NULL), PELTON_NULL);
    RETURNS(pelton_flush_to_function(receiver, take, &all, NULL, NULL), PELTON_NULL);
    RETURNS(pelton_flush_to_function((pelton_receiver *)(void *)sender, take, &all, NULL, &flush), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_flush_to_record_file(receiver, "/nowhere/at/all", NULL, NULL, &flush), PELTON_SYSTEM);
    CHECK(errno == ENOENT);
    file.sync_interval_ns = -1;
    FAILS(pelton_flush_to_record_file(receiver, "x", &file, NULL, &flush), PELTON_OPTION, "sync_interval_ns is -1");
    file.sync_interval_ns = 0;
    file.reserved = 1;
    FAILS(pelton_flush_to_record_file(receiver, "x", &file, NULL, &flush), PELTON_OPTION, "reserved is 1");
    file.reserved = 0;
    file.struct_bytes = 7;
    FAILS(pelton_flush_to_record_file(receiver, "x", &file, NULL, &flush), PELTON_OPTION, "_INIT macro");
    options.struct_bytes = 7;
    FAILS(pelton_flush_to_function(receiver, take, &all, &options, &flush), PELTON_OPTION, "_INIT macro");
    options.struct_bytes = sizeof options;
    options.flush_bytes = (1 << 30) + 1;
    FAILS(pelton_flush_to_function(receiver, take, &all, &options, &flush), PELTON_OPTION, "flush_bytes");
    options.flush_bytes = 0;
    options.flush_interval_ns = -1;
    FAILS(pelton_flush_to_function(receiver, take, &all, &options, &flush), PELTON_OPTION, "flush_interval_ns is -1");
    /* It is as if nothing had been tried. */
    OK(pelton_sender_send(sender, "kept", 4, PELTON_NO_WAIT));
    OK(pelton_receiver_receive(receiver, SOON, &message));
    CHECK(message.size == 4);
    RETURNS(pelton_flush_to_function(receiver, take, &all, NULL, &flush), PELTON_NOT_RELEASED);
    OK(pelton_receiver_release(receiver));
    OK(pelton_flush_to_function(receiver, take, &all, NULL, &flush));
    RETURNS(pelton_flush_flush((pelton_flush *)(void *)sender), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_flush_run(NULL, SOON), PELTON_NULL);
    OK(pelton_close(flush));
    OK(pelton_close(NULL));
    RETURNS(pelton_close(flush), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_flush_run(flush, SOON), PELTON_CLOSED_HANDLE);
    OK(pelton_close(sender));
}

static void an_invalid_chunk_ends_early(void) {
    uint64_t records[4] = {UINT64_C(0xffffffff00000003), 0x434241, UINT64_C(0x0000000100000008), 7};
    pelton_chunk chunk = {{1, 2}, records, sizeof records, UINT32_MAX, 2, 0, UINT32_MAX};
    pelton_record record;
    size_t at = 0;
    /* Numbers leave out 0. */
    CHECK(pelton_chunk_next(&chunk, &at, &record) && record.size == 3 && record.seq == UINT32_MAX);
    CHECK(memcmp(record.data, "ABC", 3) == 0 && record.lane_id[1] == 2 && record.uid == UINT32_MAX);
    CHECK(pelton_chunk_next(&chunk, &at, &record) && record.size == 8 && record.seq == 1 && record.data == &records[3]);
    CHECK(!pelton_chunk_next(&chunk, &at, &record) && at == sizeof records);
    /* Another number than it must be; more bytes than there are; a header that is cut off. */
    chunk.first_seq = 5;
    CHECK(!pelton_chunk_next(&chunk, (at = 0, &at), &record));
    chunk.first_seq = UINT32_MAX;
    records[0] = UINT64_C(0xffffffff00000019);
    CHECK(!pelton_chunk_next(&chunk, &at, &record));
    records[0] = UINT64_C(0xffffffffffffffff);
    CHECK(!pelton_chunk_next(&chunk, &at, &record));
    chunk.size = 7;
    CHECK(!pelton_chunk_next(&chunk, &at, &record) && at == 0);
}

/* ---- Appending --------------------------------------------------------------------------------------------------- */

enum { THREADS = 8, EACH = 20000 };

typedef struct thread {
    pelton_appenders *appenders;
    uint32_t author;
} thread;

static void *appends(void *given) {
    thread *self = (thread *)given;
    pelton_appender *appender;
    unsigned char room[200];
    OK(pelton_appenders_appender(self->appenders, &appender));
    for (uint32_t number = 0; number < EACH; number++) {
        size_t size = 8 + number % 190;
        if (number % 3 == 0) {
            void *place;
            OK(pelton_appender_reserve(appender, size + 5, &place));
            numbered((unsigned char *)place, self->author, number, size);
            OK(pelton_appender_commit(appender, size));
        } else {
            OK(pelton_appender_append(appender, numbered(room, self->author, number, size), size));
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
        OK(pelton_appenders_append(self->appenders, numbered(room, self->author, number, size), size));
        if (number == EACH / 2) OK(pelton_appenders_flush(self->appenders));
    }
    return NULL;
}

static void what_many_threads_append_comes_to_the_sink_once_and_in_their_order(void) {
    static const int64_t intervals[] = {1000000, PELTON_FOREVER};
    for (size_t i = 0; i < sizeof intervals / sizeof *intervals; i++) {
        pelton_appenders_options options = PELTON_APPENDERS_OPTIONS_INIT;
        pelton_appenders *appenders;
        pthread_t threads[THREADS];
        thread given[THREADS];
        seen all = nothing_yet();
        options.flush_bytes = 64 << 10;
        options.flush_interval_ns = intervals[i];
        OK(pelton_appenders_to_function(take, &all, &options, &appenders));
        for (uint32_t author = 0; author < THREADS; author++) {
            given[author].appenders = appenders;
            given[author].author = author;
            CHECK(pthread_create(&threads[author], NULL, author % 2 ? appends_by_the_shared_handle : appends, &given[author]) == 0);
        }
        for (int author = 0; author < THREADS; author++) CHECK(pthread_join(threads[author], NULL) == 0);
        /* In one of two ways: asked for, or by closing. */
        if (i == 0) OK(pelton_appenders_sync(appenders));
        if (i == 0) CHECK(__atomic_load_n(&all.messages, __ATOMIC_RELAXED) == THREADS * EACH);
        OK(pelton_close(appenders));
        for (int author = 0; author < THREADS; author++) CHECK(all.next[author] == EACH);
        CHECK(all.messages == THREADS * EACH && all.pid == (uint32_t)getpid());
    }
}

static void one_thread_flushes_while_others_append(void) {
    pelton_appenders_options options = PELTON_APPENDERS_OPTIONS_INIT;
    pelton_appenders *appenders;
    pthread_t threads[THREADS];
    thread given[THREADS];
    seen all = nothing_yet();
    /* All of a thread's messages fit into its buffer: it never flushes itself. */
    options.flush_bytes = 8 << 20;
    options.flush_interval_ns = PELTON_FOREVER;
    OK(pelton_appenders_to_function(take, &all, &options, &appenders));
    for (uint32_t author = 0; author < THREADS; author++) {
        given[author].appenders = appenders;
        given[author].author = author;
        CHECK(pthread_create(&threads[author], NULL, appends, &given[author]) == 0);
    }
    while (all.messages < THREADS * EACH) {
        OK(pelton_appenders_flush(appenders));
        sched_yield();
    }
    for (int author = 0; author < THREADS; author++) CHECK(pthread_join(threads[author], NULL) == 0 && all.next[author] == EACH);
    OK(pelton_close(appenders));
    CHECK(all.messages == THREADS * EACH);
}

static void what_is_reserved_is_seen_by_no_flush_until_it_is_committed(void) {
    pelton_appenders_options options = PELTON_APPENDERS_OPTIONS_INIT;
    pelton_appenders *appenders;
    pelton_appender *appender;
    void *room;
    note message = {0, 0};
    seen all = nothing_yet();
    options.flush_interval_ns = PELTON_FOREVER;
    OK(pelton_appenders_to_function(take, &all, &options, &appenders));
    OK(pelton_appenders_appender(appenders, &appender));
    OK(pelton_appender_append(appender, &message, sizeof message));
    OK(pelton_appender_reserve(appender, 100, &room));
    CHECK((uintptr_t)room % 8 == 0);
    numbered((unsigned char *)room, 0, 1, 100);
    FAILS(pelton_appender_append(appender, &message, sizeof message), PELTON_RESERVED, "commit or abort");
    OK(pelton_appenders_flush(appenders));
    CHECK(all.messages == 1);
    FAILS(pelton_appender_commit(appender, 101), PELTON_TOO_LARGE, "101 bytes used of 100 reserved");
    OK(pelton_appender_commit(appender, 50));
    RETURNS(pelton_appender_commit(appender, 50), PELTON_NOT_RESERVED);
    OK(pelton_appenders_flush(appenders));
    CHECK(all.messages == 2);
    /* Given back, replaced, and left when it is closed: nothing is seen of them. */
    OK(pelton_appender_reserve(appender, 100, &room));
    OK(pelton_appender_abort(appender));
    RETURNS(pelton_appender_abort(appender), PELTON_NOT_RESERVED);
    OK(pelton_appender_reserve(appender, 100, &room));
    OK(pelton_appender_reserve(appender, 8, &room));
    numbered((unsigned char *)room, 0, 2, 8);
    OK(pelton_appender_commit(appender, 8));
    OK(pelton_appender_reserve(appender, 100, &room));
    OK(pelton_close(appender));
    OK(pelton_close(appenders));
    CHECK(all.messages == 3);
}

static void a_full_buffer_is_flushed_and_a_refusal_of_the_sink_is_reported(void) {
    enum { SIZE = 900 };
    pelton_appenders_options options = PELTON_APPENDERS_OPTIONS_INIT;
    pelton_appenders *appenders;
    pelton_appender *appender;
    unsigned char room[SIZE];
    void *place;
    uint32_t number = 0;
    int answer;
    seen all = nothing_yet();
    all.refuses = -EIO;
    options.flush_bytes = 64 << 10;
    options.flush_interval_ns = PELTON_FOREVER;
    OK(pelton_appenders_to_function(take, &all, &options, &appenders));
    OK(pelton_appenders_appender(appenders, &appender));
    while ((answer = pelton_appender_append(appender, numbered(room, 0, number, SIZE), SIZE)) == PELTON_OK) number++;
    RETURNS(answer, PELTON_SINK);
    CHECK(errno == EIO && number > 1 && all.calls == 0);
    errno = 0;
    /* A reservation that fails takes back the one before. */
    OK(pelton_appender_reserve(appender, 8, &place));
    FAILS(pelton_appender_reserve(appender, SIZE, &place), PELTON_SINK, "-5");
    CHECK(errno == EIO);
    RETURNS(pelton_appender_commit(appender, SIZE), PELTON_NOT_RESERVED);
    RETURNS(pelton_appenders_flush(appenders), PELTON_SINK);
    /* What was refused was not appended: tried again, it comes once. */
    all.refuses = 0;
    OK(pelton_appender_append(appender, numbered(room, 0, number, SIZE), SIZE));
    CHECK(all.messages == number);
    OK(pelton_appenders_sync(appenders));
    CHECK(all.messages == number + 1);
    /* The largest that a buffer takes, and one more. */
    size_t largest = (64 << 10) - 16;
    unsigned char *large = (unsigned char *)malloc(largest + 1);
    CHECK(large);
    OK(pelton_appender_append(appender, numbered(large, 0, number + 1, largest), largest));
    FAILS(pelton_appender_append(appender, large, largest + 1), PELTON_TOO_LARGE, "larger than");
    RETURNS(pelton_appender_reserve(appender, SIZE_MAX, &place), PELTON_TOO_LARGE);
    RETURNS(pelton_appenders_append(appenders, large, largest + 1), PELTON_TOO_LARGE);
    free(large);
    OK(pelton_close(appender));
    OK(pelton_close(appenders));
    CHECK(all.messages == number + 2);
}

/* By the library's own thread, and then by the thread that flushes. */
static int refuse_once(void *context, const pelton_chunk *chunks, size_t count) {
    (void)chunks, (void)count;
    return __atomic_fetch_add((int *)context, 1, __ATOMIC_ACQ_REL) == 0 ? -ENOSPC : 0;
}

static void an_error_of_the_librarys_thread_is_reported_by_the_next_flush(void) {
    pelton_appenders_options options = PELTON_APPENDERS_OPTIONS_INIT;
    pelton_appenders *appenders;
    int calls = 0;
    options.flush_interval_ns = 1000000;
    OK(pelton_appenders_to_function(refuse_once, &calls, &options, &appenders));
    OK(pelton_appenders_append(appenders, "x", 1));
    while (__atomic_load_n(&calls, __ATOMIC_ACQUIRE) == 0) sched_yield();
    errno = 0;
    FAILS(pelton_appenders_flush(appenders), PELTON_SINK, "-28");
    CHECK(errno == ENOSPC);
    OK(pelton_appenders_flush(appenders));
    OK(pelton_close(appenders));
}

static void mistakes_get_codes(void) {
    pelton_appenders_options options = PELTON_APPENDERS_OPTIONS_INIT;
    pelton_appenders *appenders;
    pelton_appender *appender, *second;
    pelton_records *records;
    pelton_record record;
    void *room;
    note message = {0, 0};
    seen all = nothing_yet();
    RETURNS(pelton_appenders_to_function(NULL, NULL, NULL, &appenders), PELTON_NULL);
    RETURNS(pelton_appenders_to_record_file(NULL, NULL, NULL, &appenders), PELTON_NULL);
    RETURNS(pelton_appenders_to_record_file("/nowhere/at/all", NULL, NULL, NULL), PELTON_NULL);
    RETURNS(pelton_appenders_to_record_file("/nowhere/at/all", NULL, NULL, &appenders), PELTON_SYSTEM);
    CHECK(errno == ENOENT);
    options.flush_bytes = (1 << 30) + 1;
    FAILS(pelton_appenders_to_function(take, &all, &options, &appenders), PELTON_OPTION, "flush_bytes");
    options.flush_bytes = 0;
    RETURNS(pelton_appenders_to_function(take, &all, NULL, NULL), PELTON_NULL);
    options.appenders_max = 1;
    OK(pelton_appenders_to_function(take, &all, &options, &appenders));
    RETURNS(pelton_appenders_appender(NULL, &appender), PELTON_NULL);
    RETURNS(pelton_appenders_appender(appenders, NULL), PELTON_NULL);
    OK(pelton_appenders_appender(appenders, &appender));
    FAILS(pelton_appenders_appender(appenders, &second), PELTON_REFUSED, "raise lanes");
    RETURNS(pelton_appender_append(NULL, "x", 1), PELTON_NULL);
    RETURNS(pelton_appender_append(appender, NULL, 1), PELTON_NULL);
    RETURNS(pelton_appender_append((pelton_appender *)(void *)appenders, "x", 1), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_appenders_append((pelton_appenders *)(void *)appender, "x", 1), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_appenders_append(appenders, NULL, 1), PELTON_NULL);
    RETURNS(pelton_appender_reserve(appender, 1, NULL), PELTON_NULL);
    RETURNS(pelton_appender_reserve(NULL, 1, &room), PELTON_NULL);
    RETURNS(pelton_appender_commit(appender, 1), PELTON_NOT_RESERVED);
    RETURNS(pelton_appender_abort(NULL), PELTON_NULL);
    RETURNS(pelton_appenders_flush(NULL), PELTON_NULL);
    RETURNS(pelton_appenders_sync(NULL), PELTON_NULL);
    RETURNS(pelton_flush_flush(NULL), PELTON_NULL);
    RETURNS(pelton_flush_sync(NULL), PELTON_NULL);
    OK(pelton_close(NULL));
    OK(pelton_close(NULL));
    /* An appender goes on without what made it. */
    OK(pelton_close(appenders));
    RETURNS(pelton_appenders_flush(appenders), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_close(appenders), PELTON_CLOSED_HANDLE);
    OK(pelton_appender_append(appender, &message, sizeof message));
    OK(pelton_close(appender));
    CHECK(all.messages == 1);
    RETURNS(pelton_appender_append(appender, "x", 1), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_appender_reserve(appender, 1, &room), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_close(appender), PELTON_CLOSED_HANDLE);
    RETURNS(pelton_records_open(NULL, &records), PELTON_NULL);
    RETURNS(pelton_records_open("/dev/null", NULL), PELTON_NULL);
    FAILS(pelton_records_open("/dev/null", &records), PELTON_NOT_A_RECORD_FILE, "/dev/null");
    RETURNS(pelton_records_open("/nowhere/at/all", &records), PELTON_SYSTEM);
    CHECK(errno == ENOENT);
    RETURNS(pelton_records_next(NULL, &record), PELTON_NULL);
    OK(pelton_close(NULL));
}

static pelton_appenders *inherited;
static pelton_appender *inherited_appender;
static pelton_flush *inherited_flush;

static void use_handles_of_the_parent(const char *name) {
    void *room;
    (void)name;
    RETURNS(pelton_appenders_append(inherited, "x", 1), PELTON_FORKED);
    RETURNS(pelton_appenders_flush(inherited), PELTON_FORKED);
    RETURNS(pelton_appenders_sync(inherited), PELTON_FORKED);
    RETURNS(pelton_appender_append(inherited_appender, "x", 1), PELTON_FORKED);
    RETURNS(pelton_appender_reserve(inherited_appender, 1, &room), PELTON_FORKED);
    RETURNS(pelton_flush_flush(inherited_flush), PELTON_FORKED);
    RETURNS(pelton_flush_run(inherited_flush, SOON), PELTON_FORKED);
    RETURNS(pelton_close(inherited_appender), PELTON_FORKED);
    RETURNS(pelton_close(inherited), PELTON_FORKED);
    RETURNS(pelton_close(inherited_flush), PELTON_FORKED);
}

static void a_forked_child_flushes_nothing_of_its_parents(void) {
    pelton_appenders_options options = PELTON_APPENDERS_OPTIONS_INIT;
    pelton_sender *sender;
    note message = {0, 0};
    seen all = nothing_yet(), flushed = nothing_yet();
    /* No thread that flushes: a child has not got it, and what was that thread's would look lost there. */
    options.flush_interval_ns = PELTON_FOREVER;
    OK(pelton_appenders_to_function(take, &all, &options, &inherited));
    OK(pelton_appenders_appender(inherited, &inherited_appender));
    OK(pelton_appender_append(inherited_appender, &message, sizeof message));
    OK(pelton_flush_to_function(small_channel(&sender), take, &flushed, NULL, &inherited_flush));
    OK(pelton_sender_send(sender, &message, sizeof message, PELTON_NO_WAIT));
    finish(start(use_handles_of_the_parent, NULL));
    OK(pelton_appenders_flush(inherited));
    OK(pelton_flush_flush(inherited_flush));
    CHECK(all.messages == 1 && flushed.messages == 1);
    OK(pelton_close(inherited_appender));
    OK(pelton_close(inherited));
    OK(pelton_close(inherited_flush));
    OK(pelton_close(sender));
}

/* ---- Record files ------------------------------------------------------------------------------------------------ */

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
        OK(pelton_appender_append(appender, numbered(room, 0, number, 8 + number % 40), 8 + number % 40));
    }
}

static void what_is_in_a_record_file_is_read_back_while_it_grows(void) {
    char path[128];
    pelton_record_file_options file = PELTON_RECORD_FILE_OPTIONS_INIT;
    pelton_appenders_options options = PELTON_APPENDERS_OPTIONS_INIT;
    pelton_appenders *appenders, *second;
    pelton_appender *appender;
    pelton_records *records;
    uint32_t next = 0;
    place(path, "%s/log");
    file.sync_bytes = PELTON_EACH_WRITE;
    file.sync_interval_ns = SECONDS;
    options.flush_interval_ns = PELTON_FOREVER;
    OK(pelton_appenders_to_record_file(path, &file, &options, &appenders));
    FAILS(pelton_appenders_to_record_file(path, &file, &options, &second), PELTON_ROLE_TAKEN, "writer");
    OK(pelton_appenders_appender(appenders, &appender));
    OK(pelton_records_open(path, &records));
    RETURNS(read_on(records, &next), PELTON_AGAIN);
    for (uint32_t round = 1; round <= 5; round++) {
        append_some(appender, 1000 * (round - 1), 1000 * round);
        OK(round % 2 ? pelton_appenders_flush(appenders) : pelton_appenders_sync(appenders));
        RETURNS(read_on(records, &next), PELTON_AGAIN);
        CHECK(next == 1000 * round);
    }
    OK(pelton_close(appender));
    OK(pelton_close(appenders));
    RETURNS(read_on(records, &next), PELTON_AGAIN);
    OK(pelton_close(records));
    RETURNS(pelton_close(records), PELTON_CLOSED_HANDLE);
    CHECK(unlink(path) == 0);
}

static void a_torn_end_is_reported_and_cut_off_and_damage_is_skipped(void) {
    char path[128];
    pelton_appenders_options options = PELTON_APPENDERS_OPTIONS_INIT;
    pelton_appenders *appenders;
    pelton_appender *appender;
    pelton_records *records;
    pelton_record record;
    uint32_t next = 0;
    unsigned char byte;
    place(path, "%s/log");
    options.flush_interval_ns = PELTON_FOREVER;
    OK(pelton_appenders_to_record_file(path, NULL, &options, &appenders));
    OK(pelton_appenders_appender(appenders, &appender));
    off_t begin = size_of(path);
    append_some(appender, 0, 100);
    OK(pelton_appenders_flush(appenders));
    off_t whole = size_of(path);
    append_some(appender, 100, 200);
    OK(pelton_close(appender));
    OK(pelton_close(appenders));
    CHECK(begin < whole && whole < size_of(path) - 1 && truncate(path, size_of(path) - 1) == 0);
    OK(pelton_records_open(path, &records));
    FAILS(read_on(records, &next), PELTON_TORN, path);
    CHECK(next == 100);
    RETURNS(pelton_records_next(records, &record), PELTON_TORN);
    OK(pelton_close(records));
    /* The next writer continues after the intact part. */
    OK(pelton_appenders_to_record_file(path, NULL, &options, &appenders));
    CHECK(size_of(path) == whole);
    OK(pelton_appenders_append(appenders, "last", 4));
    OK(pelton_close(appenders));
    /* A bit of the first ones turned over. */
    int file = open(path, O_RDWR | O_CLOEXEC);
    CHECK(file >= 0 && pread(file, &byte, 1, whole - 1) == 1);
    byte ^= 1;
    CHECK(pwrite(file, &byte, 1, whole - 1) == 1 && close(file) == 0);
    OK(pelton_records_open(path, &records));
    FAILS(pelton_records_next(records, &record), PELTON_DAMAGED, "is whole");
    OK(pelton_records_next(records, &record));
    CHECK(record.size == 4 && memcmp(record.data, "last", 4) == 0);
    RETURNS(pelton_records_next(records, &record), PELTON_AGAIN);
    OK(pelton_close(records));
    CHECK(unlink(path) == 0);
}

static void a_file_that_would_be_too_large_is_followed_by_another(void) {
    char path[128], first[128];
    pelton_record_file_options file = PELTON_RECORD_FILE_OPTIONS_INIT;
    pelton_flush_options options = PELTON_FLUSH_OPTIONS_INIT;
    pelton_sender *sender;
    pelton_flush *flush;
    pelton_records *records;
    pelton_record record;
    place(first, "%s/log.000001");
    place(path, "%s/log");
    file.rotate_bytes = 4096;
    options.flush_interval_ns = PELTON_FOREVER;
    OK(pelton_flush_to_record_file(small_channel(&sender), path, &file, &options, &flush));
    static const char large[3000] = {0};
    for (int i = 0; i < 2; i++) {
        OK(pelton_sender_send(sender, large, sizeof large, PELTON_NO_WAIT));
        OK(pelton_flush_sync(flush));
    }
    OK(pelton_close(sender));
    OK(pelton_flush_run(flush, SOON));
    OK(pelton_close(flush));
    for (uint32_t i = 0; i < 2; i++) {
        OK(pelton_records_open(i ? path : first, &records));
        OK(pelton_records_next(records, &record));
        CHECK(record.size == sizeof large && record.seq == i + 1);
        RETURNS(pelton_records_next(records, &record), PELTON_AGAIN);
        OK(pelton_close(records));
        CHECK(unlink(i ? path : first) == 0);
    }
}

int main(void) {
    static const test tests[] = {
        TEST(everything_sent_comes_to_the_sink_up_to_the_end),
        TEST(a_sink_that_returns_a_negative_number_has_taken_nothing),
        TEST(a_deadline_ends_a_flush_which_can_continue),
        TEST(what_a_dead_sender_committed_is_in_the_sink_when_its_death_is_reported),
        TEST(a_receiver_that_cannot_be_flushed_is_unchanged),
        TEST(an_invalid_chunk_ends_early),
        TEST(what_many_threads_append_comes_to_the_sink_once_and_in_their_order),
        TEST(one_thread_flushes_while_others_append),
        TEST(what_is_reserved_is_seen_by_no_flush_until_it_is_committed),
        TEST(a_full_buffer_is_flushed_and_a_refusal_of_the_sink_is_reported),
        TEST(an_error_of_the_librarys_thread_is_reported_by_the_next_flush),
        TEST(mistakes_get_codes),
        TEST(a_forked_child_flushes_nothing_of_its_parents),
        TEST(what_is_in_a_record_file_is_read_back_while_it_grows),
        TEST(a_torn_end_is_reported_and_cut_off_and_damage_is_skipped),
        TEST(a_file_that_would_be_too_large_is_followed_by_another),
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
