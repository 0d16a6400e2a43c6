"""`user_config`: every mistake is refused with the path of its key."""

from typing import Any

import pytest
from pydantic import ValidationError

from deployments.settings import BucketSettings, GatewaySettings

REVISIONS = {"minilm@v1": "minilm-v1"}


def paths(model: Any, value: object) -> list[str]:
    """Where `value` is wrong, as dotted paths; empty when it is good."""
    try:
        model.model_validate(value)
    except ValidationError as error:
        return [".".join(map(str, item["loc"])) for item in error.errors()]
    return []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param({"token_budgets": 1}, "token_budgets", id="unknown key"),
        pytest.param({"token_budget": 0}, "token_budget", id="budget 0"),
        pytest.param({"token_budget": "2048"}, "token_budget", id="budget as text"),
        pytest.param({"token_budget": 2048.0}, "token_budget", id="budget as float"),
        pytest.param({"token_budget": True}, "token_budget", id="budget as boolean"),
        pytest.param({"max_rows": 0}, "max_rows", id="no rows"),
        pytest.param({"max_rows": 1001}, "max_rows", id="rows above Ray's max_ongoing_requests"),
        pytest.param({"max_wait_s": -0.1}, "max_wait_s", id="negative wait"),
        pytest.param({"max_wait_s": 10.1}, "max_wait_s", id="wait above the limit"),
        pytest.param({"max_wait_s": float("nan")}, "max_wait_s", id="wait NaN"),
        pytest.param({"max_queued_tokens": 0}, "max_queued_tokens", id="no queued tokens"),
        pytest.param({"max_queued_rows": 0}, "max_queued_rows", id="no queued rows"),
        pytest.param({"max_groups": 0}, "max_groups", id="no groups"),
        pytest.param({"stuck_forward_s": 0}, "stuck_forward_s", id="stuck at once"),
        pytest.param({"stuck_forward_s": float("inf")}, "stuck_forward_s", id="never stuck"),
        pytest.param([], "", id="not a mapping"),
    ],
)
def test_bad_bucket_settings_name_their_key(value: object, expected: str) -> None:
    """Each setting of a bucket has a type and a range."""
    assert paths(BucketSettings, value) == [expected]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param({}, "revisions", id="revisions missing"),
        pytest.param({"revisions": []}, "revisions", id="revisions as list"),
        pytest.param({"revisions": {"": "app"}}, "revisions..[key]", id="revision without a name"),
        pytest.param({"revisions": {"minilm@v1": ""}}, "revisions.minilm@v1", id="application without a name"),
        pytest.param({"revisions": {"minilm@v1": 7}}, "revisions.minilm@v1", id="application as number"),
        pytest.param({"alias": {}}, "alias", id="unknown key"),
        pytest.param({"aliases": {"": "minilm@v1"}}, "aliases..[key]", id="alias without a name"),
        pytest.param({"aliases": {"minilm": 1}}, "aliases.minilm", id="alias of a number"),
        pytest.param({"default_timeout_s": 0}, "default_timeout_s", id="no time"),
        pytest.param({"max_timeout_s": 3601}, "max_timeout_s", id="time above an hour"),
        pytest.param({"max_timeout_s": "60"}, "max_timeout_s", id="time as text"),
        pytest.param({"max_rows_per_request": 0}, "max_rows_per_request", id="no rows"),
        pytest.param({"max_rows_per_request": 100_001}, "max_rows_per_request", id="too many rows"),
        pytest.param({"max_tokens_per_request": 0}, "max_tokens_per_request", id="no tokens"),
    ],
)
def test_bad_gateway_settings_name_their_key(value: dict[str, object], expected: str) -> None:
    """Each setting of the ingress has a type and a range."""
    complete = value if "revisions" in value or not value else {"revisions": REVISIONS, **value}
    assert paths(GatewaySettings, complete) == [expected]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        pytest.param(
            {"aliases": {"minilm": "minilm@v2"}},
            "aliases.minilm: minilm@v2 is not among the revisions",
            id="alias of an unknown revision",
        ),
        pytest.param(
            {"aliases": {"minilm@v1": "minilm@v1"}},
            "aliases.minilm@v1: a revision has that name already",
            id="alias that hides a revision",
        ),
        pytest.param(
            {"default_timeout_s": 10.5, "max_timeout_s": 10.0},
            "default_timeout_s: 10.5 is above max_timeout_s 10.0",
            id="default above the maximum",
        ),
    ],
)
def test_settings_that_contradict_each_other(value: dict[str, object], message: str) -> None:
    """What two settings say together is checked too, and the message gives both."""
    with pytest.raises(ValidationError, match="1 validation error") as caught:
        GatewaySettings.model_validate({"revisions": REVISIONS, **value})
    assert caught.value.errors()[0]["msg"] == f"Value error, {message}"


