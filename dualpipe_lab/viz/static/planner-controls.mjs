// The planner's controls: drop-downs, sliders and fields for numbers, each a labelled native input.

import { make } from "./dom.mjs";
import { SCHEDULES } from "./plan-schedules.mjs";
import { gigabytes } from "./planner-pictures.mjs";

const ZERO = ["off", "1: Adam's state", "2: and gradients", "3: and weights"];
const SLIDERS = {
  gpus: ["GPUs", "GPUs in all"],
  node: ["node", "GPUs of a node"],
  slower: ["slower", "how many times slower the network between nodes is"],
  sequence: ["sequence", "tokens of a sequence"],
  batch: ["batch", "sequences of a step, over all GPUs"],
  rows: ["microbatch", "sequences of a microbatch"],
  pp: ["pp", "ranks along the pipeline"],
  tp: ["tp", "ranks that share each layer, with sequence parallelism"],
  cp: ["cp", "ranks that share each sequence"],
  ep: ["ep", "ranks of dp and cp that share the experts"],
};

// A slider over the usual values, and a field beside it for any whole number.
function sliderOf(name, marks, most, change) {
  const [label, words] = SLIDERS[name], last = marks.length - 1;
  const input = make("input", { type: "range", min: 0, max: last, step: 1, title: words, "aria-label": `${label}: ${words}` });
  const field = make("input", { type: "number", min: 1, max: most, step: 1, title: words, "aria-label": `${label}, any number` });
  input.addEventListener("input", () => change({ [name]: marks[Number(input.value)] }));
  field.addEventListener("change", () => {
    const value = Math.min(Math.max(Math.round(field.valueAsNumber), 1), most);
    if (value) change({ [name]: value });
    else show(shown); // no number
  });
  let shown;
  const show = (value) => {
    shown = value;
    input.value = Math.max(0, marks.findLastIndex((mark) => mark <= value));
    input.style.setProperty("--done", `${(100 * input.value) / last}%`);
    input.setAttribute("aria-valuetext", String(value));
    field.value = value;
  };
  return { row: make("div", { class: "cost" }, make("span", {}, label), input, field), show };
}

function menuOf(name, label, entries, change) {
  const options = entries.map(([value, text]) => make("option", { value: String(value) }, text));
  const select = make("select", { "aria-label": label }, ...options);
  select.addEventListener("change", () => change({ [name]: entries[select.selectedIndex][0] }));
  const show = (value) => { select.selectedIndex = entries.findIndex(([one]) => one === value); };
  return { row: make("label", { class: "menu" }, make("span", {}, label), select), show };
}

// Returns {panel, update(choice)}; `change(part)` is told what the reader chose.
export function plannerControls({ models, gpus, choices, most }, change, reset) {
  const menus = {
    model: menuOf("model", "model", Object.keys(models).map((name) => [name, name]),
      ({ model }) => change(models[model].experts ? { model } : { model, ep: 1, overlap: false })),
    gpu: menuOf("gpu", "GPU", Object.entries(gpus).map(([name, card]) => [name, `${card.name}, ${gigabytes(card.memory)} GB`]),
      ({ gpu }) => change({ gpu, node: gpus[gpu].node })), // with the nodes that are usual for it
    schedule: menuOf("schedule", "schedule", choices.schedule.map((name) => [name, SCHEDULES[name].title]), change),
    zero: menuOf("zero", "ZeRO", choices.zero.map((stage) => [stage, ZERO[stage]]), change),
  };
  const sliders = Object.fromEntries(Object.keys(SLIDERS).map((name) => [name, sliderOf(name, choices[name], most[name], change)]));
  const box = make("input", { type: "checkbox", onchange: (event) => change({ recompute: event.target.checked }) });
  const overlap = make("input", { type: "checkbox", onchange: (event) => change({ overlap: event.target.checked }) });
  const rows = (all, names) => names.map((name) => all[name].row);
  const part = (title, ...children) => make("fieldset", {}, make("legend", {}, title), make("div", { class: "group" }, ...children));
  const panel = make("div", { class: "choose" },
    part("Model and step", menus.model.row, ...rows(sliders, ["sequence", "batch", "rows"])),
    part("Cluster", menus.gpu.row, ...rows(sliders, ["gpus", "node", "slower"])),
    part("Plan", ...rows(menus, ["schedule", "zero"]), ...rows(sliders, ["pp", "tp", "cp", "ep"]),
      make("label", { class: "box" }, box, "recompute the layers in the backward"),
      make("label", { class: "box" }, overlap, "overlap experts of a forward and a backward")));
  const update = (choice) => {
    for (const [name, control] of Object.entries({ ...menus, ...sliders })) control.show(choice[name]);
    box.checked = choice.recompute;
    overlap.checked = choice.overlap;
  };
  return { panel, update, reset: make("button", { type: "button", class: "text", onclick: reset }, "Reset") };
}
