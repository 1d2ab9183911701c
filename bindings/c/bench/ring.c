/* One side of a stream through the least ring in shared memory, in libuv's loop: what a program writes that has no
 * library for it. It is what pelton by libuv is compared with.
 *
 * The receiver creates the ring in a memfd, with an eventfd for each side, and passes all three through a socket. A
 * side that finds nothing to do says so in the ring and sleeps in the loop, and its peer then writes to its eventfd: no
 * message costs a system call by itself. There is no check of the peer's bytes, and no way to notice its end.
 *
 * The receiver's loop calls on_message for each message until the ring is empty. The sender is a uv_idle, the handle
 * that libuv has for work that is always due: it calls on_space once a turn (UV), or for up to a millisecond
 * (UV_BULK). */
#include "side.h"

#include <stdatomic.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <uv.h>

#define TURN_NS 1000000
/* Instead of a length: the next record is at the start of the ring. */
#define WRAP UINT64_MAX
/* How often a receiver polls for the next message before it sleeps. bench/README.md has the values tried. */
#define POLLS 200

struct shared {
    _Alignas(64) _Atomic uint64_t tail; /* bytes ever written; the position is the remainder by the capacity */
    _Alignas(64) _Atomic uint64_t head; /* bytes ever read */
    _Alignas(64) _Atomic int sleeps[2]; /* indexed by the role: it waits for its eventfd */
    _Alignas(64) uint8_t data[];        /* records: 8 bytes of length, then the message, padded to 8 */
};

static struct {
    struct side *side;
    struct pass *pass;
    struct shared *shared;
    uint64_t capacity;
    uint64_t tail, head;  /* this side's own is exact, the other's may be older */
    uint64_t published;   /* the head that the sender can see */
    size_t unsent;        /* size of a message that waits for space, if has_unsent */
    int has_unsent;
    int doorbells[2];         /* by role */
    uint64_t n, bytes;
    int code, has_ended;
    uv_loop_t loop;
    uv_poll_t doorbell;
    uv_idle_t idle;
} ring;

static int fail(const char *what) {
    snprintf(ring.side->error, sizeof ring.side->error, "%s: %s", what, strerror(errno));
    return -1;
}

static void end_pass(int code) {
    ring.code = code;
    ring.has_ended = 1;
    uv_poll_stop(&ring.doorbell);
    uv_idle_stop(&ring.idle);
}

static uint64_t record_bytes(uint64_t size) { return 8 + ((size + 7) & ~UINT64_C(7)); }

static uint8_t *at(uint64_t position) { return ring.shared->data + position % ring.capacity; }

/* Rings the other side if it sleeps. Its announcement and this side's store are each before a load of the other's, with
 * a full fence between, so one of the two sees the other's. */
static void wake(enum role other) {
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&ring.shared->sleeps[other], memory_order_relaxed) &&
        atomic_exchange(&ring.shared->sleeps[other], 0)) {
        if (eventfd_write(ring.doorbells[other], 1) != 0) end_pass(fail("ringing"));
    }
}

static void announce_sleep(void) {
    atomic_store(&ring.shared->sleeps[ring.side->role], 1);
    atomic_thread_fence(memory_order_seq_cst);
}

static void withdraw_sleep(void) { atomic_store_explicit(&ring.shared->sleeps[ring.side->role], 0, memory_order_relaxed); }

/* ---- Sending ---- */

/* The bytes at the end of the ring that are too few for a record. */
static uint64_t skipped(uint64_t record) {
    uint64_t left = ring.capacity - ring.tail % ring.capacity;
    return left < record ? left : 0;
}

static int has_space(size_t size) {
    uint64_t end = ring.tail + skipped(record_bytes(size)) + record_bytes(size);
    if (end - ring.head <= ring.capacity) return 1;
    ring.head = atomic_load_explicit(&ring.shared->head, memory_order_acquire);
    return end - ring.head <= ring.capacity;
}

