"""Bodies that are not what they should be, on both routes that take one."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.deployments.fakes import current_loop
from tests.fakes import settle
from tests.serve_app.fakes import ACME, Server, error_of, native, openai

GOOD = {"/v1/infer": json.dumps(native("the")), "/v1/embeddings": json.dumps(openai("the"))}
PATHS = pytest.mark.parametrize("path", sorted(GOOD))
DEEP = (64, 1_000, 20_000, 200_000)


# ---- content type and encoding ---------------------------------------------------------------------------------------


@PATHS
@pytest.mark.parametrize(
    "content_types",
    [
        pytest.param([], id="missing"),
        pytest.param(["text/plain"], id="text"),
        pytest.param(["application/x-www-form-urlencoded"], id="form, which plain curl -d sends"),
        pytest.param(["multipart/form-data; boundary=x"], id="multipart"),
        pytest.param(["application/vnd.api+json"], id="json:api"),
        pytest.param(["application/jsonp"], id="longer"),
        pytest.param([""], id="empty"),
        pytest.param(["application/json", "application/json"], id="twice"),
        pytest.param(["application/json", "text/plain"], id="two types"),
    ],
)
def test_bl_089_other_content_types_are_refused(path: str, content_types: list[str], server: Server) -> None:
    """Anything but JSON is 415, and the message says what to send."""
    headers = [("X-API-Key", ACME), *(("Content-Type", value) for value in content_types)]
    error = error_of(server.run(server.client.post(path, content=GOOD[path].encode(), headers=headers)), 415)
    assert error["code"] == "unsupported_media_type"
    assert error["message"] == "send the body as JSON, with the header `Content-Type: application/json`"


@PATHS
@pytest.mark.parametrize(
    "content_type",
    ["application/json", "application/json; charset=utf-8", "Application/JSON;charset=UTF-8", "application/json ;x=y"],
)
def test_bl_089_charset_and_case_are_accepted(path: str, content_type: str, server: Server) -> None:
    """Parameters and case of the type do not matter."""
    assert server.post_bytes(path, GOOD[path], headers=[("Content-Type", content_type)]).status_code == 200


@PATHS
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "gzip, gzip", "identity, gzip", "unknown", ""])
def test_bl_090_compressed_bodies_are_refused(path: str, encoding: str, server: Server) -> None:
    """A Content-Encoding is 415 whatever the body holds, so that nothing is ever unpacked."""
    error = error_of(server.post_bytes(path, GOOD[path], headers=[("Content-Encoding", encoding)]), 415)
    assert "Content-Encoding" in error["message"]


@PATHS
@pytest.mark.parametrize("encoding", ["identity", "Identity"])
def test_bl_090_identity_is_accepted(path: str, encoding: str, server: Server) -> None:
    """Saying that nothing was done is no encoding."""
    assert server.post_bytes(path, GOOD[path], headers=[("Content-Encoding", encoding)]).status_code == 200


# ---- not JSON, or not a JSON object ----------------------------------------------------------------------------------

FIELD = {"/v1/infer": "inputs", "/v1/embeddings": "input"}
VALUES = [
    pytest.param("[NaN]", id="BL-085 NaN"),
    pytest.param("[Infinity]", id="BL-085 Infinity"),
    pytest.param("[-Infinity]", id="BL-085 -Infinity"),
    pytest.param("[1e999]", id="BL-085 1e999"),
    pytest.param("[[1e999]]", id="BL-085 1e999 as an id"),
    pytest.param(r'["\ud83d"]', id="BL-082 half an emoji"),
    pytest.param(r'["a\ud800b"]', id="BL-082 lone high surrogate"),
    pytest.param(r'["\udc00"]', id="BL-082 lone low surrogate"),
    pytest.param(r'["\ude00\ud83d"]', id="BL-082 pair in wrong order"),
    pytest.param("['secret']", id="single quotes"),
    pytest.param('["secret",]', id="trailing comma"),
    pytest.param('["secret" /* x */]', id="comment"),
    pytest.param('["sec\nret"]', id="raw line break in a string"),
    pytest.param('["secret"', id="not closed"),
    pytest.param("[01]", id="leading zero"),
    pytest.param(b'["\xff\xfe"]', id="invalid UTF-8"),
    pytest.param(b'["\xed\xa0\xbd"]', id="surrogate in UTF-8"),
    *(pytest.param("[" * depth + "]" * depth, id=f"BL-087 arrays, {depth} deep") for depth in (20_000, 200_000)),
    *(
        pytest.param('{"a":' * depth + "1" + "}" * depth, id=f"BL-087 objects, {depth} deep")
        for depth in (20_000, 200_000)
    ),
]


@PATHS
@pytest.mark.parametrize("value", VALUES)
def test_what_is_not_json_is_malformed(path: str, value: str | bytes, server: Server) -> None:
    """JSON means RFC 8259: anything else is 400 with the place of the mistake and without the input."""
    content = value if isinstance(value, bytes) else value.encode()
    body = b'{"revision": "minilm", "%s": %s}' % (FIELD[path].encode(), content)
    error = error_of(server.post_bytes(path, body), 400)
    assert (error["code"], error["param"]) == ("malformed_body", None)
    assert re.fullmatch(r"the request body is not valid JSON \(line \d+, column \d+\)", error["message"])


@PATHS
@pytest.mark.parametrize("depth", DEEP)
def test_bl_087_deep_json_in_a_field_that_does_not_exist(path: str, depth: int, server: Server) -> None:
    """Depth is refused also where the value would have been ignored, and the next request is answered."""
    body = GOOD[path][:-1] + ', "ignored": ' + "[" * depth + "]" * depth + "}"
    assert error_of(server.post_bytes(path, body), 400)["code"] in {"malformed_body", "invalid_request"}
    assert server.post_bytes(path, GOOD[path]).status_code == 200


@PATHS
@pytest.mark.parametrize("depth", [64, 1_000])
def test_bl_087_deep_json_in_the_inputs(path: str, depth: int, server: Server) -> None:
    """Depth that the JSON reader takes is a wrong type for an input."""
    field = FIELD[path]
    body = json.loads(GOOD[path]) | {field: "HERE"}
    nested = json.dumps(body).replace('"HERE"', "[" * depth + "]" * depth)
    error = error_of(server.post_bytes(path, nested), 400)
    assert (error["code"], error["param"]) == ("invalid_request", f"{field}[0][0]")


@PATHS
@pytest.mark.parametrize("body", ["[]", '"secret"', "7", "null", "true", '[{"revision": "minilm"}]'])
def test_what_is_no_object_is_malformed(path: str, body: str, server: Server) -> None:
    """The body is an object."""
    error = error_of(server.post_bytes(path, body), 400)
    assert (error["code"], error["message"]) == ("malformed_body", "the request body must be a JSON object")


@PATHS
def test_empty_body_is_malformed(path: str, server: Server) -> None:
    """No body at all is told from a bad one."""
    error = error_of(server.post_bytes(path, b""), 400)
    assert (error["code"], error["message"]) == ("malformed_body", "the request body is empty; send a JSON object")


@PATHS
@pytest.mark.parametrize("digits", [20, 30, 400, 5_000])
def test_bl_071_integers_of_any_length(path: str, digits: int, server: Server) -> None:
    """A long integer literal is 400, never an overflow somewhere behind."""
    field = FIELD[path]
    content = GOOD[path].replace('["the"]' if path == "/v1/infer" else '"the"', f"[[{'9' * digits}]]")
    error = error_of(server.post_bytes(path, content), 400)
    assert error["code"] in {"malformed_body", "invalid_request", "token_id_out_of_range"}
    assert error["param"] in {None, f"{field}[0][0]"}
    assert "999" not in error["message"]


# ---- size ------------------------------------------------------------------------------------------------------------

LIMIT = 1024


class Chunks:
    """A body in pieces, which knows how many were taken."""

    def __init__(self, *, number: int, size: int, then_wait: bool = False) -> None:
        self.taken = 0
        self._number, self._size, self._then_wait = number, size, then_wait

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(self._number):
            self.taken += 1
            yield b" " * self._size
        if self._then_wait:
            await asyncio.get_running_loop().create_future()


@PATHS
@pytest.mark.parametrize(("extra", "status"), [(-1, 200), (0, 200), (1, 413)], ids=["below", "at", "above"])
def test_bl_102_body_at_the_limit(path: str, extra: int, status: int, tmp_path: Path) -> None:
    """A body of exactly max_body_bytes is read; one byte more is refused."""
    with Server(tmp_path, max_body_bytes=LIMIT) as small:
        assert small.post_bytes(path, GOOD[path].ljust(LIMIT + extra)).status_code == status


@PATHS
def test_bl_102_too_large_by_its_own_word(path: str, tmp_path: Path) -> None:
    """A Content-Length above the limit is 413 before a byte is read; the message has limit and setting."""
    headers = [(b"x-api-key", ACME.encode()), (b"content-type", b"application/json")]
    with Server(tmp_path, max_body_bytes=LIMIT) as small:
        for declared in (b"1025", b"9" * 30):
            scope = {"method": "POST", "path": path, "headers": [*headers, (b"content-length", declared)]}
            start, body = small.run(small.asgi(scope, messages=[]))
            error = json.loads(body["body"])["error"]
            assert (start["status"], error["code"]) == (413, "body_too_large")
            assert error["message"] == "the request body is larger than 1024 bytes (setting max_body_bytes)"


@PATHS
def test_bl_211_too_large_without_a_length(path: str, tmp_path: Path) -> None:
    """A chunked body is refused as soon as it passes the limit, and the rest is not read."""
    chunks = Chunks(number=1000, size=100)
    with Server(tmp_path, max_body_bytes=LIMIT) as small:
        assert error_of(small.run(small.stream(path, chunks)), 413)["code"] == "body_too_large"
    assert chunks.taken <= 12


@PATHS
def test_bl_211_body_of_a_stranger_is_not_read(path: str, server: Server) -> None:
    """Without a key the answer comes before the body is looked at."""
    chunks = Chunks(number=1000, size=10**6)
    error_of(server.run(server.stream(path, chunks, key=None)), 401)
    assert chunks.taken == 0


@PATHS
def test_bl_211_slow_body(path: str, tmp_path: Path) -> None:
    """A body that does not arrive in time is 408 and names the limit."""

    async def drip(server: Server) -> Any:
        task = asyncio.create_task(server.stream(path, Chunks(number=3, size=1, then_wait=True)))
        await settle()
        assert not task.done()
        await current_loop().skip(7)
        return await task

    with Server(tmp_path, body_timeout_s=7.0) as patient:
        error = error_of(patient.run(drip(patient)), 408)
    assert (error["code"], error["message"]) == ("body_timeout", "the request body did not arrive within 7 s")


@PATHS
def test_client_that_leaves_while_sending(path: str, server: Server) -> None:
    """A body that ends early reaches no model."""
    headers = [(b"x-api-key", ACME.encode()), (b"content-type", b"application/json")]
    half = {"type": "http.request", "body": GOOD[path][:10].encode(), "more_body": True}
    start, _ = server.run(server.asgi({"method": "POST", "path": path, "headers": headers}, [half]))
    assert start["status"] == 400
    assert server.num_calls() == 0


# ---- what errors hold ------------------------------------------------------------------------------------------------


@PATHS
@pytest.mark.parametrize(
    "value",
    [
        pytest.param([{"secret": "secret"}] * 500, id="500 wrong items"),
        pytest.param([["secret"] * 500], id="500 wrong ids"),
        pytest.param({"secret": ["secret"] * 500}, id="an object"),
        pytest.param(["secret", 7], id="text beside a wrong item"),
        pytest.param(["secret " * 5000], id="a long text"),
        pytest.param([" "] * 2000, id="2,000 blank texts"),
    ],
)
def test_bl_088_errors_are_short_and_repeat_nothing(path: str, value: object, server: Server) -> None:
    """An error has less than 4 KB and no part of any input, however many inputs are wrong."""
    body = json.loads(GOOD[path]) | {FIELD[path]: value}
    error = error_of(server.post(path, body), 400)
    assert error["param"].startswith(FIELD[path])
    assert "secret" not in json.dumps(error)


@PATHS
def test_unknown_field_is_named_in_short(path: str, server: Server) -> None:
    """A field that does not exist is named, cut to a bounded length."""
    error = error_of(server.post(path, json.loads(GOOD[path]) | {"x" * 100_000: 1}), 400)
    assert (error["code"], error["param"]) == ("invalid_request", "x" * 64)
    assert error["message"].endswith("is not a known field")
