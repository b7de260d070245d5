// <dp-planner data-spec='{"values": {...}, "choices": {...}, "shown": HTML}'>: fields, and what Python says of their plan.

import { make } from "./dom.mjs";
import { Drawing } from "./drawing.mjs";
import { askPython } from "./studio-kernel.mjs";
import { STYLE } from "./style.mjs";

const PLANNER_STYLE = `
.fields { display: grid; grid-template-columns: repeat(auto-fill, minmax(128px, 1fr)); gap: 6px 14px; padding: 4px 2px 8px; border-bottom: 1px solid var(--line); }
.fields label { display: grid; grid-template-columns: minmax(0, 1fr); font-size: 12px; color: var(--muted); }
.fields input { font: inherit; color: var(--text); background: var(--page); border: 1px solid var(--line); border-radius: 6px; height: 28px; padding: 0 6px; min-width: 0; }
.shown.old { color: var(--muted); }
.shown p { margin: 6px 2px; }
.shown ul { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 4px 2px; padding: 0; }
.shown li i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px; }
.shown table { width: 100%; }
.shown th, .shown td { width: 1%; white-space: nowrap; border: 0; }
.shown th:nth-child(2), .shown .stack { width: 98%; text-align: left; padding: 0; }
.stack { position: relative; font-size: 0; }
.stack i { display: inline-block; height: 16px; }
.stack b { position: absolute; top: 0; bottom: 0; border-left: 2px dashed var(--text); }
`;

export class PlannerElement extends Drawing {
  connectedCallback() {
    if (!this.frame) this.build(JSON.parse(this.dataset.spec));
    this.observe(this.frame);
  }

  build({ values, choices, shown, key }) {
    Object.assign(this, { values, key });
    const fields = Object.entries(values).map(([name, value]) => make("label", {}, name, this.input(name, value, choices[name])));
    this.shown = make("div", { class: "shown", role: "status" });
    this.shown.innerHTML = shown;
    this.frame = make("section", { class: "dp", "aria-label": "Planner" }, make("div", { class: "fields" }, ...fields), this.shown);
    (this.shadowRoot ?? this.attachShadow({ mode: "open" })).replaceChildren(make("style", {}, STYLE + PLANNER_STYLE), this.frame);
  }

  input(name, value, choices) {
    const set = ({ target }) => this.plan({ ...this.values, [name]: typeof value === "number" ? Number(target.value) : target.value });
    if (!choices) return make("input", { type: "number", min: 1, value, "aria-label": name, onchange: set });
    return make("select", { "aria-label": name, onchange: set }, ...choices.map((one) => make("option", { value: one, selected: one === value }, String(one))));
  }

  // The last change counts; an answer to an earlier one is not shown.
  async plan(values) {
    this.values = values;
    this.shown.classList.add("old");
    const say = (words) => this.values === values && (this.shown.textContent = words);
    try {
      const { html } = await askPython(this.key, "planner", values, say);
      if (this.values === values) this.shown.innerHTML = html;
    } catch ({ message }) {
      say(message);
    }
    this.shown.classList.toggle("old", this.values !== values);
  }

  draw() {}
}
