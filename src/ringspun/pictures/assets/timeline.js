// Time: what each rank does when, and what is on its links; all runs on one axis.
const BAR = 15, LANE = 7, ROW_GAP = 9, LEFT = 58;

function timelinePicture(figure, id) {
  const wide = wideness(), end = most(figure.runs.map(run => sum(run.seconds))), x = s => LEFT + ((wide - LEFT) * s) / (end || 1);
  return el("div", {}, ...figure.runs.map((run, n) => {
    const {marks, height} = runMarks(figure, run, x), words = runWords(figure, run);
    return el("div", {class: "card"}, el("h3", {}, run.name[0].toUpperCase() + run.name.slice(1)), el("p", {}, words),
      svg("svg", {viewBox: `0 0 ${wide} ${height + 22}`, role: "img", "aria-labelledby": `${id}-${n}-name`},
        svg("title", {id: `${id}-${n}-name`}, words), ...axis(end, x, height), ...marks),
      legend([[swatch("bar-compute"), "computes"], [swatch("bar-wait"), "waits"], [swatch("bar-message"), "a message to another rank"]]),
      folded("As a table", () => table("Every span of every rank", ["Rank", "What", "Pass", "Step", "From", "Lasts"], spanRows(run))));
  }));
}

const PASS_NAMES = ["forward", "backward"];

function runWords(figure, run) {
  const spent = what => figure.ranks.map(rank => sum(run.spans.filter(s => s[0] === rank && s[3] === what).map(s => s[5] - s[4])));
  const computes = spent("compute"), mean = sum(computes) / Math.max(computes.length, 1), total = sum(run.seconds);
  const each = run.seconds.map((s, i) => `${PASS_NAMES[i]} ${seconds(s)}`).join(", ");
  return `${each[0].toUpperCase()}${each.slice(1)}. Ranks compute ${seconds(mean)} in the mean, ${number(Math.round((100 * mean) / (total || 1)))} % of the time; the busiest ${seconds(most(computes))}.`;
}

function axis(end, x, height) {
  const step = stride(end, narrow.matches ? 3 : 6), marks = end > 0 ? range(Math.floor(end / step) + 1).map(i => i * step) : [0];
  return marks.flatMap((s, i) => [svg("path", {class: "border", d: `M${x(s)} 0V${height}`}),
    svg("text", {class: "quiet", x: x(s), y: height + 15, "font-size": 11.5, "text-anchor": i ? "middle" : "start"}, s ? seconds(s) : "0")]);
}

// Of each rank a bar of what it does, and below it lanes of what it sends; messages at the same time lie in different lanes.
function runMarks(figure, run, x) {
  const marks = [], every = Math.ceil(figure.ranks.length / 40);
  const bar = (className, from, to, y, height, words) => svg("rect", {class: className, x: x(from), y,
    width: Math.max(x(to) - x(from) - 0.4, 0.4), height}, svg("title", {}, words));
  let y = 0;
  figure.ranks.forEach((rank, i) => {
    if (i % every === 0) marks.push(svg("text", {class: "quiet", x: LEFT - 8, y: y + BAR / 2, dy: "0.35em", "text-anchor": "end", "font-size": 12}, `rank ${rank}`));
    for (const [, direction, step, what, from, to] of run.spans.filter(s => s[0] === rank)) {
      marks.push(bar(`bar-${what}`, from, to, y, BAR, `rank ${rank}, ${PASS_NAMES[direction]}, ${step < 0 ? "before its first step" : `step ${step + 1}`}: ${what === "wait" ? "waits" : "computes"} ${seconds(to - from)}`));
    }
    const free = [];
    for (const [sender, receiver, direction, step, payload, source, size, from, to] of run.transfers.filter(t => t[0] === rank)) {
      const open = free.findIndex(until => until <= from), lane = open < 0 ? free.length : open;
      free[lane] = to;
      marks.push(bar("bar-message", from, to, y + BAR + 2 + lane * LANE, LANE - 2, `${PAYLOADS[payload]} ${source} from rank ${sender} to rank ${receiver}, ${PASS_NAMES[direction]}, step ${step + 1}: ${bytes(size)} in ${seconds(to - from)}`));
    }
    y += BAR + 2 + free.length * LANE + ROW_GAP;
  });
  return {marks, height: Math.max(y - ROW_GAP, 1)};
}

function spanRows(run) {
  return run.spans.map(([rank, direction, step, what, from, to]) =>
    [`rank ${rank}`, what === "wait" ? "waits" : "computes", PASS_NAMES[direction], step < 0 ? "–" : `${step + 1}`, seconds(from), seconds(to - from)]);
}
