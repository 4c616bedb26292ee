// One episode: its conversation, its scores, and how training used its tokens.

import { html, useState } from "./vendor/preact.js";
import { isExport } from "./api.js";
import { Conversation, queued } from "./conversation.js";
import { useData } from "./data.js";
import { clock, count, number, short } from "./format.js";
import { Card, Empty, forWhat, Loaded, outcomeText, UNDONE, Undone } from "./parts.js";
import { adjust, Link, place } from "./route.js";
import { GroupCells } from "./steps.js";
import { COLORS, TokenView } from "./tokens.js";
import { Transcript } from "./transcript.js";

export function EpisodePlace({ uuid, query }) {
  const use = useData(`episodes/${uuid}`);
  return html`<${Loaded} use=${use} rows=${10}>${(data) => html`<${Screen} data=${data} query=${query} />`}<//>`;
}

function Screen({ data, query }) {
  const { line } = data;
  const here = (change) => adjust(["episode", line.uuid], { ...query, ...change });
  return html`
    <div class="row between">
      <h1>Episode <span class="mono">${short(line.uuid)}</span></h1>
      <div class="row">${data.previous && html`<${Link} to=${["episode", data.previous]} rel="prev">← previous<//>`}${data.next && html`<${Link} to=${["episode", data.next]} rel="next">next →<//>`}</div>
    </div>
    <div class="grid">
      <div class="span-4 stack places"><${Facts} data=${data} /><${Scores} data=${data} /></div>
      <div class="span-8 stack places"><${Siblings} data=${data} query=${query} /><${Talk} data=${data} /></div>
    </div>
    ${data.attempts.length > 0 && html`<${Attempts} data=${data} />`}
    ${data.transcripts.length > 0 && !isExport && html`<${Transcript} key=${line.uuid} data=${data} />`}
    ${data.sequences.length > 0 && html`<${Sequences} data=${data} query=${query} here=${here} />`}`;
}

function Facts({ data }) {
  const { line } = data;
  const facts = [
    ["reward", line.status === "accepted" ? html`<strong>${number(line.reward)}</strong>${line.is_success === null ? "" : line.is_success ? " (success)" : " (no success)"}` : html`<strong class="bad">${line.status}</strong>`],
    ["for", html`${forWhat(line, data.run)}${line.sample !== null && html`, <${Link} to=${["run", data.run, "samples", String(line.sample)]}>sample ${data.sample_id || line.sample.slice(0, 8)}<//>`}`],
    ["training", line.type === "eval" ? "evaluations do not train" : line.status !== "accepted" ? "none: it has no reward" : data.uses.map((use) => `step ${use.step}: ${outcomeText(use.outcome)}${use.reason && ` (${use.reason})`}${use.advantage === null ? "" : `, advantage ${number(use.advantage)}`}`).join("; ") || "no step has used it yet"],
    ["tokens", `${number(line.sampled_tokens)} sampled in ${count(line.calls, "call")}, ${number(line.prompt_tokens)} in prompts`],
    ["policy", line.first_version === null ? "–" : line.first_version === line.last_version ? `version ${line.first_version}` : `versions ${line.first_version} to ${line.last_version}`],
    ["client", html`<span class="mono">${line.client || "–"}</span>, attempt ${line.attempt}`], ["ended", clock(line.ended)], ["uuid", html`<span class="mono small">${line.uuid}</span>`],
  ];
  if (line.undone !== null) facts.splice(2, 0, ["undone", html`<${Undone} /> ${UNDONE}`]);
  if (line.truncated) facts.splice(1, 0, ["cut off", html`<span class="warn">${count(line.truncated, "reply", "replies")} reached the token limit</span>`]);
  return html`<${Card} title="Episode" more=${html`<${Link} to=${["run", data.run]}>${data.run}<//>`}><dl class="facts">${facts.map(([name, text]) => html`<dt>${name}</dt><dd>${text}</dd>`)}</dl><//>`;
}

function Scores({ data }) {
  const { line } = data;
  const own = Object.entries(data.metrics).filter(([name]) => !name.startsWith("score/"));
  return html`<${Card} title="Scores"><div class="stack">
    ${data.verdict && html`<div><div class="row"><strong>judge of its group</strong><span>${data.verdict.reward === null ? html`<span class="warn">failed</span>` : number(data.verdict.reward)}</span></div>
      ${data.verdict.words && html`<div class="small">${data.verdict.words}</div>`}</div>`}
    ${data.scores.length ? data.scores.map((found) => html`<div><div class="row"><strong>${found.name}</strong><span>${typeof found.value === "number" ? number(found.value) : JSON.stringify(found.value)}</span></div>
      ${found.answer !== null && html`<div class="small"><span class="quiet">answer</span> <code>${found.answer}</code></div>`}${found.explanation && html`<details open=${found.explanation.length < 300}><summary>explanation</summary><pre class="small">${found.explanation}</pre></details>`}</div>`)
      : html`<p class="quiet">${data.is_chat ? "Chats have no scores." : line.status === "accepted" ? "The program reported a reward without named scores." : "It ended without a reward."}</p>`}
    ${data.target !== null && data.target !== undefined && html`<div class="small"><span class="quiet">target</span> <code>${typeof data.target === "string" ? data.target : JSON.stringify(data.target)}</code></div>`}
    ${own.length > 0 && html`<dl class="facts small">${own.map(([name, value]) => html`<dt>${name}</dt><dd>${number(value)}</dd>`)}</dl>`}
    ${Object.keys(data.metadata).length > 0 && html`<details class="small"><summary>metadata</summary><pre class="mono">${JSON.stringify(data.metadata, null, 2)}</pre></details>`}
  </div><//>`;
}

