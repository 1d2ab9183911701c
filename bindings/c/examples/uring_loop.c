/* A receiver in the program's own io_uring: lines go to standard output. The ring polls the descriptor with
 * IORING_OP_POLL_ADD, one completion for each sleep. The sender is epoll_loop's.
 *
 *     uring_loop NAME > copy
 *     producer | epoll_loop send NAME
 */
#include <liburing.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <pelton.h>

enum { COMES = 1 };

static int check(int code, const char *what) {
    if (code < 0 && code != PELTON_AGAIN && code != PELTON_CLOSED) {
        fprintf(stderr, "%s: %s: %s\n", what, pelton_code_text(code), pelton_error_detail());
        exit(1);
    }
    return code;
}

/* Waits for a completion, of which this program has one kind only: the descriptor is readable. */
static void wait_for_messages(struct io_uring *ring, int fd) {
    struct io_uring_sqe *entry = io_uring_get_sqe(ring);
    struct io_uring_cqe *done;
    io_uring_prep_poll_add(entry, fd, POLLIN);
    io_uring_sqe_set_data64(entry, COMES);
    int code = io_uring_submit_and_wait(ring, 1);
    if (code >= 0) code = io_uring_wait_cqe(ring, &done);
    if (code < 0) {
        fprintf(stderr, "io_uring: %s\n", strerror(-code));
        exit(1);
    }
    if (done->user_data != COMES || !(done->res & POLLIN)) exit(1);
    io_uring_cqe_seen(ring, done);
}

int main(int argc, char **argv) {
    struct io_uring ring;
    pelton_listener *listener;
    pelton_receiver *receiver;
    pelton_message message;
    int code;
    if (argc != 2) {
        fprintf(stderr, "usage: uring_loop NAME\n");
        return 2;
    }
    if ((code = io_uring_queue_init(8, &ring, 0)) < 0) {
        fprintf(stderr, "io_uring: %s\n", strerror(-code));
        return 77; /* refused here, as in some containers */
    }
    check(pelton_listener_open(argv[1], NULL, &listener), "listening");
    do {
        wait_for_messages(&ring, pelton_listener_fd(listener));
    } while (check(pelton_listener_accept_receiver(listener, PELTON_NO_WAIT, &receiver), "accepting") == PELTON_AGAIN);
    pelton_close(listener);
    for (;;) {
        /* Receive at most so many messages that other completions have their turn. */
        for (int i = 0; i < 1000; i++) {
            code = check(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message), "receiving");
            if (code != PELTON_OK) break;
            fwrite(message.data, 1, message.size, stdout);
            pelton_receiver_release(receiver);
        }
        if (code == PELTON_AGAIN) {
            code = check(pelton_receiver_arm(receiver), "arming");
            if (code == PELTON_OK) wait_for_messages(&ring, pelton_receiver_fd(receiver));
        }
        if (code == PELTON_CLOSED) break;
    }
    pelton_close(receiver);
    io_uring_queue_exit(&ring);
    return 0;
}
