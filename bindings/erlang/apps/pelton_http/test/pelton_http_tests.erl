-module(pelton_http_tests).
-export([handle/4, init/2]).
-include_lib("eunit/include/eunit.hrl").

-define(HEAD, <<"GET /x?y HTTP/1.1\r\nHost: a:80\r\nX-Y:\t z  \r\nEmpty:\r\n\r\n">>).
-define(PARSED, [{<<"host">>, <<"a:80">>}, {<<"x-y">>, <<"z">>}, {<<"empty">>, <<>>}]).

%% --- Heads ---

a_request_test() ->
    ?assertEqual({ok, <<"GET">>, <<"/x?y">>, {1, 1}, ?PARSED, <<"rest">>},
                 pelton_http:parse_request(<<?HEAD/binary, "rest">>)),
    ?assertEqual({ok, <<"GET">>, <<"/">>, {1, 0}, [], <<>>}, pelton_http:parse_request(<<"GET / HTTP/1.0\r\n\r\n">>)),
    ?assertMatch({ok, <<"GET">>, _, _, _, <<>>}, pelton_http:parse_request(<<"\r\n\r\n", ?HEAD/binary>>)).

a_response_test() ->
    ?assertEqual({ok, {1, 1}, 404, <<"Not Found">>, [{<<"a">>, <<"b">>}], <<"rest">>},
                 pelton_http:parse_response(<<"HTTP/1.1 404 Not Found\r\nA: b\r\n\r\nrest">>)),
    ?assertEqual({ok, {1, 0}, 200, <<>>, [], <<>>}, pelton_http:parse_response(<<"HTTP/1.0 200 \r\n\r\n">>)),
    ?assertMatch({ok, {1, 1}, 200, <<>>, [], <<>>}, pelton_http:parse_response(<<"HTTP/1.1 200\r\n\r\n">>)),
    [?assertMatch({error, _}, pelton_http:parse_response(Bytes)) ||
        Bytes <- [<<"HTTP/1.1 20 OK\r\n\r\n">>, <<"HTTP/1.1 2000 OK\r\n\r\n">>, <<"HTTP/2.0 200 OK\r\n\r\n">>,
                  <<"HTTP/1.1  200 OK\r\n\r\n">>, <<"HTTP/1.1 200 OK\n\n">>, <<"HTTP/1.1 200 OK\r\nA: b\n\r\n">>,
                  <<"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n">>,
                  <<"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n">>,
                  <<"HTTP/1.1 200 O", 1, "K\r\n\r\n">>]].

targets_test() ->
    Target = fun(Method, Target, Host) ->
        case pelton_http:parse_request(<<Method/binary, " ", Target/binary, " HTTP/1.1\r\nHost: ", Host/binary,
                                         "\r\n\r\n">>) of
            {ok, Method, Target, _, _, <<>>} -> ok;
            Other -> Other
        end
    end,
    [?assertEqual({Call, ok}, {Call, erlang:apply(Target, Call)}) ||
        Call <- [[<<"OPTIONS">>, <<"*">>, <<"a">>], [<<"CONNECT">>, <<"a:443">>, <<"a:443">>],
                 [<<"CONNECT">>, <<"[::1]:443">>, <<"[::1]:443">>], [<<"GET">>, <<"http://A:80/x">>, <<"a:80">>],
                 [<<"GET">>, <<"http://a?x">>, <<"a">>], [<<"GET">>, <<"/">>, <<"[::1]">>], [<<"GET">>, <<"/">>, <<>>],
                 [<<"GET">>, <<"/a|b{c}%20">>, <<"a">>], [<<"M-SEARCH">>, <<"/">>, <<"a-b.c_d">>]]].

each_part_of_a_head_is_more_test() ->
    [?assertEqual(more, pelton_http:parse_request(binary:part(?HEAD, 0, N))) || N <- lists:seq(0, byte_size(?HEAD) - 1)].

references_keep_the_packet_and_copies_do_not_test() ->
    Packet = <<"GET / HTTP/1.1\r\nHost: a\r\nX: ", (binary:copy(<<"v">>, 80))/binary, "\r\n\r\n",
               (binary:copy(<<"b">>, 100000))/binary>>,
    Value = fun(Options) ->
        {ok, _, _, _, [_, {_, Found}], _} = pelton_http:parse_request(Packet, Options),
        ?assertEqual(binary:copy(<<"v">>, 80), Found),
        binary:referenced_byte_size(Found)
    end,
    ?assertEqual(80, Value([])),
    ?assertEqual(80, Value([{values, copy}])),
    ?assertEqual(byte_size(Packet), Value([{values, refer}])).

