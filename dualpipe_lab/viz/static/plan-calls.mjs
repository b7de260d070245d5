// The seconds of calls along the axes: plan/call_times.py, and those that a stage's layers make, plan/layer_traffic.py.

import { ELEMENT_BYTES } from "./plan-model.mjs";

// An efficiency: a number, or points [size, part of the peak], linear in log(size) between them.
export function partAt(points, size) {
  const above = points.findIndex(([from]) => from > size);
  if (above === 0 || above < 0) return points.at(above < 0 ? -1 : 0)[1];
  const [[low, first], [high, second]] = [points[above - 1], points[above]];
  return first + (second - first) * (Math.log(size / low) / Math.log(high / low));
}

// ---- links

// Ranks along some axes: how many, and how many of them share a node.
export function groupOf(plan, axes) {
  let size = 1, perNode = 1, stride = 1;
  for (const axis of ["tp", "cp", "dp", "pp"]) {
    if (axes.includes(axis)) {
      size *= plan[axis];
      perNode *= Math.min(plan[axis], Math.max(1, Math.floor(plan.node / stride)));
    }
    stride *= plan[axis];
  }
  return { size, perNode };
}

const rateOf = (link, bytes) => link.bandwidth * partAt(link.efficiency, bytes);

function linksOf({ card, slower }) {
  return [card.inside, { ...card.between, bandwidth: card.between.bandwidth / slower }];
}

const roundsOf = (size) => 32 - Math.clz32(size - 1); // the logarithm to the base of 2, rounded up

export function collective(plan, { size, perNode }, bytes, passes = 1) {
  if (size === 1) return 0;
  const [inside, between] = linksOf(plan), crosses = perNode < size;
  const rate = crosses ? Math.min(rateOf(inside, bytes), perNode * rateOf(between, bytes)) : rateOf(inside, bytes);
  const latency = crosses ? between.latency : inside.latency;
  return passes * ((bytes * (size - 1)) / size / rate + roundsOf(size) * latency);
}

export function message(plan, { size, perNode }, bytes) {
  const [inside, between] = linksOf(plan), link = perNode < size ? between : inside;
  return [bytes / rateOf(link, bytes), link.latency];
}

// ---- the calls of stages

// Seconds along tp and cp of a part's calls, forward and backward.
export function callsOf(plan) {
  const { tokens, between, model } = plan, tp = groupOf(plan, ["tp"]), cp = groupOf(plan, ["cp"]), isSharded = plan.tp > 1;
  const wide = tokens * model.hidden * ELEMENT_BYTES;
  const gather = () => (isSharded ? collective(plan, tp, between * model.hidden * ELEMENT_BYTES * plan.tp) : 0);
  const sum = () => collective(plan, tp, wide, isSharded ? 1 : 2);
  const add = (...parts) => parts.reduce((all, part) => all + part, 0);
  const hop = (bytes) => add(...message(plan, cp, plan.rows * (plan.sequence / plan.cp) * 2 * plan.keyHeads * model.headSize * bytes));
  const ring = (count, bytes, before = 0) => Array.from({ length: count }, () => hop(bytes)).reduce((all, part) => all + part, before);
  const once = plan.cp > 1 ? ring(plan.cp - 1, ELEMENT_BYTES) : 0;
  const { keyCopies } = plan, sameKeys = { size: keyCopies, perNode: Math.min(tp.perNode, keyCopies) };
  const keys = keyCopies > 1 ? [0, 1].map(() => collective(plan, sameKeys, model.hidden * model.headSize * ELEMENT_BYTES, 2)) : [];
  const norms = model.qkNorm ? [0, 1].map(() => collective(plan, tp, model.headSize * 4, 2)) : [];
  const loss = (numbers) => collective(plan, tp, numbers * tokens * 4, 2);
  return {
    layer: { F: { tp: add(gather(), sum(), gather(), sum()), cp: once },
      I: { tp: add(gather(), gather(), sum(), gather(), ...norms, gather(), sum(), ...keys), cp: plan.cp > 1 ? ring(plan.cp, 4, once) : 0 } },
    embedding: { F: { tp: sum(), cp: 0 }, I: { tp: gather(), cp: 0 } },
    head: { F: { tp: add(gather(), loss(1), loss(2)), cp: 0 }, I: { tp: add(gather(), sum()), cp: 0 } },
  };
}
