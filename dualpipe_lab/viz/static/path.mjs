// The critical path: from a span back to time 0, each time to whatever ended latest before the span could start.
//
// That is the span before it on its rank, or the message it waited for; a message that queued for its link waited for
// the message before it.  On a rank with several streams the span before is the one that ended last before the start, of
// its own stream if two ended together.  The same walk as dualpipe_lab/timeline/data.py.

import { isWait } from "./track.mjs";

export function lastSpan(track) {
  let best = -1;
  for (let rank = 0; rank < track.numRanks; rank++) {
    let span = track.rankStart[rank + 1] - 1;
    while (span >= track.rankStart[rank] && isWait(track, span)) span--;
    if (span < track.rankStart[rank]) span = -1;
    for (const ids of streamsOf(track)[rank].values()) {
      if (span < 0 || track.end[ids.at(-1)] > track.end[span]) span = ids.at(-1);
    }
    if (span >= 0 && (best < 0 || track.end[span] > track.end[best])) best = span;
  }
  return best;
}

// By rank: the spans of each stream but the work.
function streamsOf(track) {
  if (track.byStream) return track.byStream;
  track.byStream = Array.from({ length: track.numRanks }, () => new Map());
  for (let span = track.numWork; span < track.rankOf.length; span++) {
    if (isWait(track, span)) continue;
    const streams = track.byStream[track.rankOf[span]], name = track.streamOf[span - track.numWork];
    if (!streams.has(name)) streams.set(name, []);
    streams.get(name).push(span);
  }
  return track.byStream;
}

// The spans from time 0 to `span`, and the messages between them.
export function criticalPath(track, span = lastSpan(track)) {
  const index = indexMessages(track), spans = [], messages = [];
  for (let guard = track.rankOf.length; span >= 0 && guard >= 0; guard--) {
    spans.push(span);
    span = before(track, index, span, messages);
  }
  return { spans: spans.reverse(), messages: messages.reverse() };
}

function indexMessages(track) {
  const byArrival = [...track.messages].sort((a, b) => a.arrived - b.arrived);
  const to = new Map(), inbox = new Map(), link = new Map();
  const append = (map, key, message) => (map.has(key) ? map.get(key).push(message) : map.set(key, [message]));
  for (const message of byArrival) {
    if (message.to >= 0) append(to, message.to, message);
    append(inbox, message.dst, message);
    append(link, `${message.src} ${message.dst}`, message);
  }
  return { to, inbox, link };
}

function before(track, index, span, messages) {
  const previous = previousOf(track, span), message = awaited(track, index, span);
  if (message && (previous < 0 || message.arrived > track.end[previous])) return senderOf(track, index, message, messages);
  return previous;
}

function previousOf(track, span) {
  const rank = track.rankOf[span], streams = streamsOf(track)[rank], first = track.rankStart[rank];
  const isOwn = span < track.numWork, ended = (id) => track.end[id] <= track.start[span];
  let found = isOwn ? span - 1 : lastOf(first, track.rankStart[rank + 1], ended);
  while (found >= first && isWait(track, found)) found--;
  if (found < first || (!isOwn && track.place[found] >= track.place[span])) found = -1;
  for (const ids of streams.values()) {
    const here = lastOf(0, ids.length, (at) => ids[at] <= span), isHere = ids[here] === span;
    const last = isHere ? here - 1 : lastOf(0, ids.length, (at) => ended(ids[at]));
    if (last < 0 || (!isHere && track.place[ids[last]] >= track.place[span])) continue;
    const isLater = found < 0 || track.end[ids[last]] > track.end[found];
    if (isLater || (isHere && track.end[ids[last]] === track.end[found])) found = ids[last];
  }
  return found;
}

// The last of first..end for which `holds`, which holds for all before; first - 1 if none.
function lastOf(first, end, holds) {
  while (first < end) {
    const middle = (first + end) >> 1;
    if (holds(middle)) first = middle + 1;
    else end = middle;
  }
  return first - 1;
}

function awaited(track, index, span) {
  const isWork = track.firstPart[span + 1] > track.firstPart[span];
  // Pipeline work waits for the latest of its inputs, anything else for the last message that was there.
  const candidates = isWork ? index.to.get(span) : index.inbox.get(track.rankOf[span]);
  let best;
  for (const message of candidates ?? []) {
    if (!isWork && message.arrived > track.start[span]) break;
    const isFirst = best && message.arrived === best.arrived && message.toPart < best.toPart;
    if (!best || !isWork || message.arrived > best.arrived || isFirst) best = message;
  }
  return best;
}

function senderOf(track, index, message, messages) {
  const queue = index.link.get(`${message.src} ${message.dst}`);
  let position = queue.findIndex((other) => other.arrived >= message.arrived);
  messages.push(message);
  while (isQueued(message) && position > 0) {
    message = queue[--position];
    messages.push(message);
  }
  if (message.from >= 0) return message.from;
  let span = track.rankStart[message.src + 1] - 1;
  while (span >= track.rankStart[message.src] && (isWait(track, span) || track.start[span] >= message.sent)) span--;
  return span >= track.rankStart[message.src] ? span : -1;
}

const isQueued = (message) => message.queued ?? message.left > message.sent;
