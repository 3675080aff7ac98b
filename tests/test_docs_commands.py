"""Every command of the documentation runs, on small stand-ins; what cannot run here is listed with the reason.

A page's commands run in their order, in one folder (tests/docs_workplace.py). The tables below are all that a test
does otherwise than the page says: words that stand for something of the reader's, smaller budgets, and what is only
parsed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docs_workplace
import nltk
import pytest
import typer
from docs_pages import PAGES, ROOT, Block, blocks, code_words, commands
from hub_server import HubServer
from judge_server import JudgeServer
from matplotlib.figure import Figure
from ruamel.yaml import YAML

from dex import cli
from dex.data import Source
from dex.data.sources import read_documents
from dex.evaluation import harness_tasks
from dex.models import ModelSource, load_tokenizer
from dex.recipe import Recipe, load_recipe
from dex.studies.study_file import load_study
from dex.verbs import study as verb_of_studies

# What a word of the pages stands for. OUT is another folder in every command.
STAND_INS = {
    "MODEL": "meta-llama/Llama-3.2-1B",
    "BASE": "smollm2-135m-instruct",
    "ADAPTER": "runs/dex/adapter",
    "R.yaml": "r.yaml",
    "STUDY.yaml": "study.yaml",
    "http://localhost:8000/v1": "JUDGE",  # the judge of the tests
}

# Budgets: words added to every command that a pattern finds, in this order.
OF_DEX = r"^dex (train|plan) (?!.*\bname: (?!dex))(?!.*(control|-lora|--device|plan:))"  # runs that choose heads
SMALLER = {
    r"^dex train ": "data.block=64 run.tokens=128 run.batch_tokens=64 run.micro_batch=1 run.save_every=null "
    "run.eval_every=null data.held_out=0.5 data.held_out_tokens=128 data.held_out_per_document=null",
    # Fewer than six documents cannot show a regression, and a push would be refused.
    r"^dex train r.yaml .*output=runs/mine": "data.held_out_tokens=512 data.held_out_per_document=64",
    r"^dex train mine.yaml( --dry-run|$)": "model.id=meta-llama/Llama-3.2-1B output=runs/mine",
    OF_DEX: "method.heads.sequences=2 method.heads.length=64",
    r"^dex study ": "shared.data.block=64 shared.data.held_out_per_document=64 shared.data.held_out=0.3 "
    "shared.run.tokens=128 shared.run.batch_tokens=64 shared.run.micro_batch=1 'seeds=[0, 1]' 'sweep.lr=[1.0e-3]' "
    "sweep.extend=0",
    r"^dex study (?!.*(STUDY.yaml --|confirm))": "--only base",
    r"^dex study .*small": "shared.model.id=smollm2-135m-instruct",
    r"^dex study .*small-confirm.yaml": "--only paper",
    r"^dex study .*scratch.yaml": "shared.fresh.like=smollm2-135m-instruct fit=null "
    "'points={w64: {fresh: {config: {hidden_size: 64, intermediate_size: 192, head_dim: 16}}}}'",
    r"^dex heads ": "--sequences 2 --length 64",
    r"^dex convert ": "--sequences 2 --length 64",
    r"^dex analyze (?!.*--span)": "--sequences 2 --length 64",
    r"^dex analyze (?!.*--only)": "--only branch,attention --no-figures",
    r"^dex eval .*--suite perplexity(?!.*--recipe)": "--set tokens=256",
    r"^dex eval .*--suite lm(?!.*data=)": "--set data=rows/lm",
    r"^dex eval .*--suite instruct": "--set data=rows/instruct --set max_tokens=4",
    r"^dex eval .*--suite context-qa": "--set data=rows/texts --set length=256 --set items=2 "
    "--set answer_tokens=2 --set summary_tokens=2",
}

# Commands with words that only a reader can fill in, or whose budget is in those words.
INSTEAD = {
    # Two of a loop's four rates.
    "dex train recipes/llama-3.2-1b-dolmino-lora.yaml run.lr=1e-4 output=runs/lora-1e-4": [],
    "dex train recipes/llama-3.2-1b-dolmino-lora.yaml run.lr=3e-4 output=runs/lora-3e-4": [],
    "dex eval MODEL… --suite NAME --set key=value -o OUT": [
        "dex eval smollm2-135m-instruct runs/dex/adapter --suite perplexity --set block=64 -o OUT"
    ],
    "dex compare OUT/base OUT/dex -o OUT/compared": ["dex compare results/base results/dex -o compared-0"],
    # Two tasks of the eleven, and of three rows, lose less than this by chance alone.
    "dex compare results/base results/dex --tasks arc_easy,piqa --require-no-regression --margin 0.01": [
        "dex compare results/base results/dex --tasks arc_easy,piqa --require-no-regression --margin 1.5"
    ],
    "dex eval MODEL --suite lm --set data=FOLDER -o OUT": ["dex eval MODEL --suite lm --set data=rows/lm -o OUT"],
    "dex eval MODEL --suite instruct --set data=FOLDER --set max_tokens=256 -o OUT": [
        "dex eval MODEL --suite instruct --set data=rows/instruct --set max_tokens=4 -o OUT"
    ],
    "dex eval MODEL --suite needle --set lengths=[4096,16384,65536] --set queries=2 --set attention=true -o OUT": [
        "dex eval MODEL --suite needle --set lengths=[512] --set depths=[0,100] --set samples=1 --set needles=2 "
        "--set queries=2 --set attention=true -o OUT"
    ],
    "dex eval MODEL --suite manyshot --set data=banking77 --set 'shots=[16,64,256]' --set length=16384 -o OUT": [
        "dex eval MODEL --suite manyshot --set data=rows/labels.jsonl --set 'shots=[2,4]' --set length=1024 "
        "--set items=2 --set seeds=1 --set orderings=1 -o OUT"
    ],
    "dex eval MODEL --suite context-qa --set 'tasks=[hotpotqa,xsum]' --set length=4096 -o OUT": [
        "dex eval MODEL --suite context-qa --set 'tasks=[ask,sum]' -o OUT"
    ],
    "dex eval MODEL --suite context-qa --set data=FOLDER --set judge.url=http://localhost:8000/v1 "
    "--set judge.model=NAME -o OUT": [
        "dex eval MODEL --suite context-qa --set judge.url=JUDGE --set judge.model=NAME -o OUT"
    ],
    "dex convert MODEL --layout diff-v1 -o v1 [--heads doubled|paired] [--norm calibrate|anneal|off] "
    "[--option NAME=VALUE]": [
        "dex convert MODEL --layout diff-v1 -o v1 --heads doubled --norm calibrate --option lambda_mode=fixed"
    ],
    "dex convert MODEL --layout diffllama -o llama [--heads paired|doubled]": [
        "dex convert MODEL --layout diffllama -o llama --heads paired"
    ],
    "dex init --layout base|diff-v1|diff-v2|diffllama --like MODEL|config.json -o OUT [--seed N] "
    "[--option NAME=VALUE]": ["dex init --layout diff-v1 --like MODEL -o OUT --seed 1 --option lambda_mode=fixed"],
    "dex train recipes/demo.yaml 'method={name: full, train: [q_proj, k_proj, v_proj, o_proj, lambda_proj]}' …": [
        "dex train recipes/demo.yaml 'method={name: full, train: [q_proj, k_proj, v_proj, o_proj, lambda_proj]}' "
        "model.id=v2 output=runs/v2-attention"
    ],
}

# What is not run here, and why. Its options are checked all the same.
GPUS = "starts processes on several GPUs; tests/test_processes.py starts two on CPUs"
MEASURES = "measures this machine for minutes to hours"
NOT_RUN = {
    r"pip install ": "installs packages",
    r"make (demo|test|test-slow|lint|bench)": "is this test, or takes minutes to hours",
    r"(torchrun|accelerate launch) ": GPUS,
    r"python scripts/(bench\w*|plot_latency)\.py": MEASURES,
    r"python scripts/check_serving\.py": "runs engines on real models, some of which it installs",
    r"(vllm serve|llama-cli) ": "is another engine, which scripts/check_serving.py runs",
    r"python scripts/small_base\.py": "pretrains for 40 minutes",
    r"dex doctor$": "is run by tests/test_cli.py",
    r"python -m nltk\.downloader ": "downloads",
    r"hf auth login": "asks for a token",
}

# What has to be there before a page begins, beside tests/docs_workplace.py.
BEFORE: dict[str, list[str]] = {
    "README.md": ["dex heads smollm2-135m-instruct -o plan.json"],
    "choosing-heads.md": ["dex recipes cp demo mine.yaml"],
    "data.md": ["dex recipes cp demo mine.yaml"],
    "serving.md": [
        "dex train recipes/demo.yaml model.id=runs/demo/base output=runs/demo/dex",
        "dex train recipes/demo-control.yaml model.id=runs/demo/base output=runs/demo/control",
        "dex fold runs/demo/dex/adapter -o runs/demo/folded",
    ],
    "publishing.md": [
        "dex train r.yaml model.id=meta-llama/Llama-3.2-1B output=runs/mine",
        "dex train r.yaml 'method={name: attention}' model.id=meta-llama/Llama-3.2-1B output=runs/mine-control",
        "dex fold runs/mine/adapter -o folded",
    ],
    "evaluation.md": [
        "dex eval runs/base runs/dex/adapter runs/control/adapter --suite lm --set tasks=[arc_easy,piqa] "
        "--set data=rows/lm -o results"
    ],
}

PYTHON_BEFORE = {
    "serving.md": "from peft import PeftModel",
    "README.md": """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("smollm2-135m-instruct")
