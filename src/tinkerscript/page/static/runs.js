// The list of runs, filtered by words and sorted by a column, with notes, tags and deletion.

import { html, useState } from "./vendor/preact.js";
import { Annotation, AnnotationForm } from "./annotation.js";
import { post } from "./api.js";
import { useData } from "./data.js";
import { ago, number, score } from "./format.js";
import { Card, Empty, Failed, Loaded, State, useConfirm } from "./parts.js";
import { go, Link } from "./route.js";

const last = (path) => path.split("/").pop();
/** [title, sort key, classes] */
const COLUMNS = [
  ["run", (run) => run.name, ""], ["state", (run) => run.state, ""], ["model", (run) => last(run.model), "hide-narrow"],
  ["rate", (run) => run.learning_rate, "number hide-narrow"], ["step", (run) => run.step, "number hide-narrow"], ["held out", (run) => run.score, "number"],
  ["reward", (run) => run.reward, "number hide-narrow"], ["task", (run) => tasks(run), "hide-narrow"], ["began", (run) => run.began, "hide-narrow"],
];
const tasks = (run) => run.tasks.map(last).join(", ");

function shown(runs, find, [column, down]) {
  const words = find.toLowerCase().split(" ").filter(Boolean);
  const text = (run) => [run.name, run.state, run.model, tasks(run), number(run.learning_rate), ...run.tags, run.note].join(" ").toLowerCase();
  const value = COLUMNS[column][1];
  const rank = (a, b) => a === null ? 1 : b === null ? -1 : (typeof a === "string" ? a.localeCompare(b) : a - b) * (down ? -1 : 1);
  return runs.filter((run) => words.every((word) => text(run).includes(word))).sort((a, b) => rank(value(a), value(b)));
}

export function RunList() {
  const use = useData("runs");
  const [chosen, setChosen] = useState([]);
  const [find, setFind] = useState("");
  const [sort, setSort] = useState([COLUMNS.length - 1, true]);
  const [edited, setEdited] = useState("");
  const [dialog, ask] = useConfirm();
  const [error, setError] = useState(null);
  const remove = async (name) => {
    try {
      await post(`runs/${encodeURIComponent(name)}/delete`, { name });
      setError(null);
      setEdited("");
      setChosen(chosen.filter((each) => each !== name));
    } catch (failed) {
      setError(failed);
    }
    use.again();
  };
  const toggle = (name) => setChosen(chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name]);
  const head = ([title, , kind], at) => html`<th class=${kind} aria-sort=${at === sort[0] ? (sort[1] ? "descending" : "ascending") : null}>
    <button class="plain" onClick=${() => setSort([at, at === sort[0] ? !sort[1] : true])}>${title}${at === sort[0] ? (sort[1] ? " ↓" : " ↑") : ""}</button></th>`;
  const edit = (run) => html`<tr><td></td><td colspan=${COLUMNS.length}><${AnnotationForm} run=${run} done=${() => { setEdited(""); use.again(); }}>
    ${run.state === "running" ? html`<span class="small quiet">It can be deleted once it has stopped.</span>` : html`<button type="button" class="danger" onClick=${() => ask({ title: `Delete ${run.name}?`, text: "Its folder is deleted with all checkpoints, episodes and logs. This cannot be undone.", verb: "Delete", act: () => remove(run.name) })}>Delete the run…</button>`}<//></td></tr>`;
  return html`<${Card} title="Runs" more=${chosen.length > 1 && html`<button onClick=${() => go(["run", chosen[0], "curves"], { with: chosen.slice(1).join(",") })}>Compare ${chosen.length} runs</button>`}>
    <${Loaded} use=${use}>${({ runs }) => runs.length ? html`<div class="search"><input type="search" aria-label="Find runs" placeholder="a name, model, task, rate, state, tag or note" value=${find} onInput=${(event) => setFind(event.target.value)} /></div>
      <div class="table"><table>
      <thead><tr><th><span class="quiet hide-narrow">compare</span></th>${COLUMNS.map(head)}</tr></thead>
      <tbody>${shown(runs, find, sort).flatMap((run) => [html`<tr key=${run.name}>
        <td><input type="checkbox" aria-label=${`Compare ${run.name}`} checked=${chosen.includes(run.name)} onChange=${() => toggle(run.name)} /></td>
        <td class="name"><${Link} to=${["run", run.name]}>${run.name}<//> <button class="plain small quiet" aria-label=${`Edit ${run.name}`} title="Note, tags, deletion" aria-expanded=${edited === run.name} onClick=${() => setEdited(edited === run.name ? "" : run.name)}>✎</button><${Annotation} run=${run} />${run.failure && html`<div class="small bad">${run.failure.slice(0, 200)}</div>`}</td><td><${State} state=${run.state} /></td>
        <td class="hide-narrow" title=${run.model}>${last(run.model)}</td><td class="number hide-narrow">${number(run.learning_rate)}</td><td class="number hide-narrow">${run.step} / ${run.steps}</td>
        <td class="number">${run.score === null ? "–" : html`${run.score_before !== null && html`<span class="hide-narrow">${score(run.score_before)} → </span>`}${score(run.score)}`}</td><td class="number hide-narrow">${score(run.reward)}</td>
        <td class="hide-narrow">${tasks(run)}</td><td class="nowrap hide-narrow quiet">${ago(run.began)}</td>
      </tr>`, edited === run.name && edit(run)])}</tbody></table></div>` : html`<${Empty} title="No runs yet">Runs appear here as soon as they start. A run is shown where its ledger is: on the machine of its server.<//>`}<//>
    ${error && html`<${Failed} error=${error} />`}${dialog}
  <//>`;
}
