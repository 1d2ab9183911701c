"""Messages at memory speed between the threads and processes of one Linux machine.

    with pelton.listen("events") as listener:                # one process
        for message in listener.accept_receiver():           # bytes, until the sender has closed
            print(message)

    with pelton.Sender.connect("events", timeout=10) as sender:      # another one waits for it, up to 10 seconds
        sender.send(b"hello")                                # waits while the lane is full

    with pelton.publish("prices") as publisher:               # one publisher, many subscribers
        publisher.send(b"17")

    for delivery in pelton.Subscriber.connect("prices", policy="lag"):
        print(delivery.data, delivery.missed)

    with pelton.Service.listen("prices") as service:         # calls
        service.run(lambda request: request.data.upper(), threads=4)

    with pelton.Client.connect("prices", timeout=10) as client:
        print(client.call(b"tea", timeout=1))

A `timeout` is in seconds; `None` is no limit, and 0 is not to wait. Every wait releases the GIL, and ends for Ctrl-C.
`pelton.aio` has the same for asyncio, `pelton.files` files for asyncio, `pelton.logging` log records of many processes.
"""

from pelton._errors import (
    Abandoned,
    BadName,
    BadOption,
    Busy,
    Closed,
    ClosedHandle,
    Corrupt,
    Damaged,
    DescriptorsLost,
    Error,
    Failed,
    Forked,
    HungUp,
    Internal,
    InUse,
    NoChannel,
    NoListener,
    NoSpace,
    NotAChannel,
    NotARecordFile,
    NotReserved,
    PeerDied,
    Rebooted,
    Refused,
    Released,
    Reserved,
    RoleTaken,
    System,
    TimedOut,
    TooLarge,
    TooManyDescriptors,
    TooSmall,
)
from pelton._pelton import (
    Call,
    Client,
    Delivery,
    Info,
    Listener,
    LoopClient,
    Message,
    Opening,
    Publisher,
    Receiver,
    RecordFile,
    RecordReader,
    Request,
    Reservation,
    Sender,
    Service,
    Subscriber,
    SubscriberSet,
    SubscriberState,
    gather,
    listen,
    publish,
    remove_subscription,
    threads,
)
from pelton.queue import JoinableQueue, Queue, SimpleQueue

__all__ = [
    "Abandoned",
    "BadName",
    "BadOption",
    "Busy",
    "Call",
    "Client",
    "Closed",
    "ClosedHandle",
    "Corrupt",
    "Damaged",
    "Delivery",
    "DescriptorsLost",
    "Error",
    "Failed",
    "Forked",
    "HungUp",
    "InUse",
    "Info",
    "Internal",
    "JoinableQueue",
    "Listener",
    "LoopClient",
    "Message",
    "NoChannel",
    "NoListener",
    "NoSpace",
    "NotAChannel",
    "NotARecordFile",
    "NotReserved",
    "Opening",
    "PeerDied",
    "Publisher",
    "Queue",
    "Rebooted",
    "Receiver",
    "RecordFile",
    "RecordReader",
    "Refused",
    "Released",
    "Request",
    "Reservation",
    "Reserved",
    "RoleTaken",
    "Sender",
    "Service",
    "SimpleQueue",
    "Subscriber",
    "SubscriberSet",
    "SubscriberState",
    "System",
    "TimedOut",
    "TooLarge",
    "TooManyDescriptors",
    "TooSmall",
    "gather",
    "listen",
    "publish",
    "remove_subscription",
    "threads",
]
