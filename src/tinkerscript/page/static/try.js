// A chat with the newest weights, its tokens shown.

import { html, useState } from "./vendor/preact.js";
import { post } from "./api.js";
import { ramp } from "./colors.js";
import { number } from "./format.js";
import { Card, Failed } from "./parts.js";

export function TryPlace({ run }) {
  const [turns, setTurns] = useState([]);
  const [text, setText] = useState("");
  const [options, setOptions] = useState({ temperature: 1, max_tokens: 256 });
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const send = async (event) => {
    event.preventDefault();
    if (!text.trim() || busy) return;
    const asked = [...turns, { role: "user", content: text }];
    setTurns(asked); setText(""); setBusy(true); setError(null);
    try {
      const reply = await post(`runs/${encodeURIComponent(run)}/chat`, { messages: asked.map(({ role, content }) => ({ role, content })), ...options });
      setTurns([...asked, { role: "assistant", content: reply.message.content ?? "", reply }]);
    } catch (found) {
      setError(found); setTurns(turns); setText(text);
    }
    setBusy(false);
  };
  const option = (name, label, step) => html`<label>${label} <input type="number" min="0" step=${step} value=${options[name]} style=${{ width: "6.5em" }} onInput=${(event) => setOptions({ ...options, [name]: Number(event.target.value) })} /></label>`;
  return html`<${Card} title="Try it" more="the newest weights; nothing of it trains or is recorded">
    <div class="stack">
      <div class="turns" aria-live="polite">${turns.map((turn) => html`<div class=${`message ${turn.role}`}><div class="who"><strong>${turn.role}</strong>${turn.reply && html`<span>${turn.reply.tokens.length} tokens, ${turn.reply.finish_reason === "length" ? "cut off by the limit" : "ended by itself"}</span>`}</div>
        <pre>${turn.content}</pre>${turn.reply && html`<details><summary>tokens</summary><div class="mono">${turn.reply.tokens.map((token) => html`<span class="t s" style=${{ background: ramp(-token.logprob, 6) }} title=${`id ${token.id}, logprob ${number(token.logprob)}`}>${token.text === "" ? "·" : token.text}</span>`)}</div></details>`}</div>`)}
        ${busy && html`<p class="quiet">sampling…</p>`}</div>
      ${error && html`<${Failed} error=${error} />`}
      <form class="stack" onSubmit=${send}>
        <textarea aria-label="Your message" placeholder="Ask the policy something. Enter sends, Shift+Enter is a new line." value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${(event) => { if (event.key === "Enter" && !event.shiftKey) send(event); }}></textarea>
        <div class="row"><button class="primary" disabled=${busy || !text.trim()}>Send</button>${option("temperature", "temperature", 0.1)}${option("max_tokens", "at most tokens", 1)}
          ${turns.length > 0 && html`<button type="button" onClick=${() => { setTurns([]); setError(null); }}>Start over</button>`}</div>
      </form>
    </div>
  <//>`;
}
