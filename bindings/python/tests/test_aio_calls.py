"""Clients and services in an event loop, of asyncio and of uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator

import pelton
import pelton.aio
import pytest
from conftest import LIMIT, Run, forked


class Handler:
    """Answers by the first word of a request. Keeps what the tests ask about."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.generator_closed = asyncio.Event()
        self.notified = asyncio.Event()
        self.running = self.running_most = 0

    async def parts(self, count: int, bytes_: int) -> AsyncIterator[bytes]:
        try:
            for number in range(count):
                yield b"%d" % number + b" " * bytes_
                await asyncio.sleep(0)
        finally:
            self.generator_closed.set()

    async def fails(self) -> AsyncIterator[bytes]:
        yield b"one"
        raise pelton.Failed(8, "in the middle")

    async def __call__(self, request: pelton.Request) -> object:
        word, *rest = request.data.split(b" ")
        self.running += 1
        self.running_most = max(self.running_most, self.running)
        try:
            if word == b"notify":
                self.notified.set()
            elif word == b"bad":
                raise ValueError("no number")
            elif word == b"own":
                raise pelton.Failed(7, "not today")
            elif word == b"text":
                return "text"
            elif word == b"parts":
                return self.parts(int(rest[0]), int(rest[1]))
            elif word == b"list":
                return [b"one", b"two"]
            elif word == b"fails":
                return self.fails()
            elif word == b"wait":
                self.begun.set()
                await self.go_on.wait()
            elif word == b"forever":
                self.begun.set()
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    # To clean up may wait too.
                    await asyncio.sleep(0)
                    self.cancelled.set()
                    raise
            elif word == b"checks":
                # It takes requests ahead, as in a thread.
                for _ in range(50):
                    assert not request.is_cancelled()
                    await asyncio.sleep(0)
            elif word == b"pause":
                await asyncio.sleep(float(rest[0]))
                return word
            else:
                return request.data[::-1]
            return b""
        finally:
            self.running -= 1


@contextlib.asynccontextmanager
async def served(
    name: str, in_flight_max: int = 1024, **options: int
) -> AsyncIterator[tuple[pelton.aio.Client, pelton.aio.Service, Handler]]:
    handler = Handler()
    async with pelton.aio.Service.listen(name, **options) as service:
        running = asyncio.create_task(service.run(handler, in_flight_max))
        try:
            async with await pelton.aio.Client.connect(name, timeout=LIMIT, **options) as client:
                yield client, service, handler
        finally:
            handler.go_on.set()
            service.stop()
            await running


def test_calls_of_any_size_are_answered(run: Run, name: str) -> None:
    async def main() -> None:
        async with served(name) as (client, _, _):
            for bytes_ in (0, 1, 65_535, 65_536, 3_000_000):
                request = os.urandom(bytes_)
                assert await client.call(request) == request[::-1]
            assert await client.call(bytearray(b"hello"), LIMIT) == b"olleh"
            assert client.in_flight == 0 and client.services == 1

    run(main())


def test_hundreds_and_thousands_of_calls_at_a_time_get_their_own_replies(run: Run, name: str) -> None:
    async def main() -> None:
        async with served(name) as (client, _, _):
            for count in (100, 5000):
                requests = [b"%d" % number for number in range(count)]
                replies = await asyncio.gather(*(client.call(request) for request in requests))
                assert replies == [request[::-1] for request in requests]

    run(main())


def test_a_reply_for_which_the_memory_runs_out_keeps_back_no_other(run: Run, name: str) -> None:
    class Exhausted(asyncio.Future[bytes]):
        def set_result(self, result: bytes) -> None:
            raise MemoryError

    async def main() -> None:
        reported: list[BaseException] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
        async with served(name) as (client, _, _):
            requests = [b"%d" % number for number in range(10, 20)]
            tasks = [asyncio.create_task(client.call(request)) for request in requests]
            await asyncio.sleep(0)
            client._calls[min(client._calls)] = Exhausted(loop=loop)
            assert await asyncio.gather(*tasks[1:]) == [request[::-1] for request in requests[1:]]
            tasks[0].cancel()
        assert [type(error) for error in reported] == [MemoryError]

    run(main())


