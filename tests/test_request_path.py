"""One request and a neighbour's, from body to answer, through all real parts; only Ray's wires and the model are fake.

The executable version of the README's nine steps. Read it from top to bottom.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deployments.model_replica import ModelReplica
from deployments.wire import InferCall, InferReply, ReplicaStats, RevisionInfo
from serve_app.config import GatewayArgs
from serve_app.http import HttpIngress
from tests.deployments.fakes import FakeModel, FakeReplica, replica, replica_context, small_tokenizer, vector
from tests.fakes import settle

REPOSITORY = Path(__file__).resolve().parent.parent
ACME, GLOBEX = {"X-API-Key": "demo-acme-key"}, {"X-API-Key": "demo-globex-key"}


class Wire:
    """Handles without Ray: the ingress calls the replica's methods directly."""

    def __init__(self, target: ModelReplica) -> None:
        self._target = target

    async def describe(self, application: str, known_fingerprint: str | None) -> tuple[str, RevisionInfo] | None:
        return await self._target.describe(known_fingerprint)

    def bucket(self, application: str, deployment: str) -> "Wire":
        return self

    async def infer(self, call: InferCall) -> InferReply:
        return await self._target.infer(call)

    async def probe(self, timeout_s: float) -> None:
        await self._target.probe(timeout_s)

    async def stats(self) -> list[ReplicaStats]:
        return [await self._target.stats()]


@pytest.fixture(autouse=True)
def _inside_a_replica() -> Iterator[None]:
    with replica_context():
        yield


def fake_model() -> FakeModel:
    """A model with a tokenizer that the ingress can load."""
    model = FakeModel()
    model.tokenizer_json = small_tokenizer()
    return model


async def serve(model: FakeModel) -> tuple[HttpIngress, httpx.AsyncClient, FakeReplica]:
    """A gateway in front of one replica of one bucket."""
    target = replica(model)
    ingress = HttpIngress(
        GatewayArgs(tenants_file=str(REPOSITORY / "tenants.demo.yaml")), connect=Wire(target), host="127.0.0.1"
    )
    await ingress.reconfigure({"revisions": {"minilm@v1": "minilm-v1"}, "aliases": {"minilm": "minilm@v1"}})
    transport = httpx.ASGITransport(app=ingress.asgi_app())
    client = httpx.AsyncClient(transport=transport, base_url="http://gateway")
    while (await client.get("/ready")).status_code != 200:
        await settle()
    return ingress, client, target


def test_one_request_end_to_end() -> None:
    """Two tenants at once: each gets its own rows in its own order, from forwards that the other's rows were not in."""

    async def run() -> None:
        model = fake_model()
        ingress, client, target = await serve(model)
        model.forwards.clear()
        mine, theirs = await asyncio.gather(
            client.post("/v1/infer", json={"revision": "minilm", "inputs": [[7, 8, 9], [5]]}, headers=ACME),
            client.post("/v1/infer", json={"revision": "minilm@v1", "inputs": [[1, 2]]}, headers=GLOBEX),
        )
        outputs = mine.json()["outputs"]
        assert [output["num_tokens"] for output in outputs] == [3, 1]
        assert outputs[0]["embedding"] == pytest.approx(vector([7, 8, 9]).tolist())
        assert outputs[1]["embedding"] == pytest.approx(vector([5]).tolist())
        assert theirs.json()["outputs"][0]["embedding"] == pytest.approx(vector([1, 2]).tolist())
        assert sorted(model.forwards) == [[[1, 2]], [[7, 8, 9], [5]]]
        stats = await target.stats()
        assert (stats.forwards, stats.computed_tokens, stats.queued_rows) == (2, 6, 0)
        assert (stats.tenants["acme"].tokens, stats.tenants["globex"].tokens) == (4, 2)
        await client.aclose()
        await ingress.stop()
        await target.stop()

    asyncio.run(run())


def test_the_same_path_with_a_failing_forward() -> None:
    """The batch that failed answers 500 with a named error and nothing of the payload; the next request is served."""

    async def run() -> None:
        model = fake_model()
        ingress, client, target = await serve(model)
        body = {"revision": "minilm", "inputs": [[7, 8, 9]]}
        model.answers.append(RuntimeError("ids were 7 8 9"))
        failed = await client.post("/v1/infer", json=body, headers=ACME)
        assert failed.status_code == 500
        assert failed.json()["error"]["code"] == "forward_failed"
        assert "7 8 9" not in failed.text
        assert (await client.post("/v1/infer", json=body, headers=ACME)).status_code == 200
        assert (await target.stats()).tenants["acme"].failed_rows == 1
        await client.aclose()
        await ingress.stop()
        await target.stop()

    asyncio.run(run())
