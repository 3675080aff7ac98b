"""`dex study`: identical data, a sweep each, runs that resume and are shared, statistics that know the truth."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import Dex
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import write_tiny

from dex.errors import DexError
from dex.evaluation.records import Record, Result, Task, prompt_hash
from dex.studies.differences import difference, noise_floor, over_seeds
from dex.studies.jobs import Job
from dex.studies.scaling import scaling
from dex.studies.study_file import STUDIES, Study, load_study
from dex.studies.sweep import sweep
from dex.verbs import study as verb

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEX_CACHE", str(tmp_path / "cache"))


STUDY = """
shared:
  model: {{id: {tmp}/base}}
  data: {{train: [{{source: {tmp}/text.jsonl}}], block: 32, held_out: 0.3}}
  run: {{tokens: 256, batch_tokens: 64}}
control: kvo
seeds: [0, 1]
sweep: {{lr: [1.0e-3, 2.0e-3], extend: 1}}
variants:
  base: {{train: false}}
  kvo: {{about: "K, V, O", method: {{name: attention}}}}
  all: {{method: {{name: dex, heads: {{criterion: all}}, schedule: fixed, w_d_init: zeros}}}}
suites: [{{name: perplexity, block: 16, tokens: 64}}]
output: {tmp}/out
"""


def study_at(tmp_path: Path, *overrides: str) -> Study:
    if not (tmp_path / "base").exists():
        write_tiny(tmp_path / "base")
        rows = [{"text": f"{i}: the quick brown fox, number {i * 7919 % 101}, jumps over {i}"} for i in range(30)]
        (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return STUDIES.parse(STUDY.format(tmp=tmp_path), "s.yaml", overrides)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs are made in this process, and named in their order: forking a server takes seconds."""
    return here(monkeypatch)


def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []

    def call(work: Any, study: Study, job: Job) -> Any:
        made.append(f"{work.__name__} {job}")
        return work(study, job)

    monkeypatch.setattr(verb, "in_own_process", call)
    return made


@pytest.fixture(scope="module")
def studied_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Where the study was made, without its suite, and a copy of all that was there when it was finished."""
    folder = tmp_path_factory.mktemp("studied_once")
    (folder / "at").mkdir()
    with pytest.MonkeyPatch.context() as own:
        own.setenv("DEX_CACHE", str(folder / "at" / "cache"))
        here(own)
        verb.study(study_at(folder / "at", "suites=[]"))
    shutil.copytree(folder / "at", folder / "copy")
    return folder / "at", folder / "copy"


@pytest.fixture
def studied(studied_once: tuple[Path, Path], in_this_process: list[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where the study was made just now: one folder for all, put back, as its runs know their paths."""
    folder, copy = studied_once
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    monkeypatch.setenv("DEX_CACHE", str(folder / "cache"))
    return folder


# The whole of it


def test_a_study_sweeps_each_variant_and_then_runs_its_seeds(tmp_path: Path, in_this_process: list[str]) -> None:
    found = verb.study(study_at(tmp_path))
    at = found["points"][""]
    for name in ("kvo", "all"):
        swept = at["variants"][name]["sweep"]
        assert {"0.001", "0.002"} <= swept["losses"].keys()
        assert swept["losses"][f"{swept['best']:g}"] == min(swept["losses"].values())
    task = at["tasks"]["held-out"]
    assert len(task["variants"]["kvo"]["scores"]) == 2
    assert task["variants"]["kvo"]["difference"] is None
    ours, theirs = (task["variants"][name]["scores"] for name in ("all", "kvo"))
    per_seed = task["variants"]["all"]["difference"]["per_seed"]
    assert per_seed == pytest.approx({seed: ours[seed] - theirs[seed] for seed in ("0", "1")})
    assert at["variants"]["all"]["branch"]["of"] == 2
    of_suite = at["tasks"]["perplexity: held-out"]["variants"]["kvo"]
    assert len(of_suite["scores"]) == 2
    assert of_suite["scores"] != task["variants"]["kvo"]["scores"]
    report = (tmp_path / "out" / "report.md").read_text()
    for said in ("K, V, O", "Noise floor", "sweep: held-out loss at", "control"):
        assert said in report
    figures = ("forest", "curves", "curves-against-control", "lam")
    assert all((tmp_path / "out" / f"{name}.png").stat().st_size > 5_000 for name in figures)
    assert not list((tmp_path / "out" / "runs").rglob("*.safetensors"))  # keep_weights is false

    made = len(in_this_process)
    again = verb.study(study_at(tmp_path))
    assert len(in_this_process) == made
    assert again["points"] == found["points"]
    assert load_study(tmp_path / "out" / "study-as-run.yaml") == study_at(tmp_path)
    # Another seed is what it adds, and nothing else.
    verb.study(study_at(tmp_path, "seeds=[0, 1, 2]", "suites=[]"))
    assert len(in_this_process) == made + 2


