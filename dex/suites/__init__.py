"""What `--suite` of `dex eval` can be: each suite is one class in one file of this folder, found by itself.

The class holds the suite's settings and scores a loaded model's answers (`run`); loading, resuming, writing and
comparing are the same for all (`dex.evaluation`). A new suite is a new file here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dex.errors import DexError
from dex.named_classes import NamedClasses
from dex.settings import one_of
from dex.settings_file import SettingsFile
from dex.suites.base import Outcome, Suite

__all__ = ["SUITES", "AnySuite", "Outcome", "Suite", "read_suite_name", "suite", "suite_of"]

_SUITES = NamedClasses(__name__, __path__, Suite, "suites")
SUITES: dict[str, type[Suite]] = _SUITES.classes
read_suite_name = _SUITES.check_name

if TYPE_CHECKING:
    AnySuite = Suite
else:
    AnySuite = _SUITES.union()


def suite(name: str, **settings: Any) -> Suite:
    """`suite_of` for a program: `suite("perplexity", recipe="mine.yaml")`."""
    return _file_of(name).block(**settings)


def suite_of(name: str, settings: Sequence[str] = ()) -> Suite:
    """The suite of a name, with its settings as `key=value`. Raises DexError for what is not known of either."""
    return _file_of(name).from_overrides(settings, "--set")


def _file_of(name: str) -> SettingsFile[Suite]:
    if name not in SUITES:
        raise DexError(f"{name!r} is not a suite; there is {one_of(name, list(SUITES))}.")
    return SettingsFile(SUITES[name], f"suite {name}")
