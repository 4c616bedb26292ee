// Training steps: the list, and one step with its groups as rows of rewards.

import { html } from "./vendor/preact.js";
import { isExport } from "./api.js";
import { diverging } from "./colors.js";
import { useData, usePages } from "./data.js";
import { clock, compact, count, number, percent, score, short } from "./format.js";
import { Card, Empty, Failed, Histogram, Loaded, More, outcomeText, Tabs, Time } from "./parts.js";
import { Rows } from "./near.js";
import { Link } from "./route.js";

export function StepsPlace({ run }) {
  const pages = usePages(`runs/${encodeURIComponent(run)}/steps`, {}, "steps", "before", { live: true });
  return html`<${Card} title="Steps">
    ${pages.error && html`<${Failed} error=${pages.error} />`}
    ${!pages.items.length && !pages.loading && !pages.error && html`<${Empty} title="No step has ended yet">The first step appears here once its batch has trained.<//>`}
    ${pages.items.length > 0 && html`<div class="table"><table>
      <thead><tr><th>step</th><th class="number">mean reward</th><th class="number">episodes</th><th class="number">failed</th><th class="number">trained</th><th class="number hide-narrow">policy version</th><th class="number hide-narrow">largest lag</th><th>ended</th></tr></thead>
      <${Rows} items=${pages.items} columns=${8} row=${(line) => html`<tr key=${line.step}>
        <td><${Link} to=${["run", run, "steps", String(line.step)]}>step ${line.step}<//>${line.stopped && html` <span class="small bad">stopped: ${line.stopped}</span>`}</td>
        <td class="number">${score(line.reward)}</td><td class="number">${line.accepted}</td>
        <td class=${`number ${line.failed ? "bad" : ""}`}>${line.failed}</td><td class="number">${line.trained}</td>
        <td class="number hide-narrow">${line.policy_version}</td><td class="number hide-narrow">${line.max_lag ?? "–"}</td>
        <td class="nowrap quiet"><${Time} at=${line.time} /></td></tr>`} /></table></div>`}
    <${More} more=${pages.more} loading=${pages.loading} />
  <//>`;
}

const FILTERS = [["all", "all groups"], ["failed", "with failures"], ["truncated", "cut off"], ["all_equal", "all rewards equal"], ["best", "best first"], ["worst", "worst first"]];

