%% @doc Messages and calls between this node and other processes of the machine, in any language that pelton has.
%%
%% {@link open/3} opens an endpoint: a sender, a receiver, a client or a service. As a port, it lives until {@link
%% close/1}, or until its owner ends: the process that opened it, or that {@link controlling_process/2} made the
%% owner. Any process may use it. Data is `iodata()'; received data is a binary.
%%
%% A receiver is passive at first: use {@link recv/2}. With `{active, true | once | N}' its messages are sent to the
%% owner:
%% <ul>
%% <li>`{pelton, Receiver, Bytes}': a message.</li>
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
-export([open/2, open/3, close/1, send/2, send/3, recv/1, recv/2, setopts/2, controlling_process/2, call/2, call/3,
         cast/2,
         reply/2, fail/3, format_error/1]).
-export_type([endpoint/0, responder/0, kind/0, option/0, reason/0, open_error/0]).

-opaque endpoint() :: pelton_nif:endpoint().
%% A sender, a receiver, a client or a service.
-opaque responder() :: pelton_nif:responder().
%% It replies to one request. If it is garbage-collected without a reply, the call fails with `abandoned'.
-type kind() :: sender | receiver | client | service.
-type option() :: {capacity, pos_integer()} | {message_bytes_max, pos_integer()} | {memory_bytes_max, pos_integer()} |
                  {call_bytes_max, pos_integer()} | {senders_max, pos_integer()} | {clients_max, pos_integer()} |
                  {lanes, pos_integer()} | {create, boolean()} | {timeout, timeout()} | active_option().
-type active_option() :: {active, boolean() | once | integer()} | {messages, copy | hold}.
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
%% senders and receivers, `"path:DIR"'. The file README.md has a table of the options.
%%
%% A `receiver' accepts all senders of the name, and a `service' all clients; neither waits for one. A `sender' or
%% `client' waits for a listener until the `timeout', in milliseconds. The default is 0: it fails immediately with
%% `no_listener'. No thread waits: the process gets a message once the endpoint is open. If the process ends first,
%% the open is cancelled.
%%
%% An option that does not apply is an exception, `{bad_option, Option}'.
-spec open(kind(), iodata(), [option()]) -> {ok, endpoint()} | {error, open_error()}.
open(Kind, Name, Options) ->
    Bytes = iolist_to_binary(Name),
    IsPath = case Bytes of <<"path:", _/binary>> -> true; _ -> false end,
    [is_option(Kind, IsPath, Option) orelse error({bad_option, Option}, [Kind, Name, Options]) || Option <- Options],
    Get = fun(Key) -> proplists:get_value(Key, Options, 0) end,
    PeersMax = lists:max([Get(lanes), Get(senders_max), Get(clients_max)]),
    Create = case Get(create) of true -> 1; _ -> 0 end,
    Timeout = case Get(timeout) of infinity -> -1; Milliseconds -> Milliseconds end,
    Numbers = {Get(capacity), Get(message_bytes_max), Get(memory_bytes_max), Get(call_bytes_max), PeersMax, Create,
               Timeout},
    Ref = make_ref(),
    Opened = case pelton_nif:endpoint_open(number(Kind), <<Bytes/binary, 0>>, Numbers, Ref) of
                 pending -> receive {pelton, Ref, Result} -> Result end;
                 Immediate -> Immediate
             end,
    case Opened of
        {ok, Endpoint} when Kind =:= receiver; Kind =:= service ->
            case set(Endpoint, proplists:get_value(active, Options, false), holds(Options)) of
                ok -> Opened;
                %% The application was stopped at this moment.
                {error, Reason} -> {error, {Reason, <<>>}}
            end;
        _ -> Opened
    end.

number(sender) -> 0;
number(receiver) -> 1;
number(client) -> 2;
number(service) -> 3.

is_option(Kind, IsPath, {Key, Value}) -> applies(Key, Kind, IsPath) andalso is_value(Key, Value);
is_option(_, _, _) -> false.

