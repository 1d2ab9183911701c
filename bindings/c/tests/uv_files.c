/* pelton_uv.h: operations on files whose completions are callbacks of a libuv loop. */
#include "check.h"
#include "pelton_uv.h"

enum { BLOCKS = 500, BYTES = 4096, AT_A_TIME = 40 };

static uv_loop_t loop;
static pelton_uv_engine_t *handle;
static pelton_file *file;
static char path[128];
static int closings, in_callback;

/* One block of a copy, read and then written: heap memory, so that a use after its end is found. */
typedef struct block {
    pelton_uv_operation_t operation;
    pelton_operation what;
    struct iovec memory;
    char *bytes;
    uint64_t number;
    int writes;
} block;

static uint64_t begun, ended;

static void free_engine(pelton_uv_engine_t *closed) {
    closings++;
    free(closed);
}

static void begin(void) {
    pelton_engine *engine;
    pelton_file_completion out;
    pelton_operation open;
    CHECK(uv_loop_init(&loop) == 0);
    OK(pelton_engine_open(NULL, &engine));
    memset(&open, 0, sizeof open);
    open.kind = PELTON_FILE_OPEN;
    open.path = place(path, "%s/file");
    open.open_flags = O_RDWR | O_CREAT;
    open.mode = 0600;
    OK(pelton_engine_run(engine, &open, PELTON_FOREVER, &out));
    file = out.file;
    handle = (pelton_uv_engine_t *)malloc(sizeof *handle);
    CHECK(handle);
    OK(pelton_uv_engine_init(&loop, handle, engine));
    CHECK(!uv_is_active((uv_handle_t *)&handle->poll));
    closings = 0;
}

static void run(void) {
    CHECK(uv_run(&loop, UV_RUN_DEFAULT) == 0);
}

static void end(void) {
    pelton_uv_engine_close(handle, free_engine);
    run();
    CHECK(closings == 1);
    CHECK(uv_loop_close(&loop) == 0);
    OK(pelton_close(file));
    CHECK(unlink(path) == 0);
}

static void submit(block *it, pelton_uv_operation_cb on_done) {
    size_t taken;
    int was_in_callback = in_callback;
    in_callback = 0;
    OK(pelton_uv_engine_submit(handle, &it->operation, &it->what, 1, &taken, on_done));
    CHECK(taken == 1);
    /* No callback comes from within it. */
    CHECK(in_callback == 0);
    in_callback = was_in_callback;
}

static block *new_block(uint64_t number, uint32_t kind, size_t size) {
    block *it = (block *)calloc(1, sizeof *it);
    CHECK(it && (it->bytes = (char *)malloc(size)));
    it->number = number;
    it->memory.iov_base = it->bytes;
    it->memory.iov_len = size;
    it->what.kind = kind;
    it->what.file = file;
    it->what.memory = &it->memory;
    it->what.memory_count = 1;
    it->what.offset = number * BYTES;
    it->operation.data = it;
    memset(it->bytes, (int)(number % 251), size);
    return it;
}

static void free_block(block *it) {
    free(it->bytes);
    free(it);
}

static void on_block(pelton_uv_operation_t *operation, const pelton_file_completion *done) {
    block *it = (block *)operation->data;
    in_callback = 1;
    CHECK(operation->handle == handle && done->code == PELTON_OK && done->error == 0 && done->count == BYTES);
    if (it->what.kind == PELTON_FILE_WRITE) {
        /* Read it back, in the same memory, from within the callback. */
        memset(it->bytes, 0, BYTES);
        it->what.kind = PELTON_FILE_READ;
        submit(it, on_block);
        return;
    }
    for (size_t i = 0; i < BYTES; i++) CHECK(it->bytes[i] == (char)(it->number % 251));
    ended++;
    free_block(it);
    if (begun < BLOCKS) submit(new_block(begun++, PELTON_FILE_WRITE, BYTES), on_block);
}

static void every_operation_comes_back_to_its_callback_and_the_loop_ends_by_itself(void) {
    begin();
    for (int round = 0; round < 2; round++) {
        begun = ended = 0;
        while (begun < AT_A_TIME) submit(new_block(begun++, PELTON_FILE_WRITE, BYTES), on_block);
        CHECK(uv_is_active((uv_handle_t *)&handle->poll));
        run();
        CHECK(ended == BLOCKS && begun == BLOCKS);
        CHECK(!uv_is_active((uv_handle_t *)&handle->poll));
    }
    end();
}

