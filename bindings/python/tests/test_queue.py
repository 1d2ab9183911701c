"""pelton.Queue, JoinableQueue and SimpleQueue: items between processes, and kills at any time."""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import pickle
import random
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, Full
from typing import Any

import pelton
import pytest
from conftest import LIMIT
from pelton.queue import JoinableQueue, Queue, SimpleQueue

# The kills of each test that kills. `./run verify python` sets more.
KILLS = int(os.environ.get("PELTON_QUEUE_KILLS", "120"))
# The seed of the times at which they happen, shown when a test fails.
SEED = int(os.environ.get("PELTON_SEED", random.randrange(1 << 32)))

METHODS = ["fork", "spawn", "forkserver"]
SHM = Path("/dev/shm")


@pytest.fixture(autouse=True, scope="module")
def what_multiprocessing_keeps_is_open() -> None:
    """Opens what multiprocessing opens once in a process."""
    multiprocessing.resource_tracker.ensure_running()
    multiprocessing.forkserver.ensure_running()


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    """Makes a queue of a class. After the test it is closed, and leaves no file."""
    made: list[Any] = []

    def make(kind: Any = Queue, *arguments: Any, **named: Any) -> Any:
        made.append(kind(*arguments, **named))
        return made[-1]

    yield make
    names = [queue.name for queue in made]
    for queue in made:
        queue.close()
    made.clear()
    gc.collect()
    assert not [path.name for name in names for path in SHM.glob(f"{name}*")]


Make = Callable[..., Any]


@pytest.fixture
def run() -> Iterator[Callable[..., Any]]:
    """Starts a process by a method of multiprocessing. What still runs after the test is killed."""
    started: list[Any] = []

    def run(method: str, target: Callable[..., object], *arguments: object) -> Any:
        context: Any = multiprocessing.get_context(method)
        process = context.Process(target=target, args=arguments)
        process.start()
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.join()
        process.close()


Run = Callable[..., Any]


def ended(process: Any) -> None:
    """Waits until a process has ended well."""
    process.join(LIMIT)
    assert process.exitcode == 0


class Point:
    """An object of a class of its own."""

    def __init__(self, x: object) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and other.x == self.x


OBJECTS = [
    None,
    0,
    "",
    b"",
    bytes(100_000),
    "text" * 50_000,
    [1, 2.5, "three"],
    {"a": (1, {2})},
    Point([Point(None)]),
    bytearray(70_000),
    Path("/"),
]


@pytest.mark.parametrize("kind", [Queue, JoinableQueue, SimpleQueue])
def test_objects_arrive_in_order_and_equal(make: Make, kind: Any) -> None:
    queue = make(kind)
    for item in OBJECTS:
        queue.put(item)
    assert not queue.empty()
    assert [queue.get() for _ in OBJECTS] == OBJECTS
    assert queue.empty()


def echo(given: Any, back: Any, count: int) -> None:
    for _ in range(count):
        back.put(given.get())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [Queue, JoinableQueue, SimpleQueue])
def test_a_queue_works_in_a_child_both_ways(make: Make, run: Run, kind: Any, method: str) -> None:
    given, back = make(kind), make(kind)
    process = run(method, echo, given, back, 1000 + len(OBJECTS))
    items = [*range(1000), *OBJECTS]
    for item in items:
        given.put(item)
    assert [back.get() for _ in items] == items
    ended(process)


def test_an_inherited_queue_works_after_a_fork_and_after_its_parent_has_closed_it(make: Make) -> None:
    given, back = make(), make()
    wait, go = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.read(wait, 1)
            # The description that it inherited is not its own.
            back.put(given.get(timeout=LIMIT) + 1)
            os._exit(0)
        os._exit(1)
    given.put(41)
    given.close()
    os.write(go, b"x")
    os.close(go)
    os.close(wait)
    assert back.get(timeout=LIMIT) == 42
    assert os.waitpid(child, 0)[1] == 0
    # The child was the last one, and ended without closing: the next queue removes the file.
    make()


