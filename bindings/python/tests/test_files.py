"""pelton.files: files in an event loop, of asyncio and of uvloop."""

from __future__ import annotations

import asyncio
import errno
import functools
import gc
import os
import pickle
import shutil
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pelton
import pelton.files
import pytest
import uvloop
from conftest import Run


# Operations that an engine has in flight at most.
IN_FLIGHT = 1024


@pytest.mark.parametrize("size", [0, 1, 65_536, 5_000_000])
def test_what_is_written_is_read(run: Run, tmp_path: Path, size: int) -> None:
    async def main() -> None:
        path, data = tmp_path / "file", os.urandom(size)
        await pelton.files.write_file(path, data)
        assert path.read_bytes() == data
        assert await pelton.files.read_file(path) == data
        await pelton.files.write_file(str(path), b"shorter"[:size])
        assert path.read_bytes() == b"shorter"[:size]

    run(main())


def test_reads_and_writes_are_at_the_position_or_at_an_offset(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        async with await pelton.files.open(tmp_path / "file", "w+b") as file:
            assert await file.write(b"hello, ") == 7
            assert await file.write(bytearray(b"file")) == 4
            assert await file.pread(100, 7) == b"file"
            assert await file.pread(2, 1) == b"el"
            assert await file.pread(2, 100) == b""
            assert await file.pwrite(memoryview(b"HELLO"), 0) == 5
            assert await file.size() == 11
            await file.fsync()
            await file.fsync(data_only=True)
            assert await file.read(5) == b""
        async with await pelton.files.open(tmp_path / "file") as file:
            assert await file.read(5) == b"HELLO"
            assert await file.read() == b", file"
            assert await file.read() == b""
        async with await pelton.files.open(tmp_path / "file", "a") as file:
            await file.write(b"!")
        assert (tmp_path / "file").read_bytes() == b"HELLO, file!"

    run(main())


def test_tasks_at_once_read_each_its_own_part(run: Run, tmp_path: Path) -> None:
    """More than the engine accepts at once, and more than a turn of the loop copies."""
    path = tmp_path / "file"
    path.write_bytes(b"".join(number.to_bytes(4, "little") * 1024 for number in range(3000)))

    async def main() -> None:
        async with await pelton.files.open(path) as file:

            async def part(number: int) -> None:
                assert await file.pread(4096, number * 4096) == number.to_bytes(4, "little") * 1024

            for _ in range(3):
                await asyncio.gather(*map(part, range(3000)))

    run(main())


def test_an_operation_that_waits_for_space_and_ends_at_once_returns(run: Run, tmp_path: Path) -> None:
    """One of the others ends while it begins, and leaves it the space."""
    path, fifo = tmp_path / "file", tmp_path / "fifo"
    path.write_bytes(b"data")
    os.mkfifo(fifo)

    async def main() -> None:
        writer = os.open(fifo, os.O_RDWR)
        async with await pelton.files.open(path) as file, await pelton.files.open(fifo) as reading:
            engine = reading._engine
            read = functools.partial(engine.run, ("fifo",), engine.begin.read, reading._file, 1, None)
            reads = [asyncio.ensure_future(read()) for _ in range(IN_FLIGHT)]
            await asyncio.sleep(0.1)
            os.write(writer, b"x")
            # The loop does not see it before the next operation begins.
            time.sleep(0.1)
            assert await file.pread(4, 0) == b"data"
            os.write(writer, b"x" * (len(reads) - 1))
            assert await asyncio.gather(*reads) == [b"x"] * len(reads)
        os.close(writer)

    run(main())


def test_operations_that_the_page_cache_lacks_end_in_the_loop(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(8 << 20))
    data = path.read_bytes()

    async def main() -> None:
        async with await pelton.files.open(path, "r+") as file:
            for _ in range(3):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                parts = await asyncio.gather(*(file.pread(1 << 20, number << 20) for number in range(8)))
                assert b"".join(parts) == data
            await asyncio.gather(*(file.pwrite(bytes([number]) * (1 << 20), number << 20) for number in range(8)))
        assert path.read_bytes() == b"".join(bytes([number]) * (1 << 20) for number in range(8))

    run(main())


def test_a_read_of_a_pipe_waits_for_a_writer_and_a_cancelled_one_ends(run: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    async def main() -> None:
        async with await pelton.files.open(tmp_path / "pipe", "r+") as pipe:
            reading = asyncio.create_task(pipe.read(5))
            await asyncio.sleep(0.01)
            assert not reading.done()
            await pipe.write(b"hello")
            assert await reading == b"hello"
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(pipe.read(5), 0.01)
            await asyncio.sleep(0.01)
            await pipe.write(b"again")
            assert await pipe.read(5) == b"again"

    run(main())


def test_a_loop_that_ends_during_an_operation_closes_the_engine(run: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reading: list[asyncio.Task[bytes]] = []
    files: list[pelton.files.File] = []

    async def main() -> None:
        files.append(await pelton.files.open(tmp_path / "pipe", "r+"))
        reading.append(asyncio.create_task(files[0].read(5)))
        await asyncio.sleep(0.01)

    run(main())
    assert reading[0].cancelled()
    with pytest.raises(pelton.ClosedHandle):
        asyncio.run(files[0].read(1))
    assert not files[0].closed
    files.clear()
    gc.collect()


def test_a_directory_is_listed_and_a_file_is_copied(run: Run, tmp_path: Path) -> None:
    for number in range(2000):
        (tmp_path / f"file {number}").touch()
    (tmp_path / "file 7").write_bytes(os.urandom(3_000_000))

    async def main() -> None:
        assert sorted(await pelton.files.listdir(tmp_path)) == sorted(os.listdir(tmp_path))
        assert await pelton.files.copy(tmp_path / "file 7", tmp_path / "file 8") == 3_000_000
        assert (tmp_path / "file 7").read_bytes() == (tmp_path / "file 8").read_bytes()
        assert await pelton.files.copy(tmp_path / "file 9", tmp_path / "file 8") == 0

    run(main())


def test_a_file_without_a_size_is_read(run: Run) -> None:
    async def main() -> None:
        found = await pelton.files.read_file("/proc/self/status")
        assert found.startswith(b"Name:") and f"Pid:\t{os.getpid()}\n".encode() in found

    run(main())


def test_an_error_is_the_exception_of_python_with_its_errno(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(FileNotFoundError, match="no such file|ENOENT") as raised:
            await pelton.files.read_file(tmp_path / "none")
        assert isinstance(raised.value, pelton.System) and raised.value.errno == errno.ENOENT
        assert "none" in str(raised.value)
        assert (raised.value.filename, raised.value.filename2) == (str(tmp_path / "none"), None)
        again = pickle.loads(pickle.dumps(raised.value))
        assert (again.filename, again.errno, str(again)) == (raised.value.filename, errno.ENOENT, str(raised.value))
        (tmp_path / "file").touch()
        with pytest.raises(FileExistsError):
            await pelton.files.open(tmp_path / "file", "x")
        with pytest.raises(NotADirectoryError):
            await pelton.files.listdir(tmp_path / "file")
        with pytest.raises(IsADirectoryError):
            await pelton.files.write_file(tmp_path, b"")
        async with await pelton.files.open(tmp_path / "file") as file:
            assert file.name == str(tmp_path / "file")
            with pytest.raises(pelton.System, match="EBADF") as raised:
                await file.write(b"read only")
            assert raised.value.filename == file.name
            assert await file.read(-1) == b""
            with pytest.raises(TypeError, match="bytes-like"):
                await file.write("text")  # type: ignore[arg-type]
        assert file.closed
        await file.close()
        with pytest.raises(ValueError, match="closed"):
            await file.read(1)
        with pytest.raises(ValueError, match="closed"):
            file.fileno()

    run(main())


@pytest.mark.parametrize("mode", ["", "rw", "t", "rt", "rr", "+", "r++", "br b"])
def test_a_mode_that_is_none_is_refused(tmp_path: Path, mode: str) -> None:
    with pytest.raises(ValueError, match="wanted one of"):
        asyncio.run(pelton.files.open(tmp_path / "file", mode))


def test_a_new_file_has_the_permissions_less_the_umask(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        async with await pelton.files.open(tmp_path / "file", "w", 0o640) as file:
            assert os.fstat(file.fileno()).st_mode & 0o777 == 0o640 & ~0o022

    before = os.umask(0o022)
    try:
        run(main())
    finally:
        os.umask(before)


def test_a_loop_of_cached_reads_lets_other_tasks_run(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(256 << 10))

    async def main() -> None:
        is_over = False

        async def other() -> None:
            nonlocal is_over
            await asyncio.sleep(0)
            is_over = True

        async with await pelton.files.open(tmp_path / "file") as file:
            task = asyncio.create_task(other())
            while not is_over:
                await file.pread(256 << 10, 0)
            await task

    run(main())


def test_a_forked_childs_engine_raises_forked(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"hello")

    async def main() -> None:
        async with await pelton.files.open(tmp_path / "file") as file:
            pid = os.fork()
            if pid == 0:
                try:
                    await file.pread(5, 0)
                except pelton.Forked:
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert await file.pread(5, 0) == b"hello"

    run(main())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_loop_that_ends_without_its_asynchronous_generators_leaves_no_engine(
    new_loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    loop = new_loop()
    loop.run_until_complete(pelton.files.write_file(tmp_path / "file", b"hello"))
    is_left = weakref.ref(loop)
    loop.close()
    del loop
    # The engine's descriptors are those of `no_descriptor_is_left`.
    gc.collect()
    assert is_left() is None


def test_a_file_of_another_loop_is_refused(tmp_path: Path) -> None:
    other = asyncio.new_event_loop()
    try:
        file = other.run_until_complete(pelton.files.open(tmp_path / "file", "w"))
        with pytest.raises(pelton.Busy, match="another event loop"):
            asyncio.run(file.write(b"x"))
        other.run_until_complete(file.close())
        other.run_until_complete(other.shutdown_asyncgens())
    finally:
        other.close()


def test_tasks_that_read_at_the_position_get_different_parts(run: Run, tmp_path: Path) -> None:
    data = os.urandom(8 << 20)
    (tmp_path / "file").write_bytes(data)

    async def main() -> None:
        async with await pelton.files.open(tmp_path / "file") as file:
            # Not in the page cache, so that reads are in flight at the same time.
            await file.fsync()
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            parts = await asyncio.gather(*(file.read(1 << 20) for _ in range(8)))
        assert b"".join(parts) == data

    run(main())


def test_a_copy_to_itself_is_refused_and_changes_nothing(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        source, link = tmp_path / "source", tmp_path / "link"
        source.write_bytes(b"hello")
        link.hardlink_to(source)
        for target in (source, link):
            with pytest.raises(shutil.SameFileError, match="are one file") as raised:
                await pelton.files.copy(source, target)
            assert (raised.value.filename, raised.value.filename2) == (str(source), str(target))
        assert source.read_bytes() == b"hello"
        with pytest.raises(FileNotFoundError) as failed:
            await pelton.files.copy(tmp_path / "none", link)
        assert (failed.value.filename, failed.value.filename2) == (str(tmp_path / "none"), None)
        with pytest.raises(NotADirectoryError) as failed_too:
            await pelton.files.copy(source, link / "below a file")
        assert failed_too.value.filename == str(link / "below a file")
        # The kernel copies no directory.
        with pytest.raises(OSError) as both:
            await pelton.files.copy(tmp_path, tmp_path / "other")
        assert (both.value.filename, both.value.filename2) == (str(tmp_path), str(tmp_path / "other"))
        assert await pelton.files.copy(source, tmp_path / "other") == 5
        assert await pelton.files.copy(source, tmp_path / "other") == 5

    run(main())