def test_calls_overlap(run: Run, name: str) -> None:
    async def main() -> None:
        async with served(name) as (client, _, handler):
            calls = [asyncio.create_task(client.call(b"wait")) for _ in range(200)]
            while handler.running < 200:
                await asyncio.sleep(0)
            assert await client.call(b"hello") == b"olleh"
            handler.go_on.set()
            assert await asyncio.gather(*calls) == [b""] * 200

    run(main())


def test_an_exception_of_a_handler_fails_the_call_with_its_class_and_text(run: Run, name: str) -> None:
    async def main() -> None:
        async with served(name) as (client, _, _):
            for request, code, text in ((b"bad", 1, "ValueError: no number"), (b"own", 7, "not today")):
                with pytest.raises(pelton.Failed) as raised:
                    await client.call(request)
                assert (raised.value.code, raised.value.text) == (code, text)
            with pytest.raises(pelton.Failed, match="bytes-like"):
                await client.call(b"text")
            with pytest.raises(TypeError, match="bytes-like"):
                await client.call("hello")  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="bytes-like"):
                async for _ in client.stream(5):  # type: ignore[arg-type]
                    pass

    run(main())


def test_a_plain_handler_fails_its_calls_and_the_service_goes_on(run: Run, name: str) -> None:
    def plain(request: pelton.Request) -> object:
        if request.data == b"awaitable":
            return handler(request)
        return (b"part" for _ in range(2)) if request.data == b"parts" else request.data

    async def handler(request: pelton.Request) -> bytes:
        return request.data[::-1]

    async def main() -> None:
        async with pelton.aio.Service.listen(name) as service:
            with pytest.raises(TypeError, match="the handler is bytes, wanted an `async def`"):
                await service.run(b"no function")  # type: ignore[arg-type]
            running = asyncio.create_task(service.run(plain))  # type: ignore[arg-type]
            async with await pelton.aio.Client.connect(name, timeout=LIMIT) as client:
                for request, found in (b"tea", "bytes"), (b"parts", "generator"), (b"tea", "bytes"):
                    with pytest.raises(pelton.Failed, match=f"code 1: TypeError: the handler returned {found}, wanted"):
                        await client.call(request)
                    with pytest.raises(pelton.Failed, match="wanted an `async def`"):
                        async for part in client.stream(request):
                            raise AssertionError(part)
                # What counts is the coroutine.
                assert await client.call(b"awaitable") == b"elbatiawa"
            service.stop()
            await running

    run(main())


