"use strict";
// The browser of trajectories: a list with filters, and one trajectory in detail.
(() => {
  const { data, element, number, byId, header } = window.report;
  const FULL_COLOUR = 2; // |log-ratio| of a token from which its colour grows no stronger

  const items = data.trajectories.flatMap((record, run) =>
    record.groups.flatMap((group) => group.members.map((member) => ({ run, group, member }))));

  function refused() {
    const found = data.runs.flatMap((run) => Object.entries(run.refused).map(([reason, count]) => `${run.name}: ${number(count, 0)} × ${reason}`));
    byId("refused").replaceChildren(element("p", {}, found.length
      ? `Samples refused and sampled again, by reason: ${found.join("; ")}.`
      : "No sample was refused."));
  }

  function note() {
    const kept = data.trajectories.reduce((sum, record) => sum + record.groups.length, 0);
    const all = data.trajectories.reduce((sum, record) => sum + record.total, 0);
    byId("trajectory-note").textContent = all
      ? `${kept} of ${all} recorded groups are in this page: those with the largest weights, the most capped, the oldest, and others spread over the run. \`--tokens\` holds more.`
      : "These runs kept no trajectories. To keep them, set train.save_trajectories in the config; the next report shows them here.";
    for (const id of ["trajectory-filters", "browser"]) byId(id).hidden = !items.length;
  }

  const order = {
    step: (a, b) => a.group.step - b.group.step,
    weight: (a, b) => Number(b.member.weight) - Number(a.member.weight),
    ratio: (a, b) => Math.abs(Number(b.member.log_ratio)) - Math.abs(Number(a.member.log_ratio)),
    lag: (a, b) => b.member.lag - a.member.lag,
  };

  function chosen() {
    const value = (id) => byId(id).value;
    const text = value("t-text").toLowerCase();
    return items.filter(({ run, group, member }) =>
      (value("t-run") === "" || run === Number(value("t-run")))
      && (value("t-finish") === "" || member.finish_reason === value("t-finish"))
      && (value("t-reward") === "" || (member.reward > 0) === (value("t-reward") === "positive"))
      && (text === "" || `${group.prompt}\n${member.response}\n${group.prompt_id}`.toLowerCase().includes(text)))
      .sort(order[value("t-order")]);
  }

  function list() {
    const LIMIT = 400;
    const found = chosen();
    byId("t-count").textContent = `${found.length} of ${items.length} trajectories` + (found.length > LIMIT ? `; the first ${LIMIT} are listed.` : ".");
    const names = [["Trajectory", ""], ["Reward", "number"], ["Weight", "number"], ["ℓ", "number"], ["Lag", "number"]];
    const rows = found.slice(0, LIMIT).map((item) => {
      const { run, group, member } = item;
      const many = data.runs.length > 1 ? `${data.runs[run].name}, ` : "";
      const button = element("button", { type: "button" }, `${many}step ${group.step}, group ${group.group}.${member.member}`);
      const row = element("tr", {}, element("th", { scope: "row" }, button),
        ...[member.reward, member.weight, member.log_ratio, member.lag].map((value) => element("td", { className: "number" }, number(value))));
      button.addEventListener("click", () => { mark(row); show(item); byId("t-detail").focus(); });
      return row;
    });
    byId("t-list").replaceChildren(header(names), element("tbody", {}, ...rows));
    if (found.length) { mark(rows[0]); show(found[0]); } else byId("t-detail").replaceChildren(element("p", {}, "No trajectory fits the filters."));
  }

  function mark(row) {
    for (const other of byId("t-list").querySelectorAll("[aria-current]")) other.removeAttribute("aria-current");
    row.setAttribute("aria-current", "true");
  }

  function shade(ratio) {
    const strength = (0.75 * Math.min(FULL_COLOUR, Math.abs(ratio))) / FULL_COLOUR;
    return Number.isFinite(ratio) ? `rgba(var(--${ratio > 0 ? "up" : "down"}), ${strength.toFixed(3)})` : "transparent";
  }

  // Pieces of text, each coloured by the sum of its tokens' log-ratios; a mark where the version changes.
  function tokens(member) {
    const nodes = [];
    const ends = [];
    member.versions.reduce((end, [, count]) => { ends.push(end); return end + count; }, 0);
    let token = 0;
    member.pieces.forEach((text, i) => {
      const last = token + member.spans[i];
      member.versions.forEach(([version], v) => {
        if (ends[v] >= token && ends[v] < last) nodes.push(element("span", { className: "version", title: `sampled by version ${version} from here` }, `v${version}`));
      });
      const ratio = member.log_ratios.slice(token, last).reduce((sum, value) => sum + Number(value), 0);
      const piece = element("span", { title: `log-ratio ${number(ratio)}, behaviour log-prob ${member.behaviour.slice(token, last).map((value) => number(value)).join(", ")}` }, text);
      piece.style.backgroundColor = shade(ratio);
      nodes.push(piece);
      token = last;
    });
    return nodes;
  }

  function tokenTable(member) {
    const names = [["Text", ""], ["Behaviour log-prob", "number"], ["Log-ratio", "number"]];
    let token = 0;
    const rows = member.pieces.map((text, i) => {
      const last = token + member.spans[i];
      const numbers = [member.behaviour, member.log_ratios].map((values) => values.slice(token, last).map((value) => number(value)).join(", "));
      token = last;
      return element("tr", {}, element("td", {}, text), ...numbers.map((value) => element("td", { className: "number" }, value)));
    });
    return element("table", {}, header(names), element("tbody", {}, ...rows));
  }

  function show({ run, group, member }) {
    const facts = [["Run", data.runs[run].name], ["Step", group.step], ["Group, member", `${group.group}, ${member.member}`], ["Prompt id", group.prompt_id],
      ["Reward", number(member.reward)], ["Advantage", number(member.advantage)], ["Weight", number(member.weight)], ["Log-ratio ℓ", number(member.log_ratio)],
      ["Lag", member.lag], ["Versions", member.versions.map(([version, count]) => `${version} (${count} tokens)`).join(", ")],
      ["Finish", member.finish_reason], ["Tokens", member.log_ratios.length]];
    const table = element("details", {}, element("summary", {}, "Tokens as a table"));
    table.addEventListener("toggle", () => { if (table.open && table.children.length === 1) table.append(element("div", { className: "scroll", tabIndex: 0 }, tokenTable(member))); });
    const up = element("span", {}, "likelier now"); up.style.backgroundColor = shade(FULL_COLOUR);
    const down = element("span", {}, "less likely now"); down.style.backgroundColor = shade(-FULL_COLOUR);
    byId("t-detail").replaceChildren(
      element("h3", { id: "t-title" }, `Step ${group.step}, group ${group.group}, member ${member.member}`),
      element("dl", {}, ...facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)))),
      element("h4", {}, "Prompt"), element("div", { className: "text", tabIndex: 0 }, group.prompt),
      element("h4", {}, "Response, coloured by log-ratio"),
      element("p", { className: "key" }, up, " ", down, ` than when it was sampled; full colour from |log-ratio| ${FULL_COLOUR}`),
      element("div", { className: "text", tabIndex: 0 }, ...tokens(member)), table);
  }

  refused();
  note();
  if (items.length) {
    byId("t-run").append(element("option", { value: "" }, "all"), ...data.runs.map((run, place) => element("option", { value: place }, run.name)));
    byId("t-run").parentElement.hidden = data.runs.length === 1;
    byId("t-finish").append(...[...new Set(items.map(({ member }) => member.finish_reason))].map((reason) => element("option", { value: reason }, reason)));
    byId("trajectory-filters").addEventListener("input", list);
    byId("trajectory-filters").addEventListener("submit", (event) => event.preventDefault());
    list();
  }
})();
