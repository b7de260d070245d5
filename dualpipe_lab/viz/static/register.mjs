// Defines the elements once per page, however many outputs bring this script along.

import { TimelineElement } from "./element.mjs";

export function register() {
  if (!customElements.get("dp-timeline")) customElements.define("dp-timeline", TimelineElement);
}