function Siblings({ data }) {
  const [open, setOpen] = useState(false);
  if (data.siblings.length < 2 || data.is_chat) return null;
  return html`<${Card} class="siblings" title="Group" more=${html`<button onClick=${() => setOpen(!open)} aria-expanded=${open}>${open ? "Hide replies" : "Replies side by side"}</button>`}>
    <div class="stack"><${GroupCells} episodes=${data.siblings} here=${data.line.uuid} />
    ${open && html`<div class="grid">${data.siblings.map((line) => html`<div class="span-3 card"><div class="row between"><${Link} to=${["episode", line.uuid]} class="mono">${short(line.uuid)}<//><span>${line.status === "accepted" ? number(line.reward) : line.status}</span></div><pre class="small">${line.preview}</pre></div>`)}</div>`}</div>
  <//>`;
}

function Talk({ data }) {
  const { line } = data;
  return html`${!data.recorded && line.status === "failed" && html`<div class="banner bad">${line.preview || "It failed without a reason."}</div>`}<${Card} title="Conversation" more=${data.is_chat ? "" : count(data.turns.length, "call")}>
    ${data.is_chat ? html`<${Empty} title="A chat of supervised fine-tuning">Its tokens are below; those that train are underlined.<//>` : data.turns.length ? html`${data.queued_s !== null && html`<p class="small quiet wait">It waited in the queue for ${queued(data)}.</p>`}<${Conversation} turns=${data.turns} sequences=${data.sequences.length} />`
      : html`<${Empty} title=${data.recorded ? "No attempt succeeded" : "Not recorded"}>${data.recorded ? "Its attempts, with what they sampled, are below." : "Its calls were dropped to keep the ledger small (recording_limit_mb)."}<//>`}
  <//>`;
}

function Attempts({ data }) {
  return html`<${Card} title="Failed attempts" more="they never train"><div class="stack">${data.attempts.map((attempt) => html`<details open=${data.turns.length === 0}>
    <summary>attempt ${attempt.attempt}: <span class="bad">${attempt.kind}</span></summary><div class="stack"><pre>${attempt.message}</pre><p class="small quiet">by <span class="mono">${attempt.client || "–"}</span></p>
    ${attempt.turns.length ? html`<${Conversation} turns=${attempt.turns} sequences=${0} />` : html`<p class="small quiet">It made no call, or its calls are not recorded.</p>`}</div></details>`)}</div><//>`;
}

function Sequences({ data, query, here }) {
  const number_ = Math.min(data.sequences.length - 1, Number(query.sequence ?? 0) || 0);
  const sequence = data.sequences[number_];
  const color = COLORS.some(([name]) => name === query.color) ? query.color : "advantage";
  const range = /^\d+-\d+$/.test(query.tokens ?? "") ? query.tokens.split("-").map(Number) : null;
  const link = location.href.replace(/#.*/, "") + place(["episode", data.line.uuid], query);
  return html`<${Card} title="Training sequences" more=${`${data.sequences.length} in this episode`}><div class="stack">
    ${data.sequences.length > 1 && html`<div class="table"><table><thead><tr><th>sequence</th><th class="number">tokens</th><th class="number">sampled</th><th class="number">trained</th><th>forks from</th></tr></thead><tbody>
      ${data.sequences.map((each) => html`<tr><td><${Link} to=${["episode", data.line.uuid]} query=${{ ...query, sequence: each.number || "", tokens: "" }} aria-current=${each.number === number_ ? "true" : null}>sequence ${each.number + 1}${each.role && `, role ${each.role}`}${each.number === number_ ? " (shown)" : ""}<//></td>
        <td class="number">${number(each.tokens)}</td><td class="number">${number(each.sampled)}</td><td class="number">${number(each.trained)}</td>
        <td>${each.parent === null ? "–" : `sequence ${each.parent + 1} after ${count(each.fork, "token")}`}${each.fork_reason ? `: ${each.fork_reason}` : ""}</td></tr>`)}</tbody></table></div>`}
    <div class="row"><span class="quiet">color by</span><div class="tabs" role="group" aria-label="Color tokens by">${COLORS.map(([name, text]) => html`<a href=${place(["episode", data.line.uuid], { ...query, color: name === "advantage" ? "" : name })} onClick=${(event) => { event.preventDefault(); here({ color: name === "advantage" ? "" : name }); }} aria-current=${name === color ? "true" : null}>${text}</a>`)}</div>
      ${range && html`<span class="chip">tokens ${range[0]} to ${range[1] - 1} <button onClick=${() => navigator.clipboard?.writeText(link)}>Copy link</button><button onClick=${() => here({ tokens: "" })} aria-label="Clear selection">✕</button></span>`}</div>
    ${sequence.reason && html`<div class="banner">This sequence did not train: ${outcomeText(sequence.reason)}</div>`}
    <${TokenView} uuid=${data.line.uuid} sequence=${sequence} color=${color} range=${range} onRange=${([start, end]) => here({ tokens: `${start}-${end}` })} />
  </div><//>`;
}
