"""What the tests share: names that nobody else uses, and processes that end with their test."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pelton
import pytest

# Every wait of a test has this limit, in seconds. It is long, because the machine may be busy.
LIMIT = 30.0


@pytest.fixture
def name(tmp_path: Path) -> str:
    """A name to listen under."""
    return f"unix:{tmp_path}/channel"


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts another interpreter with a script and arguments. It is killed at the test's end, if it still runs."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str, *arguments: object) -> subprocess.Popen[str]:
        program = [sys.executable, "-c", script, *map(str, arguments)]
        process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True, scope="session")
def what_stays_is_open() -> None:
    """Opens what a process opens once: uvloop's descriptor of its signals, among others."""
    import uvloop

    for make in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=make) as runner:
            runner.run(asyncio.sleep(0))
    for endpoint in pelton.threads():
        endpoint.close()


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    """Each test closes the descriptors that it opened."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    left = {}
    for fd in set(os.listdir("/proc/self/fd")) - before:
        with contextlib.suppress(FileNotFoundError):
            left[fd] = os.readlink(f"/proc/self/fd/{fd}")
    assert not left, "descriptors are left open"
