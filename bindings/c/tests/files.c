/* Files: every operation, waited for and submitted; chains, cancels, bounds, event loops, roots; and memory, which is
 * the caller's again exactly once, whatever becomes of its operation. */
#include "check.h"
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

static pelton_engine *engine;
static char path[128], other[128];

static void begin(void) {
    OK(pelton_engine_open(NULL, &engine));
    place(path, "%s/file");
    place(other, "%s/other");
}

static void end(void) {
    OK(pelton_close(engine));
    engine = NULL;
}

static pelton_operation operation(uint32_t kind) {
    pelton_operation made;
    memset(&made, 0, sizeof made);
    made.kind = kind;
    return made;
}

static pelton_operation of_path(uint32_t kind, const char *at, const char *to) {
    pelton_operation made = operation(kind);
    made.path = at;
    made.path_to = to;
    return made;
}

static pelton_operation of_file(uint32_t kind, pelton_file *file) {
    pelton_operation made = operation(kind);
    made.file = file;
    return made;
}

static pelton_operation transfer(uint32_t kind, pelton_file *file, const struct iovec *memory, size_t count, uint64_t offset) {
    pelton_operation made = of_file(kind, file);
    made.memory = memory;
    made.memory_count = count;
    made.offset = offset;
    return made;
}

/* Not under a valgrind that does not know it. */
static int has_openat2(void) {
    return syscall(437, -1, NULL, NULL, 0) == -1 && errno != ENOSYS;
}

/* Whether operations are submitted, or run. */
static int submits;

static int done(const pelton_operation *asked, pelton_file_completion *out) {
    size_t taken = 0;
    if (!submits) return pelton_engine_run(engine, asked, PELTON_FOREVER, out);
    OK(pelton_engine_submit(engine, asked, 1, &taken));
    CHECK(taken == 1);
    OK(pelton_engine_completions(engine, SOON, out, 1, &taken));
    CHECK(taken == 1 && out->token == asked->token);
    if (out->code == PELTON_SYSTEM) errno = out->error;
    return out->code;
}

static pelton_file_completion did(pelton_operation asked) {
    pelton_file_completion out;
    OK(done(&asked, &out));
    return out;
}

static int failed(pelton_operation asked) {
    pelton_file_completion out;
    memset(&out, 0, sizeof out);
    RETURNS(done(&asked, &out), PELTON_SYSTEM);
    CHECK(out.code == PELTON_SYSTEM && out.error == errno && !out.file && !out.stat && !out.text);
    return out.error;
}

static pelton_file *opened(const char *at, int flags) {
    pelton_operation open = of_path(PELTON_FILE_OPEN, at, NULL);
    open.open_flags = (uint32_t)flags;
    open.mode = 0640;
    return did(open).file;
}

static size_t next(pelton_file_completion *out) {
    size_t taken = 0;
    OK(pelton_engine_completions(engine, SOON, out, 1, &taken));
    return taken;
}

