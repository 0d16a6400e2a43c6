"""Seed 0, the demo and what the recipe does not claim (S0-140 to S0-144; S0-143 needs a GPU and is shown there)."""

import ast
import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from batching import demo
from batching.batcher import Batcher
from batching.buckets import Buckets
from tests.fakes import FakeForward, batch_limits, in_loop, queue_limits, rows, settle

ROOT = Path(__file__).parents[3]
CEILINGS = Buckets((16, 64, 256))


@pytest.fixture(scope="module")
def printed() -> str:
    """What the documented command prints."""
    command = [sys.executable, "-m", "batching.demo", "--requests", "32"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout


def _shapes(printed: str) -> list[tuple[int, int, int]]:
    return [
        (int(calls), int(rows), int(width))
        for calls, rows, width in re.findall(r"(?m)^ *(\d+) +(\d+) +(\d+)$", printed)
    ]


def test_s0_140_cohort_is_completed(printed: str) -> None:
    """S0-140, S0-123, ACC-05: 32 of 32 are completed in a time that includes the drain, and the rows add up to 32."""
    assert re.search(r"(?m)^completed 32 of 32 in \d+\.\d+ s, drain included$", printed)
    assert sum(calls * rows for calls, rows, _ in _shapes(printed)) == 32


def test_s0_140_every_call_fits(printed: str) -> None:
    """S0-140, ACC-05: every observed shape is inside count and budget."""
    shapes = _shapes(printed)
    assert shapes
    assert all(rows <= 16 and rows * CEILINGS.ceiling_of(width) <= 256 for _, rows, width in shapes)


def test_s0_141_model_is_labelled_and_nothing_is_claimed(printed: str) -> None:
    """S0-141: the output calls the model untrained and holds no claim of speed."""
    assert "untrained" in printed
    assert not re.search(r"(?i)speed|faster|quicker|times|throughput|tokens/s|\dx", printed)


def test_s0_142_policy_needs_no_framework() -> None:
    """S0-142: the whole package loads without a web, serving or tensor framework."""
    probe = (
        "import pkgutil, importlib, sys, batching\n"
        "[importlib.import_module(m.name) for m in pkgutil.iter_modules(batching.__path__, 'batching.')]\n"
        "print(sorted({m.partition('.')[0] for m in sys.modules} "
        "& {'ray', 'torch', 'transformers', 'starlette', 'pydantic', 'fastapi'}))"
    )
    command = [sys.executable, "-c", probe]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout == "[]\n"


@in_loop
async def test_s0_144_rows_are_not_tasks() -> None:
    """S0-144: a thousand waiting rows make no more tasks than forwards may run."""
    forward = FakeForward(held=True)
    batcher: Batcher[int, int] = Batcher(
        forward, limits=batch_limits(max_concurrent_forwards=3), queue_limits=queue_limits()
    )
    own = len(asyncio.all_tasks())
    batcher.submit(rows([1] * 1000, groups="abcdef"))
    await settle()
    assert len(asyncio.all_tasks()) - own == 3
    forward.release_all()
    await batcher.close()


def test_s0_144_tasks_are_made_in_one_place() -> None:
    """S0-144: the package creates tasks where forwards start; the demo's `gather` is over its finite cohort."""
    makers = [
        (path.name, node.func.attr)
        for path in sorted((ROOT / "batching").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in {"create_task", "ensure_future", "gather", "TaskGroup"}
    ]
    assert makers == [("batcher.py", "create_task"), ("demo.py", "gather")]


@pytest.mark.parametrize("num_requests", ["0", "2049", "-1"])
def test_s0_144_cohort_is_finite(num_requests: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S0-144: the demo refuses a cohort without a bound."""
    monkeypatch.setattr(sys, "argv", ["demo", "--requests", num_requests])
    with pytest.raises(SystemExit) as caught:
        demo.main()
    assert caught.value.code == 2


@in_loop
async def test_s0_144_producer_is_bounded() -> None:
    """S0-144: a cohort above the waiting room of its groups is completed, because its producer is bounded below."""
    assert await demo.run(1000) == 1000
    assert demo.MAX_IN_FLIGHT < 64
