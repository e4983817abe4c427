import type { Api } from '../core/facts.ts';
import { findMember, type ScannedObject, spliceObject } from '../core/json-scan.ts';
import { tokenizeDrops } from '../core/prompt-members.ts';
import type { EngineClient } from '../engine/client.ts';
import { runWholeLeg } from './leg.ts';

/** An engine that is asked. */
export interface Tokenizer {
  readonly url: string;
  readonly headers: Readonly<Record<string, string>>;
}

/** What is needed to learn a prompt's token ids. */
export interface TokenizeRequest {
  readonly api: Api;
  readonly body: Uint8Array;
  readonly scan: ScannedObject;
  /** Milliseconds; 0: no limit. */
  readonly timeoutMs: number;
  readonly signal: AbortSignal;
}

/** A prompt as an engine sees it. */
export interface TokenizedPrompt {
  readonly ids: readonly number[];
  /** The engine's context window; undefined where it was not asked. */
  readonly maxModelLen: number | undefined;
}

/**
 * The token ids of a request's prompt: as the client sent them, or as an engine's `/tokenize` renders them. Empty where
 * they cannot be learnt in time; then nothing is proven and nothing is reused. The next engine is asked when one has no
 * answer, or has used up its part of the time; whoever answers first is believed.
 */
export function tokenizePrompt(
  engines: EngineClient,
  targets: readonly Tokenizer[],
  request: TokenizeRequest,
): Promise<readonly number[]> {
  const { timeoutMs } = request;
  return new Promise((resolve, reject) => {
    const over = new AbortController();
    const signal = AbortSignal.any([request.signal, over.signal]);
    const waiting = [...targets];
    let open = 0;
    let patience: NodeJS.Timeout | undefined;
    const end = (ids: readonly number[]) => {
      clearTimeout(patience);
      clearTimeout(limit);
      // Nobody hears of it where all have answered, and making the reason costs more than the rest of this.
      if (open > 0) over.abort();
      resolve(ids);
    };
    const limit = timeoutMs > 0 ? setTimeout(() => end([]), timeoutMs) : undefined;
    const askNext = () => {
      clearTimeout(patience);
      const target = waiting.shift();
      if (target === undefined) {
        if (open === 0) end([]);
        return;
      }
      open += 1;
      if (timeoutMs > 0) patience = setTimeout(askNext, timeoutMs / targets.length);
      tokenize(engines, target, { ...request, timeoutMs: 0, signal }).then((found) => {
        open -= 1;
        if (found === undefined) askNext();
        else end(found.ids);
      }, reject);
    };
    askNext();
  });
}

/** Asks one engine, with what else it told; undefined where nothing can be learnt in time. */
export async function tokenize(
  engines: EngineClient,
  { url, headers }: Tokenizer,
  request: TokenizeRequest,
): Promise<TokenizedPrompt | undefined> {
  const { api, body, scan, timeoutMs, signal } = request;
  const given = api === 'completions' ? idsOf(body, scan) : undefined;
  if (given !== undefined) return { ids: given, maxModelLen: undefined };
  const result = await runWholeLeg(
    engines,
    {
      url,
      method: 'POST',
      path: '/tokenize',
      headers: { ...headers, 'content-type': 'application/json', 'accept-encoding': 'identity' },
      body: spliceObject(body, scan, { set: new Map(), drop: tokenizeDrops(api, scan) }),
    },
    { timeoutMs, signal, now: () => 0 },
  );
  if (result.kind !== 'reply' || result.status !== 200) return undefined;
  return readTokens(new TextDecoder().decode(result.body));
}

/** A completions prompt that is one list of token ids already. */
function idsOf(body: Uint8Array, scan: ScannedObject): readonly number[] | undefined {
  const prompt = findMember(scan, 'prompt');
  if (prompt?.type !== 'array') return undefined;
  const value: unknown = JSON.parse(new TextDecoder().decode(body.subarray(prompt.valueStart, prompt.valueEnd)));
  // One prompt in a list of its own is written with the brackets of a list; /tokenize takes only the bare form.
  const ids: unknown = Array.isArray(value) && value.length === 1 && Array.isArray(value[0]) ? value[0] : value;
  return isIdList(ids) ? ids : [];
}

function readTokens(text: string): TokenizedPrompt | undefined {
  try {
    const reply: unknown = JSON.parse(text);
    if (typeof reply !== 'object' || reply === null || !('tokens' in reply) || !isIdList(reply.tokens))
      return undefined;
    const window = 'max_model_len' in reply ? reply.max_model_len : undefined;
    return { ids: reply.tokens, maxModelLen: typeof window === 'number' && window > 0 ? window : undefined };
  } catch {
    return undefined;
  }
}

function isIdList(value: unknown): value is readonly number[] {
  return Array.isArray(value) && value.every((id) => Number.isInteger(id) && id >= 0 && id <= 0xffff_ffff);
}
