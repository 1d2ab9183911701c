"""What runs a client and a service in an event loop.

A *driver* is a callback of the loop. It takes what has come; then it lets the tasks run that this made ready; when
nothing has come, it polls for some microseconds, arms, and leaves the rest to the loop, which watches the descriptor.
No thread, and no timer but those of deadlines.
"""

from __future__ import annotations

import asyncio
import contextvars
from typing import Protocol

import pelton
from pelton.aio._watch import Closable, Closing

# Completions or requests that the driver takes before it lets tasks run. A guess.
TURN = 128


class _Handle(Closable, Protocol):
    def fileno(self) -> int: ...
    def disarm(self) -> None: ...


class Driver(Closing):
    """Runs `_drive` in the loop: after `_start`, and when the descriptor is readable."""

    def __init__(self, handle: _Handle) -> None:
        super().__init__(handle)
        self._handle = handle
        self._fd = handle.fileno()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_scheduled = False
        self._is_registered = False
        self._is_armed = False
        self._is_closed = False
        # Of the callbacks; None: that of the task which schedules them.
        self._context: contextvars.Context | None = None

    def _enter(self) -> asyncio.AbstractEventLoop:
        """The running loop, which is the only one for this object until it is closed."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._loop is not None and not self._loop.is_closed():
                raise pelton.Busy("this object belongs to another event loop, which is not closed: open one here")
            # A closed loop has forgotten the descriptor and the driver.
            self._is_scheduled = self._is_registered = False
            self._loop = loop
            self._left()
        return loop

    def _left(self) -> None:
        """The loop of before is closed, and with it every task of before."""

    def _start(self) -> None:
        """Has the driver run after the tasks that are ready now."""
        if self._is_scheduled or self._loop is None:
            return
        if self._is_armed:
            # The peer need not ring: the driver polls.
            self._is_armed = False
            self._handle.disarm()
        self._is_scheduled = True
        self._loop.call_soon(self._scheduled, context=self._context)

    def _scheduled(self) -> None:
        self._is_scheduled = False
        if self._is_closed:
            return
        try:
            self._drive()
        except MemoryError:
            # It tries again, and the loop reports the error. Otherwise nothing would wake the tasks any more.
            self._start()
            raise

    def _rung(self) -> None:
        self._is_armed = False
        if not self._is_scheduled:
            self._scheduled()

    def _drive(self) -> None:
        raise NotImplementedError

    def _watch(self) -> None:
        """The handle is armed: the loop watches its descriptor."""
        self._is_armed = True
        if not self._is_registered and self._loop is not None:
            self._loop.add_reader(self._fd, self._rung)
            self._is_registered = True

    def _unwatch(self) -> None:
        self._is_armed = False
        if self._is_registered and self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._is_registered = False
