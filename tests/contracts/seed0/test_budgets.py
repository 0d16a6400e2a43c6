"""Seed 0, buckets, cost and budget (S0-60 to S0-76); delays are 60 s on a clock that stands still."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching.buckets import Buckets, padded_tokens
from batching.errors import GroupLimit, InputTooLong
from batching.groups import GroupSettings
from tests.fakes import Harness, HeldExecutor, advance, answer, in_loop, kinds, outcomes, requests, settle

DEFAULT = Buckets((16, 64, 256))
LONG_DELAY = {"max_wait_s": 60.0}


def test_published_numbers_are_the_defaults() -> None:
    """Section 1.1: ceilings, budget, rows, delay and waiting room are those of the recipe."""
    settings = GroupSettings()
    assert (settings.ceilings, settings.padded_token_budget, settings.max_rows) == ((16, 64, 256), 256, 16)
    assert (settings.max_wait_s, settings.max_queued_rows_per_group) == (0.01, 64)


@pytest.mark.parametrize(
    ("num_tokens", "ceiling"), [(1, 16), (16, 16), (17, 64), (64, 64), (65, 256), (256, 256)], ids="S0-60-{}".format
)
def test_s0_60_length_decides_the_ceiling(num_tokens: int, ceiling: int) -> None:
    """S0-60, S0-63: a row is charged its ceiling, at both ends of each bucket."""
    assert DEFAULT.ceiling_of(num_tokens) == ceiling


@in_loop
async def test_s0_61_too_long_leaves_no_trace() -> None:
    """S0-61: length 257 fails, opens no group, fills no queue and reaches no model."""
    harness = Harness(max_groups=1, max_queued_rows_per_group=1, **LONG_DELAY)
    refused, accepted = await harness.start(requests([257, 256], tenants="ab"))
    results = await outcomes([refused, accepted])
    assert kinds(results) == ["InputTooLong", "TokenPrediction"]
    assert (results[0].num_tokens, results[0].limit, harness.model.shapes) == (257, 256, [(1, 256)])


@in_loop
async def test_s0_62_length_is_checked_before_the_group_limit() -> None:
    """S0-62: with all groups taken, an over-length request still hears that it is too long."""
    harness = Harness(max_groups=1, **LONG_DELAY)
    _, too_long, new_group = await harness.start(requests([1, 257, 1], tenants="abc"))
    assert isinstance(too_long.exception(), InputTooLong)
    assert isinstance(new_group.exception(), GroupLimit)
    await harness.groups.close()


@pytest.mark.parametrize(
    ("length", "sent", "shapes", "left_waiting"),
    [
        pytest.param(64, 5, [(4, 64)], 1, id="S0-64"),
        pytest.param(256, 2, [(1, 256), (1, 256)], 0, id="S0-65"),
        pytest.param(1, 17, [(16, 1)], 1, id="S0-66"),
        pytest.param(17, 4, [(4, 17)], 0, id="S0-63-ceiling-is-charged"),
        pytest.param(17, 3, [], 3, id="S0-63-below-the-budget"),
        pytest.param(16, 16, [(16, 16)], 0, id="S0-73-count-reached"),
        pytest.param(64, 4, [(4, 64)], 0, id="S0-73-cost-reached"),
        pytest.param(64, 3, [], 3, id="S0-73-one-missing"),
    ],
)
@in_loop
async def test_s0_64_full_batches_leave_at_once(
    length: int, sent: int, shapes: list[tuple[int, int]], left_waiting: int
) -> None:
    """S0-63 to S0-66, S0-73: what reaches budget or count leaves without any delay, the rest waits for its end."""
    harness = Harness(**LONG_DELAY)
    tasks = await harness.start(requests([length] * sent))
    assert (harness.model.shapes, sum(not task.done() for task in tasks)) == (shapes, left_waiting)
    await advance(harness.clock, 60.0)
    assert all(task.done() for task in tasks)


@in_loop
async def test_s0_65_second_call_waits_for_the_first_only() -> None:
    """S0-65: with one call at a time the second leaves when the first ends, with no time passing."""
    pool = HeldExecutor()
    harness = Harness(executor=pool, **LONG_DELAY)
    tasks = await harness.start(requests([256, 256]))
    assert len(pool.waiting) == 1
    pool.run()
    await settle()
    pool.run()
    assert kinds(await outcomes(tasks)) == ["TokenPrediction"] * 2


@in_loop
async def test_s0_67_short_and_long_of_one_bucket() -> None:
    """S0-67: lengths 1 and 16 share a batch of 17 real tokens in 32 positions, charged 32."""
    harness = Harness()
    await harness.outcomes(requests([1, 16]))
    (batch,) = harness.model.batches
    real = sum(map(sum, batch.attention_mask))
    assert (real, padded_tokens([1, 16]), batch.num_rows * DEFAULT.ceiling_of(batch.width)) == (17, 32, 32)


@given(
    st.lists(st.integers(1, 256), min_size=1, max_size=80),
    st.sampled_from([256, 300, 1000, 100_000]),
    st.integers(1, 16),
)
@in_loop
async def test_s0_68_every_call_is_inside_all_limits(lengths: list[int], budget: int, max_rows: int) -> None:
    """S0-68, S0-72, S0-75, ACC-02: rows x ceiling and rows x width fit the budget, rows the count; nothing is cut."""
    harness = Harness(padded_token_budget=budget, max_rows=max_rows, max_queued_rows_per_group=80)
    cohort = requests(lengths, tenants="ab")
    predictions = await harness.outcomes(cohort)
    assert all(rows * DEFAULT.ceiling_of(width) <= budget and rows <= max_rows for rows, width in harness.model.shapes)
    assert sum(rows for rows, _ in harness.model.shapes) == len(lengths)
    assert [one.values for one in predictions] == [answer(one) for one in cohort]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("ceilings", (16, 257), id="S0-69-above-budget"),
        pytest.param("ceilings", (), id="S0-70-empty"),
        pytest.param("ceilings", (64, 16), id="S0-70-unsorted"),
        pytest.param("ceilings", (16, 16), id="S0-70-duplicate"),
        pytest.param("ceilings", (0, 16), id="S0-70-zero"),
        pytest.param("ceilings", (-1, 16), id="S0-70-negative"),
        pytest.param("ceilings", (True, 16), id="S0-70-bool"),
        pytest.param("ceilings", (16.0, 64), id="S0-70-float"),
        pytest.param("padded_token_budget", 0, id="S0-71-budget-zero"),
        pytest.param("padded_token_budget", -256, id="S0-71-budget-negative"),
        pytest.param("padded_token_budget", True, id="S0-71-budget-bool"),
        pytest.param("padded_token_budget", 256.0, id="S0-71-budget-float"),
        pytest.param("max_rows", 0, id="S0-71-rows-zero"),
        pytest.param("max_rows", -1, id="S0-71-rows-negative"),
        pytest.param("max_wait_s", -0.01, id="S0-71-delay-negative"),
        pytest.param("max_wait_s", math.inf, id="S0-71-delay-inf"),
        pytest.param("max_wait_s", math.nan, id="S0-71-delay-nan"),
        pytest.param("max_queued_rows_per_group", 0, id="S0-71-waiting-zero"),
        pytest.param("max_groups", 0, id="S0-71-groups-zero"),
    ],
)
def test_s0_69_impossible_settings_are_refused(name: str, value: Any) -> None:
    """S0-69, S0-70, S0-71: settings that could never work are an error when they are made."""
    with pytest.raises(ValueError, match=r"^\w+: "):
        GroupSettings(**{name: value})


def test_s0_69_ceiling_may_equal_the_budget() -> None:
    """S0-69: a row that is exactly the budget is allowed."""
    assert GroupSettings(ceilings=(16, 300), padded_token_budget=300).batch_limits.token_budget == 300


@in_loop
async def test_s0_72_large_budget_keeps_the_count() -> None:
    """S0-72: with a budget of 100,000 a call still has at most 16 rows."""
    harness = Harness(padded_token_budget=100_000)
    await harness.outcomes(requests([200] * 40))
    assert [rows for rows, _ in harness.model.shapes] == [16, 16, 8]


@in_loop
async def test_s0_74_estimate_is_conservative() -> None:
    """S0-74: four rows of 17 are charged 256 and occupy 68 positions."""
    harness = Harness(**LONG_DELAY)
    await harness.outcomes(requests([17] * 4))
    assert harness.model.shapes == [(4, 17)]
    assert (sum(DEFAULT.ceiling_of(17) for _ in range(4)), padded_tokens([17] * 4)) == (256, 68)


@given(st.lists(st.integers(1, 256), min_size=1, max_size=200))
def test_s0_76_finer_buckets_charge_less_and_split_more(lengths: list[int]) -> None:
    """S0-76: with one ceiling more, the same trace is charged no more and falls into no fewer groups."""
    finer = Buckets((16, 32, 64, 256))
    charged, charged_finer = (sum(map(buckets.ceiling_of, lengths)) for buckets in (DEFAULT, finer))
    groups, groups_finer = (len(set(map(buckets.ceiling_of, lengths))) for buckets in (DEFAULT, finer))
    assert charged_finer <= charged
    assert groups_finer >= groups


def test_s0_76_trace_that_gains() -> None:
    """S0-76: lengths from 1 to 256 once each are charged strictly less with the finer ceilings."""
    lengths = range(1, 257)
    assert sum(map(Buckets((16, 32, 64, 256)).ceiling_of, lengths)) == sum(map(DEFAULT.ceiling_of, lengths)) - 16 * 32
