"""Both forwards give a row the vector that sentence-transformers gives it alone."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from batching.packing import pack
from deployments.forward import Forward, table_positions
from deployments.model import Layout, LoadedModel, ModelSpec, find_folder, load_model

Rows = list[NDArray[np.int32]]
Checkpoints = Callable[..., Path]
Oracle = Callable[[Path, Rows], NDArray[np.float32]]
DrawRows = Callable[..., Rows]

BUNDLED = "bundled/all-MiniLM-L6-v2"
RAGGED = ["bert", "albert", "xlm-roberta", "roberta-pad-3", "modernbert", "qwen3", "mistral", "gemma2"]
# Rounding in float32 with other shapes of the same sums (contract S2-05).
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def minilm() -> LoadedModel:
    return load_model(ModelSpec(model=BUNDLED))


def _load(folder: Path, layout: Layout) -> LoadedModel:
    return load_model(ModelSpec(threads=1, model=str(folder), layout=layout))


def _largest_difference(left: NDArray[np.float32], right: NDArray[np.float32]) -> float:
    return float(np.abs(left - right).max())


@pytest.mark.parametrize("lengths", [(1,), (48,), (1, 1, 1, 1), (7, 7, 7), (13, 48, 1, 2, 30, 13, 9)], ids=str)
@pytest.mark.parametrize("family", RAGGED)
def test_ragged_equals_one_at_a_time(
    family: str, lengths: tuple[int, ...], checkpoint: Checkpoints, one_at_a_time: Oracle, rows: DrawRows
) -> None:
    """Packed rows of any lengths, the shortest and the longest among them, equal the oracle and compute no padding."""
    batch = rows(*lengths)
    result = _load(checkpoint(family), "ragged").forward(batch)
    assert _largest_difference(result.values, one_at_a_time(checkpoint(family), batch)) <= TOLERANCE
    assert result.computed_tokens == sum(lengths)


@pytest.mark.parametrize("family", [*RAGGED, "mpnet"])
def test_padded_equals_one_at_a_time(
    family: str, checkpoint: Checkpoints, one_at_a_time: Oracle, rows: DrawRows
) -> None:
    """Rows in a rectangle equal the oracle; padding longer than a window stays unseen (transformers 45491)."""
    batch = rows(13, 48, 1, 2, 30)
    result = _load(checkpoint(family), "padded").forward(batch)
    assert _largest_difference(result.values, one_at_a_time(checkpoint(family), batch)) <= TOLERANCE
    assert result.computed_tokens == 5 * 48


@pytest.mark.parametrize("pooling", ["cls", "mean", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens"])
@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_pooling_is_the_models_own(
    pooling: str, layout: Layout, checkpoint: Checkpoints, one_at_a_time: Oracle, rows: DrawRows
) -> None:
    """Each pooling mode that a model declares is the one that is served, over real tokens only."""
    folder = checkpoint("bert", pooling)
    batch = rows(5, 40, 1, 12)
    values = _load(folder, layout).forward(batch).values
    assert _largest_difference(values, one_at_a_time(folder, batch)) <= TOLERANCE


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "roberta-pad-3"])
def test_text_may_spell_the_pad_token(
    family: str, checkpoint: Checkpoints, one_at_a_time: Oracle, rows: DrawRows
) -> None:
    """A pad id inside a row is a token that RoBERTa-like models count differently; packed positions follow."""
    batch = rows(9, 4, 7)
    for row in batch:
        row[[1, 3]] = {"bert": 0, "xlm-roberta": 1, "roberta-pad-3": 3}[family]
    values = _load(checkpoint(family), "ragged").forward(batch).values
    assert _largest_difference(values, one_at_a_time(checkpoint(family), batch)) <= TOLERANCE


def test_positions_start_where_the_table_does() -> None:
    """Positions restart in every row: at 0, or behind the pad position, with spelled pad tokens at it."""
    batch = pack([np.array(row, dtype=np.int32) for row in ([5, 1, 6], [1, 7], [8])])
    assert table_positions(batch, None).tolist() == [0, 1, 2, 0, 1, 0]
    assert table_positions(batch, 3).tolist() == [4, 5, 6, 4, 5, 4]
    assert table_positions(batch, 1).tolist() == [2, 1, 3, 1, 2, 2]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
def test_no_batch_size_is_special(num_rows: int, minilm: LoadedModel) -> None:
    """Row 0 is the same beside none, one, two or three others (llm2vec 68)."""
    batch = [np.arange(1000, 1000 + length, dtype=np.int32) for length in (12, 40, 3, 12)]
    alone = minilm.forward(batch[:1]).values[0]
    assert np.abs(minilm.forward(batch[:num_rows]).values[0] - alone).max() <= TOLERANCE


def test_real_model_equals_encode(minilm: LoadedModel) -> None:
    """50 texts of random length get the vectors that `SentenceTransformer.encode` gives them."""
    generator = np.random.default_rng(11)
    words = [word for word in minilm_words(minilm) if word.isalpha()]
    texts = [" ".join(generator.choice(words, size=size)) for size in generator.integers(1, 150, 50)]
    tokenizer = Tokenizer.from_str(minilm.tokenizer_json)
    tokenizer.enable_truncation(minilm.info.max_tokens)
    batch = [np.array(encoding.ids, dtype=np.int32) for encoding in tokenizer.encode_batch(texts)]
    values = minilm.forward(batch).values
    expected = SentenceTransformer(str(find_folder(BUNDLED)), device="cpu").encode(texts, show_progress_bar=False)
    assert (values * expected).sum(axis=1).min() >= 0.99999
    assert _largest_difference(values, expected) <= TOLERANCE


def minilm_words(minilm: LoadedModel) -> list[str]:
    return sorted(Tokenizer.from_str(minilm.tokenizer_json).get_vocab())


_PROPERTY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def tiny(checkpoint: Checkpoints) -> LoadedModel:
    return _load(checkpoint("qwen3"), "ragged")


@_PROPERTY
@given(lengths=st.lists(st.integers(1, 48), min_size=1, max_size=12), seed=st.integers(0, 9))
def test_composition_and_order_do_not_matter(tiny: LoadedModel, lengths: list[int], seed: int) -> None:
    """Any rows in any order get the vectors that they get alone."""
    generator = np.random.default_rng(seed)
    batch = [generator.integers(6, 120, length).astype(np.int32) for length in lengths]
    alone = np.concatenate([tiny.forward([row]).values for row in batch])
    assert _largest_difference(tiny.forward(batch).values, alone) <= TOLERANCE


@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_values_are_plain_float32(layout: Layout, checkpoint: Checkpoints, rows: DrawRows) -> None:
    """Values come as contiguous float32 also from a 16-bit model."""
    model = load_model(ModelSpec(threads=1, model=str(checkpoint("bert")), layout=layout, dtype="bfloat16"))
    values = model.forward(rows(4, 9)).values
    assert values.dtype == np.float32
    assert (values.shape, values.flags.c_contiguous) == ((2, 32), True)


@pytest.mark.parametrize("layout", ["ragged", "padded"])
@pytest.mark.parametrize("lengths", [(), (0,), (3, 0, 2)], ids=["no-rows", "empty-row", "empty-among-others"])
def test_refuses_empty_rows(layout: Layout, lengths: tuple[int, ...], checkpoint: Checkpoints, rows: DrawRows) -> None:
    """No rows and empty rows raise; they never reach a kernel (pytorch 81077)."""
    model = _load(checkpoint("bert"), layout)
    with pytest.raises(ValueError, match=r"empty row|zero rows"):
        model.forward(rows(*lengths))


def test_runs_in_a_worker_thread(minilm: LoadedModel) -> None:
    """A forward in another thread, where the replica calls it, gives the same values."""
    batch = [np.arange(2000, 2000 + length, dtype=np.int32) for length in (30, 5, 5)]
    results: list[NDArray[np.float32]] = []
    thread = threading.Thread(target=lambda: results.append(_values(minilm.forward, batch)))
    thread.start()
    thread.join()
    assert _largest_difference(results[0], _values(minilm.forward, batch)) <= TOLERANCE


def _values(forward: Forward, batch: Rows) -> NDArray[np.float32]:
    return forward(batch).values