limits_test() ->
    Size = byte_size(?HEAD),
    ?assertMatch({ok, _, _, _, _, _}, pelton_http:parse_request(?HEAD, [{head_bytes_max, Size}, {headers_max, 3},
                                                                         {name_bytes_max, 5}, {value_bytes_max, 6}])),
    [begin
         ?assertEqual({error, Name}, pelton_http:parse_request(?HEAD, [{Name, Limit}])),
         ?assertEqual({error, Name, []}, pelton_http:feed(pelton_http:new(request, [{Name, Limit}]), ?HEAD)),
         ?assertEqual({error, Name}, by_bytes(pelton_http:new(request, [{Name, Limit}]), ?HEAD))
     end || {Name, Limit} <- [{head_bytes_max, Size - 1}, {head_bytes_max, 1}, {headers_max, 2}, {name_bytes_max, 4},
                              {value_bytes_max, 3}]],
    %% A head that does not end.
    ?assertEqual({error, head_bytes_max}, pelton_http:parse_request(binary:copy(<<"\r\n">>, 40000))),
    [?assertError(badarg, pelton_http:parse_request(?HEAD, [Option])) ||
        Option <- [{head_bytes_max, 0}, {headers_max, 257}, {name_bytes_max, a}, {values, b}, c]],
    ?assertError(badarg, pelton_http:parse_request("a list")),
    ?assertError(badarg, pelton_http:new(neither)),
    ?assertError(badarg, pelton_http:new(request, [{method, <<"HEAD">>}])).

dubious_requests_are_refused_test_() ->
    [{Name, fun() ->
        {error, Reason, _} = pelton_http:feed(pelton_http:new(request), Bytes),
        ?assertEqual({error, Reason}, by_bytes(pelton_http:new(request), Bytes)),
        ?assert(Wanted =:= any orelse Wanted =:= Reason),
        ?assert(length(pelton_http:format_error(Reason)) > 10),
        [?assertEqual({error, Reason}, pelton_http:parse_request(Bytes)) || pelton_http:parse_request(Bytes) =/= more,
                                                                            not is_body(Bytes)]
     end} || {Name, Wanted, Bytes} <- pelton_http_dubious:requests()].

is_body(Bytes) -> [<<>>] =/= tl(binary:split(Bytes, <<"\r\n\r\n">>)).

%% With another llhttp the reasons may differ, what is refused does not.
the_table_of_the_readme_is_true_test() ->
    {ok, Text} = file:read_file("README.md"),
    [_, Readme] = binary:split(Text, <<"## What is refused">>),
    %% Without cowlib its column is empty, so it is compared where cowlib is there.
    Columns = case code:which(cow_http) of non_existing -> 4; _ -> 5 end,
    Same = fun(Table) -> [lists:sublist(string:split(Row, "|", all), Columns) ||
                            Row <- string:split(unicode:characters_to_list(Table), "\n", all), lists:prefix("| ", Row)]
           end,
    ?assert(length(Same(Readme)) > 30),
    ?assertEqual(Same(pelton_http_dubious:table()), Same(Readme)).

%% --- Parsers ---

messages() ->
    [{<<"GET / HTTP/1.1\r\nHost: a\r\n\r\n">>, [{request, <<"GET">>, <<"/">>, {1, 1}, [{<<"host">>, <<"a">>}]},
                                                 {done, [], true}]},
     {<<"POST /p HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello">>,
      [{request, <<"POST">>, <<"/p">>, {1, 1}, [{<<"host">>, <<"a">>}, {<<"content-length">>, <<"5">>}]},
       {body, <<"hello">>}, {done, [], true}]},
     {<<"PUT /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\n\r\n3;x=y\r\nabc\r\n0a\r\n0123456789\r\n0\r\n"
        "Sum: 1 \r\nT2:\r\n\r\n">>,
      [{request, <<"PUT">>, <<"/c">>, {1, 1}, [{<<"host">>, <<"a">>}, {<<"transfer-encoding">>, <<"Chunked">>}]},
       {body, <<"abc0123456789">>}, {done, [{<<"sum">>, <<"1">>}, {<<"t2">>, <<>>}], true}]},
     {<<"\r\nGET /last HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n">>,
      [{request, <<"GET">>, <<"/last">>, {1, 1}, [{<<"host">>, <<"a">>}, {<<"connection">>, <<"close">>}]},
       {done, [], false}]}].

