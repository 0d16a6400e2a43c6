"""Which waiting rows run next.

`next_batch` looks at groups in turn and fills one batch from the first that is ready. Within the group it takes rows in
order of arrival and looks past one that does not fit, so that the budget is used; a row that was passed over in
`max_passed_over` batches becomes a barrier: nothing behind it is taken until it has left. As every row fits into an
empty batch, a barrier at the head always leaves next.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, Literal

from batching.limits import BatchLimits
from batching.queue import GroupKey, Payload, PendingQueue, Row

MAX_LOOK_PAST = 64
"""Rows that do not fit before the search ends: bounds the work per batch when thousands of long rows wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Generic[Payload]):
    """Rows for one forward, in order of arrival; not yet taken out of the queue."""

    key: GroupKey
    rows: tuple[Row[Payload], ...]
    passed_over: tuple[Row[Payload], ...]
    """Rows that wait although later ones of this batch do not."""
    reason: Literal["full", "waited", "drain"]

    @property
    def cost(self) -> int:
        """What the batch counts against the token budget."""
        return sum(row.cost for row in self.rows)


def next_batch(
    queue: PendingQueue[Payload],
    limits: BatchLimits,
    now: float,
    *,
    busy: Collection[GroupKey] = (),
    draining: bool = False,
) -> Plan[Payload] | None:
    """Choose the next batch from the groups that are not `busy`, or None when none is ready at `now`."""
    for key in queue.groups():
        if key in busy:
            continue
        rows, passed_over, is_full = _fill(queue, key, limits)
        reason = _reason(is_full, ready_at=ready_at(queue, key, limits), now=now, draining=draining)
        if reason is not None:
            return Plan(key=key, rows=rows, passed_over=passed_over, reason=reason)
    return None


def ready_at(queue: PendingQueue[Payload], key: GroupKey, limits: BatchLimits) -> float:
    """When the group's batch leaves even if it is not full: the age of its oldest row decides."""
    return next(queue.rows(key)).arrived + limits.max_wait_s


def take(queue: PendingQueue[Payload], plan: Plan[Payload]) -> None:
    """Remove the plan's rows, remember whom they passed, and give the next group its turn."""
    for row in plan.rows:
        queue.discard(row)
    for row in plan.passed_over:
        row.passed_over += 1
    queue.rotate(plan.key)


def _reason(is_full: bool, *, ready_at: float, now: float, draining: bool) -> Literal["full", "waited", "drain"] | None:
    if is_full:
        return "full"
    if now >= ready_at:
        return "waited"
    return "drain" if draining else None


def _fill(
    queue: PendingQueue[Payload], key: GroupKey, limits: BatchLimits
) -> tuple[tuple[Row[Payload], ...], tuple[Row[Payload], ...], bool]:
    rows: list[Row[Payload]] = []
    misfits: list[Row[Payload]] = []
    num_passed_over = 0  # leading misfits that have a taken row behind them
    room = limits.token_budget
    for row in queue.rows(key):
        if len(rows) == limits.max_rows or room == 0 or len(misfits) == MAX_LOOK_PAST:
            break
        if row.cost <= room:
            rows.append(row)
            room -= row.cost
            num_passed_over = len(misfits)
        else:
            misfits.append(row)
            if row.passed_over >= limits.max_passed_over:
                break
    is_full = len(rows) == limits.max_rows or room == 0 or bool(misfits)
    return tuple(rows), tuple(misfits[:num_passed_over]), is_full
