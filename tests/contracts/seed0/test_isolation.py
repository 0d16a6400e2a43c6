"""Seed 0, groups and isolation (S0-80 to S0-90)."""

import contextvars
import dataclasses
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching.batcher import Batcher
from batching.errors import GroupLimit
from batching.groups import GroupSettings
from batching.padding import ModelBatch
from batching.row import GroupKey
from tests.fakes import (
    FakeForward,
    FakeModel,
    Harness,
    HeldExecutor,
    advance,
    answer,
    batch_limits,
    doubled,
    in_loop,
    kinds,
    outcomes,
    queue_limits,
    requests,
    rows,
    settle,
)


@given(st.lists(st.integers(1, 256), min_size=1, max_size=60), st.integers(1, 4))
@in_loop
async def test_s0_80_one_key_per_call(lengths: list[int], calls_at_once: int) -> None:
    """S0-80, ACC-03: whatever arrives together, a call holds rows of one tenant, revision and bucket."""
    cohort = requests(lengths, tenants="aab", revisions=["v1", "v2"])
    harness = Harness(max_concurrent_calls=calls_at_once)
    await harness.outcomes(cohort)
    key_of = {
        one.token_ids[0]: (one.tenant, one.revision, GroupSettings().ceilings.index(_ceiling(one.token_ids)))
        for one in cohort
    }
    keys_per_call = [{key_of[row[0]] for row in batch.input_ids} for batch in harness.model.batches]
    assert [len(keys) for keys in keys_per_call] == [1] * len(harness.model.batches)


def _ceiling(token_ids: Any) -> int:
    return min(ceiling for ceiling in GroupSettings().ceilings if ceiling >= len(token_ids))


@pytest.mark.parametrize(
    ("tenants", "revisions", "shapes"),
    [
        pytest.param("a", ["v1", "v2"], [(2, 3), (2, 3)], id="S0-81-two-revisions"),
        pytest.param("ab", ["v1"], [(2, 3), (2, 3)], id="S0-81-two-tenants"),
        pytest.param("a", ["v1"], [(4, 3)], id="S0-82-one-group"),
    ],
)
@in_loop
async def test_s0_81_tenants_and_revisions_do_not_meet(
    tenants: str, revisions: list[str], shapes: list[tuple[int, int]]
) -> None:
    """S0-81: equal lengths at the same moment are two calls when tenant or revision differ, else one."""
    harness = Harness()
    await harness.outcomes(requests([3] * 4, tenants=tenants, revisions=revisions))
    assert harness.model.shapes == shapes


@in_loop
async def test_s0_82_group_is_reused() -> None:
    """S0-82: the first valid item makes the group, the next one joins it although no further group is allowed."""
    harness = Harness(max_groups=1, max_wait_s=60.0)
    first = await harness.start(requests([1]))
    second = await harness.start(requests([2]))
    await harness.groups.close()
    assert (kinds(await outcomes(first + second)), harness.model.shapes) == (["TokenPrediction"] * 2, [(2, 2)])


@in_loop
async def test_s0_83_new_key_beyond_the_limit_fails_at_once() -> None:
    """S0-83: with two groups live a third key hears of the group limit; the two go on taking work."""
    harness = Harness(max_groups=2, max_wait_s=60.0)
    live = await harness.start(requests([1, 1], tenants="ab"))
    (refused,) = await harness.start(requests([1], tenants="c"))
    more = await harness.start(requests([1, 1], tenants="ab"))
    error = refused.exception()
    assert isinstance(error, GroupLimit)
    assert (error.limit, error.retry_after_s > 0) == (2, True)
    await harness.groups.close()
    assert kinds(await outcomes(live + more)) == ["TokenPrediction"] * 4


@in_loop
async def test_s0_84_group_ends_with_its_last_row() -> None:
    """S0-84: while rows wait or run the group lives and loses none of them; then its place is free for another key."""
    pool = HeldExecutor()
    harness = Harness(executor=pool, max_groups=1, max_rows=1)
    tasks = await harness.start(requests([1, 1], tenants="a"))
    while_running_and_waiting = await harness.start(requests([1], tenants="b"))
    pool.run()
    await settle()
    while_running = await harness.start(requests([1], tenants="b"))
    pool.run()
    await settle()
    afterwards = await harness.start(requests([1], tenants="b"))
    await advance(harness.clock, 0.01)
    pool.run()
    results = await outcomes(tasks + while_running_and_waiting + while_running + afterwards)
    assert kinds(results) == ["TokenPrediction"] * 2 + ["GroupLimit"] * 2 + ["TokenPrediction"]


