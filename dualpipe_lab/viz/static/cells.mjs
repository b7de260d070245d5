// Everything that a rank's row shows: idle time, cells with their letters, live activations.

import { CELLS } from "./theme.mjs";
import { KINDS } from "./program.mjs";
import { inView, isOverview, rowTop, xOf } from "./layout.mjs";
import { drawOverview } from "./overview.mjs";
import { isWait } from "./track.mjs";

const LETTER = 6.3; // px, width of a letter at size 11

export function drawRows(painter, layout, tracks) {
  let cells = 0;
  tracks.forEach((track, index) => {
    for (let rank = 0; rank < track.numRanks; rank++) drawIdle(painter, layout, track, rowTop(layout, index, rank));
    if (isOverview(layout, track)) drawOverview(painter, layout, track, index);
    else cells += drawCells(painter, layout, track, index);
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

// Draw one span; its letters are collected in `labels`.  Returns the number of actions drawn.
export function drawCell(painter, layout, track, index, span, labels, lower) {
  const y = rowTop(layout, index, track.rankOf[span]), height = layout.row.cell;
  const full = (track.end[span] - track.start[span]) * layout.perTime;
  if (full <= 0) return 0;
  const gap = full > 4 ? 0.5 : 0;
  const x = xOf(layout, track.start[span]) + gap, width = full - 2 * gap;
  const first = track.firstPart[span], parts = track.firstPart[span + 1] - first;
  if (!parts) return drawWord(painter, track, span, x, y, width, height, labels);
  const share = height / parts;
  for (let i = 0; i < parts; i++) {
    const kind = KINDS[track.kind[first + i]], top = y + i * share;
    painter.rect(x, top, width, share, CELLS[kind][0]);
    const isSecond = track.stage[first + i] === lower;
    if (isSecond && height > 10) painter.rect(x, top + share - 2.5, width, 2.5, "rgba(0,0,0,.45)");
    const letter = isSecond ? kind.toLowerCase() : kind;
    label(labels, letter, track.microbatch[first + i], x + width / 2, top, width, share, CELLS[kind][1]);
  }
  if (parts > 1 && width > 3) painter.frame(x + 0.5, y + 0.5, width - 1, height - 1, painter.theme.border, 1.2);
  return parts;
}

function drawWord(painter, track, span, x, y, width, height, labels) {
  const word = track.words.get(span);
  if (isWait(track, span)) {
    if (width > 3) painter.frame(x + 0.5, y + 0.5, width - 1, height - 1, painter.theme.line, 1, [2, 2]);
    return 0;
  }
  const [fill, ink] = CELLS[word] ?? CELLS.other, text = track.labels[span] || word;
  painter.rect(x, y, width, height, fill);
  if (text.length * LETTER + 4 < width && height >= 12) labels.push([text, x + width / 2, y + height / 2 + 4, 11, ink]);
  return 1;
}

// The letter and the microbatch: side by side, one above the other, or the letter alone, as they fit.
function label(labels, letter, microbatch, x, y, width, height, fill) {
  const digits = String(microbatch), middle = y + height / 2;
  if (height < 10 || width < 6) return;
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
    const { times, counts, peak } = track.live[rank], base = rowTop(layout, index, rank) + cell + strip;
    if (!peak) continue;
    const points = [];
    let lastX = -Infinity;
    for (let i = 0; i < times.length; i++) {
      const x = xOf(layout, times[i]), next = xOf(layout, times[i + 1] ?? track.makespan);
      if (next < layout.left || x > layout.left + layout.room || (next - lastX < 0.7 && i + 1 < times.length)) continue;
      const y = base - (counts[i] / most) * (strip - 1);
      points.push([x, y], [next, y]);
      lastX = next;
    }
    if (points.length) painter.area([[points[0][0], base], ...points, [points.at(-1)[0], base]], painter.theme.live);
  }
}
