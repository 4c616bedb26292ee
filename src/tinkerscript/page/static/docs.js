// The documentation of the HTTP APIs, from their OpenAPI descriptions: the page's, and the server's where there is one.

import { html, render, useEffect, useState } from "./vendor/preact.js";

const SOURCES = [["api/openapi.json", "Page"], ["openapi.json", "Interchange server"]];
const dark = matchMedia("(prefers-color-scheme: dark)");
document.documentElement.dataset.theme = dark.matches ? "dark" : "light";

function Docs() {
  const [documents, setDocuments] = useState(null);
  const [shown, setShown] = useState(0);
  const [find, setFind] = useState("");
  useEffect(() => {
    Promise.all(SOURCES.map(([path]) => fetch(path).then((reply) => reply.ok ? reply.json() : null, () => null))).then(setDocuments);
  }, []);
  if (!documents) return html`<div class="state" role="status">Loading…</div>`;
  const found = SOURCES.map(([path, name], at) => ({ path, name, document: documents[at] })).filter((each) => each.document);
  if (!found.length) return html`<div class="state"><strong>Not readable</strong>Log in on the <a href="./">page</a> first, or send the admin token.</div>`;
  const { document: description, path } = found[Math.min(shown, found.length - 1)];
  return html`<header class="bar"><a class="brand" href="./">TinkerScript</a><span class="where">${description.info.title} ${description.info.version}</span>
      <nav aria-label="APIs">${found.map((each, at) => html`<a href="#" aria-current=${at === shown ? "page" : null} onClick=${(event) => { event.preventDefault(); setShown(at); }}>${each.name}</a>`)}</nav></header>
    <main><div class="card row"><label>Find <input type="search" value=${find} onInput=${(event) => setFind(event.target.value)} placeholder="episodes" /></label><a href=${path}>OpenAPI description</a></div>
      ${sections(description, find).map(([tag, operations]) => html`<section class="stack" aria-label=${tag}><h2>${tag}</h2>${operations.map((each) => html`<${Operation} key=${each.method + each.path} ...${each} description=${description} />`)}</section>`)}</main>`;
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
  return html`<div class="table"><table><thead><tr><th>${schema?.type === "array" ? "of each" : "field"}</th><th>type</th><th>meaning</th></tr></thead><tbody>
    ${Object.entries(found.properties).map(([name, each]) => html`<tr><td class="mono">${name}</td><td class="mono">${type(each)}</td><td>${each.description}${depth < 2 && refs(each).map((ref) => html`<details><summary>${ref.$ref.split("/").pop()}</summary><${Schema} schema=${ref} description=${description} depth=${depth + 1} /></details>`)}</td></tr>`)}</tbody></table></div>`;
}

const refs = (schema) => schema.$ref ? [schema] : [schema.items, ...(schema.anyOf ?? []), schema.additionalProperties].filter((each) => each?.$ref);

render(html`<${Docs} />`, document.getElementById("page"));
