/* A producer and a consumer in two processes, three ways: messages of 1 to 32768 bytes, every byte written by the one,
 * the first and the last looked at by the other. One message in 1000 has a memfd along, which the consumer maps and
 * checks.
 *
 *     produce_consume spin [MESSAGES]          pelton, neither side ever sleeping
 *     produce_consume libuv [MESSAGES]         pelton, each side in a libuv loop, asleep when it has nothing to do
 *     produce_consume seqpacket [MESSAGES]     the plain alternative: a SOCK_SEQPACKET socket, two copies by the kernel
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <inttypes.h>
#include <stdalign.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <pelton_uv.h>

enum { LARGEST = 32768, DESCRIPTOR_EVERY = 1000 };

/* One side's place in the stream: the same numbers and sizes on both. */
typedef struct stream {
    long messages; /* how many there will be */
    long done;
    size_t size; /* of the next one */
    uint32_t state;
    uint64_t bytes;
} stream;

static void advance(stream *stream) {
    stream->bytes += stream->size;
    stream->state = stream->state * 1664525 + 1013904223;
    stream->size = 1 + (stream->state >> 17);
}

static stream new_stream(long messages) {
    stream stream = {messages, 0, 0, 1, 0};
    advance(&stream);
    return stream;
}

static void give_up(const char *what, int code) {
    fprintf(stderr, "%s: %s: %s\n", what, pelton_code_text(code), pelton_error_detail());
    exit(1);
}

static void give_up_by_errno(const char *what) {
    perror(what);
    exit(1);
}

static int has_descriptor(const stream *stream) {
    return stream->done % DESCRIPTOR_EVERY == DESCRIPTOR_EVERY - 1;
}

/* A memfd that says which message it goes with. */
static int new_descriptor(const stream *stream) {
    int fd = memfd_create("along", MFD_CLOEXEC);
    if (fd < 0 || write(fd, &stream->done, sizeof stream->done) != sizeof stream->done) give_up_by_errno("memfd");
    return fd;
}

static void check(stream *stream, const void *data, size_t size, int fd) {
    const unsigned char *bytes = (const unsigned char *)data;
    unsigned char wanted = (unsigned char)stream->done;
    if (size != stream->size || bytes[0] != wanted || bytes[size - 1] != wanted || has_descriptor(stream) != (fd >= 0)) {
        fprintf(stderr, "message %ld is not what was sent\n", stream->done);
        exit(1);
    }
    if (fd >= 0) {
        long *number = (long *)mmap(NULL, sizeof *number, PROT_READ, MAP_SHARED, fd, 0);
        if (number == MAP_FAILED || *number != stream->done) give_up_by_errno("what came along");
        munmap(number, sizeof *number);
        close(fd);
    }
    stream->done++;
    advance(stream);
}

/* Sends the next message; PELTON_AGAIN when there is no room by then. */
static int send_next(pelton_sender *sender, stream *stream, int64_t deadline_ns) {
    static unsigned char buffer[LARGEST];
    void *room;
    int code;
    if (has_descriptor(stream)) {
        int fd = new_descriptor(stream);
        memset(buffer, (int)(stream->done & 0xff), stream->size);
        code = pelton_sender_send_descriptors(sender, buffer, stream->size, &fd, 1, deadline_ns);
        close(fd);
    } else if ((code = pelton_sender_reserve(sender, stream->size, deadline_ns, &room)) == PELTON_OK) {
        memset(room, (int)(stream->done & 0xff), stream->size);
        code = pelton_sender_commit(sender, stream->size);
    }
    if (code == PELTON_OK) {
        stream->done++;
        advance(stream);
    } else if (code != PELTON_AGAIN) {
        give_up("sending", code);
    }
    return code;
}

static void check_message(pelton_receiver *receiver, stream *stream, const pelton_message *message) {
    int fd = -1, code;
    size_t count;
    if (message->descriptor_count && (code = pelton_receiver_take_descriptors(receiver, &fd, 1, &count)) != PELTON_OK) give_up("descriptors", code);
    check(stream, message->data, message->size, fd);
}

