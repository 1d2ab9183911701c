%% @doc HTTP/1 requests and responses from bytes, by llhttp: for a process that reads a socket itself.
%%
%% What two servers could read differently is refused, so that no request hides in another one: two lengths, a length
%% beside a transfer-encoding, bare line feeds, folded lines, and all that README.md lists. No function waits. A parser
%% may be used by any process, but by one at a time.
%%
%% ```
%% {ok, <<"GET">>, <<"/">>, {1, 1}, [{<<"host">>, <<"a">>}], <<>>} =
%%     pelton_http:parse_request(<<"GET / HTTP/1.1\r\nHost: a\r\n\r\n">>).
%% '''
-module(pelton_http).
-export([parse_request/1, parse_request/2, parse_response/1, parse_response/2]).
-export([new/1, new/2, feed/2, finish/1, format_error/1, llhttp_version/0]).
-export_type([parser/0, headers/0, version/0, option/0, event/0, reason/0]).
-on_load(load/0).

-define(DEFAULTS, {0, 65536, 100, 256, 16384}).
-define(DEFAULT_LIMITS, <<0:32, 65536:32, 100:32, 256:32, 16384:32>>).
%% What the NIF would otherwise make for each head; literals are never copied. Versions, the empty text, that of status
%% 200, methods, and names in lower case.
-define(LITERALS, {
    {1, 0}, {1, 1}, <<>>, <<"OK">>,
    <<"GET">>, <<"HEAD">>, <<"POST">>, <<"PUT">>, <<"DELETE">>, <<"CONNECT">>, <<"OPTIONS">>, <<"TRACE">>, <<"PATCH">>,
    <<"accept">>, <<"accept-charset">>, <<"accept-encoding">>, <<"accept-language">>, <<"accept-ranges">>,
    <<"access-control-allow-credentials">>, <<"access-control-allow-headers">>, <<"access-control-allow-methods">>,
    <<"access-control-allow-origin">>, <<"access-control-expose-headers">>, <<"access-control-max-age">>,
    <<"access-control-request-headers">>, <<"access-control-request-method">>, <<"age">>, <<"allow">>, <<"alt-svc">>,
    <<"authorization">>, <<"cache-control">>, <<"connection">>, <<"content-disposition">>, <<"content-encoding">>,
    <<"content-language">>, <<"content-length">>, <<"content-location">>, <<"content-range">>,
    <<"content-security-policy">>, <<"content-type">>, <<"cookie">>, <<"date">>, <<"dnt">>, <<"etag">>, <<"expect">>,
    <<"expires">>, <<"forwarded">>, <<"from">>, <<"host">>, <<"if-match">>, <<"if-modified-since">>,
    <<"if-none-match">>, <<"if-range">>, <<"if-unmodified-since">>, <<"keep-alive">>, <<"last-modified">>, <<"link">>,
    <<"location">>, <<"max-forwards">>, <<"origin">>, <<"pragma">>, <<"priority">>, <<"proxy-authenticate">>,
    <<"proxy-authorization">>, <<"proxy-connection">>, <<"range">>, <<"referer">>, <<"referrer-policy">>,
    <<"retry-after">>, <<"sec-ch-ua">>, <<"sec-ch-ua-mobile">>, <<"sec-ch-ua-platform">>, <<"sec-fetch-dest">>,
    <<"sec-fetch-mode">>, <<"sec-fetch-site">>, <<"sec-fetch-user">>, <<"sec-websocket-accept">>,
    <<"sec-websocket-extensions">>, <<"sec-websocket-key">>, <<"sec-websocket-protocol">>,
    <<"sec-websocket-version">>, <<"server">>, <<"set-cookie">>, <<"strict-transport-security">>, <<"te">>,
    <<"traceparent">>, <<"tracestate">>, <<"trailer">>, <<"transfer-encoding">>, <<"upgrade">>,
    <<"upgrade-insecure-requests">>, <<"user-agent">>, <<"vary">>, <<"via">>, <<"www-authenticate">>,
    <<"x-content-type-options">>, <<"x-forwarded-for">>, <<"x-forwarded-host">>, <<"x-forwarded-proto">>,
    <<"x-frame-options">>, <<"x-real-ip">>, <<"x-request-id">>, <<"x-requested-with">>
}).

-opaque parser() :: reference().
-type version() :: {1, 0 | 1}.
-type headers() :: [{LowerName :: binary(), Value :: binary()}].
-type option() :: {values, copy | refer} | {head_bytes_max, 1..1048576} | {headers_max, 0..256}
                | {name_bytes_max, pos_integer()} | {value_bytes_max, pos_integer()}.
%% `values': copies (the default), or references, which keep the whole packet in memory. The limits, in bytes and
%% headers: 65536, 100, 256 and 16384 if nothing else is said; `head_bytes_max' also is the limit of trailers, and
%% `value_bytes_max' that of the extensions of a message's chunks together.
-type event() :: {request, Method :: binary(), Target :: binary(), version(), headers()}
               | {response, version(), Status :: 100..999, Text :: binary(), headers()}
               | {body, binary()}
               | {done, Trailers :: headers(), KeepAlive :: boolean()}
               | {upgrade, Rest :: binary()}.
