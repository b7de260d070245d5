// The memory of every rank of pp at the peak of its own actions, in whole bytes: plan/places.py and kept_tensors.py.
//
// With T tokens on a rank, T' between the layers (T / tp under sequence parallelism), h, f and d the hidden size, the
// network's width and a head's size; `rules` are those of `estimate(..., MEGATRON)`.

import { ELEMENT_BYTES, STATE_BYTES, countsAt } from "./plan-model.mjs";
import { buffersAt } from "./plan-parts.mjs";
import { stagesAt } from "./plan-schedules.mjs";

const SUM_BYTES = 4, INDEX_BYTES = 8; // of scores and sums in 32 bits, of an order of rows
const sumOf = (numbers) => numbers.reduce((sum, value) => sum + value, 0);

// What attention keeps: its input, heads with or without norms of each, or latents, and the kernel's log-sum-exp.
function attentionBytes({ model, tokens, heads, keyHeads, between, boundary }, rules) {
  const { headSize, qkNorm, latent } = model, perHead = tokens * headSize * ELEMENT_BYTES;
  const sums = heads * tokens * SUM_BYTES;
  if (!latent) {
    const norms = qkNorm ? (heads + keyHeads) * (perHead + tokens * rules.scale) : 0;
    return boundary + norms + 2 * (heads + keyHeads) * perHead + sums;
  }
  const { query, kv, position, value } = latent, each = heads * tokens * ELEMENT_BYTES;
  const latents = between * ((2 * query + kv + position + kv) * ELEMENT_BYTES + 2 * rules.scale);
  return boundary + latents + each * (2 * headSize + 2 * value) + sums;
}

// What the router keeps up to its choice of experts.
function routerBytes({ model: { experts }, between, slots }) {
  const { normalise, sigmoid, count } = experts;
  const scores = normalise || sigmoid ? slots * (normalise && sigmoid ? 2 : 1) : between * count;
  return scores * SUM_BYTES + slots * INDEX_BYTES;
}

// What is kept from that choice on: weights and order of rows, experts and shared expert.  Experts with equal loads receive
// as many rows as a rank sends.
function exchangedBytes({ model: { experts, hidden }, tokens, slots, shared }) {
  const routes = (2 * (slots + slots) + experts.count) * INDEX_BYTES;
  const inner = slots * (hidden + 3 * experts.ffn) + 3 * tokens * shared;
  return slots * SUM_BYTES + routes + inner * ELEMENT_BYTES;
}

// Of a layer without experts: what it keeps, and what its backward takes above that, run again or not.
function denseLayer({ model: { hidden }, tokens, between, ffn, tp, recompute, boundary }, around) {
  const layer = around + 3 * tokens * ffn * ELEMENT_BYTES, stored = recompute ? boundary : layer;
  const gathered = tp > 1 ? tokens * hidden : 0;
  return { stored, working: (between * hidden + 3 * tokens * ffn + gathered) * ELEMENT_BYTES + layer - stored };
}

// Of one with experts; overlapped, it repeats only what is before the exchanges, when the experts' tensors are gone.
function sparseLayer(plan, around, attention) {
  const { model: { hidden, experts }, recompute, overlap, boundary, slots } = plan;
  const exchanged = exchangedBytes(plan), layer = around + routerBytes(plan) + exchanged;
  const backward = boundary + slots * (hidden + 3 * experts.ffn) * ELEMENT_BYTES;
  if (recompute && overlap) {
    const stored = boundary * (experts.shared ? 2 : 1) + exchanged; // with the shared expert's input
    return { stored, working: Math.max(backward, layer - stored - exchanged + boundary + attention) };
  }
  const stored = recompute ? boundary : layer;
  return { stored, working: backward + layer - stored };
}

// What one rank keeps and works with for one microbatch; `layers`: of a dense one, and of one with experts.
function tableOfLayer(plan, rules) {
  const { model: { hidden, experts }, tokens, between, vocabulary, boundary } = plan, logits = tokens * vocabulary;
  const norm = boundary + between * rules.scale, attention = attentionBytes(plan, rules);
  const around = 2 * norm + attention + boundary; // all but the network behind its input
  return {
    layers: [denseLayer(plan, around), ...(experts ? [sparseLayer(plan, around, attention)] : [])],
    ids: tokens * rules.ids, end: norm + boundary,
    logits: logits * rules.logit, loss: logits * rules.loss, head: (logits + 2 * tokens * hidden) * ELEMENT_BYTES,
    outputs: plan.overlap ? [boundary, logits * ELEMENT_BYTES] : [0, 0], // to the backward; of logits their gradient
  };
}

const isLastStage = (plan, stage) => stage === plan.numStages - 1;

// [layers, ends, logits] that a forward of a stage keeps.
function keptBy(plan, table, stage) {
  const isLast = isLastStage(plan, stage), counts = countsAt(plan, stage);
  return [table.layers.reduce((sum, { stored }, kind) => sum + counts[kind] * stored, 0),
    (stage === 0 ? table.ids : 0) + (isLast ? table.end : 0) + table.outputs[Number(isLast)], isLast ? table.logits : 0];
}

// What an action takes while it runs: the loss, the head, which frees the logits, or a layer, perhaps run again.
function workingOf(plan, table, stage, kind) {
  const isLast = isLastStage(plan, stage), freed = isLast ? table.logits : 0, phases = [isLast && kind !== "W" ? table.loss : 0];
  if (kind === "B" || kind === "I") {
    if (isLast) phases.push(table.head - freed);
    table.layers.forEach((one, place) => {
      if (countsAt(plan, stage)[place]) phases.push(one.working - freed);
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
  for (const step of steps) {
    if (step.length === 3) yield step;
    else yield* [step.slice(0, 3), step.slice(3)];
  }
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
      const action = `${stage}${kind}${microbatch}`;
      best = { total, layers: held[0], ends: held[1], logits: held[2], working: now, received, action };
    }
    if (kind === "B" || kind === "W") hold(stage, -1);
  }
  return best;
}

function statesOf(plan, buffers) {
  const full = sumOf(buffers.map((one) => one.padded));
  const shard = plan.zero ? sumOf(buffers.map((one) => one.shard)) : full;
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
    const stages = stagesAt(plan, rank), flat = buffersAt(plan, rank, 0, true), states = statesOf(plan, flat);
    const peak = peakOf(plan, table, stages, steps);
    const buffers = zeroBuffers(plan, flat) + stayingAt(plan, rules, stages);
    const allocated = sumOf(Object.values(states)) + peak.total + buffers;
    const [least, reserve, most] = rules.share.map((share, i) => Math.trunc(share * allocated) + rules.outside[i]);
    const total = allocated + reserve;
    return { ...states, ...peak, buffers, allocated, reserve, total, least: allocated + least, most: allocated + most };
  });
}
