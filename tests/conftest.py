"""One Hypothesis profile for all tests (no deadline, the same examples every run), and nothing left open at the end."""

import asyncio
import contextlib
import gc
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("shared-machine", deadline=None, max_examples=60, derandomize=True, database=None)
settings.load_profile("shared-machine")


@pytest.fixture(scope="session", autouse=True)
def _close_the_loop_that_ray_opens() -> Iterator[None]:
    """Ray's batch queues ask for an event loop when they are collected, and open one if there is none."""
    yield
    gc.collect()
    with contextlib.suppress(RuntimeError):
        asyncio.get_event_loop_policy().get_event_loop().close()
