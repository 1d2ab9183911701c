-- The conformance driver in Lua, within nginx: GET /call?name=NAME&count=COUNT&size=SIZE. ../README.md has the
-- messages.
local pelton = require "resty.pelton"

local TIMEOUT = 10
local args = ngx.req.get_uri_args()
local count, size = tonumber(args.count), tonumber(args.size)
local letters = ("abcdefghijklmnopqrstuvwxyz"):rep(math.floor(size / 26) + 2)

local function message(i)
    return letters:sub(i % 26 + 1, i % 26 + size)
end

-- The client connects at its first call. Until a service listens, that call fails with "no listener".
local function call(service, request)
    local deadline = ngx.now() + TIMEOUT
    while true do
        local reply, err, detail = service:call(request)
        if reply or err ~= "no listener" or ngx.now() > deadline then
            return reply, err, detail
        end
        ngx.sleep(0.02)
    end
end

local service = pelton.connect(args.name, {timeout = TIMEOUT})
for i = 0, count - 1 do
    local reply, err, detail = call(service, message(i))
    if reply ~= message(i) then
        ngx.status = 500
        ngx.say("call ", i, ": found ", reply or err, detail and ": " .. detail or "", ", expected ", message(i))
        return
    end
end
ngx.say("ok call ", count, " calls")
