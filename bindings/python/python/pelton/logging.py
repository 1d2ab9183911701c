"""Log records of many processes in one: `logging.handlers.QueueHandler` and `QueueListener` over a channel.

In the process that writes the log:

    with pelton.logging.Listener("log", logging.FileHandler("all.log")):
        ...

In each of the others, which may start earlier or later:

    logging.getLogger().addHandler(pelton.logging.Handler("log"))

Each process has a lane of its own to the listener: no lock is between them, and none waits for another. A record is a
JSON object with the attributes of `logging.LogRecord`, so programs in other languages can read and send them. An
attribute that JSON lacks, of `extra`, arrives as its `str`; one with keys that JSON lacks as its `repr`.

- **Full, or no listener.** A handler waits up to its `timeout` for space or for the listener, then drops the record,
  counts it in `dropped`, and reports the error as `logging` does (`Handler.handleError`).
- **Fork.** A forked child's handler opens a lane of its own with its first record.
- **Restart and kill.** Records that a killed process has sent arrive. The successor of a listener that was stopped or
  killed, under the same name, gets what was not handled, also the record that was being handled. Each handler connects
  to it with its next record. Until then the lane keeps the records, and they end with the handler's process.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import select
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Self

import pelton

__all__ = ["Handler", "Listener"]

# The listener checks this often whether it is to stop, in seconds. A guess.
_TURN = 0.1
# As long as a handler waits at least for a listener that is there, or its successor. Longer than a handshake takes; a
# guess.
_ACCEPT = 0.05
# As long as a listener that stops handles records which still come, in seconds. A guess.
_DRAIN = 1.0


class Handler(logging.handlers.QueueHandler):
    """Sends records to the `Listener` under `name`. Any number of threads may share it, as every handler.

    `timeout` is how many seconds a record may wait for space, or for the listener. With 0, the default, a record waits
    for nothing, except that the first one for a listener, or for its successor, waits up to 50 ms until that accepts.
    `capacity` is the bytes of this process's lane.
    """

    def __init__(self, name: str, *, timeout: float = 0.0, capacity: int | None = None) -> None:
        """Does not connect: the first record does."""
        # The queue of the base class, which only `enqueue` uses.
        super().__init__(None)  # type: ignore[arg-type]
        self.name_of_listener = name
        self.timeout = timeout
        self.capacity = capacity
        self.dropped = 0
        """How many records were dropped."""
        self._sender: pelton.Sender | None = None
        self._opening: pelton.Opening | None = None
        self._process = os.getpid()
        self._has_lost_listener = False

    def enqueue(self, record: logging.LogRecord) -> None:
        """Sends a record that `prepare` has prepared."""
        try:
            data = _encoded(record)
            sender = self._connected()
            try:
                # Detects now whether the listener has left: a send that finds space does so only at times.
                sender.arm()
                sender.disarm()
                sender.send(data, self.timeout)
            except (pelton.Closed, pelton.PeerDied):
                self._has_lost_listener = True
                self._connected().send(data, self.timeout)
        except Exception:
            self.dropped += 1
            raise

    def _connected(self) -> pelton.Sender:
        if self._process != os.getpid():
            # The parent's lane.
            self._disconnect()
            self._process = os.getpid()
        if self._sender is None or self._has_lost_listener:
            connected = self._connect()
            if self._sender is None:
                self._sender = connected
            else:
                # There is a successor, which gets what the listener has not handled. The handshake takes a moment.
                connected.close()
                self._sender.resume(max(self.timeout, _ACCEPT))
                self._has_lost_listener = False
        return self._sender

    def _connect(self) -> pelton.Sender:
        until = time.monotonic() + self.timeout
        if self._opening is None:
            until = max(until, time.monotonic() + _ACCEPT)
            self._opening = pelton.Sender.start_connect(
                self.name_of_listener, timeout=self.timeout, capacity=self.capacity
            )
        try:
            while (connected := self._opening.try_finish()) is None and (left := until - time.monotonic()) > 0:
                poll = select.poll()
                poll.register(self._opening.fileno(), select.POLLIN)
                poll.poll(left * 1000)
        except BaseException:
            self._abandon()
            raise
        if connected is None:
            # The next record continues with it.
            raise pelton.TimedOut(f"the listener of {self.name_of_listener} does not accept")
        self._abandon()
        assert isinstance(connected, pelton.Sender)
        return connected

    def _abandon(self) -> None:
        if self._opening is not None:
            self._opening.close()
        self._opening = None

    def _disconnect(self) -> None:
        self._abandon()
        if self._sender is not None:
            self._sender.close()
        self._sender = None
        self._has_lost_listener = False

    def close(self) -> None:
        """Ends this process's lane. What it has sent arrives."""
        with self.lock or threading.RLock():
            self._disconnect()
        super().close()


