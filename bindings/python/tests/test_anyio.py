"""The recipe of README.md for other event loops: with anyio, on asyncio, uvloop and trio."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import pelton
import pytest
from conftest import LIMIT

Receive = Callable[[pelton.Receiver], Coroutine[Any, Any, bytes]]


@pytest.fixture(params=[("asyncio", {}), ("asyncio", {"use_uvloop": True}), ("trio", {})], ids=["asyncio", "uvloop", "trio"])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], Coroutine[Any, Any, None]]], None]:
    """Runs a coroutine function in a new loop, with a limit."""
    backend, options = request.param

    def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def limited() -> None:
            with anyio.fail_after(LIMIT):
                await main()

        anyio.run(limited, backend=backend, backend_options=options)

    return run


@pytest.fixture
def receive() -> Receive:
    """The function of the example."""
    text = (Path(__file__).parent.parent / "README.md").read_text()
    (example,) = re.findall(r"```python\n(import anyio\n.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {"pelton": pelton}
    exec(example, names)
    function: Receive = names["receive"]
    return function


def test_messages_arrive_while_other_tasks_run(run: Any, receive: Receive) -> None:
    async def main() -> None:
        sender, receiver = pelton.threads(capacity=1 << 16)

        async def send() -> None:
            with sender:
                for number in range(3000):
                    while not sender.try_send(b"%d" % number):
                        await anyio.sleep(0)
                    if number % 100 == 0:
                        await anyio.sleep(0.001)

        with receiver:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(send)
                assert [int(await receive(receiver)) for _ in range(3000)] == list(range(3000))
                with pytest.raises(pelton.Closed):
                    await receive(receiver)

    run(main)


def test_a_cancelled_receive_has_taken_nothing(run: Any, receive: Receive) -> None:
    async def main() -> None:
        sender, receiver = pelton.threads(capacity=1 << 16)
        with sender, receiver:
            received: list[int] = []
            for number in range(300):
                async with anyio.create_task_group() as tasks:

                    async def take() -> None:
                        received.append(int(await receive(receiver)))

                    tasks.start_soon(take)
                    for _ in range(number % 4):
                        await anyio.sleep(0)
                    sender.send(b"%d" % number)
                    for _ in range(number % 3):
                        await anyio.sleep(0)
                    tasks.cancel_scope.cancel()
            sender.send(b"300")
            while (last := int(await receive(receiver))) != 300:
                received.append(last)
            assert received == list(range(300))

    run(main)
