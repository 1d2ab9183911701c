"""pelton.RecordFile and pelton.RecordReader."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pelton
import pytest

Start = Callable[..., Popen[str]]


def test_what_is_appended_is_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "records"
    messages = [os.urandom(number * 31 % 9_000) for number in range(2000)]
    with pelton.RecordFile(path) as file:
        for message in messages:
            file.append(message)
    assert list(pelton.RecordReader(path)) == messages
    with pelton.RecordFile(str(path)) as file:
        assert file.cut_bytes == 0
        file.append(bytearray(b"later"))
    with pelton.RecordReader(path) as reader:
        assert list(reader) == [*messages, b"later"]


def test_a_compressed_file_is_read_and_appended_to(tmp_path: Path) -> None:
    vectors = Path(__file__).parents[3] / "spec/vectors/record-file.json"
    files = json.loads(vectors.read_text())["files"]
    file = next(file for file in files if file["name"].startswith("compressed: two lanes"))
    path = tmp_path / "records"
    path.write_bytes(bytes.fromhex(file["hex"]))
    chunks = [file["chunks"][index]["messages"] for index in file["reads"][:-1]]
    messages = [bytes.fromhex(message["payload"]) for chunk in chunks for message in chunk]
    assert len(messages) > 4
    with pelton.RecordFile(path) as more:
        more.append(b"more")
    assert list(pelton.RecordReader(path)) == [*messages, b"more"]


def test_a_large_message_arrives_and_a_larger_one_than_the_buffer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "records"
    large = os.urandom(900_000)
    with pelton.RecordFile(path) as file:
        file.append(large)
        with pytest.raises(pelton.TooLarge):
            file.append(bytes(2 << 20))
        file.append(b"after")
    assert list(pelton.RecordReader(path)) == [large, b"after"]


def test_threads_share_a_file_and_each_ones_messages_stay_in_order(tmp_path: Path) -> None:
    path = tmp_path / "records"
    with pelton.RecordFile(path, flush_bytes=1 << 16) as file:

        def append(thread: int) -> None:
            for number in range(5000):
                file.append(b"%d %d" % (thread, number))

        threads = [threading.Thread(target=append, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found: dict[bytes, list[int]] = {}
    for message in pelton.RecordReader(path):
        thread_, number = message.split()
        found.setdefault(thread_, []).append(int(number))
    assert len(found) == 4 and all(numbers == list(range(5000)) for numbers in found.values())


def test_a_reader_continues_with_what_a_writer_appends(tmp_path: Path) -> None:
    path = tmp_path / "records"
    with pelton.RecordFile(path, flush_interval=None) as file:
        reader = pelton.RecordReader(path)
        assert next(reader, None) is None
        file.append(b"one")
        assert next(reader, None) is None
        file.flush()
        assert next(reader) == b"one"
        file.append(b"two")
        file.sync()
        assert next(reader) == b"two"
        assert next(reader, None) is None


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with pelton.RecordFile(tmp_path / "records"), pytest.raises(pelton.RoleTaken):
        pelton.RecordFile(tmp_path / "records")


def test_a_file_is_rotated_before_it_is_larger(tmp_path: Path) -> None:
    path = tmp_path / "records"
    with pelton.RecordFile(path, rotate_bytes=1 << 16, flush_bytes=1 << 16) as file:
        for number in range(200):
            file.append(b"%04d" % number + bytes(1000))
    found = [int(message[:4]) for part in sorted(tmp_path.glob("records.*")) for message in pelton.RecordReader(part)]
    assert len(list(tmp_path.iterdir())) > 2
    assert found + [int(message[:4]) for message in pelton.RecordReader(path)] == list(range(200))


def test_damage_is_reported_where_it_is_and_the_reader_continues_after_it(tmp_path: Path) -> None:
    path = tmp_path / "records"
    with pelton.RecordFile(path) as file:
        for message in (b"one", b"two", b"three"):
            file.append(message)
            file.flush()
    data = bytearray(path.read_bytes())
    at = data.index(b"two")
    data[at : at + 3] = b"TWO"
    path.write_bytes(data)
    reader = pelton.RecordReader(path)
    assert next(reader) == b"one"
    with pytest.raises(pelton.Damaged, match="byte") as raised:
        next(reader)
    assert raised.value.offset < at and raised.value.next_offset is not None and raised.value.next_offset > at
    assert list(reader) == [b"three"]
    with pytest.raises(ValueError, match="byte"):
        pelton.RecordFile(path)


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no record file, but a text that is longer than a header of one would be\n" * 9)
    for open_ in (pelton.RecordReader, pelton.RecordFile):
        with pytest.raises(pelton.NotARecordFile, match="text"):
            open_(tmp_path / "text")
    with pytest.raises(FileNotFoundError):
        pelton.RecordReader(tmp_path / "none")


def test_a_closed_file_and_bad_values_say_so(tmp_path: Path) -> None:
    file = pelton.RecordFile(tmp_path / "records")
    with pytest.raises(TypeError, match="bytes-like"):
        file.append("text")  # type: ignore[arg-type]
    file.close()
    file.close()
    for call in (lambda: file.append(b""), file.flush, file.sync):
        with pytest.raises(pelton.ClosedHandle, match="open it again"):
            call()
    with pytest.raises(ValueError, match="not negative"):
        pelton.RecordFile(tmp_path / "records", flush_interval=-1)
    with pytest.raises(pelton.BadOption, match="flush_bytes"):
        pelton.RecordFile(tmp_path / "records", flush_bytes=0)


def test_a_full_disk_loses_nothing_that_was_appended(tmp_path: Path, start: Start) -> None:
    script = """
