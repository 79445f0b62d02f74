"use strict";
// Rows for each chart out of the runs' series, and the views that draw them.
(() => {
  const { data, state, element, number, visible, colours, dashes, darkness, byId } = window.report;
  const POINT_BINS = 80;
  const SVG_ROWS = 4000; // a node for each row is too much for a browser from here on

  const hoursAt = new Map();
  for (const run of data.runs) hoursAt.set(run, new Map(run.hours[0].map((step, i) => [step, run.hours[1][i]])));

  // Steps between two recorded ones (an evaluation of version 0 aside) have the time of the last before.
  function hours(run, step) {
    const exact = hoursAt.get(run).get(step);
    if (exact !== undefined) return exact;
    let last = 0;
    run.hours[0].forEach((other, i) => { if (other <= step) last = run.hours[1][i]; });
    return last;
  }

  const place = (run, step) => (state.axis === "step" ? step : hours(run, step));
  const axisName = () => (state.axis === "step" ? "optimizer steps" : "wall time (hours)");
  const inside = (step) => step >= state.first && step <= state.last;

  function points(run, metric) {
    const columns = run.series[metric];
    return columns ? columns[0].map((step, i) => [step, columns[1][i]]).filter(([step]) => inside(step)) : [];
  }

  const builders = {
    lines(chart, runs) {
      const rows = [];
      let left = 0;
      for (const run of runs) for (const [metric, series] of Object.entries(chart.fields)) for (const [step, value] of points(run, metric)) {
        if (typeof value !== "number") { left += 1; continue; }
        rows.push({ run: run.name, key: run.key, series, step, x: place(run, step), value, valueText: number(value, 4) });
      }
      return { rows, left };
    },
    mass(chart, runs) {
      const rows = [];
      let left = 0;
      for (const run of runs) {
        const columns = Object.entries(chart.fields).map(([metric, name]) => [name, new Map(points(run, metric))]);
        for (const step of columns[0][1].keys()) {
          const row = { run: run.name, key: run.key, series: "mass", step, x: place(run, step), cap: run.cap === null ? null : Math.log10(run.cap) };
          for (const [name, values] of columns) row[name] = values.get(step);
          if (columns.some(([name]) => typeof row[name] !== "number")) { left += 1; continue; }
          for (const [name] of columns) row[name] /= Math.LN10;
          const text = (name) => number(10 ** row[name]);
          Object.assign(row, { p50Text: text("p50"), bandText: `${text("p10")} – ${text("p90")}`, maxText: text("max"), value: row.p50 });
          rows.push(row);
        }
      }
      return { rows, left };
    },
    lag_course(chart, runs) {
      const rows = [];
      for (const run of runs) {
        const steps = run.series["time/step_s"][0].filter(inside);
        const width = state.axis === "step" ? () => 1 : (step, i) => hours(run, step) - hours(run, steps[i - 1] ?? step);
        const before = new Map(steps.map((step, i) => [step, place(run, step) - (steps.length > 1 && i > 0 ? place(run, step) - place(run, steps[i - 1]) : width(step, i))]));
        for (const [metric, lag] of Object.entries(chart.fields)) for (const [step, share] of points(run, metric)) {
          if (typeof share !== "number" || share === 0) continue;
          rows.push({ run: run.name, step, x: place(run, step), x2: before.get(step) ?? place(run, step), lag: Number(lag), low: Number(lag) - 0.5, high: Number(lag) + 0.5, share });
        }
      }
      return { rows, left: 0 };
    },
    lag_histogram(chart, runs) {
      const rows = [];
      for (const run of runs) {
        const steps = Math.max(1, points(run, "time/step_s").length);
        for (const [metric, lag] of Object.entries(chart.fields)) {
          const shares = points(run, metric).map(([, share]) => share);
          if (shares.length) rows.push({ run: run.name, lag: Number(lag), share: shares.reduce((a, b) => a + b, 0) / steps });
        }
      }
      return { rows, left: 0 };
    },
    seconds(chart, runs) {
      const rows = [];
      for (const run of runs) {
        const total = points(run, "time/step_s");
        const size = Math.max(1, Math.ceil(total.length / POINT_BINS));
        const sums = Object.entries(chart.fields).map(([metric, series]) => [metric, series, new Map(points(run, metric))]);
        for (let first = 0; first < total.length; first += size) {
          const steps = total.slice(first, first + size).map(([step]) => step);
          const added = (values) => steps.reduce((sum, step) => sum + (Number(values.get(step)) || 0), 0) / steps.length;
          const parts = sums.map(([metric, series, values]) => [metric, series, added(values)]);
          const step = parts.find(([metric]) => metric === "time/step_s");
          // A checkpoint is written after its step was timed.
          if (step) step[2] = Math.max(0, parts.reduce((rest, [metric, , value]) => (metric === "time/step_s" || metric === "time/checkpoint_s" ? rest : rest - value), step[2]));
          const whole = parts.reduce((sum, [, , value]) => sum + value, 0);
          const start = first === 0 ? steps[0] - 1 : total[first - 1][0];
          let low = 0;
          for (const [, series, value] of parts) {
            if (value <= 0) continue;
            rows.push({ run: run.name, series, step: steps[0], x: place(run, start), x2: place(run, steps[steps.length - 1]), low, high: low + value, value, seconds: number(value), part: `${Math.round((100 * value) / whole)} %` });
            low += value;
          }
        }
      }
      return { rows, left: 0 };
    },
    // One row for each method and lag: the mean over its finished runs, and its standard error.
    comparison(chart, runs) {
      const [name] = Object.keys(chart.fields);
      const cells = new Map();
      for (const run of runs) {
        if (!run.finished || typeof run[name] !== "number" && typeof run[name] !== "boolean") continue;
        const cell = `${run.method}\n${run.lag}`;
        if (!cells.has(cell)) cells.set(cell, []);
        cells.get(cell).push(run);
      }
      const rows = [...cells.values()].map((members) => {
        const values = members.map((run) => Number(run[name]));
        const mean = values.reduce((a, b) => a + b, 0) / values.length;
        const variance = values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (values.length - 1);
        const error = values.length > 1 && name !== "collapsed" ? Math.sqrt(variance / values.length) : null;
        const [first] = members;
        const meanText = number(mean) + (error === null ? "" : ` ± ${number(error)}`);
        return { method: first.method, lag: first.lag, mean, meanText, runs: members.length, low: mean - (error ?? 0), high: mean + (error ?? 0) };
      });
      return { rows, left: 0 };
    },
  };

  // Fills in what a specification leaves to the page: names that begin with @.
  function filled(node) {
    if (Array.isArray(node)) return node.map(filled);
    if (node && typeof node === "object") return Object.fromEntries(Object.entries(node).map(([key, value]) => [key, filled(value)]));
    const style = getComputedStyle(document.documentElement);
    const values = {
      "@x": axisName(), "@keys": data.keys, "@methods": data.methods, "@lags": data.lags, "@dashes": dashes,
      "@colours": data.keys.map((_, i) => colours()[i % colours().length]), "@series": colours(), "@first": colours()[0],
      "@ink": style.getPropertyValue("--ink").trim(), "@light": !darkness.matches,
    };
    return typeof node === "string" && node in values ? values[node] : node;
  }

  function theme() {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(name).trim();
    const text = { labelColor: of("--soft"), titleColor: of("--ink"), labelFontSize: 12, titleFontSize: 12, titleFontWeight: 600 };
    return {
      background: null, font: "system-ui, DejaVu Sans, sans-serif", view: { stroke: null },
      axis: { ...text, gridColor: of("--grid"), domainColor: of("--line"), tickColor: of("--line"), labelOverlap: true },
      axisX: { tickCount: 6, labelFlush: true, grid: false },
      legend: { ...text, orient: "top", symbolStrokeWidth: 2, columns: window.innerWidth < 600 ? 1 : 3, labelLimit: 220 },
    };
  }

  const cards = new Map();

  function card(chart) {
    // Vega puts a role of its own on the node that it draws into.
    const plot = element("div", { className: "plot" });
    const reader = element("div", { tabIndex: 0, role: "application", "aria-roledescription": "chart; left and right arrow keys read values", "aria-label": chart.title }, plot);
    const reading = element("output", { className: "reading" });
    const note = element("p", { className: "note" });
    const table = element("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": `Values of ${chart.title}` });
    const details = element("details", {}, element("summary", {}, "Values as a table"), table);
    const heading = element("h3", { id: `${chart.id}-title` }, chart.title);
    const figure = element("figure", { id: chart.id, role: "group", "aria-labelledby": `${chart.id}-title` },
      element("figcaption", {}, heading, element("p", {}, chart.help)), reader, reading, note, details);
    const own = { chart, figure, plot, reading, note, table, details, view: null, rows: [], cursor: -1 };
    reader.addEventListener("keydown", (event) => read(own, event));
    details.addEventListener("toggle", () => { if (details.open) tabulate(own); });
    cards.set(chart.id, own);
    return figure;
  }

  // The chart for ears and keys: each press goes to the next place on the axis and says its values.
  function read(own, event) {
    const way = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (!way) return;
    event.preventDefault();
    const field = own.chart.kind === "comparison" || own.chart.kind === "lag_histogram" ? "lag" : "x";
    const places = [...new Set(own.rows.map((row) => row[field]))].sort((a, b) => (typeof a === "number" ? a - b : data.lags.indexOf(a) - data.lags.indexOf(b)));
    if (!places.length) return;
    own.cursor = Math.min(places.length - 1, Math.max(0, own.cursor + way));
    const here = own.rows.filter((row) => row[field] === places[own.cursor]);
    const name = field === "lag" ? "lag" : axisName();
    own.reading.textContent = `${name} ${number(places[own.cursor])}: ` + here.slice(0, 12).map((row) => said(own.chart, row)).join("; ")
      + (here.length > 12 ? `; and ${here.length - 12} more` : "");
  }

  function said(chart, row) {
    const who = data.runs.length > 1 ? `${row.run} ` : "";
    if (chart.kind === "mass") return `${who}median ${row.p50Text}, p10 – p90 ${row.bandText}, largest ${row.maxText}`;
    if (chart.kind === "seconds") return `${row.series} ${row.seconds} s`;
    if (chart.kind === "lag_course") return `lag ${row.lag}: ${number(row.share)}`;
    if (chart.kind === "lag_histogram") return number(row.share);
    if (chart.kind === "comparison") return `${row.method} ${row.meanText}`;
    return `${who}${row.series} ${row.valueText}`;
  }

  function tabulate(own) {
    const LIMIT = 500;
    const hidden = new Set(["low", "high", "x2", "value", "cap", "key", "p10", "p50", "p90", "max", "mean"]);
    const names = Object.keys(own.rows[0] || {}).filter((name) => !hidden.has(name));
    const rows = own.rows.slice(0, LIMIT).map((row) => element("tr", {}, ...names.map((name) => element("td", { className: typeof row[name] === "number" ? "number" : "" }, number(row[name])))));
    const titles = { x: axisName(), valueText: "value", p50Text: "median", bandText: "p10 – p90", maxText: "largest", meanText: "mean" };
    const more = own.rows.length > LIMIT ? `The first ${LIMIT} of ${own.rows.length} rows.` : "";
    own.table.replaceChildren(element("p", {}, more), element("table", {}, window.report.header(names.map((name) => [titles[name] || name, ""])), element("tbody", {}, ...rows)));
  }

  async function draw(own) {
    const chosen = own.chart.one_run ? [data.runs[state.one]] : visible();
    const { rows, left } = builders[own.chart.kind](own.chart, chosen);
    own.rows = rows;
    own.cursor = -1;
    own.reading.textContent = "";
    const notes = [];
    if (!rows.length) notes.push("Nothing recorded for this selection.");
    if (left) notes.push(`${left} values are not finite and cannot be drawn.`);
    if (own.chart.one_run && data.runs.length > 1) notes.push(`Run: ${data.runs[state.one].name}.`);
    if (rows.length > SVG_ROWS) notes.push("Too many points to show values under the pointer: choose fewer runs, or read with the arrow keys.");
    own.note.textContent = notes.join(" ");
    if (own.details.open) tabulate(own);
    if (own.view) own.view.finalize();
    own.view = null;
    own.plot.replaceChildren();
    if (!rows.length) return;
    const spec = { $schema: "https://vega.github.io/schema/vega-lite/v6.json", width: "container", height: 250, autosize: { type: "fit", contains: "padding" },
      description: own.chart.title, data: { name: "rows", values: rows }, ...filled(own.chart.spec), config: theme() };
    const crowded = rows.length > SVG_ROWS;
    if (crowded && spec.layer) spec.layer = spec.layer.filter((layer) => !layer.params);
    // A layer without a row has no extent, which Vega warns of.
    if (own.chart.kind === "mass" && rows.every((row) => row.cap === null)) spec.layer = spec.layer.filter((layer) => layer.name !== "cap");
    // The rows change with the axis and the paper; embedding afresh keeps one way to draw.
    own.view = await window.vegaEmbed(own.plot, spec, { actions: false, renderer: crowded ? "canvas" : "svg", ast: true, tooltip: { theme: darkness.matches ? "dark" : "light" } });
  }

  let running = Promise.resolve();
  function drawAll() {
    delete document.body.dataset.drawn;
    running = running.then(async () => {
      for (const own of cards.values()) await draw(own);
      document.body.dataset.drawn = String(cards.size);
    }).catch((error) => {
      byId("failure").hidden = false;
      byId("failure").textContent = `A chart could not be drawn: ${error.message}`;
      throw error;
    });
  }

  for (const section of new Set(data.charts.map((chart) => chart.section))) {
    const charts = data.charts.filter((chart) => chart.section === section);
    const id = section.toLowerCase();
    byId("main").append(element("section", { id, "aria-labelledby": `${id}-heading` },
      element("h2", { id: `${id}-heading` }, section), element("div", { className: "charts" }, ...charts.map(card))));
  }
  if (!data.charts.length) byId("main").append(element("p", {}, "No step is recorded yet."));
  window.report.contents();
  window.report.onChange(drawAll);
  drawAll();
})();
