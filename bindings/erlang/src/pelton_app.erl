%% @private The application. It starts nothing. When it stops, it closes everything that is open.
-module(pelton_app).
-behaviour(application).
-behaviour(supervisor).
-export([start/2, stop/1, init/1]).

start(_Type, _Arguments) ->
    supervisor:start_link(?MODULE, []).

stop(_State) ->
    pelton_nif:close_all().

init([]) ->
    {ok, {#{}, []}}.
