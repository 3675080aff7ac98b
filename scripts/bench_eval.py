"""The benchmark of `dex eval`: one JSON line per figure.

    python scripts/bench_eval.py [--only lm] [--model MODEL] [--items 40] [--batch-size 4] [--repeats 3]

lm: the suite against lm-evaluation-harness' own HFLM, on one model, the same items of HellaSwag's shape (contexts of
40 words and four endings of 18, of Python's documentation) and at one batch size; the two alternate in one process.
How far their log-likelihoods are apart comes with it. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM

from bench_timing import alternate, figure, ratio
from dex.evaluation.answers import Answers
from dex.evaluation.evaluated import Evaluated, load_evaluated
from dex.evaluation.harness_tasks import TaskChoice, load_tasks
from dex.quiet import quiet_libraries
from dex.suites.lm import TASKS, Lm

TASK = "hellaswag"
WORDS_OF_CONTEXT, WORDS_OF_ENDING, ENDINGS = 40, 18, 4


def show(found: dict[str, Any]) -> None:
    print(json.dumps(found, ensure_ascii=False), flush=True)


# --- lm ----------------------------------------------------------------------------------------------------


def write_items(folder: Path, items: int) -> None:
    """Rows in HellaSwag's schema: the first words of a passage, and its next ones among others."""
    words = " ".join(topics.values()).split()
    draw = random.Random(0)

    def passage(length: int) -> list[str]:
        start = draw.randrange(len(words) - length)
        return words[start : start + length]

    with (folder / f"{TASK}.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(items):
            whole = passage(WORDS_OF_CONTEXT + WORDS_OF_ENDING)
            context, ending = whole[:WORDS_OF_CONTEXT], whole[WORDS_OF_CONTEXT:]
            endings = [" ".join(passage(WORDS_OF_ENDING)) for _ in range(ENDINGS - 1)]
            label = draw.randrange(ENDINGS)
            endings.insert(label, " ".join(ending))
            row = {"activity_label": "Python", "ctx_a": " ".join(context[:-8]), "ctx_b": " ".join(context[-8:])}
            file.write(json.dumps({**row, "endings": endings, "label": str(label)}) + "\n")


def by_the_harness(evaluated: Evaluated, folder: Path) -> list[float]:
    model = HFLM(pretrained=evaluated.model, tokenizer=evaluated.tokenizer, batch_size=evaluated.batch_size)
    tasks = load_tasks(TaskChoice([TASK], TASKS, data=folder))
    found = evaluate(model, {"tasks": tasks}, bootstrap_iters=0)
    return [each[0] for sample in found["samples"][TASK] for each in sample["filtered_resps"]]


def by_the_suite(evaluated: Evaluated, folder: Path) -> list[float]:
    outcome = Lm(tasks=[TASK], data=str(folder)).run(evaluated, Answers())
    return [each for record in outcome.records for each in record.details["log_likelihoods"]]


def lm(model: str, items: int, batch_size: int, repeats: int) -> None:
    evaluated = load_evaluated(model, "lm", "auto", batch_size)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_items(folder, items)
        found: dict[str, list[float]] = {}
        seconds = alternate(
            {
                "suite": lambda: found.update(suite=by_the_suite(evaluated, folder)),
                "harness": lambda: found.update(harness=by_the_harness(evaluated, folder)),
            },
            repeats,
        )
    what = f"{items} items, batch {batch_size}"
    value = ratio(seconds["harness"], seconds["suite"])
    show(figure(f"lm suite / the harness' own, speed ({what})", value, "≥ 0.9", value >= 0.9))
    apart = max(abs(a - b) / abs(b) for a, b in zip(found["suite"], found["harness"], strict=True))
    name, limit = "their log-likelihoods apart, relative", 1e-4
    show({"figure": name, "value": float(f"{apart:.1e}"), "target": f"≤ {limit:.0e}", "met": apart <= limit})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("lm",))
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--items", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    quiet_libraries()
    if options.only in (None, "lm"):
        lm(options.model, options.items, options.batch_size, options.repeats)


if __name__ == "__main__":
    main()
