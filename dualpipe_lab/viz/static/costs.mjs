// The sliders: costs of F, I, W, B and F&B, and the links; they recompute every track that carries its program.

import { make } from "./dom.mjs";
import { number, unitOf } from "./scale.mjs";
import { durations } from "./simulate.mjs";

const ROWS = [
  ["F", "F", "ticks of a forward"],
  ["I", "I", "ticks of a backward for the input"],
  ["W", "W", "ticks of a backward for the weights"],
  ["B", "B", "ticks of a whole backward"],
  ["overlap", "F&B", "ticks of an overlapped pair"],
  ["latency", "latency", "ticks a message flies"],
  ["transfer", "transfer", "ticks a message occupies its link (less is more bandwidth)"],
];

const top = (value) => (Array.isArray(value) ? Math.max(...value) : value);

// What a slider shows; costs left open are shown as what they come to.
function valueOf(track, key) {
  const { costs, program } = track;
  if (costs[key] != null) return top(costs[key]);
  if (key === "B") return top(costs.I) + top(costs.W);
  const pair = program.order.find((step) => program.firstPart[step + 1] - program.firstPart[step] === 2);
  return durations(program, costs)[pair];
}

function isUsed(tracks, key) {
  const has = (kind) => tracks.some((track) => track.program.kind.includes(kind));
  if (key === "overlap") return tracks.some(({ program }) => program.numSteps < program.stage.length);
  if (key === "B") return tracks.some((track) => track.given.B != null) && has(1);
  if (key === "latency" || key === "transfer") return tracks.some((track) => track.numMessages);
  return key === "F" || has(1) || has(2);
}

// Returns {panel, update}; `change(key, value)` is called while a slider moves, `reset()` by the button.
export function costPanel(tracks, change, reset) {
  const [first] = tracks;
  const base = Math.max(...["F", "I", "W"].map((key) => top(first.given[key])), 1);
  const step = base <= 12 ? 1 : Math.max(1, 10 ** Math.floor(Math.log10(base)) / 10);
  const sliders = ROWS.filter(([key]) => isUsed(tracks, key)).map(([key, letter, words]) => {
    const isLink = key === "latency" || key === "transfer";
    const shown = tracks.find((track) => isUsed([track], key)); // a track without pairs does not say what a pair takes
    const most = Math.max(isLink ? 4 * base : 0, 3 * valueOf(shown, key), 6 * step);
    const input = make("input", { type: "range", min: 0, max: Math.ceil(most / step) * step, step, title: words,
      "aria-label": `${letter}: ${words}` });
    const output = make("output");
    input.addEventListener("input", () => change(key, Number(input.value)));
    return { key, shown, input, output, label: make("label", { class: "cost" }, make("span", {}, letter), input, output) };
  });
  const restore = make("button", { type: "button", class: "text", onclick: reset }, "Reset costs");
  const panel = make("div", { class: "costs", role: "group", "aria-label": "Costs" },
    ...sliders.map(({ label }) => label), restore);
  function update() {
    const [divisor, unit] = unitOf(first.unit, base);
    for (const { key, shown, input, output } of sliders) {
      const value = valueOf(shown, key);
      input.value = value;
      input.style.setProperty("--done", `${(100 * Math.min(value, input.max)) / input.max}%`);
      output.textContent = number(value, divisor) + (divisor > 1 ? ` ${unit}` : "");
      output.classList.toggle("wide", output.textContent.length > 4);
      input.setAttribute("aria-valuetext", `${number(value, divisor)} ${unit}`);
    }
    restore.disabled = tracks.every((track) => JSON.stringify(track.costs) === JSON.stringify(track.given));
  }
  update();
  return { panel, update };
}
