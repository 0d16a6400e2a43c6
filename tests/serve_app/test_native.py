"""POST /v1/infer: every field, every kind of input, and answers in order."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError

from batching.errors import DeadlineExceeded, Draining, ForwardFailed, GroupLimit, QueueFull, RequestTooLarge
from batching.padding import MalformedOutput
from deployments.requests import Tenant
from deployments.settings import GatewaySettings
from serve_app.native import parse
from tests.deployments.fakes import REMOTE_TEXT, VOCAB_SIZE, as_ray_raises, current_loop, vector
from tests.serve_app.fakes import ACME, ADMIN, GLOBEX, SETTINGS, Server, error_of, native

TENANT = Tenant(name="acme", revisions=("*",), batch_group="acme")
THE = [101, 1996, 102]


def embeddings(response: httpx.Response) -> list[Any]:
    """The vectors of a good answer, None for failed rows."""
    assert response.status_code == 200, response.text
    outputs = response.json()["outputs"]
    return [np.array(each["embedding"], dtype=np.float32) if "embedding" in each else None for each in outputs]


def same(found: Sequence[Any], rows: Sequence[Sequence[int]]) -> bool:
    """Whether each vector is that of its row, bit for bit."""
    return len(found) == len(rows) and all(map(np.array_equal, found, map(vector, rows)))


# ---- wrong fields ----------------------------------------------------------------------------------------------------

OUT_OF_INT32 = "must be a token id from 0 to 2999"
INTEGER = "must be an integer token id"
KINDS = "must be a string, a list of token ids, or an object with `text` or `token_ids`"
EXACTLY = "must have exactly one of `text` and `token_ids`, and beside it only `id`"
BLANK = "is empty: it holds no token of its own"

WRONG_FIELDS = [
    pytest.param({"x": 1}, "invalid_request", "x", "is not a known field", id="unknown field"),
    pytest.param({"Inputs": []}, "invalid_request", "Inputs", "is not a known field", id="other case"),
    pytest.param({"revision": None}, "invalid_request", "revision", "valid string", id="revision null"),
    pytest.param({"revision": 7}, "invalid_request", "revision", "valid string", id="revision number"),
    pytest.param({"revision": ""}, "invalid_request", "revision", "at least 1", id="revision empty"),
    pytest.param({"revision": "r" * 257}, "invalid_request", "revision", "at most 256", id="revision of 257"),
    pytest.param({"inputs": None}, "invalid_request", "inputs", "valid list", id="inputs null"),
    pytest.param({"inputs": "abc"}, "invalid_request", "inputs", "valid list", id="BL-074 a bare string"),
    pytest.param({"inputs": {}}, "invalid_request", "inputs", "valid list", id="inputs an object"),
    pytest.param({"truncate": 1}, "invalid_request", "truncate", "valid boolean", id="truncate number"),
    pytest.param({"truncate": "true"}, "invalid_request", "truncate", "valid boolean", id="truncate text"),
    pytest.param({"truncate": None}, "invalid_request", "truncate", "valid boolean", id="truncate null"),
    pytest.param({"partial": "no"}, "invalid_request", "partial", "valid boolean", id="partial text"),
    pytest.param({"timeout_ms": -2}, "invalid_request", "timeout_ms", "greater than 0", id="BL-054 -2 ms"),
    pytest.param({"timeout_ms": -1}, "invalid_request", "timeout_ms", "greater than 0", id="BL-054 -1 ms"),
    pytest.param({"timeout_ms": 0}, "invalid_request", "timeout_ms", "greater than 0", id="BL-054 0 ms"),
    pytest.param({"timeout_ms": "5"}, "invalid_request", "timeout_ms", "valid number", id="BL-054 text ms"),
    pytest.param({"timeout_ms": True}, "invalid_request", "timeout_ms", "valid number", id="BL-054 true ms"),
    pytest.param({"timeout_ms": [5]}, "invalid_request", "timeout_ms", "valid number", id="BL-054 a list"),
    pytest.param({"timeout_ms": 300_001}, "invalid_request", "timeout_ms", "limit of 300000", id="BL-054 cap+1 ms"),
    pytest.param({"timeout_ms": 10**30}, "invalid_request", "timeout_ms", "limit of 300000", id="BL-054 10**30 ms"),
    pytest.param({"inputs": []}, "empty_input", "inputs", "is empty", id="BL-065 []"),
    pytest.param({"inputs": [""]}, "empty_input", "inputs[0]", BLANK, id="BL-065 ['']"),
    pytest.param({"inputs": [" "]}, "empty_input", "inputs[0]", BLANK, id="BL-065 [' ']"),
    pytest.param({"inputs": ["\n\t"]}, "empty_input", "inputs[0]", BLANK, id="BL-065 line break and tab"),
    pytest.param({"inputs": ["\u200b"]}, "empty_input", "inputs[0]", BLANK, id="BL-065 zero width"),
    pytest.param({"inputs": ["\ufeff"]}, "empty_input", "inputs[0]", BLANK, id="BL-065 byte order mark"),
    pytest.param({"inputs": [[]]}, "empty_input", "inputs[0]", "is empty", id="BL-065 [[]]"),
    pytest.param({"inputs": ["a", "", "b"]}, "empty_input", "inputs[1]", BLANK, id="BL-065 one of three"),
    pytest.param({"inputs": [{"text": ""}]}, "empty_input", "inputs[0]", BLANK, id="BL-065 object with ''"),
    pytest.param({"inputs": [{"token_ids": []}]}, "empty_input", "inputs[0]", "is empty", id="BL-065 object with []"),
    pytest.param({"inputs": [None]}, "invalid_request", "inputs[0]", KINDS, id="null"),
    pytest.param({"inputs": ["a", 7]}, "invalid_request", "inputs[1]", KINDS, id="a number"),
    pytest.param({"inputs": [1, 2]}, "invalid_request", "inputs[0]", KINDS, id="ids not in a list"),
    pytest.param({"inputs": [True]}, "invalid_request", "inputs[0]", KINDS, id="a boolean"),
    pytest.param({"inputs": [[True]]}, "invalid_request", "inputs[0][0]", INTEGER, id="a boolean for an id"),
    pytest.param({"inputs": [[1, 2.0]]}, "invalid_request", "inputs[0][1]", INTEGER, id="a float for an id"),
    pytest.param({"inputs": [["1"]]}, "invalid_request", "inputs[0][0]", INTEGER, id="text for an id"),
    pytest.param({"inputs": [[1, None]]}, "invalid_request", "inputs[0][1]", INTEGER, id="null for an id"),
    pytest.param({"inputs": [[1, [2]]]}, "invalid_request", "inputs[0][1]", INTEGER, id="a list for an id"),
    pytest.param({"inputs": [{}]}, "invalid_request", "inputs[0]", EXACTLY, id="empty object"),
    pytest.param({"inputs": [{"id": "a"}]}, "invalid_request", "inputs[0]", EXACTLY, id="only an id"),
    pytest.param({"inputs": [{"text": "a", "token_ids": [1]}]}, "invalid_request", "inputs[0]", EXACTLY, id="both"),
    pytest.param({"inputs": [{"text": "a", "x": 1}]}, "invalid_request", "inputs[0]", EXACTLY, id="unknown key"),
    pytest.param({"inputs": [{"text": 1}]}, "invalid_request", "inputs[0].text", "a string", id="text a number"),
    pytest.param({"inputs": [{"text": None}]}, "invalid_request", "inputs[0].text", "a string", id="text null"),
    pytest.param({"inputs": [{"token_ids": "ab"}]}, "invalid_request", "inputs[0].token_ids", "a list", id="ids text"),
    pytest.param({"inputs": [{"token_ids": [1.5]}]}, "invalid_request", "inputs[0].token_ids[0]", INTEGER, id="in ids"),
    pytest.param({"inputs": [{"id": "", "text": "a"}]}, "invalid_request", "inputs[0].id", "1 to 256", id="id empty"),
    pytest.param({"inputs": [{"id": 7, "text": "a"}]}, "invalid_request", "inputs[0].id", "1 to 256", id="id number"),
    pytest.param({"inputs": [{"id": "i" * 257, "text": "a"}]}, "invalid_request", "inputs[0].id", "256", id="id long"),
    pytest.param({"inputs": [[-1]]}, "token_id_out_of_range", "inputs[0][0]", OUT_OF_INT32, id="BL-069 -1"),
    pytest.param({"inputs": [[VOCAB_SIZE]]}, "token_id_out_of_range", "inputs[0][0]", "0 to 2999", id="BL-069 V"),
    pytest.param({"inputs": [[0, 100257]]}, "token_id_out_of_range", "inputs[0][1]", "0 to 2999", id="BL-069 other's"),
    pytest.param({"inputs": [[2**31]]}, "token_id_out_of_range", "inputs[0][0]", OUT_OF_INT32, id="BL-071 2**31"),
    pytest.param({"inputs": [[2**63]]}, "token_id_out_of_range", "inputs[0][0]", OUT_OF_INT32, id="BL-071 2**63"),
    pytest.param({"inputs": [[10**30]]}, "invalid_request", "inputs[0][0]", INTEGER, id="BL-071 10**30"),
    pytest.param(
        {"inputs": [[1] * 65]}, "input_too_long", "inputs[0]", "has 65 tokens; the limit is 64", id="long ids"
    ),
    pytest.param({"inputs": ["the " * 63]}, "input_too_long", "inputs[0]", "has 65 tokens; the limit is 64", id="long"),
]


@pytest.mark.parametrize(("change", "code", "param", "fragment"), WRONG_FIELDS)
def test_wrong_field(change: dict[str, Any], code: str, param: str, fragment: str, server: Server) -> None:
    """Each mistake is 400 with a stable code, the field's name and what would be right; nobody is called."""
    error = error_of(server.post("/v1/infer", native("the") | change), 400)
    assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error")
    assert error["message"].startswith(f"`{param}` ")
    assert fragment in error["message"]
    assert server.num_calls() == 0


