/* The conformance driver in C. ../README.md has the command line, the messages and the report. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../crc32.h"
#include "pelton.h"

static const char *name, *then = "close";
static long count;
static size_t sizes[1000], sizes_count;
static char *letters; /* the alphabet, repeated: every message is a slice of it */

/* The report. */
static long messages;
static uint64_t bytes;
static uint32_t checksum;

static size_t size_of(long i) { return sizes[(size_t)i % sizes_count]; }
static const char *message(long i) { return letters + i % 26; }
static int then_is(const char *what) { return strcmp(then, what) == 0; }
static int is_path(void) { return strncmp(name, "path:", 5) == 0; }

static int64_t deadline(void) {
    const char *seconds = getenv("PELTON_SECONDS");
    return pelton_deadline(INT64_C(1000000000) * (seconds ? atol(seconds) : 10));
}

static int failed(const char *what, int code) {
    fprintf(stderr, "%s, after %ld messages: %s: %s\n", what, messages, pelton_code_text(code), pelton_error_detail());
    return 1;
}

static void add(const void *data, size_t size) {
    messages++;
    bytes += size;
    checksum += crc32(data, size);
}

/* Adds the next message to the report. Returns 0 if it is another one than expected. */
static int added(const void *data, size_t size) {
    size_t expected = messages < count ? size_of(messages) : 0;
    if (messages < count && size == expected && memcmp(data, message(messages), size) == 0) return add(data, size), 1;
    fprintf(stderr, "message %ld of %ld: found %zu bytes `%.*s`, expected %zu bytes `%.*s`\n", messages, count, size,
            size < 30 ? (int)size : 30, (const char *)data, expected, expected < 30 ? (int)expected : 30,
            message(messages));
    return 0;
}

static int all_arrived(void) {
    if (messages != count) fprintf(stderr, "found %ld messages, expected %ld\n", messages, count);
    return messages == count;
}

/* By path an open creates the channel, and waits for nobody: messages wait there. By name it waits for a listener. */
static pelton_channel_options channel_options(void) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    if (is_path()) options.create = 1;
    else options.deadline_ns = deadline();
    return options;
}

/* The traceparent of message i, or "", with the THEN `traced`. */
static const char *traceparent_of(long i) {
    static char text[80]; /* of PELTON_TRACEPARENT_SIZE */
    unsigned long id = (unsigned long)i + 1;
    if (i % 3 == 0) return "";
    snprintf(text, sizeof text, "00-%032lx-%016lx-%02x", id, id, (unsigned)(i % 256));
    return text;
}

/* Whether the received message i has the right traceparent: without `traced` none. */
static int is_traced_as_wanted(const pelton_receiver *receiver, long i) {
    char found[PELTON_TRACEPARENT_SIZE] = "";
    const char *wanted = then_is("traced") ? traceparent_of(i) : "";
    pelton_receiver_traceparent(receiver, found);
    if (strcmp(found, wanted) == 0) return 1;
    fprintf(stderr, "message %ld: found the traceparent `%s`, expected `%s`\n", i, found, wanted);
    return 0;
}

static int send_messages(void) {
    pelton_channel_options options = channel_options();
    pelton_sender *sender;
    options.traced = then_is("traced");
    int code = pelton_sender_open(name, &options, &sender);
    if (code != PELTON_OK) return failed("connect", code);
    for (int released = 0; !released;) {
        if (messages < count) {
            code = pelton_sender_send_traced(sender, message(messages), size_of(messages),
                                             then_is("traced") ? traceparent_of(messages) : NULL, deadline());
            if (code == PELTON_OK) add(message(messages), size_of(messages));
        } else {
            if (then_is("die")) return 0;
            code = pelton_sender_wait_released(sender, deadline());
            released = code == PELTON_OK;
        }
        /* The successor gets what the receiver that died has not released. */
        if (code == PELTON_PEER_DIED && then_is("resume")) code = pelton_sender_resume(sender, deadline());
        if (code != PELTON_OK) return failed("send", code);
    }
    code = pelton_close(sender);
    return code == PELTON_OK ? 0 : failed("close", code);
}

