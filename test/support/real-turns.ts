import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect } from 'vitest';
import { type BatonProcess, startBatonProcess } from './baton-process.ts';
import type { RealEngines } from './real-engines.ts';

/** Name of the model that all engines serve. */
export const REAL_MODEL = process.env['BATON_REAL_MODEL'] ?? 'tiny';

export interface Message {
  readonly role: string;
  readonly content: string | null | readonly Readonly<Record<string, unknown>>[];
  readonly tool_calls?: unknown;
  readonly tool_call_id?: string;
}

export const said = (role: string, content: string): Message => ({ role, content });

/** A chat of which every engine with the same weights gives the same `output` tokens. */
export function chatBody(messages: readonly Message[], output: number) {
  return { model: REAL_MODEL, messages, max_tokens: output, temperature: 0, ignore_eos: true };
}

/** A turn that was answered right, and what the engines did for it. */
export interface RealTurn {
  readonly text: string;
  /** The tokens of prompt and reply, as the plain instance tells them. */
  readonly promptIds: readonly number[];
  readonly replyIds: readonly number[];
  readonly numbers: TurnNumbers;
}

/** Outcome and matched tokens as baton says; prompt tokens of the prefill pool by where their KV came from. */
interface TurnNumbers {
  readonly outcome: string;
  readonly matched: number;
  readonly prompt: number;
  readonly pulled: number;
  readonly cached: number;
  readonly computed: number;
}

