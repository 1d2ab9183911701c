"""Heads of requests by h11, for the tests of pelton_http. Frames of 4 bytes of length and that many bytes, in: a head
with bytes after it; out: method, target, version, each header's name and value, and the bytes after it, each with its
own length before it. If h11 refuses the head: one part, the reason."""

import struct
import sys

import h11


def parse(head: bytes) -> list[bytes]:
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(head)
    try:
        request = connection.next_event()
        end = connection.next_event()
    except h11.RemoteProtocolError as refused:
        return [str(refused).encode()]
    if not isinstance(request, h11.Request) or not isinstance(end, h11.EndOfMessage):
        return [f"no whole request: {request!r}, {end!r}".encode()]
    fields = [part for field in request.headers for part in field]
    return [request.method, request.target, request.http_version, *fields, connection.trailing_data[0]]


while length := sys.stdin.buffer.read(4):
    parts = parse(sys.stdin.buffer.read(struct.unpack(">I", length)[0]))
    answer = b"".join(struct.pack(">I", len(part)) + bytes(part) for part in parts)
    sys.stdout.buffer.write(struct.pack(">I", len(answer)) + answer)
    sys.stdout.buffer.flush()
