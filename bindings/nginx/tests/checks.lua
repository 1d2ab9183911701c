-- What the tests have a worker check, each by the name of its claim: `location /check/NAME` answers "ok", or what was found.

local pelton = require "resty.pelton"
local ffi = require "ffi"

local name = "unix:" .. os.getenv("PELTON_TEST_SERVICE")
local svc = pelton.connect(name, {timeout = 20})
local checks = {}

local function same(found, wanted, what)
    if found ~= wanted then
        local function short(value)
            return type(value) == "string" and #value > 100 and value:sub(1, 100) .. "... of " .. #value .. " bytes" or tostring(value)
        end
        error((what or "") .. ": found " .. short(found) .. ", wanted " .. short(wanted), 2)
    end
end

local function of_bytes(size, seed)
    local block = {}
    for i = 1, 64 do
        block[i] = string.char(33 + (i * 7 + seed * 13) % 90)
    end
    local text = table.concat(block)
    return "#" .. text:rep(math.ceil(size / 64)):sub(1, math.max(size - 1, 0))
end

-- The slots of calls that are over come back at the end of the turn at the latest.
local function nothing_is_left()
    local info = svc:info()
    same(info.in_flight, 0, "calls in flight")
    same(info.waiting, 0, "coroutines that wait for room")
    same(info.slots, 0, "slots in use")
    same(info.bytes, 0, "bytes of answers in memory")
end

function checks.every_size_comes_back()
    for _, size in ipairs {1, 2, 127, 512, 4096, 10240, 65536, 102400, 1048576, 5000000} do
        for seed = 1, 3 do
            local req = of_bytes(size, seed)
            same(svc:call(req), req)
        end
    end
    same(svc:call(""), "")
    nothing_is_left()
end

function checks.many_one_by_one()
    local before = svc:info().within
    for i = 1, 20000 do
        local req = "request " .. i
        same(svc:call(req), req)
    end
    nothing_is_left()
    return svc:info().within - before
end

function checks.views_are_in_place_and_requests_may_be_pointers()
    for _, size in ipairs {1, 4096, 300000} do
        local req = of_bytes(size, size)
        local bytes = ffi.new("char[?]", size)
        ffi.copy(bytes, req, size)
        for _ = 1, 5 do
            local res = svc:call(ffi.cast("const char *", bytes), {
                size = size,
                view = function(data, found)
                    same(found, size)
                    return ffi.string(data, found)
                end
            })
            same(res, req)
        end
    end
    -- One that raises an error leaves nothing behind when its request ends, and what comes next is right.
    for i = 1, 5 do
        same(pcall(svc.call, svc, "raises", {view = function() error("as it must") end}), false)
        same(svc:call("next " .. i), "next " .. i)
    end
end

-- More than may be in flight: the others wait for room, and each gets its own answer.
function checks.thousands_of_coroutines()
    local threads, wrong = {}, nil
    for i = 1, 3000 do
        threads[i] = ngx.thread.spawn(function()
            for turn = 1, 3 do
                local req = "coroutine " .. i .. " turn " .. turn .. (i % 100 == 0 and of_bytes(20000, i) or "")
                local res, err, detail = svc:call(req)
                if res ~= req then
                    wrong = "coroutine " .. i .. " found " .. tostring(res) .. ", " .. tostring(err) .. ", " .. tostring(detail)
                end
            end
        end)
    end
    for i = 1, 3000 do
        ngx.thread.wait(threads[i])
    end
    same(wrong, nil)
    nothing_is_left()
end

-- Their answers come in any order, and beside them others come at once.
function checks.late_answers_are_each_ones_own()
    local threads, wrong = {}, nil
    for i = 1, 300 do
        threads[i] = ngx.thread.spawn(function()
            local text = i % 2 == 0 and "later " .. i or "now " .. i
            local res, err = svc:call(text)
            if res ~= (i % 2 == 0 and tostring(i) or text) then
                wrong = text .. " found " .. tostring(res) .. ", " .. tostring(err)
            end
        end)
    end
    for i = 1, 300 do
        ngx.thread.wait(threads[i])
    end
    same(wrong, nil)
    nothing_is_left()
end

