"""Services that `pelton run` starts, replaces and starts again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pelton
import pytest
from conftest import LIMIT

SERVICE = """
import os, signal, sys, time
import pelton

def reply(request):
    while request.data == b"wait" and not os.path.exists("go"):
        open("taken", "w").close()
        time.sleep(0.01)
    return str(os.getpid())

with pelton.Service.listen(sys.argv[1]) as service:
    signal.signal(signal.SIGTERM, lambda *_: service.drain())
    service.run(lambda request: reply(request).encode())
print("drained", flush=True)
"""

AIO_SERVICE = """
import asyncio, os, signal, sys
import pelton.aio

async def reply(request):
    while request.data == b"wait" and not os.path.exists("go"):
        open("taken", "w").close()
        await asyncio.sleep(0.01)
    return str(os.getpid()).encode()

async def main():
    async with pelton.aio.Service.listen(sys.argv[1]) as service:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, service.drain)
        await service.run(reply)

asyncio.run(main())
print("drained", flush=True)
"""


@contextlib.contextmanager
def running(tool: str, name: str, script: str, directory: Path) -> Iterator[subprocess.Popen[str]]:
    command = [tool, "run", name, "--", sys.executable, "-c", script, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=directory) as runner:
        try:
            yield runner
        finally:
            runner.terminate()
            (directory / "go").touch()


def served_by(name: str) -> int:
    """The process that serves."""
    with pelton.Client.connect(name, timeout=LIMIT) as client:
        return int(client.call(b"", timeout=LIMIT))


def until_there(path: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} is not there"
        time.sleep(0.01)


def until_other(name: str, before: int) -> int:
    """The next process that serves. A connection may still reach the process before."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        with contextlib.suppress(pelton.Error):
            if (found := served_by(name)) != before:
                return found
    raise AssertionError(f"process {before} still serves")


@pytest.mark.parametrize("script", [SERVICE, AIO_SERVICE], ids=["threads", "asyncio"])
def test_a_service_is_replaced_with_its_calls_answered_and_started_again_after_a_kill(
    tool: str, name: str, script: str, tmp_path: Path
) -> None:
    with running(tool, name, script, tmp_path) as runner:
        first = served_by(name)
        with pelton.Client.connect(name, timeout=LIMIT) as client:
            waits = client.submit(b"wait")
            until_there(tmp_path / "taken")
            runner.send_signal(signal.SIGHUP)
            second = until_other(name, first)
            (tmp_path / "go").touch()
            assert int(waits.result(timeout=LIMIT)) == first
        assert runner.stdout is not None
        assert runner.stdout.readline() == "drained\n"
        os.kill(second, signal.SIGKILL)
        assert until_other(name, second) != first
        runner.terminate()
        assert runner.wait(LIMIT) == 128 + signal.SIGTERM
        assert runner.stdout.readline() == "drained\n"
    assert not (tmp_path / "channel").exists()
