"""What a device raises, by meaning: out of memory can be helped with smaller batches, a lost device cannot be helped.

Torch gives both as RuntimeErrors, on a CPU and in older releases told apart by their text only.
"""

import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from batching.errors import DeviceLost, OutOfMemory, TokenServeError
from deployments.wire import TokenIds

REPLACED_AFTER_S = 30.0
"""About how long until a replica with a lost device is replaced."""

_OUT_OF_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "not enough memory")
_LOST_TEXTS = ("cuda error", "device-side assert", "ecc error")

Result = TypeVar("Result")
Rows = Sequence[TokenIds]


def guarded(forward: Callable[[Rows], Result]) -> Callable[[Rows], Result]:
    """`forward`, raising OutOfMemory and DeviceLost where the device means that; everything else as it was."""

    def run(rows: Rows) -> Result:
        try:
            return forward(rows)
        except (MemoryError, RuntimeError) as error:
            meaning = meaning_of(error, longest=max(map(len, rows), default=0))
            if isinstance(meaning, OutOfMemory):
                # The smaller forwards that follow must not run beside what the failed one still holds: its frames
                # keep activations alive, and the allocator keeps fragments.
                traceback.clear_frames(error.__traceback__)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
            if meaning is not None:
                raise meaning from error
            raise

    return run


def meaning_of(error: Exception, *, longest: int) -> TokenServeError | None:
    """OutOfMemory, DeviceLost, or None for an error that says nothing about the device."""
    text = str(error).lower()
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(part in text for part in _OUT_OF_MEMORY_TEXTS):
        return OutOfMemory(longest)
    if isinstance(error, torch.AcceleratorError) or any(part in text for part in _LOST_TEXTS):
        return DeviceLost(REPLACED_AFTER_S)
    return None
