/* What the tests share. A test is a function named by its claim; CHECK ends the program where a claim is wrong.
 * Whatever waits has a deadline: SOON for pelton, an alarm for everything. Compiles as C11 and as C++17. */
#ifndef CHECK_H
#define CHECK_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pelton.h"

/* Long enough for a busy machine under valgrind. */
#define SECONDS 1000000000
#define SOON pelton_deadline((int64_t)60 * SECONDS)

#define CHECK(claim)                                                                                                   \
    do {                                                                                                               \
        if (!(claim)) fail(__FILE__, __LINE__, #claim, "");                                                            \
    } while (0)

/* That a call answers this code. */
#define RETURNS(call, code)                                                                                            \
    do {                                                                                                               \
        int answered_ = (call);                                                                                        \
        if (answered_ != (code)) fail(__FILE__, __LINE__, #call, pelton_code_text(answered_));                         \
    } while (0)

#define OK(call) RETURNS(call, PELTON_OK)

/* That a call answers this code, and that the detail says so in these words. */
#define FAILS(call, code, words)                                                                                       \
    do {                                                                                                               \
        RETURNS(call, code);                                                                                           \
        if (!strstr(pelton_error_detail(), words)) fail(__FILE__, __LINE__, #call, words);                             \
    } while (0)

static inline void fail(const char *file, int line, const char *claim, const char *found) {
    fprintf(stderr, "%s:%d: %s: %s [%s] (errno: %s)\n", file, line, claim, found, pelton_error_detail(), strerror(errno));
    abort();
}

typedef struct test {
    const char *name;
    void (*run)(void);
} test;

#define TEST(name) {#name, name}

/* A directory of this run's own. */
static char here[64];

static inline const char *place(char *text, const char *format) {
    int written = snprintf(text, 128, format, here);
    CHECK(written > 0 && written < 128);
    return text;
}

/* Runs a function in another process. */
static inline pid_t start(void (*run)(const char *), const char *name) {
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        alarm(200);
        run(name);
        /* Not the parent's atexit and buffers. */
        _exit(0);
    }
    return pid;
}

/* That the other process ended well. */
static inline void finish(pid_t pid) {
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static inline void kill_now(pid_t pid) {
    int status = 0;
    CHECK(kill(pid, SIGKILL) == 0);
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFSIGNALED(status));
}

/* The kernel's state of a thread: S sleeps, R runs or is ready to, D waits within a system call; X also if it has
 * ended. */
static inline char state_of(pid_t process, const char *thread) {
    char path[64], stat[512];
    int written = snprintf(path, sizeof path, "/proc/%d/task/%.16s/stat", (int)process, thread);
    CHECK(written > 0 && (size_t)written < sizeof path);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 'X';
    ssize_t size = read(fd, stat, sizeof stat - 1);
    close(fd);
    if (size <= 0) return 'X';
    stat[size] = 0;
    /* Behind the name, which is in parentheses and may have any bytes. */
    return strrchr(stat, ')')[2];
}

/* Waits until every thread of a process sleeps, but the calling one: what a wake-up before this call has started is
 * done. */
static inline void await_sleep(pid_t process) {
    char path[64], own[16];
    snprintf(path, sizeof path, "/proc/%d/task", (int)process);
    snprintf(own, sizeof own, "%d", (int)gettid());
    for (int tries = 0, running = 1; running; tries++) {
        DIR *threads = opendir(path);
        struct dirent *thread;
        CHECK(tries < 60000 && threads);
        running = 0;
        while ((thread = readdir(threads)))
            if (thread->d_name[0] != '.' && strcmp(thread->d_name, own) != 0 && strchr("RD", state_of(process, thread->d_name))) running++;
        closedir(threads);
        if (running) usleep(1000);
    }
}

/* Accepts a sender without waiting for one, when the listener's descriptor says that one is there. One that took
 * longer than the half second that it has, on a busy machine, is let go, and comes again. */
static inline pelton_receiver *accepted_at_once(pelton_listener *listener, int64_t deadline_ns) {
    struct pollfd listening = {pelton_listener_fd(listener), POLLIN, 0};
    pelton_receiver *receiver = NULL;
    int code;
    do {
        CHECK(poll(&listening, 1, 60000) == 1);
        code = pelton_listener_accept_receiver(listener, deadline_ns, &receiver);
    } while (code == PELTON_AGAIN);
    OK(code);
    return receiver;
}

static inline int remove_one(const char *path, const struct stat *found, int kind, struct FTW *where) {
    (void)found, (void)kind, (void)where;
    return remove(path);
}

static pid_t tests_run;
static inline void pass_on(int number) { kill(tests_run, number); }

static inline int run_tests(const test *tests, size_t count) {
    CHECK(pelton_version() == PELTON_VERSION);
    /* In the directory that the environment names, if any. */
    const char *below = getenv("PELTON_TEST_BELOW");
    int written = snprintf(here, sizeof here, "%s/pelton-c-test-XXXXXX", below ? below : "/tmp"), status = 0;
    CHECK(written > 0 && (size_t)written < sizeof here);
    CHECK(mkdtemp(here));
    /* In a process of their own: whatever ends that process, this one removes what it leaves. */
    tests_run = fork();
    CHECK(tests_run >= 0);
    if (tests_run == 0) {
        alarm(200);
        for (size_t i = 0; i < count; i++) {
            tests[i].run();
            printf("ok %s\n", tests[i].name);
        }
        /* Everything in it was removed by the tests. */
        CHECK(rmdir(here) == 0);
        return 0;
    }
    signal(SIGINT, pass_on);
    signal(SIGTERM, pass_on);
    CHECK(waitpid(tests_run, &status, 0) == tests_run);
    if (status) nftw(here, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

#endif
