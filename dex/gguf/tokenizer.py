"""A tokenizer in GGUF's terms: tokens, their types, merges or scores, and which pre-tokenizer of llama.cpp it needs.

llama.cpp splits text by code of its own, chosen by a name (`tokenizer.ggml.pre`). The name is found by comparing the
tokenizer's own pre-tokenizer with those that stand behind the names; one that is none of them is refused, because a
wrong name gives other tokens without a word.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import gguf
import jinja2
from tokenizers import models
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from dex.errors import DexError
from dex.gguf.sentencepiece import space_rule, token_scores

Step = tuple[Any, ...]  # of a pre-tokenizer: its type and what it is set to

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES: Step = ("ByteLevel", False)  # no regex of its own
_GPT2: Step = ("ByteLevel", True)
PRE_TOKENIZERS: dict[tuple[Step, ...], str] = {
    (("Split", _WORDS + r"|\p{N}{1,3}" + _REST), _BYTES): "llama-bpe",
    (("Split", _WORDS + r"|\p{N}" + _REST), _BYTES): "qwen2",
    (("Digits", True), _GPT2): "smollm",
    (_GPT2,): "gpt-2",
}
WHOLE_WORDS_FIRST = "llama-bpe"  # for this name llama.cpp takes a word that is a token whole, whatever the merges say

_JINJA = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])  # parses only; transformers has these too
_GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")

NFC_NOTE = "llama.cpp does not normalise text to NFC as this tokenizer does: decomposed letters become other tokens"


@dataclass(frozen=True)
class Vocabulary:
    """What is written of a tokenizer. `special`: the ids of bos, eos, eot, eom, unk and pad that there are.

    `notes`: where llama.cpp cannot follow the tokenizer, in words.
    """

    model: str  # "gpt2": byte-level BPE; "llama": SentencePiece
    pre: str
    tokens: list[str]
    types: list[int]
    special: dict[str, int]
    add_bos: bool
    add_eos: bool
    chat_template: str | dict[str, str] | None
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    add_space_prefix: bool = False
    notes: tuple[str, ...] = ()


def read_vocabulary(
    tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, ends: list[int], model: str
) -> Vocabulary:
    """The tokenizer of a model in GGUF's terms. `ends`: the end-of-text tokens of its generation_config.json.

    Raises DexError for a tokenizer that llama.cpp would run differently.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise DexError(f"The tokenizer of {model} has no tokenizer.json; save it with transformers' fast tokenizer.")
    parts = json.loads(backend.to_str())
    _refuse_unusual(parts, model)
    _refuse_templates(tokenizer.chat_template, model)
    tokens, types = _tokens(tokenizer, parts, config.vocab_size, model)
    add_bos, add_eos = _added_ends(tokenizer, model)
    common: dict[str, Any] = {
        "tokens": tokens,
        "types": types,
        "special": _special_ids(tokenizer, config, ends, model),
        "add_bos": add_bos,
        "add_eos": add_eos,
        "chat_template": tokenizer.chat_template,
    }
    if parts["model"]["byte_fallback"]:
        add_space, notes = space_rule(parts, model)
        scores = token_scores(parts["model"], tokens, types, model)
        return Vocabulary("llama", "default", **common, scores=scores, add_space_prefix=add_space, notes=notes)
    pre = _pre_tokenizer(parts, model)
    _check_whole_words(parts, pre, model)
    notes = (NFC_NOTE,) if parts["normalizer"] else ()
    return Vocabulary("gpt2", pre, **common, merges=_merges(parts["model"], model), notes=notes)


def write_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    for name, token_id in vocabulary.special.items():
        getattr(writer, f"add_{name}_token_id")(token_id)
    writer.add_add_bos_token(vocabulary.add_bos)
    writer.add_add_eos_token(vocabulary.add_eos)
    writer.add_add_space_prefix(vocabulary.add_space_prefix)
    template = vocabulary.chat_template
    if isinstance(template, dict):
        writer.add_chat_template([{"name": name, "template": text} for name, text in template.items()])
    elif template:
        writer.add_chat_template(template)


