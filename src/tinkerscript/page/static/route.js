// Routes are in the URL after #, so that every view has a link.

import { html, useEffect, useState } from "./vendor/preact.js";

export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), query: Object.fromEntries(new URLSearchParams(query)) };
}

export function place(parts, query = {}) {
  const search = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== undefined && value !== null));
  return `#/${parts.map((part) => encodeURIComponent(part)).join("/")}${search.size ? `?${search}` : ""}`;
}

export function usePlace() {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const changed = () => setHash(location.hash);
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return parse(hash);
}

export const go = (parts, query) => { location.hash = place(parts, query); };

/** Change the query without a new entry in the browser's history. */
export const adjust = (parts, query) => {
  history.replaceState(null, "", place(parts, query));
  dispatchEvent(new Event("hashchange"));
};

export const Link = ({ to, query, children, ...rest }) => html`<a href=${place(to, query)} ...${rest}>${children}</a>`;
