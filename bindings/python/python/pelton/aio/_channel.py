"""Senders, receivers and listeners in asyncio and uvloop."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import pelton
from pelton.aio._options import Connect, ConnectSender, Gather, ListenChannel, OpenPath
from pelton.aio._watch import Closing, Watch, Watched, checked, finished, opened

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pelton._pelton import _HasFileno

T = TypeVar("T")


class _Endpoint(Watched):
    """What a sender and a receiver have in common."""

    def __init__(self, endpoint: pelton.Sender | pelton.Receiver) -> None:
        super().__init__(endpoint)
        self._endpoint = endpoint
        # Of a `resume` that waits.
        self._opening_watch: Watch | None = None
        # The thread of a `sync` that has begun. After a cancel it still uses the endpoint.
        self._syncing: asyncio.Future[None] | None = None
        # The error of a `sync`, until it is raised. The kernel reports a failed write once.
        self._sync_error: Exception | None = None

    async def _pause(self) -> None:
        await super()._pause()
        # Last: the caller continues before another task can begin to sync.
        if self._syncing is not None:
            await self._synced()

    async def resume(self) -> None:
        """After `PeerDied` or `Closed`: waits for a successor of the peer, which gets the lane with what is unreleased.

        As `resume` of the endpoint that this one took over: `Refused` while the peer is alive, and between threads. A
        cancel leaves the endpoint as it was, and disconnects a successor whose handshake has begun: with a `timeout`, its
        `connect` tries again. Until the end of the wait the other methods raise `Busy`, and `close` ends it. After
        `Closed`, a sender copies all unreleased messages in the loop's thread, once a successor connects: up to the
        lane's capacity, during which no other task runs.

        Example:
            async with await pelton.aio.Receiver.connect("events", timeout=10) as receiver:
                while True:
                    try:
                        print(await receiver.recv())
                    except pelton.PeerDied:
                        await receiver.resume()
                    except pelton.Closed:
                        break
        """
        await self._pause()
        self._watch.check_free()
        opening = self._endpoint.start_resume()
        watch = self._opening_watch = Watch(opening.fileno())
        try:
            await finished(opening, watch, self)
        finally:
            self._opening_watch = None
            watch.end()
            opening.close()

    async def sync(self) -> None:
        """Makes what this side has done durable, on a path channel: as `sync` of the endpoint that this one took over.

        Waits for the disk in a thread of the loop's executor, because a disk has no descriptor. A cancel does not stop
        the disk: the next operation of this endpoint that may wait does so until the disk is done. Until then
        `try_send`, `try_recv` and `info` raise `Busy`. The next `sync` raises the error of a cancelled one. Raises
        `Refused` on other channels.

        Example:
            async with await pelton.aio.Sender.open_path("/var/lib/app/events") as sender:
                await sender.send(b"kept also by a crash of the machine")
                await sender.sync()
        """
        await self._pause()
        self._watch.check_free()
        if self._sync_error is None:
            syncing = self._syncing = asyncio.get_running_loop().run_in_executor(None, self._sync)
            await asyncio.shield(syncing)
            if self._syncing is syncing:
                self._syncing = None
        error, self._sync_error = self._sync_error, None
        if error is not None:
            raise error

    def _sync(self) -> None:
        """Runs in a thread, also when no task waits for it any more."""
        try:
            self._endpoint.sync()
        except Exception as error:
            self._sync_error = error

    async def _synced(self) -> None:
        """Waits for the thread of a `sync`, and of another one that a task begins meanwhile."""
        while (syncing := self._syncing) is not None:
            # A closed loop has waited for its threads.
            if syncing.get_loop() is asyncio.get_running_loop():
                await asyncio.wait([syncing])
            if self._syncing is syncing:
                self._syncing = None

    def close(self) -> None:
        """Ends the channel. Does not wait. A task that waits here gets `ClosedHandle`."""
        super().close()
        if self._opening_watch is not None:
            # The task that resumes finds the endpoint closed.
            self._opening_watch.end()


class Receiver(_Endpoint):
    """A `pelton.Receiver` in an event loop. Every method that receives raises as that one does."""

    def __init__(self, receiver: pelton.Receiver) -> None:
        """Takes over a receiver: use it by this object alone."""
        super().__init__(checked(receiver, pelton.Receiver, "open a name by `connect`, `listen` or `gather`"))
        self._receiver = receiver

    @classmethod
    async def connect(cls, name: str, **options: Unpack[Connect]) -> Self:
        """As `pelton.Receiver.connect`, with the same options."""
        return cls(await opened(pelton.Receiver.start_connect(name, **options)))

    @classmethod
    async def open_path(cls, directory: str | os.PathLike[str], **options: Unpack[OpenPath]) -> Self:
        """As `pelton.Receiver.open_path`, with the same options."""
        return cls(await opened(pelton.Receiver.start_open_path(directory, **options)))

    async def _take(self, take: Callable[..., T], *arguments: object) -> T:
        """Repeats a method of the receiver, whose last argument is a timeout, until it finds a message."""
        # Before the message is taken: a cancellation here loses nothing.
        await self._pause()
        self._watch.check_free()
        while True:
            try:
                return take(*arguments, 0)
            except pelton.TimedOut:
                await self._until_ready(self._receiver.arm)

    async def recv(self) -> bytes:
        """Waits for the next message, and returns it."""
        await self._pause()
        self._watch.check_free()
        while (message := self._receiver.try_recv()) is None:
            await self._until_ready(self._receiver.arm)
        return message

    def try_recv(self) -> bytes | None:
        """As `recv`, but does not wait: None if there is no message. `Busy` during a `sync`."""
        self._watch.check_free()
        return self._receiver.try_recv()

    @property
    def traceparent(self) -> str | None:
        """That of the message which this receiver copied last: as `pelton.Receiver.traceparent`."""
        return self._receiver.traceparent

    async def recv_many(self, most: int) -> list[bytes]:
        """Waits for a message, and returns up to `most` that are there."""
        await asyncio.sleep(0)
        return await self._take(self._receiver.recv_many, most)

    async def recv_into(self, buffer: Buffer) -> int:
        """Waits for the next message, copies it into a writable buffer, and returns its bytes.

        Raises `TooSmall` if it does not fit; `error.bytes` is its size, and it is still the next message.
        """
        return await self._take(self._receiver.recv_into, buffer)

    async def recv_descriptors(self) -> tuple[bytes, list[int]]:
        """Waits for the next message, and returns it with its descriptors, which the caller closes.

        Raises `DescriptorsLost`, whose `message` is the message.
        """
        return await self._take(self._receiver.recv_descriptors)

    async def peek(self) -> pelton.Message:
        """Waits for the next message, and returns it in place: `with await receiver.peek() as view:`.

        Of a receiver of many senders, `Message.lane` and `Message.peer_pid` identify the one that has sent it.
        """
        return await self._take(self._receiver.peek)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await self.recv()
        except pelton.Closed:
            raise StopAsyncIteration from None


class Sender(_Endpoint):
    """A `pelton.Sender` in an event loop. Every method that sends raises as that one does."""

    def __init__(self, sender: pelton.Sender) -> None:
        """Takes over a sender: use it by this object alone."""
        super().__init__(checked(sender, pelton.Sender, "open a name by `connect` or `listen`"))
        self._sender = sender

    @classmethod
    async def connect(cls, name: str, **options: Unpack[ConnectSender]) -> Self:
        """As `pelton.Sender.connect`, with the same options."""
        return cls(await opened(pelton.Sender.start_connect(name, **options)))

    @classmethod
    async def open_path(cls, directory: str | os.PathLike[str], **options: Unpack[OpenPath]) -> Self:
        """As `pelton.Sender.open_path`, with the same options."""
        return cls(await opened(pelton.Sender.start_open_path(directory, **options)))

    async def _put(self, bytes: int, put: Callable[..., T], *arguments: object) -> T:
        """Repeats a method of the sender, whose last argument is a timeout, until it finds space."""
        await self._pause()
        self._watch.check_free()
        while True:
            try:
                return put(*arguments, 0)
            except pelton.TimedOut:
                await self._until_ready(self._sender.arm, bytes)

    async def send(self, data: Buffer, *, traceparent: str | None = None) -> None:
        """Copies a bytes-like object into the lane. Waits for space. `traceparent` as in `pelton.Sender.send`."""
        await self._pause()
        self._watch.check_free()
        while not self._sender.try_send(data, traceparent=traceparent):
            await self._until_ready(self._sender.arm, memoryview(data).nbytes)

    async def send_many(self, messages: Iterable[Buffer]) -> int:
        """Sends each message, and returns how many. A cancellation may come between two of them."""
        sent = 0
        for message in messages:
            await self.send(message)
            sent += 1
        return sent

    def try_send(self, data: Buffer) -> bool:
        """As `send`, but does not wait: returns whether the message is sent. `Busy` during a `sync`."""
        self._watch.check_free()
        return self._sender.try_send(data)

    async def send_descriptors(self, data: Buffer, descriptors: Iterable[int | _HasFileno]) -> None:
        """Sends a message with up to 64 descriptors: as `pelton.Sender.send_descriptors`. Waits for space."""
        fds = list(descriptors)
        await self._put(memoryview(data).nbytes, self._sender.send_descriptors, data, fds)

    async def reserve(self, bytes: int, *, traceparent: str | None = None) -> pelton.Reservation:
        """Waits for space for a message of `bytes`, to be written in place: `with await sender.reserve(8) as view:`.

        The message is sent at the end of the block; until then the sender does nothing else.
        """
        return await self._put(bytes, functools.partial(self._sender.reserve, traceparent=traceparent), bytes)

    async def wait_released(self) -> None:
        """Waits until the receiver has released every message. Raises as `send` if it leaves before.

        Example:
            async with await pelton.aio.Sender.connect("events", timeout=10) as sender:
                await sender.send(b"hello")
                await sender.wait_released()
        """
        await self._pause()
        self._watch.check_free()
        while await self._until_ready(self._sender.arm_released):
            pass


class Listener(Closing):
    """Accepts peers under a name, one after another: see `listen`. One task at a time accepts."""

    def __init__(self, listener: pelton.Listener) -> None:
        """Takes over a listener: use it by this object alone."""
        self._listener = checked(listener, pelton.Listener, "listen under a name by `pelton.aio.listen`")
        super().__init__(listener)
        # What accepts: of which kind, and in which state. A cancel leaves it to the next accept, since a peer may have
        # connected.
        self._opening: pelton.Opening | None = None
        self._accepts_sender = False
        self._watch: Watch | None = None

    async def accept_sender(self) -> Sender:
        """Waits for a receiver to connect, and returns the sender for it."""
        return Sender(await self._accept(True))

    async def accept_receiver(self) -> Receiver:
        """Waits for a sender to connect, and returns the receiver for it."""
        return Receiver(await self._accept(False))

    async def _accept(self, accepts_sender: bool) -> Any:
        if self._watch is not None:
            raise pelton.Busy("another task accepts at this listener: one at a time may")
        if self._opening is not None and self._accepts_sender != accepts_sender:
            self._drop_opening()
        if self._opening is None:
            start = self._listener.start_accept_sender if accepts_sender else self._listener.start_accept_receiver
            self._opening, self._accepts_sender = start(), accepts_sender
        opening = self._opening
        self._watch = Watch(opening.fileno())
        try:
            accepted = await finished(opening, self._watch, self)
        except asyncio.CancelledError:
            self._watch.end()
            if self.closed:
                # No later accept takes the opening, and it keeps the name in use.
                self._drop_opening()
            raise
        except BaseException:
            self._watch.end()
            self._drop_opening()
            raise
        else:
            self._watch.end()
            self._drop_opening()
            return accepted
        finally:
            self._watch = None

    def _drop_opening(self) -> None:
        if self._opening is not None:
            self._opening.close()
            self._opening = None

    def close(self) -> None:
        """Stops listening, once the accepted endpoints are closed too. Does not wait.

        A task that accepts gets `ClosedHandle`.
        """
        self._listener.close()
        if self._watch is not None:
            # The task that accepts drops the opening.
            self._watch.end()
        else:
            self._drop_opening()


def listen(name: str, **options: Unpack[ListenChannel]) -> Listener:
    """Listens under `name` for peers to accept. As `pelton.listen`, with the same options. Does not wait.

    Example:
        async def serve(receiver: pelton.aio.Receiver) -> None:
            async with receiver:
                try:
                    async for message in receiver:
                        print(message)
                except pelton.PeerDied:      # otherwise one killed sender would end all tasks
                    pass

        async with pelton.aio.listen("events") as listener, asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(serve(await listener.accept_receiver()))
    """
    return Listener(pelton.listen(name, **options))


def gather(name: str, **options: Unpack[Gather]) -> Receiver:
    """A receiver of many senders, which connect under `name`. As `pelton.gather`, with the same options. Does not wait.

    Example:
        async with pelton.aio.gather("events") as receiver:
            async for message in receiver:
                print(message)
    """
    return Receiver(pelton.gather(name, **options))
