%% @doc Files, as in {@link //kernel/file}, without a server process, a port or a copy between, and without blocking a
%% scheduler, except as {@link write/2} says.
%%
%% A program changes the module's name: options, results and error atoms are those of `file' with `raw'. Reads from
%% the page cache, and small writes to it, complete within the call. Otherwise the process waits for a message, by a
%% receive that does not scan the mailbox. The functions of `file' also take the handle that {@link open/2} returns.
%%
%% The differences:
%% <ul>
%% <li>Any process may use a handle. It is closed by {@link close/1}, when the process that opened it ends, or when
%% nobody refers to it. {@link read/2}, {@link write/2} and {@link position/2} share the file's one position; {@link
%% pread/3} and {@link pwrite/3} do not use it.</li>
%% <li>`pread_async' and similar functions return a reference, and `{pelton, Ref, Result}' is sent: see {@link
%% await/2}.</li>
%% <li>{@link send/5} and {@link recv/4} move data between a file and an endpoint of {@link pelton}.</li>
%% </ul>
%%
%% Reading creates garbage, and each garbage collection walks a large mailbox that is on the heap. A process with such
%% a mailbox calls `process_flag(message_queue_data, off_heap)' once, and does not use {@link await/2}.
-module(pelton_file).
-export([open/2, close/1, read/2, pread/2, pread/3, write/2, pwrite/2, pwrite/3, sync/1, datasync/1, truncate/1,
         position/2, allocate/3, advise/4, read_line/1, read_handle_info/1, read_handle_info/2, send/5, recv/4]).
-export([pread_async/2, pread_async/3, pwrite_async/3, sync_async/1, datasync_async/1, await/1, await/2]).
-export([read_file/1, write_file/2, write_file/3, read_file_info/1, read_file_info/2, read_link_info/1,
         read_link_info/2, write_file_info/2, write_file_info/3, list_dir/1, list_dir_all/1, del_file/1, delete/1,
         del_dir/1, rename/2, copy/2, copy/3, make_dir/1, make_link/2, make_symlink/2, read_link/1, read_link_all/1,
         stat/1, lstat/1, utime/3]).
-export_type([handle/0, mode/0, reason/0, location/0]).

-include_lib("kernel/include/file.hrl").

-type handle() :: #file_descriptor{}.
%% What {@link open/2} returns.
-type reason() :: file:posix() | badarg.
-type mode() :: read | write | append | exclusive | raw | binary | sync | directory | read_ahead |
                {read_ahead, pos_integer()} | delayed_write | {delayed_write, non_neg_integer(), non_neg_integer()} |
                {encoding, latin1}.
-type location() :: integer() | {bof | cur | eof, integer()} | bof | cur | eof.
-type name() :: file:name_all().
-type opened_or_name() :: handle() | name() | {name(), [mode()]}.
-type info_option() :: {time, local | universal | posix} | raw.
-type accessed() :: undefined | file:date_time() | integer().

-define(HANDLE(File, Form), #file_descriptor{module = ?MODULE, data = {File, Form}}).
%% With delayed_write or read_ahead.
-define(BUFFERED(File, Form), #file_descriptor{module = ?MODULE, data = {File, Form, buffered}}).

%% An offset that the kernel accepts. The first comparison is with a small integer, because with a bignum it is a call.
-define(IS_OFFSET(Offset), Offset >= 0, (Offset < 1 bsl 58 orelse Offset < 1 bsl 63)).
%% The last time in the kernel's format: nanoseconds in 64 bits.
-define(SECONDS_MAX, 9223372036).

%% Reads in one submission.
-define(LIST_MAX, 256).
%% A write up to this runs in the call or on a dirty scheduler, which is faster than a message. An engine does larger
%% ones.
-define(FAST_BYTES_MAX, 262144).
-define(PIECES_MAX, 1023).
%% Defaults of buffers, in bytes and milliseconds; and a limit that is never reached.
-define(BUFFER_BYTES, 65536).
-define(DELAY, 2000).
-define(NO_LIMIT, 1 bsl 40).

%% Kinds of pelton_nif:file_do/4 and pelton_nif:path_do/6.
-define(SYNC, 0).
-define(DATASYNC, 1).
-define(LIST, 2).
-define(FSTAT, 3).
-define(STAT, 0).
-define(LSTAT, 1).
-define(TIMES, 2).
-define(UNLINK, 3).
-define(RMDIR, 4).
-define(RENAME, 5).
-define(LINK, 6).
-define(SYMLINK, 7).
-define(READ_LINK, 8).
-define(MKDIR, 9).

-define(NO_BUFFERS, {0, 0, 0}).

%% ---- Open files ----

%% @doc Opens a file, as {@link file:open/2} does with `raw'. `compressed', `ram' and encodings other than `latin1'
%% are `{error, badarg}'.
%%
%% `delayed_write' and `read_ahead' are as there. Delayed bytes are also written when the owner ends, when the
%% application stops, and, of a handle that nobody refers to, when they are due. If a delayed write fails, the next
%% operation returns the error, and does nothing else; {@link close/1} closes the file as well.
-spec open(name(), [mode()]) -> {ok, handle()} | {error, reason()}.
open(Name, Modes) when is_list(Modes) ->
    case {path(Name), modes(Modes, 0, list)} of
        {error, _} -> {error, badarg};
        {_, error} -> {error, badarg};
        {Path, {Flags, Form}} ->
            Buffers = lists:foldl(fun buffers/2, ?NO_BUFFERS, Modes),
            case open_path(Path, Flags, Buffers) of
                {ok, File, _Size} when element(1, Buffers) + element(3, Buffers) > 0 -> {ok, ?BUFFERED(File, Form)};
                {ok, File, _Size} -> {ok, ?HANDLE(File, Form)};
                {error, _} = Error -> Error
            end
    end;
open(_Name, _Modes) ->
    {error, badarg}.

-define(READ, 1).
-define(WRITE, 2).
-define(CREATE, 4).
-define(TRUNCATE, 8).
-define(EXCLUSIVE, 16).
-define(APPEND, 32).
-define(O_SYNC, 64).
-define(DIRECTORY, 128).

