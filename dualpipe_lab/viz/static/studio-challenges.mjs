// The challenges: puzzles with a bound, a star for time and one for memory.  What was reached is kept in the browser.

import { make, textButton } from "./dom.mjs";
import { number } from "./scale.mjs";
import { makeProgram, parseProgram, programRows } from "./schedule-rows.mjs";

const STORE = "dualpipe-lab-challenges";
const STARS = ["solved", "time", "memory"];

// The same rules as Python's: {isSolved, stars: {time, memory}, reason}; `reason` says what is missing.
function judgeChallenge(challenge, program, result, figures) {
  const no = (reason) => ({ isSolved: false, stars: { time: false, memory: false }, reason });
  const { ranks, stages, microbatches, goal, in_flight: room } = challenge;
  if (program.ranks.length !== ranks || program.numStages !== stages || program.numMicrobatches !== microbatches) {
    return no(`it has ${program.ranks.length} ranks, ${program.numStages} stages and ${program.numMicrobatches} microbatches, ` +
      `the challenge has ${ranks}, ${stages} and ${microbatches}`);
  }
  if (!result.isValid || !figures) return no("it cannot run yet");
  const most = Math.max(...figures.peak);
  if (room !== null && most > room) return no(`a rank holds ${most} activations, ${room} are allowed`);
  if (goal !== null && figures.makespan > goal) return no(`it takes ${number(figures.makespan)} ticks, at most ${goal} are allowed`);
  return { isSolved: true, stars: { time: figures.makespan <= challenge.best, memory: most <= challenge.least }, reason: "" };
}

export const challengeProgram = ({ title, start, stages, microbatches, directions }) =>
  makeProgram(title, parseProgram(start, title).ranks, { numStages: stages, numMicrobatches: microbatches, numDirections: directions });

function stored() {
  try {
    return JSON.parse(localStorage.getItem(STORE)) ?? {};
  } catch {
    return {}; // a page from a file may have no store: then nothing is kept
  }
}

function keep(progress) {
  try {
    localStorage.setItem(STORE, JSON.stringify(progress));
  } catch {
    // see above
  }
}

const starText = (reached) => STARS.map((name) => (reached?.[name] ? "★" : "☆")).join("");
const starWords = (reached) => STARS.filter((name) => reached?.[name]).join(", ") || "not solved";

export function challengePanel(challenges, act) {
  const progress = stored(), list = make("ol", { class: "challenges" }), task = make("div", { class: "task", hidden: true });
  const entries = challenges.map((challenge, index) => {
    const stars = make("span", { class: "stars" }), words = make("span", { class: "hidden" });
    const open = make("button", { type: "button", class: "text", onclick: () => act("challenge", index) }, challenge.title);
    list.append(make("li", {}, open, stars, words));
    return { challenge, stars, words, open };
  });
  const text = make("p", {}), rules = make("p", { class: "rules" }), verdict = make("p", { class: "judgement", role: "status" });
  const copied = textButton("Copy the answer for the notebook", () => act("copyRows"));
  task.append(text, rules, verdict, make("div", { class: "row" }, copied, textButton("Leave the challenge", () => act("challenge", -1))));
  const panel = make("div", {}, make("p", { class: "hint" }, "A star each for solving it, for its time and for its memory. " +
    "This browser remembers them."), list, textButton("Forget the stars", () => act("forget")));
  const state = { panel, task, current: null, forget };

  function forget() {
    for (const key of Object.keys(progress)) delete progress[key];
    keep(progress);
  }

  state.update = ({ program }, result, figures) => {
    const { current } = state;
    task.hidden = !current;
    if (current) {
      const found = judgeChallenge(current, program, result, figures), reached = (progress[current.name] ??= {});
      if (found.isSolved) {
        for (const [name, has] of [["solved", true], ...Object.entries(found.stars)]) reached[name] ||= has;
        keep(progress);
      }
      text.textContent = `${current.title}. ${current.text}`;
      rules.textContent = rulesText(current);
      verdict.textContent = verdictText(found);
      task.classList.toggle("solved", found.isSolved);
    }
    for (const { challenge, stars, words, open } of entries) {
      stars.textContent = starText(progress[challenge.name]);
      words.textContent = starWords(progress[challenge.name]);
      open.setAttribute("aria-pressed", String(challenge === current));
    }
  };
  return state;
}

function rulesText({ ranks, stages, microbatches, goal, in_flight: room, directions, best, least, bound }) {
  const allowed = [goal === null ? "" : `at most ${goal} ticks`, room === null ? "" : `at most ${room} activations on a rank`,
    directions > 1 ? "two copies of every stage" : "one copy of every stage"].filter(Boolean).join(", ");
  return `${ranks} ranks, ${stages} stages, ${microbatches} microbatches; ${allowed}. Star of time: ${best} ticks. ` +
    `Star of memory: ${least} activations. No order is below ${bound} ticks.`;
}

function verdictText({ isSolved, stars, reason }) {
  if (!isSolved) return `Not yet: ${reason}.`;
  const won = Object.entries(stars).filter(([, has]) => has).map(([name]) => name);
  return won.length ? `Solved, with the star of ${won.join(" and of ")}.` : "Solved. The stars of time and of memory are still open.";
}

// The rows as the notebook's answer cell takes them.
export const answerText = (program) => programRows(program).map((row) => `    "${row}",`).join("\n");
