--- Calls from nginx's Lua to services in other processes and languages, by pelton. Needs ngx_pelton_module.so, in the same nginx.
--
--     local pelton = require "resty.pelton"
--     local svc = pelton.connect("unix:/run/app/echo.socket", {timeout = 0.5})
--     local res, err, detail = svc:call("hello")
--
-- A call suspends its coroutine only, where one may be: rewrite, access, content, timers, ssl_certificate and the like. What goes wrong
-- while running is `nil, err, detail`; what is wrong in the program raises an error. README.md has the whole.

local base = require "resty.core.base"
require "resty.core.phase"
local semaphore = require "ngx.semaphore"
local bit = require "bit"
local ffi = require "ffi"

if ngx.config.subsystem ~= "http" then
    error("resty.pelton: works in http only, found " .. ngx.config.subsystem)
end

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
    uint32_t size;
    uint32_t outcome;
    uint32_t code;
    uint32_t slot;
} ngx_pelton_answer_t;

typedef struct {
    uint32_t is_connected;
    uint32_t in_flight;
    uint32_t waiting;
    uint32_t slots;
    uint32_t slots_made;
    uint32_t connections;
    uint64_t turns;
    uint64_t within;
    uint64_t bytes;
} ngx_pelton_figures_t;

typedef struct ngx_pelton_service_s ngx_pelton_service_t;

int ngx_pelton_version(void);
ngx_pelton_service_t *ngx_pelton_service(const char *name, const ngx_pelton_options_t *options, void *sema_new, void *sema_post,
                                         void *sema_gc);
int ngx_pelton_ask(ngx_pelton_service_t *service, uint32_t slot, const char *data, size_t size, uint32_t flags, ngx_pelton_answer_t *out);
void ngx_pelton_release(ngx_pelton_service_t *service);
void *ngx_pelton_semaphore(uint32_t slot);
void ngx_pelton_give_up(uint32_t slot);
int ngx_pelton_park(uint32_t slot, ngx_http_request_t *request);
int ngx_pelton_take(uint32_t slot, ngx_pelton_answer_t *out);
void ngx_pelton_figures(ngx_pelton_service_t *service, ngx_pelton_figures_t *out);
]]

local C = ffi.C
local ffi_string = ffi.string
local get_request = base.get_request
local get_raw_phase = ngx.get_raw_phase
local now = ngx.now
local sem_wait = semaphore.wait
local band = bit.band
local concat = table.concat
local error, type, tonumber, tostring, setmetatable = error, type, tonumber, tostring, setmetatable

local VERSION = 1
local has_module, version = pcall(function() return C.ngx_pelton_version() end)
if not has_module then
    error("resty.pelton: this nginx has not loaded ngx_pelton_module.so: write `load_module .../ngx_pelton_module.so;` at the top of nginx.conf")
elseif version ~= VERSION then
    error("resty.pelton: ngx_pelton_module.so is of version " .. version .. ", wanted " .. VERSION .. ": install both from one place")
end

-- What ngx_pelton_ask and ngx_pelton_take answer, and flags of the former.
local DONE, WAITS, ASK_AGAIN = 0, 1, 2
local NOTIFY, IDEMPOTENT, STREAM, MAY_WAIT = 1, 2, 0x100, 0x200
local NO_SLOT = 0xffffffff

-- pelton_outcome.
local REPLY, PART, END, FAILED, ABANDONED, LOST = 1, 2, 3, 4, 5, 6

-- Phases whose coroutines may be suspended: rewrite, access, content, timer, ssl_cert, ssl_session_fetch, ssl_client_hello,
-- server_rewrite.
local SUSPENDS = 0x0002 + 0x0004 + 0x0008 + 0x0080 + 0x0400 + 0x1000 + 0x4000 + 0x8000

local TIMEOUT = 60

-- Of pelton's codes, in include/pelton.h.
local WORDS = {
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
}

-- Filled by each function that takes it, and read before anything else runs.
local answer = ffi.new("ngx_pelton_answer_t")
local figures = ffi.new("ngx_pelton_figures_t")

-- Of each slot, what ngx.semaphore waits by. The module keeps the semaphores.
local semaphores = {}