/* Sends a message. 0: there is no space. */
static int put(const void *data, size_t size) {
    uint64_t length = size, wrap = WRAP, record = record_bytes(size), skip = skipped(record);
    if (!has_space(size)) return 0;
    if (skip > 0) memcpy(at(ring.tail), &wrap, sizeof wrap);
    ring.tail += skip;
    memcpy(at(ring.tail), &length, sizeof length);
    memcpy(at(ring.tail) + 8, data, size);
    ring.tail += record;
    atomic_store_explicit(&ring.shared->tail, ring.tail, memory_order_release);
    wake(RECEIVER);
    return 1;
}

/* The program: sends the next message. 1: it is sent, and another follows. */
static int on_space(void) {
    struct side *side = ring.side;
    if (!ring.has_unsent) ring.unsent = ring.pass->warms_up ? side->size_max : next_size(side);
    ring.has_unsent = !put(payload(side, ring.n), ring.unsent);
    if (ring.has_unsent) return 0;
    sent(side, ring.n);
    ring.bytes += ring.unsent;
    if (++ring.n < ring.pass->count) return 1;
    end_pass(0);
    return 0;
}

static void on_idle(uv_idle_t *idle) {
    if (!has_space(ring.side->size_max)) {
        announce_sleep();
        if (!has_space(ring.side->size_max)) {
            uv_idle_stop(idle);
            return;
        }
        withdraw_sleep();
    }
    if (ring.side->how == UV) {
        (void)on_space();
        return;
    }
    uint64_t began = now_ns();
    for (uint64_t i = 1, check_at = 1; on_space(); i++) {
        if (i < check_at) continue;
        if (now_ns() - began >= TURN_NS) return;
        check_at *= 2;
    }
}

/* ---- Receiving ---- */

/* The program: copies the message out, unless it reads in place, and compares it. */
static void on_message(const uint8_t *data, size_t size) {
    struct side *side = ring.side;
    if (!side->in_place) data = memcpy(side->buffer, data, size);
    if (check(side, ring.pass, ring.n, data, size) != 0) {
        end_pass(-1);
        return;
    }
    ring.bytes += size;
    if (++ring.n == ring.pass->count) end_pass(0);
}

/* Frees what was read. It wakes a sender when half of the ring is free, so that it does not wake for each message. */
static void publish(void) {
    ring.published = ring.head;
    atomic_store_explicit(&ring.shared->head, ring.head, memory_order_release);
    if (ring.tail - ring.head <= ring.capacity / 2) wake(SENDER);
}

static int has_message(void) {
    ring.tail = atomic_load_explicit(&ring.shared->tail, memory_order_acquire);
    return ring.tail != ring.head;
}

static int poll_for_message(void) {
    for (int i = 0; i < POLLS; i++) {
        if (has_message()) return 1;
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
    }
    return has_message();
}

static void receive_until_empty(void) {
    for (;;) {
        while (ring.head != ring.tail) {
            uint64_t length;
            memcpy(&length, at(ring.head), sizeof length);
            if (length == WRAP) {
                ring.head += ring.capacity - ring.head % ring.capacity;
                continue;
            }
            on_message(at(ring.head) + 8, length);
            ring.head += record_bytes(length);
            if (ring.head - ring.published >= ring.capacity / 8 || ring.has_ended) publish();
            if (ring.has_ended) return;
        }
        if (has_message()) continue;
        if (ring.published != ring.head) publish();
        if (poll_for_message()) continue;
        announce_sleep();
        if (!has_message()) return;
        withdraw_sleep();
    }
}

/* ---- The loop ---- */

static void on_doorbell(uv_poll_t *poll, int status, int events) {
    eventfd_t rings;
    (void)poll, (void)events;
    if (status != 0 || (eventfd_read(ring.doorbells[ring.side->role], &rings) != 0 && errno != EAGAIN)) {
        end_pass(fail("reading the eventfd"));
    } else if (ring.side->role == RECEIVER) {
        withdraw_sleep();
        receive_until_empty();
    } else {
        uv_idle_start(&ring.idle, on_idle);
    }
}

