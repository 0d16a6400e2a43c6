"""Texts of known lengths, the same for every cell: lengths from a seed, words that are one token each, no data set.

Also the embeddings that sentence-transformers gives for them, which every measured answer is held against.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray
from tokenizers import Tokenizer

NUM_SPECIAL = 2
"""[CLS] and [SEP], which BERT's tokenizer puts around a text."""
MIN_COSINE = 0.99999
"""Below this an answer is wrong: float32 differences between layouts stay under 1e-6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthMix:
    """Lognormal lengths in tokens, special tokens included: many short texts, few long ones."""

    mean_tokens: float = 39.0
    """Mean before the cap."""
    sigma: float = 0.9
    """Of the logarithm."""
    max_tokens: int = 256

    def draw(self, num_texts: int, seed: int) -> NDArray[np.int64]:
        """Lengths [num_texts], at least one word each."""
        mu = np.log(self.mean_tokens) - self.sigma**2 / 2
        drawn = np.random.default_rng(seed).lognormal(mu, self.sigma, num_texts)
        lengths: NDArray[np.int64] = np.clip(np.rint(drawn), NUM_SPECIAL + 1, self.max_tokens).astype(np.int64)
        return lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`texts` [N] with `lengths` [N] in tokens, and what sentence-transformers gives: `reference` [N, D] float32."""

    texts: list[str]
    lengths: list[int]
    reference: NDArray[np.float32]

    def save(self, folder: Path) -> None:
        """Write for the other processes."""
        (folder / "texts.json").write_bytes(orjson.dumps({"texts": self.texts, "lengths": self.lengths}))
        np.save(folder / "reference.npy", self.reference)

    @staticmethod
    def load(folder: Path) -> "Workload":
        """Read what `save` wrote."""
        content = orjson.loads((folder / "texts.json").read_bytes())
        reference = np.load(folder / "reference.npy")
        return Workload(texts=content["texts"], lengths=content["lengths"], reference=reference)

    def cosines(self, indices: Sequence[int], values: NDArray[np.float32]) -> NDArray[np.float64]:
        """Cosine [n] between `values` [n, D] and the reference of those texts; NaN where a value is not a number."""
        expected = self.reference[list(indices)].astype(np.float64)  # [n, D]
        got = values.astype(np.float64)
        norms = np.linalg.norm(expected, axis=1) * np.linalg.norm(got, axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            cosines: NDArray[np.float64] = (expected * got).sum(axis=1) / norms
        return cosines


def one_token_words(vocabulary: Mapping[str, int]) -> list[str]:
    """Words that an uncased WordPiece tokenizer keeps whole, in alphabetical order."""
    return sorted(word for word in vocabulary if len(word) > 2 and word.isascii() and word.isalpha() and word.islower())


def make_texts(lengths: Sequence[int], words: Sequence[str], seed: int) -> list[str]:
    """One text per length, special tokens counted in the length."""
    draw = np.random.default_rng(seed)
    return [" ".join(words[pick] for pick in draw.integers(0, len(words), n - NUM_SPECIAL)) for n in lengths]


def make_workload(folder: Path, *, num_texts: int, seed: int) -> Workload:
    """Texts for the model in `folder`. Raises AssertionError when its tokenizer gives other lengths than drawn."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    lengths = [int(length) for length in LengthMix().draw(num_texts, seed)]
    texts = make_texts(lengths, one_token_words(tokenizer.get_vocab()), seed)
    assert [len(encoding.ids) for encoding in tokenizer.encode_batch(texts)] == lengths, "a word is not one token"
    return Workload(texts=texts, lengths=lengths, reference=_reference(folder, texts))


def _reference(folder: Path, texts: list[str]) -> NDArray[np.float32]:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    values: NDArray[np.float32] = model.encode(texts, show_progress_bar=False)
    return values
