#!/usr/bin/env python3
"""Python in the workloads `stream` and `roundtrip` of pelton-bench: multiprocessing.Queue and Pipe, and pelton.

As their documentation recommends for messages that are bytes: a Queue takes any object, so it pickles them and a thread of its own
writes them to a pipe. A Pipe's connections have `send_bytes` and `recv_bytes`, which do not pickle. One way the Pipe has
`duplex=False`, a pipe; there and back it is the default, a socket pair, and of Queues there are two. Queues are not bounded, as by
default. They wait in their own way: they sleep. So does pelton, whose `send` and `recv` wait as they do by default.

One process starts the other, since a Queue can only be inherited; both open pelton's endpoints afterwards. The first one
receives, or asks, on the first CPU; its child sends, or answers, on the second. The contract with pelton-bench is that
of every side: see bench/src/side.rs and bench/src/payload.rs. The side compares every
message's number and size, and every byte of the warm-up's and of a stream's last.
"""

import ctypes
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time

WARM_UP = 16


class Queue:
    """One direction."""

    def __init__(self):
        queue = multiprocessing.Queue()
        self.send, self.receive = queue.put, queue.get

    def open(self):
        """Once in its process, after the fork."""


class Pipe:
    """One direction, or one endpoint of two."""

    def __init__(self, receiving, sending):
        self.send, self.receive = sending.send_bytes, receiving.recv_bytes

    def open(self):
        """Once in its process, after the fork."""


class Pelton:
    """The parent's or the child's endpoints: a receiver and a sender. A stream leaves one of them out."""

    def __init__(self, opens):
        self.opens = opens
        self.send = self.receive = None

    def open(self):
        for open_endpoint in self.opens:
            open_endpoint(self)


def directions(name, round_trip):
    """The parent's and the child's directions: each sends by its own and receives by the other's, or by the one of a stream."""
    if name == "multiprocessing-queue":
        there = Queue()
        return (there, there) if not round_trip else crossed(Queue(), Queue())
    if name == "pelton-python":
        return pelton_directions(round_trip)
    if not round_trip:
        receiving, sending = multiprocessing.Pipe(duplex=False)
        return Pipe(receiving, sending), Pipe(receiving, sending)
    ours, theirs = multiprocessing.Pipe()
    return Pipe(ours, ours), Pipe(theirs, theirs)


def pelton_directions(round_trip):
    import pelton

    directory = tempfile.TemporaryDirectory()

    def receives(name):
        def open_receiver(side):
            with pelton.listen(f"unix:{directory.name}/{name}") as listener:
                side.receive = listener.accept_receiver(10).recv

        return open_receiver

    def sends(name):
        def open_sender(side):
            side.send = pelton.Sender.connect(f"unix:{directory.name}/{name}", timeout=10).send

        return open_sender

    # The parent receives what its child sends first: one of the two listens while the other one connects.
    there, back = Pelton([receives("to-parent")]), Pelton([sends("to-parent")])
    if round_trip:
        there.opens.append(sends("to-child"))
        back.opens.append(receives("to-child"))
    there.directory = directory
    return there, back


def crossed(there, back):
    parent, child = Queue.__new__(Queue), Queue.__new__(Queue)
    parent.send, parent.receive = there.send, back.receive
    child.send, child.receive = back.send, there.receive
    return parent, child


class Sizes:
    """The same sequence as in all sides: that of limits.c."""

    def __init__(self, sizes):
        self.least, self.most, self.seed = sizes["min"], sizes["max"], 1

    def next(self):
        if self.least == self.most:
            return self.most
        self.seed = (self.seed * 1664525 + 1013904223) & 0xFFFFFFFF
        return self.least + (self.seed >> 8) % (self.most - self.least + 1)


def pattern(size):
    return bytes((at * 31 + (at >> 8) + 7) & 0xFF for at in range(size))


def message(tail, number, size):
    """A message with its number in the first eight bytes, or as much of that as fits."""
    head = number.to_bytes(8, "little")
    return head + tail[8:size] if size >= 8 else head[:size]


def usage():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return [used.ru_utime + used.ru_stime, used.ru_nvcsw, used.ru_nivcsw]


def busy(ns):
    if ns:
        end = time.monotonic_ns() + ns
        while time.monotonic_ns() < end:
            pass


def pin(cpus, index):
    if len(cpus) > index:
        os.sched_setaffinity(0, {cpus[index]})


def check(condition, words):
    if not condition:
        raise RuntimeError(words)


