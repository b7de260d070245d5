// What every drawing on a page has in common: it lives with the page and is drawn anew when width or theme change.
// A subclass builds `frame` and calls `observe(box)` with the part whose width counts; `draw` is its own.

import { themeOf, watchTheme } from "./theme.mjs";

const PRINTING = ["beforeprint", "afterprint"];

// A page's own shortcuts on plain keys stay away from our sliders and buttons too; notebooks have a mark (register.mjs).
function keepPlainKeys(event) {
  if (!(event.ctrlKey || event.metaKey || event.altKey || event.shiftKey)) event.stopPropagation();
}

export class Drawing extends HTMLElement {
  constructor() {
    super();
    this.addEventListener("keydown", keepPlainKeys);
  }

  disconnectedCallback() {
    this.player?.stop();
    this.unwatch?.();
    this.resizer?.disconnect();
    for (const event of PRINTING) window.removeEventListener(event, this.redraw);
  }

  observe(box) {
    this.box = box;
    this.unwatch?.();
    this.unwatch = watchTheme(() => {
      this.later();
      setTimeout(() => this.later(), 500); // JupyterLab hides everything while it changes its theme
    });
    this.resizer?.disconnect();
    this.resizer = new ResizeObserver(() => this.later());
    this.resizer.observe(box);
    // Before printing there is no next frame to draw in.
    this.redraw ??= () => {
      this.look();
      this.draw();
    };
    for (const event of PRINTING) window.addEventListener(event, this.redraw);
    this.redraw();
  }

  // Ask the page how wide and how dark it is: it has to lay itself out to answer, so we ask only when that may change.
  look() {
    this.width = this.box.clientWidth;
    this.theme = themeOf(this);
    this.frame.classList.toggle("dark", this.theme.dark);
  }

  // At most one drawing a frame, however quickly a slider moves.
  later() {
    this.pending ??= requestAnimationFrame(() => {
      this.pending = undefined;
      this.redraw();
    });
  }
}

// A drawing of something that takes time: a player moves it.  A subclass sets `player` in its `spec`, and has a `scroller`.
export class PlayableDrawing extends Drawing {
  connectedCallback() {
    if (this.player) this.observe(this.scroller);
    else if (this.dataset.spec) this.spec = JSON.parse(this.dataset.spec);
  }

  get time() {
    return this.player.time;
  }

  set time(time) {
    this.player.stop();
    this.player.seek(time);
  }

  get playing() {
    return this.player.playing;
  }

  set playing(playing) {
    if (playing !== this.player.playing) this.player.toggle();
  }
}
