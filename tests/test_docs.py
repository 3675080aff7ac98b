"""The documentation's links lead somewhere, its messages are dex's own, and its site builds."""

from __future__ import annotations

import ast
import logging
import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from docs_pages import PAGES, ROOT, Link, anchors, code_words, links
from mkdocs.commands.build import build
from mkdocs.config import load_config

LOCAL = ("localhost", "127.0.0.1")
PATH = re.compile(r"(?<![\w/.])(?:dex|docs|heads|model_cards|recipes|scripts|tests)/[\w./-]*\w")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_relative_link_and_anchor_leads_somewhere(page: Path) -> None:
    assert not [link.place for link in links(page) if not urlsplit(link.target).scheme and not _leads(link)]


def _leads(link: Link) -> bool:
    path, _, anchor = unquote(link.target).partition("#")
    target = (link.page.parent / path).resolve() if path else link.page
    if not target.exists() or not target.is_relative_to(ROOT) or path.startswith("/"):
        return False
    return not anchor or (target.suffix == ".md" and anchor in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_external_links_have_the_form_of_one(page: Path) -> None:
    for link in links(page):
        parts = urlsplit(link.target)
        if parts.scheme:
            assert parts.scheme == "https", link.place
            assert re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", parts.netloc), link.place
            assert not re.search(r"\s", link.target), link.place


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_of_the_repository_that_a_page_names_is_there(page: Path) -> None:
    named = [(link.place, path) for link in code_words(page) for path in PATH.findall(link.target)]
    assert not [place for place, path in named if not (ROOT / path).exists()]


def test_an_anchor_is_githubs(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `code` word, λ & 3.2-1B\n\n## Twice\n\n## Twice\n\nUnder_line\n---\n\n    # no heading\n")
    assert anchors(page) == {"a-code-word-λ--32-1b", "twice", "twice-1", "under_line"}


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = ROOT / "docs" / "page.md"  # which is not there; only its folder matters
    good = ("recipes.md", "recipes.md#what-there-is", "../recipes/demo.yaml", "latency.png")
    bad = ("recipe.md", "recipes.md#what-there-was", "../recipes/x.yaml", "/docs/recipes.md", "latency.png#x")
    assert all(_leads(Link(page, 1, target)) for target in good)
    assert not any(_leads(Link(page, 1, target)) for target in bad)


def test_the_site_warns_of_links_that_lead_nowhere_also_out_of_docs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`mkdocs build --strict` in make lint makes them errors."""
    source = tmp_path / "docs"
    source.mkdir()
    (tmp_path / "README.md").write_text("x")
    (source / "index.md").write_text("# One\n\n[there](../README.md) [not there](../missing.md) [nor](two.md#x)\n")
    (source / "two.md").write_text("# Two\n")
    places = {"docs_dir": str(source), "site_dir": str(tmp_path / "site"), "nav": ["index.md", "two.md"]}
    config = load_config(str(ROOT / "mkdocs.yml"), **places)
    with caplog.at_level(logging.WARNING, logger="mkdocs"):
        build(config)
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 2
    assert any("../missing.md" in message for message in warned)
    assert any("two.md#x" in message for message in warned)
    assert "README.md" not in (tmp_path / "site" / "index.html").read_text()


# --- Messages


@cache
def _sentences() -> str:
    """Every string of dex's source, a line each, with … for what is filled in."""
    found = []
    for file in sorted((ROOT / "dex").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def quoted(page: Path) -> list[str]:
    """The messages that the entries of the page begin with, but for those of other libraries."""
    own, _, others = page.read_text(encoding="utf-8").partition("## Said by others")
    assert others
    return re.findall(r"^\* `([^`]+)`", own, re.MULTILINE)


def said_by_dex(message: str) -> bool:
    pieces = [re.escape(piece) for piece in re.split(r"\s*…\s*", message)]
    return re.search(r"[^\n]*".join(pieces), _sentences()) is not None


def test_every_message_of_troubleshooting_is_one_that_dex_says() -> None:
    messages = quoted(ROOT / "docs" / "troubleshooting.md")
    assert len(messages) >= 30
    assert not [message for message in messages if not said_by_dex(message)]
    assert not said_by_dex("… is gated: accept its terms and pay")
