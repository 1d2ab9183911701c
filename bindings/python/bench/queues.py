"""Items a second from one producer to 1, 2 or 4 consumers: pelton.Queue, multiprocessing's queues and faster-fifo.

python bench/queues.py [ROUNDS] [--beside-load N] prints the median, the lowest and the highest of each and the worst
tenth, all by turns, and the speedups of pelton.Queue with 95 % bootstrap intervals. The clock runs from the first `put`
until the last consumer has got its None. faster-fifo is left out where it is not installed.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import time
from collections.abc import Callable
from queue import Empty
from typing import Any

import numpy
import pelton
from results import arguments, beside_load, ratio, spread

ITEM = ("job", 12345, {"name": "value", "size": 3.5})
ARRAY = numpy.ones(10_000_000 // 8)


def consume(queue: Any, done: Any) -> None:
    count = 0
    while True:
        try:
            if queue.get() is None:
                break
            count += 1
        except Empty:
            # faster-fifo waits for 10 seconds only.
            pass
    done.send(count)


def consume_lists(queue: Any, done: Any) -> None:
    count = 0
    while True:
        items = queue.get_many(max_messages_to_get=100)
        found = sum(item is not None for item in items)
        count += found
        if found < len(items):
            # The other consumers' ends may be in this list.
            for _ in range(len(items) - found - 1):
                queue.put(None)
            done.send(count)
            return


def put(queue: Any, item: Any, count: int) -> None:
    for _ in range(count):
        queue.put(item)


def put_lists(queue: Any, item: Any, count: int) -> None:
    for _ in range(count // 100):
        queue.put_many([item] * 100)


def measure(
    make: Callable[[], Any],
    item: Any,
    count: int,
    consumers: int,
    put: Callable[[Any, Any, int], None] = put,
    consume: Callable[[Any, Any], None] = consume,
) -> float:
    queue = make()
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(consumers)]
    processes = [multiprocessing.Process(target=consume, args=(queue, done)) for _, done in pipes]
    for process in processes:
        process.start()
    time.sleep(0.05)
    begun = time.perf_counter()
    put(queue, item, count)
    for _ in processes:
        queue.put(None)
    for _, end in pipes:
        end.close()
    got = sum(results.recv() for results, _ in pipes)
    seconds = time.perf_counter() - begun
    for process in processes:
        process.join()
    assert got == count, (got, count)
    if hasattr(queue, "close"):
        queue.close()
    return count / seconds


def main() -> None:
    options = arguments(__doc__, 5).parse_args()
    systems: dict[str, tuple[Callable[[], Any], int, int, dict[str, Any]]] = {
        "pelton.Queue": (pelton.Queue, 60_000, 30, {}),
        "multiprocessing.Queue": (multiprocessing.Queue, 15_000, 12, {}),
        "multiprocessing.SimpleQueue": (multiprocessing.SimpleQueue, 15_000, 12, {}),
    }
    if importlib.util.find_spec("faster_fifo"):
        import faster_fifo

        def fifo() -> Any:
            return faster_fifo.Queue(64 << 20)

        systems["faster-fifo"] = (fifo, 30_000, 20, {})
        systems["faster-fifo, lists of 100"] = (fifo, 60_000, 0, {"put": put_lists, "consume": consume_lists})
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    with beside_load(options.beside_load):
        for _ in range(options.rounds):
            for what, item, index in (("small", ITEM, 1), ("10 MB", ARRAY, 2)):
                for consumers in (1, 2, 4):
                    of_case = found.setdefault((what, consumers), {})
                    for name, system in systems.items():
                        if system[index]:
                            rate = measure(system[0], item, system[index], consumers, **system[3])
                            of_case.setdefault(name, []).append(rate)
    for (what, consumers), of_case in found.items():
        for name, rates in of_case.items():
            speedup = "" if name == "pelton.Queue" else f"; speedup {ratio(of_case['pelton.Queue'], rates)}"
            print(f"{what}, {consumers} consumers, {name:27} {spread(rates, 0)} items/s{speedup}")


if __name__ == "__main__":
    main()
