"""Configuration of a DIFF Transformer V2 whose other parts are a Llama's or a Qwen's.

This file travels with the checkpoints it describes, so it imports nothing but transformers.
"""

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config


@strict
class DiffV2Config(Qwen3Config):
    """Qwen3's configuration, and which biases and norms the base has.

    num_attention_heads: H, the heads that o_proj sees; q_proj has 2H, interleaved in pairs.
    num_key_value_heads: G; H is a multiple of G. The heads of a pair share key and value.
    qkv_bias, o_bias, mlp_bias: biases of the projections. qk_norm: an RMSNorm over head_dim on q and k, as in Qwen3.
    """

    model_type = "diff_v2"
    base_model_tp_plan = None
    base_model_pp_plan = None
    _auto_class = "AutoConfig"

    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    mlp_bias: bool = False

    def validate_architecture(self) -> None:
        """Called by transformers. Raises ValueError for heads that do not share key/value heads evenly."""
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads ({self.num_key_value_heads}) must divide num_attention_heads "
                f"({self.num_attention_heads})."
            )
