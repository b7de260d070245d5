// Defines the elements once per page, however many outputs bring this script along.

import { TimelineElement } from "./element.mjs";
import { ExplorerElement } from "./explorer.mjs";
import { LiveElement } from "./live.mjs";
import { StepsElement } from "./steps.mjs";

const DRAWINGS = "dp-timeline, dp-steps, dp-explorer, dp-live";

// Notebooks have shortcuts on plain keys, which would take them from our sliders and buttons; Ctrl+S and the like are
// theirs.  Notebook 7 reads a key before any element sees it, and looks for this mark on the element with the focus first.
function markPlainKeys({ target, ctrlKey, metaKey, altKey, shiftKey }) {
  if (!target.closest?.(DRAWINGS)) return;
  target.toggleAttribute("data-lm-suppress-shortcuts", !(ctrlKey || metaKey || altKey || shiftKey));
}

export function register() {
  if (!customElements.get("dp-timeline")) {
    window.addEventListener("keydown", markPlainKeys, true);
    customElements.define("dp-timeline", TimelineElement);
  }
  if (!customElements.get("dp-steps")) customElements.define("dp-steps", StepsElement);
  if (!customElements.get("dp-explorer")) customElements.define("dp-explorer", ExplorerElement);
  if (!customElements.get("dp-live")) customElements.define("dp-live", LiveElement);
}
