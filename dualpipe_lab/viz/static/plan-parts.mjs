// The parameters of a rank and their flat buffers: plan/gradient_traffic.py.

import { holdersOf, stagesAt } from "./plan-schedules.mjs";

const BUCKET_BYTES = 25 * 2 ** 20;
const EXPERTS = "experts"; // the kind of parameters of which other ranks of ep have others

// The shard of a dimension on a rank of tp: the last ones may be smaller, or empty.
const shardOf = (length, tp, tpRank) => Math.max(0, Math.min(Math.ceil(length / tp), length - tpRank * Math.ceil(length / tp)));
const isKeyCopy = ({ keyCopies }, tpRank) => keyCopies > 1 && tpRank % keyCopies > 0; // of the rank before it on tp

// What the sizes of the parameters on a rank of tp depend on.
const shapeAt = ({ model, tp, sharedWidth, ...plan }, tpRank) =>
  `${[model.vocabulary, model.ffn, sharedWidth].map((length) => shardOf(length, tp, tpRank))} ${isKeyCopy(plan, tpRank)}`;

// The parameters of a rank of pp in the order of its modules: {stage, unit of ZeRO-3, numel, kind of its bucket}.
// `isHeld`: the ranks of tp share out the experts of a place, as in memory and seconds; else each has all of them.
export function partsAt(plan, rank, tpRank, isHeld = false) {
  const sharded = plan.tp > 1 ? "tp" : "";
  const kinds = plan.model.experts ? [false, true] : [false], found = [];
  const layers = kinds.map((isSparse) => layerParts(plan, sharded, tpRank, isSparse, isHeld));
  for (const stage of stagesAt(plan, rank)) {
    const mark = holdersOf(plan, stage)[0] === rank ? "" : " mirror"; // of a stage that another rank has too
    const isUnit = isOneUnit(plan);
    unitsAt(plan, stage, layers, tpRank).forEach((parts, unit) => {
      for (const { numel, kind } of parts) found.push({ numel, kind: mark ? kind + mark : kind, stage, unit: isUnit ? 0 : unit });
    });
  }
  return found;
}

// Whether a stage is one unit of ZeRO-3: with overlapped experts, or where one table is at both ends.
const isOneUnit = ({ model, numStages, overlap }) => overlap || (model.tied && numStages === 1);

// The parameters of a stage, unit by unit.  A tied table is counted on the first stage, and the last has a copy.
function unitsAt({ model, tp, numStages, layers: counts, dense }, stage, layers, tpRank) {
  const { hidden, tied, vocabulary } = model, isApart = tied && numStages > 1;
  const isFirst = stage === 0, isLast = stage === numStages - 1;
  const table = (mark) => ({ numel: shardOf(vocabulary, tp, tpRank) * hidden, kind: (tp > 1 ? "tp" : "") + mark });
  const units = isFirst ? [[table(isApart ? " tied" : "")]] : [];
  for (let number = 0; number < counts[stage]; number++) units.push(layers[Number(number >= dense[stage])]);
  if (isLast) units.push([{ numel: hidden, kind: "" }]);
  if (isLast && !tied) units.push([table("")]);
  if (isLast && isApart) units.push([table(" tied replica")]);
  return units;
}

function layerParts(plan, sharded, tpRank, isSparse, isHeld) {
  const { model, tp, ep, sharedWidth } = plan, { hidden, experts } = model, norm = { numel: hidden, kind: "" };
  const network = (width) => new Array(3).fill({ numel: shardOf(width, tp, tpRank) * hidden, kind: sharded });
  const attention = model.latent ? latentParts(plan, sharded) : headParts(plan, sharded, tpRank);
  if (!isSparse) return [norm, ...attention, norm, ...network(model.ffn)];
  const width = isHeld ? experts.ffn / tp : experts.ffn, router = { numel: experts.count * hidden, kind: "" };
  const each = new Array(3).fill({ numel: (experts.count / ep) * width * hidden, kind: ep > 1 ? EXPERTS : "" });
  return [norm, ...attention, norm, router, ...each, ...(sharedWidth ? network(sharedWidth) : [])];
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
function buffersOf(plan, parts) {
  const groups = plan.zero === 3 ? unitsOf(parts) : bucketsOf(parts);
  return groups.map((group) => {
    const [{ kind, stage, unit }] = group, copies = isOfExperts(group[0]) ? plan.copies / plan.ep : plan.copies;
    const numel = group.reduce((sum, part) => sum + part.numel, 0), shard = Math.ceil(numel / copies);
    const stages = new Set(group.map((part) => part.stage));
    return { numel, shard, padded: shard * copies, copies, kind, stage, unit, parts: group, stages: [...stages] };
  });
}

// Those of a rank of pp and tp; ranks of tp with shards of the same sizes have the same.  `isHeld` as in `partsAt`.
export function buffersAt(plan, rank, tpRank, isHeld = false) {
  plan.buffers ??= new Map();
  const differs = isHeld && plan.tp > 1 && plan.model.experts, key = `${rank} ${shapeAt(plan, tpRank)}${differs ? " held" : ""}`;
  if (!plan.buffers.has(key)) {
    const parts = differs ? plan.held : plan.parts;
    plan.buffers.set(key, buffersOf(plan, tpRank ? partsAt(plan, rank, tpRank, isHeld) : parts[rank]));
  }
  return plan.buffers.get(key);
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
  for (let place = parts.length - 1; place >= 0; place--) { // gradients are ready from the end
    const part = parts[place], bytes = part.numel * element, group = groups.at(-1);
    const isNext = group && group[0].kind === part.kind && size + bytes <= BUCKET_BYTES;
    if (isNext) group.push(part);
    else groups.push([part]);
    size = (isNext ? size : 0) + bytes;
  }
  return groups;
}
