"""pelton.logging: records of many processes in one."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from subprocess import Popen

import pelton
import pelton.logging
import pytest
from conftest import LIMIT

Start = Callable[..., Popen[str]]


class Records(logging.Handler):
    """Keeps the records, and says when there are enough."""

    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.records: list[logging.LogRecord] = []
        self.changed = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self.changed:
            self.records.append(record)
            self.changed.notify()

    def wait(self, count: int) -> list[str]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.records) >= count, LIMIT), self.records
        return [record.getMessage() for record in self.records]


@pytest.fixture
def logger(name: str) -> Iterator[logging.Logger]:
    """A logger whose records go to the listener under `name`."""
    logger = logging.getLogger("test.of.pelton")
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    handler = pelton.logging.Handler(name)
    logger.addHandler(handler)
    yield logger
    logger.removeHandler(handler)
    handler.close()


LOG = """
import logging, pelton.logging, sys
handler = pelton.logging.Handler(sys.argv[1], timeout=30)
logging.getLogger().setLevel(logging.DEBUG)
logging.getLogger().addHandler(handler)
for number in range(int(sys.argv[3])):
    logging.getLogger(sys.argv[2]).info("number %d", number)
assert handler.dropped == 0
"""


def test_records_of_many_processes_arrive_each_in_its_order(name: str, start: Start) -> None:
    records = Records()
    with pelton.logging.Listener(name, records):
        processes = [start(LOG, name, f"process{number}", 500) for number in range(3)]
        for process in processes:
            assert process.wait(LIMIT) == 0
    found: dict[tuple[str, int | None], list[str]] = {}
    for record in records.records:
        found.setdefault((record.name, record.process), []).append(record.getMessage())
    wanted = [f"number {number}" for number in range(500)]
    assert found == {(f"process{number}", process.pid): wanted for number, process in enumerate(processes)}


def test_a_record_has_its_attributes_and_the_text_of_its_exception(name: str, logger: logging.Logger) -> None:
    records = Records()
    with pelton.logging.Listener(name, records):
        try:
            raise KeyError("lost")
        except KeyError:
            logger.exception("caught %s in %s", "it", object, extra={"user": "somebody", "path": os.path})
    (record,) = records.records
    assert record.getMessage().startswith(f"caught it in {object}\nTraceback (most recent call last):\n")
    assert record.getMessage().endswith("KeyError: 'lost'")
    assert (record.levelno, record.name, record.user) == (logging.ERROR, "test.of.pelton", "somebody")  # type: ignore[attr-defined]
    assert (record.process, record.threadName, record.filename) == (os.getpid(), "MainThread", "test_logging.py")


def test_levels_of_handlers_are_respected_if_wanted(name: str, logger: logging.Logger) -> None:
    all_records, errors = Records(), Records(logging.ERROR)
    with pelton.logging.Listener(name, all_records, errors, respect_handler_level=True):
        logger.info("one")
        logger.error("two")
    assert (all_records.wait(2), errors.wait(1)) == (["one", "two"], ["two"])


def test_a_full_lane_drops_records_and_counts_them(name: str) -> None:
    handler = pelton.logging.Handler(name, capacity=1 << 16)
    errors: list[logging.LogRecord] = []
    handler.handleError = errors.append  # type: ignore[assignment, method-assign]
    is_held, goes_on = threading.Event(), threading.Event()

    class Slow(Records):
        def emit(self, record: logging.LogRecord) -> None:
            is_held.set()
            assert goes_on.wait(LIMIT)
            super().emit(record)

    records = Slow()
    with pelton.logging.Listener(name, records):
        for number in range(1000):
            handler.handle(logging.makeLogRecord({"msg": f"{number}", "levelno": logging.INFO}))
        assert is_held.wait(LIMIT)
        goes_on.set()
    assert handler.dropped == len(errors) > 0
    assert len(records.records) == 1000 - handler.dropped
    handler.close()


def test_without_a_listener_records_are_dropped_and_a_later_one_gets_the_next(
    name: str, logger: logging.Logger
) -> None:
    (handler,) = (handler for handler in logger.handlers if isinstance(handler, pelton.logging.Handler))
    errors: list[logging.LogRecord] = []
    handler.handleError = errors.append  # type: ignore[assignment, method-assign]
    logger.info("nobody listens")
    assert handler.dropped == len(errors) == 1
    for word in ("one", "two"):
        records = Records()
        with pelton.logging.Listener(name, records):
            logger.info(word)
        assert records.wait(1)[0] == word
    assert handler.dropped == 1


def test_a_forked_child_logs_by_a_lane_of_its_own(name: str, logger: logging.Logger) -> None:
    records = Records()
    with pelton.logging.Listener(name, records):
        logger.info("parent")
        pid = os.fork()
        if pid == 0:
            logger.info("child")
            logger.handlers[0].close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        logger.info("parent again")
    by_process = {(record.process, record.getMessage()) for record in records.records}
    assert by_process == {(os.getpid(), "parent"), (pid, "child"), (os.getpid(), "parent again")}


def test_a_killed_process_loses_no_record_that_it_has_sent_and_harms_no_other(
    name: str, start: Start, logger: logging.Logger
) -> None:
    records = Records()
    script = LOG + """
