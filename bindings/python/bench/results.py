"""What the benchmarks here share: arguments, the interval of a ratio, the worst tenth, busy loops beside a run."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import random
import statistics
from collections.abc import Iterator, Sequence

RESAMPLES = 2000


def arguments(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """The arguments of every benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", type=int, nargs="?", default=rounds, help="how often each system runs, by turns")
    parser.add_argument("--beside-load", type=int, default=0, metavar="N", help="beside so many busy loops")
    return parser


def ratio(of: Sequence[float], to: Sequence[float]) -> str:
    """The ratio of two medians, with its 95 % bootstrap interval. The runs were by turns, so pairs are resampled."""
    chance = random.Random(1)
    pairs = list(zip(of, to, strict=True))

    def once() -> float:
        chosen = chance.choices(pairs, k=len(pairs))
        return statistics.median(one for one, _ in chosen) / statistics.median(other for _, other in chosen)

    found = sorted(once() for _ in range(RESAMPLES))
    low, high = found[RESAMPLES * 25 // 1000], found[RESAMPLES * 975 // 1000]
    return f"{statistics.median(of) / statistics.median(to):.2f} ({low:.2f} to {high:.2f})"


def spread(values: Sequence[float], digits: int, *, worst_is_low: bool = True) -> str:
    """The median, the lowest and the highest, and the mean of the worst tenth: of up to ten runs, the worst one."""
    ordered = sorted(values, reverse=not worst_is_low)
    tenth = statistics.mean(ordered[: max(1, len(ordered) // 10)])
    return (
        f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f}), "
        f"worst tenth {tenth:.{digits}f}"
    )


def _loop() -> None:
    while True:
        pass


@contextlib.contextmanager
def beside_load(loops: int) -> Iterator[None]:
    """Runs so many busy loops meanwhile, each in a process of its own."""
    processes = [multiprocessing.get_context("spawn").Process(target=_loop, daemon=True) for _ in range(loops)]
    try:
        for process in processes:
            process.start()
        yield
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
