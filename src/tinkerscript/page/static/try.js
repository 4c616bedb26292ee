// A chat with the newest weights of a run that goes on, or with a checkpoint, its tokens shown.

import { html, useContext, useEffect, useRef, useState } from "./vendor/preact.js";
import { get, post } from "./api.js";
import { ramp } from "./colors.js";
import { Live, useData } from "./data.js";
import { ago, count, duration, number, percent, size } from "./format.js";
import { Card, Empty, Failed, Loaded, useConfirm } from "./parts.js";

const LOOK_MS = 1000, IDLE_LOOK_MS = 10000;
const NEWEST = "";

export function TryPlace({ run }) {
  const live = useContext(Live).run;
  const asked = useData(`runs/${encodeURIComponent(run)}`);
  const use = useData(`runs/${encodeURIComponent(run)}/checkpoints`, {}, { live: true });
  const state = (live ?? asked.data)?.state;
  return html`<${Loaded} use=${state ? use : { ...use, data: null }}>${(checkpoints) => html`<${Screen} key=${run} run=${run} goesOn=${state === "running"} checkpoints=${checkpoints} />`}<//>`;
}

function Screen({ run, goesOn, checkpoints }) {
  const [picked, setPicked] = useState(null);
  const [loaded, setLoaded] = useLoaded();
  const own = loaded?.run === run ? loaded : null;
  const known = (name) => name === NEWEST ? goesOn : checkpoints.some((each) => each.name === name);
  const chosen = picked !== null && known(picked) ? picked : own && known(own.name) ? own.name : goesOn ? NEWEST : checkpoints[0]?.name;
  const checkpoint = checkpoints.find((each) => each.name === chosen);
  if (chosen === undefined) return html`<${Card} title="Try it"><${Empty} title="There are no weights to talk to">The run has ended and has no checkpoint in its folder. A run writes them every <code>training.checkpoint_every</code> steps, and at its end.<//><//>`;
  const ready = chosen === NEWEST || (own?.name === chosen && own.state === "ready");
  return html`
    <${Card} title="Which weights">
      <div class="stack">
        <fieldset class="choices"><legend class="skip">Which weights</legend>
          ${goesOn && html`<${Choice} value=${NEWEST} chosen=${chosen} pick=${setPicked} title="Newest weights" text="of the run as it goes on; they change with every step" />`}
          ${checkpoints.map((each) => html`<${Choice} key=${each.name} value=${each.name} chosen=${chosen} pick=${setPicked} title=${each.name} text=${`${each.step === null ? "the end of the run" : `after step ${each.step}`}, ${ago(each.time)}, ${size(each.size_bytes)}${each.is_adapter ? " adapter" : ""}`} />`)}
        </fieldset>
        ${checkpoint && html`<${Loading} run=${run} checkpoint=${checkpoint} loaded=${loaded} setLoaded=${setLoaded} />`}
      </div>
    <//>
    <${Chat} key=${chosen} run=${run} checkpoint=${chosen} ready=${ready} />`;
}

const Choice = ({ value, chosen, pick, title, text }) => html`<label class=${`choice ${value === chosen ? "chosen" : ""}`}>
  <input type="radio" name="weights" checked=${value === chosen} onChange=${() => pick(value)} /><span><strong>${title}</strong><span class="small quiet">${text}</span></span></label>`;

/** The loaded checkpoint, of whichever run: asked for often while it loads. */
function useLoaded() {
  const [loaded, setLoaded] = useState(null);
  const loading = loaded === null || loaded.state === "loading";
  useEffect(() => {
    let timer = 0, ended = false;
    const look = () => {
      if (ended) return;
      const next = (found) => { if (ended) return; if (found) setLoaded(found); timer = setTimeout(look, found?.state === "loading" ? LOOK_MS : IDLE_LOOK_MS); };
      if (document.hidden) next(null);
      else get("loaded-checkpoint").then(next, () => next(null));
    };
    look();
    return () => { ended = true; clearTimeout(timer); };
  }, [loading]);
  return [loaded, setLoaded];
}

