"""What `method.name` of a recipe can be: each method is one class in one file of this folder, found by itself.

The class holds the method's settings, says which of them do not fit, and makes from a loaded base what is trained
(`Subject`) and the optimiser. The run (`dex.verbs.train`) does not know which one it runs. A new method is a new file
here and a recipe. Nothing in these files imports torch before it is needed, so that a recipe is read at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dex.methods.base import Method
from dex.named_classes import NamedClasses

__all__ = ["METHODS", "AnyMethod", "Method", "read_method_name"]

_METHODS = NamedClasses(__name__, __path__, Method, "method", default="dex")
METHODS: dict[str, type[Method]] = _METHODS.classes
read_method_name = _METHODS.check_name

if TYPE_CHECKING:
    AnyMethod = Method
else:  # pydantic reads the right class from the name, and says where in it something is wrong
    AnyMethod = _METHODS.union()
