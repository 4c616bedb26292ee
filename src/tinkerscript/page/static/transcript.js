// Inspect's record of an episode, event by event.

import { html, useState } from "./vendor/preact.js";
import { queued } from "./conversation.js";
import { usePages } from "./data.js";
import { count, number } from "./format.js";
import { Card, Empty, Failed, More } from "./parts.js";

const KINDS = { span_begin: "in", sample_init: "sample", model: "model call", tool: "tool", score: "score", store: "store", state: "state", sandbox: "sandbox", error: "error", sample_limit: "limit", info: "info", logger: "log" };
const OPEN_CHARS = 300;

export function Transcript({ data }) {
  const [attempt, setAttempt] = useState(data.transcripts[data.transcripts.length - 1]);
  const [open, setOpen] = useState(false);
  return html`<${Card} title="Inspect's transcript"><div class="stack">
    <div class="row"><button onClick=${() => setOpen(!open)} aria-expanded=${open}>${open ? "Hide the events" : "Show the events"}</button>
      ${data.transcripts.length > 1 && html`<label>attempt <select value=${attempt} onChange=${(event) => setAttempt(Number(event.target.value))}>${data.transcripts.map((each) => html`<option value=${each}>${each}</option>`)}</select></label>`}</div>
    ${open && html`<${Timeline} key=${attempt} uuid=${data.line.uuid} attempt=${attempt} wait=${attempt === data.line.attempt && data.queued_s !== null && queued(data)} />`}
  </div><//>`;
}

function Timeline({ uuid, attempt, wait }) {
  const { items, more, error, loading, data } = usePages(`episodes/${uuid}/transcript`, { attempt }, "events", "offset");
  if (!data) return error ? html`<${Failed} error=${error} />` : html`<div class="skeleton" aria-busy="true" aria-label="Loading">${" "}</div>`;
  if (data.problem) return html`<${Empty} title="Not a valid transcript">It cannot be shown: ${data.problem}<pre class="small">${data.raw}</pre><//>`;
  return html`<div class="stack">
    <p class="small quiet">${count(data.total, "event")}${items.length < data.total ? `, showing the first ${number(items.length)}` : ""}</p>
    <ol class="timeline">${wait && html`<li><span class="kind">queue</span> waited ${wait}</li>`}${items.map((event) => html`<${Event} event=${event} />`)}</ol>
    ${error && html`<${Failed} error=${error} />`}<${More} more=${more} loading=${loading} />
    ${data.store && html`<details class="small"><summary>the store at the end</summary><pre class="code">${data.store}</pre></details>`}
  </div>`;
}

function Event({ event }) {
  const chars = event.parts.reduce((sum, part) => sum + part.text.length, 0);
  const line = html`<span class="kind">${KINDS[event.kind] ?? event.kind}</span> <strong class=${event.failed ? "bad" : ""}>${event.title}</strong>${" "}<span class="small quiet">${event.seconds === null ? "" : `at ${number(event.seconds)} s`}${event.took_s ? `, took ${number(event.took_s)} s` : ""}</span>`;
  return html`<li class=${event.kind === "span_begin" ? "quiet" : ""} style=${{ marginLeft: `${12 * event.depth}px` }}>
    ${event.parts.length ? html`<details open=${event.failed || (event.kind !== "state" && chars < OPEN_CHARS)}><summary>${line}</summary>${event.parts.map((part) => html`<div>${part.label && html`<div class="small quiet">${part.label}</div>`}<pre class="small">${part.text}</pre></div>`)}</details>` : line}
  </li>`;
}
