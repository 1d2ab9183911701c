%% Publishers and subscribers: policies, backpressure, ends, durable subscriptions; with the pelton command, which
%% stands for other languages.
-module(pelton_broadcast_tests).
-include_lib("eunit/include/eunit.hrl").

in_a_place_test_() ->
    {foreach, fun pelton_file_tests:directory/0, fun pelton_file_tests:remove/1,
     [fun(Path) -> {atom_to_list(Name), {timeout, 120, fun() -> Test(Path) end}} end || {Name, Test} <- tests()]}.

tests() ->
    [{each_subscriber_receives_by_its_policy, fun each_subscriber_receives_by_its_policy/1},
     {a_slow_gate_is_shown_and_waited_for, fun a_slow_gate_is_shown_and_waited_for/1},
     {an_active_subscriber_gets_as_many_as_requested, fun an_active_subscriber_gets_as_many_as_requested/1},
     {a_process_gets_the_messages_of_many_publishers, fun a_process_gets_the_messages_of_many_publishers/1},
     {a_large_message_is_received_by_each_process_once, fun a_large_message_is_received_by_each_process_once/1},
     {a_lagging_subscriber_copies_large_messages_on_dirty_schedulers,
      fun a_lagging_subscriber_copies_large_messages_on_dirty_schedulers/1},
     {a_wait_for_subscribers_ends_beside_a_send_that_waits, fun a_wait_for_subscribers_ends_beside_a_send_that_waits/1},
     {a_dying_owner_s_messages_go_to_the_next_process, fun a_dying_owner_s_messages_go_to_the_next_process/1},
     {an_option_that_does_not_apply_is_an_exception, fun an_option_that_does_not_apply_is_an_exception/1},
     {a_limit_in_a_directory_stays_until_the_next_publisher,
      fun a_limit_in_a_directory_stays_until_the_next_publisher/1},
     {a_durable_subscription_continues_after_a_kill, fun a_durable_subscription_continues_after_a_kill/1},
     {a_publisher_in_a_directory_has_a_successor, fun a_publisher_in_a_directory_has_a_successor/1}].

-define(LIMIT, 30000).

name(Path) -> ["unix:", Path("prices")].
directory(Path) -> iolist_to_binary(["path:", Path("trades")]).

publisher(Name, Options) ->
    {ok, Publisher} = pelton:open(publisher, Name, [{capacity, 65536} | Options]),
    Publisher.

%% Sends until there is no space; returns how many.
fill(Publisher, Count) ->
    case pelton:send(Publisher, <<0:8000>>, 0) of
        ok -> fill(Publisher, Count + 1);
        {error, timeout} -> Count
    end.

%% Each message is its number; those that were missed are counted.
receive_all(Subscriber, Received, Missed) ->
    case pelton:recv_delivery(Subscriber, ?LIMIT) of
        {ok, Bytes, Number, More} ->
            ?assertEqual({Number, Number}, {binary_to_integer(Bytes), Received + 1 + Missed + More}),
            receive_all(Subscriber, Received + 1, Missed + More);
        {error, closed} ->
            #{missed := All, messages := Received} = pelton:info(Subscriber),
            {Received, All}
    end.

