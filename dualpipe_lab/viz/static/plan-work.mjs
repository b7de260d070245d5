// What one rank computes in a layer or at the model's end: plan/products.py.
//
// A product is [rows, inner, outer, how many]; `core` are the FLOPs of attention between its products.

import { ELEMENT_BYTES, sizesOf } from "./plan-model.mjs";

const LAYER_KERNELS = 6, EXPERT_KERNELS = 6, HEAD_KERNELS = 4;

// Pairs of a query and a key that the slowest rank of a ring computes for one sequence, in zigzag order.
function causalPairs(length, cp) {
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

// A router, the rank's own experts with equally many rows, and the shared expert.
function expertProducts({ model, tokens, between, slots, shared, ep, tp }) {
  const { hidden, experts } = model, here = experts.count / (ep * tp), each = Math.ceil(slots / here);
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

// Of a layer's forward: products, attention, bytes that the rest moves forward and backward, and the rest's kernels.
export function layerWork(plan, isSparse) {
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
export function workAgain(plan, isSparse) {
  if (!isSparse || !plan.overlap) return layerWork(plan, isSparse);
  const before = attentionWork(plan), [router] = expertProducts(plan);
  return { ...before, products: [...before.products, router] };
}

// The same of the last norm, head and loss.
export function headWork({ model, tokens, between, vocabulary }) {
  const norm = 4 * between * model.hidden * ELEMENT_BYTES, logits = tokens * vocabulary;
  return {
    products: [[tokens, model.hidden, vocabulary]], core: 0,
    forward: norm + 12 * logits, backward: 2 * norm + 8 * logits, kernels: HEAD_KERNELS,
  };
}

// FLOPs of forward and backward of one sequence, with causal pairs or all.
export function modelFlops({ model, sequence }, causal) {
  const one = { model, ...sizesOf(model, sequence, 1), sequence, rows: 1, cp: 1, ep: 1, tp: 1 };
  const numDense = model.experts?.dense ?? model.layers, numSparse = model.layers - numDense;
  const pairs = causal ? 1 : (2 * sequence) / (sequence + 1);
  const flopsOf = ({ products, core }) =>
    3 * products.reduce((sum, product) => sum + flopsOfProduct(product), 0) + 3 * core * pairs;
  const sparse = numSparse ? numSparse * flopsOf(layerWork(one, true)) : 0;
  return numDense * flopsOf(layerWork(one, false)) + sparse + flopsOf(headWork(one));
}

const flopsOfProduct = ([rows, inner, outer, times = 1]) => 2 * rows * inner * outer * times;