/* ---- Spinning ---- */

static void produce_spinning(pelton_sender *sender, stream *stream) {
    while (stream->done < stream->messages) {
        send_next(sender, stream, PELTON_FOREVER);
    }
    /* The consumer reads everything that was committed, then gets PELTON_CLOSED. */
    pelton_close(sender);
}

static void consume_spinning(pelton_receiver *receiver, stream *stream) {
    pelton_message message;
    int code;
    while ((code = pelton_receiver_receive(receiver, PELTON_FOREVER, &message)) == PELTON_OK) {
        check_message(receiver, stream, &message);
        pelton_receiver_release(receiver);
    }
    if (code != PELTON_CLOSED) give_up("receiving", code);
    pelton_close(receiver);
}

/* ---- In libuv loops ---- */

static void on_space(pelton_uv_sender_t *handle) {
    stream *sent = (stream *)handle->data;
    /* One message: this is called again while there is space. */
    if (sent->done < sent->messages) (void)send_next(handle->sender, sent, PELTON_NO_WAIT);
    if (sent->done == sent->messages) pelton_uv_sender_close(handle, NULL);
}

static void on_senders_end(pelton_uv_sender_t *handle, int code) {
    (void)handle;
    give_up("sending", code);
}

static void produce_in_a_loop(pelton_sender *sender, stream *stream) {
    uv_loop_t loop;
    pelton_uv_sender_t handle;
    int code;
    uv_loop_init(&loop);
    if ((code = pelton_uv_sender_init(&loop, &handle, sender)) != PELTON_OK) give_up("libuv", code);
    handle.data = stream;
    if ((code = pelton_uv_sender_start(&handle, LARGEST, on_space, on_senders_end)) != PELTON_OK) give_up("sending", code);
    uv_run(&loop, UV_RUN_DEFAULT);
    uv_loop_close(&loop);
}

static void on_message(pelton_uv_receiver_t *handle, const pelton_message *message) {
    check_message(handle->receiver, (stream *)handle->data, message);
}

static void on_end(pelton_uv_receiver_t *handle, int code) {
    if (code != PELTON_CLOSED) give_up("receiving", code);
    pelton_uv_receiver_close(handle, NULL);
}

static void consume_in_a_loop(pelton_receiver *receiver, stream *stream) {
    uv_loop_t loop;
    pelton_uv_receiver_t handle;
    int code;
    uv_loop_init(&loop);
    if ((code = pelton_uv_receiver_init(&loop, &handle, receiver)) != PELTON_OK) give_up("libuv", code);
    handle.data = stream;
    if ((code = pelton_uv_receiver_start(&handle, on_message, on_end)) != PELTON_OK) give_up("receiving", code);
    uv_run(&loop, UV_RUN_DEFAULT);
    uv_loop_close(&loop);
}

/* ---- By a socket ---- */

/* A packet with room for one descriptor. */
typedef struct packet {
    struct msghdr header;
    struct iovec payload;
    alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))];
} packet;

static struct msghdr *new_packet(packet *packet, void *data, size_t size) {
    memset(packet, 0, sizeof *packet);
    packet->payload.iov_base = data;
    packet->payload.iov_len = size;
    packet->header.msg_iov = &packet->payload;
    packet->header.msg_iovlen = 1;
    packet->header.msg_control = packet->control;
    packet->header.msg_controllen = sizeof packet->control;
    return &packet->header;
}

static void produce_by_socket(int socket, stream *stream) {
    static unsigned char buffer[LARGEST];
    for (; stream->done < stream->messages; stream->done++, advance(stream)) {
        packet packet;
        struct msghdr *header = new_packet(&packet, buffer, stream->size);
        int fd = -1;
        memset(buffer, (int)(stream->done & 0xff), stream->size);
        if (has_descriptor(stream)) {
            struct cmsghdr *along = CMSG_FIRSTHDR(header);
            along->cmsg_level = SOL_SOCKET;
            along->cmsg_type = SCM_RIGHTS;
            along->cmsg_len = CMSG_LEN(sizeof fd);
            fd = new_descriptor(stream);
            memcpy(CMSG_DATA(along), &fd, sizeof fd);
        } else {
            header->msg_controllen = 0;
        }
        if (sendmsg(socket, header, 0) != (ssize_t)stream->size) give_up_by_errno("sendmsg");
        if (fd >= 0) close(fd);
    }
    close(socket);
}

