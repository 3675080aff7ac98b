"""Dex as a PEFT method: `get_peft_model(model, DexConfig(...))` attaches it as it would attach LoRA.

K, V and O of every adapted layer are targets of the tuner, so that a subset of layers restricts all three.
Attention itself is never patched. The equations are in `dex.layer`.

    config      DexConfig, saved as adapter_config.json
    model       DexModel: which projections are wrapped, what is saved and loaded
    projection  the wrapped k_proj, v_proj and o_proj
    annealing   the count of optimiser steps that λ(t) follows
    callback    λ and the branch ratio in a Trainer's log
"""

from __future__ import annotations

import peft.mapping

from dex.tuner.config import DexConfig, DexPeftType
from dex.tuner.model import DexModel, dex_outputs, set_anneal_steps
from dex.tuner.projection import DexLayer, DexOutput

__all__ = ["DexConfig", "DexLayer", "DexModel", "DexOutput", "DexPeftType", "dex_outputs", "set_anneal_steps"]

# "DEX" becomes a method that PEFT's and transformers' loaders know. `import dex` sees to it that this runs as
# soon as PEFT is imported.
peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[DexPeftType.DEX] = DexConfig
peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING[DexPeftType.DEX] = DexModel
peft.mapping.PEFT_TYPE_TO_PREFIX_MAPPING[DexPeftType.DEX] = DexModel.prefix
