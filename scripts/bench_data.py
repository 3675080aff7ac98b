"""The benchmark of preparing data: one JSON line per figure, {"figure", "value", "target", "met"}.

    python scripts/bench_data.py [--megabytes 50 500]

Real text (the standard library's source and pydoc's topics, over and over) is packed with SmolLM2's tokenizer, each
size in a process of its own, whose peak memory is taken. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from bench_timing import figure, resident

TOKENIZER = "smollm2-135m-instruct"
TRAINING_SPEED = 140  # tokens/s of the demo's training on two cores
TIMES = 20  # preparing is so much faster at least, and then takes under 5 % of a run
GROWTH = 1.1  # of the peak memory, from the smallest to the largest size


def texts() -> Iterator[str]:
    """Files of Python's standard library and the topics of its help, without end."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    documents = [file.read_text(encoding="utf-8", errors="ignore") for file in files] + list(topics.values())
    while True:
        yield from documents


def write_text(path: Path, megabytes: int) -> None:
    """A .jsonl file of at least so many megabytes; no two rows are alike, or most of them would be held out once."""
    written = 0
    with path.open("w", encoding="utf-8") as file:
        for number, text in enumerate(texts()):
            written += file.write(json.dumps({"text": f"{number}\n{text}"}, ensure_ascii=False) + "\n")
            if written >= megabytes * 10**6:
                return


def prepare_in_this_process(text: Path) -> dict[str, Any]:
    """Tokens packed, seconds and peak memory (MB) of one preparation."""
    from dex.quiet import quiet_libraries

    quiet_libraries()
    from dex.data import Source, prepare
    from dex.models import ModelSource, load_tokenizer

    tokenizer = load_tokenizer(ModelSource(TOKENIZER))
    with tempfile.TemporaryDirectory() as cache:
        began = time.perf_counter()
        result = prepare([Source(str(text))], tokenizer, 1024, 10**12, 0.1, Path(cache))
        seconds = time.perf_counter() - began
        tokens = len(result.packed) * result.packed.block
    return {"tokens": tokens, "seconds": seconds, "peak": resident() / 2**20}


def measure(megabytes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.jsonl"
        write_text(text, megabytes)
        command = [sys.executable, __file__, "--one", str(text)]
        result: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[50, 500])
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(prepare_in_this_process(args.one)))
        return
    peaks = []
    for megabytes in args.megabytes:
        result = measure(megabytes)
        speed, least = result["tokens"] / result["seconds"], TIMES * TRAINING_SPEED
        name = f"data, {megabytes} MB of text"
        _print(figure(f"{name}: tokens/s", speed, f"≥ {least:,}", speed >= least))
        peaks.append(result["peak"])
        _print(
            figure(f"{name}: peak memory MB", peaks[-1], f"≤ {GROWTH:g} × the first", peaks[-1] <= GROWTH * peaks[0])
        )


def _print(line: dict[str, Any]) -> None:
    print(json.dumps(line, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
