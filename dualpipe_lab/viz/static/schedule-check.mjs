// The verdict on a schedule: what `validate` says in Python, word for word, with the places that it means.
//
// check(program, {inFlight}) -> {
//   isValid      whether there are no problems
//   problems     at most 12 texts, as InvalidProgram.problems in Python
//   total        how many problems there are; more than are listed if it is greater than problems.length
//   text         all of this as Python prints InvalidProgram; "" for a valid schedule
//   marks        for each problem, the places that it names: [[{rank, position}]]
//   phase        the check that failed: "work" (complete and ordered), "routes", "deadlock", "memory"; "" if none did
//   order        the steps in one order in which they can run, numbered rank by rank (Int32Array); null if they cannot
//   cycle        of a deadlock, the smallest circle of waits:
//                [{rank, position, action, other, otherPosition, needed, text}]: `rank` stands before `action`, at
//                `position`, which needs `needed`, at `otherPosition` of rank `other`.  Otherwise []
//   fix          of a deadlock, the move that ends it or is the first of several, tried:
//                {rank, position, step, target, words, isEnough, text}; `applyMove` of schedule-fix.mjs makes it.
//                `step` is the row's step, or one half of the pair there; `target` counts in the row after the move
//   flat         for a valid schedule, its flat arrays with feeds, links and order, as `compile` of program.mjs makes
//                them: `simulate(flat, costs)` times them
// }
// The checks run in this order; as in Python, a later one runs only if the earlier ones found nothing.
// `inFlight`: the most activations that any rank may hold, or one bound per rank.

import { findFeeds } from "./program.mjs";
import { flatten } from "./schedule-flat.mjs";
import { findFix } from "./schedule-fix.mjs";
import { pythonQuoted, stepText } from "./schedule-rows.mjs";
import { explainRoutes } from "./schedule-routes.mjs";
import { hasEnded, runUntimed, smallestCycle, waitEdge } from "./schedule-run.mjs";
import { addProblem, explainWork, isWhole, newProblems } from "./schedule-work.mjs";

const verdicts = new WeakMap();

export function check(program, { inFlight = null } = {}) {
  if (!verdicts.has(program)) verdicts.set(program, judge(program));
  const verdict = verdicts.get(program);
  if (inFlight == null || !verdict.isValid) return verdict;
  const problems = newProblems();
  explainInFlight(program, inFlight, problems);
  if (!problems.total) return verdict;
  return { ...failed(program, problems, "memory"), order: verdict.order, flat: verdict.flat };
}

function judge(program) {
  const flat = flatten(program), problems = newProblems();
  if (!isWhole(flat)) {
    explainWork(flat, problems);
    return failed(program, problems, "work");
  }
  explainRoutes(flat, program.numDirections, problems);
  if (problems.total) return failed(program, problems, "routes");
  const run = runUntimed(flat);
  if (!hasEnded(flat, run)) return stuck(program, flat, run, problems);
  findFeeds(flat);
  flat.order = run.order;
  const nothing = { problems: [], total: 0, text: "", marks: [], phase: "", cycle: [], fix: null };
  return { ...nothing, isValid: true, order: run.order, flat };
}

function failed(program, { listed, marks, total }, phase) {
  const more = total > listed.length ? [`  - and ${total - listed.length} more`] : [];
  const head = `program ${pythonQuoted(program.name)} has ${total === 1 ? "1 problem" : `${total} problems`}:`;
  const text = [head, ...listed.map((problem) => `  - ${problem}`), ...more].join("\n");
  return { isValid: false, problems: listed, total, text, marks, phase, order: null, cycle: [], fix: null, flat: null };
}

function stuck(program, flat, run, problems) {
  const waits = smallestCycle(flat, run), cycle = waits.map((wait) => waitEdge(flat, wait));
  const fix = findFix(flat, run, waits);
  const others = cycle.map(({ rank }) => rank).sort((a, b) => a - b), last = others.pop();
  const who = others.length ? `ranks ${others.join(", ")} and ${last} wait for each other` : `rank ${last} is stuck`;
  const lines = [`deadlock: ${who}`, ...cycle.map(({ text }) => text), `fix: ${fix.text}`];
  const marks = cycle.flatMap(({ rank, position, other, otherPosition }) =>
    [{ rank, position }, { rank: other, position: otherPosition }]);
  addProblem(problems, () => lines.join("\n      "), () => marks);
  return { ...failed(program, problems, "deadlock"), cycle, fix };
}

function explainInFlight(program, inFlight, problems) {
  const numRanks = program.ranks.length, bounds = Array.isArray(inFlight) ? inFlight : Array(numRanks).fill(inFlight);
  if (bounds.length !== numRanks) {
    throw new Error(`in_flight lists ${bounds.length} bounds, the program has ${numRanks} ranks; give one each`);
  }
  bounds.forEach((bound, rank) => {
    let held = 0;
    program.ranks[rank].every((step, position) => {
      const kinds = step.forward === undefined ? step.kind : step.forward.kind + step.backward.kind;
      held += Number(kinds[0] === "F");
      if (held > bound) {
        addProblem(problems, () => `rank ${rank}, position ${position}: ${stepText(step)} makes it hold ${held} ` +
          `activations, the bound is ${bound}; run a backward first`, () => [{ rank, position }]);
        return false;
      }
      held -= Number(kinds.includes("B") || kinds.includes("W"));
      return true;
    });
  });
}
