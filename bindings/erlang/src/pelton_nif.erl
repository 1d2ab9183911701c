%% @private What c_src has. Its functions answer at once; `pending': the result comes as `{pelton, Ref, Result}'. `full': nothing was asked.
-module(pelton_nif).
-export([end_all/0]).
-export([file_open/5, file_close/2, file_pread/5, file_pread_list/4, file_pwrite/5, file_read/3, file_read_waiting/3, file_write/3,
         file_write_waiting/3, file_seek/3, file_truncate/1, file_advise/4, file_allocate/3, file_do/4, file_copy/6, path_do/6, file_pump/7, buffer_write/3, buffer_flush/2, buffer_read/3]).
-export([end_open/4, end_close/1, end_send/3, end_send_large/3, end_receive/2, end_set/4, end_give/2, end_call/4, end_call_large/4,
         end_cancel/2, end_reply/3, end_reply_large/3]).
-export_type([file/0, path/0, buffers/0, answer/1, 'end'/0, responder/0]).
-on_load(load/0).

-type file() :: reference().
-type path() :: binary().
-type 'end'() :: reference().
-type responder() :: reference().
-type told(Result) :: Result | full | {error, atom()}.
-type offset() :: non_neg_integer() | undefined.
-type buffers() :: {WriteMax :: non_neg_integer(), Delay :: non_neg_integer(), AheadMax :: non_neg_integer()}.
-type answer(Result) :: Result | pending | full | {error, file:posix() | badarg}.

load() ->
    %% Not beside what is loaded: that may be another version's.
    Directory = case code:priv_dir(pelton) of
                    {error, bad_name} -> filename:join([filename:dirname(code:which(?MODULE)), "..", "priv"]);
                    Found -> Found
                end,
    erlang:load_nif(filename:join(Directory, "pelton_nif"), erlang:system_info(schedulers)).

-spec end_all() -> ok.
end_all() -> not_loaded().

-spec file_open(path(), non_neg_integer(), boolean(), buffers(), reference()) -> answer({ok, file(), non_neg_integer()}).
file_open(_Path, _Flags, _MayBeDirectory, _Buffers, _Ref) -> not_loaded().

-spec file_close(file(), reference()) -> answer(ok).
file_close(_File, _Ref) -> not_loaded().

-spec file_pread(file(), offset(), non_neg_integer(), reference(), boolean()) -> answer({ok, binary()} | eof).
file_pread(_File, _Offset, _Size, _Ref, _Sends) -> not_loaded().

-spec file_pread_list(file(), [{offset(), non_neg_integer()}, ...], reference(), boolean()) -> answer({ok, [binary() | eof]}).
file_pread_list(_File, _Places, _Ref, _Sends) -> not_loaded().

-spec file_pwrite(file(), offset(), [binary()], reference(), boolean()) -> answer(ok).
file_pwrite(_File, _Offset, _Data, _Ref, _Sends) -> not_loaded().

-spec file_read(file(), offset(), non_neg_integer()) -> {ok | part, binary()} | eof | later | {error, file:posix()}.
file_read(_File, _Offset, _Size) -> not_loaded().

-spec file_read_waiting(file(), offset(), non_neg_integer()) -> {ok, binary()} | eof | {error, file:posix()}.
file_read_waiting(_File, _Offset, _Size) -> not_loaded().

-spec file_write(file(), offset(), [binary()]) -> ok | stream | {error, file:posix()}.
file_write(_File, _Offset, _Data) -> not_loaded().

-spec file_write_waiting(file(), offset(), [binary()]) -> ok | stream | {error, file:posix()};
                        (file(), list, [{offset(), [binary()]}]) -> ok | {error, file:posix() | {non_neg_integer(), file:posix()}}.
file_write_waiting(_File, _Offset, _Data) -> not_loaded().

-spec file_seek(file(), integer(), 0..2) -> {ok, non_neg_integer()} | full | {error, file:posix()}.
file_seek(_File, _Offset, _Whence) -> not_loaded().

