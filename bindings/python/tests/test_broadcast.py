"""Publishers and subscribers: policies, waits, ends; in threads, processes and event loops."""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import Any

import pelton
import pelton.aio
import pytest
from conftest import LIMIT, Run

Start = Callable[..., Popen[str]]

# Receives until the publisher has closed, and prints how many were received and missed, and whether the order held.
SUBSCRIBE = """
import pelton, sys
received = missed = 0
with pelton.Subscriber.connect(sys.argv[1], timeout=30, policy=sys.argv[2]) as subscriber:
    print("joined", flush=True)
    for delivery in subscriber:
        received += 1
        missed += delivery.missed
        assert int(delivery.data) == delivery.number == received + missed
    print(received, subscriber.missed)
"""

PUBLISH_AND_WAIT = """
import pelton, sys, time
publisher = pelton.publish(sys.argv[1])
publisher.wait_subscribers(1, 30)
publisher.send(b"one")
publisher.wait_subscribers(2, 100)
"""


def small(**options: Any) -> pelton.Publisher:
    return pelton.publish(capacity=1 << 16, **options)


def fill(publisher: pelton.Publisher) -> int:
    """Sends until there is no space."""
    sent = 0
    while publisher.try_send(bytes(1000)):
        sent += 1
    return sent


def test_each_process_receives_by_its_policy(name: str, start: Start) -> None:
    total = 20_000
    processes = {policy: start(SUBSCRIBE, name, policy) for policy in ("gate", "lag", "latest")}
    with pelton.publish(name, capacity=1 << 16) as publisher:
        publisher.wait_subscribers(3, LIMIT)
        for number in range(1, total + 1):
            publisher.send(b"%d" % number, LIMIT)
        publisher.wait_released(LIMIT)
        states = publisher.subscribers()
        assert sorted(state.policy for state in states) == ["gate", "lag", "latest"]
        assert {state.pid for state in states} == {process.pid for process in processes.values()}
        assert all(state.uid == os.geteuid() and state.lag_after is None for state in states)
        info = publisher.info()
        assert (info.messages, info.capacity, info.message_bytes_max) == (total, 1 << 16, (1 << 15) - 32)
    for policy, process in processes.items():
        joined, result = process.communicate(timeout=LIMIT)[0].splitlines()
        received, missed = map(int, result.split())
        assert (joined, received + missed, process.returncode) == ("joined", total, 0)
        assert received > 0 and (policy != "gate" or missed == 0)


def test_a_slow_gate_is_shown_and_waited_for() -> None:
    with small() as publisher, publisher.subscriber() as subscriber:
        sent = fill(publisher)
        with pytest.raises(pelton.TimedOut):
            publisher.send(b"x" * 1000, 0.01)
        (state,) = publisher.subscribers()
        assert (state.policy, state.behind, state.lags) == ("gate", sent, False)
        assert state.holds is not None and state.holds > 0
        assert publisher.arm(1000)
        assert not select.select([publisher], [], [], 0)[0]
        with pytest.raises(pelton.TimedOut):
            publisher.wait_released(0)
        buffer = bytearray(b"y" * 1000)
        sending = threading.Thread(target=publisher.send, args=[buffer, LIMIT])
        sending.start()
        for number in range(1, sent + 1):
            delivery = subscriber.recv(LIMIT)
            assert (len(delivery.data), delivery.number, delivery.missed) == (1000, number, 0)
        sending.join()
        delivery = subscriber.recv(LIMIT)
        assert (delivery.data, delivery.number) == (bytes(buffer), sent + 1)
        publisher.wait_released(LIMIT)
        assert not publisher.arm_released()
        assert publisher.subscribers()[0].holds is None
        assert subscriber.try_recv() is None
        with pytest.raises(pelton.TimedOut):
            subscriber.recv(0.01)


