// The picture in words: one line per state for the status region, one per cell for the pointer, a table for everybody.

import { beside, isMessage, messageOf, startOf, endOf, rankOfBar } from "./lanes.mjs";
import { KINDS } from "./program.mjs";
import { spanAt } from "./layout.mjs";
import { number, percent, unitOf } from "./scale.mjs";
import { headline, isScored } from "./scene.mjs";
import { isWait, spanName } from "./track.mjs";

const WORDS = { F: "forward", B: "backward", I: "backward for the input", W: "backward for the weights" };

// The name of the drawing; one program's simulation and its runs share theirs.
export const namesOf = (tracks) => [...new Set(tracks.map((track) => track.name))].join(" and ");

export const summary = (tracks) =>
  tracks.map((track) => `${track.name}: ${track.numRanks} ranks, ${headline(track).replaceAll(" · ", ", ")}`).join("; ");

// What every rank does at a time, for the status region: short enough to be listened to.
export function momentText(tracks, time, makespan, showsLanes) {
  const [divisor, unit] = unitOf(tracks[0].unit, makespan);
  const doing = tracks.map((track) => {
    const spans = Array.from({ length: track.numRanks }, (_, rank) => spanAt(track, rank, time));
    const busy = spans.filter((span) => span >= 0 && !isWait(track, span));
    if (track.numRanks > 8) return `${busy.length} of ${track.numRanks} ranks work`;
    const other = (rank) => (showsLanes ? besideText(track, rank, time) : "");
    return spans.map((span, rank) => `rank ${rank} ${span < 0 ? "idle" : spanName(track, span)}${other(rank)}`).join(", ");
  });
  const where = `t = ${number(Math.round(time), divisor)} of ${number(makespan, divisor)} ${unit}`;
  return time >= makespan ? `${where}: all done` : `${where}: ${doing.join("; ")}`;
}

export const besideText = (track, rank, time) => beside(track, rank, time)
  .map(([name, ids]) => (ids.length ? ` with ${name} ${ids.map((id) => barName(track, id)).join(" and ")}` : "")).join("");

// The name of a span, or of the message that a bar stands for.
export function barName(track, id) {
  if (!isMessage(track, id)) return spanName(track, id);
  const { label, dst } = messageOf(track, id);
  return `${label || "message"} to rank ${dst}`;
}

// The lines about one span or bar.
export function spanLines(tracks, [index, span], makespan) {
  const track = tracks[index], [divisor, unit] = unitOf(track.unit, makespan);
  const lines = [], from = number(startOf(track, span), divisor), to = number(endOf(track, span), divisor);
  const length = number(endOf(track, span) - startOf(track, span), divisor);
  const when = `rank ${rankOfBar(track, span)}, from ${from} to ${to} (${length} ${unit})`;
  if (isMessage(track, span)) {
    const { sent, left, bytes } = messageOf(track, span);
    if (left > sent) lines.push(`sent at ${number(sent, divisor)}, waits for its link`);
    return [`message${bytes == null ? "" : ` of ${bytes} bytes`}`, when, ...lines];
  }
  for (let part = track.firstPart[span]; part < track.firstPart[span + 1]; part++) {
    lines.push(`${WORDS[KINDS[track.kind[part]]]}, stage ${track.stage[part]}, microbatch ${track.microbatch[part]}`);
  }
  if (track.words.has(span) && track.words.get(span) !== spanName(track, span)) lines.push(track.words.get(span));
  lines.push(when);
  for (const message of track.messages) {
    if (message.to === span) {
      lines.push(`needs ${message.label} of rank ${message.src}, there at ${number(message.arrived, divisor)}`);
    }
  }
  return lines;
}

export function pathText(tracks, path, makespan) {
  const track = tracks[path.index], [divisor, unit] = unitOf(track.unit, makespan);
  const last = path.spans.at(-1), crossings = path.messages.size;
  const work = path.spans.reduce((sum, span) => sum + track.end[span] - track.start[span], 0);
  const hops = crossings === 1 ? "1 message" : `${crossings} messages`;
  const ends = number(track.end[last], divisor);
  const word = path.spans.length === 1 ? "1 cell" : `${path.spans.length} cells`;
  return `Critical path of ${spanName(track, last)}: ${word}, ${hops}, ${number(work, divisor)} of ${ends} ${unit} is work`;
}

// Rows of the table of numbers: one per rank and track.
export function tableOf(tracks, makespan) {
  const [divisor, unit] = unitOf(tracks[0].unit, makespan);
  const head = [...(tracks.length > 1 ? ["timeline"] : []), "rank", `busy (${unit})`, `idle (${unit})`, "idle share", "peak activations"];
  const rows = tracks.filter(isScored).flatMap((track) => track.busy.map((busy, rank) => [
    ...(tracks.length > 1 ? [track.name] : []), rank, number(busy, divisor), number(track.makespan - busy, divisor),
    percent(track.makespan ? 1 - busy / track.makespan : 0), track.peak[rank],
  ]));
  return { head, rows };
}
