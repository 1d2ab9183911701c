%% A server over gen_tcp with {active, N}: one process for each connection. The handler is a function of method, target,
%% headers and body; pelton_http_cowboy makes one of a module written for cowboy.
%%   {ok, Server} = pelton_http_server:start(0, fun my_handler:handle/4).
-module(pelton_http_server).
-export([start/2, stop/1]).
-export_type([handler/0]).
-type handler() :: fun((Method :: binary(), Target :: binary(), pelton_http:headers(), Body :: iodata()) ->
                       {100..999, [{iodata(), iodata()}], iodata()}).

start(Port, Handler) when is_function(Handler, 4) ->
    {ok, Listener} = gen_tcp:listen(Port, [binary, {active, false}, {reuseaddr, true}, {nodelay, true},
                                           {ip, {127, 0, 0, 1}}, {backlog, 1024}]),
    Acceptor = spawn(fun() -> accept(Listener, Handler) end),
    ok = gen_tcp:controlling_process(Listener, Acceptor),
    {ok, Number} = inet:port(Listener),
    {ok, {Acceptor, Listener, Number}}.

stop({Acceptor, Listener, _Port}) ->
    exit(Acceptor, kill),
    gen_tcp:close(Listener).

accept(Listener, Handler) ->
    {ok, Socket} = gen_tcp:accept(Listener),
    Process = spawn(fun() -> receive {start, Socket} -> serve(Socket, Handler) end end),
    ok = gen_tcp:controlling_process(Socket, Process),
    Process ! {start, Socket},
    accept(Listener, Handler).

serve(Socket, Handler) ->
    ok = inet:setopts(Socket, [{active, 100}]),
    loop(Socket, Handler, pelton_http:new(request), none).

%% Request is the one whose body is read: {Method, Target, Headers, reversed Body}.
loop(Socket, Handler, Parser, Request) ->
    receive
        {tcp, Socket, Bytes} ->
            case pelton_http:feed(Parser, Bytes) of
                {ok, Events} -> continue(Socket, Handler, Parser, events(Events, Socket, Handler, Request));
                {error, Reason, Events} ->
                    _ = events(Events, Socket, Handler, Request),
                    _ = gen_tcp:send(Socket, response(400, [{"connection", "close"}],
                                                      [pelton_http:format_error(Reason), "\n"])),
                    gen_tcp:close(Socket)
            end;
        {tcp_passive, Socket} ->
            ok = inet:setopts(Socket, [{active, 100}]),
            loop(Socket, Handler, Parser, Request);
        {tcp_closed, Socket} -> ok;
        {tcp_error, Socket, _Reason} -> gen_tcp:close(Socket)
    end.

continue(Socket, _Handler, _Parser, close) -> gen_tcp:close(Socket);
continue(Socket, Handler, Parser, Request) -> loop(Socket, Handler, Parser, Request).

events([{request, Method, Target, _Version, Headers} | Rest], Socket, Handler, none) ->
    events(Rest, Socket, Handler, {Method, Target, Headers, []});
events([{body, Bytes} | Rest], Socket, Handler, {Method, Target, Headers, Body}) ->
    events(Rest, Socket, Handler, {Method, Target, Headers, [Bytes | Body]});
events([{done, _Trailers, KeepAlive} | Rest], Socket, Handler, {Method, Target, Headers, Body}) ->
    {Status, Fields, Text} = Handler(Method, Target, Headers, lists:reverse(Body)),
    Sent = gen_tcp:send(Socket, response(Status, [{"connection", "close"} || not KeepAlive] ++ Fields, Text)),
    case Sent of
        ok when KeepAlive -> events(Rest, Socket, Handler, none);
        _ -> close
    end;
%% No other protocol is spoken here: a client that asks for one and sends on at once is not served further.
events([{upgrade, <<>>}], _Socket, _Handler, none) -> none;
events([{upgrade, _Rest}], _Socket, _Handler, none) -> close;
events([], _Socket, _Handler, Request) -> Request.

response(Status, Headers, Body) ->
    ["HTTP/1.1 ", integer_to_list(Status), " \r\ncontent-length: ", integer_to_list(iolist_size(Body)), "\r\n",
     [[Name, ": ", Value, "\r\n"] || {Name, Value} <- Headers], "\r\n", Body].
