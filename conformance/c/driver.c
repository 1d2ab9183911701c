/* The conformance driver in C. ../README.md has the command line and the messages. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pelton.h"

static const char *name;
static long count;
static size_t size;
static char *letters; /* the alphabet, repeated: every message is a slice of it */

static const char *message(long i) { return letters + i % 26; }

static int64_t deadline(void) {
    const char *seconds = getenv("PELTON_SECONDS");
    return pelton_deadline(INT64_C(1000000000) * (seconds ? atol(seconds) : 10));
}

static int failed(const char *what, int code) {
    fprintf(stderr, "%s: %s: %s\n", what, pelton_code_text(code), pelton_error_detail());
    return 1;
}

static int wrong(long i, size_t found) {
    fprintf(stderr, "message %ld: found %zu other bytes, expected %zu: %.*s\n", i, found, size, (int)size, message(i));
    return 1;
}

static int matches(long i, const void *data, size_t found) { return found == size && memcmp(data, message(i), size) == 0; }

static int send_messages(void) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_sender *sender;
    options.deadline_ns = deadline(); /* until then it waits for a receiver to listen */
    int code = pelton_sender_open(name, &options, &sender);
    if (code != PELTON_OK) return failed("connect", code);
    for (long i = 0; i < count && code == PELTON_OK; i++) code = pelton_sender_send(sender, message(i), size, deadline());
    if (code == PELTON_OK) code = pelton_sender_wait_released(sender, deadline());
    if (code != PELTON_OK) return failed("send", code);
    return pelton_close(sender) == PELTON_OK ? 0 : 1;
}

static int receive_messages(void) {
    pelton_listener *listener;
    pelton_receiver *receiver;
    pelton_message received;
    int code = pelton_listener_open(name, NULL, &listener);
    if (code == PELTON_OK) code = pelton_listener_accept_receiver(listener, deadline(), &receiver);
    if (code != PELTON_OK) return failed("listen", code);
    for (long i = 0; i < count; i++) {
        code = pelton_receiver_receive(receiver, deadline(), &received); /* in place: received.data */
        if (code != PELTON_OK) return failed("receive", code);
        if (!matches(i, received.data, received.size)) return wrong(i, received.size);
        pelton_receiver_release(receiver);
    }
    code = pelton_receiver_receive(receiver, deadline(), &received);
    if (code != PELTON_CLOSED) return failed("receive, after the last message", code);
    pelton_close(receiver);
    pelton_close(listener);
    return 0;
}

static int gather_messages(void) {
    pelton_receiver *receiver;
    pelton_message received;
    int code = pelton_receiver_gather(name, NULL, &receiver);
    if (code != PELTON_OK) return failed("listen", code);
    for (long i = 0; i < count; i++) {
        code = pelton_receiver_receive(receiver, deadline(), &received); /* of all senders, round-robin */
        if (code != PELTON_OK) return failed("receive", code);
        fwrite(received.data, 1, received.size < size ? received.size : size, stdout);
        putchar('\n');
        fflush(stdout);
        pelton_receiver_release(receiver);
    }
    pelton_close(receiver);
    return 0;
}

static int call_service(void) {
    pelton_client_options options = PELTON_CLIENT_OPTIONS_INIT;
    pelton_client *client;
    pelton_completion reply;
    options.deadline_ns = deadline();
    int code = pelton_client_open(name, &options, &client);
    if (code != PELTON_OK) return failed("connect", code);
    for (long i = 0; i < count; i++) {
        code = pelton_client_call(client, message(i), size, deadline(), &reply);
        if (code != PELTON_OK) return failed("call", code);
        if (!matches(i, reply.data, reply.size)) return wrong(i, reply.size);
        pelton_client_release(client);
    }
    pelton_close(client);
    return 0;
}

static int serve_calls(void) {
    pelton_service *service;
    pelton_request request;
    int code = pelton_service_open(name, NULL, &service);
    if (code != PELTON_OK) return failed("listen", code);
    for (long i = 0; i < count; i++) {
        code = pelton_service_receive(service, deadline(), &request);
        if (code != PELTON_OK) return failed("serve", code);
        if (request.responder != NULL) { /* NULL: a notification */
            code = pelton_responder_reply(request.responder, request.data, request.size);
            if (code != PELTON_OK) failed("reply", code); /* the client has gone */
        }
        pelton_service_release(service);
    }
    /* Draining ends when every client has its replies. */
    pelton_service_drain(service);
    code = pelton_service_receive(service, deadline(), &request);
    if (code != PELTON_CLOSED) return failed("drain", code);
    pelton_close(service);
    return 0;
}

int main(int arguments, char **argument) {
    static const struct { const char *verb; int (*run)(void); const char *unit; } commands[] = {
        {"send", send_messages, "messages"}, {"recv", receive_messages, "messages"}, {"call", call_service, "calls"}, {"serve", serve_calls, "calls"},
        {"gather", gather_messages, "messages"}};
    const char *verb = arguments > 1 ? argument[1] : "";
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        if (strcmp(verb, commands[i].verb) != 0) continue;
        if (arguments != 5) return fprintf(stderr, "usage: driver %s NAME COUNT SIZE\n", verb), 2;
        name = argument[2], count = atol(argument[3]), size = strtoul(argument[4], NULL, 10);
        if (!(letters = malloc(size + 26))) return 1;
        for (size_t j = 0; j < size + 26; j++) letters[j] = (char)('a' + j % 26);
        int code = commands[i].run();
        if (code == 0) printf("ok %s %ld %s\n", verb, count, commands[i].unit);
        return code;
    }
    printf("unsupported %s: this driver does not have it\n", verb);
    return 3;
}