pipelined_and_split_anywhere_test() ->
    {Parts, Wanted} = lists:unzip(messages()),
    All = iolist_to_binary(Parts),
    [?assertEqual({Size, Options, lists:append(Wanted)}, {Size, Options, in_packets(Size, All, Options)}) ||
        Size <- lists:seq(1, byte_size(All)), Options <- [[], [{values, refer}]]].

after_the_last_message_test() ->
    Parser = pelton_http:new(request),
    {ok, _} = pelton_http:feed(Parser, <<"GET / HTTP/1.0\r\n\r\n">>),
    ?assertEqual({error, after_close, []}, pelton_http:feed(Parser, <<"GET">>)),
    ?assertEqual({error, after_close, []}, pelton_http:feed(Parser, <<"GET">>)).

what_was_good_before_an_error_comes_first_test() ->
    ?assertMatch({error, method, [{request, _, _, _, _}, {done, [], true}]},
                 pelton_http:feed(pelton_http:new(request), <<"GET / HTTP/1.1\r\nHost: a\r\n\r\nFROB">>)).

a_large_packet_test() ->
    Body = binary:copy(<<"0123456789">>, 100000),
    Head = <<"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n">>,
    {ok, [{request, _, _, _, _} | Events]} =
        pelton_http:feed(pelton_http:new(request), <<Head/binary, Body/binary, Head/binary>>),
    {Bodies, [{done, [], true}, {request, _, _, _, _}]} = lists:split(length(Events) - 2, Events),
    ?assertEqual(Body, iolist_to_binary([Bytes || {body, Bytes} <- Bodies])).

another_protocol_test() ->
    Request = <<"GET /chat HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n">>,
    Parser = pelton_http:new(request),
    Rest = <<"GET / HTTP/1.1\r\nHost: b\r\n\r\n">>,
    ?assertMatch({ok, [{request, _, <<"/chat">>, _, _}, {done, [], true}, {upgrade, Rest}]},
                 pelton_http:feed(Parser, <<Request/binary, Rest/binary>>)),
    %% Not wanted: HTTP goes on.
    ?assertMatch({ok, [{request, <<"GET">>, <<"/">>, _, [{<<"host">>, <<"b">>}]}, {done, [], true}]},
                 pelton_http:feed(Parser, Rest)),
    Long = binary:copy(<<"x">>, 200000),
    {ok, Events} = pelton_http:feed(pelton_http:new(request), <<"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n",
                                                                 Long/binary>>),
    ?assertMatch([{request, <<"CONNECT">>, <<"a:1">>, _, _}, {done, [], _}, {upgrade, Long}], Events).

responses_test() ->
    Length = <<"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n">>,
    ?assertMatch({ok, [{response, {1, 1}, 100, <<"Continue">>, []}, {done, [], true}, {response, _, 200, _, _},
                       {body, <<"xy">>}, {done, [], true}]},
                 pelton_http:feed(pelton_http:new(response),
                                  <<"HTTP/1.1 100 Continue\r\n\r\n", Length/binary, "xy">>)),
    ?assertMatch({ok, [{response, _, 200, _, _}, {done, [], true}]},
                 pelton_http:feed(pelton_http:new(response, [{method, <<"HEAD">>}]), Length)),
    ?assertMatch({ok, [{response, _, 200, _, _}, {done, [], _}, {upgrade, <<"tunnel">>}]},
                 pelton_http:feed(pelton_http:new(response, [{method, <<"CONNECT">>}]),
                                  <<"HTTP/1.1 200 OK\r\n\r\ntunnel">>)),
    %% Its end is that of the connection.
    Parser = pelton_http:new(response),
    ?assertMatch({ok, [{response, _, 200, _, _}, {body, <<"abc">>}]},
                 pelton_http:feed(Parser, <<"HTTP/1.1 200 OK\r\n\r\nabc">>)),
    ?assertEqual({ok, [{body, <<"d">>}]}, pelton_http:feed(Parser, <<"d">>)),
    ?assertEqual({ok, [{done, [], false}]}, pelton_http:finish(Parser)),
    ?assertEqual({error, after_close, []}, pelton_http:feed(Parser, <<"d">>)).

