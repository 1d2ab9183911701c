--- Calls from nginx's Lua to services in other processes and languages, by pelton. Needs ngx_pelton_module.so in the
-- same nginx.
--
--     http { pelton_service echo unix:/run/app/echo.socket timeout=500ms; }
--
--     local pelton = require "resty.pelton"
--     local res, err, detail = pelton.service("echo"):call("hello")
--
-- A call suspends only its coroutine, where one can be suspended: rewrite, access, content, timers, ssl_certificate and
-- others. A failure at run time is `nil, err, detail`; a mistake of the program raises an error. See README.md.

local base = require "resty.pelton.base"
local abi = require "resty.pelton.abi"
local file = require "resty.pelton.file"
local ffi = require "ffi"
local bit = require "bit"

local C = ffi.C
local ffi_string = ffi.string
local is_suspendable, sleep, bind, timeout_of = base.is_suspendable, base.sleep, base.bind, base.check_timeout
local concat = table.concat
local error, type, tonumber, tostring, setmetatable = error, type, tonumber, tostring, setmetatable

local OK, WAITS, SUBMIT_AGAIN = abi.OK, C.NGX_PELTON_WAITS, C.NGX_PELTON_SUBMIT_AGAIN
local NOTIFY, STREAM, MAY_WAIT = C.NGX_PELTON_NOTIFY, C.NGX_PELTON_STREAM, C.NGX_PELTON_MAY_WAIT
local VIEW = C.NGX_PELTON_VIEW
local IDEMPOTENT = abi.IDEMPOTENT
local REPLY, PART, END, FAILED, ABANDONED = abi.REPLY, abi.PART, abi.END, abi.FAILED, abi.ABANDONED
local NO_SLOT = 0

-- Each function that fills it in also reads it before anything else runs.
local reply = ffi.new("ngx_pelton_reply_t")
local info = ffi.new("ngx_pelton_info_t")

local function bytes()
    return ffi_string(reply.data, reply.size)
end

local function failure(code)
    return base.failure(code, reply.size > 0 and bytes() or nil)
end

-- What a call returns for a completion that is no reply.
local function no_reply()
    local outcome = reply.outcome
    if outcome == FAILED then
        return nil, "failed", bytes(), reply.code
    elseif outcome == ABANDONED then
        return nil, "abandoned", "the service closed the call without a reply"
    end
    local code = bit.tobit(reply.code)
    if code == abi.AGAIN then
        return nil, "not begun", "the service ended before it began this call, which can be made again"
    end
    return base.failure(code, "the service ended: it is unknown whether it carried out the call")
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

local function traceparent_of(opts)
    local text = opts.traceparent
    if text ~= nil and type(text) ~= "string" then
        error("resty.pelton: traceparent is the text of that header; found " .. type(text), 3)
    end
    return text
end

-- Sleeps until there is something to take, for `timeout` seconds. Returns OK, with the completion in `reply` and the
-- slot still in use; or nil and the error, with the slot released. A slot that waited for space submits `req` again.
local function await(self, ticket, timeout, req, size, traceparent, flags)
    local left, ends = timeout * 1000, C.ngx_pelton_msec() + timeout * 1000
    while true do
        local is_awake, err = sleep(ticket, left)
        local code = C.ngx_pelton_take(ticket, is_awake and 0 or 1, reply)
        if code == SUBMIT_AGAIN and is_awake then
            code = C.ngx_pelton_submit(self.service, ticket, req, size, traceparent, flags, reply)
            if code == OK then
                -- Notified; or the reply is in place.
                return OK, true
            end
        end
        if code == OK then
            return OK
        end
        if code ~= WAITS and code ~= SUBMIT_AGAIN then
            local _, word, detail = failure(code)
            C.ngx_pelton_release_slot(ticket)
            return nil, word, detail
        end
        if not is_awake then
            C.ngx_pelton_release_slot(ticket)
            return nil, err
        end
        left = ends - C.ngx_pelton_msec()
    end
end

-- Binds the slot to the request, then as `await`.
local function await_first(self, timeout, req, size, traceparent, flags)
    local ticket = reply.ticket
    if not bind(ticket) then
        return nil, "system", "no memory"
    end
    return await(self, ticket, timeout, req, size, traceparent, flags)
end

-- A reply in memory that is not Lua's. `bytes` instead is a string that has it.
local View = {}

