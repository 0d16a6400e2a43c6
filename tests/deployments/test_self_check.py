"""The proof at load: it passes what is right and refuses what would be silently wrong."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from deployments.forward import PaddedForward, RaggedForward
from deployments.model import Layout, ModelSpec, load_model
from deployments.ragged_attention import ATTENTION_NAME, register
from deployments.self_check import (
    Sample,
    SelfCheckFailed,
    Vocabulary,
    check_padded,
    check_ragged,
    sample_rows,
    take_sample,
)

Checkpoints = Callable[..., Path]
DrawRows = Callable[..., list[NDArray[np.int32]]]

SPECIAL = frozenset({0, 1, 119})


def _pipeline(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu", local_files_only=True).eval()


def _ragged(pipeline: SentenceTransformer) -> RaggedForward:
    register()
    pipeline[0].model.set_attn_implementation(ATTENTION_NAME)
    return RaggedForward(pipeline, backend="grouped_sdpa", dimension=32)


def _sample(pipeline: SentenceTransformer) -> Sample:
    rows = sample_rows(Vocabulary(num_ids=120, special_ids=SPECIAL), max_tokens=48)
    return take_sample(rows, PaddedForward(pipeline, dimension=32), dtype="float32")


@pytest.mark.parametrize("max_tokens", [1, 2, 48, 512])
def test_sample_reaches_both_ends(max_tokens: int) -> None:
    """Rows of one and of the most tokens are drawn, two rows are equally long, ids reach the end of the vocabulary."""
    rows = sample_rows(Vocabulary(num_ids=120, special_ids=SPECIAL), max_tokens=max_tokens)
    lengths = [len(row) for row in rows]
    assert (min(lengths), max(lengths)) == (1, max_tokens)
    assert len(set(lengths)) < len(lengths)
    assert max(row.max() for row in rows) == 118
    assert not SPECIAL & {int(token_id) for row in rows for token_id in row}


def test_sample_is_the_same_each_time() -> None:
    """A replica that starts again proves the same thing."""
    vocabulary = Vocabulary(num_ids=120, special_ids=SPECIAL)
    first, second = sample_rows(vocabulary, max_tokens=9), sample_rows(vocabulary, max_tokens=9)
    assert all(np.array_equal(left, right) for left, right in zip(first, second, strict=True))


def test_sample_needs_an_ordinary_token() -> None:
    """A vocabulary of special tokens alone cannot be checked, and says so."""
    with pytest.raises(SelfCheckFailed, match="no ordinary token"):
        sample_rows(Vocabulary(num_ids=2, special_ids=SPECIAL), max_tokens=9)


@pytest.mark.parametrize("family", ["bert", "albert", "modernbert", "qwen3"])
def test_passes_models_that_pack(family: str, checkpoint: Checkpoints) -> None:
    """A model that packs is passed with a difference of rounding; shared layers (ALBERT) count once per call."""
    pipeline = _pipeline(checkpoint(family))
    sample = _sample(pipeline)
    assert check_padded(sample, PaddedForward(pipeline, dimension=32)) <= 1e-5
    assert check_ragged(sample, _ragged(pipeline), num_layers=2) <= 1e-5


def test_refuses_a_model_that_ignores_the_registered_attention(checkpoint: Checkpoints) -> None:
    """MPNet, packed, returns wrong values without an error; the check names the difference and the way out."""
    pipeline = _pipeline(checkpoint("mpnet"))
    sample = _sample(pipeline)
    with pytest.raises(SelfCheckFailed, match=r"2 of 2 layers never called.*MPNet.*by 0\.\d+; set layout: padded"):
        check_ragged(sample, _ragged(pipeline), num_layers=2)


def test_load_refuses_it_too_and_serves_it_padded(checkpoint: Checkpoints) -> None:
    """The same model fails to load as `ragged` and loads as `padded`."""
    with pytest.raises(SelfCheckFailed, match="layout: padded"):
        load_model(ModelSpec(threads=1, model=str(checkpoint("mpnet"))))
    model = load_model(ModelSpec(threads=1, model=str(checkpoint("mpnet")), layout="padded"))
    assert model.info.self_check_max_difference <= 1e-5


def test_refuses_a_model_with_layers_that_never_called(checkpoint: Checkpoints) -> None:
    """A hybrid whose other layers mix tokens by other means calls too rarely, even where values agree."""
    pipeline = _pipeline(checkpoint("bert"))
    sample = _sample(pipeline)
    with pytest.raises(SelfCheckFailed, match="1 of 3 layers never called"):
        check_ragged(sample, _ragged(pipeline), num_layers=3)


@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_refuses_other_values(layout: Layout, checkpoint: Checkpoints) -> None:
    """Values off by more than the tolerance are refused with the measured difference."""
    pipeline = _pipeline(checkpoint("bert"))
    sample = _sample(pipeline)
    wrong = replace(sample, alone=sample.alone + np.float32(0.25))
    checks: dict[Layout, Callable[[], float]] = {
        "ragged": lambda: check_ragged(wrong, _ragged(pipeline), num_layers=2),
        "padded": lambda: check_padded(wrong, PaddedForward(pipeline, dimension=32)),
    }
    with pytest.raises(SelfCheckFailed, match=r"by 0\.25"):
        checks[layout]()


@pytest.mark.parametrize(
    ("shift", "dtype", "passes"),
    [(2e-5, "float32", False), (2e-6, "float32", True), (2e-3, "bfloat16", True), (1e-1, "bfloat16", False)],
)
def test_tolerance_follows_the_dtype(shift: float, dtype: str, passes: bool, checkpoint: Checkpoints) -> None:
    """float32 is held to 1e-5; 16-bit types to the direction of the vector."""
    pipeline = _pipeline(checkpoint("bert"))
    sample = _sample(pipeline)
    shifted = replace(sample, alone=sample.alone + np.float32(shift), dtype=dtype)
    assert _passes(shifted, PaddedForward(pipeline, dimension=32)) is passes


def _passes(sample: Sample, forward: PaddedForward) -> bool:
    try:
        check_padded(sample, forward)
    except SelfCheckFailed:
        return False
    return True


def test_refuses_values_that_are_not_finite(checkpoint: Checkpoints, rows: DrawRows) -> None:
    """A model whose own values overflow is refused before any layout is tried (field report BL-038)."""
    pipeline = _pipeline(checkpoint("bert"))
    pipeline[0].model.embeddings.LayerNorm.weight.data.fill_(float("inf"))
    with pytest.raises(SelfCheckFailed, match="not finite in float32"):
        take_sample(rows(3, 4), PaddedForward(pipeline, dimension=32), dtype="float32")


def test_error_crosses_processes() -> None:
    """Ray pickles what a replica's constructor raises."""
    error = pickle.loads(pickle.dumps(SelfCheckFailed("off by 0.3")))
    assert (type(error), str(error)) == (SelfCheckFailed, "off by 0.3")
