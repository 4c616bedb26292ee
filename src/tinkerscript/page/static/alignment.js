// Token alignment over time, and each finding with its episodes.

import { html } from "./vendor/preact.js";
import { Chart } from "./chart.js";
import { useData } from "./data.js";
import { number } from "./format.js";
import { Card, Empty, Episodes, Loaded } from "./parts.js";
import { Link } from "./route.js";

const NAMES = {
  "alignment/max_abs_dlogp": "largest |Δ logprob| at policy lag 0", "alignment/mean_abs_dlogp": "mean |Δ logprob| at policy lag 0", "alignment/effective_sample_size": "effective sample size (1: no mismatch)",
  "alignment/k1": "KL estimate k1", "alignment/k3": "KL estimate k3", "alignment/tokens_trained": "tokens trained", "alignment/sequences_per_episode": "sequences per episode",
};

export function AlignmentPlace({ run }) {
  const use = useData(`runs/${encodeURIComponent(run)}/alignment`, {}, { live: true });
  return html`<${Loaded} use=${use}>${(data) => html`
    <${Card} title="Token alignment" more="the trainer recomputes the log probability of every sampled token">
      ${data.kinds.length > 0 && html`<p>${data.kinds.every((kind) => kind.kind === "warning") ? "Every sequence is exactly what was sampled. Some are unusual:" : "Some sequences differ from what was sampled:"}</p>`}
      ${data.kinds.length ? html`<div class="table"><table><thead><tr><th>kind</th><th>name</th><th class="number">count</th><th class="number">steps</th><th>meaning</th></tr></thead><tbody>
        ${data.kinds.map((kind) => html`<tr><td><span class=${`chip ${kind.kind === "warning" ? "warn" : "bad"}`}>${kind.kind}</span></td>
          <td><${Link} to=${["run", run, "alignment", kind.kind, kind.name]}>${kind.name}<//></td><td class="number">${number(kind.count)}</td>
          <td class="number">${kind.steps === 1 ? kind.first_step : `${kind.first_step} to ${kind.last_step}`}</td><td>${kind.meaning}</td></tr>`)}</tbody></table></div>`
        : html`<${Empty} title="Clean">So far, every sequence is exactly what was sampled.<//>`}
    <//>
    <div class="grid">${Object.entries(data.curves).map(([name, curve]) => html`<div class="span-4"><${Card} title=${NAMES[name] ?? name}><${Chart} lines=${[{ label: (NAMES[name] ?? name).split(" at policy")[0].split(" (")[0], curve }]} label=${NAMES[name] ?? name} /><//></div>`)}</div>`}<//>`;
}

export function FindingPlace({ run, kind, name }) {
  const use = useData(`runs/${encodeURIComponent(run)}/alignment/${kind}/${encodeURIComponent(name)}`);
  return html`<${Card} title=${`${kind}: ${name}`} more=${html`<${Link} to=${["run", run, "alignment"]}>all findings<//>`}><${Loaded} use=${use}>${({ found }) => {
    const episodes = found.filter((each) => each.episode), steps = found.filter((each) => !each.episode);
    return html`<div class="stack">${steps.map((each) => html`<p><${Link} to=${["run", run, "steps", String(each.step)]}>step ${each.step}<//>: ${each.detail}</p>`)}
      ${episodes.length > 0 && html`<${Episodes} episodes=${episodes.map((each) => each.episode)} run=${run} />`}</div>`;
  }}<//><//>`;
}
