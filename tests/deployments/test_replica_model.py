"""Loading for a replica: which threads step back on a CPU, and that the rest of the process does not."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from deployments.replica_model import ReplicaSettings, load
from deployments.wire import BucketInfo
from tests.deployments.conftest import Checkpoints


def _settings(model: str, *, yield_cpu: bool) -> ReplicaSettings:
    return ReplicaSettings(
        revision="tiny",
        model=model,
        task="embed",
        layout="ragged",
        dtype="float32",
        device="cpu",
        threads=1,
        yield_cpu=yield_cpu,
        max_tokens=16,
        ceilings=(),
        buckets=(BucketInfo(deployment="tokens-16", max_tokens=16),),
    )


@pytest.mark.skipif(sys.platform != "linux", reason="policies of single threads are Linux's")
@pytest.mark.parametrize(("yield_cpu", "expected"), [(True, os.SCHED_IDLE), (False, os.SCHED_OTHER)])
def test_forwards_step_back_for_the_rest_of_the_process(
    yield_cpu: bool, expected: int, checkpoint: Checkpoints
) -> None:
    """The thread that loaded the model, which runs its forwards, steps back; the thread of the event loop does not."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(load, _settings(str(checkpoint("bert")), yield_cpu=yield_cpu)).result()
        loader = pool.submit(threading.get_native_id).result()
        assert os.sched_getscheduler(loader) == expected
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
