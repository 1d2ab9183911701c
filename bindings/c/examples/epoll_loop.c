/* A sender and a receiver, each in an epoll loop with other descriptors: lines come from standard input and go to
 * standard output. Each waits in epoll only. Without space the sender stops reading, and continues when there is
 * space.
 *
 *     epoll_loop receive NAME > copy
 *     producer | epoll_loop send NAME
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "pelton.h"

static int check(int code, const char *what) {
    if (code < 0 && code != PELTON_AGAIN && code != PELTON_CLOSED) {
        fprintf(stderr, "%s: %s: %s\n", what, pelton_code_text(code), pelton_error_detail());
        exit(1);
    }
    return code;
}

/* Level-triggered, for reading: all that a pelton descriptor needs. */
static void watch(int epoll, int fd) {
    struct epoll_event event;
    memset(&event, 0, sizeof event);
    event.events = EPOLLIN;
    event.data.fd = fd;
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0) {
        perror("epoll_ctl");
        exit(1);
    }
}

static void unwatch(int epoll, int fd) {
    epoll_ctl(epoll, EPOLL_CTL_DEL, fd, NULL);
}

static int next_ready(int epoll) {
    struct epoll_event event;
    if (epoll_wait(epoll, &event, 1, -1) != 1) {
        perror("epoll_wait");
        exit(1);
    }
    return event.data.fd;
}

static int receive_all(const char *name) {
    pelton_listener *listener;
    pelton_receiver *receiver = NULL;
    pelton_message message;
    int epoll = epoll_create1(0);
    check(pelton_listener_open(name, NULL, &listener), "listening");
    watch(epoll, pelton_listener_fd(listener));
    do {
        next_ready(epoll);
    } while (check(pelton_listener_accept_receiver(listener, PELTON_NO_WAIT, &receiver), "accepting") == PELTON_AGAIN);
    pelton_close(listener);
    watch(epoll, pelton_receiver_fd(receiver));
    for (;;) {
        /* Receive at most so many messages that other descriptors have their turn. */
        int code = PELTON_OK;
        for (int i = 0; i < 1000 && code == PELTON_OK; i++) {
            code = check(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message), "receiving");
            if (code != PELTON_OK) break;
            fwrite(message.data, 1, message.size, stdout);
            pelton_receiver_release(receiver);
        }
        /* Nothing more: busy-poll for some microseconds, then arm, and sleep. */
        if (code == PELTON_AGAIN) code = check(pelton_receiver_poll(receiver), "polling");
        if (code == PELTON_AGAIN) {
            code = check(pelton_receiver_arm(receiver), "arming");
            if (code == PELTON_OK) next_ready(epoll);
        }
        if (code == PELTON_CLOSED) break;
    }
    pelton_close(receiver);
    close(epoll);
    return 0;
}

static int send_all(const char *name) {
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_sender *sender;
    char buffer[4096];
    int epoll = epoll_create1(0);
    ssize_t pending = 0;
    options.deadline_ns = pelton_deadline(INT64_C(5000000000));
    /* Small, so that it is full at times. */
    options.capacity = 64 << 10;
    if (check(pelton_sender_open(name, &options, &sender), "opening") != PELTON_OK) {
        fprintf(stderr, "no process receives at %s\n", name);
        return 1;
    }
    int space = pelton_sender_fd(sender);
    watch(epoll, STDIN_FILENO);
    int is_full = 0;
    for (;;) {
        next_ready(epoll);
        if (!is_full) {
            pending = read(STDIN_FILENO, buffer, sizeof buffer);
            if (pending <= 0) break;
        }
        int code = check(pelton_sender_send(sender, buffer, (size_t)pending, PELTON_NO_WAIT), "sending");
        if (code == PELTON_CLOSED) break;
        if (code == PELTON_AGAIN) {
            /* Standard input waits until there is space. PELTON_READY: there is; the descriptor is readable. */
            check(pelton_sender_arm(sender, (size_t)pending), "arming");
        }
        if ((code == PELTON_AGAIN) != is_full) {
            is_full = !is_full;
            /* The sender's descriptor is polled only while something waits to be sent: usually there is space. */
            unwatch(epoll, is_full ? STDIN_FILENO : space);
            watch(epoll, is_full ? space : STDIN_FILENO);
        }
    }
    check(pelton_sender_disarm(sender), "disarming");
    check(pelton_sender_wait_released(sender, pelton_deadline(INT64_C(60000000000))), "waiting for the receiver");
    pelton_close(sender);
    close(epoll);
    return pending < 0;
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "receive") == 0) return receive_all(argv[2]);
    if (argc == 3 && strcmp(argv[1], "send") == 0) return send_all(argv[2]);
    fprintf(stderr, "usage: epoll_loop receive NAME | epoll_loop send NAME\n");
    return 2;
}
