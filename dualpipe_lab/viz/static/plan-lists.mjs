// Schedules that are found tick by tick: those on a V of stages, by a rule for each rank, and Easy-DualPipe.
//
// F, I and W take one tick each and messages none: dualpipe_lab/pp/schedules/list_scheduling.py, building_block.py, zbv.py,
// v_half.py, v_min.py, easy_dualpipe.py.  Rank r of a V has the stages r and 2 P - 1 - r.

const INTERVAL = 6; // ticks of F, I and W on two stages
const filled = (length, value) => Array.from({ length }, (_, place) => (typeof value === "function" ? value(place) : value));

// Per kind and stage, how many microbatches have started, and how many could.
class StageCounts {
  constructor(pp, count) {
    this.numStages = 2 * pp;
    this.started = { F: filled(2 * pp, 0), I: filled(2 * pp, 0), W: filled(2 * pp, 0) };
    this.could = { F: filled(2 * pp, 0), I: filled(2 * pp, 0), W: filled(2 * pp, 0) };
    this.could.F[0] = count;
  }

  can(kind, stage) {
    return this.started[kind][stage] < this.could[kind][stage];
  }

  held(stage) {
    return this.started.F[stage] - this.started.W[stage];
  }

  stages(rank) {
    return [this.numStages - 1 - rank, rank];
  }

  weightGradient(rank) {
    const stage = this.stages(rank).find((one) => this.can("W", one));
    return stage === undefined ? null : ["W", stage];
  }

  start([kind, stage]) {
    const microbatch = this.started[kind][stage]++, isLast = stage === this.numStages - 1;
    if (kind === "F") this.could[isLast ? "I" : "F"][isLast ? stage : stage + 1]++;
    if (kind === "I") {
      this.could.W[stage]++;
      if (stage) this.could.I[stage - 1]++;
    }
    return [stage, kind, microbatch];
  }
}

// At every tick `rule` picks an action for each rank, or null to wait; `interval`: ticks between two entries.
function tickByTick(pp, count, rule, interval = 0) {
  const now = new StageCounts(pp, count), rows = filled(pp, () => []);
  for (let left = 6 * pp * count, tick = 0; left; tick++) {
    if (interval) now.could.F[0] = Math.min(count, 1 + Math.floor(tick / interval));
    const picks = rows.map((_, rank) => rule(now, rank)); // all rules see the same counts
    picks.forEach((pick, rank) => {
      if (!pick) return;
      rows[rank].push(now.start(pick));
      left--;
    });
  }
  return rows;
}

// ---- building blocks

// By tick, then by kind, then by stage.
function isBefore([tick, kind, stage], [otherTick, otherKind, otherStage]) {
  if (tick !== otherTick) return tick < otherTick;
  return kind === otherKind ? stage < otherStage : kind < otherKind;
}

// The earliest F or I of the block that can start, W if there is none; a stage holds at most its limit.
const pickOf = ({ forwards, inputs }, limits) => (now, rank) => {
  let best = null;
  for (const stage of now.stages(rank)) {
    const wishes = [["F", forwards, now.held(stage) < limits[stage]], ["I", inputs, true]];
    for (const [kind, ticks, isFree] of wishes) {
      if (!isFree || !now.can(kind, stage)) continue;
      const wish = [ticks[stage] + INTERVAL * now.started[kind][stage], kind, stage];
      if (!best || isBefore(wish, best)) best = wish;
    }
  }
  return best ? best.slice(1) : now.weightGradient(rank);
};

export function halfRows(pp, count) {
  const isOddOne = pp % 2, forwards = filled(2 * pp, (stage) => (stage < pp ? 2 * stage : pp - 1 + stage));
  const turned = forwards.at(-1) + (isOddOne ? 1 : 4), up = 2 * (pp - 1) + turned; // when I reaches the middle of the V
  const inputs = filled(2 * pp, (stage) => (stage < pp ? up + 1 + pp - stage : turned + 2 * (2 * pp - 1 - stage)));
  const limits = filled(2 * pp, (stage) => Math.floor((2 * pp - stage + 2 - isOddOne) / 2));
  return tickByTick(pp, count, pickOf({ forwards, inputs }, limits));
}

