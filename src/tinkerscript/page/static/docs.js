// Documentation of the HTTP APIs of the page and, if it runs, of the server, from their OpenAPI descriptions.

import { html, render, useEffect, useState } from "./vendor/preact.js";
import { get } from "./api.js";
import { Login } from "./login.js";
import { Failed } from "./parts.js";

const APIS = [["openapi.json", "Page"], ["server-openapi.json", "Interchange server"]];
const system = matchMedia("(prefers-color-scheme: dark)");

function stored() {
  try { return localStorage.getItem("theme"); } catch { return null; }
}

document.documentElement.dataset.theme = stored() ?? (system.matches ? "dark" : "light");

function Docs() {
  const [entered, setEntered] = useState(null);
  const [apis, setApis] = useState(null);
  const [error, setError] = useState(null);
  const [shown, setShown] = useState(0);
  const [find, setFind] = useState("");
  const ask = () => get("session").then((session) => setEntered(session.entered), setError);
  const load = ([path, name]) => get(path).then((description) => ({ path, name, description }), (failed) => ({ path, name, failed }));
  useEffect(() => { ask(); }, []);
  useEffect(() => { if (entered) Promise.all(APIS.map(load)).then(setApis); }, [entered]);
  if (error) return html`<main><${Failed} error=${error} /></main>`;
  if (entered === false) return html`<${Login} entered=${ask} />`;
  if (!apis) return html`<div class="state" role="status">Loading…</div>`;
  const { path, description, failed } = apis[shown];
  return html`<header class="bar"><a class="brand" href="./"><img src="page/icon.svg" alt="" width="20" height="20" /><span>TinkerScript</span></a><span class="where">${description ? `API of version ${description.info.version}` : "API"}</span>
      <nav aria-label="APIs">${apis.map((each, at) => html`<a href="#" aria-current=${at === shown ? "page" : null} onClick=${(event) => { event.preventDefault(); setShown(at); }}>${each.name}</a>`)}</nav></header>
    <main>${failed ? html`<div class="card"><div class="state"><strong>Not available here</strong>${failed.message}</div></div>` : html`
      <div class="card row"><label>Find <input type="search" value=${find} onInput=${(event) => setFind(event.target.value)} placeholder="episodes" /></label><a href=${`api/${path}`}>OpenAPI description</a></div>
      ${sections(description, find).map(([tag, operations]) => html`<section class="stack" aria-label=${tag}><h2>${tag}</h2>${operations.map((each) => html`<${Operation} key=${each.method + each.path} ...${each} description=${description} />`)}</section>`)}`}</main>`;
}

function sections(description, find) {
  const tags = new Map();
  for (const [path, methods] of Object.entries(description.paths)) for (const [method, operation] of Object.entries(methods)) {
    if (!`${path} ${operation.description ?? ""} ${operation.summary ?? ""}`.toLowerCase().includes(find.toLowerCase())) continue;
    const tag = operation.tags?.[0] ?? "other";
    tags.set(tag, [...(tags.get(tag) ?? []), { path, method, operation }]);
  }
  return [...tags];
}

function Operation({ path, method, operation, description }) {
  const body = operation.requestBody?.content?.["application/json"]?.schema;
  const answer = Object.entries(operation.responses ?? {}).find(([status]) => status.startsWith("2"))?.[1]?.content?.["application/json"]?.schema;
  return html`<details class="card"><summary><span class="chip">${method.toUpperCase()}</span> <code>${path}</code> <span class="quiet">${(operation.description ?? operation.summary ?? "").split("\n")[0]}</span></summary>
    <div class="stack"><pre>${operation.description}</pre>
      ${operation.parameters?.length > 0 && html`<div class="table"><table><thead><tr><th>parameter</th><th>in</th><th>type</th><th>default</th><th>meaning</th></tr></thead><tbody>
        ${operation.parameters.map((each) => html`<tr><td class="mono">${each.name}${each.required ? " *" : ""}</td><td>${each.in}</td><td class="mono">${type(each.schema)}</td><td class="mono">${each.schema?.default === undefined ? "" : JSON.stringify(each.schema.default)}</td><td>${each.description}</td></tr>`)}</tbody></table></div>`}
      ${body && html`<h3>Body</h3><${Schema} schema=${body} description=${description} />`}
      ${answer && html`<h3>Reply</h3><${Schema} schema=${answer} description=${description} />`}</div></details>`;
}

const named = (schema, description) => schema?.$ref ? description.components.schemas[schema.$ref.split("/").pop()] : schema;

function type(schema) {
  if (!schema) return "any";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(type).join(" | ");
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `[${type(schema.items)}]`;
  if (schema.type === "object" && schema.additionalProperties) return `{string: ${type(schema.additionalProperties === true ? null : schema.additionalProperties)}}`;
  return schema.type ?? "any";
}

function Schema({ schema, description, depth = 0 }) {
  const inner = schema?.type === "array" ? schema.items : schema;
  const found = named(inner, description);
  if (!found?.properties) return html`<code>${type(schema)}</code>`;
  return html`<div class="table"><table><thead><tr><th>${schema?.type === "array" ? "item field" : "field"}</th><th>type</th><th>meaning</th></tr></thead><tbody>
    ${Object.entries(found.properties).map(([name, each]) => html`<tr><td class="mono">${name}</td><td class="mono">${type(each)}</td><td>${each.description}${depth < 2 && refs(each).map((ref) => html`<details><summary>${ref.$ref.split("/").pop()}</summary><${Schema} schema=${ref} description=${description} depth=${depth + 1} /></details>`)}</td></tr>`)}</tbody></table></div>`;
}

const refs = (schema) => schema.$ref ? [schema] : [schema.items, ...(schema.anyOf ?? []), schema.additionalProperties].filter((each) => each?.$ref);

render(html`<${Docs} />`, document.getElementById("page"));
