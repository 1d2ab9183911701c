%% An echo of 64 bytes over loopback, of a process whose mailbox has 0 or a million other messages: microseconds for a
%% round trip, the median. `./run bench file erlang-net` runs it.
-module(net_bench).
-export([main/0, init/1, handle_request/3]).
-behaviour(pelton_service).

-define(ROUNDS, 2000).
%% A slow way is measured for so long.
-define(LIMIT_NS, 5.0e9).

main() ->
    {ok, _} = application:ensure_all_started(pelton),
    io:format("OTP ~s; 64 B there and back, microseconds, median: a mailbox of 0, of 1,000,000~n",
              [erlang:system_info(otp_release)]),
    [io:format("  ~-32s ~10.1f ~10.1f~n", [Name | [in_process(Mailbox, Way) || Mailbox <- [0, 1000000]]]) ||
        {Name, Way} <- [{"gen_tcp, recv", fun() -> tcp([]) end},
                        {"gen_tcp, {inet_backend, socket}", fun() -> tcp([{inet_backend, socket}]) end},
                        {"socket", fun sockets/0},
                        {"pelton:call", fun calls/0}]].

in_process(Mailbox, Way) ->
    Me = self(),
    {Process, Monitor} = spawn_opt(fun() ->
        {Echo, Close} = Way(),
        [self() ! Number || Number <- lists:seq(1, Mailbox)],
        Echo(),
        Times = times(Echo, ?ROUNDS, erlang:monotonic_time(nanosecond) + ?LIMIT_NS, []),
        Close(),
        Me ! {self(), lists:nth(length(Times) div 2 + 1, lists:sort(Times)) / 1000}
    end, [monitor, {message_queue_data, off_heap}]),
    receive
        {Process, Median} ->
            receive {'DOWN', Monitor, process, Process, _} -> Median end;
        {'DOWN', Monitor, process, Process, Reason} -> exit(Reason)
    end.

times(_Echo, 0, _Until, Times) -> Times;
times(Echo, Rounds, Until, Times) ->
    Before = erlang:monotonic_time(nanosecond),
    Echo(),
    case erlang:monotonic_time(nanosecond) of
        After when After > Until -> [After - Before | Times];
        After -> times(Echo, Rounds - 1, Until, [After - Before | Times])
    end.

%% inet_backend must come first.
tcp(Backend) ->
    {ok, Listener} = gen_tcp:listen(0, [binary, {active, false}, {nodelay, true}, {ip, {127, 0, 0, 1}}]),
    {ok, Port} = inet:port(Listener),
    spawn_link(fun() ->
        {ok, Socket} = gen_tcp:accept(Listener),
        echo(Socket)
    end),
    {ok, Socket} = gen_tcp:connect({127, 0, 0, 1}, Port, Backend ++ [binary, {active, false}, {nodelay, true}]),
    Bytes = binary:copy(<<"x">>, 64),
    {fun() ->
         ok = gen_tcp:send(Socket, Bytes),
         {ok, Bytes} = gen_tcp:recv(Socket, 64)
     end, fun() -> gen_tcp:close(Socket) end}.

echo(Socket) ->
    case gen_tcp:recv(Socket, 64) of
        {ok, Bytes} ->
            ok = gen_tcp:send(Socket, Bytes),
            echo(Socket);
        {error, closed} -> ok
    end.

sockets() ->
    {ok, Listener} = gen_tcp:listen(0, [binary, {active, false}, {nodelay, true}, {ip, {127, 0, 0, 1}}]),
    {ok, Port} = inet:port(Listener),
    spawn_link(fun() ->
        {ok, Socket} = gen_tcp:accept(Listener),
        echo(Socket)
    end),
    {ok, Socket} = socket:open(inet, stream, tcp),
    ok = socket:connect(Socket, #{family => inet, addr => {127, 0, 0, 1}, port => Port}),
    ok = socket:setopt(Socket, {tcp, nodelay}, true),
    Bytes = binary:copy(<<"x">>, 64),
    {fun() ->
         ok = socket:send(Socket, Bytes),
         {ok, Bytes} = socket:recv(Socket, 64)
     end, fun() -> socket:close(Socket) end}.

calls() ->
    Name = "net-bench-" ++ os:getpid() ++ "-" ++ integer_to_list(erlang:unique_integer([positive])),
    {ok, Service} = pelton_service:start_link(Name, ?MODULE, [], []),
    {ok, Client} = pelton:open(client, Name, [{timeout, 5000}]),
    Bytes = binary:copy(<<"x">>, 64),
    {fun() -> {ok, Bytes} = pelton:call(Client, Bytes, 10000) end,
     fun() ->
         ok = pelton:close(Client),
         unlink(Service),
         gen_server:stop(Service)
     end}.

init([]) -> {ok, none}.
handle_request(Bytes, _Responder, State) -> {reply, Bytes, State}.
