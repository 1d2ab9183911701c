/* The functions of any handle: each function by each kind, alive, closed, and of a process that forked this one; NULL, and what is no
 * handle. */
#include "calls.h"

/* The kinds, and a handle of each. */
enum { SENDER, RECEIVER, LISTENER, CLIENT, SERVICE, RESPONDER, FLUSH, APPENDERS, APPENDER, SENDERS, HELD, RECORDS, ENGINE, FILE_, KINDS };
static const char *const names[KINDS] = {"sender", "receiver",  "listener", "client",  "service", "responder",
                                         "flush",  "appenders", "appender", "senders", "held",    "records",
                                         "engine", "file"};
static void *handles[KINDS];

static int fd(void *handle) {
    int found = pelton_fd(handle);
    return found < 0 ? found : PELTON_OK;
}

static int get_info(void *handle) {
    pelton_info info;
    info.struct_bytes = sizeof info;
    return pelton_get_info(handle, &info);
}

static int resume(void *handle) {
    return pelton_resume(handle, PELTON_NO_WAIT);
}

static int drain(void *handle) {
    return pelton_drain(handle, PELTON_NO_WAIT);
}

static int reserve(void *handle) {
    void *at;
    return pelton_reserve(handle, 8, PELTON_NO_WAIT, &at);
}

static int commit(void *handle) {
    return pelton_commit(handle, 8);
}

/* The table of pelton.h, with what each answers, called one after the other. */
#define NOT PELTON_CLOSED_HANDLE
static const struct {
    const char *name;
    int (*call)(void *);
    int answers[KINDS];
} functions[] = {
    {"fd", fd, {0, 0, 0, 0, 0, NOT, NOT, NOT, NOT, NOT, NOT, NOT, 0, 0}},
    {"arm", pelton_arm, {PELTON_AGAIN, PELTON_AGAIN, NOT, PELTON_AGAIN, PELTON_AGAIN, NOT, NOT, NOT, NOT, NOT, NOT, NOT, PELTON_AGAIN, NOT}},
    {"disarm", pelton_disarm, {0, 0, NOT, 0, 0, NOT, NOT, NOT, NOT, NOT, NOT, NOT, 0, NOT}},
    {"get_info", get_info, {0, 0, NOT, 0, 0, NOT, NOT, NOT, NOT, NOT, NOT, NOT, 0, NOT}},
    {"resume", resume, {PELTON_REFUSED, PELTON_REFUSED, NOT, NOT, NOT, NOT, NOT, NOT, NOT, NOT, NOT, NOT, NOT, NOT}},
    {"sync", pelton_sync, {PELTON_REFUSED, PELTON_REFUSED, NOT, NOT, NOT, NOT, 0, 0, NOT, NOT, NOT, NOT, NOT, NOT}},
    /* One message is held. */
    {"drain", drain, {PELTON_AGAIN, NOT, NOT, NOT, NOT, NOT, NOT, NOT, NOT, NOT, NOT, NOT, 0, NOT}},
    {"release", pelton_release,
     {NOT, PELTON_NOT_RECEIVED, NOT, PELTON_NOT_RECEIVED, PELTON_NOT_RECEIVED, NOT, NOT, NOT, NOT, NOT, NOT, NOT, NOT, NOT}},
    {"flush_now", pelton_flush_now, {NOT, NOT, NOT, NOT, NOT, NOT, 0, 0, NOT, NOT, NOT, NOT, NOT, NOT}},
    {"reserve", reserve, {0, NOT, NOT, 0, NOT, 0, NOT, NOT, 0, NOT, NOT, NOT, NOT, NOT}},
    {"commit", commit, {0, NOT, NOT, NOT, NOT, NOT, NOT, NOT, 0, NOT, NOT, NOT, NOT, NOT}},
    {"reserve", reserve, {0, NOT, NOT, 0, NOT, 0, NOT, NOT, 0, NOT, NOT, NOT, NOT, NOT}},
    {"abort", pelton_abort, {0, NOT, NOT, 0, NOT, 0, NOT, NOT, 0, NOT, NOT, NOT, NOT, NOT}},
};
enum { FUNCTIONS = sizeof functions / sizeof *functions };

/* That the function answers this code of the kind's handle, and that the detail has these words. */
static void answers(int function, int kind, int code, const char *words) {
    int answered = functions[function].call(handles[kind]);
    if (answered != code || (code < PELTON_AGAIN && !strstr(pelton_error_detail(), words))) {
        fprintf(stderr, "pelton_%s of a pelton_%s, wanted %s: ", functions[function].name, names[kind], words);
        fail(__FILE__, __LINE__, "", pelton_code_text(answered));
    }
}

static int ignore(void *context, const pelton_run *runs, size_t count) {
    (void)context, (void)runs, (void)count;
    return 0;
}

static pelton_sender *flushed; /* what sends to the flush's receiver */
static uint64_t call;

