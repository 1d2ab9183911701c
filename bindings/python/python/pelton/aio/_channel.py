"""Channels and calls in asyncio and uvloop: each handle's descriptor in the loop, no thread.

    async with await pelton.aio.Receiver.connect("events", timeout=10) as receiver:
        async for message in receiver:
            print(message)

Each wait may be cancelled, also by `asyncio.timeout`: a cancelled receive has taken nothing, a cancelled send has sent
nothing. One task at a time waits at an endpoint; a second one gets `pelton.Busy`. An endpoint belongs to the loop in
which it first waits.

    async with await pelton.aio.Client.connect("prices", timeout=10) as client:
        print(await asyncio.gather(client.call(b"tea"), client.call(b"rice")))

Any number of tasks call by one client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import pelton
from pelton._aio_calls import Client, Service, Stream

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Client", "Receiver", "Sender", "Service", "Stream"]

# A task that always finds a message lets the others run after this number of them. A guess.
_TURN = 256


class _Watch:
    """Waits until a descriptor is readable, in one loop. It stays registered between the waits of a busy task."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_registered = False

    async def readable(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise pelton.Busy("this endpoint belongs to another event loop, which is not closed: open one here")
            # A closed loop has forgotten the descriptor.
            self._loop, self._is_registered = loop, False
        if not self._is_registered:
            loop.add_reader(self._fd, self._rung)
            self._is_registered = True
        self._waiter = loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def check_free(self) -> None:
        if self._waiter is not None:
            raise pelton.Busy("another task waits at this endpoint: give each task one of its own")

    def _rung(self) -> None:
        if self._waiter is None:
            # Nobody waits, so nobody drains the descriptor: it would be readable in each iteration of the loop.
            self.end()
        elif not self._waiter.done():
            self._waiter.set_result(None)

    def end(self) -> None:
        """Leaves the loop. A task that waits continues, and finds its endpoint closed."""
        if self._is_registered and self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._is_registered = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def forget(self, endpoint: pelton.Receiver | pelton.Sender) -> None:
        """An endpoint goes without a close. It stays open until the loop has left it: its descriptor's number must not
        belong to another one before. The collector runs in any thread."""
        if self._is_registered and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._leave, endpoint)

    def _leave(self, endpoint: pelton.Receiver | pelton.Sender) -> None:
        self.end()
        endpoint.close()


async def _opened(opening: pelton.Opening) -> Any:
    watch = _Watch(opening.fileno())
    try:
        while (opened := opening.try_finish()) is None:
            await watch.readable()
        return opened
    finally:
        # In this order: another descriptor may get the number after the close.
        watch.end()
        opening.close()


class Receiver:
    """A `pelton.Receiver` in an event loop."""

    def __init__(self, receiver: pelton.Receiver) -> None:
        """Takes over a receiver: use it by this object alone."""
        self._watch = _Watch(receiver.fileno())
        self._receiver = receiver
        self._taken = 0

    @classmethod
    async def connect(cls, name: str, **options: Any) -> Self:
        """As `pelton.Receiver.connect`, with the same options."""
        return cls(await _opened(pelton.Receiver.start_connect(name, **options)))

    async def _ready(self) -> None:
        """Waits until there may be a message."""
        self._watch.check_free()
        try:
            if self._receiver.arm():
                await self._watch.readable()
        finally:
            if not self._receiver.closed:
                self._receiver.disarm()

    async def _pause(self) -> None:
        self._taken += 1
        if self._taken >= _TURN:
            self._taken = 0
            await asyncio.sleep(0)

    async def recv(self) -> bytes:
        """The next message. Raises `Closed` and `PeerDied` as `pelton.Receiver.recv`."""
        # Before the message is taken: a cancellation here loses nothing.
        await self._pause()
        self._watch.check_free()
        while (message := self._receiver.try_recv()) is None:
            await self._ready()
        return message

    async def recv_many(self, most: int) -> list[bytes]:
        """Waits for a message, and returns up to `most` that are there."""
        await asyncio.sleep(0)
        self._watch.check_free()
        while True:
            try:
                return self._receiver.recv_many(most, 0)
            except pelton.TimedOut:
                await self._ready()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await self.recv()
        except pelton.Closed:
            raise StopAsyncIteration from None

    def __del__(self) -> None:
        if hasattr(self, "_receiver"):
            self._watch.forget(self._receiver)

    def close(self) -> None:
        """Ends the channel. Does not wait. A task that waits here gets `ClosedHandle`."""
        self._watch.end()
        self._receiver.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Sender:
    """A `pelton.Sender` in an event loop."""

    def __init__(self, sender: pelton.Sender) -> None:
        """Takes over a sender: use it by this object alone."""
        self._watch = _Watch(sender.fileno())
        self._sender = sender
        self._sent = 0

    @classmethod
    async def connect(cls, name: str, **options: Any) -> Self:
        """As `pelton.Sender.connect`, with the same options."""
        return cls(await _opened(pelton.Sender.start_connect(name, **options)))

    async def send(self, data: Buffer) -> None:
        """Copies a bytes-like object into the lane. Waits for space."""
        self._sent += 1
        if self._sent >= _TURN:
            self._sent = 0
            await asyncio.sleep(0)
        self._watch.check_free()
        while not self._sender.try_send(data):
            self._watch.check_free()
            try:
                if self._sender.arm(memoryview(data).nbytes):
                    await self._watch.readable()
            finally:
                if not self._sender.closed:
                    self._sender.disarm()

    async def send_many(self, messages: Iterable[Buffer]) -> int:
        """Sends each message, and returns how many. A cancellation may come between two of them."""
        sent = 0
        for message in messages:
            await self.send(message)
            sent += 1
        return sent

    def __del__(self) -> None:
        if hasattr(self, "_sender"):
            self._watch.forget(self._sender)

    def close(self) -> None:
        """Ends the channel. Does not wait. A task that waits here gets `ClosedHandle`."""
        self._watch.end()
        self._sender.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
