// Time that plays, steps and jumps; drawings of both kinds use it.

import { isStill } from "./theme.mjs";

const SPEEDS = [1, 2, 4, 0.25, 0.5];
const PACE = { least: 3, most: 14, perEvent: 0.16 }; // seconds from start to end

export class Player {
  // `events()`: the times at which something changes, in order, the first 0 and the last the end.
  // With `glides`, a step forward is played instead of jumped.  `ends()`: the last event, where it is known without the others.
  constructor(events, changed, { pace = PACE, glides = false, ends = () => this.events().at(-1) } = {}) {
    Object.assign(this, { events, changed, pace, glides, ends, time: 0, playing: false, speed: 1, limit: Infinity });
  }

  get end() {
    return this.ends();
  }

  seek(time, reason = "seek") {
    this.time = Math.min(Math.max(time, 0), this.end);
    this.changed(reason);
  }

  step(direction) {
    this.stop();
    const next = neighbour(this.events(), this.time, direction);
    if (!this.glides || direction < 0 || isStill() || next <= this.time) this.seek(next, "step");
    else this.play(next);
  }

  toggle() {
    if (this.playing) {
      this.stop();
      this.changed("pause");
    } else this.play();
  }

  play(limit = Infinity) {
    if (this.time >= this.end) this.time = 0;
    this.playing = true;
    this.limit = limit;
    this.changed("play");
    if (isStill()) this.timer = setInterval(() => this.advance(neighbour(this.events(), this.time, 1)), 900 / this.speed);
    else this.tick(performance.now());
  }

  // One frame: as much time as the frame took, in proportion.
  tick(before) {
    this.frame = requestAnimationFrame((now) => {
      const { least, most, perEvent } = this.pace;
      const seconds = Math.min(Math.max(this.events().length * perEvent, least), most) / this.speed;
      this.advance(this.time + (Math.max(now - before, 0) / 1000 / seconds) * this.end);
      if (this.playing) this.tick(now);
    });
  }

  advance(time) {
    const until = Math.min(this.end, this.limit);
    if (time >= until) this.stop();
    this.seek(Math.min(time, until), this.playing ? "frame" : "done");
  }

  stop() {
    this.playing = false;
    cancelAnimationFrame(this.frame);
    clearInterval(this.timer);
  }

  nextSpeed() {
    this.speed = SPEEDS[(SPEEDS.indexOf(this.speed) + 1) % SPEEDS.length];
    if (!this.playing) return;
    this.stop();
    this.play(this.limit);
  }
}

// The next event after, or the last one before a time.
export function neighbour(events, time, direction) {
  let low = 0, high = events.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (direction > 0 ? events[middle] <= time : events[middle] < time) low = middle + 1;
    else high = middle;
  }
  return events[Math.min(Math.max(direction > 0 ? low : low - 1, 0), events.length - 1)];
}

export function eventsOf(tracks) {
  const times = new Set([0]);
  for (const track of tracks) {
    for (let span = 0; span < track.end.length; span++) times.add(track.start[span]).add(track.end[span]);
    for (const message of track.messages) times.add(message.arrived);
  }
  const makespan = Math.max(...tracks.map((track) => track.makespan));
  return Float64Array.from(times).sort().filter((time) => time <= makespan);
}
