/* Every mistake with files that can be recognised, and the code that it gets. Run with and without
 * PELTON_CHECK_THREADS. */
#include "check.h"

static pelton_engine *engine;
static pelton_file *file;
static pelton_operation asked;
static pelton_file_completion out;
static size_t taken;

static void begin(void) {
    char path[128];
    OK(pelton_engine_open(NULL, &engine));
    memset(&asked, 0, sizeof asked);
    asked.kind = PELTON_FILE_OPEN;
    asked.path = place(path, "%s/file");
    asked.open_flags = O_RDWR | O_CREAT;
    asked.mode = 0600;
    OK(pelton_engine_run(engine, &asked, PELTON_FOREVER, &out));
    file = out.file;
    CHECK(unlink(path) == 0);
    memset(&asked, 0, sizeof asked);
}

static void end(void) {
    OK(pelton_close(file));
    OK(pelton_close(engine));
}

/* Of whichever way it is asked. */
static void is_refused(int code, const char *words) {
    FAILS(pelton_engine_run(engine, &asked, PELTON_FOREVER, &out), code, words);
    taken = 9;
    FAILS(pelton_engine_submit(engine, &asked, 1, &taken), code, words);
    CHECK(taken == 0);
}

static void null_is_refused_everywhere(void) {
    struct iovec memory = {NULL, 3};
    begin();
    asked.kind = PELTON_FILE_STAT;
    asked.path = "/";
    FAILS(pelton_engine_open(NULL, NULL), PELTON_NULL, "out is NULL");
    FAILS(pelton_engine_run(NULL, &asked, PELTON_FOREVER, &out), PELTON_NULL, "engine is NULL");
    FAILS(pelton_engine_run(engine, NULL, PELTON_FOREVER, &out), PELTON_NULL, "operation is NULL");
    OK(pelton_engine_run(engine, &asked, PELTON_FOREVER, NULL));
    FAILS(pelton_engine_submit(NULL, &asked, 1, &taken), PELTON_NULL, "engine");
    FAILS(pelton_engine_submit(engine, NULL, 1, &taken), PELTON_NULL, "operations");
    FAILS(pelton_engine_submit(engine, &asked, 1, NULL), PELTON_NULL, "taken");
    OK(pelton_engine_submit(engine, NULL, 0, &taken));
    FAILS(pelton_engine_completions(NULL, PELTON_NO_WAIT, &out, 1, &taken), PELTON_NULL, "engine");
    FAILS(pelton_engine_completions(engine, PELTON_NO_WAIT, NULL, 1, &taken), PELTON_NULL, "out");
    FAILS(pelton_engine_completions(engine, PELTON_NO_WAIT, &out, 1, NULL), PELTON_NULL, "taken");
    FAILS(pelton_engine_cancel(NULL, 1), PELTON_NULL, "engine");
    FAILS(pelton_file_from_fd(0, NULL, &file), PELTON_NULL, "name");
    FAILS(pelton_file_from_fd(0, "x", NULL), PELTON_NULL, "out");
    asked.kind = PELTON_FILE_OPEN;
    FAILS(pelton_engine_run(engine, &asked, PELTON_FOREVER, NULL), PELTON_NULL, "out");
    asked.path = NULL;
    is_refused(PELTON_NULL, "operation.path is NULL");
    asked.kind = PELTON_FILE_RENAME;
    asked.path = "x";
    is_refused(PELTON_NULL, "operation.path_to is NULL");
    asked.kind = PELTON_FILE_STAT;
    asked.path = NULL;
    is_refused(PELTON_NULL, "operation.path is NULL");
    asked.kind = PELTON_FILE_SYNC;
    is_refused(PELTON_NULL, "file is NULL");
    asked.kind = PELTON_FILE_COPY;
    asked.file = file;
    is_refused(PELTON_NULL, "file is NULL");
    asked.kind = PELTON_FILE_SEND;
    is_refused(PELTON_NULL, "sender is NULL");
    asked.kind = PELTON_FILE_RECEIVE;
    is_refused(PELTON_NULL, "receiver is NULL");
    asked.kind = PELTON_FILE_READ;
    asked.memory_count = 1;
    is_refused(PELTON_NULL, "operation.memory is NULL");
    asked.memory = &memory;
    is_refused(PELTON_NULL, "a piece of operation.memory is NULL");
    end();
}

