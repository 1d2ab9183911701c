"""Files in asyncio and uvloop: reads and writes that do not block the loop, without threads of Python.

    async with await pelton.files.open("notes", "w+") as file:
        await file.write(b"hello, file")
        print(await file.pread(5, 7))

What the page cache has is read and written within the call. The rest goes to io_uring, or, where the system lacks that,
to threads of the engine, which run no Python. Everything is `bytes`: a written `bytes` object is not copied.

Each wait may be cancelled; the operation may still take effect. An error is an `OSError` of Python's class for it, such
as FileNotFoundError, with `errno`, `filename` and, of a copy, `filename2`. Each event loop has an engine of its own,
which ends with the loop; a file belongs to the loop in which it was opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import weakref
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import pelton
from pelton import _pelton

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["File", "copy", "listdir", "open", "read_file", "write_file"]

# The bytes of one read of a file of unknown size. A guess.
_PIECE = 256 << 10

_Path = str | os.PathLike[str]

_MODES = {"r": os.O_RDONLY, "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND}
_MODES["x"] = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class _Engine:
    """The engine of one loop: its operations, and the tasks that wait for them."""

    def __init__(self) -> None:
        self.begin = _pelton.Engine()
        self._tokens = 0
        self._waiters: dict[int, asyncio.Future[Any]] = {}
        self._is_registered = False
        self._loop = weakref.ref(asyncio.get_running_loop())
        self._process = os.getpid()
        self._end: AsyncGenerator[None, None] | None = None

    async def close_with_loop(self) -> None:
        """Has the end of the loop close the engine: `asyncio.run` closes the loop's asynchronous generators.

        A generator refers to its loop, and this object to the generator. So only the loop refers to this object: that of
        a loop which is closed in another way is collected with the loop.
        """

        async def end() -> AsyncGenerator[None, None]:
            try:
                yield
            finally:
                self._close(asyncio.get_running_loop())

        self._end = end()
        await anext(self._end)

    def _close(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._is_registered:
            loop.remove_reader(self.begin.fileno())
            self._is_registered = False
        self.begin.close()
        delattr(loop, _ATTRIBUTE)

    async def run(self, names: tuple[str, ...], begin: Callable[..., Any], *arguments: Any) -> Any:
        """Begins an operation by a method of `self.begin`, and returns its result. `names` are those of its files."""
        try:
            loop = self._entered()
            self._tokens += 1
            token = self._tokens
            result = begin(token, *arguments)
            if result is not ...:
                if self._waiters and self.begin.has_found:
                    self._take()
                return result
            # Before anything is taken: with the space of what is taken, this operation may begin and end at once.
            if not self._is_registered:
                loop.add_reader(self.begin.fileno(), self._rung)
                self._is_registered = True
            waiter = self._waiters[token] = loop.create_future()
            try:
                self._arm()
                return await waiter
            finally:
                del self._waiters[token]
                if waiter.cancelled():
                    self.begin.cancel(token)
        except OSError as error:
            error.filename, error.filename2 = names[0], names[1] if len(names) == 2 else None
            raise

    def _entered(self) -> asyncio.AbstractEventLoop:
        """The running loop, which is the one of this engine."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            # Of a forked child, too: its loop is the parent's.
            if os.getpid() != self._process:
                raise pelton.Forked("this file belongs to the process that forked this one: open one here") from None
            raise
        if loop is not (own := self._loop()):
            if os.getpid() != self._process:
                raise pelton.Forked("this file belongs to the process that forked this one: open one here")
            if own is None or own.is_closed():
                raise pelton.ClosedHandle("the event loop of this file is closed: open one here")
            raise pelton.Busy("this file belongs to another event loop: open one here")
        return loop

    def _rung(self) -> None:
        self._take()
        self._arm()

    def _arm(self) -> None:
        while not self.begin.arm():
            self._take()

    def _take(self) -> None:
        for token, result in self.begin.completions():
            waiter = self._waiters.get(token)
            if waiter is None or waiter.done():
                continue
            if isinstance(result, BaseException):
                waiter.set_exception(result)
            else:
                waiter.set_result(result)


# Of a loop: its engine.
_ATTRIBUTE = "_pelton_files_engine"


async def _engine() -> _Engine:
    loop = asyncio.get_running_loop()
    engine: _Engine | None = getattr(loop, _ATTRIBUTE, None)
    if engine is None:
        engine = _Engine()
        setattr(loop, _ATTRIBUTE, engine)
        await engine.close_with_loop()
    return engine


def _flags(mode: str) -> int:
    kinds = [kind for kind in mode if kind in _MODES]
    if len(kinds) != 1 or set(mode) - {*kinds, "b", "+"} or len(mode) != len(set(mode)):
        raise ValueError(f"mode is {mode!r}, wanted one of r, w, a and x, perhaps with + or b: all data is bytes")
    flags = _MODES[kinds[0]]
    return flags & ~os.O_ACCMODE | os.O_RDWR if "+" in mode else flags


