// Pictures that do not move: mask, layout, balance, memory.
const wideness = () => (narrow.matches ? 340 : 1000); // so that letters keep their size

// Rectangles of [row, column, part of the whole 0..1, words], `height` x `width` of them; rows may have names.
function grid(id, name, height, width, cells, rowNames = [], wide = wideness()) {
  const left = rowNames.length ? 58 : 0, across = (wide - left) / Math.max(width, 1);
  const down = rowNames.length ? Math.max(12, Math.min(30, 420 / height)) : across, every = Math.ceil(rowNames.length / 32);
  return svg("svg", {viewBox: `0 0 ${wide} ${height * down}`, role: "img", "aria-labelledby": id}, svg("title", {id}, name),
    ...rowNames.map((words, i) => i % every ? null : svg("text", {class: "quiet", x: left - 8, y: (i + 0.5) * down, dy: "0.35em", "text-anchor": "end", "font-size": 12}, words)),
    ...cells.map(([row, column, part, words, hueOf]) => svg("rect", {class: hueOf === undefined ? "cell" : "block", x: left + column * across,
      y: row * down + 0.5, width: Math.max(across - (across > 6 ? 1 : 0), 0.5), height: down - (down > 6 ? 1 : 0), "fill-opacity": (0.12 + 0.88 * part).toFixed(3),
      style: hueOf === undefined ? null : `--hue:${hueOf}`}, svg("title", {}, words))),
    svg("rect", {class: "ground", x: left, y: 0, width: wide - left, height: height * down}));
}

const span = (edges, i, shift = 0) => edges[i + 1] - edges[i] === 1 ? number(edges[i] + shift) : `${number(edges[i] + shift)}–${number(edges[i + 1] - 1 + shift)}`;

function maskPicture(figure, id) {
  const {queries, keys, allowed, start} = figure, cells = [];
  allowed.forEach((row, i) => row.forEach((pairs, j) => {
    const all = (queries[i + 1] - queries[i]) * (keys[j + 1] - keys[j]);
    if (pairs) cells.push([i, j, pairs / all, `queries ${span(queries, i, start)}, keys ${span(keys, j)}: ${number(pairs)} of ${number(all)} pairs`]);
  }));
  const q = queries[queries.length - 1], k = keys[keys.length - 1];
  const words = `${number(figure.pairs)} of ${number(q * k)} pairs are allowed (${number((100 * figure.pairs) / Math.max(q * k, 1))} %), in ${counted(figure.regions, "region")}.`;
  return el("div", {class: "card"}, el("p", {}, words, " Queries go down, keys go right."),
    el("div", {style: "max-width:34rem"}, grid(`${id}-name`, words, allowed.length, allowed[0]?.length ?? 0, cells, [], 400)),
    folded("As a table", () => table("Allowed pairs by query", ["Queries", "Keys seen by at least one of them", "Pairs"],
      allowed.map((row, i) => [span(queries, i, start), seen(row, keys), sum(row)]))));
}

// Stretches of keys with at least one pair.
function seen(row, keys) {
  const found = [];
  row.forEach((pairs, j) => {
    if (pairs && j && row[j - 1]) found[found.length - 1][1] = keys[j + 1] - 1;
    else if (pairs) found.push([keys[j], keys[j + 1] - 1]);
  });
  return found.map(([a, b]) => (a === b ? number(a) : `${number(a)}–${number(b)}`)).join(", ") || "none";
}

const rowName = (figure, i) => figure.ranks[i + 1] - figure.ranks[i] === 1 ? `rank ${figure.ranks[i]}` : `${span(figure.ranks, i)}`;

function heldWords(figure) {
  const least = Math.min(...figure.tokens), highest = most(figure.tokens), each = figure.tokens.length < figure.ranks[figure.ranks.length - 1] ? "each row" : "each";
  return least === highest ? `${number(least)} ${each}` : `${number(least)} to ${number(highest)} ${each}`;
}

function layoutPicture(figure, id) {
  const cells = [], {columns, held} = figure, size = figure.ranks[figure.ranks.length - 1];
  held.forEach((row, i) => row.forEach((tokens, j) => {
    const all = columns[j + 1] - columns[j];
    if (tokens) cells.push([i, j, tokens / all, `${rowName(figure, i)}: ${number(tokens)} of tokens ${span(columns, j)}`, hue(figure.ranks[i], size)]);
  }));
  const words = `${number(columns[columns.length - 1])} tokens on ${counted(size, "rank")}: ${heldWords(figure)}.`;
  const names = held.map((_, i) => rowName(figure, i));
  const runsOf = i => figure.runs.filter(([rank]) => rank >= figure.ranks[i] && rank < figure.ranks[i + 1])
    .map(([, a, b, step]) => `${number(a)}–${number(b - 1)}${step > 1 ? ` by ${step}` : ""}`).join(", ");
  return el("div", {class: "card"}, el("p", {}, words, " The sequence goes right."), grid(`${id}-name`, words, held.length, columns.length - 1, cells, names),
    folded("As a table", () => table("Who holds which tokens", ["Rank", "Tokens", "Positions"],
      names.map((name, i) => [name, figure.tokens[i], runsOf(i) || "not listed"]))));
}

