"""`dex compare`: models on the same items, verdicts, what is refused, exit codes and the files that are written."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import run
from tiny import write_tiny

from dex.errors import DexError
from dex.evaluation import comparison
from dex.evaluation.comparison import Difference, Row, compare_results
from dex.evaluation.paired import mean_over_tasks, paired_difference
from dex.evaluation.records import Record, Result, Task, prompt_hash
from dex.evaluation.significance import PairedTest, holm, mcnemar
from dex.suites import suite_of
from dex.verbs.compare import Comparison, Model, compare
from dex.verbs.evaluate import describe, evaluate

__all__ = ["run"]  # the fixture of test_cli

ACC, LOSS = Task("acc"), Task("loss", higher_is_better=False)


def result_of(label: str, scores: dict[str, list[float]], suite: str = "lm", **changes: Any) -> Result:
    """Every item is a group of its own."""
    records = [
        Record(task, str(i), prompt_hash(task, str(i)), None, float(score), str(i))
        for task, row in scores.items()
        for i, score in enumerate(row)
    ]
    parts: dict[str, Any] = {"tasks": dict.fromkeys(scores, ACC), "model": {}, "settings": {"shots": 0}, **changes}
    return Result(suite=suite, label=label, records=records, **parts)


def answers(right: int, total: int = 40) -> list[float]:
    return [1.0] * right + [0.0] * (total - right)


def written(folder: Path, label: str, scores: dict[str, list[float]], suite: str = "lm", **changes: Any) -> Path:
    result_of(label, scores, suite, **changes).write(folder / label / suite)
    return folder / label


def differences(rows: list[Row]) -> dict[tuple[str, str], Difference]:
    return {(row.name, each.model): each for row in rows for each in row.differences}


# Figures


def test_a_row_is_the_mean_the_paired_difference_its_interval_and_its_test() -> None:
    rng = np.random.default_rng(0)
    before, after = (rng.random(60) < 0.5).astype(float), (rng.random(60) < 0.8).astype(float)
    (row,) = compare_results([[result_of("a", {"t": before.tolist()}), result_of("b", {"t": after.tolist()})]])
    (found,) = row.differences
    assert (row.items, row.groups, row.reference.mean) == (60, 60, pytest.approx(before.mean()))
    assert found.score.mean == pytest.approx(after.mean())
    assert found.difference == paired_difference(after, before, np.ones(60), [str(i) for i in range(60)])
    assert found.p == found.p_adjusted == mcnemar(int((after > before).sum()), int((before > after).sum()))
    assert found.verdict == "better"


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.floats(0, 1, width=16), st.floats(0, 1, width=16)), min_size=2, max_size=20))
def test_the_other_way_round_is_the_negative(items: list[tuple[float, float]]) -> None:
    a, b = (result_of(name, {"t": list(scores)}) for name, scores in zip("ab", zip(*items, strict=True), strict=True))
    there, back = (rows[0].differences[0] for rows in (compare_results([[a, b]]), compare_results([[b, a]])))
    mean, low, high = there.difference
    assert low is not None
    assert high is not None
    assert back.difference == pytest.approx((-mean, -high, -low))
    assert (back.p, back.p_adjusted) == (there.p, there.p_adjusted)
    opposite = {"better": "worse", "worse": "better"}
    assert back.verdict == opposite.get(there.verdict, there.verdict)


def test_a_model_with_itself_differs_by_zero_with_p_1() -> None:
    scores = {"t": answers(13), "u": [0.1 * i for i in range(20)]}
    rows = compare_results([[result_of("a", scores), result_of("again", scores)]])
    assert len(rows) == 3
    for each in differences(rows).values():
        assert each.difference == (0.0, 0.0, 0.0)
        assert (each.p, each.p_adjusted, each.verdict) == (1.0, 1.0, "no difference shown")


def test_the_order_of_items_does_not_matter() -> None:
    scores = np.random.default_rng(1).random((2, 30))
    a, b = (result_of(name, {"t": row.tolist()}) for name, row in zip("ab", scores, strict=True))
    shuffled = replace(b, records=[b.records[i] for i in np.random.default_rng(2).permutation(30)])
    assert compare_results([[a, b]]) == compare_results([[a, shuffled]])


@pytest.mark.parametrize(("task", "verdict"), [(ACC, "better"), (LOSS, "worse")])
def test_a_verdict_goes_by_what_the_metric_means(task: Task, verdict: str) -> None:
    a, b = (result_of(name, {"t": answers(n)}, tasks={"t": task}) for name, n in (("a", 10), ("b", 30)))
    assert compare_results([[a, b]])[0].differences[0].verdict == verdict


def test_a_verdict_needs_the_test_and_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the interval does not show, a small p alone shows nothing; and the other way round."""
    noisy = [result_of(name, {"t": row}) for name, row in (("a", answers(20)), ("b", answers(21)[::-1]))]
    clear = [result_of(name, {"t": answers(n)}) for name, n in (("a", 10), ("b", 30))]
    for p, of_clear in ((0.049, "better"), (0.051, "no difference shown")):
        monkeypatch.setattr(comparison, "paired_test", lambda *_, p=p: PairedTest("made up", p))
        assert compare_results([noisy])[0].differences[0].verdict == "no difference shown"
        assert compare_results([clear])[0].differences[0].verdict == of_clear


