"""DIFF Transformer layouts: pretrained models laid out as DIFF V1, DIFF V2 and DiffLlama, and fresh ones beside them.

configuration_diff_v1.py, modeling_diff_v1.py     travel with the checkpoints, and import nothing of this package
configuration_diff_v2.py, modeling_diff_v2.py
head_map.py       which head of one model becomes which of another
body.py           what a layout keeps of its base
to_diff_v2.py, to_diff_v1.py, diffllama.py        the conversions
fresh.py          models with new weights and matched parameters
registry.py       makes transformers' Auto classes load both layouts from this package
"""
