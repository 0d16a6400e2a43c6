"""What a replica is built from, and the part of a model that it uses. Imports no torch: the ingress reads this too."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batching.cost import Measurement
from batching.errors import OutOfMemory
from deployments.calibration import CalibrationSpec, calibrate
from deployments.settings import DEFAULT_CPU_TOKEN_BUDGET, DEFAULT_GPU_TOKEN_BUDGET, Dtype, Layout, Task
from deployments.wire import BucketInfo, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """Fixed for the life of a replica; a change restarts it. See `serve_app.config.RevisionArgs` for the meaning."""

    revision: str
    model: str
    task: Task
    layout: Layout
    dtype: Dtype
    device: str
    threads: int | None
    yield_cpu: bool
    max_tokens: int
    """The longest row of this bucket."""
    ceilings: tuple[int, ...]
    """Padding ceilings of the padded layout; empty for ragged."""
    buckets: tuple[BucketInfo, ...]
    """All buckets of the revision, this one included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowValue:
    """What one row got: `values` [width] float32 and the positions that the model processed for it."""

    values: NDArray[np.float32]
    computed_tokens: int


class ModelResult(Protocol):
    """What one forward gives."""

    @property
    def values(self) -> NDArray[np.float32]:
        """[B, width]."""

    @property
    def computed_tokens(self) -> int:
        """Positions processed for all rows, padding included."""


class Model(Protocol):
    """The part of `deployments.model.LoadedModel` that a replica uses."""

    @property
    def info(self) -> Any:
        """`deployments.model.ModelInfo`."""

    @property
    def tokenizer_json(self) -> str:
        """The tokenizer, without padding and truncation."""

    @property
    def forward(self) -> Callable[[Sequence[TokenIds]], ModelResult]:
        """Runs the model once; called from a worker thread."""

    @property
    def calibration(self) -> Sequence[Measurement]:
        """Forwards that were measured at load."""


def load(settings: ReplicaSettings) -> Model:
    """Load, check and calibrate the model; call it in the thread that will run it. Raises what `load_model` raises."""
    # OpenMP reads this once, when torch is imported. Its workers wait for each other dozens of times in a forward; by
    # default they spin, which takes the CPU from the other buckets, the ingress and Ray's proxy on the same machine:
    # 5,000 tokens/s of two buckets on two CPUs became 2,000. Sleeping costs nothing measurable alone.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Here and not above: the ingress and the build task import this module and must not pay for torch.
    from deployments.model import ModelLoadError, ModelSpec, load_model, resolve_device

    if settings.yield_cpu and resolve_device(settings.device) == "cpu":
        _step_back()
    model = load_model(
        ModelSpec(
            model=settings.model,
            task=settings.task,
            layout=settings.layout,
            dtype=settings.dtype,
            device=settings.device,
            threads=settings.threads,
            max_tokens=settings.buckets[-1].max_tokens,
        )
    )
    try:
        measured = calibrate(
            model.forward,
            CalibrationSpec(
                max_tokens=settings.max_tokens,
                token_budget=max(default_token_budget(model.info.device), settings.max_tokens),
                vocab_size=model.info.vocab_size,
                is_padded=settings.layout == "padded",
            ),
        )
    except OutOfMemory as error:
        raise ModelLoadError(
            f"a batch of rows of {settings.max_tokens} tokens does not fit into the memory of {model.info.device}: "
            "serve shorter rows (buckets), or give the replica more memory"
        ) from error
    return replace(model, calibration=measured)


def _step_back() -> None:
    """Let everything else on the machine run before this thread and those that it starts, OpenMP's workers.

    A forward keeps its CPUs busy for a long time; gateway, proxy and this replica's event loop need one for a moment,
    and then at once. Without it they queued behind the forwards in an overload, and refusals took up to seconds.
    """
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # 0 is this thread, not the process


def default_token_budget(device: str) -> int:
    """The budget of one forward where the settings name none."""
    return DEFAULT_GPU_TOKEN_BUDGET if device.startswith("cuda") else DEFAULT_CPU_TOKEN_BUDGET