local function view_of(ticket, size, bytes)
    return setmetatable({size = size, ticket = ticket, bytes = bytes}, View)
end

local function viewed(view)
    local ticket = view.ticket
    if not ticket then
        error("resty.pelton: the view was released", 3)
    elseif C.ngx_pelton_view(ticket, reply) ~= OK then
        error("resty.pelton: " .. bytes(), 3)
    end
    return reply.data, reply.size
end

View.__index = {
    --- Returns a pointer, and the size. The pointer is valid while the view is referenced, until the coroutine
    -- suspends, uses pelton, or releases the view. Raises an error once the view was released, or its request has
    -- ended.
    data = function(view)
        if view.bytes then
            return ffi.cast("const char *", view.bytes), view.size
        end
        -- No tail call: the level of its errors counts this function.
        local data, size = viewed(view)
        return data, size
    end,

    --- Returns a copy of the bytes, as a string.
    string = function(view)
        return view.bytes or ffi_string(viewed(view))
    end,

    --- Releases the bytes. The end of the request, or timer, does it too.
    release = function(view)
        if view.ticket then
            C.ngx_pelton_release_slot(view.ticket)
        end
        view.ticket, view.bytes = nil, nil
    end
}

-- What a call returns for its last completion. A view has the slot from then on.
local function result(view, ticket)
    local outcome = reply.outcome
    if outcome == REPLY then
        if view == true then
            return view_of(ticket, reply.size)
        elseif view then
            return view(reply.data, reply.size)
        end
        return bytes()
    elseif outcome == END then
        return view == true and view_of(nil, 0, "") or ""
    end
    return no_reply()
end

-- The string that a view function reads: a pointer into a string does not keep it.
local viewed_parts

local function end_view_of_parts(...)
    viewed_parts = nil
    return ...
end

