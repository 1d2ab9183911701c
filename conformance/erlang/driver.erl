%% The conformance driver in Erlang. ../README.md has the command line, the messages and the report.
-module(driver).
-export([main/0]).
-define(TIMEOUT, (1000 * list_to_integer(os:getenv("PELTON_SECONDS", "10")))).

main() ->
    halt(try run(init:get_plain_arguments())
         catch _:Reason:Stack ->
             io:format(standard_error, "~p~n~p~n", [Reason, Stack]),
             1
         end).

%% The exit code.
run(["vectors" | _]) -> unsupported("vectors", "the binding uses libpelton, it is no implementation of its own");
run([Verb | _]) when Verb =:= "write-records"; Verb =:= "read-records" ->
    unsupported(Verb, "the binding has no record files; disk_log has the same use in Erlang");
run([Verb | Arguments]) when Verb =:= "send"; Verb =:= "recv"; Verb =:= "call"; Verb =:= "serve"; Verb =:= "stream";
                             Verb =:= "serve-stream"; Verb =:= "gather" ->
    Parsed = case Arguments of
                 [_, _, _] -> numbers(Arguments ++ ["close"]);
                 [_, _, _, Then] -> lists:member(Then, thens(Verb)) andalso numbers(Arguments);
                 _ -> false
             end,
    case Parsed of
        false -> usage(Verb);
        {Name, Count, Sizes, How} ->
            %% A SIGTERM stops the application, which closes what is open.
            ok = application:start(pelton),
            Output = output(),
            Output(report(Verb, command(Verb, Name, Count, Sizes, How, Output))),
            _ = How =:= "die" andalso os:cmd("kill -KILL " ++ os:getpid()),
            0
    end;
run(_) -> usage("COMMAND").

thens("send") -> ["close", "die", "resume", "traced"];
thens("recv") -> ["close", "died", "die", "rest", "traced"];
thens(_) -> [].

numbers([Name, Count, Sizes, Then]) ->
    try {Name, list_to_integer(Count), [list_to_integer(Size) || Size <- string:split(Sizes, ",", all)], Then}
    catch error:badarg -> false
    end.

unsupported(Verb, Reason) ->
    io:format("unsupported ~s: ~s~n", [Verb, Reason]),
    3.

usage(Verb) ->
    io:format(standard_error, "usage: driver ~s NAME COUNT SIZES~s~n",
              [Verb, [[" [", lists:join(" | ", Thens), "]"] || Thens = [_ | _] <- [thens(Verb)]]]),
    2.

%% Writes immediately. The standard output of the runtime is a process, whose last lines a SIGKILL would lose.
output() ->
    {ok, File} = file:open("/dev/stdout", [append, raw]),
    fun(Text) -> ok = file:write(File, Text) end.

report(Verb, {Count, Bytes, Checksum}) ->
    io_lib:format("ok ~s ~b messages ~b bytes checksum ~8.16.0b~n", [Verb, Count, Bytes, Checksum rem (1 bsl 32)]).

count(Message, {Count, Bytes, Checksum}) -> {Count + 1, Bytes + byte_size(Message), Checksum + erlang:crc32(Message)}.

%% Calls Fun with each message that the contract defines, and its number if Fun takes it. Returns the counts of those
%% that Fun returns.
each(Count, Sizes, Fun) when is_function(Fun, 1) -> each(Count, Sizes, fun(Message, _) -> Fun(Message) end);
each(Count, Sizes, Fun) ->
    lists:foldl(fun(I, Counts) -> count(Fun(message(I, Sizes), I), Counts) end, {0, 0, 0}, lists:seq(0, Count - 1)).

%% That of message I, or undefined.
traceparent("traced", I) when I rem 3 =/= 0 ->
    iolist_to_binary(io_lib:format("00-~32.16.0b-~16.16.0b-~2.16.0b", [I + 1, I + 1, I rem 256]));
traceparent(_, _) -> undefined.

message(I, Sizes) ->
    Size = lists:nth(I rem length(Sizes) + 1, Sizes),
    binary:part(binary:copy(<<"abcdefghijklmnopqrstuvwxyz">>, Size div 26 + 2), I rem 26, Size).

checked(Found, Found) -> Found;
checked(Found, Wanted) -> error({wrong_message, {found, start(Found)}, {wanted, start(Wanted)}}).

start(Message) -> {byte_size(Message), binary:part(Message, 0, min(byte_size(Message), 26))}.

%% The messages, bytes and sum of checksums of the report.
command("send", Name, Count, Sizes, Then, _) ->
    {ok, Sender} = pelton:open(sender, Name, [{traced, Then =:= "traced"} | sender_options(Name)]),
    Counts = each(Count, Sizes, fun(Message, I) ->
        Options = [{timeout, ?TIMEOUT}, {traceparent, traceparent(Then, I)}],
        ok = resuming(Then, Sender, fun() -> pelton:send(Sender, Message, Options) end),
        Message
    end),
    _ = Then =:= "die" orelse begin
        ok = resuming(Then, Sender, fun() -> pelton:wait_released(Sender, ?TIMEOUT) end),
        ok = pelton:close(Sender)
    end,
    Counts;
