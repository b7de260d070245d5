// What this browser keeps between visits: texts by key.  Where it keeps nothing (blocked, full, a sandboxed frame, a page
// from a file) they last as long as the page.

const memory = new Map(); // what the browser did not take

function tried(use, otherwise) {
  try {
    return use(globalThis.localStorage);
  } catch {
    return otherwise;
  }
}

export const store = (globalThis.dualpipeStore ??= {
  get: (key) => memory.get(key) ?? tried((kept) => kept.getItem(key), null),
  set(key, text) { // whether the browser keeps it
    const isKept = tried((kept) => (kept.setItem(key, text), kept.getItem(key) === text), false);
    if (isKept) memory.delete(key);
    else memory.set(key, text);
    return isKept;
  },
  remove(key) {
    memory.delete(key);
    tried((kept) => kept.removeItem(key));
  },
  keys: () => [...new Set([...memory.keys(), ...tried((kept) => Object.keys(kept), [])])],
  keepsNothing: () => tried((kept) => (kept.setItem("dualpipe-lab:try", ""), kept.removeItem("dualpipe-lab:try"), false), true),
});
