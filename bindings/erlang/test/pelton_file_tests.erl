%% What pelton_file promises beyond the behaviour of `file', which pelton_file_alike_tests compares.
-module(pelton_file_tests).
-export([directory/0, remove/1, eventually/1, assert_flat/1, upgrade/1, delete/1, leave_in_flight/1, copy_with_limit/1,
         leave_delayed/1]).
-include_lib("eunit/include/eunit.hrl").
-include_lib("kernel/include/file.hrl").

in_a_place_test_() ->
    {foreach, fun directory/0, fun remove/1,
     [fun(Path) -> {atom_to_list(Name), {timeout, 120, fun() -> Test(Path) end}} end || {Name, Test} <- tests()]}.

tests() ->
    [{what_is_written_is_read, fun what_is_written_is_read/1},
     {a_large_file_is_read_and_written_whole, fun a_large_file_is_read_and_written_whole/1},
     {an_asynchronous_result_is_sent, fun an_asynchronous_result_is_sent/1},
     {many_reads_are_one_request, fun many_reads_are_one_request/1},
     {an_asynchronous_error_is_sent, fun an_asynchronous_error_is_sent/1},
     {any_process_uses_a_handle, fun any_process_uses_a_handle/1},
     {file_takes_the_handle, fun file_takes_the_handle/1},
     {no_process_flag_is_set, fun no_process_flag_is_set/1},
     {no_work_is_done_for_the_mailbox, fun no_work_is_done_for_the_mailbox/1},
     {a_file_ends_with_its_owner, fun a_file_ends_with_its_owner/1},
     {an_unreferenced_file_is_closed, fun an_unreferenced_file_is_closed/1},
     {waiting_readers_block_no_scheduler, fun waiting_readers_block_no_scheduler/1},
     {waiting_writers_block_no_scheduler, fun waiting_writers_block_no_scheduler/1},
     {closing_ends_a_waiting_read, fun closing_ends_a_waiting_read/1},
     {a_killed_reader_leaves_nothing, fun a_killed_reader_leaves_nothing/1},
     {a_killed_opener_leaves_nothing, fun a_killed_opener_leaves_nothing/1},
     {ten_thousand_files_are_open, fun ten_thousand_files_are_open/1},
     {descriptors_and_memory_stay_flat, fun descriptors_and_memory_stay_flat/1},
     {new_code_takes_over_open_files, fun new_code_takes_over_open_files/1},
     {another_library_takes_over_requests_in_flight, fun another_library_takes_over_requests_in_flight/1},
     {deleted_code_stays_mapped_for_open_files, fun deleted_code_stays_mapped_for_open_files/1},
     {a_node_stops_with_everything_in_flight, fun a_node_stops_with_everything_in_flight/1},
     {stopping_the_application_closes_everything, fun stopping_the_application_closes_everything/1},
     {times_are_set, fun times_are_set/1},
     {a_copy_begins_at_the_positions, fun a_copy_begins_at_the_positions/1},
     {a_copy_is_appended, fun a_copy_is_appended/1},
     {a_copy_reports_a_full_disk, fun a_copy_reports_a_full_disk/1},
     {a_copy_ends_with_either_file, fun a_copy_ends_with_either_file/1},
     {an_error_after_some_bytes_is_returned_next, fun an_error_after_some_bytes_is_returned_next/1},
     {a_delayed_write_is_written_when_due, fun a_delayed_write_is_written_when_due/1},
     {a_delayed_write_survives_its_process, fun a_delayed_write_survives_its_process/1},
     {an_error_of_a_delayed_write_is_returned_once, fun an_error_of_a_delayed_write_is_returned_once/1},
     {reading_ahead_keeps_the_position, fun reading_ahead_keeps_the_position/1},
     {many_processes_share_a_buffer, fun many_processes_share_a_buffer/1},
     {a_pipe_has_buffers_too, fun a_pipe_has_buffers_too/1},
     {buffered_files_leave_nothing, fun buffered_files_leave_nothing/1}].

what_is_written_is_read(Path) ->
    {ok, File} = pelton_file:open(Path("a"), [read, write, binary]),
    ok = pelton_file:write(File, [<<"hello">>, [" ", $w | "orld"]]),
    ?assertEqual({ok, 11}, pelton_file:position(File, cur)),
    ?assertEqual({ok, <<"hello">>}, pelton_file:pread(File, 0, 5)),
    ?assertEqual({ok, [<<"hell">>, eof, <<"ld">>]}, pelton_file:pread(File, [{0, 4}, {100, 2}, {9, 10}])),
    ok = pelton_file:pwrite(File, [{0, "H"}, {6, ["W"]}]),
    ok = pelton_file:sync(File),
    ok = pelton_file:datasync(File),
    ?assertEqual({ok, <<"Hello World">>}, pelton_file:read_file(Path("a"))),
    ok = pelton_file:close(File),
    ?assertEqual({error, einval}, pelton_file:close(File)),
    ?assertEqual({error, einval}, pelton_file:pread(File, 0, 1)),
    ?assertEqual({error, einval}, pelton_file:pwrite(File, 0, "x")).

a_large_file_is_read_and_written_whole(Path) ->
    %% More bytes than a call reads, and more pieces than a system call takes.
    Pieces = [rand:bytes(1000 + I rem 7) || I <- lists:seq(1, 5000)],
    ok = pelton_file:write_file(Path("large"), Pieces),
    Bytes = iolist_to_binary(Pieces),
    ?assertEqual({ok, Bytes}, file:read_file(Path("large"))),
    ?assertEqual({ok, Bytes}, pelton_file:read_file(Path("large"))),
    {ok, File} = pelton_file:open(Path("large"), [read, write, binary]),
    ok = pelton_file:pwrite(File, [{1, Pieces}]),
    ?assertEqual({ok, Bytes}, pelton_file:pread(File, 1, byte_size(Bytes) + 1)),
    ok = pelton_file:close(File).

an_asynchronous_result_is_sent(Path) ->
    {ok, File} = pelton_file:open(Path("a"), [read, write]),
    Write = pelton_file:pwrite_async(File, 0, ["hello ", <<"world">>]),
    ?assertEqual(ok, pelton_file:await(Write)),
    Sync = pelton_file:datasync_async(File),
    ?assertEqual(ok, pelton_file:await(Sync, 60000)),
    Read = pelton_file:pread_async(File, 6, 100),
    receive {pelton, Read, Result} -> ?assertEqual({ok, <<"world">>}, Result) end,
    List = pelton_file:pread_async(File, [{0, 1}, {1, 1}]),
    ?assertEqual({ok, [<<"h">>, <<"e">>]}, pelton_file:await(List)),
    ?assertEqual({error, timeout}, pelton_file:await(make_ref(), 0)).

many_reads_are_one_request(Path) ->
    Bytes = rand:bytes(1 bsl 20),
    ok = pelton_file:write_file(Path("a"), Bytes),
    {ok, File} = pelton_file:open(Path("a"), [read, binary]),
    Places = [{rand:uniform(1 bsl 20), rand:uniform(5000)} || _ <- lists:seq(1, 1000)],
    {ok, Read} = pelton_file:pread(File, Places),
    ?assertEqual([binary:part(Bytes, At, min(Size, byte_size(Bytes) - At)) || {At, Size} <- Places],
                 [if One =:= eof -> <<>>; true -> One end || One <- Read]).

an_asynchronous_error_is_sent(Path) ->
    {ok, File} = pelton_file:open(Path("a"), [write]),
    ?assertEqual({error, ebadf}, pelton_file:await(pelton_file:pread_async(File, 0, 1))),
    ok = pelton_file:close(File),
    ?assertEqual({error, einval}, pelton_file:await(pelton_file:pread_async(File, 0, 1))),
    ?assertEqual({error, einval}, pelton_file:await(pelton_file:pwrite_async(File, 0, "x"))),
    ?assertEqual({error, einval}, pelton_file:await(pelton_file:sync_async(File))).

any_process_uses_a_handle(Path) ->
    ok = pelton_file:write_file(Path("a"), "hello"),
    {ok, File} = pelton_file:open(Path("a"), [read]),
    Reads = [in_process(fun() -> pelton_file:pread(File, I, 1) end) || I <- lists:seq(0, 4)],
    ?assertEqual([{ok, [Letter]} || Letter <- "hello"], Reads).

file_takes_the_handle(Path) ->
    {ok, File} = pelton_file:open(Path("a"), [read, write]),
    ok = file:write(File, "hello"),
    ?assertEqual({ok, 0}, file:position(File, bof)),
    ?assertEqual({ok, "hello"}, file:read(File, 10)),
    {ok, #file_info{size = 5, type = regular}} = file:read_file_info(File, [{time, posix}]),
    {ok, #file_info{size = 5}} = pelton_file:read_file_info(File),
    {ok, 0} = file:position(File, 0),
    ?assertEqual({ok, "hello"}, file:read_line(File)),
    ok = file:close(File).

%% No function sets a flag of the calling process.
no_process_flag_is_set(Path) ->
    Flags = fun() ->
        [{garbage_collection, Collection} | Others] =
            [process_info(self(), Key) || Key <- [garbage_collection, message_queue_data, priority, trap_exit]],
        [lists:keydelete(minor_gcs, 1, Collection) | Others]
    end,
    {Before, After} = in_process(fun() ->
        Before = Flags(),
        {ok, File} = pelton_file:open(Path("a"), [read, write, binary, delayed_write, read_ahead]),
        ok = pelton_file:write(File, "hello"),
        {ok, _} = pelton_file:read_file(Path("a")),
        {ok, Receiver} = pelton:open(receiver, ["unix:", Path("socket")]),
        {error, timeout} = pelton:recv(Receiver, 0),
        {Before, Flags()}
    end),
    ?assertEqual(Before, After).

a_file_ends_with_its_owner(Path) ->
    File = in_process(fun() -> {ok, File} = pelton_file:open(Path("a"), [write]), File end),
    eventually(fun() -> pelton_file:write(File, "x") =:= {error, einval} end),
    eventually(fun() -> opened(Path("a")) =:= 0 end).

an_unreferenced_file_is_closed(Path) ->
    %% The owner lives, and nobody refers to the file.
    {ok, File} = pelton_file:open(Path("a"), [write]),
    ?assertEqual(1, opened(Path("a"))),
    ok = pelton_file:write(File, "x"),
    eventually(fun() -> erlang:garbage_collect(), opened(Path("a")) =:= 0 end).

%% Opening and reading a FIFO may wait for ever.
waiting_readers_block_no_scheduler(Path) ->
    Fifo = fifo(Path),
    {ok, File} = pelton_file:open(Fifo, [read, write, binary]),
    Count = 4 * erlang:system_info(schedulers) + erlang:system_info(dirty_io_schedulers),
    Readers = [spawn_monitor(fun() -> exit(pelton_file:read(File, 1)) end) || _ <- lists:seq(1, Count)],
    eventually(fun() -> lists:all(fun({Pid, _}) -> waits(Pid) end, Readers) end),
    %% Meanwhile other files, and other processes, are served.
    ok = pelton_file:write_file(Path("a"), "x"),
    ?assertEqual({ok, <<"x">>}, file:read_file(Path("a"))),
    ok = pelton_file:write(File, lists:duplicate(Count, $y)),
    [receive {'DOWN', Monitor, process, Pid, Result} -> ?assertEqual({ok, <<"y">>}, Result) end || {Pid,
        Monitor} <- Readers].

%% Writing to a full FIFO may wait for ever.
waiting_writers_block_no_scheduler(Path) ->
    {ok, File} = pelton_file:open(fifo(Path), [read, write, binary]),
    Count = 2 * erlang:system_info(dirty_io_schedulers),
    Bytes = binary:copy(<<"w">>, 100000),
    Writers = [spawn_monitor(fun() -> exit(pelton_file:write(File, Bytes)) end) || _ <- lists:seq(1, Count)],
    eventually(fun() -> lists:all(fun({Pid, _}) -> waits(Pid) end, Writers) end),
    %% This needs a dirty scheduler.
    ok = file:write_file(Path("a"), "x"),
    drain(File, Count * byte_size(Bytes)),
    [receive {'DOWN', Monitor, process, Pid, Result} -> ?assertEqual(ok, Result) end || {Pid, Monitor} <- Writers].

drain(_, 0) -> ok;
drain(File, Left) ->
    {ok, Bytes} = pelton_file:read(File, min(Left, 10000)),
    drain(File, Left - byte_size(Bytes)).

closing_ends_a_waiting_read(Path) ->
    {ok, File} = pelton_file:open(fifo(Path), [read, write]),
    {Pid, Monitor} = spawn_monitor(fun() -> exit(pelton_file:read(File, 1)) end),
    eventually(fun() -> waits(Pid) end),
    ok = pelton_file:close(File),
    receive {'DOWN', Monitor, process, Pid, Result} -> ?assertEqual({error, einval}, Result) end,
    eventually(fun() -> opened(fifo(Path)) =:= 0 end).

a_killed_reader_leaves_nothing(Path) ->
    Fifo = fifo(Path),
    {ok, File} = pelton_file:open(Fifo, [read, write, binary]),
    Owner = spawn(fun() -> {ok, Own} = pelton_file:open(Fifo, [read, write]), pelton_file:read(Own, 1) end),
    Other = spawn(fun() -> pelton_file:read(File, 1) end),
    eventually(fun() -> waits(Owner) andalso waits(Other) end),
    [exit(Pid, kill) || Pid <- [Owner, Other]],
    eventually(fun() -> opened(Fifo) =:= 1 end),
    %% Reads of the killed processes do not take the byte.
    {Reader, Monitor} = spawn_monitor(fun() -> exit(pelton_file:read(File, 1)) end),
    eventually(fun() ->
        is_process_alive(Reader) andalso pelton_file:write(File, "z"),
        receive {'DOWN', Monitor, process, Reader, Result} -> ?assertEqual({ok, <<"z">>}, Result), true after 50 ->
            false end
    end),
    ok = pelton_file:close(File),
    eventually(fun() -> opened(Fifo) =:= 0 end).

a_killed_opener_leaves_nothing(Path) ->
    Fifo = fifo(Path),
    %% The open waits for a writer.
    Pid = spawn(fun() -> pelton_file:open(Fifo, [read]) end),
    eventually(fun() -> waits(Pid) end),
    exit(Pid, kill),
    %% Whether the open was cancelled, or completes now.
    {ok, File} = pelton_file:open(Fifo, [read, write]),
    eventually(fun() -> opened(Fifo) =:= 1 end),
    ok = pelton_file:close(File).

ten_thousand_files_are_open(Path) ->
    Files = [begin
                 {ok, File} = pelton_file:open(Path(integer_to_list(I)), [write, read, binary]),
                 ok = pelton_file:write(File, <<I:32>>),
                 File
             end || I <- lists:seq(1, 10000)],
    lists:foldl(fun(File, I) -> ?assertEqual({ok, <<I:32>>}, pelton_file:pread(File, 0, 9)), I + 1 end, 1, Files),
    Before = descriptors(),
    [ok = pelton_file:close(File) || File <- Files],
    eventually(fun() -> descriptors() =< Before - 10000 end).

descriptors_and_memory_stay_flat(Path) ->
    Bytes = rand:bytes(65536),
    ok = pelton_file:write_file(Path("a"), Bytes),
    {ok, File} = pelton_file:open(Path("a"), [read, write, binary]),
    Round = fun(Count) ->
        lists:foreach(fun(I) ->
            At = I * 61 rem 60000,
            {ok, Read} = pelton_file:pread(File, At, 64),
            Read = binary:part(Bytes, At, 64),
            I rem 100 =:= 0 andalso
                begin
                    ok = pelton_file:pwrite(File, At, Read),
                    {ok, Other} = pelton_file:open(Path("a"), [read]),
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
    %% Allocators vary by some megabytes. A leak of 64 bytes for each request would be this much.
    ?assert(resident() - Memory < 64 bsl 20).

new_code_takes_over_open_files(Path) ->
    {ok, Fifo} = pelton_file:open(fifo(Path), [read, write, binary]),
    ok = pelton_file:write_file(Path("a"), "hello"),
    {ok, File} = pelton_file:open(Path("a"), [read, binary]),
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

%% Each in a node of its own, because a failure can end the node.
another_library_takes_over_requests_in_flight(Path) ->
    ?assertEqual({{ok, <<"x">>}, {ok, <<"ell">>}, true}, in_peer(upgrade, Path(""))).

upgrade(Directory) ->
    {Path, Fifo, Reader} = reading(Directory),
    ok = pelton_file:write_file(Path("a"), "hello"),
    {ok, File} = pelton_file:open(Path("a"), [read, binary]),
    Next = Path("pelton-9"),
    Copy = fun(From, To) -> ok = filelib:ensure_dir(To), {ok, _} = file:copy(From, To) end,
    Copy(code:which(pelton_nif), Next ++ "/ebin/pelton_nif.beam"),
    Copy(filename:join(code:priv_dir(pelton), "pelton_nif.so"), Next ++ "/priv/pelton_nif.so"),
    true = code:replace_path(pelton, Next ++ "/ebin"),
    _ = code:purge(pelton_nif),
    {module, pelton_nif} = code:load_file(pelton_nif),
    true = code:soft_purge(pelton_nif),
    ok = pelton_file:write(Fifo, "x"),
    {ok, Maps} = file:read_file("/proc/self/maps"),
    {reported(Reader), pelton_file:pread(File, 1, 3), binary:match(Maps, list_to_binary(Next)) =/= nomatch}.

deleted_code_stays_mapped_for_open_files(Path) ->
    ?assertEqual({{ok, <<"x">>}, 0, {ok, <<"again">>}}, in_peer(delete, Path(""))).

delete(Directory) ->
    {Path, Fifo, Reader} = reading(Directory),
    Holder = spawn(fun() -> {ok, _} = pelton_file:open(Path("held"), [write]), receive stop -> ok end end),
    eventually(fun() -> opened(Path("held")) =:= 1 end),
    true = code:delete(pelton_nif),
    _ = code:purge(pelton_nif),
    %% With `file', because the module is gone.
    ok = file:write_file(Path("fifo"), "x"),
    Reported = reported(Reader),
    exit(Holder, kill),
    eventually(fun() -> opened(Path("held")) =:= 0 end),
    {module, pelton_nif} = code:load_file(pelton_nif),
    ok = pelton_file:write_file(Path("b"), "again"),
    _ = Fifo,
    {Reported, opened(Path("held")), pelton_file:read_file(Path("b"))}.

