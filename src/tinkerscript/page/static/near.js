// Long lists are cheap because only the parts near the viewport are in the document.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact.js";

const MARGIN = "500px 0px";

/** `[near, height]` of the element in `ref`. `height` in px is its last shown height, initially `guess`. */
export function useNear(ref, guess, { root = null, first = false, margin = MARGIN } = {}) {
  const [near, setNear] = useState(first);
  const height = useRef(guess);
  useEffect(() => {
    const seen = new IntersectionObserver((entries) => setNear(entries[entries.length - 1].isIntersecting), { root: root?.current, rootMargin: margin });
    seen.observe(ref.current);
    return () => seen.disconnect();
  }, []);
  return [near, height];
}

const BLOCK = 50;

/** Table rows in blocks of `block`; each `row(item)` is about `px` high. */
export function Rows({ items, row, columns, px = 31, block = BLOCK }) {
  const blocks = Array.from({ length: Math.ceil(items.length / block) }, (_, at) => items.slice(at * block, (at + 1) * block));
  return blocks.map((part, at) => html`<${Block} key=${at} items=${part} row=${row} columns=${columns} guess=${part.length * px} first=${at === 0} />`);
}

function Block({ items, row, columns, guess, first }) {
  const ref = useRef();
  const [near, height] = useNear(ref, guess, { first });
  useLayoutEffect(() => { if (near) height.current = ref.current.getBoundingClientRect().height; });
  return html`<tbody ref=${ref}>${near ? items.map(row) : html`<tr aria-hidden="true"><td colspan=${columns} style=${{ height: `${height.current}px`, padding: 0, border: 0 }}></td></tr>`}</tbody>`;
}
