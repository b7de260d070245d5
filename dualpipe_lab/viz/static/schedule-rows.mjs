// Schedules as values: steps from rows of text, and text again.
//
// A program is {name, ranks, numStages, numMicrobatches, numDirections}: `ranks` has an array of steps per rank.
// A step is {stage, kind, microbatch}, or an overlapped pair {forward, backward} of two of these; kinds are F, B, I, W.
// Programs and steps are values: an edit makes a new program that shares the unchanged rows, and nothing is changed in
// place.  `numDirections` is null for any number of routes, as in Python.

import { KINDS, parseRows } from "./program.mjs";

export const MOST_COUNT = 4096; // stages or microbatches that a reader may give a schedule

// A program from its rows of steps.  Counts default to one more than the largest index, as in Python.
export function makeProgram(name, ranks, { numStages, numMicrobatches, numDirections = null } = {}) {
  const most = (field) => 1 + ranks.flat().flatMap(stepActions).reduce((found, action) => Math.max(found, action[field]), -1);
  return Object.freeze({ name, ranks, numDirections, numStages: numStages ?? most("stage"),
    numMicrobatches: numMicrobatches ?? most("microbatch") });
}

// The same name, counts and directions with other rows.
export const withRanks = (program, ranks) => makeProgram(program.name, ranks, program);

export const isPair = (step) => step.forward !== undefined;

// The action of a step, or both of a pair, forward first.
export const stepActions = (step) => (isPair(step) ? [step.forward, step.backward] : [step]);

export const stepText = (step) =>
  isPair(step) ? `(${stepText(step.forward)};${stepText(step.backward)})OVERLAP_F_B` : `${step.stage}${step.kind}${step.microbatch}`;

// One line of text per rank, without labels.
export const programRows = (program) => program.ranks.map((row) => row.map(stepText).join(" "));

// The steps of rows of text; an Error names what is no action.
export function stepsOf(rows) {
  const { parts, firstPart, rankStart } = parseRows(rows);
  const action = (part) => ({ stage: parts[part][0], kind: KINDS[parts[part][1]], microbatch: parts[part][2] });
  const step = (at) => (firstPart[at + 1] === firstPart[at] + 1 ? action(firstPart[at])
    : { forward: action(firstPart[at]), backward: action(firstPart[at] + 1) });
  return rows.map((_, rank) => Array.from({ length: rankStart[rank + 1] - rankStart[rank] }, (_none, at) => step(rankStart[rank] + at)));
}

// A program as Python, links and files have it, and back.
export const packProgram = (program) => ({ name: program.name, rows: programRows(program), stages: program.numStages,
  microbatches: program.numMicrobatches, directions: program.numDirections });

export const unpackProgram = ({ name, rows, stages, microbatches, directions }) =>
  makeProgram(name, stepsOf(rows), { numStages: stages, numMicrobatches: microbatches, numDirections: directions });
