import type { Dispatcher } from 'undici';
import { eventData, SseSplitter } from '../core/sse.ts';
import { memberOf, numberOf, textOf } from './json.ts';

/** One streamed request. */
export interface Call {
  readonly url: string;
  readonly headers: Readonly<Record<string, string>>;
  readonly body: Readonly<Record<string, unknown>>;
  /** The longest that it may take. */
  readonly timeoutMs: number;
  readonly dispatcher: Dispatcher;
}

/** What was seen of one request; times are milliseconds. */
export interface Sample {
  /** When it was sent, by the clock of `performance.now()`. */
  readonly startMs: number;
  /** Until the first event with a token. */
  readonly firstTokenMs: number;
  /** Between the events with tokens. */
  readonly gapsMs: readonly number[];
  /** Until the last event with a token. */
  readonly totalMs: number;
  /** As the endpoint counts them; undefined where it does not tell. */
  readonly inputTokens: number | undefined;
  /** As the endpoint counts them, else the number of events with tokens. */
  readonly outputTokens: number;
  /** Tokens of the prompt that the endpoint had cached; undefined where it does not tell. */
  readonly cachedTokens: number | undefined;
  readonly text: string;
  /** What baton says of its plan, where it was asked. */
  readonly plan: string | undefined;
  /** One sentence; undefined when it succeeded. */
  readonly error: string | undefined;
}

const SHOWN_OF_A_REFUSAL = 300;

/** Sends a streamed request and reads its answer to the end; never rejects, what went wrong is in the sample. */
export async function send(call: Call, signal: AbortSignal): Promise<Sample> {
  const startMs = performance.now();
  const seen = new Reading(startMs);
  let plan: string | undefined;
  let error: string | undefined;
  try {
    const { origin, pathname, search } = new URL(call.url);
    const reply = await call.dispatcher.request({
      origin,
      path: pathname + search,
      method: 'POST',
      headers: { 'content-type': 'application/json', ...call.headers },
      body: JSON.stringify(call.body),
      signal: AbortSignal.any([signal, AbortSignal.timeout(call.timeoutMs)]),
    });
    const told = reply.headers['x-baton-plan'];
    plan = typeof told === 'string' ? told : undefined;
    if (reply.statusCode !== 200) {
      throw new Error(`status ${reply.statusCode}: ${(await reply.body.text()).slice(0, SHOWN_OF_A_REFUSAL)}`);
    }
    for await (const event of eventsOf(reply.body)) seen.take(event);
    if (seen.tokens === 0) throw new Error('the answer has no token');
  } catch (caught) {
    error = messageOf(caught);
  }
  return { startMs, ...seen.result(), plan, error };
}

/** What is wrong, in words, with what made it so. */
export function messageOf(reason: unknown): string {
  if (!(reason instanceof Error)) return String(reason);
  // A connection that fails on every address of a name has all of its reasons inside, and no message of its own.
  const inner = reason instanceof AggregateError ? reason.errors[0] : reason.cause;
  const parts = [reason.message, inner instanceof Error ? inner.message : ''];
  return parts.filter((part) => part !== '').join(': ');
}

/** What the events of one answer came to. */
class Reading {
  tokens = 0;
  readonly #startMs: number;
  readonly #gapsMs: number[] = [];
  #firstMs = 0;
  #lastMs = 0;
  #text = '';
  #usage: unknown;

  constructor(startMs: number) {
    this.#startMs = startMs;
  }

  take(event: unknown): void {
    const error = memberOf(event, 'error');
    if (error !== undefined) {
      throw new Error(`error in the stream: ${JSON.stringify(error).slice(0, SHOWN_OF_A_REFUSAL)}`);
    }
    this.#usage = memberOf(event, 'usage') ?? this.#usage;
    const choices = memberOf(event, 'choices');
    const choice: unknown = Array.isArray(choices) ? choices[0] : undefined;
    if (choice === undefined) return;
    const delta = memberOf(choice, 'delta');
    const text = textOf(choice, 'text') ?? textOf(delta, 'content') ?? '';
    const thought = textOf(delta, 'reasoning_content') ?? textOf(delta, 'reasoning') ?? '';
    // A chat begins with an event that names the role alone.
    if (text === '' && thought === '' && memberOf(delta, 'role') !== undefined) return;
    const sinceMs = performance.now() - this.#startMs;
    if (this.tokens === 0) this.#firstMs = sinceMs;
    else this.#gapsMs.push(sinceMs - this.#lastMs);
    this.#lastMs = sinceMs;
    this.tokens += 1;
    this.#text += text;
  }

  result() {
    return {
      firstTokenMs: this.#firstMs,
      gapsMs: this.#gapsMs,
      totalMs: this.#lastMs,
      inputTokens: numberOf(this.#usage, 'prompt_tokens'),
      outputTokens: numberOf(this.#usage, 'completion_tokens') ?? this.tokens,
      cachedTokens: numberOf(memberOf(this.#usage, 'prompt_tokens_details'), 'cached_tokens'),
      text: this.#text,
    };
  }
}

async function* eventsOf(body: AsyncIterable<Uint8Array>): AsyncGenerator<unknown> {
  const splitter = new SseSplitter();
  const decoder = new TextDecoder();
  for await (const chunk of body) {
    for (const event of splitter.push(chunk)) {
      const data = eventData(event);
      const text = data === undefined ? '[DONE]' : decoder.decode(data.text);
      if (text !== '[DONE]') yield JSON.parse(text);
    }
  }
}
