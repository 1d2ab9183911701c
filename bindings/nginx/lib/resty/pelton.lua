--- Calls from nginx's Lua to services in other processes and languages, by pelton. Needs ngx_pelton_module.so, in the same nginx.
--
--     local pelton = require "resty.pelton"
--     local svc = pelton.connect("unix:/run/app/echo.socket", {timeout = 0.5})
--     local res, err, detail = svc:call("hello")
--
-- A call suspends its coroutine only, where one may be: rewrite, access, content, timers, ssl_certificate and the like. What goes wrong
-- while running is `nil, err, detail`; what is wrong in the program raises an error. README.md has the whole.

local base = require "resty.pelton.base"
local file = require "resty.pelton.file"
local ffi = require "ffi"
local bit = require "bit"

ffi.cdef [[
typedef struct ngx_pelton_service_s ngx_pelton_service_t;

ngx_pelton_service_t *ngx_pelton_service(const char *name, const ngx_pelton_options_t *options);
int ngx_pelton_ask(ngx_pelton_service_t *service, double ticket, const char *data, size_t size, uint32_t flags, ngx_pelton_answer_t *out);
void ngx_pelton_release(ngx_pelton_service_t *service);
int ngx_pelton_take(double ticket, int is_last, ngx_pelton_answer_t *out);
void ngx_pelton_figures(ngx_pelton_service_t *service, ngx_pelton_figures_t *out);
]]

local C = ffi.C
local ffi_string = ffi.string
local WORDS, TIMEOUT = base.WORDS, base.TIMEOUT
local is_suspendable, sleep, park, timeout_of = base.is_suspendable, base.sleep, base.park, base.check_timeout
local concat = table.concat
local error, type, tonumber, tostring, setmetatable = error, type, tonumber, tostring, setmetatable

-- What ngx_pelton_ask and ngx_pelton_take answer, and flags of the former.
local DONE, WAITS, ASK_AGAIN = 0, 1, 2
local NOTIFY, IDEMPOTENT, STREAM, MAY_WAIT = 1, 2, 0x100, 0x200
local NO_SLOT = 0

-- pelton_outcome.
local REPLY, PART, END, FAILED, ABANDONED, LOST = 1, 2, 3, 4, 5, 6

-- Filled by each function that takes it, and read before anything else runs.
local answer = ffi.new("ngx_pelton_answer_t")
local figures = ffi.new("ngx_pelton_figures_t")

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

-- Sleeps on a slot until there is something to take, for so many seconds. Answers DONE with the next answer in `answer`, and the slot is the
-- caller's still; or nil and the error: then the slot has been given back. `req` and the rest are for who has waited for room.
local function await(self, ticket, timeout, req, size, flags)
    local left, ends = timeout * 1000, C.ngx_pelton_msec() + timeout * 1000
    while true do
        local is_awake, err = sleep(ticket, left)
        local code = C.ngx_pelton_take(ticket, is_awake and 0 or 1, answer)
        if code == ASK_AGAIN and is_awake then
            code = C.ngx_pelton_ask(self.service, ticket, req, size, flags, answer)
            if code == DONE then
                -- Within the call, and in place; or it was told.
                return DONE, true
            end
        end
        if code == DONE then
            return DONE
        end
        if code ~= WAITS and code ~= ASK_AGAIN then
            local _, word, detail = failure(code)
            C.ngx_pelton_give_up(ticket)
            return nil, word, detail
        end
        if not is_awake then
            C.ngx_pelton_give_up(ticket)
            return nil, err
        end
        left = ends - C.ngx_pelton_msec()
    end
end

-- Has a slot given up when who asked ends, then as `await`.
local function await_first(self, timeout, req, size, flags)
    local ticket = answer.ticket
    if not park(ticket) then
        return nil, "system", "no memory"
    end
    return await(self, ticket, timeout, req, size, flags)
end

local function shown(view)
    if view then
        return view(answer.data, answer.size)
    end
    return ffi_string(answer.data, answer.size)
end

-- What a call answers by its last outcome, with the bytes of that.
local function result(view)
    local outcome = answer.outcome
    if outcome == REPLY then
        return shown(view)
    elseif outcome == END then
        return ""
    end
    return refusal()
end

