// What a reader can do in the studio besides editing, by name: begin, compare, explain, give costs, read, save, solve.

import { answerText } from "./studio-challenges.mjs";
import { MOST_COMPARED, axisCosts } from "./studio-compare.mjs";
import { keptDraft } from "./studio-draft.mjs";
import { EditActions } from "./studio-edit-actions.mjs";
import { MOST_TICKS, linkOf, unpackSession } from "./studio-link.mjs";
import { UNIT_TICKS, spanOfStep, stepOfSpan } from "./studio-track.mjs";
import { makeProgram, packProgram, unpackProgram } from "./schedule-rows.mjs";

export class Actions extends EditActions {
  load({ program, costs, limit }) {
    const { session } = this;
    if (costs) session.costs = costs;
    if (limit !== undefined) session.limit = limit;
    session.begin(program);
    this.studio.compared = [];
    this.studio.puzzles.current = null;
    this.studio.refresh();
  }

  start({ name, ranks, microbatches }) {
    const { spec } = this.studio;
    const program = name ? this.studio.registered(name, ranks, microbatches)
      : makeProgram("my schedule", Array.from({ length: ranks }, () => []), { numStages: ranks, numMicrobatches: microbatches, numDirections: 1 });
    this.load({ program });
  }

  // The draft of an earlier visit.
  takeUp() {
    this.load(keptDraft());
    this.studio.begin.draft.hidden = true;
  }

  undo() {
    this.session.undo();
    this.studio.refresh();
  }

  redo() {
    this.session.redo();
    this.studio.refresh();
  }

  mode() {
    const { board, begin } = this.studio;
    board.isEditing = !board.isEditing;
    begin.update(this.session, board.isEditing);
    this.studio.timeline.canvas.style.touchAction = board.isEditing ? "pan-y" : "auto";
    this.studio.point();
  }

  // Why the step under the cursor starts when it does: words, and the path that leads to it in the drawing.
  explain() {
    const { session, studio } = this, { rank, position } = session.cursor;
    if (!session.here) throw new Error("choose an action to explain first");
    if (studio.result?.figures) studio.timeline.select([0, spanOfStep(studio.timeline.tracks[0], rank, position)]);
    this.tellWhy();
  }

  // The same for what was pressed while the drawing explains: it has shown the path already.
  explainPath() {
    const { view, tracks } = this.studio.timeline, { index, spans } = view.path ?? {};
    if (index !== 0) return;
    Object.assign(this.session.cursor, stepOfSpan(tracks[0], spans.at(-1)));
    this.tellWhy();
    this.studio.tellPlace();
  }

  tellWhy() {
    const { program, costs, cursor } = this.session;
    this.later(this.studio.ask({ ask: "why", program: packProgram(program), costs, ...cursor }).then(({ says }) => this.studio.say(says)));
  }

  cost({ key, value }) {
    const { session, studio } = this, costs = { ...session.costs, [key]: value };
    axisCosts(costs, session.program.numStages, studio.compared.map(({ program }) => program.numStages)); // or it says why not
    session.costs = costs;
    this.studio.refresh();
  }

  costs({ key, text }) {
    const { session } = this, values = text.trim() ? text.trim().split(/[\s,]+/).map(Number) : [];
    if (!values.length) return;
    const { numStages } = session.program;
    if (!values.every((value) => Number.isInteger(value) && value >= 0 && value <= MOST_TICKS)) {
      throw new Error(`${key} of each stage: whole numbers from 0 to ${MOST_TICKS}, such as ${Array(numStages).fill(1).join(" ")}`);
    }
    if (values.length !== numStages) throw new Error(`${key} lists ${values.length} stages, the program has ${numStages}; give one per stage`);
    this.cost({ key, value: values });
  }

  unitCosts() {
    this.session.costs = { ...UNIT_TICKS };
    this.studio.refresh();
  }

  limit(value) {
    if (value !== null && (!Number.isInteger(value) || value < 1)) throw new Error(`the room is a whole number of at least 1, got ${value}`);
    this.session.limit = value;
    this.studio.refresh();
    if (value !== null && this.studio.timeline.memory === "none") this.studio.timeline.memory = true; // to see the limit
  }

  compare(name) {
    const { session } = this, { program } = session;
    const other = this.studio.registered(name, program.ranks.length, program.numMicrobatches);
    this.addCompared(other.name, other);
  }

  keep() {
    if (!this.studio.result?.figures) throw new Error("keep a version that runs; mend it first");
    this.addCompared(`${this.session.program.name}, kept`, this.session.program);
  }

  addCompared(name, program) {
    const { compared } = this.studio;
    if (compared.length >= MOST_COMPARED) throw new Error(`one axis holds the draft and ${MOST_COMPARED} others; remove one first`);
    axisCosts(this.session.costs, this.session.program.numStages, [program.numStages]);
    compared.push({ name, program });
    this.studio.refresh();
  }

  uncompare(index) {
    this.studio.compared.splice(index, 1);
    this.studio.refresh();
  }

  readText(text) {
    return this.later(this.studio.ask({ ask: "read", text }).then(({ program, left_out: number }) => {
      this.load({ program: unpackProgram(program) });
      if (number) this.studio.say(`its sends and receives (${number}) are left out: the drawing places the messages itself`);
    }));
  }

  openFile(file) {
    return this.later(file.text().then((text) => {
      if (file.name.endsWith(".json")) this.load(unpackSession(text));
      else return this.readText(text);
    }));
  }

  link() {
    return this.later(linkOf(this.session, location.href).then((address) => {
      const { link } = this.studio.exporting;
      Object.assign(link, { href: address, textContent: `a link of ${address.length} characters`, hidden: false });
      navigator.clipboard?.writeText(address).catch(() => {});
    }));
  }

  copy(text) {
    return this.later(navigator.clipboard.writeText(text).then(() => this.studio.say("copied")));
  }

  // The rows as the notebook's answer cell takes them.
  answer() {
    return answerText(this.session.program);
  }

  copyRows() {
    return this.copy(this.answer());
  }

  later(promise) {
    return (this.studio.waiting = promise.catch((error) => this.studio.say(error.message, true)));
  }

  challenge(index) {
    const challenge = this.studio.spec.challenges[index] ?? null;
    if (challenge) {
      const costs = { ...UNIT_TICKS, ...challenge.costs };
      const program = unpackProgram({ ...challenge, name: challenge.title, rows: challenge.start });
      this.load({ program, costs, limit: challenge.in_flight });
    }
    this.studio.puzzles.current = challenge;
    this.studio.refresh();
  }

  forget() {
    this.studio.puzzles.forget();
    this.studio.refresh();
  }
}
