"""The victims, a row each, and the bystander: an honest peer of the ordinary library that works with the same victim throughout.

A row says which role attacks the victim, and how the victim is started. `{name}` in a command is the name to listen or connect under.

- A victim that **listens** (a receiver of many, a service) runs through all lies. Its bystander exchanges numbered lines with it.
- A victim that **connects** (a sender, a client) is started for each lie, and has to end by itself, with an exit code and not by a signal.
  nginx is one process for all lies: each lie is a request to it, and its bystander is a request that calls an honest service.
"""

import ctypes
import os
import queue
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time

from peer import Client, HungUp, Receiver, Refused, Sender, Service, listen

TARGET = os.environ.get("CARGO_TARGET_DIR", "target")
TOOL = os.environ.get("PELTON_TOOL", f"{TARGET}/debug/pelton")
PREFIX = os.environ.get("PELTON_PREFIX", f"{TARGET}/installed-debug")
DRIVERS = os.environ.get("PELTON_DRIVERS", f"{TARGET}/drivers")

# Catches hangs only.
HANG_SECONDS = 30
# How long a victim that connects waits by itself, if the raw peer leaves it waiting.
VICTIM_SECONDS = "5"


def driver(language, verb, count):
    return [f"{DRIVERS}/{language}/driver", verb, "{name}", str(count), "64"]


# More than one round has. Erlang's driver makes a list of so many numbers.
ENDLESS = 1_000_000
# name: (the role that attacks, the command)
VICTIMS = {
    "tool recv": (Sender, [TOOL, "recv", "--follow", "{name}"]),
    "tool serve": (Client, [TOOL, "serve", "{name}", "--co-process", "--exec", "cat"]),
    "tool send": (Receiver, [TOOL, "send", "--timeout", VICTIM_SECONDS, "{name}"]),
    "tool call": (Service, [TOOL, "call", "--timeout", VICTIM_SECONDS, "--frame", "lines", "{name}"]),
}
for language in ("go", "c", "erlang", "lisp", "python"):
    VICTIMS[f"{language} recv"] = (Sender, driver(language, "gather", ENDLESS))
    VICTIMS[f"{language} serve"] = (Client, driver(language, "serve", ENDLESS))
    VICTIMS[f"{language} send"] = (Receiver, driver(language, "send", 3))
    VICTIMS[f"{language} call"] = (Service, driver(language, "call", 3))
VICTIMS["nginx call"] = (Service, [f"{DRIVERS}/nginx/driver", "call", "{name}", "3", "64"])

# The same, attacked by another user that the victim allows: then the doorbells are sockets, and the limits smaller.
# Only root can act as another user.
OTHER_UID = 12347
if os.geteuid() == 0:
    VICTIMS["tool recv by another user"] = (Sender, VICTIMS["tool recv"][1] + ["--uid", str(OTHER_UID)])
    VICTIMS["tool serve by another user"] = (Client, VICTIMS["tool serve"][1] + ["--uid", str(OTHER_UID)])

INPUT = "".join(f"line {i}\n" for i in range(3)).encode()


def is_there(name):
    return os.access(VICTIMS[name][1][0], os.X_OK)


def dies_with_us():
    """Has the kernel kill a child with this process; without that the child would remain."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def start(command, log, seconds=None, **settings):
    environment = dict(os.environ, LD_LIBRARY_PATH=f"{PREFIX}/lib", PELTON_LIBRARY=f"{PREFIX}/lib/libpelton.so")
    environment["PELTON_SECONDS"] = str(seconds or 100000)
    settings.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.Popen(command, stderr=log, env=environment, preexec_fn=dies_with_us, **settings)


def end(process):
    """Ends a process that this one has started, and returns its exit code."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


class Failure(Exception):
    """A lie had an effect that it must not have."""


