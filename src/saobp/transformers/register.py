"""Make ``attn_implementation="saobp"`` known to Transformers."""

from __future__ import annotations

from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from saobp._register_on_import import after_import
from saobp.transformers.adapters import TUNERS, patch_adapters
from saobp.transformers.attention_function import saobp_attention
from saobp.transformers.cache import patch_past_recording
from saobp.transformers.layer_refinement import IMPLEMENTATION
from saobp.transformers.load import patch_from_pretrained
from saobp.transformers.masks import saobp_mask


def register() -> None:
    """Register the attention function and its mask under one name: without it, no mask would apply."""
    AttentionInterface.register(IMPLEMENTATION, saobp_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, saobp_mask)
    patch_from_pretrained()
    patch_past_recording()
    after_import(TUNERS, patch_adapters)
