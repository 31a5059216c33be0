/** Colours of attention maps, from the background up. */

/**
 * 256 colours; signed maps have the background in the middle.
 * @param {boolean} isDark
 * @param {boolean} isSigned
 * @returns {Uint32Array}  as the pixels of a canvas
 */
export function mapColours(isDark, isSigned) {
  const back = isDark ? "#161b22" : "#ffffff";
  const more = isDark ? ["#6cb2ff", back, "#ff9a62"] : ["#1d4f9c", back, "#b2401a"];
  const most = isDark ? [back, "#24598f", "#79bdfb"] : [back, "#7fb1dd", "#0b2f63"];
  const stops = (isSigned ? more : most).map((hex) =>
    [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16)),
  );
  const colours = new Uint8ClampedArray(4 * 256);
  for (let index = 0; index < 256; index += 1) {
    const [from, to] = index < 128 ? stops : stops.slice(1);
    const part = index / 127.5 - (index < 128 ? 0 : 1);
    colours.set([...from.map((low, channel) => low + part * (to[channel] - low)), 255], 4 * index);
  }
  return new Uint32Array(colours.buffer);
}