static void operations_do_what_they_say(void) {
    char bytes[64], long_text[5000];
    struct iovec one = {bytes, 5}, two[3] = {{bytes, 3}, {NULL, 0}, {bytes + 10, 4}};
    struct stat found;
    pelton_operation asked;
    pelton_file *file;
    begin();
    file = opened(path, O_RDWR | O_CREAT | O_EXCL);
    CHECK(stat(path, &found) == 0 && S_ISREG(found.st_mode));
    CHECK(fcntl(pelton_file_fd(file), F_GETFD) == FD_CLOEXEC);
    memcpy(bytes, "hello", 5);
    CHECK(did(transfer(PELTON_FILE_WRITE, file, &one, 1, 2)).count == 5);
    CHECK(did(transfer(PELTON_FILE_WRITE, file, &one, 1, PELTON_AT_END)).count == 5);
    memset(bytes, 0, sizeof bytes);
    CHECK(did(transfer(PELTON_FILE_READ, file, two, 3, 2)).count == 7);
    CHECK(memcmp(bytes, "hel", 3) == 0 && memcmp(bytes + 10, "lohe", 4) == 0);
    /* The position of its own: it moves. */
    one.iov_len = 4;
    CHECK(did(transfer(PELTON_FILE_READ, file, &one, 1, PELTON_CURRENT)).count == 4 && memcmp(bytes, "\0\0he", 4) == 0);
    CHECK(did(transfer(PELTON_FILE_READ, file, two, 3, PELTON_CURRENT)).count == 7 && memcmp(bytes, "llo", 3) == 0);
    CHECK(did(transfer(PELTON_FILE_READ, file, &one, 1, PELTON_CURRENT)).count == 1);
    CHECK(did(transfer(PELTON_FILE_READ, file, NULL, 0, 0)).count == 0);
    two[0].iov_len = 1;
    CHECK(did(transfer(PELTON_FILE_WRITE, file, two, 3, PELTON_AT_END)).count == 5);
    CHECK(did(transfer(PELTON_FILE_WRITE, file, two, 3, PELTON_CURRENT)).count == 5);
    CHECK(did(transfer(PELTON_FILE_WRITE, file, two, 3, 0)).count == 5);

    did(of_file(PELTON_FILE_SYNC, file));
    did(of_file(PELTON_FILE_SYNC_DATA, file));
    asked = of_file(PELTON_FILE_TRUNCATE, file);
    asked.bytes = 10;
    did(asked);
    CHECK(did(of_file(PELTON_FILE_STAT, file)).stat->bytes == 10);
    asked = of_file(PELTON_FILE_ALLOCATE, file);
    asked.bytes = 4096;
    did(asked);
    asked = of_path(PELTON_FILE_SET_TIMES, path, NULL);
    asked.accessed_ns = INT64_C(-1500000000);
    asked.modified_ns = INT64_C(1700000000000000005);
    did(asked);
    asked.accessed_ns = PELTON_UNCHANGED;
    did(asked);
    {
        pelton_stat is = *did(of_path(PELTON_FILE_STAT, path, NULL)).stat;
        CHECK(stat(path, &found) == 0);
        CHECK(is.kind == PELTON_REGULAR && is.bytes == 4096 && is.links == 1 && is.inode == found.st_ino);
        CHECK(is.modified_ns == INT64_C(1700000000000000005) && is.accessed_ns == INT64_C(-1500000000));
        CHECK(is.mode == (found.st_mode & 07777) && is.uid == found.st_uid && is.gid == found.st_gid);
        CHECK(is.allocated_bytes == (uint64_t)found.st_blocks * 512 && is.changed_ns > is.modified_ns);
    }

    /* Names. */
    did(of_path(PELTON_FILE_LINK, path, other));
    CHECK(did(of_path(PELTON_FILE_STAT, other, NULL)).stat->links == 2);
    did(of_path(PELTON_FILE_UNLINK, other, NULL));
    did(of_path(PELTON_FILE_SYMLINK, "file", other));
    CHECK(did(of_path(PELTON_FILE_STAT_LINK, other, NULL)).stat->kind == PELTON_SYMBOLIC_LINK);
    CHECK(did(of_path(PELTON_FILE_STAT, other, NULL)).stat->kind == PELTON_REGULAR);
    {
        pelton_file_completion says = did(of_path(PELTON_FILE_READ_LINK, other, NULL));
        CHECK(says.text_size == 4 && strcmp(says.text, "file") == 0);
    }
    did(of_path(PELTON_FILE_RENAME, path, other));
    CHECK(access(path, F_OK) != 0);
    asked = of_path(PELTON_FILE_MAKE_DIRECTORY, path, NULL);
    asked.mode = 0700;
    did(asked);
    CHECK(did(of_path(PELTON_FILE_STAT, path, NULL)).stat->kind == PELTON_DIRECTORY);
    did(of_path(PELTON_FILE_REMOVE_DIRECTORY, path, NULL));
    {
        /* From one file to another. */
        pelton_file *to = opened(path, O_RDWR | O_CREAT);
        memset(long_text, 'x', sizeof long_text);
        one.iov_base = long_text;
        one.iov_len = sizeof long_text;
        CHECK(did(transfer(PELTON_FILE_WRITE, file, &one, 1, 0)).count == 5000);
        asked = of_file(PELTON_FILE_COPY, file);
        asked.to = to;
        asked.offset = 1000;
        asked.offset_to = 1;
        asked.bytes = UINT64_MAX >> 1;
        CHECK(did(asked).count == 4000);
        CHECK(did(of_file(PELTON_FILE_STAT, to)).stat->bytes == 4001);
        did(of_file(PELTON_FILE_CLOSE, to));
        RETURNS(pelton_file_fd(to), PELTON_CLOSED_HANDLE);
    }
    /* What fails says by which number. */
    CHECK(failed(of_path(PELTON_FILE_STAT, "/nowhere/at/all", NULL)) == ENOENT);
    CHECK(failed(of_path(PELTON_FILE_UNLINK, here, NULL)) == EISDIR);
    CHECK(failed(of_path(PELTON_FILE_READ_LINK, path, NULL)) == EINVAL);
    CHECK(failed(of_file(PELTON_FILE_LIST, file)) == ENOTDIR);
    asked = of_path(PELTON_FILE_OPEN, path, NULL);
    asked.open_flags = O_RDWR | O_CREAT | O_EXCL;
    CHECK(failed(asked) == EEXIST);
    asked.open_flags = O_RDONLY;
    asked.resolve = 0x01; /* RESOLVE_NO_XDEV */
    asked.path = "/proc/self/status";
    if (has_openat2()) CHECK(failed(asked) == EXDEV);
    OK(pelton_close(file));
    CHECK(unlink(path) == 0 && unlink(other) == 0);
    end();
}

static void each_operation_does_what_it_says_run_and_submitted(void) {
    for (submits = 0; submits < 2; submits++) operations_do_what_they_say();
    submits = 0;
}

