%% @doc Messages and calls between this node and other processes of the machine, in any language that pelton has.
%%
%% {@link open/3} opens an endpoint: a sender, a receiver, a client, a service, a listener, a publisher or a subscriber.
%% As a port, it lives until
%% {@link close/1}, or until its owner ends: the process that opened it, or that {@link controlling_process/2} made the
%% owner. Any process may use it. Data is `iodata()'; received data is a binary.
%%
%% A receiver is passive at first: use {@link recv/2}. With `{active, true | once | N}' its messages are sent to the
%% owner:
%% <ul>
%% <li>`{pelton, Receiver, Bytes}': a message; `{pelton, Receiver, Bytes, Traceparent}' with the option
%% `{traceparents, true}'.</li>
%% <li>`{pelton_delivery, Subscriber, Bytes, Number, Missed}': a message of a publisher, as {@link recv_delivery/2}.
%% </li>
%% <li>`{pelton_request, Service, Responder, Bytes}': a request; `Responder' is `undefined' for a {@link cast/2}.</li>
%% <li>`{pelton_passive, Endpoint}': after N of them.</li>
%% <li>`{pelton_closed, Endpoint, Reason}': the end, or an error; then it is passive.</li>
%% </ul>
%%
%% Functions return `{error, Reason}', where `Reason' is an atom, or `{Atom, Detail}': see {@type reason()} and {@type
%% open_error()}. {@link format_error/1} has the text. A wrong argument is an exception.
%%
%% No function blocks a scheduler. `recv' and `call' busy-poll for some microseconds if that was useful lately, and
%% charge the process for it; then the process waits for a message of the runtime.
-module(pelton).
-export([open/2, open/3, accept/1, accept/2, close/1, send/2, send/3, wait_released/1, wait_released/2, recv/1, recv/2,
         resume/1, resume/2, setopts/2, controlling_process/2, info/1, call/2, call/3, stream/4, stream/5, cast/2, drain/1,
         reply/2, part/2, part/3, finish/1, fail/3, is_cancelled/1, traceparent/1, recv_delivery/1, recv_delivery/2,
         wait_subscribers/2, wait_subscribers/3, subscribers/1, remove_subscription/2, format_error/1, set_log/1]).
-export_type([endpoint/0, responder/0, kind/0, option/0, send_option/0, reason/0, open_error/0]).

-opaque endpoint() :: pelton_nif:endpoint().
%% A sender, a receiver, a client, a service, a listener, a publisher or a subscriber.
-opaque responder() :: pelton_nif:responder().
%% It replies to one request. If it is garbage-collected without a reply, the call fails with `abandoned'.
-type kind() :: sender | receiver | client | service | listener | publisher | subscriber.
-type option() :: {capacity, pos_integer()} | {message_bytes_max, pos_integer()} | {memory_bytes_max, pos_integer()} |
                  {call_bytes_max, pos_integer()} | {senders_max, pos_integer()} | {clients_max, pos_integer()} |
                  {lanes, pos_integer()} | {create, boolean()} | {traced, boolean()} | {timeout, timeout()} |
                  {history, pos_integer()} | {hold_max, non_neg_integer()} | {policy, gate | lag | latest} |
                  {lag_after, pos_integer()} | {slack, pos_integer()} |
                  {start_from, now | oldest | pos_integer()} | {durable, iodata()} | {mode, pos_integer()} |
                  active_option().
-type active_option() :: {active, boolean() | once | integer()} | {messages, copy | hold} |
                         {traceparents, boolean()}.
-type send_option() :: {timeout, timeout()} | {traceparent, iodata() | undefined}.
%% `traceparent' is the text of the header of W3C Trace Context with the caller's span: its position in a distributed
%% trace, for the receiver or the service. A text that is not valid is as none. A message has one only on a channel with
%% the option `traced', which a publisher does not have.
-type reason() :: timeout | closed | peer_died | full | atom() | {failed, {Code :: non_neg_integer(), binary()}} |
                  {lost, peer_died | closed | corrupt | not_begun | atom()}.
%% An atom is a code of `pelton.h' in small letters, or a POSIX error. `failed': the service failed the call, with a
%% code and bytes that it chose. `lost': the service has ended. With `not_begun' it has not begun the call, which may
%% be repeated.
-type open_error() :: {atom(), Detail :: binary()}.
%% The detail says what was found, what was wanted, and what to do.

%% A dirty scheduler copies what is larger: some 50 us.
-define(COPY_MAX, 262144).

%% @equiv open(Kind, Name, [])
-spec open(kind(), iodata()) -> {ok, endpoint()} | {error, open_error()}.
open(Kind, Name) ->
    open(Kind, Name, []).

