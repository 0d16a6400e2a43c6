"""Loading for a replica: which threads step back on a CPU, and that the rest of the process does not."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from deployments.replica_model import ReplicaSettings, load
from deployments.wire import BucketInfo
from tests.deployments.conftest import Checkpoints


def _settings(model: str, *, niceness: int) -> ReplicaSettings:
    return ReplicaSettings(
        revision="tiny",
        model=model,
        task="embed",
        layout="ragged",
        dtype="float32",
        device="cpu",
        threads=1,
        niceness=niceness,
        max_tokens=16,
        ceilings=(),
        buckets=(BucketInfo(deployment="tokens-16", max_tokens=16),),
    )


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of single threads are Linux's")
def test_forwards_step_back_for_the_rest_of_the_process(checkpoint: Checkpoints) -> None:
    """The thread that loaded the model, which runs its forwards, is nicer; the thread of the event loop is not."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(load, _settings(str(checkpoint("bert")), niceness=7)).result()
        loader = pool.submit(threading.get_native_id).result()
        assert os.getpriority(os.PRIO_PROCESS, loader) == 7
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