static int nothings;

static void nothing(void *context) {
    (void)context;
    nothings++;
}

static void an_operation_that_cannot_be_is_refused(void) {
    char bytes[10];
    struct iovec memory = {bytes, sizeof bytes}, pieces[3];
    begin();
    is_refused(PELTON_OPTION, "kind is 0");
    asked.kind = PELTON_FILE_RECEIVE + 1;
    is_refused(PELTON_OPTION, "kind is 23");
    asked.kind = PELTON_FILE_STAT;
    asked.path = "/";
    asked.flags = 2;
    is_refused(PELTON_OPTION, "flags is 2");
    asked.flags = PELTON_LINKED;
    is_refused(PELTON_OPTION, "PELTON_LINKED");
    asked.flags = 0;
    asked.release = nothing;
    is_refused(PELTON_OPTION, "only a read or a write");
    asked.release = NULL;
    asked.memory = &memory;
    asked.memory_count = 1;
    is_refused(PELTON_OPTION, "only a read or a write");
    asked.kind = PELTON_FILE_READ;
    asked.file = file;
    asked.offset = PELTON_AT_END;
    is_refused(PELTON_OPTION, "PELTON_AT_END");
    asked.offset = 0;
    memory.iov_len = SIZE_MAX;
    is_refused(PELTON_OPTION, "no more bytes than can exist");
    /* Nor more in all, whether or not that can be counted. */
    for (size_t i = 0; i < 3; i++) pieces[i].iov_base = bytes, pieces[i].iov_len = SIZE_MAX / 2;
    asked.memory = pieces;
    asked.release = nothing;
    for (asked.memory_count = 2; asked.memory_count <= 3; asked.memory_count++) is_refused(PELTON_OPTION, "no more bytes than can exist");
    CHECK(nothings == 0);
    RETURNS(pelton_engine_completions(engine, PELTON_NO_WAIT, &out, 0, &taken), PELTON_TOO_SMALL);
    RETURNS(pelton_engine_completions(engine, PELTON_NO_WAIT, &out, 1, &taken), PELTON_AGAIN);
    FAILS(pelton_engine_completions(engine, SOON, &out, 1, &taken), PELTON_REFUSED, "nothing is in flight");
    end();
}

static void what_comes_before_a_mistake_is_taken(void) {
    pelton_operation both[3];
    begin();
    memset(both, 0, sizeof both);
    both[0].kind = PELTON_FILE_STAT;
    both[0].path = "/";
    both[0].token = 5;
    FAILS(pelton_engine_submit(engine, both, 2, &taken), PELTON_OPTION, "kind is 0");
    CHECK(taken == 1);
    OK(pelton_engine_completions(engine, SOON, &out, 1, &taken));
    CHECK(out.token == 5 && out.stat->kind == PELTON_DIRECTORY);
    /* Nothing of a chain with one. */
    both[0].flags = both[1].flags = PELTON_LINKED;
    both[1].kind = PELTON_FILE_CLOSE;
    both[1].file = file;
    both[2].kind = PELTON_FILE_SYNC;
    both[2].file = file;
    FAILS(pelton_engine_submit(engine, both, 3, &taken), PELTON_CLOSED_HANDLE, "closes the file");
    CHECK(taken == 0);
    both[2].kind = 77;
    FAILS(pelton_engine_submit(engine, both, 3, &taken), PELTON_OPTION, "kind is 77");
    CHECK(taken == 0 && pelton_file_fd(file) >= 0);
    end();
}

