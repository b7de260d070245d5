// Defines the studio, in a script of its own: only a page that has a studio carries it, after the script of all drawings.

import { StudioElement } from "./studio.mjs";

export function registerStudio() {
  if (!customElements.get("dp-studio")) customElements.define("dp-studio", StudioElement);
}
