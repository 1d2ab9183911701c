--- Files, read and written from nginx's Lua while the worker does other things: `require("resty.pelton").file`.
--
--     local file = require("resty.pelton").file
--     local f, err, detail, errno = file.open("/var/lib/app/notes", "r+")
--     local head = f:pread(0, 100)
--     f:close()
--
-- What the page cache has is answered at once; for everything else the coroutine is suspended, where one may be. What goes wrong
-- while running is `nil, err, detail, errno`; what is wrong in the program raises an error. Each function has opts.timeout in seconds, 60: an operation
-- whose time is over is cancelled, and may be done all the same.

local base = require "resty.pelton.base"
local ffi = require "ffi"
local bit = require "bit"

ffi.cdef [[
int ngx_pelton_file(const ngx_pelton_operation_t *wanted, ngx_pelton_done_t *out);
int ngx_pelton_file_take(double ticket, int is_last, ngx_pelton_done_t *out);
void ngx_pelton_file_drop(pelton_file *file);
uint32_t ngx_pelton_files_in_flight(void);
]]

local C = ffi.C
local WORDS, TIMEOUT = base.WORDS, base.TIMEOUT
local is_suspendable, sleep, park, check_timeout = base.is_suspendable, base.sleep, base.park, base.check_timeout
local ffi_string = ffi.string
local bor = bit.bor
local min, max, floor = math.min, math.max, math.floor
local error, type, tonumber, tostring, setmetatable, concat = error, type, tonumber, tostring, setmetatable, table.concat

local DONE, WAITS = 0, 1

-- pelton_file_operation.
local OPEN, CLOSE, READ, WRITE, SYNC, STAT = 1, 2, 3, 4, 5, 9

-- open(2)'s, of Linux on x86-64 and arm64.
local O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_APPEND = 1, 2, 64, 512, 1024
local MODES = {
    ["r"] = 0,
    ["r+"] = O_RDWR,
    ["w"] = bor(O_WRONLY, O_CREAT, O_TRUNC),
    ["w+"] = bor(O_RDWR, O_CREAT, O_TRUNC),
    ["a"] = bor(O_WRONLY, O_CREAT, O_APPEND),
    ["a+"] = bor(O_RDWR, O_CREAT, O_APPEND)
}
local CURRENT = -1ULL
local BYTES_MAX = 64 * 1024 * 1024
local OFFSET_MAX = 2 ^ 53

-- Filled by each function that takes it, and read before anything else runs.
local operation = ffi.new("ngx_pelton_operation_t")
local done = ffi.new("ngx_pelton_done_t")

-- Does what `operation` says, with which nothing else is done meanwhile. Answers the ticket of a slot, which is the caller's to give up when it
-- has looked at `done`; or nil and the error.
local function run(what, timeout)
    local code = C.ngx_pelton_file(operation, done)
    local ticket = done.ticket
    if code == WAITS then
        if not park(ticket) then
            return nil, "system", "no memory"
        end
        local left, ends = timeout * 1000, C.ngx_pelton_msec() + timeout * 1000
        while true do
            local is_awake = sleep(ticket, left)
            code = C.ngx_pelton_file_take(ticket, is_awake and 0 or 1, done)
            if code ~= WAITS then
                break
            elseif not is_awake then
                C.ngx_pelton_give_up(ticket)
                return nil, "timeout", what .. ": it was not done in time"
            end
            left = ends - C.ngx_pelton_msec()
        end
    end
    if code == DONE then
        return ticket
    end
    local text, errno = ffi_string(done.data), done.error
    C.ngx_pelton_give_up(ticket)
    return nil, WORDS[code] or "code " .. code, what .. ": " .. text, errno ~= 0 and errno or nil
end

local function begin(kind, file)
    operation.kind = kind
    operation.file = file
    operation.path = nil
    operation.data = nil
    operation.offset = 0
    operation.bytes = 0
end

local function timeout_of(opts)
    return check_timeout(opts and opts.timeout or TIMEOUT, 4)
end

local function offset_of(offset)
    if offset == nil then
        return CURRENT
    end
    if type(offset) ~= "number" or not (offset >= 0 and offset < OFFSET_MAX and floor(offset) == offset) then
        error("resty.pelton: an offset is a whole number from 0, or nil for where the file stands; found " .. tostring(offset), 3)
    end
    return offset
end

local PHASE = "a file suspends its coroutine, which cannot be in this phase"

local File = {}
File.__index = File

-- The handle of a file that is open; or nil and the error.
local function of(self)
    if not is_suspendable() then
        return nil, "phase", PHASE
    end
    local file = self.file
    if not file then
        return nil, "closed", self.path .. ": it was closed before"
    end
    return file
end

--- So many bytes from an offset, nil for where the file stands: fewer where it ends, none behind that. Of a FIFO offset is nil, and it answers
-- as soon as there are any.
function File.pread(self, offset, bytes, opts)
    local timeout = timeout_of(opts)
    offset = offset_of(offset)
    if type(bytes) ~= "number" or not (bytes >= 0 and bytes < 2 ^ 31 and floor(bytes) == bytes) then
        error("resty.pelton: bytes is a whole number from 0 and below 2 GiB; found " .. tostring(bytes), 2)
    end
    local file, word, detail = of(self)
    if not file then
        return nil, word, detail
    end
    begin(READ, file)
    operation.offset, operation.bytes = offset, bytes
    local ticket, errno
    ticket, word, detail, errno = run(self.path, timeout)
    if not ticket then
        return nil, word, detail, errno
    end
    local res = ffi_string(done.data, done.bytes)
    errno = done.error
    C.ngx_pelton_give_up(ticket)
    if errno ~= 0 and #res < bytes then
        return nil, "system", self.path .. ": the read ended after " .. #res .. " of " .. bytes .. " bytes, errno " .. errno, errno
    end
    return res