%% @doc Opens an endpoint, and makes the calling process its owner. `Name' is a short name, `"unix:PATH"', or, for
%% senders, receivers, publishers and subscribers, `"path:DIR"'. The file README.md has a table of the options.
%%
%% A `receiver' accepts all senders of the name, and a `service' all clients; neither waits for one. A `sender' or
%% `client' waits for a listener until the `timeout', in milliseconds. The default is 0: it fails immediately with
%% `no_listener'. No thread waits: the process gets a message once the endpoint is open. If the process ends first,
%% the open is cancelled. A `subscriber' waits in the same way, for the publisher; in a directory for that, and for its
%% durable name. A `publisher' of a directory waits while another one is alive. A `listener' is for receivers of one
%% sender each: {@link accept/2}.
%%
%% An option that does not apply is an exception, `{bad_option, Option}'.
-spec open(kind(), iodata(), [option()]) -> {ok, endpoint()} | {error, open_error()}.
open(Kind, Name, Options) ->
    Bytes = iolist_to_binary(Name),
    IsPath = case Bytes of <<"path:", _/binary>> -> true; _ -> false end,
    [is_option(Kind, IsPath, Option) orelse error({bad_option, Option}, [Kind, Name, Options]) || Option <- Options],
    Get = fun(Key) -> proplists:get_value(Key, Options, 0) end,
    PeersMax = lists:max([Get(lanes), Get(senders_max), Get(clients_max)]),
    Flag = fun(Key) -> case Get(Key) of true -> 1; _ -> 0 end end,
    Timeout = case Get(timeout) of infinity -> -1; Milliseconds -> Milliseconds end,
    Policy = case Get(policy) of lag -> 1; latest -> 2; _ -> 0 end,
    %% PELTON_OLDEST.
    From = case Get(start_from) of oldest -> 16#ffffffffffffffff; now -> 0; Messages -> Messages end,
    Durable = case proplists:get_value(durable, Options) of
                  undefined -> undefined;
                  Text -> iolist_to_binary([Text, 0])
              end,
    Numbers = {Get(capacity), Get(message_bytes_max), Get(memory_bytes_max), Get(call_bytes_max), PeersMax,
               Flag(create), Flag(traced), Get(history), Policy, Get(lag_after), Get(slack), From, Get(mode),
               proplists:get_value(hold_max, Options, -1), Timeout, Durable},
    Opened = open_until(Kind, <<Bytes/binary, 0>>, Numbers, deadline(proplists:get_value(timeout, Options, 0))),
    case Opened of
        {ok, Endpoint} when Kind =:= receiver; Kind =:= service; Kind =:= subscriber ->
            case set(Endpoint, Options ++ [{active, false}]) of
                ok -> Opened;
                %% The application was stopped at this moment.
                {error, Reason} -> {error, {Reason, <<>>}}
            end;
        _ -> Opened
    end.

open_until(Kind, Name, Numbers, Deadline) ->
    Ref = make_ref(),
    case pelton_nif:endpoint_open(number(Kind), Name, Numbers, Ref) of
        pending -> receive {pelton, Ref, Result} -> Result end;
        %% No thread waits for the end of another publisher, or of a subscriber beyond its limit.
        {error, {Reason, _}} = Error when Kind =:= publisher, Reason =:= role_taken orelse Reason =:= refused ->
            case left(Deadline) of
                0 -> Error;
                _ -> receive after 10 -> open_until(Kind, Name, Numbers, Deadline) end
            end;
        Immediate -> Immediate
    end.

number(sender) -> 0;
number(receiver) -> 1;
number(client) -> 2;
number(service) -> 3;
number(listener) -> 4;
number(publisher) -> 5;
number(subscriber) -> 6.

is_option(Kind, IsPath, {Key, Value}) -> applies(Key, Kind, IsPath) andalso is_value(Key, Value);
is_option(_, _, _) -> false.

applies(capacity, _, _) -> true;
applies(message_bytes_max, Kind, IsPath) -> Kind =/= subscriber orelse not IsPath;
applies(memory_bytes_max, Kind, _) -> Kind =/= sender andalso Kind =/= publisher andalso Kind =/= subscriber;
applies(history, Kind, _) -> Kind =:= publisher;
applies(hold_max, Kind, _) -> Kind =:= publisher;
applies(durable, Kind, IsPath) -> Kind =:= subscriber andalso IsPath;
applies(mode, Kind, IsPath) -> IsPath andalso (Kind =:= publisher orelse Kind =:= subscriber);
applies(Key, Kind, _) when Key =:= policy; Key =:= lag_after; Key =:= slack; Key =:= start_from ->
    Kind =:= subscriber;
applies(timeout, subscriber, _) -> true;
applies(timeout, publisher, IsPath) -> IsPath;
applies(active, subscriber, _) -> true;
applies(call_bytes_max, Kind, _) -> Kind =:= client orelse Kind =:= service;
applies(senders_max, Kind, IsPath) -> Kind =:= receiver andalso not IsPath;
applies(clients_max, Kind, _) -> Kind =:= service;
applies(lanes, Kind, IsPath) -> IsPath andalso (Kind =:= sender orelse Kind =:= receiver);
applies(create, Kind, IsPath) -> applies(lanes, Kind, IsPath);
applies(traced, Kind, IsPath) -> Kind =:= sender orelse (Kind =:= receiver andalso IsPath);
applies(timeout, Kind, IsPath) -> Kind =:= sender orelse Kind =:= client orelse (Kind =:= receiver andalso IsPath);
applies(active, Kind, _) -> Kind =:= receiver orelse Kind =:= service;
applies(messages, Kind, _) -> Kind =:= receiver;
applies(traceparents, Kind, _) -> Kind =:= receiver;
applies(_, _, _) -> false.

is_value(timeout, Value) -> Value =:= infinity orelse (is_integer(Value) andalso Value >= 0);
is_value(Key, Value) when Key =:= create; Key =:= traced; Key =:= traceparents -> is_boolean(Value);
is_value(active, Value) -> is_boolean(Value) orelse Value =:= once orelse (is_integer(Value) andalso Value > 0);
is_value(policy, Value) -> lists:member(Value, [gate, lag, latest]);
is_value(start_from, Value) -> Value =:= now orelse Value =:= oldest orelse (is_integer(Value) andalso Value > 0);
%% Permission bits, and numbers that C has in 32 bits.
is_value(mode, Value) -> is_integer(Value) andalso Value > 0 andalso Value =< 8#777;
is_value(Key, Value) when Key =:= lanes; Key =:= senders_max; Key =:= clients_max ->
    is_integer(Value) andalso Value > 0 andalso Value < 1 bsl 32;
is_value(hold_max, Value) -> is_integer(Value) andalso Value >= 0;
is_value(durable, Value) ->
    try binary:match(iolist_to_binary(Value), <<0>>) =:= nomatch catch error:badarg -> false end;
is_value(messages, Value) -> Value =:= copy orelse Value =:= hold;
is_value(_, Value) -> is_integer(Value) andalso Value > 0.

%% @equiv accept(Listener, infinity)
-spec accept(endpoint()) -> {ok, endpoint()} | {error, open_error() | reason()}.
accept(Listener) ->
    accept(Listener, infinity).

%% @doc Waits until a sender connects to the listener's name, until the timeout in milliseconds. Returns the receiver
%% of that one sender, whose owner is the calling process. Unlike a receiver that {@link open/3} opens by name, it ends
%% with its sender, as `closed' or `peer_died', and {@link resume/2} is possible: it takes the next sender of the name,
%% as an `accept' does. Any number of processes may accept. A sender that connects and is slow can delay the timeout by
%% half a second.
%%
%% The listener may be closed at any time. Receivers that it accepted remain, and so does the name, for their {@link
%% resume/2}: until the last of them is closed, another listener of the name fails with `in_use', and no sender is
%% accepted. So let a process that outlives the receivers own the listener.
-spec accept(endpoint(), timeout()) -> {ok, endpoint()} | {error, open_error() | reason()}.
accept(Listener, Timeout) ->
    accept_until(Listener, deadline(Timeout)).

