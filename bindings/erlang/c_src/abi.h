/* Written by bindings/generate from include/pelton.abi: change nothing here.
 *
 * X(code, atom) for each code. */
#ifndef PELTON_ABI_H
#define PELTON_ABI_H

#define CODE_ATOMS(X) \
    X(PELTON_AGAIN, again) \
    X(PELTON_CLOSED, closed) \
    X(PELTON_PEER_DIED, peer_died) \
    X(PELTON_TOO_LARGE, too_large) \
    X(PELTON_TOO_SMALL, too_small) \
    X(PELTON_TOO_MANY_DESCRIPTORS, too_many_descriptors) \
    X(PELTON_DESCRIPTORS_LOST, descriptors_lost) \
    X(PELTON_CORRUPT, corrupt) \
    X(PELTON_REFUSED, refused) \
    X(PELTON_HUNG_UP, hung_up) \
    X(PELTON_NO_LISTENER, no_listener) \
    X(PELTON_IN_USE, in_use) \
    X(PELTON_NAME, name) \
    X(PELTON_OPTION, option) \
    X(PELTON_NO_CHANNEL, no_channel) \
    X(PELTON_NOT_A_CHANNEL, not_a_channel) \
    X(PELTON_ROLE_TAKEN, role_taken) \
    X(PELTON_NO_SPACE, no_space) \
    X(PELTON_REBOOTED, rebooted) \
    X(PELTON_SYSTEM, system) \
    X(PELTON_FORKED, forked) \
    X(PELTON_INTERNAL, internal) \
    X(PELTON_NULL, null) \
    X(PELTON_CLOSED_HANDLE, closed_handle) \
    X(PELTON_WRONG_THREAD, wrong_thread) \
    X(PELTON_NOT_RESERVED, not_reserved) \
    X(PELTON_RESERVED, reserved) \
    X(PELTON_NOT_RECEIVED, not_received) \
    X(PELTON_NOT_RELEASED, not_released) \
    X(PELTON_SINK, sink) \
    X(PELTON_NOT_A_RECORD_FILE, not_a_record_file) \
    X(PELTON_DAMAGED, damaged) \
    X(PELTON_TORN, torn) \
    X(PELTON_TIMED_OUT, timed_out)

#endif
