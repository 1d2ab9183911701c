"""Messages a second between two processes: pelton, multiprocessing.Queue and Pipe, by turns.

python bench/stream.py [ROUNDS] [--beside-load N] prints the median, the lowest and the highest of each and the worst
tenth, and pelton's speedups with 95 % bootstrap intervals; for comparison those of a loop that makes and drops bytes
objects of that size in one process.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable

import pelton
from results import arguments, beside_load, ratio, spread

SIZE = 256
PAYLOAD = bytes(SIZE)


def pelton_one(name: str, count: int) -> None:
    with pelton.Sender.connect(name, timeout=10) as sender:
        for _ in range(count):
            sender.send(PAYLOAD)


def pelton_lists(name: str, count: int) -> None:
    with pelton.Sender.connect(name, timeout=10) as sender:
        for _ in range(count // 256):
            sender.send_many([PAYLOAD] * 256)


def run_pelton(send: Callable[[str, int], None], count: int, many: bool) -> float:
    with tempfile.TemporaryDirectory() as directory:
        name = f"unix:{directory}/bench"
        with pelton.listen(name) as listener:
            process = multiprocessing.Process(target=send, args=(name, count))
            process.start()
            with listener.accept_receiver(10) as receiver:
                receiver.recv()
                begun, received = time.perf_counter(), 1
                try:
                    while True:
                        if many:
                            received += len(receiver.recv_many(256))
                        else:
                            receiver.recv()
                            received += 1
                except pelton.Closed:
                    pass
                seconds = time.perf_counter() - begun
            process.join()
    assert received == count // 256 * 256 if many else received == count
    return received / seconds


def queue_put(queue: multiprocessing.Queue[bytes], count: int) -> None:
    for _ in range(count):
        queue.put(PAYLOAD)


def run_queue(count: int) -> float:
    queue: multiprocessing.Queue[bytes] = multiprocessing.Queue()
    process = multiprocessing.Process(target=queue_put, args=(queue, count))
    process.start()
    queue.get()
    begun = time.perf_counter()
    for _ in range(count - 1):
        queue.get()
    seconds = time.perf_counter() - begun
    process.join()
    return count / seconds


def run_pipe(count: int) -> float:
    receive, send = multiprocessing.Pipe(duplex=False)

    def put() -> None:
        for _ in range(count):
            send.send_bytes(PAYLOAD)

    process = multiprocessing.Process(target=put)
    process.start()
    receive.recv_bytes()
    begun = time.perf_counter()
    for _ in range(count - 1):
        receive.recv_bytes()
    seconds = time.perf_counter() - begun
    process.join()
    return count / seconds


def run_loop(count: int) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        bytes(SIZE)
    return count / (time.perf_counter() - begun)


def main() -> None:
    options = arguments(__doc__, 5).parse_args()
    systems: dict[str, Callable[[], float]] = {
        "pelton": lambda: run_pelton(pelton_one, 2_000_000, False),
        "pelton, lists": lambda: run_pelton(pelton_lists, 2_000_000, True),
        "Queue": lambda: run_queue(100_000),
        "Pipe": lambda: run_pipe(200_000),
        "bytes(256)": lambda: run_loop(1_000_000),
    }
    found: dict[str, list[float]] = {system: [] for system in systems}
    with beside_load(options.beside_load):
        for _ in range(options.rounds):
            for system, run in systems.items():
                found[system].append(run() / 1e6)
    for system, rates in found.items():
        print(f"{system:14} {spread(rates, 2)} M/s")
    for own in ("pelton", "pelton, lists"):
        for other in ("Queue", "Pipe", "bytes(256)"):
            print(f"speedup, {own} to {other}: {ratio(found[own], found[other])}")


if __name__ == "__main__":
    main()
