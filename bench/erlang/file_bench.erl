%% The part of `pelton-bench file' that Erlang does: file_bench:main([Part, Directory, Mailbox, Turn]) writes a line `SYSTEM FIGURE' for each system. They take
%% turns within a run, and who begins goes round with Turn. Each has a process of its own, with so many messages in its mailbox.
-module(file_bench).
-export([main/1]).

-define(BLOCK, 4096).
-define(BLOCKS, 2560).

main([Part, Directory, Mailbox, Turn]) ->
    Run = case Part of
              "erlang" -> fun mailbox/3;
              "erlang-cached" -> fun cached/3;
              "erlang-direct" -> fun direct/3
          end,
    Systems = case Part of
                  "erlang" -> ["pelton-erlang", "pelton-erlang-on-heap", "erlang-raw", "erlang-file"];
                  _ -> ["pelton-erlang", "erlang-raw"]
              end,
    {Later, First} = lists:split(list_to_integer(Turn) rem length(Systems), Systems),
    lists:foreach(fun(System) ->
        Path = filename:join(Directory, System),
        prepare(Part, Path),
        io:format("~s ~.6f~n", [System, apart(fun() -> Run(System, Path, list_to_integer(Mailbox)) end)]),
        _ = file:delete(Path)
    end, First ++ Later),
    halt(0).

%% In a process of its own.
apart(Fun) ->
    {Pid, Monitor} = spawn_monitor(fun() -> exit({figure, Fun()}) end),
    receive {'DOWN', Monitor, process, Pid, {figure, Figure}} -> Figure end.

prepare("erlang", _) -> ok;
prepare("erlang-cached", Path) -> ok = file:write_file(Path, binary:copy(<<7>>, ?BLOCK * ?BLOCKS));
prepare("erlang-direct", Path) ->
    {ok, File} = file:open(Path, [raw, write]),
    [ok = file:write(File, binary:copy(<<7>>, 1 bsl 20)) || _ <- lists:seq(1, 128)],
    ok = file:sync(File),
    ok = file:advise(File, 0, 0, dont_need),
    ok = file:close(File).

module("pelton-erlang" ++ _) -> pelton_file;
module(_) -> file.

modes("pelton-erlang-on-heap") -> [{mailbox, unchanged}];
modes("erlang-raw") -> [raw];
modes(_) -> [].

%% Seconds for 10 MiB written in 4 KiB blocks, and read back by pread.
mailbox(System, Path, Mailbox) ->
    [self() ! {message, I} || I <- lists:seq(1, Mailbox)],
    Module = module(System),
    {ok, File} = Module:open(Path, [read, write, binary | modes(System)]),
    Block = binary:copy(<<7>>, ?BLOCK),
    erlang:garbage_collect(),
    Begun = erlang:monotonic_time(),
    write(Module, File, Block, 0),
    read(Module, File, Block, 0),
    Spent = erlang:monotonic_time() - Begun,
    ok = Module:close(File),
    Spent / erlang:convert_time_unit(1, second, native).

write(_, _, _, ?BLOCKS) -> ok;
write(Module, File, Block, I) ->
    ok = Module:write(File, Block),
    write(Module, File, Block, I + 1).

read(_, _, _, ?BLOCKS) -> ok;
read(Module, File, Block, I) ->
    {ok, Block} = Module:pread(File, I * ?BLOCK, ?BLOCK),
    read(Module, File, Block, I + 1).

%% Nanoseconds for a block that the page cache has.
cached(System, Path, _) ->
    Module = module(System),
    {ok, File} = Module:open(Path, [read, binary | modes(System)]),
    Block = binary:copy(<<7>>, ?BLOCK),
    read(Module, File, Block, 0),
    Begun = erlang:monotonic_time(),
    [read(Module, File, Block, 0) || _ <- "0123456789"],
    Spent = erlang:monotonic_time() - Begun,
    erlang:convert_time_unit(Spent, native, nanosecond) / (10 * ?BLOCKS).

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
    64 * 64 * erlang:convert_time_unit(1, second, native) / (erlang:monotonic_time() - Begun).

%% Each block of 128 MiB at most once.
scattered(I) -> I * 7919 rem 32768.