def test_gateway_may_have_no_revisions() -> None:
    """An empty mapping is a gateway that serves nothing yet; it is never ready (BL-145)."""
    assert GatewaySettings.model_validate({"revisions": {}}).revisions == {}


@pytest.mark.parametrize(
    ("token_budget", "max_tokens", "expected"),
    [
        pytest.param(256, 256, 256, id="exactly the longest row"),
        pytest.param(1000, 256, 1000, id="as configured"),
        pytest.param(None, 256, 2048, id="the device's default"),
        pytest.param(None, 8192, 8192, id="default raised to the longest row"),
    ],
)
def test_token_budget_in_force(token_budget: int | None, max_tokens: int, expected: int) -> None:
    """The budget is what the settings say, by default what suits the device, and never below the longest row."""
    limits = BucketSettings(token_budget=token_budget).batch_limits(max_tokens=max_tokens, default_token_budget=2048)
    assert limits.token_budget == expected


def test_token_budget_below_the_longest_row_is_refused() -> None:
    """A row that could never run is found when the settings are read, with both numbers."""
    with pytest.raises(ValueError, match=r"^token_budget: 255 is below the bucket's longest row of 256 tokens"):
        BucketSettings(token_budget=255).batch_limits(max_tokens=256, default_token_budget=2048)


def test_limits_take_the_settings_over() -> None:
    """Row limits, waiting time and queue limits reach the batcher as they were given."""
    settings = BucketSettings(max_rows=7, max_wait_s=0.5, max_queued_tokens=11, max_queued_rows=12, max_groups=13)
    limits, queue = settings.batch_limits(max_tokens=1, default_token_budget=1), settings.queue_limits()
    assert (limits.max_rows, limits.max_wait_s) == (7, 0.5)
    assert (queue.max_queued_cost, queue.max_queued_rows, queue.max_groups) == (11, 12, 13)


def test_default_queue_takes_the_largest_request() -> None:
    """A request that the ingress lets through is never too large for an empty replica."""
    bucket, gateway = BucketSettings(), GatewaySettings(revisions=REVISIONS)
    assert bucket.max_queued_tokens >= gateway.max_tokens_per_request
    assert bucket.max_queued_rows >= gateway.max_rows_per_request


@pytest.mark.parametrize(
    ("given", "overhead_s", "expected_s"),
    [
        pytest.param(None, 0.001, 0.25, id="a quarter of a second"),
        pytest.param(None, 0.06, 0.6, id="ten overheads of a large model"),
        pytest.param(0.05, 0.06, 0.05, id="as set"),
        pytest.param(None, None, float("inf"), id="not bounded where nothing was measured"),
    ],
)
def test_time_of_a_forward_is_bounded(given: float | None, overhead_s: float | None, expected_s: float) -> None:
    """Everybody waits for a forward that runs, so it is kept short as long as that costs little."""
    limits = BucketSettings(max_forward_s=given).batch_limits(
        max_tokens=64, default_token_budget=2048, overhead_s=overhead_s
    )
    assert limits.max_work_s == pytest.approx(expected_s)