%% A message is a `request' or `response', any number of `body', then `done'. A `body' refers to its packet: copy what
%% is kept. `upgrade' follows `done' if the peer wants to go on in another protocol, of which `Rest' is the begin; if
%% you do not, answer in HTTP, and feed `Rest'.
-type reason() :: method | target | version | request_line | status_line | header_line | header_name | header_value
                | line_end | host | content_length | transfer_encoding | trailer | chunk | malformed | unfinished
                | after_close | head_bytes_max | headers_max | name_bytes_max | value_bytes_max.

load() ->
    Directory = case code:priv_dir(?MODULE) of
                    {error, bad_name} -> filename:join([filename:dirname(code:which(?MODULE)), "..", "priv"]);
                    Found -> Found
                end,
    erlang:load_nif(filename:join(Directory, "pelton_http"), {?LITERALS, ?DEFAULT_LIMITS}).

%% @equiv parse_request(Bytes, [])
-spec parse_request(binary()) -> {ok, Method :: binary(), Target :: binary(), version(), headers(), Rest :: binary()}
                               | more | {error, reason()}.
parse_request(Bytes) -> parse(request, Bytes, default, ?LITERALS).

%% @doc The head at the begin of `Bytes'. `more': it is not complete, read more and try again with all bytes, or use
%% {@link feed/2}, which does not begin again. Empty lines before it are skipped. After an error, answer 400 and close.
-spec parse_request(binary(), [option()]) ->
    {ok, Method :: binary(), Target :: binary(), version(), headers(), Rest :: binary()} | more | {error, reason()}.
parse_request(Bytes, Options) -> parse(request, Bytes, limits(Options), ?LITERALS).

%% @equiv parse_response(Bytes, [])
-spec parse_response(binary()) -> {ok, version(), Status :: 100..999, Text :: binary(), headers(), Rest :: binary()}
                                | more | {error, reason()}.
parse_response(Bytes) -> parse(response, Bytes, default, ?LITERALS).

%% @doc Like {@link parse_request/2}, of a response.
-spec parse_response(binary(), [option()]) ->
    {ok, version(), Status :: 100..999, Text :: binary(), headers(), Rest :: binary()} | more | {error, reason()}.
parse_response(Bytes, Options) -> parse(response, Bytes, limits(Options), ?LITERALS).

%% @equiv new(Type, [])
-spec new(request | response) -> parser().
new(Type) -> new(Type, []).

%% @doc A parser for what one peer sends over one connection. `{method, Method}' says which requests the responses
%% answer: no body follows after `<<"HEAD">>', another protocol after a 2xx to `<<"CONNECT">>'.
%%
%% ```
%% Parser = pelton_http:new(request),
%% {ok, []} = pelton_http:feed(Parser, <<"POST / HTTP/1.1\r\nHost: a\r\nContent-Le">>),
%% {ok, [{request, <<"POST">>, <<"/">>, {1, 1}, _}, {body, <<"xy">>}, {done, [], true}]} =
%%     pelton_http:feed(Parser, <<"ngth: 2\r\n\r\nxy">>).
%% '''
-spec new(request | response, [option() | {method, binary()}]) -> parser().
new(Type, Options) ->
    {Methods, Limits} = lists:partition(fun(Option) -> is_tuple(Option) andalso element(1, Option) =:= method end,
                                        Options),
    Answered = case Methods of
                   [{method, <<"HEAD">>}] when Type =:= response -> head;
                   [{method, <<"CONNECT">>}] when Type =:= response -> connect;
                   [{method, Method}] when Type =:= response, is_binary(Method) -> none;
                   [] -> none;
                   _ -> erlang:error(badarg, [Type, Options])
               end,
    new_parser(Type, limits(Limits), Answered).

%% @doc What the next bytes of the connection complete. After an error, which follows `Events', answer 400 and close:
%% each further call gives the same error.
-spec feed(parser(), binary()) -> {ok, Events :: [event()]} | {error, reason(), Events :: [event()]}.
feed(Parser, Bytes) -> feed(Parser, Bytes, 0, []).

