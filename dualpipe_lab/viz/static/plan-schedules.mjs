// The synchronous schedules of dualpipe_lab/pp/schedules, rank by rank: which stages a rank has, and its steps in order.
//
// A step is [stage, kind, microbatch], or six values for an overlapped pair: those of the forward, then of the backward.
// Shapes: a line or loop has stage s on rank s % P; a V turns on the last rank; both ends: stage s on s and on P - 1 - s.

import { easyRows, halfRows, minRows, zbvRows } from "./plan-lists.mjs";

const range = (length, from = 0) => Array.from({ length }, (_, place) => from + place);
const isEven = (number) => number % 2 === 0;

// ---- loops

function roundSizes(pp, count) {
  const rounds = Math.max(1, Math.floor(count / pp)), size = Math.floor(count / rounds), larger = count % rounds;
  return range(rounds).map((place) => size + (place < larger));
}

function loopCells(rank, pp, rounds, chunks) {
  const stages = range(chunks).map((chunk) => rank + chunk * pp), forwards = [], backwards = [];
  let done = 0;
  for (const size of rounds) {
    const microbatches = range(size, done);
    for (const stage of stages) for (const m of microbatches) forwards.push([stage, m]);
    for (const stage of [...stages].reverse()) for (const m of microbatches) backwards.push([stage, m]);
    done += size;
  }
  return [forwards, backwards];
}

// Warm-up, steady state, cool-down; `delay`: after how many further I a W follows, null for whole backwards; `pairs`: a
// forward and the backward behind it are a pair, but for the first `delay` backwards.
function inPhases(forwards, backwards, warmup, delay, pairs) {
  const first = Math.min(warmup, forwards.length), waiting = [];
  const steps = forwards.slice(0, first).map(([stage, m]) => [stage, "F", m]);
  backwards.forEach(([stage, m], index) => {
    const next = forwards[first + index];
    if (pairs && next && index >= (delay ?? 0)) {
      steps.push([next[0], "F", next[1], stage, "B", m]);
      return;
    }
    if (next) steps.push([next[0], "F", next[1]]);
    steps.push([stage, delay === null ? "B" : "I", m]);
    if (delay === null) return;
    waiting.push([stage, "W", m]);
    if (waiting.length > delay) steps.push(waiting.shift());
  });
  return [...steps, ...waiting];
}

// `below`: forwards of the warm-up for each rank below; `more`: on top of them.
const looped = ({ chunks = 1, below = 1, more = 0, isSplit = false, pairs = false }) => (pp, count) => {
  const rounds = roundSizes(pp, count);
  return range(pp).map((rank) => {
    const warmup = (chunks - 1) * rounds[0] + below * (pp - 1 - rank) + more;
    return inPhases(...loopCells(rank, pp, rounds, chunks), warmup, isSplit ? rank : null, pairs);
  });
};

const breadthFirst = (chunks) => (pp, count) => range(pp).map((rank) => {
  const stages = range(chunks).map((chunk) => rank + chunk * pp);
  return [["F", stages], ["B", [...stages].reverse()]].flatMap(([kind, order]) =>
    order.flatMap((stage) => range(count).map((m) => [stage, kind, m])));
});

// ZB-H1 with 2 P - 1 activations on every rank: more forwards in the warm-up, or later W.
function deepRows(pp, count) {
  const extra = Math.max(0, Math.min(count, 2 * pp - 1) - pp);
  return range(pp).map((rank) => {
    const cells = range(count).map((m) => [rank, m]), later = Math.floor((rank * extra) / Math.max(1, pp - 1));
    return inPhases(cells, cells, pp - 1 - rank + extra - later, rank + later, false);
  });
}

// ---- DualPipe's eight steps

// The work of a rank on two flows of n microbatches, as pairs of kinds and flows.
function eightSteps(position, positions, n) {
  const inside = positions - position - 1, outside = position + 1, steady = n - 2 * positions + outside;
  const repeat = (times, ...words) => range(Math.max(0, times)).flatMap(() => words);
  const backwards = [...repeat(outside, "B1", "B0").slice(0, outside), ...repeat(outside, "I1", "I0").slice(outside)];
  return [
    ...repeat(2 * inside, "F0"), ...repeat(outside, "F0", "F1"), ...repeat(inside, "I1", "W", "F1"),
    ...(inside ? ["F0&B1"] : ["F0", "B1"]), "F1&B0", ...repeat(steady - 1, "F0&B1", "F1&B0"),
    ...repeat(inside, "B1", "F1&B0"), ...backwards, ...repeat(inside, "W", "I0"), ...repeat(outside, "W"),
  ];
}

// `flows`: of each the stage here and its first microbatch.
function stepsOfFlows(flows, position, positions, n) {
  const forwards = [0, 0], backwards = [0, 0], waiting = [];
  const actionOf = (word) => {
    const flow = Number(word[1]), [stage, first] = flows[flow], done = word[0] === "F" ? forwards : backwards;
    const action = [stage, word[0], first + done[flow]++];
    if (word[0] === "I") waiting.push([stage, "W", action[2]]);
    return action;
  };
  return eightSteps(position, positions, n).map((word) => {
    if (word === "W") return waiting.shift();
    return word.length === 2 ? actionOf(word) : [...actionOf(word), ...actionOf(word.slice(3))];
  });
}

