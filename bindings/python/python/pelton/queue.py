"""`Queue`, `JoinableQueue` and `SimpleQueue`: those of multiprocessing, which go on when a process is killed.

    queue = pelton.Queue()
    worker = multiprocessing.Process(target=work, args=(queue,))
    worker.start()
    queue.put({"job": 1})                                # waits while the queue is full

**A queue is never unbounded.** Without `maxsize` it takes items until their bytes fill `capacity`, 1 GiB. Then `put`
waits. A program that puts more than that before anybody gets waits for ever: give a larger capacity. No thread feeds
it: when `put` returns, the item is in the queue, and stays there if this process is killed.
"""

from __future__ import annotations

import contextlib
import copyreg
import multiprocessing.util
import os
import pickle
import threading
import weakref
from collections import ChainMap
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from queue import Empty, Full
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pelton
from pelton._pelton import QueueFile

if TYPE_CHECKING:
    from typing import Self

    from pelton._pelton import Parts

__all__ = ["Empty", "Full", "JoinableQueue", "Queue", "SimpleQueue"]

T = TypeVar("T")

# Memory is used as it is filled. Enough for bursts, and half of it is the largest item.
_CAPACITY = 1 << 30


def pickler(parts: Parts, keep_buffer: Callable[[pickle.PickleBuffer], object]) -> pickle.Pickler:
    """A pickler as multiprocessing has it, whose buffers stay outside of the pickle. The compiled module calls this."""
    made = pickle.Pickler(parts, 5, buffer_callback=keep_buffer)
    # What multiprocessing and others have registered, such as connections and sockets, also later on.
    extra: dict[type, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    tables: list[dict[type, Any]] = [extra, copyreg.dispatch_table]
    made.dispatch_table = ChainMap(*tables)
    return made


class _Shared:
    """A queue's file, which each process opens by itself."""

    def __init__(self, file: QueueFile) -> None:
        self._file = file
        _open.add(self)

    @classmethod
    def _named(cls, name: str) -> Self:
        queue = cls.__new__(cls)
        _Shared.__init__(queue, QueueFile.open(name))
        return queue

    def __reduce__(self) -> tuple[Callable[[str], Self], tuple[str]]:
        if self._file.closed:
            raise ValueError("this queue is closed, and cannot be pickled: pickle one that is open")
        return type(self)._named, (self._file.name,)

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__qualname__} {self._file.name}>"

    @property
    def name(self) -> str:
        """The name of the file in /dev/shm. The file is removed when the last process closes the queue, or ends."""
        return self._file.name

    @property
    def closed(self) -> bool:
        """Whether this process has closed the queue."""
        return self._file.closed

    def empty(self) -> bool:
        """Whether there is no item now."""
        return self._file.qsize() == 0

    def close(self) -> None:
        """Ends the use of this object: other calls raise `ClosedHandle`, a ValueError. Other processes go on."""
        self._file.close()


class Queue(_Shared, Generic[T]):
    """As `multiprocessing.Queue`; a process that is killed at any time stops no other one.

    Any thread of any process of this user that has it may put and get: inherit it by fork, or pickle it. Wherever a
    method waits, `timeout` is in seconds; None is no limit. A wait ends for Ctrl-C within 50 ms.

    `maxsize` is the most items, 0 as many as `capacity` bytes hold; `capacity` is a multiple of 64, and an item has at
    most half of it. Raises `BadOption`, `NoSpace`.
    """

    def __init__(self, maxsize: int = 0, *, capacity: int = _CAPACITY) -> None:
        super().__init__(QueueFile.create(min(max(maxsize, 0), (1 << 31) - 1), capacity))

    def put(self, obj: T, block: bool = True, timeout: float | None = None) -> None:
        """Puts an object. Waits while the queue is full, up to `timeout` seconds; then raises `queue.Full`.

        Pickles it in this call, and raises what that raises. `TooLarge` if it exceeds half of the capacity; `NoSpace`
        if the memory is full. Then nothing is put.
        """
        self._file.put(obj, block, timeout)

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        """Takes the oldest object. Waits for one, up to `timeout` seconds; then raises `queue.Empty`.

        An object that cannot be unpickled is taken out, and raises what that raises.
        """
        item: T = self._file.get(block, timeout)
        return item

    def put_nowait(self, obj: T) -> None:
        """As `put` without waiting: raises `queue.Full`."""
        self._file.put(obj, False)

    def get_nowait(self) -> T:
        """As `get` without waiting: raises `queue.Empty`."""
        item: T = self._file.get(False)
        return item

    def qsize(self) -> int:
        """The number of objects now. Other processes may change it at once."""
        return self._file.qsize()

    def full(self) -> bool:
        """Whether `maxsize` objects are in the queue now. Without `maxsize` False, also while its bytes are full."""
        return 0 < self._file.items_max <= self._file.qsize()

    @property
    def maxsize(self) -> int:
        """The most objects; 0: as many as the capacity holds."""
        return self._file.items_max

    def join_thread(self) -> None:
        """Returns at once: there is no thread. Raises AssertionError before `close`, as multiprocessing does."""
        assert self._file.closed, f"{self!r} is not closed: call close() first"

    def cancel_join_thread(self) -> None:
        """Does nothing: there is no thread."""


