/* A request queue inside one process, as C servers with an event loop and a thread pool have it: the event loop pushes
 * calls, a handler thread pops them and replies, and an eventfd notifies the event loop of replies. Nothing here
 * polls: the handler sleeps on a condition variable, the event loop in epoll.
 *
 * It is what pelton's calls are compared with: bench/README.md, "The queue". A call is passed by its address: no bytes
 * are copied but those that the handler writes into the reply. */
#ifndef QUEUE_H
#define QUEUE_H

#include <pthread.h>
#include <stddef.h>

/* A call. It belongs to the event loop, and from queue_push to queue_replies to the handler. */
struct queue_call {
    struct queue_call *next;
    const char *request; /* unchanged until the reply */
    size_t request_size;
    char *reply; /* kept from call to call */
    size_t reply_size, reply_capacity;
    void *of; /* the event loop's own */
};

struct queue_list {
    struct queue_call *first, **last;
};

/* Each side's lock and list have a cache line of their own. */
struct queue {
    pthread_mutex_t lock;
    pthread_cond_t filled;
    struct queue_list requests;
    int is_over;
    _Alignas(64) pthread_mutex_t reply_lock;
    struct queue_list replies;
    int fd; /* an eventfd: readable while there are replies */
};

/* Returns 0, or an errno. */
int queue_open(struct queue *queue);
/* Starts the one handler, which replies to each request with its own bytes: handler.c, or handler.go. 0, or an errno.
 */
int queue_start_handler(struct queue *queue);
/* Lets the handler end. Its thread may still read the queue, which therefore stays. */
void queue_end(struct queue *queue);

/* The event loop: a new call or NULL, a request, and all replies that have arrived, or NULL. */
struct queue_call *queue_call_new(void);
void queue_push(struct queue *queue, struct queue_call *call);
struct queue_call *queue_replies(struct queue *queue);

/* The handler: the next call, for which it waits, or NULL at the end; space for a reply of that size, or NULL; and the
 * reply. */
struct queue_call *queue_pop(struct queue *queue);
char *queue_reply_space(struct queue_call *call, size_t size);
void queue_reply(struct queue *queue, struct queue_call *call);

/* caller.c: a C program whose epoll loop has nothing but the queue. */
struct caller;
/* NULL: see errno. */
struct caller *caller_open(void);
/* One call: pushes the request, and sleeps in epoll until the reply. It is valid until the next call. NULL: errno says
 * why. */
struct queue_call *caller_call(struct caller *caller, const char *request, size_t size);
void caller_end(struct caller *caller);

/* nginx.c: the queue in nginx's event loop, of which coroutines sleep on semaphores of ngx_lua. `watch` is
 * ngx_pelton_watch, which polls pelton's own descriptors; `post` is ngx_http_lua_ffi_sema_post. NULL: see errno. */
struct queue *queue_in_nginx(void *(*watch)(int fd, void *data, void (*handler)(void *event)),
                             int (*post)(void *semaphore, int count));

#endif
