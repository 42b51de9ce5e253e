%% Echo with Erlang: a process a connection, passive in the server, active in the client.
-module(echo).
-export([main/0]).

-define(HOST, {127, 0, 0, 1}).
-define(NUDGE, 1000).

main() ->
    process_flag(trap_exit, true),
    case init:get_plain_arguments() of
        ["server"] -> serve();
        ["client", Port, Connections, Place] -> talk(list_to_integer(Port), list_to_integer(Connections), Place)
    end.

serve() ->
    {ok, Listener} = gen_tcp:listen(0, [binary, {ip, ?HOST}, {active, false}, {backlog, 128}, {exit_on_close, false}]),
    {ok, Port} = inet:port(Listener),
    io:format("~b~n", [Port]),
    accept(Listener).

accept(Listener) ->
    {ok, Conn} = gen_tcp:accept(Listener),
    Pid = spawn(fun() -> receive go -> echo(Conn) end end),
    ok = gen_tcp:controlling_process(Conn, Pid),
    Pid ! go,
    accept(Listener).

echo(Conn) ->
    case gen_tcp:recv(Conn, 0) of
        {ok, Data} ->
            ok = gen_tcp:send(Conn, Data),
            echo(Conn);
        {error, closed} ->
            ok = gen_tcp:shutdown(Conn, write),
            ok = gen_tcp:close(Conn)
    end.

talk(Port, Connections, Place) ->
    Pids = [spawn_link(fun() -> client(Port, Place, N) end) || N <- lists:seq(0, Connections - 1)],
    [receive {'EXIT', Pid, normal} -> ok; {'EXIT', Pid, Why} -> fail(Why) end || Pid <- Pids],
    halt(0).

fail(Why) ->
    io:format(standard_error, "~p~n", [Why]),
    halt(1).

client(Port, Place, Number) ->
    Name = filename:join(Place, integer_to_list(Number)),
    {ok, Data} = file:read_file(Name ++ ".in"),
    {ok, Conn} = gen_tcp:connect(?HOST, Port, [binary, {active, true}, {exit_on_close, false}]),
    nudge(Conn, filename:join(Place, "wait")),
    Sender = spawn_link(fun() ->
        ok = gen_tcp:send(Conn, Data),
        ok = gen_tcp:shutdown(Conn, write)
    end),
    ok = file:write_file(Name ++ ".out", collect(Conn, [])),
    _ = Sender,
    gen_tcp:close(Conn).

%% Exchanges a little while the test wants to see that.
nudge(Conn, Wait) ->
    case filelib:is_file(Wait) of
        true ->
            ok = gen_tcp:send(Conn, <<0:(?NUDGE * 8)>>),
            nudged(Conn, ?NUDGE),
            nudge(Conn, Wait);
        false -> ok
    end.

nudged(_Conn, 0) -> ok;
nudged(Conn, Owed) when Owed > 0 ->
    receive {tcp, Conn, Data} -> nudged(Conn, Owed - byte_size(Data)) end.

collect(Conn, Got) ->
    receive
        {tcp, Conn, Data} -> collect(Conn, [Data | Got]);
        {tcp_closed, Conn} -> lists:reverse(Got);
        {tcp_error, Conn, Why} -> exit(Why)
    end.
