"""Retry-After is honest: a client that waits as long as it was told gets in, in at least 9 of 10 cases."""

import heapq
import itertools
import math
import random
from dataclasses import dataclass, field

import pytest

from batching.admission import MAX_RETRY_AFTER_S, Moment, PaceMeter, Promises, admit
from batching.errors import Overloaded, TenantOverShare
from batching.limits import QueueLimits
from batching.plan import Situation, take_batch
from batching.queue import FairQueue
from batching.row import Row
from tests.fakes import batch_limits, queue_limits, rows

LIMITS = batch_limits(token_budget=200, max_rows=100)


@dataclass
class Replica:
    """A model that runs batch after batch, each in its predicted time or `slowness` times that; and its clients."""

    limits: QueueLimits
    slowness: float = 1.0
    seed: int = 0
    queue: FairQueue[int] = field(default_factory=FairQueue)
    promises: Promises = field(default_factory=Promises)
    meter: PaceMeter = field(default_factory=lambda: PaceMeter(overhead_s=0.01))
    first_tries: int = 0
    returned: int = 0
    """Clients that came back when they were told to."""
    got_in: int = 0
    longest_wait_s: float = 0.0
    last_start_s: float = 0.0
    _events: list[tuple[float, int, object]] = field(default_factory=list)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _running_until: float | None = None

    def client(self, at: float, row: Row[int], *, told: bool = False) -> None:
        """A client asks at this time."""
        heapq.heappush(self._events, (at, next(self._numbers), (row, told)))

    def run(self, until: float) -> None:
        """Let everything happen."""
        while self._events and self._events[0][0] <= until:
            now, _, event = heapq.heappop(self._events)
            if event is None:
                self._running_until = None
            elif isinstance(event, tuple):
                self._ask(now, *event)
            self._start(now)

    def _ask(self, now: float, row: Row[int], told: bool) -> None:
        self.first_tries += not told
        self.returned += told
        moment = Moment(
            now=now,
            pace=self.meter.pace,
            running_s=max(0.0, (self._running_until or now) - now),
            token_budget=LIMITS.token_budget,
        )
        try:
            admit([row], self.queue, self.limits, moment=moment, promises=self.promises)
        except (Overloaded, TenantOverShare) as refusal:
            # As in the HTTP header: whole seconds, at least one.
            wait_s = max(1, math.ceil(refusal.retry_after_s))
            self.longest_wait_s = max(self.longest_wait_s, wait_s)
            self.client(now + wait_s, row, told=True)
            return
        self.got_in += told
        row.arrived = now
        self.queue.add(row)

    def _start(self, now: float) -> None:
        if self._running_until is not None:
            return
        plan = take_batch(self.queue, LIMITS, Situation(now=now, pace=self.meter.pace))
        if plan is not None:
            duration_s = (0.01 + plan.work_s) * self.slowness
            self.meter.record(plan.work_s, duration_s)
            self._running_until = now + duration_s
            self.last_start_s = now
            heapq.heappush(self._events, (self._running_until, next(self._numbers), None))


def _row(draw: random.Random, tenant: str, **changes: object) -> Row[int]:
    (row,) = rows([draw.randint(5, 100)], tenants=tenant, groups=tenant)
    for name, value in changes.items():
        setattr(row, name, value)
    return row


@pytest.mark.parametrize("slowness", [1.0, 3.0], ids=["as predicted", "three times slower than predicted"])
@pytest.mark.parametrize("tenants", ["a", "aab", "abcdefgh"])
@pytest.mark.parametrize("timeout_s", [None, 3.0], ids=["room decides", "deadlines decide"])
def test_who_waits_as_told_gets_in(timeout_s: float | None, tenants: str, slowness: float) -> None:
    """ISSUE-3: four hundred clients within two seconds, some 20 to 60 s of work, all of whom come back when told."""
    for seed in range(3):
        draw = random.Random(seed)
        replica = Replica(queue_limits(max_backlog_s=4.0), slowness=slowness)
        replica.meter.record(0.09, 0.1 * slowness)  # it has been running before
        for index in range(400):
            replica.client(draw.uniform(0, 2), _row(draw, tenants[index % len(tenants)], timeout_s=timeout_s))
        replica.run(600.0)
        assert replica.returned > 100, "there was an overload"
        assert replica.got_in / replica.returned >= 0.9
        assert replica.queue.num_rows == 0


def test_steady_overload_ends_for_everybody() -> None:
    """One and a half times the capacity for a minute: newcomers cannot be told from those who were told to wait.

    So they take some of their places; still most get in when they come back, nobody is told a time beyond the bound,
    and the last is served not much later than the work takes.
    """
    draw = random.Random(1)
    replica = Replica(queue_limits(max_backlog_s=4.0))
    at = 0.0
    while at < 60:
        at += draw.expovariate(30)
        replica.client(at, _row(draw, draw.choice("aaab")))
    replica.run(1000.0)
    assert replica.got_in / replica.returned >= 0.5
    assert replica.longest_wait_s <= MAX_RETRY_AFTER_S
    assert replica.queue.num_rows == 0
    assert replica.last_start_s < 3 * 60


def test_a_quiet_tenant_is_never_told_to_wait_for_a_flood() -> None:
    """It is admitted at once beside a tenant that offers ten times the capacity."""
    draw = random.Random(2)
    replica = Replica(queue_limits(max_backlog_s=4.0))
    for index in range(6000):
        replica.client(index * 0.005, _row(draw, "flood"))
    quiet = [_row(draw, "quiet", timeout_s=2.0) for _ in range(40)]
    for index, row in enumerate(quiet):
        replica.client(1 + index * 0.7, row)
    replica.run(30.0)
    assert all(row.arrived == pytest.approx(1 + index * 0.7) for index, row in enumerate(quiet))
