// Small hands for the document: find, make, and change without touching what stays the same.

/** @param {string} id @returns {HTMLElement} */
export const byId = (id) => {
  const found = document.getElementById(id);
  if (!found) throw new Error(`no element #${id}`);
  return found;
};

/**
 * A new element. Properties that the element has are set, others become attributes; `on` holds listeners.
 * @param {string} tag @param {Record<string, any>} [attributes] @param {...(Node|string)} children
 */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same in SVG. */
export function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else put(element, name, value);
  }
  element.append(...children);
  return element;
}

/** Sets an attribute where it differs; null and false remove it. */
export function put(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else {
    const text = value === true ? "" : String(value);
    if (element.getAttribute(name) !== text) element.setAttribute(name, text);
  }
}

/** Sets the text where it differs, in the text node that is there. */
export function say(element, text) {
  const node = element.firstChild;
  if (node && node === element.lastChild && node.nodeType === Node.TEXT_NODE) {
    if (node.data !== text) node.data = text;
  } else if (element.textContent !== text || element.children.length) element.textContent = text;
}

/**
 * Makes `parent` hold one child per item, keeping the children that are there.
 * @template T
 * @param {Element} parent @param {T[]} items
 * @param {() => Element} create @param {(child: any, item: T, index: number) => void} update
 */
export function each(parent, items, create, update) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  while (parent.children.length < items.length) parent.append(create());
  items.forEach((item, index) => update(parent.children[index], item, index));
}

/** Replaces the children. A button among them that had the focus gives it to the one in its place, else to the answer. */
export function replace(parent, ...children) {
  const buttons = () => [...parent.querySelectorAll("button")];
  const focused = buttons().indexOf(document.activeElement);
  parent.replaceChildren(...children);
  if (focused >= 0) (buttons()[focused] ?? byId("answer")).focus({ preventScroll: true });
}

/** Whether the reader asked for less movement. */
export const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