the_end_of_a_connection_test() ->
    ?assertEqual({ok, []}, pelton_http:finish(pelton_http:new(request))),
    [begin
         Parser = pelton_http:new(request),
         {ok, _} = pelton_http:feed(Parser, Part),
         ?assertEqual({error, unfinished, []}, pelton_http:finish(Parser))
     end || Part <- [<<"GE">>, <<"GET / HTTP/1.1\r\nHo">>, <<"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nx">>,
                     <<"PUT / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: y">>]].

extensions_and_trailers_have_limits_test() ->
    Head = <<"PUT / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n">>,
    Extensions = binary:copy(<<"1;abcdefgh\r\nx\r\n">>, 3000),
    ?assertMatch({error, value_bytes_max, _}, pelton_http:feed(pelton_http:new(request),
                                                               <<Head/binary, Extensions/binary>>)),
    Trailers = binary:copy(<<"Abcdefgh: ijklmnop\r\n">>, 99),
    ?assertEqual({error, head_bytes_max}, by_bytes(pelton_http:new(request, [{head_bytes_max, 1000}]),
                                                   <<Head/binary, "0\r\n", Trailers/binary, "\r\n">>)).

by_one_process_at_a_time_test() ->
    %% Whatever the order: each call succeeds alone or is refused, and the parser stays whole.
    Parser = pelton_http:new(request),
    Packet = iolist_to_binary([binary:copy(<<"GET / HTTP/1.1\r\nHost: a\r\n\r\n">>, 200)]),
    Me = self(),
    Feed = fun() -> try {ok, Events} = pelton_http:feed(Parser, Packet), length(Events) catch error:badarg -> 0 end end,
    Processes = [spawn_link(fun() -> Me ! {self(), [Feed() || _ <- lists:seq(1, 50)]} end) || _ <- "abcd"],
    Counts = [receive {Process, List} -> List end || Process <- Processes],
    ?assertEqual([], [Count || Count <- lists:append(Counts), Count =/= 0, Count =/= 400]),
    ?assertEqual(400, Feed()).

%% --- Beside decode_packet, and random bytes ---

heads_agree_with_decode_packet_test_() ->
    {timeout, 7200, fun() ->
        Seed = seed(),
        [begin
             Head = random_head(),
             {ok, {http_request, Method, {abs_path, Target}, Version}, Rest} = erlang:decode_packet(http_bin, Head, []),
             {Headers, <<"rest">>} = decoded(Rest, []),
             Name = if is_atom(Method) -> atom_to_binary(Method); true -> Method end,
             ?assertEqual({Seed, {ok, Name, Target, Version, Headers, <<"rest">>}},
                          {Seed, pelton_http:parse_request(Head)})
         end || _ <- lists:seq(1, count("PELTON_HTTP_HEADS", 20000))]
    end}.

%% h11 shares nothing with llhttp: Python, regular expressions.
heads_agree_with_h11_test_() ->
    {timeout, 7200, fun() ->
        Seed = seed(),
        Python = open_port({spawn_executable, os:find_executable("python3")},
                           [{args, ["test/h11_heads.py"]}, {packet, 4}, binary, exit_status]),
        [begin
             Head = random_head(),
             true = port_command(Python, Head),
             Parts = receive
                         {Python, {data, Answer}} -> [Part || <<Size:32, Part:Size/binary>> <= Answer];
                         {Python, {exit_status, Status}} -> error({"python3 ended: has it h11?", Status})
                     end,
             {ok, Method, Target, {1, Minor}, Headers, Rest} = pelton_http:parse_request(Head),
             ?assertEqual({Seed, Head, Parts},
                          {Seed, Head, [Method, Target, <<"1.", ($0 + Minor)>>] ++
                                       lists:append([[Name, Value] || {Name, Value} <- Headers]) ++ [Rest]})
         end || _ <- lists:seq(1, count("PELTON_HTTP_HEADS", 20000) div 10)],
        port_close(Python)
    end}.

count(Variable, Default) -> list_to_integer(os:getenv(Variable, integer_to_list(Default))).

decoded(Bytes, Before) ->
    case erlang:decode_packet(httph_bin, Bytes, []) of
        {ok, {http_header, _, _, Name, Value}, Rest} ->
            Text = if is_atom(Name) -> atom_to_binary(Name); true -> Name end,
            Trimmed = re:replace(Value, "[ \t]+$", "", [{return, binary}]),
            decoded(Rest, [{string:lowercase(Text), Trimmed} | Before]);
        {ok, http_eoh, Rest} -> {lists:reverse(Before), Rest}
    end.

