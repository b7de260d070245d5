// <dp-live data-spec='{"rows": ..., "verdict": ..., "controls": ..., "points": packed}'>: a drawing, its numbers, and controls.
//
// The drawing is a child in the slot "drawing".  Without a kernel the controls choose one of the points that Python computed.
// Beside a kernel the specification has a `key` instead: ipywidgets set their views into the slot "controls", and a model
// (live-model.mjs) with this key connects itself through `liveCells`, whichever of the two comes first.

import { make } from "./dom.mjs";
import { Drawing } from "./drawing.mjs";
import { rangeOf } from "./explorer-controls.mjs";
import { unpack } from "./explorer-data.mjs";
import { LIVE_STYLE } from "./live-style.mjs";
import { number, percent } from "./scale.mjs";
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
    this.given = spec;
    this.build();
    this.frame.prepend(make("div", { class: "costs sizes", role: "group", "aria-label": "Controls" }, ...this.sizes(spec), ...this.texts(spec)));
    this.state = spec;
  }

  // The controls of the points; `chosen` are their places.
  sizes({ controls = [] }) {
    this.chosen = controls.map(({ start }) => start);
    return controls.map(({ name, words, slider }, index) => {
      const about = name.replace(/^num_/, "number of ").replaceAll("_", " "), places = words.map((_, place) => place);
      const choose = (place) => {
        this.chosen[index] = place;
        range?.show(place, words[place]);
        this.choose();
      };
      const range = slider ? rangeOf(name, about, places, choose) : null;
      range?.show(this.chosen[index], words[this.chosen[index]]);
      if (range) return range.row;
      const select = make("select", { onchange: () => choose(select.selectedIndex) }, ...words.map((each) => make("option", {}, each)));
      select.selectedIndex = this.chosen[index];
      return make("label", { class: "cost" }, make("span", {}, name), select);
    });
  }

  // Rows that the reader edits, where the page has Python (python.js of the book), and the button that asks it.
  texts({ texts = [], asks }) {
    this.rows = texts.filter(() => globalThis.dualpipePython).map((name) => {
      const text = asks.values[name];
      return make("textarea", { name, rows: Math.max(text.split("\n").length, 2), spellcheck: "false", autocapitalize: "off" }, text);
    });
    if (!this.rows.length) return [];
    this.how = "";
    return [...this.rows.map((row) => make("label", { class: "cost rows" }, make("span", {}, row.name), row)),
      make("button", { type: "button", onclick: () => this.choose() }, "Check the rows")];
  }

  // Show the chosen point, the last control varying fastest, or what Python answers to edited rows.
  async choose() {
    const { controls, points } = this.given, place = controls.reduce((sum, { words }, i) => sum * words.length + this.chosen[i], 0);
    const isEdited = this.rows.some(({ value, defaultValue }) => value !== defaultValue);
    const found = isEdited ? await this.ask() : (await (this.points ??= unpack(points)))[place];
    this.state = { ...this.shown, error: "", drawing: null, ...found };
  }

  async ask() {
    const { controls, asks } = this.given, values = { ...asks.values };
    controls.forEach(({ name, words }, i) => (values[name] = Number(words[this.chosen[i]])));
    for (const { name, value } of this.rows) values[name] = value;
    const say = (words) => (this.status.textContent = words);
    return dualpipePython.ask("play", [JSON.stringify({ ...asks, values })], say).then(JSON.parse, ({ message }) => ({ error: message }));
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

  // The timeline whose costs the reader can move, if there is one and it has its data already.
  get track() {
    return this.drawn?.tracks?.find(({ canRecompute }) => canRecompute);
  }

  build() {
    const root = this.shadowRoot ?? this.attachShadow({ mode: "open" });
    this.table = make("div", { class: "found", tabindex: 0, role: "region", "aria-label": "Numbers" });
    this.status = make("div", { class: "verdict", role: "status" });
    this.hint = make("p", { class: "hint" }, this.how);
    this.frame = make("section", { class: "dp live", "aria-label": "Live cell" },
      make("slot", { name: "controls" }), make("slot", { name: "drawing" }), this.table, this.status, this.hint);
    root.replaceChildren(make("style", {}, STYLE + LIVE_STYLE), this.frame);
    this.addEventListener("dp-costs", () => this.tell());
  }

  // A child of the same kind takes the new specification, and so keeps the reader's place and focus.
  replace({ tag, spec, html }) {
    const place = this.querySelector(":scope > [slot=drawing]"), { track } = this;
    const moved = Object.entries(track?.costs ?? {}).filter(([key, cost]) => String(cost) !== String(track.given[key]));
    if (tag && this.drawn?.localName === tag) this.drawn.spec = spec;
    else if (tag) {
      const drawing = document.createElement(tag);
      place.replaceChildren(drawing);
      drawing.spec = spec;
    } else place.innerHTML = html;
    if (this.bound && this.shown.costs) this.drawn?.sliders?.panel.remove();
    else if (moved.length) this.drawn.costs = Object.fromEntries(moved); // costs that the reader has set hold for every size
  }

  // The numbers are Python's, and so is the closed form; where the drawing's own sliders move its costs, the page computes
  // the numbers that it knows, and says so of others.
  tell() {
    const { rows, beside, verdict, remark, error } = this.shown, { track } = this;
    const isMoved = track && JSON.stringify(track.costs) !== JSON.stringify(track.given);
    const isOld = isMoved && !rows.every(([name]) => name in FOLLOWING);
    const follow = ([name, here, other]) => (FOLLOWING[name] ? [name, FOLLOWING[name](track), ""] : [name, here, other]);
    this.frame.classList.toggle("refused", Boolean(error));
    this.status.classList.toggle("error", Boolean(error));
    this.table.hidden = Boolean(error || !rows.length);
    this.table.replaceChildren(table(isMoved && !isOld ? rows.map(follow) : rows, beside, isMoved ? "" : remark));
    this.table.classList.toggle("old", Boolean(isOld));
    this.status.textContent = error || (isOld ? "These numbers belong to the first costs; the heading of the drawing has the new ones." : verdict);
    this.hint.hidden = Boolean(this.bound || !this.how);
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

const FOLLOWING = {
  makespan: ({ makespan }) => `${number(makespan)} tick${makespan === 1 ? "" : "s"}`,
  "bubble fraction": ({ bubble }) => percent(bubble),
  "peak live activations": null, // of an order, whatever it costs
};

function table(rows, beside, remark) {
  const hasOther = rows.some(([, , other]) => other);
  const head = make("tr", {}, ...["", "here", ...(hasOther ? [beside] : [])].map((words) => make("th", { scope: "col" }, words)));
  const body = rows.map(([name, here, other]) =>
    make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, here), ...(hasOther ? [make("td", {}, other || "–")] : [])));
  return make("div", {}, make("table", {}, ...(hasOther ? [make("thead", {}, head)] : []), make("tbody", {}, ...body)),
    ...(remark ? [make("p", { class: "remark" }, remark)] : []));
}
