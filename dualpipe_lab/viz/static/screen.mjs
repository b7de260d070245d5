// The screen of a timeline: a canvas with the rows stored apart, so that a frame costs two copies whatever its size.

import { drawRows } from "./cells.mjs";
import { fitCanvas } from "./chrome.mjs";
import { layoutOf } from "./layout.mjs";
import { CanvasPainter } from "./painter.mjs";
import { drawScene } from "./scene.mjs";

export class Screen {
  constructor(canvas) {
    this.canvas = canvas;
    this.stored = document.createElement("canvas");
    this.cells = 0;
  }

  // Lay out and paint the rows anew: after a change of costs, size, zoom, scrolling or theme.
  store(tracks, theme, width, zoom, scroll, view) {
    this.layout = layoutOf(tracks, width, zoom, scroll, view);
    this.theme = theme;
    const painter = new CanvasPainter(fitCanvas(this.stored, width, this.layout.height), theme);
    const { left, room, height } = this.layout;
    painter.clip(left, 0, room, height, () => (this.cells = drawRows(painter, this.layout, tracks)));
    this.canvas.style.height = `${height}px`;
  }

  paint(tracks, view) {
    const { width, height } = this.layout;
    const context = fitCanvas(this.canvas, width, height);
    const rows = () => context.drawImage(this.stored, 0, 0, width, height);
    drawScene(new CanvasPainter(context, this.theme), this.layout, tracks, view, rows);
  }
}
