"""On which terms a tenant's requests run: weight, priority, time, quotas, and keys that are revoked meanwhile."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from batching.errors import ForwardFailed, TenantOverShare, WaitTooLong
from serve_app.auth import digest_of
from tests.serve_app.fakes import ACME, TENANTS, Server, error_of, native, openai, write_tenants


def _server(folder: Path, **terms: Any) -> Server:
    """A gateway whose tenant acme has these terms."""
    write_tenants(folder / "tenants.yaml", TENANTS | {"acme": TENANTS["acme"] | terms})
    return Server(folder)


# ---- weight and priority ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terms", "asked", "expected"),
    [
        pytest.param({}, {}, (1.0, "interactive"), id="defaults"),
        pytest.param({"weight": 3.0}, {}, (3.0, "interactive"), id="weight of the tenant"),
        pytest.param({}, {"priority": "batch"}, (1.0, "batch"), id="lower than the tenant's"),
        pytest.param({"priority": "batch"}, {}, (1.0, "batch"), id="the tenant's own"),
        pytest.param({"priority": "batch"}, {"priority": "batch"}, (1.0, "batch"), id="the same"),
    ],
)
def test_terms_travel_with_the_call(
    terms: dict[str, Any], asked: dict[str, Any], expected: tuple[float, str], tmp_path: Path
) -> None:
    """The replica learns weight and priority from the call, so that a changed file counts from the next request on."""
    with _server(tmp_path, **terms) as server:
        assert server.post("/v1/infer", native("the", **asked)).status_code == 200
        (call,) = server.bucket().calls
        assert (call.weight, call.priority) == expected


@pytest.mark.parametrize("priority", ["urgent", "", 1, True, ["batch"], "Batch"])
def test_bl135_unknown_priorities_are_refused(priority: object, server: Server) -> None:
    """BL-135: a hint that would have no effect is an error that names its field."""
    assert error_of(server.post("/v1/infer", native("the", priority=priority)), 400)["param"] == "priority"
    assert server.num_calls() == 0


def test_bl135_nobody_raises_its_own_class(tmp_path: Path) -> None:
    """BL-135: a tenant whose file says batch cannot ask for interactive."""
    with _server(tmp_path, priority="batch") as server:
        error = error_of(server.post("/v1/infer", native("the", priority="interactive")), 400)
        assert (error["param"], error["message"]) == ("priority", "`priority` must be batch for this key")
        assert server.num_calls() == 0


# ---- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terms", "body", "header", "timeout_s"),
    [
        pytest.param({}, {}, None, 60.0, id="default"),
        pytest.param({}, {"timeout_ms": 500}, None, 0.5, id="body"),
        pytest.param({}, {}, "500", 0.5, id="header"),
        pytest.param({}, {}, "2.5e2", 0.25, id="header in another spelling"),
        pytest.param({}, {"timeout_ms": 500}, "700", 0.5, id="the shorter counts: body"),
        pytest.param({}, {"timeout_ms": 700}, "500", 0.5, id="the shorter counts: header"),
        pytest.param({"max_timeout_s": 5.0}, {}, None, 5.0, id="the tenant's limit below the default"),
        pytest.param({"max_timeout_s": 500.0}, {"timeout_ms": 300_000}, None, 300.0, id="the gateway's limit"),
    ],
)
def test_time_of_a_request(
    terms: dict[str, Any], body: dict[str, Any], header: str | None, timeout_s: float, tmp_path: Path
) -> None:
    """One deadline is made of body, header and limits, and what is left of it goes with the call."""
    headers = [] if header is None else [("X-Request-Timeout-Ms", header)]
    with _server(tmp_path, **terms) as server:
        assert server.post("/v1/infer", native("the", **body), headers=headers).status_code == 200
        assert server.bucket().calls[0].timeout_s == pytest.approx(timeout_s, abs=0.2)


def test_the_header_works_for_every_dialect(server: Server) -> None:
    """OpenAI's body has no field for it."""
    assert server.post("/v1/embeddings", openai("the"), headers=[("X-Request-Timeout-Ms", "900")]).status_code == 200
    assert server.bucket().calls[0].timeout_s == pytest.approx(0.9, abs=0.2)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "", "1s", "1,2", "0x10", "1_000"])
