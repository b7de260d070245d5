// The timeline as a view: its data, its parts on the page, and when it is drawn.  What it does is in element.mjs.

import { choices, coloursText, memoryOf, memoryWords, viewOf } from "./choices.mjs";
import { legend, saveSvg, savePng } from "./chrome.mjs";
import { costPanel } from "./costs.mjs";
import { namesOf, summary } from "./describe.mjs";
import { iconButton, make, textButton } from "./dom.mjs";
import { PlayableDrawing } from "./drawing.mjs";
import { entriesOf } from "./legend.mjs";
import { Player, eventsOf } from "./player.mjs";
import { headline } from "./scene.mjs";
import { Screen } from "./screen.mjs";
import { makeTrack } from "./track.mjs";
import { transport } from "./transport.mjs";
import { STYLE } from "./style.mjs";

const KEYS = "Keys on the drawing: left and right step, space plays, home and end jump, up and down choose a rank, " +
  "enter shows the critical path of what it does, escape clears, plus and minus zoom, C changes what colours show, " +
  "M the memory bands, S shows or hides the streams.";
const FEW_MESSAGES = 40; // at most so many arrows are drawn from the start

export class TimelineView extends PlayableDrawing {
  set spec(spec) {
    this.tracks = spec.tracks.map(makeTrack);
    this.zoom = 1;
    this.lookAt = spec.look ?? spec.time;
    const view = viewOf(spec, this.tracks, this.view), isFew = this.tracks.every((track) => track.numMessages <= FEW_MESSAGES);
    this.view = { time: 0, allMessages: isFew && !view.lanes, ...view }; // a lane shows messages without arrows
    this.player = new Player(() => (this.events ??= eventsOf(this.tracks)), (reason) => this.moved(reason), { ends: () => this.makespan });
    this.events = undefined;
    this.build();
    this.player.seek(spec.time ?? Infinity, "start");
    if (spec.selection) this.selection = spec.selection;
    this.observe(this.scroller);
  }

  // Other tracks in the same drawing, at their end: what an editor shows after each change.  Focus and zoom stay.
  show(tracks, marks = null) {
    this.tracks = tracks;
    this.events = undefined;
    const { by, memory, lanes } = viewOf({ streams: this.view.lanes }, tracks, this.view);
    if (tracks.some((track) => track.numMessages > FEW_MESSAGES)) this.view.allMessages = false;
    Object.assign(this.view, { by, memory, lanes, path: null, hover: null, marked: [], marks });
    this.player.time = this.view.time = this.makespan;
    this.choices = choices(tracks, () => this.view, (part) => this.choose(part));
    const toolbox = this.tools();
    this.toolbox.replaceWith(toolbox);
    this.toolbox = toolbox;
    this.fillLegend();
    this.status.textContent = "";
    this.tip.hidden = true;
    this.titling.textContent = namesOf(tracks);
    this.draw();
    this.fillTable();
  }

  // What an editor points at, on top of the rows; see marks.mjs.
  mark(marks) {
    this.view.marks = marks;
    this.paint();
  }

  // What colours show, the memory bands, and whether streams are shown: properties like the time.
  get colourBy() {
    return this.view.by;
  }

  set colourBy(by) {
    this.choose({ by: viewOf({ colour_by: by }, this.tracks).by });
  }

  get memory() {
    return this.view.memory;
  }

  set memory(memory) {
    this.choose({ memory: memoryOf(memory, this.tracks) });
  }

  get streams() {
    return this.view.lanes;
  }

  set streams(streams) {
    this.choose({ lanes: viewOf({ streams }, this.tracks).lanes });
  }

  choose(part) {
    Object.assign(this.view, part);
    if (part.by) this.status.textContent = coloursText(part.by);
    else if (part.memory) this.status.textContent = memoryWords(part.memory);
    else this.status.textContent = part.lanes ? "Streams are shown." : "Streams are hidden.";
    this.fillLegend();
    this.draw();
    this.dispatchEvent(new CustomEvent("dp-view", { detail: part, bubbles: true }));
  }

  fillLegend() {
    this.legend.replaceChildren(...legend(entriesOf(this.tracks, this.view)).children);
  }

  get makespan() {
    return Math.max(...this.tracks.map((track) => track.makespan));
  }

  get movable() {
    return this.tracks.filter((track) => track.canRecompute);
  }

