-- The checks that run in a worker: `location /check/NAME` returns "ok", or what it found.

local pelton = require "resty.pelton"
local ffi = require "ffi"

local name = "unix:" .. os.getenv("PELTON_TEST_SERVICE")
local svc = pelton.connect(name, {timeout = 20})
-- Another service, for checks that end or block it.
local other = name .. ".other"
-- A service that violates the protocol.
local hostile = name .. ".hostile"
local file = pelton.file
local directory = os.getenv("PELTON_TEST_DIRECTORY") .. "/files/"
local processors = tonumber(os.getenv("PELTON_TEST_PROCESSORS"))
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

-- Within a minute.
local function until_true(is, what)
    for _ = 1, 6000 do
        if is() then
            return
        end
        ngx.sleep(0.01)
    end
    error("not within a minute: " .. what, 2)
end

-- The slots of ended calls are free at the end of the tick at the latest.
local function nothing_is_left()
    local info = svc:info()
    same(info.in_flight, 0, "calls in flight")
    same(info.waiting, 0, "coroutines that wait for space")
    same(info.slots, 0, "slots in use")
    same(info.bytes, 0, "bytes of replies in memory")
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
    local before = svc:info().immediate
    for i = 1, 20000 do
        local req = "request " .. i
        same(svc:call(req), req)
    end
    nothing_is_left()
    return svc:info().immediate - before
end

-- A worker that busy-polls for long gets its reply within the call, with two processors.
function checks.replies_come_within_the_call()
    local patient = pelton.connect(name, {poll = 1, timeout = 20})
    local function within(ask)
        local before = patient:info().immediate
        for i = 1, 100 do
            ask(i)
            if patient:info().immediate > before then
                return
            end
        end
        same(processors < 2, true, "a reply within the call")
    end
    within(function(i) same(patient:call("request " .. i), "request " .. i) end)
    within(function(i)
        same(patient:call("viewed", {view = function(data, size) return i .. ffi.string(data, size) end}), i .. "viewed")
    end)
    within(function(i)
        same(pcall(patient.call, patient, "raises", {view = function() error("as it must") end}), false)
        same(patient:call("next"), "next")
    end)
    within(function(i)
        local res, err, detail, code = patient:call("fail 4711 a reason")
        same(res, nil)
        same(err, "failed")
        same(detail, "a reason")
        same(code, 4711)
        same(select(2, patient:call("abandon")), "abandoned")
        same(patient:call("parts 3 10", {timeout = 19}):sub(1, 2), "0 ")
    end)
    same(patient:info().in_flight, 0)
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
    -- A view that raises an error leaves nothing, and the next reply is right.
    for i = 1, 5 do
        same(pcall(svc.call, svc, "raises", {view = function() error("as it must") end}), false)
        same(svc:call("next " .. i), "next " .. i)
    end
end

-- A reply may come within the call, or wake the coroutine, in place or copied: a view is the same.
function checks.a_view_stays_valid_until_it_is_released()
    for _, poll in ipairs {0, 1e-3} do
        local client = pelton.connect(name, {timeout = 20, poll = poll})
        for _, size in ipairs {1, 4096, 102400, 300000} do
            for round = 1, 5 do
                local what = "poll " .. poll .. ", " .. size .. " bytes"
                local one, two = of_bytes(size, round), of_bytes(size, round + 5)
                local first = assert(client:call(one, {view = true}))
                same(first.size, size, what)
                same(ffi.string(first:data()), one, what)
                -- Receives into the same lane, and suspends.
                local second = assert(client:call(two, {view = true}))
                same(first:string(), one, what)
                same(second:string(), two, what)
                same(client:call(one), one, what)
                ngx.sleep(0.001)
                same(first:string(), one, what)
                first:release()
                first:release()
                local ok, err = pcall(first.data, first)
                same(ok, false, what)
                same(err:match("the view was released"), "the view was released", what)
                same(second:string(), two, what)
                second:release()
                same(pcall(second.string, second), false, what)
            end
        end
        local empty = client:call("", {view = true})
        same(empty.size, 0)
        same(empty:string(), "")
        empty:release()
        same(client:call("parts 3 10", {view = true}):string(), client:call("parts 3 10"))
        local res, err, detail, code = client:call("fail 4711 a reason", {view = true})
        same(res, nil)
        same(err, "failed")
        same(detail, "a reason")
        same(code, 4711)
        same(client:info().slots, 0, "slots in use")
        same(client:info().bytes, 0, "bytes of replies in memory")
    end
    same(pcall(svc.call, svc, "x", {view = "yes"}), false)
