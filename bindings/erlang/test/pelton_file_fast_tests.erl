%% Which scheduler performs a read or write: on a node whose file systems behave as files_by_name.c describes, by the
%% file's name.
-module(pelton_file_fast_tests).
-export([a_local_file/1, a_file_with_nowait/1, what_may_wait/1, blocks_that_are_there/1, halves/1, a_slow_file/1,
         one_at_a_time/1, a_shared_file/1, a_read_that_waited/1, a_read_that_waited_in_the_call/1,
         a_read_that_was_interrupted/1]).
-include_lib("eunit/include/eunit.hrl").

in_a_node_test_() ->
    {foreach, fun pelton_file_tests:directory/0, fun pelton_file_tests:remove/1,
     [fun(Path) -> {atom_to_list(Test), {timeout, 120, fun() -> in_node(Test, Path("")) end}} end ||
         Test <- [a_local_file, a_file_with_nowait, what_may_wait, blocks_that_are_there, halves, a_slow_file,
                  one_at_a_time, a_shared_file, a_read_that_waited, a_read_that_waited_in_the_call,
                  a_read_that_was_interrupted]]}.

%% The first write tries RWF_NOWAIT, then runs on a dirty scheduler. Later ones run in the call.
a_local_file(Directory) ->
    {ok, File} = pelton_file:open(filename:join(Directory, "local"), [write]),
    ok = pelton_file:write(File, "first"),
    ?assertEqual([{dirty, nowait}, {dirty, plain}], writes(Directory, "local")),
    until_in_the_call(Directory, "local", plain, fun() -> ok = pelton_file:write(File, "more") end),
    until_in_the_call(Directory, "local", plain, fun() -> ok = pelton_file:pwrite(File, 8192, binary:copy(<<1>>,
        4096)) end),
    %% A large write does not.
    ok = pelton_file:pwrite(File, 8192, binary:copy(<<1>>, 128 bsl 10)),
    ?assertEqual({dirty, plain}, lists:last(writes(Directory, "local"))),
    {ok, Appended} = pelton_file:open(filename:join(Directory, "local-log"), [append]),
    until_in_the_call(Directory, "local-log", plain, fun() -> ok = pelton_file:write(Appended, "more") end).

a_file_with_nowait(Directory) ->
    {ok, File} = pelton_file:open(filename:join(Directory, "foreign-nowait"), [write]),
    [ok = pelton_file:write(File, "some") || _ <- "abc"],
    %% With RWF_NOWAIT the kernel promises not to wait, so nothing is measured.
    ?assertEqual([{dirty, nowait}, {normal, nowait}, {normal, nowait}], writes(Directory, "foreign-nowait")),
    {ok, Busy} = pelton_file:open(filename:join(Directory, "foreign-nowait-busy"), [read, write]),
    [ok = pelton_file:write(Busy, [C]) || C <- "abc"],
    Twice = [{normal, nowait}, {dirty, plain}],
    ?assertEqual([{dirty, nowait}, {dirty, plain}] ++ Twice ++ Twice, writes(Directory, "foreign-nowait-busy")),
    ?assertEqual({ok, "abc"}, pelton_file:pread(Busy, 0, 10)).

%% These never run in the call; and O_SYNC, with which RWF_NOWAIT promises nothing, does not try it.
what_may_wait(Directory) ->
    Each = fun(Name, Modes) ->
        {ok, File} = pelton_file:open(filename:join(Directory, Name), [write | Modes]),
        [ok = pelton_file:write(File, "some") || _ <- lists:seq(1, 100)],
        [ok = pelton_file:pwrite(File, 0, "some") || _ <- lists:seq(1, 100), Modes =/= [append]],
        lists:usort(writes(Directory, Name))
    end,
    ?assertEqual([{dirty, nowait}, {dirty, plain}], Each("foreign", [])),
    ?assertEqual([{dirty, nowait}, {dirty, plain}], Each("foreign-log", [append])),
    ?assertEqual([{dirty, plain}], Each("local-nowait-through", [sync])),
    %% The engine writes these.
    "" = os:cmd("mkfifo " ++ filename:join(Directory, "local-nowait-fifo")),
    {ok, Fifo} = pelton_file:open(filename:join(Directory, "local-nowait-fifo"), [read, write]),
    ok = pelton_file:write(Fifo, "some"),
    ?assertEqual([], writes(Directory, "local-nowait-fifo")),
    {ok, Device} = pelton_file:open("/dev/null", [write]),
    ok = pelton_file:write(Device, "some"),
    ?assertEqual([], writes(Directory, "null")).

