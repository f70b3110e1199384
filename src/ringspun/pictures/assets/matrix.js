// The score matrix: queries downwards, keys to the right. Every tile of the schedule is one shape that appears at its step.

const EXACT = 96; // tokens of an axis up to which pairs are drawn one by one

// Corners [q, k] of a tile, pair by pair: what each row sees, down at the right and up again at the left.
function stairs([q0, q1, k0, k1, lo, hi]) {
  const rows = range(q1 - q0).map(i => q0 + i), first = q => Math.max(k0, q - hi), end = q => Math.min(k1, q - lo + 1);
  return [...rows.flatMap(q => [[q, end(q)], [q + 1, end(q)]]), ...rows.reverse().flatMap(q => [[q + 1, first(q)], [q, first(q)]])];
}

// The same of a large matrix, whose pairs nobody can see: a rectangle with up to two corners cut off.
function outline([q0, q1, k0, k1, lo, hi]) {
  let corners = [[q0, k0], [q0, k1], [q1, k1], [q1, k0]];
  for (const [sign, bound] of [[1, lo - 0.5], [-1, -(hi + 0.5)]]) {
    const cuts = [[q0, k1 - 1], [q1 - 1, k0]].some(([q, k]) => sign * (q - k) < bound - 0.5);
    if (cuts) corners = clipped(corners, sign, bound);
  }
  return corners;
}

// The part of a polygon where sign * (q - k) >= bound.
function clipped(corners, sign, bound) {
  const found = [];
  corners.forEach(([q, k], i) => {
    const [q2, k2] = corners[(i + 1) % corners.length];
    const here = sign * (q - k) - bound, there = sign * (q2 - k2) - bound;
    if (here >= 0) found.push([q, k]);
    if (here * there < 0) found.push([q + (here / (here - there)) * (q2 - q), k + (here / (here - there)) * (k2 - k)]);
  });
  return found;
}

const MATRIX = 400, EDGE = 16, GAP = 5;

// figure: of a schedule. runs: of its layout, for the strips at the edges, or null.
function matrixPicture(figure, runs, id) {
  const coarse = !figure.forward.tiles.length && !figure.backward.tiles.length; // too many tiles: ranks by blocks then
  const [queries, keys] = coarse ? [figure.ring_size, figure.ring_size] : [figure.queries, figure.keys];
  const scale = MATRIX / Math.max(queries, keys, 1), width = keys * scale, height = queries * scale, start = EDGE + GAP;
  const tiles = svg("g", {transform: `translate(${start} ${start}) scale(${scale})`});
  const picture = svg("svg", {viewBox: `-16 -16 ${start + width + 18} ${start + height + 18}`, role: "img",
      "aria-labelledby": `${id}-matrix-name`, "aria-describedby": `${id}-said`},
    svg("title", {id: `${id}-matrix-name`}, `Score matrix of ${number(figure.queries)} queries and ${number(figure.keys)} keys, filled up to this step`),
    ...strips({...figure, queries, keys, same: coarse || figure.same}, coarse ? figure.ranks.map(rank => [rank, rank, 1]) : partsOf(figure, runs), scale, start),
    svg("text", {class: "quiet", x: start, y: -5, "font-size": narrow.matches ? 14 : 11.5}, "keys →"),
    svg("text", {class: "quiet", x: -start, y: -5, "font-size": narrow.matches ? 14 : 11.5, "text-anchor": "end", transform: "rotate(-90)"}, "← queries"),
    svg("rect", {class: "ground", x: start, y: start, width, height}), tiles);
  const drawn = {forward: null, backward: null};
  let shown = null;

  function show(direction, column) {
    const pass = figure[direction];
    if (!drawn[direction]) drawn[direction] = (coarse ? shardTiles(figure, pass) : pass.tiles).map(tile => tileShape(tile, pass, figure));
    if (shown !== direction) tiles.replaceChildren(...drawn[direction].map(shape => shape.element));
    shown = direction;
    for (const {element, base, at} of drawn[direction]) {
      element.setAttribute("class", `${base} ${at > column ? "later" : at < column ? "before" : "now"}`);
    }
  }
  const colour = by => tiles.setAttribute("class", by === "rank" ? "by-rank" : "");
  return {element: picture, show, colour, coarse};
}

function columnOf(step, edges) {
  let column = 0;
  while (column + 2 < edges.length && step >= edges[column + 1]) column++;
  return column;
}

