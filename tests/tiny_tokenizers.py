"""Tiny tokenizers with the pre-tokenizers of real families, trained on a few lines so that they have merges."""

from __future__ import annotations

from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

TEXT = [
    "The capital of France is Paris, isn't it? I'LL say so 1234 times.",
    "def mean(numbers):\n    return sum(numbers) / len(numbers)\n\n\n",
    "Zwölf Boxkämpfer jagen Viktor über den großen Sylter Deich.",
    "她说：你好，世界！ 한국어 1 12 123 1234   Привет",
] * 3
VOCAB = 384  # tokens that are trained, with the 256 bytes; four added ones follow
ADDED = ("<bos>", "<eos>", "<pad>", "<|user|>")
TEMPLATE = "{% for message in messages %}<|user|>{{ message['content'] }}<eos>{% endfor %}"

# As the files of Llama 3, Qwen 2 and SmolLM have them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")


def split_by(regex: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(regex), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def byte_level(kind: str, adds_bos: bool = False, ignore_merges: bool | None = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE of a kind: llama-bpe, qwen2, smollm or gpt-2."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama-bpe" if ignore_merges is None else ignore_merges))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = {
        "llama-bpe": split_by(LLAMA3),
        "qwen2": split_by(QWEN2),
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain]),
        "gpt-2": plain,
    }[kind]
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return _wrapped(tokenizer, adds_bos)


def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama 2's: spaces are ▁, unknown characters fall back to bytes, merges come from ranked tokens."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(TEXT[:2], trainers.BpeTrainer(vocab_size=120, show_progress=False))
    learned = sorted(trained.get_vocab(), key=lambda token: (len(token) == 1, trained.token_to_id(token)))
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *bytes_, *learned])}
    scores = {token: -float(index) for index, token in enumerate(learned)}
    model = models.BPE(vocab, generate_merges(vocab, scores), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = trained.normalizer
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(strip)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _wrapped(tokenizer: Tokenizer, adds_bos: bool) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ADDED])
    if adds_bos:
        bos = ("<bos>", tokenizer.token_to_id("<bos>"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[bos]
        )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    wrapped.chat_template = TEMPLATE
    return wrapped