open_path(Path, Flags) ->
    open_path(Path, Flags, ?NO_BUFFERS).

open_path(Path, Flags, Buffers) ->
    request(fun(Ref) -> pelton_nif:file_open(Path, Flags, Flags band ?DIRECTORY =/= 0, Buffers, Ref) end).

buffers(delayed_write, {_, _, Ahead}) -> {?BUFFER_BYTES, ?DELAY, Ahead};
buffers({delayed_write, Size, Delay}, {_, _, Ahead}) -> {min(Size, ?NO_LIMIT), min(Delay, ?NO_LIMIT), Ahead};
buffers(read_ahead, {Size, Delay, _}) -> {Size, Delay, ?BUFFER_BYTES};
buffers({read_ahead, Ahead}, {Size, Delay, _}) -> {Size, Delay, min(Ahead, ?NO_LIMIT)};
buffers(_, Buffers) -> Buffers.

modes([], Flags, Form) ->
    case Flags band (?READ bor ?WRITE) of
        0 -> modes([], Flags bor ?READ, Form);
        ?WRITE when Flags band (?APPEND bor ?EXCLUSIVE) =:= 0 -> {Flags bor ?CREATE bor ?TRUNCATE, Form};
        ?READ -> {Flags, Form};
        _ -> {Flags bor ?CREATE, Form}
    end;
modes([Mode | Rest], Flags, Form) ->
    case Mode of
        binary -> modes(Rest, Flags, binary);
        read -> modes(Rest, Flags bor ?READ, Form);
        write -> modes(Rest, Flags bor ?WRITE, Form);
        append -> modes(Rest, Flags bor ?WRITE bor ?APPEND, Form);
        exclusive -> modes(Rest, Flags bor ?WRITE bor ?EXCLUSIVE, Form);
        sync -> modes(Rest, Flags bor ?O_SYNC, Form);
        directory -> modes(Rest, Flags bor ?DIRECTORY, Form);
        raw -> modes(Rest, Flags, Form);
        {encoding, latin1} -> modes(Rest, Flags, Form);
        read_ahead -> modes(Rest, Flags, Form);
        {read_ahead, Size} when is_integer(Size), Size > 0 -> modes(Rest, Flags, Form);
        delayed_write -> modes(Rest, Flags, Form);
        {delayed_write, Size, Delay} when is_integer(Size), Size >= 0, is_integer(Delay), Delay >= 0 ->
            modes(Rest, Flags, Form);
        _ -> error
    end;
modes(_, _, _) ->
    error.

%% @doc Closes the file. Other processes that wait with it get `{error, einval}'.
-spec close(handle()) -> ok | {error, reason()}.
close(?HANDLE(File, _)) ->
    request(fun(Ref) -> pelton_nif:file_close(File, Ref) end);
close(?BUFFERED(File, Form)) ->
    Flushed = flush(File),
    Closed = close(?HANDLE(File, Form)),
    if Flushed =:= ok -> Closed; true -> Flushed end.

%% Writes the delayed bytes.
flush(File) ->
    request(fun(Ref) -> pelton_nif:buffer_flush(File, Ref) end).

%% A function that does not use the buffer: after a flush.
unbuffered(Function, Handle, Arguments) ->
    case Handle of
        ?BUFFERED(_, _) -> flushed(Handle, fun(Plain) -> apply(?MODULE, Function, [Plain | Arguments]) end);
        _ -> {error, badarg}
    end.

flushed(?BUFFERED(File, Form), Fun) ->
    case flush(File) of
        ok -> Fun(?HANDLE(File, Form));
        Error -> Error
    end;
flushed(Handle, Fun) ->
    Fun(Handle).

buffer_read(File, Size, Form) ->
    case request(fun(Ref) -> pelton_nif:buffer_read(File, Size, Ref) end) of
        ok -> buffer_read(File, Size, Form);
        flush ->
            case flush(File) of
                ok -> buffer_read(File, Size, Form);
                Error -> Error
            end;
        Result -> formed(Result, Form)
    end.

%% @doc Reads up to `Size' bytes at the file's position, which moves. Fewer: the file has ended.
-spec read(handle(), non_neg_integer()) -> {ok, string() | binary()} | eof | {error, reason()}.
read(?HANDLE(File, Form), Size) when is_integer(Size), Size >= 0 ->
    if ?IS_OFFSET(Size) -> pread_1(File, undefined, Size, Form);
       true -> {error, einval}
    end;
read(?BUFFERED(File, Form), Size) when is_integer(Size), ?IS_OFFSET(Size) ->
    buffer_read(File, Size, Form);
read(Handle, Size) ->
    unbuffered(read, Handle, [Size]).