class JoinableQueue(Queue[T]):
    """As `multiprocessing.JoinableQueue`: an object stays claimed by the process that got it until `task_done`.

    When that process is killed, the object is given to another one, and flagged. A process that closes the queue, or
    ends in order, has done what it got.
    """

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        """As `Queue.get`. Call `task_done` once the work for the object is done."""
        return self.get_flagged(block, timeout)[0]

    def get_flagged(self, block: bool = True, timeout: float | None = None) -> tuple[T, bool]:
        """As `get`; returns also whether a process that was killed had the object: its work may be done already."""
        return self._file.claim_object(block, timeout)

    def get_nowait(self) -> T:
        """As `get` without waiting: raises `queue.Empty`."""
        return self.get_flagged(False)[0]

    def task_done(self) -> None:
        """The work for an object is done: the oldest that this thread got, or else that this process got.

        Raises ValueError if the process has none.
        """
        if not self._file.task_done():
            raise ValueError("task_done() called too many times: call it once for each object, where it was got")

    def join(self) -> None:
        """Waits until no object is in the queue, and none is claimed."""
        self._file.join()


class SimpleQueue(_Shared, Generic[T]):
    """As `multiprocessing.SimpleQueue`."""

    def __init__(self, *, capacity: int = _CAPACITY) -> None:
        super().__init__(QueueFile.create(0, capacity))

    def put(self, obj: T) -> None:
        """Puts an object. Waits while its bytes do not fit."""
        self._file.put(obj)

    def get(self) -> T:
        """Takes the oldest object. Waits for one."""
        item: T = self._file.get()
        return item


# The queues of this process.
_open: weakref.WeakSet[_Shared] = weakref.WeakSet()


def _close_all() -> None:
    # A child of multiprocessing comes here before its other threads have ended, which may have items in hand.
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    for queue in list(_open):
        queue.close()
    # Also those that this process left before its children, which it has ended since.
    QueueFile.sweep()


# By thread: the descriptors that keep the files of its queues while it forks.
_kept: dict[int, list[int]] = {}


def _before_fork() -> None:
    kept = _kept.setdefault(threading.get_ident(), [])
    for queue in list(_open):
        if not queue._file.closed:
            with contextlib.suppress(pelton.Error):
                kept.append(queue._file.keep_for_child())


def _after_fork() -> None:
    for descriptor in _kept.pop(threading.get_ident(), []):
        os.close(descriptor)


def _in_child() -> None:
    # A lock of the parent's description is the parent's: each queue is opened anew. One for which that fails raises
    # Forked when it is used.
    for queue in list(_open):
        if not queue._file.closed:
            with contextlib.suppress(pelton.Error):
                queue._file = queue._file.reopen()
    # Also those of other threads that were about to fork: they do not exist here.
    for descriptor in [each for kept in _kept.values() for each in kept]:
        os.close(descriptor)
    _kept.clear()
    _close_at_end(None)


def _close_at_end(_: object) -> None:
    # In the order of multiprocessing: after the end of the processes that it ends, and after all that may use a queue.
    multiprocessing.util.Finalize(None, _close_all, exitpriority=-100)


_close_at_end(None)
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
# multiprocessing forgets what was to be done at the end of a child when that begins, and then calls this.
multiprocessing.util.register_after_fork(_close_at_end, _close_at_end)
