"""What the batcher needs from outside, time and a model, and what it says of each forward."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

from batching.errors import TokenServeError
from batching.plan import Plan
from batching.row import Payload, Row

Value = TypeVar("Value")
ForwardValue = TypeVar("ForwardValue", covariant=True)
ForwardPayload = TypeVar("ForwardPayload")
Outcome: TypeAlias = Value | TokenServeError


class Timer(Protocol):
    """A callback that may still be called off."""

    def cancel(self) -> None:
        """Call it off."""


class Clock(Protocol):
    """The part of an event loop that policy needs; asyncio's loop is one."""

    def time(self) -> float:
        """Monotonic seconds."""

    def call_at(self, when: float, callback: Callable[[], None], /) -> Timer:
        """Run `callback` once when `time()` has reached `when`."""


class Forward(Protocol[ForwardPayload, ForwardValue]):
    """Runs one batch: one outcome per row, in order. Raising fails every row of the batch."""

    async def __call__(self, rows: Sequence[Row[ForwardPayload]], /) -> Sequence[ForwardValue | TokenServeError]:
        """Run the model on `rows`, which share one group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedForward(Generic[Payload]):
    """What an observer learns of each forward."""

    plan: Plan[Payload]
    started: float
    """Clock time at which it began to run; one that was prepared ahead began when the one before ended."""
    duration_s: float
    predicted_s: float
    num_failed: int
    num_attempts: int = 1
    """More than one: it failed, and its rows were tried in parts."""
    out_of_memory_cost: int | None = None
    """The least cost that did not fit into the device's memory."""


@dataclass(slots=True, kw_only=True, eq=False)
class Running(Generic[Payload]):
    """A plan that was started and has not ended."""

    plan: Plan[Payload]
    started: float
    predicted_s: float
    task: asyncio.Task[None] | None = None
