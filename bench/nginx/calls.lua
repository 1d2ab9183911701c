-- Calls from one request, by pelton or by cosockets. One coroutine for each call in flight; each compares its replies.

local place = "DIRECTORY" -- replaced by bench/nginx/run
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

local function by_pelton()
    local svc = require("resty.pelton").connect("unix:" .. place .. "/service")
    return function(request) return svc:call(request) end, function() end, function() return svc:notify("") end
end

-- A connection for each coroutine, kept from one pass to the next as in a pool. Messages are length and payload.
local function by_cosocket()
    local sock = ngx.socket.tcp()
    assert(sock:connect("unix:" .. place .. "/socket"))
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

local M = {}

function M.pass()
    local args = ngx.req.get_uri_args()
    local count, in_flight, size = tonumber(args.count), tonumber(args.in_flight), tonumber(args.size)
    local open = args.system == "pelton" and by_pelton or by_cosocket
    local all = requests(size)
    local wrong, ended
    local function part(first)
        local call, close
        call, close, ended = open()
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
    if ended then
        assert(ended())
    end
    ngx.print(wrong or "done")
end

local one_request = requests(512)[1]

--- One call of 512 bytes, by a client, or a connection of a pool.
function M.one(system)
    local call, close = (system == "pelton" and by_pelton or by_cosocket)()
    local reply, err = call(one_request)
    close()
    if reply ~= one_request then
        ngx.status = 500
        return ngx.print(err or "the reply is not the request")
    end
    ngx.print("done")
end

return M
