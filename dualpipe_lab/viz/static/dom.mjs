// Small helpers to make elements, and the icons.

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const ICONS = {
  first: "M4 3v10M13 3L6 8l7 5z",
  back: "M11 3L5 8l6 5",
  play: "M5 3l8 5-8 5z",
  pause: "M5 3v10M11 3v10",
  next: "M5 3l6 5-6 5",
  last: "M12 3v10M3 3l7 5-7 5z",
  out: "M3 8h10",
  in: "M3 8h10M8 3v10",
};

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [key, value] of Object.entries({ viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true" })) {
    svg.setAttribute(key, value);
  }
  const path = document.createElementNS(svg.namespaceURI, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

export const iconButton = (name, label, onclick) =>
  make("button", { type: "button", class: "icon", "aria-label": label, title: label, onclick }, icon(name));

export const textButton = (label, onclick, pressed, title) =>
  make("button", { type: "button", class: "text", "aria-label": title, title, onclick,
    "aria-pressed": pressed == null ? null : String(pressed) }, label);

// What a status line says of the time: nothing while it runs, and then it is as high as before, so that nothing moves.
export function tellTime(status, player, reason, text) {
  if (!player.playing) Object.assign(status, { textContent: text }).style.minHeight = "";
  else if (reason === "play") {
    status.style.minHeight = `${status.getBoundingClientRect().height}px`;
    status.textContent = "";
  }
}

export function download(name, content) {
  const link = make("a", { href: URL.createObjectURL(content), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