export function StepPlace({ run, step, query }) {
  const show = query.show ?? "all";
  const use = useData(`runs/${encodeURIComponent(run)}/steps/${step}`, { show: show === "all" ? "" : show });
  const pages = usePages(`runs/${encodeURIComponent(run)}/steps/${step}`, { show: show === "all" ? "" : show }, "groups", "offset");
  return html`<${Loaded} use=${use} rows=${8}>${(data) => html`
    <div class="row between"><h1>Step ${step}</h1><div class="row">
      ${data.previous_step !== null && html`<${Link} to=${["run", run, "steps", String(data.previous_step)]} query=${query} rel="prev">← step ${data.previous_step}<//>`}
      ${data.next_step !== null && html`<${Link} to=${["run", run, "steps", String(data.next_step)]} query=${query} rel="next">step ${data.next_step} →<//>`}</div></div>
    <div class="grid">
      <${Card} class="span-4" title="Rewards"><${Histogram} bins=${data.histogram} /><//>
      <${Card} class="span-8" title="This step"><${Figures} data=${data} /><//>
    </div>
    <${Card} title="Groups" more=${`${data.groups_found} ${show === "all" || show === "best" || show === "worst" ? "in total" : "matching"}`}>
      <div class="stack">
        ${!isExport && html`<${Tabs} label="Which groups" choices=${FILTERS} chosen=${show} to=${["run", run, "steps", step]} name="show" />`}
        <p class="small quiet">Each box is an episode: its reward, and its advantage below. Blue is above its group's mean, orange below; dashed boxes failed.</p>
        ${data.groups.length ? html`<${Groups} groups=${pages.items.length ? pages.items : data.groups} run=${run} />` : html`<${Empty} title="No matching group in this step">Choose another filter.<//>`}
        ${data.undone > 0 && html`<p class="small quiet">Not shown: ${count(data.undone, "episode")} of attempts at this step that a resumed run has undone${isExport ? "" : html` (<${Link} to=${["run", run, "episodes"]} query=${{ q: `step=${step} undone>0` }}>show<//>`}${isExport ? "." : ")."}</p>`}
        <${More} more=${pages.more} />
      </div>
    <//>
    <details class="card"><summary>All ${Object.keys(data.metrics).length} metrics of this step</summary><div class="table"><table><tbody>
      ${Object.entries(data.metrics).sort(([a], [b]) => a.localeCompare(b)).map(([name, value]) => html`<tr><td class="mono">${name}</td><td class="number">${number(value)}</td></tr>`)}</tbody></table></div></details>`}<//>`;
}

function Figures({ data }) {
  const m = data.metrics;
  const facts = [
    ["mean reward", score(m["reward/mean"] ?? null)], ["episodes", `${data.line.accepted} accepted, ${data.line.failed} failed`],
    ["trained on", `${data.line.trained} episodes, ${compact(m["alignment/tokens_trained"] ?? 0)} tokens`],
    ["groups", `${number(m["groups/trained"])} trained, ${number(m["groups/same_reward"])} without signal, ${number(m["groups/dropped"])} dropped`],
    ["policy lag", data.line.max_lag === null ? "–" : `at most ${data.line.max_lag} steps`], ["replies cut off", percent(m["response_tokens/cut_off"])],
    ["entropy", m["train/entropy"] === undefined ? "not recorded" : `${number(m["train/entropy"])} nats per token`],
    ["ratio clipped", m["train/clip_fraction"] === undefined ? "–" : `${percent(m["train/clip_fraction"])} of tokens`],
    ["trainer–sampler mismatch", m["alignment/max_abs_dlogp"] === undefined ? "–" : `max |Δ logprob| ${m["alignment/max_abs_dlogp"].toExponential(1)}`],
    ...(data.line.stopped ? [["stopped", `it changed no weights and ended the run: ${data.line.stopped}`]] : []),
    ["time", `${number(m["time/rollout_s"])} s rollouts, ${number(m["time/train_s"])} s training`], ["ended", clock(data.line.time)],
  ];
  return html`<dl class="facts">${facts.map(([name, text]) => html`<dt>${name}</dt><dd>${text}</dd>`)}</dl>`;
}

const BLOCK = 8, GROUP_PX = 60;

function Groups({ groups, run }) {
  return html`<div class="table"><table>
    <thead><tr><th>group</th><th class="number">mean</th><th>episodes</th></tr></thead>
    <${Rows} items=${groups} columns=${3} block=${BLOCK} px=${GROUP_PX} row=${(group) => html`<tr key=${group.group_id}>
      <td class="nowrap">${group.sample === null ? group.group_id : html`<${Link} to=${["run", run, "samples", String(group.sample)]} title="This sample over the policy's versions">${group.group_id.split("/").pop()}<//>`}</td>
      <td class="number">${score(group.mean_reward)}</td>
      <td><${GroupCells} episodes=${group.episodes} /></td></tr>`} /></table></div>`;
}

export function GroupCells({ episodes, here }) {
  const limit = Math.max(0.001, ...episodes.map((line) => Math.abs(line.advantage ?? 0)));
  return html`<div class="cells">${episodes.map((line) => html`<${Link} to=${["episode", line.uuid]} class=${`cell ${line.status === "accepted" ? "" : "failed"} ${line.uuid === here ? "here" : ""}`}
    aria-current=${line.uuid === here ? "true" : null} style=${{ background: diverging(line.advantage, limit) }}
    title=${`${short(line.uuid)}: ${line.preview}${line.outcome ? `\n${outcomeText(line.outcome)}` : ""}`}>
    ${line.status === "accepted" ? number(line.reward) : "✕"}<small>${line.status !== "accepted" ? "failed" : line.advantage === null ? " " : `${line.advantage > 0 ? "+" : ""}${Number(line.advantage.toPrecision(2))}`}</small><//>`)}</div>`;
}