def _refuse_unusual(parts: dict[str, Any], model: str) -> None:
    """Settings of `tokenizers` that llama.cpp has no counterpart of."""
    bpe = parts["model"]
    if bpe["type"] != "BPE":
        raise DexError(f"The tokenizer of {model} is {bpe['type']}, and dex exports BPE alone.")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if bpe.get(name):
            raise DexError(f"The tokenizer of {model} has {name} {bpe[name]!r}, which llama.cpp does not know.")
    for token in parts["added_tokens"]:
        set_ = [name for name in ("single_word", "lstrip", "rstrip") if token[name]]
        if set_:
            raise DexError(
                f"The token {token['content']!r} of {model} has {set_[0]} set, which llama.cpp does not do; its text "
                "would become other tokens."
            )


def _refuse_templates(given: str | dict[str, str] | None, model: str) -> None:
    """Raise DexError for a chat template that nothing can use; `generation` marks text for training alone."""
    for template in given.values() if isinstance(given, dict) else [given or ""]:
        if "\0" in template:
            raise DexError(f"The chat template of {model} has a NUL character in it; mend it, or remove it.")
        try:
            _JINJA.parse(_GENERATION.sub("", template))
        except jinja2.TemplateSyntaxError as error:
            reason = f"line {error.lineno}: {error.message}".rstrip(".")
            raise DexError(f"The chat template of {model} is none ({reason}); mend it, or remove it.") from error


def _tokens(
    tokenizer: PreTrainedTokenizerBase, parts: dict[str, Any], size: int, model: str
) -> tuple[list[str], list[int]]:
    """Token and type of every row of the embedding; rows beyond the tokenizer are padding, and unused."""
    by_id = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    if max(by_id) >= size:
        raise DexError(
            f"The tokenizer of {model} has the token {by_id[max(by_id)]!r} with id {max(by_id)}, and the embedding "
            f"has {size} rows; resize the embedding to the tokenizer."
        )
    added = {token["id"]: token["special"] for token in parts["added_tokens"]}
    unknown, has_bytes = tokenizer.unk_token_id, parts["model"]["byte_fallback"]
    bytes_ = {f"<0x{byte:02X}>" for byte in range(256)} if has_bytes else set()
    kinds = gguf.TokenType
    tokens, types = [], []
    for token_id in range(size):
        token = by_id.get(token_id, f"[PAD{token_id}]")
        if token_id not in by_id:
            kind = kinds.UNUSED
        elif token in bytes_:
            kind = kinds.BYTE
        elif has_bytes and token_id == unknown:
            kind = kinds.UNKNOWN
        elif token_id in added:
            kind = kinds.CONTROL if added[token_id] else kinds.USER_DEFINED
        else:
            kind = kinds.NORMAL
        tokens.append(token)
        types.append(int(kind))
    return tokens, types


def _pre_tokenizer(parts: dict[str, Any], model: str) -> str:
    """llama.cpp's name of it."""
    normalizer = parts["normalizer"]
    if normalizer is not None and normalizer["type"] != "NFC":
        raise DexError(f"The tokenizer of {model} normalises text ({normalizer['type']}), which llama.cpp does not.")
    steps = tuple(_steps(parts["pre_tokenizer"]))
    if steps not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS.values())
        raise DexError(
            f"The pre-tokenizer of {model}, {_words(steps)}, is none that dex knows llama.cpp's name of ({known}); "
            "serve the folder with transformers or vLLM."
        )
    return PRE_TOKENIZERS[steps]