a_node_stops_with_everything_in_flight(Path) ->
    Peer = peer(),
    Monitor = monitor(process, Peer),
    Pid = peer:call(Peer, ?MODULE, leave_in_flight, [Path("")], 60000),
    ok = peer:call(Peer, init, stop, []),
    receive {'DOWN', Monitor, process, Peer, _} -> ok after 60000 -> error(the_node_does_not_stop) end,
    eventually(fun() -> not filelib:is_dir("/proc/" ++ Pid) end),
    %% The name is free.
    {ok, _} = pelton:open(receiver, ["unix:", Path("socket")]).

leave_in_flight(Directory) ->
    {Path, _, _} = reading(Directory),
    {ok, _} = application:ensure_all_started(pelton),
    Keep = fun(Fun) -> spawn(fun() -> Fun(), receive stop -> ok end end) end,
    Keep(fun() -> {ok, Receiver} = pelton:open(receiver, ["unix:", Path("socket")]), pelton:recv(Receiver) end),
    Keep(fun() -> pelton:open(sender, ["unix:", Path("nobody")], [{timeout, 100000}]) end),
    Keep(fun() -> pelton_file:open(Path("fifo2"), [read]) end),
    eventually(fun() -> element(1, file:read_link_info(Path("socket"))) =:= ok end),
    os:getpid().

