// A libuv loop that writes a file and syncs it while its timers should be on time: for `pelton-bench file loop` and
// `loop-timers`.
//
//   uvloop pelton|libuv-fs FILE PIECE_BYTES PIECES IN_FLIGHT SYNC_AFTER
//   uvloop idle SECONDS
//
// It writes PIECES pieces of ones, IN_FLIGHT at a time, and syncs the file after each SYNC_AFTER of them; or it is
// idle for SECONDS. It prints five numbers. The first is the longest CPU time, in microseconds, of the loop's thread
// from its return from the system until its callbacks have returned. The second is the same of iterations with context
// switches, the third of those that found no work. The fourth is the median lateness of its timers in microseconds,
// the fifth the elapsed seconds.
//
// After a context switch Linux may charge the loop for another thread's time. It (6.18, in a kernel without
// preemption) reads its clock when another thread should run. It does not read it again when the thread that copies in
// the kernel yields, milliseconds later. It then charges that time to the waiting thread. A trace of
// `sched_stat_runtime` shows this loop charged 1,341 us, 8 us after the switch to it. A virtual machine's host may
// also stop the loop, which shows in iterations without work as well.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pelton_uv.c>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <uv.h>

#define INTERVAL_MS 2
#define IN_FLIGHT_MAX 64
#define SYNCS_MAX 64
#define LATE_MAX (1 << 20)

static uv_loop_t *loop;
static uv_timer_t timer, end;
static uv_check_t check;
static uint64_t due, start_ns, returned_at;
static long switches_before;
static int found;
static double worst, worst_switched, worst_empty;
static uint32_t late[LATE_MAX];
static size_t timers;
static uint64_t piece_bytes, pieces, sync_after, next, unfinished;

static void fail(const char *what, const char *why) {
    fprintf(stderr, "uvloop: %s: %s\n", what, why);
    exit(1);
}

static uint64_t thread_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

// The thread's context switches, voluntary and involuntary.
static long switches(void) {
    struct rusage used;
    getrusage(RUSAGE_THREAD, &used);
    return used.ru_nvcsw + used.ru_nivcsw;
}

static void on_timer(uv_timer_t *handle) {
    uint64_t now = uv_hrtime();
    if (timers < LATE_MAX)
        late[timers++] = now > due ? (uint32_t)((now - due) / 1000) : 0;
    // The loop counts its timers from its own time, which is of whole milliseconds.
    due = (uv_now(loop) + INTERVAL_MS) * 1000000;
    uv_timer_start(handle, on_timer, INTERVAL_MS, 0);
}

// Replaces libc's: the kernel's own time at a wake-up, such as interrupt handlers, belongs to no callback.
int epoll_pwait(int epoll, struct epoll_event *events, int most, int milliseconds, const sigset_t *signals) {
    found = (int)syscall(SYS_epoll_pwait, epoll, events, most, milliseconds, signals, _NSIG / 8);
    int error = errno;
    switches_before = switches();
    returned_at = thread_ns();
    errno = error;
    return found;
}

int epoll_wait(int epoll, struct epoll_event *events, int most, int milliseconds) {
    return epoll_pwait(epoll, events, most, milliseconds, NULL);
}

static void on_check(uv_check_t *handle) {
    (void)handle;
    double spent = (double)(thread_ns() - returned_at) / 1000;
    double *longest = switches() != switches_before ? &worst_switched : found > 0 ? &worst : &worst_empty;
    if (spent > *longest)
        *longest = spent;
}

static void stop(void) {
    uv_close((uv_handle_t *)&timer, NULL);
    uv_close((uv_handle_t *)&check, NULL);
}

static void on_end(uv_timer_t *handle) {
    uv_close((uv_handle_t *)handle, NULL);
    stop();
}

// By pelton.

static pelton_uv_engine_t engine;
static pelton_file *file;
static struct slot {
    pelton_uv_operation_t operation;
    pelton_operation file_operation;
    struct iovec memory;
    uv_fs_t request;
} slots[IN_FLIGHT_MAX], syncs[SYNCS_MAX];

static void finished(void) {
    if (--unfinished == 0)
        stop();
}

static void on_synced(pelton_uv_operation_t *operation, const pelton_file_completion *done) {
    (void)operation;
    if (done->code != PELTON_OK)
        fail("syncing", strerror(done->error));
    finished();
}

static void write_next(struct slot *slot);

static void on_written(pelton_uv_operation_t *operation, const pelton_file_completion *done) {
    if (done->code != PELTON_OK || done->count != piece_bytes)
        fail("writing", strerror(done->error));
    write_next(operation->data);
    finished();
}

static void begin(struct slot *slot, pelton_uv_operation_cb on_done) {
    size_t taken;
    if (pelton_uv_engine_submit(&engine, &slot->operation, &slot->file_operation, 1, &taken, on_done) != PELTON_OK)
        fail("starting an operation", pelton_error_detail());
    unfinished++;
}

static void write_next(struct slot *slot) {
    if (next == pieces)
        return;
    slot->file_operation.offset = next++ * piece_bytes;
    begin(slot, on_written);
    if (next % sync_after == 0)
        begin(&syncs[next / sync_after - 1], on_synced);
}

static void closed(pelton_uv_engine_t *handle) {
    (void)handle;
    pelton_close(file);
}