end

-- A view that its request does not release is released with it.
function checks.a_view_ends_with_its_request()
    local kept
    assert(ngx.timer.at(0, function() kept = svc:call(of_bytes(102400, 1), {view = true}) end))
    until_true(function() return kept end, "the view")
    local err
    until_true(function()
        err = select(2, pcall(kept.data, kept))
        return type(err) == "string"
    end, "the end of the timer")
    same(err:match("has ended$"), "has ended")
    nothing_is_left()
end

-- More than can be in flight: the others wait for space, and each gets its own reply.
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

-- Replies come in any order.
function checks.late_replies_reach_their_own_calls()
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

function checks.a_request_carries_its_traceparent()
    local valid = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    same(svc:call("traceparent", {traceparent = valid}), valid)
    for _, text in ipairs {"", valid:upper(), (valid:gsub("[0-9a-f]", "0"))} do
        same(svc:call("traceparent", {traceparent = text}), "none")
    end
    same(svc:call("traceparent", {traceparent = nil}), "none")
    for part, err in svc:stream("traceparent", {traceparent = valid}) do
        same(err, nil)
        same(part, valid)
    end
    same(pcall(svc.call, svc, "traceparent", {traceparent = 5}), false)
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

-- A cancelled call's slot is reused immediately, and never gets the cancelled call's reply.
function checks.a_late_reply_finds_no_slot_after_a_timeout()
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

function checks.a_stalled_service_receives_the_cancel()
    local before = tonumber(svc:call("cancelled"))
    svc:call("stall", {timeout = 0.01})
    until_true(function() return tonumber(svc:call("cancelled")) > before end, "the service has the cancel")
end

function checks.a_coroutine_that_is_killed_leaves_nothing()
    local before = svc:info().slots
    same(before, 0)
    for _ = 1, 10 do
        local thread = ngx.thread.spawn(function() svc:call("stall") end)
        -- The service receives in order: when it replies to this one, it has the stalled call.
        same(svc:call("behind it"), "behind it")
        ngx.thread.kill(thread)
        same(svc:call("beside it"), "beside it")
    end
    -- The end of this request frees the slots: the next check finds none in use.
end

-- A killed coroutine that waits for space leaves its place to the next one.
function checks.coroutines_that_wait_for_space_may_be_killed()
    for i = 1, 1024 do
        ngx.thread.spawn(function() svc:call("stall", {timeout = i == 1 and 0.1 or 100}) end)
    end
    local waiting = {}
    for i = 1, 5 do
        waiting[i] = ngx.thread.spawn(function() svc:call("never submitted") end)
    end
    local last = ngx.thread.spawn(function() return svc:call("the last in the queue") end)
    same(svc:info().in_flight, 1024)
    same(svc:info().waiting, 6)
    for i = 1, 5 do
        ngx.thread.kill(waiting[i])
    end
    local _, res, err = ngx.thread.wait(last)
    same(res, "the last in the queue", err)
    -- The end of the request cancels the others.
    ngx.say("ok")
    ngx.exit(ngx.OK)
end

-- Sends a request after which the other service creates its mark. Blocks the worker until then.
local function marked(client, request)
    local path = other:sub(6) .. ".mark"
    os.remove(path)
    local thread = ngx.thread.spawn(function() return client:call(request, {timeout = 0.02}) end)
    ngx.update_time()
    local began = ngx.now()
    local mark
    repeat
        mark = mark or io.open(path)
        ngx.update_time()
    until mark and ngx.now() > began + 0.1 or ngx.now() > began + 60
    mark:close()
    return thread
end