%% @doc Reads up to `Size' bytes at an offset. The file's position remains unchanged.
-spec pread(handle(), location(), non_neg_integer()) -> {ok, string() | binary()} | eof | {error, reason()}.
pread(?HANDLE(File, Form), Offset, Size) when is_integer(Offset), is_integer(Size), Size >= 0 ->
    if ?IS_OFFSET(Offset), ?IS_OFFSET(Size) -> pread_1(File, Offset, Size, Form);
       true -> {error, einval}
    end;
pread(Handle, {bof, Offset}, Size) when is_integer(Offset) ->
    pread(Handle, Offset, Size);
pread(Handle, Offset, Size) ->
    unbuffered(pread, Handle, [Offset, Size]).

pread_1(File, Offset, Size, Form) ->
    case pelton_nif:file_read(File, Offset, Size) of
        later -> formed(pread_later(File, Offset, Size), Form);
        {part, Bytes} ->
            case pread_later(File, Offset, Size - byte_size(Bytes)) of
                {ok, Rest} -> formed({ok, <<Bytes/binary, Rest/binary>>}, Form);
                %% The next read returns the error.
                _ -> formed({ok, Bytes}, Form)
            end;
        Result -> formed(Result, Form)
    end.

pread_later(File, Offset, Size) ->
    request(fun(Ref) -> pelton_nif:file_pread(File, Offset, Size, Ref, false) end).

%% @doc Reads a line with its `\n', which replaces a `\r\n'. With `read_ahead' it is faster, because it need not seek
%% back.
-spec read_line(handle()) -> {ok, string() | binary()} | eof | {error, reason()}.
read_line(?HANDLE(File, Form)) ->
    %% A pipe cannot seek back, so it reads single bytes.
    Step = case pelton_nif:file_seek(File, 0, 1) of {ok, _} -> 256; _ -> 1 end,
    formed(read_line_1(File, Step, <<>>), Form);
read_line(?BUFFERED(File, Form)) ->
    buffer_read(File, line, Form);
read_line(_) ->
    {error, badarg}.

read_line_1(File, Step, Before) ->
    case pread_1(File, undefined, Step, binary) of
        {ok, Bytes} ->
            case binary:match(Bytes, <<"\n">>) of
                {At, 1} ->
                    More = byte_size(Bytes) - At - 1,
                    Back = if More > 0 -> pelton_nif:file_seek(File, -More, 1); true -> {ok, 0} end,
                    case Back of
                        {ok, _} -> {ok, without_return(<<Before/binary, Bytes:At/binary>>)};
                        Error -> Error
                    end;
                nomatch -> read_line_1(File, min(2 * Step, Step * Step), <<Before/binary, Bytes/binary>>)
            end;
        eof when Before =/= <<>> -> {ok, Before};
        Result -> Result
    end.

without_return(Line) ->
    case byte_size(Line) - 1 of
        Last when Last >= 0, binary_part(Line, Last, 1) =:= <<"\r">> -> <<Line:Last/binary, "\n">>;
        _ -> <<Line/binary, "\n">>
    end.

formed(Result, binary) -> Result;
formed({ok, Bytes}, list) when is_binary(Bytes) -> {ok, binary_to_list(Bytes)};
formed({ok, Many}, list) when is_list(Many) ->
    {ok, [if One =:= eof -> eof; true -> binary_to_list(One) end || One <- Many]};
formed(Result, list) -> Result.

%% @doc Reads at several offsets, in one request.
-spec pread(handle(), [{location(), non_neg_integer()}]) -> {ok, [string() | binary() | eof]} | {error, reason()}.
pread(?HANDLE(File, Form), Locations) when is_list(Locations) ->
    {Good, Mistake} = locations(Locations, []),
    case pread_lists(File, Good, []) of
        {ok, _} when Mistake =/= none -> {error, Mistake};
        Result -> formed(Result, Form)
    end;
pread(Handle, Locations) ->
    unbuffered(pread, Handle, [Locations]).

%% The locations before the first wrong one, and its error.
locations([{{bof, Offset}, Size} | Rest], Done) -> locations([{Offset, Size} | Rest], Done);
locations([{Offset, Size} = Location | Rest], Done) when is_integer(Offset), is_integer(Size), Size >= 0 ->
    if ?IS_OFFSET(Offset), ?IS_OFFSET(Size) -> locations(Rest, [Location | Done]);
       true -> {lists:reverse(Done), einval}
    end;
locations([], Done) -> {lists:reverse(Done), none};
locations(_, Done) -> {lists:reverse(Done), badarg}.

pread_lists(_File, [], Done) ->
    {ok, lists:append(lists:reverse(Done))};
pread_lists(File, Locations, Done) ->
    {Some, Rest} = first(?LIST_MAX, Locations),
    case request(fun(Ref) -> pelton_nif:file_pread_list(File, Some, Ref, false) end) of
        {ok, Bytes} -> pread_lists(File, Rest, [Bytes | Done]);
        Error -> Error
    end.

first(Count, List) when length(List) =< Count -> {List, []};
first(Count, List) -> lists:split(Count, List).

%% @doc Writes at the file's position, which moves; for a file opened with `append', at its end.
%%
%% Up to 64 KiB are written within the call: on xfs if the kernel need not wait; on ext4 and tmpfs while no write of
%% the node has lately waited for more than 0.2 ms. So a write may block a scheduler: one at a time, never the only
%% one, at most a hundredth of the time, but for as long as that write takes. {@link pwrite_async/3} does not. The
%% first write to a file, writes to a file opened with `sync', and writes of parts of blocks that must be read first
%% run on a dirty I/O scheduler.
-spec write(handle(), iodata()) -> ok | {error, reason()}.
write(?HANDLE(File, _), Data) ->
    write_1(File, undefined, Data);
write(?BUFFERED(File, _), Data) ->
    case if is_binary(Data), Data =/= <<>> -> [Data]; true -> pieces(Data) end of
        error -> {error, badarg};
        [] -> ok;
        Pieces -> Few = few(Pieces), request(fun(Ref) -> pelton_nif:buffer_write(File, Few, Ref) end)
    end;
write(_, _) ->
    {error, badarg}.

%% @doc Writes at an offset, on the same schedulers as {@link write/2}. The file's position remains unchanged.
-spec pwrite(handle(), location(), iodata()) -> ok | {error, reason()}.
pwrite(?HANDLE(File, _), Offset, Data) when is_integer(Offset) ->
    if ?IS_OFFSET(Offset) -> write_1(File, Offset, Data);
       true -> case pieces(Data) of error -> {error, badarg}; _ -> {error, einval} end
    end;
pwrite(Handle, {bof, Offset}, Data) when is_integer(Offset) ->
    pwrite(Handle, Offset, Data);
pwrite(Handle, Offset, Data) ->
    case pieces(Data) of
        error -> {error, badarg};
        Pieces -> unbuffered(pwrite, Handle, [Offset, Pieces])
    end.

write_1(File, Offset, Data) when is_binary(Data), byte_size(Data) =< ?FAST_BYTES_MAX, Data =/= <<>> ->
    write_fast(File, Offset, [Data]);
write_1(File, Offset, Data) ->
    case pieces(Data) of
        error -> {error, badarg};
        Pieces ->
            case iolist_size(Pieces) of
                Size when Size =< ?FAST_BYTES_MAX -> write_fast(File, Offset, Pieces);
                _ -> write_by_engine(File, Offset, Pieces)
            end
    end.

write_fast(File, Offset, Pieces) ->
    case pelton_nif:file_write(File, Offset, Pieces) of
        stream -> write_by_engine(File, Offset, Pieces);
        Result -> Result
    end.

write_by_engine(File, Offset, Pieces) ->
    request(fun(Ref) -> pelton_nif:file_pwrite(File, Offset, few(Pieces), Ref, false) end).

pieces(Data) ->
    try erlang:iolist_to_iovec(Data)
    catch error:badarg -> error
    end.

few(Pieces) when length(Pieces) =< ?PIECES_MAX -> Pieces;
few(Pieces) -> [iolist_to_binary(Pieces)].

%% @doc Writes at several offsets, one after the other. As in `file', `{error, {N, Reason}}' means: the first N are
%% written.
-spec pwrite(handle(), [{location(), iodata()}]) -> ok | {error, {non_neg_integer(), reason()}} | {error, reason()}.
pwrite(?HANDLE(File, _), Locations) when is_list(Locations) ->
    {Good, Mistake} = writes(Locations, []),
    case pelton_nif:file_write_waiting(File, list, Good) of
        ok when Mistake =:= none -> ok;
        ok when Mistake =:= badarg -> {error, badarg};
        ok -> {error, {length(Good), Mistake}};
        Error -> Error
    end;
