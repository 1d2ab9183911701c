/* A service that violates the protocol, for the tests of nginx.
 *
 *     hostile NAME
 *
 *   defer SIZE       replies at `wild`
 *   wild HOW SEED    replies to deferred calls, corrupts the replies, creates the file NAME.mark, corrupts more while
 *                    the client reads, and exits; another process takes its place. HOW: see `spoil`
 *
 * It echoes everything else. NAME.raw accepts, sends other wrong packets to each client, and hangs up. NAME.silent
 * listens, and never accepts. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <fcntl.h>
#include <pelton.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define HELD_MAX 64
#define HEADER_BYTES 24
#define CONTROL_BYTES 65536
#define SEGMENTS_MAX 256

static unsigned long state;
static unsigned long any(unsigned long below) {
    state = state * 6364136223846793005UL + 1442695040888963407UL;
    return (state >> 33) % below;
}

static void rest(long milliseconds) {
    struct timespec for_so_long = {0, milliseconds * 1000000};
    nanosleep(&for_so_long, NULL);
}

/* ---- After the handshake ---------------------------------------------------------------------------------------- */

/* Writable shared memory. */
static struct {
    unsigned char *base;
    size_t bytes;
} segments[SEGMENTS_MAX];
static size_t segments_count;

static void find_segments(void) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    unsigned long from, to;
    if (maps == NULL) abort();
    while (segments_count < SEGMENTS_MAX && fgets(line, sizeof line, maps) != NULL) {
        if (strstr(line, " rw-s ") != NULL && strstr(line, "/memfd:") != NULL && sscanf(line, "%lx-%lx", &from, &to) == 2) {
            segments[segments_count].base = (unsigned char *)from;
            segments[segments_count++].bytes = to - from;
        }
    }
    fclose(maps);
    if (segments_count == 0) abort();
}

static unsigned char *replies[HELD_MAX];
static size_t replies_count;

/* Finds the replies in the lane by their first bytes. */
static void find_replies(const char *begin, size_t bytes) {
    size_t i;
    for (i = 0; i < segments_count; i++) {
        unsigned char *at = segments[i].base, *end = at + segments[i].bytes;
        while (segments[i].bytes != CONTROL_BYTES && replies_count < HELD_MAX && (at = memmem(at, (size_t)(end - at), begin, bytes)) != NULL) {
            replies[replies_count++] = at;
            at += bytes;
        }
    }
    if (replies_count == 0) abort();
}

/* The client may read meanwhile. */
static void spoil_byte(unsigned char *at) { atomic_store_explicit((_Atomic unsigned char *)at, (unsigned char)any(256), memory_order_relaxed); }

static void spoil_words(int are_of_records, size_t words) {
    while (words > 0) {
        size_t which = any(segments_count), bytes = segments[which].bytes;
        if ((bytes != CONTROL_BYTES) != are_of_records) continue;
        /* The used part. */
        if (bytes == CONTROL_BYTES) bytes = 512;
        if (bytes > 65536) bytes = 65536;
        unsigned long *at = (unsigned long *)(void *)(segments[which].base + any(bytes / 8) * 8);
        atomic_store_explicit((_Atomic unsigned long *)at, any(4) == 0 ? any(1 << 20) : any(1UL << 31) << 32 | any(1UL << 31), memory_order_relaxed);
        words--;
    }
}

/* 0 to 23: that byte of some replies' headers. 24 to 31: of the word before them. 32: gives one another's call number.
 * 33: makes them parts of a message without end. 34: any words of the records. 35: the control pages of the lanes. */
static void spoil(unsigned long how) {
    size_t count = 1 + any(replies_count);
    while (how <= 33 && count-- > 0) {
        unsigned char *header = replies[any(replies_count)] - HEADER_BYTES;
        if (how < HEADER_BYTES) spoil_byte(header + how);
        if (how >= 24 && how < 32) spoil_byte(header - 32 + how);
        if (how == 32) memcpy(header, replies[any(replies_count)] - HEADER_BYTES, 8);
        if (how == 33) header[8] = 17, header[9] = (unsigned char)any(4);
    }
    if (how == 34) spoil_words(1, 2000);
    if (how == 35) spoil_words(0, 200);
}

/* The client can have gone. */
static void answered(int code) { (void)code; }

