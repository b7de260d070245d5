// <dp-studio data-spec='{"titles": ..., "programs": packed, "challenges": [...]}'>: write, drag and break a schedule.
//
// Properties to read: session, result (Python's verdict on the present version, null until it is there), ready and settled
// (promises: of the first drawing, of the last verdict).
// Event: dp-studio, after every verdict, with how long it took in milliseconds, from the edit on.

import { make } from "./dom.mjs";
import { Drawing } from "./drawing.mjs";
import { unpack } from "./explorer-data.mjs";
import { Board } from "./studio-board.mjs";
import { Actions } from "./studio-actions.mjs";
import { costControls, editControls, section, startControls } from "./studio-controls.mjs";
import { challengePanel } from "./studio-challenges.mjs";
import { axisCosts, comparePanel } from "./studio-compare.mjs";
import { hasDraft, keepWhenLeft } from "./studio-draft.mjs";
import { exportPanel } from "./studio-export.mjs";
import { askPython } from "./studio-kernel.mjs";
import { sessionOfLink } from "./studio-link.mjs";
import { STUDIO_STYLE } from "./studio-style.mjs";
import { UNIT_TICKS, costsFor, draftTrack, spanOfStep } from "./studio-track.mjs";
import { figuresPanel, verdictPanel } from "./studio-verdict.mjs";
import { Session } from "./studio-session.mjs";
import { makeProgram, packProgram, stepText, stepsOf } from "./schedule-rows.mjs";
import { STYLE } from "./style.mjs";


export class StudioElement extends Drawing {
  connectedCallback() {
    this.ready ??= this.start(JSON.parse(this.dataset.spec));
    if (this.frame) this.observe(this.frame);
  }

  async start(spec) {
    this.spec = spec;
    this.programs = await unpack(spec.programs);
    const [name, ranks, microbatches] = spec.start;
    this.session = new Session(this.registered(name, ranks, microbatches), { ...UNIT_TICKS });
    this.actions = new Actions(this);
    this.compared = [];
    this.canRun = new WeakMap(); // program -> what its verdict said, whatever the costs
    this.build();
    await this.openLink(location.hash);
    keepWhenLeft(this.session);
    window.addEventListener("hashchange", () => this.openLink(location.hash));
    if (!this.timeline.tracks) this.refresh(spec.verdict);
    if (this.isConnected) this.observe(this.frame);
  }

  // A program of the registry, or an Error with the reason why there is none of this size.
  registered(name, ranks, microbatches) {
    const rows = this.programs[name][`${ranks} ${microbatches}`];
    if (!Array.isArray(rows)) throw new Error(rows);
    return makeProgram(this.spec.titles[name], stepsOf(rows), { numDirections: this.spec.directions[name] });
  }

  async openLink(fragment) {
    try {
      const found = await sessionOfLink(fragment);
      if (found) this.actions.load(found);
    } catch (error) {
      this.say(error.message, true);
    }
  }

  build() {
    const root = this.shadowRoot ?? this.attachShadow({ mode: "open" }), act = (name, detail) => this.act(name, detail);
    this.timeline = document.createElement("dp-timeline");
    this.board = new Board(this.timeline, this.session, act);
    this.begin = startControls(this.spec, hasDraft(), act);
    this.edit = editControls(act);
    this.verdict = verdictPanel(act);
    this.numbers = figuresPanel();
    this.costs = costControls(act);
    this.comparing = comparePanel(this.spec, act);
    this.exporting = exportPanel(act, (question) => this.ask(question));
    this.puzzles = challengePanel(this.spec.challenges, act);
    this.message = make("p", { class: "message", role: "status" });
    this.frame = make("section", { class: "dp studio", "aria-label": "Schedule studio" },
      this.begin.bar, this.puzzles.task, this.timeline, this.verdict.panel, this.message, this.edit.panel,
      section("Numbers", true, this.numbers.panel), section("Size, costs and memory", false, this.costs.panel),
      section("Compare", false, this.comparing.panel), this.texts = section("Text, link, files", false, this.exporting.panel),
      ...(this.spec.challenges.length ? [section("Challenges", true, this.puzzles.panel)] : []));
    this.texts.addEventListener("toggle", () => this.exporting.show());
    root.replaceChildren(make("style", {}, STYLE + STUDIO_STYLE), this.frame);
  }

  // Everything that a reader does comes through here.  The first of it starts Python, before there is anything to judge.
  act(name, detail) {
    const isFirst = !this.isAwake;
    this.isAwake = true;
    this.say("");
    try {
      this.actions[name](detail);
    } catch (error) {
      this.say(error.message, true);
    }
    if (isFirst) this.settled = this.judge();
  }

  say(text, isBad = false) {
    if (!this.message) return;
    this.message.textContent = text;
    this.message.classList.toggle("bad", isBad);
  }

  // While Python starts, its words stand where the verdict will, or where all messages do.
  ask(question) {
    return askPython(this.spec.key, "studio", question, (words) => (this.result ? this.say(words) : this.wait(words)));
  }

