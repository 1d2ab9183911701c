%% What pelton promises: between processes of this node, and with the pelton command, which stands for other languages.
-module(pelton_tests).
-behaviour(pelton_service).
-include_lib("eunit/include/eunit.hrl").
-export([init/1, handle_request/3, handle_info/2]).

in_a_place_test_() ->
    {foreach, fun pelton_file_tests:directory/0, fun pelton_file_tests:remove/1,
     [fun(Path) -> {atom_to_list(Name), {timeout, 120, fun() -> Test(Path) end}} end || {Name, Test} <- tests()]}.

tests() ->
    [{messages_come_whole_and_in_order, fun messages_come_whole_and_in_order/1},
     {a_message_has_the_traceparent_of_its_sender, fun a_message_has_the_traceparent_of_its_sender/1},
     {an_endpoint_has_figures, fun an_endpoint_has_figures/1},
     {a_traced_message_waits_for_space, fun a_traced_message_waits_for_space/1},
     {a_request_has_the_traceparent_of_its_client, fun a_request_has_the_traceparent_of_its_client/1},
     {a_full_lane_makes_the_sender_wait, fun a_full_lane_makes_the_sender_wait/1},
     {each_process_that_waits_for_space_is_woken, fun each_process_that_waits_for_space_is_woken/1},
     {each_process_that_waits_for_a_message_is_woken, fun each_process_that_waits_for_a_message_is_woken/1},
     {large_messages_free_their_space, fun large_messages_free_their_space/1},
     {held_messages_are_whole, fun held_messages_are_whole/1},
     {held_messages_never_change, fun held_messages_never_change/1},
     {a_flood_of_messages_does_not_delay_a_file, fun a_flood_of_messages_does_not_delay_a_file/1},
     {a_wrong_option_opens_nothing, fun a_wrong_option_opens_nothing/1},
     {openings_block_no_scheduler, fun openings_block_no_scheduler/1},
     {active_sends_as_many_as_requested, fun active_sends_as_many_as_requested/1},
     {active_counts_are_added, fun active_counts_are_added/1},
     {no_thread_waits_for_an_open, fun no_thread_waits_for_an_open/1},
     {an_open_waits_for_its_listener, fun an_open_waits_for_its_listener/1},
     {an_open_ends_at_its_timeout, fun an_open_ends_at_its_timeout/1},
     {an_open_ends_with_its_process, fun an_open_ends_with_its_process/1},
     {an_endpoint_ends_with_its_owner, fun an_endpoint_ends_with_its_owner/1},
     {names_are_free_once_their_owner_has_ended, fun names_are_free_once_their_owner_has_ended/1},
     {another_process_becomes_the_owner, fun another_process_becomes_the_owner/1},
     {closing_ends_a_waiting_receive, fun closing_ends_a_waiting_receive/1},
     {a_wait_ends_at_its_timeout, fun a_wait_ends_at_its_timeout/1},
     {a_name_without_a_listener_is_an_error, fun a_name_without_a_listener_is_an_error/1},
     {calls_get_their_replies, fun calls_get_their_replies/1},
     {a_cast_does_not_wait, fun a_cast_does_not_wait/1},
     {a_large_cast_is_written, fun a_large_cast_is_written/1},
     {many_processes_call_by_one_client, fun many_processes_call_by_one_client/1},
     {a_late_reply_reaches_its_caller, fun a_late_reply_reaches_its_caller/1},
     {no_work_is_done_for_the_mailbox, fun no_work_is_done_for_the_mailbox/1},
     {an_unreferenced_responder_abandons_the_call, fun an_unreferenced_responder_abandons_the_call/1},
     {a_service_that_ends_fails_its_calls, fun a_service_that_ends_fails_its_calls/1},
     {an_accepted_receiver_ends_with_its_sender, fun an_accepted_receiver_ends_with_its_sender/1},
     {each_process_that_accepts_gets_a_sender, fun each_process_that_accepts_gets_a_sender/1},
     {a_wait_for_the_release_ends_with_it, fun a_wait_for_the_release_ends_with_it/1},
     {a_wait_continues_after_another_process_used_the_sender,
      fun a_wait_continues_after_another_process_used_the_sender/1},
     {a_successor_gets_what_was_not_released, fun a_successor_gets_what_was_not_released/1},
     {a_receiver_continues_with_the_next_sender, fun a_receiver_continues_with_the_next_sender/1},
     {a_path_reports_the_end_of_each_sender, fun a_path_reports_the_end_of_each_sender/1},
     {each_part_of_a_reply_arrives, fun each_part_of_a_reply_arrives/1},
     {several_processes_reply_in_parts, fun several_processes_reply_in_parts/1},
     {a_stream_that_its_reader_leaves_is_cancelled, fun a_stream_that_its_reader_leaves_is_cancelled/1},
     {a_service_learns_that_a_stream_was_cancelled, fun a_service_learns_that_a_stream_was_cancelled/1},
     {a_part_ends_with_its_client, fun a_part_ends_with_its_client/1},
     {an_accept_ends_with_the_owner_of_the_listener, fun an_accept_ends_with_the_owner_of_the_listener/1},
     {a_closed_listener_gets_no_event, fun a_closed_listener_gets_no_event/1},
     {a_drained_service_replies_and_ends, fun a_drained_service_replies_and_ends/1},
     {the_command_sends_and_receives, fun the_command_sends_and_receives/1},
     {the_command_serves_and_calls, fun the_command_serves_and_calls/1},
     {a_file_goes_to_the_command_and_comes_from_it, fun a_file_goes_to_the_command_and_comes_from_it/1},
     {an_endpoint_returns_from_a_file_operation, fun an_endpoint_returns_from_a_file_operation/1},
     {each_reason_has_a_text, fun each_reason_has_a_text/1},
     {a_refused_peer_is_logged, fun a_refused_peer_is_logged/1},
     {nothing_is_left_open, fun nothing_is_left_open/1}].

name(Path) -> ["unix:", Path("socket")].

channel(Path, Options) ->
    {ok, Receiver} = pelton:open(receiver, name(Path), Options),
    {Receiver, sender(Path, Receiver)}.

%% A receiver accepts senders while it receives.
sender(Path, Receiver) ->
    Test = self(),
    Pid = spawn_link(fun() ->
        {ok, Sender} = pelton:open(sender, name(Path), [{timeout, 30000}]),
        ok = pelton:controlling_process(Sender, Test),
        Test ! {self(), Sender}
    end),
    accepted(Pid, Receiver).

accepted(Pid, Receiver) ->
    receive {Pid, Sender} -> Sender
    after 0 ->
        case pelton:recv(Receiver, 5) of
            {error, timeout} -> accepted(Pid, Receiver);
            {error, einval} -> receive {Pid, Sender} -> Sender end
        end
    end.

messages_come_whole_and_in_order(Path) ->
    {Receiver, Sender} = channel(Path, []),
    Sizes = [0, 1, 63, 64, 65, 1000, 70000, 262144, 262145, 5000000],
    Messages = [rand:bytes(Size) || Size <- Sizes],
    Writer = spawn_link(fun() -> [ok = pelton:send(Sender, [One]) || One <- Messages] end),
    ?assertEqual(Messages, [begin {ok, One} = pelton:recv(Receiver), One end || _ <- Messages]),
    down(Writer),
    ok = pelton:send(Sender, ["io", <<"list">>, $s]),
    ?assertEqual({ok, <<"iolists">>}, pelton:recv(Receiver)),
    %% Above the limit.
    ?assertEqual({error, too_large}, pelton:send(Sender, binary:copy(<<0>>, 64 bsl 20))).

traceparent(I) ->
    iolist_to_binary(io_lib:format("00-~32.16.0b-~16.16.0b-01", [I, I])).

