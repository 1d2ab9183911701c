/* A service for the tests of nginx: replies with the request's bytes, except to these words.
 *
 *     service NAME      SIGUSR1: drains, and ends
 *
 *   fail CODE TEXT   fails with that code and text
 *   abandon          closes the responder without a reply
 *   stall            never replies
 *   later TEXT       replies from a thread, 10 ms later
 *   cancelled        number of stalled calls that were cancelled
 *   begin            one part, and nothing more
 *   parts COUNT SIZE so many parts, numbered, then the end
 *   broken COUNT     so many parts, then fails with code 7
 *   flood            parts without end, until it is cancelled
 *   notified         number of notifications, and the last one
 *   defer SIZE       replies with so many bytes at `finish`
 *   finish           replies to deferred calls, then leaves
 *   leave            closes, listens again, creates NAME.mark
 *   mark             replies, then creates the file NAME.mark
 *   eager 0|1        1: polls, and never sleeps
 *   die              is killed
 *   block            a notification: receives nothing until NAME.go exists
 *   traceparent      that of the request, or "none"
 *   order            the second letters of notifications that begin with o; of these oA blocks
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pelton.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct work {
    pelton_responder *responder;
    char word[16];
    char text[128];
    long count, size;
} work;

/* The client has gone. */
static void dropped(int code) { (void)code; }

static void echo(const pelton_request *request) {
    if (pelton_responder_reply(request->responder, request->data, request->size) == PELTON_TOO_LARGE) {
        dropped(pelton_responder_fail(request->responder, 1, "too large for this client", 25));
    }
}

static pelton_responder *stalled[4096];
static size_t stalled_count;
static pelton_responder *deferred[64];
static size_t deferred_bytes[64];
static size_t deferred_count;

/* A file beside the socket. */
static const char *beside(const char *name, const char *end) {
    static char path[256];
    snprintf(path, sizeof path, "%s%s", name + strlen("unix:"), end);
    return path;
}

static void mark(const char *name) {
    FILE *file = fopen(beside(name, ".mark"), "w");
    if (file == NULL || fclose(file) != 0) abort();
}

static void wait_for_go(const char *name) {
    struct timespec rest = {0, 1000000};
    while (unlink(beside(name, ".go")) != 0) nanosleep(&rest, NULL);
}

static void reply_deferred(void) {
    for (size_t i = 0; i < deferred_count; i++) {
        char *bytes = malloc(deferred_bytes[i]);
        memset(bytes, 'h', deferred_bytes[i]);
        dropped(pelton_responder_reply(deferred[i], bytes, deferred_bytes[i]));
        free(bytes);
    }
    deferred_count = 0;
}

static void *at_work(void *data) {
    work *own = data;
    char part[65536];
    int code = PELTON_OK;
    memset(part, 'p', sizeof part);
    if (strcmp(own->word, "later") == 0) {
        struct timespec rest = {0, 10000000};
        nanosleep(&rest, NULL);
        dropped(pelton_responder_reply(own->responder, own->text, strlen(own->text)));
    } else if (strcmp(own->word, "flood") == 0) {
        /* Without waiting for space: a thread that waits delays this client's cancel. */
        struct timespec rest = {0, 1000000};
        while (pelton_responder_is_cancelled(own->responder) == 0 && (code == PELTON_OK || code == PELTON_AGAIN)) {
            code = pelton_responder_part(own->responder, part, sizeof part, PELTON_NO_WAIT);
            if (code == PELTON_AGAIN) nanosleep(&rest, NULL);
        }
        if (code == PELTON_OK || code == PELTON_AGAIN) dropped(pelton_responder_end(own->responder));
    } else {
        for (long i = 0; i < own->count && code == PELTON_OK; i++) {
            int digits = snprintf(part, sizeof part, "%ld ", i);
            part[digits] = 'p';
            code = pelton_responder_part(own->responder, part, (size_t)(own->size > digits ? own->size : digits), PELTON_FOREVER);
        }
        if (code == PELTON_OK && strcmp(own->word, "broken") == 0) {
            dropped(pelton_responder_fail(own->responder, 7, "broken", 6));
        } else if (code == PELTON_OK) {
            dropped(pelton_responder_end(own->responder));
        }
    }
    free(own);
    return NULL;
}

/* Closes the cancelled ones, which count as in flight until then. Returns their number. */
static unsigned long close_cancelled(void) {
    size_t kept = 0, before = stalled_count;
    for (size_t i = 0; i < before; i++) {
        if (pelton_responder_is_cancelled(stalled[i]) == 0) {
            stalled[kept++] = stalled[i];
        } else {
            (void)pelton_close(stalled[i]);
        }
    }
    stalled_count = kept;
    return before - kept;
}

static void in_a_thread(const pelton_request *request, const char *text) {
    work *own = calloc(1, sizeof *own);
    pthread_t thread;
    own->responder = request->responder;
    sscanf(text, "%15s %ld %ld", own->word, &own->count, &own->size);
    if (strncmp(text, "later ", 6) == 0) snprintf(own->text, sizeof own->text, "%s", text + 6);
    if (pthread_create(&thread, NULL, at_work, own) != 0) abort();
    pthread_detach(thread);
}

