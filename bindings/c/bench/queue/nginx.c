/* The queue in nginx's event loop: see queue.h. A worker has one. */
#include <errno.h>
#include <stdlib.h>

#include "queue.h"

static struct queue queue;
static int (*post_semaphore)(void *semaphore, int count);

/* nginx has found the eventfd readable. ngx_lua resumes the coroutines in the same turn of the loop. */
static void on_replies(void *event) {
    struct queue_call *call = queue_replies(&queue);
    (void)event;
    while (call != NULL) {
        struct queue_call *next = call->next;
        post_semaphore(call->of, 1);
        call = next;
    }
}

struct queue *queue_in_nginx(void *(*watch)(int fd, void *data, void (*handler)(void *event)),
                             int (*post)(void *semaphore, int count)) {
    post_semaphore = post;
    errno = queue_open(&queue);
    if (errno != 0) return NULL;
    errno = ENOMEM;
    if (watch(queue.fd, NULL, on_replies) == NULL) return NULL;
    errno = queue_start_handler(&queue);
    return errno == 0 ? &queue : NULL;
}