@in_loop
async def test_s0_85_group_key_is_no_authorization() -> None:
    """S0-85: the key separates tenants and admits any name; refusing a name is the ingress's, before `process`."""
    harness = Harness()
    cohort = requests([1, 1], tenants=["acme", "claims-to-be-acme"])
    assert kinds(await harness.outcomes(cohort)) == ["TokenPrediction"] * 2
    assert harness.model.shapes == [(1, 1), (1, 1)]


@in_loop
async def test_s0_86_configuration_is_bound_to_its_groups() -> None:
    """S0-86: settings cannot be changed in place, and another tenant's groups keep their own model and padding."""
    settings = GroupSettings(pad_id=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.pad_id = 2  # type: ignore[misc]
    ones, twos = Harness(pad_id=1), Harness(FakeModel(lambda batch: batch.input_ids), pad_id=2)
    cohort = requests([2, 1])
    first, second = await ones.outcomes(cohort), await twos.outcomes(cohort)
    assert [one.values for one in first] == [answer(one) for one in cohort]
    assert [two.values for two in second] == [two.token_ids for two in cohort]


@in_loop
async def test_s0_87_submitters_context_is_not_the_models() -> None:
    """S0-87: a context variable of the first submitter is not set inside the model call."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="empty")
    seen: list[str] = []

    def model(batch: ModelBatch) -> object:
        seen.append(variable.get())
        return doubled(batch)

    variable.set("of the first submitter")
    await Harness(model).outcomes(requests([1]))
    assert seen == ["empty"]


@pytest.mark.parametrize(
    "output",
    [
        pytest.param(lambda batch: _raise(f"cannot run {batch.input_ids}"), id="raised-text"),
        pytest.param(lambda batch: f"{batch.input_ids}", id="malformed-output"),
    ],
)
@in_loop
async def test_s0_88_log_holds_metadata_only(caplog: pytest.LogCaptureFixture, output: Any) -> None:
    """S0-88: a failed call logs revision, bucket, rows, cost and error type, and neither text nor ids."""
    caplog.set_level(logging.DEBUG)
    await Harness(FakeModel(output)).outcomes(requests([2, 2, 2]))
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("batching")]
    assert len(lines) == 1
    assert lines[0].startswith("forward failed: revision=demo-v1 bucket=16 rows=3 cost=48 error=")
    assert "1000" not in caplog.text
    assert "cannot run" not in caplog.text


def _raise(text: str) -> object:
    raise ValueError(text)


@in_loop
async def test_s0_89_histogram_counts_shapes_only() -> None:
    """S0-89: the histogram maps (rows, width) to a count, within rows and ceilings, and holds no token."""
    harness = Harness()
    cohort = requests([1, 5, 60, 64, 250] * 30, tenants="abc")
    for start in range(0, len(cohort), 30):
        tasks = await harness.start(cohort[start : start + 30])
        await advance(harness.clock, harness.clock.time() + 0.01)
        await outcomes(tasks)
    shapes = harness.groups.call_shapes
    assert sum(rows * calls for (rows, _), calls in shapes.items()) == len(cohort)
    assert all(rows * _ceiling(range(width)) <= 256 and rows <= 16 for rows, width in shapes)
    assert {type(part) for shape in shapes for part in (*shape, shapes[shape])} == {int}
    assert len(shapes) <= 16 * 16 + 4 * 64 + 1 * 256


@in_loop
async def test_s0_90_compatibility_settings_are_part_of_the_key() -> None:
    """S0-90: rows whose vocabulary, head or backend differ have other batch groups and never share a forward."""
    forward = FakeForward()
    batcher: Batcher[int, int] = Batcher(forward, limits=batch_limits(), queue_limits=queue_limits())
    batch = rows([1] * 4)
    keys = [GroupKey("a|head=label", "v", 0), GroupKey("a|head=token", "v", 0)] * 2
    for row, key in zip(batch, keys, strict=True):
        row.key = key
    await outcomes(batcher.submit(batch))
    assert sorted(forward.payloads) == [[0, 2], [1, 3]]
