"""A model folder as one GGUF file, as llama.cpp reads it.

`metadata` says what can be written and writes the sizes, `tokenizer` reads a tokenizer into GGUF's terms, `tensors`
names, reorders and rounds the weights, `check` reads a written file back and compares.
"""
