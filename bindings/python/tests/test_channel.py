"""Senders and receivers: messages, waits, ends."""

from __future__ import annotations

import array
import asyncio
import errno
import gc
import logging
import os
import pickle
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any

import pelton
import pelton.aio
import pelton.files
import pelton.logging
import pytest
from conftest import LIMIT

Start = Callable[..., Popen[str]]


@pytest.fixture
def pair() -> Iterator[tuple[pelton.Sender, pelton.Receiver]]:
    """A channel between threads, of 64 KiB."""
    sender, receiver = pelton.threads(capacity=1 << 16)
    with sender, receiver:
        yield sender, receiver


Pair = tuple[pelton.Sender, pelton.Receiver]


def gathered(name: str, **options: int) -> tuple[pelton.Sender, pelton.Receiver]:
    """A sender of a gathering receiver, which accepts it while it receives."""
    receiver = pelton.gather(name)
    senders: list[pelton.Sender] = []
    thread = threading.Thread(target=lambda: senders.append(pelton.Sender.connect(name, **options)))
    thread.start()
    while thread.is_alive():
        assert receiver.try_recv() is None
    return senders[0], receiver


SEND = """
import pelton, sys
with pelton.Sender.connect(sys.argv[1], timeout=30) as sender:
    for number in range(int(sys.argv[2])):
        sender.send(b"%d" % number)
    sender.wait_released(30)
"""


@pytest.mark.parametrize(
    "data", [b"hello", bytearray(b"hello"), memoryview(b"hello"), memoryview(b"-hello")[1:], array.array("B", b"hello")]
)
def test_a_message_of_any_bytes_like_object_arrives(pair: Pair, data: bytes) -> None:
    sender, receiver = pair
    sender.send(data)
    assert receiver.recv() == b"hello"


def test_an_empty_message_arrives(pair: Pair) -> None:
    sender, receiver = pair
    sender.send(b"")
    sender.send(bytearray())
    assert receiver.recv() == b""
    assert receiver.recv_into(bytearray(1)) == 0


@pytest.mark.parametrize("bytes_", [1, 65_535, 65_536, 5_000_000])
def test_a_message_of_any_size_arrives(bytes_: int) -> None:
    sender, receiver = pelton.threads()
    with sender, receiver:
        message = os.urandom(bytes_)
        sender.send(message)
        assert receiver.recv() == message


@pytest.mark.parametrize(
    ("data", "word"), [("hello", "encode"), (5, "bytes-like"), (None, "bytes-like"), (memoryview(b"abcd")[::2], "copy")]
)
def test_what_is_no_bytes_like_object_is_refused_with_what_to_do(pair: Pair, data: object, word: str) -> None:
    with pytest.raises((TypeError, BufferError), match=word):
        pair[0].send(data)  # type: ignore[arg-type]
    assert pair[1].try_recv() is None


def test_a_timeout_of_nan_is_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match="nan"):
        pair[1].recv(float("nan"))


def test_other_processes_send_and_every_message_arrives_in_order(name: str, start: Start) -> None:
    with pelton.listen(name) as listener:
        process = start(SEND, name, 20_000)
        with listener.accept_receiver(LIMIT) as receiver:
            assert [int(message) for message in receiver] == list(range(20_000))
        assert process.wait(LIMIT) == 0


def test_recv_many_returns_what_is_there_up_to_a_number(pair: Pair) -> None:
    sender, receiver = pair
    assert sender.send_many(b"%d" % number for number in range(10)) == 10
    assert receiver.recv_many(4) == [b"0", b"1", b"2", b"3"]
    assert receiver.recv_many(0) == []
    assert receiver.recv_many(100) == [b"4", b"5", b"6", b"7", b"8", b"9"]
    with pytest.raises(pelton.TimedOut):
        receiver.recv_many(1, 0)


def test_send_many_of_more_than_the_lane_holds_arrives_in_order(pair: Pair) -> None:
    sender, receiver = pair
    messages = [os.urandom(number * 7 % 9_000) for number in range(500)]
    received: list[bytes] = []

    def receive() -> None:
        while len(received) < len(messages):
            received.extend(receiver.recv_many(7, LIMIT))

    thread = threading.Thread(target=receive)
    thread.start()
    assert sender.send_many(messages, LIMIT) == len(messages)
    thread.join()
    assert received == messages


