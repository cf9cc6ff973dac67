"use strict";
const inflate = (packed) => {  // RFC 1951 after a gzip header: at once, so that charts are there when the page has loaded
  const out = new Uint8Array(new DataView(packed.buffer).getUint32(packed.length - 4, true));
  let at = 10, hold = 0, held = 0, to = 0;
  const bits = (n) => {
    while (held < n) { hold |= packed[at++] << held; held += 8; }
    const value = hold & ((1 << n) - 1);
    hold >>>= n; held -= n;
    return value;
  };
  const codes = (lengths) => {
    const count = new Uint16Array(16), start = new Uint16Array(17), symbols = new Uint16Array(lengths.length);
    for (const length of lengths) if (length) count[length]++;
    for (let i = 1; i < 16; i++) start[i + 1] = start[i] + count[i];
    lengths.forEach((length, symbol) => { if (length) symbols[start[length]++] = symbol; });
    const short = new Uint16Array(512);  // symbol and length of codes of up to 9 bits, by the next 9 bits
    for (let length = 1, code = 0, index = 0; length < 10; length++, code <<= 1) {
      for (let i = 0; i < count[length]; i++, code++, index++) {
        let turned = 0;
        for (let bit = 0; bit < length; bit++) turned |= ((code >> bit) & 1) << (length - 1 - bit);
        for (let at = turned; at < 512; at += 1 << length) short[at] = (symbols[index] << 4) | length;
      }
    }
    return { count, symbols, short };
  };
  const decode = ({ count, symbols, short }) => {
    while (held < 9) { hold |= packed[at++] << held; held += 8; }
    const known = short[hold & 511];
    if (known) { hold >>>= known & 15; held -= known & 15; return known >> 4; }
    for (let length = 1, code = 0, first = 0, index = 0; length < 16; length++) {
      code |= bits(1);
      if (code - count[length] < first) return symbols[index + code - first];
      index += count[length]; first = (first + count[length]) << 1; code <<= 1;
    }
  };
  const bases = (extra, base) => extra.map((_, i) => (i ? (base += 1 << extra[i - 1]) : base));
  const lengthBits = [...Array(28).keys()].map((i) => (i < 8 ? 0 : (i >> 2) - 1)).concat(0), lengthBase = bases(lengthBits, 3);
  lengthBase[28] = 258;
  const farBits = [...Array(30).keys()].map((i) => (i < 4 ? 0 : (i >> 1) - 1)), farBase = bases(farBits, 1);
  const fixed = [codes([...Array(288).keys()].map((i) => (i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8))), codes(Array(30).fill(5))];
  const dynamic = () => {
    const literals = bits(5) + 257, far = bits(5) + 1, own = Array(19).fill(0), lengths = [];
    const order = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15].slice(0, bits(4) + 4);
    for (const i of order) own[i] = bits(3);
    const coded = codes(own);
    while (lengths.length < literals + far) {
      const symbol = decode(coded);
      const [value, times] = symbol < 16 ? [symbol, 1] : symbol === 16 ? [lengths.at(-1), 3 + bits(2)] : symbol === 17 ? [0, 3 + bits(3)] : [0, 11 + bits(7)];
      for (let i = 0; i < times; i++) lengths.push(value);
    }
    return [codes(lengths.slice(0, literals)), codes(lengths.slice(literals))];
  };
  for (let last = 0; !last;) {
    last = bits(1);
    const kind = bits(2);
    if (!kind) {
      at -= held >> 3; hold = held = 0;
      const size = packed[at] | (packed[at + 1] << 8);
      out.set(packed.subarray(at + 4, at + 4 + size), to);
      at += 4 + size; to += size;
      continue;
    }
    const [literal, distance] = kind === 1 ? fixed : dynamic();
    for (let symbol = decode(literal); symbol !== 256; symbol = decode(literal)) {
      if (symbol < 256) { out[to++] = symbol; continue; }
      const length = lengthBase[symbol - 257] + bits(lengthBits[symbol - 257]), far = decode(distance);
      const back = farBase[far] + bits(farBits[far]);
      for (let i = 0; i < length; i++, to++) out[to] = out[to - back];
    }
  }
  return out;
};
const plotted = (() => {  // plotly.js is inside, packed; the text is there before it is unpacked
  const packed = document.getElementById("plotly");
  if (!packed) return false;
  const letters = atob(packed.textContent), bytes = new Uint8Array(letters.length), script = document.createElement("script");
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  script.textContent = new TextDecoder().decode(inflate(bytes));
  document.head.append(script);
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
const drawAll = () => { while (waiting.length) drawNext(); };
const redress = () => { for (const [place, layout] of pictures) Plotly.relayout(place, dressed(layout)).then(() => fitted(place, layout)); };
if (plotted) {
  drawAll();
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
