"""Colour and marker of each method, unique and the same on every figure.

The colours of the common methods are those of Okabe and Ito, which colour-blind readers can tell apart.
Variants of one kind share a marker and go from light to dark.
"""

from __future__ import annotations

from colorsys import hls_to_rgb, rgb_to_hls
from typing import NamedTuple

from matplotlib.colors import to_hex, to_rgb


class MethodStyle(NamedTuple):
    colour: str
    marker: str

    @property
    def on_dark(self) -> str:
        """The colour for dark mode: the same hue with inverted lightness."""
        hue, lightness, saturation = rgb_to_hls(*to_rgb(self.colour))
        return to_hex(hls_to_rgb(hue, 1 - 0.6 * lightness, saturation))


STYLES = {
    "original": MethodStyle("#000000", "o"),
    "high": MethodStyle("#d55e00", "^"),
    "learned": MethodStyle("#009e73", "D"),
    "low": MethodStyle("#0072b2", "v"),
    "elemmul": MethodStyle("#cc79a7", "P"),
    "high@0.02": MethodStyle("#f2d377", "s"),
    "high@0.05": MethodStyle("#dca417", "s"),
    "high@0.1": MethodStyle("#a37700", "s"),
    "high@0.2": MethodStyle("#634700", "s"),
    "high-listing": MethodStyle("#f09d6b", "<"),
    "low-listing": MethodStyle("#00405f", "<"),
    "elemmul-prior": MethodStyle("#8f3f6b", "X"),
    "two-steps": MethodStyle("#7dbfae", ">"),
    "three-steps": MethodStyle("#0d5c4d", ">"),
    "entropy": MethodStyle("#56b4e9", "h"),
    "eigen": MethodStyle("#5e5e5e", "p"),
    "key-bias": MethodStyle("#4d9221", "D"),
    "temperature": MethodStyle("#b2182b", "1"),
    "sink": MethodStyle("#35978f", "2"),
    "softmax-plus-one": MethodStyle("#80cdc1", "2"),
    "gate": MethodStyle("#762a83", "3"),
    "qk-norm": MethodStyle("#bf812d", "4"),
    "sigma-reparam": MethodStyle("#543005", "4"),
    "learned-gate": MethodStyle("#c2a5cf", "3"),
    "learned-qk-norm": MethodStyle("#dfc27d", "4"),
    "learned-temperature": MethodStyle("#f4a582", "1"),
    "key-bias-temperature": MethodStyle("#67001f", "1"),
    "query-bias": MethodStyle("#9970ab", "4"),
    "by-distance": MethodStyle("#1b7837", "D"),
    "message-gate": MethodStyle("#a6dba0", "D"),
    "alternating": MethodStyle("#00441b", "D"),
    "later-steps": MethodStyle("#5aae61", ">"),
    "sinkhorn": MethodStyle("#9ecae1", "8"),
    "sinkhorn-3": MethodStyle("#08519c", "8"),
    "strict": MethodStyle("#e69f00", "d"),
    "paper": MethodStyle("#882255", "*"),
}
