// Why a step does not start earlier: its wait, in the words of dualpipe_lab/pp/explain.py.  The chain of causes back to
// time 0 is the timeline's critical path (path.mjs).

import { check } from "./schedule-check.mjs";
import { number } from "./scale.mjs";
import { simulate } from "./simulate.mjs";
import { partText, stepAt } from "./schedule-flat.mjs";
import { stepText } from "./schedule-rows.mjs";

// {start, end, pause, text} of a step of a valid program: `pause` is the wait before it, as an entry of
// `explain(program).pauses`, null if it starts at time 0 or when its rank is free; `text` says why in one sentence.
export function explainStart(program, costs, rank, position) {
  const flat = validFlat(program), times = simulate(flat, costs), step = flat.rankStart[rank] + position;
  if (!(step >= flat.rankStart[rank] && step < flat.rankStart[rank + 1])) {
    throw new Error(`there is no step at rank ${rank}, position ${position}`);
  }
  const pause = pauseBefore(flat, times, step);
  return { start: times.start[step], end: times.end[step], pause, text: startText(flat, times, step, pause) };
}

function validFlat(program) {
  const { isValid, flat, text } = check(program);
  if (!isValid) throw new Error(text);
  return flat;
}

const ticksWords = (time) => `${number(time)} tick${time === 1 ? "" : "s"}`;

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
  return { rank, start, end, phase, beside, what, needed, source, onLink, words, text: `rank ${rank} waits ${words}` };
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