print("sent", flush=True)
sys.stdin.read()
"""
    with pelton.logging.Listener(name, records):
        process = start(script, name, "killed", 100)
        assert process.stdout is not None and process.stdout.readline() == "sent\n"
        process.send_signal(signal.SIGKILL)
        process.wait(LIMIT)
        logger.info("after")
    assert sorted(records.wait(101)) == sorted([f"number {number}" for number in range(100)] + ["after"])


LISTEN = """
import logging, pelton.logging, sys
class Print(logging.Handler):
    def emit(self, record):
        print(record.getMessage(), flush=True)
        if record.getMessage() == sys.argv[2]:
            sys.stdin.read()
with pelton.logging.Listener(sys.argv[1], Print()) as listener:
    print("listens", flush=True)
    listener._thread.join()
"""


def test_a_killed_listeners_successor_gets_what_was_not_handled(name: str, start: Start) -> None:
    first = start(LISTEN, name, "stays at 3")
    assert first.stdout is not None and first.stdout.readline() == "listens\n"
    handler = pelton.logging.Handler(name, timeout=LIMIT)

    def log(text: str) -> None:
        handler.handle(logging.makeLogRecord({"msg": text, "levelno": logging.INFO}))

    for text in ("1", "2", "stays at 3", "4", "5"):
        log(text)
    assert [first.stdout.readline() for _ in range(3)] == ["1\n", "2\n", "stays at 3\n"]
    first.kill()
    first.wait()
    records = Records()
    with pelton.logging.Listener(name, records):
        log("6")
        log("7")
        assert records.wait(5)[-1] == "7"
    assert [record.getMessage() for record in records.records] == ["stays at 3", "4", "5", "6", "7"]
    assert handler.dropped == 0
    handler.close()


def test_what_is_no_record_is_reported_and_the_listener_goes_on(
    name: str, logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    records = Records()
    with pelton.logging.Listener(name, records):
        with pelton.Sender.connect(name, timeout=LIMIT) as sender:
            for data in (b"\xff", b"", b"[1]", b'{"levelno": "high"}', b"[" * 100_000):
                sender.send(data)
            sender.wait_released(LIMIT)
        logger.info("after")
        records.wait(1)
    assert "a log record was not handled" in capsys.readouterr().err
    assert [record.getMessage() for record in records.records if record.name == "test.of.pelton"] == ["after"]


def test_a_record_is_a_json_object_that_any_language_reads(name: str, logger: logging.Logger) -> None:
    with pelton.gather(name) as receiver:
        received = threading.Event()

        def log() -> None:
            logger.warning("%d apples", 3)
            # On a busy machine the receiver may not have accepted in time: the next record continues the handshake.
            while not received.wait(0.1):
                logger.warning("%d apples", 3)

        thread = threading.Thread(target=log)
        thread.start()
        record = json.loads(receiver.recv(LIMIT))
        received.set()
        thread.join()
        assert (record["message"], record["levelname"], record["args"]) == ("3 apples", "WARNING", None)


def test_a_listener_starts_once_at_a_time_and_again_after_its_stop(name: str) -> None:
    listener = pelton.logging.Listener(name)
    listener.stop()
    with listener:
        with pytest.raises(RuntimeError, match="started already"):
            listener.start()
        with pytest.raises(pelton.InUse):
            pelton.logging.Listener(name).start()
    with listener:
        pass


def test_a_stopped_listener_delays_only_the_first_record(name: str, start: Start, logger: logging.Logger) -> None:
    (handler,) = (handler for handler in logger.handlers if isinstance(handler, pelton.logging.Handler))
    handler.handleError = lambda record: None  # type: ignore[method-assign]
    listener = start(LISTEN, name, "last")
    assert listener.stdout is not None and listener.stdout.readline() == "listens\n"
    listener.send_signal(signal.SIGSTOP)
    try:
        # Each would wait five seconds for the handshake.
        for _ in range(20):
            logger.info("dropped")
        assert handler.dropped == 20
    finally:
        listener.send_signal(signal.SIGCONT)
    while handler.dropped:
        handler.dropped = 0
        logger.info("last")
    assert listener.stdout.readline() == "last\n"


def test_a_listener_stops_though_records_keep_coming(name: str, start: Start) -> None:
    records = Records()
    with pelton.logging.Listener(name, records):
        process = start(LOG, name, "busy", 1_000_000_000)
        records.wait(1)
    process.kill()
    process.wait(LIMIT)


def test_an_attribute_that_json_refuses_arrives_as_its_repr(name: str, logger: logging.Logger) -> None:
    class Bad:
        def __repr__(self) -> str:
            raise RuntimeError("no text")

    circle: list[object] = []
    circle.append(circle)
    records = Records()
    with pelton.logging.Listener(name, records):
        extra = {"by_pair": {(1, 2): "x"}, "circle": circle, "bad": Bad(), "number": 5, "path": os.path}
        logger.info("one", extra=extra)
        logger.info("two", extra={(1, 2): "a key that is no text"})  # type: ignore[dict-item]
    one, two = (record.__dict__ for record in records.records)
    assert (one["message"], one["levelno"], one["number"]) == ("one", logging.INFO, 5)
    assert (one["by_pair"], one["circle"], one["path"]) == ("{(1, 2): 'x'}", "[[...]]", str(os.path))
    assert one["bad"] == "<Bad, whose repr fails>"
    assert two["(1, 2)"] == "a key that is no text"


class Left:
    """A sender whose listener has left, and whose successor is slow."""

    def __init__(self) -> None:
        self.waited: list[float] = []

    def arm(self) -> bool:
        raise pelton.Closed("the listener has left")

    def resume(self, timeout: float) -> None:
        self.waited.append(timeout)
        raise pelton.TimedOut("the successor is slow")

    def close(self) -> None:
        pass


def test_a_slow_successor_delays_a_record_for_as_long_as_the_first_one(name: str, logger: logging.Logger) -> None:
    (handler,) = (handler for handler in logger.handlers if isinstance(handler, pelton.logging.Handler))
    errors: list[logging.LogRecord] = []
    handler.handleError = errors.append  # type: ignore[assignment, method-assign]
    left = Left()
    with pelton.logging.Listener(name):
        handler._sender = left  # type: ignore[assignment]
        logger.info("one")
        handler.timeout = 3
        logger.info("two")
    assert left.waited == [0.05, 3]
    assert handler.dropped == len(errors) == 2
