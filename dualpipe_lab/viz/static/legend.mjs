// The entries of a timeline's legend: only what occurs in it.

import { secondStage } from "./cells.mjs";
import { numbered, numbersBy } from "./colours.mjs";
import { rowOf } from "./layout.mjs";
import { KINDS } from "./program.mjs";
import { CELLS, NUMBERED } from "./theme.mjs";

const NAMES = ["forward", "backward", "backward, input", "backward, weights"];

// [sign, words, style, class] each.
export function entriesOf(tracks, { by = "kind", memory = "none", lanes = false } = {}) {
  const entries = by === "kind" ? kindsOf(tracks) : coloursBy(tracks, by);
  const hasOthers = lanes && tracks.some((track) => !track.program && track.messages.some(({ label }) => !/^\d+[FBIW]\d+$/.test(label)));
  if (hasOthers) entries.push(["", "message", `background:${CELLS.collective[0]}`]);
  const hasPairs = tracks.some((track) => track.stage.length > track.rankOf.length - track.words.size);
  if (hasPairs) entries.push(["", "overlapped pair", by === "kind" ? "background:linear-gradient(#0072b2 50%,#e69f00 50%)" : "", "pair"]);
  const hasSecond = tracks.some((track) => !track.hasNames && track.busy.some((_, rank) => secondStage(track, rank) >= 0));
  if (hasSecond) entries.push(["f", "lower case, dark bar: the rank's second stage", "", "lower"]);
  entries.push(["", "idle", "", "idle"]);
  const numRows = tracks.reduce((sum, track) => sum + track.numRanks, 0), hasStrips = rowOf(numRows).strip || memory !== "none";
  if (hasStrips && tracks.some((track) => Math.max(...track.peak) > 0)) entries.push(["", "live activations", "", "live"]);
  return entries;
}

function coloursBy(tracks, by) {
  const found = numbersBy(tracks, by), shown = found.slice(0, NUMBERED.length);
  const entries = shown.map((number) => {
    const [fill, ink] = numbered(number), isSecond = by === "direction" && number === 1;
    return [String(number), isSecond ? "direction 1, bar on top" : `${by} ${number}`, `background:${fill};color:${ink}`,
      isSecond ? "second" : ""];
  });
  if (found.length > shown.length) entries.push(["…", "the colours repeat, read the numbers", "", ""]);
  return entries;
}

function kindsOf(tracks) {
  const entries = [], chip = (kind) => `background:${CELLS[kind][0]};color:${CELLS[kind][1]}`;
  const words = new Set(tracks.flatMap((track) => [...track.words.values()]).filter((word) => word !== "wait"));
  KINDS.forEach((kind, code) => {
    if (words.delete(kind) || tracks.some((track) => track.kind.includes(code))) entries.push([kind, NAMES[code], chip(kind)]);
  });
  for (const word of words) entries.push(["", word, chip(word in CELLS ? word : "other")]);
  return entries;
}