pwrite(Handle, Locations) ->
    unbuffered(pwrite, Handle, [Locations]).

%% The writes before the first wrong one, and its error.
writes([{{bof, Offset}, Data} | Rest], Done) -> writes([{Offset, Data} | Rest], Done);
writes([{Offset, Data} | Rest], Done) when is_integer(Offset) ->
    case pieces(Data) of
        error -> {lists:reverse(Done), badarg};
        Pieces when ?IS_OFFSET(Offset) -> writes(Rest, [{Offset, Pieces} | Done]);
        _ -> {lists:reverse(Done), einval}
    end;
writes([], Done) -> {lists:reverse(Done), none};
writes(_, Done) -> {lists:reverse(Done), badarg}.

%% @doc Writes the file to the disk: fsync.
-spec sync(handle()) -> ok | {error, reason()}.
sync(?HANDLE(File, _)) ->
    request(fun(Ref) -> pelton_nif:file_do(?SYNC, File, Ref, false) end);
sync(Handle) ->
    unbuffered(sync, Handle, []).

%% @doc Writes the file's data to the disk, and what is needed to read it: fdatasync.
-spec datasync(handle()) -> ok | {error, reason()}.
datasync(?HANDLE(File, _)) ->
    request(fun(Ref) -> pelton_nif:file_do(?DATASYNC, File, Ref, false) end);
datasync(Handle) ->
    unbuffered(datasync, Handle, []).

%% @doc Truncates the file at its position.
-spec truncate(handle()) -> ok | {error, reason()}.
truncate(?HANDLE(File, _)) ->
    after_others(File, fun() -> pelton_nif:file_truncate(File) end);
truncate(Handle) ->
    unbuffered(truncate, Handle, []).

%% An operation that moves the position waits until no other one uses it.
after_others(File, Move) ->
    case Move() of
        busy ->
            pause(),
            case flush(File) of
                ok -> after_others(File, Move);
                Error -> Error
            end;
        Result -> Result
    end.

%% @doc Moves the file's position, and returns the new one.
-spec position(handle(), location()) -> {ok, non_neg_integer()} | {error, reason()}.
position(?HANDLE(File, _), Location) ->
    case Location of
        Offset when is_integer(Offset) -> seek(File, Offset, 0);
        {bof, Offset} when is_integer(Offset) -> seek(File, Offset, 0);
        {cur, Offset} when is_integer(Offset) -> seek(File, Offset, 1);
        {eof, Offset} when is_integer(Offset) -> seek(File, Offset, 2);
        bof -> seek(File, 0, 0);
        cur -> seek(File, 0, 1);
        eof -> seek(File, 0, 2);
        _ -> {error, badarg}
    end;
position(Handle, Location) ->
    unbuffered(position, Handle, [Location]).

seek(_File, Offset, _) when Offset >= 1 bsl 63; Offset < -1 bsl 63 -> {error, badarg};
seek(_File, Offset, 0) when Offset < 0 -> {error, einval};
seek(File, Offset, Whence) -> after_others(File, fun() -> pelton_nif:file_seek(File, Offset, Whence) end).

%% @doc Allocates disk space for a range, and extends the file to its end.
-spec allocate(handle(), non_neg_integer(), non_neg_integer()) -> ok | {error, reason()}.
allocate(?HANDLE(File, _), Offset, Size) when is_integer(Offset), Offset >= 0, is_integer(Size), Size >= 0 ->
    if ?IS_OFFSET(Offset), ?IS_OFFSET(Size) -> pelton_nif:file_allocate(File, Offset, Size);
       true -> {error, einval}
    end;
allocate(Handle, Offset, Size) ->
    unbuffered(allocate, Handle, [Offset, Size]).

%% @doc Announces to the kernel how a range is going to be used: posix_fadvise.
-spec advise(handle(), integer(), integer(), normal | sequential | random | no_reuse | will_need | dont_need) ->
          ok | {error, reason()}.
advise(?HANDLE(File, _), Offset, Size, Advice) when is_integer(Offset), is_integer(Size) ->
    case advice(Advice) of
        error -> {error, einval};
        _ when Offset < 0; Offset >= 1 bsl 63; Size < 0; Size >= 1 bsl 63 -> {error, einval};
        Number -> pelton_nif:file_advise(File, Offset, Size, Number)
    end;
advise(Handle, Offset, Size, Advice) ->
    unbuffered(advise, Handle, [Offset, Size, Advice]).

advice(normal) -> 0;
advice(sequential) -> 1;
advice(random) -> 2;
advice(no_reuse) -> 3;
advice(will_need) -> 4;
advice(dont_need) -> 5;
advice(_) -> error.

