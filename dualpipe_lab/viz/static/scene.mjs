// A whole picture of one to three tracks at one time: what the screen, the SVG file and the PNG file show.

import { drawBandScales, drawBands } from "./bands.mjs";
import { drawCell, drawRows, secondStage } from "./cells.mjs";
import { rowTop, xOf } from "./layout.mjs";
import { drawMarks, drawStops, outline } from "./marks.mjs";
import { drawMessages } from "./messages.mjs";
import { axisStep, brief, number, percent, unitOf } from "./scale.mjs";

// `rows` paints what drawRows paints; the screen passes a function that copies it from a stored picture.
export function drawScene(painter, layout, tracks, view, rows = () => drawRows(painter, layout, tracks)) {
  drawAxis(painter, layout, tracks);
  drawGutters(painter, layout, tracks, view);
  drawBandScales(painter, layout, tracks, view);
  const { left, room, height } = layout;
  const end = view.time < layout.makespan ? xOf(layout, view.time) : Infinity;
  const now = Math.min(Math.max(end, left), left + room);
  const faint = view.path ? 0.3 : 1, bands = () => drawBands(painter, layout, tracks, view);
  if (now > left) painter.clip(left, 0, now - left, height, rows, faint);
  if (now < left + room) painter.clip(now, 0, left + room - now, height, rows, 0.28 * faint);
  if (now > left) painter.clip(left, 0, now - left, height, bands);
  if (now < left + room) painter.clip(now, 0, left + room - now, height, bands, 0.28);
  painter.clip(left, 0, room, height, () => {
    drawStops(painter, layout, tracks);
    if (view.path) drawPath(painter, layout, tracks, view);
    drawMessages(painter, layout, tracks, view);
    drawHover(painter, layout, tracks, view);
    if (view.marks) drawMarks(painter, layout, tracks, view.marks);
  });
  if (view.time < layout.makespan) drawPlayhead(painter, layout, view.time);
}

function drawAxis(painter, layout, tracks) {
  const { left, room, makespan, perTime } = layout, { theme } = painter;
  const [divisor, unit] = unitOf(tracks[0].unit, makespan);
  const step = Math.max(axisStep((makespan * room) / layout.plot / divisor, room / 56) * divisor, 1); // ticks are whole
  const bottom = layout.tracks.at(-1).bottom, grid = [];
  for (let time = 0; time <= makespan * 1.0001; time += step) {
    const x = left + time * perTime - layout.scroll;
    if (x < left - 1 || x > left + room + 1) continue;
    grid.push([Math.round(x) + 0.5, 18, Math.round(x) + 0.5, bottom]);
    painter.text(number(Math.round(time), divisor), x, 12, { size: 11, fill: theme.muted, align: "center" });
  }
  painter.lines(grid, theme.grid);
  if (layout.isWide) painter.text(unit, left - 8, 12, { size: 11, fill: theme.muted, align: "right" });
}

function drawGutters(painter, layout, tracks, view) {
  const { theme } = painter, { row, left } = layout;
  tracks.forEach((track, index) => {
    const every = Math.max(1, Math.ceil(13 / layout.tracks[index].pitch));
    const [divisor] = unitOf(track.unit, layout.makespan), { top } = layout.tracks[index];
    if (tracks.length > 1) {
      painter.text(track.name, 2, top - 8, { size: 12.5, weight: 600 });
      painter.text(headline(track), layout.width - 4, top - 8, { size: 11, fill: theme.muted, align: "right" });
    }
    const columns = [[left + layout.room + 42, (rank) => brief(track.makespan - track.busy[rank], divisor)],
      [left + layout.room + 78, (rank) => String(track.peak[rank])]];
    if (layout.isWide && !index) ["idle", "peak"].forEach((word, i) => {
      painter.text(word, columns[i][0], 12, { size: 11, fill: theme.muted, align: "right" });
    });
    for (let rank = 0; rank < track.numRanks; rank += every) {
      const y = rowTop(layout, index, rank) + Math.max(row.cell / 2 + 4, 8);
      const isHere = view.rank && view.rank[0] === index && view.rank[1] === rank;
      const name = layout.isWide ? `rank ${rank}` : String(rank);
      painter.text(name, left - 8, y, { size: 12, align: "right", weight: isHere ? 700 : 400 });
      if (every === 1) drawLaneNames(painter, layout, index, rank);
      if (!layout.isWide) continue;
      for (const [x, value] of isScored(track) ? columns : []) painter.text(value(rank), x, y, { size: 11, fill: theme.muted, align: "right" });
    }
  });
}

// In short where the gutter is narrow: "comm." and "c".
function drawLaneNames(painter, layout, index, rank) {
  for (const { name, y, height } of layout.tracks[index].lanes) {
    if (height < 11) continue;
    const words = layout.isWide ? (name.length > 8 ? `${name.slice(0, 4)}.` : name) : name[0];
    const place = rowTop(layout, index, rank) + y + height / 2 + 4;
    painter.text(words, layout.left - 8, place, { size: 10.5, fill: painter.theme.muted, align: "right" });
  }
}

// Only what runs has a score: `runs` of an editor's draft is false if it cannot, null until that is known.
export const isScored = (track) => track.runs !== false && track.runs !== null;

export function headline(track) {
  const [divisor, unit] = unitOf(track.unit, track.makespan);
  if (!isScored(track)) return `${track.source} · ${track.runs === null ? "not judged" : "does not run"}`;
  return `${track.source} · ${number(track.makespan, divisor)} ${unit} · bubble ${percent(track.bubble)}`;
}

// The cells of a critical path again, at full strength and outlined.
function drawPath(painter, layout, tracks, view) {
  const { index, spans } = view.path, track = tracks[index], labels = [];
  for (const span of spans) {
    const rank = track.rankOf[span];
    if (span < track.numWork) drawCell(painter, layout, track, index, span, labels, secondStage(track, rank));
    outline(painter, layout, track, index, span, painter.theme.accent, 1.6);
  }
  for (const [text, x, y, size, fill] of labels) painter.text(text, x, y, { size, fill, align: "center" });
}

function drawHover(painter, layout, tracks, view) {
  for (const [index, span] of view.marked ?? []) {
    outline(painter, layout, tracks[index], index, span, painter.theme.border, 2);
  }
}

function drawPlayhead(painter, layout, time) {
  const x = Math.round(xOf(layout, time)) + 0.5, { theme } = painter;
  if (x < layout.left - 1 || x > layout.left + layout.room + 1) return;
  painter.lines([[x, 16, x, layout.tracks.at(-1).bottom]], theme.accent, 1.5);
  painter.area([[x - 5, 13], [x + 5, 13], [x, 20]], theme.accent);
}
