"""When things break on a real cluster: killed replicas, full backlogs, clients that leave, bad settings."""

import asyncio
import copy
import os
import signal
import time
from typing import Any

import httpx
import pytest

from tests.cluster.server import ACME, ADMIN, GLOBEX, Server, eventually

APPLICATION = "minilm-breakable"
REVISION = "minilm@breakable"
DEPLOYMENT = "tokens-256"


@pytest.fixture(scope="module")
def breakable(server: Server) -> Server:
    """A revision of its own, for settings and kills that the other tests must not feel."""
    server.add_revision(APPLICATION, REVISION)
    return server


def post_all(server: Server, bodies: list[dict[str, Any]], *, timeout_s: float = 60.0) -> list[httpx.Response]:
    """Send all bodies at once and wait for every answer."""

    async def send() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=len(bodies))
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=timeout_s) as client:
            return await asyncio.gather(*(client.post("/v1/infer", json=body, headers=ACME) for body in bodies))

    return asyncio.run(send())


def test_acc07_full_backlog_is_refused_at_once_with_retry_after(breakable: Server) -> None:
    """ACC-07, BL-103: beyond the backlog rows get 503 and a time to come back; those inside are answered."""
    pids = breakable.pids(APPLICATION)
    breakable.configure_bucket(APPLICATION, {"max_queued_rows": 8, "token_budget": 256})
    body = {"revision": REVISION, "inputs": ["word " * 200] * 4}
    answers = post_all(breakable, [body] * 40)
    assert {answer.status_code for answer in answers} == {200, 503}
    refused = [answer for answer in answers if answer.status_code == 503]
    assert {answer.json()["error"]["code"] for answer in refused} <= {"queue_full", "overloaded"}
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)
    # The ingress refuses again what a replica has just refused, and that is not counted there.
    num_counted = breakable.stats(REVISION, DEPLOYMENT)["refused"]
    assert 0 < num_counted <= 4 * len(refused)
    assert breakable.client.get("/v1/stats", headers=ACME).json()["revisions"][REVISION]["refused"] == num_counted
    breakable.configure_bucket(APPLICATION, {})
    assert breakable.pids(APPLICATION) == pids, "limits change without a restart"


def test_acc07_a_poisoned_request_does_not_stop_the_queue(breakable: Server) -> None:
    """ACC-07, BL-095: requests that cannot run are refused, and the next good one is answered within two seconds."""
    poison: list[list[Any]] = [[[10**9]], [[-1]], [[True]], [[1.5]], [None], [{}], ["word " * 5000], [[]]]
    for inputs in poison:
        assert breakable.infer(REVISION, inputs, ACME).status_code == 400
    started = time.monotonic()
    assert breakable.infer(REVISION, ["a good one"], ACME).status_code == 200
    assert time.monotonic() - started < 2


def test_acc07_a_long_row_is_not_overtaken_without_bound(breakable: Server) -> None:
    """ACC-07, BL-128: a row that needs the whole budget is served while short rows keep coming."""
    breakable.configure_bucket(APPLICATION, {"token_budget": 256})
    long_row = {"revision": REVISION, "inputs": [[101, *[2000] * 254, 102]]}

    async def race() -> tuple[float, float]:
        async with httpx.AsyncClient(base_url=breakable.url, timeout=60) as client:
            flood_until = time.monotonic() + 6

            async def flood() -> None:
                while time.monotonic() < flood_until:
                    body = {"revision": REVISION, "inputs": ["word " * 20] * 8}
                    assert (await client.post("/v1/infer", json=body, headers=ACME)).status_code == 200

            short = [asyncio.create_task(flood()) for _ in range(8)]
            await asyncio.sleep(0)
            started = time.monotonic()
            assert (await client.post("/v1/infer", json=long_row, headers=ACME)).status_code == 200
            served_after_s = time.monotonic() - started
            await asyncio.gather(*short)
            return served_after_s, time.monotonic() - started

    served_after_s, flooded_s = asyncio.run(race())
    assert served_after_s < flooded_s, "the long row was answered only when the flood had ended"
    breakable.configure_bucket(APPLICATION, {})


def test_clients_that_leave_take_their_rows_along(breakable: Server) -> None:
    """BL-121: rows of a closed connection leave the queue, and later requests are answered as usual."""
    breakable.configure_bucket(APPLICATION, {"token_budget": 256})
    body = {"revision": REVISION, "inputs": ["word " * 200] * 64}
    before = breakable.stats(REVISION, DEPLOYMENT)["rows"]

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=breakable.url, timeout=0.5) as client:
            sent = [client.post("/v1/infer", json=body, headers=ACME) for _ in range(20)]
            await asyncio.gather(*sent, return_exceptions=True)

    asyncio.run(leave())
    eventually(lambda: breakable.stats(REVISION, DEPLOYMENT)["queued_rows"] == 0, timeout_s=20)
    assert breakable.stats(REVISION, DEPLOYMENT)["rows"] - before < 20 * 64, "rows nobody waited for were run"
    assert breakable.infer(REVISION, ["still here"], ACME).status_code == 200
    breakable.configure_bucket(APPLICATION, {})