applies(capacity, _, _) -> true;
applies(message_bytes_max, _, _) -> true;
applies(memory_bytes_max, Kind, _) -> Kind =/= sender;
applies(call_bytes_max, Kind, _) -> Kind =:= client orelse Kind =:= service;
applies(senders_max, Kind, IsPath) -> Kind =:= receiver andalso not IsPath;
applies(clients_max, Kind, _) -> Kind =:= service;
applies(lanes, Kind, IsPath) -> IsPath andalso (Kind =:= sender orelse Kind =:= receiver);
applies(create, Kind, IsPath) -> applies(lanes, Kind, IsPath);
applies(timeout, Kind, IsPath) -> Kind =:= sender orelse Kind =:= client orelse (Kind =:= receiver andalso IsPath);
applies(active, Kind, _) -> Kind =:= receiver orelse Kind =:= service;
applies(messages, Kind, _) -> Kind =:= receiver;
applies(_, _, _) -> false.

is_value(timeout, Value) -> Value =:= infinity orelse (is_integer(Value) andalso Value >= 0);
is_value(create, Value) -> is_boolean(Value);
is_value(active, Value) -> is_boolean(Value) orelse Value =:= once orelse (is_integer(Value) andalso Value > 0);
is_value(messages, Value) -> Value =:= copy orelse Value =:= hold;
is_value(_, Value) -> is_integer(Value) andalso Value > 0.

%% @doc Closes the endpoint. Does not wait. Processes that wait with it get `{error, closed}', and so does a second
%% close. While {@link pelton_file:recv/4} or {@link pelton_file:send/5} uses it, and while binaries are in its memory
%% (`{messages, hold}'), the name remains in use.
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

%% @doc Sends a message. Waits for free space, until the timeout in milliseconds. After an error nothing was sent:
%% `timeout'; `too_large'; `closed' or `peer_died': the receiver has gone; `in_operation': {@link pelton_file:send/5}
%% uses the sender.
-spec send(endpoint(), iodata(), timeout()) -> ok | {error, reason()}.
send(Sender, Data, Timeout) ->
    send_until(Sender, flat(Data), deadline(Timeout)).

send_until(Sender, Data, Deadline) ->
    Ref = make_ref(),
    Sent = if byte_size(Data) =< ?COPY_MAX -> pelton_nif:endpoint_send(Sender, Data, Ref);
              true -> pelton_nif:endpoint_send_large(Sender, Data, Ref)
           end,
    case Sent of
        pending ->
            receive {pelton, Ref, ready} -> send_until(Sender, Data, Deadline)
            after left(Deadline) -> cancel(Sender, Ref), {error, timeout}
            end;
        busy -> erlang:yield(), send_until(Sender, Data, Deadline);
        Result -> Result
    end.

%% @equiv recv(Receiver, infinity)
-spec recv(endpoint()) -> {ok, binary()} | {error, reason()}.
recv(Receiver) ->
    recv(Receiver, infinity).

%% @doc Receives the next message of a passive receiver. Waits for one, until the timeout in milliseconds. Errors:
%% `timeout'; `einval': the receiver is active; `closed' or `peer_died': of a path channel, the sender has gone, and
%% every message was received; `in_operation': {@link pelton_file:recv/4} uses the receiver.
-spec recv(endpoint(), timeout()) -> {ok, binary()} | {error, reason()}.
recv(Receiver, Timeout) ->
    recv_until(Receiver, deadline(Timeout)).

recv_until(Receiver, Deadline) ->
    Ref = make_ref(),
    case pelton_nif:endpoint_receive(Receiver, Ref) of
        pending ->
            receive {pelton, Ref, ready} -> recv_until(Receiver, Deadline)
            after left(Deadline) -> cancel(Receiver, Ref), {error, timeout}
            end;
        busy -> erlang:yield(), recv_until(Receiver, Deadline);
        Result -> Result
    end.

%% @doc Sets how messages are delivered. As in `inet:setopts/2', an integer is added to the number of messages that
%% are still to be sent to the owner; once that is 0 or less, the endpoint is passive, and `{pelton_passive,
%% Endpoint}' is sent. Options that are not in the list remain unchanged.
-spec setopts(endpoint(), [active_option()]) -> ok | {error, reason()}.
setopts(Endpoint, Options) ->
    [is_settable(Option) orelse error({bad_option, Option}, [Endpoint, Options]) || Option <- Options],
    set(Endpoint, proplists:get_value(active, Options, undefined), holds(Options)).

