// The simulator: the same timing model as dualpipe_lab/pp/simulator.py, to the last integer tick.
//
//   1. A rank runs its steps in order, each as soon as the rank is free and the step's input is there.
//   2. A result for another rank leaves when its directed link is free, occupies it for `transfer` ticks and is there
//      `latency` ticks later; on the same rank it is there at once.
//   3. An overlapped pair starts when both inputs are there and releases both results at its end, forward first.
//
// Time O(actions), no allocation when `times` is passed in again.  Numbers stay exact up to 2^53.

export function newTimes(program) {
  return {
    start: new Float64Array(program.numSteps),
    end: new Float64Array(program.numSteps),
    left: new Float64Array(program.stage.length), // of the message that a part sends
    arrived: new Float64Array(program.stage.length), // when the result of a part can be used
  };
}

const perStage = (value, numStages) => (Array.isArray(value) ? value : new Array(numStages).fill(value));

// Ticks of F, B, I and W, each as one list over the stages.
export function stageTicks(costs, numStages) {
  const [forward, inputs, weights] = ["F", "I", "W"].map((letter) => perStage(costs[letter], numStages));
  const whole = costs.B == null ? inputs.map((ticks, stage) => ticks + weights[stage]) : perStage(costs.B, numStages);
  return [forward, whole, inputs, weights];
}

// Ticks of every step.  `costs`: {F, I, W, B, overlap, latency, transfer}; F, I, W, B one number or one per stage, B null
// for I + W; overlap one number, one per pair in order of rank and position, or null for the sum of both parts.
export function durations(program, costs) {
  const { numSteps, numStages, firstPart, stage, kind } = program, byKind = stageTicks(costs, numStages);
  const ticks = new Float64Array(numSteps);
  for (let step = 0, pair = 0; step < numSteps; step++) {
    const part = firstPart[step];
    ticks[step] = byKind[kind[part]][stage[part]];
    if (firstPart[step + 1] - part === 1) continue;
    const sum = ticks[step] + byKind[kind[part + 1]][stage[part + 1]];
    ticks[step] = costs.overlap == null ? sum : Array.isArray(costs.overlap) ? costs.overlap[pair] : costs.overlap;
    pair++;
  }
  return ticks;
}

export function simulate(program, costs, times = newTimes(program)) {
  const { order, firstPart, rankOf, feed, link, numRanks } = program;
  const { start, end, left, arrived } = times;
  const ticks = durations(program, costs);
  const free = new Float64Array(numRanks), linkFree = new Float64Array(numRanks * numRanks);
  for (let i = 0; i < order.length; i++) {
    const step = order[i], rank = rankOf[step];
    let now = free[rank];
    for (let part = firstPart[step]; part < firstPart[step + 1]; part++) {
      if (feed[part] >= 0 && arrived[feed[part]] > now) now = arrived[feed[part]];
    }
    start[step] = now;
    const made = now + ticks[step];
    end[step] = free[rank] = made;
    for (let part = firstPart[step]; part < firstPart[step + 1]; part++) {
      left[part] = arrived[part] = made;
      if (link[part] < 0) continue;
      if (linkFree[link[part]] > made) left[part] = linkFree[link[part]];
      linkFree[link[part]] = left[part] + costs.transfer;
      arrived[part] = linkFree[link[part]] + costs.latency;
    }
  }
  return times;
}

// The steps that never run, each rank's in its order, from the time at which the last of all others has ended.  Returns
// this time, or null for a program that runs to its end.
export function placeRest(program, costs, { start, end }) {
  const { order, reached, rankStart, numRanks } = program;
  if (order.length === program.numSteps) return null;
  const ticks = durations(program, costs), stop = order.reduce((last, step) => Math.max(last, end[step]), 0);
  for (let rank = 0; rank < numRanks; rank++) {
    let now = stop;
    for (let step = reached[rank]; step < rankStart[rank + 1]; step++) {
      start[step] = now;
      now = end[step] = now + ticks[step];
    }
  }
  return stop;
}

// Whether the page may recompute: every cost is a whole number that a double holds exactly.
export function isExact(costs) {
  return Object.values(costs).flat().every((value) => value == null || Number.isSafeInteger(value));
}
