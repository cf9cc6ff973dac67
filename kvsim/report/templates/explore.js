(() => {
  const TITLES = { batch: "batch [sequences]", prompt: "prompt [tokens]", bits: "bits per number of a packed cache", k: "k, pairs fetched per KV head", gamma: "gamma, tokens drafted at once", acceptance: "acceptance rate of drafted tokens" };
  const grid = JSON.parse(document.getElementById("grid").textContent), place = document.getElementById("controls");
  const axes = { batch: grid.batches, prompt: grid.prompts, "host link": grid.links, ...grid.knobs };
  const start = { batch: 3, prompt: Math.min(3, grid.prompts.length - 1), "host link": grid.links.indexOf(1) };
  const at = {};
  const three = (value) => (value === null ? "-" : Number(value.toPrecision(3)).toLocaleString("en"));
  for (const [name, values] of Object.entries(axes)) {
    at[name] = start[name] ?? Math.floor(values.length / 2);
    const label = document.createElement("label"), slider = document.createElement("input"), shown = document.createElement("output");
    Object.assign(slider, { type: "range", min: 0, max: values.length - 1, step: 1, value: at[name] });
    const tell = () => { shown.textContent = name === "host link" ? `${values[at[name]]} x the profile's` : values[at[name]].toLocaleString("en"); };
    slider.addEventListener("input", () => { at[name] = Number(slider.value); tell(); update(); });
    label.append(`${TITLES[name] || name}: `, shown, slider);
    place.append(label);
    tell();
  }
  const chosen = (variant) => Object.entries(variant.knobs).every(([name, value]) => {
    const wanted = axes[name][at[name]], same = grid.variants.filter((v) => v.name === variant.name).map((v) => v.knobs[name]);
    const near = same.reduce((a, b) => (Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a));
    return value === near;
  });
  const update = () => {
    const [b, p] = [at.batch, at.prompt], batch = grid.batches[b];
    const rows = grid.variants.filter(chosen).map((v) => {
      const table = v.links.length > 1 ? v.links[at["host link"]] : v.links[0];
      const [tpot, ttft, gpu] = ["tpot", "ttft", "gpu"].map((key) => table[key][p][b]);
      return { name: v.name, colour: v.colour, exact: v.exact, idealised: v.idealised, tpot, ttft, gpu, rate: tpot ? batch / tpot : null };
    });
    // what does not fit comes last, and what needs a kernel that the engine has not below what it runs
    const place_of = (row) => (row.rate ? (row.idealised ? 1 : 0) : 2);
    rows.sort((x, y) => place_of(x) - place_of(y) || (y.rate || 0) - (x.rate || 0));
    const full = rows.find((row) => row.name === "full"), best = rows[0], lossless = rows.find((row) => row.exact && row.rate);
    const body = document.getElementById("found");
    body.replaceChildren(...rows.map((row) => {
      const line = document.createElement("tr"), ratio = full && full.rate && row.rate ? row.rate / full.rate : null;
      const cells = [row.rate, row.tpot && row.tpot * 1e3, row.ttft, row.gpu, ratio];
      const name = document.createElement("td");
      name.className = "text";
      name.textContent = row.name + (row.exact ? "" : " (lossy)") + (row.idealised ? ": needs a kernel" : "");
      line.append(name, ...cells.map((value, i) => {
        const cell = document.createElement("td");
        cell.textContent = value === null ? "does not fit" : three(value) + (i === cells.length - 1 ? "x" : "");
        if (value !== null) cell.dataset.value = value;
        return cell;
      }));
      return line;
    }));
    const where = `batch ${batch}, prompt ${grid.prompts[p].toLocaleString("en")}`;
    const told = (row) => `${row.name}: ${three(row.rate)} decode tok/s, TPOT ${three(row.tpot * 1e3)} ms, ${three(row.gpu)} GiB`;
    document.getElementById("said").textContent = !best.rate ? `Nothing fits at ${where}.`
      : `At ${where} the fastest is ${told(best)}.` + (lossless && lossless !== best ? ` The fastest lossless is ${told(lossless)}.` : "")
        + (full && !full.rate ? " Full KV does not fit." : "");
    const able = rows.filter((row) => row.rate).reverse();
    const data = [{ type: "bar", orientation: "h", y: able.map((r) => r.name), x: able.map((r) => r.rate), marker: { color: able.map((r) => r.colour), pattern: { shape: able.map((r) => (r.exact ? "" : "/")) } } }];
    const layout = { height: 90 + 24 * able.length, xaxis: { title: { text: "decode tok/s; hatched: lossy" } }, yaxis: {}, showlegend: false };
    const picture = document.getElementById("speeds");
    picture.style.height = `${layout.height}px`;
    Plotly.react(picture, data, dressed(layout), { responsive: true, displaylogo: false, displayModeBar: false }).then(() => { picture.dataset.drawn = ""; });
  };
  update();
})();