class Bystander:
    """Exchanges numbered lines, one at a time: `write` gives a line to one process, `lines` brings what another one has written."""

    def __init__(self, writes, reads, is_service):
        self.is_service = is_service
        self.writes, self.reads = writes, reads
        self.count = 0
        self.seconds = []  # of each exchange
        self.failure = None
        self.arrived = queue.Queue()
        self.is_over = threading.Event()
        self.threads = [threading.Thread(target=self.read, daemon=True), threading.Thread(target=self.work, daemon=True)]
        for thread in self.threads:
            thread.start()

    def read(self):
        rest = b""
        while data := os.read(self.reads.fileno(), 1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            # The bystander ignores other peers' messages, which can be very long.
            rest = rest[:100]
            for line in lines:
                if line.startswith(b"bystander "):
                    self.arrived.put(line)
        self.arrived.put(None)

    def work(self):
        while not self.is_over.is_set():
            line = b"bystander %d" % (self.count + 1)
            began = time.monotonic()
            try:
                os.write(self.writes.fileno(), line + b"\n")
                found = self.arrived.get(timeout=HANG_SECONDS)
            except (OSError, queue.Empty) as error:
                found = error
            if found != line:
                if not self.is_over.is_set():
                    self.failure = f"the bystander wrote `{line.decode()}` and found {found!r}"
                return
            self.seconds.append(time.monotonic() - began)
            self.count += 1
            self.is_over.wait(0.001)

    def check(self, exchanges=3):
        """Waits until so many more exchanges have succeeded."""
        target = self.count + exchanges
        until = time.monotonic() + HANG_SECONDS + 10
        while self.count < target and not self.failure:
            if time.monotonic() > until:
                raise Failure("the bystander hangs")
            time.sleep(0.001)
        if self.failure:
            raise Failure(self.failure)

    def stop(self):
        self.is_over.set()


def descriptors_of(pid):
    """The target of each descriptor, sorted."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            pass
    return sorted(found)


def check_descriptors(pid, before):
    """Waits until the process has no more descriptors than before: some are closed by threads of their own."""
    until = time.monotonic() + HANG_SECONDS
    while len(found := descriptors_of(pid)) > len(before):
        if time.monotonic() > until:
            for known in before:
                if known in found:
                    found.remove(known)
            raise Failure(f"descriptors remain open in the victim: {found}")
        time.sleep(0.002)


def memory_of(pid):
    """Resident bytes."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Place:
    """A temporary directory of one victim's, which must be empty at the end."""

    def __init__(self, log):
        self.path = tempfile.mkdtemp(prefix="pelton-hostile-")
        self.log = log
        # Where victims make temporary files.
        os.environ["TMPDIR"] = self.path
        self.shared_memory = sorted(os.listdir("/dev/shm"))

    def check_empty(self):
        left = os.listdir(self.path)
        if left:
            raise Failure(f"left in {self.path}: {left}")
        # Benchmarks and crash tests of others may run beside this; nothing here uses names like theirs.
        others = ("pelton-bench", "pelton-crash-test")
        left = {name for name in os.listdir("/dev/shm") if not name.startswith(others)} - set(self.shared_memory)
        if left:
            raise Failure(f"left in /dev/shm: {sorted(left)}")

    def remove(self):
        shutil.rmtree(self.path, ignore_errors=True)


class Listening:
    """A victim that listens, with its bystander."""

    def __init__(self, name, place):
        self.role, command = VICTIMS[name]
        self.place = place
        self.socket = f"{place.path}/socket"
        unix = f"unix:{self.socket}"
        self.is_service = self.role is Client
        self.process = start([part.format(name=unix) for part in command], place.log, stdout=subprocess.PIPE)
        self.wait_for_socket()
        # What the raw peer is.
        self.settings = {}
        if "another user" in name:
            os.chmod(place.path, 0o755)
            os.chmod(self.socket, 0o666)
            self.settings = {"uid": OTHER_UID, "is_socket_doorbell": True}
        bystander = [TOOL, "call", "--frame", "lines", unix] if self.is_service else [TOOL, "send", unix]
        self.honest = start(bystander, place.log, stdin=subprocess.PIPE, stdout=subprocess.PIPE if self.is_service else subprocess.DEVNULL)
        self.bystander = Bystander(self.honest.stdin, self.honest.stdout if self.is_service else self.process.stdout, self.is_service)
        if self.is_service:
            threading.Thread(target=self.process.stdout.read, daemon=True).start()
        self.bystander.check()

    def wait_for_socket(self):
        until = time.monotonic() + HANG_SECONDS
        while not os.path.exists(self.socket):
            if self.process.poll() is not None or time.monotonic() > until:
                raise Failure(f"the victim does not listen: exit code {self.process.poll()}")
            time.sleep(0.002)

    def settle(self):
        """Serves the first peers, after which the victim has all that it keeps for good."""
        self.bystander.check()
        self.descriptors = descriptors_of(self.process.pid)

    def check(self):
        if self.process.poll() is not None:
            raise Failure(f"the victim has ended with {self.process.poll()}")
        self.bystander.check()
        check_descriptors(self.process.pid, self.descriptors)

    def memory(self):
        return memory_of(self.process.pid)

    def close(self):
        self.bystander.stop()
        for process in (self.honest, self.process):
            if process.stdin:
                process.stdin.close()
            end(process)
        if self.process.returncode < 0 and os.path.exists(self.socket):
            # A driver ends by the signal, and its socket stays.
            os.unlink(self.socket)


class Connecting:
    """Victims that connect, one for each lie: what happened to one is its exit code."""

    # Whether a victim that has got its answer keeps the connection: there is no end to wait for then.
    stays_connected = False

    def __init__(self, name, place):
        self.role, self.command = VICTIMS[name]
        self.settings = {}
        self.place = place
        self.count = 0
        self.process = None

    def settle(self):
        pass

    def begin(self):
        """Listens as the raw peer, and starts a victim that connects."""
        self.count += 1
        self.socket = f"{self.place.path}/{self.count}"
        self.listener = listen(self.socket)
        command = [part.format(name=f"unix:{self.socket}") for part in self.command]
        self.process = start(command, self.place.log, VICTIM_SECONDS, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self.process.stdin.write(INPUT)
        self.process.stdin.close()
        return self.listener

    def is_done(self):
        return self.process.poll() is not None

    def serve_honestly(self):
        """A victim whose peer has hung up may connect again: now an honest peer listens."""
        self.listener.settimeout(0.01)
        until = time.monotonic() + HANG_SECONDS
        while not self.is_done() and time.monotonic() < until:
            try:
                waiting, _ = self.listener.accept()
            except TimeoutError:
                continue
            with self.role() as peer:
                try:
                    peer.accepted(waiting)
                    while True:
                        peer.be_honest()
                        if self.stays_connected:
                            break
                except (HungUp, Refused, OSError):
                    pass

    def stop_listening(self):
        os.unlink(self.socket)
        self.listener.close()

    def check(self):
        try:
            code = self.process.wait(HANG_SECONDS)
        except subprocess.TimeoutExpired:
            raise Failure("the victim hangs") from None
        if not 0 <= code <= 6:
            raise Failure(f"the victim ended with {code}")

    def memory(self):
        return 0

    def close(self):
        if self.process:
            end(self.process)


class Nginx(Connecting):
    """One nginx for all lies, as conformance/nginx has it. Each lie answers a request; the bystander's requests call an honest service."""

    stays_connected = True

    def __init__(self, name, place):
        super().__init__(name, place)
        out = os.path.abspath(f"{DRIVERS}/nginx")
        self.made = f"{place.path}/nginx"
        os.mkdir(self.made)
        with open(f"{out}/nginx.conf") as file:
            text = file.read().replace("OUT", out).replace("MADE", self.made)
        with open(f"{self.made}/nginx.conf", "w") as file:
            file.write(text)
        self.nginx = start(["nginx", "-p", self.made, "-c", f"{self.made}/nginx.conf"], place.log)
        self.service = start([TOOL, "serve", f"unix:{place.path}/honest", "--co-process", "--exec", "cat"], place.log)
        until = time.monotonic() + HANG_SECONDS
        while not (os.path.exists(f"{self.made}/http") and os.path.exists(f"{place.path}/honest")):
            if time.monotonic() > until:
                raise Failure("nginx does not listen")
            time.sleep(0.01)
        self.ask_honest()
        # With the client of the bystander's service, and no other.
        self.descriptors = descriptors_of(self.nginx.pid)

    def ask(self, path, answers):
        """One request; its status goes to the queue."""
        try:
            with socket.socket(socket.AF_UNIX) as http:
                http.settimeout(HANG_SECONDS)
                http.connect(f"{self.made}/http")
                http.sendall(f"GET /call?name=unix:{path}&count=1&sizes=64 HTTP/1.0\r\nHost: nginx\r\n\r\n".encode())
                text = b""
                while data := http.recv(1 << 16):
                    text += data
            answers.put(text.split(b"\r\n")[0])
        except OSError as error:
            answers.put(repr(error).encode())

    def ask_honest(self):
        answers = queue.Queue()
        self.ask(f"{self.place.path}/honest", answers)
        if b"200" not in (status := answers.get()):
            raise Failure(f"nginx answers the bystander with `{status.decode()}`")

    def begin(self):
        # A name for each lie: nginx makes no new connection to one that has just refused.
        self.count += 1
        self.socket = f"{self.place.path}/{self.count}"
        self.listener = listen(self.socket)
        self.answers = queue.Queue()
        threading.Thread(target=self.ask, args=(self.socket, self.answers), daemon=True).start()
        self.ask_honest()
        return self.listener

    def is_done(self):
        return not self.answers.empty()

    def check(self):
        self.ask_honest()
        try:
            status = self.answers.get(timeout=HANG_SECONDS)
        except queue.Empty:
            raise Failure("nginx never answers the request whose service lies") from None
        if b"200" not in status and b"500" not in status:
            raise Failure(f"nginx answers with `{status.decode()}`")
        check_descriptors(self.nginx.pid, self.descriptors)

    def memory(self):
        return memory_of(self.nginx.pid)

    def close(self):
        for process in (self.nginx, self.service):
            end(process)
        shutil.rmtree(self.made, ignore_errors=True)


def victim(name, place):
    role = VICTIMS[name][0]
    if name.startswith("nginx"):
        return Nginx(name, place)
    return Listening(name, place) if role in (Sender, Client) else Connecting(name, place)
