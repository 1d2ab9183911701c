/* Every mistake with files that can be recognised, and the code that it gets. Run with and without PELTON_CHECK_THREADS. */
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
    OK(pelton_file_run(engine, &asked, PELTON_FOREVER, &out));
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
    REFUSES(pelton_file_run(engine, &asked, PELTON_FOREVER, &out), code, words);
    taken = 9;
    REFUSES(pelton_file_submit(engine, &asked, 1, &taken), code, words);
    CHECK(taken == 0);
}

static void null_is_refused_everywhere(void) {
    struct iovec memory = {NULL, 3};
    begin();
    asked.kind = PELTON_FILE_STAT;
    asked.path = "/";
    REFUSES(pelton_engine_open(NULL, NULL), PELTON_NULL, "out is NULL");
    REFUSES(pelton_file_run(NULL, &asked, PELTON_FOREVER, &out), PELTON_NULL, "engine is NULL");
    REFUSES(pelton_file_run(engine, NULL, PELTON_FOREVER, &out), PELTON_NULL, "operation is NULL");
    OK(pelton_file_run(engine, &asked, PELTON_FOREVER, NULL));
    REFUSES(pelton_file_submit(NULL, &asked, 1, &taken), PELTON_NULL, "engine");
    REFUSES(pelton_file_submit(engine, NULL, 1, &taken), PELTON_NULL, "operations");
    REFUSES(pelton_file_submit(engine, &asked, 1, NULL), PELTON_NULL, "taken");
    OK(pelton_file_submit(engine, NULL, 0, &taken));
    REFUSES(pelton_file_completions(NULL, PELTON_NO_WAIT, &out, 1, &taken), PELTON_NULL, "engine");
    REFUSES(pelton_file_completions(engine, PELTON_NO_WAIT, NULL, 1, &taken), PELTON_NULL, "out");
    REFUSES(pelton_file_completions(engine, PELTON_NO_WAIT, &out, 1, NULL), PELTON_NULL, "taken");
    REFUSES(pelton_file_cancel(NULL, 1), PELTON_NULL, "engine");
    REFUSES(pelton_file_from_fd(0, NULL, &file), PELTON_NULL, "name");
    REFUSES(pelton_file_from_fd(0, "x", NULL), PELTON_NULL, "out");
    asked.kind = PELTON_FILE_OPEN;
    REFUSES(pelton_file_run(engine, &asked, PELTON_FOREVER, NULL), PELTON_NULL, "out");
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
    is_refused(PELTON_OPTION, "but of a read or a write");
    asked.release = NULL;
    asked.memory = &memory;
    asked.memory_count = 1;
    is_refused(PELTON_OPTION, "but of a read or a write");
    asked.kind = PELTON_FILE_READ;
    asked.file = file;
    asked.offset = PELTON_AT_END;
    is_refused(PELTON_OPTION, "PELTON_AT_END");
    asked.offset = 0;
    memory.iov_len = SIZE_MAX;
    is_refused(PELTON_OPTION, "a piece of memory");
    /* Nor more in all, whether or not that can be counted. */
    for (size_t i = 0; i < 3; i++) pieces[i].iov_base = bytes, pieces[i].iov_len = SIZE_MAX / 2;
    asked.memory = pieces;
    asked.release = nothing;
    for (asked.memory_count = 2; asked.memory_count <= 3; asked.memory_count++) is_refused(PELTON_OPTION, "pieces of memory");
    CHECK(nothings == 0);
    ANSWERS(pelton_file_completions(engine, PELTON_NO_WAIT, &out, 0, &taken), PELTON_TOO_SMALL);
    ANSWERS(pelton_file_completions(engine, PELTON_NO_WAIT, &out, 1, &taken), PELTON_AGAIN);
    REFUSES(pelton_file_completions(engine, SOON, &out, 1, &taken), PELTON_REFUSED, "nothing is in flight");
    end();
}