def test_policies_that_miss_messages_count_them() -> None:
    with small(hold_max=0.01, history=5) as publisher:
        publisher.send(memoryview(b"before"))
        with pytest.raises(pelton.Refused, match="hold_max"):
            publisher.subscriber()
        late = publisher.subscriber(lag_after=0.01, slack=8192, start_from="oldest")
        lag = publisher.subscriber(policy="lag", start_from=1)
        latest = publisher.subscriber(policy="latest")
        assert late.recv(0).data == lag.recv(0).data == b"before"
        for _ in range(200):
            publisher.send(bytearray(1000), LIMIT)
        assert latest.recv(0).missed == 199
        for subscriber in (late, lag):
            seen, missed = 1, 0
            while (delivery := subscriber.try_recv()) is not None:
                seen, missed = seen + 1, missed + delivery.missed
                assert delivery.number == seen + missed
            assert (seen + missed, subscriber.missed) == (201, missed)
            assert missed > 0
        assert publisher.subscribers()[0].lag_after == 0.01
        assert len(publisher.subscribers()) == publisher.admit() == 3
        latest.close()
        assert publisher.admit() == 2


def test_options_that_contradict_are_refused(name: str) -> None:
    wrong: list[tuple[type[Exception], dict[str, Any]]] = [
        (pelton.BadOption, {"policy": "fast"}),
        (TypeError, {"policy": 1}),
        (pelton.BadOption, {"start_from": "yesterday"}),
        (pelton.BadOption, {"start_from": -1}),
        (TypeError, {"start_from": 1.5}),
        (pelton.BadOption, {"lag_after": -1}),
        (pelton.BadOption, {"lag_after": float("nan")}),
        (pelton.BadOption, {"lag_after": 1, "policy": "lag"}),
        (pelton.BadOption, {"slack": 4096}),
        (pelton.BadOption, {"slack": 4096, "policy": "latest"}),
        (TypeError, {"history": 1}),
    ]
    with pelton.publish() as publisher:
        for error, options in wrong:
            with pytest.raises(error):
                publisher.subscriber(**options)
            with pytest.raises(error):
                pelton.Subscriber.connect(name, **options)
        with pytest.raises(TypeError, match="timeout is no option"):
            publisher.subscriber(timeout=1)  # type: ignore[call-arg]
        with pytest.raises(pelton.TooLarge):
            publisher.send(bytes(1 << 25))
        with pytest.raises(TypeError):
            publisher.send("text")  # type: ignore[arg-type]
    with pytest.raises(pelton.BadOption):
        pelton.publish(hold_max=-1)
    with pytest.raises(pelton.BadName):
        pelton.publish("a/b")
    with pytest.raises(pelton.NoListener):
        pelton.Subscriber.connect(name)


def test_an_end_is_raised_and_a_successor_continues(name: str, start: Start) -> None:
    first = start(PUBLISH_AND_WAIT, name)
    with pelton.Subscriber.connect(name, timeout=LIMIT) as subscriber:
        assert subscriber.recv(LIMIT).data == b"one"
        assert subscriber.info().peer_pid == first.pid
        with pytest.raises(pelton.Refused):
            subscriber.resume(0)
        first.kill()
        with pytest.raises(pelton.PeerDied):
            subscriber.recv(LIMIT)
        first.wait(LIMIT)
        with pytest.raises(pelton.TimedOut):
            subscriber.resume(0)
        second = start(PUBLISH_AND_WAIT, name)
        subscriber.resume(LIMIT)
        delivery = subscriber.recv(LIMIT)
        assert (delivery.data, delivery.number, subscriber.info().peer_pid) == (b"one", 1, second.pid)


def test_a_resume_in_steps_joins_a_publisher_that_seldom_calls(name: str) -> None:
    publisher = pelton.publish(name)
    opening = pelton.Subscriber.start_connect(name)
    while (subscriber := opening.try_finish()) is None:
        publisher.admit()
    descriptor = subscriber.fileno()
    publisher.close()
    with pytest.raises(pelton.Closed):
        subscriber.recv(LIMIT)
    with pelton.publish(name) as successor, subscriber:
        for steps in range(10):
            try:
                subscriber.resume(0)
                break
            except pelton.TimedOut:
                assert successor.admit() == 0 or steps > 0
        assert subscriber.fileno() == descriptor and subscriber.arm()
        successor.send(b"one")
        assert select.select([descriptor], [], [], LIMIT)[0]
        assert subscriber.recv(LIMIT).number == 1


