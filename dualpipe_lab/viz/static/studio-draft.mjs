// The last draft, kept in the browser when its page is left, until another one takes its place.

import { packSession, unpackSession } from "./studio-link.mjs";

const DRAFT = "dualpipe-lab-draft";

// Before a page goes, and before a phone puts it away.
export function keepWhenLeft(session) {
  const keep = () => session.isEdited && storing(() => localStorage.setItem(DRAFT, packSession(session)));
  window.addEventListener("pagehide", keep);
  document.addEventListener("visibilitychange", () => document.hidden && keep());
}

export const hasDraft = () => Boolean(storing(() => localStorage.getItem(DRAFT)));
export const keptDraft = () => unpackSession(storing(() => localStorage.getItem(DRAFT)) ?? "");

function storing(use) {
  try {
    return use();
  } catch {
    return null; // a page from a file may have no store, and a store may be full: then nothing is kept
  }
}
