// Everything that a rank's row shows: idle time, cells with their letters, live activations.

import { stairs } from "./bands.mjs";
import { colourOfBar, colourOfPart } from "./colours.mjs";
import { endOf, isMessage, lanesOf, messageOf, startOf } from "./lanes.mjs";
import { KINDS } from "./program.mjs";
import { inView, isOverview, rowTop, xOf } from "./layout.mjs";
import { drawOverview } from "./overview.mjs";
import { isWait, liveOf, ownLabel } from "./track.mjs";

const LETTER = 6.3; // px, width of a letter at size 11

export function drawRows(painter, layout, tracks) {
  let cells = 0;
  tracks.forEach((track, index) => {
    for (let rank = 0; rank < track.numRanks; rank++) drawIdle(painter, layout, track, rowTop(layout, index, rank));
    if (isOverview(layout, track)) drawOverview(painter, layout, track, index);
    else cells += drawCells(painter, layout, track, index);
    if (layout.showsLanes) cells += drawLanes(painter, layout, track, index);
    if (layout.row.strip) drawLive(painter, layout, track, index);
  });
  return cells;
}

function drawIdle(painter, layout, track, y) {
  const width = Math.min(xOf(layout, track.makespan) - layout.left, layout.room);
  painter.rect(layout.left, y, width, layout.row.cell, painter.theme.track);
  if (layout.row.cell > 6) painter.hatch(layout.left, y, width, layout.row.cell);
}

function drawCells(painter, layout, track, index) {
  let count = 0;
  for (let rank = 0; rank < track.numRanks; rank++) {
    const [first, last] = inView(layout, track, rank);
    const labels = [], lower = secondStage(track, rank);
    for (let span = first; span < last; span++) count += drawCell(painter, layout, track, index, span, labels, lower);
    // All rectangles first, then all letters: a canvas is quicker when it does not change its state.
    for (const [text, x, y, size, fill] of labels) painter.text(text, x, y, { size, fill, align: "center" });
  }
  return count;
}

function drawLanes(painter, layout, track, index) {
  const { theme } = painter, { line } = layout.row, width = Math.min(xOf(layout, track.makespan) - layout.left, layout.room);
  let count = 0;
  lanesOf(track).forEach(({ ranks }, number) => {
    const { y, height } = layout.tracks[index].lanes[number];
    ranks.forEach((lines, rank) => {
      const top = rowTop(layout, index, rank) + y, labels = [];
      painter.rect(layout.left, top, width, height, theme.track);
      lines.forEach((ids, at) => (count += drawBars(painter, layout, track, ids, top + at * line, labels)));
      for (const [text, x, base, size, fill] of labels) painter.text(text, x, base, { size, fill, align: "center" });
    });
  });
  return isOverview(layout, track) ? 0 : count;
}

// The bars of one line; neighbours within a pixel are drawn as one.
function drawBars(painter, layout, track, ids, top, labels) {
  const { line } = layout.row, right = layout.left + layout.room, inset = line > 8 ? 1 : 0;
  let drawn = -Infinity, count = 0;
  for (const id of ids) {
    const from = xOf(layout, startOf(track, id)), to = xOf(layout, endOf(track, id));
    if (to < layout.left || from > right || (to - drawn < 0.7 && to - from < 0.7)) continue;
    const width = Math.max(to - from - (to - from > 4 ? 1 : 0), 0.7), [fill, ink] = colourOfBar(track, id, layout.by);
    painter.rect(from, top + inset, width, line - 2 * inset, fill);
    drawn = from + width;
    count++;
    const text = isMessage(track, id) ? messageOf(track, id).label : track.labels[id];
    if (text && line >= 12) word(labels, text, from + width / 2, top, width, line, ink);
  }
  return count;
}

// Draw one span; its letters are collected in `labels`.  Returns the number of actions drawn.
export function drawCell(painter, layout, track, index, span, labels, lower) {
  const y = rowTop(layout, index, track.rankOf[span]), height = layout.row.cell;
  const full = (track.end[span] - track.start[span]) * layout.perTime;
  if (full <= 0) return 0;
  const gap = full > 4 ? 0.5 : 0;
  const x = xOf(layout, track.start[span]) + gap, width = full - 2 * gap;
  const first = track.firstPart[span], parts = track.firstPart[span + 1] - first;
  if (!parts) return drawWord(painter, layout, track, span, x, y, width, height, labels);
  const share = height / parts, own = ownLabel(track, span);
  for (let i = 0; i < parts; i++) {
    const kind = KINDS[track.kind[first + i]], top = y + i * share;
    const [fill, ink, hasBar] = colourOfPart(track, first + i, layout.by);
    painter.rect(x, top, width, share, fill);
    if (hasBar === true && height > 10) painter.rect(x, top, width, 3, "rgba(0,0,0,.6)");
    const isSecond = track.stage[first + i] === lower && !own;
    if (isSecond && height > 10) painter.rect(x, top + share - 2.5, width, 2.5, "rgba(0,0,0,.45)");
    const letter = isSecond ? kind.toLowerCase() : kind;
    const words = [letter, track.stage[first + i], track.microbatch[first + i]];
    if (own) word(labels, own, x + width / 2, top, width, share, ink);
    else label(labels, words, layout.by, x + width / 2, top, width, share, ink);
  }
  if (parts > 1 && width > 3) painter.frame(x + 0.5, y + 0.5, width - 1, height - 1, painter.theme.border, 1.2);
  return parts;
}

