"""Microseconds of a call between two processes: pelton beside sockets, aiohttp and grpc.aio, by turns.

python bench/call.py [ROUNDS] [--beside-load N] [--bytes N] [--count N] [--uvloop] prints of each round's mean time the
median, the lowest, the highest and the worst tenth, and pelton's time as a part of each other one with a 95 % bootstrap
interval: one call at a time, and 100 tasks, each of which does so. A request and its reply have 64 bytes. aiohttp and
grpc are left out where they are not installed: pip install -r bench/requirements.txt.
"""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import socket
import struct
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pelton
import pelton.aio
from results import arguments, beside_load, ratio, spread

TASKS = 100
LENGTH = struct.Struct("<I")

# Of a service: it serves at a path until it is killed. Of a client: it returns a function that calls.
Call = Callable[[bytes], Awaitable[bytes]]


def new_loop(uses_uvloop: bool) -> Callable[[], asyncio.AbstractEventLoop]:
    if uses_uvloop:
        import uvloop

        return uvloop.new_event_loop
    return asyncio.new_event_loop


# --- pelton ---


async def pelton_serve(path: str) -> None:
    async def handler(request: pelton.Request) -> bytes:
        return request.data

    with pelton.aio.Service.listen(f"unix:{path}") as service:
        await service.run(handler)


async def pelton_client(path: str, stack: AsyncExitStack) -> Call:
    client = await stack.enter_async_context(await pelton.aio.Client.connect(f"unix:{path}", timeout=10))
    return client.call


# --- asyncio: messages with their length before them, by streams, and by a protocol of its own ---


async def streams_serve(path: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readexactly(LENGTH.size)
                writer.write(head + await reader.readexactly(*LENGTH.unpack(head)))
        except asyncio.IncompleteReadError:
            writer.close()

    server = await asyncio.start_unix_server(serve, path)
    await server.serve_forever()


async def streams_client(path: str, stack: AsyncExitStack) -> Call:
    reader, writer = await asyncio.open_unix_connection(path)
    stack.callback(writer.close)
    # Replies come in the order of the requests: a call takes its turn to read.
    turn = asyncio.Lock()

    async def call(request: bytes) -> bytes:
        writer.write(LENGTH.pack(len(request)) + request)
        async with turn:
            head = await reader.readexactly(LENGTH.size)
            return await reader.readexactly(*LENGTH.unpack(head))

    return call


class Messages(asyncio.Protocol):
    """Cuts what it receives into messages."""

    def __init__(self) -> None:
        self.buffer = b""
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        data = self.buffer + data if self.buffer else data
        at, end = 0, len(data)
        while end - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(data, at)
            if end - at - LENGTH.size < length:
                break
            at += LENGTH.size
            self.received(data[at : at + length])
            at += length
        self.buffer = data[at:]

    def received(self, message: bytes) -> None:
        raise NotImplementedError

    def send(self, message: bytes) -> None:
        self.transport.write(LENGTH.pack(len(message)) + message)


class Echo(Messages):
    """A coroutine answers each request, as in the others."""

    def received(self, message: bytes) -> None:
        asyncio.get_running_loop().create_task(self.answer(message))

    async def answer(self, message: bytes) -> None:
        self.send(message)


class Replies(Messages):
    def __init__(self) -> None:
        super().__init__()
        self.waiters: list[asyncio.Future[bytes]] = []
        self.first = 0

    async def call(self, request: bytes) -> bytes:
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.waiters.append(future)
        self.send(request)
        return await future

    def received(self, message: bytes) -> None:
        self.waiters[self.first].set_result(message)
        self.first += 1
        if self.first == len(self.waiters):
            self.waiters.clear()
            self.first = 0


async def protocol_serve(path: str) -> None:
    server = await asyncio.get_running_loop().create_unix_server(Echo, path)
    await server.serve_forever()


async def protocol_client(path: str, stack: AsyncExitStack) -> Call:
    transport, replies = await asyncio.get_running_loop().create_unix_connection(Replies, path)
    stack.callback(transport.close)
    return replies.call


# --- aiohttp and grpc ---


async def aiohttp_serve(path: str) -> None:
    from aiohttp import web

    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    app = web.Application()
    app.router.add_post("/", handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.UnixSite(runner, path).start()
    await asyncio.Event().wait()


async def aiohttp_client(path: str, stack: AsyncExitStack) -> Call:
    import aiohttp

    connector = aiohttp.UnixConnector(path, limit=TASKS)
    session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))

    async def call(request: bytes) -> bytes:
        async with session.post("http://localhost/", data=request) as response:
            return await response.read()

    return call


async def grpc_serve(path: str) -> None:
    import grpc

    async def handler(request: bytes, context: Any) -> bytes:
        return request

    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(handler)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", {"call": method}),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    await server.wait_for_termination()


async def grpc_client(path: str, stack: AsyncExitStack) -> Call:
    import grpc

    channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"unix:{path}"))
    method: Any = channel.unary_unary("/bench/call")

    async def call(request: bytes) -> bytes:
        return await method(request)

    return call


