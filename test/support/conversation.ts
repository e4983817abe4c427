import { expect } from 'vitest';
import type { Sim } from '../../src/sim/start-sim.ts';
import { contentOf, post, type Reply } from './harness.ts';

interface Message {
  readonly role: string;
  readonly content: string;
}

/** A conversation of one client: what was said, and how its turns went. */
export class Conversation {
  readonly id: string;
  /** What `x-baton-plan` said of each turn's reuse. */
  readonly outcomes: string[] = [];
  readonly #stream: boolean;
  readonly #plain: Sim;
  #messages: readonly Message[];

  /** `plain` is one engine that does everything itself: every answer must equal its. */
  constructor(id: string, options: { readonly stream: boolean; readonly plain: Sim }) {
    this.id = id;
    this.#stream = options.stream;
    this.#plain = options.plain;
    this.#messages = [{ role: 'user', content: `${id} `.repeat(30) }];
  }

  /** One turn; resolves with its outcome. */
  async turn(send: (body: unknown) => Promise<Reply>): Promise<string> {
    const body = {
      model: 'sim-model',
      messages: this.#messages,
      max_tokens: 24,
      ignore_eos: true,
      stream: this.#stream,
    };
    const reply = await send({ ...body, conversation_id: this.id });
    expect(reply.status, reply.text).toBe(200);
    const { texts, done } = contentOf(reply.text);
    const right = contentOf((await post(`${this.#plain.url}/v1/chat/completions`, body)).text);
    expect({ texts, done }).toEqual({ texts: right.texts, done: right.done });
    const outcome = /outcome=(\w+)/.exec(reply.headers.get('x-baton-plan') ?? '')?.[1] ?? 'untold';
    this.outcomes.push(outcome);
    const [text = ''] = texts;
    this.#messages = [...this.#messages, { role: 'assistant', content: text }, { role: 'user', content: 'And then?' }];
    return outcome;
  }
}

/** A chat request whose reply tells how it was planned. */
export function chatWithPlan(base: string, body: unknown): Promise<Reply> {
  return post(`${base}/v1/chat/completions`, body, { headers: { 'x-baton-debug': '1' } });
}
