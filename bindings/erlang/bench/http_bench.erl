%% Heads of three sizes by pelton_http, erlang:decode_packet and cowlib: nanoseconds for one, the median of rounds in
%% turn, in a process that does nothing else. After each median: how many times pelton_http's time it is.
%% `./run bench http erlang` runs it.
-module(http_bench).
-export([main/0]).

-define(ROUNDS, 25).

main() ->
    {Major, Minor, Patch} = pelton_http:llhttp_version(),
    io:format("OTP ~s, llhttp ~b.~b.~b; nanoseconds for a head, median of ~b rounds~n",
              [erlang:system_info(otp_release), Major, Minor, Patch, ?ROUNDS]),
    [table(io_lib:format("request of ~b B", [byte_size(Head)]), requests(Head)) || Head <- [small(), browser(), large()]],
    [table(io_lib:format("response of ~b B", [byte_size(Head)]), responses(Head)) ||
        Head <- [response(1), response(12)]],
    table("request of 660 B, byte by byte", by_bytes(browser())),
    with_mailbox(1000000, fun() -> table("request of 660 B, a mailbox of a million", parsers(browser())) end).

table(Title, Ways) ->
    Warm = [{Name, iterations(Way), Way} || {Name, Way} <- Ways],
    Rounds = [[time(Count, Way) / Count || {_, Count, Way} <- Warm] || _ <- lists:seq(1, ?ROUNDS)],
    [Ours | _] = Medians = [median([lists:nth(I, Round) || Round <- Rounds]) || I <- lists:seq(1, length(Warm))],
    io:format("~n~ts~n", [Title]),
    [io:format("  ~-34s ~10.b  ~6.2f~n", [Name, round(Median), Median / Ours]) ||
        {{Name, _}, Median} <- lists:zip(Ways, Medians)].

%% Of 5 ms, found after the code is warm: shorter than most turns of other processes of the machine.
iterations(Way) ->
    _ = time(100, Way),
    max(3, round(100 * 5.0e6 / max(1, time(100, Way)))).

time(Count, Way) ->
    Before = erlang:monotonic_time(nanosecond),
    repeat(Count, Way),
    erlang:monotonic_time(nanosecond) - Before.

repeat(0, _Way) -> ok;
repeat(Count, Way) ->
    _ = Way(),
    repeat(Count - 1, Way).

median(List) -> lists:nth(length(List) div 2 + 1, lists:sort(List)).

requests(Head) ->
    [Ours, Decode] = parsers(Head),
    [Ours,
     {"pelton_http, references",
      fun() -> {ok, _, _, _, _, _} = pelton_http:parse_request(Head, [{values, refer}]) end},
     Decode,
     {"decode_packet, names in lower case", fun() -> decode(http_bin, Head, fun lower/1) end}
     | cowlib(Head)].

responses(Head) ->
    [{"pelton_http", fun() -> {ok, _, _, _, _, _} = pelton_http:parse_response(Head) end},
     {"decode_packet", fun() -> decode(http_bin, Head, fun(Name) -> Name end) end}].

%% A reader over decode_packet begins with all bytes again, or waits for a line.
by_bytes(Head) ->
    [{"pelton_http:feed", fun() -> feed(pelton_http:new(request), Head) end},
     {"decode_packet, line by line", fun() -> lines(http_bin, <<>>, Head) end}].

feed(Parser, <<Byte, Rest/binary>>) ->
    case pelton_http:feed(Parser, <<Byte>>) of
        {ok, []} -> feed(Parser, Rest);
        {ok, [{request, _, _, _, _} | _]} -> <<>> = Rest
    end.

lines(Type, Before, <<Byte, Rest/binary>>) ->
    lines_of(Type, <<Before/binary, Byte>>, Rest).
