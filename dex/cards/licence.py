"""Licences: the names that the Hub knows, what some agreements ask of whoever publishes a model, and how it is met.

The agreements themselves are the base's: its LICENSE, NOTICE and USE_POLICY files are copied into what dex writes.
What is here are facts about them, and the short lines that they want to be displayed, word for word.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from dex.models import LICENCE_FILE
from dex.output import write_whole

_CODES = """
apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0
lgpl lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl
openmdw-1.0 openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license
fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 grok2-community gemma unknown
other
"""
KNOWN = frozenset(_CODES.split())
_NOTICE_LINE = re.compile(
    r"[“\"']([\w. ]{1,40} is licensed under the [^“”\"]{1,160}?All Rights Reserved\.)"  # as an agreement quotes it
)


@dataclass(frozen=True)
class Duties:
    """What an agreement asks for: a copy of it, a line in a file NOTICE, words in the card, the start of the name.

    agreement: its name, as its text has it. statements: one of them must be displayed. A prefix counts in any case,
    and with any of the separators that a repository's name can have in place of a space.
    """

    agreement: str
    notice: str
    statements: tuple[str, ...] = ()
    prefix: str | None = None

    def is_met_by_name(self, name: str) -> bool:
        """Does a repository's name, without its owner, begin as the agreement asks?"""
        return self.prefix is None or bool(re.match(self._pattern, name, re.IGNORECASE))

    def name_that_would_do(self, name: str) -> str:
        """The same name with the prefix in front; what is in front of it now goes to the end."""
        found = re.search(self._pattern, name, re.IGNORECASE)
        if self.prefix is None or found is None:
            return f"{(self.prefix or '').replace(' ', '-')}-{name}"
        before, after = name[: found.start()].strip("-_."), name[found.start() :].strip("-_.")
        return f"{after[0].upper()}{after[1:]}-{before}"

    @property
    def _pattern(self) -> str:
        return "[-_.]?".join(re.escape(word) for word in (self.prefix or "").split())


def _llama(version: str) -> Duties:
    return Duties(
        f"Llama {version} Community License",
        f"Llama {version} is licensed under the Llama {version} Community License, Copyright © Meta Platforms, Inc. "
        "All Rights Reserved.",
        ("Built with Llama",),
        "Llama",
    )


def _qwen(who: str, agreement: str, *statements: str) -> Duties:
    notice = f"{who} is licensed under the {agreement}, Copyright (c) Alibaba Cloud. All Rights Reserved."
    return Duties(agreement, notice, statements)


_BUILT_WITH_QWEN = ("Built with Qwen", "Improved using Qwen")
# By the licence's id on the Hub, or by its name where the id is `other`.
DUTIES = {
    "llama2": Duties(
        "Llama 2 Community License",
        "Llama 2 is licensed under the LLAMA 2 Community License, Copyright (c) Meta Platforms, Inc. All Rights "
        "Reserved.",
    ),
    "llama3": Duties(
        "Meta Llama 3 Community License",
        "Meta Llama 3 is licensed under the Meta Llama 3 Community License, Copyright © Meta Platforms, Inc. All "
        "Rights Reserved.",
        ("Built with Meta Llama 3",),
        "Llama 3",
    ),
    "llama3.1": _llama("3.1"),
    "llama3.2": _llama("3.2"),
    "llama3.3": _llama("3.3"),
    "llama4": _llama("4"),
    "qwen": _qwen("Qwen", "Qwen LICENSE AGREEMENT", *_BUILT_WITH_QWEN),
    "qwen-research": _qwen("Qwen", "Qwen RESEARCH LICENSE AGREEMENT", *_BUILT_WITH_QWEN),
    "tongyi-qianwen": _qwen("Tongyi Qianwen", "Tongyi Qianwen LICENSE AGREEMENT"),
    "tongyi-qianwen-research": _qwen("Tongyi Qianwen", "Tongyi Qianwen RESEARCH LICENSE AGREEMENT"),
}


def duties_of(licence: str | None, name: str | None) -> Duties | None:
    """What a licence asks for; None for one that asks nothing of what dex checks."""
    key = name if licence == "other" else licence
    return DUTIES.get((key or "").lower())


def copy_licence_files(origin: Path, folder: Path) -> None:
    """Copy the licence and notice files that lie beside a base; those that the folder has already stay."""
    for file in licence_files(origin):
        if not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)


def licence_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if LICENCE_FILE.fullmatch(path.name) and path.is_file()]


def leads_to_licence(link: str, folder: Path) -> bool:
    """Can whoever gets the folder follow it: is it a URL, or the name of a licence file that goes with the folder?"""
    return _is_url(link) or any(file.name == link for file in licence_files(folder))


def _is_url(link: str) -> bool:
    try:
        url = urlsplit(link)
    except ValueError:
        return False
    return url.scheme in ("http", "https") and bool(url.hostname) and not any(map(str.isspace, link))


def write_notice(folder: Path, duties: Duties) -> None:
    """See that a NOTICE file has the attribution line: that of the agreement's own copy, if it is there."""
    line = _line_of_the_agreement(folder) or duties.notice
    file = next((file for file in licence_files(folder) if _is_notice(file)), folder / "NOTICE")
    there = _words(file) if file.exists() else ""
    if line not in there:
        before = file.read_text(encoding="utf-8", errors="replace").rstrip("\n") + "\n" if there else ""
        write_whole(file, f"{before}{line}\n")


def has_notice(folder: Path, duties: Duties) -> bool:
    line = _line_of_the_agreement(folder) or duties.notice
    return any(line in _words(file) for file in licence_files(folder) if _is_notice(file))


def has_agreement(folder: Path, duties: Duties) -> bool:
    """Is a copy of the agreement there?"""
    name = duties.agreement.lower()
    return any(name in _words(file).lower() for file in licence_files(folder) if not _is_notice(file))


def _line_of_the_agreement(folder: Path) -> str | None:
    """The attribution that the agreement's copy quotes: of two versions of one agreement it can differ."""
    for file in licence_files(folder):
        if not _is_notice(file) and (found := _NOTICE_LINE.search(_words(file))):
            return found[1]
    return None


def _is_notice(file: Path) -> bool:
    return file.name.lower().startswith("notice")


def _words(file: Path) -> str:
    """A text on one line, however it was broken."""
    return " ".join(file.read_text(encoding="utf-8", errors="replace").split())