accept_until(Listener, Deadline) ->
    Ref = make_ref(),
    case pelton_nif:endpoint_accept(Listener, Ref) of
        pending ->
            receive {pelton, Ref, ready} -> accept_until(Listener, Deadline)
            after left(Deadline) -> cancel(Listener, Ref), {error, timeout}
            end;
        %% Another process accepts, or a sender has not finished the handshake.
        Later when Later =:= busy; Later =:= {error, in_operation} ->
            again(Deadline, fun() -> accept_until(Listener, Deadline) end);
        Result -> Result
    end.

%% @doc Closes the endpoint. Does not wait. Processes that wait with it get `{error, closed}', and so does a second
%% close. While {@link pelton_file:recv/4}, {@link pelton_file:send/5}, {@link wait_released/2} or {@link resume/2}
%% uses it, and while binaries are in its memory (`{messages, hold}'), the name remains in use.
-spec close(endpoint()) -> ok | {error, reason()}.
close(Endpoint) ->
    case pelton_nif:endpoint_close(Endpoint) of
        busy -> erlang:yield(), close(Endpoint);
        Result -> Result
    end.

%% @equiv send(Sender, Data, infinity)
-spec send(endpoint(), iodata()) -> ok | {error, reason()}.
send(Sender, Data) ->
    send(Sender, Data, infinity).

