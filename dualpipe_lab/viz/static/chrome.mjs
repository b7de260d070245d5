// Everything around a drawing that both kinds share: title, legend, status, table, and the files to save.

import { CanvasPainter, SvgPainter } from "./painter.mjs";
import { download, make } from "./dom.mjs";

export function legend(entries) {
  const items = entries.map(([sign, words, style, kind]) =>
    make("li", {}, make("span", { class: `chip ${kind ?? ""}`, style, "aria-hidden": "true" }, sign), words));
  return make("ul", { class: "legend", "aria-label": "Legend" }, ...items);
}

export function numbersTable(caption, { head, rows }) {
  const cells = (tag, values) => values.map((value) => make(tag, tag === "th" ? { scope: "col" } : {}, String(value)));
  return make("table", {}, make("caption", {}, caption),
    make("thead", {}, make("tr", {}, ...cells("th", head))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells("td", row)))));
}

export const fileName = (name, ending) => `${name.replace(/[^\w-]+/g, "-").replace(/^-|-$/g, "").toLowerCase() || "drawing"}.${ending}`;

// `scene(painter)` paints; `size` is [width, height].
export function svgText(scene, [width, height], theme, title, description) {
  const painter = new SvgPainter(theme);
  scene(painter);
  return painter.document(width, height, title, description);
}

export const saveSvg = (name, text) => download(fileName(name, "svg"), new Blob([text], { type: "image/svg+xml" }));

export async function pngBlob(scene, [width, height], theme, scale = 2) {
  const canvas = new OffscreenCanvas(width * scale, height * scale), context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.fillStyle = theme.page;
  context.fillRect(0, 0, width, height);
  scene(new CanvasPainter(context, theme));
  return canvas.convertToBlob({ type: "image/png" });
}

export const savePng = async (name, blob) => download(fileName(name, "png"), await blob);

// Give a canvas the size of its box, sharp on dense screens; returns its context.
export function fitCanvas(canvas, width, height) {
  const ratio = Math.min(globalThis.devicePixelRatio || 1, 2);
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
