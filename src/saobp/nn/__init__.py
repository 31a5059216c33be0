"""Modules with refined self-attention, for models that are not Hugging Face's."""

from saobp.nn.multihead import MultiheadAttention
from saobp.nn.self_attention import SelfAttention

__all__ = ["MultiheadAttention", "SelfAttention"]
