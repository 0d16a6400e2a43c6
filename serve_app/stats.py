"""`GET /v1/stats`: counters of all replicas, added up; a tenant sees its own rows and nobody else's."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from batching.errors import RevisionUnavailable
from deployments.ingress import Ingress
from deployments.requests import Tenant
from deployments.wire import ReplicaStats, TenantCounts


async def admin_stats(ingress: Ingress) -> dict[str, object]:
    """Per revision and bucket deployment, over all tenants, and per tenant within."""
    revisions: dict[str, object] = {}
    for revision in ingress.directory.names():
        try:
            buckets = await ingress.stats(revision)
        except RevisionUnavailable:
            revisions[revision] = {}
            continue
        revisions[revision] = {deployment: _bucket(replicas) for deployment, replicas in buckets.items()}
    return {"revisions": revisions}


async def tenant_stats(ingress: Ingress, tenant: Tenant) -> dict[str, object]:
    """Per revision, the tenant's own rows, tokens and refused rows."""
    revisions: dict[str, object] = {}
    for revision in ingress.usable(tenant):
        try:
            buckets = await ingress.stats(revision)
        except RevisionUnavailable:
            buckets = {}
        counts = _added(
            replica.tenants[tenant.name]
            for replicas in buckets.values()
            for replica in replicas
            if tenant.name in replica.tenants
        )
        revisions[revision] = {"rows": counts.rows, "tokens": counts.tokens, "refused": counts.refused}
    return {"tenant": tenant.name, "revisions": revisions}


def _bucket(replicas: Sequence[ReplicaStats]) -> dict[str, object]:
    names = sorted({name for replica in replicas for name in replica.tenants})
    tenants = {name: _added(replica.tenants[name] for replica in replicas if name in replica.tenants) for name in names}
    total = _added(tenants.values())
    return {
        "replicas": len(replicas),
        "forwards": sum(replica.forwards for replica in replicas),
        "shared_forwards": sum(replica.shared_forwards for replica in replicas),
        "rows": total.rows,
        "tokens": total.tokens,
        "computed_tokens": sum(replica.computed_tokens for replica in replicas),
        "charged_tokens": sum(replica.charged_tokens for replica in replicas),
        "queued_rows": sum(replica.queued_rows for replica in replicas),
        "queued_tokens": sum(replica.queued_tokens for replica in replicas),
        "refused": total.refused,
        "failed_rows": total.failed_rows,
        "probe_forwards": sum(replica.probe_forwards for replica in replicas),
        "slow_forwards": sum(replica.slow_forwards for replica in replicas),
        "retried_forwards": sum(replica.retried_forwards for replica in replicas),
        "out_of_memory": sum(replica.out_of_memory for replica in replicas),
        # Per replica: sums of these say nothing.
        "backlog_s": [replica.backlog_s for replica in replicas],
        "token_budget": [replica.token_budget for replica in replicas],
        "cost": [asdict(replica.cost) for replica in replicas],
        "tenants": {
            name: {
                "rows": counts.rows,
                "tokens": counts.tokens,
                "refused": counts.refused,
                "failed_rows": counts.failed_rows,
            }
            for name, counts in tenants.items()
        },
    }


def _added(counts: Iterable[TenantCounts]) -> TenantCounts:
    rows = tokens = refused = failed_rows = 0
    for count in counts:
        rows += count.rows
        tokens += count.tokens
        refused += count.refused
        failed_rows += count.failed_rows
    return TenantCounts(rows=rows, tokens=tokens, refused=refused, failed_rows=failed_rows)