-spec file_truncate(file()) -> ok | full | {error, file:posix()}.
file_truncate(_File) -> not_loaded().

-spec file_advise(file(), integer(), integer(), 0..5) -> ok | {error, file:posix()}.
file_advise(_File, _Offset, _Size, _Advice) -> not_loaded().

-spec file_allocate(file(), integer(), integer()) -> ok | {error, file:posix()}.
file_allocate(_File, _Offset, _Size) -> not_loaded().

-spec file_do(0..3, file(), reference(), boolean()) -> answer(ok | {ok, binary() | tuple()}).
file_do(_Kind, _File, _Ref, _Sends) -> not_loaded().

-spec file_copy(file(), non_neg_integer(), file(), non_neg_integer(), non_neg_integer(), reference()) -> answer({ok, non_neg_integer()}).
file_copy(_From, _FromOffset, _To, _ToOffset, _Bytes, _Ref) -> not_loaded().

-spec path_do(0..9, path(), path() | undefined, integer() | undefined, integer() | undefined, reference()) ->
          answer(ok | {ok, tuple() | binary()}).
path_do(_Kind, _Path, _Other, _Accessed, _Modified, _Ref) -> not_loaded().

-spec file_pump(boolean(), file(), non_neg_integer(), non_neg_integer(), 'end'(), non_neg_integer(), reference()) ->
          answer({ok, non_neg_integer()}) | {error, atom() | {pos_integer(), atom()}}.
file_pump(_IsReceive, _File, _Offset, _Bytes, _End, _MessageBytes, _Ref) -> not_loaded().

-spec buffer_write(file(), [binary()], reference()) -> answer(ok).
buffer_write(_File, _Data, _Ref) -> not_loaded().

-spec buffer_flush(file(), reference()) -> answer(ok).
buffer_flush(_File, _Ref) -> not_loaded().

-spec buffer_read(file(), non_neg_integer() | line, reference()) -> answer({ok, binary()} | eof | ok | flush).
buffer_read(_File, _Size, _Ref) -> not_loaded().

-spec end_open(0..3, binary(), tuple(), reference()) -> pending | {error, {atom(), binary()}}.
end_open(_Kind, _Name, _Numbers, _Ref) -> not_loaded().

-spec end_close('end'()) -> told(ok).
end_close(_End) -> not_loaded().

-spec end_send('end'(), iodata(), reference()) -> told(ok | pending).
end_send(_End, _Data, _Ref) -> not_loaded().

-spec end_send_large('end'(), iodata(), reference()) -> told(ok | pending).
end_send_large(_End, _Data, _Ref) -> not_loaded().

-spec end_receive('end'(), reference()) -> told({ok, binary()} | pending).
end_receive(_End, _Ref) -> not_loaded().

-spec end_set('end'(), integer(), boolean(), boolean()) -> told(ok).
end_set(_End, _Active, _Once, _Holds) -> not_loaded().

-spec end_give('end'(), pid()) -> told(ok).
end_give(_End, _Pid) -> not_loaded().

-spec end_call('end'(), iodata(), reference(), boolean()) -> told(ok | {ok, binary()} | pending | waits) | {error, tuple()}.
end_call(_End, _Data, _Ref, _TellsOnly) -> not_loaded().

-spec end_call_large('end'(), iodata(), reference(), boolean()) -> told(ok | {ok, binary()} | pending | waits) | {error, tuple()}.
end_call_large(_End, _Data, _Ref, _TellsOnly) -> not_loaded().

-spec end_cancel('end'(), reference()) -> told(ok).
end_cancel(_End, _Ref) -> not_loaded().

-spec end_reply(responder(), undefined | non_neg_integer(), iodata()) -> ok | {error, atom()}.
end_reply(_Responder, _Code, _Data) -> not_loaded().

-spec end_reply_large(responder(), undefined | non_neg_integer(), iodata()) -> ok | {error, atom()}.
end_reply_large(_Responder, _Code, _Data) -> not_loaded().

%% Of any type, as dialyzer sees it.
not_loaded() ->
    erlang:nif_error({not_loaded, ?MODULE}).
