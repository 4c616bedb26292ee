// Held-out samples: which got better or worse, and one sample over the policy's versions.

import { html } from "./vendor/preact.js";
import { isExport } from "./api.js";
import { Chart } from "./chart.js";
import { useData, usePages } from "./data.js";
import { count, number, score, signed } from "./format.js";
import { Card, Empty, Episodes, Failed, Loaded, More, Tabs } from "./parts.js";
import { Rows } from "./near.js";
import { adjust, Link } from "./route.js";

export function EvaluationsPlace({ run, query }) {
  const all = useData(`runs/${encodeURIComponent(run)}/evaluations`, {}, { live: true });
  return html`<${Loaded} use=${all}>${(evaluations) => evaluations.length
    ? html`<${Comparison} run=${run} query=${query} evaluations=${evaluations} />`
    : html`<${Card} title="Evaluations"><${Empty} title="Not evaluated yet">Scores of held-out samples appear here (evaluation.episodes in the config).<//><//>`}<//>`;
}

const MOST_CHOICES = 300;

/** The choices of a list: all, or if there are very many, evenly spaced ones with the last and the chosen one. */
function choices(evaluations, chosen) {
  const apart = Math.ceil(evaluations.length / MOST_CHOICES);
  return evaluations.filter((each, at) => at % apart === 0 || at === evaluations.length - 1 || each.label === chosen);
}

const KINDS = [["all", "all samples"], ["better", "better"], ["worse", "worse"], ["same", "unchanged"]];

