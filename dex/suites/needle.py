"""Needles in a haystack: numbers hidden in running text, asked for at depths and lengths."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import model_validator

from dex.settings import Problem, YesNo, choice, clash, distinct, text, whole
from dex.suites.base import Outcome, Suite

if TYPE_CHECKING:
    from dex.evaluation.answers import Answers
    from dex.evaluation.evaluated import Evaluated

Prompting = Literal["base", "chat"]
GRID_PLOT, ATTENTION_PLOT = "grid.png", "attention.png"


class Needle(Suite):
    what: ClassVar[str] = "which asks for needles in haystacks"
    which_items: ClassVar[tuple[str, ...]] = ("lengths", "depths", "samples", "seed", "plot", "attention")

    name: Literal["needle"] = "needle"
    lengths: Annotated[list[Annotated[int, whole(above=0)]], distinct("a list of different lengths in tokens")] = [
        1024,
        2048,
        4096,
    ]
    depths: Annotated[
        list[Annotated[int, whole(at_least=0, at_most=100)]], distinct("a list of different percents")
    ] = [
        0,
        25,
        50,
        75,
        100,
    ]
    needles: Annotated[int, whole(above=0)] = 8  # in each haystack
    queries: Annotated[int, whole(above=0)] = 1  # of them that are asked, each for itself
    samples: Annotated[int, whole(above=0)] = 3  # haystacks for each depth of each length
    seed: Annotated[int, whole(at_least=0)] = 0
    filler: Annotated[str, text()] = "pydoc"  # or other text: a file, a folder, a Hub data set, stdlib
    prompting: Annotated[Prompting, choice(Prompting)] = "base"
    max_new_tokens: Annotated[int, whole(above=0)] = 32
    attention: YesNo = False  # also how much of it goes to the answer and to noise, by layer and head
    plot: YesNo = True

    @model_validator(mode="after")
    def _enough_needles(self) -> Needle:
        if self.queries > self.needles:
            sentence = f"queries {self.queries} is more than needles {self.needles}; ask for as many as there are"
            raise clash([Problem(("queries",), sentence)])
        return self

    def check(self) -> None:
        from dex.data.sources import Source, is_local, pin, read_documents
        from dex.plots import check_matplotlib

        source = pin(Source(self.filler))
        if is_local(source):
            next(read_documents(source))
        if self.plot:
            check_matplotlib()

    def inputs(self) -> dict[str, Any]:
        from dex.data.sources import Source, identity, is_local

        source = Source(self.filler)
        return {self.filler: identity(source)} if is_local(source) else {}

    def run(self, evaluated: Evaluated, answers: Answers) -> Outcome:
        from dex.attention_maps import is_signed
        from dex.evaluation import needle

        needle.check_context(evaluated, self.lengths, self.max_new_tokens)
        wording = needle.wording_of(evaluated, self.prompting)
        filler, source = needle.filler_of(self.filler, evaluated, max(self.lengths))
        grid = needle.Grid(self.lengths, self.depths, self.needles, self.queries, self.samples, self.seed)
        items = needle.items_of(grid, filler, wording, evaluated)
        asking = needle.Asking(wording, self.max_new_tokens, self.attention)
        found = needle.ask(items, evaluated, asking, answers)
        records = needle.records_of(items, found, self.prompting)
        figures: dict[str, Any] = {
            "grid": needle.grid_of(records, grid),
            "filler": needle.about_filler(filler, max(self.lengths)),
        }
        if self.attention:
            figures["attention"] = needle.attention_of(found, records, grid, is_signed(evaluated.model))
        return Outcome(
            needle.tasks_of(self.lengths),
            records,
            figures,
            needle.what_decides(source, evaluated),
            files=(lambda folder: _draw(figures, evaluated.label, folder)) if self.plot else None,
        )


def _draw(figures: dict[str, Any], label: str, folder: Path) -> None:
    from dex.plots.heat_map import draw_heat_map

    grid = figures["grid"]
    draw_heat_map(
        grid["retrieved"],
        ("depth, %", grid["depths"]),
        ("tokens", grid["lengths"]),
        f"{label}: needles retrieved",
        folder / GRID_PLOT,
        (0.0, 1.0),
    )
    if "attention" in figures:
        mass = figures["attention"]["by_head"]["answer"]
        draw_heat_map(
            mass,
            ("layer", range(len(mass))),
            ("head", range(len(mass[0]))),
            f"{label}: attention to the answer",
            folder / ATTENTION_PLOT,
        )
