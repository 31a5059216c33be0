"""The plug-in for Hugging Face Transformers: registration, masks, cache, apply, remove and load."""

from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from saobp._register_on_import import after_import
from saobp.transformers.adapters import TUNERS, patch_adapters
from saobp.transformers.apply import apply, attention_modules, remove
from saobp.transformers.attention_function import saobp_attention
from saobp.transformers.cache import patch_past_recording
from saobp.transformers.capture import AttentionCall, record_attention, watch
from saobp.transformers.layer_refinement import IMPLEMENTATION, strength_parameters
from saobp.transformers.load import load, patch_from_pretrained
from saobp.transformers.masks import saobp_mask
from saobp.transformers.strength_rates import separate_strengths

AttentionInterface.register(IMPLEMENTATION, saobp_attention)
AttentionMaskInterface.register(IMPLEMENTATION, saobp_mask)  # under the same name: else no mask would apply
patch_from_pretrained()
patch_past_recording()
after_import(TUNERS, patch_adapters)

__all__ = [
    "AttentionCall",
    "apply",
    "attention_modules",
    "load",
    "record_attention",
    "remove",
    "separate_strengths",
    "strength_parameters",
    "watch",
]
