"""Attention over rows laid end to end, for every model that asks transformers for its attention function.

`register` makes the name `ragged` known to transformers. A model that uses it runs on input [1, T]: attention gets the
boundaries of the rows as one `PackedRows`, handed to the model's forward under the keyword `packed_rows`, and no mask
is ever built. What attention does not understand (a mask, a position bias, sinks) is refused, never ignored.

Letters: B rows, T tokens in all, n rows of one length, S that length, H query heads, G key/value heads, D head size.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from batching.packing import PackedBatch, check_cu_seqlens

ATTENTION_NAME = "ragged"

Backend = Literal["grouped_sdpa", "varlen_attn", "flash_attn"]

# What the flash kernels accept: FlashAttention-2 states multiples of 8 up to 256, compute capability 8.0 and above.
_HEAD_SIZE_STEP = 8
_MAX_HEAD_SIZE = 256
_MIN_CUDA_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Adjacent rows of one length: `num_rows` rows of `length` tokens from token `start` on."""

    start: int
    num_rows: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.num_rows * self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """What one layer asks of attention: who sees whom, and how scores are made.

    `window` counts tokens: a key is visible when its distance to the query is smaller (None: any distance).
    """

    is_causal: bool
    window: int | None
    scaling: float | None
    softcap: float | None


class PackedRows:
    """The row boundaries of one forward, and what attention derives from them once instead of once per layer.

    Rows of equal length that stand next to each other form a run and share one call, so the caller that sorts its rows
    by length gets one call per distinct length, on plain slices, without copying a token:

        lengths    2 2 2 5 5 9        cu_seqlens  0 2 4 6 11 16 25
        runs       [0, 6) 3x2   [6, 16) 2x5   [16, 25) 1x9

    `num_calls` counts the attention calls that used this object, so that a load-time check can tell whether every layer
    did. One object serves one forward, on one thread.
    """

    def __init__(self, batch: PackedBatch, *, backend: Backend, device: torch.device) -> None:
        """Take the boundaries of `batch`; raise ValueError when they do not describe its tokens."""
        check_cu_seqlens(batch.cu_seqlens, num_tokens=batch.num_tokens)
        self.backend = backend
        self.num_tokens = batch.num_tokens
        self.max_seqlen = batch.max_seqlen
        self.cu_seqlens = torch.from_numpy(batch.cu_seqlens).to(device)  # [B + 1] int32
        self.runs = _runs(np.diff(batch.cu_seqlens))
        self.num_calls = 0
        self._masks: dict[tuple[int, int, bool], torch.Tensor] = {}

    def window_mask(self, length: int, rule: _Rule) -> torch.Tensor | None:
        """Return which keys each query of a row sees, [S, S] bool, or None when the window hides nothing."""
        if rule.window is None or rule.window >= length:
            return None
        key = (length, rule.window, rule.is_causal)
        if key not in self._masks:
            positions = torch.arange(length, device=self.cu_seqlens.device)
            distance = positions[:, None] - positions[None, :]  # [S, S], positive towards the past
            visible = distance.abs() < rule.window
            self._masks[key] = visible & (distance >= 0) if rule.is_causal else visible
        return self._masks[key]


def _runs(lengths: NDArray[np.int32]) -> tuple[_Run, ...]:
    """Cut row lengths [B] wherever two neighbours differ."""
    cuts = np.flatnonzero(np.diff(lengths)) + 1
    runs = []
    start = 0
    for part in np.split(lengths, cuts):
        runs.append(_Run(start=start, num_rows=len(part), length=int(part[0])))
        start = runs[-1].end
    return tuple(runs)


def choose_backend(device_type: str, dtype: torch.dtype, *, head_size: int, kernels: Collection[Backend]) -> Backend:
    """Choose how rows attend, from the kernels this process can run (see `available_kernels`).

    Flash kernels know 16-bit types on CUDA only; everything else, float32 above all, runs grouped SDPA.
    """
    if device_type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "grouped_sdpa"
    if head_size % _HEAD_SIZE_STEP or head_size > _MAX_HEAD_SIZE:
        return "grouped_sdpa"
    if "varlen_attn" in kernels:
        return "varlen_attn"
    return "flash_attn" if "flash_attn" in kernels else "grouped_sdpa"


def available_kernels() -> frozenset[Backend]:
    """Return the variable-length kernels that are installed and fit this process's CUDA device (none without CUDA)."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < _MIN_CUDA_CAPABILITY:
        return frozenset()
    kernels: set[Backend] = set()
    if importlib.util.find_spec("torch.nn.attention.varlen") is not None:
        varlen = importlib.import_module("torch.nn.attention.varlen")
        # Earlier releases of torch have no window or no grouped heads here; such a one is not used at all.
        if {"scale", "window_size", "enable_gqa"} <= set(inspect.signature(varlen.varlen_attn).parameters):
            kernels.add("varlen_attn")
    if importlib.util.find_spec("flash_attn") is not None:
        kernels.add("flash_attn")
    return frozenset(kernels)


def register() -> None:
    """Make `ragged` known to transformers, in this process. Calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, ragged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, no_mask)


