// <dp-live data-spec='{"rows": ..., "verdict": ..., "key": ...}'>: a drawing, its numbers and, beside a kernel, controls.
//
// The drawing is a child in the slot "drawing"; ipywidgets set their views into the slot "controls".  A model (live-model.mjs)
// with the element's key connects itself through `liveCells`, whichever of the two comes first.

import { make } from "./dom.mjs";
import { Drawing } from "./drawing.mjs";
import { LIVE_STYLE } from "./live-style.mjs";
import { STYLE } from "./style.mjs";

export const liveCells = () => (globalThis.dualpipeLabLive ??= { elements: new Set(), models: new Map() });

export class LiveElement extends Drawing {
  connectedCallback() {
    if (!this.frame && this.dataset.spec) this.spec = JSON.parse(this.dataset.spec);
    if (!this.frame) return;
    this.observe(this.frame);
    liveCells().elements.add(this);
    liveCells().models.get(this.key)?.(this);
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    liveCells().elements.delete(this);
    this.unbind?.();
    this.bound = this.unbind = undefined;
  }

  set spec(spec) {
    this.key = spec.key;
    this.how = spec.how;
    this.build();
    this.state = spec;
  }

  get state() {
    return this.shown;
  }

  set state(state) {
    this.shown = state;
    if (state.drawing && !state.error) this.replace(state.drawing);
    this.tell();
  }

  get drawn() {
    return this.querySelector(":scope > [slot=drawing] > *");
  }

  build() {
    const root = this.shadowRoot ?? this.attachShadow({ mode: "open" });
    this.table = make("div", { class: "found", tabindex: 0, role: "region", "aria-label": "Numbers" });
    this.status = make("div", { class: "verdict", role: "status" });
    this.hint = make("p", { class: "hint" }, this.how);
    this.frame = make("section", { class: "dp live", "aria-label": "Live cell" },
      make("slot", { name: "controls" }), make("slot", { name: "drawing" }), this.table, this.status, this.hint);
    root.replaceChildren(make("style", {}, STYLE + LIVE_STYLE), this.frame);
    this.addEventListener("dp-costs", () => this.tell(this.drawn?.costs));
  }

  // A child of the same kind takes the new specification, and so keeps the reader's place and focus.
  replace({ tag, spec, html }) {
    const place = this.querySelector(":scope > [slot=drawing]");
    if (tag && this.drawn?.localName === tag) this.drawn.spec = spec;
    else if (tag) {
      const drawing = document.createElement(tag);
      place.replaceChildren(drawing);
      drawing.spec = spec;
    } else place.innerHTML = html;
    if (this.shown.costs) this.drawn?.sliders?.panel.remove();
  }

  // The numbers are Python's; the drawing's own cost sliders, which need no kernel, leave them behind.
  tell(costs) {
    const { rows, beside, verdict, remark, error } = this.shown;
    const isOld = costs && JSON.stringify(costs) !== JSON.stringify(this.drawn?.tracks?.[0].given);
    this.frame.classList.toggle("refused", Boolean(error));
    this.status.classList.toggle("error", Boolean(error));
    this.table.hidden = Boolean(error || !rows.length);
    this.table.replaceChildren(table(rows, beside, remark));
    this.table.classList.toggle("old", Boolean(isOld));
    this.status.textContent = error || (isOld ? "These numbers belong to the first costs; the heading of the drawing has the new ones." : verdict);
    this.hint.hidden = Boolean(this.bound);
    if (this.drawn) this.drawn.style.marginBottom = 0;
  }

  // Called by a model: its controls come in, and the hint goes.
  bind(controls, unbind) {
    this.unbind?.();
    this.bound = controls;
    this.unbind = unbind;
    this.tell();
  }

  draw() {}
}

function table(rows, beside, remark) {
  const hasOther = rows.some(([, , other]) => other);
  const head = make("tr", {}, ...["", "here", ...(hasOther ? [beside] : [])].map((words) => make("th", { scope: "col" }, words)));
  const body = rows.map(([name, here, other]) =>
    make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, here), ...(hasOther ? [make("td", {}, other || "–")] : [])));
  return make("div", {}, make("table", {}, ...(hasOther ? [make("thead", {}, head)] : []), make("tbody", {}, ...body)),
    ...(remark ? [make("p", { class: "remark" }, remark)] : []));
}