def test_handles_are_closed_once_and_refuse_a_forked_child() -> None:
    publisher = small()
    subscriber = publisher.subscriber()
    publisher.send(b"x")
    if (child := os.fork()) == 0:
        status = 1
        try:
            for use in (publisher.admit, publisher.subscribers, publisher.info, subscriber.try_recv, subscriber.arm):
                with pytest.raises(pelton.Forked):
                    use()
            with pytest.raises(pelton.Forked):
                publisher.send(b"y")
            subscriber.close()
            publisher.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert subscriber.recv(LIMIT).data == b"x"
    publisher.close()
    with pytest.raises(pelton.Closed):
        subscriber.recv()
    assert list(subscriber) == []
    subscriber.close()
    assert publisher.closed and subscriber.closed
    for use in (publisher.admit, publisher.subscribers, publisher.fileno, subscriber.recv, subscriber.fileno):
        with pytest.raises(pelton.ClosedHandle):
            use()


def test_a_loop_admits_publishes_and_receives(name: str, run: Run) -> None:
    async def main() -> None:
        async with pelton.aio.publish(name, capacity=1 << 16) as publisher:
            await publisher.send(b"nobody receives this")
            # It admits while it waits for nothing itself.
            async with await pelton.aio.Subscriber.connect(name, timeout=LIMIT) as subscriber:
                await publisher.wait_subscribers(1)
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.001):
                        await subscriber.recv()

                async def publish() -> None:
                    for number in range(2, 1002):
                        await publisher.send(b"%d" % number + bytes(1000))
                    await publisher.wait_released()
                    assert publisher.subscribers()[0].behind == 0
                    publisher.close()

                publishing = asyncio.create_task(publish())
                numbers = []
                async for delivery in subscriber:
                    assert delivery.data.rstrip(b"\0") == b"%d" % delivery.number
                    numbers.append(delivery.number)
                await publishing
                assert numbers == list(range(2, 1002)) and subscriber.missed == 0
                assert subscriber.info().messages == 1000

    run(main())


def test_a_subscriber_that_joins_wakes_the_task_that_waits(run: Run) -> None:
    async def main() -> None:
        async with pelton.aio.publish(capacity=1 << 16) as publisher:
            waiting = asyncio.create_task(publisher.wait_subscribers(1))
            await asyncio.sleep(0)
            first = publisher.subscriber()
            await waiting
            while publisher.try_send(bytes(1000)):
                pass
            sending = asyncio.create_task(publisher.send(bytes(30_000)))
            await asyncio.sleep(0)
            # It has rung when the next one joins, and rings no more.
            while first.try_recv():
                pass
            second = publisher.subscriber()
            await sending
            first.close()
            waiting = asyncio.create_task(publisher.wait_released())
            await asyncio.sleep(0)
            assert len((await second.recv()).data) == 30_000
            publisher.subscriber().close()
            await waiting
            second.close()

    run(main())


def test_a_loop_resumes_with_the_successor(name: str, run: Run) -> None:
    async def main() -> None:
        publisher = pelton.aio.publish(name)
        subscriber = await pelton.aio.Subscriber.connect(name, timeout=LIMIT, policy="latest")
        local = publisher.subscriber(policy="lag")
        for text in (b"one", b"two"):
            assert publisher.try_send(text)
        assert (await subscriber.recv()).missed == 1
        assert [(await local.recv()).data, (await local.recv()).data] == [b"one", b"two"]
        with pytest.raises(pelton.Refused):
            await subscriber.resume()
        publisher.close()
        with pytest.raises(pelton.Closed):
            await subscriber.recv()
        with pytest.raises(pelton.Closed):
            await local.recv()
        with pytest.raises(pelton.Refused, match=r"aio\.Subscriber\.connect"):
            await local.resume()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await subscriber.resume()
        resuming = asyncio.create_task(subscriber.resume())
        async with pelton.aio.publish(name) as successor:
            await successor.wait_subscribers(1)
            await resuming
            await successor.send(b"three")
            delivery = await subscriber.recv()
            assert (delivery.data, delivery.number, subscriber.missed) == (b"three", 1, 1)
            receiving = asyncio.create_task(subscriber.recv())
            await asyncio.sleep(0)
            with pytest.raises(pelton.Busy):
                await subscriber.recv()
            subscriber.close()
            with pytest.raises(pelton.ClosedHandle):
                await receiving
        local.close()

    run(main())


