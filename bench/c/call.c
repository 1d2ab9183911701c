/* A client and a service of calls as C programs: include/pelton.h as its text recommends, blocking or in an epoll loop.
 *
 * The benchmark compiles it with `cc -O3 -fPIC -shared`, links it with libpelton.so and loads it
 * (src/systems/call/c.rs), which also has the clock and the checks. The client reads a reply in place, and the service
 * a request. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>

#include "pelton.h"

enum how { SPIN, BLOCK, EPOLL };

/* One side. systems/call/c.rs has the same struct: it fills in the first part. */
struct side {
    const char *name;
    uint64_t capacity;
    int64_t connect_ns;
    uint32_t how;

    pelton_client *client;
    pelton_service *service;
    int epoll;
    char error[512];
};

static int fail(struct side *side, const char *what, int code) {
    snprintf(side->error, sizeof side->error, "%s: %s: %s", what, pelton_code_text(code), pelton_error_detail());
    return -1;
}

static int fail_system(struct side *side, const char *what) {
    snprintf(side->error, sizeof side->error, "%s: %s", what, strerror(errno));
    return -1;
}

static int watch(struct side *side, int fd) {
    struct epoll_event event = {.events = EPOLLIN};
    side->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (side->epoll < 0 || epoll_ctl(side->epoll, EPOLL_CTL_ADD, fd, &event) != 0) {
        return fail_system(side, "creating an epoll instance");
    }
    return 0;
}

static int sleep_in_epoll(struct side *side) {
    struct epoll_event event;
    return epoll_wait(side->epoll, &event, 1, -1) < 0 && errno != EINTR ? fail_system(side, "waiting in epoll") : 0;
}

/* ---- Client ------------------------------------------------------------------------------------------------------ */

int call_connect(struct side *side) {
    pelton_client_options options = PELTON_CLIENT_OPTIONS_INIT;
    options.capacity = side->capacity;
    options.wait = side->how == SPIN ? PELTON_SPIN : PELTON_BLOCK;
    options.deadline_ns = pelton_deadline(side->connect_ns);
    int code = pelton_client_open(side->name, &options, &side->client);
    if (code != PELTON_OK) return fail(side, "connecting", code);
    return side->how == EPOLL ? watch(side, pelton_client_fd(side->client)) : 0;
}

/* The next completion, from the loop: without one, busy-polls for some microseconds, then arms and sleeps. */
static int await_in_loop(struct side *side, pelton_completion *reply) {
    for (;;) {
        int code = pelton_client_await(side->client, PELTON_NO_WAIT, reply);
        if (code == PELTON_OK) return 0;
        if (code == PELTON_AGAIN) code = pelton_client_poll(side->client);
        if (code == PELTON_AGAIN) {
            code = pelton_client_arm(side->client);
            if (code == PELTON_OK && sleep_in_epoll(side) != 0) return -1;
            if (code == PELTON_OK) pelton_client_disarm(side->client);
        }
        if (code < 0) return fail(side, "awaiting a reply", code);
    }
}

/* One call. The reply is valid until call_release. */
int call_make(struct side *side, const void *request, size_t size, const void **reply, size_t *reply_size) {
    pelton_completion completion;
    if (side->how == EPOLL) {
        uint64_t number;
        int code = pelton_client_submit(side->client, request, size, 0, PELTON_FOREVER, &number);
        if (code != PELTON_OK) return fail(side, "submitting", code);
        if (await_in_loop(side, &completion) != 0) return -1;
    } else {
        int code = pelton_client_call(side->client, request, size, PELTON_FOREVER, &completion);
        if (code != PELTON_OK) return fail(side, "calling", code);
    }
    if (completion.outcome != PELTON_REPLY) {
        snprintf(side->error, sizeof side->error, "a call ended with outcome %u, wanted a reply", completion.outcome);
        return -1;
    }
    *reply = completion.data;
    *reply_size = completion.size;
    return 0;
}

int call_release(struct side *side) {
    int code = pelton_client_release(side->client);
    return code == PELTON_OK ? 0 : fail(side, "releasing a reply", code);
}

/* Notifies the service that a pass is over. */
int call_end_pass(struct side *side) {
    int code = pelton_client_notify(side->client, NULL, 0, PELTON_FOREVER);
    return code == PELTON_OK ? 0 : fail(side, "notifying", code);
}

/* ---- Service ----------------------------------------------------------------------------------------------------- */

int call_listen(struct side *side) {
    pelton_service_options options = PELTON_SERVICE_OPTIONS_INIT;
    options.capacity = side->capacity;
    options.wait = side->how == SPIN ? PELTON_SPIN : PELTON_BLOCK;
    int code = pelton_service_open(side->name, &options, &side->service);
    if (code != PELTON_OK) return fail(side, "listening", code);
    return side->how == EPOLL ? watch(side, pelton_service_fd(side->service)) : 0;
}

static int receive_in_loop(struct side *side, pelton_request *request) {
    for (;;) {
        int code = pelton_service_receive(side->service, PELTON_NO_WAIT, request);
        if (code == PELTON_OK) return 0;
        if (code == PELTON_AGAIN) code = pelton_service_poll(side->service);
        if (code == PELTON_AGAIN) {
            code = pelton_service_arm(side->service);
            if (code == PELTON_OK && sleep_in_epoll(side) != 0) return -1;
            if (code == PELTON_OK) pelton_service_disarm(side->service);
        }
        if (code < 0) return fail(side, "receiving", code);
    }
}

/* Replies to each request with its own bytes, until the client's pass is over. */
int call_serve(struct side *side, uint64_t *count, uint64_t *bytes) {
    *count = *bytes = 0;
    for (;;) {
        pelton_request request;
        if (side->how == EPOLL) {
            if (receive_in_loop(side, &request) != 0) return -1;
        } else {
            int code = pelton_service_receive(side->service, PELTON_FOREVER, &request);
            if (code != PELTON_OK) return fail(side, "receiving", code);
        }
        int is_call = request.responder != NULL;
        if (is_call) {
            int code = pelton_responder_reply(request.responder, request.data, request.size);
            if (code != PELTON_OK) return fail(side, "replying", code);
            *count += 1;
            *bytes += request.size;
        }
        pelton_service_release(side->service);
        if (!is_call) return 0;
    }
}

void call_close(struct side *side) {
    pelton_close(side->client);
    pelton_close(side->service);
}
