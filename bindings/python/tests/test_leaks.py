"""After a million messages a process has the memory and the descriptors that it had before.

PELTON_MESSAGES has the number; the short form sends fewer.
"""

from __future__ import annotations

import asyncio
import gc
import os
import tracemalloc
from collections.abc import Callable
from subprocess import Popen

import pelton
import pelton.aio
from conftest import LIMIT, resident

Start = Callable[..., Popen[str]]
MESSAGES = int(os.environ.get("PELTON_MESSAGES", "100000"))
# Frees, dictionaries that grow, caches of the interpreter: as much for any number of messages.
BYTES_MAX = 64 << 10

SEND = """
import pelton, sys
with pelton.Sender.connect(sys.argv[1], timeout=30) as sender:
    for number in range(int(sys.argv[2])):
        sender.send(bytes(number % 999))
"""


def grown_by(use: Callable[[int], None]) -> int:
    """The bytes of Python's memory that a number of uses leaves, after a tenth of them has warmed up."""
    use(MESSAGES // 10)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        use(MESSAGES)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return after - before


def test_messages_leave_nothing_in_either_side() -> None:
    sender, receiver = pelton.threads(capacity=1 << 20)
    buffer, descriptors = bytearray(1000), len(os.listdir("/proc/self/fd"))

    def use(count: int) -> None:
        for number in range(count // 5):
            sender.send(bytes(number % 999))
            receiver.recv()
            sender.send_many([b"one", buffer])
            receiver.recv_many(9)
            with sender.reserve(number % 999) as view:
                view[:1] = b"."[: len(view)]
            with receiver.peek() as view:
                len(view)
            sender.send(buffer)
            receiver.recv_into(buffer)

    with sender, receiver:
        assert grown_by(use) < BYTES_MAX
        before = resident()
        use(MESSAGES)
        # What no allocator of Python knows.
        assert resident() - before < 4 << 20
        assert len(os.listdir("/proc/self/fd")) == descriptors


def test_messages_of_another_process_leave_nothing(name: str, start: Start) -> None:
    def use(count: int) -> None:
        with pelton.listen(name) as listener:
            process = start(SEND, name, count)
            with listener.accept_receiver(LIMIT) as receiver:
                assert sum(1 for _ in receiver) == count
            process.communicate()

    assert grown_by(use) < BYTES_MAX


def test_messages_in_a_loop_leave_nothing() -> None:
    def use(count: int) -> None:
        async def main() -> None:
            sender, receiver = pelton.threads(capacity=1 << 16)
            async with pelton.aio.Sender(sender) as sending, pelton.aio.Receiver(receiver) as receiving:

                async def send() -> None:
                    for number in range(count):
                        await sending.send(bytes(number % 999))

                task = asyncio.create_task(send())
                for _ in range(count):
                    await receiving.recv()
                await task

        asyncio.run(main())

    assert grown_by(use) < BYTES_MAX


def test_channels_leave_neither_memory_nor_descriptors() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))

    def use(count: int) -> None:
        for _ in range(count // 1000):
            sender, receiver = pelton.threads(capacity=1 << 16)
            sender.send(b"one")
            message = receiver.peek()
            receiver.close()
            sender.close()
            message.release()

    assert grown_by(use) < BYTES_MAX
    assert len(os.listdir("/proc/self/fd")) == descriptors