def test_all_tasks_and_models_of_a_call_are_one_family_and_the_averages_another() -> None:
    def made(label: str, *right: int) -> list[Result]:
        return [
            result_of(label, {"t": answers(right[0]), "u": answers(right[1])}),
            result_of(label, {"v": answers(right[2])}, "needle"),
        ]

    base, one, two = made("base", 10, 10, 10), made("one", 16, 18, 10), made("two", 17, 4, 20)
    rows = compare_results(list(zip(base, one, two, strict=True)))
    found = differences(rows)
    tasks = [key for key in found if key[0] != "average"]
    assert len(tasks) == 6
    raw = [mcnemar(*sorted((0, abs(n - 10)))) for n in (16, 17, 18, 4, 10, 20)]
    assert [found[key].p for key in tasks] == raw
    assert [found[key].p_adjusted for key in tasks] == holm(raw)
    assert raw[0] < 0.05 < holm(raw)[0]
    assert found["t", "one"].verdict == "no difference shown"
    averages = [found["average", model] for model in ("one", "two")]
    assert [each.p_adjusted for each in averages] == holm([each.p for each in averages if each.p is not None])


def test_the_average_counts_every_task_once_and_flips_the_groups_of_each() -> None:
    base = result_of("a", {"t": [0.0] * 3, "u": [0.0] * 2})
    other = result_of("b", {"t": [1.0, 1.0, 0.0], "u": [1.0, 0.0]})
    row = compare_results([[base, other]])[-1]
    assert (row.task, row.items, row.reference.mean) == (None, 5, 0.0)
    (found,) = row.differences
    assert found.score.mean == found.difference.mean == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert found.p == pytest.approx(2 / 2**3)  # of ±1/3 ±1/3 ±1/2 only all alike are as far from zero
    even = [result_of(name, {"t": [t] * 4, "u": [-t] * 2}) for name, t in (("c", 0.0), ("d", 1.0))]
    assert compare_results([even])[-1].differences[0].p == 1.0  # four quarters against two halves


def test_there_is_no_average_of_what_is_good_when_high_and_when_low() -> None:
    tasks = {"t": ACC, "u": LOSS}
    a, b = (result_of(name, {"t": answers(3), "u": answers(4)}, tasks=tasks) for name in "ab")
    assert [row.task for row in compare_results([[a, b]])] == ["t", "u"]


