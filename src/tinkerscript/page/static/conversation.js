// A conversation turn by turn, with tools, reasoning and long texts folded.

import { html, useState } from "./vendor/preact.js";
import { duration, number } from "./format.js";

const LONG = 3000;
const CALLS = 40;

/** How long an episode waited for the claim that counts. */
export const queued = ({ queued_s: seconds, line }) => `${seconds < 10 ? `${seconds.toFixed(1)} s` : duration(seconds)} until ${line.client || "a client"} claimed it`;

export function Conversation({ turns, sequences }) {
  const [all, setAll] = useState(turns.length <= CALLS + 10);
  const shown = all ? turns : turns.slice(0, CALLS);
  return html`<div class="turns">${shown.map((turn, at) => html`<${Turn} key=${turn.call_id} turn=${turn} forked=${turn.sequence !== null && at > 0 && turn.fork_reason} sequences=${sequences} tools=${turn.tools} after=${turn.created - turns[0].created} />`)}
    ${!all && html`<button onClick=${() => setAll(true)}>Show the other ${turns.length - CALLS} calls</button>`}</div>`;
}

function Turn({ turn, forked, sequences, tools, after }) {
  return html`
    ${forked && html`<div class="fork">The conversation forks here, into sequence ${turn.sequence + 1} of ${sequences}: ${turn.fork_reason}</div>`}
    ${tools.length > 0 && html`<details class="small"><summary>${tools.length === 1 ? "1 tool" : `${tools.length} tools`}: ${tools.map((tool) => tool.function?.name ?? tool.name ?? "?").join(", ")}</summary><pre class="mono">${JSON.stringify(tools, null, 2)}</pre></details>`}
    ${turn.messages.map((message) => html`<${Message} message=${message} />`)}
    <${Message} message=${{ role: "assistant", ...turn.reply }} facts=${facts(turn, after)} />`;
}

const facts = (turn, after) => [
  after > 0 && `asked ${duration(after)} after the first`,
  turn.role && `by the role ${turn.role}${turn.policy_version < 0 ? ", does not train" : ""}`, `${turn.sampled_tokens} tokens`, turn.reward === null ? "" : `earned ${number(turn.reward)}`, turn.policy_version < 0 ? "" : `policy version ${turn.policy_version}${turn.policy_version_end === null ? "" : ` to ${turn.policy_version_end}`}`,
  turn.mean_logprob === null ? "" : `mean logprob ${number(turn.mean_logprob)}`, turn.stop_reason === "length" ? "cut off by the token limit" : "", turn.temperature === 1 ? "" : `temperature ${turn.temperature}`,
  turn.side ? "a side call" : "", turn.ignored.length ? `ignored: ${turn.ignored.join(", ")}` : "",
].filter(Boolean).join(" · ");

function Message({ message, facts: said }) {
  const { role = "?", content, reasoning_content: reasoning, tool_calls: calls = [] } = message;
  const parts = typeof content === "string" ? [content] : Array.isArray(content) ? content.map((part) => part.text ?? JSON.stringify(part)) : [];
  const tool = role === "tool";
  return html`<div class=${`message ${["assistant", "system", "tool"].includes(role) ? role : ""}`}>
    <div class="who"><strong>${role}</strong>${message.name && html`<span>${message.name}</span>`}${said && html`<span>${said}</span>`}</div>
    ${reasoning && html`<details><summary>reasoning, ${reasoning.length.toLocaleString("en-US")} characters</summary><pre class="quiet">${reasoning}</pre></details>`}
    ${parts.filter(Boolean).map((text) => tool ? html`<details open=${text.length < 200}><summary>result, ${text.length.toLocaleString("en-US")} characters</summary><pre class="code">${text}</pre></details>` : html`<${Long} text=${text} />`)}
    ${(calls ?? []).map((call) => html`<details open=${JSON.stringify(call.function?.arguments ?? "").length < 200}><summary>calls <code>${call.function?.name}</code></summary><pre class="code">${pretty(call.function?.arguments)}</pre></details>`)}
    ${!parts.filter(Boolean).length && !reasoning && !(calls ?? []).length && html`<span class="quiet">(empty)</span>`}
  </div>`;
}

function Long({ text }) {
  const [open, setOpen] = useState(text.length <= LONG);
  if (open) return html`<pre>${text}</pre>`;
  return html`<pre>${text.slice(0, LONG)}…</pre><button onClick=${() => setOpen(true)}>Show all ${text.length.toLocaleString("en-US")} characters</button>`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text ?? "";
  }
}
