const button = document.getElementById("theme");
const preference = window.matchMedia("(prefers-color-scheme: dark)");
const show = (dark) => {
  button.setAttribute("aria-pressed", String(dark));
  button.textContent = dark ? "Light" : "Dark";
};
const isDark = () => (document.documentElement.dataset.theme || (preference.matches ? "dark" : "light")) === "dark";
show(isDark());
preference.addEventListener("change", () => show(isDark()));
button.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  show(isDark());
});
