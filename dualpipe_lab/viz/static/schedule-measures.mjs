import { draftTrack } from "./studio-track.mjs";
export function measures(program, costs) {
  const t = draftTrack(program, costs);
  return { makespan: t.makespan, bubble: t.bubble, busy: t.busy, peak: t.peak, pending: t.peak.map(() => 0), messages: t.messages.length, stored: 1, bound: { ticks: Math.max(...t.busy, 0) } };
}
