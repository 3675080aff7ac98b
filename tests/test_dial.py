"""The λ dial: an attached model at S·λ, its folds, and the loss against S."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from test_fold import trained_adapter
from tiny import move_trainables, tiny_model, tokens
from torch.nn import functional as F
from typer.testing import CliRunner

import dex
from dex.cli import app
from dex.errors import DexError
from dex.evaluation.held_out import TASK
from dex.evaluation.records import Record, Result, Task
from dex.evaluation.significance import holm
from dex.layer import apply_branch
from dex.recipe import load_recipe
from dex.suites import suite
from dex.tuner import dex_outputs
from dex.tuner.callback import BranchRatios, lams
from dex.tuner.scaling import scale_lambda, scale_name
from dex.verbs import dial as module
from dex.verbs import fold as fold_module
from dex.verbs.dial import CURVE, DIAL, TABLE, dial
from dex.verbs.evaluate import evaluate
from dex.verbs.fold import fold, fold_at_scales

SCALES = [0.0, 0.5, 1.0, -1.0]


def attached(family: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """An attached model whose every adapter tensor has moved away from where it starts."""
    torch.manual_seed(1)
    given = {"heads": [[0, 2], [1], [0, 1, 3]], "schedule": "land", "anneal_steps": 4, **options}
    model = get_peft_model(tiny_model(family, dtype=dtype), dex.DexConfig(task_type="CAUSAL_LM", **given)).eval()
    move_trainables(model, 5)
    for layer in dex_outputs(model):
        layer.dex_step["default"].fill_(3)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens(seed=99)).logits


# The attached model


@pytest.mark.parametrize("family", ["llama-bias", "qwen3"])
@pytest.mark.parametrize("options", [{}, {"w_d_per": "head"}, {"sign": "plus"}])
@pytest.mark.parametrize("scale", [-1.0, 0.0, 0.3, 2.0])
def test_a_scaled_layer_is_the_plain_equation_with_lambda_multiplied_by_hand(
    family: str, options: dict[str, Any], scale: float
) -> None:
    model = attached(family, **options)
    for layer in dex_outputs(model):
        heads = torch.randn(2, 3, layer.in_features, generator=torch.Generator().manual_seed(7))
        w_d, lam = layer.w_d("default").double(), scale * layer.lam("default").double()
        weight, bias = layer.dex_weight["default"].double(), layer.dex_bias.get("default")
        new = apply_branch(heads.double(), w_d, lam, layer.dex_selected["default"].double())
        expected = F.linear(new, weight, None if bias is None else bias.double())
        with scale_lambda(model, scale):
            torch.testing.assert_close(layer(heads).double(), expected, rtol=1e-5, atol=1e-5)
            merged, _ = layer.projection_to_merge("default")
        bare = expected if bias is None else expected - bias.double()
        torch.testing.assert_close(heads.double() @ merged.T, bare, rtol=1e-6, atol=1e-6)


def test_the_folded_weight_is_linear_in_the_scale() -> None:
    model = attached(w_d_per="head")

    def folded(scale: float) -> torch.Tensor:
        with scale_lambda(model, scale):
            return torch.stack([layer.projection_to_merge("default")[0] for layer in dex_outputs(model)])

    at_0, at_1 = folded(0.0), folded(1.0)
    assert not torch.equal(at_0, at_1)
    for scale in (-2.0, 0.25, 3.0):
        torch.testing.assert_close(folded(scale), at_0 + scale * (at_1 - at_0), rtol=1e-6, atol=1e-6)


def test_lambda_and_branch_ratio_are_those_of_the_scale() -> None:
    model = attached()

    def measured(scale: float) -> tuple[list[float], list[float]]:
        with scale_lambda(model, scale), BranchRatios(model) as ratios:
            logits(model)
            return lams(model), ratios.mean()

    (lam, ratio), (doubled, ratio_2), (none, ratio_0) = measured(1.0), measured(2.0), measured(0.0)
    assert doubled == pytest.approx([2 * each for each in lam])
    assert ratio_2[0] == pytest.approx(2 * ratio[0])  # the first layer reads the same at any scale
    assert none == ratio_0 == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale_1_is_the_model_as_trained_bit_for_bit_and_no_scale_stays(dtype: torch.dtype) -> None:
    model = attached(dtype=dtype)
    trained = logits(model)
    with scale_lambda(model, 1.0):
        assert torch.equal(logits(model), trained)
    with scale_lambda(model, 0.0):
        at_0 = logits(model)
        with scale_lambda(model, 2.0):
            assert not torch.equal(logits(model), at_0)
        assert torch.equal(logits(model), at_0)
    with pytest.raises(ZeroDivisionError), scale_lambda(model, 0.0):
        1 / 0  # noqa: B018
    assert not torch.equal(at_0, trained)
    assert torch.equal(logits(model), trained)


def test_an_adapter_that_is_saved_inside_has_its_own_lambda(tmp_path: Path) -> None:
    model = attached()
    model.save_pretrained(tmp_path / "outside", save_embedding_layers=False)
    with scale_lambda(model, 0.5):
        model.save_pretrained(tmp_path / "inside", save_embedding_layers=False)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "inside" / name).read_bytes() == (tmp_path / "outside" / name).read_bytes()


def test_what_is_merged_inside_stays_and_is_undone_bit_for_bit() -> None:
    model = attached()
    with scale_lambda(model, 0.5):
        scaled = logits(model)
        model.merge_adapter()
    torch.testing.assert_close(logits(model), scaled, rtol=1e-4, atol=1e-4)
    model.unmerge_adapter()
    assert torch.equal(logits(model), logits(attached()))


def test_a_scale_that_would_do_nothing_is_refused() -> None:
    with pytest.raises(DexError, match="no λ to scale"), scale_lambda(tiny_model("llama"), 0.5):
        pass
    with (
        pytest.raises(DexError, match="no λ to scale"),
        scale_lambda(attached(schedule="off", anneal_steps=None), 0.5),
    ):
        pass
    merged = attached()
    merged.merge_adapter()
    with pytest.raises(DexError, match="unmerge_adapter"), scale_lambda(merged, 0.5):
        pass
    with pytest.raises(DexError, match="inf"), scale_lambda(attached(), math.inf):
        pass


def test_different_scales_have_different_names() -> None:
    assert [scale_name(s) for s in (0, -0.0, 0.5, 1, -1.5, 1e-7)] == ["0", "0", "0.5", "1", "-1.5", "1e-07"]
    assert scale_name(0.1 + 0.2) != scale_name(0.3)


# The folds, and the loss against the scale


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/, adapter/ and recipe.yaml, as in the folder of a run; folds/ at SCALES, and plain/, as trained."""
    made = tmp_path_factory.mktemp("dial")
    adapter = trained_adapter(made)
    (made / "text").mkdir()
    for index in range(20):
        words = " ".join(f"{(17 * index + 5 * n) % 97} bottles" for n in range(60))
        (made / "text" / f"{index}.txt").write_text(words)
    (made / "recipe.yaml").write_text(
        f"model: {{id: {made / 'base'}}}\ndata:\n  train: [{{source: {made / 'text'}}}]\n  block: 64\n"
        f"  held_out: 0.3\nrun: {{tokens: 64, batch_tokens: 64}}\noutput: {made / 'run'}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fold_module, "_ask_witness", _witness_of_this_process)
        patch.setenv("DEX_CACHE", str(made / "cache"))
        fold(adapter, made / "plain")
        fold_at_scales(adapter, made / "folds", SCALES)
    return made


def _witness_of_this_process(folder: Path, ids: torch.Tensor, scratch: Path, dtype: torch.dtype) -> dict[str, Any]:
    """The witness itself is the affair of test_fold.py, and its imports take seconds a fold."""
    from dex.models import load_model

    model = load_model(str(folder)).model
    assert model.dtype == dtype
    fold_module._write_logits(model, ids, scratch / "folded")
    return {"class": type(model).__name__, "imported_dex": False}


@pytest.fixture(autouse=True)
def _own_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "folder" in request.fixturenames:
        monkeypatch.setenv("DEX_CACHE", str(request.getfixturevalue("folder") / "cache"))


@pytest.fixture(scope="module")
def curve(folder: Path) -> module.Dial:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEX_CACHE", str(folder / "cache"))
        return dial(folder / "adapter", folder / "dial", scales=SCALES, batch_size=3)


def test_every_scale_gets_a_certified_folder_and_1_is_the_plain_fold_bit_for_bit(folder: Path) -> None:
    assert sorted(path.name for path in (folder / "folds").iterdir()) == [
        "lambda--1",
        "lambda-0",
        "lambda-0.5",
        "lambda-1",
    ]
    plain, at_1 = folder / "plain", folder / "folds" / "lambda-1"
    assert (plain / "model.safetensors").read_bytes() == (at_1 / "model.safetensors").read_bytes()
    for scale in SCALES:
        one = json.loads((folder / "folds" / f"lambda-{scale_name(scale)}" / "certificate.json").read_text())
        assert one["passed"]
        assert one["lambda_scale"] == scale
        trained = json.loads((plain / "certificate.json").read_text())["branch"]["lam"]
        assert one["branch"]["lam"] == pytest.approx([scale * lam for lam in trained])


def test_at_0_the_folded_weights_are_the_trained_copies_as_they_are(folder: Path) -> None:
    folded = load_file(folder / "folds" / "lambda-0" / "model.safetensors")
    copies = load_file(folder / "adapter" / "adapter_model.safetensors")
    names = [name for name in copies if name.endswith(("dex_weight", "dex_bias"))]
    assert len(names) == 9
    for name in names:
        stock = name.removeprefix("base_model.model.").replace("dex_", "")
        assert torch.equal(copies[name], folded[stock]), name


def test_a_low_precision_fold_at_a_scale_is_held_to_the_rounding_of_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fold_module, "_ask_witness", _witness_of_this_process)
    adapter = trained_adapter(tmp_path, "qwen2", torch.bfloat16)
    certificate = fold(adapter, tmp_path / "folded", lambda_scale=1.5)
    assert certificate["folded_against_attached"]["kl"] <= certificate["rounding_of_the_base"]["kl"]
    assert certificate["lambda_scale"] == 1.5


