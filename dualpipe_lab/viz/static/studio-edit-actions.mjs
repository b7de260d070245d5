// What a reader does to the rows: pointing and editing, by name; each takes what it needs as `detail`.

import { number } from "./scale.mjs";
import { spanOfStep } from "./studio-track.mjs";
import { insertStep, joinBackward, moveStage, moveSteps, pairSteps, removeSteps, replaceRow, shiftSteps, splitBackward,
  unpairStep } from "./schedule-edits.mjs";
import { MOST_COUNT, makeProgram, stepActions, stepText, stepsOf } from "./schedule-rows.mjs";

const MOST_MISSING = 24, MOST_CELLS = 4096;

export class EditActions {
  constructor(studio) {
    this.studio = studio;
  }

  get session() {
    return this.studio.session;
  }

  // A change of the program: a version of its own.
  change(program) {
    this.session.put(program);
    this.studio.refresh();
  }

  // Pointing: the cursor goes there; `isRange` chooses all from where it was.
  point({ rank, position, isRange, isMore, isPressed }) {
    const { session } = this, before = { ...session.cursor };
    Object.assign(session.cursor, { rank, position });
    if (isRange && before.rank === rank) {
      const [low, high] = [Math.min(before.position, position), Math.max(before.position, position)];
      session.choose([...session.chosen, ...session.program.ranks[rank].slice(low, high + 1)]);
      session.isKept = true;
    } else if (isPressed && !isMore && session.here && !session.chosen.has(session.here)) session.choose([session.here]);
    else if (!isPressed && !session.isKept) session.choose([]);
    this.studio.point();
  }

  click({ rank, position, isMore }) {
    const { session } = this;
    Object.assign(session.cursor, { rank, position });
    if (session.here) session.choose([session.here], isMore);
    this.studio.point();
  }

  clear() {
    this.session.choose([]);
    this.studio.point();
  }

  all() {
    this.session.choose(this.session.program.ranks.flat());
    this.studio.point();
  }

  drag(drop) {
    const { timeline } = this.studio;
    timeline.mark(this.studio.marks(timeline.tracks[0], drop));
  }

  drop({ rank, position }) {
    const { session } = this, places = session.places();
    if (!places.length) return;
    const moved = moveSteps(session.program, places, rank, position);
    this.follow(moved, places);
    this.change(moved);
  }

  shift({ ranks, places: by }) {
    const { session } = this, places = session.places();
    if (!places.length) return;
    const moved = shiftSteps(session.program, places, ranks, by);
    if (moved === session.program) return;
    this.follow(moved, places);
    this.change(moved);
  }

  // The cursor goes along with the first step that was moved; a single one is chosen, so that it can be moved again.
  follow(moved, places) {
    const { session } = this, [rank, position] = places[0], step = session.program.ranks[rank][position];
    if (!session.chosen.size) session.choose([step]);
    moved.ranks.forEach((steps, index) => {
      const at = steps.indexOf(step);
      if (at >= 0) Object.assign(session.cursor, { rank: index, position: at });
    });
  }

  pair() {
    this.change(pairSteps(this.session.program, this.session.places()));
  }

  unpair() {
    this.each(unpairStep, "take apart");
  }

  split() {
    this.each(splitBackward, "split");
  }

  join() {
    this.change(joinBackward(this.session.program, this.session.places()));
  }

  // An edit of one step for each one that is chosen, from the last to the first, so that positions stay right.
  each(edit, word) {
    const { session } = this, places = session.places();
    if (!places.length) throw new Error(`choose what to ${word} first`);
    const edited = [...places].reverse().reduce((program, [rank, position]) => edit(program, rank, position), session.program);
    this.change(edited);
  }

  delete() {
    const { session } = this, places = session.places();
    if (places.length) this.change(removeSteps(session.program, places));
  }

