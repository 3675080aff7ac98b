"""The recipe: what is right loads, what is wrong is refused in one sentence that says where and why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dex.errors import DexError
from dex.methods.dex import PlannedHeads, ScoredHeads
from dex.recipe import Recipe, load_recipe, parse_recipe

SHIPPED = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))

MINIMAL = """\
model: {id: some/model}
data:
  train:
  - source: text.txt
  block: 64
run:
  tokens: 1_280
  batch_tokens: 128
output: runs/x
"""


def parse(text: str = MINIMAL, *overrides: str) -> Recipe:
    return parse_recipe(text, "r.yaml", overrides)


def refusal(text: str = MINIMAL, *overrides: str) -> str:
    """The sentence that a recipe is refused with: one line, one full stop, nothing of pydantic's."""
    with pytest.raises(DexError) as caught:
        parse(text, *overrides)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert sentence.endswith(".")
    assert "pydantic" not in sentence
    assert "validation" not in sentence
    return sentence


def with_method(**keys: str) -> str:
    return MINIMAL + "method:\n" + "".join(f"  {key}: {value}\n" for key, value in keys.items())


# --- what is right


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_loads_and_opens_with_its_command(path: Path) -> None:
    recipe = load_recipe(path)
    command = path.read_text().splitlines()[0]
    assert command.startswith("# ")
    assert command.endswith(f" train recipes/{path.name}")
    assert recipe.steps > 0
    assert parse_recipe(recipe.to_yaml(), "saved") == recipe


def test_the_demo_and_its_control_differ_in_the_method_alone() -> None:
    demo, control = (load_recipe(SHIPPED[0].parent / name) for name in ("demo.yaml", "demo-control.yaml"))
    assert demo.data == control.data
    assert demo.run == control.run
    assert demo.model == control.model
    assert (demo.method.name, control.method.name) == ("dex", "attention")


def test_units_are_tokens_and_the_recipe_counts_the_updates() -> None:
    recipe = parse(MINIMAL, "run.save_every=256", "run.tokens=1280")
    assert (recipe.steps, recipe.blocks_per_step, recipe.accumulation) == (10, 2, 2)
    assert recipe.method.anneal_steps(recipe.steps) == 5
    assert (recipe.log_steps, recipe.save_steps, recipe.eval_steps) == (1, 2, None)
    assert parse(MINIMAL, "run.micro_batch=2").accumulation == 1
    assert parse(MINIMAL, "method.anneal=0.001").method.anneal_steps(10) == 1


@pytest.mark.parametrize("lr", ["1e-4", "1E-4", "1.0e-4", "'1e-4'", "0.000_1", "0.0001"])
def test_a_number_is_a_number_however_it_is_spelt(lr: str) -> None:
    assert parse(MINIMAL, f"run.lr={lr}").run.lr == 1e-4
    assert parse(MINIMAL.replace("run:", f"run:\n  lr: {lr}")).run.lr == 1e-4


@pytest.mark.parametrize("tokens", ["30_720", "30720", "'30_720'", "3.072e4", "0x7800"])
def test_a_whole_number_is_a_whole_number_however_it_is_spelt(tokens: str) -> None:
    recipe = parse(MINIMAL.replace("1_280", tokens))
    assert recipe.run.tokens == 30_720
    assert type(recipe.run.tokens) is int


def test_numbers_beyond_what_a_float_holds_stay_exact() -> None:
    assert parse(MINIMAL, "run.keep_last=9007199254740993").run.keep_last == 2**53 + 1


def test_heads_are_a_criterion_or_a_plan() -> None:
    assert parse().method.heads == ScoredHeads()
    planned = parse(MINIMAL, "method.heads={plan: heads/x.json}")
    assert planned.method.heads == PlannedHeads(plan="heads/x.json")
    assert parse(planned.to_yaml()) == planned
    assert parse(MINIMAL, "method.heads.per_layer=3").method.heads == ScoredHeads(per_layer=3)
    assert "method.heads.criterion has no effect beside method.heads.plan" in refusal(
        MINIMAL, "method.heads={plan: x.json, criterion: all}"
    )


