"""From a parsed request to its answer, without HTTP."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from ray.exceptions import ActorDiedError

from batching.errors import (
    DeadlineExceeded,
    EmptyInput,
    ForwardFailed,
    InputTooLong,
    InvalidRequest,
    RequestTooLarge,
    RevisionUnavailable,
    TokenIdOutOfRange,
    TokenServeError,
    UnknownRevision,
)
from deployments.ingress import MAX_PIECE_CHARS, PROBE_TIMEOUT_S, Ingress, RevisionStatus, _pieces
from deployments.requests import InferRequest, Tenant
from tests.deployments.fakes import (
    DIMENSION,
    VOCAB_SIZE,
    FakeBucket,
    FakeConnect,
    Rounds,
    as_ray_raises,
    current_loop,
    in_skewed_loop,
    revision_info,
    rows_of,
    vector,
)

SETTINGS: dict[str, Any] = {
    "revisions": {"minilm@v1": "minilm-v1", "other@v1": "other-v1", "down@v1": "down-v1"},
    "aliases": {"minilm": "minilm@v1", "secret": "other@v1"},
}
ACME = Tenant(name="acme", revisions=("minilm@*", "down@*"), batch_group="shared")


class Gateway:
    """An ingress in front of fake buckets."""

    def __init__(self) -> None:
        self.connect = FakeConnect({"minilm-v1": revision_info(), "other-v1": revision_info("other@v1")})
        self.ingress = Ingress(self.connect)
        self.rounds = Rounds()
        self.ingress.directory.sleep = self.rounds

    def bucket(self, deployment: str = "tokens-16") -> FakeBucket:
        """A bucket of minilm."""
        return self.connect.fake_bucket("minilm-v1", deployment)


@asynccontextmanager
async def gateway(**settings: Any) -> AsyncIterator[Gateway]:
    """Two revisions up and one down, with changed settings."""
    made = Gateway()
    await made.ingress.reconfigure(SETTINGS | settings)
    await made.rounds.ended(len(SETTINGS["revisions"]))
    try:
        yield made
    finally:
        await made.ingress.stop()


def request(*inputs: str | Sequence[int], tenant: Tenant = ACME, revision: str = "minilm", **more: Any) -> InferRequest:
    """A request of acme."""
    given = [value if isinstance(value, str) else np.array(value, dtype=np.int32) for value in inputs]
    params = [f"inputs[{index}]" for index in range(len(given))]
    return InferRequest(tenant=tenant, revision=revision, inputs=given, params=params, **more)


async def error_of(made: Gateway, asked: InferRequest) -> TokenServeError:
    """How a request that must fail ends."""
    with pytest.raises(TokenServeError) as caught:
        await made.ingress.infer(asked)
    return caught.value


TOO_MANY_ROWS = RequestTooLarge("inputs", "rows", 5, 4, "max_rows_per_request")
TOO_MANY_TOKENS = RequestTooLarge("inputs", "tokens", 101, 100, "max_tokens_per_request")


# ---- refusals --------------------------------------------------------------------------------------------------------

REFUSED = [
    pytest.param(request([1], revision="unknown"), UnknownRevision("revision"), id="unknown"),
    pytest.param(request([1], revision=""), UnknownRevision("revision"), id="no name"),
    pytest.param(request([1], revision="Minilm"), UnknownRevision("revision"), id="other case"),
    pytest.param(request([1], revision="minilm "), UnknownRevision("revision"), id="trailing blank"),
    pytest.param(request([1], revision="other@v1"), UnknownRevision("revision"), id="forbidden"),
    pytest.param(request([1], revision="secret"), UnknownRevision("revision"), id="alias of a forbidden one"),
    pytest.param(request([1], revision="down@v1"), RevisionUnavailable("down@v1", 1.0), id="down"),
    pytest.param(
        request([1], timeout_s=300.5), InvalidRequest("timeout_ms", "is above the limit of 300000"), id="time"
    ),
    pytest.param(request(*[[1]] * 5), TOO_MANY_ROWS, id="a row too many"),
    pytest.param(
        request([1] * 50, [1] * 51),
        TOO_MANY_TOKENS,
        id="a token too many",
    ),
    pytest.param(request([1], []), EmptyInput("inputs[1]"), id="empty"),
    pytest.param(request("the", "  "), EmptyInput("inputs[1]", "is empty: it holds no token of its own"), id="blank"),
    pytest.param(request([1], [1] * 65), InputTooLong("inputs[1]", 65, 64), id="too long"),
    pytest.param(request([1, VOCAB_SIZE]), TokenIdOutOfRange("inputs[0][1]", VOCAB_SIZE), id="outside the vocabulary"),
]


@pytest.mark.parametrize(("asked", "expected"), REFUSED)
@in_skewed_loop
async def test_refused_requests_reach_no_bucket(asked: InferRequest, expected: TokenServeError) -> None:
    """A request that cannot be answered ends in its named error before any replica is called."""
    async with gateway(max_rows_per_request=4, max_tokens_per_request=100) as made:
        error = await error_of(made, asked)
        assert (type(error), error.detail, error.param) == (type(expected), expected.detail, expected.param)
        assert [bucket.calls for bucket in made.connect.buckets.values()] == [[]] * 4


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(request(*[[1]] * 4), id="rows"),
        pytest.param(request([1] * 50, [1] * 50), id="tokens"),
        pytest.param(request([1] * 64), id="longest row"),
        pytest.param(request([1], timeout_s=300.0), id="ms"),
    ],
)
@in_skewed_loop
async def test_requests_at_the_limit_are_answered(asked: InferRequest) -> None:
    """Each limit is the largest value that is let through."""
    async with gateway(max_rows_per_request=4, max_tokens_per_request=100) as made:
        assert (await made.ingress.infer(asked)).errors == {}


@in_skewed_loop
async def test_bl_068_error_lists_every_bad_input() -> None:
    """A request with several blank rows is told all of them at once."""
    async with gateway() as made:
        blank = {3, 57, 99}
        error = await error_of(made, request(*(" " if index in blank else "the" for index in range(100))))
        assert isinstance(error, EmptyInput)
        assert error.detail.startswith("`inputs[3]` is empty")
        assert error.detail.endswith("(also refused: inputs[57], inputs[99])")


@in_skewed_loop
async def test_list_of_bad_inputs_is_bounded() -> None:
    """A thousand bad rows do not make a long error."""
    async with gateway() as made:
        error = await error_of(made, request(*[" "] * 1000))
        assert len(error.detail) < 500


# ---- partial ---------------------------------------------------------------------------------------------------------


@in_skewed_loop
async def test_partial_answers_good_rows_around_bad_ones() -> None:
    """With `partial` each failed row has its error at its place, whether found here or in a replica."""
    async with gateway() as made:
        failure = ForwardFailed("ValueError")
        made.bucket().row_errors[7, 7] = failure
        answer = await made.ingress.infer(request("the", " ", [7, 7], [1] * 65, [VOCAB_SIZE], [9] * 20, partial=True))
        kinds = {index: type(error).__name__ for index, error in answer.errors.items()}
        assert kinds == {1: "EmptyInput", 2: "ForwardFailed", 3: "InputTooLong", 4: "TokenIdOutOfRange"}
        assert answer.num_tokens == [3, 0, 0, 0, 0, 20]
        assert answer.computed_tokens == 3 + 2 + 20
        assert np.array_equal(answer.values[[0, 5]], [vector([101, 1996, 102]), vector([9] * 20)])
        assert not answer.values[1:5].any()


@in_skewed_loop
async def test_row_that_failed_in_a_replica_fails_the_request() -> None:
    """Without `partial` the first failed row decides, and no value is returned."""
    async with gateway() as made:
        made.bucket("tokens-64").row_errors[(3,) * 20] = ForwardFailed("first")
        made.bucket().row_errors[4, 4] = ForwardFailed("second")
        error = await error_of(made, request([1], [3] * 20, [4, 4]))
        assert error.args == ("first",)


@in_skewed_loop
async def test_partial_with_nothing_good_calls_nobody() -> None:
    """When every row is bad the answer is all errors and no replica works."""
    async with gateway() as made:
        answer = await made.ingress.infer(request(" ", "", partial=True))
        assert list(answer.errors) == [0, 1]
        assert made.bucket().calls == []


@in_skewed_loop
async def test_partial_is_still_bounded() -> None:
    """Limits on the whole request hold with `partial` too."""
    async with gateway(max_tokens_per_request=10) as made:
        assert isinstance(await error_of(made, request([1] * 11, " ", partial=True)), RequestTooLarge)


# ---- time and callers that leave -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("timeout_s", "in_force"), [pytest.param(5.0, 5.0, id="asked for"), pytest.param(None, 60.0, id="by default")]
)
@in_skewed_loop
async def test_deadline_ends_the_request_and_its_calls(timeout_s: float | None, in_force: float) -> None:
    """At its deadline a request ends in DeadlineExceeded with its own time, and its calls are taken back."""
    async with gateway() as made:
        for name in ("tokens-16", "tokens-64"):
            made.bucket(name).hold()
        task = asyncio.create_task(made.ingress.infer(request([1], [2] * 20, timeout_s=timeout_s)))
        for name in ("tokens-16", "tokens-64"):
            await made.bucket(name).called(1)
        await current_loop().skip(in_force - 1)
        assert not task.done()
        await current_loop().skip(1)
        with pytest.raises(DeadlineExceeded) as caught:
            await task
        await current_loop().skip(0)
        assert caught.value.timeout_s == in_force
        assert [made.bucket(name).num_cancelled for name in ("tokens-16", "tokens-64")] == [1, 1]


@in_skewed_loop
async def test_cancelled_request_cancels_every_bucket_call() -> None:
    """A client that leaves takes its rows out of all buckets."""
    async with gateway() as made:
        for name in ("tokens-16", "tokens-64"):
            made.bucket(name).hold()
        task = asyncio.create_task(made.ingress.infer(request([1], [2] * 20)))
        for name in ("tokens-16", "tokens-64"):
            await made.bucket(name).called(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await current_loop().skip(0)
        assert [made.bucket(name).num_cancelled for name in ("tokens-16", "tokens-64")] == [1, 1]


# ---- answers ---------------------------------------------------------------------------------------------------------


@in_skewed_loop
async def test_rows_of_two_buckets_come_back_in_order() -> None:
    """Rows are cut by length, one call per bucket on behalf of the tenant, and put together again."""
    async with gateway() as made:
        rows = [[1] * 20, [2], [3] * 64, [4] * 16, [5] * 17]
        answer = await made.ingress.infer(request(*rows))
        short, long = made.bucket("tokens-16").calls, made.bucket("tokens-64").calls
        assert [rows_of(call) for call in short + long] == [[rows[1], rows[3]], [rows[0], rows[2], rows[4]]]
        assert {(call.tenant, call.batch_group) for call in short + long} == {("acme", "shared")}
        assert np.array_equal(answer.values, np.stack([vector(row) for row in rows]))
        assert answer.num_tokens == [20, 1, 64, 16, 17]
        assert answer.computed_tokens == 118


@in_skewed_loop
async def test_request_uses_one_snapshot_from_start_to_end() -> None:
    """A revision that goes while a request runs does not take the request along."""
    async with gateway() as made:
        made.bucket().hold()
        task = asyncio.create_task(made.ingress.infer(request([1])))
        await made.bucket().called(1)
        await made.ingress.reconfigure({"revisions": {}})
        made.bucket().release()
        assert np.array_equal((await task).values, [vector([1])])
        assert isinstance(await error_of(made, request([1])), UnknownRevision)


# ---- settings --------------------------------------------------------------------------------------------------------


@in_skewed_loop
async def test_reconfigure_with_a_mistake_keeps_the_old() -> None:
    """A bad user_config is refused with its key and changes nothing."""
    async with gateway() as made:
        with pytest.raises(ValidationError, match="max_row_per_request"):
            await made.ingress.reconfigure(SETTINGS | {"max_row_per_request": 1})
        assert (await made.ingress.infer(request([1]))).errors == {}


@in_skewed_loop
async def test_alias_moves_while_serving() -> None:
    """After a reconfigure the next request goes where the alias points, without a restart."""
    async with gateway() as made:
        operator = Tenant(name="operator", revisions=("*",), batch_group="operator")
        await made.ingress.reconfigure(SETTINGS | {"aliases": {"minilm": "other@v1"}})
        answer = await made.ingress.infer(request([1], tenant=operator))
        assert answer.live.info.revision == "other@v1"


def test_ingress_without_settings_has_nothing_to_serve() -> None:
    """Before the first user_config there are no settings, in words."""
    with pytest.raises(RuntimeError, match="needs a user_config"):
        _ = Ingress(FakeConnect()).settings


@pytest.mark.parametrize(
    ("globs", "revision", "expected"),
    [
        pytest.param(("minilm@*",), "minilm@v1", True, id="glob"),
        pytest.param(("minilm@v1",), "minilm@v1", True, id="exact"),
        pytest.param(("*",), "anything@v9", True, id="all"),
        pytest.param(("a@*", "minilm@*"), "minilm@v2", True, id="second of two"),
        pytest.param(("minilm@v[12]",), "minilm@v2", True, id="one of a set"),
        pytest.param((), "minilm@v1", False, id="none"),
        pytest.param(("minilm@*",), "minilm-large@v1", False, id="another name"),
        pytest.param(("MINILM@*",), "minilm@v1", False, id="other case"),
        pytest.param(("minilm",), "minilm@v1", False, id="a prefix is not a glob"),
        pytest.param(("*@v1",), "minilm@v10", False, id="a longer version"),
    ],
)
def test_globs_say_what_a_tenant_may_use(globs: tuple[str, ...], revision: str, *, expected: bool) -> None:
    """A tenant may use a revision when one of its globs covers the whole name."""
    assert Tenant(name="t", revisions=globs, batch_group="t").may_use(revision) is expected


@in_skewed_loop
async def test_usable_revisions_and_their_aliases() -> None:
    """A tenant sees its own revisions, up or down, and a revision its aliases."""
    async with gateway() as made:
        assert made.ingress.usable(ACME) == ["minilm@v1", "down@v1"]
        assert made.ingress.aliases_of("minilm@v1") == ["minilm"]


# ---- readiness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        pytest.param(None, None, id="answers"),
        pytest.param(ActorDiedError(), "probe failed: ActorDiedError", id="replica died"),
        pytest.param(as_ray_raises(ForwardFailed("x")), "probe failed: RayTaskError(ForwardFailed)", id="model fails"),
    ],
)
@in_skewed_loop
async def test_status_is_that_of_every_bucket(failure: Exception | None, expected: str | None) -> None:
    """A revision is ready when each of its buckets runs a real forward; otherwise the reason is named."""
    async with gateway() as made:
        made.bucket("tokens-64").probe_failure = failure
        (status,) = await made.ingress.status(["minilm@v1"])
        assert status == RevisionStatus(revision="minilm@v1", is_ready=failure is None, reason=expected)
        assert [made.bucket(name).num_probes for name in ("tokens-16", "tokens-64")] == [1, 1]


@in_skewed_loop
async def test_status_says_what_is_known_of_the_application() -> None:
    """An application whose new version failed to deploy has no replica to probe; Serve's word for it is the reason."""
    async with gateway() as made:
        made.bucket("tokens-64").probe_failure = ActorDiedError()
        made.ingress.directory._reasons["minilm@v1"] = "application minilm-v1 is DEPLOY_FAILED"
        (status,) = await made.ingress.status(["minilm@v1"])
        assert status.reason == "application minilm-v1 is DEPLOY_FAILED"