args = TrainingArguments("trained", max_steps=2, per_device_train_batch_size=1, report_to=[], use_cpu=True)
rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 2
""",
}
PYTHON_INSTEAD = {
    "Trainer(model, ..., ": "Trainer(model, args, train_dataset=rows, ",
    '"run.lr=3e-4"]': '"run.lr=3e-4", *SMALLER]',  # the budget of a `dex train` in this page
}

# Blocks without commands: equations and a list of files.
NO_COMMANDS = ("O'_h = ", "dex/layer.py ", "p_ij ", "W_O,h(S) = ")

CHECKED_IN = [page for page in PAGES if any(block.is_shell or block.language for block in blocks(page))]


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that every page gets a copy of: with models, data, a run of Dex and its control."""
    folder = tmp_path_factory.mktemp("docs") / "furnished"
    folder.mkdir()
    docs_workplace.furnish(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        docs_workplace.shorten_texts(patch)
        patch.setenv("DEX_CACHE", str(folder.parent / "cache"))
        for name, recipe in (("dex", "demo"), ("control", "demo-control")):
            run(f"dex train recipes/{recipe}.yaml output=runs/{name}")
        run("dex heads smollm2-135m-instruct -o heads/smollm2-135m-instruct-entropy.json")
        yield folder


@pytest.fixture
def workplace(
    furnished: Path, tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], None]]:
    folder = tmp_path / "work"
    shutil.copytree(furnished, folder, symlinks=True)
    docs_workplace.serve(hub, folder)
    monkeypatch.chdir(folder)
    docs_workplace.shorten_texts(monkeypatch)
    monkeypatch.setenv("DEX_CACHE", str(furnished.parent / "cache"))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    monkeypatch.setenv("HF_TOKEN", docs_workplace.TOKEN)
    monkeypatch.setattr(nltk.data, "path", [str(docs_workplace.untrained_splitter(tmp_path / "nltk"))])
    # Runs of a study in this process, and of the harness' index the folders of two tasks: each saves seconds.
    monkeypatch.setattr(verb_of_studies, "in_own_process", lambda work, *arguments: work(*arguments))
    index = harness_tasks._index
    monkeypatch.setattr(harness_tasks, "_index", lambda asked: index(asked or ("arc", "lambada")))
    # Figures are made, and not drawn: that takes as long as the runs that they are of.
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **options: Path(file).write_bytes(b""))
    judge = JudgeServer()
    yield lambda command: run(command.replace("JUDGE", judge.url))
    judge.close()


