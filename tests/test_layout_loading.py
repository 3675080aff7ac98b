"""Both DIFF layouts as models of transformers: loaded without dex, generating, compiled, on every attention path."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from naive_diff import agrees
from safetensors.torch import load_file, save_file
from tiny import (
    FAMILIES,
    SLIDING,
    tiny_config,
    tiny_diff_v1,
    tiny_diff_v2,
    tiny_diffllama,
    tiny_model,
    tiny_tokenizer,
    tokens,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dex.errors import DexError
from dex.layouts.fresh import MLP_STEP, fresh, fresh_config, num_parameters
from dex.layouts.modeling_diff_v1 import DiffV1ForCausalLM
from dex.layouts.modeling_diff_v2 import DiffV2ForCausalLM
from dex.layouts.registry import register_layouts
from dex.layouts.to_diff_v1 import V1Options, to_diff_v1
from dex.layouts.to_diff_v2 import to_diff_v2

BUILD: dict[str, Callable[..., Any]] = {"v1": tiny_diff_v1, "v2": tiny_diff_v2}
LAYOUTS = pytest.mark.parametrize("layout", BUILD)


def logits(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **inputs).logits


def padded(rows: int = 3, length: int = 12) -> dict[str, Tensor]:
    """The first row whole, the second padded on the left, the third on the right."""
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[1, :4] = 0
    mask[2:, -3:] = 0
    return {"input_ids": tokens(rows, length), "attention_mask": mask}


# ---- where dex is not installed ----------------------------------------------------------------------------

SOURCES = Path(importlib.util.find_spec("dex.layouts").origin).parent  # type: ignore[union-attr, arg-type]
TRAVELLING = ["configuration_diff_v1.py", "configuration_diff_v2.py", "modeling_diff_v1.py", "modeling_diff_v2.py"]

VISITOR = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

root = Path(sys.argv[1])
report = {"known": [name for name in ("diff_v1", "diff_v2", "diffllama") if name in CONFIG_MAPPING]}
ids = load_file(root / "ids.safetensors")["ids"]
for name in ("v1", "v2", "diffllama"):
    options = {"trust_remote_code": name != "diffllama", "output_loading_info": True}
    model, info = AutoModelForCausalLM.from_pretrained(root / name, **options)
    tokenizer = AutoTokenizer.from_pretrained(root / name)
    with torch.no_grad():
        save_file({"logits": model(ids).logits}, root / f"{name}.safetensors")
    told = {key: sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    told["text"] = tokenizer.decode(tokenizer("plain text").input_ids)
    told["tied"] = model.lm_head.weight is model.model.embed_tokens.weight
    told["generated"] = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)[:, -4:].tolist()
    report[name] = told
model = AutoModelForCausalLM.from_pretrained(root / "v1", trust_remote_code=True).train()
model(input_ids=ids, labels=ids).loss.backward()
torch.optim.SGD(model.parameters(), lr=1e-3).step()
report["step"] = [int(layer.self_attn.head_norm_step) for layer in model.model.layers]
model.save_pretrained(root / "v1 again")
low = AutoModelForCausalLM.from_pretrained(root / "v1 again", trust_remote_code=True, dtype=torch.bfloat16)
report["step again"] = [int(layer.self_attn.head_norm_step) for layer in low.model.layers]
report["dtypes"] = sorted({str(p.dtype) for n, p in low.named_parameters() if "lambda" in n})
report["head"] = str(low.lm_head.weight.dtype)
report["imported dex"] = any(name.split(".")[0] == "dex" for name in sys.modules)
(root / "report.json").write_text(json.dumps(report))
"""


