"""The recipe's groups beyond its statements, which `contracts/seed0` holds."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from batching.buckets import Buckets
from batching.groups import GroupSettings, inference_groups
from tests.fakes import FakeModel, Harness, in_loop, requests


@in_loop
async def test_settings_have_defaults() -> None:
    """Groups open with the recipe's settings when none are given."""
    model = FakeModel()
    with ThreadPoolExecutor(max_workers=1) as pool:
        async with inference_groups(model, executor=pool) as groups:
            await groups.process(requests([3])[0])
    assert (model.shapes, groups.call_shapes) == ([(1, 3)], {(1, 3): 1})


@pytest.mark.parametrize(
    ("ceilings", "shapes"),
    [
        pytest.param((256,), [(1, 5), (1, 9), (1, 20)], id="one-bucket"),
        pytest.param((16, 64, 256), [(1, 20), (2, 9)], id="recipe"),
        pytest.param((8, 16, 64), [(1, 5), (1, 9), (1, 20)], id="fine"),
    ],
)
@in_loop
async def test_buckets_decide_who_shares(ceilings: tuple[int, ...], shapes: list[tuple[int, int]]) -> None:
    """Rows of one bucket share a call as far as the ceilings fit into the budget."""
    harness = Harness(ceilings=ceilings)
    await harness.outcomes(requests([5, 9, 20]))
    assert sorted(harness.model.shapes) == sorted(shapes)


def test_limits_follow_from_the_settings() -> None:
    """What governs calls and waiting is derived, so that the two cannot disagree."""
    settings = GroupSettings(max_rows=5, max_concurrent_calls=2, max_wait_s=0.5)
    limits = settings.batch_limits
    assert (limits.max_rows, limits.max_concurrent_forwards, limits.max_concurrent_per_group) == (5, 2, 1)
    assert (limits.max_wait_s, limits.token_budget) == (0.5, 256)
    assert settings.queue_limits.max_queued_cost == 64 * 64 * Buckets(settings.ceilings).limit
