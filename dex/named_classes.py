"""Classes of settings that a `name` chooses between: one class a file of a folder, found by itself.

Methods of a recipe (`dex.methods`) and suites of `dex eval` (`dex.suites`) are such.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Generic, TypeVar, Union

from pydantic import BaseModel, Discriminator, Tag

from dex.settings import Problem, clash, one_of, shown

Base = TypeVar("Base", bound=BaseModel)


class NamedClasses(Generic[Base]):
    """The subclasses of `base` in a package that name themselves, by name."""

    def __init__(
        self, package: str, path: Iterable[str], base: type[Base], what: str, default: str | None = None
    ) -> None:
        """what: the key that the block has, for sentences. default: the name of a block that gives none."""
        self.base, self.what, self.default = base, what, default
        found: dict[str, type[Base]] = {}
        for module in sorted(info.name for info in pkgutil.iter_modules(path)):
            for value in vars(importlib.import_module(f"{package}.{module}")).values():
                # A class that several share, and that names nothing itself, is none.
                if isinstance(value, type) and issubclass(value, base) and "name" in vars(value)["__annotations__"]:
                    found[value.model_fields["name"].default] = value
        self.classes = dict(sorted(found.items()))

    def check_name(self, value: Any) -> Any:
        """Refuse a name that none has, with the names there are."""
        name = value.get("name", self.default) if isinstance(value, Mapping) else self.default
        if isinstance(value, Mapping) and (not isinstance(name, str) or name not in self.classes):
            expected = one_of(str(name), list(self.classes))
            sentence = f"{self.what}.name: {shown(name)} was given, {expected} is expected"
            raise clash([Problem((self.what, "name"), sentence)])
        return value

    def union(self) -> Any:
        """The type that pydantic reads by the name."""
        tagged = tuple(Annotated[cls, Tag(f"<{name}>")] for name, cls in self.classes.items())
        return Annotated[Union[tagged], Discriminator(self._tag)]  # noqa: UP007

    def _tag(self, value: Any) -> str | None:
        if isinstance(value, Mapping):
            return f"<{value.get('name', self.default)}>"
        return f"<{value.name}>" if isinstance(value, self.base) else None  # type: ignore[attr-defined]