@pytest.mark.parametrize("field", ["revision", "inputs"])
def test_missing_field(field: str, server: Server) -> None:
    """A required field that is not there is named."""
    body = {key: value for key, value in native("the").items() if key != field}
    error = error_of(server.post("/v1/infer", body), 400)
    assert (error["param"], error["message"]) == (field, f"`{field}` is missing")


def test_bl_068_blank_rows_are_listed_together(server: Server) -> None:
    """Of a hundred rows with three blanks, one error names the three."""
    texts = [" " if index in (3, 57, 99) else "the" for index in range(100)]
    error = error_of(server.post("/v1/infer", native(*texts)), 400)
    assert (error["code"], error["param"]) == ("empty_input", "inputs[3]")
    assert error["message"].endswith("(also refused: inputs[57], inputs[99])")


@pytest.mark.parametrize("number", [33, 2048])
def test_bl_189_many_rows_are_answered(number: int, server: Server) -> None:
    """A request may hold as many rows as OpenAI's, and equal ids in many rows are fine."""
    response = server.post("/v1/infer", native(*[{"id": "same", "token_ids": [5, index]} for index in range(number)]))
    assert same(embeddings(response), [[5, index] for index in range(number)])
    assert {output["id"] for output in response.json()["outputs"]} == {"same"}


