// The memory of every rank of pp at the peak of its own actions, in whole bytes: plan/places.py and kept_tensors.py.
//
// With T tokens on a rank, T' between the layers (T / tp under sequence parallelism), h, f and d the hidden size, the
// network's width and a head's size; `rules` are those of `estimate(..., MEGATRON)`.

import { ELEMENT_BYTES, STATE_BYTES, countsAt } from "./plan-model.mjs";
import { buffersOf, partsAt } from "./plan-parts.mjs";
import { stagesAt } from "./plan-schedules.mjs";

const sumOf = (numbers) => numbers.reduce((sum, value) => sum + value, 0);

// What attention keeps of heads, with or without norms of each; of latents, the log-sum-exp of the kernel with both.
function headBytes({ model, tokens, between, heads, keyHeads }, rules) {
  const { hidden, headSize, qkNorm, latent } = model, sums = heads * tokens * 4, input = between * hidden * ELEMENT_BYTES;
  const perHead = tokens * headSize * ELEMENT_BYTES;
  if (!latent) {
    const norms = qkNorm ? (heads + keyHeads) * (perHead + tokens * rules.scale) : 0;
    return input + norms + 2 * heads * perHead + 2 * keyHeads * perHead + sums;
  }
  const { query, kv, position, value } = latent, each = heads * tokens * ELEMENT_BYTES;
  const latents = between * ((2 * query + kv + position + kv) * ELEMENT_BYTES + 2 * rules.scale);
  return input + latents + each * (2 * headSize + 2 * value) + sums;
}

const INDEX = 8, NUMBER_BYTES = 4; // of an order of rows, of a router's score

// What router, experts and shared expert keep.
function expertBytes({ model, tokens, between, slots, shared, ep, tp }) {
  const { experts, hidden } = model, rows = rowsAtExperts({ experts, between, slots, ep, tp });
  const scores = experts.normalise || experts.sigmoid ? slots * (experts.normalise && experts.sigmoid ? 2 : 1) : between * experts.count;
  const router = (scores + rows) * NUMBER_BYTES + slots * INDEX + 2 * (slots + rows) * INDEX + experts.count * INDEX;
  return router + rows * (hidden + 3 * experts.ffn) * ELEMENT_BYTES + 3 * tokens * shared * ELEMENT_BYTES;
}

// Rows that the experts of a rank receive where all experts have as many.
function rowsAtExperts({ experts, between, slots, ep, tp }) {
  return Math.min(slots, between * ep * tp * Math.min(experts.perToken, Math.floor(experts.count / (ep * tp))));
}

// What one rank keeps and works with for one microbatch; `layers`: of a dense one, and of one with experts.
function tableOfLayer(plan, rules) {
  const { model, tokens, between, ffn, vocabulary } = plan, { hidden, experts } = model;
  const norm = between * (hidden * ELEMENT_BYTES + rules.scale), input = between * hidden * ELEMENT_BYTES;
  const around = 2 * norm + headBytes(plan, rules) + input, logits = tokens * vocabulary, gathered = plan.tp > 1 ? tokens * hidden : 0;
  const layerOf = (layer, backward) => ({ layer, stored: plan.recompute ? plan.boundary : layer, backward: backward * ELEMENT_BYTES });
  const layers = [layerOf(around + 3 * tokens * ffn * ELEMENT_BYTES, between * hidden + 3 * tokens * ffn + gathered)];
  if (experts) {
    const rows = rowsAtExperts({ ...plan, experts });
    layers.push(layerOf(around + expertBytes(plan), between * hidden + rows * (hidden + 3 * experts.ffn)));
  }
  return {
    layers, ids: tokens * rules.ids, end: norm + input,
    logits: logits * rules.logit, loss: logits * rules.loss, head: (logits + 2 * tokens * hidden) * ELEMENT_BYTES,
  };
}

const isLastStage = (plan, stage) => stage === plan.numStages - 1;

// [layers, ends, logits] that a forward of a stage keeps.
function keptBy(plan, table, stage) {
  const isLast = isLastStage(plan, stage), counts = countsAt(plan, stage);
  return [table.layers.reduce((sum, { stored }, kind) => sum + counts[kind] * stored, 0),
    (stage === 0 ? table.ids : 0) + (isLast ? table.end : 0), isLast ? table.logits : 0];
}

