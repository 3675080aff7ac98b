"""docs/latency.png: seconds of a prefill and of a decode step against the context length, in every layout.

    python scripts/plot_latency.py [--lengths T ...] [--repeats 2] [--out docs] [--redraw]

writes the measured numbers beside it, as latency.json; --redraw draws them again without measuring. The runs of a
length alternate over the models, in one process; a point is their median, and a ratio that of pairwise ratios.
Run it on a machine that does nothing else. Needs matplotlib: pip install -e ".[report]".
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
from pathlib import Path
from typing import Any

import matplotlib
import torch
import transformers
from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter, NullLocator
from transformers.utils.logging import disable_progress_bar

from bench_layouts import Models, base_v2_and_dex, v1_and_diffllama
from bench_models import PAIRABLE, Shape, decode, prefill
from bench_timing import alternate, ratio
from dex.quiet import quiet_libraries

LENGTHS = (128, 256, 512, 1_024, 2_048, 4_096)
DECODE_STEPS = 20

# Colours of Okabe and Ito, told apart by colour-blind eyes; markers and dashes tell them apart in grey.
LINES: dict[str, tuple[str, dict[str, Any]]] = {
    "base": ("base (Llama)", {"color": "#000000", "marker": "o", "linestyle": "-"}),
    "folded": ("Dex, folded", {"color": "#56B4E9", "marker": "x", "linestyle": "--"}),
    "attached": ("Dex, attached", {"color": "#0072B2", "marker": "+", "linestyle": ":"}),
    "diff-v2": ("DIFF V2", {"color": "#009E73", "marker": "s", "linestyle": "-"}),
    "diff-v1": ("DIFF V1", {"color": "#D55E00", "marker": "^", "linestyle": "-"}),
    "diffllama": ("DiffLlama (transformers)", {"color": "#CC79A7", "marker": "v", "linestyle": "--"}),
}
TITLES = {"prefill": "prefill of T tokens", "decode": "decode step, T tokens cached"}


# ---- measuring ---------------------------------------------------------------------------------------------


def measure(shape: Shape, lengths: list[int], repeats: int) -> dict[str, Any]:
    built = {**base_v2_and_dex(shape), **v1_and_diffllama(shape)}
    models: Models = {name: built[name] for name in LINES}
    for model in models.values():
        prefill(model, lengths[0])()
    measured: dict[str, Any] = {what: {"seconds": {}, "ratio_to_base": {}, "repeats": []} for what in TITLES}
    for length in lengths:
        rounds = repeats if length > 1_024 else 2 * repeats
        prefills = {name: prefill(model, length) for name, model in models.items()}
        _add(measured["prefill"], alternate(prefills, rounds, warm_up=False))
        decodes = {name: decode(model, length) for name, model in models.items()}
        _add(measured["decode"], alternate(decodes, DECODE_STEPS))
        print(f"T={length} is measured", flush=True)
    return {"machine": machine(), "shape": shape._asdict(), "lengths": lengths, **measured}


def _add(measured: dict[str, Any], seconds: dict[str, list[float]]) -> None:
    measured["repeats"].append(len(seconds["base"]))
    for name, each in seconds.items():
        measured["seconds"].setdefault(name, []).append(round(statistics.median(each), 6))
        measured["ratio_to_base"].setdefault(name, []).append(round(ratio(each, seconds["base"]), 4))


def machine() -> dict[str, Any]:
    name = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": name[1].strip() if name else "unknown CPU",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "dtype": "float32",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


# ---- drawing -----------------------------------------------------------------------------------------------


def draw(measured: dict[str, Any], path: Path) -> None:
    matplotlib.use("Agg")
    pyplot.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    lengths = measured["lengths"]
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7.4), sharex=True, height_ratios=[3, 2], layout="constrained")
    for column, (what, title) in enumerate(TITLES.items()):
        latency, relative = axes[0][column], axes[1][column]
        scale, unit = (1.0, "seconds") if what == "prefill" else (1_000.0, "milliseconds per token")
        for name, (label, style) in LINES.items():
            style = {"linewidth": 1.6, "markersize": 6, "markerfacecolor": "none", "label": label, **style}
            latency.plot(lengths, [scale * value for value in measured[what]["seconds"][name]], **style)
            relative.plot(lengths, measured[what]["ratio_to_base"][name], **style)
        latency.set(title=title, ylabel=unit, xscale="log", yscale="log")
        relative.set(xlabel="context length T, tokens", ylabel="time, relative to the base")
        latency.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        latency.yaxis.set_minor_formatter(FuncFormatter(_few_digits))
        for each in (latency, relative):
            each.set_xticks(lengths, [f"{length}" for length in lengths])
            each.xaxis.set_minor_locator(NullLocator())
            each.grid(True, which="both", color="#dddddd", linewidth=0.6)
            each.tick_params(axis="y", which="both", labelsize=9)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(LINES), frameon=False, fontsize=9.5)
    figure.supxlabel(caption(measured), fontsize=8.5, color="#444444")
    figure.savefig(path, dpi=105)
    pyplot.close(figure)


def _few_digits(value: float, _: int) -> str:
    """Of the ticks between powers of ten, every other one has a number."""
    return f"{value:g}" if f"{value:e}"[0] in "2357" else ""


def caption(measured: dict[str, Any]) -> str:
    shape, on = measured["shape"], measured["machine"]
    return (
        f"{shape['layers']} layers, width {shape['width']}, {shape['heads']} query and {shape['kv_heads']} key/value "
        f"heads of {shape['head_dim']}, vocabulary {shape['vocab']:,}; random weights, batch 1, {on['dtype']}.\n"
        f"{on['cpu']}, {on['cores']} cores, {on['threads']} threads; torch {on['torch']}, "
        f"transformers {on['transformers']}, SDPA. Medians of interleaved runs."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="T")
    parser.add_argument("--repeats", type=int, default=2, help="prefills above 1024 tokens; twice as many below")
    parser.add_argument("--out", type=Path, default=Path("docs"), metavar="DIR")
    parser.add_argument("--redraw", action="store_true", help="only draw DIR/latency.json again")
    options = parser.parse_args()
    quiet_libraries()
    disable_progress_bar()
    numbers = options.out / "latency.json"
    if not options.redraw:
        measured = measure(PAIRABLE, sorted(options.lengths), options.repeats)
        numbers.write_text(json.dumps(measured, indent=1) + "\n")
    draw(json.loads(numbers.read_text()), options.out / "latency.png")
    print(f"{numbers} and {options.out / 'latency.png'} are written")


if __name__ == "__main__":
    main()
