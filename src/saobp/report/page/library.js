/** Plotly, embedded compressed, and unpacked after the first paint. */

const MISSING =
  "This browser cannot unpack the library that draws the charts (it has no DecompressionStream): " +
  "use a newer one to see them. Words, tables and the explorer's maps are complete.";

/** @returns {Promise<any>} plotly, or null in a browser that cannot unpack it */
export async function loadPlotly() {
  const packed = document.getElementById("plotly")?.textContent ?? "";
  if (typeof DecompressionStream === "undefined") {
    const note = document.getElementById("no-charts");
    if (note) [note.textContent, note.hidden] = [MISSING, false];
    return null;
  }
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(unpacked).text();
  document.head.append(script);
  script.remove();
  return /** @type {any} */ (window).Plotly;
}