// What an action takes while it runs: the loss, the head, which frees the logits, or a layer, perhaps run again.
function workingOf(plan, table, stage, kind) {
  const isLast = isLastStage(plan, stage), phases = [isLast && kind !== "W" ? table.loss : 0], freed = isLast ? table.logits : 0;
  if (kind === "B" || kind === "I") {
    if (isLast) phases.push(table.head - freed);
    table.layers.forEach((one, place) => {
      if (countsAt(plan, stage)[place]) phases.push(one.backward + one.layer - one.stored - freed);
    });
  }
  return Math.max(...phases);
}

// Buffers for the gradients of weights, one of each shape, and of libraries of products.
function stayingAt(plan, rules, stages) {
  const { model, heads, keyHeads, ffn, vocabulary, shared } = plan, { hidden, headSize, latent, experts } = model;
  const has = [0, 1].map((kind) => stages.some((stage) => countsAt(plan, stage)[kind]));
  const attention = latent
    ? hidden * (latent.query + latent.kv + latent.position) +
      heads * (headSize * latent.query + (latent.content + latent.value) * latent.kv + latent.value * hidden)
    : 2 * (heads + keyHeads) * headSize * hidden;
  const networks = (has[0] ? 3 * ffn * hidden : 0) + (has[1] ? 3 * (experts.ffn + shared) * hidden : 0);
  const head = isLastStage(plan, Math.max(...stages)) ? vocabulary * hidden : 0;
  return (attention + networks + head) * ELEMENT_BYTES + rules.workspace + (has[1] ? rules.expertWorkspace : 0);
}

// Every action of some steps, of a pair the forward first.
function* actionsIn(steps) {
  for (const step of steps) for (let at = 0; at < step.length; at += 3) yield at || step.length > 3 ? step.slice(at, at + 3) : step;
}

function peakOf(plan, table, stages, steps) {
  const kept = new Map(), count = new Map(stages.map((stage) => [stage, keptBy(plan, table, stage)]));
  const working = new Map(), held = [0, 0, 0];
  let best = { total: 0, layers: 0, ends: 0, logits: 0, working: 0, received: 0, action: "" };
  const hold = (stage, sign) => {
    kept.set(stage, (kept.get(stage) ?? 0) + sign);
    count.get(stage).forEach((bytes, part) => { held[part] += sign * bytes; });
  };
  for (const [stage, kind, microbatch] of actionsIn(steps)) {
    if (kind === "F") hold(stage, 1);
    const key = `${stage}${kind}`;
    if (!working.has(key)) working.set(key, workingOf(plan, table, stage, kind));
    const idle = stages.filter((one) => one !== 0 && !kept.get(one)).length;
    const received = 2 * idle * plan.boundary, now = working.get(key);
    const total = held[0] + held[1] + held[2] + now + received;
    if (total > best.total) {
      best = { total, layers: held[0], ends: held[1], logits: held[2], working: now, received, action: `${stage}${kind}${microbatch}` };
    }
    if (kind === "B" || kind === "W") hold(stage, -1);
  }
  return best;
}

export function statesOf(plan, buffers) {
  const full = sumOf(buffers.map((one) => one.padded)), shard = plan.zero ? sumOf(buffers.map((one) => one.shard)) : full;
  return {
    parameters: (plan.zero === 3 ? shard : full) * STATE_BYTES.parameters,
    gradients: (plan.zero > 1 ? shard : full) * STATE_BYTES.gradients,
    masters: shard * STATE_BYTES.masters, moments: shard * STATE_BYTES.moments,
  };
}

// The two largest buckets of gradients, or units of weights and gradients.
function zeroBuffers(plan, buffers) {
  if (plan.zero < 2) return 0;
  const largest = sumOf(buffers.map((one) => one.padded).sort((a, b) => a - b).slice(-2));
  return largest * (STATE_BYTES.gradients + (plan.zero === 3 ? STATE_BYTES.parameters : 0));
}

// One entry for each rank of pp; `ranks` are its steps (`stepsOf`).
export function memoryOfRanks(facts, plan, ranks) {
  const { rules } = facts, table = tableOfLayer(plan, rules);
  return ranks.map((steps, rank) => {
    const stages = stagesAt(plan, rank), flat = buffersOf(plan, partsAt(plan, rank, 0, true)), states = statesOf(plan, flat);
    const peak = peakOf(plan, table, stages, steps);
    const buffers = zeroBuffers(plan, flat) + stayingAt(plan, rules, stages);
    const allocated = sumOf(Object.values(states)) + peak.total + buffers;
    const [least, reserve, most] = rules.share.map((share, i) => Math.trunc(share * allocated) + rules.outside[i]);
    return { ...states, ...peak, buffers, allocated, reserve, total: allocated + reserve, least: allocated + least, most: allocated + most };
  });
}