def test_an_error_of_send_many_says_how_many_were_sent(pair: Pair) -> None:
    sender, receiver = pair

    def messages() -> Iterator[bytes]:
        yield b"one"
        yield b"two"
        raise KeyError("third")

    with pytest.raises(KeyError) as raised:
        sender.send_many(messages())
    assert raised.value.sent == 2  # type: ignore[attr-defined]
    assert receiver.recv_many(9) == [b"one", b"two"]
    with pytest.raises(pelton.TimedOut) as timed_out:
        sender.send_many([bytes(1000)] * 1000, 0)
    assert len(receiver.recv_many(1000)) == timed_out.value.sent > 0


def test_an_iterable_of_send_many_may_use_the_sender_itself(pair: Pair) -> None:
    sender, receiver = pair

    def messages() -> Iterator[bytes]:
        sender.send(b"before")
        yield b"after"

    assert sender.send_many(messages()) == 1
    assert receiver.recv_many(9) == [b"before", b"after"]


def test_recv_into_fills_a_buffer_and_a_small_one_loses_nothing(pair: Pair) -> None:
    sender, receiver = pair
    sender.send(b"0123456789")
    with pytest.raises(BufferError, match="10 bytes") as raised:
        receiver.recv_into(bytearray(9))
    assert isinstance(raised.value, pelton.TooSmall) and raised.value.bytes == 10
    buffer = bytearray(12)
    assert receiver.recv_into(memoryview(buffer)[1:]) == 10
    assert buffer == b"\x000123456789\x00"
    with pytest.raises(TypeError, match="read-only"):
        receiver.recv_into(b"0123")


def test_a_full_lane_waits_and_times_out_as_an_answer(pair: Pair) -> None:
    sender, receiver = pair
    sent = 0
    while sender.try_send(bytes(1000)):
        sent += 1
    assert sent > 10
    for wait in (0, 0.01):
        with pytest.raises(TimeoutError) as raised:
            sender.send(bytes(1000), wait)
        assert isinstance(raised.value, pelton.TimedOut) and raised.value.code == "timed_out"
    assert len(receiver.recv_many(10_000)) == sent
    sender.send(bytes(1000), 0)


def test_a_message_that_is_too_large_is_refused(pair: Pair) -> None:
    sender, _ = pair
    most = sender.info().message_bytes_max
    sender.send(bytes(most))
    with pytest.raises(ValueError, match=str(most)) as raised:
        sender.send(bytes(most + 1))
    assert isinstance(raised.value, pelton.TooLarge)


def test_an_end_is_reported_after_the_last_message() -> None:
    sender, receiver = pelton.threads()
    with receiver:
        with sender:
            sender.send(b"last")
        assert list(receiver) == [b"last"]
        assert list(receiver) == []
        with pytest.raises(EOFError):
            receiver.recv()


def test_a_closed_receiver_is_a_broken_pipe_with_the_unreleased_messages() -> None:
    sender, receiver = pelton.threads()
    with sender:
        sender.send(b"one")
        receiver.close()
        with pytest.raises(BrokenPipeError) as raised:
            while True:
                sender.send(b"more")
        assert isinstance(raised.value, pelton.Closed) and raised.value.unreleased >= 1


def test_a_killed_sender_is_reported_and_its_successor_continues(name: str, start: Start) -> None:
    killed = """
import os, pelton, signal, sys
sender = pelton.Sender.connect(sys.argv[1], timeout=30)
sender.send(b"before")
os.kill(os.getpid(), signal.SIGKILL)
"""
    with pelton.listen(name) as listener:
        start(killed, name)
        with listener.accept_receiver(LIMIT) as receiver:
            assert receiver.recv(LIMIT) == b"before"
            with pytest.raises(ConnectionResetError) as raised:
                receiver.recv(LIMIT)
            assert isinstance(raised.value, pelton.PeerDied)
            start(SEND, name, 3)
            receiver.resume(LIMIT)
            assert list(receiver) == [b"0", b"1", b"2"]


