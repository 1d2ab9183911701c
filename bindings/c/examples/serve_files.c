/* A service that sends files from one libuv loop, which never waits for a disk or a file server: requests, and results
 * of reads, come as callbacks.
 *
 *     serve_files serve NAME DIR   replies with files below DIR, until it is stopped
 *     serve_files get NAME FILE    writes the file to standard output; NAME is a short name or unix:PATH
 *     serve_files stop NAME        stops it
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>

#include "pelton_uv.h"

static int complain(int code) {
    fprintf(stderr, "%s: %s\n", pelton_code_text(code), pelton_error_detail());
    return 1;
}

static pelton_uv_service_t service;
static pelton_uv_engine_t engine;

/* A request under way: opening, then asking for the size, reading, answering, and closing. One thing at a time. */
typedef struct job {
    pelton_uv_operation_t operation;
    pelton_responder *responder;
    pelton_file *file;
    struct iovec memory;
} job;

static void next(job *it, pelton_operation what, pelton_uv_operation_cb cb);

static void on_closed(pelton_uv_operation_t *operation, const pelton_file_completion *done) {
    job *it = (job *)operation->data;
    (void)done;
    free(it->memory.iov_base);
    free(it);
}

/* The reply is sent, or dropped, if the client has gone. */
static void finish(job *it) {
    pelton_operation close;
    memset(&close, 0, sizeof close);
    close.kind = PELTON_FILE_CLOSE;
    close.file = it->file;
    if (it->file) next(it, close, on_closed);
    else on_closed(&it->operation, NULL);
}

static void refuse(job *it, int error) {
    const char *text = strerror(error);
    if (pelton_responder_fail(it->responder, (uint32_t)error, text, strlen(text)) != PELTON_OK) pelton_close(it->responder);
    finish(it);
}

static void on_read(pelton_uv_operation_t *operation, const pelton_file_completion *done) {
    job *it = (job *)operation->data;
    if (done->error) {
        refuse(it, done->error);
        return;
    }
    if (pelton_responder_reply(it->responder, it->memory.iov_base, (size_t)done->count) != PELTON_OK) {
        pelton_close(it->responder);
    }
    finish(it);
}

static void on_stat(pelton_uv_operation_t *operation, const pelton_file_completion *done) {
    job *it = (job *)operation->data;
    pelton_operation read;
    if (done->error) {
        refuse(it, done->error);
        return;
    }
    if (done->stat->kind != PELTON_REGULAR || done->stat->bytes > 32 << 20) {
        refuse(it, done->stat->kind == PELTON_REGULAR ? EFBIG : done->stat->kind == PELTON_DIRECTORY ? EISDIR : EINVAL);
        return;
    }
    memset(&read, 0, sizeof read);
    read.kind = PELTON_FILE_READ;
    read.file = it->file;
    it->memory.iov_len = (size_t)done->stat->bytes;
    it->memory.iov_base = malloc(it->memory.iov_len + 1);
    read.memory = &it->memory;
    read.memory_count = 1;
    if (it->memory.iov_base) next(it, read, on_read);
    else refuse(it, ENOMEM);
}

static void on_open(pelton_uv_operation_t *operation, const pelton_file_completion *done) {
    job *it = (job *)operation->data;
    pelton_operation stat;
    if (done->error) {
        refuse(it, done->error);
        return;
    }
    it->file = done->file;
    memset(&stat, 0, sizeof stat);
    stat.kind = PELTON_FILE_STAT;
    stat.file = it->file;
    next(it, stat, on_stat);
}

/* There is room for it: as many requests are under way as the engine takes operations. */
static void next(job *it, pelton_operation what, pelton_uv_operation_cb cb) {
    size_t taken;
    int code = pelton_uv_engine_submit(&engine, &it->operation, &what, 1, &taken, cb);
    if (taken == 1) return;
    complain(code);
    abort();
}

static void on_request(pelton_uv_service_t *handle, const pelton_request *request) {
    job *it;
    char *path;
    pelton_operation open;
    /* A notification: stop. */
    if (!request->responder) {
        pelton_service_drain(handle->service);
        return;
    }
    it = (job *)calloc(1, sizeof *it);
    path = (char *)calloc(1, request->size + 1);
    if (engine.in_flight >= 1000 || !it || !path) {
        /* The call completes at the client as abandoned. */
        pelton_close(request->responder);
        free(it);
        free(path);
        return;
    }
    memcpy(path, request->data, request->size);
    it->responder = request->responder;
    it->operation.data = it;
    memset(&open, 0, sizeof open);
    open.kind = PELTON_FILE_OPEN;
    open.path = path;
    /* A FIFO is opened at once, too, and is refused by its kind. */
    open.open_flags = O_RDONLY | O_NONBLOCK;
    next(it, open, on_open);
    free(path);
}

static void on_end(pelton_uv_service_t *handle, int code) {
    if (code != PELTON_CLOSED) complain(code);
    pelton_uv_service_close(handle, NULL);
}

static int serve(const char *name, const char *directory) {
    pelton_engine_options options = PELTON_ENGINE_OPTIONS_INIT;
    pelton_service *listening;
    pelton_engine *files;
    uv_loop_t *loop = uv_default_loop();
    int code;
    options.root = directory;
    code = pelton_engine_open(&options, &files);
    if (code == PELTON_OK) code = pelton_service_open(name, NULL, &listening);
    if (code == PELTON_OK) code = pelton_uv_engine_init(loop, &engine, files);
    if (code == PELTON_OK) code = pelton_uv_service_init(loop, &service, listening);
    if (code == PELTON_OK) code = pelton_uv_service_start(&service, on_request, on_end);
    if (code != PELTON_OK) return complain(code);
    /* Until the service has drained; what is under way then is only to be closed. */
    uv_run(loop, UV_RUN_DEFAULT);
    pelton_uv_engine_close(&engine, NULL);
    uv_run(loop, UV_RUN_DEFAULT);
    return uv_loop_close(loop) == 0 ? 0 : 1;
}

int main(int argc, char **argv) {
    pelton_client_options options = PELTON_CLIENT_OPTIONS_INIT;
    pelton_client *client;
    pelton_completion answer;
    int code, failed = 0;
    if (argc == 4 && strcmp(argv[1], "serve") == 0) return serve(argv[2], argv[3]);
    if (argc < 3) return fprintf(stderr, "usage: serve_files serve NAME DIR | get NAME FILE | stop NAME\n"), 2;
    options.deadline_ns = pelton_deadline(INT64_C(5000000000)); /* for the service to be there */
    code = pelton_client_open(argv[2], &options, &client);
    if (code == PELTON_OK && strcmp(argv[1], "stop") == 0) {
        code = pelton_client_notify(client, NULL, 0, PELTON_FOREVER);
    } else if (code == PELTON_OK && argc == 4) {
        code = pelton_client_call(client, argv[3], strlen(argv[3]), PELTON_FOREVER, &answer);
        if (code == PELTON_OK) {
            failed = answer.outcome != PELTON_REPLY;
            fwrite(answer.data, 1, answer.size, failed ? stderr : stdout);
            if (failed) fputc('\n', stderr);
            pelton_client_release(client);
        }
    }
    if (code != PELTON_OK) return complain(code);
    pelton_close(client);
    return failed;
}
