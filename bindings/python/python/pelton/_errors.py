"""The exceptions of pelton.

Each is a `pelton.Error`, and also the exception of Python that a caller would catch otherwise. `code` is the name of
the code in `pelton.h`, in small letters. The text says what was found, what was wanted, and what to do.
"""

from __future__ import annotations


class Error(Exception):
    """Every error of pelton. `sent` is set by `send_many`: how many messages were sent before the error."""

    code: str | int = "internal"
    sent: int


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
    """The path's channel has its receiver, or all its senders, already."""

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


class Failed(Error):
    """The service failed the call: `code` and `bytes` are its own."""

    code: int = 0
    bytes: bytes = b""

    @property
    def text(self) -> str:
        """The bytes as text, as a handler's exception has it."""
        return self.bytes.decode(errors="replace")


class Abandoned(Error):
    """The service dropped the call without a reply."""

    code = "abandoned"
