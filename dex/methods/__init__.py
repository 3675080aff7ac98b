"""What `method.name` of a recipe can be: each method is one class in one file of this folder, found by itself.

The class holds the method's settings, says which of them do not fit, and makes from a loaded base what is trained
(`Subject`) and the optimiser. The run (`dex.train`) does not know which one it runs. A new method is a new file here
and a recipe. Nothing in these files imports torch before it is needed, so that a recipe is read at once.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Discriminator, Tag

from dex.methods.base import Method
from dex.settings import Problem, clash, one_of, shown

__all__ = ["METHODS", "AnyMethod", "Method", "read_method_name"]

DEFAULT = "dex"


def _find() -> dict[str, type[Method]]:
    found: dict[str, type[Method]] = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
        for value in vars(importlib.import_module(f"{__name__}.{module}")).values():
            # A class that several share, and that names no method itself, is none.
            if isinstance(value, type) and issubclass(value, Method) and "name" in vars(value)["__annotations__"]:
                found[value.model_fields["name"].default] = value
    return dict(sorted(found.items()))


METHODS = _find()


def read_method_name(value: Any) -> Any:
    """Refuse a name that no method has, with the names there are."""
    name = value.get("name", DEFAULT) if isinstance(value, Mapping) else DEFAULT
    if isinstance(value, Mapping) and (not isinstance(name, str) or name not in METHODS):
        sentence = f"method.name: {shown(name)} was given, {one_of(str(name), list(METHODS))} is expected"
        raise clash([Problem(("method", "name"), sentence)])
    return value


def _tag(value: Any) -> str | None:
    if isinstance(value, Mapping):
        return f"<{value.get('name', DEFAULT)}>"
    return f"<{value.name}>" if isinstance(value, Method) else None


if TYPE_CHECKING:
    AnyMethod = Method
else:  # pydantic reads the right class from the name, and says where in it something is wrong
    AnyMethod = Annotated[
        Union[tuple(Annotated[cls, Tag(f"<{name}>")] for name, cls in METHODS.items())],  # noqa: UP007
        Discriminator(_tag),
    ]
