import type { FaultRule } from '../../src/sim/faults.ts';

/** Random numbers of one request, from the seed of the run and the request's number: order and timing do not matter. */
export class Draw {
  readonly #random: () => number;

  constructor(random: () => number) {
    this.#random = random;
  }

  /** True with the given probability. */
  chance(probability: number): boolean {
    return this.#random() < probability;
  }

  /** An integer of `low` to `high`, both included. */
  int(low: number, high: number): number {
    return low + Math.floor(this.#random() * (high - low + 1));
  }

  /** One element. */
  pick<T>(items: readonly [T, ...T[]]): T {
    return items[this.int(0, items.length - 1)] ?? items[0];
  }
}

/** One client request. */
export interface Ask {
  readonly path: '/v1/chat/completions' | '/v1/completions';
  readonly body: Readonly<Record<string, unknown>>;
}

const WORDS =
  'the baton passes from hand to hand while both of them run and nobody may look back or let it fall '.split(' ');
const WINDOW = 700;

/** Texts with long common prefixes, so that prefix caches hit and blocks of several requests are the same. */
function drawText(draw: Draw): string {
  const stem = draw.int(0, 5);
  const size = draw.pick([draw.int(0, 8), draw.int(1, 60), draw.int(1, 300), draw.int(200, 550)]);
  let text = '';
  for (let i = 0; text.length < size; i += 1) text += `${WORDS[(i * (stem + 1) + stem) % WORDS.length]} `;
  text = text.slice(0, size);
  return draw.chance(0.4) ? `${text}${draw.int(0, 1e9).toString(36)}` : text;
}

const TOOLS = ['weather', 'time'].map((name) => ({
  type: 'function',
  function: { name, parameters: { type: 'object', properties: { city: { type: 'string' } } } },
}));

/** Draws a request; a small share of them is refused by every engine. */
export function drawAsk(draw: Draw, model: string): Ask {
  const stream = draw.chance(0.5);
  const common = {
    model,
    stream,
    ...(stream && draw.chance(0.5) ? { stream_options: { include_usage: true } } : {}),
    ...(draw.chance(0.9) ? { max_tokens: draw.pick([1, 1, draw.int(2, 8), draw.int(5, 40), draw.int(30, 90)]) } : {}),
    ...(draw.chance(0.3) ? { temperature: draw.pick([0, 0.7, 1]) } : {}),
    ...(draw.chance(0.2) ? { seed: draw.int(0, 5) } : {}),
    ...(draw.chance(0.2) ? { stop: draw.pick<unknown>(['e', ['th', 'q'], ['\n']]) } : {}),
    ...(draw.chance(0.1) ? { n: 2 } : {}),
    ...(draw.chance(0.1) ? { ignore_eos: true } : {}),
    ...(draw.chance(0.05) ? { cache_salt: draw.pick(['a', 'b']) } : {}),
    ...(draw.chance(0.03) ? { conversation_id: 'c1' } : {}),
    ...(draw.chance(0.02) ? { temperature: -1 } : {}),
  };
  const text = draw.chance(0.02) ? 'x'.repeat(WINDOW + draw.int(0, 50)) : drawText(draw);
  if (draw.chance(0.4)) {
    const ids = Array.from(text.slice(0, 200), (letter) => letter.charCodeAt(0) % 128);
    const prompt = draw.pick<unknown>([text, text, [text], ids, [text, 'and'], text === '' ? 'x' : text]);
    const echo = draw.chance(0.05) ? { echo: true } : {};
    return { path: '/v1/completions', body: { ...common, prompt, ...echo } };
  }
  const messages: unknown[] = draw.chance(0.3) ? [{ role: 'system', content: WORDS.slice(0, 12).join(' ') }] : [];
  for (let i = draw.int(0, 1); i > 0; i -= 1) {
    messages.push({ role: 'user', content: WORDS.slice(0, 9).join(' ') }, { role: 'assistant', content: 'Yes.' });
  }
  messages.push({ role: 'user', content: text });
  const tools = draw.chance(0.1) ? { tools: TOOLS, tool_choice: draw.pick(['auto', 'required', 'none']) } : {};
  const logprobs = draw.chance(0.05) ? { logprobs: true, top_logprobs: 2 } : {};
  return { path: '/v1/chat/completions', body: { ...common, messages, ...tools, ...logprobs } };
}

/** Members that make a handle unusable: each of them kills, hangs or misleads an engine that is sent it. */
export const MALFORMED: readonly [FaultRule['patch'], ...FaultRule['patch'][]] = [
  { remote_block_ids: [1, 2, 3] },
  { remote_block_ids: null },
  { remote_block_ids: [] },
  { remote_block_ids: [[]] },
  { remote_block_ids: [['1']] },
  { remote_block_ids: [[1], [2]] },
  { remote_num_tokens: 100_000 },
  { remote_num_tokens: '12' },
  { remote_engine_id: undefined },
  { remote_engine_id: null },
  { remote_request_id: undefined },
  { remote_request_id: 5 },
  { remote_host: undefined },
  { remote_host: null },
  { remote_port: undefined },
  { remote_port: 'x' },
  { do_remote_decode: true },
  { do_remote_prefill: false },
  { do_remote_prefill: false, do_remote_decode: true },
  { transfer_mode: 'push' },
  { dcp_size: 2 },
  { pp_size: 2 },
  { tp_size: 'x' },
];

/** Kinds after which a request still has to succeed. */
const HARMLESS = new Set(['no_handle', 'patch_handle', 'slow', 'stall']);

/** Whether a request that only met such faults must be answered as if nothing had been. */
export function isHarmless({ kind }: FaultRule, { body }: Ask): boolean {
  // Without its end marker it cannot be known whether all of several choices have begun.
  const severalChoices = body['n'] === 2 || (Array.isArray(body['prompt']) && body['prompt'].length > 1);
  return HARMLESS.has(kind) || (kind === 'no_done' && !severalChoices);
}

/** Draws a fault for one leg of the requests with a model name. */
export function drawFault(draw: Draw, leg: 'prefill' | 'decode' | 'plain', model: string): FaultRule {
  const count = draw.int(1, 2);
  const common = { leg, model, count };
  const status = { ...common, kind: 'status', status: draw.pick([400, 429, 500, 500, 502, 503]) } as const;
  const stall = { ...common, kind: 'stall', ms: draw.int(10, 200) } as const;
  const slow = { ...common, kind: 'slow', ms: draw.int(1, 8) } as const;
  const reset = { ...common, kind: 'reset' } as const;
  const hang = { ...common, count: 1, kind: 'hang' } as const;
  if (draw.chance(0.01)) return hang;
  if (leg === 'prefill') {
    const patch = draw.pick(MALFORMED) ?? {};
    const patched = { ...common, kind: 'patch_handle', patch } as const;
    return draw.pick<FaultRule>([
      status,
      stall,
      slow,
      reset,
      patched,
      patched,
      patched,
      { ...common, kind: 'no_handle' },
    ]);
  }
  const events = draw.int(0, 6);
  return draw.pick<FaultRule>([
    status,
    stall,
    slow,
    reset,
    { ...common, kind: 'reset_stream', events },
    { ...common, kind: 'end_stream', events },
    { ...common, kind: 'error_event', events },
    { ...common, kind: 'no_done' },
    ...(leg === 'decode' ? [{ ...common, kind: 'load_failure' } as const] : []),
  ]);
}
