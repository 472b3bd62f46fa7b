// Light or dark: the system's preference, until the reader chooses.

import { byId, put, say } from "./dom.js";

const preference = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (preference.matches ? "dark" : "light")) === "dark";

export function listenForTheme() {
  const button = byId("theme");
  const show = () => {
    say(button, isDark() ? "Light" : "Dark");
    put(button, "aria-label", isDark() ? "Light theme" : "Dark theme");
    dispatchEvent(new Event("themechange"));
  };
  button.addEventListener("click", () => {
    const next = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try {
      localStorage.setItem("trigrid.theme", next);
    } catch {
      // Storage may be forbidden: the choice holds until the page is left.
    }
    show();
  });
  preference.addEventListener("change", show);
  show();
}