%% ---- Without waiting ----

%% @doc As {@link pread/3}, without waiting. Bytes always come as a binary.
-spec pread_async(handle(), non_neg_integer(), non_neg_integer()) -> reference().
pread_async(?HANDLE(File, _) = Handle, Offset, Size) ->
    Ref = make_ref(),
    case pelton_nif:file_pread(File, Offset, Size, Ref, true) of
        busy -> pause(), pread_async(Handle, Offset, Size);
        Result -> result(Result, Ref, false)
    end;
pread_async(Handle, Offset, Size) ->
    unbuffered_async(pread_async, Handle, [Offset, Size]).

%% It waits for the flush of the delayed bytes.
unbuffered_async(Function, ?BUFFERED(_, _) = Handle, Arguments) ->
    case unbuffered(Function, Handle, Arguments) of
        {error, _} = Error -> result(Error, make_ref(), false);
        Ref -> Ref
    end.

%% @doc As {@link pread/2}, without waiting, for at most 256 offsets.
-spec pread_async(handle(), [{non_neg_integer(), non_neg_integer()}, ...]) -> reference().
pread_async(?HANDLE(File, _) = Handle, Locations) ->
    Ref = make_ref(),
    case pelton_nif:file_pread_list(File, Locations, Ref, true) of
        busy -> pause(), pread_async(Handle, Locations);
        Result -> result(Result, Ref, false)
    end;
pread_async(Handle, Locations) ->
    unbuffered_async(pread_async, Handle, [Locations]).

%% @doc As {@link pwrite/3}, without waiting.
-spec pwrite_async(handle(), non_neg_integer(), iodata()) -> reference().
pwrite_async(?HANDLE(File, _) = Handle, Offset, Data) ->
    Ref = make_ref(),
    case pelton_nif:file_pwrite(File, Offset, few(erlang:iolist_to_iovec(Data)), Ref, true) of
        busy -> pause(), pwrite_async(Handle, Offset, Data);
        Result -> result(Result, Ref, false)
    end;
pwrite_async(Handle, Offset, Data) ->
    unbuffered_async(pwrite_async, Handle, [Offset, Data]).

%% @doc As {@link sync/1}, without waiting.
-spec sync_async(handle()) -> reference().
sync_async(?HANDLE(File, _)) -> do_async(?SYNC, File);
sync_async(Handle) -> unbuffered_async(sync_async, Handle, []).

%% @doc As {@link datasync/1}, without waiting.
-spec datasync_async(handle()) -> reference().
datasync_async(?HANDLE(File, _)) -> do_async(?DATASYNC, File);
datasync_async(Handle) -> unbuffered_async(datasync_async, Handle, []).

do_async(Kind, File) ->
    Ref = make_ref(),
    case pelton_nif:file_do(Kind, File, Ref, true) of
        busy -> pause(), do_async(Kind, File);
        Result -> result(Result, Ref, false)
    end.

%% Returns the reference, or, if the caller waits, the result. An error of the call is sent as well. The compiler marks
%% the mailbox where a reference is made, and the receive of a caller that waits begins at the mark. A function that
%% returns its reference removes the mark, so the receive of a later await/2 scans the mailbox.
result(pending, Ref, true) -> await(Ref, infinity);
%% No message is sent. The receive removes the mark: OTP 25.2 has crashed when a process had left more than eight.
result(Result, Ref, true) -> receive {pelton, Ref, Never} -> Never after 0 -> Result end;
result(pending, Ref, false) -> Ref;
result({error, _} = Error, Ref, false) -> self() ! {pelton, Ref, Error}, Ref.

%% @equiv await(Ref, infinity)
-spec await(reference()) -> term().
await(Ref) ->
    await(Ref, infinity).

