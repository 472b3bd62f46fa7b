// A worker in which trigrid itself runs: CPython for WebAssembly, from this site, with the package's own source.

import { loadPyodide } from "./pyodide/pyodide.mjs";

const ready = start();

async function start() {
  const [python, source] = await Promise.all([
    loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href }),
    fetch(new URL("./trigrid.zip", import.meta.url)).then((response) => {
      if (!response.ok) throw new Error(`trigrid.zip: ${response.status}`);
      return response.arrayBuffer();
    }),
  ]);
  python.unpackArchive(source, "zip", { extractDir: "/trigrid" });
  return python.runPython("import sys; sys.path.insert(0, '/trigrid'); from trigrid.web.questions import reply; reply");
}

addEventListener("message", async ({ data: { id, name, body } }) => {
  try {
    const pair = (await ready)(name, body);
    const [sound, text] = pair.toJs();
    pair.destroy();
    postMessage({ id, reply: { sound, text } });
  } catch (error) {
    postMessage({ id, failed: String(error) });
  }
});
