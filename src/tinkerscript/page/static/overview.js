// The first screen of a run: progress, score, learning curve, health, messages.

import { html, useContext, useEffect, useState } from "./vendor/preact.js";
import { Annotation, AnnotationForm } from "./annotation.js";
import { isExport } from "./api.js";
import { Chart } from "./chart.js";
import { phases, PHASES } from "./curves.js";
import { Live, useData } from "./data.js";
import { ago, count, duration, score } from "./format.js";
import { Card, Empty, Episodes, Loaded, Meter, Time } from "./parts.js";
import { Link } from "./route.js";

export function Overview({ run }) {
  const live = useContext(Live);
  const asked = useData(`runs/${encodeURIComponent(run)}`, {});
  const use = live.run ? { ...asked, data: live.run, error: null } : asked;
  return html`<${Loaded} use=${use} rows=${8}>${(data) => html`<${Screen} data=${data} />`}<//>`;
}

function Screen({ data }) {
  return html`<div class="grid">
    <div class="span-4 stack places"><${Progress} data=${data} /><${Score} data=${data} /></div>
    <div class="span-8"><${Learning} data=${data} /></div>
    <div class="span-5 stack places"><${Health} data=${data} /><${Notes} data=${data} /></div>
    <div class="span-7 stack places"><${Times} data=${data} /><${Written} key=${data.name} data=${data} /><${Next} data=${data} /><${Newest} data=${data} /></div>
  </div>`;
}

function Newest({ data }) {
  return html`<${Card} title="Newest rollouts" more=${html`<${Link} to=${["run", data.name, "episodes"]}>all ${data.episodes.toLocaleString("en-US")}<//>`}>
      ${data.newest.length ? html`<${Episodes} episodes=${data.newest} run=${data.name} />`
        : html`<${Empty} title="No episode has ended yet">${data.state === "running" ? "Episodes appear here as they end." : `The run ${data.state} before an episode ended.`}<//>`}
  <//>`;
}

function Progress({ data }) {
  const doing = data.phase ? `${data.phase.label}: ${data.phase.done} of ${data.phase.total || "?"} episodes` : "";
  return html`<${Card} title="Progress">
    <div class="stack">
      <div class="big">${data.step.toLocaleString("en-US")} <span class="unit">of ${data.steps.toLocaleString("en-US")} steps</span></div>
      <${Meter} done=${data.step} total=${data.steps} label="Steps done" />
      <dl class="facts">
        ${data.state === "running" && data.step < data.steps && html`<dt>time left</dt><dd>${data.time_left_s !== null ? `about ${duration(data.time_left_s)}` : data.step < 2 ? "known after two steps" : "unknown"}</dd>`}
        <dt>${data.state === "running" ? "now" : data.state === "finished" ? "finished" : "last update"}</dt>
        <dd>${data.state === "running"
          ? data.waiting ? html`waiting for ${data.waiting.what} (${duration(Date.now() / 1000 - data.waiting.since)})` : doing || "between steps"
          : html`<${Time} at=${data.updated} />`}</dd>
        <dt>${data.state === "running" ? "running for" : "took"}</dt><dd>${duration((data.state === "running" ? Date.now() / 1000 : data.updated) - data.began)}</dd>
        <dt>model</dt><dd>${data.model}${data.policy_version === null ? "" : `, policy version ${data.policy_version}`}</dd>
        ${data.tasks.length > 0 && html`<dt>${data.tasks.length > 1 ? "tasks" : "task"}</dt><dd>${data.tasks.map((task) => task.split("/").pop()).join(", ")}</dd>`}
      </dl>
      ${data.failure && html`<div class="banner bad">${data.failure}</div>`}
    </div>
  <//>`;
}

