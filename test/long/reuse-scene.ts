import type { FaultRule } from '../../src/sim/faults.ts';
import type { ModelConversation, ModelEntry, ModelKey, TurnFacts } from './reuse-model.ts';
import type { Substance } from './reuse-reply.ts';
import type { Head, TurnAsk, Voice } from './reuse-turns.ts';
import { adapterOf, tenantOf, type World, type WorldOptions } from './reuse-world.ts';

/** What the client saw of one request. */
export type Sent =
  | { readonly kind: 'left' }
  | { readonly kind: 'reply'; readonly status: number; readonly headers: Headers; readonly text: string };

/** A turn with the right answer. */
export interface Planned {
  readonly id: string;
  readonly ask: TurnAsk;
  readonly head: Head;
  readonly leaveAfterMs: number | undefined;
  readonly right: { readonly status: number; readonly substance: Substance | undefined; readonly text: string };
  readonly facts: TurnFacts;
}

/** A turn that is over. */
export interface Done extends Planned {
  readonly sent: Sent;
  readonly line: Readonly<Record<string, unknown>> | undefined;
  readonly outcome: string;
  readonly matched: number;
}

/** A line of a conversation that a worker keeps going. */
export interface Slot {
  readonly voice: Voice;
  before: Head;
  after: Head | undefined;
  wakeAt: number;
}

/** What happened to all turns of a world. */
export interface Tally {
  readonly outcomes: Record<string, number>;
  readonly ends: Record<'right' | 'refused' | 'failed' | 'broken' | 'left' | 'unheard', number>;
  /** Turns whose outcome was known beforehand. */
  exact: number;
  unsure: number;
  matched: number;
  seenEntries: number;
  /** Turns with pictures that may have left something: it is kept under their messages, where the model does not look. */
  media: number;
  /** Hits of turns that ran together: what one left the other may have taken before anybody saw it. */
  pairHits: number;
}

/** What no fault of an engine can lead to. */
export const NEVER = new Set(['miss_store_unavailable', 'miss_store_epoch']);
/** Of two turns at once, each may come first; nothing else can happen to either. */
export const TOGETHER = new Set([
  'none',
  'decode_local',
  'hit',
  'hit_cut',
  'miss_taken',
  'miss_mismatch',
  'miss_released',
  'miss_too_small',
  'miss_expired',
  'miss_never',
  'miss_unsupported',
  'miss_no_handle',
  'miss_unsupported_stream',
]);

/** A turn with pictures is found by its messages: of them the model says that the answer is right. */
export const WITH_MEDIA = new Set([...TOGETHER, 'miss_owner_gone', 'miss_disabled', 'miss_unverifiable']);

/** What surrounds the comparison of one turn, or of two at once. */
export interface Scene {
  readonly conversation: ModelConversation;
  readonly from: number;
  readonly to: number;
  readonly hits: readonly FaultRule[];
  readonly outages: boolean;
  readonly isTrial: boolean;
  readonly worker: number;
  readonly known: readonly ModelEntry[];
}

/** Of a world that has none. */
export const NO_FAULTS: ReturnType<World['faultsLeft']> = new Map();

/** The engine itself ended the reply, at an EOS or a stop token. */
export function endsAtToken({ ask: { body }, right: { substance } }: Planned): boolean {
  const last = substance?.outputIds.at(-1);
  const stops = body['stop_token_ids'];
  return (last === EOS && body['ignore_eos'] !== true) || (Array.isArray(stops) && stops.includes(last));
}

const EOS = 257;

/** The last token was the last one that was allowed. */
export function isFull({ ask, right: { substance } }: Planned, engine: WorldOptions['engine']): boolean {
  const prompt = substance?.promptIds.length ?? 0;
  const output = substance?.outputIds.length ?? 0;
  return output >= Number(ask.body['max_tokens']) || prompt + output >= (engine.maxModelLen ?? 0);
}

/** Tokens of a turn, and how many of them its handle names. */
export function leftBy(
  turn: Planned,
  engine: WorldOptions['engine'],
): { readonly tokens: readonly number[]; readonly stored: number } {
  const { substance } = turn.right;
  if (substance === undefined) return { tokens: [], stored: 0 };
  const tokens = [...substance.promptIds, ...substance.outputIds];
  const { asyncScheduling, speculativeTokens: drafts = 0, maxModelLen = 0 } = engine;
  if (drafts > 0) return { tokens, stored: Math.min(tokens.length + drafts, maxModelLen) };
  // The engine has begun one more step when it finds the EOS, unless that was the last token it might give.
  const whole = asyncScheduling === true && endsAtToken(turn) && !isFull(turn, engine);
  return { tokens, stored: tokens.length - (whole ? 0 : 1) };
}

/** Outcome of a turn that names no conversation. */
export function unnamedOutcome({ isLocal, continues }: TurnFacts): string {
  if (!continues) return 'none';
  return isLocal ? 'decode_local' : 'miss_never';
}

/** The conversation as the model and the store name it. */
export function keyOf({ tenant, model, salt, conversation }: Voice): ModelKey {
  return { tenant: tenantOf(tenant), model, adapter: adapterOf(model), salt, conversation };
}

/** One string per conversation. */
export function keyTextOf(key: ModelKey): string {
  return JSON.stringify([key.tenant, key.model, key.salt, key.conversation]);
}

/** The same of a voice. */
export function keyText(voice: Voice): string {
  return keyTextOf(keyOf(voice));
}

/** Sends a request and reads the whole reply; a client in a hurry leaves. */
export async function send(
  url: string,
  body: unknown,
  headers: Readonly<Record<string, string>>,
  leaveAfterMs: number | undefined,
): Promise<Sent> {
  const client = new AbortController();
  const timer = leaveAfterMs === undefined ? undefined : setTimeout(() => client.abort(), leaveAfterMs);
  try {
    const reply = await fetch(url, {
      method: 'POST',
      body: JSON.stringify(body),
      headers: { 'content-type': 'application/json', ...headers },
      signal: client.signal,
    });
    return { kind: 'reply', status: reply.status, headers: reply.headers, text: await reply.text() };
  } catch (error) {
    if (client.signal.aborted) return { kind: 'left' };
    throw error;
  } finally {
    clearTimeout(timer);
  }
}

/** Tokens of a prompt that an engine refuses to answer. */
export async function tokensOf(url: string, { body, path }: TurnAsk): Promise<readonly number[]> {
  const { model, messages, tools, prompt, chat_template_kwargs } = body as Record<string, unknown>;
  if (Array.isArray(prompt)) return prompt as number[];
  const part = path.includes('chat') ? { model, messages, tools, chat_template_kwargs } : { model, prompt };
  const reply = await send(`${url}/tokenize`, part, {}, undefined);
  if (reply.kind !== 'reply' || reply.status !== 200) return [];
  return (JSON.parse(reply.text) as { tokens: number[] }).tokens;
}
