"""Every test talks to a Hub of our own: the environment is set before anything imports huggingface_hub."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jinja2
import pytest
from hub_server import HubServer

_SERVER = HubServer()
_HOME = Path(tempfile.mkdtemp(prefix="dex-tests-hf-home-"))

for _name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
    os.environ.pop(_name, None)
os.environ.update(
    HF_ENDPOINT=_SERVER.url,
    HF_HOME=str(_HOME),
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_XET="1",
)


# PEFT compiles its template of a model card anew for every checkpoint: a sixth of the time of a run of eight steps.
jinja2.Environment.compile = functools.lru_cache(maxsize=64)(jinja2.Environment.compile)  # type: ignore


def pytest_collection_finish() -> None:
    """Every run collects garbage once; what the tests have imported is none, and looking at it takes most of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """An empty Hub and an empty cache. Add repositories with `hub.add_model` and `hub.add_dataset`."""
    shutil.rmtree(_HOME, ignore_errors=True)
    _SERVER.reset()
    yield _SERVER
    _SERVER.reset()


def pytest_unconfigure() -> None:
    _SERVER.close()
    shutil.rmtree(_HOME, ignore_errors=True)