def test_bl099_a_passed_deadline_is_504_and_names_the_limit(breakable: Server) -> None:
    """BL-099: the request's own limit is in the message, and its rows are not run later."""
    breakable.configure_bucket(APPLICATION, {"token_budget": 256})
    answers = post_all(
        breakable, [{"revision": REVISION, "inputs": ["word " * 200] * 32, "timeout_ms": 150} for _ in range(8)]
    )
    late = [answer for answer in answers if answer.status_code != 200]
    assert late
    # Most are known to be hopeless before they wait.
    codes = {(answer.status_code, answer.json()["error"]["code"]) for answer in late}
    assert codes <= {(504, "deadline_exceeded"), (504, "deadline_unreachable")}
    assert all("150 ms" in answer.json()["error"]["message"] for answer in late)
    eventually(lambda: breakable.stats(REVISION, DEPLOYMENT)["queued_rows"] == 0, timeout_s=10)
    breakable.configure_bucket(APPLICATION, {})


def test_bad_user_config_keeps_the_server_answering(breakable: Server) -> None:
    """A misspelt limit is reported by Serve with its name; the revision goes on with what it had or comes back."""
    config = copy.deepcopy(breakable.config)
    application = next(app for app in config["applications"] if app["name"] == APPLICATION)
    application["deployments"][0]["user_config"] = {"token_buget": 512}
    good = copy.deepcopy(breakable.config)
    breakable.deploy(config)

    def report() -> str:
        deployments = breakable.applications()[APPLICATION]["deployments"].values()
        return " ".join(str(deployment["message"]) for deployment in deployments)

    eventually(lambda: "token_buget" in report())
    breakable.deploy(good)
    eventually(lambda: breakable.infer(REVISION, ["a"], ACME).status_code == 200)


def test_bl168_killed_replica_under_load(breakable: Server) -> None:
    """BL-168: after kill -9 every request ends in 200 or a named error, readiness tells the truth, service returns."""
    (pid,) = breakable.pids(APPLICATION)[DEPLOYMENT]
    outcomes: list[tuple[int, str | None]] = []
    readiness: list[bool] = []

    async def load() -> None:
        async with httpx.AsyncClient(base_url=breakable.url, timeout=120) as client:
            end = time.monotonic() + 15

            async def ask(headers: dict[str, str]) -> None:
                while time.monotonic() < end:
                    body = {"revision": REVISION, "inputs": ["word " * 20] * 4, "timeout_ms": 60_000}
                    answer = await client.post("/v1/infer", json=body, headers=headers)
                    error = answer.json().get("error") or {}
                    outcomes.append((answer.status_code, error.get("code")))

            async def watch() -> None:
                while time.monotonic() < end:
                    body = (await client.get("/ready")).json()
                    readiness.append(bool(body["revisions"][REVISION]["ready"]))
                    await asyncio.sleep(0.3)

            async def kill() -> None:
                await asyncio.sleep(2)
                os.kill(pid, signal.SIGKILL)

            await asyncio.gather(*(ask(ACME if number % 2 else GLOBEX) for number in range(16)), watch(), kill())

    asyncio.run(load())
    assert {outcome for outcome in outcomes if outcome[0] != 200} <= {(503, "replica_lost"), (504, "deadline_exceeded")}
    assert sum(status == 200 for status, _ in outcomes) > 16
    assert readiness[0] is True
    assert False in readiness, "readiness did not notice the dead replica"
    eventually(lambda: breakable.infer(REVISION, ["a"], ACME).status_code == 200)
    breakable.wait_ready()
    assert breakable.pids(APPLICATION)[DEPLOYMENT] != {pid}


def test_prometheus_metrics_follow_stats(breakable: Server) -> None:
    """The counters of /v1/stats are exported by Serve's metrics under their names, without tenant labels."""
    breakable.infer(REVISION, ["count me"], ACME)
    targets = httpx.get(f"{breakable.dashboard}/api/prometheus/sd", timeout=10)
    addresses = [address for entry in targets.json() for address in entry["targets"]] if targets.is_success else []
    assert addresses

    def exported() -> bool:
        text = "".join(httpx.get(f"http://{address}/metrics", timeout=10).text for address in addresses)
        lines = [line for line in text.splitlines() if "raggedserve_" in line and REVISION.split("@")[1] in line]
        names = {line.partition("{")[0].removeprefix("ray_").removesuffix("_total") for line in lines}
        assert not any("acme" in line for line in lines)
        return names >= {"raggedserve_forwards", "raggedserve_rows", "raggedserve_computed_tokens"}

    eventually(exported, timeout_s=40)
    assert breakable.client.get("/v1/stats", headers=ADMIN).status_code == 200