def test_a_queue_travels_through_a_queue(make: Make, run: Run) -> None:
    outer, inner = make(), make(maxsize=3)
    outer.put(inner)
    got = outer.get()
    assert got.name == inner.name and got.maxsize == 3
    got.put("through")
    assert inner.get() == "through"
    got.close()


def test_connections_and_sockets_are_sent_as_multiprocessing_sends_them(make: Make, run: Run) -> None:
    given, back = make(), make()
    process = run("fork", echo, given, back, 3)
    ours, theirs = multiprocessing.Pipe()
    left, right = socket.socketpair()
    given.put(theirs)
    theirs_again = back.get(timeout=LIMIT)
    ours.send("hello")
    assert theirs_again.recv() == "hello"
    given.put(right)
    right_again = back.get(timeout=LIMIT)
    left.send(b"hello")
    assert right_again.recv(5) == b"hello"
    for end in (ours, theirs, theirs_again, left, right, right_again):
        end.close()
    # It hands out what it has sent, until it ends.
    given.put(None)
    ended(process)
    # The thread of multiprocessing that hands out descriptors.
    multiprocessing.resource_sharer.stop(timeout=LIMIT)  # type: ignore[attr-defined]


@pytest.mark.parametrize("shape", [(0,), (5,), (3, 7), (300, 1000), (1, 1_300_000)])
def test_an_array_arrives_outside_of_the_pickle_aligned_and_writable(make: Make, shape: tuple[int, ...]) -> None:
    import numpy

    queue = make()
    array = numpy.arange(numpy.prod(shape), dtype=numpy.float64).reshape(shape)
    fixed = array.copy()
    fixed.flags.writeable = False
    queue.put({"array": array, "fixed": fixed, "slice": array[..., ::2]})
    got = queue.get()
    assert all(numpy.array_equal(got[name], array) for name in ("array", "fixed"))
    assert numpy.array_equal(got["slice"], array[..., ::2])
    assert got["array"].flags.writeable and not got["fixed"].flags.writeable
    assert got["array"].ctypes.data % 64 == 0 or array.size == 0
    got["array"][...] = 0
    assert numpy.array_equal(got["fixed"], array)


def test_an_array_keeps_its_memory_after_the_queue_is_closed(make: Make) -> None:
    import numpy

    queue = make()
    queue.put(numpy.full(1_000_000, 7))
    array = queue.get()
    queue.close()
    del queue
    gc.collect()
    assert array.sum() == 7_000_000


def test_an_object_that_cannot_be_pickled_is_refused_in_put_and_nothing_is_put(make: Make) -> None:
    queue = make()
    with pytest.raises((AttributeError, pickle.PicklingError, TypeError)):
        queue.put([1, lambda: None])
    assert queue.empty()
    queue.put([1, 2])
    assert queue.get() == [1, 2]


class Nested:
    """Puts into the queue while it is pickled, and takes from it while it is unpickled."""

    queue: Any = None

    def __reduce__(self) -> Any:
        self.queue.put("before")
        return nested, ("argument",)


def nested(argument: str) -> tuple[str, str]:
    return argument, Nested.queue.get(timeout=LIMIT)


def test_pickling_and_unpickling_may_use_the_same_queue(make: Make) -> None:
    queue = Nested.queue = make()
    queue.put(Nested())
    queue.put("after")
    assert queue.get() == "before"
    assert queue.get() == ("argument", "after")


def fail() -> None:
    raise ZeroDivisionError


class Broken:
    def __reduce__(self) -> Any:
        return fail, ()


def test_an_object_that_cannot_be_unpickled_is_taken_out(make: Make) -> None:
    queue = make()
    queue.put(Broken())
    queue.put("next")
    with pytest.raises(ZeroDivisionError):
        queue.get()
    assert queue.get() == "next"