/** Sends a chat through baton, with `extra` members, and to the plain instance without: the answers must be equal. */
export async function compareTurn(
  engines: RealEngines,
  baton: BatonProcess,
  body: ReturnType<typeof chatBody>,
  extra: Readonly<Record<string, unknown>>,
): Promise<RealTurn> {
  const before = await prefillTokens(engines);
  const reply = await post(`${baton.url}/v1/chat/completions`, { ...body, ...extra });
  const after = await prefillTokens(engines);
  expect(reply.status, reply.text).toBe(200);
  const plain = await post(`${engines.plain}/v1/chat/completions`, { ...body, return_token_ids: true });
  expect(textOf(reply.text)).toBe(textOf(plain.text));
  expect(reply.text).not.toMatch(/remote_block_ids|"token_ids":\[|"prompt_token_ids":\[/);
  const { prompt_token_ids: promptIds, choices } = JSON.parse(plain.text);
  const plan = new Map((reply.plan ?? '').split('; ').map((part) => part.split('=') as [string, string]));
  const numbers = {
    outcome: plan.get('outcome') ?? '',
    matched: Number(plan.get('matched') ?? 0),
    prompt: promptIds.length,
    pulled: after.external_kv_transfer - before.external_kv_transfer,
    cached: after.local_cache_hit - before.local_cache_hit,
    computed: after.local_compute - before.local_compute,
  };
  return { text: textOf(reply.text), promptIds, replyIds: choices[0].token_ids, numbers };
}

/** Prompt tokens of all prefill instances together. */
export async function prefillTokens(engines: RealEngines): Promise<PromptTokens> {
  const all = await Promise.all(engines.prefill.map(promptTokens));
  const sum = (key: keyof PromptTokens) => all.reduce((total, one) => total + one[key], 0);
  return {
    local_compute: sum('local_compute'),
    local_cache_hit: sum('local_cache_hit'),
    external_kv_transfer: sum('external_kv_transfer'),
  };
}

interface PromptTokens {
  readonly local_compute: number;
  readonly local_cache_hit: number;
  readonly external_kv_transfer: number;
}

/** baton in front of real engines, with a file of settings that can be changed. */
export interface RealBaton extends BatonProcess {
  /** Puts other settings beside the pools' into the file and has it read. */
  readonly configure: (yaml: string) => void;
}

/** Starts baton with `yaml` in its file; resolves when every engine is ready. */
export async function startRealBaton(
  engines: RealEngines,
  flags: readonly string[] = [],
  yaml = '',
): Promise<RealBaton> {
  const folder = mkdtempSync(join(tmpdir(), 'baton-real-'));
  const file = join(folder, 'baton.yaml');
  const pools = `pools: {decode: {decoder_ttl: ${engines.decoderTtl}}, prefill: {kv_lease: 60s}}\n`;
  const write = (more: string) => writeFileSync(file, `${pools}timeouts: {tokenize: 5s, store: 1s}\n${more}`);
  write(yaml);
  const urls = ['--prefill', ...engines.prefill, '--decode', engines.decode];
  try {
    const baton = await startBatonProcess(['--config', file, ...urls, ...flags]);
    await untilReady(baton);
    return {
      ...baton,
      configure(more) {
        write(more);
        baton.signal('SIGHUP');
      },
      async [Symbol.asyncDispose]() {
        await baton[Symbol.asyncDispose]();
        rmSync(folder, { recursive: true });
      },
    };
  } catch (error) {
    rmSync(folder, { recursive: true });
    throw error;
  }
}

export async function untilReady(baton: BatonProcess): Promise<void> {
  const ready = async () => {
    const health = (await (await fetch(`${baton.url}/health`)).json()) as { instances: Record<string, number> };
    return Object.keys(health.instances).every((state) => state === 'ready');
  };
  const end = Date.now() + 60_000;
  while (!(await ready())) {
    if (Date.now() > end) throw new Error(`not ready:\n${baton.lines.join('\n')}`);
    await new Promise((next) => setTimeout(next, 200));
  }
}

export function words(count: number, seed: number): string {
  const list = 'relay baton prefill decode cache block token router engine stream history tenant claim'.split(' ');
  let state = seed * 7919 + 1;
  return Array.from({ length: count }, () => {
    state = (state * 1103515245 + 12345) % 2147483648;
    return list[Math.floor(state / 65536) % list.length];
  }).join(' ');
}

export async function post(url: string, body: unknown): Promise<{ status: number; text: string; plan: string | null }> {
  const reply = await fetch(url, {
    method: 'POST',
    headers: { 'content-type': 'application/json', 'x-baton-debug': '1' },
    body: JSON.stringify(body),
  });
  return { status: reply.status, text: await reply.text(), plan: reply.headers.get('x-baton-plan') };
}

export function textOf(raw: string): string {
  if (!raw.startsWith('data:')) return String(JSON.parse(raw).choices[0].message.content);
  expect(raw.endsWith('data: [DONE]\n\n')).toBe(true);
  return raw
    .split('\n\n')
    .filter((event) => event.startsWith('data: {'))
    .map((event) => JSON.parse(event.slice(6)).choices[0]?.delta?.content ?? '')
    .join('');
}

export async function metricsOf(base: string): Promise<string> {
  return (await fetch(`${base}/metrics`)).text();
}

export function metric(text: string, name: string): number {
  return Number(
    text
      .split('\n')
      .find((line) => line.startsWith(`${name} `))
      ?.split(' ')[1] ?? 0,
  );
}

async function promptTokens(base: string): Promise<PromptTokens> {
  const text = await metricsOf(base);
  const read = (source: string) =>
    [
      ...text.matchAll(
        new RegExp(`^vllm:prompt_tokens_by_source_total\\{[^}]*source="${source}"[^}]*\\} (\\S+)$`, 'gm'),
      ),
    ]
      .map((match) => Number(match[1]))
      .reduce((sum, value) => sum + value, 0);
  return {
    local_compute: read('local_compute'),
    local_cache_hit: read('local_cache_hit'),
    external_kv_transfer: read('external_kv_transfer'),
  };
}

export async function blockSizeOf(base: string): Promise<number> {
  return Number(/cache_config_info\{[^}]*[{,]block_size="(\d+)"/.exec(await metricsOf(base))?.[1]);
}

export async function usageOf(base: string): Promise<number> {
  return Number(/^vllm:kv_cache_usage_perc\{[^}]*\} (\S+)$/m.exec(await metricsOf(base))?.[1] ?? 0);
}
