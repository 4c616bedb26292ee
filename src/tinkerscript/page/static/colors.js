// Color scales for any color vision: blue against orange, and one ramp of lightness.

const known = new Map();
addEventListener("theme", () => known.clear());

/** A value from the style sheet, cached per theme, because each query makes the browser lay out the page. */
function triple(name) {
  if (!known.has(name)) known.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return known.get(name);
}

/** The strongest background on which text stays readable. */
const reach = () => Number(triple("--reach"));

/** The background for a value in [-limit, limit]: blue above 0, orange below. */
export function diverging(value, limit) {
  if (value === null || value === undefined || !limit) return "";
  const strength = Math.min(1, Math.abs(value) / limit);
  return strength < 0.02 ? "" : `rgba(${triple(value > 0 ? "--up" : "--down")}, ${(0.1 + reach() * strength).toFixed(2)})`;
}

/** The background for a value in [0, limit]. */
export function ramp(value, limit) {
  if (value === null || value === undefined || !limit) return "";
  const strength = Math.min(1, value / limit);
  return strength < 0.02 ? "" : `rgba(${triple("--ramp")}, ${(0.06 + reach() * strength).toFixed(2)})`;
}

/** One of six hues for an integer, in two levels of lightness. */
export function hue(index) {
  return `color-mix(in srgb, var(--curve-${1 + (index % 6)}) ${index % 12 < 6 ? 34 : 20}%, transparent)`;
}
