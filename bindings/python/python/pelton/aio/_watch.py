"""How a task waits for a handle's descriptor, and how it opens one."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import pelton

T = TypeVar("T")


class Watch:
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


def checked(handle: T, wanted: type[T], otherwise: str) -> T:
    """The handle that an object of `pelton.aio` takes over. Raises TypeError for anything else, such as a name."""
    if not isinstance(handle, wanted):
        text = f"found {type(handle).__name__}, wanted a pelton.{wanted.__name__} to take over: {otherwise}"
        raise TypeError(text)
    return handle


async def opened(opening: pelton.Opening) -> Any:
    """What an opening opens. A cancel closes the opening."""
    watch = Watch(opening.fileno())
    try:
        while (result := opening.try_finish()) is None:
            await watch.readable()
        return result
    finally:
        # In this order: another descriptor may get the number after the close.
        watch.end()
        opening.close()