  stage(rank) {
    const { session } = this, [place] = session.places();
    if (!place) throw new Error("choose an action of the stage first");
    const [{ stage }] = stepActions(session.program.ranks[place[0]][place[1]]);
    this.change(moveStage(session.program, stage, rank));
  }

  // How many stages and microbatches the schedule should have; what is missing then, the verdict says.
  size(counts) {
    const { program } = this.session, [count] = Object.values(counts);
    if (!Number.isInteger(count) || count < 1 || count > MOST_COUNT) {
      throw new Error(`a schedule has 1 to ${MOST_COUNT} stages and microbatches, got ${count ?? "nothing"}`);
    }
    this.change(makeProgram(program.name, program.ranks, { ...program, ...counts }));
  }

  // On how many ranks a stage may be: 1, 2 (as in DualPipe, with two copies of its weights), or null for any number.
  copies(numDirections) {
    const { program } = this.session;
    this.change(makeProgram(program.name, program.ranks, { ...program, numDirections }));
  }

  insert(text) {
    const { session, studio } = this, { rank, position } = session.cursor, [[step, ...more]] = stepsOf([text]);
    if (!step || more.length) throw new Error("put in one action, such as 1F2, or a pair");
    const row = session.program.ranks[rank], at = Math.min(position + (session.here ? 1 : 0), row.length);
    const program = insertStep(session.program, rank, at, step);
    session.cursor.position = at;
    studio.edit.token.value = "";
    this.change(program);
  }

  retype(text) {
    const { session } = this, { rank } = session.cursor;
    const program = replaceRow(session.program, rank, text);
    if (program !== session.program) this.change(program);
  }

  type() {
    this.studio.edit.token.focus();
  }

  row() {
    this.studio.edit.row.focus();
  }

  mend() {
    const fix = this.studio.result?.fix;
    if (fix) this.change(replaceRow(this.session.program, fix.rank, fix.row));
  }

  hereText() {
    const { session, studio } = this, { rank, position } = session.cursor, row = session.program.ranks[rank];
    const chosen = session.chosen.size > 1 ? `; ${session.chosen.size} are chosen` : "";
    if (!row) return "There is no rank; read a text or start from a schedule.";
    if (!session.here) return `rank ${rank}, behind its last action${chosen}`;
    const [track] = studio.timeline.tracks, span = spanOfStep(track, rank, position);
    const when = track.stop !== null && track.start[span] >= track.stop ? "never runs" : `from ${number(track.start[span], studio.fine)} to ${number(track.end[span], studio.fine)}`;
    return `rank ${rank}, position ${position} of ${row.length}: ${stepText(session.here)}, ${when}${chosen}`;
  }

  // The actions of the cursor's rank that the program still lacks, as far as its stages are known; else of all ranks.
  missing() {
    const { program } = this.session, { numStages, numMicrobatches } = program;
    if (numStages * numMicrobatches > MOST_CELLS) return [];
    const has = new Set(), home = new Map();
    program.ranks.forEach((steps, rank) => steps.forEach((step) => stepActions(step).forEach((action) => {
      has.add(stepText(action));
      home.set(action.stage, rank);
    })));
    const found = [];
    for (let microbatch = 0; microbatch < numMicrobatches; microbatch++) {
      for (let stage = 0; stage < numStages; stage++) {
        if ((home.get(stage) ?? (stage % program.ranks.length)) !== this.session.cursor.rank && program.numDirections !== 2) continue;
        const lacks = (kind) => !has.has(`${stage}${kind}${microbatch}`);
        if (lacks("F")) found.push([0, `${stage}F${microbatch}`]);
        if (lacks("B") && lacks("I") && lacks("W")) found.push([1, `${stage}B${microbatch}`]);
        else if (lacks("B")) for (const kind of ["I", "W"]) if (lacks(kind)) found.push([2, `${stage}${kind}${microbatch}`]);
      }
    }
    return found.sort((a, b) => a[0] - b[0]).slice(0, MOST_MISSING).map(([, text]) => text);
  }
}
