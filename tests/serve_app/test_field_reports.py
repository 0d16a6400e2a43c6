"""Failures that others reported of their servers, from HTTP down to a replica in this process, without Ray."""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from ray.serve.config import HTTPOptions

from deployments.settings import MAX_ROWS_PER_FORWARD, BucketSettings
from serve_app import app
from serve_app.config import PROJECT_ROOT, GatewayArgs, RevisionArgs
from tests.deployments.fakes import (
    HANG_S,
    FakeConnect,
    FakeModel,
    FakeReplica,
    infer_call,
    replica,
    replica_context,
    revision_info,
)
from tests.fakes import settle
from tests.serve_app.fakes import Server, error_of, native, openai

MAX_TOKENS = 64
THREE_IDS = [101, 7, 102]
"""As many tokens as the text "the" has."""


class ReplicaConnect(FakeConnect):
    """One application whose only bucket is a replica with a fake model."""

    def __init__(self) -> None:
        super().__init__({"minilm-v1": revision_info(ceilings=(MAX_TOKENS,))})
        self.model = FakeModel()
        self.replica: FakeReplica | None = None

    def bucket(self, application: str, deployment: str) -> Any:
        """The replica itself: what Ray adds are processes."""
        self.replica = replica(self.model, max_tokens=MAX_TOKENS)
        return self.replica


@dataclass(frozen=True, kw_only=True)
class Gateway:
    """The gateway's server, and the model and replica behind it."""

    server: Server
    model: FakeModel
    replica: FakeReplica

    async def busy(self) -> "asyncio.Task[object]":
        """Make a forward of one row run until the model is released; other rows wait behind it."""
        self.model.hold()
        running = asyncio.create_task(self.replica.infer(infer_call([[9]], tenant="first")))
        await self.model.started()
        return running

    async def queued(self, num_rows: int) -> None:
        """Wait until so many rows wait."""
        async with asyncio.timeout(HANG_S):
            while (await self.replica.stats()).queued_rows != num_rows:  # noqa: ASYNC110 - others need turns, not time
                await asyncio.sleep(0)

    def post(self, path: str, body: object) -> "asyncio.Task[httpx.Response]":
        """Send, and go on."""
        return asyncio.create_task(self.server.send("POST", path, body))

    @property
    def sizes(self) -> list[int]:
        """Rows of each forward."""
        return [len(forward) for forward in self.model.forwards]


@contextmanager
def gateway(folder: Path, **args: Any) -> Iterator[Gateway]:
    """A gateway in front of a real replica."""
    connect = ReplicaConnect()
    settings = {"revisions": {"minilm@v1": "minilm-v1"}, "aliases": {"minilm": "minilm@v1"}}
    with replica_context(), Server(folder, settings=settings, connect=connect, **args) as server:
        assert connect.replica is not None
        yield Gateway(server=server, model=connect.model, replica=connect.replica)
        connect.model.release()
        server.run(connect.replica.stop())


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Gateway]:
    with gateway(tmp_path) as made:
        yield made


async def leave(sent: "asyncio.Task[httpx.Response]") -> None:
    """The client closes its connection, which Ray turns into a cancellation."""
    sent.cancel()
    await asyncio.gather(sent, return_exceptions=True)


# ---- limits ----------------------------------------------------------------------------------------------------------

SHAPES = [
    pytest.param("/v1/infer", native("the"), 3, id="text"),
    pytest.param("/v1/infer", native({"id": "a", "text": "the"}), 3, id="text with an id"),
    pytest.param("/v1/infer", native(THREE_IDS), 3, id="token ids"),
    pytest.param("/v1/infer", native({"id": "a", "token_ids": THREE_IDS}), 3, id="token ids with an id"),
    pytest.param("/v1/infer", native(*["the"] * 32), 96, id="32 texts"),
    pytest.param("/v1/embeddings", openai("the"), 3, id="openai: a string"),
    pytest.param("/v1/embeddings", openai(["the"]), 3, id="openai: a list of one"),
    pytest.param("/v1/embeddings", openai(THREE_IDS), 3, id="openai: token ids"),
    pytest.param("/v1/embeddings", openai([THREE_IDS]), 3, id="openai: a list of token ids"),
    pytest.param("/v1/embeddings", openai(["the"] * 32), 96, id="openai: 32 texts"),
]


