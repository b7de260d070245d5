// Why a step does not start earlier: its wait in the words of dualpipe_lab/pp/explain.py, and the chain of causes back
// to time 0, the walk of dualpipe_lab/timeline/critical_path.py.
//
// In: a valid program, its costs or the times of its steps (`measures(...).times`), the place of a step.

import { check } from "./schedule-check.mjs";
import { number } from "./scale.mjs";
import { simulate } from "./simulate.mjs";
import { partText, placeOfStep, stepAt } from "./schedule-flat.mjs";
import { stepText } from "./schedule-rows.mjs";

// {start, end, pause, text, chain}: `pause` is the wait before the step, null if it starts at time 0 or when its rank
// is free; `text` says it in one sentence; `chain` lists {rank, position, by} from time 0 to the step, where `by` is
// how the step before it holds it up: "rank", "message", or "link" for a message that queued; "" for the first.
export const explainStart = (program, costs, rank, position) =>
  whyStart(program, simulate(validFlat(program), costs), { rank, position });

// The same for a program whose times are known.
export function whyStart(program, times, { rank, position }) {
  const flat = validFlat(program), step = flat.rankStart[rank] + position;
  if (!(step >= flat.rankStart[rank] && step < flat.rankStart[rank + 1])) {
    throw new Error(`there is no step at rank ${rank}, position ${position}`);
  }
  const pause = pauseBefore(flat, times, step), chain = chainTo(flat, times, step);
  return { start: times.start[step], end: times.end[step], pause, text: startText(flat, times, step, pause), chain };
}

// Every wait of every rank, in order of time, as `explain(program).pauses`:
// {rank, start, end, phase, beside, what, needed, source, onLink, words, text}.
export function pausesOf(program, times) {
  const flat = validFlat(program), makespan = times.end.reduce((most, end) => Math.max(most, end), 0), found = [];
  for (let rank = 0; rank < flat.numRanks; rank++) {
    for (let step = flat.rankStart[rank]; step < flat.rankStart[rank + 1]; step++) {
      const pause = pauseBefore(flat, times, step);
      if (pause) found.push(pause);
    }
    const last = flat.rankStart[rank + 1] - 1, start = times.end[last], beside = stepText(stepAt(flat, last));
    if (start === makespan) continue;
    const words = `${ticksWords(makespan - start)} after ${beside} for the last rank to end`;
    const nothing = { what: "", needed: "", source: -1, onLink: 0 };
    found.push(withText({ rank, start, end: makespan, phase: "cool-down", beside, ...nothing, words }));
  }
  return found;
}

// The step that ends last, on the lowest rank of several: the end of the critical path.
export function lastPlace(program, times) {
  const flat = validFlat(program);
  let best = flat.rankStart[1] - 1;
  for (let rank = 1; rank < flat.numRanks; rank++) {
    const step = flat.rankStart[rank + 1] - 1;
    if (times.end[step] > times.end[best]) best = step;
  }
  return placeOfStep(flat, best);
}

function validFlat(program) {
  const { isValid, flat, text } = check(program);
  if (!isValid) throw new Error(text);
  return flat;
}

const ticksWords = (time) => `${number(time)} tick${time === 1 ? "" : "s"}`;
const withText = (pause) => ({ ...pause, text: `rank ${pause.rank} waits ${pause.words}` });

function pauseBefore(flat, times, step) {
  const rank = flat.rankOf[step], isFirst = step === flat.rankStart[rank];
  const start = isFirst ? 0 : times.end[step - 1], end = times.start[step];
  if (end <= start) return null;
  const last = awaitedPart(flat, times, step), maker = flat.stepOf[last], source = flat.rankOf[maker];
  const what = flat.kind[last] === 0 ? "activation" : "gradient", needed = partText(flat, last);
  const beside = stepText(stepAt(flat, step)), onLink = end - Math.max(start, times.end[maker]);
  const words = `${ticksWords(end - start)} before ${beside} for the ${what} of ${needed} from rank ${source}` +
    (onLink ? ` (${number(onLink)} on the link)` : "");
  const phase = isFirst ? "warm-up" : "in between";
  return withText({ rank, start, end, phase, beside, what, needed, source, onLink, words });
}

// The part whose message arrives last of those that a step waits for, the first of several; -1 if it needs none.
function awaitedPart({ firstPart, feed, link }, { arrived }, step) {
  let found = -1;
  for (let part = firstPart[step]; part < firstPart[step + 1]; part++) {
    const source = feed[part];
    if (source >= 0 && link[source] >= 0 && (found < 0 || arrived[source] > arrived[found])) found = source;
  }
  return found;
}

function startText(flat, times, step, pause) {
  if (pause) return `${pause.beside} starts at ${number(pause.end)}: ${pause.text}`;
  const head = `${stepText(stepAt(flat, step))} starts at ${number(times.start[step])}`, rank = flat.rankOf[step];
  if (step === flat.rankStart[rank]) return `${head}: it is the first step of rank ${rank} and waits for nothing`;
  return `${head}: rank ${rank} is busy with ${stepText(stepAt(flat, step - 1))} until then`;
}

function chainTo(flat, times, last) {
  const found = [];
  for (let step = last; step >= 0;) {
    const [previous, by] = causeOf(flat, times, step);
    found.push({ ...placeOfStep(flat, step), by });
    step = previous;
  }
  return found.reverse();
}

// The step that held this one up, and how; -1 for the first.
function causeOf(flat, times, step) {
  const { stepOf, rankOf, rankStart, link } = flat, previous = step > rankStart[rankOf[step]] ? step - 1 : -1;
  let part = awaitedPart(flat, times, step);
  const isRank = part < 0 || (previous >= 0 && times.arrived[part] <= times.end[previous]);
  if (isRank) return [previous, previous < 0 ? "" : "rank"];
  let by = "message";
  while (times.left[part] > times.end[stepOf[part]]) { // it queued behind the message before it on the link
    const own = link[part];
    part--;
    while (link[part] !== own) part--;
    by = "link";
  }
  return [stepOf[part], by];
}
