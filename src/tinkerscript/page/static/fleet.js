// What runs the episodes: queue, claims, workers, failures.

import { html, useEffect, useState } from "./vendor/preact.js";
import { post } from "./api.js";
import { useData } from "./data.js";
import { count, duration, number, short } from "./format.js";
import { Card, Empty, Loaded, useConfirm } from "./parts.js";
import { Link } from "./route.js";

const EVERY_MS = 2000;

export function FleetPlace({ run }) {
  const use = useData(`runs/${encodeURIComponent(run)}/fleet`);
  useEffect(() => {
    const timer = setInterval(() => { if (!document.hidden) use.again(); }, EVERY_MS);
    return () => clearInterval(timer);
  }, []);
  return html`<${Loaded} use=${use}>${(data) => html`<${Screen} run=${run} data=${data} again=${use.again} />`}<//>`;
}

function Screen({ run, data, again }) {
  const types = Object.entries(data.episodes);
  return html`<div class="grid">
    <${Card} class="span-5" title="Engine"><dl class="facts">
      <dt>engine</dt><dd>${data.engine_status.replace("ENGINE.", "").toLowerCase().replace("_", " ")}${data.trainer_connected ? "" : ", trainer away"}</dd>
      <dt>policy version</dt><dd>${data.policy_version}</dd><dt>step</dt><dd>${data.global_step}</dd>
      <dt>batch</dt><dd>${data.batch?.collecting ? `${data.batch.label}: has ${data.batch.have} of ${data.batch.needed} ${data.batch.rule.replace("_", " ")}` : "none is being filled"}</dd>
      <dt>clients</dt><dd>${count(data.clients.length, "client")} with claims or failures, ${data.waiting_clients} waiting for an episode</dd></dl><//>
    <${Card} class="span-7" title="Queue"><div class="table"><table><thead><tr><th>episodes</th>${["registered", "claimed", "ended", "accepted", "failed"].map((state) => html`<th class="number">${state}</th>`)}</tr></thead>
      <tbody>${types.map(([type, counts]) => html`<tr><td>${type}</td>${["registered", "claimed", "ended", "accepted", "failed"].map((state) => html`<td class=${`number ${state === "failed" && counts[state] ? "bad" : ""}`}>${number(counts[state])}</td>`)}</tr>`)}</tbody></table></div><//>
    <${Card} class="span-5" title="Clients">${data.clients.length ? html`<div class="table"><table><thead><tr><th>client</th><th class="number">claims</th><th>state</th></tr></thead><tbody>
      ${data.clients.map((client) => html`<tr><td class="mono">${client.client_uuid}</td><td class="number">${client.claims}</td><td>${client.quarantined ? html`<span class="bad">in quarantine: ${client.quarantined}</span>` : html`<span class="good">working</span>`}</td></tr>`)}</tbody></table></div>`
      : html`<${Empty} title="No client holds an episode">Workers appear here with their first claim.<//>`}<//>
    <${Card} class="span-7" title="Claims" more=${`${data.claims.length}, oldest first`}>${data.claims.length ? html`<div class="table"><table><thead><tr><th>episode</th><th>group</th><th>client</th><th class="number">age</th><th class="number">lease left</th><th class="number">calls now</th></tr></thead><tbody>
      ${data.claims.slice(0, 100).map((claim) => html`<tr><td class="mono">${short(claim.episode_uuid)}</td><td>${claim.group_id}</td><td class="mono">${claim.client_uuid}</td><td class="number">${duration(claim.age_s)}</td><td class=${`number ${claim.lease_left_s < 5 ? "warn" : ""}`}>${duration(claim.lease_left_s)}</td><td class="number">${claim.calls_in_flight}</td></tr>`)}</tbody></table></div>`
      : html`<${Empty} title="Nothing is claimed">The queue is empty, or no worker is there.<//>`}<//>
    <${Failures} run=${run} failed=${data.failed} again=${again} />
  </div>`;
}

function Failures({ run, failed, again }) {
  const [dialog, ask] = useConfirm();
  const [said, setSaid] = useState("");
  const act = (action, uuids) => post(`runs/${encodeURIComponent(run)}/failed_episodes/${action}`, { episode_uuids: uuids }).then(
    (reply) => { setSaid(`${count(reply.done.length, "episode")} ${action === "retry" ? "requeued" : "dropped"}${Object.keys(reply.refused).length ? `; refused: ${Object.values(reply.refused)[0]}` : ""}`); again(); },
    (error) => setSaid(error.message),
  );
  const confirm = (action, uuids) => ask({
    title: action === "retry" ? "Requeue?" : "Drop?", verb: action === "retry" ? "Requeue" : "Drop", act: () => act(action, uuids),
    text: action === "retry" ? `${count(uuids.length, "episode")} get a fresh budget of attempts.` : `${count(uuids.length, "episode")} leave this list. Their failures stay in the record.`,
  });
  return html`<${Card} title="Dead letters" more=${failed.length > 0 && html`<span class="row"><button onClick=${() => confirm("retry", failed.map((each) => each.episode_uuid))}>Requeue all</button><button class="danger" onClick=${() => confirm("drop", failed.map((each) => each.episode_uuid))}>Drop all</button></span>`}>
    ${dialog}<p role="status" class="small quiet">${said}</p>
    ${failed.length ? html`<div class="table"><table><thead><tr><th>episode</th><th>group</th><th>last failure</th><th></th></tr></thead><tbody>${failed.map((each) => html`<tr>
      <td><${Link} to=${["episode", each.episode_uuid]} class="mono">${short(each.episode_uuid)}<//></td><td>${each.group_id}</td><td>${last(each.failures)}</td>
      <td class="nowrap"><button onClick=${() => confirm("retry", [each.episode_uuid])}>Requeue</button> <button class="danger" onClick=${() => confirm("drop", [each.episode_uuid])}>Drop</button></td></tr>`)}</tbody></table></div>`
      : html`<${Empty} title="No dead letters">Episodes that used up their attempts appear here.<//>`}
  <//>`;
}

const last = (failures) => failures.length ? `${failures[failures.length - 1].kind}: ${failures[failures.length - 1].message}` : "–";