@pytest.mark.parametrize("page", CHECKED_IN, ids=lambda page: page.stem)
def test_every_command_of_a_page_runs_or_is_listed_with_the_reason_why_not(
    page: Path, workplace: Callable[[str], None]
) -> None:
    names: dict[str, Any] = {}
    queued: list[list[str]] = []  # commands that need a dex with the page's own files: all in one process
    names["SMALLER"] = stood_in("dex train recipes/demo.yaml")[3:]
    exec(PYTHON_BEFORE.get(page.name, ""), names)
    for command in BEFORE.get(page.name, []):
        workplace(command)
    for block in blocks(page):
        if block.language == "python":
            run_python(block, names)
        elif block.language == "yaml":
            check_settings(block)
        elif block.language == "jsonl":
            check_rows(block)
        for command in commands(block) if block.is_shell else []:
            if reason := reason_not_to_run(command):
                print(f"{block.place}: not run, since it {reason}: {command}")
                check_unrun(command)
            else:
                for words in INSTEAD.get(command, [command]):
                    queued.append(stood_in(words)[1:]) if Path("dex").exists() else workplace(words)
    if queued:
        docs_workplace.run_in_child(queued)


# --- Running one


def run(command: str) -> None:
    program, *words = stood_in(command)
    assert program == "dex", f"{command} is neither run nor listed: say in NOT_RUN why it cannot be"
    code, said = docs_workplace.dex(*words)
    assert code == 0, f"{shlex.join(['dex', *words])}\n{said[-3000:]}"


