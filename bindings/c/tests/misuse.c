/* Each function of include/pelton.abi that has a handle, called with a wrong one: NULL, a closed one, one of another
 * kind, something else, one of the process that forked this one. Its code and its detail say so, and it writes to no
 * out-parameter. `functions` generates functions.h. */
#include "calls.h"

#include <sys/socket.h>
#include <sys/un.h>

typedef struct function {
    const char *name;
    const char *kind;      /* of the handle, without pelton_ */
    const char *parameter; /* its name */
    int (*call)(void *handle);
} function;

/* What the calls pass besides. */
static uint64_t out1[64], out2[64];
static struct iovec memory;
static const int descriptor = 0;
static pelton_operation operation;

static int write_nothing(void *context, const pelton_chunk *chunks, size_t count) {
    (void)context, (void)chunks, (void)count;
    return 0;
}

static void ignore_request(void *context, const pelton_request *request) {
    (void)context, (void)request;
}

#include "functions.h"

enum { FUNCTIONS = sizeof functions / sizeof *functions };

/* A handle of each kind. */
typedef struct kind {
    const char *name;
    void *handle;
} kind;
enum { KINDS = 21 };
static kind kinds[KINDS];
static pelton_sender *flushed; /* sends to the flush's receiver */
static int silent;             /* a socket that listens, and never answers */

/* Calls it; returns whether it returns the code, with these words in its detail, and leaves its out-parameters
 * alone. */
static int returns(const function *which, void *handle, int code, const char *words) {
    uint64_t before[64];
    memset(before, 0xa5, sizeof before);
    /* Of a structure of figures, the size. */
    *(uint32_t *)before = 64;
    memcpy(out1, before, sizeof before);
    memcpy(out2, before, sizeof before);
    memory.iov_base = before;
    memory.iov_len = 1;
    operation.kind = PELTON_FILE_STAT;
    operation.path = "/";
    int returned = which->call(handle);
    /* How many operations were accepted is always said, none, and whose publisher has left: nobody's. */
    int says = strcmp(which->name, "pelton_engine_submit") == 0 || strcmp(which->name, "pelton_subscriber_set_receive") == 0;
    if (says && out1[0] == 0) out1[0] = before[0];
    int writes = memcmp(out1, before, sizeof before) != 0 || memcmp(out2, before, sizeof before) != 0;
    if (returned == code && !writes && strstr(pelton_error_detail(), words)) return 1;
    fprintf(stderr, "%s returns \"%s\"%s; expected \"%s\", and \"%s\" in the detail: %s\n", which->name, pelton_code_text(returned),
            writes ? " and writes an out-parameter" : "", pelton_code_text(code), words, pelton_error_detail());
    return 0;
}

static void *handle_of(const char *name) {
    for (int i = 0; i < KINDS; i++) {
        if (strcmp(kinds[i].name, name) == 0) return kinds[i].handle;
    }
    fprintf(stderr, "no pelton_%s is created by this test\n", name);
    abort();
}

static void create_all(void) {
    char name[128], path[128];
    struct sockaddr_un address;
    pelton_channel_options options = PELTON_CHANNEL_OPTIONS_INIT;
    pelton_client_options client_options = PELTON_CLIENT_OPTIONS_INIT;
    pelton_appenders_options quiet = PELTON_APPENDERS_OPTIONS_INIT;
    pelton_sender *sender;
    pelton_receiver *receiver;
    pelton_listener *listener;
    pelton_senders *senders;
    pelton_held *held;
    pelton_sender_opening *sender_opening;
    pelton_receiver_opening *receiver_opening;
    pelton_client_opening *client_opening;
    pelton_publisher *publisher;
    pelton_subscriber *subscriber;
    pelton_subscriber_opening *subscriber_opening;
    pelton_subscriber_set *subscriber_set;
    pelton_subscriber_options subscriber_options = PELTON_SUBSCRIBER_OPTIONS_INIT;
    pelton_flush *flush;
    pelton_appenders *appenders;
    pelton_appender *appender;
    pelton_records *records;
    pelton_engine *engine;
    pelton_file *file;
    pelton_message message;
    OK(pelton_receiver_gather(NULL, NULL, &receiver));
    OK(pelton_receiver_senders(receiver, &senders));
    OK(pelton_senders_sender(senders, &flushed));
    OK(pelton_flush_to_function(receiver, write_nothing, NULL, NULL, &flush));
    /* No thread that flushes: a forked child would not have it. */
    quiet.flush_interval_ns = PELTON_FOREVER;
    OK(pelton_appenders_to_record_file(place(path, "%s/records"), NULL, &quiet, &appenders));
    OK(pelton_appenders_appender(appenders, &appender));
    OK(pelton_records_open(path, &records));
    OK(pelton_threads(NULL, &sender, &receiver));
    OK(pelton_sender_send(sender, "held", 4, PELTON_NO_WAIT));
    OK(pelton_receiver_receive(receiver, PELTON_NO_WAIT, &message));
    OK(pelton_receiver_hold(receiver, &held));
    OK(pelton_engine_open(NULL, &engine));
    OK(pelton_file_from_fd(open("/dev/null", O_RDONLY | O_CLOEXEC), "null", &file));
    OK(pelton_listener_open(place(name, "unix:%s/listener"), NULL, &listener));
    memset(&address, 0, sizeof address);
    address.sun_family = AF_UNIX;
    CHECK(strlen(place(path, "%s/silent")) < sizeof address.sun_path);
    strcpy(address.sun_path, path);
    silent = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK(silent >= 0 && bind(silent, (struct sockaddr *)&address, sizeof address) == 0 && listen(silent, 8) == 0);
    options.deadline_ns = client_options.deadline_ns = subscriber_options.deadline_ns = SOON;
    place(name, "unix:%s/silent");
    OK(pelton_sender_open_start(name, &options, &sender_opening));
    OK(pelton_receiver_open_start(name, &options, &receiver_opening));
    OK(pelton_client_open_start(name, &client_options, &client_opening));
    OK(pelton_subscriber_open_start(name, &subscriber_options, &subscriber_opening));
    OK(pelton_publisher_open(NULL, NULL, &publisher));
    OK(pelton_publisher_subscriber(publisher, NULL, &subscriber));
    OK(pelton_subscriber_set_open(PELTON_BLOCK, &subscriber_set));
    begin();
    submitted("x", 1);
    const kind all[KINDS] = {
        {"sender", sender},
        {"receiver", receiver},
        {"listener", listener},
        {"senders", senders},
        {"held", held},
        {"sender_opening", sender_opening},
        {"receiver_opening", receiver_opening},
        {"publisher", publisher},
        {"subscriber", subscriber},
        {"subscriber_opening", subscriber_opening},
        {"subscriber_set", subscriber_set},
        {"client", client},
        {"service", service},
        {"responder", taken()},
        {"client_opening", client_opening},
        {"flush", flush},
        {"appenders", appenders},
        {"appender", appender},
        {"records", records},
        {"engine", engine},
        {"file", file},
    };
    memcpy(kinds, all, sizeof all);
}

