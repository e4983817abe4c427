import type { Problem } from '../config/problem.ts';
import {
  bad,
  choiceParser,
  countParser,
  MAX_COUNT,
  numberParser,
  ok,
  parseText,
  type ValueParser,
} from '../config/values.ts';
import { FlagReader, parseBaseUrl, parseHeaders } from './flag-reader.ts';
import type { BenchFlagValues } from './flags.ts';

/** Everything that `baton bench multi-turn` was told, defaults filled in. */
export interface MultiTurnSettings {
  readonly input: string;
  readonly output: string | undefined;
  readonly statsFile: string | undefined;
  readonly baseUrl: string;
  readonly model: string | undefined;
  readonly headers: Readonly<Record<string, string>>;
  readonly seed: number;
  readonly clients: number;
  /** Of all clients together. */
  readonly activeConversations: number;
  /** Of all clients together; undefined: as many as there are. */
  readonly maxRequests: number | undefined;
  readonly warmupStep: boolean;
  /** Messages of a conversation, answers included. */
  readonly maxTurns: number | undefined;
  readonly earlyStop: boolean;
  /** 0: as the answer of the input; undefined: none. */
  readonly maxTokens: number | undefined;
  /** Requests a second of each client; 0: one after the other. */
  readonly rate: number;
  readonly maxRetries: number;
  readonly sampling: 'round_robin' | 'random';
  readonly verifyOutput: boolean;
  readonly timeoutMs: number;
  readonly sendConversationId: boolean;
  /** Parts of the samples that are left out at the start, 0 to 1. */
  readonly warmups: readonly number[];
}

/** The settings, or every mistake that was found. */
export type MultiTurnSettingsResult =
  | { readonly kind: 'ok'; readonly settings: MultiTurnSettings }
  | { readonly kind: 'error'; readonly problems: readonly Problem[] };

const MANY = 1_000_000;

/** Reads flags over the defaults, which are those of vLLM's client; `env` gives a key and the number of retries. */
export function readMultiTurnSettings(
  values: BenchFlagValues,
  env: Readonly<Record<string, string | undefined>>,
): MultiTurnSettingsResult {
  const flags = new FlagReader(values);
  const clients = flags.read('num-clients', countParser(1, 10_000), 1);
  const apiKey = flags.read('api-key', parseText, env['OPENAI_API_KEY']);
  const maxTokens = flags.read('limit-max-tokens', parseLimit, 0);
  const minTokens = flags.read('limit-min-tokens', parseLimit, 0);
  const retries = countParser(0, 1000);
  const byVariable = retries(env['MULTITURN_BENCH_MAX_RETRIES'] ?? 0);
  const settings: MultiTurnSettings = {
    input: flags.read('input-file', parseText, ''),
    output: flags.read('output-file', parseText, undefined),
    statsFile: flags.read('stats-json-output', parseText, undefined),
    baseUrl: flags.read('url', parseBaseUrl, 'http://localhost:8000'),
    model: flags.read('served-model-name', parseText, flags.read('model', parseText, undefined)),
    headers: {
      ...flags.read('header', parseHeaders, {}),
      ...(apiKey === undefined ? {} : { authorization: `Bearer ${apiKey}` }),
    },
    seed: flags.read('seed', countParser(0, MAX_COUNT), 0),
    clients,
    activeConversations: flags.read('max-active-conversations', countParser(1, MANY), clients),
    maxRequests: flags.read('max-num-requests', countParser(1, MAX_COUNT), undefined),
    warmupStep: flags.isSet('warmup-step'),
    maxTurns: flags.read('max-turns', countParser(1, MANY), undefined),
    earlyStop: !flags.isSet('no-early-stop'),
    maxTokens: maxTokens < 0 ? undefined : maxTokens,
    rate: flags.read('request-rate', numberParser(0, MANY), 0),
    maxRetries: flags.read('max-retries', retries, byVariable.kind === 'ok' ? byVariable.value : 0),
    sampling: flags.read('conversation-sampling', choiceParser(['round_robin', 'random']), 'round_robin'),
    verifyOutput: flags.isSet('verify-output'),
    timeoutMs: flags.read('request-timeout-sec', countParser(1, MANY), 120) * 1000,
    sendConversationId: flags.isSet('send-conversation-id'),
    warmups: flags.read('warmup-percentages', parsePercentages, [0]),
  };
  if (settings.input === '')
    flags.complain('input-file', 'is needed: a JSON file with conversations, or how to make some');
  if (minTokens > 0 !== maxTokens > 0) flags.complain('limit-min-tokens', 'goes together with --limit-max-tokens');
  else if (minTokens > maxTokens) flags.complain('limit-min-tokens', 'is larger than --limit-max-tokens');
  if (settings.activeConversations < clients)
    flags.complain('max-active-conversations', 'is smaller than --num-clients');
  if ((settings.maxRequests ?? clients) < clients) flags.complain('max-num-requests', 'is smaller than --num-clients');
  if (settings.warmupStep && flags.isSet('warmup-percentages')) {
    flags.complain('warmup-percentages', 'cannot be combined with --warmup-step');
  }
  return flags.problems.length > 0 ? { kind: 'error', problems: flags.problems } : { kind: 'ok', settings };
}

const parseLimit: ValueParser<number> = (raw) => {
  const value = Number(raw);
  return Number.isSafeInteger(value) ? ok(value) : bad(`expected a whole number, got ${String(raw)}`);
};

const parsePercentages: ValueParser<readonly number[]> = (raw) => {
  const shares: number[] = [];
  for (const word of String(raw).split(',')) {
    const parsed = numberParser(0, 100)(word.trim().replace(/%$/, ''));
    if (parsed.kind === 'bad') return bad(`expected percentages like 0%,25%, got ${word}`);
    shares.push(parsed.value / 100);
  }
  return ok(shares);
};
