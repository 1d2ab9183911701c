%% @doc Messages and calls between this node and other processes of the machine, of any language that pelton has.
%%
%% {@link open/3} makes an end, which lives as a port does: until {@link close/1}, or until its owner, the process that opened it or was given it
%% by {@link controlling_process/2}, ends. Any process may use an end. Data is iodata, what comes is binaries.
%%
%% A receiver is passive first: {@link recv/2}. With `{active, true | once | N}' its messages come to the owner as `{pelton, End, Bytes}'; after N of
%% them `{pelton_passive, End}', and at the end `{pelton_closed, End, Reason}'.
%%
%% Nothing here keeps a scheduler: a message or an answer that is there within 20 microseconds is awaited in the call while that has paid
%% lately; after that the process waits for a message of the runtime's.
-module(pelton).
-export([open/2, open/3, close/1, send/2, send/3, recv/1, recv/2, setopts/2, controlling_process/2, call/2, call/3, cast/2, reply/2, fail/3]).
-export_type(['end'/0, responder/0, option/0, reason/0]).

-opaque 'end'() :: pelton_nif:'end'().
%% A sender, a receiver, a client or a service.
-opaque responder() :: pelton_nif:responder().
%% Answers one request. One that is forgotten is collected, and its client told that the call was abandoned.
-type kind() :: sender | receiver | client | service.
-type option() :: {capacity, pos_integer()} | {message_bytes_max, pos_integer()} | {timeout, non_neg_integer()} | {lanes, pos_integer()} |
                  {create, boolean()} | {call_bytes_max, pos_integer()} | {memory, pos_integer()} | active_option().
-type active_option() :: {active, boolean() | once | pos_integer()} | {messages, copy | hold}.
-type reason() :: atom() | {failed, non_neg_integer(), binary()} | {lost, atom()}.
%% A code of pelton.h in small letters: `closed', `peer_died', `too_large' and so on; or `timeout'. Of a call also what the service failed it with.

%% What is larger is copied by a dirty scheduler.
-define(COPY_MAX, 262144).

%% @equiv open(Kind, Name, [])
-spec open(kind(), iodata()) -> {ok, 'end'()} | {error, {atom(), binary()}}.
open(Kind, Name) ->
    open(Kind, Name, []).

%% @doc Opens an end, of which the calling process is the owner. `Name' is a short name, `"unix:PATH"' or `"path:DIR"'.
%%
%% A `receiver' takes in all senders that connect under the name; a `service' all clients. Neither waits for anybody. A `sender' and a `client' wait
%% for who listens, until the `timeout', in milliseconds. Options are those of pelton.h, sizes in bytes; `{messages, hold}' makes received
%% binaries of more than 64 bytes the channel's own memory, which the sender has back when they are collected. Copying is the default, for a
%% binary that is kept holds up all that comes after it; a receiver that is closed goes when the last is collected. Hold only what comes from senders
%% that are trusted with the whole node. What cannot be an option is an exception. The error says what was found, what was wanted and what to do.
-spec open(kind(), iodata(), [option()]) -> {ok, 'end'()} | {error, {atom(), binary()}}.
open(Kind, Name, Options) ->
    Number = case Kind of sender -> 0; receiver -> 1; client -> 2; service -> 3 end,
    %% Before anything is opened.
    Active = active(Options),
    Get = fun(Key) -> proplists:get_value(Key, Options, 0) end,
    Create = case proplists:get_value(create, Options, false) of true -> 1; false -> 0 end,
    Numbers = {Get(capacity), Get(message_bytes_max), Get(timeout), Get(lanes), Create, Get(call_bytes_max), Get(memory)},
    case [Option || Option <- Options, not is_option(Option)] of
        [] -> ok;
        Bad -> error({bad_options, Bad}, [Kind, Name, Options])
    end,
    Ref = make_ref(),
    Opened = case pelton_nif:end_open(Number, iolist_to_binary([Name, 0]), Numbers, Ref) of
                 pending -> receive {pelton, Ref, Result} -> Result end;
                 Error -> Error
             end,
    case Opened of
        {ok, End} when Number =:= 1; Number =:= 3 ->
            _ = set(End, Active),
            Opened;
        _ -> Opened
    end.

