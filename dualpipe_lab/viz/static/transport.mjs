// The bar below a drawing: jump, step, play, scrub, speed; and the keys that do the same.

import { icon, iconButton, make } from "./dom.mjs";

export function transport(player, words) {
  const play = iconButton("play", "Play", () => player.toggle());
  play.classList.add("play");
  const scrub = make("input", { type: "range", min: 0, class: "scrub", "aria-label": words.scrub });
  scrub.addEventListener("input", () => {
    player.stop();
    player.seek(Number(scrub.value), "scrub");
  });
  scrub.addEventListener("keydown", (event) => {
    const direction = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    if (!direction) return; // the keys move from event to event, the pointer to any time
    event.preventDefault();
    player.step(direction);
  });
  const clock = make("output", { class: "clock" });
  const speed = make("button", { type: "button", class: "text speed", title: "Speed", onclick: () => {
    player.nextSpeed();
    update();
  } });
  const bar = make("div", { class: "bar", role: "group", "aria-label": "Playback" },
    make("span", { class: "buttons" },
      iconButton("first", "To the start", () => jump(player, 0)),
      iconButton("back", "Step back", () => player.step(-1)), play,
      iconButton("next", "Step", () => player.step(1)),
      iconButton("last", "To the end", () => jump(player, Infinity))),
    scrub, clock, speed);
  let wasPlaying = false;
  function update() {
    const { end, time, playing } = player;
    scrub.max = end;
    scrub.step = !player.glides && end <= 1000 && Number.isInteger(end) ? 1 : end / 1000;
    scrub.value = time;
    scrub.setAttribute("aria-valuetext", words.time(time));
    scrub.style.setProperty("--done", `${end ? (100 * time) / end : 0}%`);
    if (clock.textContent !== words.time(time)) clock.textContent = words.time(time);
    speed.textContent = `${player.speed}×`;
    speed.setAttribute("aria-label", `${player.speed}× speed`);
    if (wasPlaying === playing) return;
    wasPlaying = playing;
    play.replaceChildren(icon(playing ? "pause" : "play"));
    play.title = playing ? "Pause" : "Play";
    play.setAttribute("aria-label", play.title);
  }
  return { bar, update };
}

export function jump(player, time) {
  player.stop();
  player.seek(time, "step");
}

// The keys of a drawing that has the focus; returns whether it took the key.
export function handleKey(player, key) {
  const actions = {
    ArrowRight: () => player.step(1),
    ArrowLeft: () => player.step(-1),
    Home: () => jump(player, 0),
    End: () => jump(player, Infinity),
    " ": () => player.toggle(),
  };
  if (!actions[key]) return false;
  actions[key]();
  return true;
}