# --- Threads, without a loop ---


def pelton_sync_serve(path: str) -> None:
    with pelton.Service.listen(f"unix:{path}") as service:
        service.run(lambda request: request.data)


def pelton_sync_calls(path: str, request: bytes, count: int) -> float:
    with pelton.Client.connect(f"unix:{path}", timeout=10) as client:
        return timed(client.call, request, count)


def read(connection: socket.socket) -> bytes:
    head = connection.recv(LENGTH.size, socket.MSG_WAITALL)
    return head and connection.recv(*LENGTH.unpack(head), socket.MSG_WAITALL)


def socket_serve(path: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    while True:
        connection, _ = listener.accept()
        with connection:
            while message := read(connection):
                connection.sendall(LENGTH.pack(len(message)) + message)


def socket_calls(path: str, request: bytes, count: int) -> float:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)

        def call(request: bytes) -> bytes:
            connection.sendall(LENGTH.pack(len(request)) + request)
            return read(connection)

        return timed(call, request, count)


def timed(call: Callable[[bytes], bytes], request: bytes, count: int) -> float:
    for _ in range(count // 10):
        assert call(request) == request
    begun = time.perf_counter()
    for _ in range(count):
        call(request)
    return (time.perf_counter() - begun) / count


LOOPS: dict[str, tuple[Callable[[str], Awaitable[None]], Callable[[str, AsyncExitStack], Awaitable[Call]]]] = {
    "pelton.aio": (pelton_serve, pelton_client),
    "asyncio-protocol": (protocol_serve, protocol_client),
    "asyncio-streams": (streams_serve, streams_client),
    "aiohttp": (aiohttp_serve, aiohttp_client),
    "grpc": (grpc_serve, grpc_client),
}
THREADS: dict[str, tuple[Callable[[str], None], Callable[[str, bytes, int], float]]] = {
    "pelton": (pelton_sync_serve, pelton_sync_calls),
    "socket": (socket_serve, socket_calls),
}


async def calls(client: Callable[..., Awaitable[Call]], path: str, request: bytes, count: int) -> dict[str, float]:
    """Seconds a call: one at a time, and by many tasks."""
    async with AsyncExitStack() as stack:
        call = await client(path, stack)

        async def work(count: int) -> None:
            for _ in range(count):
                await call(request)

        assert await call(request) == request
        await work(count // 10)
        begun = time.perf_counter()
        await work(count)
        alone = time.perf_counter()
        # Each of these takes a fraction of the time.
        each = 5 * count // TASKS
        await asyncio.gather(*(work(each) for _ in range(TASKS)))
        together = time.perf_counter()
    return {"one": (alone - begun) / count, "many": (together - alone) / (each * TASKS)}


def serve_in_loop(serve: Callable[[str], Any], path: str, uses_uvloop: bool) -> None:
    with asyncio.Runner(loop_factory=new_loop(uses_uvloop)) as runner:
        runner.run(serve(path))


def wait_for_listener(path: str) -> None:
    end = time.monotonic() + 10
    while True:
        with open("/proc/net/unix") as sockets:
            # The flag of a socket that listens.
            if any(line.split()[3] == "00010000" for line in sockets if line.rstrip().endswith(path)):
                return
        assert time.monotonic() < end, "the service listens"
        time.sleep(0.001)


def measure(system: str, request: bytes, count: int, uses_uvloop: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/bench"
        context = multiprocessing.get_context("spawn")
        if system in THREADS:
            serve, run = THREADS[system]
            process = context.Process(target=serve, args=(path,), daemon=True)
        else:
            serve_async, client = LOOPS[system]
            process = context.Process(target=serve_in_loop, args=(serve_async, path, uses_uvloop), daemon=True)
        process.start()
        try:
            wait_for_listener(path)
            if system in THREADS:
                return {"one": run(path, request, count)}
            with asyncio.Runner(loop_factory=new_loop(uses_uvloop)) as runner:
                return runner.run(calls(client, path, request, count))
        finally:
            process.kill()
            process.join()


def main() -> None:
    parser = arguments(__doc__, 7)
    parser.add_argument("--bytes", type=int, default=64)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--uvloop", action="store_true")
    options = parser.parse_args()
    systems = [
        system for system in (*LOOPS, *THREADS) if system not in ("aiohttp", "grpc") or importlib.util.find_spec(system)
    ]
    found: dict[tuple[str, str], list[float]] = {}
    with beside_load(options.beside_load):
        for _ in range(options.rounds):
            for system in systems:
                times = measure(system, bytes(options.bytes), options.count, options.uvloop)
                for kind, seconds in times.items():
                    found.setdefault((kind, system), []).append(seconds * 1e6)
    for (kind, system), times_us in sorted(found.items()):
        own = "pelton" if system in THREADS else "pelton.aio"
        part = "" if system == own else f"; {own} takes {ratio(found[kind, own], times_us)} of it"
        print(f"{kind:5} {system:17} {spread(times_us, 1, worst_is_low=False)} us{part}")


if __name__ == "__main__":
    main()
