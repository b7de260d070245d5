// The planner's looks, on top of style.css.

export const PLANNER_STYLE = `
:host { container-type: inline-size; }
.choose { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 10px 32px; }
fieldset { border: 0; margin: 0; padding: 0 2px; min-width: 0; }
fieldset > legend { padding: 0 0 4px; font-weight: 650; font-size: 13px; }
.group { display: grid; gap: 4px; align-content: start; }
.choose .cost { grid-template-columns: 74px minmax(0, 1fr) 66px; }
.cost input[type="number"] {
  width: 100%; height: 26px; padding: 0 2px 0 6px; font: inherit; font-size: 12px; color: inherit; background: var(--page);
  border: 1px solid var(--line); border-radius: 4px;
}
.menu { display: grid; grid-template-columns: 74px 1fr; align-items: center; gap: 8px; min-height: 28px; }
.menu span { font-weight: 600; font-size: 12px; }
.menu select { min-width: 0; width: 100%; }
.box { display: flex; align-items: center; gap: 8px; min-height: 28px; cursor: pointer; }
.box input { flex: none; width: 16px; height: 16px; margin: 0; accent-color: var(--accent); }
.verdict {
  font-size: 14px; font-weight: 600; margin: 12px 0 8px; padding: 8px 12px; border-left: 4px solid #009e73;
  background: var(--fill); border-radius: 0 6px 6px 0;
}
.verdict.over { border-left-color: #d55e00; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(104px, 1fr)); gap: 6px 14px; margin: 0 2px 8px; }
.figures dt { color: var(--muted); font-size: 12px; font-weight: 400; margin: 0; }
.figures dd { margin: 0; font-size: 15px; font-weight: 650; }
.pictures { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 18px 36px; }
.pictures svg, .picture svg { display: block; max-width: 100%; }
h3 { font-size: 13px; font-weight: 650; margin: 14px 0 6px; padding-top: 10px; border-top: 1px solid var(--line); }
.note { margin: 6px 0 0; font-size: 12px; color: var(--muted); }
.frontier { list-style: none; margin: 8px 0 0; padding: 0; display: grid; gap: 4px; }
.frontier li { margin: 0; }
.frontier button {
  border-color: var(--line); width: 100%; height: auto; min-height: 28px; padding: 4px 8px; text-align: left;
  line-height: 1.35; font-size: 12px;
}
.broken .figures, .broken .pipeline, .broken .pictures > :first-child { display: none; }
.share { display: flex; flex-wrap: wrap; gap: 4px 14px; align-items: center; margin-top: 8px; }
.share a { color: var(--accent); font-size: 12px; padding: 4px 2px; border-radius: 4px; }
.share a:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.share button { border-color: var(--line); }
.links th { white-space: normal; vertical-align: bottom; }
.links tr:last-child td { font-weight: 650; border-top: 1px solid var(--line); }
.waits { opacity: 0.45; }
.table:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
@container (max-width: 860px) {
.choose { grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); }
.pictures { grid-template-columns: minmax(0, 1fr); }
}
@container (max-width: 560px) { .choose { grid-template-columns: minmax(0, 1fr); } th, td { padding-right: 10px; } }
@media print { .choose, .share, .frontier { display: none; } }
`;
