"""The table of lies: what a hostile peer may do, at which step, and the answer that the specification gives it.

A row is a `Lie`. Its columns:

- `roles`: the roles that the raw peer plays with this lie. One role attacks a victim: senders attack a receiver,
  clients a service.
- `step`: the step of the protocol at which the peer lies.
- `expected`: one answer, or several joined by `|` where the specification leaves the choice.
- `lie`: what `peer.Peer` takes: it changes packets and pages of the handshake.
- `after`: function(peer), once the handshake is done.
- `alone`: function(connect), in place of a peer: it creates its own connections.

With any answer, the victim lives, its bystander continues, and the victim keeps no further descriptor.
"""

import os
import socket
import struct
import tempfile
import threading
import time
from dataclasses import dataclass, field

from peer import *  # noqa: F403


@dataclass(frozen=True)
class Expected:
    answers: frozenset
    text: str = ""

    def __or__(self, other):
        return Expected(self.answers | other.answers, self.text or other.text)

    def holds(self, answer, text=""):
        return answer in self.answers and (answer != "refused" or self.text in text)

    def __str__(self):
        return " or ".join(sorted(self.answers)) + (f" with `{self.text}`" if self.text else "")


def refused(text):
    """REFUSED comes, with a text that contains this."""
    return Expected(frozenset({"refused"}), text)


HANG_UP = Expected(frozenset({"hang-up"}))  # during the handshake, without a reason
CORRUPT = Expected(frozenset({"dropped"}))  # after the handshake: the victim drops this peer
HARMLESS = Expected(frozenset({"harmless"}))  # the peer itself is served afterwards
OWN_LOSS = Expected(frozenset({"harmless", "dropped", "hang-up", "lost"}))  # whatever happens to the peer itself: it harms nobody else


@dataclass
class Lie:
    name: str
    roles: tuple
    step: str
    expected: Expected
    lie: dict = field(default_factory=dict)
    after: object = None
    alone: object = None
    to_another_user: object = None  # expected where the victim takes the peer for another user, if that differs
    since: int = 1  # the wire version from which on it is answered so
    slow: bool = False  # only in the long form
    settings: dict = field(default_factory=dict)


TABLE = []
ALL = (Sender, Receiver, Client, Service)
LISTENED_TO = (Sender, Client)  # roles whose victim listens
PRODUCERS = (Sender, Client, Service)  # roles that send PRODUCER
CONSUMERS = (Receiver, Client, Service)


def row(name, roles, step, expected, **columns):
    TABLE.append(Lie(name, roles if isinstance(roles, tuple) else (roles,), step, expected, **columns))


# --- How packets are changed ------------------------------------------------------------------------------------------


def fields(**changes):
    return lambda peer, packet, fds: packet.update(changes)


def raw(change):
    """Other bytes in place of the packet's."""
    return lambda peer, packet, fds: [(change(packet.encode()), fds)]


def rights(change):
    """Other descriptors: change(peer, fds) returns them."""
    return lambda peer, packet, fds: [(packet.encode(), change(peer, fds))]


def at(index, make):
    return rights(lambda peer, fds: fds[:index] + [peer.owns(make())] + fds[index + 1 :])


def twice(peer, packet, fds):
    return [(packet.encode(), fds)] * 2


def stop(peer, packet, fds):
    raise Stop


def page_bytes(offset, form, value):
    return lambda peer, page: struct.pack_into(form, page, offset, value)


# --- HELLO ------------------------------------------------------------------------------------------------------------

for size in (1, 4, 79):
    row(f"HELLO of {size} bytes", ALL, "HELLO", refused(f"{size} bytes"), lie={"HELLO": raw(lambda data, size=size: data[:size])})
row("HELLO of no bytes", ALL, "HELLO", HANG_UP, lie={"HELLO": raw(lambda data: b"")})
row("HELLO of 513 bytes", ALL, "HELLO", HARMLESS, lie={"HELLO": raw(lambda data: data[:80] + bytes(433))})
row("HELLO of 60,000 bytes", ALL, "HELLO", HARMLESS, lie={"HELLO": raw(lambda data: data[:80] + bytes(59920))})
row(
    "HELLO of 600 bytes with an entry across the 512th",
    ALL,
    "HELLO",
    refused("entry"),
    since=2,
    lie={"HELLO": raw(lambda data: data[:80] + entry(2, bytes(400)) + entry(3, bytes(112)))},
)
row(
    "HELLO of 516 bytes with a required entry behind the 512th",
    ALL,
    "HELLO",
    HARMLESS,
    since=2,
    lie={"HELLO": raw(lambda data: data[:80] + entry(2, bytes(428)) + entry(0x8000, b""))},
)
for kind in (0, PRODUCER, CONSUMER, READY, DESCRIPTORS, 7, 0xFFFFFFFF):
    row(f"kind {kind} in place of HELLO", ALL, "HELLO", refused("kind"), lie={"HELLO": lambda peer, packet, fds, kind=kind: packet.update(kind=kind)})
row(
    "REFUSED in place of HELLO, with control characters",
    ALL,
    "HELLO",
    HANG_UP,
    lie={"HELLO": raw(lambda data: struct.pack("<I", REFUSED) + data[4:80] + b"\x1b[2J\r\n\x00\xff" * 40)},
)
for version in (0, WIRE_VERSION - 1, WIRE_VERSION + 1, 0xFFFFFFFF):
    row(f"HELLO of wire version {version}", ALL, "HELLO", refused("wire version"), lie={"HELLO": fields(wire_version=version)})
row("HELLO of another layout", ALL, "HELLO", refused("wire version"), lie={"HELLO": fields(layout_signature=LAYOUT_SIGNATURE ^ 1)})
for role in (0, 7, 0xFFFFFFFF):
    row(f"HELLO of role {role}", ALL, "HELLO", refused("role"), lie={"HELLO": fields(role=role)})
row("HELLO of the victim's own role", ALL, "HELLO", refused("both"), lie={"HELLO": lambda peer, packet, fds: packet.update(role=(packet["role"] - 1 ^ 1) + 1)})
row("HELLO of the other pair of roles", ALL, "HELLO", refused("wants"), lie={"HELLO": lambda peer, packet, fds: packet.update(role=packet["role"] - 1 ^ 2 | 1)})
row("HELLO of a link that holds a lane", (Client, Service), "HELLO", refused("successors"), lie={"HELLO": fields(holds=1)})
row("HELLO twice", ALL, "HELLO", refused("kind"), lie={"HELLO": twice})
for count in (1, 4, DESCRIPTORS_MAX):
    row(
        f"HELLO with {count} descriptors",
        ALL,
        "HELLO",
        refused("descriptors") | HANG_UP,
        lie={"HELLO": rights(lambda peer, fds, count=count: [0] * count)},
    )


