"""The options of what connects, listens, gathers and opens, for type checkers: as those of `pelton.Sender.connect`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict


class Listen(TypedDict, total=False):
    capacity: int | None
    message_bytes_max: int | None
    allow_uids: Sequence[int] | None
    spin: bool


class ListenChannel(Listen, total=False):
    traced: bool


class Gather(Listen, total=False):
    lanes: int | None


class Connect(Listen, total=False):
    timeout: float | None


class ConnectSender(Connect, total=False):
    traced: bool


class OpenPath(Connect, total=False):
    traced: bool
    create: bool
    lanes: int | None
    mode: int | None


class Publish(Listen, total=False):
    history: int | None
    hold_max: float | None


class SubscribeThread(TypedDict, total=False):
    policy: Literal["gate", "lag", "latest"]
    lag_after: float | None
    slack: int | None
    start_from: Literal["now", "oldest"] | int
    spin: bool


class Subscribe(SubscribeThread, total=False):
    timeout: float | None
    capacity: int | None
    message_bytes_max: int | None
    allow_uids: Sequence[int] | None


class PublishPath(Connect, total=False):
    history: int | None
    hold_max: float | None
    mode: int | None


class SubscribePath(SubscribeThread, total=False):
    timeout: float | None
    durable: str | None
    mode: int | None
    allow_uids: Sequence[int] | None


class ConnectClient(Connect, total=False):
    call_bytes_max: int | None
    memory_bytes_max: int | None


class ListenService(Gather, total=False):
    call_bytes_max: int | None
    memory_bytes_max: int | None
