// What a model finds in its context, as a heat map; how well it predicts with it, as lines.
const percent = value => `${number(100 * value)} %`;

function retrievalPicture(figure, id) {
  const {seq_lens, right, asked, intervals} = figure, depths = asked[0].length, cells = [];
  const depth = j => `${number((100 * j) / depths)}–${number((100 * (j + 1)) / depths)} %`;
  const total = seq_lens.map((_, i) => sum(right[i]) / sum(asked[i]));
  right.forEach((row, i) => row.forEach((found, j) => {
    if (asked[i][j]) cells.push([i, j, found / asked[i][j], `${counted(seq_lens[i], "token")}, depth ${depth(j)}: ${number(found)} of ${number(asked[i][j])} exact`]);
  }));
  const words = seq_lens.map((length, i) => `${number(length)} tokens: ${percent(total[i])}`).join("; ");
  return el("div", {class: "card"}, el("p", {}, `Exact answers. ${words}.`), el("p", {class: "note"}, "Each row is a length, each column a part of the document from its beginning: the stronger, the more exact answers."),
    grid(`${id}-name`, words, seq_lens.length, depths, cells, seq_lens.map(number)),
    folded("As a table", () => table("Exact answers by length and depth", ["Tokens", "All", "95 % interval", ...range(depths).map(depth)],
      seq_lens.map((length, i) => [number(length), `${sum(right[i])} of ${sum(asked[i])}`, intervals[i].map(percent).join(" to "), ...right[i].map((found, j) => `${found} of ${asked[i][j]}`)]))));
}

const contextNames = figure => ["whole context", ...figure.windows.map(window => `at most ${number(window)} tokens`)];

function lossPicture(figure, id) {
  const {edges, losses, means} = figure, wide = wideness(), high = 240, left = 58, below = 24, names = contextNames(figure);
  const found = losses.flat().filter(value => value !== null), known = found.length ? found : [0], low = Math.min(...known), top = Math.max(...known);
  const nats = mean => (mean === null ? "no finite loss" : `${number(mean)} nats`);
  const x = position => left + ((wide - left - 12) * position) / edges[edges.length - 1];
  const y = loss => 10 + ((high - 20) * (top - loss)) / (top - low || 1);
  const middle = i => (edges[i] + edges[i + 1]) / 2, colour = row => `--hue:${hue(row, names.length)}`;
  const curves = losses.map((row, n) => svg("g", {}, svg("polyline", {class: "losses", style: colour(n), points: row.map((loss, i) => (loss === null ? "" : `${x(middle(i))},${y(loss)}`)).join(" ")}),
    ...row.map((loss, i) => (loss === null ? null : svg("circle", {class: "block", style: colour(n), cx: x(middle(i)), cy: y(loss), r: 4}, svg("title", {}, `${names[n]}, tokens ${span(edges, i)}: ${number(loss)} nats`))))));
  const words = `Loss by position: ${names.map((name, n) => `${name} ${nats(means[n])} in the mean`).join("; ")}`;
  return el("div", {class: "card"}, legend(names.map((name, n) => [swatch("block", colour(n)), `${name}: ${nats(means[n])}${means[n] === null ? "" : `, perplexity ${number(Math.exp(means[n]))}`}`])),
    svg("svg", {viewBox: `0 0 ${wide} ${high + below}`, role: "img", "aria-labelledby": `${id}-name`}, svg("title", {id: `${id}-name`}, words),
      ...[low, top].map(loss => svg("text", {class: "quiet", x: left - 8, y: y(loss), dy: "0.35em", "text-anchor": "end", "font-size": 12}, number(loss))),
      ...[0, edges[edges.length - 1]].map((at, i) => svg("text", {class: "quiet", x: x(at), y: high + 14, "text-anchor": i ? "end" : "start", "font-size": 12}, number(at))),
      ...curves),
    folded("As a table", () => table("Loss by position (nats)", ["Tokens", ...names], range(edges.length - 1).map(i => [span(edges, i), ...losses.map(row => row[i] ?? "none")]))));
}