end

--- Writes all of a string at an offset, nil for where the file stands; of a file opened with "a" at its end, whatever the offset. Answers true.
function File.pwrite(self, offset, data, opts)
    local timeout = timeout_of(opts)
    offset = offset_of(offset)
    if type(data) ~= "string" then
        error("resty.pelton: what is written is a string; found " .. type(data), 2)
    end
    local file, word, detail = of(self)
    if not file then
        return nil, word, detail
    end
    begin(WRITE, file)
    operation.offset, operation.data, operation.bytes = offset, data, #data
    local ticket, errno
    ticket, word, detail, errno = run(self.path, timeout)
    if not ticket then
        return nil, word, detail, errno
    end
    local written = tonumber(done.bytes)
    errno = done.error
    C.ngx_pelton_give_up(ticket)
    if written < #data then
        return nil, "system", self.path .. ": the write ended after " .. written .. " of " .. #data .. " bytes, errno " .. errno, errno
    end
    return true
end

-- One that has nothing but a file. Answers how many bytes are in that, if it asks that.
local function plain(self, kind, timeout)
    local file, word, detail = of(self)
    if not file then
        return nil, word, detail
    end
    if kind == CLOSE then
        self.file = nil
        ffi.gc(file, nil)
    end
    begin(kind, file)
    local ticket, errno
    ticket, word, detail, errno = run(self.path, timeout)
    if not ticket then
        return nil, word, detail, errno
    end
    local bytes = tonumber(done.bytes)
    C.ngx_pelton_give_up(ticket)
    return bytes
end

--- How many bytes it has.
function File.size(self, opts)
    return plain(self, STAT, timeout_of(opts))
end

--- Has all that was written to it on the disk. Answers true.
function File.sync(self, opts)
    local ok, word, detail, errno = plain(self, SYNC, timeout_of(opts))
    return ok and true or nil, word, detail, errno
end

--- Closes it. Answers true. Where a coroutine cannot be suspended it does not wait. Who forgets it has it closed by Lua's collector.
function File.close(self, opts)
    local timeout, file = timeout_of(opts), self.file
    if file and not is_suspendable() then
        self.file = nil
        C.ngx_pelton_file_drop(ffi.gc(file, nil))
        return true
    end
    local ok, word, detail, errno = plain(self, CLOSE, timeout)
    return ok and true or nil, word, detail, errno
end

local _M = {}

--- Opens a file. mode: as io.open has it: "r", "r+", "w", "w+", "a", "a+". opts.permissions of one that is made, less the umask: 420, which
-- is 0644. Of a FIFO it waits for the other end.
function _M.open(path, mode, opts)
    local timeout = timeout_of(opts)
    local flags = MODES[mode or "r"]
    if type(path) ~= "string" then
        error("resty.pelton: a path is a string; found " .. type(path), 2)
    elseif not flags then
        error("resty.pelton: a mode is one of r, r+, w, w+, a, a+; found " .. tostring(mode), 2)
    end
    if not is_suspendable() then
        return nil, "phase", PHASE
    elseif path:find("%z") then
        return nil, "name", "a path has no byte 0"
    end
    begin(OPEN, nil)
    operation.path, operation.open_flags, operation.mode = path, flags, opts and opts.permissions or 420
    local ticket, word, detail, errno = run(path, timeout)
    if not ticket then
        return nil, word, detail, errno
    end
    local file = ffi.gc(done.file, C.ngx_pelton_file_drop)
    C.ngx_pelton_give_up(ticket)
    return setmetatable({file = file, path = path}, File)
end

--- All of a file as a string. opts.bytes_max: "too large" if there are more, 64 MiB. opts.timeout is for all of it.
function _M.read(path, opts)
    local timeout, most = timeout_of(opts), opts and opts.bytes_max or BYTES_MAX
    local ends = C.ngx_pelton_msec() + timeout * 1000
    local rest = {timeout = timeout}
    local f, word, detail, errno = _M.open(path, "r", rest)
    if not f then
        return nil, word, detail, errno
    end
    local function left()
        rest.timeout = max((ends - C.ngx_pelton_msec()) / 1000, 0.001)
        return rest
    end
    local size
    size, word, detail, errno = f:size(left())
    local parts, read, res = {}, 0, nil
    -- One more than it has: then the first read finds the end.
    local chunk = size and min(max(size, 4095), most) + 1
    while chunk do
        local part
        part, word, detail, errno = f:pread(nil, chunk, left())
        if not part then
            break
        end
        parts[#parts + 1] = part
        read = read + #part
        if read > most then
            word, detail = "too large", path .. ": it has more than " .. most .. " bytes: see bytes_max"
            break
        elseif part == "" or #part < chunk and size > 0 then
            -- What says that it has nothing may be a FIFO, or made while it is read.
            res = concat(parts)
            break
        end
    end
    f:close()
    return res, word, detail, errno
end

--- Operations of this worker's that are not over.
function _M.in_flight()
    return C.ngx_pelton_files_in_flight()
end

return _M
