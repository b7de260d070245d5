// What can be selected by name: "3F2" is a pipeline action, "rank 1, 4" the fifth span of rank 1 on all its streams,
// "message 2" the third message.

import { isMessage } from "./lanes.mjs";
import { ownLabel, partName } from "./track.mjs";

export function keyOf(track, span) {
  if (isMessage(track, span)) return `message ${span - track.rankOf.length}`;
  const part = track.firstPart[span];
  if (track.firstPart[span + 1] > part && !ownLabel(track, span)) return partName(track, part);
  const rank = track.rankOf[span];
  return `rank ${rank}, ${track.place?.[span] ?? span - track.rankStart[rank]}`;
}

// The span with a name, as [track, span], or null.  A pair answers to both its actions.
export function findSpan(tracks, key) {
  for (const [index, track] of tracks.entries()) {
    const span = spanOf(track, key);
    if (span >= 0) return [index, span];
  }
  return null;
}

// The same action on the other tracks.
export function twins(tracks, [index, span]) {
  const key = keyOf(tracks[index], span);
  const others = tracks.map((track, other) => [other, other === index ? span : spanOf(track, key)]);
  return others.filter(([, found]) => found >= 0);
}

function spanOf(track, key) {
  const place = /^rank (\d+), (\d+)$/.exec(key);
  if (place && track.place) {
    return track.rankOf.findIndex((rank, span) => rank === Number(place[1]) && track.place[span] === Number(place[2]));
  }
  if (place) {
    const span = track.rankStart[place[1]] + Number(place[2]);
    return span < track.rankStart[Number(place[1]) + 1] ? span : -1;
  }
  const message = /^message (\d+)$/.exec(key);
  if (message) return message[1] < track.messages.length ? track.rankOf.length + Number(message[1]) : -1;
  for (let part = 0; part < track.stage.length; part++) {
    if (partName(track, part) === key) return spanOfPart(track, part);
  }
  return -1;
}

function spanOfPart(track, part) {
  let low = 0, high = track.rankOf.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (track.firstPart[middle + 1] <= part) low = middle + 1;
    else high = middle;
  }
  return low;
}
