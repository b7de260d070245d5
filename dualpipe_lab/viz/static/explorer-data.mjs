// The schedule explorer's numbers: programs by name and size, timed with the reader's costs and ranked.

import { makeTrack } from "./track.mjs";

// The text that Python packed: base64 of zlib of JSON, name -> "ranks microbatches" -> rows or the reason why not.
export async function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

const gcd = (a, b) => (b ? gcd(b, a % b) : a);

// The number of stages of a program, from its text: one more than the highest stage that a token names.
const stagesOf = (rows) => 1 + Math.max(...rows.join(" ").match(/\d+(?=[FBIW])/g).map(Number));

// How many ticks have to make one so that the share of each of these numbers of stages, whole/stages, is a whole number.
export const fineness = (whole, numbers) => numbers.reduce((all, stages) => {
  const own = stages / gcd(stages, whole);
  return (all * own) / gcd(all, own);
}, 1);

// Costs of one of `numStages` stages, from those of 1/whole of the model; `fine` ticks make one tick.
export function shareOf(costs, whole, numStages, fine) {
  const share = (fine * whole) / numStages;
  const scaled = Object.entries(costs).map(([key, value]) =>
    [key, value == null ? null : value * (key === "latency" || key === "transfer" ? fine : share)]);
  return Object.fromEntries(scaled);
}

// Everything about the schedules at one size.  `twins`: name -> the same schedule with overlapped pairs.
// `choice`: {ranks, microbatches, costs, limit, barrier, pairs, shown: Set of names}.  `pairs` is one rule for all: with it
// twins stand for their schedules; without it they are left out, and a pair takes F and then B.
// Returns {fine, ranked, refused}: `ranked` has those within the memory limit first, each part the quickest first.
export function explore(titles, twins, programs, choice) {
  const { ranks, microbatches, pairs, shown } = choice;
  const costs = pairs ? choice.costs : { ...choice.costs, overlap: null };
  const leftOut = new Set(pairs ? Object.keys(twins) : Object.values(twins));
  const found = Object.keys(titles).filter((key) => shown.has(key) && !leftOut.has(key))
    .map((key) => ({ key, name: titles[key], rows: programs[key][`${ranks} ${microbatches}`] }));
  const built = found.filter(({ rows }) => Array.isArray(rows)).map((entry) => ({ ...entry, stages: stagesOf(entry.rows) }));
  const fine = fineness(ranks, built.map(({ stages }) => stages));
  const ranked = built.map((entry) => measured(entry, shareOf(costs, ranks, entry.stages, fine), fine, choice));
  ranked.sort((a, b) => b.fits - a.fits || a.step - b.step || a.peak - b.peak || a.messages - b.messages);
  const refused = found.filter(({ rows }) => !Array.isArray(rows)).map(({ name, rows }) => ({ name, reason: rows }));
  return { fine, ranked, refused };
}

function measured(entry, costs, fine, { ranks: numRanks, limit, barrier }) {
  const spec = { name: entry.name, source: "simulated", unit: fine > 1 ? `ticks/${fine}` : "ticks", rows: entry.rows, costs };
  const track = makeTrack(spec), share = numRanks / entry.stages;
  const stages = Array.from({ length: numRanks }, () => new Set());
  track.program.stage.forEach((stage, part) => stages[track.rankOf[track.program.stepOf[part]]].add(stage));
  const peak = Math.max(...track.peak) * share;
  // Without a barrier a rank begins its next step as soon as it can: a step takes the longest of the ranks' windows.
  const windows = track.busy.map((_, rank) => windowOf(track, rank));
  const ticks = barrier ? track.makespan : Math.max(...windows);
  const idle = track.busy.reduce((sum, busy) => sum + ticks - busy, 0);
  return {
    ...entry, spec, track, peak, step: ticks / fine, makespan: track.makespan / fine, messages: track.messages.length,
    bubble: ticks ? idle / (numRanks * ticks) : 0,
    local: Math.max(...windows.map((length, rank) => length - track.busy[rank])) / fine,
    weights: Math.max(...stages.map((own) => own.size)) * share, fits: Number(limit == null || peak <= limit),
  };
}

// The time from a rank's first start to its last end.
function windowOf(track, rank) {
  let first = Infinity, last = 0;
  for (let span = track.rankStart[rank]; span < track.rankStart[rank + 1]; span++) {
    first = Math.min(first, track.start[span]);
    last = Math.max(last, track.end[span]);
  }
  return last > first ? last - first : 0;
}
