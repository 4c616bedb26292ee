// All curves of a run, with those of other runs on the same charts, and how the configs differ.

import { html, useMemo } from "./vendor/preact.js";
import { Chart } from "./chart.js";
import { useData } from "./data.js";
import { Card, Empty, Failed, Loaded } from "./parts.js";
import { adjust, Link } from "./route.js";

const FIRST = ["reward/mean", "eval/score", "train/nll", "held_out/nll", "train/entropy", "response_tokens/mean", "episodes/failed", "alignment/max_abs_dlogp", "time/rollout_s", "time/train_s"];

export function CurvesPlace({ run, query }) {
  const others = (query.with ?? "").split(",").filter(Boolean);
  const use = useData(`runs/${encodeURIComponent(run)}/metrics`, {}, { live: true });
  const runs = useData("runs");
  const picked = (query.m ?? "").split(",").filter(Boolean);
  const filter = query.find ?? "";
  const set = (change) => adjust(["run", run, "curves"], { ...query, ...change });
  return html`
    <${Card} label="Which curves">
      <div class="row">
        <label>Find a metric <input type="search" value=${filter} placeholder="entropy, time/, lag" onInput=${(event) => set({ find: event.target.value, m: "" })} /></label>
        <label>Compare with <select onChange=${(event) => { if (event.target.value) set({ with: [...others, event.target.value].join(",") }); event.target.value = ""; }}>
          <option value="">another run…</option>
          ${(runs.data?.runs ?? []).filter((each) => each.name !== run && !others.includes(each.name)).map((each) => html`<option value=${each.name}>${each.name}</option>`)}
        </select></label>
        ${others.map((name) => html`<button onClick=${() => set({ with: others.filter((each) => each !== name).join(",") })} title="Leave it out">${name} ✕</button>`)}
        ${picked.length > 0 && html`<button onClick=${() => set({ m: "" })}>Show all metrics</button>`}
        <span style=${{ marginLeft: "auto" }}><${Link} to=${["run", run, "config"]} query=${{ with: query.with ?? "" }}>${others.length ? "config differences" : "config"}<//></span>
      </div>
    <//>
    <${Loaded} use=${use}>${(metrics) => html`<${Charts} run=${run} others=${others} names=${wanted(metrics, picked, filter)} />`}<//>`;
}

function wanted(metrics, picked, filter) {
  const names = metrics.map((metric) => metric.name).filter((name) => !/^eval\/(before|after|step-\d+)$/.test(name));
  if (picked.length) return picked;
  const found = names.filter((name) => name.toLowerCase().includes(filter.toLowerCase()));
  const rank = (name) => { const at = FIRST.indexOf(name); return at < 0 ? FIRST.length : at; };
  return found.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b)).slice(0, 60);
}

function Charts({ run, others, names }) {
  if (!names.length) return html`<${Card}><${Empty} title="No metric of that name">Metrics appear with the first step.<//><//>`;
  return html`<${All} key=${[run, ...others].join("|")} runs=${[run, ...others]} names=${names} />`;
}

function All({ runs, names }) {
  const uses = runs.map((run) => useData(`runs/${encodeURIComponent(run)}/curves`, { name: names, points: 300 }, { live: true }));
  const failed = uses.find((use) => use.error && !use.data);
  const key = uses.map((use) => use.data);
  const charts = useMemo(() => names.map((name) => ({ name, lines: lines(name, runs, uses) })).filter((chart) => chart.lines.length), key.concat(names));
  if (failed) return html`<${Failed} error=${failed.error} />`;
  return html`<div class="grid">${charts.map(({ name, lines: found }) => html`<div class="span-4" key=${name}><${Card} title=${name}><${Chart} lines=${found} label=${`${name} by step`} /><//></div>`)}</div>`;
}

const lines = (name, runs, uses) => runs.flatMap((run, at) => {
  const curve = uses[at].data?.curves[name];
  return curve ? [{ label: runs.length > 1 ? run : name.split("/").pop(), curve, dots: name.startsWith("eval/") || name.startsWith("held_out/") }] : [];
});

export function ConfigPlace({ run, query }) {
  const others = (query.with ?? "").split(",").filter(Boolean);
  const config = useData(`runs/${encodeURIComponent(run)}/config`);
  const differences = useData(others.length ? "config-differences" : "", { run: [run, ...others] });
  const text = (value) => typeof value === "string" ? value : JSON.stringify(value);
  return html`
    ${others.length > 0 && html`<${Card} title="What differs"><${Loaded} use=${differences}>${(rows) => html`<div class="table"><table>
      <thead><tr><th>setting</th>${[run, ...others].map((name) => html`<th>${name}</th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`<tr><td class="mono">${row.key}</td>${[run, ...others].map((name) => html`<td class="mono">${text(row.values[name])}</td>`)}</tr>`)}</tbody></table></div>`}<//><//>`}
    <${Card} title="Config"><${Loaded} use=${config}>${(data) => html`<div class="table"><table><tbody>${flat(data).map(([key, value]) => html`<tr><td class="mono">${key}</td><td class="mono">${text(value)}</td></tr>`)}</tbody></table></div>`}<//><//>`;
}

const flat = (value, prefix = "") => value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length
  ? Object.entries(value).flatMap(([key, item]) => flat(item, prefix ? `${prefix}.${key}` : key)) : [[prefix, value]];
