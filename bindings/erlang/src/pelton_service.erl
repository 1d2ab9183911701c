%% @doc A behaviour: a process that serves a name. Start it below a supervisor; when it ends, calls in flight fail at their clients, and
%% those that ask by a short name go on to another process of it.
-module(pelton_service).
-behaviour(gen_server).
-export([start_link/3, start_link/4]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2, terminate/2, code_change/3]).

-callback init(Arguments :: term()) -> {ok, State :: term()} | {stop, Reason :: term()}.
%% Of something that was only told the responder is `undefined'. Who answers `noreply' keeps the responder, for {@link pelton:reply/2} later, in
%% whatever process.
-callback handle_request(Request :: binary(), Responder :: pelton:responder() | undefined, State :: term()) ->
    {reply, iodata(), State :: term()} | {noreply, State :: term()} | {stop, Reason :: term(), State :: term()}.
-callback handle_info(Message :: term(), State :: term()) -> {noreply, State :: term()} | {stop, Reason :: term(), State :: term()}.
-optional_callbacks([handle_info/2]).

%% So many requests come before the process is asked whether it wants more: what is beyond waits at the clients.
-define(REQUESTS, 256).

-record(state, {service :: pelton:'end'(), module :: module(), inner :: term()}).

%% @equiv start_link(Name, Module, Arguments, [])
-spec start_link(iodata(), module(), term()) -> gen_server:start_ret().
start_link(Name, Module, Arguments) ->
    start_link(Name, Module, Arguments, []).

%% @doc Listens under `Name', and has `Module' handle what is asked.
-spec start_link(iodata(), module(), term(), [pelton:option()]) -> gen_server:start_ret().
start_link(Name, Module, Arguments, Options) ->
    gen_server:start_link(?MODULE, {Name, Module, Arguments, Options}, []).

%% @private
init({Name, Module, Arguments, Options}) ->
    _ = process_flag(message_queue_data, off_heap),
    case Module:init(Arguments) of
        {ok, Inner} ->
            case pelton:open(service, Name, [{active, ?REQUESTS} | Options]) of
                {ok, Service} -> {ok, #state{service = Service, module = Module, inner = Inner}};
                {error, Reason} -> {stop, Reason}
            end;
        {stop, Reason} -> {stop, Reason}
    end.

%% @private
handle_info({pelton_request, Service, Responder, Request}, #state{service = Service, module = Module, inner = Inner} = State) ->
    case Module:handle_request(Request, Responder, Inner) of
        {reply, Reply, Next} ->
            %% A client that has gone needs none.
            _ = pelton:reply(Responder, Reply),
            {noreply, State#state{inner = Next}};
        {noreply, Next} -> {noreply, State#state{inner = Next}};
        {stop, Reason, Next} -> {stop, Reason, State#state{inner = Next}}
    end;
handle_info({pelton_passive, Service}, #state{service = Service} = State) ->
    case pelton:setopts(Service, [{active, ?REQUESTS}]) of
        ok -> {noreply, State};
        {error, Reason} -> {stop, Reason, State}
    end;
handle_info({pelton_closed, Service, Reason}, #state{service = Service} = State) ->
    {stop, Reason, State};
handle_info(Message, #state{module = Module, inner = Inner} = State) ->
    case erlang:function_exported(Module, handle_info, 2) of
        true ->
            case Module:handle_info(Message, Inner) of
                {noreply, Next} -> {noreply, State#state{inner = Next}};
                {stop, Reason, Next} -> {stop, Reason, State#state{inner = Next}}
            end;
        false -> {noreply, State}
    end.

%% @private
handle_call(_Request, _From, State) -> {reply, {error, badarg}, State}.
%% @private
handle_cast(_Message, State) -> {noreply, State}.
%% @private
terminate(_Reason, #state{service = Service}) -> pelton:close(Service).
%% @private
code_change(_Old, State, _Extra) -> {ok, State}.