%% @doc Sends a message of a sender, or of a publisher to all its subscribers. Waits for free space, until the timeout
%% in milliseconds: of a publisher, while a subscriber that gates holds the lane full. After an error nothing was sent:
%% `timeout'; `too_large'; `closed' or `peer_died': the receiver has gone; `in_operation': {@link pelton_file:send/5}
%% or {@link wait_released/2} uses the sender. Instead of the timeout it takes a list: {@type send_option()}.
-spec send(endpoint(), iodata(), timeout() | [send_option()]) -> ok | {error, reason()}.
send(Sender, Data, Options) ->
    {Timeout, Traceparent} = send_options(Options),
    Bytes = flat(Data),
    waits(Sender, deadline(Timeout), fun(Ref) ->
        if byte_size(Bytes) =< ?COPY_MAX -> pelton_nif:endpoint_send(Sender, Bytes, Traceparent, Ref);
           true -> pelton_nif:endpoint_send_large(Sender, Bytes, Traceparent, Ref)
        end
    end).

%% The timeout, and the traceparent as the NIF takes it.
send_options(Options) when is_list(Options) ->
    [is_send_option(Option) orelse error({bad_option, Option}) || Option <- Options],
    Traceparent = case proplists:get_value(traceparent, Options, undefined) of
                      undefined -> undefined;
                      Text -> try iolist_to_binary([Text, 0]) catch error:badarg -> undefined end
                  end,
    {proplists:get_value(timeout, Options, infinity), Traceparent};
send_options(Timeout) -> {Timeout, undefined}.

is_send_option({timeout, Value}) -> is_value(timeout, Value);
is_send_option({traceparent, Text}) -> Text =:= undefined orelse is_binary(Text) orelse is_list(Text);
is_send_option(_) -> false.

%% @equiv wait_released(Sender, infinity)
-spec wait_released(endpoint()) -> ok | {error, reason()}.
wait_released(Sender) ->
    wait_released(Sender, infinity).

%% @doc Waits until the receiver, or each subscriber that gates, has released every message, until the timeout in
%% milliseconds. Errors: `timeout';
%% `closed' or `peer_died': the receiver has gone before that. It occupies a dirty I/O scheduler. Other processes
%% that use the sender meanwhile get `in_operation'.
-spec wait_released(endpoint(), timeout()) -> ok | {error, reason()}.
wait_released(Sender, Timeout) ->
    Wait = fun(Milliseconds) -> pelton_nif:endpoint_wait_released(Sender, Milliseconds) end,
    wait_until(Wait, deadline(Timeout), false).

%% @equiv resume(Endpoint, infinity)
-spec resume(endpoint()) -> ok | {error, reason()}.
resume(Endpoint) ->
    resume(Endpoint, infinity).

%% @doc After `peer_died' or `closed': waits for a successor of the peer, until the timeout in milliseconds. A sender
%% passes everything that was not released on to the new receiver. A receiver continues with the new sender, and a
%% subscriber with the new publisher, whose messages count from 1; in a directory they continue. Errors:
%% `timeout'; `refused': the peer is alive, or the channel has no successors, as that of a receiver which {@link open/3}
%% opened by name; `einval': the receiver is active. It can be tried again. It occupies a dirty I/O scheduler, as {@link
%% wait_released/2}.
-spec resume(endpoint(), timeout()) -> ok | {error, reason()}.
resume(Endpoint, Timeout) ->
    Wait = fun(Milliseconds) -> pelton_nif:endpoint_resume(Endpoint, Milliseconds) end,
    wait_until(Wait, deadline(Timeout), false).

%% In slices, so that a close, or the end of the process, ends the wait. A slice has time for a handshake.
-define(SLICE_MS, 100).
wait_until(Wait, Deadline, HasBegun) ->
    Left = case left(Deadline) of infinity -> ?SLICE_MS; Milliseconds -> min(Milliseconds, ?SLICE_MS) end,
    case Wait(Left) of
        later when Left < ?SLICE_MS -> {error, timeout};
        later -> wait_until(Wait, Deadline, true);
        busy -> erlang:yield(), wait_until(Wait, Deadline, HasBegun);
        %% Another process began to use the endpoint between two slices.
        {error, in_operation} when HasBegun -> again(Deadline, fun() -> wait_until(Wait, Deadline, true) end);
        Result -> Result
    end.

%% @equiv recv(Receiver, infinity)
-spec recv(endpoint()) -> {ok, binary()} | {ok, binary(), binary() | undefined} | {error, reason()}.
recv(Receiver) ->
    recv(Receiver, infinity).

%% @doc Receives the next message of a passive receiver. Waits for one, until the timeout in milliseconds. Errors:
%% `timeout'; `einval': the receiver is active; `closed' or `peer_died': the one sender has gone, and every message was
%% received (of a path, and after {@link accept/2}); `in_operation': {@link pelton_file:recv/4} uses the receiver.
%% With the option `{traceparents, true}' it returns `{ok, Bytes, Traceparent}': the text that {@link send/3} got, or
%% `undefined'.
-spec recv(endpoint(), timeout()) -> {ok, binary()} | {ok, binary(), binary() | undefined} | {error, reason()}.
recv(Receiver, Timeout) ->
    waits(Receiver, deadline(Timeout), fun(Ref) -> pelton_nif:endpoint_receive(Receiver, Ref) end).

%% @equiv recv_delivery(Subscriber, infinity)
-spec recv_delivery(endpoint()) -> {ok, binary(), pos_integer(), non_neg_integer()} | {error, reason()}.
recv_delivery(Subscriber) ->
    recv_delivery(Subscriber, infinity).

%% @doc Receives the next message of a passive subscriber: `{ok, Bytes, Number, Missed}'. `Missed' is how many messages
%% the subscriber has missed directly before it. Each publisher counts its messages from 1; in a directory it continues
%% its predecessor's count. Waits for one, until the timeout in milliseconds. Errors: `timeout'; `einval': the
%% subscriber is active; `closed' or `peer_died': the publisher has gone, and every message was received: {@link
%% resume/2}; `in_operation'.
-spec recv_delivery(endpoint(), timeout()) ->
          {ok, binary(), pos_integer(), non_neg_integer()} | {error, reason()}.
recv_delivery(Subscriber, Timeout) ->
    waits(Subscriber, deadline(Timeout), fun(Ref) -> pelton_nif:endpoint_receive_delivery(Subscriber, Ref) end).

%% @equiv wait_subscribers(Publisher, Count, infinity)
-spec wait_subscribers(endpoint(), non_neg_integer()) -> ok | {error, reason()}.
wait_subscribers(Publisher, Count) ->
    wait_subscribers(Publisher, Count, infinity).

%% @doc Waits until the publisher has that many subscribers, until the timeout in milliseconds. Durable ones that no
%% process uses count. Errors: `timeout'; `in_operation'.
-spec wait_subscribers(endpoint(), non_neg_integer(), timeout()) -> ok | {error, reason()}.
wait_subscribers(Publisher, Count, Timeout) ->
    waits(Publisher, deadline(Timeout), fun(Ref) -> pelton_nif:endpoint_wait_subscribers(Publisher, Count, Ref) end).

