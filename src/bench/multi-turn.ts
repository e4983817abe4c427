import { randomBytes } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';
import { Agent } from 'undici';
import { type Chance, drawBetween, seededChance } from './chance.ts';
import { type Conversation, type ConversationInput, makeUp, readConversations } from './conversations.ts';
import { BYTES_PER_TOKEN } from './dataset.ts';
import { type Endpoint, findModel } from './endpoint.ts';
import type { MultiTurnSettings } from './multi-turn-settings.ts';
import { type Sample, send } from './send.ts';
import type { ServeRun } from './serve.ts';

/** A message as it goes over the wire. */
interface Message {
  readonly role: 'user' | 'assistant';
  readonly content: string;
}

/** One measured turn. */
export interface TurnRecord {
  /** As it was sent. */
  readonly conversation: string;
  readonly client: number;
  /** From 1. */
  readonly turn: number;
  /** In the request. */
  readonly messages: number;
  /** Tokens of the history, as far as the turn before told them. */
  readonly historyTokens: number;
  readonly sample: Sample;
}

/** What was seen. */
export interface MultiTurnOutcome {
  readonly model: string;
  readonly conversations: number;
  /** Successful turns in the order of their start. */
  readonly turns: readonly TurnRecord[];
  /** One sentence for each request that failed. */
  readonly errors: readonly string[];
  /** Conversations as they were held, failed ones as far as they went. */
  readonly held: readonly { readonly id: string; readonly messages: readonly Message[] }[];
  readonly warmupMs: number | undefined;
  readonly busy: number;
}

/** Holds all conversations. Rejects with a sentence where nothing can be measured. */
export async function runMultiTurn(settings: MultiTurnSettings, run: ServeRun): Promise<MultiTurnOutcome> {
  const input = readConversations(settings.input);
  const dispatcher = new Agent({ headersTimeout: 0, bodyTimeout: 0 });
  try {
    // baton tells its plan; others leave the header alone.
    const headers = { 'x-baton-debug': '1', ...settings.headers };
    const endpoint = { baseUrl: settings.baseUrl, headers, dispatcher };
    const model = await findModel(endpoint, settings.model, run.signal);
    const conversations = await conversationsOf(input, settings, endpoint, model, run.signal);
    return await new MultiTurn(settings, run, endpoint, model).hold(conversations);
  } finally {
    await dispatcher.destroy();
  }
}

/** Characters of the text from which an endpoint's tokens are found out. */
const TRIED = [400, 1200] as const;

async function conversationsOf(
  input: ConversationInput,
  settings: MultiTurnSettings,
  endpoint: Endpoint,
  model: string,
  signal: AbortSignal,
): Promise<readonly Conversation[]> {
  const text = input.kind === 'list' ? 'hello' : input.plan.text;
  const tokens: (number | undefined)[] = [];
  for (const length of input.kind === 'list' ? [5] : TRIED) {
    // Its end: made-up conversations begin with its start, which no engine shall know yet.
    const messages: readonly Message[] = [{ role: 'user', content: text.slice(-length) }];
    const { error, inputTokens } = await send(callOf(settings, endpoint, model, messages, 1), signal);
    if (error !== undefined) throw new Error(`the first request failed: ${error}`);
    tokens.push(inputTokens);
  }
  if (input.kind === 'list') return input.conversations;
  const [few = 0, many = 0] = tokens;
  const perToken = (Math.min(TRIED[1], text.length) - Math.min(TRIED[0], text.length)) / (many - few);
  return makeUp(input.plan, settings.seed, Number.isFinite(perToken) && perToken > 0 ? perToken : BYTES_PER_TOKEN);
}