is_option({Key, Value}) when Key =:= capacity; Key =:= message_bytes_max; Key =:= lanes; Key =:= call_bytes_max; Key =:= memory ->
    is_integer(Value) andalso Value > 0;
is_option({timeout, Value}) -> is_integer(Value) andalso Value >= 0;
is_option({create, Value}) -> is_boolean(Value);
is_option({Key, _}) -> Key =:= active orelse Key =:= messages;
is_option(_) -> false.

%% @doc Closes the end and never waits. Processes that wait with it get `{error, closed}'. Another thread closes an end that `pelton_file:recv' or
%% `send' is using, soon after that operation has returned; until then {@link open/3} of the same name fails with `in_use'.
-spec close('end'()) -> ok | {error, reason()}.
close(End) ->
    case pelton_nif:end_close(End) of
        full -> erlang:yield(), close(End);
        Result -> Result
    end.

%% @equiv send(Sender, Data, infinity)
-spec send('end'(), iodata()) -> ok | {error, reason()}.
send(Sender, Data) ->
    send(Sender, Data, infinity).

%% @doc Sends a message; waits while there is no room for it. `{error, timeout}': nothing was sent.
-spec send('end'(), iodata(), timeout()) -> ok | {error, reason()}.
send(Sender, Data, Timeout) ->
    Bytes = flat(Data),
    send_by(Sender, Bytes, deadline(Timeout)).

send_by(Sender, Data, Deadline) ->
    Ref = make_ref(),
    Sent = if byte_size(Data) =< ?COPY_MAX -> pelton_nif:end_send(Sender, Data, Ref);
              true -> pelton_nif:end_send_large(Sender, Data, Ref)
           end,
    case Sent of
        pending ->
            receive {pelton, Ref, ready} -> send_by(Sender, Data, Deadline)
            after left(Deadline) -> give_up(Sender, Ref), {error, timeout}
            end;
        full -> erlang:yield(), send_by(Sender, Data, Deadline);
        Result -> Result
    end.

%% @equiv recv(Receiver, infinity)
-spec recv('end'()) -> {ok, binary()} | {error, reason()}.
recv(Receiver) ->
    recv(Receiver, infinity).

%% @doc The next message of a passive receiver; waits for one. `{error, einval}': it is active.
-spec recv('end'(), timeout()) -> {ok, binary()} | {error, reason()}.
recv(Receiver, Timeout) ->
    recv_by(Receiver, deadline(Timeout)).

recv_by(Receiver, Deadline) ->
    Ref = make_ref(),
    case pelton_nif:end_receive(Receiver, Ref) of
        pending ->
            receive {pelton, Ref, ready} -> recv_by(Receiver, Deadline)
            after left(Deadline) -> give_up(Receiver, Ref), {error, timeout}
            end;
        full -> erlang:yield(), recv_by(Receiver, Deadline);
        Result -> Result
    end.

%% @doc Says how messages come to the owner. What is not mentioned is `{active, false}' and `{messages, copy}'.
-spec setopts('end'(), [option()]) -> ok | {error, reason()}.
setopts(End, Options) ->
    set(End, active(Options)).

%% What end_set takes.
active(Options) ->
    Holds = case proplists:get_value(messages, Options, copy) of hold -> true; copy -> false end,
    case proplists:get_value(active, Options, false) of
        true -> {-1, false, Holds};
        false -> {0, false, Holds};
        once -> {1, true, Holds};
        Count when is_integer(Count), Count > 0 -> {Count, false, Holds}
    end.

set(End, {Active, Once, Holds} = Set) ->
    case pelton_nif:end_set(End, Active, Once, Holds) of
        full -> erlang:yield(), set(End, Set);
        Result -> Result
    end.

