"""dex: retrofit pretrained Llama and Qwen models with differential attention output, and fold it back.

`import dex` makes "DEX" a method of PEFT. It costs nothing until PEFT is imported: the names below are loaded
when they are first used, so that `dex --help` need not wait for torch.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

import wrapt

if TYPE_CHECKING:
    from dex.errors import DexError
    from dex.heads import HeadPlan
    from dex.tuner import DexConfig, DexModel
    from dex.tuner.callback import DexCallback

__version__ = "0.1.0"

_HOME = {
    "DexConfig": "dex.tuner",
    "DexModel": "dex.tuner",
    "DexCallback": "dex.tuner.callback",
    "DexError": "dex.errors",
    "HeadPlan": "dex.heads",
}
__all__ = ["DexCallback", "DexConfig", "DexError", "DexModel", "HeadPlan", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dex' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


@wrapt.when_imported("peft")
def _register_with_peft(_: ModuleType) -> None:
    importlib.import_module("dex.tuner")
