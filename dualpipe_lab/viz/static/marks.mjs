// What is marked on top of the rows: outlines, where a draft comes to a halt, and what an editor points at.
//
// `marks`, of the first track: {chosen, named: spans, cursor: span, drop: {rank, time}, circle: [[waiting, needed], ...]}, all
// optional.

import { endOf, startOf } from "./lanes.mjs";
import { placeOf, rowTop, xOf } from "./layout.mjs";
import { paintArrow } from "./messages.mjs";

export function outline(painter, layout, track, index, span, stroke, width) {
  const place = placeOf(layout, track, index, span), x = xOf(layout, startOf(track, span));
  if (!place) return;
  const length = Math.max((endOf(track, span) - startOf(track, span)) * layout.perTime, 1);
  painter.frame(x + 0.5, place[0] - 0.5, Math.max(length - 1, 0.5), place[1] + 1, stroke, width);
}

// What never runs lies under a veil, behind a line.
export function drawStops(painter, layout, tracks) {
  tracks.forEach((track, index) => {
    if (track.stop == null) return;
    const { theme } = painter, { top, rows } = layout.tracks[index], x = Math.round(xOf(layout, track.stop)) + 0.5;
    const right = layout.left + layout.room;
    if (x < right) painter.rect(x, top, right - x, rows - top, `${theme.page}99`);
    painter.lines([[x, top - 4, x, rows + 2]], theme.accent, 2);
    if (right - x < 70) return;
    painter.rect(x + 3, top, 62, 15, theme.page);
    painter.text("never runs", x + 6, top + 11, { size: 11, fill: theme.accent, weight: 600 });
  });
}

export function drawMarks(painter, layout, tracks, { chosen = [], named = [], cursor = -1, drop = null, circle = [] }) {
  const { theme } = painter, [track] = tracks;
  for (const span of named) outline(painter, layout, track, 0, span, theme.accent, 1.5);
  for (const span of chosen) outline(painter, layout, track, 0, span, theme.accent, 2.5);
  if (cursor >= 0) outline(painter, layout, track, 0, cursor, theme.border, 2);
  for (const [waiting, needed] of circle) {
    for (const span of [waiting, needed]) outline(painter, layout, track, 0, span, theme.accent, 2);
    paintArrow(painter, [...middleOf(layout, track, waiting), ...middleOf(layout, track, needed)], theme.accent, 2);
  }
  if (!drop) return;
  const x = Math.round(xOf(layout, drop.time)) + 0.5, y = rowTop(layout, 0, drop.rank);
  painter.lines([[x, y - 3, x, y + layout.row.cell + 3]], theme.accent, 3);
}

function middleOf(layout, track, span) {
  const [y, height] = placeOf(layout, track, 0, span);
  return [xOf(layout, (startOf(track, span) + endOf(track, span)) / 2), y + height / 2];
}
