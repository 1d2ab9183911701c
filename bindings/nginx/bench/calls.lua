-- Calls from one request: by pelton, by cosockets, or by a queue to a handler thread of this process
-- (bindings/c/bench/queue). One coroutine for each call in flight; each compares its replies.

local ffi = require "ffi"
local semaphore = require "ngx.semaphore"

local place = "DIRECTORY" -- replaced by `run` beside this file
local REQUESTS = 64 -- different ones, used by round-robin

local function requests(size)
    local block, all = {}, {}
    for i = 0, 255 do
        block[i + 1] = string.char(i)
    end
    local rest = table.concat(block):rep(math.ceil(size / 256))
    for i = 1, REQUESTS do
        -- The number of the first client, in 8 little-endian bytes, as far as they fit.
        all[i] = (string.char(i) .. ("\0"):rep(7) .. rest):sub(1, size)
    end
    return all
end

-- The service in C, Python, Node or Java where the system's name says so, else the one in Go.
local services = {
    ["pelton-c"] = "/service-c", ["pelton-py"] = "/service-py", ["pelton-aio"] = "/service-aio",
    ["pelton-node"] = "/service-node", ["pelton-java"] = "/service-java",
}
local sockets = {
    ["cosocket-py"] = "/socket-py", ["cosocket-aio"] = "/socket-aio", ["cosocket-node"] = "/socket-node",
    ["cosocket-java"] = "/socket-java",
}

local function by_pelton(system)
    local svc = require("resty.pelton").connect("unix:" .. place .. (services[system] or "/service"))
    return function(request) return svc:call(request) end, function() end
end

-- A connection for each coroutine, kept from one pass to the next as in a pool. Messages are length and payload.
local function by_cosocket(system)
    local sock = ngx.socket.tcp()
    assert(sock:connect("unix:" .. place .. (sockets[system] or "/socket")))
    local char, byte, floor = string.char, string.byte, math.floor
    local parts = {}
    return function(request)
        local n = #request
        parts[1], parts[2] = char(n % 256, floor(n / 256) % 256, floor(n / 65536) % 256, floor(n / 16777216)), request
        local sent, err = sock:send(parts)
        if not sent then
            return nil, err
        end
        local prefix
        prefix, err = sock:receive(4)
        if not prefix then
            return nil, err
        end
        local a, b, c, d = byte(prefix, 1, 4)
        return sock:receive(a + b * 256 + c * 65536 + d * 16777216)
    end, function() assert(sock:setkeepalive(0)) end
end

-- As in queue.h; and two functions of nginx's modules, of which only the addresses are wanted.
ffi.cdef [[
struct queue_call {
    struct queue_call *next;
    const char *request;
    size_t request_size;
    char *reply;
    size_t reply_size, reply_capacity;
    void *of;
};
struct queue *queue_in_nginx(void *watch, void *post);
struct queue_call *queue_call_new(void);
void queue_push(struct queue *queue, struct queue_call *call);
void ngx_pelton_watch(void);
]]
local queues, free, held = {}, {}, {}

-- The queue with a handler in C or in Go: the library of that name. Its descriptor is polled as pelton's own are.
local function by_queue(system)
    local queue = queues[system]
    if not queue then
        local library = ffi.load(place .. "/" .. system .. ".so")
        local C = ffi.C
        local opened = library.queue_in_nginx(ffi.cast("void *", C.ngx_pelton_watch),
                                              ffi.cast("void *", C.ngx_http_lua_ffi_sema_post))
        assert(opened ~= nil, "the queue could not be opened")
        queue = {library = library, opened = opened}
        queues[system] = queue
    end
    local own = table.remove(free)
    if not own then
        own = {number = #held + 1, call = queue.library.queue_call_new(), sem = semaphore.new()}
        own.call.of = own.sem.sem
        held[own.number] = ""
    end
    local number, call, sem, library, opened = own.number, own.call, own.sem, queue.library, queue.opened
    local push, ffi_string = library.queue_push, ffi.string
    return function(request)
        -- The handler reads the string itself: here Lua keeps it, whatever becomes of the coroutine.
        held[number] = request
        call.request, call.request_size = request, #request
        push(opened, call)
        local is_awake, err = sem:wait(60)
        if not is_awake then
            return nil, err
        end
        return ffi_string(call.reply, call.reply_size)
    end, function() free[#free + 1] = own end
end

local ways = {
    pelton = by_pelton, ["pelton-c"] = by_pelton, ["pelton-go"] = by_pelton, ["pelton-py"] = by_pelton,
    ["pelton-aio"] = by_pelton, ["pelton-node"] = by_pelton, ["pelton-java"] = by_pelton,
    cosocket = by_cosocket, ["cosocket-py"] = by_cosocket, ["cosocket-aio"] = by_cosocket,
    ["cosocket-node"] = by_cosocket, ["cosocket-java"] = by_cosocket,
    ["queue-c"] = by_queue, ["queue-go"] = by_queue
}

local M = {}

function M.pass()
    local args = ngx.req.get_uri_args()
    local count, in_flight, size = tonumber(args.count), tonumber(args.in_flight), tonumber(args.size)
    local open = ways[args.system]
    local all = requests(size)
    local wrong
    local function part(first)
        local call, close = open(args.system)
        for n = first, count, in_flight do
            local request = all[n % REQUESTS + 1]
            local reply, err, detail = call(request)
            if reply ~= request then
                wrong = wrong or ("the reply to call " .. n .. " is not its request: " .. tostring(err or #reply .. " bytes") .. " " .. tostring(detail))
                break
            end
        end
        close()
    end
    local threads = {}
    for i = 1, in_flight do
        if in_flight == 1 then
            part(1)
        else
            threads[i] = ngx.thread.spawn(part, i)
        end
    end
    for i = 1, #threads do
        local ok, err = ngx.thread.wait(threads[i])
        wrong = wrong or (not ok and err or nil)
    end
    ngx.print(wrong or "done")
end

local one_request = requests(512)[1]

--- One call of 512 bytes, by a client, or a connection of a pool.
function M.one(system)
    local call, close = ways[system](system)
    local reply, err = call(one_request)
    close()
    if reply ~= one_request then
        ngx.status = 500
        return ngx.print(err or "the reply is not the request")
    end
    ngx.print("done")
end

return M