def entries(name, data, expected, roles=ALL):
    row(f"HELLO with {name}", roles, "HELLO", expected, since=2, lie={"HELLO": fields(rest=data)})


entries("no entry", b"", HARMLESS)
entries("an entry cut in its head", b"\x01\x00", refused(""))
entries("three bytes behind the last entry", entry(1, b"abcd") + b"\0\0\0", refused(""))
entries("an entry longer than the packet", struct.pack("<HH", 1, 5) + b"abcd", refused(""))
entries("an entry of 65,535 bytes", struct.pack("<HH", 1, 0xFFFF) + b"abcd", refused(""))
entries("an entry whose padding is cut", struct.pack("<HH", 1, 3) + b"abc", refused(""))
entries("an entry whose padding is not 0", entry(1, b"abc", b"\xff"), HARMLESS)
entries("two names", entry(1, b"a") + entry(1, b"b"), refused(""))
entries("a name of no bytes", entry(1, b""), HARMLESS)
entries("a name of 428 bytes", entry(1, b"a" * 428), HARMLESS)
entries("a name that is not UTF-8, with control characters", entry(1, b"\x1b[2J\xff\xfe\x00\r\n"), HARMLESS)
entries("a name that is not UTF-8, and an unknown required type", entry(1, b"\x1bliar\xff 9.9") + entry(0x8000, b""), refused("liar\ufffd 9.9"))
entries("entries of unknown optional types, twice", (entry(0, b"") + entry(2, b"x") + entry(0x7FFF, b"abcdefg")) * 2, HARMLESS)
entries("108 empty entries", entry(0x1234, b"") * 108, HARMLESS)
entries("an entry of the unknown required type 0x8000", entry(0x8000, b""), refused("8000"))
entries("an entry of the unknown required type 0xffff", entry(0xFFFF, b"abc"), refused("ffff"))
entries("an unknown required type behind a name", entry(1, b"liar 9.9") + entry(0x9000, b""), refused("liar 9.9"))


def hello_field(name, expected, roles=ALL, **changes):
    row(f"HELLO {name}", roles, "HELLO", expected, since=2, lie={"HELLO": fields(**changes)})


ALL_BITS = (1 << 64) - 1
hello_field("offers every feature", HARMLESS, tail=ALL_BITS)
hello_field("requires what it does not offer", refused(""), floor=1)
hello_field("requires every known feature", HARMLESS, tail=3, floor=3)
hello_field("requires feature 2", refused("feature 2"), tail=4, floor=4)
hello_field("requires feature 63", refused("feature 63"), tail=1 << 63, floor=1 << 63)
hello_field("requires every feature", refused("feature 2"), tail=ALL_BITS, floor=ALL_BITS)
for capacity in (0, 1, 4095):
    hello_field(f"takes lanes of {capacity} bytes", refused("") | HANG_UP, CONSUMERS, capacity=capacity)
hello_field("takes lanes of 4096 bytes, and calls of no bytes", OWN_LOSS | refused(""), CONSUMERS, capacity=4096, message_bytes_max=0)
hello_field("takes lanes of 2^64 - 1 bytes", HARMLESS, CONSUMERS, capacity=ALL_BITS, message_bytes_max=ALL_BITS)
hello_field("of a sender with limits", HARMLESS, Sender, capacity=5, message_bytes_max=ALL_BITS)

# --- PRODUCER ---------------------------------------------------------------------------------------------------------


def packets(step, roles, counts_wanted):
    """What holds for each packet behind HELLO."""
    row(f"{step} of 79 bytes", roles, step, refused("79 bytes"), lie={step: raw(lambda data: data[:79])})
    row(f"{step} of no bytes", roles, step, HANG_UP, lie={step: raw(lambda data: b"")})
    row(f"a HELLO in place of {step}", roles, step, refused("kind"), lie={step: fields(kind=HELLO)})
    row(f"DESCRIPTORS in place of {step}", roles, step, refused("kind"), lie={step: fields(kind=DESCRIPTORS)})
    row(f"{step} of another wire version", roles, step, refused("wire version"), lie={step: fields(wire_version=WIRE_VERSION + 1)})
    row(f"{step} of another layout", roles, step, refused("wire version"), lie={step: fields(layout_signature=0)})
    row(f"hang-up in place of {step}", roles, step, OWN_LOSS, lie={step: stop})
    for count in {0, 1, 2, 3, 4, 64, DESCRIPTORS_MAX} - {counts_wanted}:
        row(
            f"{step} with {count} descriptors",
            roles,
            step,
            refused("descriptors"),
            lie={step: rights(lambda peer, fds, count=count: (fds + [0] * count)[:count])},
        )


packets("PRODUCER", PRODUCERS, 3)
row("PRODUCER twice", PRODUCERS, "PRODUCER", refused("kind"), lie={"PRODUCER": twice})
row("PRODUCER before the other side's HELLO is read", (Sender, Client), "PRODUCER", HARMLESS, lie={"connected": lambda peer: time.sleep(0.01)})

for capacity in (0, 1, 63, 4032, 4095, 4096 + 8, (1 << 34) + 64, 1 << 62, 1 << 63, ALL_BITS, ALL_BITS - 63):
    row(
        f"a lane of {capacity:#x} bytes",
        PRODUCERS,
        "PRODUCER",
        refused("bytes"),
        lie={"PRODUCER": fields(capacity=capacity), "producer page": page_bytes(64, "<Q", capacity)},
    )
