"""`import dex`: a function for every command, of the command's name, loaded when it is first used."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import typer
from tiny import write_tiny

import dex
from dex import cli

ROOT = Path(__file__).parents[1]
COMMANDS = {command.name or command.callback.__name__: command.callback for command in cli.app.registered_commands}
COMMANDS |= {f"export {command.name}": command.callback for command in cli.export_app.registered_commands}
# Where the function has another name: `dex.heads` is a module, `eval` is Python's own, and a card is no verb.
FUNCTIONS = {"heads": "write_plan", "eval": "evaluate", "card": "write_card", "export gguf": "export_gguf"}
# An option of the command line, where the function takes it in another form, or leaves it to Python.
CARRIED = {
    "heads": {"criterion", "per_layer", "data", "sequences", "length", "held_out", "seed"},  # Choice
    "convert": {"plan", "criterion", "per_layer", "data", "sequences", "length", "held_out", "schedule"}
    | {"anneal_steps", "lam", "w_d_init", "train_kvo", "layer", "layout", "layout_heads", "norm", "option"},
    "init": {"option"},
    "train": {"overrides", "dry_run"},
    "plan": {"subject", "overrides", "revision"},  # plan_model
    "eval": {"settings", "recipe"},  # dex.suite
    "dial": {"scale"},  # scales
    "analyze": {
        "data",
        "sequences",
        "length",
        "held_out",
        "span",
        "signs",
        "first_token",
        "threshold",
        "only",
        "seed",
    },
    "study": {"file", "overrides", "only", "report"},
    "compare": {"require_no_regression", "margin"},  # Comparison.refusal
}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_a_function_that_takes_its_options(command: str) -> None:
    function = getattr(dex, FUNCTIONS.get(command, command))
    takes = set(inspect.signature(function).parameters)
    options = set(inspect.signature(COMMANDS[command]).parameters) - {"context", "as_json"}
    assert options - takes == CARRIED.get(command, set())


def test_the_names_for_type_checkers_are_those_that_are_loaded() -> None:
    tree = ast.parse((ROOT / "dex" / "__init__.py").read_text(encoding="utf-8"))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {(node.module, alias.asname) for node in block.body for alias in node.names}  # type: ignore[attr-defined]
    assert typed == {(home, name) for name, home in dex._HOME.items()}


@pytest.mark.parametrize("name", sorted(dex._HOME))
def test_every_name_loads_and_every_function_is_typed(name: str) -> None:
    value = getattr(dex, name)
    if inspect.isfunction(value):
        hints = typing.get_type_hints(value, {**vars(sys.modules[value.__module__]), **vars(typing)})
        assert hints.keys() == {*inspect.signature(value).parameters, "return"}
        assert value.__doc__


def test_importing_dex_loads_neither_torch_nor_transformers() -> None:
    code = "import dex, sys; dir(dex); print({'torch', 'transformers', 'peft'} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
    )


def test_a_function_stays_one_after_its_module_was_imported() -> None:
    import dex.verbs.train

    assert callable(dex.train)
    assert dex.train is dex.verbs.train.train


def test_a_model_goes_through_python_as_through_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEX_CACHE", str(tmp_path / "cache"))
    base, file = write_tiny(tmp_path / "base"), tmp_path / "recipe.yaml"
    file.write_text(
        f"model: {{id: {base}}}\nmethod: {{name: dex, heads: {{sequences: 2, length: 64}}}}\n"
        "data: {train: [{source: pydoc}], block: 32, held_out_tokens: 64}\n"
        f"run: {{tokens: 128, batch_tokens: 64, lr: 1.0e-3}}\noutput: {tmp_path / 'run'}\n",
        encoding="utf-8",
    )
    assert dex.plan(file, device="cpu").method == "dex"
    trained = dex.train(dex.load_recipe(file, ["run.seed=1"]))
    assert trained["steps"] == 2
    assert dex.fold(tmp_path / "run" / "adapter", tmp_path / "folded")["passed"]
    suite = dex.suite("perplexity", recipe=str(tmp_path / "run" / "recipe.yaml"))
    results = dex.evaluate([base, tmp_path / "folded"], tmp_path / "results", suite)
    assert [result.label for result in results] == ["base", "folded"]
    compared = dex.compare([tmp_path / "results"], against="base")
    assert compared._repr_markdown_().startswith("| ")
    report = dex.analyze(
        base, tmp_path / "inside", {"sequences": 2, "length": 32}, sections=["attention"], figures=False
    )
    assert [model.label for model in report.models] == ["base"]


def test_a_mistake_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(dex.DexError, match=r"^\S.*none\.yaml does not exist"):
        dex.train(tmp_path / "none.yaml")
    with pytest.raises(dex.DexError, match="sequence"):
        dex.analyze("x", tmp_path / "out", {"sequence": 2})


def test_every_command_is_registered() -> None:
    assert {"train", "fold", "eval", "compare"} <= COMMANDS.keys()
    assert isinstance(cli.app, typer.Typer)
