"use strict";
// "What does my model get?": the answers come with the page; this shows those of one shape.
{
  const { byId, json, get, set, facts } = fa2tune;
  const served = json("served");
  const gpus = json("gpus");
  const form = byId("ask");
  if (served && form && Object.keys(served.found).length) {
    const answer = byId("answer");
    const keys = Object.keys(served.found).map((key) => key.match(/^(.*) (\S+) (\S+) (\S+)$/).slice(1));
    const NAMES = ["gpu", "dtype", "mask", "dim"];
    const LIMITS = { heads: [1, 1024, ""], batch: [1, 65536, ""], seqlen: [1, 16777216, ""] };
    const short = (length) => (length % 1024 ? String(length) : `${length / 1024}k`);
    const text = (tag, words, name = "") => Object.assign(document.createElement(tag), { textContent: words, className: name });

    // of what the page was given, else what most models have
    const usual = { dtype: "bf16", mask: "causal", dim: "128" };
    const chosen = () => {
      const found = [];
      NAMES.forEach((name, place) => {
        const there = [...new Set(keys.filter((key) => found.every((value, n) => key[n] === value)).map((key) => key[place]))];
        const asked = get(`my.${name}`);
        const value = [asked, usual[name], there[0]].find((each) => there.includes(each));
        const select = form.elements[name];
        select.replaceChildren(...there.map((each) => new Option(name === "gpu" ? gpus[each] || each : each, each, false, each === value)));
        found.push(value);
      });
      return found;
    };
    const number = (name) => {
      const [least, most, otherwise] = LIMITS[name];
      const input = form.elements[name];
      const value = get(`my.${name}`);
      const fine = /^\d+$/.test(value) && Number(value) >= least && Number(value) <= most;
      input.setAttribute("aria-invalid", String(value !== "" && !fine));
      if (document.activeElement !== input) input.value = value !== "" ? value : otherwise;
      return fine ? Number(value) : otherwise;
    };

    const evidence = ({ evidence: kind, on }) => {
      if (kind === "measured") return "measured on this GPU";
      if (kind === "sibling") return `measured on ${on || "a sibling"}`;
      if (kind === "ported") return `as sm_80 code on ${on || "another architecture"}`;
      return "predicted by the model";
    };
    const show = () => {
      const [gpu, dtype, mask, dim] = chosen();
      const asked = Object.fromEntries(["heads", "batch", "seqlen"].map((name) => [name, number(name)]));
      const length = asked.seqlen;
      const lines = served.found[[gpu, dtype, mask, dim].join(" ")];
      const table = document.createElement("table");
      table.className = "plain served";
      const head = table.createTHead();
      const top = head.insertRow();
      const corner = top.appendChild(text("th", "sequence length"));
      corner.rowSpan = 2;
      corner.scope = "col";
      const under = head.insertRow();
      for (const pass of served.passes) {
        const title = top.appendChild(text("th", pass));
        title.colSpan = 4;
        title.scope = "colgroup";
        for (const words of ["TFLOP/s", "time", "evidence", "row"]) {
          under.appendChild(text("th", words, words === "TFLOP/s" || words === "time" ? "r" : "")).scope = "col";
        }
      }
      const body = table.createTBody();
      let exact = true;
      let small = false;
      const heads = asked.heads || Math.max(1, Math.floor(2048 / Number(dim)));
      served.buckets.forEach((bucket, place) => {
        const last = place === served.buckets.length - 1;
        const from = place ? served.buckets[place - 1] + 1 : 1;
        if (length && !(length >= from && (last || length <= bucket))) return;
        const line = body.insertRow();
        const name = last ? `from ${short(from - 1)} on` : `up to ${short(bucket)}`;
        line.appendChild(text("th", length ? `${length} (${name})` : name)).scope = "row";
        const tokens = length || bucket;
        lines.forEach((pass, which) => {
          const [n, cost] = pass[place];
          if (n < 0) {
            const cell = line.insertCell();
            cell.colSpan = 4;
            cell.append(text("span", "default config", "pill"), " no row here serves it: no speed is known");
            return;
          }
          const row = facts[n];
          const near = [];
          if (String(row.dim) !== dim) near.push(`head dim ${row.dim}`);
          if (row.dtype !== dtype) near.push(row.dtype);
          if (row.len !== bucket) near.push(`length ${short(row.len)}`);
          if (near.length) exact = false;
          const batch = asked.batch || Math.max(1, Math.floor(16384 / tokens));
          const less = tokens * batch * heads * Number(dim) < 0.9 * 16384 * 2048;
          if (less) small = true;
          const flops = 4 * batch * heads * tokens * tokens * Number(dim) * (mask === "causal" ? 0.5 : 1) * (which ? 2.5 : 1);
          // head dims that are padded alike take the same time: the smaller one has fewer useful products in it
          const speed = row.tflops ? (row.tflops * Number(dim)) / row.dim : null;
          const rate = speed ? `${near.length ? "about " : ""}${speed.toFixed(0)}` : "unknown";
          const us = speed ? flops / speed / 1e6 : null;
          const time = us === null ? "" : us < 1000 ? `${us.toPrecision(3)} us` : `${(us / 1000).toPrecision(3)} ms`;
          const bound = time && (less ? `at least ${time}` : time);
          line.appendChild(text("td", rate, "r strong"));
          line.appendChild(text("td", bound, "r"));
          const cell = line.insertCell();
          cell.append(text("span", evidence(row), `pill o-${row.evidence}`));
          const link = text("button", near.length ? `row of ${near.join(", ")}` : "its own row", "link");
          link.type = "button";
          link.title = row.title;
          link.addEventListener("click", () => fa2tune.showRow(n));
          const where = line.insertCell();
          where.append(link);
          if (cost >= 0) where.append(text("div", served.costs[cost], "n"));
        });
      });
      answer.replaceChildren(table);
      const notes = [`Times are for ${asked.batch ? `batch ${asked.batch}` : "16k tokens a call"} and ${heads} query heads of ${dim}, V alike; key and value heads do not change the row.`];
      if (!exact) notes.push("A row of another head dim, dtype or length computes the right result but was not tuned for this one: its speed is only a guide.");
      if (small) notes.push("Rows are timed at 16k tokens and hidden size 2048; smaller calls reach fewer TFLOP/s, so their time is a lower bound.");
      byId("askmore").textContent = notes.join(" ");
    };
    form.addEventListener("input", (event) => {
      set(`my.${event.target.name}`, event.target.value.trim());
      show();
    });
    form.addEventListener("submit", (event) => event.preventDefault());
    fa2tune.onFilter(show);
  } else if (form) {
    form.hidden = true;
    byId("askmore").textContent = "No row of this file serves a whole pass.";
  }
  fa2tune.all("#model .nojs").forEach((part) => part.remove());
}