feed(Parser, Bytes, Offset, Before) ->
    case feed_some(Parser, Bytes, Offset, ?LITERALS) of
        {more, Events, Next} -> feed(Parser, Bytes, Next, [Events | Before]);
        ok when Before =:= [] -> {ok, []};
        Result when Before =:= [] -> Result;
        ok -> {ok, lists:append(lists:reverse(Before))};
        {ok, Events} -> {ok, lists:append(lists:reverse(Before, [Events]))};
        {error, Reason, Events} -> {error, Reason, lists:append(lists:reverse(Before, [Events]))}
    end.

%% @doc The peer has closed the connection: the end of a response without a length, `unfinished' if within a message.
-spec finish(parser()) -> {ok, Events :: [event()]} | {error, reason(), Events :: [event()]}.
finish(Parser) ->
    case finish_parser(Parser, ?LITERALS) of
        ok -> {ok, []};
        Result -> Result
    end.

%% @doc A reason in words: what was found, what is wanted.
-spec format_error(reason()) -> string().
format_error(Reason) ->
    case Reason of
        method -> "an unknown method: wanted one of HTTP/1.1's or WebDAV's, in capitals";
        target -> "a target that is no path, no `*' of OPTIONS, no http address of the same Host, and no authority of "
                  "CONNECT; or with bytes that a target cannot have: wanted these percent-encoded";
        version -> "no version, or another one: wanted HTTP/1.0 or HTTP/1.1";
        request_line -> "a request line that is not method, target and version, with one space between them";
        status_line -> "a status line that is not version, three digits and text";
        header_line -> "a header that is not `name: value' on one line: no space before the colon, no folded line";
        header_name -> "a byte in a header's name that names cannot have";
        header_value -> "a control character in a header's value";
        line_end -> "a line that does not end with CR LF";
        host -> "no Host in HTTP/1.1, two of them, or one that is no host and port";
        content_length -> "a content-length that is not one decimal number, twice, or beside a transfer-encoding";
        transfer_encoding -> "a transfer-encoding that is not `chunked', once, in HTTP/1.1";
        trailer -> "a trailer that must be in the head: host, content-length or transfer-encoding";
        chunk -> "a chunk that does not begin with its size in hexadecimal digits";
        malformed -> "bytes that are not HTTP/1";
        unfinished -> "the end of the connection within a message";
        after_close -> "bytes after the last message, which had said that the connection closes";
        head_bytes_max -> "a head of more bytes than head_bytes_max: raise it if such heads are legitimate";
        headers_max -> "more headers than headers_max: raise it if that is legitimate";
        name_bytes_max -> "a header's name of more bytes than name_bytes_max: raise it if that is legitimate";
        value_bytes_max -> "a header's value, or extensions of chunks, of more bytes than value_bytes_max: raise it "
                           "if that is legitimate"
    end.

%% @doc Of the llhttp that was compiled in.
-spec llhttp_version() -> {Major :: pos_integer(), Minor :: non_neg_integer(), Patch :: non_neg_integer()}.
llhttp_version() -> erlang:nif_error(not_loaded).

limits([]) -> default;
limits(Options) ->
    {Refers, Head, Headers, Name, Value} = lists:foldl(fun limit/2, ?DEFAULTS, Options),
    <<Refers:32, Head:32, Headers:32, Name:32, Value:32>>.

limit({values, copy}, Limits) -> setelement(1, Limits, 0);
limit({values, refer}, Limits) -> setelement(1, Limits, 1);
limit({head_bytes_max, N}, Limits) when is_integer(N), N > 0, N =< 1048576 -> setelement(2, Limits, N);
limit({headers_max, N}, Limits) when is_integer(N), N >= 0, N =< 256 -> setelement(3, Limits, N);
limit({name_bytes_max, N}, Limits) when is_integer(N), N > 0, N =< 1048576 -> setelement(4, Limits, N);
limit({value_bytes_max, N}, Limits) when is_integer(N), N > 0, N =< 1048576 -> setelement(5, Limits, N);
limit(Option, _Limits) -> erlang:error(badarg, [Option]).

-spec parse(request | response, binary(), default | binary(), tuple()) -> any().
parse(_Type, _Bytes, _Limits, _Literals) -> erlang:nif_error(not_loaded).

-spec new_parser(request | response, default | binary(), none | head | connect) -> parser().
new_parser(_Type, _Limits, _Answered) -> erlang:nif_error(not_loaded).

-spec feed_some(parser(), binary(), non_neg_integer(), tuple()) ->
    ok | {ok, [event()]} | {error, reason(), [event()]} | {more, [event()], pos_integer()}.
feed_some(_Parser, _Bytes, _Offset, _Literals) -> erlang:nif_error(not_loaded).

-spec finish_parser(parser(), tuple()) -> ok | {ok, [event()]} | {error, reason(), [event()]}.
finish_parser(_Parser, _Literals) -> erlang:nif_error(not_loaded).
