"""Attention over packed rows, against a definition in plain loops."""

from typing import Any

import numpy as np
import pytest
import torch

from batching.packing import PackedBatch, pack
from deployments.ragged_attention import (
    Backend,
    PackedRows,
    _kernel_window,
    _Rule,
    available_kernels,
    choose_backend,
    no_mask,
    ragged_attention,
)

Case = dict[str, Any]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_MIXED = (3, 1, 1, 9, 4)


class _Layer(torch.nn.Module):
    """Stands for a model's attention layer, of which only `is_causal` is read."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal


def _batch(lengths: tuple[int, ...]) -> PackedBatch:
    return pack([np.zeros(length, dtype=np.int32) for length in lengths])


def _packed_rows(lengths: tuple[int, ...], backend: Backend = "grouped_sdpa", device: str = "cpu") -> PackedRows:
    return PackedRows(_batch(lengths), backend=backend, device=torch.device(device))


def _tensors(num_tokens: int, num_heads: int = 4, num_key_heads: int = 4) -> Tensors:
    """Query, key, value as models hand them over: [1, heads, T, 8], views of a [1, T, heads, 8] projection."""
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(1, num_tokens, heads, 8, generator=generator).transpose(1, 2)
        for heads in (num_heads, num_key_heads, num_key_heads)
    )
    return query, key, value


def _defined(tensors: Tensors, lengths: tuple[int, ...], case: Case) -> torch.Tensor:
    """Attention as defined, one query of one head of one row at a time, in float64; [1, T, H, 8]."""
    query, key, value = (tensor[0].double() for tensor in tensors)
    result = torch.zeros(query.shape[1], query.shape[0], 8, dtype=torch.float64)
    group = query.shape[0] // key.shape[0]
    start = 0
    for length in lengths:
        for head in range(query.shape[0]):
            for here in range(length):
                seen = [
                    start + there
                    for there in range(length)
                    if not (case.get("is_causal") and there > here)
                    and abs(here - there) < (case.get("sliding_window") or length)
                ]
                scores = key[head // group, seen] @ query[head, start + here] * (case.get("scaling") or 8**-0.5)
                if case.get("softcap"):
                    scores = torch.tanh(scores / case["softcap"]) * case["softcap"]
                result[start + here, head] = torch.softmax(scores, dim=0) @ value[head // group, seen]
        start += length
    return result[None]


@pytest.mark.parametrize("lengths", [_MIXED, (5,), (1,), (1, 1, 1), (6, 6, 6), (9, 2, 9)], ids=str)
@pytest.mark.parametrize("num_key_heads", [4, 2, 1])
@pytest.mark.parametrize(
    "case",
    [
        {"is_causal": False},
        {"is_causal": True},
        {"is_causal": False, "sliding_window": 3},
        {"is_causal": True, "sliding_window": 3},
        {"is_causal": True, "sliding_window": 1},
        {"is_causal": False, "scaling": 0.9},
        {"is_causal": False, "softcap": 0.7},
        {"is_causal": True, "softcap": 0.7, "scaling": 0.5},
        {"is_causal": True, "softcap": 0.7, "sliding_window": 2},
    ],
    ids=str,
)
def test_attends_within_each_row(lengths: tuple[int, ...], num_key_heads: int, case: Case) -> None:
    """Every rule that models ask for gives the defined result for every row, whatever stands beside it."""
    tensors = _tensors(sum(lengths), num_key_heads=num_key_heads)
    attended, weights = ragged_attention(
        _Layer(is_causal=True), *tensors, None, packed_rows=_packed_rows(lengths), **case
    )
    assert weights is None
    torch.testing.assert_close(attended.double(), _defined(tensors, lengths, case), atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("is_causal", "visible"), [(True, {3, 4, 5}), (False, {3, 4, 5, 6, 7})], ids=["causal", "bidirectional"]
)
def test_window_shows_keys_nearer_than_it(is_causal: bool, visible: set[int]) -> None:
    """A window of 3 shows distances 0 to 2: the key at distance 2 is seen, the one at 3 is not."""
    query, key, _ = _tensors(10, num_heads=1, num_key_heads=1)
    value = torch.eye(10)[None, None]  # what comes out of token 5 is its weight for each key
    attended, _ = ragged_attention(
        _Layer(is_causal=is_causal), query, key, value, None, packed_rows=_packed_rows((10,)), sliding_window=3
    )
    assert set(torch.nonzero(attended[0, 5, 0]).flatten().tolist()) == visible


def test_argument_wins_over_module() -> None:
    """`is_causal` as an argument overrules the layer's own attribute, as in transformers' SDPA function."""
    tensors = _tensors(6)
    options: Case = {"packed_rows": _packed_rows((6,))}
    told, _ = ragged_attention(_Layer(is_causal=True), *tensors, None, is_causal=False, **options)
    own, _ = ragged_attention(_Layer(is_causal=False), *tensors, None, **options)
    assert torch.equal(told, own)


def test_neighbours_of_one_length_share_a_call() -> None:
    """Sorted rows form one run per distinct length; the runs cover all tokens in order."""
    packed_rows = _packed_rows((2, 2, 2, 5, 5, 9))
    assert [(run.start, run.num_rows, run.length) for run in packed_rows.runs] == [(0, 3, 2), (6, 2, 5), (16, 1, 9)]
    assert packed_rows.runs[-1].end == packed_rows.num_tokens == 25


def test_counts_calls() -> None:
    """Each attention call is counted, which is how the load-time check knows that every layer came by."""
    packed_rows = _packed_rows((2, 3))
    for _ in range(3):
        ragged_attention(_Layer(is_causal=False), *_tensors(5), None, packed_rows=packed_rows)
    assert packed_rows.num_calls == 3


def test_masks_belong_to_one_forward() -> None:
    """A window mask is made once per length, and a forward with other lengths makes its own (pytorch 139462)."""
    rule = _Rule(is_causal=False, window=2, scaling=None, softcap=None)
    first, second = _packed_rows((4, 4)), _packed_rows((6,))
    mask = first.window_mask(4, rule)
    assert mask is not None
    assert first.window_mask(4, rule) is mask
    longer = second.window_mask(6, rule)
    assert longer is not None
    assert longer.shape == (6, 6)
    assert second.window_mask(2, rule) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "without packed_rows"),
        ({"packed_rows": _packed_rows((3, 1))}, "describes 4 tokens, attention got 5"),
        ({"packed_rows": _packed_rows((3, 2)), "position_bias": torch.zeros(1)}, "position_bias"),
        ({"packed_rows": _packed_rows((3, 2)), "s_aux": torch.zeros(1)}, "s_aux"),
    ],
    ids=["no-boundaries", "other-boundaries", "position-bias", "sinks"],
)
def test_refuses_what_it_would_lose(options: Case, message: str) -> None:
    """Missing boundaries and effects that this function does not have raise instead of giving other values."""
    with pytest.raises(ValueError, match=message):
        ragged_attention(_Layer(is_causal=False), *_tensors(5), None, **options)


def test_refuses_a_mask_and_a_rectangle() -> None:
    """A mask or a second batch row means that the caller did not pack."""
    options: Case = {"packed_rows": _packed_rows((3, 2))}
    with pytest.raises(ValueError, match="no attention mask"):
        ragged_attention(_Layer(is_causal=False), *_tensors(5), torch.ones(1, 5), **options)
    rectangle = torch.zeros(2, 4, 5, 8)
    with pytest.raises(ValueError, match="one packed row block"):
        ragged_attention(_Layer(is_causal=False), rectangle, rectangle, rectangle, None, **options)
    assert no_mask(attention_mask=torch.ones(1, 5)) is None  # type: ignore[func-returns-value]  # the point


@pytest.mark.parametrize(
    "cu_seqlens",
    [[0, 3], [1, 5], [0, 3, 2, 5], [0, 3, 3, 5], [0, 6], [0, -1, 5], [0]],
    ids=["ends-early", "starts-late", "falls", "empty-row", "ends-late", "negative", "no-row"],
)
def test_refuses_boundaries_that_do_not_describe_the_tokens(cu_seqlens: list[int]) -> None:
    """Wrong boundaries never reach a kernel, which would read or leave other memory (flash-attention 1661)."""
    good = _batch((3, 2))
    batch = PackedBatch(
        token_ids=good.token_ids,
        position_ids=good.position_ids,
        cu_seqlens=np.array(cu_seqlens, dtype=np.int32),
        max_seqlen=3,
    )
    with pytest.raises(ValueError, match="cu_seqlens"):
        PackedRows(batch, backend="grouped_sdpa", device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("device_type", "dtype", "head_size", "kernels", "backend"),
    [
        ("cuda", torch.bfloat16, 64, {"varlen_attn", "flash_attn"}, "varlen_attn"),
        ("cuda", torch.float16, 256, {"varlen_attn"}, "varlen_attn"),
        ("cuda", torch.bfloat16, 64, {"flash_attn"}, "flash_attn"),
        ("cuda", torch.bfloat16, 64, set(), "grouped_sdpa"),
        ("cuda", torch.bfloat16, 264, {"varlen_attn"}, "grouped_sdpa"),
        ("cuda", torch.bfloat16, 36, {"varlen_attn"}, "grouped_sdpa"),
        ("cuda", torch.float32, 64, {"varlen_attn", "flash_attn"}, "grouped_sdpa"),
        ("cpu", torch.bfloat16, 64, {"varlen_attn"}, "grouped_sdpa"),
        ("mps", torch.float16, 64, set(), "grouped_sdpa"),
    ],
)
def test_chooses_backend(
    device_type: str, dtype: torch.dtype, head_size: int, kernels: set[Backend], backend: Backend
) -> None:
    """Flash kernels run 16-bit types on CUDA with head sizes they know; all else is grouped SDPA."""
    assert choose_backend(device_type, dtype, head_size=head_size, kernels=kernels) == backend


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes a process without CUDA")
def test_no_kernels_without_cuda() -> None:
    """A CPU process reports no variable-length kernel, whatever is installed."""
    assert available_kernels() == frozenset()


@pytest.mark.parametrize(
    ("rule", "window"),
    [
        (_Rule(is_causal=False, window=None, scaling=None, softcap=None), (-1, -1)),
        (_Rule(is_causal=True, window=None, scaling=None, softcap=None), (-1, 0)),
        (_Rule(is_causal=True, window=4, scaling=None, softcap=None), (3, 0)),
        (_Rule(is_causal=False, window=4, scaling=None, softcap=None), (3, 3)),
        (_Rule(is_causal=True, window=1, scaling=None, softcap=None), (0, 0)),
    ],
    ids=["all", "causal", "causal-window", "window", "self"],
)
def test_window_in_the_kernels_words(rule: _Rule, window: tuple[int, int]) -> None:
    """The kernels count the last distance that is seen, models the first that is not."""
    assert _kernel_window(rule) == window


@pytest.mark.parametrize("num_key_heads", [4, 2])
def test_calls_varlen_attn_by_its_installed_signature(num_key_heads: int) -> None:
    """On the meta device, torch's real function accepts our arguments and gives one output per token and head."""
    query, key, value = (tensor.to("meta") for tensor in _tensors(18, num_key_heads=num_key_heads))
    packed_rows = _packed_rows(_MIXED, backend="varlen_attn", device="meta")
    attended, _ = ragged_attention(
        _Layer(is_causal=True), query, key, value, None, packed_rows=packed_rows, scaling=0.5, sliding_window=3
    )
    assert attended.shape == (1, 18, 4, 8)


def test_softcap_does_not_reach_a_kernel_without_it() -> None:
    """torch's kernel has no softcap, so such layers attend by the explicit formula under that backend too."""
    tensors = _tensors(18)
    options: Case = {"softcap": 0.7, "is_causal": True}
    attended, _ = ragged_attention(
        _Layer(is_causal=True), *tensors, None, packed_rows=_packed_rows(_MIXED, backend="varlen_attn"), **options
    )
    torch.testing.assert_close(attended.double(), _defined(tensors, _MIXED, options), atol=2e-6, rtol=0)
