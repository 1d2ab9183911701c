//go:build ignore

/* The handler as a thread of C. The library with a handler in Go has handler.go instead. */
#include <stdlib.h>
#include <string.h>

#include "queue.h"

static void *handle(void *of) {
    struct queue *queue = of;
    struct queue_call *call;
    while ((call = queue_pop(queue)) != NULL) {
        char *space = queue_reply_space(call, call->request_size);
        if (space == NULL) abort();
        memcpy(space, call->request, call->request_size);
        queue_reply(queue, call);
    }
    return NULL;
}

int queue_start_handler(struct queue *queue) {
    pthread_t thread;
    int error = pthread_create(&thread, NULL, handle, queue);
    if (error == 0) pthread_detach(thread);
    return error;
}
