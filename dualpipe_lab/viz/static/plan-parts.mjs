// The parameters of a rank and their flat buffers: plan/gradient_traffic.py.

import { holdersOf, stagesAt } from "./plan-schedules.mjs";

const BUCKET_BYTES = 25 * 2 ** 20;
const EXPERTS = "experts"; // the kind of parameters of which other ranks of ep have others

// The shard of a dimension on a rank of tp: the last ones may be smaller, or empty.
const shardOf = (length, tp, tpRank) => Math.max(0, Math.min(Math.ceil(length / tp), length - tpRank * Math.ceil(length / tp)));
const isKeyCopy = ({ keyCopies }, tpRank) => keyCopies > 1 && tpRank % keyCopies > 0; // of the rank before it on tp

// What the sizes of the parameters on a rank of tp depend on.
export const shapeAt = ({ model, tp, sharedWidth, ...plan }, tpRank) =>
  `${[model.vocabulary, model.ffn, sharedWidth].map((length) => shardOf(length, tp, tpRank))} ${isKeyCopy(plan, tpRank)}`;

// The parameters of a rank of pp in the order of its modules: {stage, unit of ZeRO-3, numel, kind of its bucket}.
// `isHeld`: the ranks of tp share out the experts of a place, as in memory; else each has all of them.
export function partsAt(plan, rank, tpRank, isHeld = false) {
  const sharded = plan.tp > 1 ? "tp" : "";
  const layers = [false, true].map((isSparse) => (isSparse && !plan.model.experts ? [] : layerParts(plan, sharded, tpRank, isSparse, isHeld)));
  return stagesAt(plan, rank).flatMap((stage) => {
    const { hidden, tied } = plan.model, isFirst = stage === 0, isLast = stage === plan.numStages - 1;
    const isOne = tied && isFirst && isLast, isUnit = isOne || plan.overlap; // overlapped experts: a stage is one unit
    const table = { numel: shardOf(plan.model.vocabulary, plan.tp, tpRank) * hidden, kind: sharded };
    const shared = { ...table, kind: `${sharded} tied` }, norm = { numel: hidden, kind: "" };
    const units = isFirst ? [[tied && !isOne ? shared : table]] : [];
    for (let number = 0; number < plan.layers[stage]; number++) units.push(layers[Number(number >= plan.dense[stage])]);
    const copy = { ...table, kind: `${sharded} tied replica` };
    if (isLast) units.push([norm], tied ? (isFirst ? [] : [copy]) : [table]);
    const mark = holdersOf(plan, stage)[0] === rank ? "" : " mirror"; // of a stage that another rank has too
    return units.flatMap((parts, unit) => parts.map((part) => ({ ...part, kind: part.kind + mark, stage, unit: isUnit ? 0 : unit })));
  });
}

function layerParts(plan, sharded, tpRank, isSparse, isHeld) {
  const { model, tp, ep, sharedWidth } = plan, { hidden, experts } = model, norm = { numel: hidden, kind: "" };
  const network = (width) => new Array(3).fill({ numel: shardOf(width, tp, tpRank) * hidden, kind: sharded });
  const attention = model.latent ? latentParts(plan, sharded) : headParts(plan, sharded, tpRank);
  if (!isSparse) return [norm, ...attention, norm, ...network(model.ffn)];
  const width = isHeld ? experts.ffn / tp : experts.ffn, kind = ep > 1 ? EXPERTS : "";
  const each = new Array(3).fill({ numel: (experts.count / ep) * width * hidden, kind });
  return [norm, ...attention, norm, { numel: experts.count * hidden, kind: "" }, ...each, ...(sharedWidth ? network(sharedWidth) : [])];
}

function headParts(plan, sharded, tpRank) {
  const { model, heads, tp, keyHeads } = plan, { hidden, headSize, qkNorm } = model;
  const query = { numel: heads * headSize * hidden, kind: sharded }, small = { numel: headSize, kind: "" };
  const kind = `${Math.min(tp, model.keyHeads) > 1 ? "tp" : ""}${isKeyCopy(plan, tpRank) ? " replica" : ""}`;
  const key = { numel: keyHeads * headSize * hidden, kind };
  return [query, key, key, query, ...(qkNorm ? [small, small] : [])];
}

function latentParts({ model, heads }, sharded) {
  const { hidden, headSize, latent } = model, copied = (numel) => ({ numel, kind: "" });
  const product = (rows, columns) => ({ numel: heads * rows * columns, kind: sharded });
  return [
    copied(hidden * latent.query), copied(latent.query), product(headSize, latent.query),
    copied(hidden * (latent.kv + latent.position)), copied(latent.kv), product(latent.content + latent.value, latent.kv),
    product(latent.value, hidden),
  ];
}

// ---- flat buffers

export const isOfExperts = ({ kind }) => kind.startsWith(EXPERTS);

// Buckets, or units under ZeRO-3; each padded for the ranks that hold copies, of which experts have fewer.
export function buffersOf(plan, parts) {
  const groups = plan.zero === 3 ? unitsOf(parts) : bucketsOf(parts);
  return groups.map((group) => {
    const [{ kind, stage, unit }] = group, copies = isOfExperts(group[0]) ? plan.copies / plan.ep : plan.copies;
    const numel = group.reduce((sum, part) => sum + part.numel, 0), shard = Math.ceil(numel / copies);
    return { numel, shard, padded: shard * copies, copies, kind, stage, unit, parts: group, stages: [...new Set(group.map((part) => part.stage))] };
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
  const groups = [], element = 2;
  let size = 0;
  for (const part of [...parts].reverse()) {
    const isNext = groups.length && groups.at(-1)[0].kind === part.kind && size + part.numel * element <= BUCKET_BYTES;
    if (isNext) groups.at(-1).push(part);
    else groups.push([part]);
    size = (isNext ? size : 0) + part.numel * element;
  }
  return groups;
}
