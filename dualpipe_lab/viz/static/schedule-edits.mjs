// Edits of a schedule: each returns a new program that shares the unchanged rows and steps, or throws an Error with a
// sentence.  An edit may leave a schedule that cannot run: Python tells why.
//
// A place is [rank, position].  A step that moves stays the same object, so that whoever holds it finds it again.

import { isPair, stepActions, stepText, stepsOf, withRanks } from "./schedule-rows.mjs";
import { UNIT_TICKS, draftTrack } from "./studio-track.mjs";

function rowAt(program, rank) {
  const row = program.ranks[rank];
  if (row) return row;
  throw new Error(`there is no rank ${rank}; the schedule has ranks 0 to ${program.ranks.length - 1}`);
}

function stepAtPlace(program, [rank, position]) {
  const row = rowAt(program, rank), step = row[position];
  if (step) return step;
  throw new Error(`there is no step at rank ${rank}, position ${position}; rank ${rank} has ${row.length} steps`);
}

// The program with some rows replaced: a Map from rank to row.
const withRows = (program, rows) => withRanks(program, program.ranks.map((row, rank) => rows.get(rank) ?? row));

// The program with `number` steps of a rank from `position` on replaced by others.
function spliced(program, rank, position, number, ...steps) {
  const row = rowAt(program, rank);
  if (!(position >= 0 && position <= row.length)) {
    throw new Error(`there is no position ${position} on rank ${rank}; give 0 to ${row.length}`);
  }
  return withRows(program, new Map([[rank, row.toSpliced(position, number, ...steps)]]));
}

// In front of what is at `position`; at the end for the length of the row.
export const insertStep = (program, rank, position, step) => spliced(program, rank, position, 0, step);

export const removeSteps = (program, places) => withRows(program, rowsWithout(program, places));

function rowsWithout(program, places) {
  const left = new Map();
  for (const place of places) {
    stepAtPlace(program, place);
    if (!left.has(place[0])) left.set(place[0], new Set());
    left.get(place[0]).add(place[1]);
  }
  return new Map([...left].map(([rank, positions]) =>
    [rank, program.ranks[rank].filter((_, position) => !positions.has(position))]));
}

// All of them together, in the order of `places`, in front of what is at `position` of the rank's row now.
export function moveSteps(program, places, rank, position) {
  const moved = places.map((place) => stepAtPlace(program, place)), rows = rowsWithout(program, places);
  const target = rows.get(rank) ?? rowAt(program, rank);
  if (!(position >= 0 && position <= program.ranks[rank].length)) {
    throw new Error(`there is no position ${position} on rank ${rank}; give 0 to ${program.ranks[rank].length}`);
  }
  const gone = new Set(places.filter(([from, at]) => from === rank && at < position).map(([, at]) => at)).size;
  return withRows(program, rows.set(rank, target.toSpliced(position - gone, 0, ...moved)));
}

// One place to the left or right (`by` -1 or 1), or to the same position of the rank above or below (`down` -1 or 1).
// At the end of a row or of the ranks a step stays, and so does a step behind it that moves with it.
export function shiftSteps(program, places, down, by) {
  places.forEach((place) => stepAtPlace(program, place));
  const moved = down ? shiftedDown(program, places, down) : shiftedAlong(program, places, by);
  const isSame = [...moved].every(([rank, row]) =>
    row.length === program.ranks[rank].length && row.every((step, at) => step === program.ranks[rank][at]));
  return isSame ? program : withRows(program, moved);
}

function shiftedAlong(program, places, by) {
  const rows = new Map(), ordered = [...places].sort((a, b) => (a[1] - b[1]) * -by), stays = new Set();
  for (const [rank, position] of ordered) {
    if (!rows.has(rank)) rows.set(rank, [...program.ranks[rank]]);
    const row = rows.get(rank), target = position + by;
    if (target < 0 || target >= row.length || stays.has(row[target])) stays.add(row[position]);
    else [row[position], row[target]] = [row[target], row[position]];
  }
  return rows;
}

function shiftedDown(program, places, down) {
  const able = places.filter(([rank]) => program.ranks[rank + down]), rows = rowsWithout(program, able);
  for (const [rank, position] of [...able].sort((a, b) => a[1] - b[1])) {
    const row = rows.get(rank + down) ?? program.ranks[rank + down];
    rows.set(rank + down, row.toSpliced(Math.min(position, row.length), 0, program.ranks[rank][position]));
  }
  return rows;
}

// A row typed anew.  Steps that are still there stay the same objects.
export function replaceRow(program, rank, text) {
  const old = rowAt(program, rank), known = new Map();
  const [typed] = stepsOf([text]);
  for (const step of old) known.set(stepText(step), [...(known.get(stepText(step)) ?? []), step]);
  const row = typed.map((step) => known.get(stepText(step))?.shift() ?? step);
  const isSame = row.length === old.length && row.every((step, at) => step === old[at]);
  return isSame ? program : withRows(program, new Map([[rank, row]]));
}

