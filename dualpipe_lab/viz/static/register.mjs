// Defines the elements once per page, however many outputs bring this script along.

import { TimelineElement } from "./element.mjs";
import { ExplorerElement } from "./explorer.mjs";
import { LiveElement } from "./live.mjs";
import { StepsElement } from "./steps.mjs";

export function register() {
  if (!customElements.get("dp-timeline")) customElements.define("dp-timeline", TimelineElement);
  if (!customElements.get("dp-steps")) customElements.define("dp-steps", StepsElement);
  if (!customElements.get("dp-explorer")) customElements.define("dp-explorer", ExplorerElement);
  if (!customElements.get("dp-live")) customElements.define("dp-live", LiveElement);
}