static void what_comes_before_a_mistake_is_taken(void) {
    pelton_operation both[3];
    begin();
    memset(both, 0, sizeof both);
    both[0].kind = PELTON_FILE_STAT;
    both[0].path = "/";
    both[0].token = 5;
    REFUSES(pelton_file_submit(engine, both, 2, &taken), PELTON_OPTION, "kind is 0");
    CHECK(taken == 1);
    OK(pelton_file_completions(engine, SOON, &out, 1, &taken));
    CHECK(out.token == 5 && out.stat->kind == PELTON_DIRECTORY);
    /* Nothing of a chain with one. */
    both[0].flags = both[1].flags = PELTON_LINKED;
    both[1].kind = PELTON_FILE_CLOSE;
    both[1].file = file;
    both[2].kind = PELTON_FILE_SYNC;
    both[2].file = file;
    REFUSES(pelton_file_submit(engine, both, 3, &taken), PELTON_CLOSED_HANDLE, "closed earlier in the chain");
    CHECK(taken == 0);
    both[2].kind = 77;
    REFUSES(pelton_file_submit(engine, both, 3, &taken), PELTON_OPTION, "kind is 77");
    CHECK(taken == 0 && pelton_fd(file) >= 0);
    end();
}

static void options_that_cannot_be_are_refused(void) {
    pelton_options options = PELTON_OPTIONS_INIT;
    options.in_flight = 16385;
    REFUSES(pelton_engine_open(&options, &engine), PELTON_OPTION, "in_flight");
    options.in_flight = 0;
    options.threads = 1025;
    REFUSES(pelton_engine_open(&options, &engine), PELTON_OPTION, "threads");
    options.threads = 0;
    options.struct_bytes = 3;
    REFUSES(pelton_engine_open(&options, &engine), PELTON_OPTION, "struct_bytes");
}

static void handles_of_another_kind_and_closed_ones_are_recognised(void) {
    int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    begin();
    REFUSES(pelton_arm(file), PELTON_CLOSED_HANDLE, "the handle is a pelton_file");
    REFUSES(pelton_drain(file, PELTON_NO_WAIT), PELTON_CLOSED_HANDLE, "pelton_file");
    REFUSES(pelton_release(engine), PELTON_CLOSED_HANDLE, "pelton_engine");
    REFUSES(pelton_sync(file), PELTON_CLOSED_HANDLE, "pelton_file");
    asked.kind = PELTON_FILE_SYNC;
    asked.file = (pelton_file *)(void *)engine;
    is_refused(PELTON_CLOSED_HANDLE, "pelton_engine");
    REFUSES(pelton_file_run((pelton_engine *)(void *)file, &asked, PELTON_FOREVER, &out), PELTON_CLOSED_HANDLE, "pelton_file");
    CHECK(fd >= 0);
    OK(pelton_close(file));
    OK(pelton_file_from_fd(fd, "null", &file));
    CHECK(pelton_fd(file) == fd);
    OK(pelton_close(file));
    asked.file = file;
    is_refused(PELTON_CLOSED_HANDLE, "closed");
    ANSWERS(pelton_close(file), PELTON_CLOSED_HANDLE);
    REFUSES(pelton_file_from_fd(fd, "closed", &file), PELTON_SYSTEM, "not open");
    CHECK(errno == EBADF);
    OK(pelton_close(engine));
    REFUSES(pelton_file_cancel(engine, 1), PELTON_CLOSED_HANDLE, "the pelton_engine is closed");
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
    asked.channel = receiver;
    is_refused(PELTON_CLOSED_HANDLE, "the handle is a pelton_receiver, wanted a pelton_sender");
    asked.channel = sender;
    OK(pelton_reserve(sender, 10, PELTON_NO_WAIT, &room));
    is_refused(PELTON_RESERVED, "commit or abort");
    OK(pelton_commit(sender, 3));
    asked.kind = PELTON_FILE_RECEIVE;
    is_refused(PELTON_CLOSED_HANDLE, "wanted a pelton_receiver");
    asked.channel = receiver;
    OK(pelton_receive(receiver, PELTON_NO_WAIT, &message));
    is_refused(PELTON_NOT_RELEASED, "release or hold");
    OK(pelton_release(receiver));
    OK(pelton_close(receiver));
    is_refused(PELTON_CLOSED_HANDLE, "the pelton_receiver is closed");
    asked.kind = PELTON_FILE_SEND;
    asked.channel = sender;
    asked.memory_count = 1;
    is_refused(PELTON_OPTION, "but of a read or a write");
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