static void serve(const char *name) {
    pelton_service *service;
    pelton_request request;
    pelton_responder *deferred[HELD_MAX];
    size_t sizes[HELD_MAX], deferred_count = 0, i;
    pelton_service_options options = PELTON_SERVICE_OPTIONS_INIT;
    options.capacity = 1 << 20;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    (void)unlink(name + strlen("unix:"));
    if (pelton_service_open(name, &options, &service) != PELTON_OK) {
        fprintf(stderr, "%s\n", pelton_error_detail());
        exit(1);
    }
    while (pelton_service_receive(service, PELTON_FOREVER, &request) == PELTON_OK) {
        char text[64] = "", begin[64], path[256];
        unsigned long how;
        size_t size;
        memcpy(text, request.data, request.size < sizeof text ? request.size : sizeof text - 1);
        if (sscanf(text, "defer %zu", &size) == 1 && deferred_count < HELD_MAX) {
            deferred[deferred_count] = request.responder;
            sizes[deferred_count++] = size;
        } else if (sscanf(text, "wild %lu %lu", &how, &state) == 2) {
            int length = snprintf(begin, sizeof begin, "wild: %lu, %lu, %d.", how, state, (int)getpid());
            for (i = 0; i < deferred_count; i++) {
                char *bytes = calloc(1, sizes[i] + (size_t)length);
                memcpy(bytes, begin, (size_t)length);
                answered(pelton_responder_reply(deferred[i], bytes, sizes[i] + (size_t)length));
                free(bytes);
            }
            find_segments();
            find_replies(begin, (size_t)length);
            spoil(how);
            snprintf(path, sizeof path, "%s.mark", name + strlen("unix:"));
            close(open(path, O_CREAT | O_WRONLY, 0600));
            for (i = 0; i < 50; i++) {
                if (how > 33) spoil(how);
                rest(1);
            }
            _exit(0);
        } else {
            answered(pelton_responder_reply(request.responder, request.data, request.size));
        }
        (void)pelton_service_release(service);
    }
    _exit(1);
}

/* ---- In the handshake ------------------------------------------------------------------------------------------- */

static void say(int to, const void *bytes, size_t size, int descriptors) {
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(8 * sizeof(int))];
    } control;
    struct iovec part = {(void *)(size_t)bytes, size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    int fds[8] = {0};
    if (descriptors > 0) {
        memset(&control, 0, sizeof control);
        message.msg_control = &control;
        message.msg_controllen = CMSG_SPACE((size_t)descriptors * sizeof(int));
        control.header.cmsg_level = SOL_SOCKET;
        control.header.cmsg_type = SCM_RIGHTS;
        control.header.cmsg_len = CMSG_LEN((size_t)descriptors * sizeof(int));
        memcpy(CMSG_DATA(&control.header), fds, (size_t)descriptors * sizeof(int));
    }
    (void)!sendmsg(to, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static int listen_at(const char *name, const char *end) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    snprintf(address.sun_path, sizeof address.sun_path, "%.90s%s", name + strlen("unix:"), end);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) != 0 || listen(listener, 8) != 0) abort();
    return listener;
}

static void speak_raw(const char *name) {
    int listener = listen_at(name, ".raw"), turn;
    unsigned char hello[4096], rubbish[4096];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (turn = 0;; turn++) {
        int other = accept(listener, NULL, NULL);
        ssize_t size = recv(other, hello, sizeof hello, 0);
        size_t i, bytes = size > 0 ? (size_t)size : 0;
        for (i = 0; i < sizeof rubbish; i++) rubbish[i] = (unsigned char)any(256);
        switch (turn % 8) {
        case 0: break;
        case 1: say(other, "", 0, 0); break;
        case 2: say(other, rubbish, 1, 0); break;
        case 3: say(other, rubbish, 200, 8); break;
        case 4: say(other, rubbish, sizeof rubbish, 3); break;
        case 5: say(other, hello, bytes, 0); break;
        default:
            /* A valid first packet; then lanes without memory, another packet, or a damaged one. */
            if (bytes > 16) hello[16] = 4;
            say(other, hello, bytes, 0);
            if (turn % 8 == 6) rest(2);
            if (turn % 8 == 7) (void)!recv(other, hello, sizeof hello, 0);
            for (i = 0; i < 8; i++) {
                if (bytes > 0) hello[any(bytes)] ^= (unsigned char)any(256);
                say(other, hello, bytes, (int)any(5));
            }
        }
        rest(2);
        close(other);
    }
}

int main(int argc, char **argv) {
    pid_t child;
    int status;
    if (argc < 2) return 2;
    signal(SIGPIPE, SIG_IGN);
    state = 4711;
    if (fork() == 0) speak_raw(argv[1]);
    (void)listen_at(argv[1], ".silent");
    for (;;) {
        child = fork();
        if (child == 0) serve(argv[1]);
        do {
            if (waitpid(child, &status, 0) < 0) return 1;
        } while (!WIFEXITED(status) && !WIFSIGNALED(status));
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) return 1;
    }
}
