// The seconds of a step: plan/stage_times.py, gradient_times.py and step_time.py with MEGATRON_TIME.
//
// Seconds are assumed: they rest on efficiencies and overlaps that other people measured, which `facts` brings along.

import { collective, endCalls, expertGroups, groupOf, layerCalls, message, partAt, secondsOfCalls } from "./plan-calls.mjs";
import { ELEMENT_BYTES, STATE_BYTES, sizesOf } from "./plan-model.mjs";
import { isOfExperts } from "./plan-parts.mjs";
import { holdersOf } from "./plan-schedules.mjs";
import { KINDS, compileParts } from "./program.mjs";
import { newTimes, simulate } from "./simulate.mjs";

const NANO = 1e9, UPDATE_BYTES = 30, LAYER_KERNELS = 6, EXPERT_KERNELS = 6, HEAD_KERNELS = 4;
const total = (seconds) => Object.values(seconds).reduce((sum, value) => sum + value, 0);

// ---- stages

const memorySeconds = ({ card }, bytes) => bytes / (card.memoryBandwidth * partAt(card.memoryEfficiency, bytes));

function productSeconds(plan, [rows, inner, outer, times = 1]) {
  const { card } = plan, flops = 2 * rows * inner * outer, bytes = (rows * inner + inner * outer + rows * outer) * times * ELEMENT_BYTES;
  return Math.max((flops * times) / (card.peak * partAt(card.efficiency, flops)), memorySeconds(plan, bytes)) + card.overhead;
}

// Pairs of a query and a key that the slowest rank of a ring computes for one sequence, in zigzag order.
export function causalPairs(length, cp) {
  const size = length / cp;
  return (size * (size + 1)) / 2 + (cp - 1) * Math.floor((size * size) / 2);
}

function attentionProducts({ model, tokens, between, heads, keyHeads }) {
  const { hidden, headSize, latent } = model;
  if (!latent) return [[tokens, hidden, (heads + 2 * keyHeads) * headSize], [tokens, heads * headSize, hidden]];
  const { query, kv, position, content, value } = latent;
  return [[between, hidden, query], [between, hidden, kv + position], [tokens, query, heads * headSize],
    [tokens, kv, heads * (content + value)], [tokens, heads * value, hidden]];
}

// A router, experts with equally many rows, and the shared expert.
function expertProducts({ model, tokens, between, slots, shared, ep }) {
  const { hidden, experts } = model, here = experts.count / ep, each = Math.ceil(slots / here);
  return [[between, hidden, experts.count], [each, hidden, 2 * experts.ffn, here], [each, experts.ffn, hidden, here],
    ...(shared ? [[tokens, hidden, 2 * shared], [tokens, shared, hidden]] : [])];
}

// What runs before a layer's network: its attention, and what norms, residual sums and rotations move.
function attentionWork(plan) {
  const { model: { hidden, headSize, latent }, tokens, between, heads, keyHeads } = plan;
  const widths = headSize + (latent ? latent.value : headSize);
  const bytes = (10 * between * hidden + 2 * tokens * (heads + keyHeads) * headSize) * ELEMENT_BYTES;
  return {
    products: attentionProducts(plan), core: 2 * plan.rows * causalPairs(plan.sequence, plan.cp) * heads * widths,
    forward: bytes, backward: 2 * bytes, kernels: LAYER_KERNELS,
  };
}

// Of a layer: products, attention and bytes that the rest moves forward and backward, and kernels of it; the same of the last norm, head and loss.
function layerWork(plan, isSparse) {
  const { model: { hidden, experts }, tokens, ffn, slots, shared } = plan, before = attentionWork(plan);
  const network = isSparse ? expertProducts(plan) : [[tokens, hidden, 2 * ffn], [tokens, ffn, hidden]];
  const moved = isSparse ? 3 * tokens * shared + slots * (4 * hidden + 3 * experts.ffn) : 3 * tokens * ffn;
  const bytes = before.forward + moved * ELEMENT_BYTES;
  return {
    products: [...before.products, ...network], core: before.core,
    forward: bytes, backward: 2 * bytes, kernels: before.kernels + (isSparse ? EXPERT_KERNELS : 0),
  };
}

