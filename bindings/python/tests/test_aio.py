"""Senders and receivers in an event loop, of asyncio and of uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pelton
import pelton.aio
import pytest
from conftest import LIMIT, Run

Start = Callable[..., Popen[str]]

SEND = """
import pelton, sys
with pelton.Sender.connect(sys.argv[1], timeout=30) as sender:
    sender.send_many(b"%d" % number for number in range(500))
    sender.wait_released(30)
"""


def pair() -> tuple[pelton.aio.Sender, pelton.aio.Receiver]:
    sender, receiver = pelton.threads(capacity=1 << 16)
    return pelton.aio.Sender(sender), pelton.aio.Receiver(receiver)


def test_more_messages_than_the_lane_holds_arrive_in_order(run: Run) -> None:
    async def main() -> None:
        sender, receiver = pair()

        async def send() -> None:
            async with sender:
                assert await sender.send_many(b"%d" % number + bytes(100) for number in range(5000)) == 5000

        async with receiver:
            task = asyncio.create_task(send())
            numbers = [int(message.rstrip(b"\0")) async for message in receiver]
            await task
        assert numbers == list(range(5000))

    run(main())


def test_a_cancelled_receive_has_taken_nothing_and_a_cancelled_send_has_sent_nothing(run: Run) -> None:
    async def main() -> None:
        sender, receiver = pair()
        async with sender, receiver:
            received, sent = [], 0
            for number in range(300):
                task = asyncio.create_task(receiver.recv())
                for _ in range(number % 4):
                    await asyncio.sleep(0)
                await sender.send(b"%d" % number)
                for _ in range(number % 3):
                    await asyncio.sleep(0)
                task.cancel()
                try:
                    received.append(int(await task))
                except asyncio.CancelledError:
                    pass
            await sender.send(b"last")
            while (message := await receiver.recv()) != b"last":
                received.append(int(message))
            assert received == list(range(300))
            while sender._sender.try_send(bytes(1000)):
                sent += 1
            task = asyncio.create_task(sender.send(b"-" * 1000))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await receiver.recv_many(1000) == [bytes(1000)] * sent

    run(main())


def test_a_second_task_is_refused_and_the_first_one_continues(run: Run) -> None:
    async def main() -> None:
        sender, receiver = pair()
        async with sender, receiver:
            first = asyncio.create_task(receiver.recv())
            await asyncio.sleep(0.01)
            with pytest.raises(pelton.Busy, match="another task"):
                await receiver.recv()
            await sender.send(b"hello")
            assert await first == b"hello"

    run(main())


def test_a_close_ends_the_wait_of_a_task(run: Run) -> None:
    async def main() -> None:
        sender, receiver = pair()
        async with sender:
            task = asyncio.create_task(receiver.recv())
            await asyncio.sleep(0.01)
            receiver.close()
            with pytest.raises(pelton.ClosedHandle):
                await task

    run(main())


def test_an_endpoint_goes_on_in_a_new_loop_after_the_close_of_the_old_one(run: Run) -> None:
    sender, receiver = pair()

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(receiver.recv(), 0.01)
        await sender.send(b"hello")
        assert await receiver.recv() == b"hello"

    run(main())
    run(main())
    sender.close()
    receiver.close()


def test_two_loops_at_once_are_refused(run: Run) -> None:
    sender, receiver = pair()

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(receiver.recv(), 0.01)
        errors: list[BaseException] = []

        def other() -> None:
            try:
                asyncio.run(receiver.recv())
            except pelton.Busy as error:
                errors.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert "another event loop" in str(errors[0])

    run(main())
    sender.close()
    receiver.close()


def test_an_idle_loop_sleeps_after_a_message_that_nobody_waits_for(run: Run) -> None:
    async def main() -> None:
        sender, receiver = pair()
        async with sender, receiver:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(receiver.recv(), 0.01)
            await sender.send(b"hello")
            calls = 0
            rung = receiver._watch._rung

            def counted() -> None:
                nonlocal calls
                calls += 1
                rung()

            receiver._watch._rung = counted  # type: ignore[method-assign]
            await asyncio.sleep(0.05)
            assert calls <= 1
            assert await receiver.recv() == b"hello"

    run(main())


def test_connecting_waits_in_the_loop_and_a_peers_end_wakes_a_task(run: Run, name: str) -> None:
    def serve() -> None:
        with pelton.listen(name) as listener, listener.accept_receiver(LIMIT) as receiver:
            assert receiver.recv(2) == b"hello"

    async def main() -> None:
        with pytest.raises(pelton.NoListener):
            await pelton.aio.Sender.connect(name)
        thread = threading.Thread(target=serve)
        connecting = asyncio.create_task(pelton.aio.Sender.connect(name, timeout=LIMIT))
        await asyncio.sleep(0.01)
        thread.start()
        async with await connecting as sender:
            await sender.send(b"hello")
            with pytest.raises(pelton.Closed):
                while True:
                    await sender.send(bytes(1000))
        thread.join()

    run(main())


def test_an_endpoint_that_is_dropped_leaves_the_loop(run: Run) -> None:
    async def main() -> None:
        sender, first = pelton.threads()
        number = first.fileno()
        waited = pelton.aio.Receiver(first)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(waited.recv(), 0.01)
        sender.close()
        del first, waited
        gc.collect()
        # The loop has let it go, and with it its descriptors.
        await asyncio.sleep(0)
        # Opens the same descriptors in the same order.
        sender, second = pelton.threads()
        assert second.fileno() == number, "the test needs the same descriptor again"
        async with pelton.aio.Receiver(second) as receiver:
            with sender:
                waiting = asyncio.create_task(receiver.recv())
                await asyncio.sleep(0)
                sender.send(b"hello")
                assert await asyncio.wait_for(waiting, LIMIT) == b"hello"

    run(main())


async def numbers_of(receiver: pelton.aio.Receiver) -> list[int]:
    async with receiver:
        return [int(message) async for message in receiver]


def test_a_listener_accepts_senders_of_its_own_loop_and_of_other_processes(run: Run, name: str, start: Start) -> None:
    async def send(count: int) -> None:
        async with await pelton.aio.Sender.connect(name, timeout=LIMIT) as sender:
            await sender.send_many(b"%d" % number for number in range(count))

    async def main() -> None:
        async with pelton.aio.listen(name) as listener, asyncio.TaskGroup() as tasks:
            for _ in range(4):
                tasks.create_task(send(500))
            for _ in range(2):
                start(SEND, name)
            received = [tasks.create_task(numbers_of(await listener.accept_receiver())) for _ in range(6)]
            for each in received:
                assert await each == list(range(500))
        assert listener.closed

    run(main())


def test_a_listener_accepts_receivers_and_its_sender_ends_each(run: Run, name: str) -> None:
    async def receive() -> list[int]:
        return await numbers_of(await pelton.aio.Receiver.connect(name, timeout=LIMIT))

    async def main() -> None:
        async with pelton.aio.listen(name, capacity=1 << 16) as listener:
            for _ in range(3):
                receiving = asyncio.create_task(receive())
                async with await listener.accept_sender() as sender:
                    assert sender.info().capacity == 1 << 16
                    await sender.send_many(b"%d" % number for number in range(100))
                assert await receiving == list(range(100))

    run(main())


def test_a_cancelled_accept_refuses_nobody(run: Run, name: str) -> None:
    async def main() -> None:
        async with pelton.aio.listen(name) as listener:
            for number in range(60):
                connecting = asyncio.create_task(pelton.aio.Sender.connect(name))
                accepting = asyncio.create_task(listener.accept_receiver())
                for _ in range(number % 12):
                    await asyncio.sleep(0)
                accepting.cancel()
                try:
                    receiver = await accepting
                except asyncio.CancelledError:
                    receiver = await listener.accept_receiver()
                async with receiver, await connecting as sender:
                    await sender.send(b"hello")
                    assert await receiver.recv() == b"hello"

    run(main())


def test_one_task_at_a_time_accepts_and_a_close_ends_it(run: Run, name: str) -> None:
    async def main() -> None:
        listener = pelton.aio.listen(name)
        accepting = asyncio.create_task(listener.accept_receiver())
        await asyncio.sleep(0)
        with pytest.raises(pelton.Busy, match="another task accepts"):
            await listener.accept_sender()
        accepting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await accepting
        # Of the other kind than the cancelled one.
        connecting = asyncio.create_task(pelton.aio.Receiver.connect(name))
        async with await listener.accept_sender() as sender, await connecting as receiver:
            await sender.send(b"hello")
            assert await receiver.recv() == b"hello"
        accepting = asyncio.create_task(listener.accept_receiver())
        await asyncio.sleep(0)
        listener.close()
        with pytest.raises(pelton.ClosedHandle, match="this listener is closed"):
            await accepting
        pelton.listen(name).close()

    run(main())


def test_a_close_beside_a_cancelled_accept_frees_the_name(run: Run, name: str) -> None:
    async def main() -> None:
        for closes_first in (True, False):
            listener = pelton.aio.listen(name)
            accepting = asyncio.create_task(listener.accept_receiver())
            await asyncio.sleep(0)
            for end in (listener.close, accepting.cancel)[:: 1 if closes_first else -1]:
                end()
            with pytest.raises(asyncio.CancelledError):
                await accepting
            # While the object of the listener lives.
            pelton.listen(name).close()
            assert listener.closed

    run(main())


def test_a_silent_and_a_wrong_peer_delay_no_accept(run: Run, name: str) -> None:
    async def main() -> None:
        async with pelton.aio.listen(name) as listener:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
                silent.connect(name.removeprefix("unix:"))
                accepting = asyncio.create_task(listener.accept_receiver())
                with pytest.raises(pelton.Refused, match="receiver"):
                    await pelton.aio.Receiver.connect(name)
                async with await pelton.aio.Sender.connect(name) as sender, await accepting as receiver:
                    await sender.send(b"hello")
                    assert await receiver.recv() == b"hello"

    run(main())


def test_many_senders_gather_in_one_receiver(run: Run, name: str, start: Start) -> None:
    async def main() -> None:
        async with pelton.aio.gather(name, lanes=4) as receiver:
            for _ in range(2):
                start(SEND, name)

            async def send() -> None:
                # The receiver accepts it while it receives.
                async with await pelton.aio.Sender.connect(name) as sender:
                    await sender.send_many(b"%d" % number for number in range(500))

            sending = asyncio.create_task(send())
            found: dict[int, list[int]] = {}
            for _ in range(1500):
                message = await receiver.peek()
                with message as view:
                    found.setdefault(message.lane, []).append(int(bytes(view)))
            await sending
        assert len(found) == 3 and all(numbers == list(range(500)) for numbers in found.values())

    run(main())


def test_what_a_thread_does_in_place_and_with_descriptors_a_task_does_too(run: Run, name: str) -> None:
    async def main() -> None:
        async with pelton.aio.listen(name, capacity=1 << 16) as listener:
            connecting = asyncio.create_task(pelton.aio.Sender.connect(name))
            async with await listener.accept_receiver() as receiver, await connecting as sender:

                async def send() -> None:
                    for number in range(300):
                        with await sender.reserve(1000) as view:
                            view[:] = bytes([number % 256]) * 1000
                    for number in range(300):
                        await sender.send_descriptors(bytes(1000), [0] * (number % 2))

                sending = asyncio.create_task(send())
                buffer = bytearray(1000)
                for number in range(300):
                    if number % 2:
                        assert await receiver.recv_into(buffer) == 1000 and set(buffer) == {number % 256}
                    else:
                        with await receiver.peek() as view:
                            assert set(view) == {number % 256}
                for number in range(300):
                    message, fds = await receiver.recv_descriptors()
                    for fd in fds:
                        os.close(fd)
                    assert message == bytes(1000) and len(fds) == number % 2
                await sending
                assert receiver.info().messages == 600

    run(main())


def test_a_path_is_opened_in_the_loop_once_it_exists(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        opening = asyncio.create_task(pelton.aio.Receiver.open_path(tmp_path / "channel", timeout=LIMIT))
        await asyncio.sleep(0)
        with pytest.raises(pelton.NoChannel):
            await pelton.aio.Sender.open_path(tmp_path / "channel")
        async with await pelton.aio.Sender.open_path(tmp_path / "channel", create=True) as sender:
            await sender.send(b"hello")
        async with await opening as receiver:
            assert [message async for message in receiver] == [b"hello"]

    run(main())


# --- What outlives the peer: resume, wait_released, sync ---


def test_a_sender_resumes_with_each_successor_also_after_a_cancelled_resume(run: Run, name: str) -> None:
    async def main() -> None:
        async with pelton.aio.listen(name) as listener:
            connecting = asyncio.create_task(pelton.aio.Receiver.connect(name, timeout=LIMIT))
            sender, receiver = await listener.accept_sender(), await connecting
            async with sender:
                with pytest.raises(pelton.Refused, match="alive"):
                    await sender.resume()
                for number in range(40):
                    await sender.send(b"%d" % number)
                    receiver.close()
                    resuming = asyncio.create_task(sender.resume())
                    connecting = asyncio.create_task(pelton.aio.Receiver.connect(name, timeout=LIMIT))
                    # The cancel comes at each step of the handshake.
                    for _ in range(number % 20):
                        await asyncio.sleep(0)
                    resuming.cancel()
                    try:
                        await resuming
                    except asyncio.CancelledError:
                        await sender.resume()
                    receiver = await connecting
                    assert await receiver.recv() == b"%d" % number
                receiver.close()

    run(main())


def test_a_receiver_resumes_by_its_name_and_is_busy_meanwhile(run: Run, name: str) -> None:
    async def main() -> None:
        async def listened() -> pelton.aio.Sender:
            async with pelton.aio.listen(name) as listener:
                return await listener.accept_sender()

        accepting = asyncio.create_task(listened())
        async with await pelton.aio.Receiver.connect(name, timeout=LIMIT) as receiver:
            async with await accepting as sender:
                await sender.send(b"first")
            assert await receiver.recv() == b"first"
            with pytest.raises(pelton.Closed):
                await receiver.recv()
            resuming = asyncio.create_task(receiver.resume())
            await asyncio.sleep(0)
            with pytest.raises(pelton.Busy, match="successor"):
                await receiver.recv()
            assert not receiver.closed
            async with await listened() as sender:
                await resuming
                await sender.send(b"second")
                assert await receiver.recv() == b"second"
            with pytest.raises(pelton.Closed):
                await receiver.recv()
            resuming = asyncio.create_task(receiver.resume())
            await asyncio.sleep(0)
            receiver.close()
            assert receiver.closed
            with pytest.raises(pelton.ClosedHandle, match="this receiver is closed"):
                await resuming

    run(main())


def test_other_threads_run_while_a_sender_copies_its_messages_for_a_successor(name: str) -> None:
    ticks, is_over = 0, False

    def tick() -> None:
        nonlocal ticks
        while not is_over:
            ticks += 1
            time.sleep(0)

    def connected(opening: pelton.Opening) -> tuple[pelton.Sender, pelton.Receiver, int]:
        """A sender that is being opened, a receiver for it, and the ticks while the former continued."""
        connecting = pelton.Receiver.start_connect(name, timeout=LIMIT)
        sender = receiver = None
        while sender is None:
            receiver = receiver or connecting.try_finish()
            before = ticks
            sender = opening.try_finish()
            beside = ticks - before
        while receiver is None:
            receiver = connecting.try_finish()
        connecting.close()
        opening.close()
        return sender, receiver, beside

    thread = threading.Thread(target=tick)
    interval = sys.getswitchinterval()
    # Longer than the test: a thread has the GIL until it releases it by itself.
    sys.setswitchinterval(2 * LIMIT)
    thread.start()
    try:
        with pelton.listen(name, capacity=1 << 24) as listener:
            sender, receiver, _ = connected(listener.start_accept_sender())
            with sender:
                while sender.try_send(bytes(1 << 20)):
                    pass
                # The kernel may run the other thread later than the copy ends.
                for _ in range(50):
                    receiver.close()
                    sender, receiver, beside = connected(sender.start_resume())
                    if beside:
                        break
                receiver.close()
                assert beside, "the copy holds the GIL"
    finally:
        is_over = True
        sys.setswitchinterval(interval)
        thread.join()


def test_a_task_waits_until_every_message_is_released(run: Run) -> None:
    async def main() -> None:
        sender, receiver = pair()
        async with sender:
            await sender.wait_released()
            await sender.send_many([b"one", b"two"])
            with pytest.raises(asyncio.TimeoutError):
                async with asyncio.timeout(0.01):
                    await sender.wait_released()
            waiting = asyncio.create_task(sender.wait_released())
            await asyncio.sleep(0)
            with pytest.raises(pelton.Busy, match="another task"):
                await sender.wait_released()
            assert await receiver.recv() == b"one"
            await asyncio.sleep(0)
            assert not waiting.done()
            assert receiver.try_recv() == b"two" and receiver.try_recv() is None
            await waiting
            assert sender.try_send(b"three")
            waiting = asyncio.create_task(sender.wait_released())
            await asyncio.sleep(0)
            receiver.close()
            with pytest.raises(pelton.Closed) as closed:
                await waiting
            assert closed.value.unreleased == 1

    run(main())


def test_a_path_channel_syncs_beside_other_tasks_also_after_a_cancelled_sync(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        sender, receiver = pair()
        async with sender, receiver:
            with pytest.raises(pelton.Refused, match="path channel"):
                await sender.sync()
            await sender.send(b"it continues")
        async with await pelton.aio.Sender.open_path(tmp_path / "channel", create=True) as sender:
            for number in range(20):
                syncing = asyncio.create_task(sender.sync())
                for _ in range(number % 3):
                    await asyncio.sleep(0)
                syncing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await syncing
                await sender.send(b"%d" % number)
            await sender.sync()
            waiting = asyncio.create_task(sender.resume())
            async with await pelton.aio.Receiver.open_path(tmp_path / "channel") as receiver:
                await waiting
                assert [int(await receiver.recv()) for _ in range(20)] == list(range(20))
                await receiver.sync()
                syncing = asyncio.create_task(receiver.sync())
                await asyncio.sleep(0)
            # The end of the block has closed it. The thread ends all the same.
            with contextlib.suppress(pelton.ClosedHandle):
                await syncing

    run(main())


class Gated:
    """A sender whose `sync` waits in its thread for the gate."""

    def __init__(self, sender: pelton.Sender) -> None:
        self._sender = sender
        self.gate = threading.Semaphore(0)
        self.begun = 0

    @property
    def sync(self) -> Callable[[], None]:
        # The loop's thread takes the method, and another one calls it.
        self.begun += 1
        return self._sync

    def _sync(self) -> None:
        assert self.gate.acquire(timeout=LIMIT)
        self._sender.sync()

    def __getattr__(self, attribute: str) -> object:
        return getattr(self._sender, attribute)


async def turns() -> None:
    """Lets each task continue until it waits for something else than a turn."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_tasks_that_wait_for_a_cancelled_sync_wait_for_each_other_too(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        async with await pelton.aio.Sender.open_path(tmp_path / "channel", create=True) as sender:
            gated = sender._endpoint = Gated(sender._sender)  # type: ignore[assignment]
            first = asyncio.create_task(sender.sync())
            await turns()
            first.cancel()
            second, third = (asyncio.create_task(sender.sync()) for _ in range(2))
            await turns()
            assert first.cancelled() and gated.begun == 1
            gated.gate.release()
            while gated.begun == 1:
                await asyncio.sleep(0)
            await turns()
            assert gated.begun == 2, "the third waits for the second"
            second.cancel()
            sending = asyncio.create_task(sender.send(b"hello"))
            await turns()
            assert second.cancelled() and gated.begun == 2 and not sending.done()
            gated.gate.release(2)
            await third
            await sending
            assert gated.begun == 3

    run(main())


def test_the_error_of_a_cancelled_sync_is_raised_by_the_next_one(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "channel"
        async with await pelton.aio.Sender.open_path(path, create=True) as sender:
            gated = sender._endpoint = Gated(sender._sender)  # type: ignore[assignment]
            syncing = asyncio.create_task(sender.sync())
            await turns()
            syncing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await syncing
            # The first sync is also that of the directory.
            (path / "channel").rename(path / "elsewhere")
            gated.gate.release(3)
            await sender.send(b"hello")
            (path / "elsewhere").rename(path / "channel")
            with pytest.raises(pelton.Error, match="channel"):
                await sender.sync()
            assert gated.begun == 1
            await sender.sync()
            await sender.sync()

    run(main())
