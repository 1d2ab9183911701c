"""The conformance driver in Python. ../README.md has the command line, the messages and the report."""

from __future__ import annotations

import functools
import os
import signal
import sys
import zlib
from collections.abc import Callable

import pelton

LIMIT = float(os.environ.get("PELTON_SECONDS", "10"))


class Driver:
    """One run: its arguments, and the report."""

    def __init__(self, verb: str, name: str, count: int, sizes: list[int], then: str) -> None:
        self.verb, self.name, self.count, self.sizes, self.then = verb, name, count, sizes, then
        self.letters = bytes(range(ord("a"), ord("z") + 1)) * (max(sizes) // 26 + 2)
        self.messages = self.bytes = self.checksum = 0

    def message(self, i: int) -> bytes:
        start = i % 26
        return self.letters[start : start + self.sizes[i % len(self.sizes)]]

    def add(self, message: bytes) -> None:
        self.messages += 1
        self.bytes += len(message)
        self.checksum = (self.checksum + zlib.crc32(message)) % (1 << 32)

    def add_expected(self, found: bytes) -> None:
        """Adds the next message, unless it is another one."""
        if self.messages == self.count or found != self.message(self.messages):
            raise SystemExit(f"message {self.messages} of {self.count}: found another one, of {len(found)} bytes")
        self.add(found)

    def check_count(self) -> None:
        if self.messages != self.count:
            raise SystemExit(f"found {self.messages} messages, expected {self.count}")

    def report(self, more: str = "") -> None:
        checksum = f"checksum {self.checksum:08x}"
        print(f"ok {self.verb} {self.messages} messages {self.bytes} bytes {checksum}{more}", flush=True)

    def die(self) -> None:
        self.report()
        os.kill(os.getpid(), signal.SIGKILL)

    def traceparent(self, i: int) -> str | None:
        """That of message `i`: with `traced`, all but each third have one."""
        if self.then != "traced" or i % 3 == 0:
            return None
        return f"00-{i + 1:032x}-{i + 1:016x}-{i % 256:02x}"

    def send(self) -> None:
        with open_sender(self.name, self.then == "traced") as sender:

            def resumed(step: Callable[[], None]) -> None:
                while True:
                    try:
                        return step()
                    except pelton.PeerDied:
                        if self.then != "resume":
                            raise
                        sender.resume(LIMIT)  # The successor gets what its predecessor has not released.

            for i in range(self.count):
                message = self.message(i)
                resumed(functools.partial(sender.send, message, LIMIT, traceparent=self.traceparent(i)))
                self.add(message)
            if self.then == "die":
                self.die()
            resumed(lambda: sender.wait_released(LIMIT))

    def recv(self) -> None:
        rest: list[int] = []
        with open_receiver(self.name, self.then == "traced") as receiver:
            while True:
                try:
                    message = receiver.recv(LIMIT)
                except pelton.PeerDied:
                    if self.then == "died":
                        break
                    raise
                except pelton.Closed:
                    if self.then == "died":
                        raise SystemExit("the sender has closed, expected its death") from None
                    break
                if self.then == "rest":
                    self.add(message)
                    rest.append(zlib.crc32(message))
                    continue
                if receiver.traceparent != self.traceparent(self.messages):
                    raise SystemExit(f"message {self.messages}: found the traceparent {receiver.traceparent}")
                self.add_expected(message)
                if self.then == "die" and self.messages == self.count:
                    self.die()
        if self.then != "rest":
            self.check_count()
        elif not 1 <= len(rest) <= self.count:
            raise SystemExit(f"found {len(rest)} messages, expected the last of {self.count}")
        elif rest != [zlib.crc32(self.message(i)) for i in range(self.count - len(rest), self.count)]:
            raise SystemExit(f"the {len(rest)} messages are not the last of {self.count}")

    def gather(self) -> None:
        with pelton.gather(self.name) as receiver:
            for _ in range(self.count):
                message = receiver.recv(LIMIT)  # Of all senders, round-robin.
                sys.stdout.buffer.write(message[: self.sizes[0]] + b"\n")
                sys.stdout.buffer.flush()
                self.add(message)

    def call(self) -> None:
        with pelton.Client.connect(self.name, timeout=LIMIT) as client:
            for i in range(self.count):
                self.add_expected(client.call(self.message(i), LIMIT))

    def stream(self) -> None:
        with pelton.Client.connect(self.name, timeout=LIMIT) as client:
            for part in client.stream(self.message(0), LIMIT):
                self.add_expected(part)
        self.check_count()

    def serve(self) -> None:
        def reply(request: pelton.Request) -> None:
            request.reply(request.data)
            self.add(request.data)

        self.serve_by(reply)

    def serve_stream(self) -> None:
        def reply(request: pelton.Request) -> None:
            for i in range(self.count):
                request.part(self.message(i), LIMIT)
                self.add(self.message(i))
            request.end()

        self.serve_by(reply)

    def serve_by(self, reply: Callable[[pelton.Request], None]) -> None:
        """Serves until the count is reached, and every client has its replies."""
        with pelton.Service.listen(self.name) as service:
            while True:
                try:
                    request = service.receive(LIMIT)
                except pelton.Closed:
                    break
                if request.is_notification:
                    continue
                try:
                    reply(request)
                except (pelton.Closed, pelton.PeerDied) as error:
                    print(f"reply: {error}", file=sys.stderr)  # The client has gone.
                if self.messages >= self.count:
                    service.drain()
        self.check_count()

    def write_records(self) -> None:
        with pelton.RecordFile(self.name) as file:
            for i in range(self.count):
                file.append(self.message(i))
                self.add(self.message(i))

    def read_records(self) -> str:
        """Reads the file to its end. Returns the rest of the report."""
        damaged = 0
        try:
            reader = pelton.RecordReader(self.name)
        except pelton.NotARecordFile:
            return f" damaged {damaged} refused"
        while True:
            try:
                for message in reader:
                    self.add(message)
                return f" damaged {damaged} end"
            except pelton.Damaged as error:
                if error.next_offset is None:
                    return f" damaged {damaged} torn"
                damaged += 1
            except pelton.NotARecordFile:
                return f" damaged {damaged} later"


def open_sender(name: str, traced: bool) -> pelton.Sender:
    if name.startswith("path:"):
        return pelton.Sender.open_path(name.removeprefix("path:"), create=True, traced=traced)
    return pelton.Sender.connect(name, timeout=LIMIT, traced=traced)


def open_receiver(name: str, traced: bool) -> pelton.Receiver:
    if name.startswith("path:"):
        return pelton.Receiver.open_path(name.removeprefix("path:"), create=True, traced=traced)
    with pelton.listen(name) as listener:
        return listener.accept_receiver(LIMIT)


# Each command's function, and its values of THEN.
COMMANDS: dict[str, tuple[Callable[[Driver], str | None], list[str]]] = {
    "send": (Driver.send, ["close", "die", "resume", "traced"]),
    "recv": (Driver.recv, ["close", "died", "die", "rest", "traced"]),
    "gather": (Driver.gather, []),
    "call": (Driver.call, []),
    "serve": (Driver.serve, []),
    "stream": (Driver.stream, []),
    "serve-stream": (Driver.serve_stream, []),
    "write-records": (Driver.write_records, []),
    "read-records": (Driver.read_records, []),
}


def arguments(verb: str, given: list[str], thens: list[str]) -> Driver:
    """The run that the command line describes. Raises ValueError if it is wrong."""
    if verb == "read-records":
        (name,) = given
        return Driver(verb, name, 0, [0], "close")
    name, count, sizes, then = given if len(given) == 4 else [*given, "close"]
    if then not in thens + ["close"] * (len(given) == 3) or not count.isdigit():
        raise ValueError(then)
    return Driver(verb, name, int(count), [int(size) for size in sizes.split(",")], then)


def main() -> None:
    verb, given = (sys.argv + [""])[1], sys.argv[2:]
    if verb not in COMMANDS:
        vectors = "`cargo test` replays the vectors, with the crates that this binding uses"
        print(f"unsupported {verb}: {vectors if verb == 'vectors' else 'this driver does not have it'}")
        sys.exit(3)
    run, thens = COMMANDS[verb]
    if given and given[0].startswith("path:") and not thens and not verb.endswith("-records"):
        print(f"unsupported {verb} path: a directory has one sender and one receiver")
        sys.exit(3)
    try:
        driver = arguments(verb, given, thens)
    except ValueError:
        print(f"usage: driver {verb} NAME COUNT SIZES {'|'.join(thens)}", file=sys.stderr)
        sys.exit(2)
    driver.report(run(driver) or "")


main()