random_head() ->
    Headers = [[random_name(), ":", some(" \t", 0, 3), random_value(), some(" \t", 0, 2), "\r\n"]
               || _ <- lists:seq(1, rand:uniform(20))],
    iolist_to_binary([one(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "PROPFIND"]), " /",
                      some("abc019/?&=%.-_~", 0, 60), " HTTP/1.1\r\nHost: ", some("abc019.", 1, 20), "\r\n", Headers,
                      "\r\nrest"]).

%% Half of them usual ones, which the NIF does not make, in any mixture of capitals; some nearly so.
random_name() ->
    Usual = one(["accept", "Accept-Language", "user-agent", "Cookie", "Cache-Control", "dnt", "te", "Date",
                 "access-control-allow-credentials", "X-Forwarded-For", "content-type"]),
    case rand:uniform(4) of
        1 -> some("abcXYZ019-_!#$%&'*+.^`|~", 1, 20);
        2 -> [Usual, some("abcXYZ019-_", 1, 3)];
        _ -> [case rand:uniform(2) of 1 -> string:to_upper(Letter); 2 -> Letter end || Letter <- Usual]
    end.

%% Without blanks at its ends.
random_value() ->
    case rand:uniform(5) of
        1 -> "";
        _ -> ["v", some(lists:seq(32, 126) ++ lists:seq(128, 255), 0, 100), "w"]
    end.

random_bytes_do_no_harm_test_() ->
    {timeout, 7200, fun() ->
        Seed = seed(),
        Count = count("PELTON_HTTP_RANDOM", 50000),
        Good = list_to_tuple([Bytes || {Bytes, _} <- messages()] ++
                             [Bytes || {_, _, Bytes} <- pelton_http_dubious:requests()]),
        [begin
             Bytes = changed(element(rand:uniform(tuple_size(Good)), Good)),
             Whole = whole(Bytes),
             ?assertEqual({Seed, Bytes, Whole}, {Seed, Bytes, in_parts(Bytes)})
         end || _ <- lists:seq(1, Count)]
    end}.

%% The same events, whatever the packets are, and the same error or none.
whole(Bytes) -> outcome([Bytes]).
in_parts(Bytes) -> outcome(parts(Bytes)).

outcome(Packets) -> outcome(pelton_http:new(request), Packets, []).
outcome(_Parser, [], Before) -> {joined(Before), none};
outcome(Parser, [Packet | Rest], Before) ->
    case pelton_http:feed(Parser, Packet) of
        {ok, Events} ->
            case lists:keyfind(upgrade, 1, Events) of
                false -> outcome(Parser, Rest, Before ++ Events);
                {upgrade, _} -> {joined(Before ++ lists:keydelete(upgrade, 1, Events)), upgrade}
            end;
        {error, Reason, Events} -> {joined(Before ++ Events), Reason}
    end.

parts(<<>>) -> [];
parts(Bytes) ->
    Size = min(byte_size(Bytes), rand:uniform(30)),
    [binary:part(Bytes, 0, Size) | parts(binary:part(Bytes, Size, byte_size(Bytes) - Size))].

changed(Bytes) ->
    lists:foldl(fun(_, Before) ->
        At = rand:uniform(byte_size(Before) + 1) - 1,
        <<Left:At/binary, Right/binary>> = Before,
        Byte = one([0, 9, 10, 13, 32, $:, $,, $0, $9, 255, rand:uniform(256) - 1]),
        case {rand:uniform(3), Right} of
            {1, <<_, More/binary>>} -> <<Left/binary, Byte, More/binary>>;
            {2, <<_, More/binary>>} -> <<Left/binary, More/binary>>;
            _ -> <<Left/binary, Byte, Right/binary>>
        end
    end, Bytes, lists:seq(1, rand:uniform(3))).

%% --- The example ---

handle(<<"POST">>, Target, Headers, Body) ->
    {200, [{"x-target", Target}, {"x-count", integer_to_list(length(Headers))}], Body};
handle(_Method, _Target, _Headers, _Body) -> {404, [], "nothing here"}.

