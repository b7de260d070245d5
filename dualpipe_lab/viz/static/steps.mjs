// <dp-steps data-spec='{"name", "ranks", "start", "steps"}'>: messages between ranks, step by step.
//
// start: per rank its cells [label, owner]; steps: [{title, messages: [[src, dst, label, owner]], holds: as start}].
// An owner is a number that chooses the colour, or null.  Properties: spec, time (in steps), playing.  Event: dp-time.

import { fitCanvas, numbersTable, pngBlob, savePng, saveSvg, svgText } from "./chrome.mjs";
import { make, textButton } from "./dom.mjs";
import { PlayableDrawing } from "./drawing.mjs";
import { CanvasPainter } from "./painter.mjs";
import { Player } from "./player.mjs";
import { drawSteps, stepsLayout } from "./steps-scene.mjs";
import { STYLE } from "./style.mjs";
import { handleKey, transport } from "./transport.mjs";

const PACING = { least: 1, most: 60, perEvent: 1.1 };

export class StepsElement extends PlayableDrawing {
  set spec(spec) {
    this.data = spec;
    this.layout = undefined; // of other ranks
    const events = Float64Array.from({ length: spec.steps.length + 1 }, (_, i) => i);
    this.player = new Player(() => events, (reason) => this.moved(reason), { pace: PACING, glides: true });
    this.build();
    this.player.seek(spec.time ?? 0, "start");
    this.observe(this.scroller);
  }

  build() {
    const { name, note, steps } = this.data, root = this.shadowRoot ?? this.attachShadow({ mode: "open" });
    const words = { scrub: "Step", time: (time) => `step ${Math.ceil(time)} / ${steps.length}` };
    this.bar = transport(this.player, words);
    this.canvas = make("canvas", { role: "img" });
    this.scroller = make("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Drawing of the ranks" }, this.canvas);
    this.scroller.addEventListener("keydown", (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.altKey && handleKey(this.player, event.key)) event.preventDefault();
    });
    this.status = make("div", { class: "status", role: "status" });
    const save = make("div", { class: "tools", role: "group", "aria-label": "Drawing" },
      textButton("SVG", () => saveSvg(name, this.toSvg()), null, "SVG: save the drawing"),
      textButton("PNG", () => savePng(name, this.toPng()), null, "PNG: save the drawing"));
    this.frame = make("section", { class: this.children.length ? "dp pictured" : "dp", "aria-label": `Steps of ${name}` },
      make("header", {}, make("span", { class: "title" }, name), make("span", { class: "headline" }, note ?? "")),
      make("div", { class: "stage" }, this.scroller), this.bar.bar, make("div", { class: "foot" }, this.status, save),
      make("details", {}, make("summary", {}, "All messages"), make("div", { class: "table", tabindex: 0, role: "region",
        "aria-label": "All messages" }, numbersTable("The messages of every step", this.table()))));
    root.replaceChildren(make("style", {}, STYLE), this.frame, make("slot", { class: "printed" }));
  }

  table() {
    const rows = this.data.steps.flatMap(({ messages }, i) => messages.map(([src, dst, label]) => [i + 1, src, dst, label]));
    return { head: ["step", "from rank", "to rank", "carries"], rows };
  }

  moved(reason) {
    this.paint();
    const text = this.momentText();
    tellTime(this.status, this.player, reason, text);
    this.canvas.setAttribute("aria-label", text);
    if (reason !== "start") this.dispatchEvent(new CustomEvent("dp-time", { detail: this.time, bubbles: true }));
  }

  // What has happened, and what every rank holds now.
  momentText() {
    const { start, steps } = this.data, done = Math.floor(this.time), last = steps[done - 1];
    const held = (last?.holds ?? start).map((cells, rank) => `rank ${rank}: ${cells.map(([label]) => label).join(" ") || "nothing"}`);
    const title = last ? `Step ${done} of ${steps.length}: ${last.title}` : `Before step 1 of ${steps.length}`;
    return (last?.holds ?? start).flat().length > 20 ? title : `${title}. ${held.join("; ")}`;
  }

  draw() {
    if (!this.width) return;
    this.layout = stepsLayout(this.data, this.width);
    Object.assign(this.canvas.style, { width: `${this.layout.width}px`, height: `${this.layout.height}px` });
    this.paint();
  }

  paint() {
    this.bar.update();
    if (!this.layout) return;
    const context = fitCanvas(this.canvas, this.layout.width, this.layout.height);
    drawSteps(new CanvasPainter(context, this.theme), this.layout, this.data, this.time);
  }

  toSvg() {
    return svgText(...this.exported(), `Steps of ${this.data.name}`, this.momentText());
  }

  toPng() {
    return pngBlob(...this.exported());
  }

  exported() {
    const { width, height } = this.layout;
    return [(painter) => drawSteps(painter, this.layout, this.data, this.time), [width, height], this.theme];
  }
}
