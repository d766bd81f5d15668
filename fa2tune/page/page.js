"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  root.classList.add("js");
  all(".filters, .tools").forEach((part) => { part.hidden = false; });

  // light or dark: as the system has it, until asked otherwise
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  // filters: within a choice any that is pressed, between choices all; what has no token of a choice stays
  const chosen = new Map();
  const marked = all("[data-f]").map((element) => {
    const tokens = new Map();
    element.dataset.f.split(" ").forEach((token) => tokens.set(token.split(":", 1)[0], token));
    return [element, tokens];
  });
  const find = document.getElementById("find");
  const apply = () => {
    const words = find ? find.value.toLowerCase().split(/\s+/).filter(Boolean) : [];
    all("tr.detail").forEach((row) => row.remove());
    all("tr.opened").forEach((row) => row.classList.remove("opened"));
    for (const [element, tokens] of marked) {
      let hidden = false;
      for (const [kind, wanted] of chosen) {
        if (wanted.size && tokens.has(kind) && !wanted.has(tokens.get(kind))) hidden = true;
      }
      if (!hidden && words.length && element.dataset.n !== undefined) {
        const text = element.textContent.toLowerCase();
        hidden = !words.every((word) => text.includes(word));
      }
      element.classList.toggle("hide", hidden);
    }
    document.getElementById("clear").disabled = ![...chosen.values()].some((wanted) => wanted.size);
  };
  all(".filters button[data-token]").forEach((button) => button.addEventListener("click", () => {
    const token = button.dataset.token;
    const kind = token.split(":", 1)[0];
    const wanted = chosen.get(kind) || new Set();
    chosen.set(kind, wanted);
    if (wanted.has(token)) wanted.delete(token); else wanted.add(token);
    button.setAttribute("aria-pressed", String(wanted.has(token)));
    apply();
  }));
  document.getElementById("clear").addEventListener("click", () => {
    chosen.clear();
    all(".filters button[data-token]").forEach((button) => button.setAttribute("aria-pressed", "false"));
    apply();
  });
  if (find) find.addEventListener("input", apply);
  const others = document.getElementById("others");
  if (others) others.addEventListener("change", () => root.classList.toggle("all", others.checked));

  // winners: a click on a line opens its evidence, one on a heading sorts
  const details = JSON.parse(document.getElementById("details").textContent);
  const open = (row) => {
    const next = row.nextElementSibling;
    row.classList.toggle("opened");
    if (next && next.classList.contains("detail")) { next.remove(); return; }
    const line = document.createElement("tr");
    line.className = "detail";
    const cell = line.insertCell();
    cell.colSpan = row.cells.length;
    const list = cell.appendChild(document.createElement("dl"));
    for (const [title, text] of details.rows[Number(row.dataset.n)]) {
      list.appendChild(document.createElement("dt")).textContent = details.titles[title];
      list.appendChild(document.createElement("dd")).textContent = text;
    }
    row.after(line);
  };
  const value = (cell) => {
    const text = cell.dataset.v === undefined ? cell.textContent.trim() : cell.dataset.v;
    const figure = parseFloat(text);
    return Number.isNaN(figure) ? text : figure;
  };
  all("table.winners").forEach((table) => {
    table.tBodies[0].addEventListener("click", (event) => {
      const row = event.target.closest("tr");
      if (row && !row.classList.contains("detail")) open(row);
    });
    all("th", table).forEach((heading, column) => heading.addEventListener("click", () => {
      const index = heading.classList.contains("axis") ? column - 1 : column;
      const down = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      all("th", table).forEach((each) => each.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down > 0 ? "ascending" : "descending");
      all("tr.detail", table).forEach((row) => row.remove());
      all("tr.opened", table).forEach((row) => row.classList.remove("opened"));
      table.classList.add("sorted");
      const rows = [...table.tBodies[0].rows];
      const empty = (entry) => entry === "";
      rows.sort((a, b) => {
        const [x, y] = [value(a.cells[index]), value(b.cells[index])];
        if (empty(x) || empty(y)) return Number(empty(x)) - Number(empty(y));
        if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
        return (x < y ? -1 : x > y ? 1 : 0) * down || Number(a.dataset.n) - Number(b.dataset.n);
      });
      table.tBodies[0].append(...rows);
    }));
  });

  // what a mark stands for, beside the pointer
  const tip = document.getElementById("tip");
  document.addEventListener("pointermove", (event) => {
    const mark = event.target.closest ? event.target.closest("[data-t]") : null;
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.dataset.t;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 10)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 10)}px`;
  });
})();
