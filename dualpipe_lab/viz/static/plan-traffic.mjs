// Bytes that all ranks send in a step, inside of nodes and between them, by what sends them: plan/traffic.py in closed form.
//
// A ring has one link out of a node per node of a group, a scatter one for each pair of ranks.  Totals of large clusters
// exceed 2^53, so they are BigInt.

import { ELEMENT_BYTES, STATE_BYTES, buffersOf } from "./plan-model.mjs";
import { groupOf } from "./plan-time.mjs";

const FLOAT_BYTES = 4, NUMBER = 8;

class LinkBytes {
  constructor(plan) {
    this.plan = plan;
    this.found = { tp: [0n, 0n], cp: [0n, 0n], pp: [0n, 0n], gradients: [0n, 0n], norm: [0n, 0n] };
  }

  add(axis, bytes, inside, between) {
    this.found[axis][0] += BigInt(bytes) * BigInt(inside);
    this.found[axis][1] += BigInt(bytes) * BigInt(between);
  }

  // Every rank of every group sends so many bytes to its neighbour in the ring.
  ring(axis, { size, perNode }, bytes, groups) {
    const crossing = perNode === size ? 0 : size / perNode;
    this.add(axis, bytes, groups * (size - crossing), groups * crossing);
  }

  allReduce(axis, group, bytes, groups) {
    this.ring(axis, group, (2 * bytes * (group.size - 1)) / group.size, groups);
  }

  gather(axis, group, shard, groups) {
    this.ring(axis, group, shard * (group.size - 1), groups);
  }

  // Every rank sends a shard to every other one.
  scatter(axis, { size, perNode }, bytes, groups) {
    this.add(axis, bytes / size, groups * size * (perNode - 1), groups * size * (size - perNode));
  }
}

// Calls along tp and cp of all forwards and backwards.
function enterLayers(sent, plan) {
  const { model, tokens, between, count, layers } = plan, { hidden, headSize } = model, { cp, numStages } = plan;
  const tp = groupOf(plan, ["tp"]), each = (plan.gpus / plan.pp / plan.tp) * count, again = plan.recompute ? 1 : 0;
  const gather = (times) => sent.gather("tp", tp, between * hidden * ELEMENT_BYTES, times * each);
  const sum = (times) => sent.scatter("tp", tp, tokens * hidden * ELEMENT_BYTES, times * each);
  const reduce = (numel, times) => sent.allReduce("tp", tp, numel * FLOAT_BYTES, times * each);
  const ring = groupOf(plan, ["cp"]), hop = plan.rows * (plan.sequence / cp) * 2 * plan.keyHeads * headSize;
  layers.forEach((number, stage) => {
    if (plan.tp > 1) {
      gather(number * (6 + 2 * again));
      sum(number * (4 + 2 * again));
      reduce(hidden, 2 * number);
      if (model.qkNorm) reduce(headSize, 2 * number);
      if (stage === 0) (sum(1), gather(1));
      if (stage === numStages - 1) (gather(2), reduce(tokens, 1), reduce(2 * tokens, 1), sum(1), reduce(hidden, 1));
    }
    if (cp > 1) {
      const groups = (plan.gpus / plan.pp / cp) * count * number;
      sent.ring("cp", ring, hop * ELEMENT_BYTES * (cp - 1) * (2 + again) + hop * FLOAT_BYTES * cp, groups);
    }
  });
}

// Activations and their gradients, and the shapes of a step.
function enterPipeline(sent, plan) {
  if (plan.pp === 1) return;
  const stride = plan.gpus / plan.pp, nodeOf = (rank) => Math.floor((rank * stride) / plan.node);
  const hop = (one, other, bytes) => {
    const crosses = nodeOf(one) !== nodeOf(other);
    sent.add("pp", bytes, crosses ? 0 : stride, crosses ? stride : 0);
  };
  for (let stage = 1; stage < plan.numStages; stage++) {
    const [one, other] = [(stage - 1) % plan.pp, stage % plan.pp];
    hop(one, other, 2 * plan.count * plan.boundary);
    if (stage < plan.pp) hop(one, other, plan.count * NUMBER);
  }
}

// Sums over the ranks with copies and gathers of weights, of every flat buffer, and the sum of a tied table.
function enterGradients(sent, plan) {
  const group = groupOf(plan, ["dp", "cp"]), groups = plan.gpus / plan.pp / plan.copies, { zero, count } = plan;
  for (let rank = 0; rank < plan.pp; rank++) {
    for (const { numel, shard, padded, kind, stages } of buffersOf(plan, plan.parts[rank])) {
      const times = count * stages.length;
      if (zero === 3) sent.gather("gradients", group, shard * STATE_BYTES.parameters, groups * 2 * times);
      if (zero > 1) sent.scatter("gradients", group, padded * STATE_BYTES.gradients, groups * times);
      if (zero === 0) sent.allReduce("gradients", group, padded * STATE_BYTES.gradients, groups);
      if (zero === 1) sent.scatter("gradients", group, padded * STATE_BYTES.gradients, groups);
      if (zero === 1 || zero === 2) sent.gather("gradients", group, shard * STATE_BYTES.parameters, groups);
      if (kind.includes("tied") && plan.pp > 1) enterTied(sent, plan, (zero ? shard : numel) * STATE_BYTES.gradients);
    }
  }
}

// The first and the last rank of pp exchange the gradient of their table.
function enterTied(sent, plan, bytes) {
  const stride = plan.gpus / plan.pp, crosses = (plan.pp - 1) * stride >= plan.node;
  sent.add("gradients", bytes, crosses ? 0 : stride, crosses ? stride : 0);
}

// The norm: two numbers, summed round the ring of all ranks in chunks of one number.
function enterNorm(sent, plan) {
  const { gpus, node } = plan;
  if (gpus === 1) return;
  const chunk = (place) => (place % gpus < 2 ? NUMBER : 0);
  for (let place = 0; place < gpus; place++) {
    const bytes = 4 * NUMBER - chunk(place + 1) - chunk(place + 2), to = (place + gpus - 1) % gpus;
    const crosses = Math.floor(place / node) !== Math.floor(to / node);
    sent.add("norm", bytes, crosses ? 0 : 1, crosses ? 1 : 0);
  }
}

// [bytes inside of nodes, bytes between them] of tp, cp, pp, gradients and norm.
export function trafficOf(plan) {
  const sent = new LinkBytes(plan);
  enterLayers(sent, plan);
  enterPipeline(sent, plan);
  enterGradients(sent, plan);
  enterNorm(sent, plan);
  return sent.found;
}