@pytest.fixture(scope="module")
def visit(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """Models saved with their tokenizer, what a fresh process without dex found in them, and where."""
    root = tmp_path_factory.mktemp("visit")
    models = {
        "v1": tiny_diff_v1(head_norm="anneal", head_norm_steps=5, tie_word_embeddings=True, qkv_bias=True),
        "v2": tiny_diff_v2(qk_norm=True, head_dim=20, **SLIDING),
        "diffllama": tiny_diffllama(),
    }
    for layer in models["v1"].model.layers:
        layer.self_attn.head_norm_step.fill_(2)
    for name, model in models.items():
        model.save_pretrained(root / name)
        tiny_tokenizer().save_pretrained(root / name)
    save_file({"ids": tokens()}, root / "ids.safetensors")
    (root / "visitor.py").write_text(VISITOR)
    offline = {"HF_MODULES_CACHE": str(root / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-P", str(root / "visitor.py"), str(root)],
        cwd=root,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return models, json.loads((root / "report.json").read_text()), root


def test_a_folder_loads_without_dex_and_computes_the_same(visit: Any) -> None:
    models, report, root = visit
    assert not report["imported dex"]
    for name, model in models.items():
        assert not any(report[name][key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert agrees(load_file(root / f"{name}.safetensors")["logits"], logits(model, tokens()), 1e-6)
        assert report[name]["text"] == "plain text"
        assert report[name]["tied"] == model.config.tie_word_embeddings


def test_a_folder_generates_without_dex_what_it_does_here(visit: Any) -> None:
    models, report, _ = visit
    for name, model in models.items():
        out = model.generate(tokens(), max_new_tokens=4, do_sample=False, eos_token_id=None)
        assert report[name]["generated"] == out[:, -4:].tolist()


def test_the_layouts_have_names_of_their_own_and_diffllama_that_of_transformers(visit: Any) -> None:
    models, report, _ = visit
    assert report["known"] == ["diffllama"]  # to transformers as it is, of all three
    assert {model.config.model_type for model in models.values()} == {"diff_v1", "diff_v2", "diffllama"}


def test_an_annealing_goes_on_without_dex_and_through_a_second_folder(visit: Any) -> None:
    _, report, root = visit
    assert report["step"] == report["step again"] == [3, 3, 3]
    names = {path.name for path in (root / "v1 again").iterdir()}
    assert {"modeling_diff_v1.py", "configuration_diff_v1.py"} <= names


def test_lambda_vectors_stay_float32_without_dex(visit: Any) -> None:
    report = visit[1]
    assert (report["dtypes"], report["head"]) == (["torch.float32"], "torch.bfloat16")


def test_a_folder_holds_the_code_of_its_own_layout_and_diffllamas_holds_none(visit: Any) -> None:
    root = visit[2]
    code = {name: sorted(path.name for path in (root / name).glob("*.py")) for name in BUILD}
    assert code == {name: [f"{kind}_diff_{name}.py" for kind in ("configuration", "modeling")] for name in BUILD}
    for name, files in code.items():
        for file in files:
            assert (root / name / file).read_text() == (SOURCES / file).read_text()
    assert not list((root / "diffllama").glob("*.py"))
    assert "auto_map" not in json.loads((root / "diffllama" / "config.json").read_text())


@LAYOUTS
def test_with_dex_a_folder_loads_without_running_its_code(visit: Any, layout: str) -> None:
    register_layouts()
    models, _, root = visit
    loaded = AutoModelForCausalLM.from_pretrained(root / layout)
    assert type(loaded) is {"v1": DiffV1ForCausalLM, "v2": DiffV2ForCausalLM}[layout]
    assert agrees(logits(loaded, tokens()), logits(models[layout], tokens()), 1e-6)


@pytest.mark.parametrize("file", TRAVELLING)
def test_files_that_travel_import_nothing_of_dex(file: str) -> None:
    allowed = {*sys.stdlib_module_names, "torch", "transformers", "huggingface_hub"}
    beside = file.replace("modeling", "configuration").removesuffix(".py")
    for node in ast.walk(ast.parse((SOURCES / file).read_text())):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        if isinstance(node, ast.ImportFrom):
            if node.level:
                assert (node.level, node.module) == (1, beside)
            else:
                assert str(node.module).split(".")[0] in allowed


# ---- generation, checkpointing, compilation ----------------------------------------------------------------


@LAYOUTS
@pytest.mark.parametrize("changes", [{}, SLIDING])
def test_a_static_cache_generates_what_a_dynamic_one_does(layout: str, changes: dict[str, Any]) -> None:
    model, prompt = BUILD[layout](**changes), {k: v[:2] for k, v in padded().items()}
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    dynamic = model.generate(**prompt, **options)
    assert dynamic.shape[1] == 20
    assert torch.equal(model.generate(**prompt, **options, cache_implementation="static"), dynamic)
    assert torch.equal(model.generate(**prompt, **options, use_cache=False), dynamic)


def gradients(model: Any) -> dict[str, Tensor]:
    """Of the loss on real tokens that follow real ones: what padding computes is nobody's."""
    inputs = padded()
    mask = inputs["attention_mask"]
    counts = torch.cat([mask[:, :1] * 0, mask[:, 1:] * mask[:, :-1]], dim=1)
    model.zero_grad()
    model(**inputs, labels=inputs["input_ids"].masked_fill(counts == 0, -100)).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@LAYOUTS
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(layout: str, reentrant: bool) -> None:
    model = BUILD[layout]().train()
    expected = {name: gradient.clone() for name, gradient in gradients(model).items()}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    calls: list[None] = []
    handle = model.model.layers[1].self_attn.register_forward_pre_hook(lambda *_: calls.append(None))
    actual = gradients(model)
    handle.remove()
    assert len(calls) == 2  # once more in the backward pass: the checkpointing is on
    for name, gradient in expected.items():
        assert torch.equal(actual[name], gradient), name


@LAYOUTS
def test_eager_and_sdpa_have_the_same_logits_and_gradients(layout: str) -> None:
    model, inputs = BUILD[layout](qk_norm=True, qkv_bias=True, **SLIDING), padded()
    real = inputs["attention_mask"].bool()
    found = {}
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        found[attention] = (logits(model, **inputs_of(inputs))[real], gradients(model))
    assert agrees(found["sdpa"][0], found["eager"][0])
    for name, gradient in found["eager"][1].items():
        assert agrees(found["sdpa"][1][name], gradient, 1e-4), name


def inputs_of(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}


@pytest.mark.slow  # the C++ compiler, half a minute a shape
@LAYOUTS
def test_flex_attention_has_the_logits_of_sdpa(layout: str) -> None:
    model, inputs = BUILD[layout](attn_implementation="sdpa"), padded()
    real = inputs["attention_mask"].bool()
    expected = logits(model, **inputs_of(inputs))[real]
    model.set_attn_implementation("flex_attention")
    assert agrees(logits(model, **inputs_of(inputs))[real], expected)


@LAYOUTS
def test_a_compiled_model_is_the_model(layout: str) -> None:
    model, ids = BUILD[layout](num_hidden_layers=1), tokens()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert agrees(logits(compiled, ids), logits(model, ids), 1e-6)


def test_a_compiled_model_sees_its_annealing_advance() -> None:
    model = tiny_diff_v1(num_hidden_layers=1, head_norm="anneal", head_norm_steps=4)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    before = logits(compiled, tokens())
    for _ in range(2):
        torch.optim.SGD(model.parameters(), lr=0.0).step()
    assert agrees(logits(compiled, tokens()), logits(model, tokens()), 1e-6)
    assert not agrees(logits(compiled, tokens()), before, 1e-3)


# ---- no attention map outside the eager path ---------------------------------------------------------------


class Shapes(TorchDispatchMode):
    """The shape of everything that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen += [tuple(leaf.shape) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        return out


def maps(shapes: list[tuple[int, ...]], queries: int, keys: int) -> list[tuple[int, ...]]:
    """Tensors that hold a number for every query and key, or key and query, of at least two heads."""
    return [
        shape
        for shape in shapes
        if sorted(shape[-2:]) == sorted((queries, keys)) and torch.Size(shape).numel() >= 2 * queries * keys
    ]


LONG = 389  # a number that no other size in the model is


@LAYOUTS
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("backward", [False, True])
def test_only_the_eager_path_makes_an_attention_map_of_the_prompt(
    layout: str, attention: str, backward: bool
) -> None:
    model, ids = BUILD[layout](attn_implementation=attention, num_hidden_layers=1), tokens(1, LONG)
    with Shapes() as shapes, torch.set_grad_enabled(backward):
        out = model(input_ids=ids, labels=ids)
        if backward:
            out.loss.backward()
    assert bool(maps(shapes.seen, LONG, LONG)) == (attention == "eager")
    if attention == "sdpa":
        assert max(torch.Size(shape).numel() for shape in shapes.seen) < LONG * LONG


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")  # `cache` since transformers 5.20
@LAYOUTS
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_only_the_eager_path_makes_an_attention_map_of_a_decoded_token(layout: str, attention: str) -> None:
    model, ids = BUILD[layout](attn_implementation=attention, num_hidden_layers=1), tokens(1, LONG)
    with torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        with Shapes() as shapes:
            model(ids[:, -1:], past_key_values=cache)
    assert bool(maps(shapes.seen, 1, LONG)) == (attention == "eager")


@LAYOUTS
def test_an_attention_function_gets_keys_as_wide_as_values_and_the_window_of_its_layer(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What flash-attn needs, which crops wider values silently and makes its own mask; asked here of SDPA's place."""
    model, windows = BUILD[layout](attn_implementation="sdpa", **SLIDING), {}
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def watched(module: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        assert k.shape[1] == v.shape[1]
        assert q.shape[1] == k.shape[1] * module.num_key_value_groups
        windows.setdefault(q.shape[2], {})[module.layer_idx] = options["sliding_window"]
        return plain(module, q, k, v, *rest, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", watched)
    model.generate(tokens(1, 12), max_new_tokens=2, do_sample=False, eos_token_id=None)
    assert windows == {12: {0: None, 1: 8, 2: 8}, 1: {0: None, 1: 8, 2: 8}}


# ---- a GPU -------------------------------------------------------------------------------------------------

GPU_PATHS = ["sdpa", "flex_attention"]
if importlib.util.find_spec("flash_attn"):
    GPU_PATHS.append("flash_attention_2")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@LAYOUTS
@pytest.mark.parametrize("attention", GPU_PATHS)
@pytest.mark.parametrize("changes", [{}, SLIDING, {"qk_norm": True, "qkv_bias": True, "head_dim": 32}])
def test_every_path_on_a_gpu_is_the_eager_path_on_the_cpu(layout: str, attention: str, changes: Any) -> None:
    model, inputs = BUILD[layout](**changes), padded(3, 48)
    real = inputs["attention_mask"].bool()
    low = (
        attention == "flash_attention_2"
    )  # which has no float32; the tolerances are those of another device's kernels
    model.set_attn_implementation("eager")
    expected = logits(model, **inputs_of(inputs))[real]
    model.set_attn_implementation(attention)
    model = model.to("cuda", torch.bfloat16 if low else torch.float32)
    moved = {name: tensor.to("cuda") for name, tensor in inputs_of(inputs).items()}
    assert agrees(logits(model, **moved).cpu()[real], expected, 2**-4 if low else 1e-3)
    prompt = {"input_ids": moved["ids"][:2], "attention_mask": moved["attention_mask"][:2]}
    out = model.generate(**prompt, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert out.shape == (2, 52)


# ---- fresh models ------------------------------------------------------------------------------------------


def count(layout: str, config: Any) -> int:
    return num_parameters(fresh_config(layout, config, {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fresh_v1_has_the_parameters_of_its_base_and_lambda_and_the_gain(family: str) -> None:
    config = tiny_config(family)
    D, layers = fresh_config("diff-v1", config, {}).head_dim, config.num_hidden_layers
    assert count("base", config) == sum(p.numel() for p in tiny_model(family).parameters())
    assert count("diff-v1", config) == count("base", config) + layers * (4 * D + 2 * D)


def test_a_fresh_diffllama_has_the_parameters_of_its_base_and_lambda() -> None:
    config = tiny_config("llama")
    assert count("diffllama", config) == count("base", config) + 3 * 4 * 16


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("width", [512, 515])
def test_a_fresh_v2_has_the_parameters_of_its_base_within_half_a_step_of_the_mlp(family: str, width: int) -> None:
    config = tiny_config(family, intermediate_size=width)
    ours = fresh_config("diff-v2", config, {})
    assert ours.intermediate_size % MLP_STEP == 0
    per_step = MLP_STEP * config.num_hidden_layers * 3 * config.hidden_size
    assert abs(num_parameters(ours) - count("base", config)) <= per_step / 2
    assert (ours.num_attention_heads, ours.num_key_value_heads) == (4, 2)


def test_a_fresh_v2_of_an_mlp_too_narrow_to_pay_for_it_is_refused() -> None:
    with pytest.raises(DexError, match="wider MLP"):
        fresh_config("diff-v2", tiny_config("qwen3", intermediate_size=32), {})


@pytest.mark.parametrize("layout", ["diff-v1", "diffllama"])
def test_a_fresh_model_of_an_odd_number_of_key_value_heads_is_refused(layout: str) -> None:
    with pytest.raises(DexError, match="even number"):
        fresh_config(layout, tiny_config("llama", num_key_value_heads=1), {})


@pytest.mark.parametrize("layout", ["base", "diff-v1", "diff-v2", "diffllama"])
def test_the_seed_decides_every_weight_of_a_fresh_model(layout: str) -> None:
    config = tiny_config("llama", intermediate_size=256)
    one, same, other = (fresh(layout, config, seed, {}).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(same[name], tensor) for name, tensor in one.items())
    drawn = [name for name in one if "norm" not in name and "subln" not in name]
    assert not any(torch.equal(other[name], one[name]) for name in drawn)


@pytest.mark.parametrize("layout", ["diff-v1", "diff-v2", "diffllama"])
def test_fresh_weights_are_drawn_as_a_llamas_and_lambda_as_in_the_paper(layout: str) -> None:
    config = tiny_config("qwen2", intermediate_size=256, initializer_range=0.05)
    model = fresh(layout, config, 0, {})
    for name, parameter in model.named_parameters():
        if name.endswith(("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")):
            assert parameter.std().item() == pytest.approx(0.1, rel=0.6), name  # of 16 numbers
        elif name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.1), name


def test_options_of_v1_reach_a_fresh_model() -> None:
    options = {"lambda_mode": "fixed", "lambda_value": 0.0, "head_norm": "off"}
    model = fresh("diff-v1", tiny_config("llama"), 0, options)
    assert {key: getattr(model.config, key) for key in options} == options
    assert not any("lambda" in name or "subln" in name for name, _ in model.named_parameters())


# ---- conversions leave the base alone ----------------------------------------------------------------------


@pytest.mark.parametrize("to", ["v1", "v2"])
def test_a_conversion_changes_nothing_in_its_base(to: str) -> None:
    base = tiny_model("qwen2")
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    implementation = base.config._attn_implementation
    to_diff_v2(base) if to == "v2" else to_diff_v1(base, V1Options(), tokens(2, 16))
    assert all(torch.equal(base.state_dict()[name], tensor) for name, tensor in before.items())
    assert base.config._attn_implementation == implementation
    assert not any(hook for module in base.modules() for hook in (module._forward_hooks, module._forward_pre_hooks))
