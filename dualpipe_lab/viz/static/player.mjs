// Time that plays, steps and jumps; drawings of both kinds use it.

import { isStill } from "./theme.mjs";

const SPEEDS = [1, 2, 4, 0.25, 0.5];
const SECONDS = { least: 3, most: 14, perEvent: 0.16 };

export class Player {
  // `events()`: the times at which something changes, in order, the first 0 and the last the end.
  constructor(events, changed) {
    Object.assign(this, { events, changed, time: 0, playing: false, speed: 1 });
  }

  get end() {
    return this.events().at(-1);
  }

  seek(time, reason = "seek") {
    this.time = Math.min(Math.max(time, 0), this.end);
    this.changed(reason);
  }

  step(direction) {
    this.stop();
    const next = neighbour(this.events(), this.time, direction);
    this.seek(next, "step");
  }

  toggle() {
    if (this.playing) {
      this.stop();
      this.changed("pause");
    } else this.play();
  }

  play() {
    if (this.time >= this.end) this.time = 0;
    this.playing = true;
    this.changed("play");
    if (isStill()) this.timer = setInterval(() => this.advance(neighbour(this.events(), this.time, 1)), 900 / this.speed);
    else this.tick(performance.now());
  }

  // One frame: as much time as the frame took, in proportion.
  tick(before) {
    this.frame = requestAnimationFrame((now) => {
      const events = this.events().length;
      const seconds = Math.min(Math.max(events * SECONDS.perEvent, SECONDS.least), SECONDS.most) / this.speed;
      this.advance(this.time + (Math.max(now - before, 0) / 1000 / seconds) * this.end);
      if (this.playing) this.tick(now);
    });
  }

  advance(time) {
    if (time >= this.end) this.stop();
    this.seek(time, this.playing ? "frame" : "done");
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
    this.play();
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
