// All curves of a run, with other runs on the same charts, and config differences.

import { html, useMemo } from "./vendor/preact.js";
import { isExport } from "./api.js";
import { Chart } from "./chart.js";
import { useData } from "./data.js";
import { number } from "./format.js";
import { about, sections, together } from "./metrics.js";
import { Card, Empty, Failed, Loaded } from "./parts.js";
import { adjust, Link } from "./route.js";

/** What `phases` needs; before the last two, all of which are parts of the first. */
export const PHASES = ["time/rollout_s", "time/train_s", "time/publish_s", "time/sample_s", "time/wait_stale_s"];

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
        ${others.map((name) => html`<button onClick=${() => set({ with: others.filter((each) => each !== name).join(",") })} title="Remove">${name} ✕</button>`)}
        ${picked.length > 0 && html`<button onClick=${() => set({ m: "" })}>Show all metrics</button>`}
        <label>Smooth <select value=${query.smooth ?? ""} onChange=${(event) => set({ smooth: event.target.value })}>${[["", "off"], ["0.6", "light"], ["0.9", "strong"]].map(([weight, text]) => html`<option value=${weight} selected=${weight === (query.smooth ?? "")}>${text}</option>`)}</select></label>
        <label><input type="checkbox" checked=${query.log === "1"} onChange=${(event) => set({ log: event.target.checked ? "1" : "" })} /> log axis</label>
        <span style=${{ marginLeft: "auto" }}><${Link} to=${["run", run, "config"]} query=${{ with: query.with ?? "" }}>${others.length ? "config differences" : "config"}<//></span>
      </div>
    <//>
    <${Loaded} use=${use}>${(metrics) => html`<${Charts} run=${run} others=${others} names=${wanted(metrics, picked, filter)} plain=${picked.length > 0} smooth=${Number(query.smooth) || 0} log=${query.log === "1"} />`}<//>`;
}

const MOST = 60;

function wanted(metrics, picked, filter) {
  const names = metrics.map((metric) => metric.name).filter((name) => !/^eval\/(before|after|step-\d+)$/.test(name));
  if (picked.length) return picked;
  const found = names.filter((name) => name.toLowerCase().includes(filter.toLowerCase()));
  return sections(found).flatMap(([, list]) => list).slice(0, MOST);
}

function Charts({ run, others, names, ...shown }) {
  if (!names.length) return html`<${Card}><${Empty} title="No metric yet">Metrics appear with the first step. When searching, try part of a name.<//><//>`;
  return html`<${All} key=${[run, ...others].join("|")} runs=${[run, ...others]} names=${names} ...${shown} />`;
}

function All({ runs, names, plain, smooth, log }) {
  const uses = runs.map((run) => useData(`runs/${encodeURIComponent(run)}/curves`, { name: names, points: 300 }, { live: true }));
  const failed = uses.find((use) => use.error && !use.data);
  const key = uses.map((use) => use.data);
  const found = useMemo(() => plain ? [["", charts(names, runs, uses)]] : sections([...names]).map(([title, list]) => [title, [...(runs.length > 1 ? [] : joint(title, list, uses[0])), ...charts(list, runs, uses)]]), key.concat(names));
  if (failed) return html`<${Failed} error=${failed.error} />`;
  if (uses.some((use) => !use.data)) return html`<div class="card" aria-busy="true">Loading…</div>`;
  return found.filter(([, list]) => list.length).map(([title, list]) => html`<${Section} key=${title} title=${title} list=${list} smooth=${smooth} log=${log} />`);
}

/** Exponential smoothing as in TensorBoard. Evaluations are too far apart and stay unchanged. */
function smoothed(lines, weight) {
  return !weight ? lines : lines.map((line) => {
    if (line.dots) return line;
    let sum = 0, mass = 0;
    return { ...line, curve: { ...line.curve, mean: line.curve.mean.map((value) => { sum = weight * sum + (1 - weight) * value; mass = weight * mass + 1 - weight; return sum / mass; }) } };
  });
}

function download({ name, lines }) {
  const rows = lines.flatMap(({ label, curve }) => curve.steps.map((step, at) => [JSON.stringify(label), step, curve.mean[at], curve.low[at], curve.high[at]]));
  const url = URL.createObjectURL(new Blob([["line,step,mean,low,high", ...rows].join("\n") + "\n"], { type: "text/csv" }));
  Object.assign(document.createElement("a"), { href: url, download: `${name.replaceAll("/", "_")}.csv` }).click();
  URL.revokeObjectURL(url);
}

