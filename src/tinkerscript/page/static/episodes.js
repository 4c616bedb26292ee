// All episodes of a run, and their search.

import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { isExport } from "./api.js";
import { usePages } from "./data.js";
import { Card, Empty, Episodes, Failed, More, Tabs } from "./parts.js";
import { adjust } from "./route.js";

const FILTERS = [["all", "all"], ["accepted", "with a result"], ["failed", "failed"], ["truncated", "cut off"], ["trained", "trained"], ["untrained", "not trained"]];

export function EpisodesPlace({ run, query }) {
  const q = query.q ?? "", show = query.show ?? "all";
  const path = `runs/${encodeURIComponent(run)}/${q ? "search" : "episodes"}`;
  const asked = q ? { q } : { show: show === "all" ? "" : show };
  const pages = usePages(path, asked, "episodes", "before", { live: !q });
  // A page may be empty because its time was up, so the search continues.
  const looking = !pages.items.length && pages.more && !pages.error;
  useEffect(() => { if (looking && !pages.loading) pages.more(); }, [path, JSON.stringify(asked), pages.next, pages.loading]);
  return html`<${Card} title="Episodes">
    <div class="stack">
      ${!isExport && html`<${Search} run=${run} q=${q} />`}
      ${!q && !isExport && html`<${Tabs} label="Which episodes" choices=${FILTERS} chosen=${show} to=${["run", run, "episodes"]} name="show" />`}
      ${pages.error && html`<${Failed} error=${pages.error} />`}
      ${pages.items.length > 0 && html`<${Episodes} episodes=${pages.items} run=${run} />`}
      ${looking && html`<${Empty} title="Nothing yet">Searching the episodes before number ${pages.next.toLocaleString("en-US")}.<//>`}
      ${!pages.items.length && !looking && !pages.loading && !pages.error && html`<${Empty} title=${q ? "Nothing found" : "No matching episodes yet"}>${q ? "All words must occur. Conditions look like reward>0.5 or score/exact=0." : "Episodes appear here as they end."}<//>`}
      <${More} more=${looking ? null : pages.more} loading=${pages.loading} />
    </div>
  <//>`;
}

function Search({ run, q }) {
  const [text, setText] = useState(q);
  const input = useRef();
  useEffect(() => setText(q), [q]);
  return html`<form class="search" role="search" onSubmit=${(event) => { event.preventDefault(); adjust(["run", run, "episodes"], { q: text.trim() }); }}>
    <input ref=${input} id="search" type="search" value=${text} onInput=${(event) => setText(event.target.value)} aria-label="Search episodes"
      placeholder='words  "a phrase"  reward>0.5  step=12  score/exact=0  status=failed  client:worker-1' />
    <button class="primary">Search</button>${q && html`<button type="button" onClick=${() => adjust(["run", run, "episodes"], {})}>Clear</button>`}
  </form>`;
}
