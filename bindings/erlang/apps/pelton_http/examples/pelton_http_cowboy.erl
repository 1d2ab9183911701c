%% Handlers with the shape of cowboy's, init(Req, State) -> {ok, Req, State}, in pelton_http_server. The functions below
%% are those of cowboy_req with the same names, and Req is a map with the same keys, as far as they are here:
%%   {ok, Server} = pelton_http_server:start(0, pelton_http_cowboy:handler(my_handler, State)).
%% Unlike cowboy's, a reply is sent when init/2 has returned, and its body is whole when init/2 is called.
-module(pelton_http_cowboy).
-export([handler/2, method/1, path/1, qs/1, parse_qs/1, header/2, header/3, headers/1, has_body/1, read_body/1]).
-export([reply/2, reply/3, reply/4]).
-callback init(map(), State) -> {ok, map(), State}.

-spec handler(module(), any()) -> pelton_http_server:handler().
handler(Module, State) ->
    fun(Method, Target, Headers, Body) ->
        case Module:init(request(Method, Target, Headers, iolist_to_binary(Body)), State) of
            {ok, #{response := Response}, _State} -> Response;
            {ok, _NoReply, _State} -> {204, [], <<>>}
        end
    end.

request(Method, Target, Headers, Body) ->
    {Path, Query} = path_and_query(Target),
    #{method => Method, path => Path, qs => Query, headers => lists:foldl(fun add/2, #{}, Headers), body => Body,
      has_body => Body =/= <<>>, body_length => byte_size(Body)}.

%% "*" and an authority stay as they are.
path_and_query(Target) ->
    Local = case re:run(Target, "^https?://[^/?]*(.*)$", [caseless, {capture, all_but_first, binary}]) of
                {match, [<<"/", _/binary>> = Rest]} -> Rest;
                {match, [Rest]} -> <<"/", Rest/binary>>;
                nomatch -> Target
            end,
    case binary:split(Local, <<"?">>) of
        [Path, Query] -> {Path, Query};
        [Path] -> {Path, <<>>}
    end.

%% Several of one name become one.
add({Name, Value}, Headers) ->
    Between = case Name of <<"cookie">> -> <<"; ">>; _ -> <<", ">> end,
    maps:update_with(Name, fun(Before) -> <<Before/binary, Between/binary, Value/binary>> end, Value, Headers).

method(#{method := Method}) -> Method.
path(#{path := Path}) -> Path.
qs(#{qs := Query}) -> Query.
parse_qs(#{qs := Query}) -> uri_string:dissect_query(Query).
headers(#{headers := Headers}) -> Headers.
header(Name, Req) -> header(Name, Req, undefined).
header(Name, #{headers := Headers}, Default) -> maps:get(Name, Headers, Default).
has_body(#{has_body := HasBody}) -> HasBody.
read_body(#{body := Body} = Req) -> {ok, Body, Req}.

reply(Status, Req) -> reply(Status, #{}, Req).
reply(Status, Headers, Req) -> reply(Status, Headers, <<>>, Req).
reply(Status, Headers, Body, Req) -> Req#{response => {Status, maps:to_list(Headers), Body}}.
