// What the colour of a cell means: the kind of work, the direction, the stage or the microbatch.
//
// Whatever a colour says, the letters of its cell say too, or for the second direction a bar on its top.  The same names as
// dualpipe_lab/timeline/colours.py.

import { isMessage, messageOf } from "./lanes.mjs";
import { KINDS } from "./program.mjs";
import { CELLS, NUMBERED } from "./theme.mjs";

export const WAYS = ["kind", "direction", "stage", "microbatch"];
const CARRIED = /^(\d+)([FBIW])(\d+)$/;

// The direction of each microbatch: 0 if it enters on the rank of the lowest microbatch, otherwise 1.
function directionsOf(track) {
  return (track.directions ??= findDirections(track));
}

function findDirections(track) {
  const entry = new Map();
  let first = Infinity;
  for (let span = 0; span < track.numWork; span++) {
    for (let part = track.firstPart[span]; part < track.firstPart[span + 1]; part++) {
      const microbatch = track.microbatch[part], known = entry.get(microbatch);
      if (!known || track.stage[part] < known[0]) entry.set(microbatch, [track.stage[part], track.rankOf[span]]);
      first = Math.min(first, microbatch);
    }
  }
  return new Map([...entry].map(([microbatch, [, rank]]) => [microbatch, Number(rank !== entry.get(first)[1])]));
}

// The numbers by which cells could be coloured, in order; [] where all have the same.
export function numbersBy(tracks, by) {
  const found = new Set();
  for (const track of tracks) {
    if (by === "direction") for (const direction of directionsOf(track).values()) found.add(direction);
    else if (by !== "kind") for (const number of distinct(track, by)) found.add(number);
  }
  return found.size > 1 ? [...found].sort((a, b) => a - b) : [];
}

// The numbers of a track, found once; one that follows itself is not looked up again.
function distinct(track, by) {
  const known = (track.distinct ??= {}), numbers = track[by];
  if (known[by]) return known[by];
  const found = (known[by] = new Set());
  for (let i = 0, last; i < numbers.length; i++) if (numbers[i] !== last) found.add(last = numbers[i]);
  return found;
}

export const waysOf = (tracks) => WAYS.filter((by) => by === "kind" || numbersBy(tracks, by).length);

export const numbered = (number) => NUMBERED[number % NUMBERED.length];

const numberOf = (track, stage, microbatch, by) =>
  by === "stage" ? stage : by === "microbatch" ? microbatch : directionsOf(track).get(microbatch) ?? 0;

// [colour, ink, whether it has the bar of the second direction] of a part.
export function colourOfPart(track, part, by) {
  if (by === "kind") return CELLS[KINDS[track.kind[part]]];
  const number = numberOf(track, track.stage[part], track.microbatch[part], by);
  return [...numbered(number), by === "direction" && number === 1];
}

// The same of a bar, or of a span that is no pipeline work.
export function colourOfBar(track, id, by) {
  const found = isMessage(track, id) && CARRIED.exec(messageOf(track, id).label);
  const place = found ? [Number(found[1]), Number(found[3])] : track.places?.get(id);
  if (by !== "kind" && place) return numbered(numberOf(track, ...place, by));
  if (isMessage(track, id)) return CELLS[found ? found[2] : "collective"];
  return CELLS[track.words.get(id)] ?? CELLS.other;
}
