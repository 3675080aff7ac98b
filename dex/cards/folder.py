"""A folder that gets a card, what was read of it, and what that says of method, control and layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dex.cards.evaluation import Evaluation
from dex.cards.facts import Facts
from dex.cards.kind import Kind
from dex.json_object import read_json
from dex.lock import CERTIFICATE, Lock
from dex.models import DIFF


@dataclass(frozen=True)
class Folder:
    """A folder, and what was read of it."""

    path: Path
    kind: Kind
    facts: Facts
    lock: Lock | None
    evaluation: Evaluation | None

    @cached_property
    def method(self) -> str | None:
        """The method it was trained with; without a lock, that of the adapter, and a branch tells Dex."""
        if self.lock is not None:
            return self.lock.result.method
        if self.kind == "folded":
            return "dex" if read_json(self.path / CERTIFICATE)["branch"] else None
        return {"adapter": "dex", "lora": "lora"}.get(self.kind)

    @cached_property
    def control(self) -> bool:
        """Is it Dex's control: K, V and O trained alone, without a branch?"""
        if self.kind == "adapter":
            return bool(read_json(self.path / "adapter_config.json").get("schedule") == "off")
        if self.kind != "folded" or self.lock is None:
            return False
        return self.method == "attention" or self.lock.recipe["method"].get("schedule") == "off"

    @cached_property
    def layout(self) -> str | None:
        """The DIFF layout of a whole model; None for a stock one."""
        if self.kind in ("adapter", "lora"):
            return None
        model_type = read_json(self.path / "config.json").get("model_type")
        return str(model_type).replace("_", "-") if model_type in DIFF else None

    @property
    def has_differential_attention(self) -> bool:
        """Was differential attention trained, folded or laid out in it?"""
        return self.layout is not None or (self.method == "dex" and not self.control)
