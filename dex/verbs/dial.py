"""`dex dial ADAPTER -o OUT`: the loss on held-out text with S·λ in place of λ, against the scale S.

One model is loaded; every scale sees the same blocks, and is compared with scale 1, as trained: paired differences
with intervals over documents, and tests that Holm's adjustment holds for all scales together. `dex fold
--lambda-scale S` makes a checkpoint of a scale.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dex.adapter import is_adapter, read_adapter_config
from dex.console import say
from dex.data import HeldOut, HeldOutBlock
from dex.environment import environment
from dex.errors import DexError
from dex.evaluation.comparison import LEVEL, Difference, compare_results
from dex.evaluation.evaluated import Evaluated, load_evaluated
from dex.evaluation.held_out import TASK, Blocks, check_context, held_out_losses, held_out_result
from dex.evaluation.paired import Interval
from dex.evaluation.records import Result
from dex.evaluation.tables import interval, markdown, p_value, terminal
from dex.lock import LOCK, Lock, read_lock
from dex.models import use_chat_template
from dex.output import refuse_output_over, refuse_to_overwrite, whole_folder, write_json, write_whole
from dex.plots import check_matplotlib
from dex.plots.dial import draw
from dex.recipe import Recipe, load_recipe, parse_recipe
from dex.recipe_yaml import yaml_lines
from dex.run_data import held_out_blocks, prepare_data
from dex.run_folder import RECIPE
from dex.tuner.callback import INERT_BELOW, BranchRatios, lams
from dex.tuner.scaling import check_scales, scale_lambda, scale_name

SCHEMA = 1
DIAL, TABLE, CURVE = "dial.json", "dial.md", "dial.png"
SCALES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)


@dataclass(frozen=True)
class Point:
    """One scale. `branch_ratio` is the mean of ‖S λ f_D(O)‖/‖O‖; `against_one` is None for scale 1 itself."""

    scale: float
    loss: Interval
    branch_ratio: float
    against_one: Difference | None

    def to_dict(self) -> dict[str, Any]:
        against = self.against_one.to_dict() if self.against_one else {}
        kept = {key: against[key] for key in ("difference", "test", "p", "p_adjusted", "verdict") if against}
        return {"scale": self.scale, "loss": self.loss._asdict(), "branch_ratio": self.branch_ratio, **kept}


@dataclass(frozen=True)
class Dial:
    """The curve, by rising scale, and what it was measured on."""

    adapter: dict[str, Any]  # which it is, as a result of `dex eval` says it
    recipe: str  # where the recipe came from whose held-out part it is
    held_out: dict[str, Any]
    lam: list[float]  # of every adapted layer, as trained
    points: list[Point]

    @property
    def best(self) -> Point:
        return min(self.points, key=lambda point: point.loss.mean)

    @property
    def trained(self) -> Point:
        return next(point for point in self.points if point.scale == 1.0)

    def to_dict(self) -> dict[str, Any]:
        """What dial.json holds."""
        return {
            "schema": SCHEMA,
            "adapter": self.adapter,
            "recipe": self.recipe,
            "held_out": self.held_out,
            "lam": self.lam,
            "difference": "mean loss at the scale − mean loss at scale 1, on the same blocks",
            "interval": "95 % percentile bootstrap over documents, 10 000 draws, seed 0",
            "adjustment": "Holm, over the scales other than 1",
            "level": LEVEL,
            "points": [point.to_dict() for point in self.points],
            "best": self.best.scale,
            "words": self._words(),
            "environment": environment(),
        }

    def describe(self) -> str:
        """What is printed."""
        return terminal(*self._cells()) + "\n".join(self._words())

    def _repr_markdown_(self) -> str:
        """What a notebook shows, and dial.md holds."""
        return f"{markdown(*self._cells())}\n" + "".join(f"* {line}\n" for line in self._words())

    def write(self, output: Path, force: bool = False) -> None:
        """Write dial.json, dial.md and, where matplotlib is installed, dial.png into a folder, whole."""
        with whole_folder(output, force, made_here=DIAL) as folder:
            try:
                check_matplotlib()
            except DexError as error:
                say(f"no {CURVE}: {error}")
            else:
                draw([(point.scale, point.against_one) for point in self.points], folder / CURVE)
            write_whole(folder / TABLE, self._repr_markdown_())
            write_json(folder / DIAL, self.to_dict())

    def _cells(self) -> tuple[list[str], list[list[str]], int]:
        header = ["S", "loss [95 %]", "difference from S = 1 [95 %]", "p", "Holm's p", "branch ratio", "verdict"]
        rows = []
        for point in self.points:
            each, figures = point.against_one, [scale_name(point.scale), interval(point.loss)]
            if each is None:
                tested = ["", "", "", f"{point.branch_ratio:.1e}", "as trained"]
            else:
                difference = interval(each.difference, self._digits(), sign=True)
                tested = [difference, p_value(each.p), p_value(each.p_adjusted), f"{point.branch_ratio:.1e}"]
                tested.append(each.verdict)
            rows.append([*figures, *tested])
        return header, rows, 0

    def _digits(self) -> int:
        """Of the differences: those of a nearly inert branch are some 1e-5 nats, and can still be told from 0."""
        sizes = [abs(point.against_one.difference.mean) for point in self.points if point.against_one]
        return 4 if max(sizes) >= 1e-3 else 6

    def _words(self) -> list[str]:
        words = [f"{self.held_out['targets']:,} targets in {self.held_out['documents']} documents, of {self.recipe}"]
        if self.trained.branch_ratio < INERT_BELOW:
            words.append(
                f"the branch is inert as trained (mean ratio {self.trained.branch_ratio:.1e}): there is nearly "
                "nothing to turn up or down, and a flat curve says no more than that"
            )
        return [*words, self._best_in_words(), *self._warning()]

    def _best_in_words(self) -> str:
        best, each = self.best, self.best.against_one
        if each is None:
            return "the lowest loss is at S = 1, as trained"
        difference = interval(each.difference, self._digits(), sign=True)
        lower = f"{-100 * math.expm1(each.difference.mean):.2g} %"
        lowest = (
            f"the lowest loss is at S = {scale_name(best.scale)}, {difference} from S = 1, a perplexity {lower} lower"
        )
        if each.p_adjusted is None:
            return f"{lowest}; one document cannot show whether that is more than chance"
        where = f"(Holm's p {p_value(each.p_adjusted)} over {len(self.points) - 1} scales)"
        if each.verdict == "better":
            return f"{lowest}: more than the difference between documents explains {where}"
        return f"{lowest}: within what these documents can show {where}, and no reason to leave S = 1"

    def _warning(self) -> list[str]:
        if self.best.against_one is None:
            return []
        return [
            "a scale that is chosen on this text looks better on it than it is: check it on other text, with "
            f"`dex fold --lambda-scale {scale_name(self.best.scale)}` and `dex eval`, before it is used"
        ]


def dial(
    adapter: str | Path,
    output: str | Path | None = None,
    *,
    recipe: Recipe | str | Path | None = None,
    scales: Sequence[float] = SCALES,
    batch_size: int = 4,
    force: bool = False,
) -> Dial:
    """The loss of an adapter's folder on held-out text with S·λ for its λ, at every scale S and at 1.

    recipe: whose held-out part it is; None: that of the adapter's dex.lock, or of the run that it lies in.
    batch_size: blocks in one forward pass; no loss depends on it. output: a folder for dial.json, .md and .png.

    Raises DexError, in one sentence, before any work where the adapter has no branch or the text is not known;
    nothing is written then.
    """
    adapter = str(adapter)
    if output is not None:
        refuse_to_overwrite(Path(output), force, made_here=DIAL)
        refuse_output_over(Path(output), adapter)
    if not is_adapter(adapter):
        raise DexError(f"{adapter} is not the folder of an adapter (no adapter_config.json); name a run's adapter/.")
    check_scales(scales, adapter, read_adapter_config(adapter))
    chosen = _with_one(scales)
    lock = read_lock(Path(adapter)) if recipe is None else None
    found, place = _recipe_of(Path(adapter), recipe, lock)
    say(f"the text is the held-out part of {place}")
    evaluated = load_evaluated(adapter, "", "auto", batch_size)
    held_out, blocks = _held_out_part(found, evaluated)
    if lock is not None:
        _refuse_other_text(lock, place, held_out)
    measured = [_at(scale, evaluated, held_out, blocks) for scale in chosen]
    made = Dial(
        adapter=evaluated.identity,
        recipe=place,
        held_out={
            "fingerprint": held_out.fingerprint,
            "documents": len({block.document for block in blocks}),
            "targets": sum(int(block.targets.sum()) for block in blocks),
        },
        lam=lams(evaluated.model),
        points=_points(chosen, measured),
    )
    if output is not None:
        made.write(Path(output), force)
    return made


def _with_one(scales: Sequence[float]) -> list[float]:
    """The scales by size, each once, and 1 among them."""
    chosen = sorted({float(scale) + 0.0 for scale in scales} | {1.0})
    if 1.0 not in scales:
        say("S = 1, as trained, is added: the others are compared with it")
    if len(chosen) < 2:
        raise DexError("S = 1 is the adapter as it is; give another scale to compare it with.")
    return chosen


def _recipe_of(adapter: Path, given: Recipe | str | Path | None, lock: Lock | None) -> tuple[Recipe, str]:
    """The recipe whose held-out part is meant, and where it is."""
    if isinstance(given, Recipe):
        return given, "the recipe that was given"
    if given is not None:
        return load_recipe(given), str(given)
    if lock is not None:
        place = str(adapter / LOCK)
        return parse_recipe("\n".join(yaml_lines(lock.recipe)), f"the recipe of {place}"), place
    beside = adapter.resolve().parent / RECIPE
    if beside.is_file():
        return load_recipe(beside), str(adapter.parent / RECIPE)
    raise DexError(
        f"Which text was held out from {adapter} is not known: it has no {LOCK}, and there is no {RECIPE} beside it; "
        "name the recipe with --recipe."
    )


def _refuse_other_text(lock: Lock, place: str, held_out: HeldOut) -> None:
    """What is held out of changed data may be what the adapter was trained on."""
    if lock.data.held_out != held_out.fingerprint:
        raise DexError(
            f"The data of {place} changed since: its held-out part is not the one that the run had, and may "
            "be text that was trained on; put the former data back, or name a recipe of other text with --recipe."
        )


def _held_out_part(recipe: Recipe, evaluated: Evaluated) -> tuple[HeldOut, list[HeldOutBlock]]:
    if recipe.model.chat_template is not None:
        use_chat_template(evaluated.tokenizer, Path(recipe.model.chat_template))
    prepared = prepare_data(recipe.data, evaluated.tokenizer, recipe.run.tokens)
    blocks = held_out_blocks(recipe.data, prepared)
    check_context(blocks, evaluated.context, str(evaluated.identity["id"]))
    return prepared.held_out, blocks


def _at(scale: float, evaluated: Evaluated, held_out: HeldOut, blocks: Blocks) -> tuple[Result, float]:
    """The losses at a scale, and the mean branch ratio over all of the text."""
    name = scale_name(scale)
    with scale_lambda(evaluated.model, scale), BranchRatios(evaluated.model) as ratios:
        losses = held_out_losses(evaluated.model, blocks, evaluated.batch_size, f"S = {name}")
    result = held_out_result(name, evaluated.identity, losses, blocks, held_out)
    if not math.isfinite(result.mean(TASK)):
        raise DexError(f"At S = {name} the model computes losses that are not finite; leave this scale out.")
    return result, statistics.fmean(ratios.mean())


def _points(scales: Sequence[float], measured: Sequence[tuple[Result, float]]) -> list[Point]:
    """Every scale against scale 1, all tests in one family."""
    one = scales.index(1.0)
    results = [result for result, _ in measured]
    [row] = compare_results([[results[one], *results[:one], *results[one + 1 :]]])
    against = {each.model: each for each in row.differences}
    return [
        Point(scale, result.score(TASK), ratio, against.get(result.label))
        for scale, (result, ratio) in zip(scales, measured, strict=True)
    ]