// What recomputation repeats of it: of overlapped experts only what is before their exchanges.
function workAgain(plan, isSparse) {
  if (!isSparse || !plan.overlap) return layerWork(plan, isSparse);
  const before = attentionWork(plan), [router] = expertProducts(plan);
  return { ...before, products: [...before.products, router] };
}

function headWork({ model, tokens, between, vocabulary }) {
  const norm = 4 * between * model.hidden * ELEMENT_BYTES, logits = tokens * vocabulary;
  return {
    products: [[tokens, model.hidden, vocabulary]], core: 0,
    forward: norm + 12 * logits, backward: 2 * norm + 8 * logits, kernels: HEAD_KERNELS,
  };
}

// Seconds of one pass through a part of a stage, F or I, by what they are spent on.  The backward of attention's kernel
// computes 5 products instead of 2.
function passSeconds({ time: rules }, plan, work, calls, isBackward) {
  const { card } = plan, part = partAt(rules.attention[Number(isBackward)], plan.sequence);
  const products = work.products.reduce((sum, product) => sum + productSeconds(plan, product), 0);
  const attention = work.core ? (work.core * (isBackward ? 2.5 : 1)) / (card.peak * part) + card.overhead : 0;
  const moved = memorySeconds(plan, isBackward ? work.backward : work.forward);
  const elementwise = moved + work.kernels * (isBackward ? 2 : 1) * card.overhead;
  const { tp, cp, ep } = secondsOfCalls(plan, calls, isBackward);
  return { products, attention, elementwise, tp: tp * (1 - rules.tensorHidden), cp: Math.max(0, cp - attention), ep };
}

// Seconds of F, I and W of a part of a stage.
function secondsOf(facts, plan, work, calls) {
  const F = passSeconds(facts, plan, work, calls.F, false), I = passSeconds(facts, plan, work, calls.I, true);
  return { F, I, W: { products: F.products } };
}

function layerSeconds(facts, plan, isSparse) {
  const calls = layerCalls(plan, isSparse), found = secondsOf(facts, plan, layerWork(plan, isSparse), calls);
  if (plan.recompute) found.I.again = total(passSeconds(facts, plan, workAgain(plan, isSparse), calls.again, false));
  return found;
}

function addTo(sums, part) {
  for (const [kind, seconds] of Object.entries(part)) {
    for (const [name, value] of Object.entries(seconds)) sums[kind][name] = (sums[kind][name] ?? 0) + value;
  }
}

function stageSeconds(facts, plan, parts) {
  const ends = endCalls(plan), rows = 2 * plan.tokens * plan.model.hidden * ELEMENT_BYTES;
  const embedding = { products: [], core: 0, forward: rows, backward: 2 * rows, kernels: 0 };
  const layers = (plan.model.experts ? [false, true] : [false]).map((isSparse) => layerSeconds(facts, plan, isSparse));
  const first = secondsOf(facts, plan, embedding, ends.embedding), last = secondsOf(facts, plan, headWork(plan), ends.head);
  return plan.layers.map((count, stage) => {
    const found = { F: {}, I: {}, W: {} };
    for (let number = 0; number < count; number++) addTo(found, layers[Number(number >= plan.dense[stage])]);
    if (stage === 0) addTo(found, first);
    if (stage === plan.numStages - 1) addTo(found, last);
    if (plan.zero > 1) addZero(plan, found, parts[holdersOf(plan, stage)[0]].filter((part) => part.stage === stage));
    return found;
  });
}

// ---- gradients and weights

const numelOf = (parts) => parts.reduce((sum, part) => sum + part.numel, 0);

// Of dense parameters and of experts, the ranks with copies and the elements.
function numelsOf(plan, parts) {
  const groups = [groupOf(plan, ["dp", "cp"]), expertGroups(plan)[1]];
  return groups.map((group, kind) => [group, numelOf(parts.filter((part) => Number(isOfExperts(part)) === kind))]);
}

