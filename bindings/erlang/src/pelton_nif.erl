%% @private The functions of c_src. None of them waits, except on a dirty scheduler. `pending': the result comes as
%% `{pelton, Ref, Result}'. `busy': nothing was done, because another operation is in progress.
-module(pelton_nif).
-export([close_all/0]).
-export([file_open/5, file_close/2, file_pread/5, file_pread_list/4, file_pwrite/5, file_read/3, file_read_waiting/3,
         file_write/3, file_write_waiting/3, file_seek/3, file_truncate/1, file_advise/4, file_allocate/3, file_do/4,
         file_copy/6, file_transfer/7, path_do/6, buffer_write/3, buffer_flush/2, buffer_read/3]).
-export([endpoint_open/4, endpoint_close/1, endpoint_send/4, endpoint_send_large/4, endpoint_receive/2, endpoint_set/4,
         endpoint_give/2, endpoint_accept/2, endpoint_wait_released/2, endpoint_resume/2, endpoint_call/4,
         endpoint_call_large/4, endpoint_stream/4, endpoint_stream_large/4, endpoint_cast/2, endpoint_cast_large/2,
         endpoint_cancel/2, endpoint_drain/1, endpoint_info/1,
         responder_reply/3, responder_reply_large/3, responder_part/2, responder_part_large/2, responder_end/1,
         responder_is_cancelled/1, responder_traceparent/1, endpoint_receive_delivery/2, endpoint_wait_subscribers/3,
         endpoint_subscribers/1, subscription_remove/2, code_text/1, set_log/1]).
-export_type([file/0, path/0, buffers/0, result/1, endpoint/0, responder/0, numbers/0]).
-on_load(load/0).

-type file() :: reference().
-type path() :: binary().
-type endpoint() :: reference().
-type responder() :: reference().
-type offset() :: non_neg_integer() | undefined.
-type buffers() :: {WrittenMax :: non_neg_integer(), DelayMs :: non_neg_integer(), AheadMax :: non_neg_integer()}.
-type numbers() :: {Capacity :: non_neg_integer(), MessageBytesMax :: non_neg_integer(), MemoryBytesMax ::
                    non_neg_integer(),
                    CallBytesMax :: non_neg_integer(), PeersMax :: non_neg_integer(), Create :: 0..1,
                    Traced :: 0..1, History :: non_neg_integer(), Policy :: 0..2, LagAfterMs :: non_neg_integer(),
                    Slack :: non_neg_integer(), StartFrom :: non_neg_integer(), Mode :: non_neg_integer(),
                    HoldMaxMs :: integer(), TimeoutMs :: integer(), Durable :: binary() | undefined}.
%% Durable, and a traceparent, end with 0.
-type traceparent() :: binary() | undefined.
-type result(Result) :: Result | pending | busy | {error, file:posix() | badarg}.
-type endpoint_result(Result) :: Result | busy | {error, atom()}.

load() ->
    %% Not relative to the loaded module's file: that may belong to another version.
    Directory = case code:priv_dir(pelton) of
                    {error, bad_name} -> filename:join([filename:dirname(code:which(?MODULE)), "..", "priv"]);
                    Found -> Found
                end,
    case erlang:load_nif(filename:join(Directory, "pelton_nif"), erlang:system_info(schedulers)) of
        {error, {load_failed, Text}} ->
            {error, {load_failed, Text ++ "; the NIF searches for libpelton.so.0.2 in its own directory, where it was at "
                     "compile time, and where the system's linker looks"}};
        Result -> Result
    end.

-spec close_all() -> ok.
close_all() -> not_loaded().

-spec file_open(path(), non_neg_integer(), boolean(), buffers(), reference()) -> result({ok, file(),
    non_neg_integer()}).
file_open(_Path, _Flags, _MayBeDirectory, _Buffers, _Ref) -> not_loaded().

-spec file_close(file(), reference()) -> result(ok).
file_close(_File, _Ref) -> not_loaded().

-spec file_pread(file(), offset(), non_neg_integer(), reference(), boolean()) -> result({ok, binary()} | eof).
file_pread(_File, _Offset, _Size, _Ref, _IsSent) -> not_loaded().

-spec file_pread_list(file(), [{offset(), non_neg_integer()}, ...], reference(), boolean()) -> result({ok, [binary() |
    eof]}).
file_pread_list(_File, _Locations, _Ref, _IsSent) -> not_loaded().

-spec file_pwrite(file(), offset(), [binary()], reference(), boolean()) -> result(ok).
file_pwrite(_File, _Offset, _Data, _Ref, _IsSent) -> not_loaded().

