"""Either side is killed at any moment, again and again: the survivor goes on with the successor, and nothing is lost.

PELTON_KILLS has the number of kills of each side; `./run verify python` sets it.
"""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen

import pelton
import pytest
from conftest import LIMIT

Start = Callable[..., Popen[str]]
KILLS = int(os.environ.get("PELTON_KILLS", "12"))

# Each continues at its directory's next number, and says so: the pauses of the other side are at any message.
SEND = """
import pelton, sys
with pelton.Sender.open_path(sys.argv[1], create=True, capacity=1 << 16) as sender:
    number = int(sys.argv[2])
    print("begins", flush=True)
    while True:
        sender.send(b"%d" % number + bytes(number % 500))
        number += 1
"""
# What a killed receiver has written down is what it has received.
RECEIVE = """
import os, pelton, sys
log = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
with pelton.Receiver.open_path(sys.argv[1], create=True, capacity=1 << 16) as receiver:
    print("begins", flush=True)
    while True:
        message = receiver.peek(60)
        with message as view:
            os.write(log, b"%d %d\\n" % (message.is_redelivered, int(bytes(view).rstrip(b"\\0"))))
"""


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> Iterator[random.Random]:
    """Random numbers, of which the seed is printed."""
    seed = int(os.environ.get("PELTON_SEED", time.time_ns() % 1_000_000))
    print(f"PELTON_SEED={seed}")
    yield random.Random(seed)


def begun(process: Popen[str]) -> Popen[str]:
    assert process.stdout is not None and process.stdout.readline() == "begins\n"
    return process


def killed(process: Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_killed_senders_messages_arrive_once_and_its_successor_continues(
    tmp_path: Path, start: Start, chance: random.Random
) -> None:
    directory, next_number = tmp_path / "channel", 0
    with pelton.Receiver.open_path(directory, create=True, capacity=1 << 16) as receiver:
        for _ in range(KILLS):
            process = begun(start(SEND, directory, next_number))
            until, is_killed = next_number + chance.randrange(1, 3000), False
            while True:
                try:
                    message = receiver.recv(LIMIT)
                except pelton.PeerDied:
                    break
                assert message == b"%d" % next_number + bytes(next_number % 500)
                next_number += 1
                if next_number >= until and not is_killed:
                    killed(process)
                    is_killed = True
    assert next_number >= KILLS


def test_a_killed_receivers_successor_gets_the_rest_and_what_may_be_twice_is_marked(
    tmp_path: Path, start: Start, chance: random.Random
) -> None:
    directory, log = tmp_path / "channel", tmp_path / "log"
    number = 0
    with pelton.Sender.open_path(directory, create=True, capacity=1 << 16) as sender:

        def until_done(step: Callable[[], None]) -> None:
            while True:
                try:
                    return step()
                except pelton.PeerDied:
                    # Each receiver's end is reported once, and the sender goes on.
                    continue

        for _ in range(KILLS):
            process = begun(start(RECEIVE, directory, log))
            for _ in range(chance.randrange(1, 1500)):
                message = b"%d" % number + bytes(number % 500)
                until_done(functools.partial(sender.send, message, LIMIT))
                number += 1
            killed(process)
        process = begun(start(RECEIVE, directory, log))
        until_done(functools.partial(sender.wait_released, LIMIT))
        killed(process)
    found = [(line.split()[0] == "1", int(line.split()[1])) for line in log.read_text().splitlines()]
    seen = -1
    for is_redelivered, got in found:
        assert got == seen + 1 or (is_redelivered and got <= seen), (got, seen)
        seen = max(seen, got)
    assert seen == number - 1


def test_a_killed_sender_of_many_harms_no_other(name: str, start: Start, chance: random.Random) -> None:
    script = """
import pelton, sys
with pelton.Sender.connect(sys.argv[1], timeout=30, capacity=1 << 16) as sender:
    number = 0
    print("begins", flush=True)
    while True:
        sender.send(b"%d %d" % (int(sys.argv[2]), number))
        number += 1
"""
    counts: dict[int, int] = {}
    with pelton.gather(name) as receiver:
        alive: list[Popen[str]] = []

        def receive(until: Callable[[], bool]) -> None:
            end = time.monotonic() + LIMIT
            while not until():
                assert time.monotonic() < end
                try:
                    sender, number = map(int, receiver.recv(LIMIT).split())
                except pelton.PeerDied:
                    continue
                assert number == counts.get(sender, 0)
                counts[sender] = number + 1

        for sender in range(KILLS):
            alive.append(start(script, name, sender))
            receive(lambda: sender in counts)
            if len(alive) > 3:
                victim = alive.pop(chance.randrange(3))
                killed(victim)
            before = dict(counts)
            receive(lambda: sum(counts[other] > before[other] for other in before) >= len(alive))
        for process in alive:
            killed(process)
    assert len(counts) == KILLS
