window.said = [];
for (const kind of ["error", "warn"]) {
  const before = console[kind]; console[kind] = (...all) => { said.push(all.join(" ")); before(...all); };
}
addEventListener("error", (event) => said.push(String(event.message)));
