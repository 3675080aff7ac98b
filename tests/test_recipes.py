"""What shipped recipes promise: the paper's budget, one change a baseline, copies that run, launchers that fit."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import tiny_model, tiny_tokenizer

from dex import cli, processes, shipped
from dex.data.chat import ChatTemplate, Rendered
from dex.errors import DexError
from dex.methods import METHODS
from dex.models import use_chat_template
from dex.recipe import Recipe, load_recipe

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "recipes"
SHIPPED = sorted(FOLDER.glob("*.yaml"))
REFERENCE = "llama-3.2-1b-dolmino"
BASELINES = [path.stem for path in SHIPPED if path.stem.startswith(f"{REFERENCE}-")]
LAUNCHERS = ("ddp", "fsdp2", "zero2", "zero3", "cpu")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`run("ls", …)` → (exit code, stdout, stderr) of `dex recipes ls …`."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dex", "recipes", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return int(stop.value.code or 0), *capsys.readouterr()

    yield call
    logging.disable(logging.NOTSET)


def recipe(name: str) -> Recipe:
    return load_recipe(FOLDER / f"{name}.yaml")


# --- the recipes


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_recipe_is_named_after_its_output_and_begins_with_its_command_and_purpose(path: Path) -> None:
    assert load_recipe(path).output == f"runs/{path.stem}"
    command, blank, about = path.read_text().splitlines()[:3]
    assert command.removeprefix("# ").split()[0] in ("dex", "accelerate")
    assert command.endswith(f" train recipes/{path.name}")
    assert blank == "#"
    assert about.startswith("# ")
    assert about.endswith(".")


@pytest.mark.parametrize("name", [p.stem for p in SHIPPED if "dolmino" in p.stem or "retrieval" in p.stem])
def test_the_budget_is_the_papers(name: str) -> None:
    loaded = recipe(name)
    assert (loaded.steps, loaded.run.tokens, loaded.run.batch_tokens) == (106, 889_192_448, 8_388_608)
    assert abs(loaded.run.tokens - 887_000_000) <= loaded.run.batch_tokens / 2
    assert (loaded.data.block, loaded.blocks_per_step) == (32_768, 256)
    assert (loaded.run.lr, loaded.run.decay, loaded.run.warmup) == (1e-4, "cosine", 0.03)


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_differs_from_the_reference_in_its_method_alone(name: str) -> None:
    reference, baseline = recipe(REFERENCE), recipe(name)
    assert baseline.data == reference.data
    assert baseline.model.id == reference.model.id
    assert baseline.method != reference.method
    assert baseline.run.model_copy(update={"autocast": False}) == reference.run  # the one key, beside model.dtype
    in_float32 = baseline.method.in_place or baseline.method.name == "pissa"
    assert (baseline.model.dtype, baseline.run.autocast) == (("float32", True) if in_float32 else ("bfloat16", False))


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ("plus", {"sign": "plus"}),
        ("adapter", {"train_kvo": False}),
        ("w-d-per-head", {"w_d_per": "head"}),
        ("land", {"schedule": "land", "w_d_init": "zeros"}),
        ("fixed", {"schedule": "fixed", "w_d_init": "zeros"}),
        ("all-heads", {"heads": {"criterion": "all"}}),
        ("random-heads", {"heads": {"criterion": "random"}}),
        ("low-importance", {"heads": {"criterion": "importance"}}),
    ],
)
def test_a_control_of_dex_changes_what_its_name_says_and_nothing_else(change: str, keys: dict[str, Any]) -> None:
    expected = recipe(REFERENCE).method.model_dump()
    expected["heads"] |= keys.pop("heads", {})
    assert recipe(f"{REFERENCE}-{change}").method.model_dump() == expected | keys


def test_every_method_has_a_recipe_on_the_reference_model() -> None:
    assert {recipe(name).method.name for name in (REFERENCE, *BASELINES)} == set(METHODS)


def test_the_models_of_one_data_set_are_trained_alike() -> None:
    for data in ("dolmino", "openhermes"):
        alike = [load_recipe(path) for path in SHIPPED if path.stem.endswith(data)]
        assert len({(each.data.model_dump_json(), each.run.model_dump_json()) for each in alike}) == 1
        assert len({each.method.model_dump_json() for each in alike}) == 1
        assert len({each.model.id for each in alike}) == len(alike) > 1


def test_instruction_tuning_gives_base_models_a_template_and_instruct_models_their_own() -> None:
    for path in SHIPPED:
        if path.stem.endswith("openhermes"):
            model = load_recipe(path).model
            assert (model.chat_template is None) == model.id.endswith("-Instruct")
            assert model.chat_template is None or (ROOT / model.chat_template).is_file()


def test_what_projects_gradients_projects_anew_within_the_run() -> None:
    for name in ("galore", "apollo"):
        loaded = recipe(f"{REFERENCE}-{name}")
        assert loaded.method.model_dump()["gap"] < loaded.steps / 2


def test_recipes_work_on_as_many_gpus_as_their_launchers_start() -> None:
    for path in SHIPPED:
        if "accelerate launch" in path.read_text().splitlines()[0]:
            loaded = load_recipe(path)
            assert loaded.blocks_per_step % (loaded.run.micro_batch * 8) == 0


# --- the chat template


@pytest.mark.parametrize("bos", ["<bos>", None])
def test_the_plain_template_ends_each_assistant_turn_with_eos_and_uses_no_other_special_token(
    bos: str | None,
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = bos
    use_chat_template(tokenizer, FOLDER / "chat" / "plain.jinja")
    turns = [("system", "Be brief."), ("human", " Hi\n"), ("gpt", "Hello.\n\nYou? "), ("human", "2"), ("gpt", "ok")]
    rendered = ChatTemplate(tokenizer, "x").render([{"from": role, "value": text} for role, text in turns])
    assert isinstance(rendered, Rendered)
    start = bos or ""
    assert rendered.text == (
        f"{start}System: Be brief.\nUser: Hi\nAssistant: Hello.\n\nYou?<eos>\nUser: 2\nAssistant: ok<eos>"
    )
    assert [rendered.text[span.start : span.stop] for span in rendered.spans] == ["Hello.\n\nYou?", "ok"]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == f"{start}User: Hi\nAssistant:"  # its answer begins with the space, as in training


# --- the launchers' configurations


def launched(name: str, *arguments: str) -> tuple[Any, dict[str, str]]:
    """What `accelerate launch` makes of a configuration: its arguments, and the environment of each process."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    command = ["--config_file", str(FOLDER / "accelerate" / f"{name}.yaml"), *arguments, "-m", "dex.cli"]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        return args, prepare_deepspeed_cmd_env(args)[1]
    return args, prepare_multi_gpu_env(args)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_accelerate_accepts_every_configuration_and_leaves_the_casting_to_dex(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(FOLDER / "accelerate" / f"{name}.yaml"))
    assert config.mixed_precision == "no"
    args, _ = launched(name, "--num_processes", "3")
    assert args.num_processes == 3
    assert args.use_deepspeed or args.use_fsdp or args.multi_gpu  # anything else would start one process


