"""What a replica counts, in its stats and in Prometheus alike."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from batching.cost import CostModel
from batching.errors import DeadlineExceeded
from batching.forwards import FinishedForward
from batching.plan import Plan
from batching.row import GroupKey, Row
from deployments import counters
from deployments.counters import PROBE_TENANT, ReplicaCounters
from deployments.wire import TenantCounts
from tests.deployments.fakes import COST


@dataclass
class Recorded:
    """One metric: what was declared, and what was written into it by tags."""

    name: str
    tag_keys: tuple[str, ...] = ()
    values: dict[tuple[str, ...], float] = field(default_factory=dict)

    def inc(self, value: float, tags: dict[str, str] | None = None) -> None:
        """Grow, under Ray's rule."""
        assert value > 0, "ray.util.metrics.Counter refuses it"
        self._write(value, tags, added=True)

    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        """Replace."""
        self._write(value, tags, added=False)

    def observe(self, value: float, tags: dict[str, str] | None = None) -> None:
        """Note one more."""
        self._write(value, tags, added=True)

    def _write(self, value: float, tags: dict[str, str] | None, *, added: bool) -> None:
        assert set(tags or {}) == set(self.tag_keys)
        key = tuple((tags or {}).values())
        self.values[key] = value + (self.values.get(key, 0.0) if added else 0.0)


class FakeMetrics:
    """`ray.serve.metrics`, with the numbers to look at."""

    def __init__(self) -> None:
        self.declared: dict[str, Recorded] = {}

    def Counter(self, name: str, *, tag_keys: tuple[str, ...] = (), **ignored: Any) -> Recorded:
        """Declare."""
        return self.declared.setdefault(name, Recorded(name, tag_keys))

    Gauge = Histogram = Counter

    def value(self, name: str, *tags: str) -> float:
        """One series."""
        return self.declared[f"raggedserve_{name}"].values[tags]

    def written(self) -> set[str]:
        """Names of metrics that hold anything."""
        return {name.removeprefix("raggedserve_") for name, metric in self.declared.items() if metric.values}


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> FakeMetrics:
    """Ray's metrics need a replica to be tagged with; these do not."""
    fake = FakeMetrics()
    monkeypatch.setattr(counters, "metrics", fake)
    return fake


def finished(*tenants: str, cost: int = 10, **changes: Any) -> FinishedForward[None]:
    """A forward of one row per tenant name."""
    key = GroupKey("group", "minilm@v1", 0)
    rows = tuple(
        Row[None](key=key, tenant=name, num_tokens=cost, cost=cost, work_s=1.0, payload=None) for name in tenants
    )
    plan = Plan(key=key, rows=rows, reason="waited")
    return FinishedForward(plan=plan, started=0.0, duration_s=0.25, predicted_s=0.2, num_failed=0, **changes)


PRESENT: dict[str, Any] = {
    "queued_rows": 4,
    "queued_tokens": 40,
    "backlog_s": 0.5,
    "token_budget": 2048,
    "cost": COST,
}


def test_forward_that_computed_nothing_is_counted(metrics: FakeMetrics) -> None:
    """A forward that raised counts as a forward and is charged, although no position was processed."""
    counted = ReplicaCounters()
    counted.forward(finished("acme"), computed_tokens=0)
    stats = counted.stats(**PRESENT)
    assert (stats.forwards, stats.computed_tokens, stats.charged_tokens) == (1, 0, 10)
    assert metrics.value("charged_tokens") == 10
    assert metrics.value("forward_ms") == 250


