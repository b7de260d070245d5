// What Python says of a program: the validator's verdict with the move that mends it, and the numbers.

import { make } from "./dom.mjs";
import { number, percent } from "./scale.mjs";

export function verdictPanel(act) {
  const head = make("p", { class: "verdict", role: "status" });
  const list = make("ul", { class: "problems", "aria-label": "Problems" });
  const mend = make("button", { type: "button", class: "text mend", onclick: () => act("mend") });
  const panel = make("div", { class: "judged" }, head, list, mend);
  // The verdict on an earlier version fades until the present one has its own; with words there is none.
  const wait = (words) => {
    panel.classList.add("waiting");
    mend.hidden = true;
    if (!words) return;
    panel.classList.remove("bad");
    head.textContent = words;
    list.hidden = true;
  };
  const update = ({ says, problems, fix }) => {
    panel.classList.remove("waiting");
    panel.classList.toggle("bad", problems.length > 0);
    head.textContent = says;
    list.hidden = !problems.length;
    list.replaceChildren(...problems.map((text) => make("li", {}, text)));
    mend.hidden = !fix;
    if (fix) mend.textContent = `Do it: ${fix.says}`;
  };
  return { panel, update, wait };
}

// [words, value of the figures, how it is written]
const FIGURES = [
  ["makespan, ticks", (one) => one.makespan, number],
  ["lower bound, ticks", (one) => one.bound, number],
  ["work of the busiest rank, ticks", (one) => Math.max(...one.busy, 0), number],
  ["bubble", (one) => one.bubble, percent],
  ["live activations, most on a rank", (one) => Math.max(...one.peak, 0), number],
  ["pending weight gradients, most on a rank", (one) => Math.max(...one.pending, 0), number],
  ["stages stored, most on a rank", (one) => one.stored, number],
  ["messages", (one) => one.messages, number],
];

// Of every version that can run; `before` is the last one that could.  They fade as the verdict does.
export function figuresPanel() {
  const table = make("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Numbers of this version" });
  const wait = (words) => {
    table.classList.add("waiting");
    if (words) table.replaceChildren("Numbers come with the verdict.");
  };
  const update = (now, before) => {
    table.classList.remove("waiting");
    const rows = now ? FIGURES.map(([words, of, write]) => figureRow(words, of(now), before && of(before), write)) : [];
    const head = make("tr", {}, ...["", "now", "before", "change"].map((word) => make("th", { scope: "col" }, word)));
    const perRank = now ? ranksTable(now) : "";
    const whole = now ? make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)) : "There are numbers as soon as it can run.";
    table.replaceChildren(whole, perRank);
  };
  return { panel: table, update, wait };
}

function figureRow(words, now, before, write) {
  const change = before == null || before === now ? "" : (now > before ? "+" : "−") + write(Math.abs(now - before));
  const cells = [write(now), before == null ? "" : write(before), change];
  return make("tr", {}, make("th", { scope: "row" }, words), ...cells.map((text) => make("td", {}, text)));
}

function ranksTable({ busy, makespan, peak, pending }) {
  const head = ["rank", "busy", "idle", "bubble", "activations", "weight gradients"];
  const rows = busy.map((ticks, rank) => [rank, number(ticks), number(makespan - ticks),
    percent(makespan ? (makespan - ticks) / makespan : 0), peak[rank], pending[rank]]);
  return make("table", {}, make("thead", {}, make("tr", {}, ...head.map((word) => make("th", { scope: "col" }, word)))),
    make("tbody", {}, ...rows.map((cells) => make("tr", {}, ...cells.map((cell) => make("td", {}, String(cell)))))));
}