def test_variants_see_the_same_batches_in_the_same_order(tmp_path: Path, in_this_process: list[str]) -> None:
    """With a rate that moves nothing, two methods' losses are equal, update by update; another seed's are not."""
    tiny_rate = ("sweep.lr=[1.0e-12]", "suites=[]")
    verb.study(study_at(tmp_path, *tiny_rate))
    runs = tmp_path / "out" / "runs"

    def losses(variant: str, seed: int) -> list[float]:
        lines = (runs / variant / f"lr-1e-12-seed-{seed}" / "log.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]

    assert losses("kvo", 0) == pytest.approx(losses("all", 0), rel=1e-5)
    assert losses("kvo", 0) != pytest.approx(losses("kvo", 1), rel=1e-3)


def test_a_variant_that_diverges_is_a_result_and_not_the_end(tmp_path: Path, in_this_process: list[str]) -> None:
    found = verb.study(study_at(tmp_path, "variants.all.lr=[1.0e+30]", "suites=[]"))
    own = found["points"][""]["variants"]["all"]
    assert set(own["diverged"]) == {"0", "1"}
    assert "not finite" in own["diverged"]["0"] or "is nan" in own["diverged"]["0"] or "inf" in own["diverged"]["0"]
    assert own["sweep"]["losses"] == {"1e+30": None}
    assert "all" not in found["points"][""]["tasks"]["held-out"]["variants"]
    assert "diverged" in (tmp_path / "out" / "report.md").read_text()


def test_a_run_with_other_settings_is_not_taken_for_this_one(studied: Path) -> None:
    with pytest.raises(DexError, match=r"run\.tokens=256, but this recipe has 512"):
        verb.study(study_at(studied, "shared.run.tokens=512", "suites=[]"))


def test_a_suite_that_is_asked_for_after_the_weights_went_is_refused(studied: Path) -> None:
    with pytest.raises(DexError, match="keep_weights"):
        verb.study(study_at(studied))


def test_results_of_a_suite_with_other_settings_are_not_taken_for_these(
    tmp_path: Path, in_this_process: list[str]
) -> None:
    verb.study(study_at(tmp_path, "keep_weights=true"))
    with pytest.raises(DexError, match=r"holds a result of another block \(16, not 32\)"):
        verb.study(study_at(tmp_path, "keep_weights=true", "suites.0.block=32"))


def test_a_base_that_changed_meanwhile_is_noticed(studied: Path) -> None:
    write_tiny(studied / "base", seed=5)
    with pytest.raises(DexError, match="other weights of"):
        verb.study(study_at(studied, "suites=[]", "seeds=[0, 1, 2]"))


def test_fresh_models_differ_by_seed_and_their_sizes_are_fitted(tmp_path: Path, in_this_process: list[str]) -> None:
    study_at(tmp_path)
    made = STUDIES.parse(
        f"""
shared:
  data: {{train: [{{source: {tmp_path}/text.jsonl}}], block: 32, held_out: 0.3}}
  run: {{tokens: 256, batch_tokens: 64}}
  fresh: {{like: {tmp_path}/base, config: {{num_hidden_layers: 1}}}}
points:
  small: {{fresh: {{config: {{hidden_size: 32, head_dim: 8}}}}}}
  large: {{fresh: {{config: {{hidden_size: 64, head_dim: 16}}}}}}
control: base
seeds: [0, 1]
sweep: {{lr: [1.0e-3, 2.0e-3], extend: 0, point: small}}
variants:
  base: {{method: {{name: full}}}}
  v1: {{method: {{name: full}}, fresh: {{layout: diff-v1, options: {{head_norm: "off"}}}}}}
fit: parameters
output: {tmp_path}/out
""",
        "s.yaml",
    )
    found = verb.study(made)
    fit = found["fit"]
    assert fit["x"]["base"][1] > 1.5 * fit["x"]["base"][0]
    assert fit["savings"].keys() <= {"v1"}  # none, if the larger one is not better after four updates
    assert len({round(loss, 6) for row in fit["losses"]["base"] for loss in row}) == 4
    assert not [job for job in in_this_process if "large" in job and "0.001" in job and "0.002" in job]
    assert (tmp_path / "out" / "fit.png").exists()
    wider = made.model_copy(
        update={"shared": made.shared.model_copy(update={"fresh": {"like": str(tmp_path / "base")}})}
    )
    with pytest.raises(DexError, match="other settings of `fresh`"):
        verb.study(wider)


# Processes


def command(tmp_path: Path, *overrides: str) -> list[str]:
    """`dex study` of one variant at one rate."""
    alone = ["variants={kvo: {method: {name: attention}}}", "sweep.lr=[1.0e-3]", "suites=[]", *overrides]
    (tmp_path / "s.yaml").write_text(STUDY.format(tmp=tmp_path))
    return ["study", str(tmp_path / "s.yaml"), *alone]


def test_two_processes_share_the_runs_of_one_study(tmp_path: Path) -> None:
    study_at(tmp_path)
    both = [Dex(*command(tmp_path, "seeds=[0, 1, 2, 3]")) for _ in range(2)]
    said = []
    for process in both:
        out, err = process.communicate(timeout=300)  # a hang, not a benchmark
        assert process.returncode == 0, err
        said.append(err)
        assert "| kvo |" in out
    assert sum(err.count("training: 256 of 256") for err in said) == 4
    assert len(list((tmp_path / "out" / "runs").rglob("record.json"))) == 4


def test_a_study_that_is_terminated_leaves_a_checkpoint_and_goes_on_from_it(tmp_path: Path) -> None:
    """As installed, with a server of its own."""
    study_at(tmp_path)
    long = ("seeds=[0]", "shared.run.tokens=16_000")
    installed = [str(Path(sys.executable).with_name("dex")), *command(tmp_path, *long)]
    process = subprocess.Popen(
        installed, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # with its server
    folder = tmp_path / "out" / "runs" / "kvo" / "lr-0.001-seed-0"
    deadline = time.monotonic() + 120
    while not (folder / "log.jsonl").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "run the same command to go on" in out
    assert list((folder / "checkpoints").glob("checkpoint-*"))
    assert not (folder / "record.json").exists()
    again = Dex(*command(tmp_path, *long))
    _, err = again.communicate(timeout=300)
    assert again.returncode == 0, err
    assert "going on from" in err
    assert (folder / "record.json").exists()


# The file


def test_every_study_that_comes_with_dex_loads_and_its_recipes_fit() -> None:
    files = sorted((ROOT / "recipes" / "studies").glob("*.yaml"))
    studies = [path for path in files if "variants:" in path.read_text()]
    assert {path.stem for path in studies} >= {"controls", "scratch", "small"}
    for path in studies:
        assert path.read_text().splitlines()[0] == f"# dex study recipes/studies/{path.name}"
        loaded = load_study(path)
        for point, variant in product(loaded.point_names, loaded.variants):
            fresh = loaded.fresh(point, variant)
            loaded.recipe(point, variant, 1e-3, 0, Path("out"), "fresh" if fresh else None)


@pytest.mark.parametrize("damage", ["record", "log", "held_out"])
def test_a_damaged_run_is_named_with_what_to_do_or_passed_over(studied: Path, damage: str) -> None:
    study = study_at(studied, "suites=[]")
    (folder,) = (studied / "out" / "runs" / "kvo").glob("*-seed-1")
    if damage == "log":
        log = folder / "log.jsonl"
        log.write_text(log.read_text()[:-20] + "\n[1]\n")
        assert verb.study(study, report_only=True)["points"]
        return
    if damage == "record":
        (folder / "record.json").write_text('{"result": {}, "diverged": null, "seconds": 1, "memory": {}}')
    else:
        (folder / "held_out" / "items.jsonl").write_text("")
    with pytest.raises(DexError, match=r"delete .*kvo"):
        verb.study(study)


def test_what_is_not_there_is_said_before_the_first_run(tmp_path: Path, in_this_process: list[str]) -> None:
    for override in ("variants.base.model={id: nosuch/folder}", "shared.data.train=[{source: nosuch.txt}]"):
        with pytest.raises(DexError, match="nosuch"):
            verb.study(study_at(tmp_path, override))
    assert in_this_process == []


MISTAKES = [
    (["points={a: {run: {lr: 1}}}"], "points.a.run.lr has no effect"),
    (["variants.kvo.lr=[]"], "at least one learning rate"),
    (["control=nobody"], "control: 'nobody' is not one of the variants"),
    (["control=base"], "is not trained"),
    (["variants.kvo.run={tokens: 512}"], "other data, another order or another budget"),
    (["variants.kvo.abuot=x"], "did you mean variants.kvo.about"),
    (["variants.kvo=3"], "a block with"),
    (["shared.run.seed=1"], "the study sets it"),
    (["sweep.lr=[]"], "at least one learning rate"),
    (["sweep.lr=[0]"], "a number above 0"),
    (["seeds=[1, 1]"], "all different"),
    (["sweep.seeds=3"], "there are 2 seeds"),
    (["fit=parameters"], "at least two points"),
    (["suites=[{name: neddle}]"], "suites.name: 'neddle' was given"),
    (["variants.kvo.fresh={layout: diff-v1}"], "no effect without shared.fresh"),
    (["variants.base.lr=[1.0e-3]"], "not trained, so"),
    (["variants={}"], "variants is empty"),
    (["variants={..: {method: {name: full}}}", "control=.."], "is not a name"),
]


@pytest.mark.parametrize(("overrides", "said"), MISTAKES)
def test_a_mistake_in_a_study_is_one_sentence(tmp_path: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(DexError) as refused:
        study_at(tmp_path, *overrides)
    assert said in str(refused.value)


def test_a_variant_whose_recipe_does_not_fit_is_named_before_the_first_run(
    tmp_path: Path, in_this_process: list[str]
) -> None:
    study = study_at(tmp_path, "variants.all.method={name: dex, schedule: off, train_kvo: false}")
    with pytest.raises(DexError, match="variant all: method"):
        verb.study(study)
    assert in_this_process == []
    assert not (tmp_path / "out").exists()


def test_a_part_of_the_variants_can_be_run(tmp_path: Path) -> None:
    study = study_at(tmp_path)
    assert list(study.only(["base"]).variants) == ["base", "kvo"]
    assert list(study.only(["all", "kvo"]).variants) == ["kvo", "all"]
    with pytest.raises(DexError, match=r"'al' is not a variant of this study; .*did you mean all"):
        study.only(["al"])


# The sweep


def swept(rates: list[float], best: float, extend: int) -> Any:
    """A sweep whose loss is least at `best`, all runs made."""
    return sweep(rates, [0], extend, lambda rate, seed: abs(math.log(rate / best)))


def test_the_best_rate_inside_is_taken() -> None:
    found = swept([1e-3, 2e-3, 4e-3], 2e-3, 3)
    assert (found.best, found.at_edge, len(found.losses)) == (2e-3, False, 3)


@pytest.mark.parametrize(("best", "expected"), [(1.6e-2, 1.6e-2), (2.5e-4, 2.5e-4)])
def test_a_sweep_goes_on_beyond_its_edge(best: float, expected: float) -> None:
    found = swept([1e-3, 2e-3, 4e-3], best, 3)
    assert found.best == pytest.approx(expected)
    assert not found.at_edge


def test_a_sweep_that_ends_at_its_edge_says_so() -> None:
    found = swept([1e-3, 2e-3], 1.0, 2)
    assert (found.best, found.at_edge, sorted(found.losses)) == (8e-3, True, [1e-3, 2e-3, 4e-3, 8e-3])


def test_a_sweep_asks_for_the_runs_that_are_missing_and_no_others() -> None:
    known: dict[tuple[float, int], float] = {}
    asked = []

    def loss(rate: float, seed: int) -> float | None:
        return known.get((rate, seed))

    while (found := sweep([1e-3, 2e-3], [0, 1], 4, loss)).best is None:
        asked.append(found.missing)
        for rate, seed in found.missing:
            known[rate, seed] = abs(math.log(rate / 7e-3)) + 0.01 * seed
    assert asked[0] == [(1e-3, 0), (1e-3, 1), (2e-3, 0), (2e-3, 1)]
    assert [[rate for rate, _ in each] for each in asked[1:]] == [[4e-3] * 2, [8e-3] * 2, [1.6e-2] * 2]
    assert found.best == 8e-3


def test_a_rate_that_diverged_is_never_the_best() -> None:
    found = sweep([1e-3, 1e-2], [0], 0, lambda rate, seed: math.inf if rate > 5e-3 else 3.0)
    assert found.best == 1e-3


# Differences


def runs(*each: Result) -> dict[int | None, Result]:
    return dict(enumerate(each))


def result(scores: list[float], weights: list[float] | None = None, groups: list[str] | None = None) -> Result:
    records = [
        Record("t", str(i), prompt_hash(str(i)), None, score, (groups or [str(j) for j in range(len(scores))])[i], w)
        for i, (score, w) in enumerate(zip(scores, weights or [1.0] * len(scores), strict=True))
    ]
    return Result("s", "m", {}, {}, {"t": Task("loss", higher_is_better=False)}, records)


def test_a_variant_that_is_the_control_differs_by_nothing() -> None:
    same = runs(result([1.0, 2.0, 3.0]), result([1.5, 2.5, 2.0]))
    found = difference(same, same, "t")
    assert found is not None
    assert (found.mean, found.p) == (0.0, 1.0)
    assert found.over_items == found.over_seeds == found.over_both == (0.0, 0.0, 0.0)


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-5, 5), min_size=4, max_size=4), min_size=2, max_size=4), st.floats(-3, 3))
def test_a_shift_is_the_difference_and_swapping_turns_the_sign(table: list[list[float]], shift: float) -> None:
    control = runs(*(result(row) for row in table))
    variant = runs(*(result([score + shift for score in row]) for row in table))
    found, swapped = difference(variant, control, "t"), difference(control, variant, "t")
    assert found is not None
    assert swapped is not None
    assert found.mean == pytest.approx(shift, abs=1e-9)
    assert swapped.mean == pytest.approx(-found.mean, abs=1e-9)
    assert list(found.per_seed.values()) == pytest.approx([shift] * len(table), abs=1e-9)