the_example_serves_test() ->
    {ok, {_, _, Port} = Server} = pelton_http_server:start(0, fun handle/4),
    try
        {ok, Socket} = gen_tcp:connect({127, 0, 0, 1}, Port, [binary, {active, false}]),
        Request = <<"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello">>,
        %% More packets than {active, N} gives at once.
        [begin
             ok = gen_tcp:send(Socket, Request),
             ?assertMatch({[{response, _, 200, _, [{<<"content-length">>, <<"5">>}, {<<"x-target">>, <<"/echo">>},
                                                   {<<"x-count">>, <<"2">>}]}, {body, <<"hello">>}, {done, [], true}]},
                          {answer(Socket, pelton_http:new(response), [])})
         end || _ <- lists:seq(1, 250)],
        ok = gen_tcp:send(Socket, <<"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1, 2\r\n\r\n">>),
        ?assertMatch([{response, _, 400, _, _} | _], answer(Socket, pelton_http:new(response), [])),
        ?assertEqual({error, closed}, gen_tcp:recv(Socket, 0, 5000))
    after
        pelton_http_server:stop(Server)
    end.

init(Req, State) ->
    case pelton_http_cowboy:method(Req) of
        <<"POST">> ->
            {ok, Body, Read} = pelton_http_cowboy:read_body(Req),
            Query = pelton_http_cowboy:parse_qs(Read),
            Cookie = pelton_http_cowboy:header(<<"cookie">>, Read, <<"none">>),
            {ok, pelton_http_cowboy:reply(201, #{<<"x-path">> => pelton_http_cowboy:path(Read), <<"x-cookie">> => Cookie},
                                          [State, element(2, hd(Query)), Body], Read), State};
        _ -> {ok, Req, State}
    end.

a_handler_of_cowboy_serves_test() ->
    {ok, {_, _, Port} = Server} = pelton_http_server:start(0, pelton_http_cowboy:handler(?MODULE, <<"state ">>)),
    try
        {ok, Socket} = gen_tcp:connect({127, 0, 0, 1}, Port, [binary, {active, false}]),
        Ask = fun(Bytes) ->
            ok = gen_tcp:send(Socket, Bytes),
            answer(Socket, pelton_http:new(response), [])
        end,
        [?assertMatch([{response, _, 201, _, [_, {<<"x-cookie">>, <<"a=1; b=2">>}, {<<"x-path">>, <<"/p">>}]},
                       {body, <<"state x yhello">>}, {done, [], true}],
                      Ask(<<"POST ", Target/binary, "?q=x+y HTTP/1.1\r\nHost: a\r\nCookie: a=1\r\nCookie: b=2\r\n"
                            "Content-Length: 5\r\n\r\nhello">>)) || Target <- [<<"/p">>, <<"http://a/p">>]],
        ?assertMatch([{response, _, 204, _, _}, {done, [], true}], Ask(<<"GET / HTTP/1.1\r\nHost: a\r\n\r\n">>))
    after
        pelton_http_server:stop(Server)
    end.

answer(Socket, Parser, Before) ->
    {ok, Bytes} = gen_tcp:recv(Socket, 0, 5000),
    {ok, Events} = pelton_http:feed(Parser, Bytes),
    All = Before ++ Events,
    case lists:keymember(done, 1, All) of
        true -> joined(All);
        false -> answer(Socket, Parser, All)
    end.

%% --- Parts of tests ---

by_bytes(Parser, <<Byte, Rest/binary>>) ->
    case pelton_http:feed(Parser, <<Byte>>) of
        {ok, _} -> by_bytes(Parser, Rest);
        {error, Reason, _} -> {error, Reason}
    end;
by_bytes(_Parser, <<>>) -> not_refused.

in_packets(Size, Bytes, Options) -> in_packets(pelton_http:new(request, Options), Size, Bytes, []).
in_packets(_Parser, _Size, <<>>, Before) -> joined(Before);
in_packets(Parser, Size, Bytes, Before) ->
    Part = min(Size, byte_size(Bytes)),
    {ok, Events} = pelton_http:feed(Parser, binary:part(Bytes, 0, Part)),
    in_packets(Parser, Size, binary:part(Bytes, Part, byte_size(Bytes) - Part), Before ++ Events).

joined([{body, A}, {body, B} | Rest]) -> joined([{body, <<A/binary, B/binary>>} | Rest]);
joined([Event | Rest]) -> [Event | joined(Rest)];
joined([]) -> [].

seed() ->
    Seed = erlang:phash2({node(), erlang:monotonic_time(), self()}),
    _ = rand:seed(exsss, Seed),
    {seed, Seed}.

one(List) -> lists:nth(rand:uniform(length(List)), List).
some(From, Least, Most) -> [one(From) || _ <- lists:seq(1, Least + rand:uniform(Most - Least + 1) - 1)].