def stood_in(command: str) -> list[str]:
    """The words of a command, with the stand-ins of its words and the budgets of a test."""
    words = [STAND_INS.get(word, word) for word in shlex.split(command)]
    words = ["out" + str(len(list(Path().glob("out*")))) if word == "OUT" else word for word in words]
    for pattern, more in SMALLER.items():
        if re.search(pattern, command):
            words += shlex.split(more)
    return words


def run_python(block: Block, names: dict[str, Any]) -> None:
    """Run it, or with `# dex/…/NAME.py` as its first line, add it to a dex of the page's own."""
    text = block.text
    if file := re.match(r"# (dex/\S+\.py)\n", text):
        docs_workplace.own_dex()
        Path(file[1]).write_text(text)
        return
    for words, others in PYTHON_INSTEAD.items():
        text = text.replace(words, others)
    exec(compile("\n" * (block.line - 1) + text, str(block.page), "exec"), names)


# --- What is not commands


def check_settings(block: Block) -> None:
    """A block of YAML is a recipe's or a study's blocks; with `# NAME` as its first line, it is that file."""
    first = block.text.splitlines()[0]
    values = YAML(typ="safe").load(block.text)
    if set(values) <= set(Recipe.model_fields):
        demo = YAML(typ="safe").load((ROOT / "recipes/demo.yaml").read_text())
        recipe = demo | {"run": {"tokens": 2**20, "batch_tokens": 2**20}} | values
        file, load = Path("block.yaml"), load_recipe
    else:
        recipe, file, load = values, Path("block.yaml"), load_study
    with file.open("w") as stream:
        YAML().dump(recipe, stream)
    load(file)
    if first.startswith("# "):
        Path(first.removeprefix("# ")).write_text(block.text)


def check_rows(block: Block) -> None:
    """A block of JSON lines are rows of one source, of text or of conversations."""
    file = Path("block.jsonl")
    file.write_text(block.text)
    rows = [json.loads(line) for line in block.text.splitlines()]
    chat = not isinstance(rows[0].get("text"), str)
    tokenizer = load_tokenizer(ModelSource("smollm2-135m-instruct"))
    assert len(list(read_documents(Source(str(file), format="chat" if chat else "text"), None, tokenizer))) == len(
        rows
    )


