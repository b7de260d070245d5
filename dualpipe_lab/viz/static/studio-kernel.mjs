// The half of a studio in a notebook that lives with the kernel: it starts with the model, and carries questions to it.

// For the key of an element, what answers it: a function from a question's text to a promise of the answer's.
export const kernels = () => (globalThis.dualpipeLabKernels ??= new Map());

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