-- The service corrupts shared memory, and the handshake.
function checks.a_hostile_service_harms_only_its_own_calls()
    local client = pelton.connect(hostile, {timeout = 20})
    local path, corrupt = hostile:sub(6) .. ".mark", 0
    local hows, random = {8, 8, 9, 0, 4, 12, 16, 24, 28, 32, 33, 34, 35}, ngx.var.arg_rounds
    for round = 1, tonumber(random) or #hows do
        local how = random and math.random(0, 35) or hows[round]
        local seed = random and math.random(1, 2 ^ 30) or round
        local what = "how " .. how .. " seed " .. seed
        -- Another process takes the service's place.
        for i = 1, 6000 do
            if client:call("x") == "x" then
                break
            end
            ngx.sleep(0.01)
        end
        local threads = {}
        for i = 1, 16 do
            threads[i] = ngx.thread.spawn(function()
                local size = ({0, 100, 5000, 20000})[i % 4 + 1]
                if i % 3 > 0 then
                    return select(2, client:call("defer " .. size))
                end
                local word
                for _, err in client:stream("defer " .. size) do
                    word = err
                end
                return word
            end)
        end
        os.remove(path)
        threads[17] = ngx.thread.spawn(function() return select(2, client:call("wild " .. how .. " " .. seed)) end)
        ngx.update_time()
        local began, mark = ngx.now(), nil
        repeat
            mark = io.open(path)
            ngx.update_time()
        until mark or ngx.now() > began + 60
        mark:close()
        local found = {}
        for i, thread in ipairs(threads) do
            local _, word = ngx.thread.wait(thread)
            found[word or "answered"] = true
        end
        -- None waits until its timeout.
        same(found.timeout, nil, what)
        same(svc:call("beside it " .. round), "beside it " .. round, what)
        corrupt = corrupt + (found.corrupt and 1 or 0)
    end
    local info = client:info()
    same(info.in_flight + info.waiting + info.slots + info.bytes, 0)
    same(corrupt > 0, true, "rounds in which the client was found corrupt")
end

function checks.a_wrong_handshake_is_refused()
    for i = 1, 24 do
        local client = pelton.connect(hostile .. ".raw", {timeout = 20, capacity = i * 65536})
        local res, err = client:call("x")
        same(res, nil)
        same(err == "timeout", false, "connecting " .. i)
        same(svc:call("beside it " .. i), "beside it " .. i)
        same(client:info().connections, 0)
    end
end

-- Also in nested coroutines of Lua.
function checks.coroutines_of_lua_call()
    local each = coroutine.wrap(function()
        for i = 1, 10 do
            local inner = coroutine.create(function() return svc:call("inner " .. i) end)
            local _, res = coroutine.resume(inner)
            coroutine.yield(res .. ", " .. svc:call("later outer " .. i))
        end
    end)
    for i = 1, 10 do
        same(each(), "inner " .. i .. ", outer " .. i)
    end
end

-- Several at the same time.
function checks.subrequests()
    local all = {}
    for i = 1, 20 do
        all[i] = {"/echo?q=later%20" .. i}
    end
    for i, res in ipairs {ngx.location.capture_multi(all)} do
        same(res.status, 200)
        same(res.body, i .. "\n")
    end
    same(ngx.location.capture("/echo?q=stall&timeout=0.02").status, 502)
    same(svc:call("after"), "after")
    nothing_is_left()
end

-- A reply that arrived while the worker was busy is taken, though the timeout has expired.
function checks.a_reply_that_has_arrived_is_taken_after_the_timeout()
    local client = pelton.connect(other)
    same(client:call("x", {timeout = 20}), "x")
    for _ = 1, 3 do
        -- In a timer: other timers run directly after it.
        ngx.sleep(0.001)
        local _, res, err = ngx.thread.wait(marked(client, "mark"))
        same(res, "mark", err)
    end
end

-- A submit finds that the service has ended; replies to the others have arrived.
function checks.replies_before_the_end_are_taken()
    local client = pelton.connect(other, {timeout = 20, capacity = 8 * 1024 * 1024})
    local threads = {}
    same(client:call("x"), "x")
    for i = 1, 32 do
        threads[i] = ngx.thread.spawn(function()
            local res, err = client:call("defer 100000")
            return res and #res, err
        end)
    end
    -- The service replies to the others and leaves, while the worker is blocked.
    same(client:call("later x"), "x")
    marked(client, "finish")
    for _ = 1, 3 do
        ngx.thread.spawn(client.call, client, "submitted again")
    end
    for i = 1, 32 do
        local _, bytes, err = ngx.thread.wait(threads[i])
        same(bytes, 100000, "coroutine " .. i .. ": " .. tostring(err))
    end
end