def _encoded(record: logging.LogRecord) -> bytes:
    """The record as a JSON object. Attributes that JSON refuses, such as a dictionary with a tuple as a key, by repr."""
    try:
        return json.dumps(record.__dict__, default=str).encode()
    except Exception:
        return json.dumps({str(name): _plain(value) for name, value in record.__dict__.items()}).encode()


def _plain(value: object) -> object:
    """What JSON can have of a value."""
    try:
        return json.loads(json.dumps(value, default=str))
    except Exception:
        try:
            return repr(value)
        except Exception:
            return f"<{type(value).__name__}, whose repr fails>"


class Listener:
    """Receives the records of all `Handler`s under `name`, and hands them to `handlers`, in a thread.

    As `logging.handlers.QueueListener`: `respect_handler_level` makes each handler get only records of its level. The
    name belongs to this user. `capacity` is the bytes of each process's lane.
    """

    def __init__(
        self, name: str, *handlers: logging.Handler, respect_handler_level: bool = False, capacity: int | None = None
    ) -> None:
        """Does not listen: `start` does."""
        self.name = name
        self.handlers = handlers
        self.respect_handler_level = respect_handler_level
        self.capacity = capacity
        self._receiver: pelton.Receiver | None = None
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._stops_at = 0.0

    def start(self) -> None:
        """Begins to receive. Raises `InUse` if another listener has the name."""
        if self._thread is not None:
            raise RuntimeError("this listener has started already: stop it before")
        self._is_stopping = False
        self._receiver = pelton.gather(self.name, capacity=self.capacity)
        self._thread = threading.Thread(target=self._receive, args=(self._receiver,), name="pelton.logging", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Handles the records that have arrived, for up to a second, and ends. The next listener gets the others.

        Handlers drop later records until another listener starts.
        """
        if self._thread is None or self._receiver is None:
            return
        self._stops_at = time.monotonic() + _DRAIN
        self._is_stopping = True
        self._thread.join()
        self._thread = None
        self._receiver.close()

    def _receive(self, receiver: pelton.Receiver) -> None:
        while not self._is_stopping or time.monotonic() < self._stops_at:
            try:
                # Released when it is handled.
                with receiver.peek(0 if self._is_stopping else _TURN) as view:
                    self._handle_bytes(bytes(view))
            except pelton.TimedOut:
                if self._is_stopping:
                    return
            except (pelton.ClosedHandle, pelton.Forked):
                return
            except (pelton.Closed, pelton.PeerDied, pelton.Corrupt):
                # One of many: the others go on.
                continue
            except pelton.Error as error:
                # Such as a lack of descriptors, which may pass.
                self._report(f"receiving log records: {error}")
                time.sleep(_TURN)

    def _handle_bytes(self, data: bytes) -> None:
        try:
            record = logging.makeLogRecord(json.loads(data))
            self.handle(record)
        except Exception:
            # Any process of this user may send anything, and handlers fail: the thread survives both.
            self._report(f"a log record was not handled: {data[:200]!r}\n{traceback.format_exc()}")

    def _report(self, text: str) -> None:
        # Not by logging: this process may have a handler that sends to this very thread.
        if logging.raiseExceptions and sys.stderr:
            print(f"pelton.logging: {text}", file=sys.stderr)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Returns the record for the handlers: for subclasses."""
        return record

    def handle(self, record: logging.LogRecord) -> None:
        """Hands a record to the handlers."""
        record = self.prepare(record)
        for handler in self.handlers:
            if not self.respect_handler_level or record.levelno >= handler.level:
                handler.handle(record)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
