// Where things are: rows, lanes, bands, gutters, and the stretch of time in view.

import { barAt, lanesOf, lineOf, rankOfBar } from "./lanes.mjs";

const AXIS = 24, HEAD = 26, GAP_TRACKS = 14, GAP_BAND = 18;
const BAND = { height: 56, gap: 6 }, SMALL_BAND = { height: 34, gap: 8 }; // of one rank, of every rank

// Heights by the number of rows: cells with letters, cells alone, stripes.  A `line` is one of a lane below the cells.
export function rowOf(numRows) {
  if (numRows <= 12) return { cell: 30, line: 16, strip: 9, gap: 6 };
  if (numRows <= 24) return { cell: 22, line: 12, strip: 6, gap: 4 };
  if (numRows <= 40) return { cell: 12, line: 6, strip: 3, gap: 2 };
  return { cell: Math.max(4, Math.floor(560 / numRows) - 1), line: 3, strip: 0, gap: 1 };
}

const WIDE = 560; // px: a drawing that is not narrower names its ranks in full and lists their numbers
const GUTTERS = { wide: [58, 84], narrow: [30, 10] };
const LABEL = 12, NAME = 22; // px: narrower cells show no microbatch of two digits, or no name such as A_F3
const LEAST = 8; // px: as long as cells are so wide for their letter, everything is shown at once
const STRETCH = 4; // how many times wider than its box a drawing may start

// `zoom` 1 is the drawing as it starts: as wide as its box, or wider where cells would be too narrow to read.
// `view`: {lanes: whether streams are shown, memory: "none", "rank" or "all", by: what cells are coloured by}.
export function layoutOf(tracks, width, zoom, scroll, view = {}) {
  const numRows = tracks.reduce((sum, track) => sum + track.numRanks, 0);
  const row = rowOf(numRows), isWide = width >= WIDE;
  if (view.memory === "all") row.strip = 0; // the bands show the same
  const [left, right] = isWide ? GUTTERS.wide : GUTTERS.narrow;
  const makespan = Math.max(...tracks.map((track) => track.makespan)) || 1;
  const shortest = Math.min(...tracks.map((track) => track.shortest));
  const room = Math.max(width - left - right, 60);
  const hasNames = tracks.some((track) => track.hasNames);
  const readable = ((hasNames ? NAME : LABEL) * makespan) / shortest;
  const isNarrow = ((hasNames ? NAME / 2 : LEAST) * makespan) / shortest > room;
  const start = isNarrow && readable <= STRETCH * room ? readable : room;
  const plot = Math.max(room, start * zoom);
  const layout = { width, left, right, room, plot, makespan, row, isWide, perTime: plot / makespan, tracks: [],
    scroll: Math.max(Math.min(scroll, plot - room), 0), // the box may still be where a wider drawing was
    by: view.by ?? "kind", showsLanes: Boolean(view.lanes), memory: view.memory ?? "none" };
  let y = AXIS;
  for (const track of tracks) {
    y += tracks.length > 1 ? HEAD : 0;
    const place = { top: y, ...lanesAt(track, row, view.lanes) };
    y += track.numRanks * place.pitch;
    place.rows = place.bottom = y - row.gap;
    if (layout.memory !== "none" && Math.max(...track.peak) > 0) {
      place.bands = { top: place.bottom + GAP_BAND, ...(layout.memory === "all" ? SMALL_BAND : BAND) };
      y = place.bands.top + (layout.memory === "all" ? track.numRanks : 1) * (place.bands.height + place.bands.gap);
      place.bottom = y - place.bands.gap;
    }
    layout.tracks.push(place);
    y += GAP_TRACKS;
  }
  layout.height = y - GAP_TRACKS + 2;
  layout.axis = AXIS;
  return layout;
}

// The layout of everything at the same scale, with nothing to scroll; at most `most` pixels wide.
export function wholeLayout(tracks, { plot, by, showsLanes, memory }, most = 8000) {
  const [left, right] = GUTTERS.wide, view = { by, lanes: showsLanes, memory };
  return layoutOf(tracks, Math.min(Math.max(Math.ceil(plot) + left + right, WIDE), most), 1, 0, view);
}

// The lanes of a track, each with its distance from the top of its row, and the height of a row with them.
function lanesAt(track, row, isShown) {
  let y = row.cell + 2;
  const lanes = (isShown ? lanesOf(track) : []).map(({ name, height }) => {
    const lane = { name, y, height: height * row.line };
    y += lane.height + 1;
    return lane;
  });
  const below = lanes.length ? y - row.cell : 0;
  return { lanes, below, pitch: row.cell + below + row.strip + row.gap };
}

export const rowTop = (layout, track, rank) => layout.tracks[track].top + rank * layout.tracks[track].pitch;

// Top and height of a span or bar; null if its stream is not shown.
export function placeOf(layout, track, index, id) {
  const found = lineOf(track, id), y = rowTop(layout, index, rankOfBar(track, id));
  if (!found) return [y, layout.row.cell];
  const lane = layout.tracks[index].lanes[found.lane];
  return lane ? [y + lane.y + found.line * layout.row.line, layout.row.line] : null;
}

export const xOf = (layout, time) => layout.left + time * layout.perTime - layout.scroll;

export const timeAt = (layout, x) =>
  Math.min(Math.max((x - layout.left + layout.scroll) / layout.perTime, 0), layout.makespan);

export const isOverview = (layout, track) => track.shortest * layout.perTime < 1.5;

// The span under a point, as [track, span]; null in a gap.
export function hit(layout, tracks, x, y) {
  const index = layout.tracks.findIndex(({ top, rows }) => y >= top && y < rows);
  if (index < 0 || x < layout.left || x > layout.left + layout.room) return null;
  const track = tracks[index], { top, pitch, lanes } = layout.tracks[index];
  const rank = Math.floor((y - top) / pitch), down = y - rowTop(layout, index, rank), time = timeAt(layout, x);
  const lane = lanes.findIndex((each) => down >= each.y && down < each.y + each.height);
  if (lane < 0 && down > layout.row.cell) return null;
  const lines = lane < 0 ? [] : lanesOf(track)[lane].ranks[rank];
  const line = lane < 0 ? 0 : Math.floor((down - lanes[lane].y) / layout.row.line);
  const span = lane < 0 ? spanAt(track, rank, time) : lines[line] ? barAt(track, lines[line], time) : -1;
  return span < 0 ? null : [index, span];
}

// The span of a rank that covers a time; where several do, the last one to start; -1 if none.
export function spanAt(track, rank, time) {
  let low = track.rankStart[rank], high = track.rankStart[rank + 1];
  const first = low;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (track.start[middle] <= time) low = middle + 1;
    else high = middle;
  }
  for (let span = low - 1; span >= Math.max(first, low - 8); span--) if (track.end[span] > time) return span;
  return -1;
}

// The range of a rank's spans that touch the view: [first, last).
export function inView(layout, track, rank) {
  const from = timeAt(layout, layout.left), to = timeAt(layout, layout.left + layout.room);
  let first = track.rankStart[rank], last = track.rankStart[rank + 1];
  if (layout.plot > layout.room) {
    const at = spanAt(track, rank, from);
    if (at >= 0) first = at;
    else while (first < last && track.end[first] < from) first++;
    while (last > first && track.start[last - 1] > to) last--;
  }
  return [first, last];
}
