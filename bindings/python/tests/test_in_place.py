"""Messages and reservations in place: no view ever dangles."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy
import pelton
import pytest
from conftest import LIMIT


@pytest.fixture
def pair() -> Iterator[tuple[pelton.Sender, pelton.Receiver]]:
    sender, receiver = pelton.threads(capacity=1 << 16)
    yield sender, receiver
    gc.collect()
    sender.close()
    receiver.close()


Pair = tuple[pelton.Sender, pelton.Receiver]


def test_a_reservation_is_sent_at_the_end_of_its_block(pair: Pair) -> None:
    sender, receiver = pair
    with sender.reserve(5) as view:
        assert len(view) == 5 and not view.readonly
        view[:] = b"hello"
        assert receiver.try_recv() is None
    assert receiver.recv() == b"hello"
    with pytest.raises(ValueError, match="released memoryview"):
        view[0] = 1


def test_a_reservation_commits_fewer_bytes_and_only_once(pair: Pair) -> None:
    sender, receiver = pair
    reservation = sender.reserve(100)
    assert len(reservation) == 100
    with reservation as view:
        view[:5] = b"hello"
        reservation.commit(5)
        with pytest.raises(ValueError, match="released memoryview"):
            view[0] = 1
    assert receiver.recv() == b"hello"
    with pytest.raises(pelton.NotReserved):
        reservation.commit()
    with pytest.raises(pelton.NotReserved):
        memoryview(reservation)


def test_more_than_was_reserved_cannot_be_committed(pair: Pair) -> None:
    reservation = pair[0].reserve(5)
    with pytest.raises(pelton.TooLarge):
        reservation.commit(6)
    reservation.commit(5)


def test_an_exception_in_the_block_sends_nothing(pair: Pair) -> None:
    sender, receiver = pair
    with pytest.raises(KeyError), sender.reserve(5) as view:
        view[:] = b"hello"
        raise KeyError
    assert receiver.try_recv() is None
    sender.send(b"next")
    assert receiver.recv() == b"next"


def test_an_aborted_and_a_forgotten_reservation_are_never_seen(pair: Pair) -> None:
    sender, receiver = pair
    sender.reserve(5).abort()
    sender.reserve(5)
    gc.collect()
    sender.send(b"next")
    assert receiver.recv() == b"next"


def test_while_space_is_reserved_the_sender_does_nothing_else(pair: Pair) -> None:
    sender, receiver = pair
    with sender.reserve(5) as view:
        for call in (
            lambda: sender.send(b""),
            lambda: sender.send_many([b"", b""]),
            lambda: sender.reserve(1),
            lambda: sender.resume(0),
            lambda: sender.close(),
            lambda: sender.wait_released(0),
        ):
            with pytest.raises(BufferError, match="commit or abort"):
                call()
        view[:] = b"hello"
    assert receiver.recv() == b"hello"


def test_an_array_of_reserved_space_prevents_the_commit_and_never_changes_a_later_message(pair: Pair) -> None:
    sender, receiver = pair
    with pytest.raises(pelton.Reserved, match="drop arrays"), sender.reserve(8) as view:
        numbers = numpy.frombuffer(view, dtype=numpy.uint8)
        numbers[:] = 1
    # Nothing is sent, and nothing can be, while the array can still be written.
    assert receiver.try_recv() is None
    with pytest.raises(pelton.Reserved):
        sender.send(b"12345678")
    numbers[:] = 2
    del numbers, view
    gc.collect()
    sender.send(b"12345678")
    assert receiver.recv() == b"12345678"


def test_numpy_writes_and_reads_in_place(pair: Pair) -> None:
    sender, receiver = pair
    with sender.reserve(8 * 100) as view:
        numpy.frombuffer(view, dtype=numpy.int64)[:] = numpy.arange(100)
    with receiver.peek() as view:
        assert numpy.frombuffer(view, dtype=numpy.int64).sum() == 4950


def test_a_reservation_waits_for_space_and_times_out(pair: Pair) -> None:
    sender, _ = pair
    while sender.try_send(bytes(1000)):
        pass
    with pytest.raises(pelton.TimedOut):
        sender.reserve(1000, 0.01)
    with pytest.raises(pelton.TooLarge):
        sender.reserve(1 << 20)


def test_a_peeked_message_is_read_only_and_released_at_the_end_of_its_block(pair: Pair) -> None:
    sender, receiver = pair
    sender.send(b"hello")
    message = receiver.peek()
    with message as view:
        assert view == b"hello" and view.readonly and len(message) == 5
        assert sender.info().unreleased == 1
        with pytest.raises(TypeError, match="read-only"):
            view[0] = 1
    with pytest.raises(ValueError, match="released memoryview"):
        bytes(view)
    with pytest.raises(ValueError, match="released") as raised:
        memoryview(message)
    assert isinstance(raised.value, pelton.Released) and message.released
    # The receiver passes the release on at its next call.
    assert receiver.try_recv() is None
    assert sender.info().unreleased == 0


def test_an_array_keeps_its_message_after_the_release(pair: Pair) -> None:
    sender, receiver = pair
    sender.send(b"\x01" * 1000)
    with receiver.peek() as view:
        numbers = numpy.frombuffer(view, dtype=numpy.uint8)
    del view
    # The sender cannot use the space again, however much it sends.
    for _ in range(1000):
        if sender.try_send(b"\x02" * 1000):
            receiver.recv()
    assert numbers.sum() == 1000
    assert sender.info().unreleased
    del numbers
    gc.collect()
    assert receiver.try_recv() is None
    assert sender.info().unreleased == 0


def test_a_message_outlives_its_receiver_and_its_sender(pair: Pair) -> None:
    sender, receiver = pelton.threads()
    sender.send(b"hello")
    view = memoryview(receiver.peek())
    receiver.close()
    sender.close()
    del receiver, sender
    gc.collect()
    assert bytes(view) == b"hello"
    view.release()


def test_messages_are_held_and_released_in_any_order(pair: Pair) -> None:
    sender, receiver = pair
    sender.send_many(b"%d" % number for number in range(10))
    held = [receiver.peek() for _ in range(10)]
    assert [message.seq for message in held] == list(range(held[0].seq, held[0].seq + 10))
    for message in held[::-1]:
        assert int(bytes(message)) == message.seq - held[0].seq
        message.release()
        message.release()
    assert receiver.try_recv() is None
    assert sender.info().unreleased == 0


def test_a_forgotten_message_is_released(pair: Pair) -> None:
    sender, receiver = pair
    for _ in range(1000):
        sender.send(bytes(1000), LIMIT)
        receiver.peek()
    gc.collect()
    assert receiver.try_recv() is None
    assert sender.info().unreleased == 0


def test_a_view_of_a_view_keeps_the_message_too(pair: Pair) -> None:
    sender, receiver = pair
    sender.send(b"hello")
    with receiver.peek() as view:
        part = view[1:3]
    assert part == b"el"
    assert receiver.try_recv() is None
    assert sender.info().unreleased == 1
    part.release()
    del view
    gc.collect()
    assert receiver.try_recv() is None
    assert sender.info().unreleased == 0