static pelton_service *service;
static sigset_t drains;

static void listen_to(const char *name) {
    pelton_service_options options = PELTON_SERVICE_OPTIONS_INIT;
    /* The largest request. */
    options.call_bytes_max = 8 << 20;
    if (pelton_service_open(name, &options, &service) != PELTON_OK) {
        fprintf(stderr, "%s\n", pelton_error_detail());
        exit(1);
    }
}

/* Ends every client's connection, and listens again. */
static void leave(const char *name) {
    while (stalled_count > 0) (void)pelton_close(stalled[--stalled_count]);
    (void)pelton_close(service);
    listen_to(name);
    mark(name);
}

static void *drain(void *unused) {
    int signal;
    (void)unused;
    if (sigwait(&drains, &signal) == 0) (void)pelton_service_drain(service);
    return NULL;
}

int main(int argc, char **argv) {
    pelton_request request;
    pthread_t drainer;
    char last[64] = "", text[128], answer[128], order[64] = "";
    unsigned long notified = 0, cancelled = 0;
    int code, is_eager = 0;
    if (argc < 2) return 2;
    sigemptyset(&drains);
    sigaddset(&drains, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &drains, NULL);
    listen_to(argv[1]);
    if (pthread_create(&drainer, NULL, drain, NULL) != 0) return 1;
    for (;;) {
        code = pelton_service_receive(service, is_eager ? PELTON_NO_WAIT : pelton_deadline(10000000), &request);
        if (stalled_count > 0) cancelled += close_cancelled();
        if (code == PELTON_AGAIN) {
            if (is_eager) (void)sched_yield();
            continue;
        }
        if (code != PELTON_OK) break;
        size_t size = request.size < sizeof text - 1 ? request.size : sizeof text - 1;
        memcpy(text, request.data, size);
        text[size] = '\0';
        if (request.responder == NULL) {
            notified++;
            snprintf(last, sizeof last, "%.60s", text);
            if (strncmp(text, "oA", 2) == 0) wait_for_go(argv[1]);
            if (text[0] == 'o' && strlen(order) < sizeof order - 1) strncat(order, text + 1, 1);
            if (strcmp(text, "block") == 0) wait_for_go(argv[1]);
        } else if (strcmp(text, "traceparent") == 0) {
            char found[PELTON_TRACEPARENT_SIZE] = "none";
            (void)pelton_responder_traceparent(request.responder, found);
            dropped(pelton_responder_reply(request.responder, found, strlen(found)));
        } else if (request.size >= sizeof text) {
            echo(&request);
        } else if (strncmp(text, "fail ", 5) == 0) {
            char *rest = strchr(text + 5, ' ');
            dropped(pelton_responder_fail(request.responder, (uint32_t)strtoul(text + 5, NULL, 10), rest + 1, strlen(rest + 1)));
        } else if (strcmp(text, "abandon") == 0) {
            (void)pelton_close(request.responder);
        } else if (strcmp(text, "stall") == 0) {
            if (stalled_count == 4096) abort();
            stalled[stalled_count++] = request.responder;
        } else if (strcmp(text, "cancelled") == 0) {
            dropped(pelton_responder_reply(request.responder, answer, (size_t)snprintf(answer, sizeof answer, "%lu", cancelled)));
        } else if (strcmp(text, "notified") == 0) {
            dropped(pelton_responder_reply(request.responder, answer, (size_t)snprintf(answer, sizeof answer, "%lu %s", notified, last)));
        } else if (strcmp(text, "order") == 0) {
            dropped(pelton_responder_reply(request.responder, order, strlen(order)));
            order[0] = '\0';
        } else if (strncmp(text, "eager ", 6) == 0) {
            is_eager = text[6] == '1';
            echo(&request);
        } else if (strcmp(text, "begin") == 0) {
            if (stalled_count == 4096) abort();
            dropped(pelton_responder_part(request.responder, "begun", 5, PELTON_NO_WAIT));
            stalled[stalled_count++] = request.responder;
        } else if (strcmp(text, "mark") == 0) {
            echo(&request);
            mark(argv[1]);
        } else if (strncmp(text, "defer ", 6) == 0) {
            if (deferred_count == 64) abort();
            deferred_bytes[deferred_count] = strtoul(text + 6, NULL, 10);
            deferred[deferred_count++] = request.responder;
        } else if (strcmp(text, "finish") == 0 || strcmp(text, "leave") == 0) {
            reply_deferred();
            (void)pelton_close(request.responder);
            (void)pelton_service_release(service);
            leave(argv[1]);
            continue;
        } else if (strcmp(text, "die") == 0) {
            raise(SIGKILL);
        } else if (strncmp(text, "later ", 6) == 0 || strncmp(text, "parts ", 6) == 0 || strncmp(text, "broken ", 7) == 0 ||
                   strcmp(text, "flood") == 0) {
            in_a_thread(&request, text);
        } else {
            echo(&request);
        }
        (void)pelton_service_release(service);
    }
    if (code == PELTON_CLOSED) return pelton_close(service) != PELTON_OK;
    fprintf(stderr, "%s: %s\n", pelton_code_text(code), pelton_error_detail());
    return 1;
}
