%% @doc A behaviour: a process that serves a name. It is a `gen_server' with one more callback, `handle_request/3'.
%%
%% ```
%% -module(lengths).
%% -behaviour(pelton_service).
%% -export([init/1, handle_request/3]).
%%
%% init([]) -> {ok, 0}.
%% handle_request(Request, _Responder, Count) ->
%%     {reply, integer_to_list(byte_size(Request)), Count + 1}.
%% '''
%% Below a supervisor: `pelton_service:child_spec({local, lengths}, "lengths", lengths, [], [])'.
%%
%% When the process ends, for any reason, the name is free before a supervisor starts its successor, and calls in
%% flight fail at their clients. Clients of a short name continue with other processes of the name.
%%
%% Callbacks:
%% <ul>
%% <li>`init(Args)' returns `{ok, State}', `ignore' or `{stop, Reason}'. The name is opened after it. If that fails,
%% the process ends with {@type pelton:open_error()}.</li>
%% <li>`handle_request(Request, Responder, State)' returns `{reply, Reply, State}'; `{noreply, State}', to call {@link
%% pelton:reply/2} later, in any process; `{stop, Reason, State}' or `{stop, Reason, Reply, State}'. For a {@link
%% pelton:cast/2} the responder is `undefined', and a reply is dropped.</li>
%% <li>`handle_call/3', `handle_cast/2', `handle_info/2' and `code_change/3' are those of `gen_server', and
%% optional.</li>
%% <li>`terminate(Reason, State)', optional, is called as by `gen_server': if the process traps exits, or ends by
%% itself. The service is closed after it, so it can still reply.</li>
%% </ul>
%% An element after the state, as in `{reply, Reply, State, hibernate}', has the meaning that `gen_server' gives it.
-module(pelton_service).
-behaviour(gen_server).
-export([start_link/3, start_link/4, start_link/5, child_spec/5, stop/1]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2, handle_continue/2, terminate/2, code_change/3]).
-export_type([server_name/0, option/0]).

-type server_name() :: {local, atom()} | {global, term()} | {via, module(), term()}.
-type option() :: pelton:option() | {debug, list()} | {timeout, timeout()} | {spawn_opt, list()} |
                  {hibernate_after, timeout()}.
%% Options of {@link pelton:open/3} for a service, and of `gen_server:start_link/4', to which `timeout' belongs.
-type action() :: timeout() | hibernate | {continue, term()}.

-callback init(Args :: term()) ->
    {ok, State :: term()} | {ok, State :: term(), action()} | ignore | {stop, Reason :: term()}.
-callback handle_request(Request :: binary(), pelton:responder() | undefined, State :: term()) ->
    {reply, iodata(), State :: term()} | {reply, iodata(), State :: term(), action()} |
    {noreply, State :: term()} | {noreply, State :: term(), action()} |
    {stop, Reason :: term(), State :: term()} | {stop, Reason :: term(), iodata(), State :: term()}.
-callback handle_call(Request :: term(), From :: {pid(), term()}, State :: term()) ->
    {reply, term(), State :: term()} | {reply, term(), State :: term(), action()} |
    {noreply, State :: term()} | {noreply, State :: term(), action()} |
    {stop, Reason :: term(), State :: term()} | {stop, Reason :: term(), term(), State :: term()}.
-callback handle_cast(Message :: term(), State :: term()) ->
    {noreply, State :: term()} | {noreply, State :: term(), action()} | {stop, Reason :: term(), State :: term()}.
-callback handle_info(Message :: term(), State :: term()) ->
    {noreply, State :: term()} | {noreply, State :: term(), action()} | {stop, Reason :: term(), State :: term()}.
-callback handle_continue(Argument :: term(), State :: term()) ->
    {noreply, State :: term()} | {noreply, State :: term(), action()} | {stop, Reason :: term(), State :: term()}.
-callback terminate(Reason :: term(), State :: term()) -> term().
-callback code_change(Version :: term(), State :: term(), Extra :: term()) -> {ok, State :: term()} | {error, term()}.
-optional_callbacks([handle_call/3, handle_cast/2, handle_info/2, handle_continue/2, terminate/2, code_change/3]).

-include_lib("kernel/include/logger.hrl").

%% The process gets so many requests before it asks for more. Others wait in the lanes of their clients.
-define(REQUESTS, 256).

-record(state, {service :: pelton:endpoint(), module :: module(), inner :: term()}).

%% @equiv start_link(Name, Module, Args, [])
-spec start_link(iodata(), module(), term()) -> gen_server:start_ret().
start_link(Name, Module, Args) ->
    start_link(Name, Module, Args, []).

%% @doc Starts a process that listens under `Name', and handles requests by `Module'.
-spec start_link(iodata(), module(), term(), [option()]) -> gen_server:start_ret().
start_link(Name, Module, Args, Options) ->
    {Server, Endpoint} = lists:partition(fun is_server_option/1, Options),
    gen_server:start_link(?MODULE, {Name, Module, Args, Endpoint}, Server).

%% @doc As {@link start_link/4}, and registers the process.
-spec start_link(server_name(), iodata(), module(), term(), [option()]) -> gen_server:start_ret().
start_link(ServerName, Name, Module, Args, Options) ->
    {Server, Endpoint} = lists:partition(fun is_server_option/1, Options),
    gen_server:start_link(ServerName, ?MODULE, {Name, Module, Args, Endpoint}, Server).