def test_a_block_that_is_no_command_is_listed() -> None:
    for page in PAGES:
        for block in blocks(page):
            known = block.language in ("python", "yaml", "jsonl", "text") or block.text.startswith(NO_COMMANDS)
            assert block.is_shell or known, f"{block.place} is neither commands nor listed in NO_COMMANDS"


def test_the_tables_name_nothing_that_is_not_in_a_page() -> None:
    every = [command for page in PAGES for block in blocks(page) if block.is_shell for command in commands(block)]
    patterns, before = [*SMALLER, *NOT_RUN], [command for commands in BEFORE.values() for command in commands]
    run = [*every, *before]
    assert not [pattern for pattern in patterns if not any(re.search(pattern, command) for command in run)]
    assert not set(INSTEAD) - set(every)


# --- What is not run


def reason_not_to_run(command: str) -> str | None:
    return next((reason for pattern, reason in NOT_RUN.items() if re.match(pattern, command)), None)


def check_unrun(command: str) -> None:
    """Raise unless the command could be read: its program, its files and its options are there."""
    words = shlex.split(re.sub(r"[\[\]…]", "", command))  # [--optional WORDS …]
    match words:
        case ["dex", *arguments]:
            check_read(arguments)
        case ["make", target]:
            subprocess.run(["make", "-n", target], check=True, capture_output=True)
        case ["pip", "install", *what]:
            check_extras(what)
        case ["hf", "auth", "login"] | ["vllm", "serve", _] | ["llama-cli", "-m", _]:
            pass
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(module)
        case ["python", script, *options]:
            parse_of_script(Path(script), options)
        case ["torchrun", *options]:
            from torch.distributed.run import get_args_parser

            check_launched(get_args_parser().parse_args(options))
        case ["accelerate", "launch", *options]:
            from accelerate.commands.launch import launch_command_parser

            parsed = launch_command_parser().parse_args(options)
            assert Path(parsed.config_file).is_file()
            check_launched(parsed)
        case _:
            raise AssertionError(f"nothing checks {command}")


def check_launched(parsed: argparse.Namespace) -> None:
    """The processes are `-m dex.cli ARGUMENTS`, which dex can read."""
    assert (parsed.module, parsed.training_script) == (True, "dex.cli")
    check_read(parsed.training_script_args)


def check_read(words: list[str]) -> None:
    """`dex WORDS` can be read, and so can a recipe that it names."""
    name, *arguments = words
    command: Any = typer.main.get_command(cli.app)
    command.commands[name].make_context(name, [STAND_INS.get(word, word) for word in arguments])
    if name == "train":
        load_recipe(arguments[0], arguments[1:])


def check_extras(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words:
        if match := re.fullmatch(rf"(\.|{project['name']})(?:\[([\w,]+)\])?", word):
            assert set((match[2] or "").split(",")) - {""} <= set(project["optional-dependencies"])


class Parsed(Exception):
    """Raised in place of a script's work."""


def parse_of_script(script: Path, options: list[str]) -> None:
    """Run a script up to where it has read its options; one letter in capitals (N, T) stands for a number."""
    parse = argparse.ArgumentParser.parse_args
    words = ["1" if len(word) == 1 and word.isupper() else word for word in options]

    def stop(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        parse(parser, words, namespace)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(sys, "argv", [str(script), *words])
        patch.syspath_prepend(str(script.parent))
        with pytest.raises(Parsed):
            runpy.run_path(str(script), run_name="__main__")


# --- Commands in running text


def test_commands_in_running_text_name_commands_and_options_that_there_are() -> None:
    app: Any = typer.main.get_command(cli.app)
    for page in PAGES:
        for link in code_words(page):
            words = link.target.split()
            if words[:1] != ["dex"] or not re.match(r"[a-z-]", " ".join(words[1:])):
                continue
            command: Any = app
            while words[1:] and words[1] in getattr(command, "commands", {}):
                command = command.commands[words.pop(1)]
            assert command is not app or words[1].startswith("-"), f"{link.place} names no command"
            known = {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
            options = {word.split("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)}
            assert options <= known | {"--help"}, f"{link.place} names an option that there is not"