# Receives one message, and has another when it is killed.
AUDIT = """
import pelton, sys
subscriber = pelton.Subscriber.open_path(sys.argv[1], durable="audit", timeout=30)
assert not subscriber.continues
assert subscriber.recv(30).data == b"1"
print("received", flush=True)
sys.stdin.read()
"""


def test_a_limit_in_a_directory_stays_until_the_next_publisher(tmp_path: Path) -> None:
    directory = tmp_path / "trades"
    with pelton.Publisher.open_path(directory, capacity=1 << 16, hold_max=0.01):
        with pytest.raises(pelton.Refused, match="hold_max"):
            pelton.Subscriber.open_path(directory)
        pelton.Subscriber.open_path(directory, lag_after=0.01).close()
    with pytest.raises(pelton.Refused, match="hold_max"):
        pelton.Subscriber.open_path(directory)
    pelton.Publisher.open_path(directory).close()
    with (
        pelton.Subscriber.open_path(directory),
        pytest.raises(pelton.Refused, match="may hold the publisher up for longer than 0ns"),
    ):
        pelton.Publisher.open_path(directory, hold_max=0)


def test_a_durable_subscription_continues_after_a_kill(tmp_path: Path, start: Start) -> None:
    directory = tmp_path / "trades"
    with pytest.raises(pelton.NoChannel):
        pelton.Subscriber.open_path(directory, durable="audit")
    with pelton.Publisher.open_path(directory, capacity=1 << 16) as publisher:
        audit = start(AUDIT, directory)
        publisher.wait_subscribers(1, LIMIT)
        for number in range(1, 4):
            publisher.send(b"%d" % number)
        assert audit.stdout is not None and audit.stdout.readline() == "received\n"
        (state,) = publisher.subscribers()
        assert (state.pid, state.durable, state.behind) == (audit.pid, "audit", 2)
        with pytest.raises(pelton.RoleTaken, match="audit"):
            pelton.remove_subscription(directory, "audit")
        with pytest.raises(pelton.RoleTaken):
            pelton.Publisher.open_path(directory)
        audit.kill()
        audit.wait(LIMIT)
        # While it is away it gates.
        sent = 3 + fill(publisher)
        (state,) = publisher.subscribers()
        assert (state.pid, state.durable, state.behind) == (0, "audit", sent - 1)
    # Without a publisher.
    with pelton.Subscriber.open_path(directory, durable="audit") as subscriber:
        assert subscriber.continues
        for number in (2, 3):
            delivery = subscriber.recv(LIMIT)
            assert (delivery.data, delivery.number, delivery.missed) == (b"%d" % number, number, 0)
    # It learns how many messages it has missed while away.
    pelton.Subscriber.open_path(directory, durable="audit", policy="lag").close()
    with pelton.Publisher.open_path(directory) as publisher:
        for _ in range(200):
            publisher.send(bytes(1000), LIMIT)
        with pytest.raises(pelton.Refused, match="thread|directory"):
            publisher.subscriber()
    with pelton.Subscriber.open_path(directory, durable="audit", policy="lag") as subscriber:
        delivery = subscriber.recv(LIMIT)
        assert delivery.missed > 0 and delivery.number == 4 + delivery.missed
    with pytest.raises(pelton.Refused, match="audit"):
        pelton.Subscriber.open_path(directory, durable="audit")
    assert pelton.remove_subscription(directory, "audit")
    assert not pelton.remove_subscription(directory, "audit")
    for durable in ("a b", ""):
        with pytest.raises(pelton.BadName):
            pelton.Subscriber.open_path(directory, durable=durable)


