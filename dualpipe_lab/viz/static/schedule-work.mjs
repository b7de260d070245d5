// Complete and ordered work, the first of the checks; as dualpipe_lab/pp/validation/rules.py.
//
// A valid schedule passes `isWhole` in one pass over flat arrays.  The texts are made only for one that does not.

import { KINDS } from "./program.mjs";
import { firstOf, firstParts, findPart, kindText, OTHER_KIND, partText, positionOf, stepAt } from "./schedule-flat.mjs";
import { isPair, stepText } from "./schedule-rows.mjs";

const MOST_LISTED = 12;

// At most 12 problems are kept, the others counted.  `marks`: the places that each problem names, [{rank, position}].
export function newProblems() {
  return { listed: [], marks: [], total: 0 };
}

// `write()` makes the text, `places()` the places: both are needed for the first problems only.  No text occurs twice.
export function addProblem(problems, write, places = () => []) {
  problems.total++;
  if (problems.listed.length >= MOST_LISTED) return;
  problems.listed.push(write());
  problems.marks.push(places());
}

// Numbers in ascending order, at most 6 of them.
const listing = (numbers, count = numbers.length) =>
  numbers.slice(0, 6).join(", ") + (count > 6 ? ` and ${count - 6} more` : "");

export const placeOfStep = (flat, step) => ({ rank: flat.rankOf[step], position: positionOf(flat, step) });
const placeText = ({ rank, position }) => `rank ${rank}, position ${position}`;

// Whether every stage runs every microbatch: one F, then one B, or else one I, then one W, all on one rank.
export function isWhole(flat) {
  const { numRanks, numParts, numStages, numMicrobatches, rankStart, firstPart, kind, table } = flat;
  if (!table || flat.hasTwice || !numRanks || numStages * numMicrobatches > numParts) return false;
  if (flat.width > numStages || table.length > 4 * flat.width * numMicrobatches) return false;
  for (let rank = 0; rank < numRanks; rank++) if (rankStart[rank] === rankStart[rank + 1]) return false;
  for (let step = 0; step < flat.numSteps; step++) {
    const part = firstPart[step], isTwo = firstPart[step + 1] - part === 2;
    if (isTwo && (kind[part] !== 0 || (kind[part + 1] !== 1 && kind[part + 1] !== 2))) return false;
  }
  const counts = [0, 0, 0, 0];
  for (let part = 0; part < numParts; part++) counts[kind[part]]++;
  const cells = numStages * numMicrobatches;
  if (!cells || counts[0] !== cells || counts[1] + counts[2] !== cells || counts[2] !== counts[3]) return false;
  return isOrdered(flat, 0, numParts);
}

// Whether what each of these parts needs of its own stage stands before it on its rank.
export function isOrdered({ kind, stepOf, rankOf, stage, microbatch, table, width }, first, end) {
  for (let part = first; part < end; part++) {
    const own = kind[part];
    if (own === 0) continue;
    const cell = (microbatch[part] * width + stage[part]) * 4, early = table[cell + (own === 3 ? 2 : 0)];
    if (early < 0 || (own === 2 && table[cell + 1] >= 0)) return false;
    if (stepOf[early] >= stepOf[part] || rankOf[stepOf[early]] !== rankOf[stepOf[part]]) return false;
  }
  return true;
}

// What is wrong with the work of a schedule that is not whole.
export function explainWork(flat, problems) {
  explainRepeats(flat, problems);
  explainKinds(flat, problems);
  const parts = firstParts(flat);
  explainRange(flat, parts, "stage", flat.stage, flat.numStages, problems);
  explainRange(flat, parts, "microbatch", flat.microbatch, flat.numMicrobatches, problems);
  explainCells(flat, parts, problems);
}

