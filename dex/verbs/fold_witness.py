"""The witness of a fold: run by path in a fresh process that never imports dex.

Loads the written folder as anyone would, and writes down its logits on the given tokens:

    python -P fold_witness.py FOLDER TOKENS.safetensors LOGITS_FOLDER DTYPE
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def main(folder: str, tokens: str, logits_folder: str, dtype: str) -> None:
    logging.set_verbosity_error()
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), output_loading_info=True, local_files_only=True
    )
    model.eval()  # on the CPU, as the attached model is
    input_ids = load_file(tokens)["input_ids"]
    for index, row in enumerate(input_ids):
        with torch.no_grad():
            logits = model(input_ids=row[None], use_cache=False).logits[0]
        save_file({"logits": logits.cpu().contiguous()}, Path(logits_folder) / f"{index}.safetensors")
    report = {
        "class": type(model).__name__,
        "missing_keys": sorted(info["missing_keys"]),
        "unexpected_keys": sorted(info["unexpected_keys"]),
        "imported_dex": "dex" in sys.modules,
    }
    (Path(logits_folder) / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
