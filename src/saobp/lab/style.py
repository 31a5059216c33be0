"""How each method looks, the same on every figure: a colour and a marker that no other method has.

The colours of the common methods are those of Okabe and Ito, which colour-blind readers can tell apart.
Variants of one kind share a marker and go from light to dark.
"""

from __future__ import annotations

from colorsys import hls_to_rgb, rgb_to_hls
from typing import NamedTuple

from matplotlib.colors import to_hex, to_rgb


class Look(NamedTuple):
    colour: str
    marker: str

    @property
    def on_dark(self) -> str:
        """The colour for a dark ground: of the same hue, light where the other is dark."""
        hue, lightness, saturation = rgb_to_hls(*to_rgb(self.colour))
        return to_hex(hls_to_rgb(hue, 1 - 0.6 * lightness, saturation))


LOOKS = {
    "original": Look("#000000", "o"),
    "high": Look("#d55e00", "^"),
    "learned": Look("#009e73", "D"),
    "low": Look("#0072b2", "v"),
    "elemmul": Look("#cc79a7", "P"),
    "high@0.02": Look("#f2d377", "s"),
    "high@0.05": Look("#dca417", "s"),
    "high@0.1": Look("#a37700", "s"),
    "high@0.2": Look("#634700", "s"),
    "high-listing": Look("#f09d6b", "<"),
    "low-listing": Look("#00405f", "<"),
    "elemmul-prior": Look("#8f3f6b", "X"),
    "two-steps": Look("#7dbfae", ">"),
    "three-steps": Look("#0d5c4d", ">"),
    "entropy": Look("#56b4e9", "h"),
    "eigen": Look("#5e5e5e", "p"),
    "strict": Look("#e69f00", "d"),
    "paper": Look("#882255", "*"),
}
