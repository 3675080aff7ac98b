"""Of a process without dex: what llama.cpp says after prompts, and how it tokenises, from a GGUF file.

python ask_llama_cpp.py REQUEST.json ANSWER.json     {"model", "prompts": [[id]], "new_tokens", "texts", "chat"}
"""

import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
F32 = 0  # the cache of keys and values is float16 unless told otherwise
engine = llama_cpp.Llama(request["model"], n_ctx=512, type_k=F32, type_v=F32, logits_all=True, verbose=False)
answers = []
for prompt in request["prompts"]:
    engine.reset()
    engine.eval(prompt)
    said: list[int] = []
    while len(said) < request["new_tokens"]:
        said.append(int(np.argmax(engine.scores[engine.n_tokens - 1])))
        engine.eval(said[-1:])
    answers.append(said)
tokens = [engine.tokenize(text.encode(), add_bos=True, special=True) for text in request["texts"]]
chat = None
if template := engine.metadata.get("tokenizer.chat_template"):
    ends = engine.token_eos(), engine.token_bos()
    eos, bos = (engine.detokenize([token], special=True).decode() if token >= 0 else "" for token in ends)
    chat = Jinja2ChatFormatter(template, eos, bos)(messages=request["chat"]).prompt
answer = {"answers": answers, "tokens": tokens, "chat": chat}
Path(sys.argv[2]).write_text(
    json.dumps({**answer, "versions": {"llama_cpp": llama_cpp.__version__}, "imported_dex": "dex" in sys.modules}),
    encoding="utf-8",
)
engine.close()
