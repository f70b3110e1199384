// The ranks in a circle, the block that each holds, and what travels between them.
const PAYLOADS = data.payloads; // number -> short name
const GRADIENTS = ["dKV", "dQ"];
const CENTRE = 200, RADIUS = 162;

// figure: of a schedule. Returns the element and `show(pass, column)`.
function ringPicture(figure, id) {
  const ranks = figure.ranks, count = ranks.length;
  const size = Math.max(7, Math.min(34, (Math.PI * RADIUS) / Math.max(count, 1) * 0.5));
  const place = new Map(ranks.map((rank, i) => {
    const angle = (2 * Math.PI * i) / count - Math.PI / 2;
    return [rank, {x: CENTRE + RADIUS * Math.cos(angle), y: CENTRE + RADIUS * Math.sin(angle), angle}];
  }));
  if (count === 1) place.set(ranks[0], {x: CENTRE, y: CENTRE, angle: -Math.PI / 2});
  const picture = svg("svg", {viewBox: "0 0 400 400", role: "img", "aria-labelledby": `${id}-ring-name`, "aria-describedby": `${id}-said`},
    svg("title", {id: `${id}-ring-name`}, `${counted(figure.ring_size, "rank")} in a circle, each with the block that it computes with`),
    count > 2 ? svg("circle", {class: "rail", cx: CENTRE, cy: CENTRE, r: RADIUS}) : null);
  const ways = svg("g"), chips = svg("g");
  const nodes = new Map(ranks.map((rank, i) => [rank, rankNode(rank, i, place.get(rank), size, figure)]));
  picture.append(ways, ...[...nodes.values()].map(node => node.element), chips);
  let running = 0, drawn = [];

  function show(pass, column, settled) {
    cancelAnimationFrame(running);
    const peak = most(pass.pairs.flat());
    ranks.forEach((rank, i) => nodes.get(rank).show(pass, i, column, peak));
    drawn = travelling(pass, column).map(m => messageWay(m, place, size, figure));
    ways.replaceChildren(...drawn.map(d => d.way));
    chips.replaceChildren(...drawn.map(d => d.chip));
    move(0, 0.5, settled || calm.matches ? 0 : 600);
  }

  // Chips go from one part of their way to another.
  function move(from, to, ms, then = null) {
    const start = performance.now();
    const frame = now => {
      const part = ms ? Math.min(1, (now - start) / ms) : 1;
      const eased = part < 0.5 ? 2 * part * part : 1 - 2 * (1 - part) ** 2;
      for (const {chip, at} of drawn) {
        const {x, y} = at(from + (to - from) * eased);
        chip.setAttribute("transform", `translate(${x.toFixed(2)} ${y.toFixed(2)})`);
      }
      if (part < 1) running = requestAnimationFrame(frame);
      else if (then) then();
    };
    if (ms) running = requestAnimationFrame(frame);
    else frame(start);
  }

  // Before the next step is shown, what is under way arrives.
  function leave(next) {
    cancelAnimationFrame(running);
    if (calm.matches || drawn.length === 0) next();
    else move(0.5, 1, 350, next);
  }

  return {element: picture, show, leave};
}

// Messages that are posted in a column: they travel while it is computed, or right after it.
function travelling(pass, column) {
  return pass.messages.filter(([step]) => step >= pass.steps[column] && step < pass.steps[column + 1]);
}

const blockName = (payload, owner) => `${PAYLOADS[payload]} ${owner}`;
const heldName = (pass, owner) => owner < 0 ? "–" : blockName(pass.travels === "keys" ? 0 : 2, owner);

function rankNode(rank, i, at, size, figure) {
  const few = figure.ranks.length <= 10, label = few ? -size - 10 : size + 10; // of few, towards the middle
  const beside = {x: Math.cos(at.angle) * label, y: Math.sin(at.angle) * (few ? label - 4 : label)};
  const fat = narrow.matches ? 1.3 : 1; // drawn small, letters are larger
  const every = Math.ceil(figure.ranks.length / 32), circumference = 2 * Math.PI * (size - 3);
  const block = svg("circle", {class: "block", r: size - 8.5 > 4 ? size - 8.5 : size - 3});
  const name = svg("text", {class: "on-block", "text-anchor": "middle", dy: "0.35em", "font-size": fat * (few ? Math.min(14, size * 0.42) : size * 0.7)});
  const gauge = svg("circle", {class: "gauge", r: size - 3, "stroke-dasharray": circumference, transform: "rotate(-90)"});
  const anchor = !few || Math.abs(beside.x) < 8 ? "middle" : beside.x > 0 ? "start" : "end";
  const element = svg("g", {transform: `translate(${at.x.toFixed(2)} ${at.y.toFixed(2)})`, "data-rank": rank},
    svg("circle", {class: "body", r: size}), svg("circle", {class: "gauge-rail", r: size - 3}), gauge, block, name,
    i % every ? null : svg("text", {class: "quiet over", "font-size": fat * (few ? 13 : 9.5), "text-anchor": anchor, dy: "0.35em",
      x: beside.x, y: beside.y}, few ? `rank ${rank}` : `${rank}`));
  function show(pass, row, column, peak) {
    const owner = pass.sources[row][column], pairs = pass.pairs[row][column];
    element.setAttribute("data-block", owner);
    block.classList.toggle("none", owner < 0);
    block.style.setProperty("--hue", hue(owner, figure.ring_size));
    name.textContent = owner < 0 ? "" : few ? heldName(pass, owner) : owner;
    gauge.setAttribute("stroke-dashoffset", circumference * (1 - (peak ? pairs / peak : 0)));
  }
  return {element, show};
}