%% A part of a block must be read first.
blocks_that_are_there(Directory) ->
    Path = filename:join(Directory, "local"),
    ok = file:write_file(Path, binary:copy(<<1>>, 100000)),
    {ok, File} = pelton_file:open(Path, [read, write]),
    [ok = pelton_file:pwrite(File, 10, "part") || _ <- lists:seq(1, 100)],
    [ok = pelton_file:write(File, "part") || _ <- lists:seq(1, 100)],
    ?assertEqual([{dirty, plain}], lists:usort(tl(writes(Directory, "local")))),
    until_in_the_call(Directory, "local", plain, fun() -> ok = pelton_file:pwrite(File, 4096, binary:copy(<<1>>,
        4096)) end),
    {ok, _} = pelton_file:position(File, eof),
    until_in_the_call(Directory, "local", plain, fun() -> ok = pelton_file:write(File, "more") end),
    %% The position was at the end before.
    {ok, _} = pelton_file:position(File, 10),
    ok = pelton_file:write(File, "part"),
    ?assertEqual({dirty, plain}, lists:last(writes(Directory, "local"))),
    {ok, _} = pelton_file:position(File, eof),
    until_in_the_call(Directory, "local", plain, fun() -> ok = pelton_file:write(File, "more") end),
    {ok, _} = pelton_file:position(File, 10),
    {ok, _} = pelton_file:read(File, 10),
    ok = pelton_file:write(File, "part"),
    ?assertEqual({dirty, plain}, lists:last(writes(Directory, "local"))).

%% A short write or read is continued.
halves(Directory) ->
    {ok, File} = pelton_file:open(filename:join(Directory, "foreign-nowait-half"), [read, write, binary]),
    Bytes = rand:bytes(1000),
    <<One:333/binary, Other:333/binary, Third/binary>> = Bytes,
    [ok = pelton_file:write(File, Some) || Some <- [One, [Other, Third]]],
    ?assertEqual({ok, Bytes}, file:read_file(filename:join(Directory, "foreign-nowait-half"))),
    %% After the first, cautious reads.
    [{ok, Bytes} = pelton_file:pread(File, 0, 1000) || _ <- "abc"],
    {ok, 0} = pelton_file:position(File, 0),
    ?assertEqual({ok, One}, pelton_file:read(File, 333)),
    ?assertEqual({ok, <<Other/binary, Third/binary>>}, pelton_file:read(File, 2000)),
    ?assertEqual(eof, pelton_file:read(File, 2000)),
    [ok = pelton_file:pwrite(File, 100, Some) || Some <- [Third, [Other, One]]],
    Now = <<Bytes:100/binary, Other/binary, One/binary, (binary:part(Bytes, 766, 234))/binary>>,
    ?assertEqual({ok, Now}, pelton_file:pread(File, 0, 1000)),
    ?assert(lists:member({normal, nowait}, writes(Directory, "foreign-nowait-half"))).

