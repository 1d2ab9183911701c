%% @doc Files, as in {@link //kernel/file}, without a server, a port or a copy between, and without keeping a scheduler, but for what {@link write/2} says.
%%
%% A program changes the module's name: options, results and error atoms are those of `file' with `raw'. What the page cache has is answered
%% in the call itself, and so are small writes that it takes; for the rest the process waits for a message, by a receive that does not look at the mailbox. The handle that
%% {@link open/2} answers also serves the functions of `file' that take one.
%%
%% What is different:
%% <ul>
%% <li>Any process may use a handle. It is closed by {@link close/1}, when the process that opened it ends, or when nobody refers to it.
%% {@link read/2}, {@link write/2} and {@link position/2} share the file's one position; {@link pread/3} and {@link pwrite/3} do not look at it.</li>
%% <li>{@link open/2} sets `message_queue_data' of the calling process to `off_heap', as a large mailbox on the heap is walked by every
%% garbage collection, and reading makes garbage. `{mailbox, unchanged}' among the modes leaves it alone. `{garbage, Bytes}' has the process collected less
%% often: so much of what was read may lie about, by the runtime's measure, whose own is 370 kB.</li>
%% <li>`pread_async' and the like answer a reference, and `{pelton, Ref, Result}' comes: see {@link await/2}.</li>
%% </ul>
-module(pelton_file).
-export([open/2, close/1, read/2, pread/2, pread/3, write/2, pwrite/2, pwrite/3, sync/1, datasync/1, truncate/1, position/2, allocate/3,
         advise/4, read_line/1, read_handle_info/1, read_handle_info/2, send/5, recv/4]).
-export([pread_async/2, pread_async/3, pwrite_async/3, sync_async/1, datasync_async/1, await/1, await/2]).
-export([read_file/1, write_file/2, write_file/3, read_file_info/1, read_file_info/2, read_link_info/1, read_link_info/2,
         write_file_info/2, write_file_info/3, list_dir/1, list_dir_all/1, del_file/1, delete/1, del_dir/1, rename/2, copy/2, copy/3,
         make_dir/1, make_link/2, make_symlink/2, read_link/1, read_link_all/1, stat/1, lstat/1, utime/3]).
-export_type([handle/0, mode/0, reason/0, location/0]).

-include_lib("kernel/include/file.hrl").

-type handle() :: #file_descriptor{}.
%% What {@link open/2} answers.
-type reason() :: file:posix() | badarg | terminated.
-type mode() :: read | write | append | exclusive | raw | binary | sync | directory | read_ahead | {read_ahead, pos_integer()} |
                delayed_write | {delayed_write, non_neg_integer(), non_neg_integer()} | {encoding, latin1} | {mailbox, off_heap | unchanged} |
                {garbage, pos_integer()}.
-type location() :: integer() | {bof | cur | eof, integer()} | bof | cur | eof.
-type name() :: file:name_all().
-type info_option() :: {time, local | universal | posix} | raw.
-type accessed() :: undefined | file:date_time() | integer().

-define(HANDLE(File, Form), #file_descriptor{module = ?MODULE, data = {File, Form}}).
%% With delayed_write or read_ahead.
-define(BUFFERED(File, Form), #file_descriptor{module = ?MODULE, data = {File, Form, buffered}}).

%% What the system takes as a place in a file. Comparing with a number that is no word is a call.
-define(IS_PLACE(Offset), Offset >= 0, (Offset < 1 bsl 58 orelse Offset < 1 bsl 63)).
%% Where the system's times, of nanoseconds in 64 bits, end.
-define(SECONDS_MAX, 9223372036).

%% So many reads go in one submission.
-define(LIST_MAX, 256).
%% Up to here a write to a regular file is done in the call or on a dirty scheduler: it is sooner done than told. What is larger goes to the ring.
-define(NOW_BYTES_MAX, 262144).
-define(PIECES_MAX, 1023).
%% What buffers have if nobody says otherwise, in bytes and milliseconds; and what is as good as no end.
-define(BUFFER_BYTES, 65536).
-define(DELAY, 2000).
-define(NO_END, 1 bsl 40).

%% The functions of the NIF that have a number.
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

%% @doc Opens a file, as {@link file:open/2} does with `raw'. Neither `compressed', `ram' nor an encoding but `latin1' is to be had:
%% `{error, badarg}'.
%%
%% `delayed_write' and `read_ahead' are as there. What was written is also flushed when the owner ends and when the application stops; of a handle that
%% is forgotten, when its time has come. An error that nobody has waited for is what the next operation answers, which is not done then; or
%% {@link close/1}, which closes all the same.
-spec open(name(), [mode()]) -> {ok, handle()} | {error, reason()}.
open(Name, Modes) when is_list(Modes) ->
    case {path(Name), modes(Modes, 0, list)} of
        {error, _} -> {error, badarg};
        {_, error} -> {error, badarg};
        {Path, {Flags, Form}} ->
            ok = prepare(Modes),
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
    ask(fun(Ref) -> pelton_nif:file_open(Path, Flags, Flags band ?DIRECTORY =/= 0, Buffers, Ref) end).

buffers(delayed_write, {_, _, Ahead}) -> {?BUFFER_BYTES, ?DELAY, Ahead};
buffers({delayed_write, Size, Delay}, {_, _, Ahead}) -> {min(Size, ?NO_END), min(Delay, ?NO_END), Ahead};
buffers(read_ahead, {Size, Delay, _}) -> {Size, Delay, ?BUFFER_BYTES};
buffers({read_ahead, Ahead}, {Size, Delay, _}) -> {Size, Delay, min(Ahead, ?NO_END)};
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
        {mailbox, How} when How =:= unchanged; How =:= off_heap -> modes(Rest, Flags, Form);
        {garbage, Bytes} when is_integer(Bytes), Bytes > 0 -> modes(Rest, Flags, Form);
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

%% What the calling process is to have.
prepare(Modes) ->
    case lists:keyfind(mailbox, 1, Modes) of
        {mailbox, unchanged} -> ok;
        _ -> _ = process_flag(message_queue_data, off_heap), ok
    end,
    case lists:keyfind(garbage, 1, Modes) of
        {garbage, Bytes} ->
            Words = Bytes div erlang:system_info(wordsize),
            %% The next collection takes it up.
            process_flag(min_bin_vheap_size, Words) =:= Words orelse erlang:garbage_collect(),
            ok;
        false -> ok
    end.

%% @doc Closes it. What other processes wait for with it ends: `{error, einval}'.
-spec close(handle()) -> ok | {error, reason()}.
close(?HANDLE(File, _)) ->
    ask(fun(Ref) -> pelton_nif:file_close(File, Ref) end);
close(?BUFFERED(File, Form)) ->
    Flushed = flush(File),
    Closed = close(?HANDLE(File, Form)),
    if Flushed =:= ok -> Closed; true -> Flushed end.

%% What was written is so indeed.
flush(File) ->
    ask(fun(Ref) -> pelton_nif:buffer_flush(File, Ref) end).

%% What is not done by a buffer comes after what was written.
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
    case ask(fun(Ref) -> pelton_nif:buffer_read(File, Size, Ref) end) of
        ok -> buffer_read(File, Size, Form);
        flush ->
            case flush(File) of
                ok -> buffer_read(File, Size, Form);
                Error -> Error
            end;
        Result -> formed(Result, Form)
    end.

%% @doc Reads so many bytes, or as many as there are, from the file's position on, which moves.
-spec read(handle(), non_neg_integer()) -> {ok, string() | binary()} | eof | {error, reason()}.
read(?HANDLE(File, Form), Size) when is_integer(Size), Size >= 0 ->
    if ?IS_PLACE(Size) -> pread_1(File, undefined, Size, Form);
       true -> {error, einval}
    end;
read(?BUFFERED(File, Form), Size) when is_integer(Size), ?IS_PLACE(Size) ->
    buffer_read(File, Size, Form);
read(Handle, Size) ->
    unbuffered(read, Handle, [Size]).

%% @doc Reads at a place. The file's position stays where it is.
-spec pread(handle(), location(), non_neg_integer()) -> {ok, string() | binary()} | eof | {error, reason()}.
pread(?HANDLE(File, Form), Offset, Size) when is_integer(Offset), is_integer(Size), Size >= 0 ->
    if ?IS_PLACE(Offset), ?IS_PLACE(Size) -> pread_1(File, Offset, Size, Form);
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
                %% The next read tells of an error.
                _ -> formed({ok, Bytes}, Form)
            end;
        Result -> formed(Result, Form)
    end.

pread_later(File, Offset, Size) ->
    ask(fun(Ref) -> pelton_nif:file_pread(File, Offset, Size, Ref, false) end).

%% @doc Reads a line, with its `\n'; `\r\n' is made one. Finding where it ends, and going back there, costs less with `read_ahead'.
-spec read_line(handle()) -> {ok, string() | binary()} | eof | {error, reason()}.
read_line(?HANDLE(File, Form)) ->
    %% Of what has no position, nothing can be given back.
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
formed({ok, Many}, list) when is_list(Many) -> {ok, [if One =:= eof -> eof; true -> binary_to_list(One) end || One <- Many]};
formed(Result, list) -> Result.

%% @doc Reads at several places, all asked for at once.
-spec pread(handle(), [{location(), non_neg_integer()}]) -> {ok, [string() | binary() | eof]} | {error, reason()}.
pread(?HANDLE(File, Form), Places) when is_list(Places) ->
    {Good, Mistake} = places(Places, []),
    case pread_lists(File, Good, []) of
        {ok, _} when Mistake =/= none -> {error, Mistake};
        Result -> formed(Result, Form)
    end;
pread(Handle, Places) ->
    unbuffered(pread, Handle, [Places]).

%% Those before the first that cannot be, and what is wrong with that.
places([{{bof, Offset}, Size} | Rest], Done) -> places([{Offset, Size} | Rest], Done);
places([{Offset, Size} = Place | Rest], Done) when is_integer(Offset), is_integer(Size), Size >= 0 ->
    if ?IS_PLACE(Offset), ?IS_PLACE(Size) -> places(Rest, [Place | Done]);
       true -> {lists:reverse(Done), einval}
    end;
places([], Done) -> {lists:reverse(Done), none};
places(_, Done) -> {lists:reverse(Done), badarg}.

pread_lists(_File, [], Done) ->
    {ok, lists:append(lists:reverse(Done))};
pread_lists(File, Places, Done) ->
    {Some, Rest} = first(?LIST_MAX, Places),
    case ask(fun(Ref) -> pelton_nif:file_pread_list(File, Some, Ref, false) end) of
        {ok, Bytes} -> pread_lists(File, Rest, [Bytes | Done]);
        Error -> Error
    end.

first(Count, List) when length(List) =< Count -> {List, []};
first(Count, List) -> lists:split(Count, List).

%% @doc Writes at the file's position, which moves; of a file opened with `append', at its end.
%%
%% Up to 64 KiB are written in the call, by xfs if it need not wait, by ext4 and tmpfs as long as no write of the node's has waited for more than 0.2 ms
%% lately. So it may keep a scheduler now and then: one at a time, never the only one, for a hundredth of the time at most, but for as long as that one write
%% takes. {@link pwrite_async/3} does not. The first write to a file, all to files opened with `sync', and parts of blocks that would have to be
%% read first are done on a dirty I/O scheduler.
-spec write(handle(), iodata()) -> ok | {error, reason()}.
write(?HANDLE(File, _), Data) ->
    write_1(File, undefined, Data);
write(?BUFFERED(File, _), Data) ->
    case if is_binary(Data), Data =/= <<>> -> [Data]; true -> pieces(Data) end of
        error -> {error, badarg};
        [] -> ok;
        Pieces -> Few = few(Pieces), ask(fun(Ref) -> pelton_nif:buffer_write(File, Few, Ref) end)
    end;
write(_, _) ->
    {error, badarg}.

%% @doc Writes at a place, where {@link write/2} would. The file's position stays where it is.
-spec pwrite(handle(), location(), iodata()) -> ok | {error, reason()}.
pwrite(?HANDLE(File, _), Offset, Data) when is_integer(Offset) ->
    if ?IS_PLACE(Offset) -> write_1(File, Offset, Data);
       true -> case pieces(Data) of error -> {error, badarg}; _ -> {error, einval} end
    end;
pwrite(Handle, {bof, Offset}, Data) when is_integer(Offset) ->
    pwrite(Handle, Offset, Data);
pwrite(Handle, Offset, Data) ->
    case pieces(Data) of
        error -> {error, badarg};
        Pieces -> unbuffered(pwrite, Handle, [Offset, Pieces])
    end.

write_1(File, Offset, Data) when is_binary(Data), byte_size(Data) =< ?NOW_BYTES_MAX, Data =/= <<>> ->
    write_now(File, Offset, [Data]);
write_1(File, Offset, Data) ->
    case pieces(Data) of
        error -> {error, badarg};
        Pieces ->
            case iolist_size(Pieces) of
                Size when Size =< ?NOW_BYTES_MAX -> write_now(File, Offset, Pieces);
                _ -> write_by_engine(File, Offset, Pieces)
            end
    end.

write_now(File, Offset, Pieces) ->
    case pelton_nif:file_write(File, Offset, Pieces) of
        stream -> write_by_engine(File, Offset, Pieces);
        Result -> Result
    end.

write_by_engine(File, Offset, Pieces) ->
    ask(fun(Ref) -> pelton_nif:file_pwrite(File, Offset, few(Pieces), Ref, false) end).

pieces(Data) ->
    try erlang:iolist_to_iovec(Data)
    catch error:badarg -> error
    end.

few(Pieces) when length(Pieces) =< ?PIECES_MAX -> Pieces;
few(Pieces) -> [iolist_to_binary(Pieces)].

%% @doc Writes at several places, one after the other. `{error, {N, Reason}}': the first N are written.
-spec pwrite(handle(), [{location(), iodata()}]) -> ok | {error, {non_neg_integer(), reason()}} | {error, reason()}.
pwrite(?HANDLE(File, _), Places) when is_list(Places) ->
    {Good, Mistake} = writes(Places, []),
    case pelton_nif:file_write_waiting(File, list, Good) of
        ok when Mistake =:= none -> ok;
        ok when Mistake =:= badarg -> {error, badarg};
        ok -> {error, {length(Good), Mistake}};
        Error -> Error
    end;
pwrite(Handle, Places) ->
    unbuffered(pwrite, Handle, [Places]).

%% Those before the first that cannot be, and what is wrong with that.
writes([{{bof, Offset}, Data} | Rest], Done) -> writes([{Offset, Data} | Rest], Done);
writes([{Offset, Data} | Rest], Done) when is_integer(Offset) ->
    case pieces(Data) of
        error -> {lists:reverse(Done), badarg};
        Pieces when ?IS_PLACE(Offset) -> writes(Rest, [{Offset, Pieces} | Done]);
        _ -> {lists:reverse(Done), einval}
    end;
writes([], Done) -> {lists:reverse(Done), none};
writes(_, Done) -> {lists:reverse(Done), badarg}.

%% @doc Has all of it on the disk: fsync.
-spec sync(handle()) -> ok | {error, reason()}.
sync(?HANDLE(File, _)) ->
    ask(fun(Ref) -> pelton_nif:file_do(?SYNC, File, Ref, false) end);
sync(Handle) ->
    unbuffered(sync, Handle, []).

%% @doc Has what was written on the disk, and what is needed to read it: fdatasync.
-spec datasync(handle()) -> ok | {error, reason()}.
datasync(?HANDLE(File, _)) ->
    ask(fun(Ref) -> pelton_nif:file_do(?DATASYNC, File, Ref, false) end);
datasync(Handle) ->
    unbuffered(datasync, Handle, []).

%% @doc Cuts the file at its position.
-spec truncate(handle()) -> ok | {error, reason()}.
truncate(?HANDLE(File, _)) ->
    after_others(File, fun() -> pelton_nif:file_truncate(File) end);
truncate(Handle) ->
    unbuffered(truncate, Handle, []).

%% What moves the position does that when nothing else is at it.
after_others(File, Move) ->
    case Move() of
        full ->
            rest_a_while(),
            case flush(File) of
                ok -> after_others(File, Move);
                Error -> Error
            end;
        Result -> Result
    end.

%% @doc Moves the file's position, and answers where it is then.
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

%% @doc Sets disk aside for a range, and makes the file as long as that.
-spec allocate(handle(), non_neg_integer(), non_neg_integer()) -> ok | {error, reason()}.
allocate(?HANDLE(File, _), Offset, Size) when is_integer(Offset), Offset >= 0, is_integer(Size), Size >= 0 ->
    if ?IS_PLACE(Offset), ?IS_PLACE(Size) -> pelton_nif:file_allocate(File, Offset, Size);
       true -> {error, einval}
    end;
allocate(Handle, Offset, Size) ->
    unbuffered(allocate, Handle, [Offset, Size]).

%% @doc Says how a range is going to be used.
-spec advise(handle(), integer(), integer(), normal | sequential | random | no_reuse | will_need | dont_need) -> ok | {error, reason()}.
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
        full -> rest_a_while(), pread_async(Handle, Offset, Size);
        Answer -> told(Answer, Ref, false)
    end;
pread_async(Handle, Offset, Size) ->
    unbuffered_async(pread_async, Handle, [Offset, Size]).

%% What was written is waited for.
unbuffered_async(Function, ?BUFFERED(_, _) = Handle, Arguments) ->
    case unbuffered(Function, Handle, Arguments) of
        {error, _} = Error -> told(Error, make_ref(), false);
        Ref -> Ref
    end.

%% @doc As {@link pread/2}, without waiting, of at most 256 places.
-spec pread_async(handle(), [{non_neg_integer(), non_neg_integer()}, ...]) -> reference().
pread_async(?HANDLE(File, _) = Handle, Places) ->
    Ref = make_ref(),
    case pelton_nif:file_pread_list(File, Places, Ref, true) of
        full -> rest_a_while(), pread_async(Handle, Places);
        Answer -> told(Answer, Ref, false)
    end;
pread_async(Handle, Places) ->
    unbuffered_async(pread_async, Handle, [Places]).

%% @doc As {@link pwrite/3}, without waiting.
-spec pwrite_async(handle(), non_neg_integer(), iodata()) -> reference().
pwrite_async(?HANDLE(File, _) = Handle, Offset, Data) ->
    Ref = make_ref(),
    case pelton_nif:file_pwrite(File, Offset, few(erlang:iolist_to_iovec(Data)), Ref, true) of
        full -> rest_a_while(), pwrite_async(Handle, Offset, Data);
        Answer -> told(Answer, Ref, false)
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
        full -> rest_a_while(), do_async(Kind, File);
        Answer -> told(Answer, Ref, false)
    end.

%% The reference, or, for who waits, the result. What is wrong with the handle is told in the same way. All references pass through here, also
%% those that are awaited by who has asked: so the compiler has each of them mark the mailbox, and await/2 begins at the mark.
told(pending, Ref, true) -> await(Ref, infinity);
%% No message comes: this lets go of the mark. OTP 25.2 has crashed where a process had left more than eight behind.
told(Result, Ref, true) -> receive {pelton, Ref, Never} -> Never after 0 -> Result end;
told(pending, Ref, false) -> Ref;
told({error, _} = Error, Ref, false) -> self() ! {pelton, Ref, Error}, Ref.

%% @equiv await(Ref, infinity)
-spec await(reference()) -> term().
await(Ref) ->
    await(Ref, infinity).

%% @doc Waits for the result of what was asked without waiting. `{error, timeout}': it has not come, and comes later.
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
                _ = ask(fun(Ref) -> pelton_nif:file_close(File, Ref) end),
                Read;
            Error -> Error
        end
    end).

%% As much as it should have and one byte more; it may grow, or not know how long it is. Less than was asked for may be the end, or what there was
%% before an error: that the next read tells.
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
                        Closed = ask(fun(Ref) -> pelton_nif:file_close(File, Ref) end),
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

%% @doc What is known of a file; of a symbolic link, what it leads to.
-spec read_file_info(handle() | name(), [info_option()]) -> {ok, file:file_info()} | {error, reason()}.
read_file_info(#file_descriptor{} = Handle, Options) -> read_handle_info(Handle, Options);
read_file_info(Name, Options) -> info(?STAT, Name, Options).

%% @equiv read_link_info(Name, [])
-spec read_link_info(name()) -> {ok, file:file_info()} | {error, reason()}.
read_link_info(Name) -> read_link_info(Name, []).

%% @doc As {@link read_file_info/2}, of a symbolic link itself.
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

info_of(Ask, Options) ->
    case time_option(Options) of
        error -> {error, badarg};
        Time ->
            case Ask() of
                {ok, {Type, Size, Access, Accessed, Modified, Changed, Mode, Links, Device, Inode, Uid, Gid}} ->
                    {ok, #file_info{size = Size, type = Type, access = Access, atime = time_of(Accessed, Time), mtime = time_of(Modified, Time),
                                    ctime = time_of(Changed, Time), mode = Mode, links = Links, major_device = Device, minor_device = 0,
                                    inode = Inode, uid = Uid, gid = Gid}};
                Error -> Error
            end
    end.

%% @doc Sends so many bytes of the file, from a place on, or all there are, by a sender of {@link pelton}, as messages of `MessageBytes', the last of what
%% is left: read straight into the channel, without a binary. Waits for room. Answers how many bytes went, fewer than were wanted where the file
%% ends; `{error, {Count, Reason}}': after so many. Meanwhile the sender is this operation's: `{error, lent}' for anybody else.
-spec send(handle(), pelton:'end'(), non_neg_integer(), non_neg_integer() | infinity, pos_integer()) ->
          {ok, non_neg_integer()} | {error, atom() | {pos_integer(), atom()}}.
send(?HANDLE(File, _), Sender, Offset, Bytes, MessageBytes) when is_integer(MessageBytes), MessageBytes > 0 ->
    pump(false, File, Sender, Offset, Bytes, MessageBytes);
send(Handle, Sender, Offset, Bytes, MessageBytes) ->
    unbuffered(send, Handle, [Sender, Offset, Bytes, MessageBytes]).

%% @doc Writes messages that a passive receiver of {@link pelton} has, one behind the other, from a place in the file on, straight from the channel: until
%% the next is more than is left of so many bytes, and stays to be received; with `infinity' until the sender has closed. Waits for messages. As {@link send/5}.
-spec recv(handle(), pelton:'end'(), non_neg_integer(), non_neg_integer() | infinity) ->
          {ok, non_neg_integer()} | {error, atom() | {pos_integer(), atom()}}.
recv(?HANDLE(File, _), Receiver, Offset, Bytes) ->
    pump(true, File, Receiver, Offset, Bytes, 0);
recv(Handle, Receiver, Offset, Bytes) ->
    unbuffered(recv, Handle, [Receiver, Offset, Bytes]).

pump(IsReceive, File, End, Offset, infinity, MessageBytes) ->
    pump(IsReceive, File, End, Offset, 1 bsl 62, MessageBytes);
pump(IsReceive, File, End, Offset, Bytes, MessageBytes)
  when is_integer(Offset), ?IS_PLACE(Offset), is_integer(Bytes), ?IS_PLACE(Bytes), MessageBytes < 1 bsl 63 ->
    ask(fun(Ref) -> pelton_nif:file_pump(IsReceive, File, Offset, Bytes, End, MessageBytes, Ref) end);
pump(_, _, _, _, _, _) ->
    {error, badarg}.

%% @equiv read_handle_info(Handle, [])
-spec read_handle_info(handle()) -> {ok, file:file_info()} | {error, reason()}.
read_handle_info(Handle) -> read_handle_info(Handle, []).

%% @doc What is known of an open file. `minor_device' is 0.
-spec read_handle_info(handle(), [info_option()]) -> {ok, file:file_info()} | {error, reason()}.
read_handle_info(?HANDLE(File, _), Options) ->
    info_of(fun() -> ask(fun(Ref) -> pelton_nif:file_do(?FSTAT, File, Ref, false) end) end, Options);
read_handle_info(Handle, Options) ->
    unbuffered(read_handle_info, Handle, [Options]).

%% Which device it is, if it is one: pelton does not ask that.
device(device, Name) ->
    case file:read_file_info(Name, [raw]) of
        {ok, #file_info{minor_device = Device}} -> Device;
        _ -> 0
    end;
device(_, _) -> 0.

%% Of a link, to what it leads to.
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

%% @doc Sets the times of a file; `undefined' leaves one. What is more than that, its mode and owner, `file' sets.
-spec write_file_info(name(), file:file_info(), [info_option()]) -> ok | {error, reason()}.
write_file_info(Name, #file_info{mode = undefined, uid = undefined, gid = undefined, atime = Accessed, mtime = Modified}, Options) ->
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

%% @doc Sets when a file was read and changed last, in seconds since 1970; `undefined' leaves one.
-spec utime(name(), integer() | undefined, integer() | undefined) -> ok | {error, reason()}.
utime(Name, Accessed, Modified) when abs(Accessed) > ?SECONDS_MAX; abs(Modified) > ?SECONDS_MAX ->
    file:write_file_info(Name, #file_info{atime = Accessed, mtime = Modified}, [raw, {time, posix}]);
utime(Name, Accessed, Modified) ->
    with_path(Name, fun(Path) ->
        ask(fun(Ref) -> pelton_nif:path_do(?TIMES, Path, undefined, nanoseconds(Accessed), nanoseconds(Modified), Ref) end)
    end).

nanoseconds(undefined) -> undefined;
nanoseconds(Seconds) -> Seconds * 1000000000.

%% @doc The names in a directory, but for those that are not in the encoding of file names.
-spec list_dir(name()) -> {ok, [file:filename()]} | {error, reason()}.
list_dir(Name) ->
    case entries(Name) of
        {ok, Names} -> {ok, [List || One <- Names, List <- [listed(One)], is_list(List)]};
        Error -> Error
    end.

%% @doc The names in a directory; those that are not in the encoding of file names as binaries.
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
                _ = ask(fun(Ref) -> pelton_nif:file_close(Directory, Ref) end),
                Entries;
            Error -> Error
        end
    end).

entries_1(Directory, Done) ->
    case ask(fun(Ref) -> pelton_nif:file_do(?LIST, Directory, Ref, false) end) of
        {ok, <<>>} -> {ok, lists:append(Done)};
        {ok, Entries} -> entries_1(Directory, [names(Entries) | Done]);
        Error -> Error
    end.

%% Each has its inode, its kind, and its name with a zero behind it.
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
        %% As POSIX has it, and `file'.
        {error, eisdir} -> {error, eperm};
        Result -> Result
    end.

%% @equiv del_file(Name)
-spec delete(name()) -> ok | {error, reason()}.
delete(Name) -> del_file(Name).

%% @doc Removes an empty directory.
-spec del_dir(name()) -> ok | {error, reason()}.
del_dir(Name) -> by_path(?RMDIR, Name).

%% @doc Renames, and replaces what has the name.
-spec rename(name(), name()) -> ok | {error, reason()}.
rename(From, To) -> by_paths(?RENAME, From, To).

%% @doc Makes a directory.
-spec make_dir(name()) -> ok | {error, reason()}.
make_dir(Name) -> by_path(?MKDIR, Name).

%% @doc Makes a second name of a file.
-spec make_link(name(), name()) -> ok | {error, reason()}.
make_link(Existing, New) -> by_paths(?LINK, Existing, New).

%% @doc Makes a symbolic link, that says `Existing'.
-spec make_symlink(name(), name()) -> ok | {error, reason()}.
make_symlink(Existing, New) -> by_paths(?SYMLINK, Existing, New).

%% @doc What a symbolic link says.
-spec read_link(name()) -> {ok, file:filename()} | {error, reason()}.
read_link(Name) ->
    case read_link_all(Name) of
        {ok, Path} when is_binary(Path) -> {error, einval};
        Read -> Read
    end.

%% @doc As {@link read_link/1}; what is not in the encoding of file names as a binary.
-spec read_link_all(name()) -> {ok, file:filename_all()} | {error, reason()}.
read_link_all(Name) ->
    case by_path(?READ_LINK, Name) of
        {ok, Path} -> {ok, listed(Path)};
        Error -> Error
    end.

%% @equiv copy(From, To, infinity)
-spec copy(handle() | name() | {name(), [mode()]}, handle() | name() | {name(), [mode()]}) -> {ok, non_neg_integer()} | {error, reason()}.
copy(From, To) -> copy(From, To, infinity).

%% @doc Copies so many bytes, or all, from one file to another: in the kernel, which may share blocks. Of a handle, from its position on, which
%% moves.
-spec copy(handle() | name() | {name(), [mode()]}, handle() | name() | {name(), [mode()]}, non_neg_integer() | infinity) ->
          {ok, non_neg_integer()} | {error, reason()}.
copy(From, To, Bytes) when Bytes =:= infinity; is_integer(Bytes), Bytes >= 0 ->
    with_handle(From, read, fun(FromHandle) ->
        with_handle(To, write, fun(ToHandle) ->
            %% When both are open.
            flushed(FromHandle, fun(FromPlain) -> flushed(ToHandle, fun(ToPlain) -> copy_1(FromPlain, ToPlain, Bytes) end) end)
        end)
    end);
copy(_, _, _) ->
    {error, badarg}.

copy_1(?HANDLE(From, _) = FromHandle, ?HANDLE(To, _) = ToHandle, Bytes) ->
    Most = if Bytes =:= infinity -> 1 bsl 62; true -> min(Bytes, 1 bsl 62) end,
    case {seek(From, 0, 1), seek(To, 0, 1)} of
        {{ok, FromOffset}, {ok, ToOffset}} ->
            case ask(fun(Ref) -> pelton_nif:file_copy(From, FromOffset, To, ToOffset, Most, Ref) end) of
                {ok, Count} ->
                    {ok, _} = seek(From, FromOffset + Count, 0),
                    {ok, _} = seek(To, ToOffset + Count, 0),
                    {ok, Count};
                %% The kernel does not where it is appended, nor within one place of a file; or the file is not open for that.
                {error, Reason} when Reason =:= ebadf; Reason =:= einval -> by_turns(FromHandle, ToHandle, Most, 0);
                Error -> Error
            end;
        %% A pipe, or the like.
        {{error, espipe}, _} -> by_turns(FromHandle, ToHandle, Most, 0);
        {_, {error, espipe}} -> by_turns(FromHandle, ToHandle, Most, 0);
        {{ok, _}, Error} -> Error;
        {Error, _} -> Error
    end.

by_turns(_, _, 0, Done) ->
    {ok, Done};
by_turns(?HANDLE(File, _) = From, To, Left, Done) ->
    case pread_1(File, undefined, min(Left, 65536), binary) of
        {ok, Bytes} ->
            case write(To, Bytes) of
                ok -> by_turns(From, To, Left - byte_size(Bytes), Done + byte_size(Bytes));
                Error -> Error
            end;
        eof -> {ok, Done};
        Error -> Error
    end.

with_handle(?HANDLE(_, _) = Handle, _Mode, Fun) -> Fun(Handle);
with_handle(?BUFFERED(_, _) = Handle, _Mode, Fun) -> Fun(Handle);
with_handle({Name, Modes}, Mode, Fun) when is_list(Modes) -> with_open(Name, [Mode, binary, {mailbox, unchanged} | Modes], Fun);
with_handle(Name, Mode, Fun) -> with_open(Name, [Mode, binary, {mailbox, unchanged}], Fun).

with_open(Name, Modes, Fun) ->
    case open(Name, Modes) of
        {ok, Handle} ->
            Result = Fun(Handle),
            _ = close(Handle),
            Result;
        Error -> Error
    end.

by_path(Kind, Name) ->
    with_path(Name, fun(Path) -> ask(fun(Ref) -> pelton_nif:path_do(Kind, Path, undefined, undefined, undefined, Ref) end) end).

by_paths(Kind, Name, Other) ->
    with_path(Name, fun(Path) ->
        with_path(Other, fun(OtherPath) ->
            ask(fun(Ref) -> pelton_nif:path_do(Kind, Path, OtherPath, undefined, undefined, Ref) end)
        end)
    end).

with_path(Name, Fun) ->
    case path(Name) of
        error -> {error, badarg};
        Path -> Fun(Path)
    end.

%% A name as the system has it, with a zero at its end.
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

%% Asks, and waits for the result.
ask(Ask) ->
    Ref = make_ref(),
    case Ask(Ref) of
        full -> rest_a_while(), ask(Ask);
        Answer -> told(Answer, Ref, true)
    end.

%% Thousands of requests of this scheduler's are in flight.
rest_a_while() ->
    receive after 1 -> ok end.
