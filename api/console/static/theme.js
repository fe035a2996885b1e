// Runs before the page is drawn: the theme that the person chose here, else the system's.
const chosenTheme = localStorage.getItem("leasehold-theme");
if (chosenTheme === "dark" || chosenTheme === "light") document.documentElement.dataset.theme = chosenTheme;
