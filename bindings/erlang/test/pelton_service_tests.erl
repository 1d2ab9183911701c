%% The behaviour pelton_service: below a supervisor, with a registered name, and its end.
-module(pelton_service_tests).
-behaviour(pelton_service).
-include_lib("eunit/include/eunit.hrl").
-export([init/1, handle_request/3, handle_call/3, handle_cast/2, handle_info/2, terminate/2]).

in_a_directory_test_() ->
    {foreach, fun pelton_file_tests:directory/0, fun pelton_file_tests:remove/1,
     [fun(Path) -> {atom_to_list(Name), {timeout, 120, fun() -> Test(Path) end}} end || {Name, Test} <- tests()]}.

tests() ->
    [{a_crashed_service_is_restarted, fun a_crashed_service_is_restarted/1},
     {a_killed_service_is_restarted, fun a_killed_service_is_restarted/1},
     {clients_of_a_short_name_survive_a_restart, fun clients_of_a_short_name_survive_a_restart/1},
     {a_shutdown_calls_terminate, fun a_shutdown_calls_terminate/1},
     {terminate_may_still_reply, fun terminate_may_still_reply/1},
     {a_name_in_use_ends_the_start, fun a_name_in_use_ends_the_start/1},
     {other_processes_call_the_service, fun other_processes_call_the_service/1},
     {each_result_of_a_request_is_carried_out, fun each_result_of_a_request_is_carried_out/1},
     {options_of_gen_server_reach_it, fun options_of_gen_server_reach_it/1}].

name(Path) -> ["unix:", Path("socket")].

%% Starts a supervisor with the service below it, both linked to the test.
supervised(Path) ->
    Child = pelton_service:child_spec({local, ?MODULE}, name(Path), ?MODULE, self(), []),
    ok = supervisor:check_childspecs([Child]),
    {ok, Supervisor} = supervisor:start_link(?MODULE, {children, [Child]}),
    Supervisor.

stop(Supervisor) ->
    unlink(Supervisor),
    Monitor = monitor(process, Supervisor),
    exit(Supervisor, shutdown),
    receive {'DOWN', Monitor, process, Supervisor, Reason} -> Reason end.

client(Path) ->
    {ok, Client} = pelton:open(client, name(Path), [{timeout, 30000}]),
    Client.

%% The process of the registered name, which is another one than before.
successor(Pid) ->
    case whereis(?MODULE) of
        Next when is_pid(Next), Next =/= Pid -> Next;
        _ -> erlang:yield(), successor(Pid)
    end.

a_crashed_service_is_restarted(Path) ->
    Supervisor = supervised(Path),
    restarts(Path, fun(Client, Pid) ->
        ?assertEqual({error, closed}, lost(pelton:call(Client, "crash"))),
        receive {terminated, Pid, {crash, _}} -> ok end
    end),
    stop(Supervisor).

%% Nothing runs in the killed process: the name is free for its successor all the same.
a_killed_service_is_restarted(Path) ->
    Supervisor = supervised(Path),
    restarts(Path, fun(Client, Pid) ->
        exit(Pid, kill),
        ?assertMatch({error, _}, pelton:call(Client, "later"))
    end),
    stop(Supervisor).

lost({error, {lost, Reason}}) -> {error, Reason};
lost(Result) -> Result.

restarts(Path, End) ->
    quietly(fun() ->
        lists:foldl(fun(_, Pid) ->
            Client = client(Path),
            ?assertEqual({ok, <<"ECHO">>}, pelton:call(Client, "echo", 30000)),
            End(Client, Pid),
            ok = pelton:close(Client),
            successor(Pid)
        end, whereis(?MODULE), lists:seq(1, 20))
    end).

%% Without the reports of crashes.
quietly(Fun) ->
    #{level := Level} = logger:get_primary_config(),
    ok = logger:set_primary_config(level, none),
    try Fun() after logger:set_primary_config(level, Level) end.