for limit in (65536 // 2 - 31, 1 << 31, 1 << 63, ALL_BITS):
    row(
        f"a lane of 64 KiB with messages of {limit:#x} bytes",
        PRODUCERS,
        "PRODUCER",
        refused(""),
        lie={"PRODUCER": fields(message_bytes_max=limit), "producer page": page_bytes(72, "<Q", limit)},
    )
row(
    "a lane of a link with messages of 1,023 bytes",
    (Client, Service),
    "PRODUCER",
    refused("1023"),
    lie={"PRODUCER": fields(message_bytes_max=1023), "producer page": page_bytes(72, "<Q", 1023)},
)
row(
    "a lane of a link with messages of 1,024 bytes",
    (Client, Service),
    "PRODUCER",
    HARMLESS,
    lie={"PRODUCER": fields(message_bytes_max=1024), "producer page": page_bytes(72, "<Q", 1024)},
)
row("a lane of a link in which 4 messages wait", (Client, Service), "PRODUCER", refused("4 messages"), lie={"PRODUCER": fields(tail=position(64, 5))})
row("a fresh lane in which 4 messages are said to wait", Sender, "PRODUCER", HARMLESS, lie={"PRODUCER": fields(tail=position(64, 5))})
row("a packet of twice the capacity of the data", PRODUCERS, "PRODUCER", refused("bytes"), lie={"PRODUCER": fields(capacity=1 << 17), "producer page": page_bytes(64, "<Q", 1 << 17)})
row("a packet of half the capacity of the data", PRODUCERS, "PRODUCER", refused(""), lie={"PRODUCER": fields(capacity=1 << 15, message_bytes_max=8000), "producer page": lambda peer, page: struct.pack_into("<QQ", page, 64, 1 << 15, 8000)})
row("a packet whose capacity is not the page's", PRODUCERS, "PRODUCER", refused("page says"), lie={"producer page": page_bytes(64, "<Q", 1 << 15)})
row("a packet whose limit is not the page's", PRODUCERS, "PRODUCER", refused("page says"), lie={"producer page": page_bytes(72, "<Q", 100)})
for cursors in (0, 2, 0xFFFFFFFF):
    row(f"a lane of {cursors} cursors", PRODUCERS, "PRODUCER", refused("cursors"), lie={"producer page": page_bytes(80, "<I", cursors)})
for name, expected, changes in (
    ("generation 0", HARMLESS, {"generation": 0}),
    ("generation 2^64 - 1", HARMLESS, {"generation": ALL_BITS}),
    ("a head beyond the capacity", refused("head"), {"head": position(1 << 20, 1)}),
    ("a head of seq 0", refused(""), {"head": 0}),
    ("a tail beyond the capacity", HARMLESS, {"tail": position(1 << 20, 1)}),
    ("a tail before the head", refused("messages"), {"tail": position(0, 0xFFFFFFFF)}),
    ("10,000 messages", refused("10000"), {"tail": position(64, 10001)}),
):
    row(f"a fresh lane with {name}", PRODUCERS, "PRODUCER", expected, lie={"PRODUCER": fields(**changes)})
# Words of a fresh producer page that the receiver does not check. Words that the peer stores again when it attaches are
# lies only until then.
for name, offset in (("tail", TAIL), ("floor", FLOOR), ("generation", GENERATION), ("messages", 152), ("synced", 200), ("room_seq", ROOM_SEQ), ("pid", 388), ("ring_processor", 400), ("ring_ns", 408), ("ring_ns", 412)):
    row(f"a fresh producer page with any {name}", PRODUCERS, "PRODUCER", HARMLESS, lie={"producer page": page_bytes(offset, "<I", 0xFFFFFFFE)})
for name, offset in (("ring_processor", 272), ("ring_ns", 280), ("ring_ns", 284)):
    row(f"a fresh consumer page with any {name}", CONSUMERS, "CONSUMER", HARMLESS, lie={"consumer page": page_bytes(offset, "<I", 0xFFFFFFFE)})
HOLDS = {"HELLO": fields(holds=1)}
row("a held lane with a head beyond the capacity", Sender, "PRODUCER", refused(""), lie=HOLDS | {"PRODUCER": fields(head=position(1 << 20, 1))})
row("a held lane with a head of seq 0", Sender, "PRODUCER", refused(""), lie=HOLDS | {"PRODUCER": fields(head=0)})
row("a held lane with 10,000 messages", Sender, "PRODUCER", refused("10000"), lie=HOLDS | {"PRODUCER": fields(tail=position(64, 10001))})
row("a held lane whose messages are not there", Sender, "PRODUCER", OWN_LOSS, lie=HOLDS | {"PRODUCER": fields(tail=position(64, 5))})

for what, roles, step, magic in (
    ("producer", PRODUCERS, "PRODUCER", b"pelton-C"),
    ("consumer", CONSUMERS, "CONSUMER", b"pelton-P"),
    ("receiver", CONSUMERS, "CONSUMER", b"pelton-C"),
):
    row(f"a {what} page of another magic", roles, step, refused(f"{what} segment"), lie={f"{what} page": page_bytes(0, "8s", magic)})
    row(f"a {what} page of another wire version", roles, step, refused(f"{what} segment"), lie={f"{what} page": page_bytes(8, "<I", 77)})
    row(f"a {what} page of another size by its preamble", roles, step, refused(f"{what} segment"), lie={f"{what} page": page_bytes(12, "<I", 4096)})
    row(f"a {what} page of another layout", roles, step, refused(f"{what} segment"), lie={f"{what} page": page_bytes(16, "<Q", 1)})
    row(f"a {what} page of zeros", roles, step, refused(f"{what} segment"), lie={f"{what} page": lambda peer, page: page.__setitem__(slice(0, 128), bytes(128))})

# --- Descriptors of every kind ----------------------------------------------------------------------------------------

libc = ctypes.CDLL(None, use_errno=True)


def a_file():
    with tempfile.TemporaryFile() as file:
        file.write(bytes(PAGE_BYTES))
        return os.dup(file.fileno())


def a_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def a_fifo():
    with tempfile.TemporaryDirectory() as directory:
        os.mkfifo(f"{directory}/fifo")
        return os.open(f"{directory}/fifo", os.O_RDWR)


def a_socket(family, kind):
    def make():
        return socket.socket(family, kind).detach()

    return make


def a_socket_with_itself():
    """A descriptor that only the kernel's collector of sockets in flight frees."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        socket.send_fds(one, [b"itself"], [one.fileno(), other.fileno()])
        return os.dup(other.fileno())


def a_lingering_socket():
    """A TCP socket whose last close blocks: its data stays unread until the other endpoint is reset."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    one.setblocking(False)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
    try:
        while True:
            one.send(bytes(1 << 20))
    except BlockingIOError:
        pass
    one.setblocking(True)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    threading.Timer(CLOSE_BLOCKS_SECONDS, other.close).start()
    return one.detach()


CLOSE_BLOCKS_SECONDS = 0.1


def a_full_eventfd():
    fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    os.write(fd, struct.pack("=Q", ALL_BITS - 1))
    return fd


# No file type in stx_mode: a side cannot distinguish these from an eventfd, and none of them blocks a writer.
LIKE_EVENTFD = {
    "an epoll": lambda: libc.epoll_create1(0),
    "a timerfd": lambda: libc.timerfd_create(1, 0),
    "a pidfd": lambda: os.pidfd_open(os.getpid()),
    "an inotify": lambda: libc.inotify_init1(0),
    "a counting eventfd": lambda: os.eventfd(0, os.EFD_SEMAPHORE),
    "a full eventfd": a_full_eventfd,
}
OTHERS = {
    "a file": a_file,
    "a pipe": a_pipe,
    "a FIFO": a_fifo,
    "a directory": lambda: os.open("/", os.O_RDONLY),
    "an O_PATH descriptor": lambda: os.open("/", os.O_PATH),
    "/dev/null": lambda: os.open("/dev/null", os.O_RDWR),
    "/dev/zero": lambda: os.open("/dev/zero", os.O_RDWR),
    "a file of /proc": lambda: os.open("/proc/self/mem", os.O_RDWR),
    "a stream socket": a_socket(socket.AF_UNIX, socket.SOCK_STREAM),
    "a datagram socket": a_socket(socket.AF_UNIX, socket.SOCK_DGRAM),
    "a TCP socket": a_socket(socket.AF_INET, socket.SOCK_STREAM),
    "a lingering TCP socket with unread data": a_lingering_socket,
    "a memfd without seals": lambda: memfd(PAGE_BYTES),
    "a memfd without the seal against growing": lambda: memfd(PAGE_BYTES, seals=CONTROL_SEALS & ~GROW),
    "a memfd without the seal against shrinking": lambda: memfd(PAGE_BYTES, seals=CONTROL_SEALS & ~SHRINK),
    "an empty memfd": lambda: memfd(0, seals=CONTROL_SEALS),
    "a memfd of one page": lambda: memfd(4096, seals=CONTROL_SEALS),
    "a memfd of 2 GiB": lambda: memfd(1 << 31, seals=CONTROL_SEALS),
}
SEQPACKETS = {
    "a socket that is not connected": a_socket(socket.AF_UNIX, socket.SOCK_SEQPACKET),
    "a socket with itself in it": a_socket_with_itself,
}
PAGES_ONLY = {
    "a memfd without the seal against writing": lambda: memfd(PAGE_BYTES, seals=DATA_SEALS),
    "a memfd without the seal against seals": lambda: memfd(PAGE_BYTES, seals=CONTROL_SEALS & ~SEAL),
}

for step, roles, places in (
    ("PRODUCER", PRODUCERS, ("the producer page", "the doorbell", "the data")),
    ("CONSUMER", CONSUMERS, ("the consumer page", "the receiver page", "the doorbell")),
):
    for index, place in enumerate(places):
        kinds = OTHERS | SEQPACKETS | LIKE_EVENTFD | (PAGES_ONLY if "page" in place else {})
        for name, make in kinds.items():
            if place == "the doorbell":
                socket_allowed = name in SEQPACKETS and WIRE_VERSION > 1
                expected = OWN_LOSS if name in LIKE_EVENTFD or socket_allowed else refused("")
            else:
                expected = refused("")
            row(f"{name} as {place}", roles, step, expected, lie={step: at(index, make)}, to_another_user=refused("") if name in LIKE_EVENTFD else None)
    row(f"{step} with its descriptors in another order", roles, step, refused(""), lie={step: rights(lambda peer, fds: fds[::-1])})

# --- CONSUMER and READY -----------------------------------------------------------------------------------------------

packets("CONSUMER", CONSUMERS, 3)
row("CONSUMER twice", CONSUMERS, "CONSUMER", refused("kind"), lie={"CONSUMER": twice})
for name, head in {"beyond the capacity": position(1 << 40 >> 8, 1), "of seq 0": 0, "of another seq": position(0, 7), "of another place": position(8, 1)}.items():
    row(
        f"a consumer page with a head {name}",
        CONSUMERS,
        "CONSUMER",
        OWN_LOSS,
        lie={"consumer page": page_bytes(HEAD, "<Q", head)},
    )
row("READY of 79 bytes", ALL, "READY", refused("79 bytes"), lie={"READY": raw(lambda data: data[:79])})
row("a HELLO in place of READY", ALL, "READY", refused("kind"), lie={"READY": fields(kind=HELLO)})
row("READY of another wire version", ALL, "READY", refused("wire version"), lie={"READY": fields(wire_version=0)})
row("READY with a descriptor", ALL, "READY", refused("descriptors"), lie={"READY": rights(lambda peer, fds: [0])})
row("READY with 253 descriptors", ALL, "READY", refused("descriptors"), lie={"READY": rights(lambda peer, fds: [0] * DESCRIPTORS_MAX)})
row("hang-up in place of READY", ALL, "READY", OWN_LOSS, lie={"READY": stop})
row("hang-up right behind READY", ALL, "READY", OWN_LOSS, lie={"READY": lambda peer, packet, fds: (peer.send_raw(packet.encode()), stop(peer, packet, fds))})

# --- Packets behind the handshake -------------------------------------------------------------------------------------


def flood(packet, fds=(), count=5000):
    """So many packets, or as many as the socket takes."""

    def send(peer):
        peer.socket.setblocking(False)
        try:
            for _ in range(count):
                if fds:
                    socket.send_fds(peer.socket, [packet], fds)
                else:
                    peer.socket.send(packet)
        except OSError:
            pass
        peer.socket.settimeout(DEADLINE_SECONDS)

    return send


def then(*acts):
    def do(peer):
        for act in acts:
            act(peer)

    return do


JUNK = {
    "READY again": Packet(READY).encode(),
    "HELLO again": Packet(HELLO, role=SENDER).encode(),
    "PRODUCER again": Packet(PRODUCER, capacity=1 << 16).encode(),
    "REFUSED": Packet(REFUSED, rest=b"\x1b[2J").encode(),
    "junk of 1 byte": b"?",
    "junk of 60,000 bytes": b"?" * 60000,
    "DESCRIPTORS without descriptors": Packet(DESCRIPTORS, seq=1).encode(),
}
for name, packet in JUNK.items():
    # No mark leads to it, so no side reads it: both go on.
    row(f"{name} behind the handshake, 5,000 times", ALL, "socket", HARMLESS, after=flood(packet))
    row(f"{name} behind the handshake, and a mark", Sender, "socket", CORRUPT, after=lambda peer, packet=packet: (peer.send_raw(packet), marked((DESCRIPTORS_MARK, 1))(peer)))
row("a packet of no bytes behind the handshake", ALL, "socket", OWN_LOSS, after=flood(b"", count=1))
row("64 descriptors of no message, 5,000 times", ALL, "socket", OWN_LOSS, after=flood(Packet(DESCRIPTORS, seq=9).encode(), [0] * 64))
row("253 descriptors with a byte of junk, 100 times", ALL, "socket", OWN_LOSS, after=flood(b"?", [0] * DESCRIPTORS_MAX, 100))


def lingering_with(packet):
    def send(peer):
        fd = a_lingering_socket()
        peer.send_raw(packet, [fd])
        # The last close is the victim's. If the victim was faster, this one waits for the reset.
        os.close(fd)

    return send


row("a lingering socket with a byte of junk", ALL, "socket", OWN_LOSS, after=lingering_with(b"?"))
row("a lingering socket for message 1", ALL, "socket", OWN_LOSS, after=lingering_with(Packet(DESCRIPTORS, seq=1).encode()))

# --- Words in the data ------------------------------------------------------------------------------------------------

D, G, J = MARK | DESCRIPTORS_MARK << 28, MARK | GENERATION_MARK << 28, MARK | JUMP << 28


def words(*placed):
    """Stores (offset, seq, low) words, the first one last, as a producer publishes; wakes the victim."""

    def store(peer):
        for offset, seq, low in reversed(placed):
            peer.outgoing.put(offset, seq, low)
        peer.outgoing.waker.wake()

    return store


def data(name, expected, *placed, roles=PRODUCERS, since=1):
    row(f"in the data: {name}", roles, "data", expected, after=words(*placed), since=since)


LIMIT = limit_of(1 << 16)
data("seq 2 where 1 is next", CORRUPT, (0, 2, 10))
data("seq 0 and a length", CORRUPT, (0, 0, 10))
data("seq 2^32 - 1", CORRUPT, (0, 0xFFFFFFFF, 10))
data("a message 1 byte above the limit", CORRUPT, (0, 1, LIMIT + 1))
data("a message of 2^31 - 1 bytes", CORRUPT, (0, 1, 0x7FFFFFFF))
data("a message that ends behind the data", CORRUPT, (0, 1, J | 768), (49152, 1, 16384))
data("a message whose cleared header is behind the data", CORRUPT, (0, 1, J | 768), (49152, 1, 16384 - 8))
data("a mark of kind 3", CORRUPT, (0, 1, MARK | 3 << 28), (8, 1, 0))
data("a mark and nothing behind it", CORRUPT, (0, 1, G | 1))
data("a mark of seq 1 before a message of seq 2", CORRUPT, (0, 1, G | 1), (8, 2, 0))
data("two marks of one kind", CORRUPT, (0, 1, D | 1), (8, 1, D | 1), (16, 1, 0))
data("marks in another order", CORRUPT, (0, 1, D | 1), (8, 1, G | 1), (16, 1, 0))
data("a jump behind a mark", CORRUPT, (0, 1, G | 1), (8, 1, J | 2), (128, 1, 0))
data("a jump to itself", CORRUPT, (0, 1, J))
data("a jump to a jump back", CORRUPT, (0, 1, J | 1), (64, 1, J))
data("a jump to the end of the data", CORRUPT, (0, 1, J | 1024))
data("a jump to 2^34 - 64", CORRUPT, (0, 1, J | 0xFFFFFFF))
data("a jump to the last 64 bytes, and a mark in the last 8", CORRUPT, (0, 1, J | 1023), (65472, 1, G | 1), (65480, 1, D | 1), (65488, 1, 48))
data("seven marks, of all kinds but one", CORRUPT, (0, 1, J | 1), (64, 1, G | 1), (72, 1, D | 1), *((80 + 8 * i, 1, MARK | 4 + i << 28) for i in range(4)), (112, 2, 0), since=2)
data("marks of the kinds 4 to 7", HARMLESS, *((8 * i, 1, MARK | 4 + i << 28 | 77) for i in range(4)), (32, 1, 0), roles=(), since=2)
for count in (65, 0xFFFFFFF):
    data(f"a mark of {count} descriptors", CORRUPT, (0, 1, D | count), (8, 1, 0), roles=(Sender,))


def marked(*marks):
    return lambda peer: peer.send_message(b"marked", marks)


row("a jump forward over nothing", Sender, "data", HARMLESS, after=lambda peer: (words((0, 1, J | 4), (256, 1, 3))(peer), peer.outgoing.advance(272)))
row("a generation mark in the middle of a lane", Sender, "data", HARMLESS, after=then(marked(), marked((GENERATION_MARK, 0xFFFFFFF)), marked((GENERATION_MARK, 0))))
row("a mark of 0 descriptors", Sender, "data", HARMLESS, after=marked((DESCRIPTORS_MARK, 0)))
row("marks of the kinds 4 to 7 before a message", Sender, "data", HARMLESS, after=marked(*((kind, 77) for kind in range(4, 8))), since=2)
row("descriptors announced and not sent", Sender, "data", OWN_LOSS, after=lambda peer: [marked((DESCRIPTORS_MARK, 1))(peer) for _ in range(200)])
row("a lane of 8,000 empty messages", Sender, "data", HARMLESS, after=lambda peer: [peer.send_message(b"") for _ in range(8000)])


def descriptors_of(seqs, sent, announced):
    def do(peer):
        for seq in seqs:
            # What the socket has no room for is not sent.
            flood(Packet(DESCRIPTORS, seq=seq).encode(), [0] * sent, 1)(peer)
        peer.send_message(b"with descriptors", [(DESCRIPTORS_MARK, announced)] if announced else ())

    return do


row("descriptors as announced", Sender, "data", HARMLESS, after=descriptors_of([1], 2, 2))
row("descriptors sent and not announced", Sender, "data", HARMLESS, after=descriptors_of([1], 2, 0))
row("more descriptors than announced", Sender, "data", OWN_LOSS, after=descriptors_of([1], 64, 1))
row("fewer descriptors than announced", Sender, "data", OWN_LOSS, after=descriptors_of([1], 1, 64))
row("descriptors of the same message twice", Sender, "data", OWN_LOSS, after=descriptors_of([1, 1], 1, 1))
row("descriptors of later messages", Sender, "data", OWN_LOSS, after=descriptors_of(range(2, 100), 1, 1))
row("descriptors of earlier messages", Sender, "data", OWN_LOSS, after=descriptors_of([0xFFFFFFFF] * 100, 1, 1))


def changed_while_read(peer):
    """The payload of each message changes all the time, its header now and then."""
    is_over = threading.Event()

    def scribble():
        while not is_over.is_set():
            for offset in range(8, 4000, 8):
                peer.outgoing.data.store(offset, 0x4141414141414141)

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        for _ in range(30):
            peer.send_message(b"B" * 4000)
    finally:
        is_over.set()
        thread.join()


row("a payload that changes while it is read", Sender, "data", OWN_LOSS, after=changed_while_read)


def scribble_everything(peer):
    """All words of the data are one word, again and again, while the victim reads."""
    memory = peer.outgoing.data
    for word in (position(0, 1), ALL_BITS, 1 << 32 | MARK, 1 << 32, 0):
        for offset in range(0, peer.capacity, 8):
            memory.store(offset, word)
        peer.outgoing.waker.wake()


row("every word of the data the same, one after the other", PRODUCERS, "data", OWN_LOSS, after=scribble_everything)


def message_of_holes(size):
    return lambda peer: (peer.outgoing.put(0, 1, size), peer.outgoing.advance(record_bytes(size)))


row("a message of holes, 30 MiB, in a lane of 64 MiB", Sender, "data", HARMLESS, after=message_of_holes(30 << 20), settings={"capacity": 1 << 26}, to_another_user=refused("bytes"))
row("a message of holes, 1 GiB, in a lane of 16 GiB", Sender, "data", OWN_LOSS | refused(""), after=message_of_holes(1 << 30), settings={"capacity": 1 << 34}, slow=True, to_another_user=refused("bytes"))
row("a message of holes, 1 MiB and 8 bytes, by a sender of smaller limits", Sender, "data", CORRUPT, after=message_of_holes((1 << 20) + 8), settings={"capacity": 1 << 26, "limit": 1 << 20})

# --- Words in the pages -----------------------------------------------------------------------------------------------

ODD_WORDS = (0, 1, 2, 7, ALL_BITS, 1 << 63, 1 << 32, 0xFFFFFFFF, position(1 << 16, 1), position(0, 2))


def page_word(lane, page, offset):
    """Any value in this word of a page, with a message after each."""

    def do(peer):
        memory = getattr(getattr(peer, lane), page)
        for word in ODD_WORDS:
            memory.store(offset, word)
            if lane == "outgoing":
                if not peer.outgoing.try_send(b"x" * 40 if peer.role == SENDER else call_header(NOTIFY if peer.role == CLIENT else DRAINING + 9, 0)):
                    return
            else:
                peer.incoming.waker.wake()

    return do


for name, offset in (
    ("magic", 0),
    ("capacity", 64),
    ("message_bytes_max", 72),
    ("cursors", 80),
    ("tail", TAIL),
    ("floor", FLOOR),
    ("generation", GENERATION),
    ("messages", 152),
    ("sleep word", PRODUCER_SLEEP),
    ("room_seq", ROOM_SEQ),
    ("state", PRODUCER_STATE),
    ("fenced", PRODUCER_FENCED),
):
    row(f"any {name} of a producer", (Sender, Client), "pages", OWN_LOSS, after=page_word("outgoing", "page", offset))
for name, offset in (("magic", 0), ("head", HEAD), ("messages", 136), ("generation", CONSUMER_GENERATION), ("state", CONSUMER_STATE), ("fenced", CONSUMER_FENCED)):
    row(f"any {name} of a consumer", CONSUMERS, "pages", OWN_LOSS, after=page_word("incoming", "page", offset))
row("any sleep word of a receiver", CONSUMERS, "pages", OWN_LOSS, after=page_word("incoming", "receiver", RECEIVER_SLEEP))


def head(word):
    """This head, once something is in the lane."""

    def do(peer):
        if peer.role == CLIENT:
            peer.submit(b"a request")
        peer.wait(peer.incoming, lambda: peer.incoming.data.load(0))
        peer.incoming.page.store(HEAD, word)
        ring(peer.incoming.doorbell)

    return do


for name, word in {
    "beyond the capacity": position(1 << 34, 2),
    "of seq 0": position(8, 0),
    "far beyond the tail": position(8, 1 << 20),
    "before the start": position(0, 0xFFFFFFFF),
}.items():
    row(f"a head {name}", Receiver, "pages", CORRUPT, after=head(word))
    row(f"a head {name}, of a link", (Client, Service), "pages", OWN_LOSS, after=head(word))


def scribble_on_data(peer):
    """A consumer writes into the producer's data: it can deceive only itself."""
    peer.incoming.data.bytes[:] = b"\xff" * peer.incoming.capacity


row("a consumer that writes over all of the data", CONSUMERS, "pages", OWN_LOSS, after=scribble_on_data)

# --- Doorbells --------------------------------------------------------------------------------------------------------


def the_doorbell(peer):
    return (peer.outgoing or peer.incoming).doorbell


def ring_flood(peer):
    for _ in range(20000):
        ring(the_doorbell(peer))


def fill(fd):
    """Fills an eventfd to its maximum: adding to it blocks."""
    try:
        os.set_blocking(fd, False)
        os.read(fd, 8)
    except OSError:
        pass
    try:
        os.write(fd, struct.pack("=Q", ALL_BITS - 1))
    except OSError:
        pass
    os.set_blocking(fd, True)


def ask_to_be_rung(peer):
    """Both own sleep words are armed, and the room that is asked for is there at once."""
    if peer.outgoing:
        peer.outgoing.arm()
        peer.outgoing.page.store(ROOM_SEQ, 1)
    if peer.incoming:
        peer.incoming.arm()


def act_and_be_served(peer):
    """An honest exchange whose wait does not depend on the own doorbell."""
    ask_to_be_rung(peer)
    if peer.role == SENDER:
        sent = peer.outgoing.try_send(b"ring me")
        assert sent
        poll_until(peer, peer.outgoing.is_released)
    elif peer.role == CLIENT:
        peer.outgoing.try_send(call_header(REQUEST, peer.new_id()) + b"ring me")
        poll_until(peer, peer.incoming.try_receive)


def poll_until(peer, is_done):
    until = time.monotonic() + DEADLINE_SECONDS
    while not is_done():
        if time.monotonic() > until:
            raise TimeoutError("the victim does not serve a peer whose doorbell blocks")
        time.sleep(0.001)


row("20,000 rings", ALL, "doorbells", OWN_LOSS, after=ring_flood)
row("an own doorbell that blocks and is full, and asks to be rung", LISTENED_TO, "doorbells", OWN_LOSS, since=2, after=lambda peer: (fill(peer.doorbell.given), act_and_be_served(peer)))
row("the victim's doorbell made to block, and filled", LISTENED_TO, "doorbells", OWN_LOSS, since=2, after=lambda peer: fill(the_doorbell(peer)))
row("the victim's doorbell read dry 10,000 times", LISTENED_TO, "doorbells", OWN_LOSS, after=lambda peer: [drain(the_doorbell(peer)) for _ in range(10000)])


def drain(fd):
    try:
        os.set_blocking(fd, False)
        os.read(fd, 8)
    except OSError:
        pass


SOCKET = {"is_socket_doorbell": True}
row("a socket as the own doorbell", LISTENED_TO, "doorbells", HARMLESS, since=2, settings=SOCKET)
row("a full socket as the own doorbell", LISTENED_TO, "doorbells", OWN_LOSS, since=2, settings=SOCKET, after=lambda peer: (fill_socket(peer.doorbell.given), act_and_be_served(peer)))
row("a socket as the own doorbell, shut down", LISTENED_TO, "doorbells", OWN_LOSS, since=2, settings=SOCKET, after=lambda peer: (shut(peer.doorbell.own), act_and_be_served(peer)))


def fill_socket(fd):
    with socket.socket(fileno=os.dup(fd)) as doorbell:
        doorbell.setblocking(False)
        try:
            while True:
                doorbell.send(b"!" * 1000)
        except OSError:
            pass
        doorbell.setblocking(True)


def shut(fd):
    with socket.socket(fileno=os.dup(fd)) as doorbell:
        doorbell.shutdown(socket.SHUT_RDWR)


# --- Calls, as a client -----------------------------------------------------------------------------------------------


def records(*made):
    """Each is bytes, or a function of the peer that returns bytes."""

    def send(peer):
        for record in made:
            peer.send_record(record(peer) if callable(record) else record)

    return send


ID = 1 << 32  # slot 0, generation 1
ID2 = 2 << 32 | 1


def requests(name, expected, *made, since=1):
    row(f"requests: {name}", Client, "calls", expected, after=records(*made), since=since)


requests("a record of no bytes", CORRUPT, b"")
requests("a record of 23 bytes", CORRUPT, call_header(REQUEST, ID)[:23])
for kind in (0, 4, 15, REPLY, DRAINED, 255):
    requests(f"kind {kind}", CORRUPT, call_header(kind, ID))
requests("flag 8", CORRUPT, call_header(REQUEST, ID, flags=8) + b"x")
requests("a traceparent of 31 bytes", CORRUPT, call_header(REQUEST, ID, flags=TRACED) + b"x" * 31)
requests("a traceparent in a later piece", CORRUPT, call_header(REQUEST, ID, flags=MORE) + b"x", call_header(REQUEST, ID, flags=CONTINUED | TRACED) + b"x" * 40)
requests("a notification with a traceparent", CORRUPT, call_header(NOTIFY, 0, flags=TRACED) + b"x" * 40)
requests("a byte behind the flags that is not 0", CORRUPT, call_header(REQUEST, ID, zero=0x100) + b"x")
requests("slot 1,024", CORRUPT, call_header(REQUEST, ID | 1024))
requests("slot 2^32 - 1", CORRUPT, call_header(REQUEST, ID | 0xFFFFFFFF))
requests("generation 0", CORRUPT, call_header(REQUEST, 5))
requests("a notification with an id", CORRUPT, call_header(NOTIFY, ID))
requests("a cancellation of id 0", CORRUPT, call_header(CANCEL, 0))
requests("a code", CORRUPT, call_header(REQUEST, ID, code=1))
requests("a notification with a deadline", CORRUPT, call_header(NOTIFY, 0, deadline=1))
requests("a cancellation with a deadline", CORRUPT, call_header(CANCEL, ID, deadline=1))
requests("a cancellation with a payload", CORRUPT, call_header(CANCEL, ID) + b"x")
requests("a cancellation in pieces", CORRUPT, call_header(CANCEL, ID, flags=MORE))
requests("a first piece of no bytes", CORRUPT, call_header(REQUEST, ID, flags=MORE))
requests("a last piece of no bytes", CORRUPT, call_header(REQUEST, ID, flags=MORE) + b"x", call_header(REQUEST, ID, flags=CONTINUED))
requests("a piece of no message", CORRUPT, call_header(REQUEST, ID, flags=CONTINUED) + b"x")
requests("a piece of another message", CORRUPT, call_header(REQUEST, ID, flags=MORE) + b"x", call_header(REQUEST, ID2, flags=CONTINUED) + b"x")
requests("a piece of another kind", CORRUPT, call_header(REQUEST, ID, flags=MORE) + b"x", call_header(NOTIFY, 0, flags=CONTINUED) + b"x")
requests("two messages in pieces at a time", CORRUPT, call_header(REQUEST, ID, flags=MORE) + b"x", call_header(REQUEST, ID2, flags=MORE) + b"x")
requests("a deadline in a later piece", CORRUPT, call_header(REQUEST, ID, flags=MORE) + b"x", call_header(REQUEST, ID, flags=CONTINUED, deadline=1) + b"x")
requests("the same slot while its first piece is there", CORRUPT, call_header(REQUEST, ID, flags=MORE) + b"x", call_header(REQUEST, 2 << 32) + b"x")
requests("a request within another one's pieces", HARMLESS, call_header(REQUEST, ID, flags=MORE) + b"x", call_header(REQUEST, ID2) + b"x", call_header(REQUEST, ID, flags=CONTINUED) + b"y")
requests("a request of which the last piece never comes", HARMLESS, call_header(REQUEST, ID, flags=MORE) + b"x")
requests("a cancellation of what is not in flight", HARMLESS, *[call_header(CANCEL, ID | slot) for slot in range(100)])
requests("a deadline that has passed", HARMLESS, call_header(REQUEST, ID, deadline=1) + b"late")
requests("a deadline of 2^64 - 1", HARMLESS, call_header(REQUEST, ID, deadline=ALL_BITS) + b"x")


def the_same_id_again(peer):
    peer.answer(peer.submit(b"x"))
    peer.calls = 0
    peer.answer(peer.submit(b"x"))


row("requests: the id of the last call of the slot again", Client, "calls", HARMLESS, after=the_same_id_again)


def taken_slots(peer):
    """Requests in one slot without a wait for the answer: sooner or later one comes while the slot is taken."""
    for generation in range(1, 2000):
        if not peer.outgoing.try_send(call_header(REQUEST, generation << 32) + b"x"):
            return


row("requests: a slot that may be taken, 2,000 times", Client, "calls", OWN_LOSS, after=taken_slots)


def never_reads(size, count):
    def do(peer):
        sent = 0
        until = time.monotonic() + 0.5
        while sent < count and time.monotonic() < until:
            if peer.outgoing.try_send(call_header(REQUEST, ID | sent) + b"x" * size):
                sent += 1
            else:
                time.sleep(0.001)

    return do


row("a client that reads no reply, 1,024 calls of 30,000 bytes", Client, "calls", OWN_LOSS, after=never_reads(30000, 1024))
row("a client that reads no reply, 1,024 calls of 1 MiB", Client, "calls", OWN_LOSS, after=never_reads(1 << 20, 1024), settings={"capacity": 1 << 24}, slow=True)
row("1,024 calls in flight", Client, "calls", HARMLESS, after=lambda peer: [peer.answer(call) for call in [peer.submit(b"x", slot) for slot in range(1024)][-1:]])


def many_cancels(peer):
    """Requests, each cancelled immediately, 100 times."""
    for slot in range(100):
        call = peer.submit(b"cancelled", slot)
        for _ in range(100):
            peer.send_record(call_header(CANCEL, call))


row("10,000 cancellations", Client, "calls", HARMLESS, after=many_cancels)
row("10,000 notifications", Client, "calls", HARMLESS, after=lambda peer: [peer.send_record(call_header(NOTIFY, 0) + b"x") for _ in range(10000)])
row("a client that leaves 1,000 calls behind", Client, "calls", OWN_LOSS, after=lambda peer: [peer.submit(b"x" * 100, slot) for slot in range(1000)])
row("a notification of a million pieces of 1 byte", Client, "calls", OWN_LOSS, after=lambda peer: [peer.send_record(call_header(NOTIFY, 0, flags=MORE | (CONTINUED if i else 0)) + b"x") for i in range(20000)])


def unending_request(peer):
    """A request in pieces of holes, until it is larger than the service takes (64 MiB, or what it said)."""
    peer.send_record(call_header(NOTIFY, 0, flags=MORE) + b"x")
    piece = call_header(NOTIFY, 0, flags=MORE | CONTINUED) + bytes(7 << 20)
    for _ in range(400):
        peer.send_record(piece)


row("a request that is larger than the service takes", Client, "calls", CORRUPT, after=unending_request, settings={"capacity": 1 << 24}, slow=True)

# --- Calls, as a service ----------------------------------------------------------------------------------------------


def replies(name, expected, *made):
    """Each is a function of the first request's id that returns a record."""

    def send(peer):
        call, _ = peer.receive_request()
        for record in made:
            peer.send_record(record(call))

    row(f"replies: {name}", Service, "calls", expected, after=send)


def answer(kind, payload=b"", **settings):
    return lambda call: call_header(kind, 0 if kind in (DRAINING, DRAINED) else call, **settings) + payload


replies("a record of no bytes", CORRUPT, lambda call: b"")
replies("a record of 23 bytes", CORRUPT, lambda call: call_header(REPLY, call)[:23])
for kind in (0, REQUEST, NOTIFY, CANCEL, 15, 24, 255):
    replies(f"kind {kind}", CORRUPT, answer(kind))
replies("flag 128", CORRUPT, answer(REPLY, b"x", flags=128))
replies("a byte behind the flags that is not 0", CORRUPT, answer(REPLY, zero=1))
replies("slot 1,024", CORRUPT, lambda call: call_header(REPLY, call | 1024))
replies("generation 0", CORRUPT, lambda call: call_header(REPLY, call & 0xFFFFFFFF))
replies("a call that is not in flight", CORRUPT, lambda call: call_header(REPLY, call + (7 << 32)))
replies("a code with a reply", CORRUPT, answer(REPLY, code=1))
replies("a deadline with a reply", CORRUPT, answer(REPLY, deadline=1))
replies("an end with a payload", CORRUPT, answer(END, b"x"))
replies("an abandonment with a payload", CORRUPT, answer(ABANDONED, b"x"))
replies("DRAINING with an id", CORRUPT, lambda call: call_header(DRAINING, call))
replies("DRAINING twice", CORRUPT, answer(DRAINING), answer(DRAINING))
replies("RETURNED before DRAINING", CORRUPT, answer(RETURNED))
replies("RETURNED behind a part", CORRUPT, answer(DRAINING), answer(PART, b"x"), answer(RETURNED))
replies("RETURNED behind a piece", CORRUPT, answer(DRAINING), answer(REPLY, b"x", flags=MORE), answer(RETURNED))
replies("a first piece of no bytes", CORRUPT, answer(REPLY, flags=MORE))
replies("a piece of no message", CORRUPT, answer(REPLY, b"x", flags=CONTINUED))
replies("a piece of another kind", CORRUPT, answer(REPLY, b"x", flags=MORE), answer(PART, b"x", flags=CONTINUED))
replies("a second reply", OWN_LOSS, answer(REPLY, b"x"), answer(REPLY, b"x"))
replies("another payload", OWN_LOSS, answer(REPLY, b"another"))
replies("a failure of the library's codes", OWN_LOSS, answer(FAILED, b"\x1b[2J", code=0xFFFF0001))
replies("a failure of an unknown code of the library's", OWN_LOSS, answer(FAILED, b"x" * 1000, code=0xFFFFFFFF))
replies("an abandonment", OWN_LOSS, answer(ABANDONED))
replies("DRAINED alone", OWN_LOSS, answer(DRAINED))
replies("DRAINING, and nothing more", OWN_LOSS, answer(DRAINING))
replies("a part, and nothing more", OWN_LOSS, answer(PART, b"x"))
replies("5,000 parts", OWN_LOSS, *[answer(PART, b"x" * 100)] * 5000)

# --- Connections ------------------------------------------------------------------------------------------------------


def hang_ups(connect):
    for _ in range(300):
        connect().close()


def silent_ones(connect):
    """More than a victim shakes hands with at a time, none of which says a word, while an honest one comes."""
    silent = [connect() for _ in range(70)]
    connect.honest()
    for one in silent:
        one.close()


def byte_by_byte(connect):
    """A packet has its boundaries: one byte is a short packet."""
    with connect() as one:
        try:
            for byte in Packet(HELLO, role=SENDER).encode():
                one.send(bytes([byte]))
        except OSError:
            pass


def slow_one(connect):
    """HELLO comes late; others are served meanwhile."""
    with connect() as one:
        time.sleep(0.7)
        connect.honest()
        try:
            one.send(hello(connect.role.role).encode())
            one.recv(PACKET_BYTES)
        except OSError:
            pass


def hellos_alone(connect):
    """150 peers stop right behind HELLO, while an honest one comes."""
    stopped = []
    for _ in range(150):
        one = connect()
        stopped.append(one)
        try:
            one.send(hello(connect.role.role).encode())
        except OSError:
            pass
    connect.honest()
    for one in stopped:
        one.close()


def many_peers(connect):
    """50 peers at a time, all of which leave in the middle of their work."""
    peers = [connect.peer() for _ in range(50)]
    for peer in peers:
        peer.close()


row("300 connections that hang up at once", LISTENED_TO, "connections", OWN_LOSS, alone=hang_ups)
row("70 silent connections", LISTENED_TO, "connections", OWN_LOSS, alone=silent_ones)
row("HELLO byte by byte", LISTENED_TO, "connections", OWN_LOSS, alone=byte_by_byte)
row("HELLO after 0.7 s", LISTENED_TO, "connections", OWN_LOSS, alone=slow_one)
row("150 connections that stop behind HELLO", LISTENED_TO, "connections", OWN_LOSS, alone=hellos_alone)
row("50 peers that vanish", LISTENED_TO, "connections", OWN_LOSS, alone=many_peers)

# Known deviations of an implementation: (the beginning of a victim's name, the lie): the reason. They are printed, and
# are no failures.
KNOWN = {
    ("lisp recv", "a message of holes, 1 GiB, in a lane of 16 GiB"): "the heap has no room for it: the message stays, and the receiver says so (README of bindings/lisp)"
}

TABLE = [lie for lie in TABLE if lie.roles and lie.since <= WIRE_VERSION]
