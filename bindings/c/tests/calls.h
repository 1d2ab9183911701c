/* What the tests of calls share. */
#ifndef CALLS_H
#define CALLS_H

#include "check.h"

/* A service and a client of this process. */
static pelton_service *service;
static pelton_client *client;

static inline pelton_client_options soon(uint64_t capacity) {
    pelton_client_options options = PELTON_CLIENT_OPTIONS_INIT;
    options.deadline_ns = SOON;
    options.capacity = capacity;
    return options;
}

/* A service's options, with the sizes of a client's. */
static inline pelton_service_options serving(const pelton_client_options *asking) {
    pelton_service_options options = PELTON_SERVICE_OPTIONS_INIT;
    options.capacity = asking->capacity;
    options.call_bytes_max = asking->call_bytes_max;
    return options;
}

typedef struct opening {
    const char *name;
    const pelton_client_options *options;
    pelton_client *client;
    int is_done;
} opening;

static inline void *open_client(void *given) {
    opening *own = (opening *)given;
    OK(pelton_client_open(own->name, own->options, &own->client));
    __atomic_store_n(&own->is_done, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* A client of the service of this process, which lets it in. */
static inline pelton_client *client_of(pelton_service *of, const char *name, const pelton_client_options *options) {
    opening own = {name, options, NULL, 0};
    pelton_request request;
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, open_client, &own) == 0);
    while (!__atomic_load_n(&own.is_done, __ATOMIC_ACQUIRE)) {
        RETURNS(pelton_service_receive(of, pelton_deadline(1000000), &request), PELTON_AGAIN);
    }
    CHECK(pthread_join(thread, NULL) == 0);
    return own.client;
}

/* Begins with both sides' options taken from the client's. */
static inline void begin_with(const pelton_client_options *options) {
    char name[128];
    pelton_service_options listening = serving(options);
    OK(pelton_service_open(place(name, "unix:%s/service"), &listening, &service));
    client = client_of(service, name, options);
}

static inline void begin(void) {
    pelton_client_options options = soon(0);
    begin_with(&options);
}

static inline void end(void) {
    OK(pelton_close(client));
    OK(pelton_close(service));
}

/* The next request of the service, released. */
static inline pelton_responder *taken(void) {
    pelton_request request;
    OK(pelton_service_receive(service, SOON, &request));
    OK(pelton_service_release(service));
    return request.responder;
}

static inline uint64_t submitted(const void *data, size_t size) {
    uint64_t call = 0;
    OK(pelton_client_submit(client, data, size, 0, SOON, &call));
    CHECK(call != 0);
    return call;
}

/* Instead of a call's number in COMPLETES. */
#define ANY_CALL UINT64_C(0)

/* That the next completion of a call is this. */
#define COMPLETES(which, of_outcome, of_code, text)                                                                    \
    do {                                                                                                               \
        pelton_completion answer_;                                                                                     \
        if ((which) == ANY_CALL) OK(pelton_client_await(client, SOON, &answer_));                                      \
        else OK(pelton_client_await_call(client, which, SOON, &answer_));                                              \
        CHECK((which) == ANY_CALL || answer_.call == (which));                                                         \
        CHECK(answer_.outcome == (of_outcome) && answer_.code == (of_code));                                           \
        CHECK(answer_.data && answer_.size == strlen(text) && memcmp(answer_.data, text, answer_.size) == 0);          \
        OK(pelton_client_release(client));                                                                             \
    } while (0)

static inline pelton_client_info client_info(void) {
    pelton_client_info info;
    info.struct_bytes = sizeof info;
    OK(pelton_client_get_info(client, &info));
    return info;
}

static inline pelton_service_info service_info(void) {
    pelton_service_info info;
    info.struct_bytes = sizeof info;
    OK(pelton_service_get_info(service, &info));
    return info;
}

/* What byte stands where in what is numbered. */
static inline unsigned char byte_at(uint64_t number, size_t at) {
    return (unsigned char)(number * 31 + at * 7 + at / 251);
}

static inline void fill(void *data, uint64_t number, size_t size) {
    for (size_t at = 0; at < size; at++) ((unsigned char *)data)[at] = byte_at(number, at);
}

static inline int is_filled(const void *data, uint64_t number, size_t size) {
    for (size_t at = 0; at < size; at++) {
        if (((const unsigned char *)data)[at] != byte_at(number, at)) return 0;
    }
    return 1;
}

/* Another process: answers each request with its own bytes, until a notification comes. */
static inline void echo(const char *name, const pelton_service_options *options) {
    pelton_service *of;
    pelton_request request;
    OK(pelton_service_open(name, options, &of));
    for (;;) {
        OK(pelton_service_receive(of, SOON, &request));
        if (!request.responder) break;
        OK(pelton_responder_reply(request.responder, request.data, request.size));
        OK(pelton_service_release(of));
    }
    OK(pelton_close(of));
}

static inline void echo_large(const char *name) {
    echo(name, NULL);
}

static inline void echo_small(const char *name) {
    pelton_service_options options = PELTON_SERVICE_OPTIONS_INIT;
    options.capacity = 64 << 10;
    echo(name, &options);
}

#endif
