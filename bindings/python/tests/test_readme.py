"""The examples of README.md run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pelton
from conftest import LIMIT

README = Path(__file__).parent.parent / "README.md"


def examples(name: str, section: str = "Send and receive") -> list[str]:
    """The examples of a section, with this name instead of theirs."""
    sections = re.split(r"^## (.*)\n", README.read_text(), flags=re.MULTILINE)
    blocks = re.findall(r"```python\n(.*?)```", sections[sections.index(section) + 1], re.DOTALL)
    imports = "import asyncio\nimport pelton\nimport pelton.aio\nfrom collections.abc import Iterator\n"
    return [imports + re.sub('"(events|prices)"', repr(name), block) for block in blocks]


def test_the_first_two_examples_exchange_messages(name: str, start: Callable[..., Popen[str]]) -> None:
    listening, sending, *_ = examples(name)
    receiver = start(listening)
    assert start(sending).wait(LIMIT) == 0
    output, _ = receiver.communicate(timeout=LIMIT)
    assert output.split() == ["b'hello'", *(f"b'{number}'" for number in range(9)), repr(bytes(8))]


def test_the_example_of_asyncio_receives(name: str, start: Callable[..., Popen[str]]) -> None:
    _, _, receiving, *_ = examples(name)
    sending = f"""
import pelton
with pelton.listen({name!r}) as listener, listener.accept_sender({LIMIT}) as sender:
    sender.send(b"hello")
    sender.wait_released({LIMIT})
"""
    sender = start(sending)
    receiver = start(receiving + "\nasyncio.run(main())")
    output, _ = receiver.communicate(timeout=LIMIT)
    assert output == "b'hello'\n"
    assert sender.wait(LIMIT) == 0


UNBUFFERED = "import builtins, functools\nprint = functools.partial(builtins.print, flush=True)\n"
SEND = """
import os, pelton, signal, sys
sender = pelton.Sender.connect(sys.argv[1], timeout=30)
sender.send(b"hello")
sender.wait_released(30)
os.kill(os.getpid(), signal.SIGKILL) if sys.argv[2] == "killed" else sender.close()
"""


def test_the_server_of_asyncio_accepts_senders_and_outlives_a_killed_one(
    name: str, start: Callable[..., Popen[str]]
) -> None:
    serving = examples(name)[3]
    server = start(UNBUFFERED + serving + "\nasyncio.run(serve())")
    for end in ("closed", "killed", "closed"):
        start(SEND, name, end).wait(LIMIT)
    assert server.stdout is not None
    # The receiver of the killed one may see its end after the next message.
    found = [server.stdout.readline() for _ in range(4)]
    assert sorted(found) == ["a sender was killed\n", *["b'hello'\n"] * 3]


def test_the_receiver_of_asyncio_gathers_senders(name: str, start: Callable[..., Popen[str]]) -> None:
    gathering = examples(name)[4]
    receiver = start(UNBUFFERED + gathering + "\nasyncio.run(gather())")
    senders = [start(SEND, name, end) for end in ("closed", "killed", "closed")]
    assert receiver.stdout is not None
    found = {receiver.stdout.readline() for _ in senders}
    assert found == {f"{sender.pid} b'hello'\n" for sender in senders}


def test_the_examples_of_calls_call_each_other(name: str, start: Callable[..., Popen[str]]) -> None:
    serving, calling, _, calling_in_a_loop = examples(name, "Calls")
    start(serving)
    output, _ = start(calling).communicate(timeout=LIMIT)
    assert output.split() == ["b'TEA'", "b'0'", "b'1'", "b'2'", "100"]
    output, _ = start(calling_in_a_loop + "\nasyncio.run(main())").communicate(timeout=LIMIT)
    assert output == "[b'TEA', b'RICE']\nb'MILK'\n"


def test_the_example_of_metrics_exports_the_counters(name: str, start: Callable[..., Popen[str]]) -> None:
    (exporting,) = examples(name, "Metrics")
    receiver = start(exporting)
    with pelton.Sender.connect(name, timeout=LIMIT) as sender:
        sender.send(b"hello")
        sender.send(b"world!")
    output, _ = receiver.communicate(timeout=LIMIT)
    assert "b'hello'\nb'world!'\n" in output
    assert f'endpoint_messages_total{{channel="{name}"}} 2.0' in output
    assert f'endpoint_bytes_total{{channel="{name}"}} 11.0' in output


def test_the_service_of_asyncio_is_called(name: str, start: Callable[..., Popen[str]]) -> None:
    _, _, serving, calling = examples(name, "Calls")
    start(serving + "\nasyncio.run(serve())")
    output, _ = start(calling + "\nasyncio.run(main())").communicate(timeout=LIMIT)
    assert output == "[b'TEA', b'RICE']\nb'MILK'\n"


def test_the_example_of_queues_does_each_job(name: str, start: Callable[..., Popen[str]]) -> None:
    (queues,) = examples(name, "Queue")
    output, _ = start(queues + "\nmain()").communicate(timeout=LIMIT)
    assert output == "True\n"


def test_the_example_of_many_publishers_receives_from_each(name: str, start: Callable[..., Popen[str]]) -> None:
    (receiving,) = (example for example in examples(name, "Publish and subscribe") if "SubscriberSet" in example)
    output, _ = start(receiving).communicate(timeout=LIMIT)
    assert output.splitlines() == ["bid b'0'", "offer b'1'"]