@in_skewed_loop
async def test_status_of_a_revision_that_is_down() -> None:
    """Nobody is probed, and the reason is the directory's."""
    async with gateway() as made:
        (status,) = await made.ingress.status(["down@v1"])
        expected = "application down-v1 is not deployed"
        assert status == RevisionStatus(revision="down@v1", is_ready=False, reason=expected)


@in_skewed_loop
async def test_probe_that_hangs_is_not_ready() -> None:
    """A replica that does not answer a probe in time is not ready."""
    async with gateway() as made:
        made.bucket().hold()
        task = asyncio.create_task(made.ingress.status(["minilm@v1"]))
        await current_loop().skip(0)
        await current_loop().skip(PROBE_TIMEOUT_S)
        assert (await task)[0].reason == "probe failed: TimeoutError"


@in_skewed_loop
async def test_width_of_the_answer_is_the_models() -> None:
    """Failed rows have zeros of the right width."""
    async with gateway() as made:
        assert (await made.ingress.infer(request(" ", partial=True))).values.shape == (1, DIMENSION)


def test_pieces_cover_all_inputs_once_and_stay_small() -> None:
    """Large requests are tokenised piece by piece: every input once, in order, no piece much above the bound."""
    inputs = ["x" * 30_000, "y" * 200_000, "", np.arange(40_000, dtype=np.int32), "z" * 30_000, "end"]
    pieces = list(_pieces(inputs))
    assert [index for start, end in pieces for index in range(start, end)] == list(range(len(inputs)))
    assert len(pieces) > 1
    for start, end in pieces:
        assert sum(len(value) for value in inputs[start : end - 1]) < MAX_PIECE_CHARS


@in_skewed_loop
async def test_a_fresh_ingress_learns_of_revisions_before_it_serves() -> None:
    """Once configured, what was up already is served by the first request."""
    ingress = Ingress(FakeConnect({"minilm-v1": revision_info()}))
    await ingress.reconfigure({"revisions": {"minilm@v1": "minilm-v1", "other@v1": "missing"}})
    assert ingress.directory.get("minilm@v1").application == "minilm-v1"
    await ingress.stop()
