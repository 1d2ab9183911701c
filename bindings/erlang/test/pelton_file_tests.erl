%% What pelton_file promises beyond doing what `file' does, which pelton_file_alike_tests compares.
-module(pelton_file_tests).
-export([place/0, remove/1, eventually/1]).
-include_lib("eunit/include/eunit.hrl").
-include_lib("kernel/include/file.hrl").

in_a_place_test_() ->
    {foreach, fun place/0, fun remove/1,
     [fun(Place) -> {atom_to_list(Name), {timeout, 120, fun() -> Test(Place) end}} end || {Name, Test} <- tests()]}.

tests() ->
    [{what_is_written_is_read, fun what_is_written_is_read/1},
     {a_large_file_is_read_and_written_whole, fun a_large_file_is_read_and_written_whole/1},
     {what_is_asked_without_waiting_is_told, fun what_is_asked_without_waiting_is_told/1},
     {many_reads_are_one_request, fun many_reads_are_one_request/1},
     {an_asynchronous_mistake_is_told_too, fun an_asynchronous_mistake_is_told_too/1},
     {any_process_uses_a_handle, fun any_process_uses_a_handle/1},
     {file_takes_the_handle, fun file_takes_the_handle/1},
     {opening_moves_the_mailbox_off_the_heap, fun opening_moves_the_mailbox_off_the_heap/1},
     {garbage_is_collected_as_often_as_was_said, fun garbage_is_collected_as_often_as_was_said/1},
     {a_file_ends_with_its_owner, fun a_file_ends_with_its_owner/1},
     {a_forgotten_file_is_closed, fun a_forgotten_file_is_closed/1},
     {waiting_readers_do_not_keep_schedulers, fun waiting_readers_do_not_keep_schedulers/1},
     {waiting_writers_do_not_keep_schedulers, fun waiting_writers_do_not_keep_schedulers/1},
     {closing_ends_who_waits, fun closing_ends_who_waits/1},
     {a_killed_reader_leaves_nothing, fun a_killed_reader_leaves_nothing/1},
     {a_killed_opener_leaves_nothing, fun a_killed_opener_leaves_nothing/1},
     {ten_thousand_files_are_open, fun ten_thousand_files_are_open/1},
     {descriptors_and_memory_stay_flat, fun descriptors_and_memory_stay_flat/1},
     {new_code_takes_over_what_is_open, fun new_code_takes_over_what_is_open/1},
     {stopping_the_application_closes_everything, fun stopping_the_application_closes_everything/1},
     {times_are_set, fun times_are_set/1},
     {a_copy_begins_at_the_positions, fun a_copy_begins_at_the_positions/1}].

what_is_written_is_read(Place) ->
    {ok, File} = pelton_file:open(Place("a"), [read, write, binary]),
    ok = pelton_file:write(File, [<<"hello">>, [" ", $w | "orld"]]),
    ?assertEqual({ok, 11}, pelton_file:position(File, cur)),
    ?assertEqual({ok, <<"hello">>}, pelton_file:pread(File, 0, 5)),
    ?assertEqual({ok, [<<"hell">>, eof, <<"ld">>]}, pelton_file:pread(File, [{0, 4}, {100, 2}, {9, 10}])),
    ok = pelton_file:pwrite(File, [{0, "H"}, {6, ["W"]}]),
    ok = pelton_file:sync(File),
    ok = pelton_file:datasync(File),
    ?assertEqual({ok, <<"Hello World">>}, pelton_file:read_file(Place("a"))),
    ok = pelton_file:close(File),
    ?assertEqual({error, einval}, pelton_file:close(File)),
    ?assertEqual({error, einval}, pelton_file:pread(File, 0, 1)),
    ?assertEqual({error, einval}, pelton_file:pwrite(File, 0, "x")).

a_large_file_is_read_and_written_whole(Place) ->
    %% More than is answered at once, and more pieces than one system call takes.
    Pieces = [rand:bytes(1000 + I rem 7) || I <- lists:seq(1, 5000)],
    ok = pelton_file:write_file(Place("large"), Pieces),
    Bytes = iolist_to_binary(Pieces),
    ?assertEqual({ok, Bytes}, file:read_file(Place("large"))),
    ?assertEqual({ok, Bytes}, pelton_file:read_file(Place("large"))),
    {ok, File} = pelton_file:open(Place("large"), [read, write, binary]),
    ok = pelton_file:pwrite(File, [{1, Pieces}]),
    ?assertEqual({ok, Bytes}, pelton_file:pread(File, 1, byte_size(Bytes) + 1)),
    ok = pelton_file:close(File).

what_is_asked_without_waiting_is_told(Place) ->
    {ok, File} = pelton_file:open(Place("a"), [read, write]),
    Write = pelton_file:pwrite_async(File, 0, ["hello ", <<"world">>]),
    ?assertEqual(ok, pelton_file:await(Write)),
    Sync = pelton_file:datasync_async(File),
    ?assertEqual(ok, pelton_file:await(Sync, 60000)),
    Read = pelton_file:pread_async(File, 6, 100),
    receive {pelton, Read, Result} -> ?assertEqual({ok, <<"world">>}, Result) end,
    List = pelton_file:pread_async(File, [{0, 1}, {1, 1}]),
    ?assertEqual({ok, [<<"h">>, <<"e">>]}, pelton_file:await(List)),
    ?assertEqual({error, timeout}, pelton_file:await(make_ref(), 0)).

many_reads_are_one_request(Place) ->
    Bytes = rand:bytes(1 bsl 20),
    ok = pelton_file:write_file(Place("a"), Bytes),
    {ok, File} = pelton_file:open(Place("a"), [read, binary]),
    Places = [{rand:uniform(1 bsl 20), rand:uniform(5000)} || _ <- lists:seq(1, 1000)],
    {ok, Read} = pelton_file:pread(File, Places),
    ?assertEqual([binary:part(Bytes, At, min(Size, byte_size(Bytes) - At)) || {At, Size} <- Places],
                 [if One =:= eof -> <<>>; true -> One end || One <- Read]).

an_asynchronous_mistake_is_told_too(Place) ->
    {ok, File} = pelton_file:open(Place("a"), [write]),
    ?assertEqual({error, ebadf}, pelton_file:await(pelton_file:pread_async(File, 0, 1))),
    ok = pelton_file:close(File),
    ?assertEqual({error, einval}, pelton_file:await(pelton_file:pread_async(File, 0, 1))),
    ?assertEqual({error, einval}, pelton_file:await(pelton_file:pwrite_async(File, 0, "x"))),
    ?assertEqual({error, einval}, pelton_file:await(pelton_file:sync_async(File))).

any_process_uses_a_handle(Place) ->
    ok = pelton_file:write_file(Place("a"), "hello"),
    {ok, File} = pelton_file:open(Place("a"), [read]),
    Reads = [in_process(fun() -> pelton_file:pread(File, I, 1) end) || I <- lists:seq(0, 4)],
    ?assertEqual([{ok, [Letter]} || Letter <- "hello"], Reads).

file_takes_the_handle(Place) ->
    {ok, File} = pelton_file:open(Place("a"), [read, write]),
    ok = file:write(File, "hello"),
    ?assertEqual({ok, 0}, file:position(File, bof)),
    ?assertEqual({ok, "hello"}, file:read(File, 10)),
    ok = file:close(File).

opening_moves_the_mailbox_off_the_heap(Place) ->
    Kept = fun(Modes) ->
        in_process(fun() ->
            {ok, _} = pelton_file:open(Place("a"), [write | Modes]),
            element(2, process_info(self(), message_queue_data))
        end)
    end,
    ?assertEqual(off_heap, Kept([])),
    ?assertEqual(on_heap, Kept([{mailbox, unchanged}])).

garbage_is_collected_as_often_as_was_said(Place) ->
    Collections = fun(Modes) ->
        Test = self(),
        %% A heap that is no reason to collect.
        Pid = spawn_opt(fun() ->
            {ok, File} = pelton_file:open(Place("b"), [write, read, binary | Modes]),
            ok = pelton_file:write(File, binary:copy(<<1>>, 4096)),
            receive read -> ok end,
            lists:foreach(fun(_) -> {ok, _} = pelton_file:pread(File, 0, 4096) end, lists:seq(1, 2000)),
            Test ! {done, self()}
        end, [link, {min_heap_size, 100000}]),
        1 = erlang:trace(Pid, true, [garbage_collection]),
        Pid ! read,
        receive {done, Pid} -> ok end,
        Told = erlang:trace_delivered(Pid),
        receive {trace_delivered, Pid, Told} -> counted(Pid, 0) end
    end,
    Often = Collections([]),
    Seldom = Collections([{garbage, 4 bsl 20}]),
    ?assertMatch({_, Few, Many} when 3 * Few < Many, {fewer, Seldom, Often}).

counted(Pid, Count) ->
    receive {trace, Pid, gc_minor_start, _} -> counted(Pid, Count + 1);
            {trace, Pid, _, _} -> counted(Pid, Count)
    after 0 -> Count
    end.

a_file_ends_with_its_owner(Place) ->
    File = in_process(fun() -> {ok, File} = pelton_file:open(Place("a"), [write]), File end),
    eventually(fun() -> pelton_file:write(File, "x") =:= {error, einval} end),
    eventually(fun() -> opened(Place("a")) =:= 0 end).

a_forgotten_file_is_closed(Place) ->
    %% Its owner lives on, and nobody has it.
    {ok, File} = pelton_file:open(Place("a"), [write]),
    ?assertEqual(1, opened(Place("a"))),
    ok = pelton_file:write(File, "x"),
    eventually(fun() -> erlang:garbage_collect(), opened(Place("a")) =:= 0 end).

%% A FIFO keeps whoever reads or opens it waiting for ever.
waiting_readers_do_not_keep_schedulers(Place) ->
    Fifo = fifo(Place),
    {ok, File} = pelton_file:open(Fifo, [read, write, binary]),
    Count = 4 * erlang:system_info(schedulers) + erlang:system_info(dirty_io_schedulers),
    Readers = [spawn_monitor(fun() -> exit(pelton_file:read(File, 1)) end) || _ <- lists:seq(1, Count)],
    eventually(fun() -> lists:all(fun({Pid, _}) -> waits(Pid) end, Readers) end),
    %% All else goes on, other files too.
    ok = pelton_file:write_file(Place("a"), "x"),
    ?assertEqual({ok, <<"x">>}, file:read_file(Place("a"))),
    ok = pelton_file:write(File, lists:duplicate(Count, $y)),
    [receive {'DOWN', Monitor, process, Pid, Result} -> ?assertEqual({ok, <<"y">>}, Result) end || {Pid, Monitor} <- Readers].

%% A full FIFO likewise keeps whoever writes.
waiting_writers_do_not_keep_schedulers(Place) ->
    {ok, File} = pelton_file:open(fifo(Place), [read, write, binary]),
    Count = 2 * erlang:system_info(dirty_io_schedulers),
    Bytes = binary:copy(<<"w">>, 100000),
    Writers = [spawn_monitor(fun() -> exit(pelton_file:write(File, Bytes)) end) || _ <- lists:seq(1, Count)],
    eventually(fun() -> lists:all(fun({Pid, _}) -> waits(Pid) end, Writers) end),
    %% This needs a dirty scheduler.
    ok = file:write_file(Place("a"), "x"),
    drain(File, Count * byte_size(Bytes)),
    [receive {'DOWN', Monitor, process, Pid, Result} -> ?assertEqual(ok, Result) end || {Pid, Monitor} <- Writers].

drain(_, 0) -> ok;
drain(File, Left) ->
    {ok, Bytes} = pelton_file:read(File, min(Left, 10000)),
    drain(File, Left - byte_size(Bytes)).

closing_ends_who_waits(Place) ->
    {ok, File} = pelton_file:open(fifo(Place), [read, write]),
    {Pid, Monitor} = spawn_monitor(fun() -> exit(pelton_file:read(File, 1)) end),
    eventually(fun() -> waits(Pid) end),
    ok = pelton_file:close(File),
    receive {'DOWN', Monitor, process, Pid, Result} -> ?assertEqual({error, einval}, Result) end,
    eventually(fun() -> opened(fifo(Place)) =:= 0 end).

a_killed_reader_leaves_nothing(Place) ->
    Fifo = fifo(Place),
    {ok, File} = pelton_file:open(Fifo, [read, write, binary]),
    Owner = spawn(fun() -> {ok, Own} = pelton_file:open(Fifo, [read, write]), pelton_file:read(Own, 1) end),
    Other = spawn(fun() -> pelton_file:read(File, 1) end),
    eventually(fun() -> waits(Owner) andalso waits(Other) end),
    [exit(Pid, kill) || Pid <- [Owner, Other]],
    eventually(fun() -> opened(Fifo) =:= 1 end),
    %% Nobody takes it who is dead.
    timer:sleep(100),
    ok = pelton_file:write(File, "z"),
    ?assertEqual({ok, <<"z">>}, pelton_file:read(File, 1)),
    ok = pelton_file:close(File),
    eventually(fun() -> opened(Fifo) =:= 0 end).

a_killed_opener_leaves_nothing(Place) ->
    Fifo = fifo(Place),
    %% Opening waits for a writer.
    Pid = spawn(fun() -> pelton_file:open(Fifo, [read]) end),
    eventually(fun() -> waits(Pid) end),
    exit(Pid, kill),
    %% Whatever opening has come to by then.
    {ok, File} = pelton_file:open(Fifo, [read, write]),
    eventually(fun() -> opened(Fifo) =:= 1 end),
    ok = pelton_file:close(File).

ten_thousand_files_are_open(Place) ->
    Files = [begin
                 {ok, File} = pelton_file:open(Place(integer_to_list(I)), [write, read, binary]),
                 ok = pelton_file:write(File, <<I:32>>),
                 File
             end || I <- lists:seq(1, 10000)],
    lists:foldl(fun(File, I) -> ?assertEqual({ok, <<I:32>>}, pelton_file:pread(File, 0, 9)), I + 1 end, 1, Files),
    Before = descriptors(),
    [ok = pelton_file:close(File) || File <- Files],
    eventually(fun() -> descriptors() =< Before - 10000 end).

descriptors_and_memory_stay_flat(Place) ->
    Bytes = rand:bytes(65536),
    ok = pelton_file:write_file(Place("a"), Bytes),
    {ok, File} = pelton_file:open(Place("a"), [read, write, binary]),
    Round = fun(Count) ->
        lists:foreach(fun(I) ->
            At = I * 61 rem 60000,
            {ok, Read} = pelton_file:pread(File, At, 64),
            Read = binary:part(Bytes, At, 64),
            I rem 100 =:= 0 andalso
                begin
                    ok = pelton_file:pwrite(File, At, Read),
                    {ok, Other} = pelton_file:open(Place("a"), [read]),
                    ok = pelton_file:close(Other),
                    {ok, [Read]} = pelton_file:await(pelton_file:pread_async(File, [{At, 64}]))
                end
        end, lists:seq(1, Count)),
        erlang:garbage_collect()
    end,
    Round(50000),
    {Descriptors, Memory} = {descriptors(), resident()},
    Round(950000),
    eventually(fun() -> descriptors() =< Descriptors end),
    %% Allocators come and go with some megabytes; so much a million requests would leave if they left 64 bytes each.
    ?assert(resident() - Memory < 64 bsl 20).

new_code_takes_over_what_is_open(Place) ->
    {ok, Fifo} = pelton_file:open(fifo(Place), [read, write, binary]),
    ok = pelton_file:write_file(Place("a"), "hello"),
    {ok, File} = pelton_file:open(Place("a"), [read, binary]),
    Read = pelton_file:pread_async(File, 0, 5),
    {Pid, Monitor} = spawn_monitor(fun() -> exit(pelton_file:read(Fifo, 1)) end),
    eventually(fun() -> waits(Pid) end),
    _ = code:purge(pelton_nif),
    {module, pelton_nif} = code:load_file(pelton_nif),
    _ = code:soft_purge(pelton_nif),
    ?assertEqual({ok, <<"hello">>}, pelton_file:await(Read)),
    ?assertEqual({ok, <<"ell">>}, pelton_file:pread(File, 1, 3)),
    ok = pelton_file:write(Fifo, "x"),
    receive {'DOWN', Monitor, process, Pid, Result} -> ?assertEqual({ok, <<"x">>}, Result) end,
    [ok = pelton_file:close(Any) || Any <- [Fifo, File]].

stopping_the_application_closes_everything(Place) ->
    {ok, [pelton]} = application:ensure_all_started(pelton),
    {ok, File} = pelton_file:open(Place("a"), [write, read]),
    {ok, Fifo} = pelton_file:open(fifo(Place), [read, write]),
    {Pid, Monitor} = spawn_monitor(fun() -> exit(pelton_file:read(Fifo, 1)) end),
    eventually(fun() -> waits(Pid) end),
    ok = application:stop(pelton),
    receive {'DOWN', Monitor, process, Pid, Result} -> ?assertEqual({error, einval}, Result) end,
    ?assertEqual({error, einval}, pelton_file:write(File, "x")),
    eventually(fun() -> opened(Place("a")) + opened(fifo(Place)) =:= 0 end),
    %% It can be used again.
    ok = pelton_file:write_file(Place("b"), "x").

times_are_set(Place) ->
    ok = pelton_file:write_file(Place("a"), "x"),
    ok = pelton_file:utime(Place("a"), 1000000000, 1100000000),
    {ok, Info} = pelton_file:stat(Place("a")),
    ?assertMatch(#file_info{atime = 1000000000, mtime = 1100000000, size = 1, type = regular}, Info),
    ok = pelton_file:write_file_info(Place("a"), #file_info{mtime = {{2001, 2, 3}, {4, 5, 6}}}, [{time, universal}]),
    {ok, Changed} = pelton_file:read_file_info(Place("a"), [{time, universal}]),
    ?assertMatch(#file_info{mtime = {{2001, 2, 3}, {4, 5, 6}}}, Changed),
    ok = pelton_file:write_file_info(Place("a"), #file_info{mode = 8#600}),
    {ok, #file_info{mode = Mode}} = pelton_file:stat(Place("a")),
    ?assertEqual(8#600, Mode band 8#777).

a_copy_begins_at_the_positions(Place) ->
    ok = pelton_file:write_file(Place("a"), "0123456789"),
    {ok, From} = pelton_file:open(Place("a"), [read]),
    {ok, To} = pelton_file:open(Place("b"), [write]),
    {ok, 2} = pelton_file:position(From, 2),
    ok = pelton_file:write(To, "x"),
    ?assertEqual({ok, 3}, pelton_file:copy(From, To, 3)),
    ?assertEqual({ok, 5}, pelton_file:copy(From, To)),
    ?assertEqual({ok, 0}, pelton_file:copy(From, To)),
    ?assertEqual({ok, <<"x23456789">>}, pelton_file:read_file(Place("b"))),
    ?assertEqual({ok, 9}, pelton_file:copy(Place("b"), {Place("c"), [exclusive]})),
    ?assertEqual({error, eexist}, pelton_file:copy(Place("b"), {Place("c"), [exclusive]})).

%% Every receive for a result begins behind the messages that were there before, as the compiler tells.
the_receive_does_not_look_at_the_mailbox_test_() ->
    {timeout, 120, fun the_receive_does_not_look_at_the_mailbox/0}.

the_receive_does_not_look_at_the_mailbox() ->
    Source = proplists:get_value(source, pelton_file:module_info(compile)),
    {ok, pelton_file, _, Told} = compile:file(Source, [binary, return_warnings, recv_opt_info]),
    Texts = [lists:flatten(beam_ssa_recv:format_error(What)) || {_, Warnings} <- Told, {_, beam_ssa_recv, What} <- Warnings],
    ?assert(lists:any(fun(Text) -> string:find(Text, "all clauses match reference in function parameter") =/= nomatch end, Texts)),
    ?assertEqual([], [Text || Text <- Texts, string:find(Text, "NOT OPTIMIZED") =/= nomatch]).

%% ---- What the tests share ----

place() ->
    Directory = filename:join(os:getenv("TMPDIR", "/tmp"), "pelton-erlang-" ++ os:getpid() ++ "-" ++
                                  integer_to_list(erlang:unique_integer([positive]))),
    ok = file:make_dir(Directory),
    fun(Name) -> filename:join(Directory, Name) end.

remove(Place) ->
    ok = file:del_dir_r(Place("")).

fifo(Place) ->
    Name = Place("fifo"),
    "" = os:cmd("test -p " ++ Name ++ " || mkfifo " ++ Name),
    Name.

in_process(Fun) ->
    {Pid, Monitor} = spawn_monitor(fun() -> exit({told, Fun()}) end),
    {told, Result} = receive {'DOWN', Monitor, process, Pid, Reason} -> Reason end,
    Result.

waits(Pid) -> process_info(Pid, status) =:= {status, waiting}.

eventually(Is) -> eventually(Is, 600).
eventually(Is, 0) -> ?assert(Is());
eventually(Is, Times) -> Is() orelse begin timer:sleep(50), eventually(Is, Times - 1) end.

descriptors() ->
    {ok, Names} = file:list_dir("/proc/self/fd"),
    length(Names).

%% How often this node has a file open.
opened(Name) ->
    {ok, Descriptors} = file:list_dir("/proc/self/fd"),
    length([There || Descriptor <- Descriptors, {ok, There} <- [file:read_link("/proc/self/fd/" ++ Descriptor)], There =:= Name]).

resident() ->
    {ok, Text} = file:read_file("/proc/self/statm"),
    [_, Pages | _] = string:lexemes(Text, " "),
    binary_to_integer(Pages) * 4096.
