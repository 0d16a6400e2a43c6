"""What arrives, leaves and passes, as Hypothesis draws it."""

import asyncio
from dataclasses import dataclass, field

from hypothesis import strategies as st

from batching.batcher import Batcher
from batching.errors import TokenServeError
from batching.limits import BatchLimits
from batching.row import GroupKey, Row
from tests.fakes import FakeClock, FakeForward, queue_limits, settle


@dataclass(frozen=True)
class Arrive:
    """Rows of one request."""

    lengths: tuple[int, ...]
    group: str
    timeout_s: float | None


@dataclass(frozen=True)
class Cancel:
    """The caller of one row leaves: the row number modulo what was admitted."""

    number: int


@dataclass(frozen=True)
class Wait:
    """Time passes."""

    seconds: float


@dataclass(frozen=True)
class Finish:
    """The oldest running forward ends."""


Event = Arrive | Cancel | Wait | Finish

BUDGET = 50

lengths = st.integers(1, BUDGET)
token_rows = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40), min_size=1, max_size=12)
arrivals = st.builds(
    Arrive,
    lengths=st.lists(lengths, min_size=1, max_size=6).map(tuple),
    group=st.sampled_from("ab"),
    timeout_s=st.none() | st.sampled_from([0.25, 0.5, 3.0]),
)
events = st.lists(
    st.one_of(
        arrivals,
        arrivals,
        st.builds(Cancel, st.integers(0, 30)),
        st.builds(Wait, st.sampled_from([0.0, 0.25, 1.0])),
        st.just(Finish()),
    ),
    max_size=40,
)
limits = st.builds(
    BatchLimits,
    token_budget=st.just(BUDGET),
    max_rows=st.integers(1, 6),
    max_wait_s=st.sampled_from([0.0, 0.5]),
    max_passed_over=st.integers(0, 3),
    max_concurrent_forwards=st.integers(1, 3),
    max_concurrent_per_group=st.integers(1, 2),
)


@dataclass
class History:
    """What a batcher did with a list of events."""

    batcher: Batcher[int, int]
    batches: list[tuple[Row[int], ...]]
    admitted: list[Row[int]] = field(default_factory=list)
    futures: list[asyncio.Future[int]] = field(default_factory=list)
    num_batches_at_exit: dict[int, int] = field(default_factory=dict)
    """Row number to the number of batches that had begun when its caller left or it expired."""

    def outcome(self, number: int) -> object:
        """How one row ended: its value, its error, or None for cancelled."""
        future = self.futures[number]
        if future.cancelled():
            return None
        return future.exception() or future.result()

    def in_batches(self) -> list[int]:
        """Row numbers in the order in which forwards took them."""
        return [row.payload for batch in self.batches for row in batch]

    def times_overtaken(self, row: Row[int]) -> int:
        """Batches that took a later row of the same group while `row` waited."""
        own = next((index for index, batch in enumerate(self.batches) if row in batch), None)
        end = self.num_batches_at_exit.get(row.payload, len(self.batches)) if own is None else own
        return sum(
            any(other.key == row.key and other.payload > row.payload for other in batch) for batch in self.batches[:end]
        )


async def play(script: list[Event], batch_limits: BatchLimits) -> History:
    """Run the events against a batcher on a fake clock, then close it."""
    clock, forward = FakeClock(), FakeForward(held=True)
    batcher: Batcher[int, int] = Batcher(forward, limits=batch_limits, queue_limits=queue_limits(), clock=clock)
    history = History(batcher, forward.calls)
    for event in script:
        match event:
            case Arrive():
                _arrive(history, event)
            case Cancel() if history.futures:
                history.futures[event.number % len(history.futures)].cancel()
            case Wait():
                clock.advance_to(clock.time() + event.seconds)
            case Finish():
                forward.release()
        await settle()
    forward.release_all()
    await batcher.close()
    return history


def _arrive(history: History, event: Arrive) -> None:
    first = len(history.admitted)
    new = [
        Row(
            key=GroupKey(event.group, "rev-1", 0),
            tenant="t",
            num_tokens=length,
            cost=length,
            work_s=length * 1e-3,
            payload=first + index,
            timeout_s=event.timeout_s,
        )
        for index, length in enumerate(event.lengths)
    ]
    try:
        futures = history.batcher.submit(new)
    except TokenServeError:
        return  # a deadline that could not be met
    for row, future in zip(new, futures, strict=True):
        history.admitted.append(row)
        history.futures.append(future)
        future.add_done_callback(
            lambda done, number=row.payload: history.num_batches_at_exit.setdefault(number, len(history.batches))
        )