function callOf(
  settings: MultiTurnSettings,
  { baseUrl, headers, dispatcher }: Endpoint,
  model: string,
  messages: readonly Message[],
  maxTokens: number | undefined,
  conversation?: string,
) {
  // A long answer may take longer than the limit: 200 ms a token.
  const timeoutMs = Math.max(settings.timeoutMs, (maxTokens ?? 0) * 200);
  return {
    url: `${baseUrl}/v1/chat/completions`,
    headers: { ...headers, ...(conversation === undefined ? {} : { 'x-session-id': conversation }) },
    timeoutMs,
    dispatcher,
    body: {
      model,
      messages,
      stream: true,
      // Without a tokenizer of its own the client counts what the endpoint tells.
      stream_options: { include_usage: true },
      ...(maxTokens === undefined ? {} : { max_tokens: maxTokens }),
      ...(conversation === undefined ? {} : { conversation_id: conversation }),
    },
  };
}

/** A conversation that is held. */
class Held {
  /** As it is sent. */
  readonly id: string;
  readonly inputId: string;
  readonly messages: Message[] = [];
  readonly #conversation: Conversation;
  turn = 0;
  /** Of prompt and answer of the last turn. */
  tokens = 0;

  constructor(conversation: Conversation, run: string) {
    this.#conversation = conversation;
    this.inputId = conversation.id;
    this.id = `${conversation.id}-${run}`;
  }

  /** The turn that comes next; undefined at the end. */
  next(maxTurns: number | undefined) {
    return maxTurns !== undefined && this.turn * 2 >= maxTurns ? undefined : this.#conversation.turns[this.turn];
  }

  count(maxTurns: number | undefined): number {
    const all = this.#conversation.turns.length;
    return (maxTurns === undefined ? all : Math.min(all, Math.ceil(maxTurns / 2))) - this.turn;
  }
}

class MultiTurn {
  readonly #settings: MultiTurnSettings;
  readonly #run: ServeRun;
  readonly #endpoint: Endpoint;
  readonly #model: string;
  /** No name of an earlier run: a router may still remember those. */
  readonly #name = randomBytes(4).toString('hex');
  #records: TurnRecord[] = [];
  readonly #errors: string[] = [];

  constructor(settings: MultiTurnSettings, run: ServeRun, endpoint: Endpoint, model: string) {
    this.#settings = settings;
    this.#run = run;
    this.#endpoint = endpoint;
    this.#model = model;
  }

  async hold(conversations: readonly Conversation[]): Promise<MultiTurnOutcome> {
    const { clients, activeConversations, warmupStep, maxTurns, maxRequests, earlyStop } = this.#settings;
    if (conversations.length < activeConversations) {
      throw new Error(`${conversations.length} conversations are too few for ${activeConversations} at a time`);
    }
    const all = conversations.map((conversation) => new Held(conversation, this.#name));
    let warmupMs: number | undefined;
    if (warmupStep) {
      this.#run.tell(`warming up: the first turn of ${all.length} conversations`);
      const startMs = performance.now();
      await this.#holdAll(all, { maxTurns: 1, active: 1, requests: Number.POSITIVE_INFINITY, earlyStop: false });
      warmupMs = performance.now() - startMs;
      this.#records = [];
    }
    const left = all.reduce((count, held) => count + held.count(maxTurns), 0);
    const total = Math.min(left, maxRequests ?? left);
    this.#run.tell(`holding ${all.length} conversations with ${clients} clients, model ${this.#model}`);
    const loop = performance.eventLoopUtilization();
    await this.#holdAll(all, {
      maxTurns,
      active: Math.floor(activeConversations / clients),
      requests: maxRequests === undefined ? Number.POSITIVE_INFINITY : Math.floor(maxRequests / clients),
      earlyStop,
      total,
    });
    return {
      model: this.#model,
      conversations: all.length,
      turns: this.#records.toSorted((a, b) => a.sample.startMs - b.sample.startMs),
      errors: this.#errors,
      held: all.map(({ inputId, messages }) => ({ id: inputId, messages })),
      warmupMs,
      busy: performance.eventLoopUtilization(loop).utilization,
    };
  }

