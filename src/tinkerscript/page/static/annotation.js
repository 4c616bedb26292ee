// A run's note and tags, shown and edited in place.

import { html, useState } from "./vendor/preact.js";
import { post } from "./api.js";
import { Failed } from "./parts.js";

export const Annotation = ({ run }) => html`${run.tags.length > 0 && html`<div class="tags">${run.tags.map((tag) => html`<span class="chip">${tag}</span>`)}</div>`}${run.note && html`<div class="note">${run.note}</div>`}`;

/** `done(saved)` closes the form, with what was saved or null. `children` are further buttons. */
export function AnnotationForm({ run, done, children }) {
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const save = async (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    const tags = form.get("tags").split(",").map((tag) => tag.trim()).filter(Boolean);
    setBusy(true);
    try {
      done(await post(`runs/${encodeURIComponent(run.name)}/annotation`, { note: form.get("note"), tags }));
    } catch (failed) {
      setError(failed);
      setBusy(false);
    }
  };
  const first = (element) => { if (element && !element.dataset.met) { element.dataset.met = "1"; element.focus(); } };
  return html`<form class="stack annotation" onSubmit=${save} onKeyDown=${(event) => { if (event.key === "Escape") done(null); }}>
    <label class="small quiet">Note<textarea name="note" rows="3" ref=${first} defaultValue=${run.note}></textarea></label>
    <label class="small quiet">Tags, separated by commas<input name="tags" autocomplete="off" defaultValue=${run.tags.join(", ")} /></label>
    ${error && html`<${Failed} error=${error} />`}
    <div class="row"><button class="primary" disabled=${busy}>Save</button><button type="button" onClick=${() => done(null)}>Cancel</button>${children}</div>
  </form>`;
}