@pytest.mark.parametrize("maxsize", [1, 2, 7])
def test_maxsize_is_exact(make: Make, maxsize: int) -> None:
    queue = make(Queue, maxsize)
    for _ in range(3):
        for number in range(maxsize):
            assert not queue.full()
            queue.put_nowait(number)
        assert queue.full() and queue.qsize() == queue.maxsize == maxsize
        for refused in (lambda: queue.put_nowait(0), lambda: queue.put(0, timeout=0.01), lambda: queue.put(0, False)):
            with pytest.raises(Full):
                refused()
        assert [queue.get_nowait() for _ in range(maxsize)] == list(range(maxsize))
        for refused in (queue.get_nowait, lambda: queue.get(timeout=0.01), lambda: queue.get(False)):
            with pytest.raises(Empty):
                refused()


def test_without_maxsize_the_capacity_is_the_bound_and_put_waits_behind_it(make: Make) -> None:
    queue = make(capacity=1 << 20)
    item = bytes(1000)
    for part in range(4):
        count = 0
        with pytest.raises(Full):
            while True:
                queue.put_nowait(item)
                count += 1
        # All of it but for the records' headers, wherever the last round has ended.
        assert count * 1100 > 1 << 20
        assert not queue.full()
        assert [queue.get() for _ in range(count)] == [item] * count
        # Within the window, so that the next round begins somewhere else.
        for _ in range(111 * part):
            queue.put(item)
            queue.get()


def test_an_item_of_more_than_half_of_the_capacity_is_refused(make: Make) -> None:
    queue = make(capacity=1 << 20)
    queue.put(bytes((1 << 19) - 100))
    with pytest.raises(pelton.TooLarge):
        queue.put(bytes(1 << 19))
    assert len(queue.get()) == (1 << 19) - 100


@pytest.mark.parametrize("capacity", [0, 100, 1 << 40])
def test_a_capacity_that_is_none_is_refused(capacity: int) -> None:
    with pytest.raises(pelton.BadOption, match="capacity"):
        Queue(capacity=capacity)


def test_a_waiting_put_and_a_waiting_get_end_when_another_thread_does_its_part(make: Make) -> None:
    queue = make(Queue, 1)
    queue.put(0)
    thread = threading.Thread(target=lambda: [queue.put(number, timeout=LIMIT) for number in range(1, 100)])
    thread.start()
    assert [queue.get(timeout=LIMIT) for _ in range(100)] == list(range(100))
    thread.join()


def test_many_threads_of_one_process_put_and_get(make: Make) -> None:
    queue = make(Queue, 10)
    got: list[Any] = []

    def put(thread: int) -> None:
        for number in range(500):
            queue.put((thread, number))

    def get() -> None:
        while (item := queue.get(timeout=LIMIT)) is not None:
            got.append(item)

    threads = [threading.Thread(target=put, args=(thread,)) for thread in range(4)]
    takers = [threading.Thread(target=get) for _ in range(4)]
    for thread in threads + takers:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in takers:
        queue.put(None)
    for thread in takers:
        thread.join()
    assert sorted(got) == [(thread, number) for thread in range(4) for number in range(500)]


def put_numbers(queue: Any, producer: int, count: int) -> None:
    for number in range(count):
        queue.put((producer, number, bytes(number % 3000)))


def get_numbers(queue: Any, results: Any) -> None:
    got: list[tuple[int, int]] = []
    while (item := queue.get()) is not None:
        got.append(item[:2])
    results.put(got)


@pytest.mark.parametrize("method", METHODS)
def test_many_producers_and_many_consumers_get_each_item_once_and_in_order(make: Make, run: Run, method: str) -> None:
    queue, results = make(capacity=1 << 18), make()
    producers = [run(method, put_numbers, queue, producer, 1000) for producer in range(2)]
    consumers = [run(method, get_numbers, queue, results) for _ in range(2)]
    for process in producers:
        ended(process)
    for _ in consumers:
        queue.put(None)
    parts = [results.get(timeout=LIMIT) for _ in consumers]
    for process in consumers:
        ended(process)
    assert sorted(sum(parts, [])) == [(producer, number) for producer in range(2) for number in range(1000)]
    for part in parts:
        for producer in range(2):
            numbers = [number for of, number in part if of == producer]
            assert numbers == sorted(numbers)