static void a_directory_is_listed_in_batches(void) {
    char name[200];
    size_t found = 0, batches = 0, sum = 0;
    pelton_file *directory;
    begin();
    CHECK(mkdir(path, 0700) == 0);
    for (int i = 0; i < 1500; i++) {
        snprintf(name, sizeof name, "%s/a-name-that-is-not-short-%d", path, i);
        int fd = open(name, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
        CHECK(fd >= 0 && close(fd) == 0);
    }
    directory = opened(path, O_RDONLY | O_DIRECTORY);
    for (;;) {
        pelton_file_completion list = did(of_file(PELTON_FILE_LIST, directory));
        pelton_entry entry;
        size_t at = 0, before = found;
        while (pelton_entry_next(&list, &at, &entry)) {
            CHECK(strncmp(entry.name, "a-name-that-is-not-short-", 25) == 0 && entry.inode && !entry.reserved);
            CHECK(entry.kind == PELTON_REGULAR || entry.kind == PELTON_UNKNOWN);
            sum += (size_t)atoi(entry.name + 25);
            found++;
        }
        CHECK(at == list.text_size);
        if (found == before) break;
        batches++;
    }
    CHECK(found == 1500 && sum == 1500 * 1499 / 2 && batches > 1);
    OK(pelton_close(directory));
    for (int i = 0; i < 1500; i++) {
        snprintf(name, sizeof name, "%s/a-name-that-is-not-short-%d", path, i);
        CHECK(unlink(name) == 0);
    }
    CHECK(rmdir(path) == 0);
    end();
}

static int readable(int timeout) {
    struct pollfd watched = {pelton_engine_fd(engine), POLLIN, 0};
    return poll(&watched, 1, timeout);
}

#define MANY 300
static void a_loop_does_many_at_a_time_and_each_comes_back_with_its_token(void) {
    static char bytes[MANY][4096];
    struct iovec memory[MANY];
    pelton_operation asked[MANY];
    pelton_file_completion out[7];
    char seen[MANY] = {0};
    pelton_engine_info info;
    size_t taken;
    pelton_file *file;
    begin();
    file = opened(path, O_RDWR | O_CREAT);
    OK(pelton_engine_arm(engine));
    for (int reads = 0; reads < 2; reads++) {
        for (int i = 0; i < MANY; i++) {
            memset(bytes[i], reads ? 0 : i, 4096);
            memory[i].iov_base = bytes[i];
            memory[i].iov_len = 4096;
            asked[i] = transfer(reads ? PELTON_FILE_READ : PELTON_FILE_WRITE, file, &memory[i], 1, (uint64_t)i * 4096);
            asked[i].token = (uint64_t)i;
        }
        OK(pelton_engine_submit(engine, asked, MANY, &taken));
        CHECK(taken == MANY);
        info.struct_bytes = sizeof info;
        OK(pelton_engine_get_info(engine, &info));
        CHECK(info.in_flight == MANY);
        memset(seen, 0, sizeof seen);
        for (size_t found = 0; found < MANY;) {
            if (pelton_engine_arm(engine) == PELTON_OK) CHECK(readable(60000) == 1);
            while (pelton_engine_completions(engine, PELTON_NO_WAIT, out, 7, &taken) == PELTON_OK) {
                CHECK(taken >= 1 && taken <= 7);
                for (size_t i = 0; i < taken; i++) {
                    CHECK(out[i].code == PELTON_OK && out[i].count == 4096 && out[i].error == 0 && out[i].token < MANY);
                    CHECK(!seen[out[i].token]++);
                }
                found += taken;
            }
        }
        RETURNS(pelton_engine_completions(engine, PELTON_NO_WAIT, out, 7, &taken), PELTON_AGAIN);
        OK(pelton_engine_arm(engine));
        CHECK(readable(0) == 0);
    }
    OK(pelton_engine_disarm(engine));
    for (int i = 0; i < MANY; i++) CHECK(bytes[i][0] == (char)i && bytes[i][4095] == (char)i);
    OK(pelton_close(file));
    CHECK(unlink(path) == 0);
    end();
}

static void an_armed_engine_begins_the_first_by_itself_and_has_the_loop_begin_the_rest(void) {
    char bytes[2] = {0};
    struct iovec memory[2] = {{bytes, 1}, {bytes + 1, 1}};
    pelton_operation asked[2];
    pelton_file_completion out;
    pelton_file *idle[2];
    size_t taken;
    int ends[2][2];
    begin();
    for (int i = 0; i < 2; i++) {
        CHECK(pipe2(ends[i], O_CLOEXEC) == 0);
        OK(pelton_file_from_fd(ends[i][0], "a pipe", &idle[i]));
        asked[i] = transfer(PELTON_FILE_READ, idle[i], &memory[i], 1, PELTON_CURRENT);
        asked[i].token = (uint64_t)i;
    }
    for (int round = 0; round < 3; round++) {
        OK(pelton_engine_arm(engine));
        CHECK(readable(0) == 0);
        OK(pelton_engine_submit(engine, &asked[0], 1, &taken));
        CHECK(readable(0) == 0);
        OK(pelton_engine_submit(engine, &asked[1], 1, &taken));
        /* The loop is to come, and begins it with whatever else there is by then. */
        CHECK(readable(0) == 1);
        if (round == 2) {
            /* Begun: it is readable for what has come, not for what is to begin. */
            OK(pelton_engine_arm(engine));
            CHECK(readable(0) == 0);
        }
        CHECK(write(ends[0][1], "a", 1) == 1 && write(ends[1][1], "b", 1) == 1);
        for (int i = 0; i < 2; i++) next(&out);
        CHECK(memcmp(bytes, "ab", 2) == 0);
    }
    /* Without another call of the engine. */
    OK(pelton_engine_arm(engine));
    OK(pelton_engine_submit(engine, &asked[0], 1, &taken));
    CHECK(write(ends[0][1], "c", 1) == 1);
    CHECK(readable(60000) == 1);
    next(&out);
    CHECK(out.token == 0 && out.count == 1 && bytes[0] == 'c');
    for (int i = 0; i < 2; i++) {
        OK(pelton_close(idle[i]));
        CHECK(close(ends[i][1]) == 0);
    }
    end();
}

static void polling_finds_a_completion_without_arming(void) {
    char byte = 0;
    struct iovec memory = {&byte, 1};
    pelton_file_completion out;
    pelton_operation asked;
    pelton_file *idle;
    size_t taken;
    int ends[2], code;
    begin();
    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    OK(pelton_file_from_fd(ends[0], "a pipe", &idle));
    RETURNS(pelton_engine_poll(engine), PELTON_AGAIN);
    asked = transfer(PELTON_FILE_READ, idle, &memory, 1, PELTON_CURRENT);
    OK(pelton_engine_submit(engine, &asked, 1, &taken));
    RETURNS(pelton_engine_poll(engine), PELTON_AGAIN);
    CHECK(write(ends[1], "x", 1) == 1);
    while ((code = pelton_engine_poll(engine)) == PELTON_AGAIN) sched_yield();
    OK(code);
    OK(pelton_engine_completions(engine, PELTON_NO_WAIT, &out, 1, &taken));
    CHECK(out.count == 1 && byte == 'x');
    OK(pelton_close(idle));
    CHECK(close(ends[1]) == 0);
    end();
}

static void a_chain_goes_on_until_something_fails(void) {
    char bytes[4] = "abc";
    struct iovec memory = {bytes, 3};
    pelton_file_completion out;
    size_t taken;
    pelton_file *file;
    pelton_engine_options options = PELTON_ENGINE_OPTIONS_INIT;
    pelton_operation asked[6];
    begin();
    OK(pelton_close(engine));
    options.in_flight_max = 4;
    OK(pelton_engine_open(&options, &engine));
    file = opened(path, O_RDWR | O_CREAT);
    asked[0] = transfer(PELTON_FILE_WRITE, file, &memory, 1, 0);
    asked[1] = of_path(PELTON_FILE_RENAME, path, other);
    asked[2] = of_path(PELTON_FILE_UNLINK, path, NULL);
    asked[3] = of_path(PELTON_FILE_UNLINK, other, NULL);
    for (int i = 0; i < 4; i++) {
        asked[i].token = (uint64_t)i;
        asked[i].flags = i < 3 ? PELTON_LINKED : 0;
    }
    asked[4] = of_path(PELTON_FILE_STAT, here, NULL);
    /* As many as there is room for; a chain whole or not at all. */
    OK(pelton_engine_submit(engine, asked, 5, &taken));
    CHECK(taken == 4);
    RETURNS(pelton_engine_submit(engine, asked + 4, 1, &taken), PELTON_AGAIN);
    CHECK(taken == 0);
    for (uint64_t i = 0; i < 4; i++) {
        next(&out);
        CHECK(out.token == i && out.code == (i < 2 ? PELTON_OK : PELTON_SYSTEM));
        CHECK(out.error == (i < 2 ? 0 : i == 2 ? ENOENT : ECANCELED));
    }
    CHECK(access(other, F_OK) == 0);
    OK(pelton_engine_submit(engine, asked + 4, 1, &taken));
    asked[0].flags = asked[1].flags = PELTON_LINKED;
    asked[1] = of_path(PELTON_FILE_STAT, here, NULL);
    asked[1].flags = PELTON_LINKED;
    asked[2] = asked[3] = of_path(PELTON_FILE_STAT, here, NULL);
    asked[2].flags = PELTON_LINKED;
    RETURNS(pelton_engine_submit(engine, asked, 4, &taken), PELTON_AGAIN);
    CHECK(taken == 0);
    OK(pelton_engine_wait_idle(engine, SOON));
    next(&out);
    CHECK(out.code == PELTON_OK && out.stat && out.stat->kind == PELTON_DIRECTORY);
    /* More than can ever be. */
    for (int i = 0; i < 6; i++) {
        asked[i] = of_path(PELTON_FILE_STAT, here, NULL);
        asked[i].flags = i < 5 ? PELTON_LINKED : 0;
    }
    FAILS(pelton_engine_submit(engine, asked, 6, &taken), PELTON_REFUSED, "in_flight_max");
    /* A file that is closed in a chain, by its only user. */
    asked[0] = of_file(PELTON_FILE_SYNC, file);
    asked[0].flags = PELTON_LINKED;
    asked[1] = of_file(PELTON_FILE_CLOSE, file);
    OK(pelton_engine_submit(engine, asked, 2, &taken));
    CHECK(taken == 2);
    for (int i = 0; i < 2; i++) {
        next(&out);
        CHECK(out.code == PELTON_OK);
    }
    RETURNS(pelton_close(file), PELTON_CLOSED_HANDLE);
    CHECK(unlink(other) == 0);
    end();
}

/* How often each was released. */
static int released[8];

static void release(void *context) { __atomic_fetch_add((int *)context, 1, __ATOMIC_RELEASE); }

static void await_release(int *times) {
    for (int i = 0; __atomic_load_n(times, __ATOMIC_ACQUIRE) == 0; i++) {
        pelton_file_completion out;
        size_t taken;
        CHECK(i < 60000);
        if (engine) RETURNS(pelton_engine_completions(engine, PELTON_NO_WAIT, &out, 1, &taken), PELTON_AGAIN);
        usleep(1000);
    }
    CHECK(*times == 1);
}

static void memory_is_released_once_whatever_becomes_of_its_operation(void) {
    static char bytes[8][5000];
    struct iovec memory[8], both[2];
    pelton_operation asked, chain[2];
    pelton_file_completion out;
    pelton_file *file, *idle;
    size_t taken;
    int ends[2], unread = 0;
    begin();
    memset(released, 0, sizeof released);
    file = opened(path, O_RDWR | O_CREAT);
    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    OK(pelton_file_from_fd(ends[0], "a pipe", &idle));
    for (int i = 0; i < 8; i++) memory[i].iov_base = bytes[i], memory[i].iov_len = sizeof bytes[i];
#define LENT(made, number) \
    (asked = made, asked.release = release, asked.context = &released[number], asked.token = number, &asked)
    /* Before the completion is answered; of several pieces once; also of one that fails. */
    OK(pelton_engine_submit(engine, LENT(transfer(PELTON_FILE_WRITE, file, &memory[0], 1, 0), 0), 1, &taken));
    next(&out);
    CHECK(released[0] == 1 && out.count == 5000);
    both[0] = memory[1];
    both[1] = memory[2];
    OK(pelton_engine_run(engine, LENT(transfer(PELTON_FILE_READ, file, both, 2, 0), 1), PELTON_FOREVER, NULL));
    CHECK(released[1] == 1);
    RETURNS(pelton_engine_run(engine, LENT(transfer(PELTON_FILE_READ, file, &memory[2], 1, UINT64_MAX - 7), 2), SOON, &out), PELTON_SYSTEM);
    CHECK(released[2] == 1 && out.error == EINVAL);
    /* Also where there is no memory. */
    OK(pelton_engine_run(engine, LENT(transfer(PELTON_FILE_WRITE, file, NULL, 0, 0), 7), SOON, &out));
    CHECK(released[7] == 1 && out.count == 0);
    /* What is not taken is not released. */
    asked.kind = 99;
    FAILS(pelton_engine_submit(engine, &asked, 1, &taken), PELTON_OPTION, "enum pelton_file_operation");
    CHECK(released[2] == 1);
    /* Cancelled; undone in a chain; given up by its deadline; left in flight. */
    OK(pelton_engine_submit(engine, LENT(transfer(PELTON_FILE_READ, idle, &memory[3], 1, PELTON_CURRENT), 3), 1, &taken));
    OK(pelton_engine_cancel(engine, 3));
    next(&out);
    CHECK(out.token == 3 && out.error == ECANCELED && released[3] == 1);
    RETURNS(pelton_engine_cancel(engine, 3), PELTON_AGAIN);
    chain[0] = of_path(PELTON_FILE_UNLINK, "/nowhere/at/all", NULL);
    chain[0].flags = PELTON_LINKED;
    chain[1] = *LENT(transfer(PELTON_FILE_WRITE, file, &memory[4], 1, 0), 4);
    OK(pelton_engine_submit(engine, chain, 2, &taken));
    next(&out), next(&out);
    CHECK(out.token == 4 && out.error == ECANCELED && released[4] == 1);
    RETURNS(pelton_engine_run(engine, LENT(transfer(PELTON_FILE_READ, idle, &memory[5], 1, PELTON_CURRENT), 5), pelton_deadline(1000000), NULL),
            PELTON_AGAIN);
    OK(pelton_engine_wait_idle(engine, SOON));
    CHECK(released[5] == 1);
    OK(pelton_engine_submit(engine, LENT(transfer(PELTON_FILE_READ, idle, &memory[6], 1, PELTON_CURRENT), 6), 1, &taken));
    /* Without a release it is waited for: by the deadline of what is run, and by closing. */
    asked = transfer(PELTON_FILE_READ, idle, &memory[7], 1, PELTON_CURRENT);
    RETURNS(pelton_engine_run(engine, &asked, pelton_deadline(1000000), NULL), PELTON_AGAIN);
    OK(pelton_engine_submit(engine, &asked, 1, &taken));
    end();
    await_release(&released[6]);
    /* A read that were still in flight would have taken these bytes when every other thread sleeps. */
    CHECK(write(ends[1], "12345", 5) == 5);
    await_sleep(getpid());
    CHECK(ioctl(ends[0], FIONREAD, &unread) == 0 && unread == 5);
    for (int i = 5; i < 8; i++)
        for (size_t at = 0; at < sizeof bytes[i]; at++) CHECK(bytes[i][at] == 0);
    for (int i = 0; i < 8; i++) CHECK(released[i] == 1);
    OK(pelton_close(idle));
    OK(pelton_close(file));
    CHECK(close(ends[1]) == 0 && unlink(path) == 0);
}

/* What is at a path, to be freed. */
static char *content(const char *at, size_t *size) {
    struct stat found;
    int fd = open(at, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0 && fstat(fd, &found) == 0);
    char *bytes = (char *)malloc((size_t)found.st_size + 1);
    CHECK(bytes && read(fd, bytes, (size_t)found.st_size) == (ssize_t)found.st_size && close(fd) == 0);
    *size = (size_t)found.st_size;
    return bytes;
}

/* With one of both endpoints. */
static pelton_operation pump(uint32_t kind, pelton_file *file, pelton_sender *sender, pelton_receiver *receiver, uint64_t bytes) {
    pelton_operation made = of_file(kind, file);
    made.sender = sender;
    made.receiver = receiver;
    made.bytes = bytes;
    made.message_bytes = 10000;
    made.token = kind;
    return made;
}

#define LARGE 3000001
static void a_file_goes_into_a_channel_and_out_of_one(void) {
    static char bytes[LARGE];
    struct iovec memory = {bytes, sizeof bytes};
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_operation both[3];
    pelton_file_completion out;
    pelton_message message;
    pelton_sender *sender;
    pelton_receiver *receiver;
    pelton_file *from, *to;
    size_t taken, size;
    begin();
    options.capacity = 1 << 20;
    OK(pelton_threads(&options, &sender, &receiver));
    from = opened(path, O_RDWR | O_CREAT);
    to = opened(other, O_RDWR | O_CREAT);
    for (size_t i = 0; i < LARGE; i++) bytes[i] = (char)(i * 7 + i / 1000);
    CHECK(did(transfer(PELTON_FILE_WRITE, from, &memory, 1, 0)).count == LARGE);

    /* Both ends at a time, the file in two parts, one after the other; until then they are no one else's. */
    both[0] = pump(PELTON_FILE_SEND, from, sender, NULL, 1000000);
    both[0].flags = PELTON_LINKED;
    both[1] = pump(PELTON_FILE_SEND, from, sender, NULL, UINT64_MAX);
    both[1].offset = 1000000;
    both[2] = pump(PELTON_FILE_RECEIVE, to, NULL, receiver, LARGE);
    both[2].offset = 3;
    OK(pelton_engine_submit(engine, both, 3, &taken));
    CHECK(taken == 3);
    FAILS(pelton_sender_send(sender, "x", 1, PELTON_NO_WAIT), PELTON_WRONG_THREAD, "an operation on a file uses the pelton_sender");
    FAILS(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message), PELTON_WRONG_THREAD, "the pelton_receiver");
    RETURNS(pelton_close(sender), PELTON_WRONG_THREAD);
    RETURNS(pelton_receiver_fd(receiver), PELTON_WRONG_THREAD);
    for (uint64_t sent = 0, i = 0; i < 3; i++) {
        next(&out);
        CHECK(out.code == PELTON_OK && out.error == 0);
        if (out.token == PELTON_FILE_RECEIVE) CHECK(out.count == LARGE);
        else sent += out.count;
        CHECK(sent == 0 || sent == 1000000 || sent == LARGE);
    }
    {
        char *found = content(other, &size);
        CHECK(size == LARGE + 3 && memcmp(found, "\0\0\0", 3) == 0 && memcmp(found + 3, bytes, LARGE) == 0);
        free(found);
    }
    /* Then they are the caller's again. A message that is too large for what is wanted stays. */
    OK(pelton_sender_send(sender, "one", 3, PELTON_NO_WAIT));
    OK(pelton_sender_send(sender, "two", 3, PELTON_NO_WAIT));
    both[0] = pump(PELTON_FILE_RECEIVE, to, NULL, receiver, 5);
    OK(pelton_engine_run(engine, &both[0], SOON, &out));
    CHECK(out.count == 3);
    OK(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message));
    CHECK(message.size == 3 && memcmp(message.data, "two", 3) == 0);
    OK(pelton_receiver_release(receiver));
    /* Messages of nothing would never be all. */
    both[0] = pump(PELTON_FILE_SEND, from, sender, NULL, 5);
    both[0].message_bytes = 0;
    CHECK(failed(both[0]) == EINVAL);
    OK(pelton_sender_send(sender, "x", 1, PELTON_NO_WAIT));
    OK(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message));
    OK(pelton_receiver_release(receiver));

    /* Given up at a deadline, cancelled, and by the engine's end: it is back at once, or with the completion, or with
     * the close. */
    both[0] = pump(PELTON_FILE_RECEIVE, to, NULL, receiver, 5);
    RETURNS(pelton_engine_run(engine, &both[0], pelton_deadline(1000000), &out), PELTON_AGAIN);
    RETURNS(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message), PELTON_AGAIN);
    OK(pelton_engine_submit(engine, both, 1, &taken));
    OK(pelton_engine_cancel(engine, PELTON_FILE_RECEIVE));
    next(&out);
    CHECK(out.code == PELTON_SYSTEM && out.error == ECANCELED);
    RETURNS(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message), PELTON_AGAIN);
    OK(pelton_engine_submit(engine, both, 1, &taken));
    OK(pelton_close(engine));
    OK(pelton_engine_open(NULL, &engine));
    RETURNS(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message), PELTON_AGAIN);

    /* The end of the channel: everything of the sender is written, the receiver's end is reported. */
    OK(pelton_sender_send(sender, "last", 4, PELTON_NO_WAIT));
    OK(pelton_close(sender));
    CHECK(did(pump(PELTON_FILE_RECEIVE, to, NULL, receiver, UINT64_MAX)).count == 4);
    OK(pelton_close(receiver));
    for (submits = 0; submits < 2; submits++) {
        OK(pelton_threads(&options, &sender, &receiver));
        OK(pelton_close(receiver));
        both[0] = pump(PELTON_FILE_SEND, from, sender, NULL, UINT64_MAX);
        int code = done(&both[0], &out);
        /* It may be reported after some messages that no receiver reads. */
        if (code == PELTON_OK) {
            CHECK(out.error == EPIPE && out.count > 0);
            code = done(&both[0], &out);
        }
        CHECK(code == PELTON_CLOSED && out.code == PELTON_CLOSED && out.error == 0);
        OK(pelton_close(sender));
    }
    submits = 0;
    OK(pelton_close(from));
    OK(pelton_close(to));
    CHECK(unlink(path) == 0 && unlink(other) == 0);
    end();
}

