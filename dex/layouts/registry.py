"""transformers' Auto classes load DIFF V1 and V2 from this package: no code of a checkpoint is run, or asked for."""

from __future__ import annotations

from functools import cache

from transformers import AutoConfig, AutoModelForCausalLM

from dex.layouts.configuration_diff_v1 import DiffV1Config
from dex.layouts.configuration_diff_v2 import DiffV2Config
from dex.layouts.modeling_diff_v1 import DiffV1ForCausalLM
from dex.layouts.modeling_diff_v2 import DiffV2ForCausalLM


@cache
def register_layouts() -> None:
    for config, model in ((DiffV1Config, DiffV1ForCausalLM), (DiffV2Config, DiffV2ForCausalLM)):
        AutoConfig.register(config.model_type, config)
        AutoModelForCausalLM.register(config, model)