static int receive_messages(void) {
    pelton_channel_options options = channel_options();
    pelton_listener *listener = NULL;
    pelton_receiver *receiver;
    pelton_message received;
    int code, is_rest = then_is("rest"), end = then_is("died") ? PELTON_PEER_DIED : PELTON_CLOSED;
    uint32_t *checksums = calloc((size_t)count + 1, sizeof *checksums); /* of `rest` */
    if (checksums == NULL) return perror("recv"), 1;
    if (is_path()) {
        options.traced = then_is("traced");
        code = pelton_receiver_open(name, &options, &receiver);
    } else {
        code = pelton_listener_open(name, NULL, &listener);
        if (code == PELTON_OK) code = pelton_listener_accept_receiver(listener, deadline(), &receiver);
    }
    if (code != PELTON_OK) return failed("listen", code);
    for (;;) {
        if (then_is("die") && messages == count) return 0;
        code = pelton_receiver_receive(receiver, deadline(), &received); /* in place: received.data */
        if (code != PELTON_OK) break;
        if (is_rest && messages < count) {
            checksums[messages] = crc32(received.data, received.size);
            add(received.data, received.size);
        } else if (!is_traced_as_wanted(receiver, messages) || !added(received.data, received.size)) {
            return 1;
        }
        pelton_receiver_release(receiver);
    }
    if (code != end) return failed("receive", code);
    pelton_close(receiver);
    pelton_close(listener);
    if (!is_rest || messages == 0) return !all_arrived();
    for (long i = 0; i < messages; i++) {
        long expected = count - messages + i;
        if (checksums[i] == crc32(message(expected), size_of(expected))) continue;
        fprintf(stderr, "the %ldth of the %ld last messages differs from message %ld\n", i + 1, messages, expected);
        return 1;
    }
    return 0;
}

static int gather_messages(void) {
    pelton_receiver *receiver;
    pelton_message received;
    int code = pelton_receiver_gather(name, NULL, &receiver);
    if (code != PELTON_OK) return failed("listen", code);
    while (messages < count) {
        code = pelton_receiver_receive(receiver, deadline(), &received); /* of all senders, round-robin */
        if (code != PELTON_OK) return failed("receive", code);
        fwrite(received.data, 1, received.size < sizes[0] ? received.size : sizes[0], stdout);
        putchar('\n');
        fflush(stdout);
        add(received.data, received.size);
        pelton_receiver_release(receiver);
    }
    pelton_close(receiver);
    return 0;
}

static pelton_client *connected(void) {
    pelton_client_options options = PELTON_CLIENT_OPTIONS_INIT;
    pelton_client *client;
    options.deadline_ns = deadline(); /* until then it waits for a service */
    int code = pelton_client_open(name, &options, &client);
    if (code == PELTON_OK) return client;
    failed("connect", code);
    return NULL;
}

static int call_service(void) {
    pelton_client *client = connected();
    pelton_completion reply;
    if (client == NULL) return 1;
    while (messages < count) {
        int code = pelton_client_call(client, message(messages), size_of(messages), deadline(), &reply);
        if (code != PELTON_OK) return failed("call", code);
        if (reply.outcome != PELTON_REPLY) return fprintf(stderr, "the call's outcome is %u\n", reply.outcome), 1;
        if (!added(reply.data, reply.size)) return 1;
        pelton_client_release(client);
    }
    pelton_close(client);
    return 0;
}

static int stream_reply(void) {
    pelton_client *client = connected();
    pelton_completion part = {.outcome = PELTON_PART};
    if (client == NULL) return 1;
    int code = pelton_client_call(client, message(0), size_of(0), deadline(), &part);
    while (code == PELTON_OK && part.outcome == PELTON_PART) {
        if (!added(part.data, part.size)) return 1;
        pelton_client_release(client);
        code = pelton_client_await_call(client, part.call, deadline(), &part);
    }
    if (code != PELTON_OK) return failed("stream", code);
    /* A reply in parts ends with its last part, or after it. */
    if (part.outcome == PELTON_REPLY ? !added(part.data, part.size) : part.outcome != PELTON_END)
        return fprintf(stderr, "the last outcome is %u\n", part.outcome), 1;
    pelton_close(client);
    return !all_arrived();
}

/* Drains and closes the service: draining ends when every client has its replies. */
static int drained(pelton_service *service) {
    pelton_request request;
    pelton_service_drain(service);
    int code = pelton_service_receive(service, deadline(), &request);
    if (code != PELTON_CLOSED) return failed("drain", code);
    pelton_close(service);
    return 0;
}

static int serve_calls(void) {
    pelton_service *service;
    pelton_request request;
    int code = pelton_service_open(name, NULL, &service);
    if (code != PELTON_OK) return failed("listen", code);
    while (messages < count) {
        code = pelton_service_receive(service, deadline(), &request);
        if (code != PELTON_OK) return failed("serve", code);
        if (request.responder != NULL) { /* NULL: a notification */
            code = pelton_responder_reply(request.responder, request.data, request.size);
            if (code != PELTON_OK) failed("reply", code); /* the client has gone */
            add(request.data, request.size);
        }
        pelton_service_release(service);
    }
    return drained(service);
}

