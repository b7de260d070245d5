// Bytes that all ranks send in a step, inside of nodes and between them, by what sends them: plan/traffic.py, summed over
// the groups of each kind instead of rank by rank.

import { ELEMENT_BYTES, STATE_BYTES, buffersOf, partsAt } from "./plan-model.mjs";
import { LinkBytes, linksOfCopies, linksOfGroups } from "./plan-links.mjs";

const FLOAT_BYTES = 4, NUMBER = 8, AXES_OF_BYTES = ["tp", "cp", "pp", "gradients", "norm"];

// Calls along tp and cp of all forwards and backwards.
function enterLayers(sent, plan) {
  const { model, tp, cp, count, numStages, keyCopies } = plan, again = plan.recompute ? 1 : 0;
  const alongTp = linksOfGroups(plan, tp, 1), alongCp = linksOfGroups(plan, cp, tp), alongCopies = linksOfGroups(plan, keyCopies, 1);
  const hop = plan.rows * (plan.sequence / cp) * 2 * plan.keyHeads * model.headSize;
  plan.layers.forEach((number, stage) => {
    const rank = stage % plan.pp;
    if (tp > 1) enterTensor(sent, plan, alongTp[rank], { number, again, isFirst: stage === 0, isLast: stage === numStages - 1 });
    if (keyCopies > 1) sent.allReduce("tp", alongCopies[rank], model.hidden * model.headSize, ELEMENT_BYTES, 2 * number * count);
    if (cp > 1) sent.ring("cp", alongCp[rank], hop * (ELEMENT_BYTES * (cp - 1) * (2 + again) + FLOAT_BYTES * cp), number * count);
  });
}

function enterTensor(sent, plan, links, { number, again, isFirst, isLast }) {
  const { model, tokens, between, count } = plan, { hidden, headSize } = model;
  const gather = (times) => sent.gather("tp", links, between * hidden * ELEMENT_BYTES, times * count);
  const sum = (times) => sent.scatter("tp", links, tokens * hidden * ELEMENT_BYTES, times * count);
  const reduce = (numel, times) => sent.allReduce("tp", links, numel, FLOAT_BYTES, times * count);
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
  for (let stage = 1; stage < plan.numStages; stage++) {
    const [one, other] = [(stage - 1) % plan.pp, stage % plan.pp];
    enterHops(sent, plan, "pp", one, other, 2 * plan.count * plan.boundary);
    if (stage < plan.pp) enterHops(sent, plan, "pp", one, other, plan.count * NUMBER);
  }
}

// Sums over the ranks with copies and gathers of weights, of every flat buffer, and the sum of a tied table.
function enterGradients(sent, plan) {
  const { zero, count, pp, tp } = plan, { parameters, gradients } = STATE_BYTES;
  for (let rank = 0; rank < pp; rank++) {
    for (let tpRank = 0; tpRank < tp; tpRank++) {
      const links = linksOfCopies(plan, rank, tpRank);
      for (const { numel, shard, padded, kind, stages } of buffersOf(plan, partsAt(plan, rank, tpRank))) {
        const times = count * stages.length;
        if (zero === 3) sent.gather("gradients", links, shard * parameters, 2 * times);
        if (zero > 1) sent.scatter("gradients", links, padded * gradients, times);
        if (zero === 0) sent.allReduce("gradients", links, padded, gradients);
        if (zero === 1) sent.scatter("gradients", links, padded * gradients);
        if (zero === 1 || zero === 2) sent.gather("gradients", links, shard * parameters);
        const isTied = kind.includes("tied") && pp > 1; // the other end of the pipeline has the table too
        if (isTied) enterHops(sent, plan, "gradients", rank, pp - 1 - rank, (zero ? shard : numel) * gradients, tpRank);
      }
    }
  }
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
  enterNorm(sent, plan);
  return sent.found;
}
