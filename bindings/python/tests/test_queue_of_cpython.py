"""CPython's own tests of queues, from the standard library's package `test`, where that is installed.

Those with processes run with fork, with spawn and with forkserver.

What does not apply, and why:

- `test_queue_feeder_donot_stop_onexc`, `test_queue_feeder_on_queue_feeder_error`: no thread feeds the queue, so an
  object that cannot be pickled raises in `put` (test_queue.py).
- `test_negative_timeout_raises_exception`: the class in `queue` refuses a negative timeout; multiprocessing's does not
  wait, and neither does this one.
- `test_shrinking_queue`: sets `maxsize` of a queue in use, which multiprocessing's cannot either.
- `TestSimpleQueue.test_closed`: reads private attributes.
"""

from __future__ import annotations

import multiprocessing
import queue
import unittest
from unittest import mock

import pelton
import pytest

cpython = pytest.importorskip("test._test_multiprocessing")
threads = pytest.importorskip("test.test_queue")


_SPAWN = multiprocessing.get_context("spawn")
_FORKSERVER = multiprocessing.get_context("forkserver")


class _Patched(unittest.TestCase):
    """Where a test makes the queue by the module's own name, it makes one of ours."""

    def setUp(self) -> None:
        super().setUp()
        for name in ("Queue", "JoinableQueue", "SimpleQueue"):
            patch = mock.patch.object(multiprocessing, name, getattr(pelton, name))
            patch.start()
            self.addCleanup(patch.stop)


class TestQueue(cpython._TestQueue, _Patched):  # type: ignore[misc, name-defined]
    TYPE = "processes"
    Process = multiprocessing.Process
    Event = staticmethod(multiprocessing.Event)
    Queue = pelton.Queue
    JoinableQueue = pelton.JoinableQueue

    test_queue_feeder_donot_stop_onexc = None
    test_queue_feeder_on_queue_feeder_error = None


class TestQueueBySpawn(TestQueue):
    Process = _SPAWN.Process
    Event = staticmethod(_SPAWN.Event)


class TestQueueByForkserver(TestQueue):
    Process = _FORKSERVER.Process
    Event = staticmethod(_FORKSERVER.Event)


class TestSimpleQueue(cpython.TestSimpleQueue, _Patched):  # type: ignore[misc, name-defined]
    """Of each start method: its child gets the events, which are of a context, and the queues by pickle."""

    context = multiprocessing.get_context("fork")
    test_closed = None

    def setUp(self) -> None:
        super().setUp()
        for name in ("Process", "Event"):
            patch = mock.patch.object(multiprocessing, name, getattr(self.context, name))
            patch.start()
            self.addCleanup(patch.stop)


class TestSimpleQueueBySpawn(TestSimpleQueue):
    context = _SPAWN


class TestSimpleQueueByForkserver(TestSimpleQueue):
    context = _FORKSERVER


class TestQueueOfThreads(threads.BaseQueueTestMixin, unittest.TestCase):  # type: ignore[misc, name-defined]
    queue = queue

    def setUp(self) -> None:
        self.type2test = pelton.Queue
        super().setUp()

    test_negative_timeout_raises_exception = None
    test_shrinking_queue = None
    # Of JoinableQueue: below.
    test_queue_task_done = None
    test_queue_join = None


class TestJoinableQueueOfThreads(threads.BaseQueueTestMixin, unittest.TestCase):  # type: ignore[misc, name-defined]
    queue = queue

    def setUp(self) -> None:
        self.type2test = pelton.JoinableQueue
        super().setUp()

    test_negative_timeout_raises_exception = None
    test_shrinking_queue = None
    # Expects the name of a class of `queue`.
    test_basic = None
