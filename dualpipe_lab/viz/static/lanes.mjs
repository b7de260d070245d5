// The streams of a rank below its work: spans of other streams, and messages as bars of the stream "communication".
//
// A bar has an id: that of its span, or, for a message, its number behind all spans.  Bars that overlap stand in several
// lines, each in the first that is free; the same as dualpipe_lab/timeline/svg.py.

const COMMUNICATION = "communication";
const MOST_LINES = 4; // more that overlap share the last ones

export const isMessage = (track, id) => id >= track.rankOf.length;
export const messageOf = (track, id) => track.messages[id - track.rankOf.length];
export const startOf = (track, id) => (isMessage(track, id) ? messageOf(track, id).left : track.start[id]);
export const endOf = (track, id) => (isMessage(track, id) ? messageOf(track, id).arrived : track.end[id]);
export const rankOfBar = (track, id) => (isMessage(track, id) ? messageOf(track, id).src : track.rankOf[id]);

// [{ name, height, ranks: for each rank its lines of ids }], found when they are first drawn and after new times.
export function lanesOf(track) {
  return (track.lanes ??= findLanes(track));
}

export const hasLanes = (track) => track.streams.length > 0 || hasFlights(track);

// A program's messages all take as long, so none of them has to be made to know it.
const hasFlights = (track) => (track.program
  ? track.numMessages > 0 && track.costs.latency + track.costs.transfer > 0
  : track.messages.some((message) => message.arrived > message.left));

function findLanes(track) {
  const bars = new Map(track.streams.map((name) => [name, newRows(track)]));
  for (let id = track.numWork; id < track.rankOf.length; id++) bars.get(track.streamOf[id - track.numWork])[track.rankOf[id]].push(id);
  const sent = newRows(track);
  track.messages.forEach(({ src, left, arrived }, index) => arrived > left && sent[src].push(track.rankOf.length + index));
  if (sent.some((ids) => ids.length)) {
    if (!bars.has(COMMUNICATION)) bars.set(COMMUNICATION, newRows(track));
    const byStart = (a, b) => startOf(track, a) - startOf(track, b); // nearly in order already, so this is linear
    sent.forEach((ids, rank) => {
      const both = bars.get(COMMUNICATION)[rank].concat(ids.sort(byStart));
      bars.get(COMMUNICATION)[rank] = both.length > ids.length ? both.sort(byStart) : both;
    });
  }
  return [...bars].map(([name, rows]) => {
    const ranks = rows.map((ids) => linesOf(track, ids));
    return { name, ranks, height: Math.max(1, ...ranks.map((lines) => lines.length)) };
  });
}

const newRows = (track) => Array.from({ length: track.numRanks }, () => []);

function linesOf(track, ids) {
  const lines = [], ends = [];
  for (const id of ids) {
    const start = startOf(track, id);
    let line = ends.findIndex((end) => end <= start);
    if (line < 0) line = ends.length < MOST_LINES ? lines.push([]) - 1 : ends.indexOf(Math.min(...ends));
    lines[line].push(id);
    ends[line] = endOf(track, id);
  }
  return lines;
}

// The bar of a line that covers a time; -1 if none.
export function barAt(track, ids, time) {
  let low = 0, high = ids.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (startOf(track, ids[middle]) <= time) low = middle + 1;
    else high = middle;
  }
  return low && endOf(track, ids[low - 1]) > time ? ids[low - 1] : -1;
}

// What a rank's other streams do at a time: [[name, ids]].
export const beside = (track, rank, time) => lanesOf(track).map(({ name, ranks }) =>
  [name, ranks[rank].map((ids) => barAt(track, ids, time)).filter((id) => id >= 0)]);

// Lane and line of a bar, or null for a span of the work.
export function lineOf(track, id) {
  if (id < track.numWork) return null;
  const lanes = lanesOf(track);
  lanes.places ??= new Map(lanes.flatMap(({ ranks }, lane) =>
    ranks.flatMap((lines) => lines.flatMap((ids, line) => ids.map((each) => [each, { lane, line }])))));
  return lanes.places.get(id) ?? null;
}