def test_the_control_has_no_branch_and_says_which_keys_that_makes_idle() -> None:
    control = parse(with_method(name="attention", layers="[0, 2]"))
    assert control.method.heads_to_choose() is None
    assert "schedule" not in control.to_yaml()
    assert parse(control.to_yaml()) == control
    assert Recipe.model_validate(control.model_dump()) == control
    assert refusal(with_method(name="attention", anneal="0.5", lam="1.0")) == (
        "r.yaml, line 12: method.anneal has no effect with method.name attention, which trains K, V and O alone; "
        "remove it (1 more problem after this one)."
    )


# --- overrides


def test_overrides_win_and_reach_into_lists() -> None:
    recipe = parse(MINIMAL, "data.train.0.source=other.txt", "output=runs/y", "method.layers=[0, 1]", "run.clip=null")
    assert (recipe.data.train[0].source, recipe.output) == ("other.txt", "runs/y")
    assert (recipe.method.layers, recipe.run.clip) == ([0, 1], None)


@pytest.mark.parametrize("revision", ["0123456", "12e4567", "1_000", "2024-01-01", "v1.0"])
def test_text_on_the_command_line_stays_as_typed(revision: str) -> None:
    assert parse(MINIMAL, f"model.revision={revision}").model.revision == revision


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("run.sed=1", "r.yaml, on the command line: run.sed is not a key of a recipe; did you mean run.seed?"),
        ("rnu.seed=1", "r.yaml, on the command line: rnu is not a key of a recipe; did you mean run?"),
        ("run.lr=fast", "r.yaml, on the command line: run.lr: 'fast' was given, a number above 0 is expected"),
        ("output=", "r.yaml, on the command line: output: null was given, text is expected"),
        ("run.seed", "'run.seed' is not an override; write key.path=value"),
        ("run..seed=1", "'run..seed=1' is not an override"),
        ("data.train.3.source=x", "data.train is a list of 1, whose entries are data.train.0 to data.train.0"),
        ("data.train.x.source=x", "there is no data.train.x"),
        ("output.folder=x", "output is 'runs/x' and has no keys"),
        ("run.lr=[", "what follows the = is not valid YAML"),
        ("run.tokens=1_000", "on the command line: run.tokens is 1_000, which is not a multiple"),
    ],
)
def test_a_wrong_override_is_said_to_be_on_the_command_line(override: str, sentence: str) -> None:
    assert sentence in refusal(MINIMAL, override)


