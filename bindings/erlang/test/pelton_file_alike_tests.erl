%% pelton_file beside `file' with `raw': the same operations in two directories have the same results, and leave the
%% same bytes.
-module(pelton_file_alike_tests).
-include_lib("eunit/include/eunit.hrl").
-include_lib("kernel/include/file.hrl").

%% Sequences, and operations in each.
-define(SEQUENCES, 100).
-define(OPERATIONS, 60).

%% PELTON_SEED, which a failure prints, repeats one sequence. CI always runs the same ones, so that it judges the change
%% alone.
alike_test_() ->
    {timeout, 300, fun() ->
        case os:getenv("PELTON_SEED") of
            false ->
                First = case os:getenv("PELTON_CI") of false -> erlang:system_time(); _ -> 1 end,
                [sequence(First + Number) || Number <- lists:seq(1, ?SEQUENCES)];
            Seed -> sequence(list_to_integer(Seed))
        end
    end}.

sequence(Seed) ->
    _ = rand:seed(exsss, Seed),
    Path = pelton_file_tests:directory(),
    Sides = {side(file, Path("before")), side(pelton_file, Path("pelton"))},
    try
        {FileSide, PeltonSide} = steps(?OPERATIONS, Sides, Seed, []),
        [close(Side) || Side <- [FileSide, PeltonSide]],
        [Same, Same] = [contents(Path(Side)) || Side <- ["before", "pelton"]]
    catch Class:Reason:Stack ->
        io:format(user, "PELTON_SEED=~b~n", [Seed]),
        erlang:raise(Class, Reason, Stack)
    after
        pelton_file_tests:remove(Path)
    end.

