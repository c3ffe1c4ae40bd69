const button = document.getElementById("theme");
const show = (dark) => {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  button.setAttribute("aria-pressed", String(dark));
  button.textContent = dark ? "Light" : "Dark";
};
const preference = window.matchMedia("(prefers-color-scheme: dark)");
show(preference.matches);
preference.addEventListener("change", (event) => show(event.matches));
button.addEventListener("click", () => show(document.documentElement.dataset.theme !== "dark"));
