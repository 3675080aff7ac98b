"""Of a fresh process: two adapters on one base, each alone, and swapped while both are loaded.

python ask_adapters.py REQUEST.json ANSWER.json     {"base", "adapters": [A, B], "prompts": [[id]]}
"""

import json
import sys
from pathlib import Path

import peft
import torch
import transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM

import dex  # makes Dex a method of PEFT

request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
first, second = request["adapters"]


def base() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(request["base"], dtype=torch.float32).eval()


def logits(model: torch.nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(input_ids=torch.tensor([prompt]), use_cache=False).logits for prompt in request["prompts"]]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


plain = logits(base())
alone = [logits(PeftModel.from_pretrained(base(), adapter)) for adapter in (first, second)]
model = PeftModel.from_pretrained(base(), first, adapter_name="first")
model.load_adapter(second, adapter_name="second")
checks = {"the adapters differ": not equal(*alone) and not equal(plain, alone[0])}
model.set_adapter("second")
checks["second after load_adapter and set_adapter"] = equal(logits(model), alone[1])
model.set_adapter("first")
checks["first after set_adapter"] = equal(logits(model), alone[0])
with model.disable_adapter():
    checks["the base in disable_adapter"] = equal(logits(model), plain)
checks["first again after disable_adapter"] = equal(logits(model), alone[0])
versions = {"dex": dex.__version__, "peft": peft.__version__, "transformers": transformers.__version__}
Path(sys.argv[2]).write_text(json.dumps({"checks": checks, "versions": versions}), encoding="utf-8")