def no_mask(*_arguments: Any, **_options: Any) -> None:
    """Build no mask: the boundaries of the rows say everything. (The signature is transformers'.)"""


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Let each token attend within its own row. (Signature and free keywords are transformers' interface.)

    `query` [1, H, T, D], `key` and `value` [1, G, T, D]; returns [1, T, H, D] and no attention weights. Inference only:
    dropout is not applied. Raises ValueError when `packed_rows` is absent or does not describe T tokens, and for
    options whose effect this function would lose.
    """
    packed_rows = _packed_rows(options, num_tokens=query.shape[2])
    if attention_mask is not None or query.shape[0] != 1:
        raise ValueError("ragged attention takes one packed row block [1, T] and no attention mask")
    for name in ("position_bias", "s_aux"):
        if options.get(name) is not None:
            raise ValueError(f"ragged attention does not support {name}; set layout: padded")
    packed_rows.num_calls += 1
    rule = _rule(module, options)
    tensors = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))  # [T, H or G, D] each
    if packed_rows.backend == "flash_attn":
        attended = _flash_attn(*tensors, packed_rows, rule)
    elif packed_rows.backend == "varlen_attn" and rule.softcap is None:
        attended = _varlen_attn(*tensors, packed_rows, rule)
    else:
        attended = _grouped(*tensors, packed_rows, rule)
    return attended[None], None  # [1, T, H, D]


def _packed_rows(options: dict[str, Any], *, num_tokens: int) -> PackedRows:
    packed_rows = options.get("packed_rows")
    if not isinstance(packed_rows, PackedRows):
        raise ValueError("ragged attention was called without packed_rows: the model does not pass keywords on")
    if packed_rows.num_tokens != num_tokens:
        raise ValueError(f"packed_rows describes {packed_rows.num_tokens} tokens, attention got {num_tokens}")
    return packed_rows


def _rule(module: torch.nn.Module, options: dict[str, Any]) -> _Rule:
    """Read a layer's rule; `is_causal` as an argument wins over the module's own, as in transformers' SDPA."""
    is_causal = options.get("is_causal")
    return _Rule(
        is_causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
        window=options.get("sliding_window"),
        scaling=options.get("scaling"),
        softcap=options.get("softcap"),
    )


def _grouped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed_rows: PackedRows, rule: _Rule
) -> torch.Tensor:
    """Attend run by run, on views of the packed tensors; [T, H, D]."""
    attend = _sdpa if rule.softcap is None else _softcapped
    parts = []
    for run in packed_rows.runs:
        rows = [  # [n, H or G, S, D] each
            tensor[run.start : run.end].view(run.num_rows, run.length, *tensor.shape[1:]).transpose(1, 2)
            for tensor in (query, key, value)
        ]
        attended = attend(rows[0], rows[1], rows[2], packed_rows.window_mask(run.length, rule), rule)  # [n, H, S, D]
        parts.append(attended.transpose(1, 2).flatten(0, 1))  # [n * S, H, D]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, rule: _Rule
) -> torch.Tensor:
    attended: torch.Tensor = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=rule.is_causal and mask is None,
        scale=rule.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended


def _softcapped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, rule: _Rule
) -> torch.Tensor:
    """Attend with scores squeezed into (-softcap, softcap), which SDPA cannot do (Gemma 2)."""
    assert rule.softcap is not None, "only a layer with a softcap comes here"
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)  # [n, H, S, D]
    scaling = query.shape[-1] ** -0.5 if rule.scaling is None else rule.scaling
    scores = torch.tanh(query @ key.transpose(-1, -2) * scaling / rule.softcap) * rule.softcap  # [n, H, S, S]
    if mask is None and rule.is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype) @ value  # [n, H, S, D]


def _kernel_window(rule: _Rule) -> tuple[int, int]:
    """Say a rule as the flash kernels do: how far a query sees left and right, -1 for without end.

    Ours is the first distance that is hidden, theirs the last one that is seen.
    """
    left = -1 if rule.window is None else rule.window - 1
    return left, 0 if rule.is_causal else left


def _varlen_attn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed_rows: PackedRows, rule: _Rule
) -> torch.Tensor:
    """Call torch's kernel, which says `cu_seq_q` and `max_q` where we say `cu_seqlens` and `max_seqlen`; [T, H, D]."""
    kernel = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    attended: torch.Tensor = kernel(
        query,
        key,
        value,
        packed_rows.cu_seqlens,
        packed_rows.cu_seqlens,
        packed_rows.max_seqlen,
        packed_rows.max_seqlen,
        scale=rule.scaling,
        window_size=_kernel_window(rule),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended


def _flash_attn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed_rows: PackedRows, rule: _Rule
) -> torch.Tensor:
    """Call the flash-attn package, which finds grouped heads by itself and takes 0.0 for no softcap; [T, H, D]."""
    kernel = importlib.import_module("flash_attn").flash_attn_varlen_func
    attended: torch.Tensor = kernel(
        query,
        key,
        value,
        packed_rows.cu_seqlens,
        packed_rows.cu_seqlens,
        packed_rows.max_seqlen,
        packed_rows.max_seqlen,
        softmax_scale=rule.scaling,
        causal=rule.is_causal,
        window_size=_kernel_window(rule),
        softcap=rule.softcap or 0.0,
    )
    return attended
