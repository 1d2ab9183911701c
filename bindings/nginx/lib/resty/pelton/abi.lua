-- Written by bindings/generate from include/pelton.abi and ngx_pelton.h: change nothing here.
--
-- What Lua needs of pelton's C interface and of nginx's module: the version, constants without PELTON_, `words` of
-- codes, and the structures and functions of the module.

local ffi = require "ffi"

ffi.cdef [[
typedef struct pelton_file pelton_file;
enum {
    NGX_PELTON_WAITS = 2,
    NGX_PELTON_SUBMIT_AGAIN = 3,
    NGX_PELTON_NOTIFY = 0x10,
    NGX_PELTON_STREAM = 0x20,
    NGX_PELTON_MAY_WAIT = 0x40,
    NGX_PELTON_VIEW = 0x80
};
typedef struct ngx_pelton_service_s ngx_pelton_service_t;
typedef struct {
    uint64_t capacity;
    uint64_t call_bytes_max;
    uint64_t parts_bytes_max;
    int64_t poll_ns;
    uint32_t uid_count;
    uint32_t uids[16];
} ngx_pelton_options_t;
typedef struct {
    const char *data;
    double ticket;
    uint32_t size;
    uint32_t outcome;
    uint32_t code;
} ngx_pelton_reply_t;
typedef struct {
    uint32_t is_connected;
    uint32_t in_flight;
    uint32_t waiting;
    uint32_t slots;
    uint32_t connections;
    uint64_t immediate;
    uint64_t bytes;
} ngx_pelton_info_t;
typedef struct {
    const char *path;
    const char *data;
    pelton_file *file;
    uint64_t offset;
    uint64_t bytes;
    uint32_t kind;
    uint32_t open_flags;
    uint32_t mode;
} ngx_pelton_operation_t;
typedef struct {
    const char *data;
    double ticket;
    pelton_file *file;
    uint64_t bytes;
    int32_t error;
} ngx_pelton_file_result_t;
uint32_t ngx_pelton_version(void);
void ngx_pelton_use_semaphores(void *sema_new, void *sema_post, void *sema_gc);
double ngx_pelton_msec(void);
void *ngx_pelton_semaphore(double ticket);
void ngx_pelton_release_slot(double ticket);
int ngx_pelton_bind(double ticket, ngx_http_request_t *request);
ngx_pelton_service_t *ngx_pelton_service(const char *address, const ngx_pelton_options_t *options);
ngx_pelton_service_t *ngx_pelton_configured(const char *name, double *timeout);
int ngx_pelton_submit(ngx_pelton_service_t *service, double ticket, const char *data, size_t size,
                      const char *traceparent, uint32_t flags, ngx_pelton_reply_t *out);
void ngx_pelton_release(ngx_pelton_service_t *service);
int ngx_pelton_take(double ticket, int is_last, ngx_pelton_reply_t *out);
int ngx_pelton_view(double ticket, ngx_pelton_reply_t *out);
void ngx_pelton_get_info(ngx_pelton_service_t *service, ngx_pelton_info_t *out);
int ngx_pelton_file_start(const ngx_pelton_operation_t *wanted, ngx_pelton_file_result_t *out);
int ngx_pelton_file_take(double ticket, int is_last, ngx_pelton_file_result_t *out);
void ngx_pelton_file_close(pelton_file *file);
uint32_t ngx_pelton_files_in_flight(void);
]]

return {
    VERSION = 2000,
    AGAIN = -1,
    CLOSED = -2,
    PEER_DIED = -3,
    TOO_LARGE = -4,
    TOO_SMALL = -5,
    TOO_MANY_DESCRIPTORS = -6,
    DESCRIPTORS_LOST = -7,
    CORRUPT = -8,
    REFUSED = -9,
    HUNG_UP = -10,
    NO_LISTENER = -11,
    IN_USE = -12,
    NAME = -13,
    OPTION = -14,
    NO_CHANNEL = -15,
    NOT_A_CHANNEL = -16,
    ROLE_TAKEN = -17,
    NO_SPACE = -18,
    REBOOTED = -19,
    SYSTEM = -20,
    FORKED = -21,
    INTERNAL = -22,
    NULL = -23,
    CLOSED_HANDLE = -24,
    WRONG_THREAD = -25,
    NOT_RESERVED = -26,
    RESERVED = -27,
    NOT_RECEIVED = -28,
    NOT_RELEASED = -29,
    SINK = -30,
    NOT_A_RECORD_FILE = -31,
    DAMAGED = -32,
    TORN = -33,
    TIMED_OUT = -34,
    NO_WAIT = 0,
    FOREVER = 9223372036854775807ULL,
    TRACEPARENT_SIZE = 56,
    REDELIVERED = 1,
    NO_HOLD = -1,
    OLDEST = 18446744073709551615ULL,
    NO_POLL = -1,
    IDEMPOTENT = 1,
    EACH_WRITE = 18446744073709551615ULL,
    CURRENT = 18446744073709551615ULL,
    AT_END = 18446744073709551614ULL,
    LINKED = 1,
    OK = 0,
    READY = 1,
    BLOCK = 0,
    SPIN = 1,
    MESSAGE = 0,
    JOINED = 1,
    LEFT = 2,
    DIED = 3,
    VIOLATED = 4,
    GATE = 0,
    LAG = 1,
    LATEST = 2,
    REPLY = 1,
    PART = 2,
    END = 3,
    FAILED = 4,
    ABANDONED = 5,
    LOST = 6,
    FILE_OPEN = 1,
    FILE_CLOSE = 2,
    FILE_READ = 3,
    FILE_WRITE = 4,
    FILE_SYNC = 5,
    FILE_SYNC_DATA = 6,
    FILE_TRUNCATE = 7,
    FILE_ALLOCATE = 8,
    FILE_STAT = 9,
    FILE_STAT_LINK = 10,
    FILE_SET_TIMES = 11,
    FILE_UNLINK = 12,
    FILE_REMOVE_DIRECTORY = 13,
    FILE_RENAME = 14,
    FILE_LINK = 15,
    FILE_SYMLINK = 16,
    FILE_READ_LINK = 17,
    FILE_MAKE_DIRECTORY = 18,
    FILE_LIST = 19,
    FILE_COPY = 20,
    FILE_SEND = 21,
    FILE_RECEIVE = 22,
    UNKNOWN = 0,
    REGULAR = 1,
    DIRECTORY = 2,
    SYMBOLIC_LINK = 3,
    FIFO = 4,
    SOCKET = 5,
    CHARACTER_DEVICE = 6,
    BLOCK_DEVICE = 7,
    words = {
        [-1] = "again",
        [-2] = "closed",
        [-3] = "peer died",
        [-4] = "too large",
        [-5] = "too small",
        [-6] = "too many descriptors",
        [-7] = "descriptors lost",
        [-8] = "corrupt",
        [-9] = "refused",
        [-10] = "hung up",
        [-11] = "no listener",
        [-12] = "in use",
        [-13] = "name",
        [-14] = "option",
        [-15] = "no channel",
        [-16] = "not a channel",
        [-17] = "role taken",
        [-18] = "no space",
        [-19] = "rebooted",
        [-20] = "system",
        [-21] = "forked",
        [-22] = "internal",
        [-23] = "null",
        [-24] = "closed handle",
        [-25] = "wrong thread",
        [-26] = "not reserved",
        [-27] = "reserved",
        [-28] = "not received",
        [-29] = "not released",
        [-30] = "sink",
        [-31] = "not a record file",
        [-32] = "damaged",
        [-33] = "torn",
        [-34] = "timed out",
    }
}
