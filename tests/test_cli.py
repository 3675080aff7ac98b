"""The command line: fast help, one JSON object, one sentence for a mistake, exit codes."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import Dex
from tiny import write_tiny

from dex import cli

COMMANDS = ("heads", "convert", "train", "fold", "eval", "compare", "doctor")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`run("fold", …)` → (exit code, stdout, stderr), in this process: importing torch takes seconds."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dex", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    yield call
    logging.disable(logging.NOTSET)


def dex(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("dex")), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


def test_help_names_every_command_and_imports_no_torch() -> None:
    done = dex("--help")
    assert done.returncode == 0
    assert all(command in done.stdout for command in COMMANDS)
    script = (
        "import sys, dex.cli\n"
        "try: dex.cli.app(['--help'])\n"
        "except SystemExit: pass\n"
        "print({m.split('.')[0] for m in sys.modules} & {'torch', 'transformers', 'peft', 'numpy'})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_help_takes_half_a_second_of_processor_time() -> None:
    script = "import time, dex.cli\ntry: dex.cli.app(['--help'])\nexcept SystemExit: print(time.process_time())"
    seconds = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        seconds.append(float(done.stdout.splitlines()[-1]))
    assert min(seconds) < 0.5


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run: Any, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "--json" in out


def test_doctor_passes_offline_and_prints_one_json_object() -> None:
    began = time.monotonic()
    done = dex("doctor", "--json", env={"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    checks = json.loads(done.stdout)["checks"]
    assert len(checks) == 7
    assert all(check["passed"] for check in checks)
    assert time.monotonic() - began < 240  # a hang, not a benchmark: two test processes share the cores


def test_the_pipeline_of_commands(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEX_CACHE", str(tmp_path / "cache"))
    base = write_tiny(tmp_path / "base")
    (tmp_path / "r.yaml").write_text(
        f"model: {{id: {base}}}\nmethod: {{heads: {{plan: {tmp_path}/plan.json}}, schedule: land}}\n"
        "data: {train: [{source: pydoc}], block: 64, held_out: 0.1, held_out_tokens: 2_000}\n"
        f"run: {{tokens: 512, batch_tokens: 128, lr: 1.0e-3}}\noutput: {tmp_path}/run\n"
    )
    scored = ("--sequences", 2, "--length", 48)
    held_out = ("-o", tmp_path / "eval", "--suite", "perplexity", "--recipe", tmp_path / "r.yaml")
    steps = [
        ("heads", base, "-o", tmp_path / "plan.json", *scored),
        ("convert", base, "-o", tmp_path / "adapter", "--plan", tmp_path / "plan.json"),
        ("train", tmp_path / "r.yaml", "run.seed=3"),
        ("fold", tmp_path / "run" / "adapter", "-o", tmp_path / "folded"),
        ("eval", base, tmp_path / "run" / "adapter", tmp_path / "folded", *held_out),
    ]
    results = []
    for step in steps:
        code, out, err = run(*step, "--json")
        assert code == 0, err
        results.append(json.loads(out))
    losses = [figures["tasks"]["held-out"]["score"]["mean"] for figures in results[-1]["models"].values()]
    assert losses[1] != losses[0]
    assert losses[2] == pytest.approx(losses[1], abs=1e-5)
    assert results[2]["branch"]["inert"] is False


MISTAKES = [
    (("heads", "{tmp}/none", "-o", "{tmp}/p.json"), 1, "{tmp}/none"),
    (("heads", "{base}", "-o", "{tmp}/p.json", "--criterion", "entropie"), 1, "entropie"),
    (("heads", "{base}", "-o", "{tmp}/p.json", "--per-layer", "9", "--criterion", "random"), 1, "9 heads"),
    (("heads", "{base}", "-o", "{tmp}/p.json", "--per-layer", "many"), 2, "many"),
    (("heads", "{base}", "-o", "{tmp}/p.json", "--data", "{tmp}/none.txt"), 1, "none.txt"),
    (("heads", "{base}", "-o", "{base}/config.json", "--criterion", "all"), 1, "--force"),
    (("convert", "{base}", "-o", "{base}"), 1, "--force"),
    (("convert", "{base}", "-o", "{tmp}/a", "--schedule", "papr"), 1, "papr"),
    (("convert", "{base}", "-o", "{tmp}/a", "--plan", "{tmp}/none.json"), 1, "none.json"),
    (("train", "{tmp}/none.yaml"), 1, "none.yaml"),
    (("train", "{bad}"), 1, "did you mean"),
    (("fold", "{base}", "-o", "{tmp}/f"), 1, "not an adapter"),
    (("eval", "{base}", "-o", "{tmp}/e", "--suite", "perplexty"), 1, "did you mean perplexity"),
    (("eval", "{base}", "-o", "{tmp}/e"), 2, "--suite"),
    (("eval", "-o", "{tmp}/e", "--suite", "perplexity"), 2, "MODEL"),
    (("eval", "{base}", "-o", "{tmp}/e", "--suite", "perplexity", "--set", "held_out=2"), 1, "held_out"),
    (("eval", "{base}", "-o", "{tmp}/e", "--suite", "perplexity", "--recipe", "{bad}"), 1, "did you mean"),
    (("convert", "{base}", "-o", "{tmp}/a", "--plan", "p.json", "--criterion", "all"), 2, "beside --plan"),
    (("convert", "{base}", "-o", "{tmp}/a", "--criterion", "none"), 1, "nothing to act on"),
    (("heads", "{base}", "-o", "{tmp}"), 1, "is a folder"),
    (("heads", "{base}", "-o", "{bad}/p.json"), 1, "is a file and not a folder"),
    (("fold", "{base}", "-o", "{bad}/f"), 1, "is a file and not a folder"),
    (("heads", "{base}", "-o", "{tmp}/p.json", "--held-out", "nan"), 1, "held-out share"),
    (("heads", "{base}", "-o", "{tmp}/p.json", "--seed", "-1"), 2, "--seed"),
    (("eval", "{base}", "-o", "{tmp}/e", "--suite", "perplexity", "--batch-size", "0"), 2, "--batch-size"),
    (("bogus",), 2, "bogus"),
]


@pytest.mark.parametrize(("arguments", "code", "said"), MISTAKES)
def test_a_mistake_is_one_sentence_and_writes_nothing(
    run: Any, tmp_path_factory: pytest.TempPathFactory, arguments: tuple[str, ...], code: int, said: str
) -> None:
    tmp = tmp_path_factory.mktemp("mistake")
    base = write_tiny(tmp / "base")
    (tmp / "bad.yaml").write_text("model: {id: x}\nmethod: {shedule: paper}\n")
    before = sorted(path for path in tmp.rglob("*"))
    names = {"tmp": tmp, "base": base, "bad": tmp / "bad.yaml"}
    exit_code, out, err = run(*(argument.format(**names) for argument in arguments))
    assert exit_code == code, err
    assert said.format(**names) in err
    assert out == ""
    assert sorted(path for path in tmp.rglob("*")) == before


def test_a_mistake_in_a_real_process_shows_no_traceback(tmp_path: Path) -> None:
    done = dex("fold", tmp_path / "none", "-o", tmp_path / "f")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == f"dex: {tmp_path}/none is not an adapter: no readable adapter_config.json is there.\n"


def test_ctrl_c_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base")
    scoring = Dex("heads", base, "-o", tmp_path / "plan.json", "--sequences", 4000, "--length", 64)
    while not (first := scoring.stderr):  # until it is at work
        assert scoring.poll() is None
        time.sleep(0.02)
    scoring.send_signal(signal.SIGINT)
    _, said = scoring.communicate(timeout=60)
    assert scoring.returncode == 1
    assert "interrupted" in said, first + said
    assert "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_an_error_with_json_is_one_json_object(run: Any, tmp_path: Path) -> None:
    code, out, _ = run("fold", tmp_path / "none", "-o", tmp_path / "f", "--json")
    assert code == 1
    assert "not an adapter" in json.loads(out)["error"]
