for (const section of document.querySelectorAll("section.world")) {
  const rows = section.querySelector("tbody");
  const of = (row) => section.querySelectorAll(`[data-row="${row}"]`);
  const marked = {};
  const mark = (kind, row) => {
    if (marked[kind]) for (const one of of(marked[kind])) one.classList.remove(kind);
    marked[kind] = row;
    if (row) for (const one of of(row)) one.classList.add(kind);
  };
  const row = (event) => {
    const found = event.target.closest("[data-row]");
    return found ? found.dataset.row : "";
  };
  section.addEventListener("mouseover", (event) => mark("hover", row(event)));
  section.addEventListener("mouseleave", () => mark("hover", ""));
  const keep = (found) => {
    mark("kept", found === marked.kept ? "" : found);
    if (marked.kept) rows.querySelector(`[data-row="${found}"]`).scrollIntoView({ block: "nearest" });
  };
  section.addEventListener("click", (event) => { if (row(event)) keep(row(event)); });
  rows.addEventListener("keydown", (event) => {
    const now = event.target.closest("tr");
    const next = { ArrowDown: now.nextElementSibling, ArrowUp: now.previousElementSibling }[event.key];
    if (event.key === "Enter") keep(now.dataset.row);
    if (!next) return;
    event.preventDefault();
    next.focus();
  });

  const headings = [...section.querySelectorAll("th")];
  headings.forEach((heading, column) => {
    const button = heading.querySelector("button");
    if (!button) return;
    button.addEventListener("click", () => {
      const falling = heading.getAttribute("aria-sort") === "ascending";
      for (const one of headings) if (one.querySelector("button")) one.setAttribute("aria-sort", "none");
      heading.setAttribute("aria-sort", falling ? "descending" : "ascending");
      const value = (line) => line.children[column].dataset.value;
      const order = (a, b) => value(a) - value(b) || value(a).localeCompare(value(b));
      rows.append(...[...rows.children].sort((a, b) => (falling ? -1 : 1) * (order(a, b) || 0)));
    });
  });

  const copy = section.querySelector(".copy");
  if (copy) copy.addEventListener("click", async () => {
    const code = section.querySelector(".advice code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      copy.textContent = "Copied";
    } catch {
      window.getSelection().selectAllChildren(code);
      copy.textContent = "Selected";
    }
  });
}
