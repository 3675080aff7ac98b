"""Commands in a process of their own, in a folder with a `dex` of its own: for pages that add files to it.

python tests/docs_child.py '[["train", "mine.yaml"], …]'
"""

from __future__ import annotations

import json
import sys


def shorten_texts() -> None:
    """The beginnings of 40 documents of `pydoc` and `stdlib`: to tokenise all of them takes seconds a command."""
    from dex.data import embedded

    for name, read in embedded.EMBEDDED.items():
        short = {title: text[:500] for title, text in sorted(read().items())[:40]}
        embedded.EMBEDDED[name] = lambda short=short: short  # type: ignore[misc]


if __name__ == "__main__":
    sys.path[0] = ""  # the current folder, and its dex, before the installed one
    from dex import cli

    shorten_texts()
    for words in json.loads(sys.argv[1]):
        sys.argv = ["dex", *words]
        try:
            cli.main()
        except SystemExit as stop:
            if stop.code:
                print(f"{words} ended with {stop.code}", file=sys.stderr)
                raise
