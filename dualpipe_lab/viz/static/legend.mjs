// The entries of a timeline's legend: only what occurs in it.

import { rowOf } from "./layout.mjs";
import { KINDS } from "./program.mjs";
import { CELLS } from "./theme.mjs";

const NAMES = ["forward", "backward", "backward, input", "backward, weights"];

// [sign, words, style, class] each.
export function entriesOf(tracks) {
  const entries = [];
  const chip = (kind) => `background:${CELLS[kind][0]};color:${CELLS[kind][1]}`;
  KINDS.forEach((kind, code) => {
    if (tracks.some((track) => track.kind.includes(code))) entries.push([kind, NAMES[code], chip(kind)]);
  });
  const words = new Set(tracks.flatMap((track) => [...track.words.values()]).filter((word) => word !== "wait"));
  for (const word of words) entries.push(["", word, chip(word in CELLS ? word : "other")]);
  const hasPairs = tracks.some((track) => track.stage.length > track.rankOf.length - track.words.size);
  if (hasPairs) entries.push(["", "overlapped pair", "background:linear-gradient(#0072b2 50%,#e69f00 50%)", "pair"]);
  entries.push(["", "idle", "", "idle"]);
  const numRows = tracks.reduce((sum, track) => sum + track.numRanks, 0);
  if (rowOf(numRows).strip && tracks.some((track) => Math.max(...track.peak) > 0)) entries.push(["", "live activations", "", "live"]);
  return entries;
}