function Comparison({ run, query, evaluations }) {
  const asked = { before: query.before ?? evaluations[0].label, after: query.after ?? evaluations[evaluations.length - 1].label, show: query.show ?? "" };
  const path = `runs/${encodeURIComponent(run)}/comparison`;
  const use = useData(path, asked);
  const pages = usePages(path, asked, "samples", "offset");
  const choose = (name) => (event) => adjust(["run", run, "evaluations"], { ...query, [name]: event.target.value });
  const select = (name, value) => html`<select value=${value} onChange=${choose(name)} aria-label=${name}>${choices(evaluations, value).map((each) => html`<option value=${each.label} selected=${each.label === value}>${each.label} (step ${each.step})</option>`)}</select>`;
  const curve = { steps: [], mean: [], low: [], high: [] };
  for (const each of evaluations) if (each.score !== null && curve.steps[curve.steps.length - 1] !== each.step) { curve.steps.push(each.step); curve.mean.push(each.score); }
  const best = evaluations.filter((each) => each.score !== null).reduce((top, each) => top && top.score >= each.score ? top : each, null);
  return html`
    <div class="grid">
      <${Card} class="span-7" title="Held-out score">${curve.steps.length ? html`<${Chart} lines=${[{ label: "score", curve, dots: true }]} label="Held-out score by step" />` : html`<${Empty} title="No score">Every episode of the evaluations failed.<//>`}<//>
      <${Card} class="span-5" title="Evaluations"><div class="table"><table>
        <thead><tr><th>evaluation</th><th class="number">after step</th><th class="number">score</th><th class="number">episodes</th><th class="number">failed</th></tr></thead>
        <${Rows} items=${evaluations} columns=${5} row=${(each) => html`<tr><td>${each.label}${each === best && html` <span class="chip good" title=${each.step ? `The best; its weights, if kept, are in checkpoints/${each.label === "after" ? "final" : `step_${String(each.step).padStart(4, "0")}`}` : "The best: no step has improved on the untrained model."}>best</span>`}</td><td class="number">${each.step}</td><td class="number">${score(each.score)}</td><td class="number">${each.accepted}</td><td class=${`number ${each.failed ? "bad" : ""}`}>${each.failed}</td></tr>`} /></table></div><//>
    </div>
    <${Card} title="Sample by sample">
      <div class="stack">
        ${!isExport && html`<div class="row">${select("before", asked.before)} <span>against</span> ${select("after", asked.after)}</div>`}
        <${Loaded} use=${use}>${(data) => html`<div class="stack">
          <div class="row"><span class="chip good">▲ ${data.better} better</span><span class="chip bad">▼ ${data.worse} worse</span><span class="chip">${data.same} unchanged</span>
            ${data.gain && html`<span class="small quiet">mean change ${signed(data.gain.mean)} ± ${number(data.gain.margin)} (95%, ${count(data.gain.samples, "sample")})</span>`}
            ${!isExport && html`<${Tabs} label="Which samples" choices=${KINDS} chosen=${query.show ?? "all"} to=${["run", run, "evaluations"]} query=${query} name="show" />`}</div>
          ${pages.error && html`<${Failed} error=${pages.error} />`}
          ${data.samples.length ? html`<div class="table"><table>
            <thead><tr><th>sample</th><th class="number">${asked.before}</th><th class="number">${asked.after}</th><th class="number">change</th><th>input</th></tr></thead>
            <${Rows} items=${pages.items.length ? pages.items : data.samples} columns=${5} row=${(change) => html`<tr key=${change.sample}>
              <td class="nowrap"><${Link} to=${["run", run, "samples", String(change.sample)]}>${change.id || change.sample.slice(0, 8)}<//></td>
              <td class="number"><${Of} value=${change.before} uuid=${change.before_uuid} /></td><td class="number"><${Of} value=${change.after} uuid=${change.after_uuid} /></td>
              <td class=${`number ${change.change === "better" ? "good" : change.change === "worse" ? "bad" : ""}`}>${change.before === null || change.after === null ? "–" : signed(change.after - change.before)}</td>
              <td class="text" title=${change.input}>${change.input}</td></tr>`} /></table></div>`
            : html`<${Empty} title="No matching sample">Choose another filter.<//>`}
          <${More} more=${pages.more} /></div>`}<//>
      </div>
    <//>`;
}

const Of = ({ value, uuid }) => uuid ? html`<${Link} to=${["episode", uuid]}>${value === null ? "failed" : number(value)}<//>` : "–";

export function SamplePlace({ run, digest: id }) {
  const path = `runs/${encodeURIComponent(run)}/samples/${id}`;
  const use = useData(path, {}, { live: true });
  const pages = usePages(path, {}, "episodes", "before");
  return html`<${Loaded} use=${use}>${(data) => {
    const known = data.versions.filter((each) => each.policy_version !== null && each.mean_reward !== null);
    const means = known.map((each) => each.mean_reward);
    const curve = { steps: known.map((each) => each.policy_version), mean: means, low: means, high: means };
    const { input, target, id: name, ...rest } = data.sample;
    const text = typeof input === "string" ? input : (input ?? []).map((message) => `${message.role}: ${typeof message.content === "string" ? message.content : JSON.stringify(message.content)}`).join("\n\n");
    return html`<h1>Sample ${data.id || data.digest.slice(0, 8)}</h1>
      <div class="grid">
        <${Card} class="span-6" title="The sample"><div class="stack"><pre>${text}</pre>
          <dl class="facts"><dt>target</dt><dd>${typeof target === "string" ? target : JSON.stringify(target ?? null)}</dd><dt>task</dt><dd>${data.task || "–"}</dd></dl>
          ${Object.keys(rest).length > 0 && html`<details><summary>other fields</summary><pre class="mono small">${JSON.stringify(rest, null, 2)}</pre></details>`}</div><//>
        <${Card} class="span-6" title="Mean reward by policy version">${curve.steps.length > 1 ? html`<${Chart} lines=${[{ label: "mean reward", curve, dots: true }]} label="Mean reward by policy version" over="policy version" />`
          : html`<div class="table"><table><thead><tr><th>policy version</th><th class="number">episodes</th><th class="number">mean reward</th></tr></thead><tbody>${data.versions.map((each) => html`<tr><td>${each.policy_version ?? "–"}</td><td class="number">${each.episodes}</td><td class="number">${score(each.mean_reward)}</td></tr>`)}</tbody></table></div>`}<//>
      </div>
      <${Card} title="Episodes" more=${`${data.versions.reduce((sum, each) => sum + each.episodes, 0)} in total`}><div class="stack"><${Episodes} episodes=${pages.items.length ? pages.items : data.episodes} run=${run} /><${More} more=${pages.more} /></div><//>`;
  }}<//>`;
}