  // Another version: its picture at once, its verdict as soon as Python has it.
  refresh(result = null) {
    const { session } = this;
    this.changed = performance.now();
    session.costs = costsFor(session.costs, session.program.numStages);
    this.costs.update(session);
    this.begin.update(session, this.board.isEditing);
    this.exporting.update(session);
    this.comparing.update(session, this.compared);
    this.tell(result);
    this.picture();
    if (result) return;
    this.wait(this.isAwake ? "" : "The verdict comes with your first edit or click.");
    if (this.isAwake) this.settled = this.judge();
  }

  // One question at a time, and always about the present version: of those in between nobody needs to know.
  judge() {
    this.isOld = true;
    return (this.judging ??= this.judgeAll().finally(() => (this.judging = null)));
  }

  async judgeAll() {
    for (let found = null; this.isOld;) {
      this.isOld = false;
      const { program, costs, limit } = this.session, challenge = this.puzzles.current;
      try {
        found = await this.ask({ ask: "verdict", program: packProgram(program), costs, limit, challenge });
      } catch (error) {
        if (!this.isOld && !this.result) this.wait(error.message);
        continue;
      }
      if (!this.isOld) this.judged(found);
    }
    this.took = performance.now() - this.changed;
    this.dispatchEvent(new CustomEvent("dp-studio", { bubbles: true, detail: this.took }));
  }

  // The verdict, null while there is none, and what follows from it.
  tell(result) {
    const before = this.result?.figures;
    if (before && before !== result?.figures) this.earlier = before; // of the last version that could run
    this.result = result;
    this.puzzles.update(result);
    if (!result) return;
    this.canRun.set(this.session.program, result.figures !== null);
    this.verdict.update(result);
    this.numbers.update(result.figures, this.earlier);
  }

  wait(words) {
    this.verdict.wait(words);
    this.numbers.wait(words);
  }

  // The verdict on what is drawn: nothing moves.
  judged(result) {
    const { timeline } = this;
    this.tell(result);
    if (!timeline.tracks) return;
    timeline.tracks[0].runs = this.canRun.get(this.session.program);
    timeline.view.marks = this.marks();
    timeline.draw();
    timeline.fillTable();
  }

  // The page is wider or darker: the timeline sees to itself.
  draw() {}

  picture() {
    const { program, costs, limit } = this.session;
    const { fine, of } = axisCosts(costs, program.numStages, this.compared.map((other) => other.program.numStages));
    const unit = fine > 1 ? `ticks/${fine}` : "ticks", track = draftTrack(program, of(program.numStages), { unit });
    if (!track) return;
    track.runs = this.canRun.get(program) ?? null;
    this.fine = fine;
    const others = this.compared.map((other) => draftTrack(other.program, of(other.program.numStages), { name: other.name, unit }));
    const tracks = [track, ...others], shares = [program, ...this.compared.map((other) => other.program)];
    tracks.forEach((one, index) => (one.room = limit && (limit * shares[index].numStages) / program.numStages));
    if (!this.timeline.tracks) this.first(tracks);
    else this.timeline.show(tracks, this.marks(track));
    this.tellPlace();
  }

  // The element makes its parts once; from then on it shows other tracks in them.
  first(tracks) {
    const [track] = tracks;
    this.timeline.spec = { tracks: [{ name: track.name, source: "simulated", unit: "ticks", rows: [], costs: track.costs }] };
    this.timeline.sliders?.panel.remove();
    this.board.listen();
    this.timeline.addEventListener("dp-selection", ({ detail }) => detail && !this.board.isEditing && this.act("explainPath"));
    this.timeline.show(tracks, this.marks(track));
  }

  // What the drawing marks: what is chosen, the cursor, of a deadlock its circle, else what the problems name.
  marks(track = this.timeline.tracks[0], drop = null) {
    const { session } = this;
    const chosen = [];
    if (session.chosen.size) session.program.ranks.forEach((steps, rank) => steps.forEach((step, position) => {
      if (session.chosen.has(step)) chosen.push(spanOfStep(track, rank, position));
    }));
    const { rank, position } = session.cursor;
    const cursor = session.here && this.board.isEditing ? spanOfStep(track, rank, position) : -1;
    const spanAt = ([row, at]) => spanOfStep(track, row, at), circle = (this.result?.circle ?? []).map((wait) => wait.map(spanAt));
    const named = circle.length ? [] : (this.result?.marks ?? []).map(spanAt);
    return { chosen, named, cursor, drop, circle };
  }

  // The cursor or what is chosen has changed, and nothing else.
  point() {
    this.timeline.mark(this.marks());
    this.tellPlace();
  }

  // The words and fields for the place of the cursor.
  tellPlace() {
    const { edit, session } = this, { rank } = session.cursor;
    edit.here.textContent = this.actions.hereText();
    edit.rank.textContent = `rank ${rank}`;
    if (edit.row !== this.shadowRoot.activeElement) edit.row.value = (session.program.ranks[rank] ?? []).map(stepText).join(" ");
    edit.stage.fill([["", "rank"], ...session.program.ranks.map((_, index) => [index, index])]);
    const missing = this.actions.missing();
    edit.missing.replaceChildren(...missing.length ? [make("span", {}, "missing:")] : [],
      ...missing.map((text) => make("button", { type: "button", class: "text token", onclick: () => this.act("insert", text) }, text)));
  }
}