%% @doc Returns the subscribers that have joined, and how far each is behind: maps with the fields of
%% `pelton_subscriber_state' in `pelton.h'. `policy' is an atom, `lags' a boolean, `durable' a binary or `undefined'. A
%% durable one that no process uses has the `pid' 0. Does not wait.
-spec subscribers(endpoint()) -> [#{atom() => term()}] | {error, reason()}.
subscribers(Publisher) ->
    case pelton_nif:endpoint_subscribers(Publisher) of
        busy -> erlang:yield(), subscribers(Publisher);
        Result -> Result
    end.

%% @doc Removes the durable subscription of a directory, `"path:DIR"', which no process uses: it holds the publisher up
%% no more. Waits for at most 200 ms, while another process opens or removes one there; then it fails with `timeout'.
%% Errors: `refused': there is none of the name; `role_taken': a process uses it; `no_channel'.
-spec remove_subscription(iodata(), iodata()) -> ok | {error, open_error()}.
remove_subscription(Name, Durable) ->
    pelton_nif:subscription_remove(iolist_to_binary([Name, 0]), iolist_to_binary([Durable, 0])).

%% @doc Sets how messages are delivered. As in `inet:setopts/2', an integer is added to the number of messages that
%% are still to be sent to the owner; once that is 0 or less, the endpoint is passive, and `{pelton_passive,
%% Endpoint}' is sent. Options that are not in the list remain unchanged. `messages' and `traceparents' are of
%% receivers: of another endpoint they are an exception, `badarg'.
-spec setopts(endpoint(), [active_option()]) -> ok | {error, reason()}.
setopts(Endpoint, Options) ->
    [is_settable(Option) orelse error({bad_option, Option}, [Endpoint, Options]) || Option <- Options],
    set(Endpoint, Options).

is_settable({active, Value}) when is_integer(Value) -> true;
is_settable({Key, Value}) when Key =:= active; Key =:= messages; Key =:= traceparents -> is_value(Key, Value);
is_settable(_) -> false.

holds(Options) ->
    case proplists:get_value(messages, Options, undefined) of
        hold -> true;
        copy -> false;
        undefined -> undefined
    end.

set(Endpoint, Options) ->
    Get = fun(Key) -> proplists:get_value(Key, Options, undefined) end,
    case pelton_nif:endpoint_set(Endpoint, Get(active), holds(Options), Get(traceparents)) of
        busy -> erlang:yield(), set(Endpoint, Options);
        Result -> Result
    end.

%% @doc Makes another process the owner. Messages that were sent to the old owner remain there. Errors: `not_owner': the
%% calling process is not the owner; `noproc': the new one has ended; `closed'.
-spec controlling_process(endpoint(), pid()) -> ok | {error, reason()}.
controlling_process(Endpoint, Pid) ->
    case pelton_nif:endpoint_give(Endpoint, Pid) of
        busy -> erlang:yield(), controlling_process(Endpoint, Pid);
        Result -> Result
    end.

