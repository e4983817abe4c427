import { readFileSync } from 'node:fs';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { z } from 'zod';
import { readSubstance } from '../long/reuse-reply.ts';
import { chatWithPlan } from '../support/conversation.ts';
import { type Harness, post, startHarness } from '../support/harness.ts';
import { HistoryModel } from '../support/history-model.ts';
import { storedTurns } from '../support/stored-turns.ts';

// What a chat UI does with an OpenAI server, from a table of its requests. Outcome, tokens read and tokens computed of each
// request are those of the test's own model.

const Step = z.strictObject({
  do: z.enum([
    'ask',
    'regenerate',
    'edit',
    'edit_reply',
    'continue',
    'title',
    'tags',
    'follow_ups',
    'query',
    'results',
  ]),
  as: z.string().optional(),
  after: z.string().nullable().optional(),
  of: z.string().optional(),
  text: z.string().default(''),
  expect: z.string(),
});
const Fixture = z.strictObject({
  about: z.string(),
  quoted: z.record(z.string(), z.number()),
  task_tokens: z.number(),
  cases: z.array(
    z.strictObject({
      name: z.string(),
      system: z.string().optional(),
      tools: z.array(z.string()).default([]),
      steps: z.array(Step),
    }),
  ),
});
type Step = z.infer<typeof Step>;

const fixture = Fixture.parse(JSON.parse(readFileSync(new URL('../fixtures/chat-ui.json', import.meta.url), 'utf8')));
const BLOCK = 16;
/** A prefill engine pulls no fewer tokens than these. */
const LEAST = 64;

interface Message {
  readonly role: 'system' | 'user' | 'assistant' | 'tool';
  readonly content: string;
  readonly tool_calls?: readonly unknown[];
  readonly tool_call_id?: string;
}

/** A reply in the tree of a chat, with what was asked for it. */
interface Node {
  readonly messages: readonly Message[];
  readonly reply: string;
}

let harness: Harness;
let model: HistoryModel;
let stored = 0;
/** What the prefill engine's own prefix cache holds. */
const prompts: (readonly number[])[] = [];
beforeAll(async () => {
  harness = await startHarness({
    prefill: 1,
    decode: 1,
    engine: { bidirectional: true, blockSize: BLOCK, eosEvery: 0, numBlocks: 40_000, defaultMaxTokens: 90 },
    yaml: 'pools: {prefill: {bidirectional: on}}\ntimeouts: {store: 5s, tokenize: 5s}\n',
  });
  await harness.ready();
  model = new HistoryModel();
});
afterAll(async () => {
  await harness?.[Symbol.asyncDispose]();
});

test.each(fixture.cases)('$name', async ({ system, tools, steps }) => {
  const nodes = new Map<string, Node>();
  const start: readonly Message[] = system === undefined ? [] : [{ role: 'system', content: system }];
  for (const [index, step] of steps.entries()) {
    const { body, isChat } = requestOf(step, nodes, { start, tools }, index);
    if (body === undefined) continue;
    const { outcome, reply } = await send(body, `${step.do} ${step.as ?? step.of}`);
    expect(outcome, JSON.stringify(step)).toBe(step.expect);
    if (!isChat || step.as === undefined) continue;
    // What is continued becomes one reply.
    const of = step.do === 'continue' ? nodes.get(step.of ?? '') : undefined;
    nodes.set(step.as, of === undefined ? { messages: body.messages, reply } : { ...of, reply: of.reply + reply });
  }
});

describe('afterwards', () => {
  test('nothing was read that should not have been', () => {
    for (const sim of [...harness.prefill, ...harness.decode]) {
      const state = { mismatchedPulls: 0, doubleReads: 0, expiredReads: 0, leakedPins: 0, hung: 0 };
      expect(sim.state()).toMatchObject(state);
    }
  });
});

interface Body {
  readonly model: string;
  readonly messages: readonly Message[];
  readonly stream: boolean;
}

