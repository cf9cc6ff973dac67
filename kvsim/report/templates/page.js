"use strict";
const plotted = (async () => {  // plotly.js is inside, packed; the text is there before it is unpacked
  const packed = document.getElementById("plotly");
  if (!packed) return false;
  const letters = atob(packed.textContent), bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")), script = document.createElement("script");
  script.src = URL.createObjectURL(await new Response(stream, { headers: { "Content-Type": "text/javascript" } }).blob());  // compiled beside the page
  await new Promise((done) => { script.onload = done; document.head.append(script); });
  URL.revokeObjectURL(script.src);
  return true;
})();
const theme = () => {
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--ink").trim(), line = style.getPropertyValue("--line").trim();
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, color: ink, automargin: true };
  return { ink, axis };
};
const pictures = [];
const dressed = (layout) => {
  const { ink, axis } = theme();
  const own = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true, font: { color: ink, size: 12, family: "system-ui, sans-serif" } };
  const merged = { legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, ...layout, ...own, margin: { l: 8, r: 8, t: 8, b: 8, ...(layout.margin || {}) } };
  for (const key of Object.keys(layout)) if (/^[xy]axis[0-9]*$/.test(key)) merged[key] = { ...layout[key], ...axis };
  for (const key of ["xaxis", "yaxis"]) if (!merged[key]) merged[key] = axis;
  return merged;
};
const plain = (value) => (value >= 1e4 || value < 1e-3 ? `${Number((value / 10 ** (3 * Math.floor(Math.log10(value) / 3))).toPrecision(3))}${{ "-4": "p", "-3": "n", "-2": "µ", "-1": "m", 1: "k", 2: "M", 3: "G", 4: "T", 5: "P" }[Math.floor(Math.log10(value) / 3)] || ""}` : value.toLocaleString("en", { maximumSignificantDigits: 3 }));
const ticked = (axes, width, height) => {  // 1, 2, 5 of each decade in full digits, or fewer where they would touch
  const change = {};
  for (const name of ["xaxis", "yaxis"]) {
    const axis = axes[name];
    if (!axis || axis.type !== "log" || !axis.range) continue;
    const [low, high] = axis.range, room = name === "xaxis" ? width / 48 : height / 24, wanted = high - low;
    const steps = 3 * wanted <= room ? [1, 2, 5] : wanted <= room ? [1] : null, every = Math.ceil(wanted / room), values = [];
    for (let k = Math.floor(low); k <= Math.ceil(high); k += steps ? 1 : every) {
      for (const step of steps || [1]) { const at = k + Math.log10(step); if (at >= low && at <= high) values.push(step * 10 ** k); }
    }
    change[`${name}.tickvals`] = values;
    change[`${name}.ticktext`] = values.map(plain);
  }
  return change;
};
const taller = (layout, legend) => (layout.height || 420) + Math.max(0, legend - 24);
const fitted = async (place, layout, again = true) => {  // room for the legend, which wraps on a phone
  const legend = place.querySelector(".legend");
  const height = taller(layout, legend ? legend.getBoundingClientRect().height : 0);
  if (!again && Math.abs(height - place._fullLayout.height) <= 20) return;
  place.style.height = `${height}px`;
  const { xaxis, yaxis } = place._fullLayout;
  await Plotly.relayout(place, { height, ...(again && xaxis && yaxis ? ticked(place._fullLayout, xaxis._length, yaxis._length) : {}) });
};
const guessed = (data, layout, width) => {  // the height of a legend, so that a picture is drawn once
  const names = data.filter((t) => t.name && t.showlegend !== false).map((t) => t.name.length), own = layout.legend && layout.legend.entrywidth;
  if (names.length < 2) return 0;
  const bars = data.flatMap((t) => (t.orientation === "h" ? t.y.map((y) => String(y).length) : []));
  const room = width - 24 - (bars.length ? 6.5 * Math.max(...bars) + 10 : 45), entries = names.map((n) => (own ? own + 45 : 52 + 5.8 * n));
  const whole = entries.reduce((x, y) => x + y, 0) <= room;
  return 10 + 19 * (whole ? 1 : Math.ceil(names.length / Math.max(1, Math.floor(room / Math.max(...entries)))));
};
const preset = (place, layout) => {  // ticks for the room that there will be, so that it is drawn once
  const change = ticked(layout, place.clientWidth - 100, (layout.height || 420) - 100);
  for (const [key, value] of Object.entries(change)) { const [axis, name] = key.split("."); layout[axis][name] = value; }
};
const waiting = [...document.querySelectorAll("script[data-for]")];
const drawNext = async () => {  // what Plotly does before it first waits is enough for paper
  const source = waiting.shift(), place = document.getElementById(source.dataset.for), { data, layout } = JSON.parse(source.textContent);
  delete layout.template;
  if (place.clientWidth < 500) layout.legend = { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, entrywidth: 105, font: { size: 11 } };
  preset(place, layout);
  const height = taller(layout, guessed(data, layout, place.clientWidth));
  place.style.height = `${height}px`;
  place.dataset.drawn = "";
  await Plotly.newPlot(place, data, dressed({ ...layout, height }), { responsive: true, displaylogo: false, displayModeBar: false });
  await fitted(place, layout, false);
  pictures.push([place, layout]);
};
const draw = async () => {  // one after the other, so that the first is there at once
  while (waiting.length) {
    await drawNext();
    await new Promise((done) => setTimeout(done));
  }
};
const drawAll = () => { while (waiting.length) drawNext(); };
const redress = () => { for (const [place, layout] of pictures) Plotly.relayout(place, dressed(layout)).then(() => fitted(place, layout)); };
plotted.then((can) => {
  if (!can) return;
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redress);
  addEventListener("beforeprint", () => { drawAll(); redress(); });
});
const worth = (cell) => (cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value));
for (const head of document.querySelectorAll("th")) {
  head.querySelector("button").addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending", body = head.closest("table").tBodies[0];
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const order = [...body.rows].sort((a, b) => {
      const [x, y] = [worth(a.cells[head.cellIndex]), worth(b.cells[head.cellIndex])];
      return (up ? 1 : -1) * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y)));
    });
    body.append(...order);
  });
}
const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", async () => {
    const rows = [...button.previousElementSibling.querySelectorAll("tr")];
    const text = rows.map((row) => [...row.cells].map((cell) => quoted(cell.dataset.value ?? cell.textContent)).join(",")).join("\n");
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  });
}