static void write_by_pelton(const char *path, uint64_t in_flight) {
    pelton_engine *opened;
    pelton_file_completion out;
    pelton_operation open = {0};
    open.kind = PELTON_FILE_OPEN;
    open.path = path;
    open.open_flags = O_WRONLY | O_CREAT | O_TRUNC;
    open.mode = 0600;
    if (pelton_engine_open(NULL, &opened) != PELTON_OK || pelton_engine_run(opened, &open, PELTON_FOREVER, &out) != PELTON_OK ||
        pelton_uv_engine_init(loop, &engine, opened) != PELTON_OK)
        fail(path, pelton_error_detail());
    file = out.file;
    for (uint64_t sync = 0; sync < pieces / sync_after; sync++) {
        syncs[sync].file_operation.kind = PELTON_FILE_SYNC_DATA;
        syncs[sync].file_operation.file = file;
    }
    for (uint64_t slot = 0; slot < in_flight; slot++) {
        slots[slot].operation.data = &slots[slot];
        slots[slot].file_operation.kind = PELTON_FILE_WRITE;
        slots[slot].file_operation.file = file;
        slots[slot].file_operation.memory = &slots[slot].memory;
        slots[slot].file_operation.memory_count = 1;
        write_next(&slots[slot]);
    }
    uv_run(loop, UV_RUN_DEFAULT);
    pelton_uv_engine_close(&engine, closed);
}

// By libuv's own.

static uv_file own;

static void request_next(struct slot *slot);

static void on_request(uv_fs_t *request) {
    if (request->result < 0)
        fail("writing or syncing", uv_strerror((int)request->result));
    int wrote = request->fs_type == UV_FS_WRITE;
    if (wrote && (uint64_t)request->result != piece_bytes)
        fail("writing", "a short write");
    struct slot *slot = request->data;
    uv_fs_req_cleanup(request);
    if (wrote)
        request_next(slot);
    finished();
}

static void request_next(struct slot *slot) {
    if (next == pieces)
        return;
    uv_buf_t bytes = uv_buf_init(slot->memory.iov_base, (unsigned)piece_bytes);
    slot->request.data = slot;
    int error = uv_fs_write(loop, &slot->request, own, &bytes, 1, (int64_t)(next++ * piece_bytes), on_request);
    unfinished++;
    if (!error && next % sync_after == 0) {
        error = uv_fs_fdatasync(loop, &syncs[next / sync_after - 1].request, own, on_request);
        unfinished++;
    }
    if (error)
        fail("starting a request", uv_strerror(error));
}

static void write_by_libuv(const char *path, uint64_t in_flight) {
    uv_fs_t request;
    own = uv_fs_open(loop, &request, path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600, NULL);
    if (own < 0)
        fail(path, uv_strerror(own));
    for (uint64_t slot = 0; slot < in_flight; slot++)
        request_next(&slots[slot]);
    uv_run(loop, UV_RUN_DEFAULT);
    uv_fs_close(loop, &request, own, NULL);
}

static int by_size(const void *a, const void *b) {
    uint32_t one = *(const uint32_t *)a, other = *(const uint32_t *)b;
    return (one > other) - (one < other);
}

int main(int argc, char **argv) {
    int is_idle = argc == 3 && strcmp(argv[1], "idle") == 0;
    uint64_t in_flight = 0;
    if (argc == 7) {
        piece_bytes = strtoull(argv[3], NULL, 10);
        pieces = strtoull(argv[4], NULL, 10);
        in_flight = strtoull(argv[5], NULL, 10);
        sync_after = strtoull(argv[6], NULL, 10);
    }
    if (!is_idle && (piece_bytes == 0 || in_flight == 0 || in_flight > IN_FLIGHT_MAX || sync_after == 0 || pieces / sync_after > SYNCS_MAX)) {
        fprintf(stderr, "usage: see bindings/c/bench/uvloop.c\n");
        return 2;
    }
    loop = uv_default_loop();
    for (uint64_t slot = 0; slot < in_flight; slot++) {
        slots[slot].memory.iov_base = malloc(piece_bytes);
        slots[slot].memory.iov_len = piece_bytes;
        if (!slots[slot].memory.iov_base)
            fail("memory", "out of memory");
        memset(slots[slot].memory.iov_base, 1, piece_bytes);
    }
    uv_timer_init(loop, &timer);
    uv_check_init(loop, &check);
    uv_check_start(&check, on_check);
    uv_update_time(loop);
    due = (uv_now(loop) + INTERVAL_MS) * 1000000;
    uv_timer_start(&timer, on_timer, INTERVAL_MS, 0);
    start_ns = uv_hrtime();
    if (is_idle) {
        uv_timer_init(loop, &end);
        uv_timer_start(&end, on_end, (uint64_t)(atof(argv[2]) * 1000), 0);
        uv_run(loop, UV_RUN_DEFAULT);
    } else if (strcmp(argv[1], "pelton") == 0) {
        write_by_pelton(argv[2], in_flight);
    } else {
        write_by_libuv(argv[2], in_flight);
    }
    double seconds = (double)(uv_hrtime() - start_ns) / 1e9;
    uv_run(loop, UV_RUN_DEFAULT);
    if (timers == 0)
        fail("timers", "none was due");
    qsort(late, timers, sizeof *late, by_size);
    printf("%f %f %f %f %f\n", worst, worst_switched, worst_empty, (double)late[timers / 2], seconds);
    return 0;
}
