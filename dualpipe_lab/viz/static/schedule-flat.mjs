// Flat arrays of a schedule: steps and parts numbered rank by rank, and where each action is.
//
// The arrays are those of `compile` in program.mjs, so that the simulator and the drawings read them.  A part is an
// action: a step has one part, a pair has two.  `findPart` gives the first part with an action; `table` has it at
// (microbatch * width + stage) * 4 + kind, -1 for none, and is null where the indexes leave no room for that.

import { KINDS } from "./program.mjs";
import { stepActions } from "./schedule-rows.mjs";

const MOST_DENSE = 2 ** 22;
const KIND_NUMBERS = { F: 0, B: 1, I: 2, W: 3 };
export const OTHER_KIND = 4;

const flats = new WeakMap();

// The flat arrays of a program; made once, as programs are never changed in place.
export function flatten(program) {
  if (!flats.has(program)) flats.set(program, makeFlat(program));
  return flats.get(program);
}

function makeFlat(program) {
  const { ranks, numStages, numMicrobatches } = program, numRanks = ranks.length;
  let numSteps = 0, numParts = 0;
  for (const row of ranks) {
    numSteps += row.length;
    for (const step of row) numParts += step.forward === undefined ? 1 : 2;
  }
  const flat = {
    ranks, numRanks, numSteps, numParts, numStages, numMicrobatches,
    firstPart: new Int32Array(numSteps + 1), rankStart: new Int32Array(numRanks + 1), rankOf: new Int32Array(numSteps),
    stage: new Float64Array(numParts), kind: new Uint8Array(numParts), microbatch: new Float64Array(numParts),
    stepOf: new Int32Array(numParts),
  };
  for (let rank = 0, step = 0, part = 0; rank < numRanks; rank++) {
    flat.rankStart[rank + 1] = step + ranks[rank].length;
    flat.rankOf.fill(rank, step, flat.rankStart[rank + 1]);
    for (const entry of ranks[rank]) {
      if (entry.forward === undefined) writePart(flat, part++, step, entry);
      else {
        writePart(flat, part++, step, entry.forward);
        writePart(flat, part++, step, entry.backward);
      }
      flat.firstPart[++step] = part;
    }
  }
  return addTable(flat);
}

function writePart(flat, part, step, { stage, kind, microbatch }) {
  flat.stage[part] = stage;
  flat.kind[part] = KIND_NUMBERS[kind] ?? OTHER_KIND;
  flat.microbatch[part] = microbatch;
  flat.stepOf[part] = step;
}

function addTable(flat) {
  const { stage, kind, microbatch, numParts } = flat;
  let mostStage = -1, mostMicrobatch = -1, isPlain = true;
  for (let part = 0; part < numParts; part++) {
    if (stage[part] > mostStage) mostStage = stage[part];
    if (microbatch[part] > mostMicrobatch) mostMicrobatch = microbatch[part];
    isPlain &&= kind[part] < OTHER_KIND && stage[part] >= 0 && microbatch[part] >= 0;
  }
  flat.width = mostStage + 1;
  flat.hasTwice = false;
  const size = 4 * flat.width * (mostMicrobatch + 1);
  if (!isPlain || size > MOST_DENSE) return addSparseTable(flat);
  const table = new Int32Array(size).fill(-1), { width } = flat;
  for (let part = 0; part < numParts; part++) {
    const key = (microbatch[part] * width + stage[part]) * 4 + kind[part];
    if (table[key] < 0) table[key] = part;
    else flat.hasTwice = true;
  }
  flat.table = table;
  return flat;
}

// By microbatch, then by stage and kind; no such program is complete, so this need not be fast.
function addSparseTable(flat) {
  const rows = new Map();
  for (let part = 0; part < flat.numParts; part++) {
    const m = flat.microbatch[part], key = flat.stage[part] * 5 + flat.kind[part];
    if (!rows.has(m)) rows.set(m, new Map());
    if (rows.get(m).has(key)) flat.hasTwice = true;
    else rows.get(m).set(key, part);
  }
  flat.table = null;
  flat.sparse = rows;
  return flat;
}

// The first part with this action, or -1.
export function findPart({ table, sparse, width }, stage, kind, microbatch) {
  if (!table) return sparse.get(microbatch)?.get(stage * 5 + kind) ?? -1;
  return stage < 0 || stage >= width || microbatch < 0 ? -1 : (table[(microbatch * width + stage) * 4 + kind] ?? -1);
}

// Which parts are the first ones of their action: all, unless an action runs again.
export function firstParts(flat) {
  const all = Int32Array.from(flat.stepOf.keys());
  return flat.hasTwice ? all.filter((part) => firstOf(flat, part) === part) : all;
}

export const firstOf = (flat, part) => findPart(flat, flat.stage[part], flat.kind[part], flat.microbatch[part]);

export const positionOf = (flat, step) => step - flat.rankStart[flat.rankOf[step]];

export const stepAt = (flat, step) => flat.ranks[flat.rankOf[step]][positionOf(flat, step)];

export const partText = (flat, part) => `${flat.stage[part]}${kindText(flat, part)}${flat.microbatch[part]}`;

// The letters of a part's kind, also of an unknown one.
export function kindText(flat, part) {
  const step = flat.stepOf[part];
  return KINDS[flat.kind[part]] ?? stepActions(stepAt(flat, step))[part - flat.firstPart[step]].kind;
}

// The arrays after one rank's row became another one with the same actions, as for the trial of a move.
export function withRow(flat, rank, row) {
  const { rankStart, firstPart, numRanks, numParts } = flat;
  const begin = rankStart[rank], end = rankStart[rank + 1], more = row.length - (end - begin);
  const made = {
    ...flat, numSteps: flat.numSteps + more, ranks: flat.ranks.map((own, other) => (other === rank ? row : own)),
    rankStart: rankStart.slice(), stage: flat.stage.slice(), kind: flat.kind.slice(), table: flat.table.slice(),
    microbatch: flat.microbatch.slice(), stepOf: flat.stepOf.slice(),
    firstPart: new Int32Array(flat.numSteps + more + 1), rankOf: new Int32Array(flat.numSteps + more),
  };
  for (let later = rank + 1; later <= numRanks; later++) made.rankStart[later] += more;
  made.firstPart.set(firstPart.subarray(0, begin));
  made.firstPart.set(firstPart.subarray(end), end + more);
  made.rankOf.set(flat.rankOf.subarray(0, begin));
  made.rankOf.fill(rank, begin, end + more);
  made.rankOf.set(flat.rankOf.subarray(end), end + more);
  if (more) for (let part = firstPart[end]; part < numParts; part++) made.stepOf[part] += more;
  let part = firstPart[begin];
  row.forEach((step, position) => {
    made.firstPart[begin + position] = part;
    for (const action of stepActions(step)) {
      made.table[(action.microbatch * flat.width + action.stage) * 4 + KIND_NUMBERS[action.kind]] = part;
      writePart(made, part++, begin + position, action);
    }
  });
  return made;
}
