"""Of a process without dex: what vLLM says after prompts, from a model folder.

python ask_vllm.py REQUEST.json ANSWER.json     {"model", "prompts": [[id]], "new_tokens"}
"""

import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":  # vLLM starts a process of its own, which imports this file
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
    import torch
    import vllm

    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    engine = vllm.LLM(request["model"], dtype="float32", enforce_eager=True, max_model_len=512)
    greedy = vllm.SamplingParams(temperature=0.0, max_tokens=request["new_tokens"], ignore_eos=True)
    done = engine.generate([{"prompt_token_ids": prompt} for prompt in request["prompts"]], greedy)
    answers = [list(each.outputs[0].token_ids) for each in done]
    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    Path(sys.argv[2]).write_text(
        json.dumps({"answers": answers, "versions": versions, "imported_dex": "dex" in sys.modules}), encoding="utf-8"
    )