  build() {
    const root = this.shadowRoot ?? this.attachShadow({ mode: "open" });
    const words = { scrub: "Time", time: (time) => this.timeText(time) };
    this.bar = transport(this.player, words);
    this.canvas = make("canvas", { role: "img" });
    this.screen = new Screen(this.canvas);
    this.spacer = make("div", { class: "spacer" }, this.canvas);
    this.scroller = make("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Timeline drawing" }, this.spacer);
    this.tip = make("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    this.status = make("div", { class: "status", role: "status" });
    this.heading = make("span", { class: "headline" });
    this.titling = make("span", { class: "title" }, namesOf(this.tracks));
    this.table = make("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Numbers" });
    this.sliders = this.movable.length ? costPanel(this.movable, (key, value) => this.changeCost(key, value), () => this.reset()) : null;
    this.choices = choices(this.tracks, () => this.view, (part) => this.choose(part));
    this.legend = legend(entriesOf(this.tracks, this.view));
    const name = namesOf(this.tracks);
    this.frame = make("section", { class: this.children.length ? "dp pictured" : "dp", "aria-label": `Timeline of ${name}` },
      make("header", {}, this.titling, this.heading),
      make("div", { class: "stage" }, this.scroller, this.tip), this.bar.bar, this.status,
      make("div", { class: "foot" }, this.legend, this.toolbox = this.tools()),
      ...(this.sliders ? [this.sliders.panel] : []),
      make("details", { ontoggle: () => this.fillTable() }, make("summary", {}, "Numbers and keys"), this.table,
        make("p", { class: "keys" }, KEYS)));
    root.replaceChildren(make("style", {}, STYLE), this.frame, make("slot", { class: "printed" }));
    this.listen();
  }

  tools() {
    this.pathButton = textButton("Critical path", () => this.togglePath(), false);
    this.messageButton = textButton("Messages", () => {
      this.view.allMessages = !this.view.allMessages;
      this.paint();
    }, this.view.allMessages);
    return make("div", { class: "tools", role: "group", "aria-label": "Drawing" }, ...this.choices.items, this.pathButton,
      ...(this.tracks.some((track) => track.numMessages) ? [this.messageButton] : []),
      iconButton("out", "Zoom out", () => this.zoomBy(1 / 1.5)), iconButton("in", "Zoom in", () => this.zoomBy(1.5)),
      textButton("SVG", () => saveSvg(this.name, this.toSvg()), null, "SVG: save the drawing"),
      textButton("PNG", () => savePng(this.name, this.toPng()), null, "PNG: save the drawing"));
  }

  listen() {
    this.scroller.addEventListener("scroll", () => {
      this.scrolled = this.scroller.scrollLeft;
      this.later();
    });
    this.scroller.addEventListener("keydown", (event) => this.pressed(event));
    this.canvas.addEventListener("pointermove", (event) => this.pointed(event));
    this.canvas.addEventListener("pointerleave", () => this.hover(null));
    this.canvas.addEventListener("pointerdown", (event) => this.grab(event));
    this.canvas.addEventListener("click", (event) => event.offsetY > this.screen.layout.axis - 4 && this.select(this.at(event)));
  }

  // Drawing: `later` once per frame, `draw` now, `paint` when only time, hover or selection changed.
  draw() {
    if (!this.width) return;
    this.screen.store(this.tracks, this.theme, this.width, this.zoom, this.scrolled ?? 0, this.view);
    const { layout } = this.screen, { lookAt } = this;
    this.spacer.style.width = `${layout.left + layout.plot + layout.right}px`;
    this.canvas.style.width = `${this.width}px`;
    this.heading.textContent = this.tracks.length > 1 ? "" : headline(this.tracks[0]);
    this.canvas.setAttribute("aria-label", summary(this.tracks));
    this.paint();
    this.dispatchEvent(new CustomEvent("dp-draw"));
    if (lookAt == null || layout.plot <= layout.room) return;
    this.lookAt = null; // once: then the reader scrolls
    this.reveal(lookAt * layout.perTime - layout.room / 4);
  }

  paint() {
    if (!this.screen.layout) return;
    this.screen.paint(this.tracks, this.view);
    this.bar.update();
    this.choices.update();
    this.pathButton.setAttribute("aria-pressed", String(Boolean(this.view.path)));
    this.messageButton.setAttribute("aria-pressed", String(this.view.allMessages));
  }
}