%% @doc Returns the figures of an endpoint that is no listener, for metrics: the fields of `pelton_sender_info' and its
%% like in `pelton.h', so of a sender or a receiver `messages', `bytes', `waits', `sleeps' and `wakes_sent' since its
%% creation. Sizes are in bytes. `peer_pid' and `peer_uid' are there while a peer is connected. Does not wait. Errors:
%% `closed'; `in_operation': {@link wait_released/2}, {@link resume/2} or an operation on a file uses the endpoint.
%%
%% ```
%% {ok, Sender} = pelton:open(sender, "events", [{timeout, 5000}]),
%% #{messages := Messages, unreleased := Waiting} = pelton:info(Sender).
%% '''
-spec info(endpoint()) -> #{atom() => non_neg_integer()} | {error, reason()}.
info(Endpoint) ->
    case pelton_nif:endpoint_info(Endpoint) of
        busy -> erlang:yield(), info(Endpoint);
        Result -> Result
    end.

%% @equiv call(Client, Request, infinity)
-spec call(endpoint(), iodata()) -> {ok, binary()} | {error, reason()}.
call(Client, Request) ->
    call(Client, Request, infinity).

%% @doc Calls a service, and waits for its reply, until the timeout in milliseconds. A reply in parts is assembled.
%% Any number of processes may call through one client. Errors: `timeout': the call is cancelled; `{failed, {Code,
%% Bytes}}' and `{lost, Reason}': see {@type reason()}; `abandoned': the service dropped the request; `no_listener':
%% no process serves the name now; `too_large'. Instead of the timeout it takes a list: {@type send_option()}.
-spec call(endpoint(), iodata(), timeout() | [send_option()]) -> {ok, binary()} | {error, reason()}.
call(Client, Request, Options) ->
    {Timeout, Traceparent} = send_options(Options),
    call_until(Client, flat(Request), Traceparent, deadline(Timeout)).

call_until(Client, Request, Traceparent, Deadline) ->
    Ref = make_ref(),
    Called = if byte_size(Request) =< ?COPY_MAX -> pelton_nif:endpoint_call(Client, Request, Traceparent, Ref);
                true -> pelton_nif:endpoint_call_large(Client, Request, Traceparent, Ref)
             end,
    case Called of
        {ok, _} = Reply -> Reply;
        busy -> erlang:yield(), call_until(Client, Request, Traceparent, Deadline);
        {error, _} = Error -> Error;
        _ ->
            receive
                {pelton, Ref, ready} -> call_until(Client, Request, Traceparent, Deadline);
                {pelton, Ref, Result} -> Result
            after left(Deadline) -> cancel(Client, Ref), {error, timeout}
            end
    end.

%% @equiv stream(Client, Request, Fun, Acc, infinity)
-spec stream(endpoint(), iodata(), fun((binary(), Acc) -> Acc), Acc) -> {ok, Acc} | {error, reason()}.
stream(Client, Request, Fun, Acc) ->
    stream(Client, Request, Fun, Acc, infinity).

%% @doc Calls a service, and calls `Fun(Part, Acc)' with each part of its reply, in order, as it arrives. A reply in
%% one piece is one part. The timeout in milliseconds is for the whole call. Parts that `Fun' has not taken yet wait
%% in the mailbox, without a limit. Errors: as {@link call/3}. If `Fun' fails, the call is cancelled. Instead of the
%% timeout it takes a list: {@type send_option()}.
-spec stream(endpoint(), iodata(), fun((binary(), Acc) -> Acc), Acc, timeout() | [send_option()]) ->
          {ok, Acc} | {error, reason()}.
stream(Client, Request, Fun, Acc, Options) ->
    {Timeout, Traceparent} = send_options(Options),
    stream_until(Client, {flat(Request), Traceparent}, Fun, Acc, deadline(Timeout)).

stream_until(Client, {Bytes, Traceparent} = Request, Fun, Acc, Deadline) ->
    Ref = make_ref(),
    Called = if byte_size(Bytes) =< ?COPY_MAX -> pelton_nif:endpoint_stream(Client, Bytes, Traceparent, Ref);
                true -> pelton_nif:endpoint_stream_large(Client, Bytes, Traceparent, Ref)
             end,
    case Called of
        waits ->
            try parts(Ref, Fun, Acc, Deadline)
            after cancel(Client, Ref)
            end;
        pending ->
            receive {pelton, Ref, ready} -> stream_until(Client, Request, Fun, Acc, Deadline)
            after left(Deadline) -> cancel(Client, Ref), {error, timeout}
            end;
        busy -> erlang:yield(), stream_until(Client, Request, Fun, Acc, Deadline);
        Error -> Error
    end.

