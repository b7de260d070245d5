// Where things are: rows, gutters, and the stretch of time in view.

const AXIS = 24, HEAD = 26, GAP_TRACKS = 14;

// Heights by the number of rows: cells with letters, cells alone, stripes.
export function rowOf(numRows) {
  if (numRows <= 12) return { cell: 30, strip: 9, gap: 6 };
  if (numRows <= 24) return { cell: 22, strip: 6, gap: 4 };
  if (numRows <= 40) return { cell: 12, strip: 3, gap: 2 };
  return { cell: Math.max(4, Math.floor(560 / numRows) - 1), strip: 0, gap: 1 };
}

const WIDE = 560; // px: a drawing that is not narrower names its ranks in full and lists their numbers
const GUTTERS = { wide: [58, 84], narrow: [30, 10] };
const LABEL = 12; // px: narrower cells show no microbatch of two digits
const LEAST = 8; // px: as long as cells are so wide for their letter, everything is shown at once
const STRETCH = 4; // how many times wider than its box a drawing may start

// `zoom` 1 is the drawing as it starts: as wide as its box, or wider where cells would be too narrow to read.
export function layoutOf(tracks, width, zoom, scroll) {
  const numRows = tracks.reduce((sum, track) => sum + track.numRanks, 0);
  const row = rowOf(numRows), isWide = width >= WIDE;
  const [left, right] = isWide ? GUTTERS.wide : GUTTERS.narrow;
  const makespan = Math.max(...tracks.map((track) => track.makespan)) || 1;
  const shortest = Math.min(...tracks.map((track) => track.shortest));
  const room = Math.max(width - left - right, 60);
  const readable = (LABEL * makespan) / shortest;
  const isNarrow = (LEAST * makespan) / shortest > room;
  const start = isNarrow && readable <= STRETCH * room ? readable : room;
  const plot = Math.max(room, start * zoom);
  const layout = { width, left, right, room, plot, makespan, row, isWide, scroll, perTime: plot / makespan, tracks: [] };
  let y = AXIS;
  for (const track of tracks) {
    y += tracks.length > 1 ? HEAD : 0;
    layout.tracks.push({ top: y, bottom: y + track.numRanks * pitch(row) - row.gap });
    y += track.numRanks * pitch(row) + GAP_TRACKS;
  }
  layout.height = y - GAP_TRACKS + 2;
  layout.axis = AXIS;
  return layout;
}

// The layout of everything at the same scale, with nothing to scroll; at most `most` pixels wide.
export function wholeLayout(tracks, { plot }, most = 8000) {
  const [left, right] = GUTTERS.wide;
  return layoutOf(tracks, Math.min(Math.max(Math.ceil(plot) + left + right, WIDE), most), 1, 0);
}

const pitch = (row) => row.cell + row.strip + row.gap;

export const rowTop = (layout, track, rank) => layout.tracks[track].top + rank * pitch(layout.row);

export const xOf = (layout, time) => layout.left + time * layout.perTime - layout.scroll;

export const timeAt = (layout, x) =>
  Math.min(Math.max((x - layout.left + layout.scroll) / layout.perTime, 0), layout.makespan);

export const isOverview = (layout, track) => track.shortest * layout.perTime < 1.5;

// The span under a point, as [track, span]; null in a gap.
export function hit(layout, tracks, x, y) {
  const index = layout.tracks.findIndex(({ top, bottom }) => y >= top && y < bottom);
  if (index < 0 || x < layout.left || x > layout.left + layout.room) return null;
  const track = tracks[index], rank = Math.floor((y - layout.tracks[index].top) / pitch(layout.row));
  if (y - rowTop(layout, index, rank) > layout.row.cell) return null;
  const span = spanAt(track, rank, timeAt(layout, x));
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