%% The client finds the other process of the name, and later the restarted one.
clients_of_a_short_name_survive_a_restart(Path) ->
    Before = os:getenv("XDG_RUNTIME_DIR"),
    true = os:putenv("XDG_RUNTIME_DIR", Path("")),
    ok = file:change_mode(Path(""), 8#700),
    {ok, One} = pelton_service:start_link("service", ?MODULE, self()),
    {ok, Other} = pelton_service:start_link("service", ?MODULE, self()),
    {ok, Client} = pelton:open(client, "service", [{timeout, 30000}]),
    unlink(One),
    exit(One, kill),
    Calls = [pelton:call(Client, "echo", 30000) || _ <- lists:seq(1, 100)],
    ok = pelton_service:stop(Other),
    case Before of false -> os:unsetenv("XDG_RUNTIME_DIR"); _ -> os:putenv("XDG_RUNTIME_DIR", Before) end,
    %% At most the first one was in flight to the killed process.
    ?assertEqual([{ok, <<"ECHO">>}], lists:usort(tl(Calls))).

a_shutdown_calls_terminate(Path) ->
    Supervisor = supervised(Path),
    Pid = whereis(?MODULE),
    Client = client(Path),
    ?assertEqual({ok, <<>>}, pelton:call(Client, "trap_exit")),
    shutdown = stop(Supervisor),
    receive {terminated, Pid, Reason} -> ?assertEqual(shutdown, Reason) end,
    ?assertEqual(undefined, whereis(?MODULE)),
    %% The name is free.
    {ok, _} = pelton:open(service, name(Path)).

terminate_may_still_reply(Path) ->
    {ok, Pid} = pelton_service:start_link(name(Path), ?MODULE, self()),
    Client = client(Path),
    {Caller, Monitor} = spawn_monitor(fun() -> exit(pelton:call(Client, "later")) end),
    receive {later, Pid} -> ok end,
    ok = pelton_service:stop(Pid),
    receive {terminated, Pid, normal} -> ok end,
    receive {'DOWN', Monitor, process, Caller, Result} -> ?assertEqual({ok, <<"at the end">>}, Result) end.

a_name_in_use_ends_the_start(Path) ->
    quietly(fun() -> failing_starts(Path) end).

failing_starts(Path) ->
    process_flag(trap_exit, true),
    {ok, _} = pelton:open(service, name(Path)),
    {error, {in_use, Detail}} = pelton_service:start_link(name(Path), ?MODULE, self()),
    ?assertMatch({match, _}, re:run(Detail, Path("socket"))),
    receive {terminated, _, Reason} -> ?assertMatch({in_use, Detail}, Reason) end,
    ?assertEqual(ignore, pelton_service:start_link(name(Path), ?MODULE, ignore)),
    ?assertEqual({error, no}, pelton_service:start_link(name(Path), ?MODULE, {stop, no})),
    process_flag(trap_exit, false).

other_processes_call_the_service(Path) ->
    {ok, Pid} = pelton_service:start_link({local, ?MODULE}, name(Path), ?MODULE, self(), []),
    ?assertEqual({error, {already_started, Pid}},
                 pelton_service:start_link({local, ?MODULE}, ["unix:", Path("other")], ?MODULE, self(), [])),
    ?assertEqual({called, 1}, gen_server:call(?MODULE, 1)),
    ok = gen_server:cast(?MODULE, {to, self(), 2}),
    receive 2 -> ok end,
    ?MODULE ! {to, self(), 3},
    receive 3 -> ok end,
    ok = pelton_service:stop(?MODULE).

each_result_of_a_request_is_carried_out(Path) ->
    {ok, Pid} = pelton_service:start_link(name(Path), ?MODULE, self()),
    Client = client(Path),
    ?assertEqual({ok, <<"HIBERNATE">>}, pelton:call(Client, "hibernate")),
    ?assertEqual({ok, <<"ECHO">>}, pelton:call(Client, "echo")),
    ok = pelton:cast(Client, "cast"),
    receive {cast, Pid} -> ok end,
    unlink(Pid),
    Monitor = monitor(process, Pid),
    ?assertEqual({ok, <<"bye">>}, pelton:call(Client, "stop")),
    receive {'DOWN', Monitor, process, Pid, Reason} -> ?assertEqual(normal, Reason) end.

options_of_gen_server_reach_it(Path) ->
    Options = [{spawn_opt, [{message_queue_data, off_heap}]}, {timeout, 5000}, {clients_max, 1}],
    {ok, Pid} = pelton_service:start_link(name(Path), ?MODULE, self(), Options),
    ?assertEqual({message_queue_data, off_heap}, process_info(Pid, message_queue_data)),
    _ = client(Path),
    ?assertMatch({error, {_, <<_/binary>>}}, pelton:open(client, name(Path), [{timeout, 200}])),
    ok = pelton_service:stop(Pid).

%% ---- The callbacks: the state is the test's process, and responders for later ----

%% A start that fails is a restart too: the supervisor gives up if there is one more than the tests cause.
init({children, Children}) -> {ok, {#{intensity => 20, period => 3600}, Children}};
init(ignore) -> ignore;
init({stop, Reason}) -> {stop, Reason};
init(Test) -> {ok, {Test, []}}.

handle_request(<<"crash">>, _, _) -> error(crash);
handle_request(<<"trap_exit">>, _, State) -> process_flag(trap_exit, true), {reply, <<>>, State};
handle_request(<<"later">>, Responder, {Test, Later}) -> Test ! {later, self()}, {noreply, {Test, [Responder | Later]}};
handle_request(<<"cast">>, undefined, {Test, _} = State) -> Test ! {cast, self()}, {reply, "dropped", State};
handle_request(<<"stop">>, _, State) -> {stop, normal, "bye", State};
handle_request(<<"hibernate">> = Bytes, _, State) -> {reply, string:uppercase(Bytes), State, hibernate};
handle_request(Bytes, _, State) -> {reply, string:uppercase(Bytes), State}.

handle_call(Number, _From, State) -> {reply, {called, Number}, State}.

handle_cast({to, Pid, Message}, State) -> Pid ! Message, {noreply, State}.

handle_info({to, Pid, Message}, State) -> Pid ! Message, {noreply, State}.

terminate(Reason, {Test, Later}) ->
    [ok = pelton:reply(Responder, "at the end") || Responder <- Later],
    Test ! {terminated, self(), Reason}.
