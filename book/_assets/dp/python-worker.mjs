// The course's own Python in a page: a worker with Pyodide, the library and the checks.
// In: {id, call, args}, a function of CALLS and what it takes.  Out: {id, text}, what it returns, or {id, error}.
// The files lie compressed beside this one, because a plain file server compresses nothing.

const HOME = new URL("../python/", import.meta.url);
const PACKED = { "pyodide.asm.wasm": "application/wasm", "python_stdlib.zip": "application/zip" };

const CALLS = {
  judge: ["dualpipe_course.in_page", "judge"],
  run: ["dualpipe_course.in_page", "run"],
  studio: ["dualpipe_lab.pp.studio", "answer"],
  planner: ["dualpipe_lab.viz.planner", "answer"],
  play: ["dualpipe_lab.viz.live.play", "answer"],
};

async function unpack(name, type) {
  const found = await plainFetch(new URL(`${name}.packed`, HOME));
  if (!found.ok) throw new Error(`${name}: ${found.status}`);
  return new Response(found.body.pipeThrough(new DecompressionStream("gzip")), { headers: { "Content-Type": type } });
}

const plainFetch = self.fetch.bind(self);
self.fetch = (address, options) => {
  const name = String(address.url ?? address).split("/").pop();
  return name in PACKED ? unpack(name, PACKED[name]) : plainFetch(address, options);
};

async function start() {
  const [{ loadPyodide }, script, lock, course] = await Promise.all([
    import(new URL("pyodide.mjs", HOME).href),
    unpack("pyodide.asm.mjs", "text/javascript").then((found) => found.blob()),
    plainFetch(new URL("lock.json", HOME)).then((found) => found.text()),
    unpack("course.zip", "application/zip").then((found) => found.arrayBuffer()),
  ]);
  const { default: createPyodideModule } = await import(URL.createObjectURL(script));
  const options = { indexURL: HOME.href, packageBaseUrl: HOME.href, lockFileContents: lock, createPyodideModule };
  const python = await loadPyodide(options);
  python.unpackArchive(course, "zip", { extractDir: "/home/pyodide" });
  return python;
}

const words = (error) => String(error).trim().split("\n").pop();
const started = start();
started.then(() => postMessage({ id: null }), (error) => postMessage({ id: null, error: words(error) }));

onmessage = async ({ data: { id, call, args } }) => {
  const python = await started, [module, name] = CALLS[call];
  try {
    postMessage({ id, text: python.pyimport(module)[name](...args) });
  } catch (error) {
    postMessage({ id, error: words(error) });
  }
};
