"""A folder in which the commands of the documentation run: small stand-ins for what the pages name.

Models under the ids of the pages come from the loopback Hub, and are tiny ones of the same family; data sets likewise.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import logging
from pathlib import Path
from typing import Any

from docs_pages import ROOT
from hub_server import HubServer
from tiny import write_tiny

from dex import cli
from dex.data.embedded import texts

FAMILIES = {"meta-llama/Llama": "llama", "Qwen/Qwen2": "qwen2", "Qwen/Qwen3": "qwen3"}
LINKED = ("recipes", "scripts", "docs", "Makefile", "pyproject.toml")


def furnish(folder: Path) -> Path:
    """Put into `folder` what the repository has and what a page's reader has beside it."""
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    write_tiny(folder / "smollm2-135m-instruct", **SMALL)
    return folder

SMALL: dict[str, Any] = {"num_hidden_layers": 2, "max_position_embeddings": 4096}

def dex(*arguments: object) -> tuple[int, str, str]:
    """`dex ARGUMENTS` in this process → exit code, what it printed, and what it said."""
    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["dex", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv = argv
        logging.disable(logging.NOTSET)
    return code, out.getvalue(), err.getvalue()
