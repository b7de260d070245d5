// Other schedules on the same axis: of the registry at the same size, or versions of the draft that were kept.

import { make, textButton } from "./dom.mjs";
import { fineness, shareOf } from "./explorer-data.mjs";
import { menu } from "./studio-controls.mjs";

export const MOST_COMPARED = 3;

export function comparePanel(spec, act) {
  const schedule = menu("Schedule to compare with", Object.entries(spec.titles), () => {});
  const list = make("ul", { class: "compared", "aria-label": "Compared with" });
  const buttons = [textButton("Add", () => act("compare", schedule.select.value)),
    textButton("Keep this version", () => act("keep"))];
  const panel = make("div", {}, make("p", { class: "hint" }, `Up to ${MOST_COMPARED} others, with the same costs. ` +
    "Costs are those of one rank's share of the model: an order with two stages on each rank has half of them on each."),
    make("div", { class: "row" }, schedule.select, ...buttons), list);
  const update = (session, compared) => {
    for (const button of buttons) button.disabled = compared.length >= MOST_COMPARED;
    list.replaceChildren(...compared.map(({ name }, index) =>
      make("li", {}, name, textButton("Remove", () => act("uncompare", index), null, `Remove ${name}`))));
  };
  return { panel, update };
}

// Costs for orders of one model with other numbers of stages: a stage's share of the work is 1/stages.  Returns {fine, of}:
// `of(stages)` are costs in ticks of which `fine` make one of the draft's, so that every share is a whole number.
export function axisCosts(costs, draftStages, others) {
  const hasOwn = Object.values(costs).some(Array.isArray), different = others.find((stages) => stages !== draftStages);
  if (hasOwn && different) {
    throw new Error(`costs differ between the ${draftStages} stages, and another order has ${different}; give all stages one cost`);
  }
  const fine = fineness(draftStages, others);
  return { fine, of: (stages) => (hasOwn ? costs : shareOf(costs, draftStages, stages, fine)) };
}
