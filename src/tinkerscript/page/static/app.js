// The page: routing, the live run, keyboard shortcuts and the color theme.

import { html, render, useEffect, useMemo, useState } from "./vendor/preact.js";
import { AlignmentPlace, FindingPlace } from "./alignment.js";
import { follow, get, isExport } from "./api.js";
import { ConfigPlace, CurvesPlace } from "./curves.js";
import { Live } from "./data.js";
import { EpisodePlace } from "./episode.js";
import { EpisodesPlace } from "./episodes.js";
import { EvaluationsPlace, SamplePlace } from "./evaluations.js";
import { FleetPlace } from "./fleet.js";
import { Login } from "./login.js";
import { Overview } from "./overview.js";
import { Card, Empty, State } from "./parts.js";
import { go, Link, usePlace } from "./route.js";
import { RunList } from "./runs.js";
import { StepPlace, StepsPlace } from "./steps.js";

const PLACES = [["", "Run"], ["curves", "Curves"], ["steps", "Steps"], ["evaluations", "Evaluations"], ["episodes", "Episodes"], ["alignment", "Alignment"], ["fleet", "Fleet"]];
const KEYS = { r: "", c: "curves", s: "steps", e: "evaluations", p: "episodes", a: "alignment", f: "fleet" };

function Place({ parts, query }) {
  const [kind, name, sub, ...rest] = parts;
  if (kind === "episode" && name) return html`<${EpisodePlace} uuid=${name} query=${query} />`;
  if (kind !== "run" || !name) return html`<${RunList} />`;
  switch (sub) {
    case undefined: return html`<${Overview} run=${name} />`;
    case "curves": return html`<${CurvesPlace} run=${name} query=${query} />`;
    case "config": return html`<${ConfigPlace} run=${name} query=${query} />`;
    case "steps": return rest[0] ? html`<${StepPlace} run=${name} step=${rest[0]} query=${query} />` : html`<${StepsPlace} run=${name} />`;
    case "evaluations": return html`<${EvaluationsPlace} run=${name} query=${query} />`;
    case "samples": return html`<${SamplePlace} run=${name} digest=${rest[0]} />`;
    case "episodes": return html`<${EpisodesPlace} run=${name} query=${query} />`;
    case "alignment": return rest.length === 2 ? html`<${FindingPlace} run=${name} kind=${rest[0]} name=${rest[1]} />` : html`<${AlignmentPlace} run=${name} />`;
    case "fleet": return html`<${FleetPlace} run=${name} />`;
    default: return html`<${Card}><${Empty} title="Page not found">The link may be from another version.<//><//>`;
  }
}

function App() {
  const { parts, query } = usePlace();
  const [session, setSession] = useState(isExport ? { needed: false, entered: true } : null);
  const [runs, setRuns] = useState(null);
  const [live, setLive] = useState({ run: null, tick: 0, name: "" });
  const [linked, setLinked] = useState(null);
  const [help, setHelp] = useState(false);
  const ask = () => get("session").then(setSession, () => setTimeout(ask, 3000));
  useEffect(() => {
    if (!isExport) ask();
    const needed = () => setSession({ needed: true, entered: false });
    addEventListener("login-needed", needed);
    return () => removeEventListener("login-needed", needed);
  }, []);
  const entered = session?.entered;
  const look = () => get("runs").then((list) => setRuns(list.runs), () => setTimeout(look, 3000));
  useEffect(() => { if (entered) look(); }, [entered]);
  const [episodeRun, setEpisodeRun] = useState("");
  useEffect(() => {
    if (entered && parts[0] === "episode" && parts[1]) get(`episodes/${parts[1]}`).then((episode) => setEpisodeRun(episode.run), () => {});
  }, [entered, parts[0] === "episode" ? parts[1] : ""]);
  const run = parts[0] === "run" ? parts[1] : parts[0] === "episode" ? episodeRun : "";
  useEffect(() => { if (!parts.length && runs?.length === 1) go(["run", runs[0].name]); }, [runs, parts.length]);
  useEffect(() => {
    if (entered && !parts.length && runs && !runs.length) { const timer = setInterval(look, 3000); return () => clearInterval(timer); }
    return undefined;
  }, [entered, runs, parts.length]);
  useEffect(() => {
    if (!run || !entered) return undefined;
    setLinked(null);
    return follow(run, (data) => setLive((old) => ({ run: data, name: run, tick: old.tick + 1 })), setLinked);
  }, [run, entered]);
  useKeys(run, setHelp);
  const value = useMemo(() => live.name === run ? live : { run: null, tick: 0 }, [live, run]);
  useEffect(() => { document.title = title(parts, run, value.run); });
  if (session === null) return html`<div class="state" role="status">Connecting…</div>`;
  if (!entered) return html`<${Login} entered=${ask} />`;
  const section = parts[0] === "episode" ? "episodes" : parts[2] === "samples" ? "evaluations" : parts[2] === "config" ? "curves" : parts[2] ?? "";
  return html`<${Live.Provider} value=${value}>
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>Skip to the content</a>
    <header class="bar">
      <${Link} to=${[]} class="brand"><img src=${isExport ? document.querySelector("link[rel=icon]").href : "page/icon.svg"} alt="" width="20" height="20" /><span>TinkerScript</span><//>
      <span class="where">${run}</span>${value.run && html`<${State} state=${value.run.state} />`}
      <div class="tools"><span class="link-state" role="status">${run && !isExport ? linked === false ? "reconnecting…" : linked && value.run?.state === "running" ? "live" : "" : ""}</span>
        <button onClick=${() => setHelp(true)} title="Keyboard shortcuts" aria-label="Keyboard shortcuts">?</button><${Theme} /></div>
      ${run && html`<nav aria-label="Sections">${PLACES.filter(([to]) => !isExport || to !== "fleet").map(([to, text]) => html`<${Link} to=${["run", run, to].filter(Boolean)} aria-current=${to === section ? "page" : null}>${text}<//>`)}</nav>`}
    </header>
    <main id="main" tabindex="-1">
      ${linked === false && html`<div class="banner" role="alert">The server does not respond. You see the last known state; the page keeps trying.</div>`}
      <${Place} parts=${parts} query=${query} />
    </main>
    ${help && html`<${Keys} close=${() => setHelp(false)} />`}
  <//>`;
}

