"""Clients and services: calls, streams, cancels, ends."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from subprocess import Popen

import pelton
import pelton.aio
import pytest
from conftest import LIMIT, forked, resident

Start = Callable[..., Popen[str]]


class Handler:
    """Answers by the first word of a request. Keeps what the tests ask about."""

    def __init__(self) -> None:
        self.notified = threading.Event()
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.cancelled = threading.Event()
        self.generator_closed = threading.Event()
        self.deadlines: list[float | None] = []

    def parts(self, request: pelton.Request, count: int, bytes_: int) -> Iterator[bytes]:
        try:
            for number in range(count):
                yield b"%d".ljust(bytes_ - 1) % number if bytes_ else b"%d" % number
        finally:
            self.generator_closed.set()

    def __call__(self, request: pelton.Request) -> object:
        word, *rest = request.data.split(b" ")
        self.deadlines.append(request.deadline)
        if word == b"notify":
            with pytest.raises(pelton.Refused):
                request.reply(b"")
            self.notified.set()
        elif word == b"bad":
            raise ValueError("no number")
        elif word == b"own":
            raise pelton.Failed(7, "not today")
        elif word == b"text":
            return "text"
        elif word == b"none":
            return None
        elif word == b"parts":
            return self.parts(request, int(rest[0]), int(rest[1]))
        elif word == b"fails":
            return self.fails()
        elif word == b"wait":
            self.begun.set()
            assert self.go_on.wait(LIMIT)
        elif word == b"until_cancelled":
            self.begun.set()
            while not request.is_cancelled():
                time.sleep(0.001)
            self.cancelled.set()
        elif word == b"abandon":
            request.abandon()
        elif word == b"zeros":
            return bytes(int(rest[0]))
        else:
            return bytearray(request.data[::-1])
        return b""

    def fails(self) -> Iterator[bytes]:
        yield b"one"
        raise pelton.Failed(8, "in the middle")


def connect(service: pelton.Service, name: str, **options: int) -> pelton.Client:
    """Connects to a service that nobody else receives from, which accepts while it receives."""
    clients: list[pelton.Client] = []
    thread = threading.Thread(target=lambda: clients.append(pelton.Client.connect(name, **options)))
    thread.start()
    while thread.is_alive():
        assert service.try_receive() is None
    return clients[0]


@contextlib.contextmanager
def serving(name: str, threads: int = 2, **options: int) -> Iterator[tuple[pelton.Service, Handler]]:
    handler = Handler()
    with pelton.Service.listen(name, **options) as service:
        thread = threading.Thread(target=service.run, args=(handler, threads))
        thread.start()
        try:
            yield service, handler
        finally:
            handler.go_on.set()
            service.stop()
            thread.join(LIMIT)
            assert not thread.is_alive()


@pytest.fixture
def served(name: str) -> Iterator[tuple[pelton.Client, Handler]]:
    with serving(name) as (_, handler), pelton.Client.connect(name) as client:
        yield client, handler


Served = tuple[pelton.Client, Handler]


@pytest.mark.parametrize("data", [b"hello", bytearray(b"hello"), memoryview(b"hello"), memoryview(b"-hello")[1:]])
def test_a_request_of_any_bytes_like_object_is_answered(served: Served, data: bytes) -> None:
    assert served[0].call(data, LIMIT) == b"olleh"


@pytest.mark.parametrize("bytes_", [0, 1, 65_535, 65_536, 5_000_000])
def test_a_request_and_a_reply_of_any_size_arrive(served: Served, bytes_: int) -> None:
    request = os.urandom(bytes_)
    assert served[0].call(request, LIMIT) == request[::-1]


@pytest.mark.parametrize("data", ["hello", 5, None, memoryview(b"abcd")[::2]])
def test_a_request_that_is_no_bytes_like_object_is_refused(served: Served, data: object) -> None:
    client = served[0]
    for call in (client.call, client.stream, client.submit, client.notify):
        with pytest.raises((TypeError, BufferError), match="bytes-like|copy"):
            call(data)  # type: ignore[arg-type]
    assert client.in_flight == 0


def test_an_exception_of_a_handler_fails_the_call_with_its_class_and_text(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(pelton.Failed) as raised:
        served[0].call(b"bad", LIMIT)
    assert (raised.value.code, raised.value.text) == (1, "ValueError: no number")
    assert "ValueError: no number" in caplog.text and "Traceback" in caplog.text


def test_a_handler_chooses_code_and_text_of_a_failure(served: Served) -> None:
    with pytest.raises(pelton.Failed, match="code 7: not today") as raised:
        served[0].call(b"own", LIMIT)
    assert (raised.value.code, raised.value.bytes) == (7, b"not today")


def test_a_failure_with_an_impossible_code_is_refused() -> None:
    for code in (-1, 1 << 32):
        with pytest.raises(ValueError, match="4294967295"):
            pelton.Failed(code, "text")


@pytest.mark.parametrize("word", [b"text", b"none"])
def test_a_handler_that_returns_no_bytes_fails_its_call(served: Served, word: bytes) -> None:
    with pytest.raises(pelton.Failed, match="bytes-like"):
        served[0].call(word, LIMIT)


def test_an_abandoned_call_says_so(served: Served) -> None:
    with pytest.raises(pelton.Abandoned):
        served[0].call(b"abandon", LIMIT)


def test_a_notification_reaches_the_handler_and_is_not_answered(served: Served) -> None:
    client, handler = served
    client.notify(b"notify")
    assert handler.notified.wait(LIMIT)
    assert client.in_flight == 0


def test_the_parts_of_a_reply_come_one_by_one_or_in_one_piece(served: Served) -> None:
    client, _ = served
    assert list(client.stream(b"parts 4 0")) == [b"0", b"1", b"2", b"3"]
    assert client.call(b"parts 4 0") == b"0123"
    assert client.submit(b"parts 4 0").result(LIMIT) == b"0123"
    assert list(client.stream(b"parts 0 0")) == [] and client.call(b"parts 0 0") == b""
    assert list(client.stream(b"hello")) == [b"olleh"]


def test_a_call_takes_no_more_parts_than_a_reply_may_have(name: str) -> None:
    options = {"capacity": 1 << 16, "call_bytes_max": 1 << 16}
    with serving(name, threads=1, **options) as (_, handler), pelton.Client.connect(name, **options) as client:
        assert len(client.call(b"parts 60 1000", LIMIT)) > 59_000
        for take in (client.call, lambda request, timeout: client.submit(request).result(timeout)):
            handler.generator_closed.clear()
            with pytest.raises(pelton.TooLarge, match="call_bytes_max is 65536"):
                take(b"parts 100000 1000", LIMIT)
            assert handler.generator_closed.wait(LIMIT)
        assert client.call(b"hello", LIMIT) == b"olleh"
        assert len(list(client.stream(b"parts 200 1000"))) == 200


def test_a_failure_comes_after_the_parts_before_it(served: Served) -> None:
    parts = served[0].stream(b"fails", LIMIT)
    assert next(parts) == b"one"
    with pytest.raises(pelton.Failed, match="in the middle"):
        next(parts)
    assert list(parts) == []


def test_more_parts_than_the_lane_holds_arrive_in_order(name: str) -> None:
    with serving(name, threads=1, capacity=1 << 16), pelton.Client.connect(name, capacity=1 << 16) as client:
        numbers = [int(part) for part in client.stream(b"parts 3000 2000")]
        assert numbers == list(range(3000))


def test_a_cancelled_stream_ends_its_generator_though_no_thread_receives(name: str) -> None:
    # One thread, which waits for the client's space, and a client that does nothing any more.
    with serving(name, threads=1, capacity=1 << 16) as (_, handler), pelton.Client.connect(name) as client:
        with client.stream(b"parts 1000000 2000") as parts:
            assert int(next(parts)) == 0
        assert handler.generator_closed.wait(LIMIT)
        assert client.call(b"hello", LIMIT) == b"olleh"


def test_a_call_that_times_out_is_cancelled_and_its_handler_saw_the_deadline(served: Served) -> None:
    client, handler = served
    begun = time.monotonic()
    with pytest.raises(TimeoutError) as raised:
        client.call(b"until_cancelled", 0.05)
    assert isinstance(raised.value, pelton.TimedOut)
    assert handler.cancelled.wait(LIMIT)
    deadline = handler.deadlines[-1]
    assert deadline is not None and begun <= deadline - 0.05 < begun + LIMIT


def test_a_dropped_call_is_cancelled(served: Served) -> None:
    client, handler = served
    call = client.submit(b"until_cancelled")
    assert handler.begun.wait(LIMIT)
    del call
    gc.collect()
    assert handler.cancelled.wait(LIMIT)


def test_a_result_that_times_out_leaves_the_call_in_flight(served: Served) -> None:
    client, handler = served
    call = client.submit(b"wait")
    with pytest.raises(pelton.TimedOut):
        call.result(0.01)
    handler.go_on.set()
    assert call.result(LIMIT) == b""
    with pytest.raises(pelton.Refused, match="taken"):
        call.result()


def test_a_timeout_of_0_takes_what_has_come(served: Served) -> None:
    call = served[0].submit(b"hello")
    end = time.monotonic() + LIMIT
    while True:
        try:
            assert call.result(0) == b"olleh"
            break
        except pelton.TimedOut:
            assert time.monotonic() < end, "the reply comes"
    with pytest.raises(pelton.TimedOut):
        served[0].call(b"wait", 0)


def test_a_waiting_thread_does_not_delay_the_calls_of_others(served: Served) -> None:
    client, handler = served
    replies: list[bytes] = []
    thread = threading.Thread(target=lambda: replies.append(client.call(b"wait", LIMIT)))
    thread.start()
    assert handler.begun.wait(LIMIT)
    for number in range(100):
        assert client.call(b"%d" % number, LIMIT) == (b"%d" % number)[::-1]
    assert not replies
    handler.go_on.set()
    thread.join()
    assert replies == [b""]


def test_threads_that_share_a_client_get_their_own_replies(served: Served) -> None:
    client, _ = served
    errors: list[BaseException] = []

    def work(own: int) -> None:
        try:
            for number in range(300):
                request = b"%d of %d" % (number, own) + bytes(number * own)
                assert client.call(request, LIMIT) == request[::-1]
                assert len(list(client.stream(b"parts 3 0", LIMIT))) == 3
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(own,)) for own in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and client.in_flight == 0


def test_large_calls_of_many_threads_whose_buffers_are_used_again_get_their_own_bytes(served: Served) -> None:
    client, _ = served
    errors: list[BaseException] = []
    # Below and above the size from which buffers are used again; the last comes in pieces.
    sizes = (100, 65_535, 65_536, 1_000_000, 70_000, 200_000, 5_000_000, 65_537)

    def work(own: int) -> None:
        try:
            before = client.call(b"first %d" % own, LIMIT), b"first %d" % own
            for number in range(24):
                size = sizes[(number + own) % 8]
                request = (b"%d of %d, " % (number, own) * (size // 8 + 1))[:size]
                reply = client.call(request, LIMIT)
                assert reply == request[::-1]
                assert before[0] == before[1][::-1], "a later reply does not change an earlier one"
                before = reply, request
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_parts_that_wait_keep_little_more_memory_than_they_have_bytes(served: Served) -> None:
    client, _ = served
    before, streams = resident(), []
    for _ in range(100):
        streams.append(client.stream(b"parts 2 70000", LIMIT))
        # It stores those parts, beside buffers of 2 MB that were used and could store them.
        assert len(client.call(b"zeros 2000000", LIMIT)) == 2_000_000
    grown = resident() - before
    assert grown < 60_000_000, f"{grown} bytes for {100 * 2 * 70_000}"
    assert all([int(part) for part in parts] == [0, 1] for parts in streams)


def test_more_calls_than_are_in_flight_at_a_time_wait_for_a_slot(served: Served) -> None:
    client, handler = served
    calls = [client.submit(b"wait") for _ in range(1024)]
    with pytest.raises(pelton.TimedOut, match="space"):
        client.submit(b"hello", 0.01)
    replies: list[bytes] = []
    threads = [threading.Thread(target=lambda: replies.append(client.call(b"hello", LIMIT))) for _ in range(4)]
    for thread in threads:
        thread.start()
    handler.go_on.set()
    for thread in threads:
        thread.join()
    assert replies == [b"olleh"] * 4
    assert {call.result(LIMIT) for call in calls} == {b""}


def test_requests_larger_than_the_lane_of_many_threads_arrive(name: str) -> None:
    with serving(name, capacity=1 << 16), pelton.Client.connect(name, capacity=1 << 16) as client:
        replies: list[bool] = []

        def work(byte: int) -> None:
            request = bytes([byte]) * 1_000_000
            replies.append(client.call(request, LIMIT) == request)

        threads = [threading.Thread(target=work, args=(byte,)) for byte in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert replies == [True] * 4


def test_unread_parts_of_one_call_refuse_others_with_what_to_do(name: str) -> None:
    with serving(name), pelton.Client.connect(name, call_bytes_max=100_000) as client:
        with client.stream(b"parts 100000 5000") as parts:
            assert int(next(parts)) == 0
            with pytest.raises(pelton.Refused, match="take them"):
                for _ in range(100_000):
                    client.call(b"hello", LIMIT)
        assert client.call(b"hello", LIMIT) == b"olleh"


def test_a_call_that_another_thread_awaits_is_busy(served: Served) -> None:
    client, handler = served
    call = client.submit(b"wait")
    thread = threading.Thread(target=call.result)
    thread.start()
    assert handler.begun.wait(LIMIT)
    with pytest.raises(pelton.Busy):
        # The other thread may not wait yet.
        for _ in range(1000):
            with contextlib.suppress(pelton.TimedOut):
                call.result(0.01)
    handler.go_on.set()
    thread.join()


def test_too_large_requests_and_replies_are_refused(name: str) -> None:
    with serving(name, call_bytes_max=100_000), pelton.Client.connect(name, call_bytes_max=200_000) as client:
        with pytest.raises(pelton.TooLarge, match="100000"):
            client.call(bytes(100_001), LIMIT)
        assert len(client.call(b"zeros 200000", LIMIT)) == 200_000
        with pytest.raises(pelton.Failed, match="TooLarge"):
            client.call(b"zeros 200001", LIMIT)
        assert client.call(b"hello", LIMIT) == b"olleh"


def test_a_closed_client_and_a_closed_service_refuse_everything(name: str) -> None:
    service = pelton.Service.listen(name)
    client = connect(service, name)
    call = client.submit(b"hello")
    request = service.receive(LIMIT)
    client.close()
    service.close()
    assert client.closed and service.closed
    for use in (
        lambda: client.call(b""),
        lambda: client.stream(b""),
        lambda: client.notify(b""),
        lambda: client.in_flight,
        lambda: call.result(),
        lambda: service.receive(),
        lambda: service.try_receive(),
        lambda: service.fileno(),
    ):
        with pytest.raises(pelton.ClosedHandle):
            use()
    with pytest.raises((pelton.Closed, pelton.PeerDied)):
        request.reply(b"")
    client.close()
    service.close()


def test_a_close_ends_the_waits_of_other_threads(name: str) -> None:
    service = pelton.Service.listen(name)
    client = connect(service, name)
    errors: list[type] = []

    def note(use: Callable[[], object]) -> None:
        try:
            use()
        except pelton.Error as error:
            errors.append(type(error))

    waits = [lambda: client.call(b"hello"), lambda: client.call(b"hello"), lambda: service.receive()]
    threads = [threading.Thread(target=note, args=(use,)) for use in waits]
    for thread in threads[:2]:
        thread.start()
    requests = [service.receive(LIMIT) for _ in range(2)]
    threads[2].start()
    time.sleep(0.05)
    client.close()
    service.close()
    for thread in threads:
        thread.join(LIMIT)
    assert errors == [pelton.ClosedHandle] * 3
    del requests


def test_a_signal_ends_the_waits_of_calls_and_of_a_service(name: str) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pelton.Service.listen(name) as service, connect(service, name) as client:
            for use in (
                lambda: client.call(b""),
                lambda: list(client.stream(b"")),
                lambda: [service.receive() for _ in range(3)],
                lambda: service.run(lambda request: b"", threads=3),
            ):
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                with pytest.raises(KeyboardInterrupt):
                    use()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_forked_child_is_refused_and_the_parent_goes_on(served: Served) -> None:
    client, handler = served
    call = client.submit(b"wait")
    assert handler.begun.wait(LIMIT)
    read, write = os.pipe()

    def child() -> None:
        refused = 0
        for use in (lambda: client.call(b""), lambda: client.notify(b""), call.result, lambda: client.in_flight):
            try:
                use()
            except pelton.Forked:
                refused += 1
        call.cancel()
        os.write(write, b"%d" % refused)

    with forked(child):
        os.close(write)
        # `in_flight` only reads the child's copy.
        assert int(os.read(read, 10)) >= 3
        os.close(read)
    handler.go_on.set()
    assert call.result(LIMIT) == b""
    assert client.call(b"hello", LIMIT) == b"olleh"


def test_a_forked_child_cannot_use_the_service_and_opens_its_own(name: str) -> None:
    with pelton.Service.listen(name) as service:
        read, write = os.pipe()

        def child() -> None:
            try:
                service.receive(0)
            except pelton.Forked:
                with pelton.Service.listen(name + "2") as own, connect(own, name + "2") as client:
                    call = client.submit(b"hello")
                    own.receive(LIMIT).reply(b"own")
                    os.write(write, call.result(LIMIT))

        with forked(child):
            os.close(write)
            assert os.read(read, 10) == b"own"
            os.close(read)
        with connect(service, name) as client:
            call = client.submit(b"hello")
            service.receive(LIMIT).reply(b"of the parent")
            assert call.result(LIMIT) == b"of the parent"


def test_a_loop_of_ones_own_receives_and_replies(name: str) -> None:
    with pelton.Service.listen(name) as service, connect(service, name) as client:
        with pytest.raises(pelton.TimedOut):
            service.receive(0.01)
        call = client.submit(b"hello", 100)
        request = service.receive(LIMIT)
        assert request.data == b"hello" and not request.is_notification
        assert request.peer_pid == os.getpid() and request.peer_uid == os.getuid()
        assert request.deadline is not None and 0 < request.deadline - time.monotonic() <= 100
        request.part(b"one")
        assert request.try_part(b"two")
        request.reply(b"three")
        assert list(call) == [b"one", b"two", b"three"]
        for answer in (lambda: request.reply(b""), lambda: request.fail(1), request.end, lambda: request.part(b"")):
            with pytest.raises(pelton.Refused, match="answered"):
                answer()
        call = client.submit(b"hello")
        request = service.receive(LIMIT)
        with pytest.raises(TypeError):
            request.reply("text")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="code is -1, wanted a number from 0 to 4294967295"):
            request.fail(-1)
        request.fail(3, "text")
        with pytest.raises(pelton.Failed, match="code 3: text"):
            call.result(LIMIT)


def test_a_part_that_finds_no_space_times_out(name: str) -> None:
    with pelton.Service.listen(name, capacity=1 << 16) as service, connect(service, name) as client:
        call = client.submit(b"hello")
        request = service.receive(LIMIT)
        sent = 0
        while request.try_part(bytes(1000)):
            sent += 1
        with pytest.raises(pelton.TimedOut):
            request.part(bytes(1000), 0.01)
        thread = threading.Thread(target=lambda: (request.part(bytes(1000)), request.end()))
        thread.start()
        assert len(call.result(LIMIT)) == (sent + 1) * 1000
        thread.join()


def test_a_client_and_a_service_work_in_a_loop_of_ones_own(name: str) -> None:
    with pelton.Service.listen(name) as service:
        opening = pelton.LoopClient.start_connect(name, timeout=LIMIT)
        client = None
        replies: dict[int, bytes | Exception | None] = {}
        submitted: dict[int, bytes] = {}
        waiting = [b"%d" % number for number in range(3000)]
        end = time.monotonic() + LIMIT
        while len(replies) < 3000:
            while (request := service.try_receive()) is not None:
                request.reply(request.data)
            readers: list[pelton.Service | pelton.LoopClient | pelton.Opening] = []
            if client is None:
                opened = opening.try_finish()
                assert opened is None or isinstance(opened, pelton.LoopClient)
                client = opened
                if client is None:
                    readers.append(opening)
            if client is not None:
                while waiting and (call := client.try_submit(waiting[-1])) is not None:
                    submitted[call] = waiting.pop()
                while completions := client.completions():
                    replies |= {call: reply for call, _, reply in completions}
                if client.in_flight and client.arm():
                    readers.append(client)
            if len(readers) == 1 and service.arm():
                select.select([service, *readers], [], [], end - time.monotonic())
                assert time.monotonic() < end, "every reply comes"
        assert client is not None and replies == submitted
        assert client.busy_poll() is False and client.services == 1 and not client.has_queued
        opening.close()
        client.close()
        assert client.closed
        with pytest.raises(pelton.ClosedHandle):
            client.try_submit(b"")


@pytest.mark.parametrize(
    ("handler", "threads", "error"),
    [(lambda request: b"", 0, ValueError), (lambda request: b"", -1, ValueError), (5, 1, TypeError)],
)
def test_what_cannot_serve_is_refused(name: str, handler: object, threads: int, error: type[Exception]) -> None:
    with pelton.Service.listen(name) as service, pytest.raises(error):
        service.run(handler, threads)  # type: ignore[arg-type]


def test_an_async_def_is_refused_with_what_to_do(name: str) -> None:
    async def handler(request: pelton.Request) -> bytes:
        return b""

    with pelton.Service.listen(name) as service, pytest.raises(TypeError, match=r"pelton\.aio\.Service"):
        service.run(handler)  # type: ignore[arg-type]


def test_an_option_of_something_else_is_refused(name: str) -> None:
    for use in (pelton.Client.connect, pelton.Service.listen):
        with pytest.raises(TypeError, match="mode is no option"):
            use(name, mode=3)  # type: ignore[call-arg]
    with pytest.raises(pelton.NoListener):
        pelton.Client.connect(name)


# --- Services and clients that die ---


def serve(name: str, reply: bytes = b"") -> Callable[[], None]:
    """What a forked service does: it answers `hold` too late, and `die` by its death."""

    def handler(request: pelton.Request) -> bytes:
        if request.data == b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        if request.data == b"hold":
            time.sleep(LIMIT)
        return reply or request.data

    def child() -> None:
        with pelton.Service.listen(name) as service:
            service.run(handler, 6)

    return child


def test_a_killed_service_fails_its_calls_at_once_a_hundred_times(name: str) -> None:
    for number in range(100):
        with forked(serve(name)), pelton.Client.connect(name, timeout=LIMIT) as client:
            assert client.call(b"%d" % number, LIMIT) == b"%d" % number
            calls = [client.submit(b"hold") for _ in range(number % 5)] + [client.submit(b"die")]
            for call in calls:
                with pytest.raises(ConnectionResetError) as raised:
                    call.result(LIMIT)
                assert isinstance(raised.value, pelton.PeerDied)
            with pytest.raises(pelton.PeerDied):
                client.call(b"again", LIMIT)


def test_killed_clients_are_forgotten_and_their_handlers_see_a_cancel_fifty_times(name: str) -> None:
    with serving(name, threads=3) as (service, handler), pelton.Client.connect(name) as other:

        def child() -> None:
            with pelton.Client.connect(name) as client:
                client.stream(b"until_cancelled")
                call = client.submit(b"until_cancelled")
                call.result()

        for number in range(50):
            with forked(child) as pid:
                assert handler.begun.wait(LIMIT)
                if number % 2:
                    time.sleep(0.002)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            assert handler.cancelled.wait(LIMIT)
            handler.begun.clear()
            handler.cancelled.clear()
            assert other.call(b"hello", LIMIT) == b"olleh"


def found(client: pelton.Client, count: int) -> None:
    """Calls until the client has found so many services."""
    end = time.monotonic() + LIMIT
    while client.services < count:
        client.call(b"hello", LIMIT)
        assert time.monotonic() < end, "the client finds every service"


def test_calls_are_spread_over_the_services_of_a_short_name(short_name: str) -> None:
    children = [forked(serve(short_name, reply)) for reply in (b"one", b"two")]
    with children[0], children[1], pelton.Client.connect(short_name, timeout=LIMIT) as client:
        found(client, 2)
        calls = [client.submit(b"hello") for _ in range(20)]
        assert {call.result(LIMIT) for call in calls} == {b"one", b"two"}


def test_an_idempotent_call_of_a_dead_service_goes_to_another(short_name: str) -> None:
    killed = 0
    with forked(serve(short_name, b"alive")), pelton.Client.connect(short_name, timeout=LIMIT) as client:

        def mortal() -> None:
            with pelton.Service.listen(short_name) as service:
                request = service.receive()
                os.kill(os.getpid(), signal.SIGKILL)
                del request

        for _ in range(10):
            with forked(mortal) as pid:
                end = time.monotonic() + LIMIT
                while client.services < 2 and time.monotonic() < end:
                    client.submit(b"hello", idempotent=True).result(LIMIT)
                    if os.waitpid(pid, os.WNOHANG)[0]:
                        break
                calls = [client.submit(b"hello", idempotent=True) for _ in range(4)]
                assert [call.result(LIMIT) for call in calls] == [b"alive"] * 4
                killed += 1
    assert killed == 10


def test_services_are_replaced_by_a_drain_and_no_call_fails(short_name: str) -> None:
    first, handler = pelton.Service.listen(short_name), Handler()
    threads = [threading.Thread(target=first.run, args=(handler, 2))]
    threads[0].start()
    with pelton.Client.connect(short_name) as client:
        is_over = threading.Event()
        counts: list[int] = []

        def work() -> None:
            count = 0
            while not is_over.is_set():
                assert client.call(b"hello", LIMIT) == b"olleh"
                count += 1
            counts.append(count)

        workers = [threading.Thread(target=work) for _ in range(3)]
        for worker in workers:
            worker.start()
        service = first
        for _ in range(10):
            successor = pelton.Service.listen(short_name)
            threads.append(threading.Thread(target=successor.run, args=(handler, 2)))
            threads[-1].start()
            service.drain()
            threads[-2].join(LIMIT)
            assert not threads[-2].is_alive()
            service.close()
            service = successor
        is_over.set()
        for worker in workers:
            worker.join(LIMIT)
        assert len(counts) == 3 and all(counts)
        service.stop()
        threads[-1].join(LIMIT)
        service.close()


def test_a_result_that_times_out_loses_no_part(name: str) -> None:
    with pelton.Service.listen(name) as service, connect(service, name) as client:
        first, second = client.submit(b"result"), client.submit(b"iterate")
        requests = [service.receive(LIMIT), service.receive(LIMIT)]
        for request in requests:
            request.part(b"AAAA")
        for call in (first, second):
            for _ in range(3):
                with pytest.raises(pelton.TimedOut):
                    call.result(0.05)
        for request in requests:
            request.part(b"BBBB")
            request.end()
        assert first.result(LIMIT) == b"AAAABBBB"
        assert list(second) == [b"AAAA", b"BBBB"]
        with pytest.raises(pelton.Refused):
            first.result()


def test_a_mapping_is_no_streaming_reply(name: str) -> None:
    with pelton.Service.listen(name) as service, connect(service, name) as client:
        threads = [threading.Thread(target=service.run, args=(lambda request: {b"key": b"value"},))]
        threads[0].start()
        with pytest.raises(pelton.Failed, match="dict"):
            client.call(b"hello", LIMIT)
        service.stop()
        threads[0].join(LIMIT)


def test_a_drain_answers_what_was_taken(served: Served, name: str) -> None:
    with pelton.Service.listen(name + "2") as service, connect(service, name + "2") as client:
        taken = client.submit(b"one")
        request = service.receive(LIMIT)
        service.drain()
        returned = client.submit(b"two")
        with pytest.raises(pelton.TimedOut):
            service.receive(0.05)
        request.reply(b"answered")
        assert taken.result(LIMIT) == b"answered"
        with pytest.raises(pelton.Refused):
            returned.result(LIMIT)
        with pytest.raises(pelton.Closed):
            service.receive(LIMIT)
        assert list(service) == []


SERVICE = """
import pelton, sys
with pelton.Service.listen(sys.argv[1]) as service:
    service.run(lambda request: request.data.upper(), threads=3)