function explainRepeats(flat, problems) {
  if (!flat.numRanks) addProblem(problems, () => "it has no ranks; give it at least one row of actions");
  for (let rank = 0; rank < flat.numRanks; rank++) {
    if (flat.rankStart[rank] === flat.rankStart[rank + 1]) {
      addProblem(problems, () => `rank ${rank} has no actions; give it a stage or use fewer ranks`,
        () => [{ rank, position: 0 }]);
    }
    if (!flat.hasTwice) continue;
    const end = flat.firstPart[flat.rankStart[rank + 1]];
    for (let part = flat.firstPart[flat.rankStart[rank]]; part < end; part++) {
      const first = firstOf(flat, part);
      if (first === part) continue;
      const here = placeOfStep(flat, flat.stepOf[part]), there = placeOfStep(flat, flat.stepOf[first]);
      addProblem(problems, () => `${placeText(here)}: ${partText(flat, part)} runs again, ` +
        `it ran at ${placeText(there)}; keep one`, () => [here, there]);
    }
  }
}

function explainKinds(flat, problems) {
  for (let step = 0; step < flat.numSteps; step++) {
    const part = flat.firstPart[step], kind = flat.kind[part], second = flat.kind[part + 1];
    const hasTwo = flat.firstPart[step + 1] - part === 2;
    const isFine = hasTwo ? kind === 0 && (second === 1 || second === 2) : kind !== OTHER_KIND;
    if (isFine) continue;
    const place = placeOfStep(flat, step), text = stepText(stepAt(flat, step));
    const what = isPair(stepAt(flat, step))
      ? "must pair an F with a B or I, in this order" : `is of the unknown kind '${kindText(flat, part)}'`;
    addProblem(problems, () => `${placeText(place)}: ${text} ${what}`, () => [place]);
  }
}

function explainRange(flat, parts, what, values, count, problems) {
  for (const part of parts) {
    if (values[part] >= 0 && values[part] < count) continue;
    const place = placeOfStep(flat, flat.stepOf[part]);
    addProblem(problems, () =>
      `${placeText(place)}: ${partText(flat, part)} has ${what} ${values[part]}, out of range 0..${count - 1}`,
      () => [place]);
  }
}

function explainCells(flat, parts, problems) {
  const counts = [0, 0, 0, 0, 0], cells = flat.numStages * flat.numMicrobatches;
  for (const part of parts) counts[flat.kind[part]]++;
  const [f, b, i, w] = counts;
  if (!(cells === f && f === b + i && f > 0 && i === w)) return explainMissing(flat, parts, problems);
  for (const part of parts) {
    const kind = flat.kind[part], stage = flat.stage[part], microbatch = flat.microbatch[part];
    if (kind === 0 || kind === OTHER_KIND) continue;
    const early = findPart(flat, stage, kind === 3 ? 2 : 0, microbatch);
    if (early < 0 || (kind === 2 && findPart(flat, stage, 1, microbatch) >= 0)) {
      return explainMissing(flat, parts, problems);
    }
    explainOrder(flat, early, part, problems);
  }
  return undefined;
}

function explainOrder(flat, early, late, problems) {
  const before = placeOfStep(flat, flat.stepOf[early]), here = placeOfStep(flat, flat.stepOf[late]);
  if (before.rank === here.rank && before.position < here.position) return;
  const one = partText(flat, early), other = partText(flat, late);
  addProblem(problems, () => {
    if (before.rank !== here.rank) {
      return `${one} is on rank ${before.rank} and ${other} on rank ${here.rank}; what ${one} keeps is needed there`;
    }
    if (before.position === here.position) {
      return `${placeText(here)}: ${other} needs the result of ${one}, they cannot be a pair`;
    }
    return `rank ${here.rank}: ${other} (position ${here.position}) comes before ${one} ` +
      `(position ${before.position}), whose result it needs; swap them`;
  }, () => [before, here]);
}

const ascending = (a, b) => a - b;

function explainMissing(flat, parts, problems) {
  const cells = flat.table ? denseCells(flat, parts) : sparseCells(flat, parts);
  const stages = [...cells.stages].sort(ascending), microbatches = [...cells.rows.keys()].sort(ascending);
  explainGaps("stages", cells.stages, flat.numStages, problems);
  explainGaps("microbatches", cells.rows, flat.numMicrobatches, problems);
  for (const microbatch of microbatches) {
    explainLacks(flat, stages, microbatch, cells.rows.get(microbatch), problems);
  }
}

