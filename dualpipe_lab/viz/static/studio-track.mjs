// A program of the studio as a track of the timeline, whether it can run or not.

import { KINDS, compileParts } from "./program.mjs";
import { stepActions } from "./schedule-rows.mjs";
import { trackOf } from "./track.mjs";

export const UNIT_TICKS = { F: 1, I: 1, W: 1, B: null, overlap: null, latency: 0, transfer: 0 };
const MOST_DRAWN = 2 ** 22; // of stages and microbatches

// null for a program whose indexes are too large to draw; the verdict tells which they are.
export function draftTrack(program, costs, { name = program.name, unit = "ticks" } = {}) {
  const parts = [], firstPart = [], rankStart = [0];
  for (const row of program.ranks) {
    for (const step of row) {
      firstPart.push(parts.length);
      for (const { stage, kind, microbatch } of stepActions(step)) parts.push([stage, KINDS.indexOf(kind), microbatch]);
    }
    rankStart.push(firstPart.length);
  }
  const most = (field) => parts.reduce((found, part) => Math.max(found, part[field]), 0);
  if ((1 + most(0)) * (1 + most(2)) > MOST_DRAWN) return null;
  const drawn = compileParts({ parts, firstPart: [...firstPart, parts.length], rankStart });
  return trackOf({ name, source: "simulated", unit }, drawn, { costs: costsFor(costs, drawn.numStages) });
}

// Costs per stage for another number of stages: one that is new has those of the last one.
export function costsFor(costs, numStages) {
  const fitted = Object.entries(costs).map(([key, value]) =>
    [key, Array.isArray(value) ? Array.from({ length: numStages }, (_, stage) => value[stage] ?? value.at(-1)) : value]);
  return Object.fromEntries(fitted);
}

// The span of a step, and back.
export const spanOfStep = (track, rank, position) => track.rankStart[rank] + position;

export function stepOfSpan(track, span) {
  const rank = track.rankOf[span];
  return { rank, position: span - track.rankStart[rank] };
}