def test_the_losses_of_the_dial_are_those_of_the_folded_folders(folder: Path, curve: module.Dial) -> None:
    held_out = suite("perplexity", recipe=str(folder / "recipe.yaml"))
    folds = [folder / "folds" / f"lambda-{scale_name(point.scale)}" for point in curve.points]
    results = evaluate(folds, folder / "eval", held_out, batch_size=2)
    assert [point.scale for point in curve.points] == sorted(SCALES)
    for point, result in zip(curve.points, results, strict=True):
        assert point.loss == pytest.approx(result.score(TASK), abs=1e-5)
    assert len({point.loss.mean for point in curve.points}) == len(SCALES)
    assert curve.trained.against_one is None


def test_what_is_written_says_what_was_measured(folder: Path, curve: module.Dial) -> None:
    assert sorted(path.name for path in (folder / "dial").iterdir()) == sorted([DIAL, TABLE, CURVE])
    written = json.loads((folder / "dial" / DIAL).read_text())
    assert written["recipe"] == str(folder / "recipe.yaml")
    assert [point["scale"] for point in written["points"]] == [-1.0, 0.0, 0.5, 1.0]
    assert written["points"][1]["branch_ratio"] == 0.0
    assert written["best"] == min(written["points"], key=lambda point: point["loss"]["mean"])["scale"]
    assert written["adapter"]["id"] == str(folder / "adapter")
    text = (folder / "dial" / TABLE).read_text()
    assert "as trained" in text
    assert "looks better on it than it is" in text or written["best"] == 1.0


