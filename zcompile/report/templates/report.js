for (const section of document.querySelectorAll("section.program")) {
  const marked = {};
  const text = section.querySelector(".text");
  const lines = [...text.querySelectorAll("[data-node]")];
  const cursor = section.querySelector("i.cursor");
  const curve = section.querySelector("svg.curve");
  const readout = section.querySelector("output.readout");
  const of = (node) => section.querySelectorAll(`[data-node="${CSS.escape(node)}"]:not(button)`);

  const mark = (kind, node) => {
    if (marked[kind] === node) return;
    if (marked[kind]) for (const one of of(marked[kind])) one.classList.remove(kind);
    marked[kind] = node;
    if (node) for (const one of of(node)) one.classList.add(kind);
    if (!cursor) return;
    const line = lines.find((one) => one.dataset.node === (marked.hover || marked.kept));
    const runs = line !== undefined && line.dataset.start !== undefined;
    cursor.hidden = !runs;
    if (runs) cursor.style.left = `${line.dataset.start}%`;
    readout.textContent = runs ? `${line.dataset.node}, ${line.dataset.about}` : "";
  };
  const keep = (node, scrolls) => {
    mark("kept", node);
    for (const line of lines) line.setAttribute("aria-selected", String(line.dataset.node === node));
    const line = lines.find((one) => one.dataset.node === node);
    if (!line) return;
    text.setAttribute("aria-activedescendant", line.id);
    if (!scrolls) return;
    text.scrollIntoView({ block: "nearest" });
    text.scrollTop += line.getBoundingClientRect().top - text.getBoundingClientRect().top - text.clientHeight / 3;
  };
  const node = (event) => {
    const found = event.target.closest("[data-node]");
    return found && section.contains(found) ? found.dataset.node : "";
  };
  const within = (event) => curve !== null && curve.contains(event.target);
  // The line that runs at the place of the mouse; between lines, the nearest one that takes time.
  const nearest = (event) => {
    const box = curve.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * 100;
    let best = "", least = Infinity;
    for (const line of lines) {
      const start = Number(line.dataset.start), end = Number(line.dataset.end);
      if (!(end > start)) continue;
      const far = Math.max(start - at, at - end, 0);
      if (far < least) [best, least] = [line.dataset.node, far];
    }
    return best;
  };

  section.addEventListener("mouseover", (event) => mark("hover", within(event) ? marked.hover || "" : node(event)));
  section.addEventListener("mouseleave", () => mark("hover", ""));
  if (curve) curve.addEventListener("mousemove", (event) => mark("hover", nearest(event)));
  section.addEventListener("click", (event) => {
    const found = within(event) ? nearest(event) : node(event);
    if (found) keep(found === marked.kept && text.contains(event.target) ? "" : found, !text.contains(event.target));
  });
  text.addEventListener("keydown", (event) => {
    const names = [...new Set(lines.map((line) => line.dataset.node))];
    const now = names.indexOf(marked.kept || "");
    const to = { ArrowDown: now + 1, ArrowUp: now < 0 ? names.length - 1 : now - 1, Home: 0, End: names.length - 1 }[event.key];
    if (event.key === "Escape") keep("", false);
    if (to === undefined) return;
    event.preventDefault();
    keep(names[Math.min(Math.max(to, 0), names.length - 1)], true);
  });
}
