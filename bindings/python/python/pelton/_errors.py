"""The exceptions of pelton.

Each is a `pelton.Error`, and also the exception of Python that a caller would catch otherwise. `code` is the name of
the code in `pelton.h`, in small letters. The text says what was found, what was wanted, and what to do.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pelton._pelton import Subscriber


class Error(Exception):
    """Every error of pelton.

    `sent` is set by `send_many`: how many messages were sent before the error. `subscriber` is set by a
    `SubscriberSet`: the one whose publisher has left, which is out of the set.
    """

    code: str | int = "internal"
    sent: int
    subscriber: Subscriber

    def __str__(self) -> str:
        # Also of those that are an OSError with an errno and a filename, from which that makes a text of its own.
        return str(self.args[0]) if self.args else ""


class TimedOut(Error, TimeoutError):
    """A timeout has passed: nothing was sent or received."""

    code = "timed_out"


class Closed(Error, BrokenPipeError, EOFError):
    """The other side has closed: the ordinary end of a channel. A receiver has received every message."""

    code = "closed"
    unreleased: int = 0
    """Messages that the receiver has not released."""


class PeerDied(Error, ConnectionResetError):
    """The other side's process ended without closing. `resume` continues with its successor."""

    code = "peer_died"
    unreleased: int = 0
    """Messages that the receiver has not released: the successor gets them."""


class TooLarge(Error, ValueError):
    """The message is larger than the channel permits."""

    code = "too_large"


class TooSmall(Error, BufferError):
    """The buffer is smaller than the message, which is still the next one."""

    code = "too_small"
    bytes: int
    """The size of the message."""


class TooManyDescriptors(Error, ValueError):
    """More than 64 descriptors for one message."""

    code = "too_many_descriptors"


class DescriptorsLost(Error, OSError):
    """This process had no free descriptor for all that came with a message: raise RLIMIT_NOFILE."""

    code = "descriptors_lost"
    message: bytes | None = None
    """Of `recv_descriptors`: the message, which is released. None of `Message.take_descriptors`."""


class Corrupt(Error, ConnectionAbortedError):
    """The other side violated the layout or the protocol: close the handle."""

    code = "corrupt"


class Refused(Error, OSError):
    """The other side refuses this one, or this kind of channel cannot do it."""

    code = "refused"


class HungUp(Error, ConnectionResetError):
    """The other side hung up during the handshake: its own error has the reason."""

    code = "hung_up"


class NoListener(Error, ConnectionRefusedError):
    """No process listens under the name: start it first, or wait for it by `timeout`."""

    code = "no_listener"


class InUse(Error, OSError):
    """Another process listens under the name."""

    code = "in_use"


class BadName(Error, ValueError):
    """The name is neither short nor `unix:PATH`."""

    code = "name"


class BadOption(Error, ValueError):
    """An option has an invalid value."""

    code = "option"


class NoChannel(Error, FileNotFoundError):
    """There is no channel in the directory: create it, or wait for it by `timeout`."""

    code = "no_channel"


class NotAChannel(Error, OSError):
    """What is at the path cannot be used as a channel."""

    code = "not_a_channel"


class RoleTaken(Error, OSError):
    """The role at the path is taken: receiver, publisher, durable name, or all senders."""

    code = "role_taken"


class NoSpace(Error, OSError):
    """The file system is full. Nothing is damaged; the call can be repeated."""

    code = "no_space"


class Rebooted(Error, OSError):
    """The path's channel is from before a reboot: `pelton recover` keeps the intact messages."""

    code = "rebooted"


class System(Error, OSError):
    """The operating system refused an operation; `errno` has the reason."""

    code = "system"

    def __reduce__(self) -> tuple[Any, ...]:
        # The class for an errno is made where it is needed.
        return system, (self.errno, str(self), self.filename, self.filename2), self.__dict__


_of_errno: dict[int | None, type[System]] = {}


def system(errno: int | None, text: str, filename: object = None, filename2: object = None) -> System:
    """A `System` that is also the exception of Python for that errno, such as FileNotFoundError."""
    if errno not in _of_errno:
        builtin = OSError if errno is None else type(OSError(errno, ""))
        _of_errno[errno] = System if builtin is OSError else type("System", (System, builtin), {})
    raised = _of_errno[errno](text)
    raised.errno, raised.filename, raised.filename2 = errno, filename, filename2
    if errno is not None:
        raised.strerror = os.strerror(errno)
    return raised


class NotARecordFile(Error, ValueError):
    """The file has another format than record files, or a later version of it."""

    code = "not_a_record_file"


class Damaged(Error, ValueError):
    """Bytes of a record file violate its format."""

    code = "damaged"
    offset: int
    """Where, in bytes."""
    next_offset: int | None
    """The next complete part of the file; None if there is none, as after a writer was killed."""


class Forked(Error, RuntimeError):
    """The handle belongs to the process that forked this one: open another one in the child."""

    code = "forked"


class Internal(Error, RuntimeError):
    """A bug in pelton: report it."""

    code = "internal"


class ClosedHandle(Error, ValueError):
    """This handle is closed: open another one."""

    code = "closed_handle"


class Busy(Error, RuntimeError):
    """Another thread, or another task, is in a call with this handle: give each one of its own."""

    code = "wrong_thread"


class Reserved(Error, BufferError):
    """The sender has reserved space, or a view of reserved space is left."""

    code = "reserved"


class NotReserved(Error, ValueError):
    """The reservation is committed or aborted already."""

    code = "not_reserved"


class Released(Error, ValueError):
    """The message is released already."""

    code = "not_received"


_Bytes = bytes


class Failed(Error):
    """The service failed the call, with a code and a text of its own. A handler raises it to fail its call so."""

    code: int = 0
    """Of the service's own choice; 1 is an exception of its handler."""
    bytes: _Bytes
    """The text as the service sent it."""

    def __init__(self, code: int, text: str | _Bytes = b"") -> None:
        if not 0 <= code < 1 << 32:
            raise ValueError(f"the code of a failure is {code}, wanted one from 0 to 4294967295")
        # Of a narrower type than the code of every error.
        self.code = code  # pyright: ignore[reportIncompatibleVariableOverride]
        self.bytes = text.encode() if isinstance(text, str) else bytes(text)
        super().__init__(code, self.bytes)

    def __str__(self) -> str:
        return f"the service failed the call with code {self.code}: {self.text}"

    @property
    def text(self) -> str:
        """The bytes as text, as a handler's exception has it."""
        return self.bytes.decode(errors="replace")


class Abandoned(Error):
    """The service dropped the call without a reply."""

    code = "abandoned"
