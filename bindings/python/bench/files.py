"""Reads of 4 KiB that the page cache has, a second, in asyncio: pelton.files and aiofiles, by turns.

python bench/files.py [ROUNDS] [--beside-load N] prints the median, the lowest and the highest of each and the worst
tenth, and the speedups with 95 % bootstrap intervals; for comparison those of `os.pread`, which blocks the loop.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable

import aiofiles
import pelton.files
from results import arguments, beside_load, ratio, spread

BYTES = 4096
FILE_BYTES = 16 << 20


def offsets(count: int) -> list[int]:
    chance = random.Random(1)
    return [chance.randrange(FILE_BYTES // BYTES) * BYTES for _ in range(count)]


async def run_pelton(path: str, count: int) -> float:
    async with await pelton.files.open(path) as file:
        begun = time.perf_counter()
        for offset in offsets(count):
            assert len(await file.pread(BYTES, offset)) == BYTES
        return count / (time.perf_counter() - begun)


async def run_aiofiles(path: str, count: int) -> float:
    async with aiofiles.open(path, "rb", buffering=0) as file:
        begun = time.perf_counter()
        for offset in offsets(count):
            await file.seek(offset)
            assert len(await file.read(BYTES)) == BYTES
        return count / (time.perf_counter() - begun)


async def run_aiofiles_in_order(path: str, count: int) -> float:
    """Without the seek, which costs aiofiles a second way to its thread."""
    async with aiofiles.open(path, "rb", buffering=0) as file:
        begun = time.perf_counter()
        for number in range(count):
            if number % (FILE_BYTES // BYTES) == 0:
                await file.seek(0)
            assert len(await file.read(BYTES)) == BYTES
        return count / (time.perf_counter() - begun)


async def run_pelton_in_order(path: str, count: int) -> float:
    begun = time.perf_counter()
    read = 0
    while read < count:
        async with await pelton.files.open(path) as file:
            for _ in range(min(count - read, FILE_BYTES // BYTES)):
                assert len(await file.read(BYTES)) == BYTES
                read += 1
    return count / (time.perf_counter() - begun)


async def run_os(path: str, count: int) -> float:
    fd = os.open(path, os.O_RDONLY)
    begun = time.perf_counter()
    for offset in offsets(count):
        assert len(os.pread(fd, BYTES, offset)) == BYTES
    seconds = time.perf_counter() - begun
    os.close(fd)
    return count / seconds


def main() -> None:
    options = arguments(__doc__, 7).parse_args()
    systems: dict[str, tuple[Callable[[str, int], Awaitable[float]], int]] = {
        "pelton, any offset": (run_pelton, 50_000),
        "aiofiles, any offset": (run_aiofiles, 3_000),
        "pelton, in order": (run_pelton_in_order, 50_000),
        "aiofiles, in order": (run_aiofiles_in_order, 5_000),
        "os.pread, which blocks": (run_os, 50_000),
    }
    found: dict[str, list[float]] = {system: [] for system in systems}
    with tempfile.NamedTemporaryFile() as file:
        file.write(os.urandom(FILE_BYTES))
        file.flush()

        async def measure(run: Callable[[str, int], Awaitable[float]], count: int) -> float:
            return await run(file.name, count)

        with beside_load(options.beside_load):
            for _ in range(options.rounds):
                for system, (run, count) in systems.items():
                    found[system].append(asyncio.run(measure(run, count)) / 1e3)
    for system, rates in found.items():
        print(f"{system:24} {spread(rates, 1)} k/s")
    for order in ("any offset", "in order"):
        print(f"speedup, {order}: {ratio(found[f'pelton, {order}'], found[f'aiofiles, {order}'])}")


if __name__ == "__main__":
    main()