%% After a slow write none runs in the call for a hundred times as long, to any file.
a_slow_file(Directory) ->
    [{ok, Slow}, {ok, Quick}] = [pelton_file:open(filename:join(Directory, Name), [write]) || Name <- ["local-slow",
        "local"]],
    until_in_the_call(Directory, "local", plain, fun() -> ok = pelton_file:write(Quick, "some") end),
    until_in_the_call(Directory, "local-slow", plain, fun() -> ok = pelton_file:write(Slow, "some") end),
    Before = length(writes(Directory, "local")),
    BeforeSlow = length(writes(Directory, "local-slow")),
    [ok = pelton_file:write(File, "some") || _ <- lists:seq(1, 10), File <- [Slow, Quick]],
    ?assertEqual([{dirty, plain}], lists:usort(lists:nthtail(BeforeSlow, writes(Directory, "local-slow")))),
    ?assertEqual([{dirty, plain}], lists:usort(lists:nthtail(Before, writes(Directory, "local")))),
    until_in_the_call(Directory, "local", plain, fun() -> ok = pelton_file:write(Quick, "some") end).

%% At most one normal scheduler performs a measured write.
one_at_a_time(Directory) ->
    Names = ["local-slow-" ++ integer_to_list(I) || I <- lists:seq(1, 4)],
    Arrived = counters:new(1, [atomics]),
    Opened = [begin {ok, File} = pelton_file:open(filename:join(Directory, Name), [write]), File end || Name <- Names],
    [ok = pelton_file:write(File, "first") || File <- Opened],
    {ok, Quick} = pelton_file:open(filename:join(Directory, "local"), [write]),
    until_in_the_call(Directory, "local", plain, fun() -> ok = pelton_file:write(Quick, "some") end),
    %% At the same moment, each on a scheduler of its own.
    Writers = [spawn_opt(fun() ->
        counters:add(Arrived, 1, 1),
        all_arrived(Arrived, 4),
        ok = pelton_file:write(File, "some")
    end, [monitor, {scheduler, I}]) || {I, File} <- lists:zip(lists:seq(1, 4), Opened)],
    [receive {'DOWN', Monitor, process, Pid, Reason} -> normal = Reason end || {Pid, Monitor} <- Writers],
    [[{dirty, nowait}, {dirty, plain}, Last1] | Others] = [writes(Directory, Name) || Name <- Names],
    Lasts = [Last1 | [Last || [_, _, Last] <- Others]],
    ?assertEqual([], [Last || {second, _} = Last <- Lasts]),
    ?assert(length([Last || {dirty, plain} = Last <- Lasts]) >= 3).

all_arrived(Arrived, Count) -> counters:get(Arrived, 1) >= Count orelse all_arrived(Arrived, Count).

%% Another write to the file may have the inode's lock for long, so a small one runs on a dirty scheduler.
a_shared_file(Directory) ->
    Path = filename:join(Directory, "local-stuck"),
    {ok, File} = pelton_file:open(Path, [write]),
    until_in_the_call(Directory, "local-stuck", plain, fun() -> ok = pelton_file:write(File, "some") end),
    Before = length(writes(Directory, "local-stuck")),
    Since = fun() -> lists:nthtail(Before, writes(Directory, "local-stuck")) end,
    ok = file:write_file(Path ++ ".stuck", ""),
    Write = fun(Size) -> spawn_monitor(fun() -> ok = pelton_file:write(File, binary:copy(<<1>>, Size)) end) end,
    Large = Write(128 bsl 10),
    pelton_file_tests:eventually(fun() -> Since() =:= [{dirty, plain}] end),
    Small = Write(1),
    pelton_file_tests:eventually(fun() -> length(Since()) =:= 2 end),
    ?assertEqual([{dirty, plain}, {dirty, plain}], Since()),
    ok = file:delete(Path ++ ".stuck"),
    [receive {'DOWN', Monitor, process, Pid, Reason} -> normal = Reason end || {Pid, Monitor} <- [Large, Small]],
    ok.

