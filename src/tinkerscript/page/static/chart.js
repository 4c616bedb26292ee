// Charts over steps: uPlot with our colors, a band from the lowest to the highest value of each point's span.

import uPlot from "./vendor/uplot.js";
import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { number } from "./format.js";

const HEIGHT = 190;
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** `lines`: [{label, curve: {steps, mean, low, high}, dots}]. `label`: what the chart shows, for screen readers. */
export function Chart({ lines, height = HEIGHT, label }) {
  const box = useRef();
  const plot = useRef();
  const [theme, setTheme] = useState(0);
  useEffect(() => {
    const changed = () => setTheme((n) => n + 1);
    addEventListener("theme", changed);
    return () => removeEventListener("theme", changed);
  }, []);
  const shape = lines.map((line) => `${line.label}${line.dots ? "." : ""}`).join("|") + theme + height;
  useEffect(() => {
    const { width } = box.current.getBoundingClientRect();
    plot.current = new uPlot(options(lines, Math.max(120, width), height), joined(lines), box.current);
    const resized = new ResizeObserver(([entry]) => plot.current.setSize({ width: Math.max(120, entry.contentRect.width), height }));
    resized.observe(box.current);
    return () => {
      resized.disconnect();
      plot.current.destroy();
    };
  }, [shape]);
  useEffect(() => { plot.current?.setData(joined(lines)); }, [lines]);
  const last = lines.map(({ label: name, curve }) => `${name} ${number(curve.mean[curve.mean.length - 1])} at step ${curve.steps[curve.steps.length - 1]}`);
  return html`<div class="chart" ref=${box} role="img" aria-label=${`${label}: ${last.join(", ")}`} style=${{ minHeight: `${height + 30}px` }}></div>`;
}

function joined(lines) {
  return uPlot.join(lines.map(({ curve, dots }) => dots ? [curve.steps, curve.mean] : [curve.steps, curve.mean, curve.low, curve.high]));
}

function options(lines, width, height) {
  const grid = { stroke: style("--line"), width: 1 };
  const axis = { stroke: style("--quiet"), grid, ticks: { ...grid, size: 4 }, font: "12px system-ui" };
  const series = [{ label: "step", value: (_, value) => value === null ? "–" : value }], bands = [];
  lines.forEach((line, index) => {
    const color = style(`--curve-${1 + (index % 6)}`), at = series.length;
    const value = (_, found) => found === null || found === undefined ? "–" : number(found);
    series.push({ label: line.label, stroke: color, width: 2, spanGaps: true, value, points: { show: Boolean(line.dots), size: 7, fill: color } });
    if (!line.dots) {
      const hidden = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false }, class: "u-off-legend" };
      series.push({ ...hidden, label: "low" }, { ...hidden, label: "high" });
      bands.push({ series: [at + 2, at + 1], fill: `${color}26` });
    }
  });
  return {
    width, height, series, bands,
    scales: { x: { time: false } },
    axes: [{ ...axis, size: 34, values: (_, ticks) => ticks.map((tick) => Number.isInteger(tick) ? tick : "") }, { ...axis, size: 58, values: (_, ticks) => ticks.map((tick) => number(tick)) }],
    legend: { live: true, markers: { width: 2 } },
    cursor: { drag: { x: true, y: false }, points: { size: 6 } },
    hooks: { init: [hideSpread], setData: [showLast], setCursor: [(chart) => { if (chart.cursor.idx === null) showLast(chart); }] },
  };
}

/** The bounds of the spread are not entries of the legend. */
function hideSpread(chart) {
  chart.root.querySelectorAll(".u-series").forEach((row) => { if (row.classList.contains("u-off-legend")) row.style.display = "none"; });
}

/** Without a pointer on it, the legend shows the newest values. */
function showLast(chart) {
  const last = chart.series.map((_, index) => {
    let at = chart.data[index].length - 1;
    while (at > 0 && (chart.data[index][at] === null || chart.data[index][at] === undefined)) at -= 1;
    return at;
  });
  chart.setLegend({ idxs: last }, false);
}

/** A line as large as a word. */
export function Sparkline({ values, label, width = 120, height = 28 }) {
  if (values.length < 2) return null;
  const low = Math.min(...values), span = Math.max(...values) - low || 1;
  const points = values.map((value, at) => `${(1 + (width - 2) * at / (values.length - 1)).toFixed(1)},${(height - 3 - (height - 6) * (value - low) / span).toFixed(1)}`);
  return html`<svg width=${width} height=${height} role="img" aria-label=${label}><polyline points=${points.join(" ")} fill="none" stroke="var(--curve-1)" stroke-width="2" stroke-linejoin="round" /></svg>`;
}
