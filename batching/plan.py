"""Which waiting rows run next.

`take_batch` fills one batch from the group whose turn it is (see `batching.queue`). It takes rows in fair order and
looks past one that does not fit, so that the budget is used; a row that was passed over in `max_passed_over` batches
becomes the first of its tenant and a barrier: nothing behind it is taken until it has left. As every row fits into an
empty batch, it leaves as soon as its tenant's turn comes.

A batch also ends before it would make a row in it late: a row that joins must let all that are in it end in time.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias

from batching.limits import BatchLimits
from batching.queue import FairQueue
from batching.row import GroupKey, Payload, Row

MAX_LOOK_PAST = 32
"""Rows that do not fit before the search ends: bounds the work per batch when thousands of long rows wait."""

Reason: TypeAlias = Literal["full", "waited", "drain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How predicted seconds become seconds on the clock."""

    overhead_s: float = 0.0
    """Predicted time of a forward beside the work of its rows."""
    wall_per_work: float = 1.0
    """Measured: seconds on the clock per predicted second."""

    def forward_s(self, work_s: float) -> float:
        """Time on the clock of a forward whose rows add up to `work_s`."""
        return (self.overhead_s + work_s) * self.wall_per_work

    def work_s(self, wall_s: float) -> float:
        """Work of rows whose forward takes `wall_s` on the clock."""
        return wall_s / self.wall_per_work - self.overhead_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Generic[Payload]):
    """Rows for one forward, in fair order; they have left the queue."""

    key: GroupKey
    rows: tuple[Row[Payload], ...]
    reason: Reason

    @property
    def cost(self) -> int:
        """What the batch counts against the token budget."""
        return sum(row.cost for row in self.rows)

    @property
    def work_s(self) -> float:
        """Predicted seconds of its rows."""
        return sum(row.work_s for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a choice depends on beside the queue and the limits."""

    now: float
    pace: Pace = Pace()
    busy: Collection[GroupKey] = ()
    """Groups that have as many running forwards as they may."""
    draining: bool = False
    """Nothing more will come, so nothing waits for company."""


def take_batch(queue: FairQueue[Payload], limits: BatchLimits, situation: Situation) -> Plan[Payload] | None:
    """Take the next batch out of the queue; None when no group is ready."""
    key = queue.lead(lambda key: _reason(queue, key, limits, situation) is not None)
    if key is None:
        return None
    reason = _reason(queue, key, limits, situation)
    assert reason is not None, "only ready groups lead"
    return Plan(key=key, rows=_fill(queue, key, limits, situation), reason=reason)


def ready_at(queue: FairQueue[Payload], key: GroupKey, limits: BatchLimits) -> float:
    """When the group's batch leaves even if it is not full: the age of its oldest row decides."""
    return next(queue.rows(key)).arrived + limits.max_wait_s


def _reason(queue: FairQueue[Payload], key: GroupKey, limits: BatchLimits, situation: Situation) -> Reason | None:
    if key in situation.busy:
        return None
    # With more waiting than the budget holds, some row will not fit, whatever their order.
    if queue.cost_of(key) >= limits.token_budget or queue.num_rows_in(key) >= limits.max_rows:
        return "full"
    if situation.now >= ready_at(queue, key, limits):
        return "waited"
    return "drain" if situation.draining else None


def _fill(
    queue: FairQueue[Payload], key: GroupKey, limits: BatchLimits, situation: Situation
) -> tuple[Row[Payload], ...]:
    rows: list[Row[Payload]] = []
    misfits: list[Row[Payload]] = []
    num_passed_over = 0  # leading misfits that have a taken row behind them
    room, work_s = limits.token_budget, 0.0
    most_work_s = limits.max_work_s  # shrinks with every row that has a deadline
    pace, now = situation.pace, situation.now
    turn = queue.turn(key)
    while len(rows) < limits.max_rows and room > 0 and len(misfits) < MAX_LOOK_PAST:
        row = turn.next()
        if row is None:
            break
        deadline = row.deadline
        with_row_s = work_s + row.work_s
        bound_s = most_work_s if deadline is None else min(most_work_s, pace.work_s(deadline - now))
        if row.cost <= room and (with_row_s <= bound_s or not rows):
            turn.take()
            rows.append(row)
            room -= row.cost
            work_s, most_work_s = with_row_s, bound_s
            num_passed_over = len(misfits)
        else:
            turn.skip()
            misfits.append(row)
            if row.passed_over >= limits.max_passed_over:
                break
    for row in misfits[:num_passed_over]:
        row.passed_over += 1
        row.is_barrier = row.passed_over >= limits.max_passed_over
    turn.finish()
    return tuple(rows)