-spec file_read(file(), offset(), non_neg_integer()) -> {ok | part, binary()} | eof | later | {error, file:posix()}.
file_read(_File, _Offset, _Size) -> not_loaded().

-spec file_read_waiting(file(), offset(), non_neg_integer()) -> {ok, binary()} | eof | {error, file:posix()}.
file_read_waiting(_File, _Offset, _Size) -> not_loaded().

-spec file_write(file(), offset(), [binary()]) -> ok | stream | {error, file:posix()}.
file_write(_File, _Offset, _Data) -> not_loaded().

-spec file_write_waiting(file(), offset(), [binary()]) -> ok | stream | {error, file:posix()};
                        (file(), list, [{offset(), [binary()]}]) ->
          ok | {error, file:posix() | {non_neg_integer(), file:posix()}}.
file_write_waiting(_File, _Offset, _Data) -> not_loaded().

-spec file_seek(file(), integer(), 0..2) -> {ok, non_neg_integer()} | busy | {error, file:posix()}.
file_seek(_File, _Offset, _Whence) -> not_loaded().

-spec file_truncate(file()) -> ok | busy | {error, file:posix()}.
file_truncate(_File) -> not_loaded().

-spec file_advise(file(), integer(), integer(), 0..5) -> ok | {error, file:posix()}.
file_advise(_File, _Offset, _Size, _Advice) -> not_loaded().

-spec file_allocate(file(), integer(), integer()) -> ok | {error, file:posix()}.
file_allocate(_File, _Offset, _Size) -> not_loaded().

-spec file_do(0..3, file(), reference(), boolean()) -> result(ok | {ok, binary() | tuple()}).
file_do(_Kind, _File, _Ref, _IsSent) -> not_loaded().

-spec file_copy(file(), non_neg_integer(), file(), non_neg_integer(), non_neg_integer(), reference()) ->
          result({ok, non_neg_integer()}).
file_copy(_From, _FromOffset, _To, _ToOffset, _Bytes, _Ref) -> not_loaded().

-spec file_transfer(boolean(), file(), non_neg_integer(), non_neg_integer(), endpoint(), non_neg_integer(),
                    reference()) ->
          result({ok, non_neg_integer()}) | {error, atom() | {atom(), pos_integer()}}.
file_transfer(_IsReceive, _File, _Offset, _Bytes, _Endpoint, _MessageBytes, _Ref) -> not_loaded().

-spec path_do(0..9, path(), path() | undefined, integer() | undefined, integer() | undefined, reference()) ->
          result(ok | {ok, tuple() | binary()}).
path_do(_Kind, _Path, _Other, _Accessed, _Modified, _Ref) -> not_loaded().

-spec buffer_write(file(), [binary()], reference()) -> result(ok).
buffer_write(_File, _Data, _Ref) -> not_loaded().

-spec buffer_flush(file(), reference()) -> result(ok).
buffer_flush(_File, _Ref) -> not_loaded().

-spec buffer_read(file(), non_neg_integer() | line, reference()) -> result({ok, binary()} | eof | ok | flush).
buffer_read(_File, _Size, _Ref) -> not_loaded().

-spec endpoint_open(0..6, binary(), numbers(), reference()) -> pending | {ok, endpoint()} | {error, {atom(), binary()}}.
endpoint_open(_Kind, _Name, _Numbers, _Ref) -> not_loaded().

-spec endpoint_close(endpoint()) -> endpoint_result(ok).
endpoint_close(_Endpoint) -> not_loaded().

-spec endpoint_send(endpoint(), iodata(), traceparent(), reference()) -> endpoint_result(ok | pending).
endpoint_send(_Endpoint, _Data, _Traceparent, _Ref) -> not_loaded().

-spec endpoint_send_large(endpoint(), iodata(), traceparent(), reference()) -> endpoint_result(ok | pending).
endpoint_send_large(_Endpoint, _Data, _Traceparent, _Ref) -> not_loaded().

-spec endpoint_receive(endpoint(), reference()) ->
          endpoint_result({ok, binary()} | {ok, binary(), binary() | undefined} | pending).
endpoint_receive(_Endpoint, _Ref) -> not_loaded().

-spec endpoint_set(endpoint(), undefined | boolean() | once | integer(), undefined | boolean(),
                   undefined | boolean()) -> endpoint_result(ok).
endpoint_set(_Endpoint, _Active, _Holds, _Traceparents) -> not_loaded().

-spec endpoint_give(endpoint(), pid()) -> endpoint_result(ok).
endpoint_give(_Endpoint, _Pid) -> not_loaded().

