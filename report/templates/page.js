const element = (name, text = "", about = {}) => Object.assign(document.createElement(name), {textContent: text}, about);

// Plotly's basic bundle lies in the page compressed, which makes the page less than half as large.
const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), letter => letter.charCodeAt(0));
const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
document.head.append(element("script", await new Response(unpacked).text()));

const figures = JSON.parse(document.getElementById("figures").textContent);
const PRINTED = 640;  // pixels of a chart on A4
const CONFIG = {displayModeBar: false, responsive: true};
const all = (selector, from = document) => [...from.querySelectorAll(selector)];

// A chart is drawn when it is laid out: it takes the width that its card has then, so folded ones wait.
function draw(plot) {
  if (plot.data || !plot.checkVisibility()) return;
  const {data: traces, layout} = figures[plot.id];
  if (layout.showlegend) legend(plot, traces);
  for (const axis of [layout.xaxis, layout.yaxis]) if (axis.title?.text) axis.title.text = wrapped(axis.title.text, plot.clientWidth);
  Plotly.newPlot(plot, traces, {...layout, showlegend: false}, CONFIG);
  for (const button of all("nav button[aria-pressed=false]")) show(plot, button.dataset.policy, false);
  if (plot.classList.contains("time")) plot.on("plotly_relayout", change => brushed(plot, change));
}

// A legend of the page's own: it wraps above the chart, which Plotly's would cover where it is narrow.
function legend(plot, traces) {
  const place = element("p", "", {className: "legend"});
  traces.forEach((trace, i) => {
    if (!trace.name || trace.showlegend === false) return;
    const ink = [trace.line?.color, trace.marker?.color].flat().find(color => typeof color === "string") ?? "currentColor";
    const entry = element("button", "", {type: "button"}), swatch = element("i");
    const dash = trace.line?.dash, dots = (trace.mode ?? "") === "markers";
    if (dots) swatch.className = "dot";
    swatch.style.background = dash && dash !== "solid" ? `repeating-linear-gradient(90deg,${ink} 0 3px,transparent 3px 5px)` : ink;
    if (trace.marker?.opacity) swatch.style.opacity = trace.marker.opacity;
    entry.setAttribute("aria-pressed", "true");
    entry.append(swatch, trace.name);
    entry.addEventListener("click", () => {
      const shown = entry.getAttribute("aria-pressed") !== "true";
      entry.setAttribute("aria-pressed", shown);
      Plotly.restyle(plot, {visible: shown}, [i]);
    });
    place.append(entry);
  });
  plot.before(place);
}

// The title of an axis in as many lines as it takes.
function wrapped(text, width) {
  const most = Math.max(20, Math.floor(width / 8)), lines = [""];
  for (const word of text.split(" ")) {
    if (lines.at(-1).length + word.length > most && lines.at(-1)) lines.push("");
    lines.push(`${lines.pop()} ${word}`.trim());
  }
  return lines.join("<br>");
}

function show(plot, policy, shown) {
  const lines = plot.data.flatMap((line, i) => line.legendgroup === policy ? [i] : []);
  if (lines.length) Plotly.restyle(plot, {visible: shown}, lines);
}

for (const plot of all(".plot")) draw(plot);
for (const fold of all("details")) fold.addEventListener("toggle", () => all(".plot", fold).forEach(draw));
addEventListener("beforeprint", () => {
  for (const fold of all("details")) fold.open = true;
  document.documentElement.classList.add("paper");  // as wide as A4, to see which tables are wider
  for (const table of all("section.table table")) {
    const room = table.parentElement.clientWidth;
    if (table.scrollWidth > room) table.style.zoom = room / table.scrollWidth;
  }
  for (const plot of all(".plot")) { draw(plot); if (plot.data) Plotly.relayout(plot, {width: PRINTED}); }
});
addEventListener("afterprint", () => {
  document.documentElement.classList.remove("paper");
  for (const table of all("section.table table")) table.style.zoom = "";
  for (const plot of all(".plot")) if (plot.data) Plotly.relayout(plot, {width: null, autosize: true});
});

for (const button of all("nav button")) {
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", shown);
    for (const plot of all(".plot")) if (plot.data) show(plot, button.dataset.policy, shown);
  });
}

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = (root.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
});

