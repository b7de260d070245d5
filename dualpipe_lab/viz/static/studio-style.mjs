// The studio's looks, on top of style.css.

export const STUDIO_STYLE = `
.row { display: flex; flex-wrap: wrap; align-items: center; gap: 4px 10px; padding: 4px 2px; }
.row .gap { flex: 1; }
.row > .cost { grid-template-columns: auto 96px 20px; color: var(--muted); }
.row > .cost span { font-weight: 400; }
.field { display: inline-flex; align-items: center; gap: 6px; font-size: 12px; color: var(--muted); }
.field input, .priced input[type="text"], textarea {
  font: inherit; color: var(--text); background: var(--page); border: 1px solid var(--line); border-radius: 6px; height: 28px; padding: 0 6px;
}
.field input:focus-visible, textarea:focus-visible, .table:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.field input[type="number"] { width: 5.5em; }
.field.rowtext { display: flex; padding: 2px; }
.field.rowtext span { min-width: 4em; }
.field.rowtext input { flex: 1; min-width: 0; font-family: ui-monospace, "Liberation Mono", monospace; font-size: 12px; }
textarea { display: block; width: 100%; height: 9em; padding: 6px; resize: vertical; font-family: ui-monospace, "Liberation Mono", monospace; font-size: 12px; white-space: pre; }
dp-timeline { margin: 4px 0 0; }
.judged { border-left: 3px solid #009e73; padding: 2px 10px; margin: 8px 0; }
.judged.bad { border-color: #d55e00; }
.waiting, .waiting * { color: var(--muted) !important; border-color: var(--line) !important; }
.verdict { margin: 0; font-size: 14px; font-weight: 600; color: var(--text); }
.problems { margin: 4px 0; padding: 0 0 0 1.1em; font-size: 12px; max-height: 15em; overflow-y: auto; }
.problems li { white-space: pre-wrap; margin: 2px 0; overflow-wrap: anywhere; }
.mend { border-color: var(--line); color: var(--text); height: auto; min-height: 30px; text-align: left; white-space: normal; line-height: 1.3; padding: 4px 8px; }
.message { margin: 0; padding: 0 2px; font-size: 12px; min-height: 1.5em; color: var(--muted); overflow-wrap: anywhere; }
.message.bad { color: #b34700; font-weight: 600; }
.dark .message.bad { color: #ff9f5a; }
.edit { border-top: 1px solid var(--line); padding-top: 6px; }
.here { font-size: 12px; padding: 2px; min-height: 1.5em; color: var(--text); }
.tool { border-color: var(--line); color: var(--text); }
.missing { display: flex; flex-wrap: wrap; align-items: center; gap: 2px; font-size: 12px; color: var(--muted); padding: 2px; }
.token { font-family: ui-monospace, "Liberation Mono", monospace; border-color: var(--line); height: 26px; }
.section { border-top: 1px solid var(--line); padding: 4px 2px; }
.section > summary { color: var(--text); font-weight: 650; font-size: 13px; }
.inside { padding: 4px 0 6px; }
.inside .table { display: flex; flex-wrap: wrap; gap: 4px 40px; align-items: start; max-height: none; }
.inside .table > table { max-width: 100%; }
.inside th { border-bottom: 0; }
.inside thead th { border-bottom: 1px solid var(--line); }
.inside .costs { border: 0; margin: 0; padding: 0; }
.priced { display: flex; align-items: center; gap: 8px; }
.priced .cost { flex: 1; grid-template-columns: 56px 1fr 40px; }
.priced input[type="text"] { width: 6.5em; min-width: 0; }
.hint, .rules { margin: 2px 0 6px; font-size: 12px; color: var(--muted); }
.compared, .challenges { margin: 0; font-size: 13px; }
.compared { list-style: none; padding: 0 2px; }
.compared li { margin: 0; }
.challenges { padding-left: 2em; columns: 2 260px; }
.challenges li { margin: 0; break-inside: avoid; }
.challenges button { color: var(--accent); font-size: 13px; }
.stars { letter-spacing: 2px; color: #b37700; margin-left: 6px; }
.dark .stars { color: #e69f00; }
.task { border: 1px solid var(--line); border-radius: 8px; padding: 8px 12px; margin: 6px 0; }
.task p { margin: 0 0 4px; }
.task.solved { border-color: #009e73; }
.judgement { font-weight: 600; }
.files { display: flex; flex-wrap: wrap; gap: 4px; padding: 6px 0; }
.files button { border-color: var(--line); color: var(--text); }
.files a { color: var(--accent); font-size: 12px; align-self: center; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; max-width: 100%; }
@media (max-width: 560px) { .row .gap { display: none; } }
@media print { .row, .edit, .section:not([open]) { display: none; } }
`;
