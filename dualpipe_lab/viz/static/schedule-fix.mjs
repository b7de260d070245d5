// The fix of a deadlock: the action to move, each move tried; as dualpipe_lab/pp/validation/deadlock.py.
//
// A move is {rank, position, step, target}: `step` is the row's step at `position`, or one half of a pair there;
// `target` is its position in the row after the move.

import { stepAt, withRow } from "./schedule-flat.mjs";
import { isPair, stepActions, stepText, withRanks } from "./schedule-rows.mjs";
import { hasEnded, missingPart, runUntimed, smallestCycle } from "./schedule-run.mjs";
import { isOrdered } from "./schedule-work.mjs";

// The row without the moved action; the other half of a pair stays.
function restOf(ranks, move) {
  const row = ranks[move.rank].slice(), step = row[move.position];
  const left = step === move.step ? [] : stepActions(step).filter((action) => action !== move.step);
  row.splice(move.position, 1, ...left);
  return row;
}

function movedRow(ranks, move) {
  const row = restOf(ranks, move);
  row.splice(move.target, 0, move.step);
  return row;
}

// The program after a move.
export function applyMove(program, move) {
  const row = movedRow(program.ranks, move);
  return withRanks(program, program.ranks.map((own, rank) => (rank === move.rank ? row : own)));
}

// A move in words, such as "move 0F1 on rank 0 from position 2 to position 1, before 0B0".
function moveWords(ranks, move) {
  const { rank, position, step, target } = move, original = ranks[rank][position], row = restOf(ranks, move);
  const [before, behind] = [() => `before ${stepText(row[target])}`, () => `behind ${stepText(row[target - 1])}`];
  if (step === original) {
    const start = `move ${stepText(step)} on rank ${rank} from position ${position} to position ${target}`;
    return `${start}, ${target < position ? before() : behind()}`;
  }
  const start = `take ${stepText(step)} out of ${stepText(original)} on rank ${rank} (position ${position})`;
  return `${start} and run it at position ${target}, ${target < row.length ? before() : behind()}`;
}

// Moves of needed actions to the front and of waiting actions to the back; pairs in full or by halves.
function candidates(flat, cycle) {
  const found = [], halfOf = (part) => {
    const step = flat.stepOf[part];
    return stepActions(stepAt(flat, step))[part - flat.firstPart[step]];
  };
  cycle.forEach((wait, at) => {
    const following = cycle[(at + 1) % cycle.length], rank = wait.other, start = flat.rankStart[rank];
    const head = flat.stepOf[following.part] - start, behind = flat.stepOf[wait.missing] - start;
    const needed = flat.ranks[rank][behind], waiting = flat.ranks[rank][head];
    if (behind > head) {
      found.push({ rank, position: behind, step: needed, target: head });
      found.push({ rank, position: head, step: waiting, target: behind });
    }
    if (isPair(needed)) found.push({ rank, position: behind, step: halfOf(wait.missing), target: head });
    if (isPair(waiting)) found.push({ rank, position: head, step: halfOf(following.part), target: behind + 1 });
  });
  return found.sort((a, b) => Math.abs(a.target - a.position) - Math.abs(b.target - b.position));
}

// The move itself, if it goes back, and the move to the latest position that the action may have.
function placements(flat, move) {
  const { rank } = move, target = restOf(flat.ranks, move).length;
  const moved = withRow(flat, rank, movedRow(flat.ranks, { ...move, target }));
  const stuckAt = runUntimed(moved).reached[rank] - moved.rankStart[rank], latest = Math.min(stuckAt, target);
  const found = { ...move, target: latest };
  return move.position < move.target && move.target < latest ? [move, found] : [found];
}

// How many actions run after a move; -1 if it puts the actions of its rank out of order.
function tried(flat, move) {
  const after = withRow(flat, move.rank, movedRow(flat.ranks, move)), { rankStart, firstPart } = after;
  if (!isOrdered(after, firstPart[rankStart[move.rank]], firstPart[rankStart[move.rank + 1]])) return [-1, false];
  const run = runUntimed(after);
  return [numRun(after, run), hasEnded(after, run)];
}

const numRun = ({ firstPart, rankStart }, { reached }) =>
  reached.reduce((sum, step, rank) => sum + firstPart[step] - firstPart[rankStart[rank]], 0);

// The move that ends the deadlock of a run that got stuck, or the first of several; with {words, isEnough, text}.
export function findFix(flat, run, cycle = smallestCycle(flat, run)) {
  let best = null, most = numRun(flat, run);
  for (const move of candidates(flat, cycle)) {
    for (const placed of placements(flat, move)) {
      const [number, isEnough] = tried(flat, placed);
      if (isEnough) return told(flat, placed, true);
      if (number > most) [best, most] = [placed, number];
    }
  }
  return told(flat, best ?? firstReady(flat, run, cycle), false);
}

function told(flat, move, isEnough) {
  const words = moveWords(flat.ranks, move);
  const effect = isEnough ? "then it runs to its end" : "that is the first of several moves";
  return { ...move, words, isEnough, text: `${words}; ${effect}` };
}

// Follow the needed actions back to one that can run at once: it moves to its rank's position.
function firstReady(flat, run, cycle) {
  const moves = cycle.map(({ missing }) => {
    let part = missing;
    for (let earlier = part; earlier >= 0; earlier = missingPart(flat, run, earlier)) part = earlier;
    const step = flat.stepOf[part], rank = flat.rankOf[step], start = flat.rankStart[rank];
    const action = stepActions(stepAt(flat, step))[part - flat.firstPart[step]];
    return { rank, position: step - start, step: action, target: run.reached[rank] - start };
  });
  return moves.reduce((near, move) => (move.position - move.target < near.position - near.target ? move : near));
}
