/* The NIF's functions: name, arity, and where it runs. src/pelton_nif.erl has their types. */
#ifndef PELTON_ERLANG_FUNCTIONS_H
#define PELTON_ERLANG_FUNCTIONS_H

#include "nif.h"

#define NIF(name) ERL_NIF_TERM nif_##name(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[])

#define FUNCTIONS(X) \
    /* log.c */ \
    X(set_log, 1, 0) \
    /* fast_io.c */ \
    X(file_read, 3, 0) X(file_read_waiting, 3, ERL_NIF_DIRTY_JOB_IO_BOUND) X(file_write, 3, 0) \
    X(file_write_waiting, 3, ERL_NIF_DIRTY_JOB_IO_BOUND) \
    /* buffered_io.c */ \
    X(buffer_write, 3, 0) X(buffer_flush, 2, 0) X(buffer_read, 3, 0) \
    /* file_nif.c */ \
    X(file_open, 5, 0) X(file_close, 2, 0) X(file_pread, 5, 0) X(file_pread_list, 4, 0) X(file_pwrite, 5, 0) \
    X(file_seek, 3, ERL_NIF_DIRTY_JOB_IO_BOUND) X(file_truncate, 1, ERL_NIF_DIRTY_JOB_IO_BOUND) \
    X(file_advise, 4, ERL_NIF_DIRTY_JOB_IO_BOUND) X(file_allocate, 3, ERL_NIF_DIRTY_JOB_IO_BOUND) X(file_do, 4, 0) \
    X(file_copy, 6, 0) X(file_transfer, 7, 0) X(path_do, 6, 0) \
    /* endpoint_nif.c */ \
    X(endpoint_open, 4, ERL_NIF_DIRTY_JOB_IO_BOUND) X(endpoint_close, 1, 0) X(endpoint_send, 4, 0) \
    X(endpoint_send_large, 4, ERL_NIF_DIRTY_JOB_CPU_BOUND) X(endpoint_receive, 2, 0) X(endpoint_set, 4, 0) \
    X(endpoint_give, 2, 0) X(endpoint_call, 4, 0) X(endpoint_call_large, 4, ERL_NIF_DIRTY_JOB_CPU_BOUND) \
    X(endpoint_cast, 2, 0) X(endpoint_cast_large, 2, ERL_NIF_DIRTY_JOB_CPU_BOUND) X(endpoint_cancel, 2, 0) \
    X(endpoint_accept, 2, ERL_NIF_DIRTY_JOB_IO_BOUND) X(endpoint_wait_released, 2, ERL_NIF_DIRTY_JOB_IO_BOUND) \
    X(endpoint_resume, 2, ERL_NIF_DIRTY_JOB_IO_BOUND) X(endpoint_stream, 4, 0) \
    X(endpoint_stream_large, 4, ERL_NIF_DIRTY_JOB_CPU_BOUND) X(endpoint_drain, 1, 0) X(endpoint_info, 1, 0) \
    X(responder_reply, 3, 0) X(responder_reply_large, 3, ERL_NIF_DIRTY_JOB_CPU_BOUND) X(responder_part, 2, 0) \
    X(responder_part_large, 2, ERL_NIF_DIRTY_JOB_CPU_BOUND) X(responder_end, 1, 0) X(responder_is_cancelled, 1, 0) \
    X(responder_traceparent, 1, 0) \
    X(endpoint_receive_delivery, 2, 0) X(endpoint_wait_subscribers, 3, 0) X(endpoint_subscribers, 1, 0) \
    X(subscription_remove, 2, ERL_NIF_DIRTY_JOB_IO_BOUND) \
    X(code_text, 1, 0)

#define DECLARE_(name, arity, flags) NIF(name);
FUNCTIONS(DECLARE_)
#undef DECLARE_

#endif