def test_an_untrained_model_stands_against_every_seed_of_the_control() -> None:
    found = difference({None: result([2.0, 2.0])}, runs(result([1.0, 1.0]), result([1.5, 1.5])), "t")
    assert found is not None
    assert found.per_seed == pytest.approx({"0": 1.0, "1": 0.5})


def test_runs_are_paired_by_their_seed_and_only_common_seeds_count() -> None:
    control = {0: result([1.0, 1.0]), 2: result([3.0, 3.0])}
    found = difference({0: result([1.5, 1.5]), 1: result([9.0, 9.0])}, control, "t")  # type: ignore[arg-type]
    assert found is not None
    assert found.per_seed == {"0": 0.5}
    assert (found.over_seeds.low, found.p) == (None, None)
    assert difference({1: result([9.0, 9.0])}, control, "t") is None  # type: ignore[arg-type]


def test_the_interval_over_seeds_is_students() -> None:
    from scipy import stats

    values = [0.1, 0.3, 0.2, 0.6]
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert over_seeds(values)[1:] == pytest.approx((expected.low, expected.high))
    control = runs(*(result([1.0, 2.0]) for _ in values))
    found = difference(runs(*(result([1.0 + v, 2.0 + v]) for v in values)), control, "t")
    assert found is not None
    assert found.p == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue)
    assert over_seeds([0.4]) == (0.4, None, None)


