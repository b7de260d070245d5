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

// The ranks of ep, innermost in those of dp and cp; and those with copies of the same experts.
export function expertGroups(plan) {
  const data = groupOf(plan, ["dp", "cp"]), { ep } = plan;
  return [{ size: ep, perNode: Math.min(ep, data.perNode) },
    ep === 1 ? data : { size: data.size / ep, perNode: Math.max(1, Math.floor(data.perNode / ep)) }];
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

// Every rank has so many bytes for all ranks together.
function allToAll(plan, { size, perNode }, bytes) {
  if (size === 1) return 0;
  const [inside, between] = linksOf(plan), each = bytes / size;
  const near = (each * (perNode - 1)) / rateOf(inside, each) + inside.latency;
  return perNode === size ? near : Math.max(near, (each * (size - perNode)) / rateOf(between, each) + between.latency);
}

// ---- the calls of stages

const FULL = 4; // bytes of a number in 32 bits

export const sendsLatents = ({ model: { latent, headSize }, cp, heads }) =>
  Boolean(latent) && cp > 1 && latent.kv + latent.position < 2 * heads * Math.max(headSize, latent.value);

// Bytes of a hop on the ring of cp, for numbers of so many bytes: keys and values, or a shorter latent.
export function hopBytes(plan, element) {
  const { model, tokens, keyHeads } = plan, { latent, headSize } = model;
  return tokens * (sendsLatents(plan) ? latent.kv + latent.position : 2 * keyHeads * headSize) * element;
}

// Calls of a layer: ["gather" or "sum", numbers per token], ["reduce", numbers, bytes of each], ["keys"] among the ranks of
// tp with the same key heads, ["norm"], ["ring"], ["count"] of rows for experts and ["exchange"] of these rows.
export function layerCalls(plan, isSparse) {
  const attention = plan.model.latent ? latentCalls(plan) : headCalls(plan);
  const network = isSparse ? expertCalls(plan) : networkCalls(plan), forward = [...attention.F, ...network.F];
  return {
    F: forward, I: [...network.I, ["norm"], ...attention.I, ["norm"]],
    again: isSparse && plan.overlap ? [...attention.F, gather(plan.model.hidden)] : forward, // not the experts
  };
}

const gather = (width) => ["gather", width], sum = (width) => ["sum", width];

function headCalls({ model: { hidden, headSize, qkNorm }, keyCopies }) {
  const norms = qkNorm ? [["reduce", headSize, FULL], ["reduce", headSize, FULL]] : [];
  const keys = keyCopies > 1 ? [["keys"], ["keys"]] : [];
  return {
    F: [gather(hidden), ["ring"], sum(hidden)],
    I: [gather(hidden), ["ring"], ...norms, gather(hidden), sum(hidden), ...keys],
  };
}

function latentCalls(plan) {
  const { hidden, latent: { query, kv, position } } = plan.model;
  const copied = [hidden * query, query, hidden * (kv + position), kv]; // weights that every rank of tp holds
  const sums = plan.tp > 1 ? copied.map((numel, place) => ["reduce", numel, place % 2 ? FULL : ELEMENT_BYTES]) : [];
  const unfolded = sendsLatents(plan) ? [] : [gather(kv)]; // the latent, where keys and values travel
  return {
    F: [gather(query), gather(kv), gather(position), ["ring"], sum(hidden)],
    I: [gather(hidden), ["ring"], gather(query), sum(query), ...unfolded, sum(kv), sum(position), ...sums],
  };
}

const networkCalls = ({ model: { hidden } }) => ({
  F: [gather(hidden), sum(hidden)], I: [gather(hidden), gather(hidden), sum(hidden)],
});

function expertCalls({ model: { hidden }, tokens, sharedWidth }) {
  const shared = sharedWidth ? [["reduce", tokens * hidden, ELEMENT_BYTES]] : [], exchanges = [["exchange"], ["exchange"]];
  return { F: [gather(hidden), ["count"], ...exchanges, ...shared], I: [gather(hidden), ...exchanges, ...shared] };
}

// Calls of the two ends of the model.
export function endCalls({ tokens, model: { hidden } }) {
  return {
    embedding: { F: [sum(hidden)], I: [gather(hidden)] },
    head: {
      F: [gather(hidden), ["reduce", tokens, FULL], ["reduce", 2 * tokens, FULL]],
      I: [gather(hidden), sum(hidden), ["norm"]],
    },
  };
}

// Seconds along tp, cp and ep of the calls of a forward or backward.
export function secondsOfCalls(plan, calls, isBackward) {
  const { model, tokens, between, cp } = plan, tp = groupOf(plan, ["tp"]), [data] = expertGroups(plan);
  const ep = { size: data.size * tp.size, perNode: data.perNode * tp.perNode }; // tp shares experts out: rows go there too
  const sameKeys = { size: plan.keyCopies, perNode: Math.min(tp.perNode, plan.keyCopies) };
  const hop = (element) => {
    const [transfer, latency] = message(plan, groupOf(plan, ["cp"]), hopBytes(plan, element));
    return transfer + latency;
  };
  const rows = Math.floor((plan.slots * model.hidden * ELEMENT_BYTES) / ep.size) * ep.size;
  const secondsOf = {
    gather: (width) => collective(plan, tp, between * width * ELEMENT_BYTES * plan.tp),
    sum: (width) => collective(plan, tp, tokens * width * ELEMENT_BYTES),
    reduce: (numel, element) => collective(plan, tp, numel * element, 2),
    keys: () => collective(plan, sameKeys, model.hidden * model.headSize * ELEMENT_BYTES, 2),
    norm: () => 0, // once per step
    ring: () => (cp > 1 ? (cp - 1) * hop(ELEMENT_BYTES) + (isBackward ? cp * hop(FULL) : 0) : 0),
    count: () => allToAll(plan, ep, model.experts.count * 8),
    exchange: () => allToAll(plan, ep, rows),
  };
  const axes = { ring: "cp", count: "ep", exchange: "ep" }, found = { tp: 0, cp: 0, ep: 0 };
  for (const [name, ...sizes] of calls) found[axes[name] ?? "tp"] += secondsOf[name](...sizes);
  return found;
}
