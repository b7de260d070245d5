// Bytes that all ranks send in a step, inside of nodes and between them, by what sends them: plan/traffic.py, summed over
// the groups of each kind instead of rank by rank.

import { ELEMENT_BYTES, STATE_BYTES, countsAt } from "./plan-model.mjs";
import { buffersAt, isOfExperts } from "./plan-parts.mjs";
import { holdersOf, stagesAt } from "./plan-schedules.mjs";
import { endCalls, hopBytes, layerCalls } from "./plan-calls.mjs";
import { LinkBytes, linksOfCopies, linksOfGroups } from "./plan-links.mjs";

const FLOAT_BYTES = 4, NUMBER = 8;
const AXES_OF_BYTES = ["tp", "cp", "ep", "pp", "gradients", "norm", "routers"];

// Calls along tp, cp and ep of all forwards and backwards.
function enterLayers(sent, plan) {
  const { tp, cp, ep, keyCopies, numStages } = plan, { embedding, head } = endCalls(plan);
  const calls = (plan.model.experts ? [false, true] : [false]).map((isSparse) => layerCalls(plan, isSparse));
  const groups = { tp: [tp, 1], cp: [cp, tp], ep: [ep, tp], keys: [keyCopies, 1] };
  const along = Object.entries(groups).map(([axis, [size, stride]]) => [axis, linksOfGroups(plan, size, stride)]);
  plan.layers.forEach((_, stage) => {
    const holders = holdersOf(plan, stage), each = plan.count / holders.length;
    for (const rank of holders) {
      const links = Object.fromEntries(along.map(([axis, found]) => [axis, found[rank]]));
      countsAt(plan, stage).forEach((number, kind) => {
        if (number) enterPasses(sent, plan, links, calls[kind], number * each);
        if (number && kind && ep > 1) enterRows(sent, plan, links.ep, number, each);
      });
      if (stage === 0) enterPasses(sent, plan, links, embedding, each);
      if (stage === numStages - 1) enterPasses(sent, plan, links, head, each);
    }
  });
}

// So many forwards and backwards; what is run again are calls of a layer alone.
function enterPasses(sent, plan, links, { F, I, again = [] }, times) {
  for (const call of F) enterCall(sent, plan, links, call, times, false);
  for (const call of I) enterCall(sent, plan, links, call, times, true);
  if (plan.recompute) for (const call of again) enterCall(sent, plan, links, call, times, false);
}

function enterCall(sent, plan, links, [name, one, other], times, isBackward) {
  const { model, tokens, between, cp, ep } = plan;
  if (name === "gather") sent.gather("tp", links.tp, between * one * ELEMENT_BYTES, times);
  if (name === "sum") sent.scatter("tp", links.tp, tokens * one * ELEMENT_BYTES, times);
  if (name === "reduce") sent.allReduce("tp", links.tp, one, other, times);
  if (name === "norm") sent.allReduce("tp", links.tp, model.hidden, FLOAT_BYTES, times);
  if (name === "keys") sent.allReduce("tp", links.keys, model.hidden * model.headSize, ELEMENT_BYTES, times);
  if (name === "count") sent.scatter("ep", links.ep, model.experts.count * NUMBER, times);
  if (name === "ring" && cp > 1) {
    const bytes = (cp - 1) * hopBytes(plan, ELEMENT_BYTES) + (isBackward ? cp * hopBytes(plan, FLOAT_BYTES) : 0);
    sent.ring("cp", links.cp, bytes, times);
  }
}

// Rows to experts and back, in forward and backward: of a step, spread over the experts as evenly as they can be.
function enterRows(sent, plan, links, number, each) {
  const { experts: { count, perToken }, hidden } = plan.model, here = count / plan.ep, slots = plan.tokens * perToken * each;
  const share = Math.floor(slots / count), more = slots % count; // the first experts have one row more
  const blocks = Array.from({ length: plan.ep }, (_, place) => here * share + Math.max(0, Math.min(here, more - place * here)));
  sent.exchange("ep", links, blocks, number * (plan.recompute && !plan.overlap ? 3 : 2) * hidden * ELEMENT_BYTES);
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
  const rankOf = (stage, direction) => {
    if (directions === 1) return holdersOf(plan, stage)[0];
    return direction ? plan.pp - 1 - stage : stage;
  };
  for (let direction = 0; direction < directions; direction++) {
    const route = plan.layers.map((_, stage) => rankOf(stage, direction));
    for (let stage = 1; stage < plan.numStages; stage++) {
      const one = route[stage - 1], other = route[stage];
      if (one === other) continue; // the tip of a V
      enterHops(sent, plan, "pp", one, other, 2 * each * plan.boundary);
      if (route.indexOf(other) === stage) enterHops(sent, plan, "pp", one, other, each * NUMBER);
    }
  }
}

