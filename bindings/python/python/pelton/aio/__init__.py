"""Channels and calls in asyncio and uvloop: each handle's descriptor in the loop, and no thread but that of a `sync`.

    async with await pelton.aio.Receiver.connect("events", timeout=10) as receiver:
        async for message in receiver:
            print(message)

Many senders to one receiver, by `gather`; or each with a lane and a receiver of its own, by `listen`:

    async with pelton.aio.gather("events") as receiver:
        async for message in receiver:
            print(message)

Each wait may be cancelled, also by `asyncio.timeout`: a cancelled receive has taken nothing, a cancelled send has sent
nothing, a cancelled accept has refused nobody, and a cancelled resume leaves the lane as it was. One task at a time
waits at an endpoint or a listener; a second one gets `pelton.Busy`. An endpoint belongs to the loop in which it first
waits.

One publisher to many subscribers:

    async with await pelton.aio.Subscriber.connect("prices", timeout=10, policy="lag") as subscriber:
        async for delivery in subscriber:
            print(delivery.data, delivery.missed)

Calls:

    async with await pelton.aio.Client.connect("prices", timeout=10) as client:
        print(await asyncio.gather(client.call(b"tea"), client.call(b"rice")))

Any number of tasks call by one client.
"""

from pelton.aio._broadcast import Publisher, Subscriber, publish
from pelton.aio._channel import Listener, Receiver, Sender, gather, listen
from pelton.aio._client import Client, Stream
from pelton.aio._service import Service

__all__ = [
    "Client",
    "Listener",
    "Publisher",
    "Receiver",
    "Sender",
    "Service",
    "Stream",
    "Subscriber",
    "gather",
    "listen",
    "publish",
]
