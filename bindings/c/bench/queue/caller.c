/* A C program whose epoll loop has nothing but the queue: see queue.h. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

#include "queue.h"

struct caller {
    struct queue queue;
    struct queue_call call;
    int epoll;
};

struct caller *caller_open(void) {
    struct epoll_event event = {.events = EPOLLIN};
    struct caller *caller = aligned_alloc(_Alignof(struct caller), sizeof(struct caller));
    if (caller == NULL) return NULL;
    memset(&caller->call, 0, sizeof caller->call);
    errno = queue_open(&caller->queue);
    if (errno != 0) return NULL;
    caller->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (caller->epoll < 0 || epoll_ctl(caller->epoll, EPOLL_CTL_ADD, caller->queue.fd, &event) != 0) return NULL;
    errno = queue_start_handler(&caller->queue);
    return errno == 0 ? caller : NULL;
}

struct queue_call *caller_call(struct caller *caller, const char *request, size_t size) {
    struct queue_call *reply = NULL;
    caller->call.request = request;
    caller->call.request_size = size;
    queue_push(&caller->queue, &caller->call);
    while (reply == NULL) {
        struct epoll_event event;
        if (epoll_wait(caller->epoll, &event, 1, -1) < 0 && errno != EINTR) return NULL;
        reply = queue_replies(&caller->queue);
    }
    return reply;
}

void caller_end(struct caller *caller) { queue_end(&caller->queue); }
