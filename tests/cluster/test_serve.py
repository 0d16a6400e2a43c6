"""A real start of serve_config.yaml: answers, live changes, isolation, and what a client can and cannot reach."""

import asyncio
import copy
from hashlib import sha256

import httpx
import numpy as np
import openai
import pytest

from tests.cluster.conftest import Reference
from tests.cluster.server import ACME, ADMIN, GLOBEX, Server, eventually, revision_app

TEXTS = ["A first sentence.", "naïve café 😀", "x " * 100, "Zürich liegt am See."]


def test_embeddings_equal_sentence_transformers(server: Server, reference: Reference) -> None:
    """Texts of both buckets in one request come back in order and equal to the reference."""
    answer = server.infer("minilm", TEXTS, ACME)
    assert answer.status_code == 200
    body = answer.json()
    assert body["revision"] == "minilm@v1"
    values = np.array([output["embedding"] for output in body["outputs"]], dtype=np.float32)
    assert values.shape == (len(TEXTS), 384)
    np.testing.assert_allclose(values, reference.embed(TEXTS), atol=1e-5)
    assert body["usage"]["num_tokens"] == sum(output["num_tokens"] for output in body["outputs"])


def test_unmodified_openai_client(server: Server, reference: Reference) -> None:
    """BL-179: the client asks for base64 unasked, and reads the same numbers as with floats."""
    with openai.OpenAI(api_key="demo-acme-key", base_url=f"{server.url}/v1", max_retries=0) as client:
        by_default = client.embeddings.create(model="minilm", input=TEXTS)
        as_floats = client.embeddings.create(model="minilm@v1", input=TEXTS, encoding_format="float")
        assert "minilm@v1" in [item.id for item in client.models.list()]
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="other", input="a")
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="minilm", input="word " * 400)
    assert [item.index for item in by_default.data] == list(range(len(TEXTS)))
    np.testing.assert_allclose([item.embedding for item in by_default.data], reference.embed(TEXTS), atol=1e-5)
    np.testing.assert_array_equal(
        np.float32([item.embedding for item in by_default.data]), np.float32([i.embedding for i in as_floats.data])
    )
    assert by_default.usage.total_tokens == as_floats.usage.total_tokens > 0


