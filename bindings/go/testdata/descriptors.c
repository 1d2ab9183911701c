/* Receives messages from one name, and sends each to another, with its descriptors, until the sender closes. */
#include <stdio.h>
#include <unistd.h>

#include "pelton.h"

int main(int argc, char **argv) {
    pelton_receiver *receiver;
    pelton_sender *sender;
    pelton_message message;
    int code, fds[64];
    size_t count;
    if (argc != 3) return 2;
    if ((code = pelton_receiver_open(argv[1], NULL, &receiver)) == PELTON_OK) {
        code = pelton_sender_open(argv[2], NULL, &sender);
    }
    while (code == PELTON_OK && (code = pelton_receiver_receive(receiver, PELTON_FOREVER, &message)) == PELTON_OK) {
        code = pelton_receiver_take_descriptors(receiver, fds, 64, &count);
        if (code == PELTON_OK) {
            code = pelton_sender_send_descriptors(sender, message.data, message.size, fds, count, PELTON_FOREVER);
        }
        if (code == PELTON_OK) code = pelton_receiver_release(receiver);
        while (code == PELTON_OK && count > 0) close(fds[--count]);
    }
    if (code != PELTON_CLOSED) {
        fprintf(stderr, "%s: %s\n", pelton_code_text(code), pelton_error_detail());
        return 1;
    }
    return pelton_close(sender) != PELTON_OK || pelton_close(receiver) != PELTON_OK;
}
