"""The recipes that come with dex: what there is, and a copy of one to start from.

They are the folder recipes/ of the repository, and the data of the package `dex.recipes` where dex is installed.
A recipe goes by its file's name without .yaml; the launcher's configurations are accelerate/NAME, and the chat
templates chat/NAME.jinja.
"""

from __future__ import annotations

import difflib
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple

from dex.errors import DexError
from dex.output import refuse_to_overwrite_file, write_whole
from dex.recipe import parse_recipe

FOLDER = "recipes"  # in the repository, and so in the recipes
COMPANIONS = (
    "accelerate",
    "chat",
    "studies",
)  # folders of files that are no recipes, but that recipes and commands name
NAMED = re.compile(rf"\b{FOLDER}/((?:{'|'.join(COMPANIONS)})/[\w.-]+)")


class Shipped(NamedTuple):
    """A file that comes with dex; `path` is relative to recipes/."""

    path: str
    file: Traversable

    @property
    def name(self) -> str:
        return self.path.removesuffix(".yaml")

    @property
    def text(self) -> str:
        return self.file.read_text(encoding="utf-8")

    @property
    def is_recipe(self) -> bool:
        return "/" not in self.path

    @property
    def about(self) -> str:
        """The first line that says what it is; of a YAML file, after the line with its command."""
        lines = [line.strip("{}#- ") for line in self.text.splitlines() if line.startswith(("#", "{#"))]
        return next((line for line in (lines[1:] if self.path.endswith(".yaml") else lines) if line), "")


class Copy(NamedTuple):
    path: Path
    missing: list[str]  # names of what the copy needs and what is not there


def shipped() -> list[Shipped]:
    """Everything that comes with dex: the recipes by name, and then their companions."""
    return sorted(_found(), key=lambda each: (not each.is_recipe, each.name))


def _found() -> Iterator[Shipped]:
    root = files(f"dex.{FOLDER}")
    for folder in ("", *COMPANIONS):
        for file in (root / folder if folder else root).iterdir():
            if file.name.endswith((".yaml", ".jinja")):
                yield Shipped(f"{folder}/{file.name}" if folder else file.name, file)


def find(name: str) -> Shipped:
    """The file of that name, with or without .yaml. Raises DexError, with the nearest names, if there is none."""
    there = {each.name: each for each in shipped()}
    wanted = name.removeprefix(f"{FOLDER}/").removesuffix(".yaml")
    if wanted in there:
        return there[wanted]
    near = [each for each in there if wanted and wanted in each][:3] or difflib.get_close_matches(wanted, there, n=1)
    hint = f"did you mean {' or '.join(near)}? `dex recipes ls` lists all" if near else "`dex recipes ls` lists them"
    raise DexError(f"{name!r} is no recipe that comes with dex; {hint}.")


def catalogue() -> dict[str, Any]:
    """What `dex recipes ls` shows, as JSON."""
    recipes = [_described(each) for each in shipped() if each.is_recipe]
    companions = [{"name": each.name, "about": each.about} for each in shipped() if not each.is_recipe]
    return {"recipes": recipes, "companions": companions}


def _described(each: Shipped) -> dict[str, Any]:
    recipe = parse_recipe(each.text, each.path)
    return {
        "name": each.name,
        "method": recipe.method.name,
        "model": recipe.model.id,
        "tokens": recipe.run.tokens,
        "about": each.about,
    }


def describe(found: dict[str, Any]) -> str:
    """The table that is printed."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("recipe", "method", "model"):
        table.add_column(column, no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("")
    for recipe in found["recipes"]:
        table.add_row(recipe["name"], recipe["method"], recipe["model"], f"{recipe['tokens']:,}", recipe["about"])
    table.add_section()
    for companion in found["companions"]:
        table.add_row(companion["name"], "", "", "", companion["about"])
    width = max(120, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 200  # in a file, a line a recipe
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(table)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    return "\n".join([*lines, "", "dex recipes cp NAME [DEST] copies one."])


def copy(name: str, dest: Path | None = None, *, force: bool = False) -> Copy:
    """Copy a file that comes with dex; into the current folder, under its own name, if `dest` is not given.

    The command in its first line becomes the copy's. Raises DexError for a name that is not there, and for a file
    that is in the way and may not be replaced.
    """
    source = find(name)
    own_name = source.path.rsplit("/", 1)[-1]
    path = Path(own_name) if dest is None else dest / own_name if dest.is_dir() else dest
    refuse_to_overwrite_file(path, force)
    text = source.text
    if source.path.endswith(".yaml"):
        first, newline, rest = text.partition("\n")
        text = first.replace(f"{FOLDER}/{source.path}", shlex.quote(str(path))) + newline + rest
    write_whole(path, text)
    named = dict.fromkeys(NAMED.findall(text)) if source.is_recipe else []
    return Copy(path, [each for each in named if not Path(FOLDER, each).exists()])


def describe_copy(made: Copy) -> str:
    lines = [f"copied to {made.path}"]
    for each in made.missing:
        lines.append(f"it names {FOLDER}/{each}, which is not here: dex recipes cp {each} {FOLDER}/{each}")
    return "\n".join(lines)
