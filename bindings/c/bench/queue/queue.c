/* The queue: see queue.h. */
#include "queue.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

static void make_empty(struct queue_list *list) {
    list->first = NULL;
    list->last = &list->first;
}

/* Returns whether the list was empty. */
static int append(struct queue_list *list, struct queue_call *call) {
    int was_empty = list->first == NULL;
    call->next = NULL;
    *list->last = call;
    list->last = &call->next;
    return was_empty;
}

int queue_open(struct queue *queue) {
    memset(queue, 0, sizeof *queue);
    queue->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (queue->fd < 0) return errno;
    pthread_mutex_init(&queue->lock, NULL);
    pthread_mutex_init(&queue->reply_lock, NULL);
    pthread_cond_init(&queue->filled, NULL);
    make_empty(&queue->requests);
    make_empty(&queue->replies);
    return 0;
}

void queue_end(struct queue *queue) {
    pthread_mutex_lock(&queue->lock);
    queue->is_over = 1;
    pthread_mutex_unlock(&queue->lock);
    pthread_cond_broadcast(&queue->filled);
}

struct queue_call *queue_call_new(void) { return calloc(1, sizeof(struct queue_call)); }

void queue_push(struct queue *queue, struct queue_call *call) {
    pthread_mutex_lock(&queue->lock);
    append(&queue->requests, call);
    pthread_mutex_unlock(&queue->lock);
    /* After the unlock: the woken handler finds the lock free. Without a sleeping handler this is no system call. */
    pthread_cond_signal(&queue->filled);
}

struct queue_call *queue_pop(struct queue *queue) {
    struct queue_call *call;
    pthread_mutex_lock(&queue->lock);
    while ((call = queue->requests.first) == NULL && !queue->is_over) {
        pthread_cond_wait(&queue->filled, &queue->lock);
    }
    if (call != NULL && (queue->requests.first = call->next) == NULL) queue->requests.last = &queue->requests.first;
    pthread_mutex_unlock(&queue->lock);
    return call;
}

char *queue_reply_space(struct queue_call *call, size_t size) {
    if (call->reply == NULL || size > call->reply_capacity) {
        free(call->reply);
        call->reply_capacity = size;
        call->reply = malloc(size == 0 ? 1 : size);
    }
    call->reply_size = size;
    return call->reply;
}

void queue_reply(struct queue *queue, struct queue_call *call) {
    uint64_t one = 1;
    int was_empty;
    pthread_mutex_lock(&queue->reply_lock);
    was_empty = append(&queue->replies, call);
    pthread_mutex_unlock(&queue->reply_lock);
    /* Otherwise the event loop has yet to take the replies before this one, and takes this one with them. */
    if (was_empty && write(queue->fd, &one, sizeof one) != sizeof one) abort();
}

struct queue_call *queue_replies(struct queue *queue) {
    struct queue_call *replies;
    uint64_t count;
    /* Before the list: a reply that comes after the list was taken makes the descriptor readable again. */
    if (read(queue->fd, &count, sizeof count) < 0 && errno != EAGAIN) abort();
    pthread_mutex_lock(&queue->reply_lock);
    replies = queue->replies.first;
    make_empty(&queue->replies);
    pthread_mutex_unlock(&queue->reply_lock);
    return replies;
}