parts(Ref, Fun, Acc, Deadline) ->
    receive
        {pelton, Ref, {part, Bytes}} -> parts(Ref, Fun, Fun(Bytes, Acc), Deadline);
        {pelton, Ref, {ok, Bytes}} -> {ok, Fun(Bytes, Acc)};
        {pelton, Ref, ok} -> {ok, Acc};
        {pelton, Ref, Error} -> Error
    after left(Deadline) -> {error, timeout}
    end.

%% @doc Sends a message that the service does not reply to. Never waits. After an error nothing was sent: `full':
%% there is no free space; `no_listener', `closed' or `peer_died': the service has gone; `too_large'. `ok' means that
%% the message is in the channel, not that the service has received it.
-spec cast(endpoint(), iodata()) -> ok | {error, reason()}.
cast(Client, Data) ->
    Bytes = flat(Data),
    Sent = if byte_size(Bytes) =< ?COPY_MAX -> pelton_nif:endpoint_cast(Client, Bytes);
              true -> pelton_nif:endpoint_cast_large(Client, Bytes)
           end,
    case Sent of
        busy -> erlang:yield(), cast(Client, Bytes);
        Result -> Result
    end.

%% @doc Drains the service: requests that were received get their replies, later ones go to another process of the
%% name. Does not wait. An active service sends `{pelton_closed, Service, closed}' once every client knows all its
%% replies; then close it. A passive service must be made active for that.
-spec drain(endpoint()) -> ok | {error, reason()}.
drain(Service) ->
    case pelton_nif:endpoint_drain(Service) of
        busy -> erlang:yield(), drain(Service);
        Result -> Result
    end.

%% @doc Replies to a request, once. Any process may, at any time. Does not wait. Errors: `closed' or `peer_died': it
%% has its reply already, or its client has gone; `too_large': for this client, and the request still needs a reply.
%% For `undefined', the responder of a {@link cast/2}, it does nothing.
-spec reply(responder() | undefined, iodata()) -> ok | {error, reason()}.
reply(undefined, _Data) -> ok;
reply(Responder, Data) -> respond(Responder, undefined, flat(Data)).

%% @equiv part(Responder, Data, infinity)
-spec part(responder() | undefined, iodata()) -> ok | {error, reason()}.
part(Responder, Data) ->
    part(Responder, Data, infinity).

%% @doc Sends a part of a reply; {@link reply/2} sends the last one, or {@link finish/1} ends the reply. While the
%% client has no free space, it tries again every millisecond, until the timeout in milliseconds: so send parts in
%% another process than the one that gets the requests. Parts of several processes arrive in any order. Errors:
%% `timeout'; others as {@link reply/2}. After the client has cancelled the call, parts are
%% dropped without an error: {@link is_cancelled/1}.
-spec part(responder() | undefined, iodata(), timeout()) -> ok | {error, reason()}.
part(undefined, _Data, _Timeout) -> ok;
part(Responder, Data, Timeout) -> part_until(Responder, flat(Data), deadline(Timeout)).

part_until(Responder, Data, Deadline) ->
    Sent = if byte_size(Data) =< ?COPY_MAX -> pelton_nif:responder_part(Responder, Data);
              true -> pelton_nif:responder_part_large(Responder, Data)
           end,
    case Sent of
        {error, full} -> again(Deadline, fun() -> part_until(Responder, Data, Deadline) end);
        busy -> erlang:yield(), part_until(Responder, Data, Deadline);
        Result -> Result
    end.

%% @doc Ends a reply whose parts were sent by {@link part/3}, or that has none. Errors: as {@link reply/2}.
-spec finish(responder() | undefined) -> ok | {error, reason()}.
finish(undefined) -> ok;
finish(Responder) ->
    case pelton_nif:responder_end(Responder) of
        busy -> erlang:yield(), finish(Responder);
        Result -> Result
    end.

%% @doc Fails a request, once, with a code and bytes that the service chooses: {@link call/3} returns
%% `{error, {failed, {Code, Bytes}}}'. Codes from 16#ffff0000 are pelton's own. Otherwise as {@link reply/2}.
-spec fail(responder() | undefined, non_neg_integer(), iodata()) -> ok | {error, reason()}.
fail(undefined, _Code, _Data) -> ok;
fail(Responder, Code, Data) -> respond(Responder, Code, flat(Data)).

