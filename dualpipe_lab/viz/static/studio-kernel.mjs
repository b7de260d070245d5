// Who answers an element: the kernel of a notebook, by a model that carries questions to it, or else the Python that a
// page's build put beside it (python.js).

const NO_PYTHON = "This needs Python, which is not here: run the cell in a notebook.";

// For the key of an element, what answers it: a function from a question's text to a promise of the answer's.
export const kernels = () => (globalThis.dualpipeLabKernels ??= new Map());

// The answer, an object; an Error with the sentence of an answer that is one.  `say`: called while Python starts, with
// words, and with "" when it has.
export async function askPython(key, call, question, say) {
  const kernel = kernels().get(key), inPage = globalThis.dualpipePython, text = JSON.stringify(question);
  if (!kernel && !inPage) throw new Error(NO_PYTHON);
  const starting = inPage?.isStarted ? undefined : (words) => say(inPage.isStarted ? "" : words);
  const found = JSON.parse(await (kernel ? kernel(text) : inPage.ask(call, [text], starting)));
  if (found.error) throw new Error(found.error);
  return found;
}

function connectKernel({ model }) {
  const key = model.get("key"), waiting = new Map();
  let asked = 0;
  model.on("msg:custom", ({ id, text }) => {
    waiting.get(id)?.(text);
    waiting.delete(id);
  });
  kernels().set(key, (question) => new Promise((resolve) => {
    waiting.set(++asked, resolve);
    model.send({ id: asked, question });
  }));
  return () => kernels().delete(key);
}

export const studioKernel = { initialize: connectKernel };