# --- unknown, missing and wrongly typed keys


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (MINIMAL + "modle: x\n", "r.yaml, line 10: modle is not a key of a recipe; did you mean model?"),
        (MINIMAL.replace("model:", "modle:"), "line 1: modle is not a key of a recipe; did you mean model?"),
        (MINIMAL + "lr: 1\n", "line 10: lr is not a key of a recipe; did you mean run.lr?"),
        (
            MINIMAL.replace("batch_tokens", "batch_token"),
            "line 8: run.batch_token is not a key of a recipe; did you mean run.batch_tokens? (1 more problem after",
        ),
        (MINIMAL.replace("  - source: text.txt", "  - {source: x, wieght: 2}"), "line 4: data.train.0.wieght is"),
        (
            MINIMAL + "method: {lr_scale: {zzz: 1}}\n",
            "line 10: method.lr_scale.zzz is not a key of a recipe; method.lr_scale has w_d and lam",
        ),
        (MINIMAL + "qqq: 1\n", "a recipe has model, method, data, run and output"),
        (MINIMAL.replace("  tokens: 1_280\n", ""), "r.yaml, line 6: run.tokens is missing"),
        (MINIMAL.replace("output: runs/x\n", ""), "r.yaml: output is missing"),
        (MINIMAL + "method:\n", "line 10: method: null was given, a block with name"),
        (
            MINIMAL.replace("{id: some/model}", "gpt2"),
            "'gpt2' was given, a block with id, revision, dtype, quantise, attention",
        ),
        (MINIMAL.replace("some/model", "123456"), "123456 was given, text (put it in quotes) is expected"),
        (MINIMAL.replace("some/model", "''"), "'' was given, printable text on one line is expected"),
        (MINIMAL.replace("some/model", '"a\\nb"'), "printable text on one line is expected"),
        (MINIMAL.replace("  - source: text.txt", "    source: x"), "a block was given, a list of sources is"),
        (MINIMAL.replace("\n  - source: text.txt", " []"), "an empty list was given, a list of at least one"),
        (MINIMAL.replace("- source: text.txt", "- text.txt"), "line 4: data.train.0: 'text.txt' was given, a block"),
        (with_method(heads="all"), "method.heads: 'all' was given, a block with criterion, per_layer"),
        (with_method(heads="{criterion: entorpy}"), "one of entropy, importance, random, all, none (did you mean"),
        (with_method(heads="{per_layer: most}"), "'most' was given, a whole number above 0 or half is expected"),
        (with_method(layers="3"), "3 was given, a list of layer indices or null is expected"),
        (with_method(layers="[1, 1]"), "a list was given, a list of different layer indices"),
        (with_method(layers="[]"), "an empty list was given"),
        (with_method(layers="[0, -1]"), "method.layers.1: -1 was given, a whole number of at least 0 is expected"),
        (with_method(train_kvo="1"), "1 was given, true or false is expected"),
        (with_method(schedule="false"), "false was given, one of paper, land, fixed, off is expected"),
        (with_method(name="full", train="q_proj"), "a list of names or null is expected"),
        (with_method(name="full", train="[]"), "a list of different names, or null for all weights, is expected"),
        (with_method(name="[full]"), "a list was given, one of apollo, attention, dex, diff-v1"),
        (with_method(train="[q_proj]"), "method.train has no effect with method.name dex"),
        (with_method(name="galor"), "full, galore, lora, pissa (did you mean galore?) is expected"),
    ],
)
def test_a_wrong_key_or_type_names_the_line_and_what_is_expected(text: str, sentence: str) -> None:
    assert sentence in refusal(text)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("run.tokens=0", "a whole number above 0"),
        ("run.tokens=-128", "a whole number above 0"),
        ("run.tokens=1.5", "a whole number above 0"),
        ("run.tokens=true", "a whole number above 0"),
        ("run.tokens=.inf", "a whole number above 0"),
        ("run.lr=0", "a number above 0"),
        ("run.lr=.nan", "a number above 0"),
        ("run.lr=nan", "a number above 0"),
        ("run.lr=1e999", "a number above 0"),
        ("run.warmup=1", "a number of at least 0 and below 1"),
        ("run.warmup=-0.1", "a number of at least 0 and below 1"),
        ("run.clip=0", "a number above 0 or null"),
        ("run.seed=-1", "a whole number of at least 0 and below"),
        ("data.held_out=0", "a number above 0 and below 1"),
        ("data.held_out=1", "a number above 0 and below 1"),
        ("data.train.0.weight=0", "a number above 0"),
        ("method.anneal=0", "a number above 0 and of at most 1"),
        ("method.anneal=1.1", "a number above 0 and of at most 1"),
        ("method.lam=.inf", "a number or null"),
        ("run.decay=cosin", "one of cosine, linear, constant (did you mean cosine?)"),
    ],
)
def test_values_out_of_range_are_refused_with_the_range(setting: str, expected: str) -> None:
    assert f"was given, {expected}" in refusal(MINIMAL, setting)


def test_nan_and_infinity_are_refused_in_the_file_too() -> None:
    assert "line 7: run.lr: nan was given" in refusal(MINIMAL.replace("run:", "run:\n  lr: .nan"))
    assert "line 7: run.lr: inf was given" in refusal(MINIMAL.replace("run:", "run:\n  lr: .inf"))


def test_of_several_problems_the_first_in_the_file_is_told_and_the_others_counted() -> None:
    text = MINIMAL.replace("64", "x").replace("128", "y").replace("runs/x", "7")
    assert refusal(text) == (
        "r.yaml, line 5: data.block: 'x' was given, a whole number above 1 is expected "
        "(2 more problems after this one)."
    )