function title(parts, run, data) {
  const what = parts[0] === "episode" ? `episode ${parts[1].slice(0, 8)}` : parts.slice(2).join(" ");
  const progress = data && data.state === "running" ? `${data.step}/${data.steps}` : "";
  return [what, progress, run, "TinkerScript"].filter(Boolean).join(" · ");
}

function useKeys(run, setHelp) {
  useEffect(() => {
    const pressed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
      if (event.key === "?") setHelp(true);
      else if (event.key === "/" && run) { event.preventDefault(); go(["run", run, "episodes"]); setTimeout(() => document.getElementById("search")?.focus(), 50); }
      else if (event.key === "[" || event.key === "]") document.querySelector(`a[rel=${event.key === "[" ? "prev" : "next"}]`)?.click();
      else if (run && event.key in KEYS) go(["run", run, KEYS[event.key]].filter(Boolean));
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, [run]);
}

function Keys({ close }) {
  const dialog = (element) => { if (element && !element.open) element.showModal(); };
  const rows = [...Object.entries(KEYS).map(([key, to]) => [key, PLACES.find(([name]) => name === to)[1]]), ["/", "search"], ["[ ]", "previous and next step or episode"], ["?", "show this list"]];
  return html`<dialog ref=${dialog} onClose=${close} aria-labelledby="keys"><div class="stack"><h2 id="keys">Keyboard shortcuts</h2><dl class="facts">${rows.map(([key, text]) => html`<dt><kbd>${key}</kbd></dt><dd>${text}</dd>`)}</dl>
    <form method="dialog"><button>Close</button></form></div></dialog>`;
}

function stored() {
  try { return localStorage.getItem("theme"); } catch { return null; }
}

const system = matchMedia("(prefers-color-scheme: dark)");

function dress(theme) {
  document.documentElement.dataset.theme = theme ?? (system.matches ? "dark" : "light");
  dispatchEvent(new Event("theme"));
}

function Theme() {
  const [theme, setTheme] = useState(stored);
  useEffect(() => { dress(theme); }, [theme]);
  const dark = (theme ?? (system.matches ? "dark" : "light")) === "dark";
  const turn = () => {
    const next = dark ? "light" : "dark";
    try { localStorage.setItem("theme", next); } catch { /* Private windows may refuse storage. */ }
    setTheme(next);
  };
  return html`<button onClick=${turn} aria-label=${dark ? "Light colors" : "Dark colors"} title=${dark ? "Light colors" : "Dark colors"}>${dark ? "☀" : "☾"}</button>`;
}

dress(stored());
system.addEventListener("change", () => dress(stored()));
render(html`<${App} />`, document.getElementById("page"));