def test_the_fsdp_configuration_asks_for_what_dex_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    _, environment = launched("fsdp2")
    assert environment["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"
    for key in [key for key in environment if key.startswith(("FSDP_", "ACCELERATE_"))]:
        monkeypatch.setenv(key, environment[key])
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(processes, "has_accelerator", lambda: False)
    with pytest.raises(DexError, match="here is no GPU"):
        processes.refuse_sharding_that_is_not_to_be_had()
    monkeypatch.setattr(processes, "has_accelerator", lambda: True)
    processes.refuse_sharding_that_is_not_to_be_had()


def test_fsdp_shards_the_layers_of_an_adapted_model_by_themselves() -> None:
    from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
    from peft import get_peft_model
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    from dex.tuner import DexConfig

    model = get_peft_model(tiny_model(), DexConfig(task_type="CAUSAL_LM", schedule="off"))
    _, environment = launched("fsdp2")
    assert environment["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
    assert "FSDP_TRANSFORMER_CLS_TO_WRAP" not in environment
    plugin = SimpleNamespace(auto_wrap_policy=transformer_auto_wrap_policy, transformer_cls_names_to_wrap=None)
    policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert [module for module in model.modules() if policy(module)] == list(model.get_base_model().model.layers)


@pytest.mark.parametrize("stage", ["2", "3"])
def test_the_zero_configurations_take_batch_and_clipping_from_the_recipe(stage: str) -> None:
    _, environment = launched(f"zero{stage}")
    given = {key.removeprefix("ACCELERATE_"): value for key, value in environment.items()}
    assert given["DEEPSPEED_ZERO_STAGE"] == stage
    assert given["GRADIENT_ACCUMULATION_STEPS"] == given["GRADIENT_CLIPPING"] == "auto"
    assert given["DEEPSPEED_ZERO3_INIT"] == "false"


# --- dex recipes


def test_the_list_has_every_recipe_with_its_method_model_tokens_and_purpose(run: Any) -> None:
    code, out, _ = run("ls", "--json")
    assert code == 0
    found = json.loads(out)
    assert [each["name"] for each in found["recipes"]] == sorted(path.stem for path in SHIPPED)
    assert found["recipes"][0] == {
        "name": "demo",
        "method": "dex",
        "model": "smollm2-135m-instruct",
        "tokens": 30_720,
        "about": "Dex as in the paper, small enough for two CPU cores.",
    }
    companions = {each["name"]: each["about"] for each in found["companions"]}
    studies = (f"studies/{path.stem}" for path in (FOLDER / "studies").glob("*.yaml"))
    assert set(companions) == {*(f"accelerate/{name}" for name in LAUNCHERS), "chat/plain.jinja", *studies}
    assert all(companions.values())
    code, out, _ = run("ls")
    assert code == 0
    assert all(each["name"] in out and each["about"] in out for each in found["recipes"])


def test_a_copy_is_the_recipe_under_a_command_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shipped.copy("demo").path == Path("demo.yaml")
    copy, original = Path("demo.yaml").read_text(), (FOLDER / "demo.yaml").read_text()
    assert copy.splitlines()[0] == "# dex train demo.yaml"
    assert copy.splitlines()[1:] == original.splitlines()[1:]
    assert load_recipe("demo.yaml") == recipe("demo")
    assert shipped.copy("recipes/demo.yaml", Path("mine/first run.yaml")).missing == []
    assert Path("mine/first run.yaml").read_text().startswith("# dex train 'mine/first run.yaml'\n")
    assert shipped.copy("demo-live", Path("mine")).path == Path("mine/demo-live.yaml")


def test_a_copy_says_what_else_it_needs_and_that_can_be_copied_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = shipped.copy("llama-3.1-8b-openhermes")
    assert sorted(made.missing) == ["accelerate/fsdp2.yaml", "chat/plain.jinja"]
    first = made.path.read_text().splitlines()[0]
    assert first.endswith("recipes/accelerate/fsdp2.yaml -m dex.cli train llama-3.1-8b-openhermes.yaml")
    for name in made.missing:
        assert f"dex recipes cp {name} recipes/{name}" in shipped.describe_copy(made)
        shipped.copy(name, Path("recipes", name))
        assert Path("recipes", name).read_text() == (FOLDER / name).read_text()
    assert shipped.copy("llama-3.1-8b-openhermes", Path("again.yaml")).missing == []
    assert shipped.copy("accelerate/fsdp2").path == Path("fsdp2.yaml")
    assert Path("fsdp2.yaml").read_text().startswith("# accelerate launch --config_file fsdp2.yaml ")


def test_a_copy_replaces_nothing_without_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo.yaml").write_text("mine")
    code, _, err = run("cp", "demo")
    assert (code, err.count("\n")) == (1, 1)
    assert "demo.yaml exists already" in err
    assert Path("demo.yaml").read_text() == "mine"
    code, out, _ = run("cp", "demo", "--force", "--json")
    assert (code, json.loads(out)) == (0, {"path": "demo.yaml", "missing": []})
    assert load_recipe("demo.yaml") == recipe("demo")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lora", "did you mean llama-3.2-1b-dolmino-lora?"),
        ("llama-3.2-1b-dolmno", "did you mean llama-3.2-1b-dolmino?"),
        ("chat/plain", "did you mean chat/plain.jinja?"),
        ("accelerate/fsdp", "did you mean accelerate/fsdp2?"),
        ("", "`dex recipes ls` lists them."),
        ("../pyproject", "`dex recipes ls` lists them."),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(DexError, match=r"is no recipe that comes with dex; ") as caught:
        shipped.copy(name)
    assert hint in str(caught.value)


def test_everything_in_the_folder_is_found_through_the_package_and_listed_without_torch() -> None:
    assert {each.path for each in shipped.shipped()} == {
        path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.suffix in (".yaml", ".jinja")
    }
    code = "import sys; from dex import shipped; shipped.describe(shipped.catalogue()); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