# --- settings that do not fit each other


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["run.tokens=100"], "run.tokens is 100, which is not a multiple of run.batch_tokens, 128; 128 would be"),
        (["run.tokens=1000"], "not a multiple of run.batch_tokens, 128; 896 or 1_024 would be"),
        (["run.tokens=1_280_000_000"], "more than one billion, and run.allow_over_1b is false"),
        (
            ["run.batch_tokens=100", "run.tokens=100"],
            "run.batch_tokens is 100, which is not a multiple of data.block",
        ),
        (["run.micro_batch=3"], "run.micro_batch is 3, which does not divide the 2 blocks of one update"),
        (["run.save_every=100"], "run.save_every is 100, which is not a multiple of run.batch_tokens, 128"),
        (["run.eval_every=129"], "run.eval_every is 129, which is not a multiple of run.batch_tokens, 128"),
        (["run.log_every=300"], "run.log_every is 300, which is not a multiple of run.batch_tokens, 128; 256 or 384"),
        (["data.held_out_tokens=63"], "data.held_out_tokens is 63, less than one block (data.block 64)"),
        (["method.schedule=off", "method.train_kvo=false"], "method.train_kvo false with method.schedule off leaves"),
        (["method.heads.criterion=none"], "method.heads.criterion none leaves nothing for method.schedule paper"),
        (
            ["method.heads={criterion: all, per_layer: 2}"],
            "per_layer 2 has no effect with method.heads.criterion all",
        ),
        (["method.lam=0.5"], "method.lam is only for method.schedule fixed, and the schedule is paper"),
        (["method.schedule=fixed"], "method.schedule fixed with method.w_d_init kaiming would not start as the base"),
        (
            ["method.schedule=fixed", "method.w_d_init=zeros", "method.lam=0.0"],
            "method.lam 0 with method.w_d_init zeros is a branch that never leaves 0",
        ),
        (["method.w_d_init=zeros", "method.anneal=0.1"], "with annealing over 1 (method.anneal 0.1)"),
        (["method.w_d_init=zeros", "run.tokens=128"], "a branch that never leaves 0 in a run of 1 updates"),
        (
            ["method.w_d_init=zeros", "method.schedule=land", "run.tokens=128"],
            "method.w_d_init zeros with method.schedule land is a branch that never leaves 0",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_naming_both(overrides: list[str], sentence: str) -> None:
    assert sentence in refusal(MINIMAL, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["run.tokens=1_280_000_000", "run.allow_over_1b=true"],
        ["method.w_d_init=zeros", "method.anneal=0.2"],  # T_a = 2: λ(1) is not 0
        ["method.w_d_init=zeros", "method.anneal=0.1", "method.schedule=land"],
        ["method.anneal=0.1"],  # a random W_D gives λ a gradient from T_a on
        ["method.w_d_init=zeros", "method.schedule=fixed", "method.lam=-0.5"],
        ["method.heads.criterion=none", "method.schedule=off"],
        ["run.tokens=128"],
    ],
)
def test_the_nearest_settings_that_fit_are_accepted(overrides: list[str]) -> None:
    parse(MINIMAL, *overrides)