def test_items_weigh_what_they_weigh_and_groups_are_drawn_whole() -> None:
    control = runs(*[result([0.0] * 4, [1, 3, 1, 3], ["a", "a", "b", "b"])] * 2)
    variant = runs(*[result([1.0, 0.0, 0.0, 1.0], [1, 3, 1, 3], ["a", "a", "b", "b"])] * 2)
    found = difference(variant, control, "t")
    assert found is not None
    assert found.mean == pytest.approx(0.5)
    assert found.over_items == pytest.approx((0.5, 0.25, 0.75))  # both documents are the first, or both the second


def test_the_interval_over_both_covers_the_truth_where_seeds_and_items_vary() -> None:
    """200 data sets of 8 seeds × 30 documents, both noisy; the truth is 0.1. One over items alone covers less."""
    rng = np.random.default_rng(0)
    hits, items_alone, trials = 0, 0, 200
    control = runs(*[result([0.0] * 30)] * 8)
    for _ in range(trials):
        shift = 0.1 + rng.normal(0, 0.3, size=(8, 1)) + rng.normal(0, 0.3, size=(1, 30)) + rng.normal(0, 0.1, (8, 30))
        found = difference(runs(*(result(list(row)) for row in shift)), control, "t")
        assert found is not None
        assert found.over_both.low is not None
        assert found.over_both.high is not None
        assert found.over_items.low is not None
        assert found.over_items.high is not None
        hits += found.over_both.low <= 0.1 <= found.over_both.high
        items_alone += found.over_items.low <= 0.1 <= found.over_items.high
    assert hits / trials > 0.87
    assert items_alone < hits