static void consume_by_socket(int socket, stream *stream) {
    static unsigned char buffer[LARGEST];
    for (;;) {
        packet packet;
        struct msghdr *header = new_packet(&packet, buffer, sizeof buffer);
        int fd = -1;
        ssize_t size = recvmsg(socket, header, MSG_CMSG_CLOEXEC);
        if (size < 0) give_up_by_errno("recvmsg");
        if (size == 0) break;
        struct cmsghdr *along = CMSG_FIRSTHDR(header);
        if (along) memcpy(&fd, CMSG_DATA(along), sizeof fd);
        check(stream, buffer, (size_t)size, fd);
    }
    close(socket);
}

/* ---- Both sides ---- */

/* By pelton: the consumer listens, the producer, a child, connects. */
static pid_t run_pelton(stream *stream, uint32_t wait, void (*produce)(pelton_sender *, struct stream *),
                        void (*consume)(pelton_receiver *, struct stream *)) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_listener *listener;
    pelton_receiver *receiver;
    pelton_sender *sender;
    char name[64];
    int code;
    options.wait = wait;
    snprintf(name, sizeof name, "unix:/tmp/produce-consume-%d", (int)getpid());
    pid_t producer = fork();
    if (producer == 0) {
        options.deadline_ns = pelton_deadline(INT64_C(5000000000));
        if ((code = pelton_sender_open(name, &options, &sender)) != PELTON_OK) give_up("opening", code);
        produce(sender, stream);
        exit(0);
    }
    if ((code = pelton_listener_open(name, &options, &listener)) != PELTON_OK) give_up("listening", code);
    if ((code = pelton_listener_accept_receiver(listener, PELTON_FOREVER, &receiver)) != PELTON_OK) give_up("accepting", code);
    pelton_close(listener);
    consume(receiver, stream);
    return producer;
}

static pid_t run_socket(stream *stream) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) give_up_by_errno("socketpair");
    pid_t producer = fork();
    close(ends[producer == 0 ? 1 : 0]);
    if (producer == 0) {
        produce_by_socket(ends[0], stream);
        exit(0);
    }
    consume_by_socket(ends[1], stream);
    return producer;
}

int main(int argc, char **argv) {
    const char *way = argc > 1 ? argv[1] : "";
    stream stream = new_stream(argc > 2 ? atol(argv[2]) : 1000000);
    struct timespec began, ended;
    pid_t producer;
    int status;
    clock_gettime(CLOCK_MONOTONIC, &began);
    if (strcmp(way, "spin") == 0) {
        producer = run_pelton(&stream, PELTON_SPIN, produce_spinning, consume_spinning);
    } else if (strcmp(way, "libuv") == 0) {
        producer = run_pelton(&stream, PELTON_BLOCK, produce_in_a_loop, consume_in_a_loop);
    } else if (strcmp(way, "seqpacket") == 0) {
        producer = run_socket(&stream);
    } else {
        fprintf(stderr, "usage: produce_consume spin|libuv|seqpacket [MESSAGES]\n");
        return 2;
    }
    clock_gettime(CLOCK_MONOTONIC, &ended);
    double seconds = (double)(ended.tv_sec - began.tv_sec) + (double)(ended.tv_nsec - began.tv_nsec) / 1e9;
    printf("%ld messages, %" PRIu64 " bytes\n", stream.done, stream.bytes - stream.size);
    fprintf(stderr, "%s: %.3f s, %.2f GB/s\n", way, seconds, (double)stream.bytes / 1e9 / seconds);
    waitpid(producer, &status, 0);
    return status == 0 && stream.done == stream.messages ? 0 : 1;
}
