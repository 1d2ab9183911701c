/* Preloaded: the next calls of io_uring_enter fail with ENOMEM. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/syscall.h>

static atomic_int left;

void no_memory_for(int calls);
long syscall(long number, ...);

void no_memory_for(int calls) { left = calls; }

long syscall(long number, ...) {
    static long (*real)(long, ...);
    long given[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++) given[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_io_uring_enter && left > 0 && atomic_fetch_sub(&left, 1) > 0) {
        errno = ENOMEM;
        return -1;
    }
    if (!real) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    return real(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}
