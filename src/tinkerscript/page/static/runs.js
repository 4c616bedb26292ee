// The list of runs.

import { html, useState } from "./vendor/preact.js";
import { useData } from "./data.js";
import { ago, score } from "./format.js";
import { Card, Empty, Loaded, State } from "./parts.js";
import { go, Link } from "./route.js";

export function RunList() {
  const use = useData("runs");
  const [chosen, setChosen] = useState([]);
  const toggle = (name) => setChosen(chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name]);
  return html`<${Card} title="Runs" more=${chosen.length > 1 && html`<button onClick=${() => go(["run", chosen[0], "curves"], { with: chosen.slice(1).join(",") })}>Compare ${chosen.length} runs</button>`}>
    <${Loaded} use=${use}>${({ runs }) => runs.length ? html`<div class="table"><table>
      <thead><tr><th><span class="quiet">compare</span></th><th>run</th><th>state</th><th class="number">step</th><th class="number">held out</th><th class="number">reward</th><th class="hide-narrow">task</th><th class="hide-narrow">began</th></tr></thead>
      <tbody>${runs.map((run) => html`<tr key=${run.name}>
        <td><input type="checkbox" aria-label=${`Compare ${run.name}`} checked=${chosen.includes(run.name)} onChange=${() => toggle(run.name)} /></td>
        <td><${Link} to=${["run", run.name]}>${run.name}<//></td><td><${State} state=${run.state} /></td>
        <td class="number">${run.step} / ${run.steps}</td>
        <td class="number">${score(run.score_before)} → ${score(run.score)}</td><td class="number">${score(run.reward)}</td>
        <td class="hide-narrow">${run.tasks.map((task) => task.split("/").pop()).join(", ")}</td><td class="nowrap hide-narrow quiet">${ago(run.began)}</td>
      </tr>`)}</tbody></table></div>` : html`<${Empty} title="No run here yet">A run appears as soon as it starts. This page looks again by itself.<//>`}<//>
  <//>`;
}
