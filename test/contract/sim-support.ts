import { isObject, type JsonObject } from '../../src/sim/json.ts';
import type { SimOptions } from '../../src/sim/options.ts';
import { type Sim, startSim } from '../../src/sim/start-sim.ts';

/** A reply as a client sees it; `json` is undefined for anything else. */
export interface Reply {
  readonly status: number;
  readonly headers: Headers;
  readonly text: string;
  readonly json: unknown;
}

const sims: Sim[] = [];

/** Starts an engine that `stopSims` ends. */
export async function sim(options: SimOptions = {}): Promise<Sim> {
  const started = await startSim(options);
  sims.push(started);
  return started;
}

/** Ends all engines of the test. */
export async function stopSims(): Promise<void> {
  await Promise.all(sims.splice(0).map((started) => started.close()));
}

/** Posts a body: text as it is, anything else as JSON. */
export async function post(
  target: Sim,
  path: string,
  body: unknown,
  init: { readonly id?: string; readonly signal?: AbortSignal } = {},
): Promise<Reply> {
  const response = await fetch(target.url + path, {
    method: 'POST',
    headers: {
      'content-type': 'application/json',
      ...(init.id === undefined ? {} : { 'x-request-id': init.id }),
    },
    body: typeof body === 'string' ? body : JSON.stringify(body),
    ...(init.signal === undefined ? {} : { signal: init.signal }),
  });
  const text = await response.text();
  let json: unknown;
  try {
    json = JSON.parse(text);
  } catch {
    json = undefined;
  }
  return { status: response.status, headers: response.headers, text, json };
}

/** Walks into JSON by keys and indexes; undefined where the way ends. */
export function at(value: unknown, ...path: readonly (string | number)[]): unknown {
  let here = value;
  for (const step of path) {
    if (Array.isArray(here) && typeof step === 'number') here = here[step];
    else if (isObject(here)) here = here[String(step)];
    else return undefined;
  }
  return here;
}

/** The object at a path; throws if there is none. */
export function objectAt(value: unknown, ...path: readonly (string | number)[]): JsonObject {
  const found = at(value, ...path);
  if (!isObject(found)) throw new Error(`no object at ${path.join('.')} of ${JSON.stringify(value)}`);
  return found;
}

/** `data:` texts of a stream. */
export function eventsOf(text: string): string[] {
  return text
    .split('\n\n')
    .filter((block) => block !== '')
    .map((block) => block.replace(/^data: /, ''));
}

/** Text of a whole or streamed reply, chat or completions. */
export function textOf(reply: Reply): string {
  const one = (value: unknown): string =>
    String(
      at(value, 'choices', 0, 'message', 'content') ??
        at(value, 'choices', 0, 'delta', 'content') ??
        at(value, 'choices', 0, 'text') ??
        '',
    );
  if (reply.json !== undefined) return one(reply.json);
  return eventsOf(reply.text)
    .filter((event) => event !== '[DONE]')
    .map((event) => one(JSON.parse(event)))
    .join('');
}

/** The flags of a prefill leg. */
export const prefillFlags = { do_remote_decode: true, do_remote_prefill: false } as const;

/** A chat body of one user message. */
export function chatBody(text: string, more: JsonObject = {}): JsonObject {
  return { model: 'sim-model', messages: [{ role: 'user', content: text }], max_tokens: 24, ...more };
}

/** Sends the prefill leg of a chat or completions body and gives the handle. */
export async function prefill(target: Sim, path: string, body: JsonObject, id = 'r'): Promise<JsonObject> {
  const leg = { ...body, max_tokens: 1, stream: false, kv_transfer_params: { ...prefillFlags } };
  const { stream_options: _unused, ...rest } = { stream_options: undefined, ...leg };
  const reply = await post(target, path, rest, { id });
  return objectAt(reply.json, 'kv_transfer_params');
}

/** Resolves when the condition holds; it is checked after every turn of the event loop. */
export async function until(condition: () => boolean): Promise<void> {
  for (let turn = 0; !condition(); turn += 1) {
    if (turn > 20_000) throw new Error('the condition never held');
    await new Promise((resolve) => setImmediate(resolve));
  }
}

/** `refused`, `reset`, or the status of a request. */
export async function outcome(request: Promise<Reply>): Promise<string | number> {
  try {
    return (await request).status;
  } catch (error) {
    const text = error instanceof Error ? `${error.message} ${String(error.cause)}` : String(error);
    if (text.includes('ECONNREFUSED')) return 'refused';
    return text.includes('ECONNRESET') || text.includes('other side closed') || text.includes('terminated')
      ? 'reset'
      : text;
  }
}
