// Charts over steps: uPlot in our colors, with a band from the lowest to the highest value of each point.

import uPlot from "./vendor/uplot.js";
import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { number } from "./format.js";

const HEIGHT = 190;
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** `lines`: [{label, curve: {steps, mean, low, high}, dots}]. `stacked` draws areas, the first at the bottom. `label`
 * describes the chart for screen readers. `over` names the x-axis. */
export function Chart({ lines, height = HEIGHT, label, stacked = false, over = "step", log = false }) {
  const box = useRef();
  const plot = useRef();
  const [theme, setTheme] = useState(0);
  useEffect(() => {
    const changed = () => setTheme((n) => n + 1);
    addEventListener("theme", changed);
    return () => removeEventListener("theme", changed);
  }, []);
  const data = () => stacked ? piled(lines) : joined(lines, log);
  const shape = lines.map((line) => `${line.label}${hasPoints(line) ? "." : ""}`).join("|") + theme + height + log;
  useEffect(() => {
    const { width } = box.current.getBoundingClientRect();
    plot.current = new uPlot(stacked ? areas(lines, Math.max(120, width), height) : options(lines, Math.max(120, width), height, over, log), data(), box.current);
    const resized = new ResizeObserver(([entry]) => plot.current.setSize({ width: Math.max(120, entry.contentRect.width), height }));
    resized.observe(box.current);
    return () => {
      resized.disconnect();
      plot.current.destroy();
    };
  }, [shape]);
  useEffect(() => { plot.current?.setData(data()); }, [lines]);
  const last = lines.map(({ label: name, curve }) => `${name} ${number(curve.mean[curve.mean.length - 1])} at ${over} ${curve.steps[curve.steps.length - 1]}`);
  return html`<div class="chart" ref=${box} role="img" aria-label=${`${label}: ${last.join(", ")}`} style=${{ minHeight: `${height + 30}px` }}></div>`;
}

/** A single value makes no line, so it gets a point. */
const hasPoints = ({ dots, curve }) => Boolean(dots) || curve.steps.length === 1;

function joined(lines, log) {
  const [steps, ...values] = uPlot.join(lines.map(({ curve, dots }) => dots ? [curve.steps, curve.mean] : [curve.steps, curve.mean, curve.low, curve.high]));
  return [steps, ...values.map((own) => log ? own.map((value) => value > 0 ? value : null) : own)];
}

/** Cumulative sums of the curves, the highest first. */
function piled(lines) {
  const [steps, ...values] = uPlot.join(lines.map(({ curve }) => [curve.steps, curve.mean]));
  const sums = [];
  values.forEach((own, at) => sums.push(own.map((value, index) => (value ?? 0) + (at ? sums[at - 1][index] : 0))));
  return [steps, ...sums.reverse()];
}

function areas(lines, width, height) {
  const series = [...lines.keys()].reverse().map((index) => {
    const color = style(`--curve-${1 + index}`);
    const own = (chart, at) => chart.data[lines.length - index][at] - (index ? chart.data[lines.length - index + 1][at] : 0);
    return { label: lines[index].label, stroke: color, width: 1, fill: color, points: { show: false }, value: (chart, value, _, at) => value === null || value === undefined ? "–" : number(own(chart, at)) };
  });
  return { ...frame(width, height), series: [STEP, ...series], scales: { x: X_SCALE, y: { range: (_, __, high) => [0, high > 0 ? high * 1.05 : 1] } } };
}

function frame(width, height) {
  const grid = { stroke: style("--line"), width: 1 };
  const axis = { stroke: style("--quiet"), grid, ticks: { ...grid, size: 4 }, font: "12px system-ui" };
  return {
    width, height,
    axes: [{ ...axis, size: 34, values: (_, ticks) => ticks.map((tick) => Number.isInteger(tick) ? tick : "") }, { ...axis, size: 58, values: (_, ticks) => labels(ticks) }],
    legend: { live: true, markers: { width: 2 } },
    cursor: { drag: { x: true, y: false }, points: { size: 6 } },
    hooks: { init: [hideSpread], setData: [showLast], setCursor: [(chart) => { if (chart.cursor.idx === null) showLast(chart); }] },
  };
}