def test_one_group_is_not_tested_and_few_groups_are_said(tmp_path: Path) -> None:
    for label in ("a", "b"):
        written(tmp_path, label, {"alone": [0.5], "few": [0.5, 0.25, 0.5]})
    made = compare([tmp_path / "a", tmp_path / "b"])
    alone = made.rows[0].differences[0]
    assert (alone.difference.low, alone.test, alone.p, alone.verdict) == (None, None, None, "not tested")
    assert made.rows[2].differences[0].p is None
    assert [note for note in made.notes if "few" in note or "alone" in note] == [
        "lm: alone is not tested: one group of items has no interval and no p",
        "lm: few has 3 groups of items, too few for any p below 0.05",
    ]
    assert "not tested" in made.describe()


def test_an_average_interval_covers_the_truth_as_often_as_it_says() -> None:
    """400 experiments of two tasks of 30 groups; their true mean difference is 0.1. Standard error 1.2 %."""
    rng, covered = np.random.default_rng(0), 0
    for _ in range(400):
        rows = {task: rng.normal(0, 1, 30) for task in "tu"}
        shifts = {"t": 0.3 + rng.normal(0, 0.5, 30), "u": -0.1 + rng.normal(0, 0.3, 30)}
        a = result_of("a", {task: row.tolist() for task, row in rows.items()})
        b = result_of("b", {task: (rows[task] + shifts[task]).tolist() for task in rows})
        _, low, high = average_of(a, b, resamples=500)
        covered += low <= 0.1 <= high
    assert 0.90 <= covered / 400 <= 0.98


def average_of(a: Result, b: Result, resamples: int) -> tuple[float, float, float]:
    tasks = [comparison.differing(b.of_task(task), a.of_task(task)) for task in a.tasks]
    mean, low, high = mean_over_tasks(tasks, resamples)
    assert low is not None
    assert high is not None
    return mean, low, high


# What is compared with what


def test_folders_of_a_suite_of_a_model_and_of_all_models_are_the_same(tmp_path: Path) -> None:
    for label, right in (("base", 10), ("dex", 20)):
        written(tmp_path, label, {"t": answers(right)})
    whole = compare([tmp_path], against="base").rows
    assert whole == compare([tmp_path / "base", tmp_path / "dex"]).rows
    assert whole == compare([tmp_path / "base" / "lm", tmp_path / "dex" / "lm"]).rows
    assert whole == compare([tmp_path / "dex", tmp_path / "base"], against="base").rows
    assert compare([tmp_path / "dex", tmp_path / "base"]).rows[0].differences[0].verdict == "worse"


def test_suites_come_together_and_tasks_are_chosen(tmp_path: Path) -> None:
    for label, right in (("base", 10), ("dex", 20)):
        written(tmp_path, label, {"t": answers(right), "u": answers(5)})
        written(tmp_path, label, {"v": answers(7)}, "needle")
    folders = [tmp_path / "base", tmp_path / "dex"]
    assert [(row.suite, row.name) for row in compare(folders).rows] == [
        ("lm", "t"),
        ("lm", "u"),
        ("lm", "average"),
        ("needle", "v"),
    ]
    assert [row.name for row in compare(folders, tasks=["u", "v"]).rows] == ["u", "v"]
    with pytest.raises(DexError, match=r"vv is not a task of these results; .*did you mean v\?"):
        compare(folders, tasks=["u", "vv"])


def test_models_of_one_label_go_by_their_folders(tmp_path: Path) -> None:
    old, new = (written(tmp_path / when, "dex", {"t": answers(n)}) for when, n in (("old", 9), ("new", 19)))
    made = compare([old, new])
    assert made.reference.label == str(old)
    assert [each.model for each in made.rows[0].differences] == [str(new)]


