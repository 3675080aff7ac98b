"""What a page of the documentation holds: its commands, its links and its anchors, as GitHub reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("dex", "make", "python", "pip", "torchrun", "accelerate", "hf", "vllm", "llama-cli")


@dataclass(frozen=True)
class Block:
    """A code block; `line` is its first line in the page, counted from 1."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_shell(self) -> bool:
        """Whether it holds commands: a fence that says so, or lines of which one begins with a program."""
        lines = [line.split() for line in self.text.splitlines()]
        return self.language == "sh" or (not self.language and any(words and words[0] in PROGRAMS for words in lines))


@dataclass(frozen=True)
class Link:
    page: Path
    line: int
    target: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {self.target}"


def blocks(page: Path) -> list[Block]:
    """The code blocks, fenced and indented, in their order; also those inside lists."""
    tokens = _parse(page)
    made = [token for token in tokens if token.type in ("fence", "code_block")]
    return [Block(page, _line(token) + (token.type == "fence"), token.info.strip(), token.content) for token in made]


def commands(block: Block) -> list[str]:
    """Its commands as they stand there, without comments; `\\` joins lines, and a for loop is written out."""
    lines = re.sub(r"\s*\\\n\s*", " ", block.text).splitlines()
    return list(_unrolled([bare for line in lines if (bare := re.sub(r"(^|\s+)#\s.*", "", line).strip())]))


def _unrolled(lines: list[str]) -> Iterator[str]:
    name, values = "", [""]
    for line in lines:
        if loop := re.fullmatch(r"for (\w+) in (.+); do", line):
            name, values = loop[1], loop[2].split()
        elif line == "done":
            name, values = "", [""]
        else:
            yield from (line.replace(f"${name}", value) if name else line for value in values)


def links(page: Path) -> list[Link]:
    """Links and images."""
    return [
        Link(page, line, str(token.attrs["href" if token.type == "link_open" else "src"]))
        for line, token in _inline(page)
        if token.type in ("link_open", "image")
    ]


def code_words(page: Path) -> list[Link]:
    """What stands in `backticks` in running text."""
    return [Link(page, line, token.content) for line, token in _inline(page) if token.type == "code_inline"]


def anchors(page: Path) -> set[str]:
    """The anchors of its headings, by GitHub's rule."""
    found: list[str] = []
    tokens = _parse(page)
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            children = inline.children or []
            text = "".join(child.content for child in children if child.type in ("text", "code_inline"))
            anchor = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
            again = sum(one == anchor or re.fullmatch(rf"{re.escape(anchor)}-\d+", one) is not None for one in found)
            found.append(f"{anchor}-{again}" if again else anchor)
    return set(found)


def _inline(page: Path) -> Iterator[tuple[int, Token]]:
    line = 0
    for token in _parse(page):
        line = _line(token) if token.map else line  # the cells of a table have none of their own
        for child in token.children or []:
            yield line, child


def _line(token: Token) -> int:
    return (token.map or [0])[0] + 1


def _parse(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
