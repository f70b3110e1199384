// A training run: curves by step, one axis for all of them, and one place in it that is told in numbers.
const TINTS = ["full", "causal", "anticausal", "band", "mixed"], DASHES = [null, "7 4", "2 3", "9 3 2 3", "14 4"];
const CHART = {left: 62, right: 14, top: 18, height: 190, below: 22}, FEW = 40; // points that are drawn as dots, too
const kept = new Map(); // by id: what is shown when a run is drawn anew

const figured = v => v.toLocaleString("en-US", {maximumSignificantDigits: 4, notation: Math.abs(v) >= 1e5 ? "compact" : "standard"});
const FORMS = {share: v => `${figured(Number((100 * v).toPrecision(3)))} %`, bytes: v => bytes(Math.round(v)), "tokens/s": v => `${figured(v)} tokens/s`};
const inUnit = unit => FORMS[unit] ?? figured;
const curveNames = panel => [...new Set(panel.curves.map(curve => curve.name))];
const stageName = stage => `stage ${stage.number + 1}`;
const stageWords = stage => stageName(stage) + (stage.seq_len ? `, ${number(stage.seq_len)} tokens` : "");

function runPicture(figure, id) {
  const state = {stage: null, step: figure.done, ...kept.get(id)}, several = figure.stages.length > 1, charts = el("div");
  const where = el("output", {class: "where", for: `${id}-slider`});
  const slider = el("input", {type: "range", id: `${id}-slider`, step: 1});
  let drawn = [];

  function show(step) {
    state.step = step;
    kept.set(id, {...state});
    slider.value = step;
    where.textContent = `step ${number(step)}`;
    slider.setAttribute("aria-valuetext", [`step ${number(step)}`, drawn[0]?.show(step)].filter(Boolean).join(": "));
    drawn.slice(1).forEach(chart => chart.show(step));
  }

  function look(stage) {
    state.stage = stage;
    const of = figure.stages.find(one => one.number === stage);
    const from = of ? of.first_step - 1 : 0, to = Math.max(of ? from + of.steps : figure.steps, from + 1);
    drawn = figure.panels.map((panel, n) => runChart(figure, panel, `${id}-${n}`, {stage, from, to}));
    charts.replaceChildren(...drawn.map(chart => chart.element));
    Object.assign(slider, {min: from, max: to});
    show(Math.min(Math.max(state.step, from), to));
  }

  slider.addEventListener("input", () => show(Number(slider.value)));
  const names = ["all", ...figure.stages.map(stageName)];
  const picked = name => look(figure.stages.find(stage => stageName(stage) === name)?.number ?? null);
  const chosen = figure.stages.find(stage => stage.number === state.stage);
  const controls = el("div", {class: "card controls", role: "group", "aria-label": "Steps of the run"},
    several ? choice("Show", `${id}-stage`, names, picked, chosen ? stageName(chosen) : "all") : null,
    el("div", {class: "slide"}, el("label", {class: "unseen", for: `${id}-slider`}, "Step of the run"), slider), where);
  look(chosen?.number ?? null);
  return el("div", {class: "run"}, el("div", {class: "card"}, stageTable(figure)), controls, charts,
    figure.settings.length ? el("div", {class: "card"}, folded("The config", () => table("Settings of the run", ["Key", "Value"], figure.settings))) : null);
}

const STAGE_HEADS = ["Stage", "Tokens", "Steps", "Mesh", "Loss", "Tokens/s", "MFU", "Waiting, mean", "most", "Peak memory"];

function stageTable(figure) {
  const or = (value, form) => (value === null || value === undefined ? "" : form(value)), share = FORMS.share;
  const rows = figure.stages.map(stage => [
    stage.pictures ? el("a", {href: stage.pictures}, stageName(stage), ", its ring") : stageName(stage), stage.seq_len ? number(stage.seq_len) : "",
    `${number(stage.first_step)}–${number(stage.first_step + stage.steps - 1)}` + (stage.done < stage.steps ? `, ${number(stage.done)} done` : ""),
    stage.text, or(stage.loss, loss => loss.map(figured).join(" → ")), or(stage.tokens_per_s, figured), or(stage.mfu, share),
    or(stage.waiting, waits => share(waits[0])), or(stage.waiting, waits => share(waits[1])), or(stage.peak_bytes, bytes)]);
  const told = row => row.filter((_, i) => rows.some(other => other[i])); // what no stage has, has no column
  return table("Stages: medians of speed and MFU, means of waiting, memory of the fullest rank", told(STAGE_HEADS), rows.map(told));
}