static int serve_stream(void) {
    pelton_service *service;
    pelton_request request;
    int code = pelton_service_open(name, NULL, &service);
    if (code == PELTON_OK) code = pelton_service_receive(service, deadline(), &request);
    if (code != PELTON_OK) return failed("serve", code);
    pelton_service_release(service);
    while (messages < count) {
        /* It waits for space; on this thread, since no other client waits for this service. */
        code = pelton_responder_part(request.responder, message(messages), size_of(messages), deadline());
        if (code != PELTON_OK) return failed("part", code);
        add(message(messages), size_of(messages));
    }
    code = pelton_responder_end(request.responder);
    return code == PELTON_OK ? drained(service) : failed("end", code);
}

static int write_records(void) {
    pelton_appenders *appenders;
    int code = pelton_appenders_to_record_file(name, NULL, NULL, &appenders);
    while (code == PELTON_OK && messages < count) {
        code = pelton_appenders_append(appenders, message(messages), size_of(messages));
        if (code == PELTON_OK) add(message(messages), size_of(messages));
    }
    if (code == PELTON_OK) code = pelton_appenders_sync(appenders);
    if (code == PELTON_OK) code = pelton_close(appenders);
    return code == PELTON_OK ? 0 : failed("write", code);
}

static int read_records(void) {
    pelton_records *records = NULL;
    pelton_record record;
    long damaged = 0;
    int code = pelton_records_open(name, &records);
    const char *end = code == PELTON_NOT_A_RECORD_FILE ? "refused" : NULL;
    if (code != PELTON_OK && end == NULL) return failed("open", code);
    while (end == NULL) {
        code = pelton_records_next(records, &record);
        switch (code) {
        case PELTON_OK: add(record.data, record.size); break;
        case PELTON_DAMAGED: damaged++; break;
        case PELTON_AGAIN: end = "end"; break;
        case PELTON_TORN: end = "torn"; break;
        case PELTON_NOT_A_RECORD_FILE: end = "later"; break;
        default: return failed("read", code);
        }
    }
    pelton_close(records);
    printf("ok read-records %ld messages %llu bytes checksum %08x damaged %ld %s\n", messages,
           (unsigned long long)bytes, checksum, damaged, end);
    return 0;
}

static int vectors(void) {
    puts("unsupported vectors: libpelton, which it uses, is tested with the vectors");
    return 3;
}

/* Reads COUNT and SIZES, and creates the letters. Returns 0 if they are no numbers. */
static int numbers(char *count_text, char *sizes_text) {
    char *end;
    size_t longest = 0;
    count = strtol(count_text, &end, 10);
    if (end == count_text || *end != 0 || count < 0) return 0;
    for (char *next = sizes_text;; next = end + 1) {
        if (sizes_count == sizeof sizes / sizeof *sizes) return 0;
        size_t size = sizes[sizes_count++] = strtoul(next, &end, 10);
        if (end == next || (*end != ',' && *end != 0)) return 0;
        if (size > longest) longest = size;
        if (*end == 0) break;
    }
    if ((letters = malloc(longest + 26)) == NULL) return 0;
    for (size_t j = 0; j < longest + 26; j++) letters[j] = (char)('a' + j % 26);
    return 1;
}

int main(int arguments, char **argument) {
    static const struct {
        const char *verb;
        int (*run)(void);
        const char *thens[5];
    } commands[] = {{"send", send_messages, {"close", "die", "resume", "traced"}},
                    {"recv", receive_messages, {"close", "died", "die", "rest", "traced"}},
                    {"call", call_service, {NULL}},
                    {"serve", serve_calls, {NULL}},
                    {"stream", stream_reply, {NULL}},
                    {"serve-stream", serve_stream, {NULL}},
                    {"gather", gather_messages, {NULL}},
                    {"write-records", write_records, {NULL}},
                    {"read-records", read_records, {NULL}},
                    {"vectors", vectors, {NULL}}};
    const char *verb = arguments > 1 ? argument[1] : "";
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        if (strcmp(verb, commands[i].verb) != 0) continue;
        if (commands[i].run == vectors) return vectors();
        int is_reading = commands[i].run == read_records, is_right = arguments == (is_reading ? 3 : 5);
        if (arguments == 6) then = argument[5];
        for (int j = 0; arguments == 6 && j < 5 && commands[i].thens[j] != NULL; j++)
            if (then_is(commands[i].thens[j])) is_right = 1;
        if (!is_right || !(is_reading || numbers(argument[3], argument[4])))
            return fprintf(stderr, "usage: driver %s NAME COUNT SIZES [THEN]: conformance/README.md\n", verb), 2;
        name = argument[2];
        int code = commands[i].run();
        if (code == 0 && !is_reading)
            printf("ok %s %ld messages %llu bytes checksum %08x\n", verb, messages, (unsigned long long)bytes,
                   checksum);
        fflush(stdout);
        if (code == 0 && then_is("die")) raise(SIGKILL);
        return code;
    }
    printf("unsupported %s: this driver does not have it\n", verb);
    return 3;
}