export function minRows(pp, count) {
  const turned = 2 * pp + (pp % 3 ? 0 : 2), forwards = filled(2 * pp, (stage) => stage);
  const inputs = filled(2 * pp, (stage) => turned + 2 * pp - 1 - stage);
  return tickByTick(pp, count, pickOf({ forwards, inputs }, filled(2 * pp, count)), INTERVAL);
}

// ---- ZBV

function zbvPhases(rank, pp, count) {
  const down = rank, up = 2 * pp - 1 - rank, below = pp - 1 - rank, picks = [];
  const add = (times, ...words) => {
    for (let time = 0; time < times; time++) for (const word of words) picks.push([word[0], word[1] === "d" ? down : up]);
  };
  add(2 * below + 1, "Fd");
  add(rank, "Fu", "Fd");
  add(below + 1, "Fu", "Iu", "Wu");
  add(count - (pp + below), "Fd", "Id", "Wd", "Fu", "Iu", "Wu");
  add(below, "Id", "Wd", "Fu", "Iu", "Wu");
  add(rank, "Id", "Iu");
  add(below + 1, "Id", "Wd");
  add(rank, "Wu");
  add(rank, "Wd");
  return picks;
}

// Microbatches in the order of each kind and stage, without those beyond the last.
function numberedRow(picks, count) {
  const seen = new Map(), row = [];
  for (const [kind, stage] of picks) {
    const key = `${kind}${stage}`, microbatch = seen.get(key) ?? 0;
    seen.set(key, microbatch + 1);
    if (microbatch < count) row.push([stage, kind, microbatch]);
  }
  return row;
}

export function zbvRows(pp, count) {
  const enough = Math.max(2 * pp - 1, count);
  const rows = filled(pp, (rank) => numberedRow(zbvPhases(rank, pp, enough), count));
  if (count === enough) return rows;
  const orders = rows.map((row) => row.filter(([, kind]) => kind !== "W").map(([stage, kind]) => [kind, stage]));
  return tickByTick(pp, count, (now, rank) => { // the same order of F and I; W where a rank would wait
    const [late, early] = now.stages(rank), { F, I } = now.started;
    const next = orders[rank][F[late] + F[early] + I[late] + I[early]];
    const isFree = next && (next[0] === "I" || now.held(late) + now.held(early) < now.numStages);
    return isFree && now.can(...next) ? next : now.weightGradient(rank);
  });
}

// ---- Easy-DualPipe

// Of the ready actions, each rank runs a backward before a forward, then the lower microbatch of its direction, then the
// later stage; F and B take one tick.  Of one kind and direction they become ready in the order of their microbatches.
export function easyRows(pp, count) {
  const half = count / 2, ready = filled(pp, () => ({ B: [[], []], F: [[], []] })), rows = filled(pp, () => []);
  const add = (stage, kind, m) => {
    const direction = Number(m >= half);
    ready[direction ? pp - 1 - stage : stage][kind][direction].push([stage, kind, m]);
  };
  const take = (queues) => {
    const found = ["B", "F"].map((kind) => queues[kind].filter((queue) => queue.length)).find((several) => several.length);
    return found?.sort(([a], [b]) => (a[2] % half) - (b[2] % half) || b[0] - a[0])[0].shift();
  };
  for (let m = 0; m < count; m++) add(0, "F", m);
  for (let left = 2 * pp * count; left;) {
    const taken = ready.map(take);
    taken.forEach((action, rank) => {
      if (!action) return;
      const [stage, kind, m] = action;
      rows[rank].push(action);
      left--;
      if (kind === "F") stage < pp - 1 ? add(stage + 1, "F", m) : add(stage, "B", m);
      else if (stage > 0) add(stage - 1, "B", m);
    });
  }
  return rows;
}
