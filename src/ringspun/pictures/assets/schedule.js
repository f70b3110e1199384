// The walk: controls, the ring, the score matrix, what a step does in words and as a table.
const DWELL_MS = 1700; // of a step while it plays
const shownBefore = new Map(); // by id: where a walk is when it is drawn anew

function schedulePicture(figure, id) {
  const state = {direction: "forward", column: 0, timer: 0, ...shownBefore.get(id)};
  const pass = () => figure[state.direction], last = () => Math.max(pass().steps.length - 2, 0);
  const runs = data.figures.find(other => other.figure === "layout" && other.words === figure.words)?.runs ?? null;
  const ring = ringPicture(figure, id), matrix = matrixPicture(figure, runs, id);
  const said = el("p", {class: "said", id: `${id}-said`, "aria-live": "polite", "aria-atomic": "true"});
  const where = el("output", {class: "where", for: `${id}-slider`});
  const slider = el("input", {type: "range", id: `${id}-slider`, min: 0, step: 1, value: 0, "aria-describedby": `${id}-keys`});
  const play = el("button", {type: "button", class: "main"}, "Play");
  const back = el("button", {type: "button", "aria-label": "Step before", title: "Step before (←)"}, "←");
  const next = el("button", {type: "button", "aria-label": "Next step", title: "Next step (→)"}, "→");
  const done = el("b"), counted = el("span"), rows = el("div");

  function show(column, settled = false) {
    state.column = Math.min(Math.max(column, 0), last());
    shownBefore.set(id, {direction: state.direction, column: state.column});
    slider.max = last();
    slider.value = state.column;
    const name = stepName(pass(), state.column);
    slider.setAttribute("aria-valuetext", `${state.direction}, ${name}`);
    where.textContent = name;
    back.setAttribute("aria-disabled", state.column === 0);
    next.setAttribute("aria-disabled", state.column === last());
    ring.show(pass(), state.column, settled);
    matrix.show(state.direction, state.column);
    said.replaceChildren(...stepWords(figure, state.direction, state.column));
    const all = sum(pass().pairs.flat()), until = sum(pass().pairs.flatMap(row => row.slice(0, state.column + 1)));
    done.style.width = `${all ? (100 * until) / all : 0}%`;
    counted.textContent = `${number(until)} of ${number(all)} pairs`;
    rows.replaceChildren(table(`${state.direction}, ${name}: rank by rank`, STEP_HEADS, stepRows(figure, pass(), state.column)));
  }

  function go(column) {
    if (column < 0 || column > last()) return;
    if (column === state.column + 1) ring.leave(() => show(column));
    else show(column, true);
  }

  function playing(on) {
    clearInterval(state.timer);
    state.timer = on ? setInterval(() => (state.column < last() ? go(state.column + 1) : playing(false)), DWELL_MS) : 0;
    play.textContent = on ? "Pause" : "Play";
    said.setAttribute("aria-live", on ? "off" : "polite"); // a reader cannot follow a film; it is told where the film stops
    if (on && state.column === last()) show(0, true);
    if (!on) said.replaceChildren(...stepWords(figure, state.direction, state.column));
  }

  const asked = column => { if (state.timer) playing(false); go(column); };
  play.addEventListener("click", () => playing(!state.timer));
  back.addEventListener("click", () => asked(state.column - 1));
  next.addEventListener("click", () => asked(state.column + 1));
  slider.addEventListener("input", () => { if (state.timer) playing(false); show(Number(slider.value), true); });
  const turn = direction => { if (state.timer) playing(false); state.direction = direction; show(0, true); };
  const element = el("div", {class: "walk"},
    el("div", {class: "card controls", role: "group", "aria-label": "Steps of the ring"},
      choice("Pass", `${id}-pass`, ["forward", "backward"], turn, state.direction), play,
      el("div", {class: "slide"}, back, el("label", {class: "unseen", for: `${id}-slider`}, "Step of the ring"), slider, next), where),
    el("div", {class: "card"}, said, el("p", {class: "keys note", id: `${id}-keys`}, el("kbd", {}, "←"), " ", el("kbd", {}, "→"), " step, ",
        el("kbd", {}, "Home"), " ", el("kbd", {}, "End"), " first, last, ", el("kbd", {}, "Space"), " play")),
    el("div", {class: "pair"},
      el("div", {class: "card"}, el("h3", {}, "The ring"), ring.element, legend([
        [swatch("block", `--hue:${hue(0, figure.ring_size)}`), "a block, in its owner's colour"],
        [arcIcon(), "work of this step, of the busiest"]])),
      el("div", {class: "card"}, el("h3", {}, "The score matrix"),
        el("div", {class: "choices"}, choice("Colour by", `${id}-colour`, ["kind", "rank"], matrix.colour)),
        el("div", {class: "progress"}, el("i", {"aria-hidden": "true"}, done), counted), matrix.element,
        legend(Object.keys(KIND_WORDS).filter(used(figure)).map(kind => [kindIcon(kind), KIND_WORDS[kind]])),
        matrix.coarse ? el("p", {class: "note"}, "Each square is what one rank computes with one block: all of its tiles.") : null)),
    el("div", {class: "card", style: "margin-top:1rem"}, rows,
      folded("All steps as a table", () => allSteps(figure))));
  element.addEventListener("keydown", event => { if (key(event)) event.stopPropagation(); });
  element.steer = key;

  // Whether it was a key of ours. Controls keep their own: a slider its arrows, a button its space.
  function key(event) {
    const tag = event.target.tagName, taken = tag === "INPUT" && (event.target.type === "range" || !["Home", "End"].includes(event.key));
    if (event.altKey || event.ctrlKey || event.metaKey || taken || event.target.closest?.(".scroll")) return false;
    const moves = {ArrowLeft: () => asked(state.column - 1), ArrowRight: () => asked(state.column + 1),
      Home: () => asked(0), End: () => asked(last())};
    if (event.key === " " && !["BUTTON", "SUMMARY"].includes(tag)) playing(!state.timer);
    else if (moves[event.key]) moves[event.key]();
    else return false;
    event.preventDefault();
    return true;
  }
  show(state.column, true);
  return element;
}

