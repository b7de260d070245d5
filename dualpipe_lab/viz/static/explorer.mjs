// <dp-explorer data-spec='{"titles": ..., "programs": packed}'>: choose sizes, costs and memory; schedules are ranked.
//
// Properties: choice, results (both to read), ready (a promise).  Event: dp-explore, after every new ranking.

import { make } from "./dom.mjs";
import { Drawing } from "./drawing.mjs";
import { drawMini, explorerCard, fillCard } from "./explorer-card.mjs";
import { explorerControls } from "./explorer-controls.mjs";
import { explore, unpack } from "./explorer-data.mjs";
import { EXPLORER_STYLE } from "./explorer-style.mjs";
import { number, percent } from "./scale.mjs";
import { STYLE } from "./style.mjs";

const UNIT_COSTS = { F: 1, I: 1, W: 1, B: null, overlap: null, latency: 0, transfer: 0 };

export class ExplorerElement extends Drawing {
  connectedCallback() {
    this.ready ??= this.start(JSON.parse(this.dataset.spec));
    if (this.controls) this.observe(this.list);
  }

  async start(spec) {
    this.programs = await unpack(spec.programs);
    this.spec = spec;
    this.choice = this.first();
    this.cards = new Map();
    this.build();
    if (this.isConnected) this.observe(this.list);
  }

  first() {
    const [ranks, microbatches] = this.spec.start;
    return { ranks, microbatches, limit: null, barrier: true, pairs: false, costs: { ...UNIT_COSTS }, shown: new Set(Object.keys(this.spec.titles)) };
  }

  build() {
    const root = this.shadowRoot ?? this.attachShadow({ mode: "open" });
    const hasPairs = JSON.stringify(this.programs).includes("(");
    this.controls = explorerControls(this.spec, hasPairs, (part) => this.change(part), () => {
      this.choice = this.first();
      this.later();
    });
    this.status = make("div", { class: "status found", role: "status" });
    this.list = make("ol", { class: "ranking", "aria-label": "Schedules, the quickest first" });
    this.refused = make("ul", { class: "refused", "aria-label": "Schedules that this size does not have" });
    this.timeline = document.createElement("dp-timeline");
    this.detail = make("div", { class: "detail" }, this.timeline);
    this.frame = make("section", { class: "dp", "aria-label": "Schedule explorer" },
      this.controls.panel, this.status, this.list, this.refused);
    root.replaceChildren(make("style", {}, STYLE + EXPLORER_STYLE), this.frame);
  }

  change({ costs, toggle, ...rest }) {
    Object.assign(this.choice, rest);
    Object.assign(this.choice.costs, costs);
    if (costs && "overlap" in costs) this.choice.pairs = true;
    for (const key of toggle ? [toggle[0], this.spec.twins[toggle[0]] ?? toggle[0]] : []) {
      this.choice.shown[toggle[1] ? "add" : "delete"](key);
    }
    this.later();
  }

  draw() {
    this.controls.update(this.choice);
    this.results = explore(this.spec.titles, this.spec.twins, this.programs, this.choice);
    this.status.textContent = this.verdict();
    this.refused.replaceChildren(...this.results.refused.map(({ name, reason }) =>
      make("li", {}, make("b", {}, name), ` ${reason}`)));
    this.fill();
    this.showDetail();
    this.dispatchEvent(new CustomEvent("dp-explore", { bubbles: true }));
  }

  verdict() {
    const { ranked } = this.results, fitting = ranked.filter((entry) => entry.fits), [best] = fitting;
    const { ranks, microbatches, limit } = this.choice;
    const where = `${ranks} ranks, ${microbatches === 1 ? "1 microbatch" : `${microbatches} microbatches`}: `;
    if (!ranked.length) return `${where}no schedule is chosen that has this size.`;
    if (!best) return `${where}no schedule fits into ${limit === 1 ? "1 live activation" : `${limit} live activations`}.`;
    const equal = fitting.filter((entry) => entry.step === best.step);
    const names = equal.map((entry) => entry.name);
    const who = names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names.at(-1)} are` : `${names[0]} is`;
    const over = ranked.length - fitting.length;
    const rest = over ? ` Over the memory limit: ${over}.` : "";
    const least = Math.min(...equal.map((entry) => entry.peak)), frugal = equal.filter((entry) => entry.peak === least);
    const tie = equal.length > frugal.length ? ` ${frugal[0].name} holds the fewest activations, ${number(least)}.` : "";
    return `${where}${who} quickest, ${number(best.step)} ticks, bubble ${percent(best.bubble)}.${tie}${rest}`;
  }

  fill() {
    const { ranked } = this.results;
    const key = ranked.some((entry) => entry.key === this.opened) ? this.opened : ranked[0]?.key;
    this.shown = ranked.find((entry) => entry.key === key);
    const cards = ranked.map((entry, index) => {
      if (!this.cards.has(entry.key)) this.cards.set(entry.key, explorerCard(entry.key, (chosen) => this.open(chosen)));
      const card = this.cards.get(entry.key);
      fillCard(card, entry, index, this.choice, entry === this.shown);
      return card;
    });
    const items = cards.map((card) => card.item);
    // Moving an element takes the keyboard's focus away from it: only when the order is another one.
    if (items.length !== this.list.children.length || items.some((item, i) => item !== this.list.children[i])) {
      this.list.replaceChildren(...items);
    }
    const longest = Math.max(...ranked.map((entry) => entry.track.makespan));
    const width = cards[0]?.canvas.parentElement.clientWidth;
    if (width) cards.forEach((card, index) => drawMini(card, ranked[index], width, longest, this.theme));
  }

  // A timeline that was open above makes place: the row that was asked stays where it is on the screen.
  open(key) {
    const { button } = this.cards.get(key), top = button.getBoundingClientRect().top;
    this.opened = key;
    this.draw();
    scrollBy({ top: button.getBoundingClientRect().top - top, behavior: "instant" });
  }

  // The whole timeline of one schedule, in its row; the explorer's sliders set its costs, so it has none of its own.
  showDetail() {
    if (!this.shown) return this.detail.remove();
    const { item } = this.cards.get(this.shown.key);
    if (this.detail.parentElement !== item) item.append(this.detail);
    const { spec } = this.shown, what = JSON.stringify([spec.name, spec.unit, spec.rows]);
    if (what === this.drawn) {
      if (JSON.stringify(this.timeline.costs) !== JSON.stringify(spec.costs)) this.timeline.costs = spec.costs;
      return;
    }
    this.drawn = what;
    this.timeline.spec = { tracks: [spec] };
    this.timeline.sliders?.panel.remove();
  }
}
