// One schedule in the explorer's list: its place, its numbers, and a small timeline on the axis that all share.

import { drawRows } from "./cells.mjs";
import { fitCanvas } from "./chrome.mjs";
import { make } from "./dom.mjs";
import { CanvasPainter } from "./painter.mjs";
import { number, percent } from "./scale.mjs";

const MINI_ROWS = [[2, 22], [4, 18], [8, 13], [Infinity, 6]]; // at most so many ranks, px of a row

export function explorerCard(key, open) {
  const place = make("span", { class: "place", "aria-hidden": "true" });
  const name = make("span", { class: "title" });
  const figures = make("dl", { class: "figures" });
  const canvas = make("canvas", { role: "img" });
  const button = make("button", { type: "button", class: "open", onclick: () => open(key) }, "Open");
  const about = make("div", { class: "about" }, place, name, button);
  const item = make("li", { class: "card" }, about, figures, make("div", { class: "mini" }, canvas));
  return { item, place, name, figures, canvas, button };
}

export function fillCard(card, entry, index, choice, isOpen) {
  card.place.textContent = entry.fits ? String(index + 1) : "–";
  card.name.textContent = entry.name;
  card.item.classList.toggle("over", !entry.fits);
  card.button.setAttribute("aria-pressed", String(isOpen));
  card.button.setAttribute("aria-label", `Open the timeline of ${entry.name}`);
  const memory = entry.fits ? number(entry.peak) : `${number(entry.peak)}, over the limit of ${choice.limit}`;
  const figures = [[choice.barrier ? "makespan" : "step", `${number(entry.step)} ticks`], ["bubble", percent(entry.bubble)],
    ["local", `${number(entry.local)} ticks`], ["activations", memory], ["weights", `${number(entry.weights)}×`], ["messages", String(entry.messages)]];
  card.figures.replaceChildren(...figures.map(([word, value]) =>
    make("div", { class: word }, make("dt", {}, word), make("dd", {}, value))));
  const words = figures.map(([word, value]) => `${word} ${value}`).join(", ");
  card.canvas.setAttribute("aria-label", `${entry.name}: ${words}`);
}

// `longest`: the axis, in the same fine ticks as the track's.
export function drawMini(card, { track }, width, longest, theme) {
  const cell = MINI_ROWS.find(([most]) => track.numRanks <= most)[1];
  const row = { cell, strip: 0, gap: 2 }, height = track.numRanks * (cell + row.gap);
  const layout = { left: 0, right: 0, width, room: width, plot: width, scroll: 0, row, makespan: longest,
    perTime: width / longest, by: "kind", memory: "none",
    tracks: [{ top: 0, bottom: height, rows: height, pitch: cell + row.gap, below: 0, lanes: [] }] };
  const painter = new CanvasPainter(fitCanvas(card.canvas, width, height), theme);
  Object.assign(card.canvas.style, { width: `${width}px`, height: `${height}px` });
  card.cells = drawRows(painter, layout, [track]);
}