@pytest.mark.parametrize(("missing_tokens", "status"), [(0, 200), (1, 503)], ids=["room", "a token short"])
@pytest.mark.parametrize(("path", "body", "num_tokens"), SHAPES)
def test_bl104_door_is_the_same_for_all_shapes(
    path: str, body: object, num_tokens: int, missing_tokens: int, status: int, real: Gateway
) -> None:
    """BL-104: a list of one got past the limit that a string met; here tokens count, whatever shape they come in."""

    async def knock() -> tuple[httpx.Response, int]:
        await real.replica.reconfigure({"max_queued_tokens": 100})
        running = await real.busy()
        taken = 100 - num_tokens + missing_tokens
        waiting = asyncio.create_task(real.replica.infer(infer_call([[1]] * taken, tenant="other")))
        await real.queued(taken)
        sent = real.post(path, body)
        while not sent.done() and (await real.replica.stats()).queued_tokens == taken:  # noqa: ASYNC110 - see `queued`
            await asyncio.sleep(0)
        num_queued = (await real.replica.stats()).queued_tokens
        real.model.release()
        await asyncio.gather(running, waiting)
        return await sent, num_queued

    response, num_queued = real.server.run(knock())
    assert (response.status_code, num_queued <= 100) == (status, True)
    if status == 503:
        assert error_of(response, 503)["code"] == "overloaded"
        assert int(response.headers["retry-after"]) >= 1


def test_bl113_rays_caps_leave_room_for_full_batches() -> None:
    """BL-113: a concurrency cap below the batch size cut batches; here a batch can run while as many rows wait, also
    when each came alone, and our own limit on waiting rows is met before Ray's."""
    bucket = BucketSettings()
    assert 2 * MAX_ROWS_PER_FORWARD <= app.MAX_ONGOING_CALLS
    assert bucket.max_queued_rows + 2 * bucket.max_rows <= app.MAX_ONGOING_CALLS
    assert 2 * bucket.max_rows <= app.MAX_ONGOING_REQUESTS


@pytest.mark.parametrize("buckets", [[64], [64, 256, 512]], ids=str)
def test_bl113_every_bucket_has_the_cap(buckets: list[int]) -> None:
    """BL-113: the cap that was checked is that of each deployment."""
    args = RevisionArgs.model_validate(
        {"revision": "m@v1", "model": "m", "task": "embed", "buckets": [{"max_tokens": each} for each in buckets]}
    )
    root = app.revision(args)._bound_deployment
    siblings = [sibling._bound_deployment for sibling in [*root.init_args, []][1]]
    assert [each.max_ongoing_requests for each in (root, *siblings)] == [app.MAX_ONGOING_CALLS] * len(buckets)


