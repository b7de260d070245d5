// <dp-planner data-spec='{"models": ..., "gpus": ..., "choices": ..., "start": ...}'>: a plan, its memory, seconds and bytes.
//
// Properties: choice (to read and to set), result, points (to read).  Events: dp-plan after every new result, dp-frontier
// once the plans around the chosen one are computed.

import { legend, numbersTable } from "./chrome.mjs";
import { make } from "./dom.mjs";
import { Drawing } from "./drawing.mjs";
import { plannerControls } from "./planner-controls.mjs";
import { choiceOf, hashOf } from "./planner-link.mjs";
import { MEMORY_PARTS, frontierPicture, gigabytes, memoryBars, partBytes } from "./planner-pictures.mjs";
import { frontierOf, gridKey, isSame, resultOf, searchGrid } from "./planner-search.mjs";
import { PLANNER_STYLE } from "./planner-style.mjs";
import { SCHEDULES, rowsOf } from "./plan-schedules.mjs";
import { trafficOf } from "./plan-traffic.mjs";
import { percent } from "./scale.mjs";
import { STYLE } from "./style.mjs";

const MOST_DRAWN = 12_000, MOST_LISTED = 6; // actions of a timeline; plans of the frontier in the list
const AXES = { tp: "tp: activations of the layers", cp: "cp: keys and values on the ring", ep: "ep: rows of the experts", pp: "pp: activations of the stages",
  gradients: "dp and cp: gradients and weights", norm: "all: the norm", routers: "all: loads of the experts" };
const LIMITS = "Not on this page: GPTs and models of your own, a second token, uneven routing, experts as an axis of their own, " +
  "other numbers of stages per rank, hybrid ZeRO, a loss in chunks, other orders along cp than zigzag, and other precisions than bfloat16.";
