// The queue, the workers with their rates, the claims and the failures.

import { html, useEffect, useState } from "./vendor/preact.js";
import { post } from "./api.js";
import { useData } from "./data.js";
import { count, duration, number, short } from "./format.js";
import { Card, Empty, Loaded, Meter, useConfirm } from "./parts.js";
import { Link } from "./route.js";

const EVERY_MS = 2000;
const CLAIMS_SHOWN = 12;
const AWAY_S = 120;

export function FleetPlace({ run }) {
  const use = useData(`runs/${encodeURIComponent(run)}/fleet`);
  useEffect(() => {
    const timer = setInterval(() => { if (!document.hidden) use.again(); }, EVERY_MS);
    return () => clearInterval(timer);
  }, []);
  if (use.error?.status === 404 && !use.data) return html`<${Card} title="Fleet"><${Empty} title="No episodes are running">During a run, its queue and its workers appear here. (${use.error.message})<//><//>`;
  return html`<${Loaded} use=${use}>${(data) => html`<${Screen} run=${run} data=${data} again=${use.again} />`}<//>`;
}

function Screen({ run, data, again }) {
  return html`<div class="grid">
    <div class="span-5"><${Engine} data=${data} /></div>
    <div class="span-7"><${Queue} data=${data} /></div>
    <${Workers} data=${data} />
    <${Claims} data=${data} />
    <${Failures} run=${run} data=${data} again=${again} />
  </div>`;
}

const ENGINE = { OFFLINE: "offline", BOOTING: "starting", ROLLING: "collecting episodes", WEIGHT_SYNCING: "loading new weights", WEIGHT_EXPORTING: "exporting weights" };
const RULES = { groups: "groups", differing_groups: "groups with different rewards", episodes: "episodes" };

function Engine({ data }) {
  const state = data.engine_status.replace("ENGINE.", ""), { batch } = data;
  return html`<${Card} title="Engine"><div class="stack">
    <dl class="facts">
      <dt>state</dt><dd>${ENGINE[state] ?? state.toLowerCase().replaceAll("_", " ")}${data.trainer_connected ? "" : html` <span class="chip warn">trainer disconnected</span>`}</dd>
      <dt>policy version</dt><dd>${data.policy_version < 0 ? "none yet" : data.policy_version}</dd><dt>steps trained</dt><dd>${data.global_step}</dd>
      <dt>next batch</dt><dd>${batch?.collecting ? `${batch.label}: ${batch.have} of ${batch.needed} ${RULES[batch.rule] ?? batch.rule.replaceAll("_", " ")}` : "none in progress"}</dd></dl>
    ${batch?.collecting && html`<${Meter} done=${batch.have} total=${batch.needed} label="Batch filled" />`}
    ${data.failure && html`<div class="banner bad">${data.failure}</div>`}</div><//>`;
}

const QUEUE = [["registered", "waiting", "for a worker"], ["claimed", "running", "held by a worker"], ["ended", "finished", "on their way to the trainer"], ["accepted", "done", "received by the trainer"], ["failed", "failed", "used up their attempts"]];
const KINDS = { train: "training", eval: "evaluation" };

function Queue({ data }) {
  return html`<${Card} title="Queue" more="episodes by state"><div class="table"><table>
    <thead><tr><th>type</th>${QUEUE.map(([, text, means]) => html`<th class="number" title=${means}>${text}</th>`)}</tr></thead>
    <tbody>${Object.entries(data.episodes).map(([type, counts]) => html`<tr><td>${KINDS[type] ?? type}</td>
      ${QUEUE.map(([state]) => html`<td class=${`number ${state === "failed" && counts[state] ? "bad" : ""}`}>${number(counts[state])}</td>`)}</tr>`)}</tbody></table></div>
    <p class="small quiet">${data.waiting_clients ? `${count(data.waiting_clients, "worker is", "workers are")} idle: ${data.waiting_clients > 1 ? "they wait" : "it waits"} for an episode.` : "No worker is idle."}</p><//>`;
}

function Workers({ data }) {
  const rate = data.clients.reduce((sum, client) => sum + client.episodes_per_min, 0);
  return html`<${Card} title="Workers" more=${data.clients.length > 0 && `${count(data.clients.length, "worker")}, ${pace(rate)} episodes/min together`}>${data.clients.length ? html`<div class="table scrolls"><table>
    <thead><tr><th>worker</th><th>state</th><th class="number">episodes/min</th><th class="number">running</th><th class="number">finished</th><th class="number">failed attempts</th><th class="number">last seen</th></tr></thead>
    <tbody>${data.clients.map((client) => html`<tr key=${client.client_uuid}><td class="mono">${client.client_uuid}</td><td><${WorkerState} client=${client} /></td>
      <td class="number">${pace(client.episodes_per_min)}</td><td class="number">${number(client.claims)}</td><td class="number">${number(client.ended)}</td>
      <td class=${`number ${client.failed ? "bad" : ""}`}>${number(client.failed)}</td><td class="number">${client.idle_s === null ? "–" : client.idle_s < 2 ? "now" : `${duration(client.idle_s)} ago`}</td></tr>`)}</tbody></table></div>`
    : html`<${Empty} title="No workers yet">A worker appears here when it asks for its first episode. Start one with <code>tinkerscript worker</code>.<//>`}<//>`;
}