function Score({ data }) {
  const first = data.evaluations[0], last = data.evaluations[data.evaluations.length - 1];
  if (!first) {
    return data.method === "sft" ? null : html`<${Card} title="Held-out score"><${Empty} title=${data.state === "running" ? "Not evaluated yet" : `The run ${data.state} before an evaluation`}>${data.state === "running" ? "Scores of held-out samples appear here." : data.failure ? "The reason is above." : "The run's messages may say why."}<//><//>`;
  }
  const gain = last === first || first.score === null || last.score === null ? null : last.score - first.score;
  return html`<${Card} title="Held-out score" more=${html`<${Link} to=${["run", data.name, "evaluations"]}>sample by sample<//>`}>
    <div class="row between">
      <div class="big">${gain === null ? score(last.score) : html`${score(first.score)} <span class="unit">→</span> ${score(last.score)}`}</div>
      ${gain !== null && html`<span class=${`chip ${gain > 0 ? "good" : gain < 0 ? "bad" : ""}`}>${gain > 0 ? "▲ +" : gain < 0 ? "▼ −" : "± "}${Math.abs(gain).toFixed(3)}${data.gain && html`<span title=${`95% interval of the mean change of ${count(data.gain.samples, "sample")}`}> ± ${data.gain.margin.toFixed(3)}</span>`}</span>`}
    </div>
    <p class="small quiet">${gain !== null && html`before training: ${scored(first)} → `}${last.step ? `after step ${last.step}` : "before training"}: ${scored(last)}</p>
    ${data.pending.map((each) => html`<p class="small quiet"><span class="chip">${each.label}</span> ${data.state === "running" ? "pending" : `was pending as it ${data.state}; a resumed run makes it again`}: ${each.done} of ${count(each.total, "episode")}</p>`)}
  <//>`;
}

const scored = (evaluation) => html`${count(evaluation.accepted, "episode")} scored${evaluation.failed ? html`, <span class="bad">${evaluation.failed} failed</span> and left out` : ""}`;

function Learning({ data }) {
  const sft = data.method === "sft";
  const names = sft ? ["train/nll", "held_out/nll"] : ["reward/mean", "eval/score"];
  const use = useData(`runs/${encodeURIComponent(data.name)}/curves`, { name: names, points: 300 }, { live: true });
  const title = sft ? "Negative log-likelihood" : "Reward";
  return html`<${Card} title=${title} class="learning" more=${html`<${Link} to=${["run", data.name, "curves"]}>all curves<//>`}>
    <${Loaded} use=${use} rows=${9}>${({ curves }) => {
      const [train, held] = names.map((name) => curves[name]);
      const lines = [train && { label: sft ? "training" : "training reward", curve: train }, held && { label: sft ? "held out" : "held-out score", curve: held, dots: true }].filter(Boolean);
      return lines.length ? html`<${Chart} lines=${lines} height=${270} label=${`${title} by step`} />` : html`<${Empty} title="No step has ended yet">The curve starts with the first step.<//>`;
    }}<//>
  <//>`;
}

/** What steps do and wait for, and which key to turn. */
function Times({ data }) {
  const use = useData(`runs/${encodeURIComponent(data.name)}/curves`, { name: PHASES, points: 300 }, { live: true });
  if (!data.times || !use.data?.curves["time/sample_s"]) return null;
  return html`<${Card} title="Where the time goes" more=${html`<${Link} to=${["run", data.name, "curves"]} query=${{ find: "time/" }}>its curves<//>`}>
    <p class="small">${data.times.words} <span class="quiet">Seconds of each step:</span></p>
    <${Chart} lines=${phases(use.data.curves)} stacked label="Seconds of each step, by what it does or waits for" />
  <//>`;
}

const curve = (names) => [["curves"], { m: names }];

/** Where each row of the health table links to. */
const LEADS_TO = {
  held_out: [["evaluations"]], reward: curve("reward/mean"), trained: curve("train/sequences"),
  equal: curve("groups/same_reward,groups/trained,groups/dropped"), cut_off: [["episodes"], { show: "truncated" }],
  length: curve("response_tokens/mean"), failed: [["episodes"], { show: "failed" }], stale: curve("episodes/stale"), waits: curve("time/wait_stale_s"),
  mismatch: [["alignment"]], entropy: curve("train/entropy"), gradients: curve("train/grad_norm"), rate: curve("train/kl_step"),
};