def test_every_event_feeds_stats_and_prometheus(metrics: FakeMetrics) -> None:
    """The same events give the same numbers in both."""
    counted = ReplicaCounters()
    counted.answered("acme", rows=3, tokens=160)
    counted.answered("globex", rows=1, tokens=5)
    counted.refused("acme", rows=7)
    counted.failed("acme", DeadlineExceeded(1.0))
    counted.forward(finished("acme", "acme"), computed_tokens=18)
    counted.queued(rows=4, tokens=40, backlog_s=0.5)
    counted.cost(CostModel(overhead_s=0.01, per_token_s=1e-4, per_pair_s=0.0, error=0.05, is_reliable=True))
    stats = counted.stats(**PRESENT)
    assert stats.tenants == {
        "acme": TenantCounts(rows=3, tokens=160, refused=7, failed_rows=1),
        "globex": TenantCounts(rows=1, tokens=5),
    }
    assert (stats.forwards, stats.computed_tokens, stats.charged_tokens) == (1, 18, 20)
    assert (metrics.value("rows"), metrics.value("tokens")) == (4, 165)
    assert (metrics.value("refused_rows"), metrics.value("failed_rows", "DeadlineExceeded")) == (7, 1)
    assert (metrics.value("forwards", "waited"), metrics.value("computed_tokens")) == (1, 18)
    assert (metrics.value("queued_rows"), metrics.value("queued_tokens")) == (4, 40)
    assert (stats.queued_rows, stats.queued_tokens, stats.backlog_s, stats.cost) == (4, 40, 0.5, COST)
    assert [metrics.value(name) for name in ("backlog_s", "cost_error", "forward_overhead_ms", "token_us")] == (
        pytest.approx([0.5, 0.05, 10.0, 100.0])
    )


def test_troubles_are_counted(metrics: FakeMetrics) -> None:
    """Slow forwards, forwards taken apart, and those for which memory was too small."""
    counted = ReplicaCounters()
    counted.slow_forward()
    counted.forward(finished("acme", num_attempts=3), computed_tokens=1)
    counted.forward(finished("acme", num_attempts=3, out_of_memory_cost=10), computed_tokens=1)
    stats = counted.stats(**PRESENT)
    assert (stats.slow_forwards, stats.retried_forwards, stats.out_of_memory) == (1, 2, 1)
    assert [metrics.value(name) for name in ("slow_forwards", "retried_forwards", "out_of_memory")] == [1, 2, 1]


def test_probes_are_nobodys(metrics: FakeMetrics) -> None:
    """A probe shows up as a probe forward and in no other number."""
    counted = ReplicaCounters()
    counted.answered(PROBE_TENANT, rows=1, tokens=1)
    counted.refused(PROBE_TENANT, rows=1)
    counted.failed(PROBE_TENANT, DeadlineExceeded(1.0))
    counted.forward(finished(PROBE_TENANT), computed_tokens=1)
    stats = counted.stats(**PRESENT)
    assert (stats.probe_forwards, stats.forwards, stats.tenants) == (1, 0, {})
    assert metrics.written() == set()


@pytest.mark.parametrize(
    ("tenants", "expected"),
    [
        pytest.param("aaa", 0, id="one tenant"),
        pytest.param("aba", 1, id="two tenants of one batch group"),
    ],
)
def test_shared_forwards_are_counted(tenants: str, expected: int, metrics: FakeMetrics) -> None:
    """A forward with rows of several tenants can be told from one of a single tenant."""
    counted = ReplicaCounters()
    counted.forward(finished(*tenants), computed_tokens=1)
    assert counted.stats(**PRESENT).shared_forwards == expected


def test_no_metric_has_a_tenant_label(metrics: FakeMetrics) -> None:
    """The number of series does not grow with tenants."""
    ReplicaCounters()
    assert {key for metric in metrics.declared.values() for key in metric.tag_keys} == {"reason", "error"}


def test_stats_are_a_snapshot(metrics: FakeMetrics) -> None:
    """What was handed out does not change when more is counted."""
    counted = ReplicaCounters()
    counted.answered("acme", rows=1, tokens=1)
    before = counted.stats(**PRESENT)
    counted.answered("acme", rows=1, tokens=1)
    counted.answered("globex", rows=1, tokens=1)
    assert before.tenants == {"acme": TenantCounts(rows=1, tokens=1)}
