"""Failures that others reported of their servers, as far as one replica in this process can show them."""

import asyncio
import gc
import random
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batching.buckets import Buckets
from batching.errors import QueueFull, RequestTooLarge
from batching.row import Row
from deployments.device_errors import guarded
from deployments.dispatch import BucketPart, Caller, call_bucket
from deployments.model import LoadedModel, ModelSpec, load_model
from deployments.revisions import LiveRevision
from deployments.tokenization import InputEncoder
from deployments.wire import InferCall, InferReply
from tests.deployments.fakes import (
    VOCAB_SIZE,
    FakeModel,
    FakeReplica,
    current_loop,
    in_skewed_loop,
    infer_call,
    replica,
    replica_context,
    revision_info,
    rows_of_lengths,
    small_tokenizer,
)
from tests.fakes import settle

Checkpoints = Callable[..., Path]


@pytest.fixture(autouse=True)
def _inside_a_replica() -> Iterator[None]:
    with replica_context():
        yield


def sizes(model: FakeModel) -> list[int]:
    """Rows of each forward."""
    return [len(forward) for forward in model.forwards]


async def busy(target: FakeReplica, model: FakeModel) -> "asyncio.Task[InferReply]":
    """Make a forward of one row run until the model is released."""
    model.hold()
    running = asyncio.create_task(target.infer(infer_call([[9]], tenant="first")))
    await model.started()
    return running


# ---- limits ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder() -> InputEncoder:
    """Not used by dispatch, but part of a snapshot."""
    return InputEncoder(small_tokenizer(), max_tokens=256, vocab_size=VOCAB_SIZE)


def dispatcher(target: FakeReplica, encoder: InputEncoder) -> LiveRevision:
    """What one ingress replica holds: its own snapshot of the revision, and a handle of its own."""
    return LiveRevision(
        application="minilm-v1",
        fingerprint="f",
        info=revision_info(ceilings=(256,)),
        encoder=encoder,
        buckets=Buckets((256,)),
        handles=(target,),
    )


@pytest.mark.parametrize("num_dispatchers", [1, 2, 3])
@in_skewed_loop
async def test_bl108_limit_does_not_grow_with_the_ingresses(num_dispatchers: int, encoder: InputEncoder) -> None:
    """BL-108, BL-103: several proxies multiplied the queue limit; here 8 rows wait whoever sent them, and the others
    have their refusal while the model stands still."""
    model = FakeModel()
    target = replica(model)
    await target.reconfigure({"max_queued_rows": 8})
    running = await busy(target, model)
    senders = [dispatcher(target, encoder) for _ in range(num_dispatchers)]
    part = BucketPart(bucket=0, indices=(0,), token_ids=(np.array([5, 6], dtype=np.int32),))
    caller = Caller(tenant="acme", batch_group="acme")
    deadline = asyncio.get_running_loop().time() + 60
    calls = [
        asyncio.create_task(call_bucket(senders[number % num_dispatchers], part, caller, deadline=deadline))
        for number in range(60)
    ]
    await settle()
    refused = [call.exception() for call in calls if call.done()]
    assert (len(refused), {type(error) for error in refused}) == (52, {QueueFull})
    assert (await target.stats()).queued_rows == 8
    model.release()
    await asyncio.gather(running, *calls, return_exceptions=True)
    assert sizes(model) == [1, 8]


@pytest.mark.parametrize(
    ("user_config", "expected"),
    [
        pytest.param({}, None, id="defaults"),
        pytest.param({"token_budget": 256}, None, id="budget of one row"),
        pytest.param({"max_rows": 1}, None, id="one row"),
        pytest.param({"max_forward_s": 1e-9}, None, id="no forward is that short"),
        pytest.param({"prepare_ahead_s": 1.0}, None, id="chosen long before"),
        pytest.param({"max_wait_s": 10.0}, None, id="held back"),
        pytest.param({"max_queued_tokens": 256}, None, id="room for one row"),
        pytest.param({"max_queued_tokens": 255}, RequestTooLarge, id="no room in tokens"),
        pytest.param({"max_backlog_s": 1e-9}, RequestTooLarge, id="no room in seconds"),
    ],
)
@in_skewed_loop
async def test_bl105_longest_row_runs_or_is_refused(user_config: dict[str, Any], expected: type | None) -> None:
    """BL-105: a limit below one long row made a scheduler spin; here no setting that is accepted leaves it waiting."""
    target = replica(FakeModel())
    await target.reconfigure(user_config)
    call = asyncio.create_task(target.infer(infer_call([[1] * 256])))
    await settle()
    await current_loop().skip(11)
    reply = await call
    assert (type(reply.refusal) if reply.refusal else None, reply.errors) == (expected, {})