def test_bad_times_in_the_header_are_refused(value: str, server: Server) -> None:
    """Named, before the body is read."""
    response = server.post("/v1/infer", native("the"), headers=[("X-Request-Timeout-Ms", value)])
    assert error_of(response, 400)["param"] == "X-Request-Timeout-Ms"


def test_two_times_are_refused(server: Server) -> None:
    """Which of two is meant is never guessed."""
    headers = [("X-Request-Timeout-Ms", "500"), ("X-Request-Timeout-Ms", "500")]
    assert error_of(server.post("/v1/infer", native("the"), headers=headers), 400)["code"] == "invalid_request"


def test_longer_than_the_tenant_may_ask_for(tmp_path: Path) -> None:
    """Refused with the limit, not cut in silence; in the header too."""
    with _server(tmp_path, max_timeout_s=5.0) as server:
        error = error_of(server.post("/v1/infer", native("the", timeout_ms=5001)), 400)
        assert (error["param"], error["message"]) == ("timeout_ms", "`timeout_ms` is above the limit of 5000")
        response = server.post("/v1/infer", native("the"), headers=[("X-Request-Timeout-Ms", "5001")])
        assert error_of(response, 400)["param"] == "X-Request-Timeout-Ms"


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-request-timeout-seconds", "0"),
        ("X-Request-Timeout-Seconds", "-1"),
        ("x-request-timeout-seconds", "5"),
        ("x-request-disconnect-disabled", "?1"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/infer", "/v1/embeddings", "/v1/models", "/v1/stats"])
def test_headers_that_hold_resources_are_refused(path: str, header: str, value: str, server: Server) -> None:
    """ISSUE-3: Ray's proxies obey these from any client; a request with one ends at once."""
    body = None if path in {"/v1/models", "/v1/stats"} else native("the")
    sent = (
        server.get(path, headers=[(header, value)])
        if body is None
        else server.post(path, body, headers=[(header, value)])
    )
    assert error_of(sent, 400)["param"] == header.lower()
    assert server.num_calls() == 0


# ---- refusals of a replica -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refusal", "status", "code", "retry_after"),
    [
        pytest.param(TenantOverShare(2.2), 429, "tenant_over_share", "3", id="own share"),
        pytest.param(WaitTooLong(0.49, 7.0, 6.5), 503, "wait_too_long", "7", id="everybody's backlog"),
        pytest.param(TenantOverShare(0.01), 429, "tenant_over_share", "1", id="at least a second"),
    ],
)
def test_bl111_shed_load_is_no_failure(
    refusal: TenantOverShare | WaitTooLong, status: int, code: str, retry_after: str, server: Server
) -> None:
    """BL-111: status, code and Retry-After tell shedding from failure, in both dialects."""
    server.bucket().refusal = refusal
    for path, body in (("/v1/infer", native("the", timeout_ms=500)), ("/v1/embeddings", openai("the"))):
        response = server.post(path, body)
        assert error_of(response, status)["code"] == code
        assert response.headers["retry-after"] == retry_after


def test_the_time_in_the_message_is_the_clients(server: Server) -> None:
    """The replica saw a little less, because tokenising took some."""
    server.bucket().refusal = WaitTooLong(0.4871, 7.0, 6.5)
    message = error_of(server.post("/v1/infer", native("the", timeout_ms=500)), 503)["message"]
    assert "500 ms" in message


# ---- quotas ----------------------------------------------------------------------------------------------------------

QUOTA = {"revisions": "minilm@*", "tokens_per_s": 1, "burst_tokens": 10}
"""Ten tokens at once; a text of one word has three."""


def test_quota_is_charged_with_the_exact_count(tmp_path: Path) -> None:
    """Three requests of three tokens pass, the fourth is 429 with a time to come back, before any replica is asked."""
    with _server(tmp_path, quotas=[QUOTA]) as server:
        statuses = [server.post("/v1/infer", native([1, 2, 3])).status_code for _ in range(3)]
        response = server.post("/v1/infer", native([1, 2, 3]))
        assert statuses == [200] * 3
        assert error_of(response, 429)["code"] == "quota_exceeded"
        assert int(response.headers["retry-after"]) >= 1
        assert server.num_calls() == 3


