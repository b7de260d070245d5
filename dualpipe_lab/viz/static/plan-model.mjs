// A plan: is it legal, which layers and parameters has each rank.
//
// The rules of dualpipe_lab/plan/rules.py for what the page offers: bfloat16, sequence parallelism wherever tp is above 1,
// zigzag order along cp, experts within the data ranks, shared out along tp, each with the same number of rows.

import { partsAt } from "./plan-parts.mjs";
import { SCHEDULES, stagesPerRank, stepsOf } from "./plan-schedules.mjs";
import { layerCounts } from "./plan-split.mjs";

export const ELEMENT_BYTES = 2; // of a number in bfloat16
const MOST_PASSES = 2 ** 14; // of microbatches through stages: what the page computes within 100 ms
export const STATE_BYTES = { parameters: 2, gradients: 4, masters: 4, moments: 8 };

// ---- the plan

// What the reader chose, with what follows; `problem` is the rule that it breaks, or null.
export function planOf(facts, choice) {
  const { gpus, node, tp, cp, pp, schedule, rows, batch, sequence } = choice;
  const model = facts.models[choice.model], card = facts.gpus[choice.gpu], dp = gpus / (tp * cp * pp);
  const count = batch / (dp * rows), numStages = pp * stagesPerRank(schedule, pp), copies = dp * cp;
  const plan = { ...choice, model, card, dp, count, numStages, copies, node: Math.min(node, gpus) };
  Object.assign(plan, sizesOf(model, rows * (sequence / cp), tp));
  plan.boundary = plan.between * model.hidden * ELEMENT_BYTES;
  plan.problem = problemOf(plan);
  if (!plan.problem) {
    plan.layers = layerCounts(model, numStages);
    plan.dense = denseCounts(plan);
    const partsOf = (isHeld) => Array.from({ length: pp }, (_, rank) => partsAt(plan, rank, 0, isHeld));
    plan.parts = partsOf(false);
    plan.held = tp > 1 && model.experts ? partsOf(true) : plan.parts; // where the ranks of tp share the experts out
  }
  return plan;
}

// Sizes on the first rank of tp, whose shards are the largest, for a microbatch of so many tokens.
export function sizesOf(model, tokens, tp) {
  const { experts } = model, sharedWidth = experts ? experts.shared * experts.ffn : 0;
  return {
    tokens, between: tokens / tp, // between the layers
    heads: model.heads / tp, keyHeads: Math.max(Math.floor(model.keyHeads / tp), 1),
    keyCopies: Math.max(Math.floor(tp / model.keyHeads), 1), // ranks of tp with the same key heads
    ffn: Math.ceil(model.ffn / tp), vocabulary: Math.ceil(model.vocabulary / tp),
    slots: experts ? (tokens / tp) * experts.perToken : 0, // rows at the experts of a rank
    sharedWidth, shared: Math.ceil(sharedWidth / tp),
  };
}

export const countsAt = (plan, stage) => [plan.dense[stage], plan.layers[stage] - plan.dense[stage]]; // without and with experts

// Of each stage, the layers without experts, which come first.
function denseCounts({ model, layers }) {
  let before = 0;
  return layers.map((count) => {
    const found = model.experts ? Math.min(count, Math.max(0, model.experts.dense - before)) : count;
    before += count;
    return found;
  });
}

function problemOf(plan) {
  const { gpus, tp, cp, pp, dp, copies, count, zero, rows, batch, numStages, model } = plan;
  if (gpus % plan.node) {
    return `${gpus} GPUs do not fill nodes of ${plan.node}; use ${Math.ceil(gpus / plan.node) * plan.node} GPUs`;
  }
  if (!Number.isInteger(dp)) {
    return `pp ${pp} x cp ${cp} x tp ${tp} are ${tp * cp * pp} ranks, and there are ${gpus} GPUs; use smaller axes or more GPUs`;
  }
  const wrong = headProblem(model, tp) ?? sequenceProblem(plan) ?? expertProblem(plan);
  if (wrong) return wrong;
  if (numStages > model.layers) {
    return `every stage needs a layer, got ${model.layers} layers for ${numStages} stages; use a smaller pp`;
  }
  if (zero && copies === 1) {
    return `ZeRO-${zero} shards over the ranks of dp and cp that copy a weight, got one; use ZeRO-0, or a smaller tp or pp`;
  }
  if (!Number.isInteger(count)) {
    return `${batch} sequences do not divide among ${dp} data ranks and microbatches of ${rows}; ` +
      `use a batch of ${dp * rows} or more, or smaller microbatches`;
  }
  if (isLong(plan)) {
    return `the page computes ${MOST_PASSES} passes of microbatches through stages, got ${count} x ${numStages}; ` +
      "use larger microbatches";
  }
  const refusal = pp > 1 ? SCHEDULES[plan.schedule].rule?.(pp, count) ?? null : null;
  return refusal ?? (plan.overlap ? overlapProblem(plan) : null);
}

function expertProblem({ model, ep, tp, copies, overlap }) {
  const { experts } = model;
  if (!experts && (ep > 1 || overlap)) return "ep and overlap are for experts, and this model has none; use ep 1 without overlap";
  if (!experts) return null;
  if (experts.count % ep) return `${experts.count} experts do not divide among ${ep} ranks of ep; use an ep that divides them`;
  if (copies % ep) return `ep shares the experts out among the ${copies} ranks of dp and cp, and must divide them, got ep ${ep}`;
  if ((experts.count / ep) % tp) {
    return `tp shares out the ${experts.count / ep} experts of a rank of ep, got tp ${tp}; use a smaller ep or tp`;
  }
  if (experts.ffn % tp) return `the ${experts.ffn} features of an expert do not divide among ${tp} ranks of tp; use another tp`;
  return null;
}

function overlapProblem({ schedule, pp, count }) {
  const isPair = (step) => step.length > 3, mayPair = pp > 1 && SCHEDULES[schedule].pairs;
  if (mayPair && stepsOf(schedule, pp, count).some((steps) => steps.some(isPair))) return null;
  return "overlap needs pairs of a forward and a backward, and this pipeline has none; " +
    "use DualPipe, DualPipeV or a paired schedule";
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
  const remedy = `use a multiple of ${2 * cp * tp}`;
  if (sequence % (2 * cp)) return `cp shares a sequence out in ${2 * cp} equal chunks, got ${sequence} tokens; ${remedy}`;
  if ((sequence / cp) % tp) return `tp shares out the ${sequence / cp} tokens of a rank evenly, got tp ${tp}; ${remedy}`;
  return null;
}