def test_ctrl_c_ends_a_waiting_get_and_loses_nothing(make: Make, start: Callable[..., Any]) -> None:
    queue = make()
    script = """
import sys, pelton
queue = pelton.Queue._named(sys.argv[1])
try:
    print("waits", flush=True)
    queue.get()
except KeyboardInterrupt:
    print("interrupted")
"""
    process = start(script, queue.name)
    assert process.stdout.readline() == "waits\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=LIMIT)[0] == "interrupted\n"
    queue.put("still there")
    assert queue.get() == "still there"


def test_a_handler_of_a_signal_may_use_the_queue_that_its_thread_waits_for(make: Make) -> None:
    queue = make()
    before = signal.signal(signal.SIGALRM, lambda *_: queue.put("from the handler"))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert queue.get(timeout=LIMIT) == "from the handler"
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_closed_queue_says_so_and_its_other_processes_go_on(make: Make, run: Run) -> None:
    given, back = make(Queue, 5), make()
    process = run("fork", echo, given, back, 1)
    with pytest.raises(AssertionError, match="close"):
        given.join_thread()
    given.cancel_join_thread()
    given.put("hello")
    given.close()
    given.close()
    given.join_thread()
    assert given.closed
    for call in (lambda: given.put(1), given.get, given.qsize, given.empty, lambda: pickle.dumps(given)):
        with pytest.raises(ValueError, match="closed"):
            call()
    assert back.get(timeout=LIMIT) == "hello"
    ended(process)


def test_a_close_ends_the_wait_of_another_thread(make: Make) -> None:
    queue = make()
    errors: list[BaseException] = []

    def get() -> None:
        try:
            queue.get()
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=get)
    thread.start()
    time.sleep(0.05)
    queue.close()
    thread.join()
    assert "closed" in str(errors[0])


def test_task_done_and_join_count_what_was_got(make: Make) -> None:
    queue = make(JoinableQueue)
    with pytest.raises(ValueError, match="too many"):
        queue.task_done()
    queue.join()
    for number in range(10):
        queue.put(number)
    done: list[int] = []

    def work() -> None:
        while (number := queue.get()) is not None:
            done.append(number)
            queue.task_done()
        queue.task_done()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    queue.join()
    assert sorted(done) == list(range(10))
    for _ in threads:
        queue.put(None)
    queue.join()
    for thread in threads:
        thread.join()
    with pytest.raises(ValueError, match="too many"):
        queue.task_done()


# Kills.


def kill(process: Any) -> None:
    process.kill()
    process.join()


def wait_a_moment(chance: random.Random) -> None:
    # A forked child begins after some milliseconds.
    time.sleep(0.002 + chance.random() * 0.01)


def get_for_ever(queue: Any) -> None:
    while True:
        queue.get()


def put_for_ever(queue: Any, item: object) -> None:
    while True:
        queue.put(item)


@pytest.mark.parametrize("method", METHODS)
def test_a_kill_of_a_process_that_waits_with_a_role_stops_no_other_one(make: Make, run: Run, method: str) -> None:
    queue = make(Queue, 2)
    for _ in range(10 if method == "fork" else 1):
        waiting = run(method, get_for_ever, queue)
        queue.put("taken by the child", timeout=LIMIT)
        while not queue.empty():
            time.sleep(0.001)
        kill(waiting)
        queue.put("after")
        assert queue.get(timeout=LIMIT) == "after"
        waiting = run(method, put_for_ever, queue, "child")
        while not queue.full():
            time.sleep(0.001)
        kill(waiting)
        assert [queue.get(timeout=LIMIT) for _ in range(2)] == ["child"] * 2
        with contextlib.suppress(Empty):
            queue.get_nowait()
        queue.put("after")
        assert queue.get(timeout=LIMIT) == "after"


