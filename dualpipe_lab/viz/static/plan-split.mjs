// How many layers each stage has: pp/partition.py and models/stage_rules.py.

const splits = new Map(); // by sizes: a search asks again and again
const divisorOf = (a, b) => (b ? divisorOf(b, a % b) : a);

export function layerCounts(model, numStages) {
  const key = `${numStages} ${JSON.stringify(model)}`;
  if (!splits.has(key)) splits.set(key, numStages === 1 ? [model.layers] : bestSplit(model, numStages));
  return splits.get(key);
}

// Parameters that a token uses in a layer.
function layerCost({ hidden, ffn, heads, keyHeads, headSize, latent, experts }, isSparse) {
  const attention = latent
    ? hidden * (latent.query + latent.kv + latent.position) + latent.query + latent.kv +
      heads * (latent.query * headSize + latent.kv * (latent.content + latent.value) + hidden * latent.value)
    : 2 * (heads + keyHeads) * headSize * hidden;
  const width = isSparse ? (experts.perToken + experts.shared) * experts.ffn : ffn;
  return attention + (3 * width + 2) * hidden + (isSparse ? experts.count * hidden : 0);
}

// The least load on the slowest stage; of these the most even; of these the fewest layers in front.  Divided by their
// greatest common divisor, squares of loads are whole numbers below 2^53 for every model of the page.
function bestSplit(model, numStages) {
  const costs = Array.from({ length: model.layers }, (_, layer) => layerCost(model, layer >= (model.experts?.dense ?? Infinity)));
  costs[model.layers - 1] += model.vocabulary * model.hidden;
  const unit = costs.reduce(divisorOf), sums = [0];
  for (const cost of costs) sums.push(sums.at(-1) + cost / unit);
  const cuts = evenCuts(sums, numStages, leastBottleneck(sums, numStages));
  return cuts.slice(1).map((cut, stage) => cut - cuts[stage]);
}

function leastBottleneck(sums, numStages) {
  const end = sums.length - 1;
  let least = sums.map((before) => sums[end] - before); // of the layers from here on
  for (let later = 1; later < numStages; later++) {
    const next = [];
    for (let start = 0; start < end - later + 1; start++) {
      let best = Infinity;
      for (let cut = start + 1; cut <= end - later && sums[cut] - sums[start] < best; cut++) {
        best = Math.min(best, Math.max(sums[cut] - sums[start], least[cut]));
      }
      next.push(best);
    }
    least = next;
  }
  return least[0];
}

function evenCuts(sums, numStages, bottleneck) {
  const end = sums.length - 1, choices = [];
  let total = new Array(end + 1).fill(Infinity);
  total[end] = 0;
  for (let stages = 1; stages <= numStages; stages++) {
    const squares = new Array(end + 1).fill(Infinity), choice = [];
    for (let start = 0; start <= end - stages; start++) {
      for (let cut = start + 1; cut <= end && sums[cut] - sums[start] <= bottleneck; cut++) {
        const found = (sums[cut] - sums[start]) ** 2 + total[cut];
        if (found < squares[start]) [squares[start], choice[start]] = [found, cut];
      }
    }
    total = squares;
    choices.unshift(choice);
  }
  return choices.reduce((cuts, choice) => [...cuts, choice[cuts.at(-1)]], [0]);
}
