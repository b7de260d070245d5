// The studio's controls: where to begin, what to change, costs.  Each is a labelled native input.

import { make, textButton } from "./dom.mjs";
import { rangeInput, rangeOf } from "./explorer-controls.mjs";
import { MOST_COUNT } from "./schedule-rows.mjs";

export const section = (title, isOpen, ...children) =>
  make("details", { open: isOpen, class: "section" }, make("summary", {}, title), make("div", { class: "inside" }, ...children));

export function field(words, input, output = null) {
  return make("label", { class: "field" }, make("span", {}, words), input, ...(output ? [output] : []));
}

export function menu(words, options, change) {
  const select = make("select", { "aria-label": words, onchange: () => change(select.value) });
  const fill = (entries) => select.replaceChildren(...entries.map(([value, text]) => make("option", { value }, text)));
  fill(options);
  return { select, fill };
}

function textField(words, attributes, commit) {
  const input = make("input", { type: "text", spellcheck: "false", autocomplete: "off", "aria-label": words, ...attributes });
  input.addEventListener("keydown", (event) => event.key === "Enter" && commit(input.value));
  return input;
}

// `spec`: titles of schedules and their sizes; `hasDraft`: whether one was kept.  `act` is what the studio does.
export function startControls(spec, hasDraft, act) {
  let [name, ranks, microbatches] = spec.start;
  const choose = (part) => {
    ({ name, ranks, microbatches } = { name, ranks, microbatches, ...part });
    show();
    act("start", { name, ranks, microbatches });
  };
  const schedule = menu("Schedule", [...Object.entries(spec.titles), ["", "nothing"]], (value) => choose({ name: value }));
  const sizes = [rangeOf("ranks", "to start with", spec.ranks, (value) => choose({ ranks: value })),
    rangeOf("microbatches", "to start with", spec.microbatches, (value) => choose({ microbatches: value }))];
  const show = () => {
    schedule.select.value = name;
    sizes[0].show(spec.ranks.indexOf(ranks), String(ranks));
    sizes[1].show(spec.microbatches.indexOf(microbatches), String(microbatches));
  };
  show();
  const draft = textButton("Take up your last draft", () => act("takeUp"), null, "Take up your last draft, which this browser has kept");
  draft.hidden = !hasDraft;
  const undo = textButton("Undo", () => act("undo"), null, "Undo (Ctrl+Z)");
  const redo = textButton("Redo", () => act("redo"), null, "Redo (Ctrl+Y)");
  const explaining = textButton("Explain and play", () => act("mode"), false);
  const bar = make("div", { class: "row" },
    field("start from", schedule.select), ...sizes.map(({ row }) => row), draft,
    make("span", { class: "gap" }), undo, redo, explaining);
  const update = (session, isEditing) => {
    undo.disabled = !session.canUndo;
    redo.disabled = !session.canRedo;
    explaining.setAttribute("aria-pressed", String(!isEditing));
  };
  return { bar, update, draft };
}

const TOOLS = [
  ["left", "◀", "Move to the left (Alt+Left)", ["shift", { ranks: 0, places: -1 }]],
  ["right", "▶", "Move to the right (Alt+Right)", ["shift", { ranks: 0, places: 1 }]],
  ["up", "▲", "Move to the rank above (Alt+Up)", ["shift", { ranks: -1, places: 0 }]],
  ["down", "▼", "Move to the rank below (Alt+Down)", ["shift", { ranks: 1, places: 0 }]],
  ["pair", "Pair", "Pair the two that are chosen (P)", ["pair"]],
  ["unpair", "Unpair", "Unpair: take a pair apart (U)", ["unpair"]],
  ["split", "Split B", "Split B into I and W (S)", ["split"]],
  ["join", "Join I, W", "Join I, W to one B (J)", ["join"]],
  ["delete", "Delete", "Delete what is chosen (Delete)", ["delete"]],
  ["explain", "Why not earlier?", "Why not earlier? What the chosen one waits for (Enter)", ["explain"]],
];