a_message_has_the_traceparent_of_its_sender(Path) ->
    Path1 = ["path:", Path("channel")],
    {ok, Sender} = pelton:open(sender, Path1, [{create, true}, {traced, true}]),
    {ok, Receiver} = pelton:open(receiver, Path1, [{traceparents, true}]),
    Large = binary:copy(<<"large">>, 100000),
    Messages = [{<<"a">>, traceparent(1)}, {<<"b">>, undefined}, {Large, traceparent(3)}, {Large, undefined}],
    Send = fun() -> [ok = pelton:send(Sender, Bytes, [{traceparent, Text}]) || {Bytes, Text} <- Messages] end,
    %% In each of the ways to receive.
    [begin
         ok = pelton:setopts(Receiver, [{messages, How}]),
         Send(),
         ?assertEqual(Messages, [begin {ok, Bytes, Text} = pelton:recv(Receiver), {Bytes, Text} end || _ <- Messages]),
         Send(),
         ok = pelton:setopts(Receiver, [{active, length(Messages)}]),
         ?assertEqual(Messages,
                      [receive {pelton, Receiver, Bytes, Text} -> {Bytes, Text} after 30000 -> none end || _ <- Messages]),
         receive {pelton_passive, Receiver} -> ok end
     end || How <- [copy, hold]],
    %% A version without an end, code points that are no bytes, and a valid text with more behind a 0.
    [begin
         ok = pelton:send(Sender, "not valid", [{traceparent, Text}]),
         ?assertEqual({ok, <<"not valid">>, undefined}, pelton:recv(Receiver))
     end || Text <- ["00-0-0-01", [8364], <<(traceparent(5))/binary, 0, "more">>]],
    ok = pelton:setopts(Receiver, [{traceparents, false}]),
    ok = pelton:send(Sender, "not wanted", [{traceparent, traceparent(4)}, {timeout, 1000}]),
    ?assertEqual({ok, <<"not wanted">>}, pelton:recv(Receiver)),
    ?assertError({bad_option, {traceparent, 1}}, pelton:send(Sender, "x", [{traceparent, 1}])),
    ?assertError({bad_option, {traced, true}}, pelton:open(receiver, name(Path), [{traced, true}])),
    %% A channel without the option.
    {Other, From} = channel(Path, [{traceparents, true}]),
    ok = pelton:send(From, "goes without it", [{traceparent, traceparent(5)}]),
    ?assertEqual({ok, <<"goes without it">>, undefined}, pelton:recv(Other)).

