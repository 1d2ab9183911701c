#!/usr/bin/env python3
"""Python's multiprocessing.Queue in the randomized crash test: see README.md beside this file."""

import json
import mmap
import multiprocessing
import queue
import struct
import sys
import time
import zlib

STATE, STOP, FIRST, PENDING, DONE, TAKEN, WAITING = range(7)
GARBAGE, MESSAGES, BYTES, JUMPS = 12, 15, 16, 17
JUMPS_AT, JUMPS_MAX, TEXT_AT = 64, 64, 256
READY, FINISHED, FAILED = 1, 2, 3
MASK = (1 << 64) - 1
HEADER = struct.Struct("<QI")
SUM = struct.Struct("<I")
HEADER_BYTES = 16
PERIOD = 251
# The capacity is the number of messages in the queue: bytes have no meaning here.
QUEUE_MESSAGES = 100


def mix(number):
    z = number * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def size(plan, number):
    drawn = mix(plan["seed"] + number & MASK)
    extent = max(plan["bytes_max"] - plan["bytes_min"] + 1 >> (drawn >> 61), 1)
    return plan["bytes_min"] + (drawn & 0xFFFFFFFF) % extent


def message(plan, pattern, number):
    total = size(plan, number)
    begin = number % PERIOD
    rest = pattern[begin : begin + total - HEADER_BYTES]
    header = HEADER.pack(number, total)
    return header + SUM.pack(zlib.crc32(rest, zlib.crc32(header))) + rest


def number_of(plan, payload):
    """Returns the number of a valid message; raises for any other."""
    number, total = HEADER.unpack_from(payload)
    (checksum,) = SUM.unpack_from(payload, HEADER.size)
    found = zlib.crc32(payload[HEADER_BYTES:], zlib.crc32(payload[: HEADER.size]))
    if total != len(payload) or total != size(plan, number) or checksum != found:
        raise ValueError(f"message {number} of {total} bytes arrived with {len(payload)} and CRC {found:08x}, not {checksum:08x}")
    return number


class Journal:
    def __init__(self, path):
        with open(path, "r+b") as file:
            self.map = mmap.mmap(file.fileno(), 4096)
        # stored by words; `struct` with an explicit byte order would store bytes
        self.words = memoryview(self.map).cast("Q")

    def explain(self, text):
        self.map[8 * TEXT_AT : 8 * TEXT_AT + 1000] = text.encode()[:999].ljust(1000, b"\0")


def pause(plan, messages):
    if plan["pause_every"] and messages % plan["pause_every"] == 0:
        time.sleep(plan["pause_us"] / 1e6)


def send(plan, words, channel):
    pattern = bytes(range(PERIOD)) * (plan["bytes_max"] // PERIOD + 2)
    number = plan["next"]
    words[PENDING] = words[DONE] = number - 1
    words[FIRST] = number
    words[STATE] = READY
    while not words[STOP]:
        payload = message(plan, pattern, number)
        words[PENDING] = number
        channel.put(payload)
        words[DONE] = number
        words[MESSAGES] += 1
        words[BYTES] += len(payload)
        number += 1
        pause(plan, words[MESSAGES])
    channel.close()
    channel.join_thread()


def receive(plan, words, channel, journal):
    words[STATE] = READY
    while not words[STOP] or words[TAKEN] + 1 < words[STOP]:
        last = words[TAKEN]
        words[PENDING] = last + 1
        try:
            payload = channel.get(timeout=0.05)
        except queue.Empty:
            continue
        except Exception as error:  # unpickling invalid bytes may raise any exception
            words[GARBAGE] += 1
            journal.explain(f"{type(error).__name__}: {error}")
            raise
        try:
            number = number_of(plan, payload)
        except Exception as error:
            words[GARBAGE] += 1
            journal.explain(str(error))
            continue
        if not words[FIRST]:
            words[DONE] = number - 1
            words[PENDING] = number
            words[FIRST] = number
        elif number != last + 1:
            if words[JUMPS] < JUMPS_MAX:
                at = JUMPS_AT + 2 * words[JUMPS]
                words[at], words[at + 1] = last + 1, number
            words[JUMPS] += 1
        words[TAKEN] = number
        words[PENDING] = words[DONE] = number
        words[MESSAGES] += 1
        words[BYTES] += len(payload)
        pause(plan, words[MESSAGES])


def side(plan, channel):
    journal = Journal(plan["journal"])
    try:
        if plan["role"] == "send":
            send(plan, journal.words, channel)
        else:
            receive(plan, journal.words, channel, journal)
        journal.words[STATE] = FINISHED
    except Exception as error:
        if not journal.words[GARBAGE]:
            journal.explain(f"{type(error).__name__}: {error}")
        journal.words[STATE] = FAILED


def main():
    context = multiprocessing.get_context("fork")
    channel = context.Queue(QUEUE_MESSAGES)
    sides = []
    for line in sys.stdin:
        process = context.Process(target=side, args=(json.loads(line), channel), daemon=True)
        process.start()
        print(process.pid, flush=True)
        sides.append(process)
    for process in sides:
        process.kill()


if __name__ == "__main__":
    main()