def test_bl_189_one_row_too_many(server: Server) -> None:
    """The 2,049th row is refused with number and limit."""
    error = error_of(server.post("/v1/infer", native(*[[1]] * 2049)), 400)
    assert (error["code"], error["param"]) == ("request_too_large", "inputs")
    assert "holds 2049 rows; the limit for one request is 2048" in error["message"]


def test_bl_102_limits_are_told_apart(tmp_path: Path) -> None:
    """Too many rows, too many tokens and too many bytes have messages of their own."""
    limits = {"max_rows_per_request": 2, "max_tokens_per_request": 10}
    with Server(tmp_path, settings=SETTINGS | limits, max_body_bytes=1024) as small:
        rows = error_of(small.post("/v1/infer", native([1], [1], [1])), 400)
        tokens = error_of(small.post("/v1/infer", native([1] * 5, [1] * 6)), 400)
        size = error_of(small.post("/v1/infer", native("x" * 1024)), 413)
    assert "holds 3 rows; the limit for one request is 2" in rows["message"]
    assert "holds 11 tokens; the limit for one request is 10" in tokens["message"]
    assert "larger than 1024 bytes (setting max_body_bytes)" in size["message"]


# ---- revisions -------------------------------------------------------------------------------------------------------

UNKNOWN = ["does-not-exist", "../x", "minilm@v2", "Minilm", "minilm ", " minilm", "minilm-v1", "r" * 256, "m\x00", "é"]


