// The course's own Python in a page: a worker with Pyodide, the library and the checks.
// In: {id, call, args}, a function of CALLS and what it takes.  Out: {id, text}, what it returns, or {id, error, isBroken}.
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

const FIRST = ["dualpipe_course.in_page", "dualpipe_course.check", "dualpipe_lab.pp"]; // what most questions import

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

// Python as it is after its start is kept in this browser, so that the next page has it within a second.  (A SharedWorker
// would have it at once, but no page can end one whose answer loops.)  Of Pyodide's heap alone, so files come again.
const KEPT = "dualpipe-lab-python";

async function kept(name) {
  const found = await (await caches.open(KEPT)).match(name);
  return found && new Uint8Array(await found.arrayBuffer());
}

async function keep(name, heap) {
  await caches.delete(KEPT); // of another version
  await (await caches.open(KEPT)).put(name, new Response(heap));
}

async function start() {
  const [{ loadPyodide, version }, script, lock, course] = await Promise.all([
    import(new URL("pyodide.mjs", HOME).href),
    unpack("pyodide.asm.mjs", "text/javascript").then((found) => found.blob()),
    plainFetch(new URL("lock.json", HOME)).then((found) => found.text()),
    unpack("course.zip", "application/zip").then((found) => found.arrayBuffer()),
  ]);
  const { default: createPyodideModule } = await import(URL.createObjectURL(script));
  const load = async (more) => {
    const python = await loadPyodide({ indexURL: HOME.href, packageBaseUrl: HOME.href, lockFileContents: lock, createPyodideModule, ...more });
    python.unpackArchive(course, "zip", { extractDir: "/home/pyodide" });
    return python;
  };
  try {
    const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", course));
    const name = new URL(`heap-${version}-${[...digest].join("-")}`, HOME).href;
    const heap = await kept(name);
    if (heap) return { python: await load({ _loadSnapshot: heap }), isRestored: true };
    const python = await load({ _makeSnapshot: true });
    for (const module of FIRST) python.pyimport(module).destroy();
    keep(name, python.makeMemorySnapshot()).catch(() => {});
    return { python, isRestored: false };
  } catch {
    return { python: await load(), isRestored: false }; // a browser that keeps nothing
  }
}

const words = (error) => String(error).trim().split("\n").pop();
const started = start();
started.then(({ isRestored }) => postMessage({ id: null, isRestored }), (error) => postMessage({ id: null, error: words(error) }));

onmessage = async ({ data: { id, call, args } }) => {
  const { python } = await started, [module, name] = CALLS[call];
  try {
    postMessage({ id, text: python.pyimport(module)[name](...args) });
  } catch (error) {
    postMessage({ id, error: words(error), isBroken: !(error instanceof python.ffi.PythonError) });
  }
};
