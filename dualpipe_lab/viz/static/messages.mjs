// Messages: arrows from the end of the work that made them to where they can be used, and dots while they travel.

import { rowTop, xOf } from "./layout.mjs";

export function drawMessages(painter, layout, tracks, view) {
  const isPlaying = view.time < layout.makespan, isOne = (index) => view.path?.index === index || view.hover?.[0] === index;
  tracks.forEach((track, index) => {
    if (!isPlaying && !view.allMessages && !isOne(index)) return;
    for (const message of track.messages) {
      const isFlying = view.time < layout.makespan && message.sent <= view.time && view.time < message.arrived;
      const isMarked = view.path?.index === index && view.path.messages.has(message);
      const touches = view.hover?.[0] === index && (message.to === view.hover[1] || message.from === view.hover[1]);
      const isShown = view.allMessages && message.sent <= view.time;
      if (!isFlying && !isMarked && !touches && !isShown) continue;
      const line = arrow(layout, index, message);
      if (Math.max(line[0], line[2]) < layout.left || Math.min(line[0], line[2]) > layout.left + layout.room) continue;
      const colour = isMarked ? painter.theme.accent : colourOf(painter.theme, track, message);
      paintArrow(painter, line, colour, isMarked || touches ? 1.8 : 1);
      if (isFlying) paintDot(painter, line, message, view.time, colour);
    }
  });
}

function colourOf(theme, track, message) {
  if (message.from < 0) return theme.text;
  const label = message.label.replace(/\d/g, "");
  return label === "F" ? theme.forward : theme.backward;
}

// From the edge of the sender's cells to the edge of the receiver's.
function arrow(layout, index, message) {
  const { cell } = layout.row, { below } = layout.tracks[index], down = message.dst > message.src;
  const y1 = rowTop(layout, index, message.src) + (down ? cell + below - 3 : 3);
  const y2 = rowTop(layout, index, message.dst) + (down ? 2 : cell - 2);
  return [xOf(layout, message.sent), y1, xOf(layout, message.arrived), y2];
}

export function paintArrow(painter, [x1, y1, x2, y2], colour, width) {
  const angle = Math.atan2(y2 - y1, x2 - x1), size = 4 + width;
  const wing = (turn) => [x2 - size * Math.cos(angle + turn), y2 - size * Math.sin(angle + turn)];
  painter.lines([[x1, y1, x2, y2]], colour, width);
  painter.area([[x2, y2], wing(0.45), wing(-0.45)], colour);
}

function paintDot(painter, [x1, y1, x2, y2], message, time, colour) {
  const share = (time - message.left) / (message.arrived - message.left || 1);
  const at = Math.min(Math.max(share, 0), 1); // a message that queues waits at its sender
  const x = x1 + at * (x2 - x1), y = y1 + at * (y2 - y1);
  painter.area(Array.from({ length: 12 }, (_, i) => [x + 4 * Math.cos(i * 0.5236), y + 4 * Math.sin(i * 0.5236)]), colour);
}