"""


def test_ctrl_c_ends_a_service_of_several_threads(name: str, start: Start) -> None:
    process = start(SERVICE, name)
    with pelton.Client.connect(name, timeout=LIMIT) as client:
        assert client.call(b"hello", LIMIT) == b"HELLO"
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) != 0
        with pytest.raises(pelton.Closed):
            client.call(b"hello", LIMIT)


# --- The tool, which is written in Rust ---


def test_the_tool_calls_a_service_in_python(served: Served, name: str, tool: str) -> None:
    def call(*words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([tool, "call", name, *words], capture_output=True, timeout=LIMIT)

    assert call("hello").stdout == b"olleh"
    assert call("parts 5 0").stdout == b"01234"
    failed = call("own")
    assert failed.returncode == 6 and b"not today" in failed.stderr
    assert len(call("zeros 3000000").stdout) == 3_000_000


def test_a_client_in_python_calls_the_tool(name: str, tool: str) -> None:
    cases = "fail) echo no >&2; exit 9 ;; sleep) exec sleep 100 ;; *) echo got $line ;;"
    command = f"read -r line; case $line in {cases} esac"
    process = subprocess.Popen([tool, "serve", name, "--exec", command, "--parallel", "4"])
    try:
        with pelton.Client.connect(name, timeout=LIMIT) as client:
            assert client.call(b"hello\n", LIMIT) == b"got hello\n"
            with pytest.raises(pelton.Failed) as raised:
                client.call(b"fail\n", LIMIT)
            assert (raised.value.code, raised.value.text) == (9, "no\n")
            with pytest.raises(pelton.TimedOut):
                client.call(b"sleep\n", 0.1)
            calls = [client.submit(b"%d\n" % number) for number in range(20)]
            assert [call.result(LIMIT) for call in calls] == [b"got %d\n" % number for number in range(20)]
            call = client.submit(b"sleep\n")
            process.kill()
            with pytest.raises(pelton.PeerDied):
                call.result(LIMIT)
    finally:
        process.kill()
        process.wait()


def test_no_call_leaks_objects_or_memory_of_calls(served: Served) -> None:
    client, _ = served

    def use() -> None:
        client.call(b"hello")
        list(client.stream(b"parts 3 0"))
        client.stream(b"parts 3 0").cancel()
        with pytest.raises(pelton.Failed):
            client.call(b"own")
        with pytest.raises(pelton.Abandoned):
            client.call(b"abandon")

    use()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(1000):
        use()
    gc.collect()
    assert sys.getallocatedblocks() - before < 1000 + 2 * len(served[1].deadlines)


def test_a_reply_arrives_though_the_service_has_closed_right_after_it(name: str) -> None:
    with pelton.Service.listen(name) as service:

        def serve() -> None:
            service.receive(LIMIT).reply(b"last")
            service.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with pelton.Client.connect(name, timeout=LIMIT) as client:
            call = client.submit(b"")
            thread.join()
            assert call.result(LIMIT) == b"last"
            with pytest.raises(pelton.Closed):
                client.call(b"", LIMIT)


def test_a_cancel_by_another_thread_ends_the_wait_for_a_result(served: Served) -> None:
    client, handler = served
    call = client.submit(b"wait")
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            call.result()
        except pelton.Refused as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert handler.begun.wait(LIMIT)
    call.cancel()
    thread.join(LIMIT)
    handler.go_on.set()
    assert ended and "cancelled" in str(ended[0])


def test_an_exception_without_a_text_fails_its_call_alone(name: str) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    def handler(request: pelton.Request) -> bytes:
        if request.data == b"mute":
            raise Mute
        return b"fine"

    with pelton.Service.listen(name) as service:
        thread = threading.Thread(target=service.run, args=(handler,))
        thread.start()
        with pelton.Client.connect(name, timeout=LIMIT) as client:
            with pytest.raises(pelton.Failed, match="Mute"):
                client.call(b"mute", LIMIT)
            assert client.call(b"tea", LIMIT) == b"fine"
        service.stop()
        thread.join(LIMIT)


def test_no_handler_has_a_context_variable_of_another_one(name: str) -> None:
    variable = contextvars.ContextVar("variable", default=b"of nobody")
    variable.set(b"of the caller")

    def handler(request: pelton.Request) -> bytes:
        found = variable.get()
        variable.set(b"of a handler")
        return found

    with pelton.Service.listen(name) as service:
        thread = threading.Thread(target=contextvars.copy_context().run, args=(service.run, handler))
        thread.start()
        with pelton.Client.connect(name, timeout=LIMIT) as client:
            assert [client.call(b"", LIMIT) for _ in range(3)] == [b"of the caller"] * 3
        service.stop()
        thread.join()


def test_no_completion_is_lost_when_memory_runs_out(name: str) -> None:
    fails = pytest.importorskip("_testcapi").set_nomemory
    works = pytest.importorskip("_testcapi").remove_mem_hooks
    failed = 0
    with pelton.Service.listen(name) as service:
        opening = pelton.LoopClient.start_connect(name, timeout=LIMIT)
        client = None
        while client is None:
            assert service.try_receive() is None
            client = opening.try_finish()
        opening.close()
        assert isinstance(client, pelton.LoopClient)
        for number in range(60):
            calls = [client.try_submit(b"%d" % index) for index in range(300, 304)]
            for _ in calls:
                request = service.receive(LIMIT)
                # Of the last one the copy is made without the GIL.
                request.reply(request.data * (1 if request.data != b"303" else 30_000))
            taken: list[tuple[int, bool, bytes | Exception | None]] = []
            # From the allocation of this number on, each fails.
            fails(number, 0)
            try:
                taken = client.completions()
            except MemoryError:
                failed += 1
            finally:
                works()
            end = time.monotonic() + LIMIT
            while len(taken) < len(calls) and time.monotonic() < end:
                taken += client.completions()
                service.try_receive()
            replies = [b"300", b"301", b"302", b"303" * 30_000]
            assert taken == [(call, True, reply) for call, reply in zip(calls, replies, strict=True)], number
        client.close()
    assert failed > 0, "the memory has run out"


def test_a_request_carries_its_traceparent(name: str) -> None:
    valid = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    zero = "00-00000000000000000000000000000000-00f067aa0ba902b7-01"
    with pelton.Service.listen(name) as service:
        running = threading.Thread(
            target=service.run, args=(lambda request: str((request.traceparent, len(request.data))).encode(),)
        )
        running.start()
        try:
            with pelton.Client.connect(name, timeout=LIMIT) as client:
                for size in (0, 5, 5_000_000):
                    for traceparent in (valid, None, valid.upper(), zero, ""):
                        reply = client.call(b"x" * size, LIMIT, traceparent=traceparent)
                        assert reply == str((valid if traceparent == valid else None, size)).encode()
                assert client.submit(b"x", traceparent=valid).result(LIMIT) == str((valid, 1)).encode()

                async def by_a_loop() -> None:
                    async with await pelton.aio.Client.connect(name, timeout=LIMIT) as client:
                        assert await client.call(b"x", traceparent=valid) == str((valid, 1)).encode()
                        async with client.stream(b"x", traceparent=valid) as parts:
                            assert [part async for part in parts] == [str((valid, 1)).encode()]

                asyncio.run(by_a_loop())
        finally:
            service.stop()
            running.join()