each_subscriber_receives_by_its_policy(Path) ->
    Total = 20000,
    Publisher = publisher(name(Path), []),
    Subscribe = fun(Policy) ->
        fun() ->
            {ok, Subscriber} = pelton:open(subscriber, name(Path), [{timeout, ?LIMIT}, {policy, Policy}]),
            exit({Policy, receive_all(Subscriber, 0, 0)})
        end
    end,
    %% It admits them while nobody uses it.
    Started = [spawn_monitor(Subscribe(Policy)) || Policy <- [gate, lag, latest]],
    ok = pelton:wait_subscribers(Publisher, 3, ?LIMIT),
    [ok = pelton:send(Publisher, integer_to_binary(Number), ?LIMIT) || Number <- lists:seq(1, Total)],
    ok = pelton:wait_released(Publisher, ?LIMIT),
    ?assertEqual([gate, lag, latest], lists:sort([Policy || #{policy := Policy} <- pelton:subscribers(Publisher)])),
    ?assertMatch(#{messages := Total, subscribers := 3}, pelton:info(Publisher)),
    ok = pelton:close(Publisher),
    [receive
         {'DOWN', Monitor, process, _, {Policy, {Received, Missed}}} ->
             ?assertEqual(Total, Received + Missed),
             ?assert(Policy =/= gate orelse Missed =:= 0)
     end || {_, Monitor} <- Started].

a_slow_gate_is_shown_and_waited_for(Path) ->
    Publisher = publisher(name(Path), []),
    {ok, Subscriber} = pelton:open(subscriber, name(Path), [{timeout, ?LIMIT}]),
    ok = pelton:wait_subscribers(Publisher, 1, ?LIMIT),
    ?assertEqual({error, timeout}, pelton:wait_subscribers(Publisher, 2, 1)),
    Sent = fill(Publisher, 0),
    [State] = pelton:subscribers(Publisher),
    Own = list_to_integer(os:getpid()),
    ?assertMatch(#{policy := gate, behind := Sent, lags := false, durable := undefined, pid := Own}, State),
    ?assert(maps:get(holds_ns, State) > 0),
    ?assertEqual({error, timeout}, pelton:wait_released(Publisher, 1)),
    Test = self(),
    Sender = spawn_link(fun() -> Test ! {self(), pelton:send(Publisher, "more", ?LIMIT)} end),
    pelton_file_tests:eventually(fun() -> process_info(Sender, status) =:= {status, waiting} end),
    [{ok, <<0:8000>>, Number, 0} = pelton:recv_delivery(Subscriber, ?LIMIT) || Number <- lists:seq(1, Sent)],
    receive {Sender, Result} -> ?assertEqual(ok, Result) end,
    ?assertEqual({ok, <<"more">>, Sent + 1, 0}, pelton:recv_delivery(Subscriber, ?LIMIT)),
    ?assertEqual({error, timeout}, pelton:recv_delivery(Subscriber, 0)),
    %% One that has ended holds nothing up.
    _ = fill(Publisher, 0),
    ok = pelton:close(Subscriber),
    ok = pelton:send(Publisher, "more", ?LIMIT),
    ?assertEqual({error, closed}, pelton:recv_delivery(Subscriber)),
    ok = pelton:close(Publisher).

an_active_subscriber_gets_as_many_as_requested(Path) ->
    Publisher = publisher(name(Path), []),
    {ok, Subscriber} = pelton:open(subscriber, name(Path), [{timeout, ?LIMIT}, {active, 2}]),
    ?assertEqual({error, einval}, pelton:recv_delivery(Subscriber, 0)),
    Sent = 2 + fill(Publisher, 0),
    [?assertEqual({pelton_delivery, Subscriber, <<0:8000>>, Number, 0}, next()) || Number <- [1, 2]],
    ?assertEqual({pelton_passive, Subscriber}, next()),
    %% Passive, it holds the publisher up.
    _ = fill(Publisher, 0),
    ?assertEqual({error, timeout}, pelton:send(Publisher, <<0:8000>>, 10)),
    receive Early -> error(Early) after 0 -> ok end,
    ok = pelton:setopts(Subscriber, [{active, true}]),
    ok = pelton:wait_released(Publisher, ?LIMIT),
    ?assert(Sent > 10),
    ok = pelton:close(Publisher),
    ?assertEqual({pelton_closed, Subscriber, closed}, last()),
    ok = pelton:close(Subscriber).

a_process_gets_the_messages_of_many_publishers(Path) ->
    Names = [["unix:", Path(Topic)] || Topic <- ["bids", "offers"]],
    Publishers = [publisher(Name, []) || Name <- Names],
    Subscribers = [begin
        {ok, Subscriber} = pelton:open(subscriber, Name, [{timeout, ?LIMIT}, {active, true}]),
        Subscriber
    end || Name <- Names],
    [ok = pelton:send(Publisher, <<"17">>) || Publisher <- Publishers],
    [ok = pelton:close(Publisher) || Publisher <- Publishers],
    Received = lists:sort([next() || _ <- [1, 2, 3, 4]]),
    Wanted = [[{pelton_delivery, Subscriber, <<"17">>, 1, 0}, {pelton_closed, Subscriber, closed}]
              || Subscriber <- Subscribers],
    ?assertEqual(lists:sort(lists:append(Wanted)), Received),
    [ok = pelton:close(Subscriber) || Subscriber <- Subscribers].

next() ->
    receive Message -> Message after ?LIMIT -> timeout end.

last() ->
    case next() of
        {pelton_delivery, _, _, _, _} -> last();
        Other -> Other
    end.

%% A dirty scheduler copies it, while others receive too.
a_large_message_is_received_by_each_process_once(Path) ->
    {ok, Publisher} = pelton:open(publisher, name(Path)),
    {ok, Subscriber} = pelton:open(subscriber, name(Path), [{timeout, ?LIMIT}]),
    Test = self(),
    Receive = fun Loop() ->
        case pelton:recv_delivery(Subscriber, ?LIMIT) of
            {ok, <<Number:32, Rest/binary>>, Number, 0} ->
                Test ! {received, Number, byte_size(Rest)},
                Loop();
            {error, closed} -> ok
        end
    end,
    Receivers = [spawn_monitor(Receive) || _ <- lists:seq(1, 4)],
    Size = 1 bsl 20,
    [ok = pelton:send(Publisher, [<<Number:32>>, binary:copy(<<Number>>, Size)], ?LIMIT) || Number <- lists:seq(1, 50)],
    ok = pelton:wait_released(Publisher, ?LIMIT),
    [receive {received, Number, Found} -> ?assertEqual(Size, Found) end || Number <- lists:seq(1, 50)],
    ok = pelton:close(Publisher),
    [receive {'DOWN', Monitor, process, _, Reason} -> ?assertEqual(normal, Reason) end || {_, Monitor} <- Receivers].

%% Where the process runs while it receives is traced, with the number of the scheduler: 0 is a dirty one.
a_lagging_subscriber_copies_large_messages_on_dirty_schedulers(Path) ->
    {ok, Publisher} = pelton:open(publisher, name(Path)),
    {ok, Subscriber} = pelton:open(subscriber, name(Path), [{timeout, ?LIMIT}, {policy, lag}]),
    ok = pelton:wait_subscribers(Publisher, 1, ?LIMIT),
    Test = self(),
    Receive = fun Loop() ->
        receive next -> Test ! {received, pelton:recv_delivery(Subscriber, ?LIMIT)}, Loop() end
    end,
    Receiver = spawn_link(Receive),
    _ = erlang:trace(Receiver, true, [running, scheduler_id]),
    RanOnDirty = fun(Size) ->
        ok = pelton:send(Publisher, <<0:Size/unit:8>>, ?LIMIT),
        Receiver ! next,
        receive {received, {ok, Bytes, _, 0}} -> ?assertEqual(Size, byte_size(Bytes)) end,
        pelton_file_tests:eventually(fun() -> process_info(Receiver, status) =:= {status, waiting} end),
        Delivered = erlang:trace_delivered(Receiver),
        receive {trace_delivered, Receiver, Delivered} -> ok end,
        lists:member(0, traced(Receiver))
    end,
    %% After a large message, the next one is copied where a large one may be.
    ?assertEqual([false, true, true, false], [RanOnDirty(Size) || Size <- [100, 1 bsl 20, 100, 100]]),
    unlink(Receiver),
    exit(Receiver, kill),
    [ok = pelton:close(End) || End <- [Publisher, Subscriber]].

traced(Pid) ->
    receive {trace, Pid, _, _, Scheduler} -> [Scheduler | traced(Pid)]
    after 0 -> []
    end.

%% The notifier thread is busy with large messages, so that mostly the send admits the subscriber.
a_wait_for_subscribers_ends_beside_a_send_that_waits(Path) ->
    Name = directory(Path),
    Publisher = publisher(Name, []),
    {ok, Gate} = pelton:open(subscriber, Name, [{durable, "gate"}]),
    _ = fill(Publisher, 0),
    Busy = ["unix:", Path("busy")],
    {ok, Receiver} = pelton:open(receiver, Busy, [{active, true}]),
    Flood = spawn_link(fun() ->
        {ok, Sender} = pelton:open(sender, Busy, [{timeout, ?LIMIT}]),
        (fun Loop() -> ok = pelton:send(Sender, <<0:(1 bsl 20)/unit:8>>), Loop() end)()
    end),
    Drop = spawn_link(fun Loop() -> receive _ -> Loop() end end),
    ok = pelton:controlling_process(Receiver, Drop),
    Ends = [begin
         {Waiter, Monitor} = spawn_monitor(fun() -> exit(pelton:wait_subscribers(Publisher, Count, 5000)) end),
         pelton_file_tests:eventually(fun() -> process_info(Waiter, status) =:= {status, waiting} end),
         Sender = spawn(fun() ->
             {ok, _} = pelton:open(subscriber, Name, [{policy, lag}]),
             pelton:send(Publisher, <<0:8000>>)
         end),
         receive {'DOWN', Monitor, process, _, Result} -> ?assertEqual({Count, ok}, {Count, Result}) end,
         Sender
     end || Count <- lists:seq(2, 40)],
    [begin unlink(Pid), exit(Pid, kill) end || Pid <- [Flood, Drop | Ends]],
    [ok = pelton:close(End) || End <- [Gate, Publisher]].

%% Many links delay the news of the owner's end, after which it takes no messages.
a_dying_owner_s_messages_go_to_the_next_process(Path) ->
    Name = directory(Path),
    Publisher = publisher(Name, []),
    Test = self(),
    {Owner, Monitor} = spawn_monitor(fun() ->
        {ok, _} = pelton:open(subscriber, Name, [{durable, "audit"}, {active, true}]),
        _ = [spawn_link(fun() -> receive never -> ok end end) || _ <- lists:seq(1, 20000)],
        Test ! {self(), is_open},
        receive stop -> exit(shutdown) end
    end),
    receive {Owner, is_open} -> Owner ! stop end,
    (fun Wait() -> is_process_alive(Owner) andalso Wait() end)(),
    Sent = fill(Publisher, 0),
    receive {'DOWN', Monitor, process, Owner, Reason} -> ?assertEqual(shutdown, Reason) end,
    {ok, Subscriber} = pelton:open(subscriber, Name, [{durable, "audit"}, {timeout, ?LIMIT}]),
    [?assertEqual({ok, <<0:8000>>, Number, 0}, pelton:recv_delivery(Subscriber, ?LIMIT))
     || Number <- lists:seq(1, Sent)],
    [ok = pelton:close(End) || End <- [Publisher, Subscriber]].

an_option_that_does_not_apply_is_an_exception(Path) ->
    [?assertError({bad_option, Option}, pelton:open(publisher, name(Path), [Option]))
     || Option <- [{policy, lag}, {active, true}, {timeout, 1}, {mode, 8#700}, {hold_max, -1}, {create, true}]],
    [?assertError({bad_option, Option}, pelton:open(subscriber, name(Path), [Option]))
     || Option <- [{history, 1}, {policy, gates}, {durable, "audit"}, {start_from, later}, {messages, hold}]],
    [?assertError({bad_option, Option}, pelton:open(publisher, directory(Path), [Option]))
     || Option <- [{hold_max, -1}, {mode, 1 bsl 32}]],
    ?assertError({bad_option, _}, pelton:open(sender, directory(Path), [{create, true}, {lanes, 1 bsl 32}])),
    Publisher = publisher(name(Path), [{hold_max, 0}]),
    ?assertMatch({error, {refused, _}}, pelton:open(subscriber, name(Path), [{timeout, ?LIMIT}])),
    {ok, Subscriber} = pelton:open(subscriber, name(Path), [{timeout, ?LIMIT}, {policy, lag}, {slack, 4096}]),
    [?assertError(badarg, pelton:setopts(Subscriber, [Option]))
     || Option <- [{messages, hold}, {messages, copy}, {traceparents, true}]],
    ?assertEqual({error, refused}, pelton:resume(Subscriber, 0)),
    ?assertMatch({error, {name, _}}, pelton:remove_subscription(name(Path), "audit")),
    [ok = pelton:close(End) || End <- [Publisher, Subscriber]].

a_limit_in_a_directory_stays_until_the_next_publisher(Path) ->
    Name = directory(Path),
    ok = pelton:close(publisher(Name, [{hold_max, 10}])),
    ?assertMatch({error, {refused, _}}, pelton:open(subscriber, Name, [])),
    {ok, Lags} = pelton:open(subscriber, Name, [{lag_after, 10}]),
    ok = pelton:close(publisher(Name, [])),
    {ok, Gates} = pelton:open(subscriber, Name, []),
    ?assertMatch({error, {refused, _}}, pelton:open(publisher, Name, [{hold_max, 10}])),
    [ok = pelton:close(End) || End <- [Lags, Gates]],
    ok = pelton:close(publisher(Name, [{hold_max, 10}])).

%% The command is killed, and this node continues its subscription.
a_durable_subscription_continues_after_a_kill(Path) ->
    Name = directory(Path),
    ?assertMatch({error, {no_channel, _}}, pelton:open(subscriber, Name, [{durable, "audit"}])),
    Publisher = publisher(Name, []),
    Port = open_port({spawn_executable, os:getenv("PELTON_TOOL")},
                     [{args, ["sub", Name, "--durable", "audit"]}, exit_status, {line, 100}]),
    {os_pid, Pid} = erlang:port_info(Port, os_pid),
    ok = pelton:wait_subscribers(Publisher, 1, ?LIMIT),
    ok = pelton:send(Publisher, "one"),
    ok = pelton:wait_released(Publisher, ?LIMIT),
    ?assertMatch([#{pid := Pid, durable := <<"audit">>}], pelton:subscribers(Publisher)),
    ?assertMatch({error, {role_taken, _}}, pelton:remove_subscription(Name, "audit")),
    ?assertMatch({error, {role_taken, _}}, pelton:open(subscriber, Name, [{durable, "audit"}, {timeout, 20}])),
    "" = os:cmd("kill -KILL " ++ integer_to_list(Pid)),
    receive {Port, {exit_status, _}} -> ok end,
    %% While it is away it gates.
    Sent = 1 + fill(Publisher, 0),
    Behind = Sent - 1,
    ?assertMatch([#{pid := 0, durable := <<"audit">>, behind := Behind}], pelton:subscribers(Publisher)),
    {ok, Subscriber} = pelton:open(subscriber, Name, [{durable, "audit"}]),
    ?assertMatch(#{continues := 1}, pelton:info(Subscriber)),
    [{ok, <<0:8000>>, Number, 0} = pelton:recv_delivery(Subscriber, ?LIMIT) || Number <- lists:seq(2, Sent)],
    ok = pelton:close(Subscriber),
    %% It learns how many messages it has missed while away.
    {ok, Lagging} = pelton:open(subscriber, Name, [{durable, "audit"}, {policy, lag}]),
    ok = pelton:close(Lagging),
    [ok = pelton:send(Publisher, <<0:8000>>) || _ <- lists:seq(1, 200)],
    {ok, Returned} = pelton:open(subscriber, Name, [{durable, "audit"}, {policy, lag}]),
    {ok, _, Next, Missed} = pelton:recv_delivery(Returned, ?LIMIT),
    ?assertEqual(Next, Sent + 1 + Missed),
    ?assert(Missed > 0),
    ok = pelton:close(Returned),
    ?assertMatch({error, {refused, _}}, pelton:open(subscriber, Name, [{durable, "audit"}])),
    ok = pelton:remove_subscription(Name, "audit"),
    ?assertMatch({error, {refused, _}}, pelton:remove_subscription(Name, "audit")),
    ?assertEqual([], pelton:subscribers(Publisher)),
    ok = pelton:close(Publisher).

a_publisher_in_a_directory_has_a_successor(Path) ->
    Name = directory(Path),
    First = publisher(Name, [{history, 10}]),
    ok = pelton:send(First, "before"),
    ?assertMatch({error, {role_taken, _}}, pelton:open(publisher, Name, [{timeout, 20}])),
    {ok, Subscriber} = pelton:open(subscriber, Name, [{start_from, oldest}]),
    ?assertEqual({ok, <<"before">>, 1, 0}, pelton:recv_delivery(Subscriber, ?LIMIT)),
    Test = self(),
    Waiting = spawn_link(fun() ->
        {ok, Second} = pelton:open(publisher, Name, [{timeout, ?LIMIT}]),
        ok = pelton:controlling_process(Second, Test),
        Test ! {self(), Second}
    end),
    ok = pelton:close(First),
    Next = receive {Waiting, Publisher} -> Publisher end,
    %% Its predecessor's end may be known by now.
    case pelton:recv_delivery(Subscriber, 100) of
        {error, timeout} -> ok;
        {error, closed} -> ok = pelton:resume(Subscriber, ?LIMIT)
    end,
    ok = pelton:send(Next, "after"),
    ?assertEqual({ok, <<"after">>, 2, 0}, pelton:recv_delivery(Subscriber, ?LIMIT)),
    [ok = pelton:close(End) || End <- [Next, Subscriber]].
