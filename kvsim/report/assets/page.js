"use strict";
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
const draw = () => {
  for (const source of document.querySelectorAll("script[data-for]")) {
    const place = document.getElementById(source.dataset.for), { data, layout } = JSON.parse(source.textContent);
    place.style.height = (layout.height || 420) + "px";
    delete layout.template;
    Plotly.newPlot(place, data, dressed(layout), { responsive: true, displaylogo: false, displayModeBar: false });
    pictures.push([place, layout]);
  }
};
const redress = () => { for (const [place, layout] of pictures) Plotly.relayout(place, dressed(layout)); };
if (window.Plotly) {
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redress);
  addEventListener("beforeprint", redress);
}
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
