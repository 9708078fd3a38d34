// Curves that move: <figure class="curve" data-src="/jobs/x/curve.json" data-every-ms="2000">.
//
// The JSON: {"y_label", "axes": [{"key", "label", "unit"}], "series": [{"name", "points": [{"y", <key>: number}]}],
// "live"}. The reader chooses which key the x axis shows; the choice, a zoom and the focus survive every refresh. A
// table of the same numbers stands behind the picture. Asking ends when `live` is false, and pauses in a hidden page.
(() => {
  const charts = new WeakMap();
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 });
  const scales = {
    usd: (v) => `$${(v / 1e6).toFixed(v < 1e4 ? 4 : v < 1e7 ? 3 : 2)}`,
    s: (v) => { const s = Math.round(v / 1000); return `${Math.floor(s / 60)}:${String(s % 60).padStart(2, "0")}`; },
    count: (v) => compact.format(v),
  };

  function colours(figure) {
    const style = getComputedStyle(figure);
    const of = (name) => style.getPropertyValue(name).trim();
    return { ink: of("--ink-2"), line: of("--line"), series: [of("--accent"), of("--warn"), of("--good"), of("--bad")] };
  }

  // One shared, sorted x; a series has null where it has no point there.
  function columns(data, key) {
    const xs = [...new Set(data.series.flatMap((s) => s.points.map((p) => p[key])))].filter((x) => x !== null).sort((a, b) => a - b);
    return [xs, ...data.series.map((s) => {
      const at = new Map(s.points.map((p) => [p[key], p.y]));
      return xs.map((x) => at.get(x) ?? null);
    })];
  }

  function build(figure, state) {
    const { data, key } = state;
    const axis = data.axes.find((a) => a.key === key);
    const paint = colours(figure);
    const grid = { stroke: paint.line, width: 1 };
    const tick = scales[axis.unit] ?? scales.count;
    const font = "12px system-ui, sans-serif";
    state.plot?.destroy();
    state.plot = new uPlot({
      width: state.box.clientWidth, height: Math.min(320, Math.max(200, state.box.clientWidth * 0.45)),
      scales: { x: { time: false } },
      legend: { live: true },
      cursor: { drag: { x: true, y: false } },
      series: [
        { label: axis.label, value: (_, v) => (v === null ? "–" : tick(v)) },
        ...data.series.map((s, i) => ({
          label: s.name, stroke: paint.series[i % 4], width: 2, spanGaps: true, points: { size: 5 },
          value: (_, v) => (v === null ? "–" : v.toFixed(3)),
        })),
      ],
      axes: [
        { stroke: paint.ink, grid, ticks: grid, font, label: axis.label, labelFont: font, labelSize: 20, values: (_, vs) => vs.map(tick) },
        { stroke: paint.ink, grid, ticks: grid, font, label: data.y_label, labelFont: font, labelSize: 20, size: 52 },
      ],
      hooks: { setSelect: [() => { state.zoomed = true; }] },
    }, columns(data, key), state.box);
    state.plot.over.addEventListener("dblclick", () => { state.zoomed = false; });
    state.shape = data.series.map((s) => s.name).join("|") + key;
  }

  function table(state) {
    const { data } = state;
    const head = ["Series", ...data.axes.map((a) => a.label), data.y_label];
    const rows = data.series.flatMap((s) => s.points.map((p) => [s.name, ...data.axes.map((a) => (scales[a.unit] ?? scales.count)(p[a.key] ?? 0)), p.y.toFixed(4)]));
    const line = (cells, tag) => {
      const tr = document.createElement("tr");
      cells.forEach((text) => { const cell = document.createElement(tag); cell.textContent = text; tr.append(cell); });
      return tr;
    };
    const body = document.createElement("tbody");
    rows.forEach((row) => body.append(line(row, "td")));
    const thead = document.createElement("thead");
    thead.append(line(head, "th"));
    state.table.replaceChildren(thead, body);
  }

  function switcher(figure, state) {
    const bar = document.createElement("div");
    bar.className = "tabs";
    bar.setAttribute("role", "group");
    bar.setAttribute("aria-label", "What the x axis shows");
    state.data.axes.forEach((axis) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = axis.label;
      button.setAttribute("aria-pressed", String(axis.key === state.key));
      button.addEventListener("click", () => {
        state.key = axis.key;
        state.zoomed = false;
        bar.querySelectorAll("button").forEach((b) => b.setAttribute("aria-pressed", String(b === button)));
        build(figure, state);
      });
      bar.append(button);
    });
    figure.querySelector("figcaption")?.append(bar);
  }

  function show(figure, state, data) {
    state.data = data;
    const points = data.series.reduce((sum, s) => sum + s.points.length, 0);
    state.note.hidden = points > 0;
    state.box.hidden = points === 0;
    if (points === 0) return;
    if (!state.key) {
      state.key = data.axes[0].key;
      switcher(figure, state);
    }
    if (state.shape === data.series.map((s) => s.name).join("|") + state.key) state.plot.setData(columns(data, state.key), !state.zoomed);
    else build(figure, state);
    if (state.details.open) table(state);
  }

  async function tell(figure, state) {
    if (!figure.isConnected) return;
    let live = true;
    if (!document.hidden) {
      try {
        const answer = await fetch(figure.dataset.src, { headers: { Accept: "application/json" }, credentials: "same-origin" });
        if (answer.ok) {
          const data = await answer.json();
          show(figure, state, data);
          live = data.live;
        }
      } catch { /* The server is away: the curve stays as it was, and the next call asks again. */ }
    }
    if (live) setTimeout(() => tell(figure, state), Number(figure.dataset.everyMs) || 2000);
  }

  function begin(figure) {
    if (charts.has(figure)) return;
    const box = document.createElement("div");
    const note = document.createElement("p");
    note.className = "empty";
    note.textContent = figure.dataset.empty || "No point yet: the first comes with the first sealed round.";
    const details = document.createElement("details");
    const summary = document.createElement("summary");
    summary.textContent = "The numbers";
    const wrap = document.createElement("div");
    wrap.className = "table-wrap";
    wrap.tabIndex = 0;
    const tbl = document.createElement("table");
    tbl.className = "tight";
    wrap.append(tbl);
    details.append(summary, wrap);
    figure.append(note, box, details);
    const state = { box, note, details, table: tbl, key: "", zoomed: false };
    charts.set(figure, state);
    box.hidden = true;
    details.addEventListener("toggle", () => { if (details.open && state.data) table(state); });
    let width = 0;
    new ResizeObserver(() => {
      if (!state.plot || Math.abs(box.clientWidth - width) < 2) return;
      width = box.clientWidth;
      state.plot.setSize({ width, height: Math.min(320, Math.max(200, width * 0.45)) });
    }).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (state.plot) build(figure, state); });
    tell(figure, state);
  }

  const all = () => document.querySelectorAll("figure.curve[data-src]").forEach(begin);
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", all);
  else all();
  document.addEventListener("htmx:afterSwap", all);
})();