local function semaphore_of(slot)
    local own = semaphores[slot]
    if not own then
        own = {sem = ffi.cast("ngx_http_lua_sema_t *", C.ngx_pelton_semaphore(slot))}
        semaphores[slot] = own
    end
    return own
end

local function failure(code)
    return nil, WORDS[code] or "code " .. code, answer.size > 0 and ffi_string(answer.data, answer.size) or nil
end

-- What an answer that is no reply means.
local function refusal()
    local outcome = answer.outcome
    if outcome == FAILED then
        return nil, "failed", ffi_string(answer.data, answer.size), answer.code
    elseif outcome == ABANDONED then
        return nil, "abandoned", "the service let go of the call without an answer"
    end
    local code = bit.tobit(answer.code)
    if code == -1 then
        return nil, "not begun", "the service ended before it began this call: it may be asked again"
    end
    return nil, WORDS[code] or "code " .. code, "the service ended: whether it carried the call out nobody knows"
end

local function is_suspendable()
    local request = get_request()
    return request and band(get_raw_phase(request), SUSPENDS) ~= 0
end

local function size_of(req, opts)
    if type(req) == "string" then
        return #req
    end
    local size = type(req) == "cdata" and opts and opts.size
    if not size then
        error("resty.pelton: a request is a string, or a cdata pointer with opts.size; found " .. type(req), 3)
    end
    return size
end

local function timeout_of(self, opts)
    local timeout = opts and opts.timeout or self.timeout
    if type(timeout) ~= "number" or not (timeout > 0 and timeout < 2e6) then
        error("resty.pelton: timeout is a number of seconds above 0 and below 2,000,000; found " .. tostring(timeout), 3)
    end
    return timeout
end

-- Sleeps on a slot until there is something to take, or `until_`. Answers DONE with the next answer in `answer`, and the slot is the
-- caller's still; or nil and the error: then the slot has been given back. `req` and the rest are for who has waited for room.
local function await(self, slot, until_, req, size, flags)
    local left = until_ - now()
    while true do
        local ok, err = true, nil
        local code = WAITS
        if left > 0 then
            ok, err = sem_wait(semaphore_of(slot), left)
        else
            ok, err = nil, "timeout"
        end
        code = C.ngx_pelton_take(slot, answer)
        if code == ASK_AGAIN then
            code = C.ngx_pelton_ask(self.service, slot, req, size, flags, answer)
            if code == DONE then
                -- Within the call, and in place; or it was told.
                return DONE, true
            end
        end
        if code == DONE then
            return DONE
        end
        if code ~= WAITS then
            local _, word, detail = failure(code)
            C.ngx_pelton_give_up(slot)
            return nil, word, detail
        end
        if not ok then
            C.ngx_pelton_give_up(slot)
            return nil, err
        end
        left = until_ - now()
    end
end

-- Has a slot given up when who asked ends, then as `await`.
local function await_first(self, timeout, req, size, flags)
    local slot = answer.slot
    if C.ngx_pelton_park(slot, get_request()) ~= 0 then
        C.ngx_pelton_give_up(slot)
        return nil, "system", "no memory"
    end
    return await(self, slot, now() + timeout, req, size, flags)
end

local function shown(view)
    if view then
        return view(answer.data, answer.size)
    end
    return ffi_string(answer.data, answer.size)
end