/** The number of decimals that multiples of `gap` need. */
const decimalsOf = (gap) => [0, 1, 2, 3, 4, 5].find((digits) => Math.abs(gap * 10 ** digits - Math.round(gap * 10 ** digits)) < 1e-6 * gap * 10 ** digits) ?? 6;

/** Labels of an axis, all with the same number of decimals. */
function labels(ticks) {
  const gap = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : Math.abs(ticks[0]) || 1;
  const most = Math.max(...ticks.map((tick) => Math.abs(tick ?? 0)));
  if (gap < 0.0005 || most >= 1e6) {
    const unit = 10 ** Math.floor(Math.log10(most || 1));
    const digits = decimalsOf(gap / unit);
    return ticks.map((tick) => tick === 0 ? "0" : tick && `${(tick / unit).toFixed(digits)}e${Math.log10(unit).toFixed(0)}`);
  }
  const decimals = decimalsOf(gap);
  return ticks.map((tick) => tick?.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals }));
}

const STEP = { label: "step", value: (_, value) => value === null ? "–" : value };
/** Centers a single step. */
const X_SCALE = { time: false, range: (_, low, high) => low === high ? [low - 1, high + 1] : [low, high] };

/** Centers a single value. */
const Y_SCALE = { range: (_, low, high) => low === null || (low === 0 && high === 0) ? [0, 1] : low === high ? [low - Math.abs(low) / 10, low + Math.abs(low) / 10] : uPlot.rangeNum(low, high, 0.1, true) };
const LOG_SCALE = { distr: 3 };

function options(lines, width, height, over, log) {
  const series = [{ ...STEP, label: over }], bands = [];
  lines.forEach((line, index) => {
    const color = style(`--curve-${1 + (index % 6)}`), at = series.length;
    // A line that ends before the others shows the value at its last step.
    const value = (chart, found, _, idx) => found === null || found === undefined ? "–" : number(found) + (idx === chart.legend.idxs[0] ? "" : ` (${over} ${chart.data[0][idx]})`);
    series.push({ label: line.label, stroke: color, width: 2, spanGaps: true, value, points: { show: hasPoints(line), size: 7, fill: color } });
    if (!line.dots) {
      const hidden = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false }, class: "u-off-legend" };
      series.push({ ...hidden, label: "low" }, { ...hidden, label: "high" });
      bands.push({ series: [at + 2, at + 1], fill: `${color}26` });
    }
  });
  const shown = frame(width, height);
  if (log) shown.axes[1].values = (_, ticks) => ticks.map((tick) => tick === null ? "" : number(tick));
  return { ...shown, series, bands, scales: { x: X_SCALE, y: log ? LOG_SCALE : Y_SCALE } };
}

/** Keeps the bounds of the spread out of the legend. */
function hideSpread(chart) {
  chart.root.querySelectorAll(".u-series").forEach((row) => { if (row.classList.contains("u-off-legend")) row.style.display = "none"; });
}

/** The legend shows the newest values while no pointer is on the chart. */
function showLast(chart) {
  const last = chart.series.map((_, index) => {
    let at = chart.data[index].length - 1;
    while (at > 0 && (chart.data[index][at] === null || chart.data[index][at] === undefined)) at -= 1;
    return at;
  });
  chart.setLegend({ idxs: last }, false);
}

/** A line the size of a word. */
export function Sparkline({ values, label, width = 120, height = 28 }) {
  if (values.length < 2) return null;
  const low = Math.min(...values), span = Math.max(...values) - low || 1;
  const points = values.map((value, at) => `${(1 + (width - 2) * at / (values.length - 1)).toFixed(1)},${(height - 3 - (height - 6) * (value - low) / span).toFixed(1)}`);
  return html`<svg width=${width} height=${height} role="img" aria-label=${label}><polyline points=${points.join(" ")} fill="none" stroke="var(--curve-1)" stroke-width="2" stroke-linejoin="round" /></svg>`;
}