@in_skewed_loop
async def test_bl103_one_stalled_forward_does_not_close_the_door() -> None:
    """BL-103: refusals must follow the load; a minute in which the machine stood still is over once it is over."""
    model = FakeModel()
    target = replica(model)
    running = await busy(target, model)
    await current_loop().skip(60)
    model.release()
    await running
    assert (await target.infer(infer_call([[1]] * 100))).refusal is None


@pytest.mark.parametrize(
    ("num_calls", "max_rows", "expected"),
    [
        pytest.param(140, 256, [1, 140], id="the reported calls"),
        pytest.param(256, 256, [1, 256], id="a full batch"),
        pytest.param(257, 256, [1, 256, 1], id="one more"),
        pytest.param(1300, 1000, [1, 1000, 300], id="the largest max_rows"),
    ],
)
@in_skewed_loop
async def test_bl113_batches_reach_their_size(num_calls: int, max_rows: int, expected: list[int]) -> None:
    """BL-113, BL-112: batches stopped at a concurrency cap or were cut too early; here calls of one row that come one
    by one fill a batch."""
    model = FakeModel()
    target = replica(model)
    await target.reconfigure({"max_rows": max_rows})
    calls = [await busy(target, model)]
    for number in range(num_calls):
        calls.append(asyncio.create_task(target.infer(infer_call([[number % VOCAB_SIZE]], timeout_s=1e9))))
        await asyncio.sleep(0)
    await settle()
    model.release()
    await asyncio.gather(*calls)
    assert sizes(model) == expected


@in_skewed_loop
async def test_bl136_each_call_is_answered_with_its_own_rows() -> None:
    """BL-136: ten merged requests were all answered at the end; here one after each forward."""
    model = FakeModel()
    target = replica(model)
    await target.reconfigure({"max_rows": 60})
    running = await busy(target, model)
    calls = [asyncio.create_task(target.infer(infer_call([[number]] * 60))) for number in range(10)]
    num_forwards_at_end: list[int] = []
    for call in calls:
        call.add_done_callback(lambda _: num_forwards_at_end.append(len(model.forwards)))
    await settle()
    model.release()
    await asyncio.gather(running, *calls)
    assert sizes(model) == [1, *[60] * 10]
    # The next forward may have begun before the loop hears of the one that ended.
    assert all(seen - number in {2, 3} for number, seen in enumerate(num_forwards_at_end))


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ceilings", "expected"),
    [
        pytest.param((), [1, 25], id="ragged: the sum"),
        pytest.param((64, 2048), [1, 24, 1], id="padded: rectangles by ceiling"),
        pytest.param((2048,), [1, *[1] * 25], id="padded in one size: alone"),
    ],
)
@in_skewed_loop
async def test_bl143_cost_is_what_is_allocated(ceilings: tuple[int, ...], expected: list[int]) -> None:
    """BL-143: one long text among 24 short ones exploded memory; here no forward allocates more than the budget."""
    model = FakeModel(layout="padded" if ceilings else "ragged")
    target = replica(model, max_tokens=2048, ceilings=ceilings)
    await target.reconfigure({"token_budget": 2048})
    running = await busy(target, model)
    call = asyncio.create_task(target.infer(infer_call(rows_of_lengths(*[20] * 24, 1383))))
    await settle()
    model.release()
    await asyncio.gather(running, call)
    assert sorted(sizes(model)) == sorted(expected)
    allocated = [
        len(forward) * max(map(len, forward)) if ceilings else sum(map(len, forward)) for forward in model.forwards
    ]
    assert max(allocated) <= 2048


def alive(*kinds: type) -> Counter[str]:
    """Objects of these kinds that anything refers to."""
    gc.collect()
    # By the object's own type: `isinstance` asks lazy modules for their class, and they import themselves.
    return Counter(kind.__name__ for kind in map(type, gc.get_objects()) if kind in kinds)