def test_a_loop_subscribes_in_a_directory_and_resumes_there(tmp_path: Path, run: Run) -> None:
    directory = tmp_path / "trades"

    async def main() -> None:
        opening = asyncio.ensure_future(
            pelton.aio.Subscriber.open_path(directory, durable="audit", start_from="oldest", timeout=LIMIT)
        )
        await asyncio.sleep(0)
        publisher = await pelton.aio.Publisher.open_path(directory, history=10)
        await publisher.send(b"one")
        async with await opening as subscriber:
            assert not subscriber.continues
            assert (await subscriber.recv()).data == b"one"
            for round in range(3):
                waiting = asyncio.ensure_future(subscriber.recv())
                await asyncio.sleep(0)
                publisher.close()
                with pytest.raises(pelton.Closed):
                    await waiting
                resumed = asyncio.ensure_future(subscriber.resume())
                await asyncio.sleep(0)
                assert not resumed.done()
                publisher = await pelton.aio.Publisher.open_path(directory)
                await resumed
                with pytest.raises(pelton.Refused):
                    await subscriber.resume()
                await publisher.send(b"next")
                delivery = await subscriber.recv()
                assert (delivery.data, delivery.number, delivery.missed) == (b"next", 2 + round, 0)
            await publisher.wait_released()
        async with await pelton.aio.Subscriber.open_path(directory, durable="audit") as subscriber:
            assert subscriber.continues
            await publisher.send(b"last")
            assert (await subscriber.recv()).number == 5
        taken_over = pelton.aio.Subscriber(pelton.Subscriber.open_path(directory))
        with pytest.raises(pelton.Refused, match="alive"):
            await taken_over.resume()
        publisher.close()
        with pytest.raises(pelton.Closed):
            await taken_over.recv()
        with pytest.raises(pelton.Refused, match=r"aio\.Subscriber\.open_path"):
            await taken_over.resume()
        taken_over.close()

    run(main())


def test_a_set_receives_from_many_publishers_in_turns_until_each_has_closed() -> None:
    with small() as first, small() as second, pelton.SubscriberSet() as topic:
        members = [first.subscriber(), second.subscriber(policy="lag")]
        for member in members:
            topic.add(member)
        assert len(topic) == 2
        assert topic.try_recv() is None
        with pytest.raises(pelton.TimedOut):
            topic.recv(0.01)
        for number in range(100):
            first.send(b"%d" % number)
            second.send(b"%d" % number)
        first.close()
        second.close()
        received = [(members.index(subscriber), int(delivery.data)) for subscriber, delivery in topic]
        turns = [(0, 0, 64), (1, 0, 64), (0, 64, 100), (1, 64, 100)]
        assert received == [(of, number) for of, start, end in turns for number in range(start, end)]
        assert len(topic) == 0
        assert topic.try_recv() is None
        with pytest.raises(pelton.Refused, match="empty"):
            topic.recv()
        assert list(topic) == []


def test_a_set_uses_its_subscribers_and_gives_them_back() -> None:
    with small() as publisher, small() as other:
        subscriber, quiet = publisher.subscriber(), other.subscriber()
        topic = pelton.SubscriberSet(spin=True)
        for member in (subscriber, quiet):
            topic.add(member)
        uses: list[Callable[[], object]] = [
            subscriber.recv,
            subscriber.try_recv,
            subscriber.resume,
            subscriber.info,
            subscriber.arm,
            subscriber.fileno,
            lambda: topic.add(subscriber),
            lambda: pelton.SubscriberSet().add(subscriber),
        ]
        for use in uses:
            with pytest.raises(pelton.Busy, match="remove it there first"):
                use()
        for text in (b"one", b"two", b"three"):
            publisher.send(text)
        found, delivery = topic.recv(LIMIT)
        assert found is subscriber
        assert (delivery.data, delivery.number, delivery.missed) == (b"one", 1, 0)
        assert topic.info(subscriber).messages == 1
        topic.remove(subscriber)
        for use in (topic.remove, topic.info):
            with pytest.raises(KeyError, match="not in this set"):
                use(subscriber)
        assert subscriber.recv(LIMIT).data == b"two"
        topic.add(subscriber)
        topic.close()
        assert topic.closed
        assert subscriber.recv(LIMIT).data == b"three"
        for use in (topic.recv, topic.try_recv, lambda: topic.add(subscriber)):
            with pytest.raises(pelton.ClosedHandle, match="set is closed"):
                use()
        # Dropped without a close, too.
        topic = pelton.SubscriberSet()
        topic.add(subscriber)
        del topic
        assert subscriber.try_recv() is None
        subscriber.close()
        with pytest.raises(pelton.ClosedHandle), pelton.SubscriberSet() as topic:
            topic.add(subscriber)


