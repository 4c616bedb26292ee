// A training sequence token by token. Only blocks near the viewport are in the document.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact.js";
import { get } from "./api.js";
import { diverging, hue, ramp } from "./colors.js";
import { number } from "./format.js";
import { useNear } from "./near.js";
import { Failed } from "./parts.js";

const BLOCK = 128;
const MARGIN = "300px 0px";
const LINE_PX = 23;
const PAGE = 2048;

export const COLORS = [["advantage", "advantage"], ["logprob", "logprob"], ["entropy", "entropy"], ["gap", "trainer − sampler"], ["version", "policy version"]];

const SCALES = {
  advantage: { of: (t) => t.advantage, ground: (value, limit) => diverging(value, limit), limit: (most) => Math.max(most, 1e-9), missing: "No step has trained on this sequence." },
  logprob: { of: (t) => (t.logprob ?? t.trainer) === null ? null : -(t.logprob ?? t.trainer), ground: (value) => ramp(value, 6), limit: () => 6, missing: "Nothing was sampled." },
  entropy: { of: (t) => t.entropy, ground: (value) => ramp(value, 3), limit: () => 3, missing: "Not recorded: the engine reports no entropies, or no step compared this sequence." },
  gap: { of: (t) => t.trainer === null || t.logprob === null ? null : t.trainer - t.logprob, ground: (value, limit) => diverging(value, limit), limit: (most) => Math.max(most, 1e-3), missing: "Not recorded: no step compared this sequence." },
  version: { of: (t) => t.version, ground: (value) => hue(value), limit: () => 1, missing: "Nothing was sampled." },
};

const found = new WeakMap();

/** The largest absolute value of a page's tokens, or -1 without values. */
function largest(page, color) {
  if (!found.has(page)) found.set(page, {});
  const of = found.get(page);
  of[color] ??= page.ids.reduce((most, _, at) => Math.max(most, Math.abs(SCALES[color].of(token(page, at)) ?? -1)), -1);
  return of[color];
}

/** Shows tokens of `sequence`; marks and scrolls to `range` [start, end). */
export function TokenView({ uuid, sequence, color, range, onRange }) {
  const [pages, setPages] = useState({ key: "", of: {} });
  const [error, setError] = useState(null);
  const [tip, setTip] = useState(null);
  const box = useRef();
  const asked = useRef(new Set());
  const key = `${uuid}/${sequence.number}`;
  const own = pages.key === key ? pages.of : {};
  useEffect(() => { asked.current = new Set(); setPages({ key, of: {} }); setError(null); }, [key]);
  const want = (page) => {
    if (asked.current.has(page) || page * PAGE >= sequence.tokens) return;
    asked.current.add(page);
    const start = page * PAGE;
    get(`episodes/${uuid}/tokens`, { sequence: sequence.number, start, end: Math.min(sequence.tokens, start + PAGE) }).then(
      (data) => setPages((old) => ({ key, of: { ...(old.key === key ? old.of : {}), [page]: data } })),
      (found) => { asked.current.delete(page); setError(found); },
    );
  };
  const scale = SCALES[color];
  const known = Object.values(own).map((page) => largest(page, color));
  const limit = scale.limit(Math.max(0, ...known));
  const blocks = Math.ceil(sequence.tokens / BLOCK);
  const nothing = known.length > 0 && known.every((most) => most === -1);
  useLayoutEffect(() => {
    if (range && box.current) box.current.querySelector(`[data-block="${Math.floor(range[0] / BLOCK)}"]`)?.scrollIntoView({ block: "nearest" });
  }, [key, range?.[0]]);
  const over = (event) => {
    const at = event.target.closest?.(".t")?.dataset.at;
    if (at === undefined) return setTip(null);
    const page = own[Math.floor(at / PAGE)];
    return page && setTip({ ...token(page, at - page.start), at: Number(at), x: event.clientX, y: event.clientY });
  };
  const select = () => {
    const chosen = getSelection();
    const ends = [chosen.anchorNode, chosen.focusNode].map((node) => node?.parentElement?.closest(".t")?.dataset.at);
    if (!chosen.isCollapsed && ends.every((end) => end !== undefined)) onRange([Math.min(...ends), Math.max(...ends) + 1]);
  };
  return html`<div class="stack">
    ${error && html`<${Failed} error=${error} />`}
    ${nothing ? html`<p class="small warn">${scale.missing}</p>` : html`<${Legend} color=${color} limit=${limit} />`}
    <div class="tokens" ref=${box} tabindex="0" role="region" aria-label="Tokens" onMouseMove=${over} onMouseLeave=${() => setTip(null)} onMouseUp=${select}>
      ${Array.from({ length: blocks }, (_, number_) => html`<${Block} key=${`${key}/${number_}`} number=${number_} size=${Math.min(BLOCK, sequence.tokens - number_ * BLOCK)} root=${box}
        page=${own[Math.floor(number_ * BLOCK / PAGE)]} want=${want} scale=${scale} color=${color} limit=${limit} range=${range} />`)}
    </div>
    ${tip && html`<${Tip} tip=${tip} />`}
  </div>`;
}