respond(Responder, Code, Data) ->
    Responded = if byte_size(Data) =< ?COPY_MAX -> pelton_nif:responder_reply(Responder, Code, Data);
                   true -> pelton_nif:responder_reply_large(Responder, Code, Data)
                end,
    case Responded of
        busy -> erlang:yield(), respond(Responder, Code, Data);
        Result -> Result
    end.

%% @doc Returns whether nobody waits for the reply any more: the client has cancelled the call, or has gone, or the
%% reply is complete. The request of a cancelled call still needs a reply: choose the cheapest. Does not wait. The
%% service learns of it while it is active. For `undefined' it is false.
-spec is_cancelled(responder() | undefined) -> boolean().
is_cancelled(undefined) -> false;
is_cancelled(Responder) ->
    case pelton_nif:responder_is_cancelled(Responder) of
        busy -> erlang:yield(), is_cancelled(Responder);
        IsCancelled -> IsCancelled
    end.

%% @doc Returns the position in a distributed trace with which the client has submitted the request ({@type
%% send_option()}): the text of the header traceparent of W3C Trace Context, whose span is the parent of this service's.
%% `undefined' if it came without a valid one, for a {@link cast/2}, and after the reply. Does not wait.
-spec traceparent(responder() | undefined) -> binary() | undefined.
traceparent(undefined) -> undefined;
traceparent(Responder) ->
    case pelton_nif:responder_traceparent(Responder) of
        busy -> erlang:yield(), traceparent(Responder);
        Traceparent -> Traceparent
    end.

%% @doc Returns a text for the reason of an error, as {@link file:format_error/1}.
-spec format_error(reason() | open_error()) -> string().
format_error({failed, {Code, Bytes}}) ->
    lists:flatten(io_lib:format("the service failed the call with code ~w: ~tp", [Code, Bytes]));
format_error({lost, not_begun}) -> "the service has ended, and has not begun the call";
format_error({lost, Reason}) -> "the service has ended during the call: " ++ format_error(Reason);
format_error({_, Detail}) when is_binary(Detail), Detail =/= <<>> -> unicode:characters_to_list(Detail);
format_error({Reason, _}) -> format_error(Reason);
format_error(timeout) -> "the time is over";
format_error(full) -> "there is no free space: the service does not receive fast enough";
format_error(abandoned) -> "the service dropped the request without a reply";
format_error(in_operation) -> "a file operation, wait_released or resume uses the endpoint";
format_error(not_owner) -> "the calling process is not the owner";
format_error(noproc) -> "the process has ended";
format_error(Reason) ->
    case pelton_nif:code_text(Reason) of
        undefined -> file:format_error(Reason);
        Text -> binary_to_list(Text)
    end.

%% @doc Sends a process what changes how the program runs and is no result of a call: peers that were refused, with
%% process, user and reason, and fallbacks, where the system refuses membarrier or io_uring. It gets `{pelton_log,
%% error | warning | info, Text}', whose level is one of `logger'. `none', the default: nobody. One process for the
%% whole node, the last one set; nothing happens when it has ended. Refused peers have at most one record per second,
%% which counts those before it without one. Nothing is logged for each message. Does not wait. Example:
%% ```
%% Log = fun Loop() -> receive {pelton_log, Level, Text} -> logger:log(Level, "~ts", [Text]), Loop() end end,
%% pelton:set_log(spawn(Log)).
%% '''
-spec set_log(pid() | none) -> ok.
set_log(Process) ->
    pelton_nif:set_log(Process).

flat(Data) when is_binary(Data) -> Data;
flat(Data) -> iolist_to_binary(Data).

deadline(infinity) -> infinity;
deadline(Timeout) -> erlang:monotonic_time(millisecond) + Timeout.

left(infinity) -> infinity;
left(Deadline) -> max(0, Deadline - erlang:monotonic_time(millisecond)).

%% Tries until there is a result. While it is pending, the process waits for the notifier thread's message.
waits(Endpoint, Deadline, Try) ->
    Ref = make_ref(),
    case Try(Ref) of
        pending ->
            receive {pelton, Ref, ready} -> waits(Endpoint, Deadline, Try)
            after left(Deadline) -> cancel(Endpoint, Ref), {error, timeout}
            end;
        busy -> erlang:yield(), waits(Endpoint, Deadline, Try);
        Result -> Result
    end.

%% Tries again after a millisecond, unless the time is over.
again(Deadline, Try) ->
    case left(Deadline) of
        0 -> {error, timeout};
        _ -> receive after 1 -> Try() end
    end.

%% The process waits no more. Results that arrived meanwhile are removed from the mailbox.
cancel(Endpoint, Ref) ->
    case pelton_nif:endpoint_cancel(Endpoint, Ref) of
        busy -> erlang:yield(), cancel(Endpoint, Ref);
        _ -> drop(Ref)
    end.

drop(Ref) ->
    receive {pelton, Ref, _} -> drop(Ref)
    after 0 -> ok
    end.
