// Bytes that all ranks send in a step, inside of nodes and between them, by what sends them: plan/traffic.py, summed over
// the groups of each kind instead of rank by rank.

import { ELEMENT_BYTES, STATE_BYTES, buffersOf, partsAt, shapeAt } from "./plan-model.mjs";
import { holdersOf, stagesAt } from "./plan-schedules.mjs";
import { LinkBytes, linksOfCopies, linksOfGroups } from "./plan-links.mjs";

const FLOAT_BYTES = 4, NUMBER = 8, AXES_OF_BYTES = ["tp", "cp", "pp", "gradients", "norm"];

// Calls along tp and cp of all forwards and backwards.
function enterLayers(sent, plan) {
  const { model, tp, cp, count, numStages, keyCopies } = plan, again = plan.recompute ? 1 : 0;
  const alongTp = linksOfGroups(plan, tp, 1), alongCp = linksOfGroups(plan, cp, tp), alongCopies = linksOfGroups(plan, keyCopies, 1);
  const hop = plan.rows * (plan.sequence / cp) * 2 * plan.keyHeads * model.headSize;
  plan.layers.forEach((number, stage) => holdersOf(plan, stage).forEach((rank, _, { length }) => {
    const each = count / length;
    if (tp > 1) enterTensor(sent, plan, alongTp[rank], { each, number, again, isFirst: stage === 0, isLast: stage === numStages - 1 });
    if (keyCopies > 1) sent.allReduce("tp", alongCopies[rank], model.hidden * model.headSize, ELEMENT_BYTES, 2 * number * each);
    if (cp > 1) sent.ring("cp", alongCp[rank], hop * (ELEMENT_BYTES * (cp - 1) * (2 + again) + FLOAT_BYTES * cp), number * each);
  }));
}

function enterTensor(sent, plan, links, { each, number, again, isFirst, isLast }) {
  const { model, tokens, between } = plan, { hidden, headSize } = model;
  const gather = (times) => sent.gather("tp", links, between * hidden * ELEMENT_BYTES, times * each);
  const sum = (times) => sent.scatter("tp", links, tokens * hidden * ELEMENT_BYTES, times * each);
  const reduce = (numel, times) => sent.allReduce("tp", links, numel, FLOAT_BYTES, times * each);
  gather(number * (6 + 2 * again));
  sum(number * (4 + 2 * again));
  reduce(hidden, 2 * number);
  if (model.qkNorm) reduce(headSize, 2 * number);
  if (isFirst) (sum(1), gather(1));
  if (isLast) (gather(2), reduce(tokens, 1), reduce(2 * tokens, 1), sum(1), reduce(hidden, 1));
}

// From each rank of one place along pp to its like at another; `tpRank`: only from those, if it is not null.
function enterHops(sent, plan, axis, one, other, bytes, tpRank = null) {
  const stride = plan.gpus / plan.pp, nodeOf = (rank) => Math.floor(rank / plan.node);
  let all = 0, crossing = 0;
  for (let rank = tpRank ?? 0; rank < stride; rank += tpRank === null ? 1 : plan.tp) {
    all++;
    crossing += Number(nodeOf(one * stride + rank) !== nodeOf(other * stride + rank));
  }
  sent.add(axis, BigInt(bytes) * BigInt(all), BigInt(bytes) * BigInt(crossing));
}

// Activations and their gradients, and the shapes of a step.
function enterPipeline(sent, plan) {
  if (plan.pp === 1) return;
  const directions = holdersOf(plan, 0).length, each = plan.count / directions;
  for (let direction = 0; direction < directions; direction++) {
    const route = plan.layers.map((_, stage) => (directions > 1 ? (direction ? plan.pp - 1 - stage : stage) : holdersOf(plan, stage)[0]));
    for (let stage = 1; stage < plan.numStages; stage++) {
      const one = route[stage - 1], other = route[stage];
      if (one === other) continue; // the tip of a V
      enterHops(sent, plan, "pp", one, other, 2 * each * plan.boundary);
      if (route.indexOf(other) === stage) enterHops(sent, plan, "pp", one, other, each * NUMBER);
    }
  }
}

// Flat buffers of a rank; ranks of tp with shards of the same sizes have the same.
function buffersAt(plan, rank, tpRank) {
  plan.buffers ??= new Map();
  const key = `${rank} ${shapeAt(plan, tpRank)}`;
  if (!plan.buffers.has(key)) plan.buffers.set(key, buffersOf(plan, partsAt(plan, rank, tpRank)));
  return plan.buffers.get(key);
}

