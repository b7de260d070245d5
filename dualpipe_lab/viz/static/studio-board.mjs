// Editing on the drawing itself: pointer and keyboard.  The drawing is a <dp-timeline>, whose first track is the draft.
//
// `act(name, detail)` is what the studio does; the board only finds out what was meant.

import { timeAt } from "./layout.mjs";
import { spanOfStep, stepOfSpan } from "./studio-track.mjs";

const SLOP = 5; // px: a press that moves less is a click
const BOARD_KEYS = {
  p: ["pair"], u: ["unpair"], s: ["split"], j: ["join"], i: ["type"], r: ["row"], Delete: ["delete"], Backspace: ["delete"],
  Enter: ["explain"], Escape: ["clear"],
};
const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

export class Board {
  constructor(timeline, session, act) {
    Object.assign(this, { timeline, session, act, isEditing: true });
  }

  // After a new drawing: its parts are new.
  listen() {
    const { scroller, canvas } = this.timeline, on = (event, handle) =>
      scroller.addEventListener(event, (given) => this.isEditing && handle(given), true);
    scroller.setAttribute("role", "application");
    scroller.setAttribute("aria-label", "Schedule editor: arrows move the cursor, space chooses, Alt and arrows move an action");
    on("keydown", (event) => this.pressed(event));
    on("pointerdown", (event) => this.down(event));
    on("pointermove", (event) => this.move(event));
    on("pointerup", (event) => this.up(event));
    on("pointercancel", () => this.cancel());
    on("click", (event) => event.stopPropagation());
    on("dblclick", () => this.act("explain"));
    canvas.style.touchAction = "pan-y"; // a finger that goes sideways moves a cell, one that goes up scrolls the page
  }

  get track() {
    return this.timeline.tracks[0];
  }

  isOnRows(event) {
    const { layout } = this.timeline.screen;
    return event.target === this.timeline.canvas && event.offsetY > layout.axis - 4;
  }

  down(event) {
    if (!this.isOnRows(event) || event.button > 0) return;
    event.stopPropagation();
    const found = this.timeline.at(event), span = found && found[0] === 0 ? found[1] : -1;
    if (span < 0 || span >= this.track.numWork) {
      this.act("clear");
      return;
    }
    const place = stepOfSpan(this.track, span), isMore = event.ctrlKey || event.metaKey;
    this.act("point", { ...place, isMore, isRange: event.shiftKey, isPressed: true });
    this.held = { x: event.offsetX, y: event.offsetY, place, isMore, isDragged: false };
    this.timeline.canvas.setPointerCapture(event.pointerId);
    this.timeline.scroller.focus({ preventScroll: true });
  }

  move(event) {
    if (!this.held) return;
    event.stopPropagation();
    const far = Math.hypot(event.offsetX - this.held.x, event.offsetY - this.held.y);
    if (!this.held.isDragged && far < SLOP) return;
    this.held.isDragged = true;
    this.timeline.hover(null); // its words would hide the rows where the cell may go
    this.held.drop = this.dropAt(event.offsetX, event.offsetY);
    this.timeline.canvas.style.cursor = "grabbing";
    this.act("drag", this.held.drop);
  }

  up(event) {
    const { held } = this;
    if (!held) return;
    event.stopPropagation();
    this.cancel();
    if (held.isDragged && held.drop) this.act("drop", held.drop);
    else if (!held.isDragged) this.act("click", { ...held.place, isMore: held.isMore || event.shiftKey });
  }

  cancel() {
    this.held = null;
    this.timeline.canvas.style.cursor = "default";
    this.act("drag", null);
  }

  // Where a step would go: {rank, position, time}; before the first step whose middle is right of the point.
  dropAt(x, y) {
    const { track } = this, { layout } = this.timeline.screen, { top, pitch } = layout.tracks[0];
    const rank = Math.min(Math.max(Math.floor((y - top) / pitch), 0), track.numRanks - 1);
    const time = timeAt(layout, x), first = track.rankStart[rank], last = track.rankStart[rank + 1];
    let span = first;
    while (span < last && (track.start[span] + track.end[span]) / 2 < time) span++;
    const at = span < last ? track.start[span] : last > first ? track.end[last - 1] : 0;
    return { rank, position: span - first, time: at };
  }

  pressed(event) {
    const { key, altKey, shiftKey } = event, isCommand = event.ctrlKey || event.metaKey;
    const found = this.meaning(key, altKey, shiftKey, isCommand);
    if (!found) return;
    event.preventDefault();
    event.stopImmediatePropagation(); // the drawing listens at the same place
    this.act(...found);
  }

  meaning(key, altKey, shiftKey, isCommand) {
    if (isCommand) {
      const letter = key.toLowerCase();
      if (letter === "z") return [shiftKey ? "redo" : "undo"];
      if (letter === "y") return ["redo"];
      return letter === "a" ? ["all"] : null;
    }
    if (key in ARROWS && altKey) return ["shift", { ranks: ARROWS[key][0], places: ARROWS[key][1] }];
    if (key in ARROWS) return ["point", { ...this.neighbour(...ARROWS[key]), isRange: shiftKey }];
    if (key === "Home" || key === "End") return ["point", { ...this.end(key === "End"), isRange: shiftKey }];
    if (key === " ") return ["click", { ...this.session.cursor, isMore: true }];
    return altKey ? null : BOARD_KEYS[key] ?? BOARD_KEYS[key.toLowerCase()] ?? null;
  }

  end(isLast) {
    const { rank } = this.session.cursor;
    return { rank, position: isLast ? this.session.program.ranks[rank].length : 0 };
  }

  // Along a row one step; to another row, what it does at the same time.
  neighbour(down, right) {
    const { cursor, program } = this.session, { track } = this;
    if (right) return { rank: cursor.rank, position: Math.max(Math.min(cursor.position + right, program.ranks[cursor.rank].length), 0) };
    const rank = Math.min(Math.max(cursor.rank + down, 0), program.ranks.length - 1);
    if (rank === cursor.rank) return cursor;
    if (!program.ranks[rank].length) return { rank, position: 0 };
    const here = spanOfStep(track, cursor.rank, cursor.position), isStep = cursor.position < program.ranks[cursor.rank].length;
    const time = isStep ? track.start[here] : Infinity, first = track.rankStart[rank], last = track.rankStart[rank + 1];
    let span = first;
    while (span + 1 < last && track.end[span] <= time) span++;
    return { rank, position: span - first };
  }
}