static void options_that_cannot_be_are_refused(void) {
    pelton_engine_options options = PELTON_ENGINE_OPTIONS_INIT;
    options.in_flight_max = 16385;
    FAILS(pelton_engine_open(&options, &engine), PELTON_OPTION, "in_flight");
    options.in_flight_max = 0;
    options.threads_max = 1025;
    FAILS(pelton_engine_open(&options, &engine), PELTON_OPTION, "threads");
    options.threads_max = 0;
    options.struct_bytes = 3;
    FAILS(pelton_engine_open(&options, &engine), PELTON_OPTION, "struct_bytes");
}

static void handles_of_another_kind_and_closed_ones_are_recognised(void) {
    int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    begin();
    asked.kind = PELTON_FILE_SYNC;
    asked.file = (pelton_file *)(void *)engine;
    is_refused(PELTON_CLOSED_HANDLE, "pelton_engine");
    FAILS(pelton_engine_run((pelton_engine *)(void *)file, &asked, PELTON_FOREVER, &out), PELTON_CLOSED_HANDLE, "pelton_file");
    CHECK(fd >= 0);
    OK(pelton_close(file));
    OK(pelton_file_from_fd(fd, "null", &file));
    CHECK(pelton_file_fd(file) == fd);
    OK(pelton_close(file));
    asked.file = file;
    is_refused(PELTON_CLOSED_HANDLE, "closed");
    RETURNS(pelton_close(file), PELTON_CLOSED_HANDLE);
    FAILS(pelton_file_from_fd(fd, "closed", &file), PELTON_SYSTEM, "not open");
    CHECK(errno == EBADF);
    OK(pelton_close(engine));
    FAILS(pelton_engine_cancel(engine, 1), PELTON_CLOSED_HANDLE, "the handle is a closed pelton_engine");
}

static void an_end_of_a_channel_that_cannot_be_had_is_refused(void) {
    pelton_sender *sender;
    pelton_receiver *receiver;
    pelton_message message;
    void *room;
    begin();
    OK(pelton_threads(NULL, &sender, &receiver));
    asked.file = file;
    asked.bytes = asked.message_bytes = 10;
    asked.kind = PELTON_FILE_SEND;
    asked.sender = (pelton_sender *)(void *)receiver;
    is_refused(PELTON_CLOSED_HANDLE, "the handle is a pelton_receiver, wanted an open pelton_sender");
    asked.sender = sender;
    OK(pelton_sender_reserve(sender, 10, PELTON_NO_WAIT, &room));
    is_refused(PELTON_RESERVED, "commit or abort");
    OK(pelton_sender_commit(sender, 3));
    asked.kind = PELTON_FILE_RECEIVE;
    asked.sender = NULL;
    asked.receiver = (pelton_receiver *)(void *)sender;
    is_refused(PELTON_CLOSED_HANDLE, "wanted an open pelton_receiver");
    asked.receiver = receiver;
    OK(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message));
    is_refused(PELTON_NOT_RELEASED, "release or hold");
    OK(pelton_receiver_release(receiver));
    OK(pelton_close(receiver));
    is_refused(PELTON_CLOSED_HANDLE, "the handle is a closed pelton_receiver");
    asked.kind = PELTON_FILE_SEND;
    asked.receiver = NULL;
    asked.sender = sender;
    asked.memory_count = 1;
    is_refused(PELTON_OPTION, "only a read or a write");
    OK(pelton_close(sender));
    end();
}

static const test tests[] = {
    TEST(null_is_refused_everywhere),
    TEST(an_operation_that_cannot_be_is_refused),
    TEST(what_comes_before_a_mistake_is_taken),
    TEST(options_that_cannot_be_are_refused),
    TEST(an_end_of_a_channel_that_cannot_be_had_is_refused),
    TEST(handles_of_another_kind_and_closed_ones_are_recognised),
};

int main(void) { return run_tests(tests, sizeof tests / sizeof *tests); }
