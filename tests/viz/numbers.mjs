// What the page computes for a track, as plain values.  In node: one specification per line in, one line of numbers out.

import { KINDS } from "../../dualpipe_lab/viz/static/program.mjs";
import { criticalPath } from "../../dualpipe_lab/viz/static/path.mjs";
import { liveOf, makeTrack } from "../../dualpipe_lab/viz/static/track.mjs";

const spansOf = (track) => Array.from(track.rankOf, (rank, span) => {
  const parts = [];
  for (let part = track.firstPart[span]; part < track.firstPart[span + 1]; part++) {
    parts.push([track.stage[part], KINDS[track.kind[part]], track.microbatch[part]]);
  }
  return [rank, track.start[span], track.end[span], parts];
});

export function numbersOf(spec) {
  const track = makeTrack(spec);
  return {
    spans: spansOf(track),
    messages: track.messages.map(({ src, dst, sent, left, arrived, label }) => [src, dst, sent, left, arrived, label]),
    makespan: track.makespan,
    busy: track.busy,
    peak: track.peak,
    live: track.busy.map((_, rank) => liveOf(track, rank)).map(({ times, counts }) => times.map((time, i) => [time, counts[i]])),
    path: criticalPath(track).spans,
  };
}

if (globalThis.process?.stdin) {
  const { createInterface } = await import("node:readline");
  for await (const line of createInterface({ input: process.stdin })) console.log(JSON.stringify(numbersOf(JSON.parse(line))));
}
