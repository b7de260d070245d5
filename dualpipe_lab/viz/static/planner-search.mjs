// Plans around the chosen one: every tp, pp, ep, stage of ZeRO, with and without recomputation; time against memory.

import { memoryOfRanks } from "./plan-memory.mjs";
import { isLong, planOf } from "./plan-model.mjs";
import { stepsOf } from "./plan-schedules.mjs";
import { stepOf } from "./plan-time.mjs";

export const GRID = ["tp", "pp", "ep", "zero", "recompute"];
const SLICE_MS = 12;

// Memory of every rank, seconds of the step, and whether all fits; or the plan with its problem alone.
export function resultOf(facts, choice) {
  const plan = planOf(facts, choice);
  if (plan.problem) return { plan };
  const ranks = stepsOf(plan.schedule, plan.pp, plan.count), memory = memoryOfRanks(facts, plan, ranks);
  const fullest = memory.reduce((most, one, rank) => (one.allocated > memory[most].allocated ? rank : most), 0);
  const bytes = memory[fullest].total;
  return { plan, ranks, memory, fullest, bytes, step: stepOf(facts, plan, ranks), fits: bytes <= plan.card.memory };
}

// Of an axis every number up to the largest mark that divides the GPUs, and the chosen one; of the others all values.
function valuesOf(name, marks, choice) {
  if (typeof choice[name] !== "number" || name === "zero") return marks;
  const all = Array.from({ length: marks.at(-1) }, (_, place) => place + 1).filter((value) => choice.gpus % value === 0);
  return all.includes(choice[name]) ? all : [...all, choice[name]];
}

export function gridOf(choices, choice, hasExperts) {
  return GRID.filter((name) => name !== "ep" || hasExperts).reduce((found, name) =>
    found.flatMap((one) => valuesOf(name, choices[name], choice).map((value) => ({ ...one, [name]: value }))), [choice]);
}

export const isSame = (one, other) => Object.keys(one).every((name) => one[name] === other[name]);
export const gridKey = (choice) => JSON.stringify({ ...choice, ...Object.fromEntries(GRID.map((name) => [name, null])) });

// Those of the points that fit than which no other is both faster and smaller, the fastest first.
export function frontierOf(points) {
  const found = [];
  for (const point of points.filter((one) => one.fits).sort((a, b) => a.seconds - b.seconds || a.bytes - b.bytes)) {
    if (!found.length || point.bytes < found.at(-1).bytes) found.push(point);
  }
  return found;
}

// Compute the grid in slices, so that controls stay quick; `tell(points, left out, done)` after each slice.  Returns how to stop.
export function searchGrid(facts, choices, choice, tell) {
  const left = gridOf(choices, choice, Boolean(facts.models[choice.model].experts)), points = [];
  let timer, skipped = 0;
  function slice() {
    const end = performance.now() + SLICE_MS;
    while (left.length && performance.now() < end) {
      const next = left.shift(), { plan, bytes, fits, step } = resultOf(facts, next);
      if (plan.problem) skipped += Number(isLong(plan));
      else points.push({ choice: next, bytes, fits, seconds: step.seconds });
    }
    tell(points, skipped, !left.length);
    if (left.length) timer = setTimeout(slice);
  }
  timer = setTimeout(slice);
  return () => clearTimeout(timer);
}
