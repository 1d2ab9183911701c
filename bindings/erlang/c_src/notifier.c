/* The notifier thread. See nif.h. */
#include "nif.h"
#include <sys/epoll.h>
#include <sys/eventfd.h>

struct notifier {
    struct notifier_events events;
    ErlNifTid thread;
    atomic_bool ends;
    struct notifier *predecessor; /* joined by this one */
};

int notifier_watch(int fd, enum watched *watched)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = watched};
    return epoll_ctl(shared->epoll, EPOLL_CTL_ADD, fd, &event) ? errno : 0;
}

int notifier_watch_once(int fd, enum watched *watched)
{
    struct epoll_event event = {.events = EPOLLONESHOT, .data.ptr = watched};
    return epoll_ctl(shared->epoll, EPOLL_CTL_ADD, fd, &event) ? errno : 0;
}

int notifier_rewatch(int fd, enum watched *watched)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLONESHOT, .data.ptr = watched};
    return epoll_ctl(shared->epoll, EPOLL_CTL_MOD, fd, &event) ? errno : 0;
}

void notifier_unwatch(int fd)
{
    epoll_ctl(shared->epoll, EPOLL_CTL_DEL, fd, NULL);
}

void notifier_wake(void)
{
    /* It fails only when the counter is at its limit: then the thread wakes anyway. */
    if (eventfd_write(shared->doorbell, 1))
        return;
}

static void *notify(void *argument)
{
    struct notifier *self = argument;
    self->thread = enif_thread_self();
    if (self->predecessor) {
        atomic_store(&self->predecessor->ends, true);
        notifier_wake();
        enif_thread_join(self->predecessor->thread, NULL);
        enif_free(self->predecessor);
    }
    for (int sleep_ms = 0; !atomic_load(&self->ends); sleep_ms = self->events.work()) {
        struct epoll_event events[32];
        int count = epoll_wait(shared->epoll, events, 32, sleep_ms);
        for (int i = 0; i < count; i++) {
            enum watched *watched = events[i].data.ptr;
            eventfd_t rung;
            if (*watched != WATCHED_DOORBELL)
                self->events.ready(watched);
            else if (eventfd_read(shared->doorbell, &rung))
                continue;
        }
    }
    /* A wake-up that this thread received may have been for its successor. */
    notifier_wake();
    return NULL;
}

int notifier_start(struct notifier_events events)
{
    struct notifier *started = enif_alloc(sizeof *started);
    if (!started)
        return ENOMEM;
    struct notifier *predecessor = shared->notifier;
    *started = (struct notifier){.events = events, .predecessor = predecessor};
    shared->notifier = started;
    ErlNifTid thread;
    int error = enif_thread_create("pelton_notifier", &thread, notify, started, NULL);
    if (error) {
        shared->notifier = predecessor;
        enif_free(started);
    }
    return error;
}
