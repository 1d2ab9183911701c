%% @private The application. It starts nothing, and fails if the NIF cannot be loaded. When it stops, it closes
%% everything that is open.
-module(pelton_app).
-behaviour(application).
-behaviour(supervisor).
-export([start/2, stop/1, init/1]).

start(_Type, _Arguments) ->
    case code:ensure_loaded(pelton_nif) of
        {module, _} -> supervisor:start_link(?MODULE, []);
        %% The runtime has logged the reason.
        {error, Reason} -> {error, {pelton_nif, Reason}}
    end.

stop(_State) ->
    pelton_nif:close_all().

init([]) ->
    {ok, {#{}, []}}.
