"""Tiny checkpoints with random weights, as sentence-transformers folders, built once per session."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.redis_server import RedisServer

VOCAB_SIZE = 120
MAX_TOKENS = 48

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_TOKENS,
    "initializer_range": 0.4,  # the usual 0.02 makes rows so alike that cross-talk would hide below the tolerance
    "pad_token_id": 0,
}
_DECODER: dict[str, Any] = {**_SMALL, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 2, "eos_token_id": 3}
_ROBERTA: dict[str, Any] = {**_SMALL, "bos_token_id": 2, "eos_token_id": 3, "type_vocab_size": 1}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", _SMALL),
    "albert": ("AlbertConfig", {**_SMALL, "embedding_size": 16}),
    "xlm-roberta": ("XLMRobertaConfig", {**_ROBERTA, "pad_token_id": 1, "max_position_embeddings": MAX_TOKENS + 2}),
    "roberta-pad-3": ("RobertaConfig", {**_ROBERTA, "pad_token_id": 3, "max_position_embeddings": MAX_TOKENS + 4}),
    "modernbert": (
        "ModernBertConfig",
        {
            **_SMALL,
            "local_attention": 8,
            "global_attn_every_n_layers": 2,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 2),
        },
    ),
    "qwen3": ("Qwen3Config", _DECODER),
    "mistral": ("MistralConfig", {**_DECODER, "sliding_window": 5}),
    "gemma2": (
        "Gemma2Config",
        {**_DECODER, "sliding_window": 5, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    ),
    "mpnet": ("MPNetConfig", {**_SMALL, "pad_token_id": 1, "max_position_embeddings": MAX_TOKENS + 2}),
}
LAST_TOKEN = {"qwen3", "mistral", "gemma2"}

Checkpoints = Callable[..., Path]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and on a busy machine threads that wait for each other cost seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test of this folder reaches a model hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis that is up and empty."""
    try:
        server = RedisServer(tmp_path)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Return a function from family (and pooling mode) to the folder of its checkpoint; do not write into it."""
    folders: dict[tuple[str, str], Path] = {}

    def build(family: str, pooling: str | None = None) -> Path:
        mode = pooling or ("lasttoken" if family in LAST_TOKEN else "mean")
        if (family, mode) not in folders:
            folders[family, mode] = tmp_path_factory.mktemp(f"{family}-{mode}")
            save_checkpoint(folders[family, mode], family, mode)
        return folders[family, mode]

    return build


def save_checkpoint(folder: Path, family: str, pooling: str) -> None:
    class_name, options = FAMILIES[family]
    config = getattr(transformers, class_name)(**options)
    torch.manual_seed(7)
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    pad_token_id = options["pad_token_id"]
    words = {f"w{index}": index for index in range(VOCAB_SIZE)}
    del words[f"w{pad_token_id}"]
    words["<pad>"] = pad_token_id
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w5"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="w5", model_max_length=MAX_TOKENS
    ).save_pretrained(folder)
    modules = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling"), ("2", "2_Normalize", "Normalize")]
    write_json(
        folder / "modules.json",
        [
            {"idx": int(name), "name": name, "path": path, "type": f"sentence_transformers.models.{kind}"}
            for name, path, kind in modules
        ],
    )
    (folder / "1_Pooling").mkdir()
    write_json(folder / "1_Pooling" / "config.json", {"embedding_dimension": 32, "pooling_mode": pooling})


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture
def one_at_a_time() -> Callable[[Path, list[NDArray[np.int32]]], NDArray[np.float32]]:
    """Return the oracle: sentence-transformers itself, one row per call, with the model's ordinary attention."""

    def run(folder: Path, rows: list[NDArray[np.int32]]) -> NDArray[np.float32]:
        pipeline = SentenceTransformer(str(folder), device="cpu", local_files_only=True).eval()
        values = []
        with torch.inference_mode():
            for row in rows:
                token_ids = torch.from_numpy(row).long()[None]
                features = {"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids)}
                values.append(pipeline(features)["sentence_embedding"].numpy())
        return np.concatenate(values)

    return run


@pytest.fixture
def rows() -> Callable[..., list[NDArray[np.int32]]]:
    """Return a function that draws rows of the given lengths from ids that are nobody's special token."""

    def draw(*lengths: int) -> list[NDArray[np.int32]]:
        generator = np.random.default_rng(sum(lengths))
        return [generator.integers(6, VOCAB_SIZE, length).astype(np.int32) for length in lengths]

    return draw
