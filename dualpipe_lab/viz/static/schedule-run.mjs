// A run without a clock, and the ranks that wait for each other; as dualpipe_lab/pp/validation/deadlock.py.
//
// In: flat arrays of a schedule whose work is complete.  Out: {need, reached, order, length}: the part that each part
// needs (-1: none), the step before which each rank stands at the end, and the steps in the order in which they ran.

import { KINDS } from "./program.mjs";
import { positionOf, stepAt } from "./schedule-flat.mjs";
import { stepText } from "./schedule-rows.mjs";

// For each part the one that has to run before it: the neighbouring stage's F, B or I; for W its I; for a backward of
// the last stage its F.
function needsOf({ kind, stage, microbatch, table, width, numParts, numStages }) {
  const need = new Int32Array(numParts);
  for (let part = 0; part < numParts; part++) {
    const own = kind[part], cell = (microbatch[part] * width + stage[part]) * 4;
    if (own === 0) need[part] = stage[part] ? table[cell - 4] : -1;
    else if (own === 3) need[part] = table[cell + 2];
    else if (stage[part] === numStages - 1) need[part] = table[cell];
    else need[part] = table[cell + 5] >= 0 ? table[cell + 5] : table[cell + 6];
  }
  return need;
}

// Every rank runs as far as it can, the last one woken first.
export function runUntimed(flat) {
  const { numRanks, numSteps, rankStart, firstPart, stepOf, rankOf } = flat;
  const need = needsOf(flat), reached = rankStart.slice(0, numRanks), order = new Int32Array(numSteps);
  const waiting = new Int32Array(numSteps).fill(-1), nextWaiting = new Int32Array(numRanks).fill(-1);
  const runnable = Array.from({ length: numRanks }, (_, rank) => rank);
  let length = 0;
  while (runnable.length) {
    const rank = runnable.pop(), end = rankStart[rank + 1];
    let step = reached[rank], blocker = -1;
    for (; step < end; step++) {
      for (let part = firstPart[step]; part < firstPart[step + 1] && blocker < 0; part++) {
        const needed = need[part] < 0 ? -1 : stepOf[need[part]];
        if (needed >= 0 && needed >= reached[rankOf[needed]]) blocker = needed;
      }
      if (blocker >= 0) break;
      reached[rank] = step + 1;
      order[length++] = step;
      for (let woken = waiting[step]; woken >= 0; woken = nextWaiting[woken]) runnable.push(woken);
      waiting[step] = -1;
    }
    if (blocker < 0) continue;
    nextWaiting[rank] = -1;
    if (waiting[blocker] < 0) waiting[blocker] = rank;
    else {
      let last = waiting[blocker]; // the ranks that wait for a step are woken in the order in which they came
      while (nextWaiting[last] >= 0) last = nextWaiting[last];
      nextWaiting[last] = rank;
    }
  }
  return { need, reached, order, length };
}

export const hasEnded = (flat, run) => run.length === flat.numSteps;

// The part that has to run before this one, as a wait names it: of a pair, the half that makes the input.  -1: none.
export function missingPart(flat, run, part) {
  const needed = run.need[part];
  if (needed < 0 || flat.stepOf[needed] < run.reached[flat.rankOf[flat.stepOf[needed]]]) return -1;
  const step = flat.stepOf[needed];
  for (let other = flat.firstPart[step]; other < flat.firstPart[step + 1]; other++) {
    if ((flat.kind[other] === 0) === needsForward(flat, part)) return other;
  }
  return flat.firstPart[step];
}

const needsForward = ({ kind, stage, numStages }, part) =>
  kind[part] === 0 || (kind[part] !== 3 && stage[part] === numStages - 1);

// The waits of a stuck rank as {rank, part, missing, other}: one, or up to two before an overlapped pair.
function waitsOf(flat, run, rank) {
  const step = run.reached[rank], found = [];
  if (step === flat.rankStart[rank + 1]) return found;
  for (let part = flat.firstPart[step]; part < flat.firstPart[step + 1]; part++) {
    const missing = missingPart(flat, run, part);
    if (missing >= 0) found.push({ rank, part, missing, other: flat.rankOf[flat.stepOf[missing]] });
  }
  return found;
}

// The smallest cycle of waits, the first one found from the lowest rank; empty if the schedule ran to its end.
export function smallestCycle(flat, run) {
  const waits = Array.from(run.reached, (_, rank) => waitsOf(flat, run, rank));
  let best = [];
  waits.forEach((own, rank) => {
    const cycle = own.length ? cycleThrough(rank, waits, best.length || Infinity) : [];
    if (cycle.length) best = cycle;
  });
  return best;
}

// Search breadth first from a rank along its waits until they lead back to it, in fewer than `most` steps.
function cycleThrough(start, waits, most) {
  const seen = new Uint8Array(waits.length);
  let heads = [{ at: start, length: 0 }];
  while (heads.length && heads[0].length + 1 < most) {
    const next = [];
    for (const head of heads) {
      for (const wait of waits[head.at]) {
        const found = { at: wait.other, length: head.length + 1, wait, from: head };
        if (wait.other === start) return pathTo(found);
        if (seen[wait.other]) continue;
        seen[wait.other] = 1;
        next.push(found);
      }
    }
    heads = next;
  }
  return [];
}

function pathTo(head) {
  const path = [];
  for (; head.wait; head = head.from) path.push(head.wait);
  return path.reverse();
}

const actionAt = ({ stage, kind, microbatch }, part) =>
  ({ stage: stage[part], kind: KINDS[kind[part]], microbatch: microbatch[part] });

// A wait in the words of Python's WaitEdge.
export function waitEdge(flat, { rank, part, missing, other }) {
  const step = flat.stepOf[part], needed = flat.stepOf[missing];
  const position = positionOf(flat, step), otherPosition = positionOf(flat, needed);
  const text = `rank ${rank} stands before ${stepText(stepAt(flat, step))} (position ${position}), which needs the ` +
    `${needsForward(flat, part) ? "activation" : "gradient"} of ${stepText(stepAt(flat, needed))} on ` +
    `${other === rank ? "the same rank" : `rank ${other}`} (position ${otherPosition})`;
  return { rank, position, action: actionAt(flat, part), other, otherPosition, needed: actionAt(flat, missing), text };
}
