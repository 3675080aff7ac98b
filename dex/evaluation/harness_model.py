"""The model as lm-evaluation-harness wants it: its own HFLM, whose answers are ours and are kept.

The harness makes the prompts, tokenises them and scores; the forward passes are `dex.evaluation.likelihood`'s.
Importing this file needs the package lm-eval.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from dex.errors import DexError
from dex.evaluation.answers import Answers, answer_all
from dex.evaluation.evaluated import Evaluated
from dex.evaluation.likelihood import Request, log_likelihoods
from dex.evaluation.records import prompt_hash


class HarnessModel(HFLM):
    """Every process asks everything, and `answer_all` shares it out: to the harness there is one process."""

    def __init__(self, evaluated: Evaluated, answers: Answers) -> None:
        if evaluated.tokenizer.eos_token_id is None:
            raise DexError(
                f"The tokenizer of {evaluated.label} has no EOS token, which the harness needs; set eos_token in its "
                "tokenizer_config.json."
            )
        super().__init__(
            pretrained=evaluated.model,
            backend="causal",
            tokenizer=copy.deepcopy(evaluated.tokenizer),  # the harness may give it a padding token
            batch_size=evaluated.batch_size,
            max_length=evaluated.context,
            enable_thinking=False,  # short answers would end before they begin
        )
        self.label, self.answers = evaluated.label, answers
        self.truncated = 0  # prompts that lost their beginning

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], *_: Any, **__: Any
    ) -> list[tuple[float, bool]]:
        asked = [Request(tuple(context), tuple(continuation)) for _, context, continuation in requests]
        self.truncated += sum(len(a.context) + len(a.continuation) > self.max_length + 1 for a in asked)
        found = log_likelihoods(self.model, asked, self.max_length, self.batch_size, self.answers, self.label)
        return [(each.log_likelihood, each.is_greedy) for each in found]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, in windows of the model's length; all windows of all texts at once."""
        windows, counts = [], []
        for request in requests:
            of_text = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
            own = [(None, *make_disjoint_window(window)) for window in of_text]
            windows += own
            counts.append(len(own))
        found = iter(self._loglikelihood_tokens(windows))
        return [sum(next(found)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The harness' own generation, in batches of prompts of about one length.

        What is sampled is drawn for each prompt alone, from a seed of its own: no answer depends on the batch size.
        """
        options = [json.dumps(request.args[1], sort_keys=True) for request in requests]
        lengths = [len(self.tok_encode(request.args[0])) for request in requests]
        self._refuse_no_room(requests, lengths)
        keys = _keys([request.args[0] for request in requests], options)
        batches = []
        for kind in dict.fromkeys(options):
            own = sorted((i for i, each in enumerate(options) if each == kind), key=lambda i: -lengths[i])
            size = 1 if json.loads(kind).get("do_sample") else self.batch_size
            batches += [own[start : start + size] for start in range(0, len(own), size)]
        return answer_all(
            keys, batches, lambda batch: self._generated(batch, requests, keys), self.answers, self.label
        )

    def _generated(self, batch: Sequence[int], requests: list[Any], keys: Sequence[str]) -> list[str]:
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(int(keys[batch[0]].rsplit("-", 1)[-1], 16) % 2**63)
            found: list[str] = super().generate_until([requests[i] for i in batch], disable_tqdm=True)
        return found

    def _refuse_no_room(self, requests: list[Any], lengths: Sequence[int]) -> None:
        for request, length in zip(requests, lengths, strict=True):
            tokens = normalize_gen_kwargs(request.args[1], self.max_gen_toks)["max_gen_toks"]
            if tokens >= self.max_length:
                raise DexError(
                    f"An answer of up to {tokens:,} tokens leaves no room for its prompt in {self.label}, which "
                    f"holds {self.max_length:,}; set max_tokens."
                )
            self.truncated += length > self.max_length - tokens


def _keys(prompts: Sequence[str], options: Sequence[str]) -> list[str]:
    """One for each answer; a prompt that is asked several times, to sample, has as many."""
    seen: Counter[tuple[str, str]] = Counter()
    keys = []
    for asked in zip(prompts, options, strict=True):
        sampled = json.loads(asked[1]).get("do_sample")
        keys.append(f"answer-{prompt_hash(*asked, str(seen[asked] if sampled else 0))}")
        seen[asked] += 1
    return keys
