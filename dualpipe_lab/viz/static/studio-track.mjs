// A program of the studio as a track of the timeline, whether it can run or not.

import { connectParts } from "./program.mjs";
import { check } from "./schedule-check.mjs";
import { flatten } from "./schedule-flat.mjs";
import { trackOf } from "./track.mjs";

// null for a program whose indexes are too large to draw; the verdict tells which they are.
export function draftTrack(program, costs, { name = program.name, unit = "ticks" } = {}) {
  const drawn = check(program).flat ?? asFarAsItRuns(flatten(program));
  return drawn && trackOf({ name, source: "simulated", unit }, drawn, { costs: costsFor(costs, drawn.numStages) });
}

function asFarAsItRuns(flat) {
  if (!flat.table) return null;
  const numMicrobatches = 1 + flat.microbatch.reduce((most, one) => Math.max(most, one), -1);
  return connectParts({ ...flat, numStages: flat.width, numMicrobatches });
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