-- A service that accepts and ends is opened ten times a second at most.
function checks.a_service_that_ends_at_once_is_not_opened_all_the_time()
    local client = pelton.connect(other, {timeout = 20, call_bytes_max = 1000000})
    ngx.update_time()
    local began, before = ngx.now(), client:info().connections
    for i = 1, 1000000 do
        same(client:call("leave"), nil)
        ngx.update_time()
        if client:info().connections >= before + 5 or ngx.now() > began + 30 then
            break
        end
        ngx.sleep(0.001)
    end
    local opened, seconds = client:info().connections - before, ngx.now() - began
    same(opened <= 1 + seconds / 0.09, true, opened .. " times in " .. seconds .. " s")
end

-- A retry that is refused leaves its space to the next. A request that is too large does not wait.
function checks.a_request_that_is_too_large_delays_no_other()
    local client = pelton.connect(other, {timeout = 20, capacity = 65536})
    same(client:notify("block"), true)
    local fillers = {}
    for i = 1, 1000 do
        fillers[i] = ngx.thread.spawn(client.notify, client, ("f"):rep(10000))
        if client:info().waiting > 0 then
            break
        end
    end
    local first = ngx.thread.spawn(client.notify, client, "first")
    local large = ngx.thread.spawn(client.notify, client, ("x"):rep(9000000))
    local last = ngx.thread.spawn(client.notify, client, "last")
    io.open(other:sub(6) .. ".go", "w"):close()
    local _, res, err = ngx.thread.wait(large)
    same(res, nil)
    same(err, "too large")
    same(select(2, ngx.thread.wait(first)), true)
    same(select(2, ngx.thread.wait(last)), true)
    for _, filler in ipairs(fillers) do
        same(select(2, ngx.thread.wait(filler)), true)
    end
    same(client:call("notified"):match("%d+ (.*)"), "last")
end

-- Also if there is space for only one of them.
function checks.waiting_calls_keep_their_order()
    local client = pelton.connect(other, {timeout = 20, capacity = 131072})
    local threads = {}
    for i = 1, 12 do
        -- Larger than half a lane. The service blocks at the first.
        threads[i] = ngx.thread.spawn(client.notify, client, "o" .. string.char(64 + i) .. ("x"):rep(100000))
    end
    same(select(2, ngx.thread.wait(threads[1])), true)
    -- The service has the first, and the lane the second.
    until_true(function() return client:info().waiting == 10 end, "ten wait for space")
    io.open(other:sub(6) .. ".go", "w"):close()
    for i = 2, 12 do
        same(select(2, ngx.thread.wait(threads[i])), true)
    end
    same(client:call("order"), "ABCDEFGHIJKL")
end

-- The service finishes a cancelled call, which no completion reports.
function checks.a_cancelled_call_leaves_its_number_to_a_waiting_one()
    local client = pelton.connect(other, {timeout = 20, call_bytes_max = 2000000})
    same(client:call("eager 1"), "eager 1")
    for i = 1, 1023 do
        ngx.thread.spawn(client.call, client, "stall", {timeout = 1000})
    end
    for i = 1, 300 do
        local given_up = ngx.thread.spawn(client.call, client, "stall", {timeout = 0.001})
        local waits = ngx.thread.spawn(client.call, client, "waits " .. i)
        local _, res, err = ngx.thread.wait(waits)
        same(res, "waits " .. i, err)
        ngx.thread.wait(given_up)
    end
    same(client:call("eager 0"), "eager 0")
    ngx.say("ok")
    ngx.exit(ngx.OK)
end

-- One coroutine that calls two services alternately does not block the worker's loop.
function checks.two_services_leave_the_loop_to_others()
    local one, two = pelton.connect(name, {poll = 1, timeout = 20}), pelton.connect(other, {poll = 1, timeout = 20})
    same(one:call("x"), "x")
    same(two:call("x"), "x")
    local ticks, is_over = 0, false
    local ticker = ngx.thread.spawn(function()
        while not is_over do
            ngx.sleep(0.001)
            ticks = ticks + 1
        end
    end)
    for i = 1, 300000 do
        same(one:call("x"), "x")
        same(two:call("x"), "x")
        if ticks >= 5 then
            break
        end
    end
    is_over = true
    local found = ticks
    ngx.thread.wait(ticker)
    same(found >= 5, true, "the worker's loop")
end

