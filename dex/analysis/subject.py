"""What a section of `dex analyze` works on: a loaded model, the texts it reads, and the settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from dex.analysis.records import FirstToken, Signs
from dex.attention_maps import is_signed, unwrapped
from dex.evaluation.evaluated import Evaluated
from dex.settings import Block, YesNo, choice, number, text, whole
from dex.settings_file import SettingsFile


class Settings(Block):
    """The settings of `dex analyze`; each is an option of the command line."""

    data: Annotated[str, text()] = "pydoc"
    sequences: Annotated[int, whole(above=0)] = 8
    length: Annotated[int, whole(above=1)] = 512
    held_out: Annotated[float, number(at_least=0, below=1)] = 0.1  # read these documents alone; 0: all
    span: Annotated[str | None, text(null=True)] = None  # the answer; without it, needles in a haystack
    signs: Annotated[Signs, choice(Signs)] = "renormalised"  # of DIFF maps, where a statistic needs a distribution
    count_first_token: YesNo = True
    threshold: Annotated[float, number(at_least=1e-9, below=1)] = 1e-3  # weights below it are sparse
    seed: Annotated[int, whole(at_least=0)] = 0

    @property
    def first_key(self) -> int:
        """The first key whose entries count."""
        return 0 if self.count_first_token else 1

    @property
    def first_token(self) -> FirstToken:
        return "counted" if self.count_first_token else "left out"


SETTINGS = SettingsFile(Settings, "analysis")


@dataclass(frozen=True)
class Passage:
    """A text with an answer in it: its ids, where the answer stands, and which queries are asked about it."""

    ids: list[int]
    span: tuple[int, int]
    queries: list[int]  # ascending positions, all behind the span


@dataclass(frozen=True)
class Subject:
    """`ids`: the text, [N, T]. `passages`: texts with an answer. `path`: what was named, a folder or a Hub id.

    Padded rows, which only tests have, come with an `attention_mask` [N, T].
    """

    evaluated: Evaluated
    path: str
    settings: Settings
    ids: Tensor
    passages: list[Passage]
    attention_mask: Tensor | None = None

    @property
    def model(self) -> Any:
        return self.evaluated.model

    @property
    def stock(self) -> Any:
        """The transformers model, with the adapter in it if there is one."""
        return unwrapped(self.model)

    @property
    def layers(self) -> Any:
        return self.stock.get_decoder().layers

    @property
    def signed(self) -> bool:
        return is_signed(self.model)

    @property
    def num_heads(self) -> int:
        """Heads whose outputs `o_proj` reads; DIFF V1 and DiffLlama make one of two query heads."""
        heads = int(self.stock.config.num_attention_heads)
        return heads // 2 if self.stock.config.model_type in ("diff_v1", "diffllama") else heads

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """The text, as many rows at a time as `evaluated.batch_size` says."""
        for start in range(0, len(self.ids), self.evaluated.batch_size):
            rows = slice(start, start + self.evaluated.batch_size)
            batch = {"input_ids": self.ids[rows]}
            if self.attention_mask is not None:
                batch["attention_mask"] = self.attention_mask[rows]
            yield batch


Progress = Callable[[int, int], None]  # done, of how many; a section calls it after each piece of work