def test_bl116_connections_outlive_those_of_load_balancers() -> None:
    """BL-116: a server that closes idle connections before its load balancer does gives random resets; ours keeps them
    for longer than the usual 60 to 90 s, and longer than Ray's default, which is just 90."""
    config = yaml.safe_load((PROJECT_ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
    assert HTTPOptions(**config["http_options"]).keep_alive_timeout_s > 90
    assert "`keep_alive_timeout_s`" in (PROJECT_ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("value", ["urgent", 1, "Batch", None])
def test_bl135_openai_dialect_has_no_silent_priority(value: object, real: Gateway) -> None:
    """BL-135: a hint without effect; OpenAI's shape has no such field, so it is refused by name."""
    error = error_of(real.server.post("/v1/embeddings", openai("the", priority=value)), 400)
    assert (error["code"], error["param"]) == ("invalid_request", "priority")
    assert real.sizes == []


# ---- clients that leave ----------------------------------------------------------------------------------------------


async def half_a_body() -> AsyncIterator[bytes]:
    """A good beginning, and then nothing."""
    yield b'{"revision": "minilm", "inp'
    await asyncio.get_running_loop().create_future()


def test_bl118_half_bodies_hold_up_nobody(real: Gateway) -> None:
    """BL-118: bodies were read inside the batch, and one that stopped half way hung the server for good; here such
    clients never reach the queue, and end in 408."""

    async def others_are_served() -> list[int]:
        halves = [asyncio.create_task(real.server.stream("/v1/infer", half_a_body())) for _ in range(50)]
        await settle()
        served = await asyncio.gather(*(real.post("/v1/infer", native("the")) for _ in range(5)))
        assert not any(half.done() for half in halves)
        assert (await real.replica.stats()).queued_rows == 0
        await asyncio.gather(*map(leave, halves[:25]))
        await real.server.loop.skip(GatewayArgs.model_fields["body_timeout_s"].default + 1)
        served += await asyncio.gather(*halves[25:], real.post("/v1/infer", native("the")))
        return [response.status_code for response in served]

    assert real.server.run(others_are_served()) == [200] * 5 + [408] * 25 + [200]


@pytest.mark.parametrize("num_turns", [0, 1, 3, 10, 1000], ids=lambda turns: f"after {turns} turns")
@pytest.mark.parametrize("path", ["/v1/infer", "/v1/embeddings"])
def test_bl120_abort_of_the_largest_request(path: str, num_turns: int, real: Gateway) -> None:
    """BL-120: a client that gave up on thousands of inputs crashed the server; here all 2,048 rows go with it, wherever
    the request was, and the next one is answered."""
    inputs = ["the"] * 2048
    body = native(*inputs) if path == "/v1/infer" else openai(inputs)

    async def abort() -> int:
        running = await real.busy()
        sent = real.post(path, body)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        if num_turns == 1000:
            await real.queued(2048)
        await leave(sent)
        await real.queued(0)
        real.model.release()
        await running
        return (await real.post("/v1/infer", native("the"))).status_code

    assert real.server.run(abort()) == 200
    assert real.sizes == [1, 1]


@pytest.mark.parametrize("gives_up", ["closes the connection", "deadline of the request"])
def test_bl123_retries_do_not_pile_up(gives_up: str, real: Gateway) -> None:
    """BL-123: callers that timed out and tried again left orphans that held the only slot; here five clients with ten
    tries each against a busy model cost five rows, those of the tries that were not given up."""

    async def storm() -> list[int]:
        running = await real.busy()
        for _ in range(10):
            terms = {"timeout_ms": 1000} if gives_up == "deadline of the request" else {}
            tries = [real.post("/v1/infer", native([10 + client], **terms)) for client in range(5)]
            await real.queued(5)
            if terms:
                await real.server.loop.skip(1.0)
                assert {response.status_code for response in await asyncio.gather(*tries)} == {504}
            else:
                await asyncio.gather(*map(leave, tries))
            await real.queued(0)
        last = [real.post("/v1/infer", native([10 + client])) for client in range(5)]
        await real.queued(5)
        real.model.release()
        await running
        return [response.status_code for response in await asyncio.gather(*last)]

    assert real.server.run(storm()) == [200] * 5
    assert real.model.forwards == [[[9]], [[10 + client] for client in range(5)]]


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_bl138_memory_is_flat_over_large_requests(real: Gateway) -> None:
    """BL-138: a host grew by gigabytes over many large calls; here nothing of 20 calls of 200 texts is left behind."""

    async def run(num_requests: int) -> None:
        for number in range(num_requests):
            texts = [f"the word {number} {index}" for index in range(200)]
            assert (await real.server.send("POST", "/v1/infer", native(*texts))).status_code == 200
            real.model.forwards.clear()

    real.server.run(run(5))
    tracemalloc.start()
    try:
        real.server.run(run(5))
        traced = tracemalloc.get_traced_memory()[0]
        real.server.run(run(20))
        # The texts, ids, rows and values of 20 requests take some megabytes.
        assert tracemalloc.get_traced_memory()[0] - traced < 300_000
    finally:
        tracemalloc.stop()


class Padded:
    """A body with a megabyte of blanks, in pieces, which knows how much of it was taken."""

    def __init__(self, size: int) -> None:
        self.taken = 0
        self._size = size

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in (b'{"revision": "minilm", ', *[b" " * 4096] * (self._size // 4096), b'"inputs": ["the"]}'):
            self.taken += len(piece)
            yield piece


def test_bl140_bodies_above_the_limit_are_not_read_to_their_end(tmp_path: Path) -> None:
    """BL-140: queued bodies may have filled a proxy; here 30 bodies of 1 MiB at once cost at most the limit each."""
    bodies = [Padded(2**20) for _ in range(30)]
    with gateway(tmp_path, max_body_bytes=65_536) as real:

        async def send() -> list[httpx.Response]:
            return await asyncio.gather(*(real.server.stream("/v1/infer", body) for body in bodies))

        for response in real.server.run(send()):
            assert error_of(response, 413)["code"] == "body_too_large"
    assert max(body.taken for body in bodies) <= 65_536 + 2 * 4096


def test_bl140_what_waits_is_tokens_not_bodies(real: Gateway) -> None:
    """BL-140: a request that waits for the model holds its inputs; the body that they came in is gone."""

    async def grown() -> int:
        running = await real.busy()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            sent = [asyncio.create_task(real.server.stream("/v1/infer", Padded(2**20))) for _ in range(10)]
            await real.queued(10)
            return tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
            real.model.release()
            await asyncio.gather(running, *sent)

    assert real.server.run(grown()) < 2**20


def test_bl140_formula_of_the_documentation() -> None:
    """BL-140: the most that bodies can take in one ingress replica is as documented."""
    most_mib = app.MAX_ONGOING_REQUESTS * GatewayArgs.model_fields["max_body_bytes"].default // 2**20
    ingress = app.gateway(GatewayArgs(tenants_file="tenants.demo.yaml"))._bound_deployment
    documentation = (PROJECT_ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert ingress.max_ongoing_requests == app.MAX_ONGOING_REQUESTS
    assert f"{app.MAX_ONGOING_REQUESTS} x 4 MiB = {most_mib} MiB" in documentation