-- A stream ends with the request that began it, also for a coroutine of another request. The slot's next call gets its
-- own reply.
function checks.a_stream_is_of_its_request()
    local stream, found, is_waiting
    ngx.timer.at(0, function()
        stream = svc:stream("begin")
        same(stream(), "begun")
        until_true(function() return is_waiting end, "the other timer waits")
    end)
    ngx.timer.at(0, function()
        until_true(function() return stream and stream.ticket and not stream.is_busy end, "the stream has begun")
        is_waiting = true
        found = {stream()}
    end)
    for i = 1, 6000 do
        local text = "mine " .. i
        same(svc:call("later " .. text), text)
        if found then
            break
        end
    end
    same(found[1], false)
    same(found[2], "closed")
    same(stream(), nil)
    for i = 1, 10 do
        same(svc:call("later after " .. i), "after " .. i)
    end
    nothing_is_left()
end

function checks.a_stream_is_of_one_coroutine_at_a_time()
    local stream = svc:stream("begin")
    same(stream(), "begun")
    local waits = ngx.thread.spawn(function() return stream() end)
    same(pcall(stream), false)
    same(svc:call("later mine"), "mine")
    -- The waiting coroutine gets an error.
    stream:close()
    local _, res, err = ngx.thread.wait(waits)
    same(res, false)
    same(err, "closed")
    nothing_is_left()
end

