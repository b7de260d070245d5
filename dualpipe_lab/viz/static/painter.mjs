// Two painters with one set of strokes: a canvas for the screen, and SVG text for the file.

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif';

export class CanvasPainter {
  constructor(context, theme) {
    this.context = context;
    this.theme = theme;
  }

  rect(x, y, width, height, fill) {
    this.context.fillStyle = fill;
    this.context.fillRect(x, y, width, height);
  }

  frame(x, y, width, height, stroke, lineWidth = 1, dash = []) {
    Object.assign(this.context, { strokeStyle: stroke, lineWidth });
    this.context.setLineDash(dash);
    this.context.strokeRect(x, y, width, height);
  }

  hatch(x, y, width, height) {
    this.pattern ??= this.context.createPattern(hatchTile(this.theme), "repeat");
    this.rect(x, y, width, height, this.pattern);
  }

  text(text, x, y, { size = 11, fill = this.theme.text, align = "left", weight = 400 } = {}) {
    const font = `${weight} ${size}px ${FONT}`;
    if (this.font !== font) this.context.font = this.font = font;
    Object.assign(this.context, { fillStyle: fill, textAlign: align });
    this.context.fillText(text, x, y);
  }

  lines(points, stroke, lineWidth = 1) {
    Object.assign(this.context, { strokeStyle: stroke, lineWidth });
    this.context.setLineDash([]);
    this.context.beginPath();
    for (const [x1, y1, x2, y2] of points) {
      this.context.moveTo(x1, y1);
      this.context.lineTo(x2, y2);
    }
    this.context.stroke();
  }

  area(points, fill) {
    this.context.fillStyle = fill;
    this.context.beginPath();
    for (const [x, y] of points) this.context.lineTo(x, y);
    this.context.fill();
  }

  clip(x, y, width, height, paint, opacity = 1) {
    this.context.save();
    this.context.globalAlpha = opacity;
    this.context.beginPath();
    this.context.rect(x, y, width, height);
    this.context.clip();
    paint();
    this.context.restore();
    this.font = undefined;
  }
}

function hatchTile(theme) {
  const tile = new OffscreenCanvas(6, 6), context = tile.getContext("2d");
  Object.assign(context, { strokeStyle: theme.hatch, lineWidth: 1 });
  context.beginPath();
  for (const offset of [-6, 0, 6]) {
    context.moveTo(offset, 6);
    context.lineTo(offset + 6, 0);
  }
  context.stroke();
  return tile;
}

const px = (value) => String(Math.round(value * 10) / 10);
const escapeText = (text) => String(text).replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);

export class SvgPainter {
  constructor(theme) {
    Object.assign(this, { theme, out: [], clips: 0 });
  }

  rect(x, y, width, height, fill) {
    this.out.push(`<rect x="${px(x)}" y="${px(y)}" width="${px(width)}" height="${px(height)}" fill="${fill}"/>`);
  }

  frame(x, y, width, height, stroke, lineWidth = 1, dash = []) {
    const line = `fill="none" stroke="${stroke}" stroke-width="${lineWidth}" stroke-dasharray="${dash.join(" ") || "none"}"`;
    this.out.push(`<rect x="${px(x)}" y="${px(y)}" width="${px(width)}" height="${px(height)}" ${line}/>`);
  }

  hatch(x, y, width, height) {
    this.rect(x, y, width, height, "url(#dp-hatch)");
  }

  text(text, x, y, { size = 11, fill = this.theme.text, align = "left", weight = 400 } = {}) {
    const anchor = { left: "start", center: "middle", right: "end" }[align];
    const style = `font-size="${size}" fill="${fill}" text-anchor="${anchor}" font-weight="${weight}"`;
    this.out.push(`<text x="${px(x)}" y="${px(y)}" ${style}>${escapeText(text)}</text>`);
  }

  lines(points, stroke, lineWidth = 1) {
    const path = points.map(([x1, y1, x2, y2]) => `M${px(x1)} ${px(y1)}L${px(x2)} ${px(y2)}`).join("");
    this.out.push(`<path d="${path}" stroke="${stroke}" stroke-width="${lineWidth}" fill="none"/>`);
  }

  area(points, fill) {
    this.out.push(`<path d="M${points.map(([x, y]) => `${px(x)} ${px(y)}`).join("L")}z" fill="${fill}"/>`);
  }

  clip(x, y, width, height, paint, opacity = 1) {
    const id = `dp-clip-${++this.clips}`;
    this.out.push(`<clipPath id="${id}"><rect x="${px(x)}" y="${px(y)}" width="${px(width)}" height="${px(height)}"/></clipPath>`);
    this.out.push(`<g clip-path="url(#${id})" opacity="${opacity}">`);
    paint();
    this.out.push("</g>");
  }

  document(width, height, title, description) {
    const hatch = `<pattern id="dp-hatch" width="6" height="6" patternUnits="userSpaceOnUse"><path d="M-6 6l6-6M0 6l6-6M6 6l6-6" stroke="${this.theme.hatch}"/></pattern>`;
    const size = `viewBox="0 0 ${px(width)} ${px(height)}" width="${px(width)}" height="${px(height)}"`;
    return [
      `<svg xmlns="http://www.w3.org/2000/svg" ${size} role="img" font-family="${escapeText(FONT)}">`,
      `<title>${escapeText(title)}</title><desc>${escapeText(description)}</desc><defs>${hatch}</defs>`,
      `<rect width="100%" height="100%" fill="${this.theme.page}"/>`, ...this.out, "</svg>",
    ].join("");
  }
}