static void closing_waits_for_memory_also_where_waiting_is_refused(void) {
    static char bytes[64 << 20];
    struct iovec memory = {bytes, sizeof bytes};
    struct rlimit files, descriptors, limited;
    struct stat found;
    pelton_operation asked;
    pelton_file *file;
    size_t taken;
    CHECK(getrlimit(RLIMIT_FSIZE, &files) == 0 && getrlimit(RLIMIT_NOFILE, &descriptors) == 0);
    /* With a limit of file sizes a thread writes, which is not stopped in the middle. */
    limited = files;
    limited.rlim_cur = (rlim_t)1 << 40;
    if (files.rlim_cur < limited.rlim_cur) limited.rlim_cur = files.rlim_cur;
    CHECK(setrlimit(RLIMIT_FSIZE, &limited) == 0);
    begin();
    file = opened(path, O_RDWR | O_CREAT);
    asked = transfer(PELTON_FILE_WRITE, file, &memory, 1, 0);
    OK(pelton_engine_submit(engine, &asked, 1, &taken));
    do {
        sched_yield();
        CHECK(stat(path, &found) == 0);
    } while (found.st_size == 0);
    /* Then poll(2) answers EINVAL. */
    limited = descriptors;
    limited.rlim_cur = 0;
    CHECK(setrlimit(RLIMIT_NOFILE, &limited) == 0);
    OK(pelton_close(engine));
    engine = NULL;
    CHECK(stat(path, &found) == 0 && found.st_size == sizeof bytes);
    CHECK(setrlimit(RLIMIT_NOFILE, &descriptors) == 0 && setrlimit(RLIMIT_FSIZE, &files) == 0);
    OK(pelton_close(file));
    CHECK(unlink(path) == 0);
}

