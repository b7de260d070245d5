// Ranks as cards with what they hold, and the messages of a step as arrows with what they carry.

import { NUMBERED } from "./theme.mjs";

const CHIP = 20, HEADING = 20, PAD = 7, SPACE = 3; // px

const widthOf = (label) => Math.max(24, String(label).length * 6.6 + 10);

// Sizes of a card, and where the cards are: on a ring up to 8 ranks, in a grid beyond.  Cards get narrower (and higher)
// until the ring fits.
export function stepsLayout(spec, width) {
  const states = [spec.start, ...spec.steps.map((step) => step.holds)].flat();
  const most = Math.max(...states.map((held) => held.length), 1);
  const chip = Math.max(24, ...states.flat().map(([label]) => widthOf(label)));
  let columns = most <= 4 ? most : Math.ceil(most / 2);
  while (columns > 1 && leastWidth(spec.ranks, cardOf(columns, chip, most)) > width) columns--;
  columns = Math.ceil(most / Math.ceil(most / columns)); // 2 and 2 rather than 3 and 1
  const card = cardOf(columns, chip, most);
  return { card, ...(spec.ranks <= 8 ? ring(spec.ranks, card, width) : rows(spec.ranks, card, width)) };
}

const cardOf = (columns, chip, most) => ({
  columns, chip, width: Math.max(62, columns * (chip + SPACE) - SPACE + 2 * PAD),
  height: HEADING + Math.ceil(most / columns) * (CHIP + SPACE) + PAD,
});

function leastWidth(numRanks, card) {
  if (numRanks > 8) return Math.ceil(Math.sqrt(numRanks)) * (card.width + 34);
  return [0, card.width, 2 * card.width + 80][numRanks] ?? (numRanks > 4 ? 3.9 : 3.2) * card.width + 8;
}

function ring(numRanks, card, room) {
  const isRound = numRanks > 4;
  const width = Math.max(room, leastWidth(numRanks, card));
  const rx = Math.min((width - card.width) / 2 - 4, 120 + (isRound ? 1.7 : 1.2) * card.width);
  const ry = numRanks < 3 ? 0 : isRound ? 1.42 * (card.height + 16) : card.height + 26;
  const height = 2 * ry + card.height + 16;
  const turn = numRanks === 2 ? Math.PI : -Math.PI / 2; // two ranks stand side by side
  const places = Array.from({ length: numRanks }, (_, rank) => {
    const angle = turn + (2 * Math.PI * rank) / numRanks;
    return numRanks === 1 ? [width / 2, height / 2] : [width / 2 + rx * Math.cos(angle), height / 2 + ry * Math.sin(angle)];
  });
  return { width, height, places };
}

function rows(numRanks, card, room) {
  const columns = Math.ceil(Math.sqrt(numRanks)), gap = 34;
  const width = Math.max(room, leastWidth(numRanks, card)), left = (width - columns * (card.width + gap) + gap) / 2;
  const places = Array.from({ length: numRanks }, (_, rank) => [
    left + (rank % columns) * (card.width + gap) + card.width / 2,
    8 + Math.floor(rank / columns) * (card.height + gap) + card.height / 2,
  ]);
  return { width, height: Math.ceil(numRanks / columns) * (card.height + gap) - gap + 16, places };
}

export function drawSteps(painter, layout, spec, time) {
  const done = Math.floor(time), share = time - done, step = spec.steps[done];
  const held = done ? spec.steps[done - 1].holds : spec.start, before = done > 1 ? spec.steps[done - 2].holds : spec.start;
  for (const [src, dst] of step?.messages ?? []) drawLine(painter, layout, src, dst, share > 0);
  layout.places.forEach((place, rank) => {
    const isNew = (index) => done > 0 && share === 0 && before[rank][index]?.[0] !== held[rank][index][0];
    drawCard(painter, layout.card, place, rank, held[rank], isNew);
  });
  if (share > 0) for (const message of step.messages) drawFlight(painter, layout, message, share);
}

function drawCard(painter, card, [x, y], rank, held, isNew) {
  const { theme } = painter, left = x - card.width / 2, top = y - card.height / 2;
  painter.rect(left, top, card.width, card.height, theme.track);
  painter.frame(left + 0.5, top + 0.5, card.width - 1, card.height - 1, theme.line);
  painter.text(`rank ${rank}`, left + PAD, top + 14, { size: 11, fill: theme.muted, weight: 600 });
  held.forEach(([label, owner], index) => {
    const column = index % card.columns, row = Math.floor(index / card.columns);
    const place = [left + PAD + column * (card.chip + SPACE), top + HEADING + row * (CHIP + SPACE)];
    drawChip(painter, ...place, card.chip, label, owner, isNew(index));
  });
}

function drawChip(painter, x, y, width, label, owner, isOutlined) {
  const [fill, ink] = owner == null ? [painter.theme.grid, painter.theme.text] : NUMBERED[owner % NUMBERED.length];
  painter.rect(x, y, width, CHIP, fill);
  painter.text(label, x + width / 2, y + 14, { size: 11, fill: ink, align: "center" });
  if (isOutlined) painter.frame(x, y, width, CHIP, painter.theme.border, 2);
}

// From the edge of one card to the edge of the other, beside the line that comes back.
function ends({ places, card }, src, dst) {
  const [x1, y1] = places[src], [x2, y2] = places[dst], length = Math.hypot(x2 - x1, y2 - y1) || 1;
  const [ux, uy] = [(x2 - x1) / length, (y2 - y1) / length], [sx, sy] = [-uy * 6, ux * 6];
  const edge = Math.min(card.width / 2 / Math.max(Math.abs(ux), 1e-9), card.height / 2 / Math.max(Math.abs(uy), 1e-9)) + 3;
  const at = Math.min(edge, length / 2);
  return [x1 + ux * at + sx, y1 + uy * at + sy, x2 - ux * at + sx, y2 - uy * at + sy];
}

function drawLine(painter, layout, src, dst, isBusy) {
  const [x1, y1, x2, y2] = ends(layout, src, dst), angle = Math.atan2(y2 - y1, x2 - x1);
  const colour = isBusy ? painter.theme.muted : painter.theme.line;
  const wing = (turn) => [x2 - 8 * Math.cos(angle + turn), y2 - 8 * Math.sin(angle + turn)];
  painter.lines([[x1, y1, x2, y2]], colour, 1.5);
  painter.area([[x2, y2], wing(0.4), wing(-0.4)], colour);
}

function drawFlight(painter, layout, [src, dst, label, owner], share) {
  const [x1, y1, x2, y2] = ends(layout, src, dst), eased = share * share * (3 - 2 * share), width = widthOf(label);
  const [x, y] = [x1 + eased * (x2 - x1), y1 + eased * (y2 - y1)];
  drawChip(painter, x - width / 2, y - CHIP / 2, width, label, owner, true);
}
