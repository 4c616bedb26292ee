// Numbers and times for people.

export const score = (value) => value === null || value === undefined ? "–" : value.toFixed(3).replace(/^-0\.000$/, "0.000");

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return Math.abs(value) >= 1e6 ? compact(value) : value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(1);
  return size >= 100 ? value.toLocaleString("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 }) : value.toPrecision(digits);
}

export function compact(value) {
  if (value === null || value === undefined) return "–";
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e4]])
    if (Math.abs(value) >= size) return `${(value / (unit === "k" ? 1e3 : size)).toPrecision(3)}${unit}`;
  return value.toLocaleString("en-US");
}

export const signed = (value) => value === null || value === undefined ? "–" : `${value > 0 ? "+" : value < 0 ? "−" : ""}${number(Math.abs(value))}`;

export const percent = (share) => share === null || share === undefined ? "–" : `${(100 * share).toFixed(share && share < 0.1 ? 1 : 0)}%`;

export const count = (value, one, many = `${one}s`) => `${value.toLocaleString("en-US")} ${value === 1 ? one : many}`;

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export const ago = (unix, now = Date.now() / 1000) => unix ? (now - unix < 2 ? "just now" : `${duration(now - unix)} ago`) : "–";

export const clock = (unix) => unix ? new Date(unix * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }) : "–";

export const short = (uuid) => uuid.slice(0, 8);