def test_a_killed_receivers_successor_gets_what_was_not_released(name: str, start: Start) -> None:
    receive = """
import os, pelton, signal, sys
receiver = pelton.listen(sys.argv[1]).accept_receiver(30)
for number in range(2):
    receiver.recv(30)
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = start(receive, name)
    with pelton.Sender.connect(name, timeout=LIMIT) as sender:
        sender.send_many(b"%d" % number for number in range(5))
        process.wait(LIMIT)
        with pytest.raises(pelton.PeerDied):
            sender.wait_released(LIMIT)
        received: list[bytes] = []

        def succeed() -> None:
            with pelton.listen(name) as listener, listener.accept_receiver(LIMIT) as receiver:
                received.extend(receiver)

        successor = threading.Thread(target=succeed)
        successor.start()
        sender.resume(LIMIT)
        sender.wait_released(LIMIT)
    successor.join()
    assert received == [b"2", b"3", b"4"]


def test_resume_is_refused_while_the_peer_lives_and_times_out_without_a_successor(name: str, start: Start) -> None:
    with pelton.listen(name) as listener:
        process = start(SEND + "\nsys.stdin.read()", name, 1)
        with listener.accept_receiver(LIMIT) as receiver:
            with pytest.raises(pelton.Refused):
                receiver.resume(0.01)
            process.kill()
            with pytest.raises((pelton.Closed, pelton.PeerDied)):
                while True:
                    receiver.recv(LIMIT)
            with pytest.raises(pelton.TimedOut):
                receiver.resume(0.01)


def test_nobody_listening_is_a_refused_connection_and_a_timeout_waits(name: str) -> None:
    with pytest.raises(ConnectionRefusedError) as raised:
        pelton.Sender.connect(name)
    assert isinstance(raised.value, pelton.NoListener) and raised.value.code == "no_listener"
    with pytest.raises(TimeoutError):
        pelton.Receiver.connect(name, timeout=0.01)


def test_wrong_names_and_options_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(pelton.BadName):
        pelton.listen("no/such/name")
    with pytest.raises(pelton.BadOption):
        pelton.threads(capacity=3)
    with pytest.raises(TypeError, match="lanes is no option"):
        pelton.listen(name, lanes=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="capacity is no option"):
        pelton.Sender.open_path(tmp_path / "channel", capacity=1 << 20)
    with pelton.listen(name), pytest.raises(OSError, match="in use") as raised:
        pelton.listen(name)
    assert isinstance(raised.value, pelton.InUse)


def test_a_listener_times_out_and_accepts_either_role(name: str) -> None:
    with pelton.listen(name) as listener:
        with pytest.raises(pelton.TimedOut):
            listener.accept_receiver(0.01)
        connected: list[pelton.Receiver] = []
        thread = threading.Thread(target=lambda: connected.append(pelton.Receiver.connect(name)))
        thread.start()
        with listener.accept_sender(LIMIT) as sender:
            thread.join()
            sender.send(b"hello")
            with connected[0] as receiver:
                assert receiver.recv() == b"hello"


def test_an_opening_is_finished_by_an_event_loop(name: str) -> None:
    with pelton.listen(name) as listener:
        accepted: list[pelton.Receiver] = []
        thread = threading.Thread(target=lambda: accepted.append(listener.accept_receiver(LIMIT)))
        thread.start()
        opening = pelton.Sender.start_connect(name)
        while (sender := opening.try_finish()) is None:
            time.sleep(0)
        thread.join()
        assert isinstance(sender, pelton.Sender)
        with sender, accepted[0] as receiver:
            sender.send(b"hello")
            assert receiver.recv() == b"hello"
        opening.close()


def test_many_senders_gather_in_one_receiver_each_in_its_own_order(name: str, start: Start) -> None:
    with pelton.gather(name, lanes=4) as receiver:
        for _ in range(3):
            start(SEND, name, 500)
        found: dict[int, list[int]] = {}
        for _ in range(1500):
            message = receiver.peek(LIMIT)
            with message as view:
                found.setdefault(message.lane, []).append(int(bytes(view)))
        assert len(found) == 3 and all(numbers == list(range(500)) for numbers in found.values())


def test_a_path_keeps_messages_across_restarts_of_both_sides(tmp_path: Path) -> None:
    directory = tmp_path / "channel"
    with pytest.raises(FileNotFoundError):
        pelton.Receiver.open_path(directory)
    with pelton.Sender.open_path(directory, create=True, capacity=1 << 20) as sender:
        sender.send_many([b"one", b"two", b"three"])
        sender.sync()
        with pytest.raises(pelton.RoleTaken):
            pelton.Sender.open_path(directory)
    with pelton.Receiver.open_path(directory) as receiver:
        assert receiver.recv(LIMIT) == b"one"
    with pelton.Receiver.open_path(str(directory)) as receiver:
        message = receiver.peek(LIMIT)
        assert message.is_redelivered and bytes(message) == b"two"
        message.release()
        assert receiver.recv(LIMIT) == b"three"
        receiver.sync()


def test_descriptors_travel_with_a_message(name: str) -> None:
    with pelton.listen(name) as listener:
        senders: list[pelton.Sender] = []
        thread = threading.Thread(target=lambda: senders.append(pelton.Sender.connect(name)))
        thread.start()
        with listener.accept_receiver(LIMIT) as receiver:
            thread.join()
            with senders[0] as sender:
                read, write = os.pipe()
                with open(read, "rb") as file:
                    sender.send_descriptors(b"a pipe", [file])
                    sender.send_descriptors(b"again", [read])
                    sender.send_descriptors(b"none", [])
                payload, (received,) = receiver.recv_descriptors(LIMIT)
                assert payload == b"a pipe"
                os.write(write, b"hello")
                with open(received, "rb") as file:
                    assert os.read(received, 9) == b"hello"
                with receiver.peek(LIMIT) as view:
                    assert bytes(view) == b"again"
                assert receiver.recv_descriptors(LIMIT) == (b"none", [])
                with pytest.raises(pelton.System, match=f"duplicating descriptor {read}") as raised:
                    sender.send_descriptors(b"closed", [read])
                assert raised.value.errno == errno.EBADF
                with pytest.raises(pelton.TooManyDescriptors):
                    sender.send_descriptors(b"many", [write] * 65)
                os.close(write)


def test_a_message_whose_descriptors_are_lost_arrives_with_the_error(name: str) -> None:
    with pelton.listen(name) as listener:
        opening = pelton.Sender.start_connect(name)
        accepting = listener.start_accept_receiver()
        endpoints: dict[pelton.Opening, Any] = {}
        while len(endpoints) < 2:
            for each in {opening, accepting} - endpoints.keys():
                if (opened := each.try_finish()) is not None:
                    endpoints[each] = opened
        opening.close()
        accepting.close()
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        with endpoints[opening] as sender, endpoints[accepting] as receiver:
            sender.send_descriptors(b"a message", [0, 1])
            sender.send_descriptors(b"in place", [0])
            sender.send_descriptors(b"the next", [0])
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
            try:
                with pytest.raises(pelton.DescriptorsLost, match="2 descriptors.*RLIMIT_NOFILE") as raised:
                    receiver.recv_descriptors(LIMIT)
                message = receiver.peek(LIMIT)
                with pytest.raises(pelton.DescriptorsLost) as also_raised:
                    message.take_descriptors()
                assert bytes(message) == b"in place" and also_raised.value.message is None
                message.release()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
            assert raised.value.message == b"a message"
            payload, (fd,) = receiver.recv_descriptors(LIMIT)
            os.close(fd)
            assert payload == b"the next"


def test_descriptors_do_not_go_through_a_path(tmp_path: Path) -> None:
    with pelton.Sender.open_path(tmp_path / "channel", create=True) as sender, pytest.raises(pelton.Refused):
        sender.send_descriptors(b"", [0])


def test_a_closed_handle_says_so_whatever_is_called() -> None:
    sender, receiver = pelton.threads()
    for handle in (sender, receiver):
        assert not handle.closed
        handle.close()
        handle.close()
        assert handle.closed
    for call in (
        lambda: sender.send(b""),
        lambda: sender.try_send(b""),
        lambda: sender.send_many([]),
        lambda: sender.reserve(1),
        lambda: sender.wait_released(),
        lambda: sender.info(),
        lambda: sender.fileno(),
        lambda: sender.arm(),
        lambda: receiver.recv(),
        lambda: next(receiver),
        lambda: receiver.recv_many(1),
        lambda: receiver.recv_into(bytearray(1)),
        lambda: receiver.peek(),
        lambda: receiver.resume(),
        lambda: receiver.fileno(),
    ):
        with pytest.raises(ValueError, match="is closed") as raised:
            call()
        assert isinstance(raised.value, pelton.ClosedHandle)


def test_a_second_thread_is_refused_and_a_close_ends_the_wait_of_the_first() -> None:
    sender, receiver = pelton.threads()
    errors: list[BaseException] = []

    def receive() -> None:
        try:
            receiver.recv()
        except pelton.Error as error:
            errors.append(error)

    with sender:
        thread = threading.Thread(target=receive)
        thread.start()
        while True:
            try:
                receiver.info()
            except RuntimeError as error:
                assert isinstance(error, pelton.Busy) and "thread" in str(error)
                break
            time.sleep(0)
        receiver.close()
        assert receiver.closed
        thread.join(LIMIT)
        assert isinstance(errors[0], pelton.ClosedHandle)


def until_asleep(pid: int) -> None:
    """Waits until the main thread of a process sleeps."""
    stat = Path(f"/proc/{pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "S":
        time.sleep(0)


@pytest.mark.parametrize(
    "wait",
    [
        "s, r = pelton.threads(); wait(r.recv)",
        "s, r = pelton.threads(); wait(lambda: next(r))",
        "s, r = pelton.threads(); wait(r.peek)",
        "s, r = pelton.threads(); wait(lambda: r.recv_into(bytearray(9)))",
        "s, r = pelton.threads(); wait(lambda: r.recv_many(9))",
        "s, r = pelton.threads(); wait(r.recv_descriptors)",
        "s, r = pelton.threads(); s.send(b''); wait(s.wait_released)",
        "s, r = pelton.threads(capacity=1 << 16); wait(lambda: s.send_many(bytes(1000) for _ in range(1000)))",
        "s, r = pelton.threads(); s.try_send(bytes(1 << 24)); s.try_send(bytes(1 << 24)); s.try_send(bytes(1 << 24));"
        "wait(lambda: s.reserve(1 << 24))",
        "s, r = pelton.threads(capacity=1 << 16)\nwhile s.try_send(bytes(1000)): pass\n"
        "wait(lambda: s.send_descriptors(bytes(1000), []))",
        "wait(lambda: pelton.Sender.connect(name, timeout=None))",
        "wait(lambda: pelton.Receiver.open_path(name[5:], timeout=None))",
        "listener = pelton.listen(name); wait(listener.accept_receiver)",
        "listener = pelton.listen(name); wait(listener.accept_sender)",
        "listener = pelton.listen(name); peer = pelton.Sender.start_connect(name); peer.try_finish()\n"
        "wait(listener.accept_receiver)",
        "s, r = pelton.threads(capacity=1 << 16)\nwhile s.try_send(bytes(1000)): pass\n"
        "wait(lambda: s.send(bytes(1000)))",
        "wait(lambda: pelton.Client.connect(name, timeout=None))",
        "r = pelton.gather(name); wait(r.recv)",
        "r = pelton.Receiver.open_path(name[5:], create=True); wait(r.resume)",
        "s = pelton.Sender.open_path(name[5:], create=True); wait(s.resume)",
        "service = pelton.Service.listen(name); wait(service.receive)",
        "service = pelton.Service.listen(name); wait(lambda: service.run(len))",
        "serve(name); client = pelton.Client.connect(name, timeout=9);"
        "wait(lambda: client.call(b''))",
        "serve(name); client = pelton.Client.connect(name, timeout=9);"
        "wait(lambda: next(client.stream(b'')))",
        "serve(name); client = pelton.Client.connect(name, timeout=9);"
        "wait(lambda: [client.notify(bytes(1 << 20)) for _ in range(1000)])",
        "serve(name); client = pelton.Client.connect(name, timeout=9);"
        "wait(client.submit(b'').result)",
        "service = pelton.Service.listen(name)\n"
        "def call():\n"
        "    global stream\n"
        "    stream = pelton.Client.connect(name, timeout=9).stream(b'')\n"
        "    next(stream)\n"
        "threading.Thread(target=call, daemon=True).start(); request = service.receive()\n"
        "wait(lambda: [request.part(bytes(1 << 20)) for _ in range(1000)])",
        "listener = pelton.aio.listen(name); wait(lambda: asyncio.run(listener.accept_receiver()))",
        "async def read():\n"
        "    async with await pelton.files.open(name[5:], 'r+') as file: await file.read(1)\n"
        "os.mkfifo(name[5:]); wait(lambda: asyncio.run(read()))",
        "q = pelton.Queue(); wait(q.get)",
        "q = pelton.Queue(1); q.put(0); wait(lambda: q.put(1))",
        "q = pelton.JoinableQueue(); q.put(0); wait(q.join)",
    ],
)
def test_a_signal_ends_each_wait(wait: str, name: str, start: Start) -> None:
    script = """
