"""A peer that speaks the protocol of pelton from spec/ alone: it shares no code with any implementation.

It can be honest from end to end, and it can lie at every step:

- every packet passes through `Peer.send`, where a lie may change, replace, repeat or suppress it;
- every page passes through `Peer.page` before it is sealed;
- after the handshake each word of its own pages and data is writable: `Memory.store`.

One thread uses a peer. Each object that owns descriptors or mappings has `close`, which releases all of them.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import select
import socket
import struct
import time

WIRE_VERSION = 2
LAYOUT_SIGNATURE = 0x3704E993D4074093

HELLO, PRODUCER, CONSUMER, READY, REFUSED, DESCRIPTORS = 1, 2, 3, 4, 5, 6
KINDS = {HELLO: "HELLO", PRODUCER: "PRODUCER", CONSUMER: "CONSUMER", READY: "READY", REFUSED: "REFUSED", DESCRIPTORS: "DESCRIPTORS"}
SENDER, RECEIVER, CLIENT, SERVICE = 1, 2, 3, 4

START = 1 << 32  # offset 0, seq 1
PAGE_BYTES = 65536
PACKET_BYTES = 512
DESCRIPTORS_MAX = 253  # that the kernel lets travel with one packet
CAPACITY_MAX = 1 << 34
MESSAGE_BYTES_MAX = (1 << 31) - 16

# Offsets of layout.md.
TAIL, FLOOR, GENERATION, PRODUCER_SLEEP, ROOM_SEQ, PRODUCER_STATE, PRODUCER_FENCED = 128, 136, 144, 256, 264, 384, 392
HEAD, CONSUMER_GENERATION, CONSUMER_STATE, CONSUMER_FENCED = 128, 176, 256, 264
RECEIVER_SLEEP = 128
ARMED, UNBARRIERED, CLOSED = 1, 2, 4
OPEN_STATE, CLOSED_STATE = 1, 2

MARK = 1 << 31
JUMP, DESCRIPTORS_MARK, GENERATION_MARK = 0, 1, 2

REQUEST, NOTIFY, CANCEL = 1, 2, 3
REPLY, PART, END, FAILED, ABANDONED, DRAINING, RETURNED, DRAINED = 16, 17, 18, 19, 20, 21, 22, 23
MORE, CONTINUED, TRACED = 1, 2, 4
CALL = struct.Struct("<QBBHIQ")

# A guess that only catches hangs.
DEADLINE_SECONDS = 20

_libc = ctypes.CDLL(None, use_errno=True)
_MEMBARRIER = {"x86_64": 324, "aarch64": 283}[platform.machine()]
_GLOBAL_EXPEDITED = 2


def fence():
    """A full fence on this processor, and on those that run registered processes: as waker and as sleeper this peer always fences."""
    if _libc.syscall(_MEMBARRIER, _GLOBAL_EXPEDITED, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "membarrier")


class HungUp(Exception):
    """The other side ended the connection without a reason."""


class Refused(Exception):
    """The other side refused, by this text."""


class Broken(Exception):
    """The other side broke a rule of the protocol."""


class Stop(Exception):
    """Raised by a lie: the peer stops here."""


class Packet(dict):
    """The 80 bytes, by their fields, and what follows them."""

    LAYOUT = struct.Struct("<IIQIIQQQQQQII")
    FIELDS = (
        "kind wire_version layout_signature role holds capacity message_bytes_max generation head tail floor seq zero".split()
    )

    def __init__(self, kind, **fields):
        super().__init__({name: 0 for name in self.FIELDS}, kind=kind, rest=b"")
        self.update(wire_version=WIRE_VERSION, layout_signature=LAYOUT_SIGNATURE)
        self.update(fields)

    def encode(self):
        return self.LAYOUT.pack(*(self[name] for name in self.FIELDS)) + self["rest"]

    @classmethod
    def decode(cls, data):
        if len(data) < cls.LAYOUT.size:
            raise Broken(f"a packet of {len(data)} bytes")
        return cls(**dict(zip(cls.FIELDS, cls.LAYOUT.unpack_from(data))), rest=data[cls.LAYOUT.size :])


def entry(kind, value, padding=None):
    """An entry of HELLO."""
    return struct.pack("<HH", kind, len(value)) + value + (bytes(-len(value) % 4) if padding is None else padding)


def hello(role, **fields):
    packet = Packet(HELLO, role=role)
    if WIRE_VERSION == 1:
        if role in (CLIENT, SERVICE):
            packet["message_bytes_max"] = MESSAGE_BYTES_MAX
    else:
        if role != SENDER:
            packet.update(capacity=CAPACITY_MAX, message_bytes_max=MESSAGE_BYTES_MAX)
        packet["rest"] = entry(1, b"raw peer of verify/hostile")
    packet.update(fields)
    return packet


# --- Segments ---------------------------------------------------------------------------------------------------------

SHRINK, GROW, WRITE, SEAL, FUTURE_WRITE = fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SEAL, 16
DATA_SEALS = SHRINK | GROW | SEAL
CONTROL_SEALS = DATA_SEALS | FUTURE_WRITE


class Memory:
    """A mapped segment. Each word is loaded and stored by one access: a memoryview of "Q" copies 8 bytes at once."""

    def __init__(self, fd, size, writable=True):
        self.fd = fd
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.map = mmap.mmap(fd, size, mmap.MAP_SHARED, protection)
        self.bytes = memoryview(self.map)
        self.words = self.bytes.cast("Q")
        self.halves = self.bytes.cast("I")

    @classmethod
    def create(cls, size, seals, content=b""):
        fd = memfd(size)
        memory = cls(fd, size)
        memory.bytes[: len(content)] = content
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return memory

    @classmethod
    def of_peer(cls, fd, what, seals, size, writable=False):
        """A segment of the other side's, checked as protocol.md says."""
        found = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if found & seals != seals:
            raise Broken(f"the {what} has seals {found:#x}")
        if os.fstat(fd).st_size != size:
            raise Broken(f"the {what} has {os.fstat(fd).st_size} bytes, wanted {size}")
        return cls(fd, size, writable)

    def load(self, offset):
        return self.words[offset // 8]

    def store(self, offset, value):
        self.words[offset // 8] = value

    def store32(self, offset, value):
        self.halves[offset // 4] = value

    def load32(self, offset):
        return self.halves[offset // 4]

    def close(self):
        for view in (self.words, self.halves, self.bytes):
            view.release()
        self.map.close()
        os.close(self.fd)


def memfd(size, content=b"", seals=0):
    fd = os.memfd_create("pelton-raw-peer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if content:
        os.pwrite(fd, content, 0)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def preamble(magic):
    return struct.pack("<8sIIQ", magic, WIRE_VERSION, PAGE_BYTES, LAYOUT_SIGNATURE)


def producer_page(capacity, limit, generation=1):
    page = bytearray(512)
    page[:24] = preamble(b"pelton-P")
    struct.pack_into("<QQI", page, 64, capacity, limit, 1)
    struct.pack_into("<QQQ", page, TAIL, START, 0, generation)
    struct.pack_into("<Q", page, PRODUCER_SLEEP, 8)
    struct.pack_into("<III", page, PRODUCER_STATE, OPEN_STATE, os.getpid(), 1)
    return page


def consumer_page(head=START):
    page = bytearray(384)
    page[:24] = preamble(b"pelton-C")
    struct.pack_into("<Q", page, HEAD, head)
    struct.pack_into("<Q", page, CONSUMER_GENERATION, 1)
    struct.pack_into("<III", page, CONSUMER_STATE, OPEN_STATE, os.getpid(), 1)
    return page


def receiver_page():
    page = bytearray(256)
    page[:24] = preamble(b"pelton-R")
    struct.pack_into("<Q", page, RECEIVER_SLEEP, 8)
    return page


def limit_of(capacity):
    return min(capacity // 2 - 32, MESSAGE_BYTES_MAX)


def record_bytes(length):
    return (length + 15) & ~7


def next_seq(seq, by=1):
    for _ in range(by):
        seq = seq % 0xFFFFFFFF + 1
    return seq


def position(offset, seq):
    return seq << 32 | offset // 8


# --- Doorbells --------------------------------------------------------------------------------------------------------


class Doorbell:
    """This side's own doorbell. The other side rings `given`: an eventfd, or one end of a socket pair."""

    def __init__(self, is_socket=False):
        self.is_socket = is_socket
        if is_socket:
            own, given = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.own, self.given = own.detach(), given.detach()
        else:
            self.own = self.given = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Edge-triggered. This side never reads the eventfd: one of EPOLLIN and EPOLLOUT holds at every value, and each
        # write is an event.
        self.events = select.epoll()
        self.events.register(self.own, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)

    def drain(self):
        """Empties the doorbell before the sleeper arms: a full socket would not ring again."""
        self.events.poll(0)
        if self.is_socket:
            with socket.socket(fileno=os.dup(self.own)) as doorbell:
                try:
                    while doorbell.recv(PACKET_BYTES, socket.MSG_DONTWAIT):
                        pass
                except OSError:
                    pass

    def close(self):
        self.events.close()
        for fd in {self.own, self.given}:
            os.close(fd)


def ring(fd):
    """Rings a doorbell of the other side's, of either kind. Ignores errors: a full doorbell already rings."""
    try:
        if os.fstat(fd).st_mode & 0o170000 == 0o140000:
            with socket.socket(fileno=os.dup(fd)) as doorbell:
                doorbell.send(b"!", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        else:
            os.write(fd, struct.pack("=Q", 1 if WIRE_VERSION == 1 else 0))
    except OSError:
        pass


# --- The endpoints of a lane ------------------------------------------------------------------------------------------


class Waker:
    """Rings the other side once in each epoch in which it sleeps."""

    def __init__(self, page, sleep_word, doorbell):
        self.page, self.sleep_word, self.doorbell, self.rung = page, sleep_word, doorbell, None

    def wake(self, is_wanted=lambda: True):
        fence()
        word = self.page.load(self.sleep_word)
        if word & ARMED and word >> 3 != self.rung and is_wanted():
            self.rung = word >> 3
            ring(self.doorbell)


class Outgoing:
    """A lane that this peer produces."""

    def __init__(self, capacity, page, data, limit):
        self.capacity, self.page, self.data, self.limit = capacity, page, data, limit
        self.offset, self.seq, self.floor, self.epoch = 0, 1, 0, 1
        self.consumer = self.receiver = self.doorbell = self.waker = None

    def attach(self, consumer, receiver, doorbell):
        self.consumer, self.receiver, self.doorbell = consumer, receiver, doorbell
        self.waker = Waker(receiver, RECEIVER_SLEEP, doorbell)

    def put(self, offset, seq, low):
        """A header or a mark of any content."""
        self.data.store(offset, seq << 32 | low)

    def head(self):
        word = self.consumer.load(HEAD)
        return (word & 0xFFFFFFFF) * 8, word >> 32

    def is_released(self):
        return self.head()[1] == self.seq

    def try_send(self, payload, marks=()):
        """Publishes one message; False if the lane is full. Of the positions that protocol.md allows it uses A and B."""
        head, _ = self.head()
        need = 8 * len(marks) + record_bytes(len(payload)) + 8
        at, end = self.offset, self.capacity if self.offset >= head else head
        jumps = at + need > end
        if jumps:
            if self.offset < head or need > head or head < self.floor:
                return False
            at = 0
        words = [MARK | kind << 28 | value for kind, value in marks] + [len(payload)]
        behind = at + 8 * len(marks) + record_bytes(len(payload))
        first = at + 8 * len(words)
        self.data.bytes[first : first + len(payload)] = payload
        self.data.store(behind, 0)
        for i in reversed(range(len(words))):
            if jumps or i > 0:
                self.put(at + 8 * i, self.seq, words[i])
        self.put(self.offset, self.seq, MARK if jumps else words[0])
        self.advance(behind)
        return True

    def advance(self, offset, by=1):
        """Publishes all records before `offset`, and wakes the receiver."""
        self.offset, self.seq = offset, next_seq(self.seq, by)
        self.page.store(TAIL, position(self.offset, self.seq))
        self.waker.wake()

    def arm(self):
        self.epoch += 1
        self.page.store(ROOM_SEQ, self.seq)
        self.page.store(PRODUCER_SLEEP, self.epoch << 3 | ARMED)
        fence()

    def disarm(self):
        self.page.store(PRODUCER_SLEEP, self.epoch << 3)

    def close(self):
        for memory in (self.page, self.data, self.consumer, self.receiver):
            if memory:
                memory.close()
        if self.doorbell is not None:
            os.close(self.doorbell)


class Incoming:
    """A lane that this peer consumes."""

    def __init__(self, page, receiver):
        self.page, self.receiver = page, receiver
        self.offset, self.seq, self.epoch = 0, 1, 1
        self.capacity = self.limit = 0
        self.producer = self.data = self.doorbell = self.waker = None

    def attach(self, packet, producer, doorbell, data):
        self.capacity, self.limit = packet["capacity"], packet["message_bytes_max"]
        self.producer, self.doorbell, self.data = producer, doorbell, data
        self.waker = Waker(producer, PRODUCER_SLEEP, doorbell)

    def try_receive(self):
        """The next message, copied and released; None if there is none."""
        offset, rank = self.offset, -1
        while True:
            word = self.data.load(offset)
            seq, low = word >> 32, word & 0xFFFFFFFF
            if word == 0 and rank < 0:
                return None
            if seq != self.seq:
                raise Broken(f"seq {seq} stands at {offset}, wanted {self.seq}")
            if not low & MARK:
                break
            kind, value = low >> 28 & 7, low & 0xFFFFFFF
            if kind == 3 or kind <= rank:
                raise Broken(f"a mark of kind {kind} stands at {offset}")
            rank, offset = kind, value * 64 if kind == JUMP else offset + 8
            if offset + 16 > self.capacity:
                raise Broken(f"a mark leads to {offset}")
        if low > self.limit or offset + record_bytes(low) + 8 > self.capacity:
            raise Broken(f"a message of {low} bytes stands at {offset}")
        payload = bytes(self.data.bytes[offset + 8 : offset + 8 + low])
        self.offset, self.seq = offset + record_bytes(low), next_seq(self.seq)
        self.page.store(HEAD, position(self.offset, self.seq))
        self.waker.wake(lambda: (self.seq - self.producer.load(ROOM_SEQ)) & 0xFFFFFFFF < 1 << 31)
        return payload

    def arm(self):
        self.epoch += 1
        self.receiver.store(RECEIVER_SLEEP, self.epoch << 3 | ARMED)
        fence()

    def disarm(self):
        self.receiver.store(RECEIVER_SLEEP, self.epoch << 3)

    def close(self):
        for memory in (self.page, self.receiver, self.producer, self.data):
            if memory:
                memory.close()
        if self.doorbell is not None:
            os.close(self.doorbell)


# --- The handshake ----------------------------------------------------------------------------------------------------


class Peer:
    """The common part of all roles: a socket, and the hook for lies.

    `lie` maps a step to a function: `"HELLO"`, `"PRODUCER"`, `"CONSUMER"`, `"READY"`: function(peer, packet, fds) changes the packet that is about to
    be sent, or returns a list of (bytes, fds) to send in its place. `"producer page"`, `"consumer page"`, `"receiver page"`: function(peer, bytearray).
    `"connected"`: function(peer), before the first packet.
    """

    capacity = 1 << 16
    limit = None
    generation = 1
    head = tail = START

    def __init__(self, lie=None, **settings):
        self.lie = lie or {}
        self.socket = self.doorbell = self.outgoing = self.incoming = None
        self.loose = []  # descriptors that are ours to close and belong to nothing else
        self.uid = None
        self.is_socket_doorbell = False
        self.__dict__.update(settings)
        if self.limit is None:
            self.limit = limit_of(self.capacity)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def owns(self, fd):
        """Closes this descriptor with the peer."""
        self.loose.append(fd)
        return fd

    def close(self):
        for owner in (self.socket, self.outgoing, self.incoming, self.doorbell):
            if owner:
                owner.close()
        for fd in self.loose:
            os.close(fd)
        self.socket = self.outgoing = self.incoming = self.doorbell = None
        self.loose = []

    # Packets.

    def connect(self, path):
        """Connects, and makes the handshake as the connecting side."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(DEADLINE_SECONDS)
        until = time.monotonic() + DEADLINE_SECONDS
        while True:
            try:
                self.connect_socket(path)
                break
            except (BlockingIOError, FileNotFoundError, ConnectionRefusedError):
                # Its backlog is full, or it does not listen yet.
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
        self.shake_hands(listens=False)
        return self

    def connect_socket(self, path):
        """Connects as the user `uid`, if that is set: the kernel records the credentials (SO_PEERCRED)."""
        if self.uid is None:
            self.socket.connect(path)
            return
        own = os.geteuid()
        os.seteuid(self.uid)
        try:
            self.socket.connect(path)
        finally:
            os.seteuid(own)

    def accept(self, listener):
        """Accepts a connection, and makes the handshake as the listener."""
        listener.settimeout(DEADLINE_SECONDS)
        return self.accepted(listener.accept()[0])

    def accepted(self, connection):
        self.socket = connection
        self.socket.settimeout(DEADLINE_SECONDS)
        self.shake_hands(listens=True)
        return self

    def shake_hands(self, listens):
        self.doorbell = Doorbell(self.is_socket_doorbell)
        if "connected" in self.lie:
            self.lie["connected"](self)
        own = hello(self.role)
        if not listens:
            self.send(own)
        theirs, _ = self.receive(HELLO, 0)
        self.theirs = theirs
        if theirs["role"] != {SENDER: RECEIVER, RECEIVER: SENDER, CLIENT: SERVICE, SERVICE: CLIENT}[self.role]:
            raise Broken(f"the other side is of role {theirs['role']}")
        if listens:
            self.send(own)
        self.make_lanes()
        # Of two new sides the connecting one sends READY first.
        if listens:
            self.receive(READY, 0)
        self.send(Packet(READY))
        if not listens:
            self.receive(READY, 0)

    def send(self, packet, fds=()):
        packets = None
        fds = list(fds)
        step = KINDS[packet["kind"]]
        if step in self.lie:
            packets = self.lie[step](self, packet, fds)
        for data, rights in packets if packets is not None else [(packet.encode(), fds)]:
            self.send_raw(data, rights)

    def send_raw(self, data, fds=()):
        """Sends a packet. The kernel refuses it until the other side accepts descriptors (SO_PASSRIGHTS): retries for a while."""
        until = time.monotonic() + 1
        while True:
            try:
                # One system call for each packet, so none is ever sent in part.
                if fds:
                    socket.send_fds(self.socket, [data], fds, socket.MSG_NOSIGNAL)
                else:
                    self.socket.send(data, socket.MSG_NOSIGNAL)
                return
            except PermissionError:
                if time.monotonic() > until:
                    raise HungUp("the kernel let no descriptor through") from None
                time.sleep(0.001)
            except (BrokenPipeError, ConnectionResetError):
                # It may have sent the reason before it hung up.
                self.receive(None, 0)

    def receive_raw(self):
        """The next packet and its descriptors. No bytes: the other side has hung up."""
        try:
            return self.receive_once()
        except ConnectionResetError:
            # It closed with packets of ours unread. The kernel reports that first, once; its earlier packets are still
            # there.
            return self.receive_once()

    def receive_once(self):
        data, fds, _, _ = socket.recv_fds(self.socket, 2 * PACKET_BYTES, DESCRIPTORS_MAX, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
        return data, fds

    def receive(self, kind, count):
        """The next packet, which must be of `kind`, with so many descriptors."""
        data, fds = self.receive_raw()
        self.loose += fds
        if not data:
            raise HungUp()
        packet = Packet.decode(data)
        if packet["kind"] == REFUSED:
            raise Refused(packet["rest"].decode())
        if (packet["wire_version"], packet["layout_signature"]) != (WIRE_VERSION, LAYOUT_SIGNATURE):
            raise Broken(f"wire version {packet['wire_version']}, layout {packet['layout_signature']:#x}")
        if (packet["kind"], len(fds)) != (kind, count):
            raise Broken(f"a packet of kind {packet['kind']} came with {len(fds)} descriptors, wanted kind {kind} with {count}")
        return packet, fds

    # Lanes.

    def page(self, what, content):
        if f"{what} page" in self.lie:
            self.lie[f"{what} page"](self, content)
        return Memory.create(PAGE_BYTES, CONTROL_SEALS, content)

    def make_outgoing(self):
        self.outgoing = Outgoing(
            self.capacity,
            self.page("producer", producer_page(self.capacity, self.limit, self.generation)),
            Memory.create(self.capacity, DATA_SEALS),
            self.limit,
        )
        packet = Packet(
            PRODUCER,
            capacity=self.capacity,
            message_bytes_max=self.limit,
            generation=self.generation,
            head=self.head,
            tail=self.tail,
        )
        self.send(packet, [self.outgoing.page.fd, self.doorbell.given, self.outgoing.data.fd])
        _, fds = self.receive(CONSUMER, 3)
        consumer, receiver, doorbell = self.take(fds)
        try:
            self.outgoing.consumer = Memory.of_peer(consumer, "consumer page", CONTROL_SEALS, PAGE_BYTES)
            self.outgoing.receiver = Memory.of_peer(receiver, "receiver page", CONTROL_SEALS, PAGE_BYTES)
        finally:
            self.outgoing.attach(self.outgoing.consumer, self.outgoing.receiver, doorbell)
        for memory, magic in ((self.outgoing.consumer, b"pelton-C"), (self.outgoing.receiver, b"pelton-R")):
            if bytes(memory.bytes[:24]) != preamble(magic):
                raise Broken(f"a page begins with {bytes(memory.bytes[:24])}")

    def make_incoming(self):
        packet, fds = self.receive(PRODUCER, 3)
        page, doorbell, data = self.take(fds)
        consumer = self.page("consumer", consumer_page(packet["head"]))
        receiver = self.page("receiver", receiver_page())
        self.incoming = Incoming(consumer, receiver)
        producer = Memory.of_peer(page, "producer page", CONTROL_SEALS, PAGE_BYTES)
        # A hostile consumer maps the data writable: nothing forbids it.
        self.incoming.attach(packet, producer, doorbell, Memory.of_peer(data, "data", DATA_SEALS, packet["capacity"], writable=True))
        figures = struct.unpack_from("<QQI", producer.bytes, 64)
        if figures != (packet["capacity"], packet["message_bytes_max"], 1):
            raise Broken(f"the producer's page says {figures}, its packet {packet}")
        self.send(Packet(CONSUMER), [consumer.fd, receiver.fd, self.doorbell.given])

    def take(self, fds):
        """Passes the descriptors to a lane."""
        self.loose = [fd for fd in self.loose if fd not in fds]
        return fds

    # Waiting.

    def wait(self, lane, check, seconds=DEADLINE_SECONDS):
        """Sleeps as protocol.md says until `check` returns a value, and returns it. Raises HungUp, Refused or TimeoutError."""
        until = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self.doorbell.events.fileno(), select.POLLIN)
        poll.register(self.socket.fileno(), select.POLLIN)
        while not (found := check()):
            self.doorbell.drain()
            lane.arm()
            found = check()
            ready = [] if found else poll.poll(max(until - time.monotonic(), 0) * 1000)
            lane.disarm()
            if found:
                break
            if not ready:
                raise TimeoutError(f"nothing came for {seconds} s")
            if any(fd == self.socket.fileno() for fd, _ in ready):
                # A hang-up. Messages before it come first.
                if found := check():
                    break
                self.receive(None, 0)
        return found

    def wait_for_hang_up(self, seconds=DEADLINE_SECONDS):
        """Waits until the other side ends the connection, and returns the text of its refusal, if it sent one."""
        self.socket.settimeout(seconds)
        while True:
            data, fds = self.receive_raw()
            self.loose += fds
            if not data:
                return None
            if len(data) >= 80 and data[0] == REFUSED:
                return data[80:].decode()


class Sender(Peer):
    role = SENDER

    def make_lanes(self):
        self.make_outgoing()

    def send_message(self, payload, marks=()):
        self.wait(self.outgoing, lambda: self.outgoing.try_send(payload, marks))

    def send_descriptors(self, payload, fds):
        self.send_raw(Packet(DESCRIPTORS, seq=self.outgoing.seq).encode(), fds)
        self.send_message(payload, [(DESCRIPTORS_MARK, len(fds))])

    def wait_released(self):
        self.wait(self.outgoing, self.outgoing.is_released)

    def be_honest(self):
        """Checks that the victim still serves this peer: it receives and releases a message."""
        self.send_message(b"honest message")
        self.wait_released()

    def say_closed(self):
        self.outgoing.page.store32(PRODUCER_STATE, CLOSED_STATE)
        self.outgoing.page.store(PRODUCER_SLEEP, self.outgoing.epoch << 3 | CLOSED)
        ring(self.outgoing.doorbell)


class Receiver(Peer):
    role = RECEIVER

    def make_lanes(self):
        self.make_incoming()

    def receive_message(self):
        return self.wait(self.incoming, lambda: (m := self.incoming.try_receive()) is not None and (m,))[0]

    def be_honest(self):
        self.receive_message()


def call_header(kind, call_id, flags=0, code=0, deadline=0, zero=0):
    return CALL.pack(call_id, kind, flags, zero, code, deadline)


class Link(Peer):
    """The common part of a client and a service: two lanes."""

    def send_record(self, record):
        self.wait(self.outgoing, lambda: self.outgoing.try_send(record))

    def receive_record(self):
        return self.wait(self.incoming, lambda: (m := self.incoming.try_receive()) is not None and (m,))[0]


class Client(Link):
    role = CLIENT

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.calls = 0

    def make_lanes(self):
        self.make_outgoing()
        self.make_incoming()

    def new_id(self, slot=0):
        self.calls += 1
        return self.calls << 32 | slot

    def submit(self, payload, slot=0, deadline=0):
        call_id = self.new_id(slot)
        self.send_record(call_header(REQUEST, call_id, deadline=deadline) + payload)
        return call_id

    def answer(self, call_id):
        """The last answer to a call: its kind, its code and all of its payload. Drops answers to other calls."""
        payload = b""
        while True:
            record = self.receive_record()
            found, kind, flags, zero, code, _ = CALL.unpack_from(record)
            if zero or not REPLY <= kind <= DRAINED:
                raise Broken(f"an answer begins with {record[:24]}")
            if kind == DRAINED:
                raise HungUp("drained")
            if found != call_id:
                continue
            payload += record[24:]
            if kind != PART and not flags & MORE:
                return kind, code, payload

    def call(self, payload, slot=0):
        return self.answer(self.submit(payload, slot))

    def be_honest(self):
        kind, _, payload = self.call(b"honest request", slot=1023)
        if (kind, payload) != (REPLY, b"honest request"):
            raise Broken(f"an answer of kind {kind} came: {payload}")


class Service(Link):
    role = SERVICE

    def make_lanes(self):
        self.make_incoming()
        self.make_outgoing()

    def receive_request(self):
        """The next request: its id and payload."""
        payload = b""
        while True:
            record = self.receive_record()
            call_id, kind, flags, _, _, _ = CALL.unpack_from(record)
            if kind == REQUEST:
                payload += record[24:]
                if not flags & MORE:
                    return call_id, payload

    def reply(self, call_id, payload):
        self.send_record(call_header(REPLY, call_id) + payload)

    def be_honest(self):
        self.reply(*self.receive_request())


def listen(path):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    return listener


def socket_of(name):
    """The socket path of a short name, or of `unix:PATH`."""
    if name.startswith("unix:"):
        return name[5:]
    directory = os.environ.get("XDG_RUNTIME_DIR", "")
    if directory.startswith("/"):
        directory = os.path.join(directory, "pelton")
    else:
        directory = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"pelton-{os.geteuid()}")
    found = sorted(os.listdir(os.path.join(directory, name)))
    if not found:
        raise FileNotFoundError(errno.ENOENT, "nobody listens", name)
    return os.path.join(directory, name, found[0])