class Activations:
    """What a forward holds in its local variables."""


class Starved(FakeModel):
    """A model whose device holds two rows, and which notes how much of earlier forwards is left when one begins."""

    def __init__(self) -> None:
        super().__init__()
        self.left_over: list[int] = []
        self.forward = guarded(self._forward)  # type: ignore[assignment,method-assign]
        self._all: weakref.WeakSet[Activations] = weakref.WeakSet()

    def _forward(self, rows: Sequence[Any]) -> Any:
        self.left_over.append(len(self._all))
        activations = Activations()
        self._all.add(activations)
        if len(rows) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return FakeModel.forward(self, rows)


@in_skewed_loop
async def test_bl141_retries_find_the_memory_of_the_failed_forward_free() -> None:
    """BL-141: one large prompt's OOM took the server down; here smaller batches run once the failed one is gone."""
    model = Starved()
    reply = await replica(model).infer(infer_call([[1]] * 16))
    assert not reply.errors
    assert model.left_over == [0] * 15


@in_skewed_loop
async def test_bl144_nothing_of_a_request_outlives_its_reply() -> None:
    """BL-144: the last user's tensors stayed in a batch table until overwritten; here an idle replica holds no rows."""
    before = alive(Row, InferCall, InferReply)
    target = replica(FakeModel())
    await target.infer(infer_call(rows_of_lengths(5, 7)))
    await settle()
    assert alive(Row, InferCall, InferReply) == before


@in_skewed_loop
async def test_bl144_nothing_of_a_caller_that_left_stays() -> None:
    """BL-144: rows that were taken back while they waited are gone at once, although the model is still at work."""
    model = FakeModel()
    target = replica(model)
    running = await busy(target, model)
    before = alive(Row)
    leaving = asyncio.create_task(target.infer(infer_call([[1]] * 50)))
    await settle()
    assert alive(Row) - before == Counter(Row=50)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    del leaving  # a task keeps the frames that its cancellation went through
    await settle()
    assert alive(Row) == before
    model.release()
    await running


def random_rows(draw: random.Random, lengths: Sequence[int]) -> list[list[int]]:
    """Rows of these lengths, of ids that every tiny checkpoint has."""
    return [[draw.randint(6, 119) for _ in range(length)] for length in lengths]


class RealModel(FakeModel):
    """A model whose forward is really run."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(layout=loaded.info.layout)
        self.info = replace(self.info, dimension=loaded.info.dimension, vocab_size=loaded.info.vocab_size)
        self.forward = loaded.forward  # type: ignore[assignment,method-assign]


@pytest.mark.parametrize("layout", ["ragged", "padded"])
@in_skewed_loop
async def test_bl137_memory_is_flat_over_random_lengths(layout: Any, checkpoint: Checkpoints) -> None:
    """BL-137: memory climbed over hundreds of calls of varied lengths; here a warm replica with a real model keeps
    neither a tensor nor a row, and next to no memory."""
    loaded = load_model(ModelSpec(threads=1, model=str(checkpoint("bert")), layout=layout))
    target = replica(RealModel(loaded), max_tokens=48, ceilings=(16, 48) if layout == "padded" else ())
    await target.reconfigure({"token_budget": 192})
    draw = random.Random(7)

    async def run(num_requests: int) -> None:
        for _ in range(num_requests):
            lengths = [draw.randint(1, 48) for _ in range(draw.randint(1, 8))]
            reply = await target.infer(infer_call(random_rows(draw, lengths)))
            assert not reply.errors

    await target.infer(infer_call(random_rows(draw, [48] * 8)))
    await settle()
    rows_of_others = alive(Row)["Row"]  # of replicas of earlier tests that are not collected yet
    tracemalloc.start()
    try:
        await run(20)
        tensors, traced = alive(torch.Tensor), tracemalloc.get_traced_memory()[0]
        await run(80)
        await settle()
        now = alive(torch.Tensor, Row)
        traced_since = tracemalloc.get_traced_memory()[0] - traced
    finally:
        tracemalloc.stop()
    assert now.pop("Row", 0) <= rows_of_others
    assert now == tensors
    assert traced_since < 100_000, "80 calls of five rows would leave more than that behind"