-- All parts of a reply whose last part has arrived.
local function all_parts(ticket, view)
    local parts = {}
    while reply.outcome == PART do
        parts[#parts + 1] = bytes()
        local code = C.ngx_pelton_take(ticket, 0, reply)
        if code ~= OK then
            return failure(code)
        end
    end
    local last, word, detail, code = result()
    if not last then
        return nil, word, detail, code
    end
    parts[#parts + 1] = last
    local res = concat(parts)
    if view == true then
        return view_of(nil, #res, res)
    elseif view then
        viewed_parts = res
        return end_view_of_parts(view(ffi.cast("const char *", res), #res))
    end
    return res
end

local function slow_call(self, timeout, req, size, traceparent, flags, view)
    local ticket = reply.ticket
    local done, in_place, message = await_first(self, timeout, req, size, traceparent, flags)
    if not done then
        return nil, in_place, message
    end
    local res, word, detail, code
    if reply.outcome == PART then
        res, word, detail, code = all_parts(ticket, view)
    else
        res, word, detail, code = result(view, ticket)
    end
    if view == true and res and res.ticket then
        return res
    end
    if in_place then
        C.ngx_pelton_release(self.service)
    end
    C.ngx_pelton_release_slot(ticket)
    return res, word, detail, code
end

-- The same for a view of a reply that came at once.
local function fast_view()
    local ticket = reply.ticket
    if not bind(ticket) then
        return nil, "system", "no memory"
    end
    local res, word, detail, code = result(true, ticket)
    if not (res and res.ticket) then
        C.ngx_pelton_release_slot(ticket)
    end
    return res, word, detail, code
end

local methods = {}

--- Calls the service, and suspends the coroutine until the reply arrives. Returns the reply as a string; or nil, a
-- word, and a text about it. After "failed", the text is the service's own bytes, and its code follows.
--
-- opts.timeout: seconds. opts.idempotent: the call may be carried out twice. opts.traceparent: the span of which the
-- call is a part, as the header of that name has it: `ngx.var.http_traceparent`; one that is not valid is as none.
-- opts.size: of a request that is a cdata pointer. opts.view: true for a view instead of a string (view.size,
-- view:data(), view:string(), view:release()); or a function that gets the reply in place, as a pointer and a size,
-- valid until it returns; the call returns its result. The function must neither suspend nor use pelton.
function methods.call(self, req, opts)
    local size, timeout, view, traceparent, flags = size_of(req, opts), self.timeout, nil, nil, MAY_WAIT
    if opts then
        timeout, view, traceparent = timeout_of(opts.timeout or timeout, 3), opts.view, traceparent_of(opts)
        if opts.idempotent then
            flags = MAY_WAIT + IDEMPOTENT
        end
        if view == true then
            flags = flags + VIEW
        elseif view and type(view) ~= "function" then
            error("resty.pelton: view is true or a function; found " .. type(view), 2)
        end
    end
    if not is_suspendable() then
        return nil, "phase", "this phase cannot suspend a coroutine, which a call does: notify, or use ngx.timer.at"
    end
    local code = C.ngx_pelton_submit(self.service, NO_SLOT, req, size, traceparent, flags, reply)
    if code == OK and view == true then
        return fast_view()
    elseif code == OK then
        local res, word, detail, its = result(view)
        C.ngx_pelton_release(self.service)
        return res, word, detail, its
    elseif code == WAITS then
        return slow_call(self, timeout, req, size, traceparent, flags, view)
    end
    return failure(code)
end

--- Sends a message that the service does not reply to. Returns true once it is in the lane. Where a coroutine can be
-- suspended, it waits for space and for the client; elsewhere, as in the log phase, it returns nil and "again".
function methods.notify(self, req, opts)
    local size, timeout = size_of(req, opts), timeout_of(opts and opts.timeout or self.timeout, 3)
    local flags = is_suspendable() and NOTIFY + MAY_WAIT or NOTIFY
    local code = C.ngx_pelton_submit(self.service, NO_SLOT, req, size, nil, flags, reply)
    if code == OK then
        return true
    elseif code ~= WAITS then
        return failure(code)
    end
    local ticket = reply.ticket
    local done, word, detail = await_first(self, timeout, req, size, nil, flags)
    if not done then
        return nil, word, detail
    end
    C.ngx_pelton_release_slot(ticket)
    return true
end

local Stream = {}

-- Waits for the next part. Returns as `await`.
local function await_part(stream)
    local svc, ticket = stream.svc, stream.ticket
    if ticket then
        local code = C.ngx_pelton_take(ticket, 0, reply)
        if code == WAITS then
            return await(svc, ticket, stream.timeout)
        elseif code == OK then
            return OK
        end
        local _, word, detail = failure(code)
        C.ngx_pelton_release_slot(ticket)
        return nil, word, detail
    end
    local req = stream.req
    stream.req = nil
    local traceparent = stream.traceparent
    local code = C.ngx_pelton_submit(svc.service, NO_SLOT, req, stream.size, traceparent, stream.flags, reply)
    if code ~= WAITS then
        return failure(code)
    end
    stream.ticket = reply.ticket
    return await_first(svc, stream.timeout, req, stream.size, traceparent, stream.flags)
end

-- Returns the next part; nil at the end; or once false, a word and the rest that `call` returns.
local function next_part(stream)
    if stream.is_over then
        return nil
    elseif stream.is_busy then
        error("resty.pelton: another coroutine waits for the next part of this stream, or was killed meanwhile", 2)
    end
    stream.is_busy = true
    local done, word, detail = await_part(stream)
    stream.is_busy = false
    if done and reply.outcome == PART then
        return bytes()
    end
    local ticket = stream.ticket
    stream.is_over = true
    stream.ticket = nil
    if not done then
        return false, word, detail
    elseif reply.outcome == END then
        C.ngx_pelton_release_slot(ticket)
        return nil
    end
    local res, code
    res, word, detail, code = result()
    C.ngx_pelton_release_slot(ticket)
    return res or false, word, detail, code
end

Stream.__call = next_part
Stream.__index = {
    --- Cancels the rest. Only a request that leaves the loop early and continues for long needs it: the end of the
    -- request cancels, too.
    close = function(stream)
        stream.is_over = true
        if stream.ticket then
            C.ngx_pelton_release_slot(stream.ticket)
            stream.ticket = nil
        end
    end
}

--- Calls the service, and returns an iterator over the parts of its reply as they arrive:
-- `for part, err in svc:stream(req)`. If err is set, part is false, and the iteration ends. opts as of `call`;
-- opts.timeout is for each part. One coroutine at a time may use a stream. It ends with the request, or timer, that
-- took its first part.
function methods.stream(self, req, opts)
    local size, timeout = size_of(req, opts), timeout_of(opts and opts.timeout or self.timeout, 3)
    if not is_suspendable() then
        local has_failed = false
        return function()
            if has_failed then
                return nil
            end
            has_failed = true
            return false, "phase", "this phase cannot suspend a coroutine, which a stream does"
        end
    end
    return setmetatable({
        svc = self,
        req = req,
        size = size,
        timeout = timeout,
        traceparent = opts and traceparent_of(opts),
        flags = STREAM + MAY_WAIT + (opts and opts.idempotent and IDEMPOTENT or 0)
    }, Stream)
end

--- Returns the figures of this worker's client, as a table.
function methods.info(self)
    C.ngx_pelton_get_info(self.service, info)
    return {
        connected = info.is_connected == 1,
        in_flight = info.in_flight,
        waiting = info.waiting,
        slots = info.slots,
        connections = info.connections,
        immediate = tonumber(info.immediate),
        bytes = tonumber(info.bytes)
    }
end

local Service = {__index = methods}

local OPTIONS = {
    timeout = true, capacity = true, call_bytes_max = true, parts_bytes_max = true, poll = true, uids = true
}

local _M = {_VERSION = "0.2.0", file = file}

-- A number of bytes; 0, the default, for nil.
local function bytes_of(opts, option)
    local value = opts[option]
    if value == nil then
        return 0
    elseif type(value) ~= "number" or not (value >= 1 and value < 2 ^ 53) then
        error("resty.pelton: " .. option .. " is a number of bytes, from 1; found " .. tostring(value), 3)
    end
    return value
end

--- Returns the service of an address: "unix:PATH", or a short name. Does not connect: each worker does at its first
-- call. The same address and options have the same client, as long as the worker lives: so use few, and none from a
-- request's data.
--
-- opts.timeout: seconds that calls wait, 60. opts.capacity: bytes of a lane, 4 MiB. opts.call_bytes_max: of a reply, 64
-- MiB. opts.parts_bytes_max: of one reply's parts that were not taken, 16 MiB. opts.uids: users, as numbers, that the
-- service may have besides this worker's. opts.poll: seconds to busy-poll at most, 50e-6; 0: not at all.
function _M.connect(address, opts)
    opts = opts or {}
    if type(address) ~= "string" or address == "" or address:find("%z") then
        error("resty.pelton: an address is a string such as \"unix:/run/app/echo.socket\"; found " ..
                  tostring(address), 2)
    end
    for option in pairs(opts) do
        if not OPTIONS[option] then
            error("resty.pelton: there is no option `" .. tostring(option) .. "`", 2)
        end
    end
    local options = ffi.new("ngx_pelton_options_t")
    options.capacity = bytes_of(opts, "capacity")
    options.call_bytes_max = bytes_of(opts, "call_bytes_max")
    options.parts_bytes_max = bytes_of(opts, "parts_bytes_max")
    local poll = opts.poll
    if poll ~= nil and (type(poll) ~= "number" or not (poll >= 0 and poll <= 1)) then
        error("resty.pelton: poll is a number of seconds from 0 to 1; found " .. tostring(poll), 2)
    end
    options.poll_ns = poll and (poll < 1e-9 and abi.NO_POLL or poll * 1e9) or 0
    local uids = opts.uids or {}
    if #uids > 16 then
        error("resty.pelton: at most 16 uids; found " .. #uids, 2)
    end
    options.uid_count = #uids
    for i, uid in ipairs(uids) do
        options.uids[i - 1] = uid
    end
    local self = {timeout = timeout_of(opts.timeout or base.TIMEOUT, 3)}
    self.service = C.ngx_pelton_service(address, options)
    if self.service == nil then
        error("resty.pelton: no memory", 2)
    end
    return setmetatable(self, Service)
end

local services = {}
local timeout_ms = ffi.new("double[1]")

--- Returns the service of the directive `pelton_service NAME ...`. Raises an error if there is none of that name.
function _M.service(name)
    local self = services[name]
    if self then
        return self
    end
    local service = type(name) == "string" and C.ngx_pelton_configured(name, timeout_ms) or nil
    if service == nil then
        error("resty.pelton: nginx.conf has no `pelton_service " .. tostring(name) .. " ...;` in its http block", 2)
    end
    local timeout = timeout_ms[0] > 0 and timeout_ms[0] / 1000 or base.TIMEOUT
    self = setmetatable({service = service, timeout = timeout}, Service)
    services[name] = self
    return self
end

return _M
