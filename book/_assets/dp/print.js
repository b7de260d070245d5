// Paper is light: pages print in the light theme, whatever the screen shows.

{
  const root = document.documentElement;
  let onScreen;
  window.addEventListener("beforeprint", () => {
    onScreen = root.dataset.theme;
    root.dataset.theme = "light";
  });
  window.addEventListener("afterprint", () => {
    root.dataset.theme = onScreen;
  });
}
