"""Configuration of a DIFF Transformer V1 whose other parts are a Llama's or a Qwen's.

This file travels with the checkpoints it describes, so it imports nothing but transformers.
"""

from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config


@strict
class DiffV1Config(Qwen3Config):
    """Qwen3's configuration, which biases and norms the base has, and how λ and the norm of the heads behave.

    num_attention_heads: 2h, the heads of q_proj; heads 2i and 2i+1 are the two maps of diff head i.
    num_key_value_heads: an even number; key heads 2m and 2m+1 belong to the two maps, value heads 2m and 2m+1 are
    joined into one of width 2 · head_dim.

    lambda_mode: "learned" (the paper), or "fixed": no λ parameters.
    lambda_value: the λ of "fixed"; None: λ_init of each layer. 0 leaves the first map alone.
    lambda_sign: −1 (the paper: the second map is subtracted), or 1: the sum of the maps.
    head_norm: "rms" (the paper), "off", or "anneal": from a constant scale to "rms" over `head_norm_steps`
    optimiser steps; how many are done is in the checkpoint.
    """

    model_type = "diff_v1"
    base_model_tp_plan = None
    base_model_pp_plan = None
    _auto_class = "AutoConfig"

    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    mlp_bias: bool = False
    lambda_mode: Literal["learned", "fixed"] = "learned"
    lambda_value: float | int | None = None
    lambda_sign: Literal[-1, 1] = -1
    lambda_std_dev: float = 0.1
    head_norm: Literal["rms", "off", "anneal"] = "rms"
    head_norm_eps: float = 1e-5
    head_norm_steps: int | None = None

    def validate_architecture(self) -> None:
        """Called by transformers. Raises ValueError for heads that cannot be paired."""
        if self.num_key_value_heads % 2 or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"DIFF V1 pairs its heads: num_key_value_heads ({self.num_key_value_heads}) must be even and divide "
                f"num_attention_heads ({self.num_attention_heads})."
            )
        if not (self.lambda_std_dev >= 0 and self.head_norm_eps > 0):
            raise ValueError("lambda_std_dev must be at least 0, and head_norm_eps above 0.")
        if self.lambda_mode == "learned" and self.lambda_value is not None:
            raise ValueError('lambda_value has no effect with lambda_mode "learned".')
        if self.head_norm != "anneal" and self.head_norm_steps is not None:
            raise ValueError(f'head_norm_steps has no effect with head_norm "{self.head_norm}".')
