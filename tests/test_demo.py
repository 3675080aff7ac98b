"""The demo's pipeline on the real model, with few steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dex.heads import HeadPlan

ROOT = Path(__file__).parent.parent
SHIPPED = ROOT / "heads" / "smollm2-135m-instruct-entropy.json"
FEW_STEPS = ["run.tokens=1_024", "run.save_every=512", "run.eval_every=512", "data.held_out_tokens=2_000"]


def demo(runs: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/demo.py", "--runs", str(runs), *FEW_STEPS]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_demo_runs_and_does_nothing_twice(tmp_path: Path) -> None:
    first = demo(tmp_path / "runs")
    assert first.returncode == 0, first.stderr
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.safetensors")}
    for said in ("control: K, V, O trained alone", "Dex, folded", "Certificate", "its branch", "Before:", "After:"):
        assert said in first.stdout
    second = demo(tmp_path / "runs")
    assert second.returncode == 0, second.stderr
    assert second.stdout == first.stdout
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.safetensors")} == written


@pytest.mark.slow
def test_the_shipped_plan_is_the_one_that_the_demo_makes(tmp_path: Path) -> None:
    """The command that made heads/smollm2-135m-instruct-entropy.json makes it again."""
    options = ["--sequences", "16", "--length", "512", "--held-out", "0.3"]
    command = [str(Path(sys.executable).with_name("dex")), "heads", "smollm2-135m-instruct", *options]
    subprocess.run([*command, "-o", str(tmp_path / "plan.json")], check=True)
    made, shipped = (HeadPlan.load(path) for path in (tmp_path / "plan.json", SHIPPED))
    assert made.heads == shipped.heads
    assert made.model == shipped.model
    assert made.scores == [pytest.approx(row, rel=1e-3) for row in shipped.scores or []]