def test_the_command_adds_scale_1_and_says_so(folder: Path) -> None:
    out = folder / "by-command"
    done = CliRunner().invoke(app, ["dial", str(folder / "adapter"), "-o", str(out), "--scale", "-1", "--json"])
    assert done.exit_code == 0, done.output
    assert "S = 1, as trained, is added" in done.stderr
    assert [point["scale"] for point in json.loads(done.stdout)["points"]] == [-1.0, 1.0]
    assert (out / CURVE).stat().st_size > 0


def test_the_recipe_is_the_locks_before_the_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(folder / "recipe.yaml", ["data.held_out_tokens=64"])
    data = SimpleNamespace(held_out="of other data")
    lock = SimpleNamespace(recipe=recipe.model_dump(mode="json"), data=data)
    monkeypatch.setattr(module, "read_lock", lambda place: lock)
    with pytest.raises(DexError, match="changed since"):
        dial(folder / "adapter", scales=[0.0])
    data.held_out = dial(folder / "adapter", recipe=recipe, scales=[0.0]).held_out["fingerprint"]
    made = dial(folder / "adapter", scales=[0.0])
    assert made.recipe == str(folder / "adapter" / "dex.lock")
    assert made.held_out["documents"] == 1
    assert "one document cannot show" in made.describe() or made.best.scale == 1.0


