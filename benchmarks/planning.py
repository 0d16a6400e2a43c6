"""`python -m benchmarks.planning`: what choosing a batch costs, by how much waits and for how many tenants. No Ray.

One queue per case, kept at its length: a batch is taken, timed, and replaced by as many rows of the same tenants
through the door, timed too. Rows have the lengths of the other benchmarks, three deadlines, and one in ten is `batch`.
Times are of this process alone, garbage collection included as in a replica.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np

from batching.admission import Moment, Promises, admit
from batching.errors import TokenServeError
from batching.limits import BatchLimits, QueueLimits
from batching.plan import Pace, Plan, Situation, take_batch
from batching.queue import FairQueue
from batching.row import GroupKey, Row
from benchmarks import machine
from benchmarks.server import PROJECT_ROOT
from benchmarks.table import percentile, render
from benchmarks.workload import LengthMix

WAITING = (100, 1_000, 10_000, 100_000)
TENANTS = (1, 10, 1_000)
BATCH_ROWS = (52, 256)
"""Of average rows: what fills the default budget on a CPU, and `max_rows`."""
TIMEOUTS_S = (0.5, 5.0, None)
BATCH_PRIORITY_EVERY = 10
WORK_PER_TOKEN_S = 1e-9
"""So little that no deadline passes: what is measured is the choice among rows that may all run."""
STEP_S = 1e-6
TARGET_S = 0.001
TARGET_WAITING, TARGET_TENANTS = 10_000, 1_000
US = 1e6

HEADER = [
    "waiting rows, tenants, batch groups",
    "rows/batch",
    "batch p50 µs",
    "batch p99 µs",
    "µs per row",
    "admit+add p50 µs",
    "p99 µs",
    "refuse p50 µs",
    "none ready µs",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table."""

    waiting: int
    tenants: int
    own_groups: bool
    """Each tenant in a batch group of its own, so that a batch has rows of one tenant; else all in one."""
    batch_rows: int

    def __str__(self) -> str:
        groups = f"{self.tenants:,} groups" if self.own_groups else "1 group"
        return f"{self.waiting:,}, {self.tenants:,}, {groups}"

    @property
    def limits(self) -> BatchLimits:
        """As many tokens as that many average rows have."""
        return BatchLimits(token_budget=round(self.batch_rows * LengthMix().mean_tokens), max_rows=256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds, one sample each."""

    rows_per_batch: float
    batch_s: list[float]
    admit_s: list[float]
    """Of one row that is let in, and added."""
    refuse_s: list[float]
    """Of one row of a full queue."""
    none_ready_s: list[float]
    """Of a search that finds nothing, because everything gathers company."""


@dataclass(slots=True)
class RowSource:
    """Rows without end, the same for one seed."""

    case: Case
    seed: int = 0
    _lengths: Iterator[int] = field(init=False)
    _timeouts: Iterator[float | None] = field(init=False)
    _made: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._lengths = cycle([int(length) for length in LengthMix().draw(9973, self.seed)])
        self._timeouts = cycle(TIMEOUTS_S)

    def row(self, tenant: str, *, now: float) -> Row[None]:
        """The next one, of `tenant`."""
        num_tokens = next(self._lengths)
        self._made += 1
        return Row(
            key=GroupKey(tenant if self.case.own_groups else "shared", "minilm@v1", 256),
            tenant=tenant,
            num_tokens=num_tokens,
            cost=num_tokens,
            work_s=num_tokens * WORK_PER_TOKEN_S,
            payload=None,
            priority="batch" if self._made % BATCH_PRIORITY_EVERY == 0 else "interactive",
            timeout_s=next(self._timeouts),
            arrived=now,
        )


def main() -> int:
    """Run what the command line asks for; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=300, help="timed per case")
    parser.add_argument("--waiting", type=int, nargs="+", default=list(WAITING), help="rows kept waiting")
    given = parser.parse_args()
    if given.batches < 1 or min(given.waiting) < max(BATCH_ROWS) // 4:
        parser.error(f"--batches must be positive, and --waiting at least {max(BATCH_ROWS) // 4}")
    print(machine.heading(PROJECT_ROOT))
    foreign = machine.ForeignLoad()
    found: dict[Case, Timings] = {}
    for batch_rows in BATCH_ROWS:
        own = [case for case in cases(given.waiting) if case.batch_rows == batch_rows]
        found |= {case: measure(case, num_batches=given.batches) for case in own}
        print(f"\nbatches of about {batch_rows} rows, {given.batches} per case\n")
        print(render(HEADER, [_line(case, found[case]) for case in own]), flush=True)
    print(f"\nothers took {foreign.share():.0%} of the CPUs\n")
    print("\n".join(verdicts(found)))
    return 0


def cases(waiting: Sequence[int]) -> list[Case]:
    """All of them; without those that would say the same again, or have fewer rows than tenants."""
    return [
        Case(waiting=rows, tenants=tenants, own_groups=own_groups, batch_rows=batch_rows)
        for batch_rows in BATCH_ROWS
        for rows in waiting
        for tenants in TENANTS
        for own_groups in (False, True)
        if tenants <= rows and not (tenants == 1 and own_groups)
    ]


