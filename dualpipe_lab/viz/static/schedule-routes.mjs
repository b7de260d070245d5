// Routes: the rank of every stage, in order, for each microbatch; as dualpipe_lab/pp/validation/rules.py.

import { addProblem, placeOfStep } from "./schedule-work.mjs";

// The routes of a schedule whose work is complete, in the order of the first microbatch that takes each:
// [{route: [rank], microbatches: [microbatch]}].
export function routesOf({ numStages, numMicrobatches, table, width, rankOf, stepOf }) {
  const found = new Map(), route = new Array(numStages);
  let latest = null; // most microbatches take the route of the one before
  for (let microbatch = 0; microbatch < numMicrobatches; microbatch++) {
    let isLatest = latest !== null;
    for (let stage = 0; stage < numStages; stage++) {
      route[stage] = rankOf[stepOf[table[(microbatch * width + stage) * 4]]];
      isLatest &&= latest.route[stage] === route[stage];
    }
    if (!isLatest) {
      const key = route.join();
      if (!found.has(key)) found.set(key, { route: route.slice(), microbatches: [] });
      latest = found.get(key);
    }
    latest.microbatches.push(microbatch);
  }
  return [...found.values()];
}

// Routes beyond the number that the program states, the rarest first.
export function explainRoutes(flat, stated, problems) {
  if (stated == null) return;
  const all = routesOf(flat);
  if (all.length <= stated) return;
  const often = [...all].sort((a, b) => b.microbatches.length - a.microbatches.length).slice(0, stated);
  const strays = all.filter((one) => !often.includes(one)).flatMap(({ route, microbatches }) =>
    microbatches.map((microbatch) => ({ route, microbatch })));
  strays.sort((a, b) => a.microbatch - b.microbatch);
  for (const { route, microbatch } of strays) {
    addProblem(problems, () => strayText(route, microbatch, often, stated),
      () => placesOnRoute(flat, route, microbatch, often));
  }
}

const differing = (one, other) => one.reduce((sum, rank, stage) => sum + Number(rank !== other[stage]), 0);

const nearestOf = (route, often) =>
  often.reduce((near, one) => (differing(route, one.route) < differing(route, near.route) ? one : near));

function strayText(route, microbatch, often, stated) {
  const nearest = nearestOf(route, often), stage = route.findIndex((rank, at) => rank !== nearest.route[at]);
  const allowed = stated === 1 ? "every stage on one rank" : `no more than ${stated} routes`;
  return `stage ${stage} works on microbatch ${microbatch} on rank ${route[stage]}, on microbatch ` +
    `${nearest.microbatches[0]} on rank ${nearest.route[stage]}; num_directions=${stated} allows ${allowed}: move it ` +
    `there, or state num_directions=${1 + stated}`;
}

function placesOnRoute(flat, route, microbatch, often) {
  const { route: near } = nearestOf(route, often), stage = route.findIndex((rank, at) => rank !== near[at]);
  return [placeOfStep(flat, flat.stepOf[flat.table[(microbatch * flat.width + stage) * 4]])];
}
