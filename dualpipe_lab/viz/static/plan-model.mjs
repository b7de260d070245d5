// A plan for a dense model: is it legal, which layers and parameters has each rank.
//
// The rules of dualpipe_lab/plan/rules.py, pp/partition.py and plan/gradient_traffic.py, for what the page offers: Llamas
// and Qwen3, numbers of ranks that are powers of two, bfloat16, sequence parallelism wherever tp is above 1.

import { SCHEDULES, holdersOf, stagesAt, stagesPerRank } from "./plan-schedules.mjs";

export const ELEMENT_BYTES = 2; // of a number in bfloat16
const MOST_PASSES = 2 ** 14; // of microbatches through stages: what the page computes within 100 ms
export const STATE_BYTES = { parameters: 2, gradients: 4, masters: 4, moments: 8 };
const BUCKET_BYTES = 25 * 2 ** 20;

const splits = new Map(); // by sizes: a search asks again and again

export function layerCounts(model, numStages) {
  const key = `${numStages} ${Object.values(model)}`;
  if (!splits.has(key)) splits.set(key, bestSplit(model, numStages));
  return splits.get(key);
}

// The layers of each stage: the least load on the slowest stage; of these the most even; of these the fewest in front.
function bestSplit(model, numStages) {
  if (numStages === 1) return [model.layers];
  const layer = BigInt(layerSize(model)), head = BigInt(model.vocabulary * model.hidden), others = numStages - 1;
  let best = null;
  for (let last = 1; last <= model.layers - others; last++) {
    const least = Math.floor((model.layers - last) / others), more = (model.layers - last) % others;
    const counts = [...new Array(others - more).fill(least), ...new Array(more).fill(least + 1), last];
    const loads = counts.map((count, stage) => BigInt(count) * layer + (stage === others ? head : 0n));
    const most = loads.reduce((a, b) => (a > b ? a : b)), squares = loads.reduce((sum, load) => sum + load * load, 0n);
    const isBetter = !best || most < best.most || (most === best.most && (squares < best.squares ||
      (squares === best.squares && comesFirst(counts, best.counts))));
    if (isBetter) best = { counts, most, squares };
  }
  return best.counts;
}

function comesFirst(counts, others) {
  const place = counts.findIndex((count, stage) => count !== others[stage]);
  return place >= 0 && counts[place] < others[place];
}

function layerSize({ hidden, ffn, heads, keyHeads, headSize }) {
  return (2 * heads + 2 * keyHeads) * headSize * hidden + 3 * ffn * hidden + 2 * hidden;
}

// ---- the plan

// What the reader chose, with what follows; `problem` is the rule that it breaks, or null.
export function planOf(facts, choice) {
  const { gpus, node, tp, cp, pp, schedule, rows, batch, sequence } = choice;
  const model = facts.models[choice.model], card = facts.gpus[choice.gpu], dp = gpus / (tp * cp * pp);
  const count = batch / (dp * rows), numStages = pp * stagesPerRank(schedule, pp), copies = dp * cp;
  const plan = { ...choice, model, card, dp, count, numStages, copies, node: Math.min(node, gpus) };
  plan.tokens = rows * (sequence / cp); // of a microbatch on one rank
  plan.between = tp > 1 ? plan.tokens / tp : plan.tokens; // of these, between the layers
  plan.heads = model.heads / tp;
  plan.keyHeads = Math.max(Math.floor(model.keyHeads / tp), 1);
  plan.keyCopies = Math.max(Math.floor(tp / model.keyHeads), 1); // ranks of tp with the same key heads
  plan.ffn = Math.ceil(model.ffn / tp); // on the first rank of tp, whose shards are the largest
  plan.vocabulary = Math.ceil(model.vocabulary / tp);
  plan.boundary = plan.between * model.hidden * ELEMENT_BYTES;
  plan.problem = problemOf(plan);
  if (!plan.problem) {
    plan.layers = layerCounts(model, numStages);
    plan.parts = Array.from({ length: pp }, (_, rank) => partsAt(plan, rank, 0));
  }
  return plan;
}

function problemOf(plan) {
  const { gpus, tp, cp, pp, dp, copies, count, zero, rows, batch, numStages, model } = plan;
  if (gpus % plan.node) return `${gpus} GPUs do not fill nodes of ${plan.node}; use ${Math.ceil(gpus / plan.node) * plan.node} GPUs`;
  if (!Number.isInteger(dp)) {
    return `pp ${pp} x cp ${cp} x tp ${tp} are ${tp * cp * pp} ranks, and there are ${gpus} GPUs; use smaller axes or more GPUs`;
  }
  const heads = headProblem(model, tp) ?? sequenceProblem(plan);
  if (heads) return heads;
  if (numStages > model.layers) return `every stage needs a layer, got ${model.layers} layers for ${numStages} stages; use a smaller pp`;
  if (zero && copies === 1) {
    return `ZeRO-${zero} shards over the ranks of dp and cp that copy a weight, got one; use ZeRO-0, or a smaller tp or pp`;
  }
  if (!Number.isInteger(count)) {
    return `${batch} sequences do not divide among ${dp} data ranks and microbatches of ${rows}; ` +
      `use a batch of ${dp * rows} or more, or smaller microbatches`;
  }
  if (isLong(plan)) {
    return `the page computes ${MOST_PASSES} passes of microbatches through stages, got ${count} x ${numStages}; use larger microbatches`;
  }
  return pp > 1 ? SCHEDULES[plan.schedule].rule?.(pp, count) ?? null : null;
}

