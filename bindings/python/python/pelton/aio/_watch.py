"""How a task waits for a handle's descriptor, how it opens one, and how each object of `pelton.aio` is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import pelton

T = TypeVar("T")


class Closable(Protocol):
    @property
    def closed(self) -> bool: ...


class Closing:
    """What each object that takes over a handle has: `closed`, `close`, and the end of its block."""

    def __init__(self, handle: Closable) -> None:
        self._closable = handle

    @property
    def closed(self) -> bool:
        """Whether this handle is closed."""
        return self._closable.closed

    def close(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Endpoint(Closable, Protocol):
    def close(self) -> None: ...
    def disarm(self) -> None: ...
    def fileno(self) -> int: ...
    def info(self) -> pelton.Info: ...


class Watch:
    """Waits until a descriptor is readable, in one loop. It stays registered between the waits of a busy task."""

    def __init__(self, fd: int, idle: Callable[[], object] | None = None) -> None:
        """`idle` is called when the descriptor is readable while no task waits. Without it the watch leaves the loop."""
        self._fd = fd
        self._idle = idle
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_registered = False

    def enter(self) -> asyncio.AbstractEventLoop:
        """Registers the descriptor in the running loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise pelton.Busy("this endpoint belongs to another event loop, which is not closed: open one here")
            # A closed loop has forgotten the descriptor.
            self._loop, self._is_registered = loop, False
        if not self._is_registered:
            loop.add_reader(self._fd, self._rung)
            self._is_registered = True
        return loop

    async def readable(self) -> None:
        self._waiter = self.enter().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def check_free(self) -> None:
        if self._waiter is not None:
            raise pelton.Busy("another task waits at this endpoint: give each task one of its own")

    def _rung(self) -> None:
        if self._waiter is None and self._idle is not None:
            try:
                self._idle()
            except (pelton.Forked, pelton.ClosedHandle):
                self.end()
            except pelton.Error as error:
                # It is tried again at intervals.
                text = "a call of an endpoint at which no task waits failed"
                self.enter().call_exception_handler({"message": text, "exception": error})
        elif self._waiter is None:
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

    def forget(self, endpoint: Endpoint) -> None:
        """An endpoint goes without a close. It stays open until the loop has left it: its descriptor's number must not
        belong to another one before. The collector runs in any thread."""
        if self._is_registered and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._leave, endpoint)

    def _leave(self, endpoint: Endpoint) -> None:
        self.end()
        endpoint.close()


# A task that always finds a message, or space, lets the others run after this number of them. A guess.
_TURN = 256


class Watched(Closing):
    """An endpoint with its descriptor in the loop: what all endpoints have in common."""

    def __init__(self, endpoint: Endpoint, idle: Callable[[], object] | None = None) -> None:
        super().__init__(endpoint)
        self._watch = Watch(endpoint.fileno(), idle)
        self._watched = endpoint
        self._turns = 0

    async def _pause(self) -> None:
        self._turns += 1
        if self._turns >= _TURN:
            self._turns = 0
            await asyncio.sleep(0)

    async def _until_ready(self, arm: Callable[..., bool], *arguments: int) -> bool:
        """Arms, and waits unless what is wanted is there already: then it returns False."""
        self._watch.check_free()
        try:
            if is_waiting := arm(*arguments):
                await self._watch.readable()
            return is_waiting
        finally:
            if not self._watched.closed:
                self._watched.disarm()

    def info(self) -> pelton.Info:
        """The lane's sizes, the peer, and counters since the creation. Does not wait: `Busy` during a `sync`."""
        return self._watched.info()

    def close(self) -> None:
        """Ends the channel. Does not wait. A task that waits here gets `ClosedHandle`."""
        self._watch.end()
        self._watched.close()

    def __del__(self) -> None:
        if hasattr(self, "_watched"):
            self._watch.forget(self._watched)


def checked(handle: T, wanted: type[T], otherwise: str) -> T:
    """The handle that an object of `pelton.aio` takes over. Raises TypeError for anything else, such as a name."""
    if not isinstance(handle, wanted):
        text = f"found {type(handle).__name__}, wanted a pelton.{wanted.__name__} to take over: {otherwise}"
        raise TypeError(text)
    return handle


async def finished(opening: pelton.Opening, watch: Watch, owner: Closing | None = None) -> Any:
    """Continues an opening until it has ended, or its owner is closed, and returns its result."""
    while (result := opening.try_finish()) is None:
        await watch.readable()
        if owner is not None and owner.closed:
            raise pelton.ClosedHandle(f"this {type(owner).__name__.lower()} is closed: open another one")
    return result


async def opened(opening: pelton.Opening) -> Any:
    """What an opening opens. A cancel closes the opening."""
    watch = Watch(opening.fileno())
    try:
        return await finished(opening, watch)
    finally:
        # In this order: another descriptor may get the number after the close.
        watch.end()
        opening.close()
