import { randomInt } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';
import { eventData, SseSplitter } from '../core/sse.ts';
import type { BenchSettings } from './topology.ts';

/** What was seen of one request. */
export interface BenchSample {
  /** Until the first event with text. */
  readonly firstTokenMs: number;
  readonly totalMs: number;
  readonly inputTokens: number;
  readonly outputTokens: number;
}

/** What was seen of all of them. */
export interface BenchResult {
  readonly durationMs: number;
  readonly samples: readonly BenchSample[];
  /** One sentence for each request that failed. */
  readonly errors: readonly string[];
}

const WORDS = 'river stone garden winter music letter window bridge question answer paper engine server memory'.split(
  ' ',
);
const REQUEST_TIMEOUT_MS = 10 * 60 * 1000;

/** Sends streamed completions with random prompts to `url` and waits for all of them; `signal` ends it early. */
export async function runBench(url: string, bench: BenchSettings, signal: AbortSignal): Promise<BenchResult> {
  const model = await firstModel(url, signal);
  const start = performance.now();
  const settled = await Promise.allSettled(
    Array.from({ length: bench.prompts }, async (_, i) => {
      if (bench.rate > 0) await sleep((i * 1000) / bench.rate, undefined, { signal });
      return measure(url, model, bench, signal);
    }),
  );
  return {
    durationMs: performance.now() - start,
    samples: settled.flatMap((each) => (each.status === 'fulfilled' ? [each.value] : [])),
    errors: settled.flatMap((each) => (each.status === 'rejected' ? [messageOf(each.reason)] : [])),
  };
}

async function firstModel(url: string, signal: AbortSignal): Promise<string> {
  const reply = await fetch(`${url}/v1/models`, { signal: withTimeout(signal) });
  const body: unknown = await reply.json();
  const data = memberOf(body, 'data');
  const id = Array.isArray(data) ? memberOf(data[0], 'id') : undefined;
  if (typeof id !== 'string') throw new Error('the engines serve no model');
  return id;
}

async function measure(url: string, model: string, bench: BenchSettings, signal: AbortSignal): Promise<BenchSample> {
  const prompt = Array.from({ length: bench.inputWords }, () => WORDS[randomInt(WORDS.length)]).join(' ');
  const start = performance.now();
  const reply = await fetch(`${url}/v1/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({
      model,
      prompt,
      max_tokens: bench.outputTokens,
      ignore_eos: true,
      temperature: 0,
      stream: true,
      stream_options: { include_usage: true },
    }),
    signal: withTimeout(signal),
  });
  if (!reply.ok || reply.body === null)
    throw new Error(`status ${reply.status}: ${(await reply.text()).slice(0, 300)}`);
  let firstTokenMs: number | undefined;
  let usage: unknown;
  for await (const event of eventsOf(reply.body)) {
    const error = memberOf(event, 'error');
    if (error !== undefined) throw new Error(`error in the stream: ${JSON.stringify(error).slice(0, 300)}`);
    const choices = memberOf(event, 'choices');
    if (firstTokenMs === undefined && Array.isArray(choices) && choices.some((choice) => memberOf(choice, 'text')))
      firstTokenMs = performance.now() - start;
    usage = memberOf(event, 'usage') ?? usage;
  }
  const totalMs = performance.now() - start;
  return {
    firstTokenMs: firstTokenMs ?? totalMs,
    totalMs,
    inputTokens: countOf(usage, 'prompt_tokens'),
    outputTokens: countOf(usage, 'completion_tokens'),
  };
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

function memberOf(value: unknown, key: string): unknown {
  if (typeof value !== 'object' || value === null || !Object.hasOwn(value, key)) return undefined;
  const found: unknown = Reflect.get(value, key);
  return found ?? undefined;
}

function countOf(usage: unknown, key: string): number {
  const value = memberOf(usage, key);
  return typeof value === 'number' ? value : 0;
}

function messageOf(reason: unknown): string {
  if (!(reason instanceof Error)) return String(reason);
  return reason.cause instanceof Error ? `${reason.message}: ${reason.cause.message}` : reason.message;
}

function withTimeout(signal: AbortSignal): AbortSignal {
  return AbortSignal.any([signal, AbortSignal.timeout(REQUEST_TIMEOUT_MS)]);
}