function checks.failures_are_nil_and_err()
    for _ = 1, 20 do
        local res, err, detail, code = svc:call("fail 4711 a reason")
        same(res, nil)
        same(err, "failed")
        same(detail, "a reason")
        same(code, 4711)
        res, err = svc:call("abandon")
        same(res, nil)
        same(err, "abandoned")
    end
    local none = pelton.connect(name .. ".none")
    local res, err, detail = none:call("hello")
    same(res, nil)
    same(err, "no listener")
    same(type(detail), "string")
    same(select(2, pelton.connect("a name that cannot be/"):call("x")), "name")
    same(pcall(svc.call, svc, nil), false)
    same(pcall(svc.call, svc, "x", {timeout = -1}), false)
    same(pcall(svc.call, svc, ffi.new("char[1]")), false)
    same(pcall(pelton.connect, name, {tiemout = 1}), false)
    local small = pelton.connect(name, {call_bytes_max = 100000, timeout = 20})
    same(select(3, small:call(of_bytes(200000, 1))), "too large for this client")
    same(svc:call("still there"), "still there")
    nothing_is_left()
end

-- A slot of a call that was given up is used again at once, and never has the other's answer.
function checks.timeouts_leave_no_slot_to_a_late_answer()
    for i = 1, 50 do
        local res, err = svc:call("later too late " .. i, {timeout = 0.002})
        if res then
            same(res, "too late " .. i)
        else
            same(err, "timeout")
        end
        same(svc:call("mine " .. i), "mine " .. i)
    end
    local res, err = svc:call("stall", {timeout = 0.05})
    same(res, nil)
    same(err, "timeout")
    same(svc:call("after"), "after")
    nothing_is_left()
end

function checks.a_stalled_service_is_told_of_the_cancel()
    local before = tonumber(svc:call("cancelled"))
    svc:call("stall", {timeout = 0.01})
    for _ = 1, 2000 do
        if tonumber(svc:call("cancelled")) > before then
            return
        end
        ngx.sleep(0.01)
    end
    error("the service was never told of the cancel")
end

function checks.a_coroutine_that_is_killed_leaves_nothing()
    local before = svc:info().slots
    same(before, 0)
    for _ = 1, 10 do
        local thread = ngx.thread.spawn(function() svc:call("stall") end)
        ngx.sleep(0.001)
        ngx.thread.kill(thread)
        same(svc:call("beside it"), "beside it")
    end
    -- The rest comes with the end of this request: the next check finds no slot in use.
end

-- Also where they wait for room: who waits behind them is let ask in their place.
function checks.coroutines_that_wait_for_room_may_be_killed()
    for i = 1, 1024 do
        ngx.thread.spawn(function() svc:call("stall", {timeout = i == 1 and 0.1 or 100}) end)
    end
    local waiting = {}
    for i = 1, 5 do
        waiting[i] = ngx.thread.spawn(function() svc:call("never asked") end)
    end
    local last = ngx.thread.spawn(function() return svc:call("the last in the queue") end)
    same(svc:info().in_flight, 1024)
    same(svc:info().waiting, 6)
    for i = 1, 5 do
        ngx.thread.kill(waiting[i])
    end
    local _, res, err = ngx.thread.wait(last)
    same(res, "the last in the queue", err)
    -- The end of the request has the others given up.
    ngx.say("ok")
    ngx.exit(ngx.OK)
end

function checks.nothing_was_left()
    nothing_is_left()
end