%% After a read that waited, the next ones run on a dirty scheduler.
a_read_that_waited(Directory) ->
    [ok = file:write_file(filename:join(Directory, Name), <<0:800>>) || Name <- ["read-logged", "read-logged-late"]],
    Open = fun(Name) -> {ok, File} = pelton_file:open(filename:join(Directory, Name), [read]), File end,
    File = Open("read-logged"),
    pelton_file_tests:eventually(fun() -> {ok, _} = pelton_file:pread(File, 0, 10), writes(Directory,
        "read-logged") =/= [] end),
    ok = file:write_file(logged(Directory) ++ ".waits", ""),
    Waits = Open("read-logged-late"),
    {ok, _} = pelton_file:pread(Waits, 0, 10),
    ok = file:delete(logged(Directory) ++ ".waits"),
    [{ok, _} = pelton_file:pread(Waits, 0, 10) || _ <- lists:seq(1, 60)],
    ?assertEqual([], writes(Directory, "read-logged-late")),
    pelton_file_tests:eventually(fun() -> {ok, _} = pelton_file:pread(Waits, 0, 10), writes(Directory,
        "read-logged-late") =/= [] end).

a_read_that_waited_in_the_call(Directory) ->
    {File, Reads} = read_by(Directory, "read-logged-slow"),
    pelton_file_tests:eventually(fun() -> Reads(1) =:= 1 end),
    ?assertEqual(0, Reads(64)),
    pelton_file_tests:eventually(fun() -> Reads(1) =:= 1 end),
    ok = pelton_file:close(File).

%% A read that took as long because other threads had the processor says nothing about the disk: the next ones are in
%% the call.
a_read_that_was_interrupted(Directory) ->
    {File, Reads} = read_by(Directory, "read-logged-spins"),
    pelton_file_tests:eventually(fun() -> Reads(20) =:= 20 end),
    ok = pelton_file:close(File).

%% A file, and a function that reads it so often, and returns how many of the reads ran in the call.
read_by(Directory, Name) ->
    ok = file:write_file(filename:join(Directory, Name), <<0:800>>),
    {ok, File} = pelton_file:open(filename:join(Directory, Name), [read]),
    Logged = fun() -> length(writes(Directory, Name)) end,
    {File, fun(Times) ->
        Before = Logged(),
        [{ok, _} = pelton_file:pread(File, 0, 10) || _ <- lists:seq(1, Times)],
        Logged() - Before
    end}.

%% A write may wait for another reason. Then some writes pause, so this repeats it.
until_in_the_call(Directory, Name, How, Write) ->
    pelton_file_tests:eventually(fun() -> Write(), lists:last(writes(Directory, Name)) =:= {normal, How} end).

%% The scheduler and the system call of each write to a file.
writes(Directory, Name) ->
    {ok, Logged} = file:read_file(logged(Directory)),
    Lines = [string:split(Line, " ", all) || Line <- string:split(binary_to_list(Logged), "\n", all)],
    [{list_to_atom(Scheduler), list_to_atom(How)} || [Scheduler, How, Written] <- Lines, Written =:= Name].

logged(Directory) -> filename:join(Directory, "logged").

in_node(Test, Directory) ->
    Library = filename:join(Directory, "files_by_name.so"),
    Source = filename:join(filename:dirname(?FILE), "files_by_name.c"),
    "" = os:cmd("cc -D_GNU_SOURCE -O2 -Wall -Wextra -Werror -shared -fPIC -o " ++ Library ++ " " ++ Source ++ " 2>&1"),
    ok = file:write_file(logged(Directory), ""),
    Paths = [filename:dirname(code:which(Module)) || Module <- [pelton_file, ?MODULE]],
    {ok, Peer, _} = peer:start(#{connection => standard_io, args => ["+S", "4:4", "-pa" | Paths],
                                 env => [{"LD_PRELOAD", Library}, {"FILES_BY_NAME", logged(Directory)}]}),
    try peer:call(Peer, ?MODULE, Test, [Directory], 100000) after peer:stop(Peer) end.