const precise = (value, digits = 3) => String(Number(value.toPrecision(digits)));
const sizeText = (bytes) => {
  const power = bytes >= 1 ? Math.min(Math.floor(Math.log10(bytes) / 3), 4) : 0;
  return `${precise(bytes / 1000 ** power)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
};
const seconds = (value) => (value < 1 ? `${precise(1000 * value)} ms` : `${value < 100 ? value.toFixed(2) : value.toFixed(0)} s`);

export class PlannerElement extends Drawing {
  connectedCallback() {
    if (!this.frame) this.start(JSON.parse(this.dataset.spec));
    this.addresses ??= () => this.fromAddress();
    window.addEventListener("hashchange", this.addresses);
    this.observe(this.pictures);
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    window.removeEventListener("hashchange", this.addresses);
    this.stop?.();
  }

  start(spec) {
    this.spec = spec;
    this.offered = { model: Object.keys(spec.models), gpu: Object.keys(spec.gpus), ...spec.choices, ...spec.most };
    this.build();
    this.choice = spec.start;
    this.fromAddress();
  }

  get choice() {
    return { ...this.chosen };
  }

  set choice(choice) {
    this.chosen = { ...this.chosen, ...choice };
    this.compute();
    if (this.isConnected && this.box) this.later();
  }

  fromAddress() {
    const found = choiceOf(location.hash, this.offered);
    if (!found) return;
    this.choice = { ...this.spec.start, ...found.choice };
    if (found.wrong.length) this.said.textContent = `The address has what this page does not offer: ${found.wrong.join(", ")}.`;
    requestAnimationFrame(() => this.scrollIntoView({ block: "start" }));
  }

  build() {
    const root = this.attachShadow({ mode: "open" });
    this.controls = plannerControls(this.spec, (part) => { this.choice = part; }, () => { this.choice = this.spec.start; });
    this.verdict = make("p", { class: "verdict", role: "status" });
    this.figures = make("dl", { class: "figures" });
    this.memory = make("div", { class: "picture" });
    this.table = make("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Memory in numbers" });
    this.frontier = make("div", { class: "picture" });
    this.around = make("p", { class: "note" });
    this.list = make("ol", { class: "frontier", "aria-label": "Plans of the frontier, the fastest first" });
    const entries = MEMORY_PARTS.map(([name, colour]) => ["", name, `background:${colour}`]);
    this.traffic = make("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Bytes on the links" });
    this.traffic.classList.add("links");
    this.pictures = make("div", { class: "pictures" },
      make("div", {}, make("h3", {}, "Memory of every rank of the pipeline"), this.memory, legend(entries),
        make("details", {}, make("summary", {}, "Memory in numbers"), this.table),
        make("h3", {}, "Bytes on the links in a step"), this.traffic),
      make("div", {}, make("h3", {}, "Plans around this one"), this.frontier, this.around, this.list));
    this.timeline = document.createElement("dp-timeline");
    this.long = make("p", { class: "note" });
    this.results = make("div", { class: "results" }, this.figures, this.pictures,
      make("div", { class: "pipeline" }, make("h3", {}, "The pipeline of this plan"), this.timeline, this.long));
    const limits = make("p", { class: "note" }, LIMITS);
    this.frame = make("section", { class: "dp", "aria-label": "Planner" }, this.controls.panel, this.share(), this.verdict, this.results, limits);
    root.replaceChildren(make("style", {}, STYLE + PLANNER_STYLE), this.frame);
  }

  share() {
    this.link = make("a", {}, "Link to this plan");
    this.said = make("span", { class: "note", role: "status" });
    const copy = make("button", { type: "button", class: "text", onclick: () => this.copy() }, "Copy link");
    return make("div", { class: "share" }, this.link, copy, this.controls.reset, this.said);
  }

  async copy() {
    try {
      await navigator.clipboard.writeText(this.link.href);
      this.said.textContent = "The link is copied.";
    } catch {
      this.said.textContent = "This page may not copy; open the link and take the address.";
    }
  }

  compute() {
    this.said.textContent = "";
    this.result = resultOf(this.spec, this.chosen);
    this.sent = this.result.plan.problem ? null : trafficOf(this.result.plan, this.result.ranks);
    this.controls.update(this.chosen);
    this.link.href = location.href.split("#")[0] + hashOf(this.chosen);
    this.search();
  }

  // The grid does not depend on its own four fields, so a step inside of it only moves the ring.
  search() {
    const key = gridKey(this.chosen);
    if (key === this.searched) return;
    this.searched = key;
    this.stop?.();
    this.isDone = false;
    this.points ??= [];
    this.stop = searchGrid(this.spec, this.spec.choices, this.chosen, (points, skipped, isDone) => {
      if (!isDone) return;
      Object.assign(this, { points, skipped, isDone });
      this.later();
      this.dispatchEvent(new CustomEvent("dp-frontier", { bubbles: true }));
    });
  }

  draw() {
    const { plan } = this.result, isBroken = Boolean(plan.problem);
    this.verdict.textContent = isBroken ? `Not a plan: ${plan.problem}.` : this.judged();
    this.verdict.classList.toggle("over", isBroken || !this.result.fits);
    this.results.classList.toggle("broken", isBroken); // then the plans around it stay, of which one can be taken
    this.fillFrontier();
    if (!isBroken) {
      this.fillFigures();
      this.fillMemory();
      this.fillTraffic();
      this.fillTimeline();
    }
    this.dispatchEvent(new CustomEvent("dp-plan", { bubbles: true }));
  }

  judged() {
    const { plan, memory, fullest, bytes, fits, step } = this.result, one = memory[fullest], limit = gigabytes(plan.card.memory);
    const who = plan.pp > 1 ? `rank ${fullest} of the pipeline` : "a GPU";
    const [name, , fields] = MEMORY_PARTS.reduce((most, part) => (partBytes(one, part[2]) > partBytes(one, most[2]) ? part : most));
    const largest = `most of it ${name}, ${gigabytes(partBytes(one, fields))} GB`;
    if (!fits) return `Does not fit: ${who} needs ${gigabytes(bytes)} GB (${largest}), and the GPU has ${limit} GB.`;
    const unsure = one.most > plan.card.memory ? ` The reserve may take ${gigabytes(one.most - one.total)} GB more, which would not fit.` : "";
    return `Fits: ${seconds(step.seconds)} per step; ${who} needs ${gigabytes(bytes)} of ${limit} GB, ${largest}.${unsure}`;
  }

  fillFigures() {
    const { plan, step } = this.result;
    const figures = [["step (assumed)", seconds(step.seconds)], ["tokens per second", Math.round(step.tokensPerSecond).toLocaleString("en")],
      ["MFU, causal pairs", percent(step.mfu)], ["MFU, all pairs", percent(step.fullMfu)], ["bubble, busiest rank", percent(step.bubble)],
      ["data ranks (dp)", String(plan.dp)], ["microbatches", String(plan.count)]];
    this.figures.replaceChildren(...figures.map(([word, value]) => make("div", {}, make("dt", {}, word), make("dd", {}, value))));
  }

  fillMemory() {
    const { memory, plan } = this.result, nameOf = (rank) => (plan.pp > 1 ? `rank ${rank}` : "GPU");
    const partsOf = (one) => MEMORY_PARTS.map(([, , fields]) => gigabytes(partBytes(one, fields)));
    const rows = memory.map((one, rank) => [nameOf(rank), ...partsOf(one), gigabytes(one.total), one.action]);
    const totals = memory.map((one, rank) => `${nameOf(rank)} ${gigabytes(one.total)}`).join(", ");
    const label = `Memory in GB, of a GPU with ${gigabytes(plan.card.memory)}: ${totals}`;
    this.memory.replaceChildren(memoryBars(this.result, this.memory.clientWidth || this.width, this.theme, label));
    const head = ["", ...MEMORY_PARTS.map(([name]) => name), "all", "peak at"];
    const trust = "states exact, activations and buffers assumed, reserve fitted";
    this.table.replaceChildren(numbersTable(`GB of each rank at the peak of its own actions; ${trust}`, { head, rows }));
  }

  fillFrontier() {
    const { points, chosen, isDone } = this, { plan } = this.result, found = frontierOf(points);
    this.frontier.classList.toggle("waits", !isDone);
    if (!isDone) {
      this.around.textContent = "Computing the plans around this one.";
      for (const button of this.list.querySelectorAll("button")) button.disabled = true; // they are of other sizes
      return;
    }
    const mine = points.find((one) => isSame(one.choice, chosen)), fitting = points.filter((one) => one.fits).length;
    const shown = found.length > MOST_LISTED ? `the fastest ${MOST_LISTED} of ${found.length} plans of the frontier` : "the frontier";
    const left = this.skipped ? ` ${this.skipped} plans with too many microbatches for the page are left out.` : "";
    this.around.textContent = !points.length ? "No pp, tp and ZeRO make a legal plan of these sizes." :
      `${points.length} legal plans with these sizes: every pp, tp, ep and ZeRO, with and without recomputation; ${fitting} fit. ` +
      `A disc fits, a circle does not; the line is the frontier${mine ? ", the ring is this plan" : ""}. Below: ${shown}.${left}`;
    const label = `Seconds against memory of ${points.length} plans, ${fitting} of which fit; the frontier has ${found.length}`;
    const width = this.frontier.clientWidth || this.width;
    this.frontier.replaceChildren(...(points.length ? [frontierPicture(points, found, mine, plan.card.memory, width, this.theme, label)] : []));
    const focused = [...this.list.children].findIndex((item) => item.contains(this.shadowRoot.activeElement));
    this.list.replaceChildren(...found.slice(0, MOST_LISTED).map((one) => make("li", {}, this.takeButton(one))));
    if (focused >= 0) this.list.children[Math.min(focused, this.list.children.length - 1)]?.firstChild.focus();
  }

  takeButton({ choice, seconds: time, bytes }) {
    const { pp, tp, ep, zero, recompute } = choice, words = `pp ${pp}, tp ${tp}${ep > 1 ? `, ep ${ep}` : ""}, ZeRO ${zero || "off"}${recompute ? ", recomputed" : ""}`;
    return make("button", { type: "button", "aria-pressed": String(isSame(choice, this.chosen)), onclick: () => { this.choice = choice; } },
      `${seconds(time)}, ${gigabytes(bytes)} GB: ${words}`);
  }

  fillTraffic() {
    const { gpus, node } = this.result.plan;
    const size = (bytes) => sizeText(Number(bytes) / gpus), sum = (place) => Object.values(this.sent).reduce((all, one) => all + one[place], 0n);
    const rows = Object.entries(this.sent).filter(([, [near, far]]) => near || far)
      .map(([axis, [inside, between]]) => [AXES[axis], size(inside), size(between)]);
    if (!rows.length) return this.traffic.replaceChildren(make("p", { class: "note" }, "One GPU sends nothing."));
    rows.push(["all", size(sum(0)), size(sum(1))]);
    const head = ["bytes that a GPU sends, on average", "inside a node", "between nodes"];
    return this.traffic.replaceChildren(numbersTable(`${gpus} GPUs, ${node} in a node`, { head, rows }));
  }

  // The schedule in this plan's own nanoseconds; sliders for its costs would contradict the plan.
  fillTimeline() {
    const { plan, ranks, step } = this.result, length = ranks.reduce((sum, steps) => sum + steps.length, 0);
    this.timeline.hidden = length > MOST_DRAWN;
    this.long.textContent = this.timeline.hidden ? `${length} steps are not drawn; larger microbatches or more data ranks make fewer.` : "";
    const name = plan.pp > 1 ? SCHEDULES[plan.schedule].title : "One stage", drawn = JSON.stringify([plan.pp, plan.schedule, plan.count, step.costs]);
    if (this.timeline.hidden || drawn === this.drawn) return;
    this.drawn = drawn;
    this.timeline.spec = { tracks: [{ name, source: "simulated", unit: "ns", rows: rowsOf(ranks), costs: step.costs }] };
    this.timeline.sliders?.panel.remove();
  }
}