side(Module, Directory) ->
    ok = file:make_dir(Directory),
    {Module, Directory, #{}}.

close({Module, _, Files}) -> [Module:close(File) || File <- maps:values(Files)].

steps(0, Sides, _Seed, _Done) ->
    Sides;
steps(Left, {FileSide, PeltonSide}, Seed, Done) ->
    Operation = operation(maps:keys(element(3, FileSide))),
    {Wanted, NextFile} = do(Operation, FileSide),
    {Found, NextPelton} = do(Operation, PeltonSide),
    %% Data may be long, so the report shortens it.
    Wanted =:= Found orelse error({differs, [{seed, Seed}, {operation, short(Operation)}, {file, short(Wanted)},
                                             {pelton_file, short(Found)},
                                             {after_these, [short(One) || One <- lists:sublist(Done, 8)]}]}),
    steps(Left - 1, {NextFile, NextPelton}, Seed, [Operation | Done]).

short(Term) -> lists:flatten(io_lib:format("~0tP", [Term, 25])).

%% Few names, so that operations use the same files.
name() -> element(rand:uniform(9), {"a", "b", <<"c">>, d, "d", "d/e", "d/f", "nowhere/a", "\x{e4}\x{263a}"}).
offset() ->
    case rand:uniform(20) of
        1 -> beyond();
        _ -> element(rand:uniform(6), {0, rand:uniform(100), rand:uniform(10000), rand:uniform(100000), -1, {bof,
            rand:uniform(50)}})
    end.
size() ->
    case rand:uniform(30) of
        1 -> beyond();
        _ -> amount()
    end.
amount() -> element(rand:uniform(4), {1, rand:uniform(100), rand:uniform(10000), rand:uniform(400000)}).
%% Numbers beyond a signed 64-bit integer.
beyond() -> element(rand:uniform(2), {1 bsl 63, 5 + (1 bsl 64)}).
data() ->
    case rand:uniform(5) of
        5 -> "not \x{263a} bytes";
        _ -> bytes()
    end.
bytes() ->
    case rand:uniform(5) of
        1 -> "";
        2 -> rand:bytes(rand:uniform(100));
        3 -> [rand:bytes(rand:uniform(1000)), [$a, "bc"], <<"d">>];
        4 -> rand:bytes(rand:uniform(300000));
        5 -> ["a line\n", rand:bytes(rand:uniform(20)), "\r\nand\n\n"]
    end.
location() ->
    case rand:uniform(8) of
        1 -> bof;
        2 -> cur;
        3 -> eof;
        4 -> {eof, rand:uniform(100) - 60};
        5 -> {cur, rand:uniform(100) - 60};
        6 -> {bof, rand:uniform(5000)};
        7 -> rand:uniform(5000);
        8 -> element(rand:uniform(5), {-3, -beyond() - 1, beyond(), {cur, beyond()}, {eof, -beyond() - 1}})
    end.
modes() -> [Mode || Mode <- [read, write, append, exclusive, binary, sync, directory],
            rand:uniform(10) =< weight(Mode)].
%% Operations on a handle. Writes are delayed for longer than the test lasts.
buffers() ->
    [Mode || Mode <- [{delayed_write, rand:uniform(3000) - 1, 3600000}, element(rand:uniform(2), {read_ahead,
        {read_ahead, rand:uniform(2000)}})],
             rand:uniform(3) =:= 1].
weight(read) -> 8;
weight(write) -> 6;
weight(binary) -> 7;
weight(_) -> 1.

operation([]) -> element(rand:uniform(2), {{open, rand:uniform(4), name(), modes() ++ buffers()}, by_name()});
operation(Files) ->
    File = lists:nth(rand:uniform(length(Files)), Files),
    case rand:uniform(23) of
        1 -> {open, rand:uniform(4), name(), modes() ++ buffers()};
        2 -> by_name();
        3 -> by_name();
        4 -> by_name();
        5 -> {close, File};
        6 -> {stream, File, [streaming() || _ <- lists:seq(1, rand:uniform(8))]};
        7 -> {stream, File, [streaming() || _ <- lists:seq(1, rand:uniform(8))]};
        8 -> {on, File, read, [beyond()]};
        9 -> {on, File, pread, [number(offset()), size()]};
        10 -> {on, File, pread, [[{number(offset()), size()} || _ <- lists:seq(1, rand:uniform(5))]]};
        11 -> {on, File, write, [data()]};
        12 -> {on, File, write, [data()]};
        13 -> {on, File, pwrite, [number(offset()), data()]};
        14 -> {on, File, pwrite, [number(offset()), data()]};
        15 -> {on, File, pwrite, [[{number(offset()), bytes()} || _ <- lists:seq(1, rand:uniform(5))]]};
        16 -> {on, File, position, [location()]};
        17 -> {on, File, position, [location()]};
        18 -> {on, File, truncate, []};
        19 -> {on, File, element(rand:uniform(2), {sync, datasync}), []};
        20 -> element(rand:uniform(2), {{on, File, allocate, [rand:uniform(1000), element(rand:uniform(4), {1,
            rand:uniform(1000), rand:uniform(1000), beyond()})]},
                                        {on, File, advise, [number(offset()), 0, element(rand:uniform(3), {normal,
                                            will_need, nonsense})]}});
        21 -> {stream, File, [{read_line, []}]};
        22 -> {stream, File, [{read_line, []} || _ <- lists:seq(1, rand:uniform(8))]};
        23 -> {copy, File, without_append(with_modes(name())), rand:uniform(1000) - 1}
    end.

%% Operations on the position. After a read that fails, `file' drops what it had read ahead.
streaming() ->
    element(rand:uniform(6), {{read, [amount()]}, {read, [amount()]}, {read, [rand:uniform(100)]}, {read_line, []},
                              {write, [data()]}, {truncate, []}}).

%% `file' with raw has no others.
number({bof, Offset}) -> Offset;
number(Offset) -> Offset.

by_name() ->
    case rand:uniform(16) of
        1 -> {named, read_file, [name()], []};
        2 -> {named, write_file, [name()], [data()]};
        3 -> {named, write_file, [name()], [data(), modes()]};
        4 -> {named, read_file_info, [name()], [[{time, universal}]]};
        5 -> {named, read_link_info, [name()], [[{time, posix}]]};
        6 -> {named, list_dir, [element(rand:uniform(3), {"", "d", name()})], []};
        7 -> {named, delete, [name()], []};
        8 -> {named, rename, [name(), name()], []};
        9 -> {named, copy, [with_modes(name()), without_append(with_modes(name()))], []};
        10 -> {named, make_dir, [name()], []};
        11 -> {named, make_link, [name(), name()], []};
        12 -> {named, make_symlink, [name(), name()], []};
        13 -> {named, read_link, [name()], []};
        14 -> {named, del_dir, [name()], []};
        15 -> {named, write_file_info, [name()], [times(), [{time, posix}]]};
        16 -> {named, make_dir, ["d"], []}
    end.

with_modes(Name) ->
    case rand:uniform(2) of
        1 -> Name;
        2 -> {Name, modes()}
    end.

%% Copying a file to its own end would never finish.
without_append({Name, Modes}) -> {Name, Modes -- [append]};
without_append(Name) -> Name.

times() ->
    Time = fun() -> element(rand:uniform(2), {undefined, 1000000000 + rand:uniform(100)}) end,
    #file_info{atime = 1000000000 + rand:uniform(100), mtime = Time()}.

do({open, Number, Name, Modes}, {Module, Directory, Files} = Side) ->
    case Module:open(path(Directory, Name), [raw | Modes]) of
        {ok, File} ->
            _ = [Module:close(Old) || #{Number := Old} <- [Files]],
            {ok, {Module, Directory, Files#{Number => File}}};
        Error -> {Error, Side}
    end;
do({close, Number}, {Module, Directory, Files}) ->
    {File, Rest} = maps:take(Number, Files),
    {{Module:close(File), Module:close(File)}, {Module, Directory, Rest}};
do({on, Number, Function, Arguments}, {Module, _, Files} = Side) ->
    {outcome(fun() -> apply(Module, Function, [maps:get(Number, Files) | Arguments]) end), Side};
%% `file' returns what it has read ahead, although a write changed those bytes, until it queries the position.
do({stream, Number, Operations}, {Module, _, Files} = Side) ->
    File = maps:get(Number, Files),
    {[outcome(fun() -> apply(Module, Function, [File | Arguments]) end) || {Function,
        Arguments} <- Operations ++ [{position, [cur]}]], Side};
do({copy, From, To, Bytes}, {Module, Directory, Files} = Side) ->
    %% For a directory, fstat and read have different errors.
    case outcome(fun() -> Module:copy(maps:get(From, Files), path(Directory, To), Bytes) end) of
        {error, Reason} when Reason =:= eisdir; Reason =:= einval -> {error, Side};
        Result -> {{Result, Module:position(maps:get(From, Files), cur)}, Side}
    end;
do({named, Function, Names, Arguments}, {Module, Directory, _} = Side) ->
    %% `file' has no del_file.
    Result = outcome(fun() -> apply(Module, Function, [path(Directory, Name) || Name <- Names] ++ Arguments) end),
    {comparable(Function, Result, Directory), Side}.

outcome(Fun) ->
    try Fun() catch error:Reason -> {raised, Reason} end.

path(Directory, {Name, Modes}) -> {path(Directory, Name), Modes};
path(Directory, Name) when is_binary(Name) -> filename:join(Directory, Name);
path(Directory, "") -> Directory;
path(Directory, Name) when is_atom(Name) -> filename:join(Directory, atom_to_list(Name));
path(Directory, Name) -> Directory ++ "/" ++ Name.

%% Without the fields that differ between two directories.
comparable(_, {ok, #file_info{} = Info}, _) ->
    {ok, Info#file_info{atime = 0, mtime = 0, ctime = 0, inode = 0}};
comparable(list_dir, {ok, Names}, _) -> {ok, lists:sort(Names)};
comparable(read_link, {ok, To}, Directory) -> {ok, string:replace(To, Directory, "")};
comparable(_, Result, _) -> Result.

contents(Directory) ->
    {ok, Names} = file:list_dir_all(Directory),
    [{Name, content(filename:join(Directory, Name))} || Name <- lists:sort(Names)].

content(Path) ->
    {ok, #file_info{type = Type, mode = Mode}} = file:read_link_info(Path),
    case Type of
        directory -> {Mode, contents(Path)};
        regular -> {Mode, file:read_file(Path)};
        symlink -> symlink
    end.