function Health({ data }) {
  const { health: h, name } = data;
  if (data.method === "sft") return html`<${Card} title="Health"><p class="quiet">Supervised training has no episodes.</p><//>`;
  const worst = ["bad", "warn"].find((kind) => h.rows.some((row) => row.kind === kind)) ?? "good";
  const named = h.rows.filter((row) => row.kind === worst).map((row) => row.label.toLowerCase());
  const verdict = h.verdict.split(":")[0] + (worst === "good" ? "" : `: ${named.length > 1 ? `${named.length} rows` : named[0]}`);
  const chip = h.rows.length ? html`<span class=${`chip ${worst}`}><span class="dot"></span>${verdict}</span>` : html`<span class="chip">${verdict}</span>`;
  return html`<${Card} title="Health" more=${chip}>
    <div class="table"><table><tbody>${h.rows.map((row) => html`<tr>
      <td><${Link} to=${["run", name, ...LEADS_TO[row.name][0]]} query=${LEADS_TO[row.name][1] ?? {}}>${row.label}<//><div class="small quiet">${row.meaning}</div>
        ${row.words && html`<div class=${`small ${row.kind}`}>${row.words}</div>`}</td>
      <td class="number"><span class=${row.kind === "good" ? "" : row.kind}>${row.kind !== "good" && html`<span aria-hidden="true">${row.kind === "bad" ? "✕ " : "! "}</span>`}${row.value}</span></td></tr>`)}</tbody></table></div>
    ${h.failures.length > 0 && html`<div class="stack small why"><h3>Why episodes failed</h3>${h.failures.slice(0, 4).map((failure) => html`<div class="row">
      <span class="chip bad">${failure.count} × ${failure.kind}</span>
      ${failure.example && html`<${Link} to=${["episode", failure.example.uuid]}>${failure.example.preview || "the newest"}<//>`}</div>`)}</div>`}
  <//>`;
}

/** Next steps for a run that has ended. */
function Next({ data }) {
  if (data.state === "running" || isExport) return null;
  const log = html`<code>${data.folder}/logs</code>`;
  if (data.state === "failed") return html`<${Card} title="What next"><p>The logs in ${log} say more about the failure. To resume the run:</p><code class="command">tinkerscript train --resume ${data.folder}</code><//>`;
  if (data.state === "stopped") return html`<${Card} title="What next"><p>The run stopped before its end; the logs are in ${log}. To resume it:</p><code class="command">tinkerscript train --resume ${data.folder}</code><//>`;
  return html`<${Card} title="What next"><ul class="next">
    ${data.evaluations.length > 1 && html`<li><${Link} to=${["run", data.name, "evaluations"]}>Compare the evaluations<//>: which samples got better, which got worse</li>`}
    <li>Serve it to any OpenAI client, for example to chat with it:<code class="command">tinkerscript serve --checkpoint ${data.folder}/checkpoints/final</code></li>
  </ul><//>`;
}

function Written({ data }) {
  const [edits, setEdits] = useState(false);
  const [saved, setSaved] = useState(null);  // Shown until the next event has it.
  useEffect(() => setSaved(null), [data.note, data.tags.join()]);
  const run = { ...data, ...saved }, empty = !run.note && !run.tags.length;
  if (empty && isExport) return null;
  return html`<${Card} title="Note and tags" more=${!edits && !isExport && html`<button onClick=${() => setEdits(true)}>${empty ? "Write" : "Edit"}</button>`}>
    ${edits ? html`<${AnnotationForm} run=${run} done=${(written) => { if (written) setSaved(written); setEdits(false); }} />`
      : empty ? html`<p class="quiet">None yet. They appear in the list of runs, where you can search for them.</p>` : html`<${Annotation} run=${run} />`}
  <//>`;
}

function Notes({ data }) {
  return html`<${Card} title="Messages of the run">
    ${data.notes.length ? html`<div class="stack small">${data.notes.slice(0, 6).map((note) => html`<div class="row"><span class="quiet">${isExport ? "" : ago(note.time)}</span><span style=${{ overflowWrap: "anywhere" }}>${note.text}</span></div>`)}</div>`
      : html`<${Empty} title="None yet">Warnings, restarts and other events of the run appear here.<//>`}
  <//>`;
}
