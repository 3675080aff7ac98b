"""Keeping the libraries quiet, so that what a person reads is what dex says."""

from __future__ import annotations

import logging
import os
import sys
import warnings

_NO_BARS = "HF_HUB_DISABLE_PROGRESS_BARS"
_set_here: set[str] = set()


def quiet_libraries() -> None:
    """What dex has to say it says itself; the libraries' warnings are for its developers."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if _NO_BARS not in os.environ:
        os.environ[_NO_BARS] = "1"
        _set_here.add(_NO_BARS)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def show_transfers() -> None:
    """Let the Hub's client show how far it is, unless the user wants no bars: before huggingface_hub is imported."""
    if _NO_BARS in _set_here:
        os.environ.pop(_NO_BARS, None)