@pytest.mark.parametrize("name", [*UNKNOWN, "other@v1"], ids=ascii)
def test_bl_092_unknown_and_forbidden_look_the_same(name: str, server: Server) -> None:
    """A revision that does not exist and one of another tenant give the same bytes."""
    reference = server.post("/v1/infer", native("the", revision="nothing"))
    response = server.post("/v1/infer", native("the", revision=name))
    assert error_of(response, 404)["code"] == "revision_not_found"
    assert (response.content, response.headers) == (reference.content, reference.headers)
    assert name not in response.text
    assert server.num_calls() == 0


def test_revision_that_is_down(server: Server) -> None:
    """A revision that the tenant may use but that is not up is 503 with the time to come again."""
    response = server.post("/v1/infer", native("the", revision="down@v1"))
    error = error_of(response, 503)
    assert (error["code"], error["message"]) == ("revision_unavailable", "revision down@v1 is not up; try again")
    assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize("name", ["minilm", "minilm@v1"])
def test_answer_names_the_resolved_revision(name: str, server: Server) -> None:
    """Whether asked by alias or by name, the answer says which revision answered."""
    assert server.post("/v1/infer", native("the", revision=name)).json()["revision"] == "minilm@v1"


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_bl_191_whole_answer(server: Server) -> None:
    """The answer has these fields and no others."""
    body = server.post("/v1/infer", native("the", {"id": "a", "token_ids": [7] * 20}, [5])).json()
    outputs = body.pop("outputs")
    assert body == {"revision": "minilm@v1", "usage": {"num_tokens": 24, "computed_tokens": 24}}
    assert [list(output) for output in outputs] == [["id", "num_tokens", "embedding"]] * 3
    assert [(output["id"], output["num_tokens"]) for output in outputs] == [(None, 3), ("a", 20), (None, 1)]


def test_all_kinds_of_input_agree(server: Server) -> None:
    """A text, its ids, and objects with either give the same vector."""
    response = server.post("/v1/infer", native("the", THE, {"text": "the"}, {"token_ids": THE, "id": "x"}))
    assert same(embeddings(response), [THE] * 4)


def test_bl_061_text_with_nul(server: Server) -> None:
    """What follows a NUL counts."""
    found = embeddings(server.post("/v1/infer", native("ab\x00cd", "abcd", "ab")))
    assert np.array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])


@pytest.mark.parametrize("text", ["😀", "\U0010ffff", "日本", "a\u0301", "\u202e"], ids=ascii)
def test_bl_082_whole_characters_are_fine(text: str, server: Server) -> None:
    """Valid pairs and any other character are text."""
    assert server.post("/v1/infer", native(f"the {text}")).status_code == 200


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("long", ["the " * 100, {"text": "the " * 100}, [1996] * 100, {"token_ids": [1996] * 100}])
def test_bl_048_truncate_holds_for_every_shape(long: object, place: int, number: int, server: Server) -> None:
    """`truncate` cuts to the limit wherever the long row stands, and marks only that row (BL-064)."""
    inputs: list[object] = [[5]] * number
    place = min(place, number - 1)
    inputs[place] = long
    body = server.post("/v1/infer", native(*inputs, truncate=True)).json()
    marks = [output.get("truncated") for output in body["outputs"]]
    assert [output["num_tokens"] for output in body["outputs"]] == [64 if row == place else 1 for row in range(number)]
    assert marks == [True if row == place else None for row in range(number)]
    assert body["usage"]["num_tokens"] == 64 + number - 1


