"use strict";
// Draws the figures, sorts the tables, changes the theme. Names of runs are inserted as text, never as HTML.
(() => {
  const SYMBOLS = ["circle", "diamond", "square", "triangle-up", "triangle-down", "cross", "x", "star", "pentagon", "hexagon"];
  const GLYPHS = ["●", "◆", "■", "▲", "▼", "✚", "✖", "★", "⬟", "⬢"];
  const DASHES = ["solid", "dash", "dashdot", "longdash", "longdashdot"];
  const STROKES = { solid: "", dash: "5 3", dashdot: "5 2 1 2", longdash: "9 3", longdashdot: "9 2 1 2", dot: "1.5 3" };
  const PRINT_WIDTH = 660;
  const isTouched = matchMedia("(pointer: coarse)").matches;

  const figures = new Map();
  const stored = document.getElementById("figures");
  for (const figure of JSON.parse(stored.textContent)) {
    figures.set(figure.name, { ...figure, panel: 0, hidden: new Set(), drawn: false });
  }

  // The series of the panel that is shown; a panel is its name and its series.
  const seriesOf = (figure) => figure.panels[figure.panel][1];

  // ---- colors of the style sheet, in the current scheme or the given one

  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);

  function palette(scheme) {
    probe.style.colorScheme = scheme || "";
    const of = (name) => {
      probe.style.color = `var(--${name})`;
      return getComputedStyle(probe).color;
    };
    return { ink: of("ink"), soft: of("soft"), line: of("line"), sheet: of("sheet"), of };
  }

  const fade = (rgb, share) => rgb.replace("rgb(", "rgba(").replace(")", `, ${share})`);
  // Plotly interprets some HTML tags in text, so < and & in a name must be escaped.
  const literal = (text) => (typeof text === "string" ? text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;") : text);
  // Series of one method have its color and marker; they differ in dash or filling, then in strength.
  const dash = (series) => (series.faint ? "dot" : DASHES[series.variant % DASHES.length]);
  const strength = (series, looks) => Math.max(0.4, 1 - 0.3 * Math.floor(series.variant / looks));
  const isOpen = (series) => series.variant % 2 === 1;

  // ---- convert a figure's data to plotly's

  function lines(series, colors, hasBands) {
    const color = fade(colors.of(series.color), strength(series, DASHES.length));
    const shared = { legendgroup: series.name, type: "scatter" };
    const main = {
      ...shared, name: literal(series.name), x: series.x, y: series.y, mode: series.x.length === 1 ? "markers" : "lines",
      line: { color, width: series.faint ? 1.4 : 2, dash: dash(series) }, marker: { color },
    };
    if (!series.bars || !hasBands) return [main];
    const known = series.x.map((_, i) => i).filter((i) => series.bars[i]);
    const [down, up] = [0, 1].map((end) => known.map((i) => series.bars[i][end]));
    const band = {
      ...shared, x: [...known, ...known.slice().reverse()].map((i) => series.x[i]), y: [...up, ...down.reverse()],
      mode: "lines", line: { width: 0 }, fill: "toself", fillcolor: fade(colors.of(series.color), 0.16), hoverinfo: "skip", showlegend: false,
    };
    return [band, main];
  }

  function points(series, colors, figure) {
    if (series.faint) return lines(series, colors, false);
    const many = series.x.length > 50;
    const color = fade(colors.of(series.color), strength(series, 2) * (many ? 0.5 : 1));
    // Relative to a narrow chart, markers are larger.
    const x = series.x.map((value) => value + series.shift * (isNarrow(figure) ? 2 : 1));
    const length = (end, sign) => series.y.map((y, i) => (series.bars?.[i] ? sign * (series.bars[i][end] - y) : 0));
    const bars = { symmetric: false, array: length(1, 1), arrayminus: length(0, -1) };
    const ring = { type: "scatter", mode: "markers", x, y: series.y, hoverinfo: "skip", marker: { color, symbol: "circle-open", size: 22, line: { width: 2 } } };
    return [...(series.chosen ? [ring] : []), {
      type: "scatter", mode: "markers", name: literal(series.name), x, y: series.y, customdata: series.x,
      hovertemplate: many ? undefined : "%{customdata:.3~f}, %{y:.2f}",
      marker: { color, symbol: many ? "circle" : SYMBOLS[series.marker % SYMBOLS.length] + (isOpen(series) ? "-open" : ""), size: many ? 4 : isNarrow(figure) ? 8 : 11, line: { width: isOpen(series) ? 2 : 0 } },
      error_y: series.bars ? { type: "data", ...bars, color, thickness: 1.5, width: 5 } : undefined,
    }];
  }

  function bars(series, colors) {
    const color = colors.of(series.color);
    const shape = ["", "/", "x", "-", "|", "+", "."][series.variant % 7];
    return [{
      type: "bar", name: literal(series.name), x: series.x.map(literal), y: series.y, opacity: series.faint ? 0.55 : 1,
      marker: { color, pattern: { shape, fgcolor: colors.sheet, size: 6, fillmode: "overlay" } },
    }];
  }

  function grid(series, colors, figure) {
    const [low, high] = figure.range_z || [undefined, undefined];
    const bar = { title: { text: figure.z.title, side: "right" }, thickness: 12, outlinewidth: 0, tickfont: { color: colors.soft } };
    const shared = { name: literal(series.name), x: series.x.map(literal), y: series.y.map(literal), z: series.z, colorscale: "Viridis", colorbar: bar };
    if (figure.kind === "surface") {
      const contours = { z: { show: true, usecolormap: true, project: { z: true } } };
      return [{ ...shared, type: "surface", cmin: low, cmax: high, contours }];
    }
    if (figure.kind === "heatmap") return [{ ...shared, type: "heatmap", zmin: low, zmax: high, xgap: 1, ygap: 1 }];
    const size = round((high - low) / 24);
    const contours = high > low ? { start: Math.ceil(low / size) * size, end: high, size } : undefined;
    return [{ ...shared, type: "contour", zmin: low, zmax: high, autocontour: !contours, contours, line: { width: 0.6 } }];
  }

  // Round up to 1, 2 or 5 times a power of ten.
  function round(size) {
    const power = 10 ** Math.floor(Math.log10(size));
    return power * [1, 2, 5, 10].find((one) => one * power >= size);
  }

  const TRACES = { points, bars, heatmap: grid, surface: grid, contour: grid };

  // A logarithmic axis over several decades labels only powers of ten; one of whole numbers, such as epochs, these only.
  function tickStep(described, values) {
    const known = values.filter((value) => value !== null && (value > 0 || !described.log));
    const [low, high] = [known.reduce((a, b) => Math.min(a, b), Infinity), known.reduce((a, b) => Math.max(a, b), -Infinity)];
    const powers = Math.log10(high / low);
    if (described.log) return powers > 1.5 ? Math.ceil(powers / 7) : undefined;
    return described.whole ? Math.max(1, high > low ? round((high - low) / 10) : 1) : undefined;
  }

  function axis(described, colors, values = []) {
    return {
      title: { text: described.title, font: { color: colors.soft, size: 12 }, standoff: 8 }, type: described.log ? "log" : undefined,
      dtick: tickStep(described, values), tick0: described.whole ? 0 : undefined,
      gridcolor: colors.line, zerolinecolor: colors.line, linecolor: colors.line, tickfont: { color: colors.soft, size: 11 },
      automargin: true, exponentformat: "power",
    };
  }

  function layout(figure, colors) {
    const basic = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, barmode: "group", uirevision: figure.panel,
      font: { color: colors.ink, family: "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif", size: 12 },
      // The toolbar is in the margin above the chart, not on it.
      margin: { l: 8, r: 12, t: isTouched ? 12 : 30, b: 8 }, hoverlabel: { namelength: -1 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colors.line, activecolor: colors.soft },
      // Touching a chart should scroll the page.
      dragmode: isTouched ? false : "zoom",
    };
    if (figure.kind === "surface") {
      const plane = (described) => ({ ...axis(described, colors), automargin: undefined, backgroundcolor: "rgba(0,0,0,0)" });
      // The color bar has the title of z, which would be cut off beside the surface.
      const z = { ...plane(figure.z), title: { text: "" }, range: figure.range_z && figure.range_z[0] < figure.range_z[1] ? figure.range_z : undefined };
      // On a narrow screen the axes' titles need more room.
      const distance = isNarrow(figure) ? 1.6 : 1.08;
      const eye = { x: 1.35 * distance, y: -1.45 * distance, z: 0.95 * distance };
      const scene = { aspectmode: "cube", domain: { x: [0, 0.92], y: [0, 1] }, xaxis: plane(figure.x), yaxis: plane(figure.y), zaxis: z, camera: { eye, center: { x: 0, y: 0, z: -0.2 } }, uirevision: "kept" };
      return { ...basic, dragmode: "orbit", margin: { l: 0, r: 0, t: 24, b: 0 }, scene };
    }
    const all = (name) => seriesOf(figure).flatMap((series) => series[name]);
    const both = { ...basic, xaxis: axis(figure.x, colors, all("x")), yaxis: axis(figure.y, colors, all("y")) };
    if (figure.kind === "heatmap") {
      both.xaxis.type = "category";
      both.yaxis.type = "category";
      both.yaxis.autorange = "reversed";
    }
    if (figure.kind === "bars") both.xaxis.type = "category";
    if (figure.kind === "lines" && seriesOf(figure).length > 1) both.hovermode = "closest";
    return both;
  }

  function content(figure, colors) {
    const shown = seriesOf(figure).filter((series) => !figure.hidden.has(series.name));
    // More bands would hide each other; they appear when the reader hides other series.
    const hasBands = shown.filter((series) => series.bars).length <= Number(stored.dataset.mostBands);
    return shown.flatMap((series) => (figure.kind === "lines" ? lines(series, colors, hasBands) : TRACES[figure.kind](series, colors, figure)));
  }

  // ---- drawing

  const config = { responsive: true, displaylogo: false, displayModeBar: isTouched ? false : "hover", modeBarButtonsToRemove: ["toImage", "lasso2d", "select2d"] };
  const element = (figure) => document.getElementById(`figure-${figure.name}`);
  const isNarrow = (figure) => element(figure).clientWidth < 450;

  function draw(figure, scheme, width) {
    const colors = palette(scheme);
    const plot = element(figure).querySelector(".plot");
    const size = width ? { width, height: plot.clientHeight } : { autosize: true };
    figure.drawn = true;
    legend(figure, colors);
    return Plotly.react(plot, content(figure, colors), { ...layout(figure, colors), ...size }, config);
  }

  const redraw = (scheme, width) => [...figures.values()].filter((figure) => figure.drawn).forEach((figure) => draw(figure, scheme, width));

  function legend(figure, colors) {
    const list = element(figure).querySelector(".legend");
    const series = seriesOf(figure);
    const focused = list.contains(document.activeElement) ? [...list.children].indexOf(document.activeElement.parentNode) : -1;
    list.replaceChildren();
    if (["heatmap", "surface", "contour"].includes(figure.kind)) return;
    for (const one of series) {
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-pressed", String(!figure.hidden.has(one.name)));
      button.append(swatch(figure, one, colors), document.createTextNode(one.chosen ? `${one.name} (best choice)` : one.name));
      button.addEventListener("click", () => {
        figure.hidden.has(one.name) ? figure.hidden.delete(one.name) : figure.hidden.add(one.name);
        draw(figure);
      });
      const item = document.createElement("li");
      item.append(button);
      list.append(item);
    }
    if (focused >= 0) list.children[focused].firstChild.focus();
  }

  function swatch(figure, series, colors) {
    const space = "http://www.w3.org/2000/svg";
    const drawn = document.createElementNS(space, "svg");
    const line = figure.kind === "lines" || (series.faint && figure.kind === "points");
    const shape = document.createElementNS(space, line ? "line" : "text");
    const color = fade(colors.of(series.color), strength(series, line ? DASHES.length : 2));
    const hollow = !line && figure.kind === "points" && isOpen(series);
    for (const [name, value] of Object.entries({ width: line ? 30 : 16, height: 14, "aria-hidden": "true" })) drawn.setAttribute(name, value);
    const look = line
      ? { x1: 0, x2: 30, y1: 7, y2: 7, stroke: color, "stroke-width": 2.5, "stroke-dasharray": STROKES[dash(series)] }
      : { x: 8, y: 12, "text-anchor": "middle", "font-size": 13, fill: hollow ? "none" : color, stroke: hollow ? color : "none", "stroke-width": 1.3 };
    for (const [name, value] of Object.entries(look)) shape.setAttribute(name, value);
    if (!line) shape.textContent = figure.kind === "bars" ? "■" : GLYPHS[series.marker % GLYPHS.length];
    drawn.append(shape);
    return drawn;
  }

  function turn(event, figure) {
    const step = { ArrowLeft: [-0.15, 0], ArrowRight: [0.15, 0], ArrowUp: [0, 0.1], ArrowDown: [0, -0.1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const plot = element(figure).querySelector(".plot");
    const { x, y, z } = plot.layout.scene.camera.eye;
    const radius = Math.hypot(x, y, z);
    const around = Math.atan2(y, x) + step[0];
    const above = Math.max(-1.4, Math.min(1.4, Math.asin(z / radius) + step[1]));
    const eye = { x: radius * Math.cos(above) * Math.cos(around), y: radius * Math.cos(above) * Math.sin(around), z: radius * Math.sin(above) };
    Plotly.relayout(plot, { "scene.camera.eye": eye });
  }

  // ---- saving

  function save(name, text, type) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  async function saveSvg(figure) {
    // For paper: always the light colors, with a legend inside.
    const colors = palette("light");
    const count = seriesOf(figure).length;
    const drawing = { ...layout(figure, colors), paper_bgcolor: "#ffffff", showlegend: count > 1, legend: { orientation: "h", y: -0.25 } };
    if (figure.kind === "surface") {
      drawing.scene.camera = element(figure).querySelector(".plot").layout.scene.camera;
    }
    const size = { format: "svg", width: 720, height: 460 + 12 * (count > 4 ? count : 0) };
    const url = await Plotly.toImage({ data: content(figure, colors), layout: drawing }, size);
    save(`${figure.name}.svg`, decodeURIComponent(url.slice(url.indexOf(",") + 1)), "image/svg+xml");
  }

  function csv(figure) {
    const several = figure.panels.length > 1;
    const withBars = figure.panels.some(([, panel]) => panel.some((series) => series.bars));
    const heading = [...(several ? ["panel"] : []), "series", figure.x.title, figure.y.title];
    const rows = [[...heading, ...(figure.z ? [figure.z.title] : []), ...(withBars ? ["low", "high"] : [])]];
    for (const [name, panel] of figure.panels) {
      for (const series of panel) {
        const start = [...(several ? [name] : []), series.name];
        if (series.z) series.y.forEach((y, j) => series.x.forEach((x, i) => rows.push([...start, x, y, series.z[j][i]])));
        else series.x.forEach((x, i) => rows.push([...start, x, series.y[i], ...(withBars ? series.bars?.[i] ?? [null, null] : [])]));
      }
    }
    const cell = (value) => (value === null ? "" : /[",\r\n]/.test(value) ? `"${String(value).replace(/"/g, '""')}"` : String(value));
    return rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
  }

  // ---- tables

  function sort(heading) {
    const table = heading.closest("table");
    const place = [...heading.parentNode.children].indexOf(heading);
    const down = heading.getAttribute("aria-sort") === "ascending";
    for (const other of heading.parentNode.children) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const numeric = heading.classList.contains("number");
    const key = (row) => {
      const cell = row.children[place];
      return numeric ? (cell.dataset.order === undefined ? null : Number(cell.dataset.order)) : cell.textContent.trim();
    };
    const compare = (a, b) => (numeric ? a - b : a.localeCompare(b, undefined, { numeric: true }));
    const rows = [...table.tBodies[0].rows].map((row) => [key(row), row]);
    // Rows without a number stay last in either order.
    rows.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : down ? compare(b, a) : compare(a, b)));
    table.tBodies[0].append(...rows.map(([, row]) => row));
  }

  // ---- event handlers

  for (const heading of document.querySelectorAll("thead th")) heading.firstChild.addEventListener("click", () => sort(heading));

  for (const figure of figures.values()) {
    const place = element(figure);
    place.querySelector("[data-save=svg]").addEventListener("click", () => saveSvg(figure));
    place.querySelector("[data-save=csv]").addEventListener("click", () => save(`${figure.name}.csv`, csv(figure), "text/csv"));
    place.querySelector("select")?.addEventListener("change", (event) => {
      figure.panel = Number(event.target.value);
      draw(figure);
    });
    if (figure.kind === "surface") place.querySelector(".plot").addEventListener("keydown", (event) => turn(event, figure));
  }

  const system = matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const isDark = () => (document.documentElement.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const showTheme = () => {
    button.textContent = isDark() ? "Light colors" : "Dark colors";
    redraw();
  };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    showTheme();
  });
  system.addEventListener("change", showTheme);
  showTheme();

  // Figures are drawn when they come into view, so that a page with many opens quickly; for printing, all are drawn.
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const figure = figures.get(entry.target.dataset.figure);
      if (entry.isIntersecting && !figure.drawn) draw(figure);
    }
  }, { rootMargin: "600px" });
  for (const figure of figures.values()) near.observe(element(figure));
  addEventListener("beforeprint", () => [...figures.values()].forEach((figure) => draw(figure, "light", PRINT_WIDTH)));
  addEventListener("afterprint", () => redraw());
})();