lines_of(Type, Bytes, More) ->
    case erlang:decode_packet(Type, Bytes, []) of
        {more, _} -> lines(Type, Bytes, More);
        {ok, http_eoh, <<>>} -> <<>> = More;
        {ok, _, Rest} when Rest =/= <<>> -> lines_of(httph_bin, Rest, More);
        {ok, _, Rest} -> lines(httph_bin, Rest, More)
    end.

%% In a process of its own, whose heap is as small as that of the other rounds: another one sends the messages.
with_mailbox(Count, Bench) ->
    {Process, Monitor} = spawn_opt(fun() -> receive start -> Bench() end end, [monitor, {message_queue_data, off_heap}]),
    [Process ! Number || Number <- lists:seq(1, Count)],
    Process ! start,
    receive {'DOWN', Monitor, process, Process, Reason} -> normal = Reason end.

parsers(Head) ->
    [{"pelton_http", fun() -> {ok, _, _, _, _, _} = pelton_http:parse_request(Head) end},
     {"decode_packet", fun() -> decode(http_bin, Head, fun(Name) -> Name end) end}].

decode(Type, Head, Name) ->
    {ok, Line, Rest} = erlang:decode_packet(Type, Head, []),
    {Line, headers(Rest, Name, [])}.

headers(Bytes, Name, Before) ->
    case erlang:decode_packet(httph_bin, Bytes, []) of
        {ok, {http_header, _, Found, _, Value}, Rest} -> headers(Rest, Name, [{Name(Found), Value} | Before]);
        {ok, http_eoh, _Rest} -> lists:reverse(Before)
    end.

lower(Name) when is_atom(Name) -> string:lowercase(atom_to_binary(Name));
lower(Name) -> string:lowercase(Name).

%% Of Debian's, which has no function for request lines: its time is that of the headers alone.
cowlib(Head) ->
    case code:which(cow_http) of
        non_existing -> [];
        _ ->
            [_, Headers] = binary:split(Head, <<"\r\n">>),
            [{"cowlib, headers alone", fun() -> {_, _} = cow_http:parse_headers(Headers) end}]
    end.

small() -> <<"GET /status HTTP/1.1\r\nHost: www.example.org\r\nUser-Agent: client/1.0\r\nAccept: application/*\r\n\r\n">>.

browser() -> padded(660, [
    "GET /articles/2024/list?page=2&sort=date HTTP/1.1\r\nHost: www.example.org\r\nConnection: keep-alive\r\n",
    "Cache-Control: max-age=0\r\nUpgrade-Insecure-Requests: 1\r\nUser-Agent: Mozilla/5.0 (X11; Linux x86_64) ",
    "AppleWebKit/537.36 (KHTML, like Gecko) Chrome/120.0.0.0 Safari/537.36\r\nAccept: text/html,application/xml;q=0.9,",
    "image/avif,image/webp,*/*;q=0.8\r\nSec-Fetch-Site: same-origin\r\nSec-Fetch-Mode: navigate\r\nSec-Fetch-User: ?1\r\n",
    "Accept-Encoding: gzip, deflate, br\r\nAccept-Language: en-US,en;q=0.9\r\n"]).

large() -> padded(3879, [binary:part(browser(), 0, byte_size(browser()) - 2),
                         [["X-Forwarded-Detail-", integer_to_list(N), ": ", lists:duplicate(60, $v), "\r\n"] ||
                             N <- lists:seq(10, 42)]]).

response(Count) ->
    iolist_to_binary(["HTTP/1.1 200 OK\r\nContent-Length: 12\r\n",
                      [["X-Header-", integer_to_list(N), ": some value of usual size\r\n"] ||
                          N <- lists:seq(1, Count)], "\r\n"]).

%% To the size, by a cookie.
padded(Size, Parts) ->
    Missing = Size - iolist_size(Parts) - length("Cookie: \r\n\r\n"),
    iolist_to_binary([Parts, "Cookie: ", lists:duplicate(Missing, $c), "\r\n\r\n"]).