%% @doc Waits for the result of an asynchronous function, until the timeout in milliseconds. After `{error, timeout}'
%% the result is still sent. It scans the mailbox from its beginning, as any receive of a reference that another
%% function returned: some 10 ms for a million messages. {@link pread/3} and the others that wait do not.
-spec await(reference(), timeout()) -> term() | {error, timeout}.
await(Ref, Timeout) ->
    receive {pelton, Ref, Result} -> Result
    after Timeout -> {error, timeout}
    end.

%% ---- Whole files, and names ----

%% @doc Reads a whole file.
-spec read_file(name()) -> {ok, binary()} | {error, reason()}.
read_file(Name) ->
    with_path(Name, fun(Path) ->
        case open_path(Path, ?READ) of
            {ok, File, Size} ->
                Read = read_all(File, max(Size, 4096), []),
                _ = request(fun(Ref) -> pelton_nif:file_close(File, Ref) end),
                Read;
            Error -> Error
        end
    end).

%% The first read has one byte more than the file's size, which may grow, or be unknown (0). A short read is the end, or
%% precedes an error, which the next read returns.
read_all(File, Size, Done) ->
    case pread_1(File, undefined, Size + 1, binary) of
        {ok, Bytes} -> read_all(File, 65535, [Bytes | Done]);
        eof -> {ok, whole(Done)};
        Error -> Error
    end.

whole([Bytes]) -> Bytes;
whole(Done) -> iolist_to_binary(lists:reverse(Done)).

%% @equiv write_file(Name, Data, [])
-spec write_file(name(), iodata()) -> ok | {error, reason()}.
write_file(Name, Data) ->
    write_file(Name, Data, []).

%% @doc Writes a whole file, with more modes of {@link open/2}.
-spec write_file(name(), iodata(), [mode()]) -> ok | {error, reason()}.
write_file(Name, Data, Modes) when is_list(Modes) ->
    case {pieces(Data), modes([write, binary | Modes], 0, binary)} of
        {error, _} -> {error, badarg};
        {_, error} -> {error, badarg};
        {Pieces, {Flags, _}} ->
            with_path(Name, fun(Path) ->
                case open_path(Path, Flags) of
                    {ok, File, _} ->
                        Written = write_1(File, undefined, Pieces),
                        Closed = request(fun(Ref) -> pelton_nif:file_close(File, Ref) end),
                        if Written =:= ok -> Closed; true -> Written end;
                    Error -> Error
                end
            end)
    end;
write_file(_, _, _) ->
    {error, badarg}.

%% @equiv read_file_info(Name, [])
-spec read_file_info(handle() | name()) -> {ok, file:file_info()} | {error, reason()}.
read_file_info(Name) -> read_file_info(Name, []).

%% @doc Returns the status of a file; for a symbolic link, of its target. `access' is derived from the permission bits.
-spec read_file_info(handle() | name(), [info_option()]) -> {ok, file:file_info()} | {error, reason()}.
read_file_info(#file_descriptor{} = Handle, Options) -> read_handle_info(Handle, Options);
read_file_info(Name, Options) -> info(?STAT, Name, Options).

%% @equiv read_link_info(Name, [])
-spec read_link_info(name()) -> {ok, file:file_info()} | {error, reason()}.
read_link_info(Name) -> read_link_info(Name, []).

%% @doc As {@link read_file_info/2}, for a symbolic link itself.
-spec read_link_info(name(), [info_option()]) -> {ok, file:file_info()} | {error, reason()}.
read_link_info(Name, Options) -> info(?LSTAT, Name, Options).

%% @doc {@link read_file_info/2} with times in seconds since 1970.
-spec stat(name()) -> {ok, file:file_info()} | {error, reason()}.
stat(Name) -> info(?STAT, Name, [{time, posix}]).

%% @doc {@link read_link_info/2} with times in seconds since 1970.
-spec lstat(name()) -> {ok, file:file_info()} | {error, reason()}.
lstat(Name) -> info(?LSTAT, Name, [{time, posix}]).

info(Kind, Name, Options) ->
    case info_of(fun() -> by_path(Kind, Name) end, Options) of
        {ok, #file_info{type = Type, access = Access} = Info} ->
            {ok, Info#file_info{access = access(Type, Access, Name), minor_device = device(Type, Name)}};
        Error -> Error
    end.

info_of(Query, Options) ->
    case time_option(Options) of
        error -> {error, badarg};
        Time ->
            case Query() of
                {ok, {Type, Size, Access, Accessed, Modified, Changed, Mode, Links, Device, Inode, Uid, Gid}} ->
                    {ok, #file_info{size = Size, type = Type, access = Access, mode = Mode, links = Links,
                                    inode = Inode, major_device = Device, minor_device = 0, uid = Uid, gid = Gid,
                                    atime = time_of(Accessed, Time), mtime = time_of(Modified, Time),
                                    ctime = time_of(Changed, Time)}};
                Error -> Error
            end
    end.

%% @doc Sends `Bytes' bytes of the file from an offset, or all up to its end, through a sender of {@link pelton}, as
%% messages of `MessageBytes' bytes; the last one may be shorter. The kernel reads into the channel's memory, without
%% a binary. Waits for free space. Returns the number of bytes sent, fewer if the file has ended. `{error, {Reason,
%% Count}}': it failed after Count bytes. Meanwhile other uses of the sender return `{error, in_operation}'.
-spec send(handle(), pelton:endpoint(), non_neg_integer(), non_neg_integer() | infinity, pos_integer()) ->
          {ok, non_neg_integer()} | {error, atom() | {atom(), pos_integer()}}.
send(?HANDLE(File, _), Sender, Offset, Bytes, MessageBytes) when is_integer(MessageBytes), MessageBytes > 0 ->
    transfer(false, File, Sender, Offset, Bytes, MessageBytes);
send(Handle, Sender, Offset, Bytes, MessageBytes) ->
    unbuffered(send, Handle, [Sender, Offset, Bytes, MessageBytes]).

%% @doc Receives messages of a passive receiver of {@link pelton}, and writes them one after the other from an offset,
%% without a binary. It ends when the next message would exceed `Bytes' bytes, and leaves that; with `infinity' when
%% the sender has closed. Waits for messages. Otherwise as {@link send/5}.
-spec recv(handle(), pelton:endpoint(), non_neg_integer(), non_neg_integer() | infinity) ->
          {ok, non_neg_integer()} | {error, atom() | {atom(), pos_integer()}}.
recv(?HANDLE(File, _), Receiver, Offset, Bytes) ->
    transfer(true, File, Receiver, Offset, Bytes, 0);
recv(Handle, Receiver, Offset, Bytes) ->
    unbuffered(recv, Handle, [Receiver, Offset, Bytes]).

transfer(IsReceive, File, Endpoint, Offset, infinity, MessageBytes) ->
    transfer(IsReceive, File, Endpoint, Offset, 1 bsl 62, MessageBytes);
transfer(IsReceive, File, Endpoint, Offset, Bytes, MessageBytes)
  when is_integer(Offset), ?IS_OFFSET(Offset), is_integer(Bytes), ?IS_OFFSET(Bytes), MessageBytes < 1 bsl 63 ->
    request(fun(Ref) -> pelton_nif:file_transfer(IsReceive, File, Offset, Bytes, Endpoint, MessageBytes, Ref) end);
transfer(_, _, _, _, _, _) ->
    {error, badarg}.

%% @equiv read_handle_info(Handle, [])
-spec read_handle_info(handle()) -> {ok, file:file_info()} | {error, reason()}.
read_handle_info(Handle) -> read_handle_info(Handle, []).

%% @doc Returns the status of an open file. `minor_device' is 0.
-spec read_handle_info(handle(), [info_option()]) -> {ok, file:file_info()} | {error, reason()}.
read_handle_info(?HANDLE(File, _), Options) ->
    info_of(fun() -> request(fun(Ref) -> pelton_nif:file_do(?FSTAT, File, Ref, false) end) end, Options);
read_handle_info(Handle, Options) ->
    unbuffered(read_handle_info, Handle, [Options]).

%% The number of a device, which pelton_stat does not have.
device(device, Name) ->
    case file:read_file_info(Name, [raw]) of
        {ok, #file_info{minor_device = Device}} -> Device;
        _ -> 0
    end;
device(_, _) -> 0.

%% The access to a link is that to its target.
access(symlink, _, Name) ->
    case by_path(?STAT, Name) of
        {ok, Stat} -> element(3, Stat);
        _ -> none
    end;
access(_, Access, _) -> Access.

time_option(Options) when is_list(Options) ->
    case [Time || {time, Time} <- Options] of
        [] -> local;
        [Time | _] when Time =:= local; Time =:= universal; Time =:= posix -> Time;
        _ -> error
    end;
time_option(_) ->
    error.

time_of(Seconds, posix) -> Seconds;
time_of(Seconds, universal) -> calendar:system_time_to_universal_time(Seconds, second);
time_of(Seconds, local) -> erlang:universaltime_to_localtime(time_of(Seconds, universal)).

%% @equiv write_file_info(Name, Info, [])
-spec write_file_info(name(), file:file_info()) -> ok | {error, reason()}.
write_file_info(Name, Info) -> write_file_info(Name, Info, []).

%% @doc Sets the times of a file; `undefined' leaves one unchanged. `file' sets its mode and owner.
-spec write_file_info(name(), file:file_info(), [info_option()]) -> ok | {error, reason()}.
write_file_info(Name, #file_info{mode = undefined, uid = undefined, gid = undefined,
                                 atime = Accessed, mtime = Modified}, Options) ->
    case time_option(Options) of
        error -> {error, badarg};
        Time ->
            try {seconds_of(Accessed, Time), seconds_of(Modified, Time)} of
                {undefined, undefined} -> ok;
                {AccessedSeconds, ModifiedSeconds} -> utime(Name, AccessedSeconds, ModifiedSeconds)
            catch error:_ -> {error, badarg}
            end
    end;
write_file_info(Name, #file_info{} = Info, Options) when is_list(Options) ->
    file:write_file_info(Name, Info, [raw | Options]);
write_file_info(_, _, _) ->
    {error, badarg}.

-spec seconds_of(accessed(), local | universal | posix) -> integer() | undefined.
seconds_of(undefined, _) -> undefined;
seconds_of(Seconds, posix) when is_integer(Seconds) -> Seconds;
seconds_of(Time, universal) -> calendar:datetime_to_gregorian_seconds(Time) - 62167219200;
seconds_of(Time, local) -> seconds_of(erlang:localtime_to_universaltime(Time), universal).

%% @doc Sets the times of a file's last access and change, in seconds since 1970; `undefined' leaves one unchanged.
-spec utime(name(), integer() | undefined, integer() | undefined) -> ok | {error, reason()}.
utime(Name, Accessed, Modified) when abs(Accessed) > ?SECONDS_MAX; abs(Modified) > ?SECONDS_MAX ->
    file:write_file_info(Name, #file_info{atime = Accessed, mtime = Modified}, [raw, {time, posix}]);
utime(Name, Accessed, Modified) ->
    with_path(Name, fun(Path) ->
        AccessedNs = nanoseconds(Accessed),
        ModifiedNs = nanoseconds(Modified),
        request(fun(Ref) -> pelton_nif:path_do(?TIMES, Path, undefined, AccessedNs, ModifiedNs, Ref) end)
    end).

nanoseconds(undefined) -> undefined;
nanoseconds(Seconds) -> Seconds * 1000000000.

%% @doc Lists the names in a directory, without those that are not in the encoding of file names.
-spec list_dir(name()) -> {ok, [file:filename()]} | {error, reason()}.
list_dir(Name) ->
    case entries(Name) of
        {ok, Names} -> {ok, [List || One <- Names, List <- [listed(One)], is_list(List)]};
        Error -> Error
    end.

%% @doc Lists the names in a directory; those that are not in the encoding of file names as binaries.
-spec list_dir_all(name()) -> {ok, [file:filename_all()]} | {error, reason()}.
list_dir_all(Name) ->
    case entries(Name) of
        {ok, Names} -> {ok, [listed(One) || One <- Names]};
        Error -> Error
    end.

entries(Name) ->
    with_path(Name, fun(Path) ->
        case open_path(Path, ?READ bor ?DIRECTORY) of
            {ok, Directory, _} ->
                Entries = entries_1(Directory, []),
                _ = request(fun(Ref) -> pelton_nif:file_close(Directory, Ref) end),
                Entries;
            Error -> Error
        end
    end).

entries_1(Directory, Done) ->
    case request(fun(Ref) -> pelton_nif:file_do(?LIST, Directory, Ref, false) end) of
        {ok, <<>>} -> {ok, lists:append(Done)};
        {ok, Entries} -> entries_1(Directory, [names(Entries) | Done]);
        Error -> Error
    end.

%% Each entry is its inode, its kind, and its name, which ends with a zero.
names(<<_Inode:64, _Kind, Rest/binary>>) ->
    [Name, Others] = binary:split(Rest, <<0>>),
    [Name | names(Others)];
names(<<>>) -> [].

%% A name as a list, if it can be one.
listed(Name) ->
    case file:native_name_encoding() of
        latin1 -> binary_to_list(Name);
        utf8 ->
            case unicode:characters_to_list(Name) of
                List when is_list(List) -> List;
                _ -> Name
            end
    end.

%% @doc Removes a file: {@link file:delete/1}.
-spec del_file(name()) -> ok | {error, reason()}.
del_file(Name) ->
    case by_path(?UNLINK, Name) of
        %% POSIX and `file' have this error.
        {error, eisdir} -> {error, eperm};
        Result -> Result
    end.

%% @equiv del_file(Name)
-spec delete(name()) -> ok | {error, reason()}.
delete(Name) -> del_file(Name).

%% @doc Removes an empty directory.
-spec del_dir(name()) -> ok | {error, reason()}.
del_dir(Name) -> by_path(?RMDIR, Name).

%% @doc Renames a file, and replaces one of the new name.
-spec rename(name(), name()) -> ok | {error, reason()}.
rename(From, To) -> by_paths(?RENAME, From, To).

%% @doc Creates a directory.
-spec make_dir(name()) -> ok | {error, reason()}.
make_dir(Name) -> by_path(?MKDIR, Name).

%% @doc Creates a hard link, `New', to a file.
-spec make_link(name(), name()) -> ok | {error, reason()}.
make_link(Existing, New) -> by_paths(?LINK, Existing, New).

%% @doc Creates a symbolic link, `New', with the content `Existing'.
-spec make_symlink(name(), name()) -> ok | {error, reason()}.
make_symlink(Existing, New) -> by_paths(?SYMLINK, Existing, New).

%% @doc Returns the content of a symbolic link.
-spec read_link(name()) -> {ok, file:filename()} | {error, reason()}.
read_link(Name) ->
    case read_link_all(Name) of
        {ok, Path} when is_binary(Path) -> {error, einval};
        Read -> Read
    end.

%% @doc As {@link read_link/1}; a content that is not in the encoding of file names as a binary.
-spec read_link_all(name()) -> {ok, file:filename_all()} | {error, reason()}.
read_link_all(Name) ->
    case by_path(?READ_LINK, Name) of
        {ok, Path} -> {ok, listed(Path)};
        Error -> Error
    end.

%% @equiv copy(From, To, infinity)
-spec copy(opened_or_name(), opened_or_name()) -> {ok, non_neg_integer()} | {error, reason()}.
copy(From, To) -> copy(From, To, infinity).

%% @doc Copies up to `Bytes' bytes from one file to another, in the kernel, which may share blocks. With a handle it
%% begins at the position, which moves.
-spec copy(opened_or_name(), opened_or_name(), non_neg_integer() | infinity) ->
          {ok, non_neg_integer()} | {error, reason()}.
copy(From, To, Bytes) when Bytes =:= infinity; is_integer(Bytes), Bytes >= 0 ->
    with_handle(From, read, fun(FromHandle) ->
        with_handle(To, write, fun(ToHandle) ->
            %% After both are open.
            flushed(FromHandle, fun(FromPlain) ->
                flushed(ToHandle, fun(ToPlain) -> copy_1(FromPlain, ToPlain, Bytes) end)
            end)
        end)
    end);
copy(_, _, _) ->
    {error, badarg}.

copy_1(?HANDLE(From, _) = FromHandle, ?HANDLE(To, _) = ToHandle, Bytes) ->
    Most = if Bytes =:= infinity -> 1 bsl 62; true -> min(Bytes, 1 bsl 62) end,
    case {seek(From, 0, 1), seek(To, 0, 1)} of
        {{ok, FromOffset}, {ok, ToOffset}} ->
            case request(fun(Ref) -> pelton_nif:file_copy(From, FromOffset, To, ToOffset, Most, Ref) end) of
                {ok, Count} ->
                    {ok, _} = seek(From, FromOffset + Count, 0),
                    {ok, _} = seek(To, ToOffset + Count, 0),
                    {ok, Count};
                %% The kernel refuses append mode, and overlapping ranges; or a file is not open for this, which a write
                %% reports.
                {error, Reason} when Reason =:= ebadf; Reason =:= einval ->
                    copy_by_blocks(FromHandle, ToHandle, Most, 0);
                Error -> Error
            end;
        %% A pipe or similar.
        {{error, espipe}, _} -> copy_by_blocks(FromHandle, ToHandle, Most, 0);
        {_, {error, espipe}} -> copy_by_blocks(FromHandle, ToHandle, Most, 0);
        {{ok, _}, Error} -> Error;
        {Error, _} -> Error
    end.

copy_by_blocks(_, _, 0, Done) ->
    {ok, Done};
copy_by_blocks(?HANDLE(File, _) = From, To, Left, Done) ->
    case pread_1(File, undefined, min(Left, 65536), binary) of
        {ok, Bytes} ->
            case write(To, Bytes) of
                ok -> copy_by_blocks(From, To, Left - byte_size(Bytes), Done + byte_size(Bytes));
                Error -> Error
            end;
        eof -> {ok, Done};
        Error -> Error
    end.

with_handle(?HANDLE(_, _) = Handle, _Mode, Fun) -> Fun(Handle);
with_handle(?BUFFERED(_, _) = Handle, _Mode, Fun) -> Fun(Handle);
with_handle({Name, Modes}, Mode, Fun) when is_list(Modes) -> with_open(Name, [Mode, binary | Modes], Fun);
with_handle(Name, Mode, Fun) -> with_open(Name, [Mode, binary], Fun).

with_open(Name, Modes, Fun) ->
    case open(Name, Modes) of
        {ok, Handle} ->
            Result = Fun(Handle),
            _ = close(Handle),
            Result;
        Error -> Error
    end.

by_path(Kind, Name) ->
    with_path(Name, fun(Path) ->
        request(fun(Ref) -> pelton_nif:path_do(Kind, Path, undefined, undefined, undefined, Ref) end)
    end).

by_paths(Kind, Name, Other) ->
    with_path(Name, fun(Path) ->
        with_path(Other, fun(OtherPath) ->
            request(fun(Ref) -> pelton_nif:path_do(Kind, Path, OtherPath, undefined, undefined, Ref) end)
        end)
    end).

with_path(Name, Fun) ->
    case path(Name) of
        error -> {error, badarg};
        Path -> Fun(Path)
    end.

%% A name as the kernel takes it, with a zero at its end.
path(Name) when is_binary(Name) ->
    case binary:match(Name, <<0>>) of
        nomatch -> <<Name/binary, 0>>;
        _ -> error
    end;
path(Name) when is_list(Name); is_atom(Name) ->
    try unicode:characters_to_binary(filename:flatten(Name), unicode, file:native_name_encoding()) of
        Path when is_binary(Path) -> path(Path);
        _ -> error
    catch error:_ -> error
    end;
path(_) ->
    error.

%% Submits a request, and waits for the result.
request(Submit) ->
    Ref = make_ref(),
    case Submit(Ref) of
        busy -> pause(), request(Submit);
        Result -> result(Result, Ref, true)
    end.

%% Thousands of requests of this scheduler are in flight, or another operation uses the file's position.
pause() ->
    receive after 1 -> ok end.