-- All parts of an answer that has come whole.
local function all_parts(ticket, view)
    local parts = {}
    while answer.outcome == PART do
        parts[#parts + 1] = ffi_string(answer.data, answer.size)
        local code = C.ngx_pelton_take(ticket, 0, answer)
        if code ~= DONE then
            return failure(code)
        end
    end
    local last, word, more, code = result()
    if not last then
        return nil, word, more, code
    end
    parts[#parts + 1] = last
    local res = concat(parts)
    if view then
        return view(ffi.cast("const char *", res), #res)
    end
    return res
end

local function slow_call(self, timeout, req, size, flags, view)
    local ticket = answer.ticket
    local done, in_place, detail = await_first(self, timeout, req, size, flags)
    if not done then
        return nil, in_place, detail
    end
    local res, word, more, code
    if answer.outcome == PART then
        res, word, more, code = all_parts(ticket, view)
    else
        res, word, more, code = result(view)
    end
    if in_place then
        C.ngx_pelton_release(self.service)
    end
    C.ngx_pelton_give_up(ticket)
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
        timeout, view = timeout_of(opts.timeout or timeout, 3), opts.view
        if opts.idempotent then
            flags = MAY_WAIT + IDEMPOTENT
        end
    end
    if not is_suspendable() then
        return nil, "phase", "a call suspends its coroutine, which cannot be in this phase: notify, or use ngx.timer.at"
    end
    local code = C.ngx_pelton_ask(self.service, NO_SLOT, req, size, flags, answer)
    if code == DONE then
        local res, word, more, its = result(view)
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
    local size, timeout = size_of(req, opts), timeout_of(opts and opts.timeout or self.timeout, 3)
    local flags = is_suspendable() and NOTIFY + MAY_WAIT or NOTIFY
    local code = C.ngx_pelton_ask(self.service, NO_SLOT, req, size, flags, answer)
    if code == DONE then
        return true
    elseif code ~= WAITS then
        return failure(code)
    end
    local ticket = answer.ticket
    local done, word, detail = await_first(self, timeout, req, size, flags)
    if not done then
        return nil, word, detail
    end
    C.ngx_pelton_give_up(ticket)
    return true
end

local Stream = {}

-- Waits for the next part, and has it in `answer`.
local function await_part(stream)
    local svc, ticket = stream.svc, stream.ticket
    if ticket then
        local code = C.ngx_pelton_take(ticket, 0, answer)
        if code == WAITS then
            return await(svc, ticket, stream.timeout)
        elseif code == DONE then
            return DONE
        end
        local _, word, detail = failure(code)
        C.ngx_pelton_give_up(ticket)
        return nil, word, detail
    end
    local req = stream.req
    stream.req = nil
    local code = C.ngx_pelton_ask(svc.service, NO_SLOT, req, stream.size, stream.flags, answer)
    if code ~= WAITS then
        return failure(code)
    end
    stream.ticket = answer.ticket
    return await_first(svc, stream.timeout, req, stream.size, stream.flags)
end

-- The next part; nil at the end; or false, a word and what else `call` answers, once.
local function next_part(stream)
    if stream.is_over then
        return nil
    elseif stream.is_busy then
        error("resty.pelton: another coroutine waits for the next part of this stream, or was killed while it did", 2)
    end
    stream.is_busy = true
    local done, word, detail = await_part(stream)
    stream.is_busy = false
    if done and answer.outcome == PART then
        return ffi_string(answer.data, answer.size)
    end
    local ticket = stream.ticket
    stream.is_over = true
    stream.ticket = nil
    if not done then
        return false, word, detail
    elseif answer.outcome == END then
        C.ngx_pelton_give_up(ticket)
        return nil
    end
    local res, code
    res, word, detail, code = result()
    C.ngx_pelton_give_up(ticket)
    return res or false, word, detail, code
end

Stream.__call = next_part
Stream.__index = {
    --- Lets go of what has not come yet. Needed only by who leaves the loop early and goes on for long: the end of the request does it.
    close = function(stream)
        stream.is_over = true
        if stream.ticket then
            C.ngx_pelton_give_up(stream.ticket)
            stream.ticket = nil
        end
    end
}

--- Asks, and answers an iterator of the parts of the answer, each as it comes: `for part, err in svc:stream(req)`. part is false where err
-- is set, which ends it. opts.timeout is for each part. Other opts as `call`. It is of one coroutine at a time, and ends with the request, or
-- timer, that has taken its first part.
function methods.stream(self, req, opts)
    local size, timeout = size_of(req, opts), timeout_of(opts and opts.timeout or self.timeout, 3)
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
        size = size,
        timeout = timeout,
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
        connections = figures.connections,
        turns = tonumber(figures.turns),
        within = tonumber(figures.within),
        bytes = tonumber(figures.bytes)
    }
end

local Service = {__index = methods}

local OPTIONS = {timeout = true, capacity = true, call_bytes_max = true, parts_bytes_max = true, hold = true, uids = true}

local _M = {_VERSION = "0.2.0", file = file}

-- A number of bytes, or the default.
local function bytes_of(opts, option, default)
    local bytes = opts[option]
    if bytes == nil then
        return default
    elseif type(bytes) ~= "number" or not (bytes >= 1 and bytes < 2 ^ 53) then
        error("resty.pelton: " .. option .. " is a number of bytes, from 1; found " .. tostring(bytes), 3)
    end
    return bytes
end

--- The service of a name: "unix:PATH", or a short one. It does not connect yet: each worker does, when it first asks. To ask for the same
-- name and options again is cheap, and has the same client.
--
-- opts.timeout: seconds that calls wait, 60. opts.capacity: bytes of a lane, 4 MiB. opts.call_bytes_max: of an answer, 64 MiB.
-- opts.parts_bytes_max: of parts of one answer that have not been taken, 16 MiB. opts.uids: users, as numbers, that the service may be of
-- besides this worker's own. opts.hold: seconds for which a worker looks on for an answer before it sleeps, 20e-6; 0: not at all. Clients are
-- kept as long as the worker: names, and options, must be few, and not of a request's data.
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
    made.capacity = bytes_of(opts, "capacity", 0)
    made.call_bytes_max = bytes_of(opts, "call_bytes_max", 0)
    made.parts_bytes_max = bytes_of(opts, "parts_bytes_max", 16 * 1024 * 1024)
    local hold = opts.hold
    if hold ~= nil and (type(hold) ~= "number" or not (hold >= 0 and hold <= 1)) then
        error("resty.pelton: hold is a number of seconds from 0 to 1; found " .. tostring(hold), 2)
    end
    made.hold_ns = hold and (hold < 1e-9 and -1 or hold * 1e9) or 0
    local uids = opts.uids or {}
    if #uids > 16 then
        error("resty.pelton: at most 16 uids; found " .. #uids, 2)
    end
    made.uids_count = #uids
    for i, uid in ipairs(uids) do
        made.uids[i - 1] = uid
    end
    local self = {timeout = timeout_of(opts.timeout or TIMEOUT, 3), name = name}
    self.service = C.ngx_pelton_service(name, made)
    if self.service == nil then
        error("resty.pelton: no memory", 2)
    end
    return setmetatable(self, Service)
end

return _M
