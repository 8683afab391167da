"use strict";
// Boards in the policy's messages, drawn as pictures; the text that was read stays beside them.
const CELL = 22;  // pixels of a cell's side

// What a system prompt's "Symbols: P you, _ ice, O hole." calls each symbol; empty without it.
function symbolNames(system) {
  const names = new Map();
  for (const part of (system.split("Symbols: ")[1] || "").split(", ")) {
    const found = /^(\S) ([^.]+)(\.?)/u.exec(part);
    if (!found) break;
    names.set(found[1], found[2]);
    if (found[3]) break;
  }
  return names;
}

// The first that a symbol's name holds decides the cell's colour.
const CELL_COLOURS = [
  [/wall/, "#6b7280"], [/hole/, "#28507f"], [/box on/, "#7fbf8f"], [/box/, "#d09a5b"],
  [/goal|target/, "#f0bebe"], [/./, "#e3f1fa"],
];
const EMPTY = new Set([".", "_", "0"]);

function cellColour(symbol, names) {
  const name = names.get(symbol);
  if (name === undefined) return EMPTY.has(symbol) ? "#f1f4f8" : "#ffffff";
  return CELL_COLOURS.find(([pattern]) => pattern.test(name))[1];
}

// The longest run of at least two lines of equally many cells: single symbols or numbers.
function findBoard(text) {
  let best = [], run = [];
  for (const line of text.split("\n")) {
    const cells = line.trim().split(/\s+/);
    const isRow = cells.length > 1 && cells.every((cell) => [...cell].length === 1 || /^\d+$/.test(cell));
    if (!isRow) run = [];
    else if (run.length && run[0].length !== cells.length) run = [cells];
    else run.push(cells);
    if (run.length > best.length) best = [...run];
  }
  return best.length > 1 ? best : null;
}

function drawBoard(cells, names) {
  const width = cells[0].length * CELL, height = cells.length * CELL;
  const svg = draw("svg", {class: "board", role: "img", width, height, viewBox: `0 0 ${width} ${height}`,
    "aria-label": `board of ${cells.length} rows and ${cells[0].length} columns, as in the text beside it`});
  cells.forEach((row, y) => row.forEach((symbol, x) => {
    const fill = cellColour(symbol, names);
    const place = {x: x * CELL, y: y * CELL, width: CELL, height: CELL};
    svg.append(draw("rect", {...place, fill, stroke: "#9aa4b0", "stroke-width": 0.5}));
    if (EMPTY.has(symbol)) return;
    const isDark = fill === "#6b7280" || fill === "#28507f";
    svg.append(draw("text", {x: (x + 0.5) * CELL, y: (y + 0.5) * CELL, "text-anchor": "middle", "dominant-baseline": "central",
      style: `fill:${isDark ? "#fff" : "#1c2430"};font-size:${symbol.length > 2 ? 9 : 13}px;font-weight:600`}, symbol));
  }));
  return svg;
}
