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

// Costs are those of 1/p of the model.  `fine` ticks make one tick, so that every stage's share is a whole number.
function shareOf(costs, numRanks, numStages, fine) {
  const share = (fine * numRanks) / numStages;
  const scaled = Object.entries(costs).map(([key, value]) =>
    [key, value == null ? null : value * (key === "latency" || key === "transfer" ? fine : share)]);
  return Object.fromEntries(scaled);
}

// Everything about the schedules at one size.  `choice`: {ranks, microbatches, costs, limit, shown: Set of names}.
// Returns {fine, ranked, refused}: `ranked` has those within the memory limit first, each part the quickest first.
export function explore(titles, programs, choice) {
  const { ranks, microbatches, costs, limit, shown } = choice;
  const found = Object.keys(titles).filter((key) => shown.has(key))
    .map((key) => ({ key, name: titles[key], rows: programs[key][`${ranks} ${microbatches}`] }));
  const built = found.filter(({ rows }) => Array.isArray(rows)).map((entry) => ({ ...entry, stages: stagesOf(entry.rows) }));
  const fine = built.reduce((all, { stages }) => {
    const own = stages / gcd(stages, ranks);
    return (all * own) / gcd(all, own);
  }, 1);
  const ranked = built.map((entry) => measured(entry, shareOf(costs, ranks, entry.stages, fine), ranks, fine, limit));
  ranked.sort((a, b) => b.fits - a.fits || a.makespan - b.makespan || a.peak - b.peak || a.messages - b.messages);
  const refused = found.filter(({ rows }) => !Array.isArray(rows)).map(({ name, rows }) => ({ name, reason: rows }));
  return { fine, ranked, refused };
}

function measured(entry, costs, numRanks, fine, limit) {
  const spec = { name: entry.name, source: "simulated", unit: fine > 1 ? `1/${fine} ticks` : "ticks", rows: entry.rows, costs };
  const track = makeTrack(spec), share = numRanks / entry.stages;
  const stages = Array.from({ length: numRanks }, () => new Set());
  track.program.stage.forEach((stage, part) => stages[track.rankOf[track.program.stepOf[part]]].add(stage));
  const peak = Math.max(...track.peak) * share;
  return {
    ...entry, spec, track, peak, makespan: track.makespan / fine, bubble: track.bubble, messages: track.messages.length,
    weights: Math.max(...stages.map((own) => own.size)) * share, fits: Number(limit == null || peak <= limit),
  };
}
