// Keeps the dashboard up to date: asks every 2 s with the ETag of what is shown, not at all while
// the page is hidden or paused, and less and less often while nobody answers. Without it the page
// is as true as it was when it was loaded.
const EVERY = 2000; // milliseconds
const WORST = 60000;
const PATIENCE = 15000;

const board = document.querySelector(".dj-board");
const button = board.querySelector("[data-pause]");
const trouble = board.querySelector("[data-trouble]");
let etag = board.dataset.etag;
let pause = EVERY;
let timer = 0;
let asking = false;

const paused = () => button.getAttribute("aria-pressed") === "true";

// Parts are replaced only where they differ: open tables stay open, the focus stays where it is.
function show(text) {
  const news = new DOMParser().parseFromString(text, "text/html");
  for (const old of board.querySelectorAll("[data-part]")) {
    const part = news.getElementById(old.id);
    if (part === null || part.isEqualNode(old)) continue;
    const focused = old.contains(document.activeElement) ? document.activeElement.id : "";
    const fresh = document.importNode(part, true);
    if (old.hasAttribute("aria-live")) {
      // A live region must stay the same element, or nothing is read out.
      old.replaceChildren(...fresh.childNodes);
    } else {
      old.replaceWith(fresh);
    }
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  }
}

async function ask() {
  const answer = await fetch(board.dataset.address, {
    headers: { "If-None-Match": etag },
    cache: "no-store",
    signal: AbortSignal.timeout(PATIENCE),
  });
  if (answer.redirected || answer.status === 403) return board.dispatchEvent(new Event("dj:out"));
  if (answer.status !== 304) {
    if (!answer.ok) throw new Error(String(answer.status));
    show(await answer.text());
    etag = answer.headers.get("ETag");
  }
  board.querySelector("[data-clock]").textContent = answer.headers.get("X-Dedupjobs-At");
}

async function look() {
  if (document.hidden || paused() || asking) return;
  asking = true;
  try {
    await ask();
    pause = EVERY;
    if (trouble.textContent === trouble.dataset.words) trouble.textContent = "";
  } catch {
    pause = Math.min(pause * 2, WORST);
    trouble.textContent = trouble.dataset.words;
  }
  asking = false;
  later(pause);
}

function later(milliseconds) {
  clearTimeout(timer);
  if (!document.hidden && !paused()) timer = setTimeout(look, milliseconds);
}

function press(state) {
  button.setAttribute("aria-pressed", String(state));
  button.querySelector("[data-sign]").textContent = state ? "▶" : "‖";
}

button.hidden = false;
button.addEventListener("click", () => {
  press(!paused());
  later(0);
});
document.addEventListener("visibilitychange", () => later(0));
board.addEventListener("dj:out", () => {
  trouble.textContent = trouble.dataset.login;
  press(true);
});
later(EVERY);
