"use strict";
// Charts: each takes the records that the filters leave, one value of each of its picks, and the width there is.
{
  const { all, byId, json, records, get, set, wanted, root } = fa2tune;
  const charts = new Map(json("charts").map((chart) => [chart.id, chart]));
  const data = Object.fromEntries(Object.entries(json("data")).map(([name, table]) => [name, records(table)]));
  const picks = json("picks");
  const gpus = json("gpus");
  const drawn = new Map();
  const LEAST_PANEL = 215;

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const theme = () => {
    const [ink, pale, faint, card] = ["--ink", "--pale", "--faint", "--card"].map(colour);
    const ranges = (name, count) => Array.from({ length: count }, (_, n) => colour(`--${name}${n + 1}`));
    return {
      background: card, font: "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif",
      axis: { labelColor: pale, titleColor: pale, gridColor: faint, domainColor: pale, tickColor: faint, titleFontWeight: "normal",
        labelFontSize: 11, titleFontSize: 11 },
      axisX: { grid: false }, axisY: { grid: true }, view: { stroke: null }, title: { color: ink, fontSize: 14, subtitleColor: pale, anchor: "start", offset: 12 },
      header: { labelColor: ink, labelFontSize: 12, labelFontWeight: 600 },
      legend: { symbolBaseFillColor: pale, symbolBaseStrokeColor: pale, labelColor: ink, titleColor: pale, titleFontWeight: "normal", orient: "top", labelFontSize: 12, symbolSize: 70,
        columns: root.clientWidth < 700 ? 2 : 8, labelLimit: 260 },
      range: { category: ranges("cat", 8), ordinal: ranges("len", 6) },
      mark: { color: colour("--cat1") }, bar: { color: colour("--cat1") }, tick: { color: ink }, rule: { color: colour("--cat1") },
      point: { color: colour("--cat1") }, line: { color: colour("--cat1") },
    };
  };

  const picked = (chart, rows) => {
    const found = {};
    for (const name of chart.picks) {
      const there = new Set(rows.map((row) => row[name]));
      const values = picks[name].values.filter(([each]) => there.has(each));
      if (!values.length) continue;
      const asked = get(`${chart.id}.${name}`);
      found[name] = { values, value: values.some(([each]) => each === asked) ? asked : values[0][0] };
      rows = rows.filter((row) => row[name] === found[name].value);
    }
    return [found, rows];
  };
  const label = (name, value, text) => (name === "gpu" ? gpus[value] || value : text);

  const tip = byId("tip");
  const tooltip = (handler, event, item, value) => {
    tip.hidden = !value || typeof value !== "object";
    if (tip.hidden) return;
    const list = document.createElement("dl");
    for (const [title, text] of Object.entries(value)) {
      if (["null", "undefined", "NaN", ""].includes(String(text))) continue;
      list.appendChild(document.createElement("dt")).textContent = title;
      list.appendChild(document.createElement("dd")).textContent = text;
    }
    tip.replaceChildren(list);
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 10))}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 10))}px`;
  };

  const button = (text, title, act) => {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    made.title = title;
    made.addEventListener("click", act);
    return made;
  };
  const save = (blob, name) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };

  const options = () => ({
    ast: true, actions: false, renderer: "svg", defaultStyle: false, tooltip, config: theme(), logLevel: 1,
    loader: { load: () => Promise.reject(new Error("this page loads nothing")) },
  });
  // a file says by itself what it shows
  const exported = async (figure, act) => {
    const { spec, said, chart } = drawn.get(figure) || {};
    if (!spec) return;
    const titled = { ...spec, title: { text: chart.title, subtitle: said || undefined }, padding: 12 };
    const result = await vegaEmbed(document.createElement("div"), titled, options());
    await act(result.view, `fa2tune-${chart.id}`);
    result.finalize();
  };

  const controls = (figure, chart, found) => {
    const place = figure.querySelector(".controls");
    const before = place.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    place.replaceChildren();
    for (const [name, { values, value }] of Object.entries(found)) {
      if (values.length < 2) continue;
      const group = place.appendChild(document.createElement("div"));
      group.className = "pick";
      group.setAttribute("role", "group");
      group.setAttribute("aria-label", picks[name].title);
      for (const [each, text] of values) {
        const choice = group.appendChild(button(label(name, each, text), picks[name].title, () => {
          set(`${chart.id}.${name}`, each);
          draw(figure, true);
        }));
        choice.dataset.key = `${name} ${each}`;
        choice.setAttribute("aria-pressed", String(each === value));
      }
    }
    const tools = place.appendChild(document.createElement("div"));
    tools.className = "pick tools-of";
    const large = get(`${chart.id}.large`) === "1";
    if (chart.panels > 1) {
      const wide = tools.appendChild(button("larger panels", "fewer and larger panels", () => {
        set(`${chart.id}.large`, large ? "" : "1");
        draw(figure, true);
      }));
      wide.dataset.key = "large";
      wide.setAttribute("aria-pressed", String(large));
    }
    tools.append(
      button("reset zoom", "draw the whole range again", () => draw(figure, true)),
      button("SVG", "save as SVG", () => exported(figure, async (view, name) => {
        save(new Blob([await view.toSVG()], { type: "image/svg+xml" }), `${name}.svg`);
      })),
      button("PNG", "save as PNG", () => exported(figure, async (view, name) => {
        const canvas = await view.toCanvas(2);
        save(await new Promise((done) => { canvas.toBlob(done); }), `${name}.png`);
      })),
    );
    const hint = tools.appendChild(document.createElement("span"));
    hint.textContent = "Shift + wheel zooms, dragging moves";
    if (before) [...place.querySelectorAll("button")].find((each) => each.dataset.key === before)?.focus();
  };

  const table = (figure, chart, rows) => {
    const place = figure.querySelector(".figures .scroll");
    if (!figure.querySelector(".figures").open) { place.replaceChildren(); return; }
    const made = document.createElement("table");
    made.className = "plain sortable";
    const head = made.createTHead().insertRow();
    for (const [, title] of chart.columns) {
      const cell = head.appendChild(document.createElement("th"));
      cell.scope = "col";
      cell.textContent = title;
    }
    const body = made.createTBody();
    for (const row of rows) {
      const line = body.insertRow();
      for (const [field] of chart.columns) {
        const cell = line.insertCell();
        const value = row[field];
        if (typeof value === "number") { cell.className = "r"; cell.textContent = String(Number(value.toPrecision(4))); } else cell.textContent = value ?? "";
      }
    }
    fa2tune.sortable(made);
    place.replaceChildren(made);
  };

  // a legend names what is drawn, in colours that stay the same whatever is drawn
  const legends = (spec, rows) => {
    const layers = (spec.spec || spec).layer || [spec.spec || spec];
    for (const { encoding = {} } of layers) {
      for (const channel of ["color", "shape"]) {
        const one = encoding[channel];
        if (!one || !one.scale || !one.scale.domain) continue;
        const there = new Set(rows.map((row) => row[one.field]));
        one.legend = { ...one.legend, values: one.scale.domain.filter((value) => there.has(value)) };
      }
    }
  };

  const size = (chart, spec, rows, width, large) => {
    if (!chart.panels) {
      spec.autosize = { type: "fit-x", contains: "padding" };
      spec.width = Math.max(240, width - 2);
      if (chart.height) spec.height = chart.height;
      return;
    }
    const there = new Set(rows.map((row) => row.panel)).size;
    const fits = Math.max(1, Math.floor(width / (LEAST_PANEL + 55)));
    // fewer columns than a full row of panels: as many as leave no row short, where that is possible
    let columns = Math.min(chart.panels, fits, there);
    while (columns > 1 && columns < Math.min(chart.panels, there) && chart.panels % columns) columns -= 1;
    if (large) columns = Math.min(columns, root.clientWidth < 700 ? 1 : 2) === columns ? 1 : Math.min(columns, 2);
    spec.columns = columns;
    spec.spacing = { row: 26, column: 18 };
    const most = columns > 1 || large ? 2000 : 620;
    spec.spec.width = Math.min(most, Math.max(150, Math.floor((width - 8) / columns) - (chart.height > 200 ? 78 : 68)));
    spec.spec.height = large ? Math.round(chart.height * 1.7) : chart.height;
  };

  const draw = async (figure, now = false) => {
    const chart = charts.get(figure.dataset.chart);
    const plot = figure.querySelector(".plot");
    const shown = plot.getClientRects().length > 0 && !figure.closest("details:not([open])");
    if (!shown || !(now || near.has(figure))) { drawn.delete(figure); return; }
    const [found, rows] = picked(chart, (data[chart.data] || []).filter(wanted));
    controls(figure, chart, found);
    table(figure, chart, rows);
    const before = drawn.get(figure);
    const around = getComputedStyle(plot);
    const width = plot.clientWidth - parseFloat(around.paddingLeft) - parseFloat(around.paddingRight);
    plot.style.minHeight = `${plot.offsetHeight}px`; // so that nothing jumps while it is drawn
    drawn.set(figure, { width: plot.clientWidth, rows, chart });
    if (!rows.length) {
      before?.finalize?.();
      plot.style.minHeight = "";
      plot.replaceChildren(Object.assign(document.createElement("p"), { className: "say", textContent: "The filters leave nothing to draw." }));
      return;
    }
    const spec = structuredClone(chart.spec);
    size(chart, spec, rows, width, get(`${chart.id}.large`) === "1");
    spec.datasets = { rows };
    const chosen = Object.entries(found).map(([name, { value }]) => [name, value]);
    for (const [name, extra] of Object.entries(chart.extra)) {
      const dtypes = new Set(rows.map((row) => row.dtype));
      spec.datasets[name] = extra.filter((row) => chosen.every(([key, value]) => !(key in row) || row[key] === value) && dtypes.has(row.dtype));
    }
    const said = Object.entries(found).map(([name, { values, value }]) => label(name, value, values.find(([each]) => each === value)[1])).join(", ");
    legends(spec, rows);
    spec.description = `${chart.title}${said ? ` (${said})` : ""}. ${chart.description} ${rows.length} records; the table below has the same figures.`;
    const inside = document.createElement("div");
    plot.replaceChildren(inside);
    try {
      const result = await vegaEmbed(inside, spec, options());
      before?.finalize?.();
      plot.style.minHeight = "";
      if (drawn.get(figure)?.rows !== rows) { result.finalize(); return; }
      drawn.set(figure, { ...drawn.get(figure), spec, said, finalize: () => result.finalize() });
    } catch (error) {
      plot.replaceChildren(Object.assign(document.createElement("p"), { className: "warn", textContent: `This chart could not be drawn: ${error.message}` }));
    }
  };

  const figures = all("figure.chart");
  const main = byId("main");
  const near = new Set();
  const watch = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) near.add(target); else near.delete(target);
      if (isIntersecting && !drawn.has(target)) draw(target);
    }
  }, { rootMargin: "600px 0px" });
  const again = () => {
    for (const figure of figures) drawn.get(figure)?.finalize?.();
    drawn.clear();
    figures.forEach((figure) => draw(figure));
  };
  fa2tune.onFilter(again);
  fa2tune.onTheme.push(again);
  let waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      for (const figure of figures) {
        const width = figure.querySelector(".plot").clientWidth;
        if (drawn.has(figure) && Math.abs(drawn.get(figure).width - width) > 8) draw(figure);
      }
    }, 150);
  });
  for (const figure of figures) {
    figure.querySelectorAll(".nojs").forEach((text) => text.remove());
    const chart = charts.get(figure.dataset.chart);
    const plot = figure.querySelector(".plot");
    const [, rows] = picked(chart, data[chart.data] || []);
    const columns = Math.max(1, Math.min(chart.panels, Math.floor(main.clientWidth / (LEAST_PANEL + 55))));
    const lines = chart.panels ? Math.ceil(new Set(rows.map((row) => row.panel)).size / columns) : 1;
    plot.style.minHeight = `${lines * ((chart.height || 300) + 80) + 70}px`; // about what it will need
    figure.querySelector(".figures").addEventListener("toggle", () => {
      const { chart, rows } = drawn.get(figure) || {};
      if (chart) table(figure, chart, rows);
    });
    watch.observe(figure);
  }
  addEventListener("beforeprint", () => figures.forEach((figure) => { if (!drawn.has(figure)) draw(figure, true); }));
  addEventListener("pointerdown", (event) => { if (!event.target.closest(".plot")) tip.hidden = true; });
  addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });
}
