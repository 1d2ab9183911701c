%% Files by `pelton_file` and by `file`: `./run bench file PART... [--mailbox N,...] [--mib N] [--runs N] [--dir DIR]`.
%%
%%   erlang          10 MiB written in blocks of 4 KiB and read back by pread, with --mailbox messages waiting; of
%%                   several numbers with each
%%   erlang-cached   4 KiB from the page cache
%%   erlang-direct   4 KiB past the page cache, 64 in flight of one process (pelton-erlang), or one in each of 64
%%   erlang-cold     --mib MiB read past the page cache, in blocks of 64 KiB: how often a scheduler was blocked for
%%                   1 ms and longer, by system_monitor's long_schedule
%%
%% Figures are medians over the runs, with the range; ratios are of pelton to each other system, run by run. The systems
%% take turns, and each run begins with the next one. Each has a process of its own, with so many messages in its
%% mailbox.
-module(file_bench).
-export([main/0]).

-define(BLOCK, 4096).
-define(BLOCKS, 2560).

main() ->
    Defaults = #{mailbox => [0], mib => 1024, runs => 9, dir => "/tmp"},
    {Parts, Options} = options(init:get_plain_arguments(), [], Defaults),
    Directory = filename:join(maps:get(dir, Options), "pelton-bench-file-" ++ os:getpid()),
    ok = file:make_dir(Directory),
    try
        %% What is loaded, or created, only once.
        Warm = filename:join(Directory, "warm"),
        [begin ok = Module:write_file(Warm, "x"), {ok, _} = Module:read_file(Warm) end || Module <- [pelton_file, file]],
        [measure(part(Part), Part, Mailbox, Directory, Options) ||
            Part <- Parts, Mailbox <- case Part of "erlang" -> maps:get(mailbox, Options); _ -> [0] end]
    after
        file:del_dir_r(Directory)
    end.

options(["--mailbox", Numbers | Rest], Parts, Options) ->
    options(Rest, Parts, Options#{mailbox => [list_to_integer(N) || N <- string:lexemes(Numbers, ",")]});
options(["--mib", N | Rest], Parts, Options) -> options(Rest, Parts, Options#{mib => list_to_integer(N)});
options(["--runs", N | Rest], Parts, Options) -> options(Rest, Parts, Options#{runs => list_to_integer(N)});
options(["--dir", Directory | Rest], Parts, Options) -> options(Rest, Parts, Options#{dir => Directory});
options(["erlang" ++ _ = Part | Rest], Parts, Options) -> options(Rest, Parts ++ [Part], Options);
options([], Parts, Options) -> {Parts, Options};
options([Word | _], _, _) ->
    io:format(standard_error, "found `~s`, wanted erlang, erlang-cached, erlang-direct, erlang-cold, --mailbox, --mib, "
              "--runs or --dir~n", [Word]),
    halt(2).

%% Its function, its systems, and the units of its figures.
part("erlang") ->
    {fun mailbox/3, ["pelton-erlang", "pelton-erlang-on-heap", "erlang-raw", "erlang-raw-off-heap", "erlang-file"],
     ["seconds", "us of an operation, median", "us of an operation, 99th percentile", "us of the longest operation"]};
part("erlang-cached") -> {fun cached/3, ["pelton-erlang", "erlang-raw"], ["ns a read"]};
part("erlang-direct") -> {fun direct/3, ["pelton-erlang", "erlang-raw"], ["reads a second"]};
part("erlang-cold") ->
    {fun cold/3, ["pelton-erlang", "erlang-raw"],
     ["events of 1 ms or longer", "ms of the longest event", "seconds"]}.

measure({Function, Systems, Units}, Part, Mailbox, Directory, #{runs := Runs, mib := Mib}) ->
    Figures = [run(Function, Systems, Part, Mailbox, Directory, Mib, Turn) || Turn <- lists:seq(0, Runs - 1)],
    [begin
         Of = fun(System) -> [float(lists:nth(At, maps:get(System, Run))) || Run <- Figures] end,
         io:format("~s: ~s (median of ~b), ~b messages in the mailbox~n", [Part, Unit, Runs, Mailbox]),
         [io:format("    ~-24s ~14.4f  (~.4f to ~.4f)~n", [System | summary(Of(System))]) || System <- Systems],
         %% There may be no events.
         [io:format("    ratio of ~s to ~s: ~.3f  (~.3f to ~.3f)~n",
                    [Ours, Other | summary([A / B || {A, B} <- lists:zip(Of(Ours), Of(Other))])]) ||
             Part =/= "erlang-cold", "pelton" ++ _ = Ours <- Systems, "erlang" ++ _ = Other <- Systems]
     end || {At, Unit} <- lists:zip(lists:seq(1, length(Units)), Units)].

summary(Values) ->
    Sorted = lists:sort(Values),
    Half = length(Sorted) div 2,
    Median = (lists:nth(length(Sorted) - Half, Sorted) + lists:nth(Half + 1, Sorted)) / 2,
    [Median, hd(Sorted), lists:last(Sorted)].

run(Function, Systems, Part, Mailbox, Directory, Mib, Turn) ->
    {Later, First} = lists:split(Turn rem length(Systems), Systems),
    maps:from_list([begin
         Path = filename:join(Directory, System),
         prepare(Part, Path, Mib),
         Figures = apart(fun() -> Function(System, Path, Mailbox) end),
         _ = file:delete(Path),
         {System, Figures}
     end || System <- First ++ Later]).

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
