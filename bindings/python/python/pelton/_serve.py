"""What a service does with a handler: `Service.run`, and what that of asyncio shares."""

from __future__ import annotations

import contextvars
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any

import pelton

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger("pelton")

# The code of a failure by an exception that is no `pelton.Failed`.
_EXCEPTION = 1
# Of the text of such an exception, the client gets as many characters.
_TEXT_MAX = 4000


def answered(answer: Callable[..., object], *arguments: object) -> bool:
    """Calls a method that answers a request. False if the client has left, or the service is stopped."""
    try:
        answer(*arguments)
    except (pelton.Closed, pelton.PeerDied):
        return False
    return True


def fail(request: pelton.Request, error: Exception) -> None:
    """Fails the call by the exception of its handler."""
    if isinstance(error, pelton.Failed):
        code, text = error.code, error.bytes
    else:
        try:
            _log.error("the handler of a service failed", exc_info=error)
            code, text = _EXCEPTION, f"{type(error).__name__}: {error}"[:_TEXT_MAX].encode(errors="replace")
        except Exception:
            # The exception cannot be printed, or a filter of the logger fails.
            code, text = _EXCEPTION, type(error).__name__.encode(errors="replace")
    if request.is_answered:
        return
    try:
        answered(request.fail, code, text)
    except pelton.TooLarge:
        answered(request.fail, code)
    except pelton.Error:
        # Such as Refused: the client has used up its memory here. Its call must not end the service for others.
        request.abandon()


def is_streaming(reply: object) -> bool:
    """Whether what a handler returned are parts of a reply."""
    if isinstance(reply, (bytes, str)):
        return False
    try:
        memoryview(reply)  # type: ignore[arg-type]
    except TypeError:
        # Iterating over these gives keys, or no order.
        return isinstance(reply, Iterable) and not isinstance(reply, (Mapping, Set))
    return False


def _send_parts(request: pelton.Request, parts: Iterable[Buffer]) -> None:
    iterator = iter(parts)
    try:
        for part in iterator:
            if request.is_cancelled():
                request.abandon()
                return
            if not answered(request.part, part):
                return
        answered(request.end)
    finally:
        # At once, so that a generator of a cancelled call releases what it has.
        if close := getattr(iterator, "close", None):
            close()


def _handle(request: pelton.Request, handler: Callable[[pelton.Request], Any]) -> None:
    try:
        reply = handler(request)
        if request.is_answered:
            return
        if is_streaming(reply):
            _send_parts(request, reply)
        else:
            answered(request.reply, reply)
    except Exception as error:
        fail(request, error)
    except BaseException:
        request.abandon()
        raise


def run(service: pelton.Service, handler: Callable[[pelton.Request], Any], threads: int) -> None:
    if threads < 1:
        raise ValueError(f"threads is {threads}, wanted 1 or more")
    if inspect.iscoroutinefunction(handler) or inspect.isasyncgenfunction(handler):
        raise TypeError("the handler is an `async def`, wanted a plain function: run it by pelton.aio.Service")
    if not callable(handler):
        raise TypeError(f"the handler is {type(handler).__name__}, wanted a function of a request")
    errors: list[BaseException] = []
    # Each request gets a copy, so that no handler has what another one has set.
    context = contextvars.copy_context()

    def work() -> None:
        try:
            for request in service:
                context.copy().run(_handle, request, handler)
        except pelton.ClosedHandle:
            pass
        except BaseException as error:
            errors.append(error)
            service.stop()

    others = [threading.Thread(target=work, name=f"pelton service {number}") for number in range(1, threads)]
    started: list[threading.Thread] = []
    try:
        for thread in others:
            thread.start()
            started.append(thread)
        work()
    except BaseException:
        service.stop()
        raise
    finally:
        for thread in started:
            thread.join()
    if errors:
        raise errors[0]
