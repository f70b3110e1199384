// Every figure of the file, in order.
const PICTURES = {mask: maskPicture, layout: layoutPicture, schedule: schedulePicture, balance: balancePicture, memory: memoryPicture, timeline: timelinePicture, compare: comparePicture, run: runPicture, retrieval: retrievalPicture, loss: lossPicture};
const HEADINGS = {mask: "The mask", layout: "The layout", schedule: "The walk", balance: "The balance", memory: "The memory", timeline: "The time", compare: "Ways side by side", run: "Stages and curves", retrieval: "What is found", loss: "The loss by position"};
const main = document.getElementById("figures"), different = new Set(data.figures.map(figure => figure.words)).size > 1;

function draw() {
  main.replaceChildren(...data.figures.map((figure, i) => {
    const id = `f${i}`;
    return el("section", {"aria-labelledby": `${id}-heading`, "data-figure": figure.figure},
      el("h2", {id: `${id}-heading`}, HEADINGS[figure.figure]),
      different ? el("p", {class: "soft"}, figure.words) : null,
      ...notes(figure), PICTURES[figure.figure](figure, id));
  }));
}
draw();
narrow.addEventListener("change", draw); // letters of pictures have another size then
document.getElementById("words").textContent = different ? "" : data.figures[0]?.words ?? "";

// Keys that nobody else took move the first walk.
document.addEventListener("keydown", event => {
  if (event.target === document.body || event.target === document.documentElement) main.querySelector(".walk")?.steer(event);
});
