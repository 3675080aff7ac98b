"""Many-shot classification at increasing shots, and its spread over the demonstrations' order."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, model_validator

from dex.settings import Problem, clash, distinct, expected, text, whole
from dex.suites.base import Outcome, Suite

if TYPE_CHECKING:
    from dex.evaluation.answers import Answers
    from dex.evaluation.evaluated import Evaluated
    from dex.evaluation.labelled import Labelled

OF_THE_HUB = ("config", "split", "test_split", "revision")
PLOT = "shots.png"


def _increasing(values: list[int]) -> list[int]:
    if not values or any(a >= b for a, b in pairwise(values)):
        raise expected("an increasing list of whole numbers above 0")
    return values


class Manyshot(Suite):
    what: ClassVar[str] = "which classifies texts after many labelled examples"
    which_items: ClassVar[tuple[str, ...]] = ("shots", "length", "seeds", "orderings", "items", "items_seed")

    name: Literal["manyshot"] = "manyshot"
    data: Annotated[str, text()]  # trec, trec-fine, banking77, clinic150, another Hub id, or a .jsonl file
    test: Annotated[str | None, text(null=True)] = None  # a .jsonl file; null: the data's own test split, or a part
    text_column: Annotated[str | None, text(null=True)] = None  # null: the data set's own, or text and label
    label_column: Annotated[str | None, text(null=True)] = None
    names: Annotated[list[Annotated[str, text()]] | None, distinct("a list of different names", at_least=2)] = None
    config: Annotated[str | None, text(null=True)] = None  # these four are a Hub data set's
    split: Annotated[str, text()] = "train"
    test_split: Annotated[str, text()] = "test"
    revision: Annotated[str | None, text(null=True)] = None
    shots: Annotated[list[Annotated[int, whole(above=0)]], AfterValidator(_increasing)] = [4, 16, 64]
    length: Annotated[int | None, whole(above=0, null=True)] = None  # tokens; what is longer is left out, and said
    seeds: Annotated[int, whole(above=0)] = 3  # of the demonstrations
    orderings: Annotated[int, whole(above=0)] = 3  # random ones of each; sorted by label comes besides
    items: Annotated[int, whole(above=0)] = 100  # that are asked
    items_seed: Annotated[int, whole(at_least=0)] = 0  # which draws them

    @model_validator(mode="after")
    def _test_from_one_place(self) -> Manyshot:
        if self.test is not None and "test_split" in self.model_fields_set:
            raise clash([Problem(("test_split",), "test_split has no effect beside test; leave one of them out")])
        return self

    def check(self) -> None:
        from dex.data.sources import Source, is_local
        from dex.errors import DexError
        from dex.evaluation.labelled import KNOWN
        from dex.plots import check_matplotlib

        check_matplotlib()
        for file in (self.data, self.test):
            if file is not None and is_local(Source(file)) and not Path(file).expanduser().is_file():
                raise DexError(f"{file} does not exist; give a .jsonl file, a Hub id, or one of {', '.join(KNOWN)}.")
        if is_local(Source(self.data)):
            idle = [key for key in OF_THE_HUB if key in self.model_fields_set]
        else:
            idle = [
                key
                for key in ("text_column", "label_column", "config")
                if self.data in KNOWN and key in self.model_fields_set
            ]
        if idle:
            raise DexError(f"{idle[0]} has no effect with the data {self.data}; leave it out.")

    def inputs(self) -> dict[str, Any]:
        from dex.data.sources import Source, is_local
        from dex.evaluation.inputs import file_hashes

        named = [file for file in (self.data, self.test) if file is not None and is_local(Source(file))]
        return file_hashes(Path(file).expanduser() for file in named)

    def run(self, evaluated: Evaluated, answers: Answers) -> Outcome:
        from dex.evaluation import manyshot
        from dex.plots.manyshot import draw_shots

        data = self._labelled()
        asked = manyshot.asked_of(data, evaluated.tokenizer, self.shots, self.seeds, self.orderings)
        asked, left_out = manyshot.fitting(asked, self.length, evaluated.context, evaluated.label)
        records = manyshot.classify(evaluated, asked, data, answers)
        figures = manyshot.figures_of(records, asked, left_out)
        title = f"{evaluated.label} on {Path(self.data).name}"
        return Outcome(
            manyshot.tasks_of(asked),
            records,
            figures,
            data.identity,
            files=lambda folder: draw_shots(figures["spread"], title, folder / PLOT),
        )

    def _labelled(self) -> Labelled:
        from dex.data.sources import Source, is_local
        from dex.evaluation.labelled import KNOWN, Known, read_labelled

        known = KNOWN.get(self.data) or Known(
            self.data, self.text_column or "text", self.label_column or "label", self.config
        )
        own_split = self.test is None and not is_local(Source(known.id))
        return read_labelled(
            known.id,
            self.test,
            known.text,
            known.label,
            self.names,
            config=known.config,
            split="train" if is_local(Source(known.id)) else self.split,
            test_split=self.test_split if own_split else None,
            revision=self.revision,
            items=self.items,
            seed=self.items_seed,
        )