def test_runs_are_compared_by_what_they_wrote_of_their_held_out_part(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs of `dex train`, and the base evaluated with their recipe, whose settings say more than the runs'."""
    monkeypatch.setenv("DEX_CACHE", str(tmp_path / "cache"))
    base = write_tiny(tmp_path / "base")
    for name, method in (("control", "attention"), ("other", "attention")):
        (tmp_path / f"{name}.yaml").write_text(
            f"model: {{id: {base}}}\nmethod: {{name: {method}}}\n"
            "data: {train: [{source: pydoc}], block: 64, held_out: 0.1, held_out_tokens: 2_000}\n"
            f"run: {{tokens: 256, batch_tokens: 128, lr: 1.0e-3, seed: {len(name)}}}\noutput: {tmp_path}/{name}\n"
        )
        assert run("train", tmp_path / f"{name}.yaml")[0] == 0
    recipe = suite_of("perplexity", [f"recipe={tmp_path / 'control.yaml'}"])
    evaluate([str(base), str(tmp_path / "control" / "adapter")], tmp_path / "results", recipe)
    made = compare([tmp_path / "results" / "base", tmp_path / "control", tmp_path / "other"])
    assert [each.model for each in made.rows[0].differences] == ["control", "other"]
    again = compare([tmp_path / "results" / "control", tmp_path / "control"])
    assert again.rows[0].differences[0].difference == pytest.approx((0, 0, 0), abs=1e-5)


def test_eval_shows_the_differences_from_its_first_model() -> None:
    scores = {"t": answers(9)}
    assert "differences are from a" in describe([result_of("a", scores), result_of("b", scores)])
    assert "differences" not in describe([result_of("a", scores)])
    other = result_of("b", {"t": answers(9, 41)})
    assert "Not compared: a and b are not comparable on t" in describe([result_of("a", scores), other])


# Refusals


def changed(result: Result, **changes: Any) -> Result:
    return replace(result, records=[replace(result.records[0], **changes), *result.records[1:]])


REFUSED: list[tuple[Callable[[Result], Result], str]] = [
    (lambda r: replace(r, records=r.records[:-1]), "b lacks 1 items of a, such as 39"),
    (lambda r: changed(r, id="new"), "lacks 1 items"),
    (lambda r: changed(r, prompt_hash="0" * 16), "1 items have other prompts or weights, such as 0"),
    (lambda r: changed(r, group="other"), "other prompts or weights"),
    (lambda r: replace(r, tasks={"t": Task("acc_norm")}), "acc of version None there, acc_norm"),
    (lambda r: replace(r, tasks={"t": Task("acc", version="2")}), "of version 2 here"),
    (lambda r: replace(r, settings={"shots": 5}), "shots is 0 for the one and 5 for the other"),
    (lambda r: replace(r, settings={}), "shots is 0 for the one and null for the other"),
    (lambda r: replace(r, suite="needle"), "b has no result of lm, and a has"),
    (
        lambda r: result_of("b", {"t": answers(3), "extra": answers(3)}),
        "a lacks the lm tasks extra of b; evaluate both on the same tasks, or compare the others with --tasks t",
    ),
    (lambda r: changed(r, score=float("nan")), "A score is not finite"),
]


@pytest.mark.parametrize(("change", "said"), REFUSED)
def test_results_that_are_not_of_the_same_are_refused_and_said_which(
    tmp_path: Path, change: Callable[[Result], Result], said: str
) -> None:
    a = written(tmp_path, "a", {"t": answers(10)})
    b = change(result_of("b", {"t": answers(20)}))
    write_unchecked(b, tmp_path / "b")
    with pytest.raises(DexError, match=said.replace(".", r"\.")):
        compare([a, tmp_path / "b"])


def write_unchecked(result: Result, folder: Path) -> None:
    """A score that is not finite has no mean, so `write` would not take it."""
    finite = [replace(r, score=0.0) if r.score != r.score else r for r in result.records]
    replace(result, records=finite).write(folder)
    lines = (json.dumps({**record.__dict__}) + "\n" for record in result.records)
    (folder / "items.jsonl").write_text("".join(lines))


def test_a_chosen_task_that_one_model_lacks_is_said(tmp_path: Path) -> None:
    a, b = written(tmp_path, "a", {"t": answers(3), "u": answers(3)}), written(tmp_path, "b", {"t": answers(3)})
    assert [row.name for row in compare([a, b], tasks=["t"]).rows] == ["t"]
    for order in ([a, b], [b, a]):
        with pytest.raises(DexError, match="b lacks the lm tasks u of a"):
            compare(order, tasks=["u"])


def test_what_only_says_which_items_there_are_may_differ(tmp_path: Path) -> None:
    for label, own in (("a", {"recipe": "a.yaml"}), ("b", {"recipe": "b.yaml", "name": "perplexity"})):
        scores = {"held-out": answers(3)}
        fingerprint = {**own, "held_out_fingerprint": "x"}
        written(tmp_path, label, scores, "perplexity", settings=fingerprint, tasks={"held-out": LOSS})
    assert compare([tmp_path / "a", tmp_path / "b"]).rows[0].items == 40


def test_other_versions_are_noted_and_not_refused(tmp_path: Path) -> None:
    for label, torch, dtype in (("a", "2.12", "float32"), ("b", "2.13", "bfloat16")):
        environment = {"dex": "1", "packages": {"torch": torch, "peft": "0.21"}, "device": "CPU"}
        written(tmp_path, label, {"t": answers(9)}, environment=environment, model={"dtype": dtype})
    assert compare([tmp_path / "a", tmp_path / "b"]).notes == [
        "lm: dtype is float32 for a and bfloat16 for b",
        "lm: torch is 2.12 for a and 2.13 for b",
    ]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    a = written(tmp_path, "a", {"t": answers(9)})
    b = written(tmp_path, "b", {"t": answers(9)})
    with pytest.raises(DexError, match="none does not exist"):
        compare([a, tmp_path / "none"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DexError, match="empty holds no result"):
        compare([a, tmp_path / "empty"])
    items = b / "lm" / "items.jsonl"
    whole = items.read_text()
    for damaged in (whole[:-9], whole + whole.splitlines()[0] + "\n", whole.replace('"score": 0.0', '"score": "0"')):
        items.write_text(damaged)
        with pytest.raises(DexError, match=r"items.jsonl is damaged .*evaluate again"):
            compare([a, b])


def test_which_model_is_meant_has_to_be_clear(tmp_path: Path) -> None:
    a, b = (written(tmp_path / "out", label, {"t": answers(9)}) for label in ("a", "b"))
    with pytest.raises(DexError, match="named twice"):
        compare([a, a.parent / "." / "a"])
    with pytest.raises(DexError, match="lies in two of the folders"):
        compare([a.parent, b])
    with pytest.raises(DexError, match="takes two models"):
        compare([a])
    with pytest.raises(DexError, match=r"The first folder holds a, b; say .* --against a"):
        compare([a.parent])
    with pytest.raises(DexError, match="'c' is not one of these models; there is one of a, b"):
        compare([a, b], against="c")
    result_of("a", {"t": answers(9)}).write(a / "older" / "lm")
    with pytest.raises(DexError, match="two results of a on lm"):
        compare([a, b])


def test_results_of_two_models_under_one_label_are_refused(tmp_path: Path) -> None:
    for suite, content in (("lm", "1"), ("needle", "2")):
        written(tmp_path, "a", {suite: answers(9)}, suite, model={"id": "m", "content": content})
    with pytest.raises(DexError, match=r"are both of a, but of two models \(content is '2' and '1'\)"):
        compare([tmp_path / "a", tmp_path])


# No regression


def test_a_regression_is_what_is_significantly_worse(tmp_path: Path) -> None:
    made = compare(write_three(tmp_path))
    assert made.regressions() == [("bad", "t"), ("bad", "the average of lm")]
    assert made.refusal() == "A regression from base: bad on t, the average of lm."


def write_three(folder: Path) -> list[Path]:
    """`bad` loses 15 of 40 on t; `same` loses 1 of 40 on u, which shows nothing."""
    right = {"base": (20, 20), "bad": (5, 20), "same": (20, 19)}
    return [written(folder, label, {"t": answers(t), "u": answers(u)}) for label, (t, u) in right.items()]


def test_a_margin_asks_that_no_more_can_be_lost(tmp_path: Path) -> None:
    made = compare(write_three(tmp_path))
    low = made.rows[1].differences[1].difference.low
    assert low is not None
    assert -0.1 < low < 0
    assert ("same", "u") in made.regressions(margin=-low)
    assert ("same", "u") not in made.regressions(margin=-low + 1e-9)
    assert ("bad", "t") in made.regressions(margin=0.1)
    assert "Not shown to be within 0.01 of base: bad on t" in str(made.refusal(0.01))


def test_a_margin_goes_by_what_the_metric_means() -> None:
    a, b = (result_of(name, {"t": row}, tasks={"t": LOSS}) for name, row in (("a", [2.0, 3.0]), ("b", [2.1, 3.2])))
    model = {name: Model(name, {"lm": result}, {}) for name, result in (("a", a), ("b", b))}
    worse = Comparison(model["a"], [model["b"]], compare_results([[a, b]]), [])
    better = Comparison(model["b"], [model["a"]], compare_results([[b, a]]), [])
    assert worse.regressions(margin=0.19) == [("b", "t")]
    assert worse.regressions(margin=0.21) == better.regressions(margin=0.0) == []


def test_what_has_no_interval_is_not_within_a_margin(tmp_path: Path) -> None:
    for label in ("a", "b"):
        written(tmp_path, label, {"t": [0.5]})
    made = compare([tmp_path / "a", tmp_path / "b"])
    assert made.regressions() == []
    assert made.regressions(margin=0.5) == [("b", "t")]


@pytest.mark.parametrize(("groups", "enough"), [(1, False), (5, False), (6, True)])
def test_too_few_groups_cannot_show_that_nothing_is_lost(tmp_path: Path, groups: int, enough: bool) -> None:
    for label, score in (("a", 0.5), ("b", 0.4)):
        written(tmp_path, label, {"t": [score + i / 100 for i in range(groups)]})
    made = compare([tmp_path / "a", tmp_path / "b"])
    said = str(made.refusal())
    if enough:
        assert said == "A regression from a: b on t."
    else:
        assert f"cannot show a regression from a: t ({groups} of them); evaluate on more, or give --margin." in said
    assert made.refusal(margin=0.5) is None or groups == 1


@pytest.mark.parametrize(
    ("options", "models", "code"),
    [
        ((), ("base", "bad"), 0),
        (("--require-no-regression",), ("base", "same"), 0),
        (("--require-no-regression",), ("base", "bad"), 1),
        (("--require-no-regression",), ("bad", "base"), 0),
        (("--require-no-regression", "--margin", "0.01"), ("base", "same"), 1),
        (("--require-no-regression", "--margin", "0.2"), ("base", "same"), 0),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_the_exit_code_says_whether_something_was_lost_and_the_table_comes_first(
    run: Any, tmp_path: Path, options: tuple[str, ...], models: tuple[str, str], code: int, as_json: bool
) -> None:
    write_three(tmp_path)
    found, out, err = run("compare", *(tmp_path / name for name in models), *options, *["--json"] * as_json)
    assert found == code
    assert (err == "") == (code == 0)
    assert len(err.splitlines()) == code
    if as_json:
        printed = json.loads(out)
        assert [row["task"] for row in printed["rows"]] == ["t", "u", None]
        assert (printed["regression"] is None) == (code == 0)
    else:
        assert "difference [95 %]" in out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("compare", "{tmp}/none", "{tmp}/a"), 1, "none does not exist"),
        (("compare", "{tmp}/a", "{tmp}/b", "--against", "x"), 1, "one of a, b"),
        (("compare", "{tmp}/a", "{tmp}/b", "--margin", "0.1"), 2, "without --require-no-regression"),
        (("compare", "{tmp}/a", "{tmp}/b", "--require-no-regression", "--margin", "-1"), 2, "--margin"),
        (("compare", "{tmp}/a", "{tmp}/b", "--tasks", "t,"), 1, "is not a task"),
        (("compare", "{tmp}/a", "{tmp}/b", "-o", "{tmp}/a"), 1, "--force"),
        (("compare", "{tmp}/a", "{tmp}/b", "-o", "{tmp}/a", "--force"), 1, "no compare.json"),
        (("compare",), 2, "RESULTS"),
    ],
)
def test_a_mistake_is_one_sentence_and_writes_nothing(
    run: Any, tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    for label in ("a", "b"):
        written(tmp_path, label, {"t": answers(9)})
    before = sorted(tmp_path.rglob("*"))
    found, out, err = run(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert (found, out) == (code, "")
    assert said in err
    assert sorted(tmp_path.rglob("*")) == before


# What is written


def test_the_files_hold_what_was_found_and_are_the_same_each_time(tmp_path: Path) -> None:
    folders = write_three(tmp_path / "results")
    made = compare(folders, output=tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["compare.json", "compare.md", "forest.png"]
    assert json.loads((tmp_path / "out" / "compare.json").read_text()) == json.loads(json.dumps(made.to_dict()))
    table = (tmp_path / "out" / "compare.md").read_text().splitlines()
    assert len(table) > 2 + 3 * 2
    assert len({line.count("|") for line in table[: 2 + 3 * 2]}) == 1
    with pytest.raises(DexError, match="--force"):
        compare(folders, output=tmp_path / "out")
    first = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    compare(folders, output=tmp_path / "out", force=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == first


def test_the_plot_shows_each_difference_in_its_models_colour(tmp_path: Path) -> None:
    from matplotlib.image import imread

    compare(write_three(tmp_path / "results"), output=tmp_path / "out")
    image = imread(tmp_path / "out" / "forest.png")[..., :3]
    for colour in ("#0072B2", "#D55E00"):
        rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        assert (abs(image - rgb).max(axis=-1) < 0.01).sum() > 300
    assert (image == 1).all(axis=-1).mean() > 0.7  # on a white ground


def test_a_plot_has_room_for_every_row(tmp_path: Path) -> None:
    from matplotlib.image import imread

    from dex.plots import forest

    heights = []
    for tasks in (2, 12):
        scores = {f"task {i}": answers(9) for i in range(tasks)}
        rows = compare_results([[result_of(name, scores) for name in ("base", "a", "b", "c")]])
        forest.draw(rows, "base", tmp_path / "forest.png")
        heights.append(imread(tmp_path / "forest.png").shape[0])
    assert (heights[1] - heights[0]) / 10 > 4 * 20  # 20 pixels a difference, and as many between tasks


def test_comparing_loads_no_torch(tmp_path: Path) -> None:
    for label in ("a", "b"):
        written(tmp_path, label, {"t": answers(9)})
    script = (
        "import sys; from pathlib import Path; from dex.verbs.compare import compare\n"
        f"compare([Path({str(tmp_path / 'a')!r}), Path({str(tmp_path / 'b')!r})])\n"
        "print({m.split('.')[0] for m in sys.modules} & {'torch', 'transformers', 'peft', 'matplotlib'})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_an_output_that_holds_what_is_compared_is_refused(tmp_path: Path) -> None:
    models = [written(tmp_path / "out", "a", {"t": answers(10)}), written(tmp_path / "out", "b", {"t": answers(20)})]
    compare(models, output=tmp_path / "made")
    for output in (tmp_path / "out", models[0]):
        (output / "compare.json").write_bytes((tmp_path / "made" / "compare.json").read_bytes())
        with pytest.raises(DexError, match="holds or lies in"):
            compare(models, output=output, force=True)
    assert all(model.exists() for model in models)