def _steps(part: dict[str, Any] | None) -> list[Step]:
    """A pre-tokenizer as a list of what it does, without what changes no token."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for each in part["pretokenizers"] for step in _steps(each)]
    if part["type"] == "ByteLevel" and not part["add_prefix_space"]:
        return [("ByteLevel", part["use_regex"])]
    if (
        part["type"] == "Split"
        and part["behavior"] == "Isolated"
        and not part["invert"]
        and "Regex" in part["pattern"]
    ):
        return [("Split", part["pattern"]["Regex"])]
    if part["type"] == "Digits":
        return [("Digits", part["individual_digits"])]
    return [(part["type"], json.dumps(part, sort_keys=True))]


def _words(steps: tuple[Step, ...]) -> str:
    return " then ".join(f"{name} {str(setting)[:60]!r}" for name, setting in steps) or "which does nothing"


def _check_whole_words(parts: dict[str, Any], pre: str, model: str) -> None:
    """Whether a word that is a token is taken whole is llama.cpp's own choice by name: refuse where it matters."""
    bpe = parts["model"]
    if bpe["ignore_merges"] == (pre == WHOLE_WORDS_FIRST):
        return
    merging = models.BPE(bpe["vocab"], [tuple(pair) for pair in bpe["merges"]])
    for token in bpe["vocab"].keys() - {token["content"] for token in parts["added_tokens"]}:
        if len(merging.tokenize(token)) != 1:
            raise DexError(
                f"The tokenizer of {model} has ignore_merges {str(bpe['ignore_merges']).lower()}, and llama.cpp the "
                f"opposite for {pre}: the word {token!r} would become other tokens."
            )


def _merges(bpe: dict[str, Any], model: str) -> list[str]:
    if not bpe["merges"]:
        raise DexError(f"The tokenizer of {model} has no merges, and llama.cpp reads no byte-level BPE without one.")
    return [f"{left} {right}" for left, right in bpe["merges"]]


def _added_ends(tokenizer: PreTrainedTokenizerBase, model: str) -> tuple[bool, bool]:
    """Whether a text gets a bos before and an eos behind it."""
    plain = tokenizer("a", add_special_tokens=False).input_ids
    whole = tokenizer("a").input_ids
    for before in ([], [tokenizer.bos_token_id]):
        for behind in ([], [tokenizer.eos_token_id]):
            if whole == [*before, *plain, *behind]:
                return bool(before), bool(behind)
    raise DexError(f"The tokenizer of {model} adds tokens to a text other than bos and eos, which GGUF cannot say.")


def _special_ids(
    tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, ends: list[int], model: str
) -> dict[str, int]:
    """Ids by GGUF's names. Generation ends at eos, eot and eom: three places for what transformers lists."""
    ends = _own_first(tokenizer, ends or _listed(config.eos_token_id))
    if not ends:
        raise DexError(
            f"{model} names no end-of-text token, and llama.cpp would take token 11 for it; set eos_token in its "
            "tokenizer_config.json."
        )
    if len(ends) > 3:
        raise DexError(f"{model} ends a text at {len(ends)} tokens, and GGUF has places for three; shorten the list.")
    found = dict(zip(("eos", "eot", "eom"), ends, strict=False))
    bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else config.bos_token_id
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else config.pad_token_id
    others = {"bos": bos, "unk": tokenizer.unk_token_id, "pad": pad}
    found |= {name: token_id for name, token_id in others.items() if token_id is not None}
    outside = [name for name, token_id in found.items() if not _is_id(token_id, config.vocab_size)]
    if outside:
        raise DexError(f"The {outside[0]} token of {model} is {found[outside[0]]!r}, which its vocabulary has not.")
    return found


def _is_id(token_id: object, size: int) -> bool:
    return isinstance(token_id, int) and 0 <= token_id < size


def _own_first(tokenizer: PreTrainedTokenizerBase, ends: list[int]) -> list[int]:
    """The tokens that generation stops at, each once, the tokenizer's own eos first if it is one."""
    own = tokenizer.eos_token_id
    first = [own] if own is not None and (own in ends or not ends) else []
    return list(dict.fromkeys([*first, *ends]))


def _listed(ids: int | list[int] | None) -> list[int]:
    return [ids] if isinstance(ids, int) else list(ids or ())