command("recv", Name, Count, Sizes, "rest", _) ->
    Receiver = receiver(Name, false),
    Found = rest(Receiver, []),
    ok = pelton:close(Receiver),
    true = Found =/= [] andalso length(Found) =< Count,
    Wanted = [message(I, Sizes) || I <- lists:seq(Count - length(Found), Count - 1)],
    lists:foldl(fun count/2, {0, 0, 0}, lists:zipwith(fun checked/2, Found, Wanted));
command("recv", Name, Count, Sizes, Then, _) ->
    Receiver = receiver(Name, Then =:= "traced"),
    ok = pelton:setopts(Receiver, [{traceparents, true}]),
    Counts = each(Count, Sizes, fun(Message, I) ->
        {ok, Found, Traceparent} = pelton:recv(Receiver, ?TIMEOUT),
        {_, Traceparent} = {{traceparent, I}, traceparent(Then, I)},
        checked(Found, Message)
    end),
    case Then of
        _ when Then =:= "close"; Then =:= "traced" -> {error, closed} = pelton:recv(Receiver, ?TIMEOUT), ok = pelton:close(Receiver);
        "died" -> {error, peer_died} = pelton:recv(Receiver, ?TIMEOUT), ok = pelton:close(Receiver);
        "die" -> ok
    end,
    Counts;
command("gather", Name, Count, [Size], _, Output) ->
    {ok, Receiver} = pelton:open(receiver, Name),
    each(Count, [Size], fun(_) ->
        {ok, Found} = pelton:recv(Receiver, ?TIMEOUT),
        Output([binary:part(Found, 0, min(Size, byte_size(Found))), $\n]),
        Found
    end);
command("call", Name, Count, Sizes, _, _) ->
    Client = client(Name),
    each(Count, Sizes, fun(Message) ->
        {ok, Found} = pelton:call(Client, Message, ?TIMEOUT),
        checked(Found, Message)
    end);
command("stream", Name, Count, Sizes, _, _) ->
    Parts = fun(Found, {I, Counts}) -> {I + 1, count(checked(Found, message(I, Sizes)), Counts)} end,
    {ok, {Count, Counts}} = pelton:stream(client(Name), message(0, Sizes), Parts, {0, {0, 0, 0}}, ?TIMEOUT),
    Counts;
command("serve", Name, Count, Sizes, _, _) ->
    Service = service(Name),
    Counts = each(Count, Sizes, fun(_) ->
        {Responder, Request} = request(Service),
        %% The reply to a client that has gone is an error, which changes nothing here.
        _ = pelton:reply(Responder, Request),
        Request
    end),
    drained(Service),
    Counts;
command("serve-stream", Name, Count, Sizes, _, _) ->
    Service = service(Name),
    {Responder, Request} = request(Service),
    _ = checked(Request, message(0, Sizes)),
    Counts = each(Count, Sizes, fun(Message) -> ok = pelton:part(Responder, Message, ?TIMEOUT), Message end),
    ok = pelton:finish(Responder),
    drained(Service),
    Counts.

%% A path needs no receiver for sending.
sender_options("path:" ++ _) -> [{create, true}];
sender_options(_) -> [{timeout, ?TIMEOUT}].

%% Does it, again with the receiver's successor after each receiver that has died.
resuming(Then, Sender, Fun) ->
    case Fun() of
        {error, peer_died} when Then =:= "resume" ->
            ok = pelton:resume(Sender, ?TIMEOUT),
            resuming(Then, Sender, Fun);
        Result -> Result
    end.

%% A receiver of one sender.
receiver("path:" ++ _ = Name, IsTraced) ->
    {ok, Receiver} = pelton:open(receiver, Name, [{create, true}, {traced, IsTraced}, {timeout, ?TIMEOUT}]),
    Receiver;
receiver(Name, _) ->
    {ok, Listener} = pelton:open(listener, Name),
    {ok, Receiver} = pelton:accept(Listener, ?TIMEOUT),
    ok = pelton:close(Listener),
    Receiver.

rest(Receiver, Found) ->
    case pelton:recv(Receiver, ?TIMEOUT) of
        {ok, Message} -> rest(Receiver, [Message | Found]);
        {error, closed} -> lists:reverse(Found)
    end.

client(Name) ->
    {ok, Client} = pelton:open(client, Name, [{timeout, ?TIMEOUT}]),
    Client.

service(Name) ->
    {ok, Service} = pelton:open(service, Name),
    Service.

request(Service) ->
    ok = pelton:setopts(Service, [{active, once}]),
    receive {pelton_request, Service, Responder, Request} -> {Responder, Request}
    after ?TIMEOUT -> error(no_request)
    end.

drained(Service) ->
    ok = pelton:drain(Service),
    ok = pelton:setopts(Service, [{active, true}]),
    receive {pelton_closed, Service, closed} -> pelton:close(Service)
    after ?TIMEOUT -> error(not_drained)
    end.
