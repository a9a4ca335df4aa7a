// The data of the page, and what the reader has chosen: a step, a machine, a kernel. Views ask to be told of changes.

export const data = JSON.parse(document.getElementById("data").textContent);

const limits = data.engine.limits;
const longestPrompt = Math.min(limits.max_batch_tokens, limits.max_model_len);

export const bounds = {
  batch: Math.min(limits.max_sequences, limits.max_batch_tokens, limits.max_logit_rows),
  context: limits.max_model_len,
  tokens: longestPrompt,
};

export const chosen = {
  kind: "decode",
  batch: 1,
  context: Math.min(1024, limits.max_model_len),
  tokens: Math.min(512, longestPrompt),
  rates: structuredClone(data.rates),
  kernel: null,
};

const listeners = [];

export function onChange(listener) {
  listeners.push(listener);
}

export function change(patch) {
  Object.assign(chosen, patch);
  for (const listener of listeners) listener(patch);
}

// The numbers of the chosen step, by the symbols of cost expressions.
export function shape() {
  if (chosen.kind === "prefill") {
    const T = chosen.tokens;
    return { T, L: 1, R: 1, C: T, A: (T * (T + 1)) / 2 };
  }
  const { batch, context } = chosen;
  return { T: batch, L: batch, R: batch, C: batch * context, A: batch * context };
}

// The measured step of the chosen shape, if the profile has one.
export function measuredStep() {
  const wanted = shape();
  return data.profile?.steps.find(({ shape: s }) =>
    s.tokens === wanted.T && s.logit_rows === wanted.L && s.requests === wanted.R && s.context === wanted.C) ?? null;
}

// Choose the step that a measured one was, and the machine that was measured for it.
export function chooseMeasured(step) {
  const { shape: s } = step;
  const decode = s.tokens === s.requests;
  change({
    kind: decode ? "decode" : "prefill",
    ...(decode ? { batch: s.requests, context: s.context / s.requests } : { tokens: s.tokens }),
    rates: structuredClone(step.rates),
  });
}
