// Buttons that copy the text of the element they name: <button data-copy="id">. Without scripts they do nothing, and
// the text can still be selected, so they appear only here.
document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const source = document.getElementById(button.dataset.copy);
  const before = button.dataset.label || (button.dataset.label = button.textContent);
  try {
    await navigator.clipboard.writeText(source.textContent.trim());
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(source);
    button.textContent = "Selected";
  }
  setTimeout(() => { button.textContent = before; }, 2000);
});