class Side:
    def __init__(self, job, channel):
        self.sizes, self.send, self.receive = job["sizes"], channel.send, channel.receive
        self.tail = pattern(self.sizes["max"])
        self.delay_ns, self.rate = job["delay_us"] * 1000, job["calls"]["rate"]

    def sender(self, count):
        sizes, send, tail = Sizes(self.sizes), self.send, self.tail
        fixed = sizes.least == sizes.most and sizes.most >= 8
        if fixed:
            rest = tail[8:]
            for number in range(count):
                send(number.to_bytes(8, "little") + rest)
        else:
            for number in range(count):
                send(message(tail, number, sizes.next()))

    def receiver(self, count, whole):
        sizes, receive, tail, total = Sizes(self.sizes), self.receive, self.tail, 0
        for number in range(count):
            came, size = receive(), sizes.next()
            total += len(came)
            if whole or number == count - 1:
                check(came == message(tail, number, size), f"message {number} is not the one that was sent")
            elif len(came) != size or came[:8] != number.to_bytes(8, "little")[:size]:
                raise RuntimeError(f"message {number} is not the one that was sent: lost, doubled or out of order")
        return total

    def asker(self, count, times):
        sizes, tail, total, took = Sizes(self.sizes), self.tail, 0, []
        send, receive, now, begin = self.send, self.receive, time.monotonic_ns, time.monotonic_ns() + 200_000
        for number in range(count):
            out = message(tail, number, sizes.next())
            if self.rate:
                start = begin + number * 1_000_000_000 // self.rate
                left = start - now() - 200_000
                if left > 0:
                    time.sleep(left / 1e9)
                while now() < start:
                    pass
            else:
                start = now()
                busy(self.delay_ns)
            send(out)
            check(receive() == out, f"round {number} did not come back as it went")
            if times:
                took.append(max(now() - start - (0 if self.rate else 2 * self.delay_ns), 0))
            total += len(out)
        return total, took

    def answerer(self, count):
        sizes, send, receive, tail = Sizes(self.sizes), self.send, self.receive, self.tail
        for number in range(count):
            came, size = receive(), sizes.next()
            busy(self.delay_ns)
            send(came)
            if len(came) != size or came[:8] != number.to_bytes(8, "little")[:size]:
                raise RuntimeError(f"round {number} did not come as it was sent")


def child(job, channel, orders, parent):
    """Sends, or answers, on its parent's orders."""
    # PR_SET_PDEATHSIG: it ends with its parent, even if that is killed; immediately, if the parent is gone already.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        return
    pin(job["cpus"], 1)
    channel.open()
    side, round_trip = Side(job, channel), job["workload"] == "roundtrip"
    try:
        while (count := orders.recv()) is not None:
            before, start = usage(), time.monotonic_ns()
            side.answerer(count) if round_trip else side.sender(count)
            orders.send((start, [b - a for a, b in zip(before, usage())]))
    except (EOFError, KeyboardInterrupt):
        pass


def main():
    job = json.loads(sys.argv[3])
    check(job["workload"] in ("stream", "roundtrip"), f"it has no part in {job['workload']}")
    check(job["wait"] == "block", f"it waits only by sleeping, found the wait {job['wait']}: write block")
    round_trip = job["workload"] == "roundtrip"
    ours, theirs = directions(sys.argv[1], round_trip)
    orders, child_orders = multiprocessing.Pipe()
    other = multiprocessing.get_context("fork").Process(target=child, args=(job, theirs, child_orders, os.getpid()), daemon=True)
    other.start()
    child_orders.close()
    pin(job["cpus"], 0)
    ours.open()
    side = Side(job, ours)

    def go(count, times, whole):
        before, start = usage(), time.monotonic_ns()
        orders.send(count)
        if round_trip:
            start = time.monotonic_ns()
            total, took = side.asker(count, times)
            end = time.monotonic_ns()
            _, used = orders.recv()
        else:
            total, took = side.receiver(count, whole), []
            end = time.monotonic_ns()
            start, used = orders.recv()
        own = [b - a for a, b in zip(before, usage())]
        cpu, asleep, put_off = [a + b for a, b in zip(own, used)]
        return {
            "start_ns": start,
            "end_ns": end,
            "bytes": total,
            "usage": {"cpu_seconds": cpu, "voluntary_switches": asleep, "involuntary_switches": put_off},
            "rounds_ns": took,
        }

    go(WARM_UP, False, True)
    for one_pass in job["passes"]:
        print('"ready"', flush=True)
        check(sys.stdin.readline() == "go\n", "the order was not to go")
        print(json.dumps(go(one_pass["count"], one_pass["time_each"], False)), flush=True)
    check(sys.stdin.readline() == "", "there was an order after the last one")
    orders.send(None)
    other.join()


if __name__ == "__main__":
    main()
