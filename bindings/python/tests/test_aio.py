"""Senders and receivers in an event loop, of asyncio and of uvloop."""

from __future__ import annotations

import asyncio
import gc
import threading

import pelton
import pelton.aio
import pytest
from conftest import LIMIT, Run

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


def test_an_endpoint_that_is_dropped_leaves_the_loop(run: Run, name: str) -> None:
    async def connected() -> tuple[pelton.aio.Receiver, pelton.Sender]:
        with pelton.listen(name) as listener:
            accepted = asyncio.create_task(asyncio.to_thread(listener.accept_sender, LIMIT))
            return await pelton.aio.Receiver.connect(name, timeout=LIMIT), await accepted

    async def main() -> None:
        first, sender = await connected()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first.recv(), 0.05)
        number = first._receiver.fileno()
        sender.close()
        del first
        gc.collect()
        # The loop has let it go, and with it its descriptor.
        await asyncio.sleep(0.01)
        second, sender = await connected()
        with sender:
            assert second._receiver.fileno() == number, "the test needs the same descriptor again"
            waiting = asyncio.create_task(second.recv())
            await asyncio.sleep(0.01)
            sender.send(b"hello")
            assert await asyncio.wait_for(waiting, LIMIT) == b"hello"
        second.close()

    run(main())