static void what_is_cut_short_says_by_what(void) {
    /* A pipe that nobody reads takes so much. */
    static char bytes[1 << 20];
    struct iovec memory = {bytes, sizeof bytes};
    pelton_operation asked;
    pelton_file_completion out;
    pelton_file *full;
    size_t taken;
    int ends[2];
    begin();
    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    OK(pelton_file_from_fd(ends[1], "a pipe", &full));
    asked = transfer(PELTON_FILE_WRITE, full, &memory, 1, PELTON_CURRENT);
    asked.token = 7;
    OK(pelton_engine_submit(engine, &asked, 1, &taken));
    struct pollfd room = {ends[0], POLLIN, 0};
    CHECK(poll(&room, 1, 60000) == 1);
    /* Until it is full. */
    for (struct pollfd more = {pelton_file_fd(full), POLLOUT, 0}; poll(&more, 1, 0) > 0;) sched_yield();
    OK(pelton_engine_cancel(engine, 7));
    next(&out);
    CHECK(out.code == PELTON_OK && out.error == ECANCELED && out.count > 0 && out.count < sizeof bytes);
    FAILS(pelton_engine_completions(engine, PELTON_FOREVER, &out, 1, &taken), PELTON_REFUSED, "nothing is in flight");
    OK(pelton_close(full));
    close(ends[0]);
    end();
}