def test_request_above_the_burst_can_never_pass(tmp_path: Path) -> None:
    """400 names the limit instead of a Retry-After that would be a lie."""
    with _server(tmp_path, quotas=[QUOTA]) as server:
        assert error_of(server.post("/v1/infer", native([1] * 11)), 400)["code"] == "request_too_large"


@pytest.mark.parametrize("trouble", ["refused", "row failed", "died"])
def test_what_was_not_answered_is_given_back(trouble: str, tmp_path: Path) -> None:
    """ISSUE-3.5: refusal, failure: the next request finds the quota as it was."""
    with _server(tmp_path, quotas=[QUOTA]) as server:
        bucket = server.bucket()
        for _ in range(2):
            match trouble:
                case "refused":
                    bucket.refusal = TenantOverShare(1.0)
                case "row failed":
                    bucket.row_errors[tuple([1] * 9)] = ForwardFailed("ValueError")
                case "died":
                    bucket.failures += [RuntimeError("died")]
            assert server.post("/v1/infer", native([1] * 9)).status_code >= 429
        bucket.reset()
        assert server.post("/v1/infer", native([1] * 9)).status_code == 200


def test_failed_rows_of_an_answered_request_are_given_back(tmp_path: Path) -> None:
    """With `partial`, only the rows that were answered stay charged."""
    with _server(tmp_path, quotas=[QUOTA]) as server:
        server.bucket().row_errors[tuple([7] * 8)] = ForwardFailed("ValueError")
        for _ in range(2):  # of nine tokens each, one of which stays charged
            response = server.post("/v1/infer", native([1], [7] * 8, partial=True))
            assert response.status_code == 200, response.text


def test_a_client_that_left_gets_its_quota_back(tmp_path: Path) -> None:
    """ISSUE-3.5: cancellation."""
    with _server(tmp_path, quotas=[QUOTA]) as server:

        async def leave() -> None:
            server.bucket().hold()
            task = asyncio.ensure_future(server.send("POST", "/v1/infer", native([1] * 9)))
            await server.bucket().called(1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            server.bucket().release()

        for _ in range(3):
            server.run(leave())
            server.bucket().reset()
        assert server.post("/v1/infer", native([1] * 9)).status_code == 200


def test_another_revision_and_another_tenant_have_their_own(tmp_path: Path) -> None:
    """A quota counts one tenant and one revision."""
    with _server(tmp_path, quotas=[QUOTA], revisions=["minilm@*", "other@*"]) as server:
        assert server.post("/v1/infer", native([1] * 9)).status_code == 200
        assert server.post("/v1/infer", native([1] * 9)).status_code == 429
        assert server.post("/v1/infer", native([1] * 9) | {"revision": "other@v1"}).status_code == 200


# ---- keys that are revoked -------------------------------------------------------------------------------------------


def test_a_revoked_key_refuses_rows_that_wait(tmp_path: Path) -> None:
    """ISSUE-3: the request ends in 401 within seconds, and its rows are taken back; another key's goes on."""
    with Server(tmp_path) as server:

        async def revoke() -> tuple[int, int, int]:
            server.bucket().hold()
            waiting = asyncio.ensure_future(server.send("POST", "/v1/infer", native([1])))
            other = asyncio.ensure_future(server.send("POST", "/v1/infer", native([2]), key="kept-key"))
            await server.bucket().called(2)
            without = [digest for digest in TENANTS["acme"]["keys_sha256"] if digest != digest_of(ACME)]
            kept = {"keys_sha256": [*without, digest_of("kept-key")]}
            write_tenants(server.tenants_file, TENANTS | {"acme": TENANTS["acme"] | kept})
            for _ in range(40):
                await server.loop.skip(0.1)
                if waiting.done():
                    break
            ended = (await waiting).status_code
            num_cancelled = server.bucket().num_cancelled
            server.bucket().release()
            return ended, num_cancelled, (await other).status_code

        keys = [*TENANTS["acme"]["keys_sha256"], digest_of("kept-key")]
        write_tenants(server.tenants_file, TENANTS | {"acme": TENANTS["acme"] | {"keys_sha256": keys}})
        server.run(server.loop.skip(2.0))
        assert server.run(revoke()) == (401, 1, 200)