// What each rank computes with each block, as one square; a column of several steps has none.
function shardTiles(figure, pass) {
  const whole = [-figure.ring_size, figure.ring_size];
  return figure.ranks.flatMap((rank, i) => pass.sources[i].map((owner, column) => {
    const [q, k] = pass.travels === "keys" ? [rank, owner] : [owner, rank];
    return [rank, pass.steps[column], pass.kinds[i][column], q, q + 1, k, k + 1, ...whole];
  }).filter((tile, column) => pass.sources[i][column] >= 0 && tile[2] !== "idle"));
}

function tileShape([rank, step, kindOf, ...region], pass, figure) {
  const [q0, q1, k0, k1] = region, kind = KINDS[kindOf] ?? kindOf, base = `tile ${kind}`;
  const words = `rank ${rank}, step ${step + 1}, ${kind}: queries ${q0} to ${q1 - 1}, keys ${k0} to ${k1 - 1}`;
  const corners = Math.max(figure.queries, figure.keys) <= EXACT ? stairs(region) : outline(region);
  const d = "M" + corners.map(([q, k]) => `${+k.toFixed(3)} ${+q.toFixed(3)}`).join("L") + "Z";
  const element = svg("path", {class: `${base} later`, d, "data-rank": rank, "data-step": step, "data-kind": kind,
    style: `--hue:${hue(rank, figure.ring_size)}`}, svg("title", {}, words));
  return {element, base, at: columnOf(step, pass.steps)};
}

// Who holds which queries and keys: strips in the colours of the ring.
function strips(figure, parts, scale, start) {
  const lines = parts.length <= 64 ? parts.slice(1).map(([, from]) => from * scale + start) : [];
  const end = {x: start + figure.keys * scale, y: start + figure.queries * scale};
  const style = rank => `--hue:${hue(rank, figure.ring_size)}`;
  const strip = (rank, from, length, along) => {
    const place = from * scale + start, size = length * scale;
    const box = along ? {x: place, y: 0, width: size, height: EDGE} : {x: 0, y: place, width: EDGE, height: size};
    const name = size > 6 * `${rank}`.length + 4 ? svg("text", {class: "on-block", x: box.x + box.width / 2, y: box.y + box.height / 2, dy: "0.36em",
      "text-anchor": "middle", "font-size": narrow.matches ? 12.5 : 10.5}, `${rank}`) : null;
    return svg("g", {}, svg("title", {}, `rank ${rank}: ${from} to ${from + length - 1}`),
      svg("rect", {class: "block", style: style(rank), ...box}), name);
  };
  const self = figure.same; // keys of another side are dealt otherwise, and not told of
  return [
    ...parts.map(([rank, from, length]) => strip(rank, from, length, false)),
    ...(self ? parts.map(([rank, from, length]) => strip(rank, from, length, true)) : []),
    ...lines.map(at => svg("path", {class: "border", d: `M${start} ${at}H${end.x}` + (self ? `M${at} ${start}V${end.y}` : "")})),
  ];
}

// [rank, first place, length] along an axis.
const partsOf = (figure, runs) => (figure.order === "ranks" ? shardParts(figure) : runParts(figure, runs));

// Of one on which ranks follow each other.
function shardParts(figure) {
  if (figure.tokens.length < figure.ring_size) return [];
  let from = 0;
  return figure.ranks.map((rank, i) => [rank, (from += figure.tokens[i]) - figure.tokens[i], figure.tokens[i]]);
}

// Of one along the sequence; of runs of single tokens, token by token.
function runParts(figure, runs) {
  const parts = (runs ?? []).flatMap(([rank, first, stop, step]) =>
    step === 1 ? [[rank, first, stop - first]] : range(Math.ceil((stop - first) / step)).map(i => [rank, first + i * step, 1]));
  return parts.sort((a, b) => a[1] - b[1]);
}

const kindIcon = kind => {
  const shapes = {full: "M0 0H10V10H0Z", causal: "M0 0L10 10H0Z", anticausal: "M0 0H10V10Z", band: "M0 0H4L10 6V10H6L0 4Z", mixed: "M0 0H4V4H0ZM6 6H10V10H6Z"};
  return svg("svg", {viewBox: "-1 -1 12 12", "aria-hidden": "true"}, svg("path", {class: `tile now ${kind}`, d: shapes[kind]}));
};