static void below_a_root_nothing_leads_out(void) {
    pelton_engine_options options = PELTON_ENGINE_OPTIONS_INIT;
    pelton_engine *plain;
    pelton_file *file;
    if (!has_openat2()) {
        printf("not checked here, as openat2 is refused: ");
        return;
    }
    begin();
    plain = engine;
    CHECK(mkdir(path, 0700) == 0);
    options.root = path;
    OK(pelton_engine_open(&options, &engine));
    file = opened("inside", O_RDWR | O_CREAT);
    OK(pelton_close(file));
    CHECK(did(of_path(PELTON_FILE_STAT, "./inside", NULL)).stat->kind == PELTON_REGULAR);
    CHECK(failed(of_path(PELTON_FILE_STAT, "../file", NULL)) == EXDEV);
    CHECK(failed(of_path(PELTON_FILE_STAT, "/etc/passwd", NULL)) == EXDEV);
    CHECK(failed(of_path(PELTON_FILE_RENAME, "inside", "../outside")) == EXDEV);
    did(of_path(PELTON_FILE_UNLINK, "inside", NULL));
    OK(pelton_close(engine));
    options.root = "/nowhere/at/all";
    FAILS(pelton_engine_open(&options, &engine), PELTON_SYSTEM, "opening the root");
    CHECK(errno == ENOENT);
    engine = plain;
    CHECK(rmdir(path) == 0);
    end();
}

