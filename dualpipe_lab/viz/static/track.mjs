// A track: one timeline on the page, recomputed from its program or drawn as it was recorded.
//
// Both kinds become the same flat arrays: spans (the work rank by rank, then the other streams), their parts, and messages.

import { KINDS, compile } from "./program.mjs";
import { isExact, newTimes, placeRest, simulate } from "./simulate.mjs";

const WORK = new Set([...KINDS, "F&B"]);

export function makeTrack(spec) {
  const track = { name: spec.name, source: spec.source, unit: spec.unit };
  return spec.rows ? fromProgram(track, spec) : fromRecord(track, spec);
}

function fromProgram(track, spec) {
  return trackOf(track, compile(spec.rows), spec);
}

// A track of a compiled program; `stop` is the time at which a program that deadlocks comes to a halt, else null.
export function trackOf(track, program, spec) {
  Object.assign(track, {
    program,
    numRanks: program.numRanks,
    rankStart: program.rankStart,
    rankOf: program.rankOf,
    firstPart: program.firstPart,
    stage: program.stage,
    kind: program.kind,
    microbatch: program.microbatch,
    words: new Map(), // span -> kind, of spans that are not pipeline work
    numWork: program.rankOf.length, // spans behind are of other streams
    streams: [],
    bytes: spec.activation_bytes,
    given: spec.costs,
    canRecompute: isExact(spec.costs),
    times: newTimes(program),
  });
  // A large track has tens of thousands of messages, and most drawings of it show none: they are made when asked for.
  Object.defineProperty(track, "messages", { get: () => (track.found ??= timedMessages(track)) });
  track.numMessages = feedsAcross(program).length;
  recompute(track, spec.costs);
  return track;
}

// Give every span and message of a track its time anew.
export function recompute(track, costs) {
  const { program } = track;
  track.costs = costs;
  track.lanes = undefined;
  const { start, end } = simulate(program, costs, track.times);
  track.stop = placeRest(program, costs, track.times);
  Object.assign(track, { start, end, found: undefined });
  measure(track);
}

// The parts whose result is sent to another rank and used there, before the program ends or comes to a halt.
function feedsAcross({ link, stepOf, consumer, reached, rankOf }) {
  const runs = (step) => !reached || step < reached[rankOf[step]], found = [];
  for (let part = 0; part < link.length; part++) {
    if (link[part] >= 0 && runs(stepOf[part]) && runs(stepOf[consumer[part]])) found.push(part);
  }
  return found;
}

function timedMessages(track) {
  const { program, times } = track, { link, numRanks, stepOf, consumer } = program;
  return feedsAcross(program).map((part) => ({
    src: Math.floor(link[part] / numRanks), dst: link[part] % numRanks, from: stepOf[part], to: stepOf[consumer[part]],
    part, toPart: consumer[part], sent: times.end[stepOf[part]], left: times.left[part], arrived: times.arrived[part],
    label: partName(track, part),
  }));
}

const time = (value) => {
  if (typeof value === "number") return value;
  const [numerator, denominator] = value.split("/").map(Number);
  return numerator / denominator;
};

function fromRecord(track, spec) {
  const all = spec.ranks.flatMap((rows, rank) => rows.map((row, place) => ({ rank, row, place })));
  const work = all.filter(isWork), spans = [...work, ...all.filter((span) => !isWork(span))];
  const parts = [];
  const firstPart = [0];
  Object.assign(track, { numRanks: spec.ranks.length, words: new Map(), places: new Map(), canRecompute: false, labels: [],
    bytes: spec.activation_bytes, numWork: work.length, place: spans.map((span) => span.place) });
  track.streamOf = spans.slice(work.length).map(({ row }) => row[7]);
  track.streams = [...new Set(all.filter((span) => !isWork(span)).map(({ row }) => row[7]))];
  spans.forEach(({ row: [, , kind, stage, microbatch, label, pair] }, span) => {
    const isAction = WORK.has(kind) && stage !== null && microbatch !== null && span < work.length;
    const own = isAction ? [[stage, kind, microbatch]] : [];
    if (stage !== null && microbatch !== null) track.places.set(span, [stage, microbatch]);
    parts.push(...(pair ?? own));
    if (!pair && !own.length) track.words.set(span, kind);
    track.labels.push(label);
    firstPart.push(parts.length);
  });
  let total = 0;
  Object.assign(track, {
    rankStart: Int32Array.from([0, ...spec.ranks.map((rows) => (total += rows.filter((row) => isWork({ row })).length))]),
    rankOf: Int32Array.from(spans, (span) => span.rank),
    start: Float64Array.from(spans, (span) => time(span.row[0])),
    end: Float64Array.from(spans, (span) => time(span.row[1])),
    firstPart: Int32Array.from(firstPart),
    stage: Int32Array.from(parts, (part) => part[0]),
    kind: Uint8Array.from(parts, (part) => KINDS.indexOf(part[1])),
    microbatch: Int32Array.from(parts, (part) => part[2]),
  });
  track.hasNames = spans.some((_, span) => ownLabel(track, span));
  track.messages = recordedMessages(track, spec.messages);
  track.numMessages = track.messages.length;
  measure(track);
  return track;
}

const isWork = ({ row }) => (row[7] ?? "work") === "work";

