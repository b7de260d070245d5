// The overview: where cells are thinner than a pixel or two, what share of each stretch of time is which work.

import { colourOfBar, colourOfPart } from "./colours.mjs";
import { KINDS } from "./program.mjs";
import { CELLS } from "./theme.mjs";
import { inView, rowTop, timeAt } from "./layout.mjs";
import { isWait } from "./track.mjs";

const BUCKET = 4; // px: less would show the beat of cells and pixels
const LEVELS = 4; // heights of a summed stretch, so that neighbours are often equal and merge
const MOST_COLOURS = 9; // three bits each

export function drawOverview(painter, layout, track, index) {
  const count = Math.ceil(Math.min(layout.room, layout.plot) / BUCKET);
  const shares = new Float32Array(count * MOST_COLOURS);
  const colours = layout.by === "kind" ? KINDS.map((kind) => CELLS[kind][0]) : [];
  const unit = layout.row.cell / LEVELS;
  for (let rank = 0; rank < track.numRanks; rank++) {
    shares.fill(0);
    addShares(layout, track, rank, shares, count, colours);
    const bottom = rowTop(layout, index, rank) + layout.row.cell;
    let from = 0, levels = levelsOf(shares, 0);
    for (let bucket = 1; bucket <= count; bucket++) {
      const next = bucket < count ? levelsOf(shares, bucket) : -1;
      if (next === levels) continue;
      paintStretch(painter, levels, layout.left + from * BUCKET, bottom, (bucket - from) * BUCKET, unit, colours);
      [from, levels] = [bucket, next];
    }
  }
}

// `colours`: those met so far; their places are those of the shares.
function addShares(layout, track, rank, shares, count, colours) {
  const from = timeAt(layout, layout.left), perTime = layout.perTime / BUCKET;
  const [first, last] = inView(layout, track, rank);
  for (let span = first; span < last; span++) {
    if (isWait(track, span)) continue;
    const start = Math.max((track.start[span] - from) * perTime, 0);
    const end = Math.min((track.end[span] - from) * perTime, count);
    const parts = Math.max(track.firstPart[span + 1] - track.firstPart[span], 1);
    for (let i = 0; i < parts; i++) {
      const part = track.firstPart[span] + i, isPart = part < track.firstPart[span + 1];
      const place = placeIn(colours, (isPart ? colourOfPart(track, part, layout.by) : colourOfBar(track, span, layout.by))[0]);
      for (let bucket = Math.floor(start); bucket < end; bucket++) {
        shares[bucket * MOST_COLOURS + place] += (Math.min(end, bucket + 1) - Math.max(start, bucket)) / parts;
      }
    }
  }
}

function placeIn(colours, fill) {
  const found = colours.indexOf(fill);
  return found >= 0 ? found : colours.push(fill) - 1;
}

// Whole levels of every colour, three bits each; together as high as the busy share.
function levelsOf(shares, bucket) {
  let total = 0, reached = 0, levels = 0;
  for (let colour = 0; colour < MOST_COLOURS; colour++) {
    total += shares[bucket * MOST_COLOURS + colour];
    const level = Math.round(total * LEVELS) - reached;
    reached += level;
    levels |= level << (3 * colour);
  }
  return levels;
}

function paintStretch(painter, levels, x, bottom, width, unit, colours) {
  let y = bottom;
  for (let colour = 0; colour < MOST_COLOURS; colour++) {
    const height = ((levels >> (3 * colour)) & 7) * unit;
    if (height) painter.rect(x, (y -= height), width, height, colours[colour]);
  }
}