is_server_option({Key, _}) -> lists:member(Key, [debug, timeout, spawn_opt, hibernate_after]);
is_server_option(_) -> false.

%% @doc The child specification of a registered service: `permanent', with five seconds to end. Its id is `ServerName'.
-spec child_spec(server_name(), iodata(), module(), term(), [option()]) -> supervisor:child_spec().
child_spec(ServerName, Name, Module, Args, Options) ->
    #{id => ServerName,
      start => {?MODULE, start_link, [ServerName, Name, Module, Args, Options]},
      restart => permanent,
      shutdown => 5000,
      type => worker,
      modules => [Module]}.

%% @doc Ends it with the reason `normal', and waits for that: `gen_server:stop/1'.
-spec stop(gen_server:server_ref()) -> ok.
stop(Server) ->
    gen_server:stop(Server).

%% @private
init({Name, Module, Args, Options}) ->
    case Module:init(Args) of
        {ok, Inner} -> open(Name, Options, Module, Inner);
        {ok, Inner, Action} ->
            case open(Name, Options, Module, Inner) of
                {ok, State} -> {ok, State, Action};
                Stop -> Stop
            end;
        Other -> Other
    end.

open(Name, Options, Module, Inner) ->
    case pelton:open(service, Name, [{active, ?REQUESTS} | Options]) of
        {ok, Service} -> {ok, #state{service = Service, module = Module, inner = Inner}};
        {error, Reason} ->
            _ = optional(Module, terminate, [Reason, Inner], ok),
            {stop, Reason}
    end.

%% Calls an optional callback.
optional(Module, Function, Arguments, Default) ->
    case erlang:function_exported(Module, Function, length(Arguments)) of
        true -> apply(Module, Function, Arguments);
        false -> Default
    end.

%% A callback's result, with the state in place of its own.
with_state({reply, Reply, Inner}, State) -> {reply, Reply, State#state{inner = Inner}};
with_state({reply, Reply, Inner, Action}, State) -> {reply, Reply, State#state{inner = Inner}, Action};
with_state({noreply, Inner}, State) -> {noreply, State#state{inner = Inner}};
with_state({noreply, Inner, Action}, State) -> {noreply, State#state{inner = Inner}, Action};
with_state({stop, Reason, Inner}, State) -> {stop, Reason, State#state{inner = Inner}};
with_state({stop, Reason, Reply, Inner}, State) -> {stop, Reason, Reply, State#state{inner = Inner}}.

%% @private
handle_info({pelton_request, Service, Responder, Request}, #state{service = Service, module = Module} = State) ->
    case with_state(Module:handle_request(Request, Responder, State#state.inner), State) of
        {reply, Reply, Next} -> _ = respond(Responder, Reply), {noreply, Next};
        {reply, Reply, Next, Action} -> _ = respond(Responder, Reply), {noreply, Next, Action};
        {stop, Reason, Reply, Next} -> _ = respond(Responder, Reply), {stop, Reason, Next};
        Result -> Result
    end;
handle_info({pelton_passive, Service}, #state{service = Service} = State) ->
    case pelton:setopts(Service, [{active, ?REQUESTS}]) of
        ok -> {noreply, State};
        {error, Reason} -> {stop, Reason, State}
    end;
handle_info({pelton_closed, Service, Reason}, #state{service = Service} = State) ->
    {stop, Reason, State};
handle_info(Message, State) ->
    unexpected(handle_info, Message, State).

%% A client that has gone needs no reply. A reply that is too large for the client becomes a failure with code 0.
respond(Responder, Reply) ->
    case pelton:reply(Responder, Reply) of
        {error, too_large} -> pelton:fail(Responder, 0, "too_large");
        Result -> Result
    end.

%% As gen_server does: a message without a callback is logged.
unexpected(Function, Message, #state{module = Module, inner = Inner} = State) ->
    case erlang:function_exported(Module, Function, 2) of
        true -> with_state(Module:Function(Message, Inner), State);
        false ->
            ?LOG_WARNING("~p has no ~p/2, and drops ~tp", [Module, Function, Message]),
            {noreply, State}
    end.

%% @private
handle_call(Request, From, #state{module = Module, inner = Inner} = State) ->
    case erlang:function_exported(Module, handle_call, 3) of
        true -> with_state(Module:handle_call(Request, From, Inner), State);
        false -> {reply, {error, undef}, State}
    end.

%% @private
handle_cast(Message, State) -> unexpected(handle_cast, Message, State).

%% @private
handle_continue(Argument, State) -> unexpected(handle_continue, Argument, State).

%% @private
terminate(Reason, #state{service = Service, module = Module, inner = Inner}) ->
    try optional(Module, terminate, [Reason, Inner], ok)
    after
        _ = pelton:close(Service)
    end.

%% @private
code_change(Version, #state{module = Module, inner = Inner} = State, Extra) ->
    case optional(Module, code_change, [Version, Inner, Extra], {ok, Inner}) of
        {ok, Next} -> {ok, State#state{inner = Next}};
        Error -> Error
    end.