# --- files that are not recipes


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", " is empty; a recipe has the blocks model, method, data, run and output."),
        (b"# only a comment\n", " is empty; "),
        (b"- a\n- b\n", " is not a recipe: it holds a list, not the blocks "),
        (b"hello", " is not a recipe: it holds 'hello', not the blocks "),
        (b"a: [1\nb: 2\n", ", line 2, column 2: this is not valid YAML: "),
        (b"a:\n\tb: 1\n", ", line 2, column 1: this is not valid YAML: "),
        (b"run: {}\nrun: {}\n", ', line 2, column 1: this is not valid YAML: found duplicate key "run"'),
        (b"a: 1\n---\nb: 1\n", "this is not valid YAML: "),
        (b"a: \x00", ": this is not valid YAML: "),
        (b"a: \xff\xfe", " is not a recipe: byte 3 is not UTF-8 text."),
        (b"run: !!python/object:os.system {}\n", ", line 1, column 6: this is not valid YAML: "),
        (b"a: &a {b: *a}\n", " is not a recipe: it is nested too deeply, or within itself."),
        (b"[" * 1200, "it is nested too deeply, or within itself."),
    ],
)
def test_a_file_that_is_not_a_recipe_is_refused_in_one_sentence(
    content: bytes, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    with pytest.raises(DexError) as caught:
        load_recipe(path)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DexError, match=r"none\.yaml does not exist; `dex recipes ls` lists"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(DexError, match=r"is a folder; a recipe is one YAML file\."):
        load_recipe(tmp_path)


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert load_recipe(path) == parse()


def test_anchors_and_merges_work() -> None:
    text = MINIMAL.replace("- source: text.txt", "- &a {source: a.txt, weight: 2}\n  - {<<: *a, source: b.txt}")
    assert [(s.source, s.weight) for s in parse(text).data.train] == [("a.txt", 2.0), ("b.txt", 2.0)]


# --- what is written loads again

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(
    lambda text: text.isprintable() and bool(text.strip())
)
awkward = st.sampled_from(["off", "NO", "null", "~", "1e-4", "0x10", "a: b", "- x", "#x", "'", '"', "2024-01-01"])
texts = names | awkward
shares = st.floats(0, 1, exclude_min=True, exclude_max=True)
positive = st.floats(0, 1e30, exclude_min=True)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


@st.composite
def recipes(draw: st.DrawFn) -> dict[str, Any]:
    block, micro, accumulation, steps = (draw(st.integers(2, 9)) for _ in range(4))
    batch = block * micro * accumulation
    every = st.none() | st.integers(1, 5).map(lambda n: n * batch)
    source = st.fixed_dictionaries(
        {"source": texts},
        optional={
            "weight": positive,
            "column": maybe(texts),
            "documents": st.sampled_from(["file", "paragraph", "line"]),
        },
    )
    scored = st.fixed_dictionaries(
        {}, optional={"criterion": st.sampled_from(["entropy", "random"]), "per_layer": st.integers(1, 9)}
    )
    dex = st.fixed_dictionaries(
        {"name": st.just("dex")},
        optional={
            "heads": scored | st.fixed_dictionaries({"plan": texts}),
            "schedule": st.sampled_from(["paper", "land", "off"]),
            "anneal": shares,
            "lr_scale": st.fixed_dictionaries({"w_d": positive}),
            "layers": maybe(st.lists(st.integers(0, 99), min_size=1, unique=True)),
        },
    )
    live = st.fixed_dictionaries(
        {"schedule": st.just("fixed"), "w_d_init": st.just("zeros")}, optional={"lam": maybe(positive)}
    )
    control = st.fixed_dictionaries({"name": st.just("attention")})
    run = {"tokens": batch * steps, "batch_tokens": batch, "micro_batch": micro}
    return {
        "model": {"id": draw(texts), "revision": draw(maybe(texts))},
        "method": draw(dex | live | control),
        "data": {"train": draw(st.lists(source, min_size=1, max_size=3)), "block": block, "held_out": draw(shares)},
        "run": {
            **run,
            "lr": draw(positive),
            "save_every": draw(every),
            "keep_last": draw(st.integers(1, 10**18)),
            "clip": draw(maybe(positive)),
        },
        "output": draw(texts),
    }


@settings(max_examples=40, deadline=None)
@given(values=recipes())
def test_a_written_recipe_loads_again_as_an_equal_one(values: dict[str, Any]) -> None:
    recipe = Recipe.model_validate(values)
    written = recipe.to_yaml()
    assert parse_recipe(written, "saved") == recipe
    assert parse_recipe(written, "saved").to_yaml() == written


def test_every_default_is_written_out_in_the_declared_order() -> None:
    lines = parse().to_yaml().splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "model:",
        "method:",
        "data:",
        "run:",
        "output: runs/x",
    ]
    assert "  anneal: 0.5" in lines
    assert "    per_layer: half" in lines
    assert "  gradient_checkpointing: false" in lines
    assert "  lr: 0.0001" in lines
    assert '  schedule: "off"' in parse(MINIMAL, "method.schedule=off").to_yaml().splitlines()


@settings(max_examples=40, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=60) | st.text("ab:-[]{}#&*!|>'\"\n\t 1", max_size=40))
def test_any_text_either_loads_or_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(DexError) as caught:
        parse_recipe(text, "r.yaml")
    assert "\n" not in str(caught.value)


def test_reading_a_recipe_needs_no_torch() -> None:
    code = (
        "import sys, importlib.util as u; "
        "from dex import recipe; "
        "recipe.load_recipe(sys.argv[1]); "
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code, str(SHIPPED[0])], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
