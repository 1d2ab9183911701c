// Reads of 4 KiB by libuv's own uv_fs: for `pelton-bench file cached`.
//
//   uvfs FILE IN_FLIGHT
//
// A line of its standard input is two numbers. The program reads a scattered block for each number from the first up
// to the second, IN_FLIGHT at a time, and checks each block. Then it writes the nanoseconds that they took to the
// standard output.
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>

#define BLOCK 4096
#define BLOCKS 4096
#define IN_FLIGHT_MAX 256

struct slot {
    uv_fs_t request;
    char bytes[BLOCK];
    uint64_t number;
};

static uv_loop_t *loop;
static uv_file file;
static struct slot slots[IN_FLIGHT_MAX];
static uint64_t next, end;

static void fail(const char *what, int error) {
    fprintf(stderr, "uvfs: %s: %s\n", what, uv_strerror(error));
    exit(1);
}

static void finished(uv_fs_t *request);

static void submit(struct slot *slot) {
    if (next == end)
        return;
    // The same sequence as in the other systems.
    slot->number = (next++ * UINT64_C(0x9e3779b97f4a7c15) >> 32) % BLOCKS;
    uv_buf_t piece = uv_buf_init(slot->bytes, BLOCK);
    int error = uv_fs_read(loop, &slot->request, file, &piece, 1, (int64_t)(slot->number * BLOCK), finished);
    if (error)
        fail("uv_fs_read", error);
}

static void finished(uv_fs_t *request) {
    struct slot *slot = request->data;
    uint64_t found;
    memcpy(&found, slot->bytes, sizeof found);
    if (request->result != BLOCK || found != slot->number)
        fail("a block is not what was written", request->result < 0 ? (int)request->result : UV_EIO);
    uv_fs_req_cleanup(request);
    submit(slot);
}

int main(int argc, char **argv) {
    int in_flight = argc == 3 ? atoi(argv[2]) : 0;
    if (in_flight < 1 || in_flight > IN_FLIGHT_MAX) {
        fprintf(stderr, "usage: uvfs FILE IN_FLIGHT\n");
        return 2;
    }
    loop = uv_default_loop();
    uv_fs_t request;
    file = uv_fs_open(loop, &request, argv[1], O_RDONLY | O_CLOEXEC, 0, NULL);
    if (file < 0)
        fail(argv[1], file);
    for (int slot = 0; slot < in_flight; slot++)
        slots[slot].request.data = &slots[slot];
    uint64_t first;
    while (scanf("%" SCNu64 " %" SCNu64, &first, &end) == 2) {
        next = first;
        uint64_t begun = uv_hrtime();
        for (int slot = 0; slot < in_flight; slot++)
            submit(&slots[slot]);
        uv_run(loop, UV_RUN_DEFAULT);
        printf("%" PRIu64 "\n", uv_hrtime() - begun);
        fflush(stdout);
    }
    return 0;
}
