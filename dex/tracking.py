"""The trackers that a run reports to beside its log.jsonl, by name: trackio, tensorboard, wandb."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from dex.errors import DexError

# A tracker is there if any of these can be imported.
MODULES = {"trackio": ("trackio",), "tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",)}


def check_trackers(names: Sequence[str]) -> None:
    """Raise DexError for a tracker that is not installed, before any work is done."""
    for name in names:
        if not any(importlib.util.find_spec(module) for module in MODULES[name]):
            raise DexError(f"run.track has {name}, which is not installed: `pip install {name}`, or leave it out.")


def tracker_folder(run: Path) -> None:
    """Have tensorboard write into the run's folder."""
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(run / "trackers")
