"use strict";
// The page's state lives in the fragment of its address: filters, what each chart shows, the opened row, the section.
{
  const root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const byId = (id) => document.getElementById(id);
  const json = (name) => JSON.parse(byId(`json-${name}`).textContent);
  const records = ({ fields, rows }) => rows.map((row) => Object.fromEntries(row.map((value, n) => [fields[n], value])));
  const listeners = [];
  let state = new Map();

  const read = () => {
    const text = location.hash.slice(1);
    if (text.includes("=")) return new Map(new URLSearchParams(text));
    try {
      return new Map(text ? [["at", decodeURIComponent(text)]] : []);
    } catch { // a percent sign without its two digits, of a link that was cut off
      return new Map();
    }
  };
  const write = () => {
    const text = new URLSearchParams([...state]).toString().replace(/%(7C|2C|40)/g, (code) => decodeURIComponent(code));
    history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
  };
  const set = (name, value) => {
    if (value === "" || value === undefined || value === null) state.delete(name); else state.set(name, String(value));
    write();
  };
  const get = (name, otherwise = "") => state.get(name) ?? otherwise;

  const kinds = [...new Set(all(".filters button[data-token]").map((button) => button.dataset.token.split(":", 1)[0]))];
  const chosen = () => {
    const found = new Map();
    for (const kind of kinds) if (get(kind)) found.set(kind, new Set(get(kind).split("|").map((value) => `${kind}:${value}`)));
    return found;
  };
  // a record stays if it has one of the chosen values of each filter; what a record does not say does not hide it
  const wanted = (record) => [...chosen()].every(([kind, values]) => {
    if (record[kind] === undefined) return true;
    return values.has(`${kind}:${record[kind]}`.replaceAll(" ", "_"));
  });

  globalThis.fa2tune = { all, byId, json, records, get, set, wanted, root, onFilter: (act) => listeners.push(act), onTheme: [] };

  root.classList.add("js");
  all(".filters, .tools, #ask").forEach((part) => { part.hidden = false; });
  const filters = document.querySelector(".filters");
  const narrow = matchMedia("(max-width: 700px)");
  if (filters) filters.open = !narrow.matches;
  all("[data-h]").forEach((cell) => cell.style.setProperty("--h", cell.dataset.h));

  // headings stay below the bar where it is fixed
  const bar = byId("bar");
  const measure = () => root.style.setProperty("--bar", narrow.matches ? "0px" : `${bar.offsetHeight}px`);
  new ResizeObserver(measure).observe(bar);
  measure();

  byId("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    fa2tune.onTheme.forEach((act) => act());
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => fa2tune.onTheme.forEach((act) => act()));

  // ---- filters
  const marked = all("[data-f]").map((element) => {
    const tokens = new Map();
    element.dataset.f.split(" ").forEach((token) => tokens.set(token.split(":", 1)[0], token));
    return [element, tokens];
  });
  const find = byId("find");
  const others = byId("others-too");
  const apply = () => {
    const picked = chosen();
    const words = get("find").toLowerCase().split(/\s+/).filter(Boolean);
    for (const [element, tokens] of marked) {
      let hidden = [...picked].some(([kind, values]) => tokens.has(kind) && !values.has(tokens.get(kind)));
      if (!hidden && words.length && element.dataset.n !== undefined) {
        const text = element.textContent.toLowerCase();
        hidden = !words.every((word) => text.includes(word));
      }
      element.classList.toggle("hide", hidden);
    }
    all("tr.detail").forEach((row) => row.classList.toggle("hide", row.previousElementSibling.classList.contains("hide")));
    all(".filters button[data-token]").forEach((button) => {
      const values = picked.get(button.dataset.token.split(":", 1)[0]);
      button.setAttribute("aria-pressed", String(Boolean(values && values.has(button.dataset.token))));
    });
    root.classList.toggle("all", get("all") === "1");
    if (others) others.checked = get("all") === "1";
    if (find && find.value !== get("find")) find.value = get("find");
    const blocks = all("details.block:not(.hide)");
    if (picked.size && blocks.length === 1) blocks[0].open = true;
    const count = [...picked.values()].reduce((sum, values) => sum + values.size, 0);
    byId("clear").disabled = !count;
    byId("narrowed").textContent = count ? ` (${count} chosen)` : "";
    listeners.forEach((act) => act());
  };
  all(".filters button[data-token]").forEach((button) => button.addEventListener("click", () => {
    const kind = button.dataset.token.split(":", 1)[0];
    const values = chosen().get(kind) || new Set();
    if (!values.delete(button.dataset.token)) values.add(button.dataset.token);
    set(kind, [...values].map((token) => token.slice(kind.length + 1)).join("|"));
    apply();
  }));
  byId("clear").addEventListener("click", () => {
    kinds.forEach((kind) => state.delete(kind));
    write();
    apply();
  });
  if (find) find.addEventListener("input", () => { set("find", find.value.trim()); apply(); });
  if (others) others.addEventListener("change", () => { set("all", others.checked ? "1" : ""); apply(); });

  // ---- tables: a button opens the evidence of a row, the headings sort
  const details = json("details");
  fa2tune.facts = records(details.facts);
  const opened = () => get("rows").split(",").filter(Boolean);
  const toggle = (row, open) => {
    const button = row.querySelector("button");
    const there = row.nextElementSibling && row.nextElementSibling.classList.contains("detail") ? row.nextElementSibling : null;
    button.setAttribute("aria-expanded", String(open));
    row.classList.toggle("opened", open);
    if (there && !open) there.remove();
    if (there || !open) return;
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
  const rowNumbered = (number) => document.querySelector(`table.winners tr[data-n="${CSS.escape(number)}"]`);
  all("table.winners tbody tr").forEach((row) => {
    const button = row.querySelector(".opener").appendChild(document.createElement("button"));
    button.type = "button";
    button.setAttribute("aria-expanded", "false");
    button.setAttribute("aria-label", `evidence of ${row.cells[1].textContent} ${row.cells[2].textContent} ${row.cells[3].textContent} ${row.cells[4].textContent}`);
  });
  all("table.winners").forEach((table) => table.tBodies[0].addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-n]");
    if (!row || (String(getSelection()) && !event.target.closest("button"))) return;
    const open = !row.classList.contains("opened");
    toggle(row, open);
    set("rows", [...opened().filter((number) => number !== row.dataset.n), ...(open ? [row.dataset.n] : [])].join(","));
  }));
  fa2tune.showRow = (number) => {
    const row = rowNumbered(String(number));
    if (!row) return;
    if (row.classList.contains("other")) { set("all", "1"); }
    if (row.classList.contains("hide")) byId("clear").click();
    apply();
    row.closest("details").open = true;
    toggle(row, true);
    set("rows", [...opened().filter((each) => each !== String(number)), number].join(","));
    row.scrollIntoView({ block: "center" });
    row.querySelector("button").focus({ preventScroll: true });
  };

  const value = (cell) => {
    const text = cell.dataset.v === undefined ? cell.textContent.trim() : cell.dataset.v;
    const figure = parseFloat(text);
    return Number.isNaN(figure) ? text : figure;
  };
  fa2tune.sortable = (table) => all("thead th", table).forEach((heading) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      all("th", table).forEach((each) => each.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down > 0 ? "ascending" : "descending");
      table.classList.add("sorted");
      const rows = all("tbody tr:not(.detail)", table).map((row) => [row, row.nextElementSibling]);
      const keyed = rows.map(([row, next], place) => [value(row.cells[heading.cellIndex]), place, row, next]);
      keyed.sort(([x, m], [y, n]) => {
        if (x === "" || y === "") return Number(x === "") - Number(y === "") || m - n;
        if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
        return (x < y ? -1 : x > y ? 1 : 0) * down || m - n;
      });
      for (const [, , row, next] of keyed) {
        table.tBodies[0].append(row);
        if (next && next.classList.contains("detail")) row.after(next);
      }
    });
  });
  all("table.sortable").forEach(fa2tune.sortable);

  // ---- sections
  const go = (id) => {
    const section = id && byId(id);
    if (!section) return;
    section.scrollIntoView();
    if (!section.hasAttribute("tabindex")) section.tabIndex = -1;
    section.focus({ preventScroll: true });
  };
  all('.links a, a.skip').forEach((link) => link.addEventListener("click", (event) => {
    event.preventDefault();
    const id = link.hash.slice(1);
    if (!link.classList.contains("skip")) set("at", id);
    go(id);
  }));
  const restore = () => {
    state = read();
    apply();
    all("table.winners tr.opened").forEach((row) => toggle(row, opened().includes(row.dataset.n)));
    opened().forEach((number) => {
      const row = rowNumbered(number);
      if (row) { row.closest("details").open = true; toggle(row, true); }
    });
  };
  fa2tune.start = () => {
    restore();
    go(get("at"));
    // charts above are drawn late, and not all are as high as was reserved for them
    if (get("at")) {
      const settle = setInterval(() => go(get("at")), 400);
      const stop = () => clearInterval(settle);
      setTimeout(stop, 2500);
      for (const kind of ["wheel", "pointerdown", "keydown", "touchstart"]) addEventListener(kind, stop, { once: true });
    }
    addEventListener("hashchange", () => { restore(); go(get("at")); });
  };
  addEventListener("DOMContentLoaded", fa2tune.start);
}