/* Passes descriptors through a socket, or takes them. */
static int pass_descriptors(int socket, int *fds, int takes) {
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(3 * sizeof(int))];
    } control;
    char byte = 0;
    struct iovec one = {&byte, 1};
    struct msghdr message = {.msg_iov = &one, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    memset(&control, 0, sizeof control);
    control.header = (struct cmsghdr){.cmsg_len = CMSG_LEN(3 * sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    if (!takes) memcpy(CMSG_DATA(&control.header), fds, 3 * sizeof(int));
    if ((takes ? recvmsg(socket, &message, MSG_CMSG_CLOEXEC) : sendmsg(socket, &message, 0)) != 1) return -1;
    if (takes) memcpy(fds, CMSG_DATA(&control.header), 3 * sizeof(int));
    return 0;
}

/* The receiver listens, and passes the memory and both eventfds on. */
static int listen_and_pass(const struct sockaddr_un *name, int *fds) {
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0 || bind(listener, (const struct sockaddr *)name, sizeof *name) != 0 || listen(listener, 1) != 0) return -1;
    fds[0] = memfd_create("ring", MFD_CLOEXEC);
    fds[1] = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    fds[2] = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (fds[0] < 0 || fds[1] < 0 || fds[2] < 0 || ftruncate(fds[0], (off_t)(sizeof(struct shared) + ring.capacity)) != 0) return -1;
    int sender = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    int code = sender < 0 ? -1 : pass_descriptors(sender, fds, 0);
    close(sender);
    close(listener);
    return code;
}

static int connect_and_take(const struct sockaddr_un *name, int *fds) {
    for (uint64_t end = now_ns() + (uint64_t)ring.side->connect_ns;;) {
        int receiver = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (receiver >= 0 && connect(receiver, (const struct sockaddr *)name, sizeof *name) == 0) {
            int code = pass_descriptors(receiver, fds, 1);
            close(receiver);
            return code;
        }
        close(receiver);
        if (now_ns() >= end) return -1;
        usleep(1000);
    }
}

/* Connects, waiting for the other side. Returns 0, or -1 with the reason in side->error. */
int side_open(struct side *side) {
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    int fds[3];
    ring.side = side;
    ring.capacity = side->capacity;
    strncpy(name.sun_path, side->forward_name + strlen("unix:"), sizeof name.sun_path - 1);
    if ((side->role == RECEIVER ? listen_and_pass(&name, fds) : connect_and_take(&name, fds)) != 0) return fail("connecting");
    ring.doorbells[RECEIVER] = fds[1];
    ring.doorbells[SENDER] = fds[2];
    void *memory = mmap(NULL, sizeof(struct shared) + ring.capacity, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
    if (memory == MAP_FAILED) return fail("mapping the ring");
    ring.shared = memory;
    close(fds[0]);
    errno = -uv_loop_init(&ring.loop);
    if (errno == 0) errno = -uv_poll_init(&ring.loop, &ring.doorbell, ring.doorbells[side->role]);
    if (errno != 0) return fail("preparing libuv's loop");
    uv_idle_init(&ring.loop, &ring.idle);
    return 0;
}

/* Makes one pass. Returns 0, or -1 with the reason in side->error. */
int side_pass(struct side *side, struct pass *pass) {
    side->seed = 1;
    begin(side);
    ring.pass = pass;
    ring.n = ring.bytes = 0;
    ring.has_unsent = ring.code = ring.has_ended = 0;
    errno = -uv_poll_start(&ring.doorbell, UV_READABLE, on_doorbell);
    if (errno != 0) return fail("polling the eventfd");
    if (side->role == SENDER) uv_idle_start(&ring.idle, on_idle);
    else receive_until_empty();
    uv_run(&ring.loop, UV_RUN_DEFAULT);
    pass->bytes = ring.bytes;
    return ring.code;
}

void side_close(struct side *side) {
    (void)side;
    if (ring.shared == NULL) return;
    uv_close((uv_handle_t *)&ring.doorbell, NULL);
    uv_close((uv_handle_t *)&ring.idle, NULL);
    uv_run(&ring.loop, UV_RUN_DEFAULT);
    uv_loop_close(&ring.loop);
    munmap(ring.shared, sizeof(struct shared) + ring.capacity);
    close(ring.doorbells[RECEIVER]);
    close(ring.doorbells[SENDER]);
}
