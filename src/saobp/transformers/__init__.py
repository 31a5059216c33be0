"""The plug-in for Hugging Face Transformers: registration, masks, cache, apply, remove and load."""

from saobp.transformers.apply import apply, attention_modules, remove
from saobp.transformers.attached import strength_parameters
from saobp.transformers.load import load
from saobp.transformers.registration import register
from saobp.transformers.watch import AttentionCall, record_attention, watch

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
