"""What a user may give by mistake: each error names it. And handles that are closed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pelton
import pelton.aio
import pelton.files
import pytest
from conftest import LIMIT, Run

NUMBERS = [-1, 1 << 64, "9", 1.5]


@pytest.mark.parametrize("number", NUMBERS)
def test_an_option_that_is_no_number_is_named(number: Any, tmp_path: Path) -> None:
    calls: dict[str, Callable[[], object]] = {
        "capacity": lambda: pelton.threads(capacity=number),
        "message_bytes_max": lambda: pelton.threads(message_bytes_max=number),
        "lanes": lambda: pelton.gather("name", lanes=number),
        "allow_uids": lambda: pelton.listen("name", allow_uids=[number]),
        "call_bytes_max": lambda: pelton.Service.listen("name", call_bytes_max=number),
        "memory_bytes_max": lambda: pelton.Client.connect("name", memory_bytes_max=number),
        "mode": lambda: pelton.Sender.open_path(tmp_path / "channel", create=True, mode=number),
    }
    wanted: type[Exception] = pelton.BadOption if isinstance(number, int) else TypeError
    for name, call in calls.items():
        with pytest.raises(wanted, match=f"^{name} is .*, wanted a"):
            call()
    with pytest.raises(wanted, match="^capacity is .*, wanted a"):
        pelton.Queue(capacity=number)


@pytest.mark.parametrize("value", ["9", [1], b""])
def test_a_time_and_a_list_of_another_type_are_named(value: Any) -> None:
    with pytest.raises(TypeError, match="^timeout is .*, wanted seconds"):
        pelton.Sender.connect("name", timeout=value)
    with pytest.raises(TypeError, match="^allow_uids is int, wanted a list of user ids"):
        pelton.listen("name", allow_uids=9)  # type: ignore[arg-type]
    sender, receiver = pelton.threads()
    with sender, receiver, pytest.raises(TypeError, match="timeout"):
        receiver.recv(value)


@pytest.mark.parametrize("number", NUMBERS)
def test_an_argument_that_is_no_number_is_named(number: Any, tmp_path: Path) -> None:
    path = tmp_path / "records"
    sender, receiver = pelton.threads()
    with sender, receiver:
        calls: list[tuple[str, Callable[[], object]]] = [
            ("bytes", lambda: sender.reserve(number)),
            ("bytes", lambda: sender.arm(number)),
            ("most", lambda: receiver.recv_many(number, 0)),
            ("rotate_bytes", lambda: pelton.RecordFile(path, rotate_bytes=number)),
            ("sync_bytes", lambda: pelton.RecordFile(path, sync_bytes=number)),
            ("flush_bytes", lambda: pelton.RecordFile(path, flush_bytes=number)),
        ]
        wanted: type[Exception] = ValueError if isinstance(number, int) else TypeError
        for name, call in calls:
            with pytest.raises(wanted, match=f"^{name} is .*, wanted a"):
                call()
        reservation = sender.reserve(4)
        with pytest.raises(wanted, match="^bytes is .*, wanted a"):
            reservation.commit(number)
        reservation.abort()


@pytest.mark.parametrize("number", [-2, 1 << 64, "9", 1.5])
def test_an_argument_of_a_file_that_is_no_number_is_named(run: Run, tmp_path: Path, number: Any) -> None:
    async def main() -> None:
        wanted: type[Exception] = ValueError if isinstance(number, int) else TypeError
        async with await pelton.files.open(tmp_path / "file", "w+") as file:
            with pytest.raises(wanted, match="^most is "):
                await file.read(number)
            with pytest.raises(wanted, match="^most is "):
                await file.pread(number, 0)
            with pytest.raises(wanted, match="^offset is "):
                await file.pread(1, number)
            with pytest.raises(wanted, match="^offset is "):
                await file.pwrite(b"data", number)
        with pytest.raises(wanted, match="^permissions is "):
            await pelton.files.open(tmp_path / "file", permissions=number)

    run(main())


@pytest.mark.parametrize("kind", ["Sender", "Receiver", "Listener", "Client", "Service"])
def test_a_name_instead_of_a_handle_says_how_it_is_opened(kind: str) -> None:
    with pytest.raises(TypeError, match="found str, wanted a pelton.*`(connect|listen|pelton.aio.listen)`"):
        getattr(pelton.aio, kind)("events")


def test_every_handle_says_whether_it_is_closed_and_refuses_what_comes_then(name: str, tmp_path: Path) -> None:
    with pelton.Service.listen(f"{name}-served") as served:
        thread = threading.Thread(target=served.run, args=(bytes,))
        thread.start()
        sender, receiver = pelton.threads()
        listener = pelton.listen(name)
        service = pelton.Service.listen(f"{name}-calls")
        opening = listener.start_accept_sender()
        client = pelton.Client.connect(f"{name}-served", timeout=LIMIT)
        loop_client = pelton.LoopClient.connect(f"{name}-served", timeout=LIMIT)
        records = pelton.RecordFile(tmp_path / "records")
        reader = pelton.RecordReader(tmp_path / "records")
        queue: pelton.Queue[int] = pelton.Queue()
        handles: list[tuple[Any, Callable[[], object]]] = [
            (sender, lambda: sender.send(b"")),
            (receiver, receiver.recv),
            (opening, opening.try_finish),
            (listener, listener.accept_sender),
            (service, service.receive),
            (client, lambda: client.call(b"")),
            (loop_client, loop_client.completions),
            (records, lambda: records.append(b"")),
            (reader, lambda: next(reader)),
            (queue, queue.get),
        ]
        for handle, use in handles:
            assert handle.closed is False, handle
            handle.close()
            handle.close()
            assert handle.closed is True, handle
            with pytest.raises(pelton.ClosedHandle, match="is closed"):
                use()
        served.stop()
        thread.join()


def test_every_handle_of_asyncio_says_whether_it_is_closed(run: Run, name: str, tmp_path: Path) -> None:
    async def main() -> None:
        sender, receiver = pelton.threads()
        service = pelton.aio.Service.listen(f"{name}-calls")
        running = asyncio.create_task(service.run(handler))
        file = await pelton.files.open(tmp_path / "file", "w")

        async def run_again() -> None:
            await running
            await service.run(handler)

        in_loop = pelton.aio.Sender(sender), pelton.aio.Receiver(receiver)
        listener = pelton.aio.listen(name)
        client = await pelton.aio.Client.connect(f"{name}-calls", timeout=LIMIT)
        handles: list[tuple[Any, Callable[[], Any]]] = [
            (in_loop[0], lambda: in_loop[0].send(b"")),
            (in_loop[1], in_loop[1].recv),
            (listener, listener.accept_receiver),
            (client, lambda: client.call(b"")),
            (service, run_again),
            (file, lambda: file.read(1)),
        ]
        for handle, use in handles:
            assert handle.closed is False, handle
            if asyncio.iscoroutine(closing := handle.close()):
                await closing
            assert handle.closed is True, handle
            with pytest.raises(pelton.ClosedHandle, match="is closed"):
                await use()
    async def handler(request: pelton.Request) -> bytes:
        return request.data

    run(main())