@pytest.mark.parametrize("fault", ["no branch", "lora", "not an adapter", "no recipe", "nan", "only 1", "long"])
def test_what_cannot_be_dialled_is_refused_in_one_sentence(folder: Path, tmp_path: Path, fault: str) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config: Any = dex.DexConfig(task_type="CAUSAL_LM", schedule="off" if fault == "no branch" else "land")
    if fault == "lora":
        config = LoraConfig()
    config.base_model_name_or_path = str(folder / "base")
    if fault != "not an adapter":
        config.save_pretrained(adapter)
    said = {
        "no branch": "no branch",
        "lora": "LORA",
        "not an adapter": "not the folder",
        "no recipe": "--recipe",
        "nan": "nan",
        "only 1": "another scale",
        "long": "context of 512",
    }
    scales = {"nan": [math.nan], "only 1": [1.0]}.get(fault, [0.0, 2.0])
    recipe: Any = None if fault == "no recipe" else folder / "recipe.yaml"
    if fault == "long":
        adapter = folder / "adapter"
        recipe = load_recipe(recipe, ["data.block=1024", "run.batch_tokens=1024", "run.tokens=1024"])
    with pytest.raises(DexError, match=said[fault]):
        dial(adapter, tmp_path / "out", recipe=recipe, scales=scales)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("schedule", ["off", "lora"])
def test_a_fold_with_a_scale_is_refused_without_a_branch(tmp_path: Path, schedule: str) -> None:
    config: Any = LoraConfig() if schedule == "lora" else dex.DexConfig(schedule="off")
    config.base_model_name_or_path = "nowhere"
    config.save_pretrained(tmp_path / "adapter")
    for scales in ([1.0], [0.0, 0.5]):
        with pytest.raises(DexError, match="no branch"):
            fold_at_scales(tmp_path / "adapter", tmp_path / "out", scales)
    with pytest.raises(DexError, match="no branch"):
        fold(tmp_path / "adapter", tmp_path / "out", lambda_scale=1.0)


