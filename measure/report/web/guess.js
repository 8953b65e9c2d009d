// milliseconds before and after a stage in a comment would give its factor away
for (const part of document.querySelectorAll(".why p, .card pre"))
  part.innerHTML = part.innerHTML.replace(/[^.;(]*\d+ -&gt; \d+ ms[^.]*\./g, '<span class="secret">$&</span>');
const rows = [...document.querySelectorAll("a.row[data-stage]")];
const guess = document.getElementById("guess"), score = document.getElementById("score");
const isClose = (a, b) => Math.max(a / b, b / a) <= 1.25;

function show(row) {
  const of = document.getElementById(row.dataset.stage), [mine, real, predicted] =
    [parseFloat(row.querySelector("input").value.replace(",", ".")), +row.dataset.factor, +row.dataset.predicted];
  for (const part of [row, of]) part.classList.add("known");
  row.dataset.mine = mine > 0 ? mine : "";
  row.querySelector(".verdict").textContent = mine > 0 ? `you ${mine}: ${isClose(mine, real) ? "within 25%" : mine > real ? "too high" : "too low"}` : "";
  const asked = rows.filter(row => !row.closest("details:not([open])")), known = asked.filter(row => row.classList.contains("known"));
  const next = asked.find(row => !row.classList.contains("known"));
  if (next) return next.querySelector("input").focus();
  const mineRight = known.filter(row => row.dataset.mine && isClose(+row.dataset.mine, +row.dataset.factor)).length;
  const theirs = known.filter(row => isClose(+row.dataset.predicted, +row.dataset.factor)).length;
  score.textContent = `Within 25%: you ${mineRight} of ${known.length}, the prediction ${theirs}.`;
  document.body.classList.remove("guessing"); // everything may be seen now
  guess.setAttribute("aria-pressed", "false"); guess.textContent = "Guess again";
}
for (const row of rows) {
  row.querySelector("button").addEventListener("click", event => { event.preventDefault(); show(row); });
  row.querySelector("input").addEventListener("click", event => event.preventDefault());
  row.querySelector("input").addEventListener("keydown", event => { if (event.key === "Enter") { event.preventDefault(); show(row); } });
}
guess.addEventListener("click", () => {
  const on = document.body.classList.toggle("guessing");
  guess.setAttribute("aria-pressed", on); guess.textContent = on ? "Show everything" : "Guess first"; score.textContent = "";
  for (const part of document.querySelectorAll(".known")) part.classList.remove("known");
  for (const text of document.querySelectorAll(".verdict")) text.textContent = "";
  if (on) { for (const card of document.querySelectorAll(".card")) card.open = false; rows[0].querySelector("input").focus(); }
});
if (location.hash === "#guess-first") guess.click();

