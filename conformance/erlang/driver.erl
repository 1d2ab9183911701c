%% The conformance driver in Erlang. ../README.md has the command line and the messages.
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
run([Verb | Arguments]) when Verb =:= "send"; Verb =:= "recv"; Verb =:= "call"; Verb =:= "serve"; Verb =:= "gather" ->
    case Arguments of
        [Name, Count, Size] ->
            ok = command(Verb, Name, list_to_integer(Count), list_to_integer(Size)),
            Unit = case lists:member(Verb, ["call", "serve"]) of true -> "calls"; false -> "messages" end,
            io:format("ok ~s ~s ~s~n", [Verb, Count, Unit]),
            0;
        _ ->
            io:format(standard_error, "usage: driver ~s NAME COUNT SIZE~n", [Verb]),
            2
    end;
run(Arguments) ->
    io:format("unsupported ~s: this driver does not have it~n", [lists:append(lists:sublist(Arguments, 1))]),
    3.

command("send", Name, Count, Size) ->
    {ok, Sender} = pelton:open(sender, Name, [{timeout, ?TIMEOUT}]),
    lists:foreach(fun(I) -> ok = pelton:send(Sender, message(I, Size), ?TIMEOUT) end, lists:seq(0, Count - 1)),
    %% Erlang's senders have no wait for the release. The receiver gets everything all the same, then the end.
    pelton:close(Sender);
command("recv", Name, Count, Size) ->
    {ok, Receiver} = pelton:open(receiver, Name),
    lists:foreach(fun(I) -> {ok, Found} = pelton:recv(Receiver, ?TIMEOUT), check(I, Size, Found) end, lists:seq(0, Count - 1)),
    %% A receiver of Erlang's gathers any number of senders, so that the end of one is not the receiver's.
    {error, timeout} = pelton:recv(Receiver, 0),
    pelton:close(Receiver);
command("gather", Name, Count, Size) ->
    {ok, Receiver} = pelton:open(receiver, Name),
    lists:foreach(fun(_) ->
                      {ok, Found} = pelton:recv(Receiver, ?TIMEOUT),
                      ok = file:write(standard_io, [binary:part(Found, 0, min(Size, byte_size(Found))), $\n])
                  end, lists:seq(1, Count)),
    pelton:close(Receiver);
command("call", Name, Count, Size) ->
    {ok, Client} = pelton:open(client, Name, [{timeout, ?TIMEOUT}]),
    lists:foreach(fun(I) -> {ok, Found} = pelton:call(Client, message(I, Size), ?TIMEOUT), check(I, Size, Found) end, lists:seq(0, Count - 1)),
    pelton:close(Client);
command("serve", Name, Count, _Size) ->
    {ok, Service} = pelton:open(service, Name, [{active, true}]),
    lists:foreach(fun(_) ->
                      %% The reply to a client that has gone is an error, which changes nothing here.
                      receive {pelton_request, Service, Responder, Request} -> pelton:reply(Responder, Request)
                      after ?TIMEOUT -> error(no_request)
                      end
                  end, lists:seq(1, Count)),
    pelton:close(Service).

message(I, Size) -> << <<($a + (I + J) rem 26)>> || J <- lists:seq(0, Size - 1) >>.

check(I, Size, Found) ->
    Found =:= message(I, Size) orelse error({wrong_message, I, Found}).
