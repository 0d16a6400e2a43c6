"""Every number that a replica counts, declared once: the same events feed `/v1/stats` and Prometheus.

Metrics carry no tenant label, so that the number of series does not grow with tenants; stats do.
"""

from dataclasses import replace

from ray.serve import metrics

from batching.cost import CostModel
from batching.errors import TokenServeError
from batching.forwards import FinishedForward
from batching.row import Payload
from deployments.wire import CostStats, ReplicaStats, TenantCounts

PROBE_TENANT = "_probe"
"""Owner of readiness probes: they run like any row and count as nobody's."""

FORWARD_MS_BOUNDARIES = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000]


class ReplicaCounters:
    """Counts of one replica. Construct it inside a replica: Serve tags metrics by the deployment they are made in."""

    def __init__(self) -> None:
        self._tenants: dict[str, TenantCounts] = {}
        self._forwards = 0
        self._shared_forwards = 0
        self._computed_tokens = 0
        self._charged_tokens = 0
        self._probe_forwards = 0
        self._slow_forwards = 0
        self._retried_forwards = 0
        self._out_of_memory = 0
        self._metrics = _Metrics()

    def answered(self, tenant: str, *, rows: int, tokens: int) -> None:
        """Rows that got a value."""
        if tenant != PROBE_TENANT:
            self._add(tenant, rows=rows, tokens=tokens)
            self._metrics.rows.inc(rows)
            self._metrics.tokens.inc(tokens)

    def refused(self, tenant: str, *, rows: int) -> None:
        """Rows turned away at the door."""
        if tenant != PROBE_TENANT:
            self._add(tenant, refused=rows)
            self._metrics.refused.inc(rows)

    def abandoned(self, tenant: str, *, rows: int) -> None:
        """Accepted rows whose caller left before the answer, deadlines of the ingress included."""
        if tenant != PROBE_TENANT:
            self._add(tenant, failed_rows=rows)
            self._metrics.failed_rows.inc(rows, tags={"error": "CallerLeft"})

    def failed(self, tenant: str, error: TokenServeError) -> None:
        """One accepted row that ended in `error`."""
        if tenant != PROBE_TENANT:
            self._add(tenant, failed_rows=1)
            self._metrics.failed_rows.inc(1, tags={"error": type(error).__name__})

    def forward(self, finished: FinishedForward[Payload], *, computed_tokens: int) -> None:
        """A forward that ended, well or not."""
        if all(row.tenant == PROBE_TENANT for row in finished.plan.rows):
            self._probe_forwards += 1
            return
        self._forwards += 1
        self._shared_forwards += len({row.tenant for row in finished.plan.rows}) > 1
        self._computed_tokens += computed_tokens
        self._charged_tokens += finished.plan.cost
        self._metrics.forwards.inc(1, tags={"reason": finished.plan.reason})
        if computed_tokens:  # none when the forward raised, and a Ray counter refuses to grow by 0
            self._metrics.computed_tokens.inc(computed_tokens)
        if finished.num_attempts > 1:
            self._retried_forwards += 1
            self._metrics.retried_forwards.inc(1)
        if finished.out_of_memory_cost is not None:
            self._out_of_memory += 1
            self._metrics.out_of_memory.inc(1)
        self._metrics.charged_tokens.inc(finished.plan.cost)
        self._metrics.forward_ms.observe(finished.duration_s * 1000)

    def slow_forward(self) -> None:
        """A forward took several times its predicted time."""
        self._slow_forwards += 1
        self._metrics.slow_forwards.inc(1)

    def cost(self, model: CostModel) -> None:
        """The cost model in force."""
        self._metrics.cost_error.set(model.error)
        self._metrics.overhead_ms.set(model.overhead_s * 1000)
        self._metrics.token_us.set(model.per_token_s * 1e6)

    def queued(self, *, rows: int, tokens: int, backlog_s: float) -> None:
        """What waits now."""
        self._metrics.backlog_s.set(backlog_s)
        self._metrics.queued_rows.set(rows)
        self._metrics.queued_tokens.set(tokens)

    def stats(
        self, *, queued_rows: int, queued_tokens: int, backlog_s: float, token_budget: int, cost: CostStats
    ) -> ReplicaStats:
        """All counts as one value, beside what the replica knows of itself."""
        return ReplicaStats(
            forwards=self._forwards,
            shared_forwards=self._shared_forwards,
            computed_tokens=self._computed_tokens,
            charged_tokens=self._charged_tokens,
            probe_forwards=self._probe_forwards,
            slow_forwards=self._slow_forwards,
            retried_forwards=self._retried_forwards,
            out_of_memory=self._out_of_memory,
            queued_rows=queued_rows,
            queued_tokens=queued_tokens,
            backlog_s=backlog_s,
            token_budget=token_budget,
            cost=cost,
            tenants=dict(self._tenants),
        )

    def _add(self, tenant: str, *, rows: int = 0, tokens: int = 0, refused: int = 0, failed_rows: int = 0) -> None:
        counts = self._tenants.get(tenant, TenantCounts())
        self._tenants[tenant] = replace(
            counts,
            rows=counts.rows + rows,
            tokens=counts.tokens + tokens,
            refused=counts.refused + refused,
            failed_rows=counts.failed_rows + failed_rows,
        )


class _Metrics:
    """The Prometheus side. Serve adds the tags deployment, replica and application."""

    def __init__(self) -> None:
        self.forwards = metrics.Counter(
            "raggedserve_forwards", description="Forwards run, by why the batch left.", tag_keys=("reason",)
        )
        self.rows = metrics.Counter("raggedserve_rows", description="Rows answered.")
        self.tokens = metrics.Counter("raggedserve_tokens", description="Real tokens of answered rows.")
        self.computed_tokens = metrics.Counter(
            "raggedserve_computed_tokens", description="Positions the model processed, padding included."
        )
        self.charged_tokens = metrics.Counter(
            "raggedserve_charged_tokens", description="Cost of the batches against the token budget."
        )
        self.refused = metrics.Counter("raggedserve_refused_rows", description="Rows turned away at the door.")
        self.failed_rows = metrics.Counter(
            "raggedserve_failed_rows", description="Accepted rows that ended in an error.", tag_keys=("error",)
        )
        self.queued_rows = metrics.Gauge("raggedserve_queued_rows", description="Rows waiting.")
        self.queued_tokens = metrics.Gauge("raggedserve_queued_tokens", description="Tokens of the rows waiting.")
        self.backlog_s = metrics.Gauge("raggedserve_backlog_s", description="Predicted time to work off what waits.")
        self.slow_forwards = metrics.Counter(
            "raggedserve_slow_forwards", description="Forwards that took several times their predicted time."
        )
        self.retried_forwards = metrics.Counter(
            "raggedserve_retried_forwards", description="Forwards that failed and whose rows were tried apart."
        )
        self.out_of_memory = metrics.Counter(
            "raggedserve_out_of_memory", description="Forwards for which the device's memory was too small."
        )
        self.cost_error = metrics.Gauge(
            "raggedserve_cost_error", description="Median relative error of predicted forward times."
        )
        self.overhead_ms = metrics.Gauge(
            "raggedserve_forward_overhead_ms", description="Predicted time of a forward beside its rows."
        )
        self.token_us = metrics.Gauge(
            "raggedserve_token_us", description="Predicted time of one position in a forward, in microseconds."
        )
        self.forward_ms = metrics.Histogram(
            "raggedserve_forward_ms",
            description="Duration of a forward in milliseconds, from its start to its outcomes.",
            boundaries=FORWARD_MS_BOUNDARIES,
        )