function recordedMessages(track, rows) {
  const maker = new Map(), user = new Map(); // rank and label of a message -> the span, the part at that end
  for (let span = 0; span < track.numWork; span++) {
    for (let part = track.firstPart[span]; part < track.firstPart[span + 1]; part++) {
      maker.set(`${track.rankOf[span]} ${partName(track, part)}`, span);
      for (const label of feedNames(track, part)) user.set(`${track.rankOf[span]} ${label}`, [span, part]);
    }
  }
  return rows.map(([src, dst, sent, arrived, label, bytes, left]) => ({
    src, dst, label, bytes, sent: time(sent), arrived: time(arrived),
    left: left === null ? time(sent) : time(left), queued: left !== null,
    from: maker.get(`${src} ${label}`) ?? -1,
    to: user.get(`${dst} ${label}`)?.[0] ?? -1, toPart: user.get(`${dst} ${label}`)?.[1] ?? -1,
  }));
}

function feedNames(track, part) {
  const stage = track.stage[part], microbatch = track.microbatch[part];
  if (track.kind[part] === 0) return [`${stage - 1}F${microbatch}`];
  return track.kind[part] < 3 ? [`${stage + 1}B${microbatch}`, `${stage + 1}I${microbatch}`] : [];
}

export const partName = (track, part) => `${track.stage[part]}${KINDS[track.kind[part]]}${track.microbatch[part]}`;

// The label of a cell where it says more than its action.
export function ownLabel(track, span) {
  const label = track.labels?.[span], first = track.firstPart[span];
  return label && track.firstPart[span + 1] === first + 1 && label !== partName(track, first) ? label : "";
}

export function spanName(track, span) {
  const names = [], own = ownLabel(track, span);
  if (own) return own;
  for (let part = track.firstPart[span]; part < track.firstPart[span + 1]; part++) names.push(partName(track, part));
  return names.join(" & ") || track.labels?.[span] || track.words.get(span);
}

export const isWait = (track, span) => track.words.get(span) === "wait";

// The numbers of a track: makespan, busy and bubble time, and live activations per rank.
function measure(track) {
  const { numRanks, rankStart, end } = track;
  track.makespan = end.reduce((most, value) => Math.max(most, value), 0);
  track.busy = Array.from({ length: numRanks }, (_, rank) => busyTime(track, rankStart[rank], rankStart[rank + 1]));
  const idle = track.busy.reduce((sum, busy) => sum + track.makespan - busy, 0);
  track.bubble = track.makespan ? idle / (numRanks * track.makespan) : 0;
  track.live = new Array(numRanks).fill(null); // made when asked for, see liveOf
  track.peak = Array.from(track.live, (_, rank) => (track.program ? peakInOrder(track, rank) : liveOf(track, rank).peak));
  track.shortest = Infinity;
  for (let span = 0; span < end.length; span++) {
    const length = end[span] - track.start[span];
    if (length > 0 && length < track.shortest && !isWait(track, span)) track.shortest = length;
  }
}

function busyTime(track, first, last) {
  let total = 0, reached = 0;
  for (let span = first; span < last; span++) {
    if (track.end[span] <= reached || isWait(track, span)) continue;
    total += track.end[span] - Math.max(track.start[span], reached);
    reached = track.end[span];
  }
  return total;
}

// The live activations of a rank over time.
export const liveOf = (track, rank) => (track.live[rank] ??= liveActivations(track, rank));

// A program's steps follow one another, so their order alone tells how many are held at most.
function peakInOrder({ rankStart, firstPart, kind }, rank) {
  let held = 0, peak = 0;
  for (let part = firstPart[rankStart[rank]]; part < firstPart[rankStart[rank + 1]]; part++) {
    if (kind[part] === 0) peak = Math.max(peak, ++held);
    else if (kind[part] !== 2) held = Math.max(held - 1, 0);
  }
  return peak;
}

// Held from the start of F to the end of B or W.  At one time the changes count in the order of the rank's spans.  What
// ends without a beginning was held at time 0.  `sizeOf(stage)`: what an activation counts, 1 or its bytes.
export function liveActivations(track, rank, sizeOf = () => 1) {
  const changes = [], open = new Map();
  let sorted = true, count = 0;
  for (let span = track.rankStart[rank]; span < track.rankStart[rank + 1]; span++) {
    for (let part = track.firstPart[span]; part < track.firstPart[span + 1]; part++) {
      const kind = track.kind[part];
      if (kind === 2) continue;
      const at = kind === 0 ? track.start[span] : track.end[span];
      sorted &&= !changes.length || changes[changes.length - 1][0] <= at;
      const size = sizeOf(track.stage[part]);
      changes.push([at, kind === 0 ? size : -size, track.stage[part] * 2 ** 24 + track.microbatch[part]]);
    }
  }
  if (!sorted) changes.sort((a, b) => a[0] - b[0]);
  for (const [, delta, key] of track.program ? [] : changes) { // a program begins with nothing
    const now = (open.get(key) ?? 0) + delta;
    if (now < 0) count -= delta;
    else open.set(key, now);
  }
  const times = [0], counts = [count];
  let peak = count;
  for (const [at, delta] of changes) {
    count = Math.max(count + delta, 0); // a draft may end what it never began
    peak = Math.max(peak, count);
    if (times[times.length - 1] === at) counts[counts.length - 1] = count;
    else { times.push(at); counts.push(count); }
  }
  return { times, counts, peak };
}
