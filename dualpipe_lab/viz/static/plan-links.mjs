// How many links of the groups of ranks leave a node: for groups of any size on nodes of any size.
//
// A group is `size` ranks that lie `stride` apart.  Position p of its ring sends to p + 1 (a gather) or to p - 1 (a sum).

// Of the groups that begin at `firsts`: their number, by position how many links down leave a node, all of them, how many
// ordered pairs of ranks lie on two nodes, and by position how many of the others do.
function countLinks(node, firsts, size, stride) {
  const down = new Array(size).fill(0), apart = down.slice(), nodes = new Array(size);
  let pairs = 0, crossing = 0;
  for (const first of firsts) {
    let run = 0;
    pairs += size * size;
    for (let place = 0; place < size; place++) {
      nodes[place] = Math.floor((first + place * stride) / node);
      run = place && nodes[place] === nodes[place - 1] ? run + 1 : 1;
      pairs -= 2 * run - 1; // on one node, the rank with itself among them
    }
    for (let place = 0; place < size; place++) {
      const crosses = Number(nodes[place] !== nodes[(place + size - 1) % size]);
      down[place] += crosses;
      crossing += crosses; // as many as up
    }
    for (let from = 0, to = 0; from < size; from = to) {
      while (to < size && nodes[to] === nodes[from]) to++;
      for (let place = from; place < to; place++) apart[place] += size - (to - from);
    }
  }
  return { groups: firsts.length, size, down, crossing, pairs, apart };
}

// The links of all groups of so many ranks, for each rank of pp.
export function linksOfGroups({ gpus, pp, node }, size, stride) {
  const block = gpus / pp;
  return Array.from({ length: pp }, (_, rank) => {
    const firsts = [];
    for (let first = rank * block; first < (rank + 1) * block; first++) {
      if (Math.floor(first / stride) % size === 0) firsts.push(first);
    }
    return countLinks(node, firsts, size, stride);
  });
}

// The links of the ranks with copies of the weights at one place along pp and tp; of experts, `ep` groups of them.
export function linksOfCopies({ gpus, pp, tp, copies, node }, rank, tpRank, ep = 1) {
  const firsts = Array.from({ length: ep }, (_, place) => rank * (gpus / pp) + place * tp + tpRank);
  return countLinks(node, firsts, copies / ep, tp * ep);
}

// Bytes that all ranks send in a step, inside of nodes and between them, by what sends them.  Totals of large clusters
// exceed 2^53, so they are BigInt.
export class LinkBytes {
  constructor(axes) {
    this.found = Object.fromEntries(axes.map((axis) => [axis, [0n, 0n]]));
  }

  add(axis, all, between) {
    this.found[axis][0] += all - between;
    this.found[axis][1] += between;
  }

  // Every rank of every group sends so many bytes to the next one in the ring; `times` as often.
  ring(axis, { groups, size, crossing }, bytes, times = 1) {
    const each = BigInt(bytes) * BigInt(times);
    if (size > 1) this.add(axis, each * BigInt(groups * size), each * BigInt(crossing));
  }

  gather(axis, links, shard, times = 1) {
    this.ring(axis, links, shard * (links.size - 1), times);
  }

  // A sum over the ring, in chunks of equal size but for the last ones: position p leaves out those at p + 1 and p + 2.
  allReduce(axis, { groups, size, down, crossing }, numel, element, times = 1) {
    const each = Math.ceil(numel / size), repeat = BigInt(times) * BigInt(element);
    const chunk = (place) => Math.max(0, Math.min(each, numel - (place % size) * each));
    const sent = (place) => BigInt(2 * numel - chunk(place + 1) - chunk(place + 2));
    const far = numel % size === 0 ? BigInt(crossing) * sent(0) :
      down.reduce((sum, count, place) => (count ? sum + BigInt(count) * sent(place) : sum), 0n);
    if (size > 1) this.add(axis, repeat * BigInt(groups) * BigInt(2 * numel) * BigInt(size - 1), repeat * far);
  }

  // Every rank sends a shard to every other one.
  scatter(axis, { groups, size, pairs }, bytes, times = 1) {
    const shard = BigInt(bytes / size) * BigInt(times);
    this.add(axis, shard * BigInt(groups * size * (size - 1)), shard * BigInt(pairs));
  }

  // Every rank sends `blocks[p]` bytes to the rank at position p, and as many as it has there back to each other one.
  exchange(axis, { groups, size, apart }, blocks, times) {
    const sum = blocks.reduce((all, block) => all + block, 0), twice = 2n * BigInt(times);
    const far = blocks.reduce((all, block, place) => all + BigInt(block) * BigInt(apart[place]), 0n);
    this.add(axis, twice * BigInt(groups * (size - 1)) * BigInt(sum), twice * far);
  }
}