// Sums over the ranks with copies and gathers of weights, of every flat buffer, and the sum of a tied table.
function enterGradients(sent, plan) {
  const { zero, pp, tp } = plan, { parameters, gradients } = STATE_BYTES;
  const ends = [0, plan.numStages - 1].map((stage) => String(holdersOf(plan, stage))), each = plan.count / holdersOf(plan, 0).length;
  for (let rank = 0; rank < pp; rank++) {
    for (let tpRank = 0; tpRank < tp; tpRank++) {
      const links = linksOfCopies(plan, rank, tpRank), all = { padded: 0, shard: 0 }, inStages = { padded: 0, shard: 0 };
      for (const { numel, shard, padded, kind, stages } of buffersAt(plan, rank, tpRank)) {
        for (const [sums, times] of [[all, 1], [inStages, stages.length]]) {
          sums.padded += padded * times;
          sums.shard += shard * times;
        }
        const isTied = kind.includes("tied") && ends[0] !== ends[1]; // the other end of the pipeline has the table too
        if (isTied) enterHops(sent, plan, "gradients", rank, pp - 1 - rank, (zero ? shard : numel) * gradients, tpRank);
      }
      if (zero === 3) sent.gather("gradients", links, inStages.shard * parameters, 2 * each);
      if (zero > 1) sent.scatter("gradients", links, inStages.padded * gradients, each);
      if (zero === 0) sent.allReduce("gradients", links, all.padded, gradients);
      if (zero === 1) sent.scatter("gradients", links, all.padded * gradients);
      if (zero === 1 || zero === 2) sent.gather("gradients", links, all.shard * parameters);
    }
  }
}

// The two copies of a stage exchange their gradients: all of them, or each rank its shard of ZeRO-2 and 3.
function enterMirrors(sent, plan) {
  const { pp, tp, zero, copies } = plan, stride = plan.gpus / pp, nodeOf = (rank) => Math.floor(rank / plan.node);
  for (let rank = 0; rank < pp; rank++) {
    for (const stage of stagesAt(plan, rank)) {
      for (const other of holdersOf(plan, stage).filter((one) => one !== rank)) {
        for (let tpRank = 0; tpRank < tp; tpRank++) {
          const buffers = buffersAt(plan, rank, tpRank), heldBy = (copy) => buffers.reduce((sum, one) => sum + heldOf(one, copy, stage), 0);
          const numel = buffers.reduce((sum, one) => sum + heldOf({ ...one, shard: one.numel }, 0, stage), 0);
          const crossing = Array.from({ length: copies }, (_, copy) => copy).filter((copy) =>
            nodeOf(rank * stride + copy * tp + tpRank) !== nodeOf(other * stride + copy * tp + tpRank));
          const isShared = zero > 1 && crossing.length % copies > 0; // some shards cross, and some do not
          const far = isShared ? crossing.reduce((sum, copy) => sum + heldBy(copy), 0) : numel * (zero > 1 ? crossing.length / copies : crossing.length);
          const bytes = (held) => BigInt(held) * BigInt(STATE_BYTES.gradients);
          sent.add("gradients", bytes(numel) * BigInt(zero > 1 ? 1 : copies), bytes(far));
        }
      }
    }
  }
}

// The elements of a stage in the shard that one of the ranks with copies has of a buffer.
function heldOf({ shard, parts }, copy, stage) {
  let from = 0, held = 0;
  for (const part of parts) {
    const inside = Math.min(from + part.numel, (copy + 1) * shard) - Math.max(from, copy * shard);
    if (part.stage === stage && inside > 0) held += inside;
    from += part.numel;
  }
  return held;
}

// The norm: two numbers, summed round the ring of all ranks.
function enterNorm(sent, plan) {
  const [links] = linksOfGroups({ ...plan, pp: 1 }, plan.gpus, 1);
  sent.allReduce("norm", links, 2, NUMBER);
}

// [bytes inside of nodes, bytes between them] of tp, cp, pp, gradients and norm.
export function trafficOf(plan) {
  const sent = new LinkBytes(AXES_OF_BYTES);
  enterLayers(sent, plan);
  enterPipeline(sent, plan);
  enterGradients(sent, plan);
  enterMirrors(sent, plan);
  enterNorm(sent, plan);
  return sent.found;
}