function Loading({ run, checkpoint, loaded, setLoaded }) {
  const [dialog, ask] = useConfirm();
  const [error, setError] = useState(null);
  const act = (path) => post(path, {}).then((found) => { setError(null); setLoaded(found); }, setError);
  const other = loaded && ["loading", "ready"].includes(loaded.state) && (loaded.run !== run || loaded.name !== checkpoint.name) ? `${loaded.name}${loaded.run === run ? "" : ` of ${loaded.run}`}` : "";
  const load = () => ask({
    title: `Load ${checkpoint.name}?`, verb: "Load", act: () => act(`runs/${encodeURIComponent(run)}/checkpoints/${encodeURIComponent(checkpoint.name)}/load`),
    text: `It is loaded into the memory of the machine that shows this page and samples on its processor: ${size(checkpoint.size_bytes)} of weights${checkpoint.is_adapter ? " and their base model" : ""}. It ends 10 minutes after its last use.${other ? ` It takes the place of ${other}.` : ""}`,
  });
  const own = loaded?.run === run && loaded.name === checkpoint.name ? loaded : null;
  return html`${dialog}<div role="status" class="row">${
    own?.state === "ready" ? html`<span class="chip good"><span class="dot"></span>loaded</span><span class="quiet small">${own.ends_in_s === null ? "answering" : `ends after ${duration(Math.ceil(own.ends_in_s / 60) * 60)} without a question`}</span><button onClick=${() => act("loaded-checkpoint/end")}>End it</button>`
    : own?.state === "loading" ? html`<span class="chip live"><span class="dot"></span>loading</span><span class="quiet small">for ${duration(Date.now() / 1000 - own.since)}. A small model takes seconds, a large one minutes.</span><button onClick=${() => act("loaded-checkpoint/end")}>Cancel</button>`
    : html`<button class="primary" onClick=${load}>${own?.state === "failed" ? "Try again" : `Load ${checkpoint.name}`}</button><span class="quiet small">${other ? `${other} is loaded now; there is one at a time.` : "A checkpoint is loaded when you ask for it."}</span>`}</div>
    ${own?.state === "failed" && html`<div class="banner bad" role="alert"><strong>It could not be loaded.</strong><pre>${own.failure}</pre></div>`}
    ${error && html`<${Failed} error=${error} />`}`;
}

function Chat({ run, checkpoint, ready }) {
  const [turns, setTurns] = useState([]);
  const [text, setText] = useState("");
  const [options, setOptions] = useState({ temperature: 1, max_tokens: 256 });
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const box = useRef();
  const send = async (event) => {
    event.preventDefault();
    if (!text.trim() || busy || !ready) return;
    const asked = [...turns, { role: "user", content: text }];
    setTurns(asked); setText(""); setBusy(true); setError(null);
    try {
      const reply = await post(`runs/${encodeURIComponent(run)}/chat`, { messages: asked.map(({ role, content }) => ({ role, content })), checkpoint, ...options });
      setTurns([...asked, { role: "assistant", content: reply.message.content ?? "", reply }]);
    } catch (found) {
      setError(found); setTurns(turns); setText(text);
    }
    setBusy(false);
    box.current?.focus();
  };
  const option = (name, label, step) => html`<label>${label} <input type="number" min="0" step=${step} value=${options[name]} style=${{ width: "6em" }} onInput=${(event) => setOptions({ ...options, [name]: Number(event.target.value) })} /></label>`;
  return html`<${Card} title="Chat" more=${html`<span class="quiet">nothing of it trains or is recorded</span>`}>
    <div class="stack">
      <div class="turns" aria-live="polite">${turns.map((turn) => html`<${Turn} turn=${turn} />`)}
        ${busy && html`<p class="quiet">The model is answering…</p>`}</div>
      ${error && html`<${Failed} error=${error} />`}
      <form class="stack" onSubmit=${send}>
        <textarea ref=${box} aria-label="Your message" disabled=${!ready} placeholder=${ready ? "Ask it what the task asks. Enter sends, Shift+Enter begins a new line." : "Load the checkpoint first."} value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${(event) => { if (event.key === "Enter" && !event.shiftKey) send(event); }}></textarea>
        <div class="row"><button class="primary" disabled=${busy || !ready || !text.trim()}>Send</button>${option("temperature", "temperature", 0.1)}${option("max_tokens", "at most tokens", 1)}
          ${turns.length > 0 && html`<button type="button" onClick=${() => { setTurns([]); setError(null); }}>Start over</button>`}</div>
      </form>
    </div>
  <//>`;
}

function Turn({ turn }) {
  const { reply } = turn;
  if (!reply) return html`<div class=${`message ${turn.role}`}><div class="who"><strong>${turn.role}</strong></div><pre>${turn.content}</pre></div>`;
  return html`<div class="message assistant">
    <div class="who"><strong>assistant</strong><span>${count(reply.tokens.length, "token")}</span><span>${reply.finish_reason === "length" ? html`<span class="chip warn">cut off by the token limit</span>` : "ended by itself"}</span></div>
    <pre>${turn.content}</pre>
    <details open=${reply.tokens.length <= 100}><summary>Tokens: text, id, log probability</summary>
      <ol class="token-boxes">${reply.tokens.map((token) => html`<li style=${{ background: ramp(-token.logprob, 6) }} title=${`probability ${percent(Math.exp(token.logprob))}`}><code>${visible(token.text)}</code><span>${token.id}</span><span>${number(token.logprob)}</span></li>`)}</ol></details></div>`;
}

/** Spaces and line ends as signs. */
const visible = (text) => text === "" ? "·" : text.replaceAll("\n", "↵").replace(/^ | $/g, "␣");
