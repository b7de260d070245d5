// Python in the page, for whatever on it asks: one worker, started by the first question or before it.
// globalThis.dualpipePython: ask(call, args, say), a promise of the text that python-worker.mjs's `call` answers; `say` is
// called with words for what the reader waits for.  warm(): starts Python for a question that is to be expected.
// Questions are answered one by one, each with its own time; one that takes too long ends Python, and the next starts it.

(() => {
  const LOADING = "starting Python, 7 MB at the first time ...";
  const WORKER = new URL("python-worker.mjs", document.currentScript.src).href;

  const queue = [];
  let isAnswering = false;
  let python = null; // a promise of the worker that has started

  const FRAMED = "the frame around this page keeps it from doing so: open the page by itself";

  function start() {
    const isFramed = window.origin === "null"; // such a page may start no file and no module, only a text that imports one
    const failed = `postMessage({ error: ${JSON.stringify(FRAMED)} })`; // without importScripts it is a module for Pyodide
    const text = `self.importScripts = undefined; import(${JSON.stringify(WORKER)}).catch(() => ${failed});`;
    return new Promise((resolve, reject) => {
      const worker = isFramed ? new Worker(URL.createObjectURL(new Blob([text]))) : new Worker(WORKER, { type: "module" });
      worker.onerror = () => reject(new Error("this browser could not start it"));
      worker.onmessage = ({ data }) => {
        if (data.error) return reject(new Error(data.error));
        Object.assign(api, { isStarted: true, isRestored: data.isRestored });
        resolve(worker);
      };
    });
  }

  function warm() {
    python ??= start();
    python.catch(() => (python = null));
    return python;
  }

  async function answer({ call, args, say }) {
    if (!api.isStarted) say(LOADING);
    const worker = await warm().catch(({ message }) => {
      const where = location.protocol === "file:" ? "opened as a file, this page cannot start it: use make serve" : message;
      throw new Error(`Python did not start (${where}).`);
    });
    say("running ...");
    return new Promise((resolve, reject) => {
      const end = (message) => {
        clearTimeout(late);
        worker.terminate();
        python = null;
        api.isStarted = false;
        reject(new Error(message));
      };
      const late = setTimeout(end, 1000 * api.seconds, `no result after ${api.seconds} s`);
      worker.onerror = () => end("Python ended.");
      worker.onmessage = ({ data: { text, error, isBroken } }) => {
        if (isBroken) return end(error);
        clearTimeout(late);
        if (error) reject(new Error(error));
        else resolve(text);
      };
      worker.postMessage({ id: 0, call, args });
    });
  }

  async function work() {
    isAnswering = true;
    for (let one; (one = queue.shift()); ) await answer(one).then(one.resolve, one.reject);
    isAnswering = false;
  }

  const ask = (call, args, say = () => {}) => new Promise((resolve, reject) => {
    queue.push({ call, args, say, resolve, reject });
    if (isAnswering) say("waiting for what was asked before ...");
    else work();
  });

  const api = (globalThis.dualpipePython = { ask, warm, isStarted: false, isRestored: false, seconds: 20 });
})();