-- The parts of many calls that are not taken have a common limit.
function checks.parts_of_all_calls_are_bounded()
    local small = pelton.connect(name, {parts_bytes_max = 100000, timeout = 20})
    local streams, refused = {}, 0
    for i = 1, 40 do
        streams[i] = small:stream("parts 30 3000")
        local part, err = streams[i]()
        same(part and #part or err, part and 3000 or "too large")
        refused = refused + (err and 1 or 0)
    end
    until_true(function() return small:info().in_flight == 0 end, "no call is in flight")
    same(small:info().bytes <= 1600000, true, "bytes in memory: " .. tostring(small:info().bytes))
    for i = 1, 40 do
        local word
        for _, err in streams[i] do
            word = err
        end
        if word then
            same(word, "too large")
            refused = refused + 1
        end
    end
    same(refused > 0 and refused < 40, true, refused .. " refused")
    same(small:info().bytes, 0)
end

-- ---- Files ----------------------------------------------------------------------------------------------------

local function no_file_is_left()
    until_true(function() return file.in_flight() == 0 end, "no operation on a file is in flight")
end

function checks.files_are_written_and_read()
    for _, size in ipairs {0, 1, 100, 70000, 20000000} do
        local path, data = directory .. size, size == 0 and "" or of_bytes(size, size)
        local f = assert(file.open(path, "w+"))
        same(f:pwrite(0, data), true)
        same(f:size(), size)
        same(f:sync(), true)
        same(f:pread(0, size + 10), data)
        same(f:pread(size, 10), "")
        same(f:pread(math.floor(size / 2), 7), data:sub(math.floor(size / 2) + 1, math.floor(size / 2) + 7))
        same(f:pwrite(size + 5, "behind"), true)
        same(f:size(), size + 11)
        same(f:close(), true)
        same(file.read(path), data .. ("\0"):rep(5) .. "behind")
        same(os.remove(path), true)
    end
    local path = directory .. "appended"
    for i = 1, 3 do
        local f = assert(file.open(path, "a", {permissions = 384}))
        same(f:pwrite(0, "line " .. i .. "\n"), true)
        f:close()
    end
    same(file.read(path), "line 1\nline 2\nline 3\n")
    same(os.remove(path), true)
    same(#file.read("/proc/self/status") > 500, true)
    no_file_is_left()
end

function checks.what_fails_of_a_file_is_nil_and_err()
    local f, err, detail, errno = file.open(directory .. "is not there")
    same(f, nil)
    same(err, "system")
    same(errno, 2)
    same(detail:find("No such file", 1, true) ~= nil, true, detail)
    same(select(2, file.open("with a \0")), "name")
    same(select(4, file.open(directory, "w")), 21)
    f = assert(file.open(directory .. "read only", "w"))
    same(select(4, f:pread(0, 1)), 9)
    same(select(2, f:pread(0, 2 ^ 31 - 1)), "system")
    f:close()
    same(select(2, f:pread(0, 1)), "closed")
    same(select(2, f:close()), "closed")
    same(select(2, file.read("/dev/zero", {bytes_max = 100000})), "too large")
    same(pcall(f.pread, f, -1, 1), false)
    same(pcall(f.pwrite, f, 0, nil), false)
    same(pcall(file.open, "x", "rw"), false)
    same(pcall(file.open, nil), false)
    no_file_is_left()
end

-- `run` checks that the worker has closed them.
function checks.files_may_be_forgotten()
    for _ = 1, 50 do
        assert(file.open(directory .. "forgotten", "w"))
    end
    collectgarbage()
    collectgarbage()
    no_file_is_left()
end

-- The last operation completes within its call: `run` checks that the worker sleeps then.
local kept
function checks.a_file_is_kept()
    kept = assert(file.open(directory .. "kept", "w+"))
    same(kept:pwrite(0, "kept"), true)
    ngx.sleep(0.01)
    same(kept:pread(0, 10), "kept")
end

-- More than can be in flight.
function checks.thousands_of_coroutines_have_files()
    local path = directory .. "of all"
    local f = assert(file.open(path, "w+"))
    local threads, wrong = {}, nil
    for i = 1, 3000 do
        threads[i] = ngx.thread.spawn(function()
            local text = ("%010d"):format(i)
            local ok, err, detail = f:pwrite(i * 10, text)
            local found = f:pread(i * 10, 10)
            if not ok or found ~= text then
                wrong = i .. " found " .. tostring(found) .. ", " .. tostring(err) .. ", " .. tostring(detail)
            end
        end)
    end
    for i = 1, 3000 do
        ngx.thread.wait(threads[i])
    end
    same(wrong, nil)
    f:close()
    no_file_is_left()
end

ffi.cdef [[
int open(const char *path, int flags, ...);
int close(int fd);
int ioctl(int fd, unsigned long request, ...);
]]
local O_NONBLOCK, FIONREAD = 2048, 0x541B

-- The number of unread bytes in a FIFO.
local function unread(path)
    local fd, bytes = ffi.C.open(path, O_NONBLOCK), ffi.new("int[1]")
    local code = ffi.C.ioctl(fd, FIONREAD, bytes)
    ffi.C.close(fd)
    same(code, 0, "ioctl of the FIFO")
    return bytes[0]
end

-- An operation that never completes delays no other.
function checks.a_fifo_keeps_only_its_own_waiting()
    local path = directory .. "fifo"
    same(select(2, file.open(path, "r", {timeout = 0.05})), "timeout")
    local reader = ngx.thread.spawn(file.open, path, "r")
    same(svc:call("beside"), "beside")
    local w = assert(file.open(path, "w"))
    local _, r, err = ngx.thread.wait(reader)
    same(type(r), "table", err)
    local read = ngx.thread.spawn(function()
        local parts, bytes = {}, 0
        repeat
            parts[#parts + 1] = assert(r:pread(nil, 300000))
            bytes = bytes + #parts[#parts]
        until bytes == 300000
        return table.concat(parts)
    end)
    same(svc:call("beside"), "beside")
    -- More than a pipe holds.
    local data = of_bytes(300000, 5)
    same(w:pwrite(nil, data), true)
    same(select(2, ngx.thread.wait(read)), data)
    same(select(2, r:pread(nil, 10, {timeout = 0.05})), "timeout")
    w:close()
    same(r:pread(nil, 10), "")
    r:close()
    -- In parts, up to its end.
    local all = ngx.thread.spawn(file.read, path)
    w = assert(file.open(path, "w"))
    for i = 1, 3 do
        same(w:pwrite(nil, "part " .. i), true)
        until_true(function() return unread(path) == 0 end, "part " .. i .. " is read")
    end
    w:close()
    same(select(2, ngx.thread.wait(all)), "part 1part 2part 3")
    no_file_is_left()
end

-- It reads from a FIFO without a writer. Bytes that arrive after the kill do not reach freed memory.
function checks.a_coroutine_that_reads_may_be_killed()
    local f = assert(file.open(directory .. "fifo", "r+"))
    for i = 1, 20 do
        local thread = ngx.thread.spawn(f.pread, f, nil, 100000)
        ngx.sleep(0.001)
        ngx.thread.kill(thread)
        same(f:pwrite(nil, of_bytes(1000, i)), true)
    end
    f:close()
end

function checks.no_file_is_in_flight()
    no_file_is_left()
end

-- The error of another version's Lua says what to do.
function checks.another_version_is_refused()
    local source = io.open(package.searchpath("resty.pelton.base", package.path)):read("*a")
    -- So does that of the stream subsystem.
    local in_stream = setfenv(loadstring(source), {require = require, error = error, ngx = {config = {subsystem = "stream"}}})
    same(select(2, pcall(in_stream)):find("works in http only, found stream", 1, true) ~= nil, true)
    source = source:gsub("abi%.VERSION", "999")
    local ok, err = pcall(loadstring(source))
    same(ok, false)
    same(err:find("restart nginx", 1, true) ~= nil, true, err)
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
    -- A reply without parts is one part.
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
    -- The end of the request closes it.
end

function checks.a_call_that_is_answered_in_parts_has_all_of_them()
    local res = svc:call("parts 40 3000")
    same(#res, 120000)
    local at = 1
    for i = 0, 39 do
        same(res:sub(at, at + #tostring(i)), i .. " ")
        at = at + 3000
    end
    -- None waits until its timeout, which is longer than that of `run`.
    for _ = 1, 10 do
        same(svc:call("parts 0 0", {timeout = 200}), "")
    end
    local _, err, _, code = svc:call("broken 3", {timeout = 200})
    same(err, "failed")
    same(code, 7)
    nothing_is_left()
end

-- A stream that is slower than the service fails, its memory is bounded, and other calls continue.
function checks.a_flood_is_bounded()
    local small = pelton.connect(name, {parts_bytes_max = 1000000, timeout = 20})
    local stream = small:stream("flood")
    same(#stream(), 65536)
    for i = 1, 1000000 do
        same(small:call("beside " .. i), "beside " .. i)
        local info = small:info()
        same(info.bytes < 1200000, true, "bytes of replies")
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

local function threads()
    return tonumber(io.open("/proc/self/status"):read("*a"):match("Threads:%s+(%d+)"))
end

-- It listens, and never accepts. No other call waits, and no thread waits for it.
function checks.a_service_that_does_not_accept_delays_only_its_own_calls()
    local client = pelton.connect(hostile .. ".silent")
    local before = threads()
    local caller = ngx.thread.spawn(client.call, client, "x", {timeout = 100})
    for i = 1, 100 do
        same(svc:call("beside it " .. i), "beside it " .. i)
        same(select(2, client:call("x", {timeout = 0.001})), "timeout")
        same(client:info().waiting, 1)
        same(threads(), before, "threads of the worker")
    end
    local _, res, err, detail = ngx.thread.wait(caller)
    same(res, nil)
    same(err, "timed out", detail)
    same(client:info().connections, 0)
    nothing_is_left()
end

function checks.services_of_nginx_conf_are_found_by_name()
    local configured = pelton.service("configured")
    same(pelton.service("configured"), configured)
    same(configured:call("x"), "x")
    same(select(2, configured:call("stall")), "timeout")
    same(select(3, configured:call(of_bytes(200000, 1))), "too large for this client")
    same(select(2, configured:call("parts 30 3000")), "too large")
    local ok, err = pcall(pelton.service, "none")
    same(ok, false)
    same(err:find("pelton_service none", 1, true) ~= nil, true, err)
    same(pcall(pelton.service), false)
end

function checks.notifications_come()
    local before = tonumber(svc:call("notified"):match("^%d+"))
    for i = 1, 100 do
        same(svc:notify("notified " .. i), true)
    end
    same(svc:call("notified"), before + 100 .. " notified 100")
end

function checks.timers()
    local done
    ngx.timer.at(0, function()
        done = svc:call("from a timer")
    end)
    until_true(function() return done end, "the timer's call has its reply")
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

local M = {served = 0}

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
    local req = ngx.var.arg_q and ngx.unescape_uri(ngx.var.arg_q) or ("request " .. ngx.var.request_id .. ("x"):rep(tonumber(ngx.var.arg_size or 0)))
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
    M.served = M.served + 1
    ngx.say(res)
end

-- Reads from a FIFO without a writer.
function M.reads()
    local f = assert(file.open(directory .. "fifo", "r+"))
    local res, err = f:pread(nil, 1000000, {timeout = tonumber(ngx.var.arg_timeout or 100)})
    ngx.say(res or err)
end

function M.info()
    local info = (ngx.var.arg_name and pelton.connect(ngx.var.arg_name) or svc):info()
    for _, key in ipairs {"connected", "connections", "in_flight", "waiting", "slots", "immediate", "bytes"} do
        ngx.say(key, " ", tostring(info[key]))
    end
    ngx.say("served ", M.served)
    ngx.say("files ", file.in_flight())
end

M.svc = svc
return M
