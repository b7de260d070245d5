// The explorer's controls: sizes, memory limit, costs and which schedules; each a labelled native input.

import { make } from "./dom.mjs";

const COST_SLIDERS = [
  ["F", "F", 1, 10, "ticks of a forward of one rank's share of the model"],
  ["I", "I", 1, 10, "ticks of its backward for the input"],
  ["W", "W", 0, 10, "ticks of its backward for the weights"],
  ["overlap", "F&B", 1, 30, "ticks of an overlapped pair; F, I and W together for all until you move it"],
  ["latency", "latency", 0, 10, "ticks a message flies"],
  ["transfer", "transfer", 0, 10, "ticks a message occupies its link (less is more bandwidth)"],
];

export function rangeInput(label, words, [min, max], change) {
  const input = make("input", { type: "range", min, max, step: 1, title: words, "aria-label": `${label}: ${words}` });
  const output = make("output");
  input.addEventListener("input", () => change(Number(input.value)));
  const show = (value, text = String(value)) => {
    input.value = value;
    input.style.setProperty("--done", `${(100 * (value - min)) / Math.max(input.max - min, 1)}%`);
    output.textContent = text;
    input.setAttribute("aria-valuetext", text);
  };
  return { input, show, row: make("label", { class: "cost" }, make("span", {}, label), input, output) };
}

// `hasPairs`: whether any program overlaps F with B.  Returns {panel, update(choice)}; `change(part)` is told what the reader chose, as a part of the choice.
export function explorerControls(spec, hasPairs, change, reset) {
  const ranks = rangeOf("ranks", "number of ranks", spec.ranks, (value) => change({ ranks: value }));
  const sizes = rangeOf("microb.", "number of microbatches", spec.microbatches, (value) => change({ microbatches: value }));
  const most = Math.max(...spec.microbatches) + 1;
  const limit = rangeInput("memory", "live activations that a rank has room for", [1, most],
    (value) => change({ limit: value < most ? value : null }));
  const costs = COST_SLIDERS.filter(([key]) => hasPairs || key !== "overlap").map(([key, label, min, max, words]) =>
    [key, rangeInput(label, words, [min, max], (value) => change({ costs: { [key]: value } }))]);
  const barrier = make("input", { type: "checkbox", onchange: (event) => change({ barrier: event.target.checked }) });
  const pairs = make("input", { type: "checkbox", onchange: (event) => change({ pairs: event.target.checked }) });
  const twins = new Set(Object.values(spec.twins)); // a schedule and its twin have one box
  const boxes = Object.entries(spec.titles).filter(([key]) => !twins.has(key)).map(([key, title]) => [key, make("input", { type: "checkbox",
    onchange: (event) => change({ toggle: [key, event.target.checked] }) }), title]);
  const panel = make("div", { class: "choose" },
    group("Size and memory", ranks.row, sizes.row, limit.row,
      make("label", { class: "box" }, barrier, "barrier after each step")),
    group("Costs", ...costs.map(([, slider]) => slider.row),
      ...(hasPairs ? [make("label", { class: "box" }, pairs, "overlapped pairs, for all that have them")] : [])),
    group("Schedules", ...boxes.map(([, box, title]) => make("label", { class: "box" }, box, title)),
      make("button", { type: "button", class: "text", onclick: reset }, "Reset all")));
  const update = (choice) => {
    ranks.show(spec.ranks.indexOf(choice.ranks), String(choice.ranks));
    sizes.show(spec.microbatches.indexOf(choice.microbatches), String(choice.microbatches));
    barrier.checked = choice.barrier;
    pairs.checked = choice.pairs;
    limit.show(choice.limit ?? most, choice.limit == null ? "no limit" : String(choice.limit));
    const { F, I, W } = choice.costs, costsNow = choice.pairs ? choice.costs : { ...choice.costs, overlap: null };
    for (const [key, slider] of costs) slider.show(costsNow[key] ?? F + I + W);
    for (const [key, box] of boxes) box.checked = choice.shown.has(key);
  };
  return { panel, update };
}

// A slider over a list of values, which need not be evenly spaced.
export const rangeOf = (label, words, values, change) =>
  rangeInput(label, words, [0, values.length - 1], (index) => change(values[index]));

const group = (title, ...children) =>
  make("fieldset", {}, make("legend", {}, title), make("div", { class: "group" }, ...children));