static void a_child_of_a_fork_has_no_part_in_it(void) {
    static char bytes[100];
    struct iovec memory = {bytes, sizeof bytes};
    pelton_operation asked;
    pelton_file_completion out;
    pelton_file *idle;
    size_t taken;
    int ends[2];
    begin();
    memset(released, 0, sizeof released);
    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    OK(pelton_file_from_fd(ends[0], "a pipe", &idle));
    OK(pelton_engine_submit(engine, LENT(transfer(PELTON_FILE_READ, idle, &memory, 1, PELTON_CURRENT), 0), 1, &taken));
    fflush(NULL);
    /* What a thread is given that has not run yet belongs to nobody in the child, which valgrind would count as
     * lost. */
    await_sleep(getpid());
    pid_t pid = fork();
    if (pid == 0) {
        alarm(100);
        RETURNS(pelton_engine_completions(engine, PELTON_NO_WAIT, &out, 1, &taken), PELTON_FORKED);
        RETURNS(pelton_engine_submit(engine, &asked, 1, &taken), PELTON_FORKED);
        RETURNS(pelton_close(engine), PELTON_FORKED);
        RETURNS(pelton_close(idle), PELTON_FORKED);
        CHECK(released[0] == 0);
        _exit(0);
    }
    finish(pid);
    CHECK(write(ends[1], "x", 1) == 1);
    next(&out);
    CHECK(out.count == 1 && bytes[0] == 'x' && released[0] == 1);
    OK(pelton_close(idle));
    CHECK(close(ends[1]) == 0);
    end();
}