const pace = (rate) => rate < 10 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en-US");

function WorkerState({ client }) {
  if (client.quarantined) return html`<span class="bad"><span class="chip bad">quarantined</span> ${client.quarantined}</span>`;
  if (client.claims) return html`<span class="good">working</span>`;
  return client.idle_s !== null && client.idle_s < AWAY_S ? "waiting" : html`<span class="quiet">away</span>`;
}

function Claims({ data }) {
  const shown = data.claims.slice(0, CLAIMS_SHOWN), total = data.totals.claims;
  return html`<${Card} title="Running episodes" more=${total > shown.length ? `the oldest ${shown.length} of ${number(total)}` : total > 0 && count(total, "episode")}>${shown.length ? html`<div class="table"><table>
    <thead><tr><th>episode</th><th>group</th><th>worker</th><th class="number">running for</th><th class="number" title="Without activity until then, another worker gets the episode.">lease left</th><th class="number">attempt</th><th class="number">model calls now</th></tr></thead>
    <tbody>${shown.map((claim) => html`<tr key=${claim.episode_uuid}><td class="mono">${short(claim.episode_uuid)}</td><td class="mono">${claim.group_id}</td><td class="mono">${claim.client_uuid}</td><td class="number">${duration(claim.age_s)}</td>
      <td class=${`number ${claim.lease_left_s < 5 ? "warn" : ""}`}>${duration(claim.lease_left_s)}</td><td class=${`number ${claim.attempt > 1 ? "warn" : ""}`}>${claim.attempt}</td><td class="number">${claim.calls_in_flight}</td></tr>`)}</tbody></table></div>`
    : html`<${Empty} title="No episode is running">No episode is waiting, or no worker is connected.<//>`}<//>`;
}

function Failures({ run, data, again }) {
  const { failed } = data;
  const [dialog, ask] = useConfirm();
  const [said, setSaid] = useState("");
  const act = (action, uuids) => post(`runs/${encodeURIComponent(run)}/failed_episodes/${action}`, { episode_uuids: uuids }).then(
    (reply) => { setSaid(`${count(reply.done.length, "episode")} ${action === "retry" ? "requeued" : "dropped"}${Object.keys(reply.refused).length ? `; refused: ${Object.values(reply.refused)[0]}` : ""}`); again(); },
    (error) => setSaid(error.message),
  );
  const confirm = (action, uuids) => ask({
    title: action === "retry" ? "Retry?" : "Drop?", verb: action === "retry" ? "Retry" : "Drop", act: () => act(action, uuids),
    text: action === "retry" ? `${count(uuids.length, "episode gets", "episodes get")} ${uuids.length === 1 ? "its" : "their"} full number of attempts again.` : `${count(uuids.length, "episode leaves", "episodes leave")} this list. ${uuids.length === 1 ? "Its failure stays" : "Their failures stay"} in the ledger.`,
  });
  const uuids = (can) => failed.filter((each) => !can || each.can_retry).map((each) => each.episode_uuid);
  const retriable = uuids(true);
  return html`<${Card} title="Failed episodes" more=${failed.length > 0 && html`<span class="row">${retriable.length > 0 && html`<button onClick=${() => confirm("retry", retriable)}>Retry all</button>`}<button class="danger" onClick=${() => confirm("drop", uuids(false))}>Drop all</button></span>`}>
    ${dialog}<p role="status" class="small quiet">${said}</p>
    ${failed.length ? html`<div class="table scrolls"><table><thead><tr><th>episode</th><th>group</th><th>last failure</th><th></th></tr></thead><tbody>${failed.map((each) => html`<tr key=${each.episode_uuid}>
      <td><${Link} to=${["episode", each.episode_uuid]} class="mono">${short(each.episode_uuid)}<//></td><td class="mono">${each.group_id}</td><td>${last(each.failures)}</td>
      <td class="nowrap"><button disabled=${!each.can_retry} title=${each.why_not} onClick=${() => confirm("retry", [each.episode_uuid])}>Retry</button> <button class="danger" onClick=${() => confirm("drop", [each.episode_uuid])}>Drop</button></td></tr>`)}</tbody></table></div>`
      : html`<${Empty} title="None">Episodes that used up their attempts appear here, with the reason.<//>`}
  <//>`;
}

const last = (failures) => failures.length ? `${failures[failures.length - 1].kind}: ${failures[failures.length - 1].message}` : "–";
