"use strict";
// Series of numbers by iteration: what curves are drawn from.

// Of each run that has the metric: its values, {x: iteration, mean: value}.
function curves(runs, metric) {
  return runs.map((run) => (run.values[metric] || [])
    .map((value, i) => ({x: run.iterations[i], mean: value}))
    .filter((point) => point.mean !== null && point.mean !== undefined)).filter((line) => line.length);
}

// Mean, lowest and highest by iteration, where every run has a value: a mean over fewer would
// jump where one ends, or has none, and tell nothing of the others.
function band(lines) {
  const at = new Map();
  for (const {x, mean} of lines.flat()) at.set(x, [...(at.get(x) || []), mean]);
  return [...at].filter(([, values]) => values.length === lines.length).sort((a, b) => a[0] - b[0]).map(([x, values]) => ({
    x, mean: values.reduce((a, b) => a + b, 0) / values.length,
    low: Math.min(...values), high: Math.max(...values),
  }));
}

// Centred moving mean over up to `reach` values on either side, narrowing alike near the ends.
function smooth(points, reach) {
  return points.map((point, i) => {
    const half = Math.min(reach, i, points.length - 1 - i);
    const near = points.slice(i - half, i + half + 1);
    return {x: point.x, mean: near.reduce((sum, p) => sum + p.mean, 0) / near.length};
  });
}

// What a number changed by; null where one of both is not known.
function change(before, after) {
  return [before, after].some((value) => value === null || value === undefined) ? null : after - before;
}