-spec endpoint_accept(endpoint(), reference()) ->
          endpoint_result({ok, endpoint()} | pending) | {error, {atom(), binary()}}.
endpoint_accept(_Listener, _Ref) -> not_loaded().

-spec endpoint_wait_released(endpoint(), non_neg_integer()) -> endpoint_result(ok | later).
endpoint_wait_released(_Sender, _Milliseconds) -> not_loaded().

-spec endpoint_resume(endpoint(), non_neg_integer()) -> endpoint_result(ok | later).
endpoint_resume(_Endpoint, _Milliseconds) -> not_loaded().

-spec endpoint_stream(endpoint(), iodata(), traceparent(), reference()) -> endpoint_result(pending | waits).
endpoint_stream(_Endpoint, _Data, _Traceparent, _Ref) -> not_loaded().

-spec endpoint_stream_large(endpoint(), iodata(), traceparent(), reference()) -> endpoint_result(pending | waits).
endpoint_stream_large(_Endpoint, _Data, _Traceparent, _Ref) -> not_loaded().

-spec endpoint_drain(endpoint()) -> endpoint_result(ok).
endpoint_drain(_Service) -> not_loaded().

-spec endpoint_info(endpoint()) -> endpoint_result(#{atom() => non_neg_integer()}).
endpoint_info(_Endpoint) -> not_loaded().

-spec responder_part(responder(), iodata()) -> endpoint_result(ok).
responder_part(_Responder, _Data) -> not_loaded().

-spec responder_part_large(responder(), iodata()) -> endpoint_result(ok).
responder_part_large(_Responder, _Data) -> not_loaded().

-spec responder_end(responder()) -> endpoint_result(ok).
responder_end(_Responder) -> not_loaded().

-spec responder_is_cancelled(responder()) -> boolean() | busy.
responder_is_cancelled(_Responder) -> not_loaded().

-spec responder_traceparent(responder()) -> binary() | undefined | busy.
responder_traceparent(_Responder) -> not_loaded().

-spec endpoint_call(endpoint(), iodata(), traceparent(), reference()) ->
          endpoint_result({ok, binary()} | pending | waits) | {error, {atom(), term()}}.
endpoint_call(_Endpoint, _Data, _Traceparent, _Ref) -> not_loaded().

-spec endpoint_call_large(endpoint(), iodata(), traceparent(), reference()) ->
          endpoint_result({ok, binary()} | pending | waits) | {error, {atom(), term()}}.
endpoint_call_large(_Endpoint, _Data, _Traceparent, _Ref) -> not_loaded().

-spec endpoint_cast(endpoint(), iodata()) -> endpoint_result(ok).
endpoint_cast(_Endpoint, _Data) -> not_loaded().

-spec endpoint_cast_large(endpoint(), iodata()) -> endpoint_result(ok).
endpoint_cast_large(_Endpoint, _Data) -> not_loaded().

-spec endpoint_cancel(endpoint(), reference()) -> endpoint_result(ok).
endpoint_cancel(_Endpoint, _Ref) -> not_loaded().

-spec responder_reply(responder(), undefined | non_neg_integer(), iodata()) -> endpoint_result(ok).
responder_reply(_Responder, _Code, _Data) -> not_loaded().

-spec responder_reply_large(responder(), undefined | non_neg_integer(), iodata()) -> endpoint_result(ok).
responder_reply_large(_Responder, _Code, _Data) -> not_loaded().

-spec endpoint_receive_delivery(endpoint(), reference()) ->
          endpoint_result({ok, binary(), pos_integer(), non_neg_integer()} | pending).
endpoint_receive_delivery(_Subscriber, _Ref) -> not_loaded().

-spec endpoint_wait_subscribers(endpoint(), non_neg_integer(), reference()) -> endpoint_result(ok | pending).
endpoint_wait_subscribers(_Publisher, _Count, _Ref) -> not_loaded().

-spec endpoint_subscribers(endpoint()) -> endpoint_result([#{atom() => term()}]).
endpoint_subscribers(_Publisher) -> not_loaded().

-spec subscription_remove(binary(), binary()) -> ok | {error, {atom(), binary()}}.
subscription_remove(_Name, _Durable) -> not_loaded().

-spec code_text(atom()) -> binary() | undefined.
code_text(_Atom) -> not_loaded().

-spec set_log(pid() | none) -> ok.
set_log(_Receiver) -> not_loaded().

%% For dialyzer it returns any type.
not_loaded() ->
    erlang:nif_error({not_loaded, ?MODULE}).