%% A process that reads from a FIFO, and waits.
reading(Directory) ->
    Path = fun(Name) -> filename:join(Directory, Name) end,
    {ok, Fifo} = pelton_file:open(fifo(Path), [read, write, binary]),
    {Pid, Monitor} = spawn_monitor(fun() -> exit(pelton_file:read(Fifo, 1)) end),
    eventually(fun() -> waits(Pid) end),
    {Path, Fifo, {Pid, Monitor}}.

reported({Pid, Monitor}) ->
    receive {'DOWN', Monitor, process, Pid, Result} -> Result after 60000 -> nothing end.

peer() ->
    Paths = [filename:dirname(code:which(Module)) || Module <- [pelton_file, ?MODULE]],
    {ok, Peer, _} = peer:start(#{connection => standard_io, args => ["-pa" | Paths]}),
    Peer.

in_peer(Function, Directory) ->
    Peer = peer(),
    try peer:call(Peer, ?MODULE, Function, [Directory], 100000) after peer:stop(Peer) end.

stopping_the_application_closes_everything(Path) ->
    {ok, [pelton]} = application:ensure_all_started(pelton),
    {ok, File} = pelton_file:open(Path("a"), [write, read]),
    {ok, Fifo} = pelton_file:open(fifo(Path), [read, write]),
    {Pid, Monitor} = spawn_monitor(fun() -> exit(pelton_file:read(Fifo, 1)) end),
    eventually(fun() -> waits(Pid) end),
    ok = application:stop(pelton),
    receive {'DOWN', Monitor, process, Pid, Result} -> ?assertEqual({error, einval}, Result) end,
    ?assertEqual({error, einval}, pelton_file:write(File, "x")),
    eventually(fun() -> opened(Path("a")) + opened(fifo(Path)) =:= 0 end),
    %% It can be used again.
    ok = pelton_file:write_file(Path("b"), "x").

times_are_set(Path) ->
    ok = pelton_file:write_file(Path("a"), "x"),
    ok = pelton_file:utime(Path("a"), 1000000000, 1100000000),
    {ok, Info} = pelton_file:stat(Path("a")),
    ?assertMatch(#file_info{atime = 1000000000, mtime = 1100000000, size = 1, type = regular}, Info),
    ok = pelton_file:write_file_info(Path("a"), #file_info{mtime = {{2001, 2, 3}, {4, 5, 6}}}, [{time, universal}]),
    {ok, Changed} = pelton_file:read_file_info(Path("a"), [{time, universal}]),
    ?assertMatch(#file_info{mtime = {{2001, 2, 3}, {4, 5, 6}}}, Changed),
    %% Beyond 64 bits of nanoseconds.
    ok = pelton_file:utime(Path("a"), undefined, 10000000000),
    {ok, #file_info{mtime = Late}} = file:read_file_info(Path("a"), [raw, {time, posix}]),
    ?assertEqual(10000000000, Late),
    ok = pelton_file:write_file_info(Path("a"), #file_info{mode = 8#600}),
    {ok, #file_info{mode = Mode}} = pelton_file:stat(Path("a")),
    ?assertEqual(8#600, Mode band 8#777).

a_copy_begins_at_the_positions(Path) ->
    ok = pelton_file:write_file(Path("a"), "0123456789"),
    {ok, From} = pelton_file:open(Path("a"), [read]),
    {ok, To} = pelton_file:open(Path("b"), [write]),
    {ok, 2} = pelton_file:position(From, 2),
    ok = pelton_file:write(To, "x"),
    ?assertEqual({ok, 3}, pelton_file:copy(From, To, 3)),
    ?assertEqual({ok, 5}, pelton_file:copy(From, To)),
    ?assertEqual({ok, 0}, pelton_file:copy(From, To)),
    ?assertEqual({ok, <<"x23456789">>}, pelton_file:read_file(Path("b"))),
    ?assertEqual({ok, 9}, pelton_file:copy(Path("b"), {Path("c"), [exclusive]})),
    ?assertEqual({error, eexist}, pelton_file:copy(Path("b"), {Path("c"), [exclusive]})).

a_copy_is_appended(Path) ->
    ok = pelton_file:write_file(Path("a"), "0123456789"),
    ok = pelton_file:write_file(Path("b"), "before"),
    ?assertEqual({ok, 10}, pelton_file:copy(Path("a"), {Path("b"), [append]})),
    ?assertEqual({ok, 4}, pelton_file:copy({Path("a"), [raw]}, {Path("b"), [append]}, 4)),
    ?assertEqual({ok, <<"before01234567890123">>}, pelton_file:read_file(Path("b"))),
    %% To a FIFO, and from it.
    {ok, Fifo} = pelton_file:open(fifo(Path), [read, write, binary]),
    {ok, File} = pelton_file:open(Path("a"), [read, binary]),
    ?assertEqual({ok, 10}, pelton_file:copy(File, Fifo)),
    ?assertEqual({ok, 10}, pelton_file:copy(Fifo, Path("c"), 10)),
    ?assertEqual({ok, <<"0123456789">>}, pelton_file:read_file(Path("c"))).

%% A node with a limit of one mebibyte for files.
a_copy_reports_a_full_disk(Path) ->
    ok = pelton_file:write_file(Path("a"), binary:copy(<<"x">>, 3 bsl 20)),
    ?assertEqual({error, efbig}, in_peer(copy_with_limit, Path(""))).

copy_with_limit(Directory) ->
    "" = os:cmd("prlimit --pid " ++ os:getpid() ++ " --fsize=1048576: 2>&1"),
    pelton_file:copy(filename:join(Directory, "a"), filename:join(Directory, "b")).

%% Also while the copy waits for a pipe.
a_copy_ends_with_either_file(Path) ->
    [begin
         {ok, Fifo} = pelton_file:open(fifo(Path), [read, write, binary]),
         {ok, File} = pelton_file:open(Path("a"), [read, write, binary]),
         {Pid, Monitor} = spawn_monitor(fun() -> exit(pelton_file:copy(Fifo, File)) end),
         eventually(fun() -> waits(Pid) end),
         ok = pelton_file:close(case Closed of from -> Fifo; to -> File end),
         %% The byte arrives, and its write fails.
         Closed =:= to andalso pelton_file:write(Fifo, "x"),
         receive {'DOWN', Monitor, process, Pid, Result} -> ?assertEqual({error, einval}, Result) end
     end || Closed <- [from, to]].

%% The memory above this process's stack is not mapped: reading it is EIO.
an_error_after_some_bytes_is_returned_next(Path) ->
    {ok, Maps} = file:read_file("/proc/self/maps"),
    [Stack] = [Line || Line <- binary:split(Maps, <<"\n">>, [global]), binary:match(Line, <<"[stack]">>) =/= nomatch],
    [_, To] = binary:split(hd(binary:split(Stack, <<" ">>)), <<"-">>),
    End = binary_to_integer(To, 16),
    [begin
         {ok, File} = pelton_file:open("/proc/self/mem", [read, binary | Modes]),
         {ok, _} = pelton_file:position(File, End - 4096),
         ?assertMatch({ok, <<_:4096/binary>>}, pelton_file:read(File, 8192)),
         ?assertEqual({error, eio}, pelton_file:read(File, 1)),
         {ok, _} = pelton_file:position(File, End - 4096),
         ?assertEqual({error, eio}, pelton_file:copy(File, Path("a"))),
         ?assertMatch({ok, [<<_:4096/binary>>]}, pelton_file:pread(File, [{End - 4096, 8192}])),
         ?assertEqual({error, eio}, pelton_file:pread(File, [{End - 4096, 8192}, {End, 1}])),
         ok = pelton_file:close(File)
     end || Modes <- [[], [read_ahead]]],
    ?assertEqual(file:read_file("/proc/self/mem"), pelton_file:read_file("/proc/self/mem")).

%% ---- delayed_write and read_ahead ----

a_delayed_write_is_written_when_due(Path) ->
    Name = Path("a"),
    {ok, File} = pelton_file:open(Name, [write, read, binary, {delayed_write, 100, 3600000}]),
    Is = fun(Bytes) -> ?assertEqual({ok, Bytes}, file:read_file(Name)) end,
    ok = pelton_file:write(File, ["he", <<"llo">>]),
    ok = pelton_file:write(File, " world"),
    Is(<<>>),
    %% Any other operation flushes first.
    ?assertEqual({ok, <<"hello">>}, pelton_file:pread(File, 0, 5)),
    Is(<<"hello world">>),
    [begin
         ok = pelton_file:write(File, <<I>>),
         Function(),
         {ok, Found} = file:read_file(Name),
         ?assertEqual(I, binary:last(Found))
     end || {I, Function} <- lists:enumerate(
         [fun() -> pelton_file:sync(File) end, fun() -> pelton_file:datasync(File) end, fun() ->
          pelton_file:position(File, cur) end,
          fun() -> pelton_file:read(File, 1) end, fun() -> pelton_file:read_line(File) end, fun() ->
              pelton_file:truncate(File) end,
          fun() -> pelton_file:read_file_info(File) end, fun() -> pelton_file:advise(File, 0, 0, normal) end,
          fun() -> pelton_file:pwrite(File, 0, "H") end, fun() -> pelton_file:pread(File, [{0, 1}]) end,
          fun() -> pelton_file:await(pelton_file:pread_async(File, 0, 1)) end, fun() ->
              pelton_file:await(pelton_file:sync_async(File)) end,
          fun() -> pelton_file:copy(File, Path("b")) end])],
    ok = pelton_file:truncate(File),
    {ok, Before} = file:read_file(Name),
    %% The buffer holds less than 100 bytes.
    ok = pelton_file:write(File, binary:copy(<<"x">>, 99)),
    Is(Before),
    ok = pelton_file:write(File, "x"),
    Is(<<Before/binary, (binary:copy(<<"x">>, 100))/binary>>),
    %% More than fits, in many pieces: the delayed bytes are written first.
    Large = [rand:bytes(I) || I <- lists:seq(1, 3000)],
    ok = pelton_file:write(File, "before"),
    ok = pelton_file:write(File, Large),
    Is(iolist_to_binary([Before, binary:copy(<<"x">>, 100), "before", Large])),
    ok = pelton_file:write(File, "after"),
    ok = pelton_file:close(File),
    {ok, Whole} = file:read_file(Name),
    ?assertEqual(<<"after">>, binary:part(Whole, byte_size(Whole), -5)),
    %% Each of these is flushed when it is due.
    {ok, Soon} = pelton_file:open(Name, [write, {delayed_write, 100, 20}]),
    [begin
         ok = pelton_file:write(Soon, <<I>>),
         eventually(fun() -> {ok, Found} = file:read_file(Name), byte_size(Found) =:= I end)
     end || I <- lists:seq(1, 5)],
    %% The defaults: 64 KiB and two seconds.
    {ok, Default} = pelton_file:open(Name, [write, delayed_write]),
    ok = pelton_file:write(Default, binary:copy(<<"y">>, 65536)),
    ?assertMatch({ok, <<_:65536/binary>>}, file:read_file(Name)),
    ok = pelton_file:write(Default, "z"),
    eventually(fun() -> {ok, Found} = file:read_file(Name), byte_size(Found) =:= 65537 end).

a_delayed_write_survives_its_process(Path) ->
    Name = Path("a"),
    Open = fun() -> pelton_file:open(Name, [write, {delayed_write, 1000000, 3600000}]) end,
    Is = fun(Bytes) -> eventually(fun() -> file:read_file(Name) =:= {ok, Bytes} end) end,
    in_process(fun() -> {ok, File} = Open(), ok = pelton_file:write(File, "of an ended process") end),
    Is(<<"of an ended process">>),
    Killed = spawn(fun() -> {ok, File} = Open(), ok = pelton_file:write(File, "of a killed process"), receive stop ->
                   ok end end),
    eventually(fun() -> waits(Killed) end),
    exit(Killed, kill),
    Is(<<"of a killed process">>),
    %% A handle that nobody refers to is flushed when it is due, and closed.
    {ok, Forgotten} = pelton_file:open(Name, [write, {delayed_write, 100, 100}]),
    ok = pelton_file:write(Forgotten, "forgotten"),
    Is(<<"forgotten">>),
    eventually(fun() -> erlang:garbage_collect(), opened(Name) =:= 0 end),
    %% Stopping the application writes everything.
    {ok, _} = application:ensure_all_started(pelton),
    Files = [begin {ok, File} = pelton_file:open(Path(integer_to_list(I)), [write, {delayed_write, 1000000, 3600000}]),
                   ok = pelton_file:write(File, binary:copy(<<I>>, 500000)), File end || I <- lists:seq(1, 20)],
    ok = application:stop(pelton),
    [?assertEqual({ok, binary:copy(<<I>>, 500000)}, file:read_file(Path(integer_to_list(I)))) || I <- lists:seq(1, 20)],
    ?assertEqual([{error, einval}], lists:usort([pelton_file:write(File, "x") || File <- Files])),
    %% So does stopping the node.
    Peer = peer(),
    Monitor = monitor(process, Peer),
    ok = peer:call(Peer, ?MODULE, leave_delayed, [Path("node")], 60000),
    ok = peer:call(Peer, init, stop, []),
    receive {'DOWN', Monitor, process, Peer, _} -> ok after 60000 -> error(the_node_does_not_stop) end,
    ?assertEqual({ok, <<"delayed">>}, file:read_file(Path("node"))).

leave_delayed(Name) ->
    {ok, _} = application:ensure_all_started(pelton),
    Test = self(),
    Pid = spawn(fun() ->
        {ok, File} = pelton_file:open(Name, [write, {delayed_write, 1000, 3600000}]),
        Test ! {self(), pelton_file:write(File, "delayed")},
        receive stop -> ok end
    end),
    receive {Pid, Result} -> Result end.

an_error_of_a_delayed_write_is_returned_once(_Place) ->
    Full = fun(Delay) -> {ok, File} = pelton_file:open("/dev/full", [read, write, binary, {delayed_write, 100,
        Delay}]), File end,
    Later = Full(3600000),
    ok = pelton_file:write(Later, "x"),
    ?assertEqual({error, enospc}, pelton_file:position(Later, cur)),
    ?assertMatch({ok, _}, pelton_file:position(Later, cur)),
    ?assertEqual({error, enospc}, pelton_file:write(Later, binary:copy(<<"x">>, 100))),
    ok = pelton_file:write(Later, "x"),
    %% It is closed as well.
    ?assertEqual({error, enospc}, pelton_file:close(Later)),
    ?assertEqual({error, einval}, pelton_file:close(Later)),
    %% A flush that no process waited for: any operation returns its error, once.
    [begin
         Soon = Full(1),
         ok = pelton_file:write(Soon, "x"),
         eventually(fun() -> Function(Soon) =:= {error, enospc} end),
         pelton_file:close(Soon)
     end || Function <- [fun(File) -> pelton_file:write(File, "y") end, fun pelton_file:sync/1, fun(File) ->
                         pelton_file:read(File, 1) end,
                         fun(File) -> pelton_file:pread(File, 0, 1) end]],
    Last = Full(1),
    ok = pelton_file:write(Last, "x"),
    eventually(fun() -> {error, enospc} =:= pelton_file:close(Last) end).

reading_ahead_keeps_the_position(Path) ->
    Name = Path("a"),
    ok = pelton_file:write_file(Name, "0123456789"),
    {ok, File} = pelton_file:open(Name, [read, write, binary, read_ahead]),
    ?assertEqual({ok, <<"01">>}, pelton_file:read(File, 2)),
    %% The bytes read ahead are not read again,
    ok = file:write_file(Name, "abcdefghij"),
    ?assertEqual({ok, <<"23">>}, pelton_file:read(File, 2)),
    %% except after a write through the handle, at any offset.
    ok = pelton_file:pwrite(File, 9, "J"),
    ?assertEqual({ok, <<"ef">>}, pelton_file:read(File, 2)),
    ok = pelton_file:write(File, "GH"),
    ?assertEqual({ok, <<"iJ">>}, pelton_file:read(File, 100)),
    ?assertEqual(eof, pelton_file:read(File, 1)),
    ok = pelton_file:await(pelton_file:pwrite_async(File, 10, "kl")),
    ?assertEqual({ok, <<"k">>}, pelton_file:read(File, 1)),
    ok = pelton_file:await(pelton_file:pwrite_async(File, 11, "L")),
    ?assertEqual({ok, <<"L">>}, pelton_file:read(File, 1)),
    ?assertEqual({ok, 12}, pelton_file:position(File, cur)),
    {ok, 3} = pelton_file:position(File, 3),
    ?assertEqual({ok, <<"d">>}, pelton_file:read(File, 1)),
    ok = pelton_file:truncate(File),
    ?assertEqual({ok, <<"abcd">>}, file:read_file(Name)),
    %% Large reads, of which the smaller part is copied, and a line of many fills.
    Line = binary:copy(<<"line">>, 100000),
    Bytes = <<(rand:bytes(300000))/binary, "\n", Line/binary, "\r\nend">>,
    ok = file:write_file(Name, Bytes),
    {ok, 0} = pelton_file:position(File, 0),
    ?assertEqual({ok, binary:part(Bytes, 0, 300001)}, pelton_file:read(File, 300001)),
    ?assertEqual({ok, <<Line/binary, "\n">>}, pelton_file:read_line(File)),
    ?assertEqual({ok, <<"end">>}, pelton_file:read_line(File)),
    ?assertEqual(eof, pelton_file:read_line(File)).

%% Each line is one write, and is read once.
many_processes_share_a_buffer(Path) ->
    {ok, File} = pelton_file:open(Path("a"), [read, write, binary, {delayed_write, 1000, 1}, read_ahead]),
    Count = 1000,
    Each = fun(Fun) ->
        Pids = [spawn_monitor(fun() -> exit({reported, Fun(I)}) end) || I <- lists:seq(1, 8)],
        [receive {'DOWN', Monitor, process, Pid, {reported, Reported}} -> Reported end || {Pid, Monitor} <- Pids]
    end,
    Lines = fun(I) -> [io_lib:format("~b-~b ~s~n", [I, J, lists:duplicate(J rem 50, $x)]) || J <- lists:seq(1,
        Count)] end,
    Each(fun(I) -> [ok = pelton_file:write(File, Line) || Line <- Lines(I)] end),
    {ok, 0} = pelton_file:position(File, 0),
    Read = Each(fun(_) -> (fun More() -> case pelton_file:read_line(File) of {ok, Line} -> [Line | More()]; eof ->
                           [] end end)() end),
    Wanted = [iolist_to_binary(Line) || I <- lists:seq(1, 8), Line <- Lines(I)],
    ?assertEqual(lists:sort(Wanted), lists:sort(lists:append(Read))),
    ok = pelton_file:close(File).

a_pipe_has_buffers_too(Path) ->
    {ok, File} = pelton_file:open(fifo(Path), [read, write, binary, {delayed_write, 100, 3600000}, read_ahead]),
    {Pid, Monitor} = spawn_monitor(fun() -> exit([pelton_file:read_line(File), pelton_file:read(File, 2),
                                                  pelton_file:read(File, 2)]) end),
    eventually(fun() -> waits(Pid) end),
    ok = pelton_file:write(File, "li"),
    ok = pelton_file:write(File, "ne\nabcd"),
    ?assertEqual({error, einval}, pelton_file:sync(File)),
    receive {'DOWN', Monitor, process, Pid, Read} -> ?assertEqual([{ok, <<"line\n">>}, {ok, <<"ab">>}, {ok,
        <<"cd">>}], Read) end,
    %% A close ends a waiting read, and a kill a waiting write.
    Waiting = [spawn_monitor(Fun) || Fun <- [fun() -> exit(pelton_file:read(File, 1)) end]],
    eventually(fun() -> lists:all(fun({Waits, _}) -> waits(Waits) end, Waiting) end),
    ok = pelton_file:close(File),
    [receive {'DOWN', Closed, process, Waits, Result} -> ?assertEqual({error, einval}, Result) end || {Waits,
        Closed} <- Waiting],
    %% A full pipe.
    {ok, Full} = pelton_file:open(fifo(Path), [read, write, binary, {delayed_write, 100, 3600000}]),
    {Writer, Gone} = spawn_monitor(fun() -> exit(pelton_file:write(Full, binary:copy(<<"x">>, 1000000))) end),
    eventually(fun() -> waits(Writer) end),
    exit(Writer, kill),
    receive {'DOWN', Gone, process, Writer, killed} -> ok end,
    ok = pelton_file:close(Full),
    eventually(fun() -> opened(fifo(Path)) =:= 0 end).

buffered_files_leave_nothing(Path) ->
    Round = fun(Count) ->
        lists:foreach(fun(I) ->
            {ok, File} = pelton_file:open(Path("a"), [read, write, binary, {delayed_write, 1000, 3600000}, read_ahead]),
            ok = pelton_file:write(File, <<I:64>>),
            I rem 2 =:= 0 andalso ({ok, _} = pelton_file:pread(File, 0, 8)),
            I rem 3 =:= 0 andalso pelton_file:read(File, 1),
            ok = pelton_file:close(File)
        end, lists:seq(1, Count)),
        erlang:garbage_collect()
    end,
    Round(2000),
    {Descriptors, Memory} = {descriptors(), resident()},
    Round(8000),
    eventually(fun() -> descriptors() =< Descriptors end),
    %% Each open file has 64 KiB.
    ?assert(resident() - Memory < 64 bsl 20).

%% Each receive of a result starts after the messages that were there before: the compiler reports that.
the_receive_does_not_scan_the_mailbox_test_() ->
    {timeout, 120, fun the_receive_does_not_scan_the_mailbox/0}.

the_receive_does_not_scan_the_mailbox() ->
    Source = proplists:get_value(source, pelton_file:module_info(compile)),
    {ok, pelton_file, _, Reported} = compile:file(Source, [binary, return_warnings, recv_opt_info]),
    Texts = [lists:flatten(beam_ssa_recv:format_error(What)) || {_, Warnings} <- Reported, {_, beam_ssa_recv,
        What} <- Warnings],
    ?assert(lists:any(fun(Text) -> string:find(Text,
                                               "all clauses match reference in function parameter") =/= nomatch end,
                                                   Texts)),
    ?assertEqual([], [Text || Text <- Texts, string:find(Text, "NOT OPTIMIZED") =/= nomatch]).

%% Counted, where the test above believes the compiler. The first read of a file, the list, the sync, the names and the
%% read behind the end take the ways by a dirty scheduler, by the engine, and by the notifier thread.
no_work_is_done_for_the_mailbox(Path) ->
    ok = file:write_file(Path("lines"), binary:copy(<<"line\n">>, 2000)),
    {ok, File} = pelton_file:open(Path("data"), [read, write, binary]),
    {ok, Lines} = pelton_file:open(Path("lines"), [read, binary, read_ahead]),
    ok = pelton_file:write(File, binary:copy(<<7>>, 65536)),
    assert_flat([
        {write, fun() -> ok = pelton_file:pwrite(File, 0, binary:copy(<<7>>, 4096)) end},
        {read, fun() -> {ok, <<_:4096/binary>>} = pelton_file:pread(File, 8192, 4096) end},
        {read_behind_the_end, fun() -> eof = pelton_file:pread(File, 1 bsl 40, 10) end},
        {read_list, fun() -> {ok, [_, _]} = pelton_file:pread(File, [{0, 10}, {4096, 10}]) end},
        {write_list, fun() -> ok = pelton_file:pwrite(File, [{0, "one"}, {4096, "two"}]) end},
        {sync, fun() -> ok = pelton_file:sync(File) end},
        {position, fun() -> {ok, 0} = pelton_file:position(File, 0) end},
        {read_line, fun() -> {ok, <<"line\n">>} = pelton_file:read_line(Lines) end},
        {open_and_close, fun() ->
            {ok, Opened} = pelton_file:open(Path("data"), [read]),
            {ok, _} = pelton_file:read(Opened, 10),
            ok = pelton_file:close(Opened)
        end},
        {read_file, fun() -> {ok, _} = pelton_file:read_file(Path("lines")) end},
        {info, fun() -> {ok, _} = pelton_file:read_file_info(Path("data")) end},
        {list_dir, fun() -> {ok, _} = pelton_file:list_dir(Path("")) end}]).

%% ---- Shared by the tests ----

%% Each operation costs a process with a large mailbox no more reductions, and no more garbage collections, than one
%% with an empty mailbox. A receive that scans the mailbox costs a reduction a message: 2,500,000 for fifty operations.
assert_flat(Operations) ->
    [begin
         {Operation, {Reductions, Collections}} = Empty,
         {Operation, {ReductionsFull, CollectionsFull}} = Full,
         ?assertEqual({Flag, Operation, true, true},
                      {Flag, Operation, ReductionsFull < Reductions + 500000, CollectionsFull < Collections + 25})
     end || Flag <- [on_heap, off_heap],
            {Empty, Full} <- lists:zip(work(Flag, 0, Operations), work(Flag, 50000, Operations))],
    ok.

%% Reductions and collections for fifty times each operation, in a process with so many messages.
work(Flag, Messages, Operations) ->
    in_process(fun() ->
        process_flag(message_queue_data, Flag),
        %% As many words are free for garbage in both.
        process_flag(min_heap_size, 10000),
        [self() ! {message, I} || I <- lists:seq(1, Messages)],
        %% The messages become old.
        [erlang:garbage_collect() || _ <- "twice"],
        [begin
             {ReductionsBefore, CollectionsBefore} = worked(),
             [Do() || _ <- lists:seq(1, 50)],
             {Reductions, Collections} = worked(),
             {Operation, {Reductions - ReductionsBefore, Collections - CollectionsBefore}}
         end || {Operation, Do} <- Operations]
    end).

worked() ->
    [{reductions, Reductions}, {garbage_collection, Collections}] =
        process_info(self(), [reductions, garbage_collection]),
    {Reductions, proplists:get_value(minor_gcs, Collections)}.

directory() ->
    Directory = filename:join(os:getenv("TMPDIR", "/tmp"), "pelton-erlang-" ++ os:getpid() ++ "-" ++
                                  integer_to_list(erlang:unique_integer([positive]))),
    ok = file:make_dir(Directory),
    fun(Name) -> filename:join(Directory, Name) end.

remove(Path) ->
    ok = file:del_dir_r(Path("")).

fifo(Path) ->
    Name = Path("fifo"),
    "" = os:cmd("test -p " ++ Name ++ " || mkfifo " ++ Name),
    Name.

in_process(Fun) ->
    {Pid, Monitor} = spawn_monitor(fun() -> exit({reported, Fun()}) end),
    {reported, Result} = receive {'DOWN', Monitor, process, Pid, Reason} -> Reason end,
    Result.

waits(Pid) -> process_info(Pid, status) =:= {status, waiting}.

eventually(Is) -> eventually(Is, 6000).
eventually(Is, 0) -> ?assert(Is());
eventually(Is, Times) -> Is() orelse begin timer:sleep(5), eventually(Is, Times - 1) end.

descriptors() ->
    {ok, Names} = file:list_dir("/proc/self/fd"),
    length(Names).

%% The number of this node's descriptors of a file.
opened(Name) ->
    {ok, Descriptors} = file:list_dir("/proc/self/fd"),
    length([There || Descriptor <- Descriptors, {ok, There} <- [file:read_link("/proc/self/fd/" ++ Descriptor)],
            There =:= Name]).

resident() ->
    {ok, Text} = file:read_file("/proc/self/statm"),
    [_, Pages | _] = string:lexemes(Text, " "),
    binary_to_integer(Pages) * 4096.
