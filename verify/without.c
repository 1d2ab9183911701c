/* Runs a program to which the kernel refuses a system call, as a container's seccomp filter does:
 * without io_uring_setup | membarrier PROGRAM ARGUMENT... */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static int number_of(const char *name)
{
    return strcmp(name, "io_uring_setup") == 0 ? __NR_io_uring_setup
        : strcmp(name, "membarrier") == 0      ? __NR_membarrier
                                               : -1;
}

int main(int count, char **arguments)
{
    int refused = count < 3 ? -1 : number_of(arguments[1]);
    if (refused < 0) {
        fprintf(stderr, "usage: without io_uring_setup | membarrier PROGRAM ARGUMENT...\n");
        return 2;
    }
    struct sock_filter steps[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)refused, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof steps / sizeof *steps, steps};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter)) {
        perror("without");
        return 2;
    }
    /* Of membarrier 0 is a query, which always works. */
    if (syscall(refused, 0, NULL) != -1 || errno != EPERM) {
        fprintf(stderr, "without: %s is not refused\n", arguments[1]);
        return 2;
    }
    execvp(arguments[2], arguments + 2);
    perror(arguments[2]);
    return 2;
}
