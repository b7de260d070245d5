// <dp-timeline data-spec='{"tracks": [...]}'>: one to three timelines on one axis.
//
// Properties: spec, time, costs, selection, playing.  Events: dp-time, dp-costs, dp-selection (detail: the new value) and
// dp-draw.  What the element contains is shown until it is upgraded, and without scripts.

import { numbersTable, pngBlob, svgText } from "./chrome.mjs";
import { memoryText } from "./bands.mjs";
import { besideText, barName, momentText, namesOf, pathText, spanLines, summary, tableOf } from "./describe.mjs";
import { make, tellTime } from "./dom.mjs";
import { isMessage, messageOf } from "./lanes.mjs";
import { hit, spanAt, timeAt, wholeLayout } from "./layout.mjs";
import { criticalPath, lastSpan } from "./path.mjs";
import { number, unitOf } from "./scale.mjs";
import { drawScene } from "./scene.mjs";
import { findSpan, keyOf, twins } from "./selection.mjs";
import { TimelineView } from "./timeline.mjs";
import { recompute } from "./track.mjs";
import { handleKey } from "./transport.mjs";

export class TimelineElement extends TimelineView {
  get name() {
    return namesOf(this.tracks);
  }

  get costs() {
    return this.movable[0]?.costs ?? null;
  }

  set costs(costs) {
    this.recompute((track) => ({ ...track.costs, ...costs }));
  }

  get selection() {
    const found = this.view.path && [this.view.path.index, this.view.path.spans.at(-1)];
    return found ? keyOf(this.tracks[found[0]], found[1]) : "";
  }

  set selection(key) {
    if (key !== this.selection) this.select(key ? findSpan(this.tracks, key) : null);
  }

  tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail, bubbles: true }));
  }

  timeText(time) {
    const [divisor, unit] = unitOf(this.tracks[0].unit, this.makespan);
    return `${number(Math.round(time), divisor)} / ${number(this.makespan, divisor)} ${unit}`;
  }

  // The player has moved: draw, follow, and say so unless it is running.
  moved(reason) {
    this.view.time = this.player.time;
    if (reason !== "start") this.follow();
    this.paint();
    tellTime(this.status, this.player, reason, this.momentText());
    if (reason !== "start") this.tell("dp-time", this.view.time);
  }

  momentText() {
    const [index, rank] = this.view.rank ?? [0, 0], hasBand = this.screen.layout?.tracks[index].bands;
    const held = hasBand ? `; ${memoryText(this.tracks[index], rank, this.view.time)}` : "";
    return momentText(this.tracks, this.view.time, this.makespan, this.view.lanes) + held;
  }

  // Keep the playhead in view where the drawing is wider than its box.
  follow() {
    const { layout } = this.screen;
    if (!layout || layout.plot <= layout.room) return;
    const x = this.view.time * layout.perTime - layout.scroll;
    if (x >= 0 && x <= layout.room) return;
    this.reveal(this.view.time * layout.perTime - layout.room / 4);
  }

  changeCost(key, value) {
    this.costs = { [key]: value };
    this.tell("dp-costs", this.costs);
  }

  reset() {
    this.recompute((track) => track.given);
    this.tell("dp-costs", this.costs);
  }

  // New times for every track that can have them; at the end of time we stay at the end.
  recompute(costsOf) {
    const atEnd = this.view.time >= this.makespan, selected = this.view.path && [this.view.path.index, this.view.path.spans.at(-1)];
    for (const track of this.movable) recompute(track, costsOf(track));
    this.events = undefined;
    this.player.time = atEnd ? this.makespan : Math.min(this.player.time, this.makespan);
    this.view.time = this.player.time;
    if (selected) this.trace(selected);
    this.sliders?.update();
    this.status.textContent = summary(this.tracks);
    this.draw();
    this.fillTable();
  }

  select(found) {
    if (found) this.trace(found);
    else this.view.path = null;
    this.status.textContent = found
      ? pathText(this.tracks, this.view.path, this.makespan)
      : this.player.playing ? "" : this.momentText();
    this.paint();
    this.tell("dp-selection", this.selection);
  }

  // A message stands for the work that it feeds, or else for the work that made it.
  trace([index, id]) {
    const track = this.tracks[index], { to, from } = isMessage(track, id) ? messageOf(track, id) : { to: id };
    const span = to >= 0 ? to : from;
    if (span < 0) return;
    const { spans, messages } = criticalPath(track, span);
    this.view.path = { index, spans, messages: new Set(messages) };
  }

  togglePath() {
    const longest = this.tracks.findIndex((track) => track.makespan === this.makespan);
    this.select(this.view.path ? null : [longest, lastSpan(this.tracks[longest])]);
  }

  zoomBy(factor) {
    const { layout } = this.screen, middle = timeAt(layout, layout.left + layout.room / 2);
    const most = (60 * layout.makespan) / (Math.min(...this.tracks.map((track) => track.shortest)) * layout.room);
    this.zoom = Math.min(Math.max(this.zoom * factor, layout.room / layout.plot * this.zoom), Math.max(most, 1));
    this.draw();
    this.reveal(middle * this.screen.layout.perTime - layout.room / 2);
  }

  reveal(left) {
    this.scroller.scrollLeft = left;
    this.scrolled = this.scroller.scrollLeft;
    this.draw();
  }

  pressed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const own = { ArrowUp: () => this.moveRank(-1), ArrowDown: () => this.moveRank(1), Enter: () => this.enter(),
      Escape: () => this.select(null), "+": () => this.zoomBy(1.5), "-": () => this.zoomBy(1 / 1.5) }[event.key];
    if (own) own();
    else if (this.choices.keys[event.key.toLowerCase()]) this.choices.keys[event.key.toLowerCase()]();
    else if (!handleKey(this.player, event.key)) return;
    event.preventDefault();
  }

  moveRank(by) {
    const rows = this.tracks.flatMap((track, index) => Array.from({ length: track.numRanks }, (_, rank) => [index, rank]));
    const here = rows.findIndex(([index, rank]) => index === this.view.rank?.[0] && rank === this.view.rank?.[1]);
    this.view.rank = rows[Math.min(Math.max(here + by, 0), rows.length - 1)];
    const found = this.here();
    const what = found ? spanLines(this.tracks, found, this.makespan).join(", ") : "idle";
    const [index, rank] = this.view.rank, track = this.tracks[index];
    const other = this.view.lanes ? besideText(track, rank, this.view.time) : "";
    const held = this.screen.layout?.tracks[index].bands ? `; ${memoryText(track, rank, this.view.time)}` : "";
    this.status.textContent = `rank ${rank}: ${what}${other}${held}`;
    this.view.marked = found ? twins(this.tracks, found) : [];
    this.paint();
  }

  // What the chosen rank does now; at the very end, what it did last.
  here() {
    const [index, rank] = this.view.rank ?? [0, 0], track = this.tracks[index];
    const span = spanAt(track, rank, this.view.time);
    const last = this.view.time >= this.makespan ? track.rankStart[rank + 1] - 1 : -1;
    return span >= 0 || last >= track.rankStart[rank] ? [index, Math.max(span, last)] : null;
  }

  enter() {
    this.select(this.here());
  }

  at(event) {
    return hit(this.screen.layout, this.tracks, event.offsetX, event.offsetY);
  }

  // A press on the axis takes hold of the playhead.
  grab(event) {
    if (event.offsetY > this.screen.layout.axis - 4) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.time = timeAt(this.screen.layout, event.offsetX);
  }

  pointed(event) {
    if (this.canvas.hasPointerCapture(event.pointerId)) this.time = timeAt(this.screen.layout, event.offsetX);
    else this.hover(this.at(event), event);
  }

  hover(found, event) {
    this.tip.hidden = !found; // also after a new drawing, which points at nothing yet
    if (!found && !this.view.hover) return;
    const isSame = found && this.view.hover && found.every((value, i) => value === this.view.hover[i]);
    this.view.hover = found;
    this.view.marked = found ? twins(this.tracks, found) : [];
    this.canvas.style.cursor = found ? "pointer" : "default";
    if (!isSame) this.paint();
    if (!found) return;
    const [title, ...lines] = [this.titleOf(found), ...spanLines(this.tracks, found, this.makespan)];
    this.tip.replaceChildren(make("b", {}, title), ...lines.flatMap((line) => [line, make("br")]));
    const x = Math.min(event.offsetX + 14, this.scroller.clientWidth - this.tip.offsetWidth - 4);
    Object.assign(this.tip.style, { left: `${Math.max(x, 0)}px`, top: `${event.offsetY + 18}px` });
  }

  titleOf([index, id]) {
    const key = keyOf(this.tracks[index], id), name = barName(this.tracks[index], id);
    return key.startsWith("rank") || key.startsWith("message") ? name : key;
  }

  fillTable() {
    const isOpen = this.shadowRoot.querySelector("details").open;
    if (isOpen) this.table.replaceChildren(numbersTable("Busy and idle time of each rank", tableOf(this.tracks, this.makespan)));
  }

  // The whole timeline, whatever part of it is in view.
  exported() {
    const whole = wholeLayout(this.tracks, this.screen.layout);
    return [(painter) => drawScene(painter, whole, this.tracks, this.view), [whole.width, whole.height + 8], this.theme];
  }

  toSvg() {
    return svgText(...this.exported(), `Timeline of ${this.name}`, summary(this.tracks));
  }

  toPng() {
    return pngBlob(...this.exported());
  }
}