// One panel. `view`: the stage that is shown, or null; the steps at the ends of the axis.
function runChart(figure, panel, id, view) {
  const told = inUnit(panel.unit), names = curveNames(panel), {left, right, top, height, below} = CHART, wide = wideness();
  const curves = panel.curves.filter(curve => view.stage === null || curve.stage === view.stage), values = curves.flatMap(curve => curve.values);
  const low = panel.unit ? 0 : Math.min(...values), high = Math.max(...values), room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  const floor = panel.unit ? 0 : low - room, ceiling = high + room;
  const x = step => left + ((wide - left - right) * (step - view.from)) / (view.to - view.from);
  const y = value => top + height - (height * (value - floor)) / (ceiling - floor);
  const cursor = svg("path", {class: "cursor"}), said = el("p", {class: "note"});
  const at = step => names.map(name => {
    const before = curves.filter(curve => curve.name === name).flatMap(curve => curve.steps.map((s, i) => [s, curve.values[i]])).filter(point => point[0] <= step);
    const last = before[before.length - 1];
    return last ? `${name} ${told(last[1])}` + (last[0] < step ? ` (step ${number(last[0])})` : "") : null;
  }).filter(Boolean).join("; ");
  const words = `${panel.title}: ${names.map(name => ends(curves.filter(curve => curve.name === name), name, told)).filter(Boolean).join("; ") || "nothing in this stage"}`;
  const picture = svg("svg", {viewBox: `0 0 ${wide} ${top + height + below}`, role: "img", "aria-labelledby": `${id}-name`}, svg("title", {id: `${id}-name`}, words),
    ...(values.length ? marksUp(floor, ceiling, y, wide - right, told) : []), ...marksAlong(view, x), ...switches(figure, view, x), cursor,
    ...curves.flatMap(curve => curveOf(curve, names.indexOf(curve.name), x, y)));
  const rows = () => {
    const keys = new Map();
    curves.forEach(curve => curve.steps.forEach((step, i) => {
      const key = `${step} ${curve.stage}`, row = keys.get(key) ?? keys.set(key, [step, curve.stage, {}]).get(key);
      row[2][curve.name] = told(curve.values[i]);
    }));
    return [...keys.values()].sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(([step, stage, found]) => [number(step), number(stage + 1), ...names.map(name => found[name] ?? "")]);
  };
  return {
    element: el("div", {class: "card"}, el("h3", {}, panel.title), picture,
      names.length > 1 ? legend(names.map((name, i) => [lineIcon(i), name])) : null, said,
      folded("As a table", () => table(`${panel.title} by step`, ["After step", "Stage", ...names], rows()))),
    show(step) {
      cursor.setAttribute("d", `M${x(step)} ${top}V${top + height}`);
      return (said.textContent = at(step));
    },
  };
}

function ends(curves, name, told) {
  if (!curves.length) return "";
  const first = curves[0], last = curves[curves.length - 1], n = last.steps.length - 1;
  return `${name} from ${told(first.values[0])} at step ${number(first.steps[0])} to ${told(last.values[n])} at step ${number(last.steps[n])}`;
}

const tinted = i => ({class: `curve ${TINTS[i % TINTS.length]}`, "stroke-dasharray": DASHES[i % DASHES.length]});
const lineIcon = i => svg("svg", {viewBox: "0 0 10 10", "aria-hidden": "true"}, svg("path", {...tinted(i), "stroke-dasharray": i ? "3 2" : null, d: "M0 5H10"}));

function curveOf(curve, i, x, y) {
  const points = curve.steps.map((step, n) => [x(step), y(curve.values[n])].map(v => v.toFixed(1)));
  const dots = points.length > FEW ? [] : points.map(([cx, cy]) => svg("circle", {class: `dot ${TINTS[i % TINTS.length]}`, cx, cy, r: points.length > 8 ? 2.5 : 3.5}));
  return [svg("polyline", {...tinted(i), "data-curve": curve.name, "data-stage": curve.stage, points: points.map(p => p.join(",")).join(" ")}), ...dots];
}

function marksUp(floor, ceiling, y, end, told) {
  const whole = told === FORMS.bytes ? [2 ** 30, 2 ** 20, 2 ** 10].find(unit => ceiling > 2 * unit) ?? 1 : 1; // 10 MiB, not 9.54
  const step = whole * stride((ceiling - floor) / whole, 4), first = Math.ceil(floor / step);
  return range(Math.floor(ceiling / step) - first + 1).map(i => Number(((first + i) * step).toPrecision(12))).flatMap(value => [
    svg("path", {class: "border", d: `M${CHART.left} ${y(value)}H${end}`}),
    svg("text", {class: "quiet", x: CHART.left - 8, y: y(value), dy: "0.35em", "text-anchor": "end", "font-size": 12}, told(value).replace(" tokens/s", ""))]);
}

function marksAlong(view, x) {
  const step = Math.max(1, stride(view.to - view.from, narrow.matches ? 3 : 8)), first = Math.ceil(view.from / step);
  return range(Math.floor(view.to / step) - first + 1).map(i => (first + i) * step).map(at =>
    svg("text", {class: "quiet", x: x(at), y: CHART.top + CHART.height + 16, "font-size": 12, "text-anchor": "middle"}, number(at)));
}

// Where stages begin: a line between two steps, and what begins there, if there is room for words.
function switches(figure, view, x) {
  const stages = view.stage === null && figure.stages.length > 1 ? figure.stages : [];
  return stages.flatMap((stage, i) => {
    const from = x(stage.first_step - 1), until = x(stages[i + 1] ? stages[i + 1].first_step - 1 : view.to);
    const words = [stageWords(stage), stageName(stage), `${stage.number + 1}`].find(text => 6.4 * text.length < until - from - 4);
    return [i ? svg("path", {class: "way gradient", "data-switch": stage.number, d: `M${from} ${CHART.top - 12}V${CHART.top + CHART.height}`}) : null,
      words ? svg("text", {class: "quiet", x: from + 4, y: 11, "font-size": 12}, words) : null].filter(Boolean);
  });
}