def count_up(queue: Any, done: Any, producer: int, bytes_: int) -> None:
    number = 0
    while True:
        queue.put((producer, number, bytes(bytes_)))
        number += 1
        done[producer] = number


@pytest.mark.parametrize("bytes_", [0, 5_000, 300_000])
def test_a_kill_of_a_producer_loses_no_item_that_it_had_put(make: Make, run: Run, bytes_: int) -> None:
    queue, chance = make(capacity=1 << 22), random.Random(SEED)
    kills = max(KILLS // 3, 1)
    memory = mmap.mmap(-1, 8 * kills)
    done = memoryview(memory).cast("Q")
    got: dict[int, int] = dict.fromkeys(range(kills), 0)
    ends = threading.Event()

    def get() -> None:
        while True:
            try:
                producer, number, _ = queue.get(timeout=0.05)
            except Empty:
                if ends.is_set():
                    return
                continue
            assert number == got[producer], SEED
            got[producer] = number + 1

    thread = threading.Thread(target=get)
    thread.start()
    for first in range(0, kills, 2):
        processes = [run("fork", count_up, queue, done, it, bytes_) for it in range(first, min(first + 2, kills))]
        wait_a_moment(chance)
        for process in processes:
            kill(process)
    ends.set()
    thread.join()
    # The last item may be put, and not counted by its producer any more.
    assert all(got[producer] - done[producer] in (0, 1) for producer in range(kills)), SEED
    assert queue.empty()


def record_each(queue: Any, path: str) -> None:
    """Records each item that it gets, in one write, and then says that it is done."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND)
    while True:
        (number, _), again = queue.get_flagged()
        os.write(log, struct.pack("II", number, again))
        queue.task_done()


@pytest.mark.parametrize("bytes_", [0, 5_000, 300_000])
def test_a_kill_of_a_consumer_gives_what_was_not_done_again_and_flagged(
    make: Make, run: Run, tmp_path: Path, bytes_: int
) -> None:
    queue, chance = make(JoinableQueue, capacity=1 << 22), random.Random(SEED)
    log = tmp_path / "log"
    log.touch()
    put = 0
    ends = threading.Event()

    def feed() -> None:
        nonlocal put
        while not ends.is_set():
            with contextlib.suppress(Full):
                queue.put((put, bytes(bytes_)), timeout=0.05)
                put += 1

    thread = threading.Thread(target=feed)
    thread.start()
    consumers = [run("fork", record_each, queue, str(log)) for _ in range(3)]
    kills = max(KILLS // 3, 1)
    for _ in range(kills):
        wait_a_moment(chance)
        victim = chance.randrange(3)
        kill(consumers[victim])
        consumers[victim] = run("fork", record_each, queue, str(log))
    ends.set()
    thread.join()
    queue.join()
    for process in consumers:
        kill(process)
    records = list(struct.iter_unpack("II", log.read_bytes()))
    assert {number for number, _ in records} == set(range(put)), SEED
    assert max(Counter(number for number, again in records if not again).values(), default=1) == 1, SEED
    # Each consumer had at most one item.
    assert len(records) - put <= kills, SEED


def record_and_stop(queue: Any, path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_APPEND)
    while True:
        os.write(log, struct.pack("I", queue.get()[0]))


def test_a_kill_of_a_consumer_of_a_plain_queue_takes_only_the_item_that_it_had(
    make: Make, run: Run, tmp_path: Path
) -> None:
    queue, chance = make(), random.Random(SEED)
    log = tmp_path / "log"
    log.touch()
    put = 0
    for _ in range(max(KILLS // 2, 1)):
        consumers = [run("fork", record_and_stop, queue, str(log)) for _ in range(2)]
        for _ in range(200):
            queue.put((put, bytes(5_000)))
            put += 1
        wait_a_moment(chance)
        for process in consumers:
            kill(process)
    numbers = [number for (number,) in struct.iter_unpack("I", log.read_bytes())]
    while not queue.empty():
        numbers.append(queue.get(timeout=LIMIT)[0])
    assert len(numbers) == len(set(numbers)), SEED
    assert put - len(numbers) <= 2 * max(KILLS // 2, 1), SEED


def hold(queue: Any, children: Any) -> None:
    """Gets an item, and holds it. Forks a child before and one after that."""
    for _ in range(2):
        child = os.fork()
        if child == 0:
            time.sleep(LIMIT)
            os._exit(0)
        children.put(child)
        queue.get()


def test_an_item_of_a_killed_consumer_is_given_to_one_that_waits_though_children_of_it_live(
    make: Make, run: Run
) -> None:
    queue, children = make(JoinableQueue), make()
    queue.put("job")
    process = run("fork", hold, queue, children)
    forked = [children.get(timeout=LIMIT) for _ in range(2)]
    try:
        while not queue.empty():
            time.sleep(0.001)
        with pytest.raises(Empty):
            queue.get(timeout=0.1)
        kill(process)
        assert queue.get_flagged(timeout=LIMIT) == ("job", True)
        queue.task_done()
        queue.join()
    finally:
        for child in forked:
            os.kill(child, signal.SIGKILL)
            # It has no parent any more that waits for it.
            while (stat := Path(f"/proc/{child}/stat")).exists() and ") Z" not in stat.read_text():
                time.sleep(0.001)


# Where queue_file.rs has them: the lane's tail and head, and the number of the item that a consumer has begun to take.
TAIL, HEAD, TAKING = 65536 + 128, 2 * 65536 + 128, 512


@contextlib.contextmanager
def memory_of(queue: Any) -> Iterator[memoryview]:
    """The memory of a queue, to make it as a process leaves it that is killed between two stores."""
    with (SHM / queue.name).open("r+b") as file, mmap.mmap(file.fileno(), 4 * 65536) as memory:
        with memoryview(memory) as view:
            yield view


def test_a_producer_killed_after_it_published_an_item_and_before_it_counted_it_loses_nothing(make: Make) -> None:
    queue = make(Queue, 3)
    with memory_of(queue) as memory:
        queue.put("one")
        tail = bytes(memory[TAIL : TAIL + 8])
        queue.put("two")
        memory[TAIL : TAIL + 8] = tail
        queue.put("three")
        with pytest.raises(Full):
            queue.put_nowait("four")
        tail = bytes(memory[TAIL : TAIL + 8])
        assert [queue.get() for _ in range(3)] == ["one", "two", "three"]
        queue.put("four")
        memory[TAIL : TAIL + 8] = tail
        assert queue.get() == "four"
        assert queue.qsize() == 0
        queue.put("five")
        assert queue.get() == "five"


def test_an_item_of_a_consumer_killed_between_its_copy_and_the_release_is_given_once(make: Make, run: Run) -> None:
    queue, children = make(JoinableQueue), make()
    queue.put("job")
    with memory_of(queue) as memory:
        head = bytes(memory[HEAD : HEAD + 8])
        process = run("fork", hold_alone, queue, children)
        children.get(timeout=LIMIT)
        kill(process)
        # The number is the upper half of the position.
        memory[HEAD : HEAD + 8] = head
        memory[TAKING : TAKING + 4] = head[4:]
    assert queue.get_flagged(timeout=LIMIT) == ("job", True)
    with pytest.raises(Empty):
        queue.get(timeout=0.1)
    queue.task_done()
    queue.join()


def hold_alone(queue: Any, children: Any) -> None:
    queue.get()
    children.put("got it")
    time.sleep(LIMIT)


def test_after_a_kill_of_all_the_files_are_left_and_the_next_queue_removes_them(
    make: Make, start: Callable[..., Any]
) -> None:
    script = """
import os, pelton, sys, time
queue = pelton.JoinableQueue()
queue.put(bytes(1_000_000))
queue.put(2)
queue.get()
print(queue.name, flush=True)
time.sleep(30)
"""
    process = start(script)
    name = process.stdout.readline().strip()
    assert len(list(SHM.glob(f"{name}*"))) == 2
    process.kill()
    process.wait()
    assert len(list(SHM.glob(f"{name}*"))) == 2
    make()
    assert not list(SHM.glob(f"{name}*"))


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError", "queue.close()", "del queue"])
def test_a_process_that_ends_leaves_no_file(start: Callable[..., Any], end: str) -> None:
    script = f"""
import pelton, sys
queue = pelton.JoinableQueue()
queue.put(1)
queue.get()
print(queue.name, flush=True)
{end}
"""
    process = start(script)
    name = process.communicate(timeout=LIMIT)[0].strip()
    assert name.startswith("pelton-queue.")
    assert not list(SHM.glob(f"{name}*"))


def test_a_parent_that_drops_a_queue_before_it_ends_its_children_leaves_no_file(start: Callable[..., Any]) -> None:
    script = """
import multiprocessing, pelton

def main():
    queue = pelton.JoinableQueue()
    queue.put(1)
    multiprocessing.Process(target=lambda: [queue.get() for _ in range(2)], daemon=True).start()
    while not queue.empty():
        pass
    print(queue.name, flush=True)

main()
"""
    name = start(script).communicate(timeout=LIMIT)[0].strip()
    assert name.startswith("pelton-queue.")
    assert not list(SHM.glob(f"{name}*"))


def test_a_name_that_is_no_queue_of_this_user_is_refused(make: Make) -> None:
    queue = make()
    name = queue.name
    for wrong in ("../etc/passwd", "pelton-queue.99999.0", name + "/x", ""):
        with pytest.raises(pelton.NotAChannel):
            Queue._named(wrong)
    with pytest.raises(FileNotFoundError):
        Queue._named(name[:-1] + ("0" if name[-1] != "0" else "1"))
    (SHM / name).chmod(0o666)
    with pytest.raises(pelton.NotAChannel, match="of this user alone"):
        Queue._named(name)
    (SHM / name).chmod(0o600)


def test_a_million_items_leave_neither_memory_nor_descriptors(make: Make) -> None:
    queue = make()

    def pass_items(count: int) -> None:
        for number in range(count):
            queue.put((number, "text"))
            queue.get()

    pass_items(10_000)
    gc.collect()
    blocks, fds = sys.getallocatedblocks(), len(os.listdir("/proc/self/fd"))
    pass_items(int(os.environ.get("PELTON_QUEUE_ITEMS", "100000")))
    gc.collect()
    assert sys.getallocatedblocks() - blocks < 1000
    assert len(os.listdir("/proc/self/fd")) == fds
    # The items pass through the same part of the memory again and again.
    assert (SHM / queue.name).stat().st_blocks * 512 < 4 << 20


# What a review found.


def follow(queue: Any, done: Any, worker: int) -> None:
    """Puts what follows from an item before it says that the item is done."""
    while (depth := queue.get()) is not None:
        if depth > 0:
            queue.put(depth - 1)
        done[worker] += 1
        queue.task_done()
    queue.task_done()


def test_join_waits_also_for_items_that_follow_from_others(make: Make, run: Run) -> None:
    queue, done = make(JoinableQueue), memoryview(mmap.mmap(-1, 3 * 8)).cast("Q")
    workers = [run("fork", follow, queue, done, worker) for worker in range(3)]
    for round_ in range(1, 300):
        queue.put(4)
        queue.join()
        assert sum(done) == 5 * round_
    for _ in workers:
        queue.put(None)
    for worker in workers:
        ended(worker)


def test_a_parent_that_closes_at_once_leaves_the_queue_to_its_child(make: Make) -> None:
    for number in range(50):
        queue, back = Queue(), make()
        queue.put(number)
        child = os.fork()
        if child == 0:
            # It is there, and others can open it.
            back.put((SHM / queue.name).exists() and pickle.loads(pickle.dumps(queue)).get(timeout=LIMIT))
            back.close()
            queue.close()
            os._exit(0)
        name = queue.name
        queue.close()
        assert back.get(timeout=LIMIT) == number
        os.waitpid(child, 0)
        assert not (SHM / name).exists()


def files_of(queue: Any) -> list[Path]:
    return list(SHM.glob(f"{queue.name}.*"))


def test_one_item_in_hand_does_not_keep_the_memory_of_all_later_ones(make: Make) -> None:
    queue = make(JoinableQueue)
    held = threading.Event()

    def hold() -> None:
        assert queue.get() == "held"
        held.wait(LIMIT)
        queue.task_done()

    queue.put("held")
    thread = threading.Thread(target=hold)
    thread.start()
    while not queue.empty():
        time.sleep(0.001)
    for number in range(200):
        queue.put((number, bytes(100_000)))
        assert queue.get()[0] == number
        queue.task_done()
    assert sum(path.stat().st_size for path in files_of(queue)) < 4 << 20
    held.set()
    thread.join()
    queue.join()
    assert sum(path.stat().st_size for path in files_of(queue)) == 0


def get_each(queue: Any, children: Any, count: int) -> None:
    for _ in range(count):
        children.put(queue.get_flagged())
    time.sleep(LIMIT)


def test_the_items_of_a_killed_consumer_go_to_several_others(make: Make, run: Run) -> None:
    queue, children = make(JoinableQueue), make()
    for number in range(2):
        queue.put(number)
    first = run("fork", get_each, queue, children, 2)
    assert [children.get(timeout=LIMIT) for _ in range(2)] == [(0, False), (1, False)]
    kill(first)
    # Each takes one, and works on it for ever.
    others = [run("fork", get_each, queue, children, 1) for _ in range(2)]
    assert sorted(children.get(timeout=LIMIT) for _ in range(2)) == [(0, True), (1, True)]
    for other in others:
        kill(other)
    assert sorted(queue.get_flagged(timeout=LIMIT) for _ in range(2)) == [(0, True), (1, True)]
    queue.task_done()
    queue.task_done()
    queue.join()


def test_an_item_that_cannot_be_unpickled_is_done(make: Make) -> None:
    queue = make(JoinableQueue)
    queue.put(Broken())
    queue.put("next")
    with pytest.raises(ZeroDivisionError):
        queue.get()
    assert queue.get() == "next"
    queue.task_done()
    with pytest.raises(ValueError, match="too many"):
        queue.task_done()
    queue.join()


def test_a_close_during_a_get_claims_nothing_afterwards(make: Make) -> None:
    for _ in range(50):
        queue = JoinableQueue()
        other = pickle.loads(pickle.dumps(queue))
        taken: list[int] = []

        def get(queue: Any, taken: list[int]) -> None:
            with contextlib.suppress(ValueError):
                while True:
                    taken.append(queue.get())

        thread = threading.Thread(target=get, args=(queue, taken))
        thread.start()
        for number in range(20):
            other.put(number)
        queue.close()
        thread.join()
        # What the closed one has got counts as done, and the rest is there, once.
        rest = [other.get_flagged() for _ in range(other.qsize())]
        assert [*taken, *(number for number, _ in rest)] == list(range(20))
        assert not any(again for _, again in rest)
        for _ in rest:
            other.task_done()
        other.join()
        other.close()


def test_without_descriptors_join_raises_instead_of_returning(make: Make) -> None:
    queue = make(JoinableQueue)
    queue.put("in hand")
    queue.get()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with pytest.raises(OSError) as raised:
            queue.join()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert raised.value.errno == errno.EMFILE
    queue.task_done()
    queue.join()