def test_the_noise_floor_is_what_two_seeds_differ_by() -> None:
    floor = noise_floor([1.0, 1.2, 1.1])
    assert floor.spread == pytest.approx(0.1)
    assert floor.rms == pytest.approx(math.sqrt((0.04 + 0.01 + 0.01) / 3))
    assert floor.largest == pytest.approx(0.2)
    assert noise_floor([1.0]).rms is None


# The fit


def test_a_variant_that_needs_two_thirds_is_found_to_need_two_thirds() -> None:
    """ln L = a − 0.1 ln x, and the variant has the loss of the control at x / 0.65."""
    x = [1e6, 3e6, 1e7]
    rng = np.random.default_rng(0)

    def losses(factor: float) -> Any:
        clean = np.array([5.0 * (value * factor) ** -0.1 for value in x])
        return clean[:, None] * np.exp(rng.normal(0, 0.002, size=(3, 5)))

    found = scaling({"c": x, "v": x}, {"c": losses(1.0), "v": losses(1 / 0.65)}, "c")
    assert found.slope.mean == pytest.approx(0.1, abs=0.005)
    ratio = found.savings["v"]
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low < 0.65 < ratio.high
    assert ratio.high - ratio.low < 0.1


def test_sizes_of_variants_need_not_be_equal() -> None:
    """The variant has more parameters at each point, and lies on the control's line: it saves nothing."""
    small, large = [1e6, 3e6, 1e7], [1.1e6, 3.2e6, 1.05e7]
    curve = {name: np.array([[5.0 * value**-0.1] for value in x]) for name, x in (("c", small), ("v", large))}
    found = scaling({"c": small, "v": large}, curve, "c")
    assert found.savings["v"].mean == pytest.approx(1.0)
    assert found.savings["v"].low is None


def test_where_the_loss_does_not_fall_there_is_no_ratio() -> None:
    x, rng = [1e6, 3e6, 1e7], np.random.default_rng(0)
    flat = {name: 5.0 + rng.normal(0, 0.01, size=(3, 4)) for name in "cv"}
    assert scaling({"c": x, "v": x}, flat, "c").savings == {}
    rising = {name: np.array([[4.0], [4.5], [5.0]]) for name in "cv"}
    assert scaling({"c": x, "v": x}, rising, "c").savings == {}


def test_curves_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="shapes"):
        scaling({"c": [1, 2], "v": [1, 2]}, {"c": np.ones((2, 2)), "v": np.ones((2, 3))}, "c")


def test_running_means_are_means() -> None:
    from dex.plots.curves import smoothed

    row = np.arange(10.0)
    assert smoothed(row[None], 3)[0] == pytest.approx([np.mean(row[i : i + 3]) for i in range(8)])
    assert all(b > a for a, b in pairwise(smoothed(row[None], 4)[0]))