def test_bl_064_truncated_text_keeps_beginning_and_special_tokens(server: Server) -> None:
    """A cut text is its first tokens between the model's special tokens; cut ids are the first ids."""
    response = server.post("/v1/infer", native("the " * 100, list(range(100)), truncate=True))
    assert same(embeddings(response), [[101, *[1996] * 62, 102], list(range(64))])


def test_partial_has_errors_in_place(server: Server) -> None:
    """With `partial` a failed row has code and message at its place, and the others are answered."""
    server.bucket().row_errors[7, 7] = ForwardFailed("ValueError")
    inputs = ["the", {"id": "blank", "text": " "}, [], {"id": "bad", "token_ids": [7, 7]}, [1] * 65, [VOCAB_SIZE], [9]]
    body = server.post("/v1/infer", native(*inputs, partial=True)).json()
    outcomes = [output.get("error", {}).get("code") or output["num_tokens"] for output in body["outputs"]]
    assert outcomes == [
        3,
        "empty_input",
        "empty_input",
        "forward_failed",
        "input_too_long",
        "token_id_out_of_range",
        1,
    ]
    assert [output["id"] for output in body["outputs"]] == [None, "blank", None, "bad", None, None, None]
    assert body["outputs"][1]["error"] == {"code": "empty_input", "message": f"`inputs[1]` {BLANK}"}
    assert body["usage"] == {"num_tokens": 4, "computed_tokens": 6}


@pytest.mark.parametrize(
    ("timeout_ms", "expected"), [(1, 0.001), (2, 0.002), (5.5, 0.0055), (300_000, 300.0), (None, None)]
)
def test_bl_054_time_that_is_accepted(timeout_ms: float | None, expected: float | None) -> None:
    """Whole and broken milliseconds are taken as they are; null is as if it were not there."""
    request, _ = parse(native("the", timeout_ms=timeout_ms), TENANT, GatewaySettings(revisions={}))
    assert request.timeout_s == expected


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 64), min_size=1, max_size=12))
def test_bl_182_order_survives_the_split(lengths: list[int], server: Server) -> None:
    """Rows of any lengths, split over two buckets, come back at their places with their ids."""
    rows = [[index, *[7] * (length - 1)] for index, length in enumerate(lengths)]
    inputs = [{"id": f"row {index}", "token_ids": row} for index, row in enumerate(rows)]
    response = server.post("/v1/infer", native(*inputs))
    assert same(embeddings(response), rows)
    assert [output["id"] for output in response.json()["outputs"]] == [f"row {index}" for index in range(len(rows))]


# ---- failures behind the gateway -------------------------------------------------------------------------------------

FAILURES = [
    pytest.param([ActorDiedError()] * 2, 503, "replica_lost", "1", id="replica lost twice"),
    pytest.param([as_ray_raises(Draining())] * 2, 503, "replica_lost", "1", id="stopping twice"),
    pytest.param([BackPressureError(9, 9)], 503, "overloaded", "1", id="BL-093 back pressure"),
    pytest.param([as_ray_raises(QueueFull(8, 2.1))], 503, "queue_full", "3", id="BL-093 queue full"),
    pytest.param([as_ray_raises(GroupLimit(8, 0.2))], 503, "group_limit", "1", id="BL-093 too many groups"),
    pytest.param([as_ray_raises(DeadlineExceeded(2.0))], 504, "deadline_exceeded", None, id="too late in the queue"),
    pytest.param([as_ray_raises(ForwardFailed("ValueError"))], 500, "forward_failed", None, id="model raised"),
    pytest.param([as_ray_raises(MalformedOutput("x"))], 500, "malformed_output", None, id="bad output"),
    pytest.param([as_ray_raises(ValueError(REMOTE_TEXT))], 500, "forward_failed", None, id="foreign error"),
]


