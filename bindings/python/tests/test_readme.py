"""The examples of README.md run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

from conftest import LIMIT

README = Path(__file__).parent.parent / "README.md"


def examples(name: str) -> list[str]:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return ["import pelton\n" + block.replace('"events"', repr(name)) for block in blocks]


def test_the_first_two_examples_exchange_messages(name: str, start: Callable[..., Popen[str]]) -> None:
    listening, sending, *_ = examples(name)
    receiver = start(listening)
    assert start(sending).wait(LIMIT) == 0
    output, _ = receiver.communicate(timeout=LIMIT)
    assert output.split() == ["b'hello'", *(f"b'{number}'" for number in range(9)), repr(bytes(8))]


def test_the_example_of_asyncio_receives(name: str, start: Callable[..., Popen[str]]) -> None:
    _, _, receiving, _ = examples(name)
    sending = f"""
import pelton
with pelton.listen({name!r}) as listener, listener.accept_sender({LIMIT}) as sender:
    sender.send(b"hello")
    sender.wait_released({LIMIT})
"""
    sender = start(sending)
    receiver = start("import asyncio\nimport pelton.aio\n" + receiving + "\nasyncio.run(main())")
    output, _ = receiver.communicate(timeout=LIMIT)
    assert output == "b'hello'\n"
    assert sender.wait(LIMIT) == 0


def test_the_example_of_queues_does_each_job(name: str, start: Callable[..., Popen[str]]) -> None:
    *_, queues = examples(name)
    output, _ = start("import multiprocessing\n" + queues + "\nmain()").communicate(timeout=LIMIT)
    assert output == "True\n"