// All work of a stage to one rank.  The rank's row is then in the order of the times that the steps have now, with
// F = I = W = 1.  Every row follows this one order, so a schedule that could run still can, unless a rank has no work left.
export function moveStage(program, stage, rank) {
  const when = timesOf(program), rows = new Map(), moving = [];
  const target = rowAt(program, rank).map((step, position) => [when(rank, position), step]);
  program.ranks.forEach((row, from) => {
    if (from === rank) return;
    const left = row.flatMap((step, position) => {
      const own = stepActions(step).filter((action) => action.stage === stage);
      if (!own.length) return [step];
      const isWhole = own.length === stepActions(step).length;
      moving.push([when(from, position), isWhole ? step : own[0]]);
      return isWhole ? [] : stepActions(step).filter((action) => action !== own[0]);
    });
    rows.set(from, left);
  });
  if (!moving.length) throw new Error(whyNothingMoves(program, stage, rank));
  const merged = [...target, ...moving].sort(([a], [b]) => a[0] - b[0] || a[1] - b[1]);
  rows.set(rank, merged.map(([, step]) => step));
  return withRows(program, rows);
}

function whyNothingMoves(program, stage, rank) {
  const isThere = program.ranks[rank].some((step) => stepActions(step).some((action) => action.stage === stage));
  if (isThere) return `all work of stage ${stage} is on rank ${rank} already`;
  return `no rank runs stage ${stage}; the schedule has stages 0 to ${program.numStages - 1}`;
}

// (rank, position) -> two numbers that order the steps of all ranks; what never runs comes behind all that does.
function timesOf(program) {
  const track = draftTrack(program, UNIT_TICKS);
  if (!track) throw new Error("its stages or microbatches are too many to move; number them from 0 without gaps");
  const { start, rankStart, program: { order } } = track, turn = start.map(() => order.length);
  order.forEach((step, at) => { turn[step] = at; });
  return (rank, position) => [start[rankStart[rank] + position], turn[rankStart[rank] + position]];
}

// A forward and a backward of one rank as an overlapped pair, where the first of them stood.
export function pairSteps(program, places) {
  if (places.length !== 2) throw new Error(`a pair takes an F and a B or I, and ${places.length} steps are chosen`);
  const steps = places.map((place) => stepAtPlace(program, place)), [[rank, one], [other, two]] = places;
  const names = steps.map(stepText).join(" and ");
  if (rank !== other) throw new Error(`a pair runs on one rank, ${names} are on ranks ${rank} and ${other}`);
  const forward = steps.find(({ kind }) => kind === "F");
  const backward = steps.find(({ kind }) => kind === "B" || kind === "I");
  if (!forward || !backward) throw new Error(`a pair takes an F and a B or I, not ${names}`);
  if (forward.stage === backward.stage && forward.microbatch === backward.microbatch) {
    throw new Error(`${stepText(backward)} needs the result of ${stepText(forward)}, they cannot be a pair`);
  }
  const [first, second] = [Math.min(one, two), Math.max(one, two)];
  const row = program.ranks[rank].toSpliced(second, 1).with(first, { forward, backward });
  return withRows(program, new Map([[rank, row]]));
}

// The forward and, right behind it, the backward of a pair.
export function unpairStep(program, rank, position) {
  const step = stepAtPlace(program, [rank, position]);
  if (!isPair(step)) throw new Error(`${stepText(step)} is not a pair, so there is nothing to take apart`);
  return spliced(program, rank, position, 1, step.forward, step.backward);
}

// B as I and, right behind it, W.  In a pair the I stays in the pair.
export function splitBackward(program, rank, position) {
  const step = stepAtPlace(program, [rank, position]), { stage, kind, microbatch } = step.backward ?? step;
  if (kind !== "B") throw new Error(`${stepText(step)} has no B, so there is nothing to split`);
  const backward = { stage, kind: "I", microbatch }, weights = { stage, kind: "W", microbatch };
  return spliced(program, rank, position, 1, isPair(step) ? { forward: step.forward, backward } : backward, weights);
}

// I and W as B where I stood, for every chosen I or W; the other half is found on its rank.
export function joinBackward(program, places) {
  if (!places.length) throw new Error("choose an I or a W to join with the other half of its backward");
  const chosen = new Map();
  for (const place of places) {
    const step = stepAtPlace(program, place), action = step.backward ?? step;
    if (action.kind !== "I" && action.kind !== "W") throw new Error(`${stepText(step)} has no I or W to join`);
    chosen.set(`${place[0]} ${action.stage} ${action.microbatch}`, [place[0], action]);
  }
  return [...chosen.values()].reduce((now, [rank, action]) => joinedHalves(now, rank, action), program);
}

function joinedHalves(program, rank, { stage, microbatch }) {
  const row = program.ranks[rank], find = (letter) => row.findIndex((step) => stepActions(step).some((action) =>
    action.stage === stage && action.kind === letter && action.microbatch === microbatch));
  const inputs = find("I"), weights = find("W"), backward = { stage, kind: "B", microbatch };
  if (inputs < 0 || weights < 0) {
    const [has, lacks] = inputs < 0 ? ["W", "I"] : ["I", "W"];
    throw new Error(`rank ${rank} has ${stage}${has}${microbatch}, but no ${stage}${lacks}${microbatch} to join it to`);
  }
  const { forward } = row[inputs], step = forward ? { forward, backward } : backward;
  return withRows(program, new Map([[rank, row.with(inputs, step).toSpliced(weights, 1)]]));
}
