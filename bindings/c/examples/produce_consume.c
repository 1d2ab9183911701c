/* A producer and a consumer in two processes, both spinning: messages of 1 to 32768 bytes, written in place and looked at in place.
 *
 *     produce_consume [MESSAGES]
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pelton.h"

static void give_up(const char *what, int code) {
    fprintf(stderr, "%s: %s: %s\n", what, pelton_code_text(code), pelton_error_detail());
    exit(1);
}

/* The same sizes on both sides. */
static size_t next_size(uint32_t *state) {
    *state = *state * 1664525 + 1013904223;
    return 1 + (*state >> 17);
}

static void produce(const char *name, long messages) {
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_sender *sender;
    uint32_t state = 1;
    int code;
    options.wait = PELTON_SPIN;
    options.deadline_ns = pelton_deadline(INT64_C(5000000000));
    if ((code = pelton_sender_open(name, &options, &sender)) != 0) give_up("opening", code);
    for (long i = 0; i < messages; i++) {
        size_t size = next_size(&state);
        void *room;
        if ((code = pelton_reserve(sender, size, PELTON_FOREVER, &room)) != 0) give_up("reserving", code);
        memset(room, (int)(i & 0xff), size);
        if ((code = pelton_commit(sender, size)) != 0) give_up("committing", code);
    }
    /* The consumer reads everything that was committed, then is told of the end. */
    pelton_sender_close(sender);
}

static void consume(pelton_listener *listener, long messages) {
    pelton_receiver *receiver;
    pelton_message message;
    uint32_t state = 1;
    uint64_t bytes = 0;
    long received = 0;
    int code;
    if ((code = pelton_accept_receiver(listener, PELTON_FOREVER, &receiver)) != 0) give_up("accepting", code);
    while ((code = pelton_receive(receiver, PELTON_FOREVER, &message)) == 0) {
        const unsigned char *data = (const unsigned char *)message.data;
        if (message.size != next_size(&state) || data[0] != (received & 0xff) || data[message.size - 1] != data[0]) {
            fprintf(stderr, "message %ld is not what was sent\n", received);
            exit(1);
        }
        bytes += message.size;
        received++;
        pelton_release(receiver);
    }
    if (code != PELTON_CLOSED) give_up("receiving", code);
    printf("%ld messages, %" PRIu64 " bytes\n", received, bytes);
    pelton_receiver_close(receiver);
    if (received != messages) exit(1);
}

int main(int argc, char **argv) {
    long messages = argc > 1 ? atol(argv[1]) : 1000000;
    pelton_options options = PELTON_OPTIONS_INIT;
    pelton_listener *listener;
    char name[64];
    int code, status;
    snprintf(name, sizeof name, "unix:/tmp/produce-consume-%d", (int)getpid());
    pid_t producer = fork();
    if (producer == 0) {
        produce(name, messages);
        return 0;
    }
    options.wait = PELTON_SPIN;
    if ((code = pelton_listen(name, &options, &listener)) != 0) give_up("listening", code);
    consume(listener, messages);
    pelton_listener_close(listener);
    waitpid(producer, &status, 0);
    return status == 0 ? 0 : 1;
}