const dualRows = (pp, count) => range(pp).map((rank) => {
  const mirror = pp - 1 - rank, down = [rank, 0], up = [mirror, count / 2];
  return stepsOfFlows(rank < mirror ? [down, up] : [up, down], Math.min(rank, mirror), pp / 2, count / 2);
});
const dualVRows = (pp, count) => range(pp).map((rank) => stepsOfFlows([[rank, 0], [2 * pp - 1 - rank, 0]], rank, pp, count));

// ---- the registry

const needsEven = (name) => (pp, count) => {
  if (!isEven(pp)) return `${name} has an even number of ranks, got pp ${pp}; use an even pp`;
  if (isEven(count)) return null;
  return `${name} has an even number of microbatches, half for each direction, got ${count}; use an even number`;
};
const needsTwice = (name) => (pp, count) => {
  if (count >= 2 * pp) return null;
  return `${name} needs two microbatches per rank, got ${count} for pp ${pp}; use ${2 * pp} microbatches or more`;
};
const both = (...rules) => (pp, count) => rules.reduce((found, rule) => found ?? rule(pp, count), null);

// By the registry's name: title, shape, stages per rank, rows, the rule for its sizes; pairs: whether it has any.
export const SCHEDULES = {
  gpipe: { title: "GPipe", shape: "loop", chunks: 1, rows: breadthFirst(1) },
  "1f1b": { title: "1F1B", shape: "loop", chunks: 1, rows: looped({}) },
  interleaved: { title: "Interleaved 1F1B", shape: "loop", chunks: 2, rows: looped({ chunks: 2, below: 2 }) },
  looped_bfs: { title: "Looped BFS", shape: "loop", chunks: 2, rows: breadthFirst(2) },
  zero_bubble_h1: { title: "ZB-H1", shape: "loop", chunks: 1, rows: looped({ isSplit: true }) },
  zero_bubble_h2: { title: "ZB-H2", shape: "loop", chunks: 1, rows: deepRows },
  zbv: { title: "ZBV", shape: "V", chunks: 2, rows: zbvRows },
  v_half: { title: "V-Half", shape: "V", chunks: 2, rows: halfRows },
  v_min: { title: "V-Min", shape: "V", chunks: 2, rows: minRows },
  easy_dualpipe: { title: "Easy-DualPipe", shape: "ends", chunks: 1, rows: easyRows, rule: needsEven("Easy-DualPipe") },
  dualpipe: {
    title: "DualPipe", shape: "ends", chunks: 1, rows: dualRows, pairs: true,
    rule: both(needsEven("DualPipe"), needsTwice("DualPipe")),
  },
  dualpipev: { title: "DualPipeV", shape: "V", chunks: 2, rows: dualVRows, rule: needsTwice("DualPipeV"), pairs: true },
  paired_1f1b: { title: "Paired 1F1B", shape: "loop", chunks: 1, rows: looped({ below: 2, more: 1, pairs: true }), pairs: true },
  paired_interleaved: {
    title: "Paired interleaved 1F1B", shape: "loop", chunks: 2, pairs: true,
    rows: looped({ chunks: 2, below: 2, more: 1, pairs: true }),
  },
  paired_zero_bubble_h1: {
    title: "Paired ZB-H1", shape: "loop", chunks: 1, rows: looped({ below: 2, more: 1, isSplit: true, pairs: true }), pairs: true,
  },
};

export const stagesPerRank = (schedule, pp) => (pp > 1 ? SCHEDULES[schedule].chunks : 1);

// The stages of a rank of pp, in their order.
export function stagesAt({ schedule, pp, numStages }, rank) {
  const { shape, chunks } = SCHEDULES[schedule];
  if (pp === 1) return [0];
  if (shape === "loop") return range(chunks).map((chunk) => rank + chunk * pp);
  const other = shape === "V" ? numStages - 1 - rank : pp - 1 - rank;
  return [Math.min(rank, other), Math.max(rank, other)];
}

// The ranks of pp that have a stage: under DualPipe two.
export function holdersOf({ schedule, pp, numStages }, stage) {
  const { shape } = SCHEDULES[schedule];
  if (pp === 1 || shape === "loop") return [stage % pp];
  const mirror = numStages - 1 - stage;
  return shape === "V" ? [Math.min(stage, mirror)] : [Math.min(stage, mirror), Math.max(stage, mirror)];
}

const lists = new Map(); // of steps, by schedule and sizes: the same for all models

// One rank after the other: its steps.
export function stepsOf(schedule, pp, count) {
  const key = `${schedule} ${pp} ${count}`;
  if (!lists.has(key)) {
    if (lists.size > 60) lists.clear();
    lists.set(key, pp > 1 ? SCHEDULES[schedule].rows(pp, count) : [range(count).flatMap((m) => [[0, "F", m], [0, "B", m]])]);
  }
  return lists.get(key);
}

const tokenOf = ([stage, kind, m, ...backward]) =>
  (backward.length ? `(${stage}${kind}${m};${backward.join("")})` : `${stage}${kind}${m}`);
export const rowsOf = (ranks) => ranks.map((steps) => steps.map(tokenOf).join(" "));
