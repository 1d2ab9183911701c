%% The Erlang part of `pelton-bench file': file_bench:main([Part, Directory, Mailbox, Turn, Mib]) prints a line `SYSTEM
%% FIGURE...' for each system. The systems take turns within a run, and Turn chooses the first. Each has a process of
%% its own, with so many messages in its mailbox.
-module(file_bench).
-export([main/1]).

-define(BLOCK, 4096).
-define(BLOCKS, 2560).

main([Part, Directory, Mailbox, Turn, Mib]) ->
    Run = case Part of
              "erlang" -> fun mailbox/3;
              "erlang-cached" -> fun cached/3;
              "erlang-direct" -> fun direct/3;
              "erlang-cold" -> fun cold/3
          end,
    Systems = case Part of
                  "erlang" -> ["pelton-erlang", "pelton-erlang-on-heap", "erlang-raw", "erlang-raw-off-heap", "erlang-file"];
                  _ -> ["pelton-erlang", "erlang-raw"]
              end,
    %% The parts that are loaded, or created, only once.
    Warm = filename:join(Directory, "warm"),
    [begin ok = Module:write_file(Warm, "x"), {ok, _} = Module:read_file(Warm) end || Module <- [pelton_file, file]],
    {Later, First} = lists:split(list_to_integer(Turn) rem length(Systems), Systems),
    lists:foreach(fun(System) ->
        Path = filename:join(Directory, System),
        prepare(Part, Path, list_to_integer(Mib)),
        Figures = apart(fun() -> Run(System, Path, list_to_integer(Mailbox)) end),
        io:format("~s~s~n", [System, [io_lib:format(" ~.6f", [float(Figure)]) || Figure <- Figures]]),
        _ = file:delete(Path)
    end, First ++ Later),
    halt(0).

%% In a process of its own.
apart(Fun) ->
    {Pid, Monitor} = spawn_monitor(fun() -> exit({figure, Fun()}) end),
    receive {'DOWN', Monitor, process, Pid, {figure, Figure}} -> Figure end.

%% The benchmark creates these, on the other side.
prepare("erlang-cached", Path, _) -> ok = file:write_file(Path, binary:copy(<<7>>, ?BLOCK * ?BLOCKS));
prepare("erlang-direct", Path, _) -> blocks(Path, 128);
prepare("erlang-cold", Path, Mib) -> blocks(Path, Mib);
prepare(_, _, _) -> ok.

%% A file of so many MiB that is not in the page cache.
blocks(Path, Mib) ->
    {ok, File} = file:open(Path, [raw, write]),
    [ok = file:write(File, binary:copy(<<7>>, 1 bsl 20)) || _ <- lists:seq(1, Mib)],
    ok = file:sync(File),
    ok = file:advise(File, 0, 0, dont_need),
    ok = file:close(File).

module("pelton-erlang" ++ _) -> pelton_file;
module(_) -> file.

modes("erlang-raw" ++ _) -> [raw];
modes(_) -> [].

%% The flags that each system recommends for a process with a large mailbox. On the heap: fewer collections, after a
%% mebibyte of garbage.
set_flags("pelton-erlang-on-heap") ->
    process_flag(min_bin_vheap_size, (1 bsl 20) div erlang:system_info(wordsize));
set_flags(System) when System =:= "pelton-erlang"; System =:= "erlang-raw-off-heap" ->
    process_flag(message_queue_data, off_heap);
set_flags(_) -> ok.

%% Seconds for 10 MiB written in 4 KiB blocks, and read back by pread. Of the single operations the microseconds of the
%% median, of the 99th percentile, and of the longest.
mailbox(System, Path, Mailbox) ->
    set_flags(System),
    [self() ! {message, I} || I <- lists:seq(1, Mailbox)],
    Module = module(System),
    {ok, File} = Module:open(Path, [read, write, binary | modes(System)]),
    Block = binary:copy(<<7>>, ?BLOCK),
    %% Outside the heap: no garbage of their own.
    Times = atomics:new(2 * ?BLOCKS, []),
    erlang:garbage_collect(),
    Begun = erlang:monotonic_time(),
    Written = timed(fun(_) -> ok = Module:write(File, Block) end, Times, 1, ?BLOCKS, Begun),
    Ended = timed(fun(I) -> {ok, Block} = Module:pread(File, (I - ?BLOCKS - 1) * ?BLOCK, ?BLOCK) end,
                  Times, ?BLOCKS + 1, 2 * ?BLOCKS, Written),
    ok = Module:close(File),
    Sorted = lists:sort([atomics:get(Times, I) || I <- lists:seq(1, 2 * ?BLOCKS)]),
    [(Ended - Begun) / erlang:convert_time_unit(1, second, native) |
     [1.0e6 * lists:nth(At, Sorted) / erlang:convert_time_unit(1, second, native) ||
         At <- [?BLOCKS, 2 * ?BLOCKS * 99 div 100, 2 * ?BLOCKS]]].