local function slow_call(self, timeout, req, size, flags, view)
    local slot = answer.slot
    local done, in_place, detail = await_first(self, timeout, req, size, flags)
    if not done then
        return nil, in_place, detail
    end
    local outcome = answer.outcome
    if in_place then
        local res, word, more, code
        if outcome == REPLY then
            res = shown(view)
        elseif outcome == END then
            res = ""
        else
            res, word, more, code = refusal()
        end
        C.ngx_pelton_release(self.service)
        C.ngx_pelton_give_up(slot)
        return res, word, more, code
    end
    local res, word, more, code
    if outcome == REPLY then
        res = shown(view)
    elseif outcome == PART or outcome == END then
        -- All of it has come.
        local parts = {}
        while outcome == PART do
            parts[#parts + 1] = ffi_string(answer.data, answer.size)
            local took = C.ngx_pelton_take(slot, answer)
            if took ~= DONE then
                res, word, more = failure(took)
                C.ngx_pelton_give_up(slot)
                return res, word, more
            end
            outcome = answer.outcome
        end
        if outcome == REPLY then
            parts[#parts + 1] = ffi_string(answer.data, answer.size)
        end
        if outcome == REPLY or outcome == END then
            res = concat(parts)
            if view then
                res = view(ffi.cast("const char *", res), #res)
            end
        else
            res, word, more, code = refusal()
        end
    else
        res, word, more, code = refusal()
    end
    C.ngx_pelton_give_up(slot)
    return res, word, more, code
end

local methods = {}

--- Asks, and suspends the coroutine until the answer is there. Answers it as a string; or nil, a word, a text that says more, and, of
-- "failed", which is the service's own doing, with its bytes as the text, its code.
--
-- opts.timeout: seconds. opts.idempotent: it may be carried out twice. opts.view: a function that is given the answer's bytes in place, as a
-- pointer and a size, good until it returns; what it answers is the call's answer. It must not suspend, nor use pelton. opts.size: of a request that is
-- given as a cdata pointer.
function methods.call(self, req, opts)
    local size, timeout, view, flags = size_of(req, opts), self.timeout, nil, MAY_WAIT
    if opts then
        timeout, view = timeout_of(self, opts), opts.view
        if opts.idempotent then
            flags = MAY_WAIT + IDEMPOTENT
        end
    end
    if not is_suspendable() then
        return nil, "phase", "a call suspends its coroutine, which cannot be in this phase: notify, or use ngx.timer.at"
    end
    local code = C.ngx_pelton_ask(self.service, NO_SLOT, req, size, flags, answer)
    if code == DONE then
        local res, word, more, its
        if answer.outcome == REPLY then
            res = shown(view)
        elseif answer.outcome == END then
            res = ""
        else
            res, word, more, its = refusal()
        end
        C.ngx_pelton_release(self.service)
        return res, word, more, its
    elseif code == WAITS then
        return slow_call(self, timeout, req, size, flags, view)
    end
    return failure(code)
end

--- Tells the service something that it does not answer. Answers true when it is on its way. Where a coroutine may be suspended it waits for
-- room, and for the client; elsewhere, as in the log phase, it is nil and "no room" instead.
function methods.notify(self, req, opts)
    local size, timeout = size_of(req, opts), timeout_of(self, opts)
    local flags = is_suspendable() and NOTIFY + MAY_WAIT or NOTIFY
    local code = C.ngx_pelton_ask(self.service, NO_SLOT, req, size, flags, answer)
    if code == DONE then
        return true
    elseif code ~= WAITS then
        return failure(code)
    end
    local slot = answer.slot
    local done, word, detail = await_first(self, timeout, req, size, flags)
    if not done then
        return nil, word, detail
    end
    C.ngx_pelton_give_up(slot)
    return true
end

local Stream = {}

-- The next part; nil at the end; or false, a word and what else `call` answers, once.
local function next_part(stream)
    if stream.is_over then
        return nil
    end
    local done, word, detail, in_place
    if not stream.slot then
        local svc, req, size = stream.svc, stream.req, stream.size
        stream.req = nil
        local code = C.ngx_pelton_ask(svc.service, NO_SLOT, req, size, stream.flags, answer)
        if code ~= WAITS then
            stream.is_over = true
            local _, failed, more = failure(code)
            return false, failed, more
        end
        stream.slot = answer.slot
        done, word, detail = await_first(svc, stream.timeout, req, size, stream.flags)
    else
        local code = C.ngx_pelton_take(stream.slot, answer)
        done = code == DONE and DONE
        if code == WAITS then
            done, word, detail = await(stream.svc, stream.slot, now() + stream.timeout)
        elseif not done then
            in_place, word, detail = failure(code)
            C.ngx_pelton_give_up(stream.slot)
        end
    end
    if not done then
        stream.is_over = true
        stream.slot = nil
        return false, word, detail
    end
    local outcome = answer.outcome
    if outcome == PART then
        return ffi_string(answer.data, answer.size)
    end
    stream.is_over = true
    local res, code
    if outcome == REPLY then
        res = ffi_string(answer.data, answer.size)
    elseif outcome ~= END then
        res, word, detail, code = refusal()
        res = false
    end
    C.ngx_pelton_give_up(stream.slot)
    stream.slot = nil
    return res, word, detail, code
end

Stream.__call = next_part
Stream.__index = {
    --- Lets go of what has not come yet. Needed only by who leaves the loop early and goes on for long: the end of the request does it.
    close = function(stream)
        stream.is_over = true
        if stream.slot then
            C.ngx_pelton_give_up(stream.slot)
            stream.slot = nil
        end
    end
}

--- Asks, and answers an iterator of the parts of the answer, each as it comes: `for part, err in svc:stream(req)`. part is false where err
-- is set, which ends it. opts.timeout is for each part. Other opts as `call`.
function methods.stream(self, req, opts)
    if not is_suspendable() then
        local is_told = false
        return function()
            if is_told then
                return nil
            end
            is_told = true
            return false, "phase", "a stream suspends its coroutine, which cannot be in this phase"
        end
    end
    return setmetatable({
        svc = self,
        req = req,
        size = size_of(req, opts),
        timeout = timeout_of(self, opts),
        flags = STREAM + MAY_WAIT + (opts and opts.idempotent and IDEMPOTENT or 0)
    }, Stream)
end

--- Figures of this worker's client, as a table.
function methods.info(self)
    C.ngx_pelton_figures(self.service, figures)
    return {
        connected = figures.is_connected == 1,
        in_flight = figures.in_flight,
        waiting = figures.waiting,
        slots = figures.slots,
        slots_made = figures.slots_made,
        connections = figures.connections,
        turns = tonumber(figures.turns),
        within = tonumber(figures.within),
        bytes = tonumber(figures.bytes)
    }
end

local Service = {__index = methods}

local OPTIONS = {timeout = true, capacity = true, call_bytes_max = true, parts_bytes_max = true, hold = true, uids = true}

local _M = {_VERSION = "0.1.0"}

--- The service of a name: "unix:PATH", or a short one. It does not connect yet: each worker does, when it first asks. To ask for the same
-- name and options again is cheap, and has the same client.
--
-- opts.timeout: seconds that calls wait, 60. opts.capacity: bytes of a lane, 4 MiB. opts.call_bytes_max: of an answer, 64 MiB.
-- opts.parts_bytes_max: of parts of one answer that have not been taken, 16 MiB. opts.uids: users, as numbers, that the service may be of
-- besides this worker's own. opts.hold: seconds for which a worker looks on for an answer before it sleeps, 20e-6; 0: not at all.
function _M.connect(name, opts)
    opts = opts or {}
    if type(name) ~= "string" or name == "" or name:find("%z") then
        error("resty.pelton: a name is a string such as \"unix:/run/app/echo.socket\"; found " .. tostring(name), 2)
    end
    for option in pairs(opts) do
        if not OPTIONS[option] then
            error("resty.pelton: there is no option `" .. tostring(option) .. "`", 2)
        end
    end
    local made = ffi.new("ngx_pelton_options_t")
    made.capacity = opts.capacity or 0
    made.call_bytes_max = opts.call_bytes_max or 0
    made.parts_bytes_max = opts.parts_bytes_max or 16 * 1024 * 1024
    made.hold_ns = opts.hold == 0 and -1 or (opts.hold or 0) * 1e9
    local uids = opts.uids or {}
    if #uids > 16 then
        error("resty.pelton: at most 16 uids; found " .. #uids, 2)
    end
    made.uids_count = #uids
    for i, uid in ipairs(uids) do
        made.uids[i - 1] = uid
    end
    local self = {timeout = opts.timeout or TIMEOUT, name = name}
    timeout_of(self)
    self.service = C.ngx_pelton_service(name, made, C.ngx_http_lua_ffi_sema_new, C.ngx_http_lua_ffi_sema_post,
                                         C.ngx_http_lua_ffi_sema_gc)
    if self.service == nil then
        error("resty.pelton: no memory", 2)
    end
    return setmetatable(self, Service)
end

return _M
