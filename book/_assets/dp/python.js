// Python in the page, for whatever on it asks: one worker, started by the first question.
// globalThis.dualpipePython.ask(call, args, say): a promise of the text that python-worker.mjs's `call` answers; `say` is
// called with words for what the reader waits for.  An answer that takes too long ends Python, and the next starts it anew.

(() => {
  const SECONDS = 20;
  const LOADING = "starting Python, 6 MB, once per visit ...";
  const WORKER = new URL("python-worker.mjs", document.currentScript.src);

  let python = null; // the worker, what it has still to answer, and whether it has started
  let asked = 0;

  function start() {
    const worker = new Worker(WORKER, { type: "module" });
    const waiting = new Map();
    let started;
    const ready = new Promise((resolve, reject) => (started = { resolve, reject }));
    worker.onerror = () => started.reject(new Error("this browser could not start it"));
    worker.onmessage = ({ data }) => {
      if (data.id !== null) waiting.get(data.id)?.(data);
      else if (data.error) started.reject(new Error(data.error));
      else started.resolve();
    };
    return { worker, waiting, ready };
  }

  async function ask(call, args, say = () => {}) {
    if (!api.isStarted) say(LOADING);
    try {
      await (python ??= start()).ready;
    } catch (error) {
      python = null;
      const where = location.protocol === "file:" ? "opened as a file, this page cannot start it: use make serve" : error.message;
      throw new Error(`Python did not start (${where}).`);
    }
    api.isStarted = true;
    say("running ...");
    const { worker, waiting } = python, id = ++asked;
    return new Promise((resolve, reject) => {
      const late = setTimeout(() => {
        worker.terminate();
        python = null;
        api.isStarted = false;
        reject(new Error(`no result after ${SECONDS} s`));
      }, 1000 * SECONDS);
      waiting.set(id, ({ text, error }) => {
        clearTimeout(late);
        waiting.delete(id);
        if (error) reject(new Error(error));
        else resolve(text);
      });
      worker.postMessage({ id, call, args });
    });
  }

  const api = (globalThis.dualpipePython = { ask, isStarted: false });
})();