const used = figure => kind => kind !== "idle" && [figure.forward, figure.backward].some(one =>
  one.tiles.length ? one.tiles.some(tile => KINDS[tile[2]] === kind) : one.kinds.some(row => row.includes(kind)));
const arcIcon = () => svg("svg", {viewBox: "-7 -7 14 14", "aria-hidden": "true"}, svg("circle", {class: "gauge-rail", r: 4.5}),
  svg("circle", {class: "gauge", r: 4.5, "stroke-dasharray": 28.3, "stroke-dashoffset": 9, transform: "rotate(-90)"}));

function stepName(pass, column) {
  const [first, end] = [pass.steps[column], pass.steps[column + 1]], all = pass.steps[pass.steps.length - 1];
  return end - first === 1 ? `step ${first + 1} of ${all}` : `steps ${first + 1}–${end} of ${all}`;
}

// What happens in a step, in words; the table below has every rank and message.
function stepWords(figure, direction, column) {
  const pass = figure[direction], pairs = pass.pairs.map(row => row[column]), total = sum(pairs);
  const work = total === 0 ? "No pair is computed." : pairs.every(n => n === pairs[0]) ? `Equal work: ${counted(pairs[0], "pair")} each.` :
    `Unequal work: ${counted(total, "pair")}, ${number(most(pairs))} of them on the busiest rank; the mean is ${number(total / pairs.length)}.`;
  const lead = `${direction[0].toUpperCase()}${direction.slice(1)}, ${stepName(pass, column)}.`;
  return [el("strong", {}, lead), ` ${holdingWords(figure, pass, column, pairs)} ${work} ${travelWords(figure, pass, column)}`];
}

function holdingWords(figure, pass, column, pairs) {
  const size = figure.ring_size, working = figure.ranks.map((rank, i) => [rank, pass.sources[i][column]]).filter((_, i) => pairs[i]);
  const shifts = new Set(working.map(([rank, owner]) => (owner < 0 ? NaN : (rank - owner + size) % size)));
  const who = working.length === figure.ranks.length ? "Every rank computes" : `${working.length} of ${counted(figure.ranks.length, "rank")} compute${working.length === 1 ? "s" : ""}`;
  const block = pass.travels === "keys" ? "the keys and values" : "the queries";
  const [shift] = shifts;
  if (working.length === 0) return "All ranks wait.";
  if (shifts.size > 1 || Number.isNaN(shift)) return `${who}.`;
  if (shift === 0) return `${who} with ${block} that it owns.`;
  return `${who} with ${block} of the rank ${shift === 1 ? "" : `${shift} places `}before it${working.length <= 8 ? `: ${working.map(([rank, owner]) => `rank ${rank} with ${heldName(pass, owner)}`).join(", ")}` : ""}.`;
}

function travelWords(figure, pass, column) {
  const under = travelling(pass, column), some = under.slice(0, 8);
  if (under.length === 0) return listed(pass) ? "Nothing is sent." : "Its messages are too many to be listed.";
  const names = some.map(([, , , sender, receiver, payload, owner]) => `${blockName(payload, owner)} from ${sender} to ${receiver}`);
  const rest = under.length > some.length ? `, and ${number(under.length - some.length)} more` : "";
  return `Meanwhile ${counted(under.length, "message travels", "messages travel")} (${bytes(sum(under.map(m => m[8])))}): ${names.join(", ")}${rest}.`;
}

const listed = pass => pass.messages.length === pass.sent; // else there are too many

const STEP_HEADS = ["Rank", "Block", "Kind", "Pairs", "Sends"];

function stepRows(figure, pass, column) {
  const under = travelling(pass, column);
  return figure.ranks.map((rank, i) => [`${rank}`, heldName(pass, pass.sources[i][column]), pass.kinds[i][column],
    pass.pairs[i][column], under.filter(m => m[3] === rank).map(m => `${blockName(m[5], m[6])} to ${m[4]}`).join(", ") || (listed(pass) ? "–" : "not listed")]);
}

function allSteps(figure) {
  const rows = ["forward", "backward"].flatMap(direction => range(figure[direction].steps.length - 1).flatMap(column =>
    stepRows(figure, figure[direction], column).map(([rank, ...rest]) => [`${direction}, ${stepName(figure[direction], column)}`, rank, ...rest])));
  return table("Every step of every rank", ["Step", ...STEP_HEADS], rows);
}
