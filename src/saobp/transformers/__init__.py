"""The plug-in for Hugging Face Transformers: registration, masks, cache, apply, remove and load."""

from saobp.transformers.apply import apply, attention_modules, remove
from saobp.transformers.capture import AttentionCall, record_attention, watch
from saobp.transformers.layer_refinement import strength_parameters
from saobp.transformers.load import load
from saobp.transformers.register import register

register()

__all__ = [
    "AttentionCall",
    "apply",
    "attention_modules",
    "load",
    "record_attention",
    "remove",
    "strength_parameters",
    "watch",
]