function Section({ title, list, smooth, log }) {
  const still = title ? list.filter((chart) => isConstant(chart)) : [];
  const moving = list.filter((chart) => !still.includes(chart));
  return html`<section class="stack" aria-label=${title || "Curves"}>${title && html`<h2 class="section">${title}</h2>`}
    ${moving.length > 0 && html`<div class="grid">${moving.map((chart) => html`<div class="span-4" key=${chart.name}><${Card} title=${chart.name} more=${html`<button class="small" onClick=${() => download(chart)} aria-label=${`Download ${chart.name} as CSV`}>CSV</button>`}><p class="about small quiet" title=${chart.about}>${chart.about}</p><${Chart} lines=${smoothed(chart.lines, chart.stacked ? 0 : smooth)} stacked=${chart.stacked} log=${log} label=${`${chart.name} by step`} /><//></div>`)}</div>`}
    ${still.length > 0 && html`<p class="small quiet">Constant over all steps: ${still.map((chart, at) => html`${at > 0 && ", "}<span title=${chart.about}><code>${chart.name}</code> ${number(chart.lines[0].curve.mean[0])}</span>`)}</p>`}</section>`;
}

const isConstant = ({ lines: [first, ...rest], stacked }) => !stacked && !rest.length && first.curve.steps.length > 1 && Math.min(...first.curve.low) === Math.max(...first.curve.high);

const charts = (names, runs, uses) => names.map((name) => ({ name, about: about(name), lines: lines(name, runs, uses) })).filter((chart) => chart.lines.length);

/** Charts of several metrics of one run: time by phase, reward by scorer and by task. */
function joint(title, names, use) {
  const curves = use.data?.curves ?? {};
  const line = (name) => ({ label: name.split("/").pop(), curve: curves[name], dots: name.startsWith("eval/") });
  if (title === "Time") return PHASES.slice(0, 3).every((name) => names.includes(name) && curves[name]) ? [{ name: "Time by phase", about: "seconds of a step: what it does, or waits for; with a max_policy_lag above 0, groups are sampled in all of them", lines: phases(curves), stacked: true }] : [];
  return together(names).map(([name, list, text]) => ({ name, about: text, lines: list.filter((each) => curves[each]).map(line) }));
}

/** The time of each step, in areas: publishing is a part of training, and model calls and old groups of the wait. */
export function phases(curves) {
  const [rollout, train, publish, sample, old] = PHASES.map((name) => curves[name]);
  const at = (curve) => new Map((curve?.steps ?? []).map((step, place) => [step, curve.mean[place]]));
  const less = (curve, ...parts) => ({ ...curve, mean: curve.mean.map((value, place) => Math.max(0, value - parts.reduce((sum, part) => sum + (part.get(curve.steps[place]) ?? 0), 0))) });
  return [
    { label: "training", curve: less(train, at(publish)) }, { label: "publishing", curve: publish },
    sample && { label: "model calls", curve: sample }, { label: sample ? "episodes' programs" : "rollouts", curve: less(rollout, at(sample), at(old)) },
    old && { label: "old groups", curve: old },
  ].filter(Boolean);
}

const lines = (name, runs, uses) => runs.flatMap((run, at) => {
  const curve = uses[at].data?.curves[name];
  return curve ? [{ label: runs.length > 1 ? run : name.split("/").pop(), curve, dots: name.startsWith("eval/") || name.startsWith("held_out/") }] : [];
});

export function ConfigPlace({ run, query }) {
  const others = (query.with ?? "").split(",").filter(Boolean);
  const config = useData(`runs/${encodeURIComponent(run)}/config`);
  const differences = useData("config-differences", { run: [run, ...others] });
  const columns = others.length ? [run, ...others] : [run, "default"];
  const text = (value) => typeof value === "string" && value ? value : JSON.stringify(value);
  return html`
    ${!isExport && html`<${Card} title=${others.length ? "Differences" : "Changed from the defaults"}><${Loaded} use=${differences}>${(rows) => html`<div class="table"><table>
      <thead><tr><th>setting</th>${columns.map((name) => html`<th>${name}</th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`<tr><td class="mono">${row.key}</td>${columns.map((name) => html`<td class="mono">${text(row.values[name])}</td>`)}</tr>`)}</tbody></table></div>`}<//><//>`}
    <${Card} title="Full config"><${Loaded} use=${config}>${(data) => html`<div class="table"><table><tbody>${flat(data).map(([key, value]) => html`<tr><td class="mono">${key}</td><td class="mono">${text(value)}</td></tr>`)}</tbody></table></div>`}<//><//>`;
}

const flat = (value, prefix = "") => value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length
  ? Object.entries(value).flatMap(([key, item]) => flat(item, prefix ? `${prefix}.${key}` : key)) : [[prefix, value]];
