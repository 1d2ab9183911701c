-- The conformance driver in Lua, within nginx: GET /call?name=NAME&count=COUNT&sizes=SIZES&seconds=SECONDS, or /stream.
-- ../README.md has the messages and the report.
local pelton = require "resty.pelton"

local args = ngx.req.get_uri_args()
local command, count, timeout = ngx.var.uri:sub(2), tonumber(args.count), tonumber(args.seconds or 10)
local sizes, longest = {}, 0
for size in args.sizes:gmatch("%d+") do
    sizes[#sizes + 1] = tonumber(size)
    longest = math.max(longest, tonumber(size))
end
local letters = ("abcdefghijklmnopqrstuvwxyz"):rep(math.floor(longest / 26) + 2)

local function message(i)
    local start = i % 26
    return letters:sub(start + 1, start + sizes[i % #sizes + 1])
end

local messages, bytes, checksum = 0, 0, 0

-- Adds what has arrived, which must be the next message. Returns the error otherwise.
local function add(found, err, detail)
    if not found then
        return "message " .. messages .. ": " .. err .. ": " .. (detail or "")
    elseif messages >= count or found ~= message(messages) then
        return "message " .. messages .. " of " .. count .. ": found " .. #found .. " bytes, not the expected ones"
    end
    messages = messages + 1
    bytes = bytes + #found
    checksum = (checksum + ngx.crc32_long(found)) % 2 ^ 32
end

-- The client connects at its first call. Until a service listens, that call fails with "no listener".
local function connected(call)
    local deadline = ngx.now() + timeout
    while true do
        local found, err, detail = call()
        if found or err ~= "no listener" or ngx.now() > deadline then
            return found, err, detail
        end
        ngx.sleep(0.02)
    end
end

local service = pelton.connect(args.name, {timeout = timeout})
local commands = {}

function commands.call()
    for i = 0, count - 1 do
        local err = add(connected(function() return service:call(message(i)) end))
        if err then
            return err
        end
    end
end

function commands.stream()
    local parts
    local part, err, detail = connected(function()
        parts = service:stream(message(0))
        return parts()
    end)
    while part ~= nil do
        err = add(part, err, detail)
        if err then
            return err
        end
        part, err, detail = parts()
    end
    return messages < count and "found " .. messages .. " parts, expected " .. count or nil
end

local err = commands[command]()
if err then
    ngx.status = 500
    ngx.say(command, ": ", err)
else
    ngx.say(("ok %s %d messages %d bytes checksum %08x"):format(command, messages, bytes, checksum))
end
