// Lower bounds on the time of a step; the page's half of dualpipe_lab/pp/optimise/bounds.py, where the proof stands.
//
// In: flat arrays of a valid schedule, whole-number costs, a limit of activations.  Out: {ticks, reason, rank}.

import { stageTicks } from "./simulate.mjs";
import { routesOf } from "./schedule-routes.mjs";

// The largest bound of all ranks, by "work" or by "memory"; `inFlight` as for `check`.
export function lowerBound(flat, costs, inFlight = null) {
  if ([inFlight].flat().some((limit) => limit !== null && limit < 1)) {
    throw new Error(`with a limit of ${inFlight} activations no forward can run; allow at least 1 on every rank`);
  }
  let best = null;
  boundCells(flat, costs).forEach((cells, rank) => {
    const number = sumOfCells(cells, () => 1);
    const limit = Math.min((Array.isArray(inFlight) ? inFlight[rank] : inFlight) ?? number, number);
    const work = { over: workBound(cells, limit, costs.overlap), under: 1, reason: "work", rank };
    const held = sumOfCells(cells, ({ work: { released }, back }) => released[0] + back + released[2]);
    const head = leastOf(cells, (cell) => cell.head);
    const memory = { over: head * limit + held, under: limit, reason: "memory", rank };
    for (const bound of [work, memory]) if (best === null || isLarger(bound, best)) best = bound;
  });
  return { ticks: Math.ceil(best.over / best.under), reason: best.reason, rank: best.rank };
}

// Fractions are compared exactly: equal ones keep the first rank.
const isLarger = (a, b) => BigInt(a.over) * BigInt(b.under) > BigInt(b.over) * BigInt(a.under);

const leastOf = (items, of) => items.reduce((found, item) => Math.min(found, of(item)), Infinity);
const mostOf = (items, of) => items.reduce((found, item) => Math.max(found, of(item)), -Infinity);
const sumOfCells = (cells, of) => cells.reduce((sum, cell) => sum + cell.number * of(cell), 0);

// The smallest value over `apart`: how many forwards, or backwards, cannot be in a pair.
function workBound(cells, limit, overlap) {
  const works = cells.map((cell) => cell.work), number = sumOfCells(cells, () => 1);
  const start = leastOf(cells, (cell) => cell.head);
  const back = leastOf(cells, (cell) => cell.head + cell.work.released[0] + cell.back);
  const [forward, backward] = [mostOf(works, (work) => work.forward), mostOf(works, (work) => work.backward)];
  const [inputs, weights] = [mostOf(works, (work) => work.inputs), mostOf(works, (work) => work.weights)];
  const gain = overlap == null ? 0 : Math.max(forward + backward - overlap, 0);
  const part = overlap == null ? 0 : Math.max(forward + inputs - overlap, 0);
  const total = sumOfCells(cells, ({ work }) => work.forward + work.backward);
  const roundTrip = leastOf(cells, (cell) => cell.back + cell.ends), wayDown = leastOf(cells, (cell) => cell.tail);
  let found = Infinity;
  for (let apart = 1; apart <= limit; apart++) {
    const rest = Math.max(0, (apart < number ? 1 : 0) * (roundTrip - apart * Math.max(backward, weights)),
      wayDown - limit * weights);
    const saved = Math.min(back - start, apart * forward) + gain * (number - apart) + part * (apart - 1);
    found = Math.min(found, total - saved + rest);
  }
  return back + found;
}

// For every rank the stages that it holds, once for each route: {number, head, back, ends, tail, work}.
function boundCells(flat, costs) {
  const works = worksOf(flat.numStages, costs), cells = Array.from({ length: flat.numRanks }, () => []);
  for (const { route, microbatches } of routesOf(flat)) {
    cellsAlong(route, microbatches.length, works, costs).forEach((cell, stage) => cells[route[stage]].push(cell));
  }
  return cells;
}

// The ticks of each stage.  `released`: until a forward's result, a backward's result, all memory is available.
function worksOf(numStages, costs) {
  const ticks = stageTicks(costs, numStages), pair = costs.overlap ?? Infinity; // a pair may be shorter than its parts
  return Array.from({ length: numStages }, (_, stage) => {
    const [forward, whole, inputs, weights] = ticks.map((values) => values[stage]);
    const backward = Math.min(whole, inputs + weights);
    const released = [forward, Math.min(whole, inputs), backward].map((time) => Math.min(time, pair));
    return { forward, backward, inputs, weights, released };
  });
}

function cellsAlong(route, number, works, { latency, transfer }) {
  const cells = works.map((work) => ({ number, work, head: 0, back: 0, ends: 0, tail: 0 })), last = cells.length - 1;
  const lag = (stage) => (route[stage] === route[stage + 1] ? 0 : latency + transfer);
  for (let stage = 0, head = 0, down = works[0].released[2]; stage <= last; stage++) {
    const cell = cells[stage], [forward, backward, ended] = works[stage].released;
    cell.head = head;
    cell.tail = stage ? down : 0;
    cell.ends = stage ? backward + down : ended;
    if (stage === last) break;
    head += forward + lag(stage);
    down += lag(stage) + (stage ? backward : 0); // the way to stage 0 from the stage behind this one
  }
  for (let stage = last - 1; stage >= 0; stage--) {
    const [forward, backward] = works[stage + 1].released;
    cells[stage].back = cells[stage + 1].back + forward + backward + 2 * lag(stage);
  }
  return cells;
}
