// Data fetching for components. Old data stays on the screen until the new reply arrives.

import { createContext, useContext, useEffect, useRef, useState } from "./vendor/preact.js";
import { get } from "./api.js";

/** The run's first screen from the newest event; `tick` counts the events. */
export const Live = createContext({ run: null, tick: 0 });

const AGAIN_MS = 4000;

/** `{data, error, loading, again}` of a GET. With `live`, fetch again when the run changes, at most every 2 s. */
export function useData(path, query = {}, { live = false } = {}) {
  const [state, setState] = useState({ data: null, error: null, loading: true, key: "" });
  const [round, setRound] = useState(0);
  const { tick } = useContext(Live);
  const asked = useRef(0);
  const key = path + JSON.stringify(query);
  useEffect(() => {
    if (live && tick && asked.current && Date.now() - asked.current > 2000) setRound((n) => n + 1);
  }, [live, tick]);
  useEffect(() => {
    if (!path) return undefined;
    const aborted = new AbortController();
    let timer = 0;
    asked.current = Date.now();
    setState((old) => ({ ...old, loading: true, data: old.key === key ? old.data : null, error: old.key === key ? old.error : null, key }));
    get(path, query, aborted.signal).then(
      (data) => setState({ data, error: null, loading: false, key }),
      (error) => {
        if (error.name === "AbortError") return;
        setState((old) => ({ ...old, error, loading: false }));
        if (error.status === 0 || error.status >= 500) timer = setTimeout(() => setRound((n) => n + 1), AGAIN_MS);
      },
    );
    return () => {
      clearTimeout(timer);
      aborted.abort();
    };
  }, [key, round]);
  return { ...state, again: () => setRound((n) => n + 1) };
}

/** Consecutive pages of a list: `{items, more, next, error, loading}`. `more` is null at the end; `next` is the cursor. */
export function usePages(path, query, name, cursor, options) {
  const [rest, setRest] = useState({ key: "", items: [], next: undefined, error: null });
  const key = path + JSON.stringify(query);
  // Once more pages are loaded, the first one is not refreshed, so that the list does not move while it is read.
  const first = useData(path, query, { ...options, live: options?.live && rest.key !== key });
  const own = rest.key === key ? rest : { key, items: [], next: undefined, error: null };
  const next = own.next === undefined ? first.data?.next : own.next;
  const more = next === null || next === undefined ? null : () =>
    get(path, { ...query, [cursor]: next }).then(
      (page) => setRest({ key, items: [...own.items, ...page[name]], next: page.next, error: null }),
      (error) => setRest({ ...own, error }),
    );
  return { items: [...(first.data?.[name] ?? []), ...own.items], more, next, error: first.error ?? own.error, loading: first.loading, data: first.data };
}
