// The memory of every rank of pp at the peak of its own actions, in whole bytes: plan/places.py and kept_tensors.py.
//
// With T tokens on a rank, T' between the layers (T / tp under sequence parallelism), h, f and d the hidden size, the
// network's width and a head's size; `rules` are those of `estimate(..., MEGATRON)`.

import { ELEMENT_BYTES, STATE_BYTES, buffersOf } from "./plan-model.mjs";
import { stagesAt } from "./plan-schedules.mjs";

const sumOf = (numbers) => numbers.reduce((sum, value) => sum + value, 0);

// What one rank keeps and works with for one microbatch.
function tableOfLayer(plan, rules) {
  const { model, tokens, between, heads, keyHeads, ffn, vocabulary } = plan, { hidden, headSize, qkNorm } = model;
  const perHead = tokens * headSize * ELEMENT_BYTES, norm = between * (hidden * ELEMENT_BYTES + rules.scale);
  const input = between * hidden * ELEMENT_BYTES;
  const norms = qkNorm ? (heads + keyHeads) * (perHead + tokens * rules.scale) : 0;
  const attention = input + norms + 2 * heads * perHead + 2 * keyHeads * perHead + heads * tokens * 4;
  const layer = 2 * norm + attention + input + 3 * tokens * ffn * ELEMENT_BYTES, logits = tokens * vocabulary;
  const gathered = plan.tp > 1 ? tokens * hidden : 0;
  return {
    layer, stored: plan.recompute ? plan.boundary : layer, ids: tokens * rules.ids, end: norm + input,
    logits: logits * rules.logit, loss: logits * rules.loss, head: (logits + 2 * tokens * hidden) * ELEMENT_BYTES,
    backward: (between * hidden + 3 * tokens * ffn + gathered) * ELEMENT_BYTES,
  };
}

const isLastStage = (plan, stage) => stage === plan.numStages - 1;

// [layers, ends, logits] that a forward of a stage keeps.
const keptBy = (plan, table, stage) => [plan.layers[stage] * table.stored,
  (stage === 0 ? table.ids : 0) + (isLastStage(plan, stage) ? table.end : 0), isLastStage(plan, stage) ? table.logits : 0];

// What an action takes while it runs: the loss, the head, which frees the logits, or a layer, perhaps run again.
function workingOf(plan, table, stage, kind) {
  const isLast = isLastStage(plan, stage), phases = [isLast && kind !== "W" ? table.loss : 0], freed = isLast ? table.logits : 0;
  if (kind === "B" || kind === "I") {
    if (isLast) phases.push(table.head - freed);
    phases.push(table.backward + table.layer - table.stored - freed);
  }
  return Math.max(...phases);
}

// Buffers for the gradients of weights, one of each shape, and of libraries of products.
function stayingAt(plan, rules, stages) {
  const { model, heads, keyHeads, ffn, vocabulary } = plan, { hidden, headSize } = model;
  const weights = ((heads + 2 * keyHeads) + heads) * headSize * hidden + 3 * ffn * hidden;
  const head = isLastStage(plan, Math.max(...stages)) ? vocabulary * hidden : 0;
  return (weights + head) * ELEMENT_BYTES + rules.workspace;
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
    const stages = stagesAt(plan, rank), flat = buffersOf(plan, plan.parts[rank]), states = statesOf(plan, flat);
    const peak = peakOf(plan, table, stages, steps);
    const buffers = zeroBuffers(plan, flat) + stayingAt(plan, rules, stages);
    const allocated = sumOf(Object.values(states)) + peak.total + buffers;
    const [least, reserve, most] = rules.share.map((share, i) => Math.trunc(share * allocated) + rules.outside[i]);
    return { ...states, ...peak, buffers, allocated, reserve, total: allocated + reserve, least: allocated + least, most: allocated + most };
  });
}
