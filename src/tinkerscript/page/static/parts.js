// Small components that all views share.

import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { diverging } from "./colors.js";
import { ago, clock, count, number, short } from "./format.js";
import { Rows } from "./near.js";
import { Link } from "./route.js";

export const Card = ({ title, more, children, ...rest }) => html`
  <section class=${`card ${rest.class ?? ""}`} aria-label=${typeof title === "string" ? title : rest.label}>
    ${title && html`<h2>${title}${more && html`<span class="more">${more}</span>`}</h2>`}
    ${children}
  </section>`;

export const Empty = ({ title, children }) => html`<div class="state"><strong>${title}</strong>${children}</div>`;

export const Failed = ({ error }) => html`<div class="banner bad" role="alert">${error.message}</div>`;

/** A skeleton while `use` loads, then its error or `children(data)`. */
export function Loaded({ use, rows = 4, children }) {
  if (use.data) return html`${use.error && html`<${Failed} error=${use.error} />`}${children(use.data)}`;
  if (use.error) return html`<${Failed} error=${use.error} />`;
  return html`<div class="stack" aria-busy="true" aria-label="Loading">${Array.from({ length: rows }, () => html`<div class="skeleton">${" "}</div>`)}</div>`;
}

const STATES = { running: ["good live", "running"], finished: ["good", "finished"], stopped: ["warn", "stopped"], failed: ["bad", "failed"] };

export const State = ({ state }) => {
  const [kind, text] = STATES[state] ?? ["", state];
  return html`<span class=${`chip ${kind}`}><span class="dot"></span>${text}</span>`;
};

export const Tabs = ({ label, choices, chosen, to, query = {}, name }) => html`
  <nav class="tabs" aria-label=${label}>
    ${choices.map(([value, text]) => html`<${Link} to=${to} query=${{ ...query, [name]: value === choices[0][0] ? "" : value }} aria-current=${value === chosen ? "true" : null}>${text}<//>`)}
  </nav>`;

export const Time = ({ at }) => html`<time datetime=${at ? new Date(at * 1000).toISOString() : null} title=${clock(at)}>${ago(at)}</time>`;

const OUTCOMES = {
  trained: "trained",
  same_reward: "no signal: all rewards of its group are equal",
  group_too_small: "its group had too few results",
  stale: "too old to train",
  misaligned: "left out by the alignment check",
  set_aside: "not trained: its step was stopped",
  left_out: "not trained: it failed, or no step waited for it",
  given_up: "not trained: a resumed run gave it up",
  nothing_to_train: "no token to train",
};

export const outcomeText = (outcome) => outcome ? OUTCOMES[outcome] ?? outcome : "";

export const Reward = ({ line }) => line.status === "accepted"
  ? html`<span title=${line.advantage === null ? "" : `advantage ${number(line.advantage)}`}>${number(line.reward)}</span>`
  : html`<span class="bad">${line.status}</span>`;

export const UNDONE = "A resumed run repeated its step or evaluation without it.";

export const Undone = () => html`<span class="chip" title=${UNDONE}>undone</span>`;

export function Episodes({ episodes, run, columns = [] }) {
  const limit = Math.max(1e-3, ...episodes.map((line) => Math.abs(line.advantage ?? 0)));
  const shown = new Set(["what", "reward", "advantage", "calls", "tokens", "reply", "ended", ...columns]);
  return html`<div class="table"><table>
    <thead><tr>
      <th>episode</th>${shown.has("what") && html`<th>for</th>`}<th class="number">reward</th>
      ${shown.has("advantage") && html`<th class="number hide-narrow">advantage</th>`}
      <th class="number hide-narrow">calls</th><th class="number hide-narrow">tokens</th><th>last reply, or why it failed</th><th class="hide-narrow">ended</th>
    </tr></thead>
    <${Rows} items=${episodes} columns=${8} row=${(line) => html`<tr key=${line.uuid}>
      <td class="nowrap"><${Link} to=${["episode", line.uuid]} class="mono">${short(line.uuid)}<//></td>
      ${shown.has("what") && html`<td class="nowrap">${forWhat(line, run)}</td>`}
      <td class="number"><${Reward} line=${line} /></td>
      ${shown.has("advantage") && html`<td class="number hide-narrow" style=${{ background: diverging(line.advantage, limit) }} title=${outcomeText(line.outcome)}>${line.advantage === null ? "–" : number(line.advantage)}</td>`}
      <td class="number hide-narrow">${line.calls}</td><td class="number hide-narrow">${number(line.sampled_tokens)}</td>
      <td class="text" title=${line.preview}>${line.undone !== null && html`<${Undone} /> `}${line.truncated > 0 && html`<span class="chip warn">cut off</span> `}${line.preview}</td>
      <td class="nowrap hide-narrow quiet"><${Time} at=${line.ended} /></td>
    </tr>`} />
  </table></div>`;
}

export const forWhat = (line, run) => line.type === "eval" && line.label
  ? html`<${Link} to=${["run", run, "evaluations"]}>evaluation ${line.label}<//>`
  : line.step ? html`<${Link} to=${["run", run, "steps", String(line.step)]}>step ${line.step}<//>` : html`<span class="quiet">own sample</span>`;