function checks.streams()
    for _, count in ipairs {0, 1, 5, 300} do
        local found = 0
        for part, err in svc:stream("parts " .. count .. " 3000") do
            same(err, nil)
            same(part:match("^%d+"), tostring(found))
            same(#part, 3000)
            found = found + 1
        end
        same(found, count)
    end
    -- One that is no stream is one part.
    local parts = {}
    for part in svc:stream("plain") do
        parts[#parts + 1] = part
    end
    same(table.concat(parts, "|"), "plain")
    local seen, word, code = 0, nil, nil
    for part, err, _, its in svc:stream("broken 4") do
        if err then
            same(part, false)
            word, code = err, its
        else
            seen = seen + 1
        end
    end
    same(seen, 4)
    same(word, "failed")
    same(code, 7)
    local _, err = svc:stream("stall", {timeout = 0.02})()
    same(err, "timeout")
    nothing_is_left()
end

function checks.a_stream_may_be_left()
    local stream = svc:stream("parts 1000 3000")
    for part in stream do
        same(part:match("^%d+"), "0")
        break
    end
    stream:close()
    same(stream(), nil)
    nothing_is_left()
    for _ in svc:stream("parts 1000 3000") do
        break
    end
    -- Left to the end of the request.
end

function checks.a_call_that_is_answered_in_parts_has_all_of_them()
    local res = svc:call("parts 40 3000")
    same(#res, 120000)
    local at = 1
    for i = 0, 39 do
        same(res:sub(at, at + #tostring(i)), i .. " ")
        at = at + 3000
    end
    -- None waits for its timeout: that would be longer than who asks for this check waits.
    for _ = 1, 10 do
        same(svc:call("parts 0 0", {timeout = 200}), "")
    end
    local _, err, _, code = svc:call("broken 3", {timeout = 200})
    same(err, "failed")
    same(code, 7)
    nothing_is_left()
end

-- Who is slower than the service is told, and its memory is bounded; others are answered meanwhile.
function checks.a_flood_is_bounded()
    local small = pelton.connect(name, {parts_bytes_max = 1000000, timeout = 20})
    local stream = small:stream("flood")
    same(#stream(), 65536)
    for i = 1, 1000000 do
        same(small:call("beside " .. i), "beside " .. i)
        local info = small:info()
        same(info.bytes < 1200000, true, "bytes in memory")
        if info.in_flight == 0 then
            break
        end
    end
    local word
    for _, err in stream do
        word = err
    end
    same(word, "too large")
    same(select(2, small:call("flood")), "too large")
    same(small:call("after"), "after")
    same(small:info().slots, 0)
end

function checks.notifications_come()
    local before = tonumber(svc:call("told"):match("^%d+"))
    for i = 1, 100 do
        same(svc:notify("told " .. i), true)
    end
    same(svc:call("told"), before + 100 .. " told 100")
end

function checks.timers()
    local done
    ngx.timer.at(0, function()
        done = svc:call("from a timer")
    end)
    for _ = 1, 2000 do
        if done then
            break
        end
        ngx.sleep(0.01)
    end
    same(done, "from a timer")
end

-- The client is the worker's, not a virtual machine's.
function checks.one_client_per_worker()
    for _ = 1, 100 do
        same(pelton.connect(name, {timeout = 1}):call("x"), "x")
    end
    local info = svc:info()
    same(info.connected, true)
    same(info.connections, 1)
end

local M = {}

function M.check(which)
    local check = checks[which]
    if not check then
        ngx.status = 404
        return ngx.say("there is no check ", which)
    end
    ngx.update_time()
    local began = ngx.now()
    local ok, found = xpcall(check, debug.traceback)
    ngx.update_time()
    ngx.log(ngx.NOTICE, which, " took ", ngx.now() - began, " s")
    if not ok then
        ngx.status = 500
    end
    ngx.say(ok and "ok" .. (found and " " .. tostring(found) or "") or found)
end

-- One call for each request, compared.
function M.echo()
    local req = ngx.var.arg_q or ("request " .. ngx.var.request_id .. ("x"):rep(tonumber(ngx.var.arg_size or 0)))
    local asked = ngx.var.arg_name and pelton.connect(ngx.var.arg_name) or svc
    local res, err, detail = asked:call(req, {timeout = tonumber(ngx.var.arg_timeout or 20)})
    if not res then
        ngx.status = 502
        return ngx.say(err, ": ", detail)
    end
    if res ~= req and not ngx.var.arg_q then
        ngx.status = 500
        ngx.log(ngx.ALERT, "a wrong answer: ", res, " to ", req)
        return ngx.say("a wrong answer")
    end
    ngx.say(res)
end

function M.info()
    local info = svc:info()
    for _, key in ipairs {"connected", "connections", "in_flight", "waiting", "slots", "slots_made", "within", "bytes"} do
        ngx.say(key, " ", tostring(info[key]))
    end
end

M.svc = svc
return M