// The stages that have work; and for each microbatch with work, the kinds of each stage, one bit each.
function sparseCells({ stage, kind, microbatch }, parts) {
  const stages = new Set(), rows = new Map();
  for (const part of parts) {
    if (kind[part] === OTHER_KIND) continue;
    stages.add(stage[part]);
    if (!rows.has(microbatch[part])) rows.set(microbatch[part], new Map());
    const row = rows.get(microbatch[part]);
    row.set(stage[part], (row.get(stage[part]) ?? 0) | (1 << kind[part]));
  }
  return { stages, rows };
}

function denseCells({ stage, kind, microbatch, width, table }, parts) {
  const kinds = new Uint8Array(table.length / 4), stages = new Set(), rows = new Map();
  for (const part of parts) kinds[microbatch[part] * width + stage[part]] |= 1 << kind[part];
  for (let start = 0; start < kinds.length; start += width) {
    const row = new Map();
    for (let own = 0; own < width; own++) if (kinds[start + own]) row.set(own, kinds[start + own]);
    for (const own of stages.size < width ? row.keys() : []) stages.add(own);
    if (row.size) rows.set(start / width, row);
  }
  return { stages, rows };
}

function explainGaps(what, present, count, problems) {
  for (let number = 0, gaps = 0; number < count && gaps < 3; number++) {
    if (present.has(number)) continue;
    gaps++;
    addProblem(problems, () =>
      `${what} run from 0 to ${count - 1}, but no rank runs ${number}; number them from 0 without gaps`);
  }
}

// One problem for each way in which stages lack work on one microbatch, in the order of the words.
function explainLacks(flat, stages, microbatch, row, problems) {
  const groups = new Map(); // what is lacking -> {stages, count}
  for (const [stage, kinds] of row) {
    const lack = LACKS[kinds];
    if (!lack) continue;
    if (!groups.has(lack)) groups.set(lack, { found: [], count: 0 });
    groups.get(lack).found.push(stage);
    groups.get(lack).count++;
  }
  const idle = stages.length - row.size; // these stages have no work on it; only the first ones are named
  if (idle) groups.set(NO_WORK, { found: firstWithout(stages, row), count: idle });
  for (const lack of [...groups.keys()].sort()) {
    const { found, count } = groups.get(lack);
    const where = () => listing(found.sort(ascending), count);
    addProblem(problems, () => `stage${count > 1 ? "s" : ""} ${where()}, microbatch ${microbatch}: ${lack}`,
      () => placesOfCells(flat, found.slice(0, 6), microbatch));
  }
}

function firstWithout(stages, row) {
  const found = [];
  for (let at = 0; at < stages.length && found.length < 6; at++) if (!row.has(stages[at])) found.push(stages[at]);
  return found;
}

// Where the work of these stages on a microbatch stands, as far as there is any.
function placesOfCells(flat, stages, microbatch) {
  const parts = stages.flatMap((stage) => [0, 1, 2, 3].map((kind) => findPart(flat, stage, kind, microbatch)));
  return parts.filter((part) => part >= 0).map((part) => placeOfStep(flat, flat.stepOf[part]));
}

const NO_WORK = "no work at all (is a microbatch index out of range?)";
const LACKS = Array.from({ length: 16 }, (_, kinds) => lackOf(KINDS.filter((_kind, bit) => kinds & (1 << bit))));

// What one stage's work on one microbatch lacks, given the kinds that it has; "" if nothing.
function lackOf(kinds) {
  const text = kinds.join("");
  if (text === "FB" || text === "FIW") return "";
  if (!text) return NO_WORK;
  if (text[0] !== "F") return `${kinds.join(" and ")} without F`;
  if (text === "F") return "F without a backward";
  if (kinds.includes("B")) return `${kinds.slice(1).join(" and ")}, so a gradient is computed twice`;
  if (kinds.includes("W")) return "W without I, so the stage before never gets its gradient";
  return "I without W, so its weight gradient is never computed";
}
