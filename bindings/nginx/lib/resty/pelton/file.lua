--- Files, read and written from nginx's Lua without blocking the worker: `require("resty.pelton").file`.
--
--     local file = require("resty.pelton").file
--     local f, err, detail, errno = file.open("/var/lib/app/notes", "r+")
--     local head = f:pread(0, 100)
--     f:close()
--
-- What the page cache has is returned immediately; otherwise the coroutine is suspended. A failure at run time is
-- `nil, err, detail, errno`; a mistake of the program raises an error. Each function has opts.timeout in seconds, 60.
-- An operation whose timeout expires is cancelled, but can have been carried out.

local base = require "resty.pelton.base"
local abi = require "resty.pelton.abi"
local ffi = require "ffi"
local bit = require "bit"

local C = ffi.C
local TIMEOUT, failure = base.TIMEOUT, base.failure
local is_suspendable, sleep, bind, check_timeout = base.is_suspendable, base.sleep, base.bind, base.check_timeout
local ffi_string = ffi.string
local bor = bit.bor
local min, max, floor = math.min, math.max, math.floor
local error, type, tonumber, tostring, setmetatable = error, type, tonumber, tostring, setmetatable
local concat = table.concat

local OK, WAITS = abi.OK, C.NGX_PELTON_WAITS
local OPEN, CLOSE, READ, WRITE = abi.FILE_OPEN, abi.FILE_CLOSE, abi.FILE_READ, abi.FILE_WRITE
local SYNC, STAT, CURRENT = abi.FILE_SYNC, abi.FILE_STAT, abi.CURRENT

-- Flags of open(2), as Linux on x86-64 and arm64 has them.
local O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_APPEND = 1, 2, 64, 512, 1024
local MODES = {
    ["r"] = 0,
    ["r+"] = O_RDWR,
    ["w"] = bor(O_WRONLY, O_CREAT, O_TRUNC),
    ["w+"] = bor(O_RDWR, O_CREAT, O_TRUNC),
    ["a"] = bor(O_WRONLY, O_CREAT, O_APPEND),
    ["a+"] = bor(O_RDWR, O_CREAT, O_APPEND)
}
local BYTES_MAX = 64 * 1024 * 1024
local OFFSET_MAX = 2 ^ 53

-- Each function that fills them in also reads them before anything else runs.
local operation = ffi.new("ngx_pelton_operation_t")
local done = ffi.new("ngx_pelton_file_result_t")

-- Carries out `operation`. Returns the ticket of a slot, which the caller releases after it has read `done`; or nil and
-- the error.
local function run(what, timeout)
    local code = C.ngx_pelton_file_start(operation, done)
    local ticket = done.ticket
    if code == WAITS then
        if not bind(ticket) then
            return nil, "system", "no memory"
        end
        local left, ends = timeout * 1000, C.ngx_pelton_msec() + timeout * 1000
        while true do
            local is_awake = sleep(ticket, left)
            code = C.ngx_pelton_file_take(ticket, is_awake and 0 or 1, done)
            if code ~= WAITS then
                break
            elseif not is_awake then
                C.ngx_pelton_release_slot(ticket)
                return nil, "timeout", what .. ": the timeout has expired"
            end
            left = ends - C.ngx_pelton_msec()
        end
    end
    if code == OK then
        return ticket
    end
    local text, errno = ffi_string(done.data), done.error
    C.ngx_pelton_release_slot(ticket)
    local _, word, detail = failure(code, what .. ": " .. text)
    return nil, word, detail, errno ~= 0 and errno or nil
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
        error("resty.pelton: an offset is a whole number from 0, or nil for the file's position; found " ..
                  tostring(offset), 3)
    end
    return offset
end

local PHASE = "this phase cannot suspend a coroutine, which a file does"

local File = {}
File.__index = File

-- The handle of an open file; or nil and the error.
local function of(self)
    if not is_suspendable() then
        return nil, "phase", PHASE
    end
    local file = self.file
    if not file then
        return nil, "closed", self.path .. ": the file is closed"
    end
    return file
end

--- Reads a number of bytes at an offset; nil is the file's position. Returns fewer at the file's end, "" behind it.
-- For a FIFO the offset is nil, and it returns the first bytes that arrive.
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
    C.ngx_pelton_release_slot(ticket)
    if errno ~= 0 and #res < bytes then
        return nil, "system", self.path .. ": read " .. #res .. " of " .. bytes .. " bytes, errno " .. errno, errno
    end
    return res
end

--- Writes all of a string at an offset; nil is the file's position. A file opened with "a" is written at its end,
-- whatever the offset. Returns true.
function File.pwrite(self, offset, data, opts)
    local timeout = timeout_of(opts)
    offset = offset_of(offset)
    if type(data) ~= "string" then
        error("resty.pelton: data is a string; found " .. type(data), 2)
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
    C.ngx_pelton_release_slot(ticket)
    if written < #data then
        return nil, "system", self.path .. ": wrote " .. written .. " of " .. #data .. " bytes, errno " .. errno, errno
    end
    return true
end

-- An operation with no parameter but the file. Returns the file's size, for STAT.
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
    C.ngx_pelton_release_slot(ticket)
    return bytes
end

--- Returns the file's size in bytes.
function File.size(self, opts)
    return plain(self, STAT, timeout_of(opts))
end

--- Returns true once everything written is on the disk.
function File.sync(self, opts)
    local ok, word, detail, errno = plain(self, SYNC, timeout_of(opts))
    return ok and true or nil, word, detail, errno
end

--- Closes the file. Returns true. Where no coroutine can be suspended, it does not wait. Lua's collector closes a
-- forgotten file.
function File.close(self, opts)
    local timeout, file = timeout_of(opts), self.file
    if file and not is_suspendable() then
        self.file = nil
        C.ngx_pelton_file_close(ffi.gc(file, nil))
        return true
    end
    local ok, word, detail, errno = plain(self, CLOSE, timeout)
    return ok and true or nil, word, detail, errno
end

local _M = {}

--- Opens a file. mode: as of io.open: "r", "r+", "w", "w+", "a", "a+". opts.permissions of a new file, less the
-- umask: 420, which is 0644. A FIFO waits for its other end.
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
    local file = ffi.gc(done.file, C.ngx_pelton_file_close)
    C.ngx_pelton_release_slot(ticket)
    return setmetatable({file = file, path = path}, File)
end

--- Returns all of a file as a string. A file of more than opts.bytes_max, 64 MiB, is "too large". opts.timeout is
-- for all operations together.
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
    -- One byte more than the size: the first read then finds the end.
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
            word, detail = "too large", path .. ": it has more than bytes_max, which is " .. most
            break
        elseif part == "" or #part < chunk and size > 0 then
            -- A file of size 0 can be a FIFO, or one of /proc.
            res = concat(parts)
            break
        end
    end
    f:close()
    return res, word, detail, errno
end

--- Returns the number of this worker's operations that have not completed.
function _M.in_flight()
    return C.ngx_pelton_files_in_flight()
end

return _M
