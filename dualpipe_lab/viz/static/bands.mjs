// The memory bands below the rows: live activations of one rank or of all, with a scale, in number or in bytes.

import { xOf } from "./layout.mjs";
import { axisStep } from "./scale.mjs";
import { liveActivations, liveOf } from "./track.mjs";

const BYTES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];

// What a rank holds over time: {times, counts, peak}, in bytes where the size of an activation is known.
export function heldBy(track, rank) {
  if (track.bytes == null) return liveOf(track, rank);
  if (track.heldAt !== track.live) Object.assign(track, { held: [], heldAt: track.live });
  const sizeOf = (stage) => (Array.isArray(track.bytes) ? track.bytes[stage] : track.bytes);
  return (track.held[rank] ??= liveActivations(track, rank, sizeOf));
}

function heldNow({ times, counts }, time) {
  let low = 0, high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= time) low = middle + 1;
    else high = middle;
  }
  return counts[Math.max(low - 1, 0)];
}

// [divisor, unit] of a track's memory, by its largest peak.
function memoryUnit(track) {
  if (track.bytes == null) return [1, "live activations"];
  const most = mostHeld(track);
  return BYTES.find(([divisor]) => most >= divisor) ?? BYTES.at(-1);
}

// The top of the scale: the most that a rank holds, or the activations for which it has room (`track.room`), if known.
const mostHeld = (track) =>
  Math.max(...track.peak.map((peak, rank) => (track.bytes == null ? peak : heldBy(track, rank).peak)), track.room ?? 0, 1);

const shorten = (value) => String(Number(value.toFixed(value < 10 ? 2 : 1)));

export function memoryText(track, rank, time) {
  const [divisor, unit] = memoryUnit(track), held = heldBy(track, rank);
  return `rank ${rank} holds ${shorten(heldNow(held, time) / divisor)} of at most ${shorten(held.peak / divisor)} ${unit}`;
}

const ranksOf = (layout, track, view, index) => {
  if (layout.memory === "all") return Array.from({ length: track.numRanks }, (_, rank) => rank);
  return [view.rank?.[0] === index ? view.rank[1] : 0];
};

// Scale and names; the areas follow in two strengths, before and after the playhead.
export function drawBandScales(painter, layout, tracks, view) {
  const { theme } = painter, { left, room } = layout;
  tracks.forEach((track, index) => {
    const { bands } = layout.tracks[index];
    if (!bands) return;
    const [divisor, unit] = memoryUnit(track), most = mostHeld(track) / divisor;
    painter.text(track.bytes == null ? unit : `live activations in ${unit}`, left, bands.top - 5, { size: 11, fill: theme.muted });
    ranksOf(layout, track, view, index).forEach((rank, row) => {
      const top = bands.top + row * (bands.height + bands.gap), step = axisStep(most, bands.height / 18), lines = [];
      painter.rect(left, top, room, bands.height, theme.track);
      for (let value = 0; value <= most * 1.0001; value += step) {
        const y = top + bands.height - (value / most) * (bands.height - 4);
        lines.push([left, Math.round(y) + 0.5, left + room, Math.round(y) + 0.5]);
        if (value) painter.text(shorten(value), left - 4, y + 4, { size: 10, fill: theme.muted, align: "right" });
      }
      painter.lines(lines, theme.grid);
      const isNamed = layout.isWide || layout.memory === "all";
      if (isNamed) painter.text(layout.isWide ? `rank ${rank}` : String(rank), 0, top + bands.height - 2, { size: 11 });
      if (!layout.isWide) return;
      const held = heldBy(track, rank), now = view.time >= layout.makespan ? held.peak : heldNow(held, view.time);
      const word = view.time >= layout.makespan ? "peak " : "now ";
      painter.text(word + shorten(now / divisor), left + room + 6, top + bands.height / 2 + 4, { size: 11, fill: theme.muted });
    });
  });
}

export function drawBands(painter, layout, tracks, view) {
  tracks.forEach((track, index) => {
    const { bands } = layout.tracks[index];
    if (!bands) return;
    const most = mostHeld(track);
    ranksOf(layout, track, view, index).forEach((rank, row) => {
      const base = bands.top + row * (bands.height + bands.gap) + bands.height;
      const points = stairs(layout, track, heldBy(track, rank), base, (bands.height - 4) / most);
      if (points.length) painter.area([[points[0][0], base], ...points, [points.at(-1)[0], base]], painter.theme.live);
      if (track.room == null) return;
      const y = Math.round(base - (track.room / most) * (bands.height - 4)) + 0.5;
      painter.lines([[layout.left, y, layout.left + layout.room, y]], painter.theme.accent, 1.5);
    });
  });
}

// The outline of a step function; steps within a pixel are drawn as one, at the highest of them.
export function stairs(layout, track, { times, counts }, base, perUnit) {
  const points = [];
  let lastX = -Infinity, highest = 0;
  for (let i = 0; i < times.length; i++) {
    const x = xOf(layout, times[i]), next = xOf(layout, times[i + 1] ?? track.makespan);
    if (next < layout.left || x > layout.left + layout.room) continue;
    highest = Math.max(highest, counts[i]);
    if (next - lastX < 0.7 && i + 1 < times.length) continue;
    const y = base - highest * perUnit;
    points.push([Math.max(x, lastX), y], [next, y]);
    [lastX, highest] = [next, 0];
  }
  return points;
}