  async #holdAll(all: readonly Held[], limits: Limits): Promise<void> {
    const bar = limits.total === undefined || limits.total === 0 ? undefined : this.#run.bar(limits.total);
    const waiting = all.filter((held) => held.next(limits.maxTurns) !== undefined);
    const shared = { waiting, isOver: false };
    await Promise.all(
      Array.from({ length: this.#settings.clients }, async (_, client) => {
        await this.#client(client, shared, limits, (failed) => bar?.step(failed));
        // With fewer clients it would be another load.
        if (limits.earlyStop) shared.isOver = true;
      }),
    );
    bar?.end();
  }

  async #client(
    client: number,
    shared: { readonly waiting: Held[]; readonly isOver: boolean },
    limits: Limits,
    onDone: (failed: boolean) => void,
  ): Promise<void> {
    const { rate, seed, sampling } = this.#settings;
    const { signal } = this.#run;
    const chance = seededChance(seed + client + 1);
    const active: Held[] = [];
    for (let requests = 0; requests < limits.requests && !shared.isOver && !signal.aborted; requests++) {
      while (active.length < limits.active && shared.waiting.length > 0) {
        const next = shared.waiting.shift();
        if (next !== undefined) active.push(next);
      }
      const at = sampling === 'random' && active.length > 0 ? drawBetween(chance, 0, active.length - 1) : 0;
      const [held] = active.splice(at, 1);
      if (held === undefined) return;
      const startMs = performance.now();
      const done = await this.#turn(client, held, limits, chance);
      if (signal.aborted && !done) return;
      onDone(!done);
      if (done && held.next(limits.maxTurns) !== undefined) active.push(held);
      if (rate > 0) {
        const meanMs = 1000 / rate - (performance.now() - startMs);
        if (meanMs > 0) await this.#pause(-Math.log(1 - chance()) * meanMs);
      }
    }
  }

  /** Asks the next question of a conversation; false when that failed for good. */
  async #turn(client: number, held: Held, { maxTurns }: Limits, chance: Chance): Promise<boolean> {
    const { maxTokens, sendConversationId, maxRetries, verifyOutput } = this.#settings;
    const next = held.next(maxTurns);
    if (next === undefined) return true;
    const messages: readonly Message[] = [...held.messages, { role: 'user', content: next.question }];
    const tokens = maxTokens === 0 ? next.answerTokens : maxTokens;
    const name = sendConversationId ? held.id : undefined;
    const call = callOf(this.#settings, this.#endpoint, this.#model, messages, tokens, name);
    for (let attempt = 0; ; attempt++) {
      const sample = await send(call, this.#run.signal);
      const error = sample.error ?? (verifyOutput ? differs(next.answer, sample.text) : undefined);
      if (error === undefined) {
        const { id, turn, tokens: historyTokens } = held;
        this.#records.push({
          conversation: id,
          client,
          turn: turn + 1,
          messages: messages.length,
          historyTokens,
          sample,
        });
        held.messages.push(...messages.slice(-1), { role: 'assistant', content: sample.text });
        held.turn += 1;
        held.tokens = (sample.inputTokens ?? 0) + sample.outputTokens;
        return true;
      }
      if (this.#run.signal.aborted) return false;
      this.#errors.push(error);
      if (attempt >= maxRetries) return false;
      await this.#pause(1000 * 2 ** attempt * (0.9 + chance() * 0.2));
    }
  }

  async #pause(ms: number): Promise<void> {
    await sleep(ms, undefined, { signal: this.#run.signal }).catch(() => undefined);
  }
}

/** What one pass over the conversations may do. */
interface Limits {
  readonly maxTurns: number | undefined;
  /** Conversations of a client at a time. */
  readonly active: number;
  /** Requests of a client. */
  readonly requests: number;
  readonly earlyStop: boolean;
  /** What a bar counts to; absent: no bar. */
  readonly total?: number;
}

function differs(expected: string | undefined, text: string): string | undefined {
  return expected === undefined || expected === text ? undefined : 'the answer is not that of the file';
}
