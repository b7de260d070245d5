// A schedule's times as a trace for ui.perfetto.dev, as dualpipe_lab/timeline/perfetto.py writes it: one tick is a microsecond.

import { KINDS } from "./program.mjs";
import { draftTrack } from "./studio-track.mjs";
import { liveOf } from "./track.mjs";
import { stepText } from "./schedule-rows.mjs";

export function perfettoTrace({ program, costs }) {
  const track = draftTrack(program, costs);
  if (!track || track.stop !== null) throw new Error("only a schedule that can run has a trace; mend it first");
  const ranks = Array.from({ length: track.numRanks }, (_, rank) => rank);
  const traceEvents = [...ranks.flatMap((rank) => namesOfRank(track, rank)), ...spansOfTrack(track, program),
    ...track.messages.flatMap((message, id) => arrowOf(track, message, id)), ...ranks.flatMap((rank) => countersOf(track, rank))];
  return JSON.stringify({ traceEvents, displayTimeUnit: "ns" });
}

const namesOfRank = (track, rank) => [
  { ph: "M", name: "process_name", pid: rank, args: { name: `rank ${rank}` } },
  { ph: "M", name: "process_sort_index", pid: rank, args: { sort_index: rank } },
  { ph: "M", name: "thread_name", pid: rank, tid: 0, args: { name: track.name } },
];

function spansOfTrack(track, program) {
  return Array.from(track.rankOf, (rank, span) => {
    const part = track.firstPart[span], isPaired = track.firstPart[span + 1] > part + 1;
    const step = program.ranks[rank][span - track.rankStart[rank]];
    return { ph: "X", name: stepText(step), cat: isPaired ? "F&B" : KINDS[track.kind[part]], pid: rank, tid: 0,
      ts: track.start[span], dur: track.end[span] - track.start[span],
      args: { stage: track.stage[part], microbatch: track.microbatch[part] } };
  });
}

// An arrow hangs on the span that encloses its time, so it leaves just before the end of the span that made it.
function arrowOf(track, { src, dst, from, to, label }, id) {
  const common = { cat: "message", name: label, id, tid: 0 };
  const sent = (1000 * track.end[from] - (track.end[from] - track.start[from])) / 1000;
  return [{ ...common, ph: "s", pid: src, ts: sent, args: { num_bytes: null } },
    { ...common, ph: "f", bp: "e", pid: dst, ts: track.start[to] }];
}

function countersOf(track, rank) {
  const rows = [["live activations", "activations", liveOf(track, rank)], ["pending weight gradients", "due", pendingOf(track, rank)]];
  return rows.filter(([, , steps]) => steps.peak > 0).flatMap(([name, key, { times, counts }]) =>
    times.map((ts, i) => ({ ph: "C", name, pid: rank, ts, args: { [key]: counts[i] } }))
      .filter((_, i) => !i || counts[i] !== counts[i - 1]));
}

// Pending weight gradients over time: I has ended, W has not.
function pendingOf(track, rank) {
  const times = [0], counts = [0];
  let count = 0, peak = 0;
  for (let span = track.rankStart[rank]; span < track.rankStart[rank + 1]; span++) {
    for (let part = track.firstPart[span]; part < track.firstPart[span + 1]; part++) {
      if (track.kind[part] < 2) continue;
      count += track.kind[part] === 2 ? 1 : -1;
      peak = Math.max(peak, count);
      if (times.at(-1) === track.end[span]) counts[counts.length - 1] = count;
      else { times.push(track.end[span]); counts.push(count); }
    }
  }
  return { times, counts, peak };
}