export const isLong = ({ count, numStages }) => count * numStages > MOST_PASSES;

function headProblem({ heads, keyHeads }, tp) {
  if (heads % tp) return `${heads} heads do not divide among ${tp} ranks of tp; use a tp that divides them`;
  if (keyHeads % tp && tp % keyHeads) {
    return `key heads divide among the ranks of tp, or ranks among key heads, got ${keyHeads} for tp ${tp}; use another tp`;
  }
  return null;
}

function sequenceProblem({ sequence, cp, tp }) {
  if (sequence % (2 * cp)) return `cp shares a sequence out in ${2 * cp} equal chunks, got ${sequence} tokens; use a multiple of ${2 * cp * tp}`;
  if ((sequence / cp) % tp) return `tp shares out the ${sequence / cp} tokens of a rank evenly, got tp ${tp}; use a multiple of ${2 * cp * tp}`;
  return null;
}

// ---- parameters

// The shard of a dimension on a rank of tp: the last ones may be smaller, or empty.
const shardOf = (length, tp, tpRank) => Math.max(0, Math.min(Math.ceil(length / tp), length - tpRank * Math.ceil(length / tp)));

const isKeyCopy = ({ keyCopies }, tpRank) => keyCopies > 1 && tpRank % keyCopies > 0; // of the rank before it on tp

// What the sizes of the parameters on a rank of tp depend on.
export const shapeAt = (plan, tpRank) =>
  `${shardOf(plan.model.vocabulary, plan.tp, tpRank)} ${shardOf(plan.model.ffn, plan.tp, tpRank)} ${isKeyCopy(plan, tpRank)}`;

// The parameters of a rank of pp in the order of its modules: {stage, unit of ZeRO-3, numel, kind of its bucket}.
export function partsAt(plan, rank, tpRank) {
  const sharded = plan.tp > 1 ? "tp" : "", layer = layerParts(plan, sharded, tpRank);
  return stagesAt(plan, rank).flatMap((stage) => {
    const { hidden, tied } = plan.model, isFirst = stage === 0, isLast = stage === plan.numStages - 1;
    const isOne = tied && isFirst && isLast;
    const table = { numel: shardOf(plan.model.vocabulary, plan.tp, tpRank) * hidden, kind: sharded };
    const shared = { ...table, kind: `${sharded} tied` }, norm = { numel: hidden, kind: "" };
    const units = isFirst ? [[tied && !isOne ? shared : table]] : [];
    for (let number = 0; number < plan.layers[stage]; number++) units.push(layer);
    const copy = { ...table, kind: `${sharded} tied replica` };
    if (isLast) units.push([norm], tied ? (isFirst ? [] : [copy]) : [table]);
    const mark = holdersOf(plan, stage)[0] === rank ? "" : " mirror"; // of a stage that another rank has too
    return units.flatMap((parts, unit) => parts.map((part) => ({ ...part, kind: part.kind + mark, stage, unit: isOne ? 0 : unit })));
  });
}

function layerParts(plan, sharded, tpRank) {
  const { model, heads, tp, keyHeads } = plan;
  const { hidden, headSize, qkNorm } = model, norm = { numel: hidden, kind: "" };
  const product = (width, kind = sharded) => ({ numel: width * hidden, kind });
  const query = product(heads * headSize), network = product(shardOf(model.ffn, tp, tpRank));
  const key = product(keyHeads * headSize, `${Math.min(tp, model.keyHeads) > 1 ? "tp" : ""}${isKeyCopy(plan, tpRank) ? " replica" : ""}`);
  const small = { numel: headSize, kind: "" };
  return [norm, query, key, key, query, ...(qkNorm ? [small, small] : []), norm, network, network, network];
}

// Flat buffers of a rank: buckets, or units under ZeRO-3; each padded for the ranks that hold copies.
export function buffersOf(plan, parts) {
  const groups = plan.zero === 3 ? unitsOf(parts) : bucketsOf(parts);
  return groups.map((group) => {
    const numel = group.reduce((sum, part) => sum + part.numel, 0), shard = Math.ceil(numel / plan.copies);
    return { numel, shard, padded: shard * plan.copies, kind: group[0].kind, parts: group, stages: [...new Set(group.map((part) => part.stage))] };
  });
}

function unitsOf(parts) {
  const groups = [];
  for (const part of parts) {
    const before = groups.at(-1)?.[0];
    if (before && before.stage === part.stage && before.unit === part.unit && before.kind === part.kind) groups.at(-1).push(part);
    else groups.push([part]);
  }
  return groups;
}

function bucketsOf(parts) {
  const groups = [];
  let size = 0;
  for (const part of [...parts].reverse()) {
    const isNext = groups.length && groups.at(-1)[0].kind === part.kind && size + part.numel * ELEMENT_BYTES <= BUCKET_BYTES;
    if (isNext) groups.at(-1).push(part);
    else groups.push([part]);
    size = (isNext ? size : 0) + part.numel * ELEMENT_BYTES;
  }
  return groups;
}
