// The form for the admin token. The reply sets a cookie; the token itself is not stored.

import { html, useState } from "./vendor/preact.js";
import { post } from "./api.js";

export function Login({ entered }) {
  const [error, setError] = useState("");
  const [busy, setBusy] = useState(false);
  const send = async (event) => {
    event.preventDefault();
    setBusy(true);
    const token = new FormData(event.target).get("token").trim();
    try {
      await post("login", { token });
      entered();
    } catch (found) {
      setError(found.status === 401 ? "That is not the admin token." : found.message);
    }
    setBusy(false);
  };
  return html`<form class="card login stack" onSubmit=${send}>
    <h1>TinkerScript</h1><p>Log in with the run's admin token. It is in <code>TINKERSCRIPT_ADMIN_TOKEN</code> on the machine that started the run.</p>
    <label class="stack">Admin token <input name="token" type="password" autocomplete="current-password" required autofocus /></label>
    ${error && html`<div class="banner bad" role="alert">${error}</div>`}
    <button class="primary" disabled=${busy}>Log in</button>
  </form>`;
}
