"""GET /v1/stats: sums over replicas, and nobody sees another tenant's rows."""

from dataclasses import asdict
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from deployments.wire import TenantCounts
from tests.deployments.fakes import COST, replica_stats
from tests.serve_app.fakes import ACME, ADMIN, GLOBEX, Server

ACME_COUNTS = TenantCounts(rows=3, tokens=160, refused=5, failed_rows=1)
OTHERS = TenantCounts(rows=10, tokens=1000, refused=100, failed_rows=10000)


@pytest.fixture
def counted(server: Server) -> Server:
    """Two replicas for tokens-16, one for tokens-64, none that answers for other@v1."""
    server.bucket("tokens-16").replicas = [
        replica_stats(tenants={"acme": ACME_COUNTS, "globex": OTHERS}),
        replica_stats(tenants={"acme": OTHERS}),
    ]
    server.bucket("tokens-64").replicas = [replica_stats(tenants={"acme": ACME_COUNTS})]
    return server


def test_admin_sees_sums_over_replicas(counted: Server) -> None:
    """Per revision and bucket: every counter added up over replicas, in total and per tenant."""
    revisions: dict[str, Any] = counted.get("/v1/stats", key=ADMIN).json()["revisions"]
    assert revisions["minilm@v1"]["tokens-16"] == {
        "replicas": 2,
        "forwards": 4,
        "shared_forwards": 2,
        "rows": 23,
        "tokens": 2160,
        "computed_tokens": 60,
        "charged_tokens": 1000,
        "queued_rows": 22,
        "queued_tokens": 26,
        "refused": 205,
        "failed_rows": 20001,
        "probe_forwards": 14,
        "slow_forwards": 6,
        "retried_forwards": 10,
        "out_of_memory": 8,
        "backlog_s": [0.25, 0.25],
        "token_budget": [2048, 2048],
        "cost": [asdict(COST), asdict(COST)],
        "tenants": {
            "acme": {"rows": 13, "tokens": 1160, "refused": 105, "failed_rows": 10001},
            "globex": {"rows": 10, "tokens": 1000, "refused": 100, "failed_rows": 10000},
        },
    }


def test_buckets_are_kept_apart(counted: Server) -> None:
    """Each bucket deployment has its own numbers."""
    buckets = counted.get("/v1/stats", key=ADMIN).json()["revisions"]["minilm@v1"]
    assert [(name, bucket["rows"]) for name, bucket in buckets.items()] == [("tokens-16", 23), ("tokens-64", 3)]


def test_replicas_that_do_not_answer_are_missing(counted: Server) -> None:
    """A bucket without any answer has zeros and says that nobody answered; a revision that is down has no buckets."""
    revisions = counted.get("/v1/stats", key=ADMIN).json()["revisions"]
    silent = revisions["other@v1"]["tokens-16"]
    assert [silent.pop(name) for name in ("tenants", "backlog_s", "token_budget", "cost")] == [{}, [], [], []]
    assert set(silent.values()) == {0}
    assert revisions["down@v1"] == {}


def test_tenant_sees_its_own_rows_only(counted: Server) -> None:
    """A tenant gets its rows, tokens and refused rows over all buckets of the revisions it may use, and no more."""
    response = counted.get("/v1/stats", key=ACME)
    assert response.json() == {
        "tenant": "acme",
        "revisions": {
            "minilm@v1": {"rows": 16, "tokens": 1320, "refused": 110},
            "down@v1": {"rows": 0, "tokens": 0, "refused": 0},
        },
    }
    assert "globex" not in response.text


def test_tenant_sees_nothing_of_a_revision_it_may_not_use(counted: Server) -> None:
    """Rows that a tenant had in a revision it has lost are not shown."""
    assert counted.get("/v1/stats", key=GLOBEX).json() == {
        "tenant": "globex",
        "revisions": {"other@v1": {"rows": 0, "tokens": 0, "refused": 0}},
    }


@pytest.mark.parametrize(
    "failure",
    [
        pytest.param(ActorDiedError(), id="died"),
        pytest.param(DeploymentUnavailableError(DeploymentID("tokens-16", "minilm-v1")), id="being restarted"),
        pytest.param(TimeoutError(), id="stands still"),
    ],
)
def test_stats_while_a_replica_is_down(failure: BaseException, counted: Server) -> None:
    """The revision's counters are missing, the others are there, and Ray's text is in no reply."""
    counted.bucket("tokens-16").stats_failure = failure
    revisions = counted.get("/v1/stats", key=ADMIN).json()["revisions"]
    assert revisions["minilm@v1"] == {}
    assert revisions["other@v1"]
    assert counted.get("/v1/stats", key=ACME).json()["revisions"]["minilm@v1"]["rows"] == 0