def test_the_parts_of_a_reply_come_one_by_one_or_in_one_piece(run: Run, name: str) -> None:
    async def main() -> None:
        async with served(name) as (client, _, _):
            assert [part async for part in client.stream(b"parts 3 0")] == [b"0", b"1", b"2"]
            assert [part async for part in client.stream(b"parts 0 0")] == []
            assert [part async for part in client.stream(b"list")] == [b"one", b"two"]
            assert [part async for part in client.stream(b"hello")] == [b"olleh"]
            assert await client.call(b"parts 3 0") == b"012" and await client.call(b"parts 0 0") == b""
            stream = client.stream(b"fails")
            assert await anext(stream) == b"one"
            with pytest.raises(pelton.Failed, match="in the middle"):
                await anext(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    run(main())


def test_a_stream_waits_for_a_slow_reader_and_other_calls_go_on(run: Run, name: str) -> None:
    async def main() -> None:
        async with served(name, capacity=1 << 16) as (client, _, _):
            numbers = []
            async for part in client.stream(b"parts 1000 2000"):
                numbers.append(int(part))
                if len(numbers) % 100 == 0:
                    assert await client.call(b"hello", LIMIT) == b"olleh"
            assert numbers == list(range(1000))

    run(main())


def test_unread_parts_stop_the_client_until_they_are_taken(run: Run, name: str) -> None:
    async def main() -> None:
        async with served(name) as (_, _, _):
            async with await pelton.aio.Client.connect(name, call_bytes_max=50_000) as client:
                stream = client.stream(b"parts 1000 1000")
                assert int(await anext(stream)) == 0
                with pytest.raises(pelton.TimedOut):
                    for _ in range(1000):
                        await client.call(b"hello", 0.2)
                assert client._stored < 500_000
                assert [int(part) async for part in stream] == list(range(1, 1000))
                assert await client.call(b"hello", LIMIT) == b"olleh"

    run(main())


def test_a_cancelled_task_cancels_its_handler(run: Run, name: str) -> None:
    async def main() -> None:
        async with served(name) as (client, service, handler):
            for _ in range(50):
                handler.begun.clear()
                handler.cancelled.clear()
                task = asyncio.create_task(client.call(b"forever"))
                await handler.begun.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await handler.cancelled.wait()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await client.call(b"forever")
            # The end of the last one comes at its own time.
            while client.in_flight or service._running:
                assert await client.call(b"hello") == b"olleh"
            assert not client._calls

    run(main())


def test_a_cancel_at_any_point_leaves_nothing_behind(run: Run, name: str) -> None:
    async def main() -> None:
        async with served(name) as (client, _, _):
            for number in range(300):
                task = asyncio.create_task(client.call(b"hello"))
                for _ in range(number % 7):
                    await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    assert await task == b"olleh"
            while client.in_flight:
                assert await client.call(b"again") == b"niaga"
            assert not client._calls

    run(main())


def test_a_call_that_times_out_cancels_its_handler(run: Run, name: str) -> None:
    async def main() -> None:
        async with served(name) as (client, _, handler):
            with pytest.raises(TimeoutError) as raised:
                await client.call(b"forever", 0.02)
            assert isinstance(raised.value, pelton.TimedOut)
            await handler.cancelled.wait()
            handler.cancelled.clear()
            with pytest.raises(pelton.TimedOut):
                async for _ in client.stream(b"forever", 0.02):
                    pass
            await handler.cancelled.wait()
            assert await client.call(b"hello", LIMIT) == b"olleh"

    run(main())


def test_a_stream_that_is_left_closes_its_generator(run: Run, name: str) -> None:
    async def main() -> None:
        async with served(name, capacity=1 << 16) as (client, _, handler):
            async with client.stream(b"parts 1000000 1000") as parts:
                async for part in parts:
                    break
            await handler.generator_closed.wait()
            handler.generator_closed.clear()
            async for part in client.stream(b"parts 1000000 1000"):
                break
            gc.collect()
            await handler.generator_closed.wait()
            assert int(part) == 0 and await client.call(b"hello") == b"olleh"
            assert client._stored == 0

    run(main())


def test_a_task_that_is_cancelled_in_a_stream_cancels_its_handler(run: Run, name: str) -> None:
    async def main() -> None:
        async with served(name) as (client, _, handler):

            async def read() -> None:
                async for _ in client.stream(b"forever"):
                    pass

            task = asyncio.create_task(read())
            await handler.begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            del task
            await handler.cancelled.wait()
            # A wait for one part that is given up leaves the stream as it is.
            stream = client.stream(b"wait")
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(anext(stream), 0.01)
            handler.go_on.set()
            assert [part async for part in stream] == [b""]

    run(main())


def test_more_calls_than_are_in_flight_at_a_time_wait_and_may_be_cancelled(run: Run, name: str) -> None:
    async def main() -> None:
        async with served(name, in_flight_max=2000) as (client, _, handler):
            calls = [asyncio.create_task(client.call(b"wait")) for _ in range(1500)]
            while handler.running < 1024:
                await asyncio.sleep(0)
            with pytest.raises(pelton.TimedOut):
                await client.call(b"hello", 0.01)
            for call in calls[1400:]:
                call.cancel()
            handler.go_on.set()
            assert await asyncio.gather(*calls[:1400]) == [b""] * 1400
            assert await client.call(b"hello") == b"olleh"
            assert handler.running_most == 1024

    run(main())


def test_no_more_handlers_run_than_are_allowed(run: Run, name: str) -> None:
    async def main() -> None:
        async with served(name, in_flight_max=3) as (client, _, handler):
            replies = await asyncio.gather(*(client.call(b"pause 0.001") for _ in range(100)))
            assert replies == [b"pause"] * 100 and handler.running_most == 3

    run(main())


def test_a_handler_that_checks_for_a_cancel_loses_no_request(run: Run, name: str) -> None:
    async def main() -> None:
        async with served(name) as (client, _, _):
            for _ in range(5):
                checks = [asyncio.create_task(client.call(b"checks", LIMIT)) for _ in range(10)]
                for number in range(50):
                    assert await client.call(b"%d" % number, LIMIT) == (b"%d" % number)[::-1]
                await asyncio.gather(*checks)

    run(main())


def test_a_notification_reaches_the_handler(run: Run, name: str) -> None:
    async def main() -> None:
        async with served(name) as (client, _, handler):
            await client.notify(b"notify")
            await handler.notified.wait()

    run(main())


def test_a_drain_waits_for_the_handlers(run: Run, name: str) -> None:
    async def main() -> None:
        handler = Handler()
        service = pelton.aio.Service.listen(name)
        running = asyncio.create_task(service.run(handler))
        async with await pelton.aio.Client.connect(name) as client:
            taken = asyncio.create_task(client.call(b"wait"))
            await handler.begun.wait()
            service.drain()
            with pytest.raises(pelton.Refused):
                await client.call(b"hello")
            assert not running.done()
            handler.go_on.set()
            assert await taken == b""
            await running
            service.close()
            with pytest.raises(pelton.Closed):
                await client.call(b"hello")

    run(main())


def test_services_are_replaced_by_a_drain_and_no_call_fails(run: Run, short_name: str) -> None:
    async def main() -> None:
        handler = Handler()
        service = pelton.aio.Service.listen(short_name)
        running = asyncio.create_task(service.run(handler))
        async with await pelton.aio.Client.connect(short_name) as client:
            is_over = False

            async def work() -> int:
                count = 0
                while not is_over:
                    assert await client.call(b"hello", LIMIT) == b"olleh"
                    count += 1
                return count

            workers = [asyncio.create_task(work()) for _ in range(10)]
            for _ in range(10):
                successor = pelton.aio.Service.listen(short_name)
                next_running = asyncio.create_task(successor.run(handler))
                await asyncio.sleep(0)
                service.drain()
                await running
                service.close()
                service, running = successor, next_running
            is_over = True
            assert all(await asyncio.gather(*workers))
            service.stop()
            await running
            service.close()

    run(main())


def test_cancelling_the_service_cancels_its_handlers_and_abandons_their_calls(run: Run, name: str) -> None:
    async def main() -> None:
        handler = Handler()
        async with pelton.aio.Service.listen(name) as service:
            running = asyncio.create_task(service.run(handler))
            async with await pelton.aio.Client.connect(name) as client:
                call = asyncio.create_task(client.call(b"forever"))
                await handler.begun.wait()
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
                assert handler.cancelled.is_set(), "it has cleaned up"
                with pytest.raises(pelton.Abandoned):
                    await call
                with pytest.raises(ValueError, match="in_flight_max"):
                    await service.run(handler, 0)

    run(main())


def test_a_close_fails_the_calls_in_flight(run: Run, name: str) -> None:
    async def main() -> None:
        async with served(name) as (client, service, handler):
            calls = [asyncio.create_task(client.call(b"forever")) for _ in range(10)]
            stream = client.stream(b"forever")
            part = asyncio.create_task(anext(stream))
            await handler.begun.wait()
            client.close()
            for task in (*calls, part):
                with pytest.raises(pelton.ClosedHandle):
                    await task
            with pytest.raises(pelton.ClosedHandle):
                await client.call(b"hello")
            await handler.cancelled.wait()

    run(main())


def test_a_killed_service_fails_every_call_at_once_fifty_times(run: Run, name: str) -> None:
    def child() -> None:
        with pelton.Service.listen(name) as service:
            for request in service:
                if request.data == b"die":
                    os.kill(os.getpid(), signal.SIGKILL)
                request.reply(request.data)

    for number in range(50):
        with forked(child):

            async def main() -> None:
                async with await pelton.aio.Client.connect(name, timeout=LIMIT) as client:
                    assert await client.call(b"hello") == b"hello"
                    calls = [asyncio.create_task(client.call(b"die")) for _ in range(number % 5 + 1)]
                    parts = asyncio.create_task(anext(client.stream(b"die")))
                    for call in (*calls, parts):
                        with pytest.raises(ConnectionResetError):
                            await call
                    with pytest.raises(pelton.PeerDied):
                        await client.call(b"hello")

            run(main())


def test_a_killed_client_cancels_its_handlers_thirty_times(run: Run, name: str) -> None:
    def child() -> None:
        with pelton.Client.connect(name, timeout=LIMIT) as client:
            client.call(b"forever")

    async def main() -> None:
        async with served(name) as (client, service, handler):
            for _ in range(30):
                handler.begun.clear()
                handler.cancelled.clear()
                with forked(child) as pid:
                    await handler.begun.wait()
                    os.kill(pid, signal.SIGKILL)
                    await handler.cancelled.wait()
            assert await client.call(b"hello") == b"olleh"
            while service._running:
                await asyncio.sleep(0)

    run(main())


def test_a_client_goes_on_in_a_new_loop_after_the_close_of_the_old_one(run: Run, name: str) -> None:
    with pelton.Service.listen(name) as service:
        thread = threading.Thread(
            target=service.run, args=(lambda request: time.sleep(0.05) if request.data == b"slow" else request.data,)
        )
        thread.start()
        client = pelton.aio.Client(pelton.LoopClient.connect(name))

        async def main() -> None:
            assert await client.call(b"hello") == b"hello"
            # Nobody awaits this one when the loop ends.
            asyncio.get_running_loop().create_task(client.call(b"slow"))
            await asyncio.sleep(0)

        run(main())
        run(main())
        client.close()
        service.stop()
        thread.join()


def test_two_loops_at_once_are_refused(run: Run, name: str) -> None:
    async def main() -> None:
        async with served(name) as (client, _, _):
            assert await client.call(b"hello") == b"olleh"
            errors: list[BaseException] = []

            def other() -> None:
                try:
                    asyncio.run(client.call(b"hello"))
                except pelton.Busy as error:
                    errors.append(error)

            await asyncio.to_thread(other)
            assert "another event loop" in str(errors[0])

    run(main())


def test_a_second_task_at_a_stream_and_a_second_run_are_refused(run: Run, name: str) -> None:
    async def main() -> None:
        async with served(name) as (client, service, handler):
            stream = client.stream(b"wait")
            first = asyncio.create_task(anext(stream))
            await handler.begun.wait()
            with pytest.raises(pelton.Busy, match="another task"):
                await anext(stream)
            with pytest.raises(pelton.Busy, match="another task"):
                await service.run(handler)
            handler.go_on.set()
            assert await first == b""

    run(main())


def test_a_forked_child_is_refused(run: Run, name: str) -> None:
    async def main() -> None:
        async with served(name) as (client, _, _):
            read, write = os.pipe()

            def child() -> None:
                try:
                    client._client.try_submit(b"hello")
                except pelton.Forked:
                    os.write(write, b"forked")

            with forked(child):
                os.close(write)
                assert os.read(read, 10) == b"forked"
                os.close(read)
            assert await client.call(b"hello") == b"olleh"

    run(main())


def test_an_idle_client_and_an_idle_service_sleep(run: Run, name: str) -> None:
    async def main() -> None:
        async with served(name) as (client, service, _):
            assert await client.call(b"hello") == b"olleh"
            await asyncio.sleep(0.01)
            counts = [0, 0]
            for index, driver in enumerate((client, service)):
                drive = driver._drive

                def counted(index: int = index, drive: object = drive) -> None:
                    counts[index] += 1
                    drive()  # type: ignore[operator]

                driver._drive = counted  # type: ignore[method-assign]
            await asyncio.sleep(0.2)
            # A loop that does not sleep runs them ten thousands of times.
            assert max(counts) < 50

    run(main())


def test_the_tool_calls_a_service_of_asyncio(run: Run, name: str, tool: str) -> None:
    async def main() -> None:
        async with served(name):

            def call(*words: str) -> subprocess.CompletedProcess[bytes]:
                return subprocess.run([tool, "call", name, *words], capture_output=True, timeout=LIMIT)

            assert (await asyncio.to_thread(call, "hello")).stdout == b"olleh"
            assert (await asyncio.to_thread(call, "parts 5 0")).stdout == b"01234"
            failed = await asyncio.to_thread(call, "own")
            assert failed.returncode == 6 and b"not today" in failed.stderr

    run(main())


def test_a_client_of_asyncio_calls_the_tool(run: Run, name: str, tool: str) -> None:
    process = subprocess.Popen([tool, "serve", name, "--exec", "exec cat", "--parallel", "4"])

    async def main() -> None:
        async with await pelton.aio.Client.connect(name, timeout=LIMIT) as client:
            requests = [b"%d" % number for number in range(20)]
            assert await asyncio.gather(*map(client.call, requests)) == requests

    try:
        run(main())
    finally:
        process.kill()
        process.wait()


def test_no_call_leaks_objects(run: Run, name: str) -> None:
    async def main() -> None:
        async with served(name) as (client, _, _):

            async def use() -> None:
                await client.call(b"hello", LIMIT)
                assert len([part async for part in client.stream(b"list")]) == 2
                task = asyncio.create_task(client.call(b"forever"))
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

            for _ in range(20):
                await use()
            gc.collect()
            before = sys.getallocatedblocks()
            for _ in range(500):
                await use()
            await asyncio.sleep(0.01)
            gc.collect()
            assert sys.getallocatedblocks() - before < 1000

    run(main())


def test_no_handler_has_the_context_of_another_one(run: Run, name: str) -> None:
    user: contextvars.ContextVar[str] = contextvars.ContextVar("user", default="nobody")

    async def main() -> None:
        seen: list[str] = []

        async def handler(request: pelton.Request) -> bytes:
            seen.append(user.get())
            user.set(request.data.decode())
            await asyncio.sleep(0.001)
            return b""

        async with pelton.aio.Service.listen(name) as service:
            # One at a time: the end of one begins the next.
            running = asyncio.create_task(service.run(handler, in_flight_max=1))
            async with await pelton.aio.Client.connect(name, timeout=LIMIT) as client:
                await asyncio.gather(*(client.call(b"%d" % number) for number in range(20)))
            service.stop()
            await running
        assert seen == ["nobody"] * 20

    run(main())


def test_a_cancelled_handler_cleans_up_undisturbed_by_other_clients(run: Run, name: str) -> None:
    async def main() -> None:
        begun, cleans, go_on, cleaned = (asyncio.Event() for _ in range(4))

        async def handler(request: pelton.Request) -> bytes:
            if request.data != b"first":
                return b""
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                cleans.set()
                await go_on.wait()
                cleaned.set()
            return b""

        async with pelton.aio.Service.listen(name) as service:
            running = asyncio.create_task(service.run(handler))
            async with await pelton.aio.Client.connect(name, timeout=LIMIT) as client:
                call = asyncio.create_task(client.call(b"first"))
                await begun.wait()
                call.cancel()
                await cleans.wait()
                for _ in range(3):
                    # Each that leaves makes the service check its calls.
                    async with await pelton.aio.Client.connect(name, timeout=LIMIT) as other:
                        await other.call(b"second")
                await client.call(b"third")
                go_on.set()
                await asyncio.wait_for(cleaned.wait(), LIMIT)
            service.stop()
            await running

    run(main())


@pytest.mark.parametrize("closes", [False, True])
def test_a_handler_that_cleans_up_is_not_cancelled_again_by_the_end_of_run(run: Run, name: str, closes: bool) -> None:
    async def main() -> None:
        begun, cleans, go_on, cleaned = (asyncio.Event() for _ in range(4))

        async def handler(request: pelton.Request) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                cleans.set()
                await go_on.wait()
                cleaned.set()

        async with pelton.aio.Service.listen(name) as service:
            running = asyncio.create_task(service.run(handler))
            async with await pelton.aio.Client.connect(name, timeout=LIMIT) as client:
                call = asyncio.create_task(client.call(b"hello"))
                await begun.wait()
                call.cancel()
                await cleans.wait()
                if closes:
                    service.close()
                else:
                    running.cancel()
                for _ in range(5):
                    await asyncio.sleep(0)
                assert not running.done(), "it waits until the handler has cleaned up"
                go_on.set()
                await asyncio.wait([running])
                assert cleaned.is_set()
                assert running.cancelled() != closes
            assert not service._cancelled

    run(main())


def test_a_cancel_reaches_a_handler_that_cleans_up_after_a_timeout_of_its_own(run: Run, name: str) -> None:
    async def main() -> None:
        cleans, cancelled = asyncio.Event(), asyncio.Event()

        async def handler(request: pelton.Request) -> None:
            try:
                async with asyncio.timeout(0):
                    try:
                        await asyncio.Event().wait()
                    finally:
                        cleans.set()
                        await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        async with pelton.aio.Service.listen(name) as service:
            running = asyncio.create_task(service.run(handler))
            async with await pelton.aio.Client.connect(name, timeout=LIMIT) as client:
                call = asyncio.create_task(client.call(b"hello"))
                await cleans.wait()
                call.cancel()
                await cancelled.wait()
            service.stop()
            await running

    run(main())


def test_a_cancelled_first_part_is_asked_for_again(run: Run, name: str) -> None:
    async def main() -> None:
        async with served(name) as (client, _, handler):
            calls = [asyncio.create_task(client.call(b"wait")) for _ in range(1024)]
            while client.in_flight < 1024:
                await asyncio.sleep(0)
            stream = client.stream(b"parts 2 0")
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(anext(stream), 0.01)
            handler.go_on.set()
            await asyncio.gather(*calls)
            assert [part async for part in stream] == [b"0", b"1"]

    run(main())


def test_a_thread_gets_the_parts_of_an_async_generator(run: Run, name: str) -> None:
    def parts() -> list[bytes]:
        with pelton.Client.connect(name, timeout=LIMIT) as client:
            return list(client.stream(b"parts 3 0", LIMIT))

    async def main() -> None:
        async with served(name):
            assert await asyncio.to_thread(parts) == [b"0", b"1", b"2"]

    run(main())


def test_a_task_gets_the_parts_of_a_generator_of_a_thread(run: Run, name: str) -> None:
    async def main() -> None:
        async with await pelton.aio.Client.connect(name, timeout=LIMIT) as client:
            assert [part async for part in client.stream(b"")] == [b"0", b"1", b"2"]

    with pelton.Service.listen(name) as service:
        thread = threading.Thread(target=service.run, args=(lambda request: (b"%d" % part for part in range(3)),))
        thread.start()
        run(main())
        service.stop()
        thread.join()