// Sums over the ranks with copies and gathers of weights, of every flat buffer, and the sum of a tied table.
function enterGradients(sent, plan, ranks) {
  const { zero, pp, tp, ep } = plan, { parameters, gradients } = STATE_BYTES;
  const ends = [0, plan.numStages - 1].map((stage) => String(holdersOf(plan, stage)));
  const each = plan.count / holdersOf(plan, 0).length;
  for (let rank = 0; rank < pp; rank++) {
    const gathers = zero === 3 ? gathersOf(plan, ranks[rank], each) : null;
    for (let tpRank = 0; tpRank < tp; tpRank++) {
      const links = [1, ep].map((size) => linksOfCopies(plan, rank, tpRank, size));
      const sums = links.map(() => ({ padded: 0, shard: 0, inStages: 0, gathered: 0 }));
      for (const buffer of buffersAt(plan, rank, tpRank)) {
        const { numel, shard, padded, kind, stages } = buffer, sum = sums[Number(isOfExperts(buffer))];
        sum.padded += padded;
        sum.shard += shard;
        sum.inStages += padded * stages.length;
        sum.gathered += gathers ? shard * gathers(buffer) : 0;
        const isTied = kind.includes("tied") && ends[0] !== ends[1]; // the other end of the pipeline has the table too
        if (isTied) enterHops(sent, plan, "gradients", rank, pp - 1 - rank, (zero ? shard : numel) * gradients, tpRank);
      }
      sums.forEach(({ padded, shard, inStages, gathered }, kind) => {
        if (zero === 3) sent.gather("gradients", links[kind], gathered * parameters);
        if (zero > 1) sent.scatter("gradients", links[kind], inStages * gradients, each);
        if (zero === 0) sent.allReduce("gradients", links[kind], padded, gradients);
        if (zero === 1) sent.scatter("gradients", links[kind], padded * gradients);
        if (zero === 1 || zero === 2) sent.gather("gradients", links[kind], shard * parameters);
      });
      enterRouters(sent, plan, links[0], rank, tpRank);
    }
  }
}

// How often a unit of ZeRO-3 is gathered: for every forward and backward, once for a pair with both halves of one stage, and
// for a W of its own again where a router computes its weight, with the unit before it.
function gathersOf(plan, steps, each) {
  const shared = new Map(), splits = new Map();
  const add = (counts, stage, number) => counts.set(stage, (counts.get(stage) ?? 0) + number);
  steps.forEach((step, place) => {
    const [stage, kind, m, other] = step, before = steps[place - 1];
    if (plan.overlap && stage === other) add(shared, stage, 1);
    if (kind !== "W") return;
    const isNext = before?.[0] === stage && before[1] === "I" && before[2] === m && before.length === 3;
    const isOne = !plan.overlap && stage === 0 && isNext; // a plain stage 0 runs both as one
    add(splits, stage, isOne ? 0 : 1);
  });
  const again = ({ stage, unit }) => {
    const before = Number(stage === 0), first = before + plan.dense[stage], last = before + plan.layers[stage]; // with a router
    if (plan.overlap) return stage === 0 || first < last;
    return first < last && unit >= first - 1 && unit < last;
  };
  return (buffer) => 2 * each - (shared.get(buffer.stage) ?? 0) + (again(buffer) ? splits.get(buffer.stage) ?? 0 : 0);
}

// The loads of the experts of all routers of a rank, once per step, also between two copies of a stage.
function enterRouters(sent, plan, links, rank, tpRank) {
  const { experts } = plan.model;
  if (!experts) return;
  const numbers = stagesAt(plan, rank).map((stage) => [stage, countsAt(plan, stage)[1] * experts.count]);
  sent.allReduce("routers", links, numbers.reduce((sum, [, number]) => sum + number, 0), NUMBER);
  for (const [stage, number] of numbers) {
    for (const other of holdersOf(plan, stage).filter((one) => one !== rank)) {
      enterHops(sent, plan, "routers", rank, other, number * NUMBER, tpRank);
    }
  }
}

// The two copies of a stage exchange their gradients: all of them, or each rank its shards of ZeRO-2 and 3.
function enterMirrors(sent, plan) {
  const { pp, tp, zero, copies } = plan, stride = plan.gpus / pp, nodeOf = (rank) => Math.floor(rank / plan.node);
  for (let rank = 0; rank < pp; rank++) {
    for (const stage of stagesAt(plan, rank)) {
      for (const other of holdersOf(plan, stage).filter((one) => one !== rank)) {
        for (let tpRank = 0; tpRank < tp; tpRank++) {
          const crossing = Array.from({ length: copies }, (_, copy) => copy).filter((copy) =>
            nodeOf(rank * stride + copy * tp + tpRank) !== nodeOf(other * stride + copy * tp + tpRank));
          for (const buffer of buffersAt(plan, rank, tpRank)) enterMirror(sent, plan, buffer, stage, crossing);
        }
      }
    }
  }
}

// One buffer; `crossing`: the ranks with copies whose mirror is on another node.  Of experts every place along ep has others.
function enterMirror(sent, { zero, copies, ep }, buffer, stage, crossing) {
  const numel = heldOf({ ...buffer, shard: buffer.numel }, 0, stage), places = buffer.copies < copies ? ep : 1;
  const all = numel * (zero > 1 ? places : copies), bytes = (held) => BigInt(held) * BigInt(STATE_BYTES.gradients);
  const share = (copy) => (zero > 1 ? heldOf(buffer, Math.floor(copy / places), stage) : numel);
  const isEven = !crossing.length || crossing.length === copies;
  const far = isEven ? (crossing.length ? all : 0) : crossing.reduce((sum, copy) => sum + share(copy), 0);
  sent.add("gradients", bytes(all), bytes(far));
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

// [bytes inside of nodes, bytes between them] of tp, cp, ep, pp, gradients, norm and routers.
export function trafficOf(plan, ranks) {
  const sent = new LinkBytes(AXES_OF_BYTES);
  enterLayers(sent, plan);
  enterPipeline(sent, plan);
  enterGradients(sent, plan, ranks);
  enterMirrors(sent, plan);
  enterNorm(sent, plan);
  return sent.found;
}