/** The request of one step; none where only what the UI shows is changed. */
function requestOf(
  step: Step,
  nodes: Map<string, Node>,
  { start, tools }: { readonly start: readonly Message[]; readonly tools: readonly string[] },
  seed: number,
): { readonly body: Body | undefined; readonly isChat: boolean } {
  const of = nodes.get(step.of ?? step.after ?? '') ?? { messages: start, reply: '' };
  const history = of.messages.length === start.length ? start : [...of.messages, assistant(of.reply)];
  const chat = (messages: readonly Message[]) => ({
    body: {
      model: 'sim-model',
      messages,
      stream: true,
      temperature: 0.8,
      seed,
      ...(tools.length === 0 ? {} : { tools: tools.map((name) => ({ type: 'function', function: { name } })) }),
    },
    isChat: true,
  });
  switch (step.do) {
    case 'ask':
      return chat([...history, user(step.text)]);
    case 'regenerate':
      return chat(of.messages);
    case 'edit':
      return chat([...of.messages.slice(0, -1), user(step.text)]);
    case 'results': {
      const calls = tools.map((name, i) => ({
        id: `call-${i}`,
        type: 'function',
        function: { name, arguments: '{}' },
      }));
      const results = calls.map(({ id }): Message => ({ role: 'tool', tool_call_id: id, content: step.text }));
      return chat([...of.messages, { ...assistant(''), tool_calls: calls }, ...results]);
    }
    case 'continue':
      return chat(history);
    case 'edit_reply':
      nodes.set(step.as ?? '', { ...of, reply: step.text });
      return { body: undefined, isChat: false };
    default: {
      const asked = step.text === '' ? history : [...history, user(step.text)];
      const messages = [...start, user(quote(step.do, asked.slice(start.length)))];
      const task = { model: 'sim-model', messages, stream: false, max_completion_tokens: fixture.task_tokens };
      return { body: task, isChat: false };
    }
  }
}

const user = (content: string): Message => ({ role: 'user', content });
const assistant = (content: string): Message => ({ role: 'assistant', content });

/** The last messages in one, behind what is to be done with them. */
function quote(task: string, messages: readonly Message[]): string {
  const lines = messages
    .slice(-(fixture.quoted[task] ?? 0))
    .map(({ role, content }) => `${role.toUpperCase()}: ${content}`);
  return `Task: ${task} for the talk below. Answer with JSON and nothing else.\n<talk>\n${lines.join('\n')}\n</talk>`;
}

/** One request; the answer is a plain engine's, and what it cost is what the model says. */
async function send(body: Body, what: string): Promise<{ readonly outcome: string; readonly reply: string }> {
  const right = await post(`${harness.plain.url}/v1/chat/completions`, { ...body, return_token_ids: true });
  const { promptIds, outputIds, text } = readSubstance(right.text, body.stream);
  const expected = model.take(body.messages, promptIds);
  const before = harness.prefill[0]?.state().localCompute ?? 0;
  const reply = await chatWithPlan(harness.url, body);
  expect(reply.status, reply.text).toBe(200);
  expect(readSubstance(reply.text, body.stream).text, what).toBe(text);
  const plan = reply.headers.get('x-baton-plan') ?? '';
  const computed = (harness.prefill[0]?.state().localCompute ?? 0) - before;
  const seen = {
    outcome: /outcome=(\w+)/.exec(plan)?.[1] ?? '',
    matched: Number(/matched=(\d+)/.exec(plan)?.[1] ?? 0),
    computed,
  };
  expect(seen, what).toEqual({ ...expected, computed: computes(promptIds, expected.matched) });
  prompts.push(promptIds);
  model.put(body.messages, [...promptIds, ...outputIds]);
  stored += 1;
  await storedTurns(harness.adminUrl, stored);
  return { outcome: seen.outcome, reply: text };
}

/** Tokens that the prefill engine has neither in full blocks of its own nor reads. */
function computes(prompt: readonly number[], matched: number): number {
  const held = Math.max(0, ...prompts.map((other) => commonBlocks(prompt, other)));
  const wanted = matched - held;
  return prompt.length - (wanted >= LEAST ? matched : held);
}

function commonBlocks(a: readonly number[], b: readonly number[]): number {
  let equal = 0;
  while (equal < a.length - 1 && equal < b.length && a[equal] === b[equal]) equal += 1;
  return equal - (equal % BLOCK);
}
