// The explorer's looks, on top of style.css.

export const EXPLORER_STYLE = `
:host { container-type: inline-size; }
.choose { display: grid; grid-template-columns: minmax(190px, 1fr) minmax(260px, 3fr); gap: 10px 28px; }
fieldset { border: 0; margin: 0; padding: 0 2px; min-width: 0; }
fieldset > legend { padding: 0 0 2px; font-weight: 650; font-size: 13px; }
.group { display: grid; gap: 2px 28px; align-content: start; }
fieldset:nth-child(2) .group { grid-template-columns: repeat(auto-fill, minmax(200px, 1fr)); }
fieldset:nth-child(3) { grid-column: 1 / -1; }
fieldset:nth-child(3) .group { grid-template-columns: repeat(auto-fill, minmax(170px, max-content)); }
.choose .cost { grid-template-columns: 56px 1fr 30px; }
.choose fieldset:first-child .cost { grid-template-columns: 56px 1fr 52px; }
.box { display: flex; align-items: center; gap: 8px; min-height: 28px; cursor: pointer; }
.box input { flex: none; width: 16px; height: 16px; margin: 0; accent-color: var(--accent); }
.group button { justify-self: start; margin-left: -8px; }
.found { font-size: 14px; color: var(--text); font-weight: 600; padding: 12px 2px 6px; border-top: 1px solid var(--line); margin-top: 10px; }
.ranking { list-style: none; margin: 0; padding: 0; }
.card { display: grid; grid-template-columns: 250px 1fr; gap: 2px 20px; padding: 10px 2px; margin: 0; border-top: 1px solid var(--line); }
.card .about { display: flex; align-items: center; gap: 10px; grid-column: 1; }
.place { font-size: 18px; font-weight: 700; color: var(--accent); min-width: 1em; text-align: center; }
.open { margin-left: auto; font-size: 12px; border-color: var(--line); height: 26px; }
.open[aria-pressed="true"], .open[aria-pressed="true"]:hover { background: var(--accent); border-color: var(--accent); color: var(--page); }
.figures { grid-column: 1; margin: 0; display: grid; grid-template-columns: auto 1fr auto 1fr; gap: 0 10px; align-content: start; font-size: 12px; }
.figures div { display: contents; }
.figures dt { color: var(--muted); font-weight: 400; margin: 0; }
.figures dd { margin: 0; }
.figures .makespan dd, .figures .step dd { font-weight: 650; white-space: nowrap; }
.mini { grid-column: 2; grid-row: 1 / span 2; min-width: 0; overflow: hidden; align-self: center; }
.over .mini { opacity: 0.45; }
.over .activations dd { font-weight: 650; }
.refused { margin: 0; padding: 0 2px; list-style: none; font-size: 12px; color: var(--muted); }
.refused li { margin: 0; padding: 6px 0; border-top: 1px solid var(--line); }
.refused b { color: var(--text); }
.detail { grid-column: 1 / -1; min-width: 0; padding-top: 12px; }
@container (max-width: 680px) {
.choose { grid-template-columns: minmax(0, 1fr); gap: 10px; }
fieldset:nth-child(3) .group { grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); }
.card { grid-template-columns: minmax(0, 1fr); gap: 6px; }
.mini { grid-column: 1; grid-row: auto; }
.figures { grid-template-columns: repeat(auto-fill, minmax(92px, 1fr)); gap: 4px 10px; }
.figures div { display: block; }
.over .figures .activations { grid-column: span 2; }
}
@media print {
.choose, .open, .detail { display: none; }
.card { break-inside: avoid; }
.mini canvas { width: 100% !important; height: auto !important; }
}
`;
