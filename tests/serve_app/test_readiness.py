"""GET /ready tells the truth, and cannot be used to make work."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray.exceptions import ActorDiedError

from serve_app import http
from serve_app.http import READY_FRESH_S
from tests.deployments.fakes import FakeConnect, revision_info
from tests.serve_app.fakes import ACME, Server

REVISIONS = {"minilm@v1": "minilm-v1", "other@v1": "other-v1"}
UP: dict[str, Any] = {"minilm-v1": revision_info(), "other-v1": revision_info("other@v1")}


class Time:
    """The monotonic clock of `serve_app.http`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        """Now."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    """Time as /ready sees it."""
    made = Time()
    monkeypatch.setattr(http, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


def gateway(folder: Path, revisions: dict[str, str], **args: Any) -> Server:
    """A gateway for these revisions, with two applications up."""
    return Server(folder, settings={"revisions": revisions}, connect=FakeConnect(dict(UP)), **args)


def ready(server: Server, key: str | None = None) -> httpx.Response:
    """One question."""
    return server.get("/ready", key=key)


def test_bl_145_nothing_configured_is_not_ready(tmp_path: Path) -> None:
    """A gateway without revisions serves nothing and never says that it is ready."""
    with gateway(tmp_path, {}) as server:
        response = ready(server)
    assert (response.status_code, response.json()) == (503, {"ready": False, "revisions": {}})


def test_bl_145_ready_when_every_revision_answers(tmp_path: Path, clock: Time) -> None:
    """One revision down is not ready, with its reason; when it comes up the answer turns."""
    with gateway(tmp_path, REVISIONS | {"down@v1": "down-v1"}) as server:
        before = ready(server)
        server.connect.applications["down-v1"] = revision_info("down@v1")
        server.run(server.rounds.next())
        clock.now += READY_FRESH_S
        after = ready(server)
    assert (before.status_code, before.headers["retry-after"]) == (503, "1")
    assert before.json() == {
        "ready": False,
        "revisions": {
            "minilm@v1": {"ready": True, "reason": None},
            "other@v1": {"ready": True, "reason": None},
            "down@v1": {"ready": False, "reason": "application down-v1 is not deployed"},
        },
    }
    assert (after.status_code, after.json()["ready"]) == (200, True)
    assert "retry-after" not in after.headers


def test_failing_probe_is_not_ready(tmp_path: Path) -> None:
    """A revision whose model fails in one bucket is not ready, although its application answers."""
    with gateway(tmp_path, REVISIONS) as server:
        server.bucket("tokens-64").probe_failure = ActorDiedError()
        response = ready(server)
    assert response.status_code == 503
    assert response.json()["revisions"]["minilm@v1"] == {"ready": False, "reason": "probe failed: ActorDiedError"}
    assert response.json()["revisions"]["other@v1"] == {"ready": True, "reason": None}


def test_answer_is_reused_for_a_second(tmp_path: Path, clock: Time) -> None:
    """Within READY_FRESH_S nobody is probed again; after it everybody is."""
    with gateway(tmp_path, REVISIONS) as server:
        statuses = [ready(server).status_code]
        clock.now += READY_FRESH_S - 0.001
        statuses.append(ready(server).status_code)
        probes = [server.bucket().num_probes]
        clock.now += 0.001
        server.bucket().probe_failure = ActorDiedError()
        statuses.append(ready(server).status_code)
        probes.append(server.bucket().num_probes)
    assert statuses == [200, 200, 503]
    assert probes == [1, 2]


def test_many_callers_share_one_probe(tmp_path: Path) -> None:
    """A crowd that asks at once makes one probe per bucket."""

    async def crowd(server: Server) -> list[httpx.Response]:
        return await asyncio.gather(*(server.send("GET", "/ready", key=None) for _ in range(50)))

    with gateway(tmp_path, REVISIONS) as server:
        responses = server.run(crowd(server))
        assert {response.status_code for response in responses} == {200}
        assert server.bucket().num_probes == 1


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        pytest.param(None, False, id="no key"),
        pytest.param("bad", False, id="bad key"),
        pytest.param(ACME, True, id="a key"),
    ],
)
def test_details_can_be_kept_from_strangers(key: str | None, *, shown: bool, tmp_path: Path) -> None:
    """With public_readiness_details off, a caller without a key learns ready or not, and no name."""
    with gateway(tmp_path, REVISIONS | {"down@v1": "down-v1"}, public_readiness_details=False) as server:
        response = ready(server, key)
    assert response.status_code == 503
    assert ("revisions" in response.json()) is shown
    assert ("down" in response.text) is shown


def test_health_does_not_wait_for_models(tmp_path: Path) -> None:
    """The process is up although no revision is."""
    with gateway(tmp_path, {"down@v1": "down-v1"}) as server:
        assert server.get("/health", key=None).status_code == 200


def test_ingress_without_user_config_is_unhealthy(tmp_path: Path) -> None:
    """Ray's health check fails, in words, while there are no settings."""
    with gateway(tmp_path, {}) as server:
        bare = http.HttpIngress(server.ingress._args, connect=server.connect, host="127.0.0.1")
        with pytest.raises(RuntimeError, match="needs a user_config"):
            server.run(bare.check_health())
        server.run(bare.stop())
