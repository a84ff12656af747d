// Keeps the progress of a bulk operation up to date; without it, "Look again" does.
const section = document.getElementById("dj-bulk");
const EVERY = 1000; // milliseconds; doubles after an error
const WORST = 30000;

async function look(pause) {
  let next = EVERY;
  if (!document.hidden) {
    try {
      const answer = await fetch(section.dataset.address, { headers: { Accept: "application/json" } });
      if (!answer.ok) throw new Error(answer.status);
      const progress = await answer.json();
      section.querySelector("[data-words]").textContent = progress.words;
      section.querySelector("[data-numbers]").textContent = progress.numbers;
      const bar = section.querySelector("progress");
      bar.max = progress.total;
      bar.value = progress.done;
      if (progress.state === "ended") {
        location.reload(); // shows the outcomes; an ended one is not looked at again
        return;
      }
    } catch {
      next = Math.min(pause * 2, WORST);
    }
  }
  setTimeout(() => look(next), next);
}

if (section && section.dataset.state !== "ended") setTimeout(() => look(EVERY), EVERY);
