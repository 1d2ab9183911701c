--- What resty.pelton and resty.pelton.file share: the module in nginx, and how a coroutine sleeps.

local base = require "resty.core.base"
require "resty.core.phase"
local semaphore = require "ngx.semaphore"
local bit = require "bit"
local ffi = require "ffi"

if ngx.config.subsystem ~= "http" then
    error("resty.pelton: works in http only, found " .. ngx.config.subsystem)
end

local abi = require "resty.pelton.abi"

local C = ffi.C
local get_request = base.get_request
local get_raw_phase = ngx.get_raw_phase
local sem_wait = semaphore.wait
local band, ceil, max = bit.band, math.ceil, math.max
local error, type, tostring = error, type, tostring

local is_loaded, version = pcall(function() return C.ngx_pelton_version() end)
if not is_loaded then
    error("resty.pelton: this nginx has not loaded ngx_pelton_module.so, or an older one: write " ..
              "`load_module .../ngx_pelton_module.so;` at the top of nginx.conf; after an upgrade restart nginx")
elseif version ~= abi.VERSION then
    error("resty.pelton: ngx_pelton_module.so has version " .. version .. ", this Lua has " .. abi.VERSION ..
              ": install both from one release, and restart nginx: a reload does not load a module again")
end
C.ngx_pelton_use_semaphores(C.ngx_http_lua_ffi_sema_new, C.ngx_http_lua_ffi_sema_post, C.ngx_http_lua_ffi_sema_gc)

-- Phases whose coroutines can be suspended: rewrite, access, content, timer, ssl_cert, ssl_session_fetch,
-- ssl_client_hello, server_rewrite.
local SUSPENDS = 0x0002 + 0x0004 + 0x0008 + 0x0080 + 0x0400 + 0x1000 + 0x4000 + 0x8000

local SLOTS = 2 ^ 20 -- a ticket modulo this is its slot's number

local _M = {TIMEOUT = 60}

--- Returns whether a coroutine can be suspended in this phase.
function _M.is_suspendable()
    local request = get_request()
    return request and band(get_raw_phase(request), SUSPENDS) ~= 0
end

--- Returns a timeout in seconds, or raises an error at that level, as `error` counts.
function _M.check_timeout(timeout, level)
    if type(timeout) ~= "number" or not (timeout > 0 and timeout < 2e6) then
        error("resty.pelton: timeout is a number of seconds above 0 and below 2,000,000; found " ..
                  tostring(timeout), level)
    end
    return timeout
end

--- Returns nil, the word of a code, and the detail.
function _M.failure(code, detail)
    return nil, abi.words[code] or "code " .. code, detail
end

-- For each slot, what ngx.semaphore waits by. The module owns the semaphores.
local semaphores = {}

--- Sleeps on the slot of a ticket, for milliseconds at most. Returns true if it was woken, perhaps without a reason;
-- else nil and the error of ngx.semaphore.
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
    -- It truncates to milliseconds.
    return sem_wait(own, (ceil(max(msec, 0)) + 0.5) / 1000)
end

--- Releases a slot when its request or timer ends. Returns false if there is no memory; then it is released now.
function _M.bind(ticket)
    if C.ngx_pelton_bind(ticket, get_request()) ~= 0 then
        C.ngx_pelton_release_slot(ticket)
        return false
    end
    return true
end

return _M