an_endpoint_has_figures(Path) ->
    {Receiver, Sender} = channel(Path, []),
    [ok = pelton:send(Sender, "hello") || _ <- lists:seq(1, 3)],
    Pid = list_to_integer(os:getpid()),
    ?assertMatch(#{messages := 3, bytes := 15, unreleased := 3, capacity := 67108864, peer_pid := Pid},
                 pelton:info(Sender)),
    {ok, <<"hello">>} = pelton:recv(Receiver),
    ?assertMatch(#{messages := 1, bytes := 5, wakes_sent := _, waits := _, sleeps := _}, pelton:info(Receiver)),
    {ok, Service} = pelton:open(service, ["unix:", Path("service")]),
    ?assertEqual(#{dropped => 0, corrupt => 0}, pelton:info(Service)),
    Test = self(),
    Caller = spawn_link(fun() ->
        {ok, Client} = pelton:open(client, ["unix:", Path("service")], [{timeout, 30000}]),
        Test ! {self(), pelton:info(Client)},
        receive stop -> ok end
    end),
    ok = pelton:setopts(Service, [{active, true}]),
    receive {Caller, Info} -> ?assertMatch(#{services := 1, in_flight := 0, peer_pid := Pid}, Info) end,
    Caller ! stop,
    ok = pelton:close(Sender),
    ?assertEqual({error, closed}, pelton:info(Sender)),
    {ok, Listener} = pelton:open(listener, ["unix:", Path("listener")]),
    ?assertError(badarg, pelton:info(Listener)).

a_traced_message_waits_for_space(Path) ->
    Name = ["path:", Path("channel")],
    {ok, Receiver} = pelton:open(receiver, Name, [{create, true}, {traced, true}, {capacity, 65536}]),
    ok = pelton:setopts(Receiver, [{traceparents, true}]),
    Count = 10000,
    Writer = spawn_link(fun() ->
        {ok, Sender} = pelton:open(sender, Name, []),
        [ok = pelton:send(Sender, <<I:32, 0:800>>, [{traceparent, traceparent(I)}]) || I <- lists:seq(1, Count)],
        ok = pelton:wait_released(Sender)
    end),
    [begin
         Traceparent = traceparent(I),
         {ok, <<I:32, _/binary>>, Traceparent} = pelton:recv(Receiver)
     end || I <- lists:seq(1, Count)],
    down(Writer).

a_request_has_the_traceparent_of_its_client(Path) ->
    {ok, Service} = pelton:open(service, name(Path), [{active, true}]),
    Test = self(),
    Large = binary:copy(<<"large">>, 100000),
    Texts = [traceparent(1), undefined, traceparent(2)],
    Caller = spawn_link(fun() ->
        {ok, Client} = pelton:open(client, name(Path), [{timeout, 30000}]),
        [{ok, Bytes} = pelton:call(Client, Bytes, [{traceparent, Text}]) || Bytes <- [<<"a">>, Large], Text <- Texts],
        Add = fun(Part, Sum) -> Sum + byte_size(Part) end,
        [{ok, 500000} = pelton:stream(Client, Large, Add, 0, [{traceparent, Text}, {timeout, 30000}]) || Text <- Texts],
        ok = pelton:cast(Client, "no reply"),
        Test ! {self(), ended},
        receive stop -> ok end
    end),
    Found = [receive
                 {pelton_request, Service, Responder, Bytes} ->
                     Text = pelton:traceparent(Responder),
                     ok = pelton:reply(Responder, Bytes),
                     ?assertEqual(undefined, pelton:traceparent(Responder)),
                     Text
             after 30000 -> none
             end || _ <- lists:seq(1, 9)],
    ?assertEqual(Texts ++ Texts ++ Texts, Found),
    receive {pelton_request, Service, undefined, _} -> ?assertEqual(undefined, pelton:traceparent(undefined)) end,
    receive {Caller, ended} -> Caller ! stop end.

a_full_lane_makes_the_sender_wait(Path) ->
    {ok, Receiver} = pelton:open(receiver, name(Path), []),
    Test = self(),
    Count = 20000,
    Writer = spawn_link(fun() ->
        {ok, Sender} = pelton:open(sender, name(Path), [{timeout, 30000}, {capacity, 65536}]),
        [ok = pelton:send(Sender, <<I:32, 0:800>>) || I <- lists:seq(1, Count)],
        Test ! sent,
        receive stop -> ok end
    end),
    {ok, <<1:32, _/binary>>} = pelton:recv(Receiver),
    pelton_file_tests:eventually(fun() -> process_info(Writer, status) =:= {status, waiting} end),
    receive sent -> error(no_room_for_that) after 0 -> ok end,
    [{ok, <<I:32, _/binary>>} = pelton:recv(Receiver) || I <- lists:seq(2, Count)],
    receive sent -> Writer ! stop end.

%% Another process takes the free space that a waiting one needs.
each_process_that_waits_for_space_is_woken(Path) ->
    {ok, Receiver} = pelton:open(receiver, name(Path), []),
    Test = self(),
    Opener = spawn_link(fun() ->
        {ok, Sender} = pelton:open(sender, name(Path), [{timeout, 30000}, {capacity, 65536}]),
        Test ! {self(), Sender},
        receive stop -> ok end
    end),
    Sender = accepted(Opener, Receiver),
    Writer = spawn_link(fun() -> [ok = pelton:send(Sender, <<I:32, 0:(8 * 4000)>>) || I <- lists:seq(1, 30)] end),
    pelton_file_tests:eventually(fun() -> process_info(Writer, status) =:= {status, waiting} end),
    %% Too little for a wake-up.
    [{ok, <<I:32, _/binary>>} = pelton:recv(Receiver, 30000) || I <- lists:seq(1, 4)],
    ok = pelton:send(Sender, <<0:32, 0:(8 * 4000)>>, 30000),
    Received = [element(2, pelton:recv(Receiver, 30000)) || _ <- lists:seq(5, 31)],
    ?assertEqual(lists:seq(5, 30), [I || <<I:32, _:32000>> <- Received, I > 0]),
    Opener ! stop.

%% Another process takes the message that woke a waiting one, and then polls no more.
each_process_that_waits_for_a_message_is_woken(Path) ->
    {Receiver, Sender} = channel(Path, []),
    Test = self(),
    Waits = fun Waits(Pid) -> process_info(Pid, status) =:= {status, waiting} orelse begin erlang:yield(),
        Waits(Pid) end end,
    Polls = fun Polls() ->
        case pelton:recv(Receiver, 0) of
            {ok, Message} -> Message;
            {error, timeout} -> receive stop -> nothing after 0 -> Polls() end
        end
    end,
    [begin
         {Waiting, Reported} = spawn_monitor(fun() -> exit(pelton:recv(Receiver, 60000)) end),
         true = Waits(Waiting),
         {Polling, Taken} = spawn_monitor(fun() -> Test ! polls, exit(Polls()) end),
         receive polls -> ok end,
         ok = pelton:send(Sender, <<1>>),
         receive
             {'DOWN', Taken, process, Polling, <<1>>} ->
                 ok = pelton:send(Sender, <<2>>),
                 receive {'DOWN', Reported, process, Waiting, Result} -> ?assertEqual({ok, <<2>>}, Result) end;
             {'DOWN', Reported, process, Waiting, {ok, <<1>>}} ->
                 Polling ! stop,
                 receive {'DOWN', Taken, process, Polling, Nothing} -> ?assertEqual(nothing, Nothing) end
         end
     end || _ <- lists:seq(1, 500)].

%% A receiving process that rarely collects its garbage.
large_messages_free_their_space(Path) ->
    {ok, Receiver} = pelton:open(receiver, name(Path), []),
    Sender = spawn_link(fun() ->
        {ok, Sender} = pelton:open(sender, name(Path), [{timeout, 30000}, {capacity, 1 bsl 20}]),
        [ok = pelton:send(Sender, <<I:32, 0:(8 * 300000)>>) || I <- lists:seq(1, 20)],
        receive stop -> ok end
    end),
    {Pid, Monitor} = spawn_opt(fun() ->
        exit([case pelton:recv(Receiver, 30000) of {ok, <<Number:32, _/binary>>} -> Number; Error -> Error end ||
              _ <- lists:seq(1, 20)])
    end, [monitor, {min_bin_vheap_size, 1 bsl 24}, {min_heap_size, 1 bsl 20}]),
    receive {'DOWN', Monitor, process, Pid, Received} -> ?assertEqual(lists:seq(1, 20), Received) end,
    Sender ! stop.

held_messages_are_whole(Path) ->
    {Receiver, Sender} = channel(Path, [{messages, hold}]),
    Messages = [rand:bytes(Size) || Size <- [10, 100, 1000, 100000]],
    [ok = pelton:send(Sender, One) || One <- Messages],
    Received = [begin {ok, One} = pelton:recv(Receiver), One end || _ <- Messages],
    ?assertEqual(Messages, Received),
    ok = pelton:close(Receiver),
    %% After the close, too.
    ?assertEqual(Messages, Received).

%% A binary in the channel's memory never changes, although the receiver is closed, and another one continues.
held_messages_never_change(Path) ->
    Name = ["path:", Path("channel")],
    {ok, Receiver} = pelton:open(receiver, Name, [{create, true}, {capacity, 65536}, {messages, hold}]),
    {ok, Sender} = pelton:open(sender, Name),
    Sent = rand:bytes(20000),
    ok = pelton:send(Sender, Sent),
    {ok, Held} = pelton:recv(Receiver, 30000),
    ok = pelton:close(Receiver),
    ?assertEqual({error, closed}, pelton:recv(Receiver, 0)),
    Other = rand:bytes(20000),
    case pelton:open(receiver, Name) of
        {ok, Next} -> [begin ok = pelton:send(Sender, Other), {ok, _} = pelton:recv(Next, 30000) end ||
                       _ <- lists:seq(1, 10)];
        {error, _} -> ok
    end,
    ?assertEqual(Sent, binary:copy(Held)),
    opened_once_released(Name, 6000).

opened_once_released(Name, Left) ->
    erlang:garbage_collect(),
    case pelton:open(receiver, Name, [{timeout, 0}]) of
        {ok, _} -> ok;
        {error, {role_taken, _}} when Left > 0 -> timer:sleep(5), opened_once_released(Name, Left - 1)
    end.

%% The result of a read is sent before a flood of messages ends. Ten attempts, because the test may be preempted.
a_flood_of_messages_does_not_delay_a_file(Path) ->
    "" = os:cmd("mkfifo " ++ Path("fifo")),
    {ok, File} = pelton_file:open(Path("fifo"), [read, write, binary]),
    {ok, Fifo} = file:open(Path("fifo"), [raw, read, write]),
    {Receiver, Sender} = channel(Path, []),
    ?assert(lists:any(fun(_) -> is_read_during_the_flood(File, Fifo, Receiver, Sender) end, lists:seq(1, 10))).

is_read_during_the_flood(File, Fifo, Receiver, Sender) ->
    Test = self(),
    Count = 200000,
    [ok = pelton:send(Sender, <<1>>) || _ <- lists:seq(1, Count)],
    Reader = spawn_link(fun() -> Test ! {reported, pelton_file:read(File, 1)} end),
    pelton_file_tests:eventually(fun() -> process_info(Reader, status) =:= {status, waiting} end),
    ok = pelton:setopts(Receiver, [{active, true}]),
    Next = fun() -> receive {pelton, Receiver, <<1>>} -> ok after 60000 -> error(nothing_came) end end,
    Next(),
    ok = file:write(Fifo, "x"),
    Left = (fun Until(0) -> 0;
                Until(N) -> receive {reported, Read} -> Test ! {reported, Read}, N; {pelton, Receiver, <<1>>} ->
                    Until(N - 1) end
            end)(Count - 1),
    [Next() || _ <- lists:seq(1, Left)],
    receive {reported, Result} -> ?assertEqual({ok, <<"x">>}, Result) end,
    ok = pelton:setopts(Receiver, [{active, false}]),
    Left > 0.

a_wrong_option_opens_nothing(Path) ->
    [?assertError({bad_option, Option}, pelton:open(receiver, name(Path), [Option]))
     || Option <- [{active, 0}, {timeout, 5}, {capacity, -1}, {actve, true}, {messages, held}, {clients_max, 1},
                   nonsense]],
    {ok, Receiver} = pelton:open(receiver, name(Path)),
    [?assertError({bad_option, Option}, pelton:setopts(Receiver, [Option]))
     || Option <- [{active, twice}, {messages, held}, {capacity, 4096}]],
    ?assertError({bad_option, {timeout, -1}}, pelton:open(sender, name(Path), [{timeout, -1}])),
    ?assertError({bad_option, {call_bytes_max, 1}}, pelton:open(sender, name(Path), [{call_bytes_max, 1}])),
    ?assertError({bad_option, {create, true}}, pelton:open(sender, name(Path), [{create, true}])).

%% As with inet:setopts/2.
active_counts_are_added(Path) ->
    {Receiver, Sender} = channel(Path, []),
    ok = pelton:setopts(Receiver, [{active, 2}]),
    ok = pelton:setopts(Receiver, [{active, 2}]),
    ok = pelton:setopts(Receiver, [{messages, hold}]),
    ok = pelton:setopts(Receiver, [{active, -1}]),
    [ok = pelton:send(Sender, <<I>>) || I <- lists:seq(1, 4)],
    Wanted = [{pelton, Receiver, <<I>>} || I <- [1, 2, 3]] ++ [{pelton_passive, Receiver}],
    ?assertEqual(Wanted, [next() || _ <- Wanted]),
    ?assertEqual({ok, <<4>>}, pelton:recv(Receiver)),
    ok = pelton:setopts(Receiver, [{active, 1}]),
    ok = pelton:setopts(Receiver, [{active, -5}]),
    ?assertEqual({pelton_passive, Receiver}, next()),
    ?assertEqual({error, timeout}, pelton:recv(Receiver, 0)).

threads() ->
    {ok, Tasks} = file:list_dir("/proc/self/task"),
    length(Tasks).

%% Processes that open, and wait.
openers(Count, Kind, Name, Options) ->
    Openers = [spawn_monitor(fun() -> exit(pelton:open(Kind, Name, Options)) end) || _ <- lists:seq(1, Count)],
    pelton_file_tests:eventually(fun() ->
        lists:all(fun({Pid, _}) -> process_info(Pid, status) =:= {status, waiting} end, Openers)
    end),
    Openers.

no_thread_waits_for_an_open(Path) ->
    {error, _} = pelton:open(sender, name(Path)),
    Before = threads(),
    Openers = openers(100, sender, name(Path), [{timeout, infinity}]) ++ openers(100, client, name(Path), [{timeout,
        60000}]),
    ?assertEqual(Before, threads()),
    [exit(Pid, kill) || {Pid, _} <- Openers].

an_open_waits_for_its_listener(Path) ->
    [{Client, ClientDown}] = openers(1, client, name(Path), [{timeout, infinity}]),
    {ok, Service} = pelton:open(service, name(Path), [{active, true}]),
    receive {'DOWN', ClientDown, process, Client, Opened} -> ?assertMatch({ok, _}, Opened) end,
    ok = pelton:close(Service),
    Other = ["path:", Path("channel")],
    [{Sender, SenderDown}] = openers(1, sender, Other, [{timeout, 60000}]),
    {ok, Receiver} = pelton:open(receiver, Other, [{create, true}]),
    receive {'DOWN', SenderDown, process, Sender, Second} -> ?assertMatch({ok, _}, Second) end,
    ok = pelton:close(Receiver).

an_open_ends_at_its_timeout(Path) ->
    Begun = erlang:monotonic_time(millisecond),
    {error, {Reason, Detail}} = pelton:open(client, name(Path), [{timeout, 50}]),
    ?assert(erlang:monotonic_time(millisecond) - Begun >= 50),
    ?assert(lists:member(Reason, [timeout, no_listener])),
    ?assertNotEqual(<<>>, Detail).

an_open_ends_with_its_process(Path) ->
    {ok, Before} = file:list_dir("/proc/self/fd"),
    Openers = openers(20, sender, name(Path), [{timeout, infinity}]),
    {ok, During} = file:list_dir("/proc/self/fd"),
    ?assert(length(During) > length(Before)),
    [exit(Pid, kill) || {Pid, _} <- Openers],
    pelton_file_tests:eventually(fun() -> {ok, Left} = file:list_dir("/proc/self/fd"),
                                 length(Left) =< length(Before) end).

%% More than there are dirty schedulers.
openings_block_no_scheduler(Path) ->
    Count = 2 * erlang:system_info(dirty_io_schedulers),
    Openers = [spawn(fun() -> pelton:open(sender, ["unix:", Path("nobody")], [{timeout, 100000}]) end) ||
               _ <- lists:seq(1, Count)],
    pelton_file_tests:eventually(fun() -> lists:all(fun(Pid) -> process_info(Pid, status) =:= {status, waiting} end,
                                                    Openers) end),
    %% This needs a dirty scheduler.
    ok = file:write_file(Path("a"), "x"),
    [exit(Pid, kill) || Pid <- Openers].

active_sends_as_many_as_requested(Path) ->
    {Receiver, Sender} = channel(Path, []),
    [ok = pelton:send(Sender, <<I>>) || I <- lists:seq(1, 5)],
    ok = pelton:setopts(Receiver, [{active, once}]),
    ?assertEqual({pelton, Receiver, <<1>>}, next()),
    ?assertEqual({ok, <<2>>}, pelton:recv(Receiver)),
    ok = pelton:setopts(Receiver, [{active, 2}]),
    ?assertEqual([{pelton, Receiver, <<3>>}, {pelton, Receiver, <<4>>}, {pelton_passive, Receiver}], [next() ||
        _ <- "123"]),
    ?assertEqual({ok, <<5>>}, pelton:recv(Receiver)),
    ok = pelton:setopts(Receiver, [{active, true}]),
    ?assertEqual({error, einval}, pelton:recv(Receiver)),
    [ok = pelton:send(Sender, <<I:16>>) || I <- lists:seq(1, 1000)],
    [?assertEqual({pelton, Receiver, <<I:16>>}, next()) || I <- lists:seq(1, 1000)].

an_endpoint_ends_with_its_owner(Path) ->
    {Pid, Monitor} = spawn_monitor(fun() -> {ok, Receiver} = pelton:open(receiver, name(Path)), exit({reported,
        Receiver}) end),
    {reported, Receiver} = receive {'DOWN', Monitor, process, Pid, Reason} -> Reason end,
    pelton_file_tests:eventually(fun() -> pelton:recv(Receiver, 0) =:= {error, closed} end),
    %% The name is free.
    {ok, _} = pelton:open(receiver, name(Path)).

%% At once, though the notifier thread has not closed them yet: a supervisor restarts the owner as soon as it has ended.
names_are_free_once_their_owner_has_ended(Path) ->
    Names = [["unix:", Path("s" ++ integer_to_list(I))] || I <- lists:seq(1, 100)],
    Open = fun() -> [element(1, pelton:open(service, Name)) || Name <- Names] end,
    Test = self(),
    lists:foreach(fun(_) ->
        {Pid, Monitor} = spawn_monitor(fun() -> Test ! {opened, Open()}, receive stop -> ok end end),
        receive {opened, Opened} -> ?assertEqual([ok], lists:usort(Opened)) end,
        exit(Pid, kill),
        receive {'DOWN', Monitor, process, Pid, killed} -> ok end
    end, "123").

another_process_becomes_the_owner(Path) ->
    {Receiver, Sender} = channel(Path, []),
    Owner = spawn_link(fun() -> receive_until_stopped([]) end),
    ok = pelton:controlling_process(Receiver, Owner),
    ?assertEqual({error, not_owner}, pelton:controlling_process(Receiver, self())),
    ok = pelton:setopts(Receiver, [{active, true}]),
    [ok = pelton:send(Sender, <<I>>) || I <- lists:seq(1, 3)],
    pelton_file_tests:eventually(fun() -> Owner ! {how_many, self()}, receive {many, Count} -> Count =:= 3 end end),
    Owner ! {stop, self()},
    receive {all, Messages} -> ?assertEqual([{pelton, Receiver, <<I>>} || I <- [1, 2, 3]], Messages) end,
    pelton_file_tests:eventually(fun() -> pelton:close(Receiver) =:= {error, closed} end).

receive_until_stopped(Done) ->
    receive
        {how_many, From} -> From ! {many, length(Done)}, receive_until_stopped(Done);
        {stop, From} -> From ! {all, lists:reverse(Done)};
        Message -> receive_until_stopped([Message | Done])
    end.

closing_ends_a_waiting_receive(Path) ->
    {ok, Receiver} = pelton:open(receiver, name(Path)),
    {Pid, Monitor} = spawn_monitor(fun() -> exit(pelton:recv(Receiver)) end),
    pelton_file_tests:eventually(fun() -> process_info(Pid, status) =:= {status, waiting} end),
    ok = pelton:close(Receiver),
    receive {'DOWN', Monitor, process, Pid, Reason} -> ?assertEqual({error, closed}, Reason) end.

a_wait_ends_at_its_timeout(Path) ->
    {ok, Receiver} = pelton:open(receiver, name(Path)),
    ?assertEqual({error, timeout}, pelton:recv(Receiver, 20)),
    ?assertEqual({messages, []}, process_info(self(), messages)).

a_name_without_a_listener_is_an_error(Path) ->
    {error, {no_listener, Detail}} = pelton:open(sender, name(Path)),
    ?assertNotEqual(<<>>, Detail),
    {error, {name, _}} = pelton:open(receiver, "unix:").

calls_get_their_replies(Path) ->
    {_, Client} = service(Path),
    ?assertEqual({ok, <<"HELLO">>}, pelton:call(Client, "hello")),
    ?assertEqual({ok, <<>>}, pelton:call(Client, "")),
    ?assertEqual({error, {failed, {7, <<"no">>}}}, pelton:call(Client, "fail")),
    Large = rand:bytes(1 bsl 20),
    ?assertEqual({ok, Large}, pelton:call(Client, Large)),
    ok = pelton:cast(Client, "remember this"),
    ?assertEqual({ok, <<"remember this">>}, pelton:call(Client, "what")).

%% Also with replies that arrive later, and after waits that end at their timeouts.
no_work_is_done_for_the_mailbox(Path) ->
    {_, Client} = service(Path),
    {Receiver, Sender} = channel(fun(Name) -> Path("messages-" ++ Name) end, []),
    Size = fun(Part, Sum) -> Sum + byte_size(Part) end,
    pelton_file_tests:assert_flat([
        {call, fun() -> {ok, <<"HELLO">>} = pelton:call(Client, "hello") end},
        {call_in_parts, fun() -> {ok, <<"onetwo">>} = pelton:call(Client, "parts, then finish") end},
        {call_until_its_timeout, fun() -> {error, timeout} = pelton:call(Client, "later", 1) end},
        {stream, fun() -> {ok, 11} = pelton:stream(Client, "parts, then reply", Size, 0) end},
        {stream_until_its_timeout, fun() -> {error, timeout} = pelton:stream(Client, "later", Size, 0, 1) end},
        {cast, fun() -> ok = pelton:cast(Client, "remember this") end},
        {message, fun() -> ok = pelton:send(Sender, "hello"), {ok, <<"hello">>} = pelton:recv(Receiver) end},
        {message_later, fun() ->
            spawn_link(fun() -> ok = pelton:send(Sender, "hello") end),
            {ok, <<"hello">>} = pelton:recv(Receiver)
        end},
        {recv_until_its_timeout, fun() -> {error, timeout} = pelton:recv(Receiver, 1) end}]).

%% A service that does not receive: the lane is full at some time. What was sent then arrives, and nothing else.
a_cast_does_not_wait(Path) ->
    {ok, Service} = pelton:open(service, name(Path), [{capacity, 65536}]),
    ok = pelton:setopts(Service, [{active, once}]),
    {ok, Client} = pelton:open(client, name(Path), [{timeout, 30000}, {capacity, 65536}]),
    ok = pelton:cast(Client, <<0:32>>),
    receive {pelton_request, Service, undefined, <<0:32>>} -> ok end,
    Sent = (fun Send(I) ->
        case pelton:cast(Client, <<I:32, 0:8000>>) of
            ok -> Send(I + 1);
            {error, full} -> I - 1
        end
    end)(1),
    ?assert(Sent > 10),
    ?assertEqual({error, full}, pelton:cast(Client, <<0:8000>>)),
    ok = pelton:setopts(Service, [{active, true}]),
    [receive {pelton_request, Service, undefined, <<I:32, _/binary>>} -> ok after 30000 -> error({lost, I}) end
     || I <- lists:seq(1, Sent)],
    ok = pelton:cast(Client, "last"),
    ?assertEqual({pelton_request, Service, undefined, <<"last">>}, next()).

each_reason_has_a_text(Path) ->
    {error, Open} = pelton:open(sender, name(Path)),
    Reasons = [Open, timeout, closed, peer_died, full, too_large, abandoned, in_operation, not_owner, noproc, enoent,
               einval,
               {failed, {7, <<"no">>}}, {lost, peer_died}, {lost, not_begun}, {closed, 3000}],
    Texts = [pelton:format_error(Reason) || Reason <- Reasons],
    [?assert(length(Text) > 5) || Text <- Texts],
    ?assertEqual([], [Text || Text <- Texts, string:find(Text, "unknown") =/= nomatch]).

a_refused_peer_is_logged(Path) ->
    ?assertError(badarg, pelton:set_log(logger)),
    ok = pelton:set_log(self()),
    %% It accepts and refuses in the background.
    {ok, Receiver} = pelton:open(receiver, name(Path)),
    ok = pelton:setopts(Receiver, [{active, true}]),
    {Level, Text} = refused_until_logged(Path, 100),
    ok = pelton:set_log(none),
    ?assertEqual(warning, Level),
    ?assertMatch({match, _}, re:run(Text, ["^refused the peer, process ", os:getpid(), " of uid [0-9]+: "])).

%% Again, if a refusal less than a second ago had a record.
refused_until_logged(Path, Tries) when Tries > 0 ->
    ?assertMatch({error, {refused, _}}, pelton:open(client, name(Path), [{timeout, 30000}])),
    receive {pelton_log, Level, Text} -> {Level, Text}
    after 100 -> refused_until_logged(Path, Tries - 1)
    end.

%% Larger than the lane: the rest is written although the client makes no other call.
a_large_cast_is_written(Path) ->
    {ok, _} = pelton:open(service, name(Path), [{active, true}]),
    {ok, Client} = pelton:open(client, name(Path), [{timeout, 30000}]),
    Large = rand:bytes(10 bsl 20),
    ok = pelton:cast(Client, Large),
    receive {pelton_request, _, undefined, Reported} -> ?assert(Large =:= Reported) after 60000 ->
        error(nothing_came) end.

many_processes_call_by_one_client(Path) ->
    {_, Client} = service(Path),
    Callers = [spawn_monitor(fun() ->
        [{ok, <<I:32, J:32>>} = pelton:call(Client, <<I:32, J:32>>) || J <- lists:seq(1, 200)]
    end) || I <- lists:seq(1, 50)],
    [receive {'DOWN', Monitor, process, Pid, Reason} -> ?assertEqual(normal, Reason) end || {Pid, Monitor} <- Callers].

a_late_reply_reaches_its_caller(Path) ->
    {Service, Client} = service(Path),
    Caller = fun() -> exit({replied, pelton:call(Client, "later")}) end,
    {Pid, Monitor} = spawn_monitor(Caller),
    {Given, _} = spawn_monitor(Caller),
    pelton_file_tests:eventually(fun() -> Service ! {how_many, self()}, receive {many, Count} -> Count =:= 2 end end),
    exit(Given, kill),
    ?assertEqual({ok, <<"SOON">>}, pelton:call(Client, "soon")),
    ?assertEqual({error, timeout}, pelton:call(Client, "later", 20)),
    Service ! {reply_to_all, <<"late">>},
    receive {'DOWN', Monitor, process, Pid, Reason} -> ?assertEqual({replied, {ok, <<"late">>}}, Reason) end,
    ?assertEqual({ok, <<"STILL">>}, pelton:call(Client, "still")).

an_unreferenced_responder_abandons_the_call(Path) ->
    {Service, Client} = service(Path),
    Caller = spawn_monitor(fun() -> exit(pelton:call(Client, "forget")) end),
    {Pid, Monitor} = Caller,
    pelton_file_tests:eventually(fun() -> process_info(Pid, status) =:= {status, waiting} end),
    Collect = fun Again() ->
        erlang:garbage_collect(Service),
        receive {'DOWN', Monitor, process, Pid, Reason} -> Reason after 10 -> Again() end
    end,
    ?assertEqual({error, abandoned}, Collect()).

a_service_that_ends_fails_its_calls(Path) ->
    {Service, Client} = service(Path),
    {Pid, Monitor} = spawn_monitor(fun() -> exit(pelton:call(Client, "later")) end),
    pelton_file_tests:eventually(fun() -> Service ! {how_many, self()}, receive {many, Count} -> Count =:= 1 end end),
    unlink(Service),
    exit(Service, kill),
    receive {'DOWN', Monitor, process, Pid, Reason} -> ?assertMatch({error, _}, Reason) end,
    ?assertMatch({error, _}, pelton:call(Client, "x")).

%% Both ends of a channel of one sender.
accepted_channel(Path) ->
    {ok, Listener} = pelton:open(listener, name(Path)),
    {Receiver, Sender} = accepted_channel(Path, Listener),
    ok = pelton:close(Listener),
    {Receiver, Sender}.

accepted_channel(Path, Listener) ->
    Test = self(),
    Pid = spawn_link(fun() ->
        {ok, Sender} = pelton:open(sender, name(Path), [{timeout, 30000}]),
        ok = pelton:controlling_process(Sender, Test),
        Test ! {self(), Sender}
    end),
    {ok, Receiver} = pelton:accept(Listener, 30000),
    receive {Pid, Sender} -> {Receiver, Sender} end.

an_accepted_receiver_ends_with_its_sender(Path) ->
    {Receiver, Sender} = accepted_channel(Path),
    ok = pelton:send(Sender, "one"),
    ok = pelton:close(Sender),
    ?assertEqual({ok, <<"one">>}, pelton:recv(Receiver, 30000)),
    ?assertEqual({error, closed}, pelton:recv(Receiver, 30000)),
    ok = pelton:close(Receiver),
    %% A sender that is killed: its standard input stays open, so that it does not close.
    {ok, Listener} = pelton:open(listener, name(Path)),
    Port = open_port({spawn_executable, tool()}, [{args, ["send", iolist_to_binary(name(Path))]}, exit_status]),
    true = port_command(Port, "two\n"),
    {ok, Active} = pelton:accept(Listener, 30000),
    ok = pelton:setopts(Active, [{active, true}]),
    ?assertEqual({pelton, Active, <<"two">>}, next()),
    {os_pid, Pid} = erlang:port_info(Port, os_pid),
    "" = os:cmd("kill -KILL " ++ integer_to_list(Pid)),
    receive {Port, {exit_status, _}} -> ok end,
    ?assertEqual({pelton_closed, Active, peer_died}, next()).

each_process_that_accepts_gets_a_sender(Path) ->
    {ok, Listener} = pelton:open(listener, name(Path)),
    ?assertEqual({error, timeout}, pelton:accept(Listener, 20)),
    ?assertEqual({error, timeout}, pelton:accept(Listener, 0)),
    Echo = fun() ->
        {ok, Receiver} = pelton:accept(Listener, 30000),
        {ok, Message} = pelton:recv(Receiver, 30000),
        {error, closed} = pelton:recv(Receiver, 30000),
        exit({received, Message})
    end,
    Acceptors = [spawn_monitor(Echo) || _ <- lists:seq(1, 20)],
    [pelton_file_tests:eventually(fun() -> process_info(Pid, status) =:= {status, waiting} end)
     || {Pid, _} <- Acceptors],
    [spawn_link(fun() ->
        {ok, Sender} = pelton:open(sender, name(Path), [{timeout, 30000}]),
        ok = pelton:send(Sender, <<I>>),
        ok = pelton:wait_released(Sender, 30000),
        ok = pelton:close(Sender)
     end) || I <- lists:seq(1, 20)],
    Received = [receive {'DOWN', Monitor, process, Pid, {received, <<I>>}} -> I end || {Pid, Monitor} <- Acceptors],
    ?assertEqual(lists:seq(1, 20), lists:sort(Received)),
    {Waiting, Closed} = spawn_monitor(fun() -> exit(pelton:accept(Listener)) end),
    pelton_file_tests:eventually(fun() -> process_info(Waiting, status) =:= {status, waiting} end),
    ok = pelton:close(Listener),
    receive {'DOWN', Closed, process, Waiting, Reason} -> ?assertEqual({error, closed}, Reason) end.

a_wait_for_the_release_ends_with_it(Path) ->
    {Receiver, Sender} = accepted_channel(Path),
    ?assertEqual(ok, pelton:wait_released(Sender, 0)),
    ok = pelton:send(Sender, "one"),
    ?assertEqual({error, timeout}, pelton:wait_released(Sender, 0)),
    ?assertEqual({error, timeout}, pelton:wait_released(Sender, 250)),
    {Pid, Monitor} = spawn_monitor(fun() -> exit(pelton:wait_released(Sender)) end),
    pelton_file_tests:eventually(fun() -> pelton:send(Sender, "two", 30000) =:= {error, in_operation} end),
    Receive = fun Again() ->
        case pelton:recv(Receiver, 10) of
            {ok, _} -> Again();
            {error, timeout} -> receive {'DOWN', Monitor, process, Pid, Reason} -> Reason after 0 -> Again() end
        end
    end,
    ?assertEqual(ok, Receive()),
    %% A close ends the wait.
    ok = pelton:send(Sender, "three"),
    {Last, Closed} = spawn_monitor(fun() -> exit(pelton:wait_released(Sender)) end),
    pelton_file_tests:eventually(fun() -> pelton:send(Sender, "three", 30000) =:= {error, in_operation} end),
    ok = pelton:close(Sender),
    receive {'DOWN', Closed, process, Last, Found} -> ?assertEqual({error, closed}, Found) end.

a_wait_continues_after_another_process_used_the_sender(Path) ->
    {_, Sender} = accepted_channel(Path),
    ok = pelton:send(Sender, "never released"),
    {Pid, Monitor} = spawn_monitor(fun() -> exit(pelton:wait_released(Sender, 1500)) end),
    pelton_file_tests:eventually(fun() -> pelton:send(Sender, "x") =:= {error, in_operation} end),
    Use = fun Again(Used) ->
        Found = pelton:wait_released(Sender, 10),
        Next = case Found of {error, timeout} -> Used + 1; {error, in_operation} -> Used end,
        receive {'DOWN', Monitor, process, Pid, Reason} -> {Reason, Next} after 0 -> Again(Next) end
    end,
    {Reason, Used} = Use(0),
    ?assertEqual({error, timeout}, Reason),
    ?assert(Used > 0).

a_successor_gets_what_was_not_released(Path) ->
    {Receiver, Sender} = accepted_channel(Path),
    ?assertEqual({error, refused}, pelton:resume(Sender, 10)),
    [ok = pelton:send(Sender, [I]) || I <- "abc"],
    {ok, <<"a">>} = pelton:recv(Receiver),
    ok = pelton:close(Receiver),
    ?assertEqual({error, closed}, pelton:wait_released(Sender, 30000)),
    ?assertEqual({error, timeout}, pelton:resume(Sender, 20)),
    {ok, Listener} = pelton:open(listener, name(Path)),
    {Pid, Monitor} = spawn_monitor(fun() -> exit(pelton:resume(Sender, 30000)) end),
    {ok, Successor} = pelton:accept(Listener, 30000),
    receive {'DOWN', Monitor, process, Pid, Reason} -> ?assertEqual(ok, Reason) end,
    ok = pelton:send(Sender, "d"),
    ?assertEqual([<<"b">>, <<"c">>, <<"d">>], [element(2, pelton:recv(Successor, 30000)) || _ <- "bcd"]).

a_receiver_continues_with_the_next_sender(Path) ->
    {ok, Listener} = pelton:open(listener, name(Path)),
    {Receiver, First} = accepted_channel(Path, Listener),
    ok = pelton:send(First, "first"),
    ok = pelton:close(First),
    ?assertEqual({ok, <<"first">>}, pelton:recv(Receiver, 30000)),
    ?assertEqual({error, closed}, pelton:recv(Receiver, 30000)),
    Next = spawn_link(fun() ->
        {ok, Sender} = pelton:open(sender, name(Path), [{timeout, 30000}]),
        ok = pelton:send(Sender, "next"),
        receive stop -> ok end
    end),
    ?assertEqual(ok, pelton:resume(Receiver, 30000)),
    ?assertEqual({ok, <<"next">>}, pelton:recv(Receiver, 30000)),
    Next ! stop,
    %% A receiver of any number of senders has no successor to wait for.
    ok = pelton:close(Receiver),
    ok = pelton:close(Listener),
    {ok, Gathering} = pelton:open(receiver, name(Path)),
    ?assertEqual({error, refused}, pelton:resume(Gathering, 10)).

%% A path reports each end once: also if the receiver finds it while it busy-polls.
a_path_reports_the_end_of_each_sender(Path) ->
    Name = ["path:", Path("channel")],
    {ok, Receiver} = pelton:open(receiver, Name, [{create, true}]),
    [begin
         Port = open_port({spawn_executable, tool()}, [{args, ["send", iolist_to_binary(Name)]}, exit_status]),
         true = port_command(Port, "one\n"),
         ?assertEqual({ok, <<"one">>}, pelton:recv(Receiver, 30000)),
         {os_pid, Pid} = erlang:port_info(Port, os_pid),
         {Waiting, Monitor} = spawn_monitor(fun() -> exit(pelton:recv(Receiver, 10000)) end),
         "" = os:cmd("kill -KILL " ++ integer_to_list(Pid)),
         receive {'DOWN', Monitor, process, Waiting, Reason} -> ?assertEqual({I, {error, peer_died}}, {I, Reason}) end,
         receive {Port, {exit_status, _}} -> ok end
     end || I <- lists:seq(1, 30)].

each_part_of_a_reply_arrives(Path) ->
    {_, Client} = service(Path),
    Collect = fun(Part, Parts) -> [Part | Parts] end,
    Stream = fun(Request) -> {ok, Parts} = pelton:stream(Client, Request, Collect, [], 60000), lists:reverse(Parts) end,
    ?assertEqual([<<"one">>, <<>>, <<"two">>], Stream("parts, then finish")),
    ?assertEqual([<<"one">>, <<>>, <<"two">>, <<"three">>], Stream("parts, then reply")),
    ?assertEqual([<<"HELLO">>], Stream("hello")),
    ?assertEqual({ok, <<"onetwothree">>}, pelton:call(Client, "parts, then reply")),
    Large = binary:copy(<<"x">>, 1 bsl 20),
    ?assertEqual([Large], Stream(Large)),
    %% More than the lane has space for.
    Many = Stream("many parts"),
    ?assertEqual(lists:seq(1, 20000), [I || <<I:32, _:8000>> <- Many]),
    ?assertEqual({error, {failed, {7, <<"no">>}}}, pelton:stream(Client, "fail", Collect, [])).

several_processes_reply_in_parts(Path) ->
    {ok, Service} = pelton:open(service, name(Path), [{active, true}]),
    {ok, Client} = pelton:open(client, name(Path), [{timeout, 30000}]),
    Test = self(),
    spawn_link(fun() -> Test ! {reply, pelton:stream(Client, "", fun(Part, Sum) -> Sum + byte_size(Part) end, 0)} end),
    {pelton_request, Service, Responder, <<>>} = next(),
    Part = binary:copy(<<"x">>, 1 bsl 20),
    Writers = [spawn_monitor(fun() -> exit([pelton:part(Responder, Part, 30000) || _ <- lists:seq(1, 20)]) end)
               || _ <- lists:seq(1, 4)],
    [receive {'DOWN', Monitor, process, Pid, Sent} -> ?assertEqual([ok], lists:usort(Sent)) end
     || {Pid, Monitor} <- Writers],
    %% The end of a reply waits for the part that another process sends.
    {Last, Closed} = spawn_monitor(fun Again() ->
        case pelton:part(Responder, Part, 30000) of ok -> Again(); Error -> exit(Error) end
    end),
    pelton_file_tests:eventually(fun() -> process_info(Last, status) =/= {status, runnable} end),
    ?assertEqual(ok, pelton:finish(Responder)),
    receive {'DOWN', Closed, process, Last, Reason} -> ?assertEqual({error, closed}, Reason) end,
    {reply, {ok, Bytes}} = next(),
    ?assert(Bytes >= 80 * byte_size(Part)),
    ?assertEqual({error, closed}, pelton:part(Responder, "late")).

a_stream_that_its_reader_leaves_is_cancelled(Path) ->
    {Service, Client} = service(Path),
    ?assertError(enough, pelton:stream(Client, "many parts", fun(_, _) -> error(enough) end, [])),
    ?assertEqual({error, timeout}, pelton:stream(Client, "later", fun(_, _) -> error(no_part) end, [], 20)),
    Service ! {reply_to_all, <<"late">>},
    ?assertEqual({ok, <<"HELLO">>}, pelton:call(Client, "hello")),
    ?assertEqual({messages, []}, process_info(self(), messages)).

a_service_learns_that_a_stream_was_cancelled(Path) ->
    {ok, Service} = pelton:open(service, name(Path), [{active, true}]),
    {ok, Client} = pelton:open(client, name(Path), [{timeout, 30000}]),
    Test = self(),
    Reader = spawn(fun() -> pelton:stream(Client, "", fun(_, _) -> Test ! part end, ok) end),
    {pelton_request, Service, Responder, <<>>} = next(),
    ok = pelton:part(Responder, "x"),
    part = next(),
    ?assertNot(pelton:is_cancelled(Responder)),
    exit(Reader, kill),
    pelton_file_tests:eventually(fun() -> pelton:is_cancelled(Responder) end),
    ok = pelton:finish(Responder),
    ?assert(pelton:is_cancelled(Responder)),
    ?assertNot(pelton:is_cancelled(undefined)).

%% A part that waits for space ends with its client, also while the service receives nothing.
a_part_ends_with_its_client(Path) ->
    {ok, Service} = pelton:open(service, name(Path), [{active, once}]),
    Port = open_port({spawn_executable, tool()}, [{args, ["call", iolist_to_binary(name(Path)), "x"]}, exit_status]),
    {os_pid, Pid} = erlang:port_info(Port, os_pid),
    {pelton_request, Service, Responder, _} = next(),
    "" = os:cmd("kill -STOP " ++ integer_to_list(Pid)),
    Part = binary:copy(<<"x">>, 80000),
    Fill = fun Again() -> case pelton:part(Responder, Part, 0) of ok -> Again(); Error -> Error end end,
    ?assertEqual({error, timeout}, Fill()),
    {Waits, Monitor} = spawn_monitor(fun() -> exit(pelton:part(Responder, Part)) end),
    "" = os:cmd("kill -KILL " ++ integer_to_list(Pid)),
    receive {'DOWN', Monitor, process, Waits, Reason} -> ?assertEqual({error, peer_died}, Reason) end,
    receive {Port, {exit_status, _}} -> ok end.

%% A receiver that it accepted remains, and has the name until it is closed.
an_accept_ends_with_the_owner_of_the_listener(Path) ->
    Test = self(),
    Owner = spawn(fun() ->
        {ok, Listener} = pelton:open(listener, name(Path)),
        Test ! {listens, Listener},
        receive stop -> ok end
    end),
    {listens, Listener} = next(),
    {Receiver, Sender} = accepted_channel(Path, Listener),
    {Pid, Monitor} = spawn_monitor(fun() -> exit(pelton:accept(Listener)) end),
    pelton_file_tests:eventually(fun() -> process_info(Pid, status) =:= {status, waiting} end),
    exit(Owner, kill),
    receive {'DOWN', Monitor, process, Pid, Reason} -> ?assertEqual({error, closed}, Reason) end,
    ok = pelton:send(Sender, "one"),
    ?assertEqual({ok, <<"one">>}, pelton:recv(Receiver, 30000)),
    ?assertMatch({error, {in_use, _}}, pelton:open(listener, name(Path))),
    ok = pelton:close(Receiver),
    ?assertMatch({ok, _}, pelton:open(listener, name(Path))).

%% Its receivers keep its descriptor open. An event of it would name freed memory.
a_closed_listener_gets_no_event(Path) ->
    Test = self(),
    [begin
         {Pid, Monitor} = spawn_monitor(fun() ->
             {ok, Listener} = pelton:open(listener, name(Path)),
             {Receiver, Sender} = accepted_channel(Path, Listener),
             [ok = pelton:controlling_process(End, Test) || End <- [Receiver, Sender]],
             {Waiting, Accepts} = spawn_monitor(fun() -> pelton:accept(Listener) end),
             pelton_file_tests:eventually(fun() -> process_info(Waiting, status) =:= {status, waiting} end),
             ok = pelton:close(Listener),
             receive {'DOWN', Accepts, process, Waiting, _} -> exit({remain, Receiver, Sender}) end
         end),
         {Receiver, Sender} = receive {'DOWN', Monitor, process, Pid, {remain, One, Other}} -> {One, Other} end,
         ?assertMatch({error, {timeout, _}}, pelton:open(sender, name(Path), [{timeout, 20}])),
         [ok = pelton:close(End) || End <- [Receiver, Sender]]
     end || _ <- lists:seq(1, 30)].

a_drained_service_replies_and_ends(Path) ->
    {ok, Service} = pelton:open(service, name(Path), [{active, true}]),
    {ok, Client} = pelton:open(client, name(Path), [{timeout, 30000}]),
    {Pid, Monitor} = spawn_monitor(fun() -> exit(pelton:call(Client, "one")) end),
    {pelton_request, Service, Responder, <<"one">>} = next(),
    ok = pelton:drain(Service),
    {Late, Refused} = spawn_monitor(fun() -> exit(pelton:call(Client, "two")) end),
    receive {'DOWN', Refused, process, Late, LateReason} -> ?assertMatch({error, _}, LateReason) end,
    ok = pelton:reply(Responder, "replied"),
    receive {'DOWN', Monitor, process, Pid, Reason} -> ?assertEqual({ok, <<"replied">>}, Reason) end,
    ?assertEqual({pelton_closed, Service, closed}, next()),
    ok = pelton:close(Service).

%% PELTON_TOOL names the command.
the_command_sends_and_receives(Path) ->
    Tool = tool(),
    {ok, Receiver} = pelton:open(receiver, name(Path), [{active, true}]),
    Lines = [["line ", integer_to_list(I), $\n] || I <- lists:seq(1, 3000)],
    ok = file:write_file(Path("lines"), Lines),
    "" = os:cmd([Tool, " send unix:", Path("socket"), " < ", Path("lines"), " 2>&1"]),
    Received = [begin {pelton, Receiver, Line} = next(), [Line, $\n] end || _ <- Lines],
    ?assertEqual(iolist_to_binary(Lines), iolist_to_binary(Received)),
    ok = pelton:close(Receiver),
    Port = open_port({spawn_executable, Tool}, [{args, ["recv", iolist_to_binary(name(Path))]}, exit_status, binary,
                                                stderr_to_stdout]),
    {ok, Sender} = pelton:open(sender, name(Path), [{timeout, 30000}]),
    [ok = pelton:send(Sender, lists:droplast(Line)) || Line <- Lines],
    ok = pelton:close(Sender),
    ?assertEqual({0, iolist_to_binary(Lines)}, said(Port, [])).

the_command_serves_and_calls(Path) ->
    Tool = tool(),
    {_, _} = service(Path),
    ?assertEqual("HELLO", string:trim(os:cmd([Tool, " call unix:", Path("socket"), " hello 2>&1"]))),
    Other = ["unix:", Path("other")],
    Port = open_port({spawn_executable, Tool}, [{args, ["serve", iolist_to_binary(Other), "--exec", "wc -c"]}, {line,
        1000}, stderr_to_stdout]),
    {os_pid, Pid} = erlang:port_info(Port, os_pid),
    try
        {ok, Client} = pelton:open(client, Other, [{timeout, 30000}]),
        {ok, Counted} = pelton:call(Client, binary:copy(<<"x">>, 300000)),
        ?assertEqual("300000", string:trim(binary_to_list(Counted)))
    after
        os:cmd("kill " ++ integer_to_list(Pid))
    end.

a_file_goes_to_the_command_and_comes_from_it(Path) ->
    Tool = tool(),
    Bytes = rand:bytes(3000001),
    ok = file:write_file(Path("from"), Bytes),
    {ok, From} = pelton_file:open(Path("from"), [read, binary]),
    Port = open_port({spawn_executable, Tool},
        [{args, ["recv", iolist_to_binary(name(Path)), "--frame", "len32"]}, exit_status, binary, stderr_to_stdout]),
    {ok, Sender} = pelton:open(sender, name(Path), [{timeout, 30000}, {capacity, 1 bsl 20}]),
    ?assertEqual({ok, 1000000}, pelton_file:send(From, Sender, 0, 1000000, 10000)),
    ok = pelton:send(Sender, "between"),
    ?assertEqual({ok, 2000001}, pelton_file:send(From, Sender, 1000000, infinity, 9000)),
    ok = pelton:close(Sender),
    {0, Framed} = said(Port, []),
    {First, [<<"between">> | Rest]} = lists:split(100, [Message || <<Size:32/little, Message:Size/binary>> <= Framed]),
    ?assertEqual({[10000], [9000]}, {lists:usort([byte_size(One) || One <- First]), lists:usort([byte_size(One) ||
        One <- lists:droplast(Rest)])}),
    ?assert(iolist_to_binary([First, Rest]) =:= Bytes),
    %% And back. A message that would exceed the bytes wanted remains.
    Lines = [integer_to_list(I) || I <- lists:seq(1, 5000)],
    ok = file:write_file(Path("lines"), [[Line, $\n] || Line <- Lines ++ ["stays"]]),
    Wanted = iolist_to_binary(Lines),
    Name = ["unix:", Path("other")],
    {ok, Receiver} = pelton:open(receiver, Name),
    {Sends, Monitor} = spawn_monitor(fun() -> exit(os:cmd([Tool, " send ", Name, " < ", Path("lines"), " 2>&1"])) end),
    {ok, To} = pelton_file:open(Path("to"), [read, write, binary, delayed_write, read_ahead]),
    ok = pelton_file:write(To, "begin"),
    ?assertEqual({ok, byte_size(Wanted)}, pelton_file:recv(To, Receiver, 5, byte_size(Wanted) + 4)),
    ?assertEqual({ok, <<"stays">>}, pelton:recv(Receiver, 30000)),
    receive {'DOWN', Monitor, process, Sends, Said} -> ?assertEqual("", Said) end,
    ?assertEqual({ok, <<"begin", Wanted/binary>>}, pelton_file:pread(To, 0, 100000)).

an_endpoint_returns_from_a_file_operation(Path) ->
    {Receiver, Sender} = channel(Path, []),
    {ok, File} = pelton_file:open(Path("file"), [read, write, binary]),
    ok = pelton_file:pwrite(File, 0, binary:copy(<<"x">>, 1000)),
    IsUsed = fun() -> pelton:recv(Receiver, 0) =:= {error, in_operation} end,
    Use = fun(Fun, Is) ->
        {Pid, Monitor} = spawn_monitor(fun() -> exit(Fun()) end),
        pelton_file_tests:eventually(Is),
        {Pid, Monitor}
    end,
    Reported = fun({Pid, Monitor}) -> receive {'DOWN', Monitor, process, Pid, Reason} -> Reason after 60000 ->
        nothing end end,
    Receives = fun() -> pelton_file:recv(File, Receiver, 0, 1000) end,
    %% Other uses fail meanwhile. A killed process returns it.
    {Killed, _} = Use(Receives, IsUsed),
    ?assertEqual({error, in_operation}, Receives()),
    exit(Killed, kill),
    pelton_file_tests:eventually(fun() -> pelton:recv(Receiver, 0) =:= {error, timeout} end),
    %% Afterwards it can be used again.
    Ended = Use(fun() -> pelton_file:recv(File, Receiver, 0, 3) end, IsUsed),
    ok = pelton:send(Sender, "abc"),
    ?assertEqual({ok, 3}, Reported(Ended)),
    ok = pelton:send(Sender, "def"),
    ?assertEqual({ok, <<"def">>}, pelton:recv(Receiver, 30000)),
    ?assertEqual({ok, <<"abcx">>}, pelton_file:pread(File, 0, 4)),
    %% A message that could not be written remains.
    ok = pelton:send(Sender, "ghi"),
    {ok, Reads} = pelton_file:open(Path("file"), [read]),
    ?assertEqual({error, ebadf}, pelton_file:recv(Reads, Receiver, 0, 3)),
    ?assertEqual({ok, <<"ghi">>}, pelton:recv(Receiver, 30000)),
    %% An active receiver, and a sender, are refused.
    ok = pelton:setopts(Receiver, [{active, true}]),
    ?assertEqual({error, einval}, Receives()),
    ok = pelton:setopts(Receiver, [{active, false}]),
    ?assertError(badarg, pelton_file:recv(File, Sender, 0, 1)),
    %% Closing the file or the endpoint ends it, and so does the end of the endpoint's owner.
    {ok, Other} = pelton_file:open(Path("other"), [write]),
    OfFile = Use(fun() -> pelton_file:recv(Other, Receiver, 0, 1000) end, IsUsed),
    ok = pelton_file:close(Other),
    ?assertEqual({error, einval}, Reported(OfFile)),
    pelton_file_tests:eventually(fun() -> not IsUsed() end),
    OfEnd = Use(Receives, IsUsed),
    ok = pelton:close(Receiver),
    ?assertEqual({error, closed}, Reported(OfEnd)),
    ?assertEqual({error, closed}, pelton:recv(Receiver, 0)),
    %% The name is free soon: the notifier thread closes the handle. Then a sender waits for space, and its owner is
    %% killed.
    pelton_file_tests:eventually(fun() -> element(1, pelton:open(receiver, name(Path))) =:= ok end),
    Test = self(),
    Owner = spawn(fun() ->
        {Held, There} = channel(fun(Name) -> Path("second-" ++ Name) end, [{capacity, 65536}]),
        Test ! {ends, Held, There},
        receive stop -> ok end
    end),
    {_, There} = receive {ends, Held, Sends} -> {Held, Sends} end,
    ok = pelton_file:pwrite(File, 0, binary:copy(<<"y">>, 100 bsl 20)),
    Full = Use(fun() -> pelton_file:send(File, There, 0, infinity, 1000) end, fun() -> pelton:send(There, "x",
        0) =:= {error, in_operation} end),
    exit(Owner, kill),
    ?assertMatch({error, _}, Reported(Full)),
    pelton_file_tests:eventually(fun() -> pelton:send(There, "x", 0) =:= {error, closed} end).

nothing_is_left_open(Path) ->
    {Receiver, Sender} = channel(Path, []),
    [ok = pelton:close(End) || End <- [Receiver, Sender]],
    {ok, Names} = file:list_dir("/proc/self/fd"),
    Round = fun() -> {One, Other} = channel(Path, []), ok = pelton:send(Other, "x"), [ok = pelton:close(End) ||
        End <- [Other, One]] end,
    [Round() || _ <- lists:seq(1, 100)],
    pelton_file_tests:eventually(fun() -> {ok, Left} = file:list_dir("/proc/self/fd"),
                                 length(Left) =< length(Names) end).

%% ---- A service ----

service(Path) ->
    {ok, Service} = pelton_service:start_link(name(Path), ?MODULE, nothing),
    {ok, Client} = pelton:open(client, name(Path), [{timeout, 30000}]),
    {Service, Client}.

init(nothing) -> {ok, {undefined, []}}.

handle_request(<<"remember ", _/binary>> = Reported, undefined, {_, Later}) -> {noreply, {Reported, Later}};
handle_request(<<"what">>, _, {Reported, _} = State) -> {reply, Reported, State};
handle_request(<<"later">>, Responder, {Reported, Later}) -> {noreply, {Reported, [Responder | Later]}};
handle_request(<<"forget">>, _, State) -> {noreply, State};
handle_request(<<"fail">>, Responder, State) -> ok = pelton:fail(Responder, 7, "no"), {noreply, State};
handle_request(<<"parts, then ", How/binary>>, Responder, State) ->
    [ok = pelton:part(Responder, Part) || Part <- ["one", "", "two"]],
    case How of
        <<"finish">> -> ok = pelton:finish(Responder), {noreply, State};
        <<"reply">> -> {reply, "three", State}
    end;
%% In another process: the client must be served while its lane is full.
handle_request(<<"many parts">>, Responder, State) ->
    spawn(fun() -> parts(Responder, 1) end),
    {noreply, State};
handle_request(<<_:64>> = Numbers, _, State) -> {reply, Numbers, State};
handle_request(Bytes, _, State) when byte_size(Bytes) > 1000 -> {reply, [Bytes], State};
handle_request(Bytes, _, State) -> {reply, string:uppercase(Bytes), State}.

handle_info({how_many, From}, {_, Later} = State) -> From ! {many, length(Later)}, {noreply, State};
handle_info({reply_to_all, Answer}, {Reported, Later}) ->
    [pelton:reply(Responder, Answer) || Responder <- Later],
    {noreply, {Reported, []}}.

%% ---- Shared by the tests ----

next() -> receive Message -> Message after 30000 -> nothing end.

parts(Responder, 20001) -> pelton:finish(Responder);
parts(Responder, I) ->
    case pelton:part(Responder, <<I:32, 0:8000>>, 60000) of
        ok -> parts(Responder, I + 1);
        {error, _} = Gone -> Gone
    end.

down(Pid) ->
    Monitor = monitor(process, Pid),
    receive {'DOWN', Monitor, process, Pid, _} -> ok end.

said(Port, Done) ->
    receive
        {Port, {data, Bytes}} -> said(Port, [Done | Bytes]);
        {Port, {exit_status, Status}} -> {Status, iolist_to_binary(Done)}
    after 60000 -> nothing
    end.

tool() ->
    case os:getenv("PELTON_TOOL") of
        false -> error("PELTON_TOOL must name the pelton command: ./run test-erlang does it all");
        Tool -> Tool
    end.
