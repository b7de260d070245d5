// The seconds of a step: plan/stage_times.py, gradient_times.py and step_time.py with MEGATRON_TIME.
//
// Seconds are assumed: they rest on efficiencies and overlaps that other people measured, which `facts` brings along.

import { collective, endCalls, expertGroups, groupOf, layerCalls, message, partAt, secondsOfCalls } from "./plan-calls.mjs";
import { ELEMENT_BYTES, STATE_BYTES } from "./plan-model.mjs";
import { isOfExperts } from "./plan-parts.mjs";
import { holdersOf } from "./plan-schedules.mjs";
import { headWork, layerWork, modelFlops, workAgain } from "./plan-work.mjs";
import { KINDS, compileParts } from "./program.mjs";
import { newTimes, simulate } from "./simulate.mjs";

const NANO = 1e9, UPDATE_BYTES = 30;
const total = (seconds) => Object.values(seconds).reduce((sum, value) => sum + value, 0);

// ---- stages

const memorySeconds = ({ card }, bytes) => bytes / (card.memoryBandwidth * partAt(card.memoryEfficiency, bytes));

function productSeconds(plan, [rows, inner, outer, times = 1]) {
  const { card } = plan, flops = 2 * rows * inner * outer, numbers = (rows * inner + inner * outer + rows * outer) * times;
  const computed = (flops * times) / (card.peak * partAt(card.efficiency, flops));
  return Math.max(computed, memorySeconds(plan, numbers * ELEMENT_BYTES)) + card.overhead;
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
  const bytes = (numel * STATE_BYTES.gradients) / (plan.zero > 1 ? plan.copies : 1);
  const [transfer, latency] = message(plan, groupOf(plan, ["pp"]), bytes);
  return transfer + latency;
}

// By how much sums and gathers make a rank's step longer: both run behind its actions as far as these allow it.
function exposedSeconds(plan, rank, { passes, end }) {
  const parts = plan.held[rank];
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
    const end = (plan.count * (costs.F[0] + costs.I[0] + costs.W[0])) / NANO, [{ F, I, W }] = stages;
    return [{ end, busy: end, passes: { 0: { first: [0, total(F)], last: [end - total(I) - total(W), end] } } }];
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

// Seconds of a pair of a forward and a backward: exchanges of experts run behind the rest.
function pairSeconds(facts, forward, backward) {
  let exchanges = 0, others = 0;
  for (const part of [forward.F, backward.I, backward.W]) {
    for (const [name, seconds] of Object.entries(part)) {
      if (name === "ep") exchanges += seconds;
      else others += seconds;
    }
  }
  return Math.max(exchanges, others) * (exchanges ? facts.time.pairFactor : 1);
}

// Nanoseconds of every overlapped pair, rank by rank; most have the same two stages as others.
function overlapOf(facts, ranks, stages) {
  const known = new Map(), found = [];
  for (const steps of ranks) {
    for (const step of steps) {
      if (step.length === 3) continue;
      const key = step[0] * stages.length + step[3];
      if (!known.has(key)) known.set(key, nano(pairSeconds(facts, stages[step[0]], stages[step[3]])));
      found.push(known.get(key));
    }
  }
  return found;
}

export function stepOf(facts, plan, ranks) {
  const { held } = plan, stages = stageSeconds(facts, plan, held);
  const table = (kind) => stages.map((one) => nano(total(one[kind])));
  const [transfer, latency] = plan.pp > 1 ? message(plan, groupOf(plan, ["pp"]), plan.boundary).map(nano) : [0, 0];
  const overlap = plan.overlap ? overlapOf(facts, ranks, stages) : null;
  const costs = { F: table("F"), I: table("I"), W: table("W"), B: null, overlap, latency, transfer };
  const pipeline = pipelineOf(plan, ranks, costs, stages);
  const last = Math.max(...pipeline.map((one, rank) => one.end + exposedSeconds(plan, rank, one)));
  const update = Math.max(...held.map((own) => updateSeconds(plan, own)));
  const norm = collective(plan, { size: plan.gpus, perNode: plan.node }, 16, 2), seconds = last + norm + update;
  const span = Math.max(...pipeline.map(({ end }) => end)), busiest = Math.max(...pipeline.map(({ busy }) => busy));
  const mfu = (causal) => (plan.batch * modelFlops(plan, causal)) / seconds / (plan.card.peak * plan.gpus);
  return {
    seconds, costs, pipeline: span, bubble: 1 - busiest / span, tokensPerSecond: (plan.batch * plan.sequence) / seconds,
    mfu: mfu(true), fullMfu: mfu(false), stages,
  };
}
