"""Of a process without dex: what transformers' generate says after prompts, from a folder or a GGUF file.

python ask_transformers.py REQUEST.json ANSWER.json     {"model", "gguf_file", "prompts": [[id]], "new_tokens"}
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
options = {"gguf_file": request["gguf_file"]} if request["gguf_file"] else {}
model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32, **options).eval()
model.generation_config = GenerationConfig()  # generate would take what is not said below from the folder
greedy = GenerationConfig(do_sample=False, max_new_tokens=request["new_tokens"], eos_token_id=-1, pad_token_id=0)
answers = []
for prompt in request["prompts"]:
    ids = torch.tensor([prompt])
    said = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
    answers.append(said[0, len(prompt) :].tolist())
versions = {"transformers": transformers.__version__, "torch": torch.__version__}
Path(sys.argv[2]).write_text(
    json.dumps({"answers": answers, "versions": versions, "imported_dex": "dex" in sys.modules}), encoding="utf-8"
)
