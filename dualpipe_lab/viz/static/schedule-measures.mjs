// The numbers of a valid schedule, in ticks, equal to Python's to the last one: simulate(), Timeline and lower_bound().
//
// measures(program, costs, inFlight) -> {
//   times        {start, end} of every step, {left, arrived} of every part's result, as `simulate` gives them
//   makespan     ticks                                      bubble    idle share of all ranks' time
//   busy         the ticks of work of each rank
//   peak         the most live activations of each rank     pending   the most weight gradients that wait for their W
//   stored       the most stages of which a rank stores the weights
//   messages     how many messages there are
//   bound        {ticks, reason, rank}: what no order of these actions on these ranks beats, within `inFlight`
// }
// `costs` as for `simulate`, in whole numbers.  An Error for an invalid schedule says its problems.

import { isExact, simulate } from "./simulate.mjs";
import { lowerBound } from "./schedule-bounds.mjs";
import { check } from "./schedule-check.mjs";

export function measures(program, costs, inFlight = null) {
  const { isValid, flat, text } = check(program);
  if (!isValid) throw new Error(text);
  checkCosts(costs, flat.numStages);
  const times = simulate(flat, costs), ranks = ranksOfTimes(flat, times);
  const makespan = times.end.reduce((most, end) => Math.max(most, end), 0), total = makespan * flat.numRanks;
  const idle = ranks.busy.reduce((sum, busy) => sum + makespan - busy, 0);
  return {
    times, makespan, ...ranks, bubble: total ? idle / total : 0, stored: mostStored(flat),
    messages: flat.link.reduce((count, link) => count + Number(link >= 0), 0), bound: lowerBound(flat, costs, inFlight),
  };
}

function checkCosts(costs, numStages) {
  for (const [name, value] of Object.entries(costs)) {
    if (!isExact({ name: value })) {
      const remedy = "scale all costs to whole ticks (0.5 and 1 become 1 and 2)";
      throw new Error(`Cost.${name} must be a whole number, got ${value}; ${remedy}`);
    }
    if ([value].flat().some((ticks) => ticks < 0)) {
      throw new Error(`Cost.${name} must not be negative, got ${value}; use 0 for work that takes no time`);
    }
    if (name !== "overlap" && Array.isArray(value) && value.length !== numStages) {
      throw new Error(`Cost.${name} lists ${value.length} stages, the program has ${numStages}; give one per stage`);
    }
  }
}

// By rank.  The steps of a rank do not overlap in time, so the counts follow from their order alone.
function ranksOfTimes({ numRanks, rankStart, firstPart, kind }, { start, end }) {
  const found = { busy: [], peak: [], pending: [] };
  for (let rank = 0; rank < numRanks; rank++) {
    let busy = 0, held = 0, waiting = 0, peak = 0, pending = 0;
    for (let step = rankStart[rank]; step < rankStart[rank + 1]; step++) {
      busy += end[step] - start[step];
      for (let part = firstPart[step]; part < firstPart[step + 1]; part++) {
        const own = kind[part];
        if (own === 0) peak = Math.max(peak, ++held);
        else if (own === 2) pending = Math.max(pending, ++waiting);
        else held--;
        if (own === 3) waiting--;
      }
    }
    found.busy.push(busy);
    found.peak.push(peak);
    found.pending.push(pending);
  }
  return found;
}

function mostStored({ numRanks, numStages, rankStart, firstPart, stage }) {
  const seen = new Int32Array(numStages).fill(-1); // the last rank that was found to run each stage
  let most = 0;
  for (let rank = 0; rank < numRanks; rank++) {
    let number = 0;
    for (let part = firstPart[rankStart[rank]]; part < firstPart[rankStart[rank + 1]]; part++) {
      if (seen[stage[part]] !== rank) number++;
      seen[stage[part]] = rank;
    }
    most = Math.max(most, number);
  }
  return most;
}