%% Puts the time of each operation into Times, and returns when the last one has ended.
timed(_, _, I, Last, Begun) when I > Last -> Begun;
timed(Operation, Times, I, Last, Begun) ->
    Operation(I),
    Ended = erlang:monotonic_time(),
    atomics:put(Times, I, Ended - Begun),
    timed(Operation, Times, I + 1, Last, Ended).

read(_, _, _, ?BLOCKS) -> ok;
read(Module, File, Block, I) ->
    {ok, Block} = Module:pread(File, I * ?BLOCK, ?BLOCK),
    read(Module, File, Block, I + 1).

%% Nanoseconds for a block from the page cache.
cached(System, Path, _) ->
    set_flags(System),
    Module = module(System),
    {ok, File} = Module:open(Path, [read, binary | modes(System)]),
    Block = binary:copy(<<7>>, ?BLOCK),
    read(Module, File, Block, 0),
    Begun = erlang:monotonic_time(),
    [read(Module, File, Block, 0) || _ <- "0123456789"],
    Spent = erlang:monotonic_time() - Begun,
    [erlang:convert_time_unit(Spent, native, nanosecond) / (10 * ?BLOCKS)].

%% How often a scheduler was blocked for a millisecond or longer while it read all of a file, the longest block, and
%% the time of all.
cold(System, Path, _) ->
    Module = module(System),
    Reader = self(),
    Monitor = spawn_link(fun() -> monitored(Reader, 0, 0) end),
    _ = erlang:system_monitor(Monitor, [{long_schedule, 1}]),
    {ok, File} = Module:open(Path, [read, binary | modes(System)]),
    Begun = erlang:monotonic_time(),
    read_all(Module, File),
    Spent = erlang:monotonic_time() - Begun,
    ok = Module:close(File),
    _ = erlang:system_monitor(undefined),
    Monitor ! stop,
    receive {Events, Longest} -> [Events, Longest, Spent / erlang:convert_time_unit(1, second, native)] end.

monitored(Reader, Events, Longest) ->
    receive
        {monitor, _, long_schedule, Info} -> monitored(Reader, Events + 1, max(Longest, proplists:get_value(timeout, Info)));
        stop -> Reader ! {Events, Longest}
    end.

read_all(Module, File) ->
    case Module:read(File, 65536) of
        {ok, _} -> read_all(Module, File);
        eof -> ok
    end.

%% Reads a second past the page cache, of scattered blocks: 64 in flight of one process, or one in each of 64 processes.
direct("pelton-erlang", Path, _) ->
    {ok, File} = pelton_file:open(Path, [read, binary]),
    ok = pelton_file:advise(File, 0, 0, random),
    rate(fun() ->
        [begin
             {ok, Read} = pelton_file:pread(File, [{scattered(Batch * 64 + I) * ?BLOCK, ?BLOCK} || I <- lists:seq(1, 64)]),
             64 = length([Bytes || Bytes <- Read, byte_size(Bytes) =:= ?BLOCK])
         end || Batch <- lists:seq(0, 63)]
    end);
direct("erlang-raw", Path, _) ->
    rate(fun() ->
        Readers = [spawn_monitor(fun() ->
            {ok, File} = file:open(Path, [raw, read, binary]),
            ok = file:advise(File, 0, 0, random),
            [{ok, <<_:?BLOCK/binary>>} = file:pread(File, scattered(Batch * 64 + I) * ?BLOCK, ?BLOCK) || Batch <- lists:seq(0, 63)]
        end) || I <- lists:seq(1, 64)],
        [receive {'DOWN', Monitor, process, Pid, normal} -> ok end || {Pid, Monitor} <- Readers]
    end).

rate(Fun) ->
    Begun = erlang:monotonic_time(),
    Fun(),
    [64 * 64 * erlang:convert_time_unit(1, second, native) / (erlang:monotonic_time() - Begun)].

%% Each block of 128 MiB at most once.
scattered(I) -> I * 7919 rem 32768.