static pelton_file *shared;

static void *reads_much(void *own) {
    pelton_engine *mine;
    char bytes[4096];
    struct iovec memory = {bytes, sizeof bytes};
    (void)own;
    OK(pelton_engine_open(NULL, &mine));
    for (int i = 0; i < 300; i++) {
        pelton_operation asked = transfer(PELTON_FILE_READ, shared, &memory, 1, (uint64_t)(i % 4) * 4096);
        pelton_file_completion out;
        size_t taken;
        if (i % 2) {
            OK(pelton_engine_run(mine, &asked, PELTON_FOREVER, &out));
        } else {
            OK(pelton_engine_submit(mine, &asked, 1, &taken));
            OK(pelton_engine_completions(mine, SOON, &out, 1, &taken));
        }
        CHECK(out.count == 4096 && bytes[0] == 'a' + i % 4 && bytes[4095] == 'a' + i % 4);
    }
    OK(pelton_close(mine));
    return NULL;
}

static void a_file_is_for_many_threads_each_with_its_engine(void) {
    static char bytes[4 * 4096];
    struct iovec memory = {bytes, sizeof bytes};
    pthread_t threads[4];
    begin();
    shared = opened(path, O_RDWR | O_CREAT);
    for (int i = 0; i < 4; i++) memset(bytes + i * 4096, 'a' + i, 4096);
    CHECK(did(transfer(PELTON_FILE_WRITE, shared, &memory, 1, 0)).count == sizeof bytes);
    for (int i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, reads_much, NULL) == 0);
    for (int i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    OK(pelton_close(shared));
    CHECK(unlink(path) == 0);
    end();
}

static const test tests[] = {
    TEST(each_operation_does_what_it_says_run_and_submitted),
    TEST(a_directory_is_listed_in_batches),
    TEST(a_loop_does_many_at_a_time_and_each_comes_back_with_its_token),
    TEST(a_chain_goes_on_until_something_fails),
    TEST(an_armed_engine_begins_the_first_by_itself_and_has_the_loop_begin_the_rest),
    TEST(polling_finds_a_completion_without_arming),
    TEST(memory_is_released_once_whatever_becomes_of_its_operation),
    TEST(a_file_goes_into_a_channel_and_out_of_one),
    TEST(closing_waits_for_memory_also_where_waiting_is_refused),
    TEST(what_is_cut_short_says_by_what),
    TEST(below_a_root_nothing_leads_out),
    TEST(a_child_of_a_fork_has_no_part_in_it),
    TEST(a_file_is_for_many_threads_each_with_its_engine),
};

int main(void) { return run_tests(tests, sizeof tests / sizeof *tests); }
