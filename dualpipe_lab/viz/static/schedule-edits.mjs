// Edits of a schedule: each returns a new program that shares unchanged rows and steps, or an Error with a sentence.
//
// A place is [rank, position].  A step that is moved stays the same object, so that whoever holds it finds it again.

import { isPair, parseProgram, stepActions, stepText, withRanks } from "./schedule-rows.mjs";

const edited = (program, changes) =>
  withRanks(program, program.ranks.map((row, rank) => changes.get(rank) ?? row));

const withoutPlaces = (program, places) => {
  const changes = new Map();
  for (const [rank, position] of places) {
    if (!changes.has(rank)) changes.set(rank, [...program.ranks[rank]]);
    changes.get(rank)[position] = null;
  }
  for (const [rank, row] of changes) changes.set(rank, row.filter((step) => step !== null));
  return changes;
};

const stepOfPlace = (program, [rank, position]) => program.ranks[rank][position];

export const removeSteps = (program, places) => edited(program, withoutPlaces(program, places));

// All of them together, in their order, in front of what is at `position` of the rank's row now.
export function moveSteps(program, places, rank, position) {
  const moved = places.map((place) => stepOfPlace(program, place)), changes = withoutPlaces(program, places);
  const row = changes.get(rank) ?? [...program.ranks[rank]];
  const before = places.filter(([from, at]) => from === rank && at < position).length;
  row.splice(position - before, 0, ...moved);
  return edited(program, changes.set(rank, row));
}

// One place to the left or right (`by` -1 or 1) or, with `down` -1 or 1, to the same position of the next rank.  What has
// reached the end of its row, or the first or last rank, stays.
export function shiftSteps(program, places, down, by) {
  const changes = new Map(program.ranks.map((row, rank) => [rank, [...row]])), inOrder = by > 0 || down > 0 ? [...places].reverse() : places;
  const taken = new Set();
  for (const [rank, position] of inOrder) {
    const step = stepOfPlace(program, [rank, position]), row = changes.get(rank), at = row.indexOf(step);
    const toRank = rank + down, target = at + by;
    if (toRank < 0 || toRank >= program.ranks.length || target < 0 || target >= row.length || (by && taken.has(row[target]))) {
      taken.add(step);
      continue;
    }
    row.splice(at, 1);
    if (down) changes.get(toRank).splice(Math.min(position, changes.get(toRank).length), 0, step);
    else row.splice(target, 0, step);
    taken.add(step);
  }
  const isSame = program.ranks.every((row, rank) => row.every((step, at) => step === changes.get(rank)[at]));
  return isSame ? program : edited(program, changes);
}

export function insertStep(program, rank, position, step) {
  const row = [...program.ranks[rank]];
  row.splice(position, 0, step);
  return edited(program, new Map([[rank, row]]));
}

// A row typed anew.  Steps that are still there stay the same objects, so that they stay chosen.
export function replaceRow(program, rank, text) {
  const [typed] = parseProgram([text], program.name).ranks, known = new Map();
  for (const step of program.ranks[rank]) known.set(stepText(step), [...(known.get(stepText(step)) ?? []), step]);
  const row = typed.map((step) => known.get(stepText(step))?.shift() ?? step);
  const old = program.ranks[rank], isSame = row.length === old.length && row.every((step, at) => step === old[at]);
  return isSame ? program : edited(program, new Map([[rank, row]]));
}

// Everything that a stage does to one rank: its actions in the rows of others move to the position where they stood.
export function moveStage(program, stage, rank) {
  const moving = [], changes = new Map();
  program.ranks.forEach((row, from) => {
    if (from === rank) return;
    const left = [];
    row.forEach((step, position) => {
      const own = stepActions(step).filter((action) => action.stage === stage);
      for (const action of own) moving.push([position / Math.max(row.length, 1), own.length === stepActions(step).length && isPair(step) ? step : action]);
      if (!own.length) left.push(step);
      else if (isPair(step) && own.length === 1) left.push(step.forward.stage === stage ? step.backward : step.forward);
    });
    if (left.length < row.length || left.some((step, at) => step !== row[at])) changes.set(from, left);
  });
  const unique = moving.filter(([, step], at) => moving.findIndex(([, other]) => other === step) === at);
  if (!unique.length) throw new Error(`stage ${stage} is on rank ${rank} already, or nowhere; choose another stage or rank`);
  const size = Math.max(program.ranks[rank].length, 1);
  const placed = [...program.ranks[rank].map((step, position) => [position / size, step]), ...unique];
  placed.sort((a, b) => a[0] - b[0]); // stable: at the same place, what was there comes first
  return edited(program, changes.set(rank, placed.map(([, step]) => step)));
}

// Two actions of one rank as an overlapped pair, where the first of them stood.
export function pairSteps(program, places) {
  const steps = places.map((place) => stepOfPlace(program, place)), [[rank, first], second] = places.length === 2 ? places : [[], null];
  if (!second) throw new Error(`a pair takes two actions, ${places.length} are chosen; choose a forward and a backward of one rank`);
  if (second[0] !== rank) throw new Error(`a pair runs on one rank, these are on ranks ${rank} and ${second[0]}`);
  const forward = steps.find(({ kind }) => kind === "F"), backward = steps.find(({ kind }) => kind === "B" || kind === "I");
  if (!forward || !backward) throw new Error(`a pair takes a forward and a backward (B or I), not ${steps.map(stepText).join(" and ")}`);
  const row = [...program.ranks[rank]];
  row[first] = { forward, backward };
  row.splice(second[1], 1);
  return edited(program, new Map([[rank, row]]));
}

export function unpairStep(program, rank, position) {
  const step = program.ranks[rank][position];
  if (!isPair(step)) throw new Error(`${stepText(step)} is no pair`);
  const row = [...program.ranks[rank]];
  row.splice(position, 1, step.forward, step.backward);
  return edited(program, new Map([[rank, row]]));
}

// B as I and, right behind it, W.  In a pair the I stays in the pair.
export function splitBackward(program, rank, position) {
  const step = program.ranks[rank][position], { stage, kind, microbatch } = step.backward ?? step;
  if (kind !== "B") throw new Error(`${stepText(step)} has no B to split`);
  const inputs = { stage, kind: "I", microbatch }, weights = { stage, kind: "W", microbatch }, row = [...program.ranks[rank]];
  row.splice(position, 1, isPair(step) ? { forward: step.forward, backward: inputs } : inputs, weights);
  return edited(program, new Map([[rank, row]]));
}

// I and W of one microbatch and stage, wherever they stand on the rank, as B where I stood.  Either of them is enough.
export function joinBackward(program, [[rank, position] = []]) {
  const step = program.ranks[rank]?.[position], { stage, kind, microbatch } = step?.backward ?? step ?? {};
  if (kind !== "I" && kind !== "W") throw new Error("choose an I or a W to join with the other half of its backward");
  const row = [...program.ranks[rank]];
  const find = (letter) => row.findIndex((one) => stepActions(one).some((action) =>
    action.stage === stage && action.kind === letter && action.microbatch === microbatch));
  const inputs = find("I"), weights = find("W"), whole = { stage, kind: "B", microbatch };
  if (inputs < 0 || weights < 0) throw new Error(`rank ${rank} has only one of ${stage}I${microbatch} and ${stage}W${microbatch}`);
  row[inputs] = isPair(row[inputs]) ? { forward: row[inputs].forward, backward: whole } : whole;
  row.splice(weights, 1);
  return edited(program, new Map([[rank, row]]));
}
