// The API, with paths relative to the page, so that it works behind a proxy's prefix. An exported page contains its
// replies.

const carried = document.getElementById("replies");
const replies = carried ? JSON.parse(carried.textContent) : null;
export const isExport = replies !== null;

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function url(path, query = {}) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (Array.isArray(value)) value.forEach((each) => search.append(name, each));
    else if (value !== undefined && value !== null && value !== "") search.append(name, value);
  }
  return `api/${path}${search.size ? `?${search}` : ""}`;
}

export async function get(path, query = {}, signal = undefined) {
  return isExport ? carriedReply(path, query) : reply(await fetched(url(path, query), { signal }));
}

function carriedReply(path, query) {
  const name = decodeURIComponent(path);
  if (name.endsWith("/curves")) {
    const { curves } = replies[name];
    return { curves: Object.fromEntries(query.name.filter((each) => each in curves).map((each) => [each, curves[each]])) };
  }
  const asked = name.endsWith("/tokens") ? `${name}?${new URLSearchParams(query)}` : name;
  if (asked in replies) return replies[asked];
  throw new ApiError(404, "This file does not contain it. `tinkerscript export` can include more steps and episodes, and `tinkerscript view` shows the whole run.");
}

export async function post(path, body) {
  if (isExport) throw new ApiError(404, "An exported file cannot do that; `tinkerscript view` can.");
  return reply(await fetched(url(path), { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) }));
}

async function fetched(address, options) {
  try {
    return await fetch(address, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not respond. Is the run still in progress? This page keeps trying.");
  }
}

async function reply(response) {
  const text = await response.text();
  let body;
  try {
    body = JSON.parse(text);
  } catch {
    body = { failure_reason: text.slice(0, 300) };
  }
  if (response.status === 401) window.dispatchEvent(new Event("login-needed"));
  if (!response.ok) throw new ApiError(response.status, body.failure_reason || `status ${response.status}`);
  return body;
}

/** Follow a run: `changed` gets its first screen, `linked` whether the connection works. Returns a function to stop. */
export function follow(run, changed, linked) {
  if (isExport) return () => {};
  let source = null, timer = 0, pause = 1000, ended = false;
  const open = () => {
    if (ended || document.hidden) return;
    source = new EventSource(url(`runs/${encodeURIComponent(run)}/events`));
    source.addEventListener("run", (event) => {
      pause = 1000;
      linked(true);
      changed(JSON.parse(event.data));
    });
    source.onerror = () => {
      linked(false);
      close();
      timer = setTimeout(open, pause);
      pause = Math.min(10000, pause * 1.6);
    };
  };
  const close = () => {
    clearTimeout(timer);
    source?.close();
    source = null;
  };
  const visible = () => document.hidden ? close() : source || open();
  document.addEventListener("visibilitychange", visible);
  open();
  return () => {
    ended = true;
    close();
    document.removeEventListener("visibilitychange", visible);
  };
}