def test_a_subscriber_of_a_set_that_is_closed_leaves_it() -> None:
    with small() as publisher, small() as other, pelton.SubscriberSet() as topic:
        subscriber, remaining = publisher.subscriber(), other.subscriber()
        topic.add(subscriber)
        topic.add(remaining)
        closing = threading.Timer(0.1, subscriber.close)
        closing.start()
        with pytest.raises(pelton.TimedOut):
            topic.recv(0.5)
        closing.join()
        assert (len(topic), publisher.admit(), subscriber.closed) == (1, 0, True)
        other.send(b"still here")
        assert topic.recv(LIMIT)[1].data == b"still here"


def test_a_set_whose_last_subscriber_is_closed_is_empty() -> None:
    with small() as publisher, pelton.SubscriberSet() as topic:
        with pytest.raises(pelton.Refused):
            topic.recv(0)
        subscriber = publisher.subscriber()
        topic.add(subscriber)
        closing = threading.Timer(0.1, subscriber.close)
        closing.start()
        with pytest.raises(pelton.Refused):
            topic.recv()
        closing.join()
        # In the body of a loop, which ends then.
        last = publisher.subscriber()
        topic.add(last)
        publisher.send(b"one")
        for subscriber, delivery in topic:
            assert (subscriber, delivery.data) == (last, b"one")
            subscriber.close()
        assert len(topic) == 0


def test_a_set_names_the_subscriber_whose_publisher_died(name: str, start: Start) -> None:
    process = start(PUBLISH_AND_WAIT, name)
    with small() as other, pelton.SubscriberSet() as topic:
        subscriber = pelton.Subscriber.connect(name, timeout=LIMIT)
        topic.add(subscriber)
        topic.add(other.subscriber())
        for _ in range(2):
            assert topic.recv(LIMIT)[1].data == b"one"
            process.kill()
            process.wait(LIMIT)
            with pytest.raises(pelton.PeerDied) as raised:
                next(topic)
            assert raised.value.subscriber is subscriber
            assert len(topic) == 1
            process = start(PUBLISH_AND_WAIT, name)
            subscriber.resume(LIMIT)
            topic.add(subscriber)
        process.kill()
        process.wait(LIMIT)


def test_a_set_waits_without_the_gil_and_ends_for_a_close() -> None:
    with small() as publisher:
        topic = pelton.SubscriberSet()
        topic.add(publisher.subscriber())
        received: list[bytes] = []
        raised: list[BaseException] = []

        def receive() -> None:
            try:
                for _, delivery in topic:
                    received.append(delivery.data)
            except pelton.ClosedHandle as error:
                raised.append(error)

        receiving = threading.Thread(target=receive)
        receiving.start()
        publisher.send(b"one")
        publisher.wait_released(LIMIT)
        # Whenever it waits for longer than this takes.
        with pytest.raises(pelton.Busy):
            while True:
                topic.try_recv()
        topic.close()
        receiving.join(LIMIT)
        assert not receiving.is_alive()
        assert (received, len(raised)) == ([b"one"], 1)


def test_a_forked_child_has_no_use_of_a_set() -> None:
    with small() as publisher, pelton.SubscriberSet() as topic:
        subscriber = publisher.subscriber()
        topic.add(subscriber)
        publisher.send(b"one")
        if (child := os.fork()) == 0:
            try:
                for use in (topic.try_recv, subscriber.try_recv, lambda: topic.info(subscriber)):
                    with pytest.raises(pelton.Forked):
                        use()
                topic.close()
                with pytest.raises(pelton.Forked):
                    subscriber.try_recv()
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert topic.recv(LIMIT)[1].data == b"one"
