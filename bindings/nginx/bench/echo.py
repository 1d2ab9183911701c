"""Answers each request with its own bytes: by pelton, or on a Unix stream socket, where a message is a length in four
little-endian bytes and the payload; by plain functions and threads, or by asyncio.

    echo.py pelton | pelton-aio NAME
    echo.py socket | socket-aio PATH
"""

import asyncio
import socket
import sys
import threading


def pelton_service(name: str) -> None:
    import pelton

    with pelton.Service.listen(name) as service:
        service.run(lambda request: request.data)


async def pelton_aio(name: str) -> None:
    import pelton.aio

    async def echo(request: "pelton.aio.Request") -> bytes:
        return request.data

    async with pelton.aio.Service.listen(name) as service:
        await service.run(echo)


def serve_connection(connection: socket.socket) -> None:
    buffer = bytearray(1 << 17)
    filled = 0
    with connection:
        while True:
            while filled < 4 or filled < 4 + int.from_bytes(buffer[:4], "little"):
                if filled >= 4 and (size := 4 + int.from_bytes(buffer[:4], "little")) > len(buffer):
                    buffer.extend(bytes(size - len(buffer)))
                with memoryview(buffer) as free:
                    received = connection.recv_into(free[filled:])
                if received == 0:
                    return
                filled += received
            size = 4 + int.from_bytes(buffer[:4], "little")
            with memoryview(buffer) as message:
                connection.sendall(message[:size])
            buffer[: filled - size] = buffer[size:filled]
            filled -= size


def socket_service(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(4096)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=serve_connection, args=(connection,), daemon=True).start()


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.received = bytearray()

    def data_received(self, data: bytes) -> None:
        # Usually one whole message.
        if not self.received and len(data) >= 4 and len(data) == 4 + int.from_bytes(data[:4], "little"):
            self.transport.write(data)
            return
        self.received += data
        while len(self.received) >= 4:
            size = 4 + int.from_bytes(self.received[:4], "little")
            if len(self.received) < size:
                return
            self.transport.write(bytes(self.received[:size]))
            del self.received[:size]


async def socket_aio(path: str) -> None:
    server = await asyncio.get_running_loop().create_unix_server(Echo, path, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    kind, address = sys.argv[1:]
    match kind:
        case "pelton":
            pelton_service(address)
        case "pelton-aio":
            asyncio.run(pelton_aio(address))
        case "socket":
            socket_service(address)
        case "socket-aio":
            asyncio.run(socket_aio(address))
        case _:
            sys.exit(f"echo.py: found {kind!r}, wanted pelton, pelton-aio, socket or socket-aio")
