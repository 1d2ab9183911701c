%% Requests that two servers could read differently, each with the reason for which it is refused, and the table of
%% README.md: erl -noshell -pa ... -eval 'pelton_http_dubious:print_table(), halt().'
-module(pelton_http_dubious).
-export([requests/0, table/0, print_table/0]).

requests() ->
    Post = fun(Lines) -> [<<"POST / HTTP/1.1\r\nHost: a\r\n">>, Lines, <<"\r\n">>] end,
    Get = fun(Lines) -> [<<"GET / HTTP/1.1\r\nHost: a\r\n">>, Lines, <<"\r\n">>] end,
    Line = fun(First) -> [First, <<"\r\nHost: a\r\n\r\n">>] end,
    Chunks = fun(Body) -> [Post(<<"Transfer-Encoding: chunked\r\n">>), Body] end,
    [{Name, Reason, iolist_to_binary(Bytes)} || {Name, Reason, Bytes} <- [
        {"two different lengths", content_length, Post("Content-Length: 3\r\nContent-Length: 4\r\n")},
        {"the same length twice", content_length, Post("Content-Length: 3\r\nContent-Length: 3\r\n")},
        {"two lengths in one header", content_length, Post("Content-Length: 3, 3\r\n")},
        {"a length with a plus", content_length, Post("Content-Length: +3\r\n")},
        {"a length with a minus", content_length, Post("Content-Length: -3\r\n")},
        {"a hexadecimal length", content_length, Post("Content-Length: 0x3\r\n")},
        {"an empty length", content_length, Post("Content-Length:\r\n")},
        {"a length above 64 bits", content_length, Post("Content-Length: 18446744073709551619\r\n")},
        {"a length, then chunked", any, Post("Content-Length: 3\r\nTransfer-Encoding: chunked\r\n")},
        {"chunked, then a length", any, Post("Transfer-Encoding: chunked\r\nContent-Length: 3\r\n")},
        {"an unknown coding", transfer_encoding, Post("Transfer-Encoding: xchunked\r\n")},
        {"identity as coding", transfer_encoding, Post("Transfer-Encoding: identity\r\n")},
        {"chunked, and more after it", transfer_encoding, Post("Transfer-Encoding: chunked, gzip\r\n")},
        {"chunked twice", transfer_encoding, Post("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n")},
        {"a quoted coding", transfer_encoding, Post("Transfer-Encoding: \"chunked\"\r\n")},
        {"a coding after a vertical tab", any, Post("Transfer-Encoding: \vchunked\r\n")},
        {"chunked in HTTP/1.0", transfer_encoding, "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n"},
        {"bare LF after the request line", any, "GET / HTTP/1.1\nHost: a\r\n\r\n"},
        {"bare LF after a header", any, "GET / HTTP/1.1\r\nHost: a\nX: y\r\n\r\n"},
        {"bare LF at the end", any, "GET / HTTP/1.1\r\nHost: a\r\n\n"},
        {"bare CR in a value", any, Get("X: y\rZ: a\r\n")},
        {"CR CR LF", any, Get("X: y\r\r\n")},
        {"bare LF before the request", any, "\nGET / HTTP/1.1\r\nHost: a\r\n\r\n"},
        {"NUL in a value", any, Get(<<"X: y", 0, "z\r\n">>)},
        {"NUL in a name", any, Get(<<"X", 0, ": y\r\n">>)},
        {"a control character in a value", any, Get(<<"X: y", 1, "z\r\n">>)},
        {"DEL in a value", any, Get(<<"X: y", 127, "z\r\n">>)},
        {"a space before the colon", any, Post("Content-Length : 3\r\n")},
        {"a tab before the colon", any, Post("Content-Length\t: 3\r\n")},
        {"a space before the name", any, "GET / HTTP/1.1\r\n Host: a\r\n\r\n"},
        {"a folded line", any, Get("X: y\r\n z\r\n")},
        {"a folded coding", any, Post("Transfer-Encoding:\r\n chunked\r\n")},
        {"a header without a colon", any, Get("X\r\n")},
        {"an empty name", any, Get(": y\r\n")},
        {"a byte above 127 in a name", any, Get(<<"X", 233, ": y\r\n">>)},
        {"brackets in a name", any, Get("X[1]: y\r\n")},
        {"no version", any, Line("GET /")},
        {"HTTP/0.9", version, Line("GET / HTTP/0.9")},
        {"HTTP/2.0", version, Line("GET / HTTP/2.0")},
        {"HTTP/1.2", version, Line("GET / HTTP/1.2")},
        {"HTTP/01.1", any, Line("GET / HTTP/01.1")},
        {"http/1.1", any, Line("GET / http/1.1")},
        {"another protocol", any, Line("GET / ICE/1.0")},
        {"bytes after the version", any, Line("GET / HTTP/1.1 x")},
        {"two spaces after the method", any, Line("GET  / HTTP/1.1")},
        {"two spaces before the version", any, Line("GET /  HTTP/1.1")},
        {"a tab after the method", any, Line("GET\t/ HTTP/1.1")},
        {"a space before the method", any, Line(" GET / HTTP/1.1")},
        {"an unknown method", method, Line("FROB / HTTP/1.1")},
        {"a method in lower case", method, Line("get / HTTP/1.1")},
        {"the first line of HTTP/2", any, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"},
        {"a target without a slash", any, Line("GET x HTTP/1.1")},
        {"* of GET", target, Line("GET * HTTP/1.1")},
        {"an authority of GET", any, Line("GET a:80 HTTP/1.1")},
        {"a path of CONNECT", any, Line("CONNECT / HTTP/1.1")},
        {"CONNECT without a port", any, Line("CONNECT a HTTP/1.1")},
        {"an address of another host", target, Line("GET http://b/ HTTP/1.1")},
        {"an address with a user", target, Line("GET http://u@a/ HTTP/1.1")},
        {"another scheme", target, Line("GET ftp://a/ HTTP/1.1")},
        {"a fragment", target, Line("GET /#x HTTP/1.1")},
        {"a byte above 127 in the target", any, Line(<<"GET /", 233, " HTTP/1.1">>)},
        {"no Host", host, "GET / HTTP/1.1\r\n\r\n"},
        {"two Hosts", host, Get("Host: b\r\n")},
        {"a Host with a path", host, "GET / HTTP/1.1\r\nHost: a/b\r\n\r\n"},
        {"a Host with a user", host, "GET / HTTP/1.1\r\nHost: u@a\r\n\r\n"},
        {"two names in a Host", host, "GET / HTTP/1.1\r\nHost: a, b\r\n\r\n"},
        {"a Host with another port than digits", host, "GET / HTTP/1.1\r\nHost: a:b\r\n\r\n"},
        {"a chunk's size with 0x", any, Chunks("0x3\r\nabc\r\n0\r\n\r\n")},
        {"a chunk's size with a minus", any, Chunks("-3\r\nabc\r\n0\r\n\r\n")},
        {"no size of a chunk", any, Chunks("\r\nabc\r\n0\r\n\r\n")},
        {"a chunk's size above 64 bits", any, Chunks("10000000000000003\r\nabc\r\n0\r\n\r\n")},
        {"a chunk's size ended by LF", any, Chunks("3\nabc\r\n0\r\n\r\n")},
        {"a chunk's extension ended by LF", any, Chunks("3;x\nabc\r\n0\r\n\r\n")},
        {"a chunk longer than its size", any, Chunks("3\r\nabcd\r\n0\r\n\r\n")},
        {"a chunk ended by LF", any, Chunks("3\r\nabc\n0\r\n\r\n")},
        {"a length in the trailers", trailer, Chunks("0\r\nContent-Length: 3\r\n\r\n")},
        {"a coding in the trailers", any, Chunks("0\r\nTransfer-Encoding: chunked\r\n\r\n")},
        {"trailers ended by LF", any, Chunks("0\r\nX: y\r\n\n")}
    ]].

%% Each row: what it is, what each of the parsers does.
table() ->
    ["| request | pelton_http | decode_packet | cowlib |\n|---|---|---|---|\n",
     [io_lib:format("| ~ts | ~s | ~s | ~s |~n", [Name, pelton(Bytes), decode_packet(Bytes), cowlib(Bytes)]) ||
         {Name, _, Bytes} <- requests()]].

print_table() -> io:put_chars(table()).

pelton(Bytes) ->
    case pelton_http:feed(pelton_http:new(request), Bytes) of
        {error, Reason, _} -> io_lib:format("`~s`", [Reason]);
        {ok, _} -> "takes"
    end.

decode_packet(Bytes) -> decode_packet(erlang:decode_packet(http_bin, Bytes, []), Bytes).

decode_packet({ok, {http_request, _, _, _}, Rest}, Bytes) ->
    decode_packet(erlang:decode_packet(httph_bin, Rest, []), Bytes);
decode_packet({ok, {http_header, _, _, _, _}, Rest}, Bytes) ->
    decode_packet(erlang:decode_packet(httph_bin, Rest, []), Bytes);
decode_packet({ok, http_eoh, Rest}, Bytes) -> head_taken(Rest, Bytes);
decode_packet({more, _}, _Bytes) -> "waits";
decode_packet(_, _Bytes) -> "refuses".

%% Debian's cowlib has no function for request lines.
cowlib(Bytes) ->
    [Line, Rest] = binary:split(Bytes, <<"\r\n">>),
    try lists:member(Line, [<<"GET / HTTP/1.1">>, <<"POST / HTTP/1.1">>, <<"POST / HTTP/1.0">>]) andalso
        cow_http:parse_headers(Rest)
    of
        false -> "";
        {_, Body} -> head_taken(Body, Bytes)
    catch
        error:undef -> "";
        error:_ -> "refuses"
    end.

%% The two read heads only.
head_taken(Rest, Bytes) ->
    case binary:split(Bytes, <<"\r\n\r\n">>) of
        [_, Body] when Body =/= <<>>, Body =:= Rest -> "no bodies";
        _ -> "takes"
    end.
