// Sets formulas without a browser: MathJax as the pages would load it, run by Node.js.
// In: MathJax's folder, and [[TeX, whether it stands alone], ...] on standard input.  Out: {formulas: [HTML], css}.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const require = createRequire(import.meta.url);
const [folder, fonts] = process.argv.slice(2);
globalThis.MathJax = {
  loader: { paths: { mathjax: folder }, require, load: ["adaptors/liteDOM", "input/tex", "output/chtml", "a11y/assistive-mml"] },
  chtml: { fontURL: fonts, adaptiveCSS: false },
  startup: { typeset: false },
};
require(`${folder}/startup.js`);
await MathJax.startup.promise;
const { adaptor } = MathJax.startup;
const formulas = [];
for (const [tex, display] of JSON.parse(readFileSync(0))) {
  formulas.push(adaptor.outerHTML(await MathJax.tex2chtmlPromise(tex, { display }))); // a TeX package may have to load
}
console.log(JSON.stringify({ formulas, css: adaptor.textContent(MathJax.chtmlStylesheet()) }));
