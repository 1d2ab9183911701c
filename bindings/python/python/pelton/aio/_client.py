"""Clients of calls in asyncio and uvloop: `pelton.aio.Client`, and the streams of its calls."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from copy import copy
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import pelton
from pelton.aio._driver import TURN, Driver
from pelton.aio._options import ConnectClient
from pelton.aio._watch import checked, opened

if TYPE_CHECKING:
    from typing_extensions import Buffer


class _Parts:
    """The parts of a streaming reply that have come, and that no task has taken."""

    def __init__(self) -> None:
        self.parts: deque[bytes] = deque()
        self.error: BaseException | None = None
        self.is_over = False
        self.waiter: asyncio.Future[None] | None = None
        self.timer: asyncio.TimerHandle | None = None

    def completed(self, is_final: bool, value: bytes | BaseException | None) -> int:
        """Stores a completion, and returns its bytes."""
        self.is_over |= is_final
        if is_final and self.timer is not None:
            self.timer.cancel()
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)
        if isinstance(value, BaseException):
            self.error = value
        elif value is not None:
            self.parts.append(value)
            return len(value)
        return 0


class Stream:
    """The parts of a reply, by `async for`: `Client.stream` returns it. One task at a time.

    Closing it, also by `async with`, cancels the call if it has not ended, as dropping it does.
    """

    def __init__(
        self, client: Client, request: Buffer, timeout: float | None, idempotent: bool, traceparent: str | None
    ) -> None:
        self._client = client
        self._request: Buffer | None = request
        self._timeout = timeout
        self._idempotent = idempotent
        self._traceparent = traceparent
        self._call: int | None = None
        self._parts = _Parts()
        self._is_beginning = False
        self._is_closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """The next part. Raises as `Client.call`."""
        parts = self._parts
        if parts.waiter is not None or self._is_beginning:
            raise pelton.Busy("another task waits for this stream: one at a time may")
        if self._request is not None:
            self._is_beginning = True
            try:
                # A cancel while it waits for space has sent nothing: the next call begins anew.
                self._call = await self._client._begin(
                    self._request, self._timeout, self._idempotent, self._traceparent, parts
                )
            finally:
                self._is_beginning = False
            self._request = None
            if self._is_closed:
                await self.aclose()
        while not parts.parts:
            if parts.error is not None:
                error, parts.error = parts.error, None
                raise error
            if parts.is_over or self._call is None:
                raise StopAsyncIteration
            parts.waiter = self._client._enter().create_future()
            try:
                await parts.waiter
            finally:
                parts.waiter = None
        part = parts.parts.popleft()
        self._client._taken(len(part))
        return part

    async def aclose(self) -> None:
        """Cancels the call, if it has not ended. Does not wait."""
        self._is_closed = True
        if not self._is_beginning:
            self._request = None
        call, self._call = self._call, None
        if call is not None:
            self._client._forget(call, self._parts)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        loop = self._client._loop
        if self._call is not None and loop is not None and not loop.is_closed():
            # The collector runs in any thread.
            loop.call_soon_threadsafe(self._client._forget, self._call, self._parts)


class Client(Driver):
    """Calls the services of a name from any number of tasks of one loop. As `pelton.Client`, which see.

    Up to 1,024 calls are in flight; more tasks wait. A cancelled task cancels its call, and the service's handler is
    notified. Parts that come for a stream which nobody reads are stored; once they exceed `call_bytes_max`, the client
    receives nothing more for any call until some are taken.

    Example:
        async with await pelton.aio.Client.connect("prices", timeout=10) as client:
            print(await client.call(b"tea", timeout=1))
    """

    def __init__(self, client: pelton.LoopClient) -> None:
        """Takes over a client: use it by this object alone."""
        super().__init__(checked(client, pelton.LoopClient, "open a name by `connect`"))
        self._client = client
        self._calls: dict[int, asyncio.Future[bytes] | _Parts] = {}
        # Completions that no task has yet, the oldest last.
        self._completions: list[tuple[int, bool, bytes | Exception | None]] = []
        # The parts so far of streaming replies to `call`.
        self._begun: dict[int, bytearray] = {}
        self._for_space: deque[asyncio.Future[None]] = deque()
        # Bytes of parts that no task has taken.
        self._stored = 0
        self._stored_max = client.call_bytes_max

    @classmethod
    async def connect(cls, name: str, **options: Unpack[ConnectClient]) -> Self:
        """As `pelton.Client.connect`, with the same options."""
        return cls(await opened(pelton.LoopClient.start_connect(name, **options)))

    async def call(
        self,
        request: Buffer,
        timeout: float | None = None,
        *,
        idempotent: bool = False,
        traceparent: str | None = None,
    ) -> bytes:
        """Calls the service, and returns its whole reply. After `timeout` seconds it cancels: `TimedOut`.

        `TooLarge` if the parts of a streaming reply exceed `call_bytes_max`: take those by `stream`.
        Otherwise as `pelton.Client.call`. A cancelled task cancels the call.
        """
        loop = self._enter()
        end = None if timeout is None else loop.time() + timeout
        call = self._client.try_submit(request, timeout, idempotent=idempotent, traceparent=traceparent)
        if call is None:
            call = await self._submit(request, end, idempotent, traceparent)
        future: asyncio.Future[bytes] = loop.create_future()
        self._calls[call] = future
        self._start()
        timer = None if end is None else loop.call_at(end, _time_out, future)
        try:
            return await future
        except BaseException:
            self._cancel(call)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def stream(
        self,
        request: Buffer,
        timeout: float | None = None,
        *,
        idempotent: bool = False,
        traceparent: str | None = None,
    ) -> Stream:
        """Calls the service, and returns the parts of its reply: `async for part in client.stream(b"all of it")`.

        Submits when the first part is awaited. `timeout` is of the whole call. Otherwise as `call`.
        """
        return Stream(self, request, timeout, idempotent, traceparent)

    async def notify(self, message: Buffer) -> None:
        """Sends a message that gets no reply. Waits for space. Nothing reports whether a service has taken it."""
        self._enter()
        while not self._client.try_notify(message):
            await self._space(None)
        if self._client.has_queued:
            self._start()

    @property
    def in_flight(self) -> int:
        """Calls whose last completion has not come, cancelled ones included."""
        return self._client.in_flight

    @property
    def services(self) -> int:
        """Services that this client uses at present."""
        return self._client.services

    def close(self) -> None:
        """Closes it: calls in flight raise `ClosedHandle`, and their services are notified. Does not wait."""
        self._is_closed = True
        self._unwatch()
        self._client.close()
        if self._loop is not None and not self._loop.is_closed():
            self._fail(lambda: pelton.ClosedHandle("this client is closed: open another one"))

    async def _submit(self, request: Buffer, end: float | None, idempotent: bool, traceparent: str | None) -> int:
        """Submits once there is space. `end` is in the loop's time."""
        while True:
            await self._space(end)
            left = None if end is None else end - asyncio.get_running_loop().time()
            call = self._client.try_submit(request, left, idempotent=idempotent, traceparent=traceparent)
            if call is not None:
                return call

    async def _space(self, end: float | None) -> None:
        """Waits until there may be space."""
        loop = self._enter()
        waiter: asyncio.Future[None] = loop.create_future()
        timer = loop.call_at(end, _time_out, waiter) if end is not None else None
        self._for_space.append(waiter)
        self._start()
        try:
            await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                # It was this task's turn.
                self._wake_for_space(1)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    async def _begin(
        self, request: Buffer, timeout: float | None, idempotent: bool, traceparent: str | None, parts: _Parts
    ) -> int:
        """Submits a request, whose completions go to `parts`."""
        loop = self._enter()
        end = None if timeout is None else loop.time() + timeout
        call = self._client.try_submit(request, timeout, idempotent=idempotent, traceparent=traceparent)
        if call is None:
            call = await self._submit(request, end, idempotent, traceparent)
        self._calls[call] = parts
        if end is not None:
            parts.timer = loop.call_at(end, self._time_out_parts, call, parts)
        self._start()
        return call

    def _time_out_parts(self, call: int, parts: _Parts) -> None:
        self._cancel(call)
        parts.completed(True, _timed_out())

    def _cancel(self, call: int) -> None:
        """Cancels a call, unless it has ended."""
        if self._calls.pop(call, None) is None or self._is_closed:
            return
        self._begun.pop(call, None)
        try:
            self._client.cancel(call)
        except pelton.Error:
            # The client's end, which the next call raises.
            return
        if self._client.has_queued and self._loop is not None and not self._loop.is_closed():
            self._start()

    def _taken(self, count: int) -> None:
        """So many bytes of parts are no longer stored."""
        was_full = self._stored > self._stored_max
        self._stored -= count
        if was_full and self._stored <= self._stored_max:
            self._start()

    def _forget(self, call: int, parts: _Parts) -> None:
        """Nobody reads this stream any more."""
        if parts.timer is not None:
            parts.timer.cancel()
        self._cancel(call)
        count = sum(map(len, parts.parts))
        parts.parts.clear()
        parts.is_over = True
        if parts.waiter is not None and not parts.waiter.done():
            parts.waiter.set_result(None)
        if not self._is_closed:
            self._taken(count)

    def _wake_for_space(self, most: int) -> None:
        waiters = self._for_space
        while most > 0 and waiters:
            waiter = waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                most -= 1

    def _left(self) -> None:
        for call in list(self._calls):
            self._cancel(call)
        self._for_space.clear()
        self._stored = 0

    def _fail(self, error: Callable[[], Exception]) -> None:
        """Each waiting task gets an error of its own."""
        calls, self._calls = self._calls, {}
        self._begun.clear()
        for waiter in calls.values():
            if isinstance(waiter, _Parts):
                waiter.completed(True, error())
            elif not waiter.done():
                waiter.set_exception(error())
        # They try again, and find it by themselves.
        self._wake_for_space(len(self._for_space))

    def _drive(self) -> None:
        client = self._client
        try:
            while self._stored <= self._stored_max:
                # A MemoryError may have left some.
                if not self._completions:
                    self._completions = client.completions(TURN)
                    self._completions.reverse()
                if self._completions:
                    self._completed()
                    # The tasks that are ready now may call again.
                    if self._calls or self._for_space:
                        self._start()
                    return
                if not (self._calls or self._for_space or client.has_queued):
                    # The next call starts it again. What rings meanwhile would ring in each turn of the loop.
                    self._unwatch()
                    return
                if client.busy_poll():
                    continue
                if client.arm():
                    self._watch()
                    return
                # Space, or a completion.
                self._wake_for_space(TURN)
                self._start()
                return
            # Tasks have to take parts first.
            self._unwatch()
        except pelton.Error as raised:
            self._unwatch()
            error = raised
            self._fail(lambda: copy(error))

    def _completed(self) -> None:
        calls, completions = self._calls, self._completions
        count = len(completions)
        while completions:
            call, is_final, value = completions.pop()
            waiter = calls.pop(call, None) if is_final else calls.get(call)
            if waiter is None:
                continue
            if isinstance(waiter, _Parts):
                self._stored += waiter.completed(is_final, value)
                continue
            if not is_final:
                assert isinstance(value, bytes), "a part is bytes"
                self._append(call, waiter, value)
                continue
            begun = self._begun.pop(call, None) if self._begun else None
            if waiter.done():
                continue
            if isinstance(value, Exception):
                waiter.set_exception(value)
            elif begun is not None:
                waiter.set_result(bytes(begun))
            else:
                waiter.set_result(value or b"")
        if self._for_space:
            self._wake_for_space(count)

    def _append(self, call: int, waiter: asyncio.Future[bytes], part: bytes) -> None:
        """A part of a streaming reply to `call`."""
        if waiter.done():
            return
        reply = self._begun.setdefault(call, bytearray())
        reply += part
        if len(reply) > self._stored_max:
            # The task cancels the call.
            del self._begun[call]
            text = (
                f"the parts of this reply have {len(reply)} bytes so far, and call_bytes_max is {self._stored_max}: "
                "take them one by one, by `stream`, or raise it"
            )
            waiter.set_exception(pelton.TooLarge(text))


def _timed_out() -> pelton.TimedOut:
    return pelton.TimedOut("timed out while waiting for the reply: wait longer, or see whether the other side runs")


def _time_out(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(_timed_out())