@pytest.mark.parametrize(
    "path", ["/minilm-v1", "/minilm-v1/infer", "/tokens-64", "/v1/infer/", "//v1/infer", "/v1%2Finfer", "/V1/infer"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD", "PUT"])
def test_acc06_no_path_reaches_a_model_without_a_key(server: Server, path: str, method: str) -> None:
    """ACC-06, BL-201: whatever is not public asks for a key first, whether or not it exists."""
    assert server.client.request(method, path).status_code == 401


def test_revision_apps_have_no_endpoint(server: Server) -> None:
    """Ray routes only the gateway."""
    assert server.client.get("/-/routes").json() == {"/": "gateway"}


def test_tenants_file_is_read_again(server: Server) -> None:
    """Keys come and go within seconds, and no process restarts."""
    before = server.pids("gateway"), server.pids("minilm-v1")
    original = server.tenants_file.read_text()
    digest = sha256(b"a-fresh-key").hexdigest()
    fresh = {"X-API-Key": "a-fresh-key"}
    assert server.infer("minilm", ["a"], fresh).status_code == 401
    server.tenants_file.write_text(f'{original}  fresh:\n    keys_sha256: [{digest}]\n    revisions: ["minilm@*"]\n')
    eventually(lambda: server.infer("minilm", ["a"], fresh).status_code == 200, timeout_s=10)
    server.tenants_file.write_text(original)
    eventually(lambda: server.infer("minilm", ["a"], fresh).status_code == 401, timeout_s=10)
    assert (server.pids("gateway"), server.pids("minilm-v1")) == before


def test_adding_a_revision_restarts_nothing(server: Server) -> None:
    """A revision application and its alias go live; every other replica keeps its process."""
    before = server.pids("gateway"), server.pids("minilm-v1")
    config = copy.deepcopy(server.config)
    config["applications"].append(revision_app("minilm-one", "minilm@one"))
    user_config = server.gateway_user_config(config)
    user_config["revisions"]["minilm@one"] = "minilm-one"
    user_config["aliases"]["one"] = "minilm@one"
    server.deploy(config)
    # Until it is up, the new revision alone answers 503; before the gateway knows of it, 404.
    assert server.infer("minilm", ["a"], ACME).status_code == 200
    assert server.infer("one", ["a"], ACME).status_code in {404, 503}
    eventually(lambda: server.infer("one", ["a"], ACME).status_code == 200)
    server.wait_ready()
    assert (server.pids("gateway"), server.pids("minilm-v1")) == before


def test_s2_02_three_rows_are_one_packed_forward(server: Server) -> None:
    """S2-02, ACC-16: rows of 10, 50 and 100 tokens cost one forward of 160 tokens and nothing else."""
    before = server.stats("minilm@one", "tokens-256")
    rows = [[101, *[2000 + index] * (length - 2), 102] for index, length in enumerate([10, 50, 100])]
    answer = server.infer("one", rows, ACME)
    assert answer.json()["usage"] == {"num_tokens": 160, "computed_tokens": 160}
    after = server.stats("minilm@one", "tokens-256")
    grown = {key: after[key] - before[key] for key in ("forwards", "rows", "tokens", "computed_tokens")}
    assert grown == {"forwards": 1, "rows": 3, "tokens": 160, "computed_tokens": 160}


def test_s2_02_padded_layout_is_charged_its_ceilings(server: Server, reference: Reference) -> None:
    """S2-02: the same rows in the padded layout are three forwards, charged 336; answers do not change."""
    config = copy.deepcopy(server.config)
    config["applications"].append(
        revision_app("minilm-padded", "minilm@padded", layout="padded", ceilings=[16, 64, 256])
    )
    server.gateway_user_config(config)["revisions"]["minilm@padded"] = "minilm-padded"
    server.deploy(config)
    eventually(lambda: server.infer("minilm@padded", ["a"], ACME).status_code == 200)
    before = server.stats("minilm@padded", "tokens-256")
    rows = [[101, *[2000 + index] * (length - 2), 102] for index, length in enumerate([10, 50, 100])]
    padded = server.infer("minilm@padded", rows, ACME).json()
    after = server.stats("minilm@padded", "tokens-256")
    grown = {key: after[key] - before[key] for key in ("forwards", "rows", "tokens", "charged_tokens")}
    assert grown == {"forwards": 3, "rows": 3, "tokens": 160, "charged_tokens": 336}
    packed = server.infer("one", rows, ACME).json()
    for one, other in zip(padded["outputs"], packed["outputs"], strict=True):
        np.testing.assert_allclose(one["embedding"], other["embedding"], atol=1e-5)


def test_two_tenants_under_load_get_their_own_answers(server: Server, reference: Reference) -> None:
    """2,000 single rows of mixed lengths over 64 connections: each equals its solo answer; no forward is shared."""
    draw = np.random.default_rng(5)
    words = [word for word in reference.tokenizer.get_vocab() if word.isalpha()][:5000]
    distinct = [
        " ".join(draw.choice(words, size=int(length))) for length in np.clip(draw.lognormal(2.8, 0.9, size=100), 1, 200)
    ]
    expected = reference.embed(distinct)
    before = server.stats("minilm@one", "tokens-256")
    picks = draw.integers(0, len(distinct), size=2000)

    async def load() -> list[float]:
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=64)
        places = asyncio.Semaphore(64)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=120) as client:

            async def one(number: int, pick: int) -> float:
                body = {"revision": "one", "inputs": [{"id": f"r{number}", "text": distinct[pick]}]}
                async with places:
                    answer = await client.post("/v1/infer", json=body, headers=ACME if number % 2 else GLOBEX)
                assert answer.status_code == 200, answer.text
                (output,) = answer.json()["outputs"]
                assert output["id"] == f"r{number}"
                return float(np.abs(np.float32(output["embedding"]) - expected[pick]).max())

            return await asyncio.gather(*(one(number, int(pick)) for number, pick in enumerate(picks)))

    differences = asyncio.run(load())
    assert max(differences) <= 1e-5
    after = server.stats("minilm@one", "tokens-256")
    assert after["rows"] - before["rows"] == 2000
    assert after["shared_forwards"] == 0
    assert (after["rows"] - before["rows"]) / (after["forwards"] - before["forwards"]) > 1.5
    assert after["failed_rows"] == after["refused"] == 0
    assert after["tenants"]["acme"]["rows"] - before["tenants"]["acme"]["rows"] == 1000


def test_tenants_of_one_batch_group_share_forwards(server: Server) -> None:
    """Tenants that name the same batch group fill each other's forwards, and only then."""
    original = server.tenants_file.read_text()
    server.tenants_file.write_text(
        original.replace("batch_group: acme", "batch_group: common").replace(
            "batch_group: globex", "batch_group: common"
        )
    )
    before = server.stats("minilm@one", "tokens-256")["shared_forwards"]

    async def both() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            requests = [
                client.post(
                    "/v1/infer",
                    json={"revision": "one", "inputs": ["word " * 30]},
                    headers=ACME if number % 2 else GLOBEX,
                )
                for number in range(40)
            ]
            assert {answer.status_code for answer in await asyncio.gather(*requests)} == {200}

    def is_shared() -> bool:
        asyncio.run(both())
        return bool(server.stats("minilm@one", "tokens-256")["shared_forwards"] > before)

    try:
        eventually(is_shared, timeout_s=30)
    finally:
        server.tenants_file.write_text(original)


def test_misspelt_args_fail_the_deployment_with_their_path(server: Server) -> None:
    """An unknown key in `args` fails that application alone, and its status names the key."""
    config = copy.deepcopy(server.config)
    broken = revision_app("broken", "minilm@broken", dtyp="float32")
    server.deploy({**config, "applications": [*config["applications"], broken]})
    try:
        status = eventually(
            lambda: (app := server.applications()["broken"])["status"] == "DEPLOY_FAILED" and app["message"]
        )
        assert "dtyp" in status
        assert server.infer("minilm", ["a"], ACME).status_code == 200
    finally:
        server.deploy(config)
        eventually(lambda: "broken" not in server.applications())


def test_stats_of_a_tenant_show_its_own_rows_only(server: Server) -> None:
    """A tenant's key reads that tenant's numbers; an admin key reads all."""
    body = server.client.get("/v1/stats", headers=ACME).json()
    assert body["tenant"] == "acme"
    assert set(body["revisions"]["minilm@v1"]) == {"rows", "tokens", "refused"}
    assert "globex" not in str(body)
    assert server.client.get("/v1/stats", headers=ADMIN).json()["revisions"].keys() >= {"minilm@v1"}