def test_folds_at_several_scales_spare_what_is_there(folder: Path) -> None:
    with pytest.raises(DexError, match="twice"):
        fold_at_scales(folder / "adapter", folder / "new", [0.5, 0.50])
    with pytest.raises(DexError, match="want a folder to themselves"):
        fold_at_scales(folder / "adapter", folder / "plain", [0.0, 0.5])
    with pytest.raises(DexError, match="--force"):
        fold_at_scales(folder / "adapter", folder / "folds", [3.0, 0.5])
    assert not (folder / "folds" / "lambda-3").exists()
    assert not (folder / "new").exists()


def test_a_dial_that_fails_leaves_nothing_and_replaces_only_a_dial(
    curve: module.Dial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(DexError, match=DIAL):
        curve.write(tmp_path / "mine", force=True)
    monkeypatch.setattr(module, "write_json", _full_disk)
    with pytest.raises(DexError, match="full"):
        curve.write(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def _full_disk(path: Path, value: Any) -> None:
    raise DexError(f"{path} could not be written: the disk is full.")


def test_without_matplotlib_the_figure_is_left_out_and_that_is_said(
    curve: module.Dial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    curve.write(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [DIAL, TABLE]
    assert f"no {CURVE}" in capsys.readouterr().err


def result_of(scale: float, losses: list[float]) -> Result:
    """A document a block."""
    records = [Record(TASK, f"{i}.0", "same", None, loss, str(i), 10) for i, loss in enumerate(losses)]
    return Result("perplexity", scale_name(scale), {}, {}, {TASK: Task("loss", higher_is_better=False)}, records)


def planted(ratio: float = 0.1, **losses: float) -> module.Dial:
    """A dial whose losses are, of 12 documents, as given for each scale; with a spread where the name says so."""
    scales = {"half": 0.5, "one": 1.0, "two": 2.0}
    spread = [0.1 * (-1) ** i for i in range(12)]
    results = [
        (result_of(scales[name], [2.0 + 0.01 * i + loss + (name == "two") * spread[i] for i in range(12)]), ratio)
        for name, loss in losses.items()
    ]
    points = module._points([scales[name] for name in losses], results)
    return module.Dial({}, "r.yaml", {"targets": 120, "documents": 12}, [0.1], points)


def test_a_planted_difference_is_found_and_adjusted_for_the_number_of_scales() -> None:
    made = planted(half=-0.05, one=0.0, two=0.001)
    half, one, two = made.points
    assert (made.best, made.trained) == (half, one)
    assert half.against_one is not None
    assert two.against_one is not None
    assert half.against_one.difference.mean == pytest.approx(-0.05)
    assert [half.against_one.p, half.against_one.verdict] == [pytest.approx(2 / 2**12), "better"]
    raw = [half.against_one.p, two.against_one.p]
    assert [half.against_one.p_adjusted, two.against_one.p_adjusted] == pytest.approx(holm(raw))  # type: ignore
    assert "more than the difference between documents explains" in made.describe()
    assert "--lambda-scale 0.5" in made.describe()


def test_a_lower_loss_that_documents_cannot_show_is_no_reason_to_leave_1() -> None:
    made = planted(one=0.0, two=-0.01)
    assert made.best.scale == 2.0
    assert "no reason to leave S = 1" in made.describe()
    assert "looks better on it than it is" in made.describe()


def test_a_difference_that_is_shown_and_tiny_is_shown_to_be_tiny() -> None:
    words = planted(half=-5e-5, one=0.0).describe()
    assert "-0.000050 [-0.000050, -0.000050]" in words
    assert "a perplexity 0.005 % lower" in words


def test_where_1_is_best_nothing_is_chosen_and_nothing_warned_of() -> None:
    words = planted(half=0.02, one=0.0).describe()
    assert "the lowest loss is at S = 1, as trained" in words
    assert "looks better" not in words


def test_an_inert_branch_is_said_to_be_inert() -> None:
    assert "inert as trained (mean ratio 2.0e-05)" in planted(ratio=2e-5, half=0.0, one=0.0).describe()
    assert "inert" not in planted(ratio=0.1, half=0.0, one=0.0).describe()
