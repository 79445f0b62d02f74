"use strict";
// Runs, filters and what they select. Everything from a run reaches the page as text nodes.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);

  function element(name, properties = {}, ...children) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(properties)) {
      if (key in node && key !== "role" && !key.startsWith("aria")) node[key] = value;
      else node.setAttribute(key, value);
    }
    node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
    return node;
  }

  function number(value, digits = 3) {
    if (value === null || value === undefined) return "–";
    if (typeof value !== "number") return String(value);
    if (value !== 0 && (Math.abs(value) < 10 ** -digits || Math.abs(value) >= 1e5)) return value.toExponential(1);
    return String(Number(value.toFixed(digits)));
  }

  // Okabe and Ito's colours, which colour-blind readers tell apart; for dark paper lighter ones.
  const palettes = {
    light: ["#0072b2", "#d55e00", "#007a5e", "#b04a8a", "#a36a00", "#2f8fc4", "#1b1b1b", "#7a7a7a"],
    dark: ["#56b4e9", "#f08c3c", "#2fc79a", "#e79ac6", "#f0c24b", "#9ad0f5", "#f2f2f2", "#a6a6a6"],
  };
  const dashes = [[1, 0], [7, 3], [2, 3], [9, 3, 2, 3], [5, 2, 1, 2, 1, 2]];
  const darkness = window.matchMedia("(prefers-color-scheme: dark)");
  const colours = () => palettes[darkness.matches ? "dark" : "light"];
  const colourOf = (key) => colours()[Math.max(0, data.keys.indexOf(key)) % colours().length];
  const dashOf = (key) => dashes[Math.max(0, data.keys.indexOf(key)) % dashes.length];

  const lastStep = Math.max(1, ...data.runs.map((run) => run.step));
  const state = {
    shown: new Set(data.runs.map((_, place) => place)),
    choices: {},
    first: 0,
    last: lastStep,
    axis: "step",
    one: 0,
  };
  const listeners = [];
  const changed = () => { update(); listeners.forEach((listener) => listener()); };

  function visible() {
    return data.runs.filter((run, place) =>
      state.shown.has(place)
      && Object.entries(state.choices).every(([key, value]) => value === "" || run.choices[key] === value));
  }

  function swatch(key) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    const set = (node, values) => Object.entries(values).forEach(([k, v]) => node.setAttribute(k, v));
    set(svg, { width: 30, height: 12, "aria-hidden": "true" });
    set(line, { x1: 0, x2: 30, y1: 6, y2: 6, "stroke-width": 3, stroke: colourOf(key) });
    if (dashOf(key)[1]) line.setAttribute("stroke-dasharray", dashOf(key).join(" "));
    svg.append(line);
    return svg;
  }

  function header(names) {
    return element("thead", {}, element("tr", {}, ...names.map(([name, kind]) =>
      element("th", { scope: "col", className: kind || "" }, name))));
  }

  function runTable() {
    const names = [["Run", ""], ["State", ""], ["Method", ""], ["Lag", ""], ["G", "number"], ["Seed", "number"],
      ["Accuracy before", "number"], ["after", "number"], ["Collapsed", ""], ["Retained mass", "number"], ["sd(ℓ)", "number"]];
    const rows = data.runs.map((run, place) => {
      const box = element("input", { type: "checkbox", checked: state.shown.has(place) });
      box.addEventListener("change", () => {
        if (box.checked) state.shown.add(place); else state.shown.delete(place);
        changed();
      });
      const done = run.finished ? `finished, ${run.step} steps` : `not finished, ${run.step} of ${run.steps ?? "?"} steps`;
      const cells = [done, run.method, run.lag];
      const numbers = [run.group_size, run.seed, number(run.start), number(run.final)];
      const after = [number(run.retained), number(run.spread)];
      return element("tr", {},
        element("th", { scope: "row" }, element("label", {}, box, swatch(run.key), run.name)),
        ...cells.map((text) => element("td", {}, text ?? "–")),
        ...numbers.map((text) => element("td", { className: "number" }, text ?? "–")),
        element("td", {}, run.collapsed === null ? "–" : run.collapsed ? "yes" : "no"),
        ...after.map((text) => element("td", { className: "number" }, text)));
    });
    byId("run-table").replaceChildren(header(names), element("tbody", {}, ...rows));
  }

  function signs() {
    const warned = data.runs.filter((run) => run.signs.length);
    if (!warned.length) return;
    const items = warned.flatMap((run) => run.signs.map((text) => element("li", {}, `${run.name}: ${text}`)));
    byId("signs").replaceChildren(element("details", { className: "notice", open: items.length <= 5 },
      element("summary", {}, items.length === 1 ? "A bad sign" : `${items.length} bad signs`), element("ul", {}, ...items)));
  }

  function settings() {
    const parts = data.runs.map((run) => {
      const all = { ...run.settings, ...Object.fromEntries(Object.entries(run.versions).map(([k, v]) => [`versions: ${k}`, v])) };
      const text = Object.entries(all).map(([key, value]) => `${key}: ${value}`).join("\n");
      return element("details", {}, element("summary", {}, run.name), element("pre", {}, text));
    });
    byId("settings").lastElementChild.replaceChildren(...parts);
  }

  function filters() {
    for (const [key, values] of Object.entries(data.filters)) {
      const select = element("select", { name: key }, element("option", { value: "" }, "all"),
        ...values.map((value) => element("option", { value }, value)));
      select.addEventListener("change", () => { state.choices[key] = select.value; changed(); });
      byId("choices").append(element("label", {}, `${key} `, select));
    }
    for (const [id, name] of [["first-step", "first"], ["last-step", "last"]]) {
      const input = byId(id);
      Object.assign(input, { max: lastStep, value: state[name] });
      input.addEventListener("change", () => {
        const given = input.valueAsNumber;
        state[name] = Number.isFinite(given) ? given : name === "first" ? 0 : lastStep;
        changed();
      });
    }
    for (const radio of document.querySelectorAll("input[name=axis]")) {
      radio.addEventListener("change", () => { state.axis = radio.value; changed(); });
    }
    const one = byId("one-run");
    one.append(...data.runs.map((run, place) => element("option", { value: place }, run.name)));
    one.addEventListener("change", () => { state.one = Number(one.value); changed(); });
    byId("one-run-label").hidden = data.runs.length === 1;
    byId("reset").addEventListener("click", reset);
    byId("filters").addEventListener("submit", (event) => event.preventDefault());
  }

  function reset() {
    Object.assign(state, { shown: new Set(data.runs.map((_, place) => place)), choices: {}, first: 0, last: lastStep });
    for (const select of byId("choices").querySelectorAll("select")) select.value = "";
    byId("first-step").value = 0;
    byId("last-step").value = lastStep;
    runTable();
    changed();
  }

  function update() {
    const runs = visible().length;
    byId("shown").textContent =
      `Shown: ${runs} of ${data.runs.length} ${data.runs.length === 1 ? "run" : "runs"}, steps ${state.first} to ${state.last}.`;
  }

  function comparisonTable() {
    if (data.runs.length < 2) return;
    const pair = (cell, name) => (cell[name] === null ? "–" : number(cell[name]) + (cell[`${name}_se`] === null ? "" : ` ± ${number(cell[`${name}_se`])}`));
    const columns = [
      ["Method", "", (c) => c.method], ["Lag", "", (c) => c.lag], ["G", "number", (c) => c.group_size],
      ["P", "number", (c) => c.prompts], ["Steps", "number", (c) => c.steps], ["Aggregation", "", (c) => c.aggregation],
      ["Advantage", "", (c) => c.advantage], ["Optimizer", "", (c) => c.optimizer], ["Step size", "number", (c) => c.lr],
      ["Gradient clip", "number", (c) => c.clip_grad ?? "none"], ["Seeds", "", (c) => c.seeds.join(", ")],
      ["Finished", "number", (c) => `${c.finished} of ${c.runs}`],
      ["Accuracy before", "number", (c) => pair(c, "start")], ["final", "number", (c) => pair(c, "final")],
      ["best", "number", (c) => pair(c, "best")], ["Collapsed", "number", (c) => (c.collapsed === null ? "–" : `${Math.round(100 * c.collapsed)} %`)],
      ["Retained mass", "number", (c) => pair(c, "retained")], ["sd(ℓ)", "number", (c) => pair(c, "spread")], ["ESS/G", "number", (c) => pair(c, "ess")],
    ];
    const rows = data.cells.map((cell) => element("tr", {}, ...columns.map(([, kind, text]) => element("td", { className: kind }, text(cell) ?? "–"))));
    byId("comparison-table").hidden = false;
    byId("comparison-table").querySelector("table").replaceChildren(header(columns), element("tbody", {}, ...rows));
  }

  function contents() {
    for (const heading of document.querySelectorAll("h2")) {
      const section = heading.closest("section");
      if (section.hidden) continue;
      byId("contents").append(element("li", {}, element("a", { href: `#${section.id}` }, heading.textContent)));
    }
  }

  window.addEventListener("error", (event) => {
    byId("failure").hidden = false;
    byId("failure").textContent = `A script of this page failed: ${event.message}`;
  });
  runTable();
  signs();
  settings();
  filters();
  comparisonTable();
  update();
  darkness.addEventListener("change", () => { runTable(); listeners.forEach((listener) => listener()); });
  window.report = { data, state, element, number, visible, colours, dashes, darkness, byId, header, contents, onChange: (listener) => listeners.push(listener) };
})();
