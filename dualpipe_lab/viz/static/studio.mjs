// <dp-studio data-spec='{"titles": ..., "programs": packed, "challenges": [...]}'>: write, drag and break a schedule.
//
// Properties to read: session, result (the verdict), figures (null while it cannot run), ready (a promise).
// Event: dp-studio, after every change, with how long it took in milliseconds, from the edit to the drawing.

import { make } from "./dom.mjs";
import { Drawing } from "./drawing.mjs";
import { unpack } from "./explorer-data.mjs";
import { parseRows } from "./program.mjs";
import { Board } from "./studio-board.mjs";
import { Actions } from "./studio-actions.mjs";
import { costControls, editControls, section, startControls } from "./studio-controls.mjs";
import { challengePanel } from "./studio-challenges.mjs";
import { axisCosts, comparePanel } from "./studio-compare.mjs";
import { hasDraft, keepWhenLeft } from "./studio-draft.mjs";
import { exportPanel } from "./studio-export.mjs";
import { UNIT_TICKS, sessionOfLink } from "./studio-link.mjs";
import { STUDIO_STYLE } from "./studio-style.mjs";
import { costsFor, draftTrack, spanOfStep } from "./studio-track.mjs";
import { figuresPanel, verdictPanel } from "./studio-verdict.mjs";
import { Session } from "./studio-session.mjs";
import { check } from "./schedule-check.mjs";
import { measures } from "./schedule-measures.mjs";
import { makeProgram, stepText } from "./schedule-rows.mjs";
import { STYLE } from "./style.mjs";

const MOST_NAMED = 64; // cells that problems name, marked in the drawing

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
    this.build();
    await this.openLink(location.hash);
    keepWhenLeft(this.session);
    window.addEventListener("hashchange", () => this.openLink(location.hash));
    this.refresh();
    if (this.isConnected) this.observe(this.frame);
  }

  // A program of the registry, or an Error with the reason why there is none of this size.
  registered(name, ranks, microbatches) {
    const rows = this.programs[name][`${ranks} ${microbatches}`];
    if (!Array.isArray(rows)) throw new Error(rows);
    return makeProgram(this.spec.titles[name], unpackSteps(rows), { numDirections: this.spec.directions[name] });
  }

  async openLink(fragment) {
    try {
      const found = await sessionOfLink(fragment);
      if (found) this.actions.load(found, "a link");
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
    this.exporting = exportPanel(act);
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

  // Everything that a reader does comes through here: one thing, then the verdict.
  act(name, detail) {
    const begun = performance.now();
    this.say("");
    try {
      this.actions[name](detail);
    } catch (error) {
      this.say(error.message, true);
    }
    this.took = performance.now() - begun;
  }

  say(text, isBad = false) {
    if (!this.message) return;
    this.message.textContent = text;
    this.message.classList.toggle("bad", isBad);
  }

  // The verdict, the numbers and the picture of the present version.
  refresh() {
    const begun = performance.now(), { session } = this, { program } = session;
    const costs = (session.costs = costsFor(session.costs, program.numStages));
    this.result = check(program, { inFlight: session.limit });
    const canRun = this.result.flat !== null;
    if (this.figures) this.earlier = this.figures; // of the last version that could run
    this.figures = canRun ? measures(program, costs, session.limit) : null;
    this.verdict.update(this.result, this.result.isValid ? this.figures : null);
    this.numbers.update(this.figures, this.earlier);
    this.costs.update(session);
    this.begin.update(session, this.board.isEditing);
    this.exporting.update(session, this.figures);
    this.puzzles.update(session, this.result, this.figures);
    this.comparing.update(session, this.compared);
    this.picture();
    this.took = performance.now() - begun;
    this.dispatchEvent(new CustomEvent("dp-studio", { bubbles: true, detail: this.took }));
  }

  // The page is wider or darker: the timeline sees to itself.
  draw() {}

  picture() {
    const { program, costs, limit } = this.session;
    const { fine, of } = axisCosts(costs, program.numStages, this.compared.map((other) => other.program.numStages));
    const unit = fine > 1 ? `ticks/${fine}` : "ticks", track = draftTrack(program, of(program.numStages), { unit });
    if (!track) return;
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
    const circle = this.result.cycle.map((wait) => [spanOfStep(track, wait.rank, wait.position),
      spanOfStep(track, wait.other, wait.otherPosition)]);
    const isStep = (place) => place.position < (session.program.ranks[place.rank]?.length ?? 0); // a rank may be empty
    const places = circle.length ? [] : this.result.marks.flat().filter(isStep).slice(0, MOST_NAMED);
    const named = places.map((place) => spanOfStep(track, place.rank, place.position));
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

// Rows as the registry's programs are packed: a token without a stage has the stage of the token before.
function unpackSteps(rows) {
  const { parts, firstPart, rankStart } = parseRows(rows), kinds = ["F", "B", "I", "W"];
  const action = (part) => ({ stage: parts[part][0], kind: kinds[parts[part][1]], microbatch: parts[part][2] });
  return rows.map((_, rank) => {
    const steps = [];
    for (let step = rankStart[rank]; step < rankStart[rank + 1]; step++) {
      const part = firstPart[step], isOne = firstPart[step + 1] === part + 1;
      steps.push(isOne ? action(part) : { forward: action(part), backward: action(part + 1) });
    }
    return steps;
  });
}
