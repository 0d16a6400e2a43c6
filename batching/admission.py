"""The door: whether rows may join those that wait, and if not, whose doing that is and when to come back.

What counts is what waits; rows inside a running forward have left the queue and freed their place. Times are those of
the fair queue: a tenant waits for its own backlog and for its share of the others', never for all of a flood.
Refusals are raised, never queued. Rows of one request are admitted together or not at all.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from batching.errors import (
    DeadlineUnreachable,
    GroupLimit,
    Overloaded,
    QueueFull,
    RequestTooLarge,
    TenantOverShare,
    WaitTooLong,
)
from batching.limits import QueueLimits
from batching.plan import Pace
from batching.queue import Backlog, FairQueue
from batching.row import GroupKey, Payload, Row

MAX_RETRY_AFTER_S = 120.0
"""Nothing is promised further ahead."""
PRUNE_EVERY_S = 1.0
PLACE_MARGIN = 1.4
"""How much longer than its work the place of a refused request is kept: room comes free a batch at a time."""
WAIT_MARGIN = 1.4
"""How much longer than predicted a wait may get before an admitted row misses its deadline: other rows come first, the
pace is that of a moment ago. Rows that just miss theirs cost as much as those that meet it. On two shared CPUs at 80
requests/s, 4 to 5 % of all requests ended in 504 with 1.0 and 1.2, most after waiting their whole time; one of 1,096
with 1.4."""
MAX_CHANGE = 5.0
MIN_FORWARD_S = 1e-4
"""Less says nothing about the pace: clocks have ticks."""


@dataclass(slots=True)
class PaceMeter:
    """Seconds on the clock per predicted second of work, as a moving average over about the last ten forwards."""

    overhead_s: float = 0.0
    wall_per_work: float = 1.0
    _has_sample: bool = False

    def record(self, work_s: float, duration_s: float) -> None:
        """Note a finished forward whose rows were predicted to take `work_s`."""
        if duration_s < MIN_FORWARD_S or work_s <= 0:
            return
        # One stall of a minute is no pace: it may move the measure no further than a forward five times as slow.
        present = self.wall_per_work
        sample = min(max(duration_s / (self.overhead_s + work_s), present / MAX_CHANGE), present * MAX_CHANGE)
        self.wall_per_work = 0.9 * present + 0.1 * sample if self._has_sample else sample
        self._has_sample = True

    @property
    def pace(self) -> Pace:
        """The present pace."""
        return Pace(overhead_s=self.overhead_s, wall_per_work=self.wall_per_work)


@dataclass(slots=True)
class Promises:
    """Which time was promised to whom: callers that come back when told so do not meet each other.

    Each refused request gets the next free place behind those promised before, so that a hundred clients refused in one
    moment are not told the same second. Places are kept for nobody by name: who comes first gets in.
    """

    _free_from: dict[str | None, float] = field(default_factory=dict)
    _prune_at: float = float("-inf")

    def clear(self) -> None:
        """Nothing waits any more, so nothing stands before whoever comes."""
        self._free_from.clear()

    def next_place_s(self, tenant: str | None, *, now: float, wait_s: float, work_wall_s: float) -> float:
        """Seconds to wait, at least `wait_s` and at most MAX_RETRY_AFTER_S; keeps `work_wall_s` of time taken then.

        Refused for its own backlog, a tenant queues for its share of the model; None is the queue for all of it.
        """
        place = min(max(self._free_from.get(tenant, now), now + wait_s), now + MAX_RETRY_AFTER_S)
        self._free_from[tenant] = place + work_wall_s
        if now >= self._prune_at:
            self._prune_at = now + PRUNE_EVERY_S
            self._free_from = {name: moment for name, moment in self._free_from.items() if moment > now}
        return place - now


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What the door must know beside the queue and its limits."""

    now: float
    pace: Pace
    running: Collection[GroupKey] = ()
    """Groups with a running forward."""
    running_s: float = 0.0
    """Predicted time until a forward may start."""
    token_budget: int = 1
    """Cost that one forward holds, to tell how many forwards the backlog is."""


