"""Messages at memory speed between the threads and processes of one Linux machine.

    with pelton.listen("events") as listener:                # one process
        for message in listener.accept_receiver():           # bytes, until the sender has closed
            print(message)

    with pelton.Sender.connect("events", timeout=10) as sender:      # another one waits for it, up to 10 seconds
        sender.send(b"hello")                                # waits while the lane is full

A `timeout` is in seconds; `None` is no limit, and 0 is not to wait. Every wait releases the GIL, and ends for Ctrl-C.
`pelton.aio` has the same for asyncio.
"""

from pelton._errors import (
    Abandoned,
    BadName,
    BadOption,
    Busy,
    Closed,
    ClosedHandle,
    Corrupt,
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
    Info,
    Listener,
    Message,
    Opening,
    Receiver,
    Reservation,
    Sender,
    gather,
    listen,
    threads,
)
from pelton.queue import JoinableQueue, Queue, SimpleQueue

__all__ = [
    "Abandoned",
    "BadName",
    "BadOption",
    "Busy",
    "Closed",
    "ClosedHandle",
    "Corrupt",
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
    "Message",
    "NoChannel",
    "NoListener",
    "NoSpace",
    "NotAChannel",
    "NotReserved",
    "Opening",
    "PeerDied",
    "Queue",
    "Rebooted",
    "Receiver",
    "Refused",
    "Released",
    "Reservation",
    "Reserved",
    "RoleTaken",
    "Sender",
    "SimpleQueue",
    "System",
    "TimedOut",
    "TooLarge",
    "TooManyDescriptors",
    "TooSmall",
    "gather",
    "listen",
    "threads",
]