export function More({ more, loading }) {
  const [busy, setBusy] = useState(false);
  if (!more) return null;
  return html`<div class="row"><button disabled=${busy || loading} onClick=${async () => { setBusy(true); await more(); setBusy(false); }}>${busy ? "Loading…" : "Show more"}</button></div>`;
}

export const Meter = ({ done, total, label }) => html`
  <div class="meter" role="progressbar" aria-label=${label} aria-valuemin="0" aria-valuemax=${total || 1} aria-valuenow=${done}>
    <div style=${{ width: `${total ? Math.min(100, 100 * done / total) : 0}%` }}></div>
  </div>`;

export function Histogram({ bins, unit = "reward" }) {
  if (!bins.length) return html`<${Empty} title="No rewards">No episode of this step has one.<//>`;
  const most = Math.max(...bins.map((bin) => bin.count));
  const text = (bin) => bin.low === bin.high ? number(bin.low) : `${number(bin.low)} to ${number(bin.high)}`;
  return html`<div>
    <div class="bars" role="img" aria-label=${`Histogram: ${bins.filter((bin) => bin.count).map((bin) => `${text(bin)}: ${bin.count}`).join(", ")}`}>
      ${bins.map((bin) => html`<div style=${{ height: `${most ? Math.max(bin.count ? 2 : 0, 100 * bin.count / most) : 0}%` }} title=${`${unit} ${text(bin)}: ${bin.count} episodes`}></div>`)}
    </div>
    ${bins.every((bin) => bin.low === bin.high)
      ? html`<div class="bar-labels each">${bins.map((bin) => html`<span>${number(bin.low)}${bins.length < 4 ? `: ${count(bin.count, "episode")}` : ""}</span>`)}</div><div class="bar-labels each"><span>${unit}</span></div>`
      : html`<div class="bar-labels"><span>${number(bins[0].low)}</span><span>${unit}</span><span>${number(bins[bins.length - 1].high)}</span></div>`}
  </div>`;
}

/** A confirmation dialog, which `ask({title, text, verb, act})` opens. */
export function useConfirm() {
  const ref = useRef();
  const [asked, setAsked] = useState(null);
  useEffect(() => { if (asked) ref.current?.showModal(); }, [asked]);
  const close = () => { ref.current?.close(); setAsked(null); };
  const dialog = asked && html`<dialog ref=${ref} onClose=${() => setAsked(null)} aria-labelledby="asked">
    <div class="stack"><h2 id="asked">${asked.title}</h2><p>${asked.text}</p>
    <div class="row"><button class="primary" onClick=${() => { close(); asked.act(); }}>${asked.verb}</button><button onClick=${close}>Cancel</button></div></div>
  </dialog>`;
  return [dialog, setAsked];
}
