// Programs: rows of text, one per rank, into flat arrays and one feasible order.
//
// In:  ["0F0 F1 (0F2;1B0)", ...]; a token without a stage has the stage of the token before it.
// Out: steps (what a rank runs at once) and parts (the actions inside: one, or two for an overlapped pair), numbered
//      rank by rank; for each part the part that feeds it.  The order does not depend on costs, so it is found once.

export const KINDS = ["F", "B", "I", "W"];
const ACTION = /^(\d{0,6})([FBIW])(\d{1,6})$/, PAIR = /^\((.*);(.*)\)(?:OVERLAP_F_B)?$/;

export function parseRows(rows) {
  const parts = [], firstPart = [], rankStart = [0];
  for (const row of rows) {
    let stage = 0;
    for (const token of row.split(/\s+/).filter(Boolean)) {
      firstPart.push(parts.length);
      for (const [, own, kind, microbatch] of actionsOfToken(token)) {
        stage = own === "" ? stage : Number(own);
        parts.push([stage, KINDS.indexOf(kind), Number(microbatch)]);
      }
    }
    rankStart.push(firstPart.length);
  }
  firstPart.push(parts.length);
  return { parts, firstPart, rankStart };
}

function actionsOfToken(token) {
  const texts = PAIR.exec(token)?.slice(1) ?? [token], found = texts.map((text) => ACTION.exec(text));
  const isRight = found.every(Boolean) && (found.length === 1 || (found[0][2] === "F" && /[BI]/.test(found[1][2])));
  if (isRight) return found;
  throw new Error(`'${token.slice(0, 40)}' is not an action; write stage, kind and microbatch, such as 1F2, or a pair, such as (0F7;7B3)`);
}

export function compile(rows) {
  const program = compileParts(parseRows(rows)), { rankStart } = program;
  const stuck = program.reached.findIndex((step, rank) => step < rankStart[rank + 1]);
  if (stuck >= 0) throw new Error(`the program would deadlock: rank ${stuck} waits forever`);
  return program;
}

// Flat arrays of parts [stage, number of the kind, microbatch], the first part of every step, the first step of every rank.
// If the program deadlocks, its `order` ends early, and `reached` tells before which step each rank stands.
export function compileParts({ parts, firstPart, rankStart }) {
  const numRanks = rankStart.length - 1;
  const program = {
    numRanks,
    numSteps: firstPart.length - 1,
    numStages: 1 + parts.reduce((most, part) => Math.max(most, part[0]), -1),
    numMicrobatches: 1 + parts.reduce((most, part) => Math.max(most, part[2]), -1),
    firstPart: Int32Array.from(firstPart),
    rankStart: Int32Array.from(rankStart),
    rankOf: new Int32Array(firstPart.length - 1),
    stage: Int32Array.from(parts, (part) => part[0]),
    kind: Uint8Array.from(parts, (part) => part[1]),
    microbatch: Int32Array.from(parts, (part) => part[2]),
    stepOf: new Int32Array(parts.length),
  };
  for (let rank = 0; rank < numRanks; rank++) program.rankOf.fill(rank, rankStart[rank], rankStart[rank + 1]);
  for (let step = 0; step < program.numSteps; step++) program.stepOf.fill(step, firstPart[step], firstPart[step + 1]);
  findFeeds(program);
  return Object.assign(program, feasibleOrder(program));
}

// feed[part]: the part whose result it takes, or -1.  Messages are the feeds that cross ranks.
function findFeeds(program) {
  const { stage, kind, microbatch, stepOf, rankOf, numStages, numMicrobatches, numRanks } = program;
  const forward = new Int32Array(numStages * numMicrobatches).fill(-1);
  const backward = forward.slice();
  const cell = (part, offset) => (stage[part] + offset) * numMicrobatches + microbatch[part];
  for (let part = 0; part < stage.length; part++) {
    if (kind[part] === 0) forward[cell(part, 0)] = part;
    else if (kind[part] < 3) backward[cell(part, 0)] = part;
  }
  program.feed = new Int32Array(stage.length).fill(-1);
  program.link = new Int32Array(stage.length).fill(-1); // of the producing part: source * numRanks + destination
  program.consumer = new Int32Array(stage.length).fill(-1);
  for (let part = 0; part < stage.length; part++) {
    let source = -1;
    if (kind[part] === 0 && stage[part] > 0) source = forward[cell(part, -1)];
    if ((kind[part] === 1 || kind[part] === 2) && stage[part] + 1 < numStages) source = backward[cell(part, 1)];
    if (source < 0) continue;
    const src = rankOf[stepOf[source]], dst = rankOf[stepOf[part]];
    program.feed[part] = source;
    program.consumer[source] = part;
    if (src !== dst) program.link[source] = src * numRanks + dst;
  }
}

// Every step after those it waits for; ranks advance as far as they can, as in a run without a clock.
function feasibleOrder(program) {
  const { numSteps, numRanks, firstPart, rankStart, feed, stepOf } = program;
  const order = new Int32Array(numSteps), done = new Uint8Array(numSteps);
  const next = rankStart.slice(0, numRanks), waiting = new Map();
  const runnable = Array.from({ length: numRanks }, (_, rank) => rank);
  const missing = (step) => {
    for (let part = firstPart[step]; part < firstPart[step + 1]; part++) {
      if (feed[part] >= 0 && !done[stepOf[feed[part]]]) return stepOf[feed[part]];
    }
    return -1;
  };
  let length = 0;
  while (runnable.length) {
    const rank = runnable.pop();
    for (; next[rank] < rankStart[rank + 1]; next[rank]++) {
      const step = next[rank], blocker = missing(step);
      if (blocker >= 0) {
        waiting.set(blocker, [...(waiting.get(blocker) ?? []), rank]);
        break;
      }
      done[step] = 1;
      order[length++] = step;
      if (waiting.has(step)) runnable.push(...waiting.get(step));
      waiting.delete(step);
    }
  }
  return { order: order.subarray(0, length), reached: next };
}
