/* The peer in C: `peer THERE BACK` listens at THERE, sends each message back to BACK, and ends with its sender. */
#include <stdio.h>

#include "pelton.h"

static int complain(int code) {
    fprintf(stderr, "%s: %s\n", pelton_code_text(code), pelton_error_detail());
    return 1;
}

int main(int count, char **arguments) {
    pelton_listener *listener;
    pelton_receiver *receiver;
    pelton_sender *sender;
    pelton_message message;
    if (count != 3) return 2;
    int code = pelton_listener_open(arguments[1], NULL, &listener);
    if (code == PELTON_OK) code = pelton_sender_open(arguments[2], NULL, &sender);
    int64_t deadline = pelton_deadline(INT64_C(60000000000));
    if (code == PELTON_OK) code = pelton_listener_accept_receiver(listener, deadline, &receiver);
    if (code != PELTON_OK) return complain(code);
    while ((code = pelton_receiver_receive(receiver, PELTON_FOREVER, &message)) == PELTON_OK) {
        code = pelton_sender_send(sender, message.data, message.size, PELTON_FOREVER);
        if (code != PELTON_OK) return complain(code);
        pelton_receiver_release(receiver);
    }
    if (code != PELTON_CLOSED) return complain(code);
    pelton_close(sender);
    pelton_close(receiver);
    return pelton_close(listener);
}
