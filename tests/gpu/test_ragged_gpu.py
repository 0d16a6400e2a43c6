"""The variable-length kernels on a CUDA device, against ordinary attention in float32, one row at a time.

Needs torch, transformers and numpy only, so that it runs on a bare GPU machine.
"""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from batching.packing import PackedBatch, pack, unpack
from deployments.ragged_attention import (
    ATTENTION_NAME,
    Backend,
    PackedRows,
    available_kernels,
    choose_backend,
    ragged_attention,
    register,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),  # the first kernel of a process is slow to start
]

DEVICE = torch.device("cuda")
BACKENDS: list[Backend] = ["grouped_sdpa", "varlen_attn", "flash_attn"]
LENGTHS = (3, 128, 1, 1, 57, 300, 128)
# Contract S2-05, bfloat16 on a GPU: the relative error of a whole tensor.
MAX_RELATIVE_NORM = 1e-2

_SMALL: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MODERNBERT: dict[str, Any] = {**_SMALL, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", _SMALL),
    "modernbert": ("ModernBertConfig", {**_MODERNBERT, "global_attn_every_n_layers": 2}),
    "qwen3": ("Qwen3Config", {**_SMALL, "num_key_value_heads": 2, "head_dim": 64}),
    "mistral": ("MistralConfig", {**_SMALL, "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 40}),
    "gemma2": ("Gemma2Config", {**_SMALL, "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 40}),
}


def _require(backend: Backend) -> None:
    if backend != "grouped_sdpa" and backend not in available_kernels():
        pytest.skip(f"{backend} is not available on this machine")


def _batch() -> PackedBatch:
    generator = np.random.default_rng(4)
    return pack([generator.integers(5, 500, length).astype(np.int32) for length in LENGTHS])


def _relative_norm(values: torch.Tensor, expected: torch.Tensor) -> float:
    return float((values.float() - expected.float()).norm() / expected.float().norm())


def test_this_machine_has_a_kernel() -> None:
    """An Ampere or later GPU with this torch runs bfloat16 through torch's own kernel."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the flash kernels need compute capability 8.0")
    kernels = available_kernels()
    assert choose_backend("cuda", torch.bfloat16, head_size=64, kernels=kernels) == "varlen_attn"


class _Layer(torch.nn.Module):
    is_causal = False


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_key_heads", [4, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": False},
        {"is_causal": True},
        {"is_causal": False, "sliding_window": 17},
        {"is_causal": True, "sliding_window": 17},
        {"is_causal": True, "softcap": 5.0, "scaling": 0.3},
    ],
    ids=str,
)
def test_kernels_equal_grouped_sdpa_in_float32(backend: Backend, num_key_heads: int, options: dict[str, Any]) -> None:
    """Each kernel follows every rule: causal, both kinds of window, grouped heads, softcap."""
    _require(backend)
    batch = _batch()
    generator = torch.Generator(DEVICE).manual_seed(5)
    query, key, value = (
        torch.randn(1, heads, batch.num_tokens, 64, device=DEVICE, generator=generator).bfloat16()
        for heads in (4, num_key_heads, num_key_heads)
    )
    exact_rows = PackedRows(batch, backend="grouped_sdpa", device=DEVICE)
    exact, _ = ragged_attention(
        _Layer(), query.float(), key.float(), value.float(), None, packed_rows=exact_rows, **options
    )
    packed_rows = PackedRows(batch, backend=backend, device=DEVICE)
    attended, _ = ragged_attention(_Layer(), query, key, value, None, packed_rows=packed_rows, **options)
    assert torch.isfinite(attended).all()
    assert _relative_norm(attended, exact) <= MAX_RELATIVE_NORM


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1), (1, 300), (64, 64)], ids=str)
def test_kernels_take_the_shortest_rows(backend: Backend, lengths: tuple[int, ...]) -> None:
    """Rows of one token, alone and together, are ordinary rows (flash-attention 1537)."""
    _require(backend)
    batch = pack([np.zeros(length, dtype=np.int32) for length in lengths])
    query = torch.randn(1, 4, batch.num_tokens, 64, device=DEVICE).bfloat16()
    key = torch.randn(1, 2, batch.num_tokens, 64, device=DEVICE).bfloat16()
    packed_rows = PackedRows(batch, backend=backend, device=DEVICE)
    attended, _ = ragged_attention(_Layer(), query, key, key, None, packed_rows=packed_rows, is_causal=True)
    starts = packed_rows.cu_seqlens[:-1].long()
    first = attended[0, starts]  # [B, H, D]; the first token of a causal row sees itself alone
    torch.testing.assert_close(first, key[0].transpose(0, 1)[starts].repeat_interleave(2, dim=1))


def _one_at_a_time(model: Any, rows: list[NDArray[np.int32]]) -> torch.Tensor:
    """Run each row by itself in float32, through the model's ordinary attention; [T, 256]."""
    return torch.cat([model(input_ids=_ids(row)).last_hidden_state[0] for row in rows])


def _ids(ids: NDArray[np.int32]) -> torch.Tensor:
    """Return ids [n] as a batch of one, [1, n]."""
    return torch.from_numpy(ids).long().to(DEVICE)[None]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", list(MODELS))
def test_models_pack_in_bfloat16(family: str, backend: Backend) -> None:
    """A whole packed model in bfloat16 equals itself in float32, one row at a time, to bfloat16's precision."""
    _require(backend)
    register()
    class_name, options = MODELS[family]
    config = getattr(transformers, class_name)(**options, use_cache=False)
    torch.manual_seed(6)
    model = transformers.AutoModel.from_config(config, dtype=torch.float32).eval().to(DEVICE)
    packed_model = transformers.AutoModel.from_config(config, dtype=torch.bfloat16).eval().to(DEVICE)
    packed_model.load_state_dict(model.state_dict())  # copied into bfloat16; rotary tables stay float32
    batch = _batch()
    packed_rows = PackedRows(batch, backend=backend, device=DEVICE)
    with torch.inference_mode():
        expected = _one_at_a_time(model, unpack(batch.token_ids, batch.cu_seqlens))  # type: ignore[arg-type]
        packed_model.set_attn_implementation(ATTENTION_NAME)
        values = packed_model(
            input_ids=_ids(batch.token_ids), position_ids=_ids(batch.position_ids), packed_rows=packed_rows
        ).last_hidden_state[0]
    assert packed_rows.num_calls == options["num_hidden_layers"]
    assert _relative_norm(values, expected) <= 3 * MAX_RELATIVE_NORM  # two layers of bfloat16 matrix products as well