/* Closes each, and once more. A record file is read without the parent: a child may close it like its own. */
static void close_all(int code) {
    for (int i = 0; i < KINDS; i++) {
        RETURNS(pelton_close(kinds[i].handle), strcmp(kinds[i].name, "records") == 0 ? PELTON_OK : code);
        FAILS(pelton_close(kinds[i].handle), PELTON_CLOSED_HANDLE, kinds[i].name);
    }
    RETURNS(pelton_close(flushed), code);
}

static void end_all(void) {
    char path[128];
    close_all(PELTON_OK);
    CHECK(close(silent) == 0 && unlink(place(path, "%s/silent")) == 0 && unlink(place(path, "%s/records")) == 0);
}

static void null_and_memory_that_is_no_handle_are_refused(void) {
    static uint64_t nothing[16];
    char words[128];
    int wrong = 0;
    for (int i = 0; i < FUNCTIONS; i++) {
        snprintf(words, sizeof words, "%s is NULL", functions[i].parameter);
        wrong += !returns(&functions[i], NULL, PELTON_NULL, words);
        wrong += !returns(&functions[i], nothing, PELTON_CLOSED_HANDLE, "");
    }
    CHECK(FUNCTIONS > 90 && wrong == 0);
    OK(pelton_close(NULL));
    RETURNS(pelton_close(nothing), PELTON_CLOSED_HANDLE);
}

static void a_handle_of_another_kind_is_refused(void) {
    char words[128];
    pelton_message message;
    int wrong = 0;
    create_all();
    for (int i = 0; i < FUNCTIONS; i++) {
        for (int k = 0; k < KINDS; k++) {
            if (strcmp(kinds[k].name, functions[i].kind) == 0) continue;
            snprintf(words, sizeof words, "the handle is a pelton_%s, wanted an open pelton_%s", kinds[k].name, functions[i].kind);
            wrong += !returns(&functions[i], kinds[k].handle, PELTON_CLOSED_HANDLE, words);
        }
    }
    CHECK(wrong == 0);
    /* None was changed by it. */
    OK(pelton_sender_send((pelton_sender *)handle_of("sender"), "x", 1, PELTON_NO_WAIT));
    OK(pelton_receiver_receive((pelton_receiver *)handle_of("receiver"), PELTON_NO_WAIT, &message));
    OK(pelton_responder_part((pelton_responder *)handle_of("responder"), "y", 1, SOON));
    end_all();
}

static void a_closed_handle_is_refused(void) {
    int wrong = 0;
    create_all();
    end_all();
    for (int i = 0; i < FUNCTIONS; i++) {
        wrong += !returns(&functions[i], handle_of(functions[i].kind), PELTON_CLOSED_HANDLE, "the handle is a closed pelton_");
    }
    CHECK(wrong == 0);
}

static void use_handles_of_the_parent(const char *name) {
    int wrong = 0;
    (void)name;
    for (int i = 0; i < FUNCTIONS; i++) {
        /* These do nothing in a child, without an error; and see close_all. */
        if (strcmp(functions[i].name, "pelton_service_stop") == 0 || strcmp(functions[i].name, "pelton_service_drain") == 0 ||
            strcmp(functions[i].kind, "records") == 0) {
            continue;
        }
        wrong += !returns(&functions[i], handle_of(functions[i].kind), PELTON_FORKED, "forked");
    }
    CHECK(wrong == 0);
    OK(pelton_service_stop((pelton_service *)handle_of("service")));
    OK(pelton_service_drain((pelton_service *)handle_of("service")));
    close_all(PELTON_FORKED);
}

static void a_forked_child_can_only_close(void) {
    create_all();
    finish(start(use_handles_of_the_parent, ""));
    /* The parent's are as before. */
    OK(pelton_sender_send((pelton_sender *)handle_of("sender"), "x", 1, PELTON_NO_WAIT));
    OK(pelton_responder_part((pelton_responder *)handle_of("responder"), "y", 1, SOON));
    COMPLETES(ANY_CALL, PELTON_PART, 0, "y");
    end_all();
}

int main(void) {
    static const test tests[] = {
        TEST(null_and_memory_that_is_no_handle_are_refused),
        TEST(a_handle_of_another_kind_is_refused),
        TEST(a_closed_handle_is_refused),
        TEST(a_forked_child_can_only_close),
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
