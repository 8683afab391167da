"use strict";
// Every text of a run goes into the page by textContent: nothing of it is ever markup.
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const COLOURS = ["#1f6fb4", "#d95f02", "#2a8a57", "#8a4fb0", "#b03a5b", "#7a6a1a"];
const ROW = 28;  // pixels of a list row, as in the style

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "text") node.textContent = value;
    else if (name === "style") node.style.cssText = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function draw(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(1);
  return String(+value.toPrecision(3));
}

// Curves -------------------------------------------------------------------------------

function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let v = Math.ceil(low / step) * step; v <= high + 1e-9 * step; v += step) found.push(+v.toPrecision(12));
  return found;
}

function chart(spec) {
  const W = 340, H = 190, L = 42, R = 8, T = 8, B = 20;
  const lines = data.series.map((series) => curves(series.runs.map((index) => data.runs[index]), spec.metric));
  const bands = lines.map(band), points = lines.flat(2);
  const value = make("span", {class: "value"});
  const unit = spec.unit === "1" ? "" : `, ${spec.unit}`;
  const figure = make("figure", {}, make("figcaption", {}, make("span", {text: spec.title + unit}), value));
  if (!points.length) return figure;
  const xs = data.runs.flatMap((run) => [run.iterations[0], run.iterations[run.iterations.length - 1]]);
  let x0 = Math.min(...xs), x1 = Math.max(...xs);
  let y0 = Math.min(...points.map((p) => p.mean)), y1 = Math.max(...points.map((p) => p.mean));
  if (x0 === x1) x1 = x0 + 1;
  // Values that differ by rounding alone have no ticks between them.
  if (y1 - y0 <= 1e-9 * Math.max(Math.abs(y0), Math.abs(y1))) { y0 -= 0.5; y1 += 0.5; }
  const margin = 0.05 * (y1 - y0);
  y0 -= margin; y1 += margin;
  const X = (x) => L + (x - x0) / (x1 - x0) * (W - L - R);
  const Y = (y) => T + (y1 - y) / (y1 - y0) * (H - T - B);
  const svg = draw("svg", {viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${spec.title} by iteration`});
  data.series.forEach((series) => series.runs.forEach((index) => data.runs[index].marks.forEach((mark) => {
    const from = X(mark.first - 0.5), to = X(mark.last + 0.5);
    const rect = draw("rect", {x: Math.max(L, from), y: T, width: Math.max(1, Math.min(W - R, to) - Math.max(L, from)),
      height: H - T - B, fill: mark.level === "collapse" ? "#e2574c" : "#f6d26b", "fill-opacity": mark.level === "collapse" ? 0.28 : 0.3});
    rect.append(draw("title", {}, `${data.runs[index].name}: ${mark.why}`));
    svg.append(rect);
  })));
  for (const y of ticks(y0, y1, 4)) {
    svg.append(draw("line", {x1: L, x2: W - R, y1: Y(y), y2: Y(y), stroke: "#e6eaef"}));
    svg.append(draw("text", {x: L - 5, y: Y(y) + 3.5, "text-anchor": "end"}, short(y)));
  }
  for (const x of ticks(x0, x1, 5).filter(Number.isInteger)) svg.append(draw("text", {x: X(x), y: H - 5, "text-anchor": "middle"}, String(x)));
  const path = (list, key) => list.map((p, i) => `${i ? "L" : "M"}${X(p.x).toFixed(1)} ${Y(p[key]).toFixed(1)}`).join("");
  bands.forEach((list, i) => {
    const colour = COLOURS[i % COLOURS.length];
    if (data.series[i].runs.length > 1) {
      const back = [...list].reverse().map((p) => `L${X(p.x).toFixed(1)} ${Y(p.low).toFixed(1)}`).join("");
      if (list.length) svg.append(draw("path", {d: path(list, "high") + back + "Z", fill: colour, "fill-opacity": 0.18}));
    }
    for (const line of lines[i]) svg.append(draw("path", {d: path(line, "mean"), fill: "none", stroke: colour, "stroke-opacity": 0.3}));
    if (!list.length) return;
    const bold = list.length > 15 ? smooth(list, 5) : list;
    svg.append(draw("path", {d: path(bold, "mean"), fill: "none", stroke: colour, "stroke-width": 2}));
    if (list.length < 16) list.forEach((p) => svg.append(draw("circle", {cx: X(p.x), cy: Y(p.mean), r: 2.2, fill: colour})));
  });
  const rule = draw("line", {y1: T, y2: H - B, stroke: "#5b6675", "stroke-dasharray": "2 2", visibility: "hidden"});
  svg.append(rule);
  const last = () => { value.textContent = bands.map((list) => list.length ? short(list[list.length - 1].mean) : "–").join(" · "); };
  last();
  svg.addEventListener("mousemove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = x0 + ((event.clientX - box.left) / box.width * W - L) / (W - L - R) * (x1 - x0);
    const near = points.reduce((a, b) => Math.abs(b.x - x) < Math.abs(a.x - x) ? b : a).x;
    rule.setAttribute("x1", X(near)); rule.setAttribute("x2", X(near)); rule.setAttribute("visibility", "visible");
    const shown = bands.map((list) => short((list.find((p) => p.x === near) || {}).mean));
    value.textContent = `${near}: ${shown.join(" · ")}`;
  });
  svg.addEventListener("mouseleave", () => { rule.setAttribute("visibility", "hidden"); last(); });
  figure.append(svg);
  return figure;
}

function drawCurves() {
  const legend = document.getElementById("legend");
  const entry = (style, text) => legend.append(make("span", {}, make("span", {class: "swatch", style}), text));
  data.series.forEach((series, i) => {
    const count = series.runs.length;
    entry(`background:${COLOURS[i % COLOURS.length]}`, count > 1 ? `${series.name}, mean and range of ${count} runs, as far as all go` : series.name);
  });
  entry("background:var(--watch)", "alarm: watch");
  entry("background:var(--collapse)", "alarm: collapse");
  document.getElementById("charts").append(...data.charts.map(chart));
  const alarms = document.getElementById("alarms");
  const marks = data.runs.flatMap((run) => run.marks.map((mark) => ({run, mark})));
  const returns = data.runs.flatMap((run) => (run.rollbacks || []).map((back) => ({run, back})));
  if (!marks.length) alarms.append(make("p", {class: "hint", text: returns.length ? "In what was not gone back over the alarm did not ring." : "The alarm did not ring."}));
  const list = make("ul");
  for (const {run, back} of returns) list.append(make("li", {text: `${run.name}, rolled back from iteration ${back.from} to ${back.to}: ${back.why}`}));
  for (const {run, mark} of marks.slice(0, 60)) list.append(make("li", {text: `${run.name}, iterations ${mark.first} to ${mark.last}: ${mark.why}`}));
  if (marks.length > 60) list.append(make("li", {text: `and ${marks.length - 60} more, marked in the curves`}));
  alarms.append(list);
}

// Tables -------------------------------------------------------------------------------

function table(caption, heads, rows, numbersFrom) {
  const cls = (i) => i >= numbersFrom ? {class: "number"} : {};
  const head = make("tr", {}, ...heads.map((text, i) => make("th", {scope: "col", text, ...cls(i)})));
  const body = rows.map((cells) => make("tr", {}, ...cells.map((text, i) => make("td", {text, ...cls(i)}))));
  return make("table", {}, make("caption", {text: caption}), make("thead", {}, head), make("tbody", {}, ...body));
}

function drawTables() {
  const tests = document.getElementById("tests");
  const wanted = [["success", "success"], ["return", "return"], ["valid_reply_rate", "valid replies"], ["turns", "turns"],
    ["actions", "actions"], ["reply_tokens", "reply tokens"], ["entropy", "entropy, nats"]];
  for (const one of data.tests) {
    const rows = wanted.filter(([key]) => key in one.before).map(([key, label]) => {
      const error = (side) => side[`${key}_standard_error`] === undefined ? "" : ` ± ${short(side[`${key}_standard_error`])}`;
      return [label, short(one.before[key]) + error(one.before), short(one.after[key]) + error(one.after), short(change(one.before[key], one.after[key]))];
    });
    if (one.gain !== undefined) rows.push(["gain on the same levels", "", "", `${short(one.gain)} ± ${short(one.gain_standard_error)}`]);
    tests.append(table(`${one.run}${one.environment ? `, ${one.environment}` : ""}: test levels before and after ${one.iteration === null ? "training" : `${one.iteration} iterations`}`,
      ["", "before", "after", "change"], rows, 1));
  }
  if (!data.tests.length) tests.append(make("p", {class: "hint", text: "No test before and after training: the run has not ended yet."}));
  const differences = document.getElementById("differences");
  if (data.runs.length < 2) return;
  if (!data.differences.length) { differences.append(make("p", {class: "hint", text: "The runs have equal settings."})); return; }
  differences.append(table("Settings that differ", ["setting", ...data.runs.map((run) => run.name)],
    data.differences.map((row) => [row.key, ...row.values]), 99));
}

// Episodes -----------------------------------------------------------------------------

const state = {shown: [], picked: 0, quantity: "logprob", isCompared: false};
const list = document.getElementById("list"), rows = document.getElementById("rows");
const filters = {};

function choice(name, label, options) {
  const select = make("select", {name}, ...options.map(([value, text]) => make("option", {value, text})));
  select.addEventListener("change", refilter);
  filters[name] = select;
  return make("label", {}, label, select);
}

function bound(name, label) {
  const input = make("input", {type: "number", name, step: "any"});
  input.addEventListener("input", refilter);
  filters[name] = input;
  return make("label", {}, label, input);
}

function distinct(key) {
  return [...new Set(data.episodes.map((episode) => episode[key]))].sort().map((value) => [String(value), String(value)]);
}

function drawFilters() {
  const form = document.getElementById("filters");
  form.addEventListener("submit", (event) => event.preventDefault());
  if (data.runs.length > 1) form.append(choice("run", "run", [["", "all"], ...data.runs.map((run, i) => [String(i), run.name])]));
  form.append(
    choice("phase", "when", [["", "all"], ...distinct("phase")]),
    choice("environment", "environment", [["", "all"], ...distinct("environment")]),
    choice("success", "outcome", [["", "all"], ["true", "solved"], ["false", "not solved"]]),
    bound("from", "iteration from"), bound("to", "to"), bound("least", "return from"), bound("most", "to"),
    choice("order", "order", [["iteration", "by iteration"], ["best", "best return first"], ["worst", "worst return first"], ["level", "by level"]]));
}

function refilter() {
  const text = (name) => filters[name] ? filters[name].value : "";
  const number = (name, other) => text(name) === "" ? other : Number(text(name));
  const from = number("from", -Infinity), to = number("to", Infinity), least = number("least", -Infinity), most = number("most", Infinity);
  state.shown = data.episodes.filter((e) => ["run", "phase", "environment", "success"].every((key) => text(key) === "" || String(e[key]) === text(key))
    && e.iteration >= from && e.iteration <= to && e.return >= least && e.return <= most);
  const orders = {
    iteration: (a, b) => a.iteration - b.iteration, best: (a, b) => b.return - a.return,
    worst: (a, b) => a.return - b.return, level: (a, b) => a.level - b.level || a.rollout - b.rollout || a.iteration - b.iteration,
  };
  state.shown.sort(orders[text("order")]);
  document.getElementById("count").textContent = `${state.shown.length} of ${data.episodes.length} episodes`;
  rows.style.height = `${state.shown.length * ROW}px`;
  list.scrollTop = 0;
  rows.replaceChildren();
  inView.clear();
  pick(0);
}

// Only the rows in view exist, whatever the number of episodes; those that stay in view stay.
const inView = new Map();

function drawRows() {
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 5);
  const last = Math.min(state.shown.length, first + Math.ceil(list.clientHeight / ROW) + 10);
  for (const [i, row] of inView) if (i < first || i >= last) { row.remove(); inView.delete(i); }
  for (let i = first; i < last; i++) {
    if (!inView.has(i)) { inView.set(i, episodeRow(i)); rows.append(inView.get(i)); }
    inView.get(i).setAttribute("aria-selected", String(i === state.picked));
  }
  if (state.shown.length) list.setAttribute("aria-activedescendant", `row-${state.picked}`);
  else list.removeAttribute("aria-activedescendant");
}

function episodeRow(i) {
  const e = state.shown[i];
  const row = make("div", {class: "row", role: "option", id: `row-${i}`,
    "aria-setsize": state.shown.length, "aria-posinset": i + 1, style: `top:${i * ROW}px`},
    make("span", {text: e.iteration}), make("span", {text: e.phase}), make("span", {text: e.environment}),
    make("span", {text: e.level}), make("span", {text: e.rollout}),
    make("span", {text: short(e.return), class: e.success ? "solved" : "failed"}));
  row.addEventListener("click", () => pick(i));
  return row;
}

function pick(index) {
  state.picked = Math.max(0, Math.min(state.shown.length - 1, index));
  const top = state.picked * ROW;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
  drawRows();
  drawEpisode();
}

list.addEventListener("scroll", drawRows);
list.addEventListener("keydown", (event) => {
  const steps = {ArrowDown: 1, ArrowUp: -1, j: 1, k: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity};
  if (event.key === "c") { state.isCompared = !state.isCompared; drawEpisode(); return; }
  if (!(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  pick(state.picked + steps[event.key]);
});

const QUANTITIES = {
  logprob: ["log-probability, nats", false], entropy: ["entropy, nats", false],
  advantage: ["advantage", true], value: ["value, reward", true],
};

// Light to strong for what has one end, red over white to blue for what has two.
function colour(value, low, high, isSigned, isLowStrong) {
  if (value === null || value === undefined) return "transparent";
  if (isSigned) {
    const share = Math.max(-1, Math.min(1, value / (Math.max(Math.abs(low), Math.abs(high)) || 1)));
    return share < 0 ? `rgba(214,69,58,${(-0.75 * share).toFixed(3)})` : `rgba(31,111,180,${(0.75 * share).toFixed(3)})`;
  }
  let share = high > low ? (value - low) / (high - low) : 0;
  if (isLowStrong) share = 1 - share;
  return `rgba(217,95,2,${(0.8 * Math.max(0, Math.min(1, share))).toFixed(3)})`;
}

function range(episodes, key) {
  const values = episodes.flatMap((e) => e.turns.flatMap((turn) => turn[key] || [])).filter((v) => v !== null);
  if (!values.length) return null;
  return values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
}

function other(episode) {
  const wanted = episode.phase === "before" ? "after" : "before";
  return data.episodes.find((e) => e.phase === wanted && e.run === episode.run && e.environment === episode.environment
    && e.level === episode.level && e.rollout === episode.rollout);
}

function drawEpisode() {
  const place = document.getElementById("episode");
  const episode = state.shown[state.picked];
  if (!episode) { place.replaceChildren(make("p", {class: "hint", text: data.episodes.length ? "No episode is like that." : "This run recorded no episodes."})); return; }
  const twin = episode.phase === "train" ? undefined : other(episode);
  const sides = state.isCompared && twin ? (episode.phase === "before" ? [episode, twin] : [twin, episode]) : [episode];
  place.replaceChildren(controls(sides, twin), make("div", {class: "sides"}, ...sides.map((side) => card(side, sides))));
}

function controls(sides, twin) {
  const bar = make("div", {class: "bar"});
  const select = make("select", {}, ...Object.entries(QUANTITIES).map(([key, [text]]) => make("option", {value: key, text})));
  select.value = state.quantity;
  select.addEventListener("change", () => { state.quantity = select.value; drawEpisode(); document.querySelector(".bar select").focus(); });
  bar.append(make("label", {}, "colour of tokens: ", select));
  const [, isSigned] = QUANTITIES[state.quantity], ends = range(sides, state.quantity);
  if (ends) {
    const low = isSigned ? -Math.max(Math.abs(ends[0]), Math.abs(ends[1])) : ends[0], high = isSigned ? -low : ends[1];
    const stops = [0, 0.25, 0.5, 0.75, 1].map((s) => colour(low + s * (high - low), low, high, isSigned, state.quantity === "logprob"));
    bar.append(short(low), make("span", {class: "scale", style: `background:linear-gradient(90deg,${stops.join(",")})`}), short(high));
  } else bar.append("not recorded: the filter dropped this group, or there is no such number");
  if (twin) {
    const button = make("button", {type: "button", "aria-pressed": String(state.isCompared), text: "before and after side by side"});
    button.addEventListener("click", () => { state.isCompared = !state.isCompared; drawEpisode(); });
    bar.append(button);
  }
  return bar;
}

function card(episode, sides) {
  const outcome = `${episode.success ? "solved" : "not solved"}, ${episode.end.replaceAll("_", " ")}, return ${short(episode.return)}`;
  const where = `${data.runs[episode.run].name}, ${episode.phase}, iteration ${episode.iteration}, ${episode.environment}, level ${episode.level}, episode ${episode.rollout}`;
  const node = make("div", {class: "card"}, make("h3", {text: where}), make("p", {class: `hint ${episode.success ? "solved" : "failed"}`, text: outcome}));
  node.append(make("details", {}, make("summary", {text: "System prompt"}), make("pre", {text: episode.system})));
  const names = symbolNames(episode.system);
  episode.turns.forEach((turn, index) => node.append(turnCard(turn, index, sides, names)));
  return node;
}

function turnCard(turn, index, sides, names) {
  const node = make("article", {class: turn.valid ? "turn" : "turn invalid"});
  node.append(make("header", {text: `Turn ${index + 1} · reward ${short(turn.reward)} · ${turn.valid ? "valid" : "INVALID reply"}`}));
  const board = findBoard(turn.message), seen = make("div", {class: "seen"}, make("pre", {text: turn.message}));
  if (board) seen.append(drawBoard(board, names));
  node.append(seen);
  const facts = make("dl");
  const fact = (name, text) => facts.append(make("dt", {text: name}), make("dd", {text}));
  if (turn.thought !== null) fact("thought", turn.thought);
  fact("answer", turn.answer);
  fact("actions", turn.actions.join(", ") || "none");
  node.append(facts);
  const [, isSigned] = QUANTITIES[state.quantity], ends = range(sides, state.quantity), values = turn[state.quantity];
  const tokens = make("div", {class: "tokens"});
  turn.tokens.forEach((text, i) => {
    const span = make("span", {text});
    if (values && ends) span.style.background = colour(values[i], ends[0], ends[1], isSigned, state.quantity === "logprob");
    span.title = Object.entries(QUANTITIES).map(([key, [label]]) => `${label}: ${turn[key] ? short(turn[key][i]) : "–"}`).join("\n");
    tokens.append(span);
  });
  node.append(tokens);
  return node;
}

document.getElementById("title").textContent = `Health of ${data.title}`;
document.title = `Health of ${data.title}`;
document.getElementById("head").append(...["iteration", "when", "environment", "level", "no.", "return"].map((text) => make("span", {text})));
document.getElementById("warnings").append(...data.warnings.map((text) => make("p", {class: "warning", text})));
drawCurves();
drawTables();
drawFilters();
refilter();
document.documentElement.dataset.ready = "true";
