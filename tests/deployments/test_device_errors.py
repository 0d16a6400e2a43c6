"""What torch raises, by meaning."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from batching.errors import DeviceLost, OutOfMemory
from deployments.device_errors import guarded


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        pytest.param(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB"), OutOfMemory, id="cuda"),
        pytest.param(MemoryError(), OutOfMemory, id="python"),
        pytest.param(
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
            OutOfMemory,
            id="cpu",
        ),
        pytest.param(torch.AcceleratorError("CUDA error: device-side assert triggered"), DeviceLost, id="accelerator"),
        pytest.param(RuntimeError("CUDA error: an illegal memory access was encountered"), DeviceLost, id="cuda text"),
        pytest.param(RuntimeError("shapes do not match"), RuntimeError, id="anything else of torch"),
        pytest.param(IndexError("index 9"), IndexError, id="anything else"),
    ],
)
def test_errors_of_a_device(error: Exception, expected: type[Exception]) -> None:
    """Out of memory names the longest row; a lost device says when to come back; others stay as they are."""

    def forward(rows: Sequence[NDArray[np.int32]]) -> None:
        raise error

    with pytest.raises(expected) as caught:
        guarded(forward)([np.zeros(3, dtype=np.int32), np.zeros(7, dtype=np.int32)])
    assert type(caught.value) is expected
    if isinstance(caught.value, OutOfMemory):
        assert caught.value.num_tokens == 7


def test_a_real_allocation_that_fails() -> None:
    """What PyTorch really raises on a CPU for an absurd size is understood."""

    def forward(rows: Sequence[NDArray[np.int32]]) -> torch.Tensor:
        return torch.empty(2**60, dtype=torch.uint8)

    with pytest.raises(OutOfMemory):
        guarded(forward)([np.zeros(1, dtype=np.int32)])


def test_results_pass_through() -> None:
    """Nothing is changed when nothing is wrong."""
    assert guarded(len)([np.zeros(1, dtype=np.int32)]) == 1
