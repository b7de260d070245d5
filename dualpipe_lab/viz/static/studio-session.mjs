// What the studio knows: the program as it is, the versions before and after it, what is chosen, and the costs.
//
// A program is immutable; a change makes another one, which shares its unchanged rows and steps.  So a step is known by
// identity: what is chosen stays chosen wherever it moves.

const MOST_VERSIONS = 500;

export class Session {
  constructor(program, costs) {
    Object.assign(this, { costs, limit: null, versions: [], at: -1 });
    this.begin(program);
  }

  get program() {
    return this.versions[this.at].program;
  }

  get canUndo() {
    return this.at > 0;
  }

  get canRedo() {
    return this.at + 1 < this.versions.length;
  }

  // Another program to start from; the way back leads through it, too.
  begin(program) {
    this.chosen = new Set();
    this.cursor = { rank: 0, position: 0 };
    this.put(program, false);
  }

  // Whether the reader made the present version, and did not just begin with it.
  get isEdited() {
    return this.versions[this.at].isEdited;
  }

  // A version after the present one; those undone are dropped.  What is chosen no longer exists where a change removed it.
  put(program, isEdited = true) {
    this.versions.length = this.at + 1;
    this.versions.push({ program, isEdited });
    if (this.versions.length > MOST_VERSIONS) this.versions.shift();
    this.at = this.versions.length - 1;
    this.settle();
  }

  undo() {
    if (this.canUndo) this.at -= 1;
    this.settle();
  }

  redo() {
    if (this.canRedo) this.at += 1;
    this.settle();
  }

  // The cursor stays on the rows.  Behind the last step of a rank it may stand, too: there something can be put.
  settle() {
    const { ranks } = this.program, { cursor } = this;
    cursor.rank = Math.min(Math.max(cursor.rank, 0), Math.max(ranks.length - 1, 0));
    cursor.position = Math.min(Math.max(cursor.position, 0), ranks[cursor.rank]?.length ?? 0);
    if (!this.chosen.size) return;
    const left = new Set();
    for (const steps of ranks) for (const step of steps) if (this.chosen.has(step)) left.add(step);
    this.chosen = left;
  }

  // The step under the cursor, or undefined behind the last one.
  get here() {
    return this.program.ranks[this.cursor.rank]?.[this.cursor.position];
  }

  // `isMore`: in addition to what is chosen, or no longer if it is.  Such a choice stays while the cursor moves.
  choose(steps, isMore = false) {
    this.isKept = isMore && steps.length > 0;
    if (!isMore) this.chosen = new Set(steps);
    else for (const step of steps) this.chosen[this.chosen.has(step) ? "delete" : "add"](step);
  }

  // [rank, position] of everything chosen, in order; of the step under the cursor if nothing is.
  places() {
    const found = [];
    this.program.ranks.forEach((steps, rank) => steps.forEach((step, position) => {
      if (this.chosen.has(step)) found.push([rank, position]);
    }));
    const { rank, position } = this.cursor;
    return found.length || !this.here ? found : [[rank, position]];
  }
}
