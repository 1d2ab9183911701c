/* Runs a program that cannot use io_uring, as in a container with a seccomp filter: without_io_uring PROGRAM
 * ARGUMENT... */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(int count, char **arguments)
{
    struct sock_filter steps[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof steps / sizeof *steps, steps};
    if (count < 2 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter)) {
        perror("without_io_uring");
        return 2;
    }
    if (syscall(__NR_io_uring_setup, 1, NULL) != -1 || errno != EPERM) {
        fprintf(stderr, "without_io_uring: io_uring is not refused\n");
        return 2;
    }
    execvp(arguments[1], arguments + 1);
    perror(arguments[1]);
    return 2;
}