const number = value => value === null || value === undefined || Number.isNaN(value) ? "–"
  : value === 0 ? "0" : Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en")
  : String(Number(value.toPrecision(3)));

// ---- Tables: a click on a column's head sorts by it, and one that is too wide for the window has a block for each row.
const UNITS = {ms: 1e-3, s: 1, min: 60, h: 3600};

function value(text) {
  const found = text.replaceAll(",", "").match(/[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?/);
  if (!found) return null;
  const unit = text.slice(text.indexOf(found[0].replace(/^[-+]/, "")) + found[0].length).match(/^\s*(ms|s|min|h)\b/);
  return Number(found[0]) * (unit ? UNITS[unit[1]] : 1);
}

function sort(table, column, ascending) {
  const body = table.tBodies[0], groups = [];
  for (const row of body.rows) {  // rows of one group stay under its name
    if (row.classList.contains("group") || !groups.length) groups.push([]);
    groups.at(-1).push(row);
  }
  const text = row => row.cells[column]?.textContent.trim() ?? "";
  const known = [...body.rows].filter(row => !row.classList.contains("group") && value(text(row)) !== null).length;
  const numeric = known > body.rows.length / 2 && !table.tHead.rows[0].cells[column].classList.contains("words");
  const compare = (a, b) => {
    const [one, other] = numeric ? [value(text(a)), value(text(b))] : [text(a) || null, text(b) || null];
    if (one === null || other === null) return (one === null) - (other === null);  // what is missing comes last
    const order = numeric ? one - other : one.localeCompare(other, "en", {numeric: true});
    return ascending ? order : -order;
  };
  for (const rows of groups) {
    const head = rows[0].classList.contains("group") ? [rows.shift()] : [];
    body.append(...head, ...rows.sort(ascending === null ? (a, b) => a.dataset.place - b.dataset.place : compare));
  }
}

for (const table of all("section.table > .scroll > table")) {
  const heads = [...table.tHead.rows[0].cells];
  [...table.tBodies[0].rows].forEach((row, i) => {
    row.dataset.place = i;
    if (!row.classList.contains("group")) [...row.cells].forEach((cell, k) => { cell.dataset.head = heads[k]?.textContent ?? ""; });
  });
  if (table.tBodies[0].rows.length < 2) continue;
  heads.forEach((head, column) => {
    if (!head.textContent) return;
    const button = element("button", "", {type: "button", className: "sort", title: "sort by this column"});
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const next = {none: "ascending", ascending: "descending", descending: "none"}[head.getAttribute("aria-sort") ?? "none"];
      for (const other of heads) other.removeAttribute("aria-sort");
      if (next !== "none") head.setAttribute("aria-sort", next);
      sort(table, column, next === "none" ? null : next === "ascending");
    });
  });
}

function stack() {
  for (const scroll of all("section.table > .scroll")) {
    scroll.classList.remove("stacked");
    if (innerWidth <= 700 && scroll.scrollWidth > scroll.clientWidth) scroll.classList.add("stacked");
  }
  // A stacked table or an open fold is longer and may bring a scrollbar: charts that are drawn have less room then.
  for (const plot of all(".plot")) {
    if (plot.data && plot.checkVisibility() && plot.querySelector("svg").clientWidth !== plot.clientWidth) Plotly.Plots.resize(plot);
  }
}
stack();
addEventListener("resize", stack);
for (const fold of all("details")) fold.addEventListener("toggle", stack);

// ---- All charts over time show the stretch of time that is chosen in one of them.
let span = null;

function brushed(plot, change) {
  const range = change["xaxis.range"] ?? [change["xaxis.range[0]"], change["xaxis.range[1]"]];
  const chosen = change["xaxis.autorange"] ? {"xaxis.autorange": true} : {"xaxis.range": range};
  if (!change["xaxis.autorange"] && range[0] === undefined || JSON.stringify(chosen) === span) return;
  span = JSON.stringify(chosen);
  for (const other of all(".plot.time")) if (other.data) Plotly.relayout(other, chosen);
}

document.documentElement.dataset.ready = "";  // everything is drawn