function balancePicture(figure, id) {
  const parts = ["forward", "backward"].map(direction => {
    const one = figure[direction], peak = most(one.pairs.flat()), cells = [];
    one.pairs.forEach((row, i) => row.forEach((pairs, j) => {
      if (pairs) cells.push([i, j, peak ? pairs / peak : 0, `rank ${figure.ranks[i]}, step ${span(one.steps, j, 1)}: ${counted(pairs, "pair")}`]);
    }));
    const words = one.wait < 1.0005 ? "Perfect balance: at no step does a rank wait for another one's work." :
      `Ranks that wait at every step for the busiest take ${number(one.wait)} times as long as with perfect balance.`;
    const names = figure.ranks.map(rank => `rank ${rank}`);
    return el("div", {class: "card"}, el("h3", {}, direction[0].toUpperCase() + direction.slice(1)), el("p", {}, words),
      one.steps.length <= (narrow.matches ? 6 : 17) ? bars(`${id}-${direction}`, words, one, names, peak) : grid(`${id}-${direction}`, words, one.pairs.length, one.steps.length - 1, cells, names),
      el("p", {class: "note"}, one.steps.length <= (narrow.matches ? 6 : 17) ? "Each row is a rank, each column a step: pairs, of the most that any rank computes in a step." : "Each row is a rank, each column a step: the stronger, the more pairs; empty, idle."),
      folded("As a table", () => table(`Pairs of each rank and step, ${direction}`, ["Rank", ...range(one.steps.length - 1).map(j => `Step ${span(one.steps, j, 1)}`), "Sent"],
        names.map((name, i) => [name, ...one.pairs[i], bytes(one.sent_bytes[i])]))));
  });
  return el("div", {}, ...parts, el("div", {class: "card"}, folded(counted(figure.links.length, "link") + ", as a table", () =>
    table("Bytes over each link", ["From", "To", "Forward", "Backward"], figure.links.map(([a, b, f, g]) => [`rank ${a}`, `rank ${b}`, bytes(f), bytes(g)])))));
}

// Few steps: in each cell a bar and its number.
function bars(id, name, one, names, peak) {
  const left = 58, wide = wideness(), columns = one.steps.length - 1, across = (wide - left) / columns, down = 34, gap = 10;
  const cell = (pairs, i, j) => {
    const x = left + j * across, y = i * down, full = across - gap;
    return svg("g", {}, svg("text", {x, y: y + 14, "font-size": 12, class: pairs ? null : "quiet"}, pairs ? number(pairs) : "idle"),
      svg("rect", {class: "cell-rail", x, y: y + 19, width: full, height: 6, rx: 1}), svg("rect", {class: "cell", x, y: y + 19, width: peak ? (full * pairs) / peak : 0, height: 6, rx: 1}));
  };
  return svg("svg", {viewBox: `0 0 ${wide} ${names.length * down}`, role: "img", "aria-labelledby": id}, svg("title", {id}, name),
    ...names.map((words, i) => svg("text", {class: "quiet", x: left - 10, y: i * down + 20, "text-anchor": "end", "font-size": 12}, words)),
    ...one.pairs.flatMap((row, i) => row.map((pairs, j) => cell(pairs, i, j))));
}

const itemName = item => data.items[item] ?? item;

function memoryPicture(figure, id) {
  const names = [...figure.ranks.map(rank => `rank ${rank}`), "alone"], rows = [...figure.held, figure.whole], totals = rows.map(sum);
  const peak = most(totals), down = Math.max(14, Math.min(30, 560 / rows.length)), wide = wideness(), left = 58, scale = (wide - left - 78) / (peak || 1);
  const colour = i => `--hue:${hue(i, figure.items.length)}`, every = Math.ceil(rows.length / 40);
  const bars = rows.flatMap((row, r) => {
    let x = left;
    const boxes = row.map((held, i) => svg("rect", {class: "block", style: colour(i), x: (x += held * scale) - held * scale, y: r * down + 2,
      width: held * scale, height: down - 4}, svg("title", {}, `${names[r]}: ${itemName(figure.items[i])} ${bytes(held)}`)));
    const last = r === rows.length - 1, text = {class: "quiet", y: (r + 0.5) * down, dy: "0.35em", "font-size": 12};
    return [...boxes, ...(r % every && !last ? [] : [svg("text", {...text, x: left - 8, "text-anchor": "end"}, names[r]), svg("text", {...text, x: x + 6}, bytes(totals[r]))])];
  });
  const words = `The fullest of ${counted(figure.ring_size, "rank")} holds ${bytes(most(totals.slice(0, -1)))}; one rank alone with the whole sequence would hold ${bytes(totals[rows.length - 1])}.`;
  return el("div", {class: "card"}, el("p", {}, words),
    svg("svg", {viewBox: `0 0 ${wide} ${rows.length * down}`, role: "img", "aria-labelledby": `${id}-name`}, svg("title", {id: `${id}-name`}, words), ...bars),
    legend(figure.items.map((item, i) => [swatch("block", colour(i)), itemName(item)])),
    folded("As a table", () => table("Bytes at the worst moment", ["Rank", ...figure.items.map(itemName), "Together"],
      rows.map((row, r) => [names[r], ...row.map(bytes), bytes(totals[r])]))));
}