function sumSeconds(plan, parts) {
  return numelsOf(plan, parts).reduce((sum, [group, numel]) =>
    sum + (numel ? collective(plan, group, numel * STATE_BYTES.gradients, plan.zero === 0 ? 2 : 1) : 0), 0);
}

const gatherSeconds = (plan, parts) =>
  numelsOf(plan, parts).reduce((sum, [group, numel]) => sum + collective(plan, group, numel * STATE_BYTES.parameters), 0);

function updateSeconds(plan, parts) {
  const numel = numelsOf(plan, parts).reduce((sum, [{ size }, all]) => sum + Math.floor(all / (plan.zero ? size : 1)), 0);
  return memorySeconds(plan, numel * UPDATE_BYTES);
}

function addZero(plan, seconds, parts) {
  const gather = plan.zero === 3 ? gatherSeconds(plan, parts) : 0, backward = total(seconds.I) + total(seconds.W);
  seconds.F.zero = Math.max(0, gather - total(seconds.F));
  seconds.I.zero = Math.max(0, gather + sumSeconds(plan, parts) - backward);
}

// The two copies of a stage exchange their gradients.
function mirrorSeconds(plan, rank, parts) {
  const numel = numelOf(parts.filter(({ stage }) => holdersOf(plan, stage).some((holder) => holder !== rank)));
  if (!numel) return 0;
  const [transfer, latency] = message(plan, groupOf(plan, ["pp"]), (numel * STATE_BYTES.gradients) / (plan.zero > 1 ? plan.copies : 1));
  return transfer + latency;
}

// By how much sums and gathers make a rank's step longer: both run behind its actions as far as these allow it.
function exposedSeconds(plan, rank, { passes, end }) {
  const parts = plan.parts[rank];
  const stages = Object.keys(passes).map(Number), own = (stage) => parts.filter((part) => part.stage === stage);
  const units = (stage) => plan.layers[stage] + (stage === 0) + (stage === plan.numStages - 1);
  let now = 0, late = 0;
  for (const stage of [...stages].sort((a, b) => passes[a].first[0] - passes[b].first[0])) {
    const [start, stop] = passes[stage].first;
    now += plan.zero === 1 || plan.zero === 2 ? gatherSeconds(plan, own(stage)) : 0;
    late = Math.max(late, now - (stop - (stop - start) / units(stage)));
  }
  now = 0;
  for (const stage of [...stages].sort((a, b) => passes[a].last[1] - passes[b].last[1])) {
    const [start, stop] = passes[stage].last, seconds = plan.zero < 2 ? sumSeconds(plan, own(stage)) : 0;
    now = Math.max(now, start + (stop - start) / units(stage)) + seconds;
    now = Math.max(now, stop + seconds / units(stage));
  }
  return mirrorSeconds(plan, rank, parts) + late + Math.max(0, now - end);
}

// ---- the step

const nano = (seconds) => Math.round(seconds * NANO);
const programs = new Map(); // compiled, by schedule and sizes: the same for all models

function partsOfSteps(ranks) {
  const parts = [], firstPart = [], rankStart = [0];
  for (const steps of ranks) {
    for (const step of steps) {
      firstPart.push(parts.length);
      for (let at = 0; at < step.length; at += 3) parts.push([step[at], KINDS.indexOf(step[at + 1]), step[at + 2]]);
    }
    rankStart.push(firstPart.length);
  }
  return { parts, firstPart: [...firstPart, parts.length], rankStart };
}

function programOf(plan, ranks) {
  const key = `${plan.schedule} ${plan.pp} ${plan.count}`;
  if (!programs.has(key)) {
    if (programs.size > 60) programs.clear();
    programs.set(key, compileParts(partsOfSteps(ranks)));
  }
  return programs.get(key);
}

