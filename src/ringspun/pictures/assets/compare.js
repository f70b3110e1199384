// Ways side by side: of every number a bar, all bars of a number to one scale; less is better.
const NUMBERS = [
  ["Predicted time", way => sum(way.seconds), seconds],
  ["Waiting for the busiest, forward", way => way.wait[0], value => `${number(value)} ×`],
  ["Busiest link", way => way.link_bytes, bytes],
  ["Fullest rank", way => way.memory_bytes, bytes],
];

function comparePicture(figure, id) {
  const wide = wideness(), left = narrow.matches ? 110 : 210, down = 24, scale = wide - left - 90;
  const names = figure.ways.map(way => `${way.layout}, ${way.route}`);
  const cards = NUMBERS.map(([title, of, told], n) => {
    const values = figure.ways.map(of), peak = most(values), least = Math.min(...values);
    const words = `${title}: ${names.map((name, i) => `${name} ${told(values[i])}`).join("; ")}`;
    const bar = (value, i) => svg("g", {},
      svg("text", {class: "quiet", x: left - 10, y: (i + 0.5) * down, dy: "0.35em", "text-anchor": "end", "font-size": 12}, names[i]),
      svg("rect", {class: value === least ? "bar-message" : "cell", x: left, y: i * down + 4, width: peak ? (scale * value) / peak : 0, height: down - 8}),
      svg("text", {x: left + 8 + (peak ? (scale * value) / peak : 0), y: (i + 0.5) * down, dy: "0.35em", "font-size": 12}, told(value)));
    return el("div", {class: "card"}, el("h3", {}, title), svg("svg", {viewBox: `0 0 ${wide} ${names.length * down}`, role: "img", "aria-labelledby": `${id}-${n}`},
      svg("title", {id: `${id}-${n}`}, words), ...values.map(bar)));
  });
  const heads = ["Way", "Tokens of a rank", "Wait forward", "Wait backward", "Sent by a rank", "Busiest link", "Fullest rank", "Predicted"];
  return el("div", {}, ...cards, el("div", {class: "card"}, table("All numbers", heads, figure.ways.map((way, i) => [names[i],
    way.tokens[0] === way.tokens[1] ? number(way.tokens[0]) : `${number(way.tokens[0])} to ${number(way.tokens[1])}`,
    ...way.wait, bytes(sum(way.sent_bytes)), bytes(way.link_bytes), bytes(way.memory_bytes), seconds(sum(way.seconds))]))));
}