def verdicts(found: dict[Case, Timings]) -> list[str]:
    """The expectation, per batch size, by its worst case."""
    lines = []
    for batch_rows in BATCH_ROWS:
        medians_s = [
            percentile(timings.batch_s, 50)
            for case, timings in found.items()
            if (case.waiting, case.tenants, case.batch_rows) == (TARGET_WAITING, TARGET_TENANTS, batch_rows)
        ]
        if medians_s:
            worst_s = max(medians_s)
            lines.append(
                f"under {TARGET_S * 1000:g} ms per batch of {batch_rows} rows at {TARGET_WAITING:,} rows and "
                f"{TARGET_TENANTS:,} tenants: {'yes' if worst_s < TARGET_S else 'no'} ({worst_s * US:,.0f} µs)"
            )
    return lines


def measure(case: Case, *, num_batches: int) -> Timings:
    """Fill a queue, then take and replace `num_batches` batches."""
    queue: FairQueue[None] = FairQueue()
    source = RowSource(case)
    tenants = [f"t{index}" for index in range(case.tenants)]
    order = np.random.default_rng(0).permutation(case.waiting) % case.tenants
    for index in order:
        queue.add(source.row(tenants[int(index)], now=0.0))
    batch_s: list[float] = []
    admit_s: list[float] = []
    num_rows = 0
    for step in range(1, num_batches + 1):
        now = step * STEP_S
        plan, seconds = _timed_batch(queue, case.limits, now)
        batch_s.append(seconds)
        num_rows += len(plan.rows)
        admit_s += [_timed_admit(queue, source.row(row.tenant, now=now), _roomy(case), now) for row in plan.rows]
    now = num_batches * STEP_S
    return Timings(
        rows_per_batch=num_rows / num_batches,
        batch_s=batch_s,
        admit_s=admit_s,
        refuse_s=_refusals(queue, source, tenants, num=num_batches, now=now),
        none_ready_s=_searches(queue, case.limits, num=max(3, num_batches // 10), now=now),
    )


def _timed_batch(queue: FairQueue[None], limits: BatchLimits, now: float) -> tuple[Plan[None], float]:
    started = time.perf_counter()
    plan = take_batch(queue, limits, Situation(now=now))
    seconds = time.perf_counter() - started
    assert plan is not None, "rows wait and nothing holds them back"
    return plan, seconds


def _timed_admit(queue: FairQueue[None], row: Row[None], limits: QueueLimits, now: float) -> float:
    promises, moment = Promises(), Moment(now=now, pace=Pace(), token_budget=2048)
    started = time.perf_counter()
    admit([row], queue, limits, moment=moment, promises=promises)
    queue.add(row)
    return time.perf_counter() - started


def _refusals(
    queue: FairQueue[None], source: RowSource, tenants: Sequence[str], *, num: int, now: float
) -> list[float]:
    """One row of each tenant in turn, all with the same promises, at a door whose queue is full."""
    limits = QueueLimits(
        max_queued_cost=2**40, max_queued_rows=queue.num_rows, max_queued_rows_per_group=2**40, max_groups=2**20
    )
    promises = Promises()
    seconds = []
    for index in range(max(num, len(tenants) + num)):
        row = source.row(tenants[index % len(tenants)], now=now)
        moment = Moment(now=now, pace=Pace(), token_budget=2048)
        started = time.perf_counter()
        try:
            admit([row], queue, limits, moment=moment, promises=promises)
        except TokenServeError:
            seconds.append(time.perf_counter() - started)
    return seconds[-num:]


def _searches(queue: FairQueue[None], limits: BatchLimits, *, num: int, now: float) -> list[float]:
    """Batches that are not full, in groups that gather company still: the search must look at all of them."""
    patient = BatchLimits(token_budget=2**40, max_rows=2**40, max_wait_s=10.0)
    seconds = []
    for _ in range(num):
        started = time.perf_counter()
        plan = take_batch(queue, patient, Situation(now=now))
        seconds.append(time.perf_counter() - started)
        assert plan is None, "no group is full, and none has waited long enough"
    return seconds


def _roomy(case: Case) -> QueueLimits:
    return QueueLimits(
        max_queued_cost=2**40,
        max_queued_rows=2 * case.waiting,
        max_queued_rows_per_group=2 * case.waiting,
        max_groups=4096,
        max_backlog_s=1e6,
    )


def _line(case: Case, timings: Timings) -> list[str]:
    def us(samples: Sequence[float], percent: float) -> str:
        return f"{percentile(samples, percent) * US:,.0f}"

    return [
        str(case),
        f"{timings.rows_per_batch:.1f}",
        us(timings.batch_s, 50),
        us(timings.batch_s, 99),
        f"{sum(timings.batch_s) / len(timings.batch_s) / timings.rows_per_batch * US:,.1f}",
        us(timings.admit_s, 50),
        us(timings.admit_s, 99),
        us(timings.refuse_s, 50),
        us(timings.none_ready_s, 50),
    ]


if __name__ == "__main__":
    sys.exit(main())
