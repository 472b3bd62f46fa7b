// What the categories are called and in which order they are stacked; their colours are in the style sheet, one class each.

/** Bottom to top. */
export const CATEGORIES = [
  ["weights", "weights"],
  ["master", "master weights"],
  ["gradients", "gradients"],
  ["optimizer", "optimizer moments"],
  ["activations", "activations"],
  ["logits", "logits"],
  ["transients", "transients of a block"],
  ["buffers", "receive buffers"],
  ["workspace", "kernel workspace"],
  ["allocator", "reserved, not allocated"],
  ["runtime", "context and communicators"],
];

/** Kinds of an action, by the letter that schedules write. */
export const KINDS = { F: "forward", B: "backward", I: "input backward", W: "weight backward" };