// What to do with what is chosen, a row to type, and an action to put in.
export function editControls(act) {
  const buttons = TOOLS.map(([name, label, words, command]) =>
    [name, make("button", { type: "button", class: "text tool", "aria-label": words, title: words, onclick: () => act(...command) }, label)]);
  const stage = menu("Move the stage of the chosen action to a rank", [], (value) => value && act("stage", Number(value)));
  const token = textField("An action to put in, such as 1F2", { size: 8, placeholder: "1F2" }, (text) => act("insert", text));
  const row = textField("The row of the chosen rank", { class: "wide" }, (text) => act("retype", text));
  row.addEventListener("change", () => act("retype", row.value));
  const rank = make("span", {}, "rank 0"), missing = make("div", { class: "missing", role: "group", "aria-label": "Actions that are missing" });
  const here = make("div", { class: "here", role: "status", "aria-live": "polite" });
  const panel = make("div", { class: "edit" }, here,
    make("div", { class: "row", role: "group", "aria-label": "Change" }, ...buttons.map(([, button]) => button),
      field("stage to", stage.select),
      field("put in", token), textButton("Put in", () => act("insert", token.value))),
    make("label", { class: "field rowtext" }, rank, row), missing);
  return { panel, buttons: Object.fromEntries(buttons), stage, token, row, rank, missing, here };
}

const COSTS = [
  ["F", 0, 12, "ticks of a forward"], ["I", 0, 12, "ticks of a backward for the input"],
  ["W", 0, 12, "ticks of a backward for the weights"], ["overlap", 0, 36, "ticks of an overlapped pair"],
  ["latency", 0, 12, "ticks a message flies"], ["transfer", 0, 12, "ticks a message occupies its link"],
];
const COST_LABELS = { overlap: "F&B" };

// Sliders for all stages at once; a text field for numbers that differ between stages.
export function costControls(act) {
  const rows = COSTS.map(([key, min, max, words]) => {
    const label = COST_LABELS[key] ?? key, slider = rangeInput(label, words, [min, max], (value) => act("cost", { key, value }));
    const perStage = key.length > 1 ? null : textField(`${label} of each stage`, { size: 7, title: "one number per stage, such as 1 1 2 1" },
      (text) => act("costs", { key, text }));
    perStage?.addEventListener("change", () => act("costs", { key, text: perStage.value }));
    return [key, { slider, perStage, row: make("div", { class: "priced" }, slider.row, ...(perStage ? [perStage] : [])) }];
  });
  const limit = countField("Live activations that each rank has room for", (value) => act("limit", value));
  const stages = countField("Number of stages", (value) => act("size", { numStages: value }));
  const microbatches = countField("Number of microbatches", (value) => act("size", { numMicrobatches: value }));
  const copies = menu("On how many ranks a stage may be", [["1", "one rank"], ["2", "two ranks"], ["", "any"]],
    (value) => act("copies", value ? Number(value) : null));
  const both = make("button", { type: "button", class: "text", onclick: () => act("unitCosts") }, "All costs 1");
  const panel = make("div", { class: "costs" }, ...rows.map(([, row]) => row.row), field("stages", stages), field("microbatches", microbatches), field("room for activations", limit),
    field("a stage is on", copies.select), both);
  const update = ({ costs, limit: room, program }) => {
    stages.value = program.numStages;
    microbatches.value = program.numMicrobatches;
    copies.select.value = program.numDirections > 2 ? "" : program.numDirections ?? "";
    for (const [key, { slider, perStage }] of rows) {
      const value = costs[key], isList = Array.isArray(value), shown = value == null ? pairTicks(costs) : mostTicks(value);
      slider.show(shown, value == null ? "F + B" : isList ? "own" : String(value));
      if (perStage && perStage !== perStage.getRootNode().activeElement) perStage.value = isList ? value.join(" ") : "";
    }
    limit.value = room ?? "";
  };
  return { panel, update };
}

function countField(words, change) {
  const input = make("input", { type: "number", min: 1, max: MOST_COUNT, "aria-label": words });
  input.addEventListener("change", () => change(input.value === "" ? null : Number(input.value)));
  return input;
}

const mostTicks = (value) => (Array.isArray(value) ? Math.max(...value) : value);
const pairTicks = ({ F, I, W }) => [F, I, W].map(mostTicks).reduce((a, b) => a + b);
