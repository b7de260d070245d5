// The looks of live cells, on top of style.css.

export const LIVE_STYLE = `
.live { display: grid; grid-template-columns: minmax(0, 1fr); gap: 6px; }
.sizes { margin: 0; padding: 0 2px; border: 0; grid-template-columns: repeat(auto-fill, minmax(min(300px, 100%), 1fr)); }
.sizes:empty { display: none; }
.sizes .cost { grid-template-columns: 150px minmax(0, 1fr) 30px; }
.sizes textarea { grid-column: 2 / -1; width: 100%; font: 12px/1.5 ui-monospace, monospace; color: inherit; background: var(--page); border: 1px solid var(--line); border-radius: 6px; }
.sizes button { margin: 0; border-color: var(--line); }
.sizes .rows { grid-column: 1 / -1; }
.live slot { display: block; min-width: 0; }
.live > .found { overflow-x: auto; border-radius: 6px; }
.live > .found:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.live > .found[hidden] { display: none; }
.live table { font-size: 13px; margin: 0; }
.live tbody th { color: var(--muted); text-align: left; border: 0; padding-right: 0; }
.live thead th { border-bottom: 1px solid var(--line); }
.live td, .live thead th { text-align: right; padding: 2px 0 2px 14px; }
.live .old td { opacity: 0.45; }
.live .remark { margin: 4px 0 0; font-size: 12px; color: var(--muted); }
.live .verdict { font-size: 13px; padding: 6px 10px; border-left: 3px solid #009e73; background: var(--fill); border-radius: 0 6px 6px 0; }
.live .verdict:empty { display: none; }
.live .verdict.error { border-left-color: #d55e00; }
.live .hint { margin: 0; padding: 0 2px; font-size: 12px; color: var(--muted); }
.live .hint[hidden] { display: none; }
.live.refused slot[name=drawing] { opacity: 0.4; }
::slotted([slot=controls]) { margin: 0; color: var(--text); }
@media print { .live .hint, slot[name=controls] { display: none; } }
`;