// The way of one message, and its chip. Between neighbours it runs along the circle, between others across it;
// gradients keep further inside, so that they never lie on the blocks.
function messageWay([, , after, sender, receiver, payload, owner], place, size, figure) {
  const a = place.get(sender), b = place.get(receiver) ?? beyond(a), gradient = GRADIENTS.includes(PAYLOADS[payload]);
  const bend = bending(a, b, gradient, figure.ranks.length), across = Math.hypot(a.x - b.x, a.y - b.y) || 1;
  const at = t => ({
    x: (1 - t) ** 2 * a.x + 2 * t * (1 - t) * bend.x + t * t * b.x,
    y: (1 - t) ** 2 * a.y + 2 * t * (1 - t) * bend.y + t * t * b.y,
  });
  const gap = Math.min(0.4, (size + 4) / across), to = at(1 - gap), before = at(1 - gap - 0.02);
  const turn = (Math.atan2(to.y - before.y, to.x - before.x) * 180) / Math.PI, tip = Math.min(6, size * 0.5);
  const line = range(25).map(i => at(gap + ((1 - 2 * gap) * i) / 24)).map(({x, y}) => `${x.toFixed(1)} ${y.toFixed(1)}`);
  const way = svg("g", {}, svg("path", {class: gradient ? "way gradient" : "way", d: `M${line.join("L")}`}),
    svg("path", {class: "tip", d: `M0 0L${-tip * 1.5} ${-tip * 0.7}V${tip * 0.7}Z`, transform: `translate(${to.x} ${to.y}) rotate(${turn})`}));
  const few = figure.ranks.length <= 12, name = blockName(payload, owner), fat = narrow.matches ? 1.25 : 1;
  const width = few ? fat * (13 + 7.4 * name.length) : Math.max(5, size), height = few ? fat * 21 : Math.max(5, size * 0.8);
  const chip = svg("g", {class: gradient ? "chip gradient" : "chip", "data-from": sender, "data-to": receiver, "data-block": owner},
    svg("title", {}, `${name} from rank ${sender} to rank ${receiver}${after ? ", after the step's tiles" : ""}`),
    svg("rect", {class: "block", x: -width / 2, y: -height / 2, width, height, rx: Math.min(5, height / 4), style: `--hue:${hue(owner, figure.ring_size)}`}),
    few ? svg("text", {class: "on-block", "text-anchor": "middle", dy: "0.35em", "font-size": fat * 12.5}, name) : null);
  return {way, chip, at};
}

// The point that a way bends towards: so that its middle lies where it shall.
function bending(a, b, gradient, count) {
  const middle = {x: (a.x + b.x) / 2, y: (a.y + b.y) / 2}, out = {x: middle.x - CENTRE, y: middle.y - CENTRE};
  const far = Math.hypot(out.x, out.y), apart = Math.hypot(a.x - b.x, a.y - b.y) || 1;
  const side = {x: (b.y - a.y) / apart, y: (a.x - b.x) / apart}; // at the left hand of who goes from a to b
  const neighbours = count > 2 && apart < 2.2 * RADIUS * Math.sin(Math.PI / count);
  let through;
  if (neighbours && far > 1) {
    const radius = gradient ? RADIUS - 36 : RADIUS;
    through = {x: CENTRE + (out.x / far) * radius, y: CENTRE + (out.y / far) * radius};
  } else {
    const outward = (count === 2 ? 46 : 16) + (gradient ? (count === 2 ? 46 : 12) : 0);
    through = {x: middle.x + side.x * outward, y: middle.y + side.y * outward};
  }
  return {x: 2 * through.x - middle.x, y: 2 * through.y - middle.y};
}

// Where something goes whose receiver is not drawn.
const beyond = at => ({x: CENTRE + (at.x - CENTRE) * 1.28, y: CENTRE + (at.y - CENTRE) * 1.28});
