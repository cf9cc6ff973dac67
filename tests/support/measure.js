() => {
  const boxes = (some) => [...some].map((e) => [e.textContent.trim(), e.getBoundingClientRect(), e])
    .filter(([text, box]) => text && box.width > 0 && box.height > 0);
  const overlaps = [];
  const compare = (found, slack) => {
    for (let i = 0; i < found.length; i++) for (let j = i + 1; j < found.length; j++) {
      const [a, b] = [found[i][1], found[j][1]];
      if (found[i][2].contains(found[j][2]) || found[j][2].contains(found[i][2])) continue;
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const tall = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > slack && tall > slack) overlaps.push([found[i][0].slice(0, 60), found[j][0].slice(0, 60)]);
    }
  };
  for (const svg of document.querySelectorAll(".picture")) compare(boxes(svg.querySelectorAll("text")), 3);
  compare(boxes(document.querySelectorAll("h1, h2, h3, p, li, th, td, button.copy, label")), 3);
  const cut = [];
  for (const svg of document.querySelectorAll(".picture")) {
    const frame = svg.getBoundingClientRect();
    for (const [text, box] of boxes(svg.querySelectorAll("text"))) {
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1) cut.push(text.slice(0, 60));
    }
  }
  const headings = [...document.querySelectorAll("h1, h2, h3")].map((h) => {
    let next = h.nextElementSibling || (h.parentElement.nextElementSibling);
    const mine = h.getBoundingClientRect(), its = next ? next.getClientRects()[0] : null;
    return { text: h.textContent, column: Math.round(mine.left), next: its ? Math.round(its.left) : null };
  });
  const traces = {};
  for (const place of document.querySelectorAll(".picture")) {
    traces[place.getAttribute("aria-label")] = (place._fullData || []).map((t) => ({ type: t.type, name: t.name, x: Array.from(t.x || []), y: Array.from(t.y || []), base: Array.from(t.base || []) }));
  }
  return {
    scroll: document.documentElement.scrollWidth, width: innerWidth, overlaps, cut, headings, traces,
    cells: [...document.querySelectorAll("td[data-value]")].map((c) => [c.textContent, Number(c.dataset.value)]),
    scrolled: [...document.querySelectorAll(".scroll")].filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.getAttribute("aria-label")),
    paper: getComputedStyle(document.body).backgroundColor,
    pictures: document.querySelectorAll(".picture .main-svg").length,
    verdict: (document.querySelector(".verdict") || {}).textContent || "",
    grid: (document.getElementById("grid") || {}).textContent || "",
    foot: (document.querySelector("footer code") || {}).textContent || "",
  };
}
