%% @private The application: nothing has to be started; when it is stopped, everything that is open is closed.
-module(pelton_app).
-behaviour(application).
-behaviour(supervisor).
-export([start/2, stop/1, init/1]).

start(_Type, _Arguments) ->
    supervisor:start_link(?MODULE, []).

stop(_State) ->
    pelton_nif:end_all().

init([]) ->
    {ok, {#{}, []}}.