@pytest.mark.parametrize(("failures", "status", "code", "retry_after"), FAILURES)
def test_failures_of_replicas(
    failures: list[Exception],
    status: int,
    code: str,
    retry_after: str | None,
    server: Server,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What goes wrong behind the gateway has its own status and code, and shows nothing of a remote traceback."""
    server.bucket().failures += failures
    with caplog.at_level(logging.DEBUG):
        response = server.post("/v1/infer", native("the"))
    assert error_of(response, status)["code"] == code
    assert response.headers.get("retry-after") == retry_after
    assert "secret" not in response.text + caplog.text


@pytest.mark.parametrize("failure", [ActorDiedError(), as_ray_raises(Draining())], ids=["died", "stopping"])
def test_one_lost_replica_is_not_seen(failure: Exception, server: Server) -> None:
    """A request whose replica is lost once is answered."""
    server.bucket().failures.append(failure)
    assert same(embeddings(server.post("/v1/infer", native("the"))), [THE])
    assert server.num_calls() == 2


def test_deadline_over_http(server: Server) -> None:
    """When the time is over the answer is 504 with the time that was given, and the calls are taken back."""

    async def wait() -> httpx.Response:
        server.bucket().hold()
        task = asyncio.create_task(server.send("POST", "/v1/infer", native("the", timeout_ms=2500)))
        await server.bucket().called(1)
        await current_loop().skip(2.5)
        return await task

    error = error_of(server.run(wait()), 504)
    assert error["message"] == "no answer within the 2500 ms that this request was given"
    assert server.bucket().num_cancelled == 1


def test_bl_208_request_ids_of_clients_are_nobodys_key(server: Server) -> None:
    """Requests of two tenants with one X-Request-Id, half of them cancelled, get their own answers."""

    async def run() -> tuple[list[Any], int]:
        server.bucket().hold()
        keys = [ACME, ADMIN] * 10
        tasks = [
            asyncio.create_task(
                server.send("POST", "/v1/infer", native([index]), key=key, headers=[("X-Request-Id", "same")])
            )
            for index, key in enumerate(keys)
        ]
        await server.bucket().called(len(tasks))
        for task in tasks[10:]:
            task.cancel()
        await current_loop().skip(0)
        server.bucket().release()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        return answers[:10], server.bucket().num_cancelled

    answers, num_cancelled = server.run(run())
    assert same([embeddings(answer)[0] for answer in answers], [[index] for index in range(10)])
    assert num_cancelled == 10


def test_calls_carry_the_tenant_of_the_key(server: Server) -> None:
    """Replicas learn tenant and batch group from the key and from nothing the client says."""
    for key in (ACME, ADMIN):
        server.post("/v1/infer", native("the"), key=key, headers=[("X-Tenant", "globex"), ("X-Batch-Group", "x")])
    calls = [(call.tenant, call.batch_group) for call in server.bucket().calls]
    assert calls == [("acme", "tenant:acme"), ("operator", "tenant:operator")]


@pytest.mark.parametrize("field", ["tenant", "batch_group"])
def test_s0_85_no_field_names_a_tenant(field: str, server: Server) -> None:
    """A body that names a tenant is refused, whoever sends it."""
    for key in (ACME, GLOBEX, ADMIN):
        assert error_of(server.post("/v1/infer", native("the", **{field: "acme"}), key=key), 400)["param"] == field
    assert server.num_calls() == 0


def test_sizes_are_checked_before_any_item() -> None:
    """More rows or ids than a request may hold are refused without a look at each."""
    few = GatewaySettings(revisions={}, max_rows_per_request=3, max_tokens_per_request=10)
    for inputs in ([None] * 4, [["no id"] * 11]):
        with pytest.raises(RequestTooLarge):
            parse({"revision": "minilm", "inputs": inputs}, TENANT, few)


def test_a_body_of_thousands_of_fields_is_one_error(server: Server) -> None:
    """No error object is made for each of them."""
    error = error_of(server.post("/v1/infer", {f"field{index}": 1 for index in range(5000)}), 400)
    assert error["param"] == "body"
