// Colours, in light and dark, and which of the two the page uses.
//
// The cells have the colours of Okabe and Ito (2008), which stay apart for colour-blind readers; every cell also carries
// its letter.  The same colours as dualpipe_lab/timeline/colours.py.

export const CELLS = {
  F: ["#0072b2", "#fff", "forward"],
  B: ["#e69f00", "#000", "backward"],
  I: ["#56b4e9", "#000", "backward, input"],
  W: ["#009e73", "#000", "backward, weights"],
  compute: ["#0072b2", "#fff", "compute"],
  collective: ["#cc79a7", "#000", "collective"],
  other: ["#f0e442", "#000", "other"],
};

// Numbers instead of kinds: stages, microbatches, directions, ranks.
export const NUMBERED = [["#0072b2", "#fff"], ["#e69f00", "#000"], ["#009e73", "#000"], ["#cc79a7", "#000"],
  ["#56b4e9", "#000"], ["#f0e442", "#000"], ["#d55e00", "#000"], ["#595959", "#fff"]];

const LIGHT = {
  dark: false, text: "#1d2733", muted: "#586573", line: "#c9d1da", grid: "#e3e8ed", track: "#f4f6f8", hatch: "#d9dfe6",
  live: "#8492a2", accent: "#b3245c", border: "#16202b", page: "#ffffff", forward: "#0072b2", backward: "#a86b00",
};
const DARK = {
  dark: true, text: "#e8edf2", muted: "#a0acb9", line: "#4a5663", grid: "#2c353f", track: "#1e252d", hatch: "#36414d",
  live: "#76879a", accent: "#ff7aa8", border: "#f2f6fa", page: "#14181e", forward: "#56b4e9", backward: "#e69f00",
};

export const themeOf = (element) => (isDark(element) ? DARK : LIGHT);

// What the page says about itself; otherwise the colour of its text, which follows prefers-color-scheme where the page does.
function isDark(element) {
  const marks = [document.documentElement, document.body];
  for (const { dataset } of marks) {
    if (dataset.theme === "dark" || dataset.theme === "light") return dataset.theme === "dark";
    if (dataset.jpThemeLight) return dataset.jpThemeLight === "false";
  }
  const [red, green, blue] = getComputedStyle(element).color.match(/[\d.]+/g).map(Number);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 140;
}

// Call back when the page changes its theme; returns how to stop.
export function watchTheme(callback) {
  const observer = new MutationObserver(callback);
  const options = { attributes: true, attributeFilter: ["data-theme", "data-jp-theme-light", "class", "theme"] };
  for (const mark of [document.documentElement, document.body]) observer.observe(mark, options);
  const media = matchMedia("(prefers-color-scheme: dark)");
  media.addEventListener("change", callback);
  return () => {
    observer.disconnect();
    media.removeEventListener("change", callback);
  };
}

export const isStill = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