const token = (page, at) => ({
  id: page.ids[at], text: page.texts[at], sampled: page.sampled[at], use: page.uses[at], version: page.versions[at], call: page.calls[at], logprob: page.logprobs[at],
  trainer: page.trainer_logprobs?.[at] ?? null, entropy: page.entropies?.[at] ?? null, advantage: page.advantages?.[at] ?? null, reason: page.reason,
});

function Block({ number: place, size, root, page, want, scale, color, limit, range }) {
  const ref = useRef();
  const [near, height] = useNear(ref, Math.ceil(size / 22) * LINE_PX, { root, margin: MARGIN });
  useEffect(() => {
    if (!near) return;
    const at = Math.floor(place * BLOCK / PAGE);
    want(at);
    if (page) want(at + 1); // Loaded before it is in view, so that its blocks are drawn one by one.
  }, [near, page]);
  const shown = near && page;
  useLayoutEffect(() => {
    if (shown) height.current = ref.current.firstElementChild?.getBoundingClientRect().height ?? height.current;
  });
  const spans = useMemo(() => shown && page.ids.slice(place * BLOCK - page.start, place * BLOCK - page.start + size).map((_, index) => {
    const at = place * BLOCK + index, t = token(page, at - page.start);
    const marked = range && at >= range[0] && at < range[1];
    const masked = t.sampled && t.use && t.use !== "trained";
    return html`<span class=${`t ${t.sampled ? "s" : "p"} ${masked && t.use !== "left_out" ? "m" : ""} ${marked ? "x" : ""}`} data-at=${at} style=${{ background: t.sampled ? scale.ground(scale.of(t), limit) : "" }}>${visible(t.text)}</span>`;
  }), [shown, page, color, limit, range?.[0], range?.[1]]);
  return html`<div class="block" data-block=${place} ref=${ref} style=${{ minHeight: `${shown ? 0 : height.current}px` }}>${shown && html`<div>${spans}</div>`}</div>`;
}

const visible = (text) => text === "" ? "·" : text.replace(/\n/g, "↵\n").replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);

const USES = { trained: "trains", constrained: "no loss: a grammar constrained its choice", corrected: "no loss: sampler and trainer differ too much, or the policy is too certain (top_entropy)", left_out: "its sequence did not train" };

function Tip({ tip }) {
  const rows = [
    ["id", tip.id], ["token", tip.at], ["text", JSON.stringify(tip.text)],
    ...(tip.sampled ? [
      ["logprob", number(tip.logprob)], ["trainer", tip.trainer === null ? "not recorded" : number(tip.trainer)],
      ["gap", tip.trainer === null || tip.logprob === null ? "–" : (tip.trainer - tip.logprob).toExponential(1)], ["entropy", tip.entropy === null ? "not recorded" : `${number(tip.entropy)} nats`],
      ["advantage", tip.advantage === null ? "–" : number(tip.advantage)], ["policy version", tip.version ?? "–"], ["call", tip.call === null ? "–" : tip.call + 1], ["training", tip.use ? `${USES[tip.use]}${tip.use === "left_out" && tip.reason ? ` (${tip.reason})` : ""}` : "not yet"],
    ] : [["", "not sampled: part of a prompt"]]),
  ];
  const style = { left: `${Math.min(tip.x + 14, innerWidth - 320)}px`, top: tip.y > innerHeight - 260 ? "auto" : `${tip.y + 16}px`, bottom: tip.y > innerHeight - 260 ? `${innerHeight - tip.y + 12}px` : "auto" };
  return html`<div class="tip" role="tooltip" style=${style}><dl class="facts">${rows.map(([name, value]) => html`<dt>${name}</dt><dd class="mono">${value}</dd>`)}</dl></div>`;
}

function Legend({ color, limit }) {
  const ramps = { advantage: [`−${number(limit)}`, `+${number(limit)}`, true], gap: [`−${number(limit)}`, `+${number(limit)}`, true], logprob: ["0 (certain)", "−6", false], entropy: ["0 nats", "3 nats", false] };
  const [low, high, two] = ramps[color] ?? [];
  return html`<div class="legend">
    ${low && html`<span>${low}</span><span class="ramp" style=${{ background: two ? `linear-gradient(90deg, rgba(var(--down), .62), transparent, rgba(var(--up), .62))` : `linear-gradient(90deg, transparent, rgba(var(--ramp), .6))` }}></span><span>${high}</span>`}
    ${!low && html`<span>each policy version has its own color</span>`}
    <span>· gray text is prompt, <span class="t m">struck out</span> carries no loss, ↵ is a line break. Select tokens to link to them.</span>
  </div>`;
}
