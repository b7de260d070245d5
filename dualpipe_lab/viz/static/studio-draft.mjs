// The last draft, kept in the browser when its page is left, until another one takes its place.

import { store } from "./store.mjs";
import { packSession, unpackSession } from "./studio-link.mjs";

const DRAFT = "dualpipe-lab-draft";

// Before a page goes, and before a phone puts it away.
export function keepWhenLeft(session) {
  const keep = () => session.isEdited && store.set(DRAFT, packSession(session));
  window.addEventListener("pagehide", keep);
  document.addEventListener("visibilitychange", () => document.hidden && keep());
}

export const hasDraft = () => Boolean(store.get(DRAFT));
export const keptDraft = () => unpackSession(store.get(DRAFT) ?? "");
