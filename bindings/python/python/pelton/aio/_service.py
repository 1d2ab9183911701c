"""Services in asyncio and uvloop: `pelton.aio.Service`, whose handlers are tasks."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import AsyncIterable, Awaitable, Callable
from contextlib import aclosing
from inspect import isawaitable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import pelton
from pelton._serve import answered, fail, is_streaming
from pelton.aio._driver import TURN, Driver
from pelton.aio._options import ListenService
from pelton.aio._watch import checked

if TYPE_CHECKING:
    from typing_extensions import Buffer

Handler = Callable[[pelton.Request], Awaitable[Any] | AsyncIterable[Any]]


class Service(Driver):
    """Runs an `async def` for each request of the clients that connect under its name. As `pelton.Service`, which see.

    Example:
        async def handler(request: pelton.Request) -> bytes:
            return request.data.upper()

        with pelton.aio.Service.listen("prices") as service:
            await service.run(handler)
    """

    def __init__(self, service: pelton.Service) -> None:
        """Takes over a service: use it by this object alone."""
        super().__init__(checked(service, pelton.Service, "listen under a name by `listen`"))
        self._service = service
        self._handler: Handler | None = None
        self._running: dict[pelton.Request, asyncio.Task[None]] = {}
        self._running_max = 0
        # Those of `_running` whose task is cancelled. Once: a handler that cleans up is left alone.
        self._cancelled: set[pelton.Request] = set()
        self._cancels = 0
        self._for_space: list[asyncio.Future[None]] = []
        self._over: asyncio.Future[None] | None = None
        self._is_full = False

    @classmethod
    def listen(cls, name: str, **options: Unpack[ListenService]) -> Self:
        """As `pelton.Service.listen`, with the same options. Does not wait."""
        return cls(pelton.Service.listen(name, **options))

    async def run(self, handler: Handler, in_flight_max: int = 1024) -> None:
        """Runs `handler(request)` as a task for each request, up to `in_flight_max` at a time.

        Returns after `stop`, or once `drain` has ended, and the handlers too. `handler` is an `async def`, whose result
        is the reply, or an async generator, which yields the parts of a streaming reply, and waits while the client has
        no space. A cancelled call cancels its task: `asyncio.CancelledError`. Exceptions fail the call as in
        `pelton.Service.run`. While `in_flight_max` handlers run, further requests, and the cancels behind them, wait at
        their clients. Cancelling `run` cancels the handlers, abandons their calls, and waits until the handlers have
        cleaned up.
        """
        if in_flight_max < 1:
            raise ValueError(f"in_flight_max is {in_flight_max}, wanted 1 or more")
        if not callable(handler):
            raise TypeError(f"the handler is {type(handler).__name__}, wanted an `async def` of a request")
        if self._is_closed:
            # Nothing drives it any more.
            raise pelton.ClosedHandle("this service is closed: listen again")
        loop = self._enter()
        if self._over is not None:
            raise pelton.Busy("another task runs this service: one at a time may")
        self._handler, self._running_max = handler, in_flight_max
        self._context = contextvars.copy_context()
        self._over = loop.create_future()
        self._start()
        try:
            await self._over
            # Taken, so that a handler which ends meanwhile does not change the list.
            while self._running:
                await asyncio.wait(list(self._running.values()))
        finally:
            self._over = None
            self._unwatch()
            for request, task in list(self._running.items()):
                self._cancel(request, task)
            if not self._is_closed:
                self._service.disarm()
            if self._running:
                await asyncio.wait(list(self._running.values()))

    def stop(self) -> None:
        """`run` takes no more requests, and returns once the handlers have. Does not wait."""
        self._service.stop()

    def drain(self) -> None:
        """As `pelton.Service.drain`. Does not wait: `run` returns when it has ended."""
        self._service.drain()

    @property
    def replies_dropped(self) -> int:
        """As `pelton.Service.replies_dropped`."""
        return self._service.replies_dropped

    @property
    def corrupt_clients(self) -> int:
        """As `pelton.Service.corrupt_clients`."""
        return self._service.corrupt_clients

    def close(self) -> None:
        """Closes it. Calls that are not answered fail at their clients with `Closed`. Does not wait."""
        self._is_closed = True
        self._unwatch()
        self._service.close()
        for request, task in list(self._running.items()):
            self._cancel(request, task)
        self._end(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _left(self) -> None:
        self._running.clear()
        self._cancelled.clear()
        self._for_space.clear()
        self._over = None

    def _end(self, error: Exception | None) -> None:
        if self._over is not None and not self._over.done():
            if error is None:
                self._over.set_result(None)
            else:
                self._over.set_exception(error)
        # Nothing drives the service from here on, so nothing would find space.
        self._wake_for_space()

    def _wake_for_space(self) -> None:
        waiters, self._for_space = self._for_space, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _drive(self) -> None:
        if self._over is None or self._over.done():
            self._unwatch()
            return
        service = self._service
        try:
            while True:
                taken, is_full = 0, False
                while taken < TURN:
                    is_full = len(self._running) >= self._running_max
                    request = service.try_receive(pause=is_full)
                    if request is None:
                        break
                    self._begin_task(request)
                    taken += 1
                self._is_full = is_full
                if not taken and not is_full and service.busy_poll():
                    continue
                if service.cancels != self._cancels:
                    self._check_cancels()
                if taken:
                    # The handlers run first.
                    self._start()
                    return
                if service.arm():
                    self._watch()
                    return
                # Space for a part, or a request.
                self._wake_for_space()
                self._start()
                return
        except pelton.Closed:
            self._unwatch()
            self._end(None)
        except pelton.Error as error:
            self._unwatch()
            self._end(error)

    def _begin_task(self, request: pelton.Request) -> None:
        assert self._loop is not None and self._handler is not None
        coroutine = self._answer(request, self._handler)
        # Of `run`, so that no handler has what another one has set.
        context = (self._context or contextvars.copy_context()).copy()
        if sys.version_info >= (3, 12):
            # A handler that does not wait needs no turn of the loop.
            task = asyncio.Task(coroutine, loop=self._loop, context=context, eager_start=True)
            if task.done():
                return
        else:
            task = self._loop.create_task(coroutine, context=context)
        self._running[request] = task

    def _check_cancels(self) -> None:
        self._cancels = self._service.cancels
        for request, task in list(self._running.items()):
            if request not in self._cancelled and request.is_cancelled():
                self._cancel(request, task)

    def _cancel(self, request: pelton.Request, task: asyncio.Task[None]) -> None:
        # Not `task.cancelling()`: a timeout in the handler cancels the task as well.
        if request in self._cancelled:
            return
        self._cancelled.add(request)
        task.cancel()
        # Of a task that has not begun, nothing runs.
        task.add_done_callback(lambda _: self._ended(request))

    def _ended(self, request: pelton.Request) -> None:
        request.abandon()
        self._cancelled.discard(request)
        if self._running.pop(request, None) is not None and self._is_full:
            self._is_full = False
            self._start()

    async def _answer(self, request: pelton.Request, handler: Handler) -> None:
        try:
            reply: Any = handler(request)
            if hasattr(reply, "__aiter__"):
                await self._send_parts(request, reply)
                return
            if not isawaitable(reply):
                text = f"the handler returned {type(reply).__name__}, wanted an `async def`: pelton.Service has plain ones"
                raise TypeError(text)
            reply = await reply
            if request.is_answered:
                return
            if hasattr(reply, "__aiter__") or is_streaming(reply):
                await self._send_parts(request, reply)
            else:
                answered(request.reply, reply)
        except Exception as error:
            fail(request, error)
        finally:
            # Also after CancelledError: of a cancelled call nobody waits for a reply.
            self._ended(request)

    async def _send_parts(self, request: pelton.Request, parts: Any) -> None:
        if not hasattr(parts, "__aiter__"):
            for part in parts:
                if not await self._send_part(request, part):
                    return
        elif hasattr(parts, "aclose"):
            async with aclosing(parts):
                async for part in parts:
                    if not await self._send_part(request, part):
                        return
        else:
            async for part in parts:
                if not await self._send_part(request, part):
                    return
        if not request.is_answered:
            answered(request.end)

    async def _send_part(self, request: pelton.Request, part: Buffer) -> bool:
        """Sends a part, or waits until there is space for it. False if the client has left."""
        if request.is_notification:
            return True
        try:
            while not request.try_part(part):
                if self._over is None or self._over.done():
                    return False
                waiter: asyncio.Future[None] = self._enter().create_future()
                self._for_space.append(waiter)
                await waiter
        except (pelton.Closed, pelton.PeerDied):
            return False
        return True
