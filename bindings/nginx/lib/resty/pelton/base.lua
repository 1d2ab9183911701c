--- What resty.pelton and resty.pelton.file have in common: the module in nginx, how a coroutine sleeps, and words for what goes wrong.

local base = require "resty.core.base"
require "resty.core.phase"
local semaphore = require "ngx.semaphore"
local bit = require "bit"
local ffi = require "ffi"

if ngx.config.subsystem ~= "http" then
    error("resty.pelton: works in http only, found " .. ngx.config.subsystem)
end

-- Of ngx_pelton.h.
ffi.cdef [[
typedef struct {
    uint64_t capacity;
    uint64_t call_bytes_max;
    uint64_t parts_bytes_max;
    int64_t hold_ns;
    uint32_t uids_count;
    uint32_t uids[16];
} ngx_pelton_options_t;

typedef struct {
    const char *data;
    double ticket;
    uint32_t size;
    uint32_t outcome;
    uint32_t code;
} ngx_pelton_answer_t;

typedef struct {
    uint32_t is_connected;
    uint32_t in_flight;
    uint32_t waiting;
    uint32_t slots;
    uint32_t connections;
    uint64_t turns;
    uint64_t within;
    uint64_t bytes;
} ngx_pelton_figures_t;

typedef struct pelton_file pelton_file;

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
} ngx_pelton_done_t;

int ngx_pelton_version(void *sema_new, void *sema_post, void *sema_gc);
double ngx_pelton_msec(void);
void *ngx_pelton_semaphore(double ticket);
void ngx_pelton_give_up(double ticket);
int ngx_pelton_park(double ticket, ngx_http_request_t *request);
]]

local C = ffi.C
local get_request = base.get_request
local get_raw_phase = ngx.get_raw_phase
local sem_wait = semaphore.wait
local band, ceil, max = bit.band, math.ceil, math.max
local error, type, tostring = error, type, tostring

local VERSION = 2
local function version_wanted()
    local bytes = 0
    for _, name in ipairs {"options", "answer", "figures", "operation", "done"} do
        bytes = bytes + ffi.sizeof("ngx_pelton_" .. name .. "_t")
    end
    return VERSION * 100000 + bytes
end
local has_module, version = pcall(function()
    return C.ngx_pelton_version(C.ngx_http_lua_ffi_sema_new, C.ngx_http_lua_ffi_sema_post, C.ngx_http_lua_ffi_sema_gc)
end)
if not has_module then
    error("resty.pelton: this nginx has not loaded ngx_pelton_module.so: write `load_module .../ngx_pelton_module.so;` at the top of nginx.conf")
elseif version ~= version_wanted() then
    error("resty.pelton: the ngx_pelton_module.so that nginx runs is of version " .. version .. ", and this of " .. version_wanted() ..
              ": install both from one place; if that was done, restart nginx, as a reload does not load a module anew")
end

-- Phases whose coroutines may be suspended: rewrite, access, content, timer, ssl_cert, ssl_session_fetch, ssl_client_hello,
-- server_rewrite.
local SUSPENDS = 0x0002 + 0x0004 + 0x0008 + 0x0080 + 0x0400 + 0x1000 + 0x4000 + 0x8000

local SLOTS = 2 ^ 20 -- of a ticket, what is the slot's number

local _M = {}

-- Seconds.
_M.TIMEOUT = 60

-- Of pelton's codes, in include/pelton.h.
_M.WORDS = {
    [-1] = "no room",
    [-2] = "closed",
    [-3] = "peer died",
    [-4] = "too large",
    [-8] = "corrupt",
    [-9] = "refused",
    [-10] = "hung up",
    [-11] = "no listener",
    [-13] = "name",
    [-14] = "option",
    [-20] = "system",
    [-22] = "internal",
    [-24] = "closed"
}

--- Whether a coroutine may be suspended in this phase.
function _M.is_suspendable()
    local request = get_request()
    return request and band(get_raw_phase(request), SUSPENDS) ~= 0
end

--- Raises an error at that level, as `error` counts, unless that is seconds.
function _M.check_timeout(timeout, level)
    if type(timeout) ~= "number" or not (timeout > 0 and timeout < 2e6) then
        error("resty.pelton: timeout is a number of seconds above 0 and below 2,000,000; found " .. tostring(timeout), level)
    end
    return timeout
end

-- Of each slot, what ngx.semaphore waits by. The module keeps the semaphores.
local semaphores = {}

--- Sleeps on the slot of a ticket, for milliseconds at most. Answers whether it was woken, else what ngx.semaphore says. It may be woken for
-- nothing.
function _M.sleep(ticket, msec)
    local index = ticket % SLOTS
    local own = semaphores[index]
    if not own then
        local found = C.ngx_pelton_semaphore(ticket)
        if found == nil then
            return true
        end
        own = {sem = ffi.cast("ngx_http_lua_sema_t *", found)}
        semaphores[index] = own
    end
    -- What it cuts off below a millisecond is not to be a whole one.
    return sem_wait(own, (ceil(max(msec, 0)) + 0.5) / 1000)
end

--- Has a slot given up when who asked ends. False, and it is given up now: no memory.
function _M.park(ticket)
    if C.ngx_pelton_park(ticket, get_request()) ~= 0 then
        C.ngx_pelton_give_up(ticket)
        return false
    end
    return true
end

return _M