import pelton, resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = pelton.RecordFile(sys.argv[1], flush_interval=None, flush_bytes=1 << 16)
file.append(b"one")
file.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
file.append(bytes(10_000))
try:
    file.flush()
except OSError as error:
    print(type(error).__mro__[1].__name__, error.errno)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
file.append(b"three")
file.close()
"""
    process = start(script, tmp_path / "records")
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and output.split()[1] == "27"
    assert list(pelton.RecordReader(tmp_path / "records")) == [b"one", bytes(10_000), b"three"]


def test_what_a_killed_writer_had_flushed_is_in_the_file(tmp_path: Path, start: Start) -> None:
    script = """
import pelton, sys
file = pelton.RecordFile(sys.argv[1], flush_interval=None, flush_bytes=1 << 16)
for number in range(10**9):
    file.append(b"%d" % number)
    if number % 1000 == 999:
        file.flush()
        print(number, flush=True)
"""
    path = tmp_path / "records"
    process = start(script, path)
    assert process.stdout is not None
    while int(process.stdout.readline()) < 20_000:
        pass
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    flushed = max(map(int, output.split()), default=20_000)
    with pelton.RecordFile(path) as file:
        file.append(b"successor")
    *found, last = list(pelton.RecordReader(path))
    assert last == b"successor" and len(found) > flushed and [int(message) for message in found] == list(range(len(found)))


def test_a_forked_childs_file_raises_forked_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "records"
    with pelton.RecordFile(path, flush_interval=None) as file:
        file.append(b"one")
        pid = os.fork()
        if pid == 0:
            failed = 0
            for call in (lambda: file.append(b"child"), file.flush, file.sync):
                try:
                    call()
                    failed += 1
                except pelton.Forked:
                    pass
            file.close()
            os._exit(failed)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        file.append(b"two")
    assert list(pelton.RecordReader(path)) == [b"one", b"two"]


def test_a_file_that_is_collected_waits_for_the_disk_without_the_gil(tmp_path: Path) -> None:
    file = pelton.RecordFile(tmp_path / "records", flush_bytes=64 << 20, flush_interval=None)
    for _ in range(60):
        file.append(bytes(1 << 20))
    gate, ran = threading.Lock(), threading.Event()
    gate.acquire()

    def run() -> None:
        gate.acquire()
        ran.set()

    thread = threading.Thread(target=run)
    thread.start()
    interval = sys.getswitchinterval()
    try:
        # From here on, this thread gives the GIL to the other one only where it gives it up by itself.
        sys.setswitchinterval(1000)
        gate.release()
        del file
        has_run = ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert has_run


def test_an_exception_is_made_after_the_file_is_free_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pelton.RecordFile(tmp_path / "records", flush_bytes=1 << 16) as file:

        class TooLarge(pelton.TooLarge):
            def __init__(self, text: str) -> None:
                super().__init__(text)
                # As code that the collector runs may.
                file.append(b"of the exception")

        monkeypatch.setattr("pelton._errors.TooLarge", TooLarge)
        with pytest.raises(TooLarge):
            file.append(bytes(65_530))
    assert list(pelton.RecordReader(tmp_path / "records")) == [b"of the exception"]
