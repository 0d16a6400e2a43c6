"""The door: whether rows may join those that wait. Refusals are raised, never queued.

What counts is what waits; rows inside a running forward have left the queue and freed their place.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from batching.errors import GroupLimit, Overloaded, QueueFull, RequestTooLarge
from batching.limits import QueueLimits
from batching.queue import GroupKey, Payload, PendingQueue, Row

MIN_RETRY_AFTER_S = 1.0
"""Whole seconds are the unit of the HTTP header, so less cannot be said."""
MAX_RETRY_AFTER_S = 60.0


def admit(
    rows: Sequence[Row[Payload]],
    queue: PendingQueue[Payload],
    limits: QueueLimits,
    *,
    running: Collection[GroupKey],
    retry_after_s: float,
) -> None:
    """Return if all `rows` may be added together, else raise; rows of one request are never split by admission.

    Raises RequestTooLarge when an empty queue would not take the rows either; GroupLimit, QueueFull, Overloaded else.
    """
    cost = sum(row.cost for row in rows)
    if cost > limits.max_queued_cost:
        raise RequestTooLarge("inputs", "tokens of cost", cost, limits.max_queued_cost)
    if len(rows) > limits.max_queued_rows:
        raise RequestTooLarge("inputs", "rows", len(rows), limits.max_queued_rows)
    _check_groups(rows, queue, limits, running=running, retry_after_s=retry_after_s)
    if queue.num_rows + len(rows) > limits.max_queued_rows or queue.cost + cost > limits.max_queued_cost:
        raise Overloaded(retry_after_s)


def _check_groups(
    rows: Sequence[Row[Payload]],
    queue: PendingQueue[Payload],
    limits: QueueLimits,
    *,
    running: Collection[GroupKey],
    retry_after_s: float,
) -> None:
    added: dict[GroupKey, int] = {}
    for row in rows:
        added[row.key] = added.get(row.key, 0) + 1
    if len(added) > limits.max_groups:
        raise RequestTooLarge("inputs", "groups", len(added), limits.max_groups)
    most_rows = max(added.values(), default=0)
    if most_rows > limits.max_queued_rows_per_group:
        raise RequestTooLarge("inputs", "rows of one group", most_rows, limits.max_queued_rows_per_group)
    live = {*queue.groups(), *running}
    if len(live | added.keys()) > max(limits.max_groups, len(live)):
        raise GroupLimit(limits.max_groups, retry_after_s)
    for key, num_rows in added.items():
        if queue.num_rows_in(key) + num_rows > limits.max_queued_rows_per_group:
            raise QueueFull(limits.max_queued_rows_per_group, retry_after_s)


@dataclass(slots=True)
class DrainRate:
    """Cost per second of forward time, as a moving average over about the last ten forwards."""

    _cost_per_s: float | None = None

    def record(self, cost: int, duration_s: float) -> None:
        """Note a finished forward."""
        if duration_s <= 0 or cost <= 0:
            return
        sample = cost / duration_s
        self._cost_per_s = sample if self._cost_per_s is None else 0.9 * self._cost_per_s + 0.1 * sample

    def retry_after_s(self, backlog_cost: int) -> float:
        """Time to work off `backlog_cost` at the measured rate, between the two bounds of this file."""
        if self._cost_per_s is None:
            return MIN_RETRY_AFTER_S
        return min(max(backlog_cost / self._cost_per_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