is_settable({active, Value}) when is_integer(Value) -> true;
is_settable({Key, Value}) when Key =:= active; Key =:= messages -> is_value(Key, Value);
is_settable(_) -> false.

holds(Options) ->
    case proplists:get_value(messages, Options, undefined) of
        hold -> true;
        copy -> false;
        undefined -> undefined
    end.

set(Endpoint, Active, Holds) ->
    case pelton_nif:endpoint_set(Endpoint, Active, Holds) of
        busy -> erlang:yield(), set(Endpoint, Active, Holds);
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

%% @equiv call(Client, Request, infinity)
-spec call(endpoint(), iodata()) -> {ok, binary()} | {error, reason()}.
call(Client, Request) ->
    call(Client, Request, infinity).

%% @doc Calls a service, and waits for its reply, until the timeout in milliseconds. A reply in parts is assembled.
%% Any number of processes may call through one client. Errors: `timeout': the call is cancelled; `{failed, {Code,
%% Bytes}}' and `{lost, Reason}': see {@type reason()}; `abandoned': the service dropped the request; `no_listener':
%% no process serves the name now; `too_large'.
-spec call(endpoint(), iodata(), timeout()) -> {ok, binary()} | {error, reason()}.
call(Client, Request, Timeout) ->
    call_until(Client, flat(Request), deadline(Timeout)).

call_until(Client, Request, Deadline) ->
    Ref = make_ref(),
    Called = if byte_size(Request) =< ?COPY_MAX -> pelton_nif:endpoint_call(Client, Request, Ref);
                true -> pelton_nif:endpoint_call_large(Client, Request, Ref)
             end,
    case Called of
        {ok, _} = Reply -> Reply;
        busy -> erlang:yield(), call_until(Client, Request, Deadline);
        {error, _} = Error -> Error;
        _ ->
            receive
                {pelton, Ref, ready} -> call_until(Client, Request, Deadline);
                {pelton, Ref, Result} -> Result
            after left(Deadline) -> cancel(Client, Ref), {error, timeout}
            end
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

%% @doc Replies to a request, once. Any process may, at any time. Does not wait. Errors: `closed' or `peer_died': it
%% has its reply already, or its client has gone; `too_large': for this client, and the request still needs a reply.
%% For `undefined', the responder of a {@link cast/2}, it does nothing.
-spec reply(responder() | undefined, iodata()) -> ok | {error, reason()}.
reply(undefined, _Data) -> ok;
reply(Responder, Data) -> respond(Responder, undefined, flat(Data)).

%% @doc Fails a request, once, with a code and bytes that the service chooses: {@link call/3} returns
%% `{error, {failed, {Code, Bytes}}}'. Codes from 16#ffff0000 are pelton's own. Otherwise as {@link reply/2}.
-spec fail(responder() | undefined, non_neg_integer(), iodata()) -> ok | {error, reason()}.
fail(undefined, _Code, _Data) -> ok;
fail(Responder, Code, Data) -> respond(Responder, Code, flat(Data)).

respond(Responder, Code, Data) when byte_size(Data) =< ?COPY_MAX -> pelton_nif:responder_reply(Responder, Code, Data);
respond(Responder, Code, Data) -> pelton_nif:responder_reply_large(Responder, Code, Data).

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
format_error(in_operation) -> "pelton_file:send or pelton_file:recv uses the endpoint";
format_error(not_owner) -> "the calling process is not the owner";
format_error(noproc) -> "the process has ended";
format_error(Reason) ->
    case pelton_nif:code_text(Reason) of
        undefined -> file:format_error(Reason);
        Text -> binary_to_list(Text)
    end.

flat(Data) when is_binary(Data) -> Data;
flat(Data) -> iolist_to_binary(Data).

deadline(infinity) -> infinity;
deadline(Timeout) -> erlang:monotonic_time(millisecond) + Timeout.

left(infinity) -> infinity;
left(Deadline) -> max(0, Deadline - erlang:monotonic_time(millisecond)).

%% The process waits no more. A result that arrived meanwhile is removed from the mailbox.
cancel(Endpoint, Ref) ->
    case pelton_nif:endpoint_cancel(Endpoint, Ref) of
        busy -> erlang:yield(), cancel(Endpoint, Ref);
        _ -> receive {pelton, Ref, _} -> ok after 0 -> ok end
    end.
