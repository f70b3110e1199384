// What the tests look at in a page; the browser gives it to every page that it opens.
const one = selector => document.querySelector(selector), all = selector => [...document.querySelectorAll(selector)];
const slept = ms => new Promise(done => setTimeout(done, ms));

// Linear light of a CSS colour, painted, so that any notation will do.
function painted(colour) {
  const pen = Object.assign(document.createElement("canvas"), {width: 1, height: 1}).getContext("2d");
  pen.fillStyle = colour;
  pen.fillRect(0, 0, 1, 1);
  return [...pen.getImageData(0, 0, 1, 1).data];
}

function luminance(colour) {
  const linear = colour.slice(0, 3).map(x => x / 255).map(x => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

function ratio(a, b) {
  const [low, high] = [luminance(a), luminance(b)].sort((p, q) => p - q);
  return (high + 0.05) / (low + 0.05);
}

function ground(element) {
  for (let at = element; at; at = at.parentElement) {
    const colour = painted(getComputedStyle(at).backgroundColor);
    if (colour[3] === 255) return colour;
  }
  return [255, 255, 255, 255];
}

window.look = {
  step: () => Number(one("input[type=range]").value),

  // Of each tile that can be seen: whether it is of this step, rank, step, kind, and its box q0, q1, k0, k1.
  tiles: () => all(".tile[data-step]").filter(tile => getComputedStyle(tile).visibility === "visible").map(tile => {
    const {x, y, width, height} = tile.getBBox(), {rank, step, kind} = tile.dataset;
    const box = [y, y + height, x, x + width].map(Math.round);
    return [tile.classList.contains("now"), Number(rank), Number(step), kind, ...box];
  }),

  state: () => ({
    held: all("[data-rank][data-block]").map(node => [Number(node.dataset.rank), Number(node.dataset.block)]),
    moves: all(".chip").map(({dataset: {from, to, block}, textContent}) => [from, to, block].map(Number).concat(textContent.split(" ")[0])),
    rows: all(".walk tbody tr").map(row => [...row.children].map(cell => cell.textContent)),
    said: one(".said").textContent,
    where: one("output").textContent,
  }),

  // From now until it stops playing: the steps shown, and what the live region was while it played or not.
  played: async () => {
    const steps = [], live = new Set();
    for (;;) {
      const playing = one("button.main").textContent === "Pause", step = look.step();
      if (steps.at(-1) !== step) steps.push(step);
      live.add(`${playing ? "playing" : "stopped"}: ${one(".said").getAttribute("aria-live")}`);
      if (!playing) return [steps, [...live].sort()];
      await slept(20);
    }
  },

  moves: async () => {
    const at = () => one(".chip").getAttribute("transform"), first = at();
    await slept(150);
    return first !== at();
  },

  opened: async () => {
    all("details").forEach(details => { details.open = true; });
    await slept(30);
  },

  contrasts: () => {
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
    while (walker.nextNode()) {
      const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement;
      if (!text || !element.getClientRects().length || ["SCRIPT", "STYLE", "title"].includes(element.tagName)) continue;
      const style = getComputedStyle(element), inside = element.classList.contains("on-block");
      const under = inside ? painted(getComputedStyle(element.parentNode.querySelector(".block")).fill) : ground(element);
      found.push([text.slice(0, 40), ratio(painted(element instanceof SVGElement ? style.fill : style.color), under)]);
    }
    return found;
  },

  controls: () => all("button, input, summary").map(element => element.getBoundingClientRect()).map(box => [box.width, box.height]),
  focused: () => (e => e.id || e.getAttribute("aria-label") || e.value || e.textContent)(document.activeElement),
  ids: () => all("[id]").map(element => element.id),
  referred: () => ["aria-labelledby", "aria-describedby", "for"].flatMap(name => all(`[${name}]`).map(e => e.getAttribute(name))),
};