/* Makes one handle of each kind. */
static void make_all(void) {
    static char name[128];
    pelton_options options = soon(64 << 10);
    pelton_sink sink = PELTON_SINK_INIT;
    pelton_sender *sender;
    pelton_receiver *receiver;
    pelton_listener *listener;
    pelton_senders *senders;
    pelton_held *held;
    pelton_flush *flush;
    pelton_appenders *appenders;
    pelton_appender *appender;
    pelton_records *records;
    pelton_engine *engine;
    pelton_file *file;
    pelton_message message;
    options.flush_interval_ns = PELTON_FOREVER;
    OK(pelton_listen(place(name, "unix:%s/listener"), &options, &listener));
    OK(pelton_gather(NULL, &options, &receiver));
    OK(pelton_receiver_senders(receiver, &senders));
    OK(pelton_senders_open(senders, &flushed));
    sink.write = ignore;
    OK(pelton_flush_open(receiver, &options, &sink, &flush));
    sink.write = NULL;
    sink.path = place(name, "%s/records");
    OK(pelton_appenders_open(&options, &sink, &appenders));
    OK(pelton_appender_open(appenders, &appender));
    OK(pelton_records_open(name, &records));
    OK(pelton_threads(&options, &sender, &receiver));
    OK(pelton_send(sender, "held", 4, PELTON_NO_WAIT));
    OK(pelton_receive(receiver, PELTON_NO_WAIT, &message));
    OK(pelton_hold(receiver, &held));
    OK(pelton_engine_open(&options, &engine));
    OK(pelton_file_from_fd(open("/dev/null", O_RDONLY | O_CLOEXEC), "null", &file));
    begin();
    call = submitted("x", 1);
    void *all[KINDS] = {sender, receiver,  listener, client,  service, taken(), flush,
                        appenders, appender, senders,  held, records, engine,  file};
    memcpy(handles, all, sizeof all);
}

/* Closes them all, twice. */
static void close_all(int code) {
    for (int kind = 0; kind < KINDS; kind++) {
        /* A record file is read on by a child too. */
        ANSWERS(pelton_close(handles[kind]), kind == RECORDS ? PELTON_OK : code);
        REFUSES(pelton_close(handles[kind]), PELTON_CLOSED_HANDLE, names[kind]);
    }
    ANSWERS(pelton_close(flushed), code);
}

static void end_all(void) {
    char name[128];
    close_all(PELTON_OK);
    CHECK(unlink(place(name, "%s/records")) == 0);
}

/* Whether the kind is told where else to go. */
static int is_elsewhere(int function, int kind) {
    return functions[function].call == commit && (kind == CLIENT || kind == RESPONDER);
}

static void each_kind_has_what_the_header_says_and_nothing_else(void) {
    char words[128];
    pelton_message message;
    make_all();
    for (int function = 0; function < FUNCTIONS; function++) {
        for (int kind = 0; kind < KINDS; kind++) {
            int code = functions[function].answers[kind];
            snprintf(words, sizeof words, "the handle is a pelton_%s, wanted a pelton_", names[kind]);
            if (is_elsewhere(function, kind)) strcpy(words, "give its pointer to pelton_");
            answers(function, kind, code, code == NOT ? words : "");
        }
    }
    /* And all of it works still. */
    OK(pelton_receive((pelton_receiver *)handles[RECEIVER], PELTON_NO_WAIT, &message));
    CHECK(message.size == 8);
    OK(pelton_release(handles[RECEIVER]));
    OK(pelton_reply_part((pelton_responder *)handles[RESPONDER], "y", 1, SOON));
    ANSWERED(call, PELTON_PART, 0, "y");
    end_all();
}

static void a_closed_handle_is_recognised_by_all(void) {
    char words[128];
    make_all();
    end_all();
    for (int function = 0; function < FUNCTIONS; function++) {
        for (int kind = 0; kind < KINDS; kind++) {
            int is_its_own = functions[function].answers[kind] != NOT || is_elsewhere(function, kind);
            snprintf(words, sizeof words, is_its_own ? "the pelton_%s is closed" : "a pelton_%s that is closed, wanted a", names[kind]);
            answers(function, kind, PELTON_CLOSED_HANDLE, words);
        }
    }
}

static void use_handles_of_the_parent(const char *name) {
    (void)name;
    for (int function = 0; function < FUNCTIONS; function++) {
        for (int kind = 0; kind < KINDS; kind++) {
            int is_its_own = functions[function].answers[kind] != NOT || is_elsewhere(function, kind);
            answers(function, kind, is_its_own ? PELTON_FORKED : PELTON_CLOSED_HANDLE, is_its_own ? "forked" : "wanted a");
        }
    }
    close_all(PELTON_FORKED);
}

static void a_forked_child_can_only_close_all(void) {
    make_all();
    finish(start(use_handles_of_the_parent, ""));
    /* The parent's are as before. */
    OK(pelton_reply_part((pelton_responder *)handles[RESPONDER], "y", 1, SOON));
    ANSWERED(call, PELTON_PART, 0, "y");
    end_all();
}

static void null_and_what_is_no_handle_are_refused_by_all(void) {
    static uint64_t nothing[16];
    void *null = NULL;
    make_all();
    for (int function = 0; function < FUNCTIONS; function++) {
        REFUSES(functions[function].call(null), PELTON_NULL, "handle is NULL");
        REFUSES(functions[function].call(nothing), PELTON_CLOSED_HANDLE, "the handle is none of pelton's");
    }
    OK(pelton_close(NULL));
    REFUSES(pelton_close(nothing), PELTON_CLOSED_HANDLE, "the handle is none of pelton's");
    for (int kind = 0; kind < KINDS; kind++) {
        REFUSES(pelton_get_info(handles[kind], NULL), PELTON_NULL, "out is NULL");
        REFUSES(pelton_reserve(handles[kind], 8, PELTON_NO_WAIT, NULL), PELTON_NULL, "out is NULL");
    }
    end_all();
}

int main(void) {
    static const test tests[] = {
        TEST(each_kind_has_what_the_header_says_and_nothing_else),
        TEST(a_closed_handle_is_recognised_by_all),
        TEST(a_forked_child_can_only_close_all),
        TEST(null_and_what_is_no_handle_are_refused_by_all),
    };
    return run_tests(tests, sizeof tests / sizeof *tests);
}
