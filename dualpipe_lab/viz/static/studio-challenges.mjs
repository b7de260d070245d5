// The challenges: puzzles with a bound, a star for time and one for memory.  What was reached is kept in the browser.

import { make, textButton } from "./dom.mjs";
import { programRows } from "./schedule-rows.mjs";
import { store } from "./store.mjs";

const STORE = "dualpipe-lab-challenges";
const STARS = ["solved", "time", "memory"];

function stored() {
  try {
    return JSON.parse(store.get(STORE)) ?? {};
  } catch {
    return {}; // another hand's text
  }
}

const keep = (progress) => store.set(STORE, JSON.stringify(progress));

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
    (store.keepsNothing() ? "This browser keeps nothing: they are gone with this page." : "This browser remembers them.")), list, textButton("Forget the stars", () => act("forget")));
  const state = { panel, task, current: null, forget };

  function forget() {
    for (const key of Object.keys(progress)) delete progress[key];
    keep(progress);
  }

  // `result`: Python's verdict on the present version, null until it is there.
  state.update = (result) => {
    const { current } = state, found = result?.challenge;
    task.hidden = !current;
    if (current) {
      const reached = (progress[current.name] ??= {});
      for (const [name, has] of Object.entries(found?.stars ?? {})) reached[name] ||= has;
      keep(progress);
      text.textContent = `${current.title}. ${current.text}`;
      rules.textContent = rulesText(current);
      if (found || state.shown !== current) verdict.textContent = found?.says ?? "";
      state.shown = current;
      verdict.classList.toggle("waiting", !found);
      task.classList.toggle("solved", Boolean(found?.stars.solved));
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

// The rows as the notebook's answer cell takes them.
export const answerText = (program) => programRows(program).map((row) => `    "${row}",`).join("\n");
