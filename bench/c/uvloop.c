// A libuv loop that writes a file and syncs it, while its timers are to be on time: for `pelton-bench file loop` and `loop-timers`.
//
//   uvloop pelton|libuv-fs FILE PIECE_BYTES PIECES IN_FLIGHT SYNC_AFTER
//   uvloop idle SECONDS
//
// PIECES pieces of ones are written, IN_FLIGHT at a time, and after each SYNC_AFTER of them the file is synced; or nothing is done for so long. Five
// numbers are written to the standard output: the most microseconds of CPU time that the loop's thread spent from when it was back from the
// system until its callbacks had returned; the same of those turns in which others ran in its place, and of those that found nothing to do; the median
// of how many microseconds late its timers were; and the seconds that it took.
//
// Who runs in its place may leave it the bill. Linux (6.18, where the kernel is not preempted) reads its clock when somebody is to run next, and not again
// when the one that is copying in the kernel lets go, milliseconds later: what comes between is charged to who was waiting. A trace of
// `sched_stat_runtime` shows this loop charged 1,341 us, 8 us after it was switched to. And a virtual machine's host may stop it for its own reasons,
// which shows in turns that find nothing to do as well.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pelton.h>
#include <pelton_uv.h>
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
static uint64_t due, began, back_at;
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

// How often the thread was not running any more, for want of something or because others were to run.
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

// In libuv's stead: what the system does with whom it wakes up, as the work of other people's interrupts, is in no callback.
int epoll_pwait(int epoll, struct epoll_event *events, int most, int milliseconds, const sigset_t *signals) {
    found = (int)syscall(SYS_epoll_pwait, epoll, events, most, milliseconds, signals, _NSIG / 8);
    int error = errno;
    switches_before = switches();
    back_at = thread_ns();
    errno = error;
    return found;
}

int epoll_wait(int epoll, struct epoll_event *events, int most, int milliseconds) {
    return epoll_pwait(epoll, events, most, milliseconds, NULL);
}

static void on_check(uv_check_t *handle) {
    (void)handle;
    double spent = (double)(thread_ns() - back_at) / 1000;
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

static pelton_uv_engine engine;
static pelton_file *file;
static struct piece {
    pelton_uv_operation operation;
    pelton_operation what;
    struct iovec memory;
    uv_fs_t request;
} slots[IN_FLIGHT_MAX], syncs[SYNCS_MAX];

static void finished(void) {
    if (--unfinished == 0)
        stop();
}

static void on_synced(pelton_uv_operation *operation, const pelton_file_completion *done) {
    (void)operation;
    if (done->code != PELTON_OK)
        fail("syncing", strerror(done->error));
    finished();
}

static void write_next(struct piece *slot);

static void on_written(pelton_uv_operation *operation, const pelton_file_completion *done) {
    if (done->code != PELTON_OK || done->count != piece_bytes)
        fail("writing", strerror(done->error));
    write_next(operation->data);
    finished();
}

static void begin(struct piece *slot, pelton_uv_done_cb on_done) {
    size_t taken;
    if (pelton_uv_file_start(&engine, &slot->operation, &slot->what, 1, &taken, on_done) != PELTON_OK)
        fail("starting an operation", pelton_error_detail());
    unfinished++;
}

static void write_next(struct piece *slot) {
    if (next == pieces)
        return;
    slot->what.offset = next++ * piece_bytes;
    begin(slot, on_written);
    if (next % sync_after == 0)
        begin(&syncs[next / sync_after - 1], on_synced);
}

static void closed(pelton_uv_engine *handle) {
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
    if (pelton_engine_open(NULL, &opened) != PELTON_OK || pelton_file_run(opened, &open, PELTON_FOREVER, &out) != PELTON_OK ||
        pelton_uv_engine_init(loop, &engine, opened) != PELTON_OK)
        fail(path, pelton_error_detail());
    file = out.file;
    for (uint64_t sync = 0; sync < pieces / sync_after; sync++) {
        syncs[sync].what.kind = PELTON_FILE_SYNC_DATA;
        syncs[sync].what.file = file;
    }
    for (uint64_t slot = 0; slot < in_flight; slot++) {
        slots[slot].operation.data = &slots[slot];
        slots[slot].what.kind = PELTON_FILE_WRITE;
        slots[slot].what.file = file;
        slots[slot].what.memory = &slots[slot].memory;
        slots[slot].what.memory_count = 1;
        write_next(&slots[slot]);
    }
    uv_run(loop, UV_RUN_DEFAULT);
    pelton_uv_engine_close(&engine, closed);
}

// By libuv's own.

static uv_file own;

static void request_next(struct piece *slot);

static void on_request(uv_fs_t *request) {
    if (request->result < 0)
        fail("writing or syncing", uv_strerror((int)request->result));
    int wrote = request->fs_type == UV_FS_WRITE;
    if (wrote && (uint64_t)request->result != piece_bytes)
        fail("writing", "it was cut short");
    struct piece *slot = request->data;
    uv_fs_req_cleanup(request);
    if (wrote)
        request_next(slot);
    finished();
}

static void request_next(struct piece *slot) {
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
        fprintf(stderr, "usage: see bench/c/uvloop.c\n");
        return 2;
    }
    loop = uv_default_loop();
    for (uint64_t slot = 0; slot < in_flight; slot++) {
        slots[slot].memory.iov_base = malloc(piece_bytes);
        slots[slot].memory.iov_len = piece_bytes;
        if (!slots[slot].memory.iov_base)
            fail("memory", "there is none");
        memset(slots[slot].memory.iov_base, 1, piece_bytes);
    }
    uv_timer_init(loop, &timer);
    uv_check_init(loop, &check);
    uv_check_start(&check, on_check);
    uv_update_time(loop);
    due = (uv_now(loop) + INTERVAL_MS) * 1000000;
    uv_timer_start(&timer, on_timer, INTERVAL_MS, 0);
    began = uv_hrtime();
    if (is_idle) {
        uv_timer_init(loop, &end);
        uv_timer_start(&end, on_end, (uint64_t)(atof(argv[2]) * 1000), 0);
        uv_run(loop, UV_RUN_DEFAULT);
    } else if (strcmp(argv[1], "pelton") == 0) {
        write_by_pelton(argv[2], in_flight);
    } else {
        write_by_libuv(argv[2], in_flight);
    }
    double seconds = (double)(uv_hrtime() - began) / 1e9;
    uv_run(loop, UV_RUN_DEFAULT);
    if (timers == 0)
        fail("timers", "none was due");
    qsort(late, timers, sizeof *late, by_size);
    printf("%f %f %f %f %f\n", worst, worst_switched, worst_empty, (double)late[timers / 2], seconds);
    return 0;
}