import asyncio, os, pelton, pelton.aio, pelton.files, sys, threading, time
name = sys.argv[1]
def serve(name):
    service = pelton.Service.listen(name)
    threading.Thread(target=service.run, args=(lambda request: time.sleep(99),), daemon=True).start()
def wait(call):
    try:
        print("waits", flush=True)
        call()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""
    process = start(script + wait, name)
    assert process.stdout is not None and process.stdout.readline() == "waits\n"
    until_asleep(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "interrupted\n"


@pytest.mark.parametrize(
    ("peer", "accept"),
    [
        (pelton.Sender, "endpoint = listener.accept_receiver()"),
        (pelton.Receiver, "endpoint = listener.accept_sender()"),
        (pelton.Sender, "endpoint = lost(listener.accept_receiver(9), listener); endpoint.resume()"),
        (pelton.Receiver, "endpoint = lost(listener.accept_sender(9), listener); endpoint.resume()"),
    ],
)
def test_a_signal_is_handled_while_a_silent_peer_is_in_its_handshake(
    peer: type[pelton.Sender] | type[pelton.Receiver], accept: str, name: str, start: Start
) -> None:
    """The handler runs before the handshake has run out of time: the silent peer is not disconnected."""
    script = """
import pelton, signal, sys
signal.signal(signal.SIGINT, lambda *_: print("handled", flush=True))
listener = pelton.listen(sys.argv[1])
def lost(endpoint, listener):
    print("accepted", flush=True)
    sys.stdin.readline()
    return endpoint
print("listens", flush=True)
%s
print("accepted", flush=True)
sys.stdin.readline()
endpoint.close()
"""
    process = start(script % accept, name)
    assert process.stdin is not None and process.stdout is not None and process.stdout.readline() == "listens\n"
    if "lost" in accept:
        peer.connect(name, timeout=LIMIT).close()
        assert process.stdout.readline() == "accepted\n"
        print(file=process.stdin, flush=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(name.removeprefix("unix:"))
        silent.send(first_packet(peer, name + "2"))
        # The process has answered it, and waits for the second one.
        assert silent.recv(1 << 16)
        until_asleep(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "handled\n"
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            while silent.recv(1 << 16):
                pass
            pytest.fail("the handshake had run out of time before")
    with peer.connect(name, timeout=LIMIT):
        assert process.stdout.readline() == "accepted\n"
        print(file=process.stdin, flush=True)
        assert process.wait(LIMIT) == 0


def first_packet(peer: type[pelton.Sender] | type[pelton.Receiver], name: str) -> bytes:
    """What an endpoint sends when it connects."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(name.removeprefix("unix:"))
        listening.listen()
        opening = peer.start_connect(name)
        assert opening.try_finish() is None
        with listening.accept()[0] as accepted:
            packet = accepted.recv(1 << 16)
        opening.close()
    return packet


def test_other_threads_run_while_one_waits(pair: Pair) -> None:
    sender, receiver = pair
    done = threading.Event()
    thread = threading.Thread(target=lambda: (receiver.recv(), done.set()))
    thread.start()
    assert not done.wait(0.02)
    sender.send(b"now")
    assert done.wait(LIMIT)
    thread.join()


def test_a_forked_childs_handles_raise_forked(name: str) -> None:
    sender, receiver = gathered(name)
    with sender, receiver:
        sender.send(b"hello")
        message = receiver.peek(LIMIT)
        sender.send(b"more")
        pid = os.fork()
        if pid == 0:
            failed = 0
            for call in (
                lambda: sender.send(b""),
                lambda: sender.send_many([b"", b""]),
                lambda: sender.reserve(1),
                lambda: sender.info(),
                lambda: receiver.recv(),
                lambda: receiver.recv_many(9),
                lambda: receiver.recv_into(bytearray(9)),
                lambda: receiver.peek(),
                lambda: memoryview(message),
            ):
                try:
                    call()
                    failed += 1
                except pelton.Forked:
                    pass
            sender.close()
            receiver.close()
            message.release()
            os._exit(failed)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        # The child closed and released nothing of its parent's.
        assert bytes(message) == b"hello"
        message.release()
        assert receiver.recv(LIMIT) == b"more"
        sender.send(b"last")
        assert receiver.recv(LIMIT) == b"last"


def test_info_has_the_sizes_the_peer_and_the_counters(name: str) -> None:
    sender, receiver = gathered(name, capacity=1 << 20)
    with sender, receiver:
        sender.send(b"hello")
        info = sender.info()
        assert info.capacity == 1 << 20 and info.unreleased == 1 and info.messages == 1 and info.bytes == 5
        assert info.peer_pid == os.getpid() and info.peer_uid == os.getuid()
        assert repr(info).startswith("Info(capacity=1048576, ")
        assert receiver.recv(LIMIT) == b"hello"
        assert receiver.info().messages == 1 and receiver.info().unreleased is None


def test_the_descriptor_is_readable_when_armed_and_a_message_comes(pair: Pair) -> None:
    import select

    sender, receiver = pair
    assert receiver.arm()
    assert not select.select([receiver], [], [], 0)[0]
    sender.send(b"hello")
    assert select.select([receiver], [], [], LIMIT)[0]
    assert receiver.try_recv() == b"hello"
    receiver.disarm()
    while sender.try_send(bytes(1000)):
        pass
    assert sender.arm(1000)
    assert not select.select([sender], [], [], 0)[0]
    receiver.recv_many(1000)
    assert select.select([sender], [], [], LIMIT)[0]
    assert not sender.arm(1000)


def test_a_subinterpreter_is_refused() -> None:
    interpreters = pytest.importorskip("_xxsubinterpreters")
    interpreter = interpreters.create()
    try:
        with pytest.raises(interpreters.RunFailedError, match="subinterpreters"):
            interpreters.run_string(interpreter, "import pelton")
    finally:
        interpreters.destroy(interpreter)


def test_every_public_name_is_documented() -> None:
    for module in (pelton, pelton.aio, pelton.files, pelton.logging, pelton.queue):
        assert module.__doc__
        for name in module.__all__:
            thing = getattr(module, name)
            assert thing.__doc__, name
            if isinstance(thing, type) and not issubclass(thing, Exception):
                own = [each for each in thing.__mro__ if each.__module__.startswith("pelton")]
                for attribute, method in {**ChainMap(*(vars(each) for each in own))}.items():
                    assert attribute.startswith("_") or not callable(method) or method.__doc__, f"{name}.{attribute}"


def test_no_call_leaks_objects(pair: Pair) -> None:
    sender, receiver = pair
    buffer = bytearray(10)

    def use() -> None:
        sender.send(b"one")
        receiver.recv()
        sender.send(buffer)
        receiver.recv_into(buffer)
        sender.send_many([b"one", buffer])
        receiver.recv_many(9)
        with sender.reserve(5) as view:
            view[:] = b"hello"
        with receiver.peek() as view:
            assert view == b"hello"
        with pytest.raises(pelton.TimedOut):
            receiver.recv(0)

    use()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(2000):
        use()
    gc.collect()
    assert sys.getallocatedblocks() - before < 1000


def test_no_message_of_a_list_is_lost_when_memory_runs_out() -> None:
    fails = pytest.importorskip("_testcapi").set_nomemory
    works = pytest.importorskip("_testcapi").remove_mem_hooks
    messages = [b"%d" % number for number in range(300, 310)]
    sender, receiver = pelton.threads()
    failed = 0
    with sender, receiver:
        for number in range(60):
            sender.send_many(messages)
            taken: list[bytes] = []
            # The allocation of this number fails.
            fails(number, number + 1)
            try:
                taken = receiver.recv_many(10, 0)
            except MemoryError:
                failed += 1
            finally:
                works()
            while len(taken) < len(messages):
                taken += receiver.recv_many(10, 0)
            assert taken == messages, number
    assert failed > 0, "the memory has run out"


def test_an_exception_of_a_with_block_is_not_replaced_by_that_of_the_close() -> None:
    sender, receiver = pelton.threads()
    with receiver, pytest.raises(ValueError, match="the user's"), sender:
        reservation = sender.reserve(8)
        raise ValueError("the user's")
    reservation.abort()
    sender.close()


def test_an_error_of_the_system_can_be_pickled() -> None:
    with pytest.raises(pelton.System) as raised:
        pelton.RecordReader("/nowhere/to/be/found")
    again = pickle.loads(pickle.dumps(raised.value))
    assert isinstance(again, FileNotFoundError) and isinstance(again, pelton.System)
    assert (again.errno, again.strerror, str(again)) == (2, os.strerror(2), str(raised.value))


def test_a_message_is_entered_once() -> None:
    sender, receiver = pelton.threads()
    with sender, receiver:
        sender.send(b"hello")
        message = receiver.peek()
        with message as view:
            with pytest.raises(pelton.Busy):
                message.__enter__()
            assert bytes(view) == b"hello"


def test_a_refused_peer_is_logged(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with pelton.gather(name) as receiver, caplog.at_level(logging.INFO, "pelton"):
        until = time.monotonic() + LIMIT
        # Again, if a refusal less than a second ago had a record.
        while not caplog.records and time.monotonic() < until:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
                peer.connect(name.removeprefix("unix:"))
                peer.send(b"bad")
                with pytest.raises(pelton.TimedOut):
                    receiver.recv(0.1)
    peer_text = f"process {os.getpid()} of uid {os.getuid()}"
    wanted = f"refused the peer, {peer_text}: a packet of 3 bytes came, wanted at least 80"
    [(logger, level, text)] = caplog.record_tuples
    assert (logger, level) == ("pelton", logging.WARNING) and text.startswith(wanted), text


VALID = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_message_carries_its_traceparent_if_the_channel_permits_it(tmp_path: Path) -> None:
    sender, receiver = pelton.threads(capacity=1 << 16, traced=True)
    with sender, receiver:
        for text in VALID, None, VALID.upper(), "":
            wanted = VALID if text == VALID else None
            sender.send(b"copied", traceparent=text)
            assert receiver.recv() == b"copied"
            assert receiver.traceparent == wanted
            assert sender.try_send(b"in place", traceparent=text)
            message = receiver.peek()
            with message as view:
                assert bytes(view) == b"in place"
            assert message.traceparent == wanted
            with sender.reserve(8, traceparent=text) as view:
                view[:] = b"reserved"
            assert receiver.recv_many(9) == [b"reserved"]
            assert receiver.traceparent == wanted
    # By path the creator decides. Without the option a message goes without it.
    for name, traced in ("traced", True), ("plain", False):
        with pelton.Sender.open_path(tmp_path / name, create=True, capacity=1 << 16, traced=traced) as sender:
            sender.send(b"x", traceparent=VALID)
        with pelton.Receiver.open_path(tmp_path / name) as receiver:
            assert receiver.recv() == b"x"
            assert receiver.traceparent == (VALID if traced else None)
    with pytest.raises(TypeError, match="traced is no option"):
        pelton.Receiver.connect("nobody", traced=True)  # type: ignore[call-arg]


def test_a_message_carries_its_traceparent_in_an_event_loop(tmp_path: Path) -> None:
    async def exchange() -> None:
        options: dict[str, Any] = {"capacity": 1 << 16, "traced": True}
        sender = await pelton.aio.Sender.open_path(tmp_path / "channel", create=True, **options)
        receiver = await pelton.aio.Receiver.open_path(tmp_path / "channel")
        async with sender, receiver:
            await sender.send(b"one", traceparent=VALID)
            with await sender.reserve(3, traceparent=VALID) as view:
                view[:] = b"two"
            for wanted in b"one", b"two":
                assert await receiver.recv() == wanted
                assert receiver.traceparent == VALID
            await sender.send(b"three")
            assert await receiver.recv() == b"three"
            assert receiver.traceparent is None

    asyncio.run(exchange())