async def open(path: _Path, mode: str = "r", permissions: int = 0o666) -> File:
    """Opens a file. `mode` is that of Python's own `open`, without text. A new file has `permissions`, less the umask."""
    engine = await _engine()
    name = os.fspath(path)
    return File(engine, await engine.run((name,), engine.begin.open, name, _flags(mode), permissions), name)


async def read_file(path: _Path) -> bytes:
    """All bytes of a file."""
    async with await open(path) as file:
        size = await file.size()
        # Files of /proc have no size.
        return await file.pread(size, 0) if size > 0 else await file.read()


async def write_file(path: _Path, data: Buffer) -> None:
    """Creates or replaces a file with these bytes. Not atomic, and not synced."""
    async with await open(path, "w") as file:
        await file.write(data)


async def copy(source: _Path, target: _Path) -> int:
    """Copies a file's bytes within the kernel, creates or replaces `target`, and returns how many bytes it has.

    Raises `shutil.SameFileError`, an OSError, if both are one file, which it would empty.
    """
    names = os.fspath(source), os.fspath(target)
    async with await open(source) as reading:
        engine = reading._engine
        with contextlib.suppress(FileNotFoundError):
            opened = await engine.run(names[1:], engine.begin.open, names[1], os.O_WRONLY, 0)
            async with File(engine, opened, names[1]) as there:
                if os.path.samestat(os.fstat(reading.fileno()), os.fstat(there.fileno())):
                    text = "source and target are one file, which the copy would empty"
                    raise shutil.SameFileError(errno.EINVAL, text, names[0], None, names[1])
        async with await open(target, "w") as writing:
            copied: int = await engine.run(names, engine.begin.copy, reading._file, writing._file)
            return copied


async def listdir(path: _Path = ".") -> list[str]:
    """The names in a directory, in any order, without `.` and `..`."""
    names: list[str] = []
    async with await open(path) as directory:
        engine = directory._engine
        while found := await engine.run(directory._names, engine.begin.list, directory._file):
            names += found
    return names


class File:
    """An open file: see `open`. Any number of tasks of its loop may use it; those that read at its own
    position take turns, and so do those that write there."""

    def __init__(self, engine: _Engine, file: _pelton.File, name: str) -> None:
        self._engine = engine
        self._file = file
        self._names = (name,)
        # The kernel does not order operations at a file's own position. Two, since a FIFO is read while it is written.
        self._reading, self._writing = asyncio.Lock(), asyncio.Lock()

    async def read(self, most: int | None = None) -> bytes:
        """Reads `most` bytes at the file's position: fewer only at its end. None or -1: everything to the end."""
        async with self._reading:
            if most is not None and most != -1:
                return await self._read(most, None)
            pieces = [await self._read(_PIECE, None)]
            while pieces[-1]:
                pieces.append(await self._read(_PIECE, None))
            return b"".join(pieces)

    async def pread(self, most: int, offset: int) -> bytes:
        """Reads `most` bytes from `offset` on: fewer only at the file's end."""
        return await self._read(most, offset)

    async def _read(self, most: int, offset: int | None) -> bytes:
        data: bytes = await self._engine.run(self._names, self._engine.begin.read, self._file, most, offset)
        return data

    async def write(self, data: Buffer) -> int:
        """Writes all of a bytes-like object at the file's position, or at its end in mode `a`. Returns its size."""
        async with self._writing:
            written: int = await self._engine.run(self._names, self._engine.begin.write, self._file, data, None)
            return written

    async def pwrite(self, data: Buffer, offset: int) -> int:
        """Writes all of a bytes-like object at `offset`. Returns its size."""
        written: int = await self._engine.run(self._names, self._engine.begin.write, self._file, data, offset)
        return written

    async def fsync(self, data_only: bool = False) -> None:
        """Waits until everything that was written is on the disk; with `data_only` without its times (fdatasync)."""
        await self._engine.run(self._names, self._engine.begin.sync, self._file, data_only)

    async def size(self) -> int:
        """The file's length in bytes."""
        size: int = await self._engine.run(self._names, self._engine.begin.size, self._file)
        return size

    async def close(self) -> None:
        """Closes the file. Raises the system's error; EBUSY while another task uses it: the last one closes it then."""
        await self._engine.run(self._names, self._engine.begin.close_file, self._file)

    def fileno(self) -> int:
        """The descriptor."""
        return self._file.fileno()

    @property
    def name(self) -> str:
        """The path that was given to `open`."""
        return self._names[0]

    @property
    def closed(self) -> bool:
        """Whether this file is closed."""
        return self._file.closed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except OSError as error:
            # A cancelled operation is still in flight, and closes the file when it ends.
            if error.errno != errno.EBUSY:
                raise
