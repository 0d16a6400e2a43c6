"""What crosses processes arrives as it left."""

import pickle

import numpy as np
import pytest

from batching.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    DeviceLost,
    Draining,
    ForwardFailed,
    InputTooLong,
    OutOfMemory,
    QueueFull,
    TenantOverShare,
    TokenIdOutOfRange,
    TokenServeError,
    WaitTooLong,
)
from batching.padding import MalformedOutput
from deployments.wire import InferReply, TenantCounts
from tests.deployments.fakes import infer_call, replica_stats, revision_info

ERRORS = [
    InputTooLong("inputs", 300, 256),
    TokenIdOutOfRange("inputs", 30522),
    QueueFull(8, 1.5),
    DeadlineExceeded(2.0),
    DeadlineUnreachable(0.5, 2.0),
    WaitTooLong(0.5, 2.0, 3.0),
    TenantOverShare(3.0),
    OutOfMemory(600),
    DeviceLost(30.0),
    Draining(),
    ForwardFailed("ValueError"),
    MalformedOutput("a value is not finite"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_of_rows_keep_their_facts(error: TokenServeError) -> None:
    """An error inside a reply has the same class, text and attributes on the other side."""
    reply = InferReply(values=np.zeros((1, 4), dtype=np.float32), errors={0: error})
    arrived = pickle.loads(pickle.dumps(reply)).errors[0]
    assert type(arrived) is type(error)
    assert (arrived.detail, arrived.args, vars(arrived)) == (error.detail, error.args, vars(error))


def test_call_and_reply_keep_their_arrays() -> None:
    """Arrays keep their dtype, shape and content."""
    call = infer_call([[1, 2, 3], [2**31 - 1]])
    arrived = pickle.loads(pickle.dumps(call))
    assert (arrived.token_ids.dtype, arrived.lengths.dtype) == (np.int32, np.int32)
    assert arrived.token_ids.tolist() == [1, 2, 3, 2**31 - 1]
    assert arrived.lengths.tolist() == [3, 1]


def test_values_compare_equal_after_the_trip() -> None:
    """Descriptions and counters are plain values."""
    stats = replica_stats(tenants={"acme": TenantCounts(rows=1)})
    assert pickle.loads(pickle.dumps((revision_info(), stats))) == (revision_info(), stats)


def test_longest_row_is_that_of_the_last_bucket() -> None:
    """Buckets are in order of their ceilings."""
    assert revision_info(ceilings=(16, 64, 256)).max_tokens == 256
