// The planner's controls: drop-downs and sliders over the values that the page offers, each a labelled native input.

import { make } from "./dom.mjs";
import { SCHEDULES } from "./plan-model.mjs";
import { gigabytes } from "./planner-pictures.mjs";

const ZERO = ["off", "1: Adam's state", "2: and gradients", "3: and weights"];
const SLIDERS = {
  gpus: ["GPUs", "GPUs in all, in nodes of 8"],
  slower: ["network", "how many times slower the network between nodes is", (value) => (value > 1 ? `÷ ${value}` : "full")],
  sequence: ["sequence", "tokens of a sequence", (value) => `${value / 1024}k`],
  batch: ["batch", "sequences of a step, over all GPUs"],
  rows: ["microbatch", "sequences of a microbatch"],
  pp: ["pp", "ranks along the pipeline"],
  tp: ["tp", "ranks that share each layer, with sequence parallelism"],
  cp: ["cp", "ranks that share each sequence"],
};

function sliderOf(name, values, change) {
  const [label, words, text = String] = SLIDERS[name], last = values.length - 1;
  const input = make("input", { type: "range", min: 0, max: last, step: 1, title: words, "aria-label": `${label}: ${words}` });
  const output = make("output");
  input.addEventListener("input", () => change({ [name]: values[Number(input.value)] }));
  const show = (value) => {
    input.value = values.indexOf(value);
    input.style.setProperty("--done", `${(100 * input.value) / last}%`);
    output.textContent = text(value);
    input.setAttribute("aria-valuetext", text(value));
  };
  return { row: make("label", { class: "cost" }, make("span", {}, label), input, output), show };
}

function menuOf(name, label, entries, change) {
  const options = entries.map(([value, text]) => make("option", { value: String(value) }, text));
  const select = make("select", { "aria-label": label }, ...options);
  select.addEventListener("change", () => change({ [name]: entries[select.selectedIndex][0] }));
  const show = (value) => { select.selectedIndex = entries.findIndex(([one]) => one === value); };
  return { row: make("label", { class: "menu" }, make("span", {}, label), select), show };
}

// Returns {panel, update(choice)}; `change(part)` is told what the reader chose.
export function plannerControls({ models, gpus, choices }, change, reset) {
  const menus = {
    model: menuOf("model", "model", Object.keys(models).map((name) => [name, name]), change),
    gpu: menuOf("gpu", "GPU", Object.entries(gpus).map(([name, card]) => [name, `${card.name}, ${gigabytes(card.memory)} GB`]), change),
    schedule: menuOf("schedule", "schedule", choices.schedule.map((name) => [name, SCHEDULES[name]]), change),
    zero: menuOf("zero", "ZeRO", choices.zero.map((stage) => [stage, ZERO[stage]]), change),
  };
  const sliders = Object.fromEntries(Object.keys(SLIDERS).map((name) => [name, sliderOf(name, choices[name], change)]));
  const box = make("input", { type: "checkbox", onchange: (event) => change({ recompute: event.target.checked }) });
  const rows = (all, names) => names.map((name) => all[name].row);
  const part = (title, ...children) => make("fieldset", {}, make("legend", {}, title), make("div", { class: "group" }, ...children));
  const panel = make("div", { class: "choose" },
    part("Model and step", menus.model.row, ...rows(sliders, ["sequence", "batch", "rows"])),
    part("Cluster", menus.gpu.row, ...rows(sliders, ["gpus", "slower"])),
    part("Plan", ...rows(menus, ["schedule", "zero"]), ...rows(sliders, ["pp", "tp", "cp"]),
      make("label", { class: "box" }, box, "recompute the layers in the backward")));
  const update = (choice) => {
    for (const [name, control] of Object.entries({ ...menus, ...sliders })) control.show(choice[name]);
    box.checked = choice.recompute;
  };
  return { panel, update, reset: make("button", { type: "button", class: "text", onclick: reset }, "Reset") };
}