static int timers;

static void on_timer(uv_timer_t *timer) {
    (void)timer;
    timers++;
}

static int synced;

static void on_synced(pelton_uv_operation_t *operation, const pelton_file_completion *done) {
    (void)operation;
    RETURNS(done->code, PELTON_OK);
    synced++;
}

static void a_chain_and_the_loops_other_handles_go_on(void) {
    pelton_uv_operation_t operations[3];
    pelton_operation what[3];
    uv_timer_t timer;
    block *large = new_block(0, PELTON_FILE_WRITE, 8 << 20);
    size_t taken;
    free_block(large);
    begin();
    large = new_block(0, PELTON_FILE_WRITE, 8 << 20);
    CHECK(uv_timer_init(&loop, &timer) == 0 && uv_timer_start(&timer, on_timer, 0, 1) == 0);
    what[0] = large->what;
    what[0].flags = PELTON_LINKED;
    memset(&what[1], 0, sizeof what[1]);
    what[1].kind = PELTON_FILE_SYNC;
    what[1].file = file;
    what[1].flags = PELTON_LINKED;
    what[2] = what[1];
    what[2].flags = 0;
    synced = timers = 0;
    OK(pelton_uv_engine_submit(handle, operations, what, 3, &taken, on_synced));
    CHECK(taken == 3);
    while (synced < 3) uv_run(&loop, UV_RUN_ONCE);
    CHECK(timers > 0);
    uv_close((uv_handle_t *)&timer, NULL);
    free_block(large);
    end();
}

static int cancelled;

static void on_cancelled(pelton_uv_operation_t *operation, const pelton_file_completion *done) {
    (void)operation;
    CHECK(done->code == PELTON_SYSTEM && done->error == ECANCELED);
    cancelled++;
}

static void on_nothing(pelton_uv_operation_t *operation, const pelton_file_completion *done) {
    (void)operation;
    (void)done;
    CHECK(!"a callback after the close");
}

static void close_in_callback(pelton_uv_operation_t *operation, const pelton_file_completion *done) {
    RETURNS(done->code, PELTON_OK);
    pelton_uv_engine_close(operation->handle, free_engine);
}

static void release(void *context) { __atomic_fetch_add((int *)context, 1, __ATOMIC_RELEASE); }

static void what_is_cancelled_comes_back_and_after_a_close_nothing_does(void) {
    int ends[2], released = 0;
    pelton_file *idle, *regular;
    block *first, *second;
    begin();
    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    OK(pelton_file_from_fd(ends[0], "a pipe", &idle));
    regular = file;
    file = idle;
    first = new_block(0, PELTON_FILE_READ, BYTES);
    first->what.offset = PELTON_CURRENT;
    submit(first, on_cancelled);
    cancelled = 0;
    OK(pelton_uv_operation_cancel(&first->operation));
    run();
    CHECK(cancelled == 1);
    RETURNS(pelton_uv_operation_cancel(&first->operation), PELTON_AGAIN);
    /* Closed in a callback while another is in flight, with memory to be released, and one without. */
    first->what.release = release;
    first->what.context = &released;
    submit(first, on_nothing);
    second = new_block(0, PELTON_FILE_READ, BYTES);
    second->what.offset = PELTON_CURRENT;
    submit(second, on_nothing);
    file = regular;
    {
        block *last = new_block(0, PELTON_FILE_WRITE, 10);
        submit(last, close_in_callback);
        run();
        free_block(last);
    }
    CHECK(closings == 1 && uv_loop_close(&loop) == 0);
    for (int i = 0; __atomic_load_n(&released, __ATOMIC_ACQUIRE) == 0; i++) {
        CHECK(i < 60000);
        usleep(1000);
    }
    CHECK(released == 1);
    free_block(first);
    free_block(second);
    OK(pelton_close(idle));
    OK(pelton_close(file));
    CHECK(close(ends[1]) == 0 && unlink(path) == 0);
}

static const test tests[] = {
    TEST(every_operation_comes_back_to_its_callback_and_the_loop_ends_by_itself),
    TEST(a_chain_and_the_loops_other_handles_go_on),
    TEST(what_is_cancelled_comes_back_and_after_a_close_nothing_does),
};

int main(void) { return run_tests(tests, sizeof tests / sizeof *tests); }