def admit(
    rows: Sequence[Row[Payload]],
    queue: FairQueue[Payload],
    limits: QueueLimits,
    *,
    moment: Moment,
    promises: Promises,
) -> None:
    """Return if all `rows`, of one tenant and priority, may be added together, else raise.

    Raises RequestTooLarge when an empty queue would not take the rows either; GroupLimit, QueueFull, Overloaded for a
    backlog that is full; TenantOverShare when it is this tenant's; DeadlineUnreachable, TenantOverShare or WaitTooLong
    when the answer would come too late by the request's own size, the tenant's backlog or everybody's.
    """
    if not rows:
        return
    estimate = _Estimate.of(rows, queue, moment)
    if estimate.new_cost > limits.max_queued_cost:
        raise RequestTooLarge("inputs", "tokens of cost", estimate.new_cost, limits.max_queued_cost)
    if len(rows) > limits.max_queued_rows:
        raise RequestTooLarge("inputs", "rows", len(rows), limits.max_queued_rows)
    door = _Door(estimate=estimate, tenant=rows[0].tenant, moment=moment, promises=promises)
    _check_groups(
        rows, queue, limits, running=moment.running, retry_after_s=lambda: door.room_for_all(estimate.total_s)
    )
    num_rows, cost = queue.num_rows + len(rows), queue.cost + estimate.new_cost
    if num_rows > limits.max_queued_rows or cost > limits.max_queued_cost:
        raise Overloaded(door.room_for_all(estimate.total_s))
    _check_room(door, limits)
    _check_deadline(door, rows)
    if not queue.num_rows:
        promises.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Door:
    """Works out Retry-After for rows that are refused."""

    estimate: "_Estimate"
    tenant: str
    moment: Moment
    promises: Promises

    def room_for_all(self, wait_s: float) -> float:
        """Everybody's backlog is in the way for `wait_s` at least."""
        return self._place(None, wait_s, self.estimate.new_s)

    def room_for_tenant(self, wait_s: float) -> float:
        """The tenant's own backlog is, which drains at its share of the model."""
        self._place(None, 0.0, self.estimate.new_s)  # it will take the room of those who wait for everybody's backlog
        return self._place(self.tenant, wait_s, self.estimate.new_s / self.estimate.fair_part)

    def _place(self, whose: str | None, wait_s: float, work_wall_s: float) -> float:
        return self.promises.next_place_s(
            whose,
            now=self.moment.now,
            wait_s=wait_s + self.moment.running_s,
            work_wall_s=PLACE_MARGIN * work_wall_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Estimate:
    """The queue as the new rows see it, in seconds on the clock."""

    backlog: Backlog
    weight: float
    share: float
    """Of the rows' priority, while the other one waits."""
    new_cost: int
    new_work_s: float
    wall: float
    """Seconds on the clock per second of queued work, the forwards' overhead included."""
    total_s: float
    own_s: float
    alone_s: float
    """Until the new rows were done, were nothing else there."""
    running_s: float
    is_idle: bool
    """Nothing waits and nothing runs. Then rows are tried whatever the pace was: only a forward can correct it."""

    @classmethod
    def of(cls, rows: Sequence[Row[Payload]], queue: FairQueue[Payload], moment: Moment) -> "_Estimate":
        first = rows[0]
        new_work_s = sum(row.work_s for row in rows)
        new_cost = sum(row.cost for row in rows)
        work_s = queue.work_s + new_work_s
        num_forwards = queue.num_groups() + 1 + (queue.cost + new_cost) // moment.token_budget
        wall = moment.pace.wall_per_work * (1 + moment.pace.overhead_s * num_forwards / work_s)
        is_idle = not (queue.num_rows or moment.running or moment.running_s)
        pace = replace(moment.pace, wall_per_work=min(moment.pace.wall_per_work, 1.0)) if is_idle else moment.pace
        return cls(
            backlog=queue.backlog(first.tenant, first.priority),
            weight=first.weight,
            share=queue.batch_share if first.priority == "batch" else 1 - queue.batch_share,
            new_cost=new_cost,
            new_work_s=new_work_s,
            wall=wall,
            total_s=queue.work_s * wall,
            own_s=queue.tenant_work_s(first.tenant) * wall,
            alone_s=pace.forward_s(new_work_s),
            running_s=moment.running_s,
            is_idle=is_idle,
        )

    @property
    def new_s(self) -> float:
        """Time for the new rows."""
        return self.new_work_s * self.wall

    @property
    def fair_part(self) -> float:
        """The part of the model that the tenant gets while all who wait now go on waiting."""
        return self.weight / (self.weight + self.backlog.weight)

    def done_s(self, *, own_work_s: float) -> float:
        """Until the new rows are done at the latest, with `own_work_s` of the tenant's own before them.

        But for WAIT_MARGIN never later than after all that waits, nor than the tenant's share of the model allows.
        """
        mine_s = own_work_s + self.new_work_s
        others_s = self.backlog.same_priority_s - self.backlog.own_s
        in_priority_s = min(mine_s + others_s, mine_s / self.fair_part)
        work_s = min(in_priority_s + self.backlog.other_priority_s, in_priority_s / self.share)
        in_the_way_s = work_s - self.new_work_s
        return self.running_s + max((self.new_work_s + WAIT_MARGIN * in_the_way_s) * self.wall, self.alone_s)


def _check_room(door: _Door, limits: QueueLimits) -> None:
    estimate = door.estimate
    if estimate.new_work_s > limits.max_backlog_s:
        work_ms, limit_ms = math.ceil(estimate.new_work_s * 1000), int(limits.max_backlog_s * 1000)
        raise RequestTooLarge("inputs", "ms of work", work_ms, limit_ms, "max_backlog_s")
    if estimate.is_idle:
        return
    free_s = limits.max_backlog_s - estimate.total_s
    if estimate.new_s > free_s + estimate.own_s:
        raise Overloaded(door.room_for_all(estimate.new_s - free_s))
    if estimate.own_s == 0:
        return  # with nothing waiting, a tenant may use all that is free
    over_s = estimate.own_s + estimate.new_s - estimate.weight * free_s
    if over_s > 0 or estimate.new_s > free_s:
        # Its own rows leave at its share of the model; what others leave free is taken by those who were told to wait.
        wait_s = min(over_s, estimate.own_s) / estimate.fair_part
        raise TenantOverShare(door.room_for_tenant(max(wait_s, estimate.new_s - free_s)))


def _check_deadline(door: _Door, rows: Sequence[Row[Payload]]) -> None:
    estimate = door.estimate
    timeout_s = min((row.timeout_s for row in rows if row.timeout_s is not None), default=None)
    if timeout_s is None:
        return
    if estimate.alone_s > timeout_s:
        raise DeadlineUnreachable(timeout_s, estimate.alone_s)
    if estimate.is_idle:
        return
    done_s = estimate.done_s(own_work_s=estimate.backlog.own_s)
    if done_s <= timeout_s:
        return
    late_s = (done_s - timeout_s) / WAIT_MARGIN
    if estimate.backlog.own_s > 0 and estimate.done_s(own_work_s=0.0) <= timeout_s:
        raise TenantOverShare(door.room_for_tenant(late_s))
    raise WaitTooLong(timeout_s, done_s, door.room_for_all(late_s))


def _check_groups(
    rows: Sequence[Row[Payload]],
    queue: FairQueue[Payload],
    limits: QueueLimits,
    *,
    running: Collection[GroupKey],
    retry_after_s: Callable[[], float],
) -> None:
    added: dict[GroupKey, int] = {}
    for row in rows:
        added[row.key] = added.get(row.key, 0) + 1
    if len(added) > limits.max_groups:
        raise RequestTooLarge("inputs", "groups", len(added), limits.max_groups)
    most_rows = max(added.values(), default=0)
    if most_rows > limits.max_queued_rows_per_group:
        raise RequestTooLarge("inputs", "rows of one group", most_rows, limits.max_queued_rows_per_group)
    if queue.num_groups() + len(running) + len(added) > limits.max_groups:
        live = {*queue.groups(), *running}
        if len(live | added.keys()) > max(limits.max_groups, len(live)):
            raise GroupLimit(limits.max_groups, retry_after_s())
    for key, num_rows in added.items():
        if queue.num_rows_in(key) + num_rows > limits.max_queued_rows_per_group:
            raise QueueFull(limits.max_queued_rows_per_group, retry_after_s())