function drawWord(painter, layout, track, span, x, y, width, height, labels) {
  const kind = track.words.get(span);
  if (isWait(track, span)) {
    if (width > 3) painter.frame(x + 0.5, y + 0.5, width - 1, height - 1, painter.theme.line, 1, [2, 2]);
    return 0;
  }
  const [fill, ink] = colourOfBar(track, span, layout.by);
  painter.rect(x, y, width, height, fill);
  word(labels, track.labels[span] || kind, x + width / 2, y, width, height, ink);
  return 1;
}

// M and W are wider than other letters.
const textWidth = (text) => text.length * LETTER + 1.6 * (text.match(/[MW]/g)?.length ?? 0);

// The word, or what is left of it where it is too long: its number below it, then without its number (D_F3, D_F) or, for
// what a message carries, without its stage (2F7, F7); the letter in front remains in the end.
function word(labels, text, x, y, width, height, ink) {
  const isLow = height < 16, middle = y + height / 2;
  if (height < 11) return;
  if (!isLow && textWidth(text) + 4 < width) {
    labels.push([text, x, middle + 4, 11, ink]);
    return;
  }
  const fits = (words, size) => textWidth(words) * (size / 11) + 1 < width;
  const [, head, digits] = /^(.*?)(\d+)$/.exec(text) ?? [null, text, ""];
  if (fits(text, 10)) labels.push([text, x, middle + 3.5, 10, ink]);
  else if (!isLow && height >= 24 && digits && fits(head, 9)) labels.push([head, x, middle - 2, 9, ink], [digits, x, middle + 9.5, 9, ink]);
  else {
    const short = /^\d+[FBIW]\d+$/.test(text) ? text.replace(/^\d+/, "") : head;
    if (fits(short, 9)) labels.push([short, x, middle + 3, 9, ink]);
    else if (short.length > 2 && width >= 8) labels.push([short[0], x, middle + 3.5, 10, ink]);
  }
}

// The letter and the number: side by side, one above the other, or one of them alone, as they fit.  The number is the
// microbatch; where colours are those of stages, the stage stands in front of it.
function label(labels, [letter, stage, microbatch], by, x, y, width, height, fill) {
  const middle = y + height / 2, full = `${stage}${letter}${microbatch}`;
  if (height < 10 || width < 6) return;
  if (by === "stage" && full.length * LETTER <= width - 2) {
    labels.push([full, x, middle + 4, height < 13 ? 10 : 11, fill]);
    return;
  }
  const digits = String(by === "stage" ? stage : microbatch);
  if (by === "stage" || (by === "microbatch" && (digits.length + 1) * LETTER > width - 2 && height < 24)) {
    if (digits.length * 5.2 <= width) labels.push([digits, x, middle + 4, 9, fill]);
    return;
  }
  if ((digits.length + 1) * LETTER <= width - 2) labels.push([letter + digits, x, middle + 4, height < 13 ? 10 : 11, fill]);
  else if (height >= 24 && digits.length * 5.2 <= width) {
    labels.push([letter, x, middle - 2, 11, fill], [digits, x, middle + 9.5, 9, fill]);
  } else labels.push([letter, x, middle + 4, 10, fill]);
}

// The higher one of a rank's two stages is written in lower case, as in the text form; -1 if it has not exactly two.
export function secondStage(track, rank) {
  track.second ??= Array.from({ length: track.numRanks }, (_, each) => findSecond(track, each));
  return track.second[rank];
}

function findSecond(track, rank) {
  const stages = new Set();
  const from = track.firstPart[track.rankStart[rank]], to = track.firstPart[track.rankStart[rank + 1]];
  for (let part = from; part < to && stages.size < 3; part++) stages.add(track.stage[part]);
  return stages.size === 2 ? Math.max(...stages) : -1;
}

function drawLive(painter, layout, track, index) {
  const most = Math.max(...track.peak, 1), { cell, strip } = layout.row;
  for (let rank = 0; rank < track.numRanks; rank++) {
    const base = rowTop(layout, index, rank) + cell + layout.tracks[index].below + strip;
    if (!track.peak[rank]) continue;
    const points = stairs(layout, track, liveOf(track, rank), base, (strip - 1) / most);
    if (points.length) painter.area([[points[0][0], base], ...points, [points.at(-1)[0], base]], painter.theme.live);
  }
}
