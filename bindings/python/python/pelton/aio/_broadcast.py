"""Publishers and subscribers in asyncio and uvloop."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Self, Unpack

import pelton
from pelton.aio._options import Publish, PublishPath, Subscribe, SubscribePath, SubscribeThread
from pelton.aio._watch import Watch, Watched, checked, finished, opened

if TYPE_CHECKING:
    import os

    from typing_extensions import Buffer


class Publisher(Watched):
    """A `pelton.Publisher` in an event loop, which admits subscribers whenever they connect.

    Made where no loop runs, it does that from its first method that waits on. Every method that sends raises as that one
    does.
    """

    def __init__(self, publisher: pelton.Publisher) -> None:
        """Takes over a publisher: use it by this object alone."""
        checked(publisher, pelton.Publisher, "publish under a name by `pelton.aio.publish`")
        super().__init__(publisher, publisher.admit)
        self._publisher = publisher
        with contextlib.suppress(RuntimeError):
            self._watch.enter()

    @classmethod
    async def open_path(cls, directory: str | os.PathLike[str], **options: Unpack[PublishPath]) -> Self:
        """As `pelton.Publisher.open_path`, with the same options."""
        return cls(await opened(pelton.Publisher.start_open_path(directory, **options)))

    async def send(self, data: Buffer) -> None:
        """Copies a bytes-like object into the lane. Waits while a subscriber that gates holds the lane full."""
        await self._pause()
        self._watch.check_free()
        self._watch.enter()
        while not self._publisher.try_send(data):
            await self._until_ready(self._publisher.arm, memoryview(data).nbytes)

    def try_send(self, data: Buffer) -> bool:
        """As `send`, but does not wait: returns whether the message is sent."""
        self._watch.check_free()
        return self._publisher.try_send(data)

    async def wait_subscribers(self, count: int) -> None:
        """Waits until there are `count` subscribers."""
        self._watch.check_free()
        while self._publisher.admit() < count:
            await self._watch.readable()

    async def wait_released(self) -> None:
        """Waits until each subscriber that gates has released every message.

        One with `lag_after` that releases nothing for so long lags from then on, and is not waited for.
        """
        self._watch.check_free()
        while await self._until_ready(self._publisher.arm_released):
            pass

    def subscriber(self, **options: Unpack[SubscribeThread]) -> Subscriber:
        """A subscriber in this process, which has joined already. As `pelton.Publisher.subscriber`. Does not wait."""
        return Subscriber(self._publisher.subscriber(**options))

    def subscribers(self) -> list[pelton.SubscriberState]:
        """The subscribers that have joined, and how far each is behind. Does not wait."""
        return self._publisher.subscribers()


class Subscriber(Watched):
    """A `pelton.Subscriber` in an event loop. Every method that receives raises as that one does."""

    def __init__(self, subscriber: pelton.Subscriber) -> None:
        """Takes over a subscriber: use it by this object alone. One that is to `resume` is opened by the methods below."""
        super().__init__(checked(subscriber, pelton.Subscriber, "subscribe to a name by `connect`"))
        self._subscriber = subscriber
        # How to reach a successor of the publisher, and what was missed before it.
        self._publisher: tuple[str, Subscribe] | None = None
        self._is_path = False
        self._missed = 0
        self._is_ended = False
        self._opening_watch: Watch | None = None

    @classmethod
    async def connect(cls, name: str, **options: Unpack[Subscribe]) -> Self:
        """As `pelton.Subscriber.connect`, with the same options."""
        subscriber = cls(await opened(pelton.Subscriber.start_connect(name, **options)))
        subscriber._publisher = name, options
        return subscriber

    @classmethod
    async def open_path(cls, directory: str | os.PathLike[str], **options: Unpack[SubscribePath]) -> Self:
        """As `pelton.Subscriber.open_path`, with the same options."""
        subscriber = cls(await opened(pelton.Subscriber.start_open_path(directory, **options)))
        subscriber._is_path = True
        return subscriber

    async def recv(self) -> pelton.Delivery:
        """Waits for the next message, and returns it."""
        await self._pause()
        self._watch.check_free()
        while (delivery := self.try_recv()) is None:
            try:
                await self._until_ready(self._subscriber.arm)
            except (pelton.Closed, pelton.PeerDied):
                self._is_ended = True
                raise
        return delivery

    def try_recv(self) -> pelton.Delivery | None:
        """As `recv`, but does not wait: None if there is no message."""
        self._watch.check_free()
        try:
            return self._subscriber.try_recv()
        except (pelton.Closed, pelton.PeerDied):
            self._is_ended = True
            raise

    async def resume(self) -> None:
        """After `PeerDied` or `Closed`: waits for the publisher's successor under the same name.

        Joins it with the same options; its messages count from 1, in a directory they continue. Raises `Refused` while
        the publisher is alive, and for a subscriber that neither `connect` nor `open_path` has opened.
        """
        self._watch.check_free()
        if not self._is_ended:
            raise pelton.Refused("the publisher is alive, or not all its messages were received")
        if self._is_path:
            # The lane stays, and so does the descriptor, which the successor makes readable.
            while True:
                with contextlib.suppress(pelton.TimedOut):
                    self._subscriber.resume(0)
                    break
                await self._watch.readable()
            self._is_ended = False
            return
        if self._publisher is None:
            raise pelton.Refused(
                "found a subscriber that does not know where its publisher's successor comes, wanted one that "
                "`pelton.aio.Subscriber.connect` or `pelton.aio.Subscriber.open_path` has opened"
            )
        if self._opening_watch is not None:
            raise pelton.Busy("another task resumes this subscriber: await that one")
        name, options = self._publisher[0], self._publisher[1].copy()
        options["timeout"] = None
        opening = pelton.Subscriber.start_connect(name, **options)
        watch = self._opening_watch = Watch(opening.fileno())
        try:
            successor: pelton.Subscriber = await finished(opening, watch, self)
        finally:
            self._opening_watch = None
            watch.end()
            opening.close()
        self._missed += self._subscriber.missed
        super().close()
        self._closable = self._watched = self._subscriber = successor
        self._watch = Watch(successor.fileno())
        self._is_ended = False

    @property
    def missed(self) -> int:
        """Messages missed so far: as `pelton.Subscriber.missed`."""
        return self._missed + self._subscriber.missed

    @property
    def continues(self) -> bool:
        """Whether it continues a durable subscription: as `pelton.Subscriber.continues`."""
        return self._subscriber.continues

    def close(self) -> None:
        """Leaves the broadcast. Does not wait. A task that waits here gets `ClosedHandle`."""
        super().close()
        if self._opening_watch is not None:
            # The task that resumes finds the subscriber closed.
            self._opening_watch.end()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pelton.Delivery:
        try:
            return await self.recv()
        except pelton.Closed:
            raise StopAsyncIteration from None


def publish(name: str | None = None, **options: Unpack[Publish]) -> Publisher:
    """Publishes under `name`, or in this process alone. As `pelton.publish`, with the same options. Does not wait.

    Example:
        async with pelton.aio.publish("prices") as publisher:
            await publisher.wait_subscribers(1)
            await publisher.send(b"17")
            await publisher.wait_released()
    """
    return Publisher(pelton.publish(name, **options))
