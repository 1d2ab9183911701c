"""What the tests share: names that nobody else uses, and processes that end with their test."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pelton
import pytest
import uvloop

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


Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine in a new loop, with a limit."""

    def run(coroutine: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(coroutine, LIMIT))

    return run


@pytest.fixture
def short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A short name, which several services may share, and which no other test has."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield "service"
    # Killed services have left their sockets there.
    shutil.rmtree(tmp_path / "pelton", ignore_errors=True)


@pytest.fixture
def tool() -> str:
    """The command `pelton`, as a peer that is written in Rust."""
    found = os.environ.get("PELTON_TOOL")
    assert found, "PELTON_TOOL is not set: run the tests by `./run test-python`"
    return found


@contextlib.contextmanager
def forked(child: Callable[[], None]) -> Iterator[int]:
    """Runs `child` in a forked process, and kills that at the end if it has not ended."""
    pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, 9)
            os.waitpid(pid, 0)


@pytest.fixture(autouse=True, scope="session")
def what_stays_is_open() -> None:
    """Opens what a process opens once: uvloop's descriptor of its signals, multiprocessing's servers, among others."""
    multiprocessing.resource_tracker.ensure_running()
    multiprocessing.forkserver.ensure_running()
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
    deadline = time.monotonic() + LIMIT
    # Closing an engine of files does not wait for its threads. The last one that ends closes the engine's eventfd.
    while left := opened_since(before):
        assert time.monotonic() < deadline, f"descriptors are left open: {left}"
        time.sleep(0)


def opened_since(before: set[str]) -> dict[str, str]:
    """The descriptors that are open and were not before, and what each is."""
    left = {}
    for fd in set(os.listdir("/proc/self/fd")) - before:
        with contextlib.suppress(FileNotFoundError):
            left[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return left


def resident() -> int:
    """Bytes of memory that this process has."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")