%% @doc Makes another process the owner: only the owner can; `{error, noproc}': there is none. What has come to the old owner stays there.
-spec controlling_process('end'(), pid()) -> ok | {error, reason()}.
controlling_process(End, Pid) ->
    case pelton_nif:end_give(End, Pid) of
        full -> erlang:yield(), controlling_process(End, Pid);
        Result -> Result
    end.

%% @equiv call(Client, Request, infinity)
-spec call('end'(), iodata()) -> {ok, binary()} | {error, reason()}.
call(Client, Request) ->
    call(Client, Request, infinity).

%% @doc Asks a service, and awaits the answer; one that comes in parts is put together. `{error, timeout}': the call is given up.
-spec call('end'(), iodata(), timeout()) -> {ok, binary()} | {error, reason()}.
call(Client, Request, Timeout) ->
    call_by(Client, flat(Request), deadline(Timeout)).

call_by(Client, Request, Deadline) ->
    Ref = make_ref(),
    Asked = if byte_size(Request) =< ?COPY_MAX -> pelton_nif:end_call(Client, Request, Ref, false);
               true -> pelton_nif:end_call_large(Client, Request, Ref, false)
            end,
    case Asked of
        {ok, _} = Answer -> Answer;
        full -> erlang:yield(), call_by(Client, Request, Deadline);
        {error, _} = Error -> Error;
        _ ->
            receive
                {pelton, Ref, ready} -> call_by(Client, Request, Deadline);
                {pelton, Ref, Answer} -> Answer
            after left(Deadline) -> give_up(Client, Ref), {error, timeout}
            end
    end.

%% @doc Tells a service something that it does not answer; waits while there is no room for it.
-spec cast('end'(), iodata()) -> ok | {error, reason()}.
cast(Client, Data) ->
    Ref = make_ref(),
    Bytes = flat(Data),
    Asked = if byte_size(Bytes) =< ?COPY_MAX -> pelton_nif:end_call(Client, Bytes, Ref, true);
               true -> pelton_nif:end_call_large(Client, Bytes, Ref, true)
            end,
    case Asked of
        ok -> ok;
        {error, _} = Error -> Error;
        full -> erlang:yield(), cast(Client, Bytes);
        _ ->
            receive {pelton, Ref, ready} -> cast(Client, Bytes);
                    {pelton, Ref, Error} -> Error
            end
    end.

%% @doc Answers a request, once; any process may. Never waits. `{error, closed}': it is answered already, or its client has gone.
-spec reply(responder() | undefined, iodata()) -> ok | {error, reason()}.
reply(undefined, _Data) -> ok;
reply(Responder, Data) -> answer(Responder, undefined, flat(Data)).

%% @doc Fails a request, with a code and bytes that say what the service wants them to.
-spec fail(responder() | undefined, non_neg_integer(), iodata()) -> ok | {error, reason()}.
fail(undefined, _Code, _Data) -> ok;
fail(Responder, Code, Data) -> answer(Responder, Code, flat(Data)).

answer(Responder, Code, Data) when byte_size(Data) =< ?COPY_MAX -> pelton_nif:end_reply(Responder, Code, Data);
answer(Responder, Code, Data) -> pelton_nif:end_reply_large(Responder, Code, Data).

flat(Data) when is_binary(Data) -> Data;
flat(Data) -> iolist_to_binary(Data).

deadline(infinity) -> infinity;
deadline(Timeout) -> erlang:monotonic_time(millisecond) + Timeout.

left(infinity) -> infinity;
left(Deadline) -> max(0, Deadline - erlang:monotonic_time(millisecond)).

%% Nobody waits any more; what came at the last moment is taken out of the mailbox.
give_up(End, Ref) ->
    case pelton_nif:end_cancel(End, Ref) of
        full -> erlang:yield(), give_up(End, Ref);
        _ -> receive {pelton, Ref, _} -> ok after 0 -> ok end
    end.