// When each rank of pp ends, how long it is busy, and of each of its stages the first forward and the last backward.
function pipelineOf(plan, ranks, costs, stages) {
  if (plan.pp === 1) {
    const end = (plan.count * (costs.F[0] + costs.I[0] + costs.W[0])) / NANO, backward = total(stages[0].I) + total(stages[0].W);
    return [{ end, busy: end, passes: { 0: { first: [0, total(stages[0].F)], last: [end - backward, end] } } }];
  }
  const program = programOf(plan, ranks), { start, end } = simulate(program, costs, newTimes(program));
  return ranks.map((steps, rank) => {
    const passes = {}, from = program.rankStart[rank];
    let busy = 0;
    steps.forEach((step, place) => {
      const span = [start[from + place] / NANO, end[from + place] / NANO];
      busy += end[from + place] - start[from + place];
      for (let at = 0; at < step.length; at += 3) {
        if (step[at + 1] === "F") (passes[step[at]] ??= { first: span });
        else passes[step[at]].last = span;
      }
    });
    return { end: end[from + steps.length - 1] / NANO, busy: busy / NANO, passes };
  });
}

// FLOPs of forward and backward of one sequence, with causal pairs or all.
function modelFlops({ model, sequence }, causal) {
  const one = { model, ...sizesOf(model, sequence, 1), sequence, rows: 1, cp: 1, ep: 1 }, numDense = model.experts?.dense ?? model.layers;
  const pairs = causal ? 1 : (2 * sequence) / (sequence + 1);
  const flops = ({ products, core }) =>
    3 * products.reduce((sum, [rows, inner, outer, times = 1]) => sum + 2 * rows * inner * outer * times, 0) + 3 * core * pairs;
  const sparse = numDense < model.layers ? (model.layers - numDense) * flops(layerWork(one, true)) : 0;
  return numDense * flops(layerWork(one, false)) + sparse + flops(headWork(one));
}

// Nanoseconds of every overlapped pair, rank by rank: exchanges of experts run behind the rest.
function pairSeconds(facts, ranks, stages) {
  const spent = ([stage, kind]) => (kind === "B" ? ["I", "W"] : [kind]).flatMap((one) => Object.entries(stages[stage][one]));
  return ranks.flat().filter((step) => step.length > 3).map((step) => {
    let exchanges = 0, others = 0;
    for (const [name, seconds] of [...spent(step), ...spent(step.slice(3))]) {
      if (name === "ep") exchanges += seconds;
      else others += seconds;
    }
    return nano(Math.max(exchanges, others) * (exchanges ? facts.time.pairFactor : 1));
  });
}

export function stepOf(facts, plan, ranks) {
  const { parts } = plan, stages = stageSeconds(facts, plan, parts);
  const table = (kind) => stages.map((one) => nano(total(one[kind])));
  const [transfer, latency] = plan.pp > 1 ? message(plan, groupOf(plan, ["pp"]), plan.boundary).map(nano) : [0, 0];
  const costs = { F: table("F"), I: table("I"), W: table("W"), B: null, overlap: plan.overlap ? pairSeconds(facts, ranks, stages) : null, latency, transfer };
  const pipeline = pipelineOf(plan, ranks, costs, stages);
  const last = Math.max(...pipeline.map((one, rank) => one.end + exposedSeconds(plan, rank, one)));
  const update = Math.max(...parts.map((own) => updateSeconds(plan, own)));
  const norm = collective(plan, { size: plan.gpus, perNode: plan.node }, 16, 2), seconds = last + norm + update;
  const span = Math.max(...pipeline.map(({ end }) => end)), busiest = Math.max(...pipeline.map(({ busy }) => busy));
  const mfu = (causal) => (plan.batch * modelFlops(plan, causal)) / seconds / (plan.card.peak * plan.gpus);
  return {
    seconds, costs, pipeline: span, bubble: 1 - busiest / span, tokensPerSecond: (plan.batch * plan.sequence) / seconds,
    mfu: mfu(true), fullMfu: mfu(false), stages,
  };
}
